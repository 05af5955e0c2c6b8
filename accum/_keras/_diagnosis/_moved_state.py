"""Warnings of state that changes once for each micro-batch, where the full batch would change it once."""

from typing import Callable, Iterable, List, Optional, Sequence, Tuple

import numpy as np

from accum import _check, _tf
from accum._engine import _replicas
from accum._keras._diagnosis._seen import Seen
from accum._keras._optimizer._internals import internals_of
from accum._tf import tf


class StateWatch:
    """Compares the variables of a model before and after one micro-batch.

    In a graph it looks for assignments. Batch normalisation has a warning of its own, and metrics are left out. So is
    what an optimizer changes, or a user in a conditional that asks `has_stepped` of an optimizer.
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
        self._norms: List[tf.Variable] = []
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._before: List[np.ndarray] = []
        if self._graph is None:
            self._norms = [var for _, var in moving_means(model)]
            self._before = [_tf.variables.native(var).numpy() for var in self._variables + self._norms]
        else:
            self._count = len(self._graph.get_operations())

    @_check.rule
    def warn_of_changes(self, beside: Callable[[int], List[tf.Operation]] = lambda count: []) -> None:
        """Warn if a variable has changed, or will change, since this object was created.

        Args:
          beside: function that returns the operations of the graph behind a number of them, but for what optimizers do;
            these may assign to variables that no attribute of the model holds.
        """
        if self._graph is None:
            watched = self._variables + self._norms
            now = [_tf.variables.native(var).numpy() for var in watched]
            moved = {id(var) for var, old, new in zip(watched, self._before, now) if not np.array_equal(old, new)}
            changed = [var for var in self._variables if id(var) in moved]
            norms = [layer for layer, var in moving_means(self._model) if id(var) in moved]
        else:
            graph, ops = self._graph, self._graph.get_operations()[self._count :]
            handles = _tf.op_walks.assigned_handles(graph, ops)
            cycles = [
                internals_of(_tf.optimizers.without_loss_scale(one)).cycle for one in self._model._accum.optimizers
            ]
            clocks = [var for cycle in cycles for var in (cycle.counter.has_stepped, cycle.state.micro_step)]
            in_branches = _tf.op_walks.assigned_in_branches(graph, ops, [handle_of(var) for var in clocks])
            inside_of = {id(outside): inside for outside, inside in _tf.op_walks.captures_of(graph)}
            inside = {id(var): inside_of.get(id(handle_of(var))) for var in self._variables}
            changed = [var for var in self._variables if id(inside[id(var)]) in handles]
            is_settled = _tf.graph_parts.is_settled_at_once  # the next micro-batch finds it as the full batch would
            changed = [var for var in changed if not is_settled(graph, ops, inside[id(var)])]
            changed += [
                var
                for var in self._variables
                if id(inside[id(var)]) in in_branches - handles
                and not any(cycle.accumulator_of(_tf.variables.native(var)) for cycle in cycles)
            ]
            changed += self._held_elsewhere(_tf.op_walks.assigned_variables(graph, beside(self._count)))
            means = moving_means(self._model)
            norms = [layer for layer, var in means if id(inside_of.get(id(handle_of(var)))) in handles]
        _warn_of(self._model, _names_of(changed))
        _note_batch_norms(self._model, norms)

    def _held_elsewhere(self, variables: Sequence[tf.Variable]) -> List[tf.Variable]:
        """Return those of `variables` that no attribute of the model or of a layer holds, such as a global average."""
        known = [*self._variables, *_expected(self._model), *_tf.steps.seeds_without_model()]
        known += _tf.models.states_of_rnns(self._model)
        for layer in filter(_tf.batch_norm.is_accumulating, _tf.batch_norm.batch_norms_in(self._model)):
            known += [var for place in layer.accum_statistics.places for var in [*place.latest, *place.total]]
        weight = self._model._accum.weight.variable
        known += [] if weight is None else [weight]
        for optimizer in self._model._accum.optimizers:  # loss scales, which count steps
            known += _tf.inner_optimizer.variables_of(optimizer)
        handles = {id(handle_of(var)) for var in known}
        others = [var for var in variables if id(handle_of(var)) not in handles]
        return [var for var in others if not _tf.variables.is_sum(var)]  # such as those of a metric of Keras


@_check.rule
def warn_of_moved(seen: Seen) -> None:
    """Warn of variables to which each micro-batch of a whole batch assigns."""
    model, moved = seen.model, {id(handle) for handle in seen.handles}
    if moved:
        _warn_of(model, names_of_moved(model, seen.handles))
        _note_batch_norms(model, [layer for layer, var in moving_means(model) if id(handle_of(var)) in moved])


def names_of_moved(model: tf.keras.Model, handles: Iterable[tf.Tensor]) -> List[str]:
    """Return the names of variables, given their handles, but for those of metrics, batch norms and random numbers."""
    moved = {id(handle) for handle in handles}
    changed = [var for var in _candidates(model) if id(handle_of(var)) in moved] if moved else []
    others = len(moved - {id(handle_of(var)) for var in [*_expected(model), *changed]}) if moved else 0
    more = [f"{others} that no attribute of the model or of a layer holds"] if others else []
    return _names_of(changed) + more


def moving_means(model: tf.keras.Model) -> List[Tuple[tf.keras.layers.Layer, tf.Variable]]:
    """Return (layer, its moving mean) for the batch normalisation that moves it at each call in training."""
    layers = [layer for layer in _tf.batch_norm.batch_norms_in(model) if not _tf.batch_norm.is_accumulating(layer)]
    return [(layer, layer.moving_mean) for layer in layers if getattr(layer, "moving_mean", None) is not None]


def _note_batch_norms(model: tf.keras.Model, layers: Sequence[tf.keras.layers.Layer]) -> None:
    """Note which batch normalisation has run in training, and warn of it once batches are split."""
    own = model._accum
    own.batch_norms_in_training = [layer.name for layer in layers] or own.batch_norms_in_training
    if not own.size.is_auto or own.size.in_use != "auto":
        warn_of_batch_norms(Seen(model))


def _names_of(variables: Sequence[tf.Variable]) -> List[str]:
    return sorted(_tf.variables.path_of(var) for var in variables)


def _warn_of(model: tf.keras.Model, names: List[str]) -> None:
    names = [name for name in names if name not in model._accum.told_of_state]
    if names:
        model._accum.told_of_state += names
        if not _makes_cycles(model) and model._accum.whole_batch:
            other_way = "or in the train step"
        elif not _makes_cycles(model) and model._accum.size.splits:
            other_way = f"or in the train step, and {model._accum.to_see_whole_batches}, so that it runs once per batch"
        else:
            other_way = "or where `has_stepped` of the optimizer is true"
        _check.warn(
            "The train step changes variables once per micro-batch, and before the optimizer has made its step, "
            "unlike at the full batch, whose result this may change: freeze the layers that do so, or change the "
            f"variables in a callback {other_way}. Changed: {names}. [accum: changed-variables]",
            _check.InexactWarning,
        )


def _makes_cycles(model: tf.keras.Model) -> bool:
    """Whether an update counts several batches."""
    optimizers = map(_tf.optimizers.without_loss_scale, model._accum.optimizers or ())
    return any(internals_of(optimizer).may_take_several for optimizer in optimizers)


def _candidates(model: tf.keras.Model) -> List[tf.Variable]:
    """Return the variables of a model but for those of metrics, batch normalisation and random numbers."""
    ids = {id(_tf.variables.native(var)) for var in _expected(model)}
    variables = list(model.variables) + _tf.models.untracked_variables(model)
    return [var for var in variables if id(_tf.variables.native(var)) not in ids]


def _expected(model: tf.keras.Model) -> List[tf.Variable]:
    """Return the variables of metrics, batch normalisation and random numbers."""
    expected = [var for layer in _tf.batch_norm.batch_norms_in(model) for var in layer.variables]
    metrics = list(model.metrics) + _tf.steps.metrics_of_layers(model)
    return expected + [var for metric in metrics for var in metric.variables] + _tf.steps.seeds_of(model)


def _goes_on(optimizer: tf.keras.optimizers.Optimizer) -> bool:
    """Whether the next micro step of an accumulating optimizer begins a cycle of several."""
    accum_steps = optimizer.accum_steps
    if isinstance(accum_steps, dict):
        steps = int(_tf.variables.native(optimizer.iterations).numpy())
        accum_steps = accum_steps[max(first for first in accum_steps if first <= steps)]
    return accum_steps > 1 and int(optimizer.micro_step) == 0


def handle_of(var: tf.Variable) -> Optional[tf.Tensor]:
    return getattr(_replicas.local_variable(_tf.variables.native(var)), "handle", None)


_BATCH_NORMS = (
    "Batch normalization updates its moving statistics for every micro-batch, and normalises by it alone, unlike at "
    "the full batch: "
)


@_check.rule
def warn_of_batch_norms(seen: Seen) -> None:
    """Warn once of the batch normalisation of Keras that has run in training."""
    own = seen.model._accum
    if not own.batch_norms_in_training or not own.is_first_time("batch norms"):
        return
    whole = "pass `whole_batch='batch_norm'`"
    if own.size.requested is None:
        other = "accum_steps" if own.size.tokens is None else "micro_batch_tokens"
        whole = f"train on full batches with `micro_batch_size` and `whole_batch='batch_norm'` in place of `{other}`"
    elif _makes_cycles(seen.model):
        whole = "pass larger batches in place of `accum_steps`, and no `whole_batch=()`"
    _check.warn(
        f"{_BATCH_NORMS}{whole}. `accum.replace_batchnorm_layers` makes only the moving statistics those of the full "
        f"batch. Received: {_check.shown(own.batch_norms_in_training)}. [accum: batch-norm]",
        _check.InexactWarning,
    )


@_check.rule
def warn_of_batch_norms_under_auto(seen: Seen) -> None:
    """Warn once of the batch normalisation of Keras that has run in training, unless it will see whole batches."""
    if "batch_norm" not in seen.model._accum.whole_batch:
        warn_of_batch_norms(seen)


@_check.rule
def warn_of_batches_in_prediction(seen: Seen) -> None:
    """Warn once of batch normalisation that was built with `training=True`, if evaluation and prediction are split."""
    if not seen.model._accum.is_first_time("batch norms in prediction"):
        return
    norms = _tf.layer_calls.batch_norms_always_in_training(seen.model)
    layers = sorted({layer.name for layer in norms if layer.trainable})
    if layers:
        _check.warn(
            "Batch normalization that is always in training normalises by micro-batches in `evaluate` and `predict` "
            "too, unlike the full batch: pass `whole_batch='batch_norm'`, or call the layers without `training=True`. "
            f"Received: {layers}. [accum: batch-norm]",
            _check.InexactWarning,
        )
