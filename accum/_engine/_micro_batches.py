"""Micro-batches within one batch: run a function on each of them in turn, and combine what it returns (law L18).

    batch -> remainder -> m examples -> m examples -> ...
               |             |             |
             function      function      function
               '------ + ----'------ + ----'------> sums, pooled moments, rows

A batch of n examples is cut into ceil(n / m) micro-batches. The first has the remainder, between 1 and m examples, and
runs outside of the loop: it creates the variables and tells what is summed. All others have exactly m examples and run
in a `tf.while_loop`, one after the other, so that the memory of only one is needed. Their constant size is what XLA can
compile.

Nothing in here communicates between replicas: each replica runs its own part.
"""

from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple, Union

from accum import _tf
from accum._engine._accumulators import weighted
from accum._engine._moments import Moments, pooled
from accum._tf import Gradient, Scalar, tf

Size = Union[int, tf.Tensor]


class Batch:
    """A batch of examples: a nested structure of tensors that share their first axis.

    Scalars, `None` and what is no tensor belong to every micro-batch as a whole.

    Args:
      data: nested structure of tensors, `tf.RaggedTensor`, `tf.SparseTensor` or arrays.

    Attributes:
      count: the number of examples: an int if it is known now, otherwise an int32 scalar tensor.

    Raises:
      TypeError: something in `data` consists of tensors, but has no known first axis.
      ValueError: nothing in `data` has an axis, or the first axes differ.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._leaves = [_as_tensor(leaf) for leaf in tf.nest.flatten(data)]
        self._batched = [_has_axis(leaf) for leaf in self._leaves]
        counts = [_length(leaf) for leaf, batched in zip(self._leaves, self._batched) if batched]
        if not counts:
            raise ValueError(f"There is no batch to split into micro-batches: nothing has an axis. Received: {data!r}.")
        self.count = _the_same(counts)

    def part(self, start: Size, size: Size) -> Any:
        """Return the examples from `start` to `start + size`, in the structure of the data."""
        parts = [_slice(leaf, start, size) if batched else leaf for leaf, batched in zip(self._leaves, self._batched)]
        return tf.nest.pack_sequence_as(self._data, parts)

    def count_of(self, part: Any) -> Size:
        """Return the number of examples in what `part` has returned."""
        return next(_length(leaf) for leaf, batched in zip(tf.nest.flatten(part), self._batched) if batched)


def _as_tensor(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)):
        return leaf
    if hasattr(leaf, "__array__") or isinstance(leaf, tf.Variable):
        return tf.convert_to_tensor(leaf)
    if tf.nest.flatten(leaf, expand_composites=True)[0] is not leaf:
        raise TypeError(
            "Micro-batches split tensors, `tf.RaggedTensor` and `tf.SparseTensor` along their first axis, and can't "
            f"split this: make it of those. Received: {leaf!r}."
        )
    return leaf


def _has_axis(leaf: Any) -> bool:
    if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        return True
    return isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0


def _length(leaf: Any) -> Size:
    """Return the length of the first axis: an int if it is known, otherwise an int32 scalar tensor."""
    known = leaf.shape[0] if leaf.shape.rank else None
    known = getattr(known, "value", known)  # a `Dimension` in a static graph of TF 1.15
    if known is not None:
        return int(known)
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    return tf.cast(leaf.dense_shape[0] if isinstance(leaf, tf.SparseTensor) else tf.shape(leaf)[0], tf.int32)


def _the_same(counts: Sequence[Size]) -> Size:
    """Return the one number that all `counts` are, and check that they are, now or when the graph runs."""
    message = (
        "Micro-batches split the first axis of everything that has one, so it must be the batch in all of them: "
        "give the others a batch axis, or make them part of the model."
    )
    known = sorted({count for count in counts if isinstance(count, int)})
    if len(known) > 1:
        raise ValueError(f"{message} Received: first axes of lengths {known}.")
    unknown = [count for count in counts if not isinstance(count, int)]
    if not unknown:
        return known[0]
    first, others = unknown[0], unknown[1:] + known
    checks = [tf.debugging.assert_equal(other, first, message=message) for other in others]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(first) if others else first


def _slice(leaf: Any, start: Size, size: Size) -> Any:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf[start : start + size]
    if isinstance(leaf, tf.SparseTensor):
        shape = leaf.dense_shape
        begin = tf.concat([[tf.cast(start, tf.int64)], tf.zeros_like(shape[1:])], axis=0)
        sizes = tf.concat([[tf.cast(size, tf.int64)], shape[1:]], axis=0)
        part = tf.sparse.slice(leaf, begin, sizes)
        return tf.SparseTensor(part.indices, part.values, sizes)
    rest = leaf.shape.rank - 1 if leaf.shape.rank is not None else tf.rank(leaf) - 1
    begin, sizes = tf.pad([start], [[0, rest]]), tf.pad([size], [[0, rest]], constant_values=-1)
    if isinstance(rest, int):  # constants keep the static shape, and XLA of TF 2.2 slices by nothing else
        known = [-1 if axis is None else axis for axis in leaf.shape.as_list()[1:]]
        begin, sizes = tf.stack([start] + [0] * rest), [size] + known
    part = tf.slice(leaf, begin, sizes)
    if leaf.shape.rank is not None:
        part.set_shape([size if isinstance(size, int) else None] + leaf.shape.as_list()[1:])
    return part


# ----------------------------------------------------------------------------------------------------------------
# What a function returns of a micro-batch, and how it is combined


class Combined:
    """What is combined over the micro-batches.

    Attributes:
      values: list of the tensors of this micro-batch.
    """

    def __init__(self, *values: tf.Tensor) -> None:
        self.values: List[Any] = list(values)

    def start(self, loops: Size, compiled: bool) -> List[Any]:
        """Return the loop variables after the first micro-batch."""
        return self.values

    def add(self, state: Sequence[Any], index: Any, compiled: bool) -> List[Any]:
        """Return the loop variables after this micro-batch, the `index`-th in the loop."""
        raise NotImplementedError

    def skip(self, state: Sequence[Any], index: int) -> List[Any]:
        """Return the loop variables after the `index`-th micro-batch, which has no such value. Called eagerly."""
        return list(state)

    def end(self, state: Sequence[Any], compiled: bool) -> Any:
        """Return the result after the last micro-batch. Called on what the first one returned."""
        return state[0]


class Sum(Combined):
    """A tensor to be added up over the micro-batches."""

    def add(self, state: Sequence[Any], index: Any, compiled: bool) -> List[Any]:
        total = state[0] + self.values[0]
        total.set_shape(state[0].shape)
        return [total]


class Pooled(Combined):
    """`Moments` to be pooled over the micro-batches."""

    def add(self, state: Sequence[Any], index: Any, compiled: bool) -> List[Any]:
        return list(pooled(Moments(*state), Moments(*self.values)))

    def end(self, state: Sequence[Any], compiled: bool) -> Moments:
        return Moments(*state)


class Rows(Combined):
    """Tensors to be concatenated along their first axis, in the order of the micro-batches.

    XLA knows no concatenation of a list. It gets a stack, for which all micro-batches of the loop must have equally
    many rows.
    """

    _loops: Size

    def start(self, loops: Size, compiled: bool) -> List[Any]:
        self._loops = loops
        return [self._array(value, loops, compiled) for value in self.values]

    @staticmethod
    def _array(value: tf.Tensor, loops: Size, compiled: bool) -> tf.TensorArray:
        shape = value.shape
        shape = tf.TensorShape([None] + shape.as_list()[1:]) if shape.rank is not None else shape
        length = tf.maximum(loops, 1) if compiled else loops + 1  # XLA compiles a loop that never runs, too
        rows = tf.TensorArray(value.dtype, size=length, element_shape=shape, infer_shape=False)
        return rows if compiled else rows.write(0, value)

    def add(self, state: Sequence[Any], index: Any, compiled: bool) -> List[Any]:
        return [rows.write(index if compiled else index + 1, value) for rows, value in zip(state, self.values)]

    def skip(self, state: Sequence[Any], index: int) -> List[Any]:
        return [rows.write(index + 1, value[:0]) for rows, value in zip(state, self.values)]

    def end(self, state: Sequence[Any], compiled: bool) -> Any:
        return self._joined(state, compiled)[0]

    def _joined(self, state: Sequence[Any], compiled: bool) -> List[tf.Tensor]:
        if not compiled:
            return [rows.concat() for rows in state]
        if isinstance(self._loops, int) and self._loops == 0:
            return self.values
        return [self._after(value, rows) for value, rows in zip(self.values, state)]

    def _after(self, value: tf.Tensor, rows: tf.TensorArray) -> tf.Tensor:
        shape = tf.concat([[-1], tf.shape(value)[1:]], axis=0)
        return tf.concat([value, tf.reshape(rows.stack()[: self._loops], shape)], axis=0)


class SlicesSum(Rows):
    """`tf.IndexedSlices` to be added up: their rows are concatenated, which costs no pass over the whole table."""

    def __init__(self, grad: tf.IndexedSlices, dense_shape: Sequence[int]) -> None:
        super().__init__(grad.values, grad.indices)
        self._dense_shape = dense_shape

    def end(self, state: Sequence[Any], compiled: bool) -> tf.IndexedSlices:
        values, indices = self._joined(state, compiled)
        return tf.IndexedSlices(values, indices, tf.constant(self._dense_shape, indices.dtype))


def gradient_sum(grad: Optional[Gradient], var: tf.Variable, weight: Optional[Scalar]) -> Any:
    """Return `weight * grad` as something to be added up, in float32 at least; None for no gradient."""
    if grad is None:
        return None
    dtype = _tf.at_least_float32(grad.dtype)
    if isinstance(grad, tf.IndexedSlices):
        values = weighted(tf.cast(grad.values, dtype), weight)
        return SlicesSum(tf.IndexedSlices(values, grad.indices), var.shape.as_list())
    grad = weighted(tf.cast(grad, dtype), weight)
    grad.set_shape(var.shape)
    return Sum(grad)


def divided(total: Optional[Gradient], weight: Optional[Scalar], dtype: Optional[tf.DType]) -> Optional[Gradient]:
    """Return a sum of gradients divided by `weight`, in `dtype` if there is one. Weight 0 gives 0."""
    if total is None:
        return None
    if isinstance(total, tf.IndexedSlices):
        return tf.IndexedSlices(divided(total.values, weight, dtype), total.indices, total.dense_shape)
    if weight is not None:
        total = tf.math.divide_no_nan(total, tf.cast(weight, total.dtype))
    return total if dtype is None else tf.cast(total, dtype)


# ----------------------------------------------------------------------------------------------------------------


class _Cuts(NamedTuple):
    """Where a batch is cut: `first` examples, then `loops` times `size`."""

    first: Size
    loops: Size
    size: Size


def _cut(count: Size, size: Size) -> _Cuts:
    if isinstance(count, int) and isinstance(size, int):
        first = (count - 1) % size + 1 if count else 0
        return _Cuts(first, (count - first) // size, size)
    first = tf.minimum(tf.math.floormod(count - 1, size) + 1, count)
    # No micro-batch is larger than the batch: XLA compiles the loop's body even if it never runs.
    return _Cuts(first, (count - first) // size, tf.minimum(size, tf.maximum(count, 1)))


def over_micro_batches(
    function: Callable[[Any], Any], batch: Batch, size: Size, compiled: bool = False, as_function: bool = False
) -> Any:
    """Run `function` on each micro-batch in turn, and combine the results.

    Args:
      function: function of a micro-batch, in the structure of the batch's data. It returns a nested structure of
        `Combined` and None, the same for each micro-batch. Eagerly, a value may be None for some of them only.
      batch: a `Batch`.
      size: int >= 1 or an int32 scalar tensor, the largest number of examples in a micro-batch.
      compiled: whether XLA compiles this, which needs shapes that are known when it does.
      as_function: whether to call `function` as a `tf.function` in the loop, for code that must not be in a loop.

    Returns:
      The structure that `function` returns, with the combined values.
    """
    cuts = _cut(batch.count, size)
    first = function(batch.part(0, cuts.first))
    leaves = tf.nest.flatten(first)
    states = [None if leaf is None else leaf.start(cuts.loops, compiled) for leaf in leaves]

    def returned(index: Any) -> List[Optional[Combined]]:
        part = batch.part(cuts.first + index * cuts.size, cuts.size)
        return _within_function(function, part) if as_function else tf.nest.flatten(function(part))

    if tf.executing_eagerly():
        _add_eagerly(returned, int(cuts.loops), leaves, states)
    elif not isinstance(cuts.loops, int) or cuts.loops > 0:
        states = _add_in_graph(returned, cuts.loops, leaves, states, compiled)
    ended = [None if leaf is None else leaf.end(state, compiled) for leaf, state in zip(leaves, states)]
    return tf.nest.pack_sequence_as(first, ended)


def _within_function(function: Callable[[Any], Any], part: Any) -> List[Optional[Combined]]:
    """Call `function(part)` within a `tf.function`, and bring the values that it returns out of it."""
    found: List[Optional[Combined]] = []

    def values() -> List[List[Any]]:
        found[:] = tf.nest.flatten(function(part))
        return [[] if leaf is None else leaf.values for leaf in found]

    outsides = tf.function(values)()
    for leaf, outside in zip(found, outsides):
        if leaf is not None:
            leaf.values = list(outside)
    return found


def _add_eagerly(
    returned: Callable[[int], List[Optional[Combined]]], loops: int, leaves: List[Any], states: List[Any]
) -> None:
    """Add the micro-batches of the loop to `states`, in place. Python code may return None for some of them only."""
    for index in range(loops):
        values = returned(index)
        _require_alike(leaves, values, may_lack=True)
        for place, value in enumerate(values):
            if value is None:
                states[place] = None if leaves[place] is None else leaves[place].skip(states[place], index)
            elif leaves[place] is not None:
                states[place] = value.add(states[place], index, compiled=False)
            else:  # the first micro-batch that has it
                leaves[place], states[place] = value, value.start(loops, compiled=False)
                for earlier in range(index + 1):
                    states[place] = value.skip(states[place], earlier)


def _add_in_graph(
    returned: Callable[[tf.Tensor], List[Optional[Combined]]],
    loops: Size,
    leaves: Sequence[Optional[Combined]],
    states: Sequence[Any],
    compiled: bool,
) -> List[Any]:
    """Return `states` after the micro-batches of a `tf.while_loop`.

    It starts after the first micro-batch has ended, because their memory must not add up.
    """

    def body(index: Any, states: Any) -> Tuple[Any, Any]:
        values = returned(index)
        _require_alike(leaves, values)
        added = [value for value in values if value is not None]
        return index + 1, [value.add(state, index, compiled) for value, state in zip(added, states)]

    with tf.control_dependencies([value for leaf in leaves if leaf is not None for value in leaf.values]):
        index = tf.identity(tf.constant(0))
    # XLA needs a bound to differentiate a loop.
    bound = {"maximum_iterations": loops} if compiled and isinstance(loops, int) else {}
    before = index, [state for state in states if state is not None]
    _, after = tf.while_loop(lambda index, _: index < loops, body, before, parallel_iterations=1, **bound)
    following = iter(after)
    return [None if state is None else next(following) for state in states]


def _require_alike(leaves: Sequence[Any], values: Sequence[Any], may_lack: bool = False) -> None:
    """Raise unless a micro-batch returns what another one does, or None for some of it if `may_lack`."""
    is_alike = [
        type(one) is type(other) or (may_lack and (one is None or other is None)) for one, other in zip(leaves, values)
    ]
    if len(leaves) != len(values) or not all(is_alike):
        raise ValueError(
            "A micro-batch computes other gradients or values than the one before it: let every micro-batch use the "
            "same variables in the same way, whatever its size."
        )
