"""Read and still the ops in UPDATE_OPS that update the moving averages of batch normalisation.

`slim.batch_norm` and `tf.compat.v1.layers.batch_normalization` add two ops per layer to the graph's UPDATE_OPS, each of
the form `average -= (average - value) * (1 - momentum)`. Following the inputs of such an op backwards yields its
average, the value from the micro-batch, and the layer's input.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from accum import _tf
from accum._tf import tf
from accum.compat.v1._collections import op_of

ASSIGN_SUBS = ("AssignSub", "AssignSubVariableOp")
CONDITIONALS = ("If", "StatelessIf")  # of TF 2
READS = ("Identity", "ReadVariableOp", "Cast") + _tf.op_walks.ENTRANCES
SHAPINGS = READS + ("Squeeze", "Reshape", "StopGradient")


class Average(NamedTuple):
    """One moving average, as read from its update op."""

    assign: tf.Operation  # the op, or that inside of it which changes the variable
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
    for moments in by_inputs.values():
        if len(moments["mean"]) != len(moments["variance"]):
            unread += [average.var.name for average in moments["mean"] + moments["variance"]]
    if unread:
        raise ValueError(
            f"These update ops can't be taken over: {unread}. {remedy} Supported are the averages of batch "
            "normalisation without `renorm`, `zero_debias_moving_mean` and virtual batches, whose `training` is a "
            "Python bool (or, under TF 1's control flow, a tensor). [accum: moving-averages]"
        )
    return [pair for moments in by_inputs.values() for pair in zip(moments["mean"], moments["variance"])]


def averages_of_layers(graph: tf.Graph, update_ops: Sequence[Any] = ()) -> List[Average]:
    """Return the averages of batch normalisation in a graph: those that follow the mean and variance of one input.

    The average of a mean alone, such as DINO's centre, is left out. So are averages of scalars, such as losses, and
    those that `update_ops` update.
    """
    averages = averages_elsewhere(graph.get_operations(), update_ops)
    averages = [average for average in averages if average.value.shape.rank != 0]
    moments = {(average.inputs.name, average.moment) for average in averages}
    both = {name for name, moment in moments if {(name, "mean"), (name, "variance")} <= moments}
    return [average for average in averages if average.inputs.name in both]


def averages_elsewhere(ops: Sequence[tf.Operation], update_ops: Sequence[Any]) -> List[Average]:
    """Return the averages of batch normalisation that `ops` update, but for those that `update_ops` update."""
    read_assigns = [_find_assign(op_of(update_op)) for update_op in update_ops]
    others = [op for op in ops if op.type in ASSIGN_SUBS and not any(op is assign for assign in read_assigns)]
    averages = [_read_average(op) for op in others]
    return [average for average in averages if average is not None]


def require_none_in_place(ops: Sequence[tf.Operation], update_ops: Sequence[Any]) -> None:
    """Raise if some of `ops` update averages of batch normalisation, but for `update_ops`."""
    in_place = [average.var.op.name for average in averages_elsewhere(ops, update_ops)]
    if in_place:
        raise ValueError(
            "Batch normalisation that updates its averages in place moves them with each micro-batch, by that "
            "micro-batch's statistics: let it add the updates to UPDATE_OPS, such as by leaving out "
            f"`updates_collections=None`. Received: {in_place}. [accum: moving-averages]"
        )


def averages_in_conditionals(graph: tf.Graph) -> List[tf.Variable]:
    """Return the variables that are moved as averages are inside conditionals of TF 2, whose ops are in functions."""
    conditionals = [op for op in graph.get_operations() if op.type in CONDITIONALS]
    library = graph.as_graph_def().library.function if conditionals else ()
    functions = {function.signature.name: function for function in library}
    moved = []
    for op in conditionals:
        for branch in ("then_branch", "else_branch"):
            moved += [op.inputs[1 + index] for index in _moved_arguments(functions[op.get_attr(branch).name])]
    return [var for var in map(_variable_of, moved) if var is not None]


def _moved_arguments(function: Any) -> List[int]:
    """Return the indices of those arguments of a function from which it subtracts `(… - …) * …`."""
    nodes = {node.name: node for node in function.node_def}
    arguments = [argument.name for argument in function.signature.input_arg]

    def is_made_by(tensor: str, op_type: str) -> bool:
        node = nodes.get(tensor.split(":")[0])
        return node is not None and node.op == op_type

    assigns = [node for node in function.node_def if node.op == "AssignSubVariableOp"]
    deltas = [(node.input[0], node.input[1]) for node in assigns if is_made_by(node.input[1], "Mul")]
    moved = [
        target
        for target, delta in deltas
        if any(is_made_by(factor, "Sub") for factor in nodes[delta.split(":")[0]].input)
    ]
    return [arguments.index(target) for target in moved if target in arguments]


def still(averages: Sequence[Tuple[Average, Average]]) -> None:
    """Let the ops that update averages subtract zeros from them, so that they change nothing wherever they still run.

    They may, although they are in no collection any more: from a list that was made before, or as control inputs. Call
    this without control dependencies, in the loop in which the ops are, if they are in one.
    """
    for average in [average for pair in averages for average in pair]:
        _tf.graphs.replace_input(average.assign, 1, tf.zeros(average.var.shape, average.var.dtype.base_dtype))
        if average.assign.type == "AssignSub":
            # It may run beside the op that now moves the average. Both must hold the lock of a ref variable, or this
            # one could write back what was there before.
            _tf.graphs.hold_lock(average.assign)


def taken_over(update_ops: Sequence[Any]) -> List[Tuple[Average, Average]]:
    """Read the averages that ops update, and still the ops: a function may run them itself, for one micro-batch."""
    averages = read_averages(update_ops, "Create them outside of `function`, or without UPDATE_OPS.")
    still(averages)
    return averages


def _read_average(update_op: Any) -> Optional[Average]:
    """Read the `Average` that an update op updates, or None."""
    assign = _find_assign(op_of(update_op))
    delta = None if assign is None else _factors(assign.inputs[1], _tf.op_walks.entered(assign.inputs[0]).op)
    if assign is None or delta is None:
        return None
    value, decay = delta
    source, var = _read_value(value), _variable_of(assign.inputs[0])
    if source is None or var is None:
        return None
    return Average(assign, var, value, decay, *source)


def _find_assign(op: tf.Operation, depth: int = 3) -> Optional[tf.Operation]:
    """Find the assignment behind the output of a conditional, or `op` itself."""
    if op.type in ASSIGN_SUBS:
        return op
    if depth and op.type in ("Merge", "Identity", "ReadVariableOp", "NoOp"):
        for before in [tensor.op for tensor in op.inputs] + list(op.control_inputs):
            assign = _find_assign(before, depth - 1)
            if assign is not None:
                return assign
    return None


def _variable_of(target: tf.Tensor) -> Optional[tf.Variable]:
    """Find the variable whose ref or handle is `target`, or None."""
    target = _tf.op_walks.entered(target)
    graph = target.graph
    for var in graph.get_collection_ref(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES):
        owner = var.handle if hasattr(var, "handle") else var
        if owner.op is target.op:
            return var
    return None


def _factors(delta: tf.Tensor, owner: tf.Operation) -> Optional[Tuple[tf.Tensor, tf.Tensor]]:
    """Read (value, decay) from `(var - value) * decay`, or None if `delta` is not such a product.

    `owner` is the operation of the variable or its handle.
    """
    if delta.op.type != "Mul":
        return None
    for difference, decay in [delta.op.inputs, reversed(list(delta.op.inputs))]:
        if difference.op.type == "Sub" and decay.shape.rank == 0:
            minuend, value = difference.op.inputs
            if _tf.op_walks.entered(_back(minuend, READS)).op is owner:
                return _tf.op_walks.entered(value), _tf.op_walks.entered(decay)
    return None


def _read_value(value: tf.Tensor) -> Optional[Tuple[str, tf.Tensor, bool]]:
    """Read (moment, inputs, is_corrected) from the tensor towards which an average moves, or None."""
    value = _back(value, SHAPINGS)
    if value.op.type == "Merge":  # merges a training branch and an inference branch
        read = [_read_value(branch) for branch in value.op.inputs]
        return next((statistic for statistic in read if statistic is not None), None)
    if (
        value.op.type in _tf.op_walks.FUSED_BATCH_NORMS
        and value.op.get_attr("is_training")
        and value.value_index in (1, 2)
    ):
        inputs = _tf.op_walks.entered(value.op.inputs[0])
        return ("mean", inputs, False) if value.value_index == 1 else ("variance", inputs, True)
    if value.op.type == "Maximum":
        return _read_corrected_variance(value)
    if value.op.type != "Mean":
        return None
    inputs = _tf.op_walks.entered(value.op.inputs[0])
    if inputs.op.type == "SquaredDifference":
        return "variance", _tf.op_walks.entered(inputs.op.inputs[0]), False
    return "mean", inputs, False


def _read_corrected_variance(value: tf.Tensor) -> Optional[Tuple[str, tf.Tensor, bool]]:
    """Read what `_read_value` does from `max(mean((x - m)^2) - mean(x - m)^2, 0)`, as TensorFlow has it since 2.22."""
    difference = value.op.inputs[0].op
    terms = [term.op for term in difference.inputs] if difference.type == "Sub" else []
    if [term.type for term in terms] != ["Mean", "Square"] or terms[0].inputs[0].op.type != "Square":
        return None
    deviation, mean = terms[0].inputs[0].op.inputs[0], terms[1].inputs[0].op
    if deviation.op.type != "Sub" or mean.type != "Mean" or mean.inputs[0] is not deviation:
        return None
    return "variance", _tf.op_walks.entered(deviation.op.inputs[0]), False


def _back(tensor: tf.Tensor, types: Sequence[str]) -> tf.Tensor:
    """Follow the first input back through ops of `types`."""
    while tensor.op.type in types and len(tensor.op.inputs):
        tensor = tensor.op.inputs[0]
    return tensor
