"""Print the files of accum whose functions run while `fit` trains on one batch: the way of a batch.

    python scripts/dev/way_of_a_batch.py [--whole-batch all]

Prints one path per line, those of the engine and of the Keras API first, and below them those of `accum/_tf`, which
only answer questions about TensorFlow. `tests/test_way_of_a_batch.py` limits how many there are.
"""

import argparse
import os
import sys
import threading

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)

PACKAGE = "accum."


class Profile:
    """The modules of accum whose functions are called in this context, in any thread, in order of the first call."""

    def __init__(self):
        self.modules = {}  # name -> None

    def __enter__(self):
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *exception):
        sys.setprofile(None)
        threading.setprofile(None)

    def _on_event(self, frame, event, argument):
        # Functions that AutoGraph has converted stand in other files, but keep their globals.
        name = frame.f_globals.get("__name__") or ""
        if event == "call" and name.startswith(PACKAGE) and frame.f_code.co_name != "<module>":
            self.modules[name] = None

    def paths(self):
        """The files of the modules, relative to the root of the repository."""
        files = [sys.modules[name].__file__ for name in self.modules if name in sys.modules]
        return [os.path.relpath(file, ROOT).replace(os.sep, "/") for file in files]


def fit_one_batch(whole_batch="all"):
    """Train a small model with batch normalisation on one batch. Returns the paths of the files that this enters."""
    import numpy as np
    import tensorflow as tf

    import accum

    inputs = tf.keras.Input([3])
    hidden = tf.keras.layers.BatchNormalization()(tf.keras.layers.Dense(4)(inputs))
    outputs = tf.keras.layers.Dense(1)(tf.keras.layers.ReLU()(hidden))
    model = accum.GradientAccumulateModel(inputs=inputs, outputs=outputs, micro_batch_size=2, whole_batch=whole_batch)
    model.compile("sgd", "mse")
    x = np.arange(24, dtype="float32").reshape(8, 3)
    with Profile() as profile:
        model.fit(x, x[:, :1], batch_size=8, epochs=1, verbose=0)
    return profile.paths()


def is_of_versions(path):
    return path.startswith("accum/_tf/")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--whole-batch", default="all", help="the model's `whole_batch`")
    paths = fit_one_batch(parser.parse_args().whole_batch)
    for path in sorted(paths, key=is_of_versions):
        print(path)
    questions = sum(map(is_of_versions, paths))
    print("%d files, and %d of accum/_tf" % (len(paths) - questions, questions))


if __name__ == "__main__":
    main()
