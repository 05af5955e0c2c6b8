"""What `accum.StepLogger` costs: the median time of a batch with it, divided by that without it.

One model trains with and without it in turn, so that both see whatever else the machine does. Two models that are alike
differ by more than what is measured here. The ratio is the median of the rounds, with the middle half of them.

    python benchmarks/step_logger.py --rounds 16
"""

import argparse
import statistics
import time

import numpy as np
import tensorflow as tf

import accum

BATCHES = 50
SKIPPED = 3  # in each round: they trace, and warm up


class Times(tf.keras.callbacks.Callback):
    """The seconds that each batch takes."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_train_batch_begin(self, batch, logs=None):
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.seconds.append(time.perf_counter() - self._start)


def model_of(options):
    layers = tf.keras.layers
    inputs = tf.keras.Input((32, 32, 3))
    hidden = inputs
    for filters in (32, 64, 128):
        hidden = layers.Conv2D(filters, 3, padding="same", activation="relu")(hidden)
        hidden = layers.MaxPooling2D()(hidden)
    hidden = layers.Dense(256, activation="relu")(layers.Flatten()(hidden))
    model = tf.keras.Model(inputs, layers.Dense(10)(hidden))
    model = accum.GradientAccumulateModel.from_model(model, **options)
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def measure(name, options, batch_size, rounds):
    random = np.random.RandomState(0)
    x = random.normal(size=(BATCHES * batch_size, 32, 32, 3)).astype("float32")
    y = random.randint(10, size=len(x))
    model, seconds = model_of(options), ([], [])
    for number in range(rounds):
        for place in (0, 1) if number % 2 else (1, 0):
            times = Times()
            callbacks = [times] + ([accum.StepLogger(verbose=0)] if place else [])
            model.fit(x, y, batch_size=batch_size, verbose=0, callbacks=callbacks)
            seconds[place].append(times.seconds[SKIPPED:])
    medians = [[statistics.median(part) for part in each] for each in seconds]
    ratios = sorted(with_it / without for without, with_it in zip(*medians))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    milliseconds = 1000 * statistics.median(medians[0])
    print(f"{name}: {milliseconds:.1f} ms; with it {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}) of that")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=16)
    rounds = parser.parse_args().rounds
    measure("accum_steps=4, batches of 32", {"accum_steps": 4}, 32, rounds)
    measure("micro_batch_size=32, batches of 128", {"micro_batch_size": 32}, 128, rounds)


if __name__ == "__main__":
    main()
