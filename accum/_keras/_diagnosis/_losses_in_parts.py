"""Which compiled losses of a part of the full batch are no mean over its examples? (law L5)"""

import contextlib
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple, Union

import numpy as np

from accum import _check, _rows, _tf
from accum._engine import _replicas
from accum._keras import _step_context
from accum._keras._batch_norm._layer import batch_norms_of
from accum._keras._diagnosis._moved_state import moving_means
from accum._keras._diagnosis._seen import Seen
from accum._keras._diagnosis._sums import BY_REDUCTION, BY_SUM
from accum._keras._steps._one_pass import ACROSS_EXAMPLES, call_of_any_size, is_along_last_axis, name_of, names_of
from accum._keras._steps._reporting_loss import ReportingLoss, SeenLoss
from accum._tf import Nested, tf

MEETINGS = frozenset(["BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Equal", "MatMul", "SquaredDifference", "Sub"])
"""Types of operations that compare each example with all others, where they meet in one of two of their tensors."""

QUOTIENTS, PRODUCTS = frozenset(["Div", "DivNoNan", "RealDiv"]), frozenset(["Mul"])
CURVED = frozenset(["Exp", "Log", "Log1p", "Pow", "Reciprocal", "Rsqrt", "Sqrt", "Square", "SquaredDifference"])
"""Types of operations that are not linear."""

ACROSS, SUM, STEPS = "across examples", "sum", "steps"
"""In which ways a loss of a part differs: it looks across examples or divides by a number of its own, it adds up
examples, or it divides by time steps whose number is that of the part."""


@_check.rule
def warn_of_losses_of_batch(seen: Seen) -> None:
    """Warn once of the compiled losses just computed if those of parts of a batch give another update."""
    model, is_trimmed = seen.model, seen.is_trimmed
    container = getattr(model, _tf.losses.LOSS_CONTAINER, None)
    if not seen.is_in_parts or not isinstance(container, ReportingLoss):
        return
    kinds = [(id(one.loss), one.output.shape.rank, _has_unknown_steps(one.output)) for one in container.calls]
    found: Dict[str, List[str]] = {}
    for call in container.calls if model._accum.is_first_time(f"losses: {kinds}") else ():
        for way in _ways_to_differ(call):
            found.setdefault(way, []).append(name_of(call.loss) if way != STEPS else call.name)
    parts, instead = _words(is_trimmed)
    if ACROSS in found and model._accum.is_first_time("losses: " + ACROSS):
        _check.warn(
            f"A compiled loss looks across the examples of a batch, and each {parts} has only some of those of the "
            f"full batch, so the update differs: pass {instead}; or, if the loss is a mean that divides by a number of "
            "its own, `micro_batch_weight=`, a function `(x, y, sample_weight)` that returns it. Received: "
            f"{_check.shown(found[ACROSS])}. [accum: loss-counts]",
            _check.InexactWarning,
        )
    if SUM in found and (seen.is_mean or is_trimmed) and model._accum.is_first_time("losses: " + SUM):
        _check.warn(
            f"A compiled loss adds up the examples of a batch, and each {parts} has only some of those of the full "
            f"batch, so the mean of their gradients is smaller than the full batch's gradient: pass {instead}, or "
            f"{BY_REDUCTION if is_trimmed else BY_SUM}, or let the loss be a mean. Received: "
            f"{_check.shown(found[SUM])}. [accum: sum]",
            _check.InexactWarning,
        )
    if STEPS in found and not is_trimmed and model._accum.is_first_time("losses: " + STEPS):
        _check.warn(
            "A loss divides by all time steps, padding included, and the batches of a cycle may be padded to different "
            "lengths, unlike the full batch: pad all to the same length, which the shapes of the data then show, or "
            "pass larger batches and `micro_batch_size` in place of `accum_steps`. Received: outputs "
            f"{_check.shown(found[STEPS])}. [accum: loss-counts]",
            _check.InexactWarning,
        )


def _words(is_trimmed: bool) -> Tuple[str, str]:
    """Return what a part of the full batch is called, and what to pass instead."""
    if is_trimmed:
        return "micro-batch by tokens", "`micro_batch_size` in place of `micro_batch_tokens`"
    return "batch of a cycle", "larger batches and `micro_batch_size` in place of `accum_steps`"


@_check.rule
def warn_of_network_of_batch(seen: Seen) -> None:
    """Warn once if examples provably meet in a network, or in a loss that a layer adds, in a train step just traced.

    Of batch normalisation there are warnings of their own.
    """
    model = seen.model
    if not seen.is_in_parts or tf.executing_eagerly():
        return
    container = getattr(model, _tf.losses.LOSS_CONTAINER, None)
    outputs = container.outputs.get(_replicas.replica_number()) if isinstance(container, ReportingLoss) else None
    adds_losses = bool(_tf.steps.added_losses(model))
    if not (outputs or adds_losses) or not model._accum.is_first_time("network"):
        return
    try:
        met = _met_in_network(model, _tf.losses.unpack_data(seen.data)[0], outputs or [], adds_losses)
    except Exception:  # of what can't be looked at, nothing is proven
        return
    if met:
        parts, instead = _words(seen.is_trimmed)
        _check.warn(
            "The examples of a batch meet in the network, or in a loss that a layer adds, and each "
            f"{parts} has only some of those of the full batch, so the update differs: pass {instead}. Received: "
            f"operations {_check.shown(met)}. [accum: examples-meet]",
            _check.InexactWarning,
        )


def _met_in_network(model: tf.keras.Model, x: Nested, outputs: List[tf.Tensor], adds_losses: bool) -> List[str]:
    """Return the names of operations in which examples meet, none if a batch normalisation runs as in training.

    Args:
      model: the model.
      x: its inputs.
      outputs: those of which compiled losses were computed.
      adds_losses: whether layers add losses.
    """
    found: Optional[_rows.Analysis] = None
    added: List[tf.Tensor] = []
    if outputs and not adds_losses and _step_context.of_model(model).calls is None:  # the graph is not that of loops
        graph = outputs[0].graph
        leaves = [leaf for leaf in tf.nest.flatten(x) if isinstance(leaf, tf.Tensor) and leaf.graph is graph]
        with contextlib.suppress(_rows.ConstantBatchSize):  # in a graph for one size, nothing is proven
            found = _found_in(graph, leaves, outputs)
    if found is None:
        graph, leaves, outputs, added = call_of_any_size(model, x)
        found = _found_in(graph, leaves, outputs)
    changed = _tf.op_walks.changed_outside(graph)
    parts_of = tf.distribute.get_strategy().experimental_local_results  # another replica may have traced the call
    means = [part for _, mean in moving_means(model) for part in parts_of(_tf.variables.native(mean))]
    if any(id(part.handle) in changed for part in means):
        return []
    if any(layer.trainable for layer in batch_norms_of(model)):
        return []
    meets = not found.unruled and any(found.level(output.name) > 0 for output in outputs)
    met = [*found.meets, *found.reduces] if meets else []
    of_added = _found_in(graph, leaves, added)
    if of_added.unruled:
        return met
    ops = _tf.op_walks.ancestors([loss.op for loss in added])
    return met + [op.name for op in ops if of_added.verdict(op.name) and _compares(of_added, op)]


def _found_in(graph: tf.Graph, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor]) -> _rows.Analysis:
    given = {one.name: _rows.Rows(0, 1) for one in inputs if one.shape.rank}
    return _rows.analyse(graph, [output.op.name for output in outputs], given)


def _ways_to_differ(call: SeenLoss) -> Set[str]:
    """Return in which ways a compiled loss is proven to be no mean over examples and their elements."""
    loss, may_be_apart = call.loss, is_along_last_axis(call.loss) and not names_of(call.loss) & ACROSS_EXAMPLES
    is_of_keras = _tf.losses.is_of_keras(loss) and may_be_apart
    if not _tf.layers.comes_with_keras(type(loss).__call__) or (is_of_keras and not _has_unknown_steps(call.output)):
        return set()
    inputs: List[tf.Tensor] = []
    masks: List[Any] = []

    @_tf.graphs.untouched_by_autograph
    def traced(*tensors: tf.Tensor) -> tf.Tensor:
        inputs.extend(tensors)
        elements = _tf.losses.loss_of_elements(loss, *tensors)
        masks.append(_tf.losses.mask_of(elements))
        return tf.identity(elements)

    try:
        with tf.init_scope():
            graph = tf.function(traced).get_concrete_function(call.target, call.output).graph
        (value,) = graph.outputs
        found = _rows.analyse(graph, [value.op.name], {one.name: _rows.Rows(0, 1) for one in inputs})
    except Exception:  # of what can't be looked at, nothing is proven
        return set()
    return _ways_of(call, value, masks[-1] is not None, found, is_of_keras)


def _ways_of(call: SeenLoss, value: tf.Tensor, has_mask: bool, found: _rows.Analysis, is_of_keras: bool) -> Set[str]:
    """Return the ways of `_ways_to_differ`, given what a loss returns before its reduction, for any number of examples.

    Args:
      call: the loss.
      value: what it returns.
      has_mask: whether Keras divides by what a mask of it leaves.
      found: what is known of its graph.
      is_of_keras: whether it is one of Keras that keeps examples apart.
    """
    ways, is_scalar = set(), value.shape.rank == 0
    if has_mask and not call.is_counted or is_scalar and call.is_weighted:
        ways.add(ACROSS)
    if not is_of_keras and any(_compares(found, op) for op in value.graph.get_operations() if found.verdict(op.name)):
        ways.add(ACROSS)
    if is_scalar and not ways and found.combination(value.name) == "sum" and _tf.losses.is_mean(call.loss):
        ways.add(SUM)
    averaged = any(_averages_steps(found, op) for op in value.graph.get_operations() if op.type == "Mean")
    averages = _has_unknown_steps(value) and _tf.losses.is_mean(call.loss)
    if (averaged or averages) and not call.is_counted and not has_mask:
        ways.add(STEPS)
    return ways


def _has_unknown_steps(tensor: Union[tf.Tensor, tf.TensorSpec]) -> bool:
    return tensor.shape.rank in (2, 3) and tensor.shape[1] is None


def _averages_steps(found: _rows.Analysis, mean: tf.Operation) -> bool:
    """Whether a `Mean` goes over an axis of unknown length other than that of the examples."""
    tensor, axes = mean.inputs[0], tf.get_static_value(mean.inputs[1])
    rows, rank = found.rows(tensor.name), tensor.shape.rank
    if rows is None or axes is None or not rank:
        return False
    places = [axis % rank for axis in np.ravel(axes)]
    return any(place != rows.axis and tensor.shape[place] is None for place in places)


def _compares(found: _rows.Analysis, op: tf.Operation) -> bool:
    """Whether an operation compares examples with each other, or is not linear in what they have been reduced to."""
    if op.type in MEETINGS and op.name in found.meets:
        return all(found.rows(one.name) for one in op.inputs[:2])
    is_of_all = [found.level(one.name) > 0 and _tf.op_walks.holds_values(one) for one in op.inputs]
    if op.type in QUOTIENTS:
        return is_of_all[1]
    return all(is_of_all[:2]) if op.type in PRODUCTS else op.type in CURVED and any(is_of_all)
