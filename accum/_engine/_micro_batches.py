"""Micro-batches within one batch: run a function on each of them in turn, and combine what it returns (law L18).

    batch -> remainder -> m examples -> m examples -> ...
               |             |             |
             function      function      function
               '------ + ----'------ + ----'------> sums, pooled moments, rows

A batch of n examples is split into ceil(n / m) micro-batches. The first has the remainder, between 1 and m examples,
and runs outside of the loop: it creates the variables and tells what is summed. All others have exactly m examples and
run in a `tf.while_loop`, one after the other, so that the memory of only one is needed. Their constant size is what XLA
can compile. Between workers, the last one runs after the loop: what a loop computes can be used only when it has ended.

Nothing in here communicates between replicas: each replica runs its own part.

A `Batch` is what is split. `Combined` is how one output is combined over the micro-batches.
"""

from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple, Union

from accum import _tf
from accum._engine._gradients import weighted
from accum._engine._statistics import Moments, pooled, pooled_finite
from accum._tf import Gradient, Leaf, Nested, Scalar, tf

# --------------------------------------------------------------------------------------------------------------------
# A batch, and its parts


Size = Union[int, tf.Tensor]
"""A number of examples: an int if it is known when a graph is built, otherwise an int32 scalar tensor."""


class Batch:
    """A batch of examples: a nested structure of tensors that share their first axis.

    Scalars, `None` and objects other than tensors belong to every micro-batch as a whole.

    Args:
      data: nested structure of tensors, `tf.RaggedTensor`, `tf.SparseTensor` or arrays.

    Attributes:
      count: the number of examples: an int if it is known now, otherwise an int32 scalar tensor.

    Raises:
      TypeError: something in `data` consists of tensors, but has no known first axis.
      ValueError: nothing in `data` has an axis, or the first axes differ.
    """

    def __init__(self, data: Nested) -> None:
        self._data = data
        self._leaves = [as_tensor(leaf) for leaf in tf.nest.flatten(data)]
        self._batched = [has_axis(leaf) for leaf in self._leaves]
        self.count = _the_same(_lengths(data, self._leaves))

    @property
    def is_dense(self) -> bool:
        """Whether all that it holds of an example is dense."""
        return not any(isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)) for leaf in self._leaves)

    def specs(self) -> List[tf.TensorSpec]:
        """Return the specs of the tensors of a part of the batch, in the order of `flatten`."""
        specs = []
        for leaf, batched in zip(self._leaves, self._batched):
            for number, tensor in enumerate(_components(leaf)):
                is_shape = isinstance(leaf, tf.SparseTensor) and number == 2
                shape = tensor.shape
                if batched and not is_shape and shape.rank:
                    shape = tf.TensorShape([None] + shape.as_list()[1:])
                specs.append(tf.TensorSpec(shape, tensor.dtype))
        return specs

    def flatten(self, part: Nested) -> List[tf.Tensor]:
        """Return the tensors of what `part` has returned."""
        return [tensor for leaf in tf.nest.flatten(part) for tensor in _components(leaf)]

    def packed(self, tensors: Sequence[tf.Tensor]) -> Nested:
        """Return tensors like those of `flatten` in the structure of the data."""
        following = iter(tensors)
        leaves = []
        for leaf in self._leaves:
            own = [next(following) for _ in _components(leaf)]
            if isinstance(leaf, tf.SparseTensor):
                leaves.append(tf.SparseTensor(*own))
            elif isinstance(leaf, tf.RaggedTensor):
                leaves.append(tf.RaggedTensor.from_nested_row_splits(own[0], own[1:], validate=False))
            else:
                leaves.append(own[0] if own else leaf)
        return tf.nest.pack_sequence_as(self._data, leaves)

    def part(self, start: Size, size: Size) -> Nested:
        """Return the examples from `start` to `start + size`, in the structure of the data."""
        parts = [_slice(leaf, start, size) if batched else leaf for leaf, batched in zip(self._leaves, self._batched)]
        return tf.nest.pack_sequence_as(self._data, parts)

    def count_of(self, part: Nested) -> Size:
        """Return the number of examples in what `part` has returned."""
        return next(_length(leaf) for leaf, batched in zip(tf.nest.flatten(part), self._batched) if batched)


def _components(leaf: Leaf) -> List[tf.Tensor]:
    """Return the tensors that make up one entry of a batch; none if it is no tensor."""
    if isinstance(leaf, tf.SparseTensor):
        return [leaf.indices, leaf.values, leaf.dense_shape]
    if isinstance(leaf, tf.RaggedTensor):
        return [leaf.flat_values] + list(leaf.nested_row_splits)
    return [leaf] if isinstance(leaf, tf.Tensor) else []


def as_tensor(leaf: Leaf) -> Leaf:
    """Return a leaf of a batch as a tensor, or unchanged if it is none."""
    if leaf is None or isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)):
        return leaf
    if hasattr(leaf, "__array__") or isinstance(leaf, tf.Variable):
        return tf.convert_to_tensor(leaf)
    if tf.nest.flatten(leaf, expand_composites=True)[0] is not leaf:
        raise TypeError(
            "Micro-batches split tensors, `tf.RaggedTensor` and `tf.SparseTensor` along their first axis, and can't "
            f"split this: convert it to one of them. Received: {leaf!r}. [accum: batch-axis]"
        )
    return leaf


def largest_count(data: Nested) -> Size:
    """Return the number of examples in the largest batch in `data`, which may hold several.

    Raises:
      TypeError: as for `Batch`.
      ValueError: nothing in `data` has an axis.
    """
    counts = _lengths(data, [as_tensor(leaf) for leaf in tf.nest.flatten(data)])
    known = [count for count in counts if isinstance(count, int)]
    return max(known) if len(known) == len(counts) else tf.reduce_max(tf.stack(counts))


def _lengths(data: Nested, leaves: Sequence[Leaf]) -> List[Size]:
    """Return the lengths of the first axes in `data`, whose leaves as tensors are `leaves`."""
    lengths = [_length(leaf) for leaf in leaves if has_axis(leaf)]
    if not lengths:
        raise ValueError(
            f"There is no batch to split into micro-batches: nothing in the data has an axis. Received: {data!r}."
            " [accum: batch-axis]"
        )
    return lengths


def has_axis(leaf: Leaf) -> bool:
    """Whether a leaf of a batch, as a tensor, has a first axis."""
    if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        return True
    return isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0


def _length(leaf: Leaf) -> Size:
    """Return the length of the first axis: an int if it is known, otherwise an int32 scalar tensor."""
    length = leaf.shape.as_list()[0] if leaf.shape.rank else None
    if length is not None:
        return length
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    return tf.cast(leaf.dense_shape[0] if isinstance(leaf, tf.SparseTensor) else tf.shape(leaf)[0], tf.int32)


def _the_same(counts: Sequence[Size]) -> Size:
    """Return the one number that all `counts` are, and check that they are, now or when the graph runs."""
    message = (
        "Micro-batches split the first axis of everything that has one, so it must be the batch in all of them: "
        "give the others a batch axis, or make them part of the model. [accum: batch-axis]"
    )
    static = sorted({count for count in counts if isinstance(count, int)})
    if len(static) > 1:
        raise ValueError(f"{message} Received: first axes of lengths {static}.")
    dynamic = [count for count in counts if not isinstance(count, int)]
    if not dynamic:
        return static[0]
    first, others = dynamic[0], dynamic[1:] + static
    checks = [tf.debugging.assert_equal(other, first, message=message) for other in others]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(first) if others else first


def _slice(leaf: Leaf, start: Size, size: Size) -> Leaf:
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
        lengths = [-1 if axis is None else axis for axis in leaf.shape.as_list()[1:]]
        begin, sizes = tf.stack([start] + [0] * rest), [size] + lengths
    part = tf.slice(leaf, begin, sizes)
    if leaf.shape.rank is not None:
        part.set_shape([size if isinstance(size, int) else None] + leaf.shape.as_list()[1:])
    return part


# --------------------------------------------------------------------------------------------------------------------
# Outputs, combined over micro-batches


LoopVariable = Union[tf.Tensor, tf.TensorArray]


class Combined:
    """What is combined over the micro-batches.

    Attributes:
      values: list of the tensors of this micro-batch.
    """

    def __init__(self, *values: tf.Tensor) -> None:
        self.values: List[tf.Tensor] = list(values)

    def start(self, loops: Size, compiled: bool) -> List[LoopVariable]:
        """Return the loop variables after the first micro-batch."""
        return self.values

    def add(self, state: Sequence[LoopVariable], index: Size, compiled: bool) -> List[LoopVariable]:
        """Return the loop variables after this micro-batch, at `index` of all."""
        raise NotImplementedError

    def skip(self, state: Sequence[LoopVariable], index: int) -> List[LoopVariable]:
        """Return the loop variables after the micro-batch at `index`, which has no such value. Called eagerly."""
        return list(state)

    def enter(self, state: Sequence[LoopVariable]) -> None:
        """Learn the loop variables before a micro-batch. Called in the loop of a graph, on what the first returned."""
        return None  # AutoGraph of TF 2.2 takes no body without a statement

    def end(self, state: Sequence[LoopVariable], compiled: bool) -> Any:
        """Return the result after the last micro-batch. Called on what the first one returned."""
        return state[0]


class Sum(Combined):
    """A tensor to be added up over the micro-batches."""

    def add(self, state: Sequence[LoopVariable], index: Size, compiled: bool) -> List[LoopVariable]:
        # Not by `+`: with oneDNN, TensorFlow 2.15 fuses a matrix product with a row that is added to it, as if this
        # were a bias, and fails ("bias must be 1-dimensional").
        total = tf.add_n([state[0], self.values[0]])
        total.set_shape(state[0].shape)
        return [total]


class Pooled(Combined):
    """`Moments` to be pooled over the micro-batches."""

    def add(self, state: Sequence[LoopVariable], index: Size, compiled: bool) -> List[LoopVariable]:
        return list(pooled(Moments(*state), Moments(*self.values)))

    def end(self, state: Sequence[LoopVariable], compiled: bool) -> Moments:
        return Moments(*state)


class PooledFinite(Pooled):
    """The same, of parts whose `Moments` are 0 if they have no values."""

    def add(self, state: Sequence[LoopVariable], index: Size, compiled: bool) -> List[LoopVariable]:
        whole = list(pooled_finite(Moments(*state), Moments(*self.values)))
        for value, before in zip(whole, state):
            value.set_shape(before.shape)
        return whole


class Concatenated(Combined):
    """Tensors to be concatenated along their first axis, in the order of the micro-batches.

    XLA knows no concatenation of a list. It gets a stack, for which all micro-batches of the loop must have equally
    many rows.
    """

    _loops: Size
    origin: Optional[int] = None  # the leaf of the batch's data that it is, but for its dtype and axes of length 1

    def start(self, loops: Size, compiled: bool) -> List[LoopVariable]:
        self._loops = loops
        return [self._array(value, loops, compiled) for value in self.values]

    @staticmethod
    def _array(value: tf.Tensor, loops: Size, compiled: bool) -> tf.TensorArray:
        shape = value.shape
        if shape.rank:  # eagerly, it may have been transposed, and another axis be the examples
            rest = [None] * (shape.rank - 1) if tf.executing_eagerly() else shape.as_list()[1:]
            shape = tf.TensorShape([None] + rest)
        length = tf.maximum(loops, 1) if compiled else loops + 1  # XLA compiles a loop that never runs, too
        rows = tf.TensorArray(value.dtype, size=length, element_shape=shape, infer_shape=False, clear_after_read=False)
        return rows if compiled or isinstance(value, tf.TensorSpec) else _written(rows, 0, value)

    def add(self, state: Sequence[LoopVariable], index: Size, compiled: bool) -> List[LoopVariable]:
        return [_written(rows, index - 1 if compiled else index, value) for rows, value in zip(state, self.values)]

    def skip(self, state: Sequence[LoopVariable], index: int) -> List[LoopVariable]:
        return [_written(rows, index, value[:0]) for rows, value in zip(state, self.values)]

    def end(self, state: Sequence[LoopVariable], compiled: bool) -> Any:
        return self._joined(state, compiled)[0]

    def _joined(self, state: Sequence[LoopVariable], compiled: bool) -> List[tf.Tensor]:
        if not compiled:
            return [rows.concat() for rows in state]
        if isinstance(self._loops, int) and self._loops == 0:
            return self.values
        return [self._after(value, rows) for value, rows in zip(self.values, state)]

    def _after(self, value: tf.Tensor, rows: tf.TensorArray) -> tf.Tensor:
        shape = tf.concat([[-1], tf.shape(value)[1:]], axis=0)
        return tf.concat([value, tf.reshape(rows.stack()[: self._loops], shape)], axis=0)


def _written(rows: tf.TensorArray, index: Size, value: tf.Tensor) -> tf.TensorArray:
    written = rows.write(index, value)
    if hasattr(written, "mark_used"):  # TensorFlow logs an error if it is never read, as when a micro-batch fails
        written.mark_used()
    return written


class Kept(Concatenated):
    """A tensor of each micro-batch, to be read again by a later loop over the same micro-batches.

    They are kept where they are computed: copies to the memory of the host and back take a GPU 20 times as long as the
    whole step.

    Args:
      value: the tensor, or a `tf.TensorSpec` of it.
      instead_of: `KeptTensors` of the same shapes that the loop reads for the last time. In the loop of a graph, each
        tensor takes the place of the one of its micro-batch, so that the memory of both is not needed at once.
    """

    def __init__(self, value: Union[tf.Tensor, tf.TensorSpec], instead_of: "Optional[KeptTensors]" = None) -> None:
        super().__init__(value)
        self._instead_of = instead_of

    def start(self, loops: Size, compiled: bool) -> List[LoopVariable]:
        if self._instead_of is not None:
            return [self._instead_of.others]
        return super().start(loops, compiled)

    def enter(self, state: Sequence[LoopVariable]) -> None:
        if self._instead_of is not None:
            (self._instead_of.others,) = state

    def end(self, state: Sequence[LoopVariable], compiled: bool) -> Any:
        return KeptTensors(self.values[0], state[0], lambda: self._joined(state, compiled)[0], compiled)


class JoinedRows(Kept):
    """A tensor of each micro-batch, kept like those of `Kept`, and concatenated after the last micro-batch."""

    def end(self, state: Sequence[LoopVariable], compiled: bool) -> tf.Tensor:
        rows = self._joined(state, compiled)[0]
        if self.values[0].shape.rank is not None:
            rows.set_shape([None] + self.values[0].shape.as_list()[1:])
        return rows


class KeptTensors:
    """The tensors of all micro-batches that `Kept` has collected.

    Args:
      first: the tensor of the first micro-batch, or a `tf.TensorSpec` of it if it is in the loop.
      others: `tf.TensorArray` of all, or if XLA compiles this, of all but the first; None if `first` is of all.
      joined: function that concatenates all of them along the first axis.
      compiled: whether XLA compiles this.
    """

    def __init__(
        self,
        first: tf.Tensor,
        others: tf.TensorArray,
        joined: Callable[[], tf.Tensor],
        compiled: bool = False,
    ) -> None:
        self.first = first
        self._joined = joined
        self.others = others
        self._compiled = compiled

    def is_like(self, value: tf.TensorSpec) -> bool:
        """Whether tensors of a `tf.TensorSpec` can take the place of these, in the loop of a graph."""
        first = self.first
        if not isinstance(first, tf.TensorSpec) or not first.shape.rank or not value.shape.rank:
            return False
        return (first.dtype, first.shape.as_list()) == (value.dtype, value.shape.as_list())

    def joined(self) -> tf.Tensor:
        """Return the tensors of all micro-batches, concatenated along their first axis."""
        return self._joined()

    def at(self, index: Size) -> tf.Tensor:
        """Return the tensor of the micro-batch at `index`, which is not `FIRST`."""
        tensor = self.others.read(index - 1 if self._compiled else index)
        if not tf.executing_eagerly():  # where it has its own
            tensor.set_shape([None] + self.first.shape.as_list()[1:] if self.first.shape.rank else None)
        return tensor


class SlicesSum(Concatenated):
    """`tf.IndexedSlices` to be added up: their rows are concatenated, which costs no pass over the whole table.

    Args:
      values, indices: those of the slices.
      dense_shape: list of ints.
      are_positions: whether the rows depend on no example, so that micro-batches of the same shape have the same ones.
    """

    def __init__(
        self, values: tf.Tensor, indices: tf.Tensor, dense_shape: Sequence[int], are_positions: bool = False
    ) -> None:
        super().__init__(values, indices)
        self._dense_shape = dense_shape
        self._are_positions = are_positions

    def start(self, loops: Size, compiled: bool) -> List[LoopVariable]:
        return self.values if self._is_alike(compiled) else super().start(loops, compiled)

    def add(self, state: Sequence[LoopVariable], index: Size, compiled: bool) -> List[LoopVariable]:
        if self._is_alike(compiled):
            return [*Sum(self.values[0]).add(state, index, compiled), state[1]]
        return super().add(state, index, compiled)

    def _is_alike(self, compiled: bool) -> bool:
        """Whether each micro-batch has the same rows: XLA lets all have positions of one length."""
        return compiled and self._are_positions

    def end(self, state: Sequence[LoopVariable], compiled: bool) -> tf.IndexedSlices:
        if self._is_alike(compiled):
            values, indices = state
        else:
            values, indices = self._joined(state, compiled)
            if self._are_positions:
                values, indices = _once_if_alike(values, indices, state[1].size())
        return tf.IndexedSlices(values, indices, tf.constant(self._dense_shape, indices.dtype))


def _once_if_alike(values: tf.Tensor, indices: tf.Tensor, parts: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
    """Return the slices of all micro-batches, added up if each has the same rows, as of positions in examples."""
    length = tf.shape(indices)[0]
    each = length // parts
    by_part = tf.reshape(indices[: each * parts], tf.stack([parts, each]))
    is_alike = tf.logical_and(tf.equal(each * parts, length), tf.reduce_all(tf.equal(by_part, by_part[:1])))

    def once() -> Tuple[tf.Tensor, tf.Tensor]:
        shape = tf.concat([tf.stack([parts, each]), tf.shape(values)[1:]], axis=0)
        return tf.reduce_sum(tf.reshape(values[: each * parts], shape), axis=0), by_part[0]

    return tf.cond(is_alike, once, lambda: (values, indices))


class SlicesOfSameRows(Combined):
    """`tf.IndexedSlices` to be added up that have the same rows in each micro-batch, such as those of positions.

    The full batch has each of them once, and clipping and some optimizers would treat their parts one by one.
    """

    def __init__(self, values: tf.Tensor, indices: tf.Tensor, dense_shape: Sequence[int]) -> None:
        super().__init__(values, indices)
        self._dense_shape = dense_shape

    def add(self, state: Sequence[LoopVariable], index: Size, compiled: bool) -> List[LoopVariable]:
        return [*Sum(self.values[0]).add(state, index, compiled), state[1]]

    def end(self, state: Sequence[LoopVariable], compiled: bool) -> tf.IndexedSlices:
        values, indices = state
        return tf.IndexedSlices(values, indices, tf.constant(self._dense_shape, indices.dtype))


def _may_be_positions(indices: tf.Tensor) -> bool:
    """Whether rows may be those of positions in each example, where no graph tells: 0, 1, 2, … then."""
    return len(indices) > 1 and bool(
        tf.reduce_all(tf.equal(tf.reshape(indices, [-1]), tf.range(len(indices), dtype=indices.dtype)))
    )


def gradient_sum(
    grad: Optional[Gradient], var: tf.Variable, weight: Optional[Scalar], examples: Sequence[tf.Tensor] = ()
) -> Optional[Combined]:
    """Return `weight * grad` as something to be added up, in float32 at least; None for no gradient.

    `examples` are those of the micro-batch, if they may be constants of the graph.
    """
    if grad is None:
        return None
    dtype = _tf.variables.at_least_float32(grad.dtype)
    if isinstance(grad, tf.IndexedSlices):
        values = weighted(tf.cast(grad.values, dtype), weight)
        shape = var.shape.as_list()
        if tf.executing_eagerly():
            return SlicesSum(values, grad.indices, shape, _may_be_positions(grad.indices))
        given = {tensor.op for tensor in examples}
        if _tf.op_walks.depends_on_variables_alone(grad.indices, examples=given):
            return SlicesOfSameRows(values, grad.indices, shape)
        are_positions = _tf.op_walks.depends_on_variables_alone(grad.indices, or_lengths=True, examples=given)
        return SlicesSum(values, grad.indices, shape, are_positions)
    grad = weighted(tf.cast(grad, dtype), weight)
    grad.set_shape(var.shape)
    return Sum(grad)


# --------------------------------------------------------------------------------------------------------------------
# The loop over micro-batches


Index = Any
"""Which micro-batch: `FIRST`, `WHOLE`, or its number in the loop, an int or int32 scalar tensor."""

LoopState = Optional[List[LoopVariable]]
"""The loop variables of a `Combined`, or None where a micro-batch returns None."""


class Sizes(NamedTuple):
    """How a batch is split: `first` examples, then `loops` times `size`, which is at most the batch."""

    first: Size
    loops: Size
    size: Size


def sizes_of(count: Size, size: Size) -> Sizes:
    """Return how a batch of `count` examples is split into micro-batches of at most `size`."""
    size = max(size, 1) if isinstance(size, int) else tf.maximum(size, 1)  # 0: of a batch without examples
    if isinstance(count, int) and isinstance(size, int):
        first = (count - 1) % size + 1 if count else 0
        return Sizes(first, (count - first) // size, min(size, max(count, 1)))
    first = tf.minimum(tf.math.floormod(count - 1, size) + 1, count)
    # No micro-batch is larger than the batch: XLA compiles the loop's body even if it never runs.
    return Sizes(first, (count - first) // size, tf.minimum(size, tf.maximum(count, 1)))


FIRST = object()
"""In place of an index: the first micro-batch."""

WHOLE = object()
"""In place of an index: all micro-batches at once."""


class MicroBatches:
    """The micro-batches of one batch, over which functions can run one after the other.

    Args:
      batch: a `Batch`.
      size: int >= 1 or an int32 scalar tensor, the largest number of examples in a micro-batch.
      compiled: whether XLA compiles this, which needs shapes that are known when it does.
      as_function: whether to call functions as a `tf.function` in the loop, for code that must not be in a loop.

    Attributes:
      batch, compiled: the same.
      sizes: how the batch is split.
    """

    def __init__(self, batch: Batch, size: Size, compiled: bool = False, as_function: bool = False) -> None:
        self.batch = batch
        self.compiled = compiled
        self._as_function = as_function
        self._is_within_loop = False  # whether the first micro-batch is in the loop that is being built
        self.sizes = sizes_of(batch.count, size)
        self._lacking = self.sizes.first - self.sizes.size  # so much less than the others has the first micro-batch

    def part(self, batch: Batch, index: Index) -> Nested:
        """Return the micro-batch at `index` of any batch that is split like this one, in the structure of its data."""
        return batch.part(self.begin(index), self.size_of(index))

    def begin(self, index: Index) -> Size:
        """Return the place of the first example of the micro-batch at `index`."""
        if index is FIRST or index is WHOLE:
            return 0
        begin = self._lacking + index * self.sizes.size
        return tf.maximum(begin, 0) if self._is_within_loop else begin

    def share(self, index: Index, dtype: tf.DType = tf.float32) -> tf.Tensor:
        """Return the share of the micro-batch at `index` in the examples of the batch, a scalar."""
        return tf.math.divide_no_nan(tf.cast(self.size_of(index), dtype), tf.cast(self.batch.count, dtype))

    def size_of(self, index: Index) -> Size:
        """Return the number of examples of the micro-batch at `index`."""
        first, _, size = self.sizes
        if index is WHOLE:
            return self.batch.count
        if index is FIRST:
            return first
        is_alike = isinstance(first, int) and first == size
        return size if is_alike or not self._is_within_loop else tf.where(index < 1, first, size)

    def run(
        self,
        function: Callable[[Nested, Index], Nested],
        like: Optional[Callable[[], Nested]] = None,
        after: Sequence[tf.Tensor] = (),
        has_last: bool = False,
    ) -> Nested:
        """Run `function` on each micro-batch in turn, and combine the results.

        Args:
          function: function of a micro-batch, in the structure of the batch's data, and of its index: `FIRST`, or an
            int32 scalar tensor that counts from 1 in the loop. It returns a nested structure of `Combined` and None,
            the same for each micro-batch. Eagerly, a value may be None for some of them only.
          like: function that returns what `function` does, with zeros for what is added up and a `tf.TensorSpec` for
            what is not. With it, the first micro-batch is in the loop of a graph too, as 0, unless XLA compiles this,
            and `function` gets None instead of the micro-batch.
          after: what the loop of a graph waits for.
          has_last: whether the last micro-batch is outside of the loop too, in a graph that XLA does not compile: then
            each value can be used as soon as it is computed, while all those of a loop end with it.

        Returns:
          The structure that `function` returns, with the combined values.
        """
        loops = self.sizes.loops
        self._is_within_loop = like is not None and not tf.executing_eagerly() and not self.compiled
        is_given = like is None
        begin = (self.part(self.batch, FIRST) if is_given else None), FIRST
        first = like() if like is not None and self._is_within_loop else function(*begin)
        leaves = tf.nest.flatten(first)
        states = [None if leaf is None else leaf.start(loops, self.compiled) for leaf in leaves]

        def returned(index: Index) -> List[Optional[Combined]]:
            part = self.part(self.batch, index) if is_given else None
            if self._as_function and not tf.executing_eagerly():  # eagerly, the loop is Python's
                return tf.nest.flatten(within_function(lambda: function(part, index)))
            return tf.nest.flatten(function(part, index))

        if tf.executing_eagerly():
            _add_eagerly(returned, int(loops), leaves, states)
        elif self._is_within_loop:
            states = _add_in_graph(returned, loops, leaves, states, False, after)
        elif not isinstance(loops, int) or loops > 0:
            ends = has_last and not self.compiled
            states = _add_in_graph(returned, loops - 1 if ends else loops, leaves, states, self.compiled)
            states = _add_last(returned, loops, leaves, states) if ends else states
        self._is_within_loop = False
        ended = [None if leaf is None else self._ended(leaf, state) for leaf, state in zip(leaves, states)]
        return tf.nest.pack_sequence_as(first, ended)

    def _ended(self, leaf: Combined, state: Any) -> Any:
        """Return the result for what is combined, from its loop variables after the last micro-batch."""
        return leaf.end(state, self.compiled)

    def run_at_once(self, function: Callable[[Nested, Index], Nested]) -> Nested:
        """Run `function` once, on the whole batch and the index `WHOLE`, and return its results like `run`."""
        result = function(self.part(self.batch, WHOLE), WHOLE)
        leaves = tf.nest.flatten(result)
        ended = [None if leaf is None else leaf.end(leaf.start(0, self.compiled), self.compiled) for leaf in leaves]
        return tf.nest.pack_sequence_as(result, ended)


def within_function(function: Callable[[], Nested], **options: Any) -> Nested:
    """Call `function()` within a `tf.function` with these options, and bring the values that it returns out of it.

    It returns a nested structure of `Combined` and None.
    """
    result: Nested = None

    def values() -> List[List[LoopVariable]]:
        nonlocal result
        result = function()
        return [[] if leaf is None else leaf.values for leaf in tf.nest.flatten(result)]

    outsides = tf.function(_tf.graphs.run_as_written(values), **options)()
    for leaf, outside in zip(tf.nest.flatten(result), outsides):
        if leaf is not None:
            leaf.values = list(outside)
    return result


def _add_eagerly(
    returned: Callable[[int], List[Optional[Combined]]],
    loops: int,
    leaves: List[Any],
    states: List[Any],
) -> None:
    """Add the micro-batches of the loop to `states`, in place. Python code may return None for some of them only."""
    for index in range(1, loops + 1):
        values = returned(index)
        _require_alike(leaves, values, may_lack=True)
        for place, value in enumerate(values):
            if value is None:
                states[place] = None if leaves[place] is None else leaves[place].skip(states[place], index)
            elif leaves[place] is not None:
                states[place] = value.add(states[place], index, compiled=False)
            else:  # the first micro-batch that has it
                leaves[place], states[place] = value, value.start(loops, compiled=False)
                for earlier in range(1, index + 1):
                    states[place] = value.skip(states[place], earlier)


def _add_in_graph(
    returned: Callable[[tf.Tensor], List[Optional[Combined]]],
    loops: Size,
    leaves: Sequence[Optional[Combined]],
    states: Sequence[LoopState],
    compiled: bool,
    after: Optional[Sequence[tf.Tensor]] = None,
) -> List[LoopState]:
    """Return `states` after the micro-batches of a `tf.while_loop`.

    It starts after the first micro-batch has ended, because their memory must not add up; or with that one, after what
    is in `after`.
    """

    def body(index: Index, states: Any) -> Tuple[tf.Tensor, List[List[LoopVariable]]]:
        for leaf, state in zip([leaf for leaf in leaves if leaf is not None], states):
            leaf.enter(state)
        values = returned(index)
        _require_alike(leaves, values)
        added = [value for value in values if value is not None]
        return index + 1, [value.add(state, index, compiled) for value, state in zip(added, states)]

    waits = [value for leaf in leaves if leaf is not None for value in leaf.values] if after is None else after
    with tf.control_dependencies(list(waits)):
        index = tf.identity(tf.constant(1 if after is None else 0))
    # XLA needs a bound to differentiate a loop.
    bound = {"maximum_iterations": loops} if compiled and isinstance(loops, int) else {}
    before = index, [state for state in states if state is not None]
    _, states_after = tf.while_loop(lambda index, _: index <= loops, body, before, parallel_iterations=1, **bound)
    following = iter(states_after)
    return [None if state is None else next(following) for state in states]


def _add_last(
    returned: Callable[[tf.Tensor], List[Optional[Combined]]],
    index: Size,
    leaves: Sequence[Optional[Combined]],
    states: Sequence[LoopState],
) -> List[LoopState]:
    """Return `states` after the micro-batch at `index` too, which begins after all others, if there is one."""
    present = [state for state in states if state is not None]

    def added() -> List[List[LoopVariable]]:
        with tf.control_dependencies([getattr(value, "flow", value) for value in tf.nest.flatten(present)]):
            number = tf.identity(tf.convert_to_tensor(index))
        for leaf, state in zip([leaf for leaf in leaves if leaf is not None], present):
            leaf.enter(state)
        with tf.control_dependencies([number]):
            values = returned(number)
        _require_alike(leaves, values)
        return [value.add(state, number, False) for value, state in zip([v for v in values if v is not None], present)]

    following = iter(added() if isinstance(index, int) else tf.cond(index > 0, added, lambda: present, name="last"))
    return [None if state is None else next(following) for state in states]


def _require_alike(
    leaves: Sequence[Optional[Combined]], values: Sequence[Optional[Combined]], may_lack: bool = False
) -> None:
    """Raise unless a micro-batch returns what another one does, or None for some of it if `may_lack`."""
    is_alike = [
        type(one) is type(other) or (may_lack and (one is None or other is None)) for one, other in zip(leaves, values)
    ]
    if len(leaves) != len(values) or not all(is_alike):
        raise ValueError(
            "A micro-batch computes other gradients or values than the one before it: let every micro-batch use the "
            "same variables in the same way, at any size. [accum: unlike-micro-batches]"
        )
