"""A batch of examples, which can be split along its first axis: `Batch`."""

from typing import List, Optional, Sequence, Set, Union

from accum import _tf
from accum._tf import Leaf, Nested, tf

Size = Union[int, tf.Tensor]
"""A number of examples: an int if it is known when a graph is built, otherwise an int32 scalar tensor."""


class Batch:
    """A batch of examples: a nested structure of tensors that share their first axis.

    Scalars, `None` and objects other than tensors belong to every micro-batch as a whole.

    Args:
      data: nested structure of tensors, `tf.RaggedTensor`, `tf.SparseTensor` or arrays.

    Attributes:
      count: the number of examples: an int if it is known now, otherwise an int32 scalar tensor. Where it is first
        asked for, the first axes are compared that are not known now.

    Raises:
      TypeError: something in `data` consists of tensors, but has no known first axis.
      ValueError: nothing in `data` has an axis, or the first axes differ.
    """

    def __init__(self, data: Nested) -> None:
        self._data = data
        self._leaves = [as_tensor(leaf) for leaf in tf.nest.flatten(data)]
        self._batched = [has_axis(leaf) for leaf in self._leaves]
        self._lengths = _lengths(data, self._leaves)
        _refuse_others({length for length in self._lengths if isinstance(length, int)})
        self._count: Optional[Size] = None

    @property
    def count(self) -> Size:
        if self._count is None:
            self._count = _the_same(self._lengths)
        return self._count

    @property
    def is_dense(self) -> bool:
        """Whether all that it holds of an example is dense."""
        return not any(isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)) for leaf in self._leaves)

    @property
    def tensors(self) -> List[tf.Tensor]:
        """Those of the batch, in the order of `flatten`."""
        return [tensor for leaf in self._leaves for tensor in _components(leaf)]

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


UNLIKE = (
    "Micro-batches split the first axis of everything that has one, so it must be the batch in all of them: "
    "give the others a batch axis, or make them part of the model. [accum: batch-axis]"
)


def _refuse_others(lengths: Set[int]) -> None:
    """Raise if there are several."""
    if len(lengths) > 1:
        raise ValueError(f"{UNLIKE} Received: first axes of lengths {sorted(lengths)}.")


def _the_same(counts: Sequence[Size]) -> Size:
    """Return the one number that all `counts` are, and let the graph check those that are not known now."""
    static = list({count for count in counts if isinstance(count, int)})
    dynamic = [count for count in counts if not isinstance(count, int)]
    if not dynamic:
        return static[0]
    first, others = dynamic[0], dynamic[1:] + static
    if others and _tf.graphs.is_compiled_by_xla_here():  # which drops assertions, but compiles no such rows
        return tf.shape(tf.concat([tf.zeros([1, count]) for count in dynamic + static], axis=0))[1]
    checks = [tf.debugging.assert_equal(other, first, message=UNLIKE) for other in others]
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
