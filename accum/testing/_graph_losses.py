"""Find losses that a static graph adds up although each is a mean over a count of its own, such as masked words."""

from typing import Any, Dict, Hashable, List, Optional, Set

from accum import _tf
from accum._tf import tf

ADDS = ("Add", "AddN", "AddV2", "Sub")
DIVISIONS = ("Div", "DivNoNan", "RealDiv")
SCALES = ("Cast", "Identity", "Mul", "Neg")
SIZES = ("OnesLike", "Shape", "Size", "ZerosLike")
SELECTIONS = ("DynamicPartition", "NonMaxSuppression", "Unique", "Where")  # `tf.boolean_mask` uses `Where`
SAME_COUNT = ("Add", "AddV2", "Cast", "ExpandDims", "Identity", "Maximum", "Reshape", "Squeeze", "Sum")
EXAMPLES = "examples"


def means_over_different_counts(graph: tf.Graph) -> List[str]:
    """Return the names of two means of a sum that is differentiated, if they are over different counts, or []."""
    ops = graph.get_operations()
    names = [op.name for op in ops if "_grad/" in op.name]
    for op in ops:
        if op.type not in ADDS or op.outputs[0].shape.rank != 0:
            continue
        first: Dict[Hashable, tf.Operation] = {}
        for mean in _means_in(op):
            first.setdefault(_count(mean), mean)
        means = [mean for count, mean in first.items() if count is not None]
        scopes = [_gradient_scopes(mean, names) for mean in means]
        for index in range(1, len(means)):
            if scopes[0] & scopes[index]:
                return [means[0].name, means[index].name]
    return []


def _means_in(total: tf.Operation) -> List[tf.Operation]:
    """Return the scalar means that an op adds up, with or without constant factors."""
    ops, waiting = [], [total]
    while waiting:
        op = waiting.pop()
        if op.type == "Mean" or op.type in DIVISIONS and _depends_on_data(op.inputs[1]):
            ops.append(op)
        elif op.type in DIVISIONS:
            waiting.append(op.inputs[0].op)
        elif op.type in ADDS + SCALES:
            waiting += [tensor.op for tensor in reversed(list(op.inputs))]
    return ops


def _count(mean: tf.Operation) -> Optional[Hashable]:
    """Return what a mean is over, or None if it is not over data, as a regularisation term."""
    if not _depends_on_data(mean.inputs[0]):
        return None
    if mean.type != "Mean" and _depends_on_data(mean.inputs[1], SIZES):
        return _signature(_without_constants(mean.inputs[1]))
    selections = [op for op in _tf.op_walks.ancestors([mean]) if op.type.startswith(SELECTIONS)]
    return _signature(selections[-1]) if selections else EXAMPLES


def _signature(op: tf.Operation) -> Hashable:
    """Return what is alike for ops that compute the same thing: a mask may be computed for each loss anew."""
    return tuple(sorted(_sign(source) for source in _sources(op, SIZES)))


def _sign(op: tf.Operation) -> str:
    if op.type == "Const":
        return op.type + str(op.get_attr("value"))
    return op.type + (op.name if not op.inputs else "")


def _without_constants(tensor: tf.Tensor) -> tf.Operation:
    """Return what is counted, for `max(count, 1)`, `count + 1e-5` and the like."""
    op = tensor.op
    while op.type in SAME_COUNT:
        data = [source for source in op.inputs if _depends_on_data(source, SIZES)]
        if len(data) != 1:
            break
        op = data[0].op
    return op


def _depends_on_data(tensor: tf.Tensor, ends: Any = ()) -> bool:
    """Whether a tensor depends on what is fed, other than by ops of the types `ends`."""
    return any(op.type == "Placeholder" for op in _sources(tensor.op, ends))


def _sources(last: tf.Operation, ends: Any = ()) -> Set[tf.Operation]:
    reached: Set[tf.Operation] = set()
    waiting = [last]
    while waiting:
        op = waiting.pop()
        if op not in reached and op.type not in ends:
            reached.add(op)
            waiting += _tf.op_walks.sources_of(op, with_control=False)
    return reached


def _gradient_scopes(op: tf.Operation, names: List[str]) -> Set[str]:
    """Return the scopes of the calls of `tf.gradients` that go through an op: `gradients`, `gradients_1`."""
    part = f"/{op.name}_grad/"
    return {name[: name.index(part)] for name in names if part in name}
