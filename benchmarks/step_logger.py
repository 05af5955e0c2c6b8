"""What `accum.StepLogger` costs: the median time of a batch with it, divided by that without it.

Both models train in turn, in rounds, so that both see whatever else the machine does.

    python benchmarks/step_logger.py --rounds 6
"""

import argparse
import statistics
import time

import numpy as np
import tensorflow as tf

import accum

BATCHES = 14
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
    models, seconds = (model_of(options), model_of(options)), ([], [])
    for number in range(rounds):
        for place in (0, 1) if number % 2 else (1, 0):
            times = Times()
            callbacks = [times] + ([accum.StepLogger(verbose=0)] if place else [])
            models[place].fit(x, y, batch_size=batch_size, verbose=0, callbacks=callbacks)
            seconds[place].extend(times.seconds[SKIPPED:])
    without, with_it = map(statistics.median, seconds)
    print(f"{name}: {1000 * without:.1f} ms without, {1000 * with_it:.1f} ms with it: {with_it / without:.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    rounds = parser.parse_args().rounds
    measure("accum_steps=4, batches of 32", {"accum_steps": 4}, 32, rounds)
    measure("micro_batch_size=32, batches of 128", {"micro_batch_size": 32}, 128, rounds)


if __name__ == "__main__":
    main()
