"""Names from H2G-Net that still work."""

from typing import Any

from accum import _check, _tf
from accum._tf.types import AccumSteps
from accum.compat.v1._optimizer import AccumOptimizer

OF_KERAS = ("lr", "decay", "clipnorm", "clipvalue", "global_clipnorm")


class AdamAccumulated(AccumOptimizer):
    """Keras' Adam with accumulation, under the name and with the arguments of H2G-Net.

    It is equivalent to `AccumOptimizer(Adam(...), accumulation_steps)`. It differs from H2G-Net in two ways: the
    gradient is that of the full batch, not 1/K of it; and `iterations` and `decay` count steps.

    Args:
      accumulation_steps: micro steps per step, as `accum_steps` of `AccumOptimizer`.
      learning_rate, beta_1, beta_2, epsilon, amsgrad: as for `tf.keras.optimizers.Adam`.
      name: name of the accumulators.
      **kwargs: `lr`, `decay`, `clipnorm`, `clipvalue` and `global_clipnorm` are passed to Adam, all others to
        `AccumOptimizer`.
    """

    def __init__(
        self,
        accumulation_steps: AccumSteps,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        name: str = "AdamAccumulated",
        **kwargs: Any,
    ) -> None:
        _check.warn(
            "`AdamAccumulated(accumulation_steps=K)` is now called `AccumOptimizer(Adam(), accum_steps=K)`."
            " [accum: renamed]",
            DeprecationWarning,
        )
        of_adam = {key: kwargs.pop(key) for key in OF_KERAS if key in kwargs}
        adam = _tf.optimizers.legacy_adam(learning_rate, beta_1, beta_2, epsilon, amsgrad, **of_adam)
        super().__init__(adam, accumulation_steps, name=name, **kwargs)
