"""Compute the mean and variance of a batch from those of its parts, and accumulate them over a cycle (law L13).

By the law of total variance, the variance of the whole is the mean of the parts' variances plus the variance of their
means, where each part is weighted by its number of values.
"""

from typing import Any, Callable, List, NamedTuple, Optional, Union

from accum._engine import _replicas
from accum._engine._custom_gradient import custom_gradient
from accum._engine._replicas import local_variable, true_after
from accum._tf import Scalar, Wait, tf
from accum._tf.tracking import CheckpointOnly
from accum._tf.variables import new_statistic


class Moments(NamedTuple):
    """The number of values of each feature (a scalar), their mean, and their variance (divided by `count`)."""

    count: Any
    mean: Any
    variance: Any


def pooled(one: Moments, other: Moments) -> Moments:
    """Combine the `Moments` of two parts. A part without values has no effect, even if its mean is NaN."""
    whole = pooled_finite(one, other)
    is_first, is_empty = tf.equal(one.count, 0.0), tf.equal(other.count, 0.0)
    return Moments(
        whole.count,
        tf.where(is_empty, one.mean, tf.where(is_first, other.mean, whole.mean)),
        tf.where(is_empty, one.variance, tf.where(is_first, other.variance, whole.variance)),
    )


def pooled_finite(one: Moments, other: Moments) -> Moments:
    """Combine the `Moments` of two parts, in few operations. Those of a part without values must be 0."""
    count = one.count + other.count
    share = tf.math.divide_no_nan(other.count, count)
    apart = other.mean - one.mean
    step = share * apart
    # Two sums of two: a sum of three may become a temporary variable, which TensorFlow then loses in a loop.
    variance = one.variance + share * ((other.variance - one.variance) + apart * (apart - step))
    return Moments(count, one.mean + step, variance)


def over_replicas(
    moments: Moments, weight: Optional[Callable[[], Scalar]] = None, group_size: Optional[int] = None
) -> Moments:
    """Combine the `Moments` of all replicas' parts. Every replica calls this and gets the same result.

    Gradients flow through it. The variance is computed around the mean of all parts, which takes a second reduction.
    The formula E[x^2] - E[x]^2 would take only one, but loses all digits if the mean is large.

    Args:
      moments: `Moments` of this replica's part, which may be empty.
      weight: function that returns the scalar >= 0 by which this replica's gradients will be multiplied later. It is
        called when they are computed. None: 1. The loss of a replica also depends on the values of other replicas.
        That part of its gradient needs the weight of this replica, but will be multiplied by the weight of the replica
        that holds the values. So it is multiplied by the former and divided by the latter here.
      group_size: the number of replicas whose parts are combined, as for `_replicas.sum_of_group`. None: all.
    """
    group_size = _replicas.count() if group_size is None else group_size
    count, mean, variance = moments
    mean = tf.where(count > 0.0, mean, tf.zeros_like(mean))  # NaN on a replica without examples
    variance = tf.where(count > 0.0, variance, tf.zeros_like(variance))
    whole_count, total = _sum_of_group([count, count * mean], weight, group_size)
    whole_mean = tf.math.divide_no_nan(total, whole_count)
    apart = mean - whole_mean
    (spread,) = _sum_of_group([count * (variance + apart * apart)], weight, group_size)
    return Moments(whole_count, whole_mean, tf.math.divide_no_nan(spread, whole_count))


def _sum_of_group(values: List[tf.Tensor], weight: Optional[Callable[[], Scalar]], group_size: int) -> List[tf.Tensor]:
    if weight is None:
        return _replicas.sum_of_group(values, group_size)

    def divided(grad: tf.Tensor) -> tf.Tensor:
        return tf.math.divide_no_nan(grad, tf.cast(weight(), grad.dtype))

    def multiplied(grad: tf.Tensor) -> tf.Tensor:
        return grad * tf.cast(weight(), grad.dtype)

    sums = _replicas.sum_of_group([_with_gradient(value, divided) for value in values], group_size)
    return [_with_gradient(value, multiplied) for value in sums]


def _with_gradient(tensor: tf.Tensor, change: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Return `tensor` unchanged, and apply the function `change` to its gradient."""
    (value,) = custom_gradient(lambda value: ([tf.identity(value)], change))(tensor)
    return value


def so_far(total: Moments, is_first: Union[bool, tf.Tensor]) -> Moments:
    """Return the `Moments` of the earlier micro-batches of a cycle: `total`, or empty ones if `is_first`."""
    if is_first is False:
        return total
    return total._replace(count=tf.where(is_first, tf.zeros_like(total.count), total.count))


def with_bessel(variance: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Convert a variance that was divided by `count` to the unbiased estimate. That of one value does not change."""
    return variance * (count / tf.maximum(count - 1.0, 1.0))


def without_bessel(variance: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Convert an unbiased estimate to the variance divided by `count`."""
    return variance * tf.math.divide_no_nan(tf.maximum(count - 1.0, 1.0), count)


class MomentsAccumulator(CheckpointOnly):
    """The moments of an unfinished cycle, and separately those of the latest micro-batch, which may yet be skipped.

    Every method runs on one replica. If a micro-batch is skipped, or its gradients overflow, the next one overwrites
    its moments, so nothing has to be undone.

    Attributes:
      latest: `Moments` of variables, for the latest micro-batch.
      total: `Moments` of variables, for the cycle.
    """

    def __init__(self, name: str, shape: tf.TensorShape, dtype: tf.DType) -> None:
        super().__init__()
        shapes = Moments([], shape, shape)
        self.latest, self.total = (
            Moments(*[new_statistic(f"{name}/{kind}_{part}", getattr(shapes, part), dtype) for part in shapes._fields])
            for kind in ("latest", "total")
        )

    def receive(self, moments: Moments) -> tf.Tensor:
        """Store the moments of the latest micro-batch, for `keep` or `whole`. Returns a tensor to wait for."""
        return _assign(self.latest, moments)

    def keep(self, is_first: Union[bool, tf.Tensor]) -> tf.Tensor:
        """Add the latest micro-batch to the cycle, which it begins if `is_first`. Returns a tensor to wait for."""
        kept = _assign(self.total, pooled(so_far(_read(self.total), is_first), _read(self.latest)))
        return self._forget_latest(kept)

    def whole(self, is_first: Union[bool, tf.Tensor], has_latest: bool) -> Moments:
        """Return the `Moments` of the cycle, including the latest micro-batch if `has_latest`."""
        before = so_far(_read(self.total), is_first)
        return pooled(before, _read(self.latest)) if has_latest else before

    def clear(self) -> tf.Tensor:
        """Discard all moments. Returns a tensor to wait for."""
        zero = [local_variable(part.count).assign(0.0, read_value=False) for part in (self.latest, self.total)]
        return true_after(zero)

    def _forget_latest(self, wait: Wait) -> tf.Tensor:
        with tf.control_dependencies([wait]):
            return true_after(local_variable(self.latest.count).assign(0.0, read_value=False))


def _read(variables: Moments) -> Moments:
    return Moments(*[local_variable(variable).read_value() for variable in variables])


def _assign(variables: Moments, moments: Moments) -> tf.Tensor:
    return true_after([local_variable(v).assign(value, read_value=False) for v, value in zip(variables, moments)])
