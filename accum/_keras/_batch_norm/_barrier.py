"""Batch normalisation as a barrier: all micro-batches use the statistics of the whole batch (law L19)."""

from typing import List, Optional, Sequence, Tuple, Union

from accum import _tf
from accum._engine._moments import Moments
from accum._engine._normalization import Normalization
from accum._engine._trace import Barrier, Marks
from accum._keras._batch_norm._layer import AccumBatchNormalization
from accum._keras._batch_norm._moving_statistics import move
from accum._tf import tf


class BatchNormBarrier(Barrier):
    """One call of a batch normalisation layer in training.

    Args:
      layer: a built `tf.keras.layers.BatchNormalization`, of Keras' class or this library's.
      order: which of the calls of the model this is.
    """

    def __init__(self, layer: tf.keras.layers.Layer, order: int) -> None:
        self.order = order
        self._layer = layer

    def call(self, inputs: tf.Tensor, mask: Optional[tf.Tensor], marks: Marks) -> tf.Tensor:
        """Return what the layer returns of a micro-batch, by the statistics of the batch."""
        layer = self._layer
        dtype = _tf.models.compute_dtype_of(layer)
        inputs = tf.convert_to_tensor(inputs)
        exact = _tf.variables.at_least_float32(dtype)
        values = tf.cast(tf.cast(inputs, dtype), exact)
        rank = inputs.shape.rank
        features = [axis % rank for axis in _listed(layer.axis)]
        # With several axes, Keras keeps the others with length 1.
        shape = _tf.variables.native(layer.moving_mean).shape.as_list()
        rule = Normalization(tuple(axis for axis in range(rank) if axis not in features), rank, shape)
        taken, count = self._taken(values, mask, rule.count(values))

        def gradient(values: tf.Tensor, whole: Moments, by_mean: tf.Tensor, by_variance: tf.Tensor) -> tf.Tensor:
            return rule.gradient(values, whole, by_mean, by_variance, taken)

        behind, whole = marks.at_barrier(
            self, inputs, values, lambda values: rule.moments(values, count, taken), gradient
        )
        values = tf.cast(tf.cast(behind, dtype), exact)
        gamma = tf.cast(_tf.variables.native(layer.gamma), exact) if layer.scale else None
        beta = tf.cast(_tf.variables.native(layer.beta), exact) if layer.center else None
        epsilon = float(_tf.batch_norm.epsilon_of(layer))
        return tf.cast(rule.normalized(values, whole.mean, whole.variance, gamma, beta, epsilon), dtype)

    def receive(self, whole: Moments) -> None:
        if isinstance(self._layer, AccumBatchNormalization):
            self._layer.accum_statistics.receive_whole(whole)
        else:
            move(self._layer, [whole])

    def _taken(
        self, values: tf.Tensor, mask: Optional[tf.Tensor], count: tf.Tensor
    ) -> Tuple[Optional[tf.Tensor], tf.Tensor]:
        """Return 1 or 0 for what counts or is masked, None without a mask, and the number of values of a feature."""
        if mask is None or not _tf.batch_norm.uses_mask(self._layer):
            return None, count
        mask = tf.cast(mask, values.dtype)
        share = tf.math.divide_no_nan(tf.reduce_sum(mask), tf.cast(tf.size(mask), values.dtype))
        ones = tf.ones([values.shape.rank - mask.shape.rank], tf.int32)
        return tf.reshape(mask, tf.concat([tf.shape(mask), ones], axis=0)), count * share


def _listed(axis: Union[int, Sequence[int]]) -> List[int]:
    return [int(one) for one in axis] if hasattr(axis, "__iter__") else [int(axis)]


def refusal_of(layer: tf.keras.layers.Layer) -> Optional[str]:
    """Return why a batch normalisation layer can't be a barrier, or None."""
    is_supported = _tf.batch_norm.is_plain(layer) or type(layer) is AccumBatchNormalization
    if not is_supported:
        return "its class is not known, and may compute something else"
    for name in ("renorm", "virtual_batch_size"):
        if getattr(layer, name, None):
            return f"`{name}` normalises by other statistics"
    return None
