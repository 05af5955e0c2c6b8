"""Batch normalisation as a barrier: by the statistics of the whole batch, which its micro-batches share (law L19)."""

from typing import Any, List, Optional, Tuple

from accum import _tf
from accum._engine._custom_gradient import custom_gradient
from accum._engine._moments import Moments
from accum._engine._trace import Barrier, Marks
from accum._keras._batch_norm import AccumBatchNormalization
from accum._keras._moving_statistics import move
from accum._tf import tf


class BatchNormBarrier(Barrier):
    """One call of a batch normalisation layer in training.

    Args:
      layer: a built `tf.keras.layers.BatchNormalization`, of Keras' class or this library's.
      order: which of the calls of the model this is.
    """

    def __init__(self, layer: Any, order: int) -> None:
        self.order = order
        self._layer = layer

    def call(self, inputs: tf.Tensor, mask: Optional[tf.Tensor], marks: Marks) -> tf.Tensor:
        """Return what the layer returns of a micro-batch, by the statistics of the batch."""
        layer = self._layer
        dtype = _tf.compute_dtype_of(layer)
        inputs = tf.convert_to_tensor(inputs)
        exact = _tf.at_least_float32(dtype)
        values = tf.cast(tf.cast(inputs, dtype), exact)
        taken, count = self._taken(values, mask)

        def gradient(whole: Moments, by_mean: tf.Tensor, by_variance: tf.Tensor) -> tf.Tensor:
            apart = values - self._broadcast(whole.mean, values)
            factor = 2.0 * tf.math.divide_no_nan(by_variance, whole.count)
            grad = apart * self._broadcast(factor, values)
            grad += self._broadcast(tf.math.divide_no_nan(by_mean, whole.count), values)
            return grad if taken is None else taken * grad

        moments = self._moments(tf.stop_gradient(values), taken, count)
        behind, mean, variance = marks.at_barrier(self, inputs, values, moments, gradient)
        return tf.cast(self._normalized(tf.cast(tf.cast(behind, dtype), exact), mean, variance), dtype)

    def receive(self, whole: Moments) -> None:
        if isinstance(self._layer, AccumBatchNormalization):
            self._layer.accum_statistics.receive_whole(whole)
        else:
            move(self._layer, [whole])

    def _moments(self, values: tf.Tensor, taken: Optional[tf.Tensor], count: tf.Tensor) -> Moments:
        axes = self._axes(values)
        total = tf.reduce_sum(values if taken is None else taken * values, axes, keepdims=True)
        mean = tf.math.divide_no_nan(total, count)
        apart = tf.math.squared_difference(values, mean)
        spread = tf.reduce_sum(apart if taken is None else taken * apart, axes)
        return Moments(count, self._as_feature(mean), self._as_feature(tf.math.divide_no_nan(spread, count)))

    def _normalized(self, values: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor) -> tf.Tensor:
        """Return gamma (values - mean) / sqrt(variance + epsilon) + beta, with a gradient in few operations."""
        layer, dtype = self._layer, values.dtype
        axes = self._axes(values)
        shape = _tf.native(layer.moving_mean).shape
        gamma = tf.cast(_tf.native(layer.gamma), dtype) if layer.scale else tf.ones(shape, dtype)
        beta = tf.cast(_tf.native(layer.beta), dtype) if layer.center else tf.zeros(shape, dtype)
        epsilon = tf.cast(_tf.epsilon_of(layer), dtype)

        @custom_gradient
        def normalized(values: tf.Tensor, *features: tf.Tensor) -> Any:
            mean, variance, gamma, beta = features
            inverse = tf.math.rsqrt(variance + epsilon)
            scale, middle = self._broadcast(gamma * inverse, values), self._broadcast(mean, values)
            outputs = (values - middle) * scale
            if layer.center:
                outputs += self._broadcast(beta, values)

            def grad(upstream: tf.Tensor) -> Any:
                by_beta = self._as_feature(tf.reduce_sum(upstream, axes))
                by_scale = self._as_feature(tf.reduce_sum(upstream * (values - middle), axes))
                by_variance = -0.5 * by_scale * gamma * inverse * inverse * inverse
                return upstream * scale, -gamma * inverse * by_beta, by_variance, inverse * by_scale, by_beta

            return [outputs], grad

        (outputs,) = normalized(values, tf.cast(mean, dtype), tf.cast(variance, dtype), gamma, beta)
        outputs.set_shape(values.shape)
        return outputs

    # ------------------------------------------------------------------------------------------------------------

    def _taken(self, values: tf.Tensor, mask: Optional[tf.Tensor]) -> Tuple[Optional[tf.Tensor], tf.Tensor]:
        """Return 1 or 0 for what counts or is masked, None without a mask, and the number of values of a feature."""
        count = tf.reduce_prod(tf.cast(tf.gather(tf.shape(values), self._axes(values)), values.dtype))
        if mask is None or not _tf.uses_mask(self._layer):
            return None, count
        mask = tf.cast(mask, values.dtype)
        share = tf.math.divide_no_nan(tf.reduce_sum(mask), tf.cast(tf.size(mask), values.dtype))
        ones = tf.ones([values.shape.rank - mask.shape.rank], tf.int32)
        return tf.reshape(mask, tf.concat([tf.shape(mask), ones], axis=0)), count * share

    def _axes(self, inputs: tf.Tensor) -> List[int]:
        features = [axis % inputs.shape.rank for axis in _listed(self._layer.axis)]
        return [axis for axis in range(inputs.shape.rank) if axis not in features]

    def _as_feature(self, value: tf.Tensor) -> tf.Tensor:
        """Return a statistic in the shape of the layer's variables."""
        return tf.reshape(value, _tf.native(self._layer.moving_mean).shape)

    def _broadcast(self, value: tf.Tensor, inputs: tf.Tensor) -> tf.Tensor:
        if value.shape.rank == inputs.shape.rank:  # several axes; Keras keeps the others with length 1
            return value
        feature = _listed(self._layer.axis)[0] % inputs.shape.rank
        return tf.reshape(value, [-1 if axis == feature else 1 for axis in range(inputs.shape.rank)])


def _listed(axis: Any) -> List[int]:
    return [int(one) for one in axis] if hasattr(axis, "__iter__") else [int(axis)]


def refusal_of(layer: Any) -> Optional[str]:
    """Return why a batch normalisation layer can't be a barrier, or None."""
    known = _tf.is_plain_batch_norm(layer) or type(layer) is AccumBatchNormalization
    if not known:
        return "its class is not known, and may compute something else"
    for name in ("renorm", "virtual_batch_size"):
        if getattr(layer, name, None):
            return f"`{name}` normalises by other statistics"
    return None
