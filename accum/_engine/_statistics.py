"""Mean and variance over a whole batch, and the normalisation by them (laws L13 and L19).

`Moments` are computed from those of a batch's parts, and accumulated over a cycle. By the law of total variance, the
variance of the whole is the mean of the parts' variances plus the variance of their means, where each part is weighted
by its number of values.

`Normalization` normalises a micro-batch by them, and differentiates this.
"""

from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple, Union

from accum import _tf
from accum._engine import _replicas
from accum._engine._gradients import DifferentiatedFunction, GradientFunction, custom_gradient
from accum._engine._replicas import local_variable, true_after
from accum._tf import Scalar, Wait, tf
from accum._tf.tracking import CheckpointOnly
from accum._tf.variables import new_statistic

# --------------------------------------------------------------------------------------------------------------------
# Moments

NORMALIZED = "accum_normalized"
"""The name scope of what normalises by the moments of the batch, with a gradient of accum's own."""


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
        return self.forget_latest(kept)

    def whole(self, is_first: Union[bool, tf.Tensor]) -> Moments:
        """Return the `Moments` of the cycle, which the latest micro-batch begins if `is_first`, and ends."""
        return pooled(so_far(_read(self.total), is_first), _read(self.latest))

    def without_latest(self) -> Moments:
        """Return the `Moments` of the unfinished cycle."""
        return _read(self.total)

    def forget_latest(self, wait: Wait) -> tf.Tensor:
        """Discard the moments of the latest micro-batch, after `wait`. Returns a tensor to wait for."""
        with tf.control_dependencies([wait]):
            return true_after(local_variable(self.latest.count).assign(0.0, read_value=False))


def _read(variables: Moments) -> Moments:
    return Moments(*[local_variable(variable).read_value() for variable in variables])


def _assign(variables: Moments, moments: Moments) -> tf.Tensor:
    return true_after([local_variable(v).assign(value, read_value=False) for v, value in zip(variables, moments)])


# --------------------------------------------------------------------------------------------------------------------
# Normalisation by the statistics of the whole batch


LEAST_EPSILON = 1.001e-5
"""The least that the operation for images takes on every TensorFlow."""


class Normalization(NamedTuple):
    """Statistics of each feature over some axes.

    Attributes:
      axes: the axes over which they are taken, >= 0.
      rank: that of what is normalised.
      shape: that of a statistic: [features], or of `rank` axes, with 1 for each of `axes`.
    """

    axes: Tuple[int, ...]
    rank: int
    shape: Sequence[int]

    def count(self, values: tf.Tensor) -> tf.Tensor:
        """Return the number of values of a feature, in their dtype."""
        return tf.reduce_prod(tf.cast(tf.gather(tf.shape(values), self.axes), values.dtype))

    def moments(self, values: tf.Tensor, count: tf.Tensor, taken: Optional[tf.Tensor] = None) -> Moments:
        """Return the `Moments` of a part; `taken` is 1 for values that count, and 0 for others."""
        if taken is None and self._is_image(values):
            return self._image_moments(values, count)
        total = self.summed(values if taken is None else taken * values)
        mean = tf.math.divide_no_nan(total, count)
        apart = tf.math.squared_difference(values, self.broadcast(mean))
        spread = self.summed(apart if taken is None else taken * apart)
        return Moments(count, mean, tf.math.divide_no_nan(spread, count))

    def gradient(
        self,
        values: tf.Tensor,
        whole: Moments,
        by_mean: tf.Tensor,
        by_variance: tf.Tensor,
        taken: Optional[tf.Tensor] = None,
    ) -> tf.Tensor:
        """Return the gradient by the values of a part, given those by mean and variance of the whole."""
        slope = 2.0 * tf.math.divide_no_nan(by_variance, whole.count)
        offset = tf.math.divide_no_nan(by_mean, whole.count)
        if taken is None and self._is_image(values):
            return _line_of_image(values, whole.mean, slope, offset)
        grad = (values - self.broadcast(whole.mean)) * self.broadcast(slope) + self.broadcast(offset)
        return grad if taken is None else taken * grad

    def normalized(
        self,
        values: tf.Tensor,
        mean: tf.Tensor,
        variance: tf.Tensor,
        gamma: Optional[tf.Tensor],
        beta: Optional[tf.Tensor],
        epsilon: float,
        asked: Callable[[], None] = lambda: None,
    ) -> tf.Tensor:
        """Return gamma (values - mean) / sqrt(variance + epsilon) + beta, with a gradient in few operations.

        `asked` is called where its gradient is taken.
        """
        dtype, has_beta = values.dtype, beta is not None
        gamma = tf.ones(self.shape, dtype) if gamma is None else gamma
        beta = tf.zeros(self.shape, dtype) if beta is None else beta
        mean, variance = tf.cast(mean, dtype), tf.cast(variance, dtype)

        def normalized(values: tf.Tensor, *features: tf.Tensor) -> Tuple[List[tf.Tensor], GradientFunction]:
            mean, variance, gamma, beta = features
            inverse = tf.math.rsqrt(variance + epsilon)
            scale, middle = self.broadcast(gamma * inverse), self.broadcast(mean)
            outputs = (values - middle) * scale
            if has_beta:
                outputs += self.broadcast(beta)

            def grad(upstream: tf.Tensor) -> Sequence[tf.Tensor]:
                asked()
                by_beta = self.summed(upstream)
                by_scale = self.summed(upstream * (values - middle))
                by_variance = -0.5 * by_scale * gamma * inverse * inverse * inverse
                return upstream * scale, -gamma * inverse * by_beta, by_variance, inverse * by_scale, by_beta

            return [outputs], grad

        rule = _image_rule(epsilon, asked) if self._is_image(values) and epsilon >= LEAST_EPSILON else normalized
        with tf.name_scope(NORMALIZED):
            (outputs,) = custom_gradient(rule)(values, mean, variance, gamma, beta)
        outputs.set_shape(values.shape)
        return outputs

    def _is_image(self, values: tf.Tensor) -> bool:
        """Whether the operations for images compute this, each in one pass over the values instead of several."""
        is_image = self.rank == 4 and self.axes == (0, 1, 2) and len(self.shape) == 1 and values.shape.rank == 4
        # On a GPU, the gradient of that operation is not deterministic, and an error where determinism is asked for.
        return is_image and values.dtype == tf.float32 and not _tf.variables.has_gpu()

    def _image_moments(self, values: tf.Tensor, count: tf.Tensor) -> Moments:
        """Return the `Moments` of images, by the operation that normalises by them; its other output is not used."""
        features = tf.ones(self.shape), tf.zeros(self.shape)
        outputs = tf.raw_ops.FusedBatchNormV3(
            x=values, scale=features[0], offset=features[1], mean=[], variance=[], data_format="NHWC", is_training=True
        )
        mean, variance = (tf.where(count > 0.0, value, features[1]) for value in outputs[1:3])  # NaN without examples
        return Moments(count, mean, without_bessel(variance, count))

    def summed(self, values: tf.Tensor) -> tf.Tensor:
        """Return the sum of the values of each feature."""
        total = tf.reduce_sum(values, self.axes, keepdims=len(self.shape) == self.rank)
        total.set_shape(self.shape)
        return total

    def broadcast(self, value: tf.Tensor) -> tf.Tensor:
        """Return a statistic in a shape in which it can be combined with what is normalised."""
        if len(self.shape) == self.rank or self.rank - 1 not in self.axes:  # of one feature axis, the last one
            return value
        return tf.reshape(value, [1 if axis in self.axes else -1 for axis in range(self.rank)])


def _image_rule(epsilon: float, asked: Callable[[], None]) -> DifferentiatedFunction:
    """Return the function that normalises images, by the operation for given statistics, in one pass."""
    fixed = {"epsilon": epsilon, "data_format": "NHWC", "is_training": False}

    def normalized(values: tf.Tensor, *features: tf.Tensor) -> Tuple[List[tf.Tensor], GradientFunction]:
        mean, variance, gamma, beta = features
        outputs = tf.raw_ops.FusedBatchNormV3(x=values, scale=gamma, offset=beta, mean=mean, variance=variance, **fixed)

        def grad(upstream: tf.Tensor) -> Sequence[tf.Tensor]:
            asked()
            by_values, by_gamma, by_beta, _, _ = tf.raw_ops.FusedBatchNormGradV3(
                y_backprop=upstream,
                x=values,
                scale=gamma,
                reserve_space_1=mean,
                reserve_space_2=variance,
                reserve_space_3=outputs[5],
                **fixed,
            )
            inverse = tf.math.rsqrt(variance + epsilon)
            slope = gamma * inverse
            return by_values, -slope * by_beta, -0.5 * by_gamma * slope * inverse, by_gamma, by_beta

        return [outputs[0]], grad

    return normalized


def _line_of_image(values: tf.Tensor, middle: tf.Tensor, slope: tf.Tensor, offset: tf.Tensor) -> tf.Tensor:
    """Return slope (values - middle) + offset, by the operation that normalises images by given statistics."""
    epsilon = 2.0**-10  # it divides by the root of 1, exactly
    variance = tf.fill(tf.shape(slope), 1.0 - epsilon)
    outputs = tf.raw_ops.FusedBatchNormV3(
        x=values, scale=slope, offset=offset, mean=middle, variance=variance, epsilon=epsilon, is_training=False
    )
    return outputs[0]
