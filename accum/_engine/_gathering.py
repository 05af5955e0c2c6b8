"""Concatenate tensors of several replicas, so that a loss may compare the examples of all of them (law L19).

Each replica then computes the same loss, of all examples, and its gradient goes back to the replicas that hold them.
"""

from typing import Callable, List, Optional, Sequence, Tuple

from accum import _tf
from accum._engine import _replicas
from accum._engine._custom_gradient import GradientFunction, custom_gradient
from accum._engine._replicas import SUM
from accum._tf import Scalar, tf


def rows_of_group(
    tensors: Sequence[tf.Tensor], group_size: int, weight: Callable[[], Optional[Scalar]]
) -> List[tf.Tensor]:
    """Concatenate tensors along their first axis over the replicas of a group. Every replica calls this.

    Args:
      tensors: list of real numbers or bools. Their first axes may have different lengths on different replicas, 0
        included; the others are the same on all.
      group_size: the number of replicas in a group, as for `_replicas.sum_of_group`.
      weight: function that returns the scalar >= 0 by which this replica's gradients will be multiplied later, or None
        for 1; called when they are computed. See `_moments.over_replicas`.

    Returns:
      List of tensors, the same on all replicas of the group, in the order of the replicas.

    Raises:
      ValueError, or tf.errors.InvalidArgumentError when a graph runs: axes other than the first differ.
    """
    _replicas.require_numbers()
    context = tf.distribute.get_replica_context()
    number = tf.cast(context.replica_id_in_sync_group, tf.int32)
    counts = _counts(context, number, tensors)
    ends = tf.pad(tf.cumsum(tf.cast(counts, tf.int32)), [[1, 0], [0, 0]])  # (replicas + 1, tensors)
    first = number // group_size * group_size
    bounds = [ends[number], ends[number + 1], ends[first], ends[first + group_size], ends[-1]]
    gathers = [_Rows(context, *[bound[index] for bound in bounds]) for index in range(len(tensors))]
    rows = [gather.of_group(tf.stop_gradient(tensor)) for gather, tensor in zip(gathers, tensors)]
    floats = [index for index, tensor in enumerate(tensors) if tensor.dtype.is_floating]

    @custom_gradient
    def linked(*_: tf.Tensor) -> Tuple[List[tf.Tensor], GradientFunction]:
        def grad(*upstream: tf.Tensor) -> List[tf.Tensor]:
            """Add up the gradients of all replicas by this replica's rows, each by the weight of its replica."""
            own_weight = weight()
            own_weight = tf.cast(1.0 if own_weight is None else own_weight, tf.float32)
            grads = []
            for index, grad_of_row in zip(floats, upstream):
                exact = tf.cast(grad_of_row, _tf.variables.at_least_float32(grad_of_row.dtype))
                factor = tf.cast(own_weight, exact.dtype)
                total = tf.math.divide_no_nan(gathers[index].of_replica(factor * exact), factor)
                grads.append(tf.cast(total, grad_of_row.dtype))
            return grads

        return [tf.identity(rows[index]) for index in floats], grad

    for index, tensor in zip(floats, linked(*[tensors[index] for index in floats]) if floats else []):
        rows[index] = tensor
    return rows


def _counts(context: tf.distribute.ReplicaContext, number: tf.Tensor, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the lengths of the first axes of `tensors`, (replicas, tensors), and check that the others are alike."""
    own = tf.cast(tf.concat([tf.shape(tensor) for tensor in tensors], axis=0), tf.float32)
    is_own = tf.equal(tf.range(_replicas.count()), number)
    shapes = context.all_reduce(SUM, tf.where(is_own[:, tf.newaxis], own, tf.zeros_like(own)))
    firsts = [sum(tensor.shape.rank for tensor in tensors[:index]) for index in range(len(tensors))]
    others = [axis for axis in range(sum(tensor.shape.rank for tensor in tensors)) if axis not in firsts]
    checks: List[Optional[tf.Operation]] = []
    if others and not _tf.graphs.is_compiled_by_xla_here():  # which can't raise
        apart = tf.gather(shapes, others, axis=1)
        message = (
            "Over the outputs of several replicas, what a loss receives must have equal axes on all of them, but for "
            "the first: pad the batch before it is distributed, or pass `replicas_per_group={'loss': 1}`, with which "
            "each replica computes its own loss."
        )
        checks.append(tf.debugging.assert_equal(apart, tf.broadcast_to(apart[:1], tf.shape(apart)), message=message))
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.gather(shapes, firsts, axis=1)


class _Rows:
    """Where the rows of this replica and of its group are among those of all replicas.

    Args:
      context: the replica context.
      begin, end: those of this replica.
      group_begin, group_end: those of its group.
      count: the number of all.
    """

    def __init__(
        self,
        context: tf.distribute.ReplicaContext,
        begin: tf.Tensor,
        end: tf.Tensor,
        group_begin: tf.Tensor,
        group_end: tf.Tensor,
        count: tf.Tensor,
    ) -> None:
        self._context = context
        self._own = begin, end
        self._group = group_begin, group_end
        self._count = count

    def of_group(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the rows of the group, given those of this replica."""
        # Collectives know few dtypes. All but one of the numbers that they add up are 0, so nothing is rounded.
        dtype = tensor.dtype if tensor.dtype.size > 4 else tf.float32 if tensor.dtype.is_floating else tf.int32
        rows = tf.cast(self._summed(tf.cast(tensor, dtype), self._own, self._group), tensor.dtype)
        rows.set_shape([None] + tensor.shape.as_list()[1:])
        return rows

    def of_replica(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the sum over all replicas of the rows of this replica, given those of the group."""
        return self._summed(tensor, self._group, self._own)

    def _summed(
        self, tensor: tf.Tensor, span: Tuple[tf.Tensor, tf.Tensor], wanted: Tuple[tf.Tensor, tf.Tensor]
    ) -> tf.Tensor:
        """Put `tensor` in its place among the rows of all replicas, add these up, and return those that are wanted."""
        rows = tf.stack([span[0], self._count - span[1]])
        others = tf.zeros([tensor.shape.rank - 1, 2], tf.int32)
        padded = tf.pad(tensor, tf.concat([rows[tf.newaxis], others], axis=0))
        return self._context.all_reduce(SUM, padded)[wanted[0] : wanted[1]]
