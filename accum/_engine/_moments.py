"""The mean and variance of a batch from those of its parts (law L13), and where they are kept until they are whole.

The law of total variance: the variance of the whole is the mean of the parts' variances plus the variance of their
means, each part weighed by its number of values. Nothing but operators and `tf.where`, so it serves every face.
"""

from typing import Any, Callable, List, NamedTuple, Optional, Union

from accum._engine._replicas import SUM, local_variable, true_after
from accum._tf import CheckpointOnly, Scalar, new_statistic, tf


class Moments(NamedTuple):
    """`count` values a feature (scalar), their mean and their variance (divided by `count`)."""

    count: Any
    mean: Any
    variance: Any


def pooled(one: Moments, other: Moments) -> Moments:
    """The `Moments` of two parts together. A part of no values counts for nothing, whatever its mean holds."""
    share = tf.math.divide_no_nan(other.count, one.count + other.count)
    apart = other.mean - one.mean
    mean = one.mean + share * apart
    variance = one.variance + share * (other.variance - one.variance) + share * (1.0 - share) * apart * apart
    is_first, is_empty = tf.equal(one.count, 0.0), tf.equal(other.count, 0.0)
    return Moments(
        one.count + other.count,
        tf.where(is_empty, one.mean, tf.where(is_first, other.mean, mean)),
        tf.where(is_empty, one.variance, tf.where(is_first, other.variance, variance)),
    )


def over_replicas(moments: Moments, weight: Optional[Callable[[], Scalar]] = None) -> Moments:
    """The `Moments` of all replicas' parts together, the same on each. Called on each; gradients flow through it.

    The variance is taken around the whole mean, which costs a second reduction: E[x^2] - E[x]^2, for which one would
    do, has no digits left where the mean is large.

    Args:
      moments: `Moments` of this replica's part, which may hold no value.
      weight: function that gives the scalar >= 0 by which this replica's gradients will be multiplied later, asked when
        they are computed; None: 1. What its loss says of another replica's values is multiplied by it here, for there
        it meets that replica's weight.
    """
    count, mean, variance = moments
    mean = tf.where(count > 0.0, mean, tf.zeros_like(mean))  # that of a replica without an example is none
    variance = tf.where(count > 0.0, variance, tf.zeros_like(variance))
    whole_count, total = _sum_over_replicas([count, count * mean], weight)
    whole_mean = tf.math.divide_no_nan(total, whole_count)
    apart = mean - whole_mean
    (spread,) = _sum_over_replicas([count * (variance + apart * apart)], weight)
    return Moments(whole_count, whole_mean, tf.math.divide_no_nan(spread, whole_count))


def _sum_over_replicas(values: List[tf.Tensor], weight: Optional[Callable[[], Scalar]]) -> List[tf.Tensor]:
    all_reduce = tf.distribute.get_replica_context().all_reduce
    if weight is None:
        return all_reduce(SUM, values)

    def divided(grad: tf.Tensor) -> tf.Tensor:
        return tf.math.divide_no_nan(grad, tf.cast(weight(), grad.dtype))

    def multiplied(grad: tf.Tensor) -> tf.Tensor:
        return grad * tf.cast(weight(), grad.dtype)

    sums = all_reduce(SUM, [_with_gradient(value, divided) for value in values])
    return [_with_gradient(value, multiplied) for value in sums]


def _with_gradient(tensor: tf.Tensor, change: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """`tensor`, whose gradient goes through the function `change`."""
    return tf.custom_gradient(lambda value: (tf.identity(value), change))(tensor)


def so_far(total: Moments, is_first: Union[bool, tf.Tensor]) -> Moments:
    """The `Moments` of the micro-batches before, of which there are none if `is_first`, a bool or bool tensor."""
    if is_first is False:
        return total
    return total._replace(count=tf.where(is_first, tf.zeros_like(total.count), total.count))


def with_bessel(variance: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """The unbiased estimate from a variance that was divided by `count`; of one value, itself."""
    return variance * (count / tf.maximum(count - 1.0, 1.0))


def without_bessel(variance: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """The variance divided by `count` from the unbiased estimate."""
    return variance * tf.math.divide_no_nan(tf.maximum(count - 1.0, 1.0), count)


class MomentsAccumulator(CheckpointOnly):
    """The moments of an unfinished cycle, and beside them those of a micro-batch that is not yet known to count.

    Every method runs on one replica and returns an op or tensor to wait for. A micro-batch that is skipped, or whose
    gradients overflow, is overwritten by the next: so nothing has to be undone.

    Attributes:
      latest: `Moments` of variables, the micro-batch's.
      total: `Moments` of variables, the cycle's.
    """

    def __init__(self, name: str, shape: tf.TensorShape, dtype: tf.DType) -> None:
        super().__init__()
        shapes = Moments([], shape, shape)
        self.latest, self.total = (
            Moments(*[new_statistic(f"{name}/{kind}_{part}", getattr(shapes, part), dtype) for part in shapes._fields])
            for kind in ("latest", "total")
        )

    def receive(self, moments: Moments) -> tf.Tensor:
        """Hold the micro-batch's moments until `keep` or `whole` takes them in."""
        return _assign(self.latest, moments)

    def keep(self, is_first: Union[bool, tf.Tensor]) -> tf.Tensor:
        """Pool the micro-batch with those before, of which there are none if `is_first`."""
        kept = _assign(self.total, pooled(so_far(_read(self.total), is_first), _read(self.latest)))
        return self._forget_latest(kept)

    def whole(self, is_first: Union[bool, tf.Tensor], has_latest: bool) -> Moments:
        """The `Moments` of the cycle, with the micro-batch that was received if `has_latest`."""
        before = so_far(_read(self.total), is_first)
        return pooled(before, _read(self.latest)) if has_latest else before

    def clear(self) -> tf.Tensor:
        """Forget everything."""
        zero = [local_variable(part.count).assign(0.0, read_value=False) for part in (self.latest, self.total)]
        return true_after(zero)

    def _forget_latest(self, wait: Any) -> tf.Tensor:
        with tf.control_dependencies([wait]):
            return true_after(local_variable(self.latest.count).assign(0.0, read_value=False))


def _read(variables: Moments) -> Moments:
    return Moments(*[local_variable(variable).read_value() for variable in variables])


def _assign(variables: Moments, moments: Moments) -> tf.Tensor:
    return true_after([local_variable(v).assign(value, read_value=False) for v, value in zip(variables, moments)])
