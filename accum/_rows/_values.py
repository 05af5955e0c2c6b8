"""The values of small tensors that depend on nothing but the number of examples, for several such numbers.

They say what shapes and axes are. A number is only taken to be a multiple of the number of examples, or a constant, if
it is for all of them.
"""

from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np

from accum._rows._flat_graph import Node
from accum._rows._states import Frozen
from accum._tf import tf

SIZES = (840, 1320, 1, 2, 3, 4, 64, 4099, 2**30)
"""Numbers of examples. The first two, of the scratch graphs, can be divided into halves, pairs and small groups. The
last one is beyond any limit of a program's; a power of two, because float32 holds its multiples."""

LARGEST = 1000
"""How many numbers a tensor may have whose values are computed."""

Values = List[Any]
"""The value of a tensor, a NumPy array, for each of `SIZES`."""

Compute = Callable[[Node, Sequence[Any]], Any]
_COMPUTE: Dict[str, Compute] = {}


def value_of(node: Node, inputs: Sequence[Optional[Values]]) -> List[Optional[Values]]:
    """Return the values of the outputs of a node, given those of its inputs; None for unknown ones."""
    unknown: List[Optional[Values]] = [None] * len(node.dtypes)
    compute = _COMPUTE.get(node.type)
    if compute is None or any(values is None for values in inputs):
        return unknown
    try:
        with np.errstate(all="ignore"):
            results = [_as_arrays(compute(node, one)) for one in _different(inputs)]
            known = [result for result in results if result is not None]
            if len(known) != len(results):
                return unknown
            outputs = [[_cast(result[index], dtype) for result in known] for index, dtype in enumerate(node.dtypes)]
    except (ValueError, TypeError, IndexError, ZeroDivisionError, OverflowError):
        return unknown
    return [values * len(SIZES) if len(values) == 1 else values for values in outputs]


def is_constant(values: Optional[Values]) -> bool:
    """Whether values are the same for every number of examples above one.

    For one, axes of the examples look like those that are broadcast; a batch of one example has nothing to keep apart.
    """
    if values is None:
        return False
    several = [value for value, size in zip(values, SIZES) if size > 1]
    return all(np.array_equal(value, several[0]) for value in several)


def are_compared_for_all(one: Optional[Values], other: Optional[Values]) -> bool:
    """Whether a comparison of numbers that has one result for all of `SIZES` has it for any number of examples.

    It has if each of the two is a constant or a multiple of the number of examples, unless they become equal at a
    number of examples that is not among `SIZES`.
    """
    if one is None or other is None or {value.shape for value in one} != {one[0].shape}:
        return False
    try:
        pairs = [np.broadcast_arrays(*pair) for pair in zip(one, other)]
        numbers = [np.stack([np.ravel(pair[side]) for pair in pairs]).astype("float64") for side in (0, 1)]
    except ValueError:  # of other shapes, or texts
        return False
    slopes = [column[0] / SIZES[0] for column in numbers]
    constant = [(column == column[0]).all(axis=0) for column in numbers]
    multiple = [(column == np.outer(SIZES, slope)).all(axis=0) for column, slope in zip(numbers, slopes)]
    with np.errstate(all="ignore"):
        equal = [numbers[1 - side][0] / slopes[side] for side in (0, 1)]  # how many examples make both equal
        is_tried = [np.isin(count, SIZES) | ((count != np.floor(count)) & (count < max(SIZES))) for count in equal]
        is_never = [(count < 1) | tried for count, tried in zip(equal, is_tried)]
    alike = (constant[0] & constant[1]) | (multiple[0] & multiple[1])
    return bool(np.all(alike | (multiple[0] & constant[1] & is_never[0]) | (constant[0] & multiple[1] & is_never[1])))


def frozen(values: Optional[Values]) -> Frozen:
    """Return values such that they can be compared."""
    if values is None:
        return None
    return tuple((value.dtype.str, value.shape, value.tobytes()) for value in values)


def thawed(values: Frozen) -> Optional[Values]:
    """Return the values that were `frozen`."""
    if values is None:
        return None
    arrays = {one: np.frombuffer(one[2], one[0]).reshape(one[1]) for one in values}
    return [arrays[one] for one in values]


def _different(inputs: Sequence[Optional[Values]]) -> List[List[Any]]:
    """Return the inputs for each of `SIZES`, or once, if they are constants."""
    by_size = [list(one) for one in zip(*(values for values in inputs if values is not None))]
    is_same = all(value is values[0] for values in inputs if values is not None for value in values)
    return by_size[:1] if is_same else by_size


def _as_arrays(result: Any) -> Optional[List[Any]]:
    if result is None:
        return None
    arrays = [np.asarray(array) for array in (result if isinstance(result, list) else [result])]
    return arrays if all(array.size <= LARGEST for array in arrays) else None


def _cast(array: Any, dtype: int) -> Any:
    kind = np.dtype(tf.as_dtype(dtype % 100).as_numpy_dtype)
    return array.astype(np.int64 if kind == np.int32 else kind)  # for products of the last of `SIZES`


def _computes(*kinds: str) -> Callable[[Compute], Compute]:
    def register(compute: Compute) -> Compute:
        _COMPUTE.update(dict.fromkeys(kinds, compute))
        return compute

    return register


def constant_of(node: Node) -> Optional[Values]:
    """Return the value of a Const, if it is small."""
    proto = node.proto.attr["value"].tensor
    if (
        np.prod([axis.size for axis in proto.tensor_shape.dim]) > LARGEST
        or node.dtypes[0] == tf.string.as_datatype_enum
    ):
        return None
    return [tf.make_ndarray(proto)] * len(SIZES)


_UFUNCS: Dict[str, Any] = {
    "Abs": np.abs,
    "Add": np.add,
    "AddV2": np.add,
    "Ceil": np.ceil,
    "Equal": np.equal,
    "Floor": np.floor,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "Greater": np.greater,
    "GreaterEqual": np.greater_equal,
    "Less": np.less,
    "LessEqual": np.less_equal,
    "LogicalAnd": np.logical_and,
    "LogicalNot": np.logical_not,
    "LogicalOr": np.logical_or,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "Mul": np.multiply,
    "Neg": np.negative,
    "NotEqual": np.not_equal,
    "OnesLike": np.ones_like,
    "RealDiv": np.divide,
    "Round": np.rint,
    "Sqrt": np.sqrt,
    "Square": np.square,
    "Sub": np.subtract,
    "ZerosLike": np.zeros_like,
}


@_computes(*_UFUNCS)
def _ufunc(node: Node, inputs: Sequence[Any]) -> Any:
    return _UFUNCS[node.type](*inputs)


@_computes("Cast", "EnsureShape", "Identity", "PreventGradient", "Rank", "Shape", "Size", "Snapshot", "StopGradient")
def _same(node: Node, inputs: Sequence[Any]) -> Any:
    return inputs[0]


@_computes("Div")
def _div(node: Node, inputs: Sequence[Any]) -> Any:
    if np.issubdtype(inputs[0].dtype, np.integer):
        return np.trunc(inputs[0] / inputs[1])
    return inputs[0] / inputs[1]


@_computes("IdentityN", "ShapeN")
def _each(node: Node, inputs: Sequence[Any]) -> Any:
    return list(inputs)


@_computes("Select", "SelectV2")
def _select(node: Node, inputs: Sequence[Any]) -> Any:
    if node.type == "Select" and inputs[0].ndim != inputs[1].ndim and inputs[0].ndim:
        return None
    return np.where(*inputs)


@_computes("Sum", "Prod", "Max", "Min", "All", "Any", "Mean")
def _reduce(node: Node, inputs: Sequence[Any]) -> Any:
    axes = tuple(int(axis) for axis in np.ravel(inputs[1]))
    if node.type == "Mean" and not np.issubdtype(inputs[0].dtype, np.floating):
        return None
    return getattr(np, node.type.lower())(inputs[0], axis=axes, keepdims=node.proto.attr["keep_dims"].b)


@_computes("Pack")
def _pack(node: Node, inputs: Sequence[Any]) -> Any:
    return np.stack(inputs, axis=node.proto.attr["axis"].i)


@_computes("Unpack")
def _unpack(node: Node, inputs: Sequence[Any]) -> Any:
    axis = node.proto.attr["axis"].i
    return [np.take(inputs[0], index, axis) for index in range(inputs[0].shape[axis])]


@_computes("ConcatV2")
def _concat(node: Node, inputs: Sequence[Any]) -> Any:
    return np.concatenate(inputs[:-1], axis=int(inputs[-1]))


@_computes("Concat")
def _old_concat(node: Node, inputs: Sequence[Any]) -> Any:
    return np.concatenate(inputs[1:], axis=int(inputs[0]))


@_computes("Split")
def _split(node: Node, inputs: Sequence[Any]) -> Any:
    return np.split(inputs[1], node.proto.attr["num_split"].i, axis=int(inputs[0]))


@_computes("Range")
def _range(node: Node, inputs: Sequence[Any]) -> Any:
    start, limit, delta = (number.item() for number in inputs)
    return None if abs((limit - start) / delta) > LARGEST else np.arange(start, limit, delta)


@_computes("Fill")
def _fill(node: Node, inputs: Sequence[Any]) -> Any:
    return None if np.prod(inputs[0]) > LARGEST else np.full(inputs[0], inputs[1])


@_computes("BroadcastTo")
def _broadcast_to(node: Node, inputs: Sequence[Any]) -> Any:
    return None if np.prod(inputs[1]) > LARGEST else np.broadcast_to(*inputs)


@_computes("Tile")
def _tile(node: Node, inputs: Sequence[Any]) -> Any:
    return None if np.prod(inputs[1]) * inputs[0].size > LARGEST else np.tile(*inputs)


@_computes("Reshape")
def _reshape(node: Node, inputs: Sequence[Any]) -> Any:
    return np.reshape(*inputs)


@_computes("ExpandDims")
def _expand_dims(node: Node, inputs: Sequence[Any]) -> Any:
    return np.expand_dims(inputs[0], int(np.ravel(inputs[1])[0]))


@_computes("Squeeze")
def _squeeze(node: Node, inputs: Sequence[Any]) -> Any:
    return np.squeeze(inputs[0], tuple(node.proto.attr["squeeze_dims"].list.i) or None)


@_computes("Transpose")
def _transpose(node: Node, inputs: Sequence[Any]) -> Any:
    return np.transpose(*inputs)


@_computes("GatherV2", "Gather")
def _gather(node: Node, inputs: Sequence[Any]) -> Any:
    if node.proto.attr["batch_dims"].i or (inputs[1] < 0).any():
        return None
    return np.take(inputs[0], inputs[1], axis=int(inputs[2]) if len(inputs) > 2 else 0)


@_computes("Slice")
def _slice(node: Node, inputs: Sequence[Any]) -> Any:
    value, begin, size = inputs
    return value[tuple(slice(b, None if s == -1 else b + s) for b, s in zip(begin, size))]


@_computes("StridedSlice")
def _strided_slice(node: Node, inputs: Sequence[Any]) -> Any:
    value, begin, end, strides = inputs
    attributes = node.proto.attr
    index: List[Any] = []
    for k in range(len(begin)):
        bit = 1 << k
        if attributes["ellipsis_mask"].i & bit:
            index.append(Ellipsis)
        elif attributes["new_axis_mask"].i & bit:
            index.append(np.newaxis)
        elif attributes["shrink_axis_mask"].i & bit:
            index.append(int(begin[k]))
        else:
            first = None if attributes["begin_mask"].i & bit else int(begin[k])
            last = None if attributes["end_mask"].i & bit else int(end[k])
            index.append(slice(first, last, int(strides[k])))
    return value[tuple(index)]


@_computes("InvertPermutation")
def _invert_permutation(node: Node, inputs: Sequence[Any]) -> Any:
    return np.argsort(inputs[0])


@_computes("ListDiff")
def _list_diff(node: Node, inputs: Sequence[Any]) -> Any:
    kept = ~np.isin(inputs[0], inputs[1])
    return [inputs[0][kept], np.flatnonzero(kept)]


@_computes("ConcatOffset")
def _concat_offset(node: Node, inputs: Sequence[Any]) -> Any:
    axis, *shapes = inputs
    offsets, offset = [], 0
    for shape in shapes:
        offsets.append(np.zeros_like(shape))
        offsets[-1][int(axis)] = offset
        offset += shape[int(axis)]
    return offsets


@_computes("DynamicStitch", "ParallelDynamicStitch")
def _dynamic_stitch(node: Node, inputs: Sequence[Any]) -> Any:
    half = len(inputs) // 2
    indices, data = inputs[:half], inputs[half:]
    count = max((int(index.max()) + 1 for index in indices if index.size), default=0)
    merged = np.zeros((count,) + data[0].shape[indices[0].ndim :], data[0].dtype)
    written = np.zeros(count, bool)
    for index, part in zip(indices, data):
        merged[index] = part
        written[index] = True
    return merged if written.all() else None


@_computes("BroadcastArgs")
def _broadcast_args(node: Node, inputs: Sequence[Any]) -> Any:
    return np.array(np.broadcast(*(np.broadcast_to(0, shape) for shape in inputs)).shape)


@_computes("BroadcastGradientArgs")
def _broadcast_gradient_args(node: Node, inputs: Sequence[Any]) -> Any:
    rank = max(len(shape) for shape in inputs)
    full = [[1] * (rank - len(shape)) + list(shape) for shape in inputs]
    if list(inputs[0]) == list(inputs[1]):  # then TensorFlow does not look for axes of one entry
        return [np.zeros(0), np.zeros(0)]
    reduced: List[List[int]] = [[], []]
    for axis, lengths in enumerate(zip(*full)):
        for which in (0, 1):
            if lengths[which] == 1:  # an axis of one entry on both sides is reduced on both
                reduced[which].append(axis)
    return [np.array(axes, np.int64) for axes in reduced]
