"""Concatenate tensors of several replicas, so that a loss may compare the examples of all of them (law L19).

Each replica then computes the same loss, of all examples, and its gradient goes back to the replicas that hold them.
"""

from typing import Any, Callable, List, Optional, Sequence

from accum._engine import _replicas
from accum._engine._replicas import SUM
from accum._tf import Scalar, tf


def rows_of_group(
    tensors: Sequence[tf.Tensor], group_size: int, weight: Callable[[], Optional[Scalar]]
) -> List[tf.Tensor]:
    """Concatenate tensors along their first axis over the replicas of a group. Every replica calls this.

    Args:
      tensors: list of numbers or bools. The first axes may have different lengths on different replicas, 0 included;
        the others are the same on all.
      group_size: the number of replicas in a group, as for `_replicas.sum_of_group`.
      weight: function that returns the scalar >= 0 by which this replica's gradients will be multiplied later, or None
        for 1; called when they are computed. See `_moments.over_replicas`.

    Returns:
      List of tensors, the same on all replicas of the group, in the order of the replicas.
    """
    context = tf.distribute.get_replica_context()
    number = tf.cast(context.replica_id_in_sync_group, tf.int32)
    is_own = tf.equal(tf.range(_replicas.count()), number)
    own = tf.stack([tf.cast(tf.shape(tensor)[0], tf.float32) for tensor in tensors])
    counts = context.all_reduce(SUM, tf.where(is_own[:, tf.newaxis], own, tf.zeros_like(own)))
    ends = tf.pad(tf.cumsum(tf.cast(counts, tf.int32)), [[1, 0], [0, 0]])  # (replicas + 1, tensors)
    first = number // group_size * group_size
    bounds = [ends[number], ends[number + 1], ends[first], ends[first + group_size], ends[-1]]
    return [
        _Rows(context, *[bound[place] for bound in bounds], weight=weight).of_group(tensor)
        for place, tensor in enumerate(tensors)
    ]


class _Rows:
    """Where the rows of this replica and of its group are among those of all replicas.

    Args:
      context: the replica context.
      begin, end: those of this replica.
      group_begin, group_end: those of its group.
      count: the number of all.
      weight: as for `rows_of_group`.
    """

    def __init__(
        self, context: Any, begin: Any, end: Any, group_begin: Any, group_end: Any, count: Any, weight: Any
    ) -> None:
        self._context = context
        self._own = begin, end
        self._group = group_begin, group_end
        self._count = count
        self._weight = weight

    def of_group(self, tensor: tf.Tensor) -> tf.Tensor:
        if tensor.dtype == tf.bool:
            return tf.cast(self.of_group(tf.cast(tensor, tf.int32)), tf.bool)
        rows = self._summed(tf.stop_gradient(tensor), self._own, self._group)
        rows.set_shape([None] + tensor.shape.as_list()[1:])
        if not tensor.dtype.is_floating:
            return rows

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            """Add up the gradients of all replicas by this replica's rows, each by the weight of its replica."""
            weight = self._weight()
            weight = tf.cast(1.0 if weight is None else weight, upstream.dtype)
            return tf.math.divide_no_nan(self._summed(weight * upstream, self._group, self._own), weight)

        return tf.custom_gradient(lambda _: (tf.identity(rows), gradient))(tensor)

    def _summed(self, tensor: tf.Tensor, place: Any, wanted: Any) -> tf.Tensor:
        """Put `tensor` in its place among the rows of all replicas, add these up, and return those that are wanted."""
        rows = tf.stack([place[0], self._count - place[1]])
        others = tf.zeros([tensor.shape.rank - 1, 2], tf.int32)
        padded = tf.pad(tensor, tf.concat([rows[tf.newaxis], others], axis=0))
        return self._context.all_reduce(SUM, padded)[wanted[0] : wanted[1]]
