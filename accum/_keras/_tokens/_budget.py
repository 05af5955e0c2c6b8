"""Micro-batches of sequences with about equally many tokens: sorted by length, cut by a budget, trimmed (law L18).

    lengths [3 9 2 7], budget 12 -> order [1 3 0 2] -> [9] [7] [3 2] -> time axes of 9, 7 and 3 tokens

A micro-batch of c examples of at most t tokens pays for c * t tokens, padding included. The examples of a batch are
sorted by their lengths, the longest first, and each micro-batch takes as many of them as its budget allows. Its tensors
end where its longest example does.

Source: the idea of micro-batches by tokens is that of `seqlen_balancing` in verl, which balances them over workers.
"""

from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

from accum._engine._batch import Batch, Size, as_tensor, has_axis
from accum._engine._combined import Combined, Concatenated, SlicesSum
from accum._engine._micro_batches import FIRST, WHOLE, Index, MicroBatches, Sizes
from accum._tf import Leaf, Nested, tf

SHORTEST = 2
"""No time axis is trimmed to fewer tokens: an axis of length 1 may be one that is broadcast."""

_POWERS = [2**k for k in range(31)]
_BUCKETS = sorted(_POWERS + [3 * 2**k for k in range(29)])
"""The lengths of a time axis where shapes have to be few: 1, 2, 3, 4, 6, 8, 12, … A fifth is padding, on average."""


class TokenPlan(NamedTuple):
    """Which examples are in which micro-batch.

    Attributes:
      order: int32 [n], the places of the examples in the batch, the longest example first.
      begins: int32 [k], the place in `order` at which each micro-batch begins.
      sizes: int32 [k], the number of examples in each.
      lengths: int32 [k], the length of the time axis in each: that of its longest example, or of a bucket.
    """

    order: tf.Tensor
    begins: tf.Tensor
    sizes: tf.Tensor
    lengths: tf.Tensor


def plan_of(lengths: tf.Tensor, budget: int, longest: Optional[tf.Tensor] = None) -> TokenPlan:
    """Cut a batch so that no micro-batch has more than `budget` tokens with padding, or else it has one example.

    Args:
      lengths: int32 [n], the number of tokens in each example, >= 1.
      budget: int >= 1.
      longest: int32 scalar tensor, the length of the padded sequences, for micro-batches of few different shapes: their
        lengths are rounded up to buckets, and their numbers of examples down to powers of two. None: do not round.
    """
    count = tf.size(lengths)
    order = tf.argsort(lengths, direction="DESCENDING", stable=True)
    ordered = tf.gather(lengths, order)
    if longest is not None:
        bucket = tf.gather(_BUCKETS, tf.searchsorted(_BUCKETS, ordered))
        ordered = tf.minimum(tf.minimum(bucket, longest), tf.maximum(ordered, budget))
    rooms = tf.maximum(budget // tf.maximum(ordered, 1), 1)  # how many examples fit after each that is the longest

    def taken(begin: tf.Tensor) -> tf.Tensor:
        if longest is None:
            return rooms[begin]
        room = tf.minimum(rooms[begin], count - begin)
        return tf.gather(_POWERS, tf.searchsorted(_POWERS, room[None], side="right")[0] - 1)

    def body(begin: tf.Tensor, number: tf.Tensor, begins: tf.TensorArray) -> Tuple[tf.Tensor, tf.Tensor, Any]:
        return begin + taken(begin), number + 1, begins.write(number, begin)

    begins = tf.TensorArray(tf.int32, size=0, dynamic_size=True, element_shape=[])
    start = tf.constant(0), tf.constant(0), begins
    _, number, begins = tf.while_loop(lambda begin, *_: begin < count, body, start)
    starts = begins.stack() if not tf.executing_eagerly() or int(number) else tf.zeros([0], tf.int32)
    starts = tf.cond(number > 0, lambda: starts, lambda: tf.zeros([1], tf.int32))  # of a batch without examples
    sizes = tf.concat([starts[1:], [count]], 0) - starts
    return TokenPlan(order, starts, sizes, tf.gather(tf.concat([ordered, [1]], 0), starts))


class Sequences(NamedTuple):
    """The time axis of a batch.

    Attributes:
      lengths: int32 [n], the number of tokens in each example.
      padded: the length of the time axis in the batch, an int or an int32 scalar tensor; None: all is ragged.
      are_timed: whether axis 1 of each leaf of the data is the time, in the order of `tf.nest.flatten`.
    """

    lengths: tf.Tensor
    padded: Any
    are_timed: Sequence[bool]


class TokenBatches(MicroBatches):
    """The micro-batches of one batch of sequences, over which functions can run one after the other.

    Args:
      data: nested structure of tensors, the batch.
      sequences: its time axis.
      budget: int >= 1, the largest number of tokens in a micro-batch, padding included.
      as_function: as for `MicroBatches`.
      has_time: function of a tensor of a micro-batch -> whether axis 1 is the time, as far as can be told.
      has_few_shapes: whether to round the shapes of micro-batches, for which XLA compiles.

    Attributes:
      plan: the `TokenPlan`.
      padded: int32 scalar tensor, the length of the time axis in the batch, or None.
    """

    def __init__(
        self,
        data: Nested,
        sequences: Sequences,
        budget: int,
        as_function: bool = False,
        has_time: Callable[[tf.Tensor], bool] = lambda tensor: False,
        has_few_shapes: bool = False,
    ) -> None:
        floor = SHORTEST if sequences.padded is None else tf.minimum(SHORTEST, sequences.padded)
        self.padded = None if sequences.padded is None else tf.convert_to_tensor(sequences.padded)
        lengths = tf.maximum(sequences.lengths, floor)
        self.plan = plan_of(lengths, budget, self.padded if has_few_shapes else None)
        self._lengths = sequences.lengths
        self._are_timed = list(sequences.are_timed)
        self._inverse = tf.argsort(self.plan.order)
        self._has_time = has_time
        data = tf.nest.map_structure(self._ordered, data)
        super().__init__(Batch(data), 1, as_function=as_function)
        self.sizes = Sizes(self.plan.sizes[0], tf.size(self.plan.sizes) - 1, 1)

    def _ordered(self, leaf: Leaf) -> Leaf:
        if isinstance(leaf, tf.SparseTensor):
            raise ValueError(
                "`micro_batch_tokens` sorts the examples of a batch, and can't sort a `tf.SparseTensor`: make it dense "
                f"or ragged, or pass `micro_batch_size`. Received: {leaf!r}. [accum: tokens-input]"
            )
        leaf = as_tensor(leaf)
        return tf.gather(leaf, self.plan.order) if has_axis(leaf) else leaf

    def _number(self, index: Index) -> Size:
        return 0 if index is FIRST else index

    def begin(self, index: Index) -> Size:
        return 0 if index is WHOLE else self.plan.begins[self._number(index)]

    def size_of(self, index: Index) -> Size:
        return self.batch.count if index is WHOLE else self.plan.sizes[self._number(index)]

    def length_of(self, index: Index) -> tf.Tensor:
        """Return the length of the time axis of the micro-batch at `index`, an int32 scalar tensor."""
        return self.plan.lengths[self._number(index)]

    def places(self, index: Index) -> tf.Tensor:
        """Return the places in the batch of the examples of the micro-batch at `index`, int32 of shape [its size]."""
        return tf.slice(self.plan.order, [self.begin(index)], [self.size_of(index)])

    def part(self, batch: Batch, index: Index) -> Nested:
        return self.trimmed(super().part(batch, index), self.length_of(index))

    def trimmed(self, part: Nested, length: tf.Tensor) -> Nested:
        """Return some examples without what follows the first `length` tokens."""
        leaves = zip(tf.nest.flatten(part), self._are_timed)
        kept = [trim(leaf, length) if is_timed else leaf for leaf, is_timed in leaves]
        return tf.nest.pack_sequence_as(part, kept)

    def run(self, function: Callable[[Nested, Index], Nested], *args: Any, **kwargs: Any) -> Nested:
        """Run `function` as `MicroBatches.run` does. `Concatenated` keep the order and the padding of the batch.

        Padding is zeros, but for `Concatenated` of the data itself, which have that of the data.
        """

        def with_padding(part: Nested, index: Index) -> Nested:
            returned = function(part, index)
            for rows in tf.nest.flatten(returned):
                if isinstance(rows, Concatenated) and not isinstance(rows, SlicesSum):
                    rows.values = [self._with_padding(value, index, rows.origin) for value in rows.values]
            return returned

        return super().run(with_padding, *args, **kwargs)

    def _with_padding(self, value: tf.Tensor, index: Index, origin: Optional[int]) -> tf.Tensor:
        if self.padded is None or not self._has_time(value):
            return value
        lengths = tf.gather(self._lengths, self.places(index))
        padded = pad(value, self.length_of(index), self.padded, lengths)
        if origin is None:
            return padded
        leaf = tf.nest.flatten(super().part(self.batch, index))[origin]
        leaf = tf.reshape(tf.cast(leaf, value.dtype), tf.shape(padded))
        return tf.where(_is_token(lengths, padded), padded, leaf)

    def _ended(self, leaf: Combined, state: List[Any]) -> Any:
        ended = super()._ended(leaf, state)
        if isinstance(leaf, Concatenated) and not isinstance(leaf, SlicesSum):
            return tf.gather(ended, self._inverse)
        return ended


def trim(leaf: tf.Tensor, length: tf.Tensor) -> tf.Tensor:
    """Return the first `length` entries along axis 1."""
    if tf.executing_eagerly():
        return leaf[:, :length]
    # Whatever TensorFlow can tell of this micro-batch, others have another length.
    sizes = tf.stack([-1, length] + [-1] * (leaf.shape.rank - 2))
    part = tf.slice(leaf, tf.zeros(leaf.shape.rank, tf.int32), sizes)
    part.set_shape([None, None] + leaf.shape.as_list()[2:])
    return part


def _is_token(lengths: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Return which steps along axis 1 of `value` are before the ends of the examples, as a mask that broadcasts."""
    mask = tf.sequence_mask(lengths, tf.shape(value)[1])
    return tf.reshape(mask, tf.concat([tf.shape(mask), tf.ones([value.shape.rank - 2], tf.int32)], 0))


def pad(value: tf.Tensor, length: tf.Tensor, padded: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    """Return a tensor with `padded` entries along axis 1 instead of `length`, and with zeros where there is padding.

    It is returned as it is if axis 1 has another length.

    Args:
      value: tensor of shape [count, length, ...].
      length, padded: int32 scalar tensors.
      lengths: int32 [count], where each example ends.
    """
    lengths = tf.where(tf.equal(tf.shape(value)[1], length), lengths, tf.shape(value)[1])
    value = tf.where(_is_token(lengths, value), value, tf.zeros([], value.dtype))
    lacking = tf.where(tf.equal(tf.shape(value)[1], length), padded - length, 0)
    paddings = tf.stack([[0, 0], tf.stack([0, lacking])] + [[0, 0]] * (value.shape.rank - 2))
    result = tf.pad(value, paddings)
    if not tf.executing_eagerly():
        result.set_shape([value.shape[0], None] + value.shape.as_list()[2:])
    return result
