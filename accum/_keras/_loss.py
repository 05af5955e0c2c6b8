"""Report the number by which the compiled losses of a model divide, each time that they are computed (law L5)."""

import warnings
from typing import Any, Callable, Optional

from accum import _tf
from accum._tf import tf


class ReportingLoss:
    """Wrap Keras' container of compiled losses, and report their denominator if it is not the number of examples.

    Args:
      container: the container that Keras' `compile` made; all other attributes are read from it.
      report: function of the denominator, a float32 scalar tensor; None: report nothing.
      before: function of targets and outputs, called before the losses are computed.
    """

    def __init__(
        self, container: Any, report: Optional[Callable[[tf.Tensor], None]], before: Callable[[Any, Any], None]
    ) -> None:
        self._container = container
        self._report = report
        self._before = before

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None, *args: Any, **kwargs: Any) -> tf.Tensor:
        self._before(y_true, y_pred)
        if self._report is None:
            return self._container(y_true, y_pred, sample_weight, *args, **kwargs)
        outputs, weights = _tf.without_empty_masks(y_pred, sample_weight)
        total = self._container(y_true, outputs, weights, *args, **kwargs)
        denominator = _tf.loss_denominator(self._container, y_true, y_pred, sample_weight)
        if denominator is not None:
            self._report(denominator)
        return total

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_container" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._container, name)


# Base classes in `transformers` whose built-in loss is a mean over the labels other than -100. The number of these
# labels differs between texts.
_MEANS_OVER_LABELS = {
    "TFCausalLanguageModelingLoss",
    "TFMaskedLanguageModelingLoss",
    "TFNextSentencePredictionLoss",
    "TFTokenClassificationLoss",
}


def warn_of_inexact_loss(model: tf.keras.Model, model_options: Any) -> None:
    """Warn if the compiled loss of `model` is not exact with the arguments in `model_options`."""
    container = getattr(model, _tf.LOSS_CONTAINER, None)
    options, arguments = model_options.options, model_options.arguments
    is_split_alone = arguments["micro_batch_size"] is not None and options["accum_steps"] == 1  # which is exact
    if options["reduction"] != "sum" and not is_split_alone and _tf.sums_over_examples(container):
        warnings.warn(
            "A loss with reduction SUM sums over examples, so the mean over micro-batches differs from the full batch: "
            "pass `reduction='sum', micro_batch_weight='equal'`, or compile a loss that is a mean.",
            stacklevel=3,
        )
    bases = {base.__name__ for base in type(model).__mro__}
    has_own_loss = getattr(model, "_using_dummy_loss", False)  # what `transformers` calls it
    if model_options.weighs_as_keras and has_own_loss and bases & _MEANS_OVER_LABELS:
        warnings.warn(
            f"The loss of {type(model).__name__} is a mean over the labels other than -100, whose number differs "
            "between micro-batches: pass `micro_batch_weight=`, a function `(x, y, sample_weight)` that counts them.",
            stacklevel=3,
        )
