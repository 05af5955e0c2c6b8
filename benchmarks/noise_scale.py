"""What `NoiseScaleScheduler` saves on real data, and where it saves nothing.

    python benchmarks/noise_scale.py [--seeds 5] [--epochs 30]

A network of two convolutions and a dense layer learns the 1,797 handwritten digits of `python -m accum demo`, in
micro-batches of 8. Counted are the updates and the examples until the loss on the test data is first at most that of a
bar, at the end of an epoch. On several devices, updates are what costs time; on one, examples are.
"""

import argparse
import sys
import warnings

import numpy as np

BATCH, BARS = 8, (0.3, 0.2, 0.15)
RUNS = {"always 2 x 8": (2, None), "always 16 x 8": (16, None), "2 x 8 to 16 x 8 by noise": (2, 16)}


def network(tf):
    layers = tf.keras.layers
    x = inputs = tf.keras.Input((8, 8, 1))
    for filters, stride in ((16, 1), (32, 2)):
        x = layers.Conv2D(filters, 3, strides=stride, padding="same", activation="tanh")(x)
    x = layers.Dense(64, activation="tanh")(layers.Flatten()(x))
    return tf.keras.Model(inputs, layers.Dense(10)(x))


def train(tf, accum, name, seed, epochs):
    """Returns, at the end of each epoch: the loss on the test data, the updates and the examples so far, and K."""
    from accum._cli.demo.data import load

    training, test = load(seed)
    accum_steps, most = RUNS[name]
    tf.random.set_seed(seed)
    model = accum.GradientAccumulateModel.from_model(network(tf), accum_steps=accum_steps)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.SGD(0.1), loss=loss)
    options = {"batch_size": BATCH, "epochs": epochs, "verbose": 0, "validation_data": (test.images, test.labels)}
    logger = accum.NoiseScaleScheduler(most, verbose=0) if most else accum.StepLogger(verbose=0)
    history = model.fit(training.images, training.labels, callbacks=[logger], **options).history
    lengths = history.get("accum_steps", [accum_steps] * epochs)
    batches = -(-len(training.labels) // BATCH)
    updates = np.cumsum([-(-batches // length) for length in lengths])
    assert updates[-1] == int(model.optimizer.iterations.numpy())
    return history["val_loss"], updates, len(training.labels) * np.arange(1, epochs + 1), lengths


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=30)
    arguments = parser.parse_args()
    import tensorflow as tf

    import accum

    warnings.simplefilter("ignore")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    print("| | " + " | ".join(f"to a loss of {bar}" for bar in BARS) + " | K at the end |")
    print("|---|" + "---|" * (len(BARS) + 1))
    for name in RUNS:
        reached, ends = [], []
        for seed in range(arguments.seeds):
            losses, updates, examples, lengths = train(tf, accum, name, seed, arguments.epochs)
            at = [next((n for n, loss in enumerate(losses) if loss <= bar), None) for bar in BARS]
            reached.append([(np.inf, np.inf) if n is None else (updates[n], examples[n]) for n in at])
            ends.append(lengths[-1])
            print(name, seed, lengths, ["%.3f" % loss for loss in losses[::5]], file=sys.stderr)
        cells = [
            f"{pair[0]:,.0f} updates, {pair[1] / 1000:,.0f}k examples" if np.isfinite(pair).all() else "not reached"
            for pair in np.median(np.array(reached, dtype=float), axis=0)
        ]
        print(f"| {name} | " + " | ".join(cells) + f" | {np.median(ends):.0f} |")


if __name__ == "__main__":
    main()
