"""Read the ops in UPDATE_OPS that update the moving averages of batch normalisation.

`slim.batch_norm` and `tf.compat.v1.layers.batch_normalization` add two ops per layer to the graph's UPDATE_OPS, each of
the form `average -= (average - value) * (1 - momentum)`. Following the inputs of such an op backwards yields its
average, the value from the micro-batch, and the layer's input.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from accum._tf import tf

ASSIGN_SUBS = ("AssignSub", "AssignSubVariableOp")
ENTRANCES = ("Switch", "RefSwitch", "Enter", "RefEnter")  # of conditionals and loops
READS = ("Identity", "ReadVariableOp", "Cast") + ENTRANCES
SHAPINGS = READS + ("Squeeze", "Reshape", "StopGradient")
FUSED = ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")


class Average(NamedTuple):
    """One moving average, as read from its update op."""

    var: tf.Variable
    value: tf.Tensor  # the statistic of the micro-batch
    decay: tf.Tensor  # 1 - momentum, []
    moment: str  # "mean" or "variance"
    inputs: tf.Tensor  # the values whose moments are taken
    is_corrected: bool  # whether a variance includes Bessel's factor n / (n - 1)


# ----------------------------------------------------------------------------------------------------------------
# Reading update ops backwards


def read_averages(update_ops: Sequence[Any], remedy: str) -> List[Tuple[Average, Average]]:
    """Read the moving mean and the moving variance of each batch normalisation layer from its update ops.

    Args:
      update_ops: list of ops or tensors.
      remedy: what the message of an error tells the user to do with the others.

    Returns:
      List of pairs of `Average`, (mean, variance).

    Raises:
      ValueError: some ops do not update an average of batch normalisation, or can't be read; the message names them.
    """
    averages = [_read_average(update_op) for update_op in update_ops]
    by_inputs: Dict[str, Dict[str, List[Average]]] = {}
    for average in averages:
        if average is not None:
            by_inputs.setdefault(average.inputs.name, {"mean": [], "variance": []})[average.moment].append(average)
    unread = [op.name for op, average in zip(update_ops, averages) if average is None]
    for found in by_inputs.values():
        if len(found["mean"]) != len(found["variance"]):
            unread += [average.var.name for average in found["mean"] + found["variance"]]
    if unread:
        raise ValueError(
            f"These update ops can't be taken over: {unread}. {remedy} Supported are the averages of batch "
            "normalisation without `renorm`, `zero_debias_moving_mean` and virtual batches, whose `training` is a "
            "Python bool (or, under TF 1's control flow, a tensor)."
        )
    return [pair for found in by_inputs.values() for pair in zip(found["mean"], found["variance"])]


def averages_in_place(ops: Sequence[Any], update_ops: Sequence[Any]) -> List[str]:
    """Return the names of those of `ops` that update an average of batch normalisation and are not in `update_ops`."""
    known = [_find_assign(_op_of(update_op)) for update_op in update_ops]
    others = [op for op in ops if op.type in ASSIGN_SUBS and not any(op is assign for assign in known)]
    return [op.name for op in others if _read_average(op) is not None]


def _op_of(update_op: Any) -> tf.Operation:
    return update_op if isinstance(update_op, tf.Operation) else update_op.op


def _read_average(update_op: Any) -> Optional[Average]:
    """Read the `Average` that an update op updates, or None."""
    assign = _find_assign(_op_of(update_op))
    var = None if assign is None else _variable_of(assign.inputs[0])
    delta = None if assign is None or var is None else _factors(assign.inputs[1], var)
    if delta is None:
        return None
    value, decay = delta
    source = _read_value(value)
    if source is None:
        return None
    return Average(var, value, decay, *source)


def _find_assign(op: tf.Operation, depth: int = 3) -> Optional[tf.Operation]:
    """Find the assignment behind the output of a conditional, or `op` itself."""
    if op.type in ASSIGN_SUBS:
        return op
    if depth and op.type in ("Merge", "Identity", "ReadVariableOp", "NoOp"):
        for before in [tensor.op for tensor in op.inputs] + list(op.control_inputs):
            found = _find_assign(before, depth - 1)
            if found is not None:
                return found
    return None


def _variable_of(target: tf.Tensor) -> Optional[tf.Variable]:
    """Find the variable whose ref or handle is `target`, or None."""
    target = _outside(target)
    graph = target.graph
    for var in graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES):
        owner = var.handle if hasattr(var, "handle") else var
        if owner.op is target.op:
            return var
    return None


def _factors(delta: tf.Tensor, var: tf.Variable) -> Optional[Tuple[tf.Tensor, tf.Tensor]]:
    """Read (value, decay) from `(var - value) * decay`, or None if `delta` is not such a product."""
    if delta.op.type != "Mul":
        return None
    for difference, decay in [delta.op.inputs, reversed(list(delta.op.inputs))]:
        if difference.op.type == "Sub" and decay.shape.rank == 0:
            minuend, value = difference.op.inputs
            if _variable_of(_back(minuend, READS)) is var:
                return _outside(value), _outside(decay)
    return None


def _read_value(value: tf.Tensor) -> Optional[Tuple[str, tf.Tensor, bool]]:
    """Read (moment, inputs, is_corrected) from the tensor towards which an average moves, or None."""
    value = _back(value, SHAPINGS)
    if value.op.type == "Merge":  # merges a training branch and an inference branch
        read = [_read_value(branch) for branch in value.op.inputs]
        return next((found for found in read if found is not None), None)
    if value.op.type in FUSED and value.op.get_attr("is_training") and value.value_index in (1, 2):
        inputs = _outside(value.op.inputs[0])
        return ("mean", inputs, False) if value.value_index == 1 else ("variance", inputs, True)
    if value.op.type != "Mean":
        return None
    inputs = _outside(value.op.inputs[0])
    if inputs.op.type == "SquaredDifference":
        return "variance", _outside(inputs.op.inputs[0]), False
    return "mean", inputs, False


def _back(tensor: tf.Tensor, types: Sequence[str]) -> tf.Tensor:
    """Follow the first input back through ops of `types`."""
    while tensor.op.type in types and len(tensor.op.inputs):
        tensor = tensor.op.inputs[0]
    return tensor


def _outside(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor that was passed into a TF 1 conditional or loop, for a tensor inside it."""
    return _back(tensor, ENTRANCES)
