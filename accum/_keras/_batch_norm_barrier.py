"""Batch normalisation as a barrier: by the statistics of the whole batch, which its micro-batches share (law L19)."""

from typing import Any, Dict, List, Optional, Tuple

from accum import _tf
from accum._engine._moments import Moments
from accum._engine._segments import Statistics
from accum._keras._batch_norm import AccumBatchNormalization
from accum._keras._moving_statistics import move
from accum._tf import tf


class BatchNormBarrier(Statistics):
    """One call of a batch normalisation layer in training.

    Args:
      layer: a built `tf.keras.layers.BatchNormalization`, of Keras' class or this library's.
      inputs: keys of the tensor that it normalises and, if the call was given one, of its mask.
      order: which of the calls of the model this is.
    """

    def __init__(self, layer: Any, inputs: List[str], order: int) -> None:
        self.key = inputs[0]
        self.mask_key = inputs[1] if len(inputs) > 1 else mask_of(inputs[0])
        self.order = order
        self._layer = layer

    def moments(self, tensors: Dict[Any, tf.Tensor]) -> Moments:
        inputs, taken, count = self._inputs(tensors)
        axes = self._axes(inputs)
        mean = tf.math.divide_no_nan(tf.reduce_sum(taken * inputs, axes, keepdims=True), count)
        apart = inputs - mean
        variance = tf.math.divide_no_nan(tf.reduce_sum(taken * apart * apart, axes), count)
        return Moments(count, self._as_feature(mean), self._as_feature(variance))

    def parts(self, tensors: Dict[Any, tf.Tensor], whole: Moments) -> List[tf.Tensor]:
        inputs, taken, _ = self._inputs(tensors)
        axes = self._axes(inputs)
        apart = inputs - self._broadcast(whole.mean, inputs)
        sums = tf.reduce_sum(taken * inputs, axes), tf.reduce_sum(taken * apart * apart, axes)
        return [self._as_feature(tf.math.divide_no_nan(total, whole.count)) for total in sums]

    def receive(self, whole: Moments) -> None:
        if isinstance(self._layer, AccumBatchNormalization):
            self._layer.accum_statistics.receive_whole(whole)
        else:
            move(self._layer, [whole])

    def normalized(self, inputs: tf.Tensor, statistics: Tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        """Return what the layer returns of `inputs`, given the mean and variance of the batch."""
        layer, mask = self._layer, getattr(inputs, "_keras_mask", None)
        dtype = _tf.compute_dtype_of(layer)
        exact = _tf.at_least_float32(dtype)
        values = tf.cast(tf.cast(inputs, dtype), exact)
        mean, variance = (self._broadcast(tf.cast(value, exact), values) for value in statistics)
        scale = tf.math.rsqrt(variance + tf.cast(_tf.epsilon_of(layer), exact))
        if layer.scale:
            scale *= self._broadcast(tf.cast(_tf.native(layer.gamma), exact), values)
        outputs = (values - mean) * scale
        if layer.center:
            outputs += self._broadcast(tf.cast(_tf.native(layer.beta), exact), values)
        outputs = tf.cast(outputs, dtype)
        if mask is not None:
            outputs._keras_mask = mask
        return outputs

    # ------------------------------------------------------------------------------------------------------------

    def _inputs(self, tensors: Dict[Any, tf.Tensor]) -> Tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return the inputs, 1 or 0 for what counts or is masked, and the number of values of a feature."""
        inputs, mask = tensors[self.key], tensors.get(self.mask_key)
        dtype = _tf.compute_dtype_of(self._layer)
        inputs = tf.cast(tf.cast(inputs, dtype), _tf.at_least_float32(dtype))
        axes = self._axes(inputs)
        count = tf.reduce_prod(tf.cast(tf.gather(tf.shape(inputs), axes), inputs.dtype))
        if mask is None or not _tf.uses_mask(self._layer):
            return inputs, tf.ones([], inputs.dtype), count
        mask = tf.cast(mask, inputs.dtype)
        share = tf.math.divide_no_nan(tf.reduce_sum(mask), tf.cast(tf.size(mask), inputs.dtype))
        ones = tf.ones([inputs.shape.rank - mask.shape.rank], tf.int32)
        return inputs, tf.reshape(mask, tf.concat([tf.shape(mask), ones], axis=0)), count * share

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


def mask_of(key: str) -> str:
    """Return what identifies the mask of a tensor."""
    return f"{key} mask"


def refusal_of(layer: Any) -> Optional[str]:
    """Return why a batch normalisation layer can't be a barrier, or None."""
    known = _tf.is_plain_batch_norm(layer) or type(layer) is AccumBatchNormalization
    if not known:
        return "its class is not known, and may compute something else"
    for name in ("renorm", "virtual_batch_size"):
        if getattr(layer, name, None):
            return f"`{name}` normalises by other statistics"
    return None
