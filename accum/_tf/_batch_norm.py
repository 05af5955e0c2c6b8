"""Batch normalisation."""

import inspect

from accum._tf._layers import keras_layers
from accum._tf._line import IS_KERAS_3, tf
from accum._tf._variables import native

BATCH_NORMS = keras_layers("BatchNormalization", "SyncBatchNormalization")
"""Keras' own classes of batch normalisation; the second is an argument of the first from 2.12 on."""


def is_synchronized(batch_norm):
    """Whether a layer's statistics are those of all replicas together."""
    own = batch_norm.get_config().get("synchronized")
    return type(batch_norm) in BATCH_NORMS[1:] if own is None else bool(own)


_BATCH_NORM_TAKES_MASK = "mask" in inspect.signature(tf.keras.layers.BatchNormalization.call).parameters


def call_batch_norm(call, inputs, training, mask):
    """Call Keras' own batch normalisation; only from 2.12 on does it have a use for a mask."""
    if _BATCH_NORM_TAKES_MASK:
        return call(inputs, training=training, mask=mask)
    return call(inputs, training=training)  # dies with 2.11


def is_fused(batch_norm):
    """Whether a built layer computes by the fused kernel, of which Keras 3 knows nothing."""
    return bool(getattr(batch_norm, "fused", False))


def unfused(options):
    """The arguments of a batch normalisation that is not fused."""
    return options if IS_KERAS_3 else dict(options, fused=False)


class Resting:
    """Stands in for a variable of Keras 3: has its value, and takes no other."""

    def __init__(self, variable):
        self._variable = variable

    def __tf_tensor__(self, dtype=None, name=None):
        return tf.convert_to_tensor(native(self._variable), dtype=dtype, name=name)

    def assign(self, value):
        """Leave the variable as it is."""


def _resting(name):
    def get(self):
        variable = self.__dict__.get(name)
        return Resting(variable) if variable is not None and self.accum_is_capturing else variable

    return property(get, lambda self, variable: self.__dict__.update({name: variable}))


class _HandsOver:
    """The part of a batch normalisation by which Keras 3 computes statistics, and assigns to the moving ones in `call`.

    They rest while `accum_is_capturing`, and what is computed goes through `accum_hand_over`.
    """

    moving_mean = _resting("moving_mean")
    moving_variance = _resting("moving_variance")

    def _moments(self, inputs, mask):
        return self.accum_hand_over(super()._moments, inputs, mask)


BATCH_NORM_BASES = ((_HandsOver,) if IS_KERAS_3 else ()) + (tf.keras.layers.BatchNormalization,)
"""What a batch normalisation with an eye on its statistics derives from: in Keras 2 its own methods are enough."""


def uses_mask(batch_norm):
    """Whether a built layer leaves masked values out of its statistics."""
    return _BATCH_NORM_TAKES_MASK and not is_fused(batch_norm)


def records_unbiased_variance(batch_norm):
    """Whether a built layer records its batches' variance with Bessel's correction.

    The fused kernel does, which Keras takes for rank 4, and later for rank 5 too; its own computation does not.
    """
    return is_fused(batch_norm)
