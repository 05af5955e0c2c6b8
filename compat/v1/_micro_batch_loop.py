"""A loop of TensorFlow 1 over the micro-batches of a batch, and what it keeps of each (law L18)."""

from typing import Any, Callable, Dict, List, Sequence, Tuple

from accum import _tf
from accum._rows import Layout
from accum._tf import Gradient, tf

State = Tuple[Any, ...]
Values = Dict[str, Any]


class Joined:
    """Rows of all micro-batches, put together.

    Args:
      tensor: what each micro-batch computes.
      layout: where its examples lie.
      shape: the static shape of the result.
    """

    def __init__(self, tensor: tf.Tensor, layout: Layout, shape: tf.TensorShape) -> None:
        self._tensor = tensor
        self._layout = layout
        self._shape = shape

    def init(self, count: tf.Tensor) -> State:
        return (tf.TensorArray(self._tensor.dtype.base_dtype, size=count, infer_shape=False),)

    def update(self, state: State, number: tf.Tensor, count: tf.Tensor, values: Values) -> State:
        rows = examples_first(values[self._tensor.name], self._layout, self._shape.rank, count)
        return (state[0].write(number, rows),)

    def finalize(self, state: State) -> tf.Tensor:
        result = examples_in_place(state[0].concat(), self._layout, self._shape.rank)
        result.set_shape(self._shape)
        return result


class Added:
    """A sum over all micro-batches, with at least the digits of float32.

    Args:
      grad: what each micro-batch computes.
      source: what it is the gradient by.
    """

    def __init__(self, grad: tf.Tensor, source: tf.Tensor) -> None:
        self._grad = grad
        self._source = source
        self._dtype = _tf.variables.at_least_float32(grad.dtype)

    def init(self, count: tf.Tensor) -> State:
        del count
        if self._source.dtype == tf.resource:
            shape = tf.raw_ops.VariableShape(input=self._source)
        else:
            shape = tf.shape(self._source)
        zeros = tf.zeros(shape, self._dtype)
        zeros.set_shape(self._grad.shape)
        return (zeros,)

    def update(self, state: State, number: tf.Tensor, count: tf.Tensor, values: Values) -> State:
        total = state[0] + tf.cast(values[self._grad.name], self._dtype)
        total.set_shape(state[0].shape)
        return (total,)

    def finalize(self, state: State) -> tf.Tensor:
        return tf.cast(state[0], self._grad.dtype)


class Slices:
    """`tf.IndexedSlices` of all micro-batches, one after the other."""

    def __init__(self, grad: tf.IndexedSlices) -> None:
        self._grad = grad
        self._parts = [
            Joined(part, Layout(0), tf.TensorShape([None]).concatenate(part.shape[1:])) for part in _parts(grad)
        ]

    def init(self, count: tf.Tensor) -> State:
        return tuple(state for part in self._parts for state in part.init(count))

    def update(self, state: State, number: tf.Tensor, count: tf.Tensor, values: Values) -> State:
        return tuple(new for part, old in zip(self._parts, state) for new in part.update((old,), number, count, values))

    def finalize(self, state: State) -> tf.IndexedSlices:
        values, indices = (part.finalize((one,)) for part, one in zip(self._parts, state))
        return tf.IndexedSlices(values, indices, self._grad.dense_shape)


def _parts(grad: tf.IndexedSlices) -> List[tf.Tensor]:
    return [grad.values, grad.indices]


def fetches_of(grad: Gradient) -> List[tf.Tensor]:
    """Return the tensors of which a gradient consists."""
    return _parts(grad) if isinstance(grad, tf.IndexedSlices) else [grad]


def over_micro_batches(
    total: tf.Tensor, size: int, compute: Callable[[tf.Tensor, tf.Tensor], Values], combined: Sequence[Any]
) -> List[Any]:
    """Compute micro-batches, one after the other. Returns what is kept of each of them.

    Args:
      total: int32 scalar, the number of examples. None is one empty micro-batch.
      size: the largest number of examples in a micro-batch; the last one has the rest.
      compute: function of (place of the first example, number of examples) that returns {name: tensor}.
      combined: list of `Joined`, `Added` and `Slices`.
    """
    count = tf.maximum(-(-total // size), 1)

    def body(number: tf.Tensor, states: List[State]) -> Tuple[tf.Tensor, List[State]]:
        begin = number * size
        examples = tf.minimum(size, total - begin)
        # The loop waits for what the context waits for, the operations in it need not, and those of loops in it can't.
        with _tf.graphs.in_graph_context(_tf.graphs.current_graph_context()):
            values = compute(begin, examples)
        return number + 1, [one.update(state, number, examples, values) for one, state in zip(combined, states)]

    with _tf.graphs.control_flow_of_tf(1):
        _, states = tf.while_loop(
            lambda number, _: number < count,
            body,
            (tf.constant(0), [one.init(count) for one in combined]),
            parallel_iterations=1,
            back_prop=False,
            name="micro_batches",
        )
        return [one.finalize(state) for one, state in zip(combined, states)]


def rows_of_micro_batch(
    tensor: tf.Tensor, layout: Layout, begin: tf.Tensor, count: tf.Tensor, total: tf.Tensor
) -> tf.Tensor:
    """Return the rows of some examples, each of which has as many entries along an axis."""
    parted, axis = _blocks_apart(tensor, layout, total)
    each = tf.shape(parted)[axis] // tf.maximum(total, 1)
    behind = tensor.shape.rank - layout.axis - 1
    begins = [0] * axis + [begin * each] + [0] * behind
    sizes = [-1] * axis + [count * each] + [-1] * behind
    rows = _blocks_together(tf.slice(parted, begins, sizes), layout)
    rows.set_shape([None if one == layout.axis else length for one, length in enumerate(tensor.shape.as_list())])
    return rows


def examples_first(tensor: tf.Tensor, layout: Layout, rank: int, count: tf.Tensor) -> tf.Tensor:
    """Return rows with the entries of the examples along the first axis; if they are in blocks, those have another."""
    parted, axis = _blocks_apart(tensor, layout, count)
    return _swapped(parted, axis, rank + axis - layout.axis)


def examples_in_place(tensor: tf.Tensor, layout: Layout, rank: int) -> tf.Tensor:
    """Return rows as they were before `examples_first`."""
    has_blocks = layout.blocks != 1
    return _blocks_together(_swapped(tensor, layout.axis + has_blocks, rank + has_blocks), layout)


def _blocks_apart(tensor: tf.Tensor, layout: Layout, count: tf.Tensor) -> Tuple[tf.Tensor, int]:
    """Return rows of `count` examples in one block, after an axis of blocks if there are several, and their axis."""
    if layout.blocks == 1:
        return tensor, layout.axis
    shape, axis = tf.shape(tensor), layout.axis
    block = count * layout.per_example
    parted = [shape[axis] // tf.maximum(block, 1), block]
    return tf.reshape(tensor, tf.concat([shape[:axis], parted, shape[axis + 1 :]], 0)), axis + 1


def _blocks_together(tensor: tf.Tensor, layout: Layout) -> tf.Tensor:
    """Return rows as they were before `_blocks_apart`."""
    if layout.blocks == 1:
        return tensor
    shape, axis = tf.shape(tensor), layout.axis
    return tf.reshape(tensor, tf.concat([shape[:axis], [shape[axis] * shape[axis + 1]], shape[axis + 2 :]], 0))


def _swapped(tensor: tf.Tensor, axis: int, rank: int) -> tf.Tensor:
    """Return a tensor with an axis in the place of the first, and the first in its place."""
    if axis == 0:
        return tensor
    order = list(range(rank))
    order[0], order[axis] = axis, 0
    return tf.transpose(tensor, order)
