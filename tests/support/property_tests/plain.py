"""Train the model of a case plainly, at the full batch: the oracle, which knows nothing of the library."""

import contextlib
from typing import Any, Dict, List, NamedTuple

import numpy as np
import tensorflow as tf
from versions import IS_KERAS_3

from property_tests import losses, models
from property_tests.cycles import accum_steps

SCALE = 64.0
"""Of losses in float16. One that changes by itself may overflow in a micro-batch, but not in the mean of the batch."""


class Schedule(NamedTuple):
    """Which batches make a step together.

    Attributes:
      cycles: for each step the places of its batches in the run, whose epochs follow each other.
      made: the number of steps after each batch.
    """

    cycles: List[List[int]]
    made: List[int]


def schedule_of(case) -> Schedule:
    """Return when steps are made.

    Cycles without an example make none (law L5), but a model that does not accumulate is plain Keras (law L14), which
    makes a step even then.
    """
    options = dict({"accum_steps": 1, "last_cycle": "flush"}, **case["options"])
    is_passthrough, sizes = options["accum_steps"] == 1, case["sizes"]
    cycles, held, made = [], [], []  # type: Tuple[List[List[int]], List[int], List[int]]
    for place in range(case["epochs"] * len(sizes)):
        held.append(place)
        is_last = case["how"] == "fit" and (place + 1) % len(sizes) == 0
        is_full = len(held) == accum_steps(options, len(cycles))
        is_ended = is_full or (is_last and options["last_cycle"] == "flush")
        if is_ended and (is_passthrough or any(sizes[n % len(sizes)] for n in held)):
            cycles.append(held)
        if is_full or (is_last and options["last_cycle"] != "carry"):
            held = []
        made.append(len(cycles))
    return Schedule(cycles, made)


def ends_with_its_epochs(case, schedule) -> bool:
    """Whether each cycle lies within an epoch, and each batch within a cycle."""
    count = len(case["sizes"])
    places = sorted(place for cycle in schedule.cycles for place in cycle)
    within = all(cycle[0] // count == cycle[-1] // count for cycle in schedule.cycles)
    return within and places == list(range(count * case["epochs"]))


@contextlib.contextmanager
def precision(name):
    """Make a policy or float type that of Keras."""
    before = tf.keras.backend.floatx()
    if name not in models.LOW_PRECISION:
        tf.keras.backend.set_floatx(name)
    _set_policy(name)  # which does not follow the float type any more, once it has been set
    try:
        yield
    finally:
        tf.keras.backend.set_floatx(before)
        _set_policy(before)
        tf.keras.backend.clear_session()


def _set_policy(name):
    if hasattr(tf.keras.mixed_precision, "set_global_policy"):
        tf.keras.mixed_precision.set_global_policy(name)
    else:  # TensorFlow 2.2 and 2.3
        tf.keras.mixed_precision.experimental.set_policy(name)


def compiled(case, model, is_traced):
    """Return the model, after compiling it with what the case says."""
    names, count = case["names"], case["outputs"]
    each = [losses.loss_of(case) for _ in range(count)]
    metrics = [losses.metrics_of(case) for _ in range(count)] if case["metrics"] else None
    if names:
        each, metrics = (part and dict(zip(models.names_of(case), part)) for part in (each, metrics))
    elif count == 1:
        each, metrics = each[0], metrics and metrics[0]
    options = {"jit_compile": False} if IS_KERAS_3 else {}
    model.compile(_optimizer(case), each, metrics=metrics, run_eagerly=not is_traced, **options)
    return model


def _optimizer(case):
    optimizer = getattr(tf.keras.optimizers, case["optimizer"])(0.1, **case["arguments"])
    if case["precision"] != "mixed_float16":
        return optimizer
    if IS_KERAS_3:
        return tf.keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=SCALE)
    if hasattr(tf.keras.mixed_precision, "LossScaleOptimizer"):
        return tf.keras.mixed_precision.LossScaleOptimizer(optimizer, dynamic=False, initial_scale=SCALE)
    return tf.keras.mixed_precision.experimental.LossScaleOptimizer(optimizer, SCALE)


class Run(NamedTuple):
    """What full batches do.

    Attributes:
      weights: those before the first step, and after each.
      logs: of each step.
    """

    weights: List[List[Any]]
    logs: List[Dict[str, float]]


def run(case, batches, schedule, order) -> Run:
    """Train plain Keras, whose batch is a whole cycle, eagerly.

    Args:
      order: -1 reverses the examples of each batch.
    """
    model = compiled(case, models.model_of(case, order, takes_states=True), is_traced=False)
    states = _States(case, model) if case["is_stateful"] else None
    weights, logs, parts = [model.get_weights()], [], []
    for place, made in enumerate(schedule.made):
        number = place % len(batches)
        parts.append(batches[number] if states is None else states.beside(batches[number]))
        if made == len(weights):  # this is the last batch of a cycle
            model.reset_metrics()
            begin = schedule.cycles[made - 1][0]
            logs.append(_train(model, models.joined(parts[begin : place + 1], order)))
            weights.append(model.get_weights())
    return Run(weights, logs)


def _train(model, batch):
    x, y, weights = models.tensors(batch)
    options = {} if weights is None else {"sample_weight": weights}
    return model.train_on_batch(x, y, return_dict=True, **options)


class _States:
    """The states of a stateful layer, which a plain run has as an input."""

    def __init__(self, case, model):
        self._model, self._next = model, models.state_model_of(case)
        self._values = np.zeros((case["sizes"][0], models.STATE), models.low(case))

    def beside(self, batch):
        """Return a batch with the states before it."""
        (x, y, weights), before = batch, self._values
        x = x if isinstance(x, list) else [x]
        for layer in self._next.layers:
            if layer.weights:
                layer.set_weights(self._model.get_layer(layer.name).get_weights())
        self._values = np.array(self._next([x[0], before]), before.dtype)
        return x + [before], y, weights
