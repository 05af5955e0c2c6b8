"""Train the model of a case with accumulation, and plainly at the full batch."""

import contextlib
import os
import tempfile

import numpy as np
import tensorflow as tf
from exceptions import IS_KERAS_3
from replicas import mirrored

import accum
from property_tests import models
from property_tests.cycles import accum_steps
from property_tests.fed import Deviation, alike

TOLERANCE = {"float32": 2e-6, "float64": 2e-6, "barriers": 2e-5, "low": 3e-4}
"""For weights of order 1."""
ROUNDING = 8.0
"""How far ours may be away, in multiples of what another order of the examples changes in the plain run."""


def check(case):
    """Raise `Deviation` unless the weights after each batch are those of the full batches so far."""
    cycles, expected = steps_of(case)
    with _precision(case["precision"]):
        batches = models.batches_of(case)
        plain, reordered = _plain(case, batches, cycles, 1), _plain(case, batches, cycles, -1)
        seen = _ours(case, batches)
    if len(seen) != len(expected):
        raise Deviation(f"law L18: {len(seen)} batches were seen, not {len(expected)}")
    for index, ((made, weights), steps) in enumerate(zip(seen, expected)):
        if made != steps:
            raise Deviation(f"law L3: after batch {index}, {made} steps were counted, not {steps}")
        for number, trio in enumerate(zip(weights, plain[steps], reordered[steps])):
            _compare(case, index, number, *trio)


def _compare(case, index, number, ours, whole, reordered):
    kind = case["precision"] if "whole_batch" not in case["options"] else "barriers"
    kind = "low" if case["precision"] in models.LOW_PRECISION else kind
    with np.errstate(invalid="ignore"):
        spread = np.abs(whole - reordered).max() if whole.size else 0.0
        allowed = TOLERANCE[kind] * np.maximum(1.0, np.abs(whole)) + ROUNDING * spread
        is_near = (np.abs(ours - whole) <= allowed) | alike(ours, whole)
    if not is_near.all():
        off = np.abs(ours - whole).max()
        raise Deviation(f"law L1: after batch {index}, weight {number} is {off:.2e} off")


def steps_of(case):
    """Return the cycles that make a step, as lists of numbers of batches, and how many are made after each batch.

    Cycles without an example make none (law L5), but a model that does not accumulate is plain Keras (law L14), which
    makes a step even then.
    """
    options = dict({"accum_steps": 1, "last_cycle": "flush"}, **case["options"])
    is_passthrough = options["accum_steps"] == 1
    cycles, held, made = [], [], []
    for _ in range(case["epochs"]):
        for number in range(len(case["sizes"])):
            held.append(number)
            is_last = case["how"] == "fit" and number == len(case["sizes"]) - 1
            is_full = len(held) == accum_steps(options, len(cycles))
            is_ended = is_full or (is_last and options["last_cycle"] == "flush")
            if is_ended and (is_passthrough or any(case["sizes"][n] for n in held)):
                cycles.append(held)
            if is_full or (is_last and options["last_cycle"] != "carry"):
                held = []
            made.append(len(cycles))
    return cycles, made


@contextlib.contextmanager
def _precision(name):
    before = tf.keras.backend.floatx()
    if name in models.LOW_PRECISION:
        tf.keras.mixed_precision.set_global_policy(name)
    else:
        tf.keras.backend.set_floatx(name)
    try:
        yield
    finally:
        if name in models.LOW_PRECISION:
            tf.keras.mixed_precision.set_global_policy("float32")
        tf.keras.backend.set_floatx(before)
        tf.keras.backend.clear_session()


def _compiled(case, model):
    optimizer = getattr(tf.keras.optimizers, case["optimizer"])(0.1, **case["arguments"])
    options = {"jit_compile": False} if IS_KERAS_3 else {}
    loss = [models.loss_of(case) for _ in range(case["outputs"])]
    model.compile(optimizer, loss if len(loss) > 1 else loss[0], run_eagerly=not case["is_traced"], **options)
    return model


def _plain(case, batches, cycles, order):
    """Return the weights before the first and after each step of plain Keras, whose batch is a whole cycle.

    Args:
      order: -1 reverses the examples of each batch.
    """
    model = _compiled(case, models.model_of(case, order))
    weights = [model.get_weights()]
    for cycle in cycles:
        _train(model, _joined([batches[number] for number in cycle], order))
        weights.append(model.get_weights())
    return weights


def _joined(batches, order=1):
    """Return one batch with the examples of all."""
    join = lambda *parts: None if parts[0] is None else np.concatenate(parts)[::order]  # noqa: E731
    return tf.nest.map_structure(join, *batches)


def _train(model, batch):
    x, y, weights = batch
    model.train_on_batch(x, y, **({} if weights is None else {"sample_weight": weights}))


def _new(case):
    return _compiled(case, accum.GradientAccumulateModel.from_model(models.model_of(case), **case["options"]))


def _state(model):
    return int(model.optimizer.iterations.numpy()), model.get_weights()


def _ours(case, batches):
    """Return (number of steps, weights) after each batch."""
    if case["how"] == "fit":
        return _fitted(case, batches)
    with tempfile.TemporaryDirectory() as folder:  # Keras restores slots when it creates them
        model, states = _new(case), []
        for number, batch in enumerate(batches):
            _train(model, batch)
            if case["resume"] == number:
                model = _resumed(case, model, os.path.join(folder, "run"))
            states.append(_state(model))
        return states


def _resumed(case, model, path):
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(path)
    model = _new(case)
    model.set_weights([np.zeros_like(weight) for weight in model.get_weights()])
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(path)
    return model


class _AfterBatches(tf.keras.callbacks.Callback):
    """Keeps the state after each batch; that after the last of an epoch includes what its end does."""

    def __init__(self):
        super().__init__()
        self.states = []

    def on_train_batch_end(self, batch, logs=None):
        self.states.append(_state(self.model))

    def on_epoch_end(self, epoch, logs=None):
        self.states[-1] = _state(self.model)


def _fitted(case, batches):
    after = _AfterBatches()
    with mirrored().scope() if case["replicas"] > 1 else contextlib.ExitStack():
        model = _new(case)
    model.fit(_dataset(case, batches), epochs=case["epochs"], verbose=0, callbacks=[after])
    return after.states


def _dataset(case, batches):
    tensors = [_as_tuples(batch) for batch in batches]
    if case["replicas"] > 1:
        whole = tf.nest.map_structure(lambda *parts: np.concatenate(parts), *tensors)
        return tf.data.Dataset.from_tensor_slices(whole).batch(case["sizes"][0])
    types = tf.nest.map_structure(lambda leaf: tf.as_dtype(leaf.dtype), tensors[0])
    shapes = tf.nest.map_structure(lambda leaf: tf.TensorShape((None,) + leaf.shape[1:]), tensors[0])
    return tf.data.Dataset.from_generator(lambda: iter(tensors), types, shapes)


def _as_tuples(batch):
    x, y, weights = [tuple(part) if isinstance(part, list) else part for part in batch]
    return (x, y) if weights is None else (x, y, weights)
