"""How what a function returns for each micro-batch is combined: sums, pooled moments, rows."""

from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

from accum import _tf
from accum._engine._batch import Size
from accum._engine._gradients import weighted
from accum._engine._statistics import Moments, pooled, pooled_finite
from accum._tf import Gradient, Scalar, tf

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
      are_same: whether all micro-batches have the same rows, as of all positions. The full batch has each of them once,
        and clipping and some optimizers would treat their parts one by one.
    """

    def __init__(
        self,
        values: tf.Tensor,
        indices: tf.Tensor,
        dense_shape: Sequence[int],
        are_positions: bool = False,
        are_same: bool = False,
    ) -> None:
        super().__init__(values, indices)
        self._dense_shape = dense_shape
        self._are_positions = are_positions
        self._are_same = are_same

    def start(self, loops: Size, compiled: bool) -> List[LoopVariable]:
        return self.values if self._is_alike(compiled) else super().start(loops, compiled)

    def add(self, state: Sequence[LoopVariable], index: Size, compiled: bool) -> List[LoopVariable]:
        if self._is_alike(compiled):
            return [*Sum(self.values[0]).add(state, index, compiled), state[1]]
        return super().add(state, index, compiled)

    def _is_alike(self, compiled: bool) -> bool:
        """Whether each micro-batch has the same rows: XLA lets all have positions of one length."""
        return self._are_same or (compiled and self._are_positions)

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
        if tf.executing_eagerly():  # where nothing tells positions from examples; see `looked_up_for_all`
            return SlicesSum(values, grad.indices, shape)
        given = {tensor.op for tensor in examples}
        if _tf.op_walks.depends_on_variables_alone(grad.indices, examples=given):
            return SlicesSum(values, grad.indices, shape, are_same=True)
        are_positions = _tf.op_walks.depends_on_variables_alone(grad.indices, or_lengths=True, examples=given)
        return SlicesSum(values, grad.indices, shape, are_positions)
    grad = weighted(tf.cast(grad, dtype), weight)
    grad.set_shape(var.shape)
    return Sum(grad)
