"""Differences in batch normalisation."""

import functools
import inspect
from typing import Any, Callable, Dict, List, Optional, Union

from accum._tf.layers import keras_layers
from accum._tf.models import layers_of
from accum._tf.variables import native
from accum._tf.version import IS_KERAS_3, tf

BATCH_NORMS = keras_layers("BatchNormalization", "SyncBatchNormalization")
"""Keras' classes of batch normalisation. From 2.12 on, the second is an argument of the first."""


def is_synchronized(batch_norm: tf.keras.layers.Layer) -> bool:
    """Whether a layer computes its statistics over all replicas."""
    # Keras 2.12 to 2.15 leave it out of the config.
    own = batch_norm.get_config().get("synchronized", getattr(batch_norm, "synchronized", None))
    return type(batch_norm) in BATCH_NORMS[1:] if own is None else bool(own)


def batch_norms_in(model: tf.keras.Model) -> List[Any]:
    """Return the batch normalisation layers of a model, of any kind."""
    return list(filter(is_batch_norm, layers_of(model)))


def is_batch_norm(layer: Any) -> bool:
    """Whether a layer is batch normalisation, of any kind."""
    return isinstance(layer, BATCH_NORMS)


def is_plain(layer: Any) -> bool:
    """Whether a layer is of Keras' own class."""
    return type(layer) in BATCH_NORMS


def is_accumulating(batch_norm: Any) -> bool:
    """Whether a layer is an `AccumBatchNormalization`, whose moving statistics follow the cycles of an optimizer."""
    return hasattr(batch_norm, "accum_is_capturing")


def batch_norms_over_replicas(model: tf.keras.Model) -> List[Any]:
    """Return the layers of a model that compute their statistics over all replicas."""
    return [layer for layer in layers_of(model) if isinstance(layer, BATCH_NORMS) and is_synchronized(layer)]


_BATCH_NORM_TAKES_MASK = "mask" in inspect.signature(tf.keras.layers.BatchNormalization.call).parameters


def call_batch_norm(
    call: Callable[..., Any], inputs: tf.Tensor, training: Optional[Union[bool, tf.Tensor]], mask: Optional[tf.Tensor]
) -> Any:
    """Call Keras' batch normalisation, which supports a mask from 2.12 on."""
    if _BATCH_NORM_TAKES_MASK:
        return call(inputs, training=training, mask=mask)
    return call(inputs, training=training)  # dies with 2.11


def is_fused(batch_norm: tf.keras.layers.Layer) -> bool:
    """Whether a built layer uses the fused kernel, which Keras 3 does not have."""
    return bool(getattr(batch_norm, "fused", False))


def epsilon_of(batch_norm: tf.keras.layers.Layer) -> float:
    """Return the number that a built layer adds to the variance."""
    return max(batch_norm.epsilon, _least_fused_epsilon()) if is_fused(batch_norm) else batch_norm.epsilon


@functools.lru_cache(maxsize=None)
def _least_fused_epsilon() -> float:
    """Return the least epsilon that the fused kernel is called with: older versions, 2.10 among them, take 1.001e-5."""
    with tf.init_scope():
        one = tf.ones([1])
        outputs, _, _ = tf.compat.v1.nn.fused_batch_norm(
            tf.ones([1, 1, 1, 1]), one, 0.0 * one, mean=0.0 * one, variance=0.0 * one, epsilon=1e-6, is_training=False
        )
        return 0.0 if float(tf.squeeze(outputs)) > 500.0 else 1.001e-5


def unfused(options: Dict[str, Any]) -> Dict[str, Any]:
    """Return the arguments of a batch normalisation that is not fused."""
    return options if IS_KERAS_3 else dict(options, fused=False)


class Resting:
    """Stands in for a variable of Keras 3: it has the same value, but ignores assignments."""

    def __init__(self, variable: Any) -> None:
        self._variable = variable

    def __tf_tensor__(self, dtype: Any = None, name: Optional[str] = None) -> tf.Tensor:
        return tf.convert_to_tensor(native(self._variable), dtype=dtype, name=name)

    def assign(self, value: Any) -> None:
        """Leave the variable unchanged."""


def _resting(name: str) -> property:
    def get(self: Any) -> Any:
        variable = self.__dict__.get(name)
        return Resting(variable) if variable is not None and self.accum_is_capturing else variable

    return property(get, lambda self, variable: self.__dict__.update({name: variable}))


class _HandsOver:
    """Overrides how Keras 3 computes batch statistics and assigns to the moving statistics in `call`.

    While `accum_is_capturing` is true, the moving statistics do not change. Batch statistics are computed by
    `accum_hand_over`.
    """

    accum_hand_over: Any

    moving_mean = _resting("moving_mean")
    moving_variance = _resting("moving_variance")

    def _moments(self, inputs: tf.Tensor, mask: Optional[tf.Tensor]) -> Any:
        return self.accum_hand_over(super()._moments, inputs, mask)  # type: ignore[misc]


BASES = ((_HandsOver,) if IS_KERAS_3 else ()) + (tf.keras.layers.BatchNormalization,)
"""The base classes of a batch normalisation that captures its statistics; in Keras 2, its own methods are enough."""


def uses_mask(batch_norm: tf.keras.layers.Layer) -> bool:
    """Whether a built layer leaves masked values out of its statistics."""
    return _BATCH_NORM_TAKES_MASK and not is_fused(batch_norm)


def records_unbiased_variance(batch_norm: tf.keras.layers.Layer) -> bool:
    """Whether a built layer records its batches' variance with Bessel's correction.

    The fused kernel does; Keras uses it for rank 4, and in later versions also for rank 5. The unfused code does not.
    """
    return is_fused(batch_norm)
