"""Names from GradientAccumulator up to 0.3 that still work."""

from typing import Any, Optional

from accum import _check, _tf
from accum._keras._model._model import GradientAccumulateModel
from accum._keras._optimizer._wrapper import GradientAccumulateOptimizer
from accum._tf import tf
from accum._tf.types import AccumSteps, Reduction


class GAModelWrapper(GradientAccumulateModel):
    """`GradientAccumulateModel`, with the name and arguments of GradientAccumulator up to 0.3.

    Args:
      accum_steps, mixed_precision, use_agc, clip_factor, eps, *args: as for `GradientAccumulateModel`.
      n_gradients: another name of `accum_steps`.
      use_acg: another name of `use_agc`.
      **kwargs: as for `GradientAccumulateModel`.
    """

    def __init__(
        self,
        accum_steps: Optional[AccumSteps] = None,
        *args: Any,
        n_gradients: Optional[int] = None,
        use_acg: Optional[bool] = None,
        **kwargs: Any,
    ) -> None:
        _warn(
            "`GAModelWrapper(n_gradients=K, …)` is now called `GradientAccumulateModel(accum_steps=K, …)`."
            " [accum: renamed]"
        )
        if use_acg is not None:
            kwargs["use_agc"] = use_acg
        super().__init__(_accum_steps(accum_steps, n_gradients, _check.LEFT_OUT), *args, **kwargs)


class GAOptimizerWrapper(GradientAccumulateOptimizer):
    """`GradientAccumulateOptimizer`, with the name, arguments and defaults of GradientAccumulator up to 0.3.

    Args:
      optimizer: as for `GradientAccumulateOptimizer`.
      accum_steps: as for `GradientAccumulateOptimizer`, but 4 if left out.
      reduction: as for `GradientAccumulateOptimizer`. According to the docstring of GradientAccumulator, its default
        is "SUM"; in its code it is "MEAN".
      name: as for `GradientAccumulateOptimizer`.
      n_gradients: another name of `accum_steps`.
      **kwargs: as for `GradientAccumulateOptimizer`.
    """

    def __init__(
        self,
        optimizer: tf.keras.optimizers.Optimizer = "SGD",
        accum_steps: Optional[AccumSteps] = None,
        reduction: Reduction = "mean",
        name: str = "GAOptimizerWrapper",
        *,
        n_gradients: Optional[int] = None,
        **kwargs: Any,
    ) -> None:
        _warn(
            "`GAOptimizerWrapper` is now called `GradientAccumulateOptimizer`. `accum_steps` now defaults to 1; in "
            "`GAOptimizerWrapper` it defaults to 4. [accum: renamed]"
        )
        super().__init__(optimizer, _accum_steps(accum_steps, n_gradients, 4), reduction, name, **kwargs)


def _accum_steps(accum_steps: Optional[AccumSteps], n_gradients: Optional[int], default: int) -> AccumSteps:
    if accum_steps is not None and n_gradients is not None:
        raise TypeError(
            "`n_gradients` is another name of `accum_steps`: pass only one of them. Received: "
            f"accum_steps={accum_steps!r}, n_gradients={n_gradients!r}. [accum: arguments]"
        )
    passed = n_gradients if accum_steps is None else accum_steps
    return default if passed is None else passed


def _warn(words: str) -> None:
    _check.warn(words, DeprecationWarning)


for _cls in (GAModelWrapper, GAOptimizerWrapper):
    _tf.optimizers.register_keras_class(_cls, _cls.__name__)
