"""What a function returns of a micro-batch, and how it is combined over the micro-batches of a batch."""

import contextlib
from typing import Any, Callable, Iterator, List, Optional, Sequence, Union

from accum import _tf
from accum._engine._batch import Size
from accum._engine._gradients import weighted
from accum._engine._moments import Moments, pooled, pooled_finite
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


class Rows(Combined):
    """Tensors to be concatenated along their first axis, in the order of the micro-batches.

    XLA knows no concatenation of a list. It gets a stack, for which all micro-batches of the loop must have equally
    many rows.
    """

    _loops: Size

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


class Kept(Rows):
    """A tensor of each micro-batch, to be read again by a later loop over the same micro-batches.

    The tensors are kept in the memory of the host where the model computes on a GPU, which then needs memory for one
    micro-batch alone. XLA keeps them where it computes.

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
        with self._on_host(compiled):
            return super().start(loops, compiled)

    def enter(self, state: Sequence[LoopVariable]) -> None:
        if self._instead_of is not None:
            (self._instead_of.others,) = state

    def add(self, state: Sequence[LoopVariable], index: Size, compiled: bool) -> List[LoopVariable]:
        with self._on_host(compiled):
            return super().add(state, index, compiled)

    def end(self, state: Sequence[LoopVariable], compiled: bool) -> Any:
        return KeptTensors(self.values[0], state[0], lambda: self._joined(state, compiled)[0], compiled)

    @contextlib.contextmanager
    def _on_host(self, compiled: bool) -> Iterator[None]:
        with _tf.variables.keeping_on_host(compiled) as is_elsewhere:
            if is_elsewhere and not isinstance(self.values[0], tf.TensorSpec):
                self.values = [tf.identity(value) for value in self.values]
            yield


class JoinedRows(Kept):
    """A tensor of each micro-batch, kept like those of `Kept`, and concatenated after the last micro-batch."""

    def end(self, state: Sequence[LoopVariable], compiled: bool) -> tf.Tensor:
        with _tf.variables.keeping_on_host(compiled):
            rows = self._joined(state, compiled)[0]
        if self.values[0].shape.rank is not None:
            rows.set_shape([None] + self.values[0].shape.as_list()[1:])
        return rows


class KeptTensors:
    """The tensors of all micro-batches that `Kept` has collected.

    Args:
      first: the tensor of the first micro-batch, or a `tf.TensorSpec` of it if it is in the loop.
      others: `tf.TensorArray` of all, or if XLA compiles this, of all but the first.
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
        with _tf.variables.keeping_on_host(self._compiled):
            return self._joined()

    def at(self, index: Size) -> tf.Tensor:
        """Return the tensor of the micro-batch at `index`, which is not `FIRST`."""
        with _tf.variables.keeping_on_host(self._compiled):
            tensor = self.others.read(index - 1 if self._compiled else index)
        if not tf.executing_eagerly():  # where it has its own
            tensor.set_shape([None] + self.first.shape.as_list()[1:] if self.first.shape.rank else None)
        return tensor


class SlicesSum(Rows):
    """`tf.IndexedSlices` to be added up: their rows are concatenated, which costs no pass over the whole table."""

    def __init__(self, values: tf.Tensor, indices: tf.Tensor, dense_shape: Sequence[int]) -> None:
        super().__init__(values, indices)
        self._dense_shape = dense_shape

    def end(self, state: Sequence[LoopVariable], compiled: bool) -> tf.IndexedSlices:
        values, indices = self._joined(state, compiled)
        return tf.IndexedSlices(values, indices, tf.constant(self._dense_shape, indices.dtype))


def gradient_sum(grad: Optional[Gradient], var: tf.Variable, weight: Optional[Scalar]) -> Optional[Combined]:
    """Return `weight * grad` as something to be added up, in float32 at least; None for no gradient."""
    if grad is None:
        return None
    dtype = _tf.variables.at_least_float32(grad.dtype)
    if isinstance(grad, tf.IndexedSlices):
        values = weighted(tf.cast(grad.values, dtype), weight)
        return SlicesSum(values, grad.indices, var.shape.as_list())
    grad = weighted(tf.cast(grad, dtype), weight)
    grad.set_shape(var.shape)
    return Sum(grad)
