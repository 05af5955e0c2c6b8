"""What micro-batches by tokens save: a small transformer on sequences of unequal lengths (law L18).

    python benchmarks/tokens.py --steps 20

One process, two models of the same network, whose steps alternate: one has micro-batches of equally many examples, the
other of equally many tokens. Both have the same number of padded tokens in a micro-batch. Prints the median processor
time of a step of each, the median of the ratios of neighbouring steps, and how many tokens are computed.
"""

import argparse
import json
import os
import statistics
import sys
import time

sys.path[:1] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import accum  # noqa: E402
from accum._keras._tokens._budget import plan_of  # noqa: E402

WORDS, WIDTH, LONGEST = 1000, 128, 128


def network(rate):
    layers = tf.keras.layers
    inputs = tf.keras.Input((None,), dtype="int32")
    hidden = layers.Embedding(WORDS, WIDTH, mask_zero=True)(inputs)
    for _ in range(2):
        attended = layers.MultiHeadAttention(4, WIDTH // 4)(hidden, hidden)
        hidden = layers.LayerNormalization()(layers.Add()([hidden, layers.Dropout(rate)(attended)]))
        wide = layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="gelu")(hidden))
        hidden = layers.LayerNormalization()(layers.Add()([hidden, layers.Dropout(rate)(wide)]))
    return tf.keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(hidden)))


def texts(count):
    """Return padded token ids, int32 [count, LONGEST], and their lengths, which are log-normal: the median is 20."""
    random = np.random.RandomState(0)
    lengths = np.clip(random.lognormal(3.0, 0.7, size=count).astype(int), 2, LONGEST)
    lengths[0] = LONGEST
    is_token = np.arange(LONGEST)[None] < lengths[:, None]
    return np.where(is_token, random.randint(1, WORDS, size=is_token.shape), 0).astype("int32"), lengths


def stepper(rate, x, y, is_compiled, **options):
    model = accum.GradientAccumulateModel.from_model(network(rate), **options)
    model.compile("adam", "mse", **({"jit_compile": is_compiled} if hasattr(model, "jit_compile") else {}))
    model.train_on_batch(x, y)  # traces

    def step():
        begin = time.process_time()
        model.train_on_batch(x, y)
        return time.process_time() - begin

    return step


def computed_tokens(lengths, budget, has_few_shapes):
    longest = tf.constant(LONGEST) if has_few_shapes else None
    plan = plan_of(tf.constant(lengths, tf.int32), budget, longest)
    return int(tf.reduce_sum(plan.sizes * plan.lengths))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8 * LONGEST)
    parser.add_argument("--rate", type=float, default=0.0, help="of dropout")
    parser.add_argument("--xla", action="store_true", help="compile: the first step takes minutes")
    arguments = parser.parse_args()
    x, lengths = texts(arguments.batch_size)
    y = np.random.RandomState(1).normal(size=(arguments.batch_size, 1)).astype("float32")
    by = {"tokens": {"micro_batch_tokens": arguments.tokens}, "size": {"micro_batch_size": arguments.tokens // LONGEST}}
    steps = {name: stepper(arguments.rate, x, y, arguments.xla, **options) for name, options in by.items()}
    times = {name: [] for name in steps}
    for number in range(arguments.steps):
        for name in ("tokens", "size") if number % 2 else ("size", "tokens"):
            times[name].append(steps[name]())
    ratios = [ours / theirs for ours, theirs in zip(times["tokens"], times["size"])]
    result = {
        "tensorflow": tf.__version__,
        "dropout": arguments.rate,
        "xla": arguments.xla,
        "by_tokens_ms": 1000 * statistics.median(times["tokens"]),
        "by_size_ms": 1000 * statistics.median(times["size"]),
        "ratio": statistics.median(ratios),
        "computed_by_tokens": computed_tokens(lengths, arguments.tokens, arguments.xla),
        "computed_by_size": arguments.batch_size * LONGEST,
        "tokens": int(lengths.sum()),
        "steps": arguments.steps,
    }
    print(json.dumps({name: round(value, 3) if isinstance(value, float) else value for name, value in result.items()}))


if __name__ == "__main__":
    main()
