"""Spellings of GradientAccumulator up to 0.3 that keep working."""

import warnings

from accum import _tf
from accum._model import GradientAccumulateModel
from accum._optimizer import GradientAccumulateOptimizer


class GAModelWrapper(GradientAccumulateModel):
    """`GradientAccumulateModel`, as users of GradientAccumulator up to 0.3 call it.

    Args:
      accum_steps, mixed_precision, use_agc, clip_factor, eps, *args: as for `GradientAccumulateModel`.
      n_gradients: another name of `accum_steps`.
      use_acg: another name of `use_agc`.
      **kwargs: as for `GradientAccumulateModel`.
    """

    def __init__(self, accum_steps=None, *args, n_gradients=None, use_acg=None, **kwargs):
        _warn("`GAModelWrapper(n_gradients=K, …)` is now called `GradientAccumulateModel(accum_steps=K, …)`.")
        if use_acg is not None:
            kwargs["use_agc"] = use_acg
        super().__init__(_accum_steps(accum_steps, n_gradients, 1), *args, **kwargs)


class GAOptimizerWrapper(GradientAccumulateOptimizer):
    """`GradientAccumulateOptimizer`, as users of GradientAccumulator up to 0.3 call it, with their defaults.

    Args:
      optimizer: as for `GradientAccumulateOptimizer`.
      accum_steps: as there, and 4 if it is left out.
      reduction: as there. GradientAccumulator's docstring says that "SUM" is its default; in its code it is "MEAN".
      name: as there.
      n_gradients: another name of `accum_steps`.
      **kwargs: as for `GradientAccumulateOptimizer`.
    """

    def __init__(
        self,
        optimizer="SGD",
        accum_steps=None,
        reduction="mean",
        name="GAOptimizerWrapper",
        *,
        n_gradients=None,
        **kwargs,
    ):
        _warn(
            "`GAOptimizerWrapper` is now called `GradientAccumulateOptimizer`, whose `accum_steps` is 1 by default; "
            "that of `GAOptimizerWrapper` is 4."
        )
        super().__init__(optimizer, _accum_steps(accum_steps, n_gradients, 4), reduction, name, **kwargs)


def _accum_steps(accum_steps, n_gradients, default):
    if accum_steps is not None and n_gradients is not None:
        raise TypeError(
            "`n_gradients` is another name of `accum_steps`: give one of them. "
            "Received: accum_steps={!r}, n_gradients={!r}.".format(accum_steps, n_gradients)
        )
    given = n_gradients if accum_steps is None else accum_steps
    return default if given is None else given


def _warn(words):
    warnings.warn(words, DeprecationWarning, stacklevel=3)


for _cls in (GAModelWrapper, GAOptimizerWrapper):
    _tf.register_keras_class(_cls, _cls.__name__)
