"""Train the model of a case with accumulation, and plainly at the full batch."""

import contextlib
import os
import tempfile

import numpy as np
import tensorflow as tf
from exceptions import IS_KERAS_3
from replicas import mirrored

import accum
from prover import models
from prover.fed import Deviation

TOLERANCE = 2e-6, 2e-5
"""Without and with barriers, for weights of order 1."""
ROUNDING = 8.0
"""How far ours may be away, in multiples of what another order of the examples changes in the plain run."""


def check(case):
    """Raise `Deviation` unless the weights after each cycle are those of the full batch."""
    with _precision(case["precision"]):
        batches = models.batches_of(case)
        plain, reordered = _plain(case, batches, 1), _plain(case, batches, -1)
        ours, clock = _ours(case, batches)
    if clock != len(batches):
        raise Deviation(f"law L3: {clock} steps were counted, not {len(batches)}")
    least = TOLERANCE["whole_batch" in case["options"]]
    for cycle, (mine, whole, near) in enumerate(zip(ours, plain, reordered)):
        for number, (one, other, another) in enumerate(zip(mine, whole, near)):
            allowed = least * np.maximum(1.0, np.abs(other)) + ROUNDING * np.abs(other - another).max()
            if not (np.abs(one - other) <= allowed).all():
                raise Deviation(f"law L1: after cycle {cycle}, weight {number} is {np.abs(one - other).max():.2e} off")


@contextlib.contextmanager
def _precision(name):
    before = tf.keras.backend.floatx()
    tf.keras.backend.set_floatx(name)
    try:
        yield
    finally:
        tf.keras.backend.set_floatx(before)
        tf.keras.backend.clear_session()


def _compiled(case, model):
    optimizer = getattr(tf.keras.optimizers, case["optimizer"])(0.1, **case["arguments"])
    options = {"jit_compile": False} if IS_KERAS_3 else {}
    loss = [models.LOSSES[case["loss"]]() for _ in range(case["outputs"])]
    model.compile(optimizer, loss if len(loss) > 1 else loss[0], run_eagerly=not case["is_traced"], **options)
    return model


def _plain(case, batches, order):
    """Return the weights after each cycle of plain Keras, whose batch is the whole cycle, in this or reversed order."""
    model, found = _compiled(case, models.model_of(case)), []
    for cycle in batches:
        whole = _joined(cycle, order)
        _train(model, whole)
        found.append(model.get_weights())
    return found


def _joined(batches, order=1):
    """Return one batch with the examples of all."""
    join = lambda *parts: None if parts[0] is None else np.concatenate(parts)[::order]  # noqa: E731
    return tf.nest.map_structure(join, *batches)


def _train(model, batch):
    x, y, weights = batch
    model.train_on_batch(x, y, **({} if weights is None else {"sample_weight": weights}))


def _new(case):
    return _compiled(case, accum.GradientAccumulateModel.from_model(models.model_of(case), **case["options"]))


def _ours(case, batches):
    if case["replicas"] > 1:
        return _on_replicas(case, batches)
    with tempfile.TemporaryDirectory() as folder:  # Keras restores slots when it creates them
        model, found, count = _new(case), [], 0
        for cycle in batches:
            for batch in cycle:
                _train(model, batch)
                if case["resume"] == count:
                    model = _resumed(case, model, os.path.join(folder, "run"))
                count += 1
            found.append(model.get_weights())
        return found, int(model.optimizer.iterations)


def _resumed(case, model, path):
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(path)
    model = _new(case)
    model.set_weights([np.zeros_like(weight) for weight in model.get_weights()])
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(path)
    return model


class _AfterCycles(tf.keras.callbacks.Callback):
    def __init__(self, steps):
        super().__init__()
        self.found, self._steps = [], steps

    def on_train_batch_end(self, batch, logs=None):
        if (batch + 1) % self._steps == 0:
            self.found.append(self.model.get_weights())


def _on_replicas(case, batches):
    flat = [batch for cycle in batches for batch in cycle]
    data = tuple(part for part in _joined(flat) if part is not None)
    data = (data[0], tuple(data[1]) if isinstance(data[1], list) else data[1]) + data[2:]
    data = tf.data.Dataset.from_tensor_slices(data).batch(case["cycles"][0][0])
    with mirrored().scope():
        model = _new(case)
    after = _AfterCycles(len(case["cycles"][0]))
    model.fit(data, verbose=0, callbacks=[after])
    return after.found, int(model.optimizer.iterations)
