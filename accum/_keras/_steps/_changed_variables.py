"""Warn of variables that a train step changes once per micro-batch, where the full batch would change them once."""

from typing import Iterable, List, Optional, Sequence

import numpy as np

from accum import _check, _tf
from accum._engine import _replicas
from accum._tf import tf


class StateWatch:
    """Compares the variables of a model before and after one micro-batch.

    In a graph it looks for assignments. Metrics and batch normalisation, which have their own ways, are left out. So is
    what an optimizer changes, or a user where `has_stepped` of an optimizer is true: branches may not run.
    """

    @staticmethod
    def of_cycle(model: tf.keras.Model, optimizers: Sequence[tf.keras.optimizers.Optimizer]) -> Optional["StateWatch"]:
        """Return a `StateWatch` like `of_first_batch`, but eagerly only where no optimizer makes its step next."""
        if tf.executing_eagerly() and not (model._accum.is_state_watched or all(map(_goes_on, optimizers))):
            return None
        return StateWatch.of_first_batch(model)

    @staticmethod
    def of_first_batch(model: tf.keras.Model) -> Optional["StateWatch"]:
        """Return a `StateWatch` for each trace, but eagerly, where it copies all variables, one for each `compile`."""
        if tf.executing_eagerly():
            if model._accum.is_state_watched:
                return None
            model._accum.is_state_watched = True
        return StateWatch(model)

    def __init__(self, model: tf.keras.Model) -> None:
        self._model = model
        self._variables = _candidates(model)
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._before: List[np.ndarray] = []
        if self._graph is None:
            self._before = [_tf.variables.native(var).numpy() for var in self._variables]
        else:
            self._count = len(self._graph.get_operations())

    def warn_of_changes(self) -> None:
        """Warn if a variable has changed, or will change, since this object was created."""
        if self._graph is None:
            now = [_tf.variables.native(var).numpy() for var in self._variables]
            changed = [var for var, old, new in zip(self._variables, self._before, now) if not np.array_equal(old, new)]
        else:
            handles = _tf.op_walks.assigned_handles(self._graph, self._graph.get_operations()[self._count :])
            captured = {id(outside): id(inside) for outside, inside in _tf.op_walks.captures_of(self._graph)}
            changed = [var for var in self._variables if captured.get(id(_handle_of(var))) in handles]
        _warn_of(self._model, changed)


def warn_of_moved(model: tf.keras.Model, handles: Iterable[tf.Tensor]) -> None:
    """Warn of variables of a model to which each micro-batch of a whole batch assigns, given their handles."""
    moved = {id(handle) for handle in handles}
    if moved:
        _warn_of(model, [var for var in _candidates(model) if id(_handle_of(var)) in moved])


def _warn_of(model: tf.keras.Model, changed: Sequence[tf.Variable]) -> None:
    names = sorted(_tf.variables.path_of(var) for var in changed)
    if names and names != model._accum.told_of_state:
        model._accum.told_of_state = names
        _check.warn(
            "The train step changes variables once per micro-batch, and before the optimizer has made its step, "
            "unlike at the full batch, whose result this may change: freeze the layers that do so, or change the "
            "variables in a callback, or where `has_stepped` of the optimizer is true. Changed: "
            f"{names}.",
        )


def _candidates(model: tf.keras.Model) -> List[tf.Variable]:
    """Return the variables of a model but for those of metrics, batch normalisation and random numbers."""
    expected = [var for layer in _tf.batch_norm.batch_norms_in(model) for var in layer.variables]
    expected += [var for metric in model.metrics for var in metric.variables] + _tf.steps.seeds_of(model)
    ids = {id(_tf.variables.native(var)) for var in expected}
    return [var for var in model.variables if id(_tf.variables.native(var)) not in ids]


def _goes_on(optimizer: tf.keras.optimizers.Optimizer) -> bool:
    """Whether the next micro step of an accumulating optimizer begins a cycle of several."""
    accum_steps = optimizer.accum_steps
    if isinstance(accum_steps, dict):
        steps = int(_tf.variables.native(optimizer.iterations).numpy())
        accum_steps = accum_steps[max(first for first in accum_steps if first <= steps)]
    return accum_steps > 1 and int(optimizer.micro_step) == 0


def _handle_of(var: tf.Variable) -> Optional[tf.Tensor]:
    return getattr(_replicas.local_variable(_tf.variables.native(var)), "handle", None)


def warn_of_batch_norms(model: tf.keras.Model) -> None:
    """Warn once if a model has batch normalisation layers of Keras, which move their statistics per micro-batch."""
    layers = [
        layer.name
        for layer in _tf.batch_norm.batch_norms_in(model)
        if _tf.batch_norm.is_plain(layer) and layer.trainable
    ]
    if layers and model._accum.is_first_time("batch norms"):
        _check.warn(
            "Batch normalization updates its moving statistics for every micro-batch, unlike at the full batch: "
            "`accum.replace_batchnorm_layers` replaces it with a layer that updates them once per batch, and "
            "`whole_batch='batch_norm'` also normalises by the whole batch. Received: "
            f"{_check.shown(layers)}.",
        )


def warn_of_batches_in_prediction(model: tf.keras.Model) -> None:
    """Warn once of batch normalisation that was built with `training=True`, if evaluation and prediction are split."""
    if not model._accum.is_first_time("batch norms in prediction"):
        return
    norms = _tf.layer_calls.batch_norms_always_in_training(model)
    layers = sorted({layer.name for layer in norms if layer.trainable})
    if layers:
        _check.warn(
            "Batch normalization that is always in training normalises by micro-batches in `evaluate` and `predict` "
            "too, unlike the full batch: pass `whole_batch='batch_norm'`, or call the layers without `training=True`. "
            f"Received: {layers}.",
        )
