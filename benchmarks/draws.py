"""What drawing by example costs: a transformer block with dropout, against draws that are made anew (law L20).

    python benchmarks/draws.py cost --steps 60
    python benchmarks/draws.py figure docs/any-hardware.png

`cost`: one process, two models of the same block, whose steps alternate. Prints the median processor time of a step of
each, and the median of the ratios of neighbouring steps. `figure`: how far the losses of runs that share a batch among
micro-batches are from those of the whole batch, with matplotlib.
"""

import argparse
import contextlib
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
from accum import _tf  # noqa: E402

LENGTH, WIDTH = 32, 128


def block(rate=0.1):
    layers = tf.keras.layers
    inputs = tf.keras.Input((LENGTH, WIDTH))
    attended = layers.MultiHeadAttention(4, WIDTH // 4, dropout=rate)(inputs, inputs)
    hidden = layers.LayerNormalization()(inputs + layers.Dropout(rate)(attended))
    wide = layers.Dense(WIDTH, activation=None)(layers.Dense(4 * WIDTH, activation="gelu")(hidden))
    outputs = layers.LayerNormalization()(hidden + layers.Dropout(rate)(wide))
    return tf.keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(outputs)))


@contextlib.contextmanager
def drawing_anew():
    """Let random operations be as they are while a step is traced."""
    before = _tf.random_ops.replacing
    _tf.random_ops.replacing = lambda replace: contextlib.ExitStack()
    try:
        yield
    finally:
        _tf.random_ops.replacing = before


def stepper(micro_batch_size, anew, x, y):
    model = accum.GradientAccumulateModel.from_model(block(), micro_batch_size=micro_batch_size)
    model.compile("adam", "mse")
    with drawing_anew() if anew else contextlib.ExitStack():
        model.train_on_batch(x, y)  # traces

    def step():
        begin = time.process_time()
        model.train_on_batch(x, y)
        return time.process_time() - begin

    return step


def cost(arguments):
    random = np.random.RandomState(0)
    x = random.normal(size=(arguments.batch_size, LENGTH, WIDTH)).astype("float32")
    y = random.normal(size=(arguments.batch_size, 1)).astype("float32")
    steps = {anew: stepper(arguments.micro_batch_size, anew, x, y) for anew in (False, True)}
    times = {False: [], True: []}
    for number in range(arguments.steps):
        for anew in (False, True) if number % 2 else (True, False):
            times[anew].append(steps[anew]())
    ratios = [ours / theirs for ours, theirs in zip(times[False], times[True])]
    result = {
        "tensorflow": tf.__version__,
        "by_example_ms": 1000 * statistics.median(times[False]),
        "anew_ms": 1000 * statistics.median(times[True]),
        "ratio": statistics.median(ratios),
        "steps": arguments.steps,
    }
    print(json.dumps({name: round(value, 3) if isinstance(value, float) else value for name, value in result.items()}))


BATCH, STEPS = 32, 60
SHARED = {"1 × 32": (1, 32), "4 × 8": (1, 8), "2 batches of 4 × 4": (2, 4), "8 batches of 4": (8, None)}


def losses(accum_steps, micro_batch_size, anew):
    """Return the loss of each step of a small network with dropout of a half, from the same weights and data."""
    random = np.random.RandomState(0)
    x = random.normal(size=(BATCH * STEPS, 16)).astype("float32")
    y = np.tanh(x[:, :1] * x[:, 1:2] + x[:, 2:3]).astype("float32")
    layers = tf.keras.layers
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(1)
    inputs = tf.keras.Input((16,))
    hidden = layers.Dropout(0.5)(layers.Dense(64, "relu")(inputs))
    model = tf.keras.Model(inputs, layers.Dense(1)(layers.Dropout(0.5)(layers.Dense(64, "relu")(hidden))))
    options = {"accum_steps": accum_steps, "micro_batch_size": micro_batch_size}
    model = accum.GradientAccumulateModel.from_model(model, **options)
    model.compile(tf.keras.optimizers.Adam(0.01), "mse")
    tf.keras.utils.set_random_seed(2)
    seen = []
    with drawing_anew() if anew else contextlib.ExitStack():
        for start in range(0, len(x), BATCH // accum_steps):
            model.reset_metrics()
            part = slice(start, start + BATCH // accum_steps)
            seen.append(float(model.train_on_batch(x[part], y[part])))
    return np.mean(np.reshape(seen, [STEPS, accum_steps]), axis=1)


def figure(arguments):
    from matplotlib import pyplot as plt

    whole = {anew: losses(1, BATCH, anew) for anew in (False, True)}
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, constrained_layout=True)
    titles = {True: "Dropout drawn for each micro-batch", False: "Dropout drawn by example"}
    for axis, anew in zip(axes, (True, False)):
        for (name, (accum_steps, size)), style in zip(list(SHARED.items())[1:], ("-", "--", ":")):
            off = np.abs(losses(accum_steps, size, anew) - whole[anew])
            print(titles[anew], name, "largest difference %.1e" % off.max())
            axis.semilogy(np.arange(1, STEPS + 1), np.maximum(off, 1e-9), style, label=name)
        axis.set_title(titles[anew])
        axis.set_xlabel("step")
        axis.set_ylim(1e-9, 3)
        axis.grid(True, which="major", alpha=0.3)
    axes[0].set_ylabel("difference of the loss\nfrom that of 1 × 32")
    axes[0].legend(title="32 examples as", loc="lower right")
    figure.savefig(arguments.path, dpi=150, metadata={"Software": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    costs = commands.add_parser("cost")
    costs.add_argument("--steps", type=int, default=60)
    costs.add_argument("--batch-size", type=int, default=32)
    costs.add_argument("--micro-batch-size", type=int, default=8)
    costs.set_defaults(function=cost)
    figures = commands.add_parser("figure")
    figures.add_argument("path")
    figures.set_defaults(function=figure)
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
