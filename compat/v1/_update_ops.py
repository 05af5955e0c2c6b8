"""UPDATE_OPS taken over: batch normalisation's averages move once a cycle, to the full batch's statistics (law L13).

`slim.batch_norm` and `tf.compat.v1.layers.batch_normalization` leave two ops a layer in the graph's UPDATE_OPS, each of
the form `average -= (average - value) * (1 - momentum)`. Read backwards, such an op tells its average, the value of
the micro-batch, and the layer's input behind that. From there the cycle gathers the full batch's moments, and moves the
averages by the same formula with the step.
"""

from typing import NamedTuple

from accum._host import Companion
from accum._moments import Moments, pooled, so_far, with_bessel, without_bessel
from accum._tf import tf

ASSIGN_SUBS = ("AssignSub", "AssignSubVariableOp")
READS = ("Identity", "ReadVariableOp", "Switch", "RefSwitch", "Cast")
SHAPINGS = READS + ("Squeeze", "Reshape", "StopGradient")
FUSED = ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")

Average = NamedTuple(
    "Average",
    [
        ("var", tf.Variable),
        ("value", tf.Tensor),  # what the micro-batch has for it
        ("decay", tf.Tensor),  # 1 - momentum, []
        ("moment", str),  # "mean" or "variance"
        ("inputs", tf.Tensor),  # what the moments are taken over
        ("is_corrected", bool),  # whether a variance holds Bessel's factor n / (n - 1)
    ],
)
Average.__doc__ = "One moving average, as its update op tells it."


class CycleMoments(Companion):
    """The moments of one batch normalisation over the micro-batches of a cycle, and the averages that follow them.

    Args:
      mean, variance: the `Average`s of one layer.
      host: a `Host`, which makes the variables, beside the averages.
    """

    def __init__(self, mean, variance, host):
        self._mean = mean
        self._variance = variance
        self._kept = Moments(
            count=host.buffer(mean.var, "accum_count", tf.TensorShape([]), mean.var.dtype.base_dtype),
            mean=host.buffer(mean.var, "accum", mean.var.shape, mean.var.dtype.base_dtype),
            variance=host.buffer(variance.var, "accum", variance.var.shape, variance.var.dtype.base_dtype),
        )

    def keep(self, is_first):
        whole = pooled(so_far(self._stored(), is_first), self._here())
        with tf.control_dependencies(list(whole)):
            return tf.group(*[var.assign(value, read_value=False) for var, value in zip(self._kept, whole)])

    def settle(self, is_first, has_latest):
        whole = so_far(self._stored(), is_first)
        if has_latest:
            whole = pooled(whole, self._here())
        variance = with_bessel(whole.variance, whole.count) if self._variance.is_corrected else whole.variance
        return tf.group(_move(self._mean, whole.mean), _move(self._variance, variance))

    def _here(self):
        """The moments of this micro-batch."""
        mean, variance = self._mean.value, self._variance.value
        size = tf.size(self._mean.inputs, out_type=tf.int64) // tf.size(mean, out_type=tf.int64)
        count = tf.cast(size, mean.dtype)
        if self._variance.is_corrected:
            variance = without_bessel(variance, count)
        return Moments(count, mean, variance)

    def _stored(self):
        return Moments(*[var.read_value() for var in self._kept])


def _move(average, value):
    """average -= (average - value) * decay, as the layer does it. Returns an op."""
    delta = average.var.read_value() - tf.cast(value, average.var.dtype.base_dtype)
    # A layer that is told not to train has decay 0; its value is then whatever stood in memory, on TF 1.15.
    delta = tf.math.multiply_no_nan(delta, average.decay)
    return average.var.assign_sub(delta, read_value=False)


# ----------------------------------------------------------------------------------------------------------------
# Reading update ops backwards


def read_averages(update_ops):
    """What `update_ops` do: the moving mean and the moving variance of each batch normalisation.

    Args:
      update_ops: list of ops or tensors.

    Returns:
      List of pairs of `Average`, (mean, variance).

    Raises:
      ValueError: an op is no update of a batch normalisation's average, or one that can't be read; it names them all.
    """
    averages = [_read_average(update_op) for update_op in update_ops]
    by_inputs = {}
    for average in averages:
        if average is not None:
            by_inputs.setdefault(average.inputs.name, {"mean": [], "variance": []})[average.moment].append(average)
    unread = [op.name for op, average in zip(update_ops, averages) if average is None]
    for found in by_inputs.values():
        if len(found["mean"]) != len(found["variance"]):
            unread += [average.var.name for average in found["mean"] + found["variance"]]
    if unread:
        raise ValueError(
            "These update ops move no average that can be taken over: {}. Give those that can as `update_ops`; the "
            "others stay, and move whenever they are run. What can be: the averages of a batch normalisation without "
            "`renorm`, `zero_debias_moving_mean` and virtual batches, whose `training` is a Python bool (or, under TF "
            "1's control flow, a tensor).".format(unread)
        )
    return [pair for found in by_inputs.values() for pair in zip(found["mean"], found["variance"])]


def _read_average(update_op):
    """The `Average` that an update op moves, or None."""
    assign = _find_assign(update_op if isinstance(update_op, tf.Operation) else update_op.op)
    var = None if assign is None else _variable_of(assign.inputs[0])
    delta = None if var is None else _factors(assign.inputs[1], var)
    if delta is None:
        return None
    value, decay = delta
    source = _read_value(value)
    if source is None:
        return None
    return Average(var, value, decay, *source)


def _find_assign(op, depth=3):
    """The assignment behind the output of a conditional, or `op` itself."""
    if op.type in ASSIGN_SUBS:
        return op
    if depth and op.type in ("Merge", "Identity", "ReadVariableOp", "NoOp"):
        for before in [tensor.op for tensor in op.inputs] + list(op.control_inputs):
            found = _find_assign(before, depth - 1)
            if found is not None:
                return found
    return None


def _variable_of(target):
    """The variable whose ref or handle `target` is, or None."""
    target = _outside(target)
    graph = target.graph
    for var in graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES):
        owner = var.handle if hasattr(var, "handle") else var
        if owner.op is target.op:
            return var
    return None


def _factors(delta, var):
    """(value, decay) of `(var - value) * decay`, or None where `delta` is no such product."""
    if delta.op.type != "Mul":
        return None
    for difference, decay in [delta.op.inputs, reversed(list(delta.op.inputs))]:
        if difference.op.type == "Sub" and decay.shape.rank == 0:
            minuend, value = difference.op.inputs
            if _variable_of(_back(minuend, READS)) is var:
                return _outside(value), _outside(decay)
    return None


def _read_value(value):
    """(moment, inputs, whether corrected) of the tensor that an average moves towards, or None."""
    value = _back(value, SHAPINGS)
    if value.op.type == "Merge":  # of a branch that trains and one that does not
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


def _back(tensor, types):
    """Follow the first input back through ops of `types`."""
    while tensor.op.type in types and len(tensor.op.inputs):
        tensor = tensor.op.inputs[0]
    return tensor


def _outside(tensor):
    """The tensor that a conditional of TF 1 was given, for one that stands inside of it."""
    return _back(tensor, ("Switch", "RefSwitch"))
