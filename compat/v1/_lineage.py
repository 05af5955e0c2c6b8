"""Spellings of H2G-Net that keep working."""

import warnings

from accum import _tf
from accum.compat.v1._optimizer import AccumOptimizer

OF_KERAS = ("lr", "decay", "clipnorm", "clipvalue", "global_clipnorm")


class AdamAccumulated(AccumOptimizer):
    """Keras' Adam, accumulating: the call that users of H2G-Net type.

    The same as `AccumOptimizer(Adam(...), accumulation_steps)`. What differs from H2G-Net's: the gradient is that of
    the full batch, not its K-th part; `iterations` counts steps, and `decay` follows it.

    Args:
      accumulation_steps: micro steps per step, as `accum_steps` of `AccumOptimizer`.
      learning_rate, beta_1, beta_2, epsilon, amsgrad: as `tf.keras.optimizers.Adam` takes them.
      name: name of the accumulators.
      **kwargs: `lr`, `decay`, `clipnorm`, `clipvalue`, `global_clipnorm` go to Adam, all others to `AccumOptimizer`.
    """

    def __init__(
        self,
        accumulation_steps,
        learning_rate=0.001,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-7,
        amsgrad=False,
        name="AdamAccumulated",
        **kwargs,
    ):
        warnings.warn(
            "`AdamAccumulated(accumulation_steps=K)` is now called `AccumOptimizer(Adam(), accum_steps=K)`.",
            DeprecationWarning,
            stacklevel=2,
        )
        of_adam = {key: kwargs.pop(key) for key in OF_KERAS if key in kwargs}
        adam = _tf.legacy_adam(learning_rate, beta_1, beta_2, epsilon, amsgrad, **of_adam)
        super().__init__(adam, accumulation_steps, name=name, **kwargs)
