"""Normalise a micro-batch by the statistics of its whole batch, and differentiate this (law L19)."""

from typing import List, NamedTuple, Optional, Sequence, Tuple

from accum import _tf
from accum._engine._custom_gradient import GradientFunction, custom_gradient
from accum._engine._moments import Moments, without_bessel
from accum._tf import tf

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
    ) -> tf.Tensor:
        """Return gamma (values - mean) / sqrt(variance + epsilon) + beta, with a gradient in few operations."""
        dtype, has_beta = values.dtype, beta is not None
        gamma = tf.ones(self.shape, dtype) if gamma is None else gamma
        beta = tf.zeros(self.shape, dtype) if beta is None else beta
        mean, variance = tf.cast(mean, dtype), tf.cast(variance, dtype)
        if self._is_image(values) and epsilon >= LEAST_EPSILON:
            return self._normalized_image(values, mean, variance, gamma, beta, epsilon)

        @custom_gradient
        def normalized(values: tf.Tensor, *features: tf.Tensor) -> Tuple[List[tf.Tensor], GradientFunction]:
            mean, variance, gamma, beta = features
            inverse = tf.math.rsqrt(variance + epsilon)
            scale, middle = self.broadcast(gamma * inverse), self.broadcast(mean)
            outputs = (values - middle) * scale
            if has_beta:
                outputs += self.broadcast(beta)

            def grad(upstream: tf.Tensor) -> Sequence[tf.Tensor]:
                by_beta = self.summed(upstream)
                by_scale = self.summed(upstream * (values - middle))
                by_variance = -0.5 * by_scale * gamma * inverse * inverse * inverse
                return upstream * scale, -gamma * inverse * by_beta, by_variance, inverse * by_scale, by_beta

            return [outputs], grad

        (outputs,) = normalized(values, mean, variance, gamma, beta)
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

    def _normalized_image(
        self,
        values: tf.Tensor,
        mean: tf.Tensor,
        variance: tf.Tensor,
        gamma: tf.Tensor,
        beta: tf.Tensor,
        epsilon: float,
    ) -> tf.Tensor:
        """Return the same of images, by the operation that normalises by given statistics, in one pass."""
        fixed = {"epsilon": epsilon, "data_format": "NHWC", "is_training": False}

        @custom_gradient
        def normalized(values: tf.Tensor, *features: tf.Tensor) -> Tuple[List[tf.Tensor], GradientFunction]:
            mean, variance, gamma, beta = features
            outputs = tf.raw_ops.FusedBatchNormV3(
                x=values, scale=gamma, offset=beta, mean=mean, variance=variance, **fixed
            )

            def grad(upstream: tf.Tensor) -> Sequence[tf.Tensor]:
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

        (outputs,) = normalized(values, mean, variance, gamma, beta)
        outputs.set_shape(values.shape)
        return outputs

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


def _line_of_image(values: tf.Tensor, middle: tf.Tensor, slope: tf.Tensor, offset: tf.Tensor) -> tf.Tensor:
    """Return slope (values - middle) + offset, by the operation that normalises images by given statistics."""
    epsilon = 2.0**-10  # it divides by the root of 1, exactly
    variance = tf.fill(tf.shape(slope), 1.0 - epsilon)
    outputs = tf.raw_ops.FusedBatchNormV3(
        x=values, scale=slope, offset=offset, mean=middle, variance=variance, epsilon=epsilon, is_training=False
    )
    return outputs[0]
