"""Report the number by which the compiled losses of a model divide, each time that they are computed (law L5)."""

from typing import TYPE_CHECKING, Any, Callable, Dict, FrozenSet, List, Optional, Sequence

import numpy as np

from accum import _check, _tf
from accum._tf import Nested, tf
from accum._tf.types import KerasContainer

if TYPE_CHECKING:
    from accum._keras._steps._losses_over_replicas import ReplicaLosses
    from accum._keras._steps._trimmed_time import TrimmedTime


class ReportingLoss:
    """Wrap Keras' container of compiled losses, and report their denominator if it is not the number of examples.

    Args:
      container: the container that Keras' `compile` made; all other attributes are read from it.
      report: function of the denominator, a float32 scalar tensor; None: report nothing.
      over_replicas: function that returns the `ReplicaLosses` of the current step, or None.
      added: function that returns the losses that layers have added.
      trimmed: function that returns the `TrimmedTime` of the current micro-batch, or None.

    Attributes:
      container: the same.
      unlike: names of losses, of outputs or added by layers, that divide by different numbers -> what each divides by.
      has_warned: whether the user has been told.
    """

    def __init__(
        self,
        container: KerasContainer,
        report: Optional[Callable[[tf.Tensor], None]],
        over_replicas: Callable[[], Optional["ReplicaLosses"]],
        added: Callable[[], Sequence[tf.Tensor]],
        trimmed: Callable[[], Optional["TrimmedTime"]],
    ) -> None:
        self.container = container
        self._report = report
        self._over_replicas = over_replicas
        self._added = added
        self._trimmed = trimmed
        self.unlike: Dict[str, str] = {}
        self.has_warned = False

    def __call__(
        self, y_true: Nested, y_pred: Nested, sample_weight: Nested = None, *args: object, **kwargs: object
    ) -> tf.Tensor:
        over_replicas = self._over_replicas()
        if over_replicas is None:
            return self._computed(y_true, y_pred, sample_weight, *args, **kwargs)
        with over_replicas.compiled(self.container, y_true, y_pred, sample_weight) as gathered:
            return self._computed(*gathered, *args, **kwargs)

    def _computed(
        self, y_true: Nested, y_pred: Nested, sample_weight: Nested, *args: object, **kwargs: object
    ) -> tf.Tensor:
        trimmed = self._trimmed()
        if self._report is None and trimmed is None:
            return self.container(y_true, y_pred, sample_weight, *args, **kwargs)
        outputs, weights = _tf.losses.without_empty_masks(y_pred, sample_weight)
        changed = None if trimmed is None else trimmed.scaled
        with _tf.losses.recording_losses(self.container, y_true, y_pred, changed) as calls:
            total = self.container(y_true, outputs, weights, *args, **kwargs)
        if self._report is None:
            return total
        named = _tf.losses.counted_by_losses(calls)
        counted = [one for _, one in named]
        if counted and not any(one is None for one in counted):
            # Exact if all outputs share the same mask and weights.
            self._report(tf.add_n([tf.reduce_sum(one) for one in counted]))
        if self._added():
            named.append(("losses that layers add", None))
        if not _divide_alike([one for _, one in named]):
            self.unlike = {name: "examples" if one is None else "elements that count" for name, one in named}
        return total

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "container" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.container, name)


def _divide_alike(counted: Sequence[Optional[tf.Tensor]]) -> bool:
    """Whether the numbers by which losses divide are in the same proportion in all micro-batches, as far as is known.

    Args:
      counted: for each loss, what each element counts; None: 1 each.
    """
    if all(one is None for one in counted):
        return True
    if tf.executing_eagerly():
        shares = [1.0 if one is None else float(tf.reduce_mean(one)) for one in counted]
        return np.allclose(shares, shares[0])
    return len({None if one is None else _sources(one) for one in counted}) == 1


def _sources(tensor: tf.Tensor) -> FrozenSet[str]:
    """Return the names of the tensors in a graph from whose values this one is computed."""
    sources, seen, waiting = set(), {tensor.name}, [tensor]
    while waiting:
        part = waiting.pop()
        inputs: List[Any] = [] if part.op.type == "Shape" else list(part.op.inputs)
        if not any(each.dtype in (tf.resource, tf.variant) for each in inputs) and inputs:
            waiting.extend(each for each in inputs if each.name not in seen)
            seen.update(each.name for each in inputs)
        elif part.op.type not in ("Const", "Shape"):
            sources.add(part.name)
    return frozenset(sources)


def warn_of_unlike_losses(model: tf.keras.Model) -> None:
    """Warn once for each `compile` if the losses that have just been computed divide by different numbers."""
    container = getattr(model, _tf.losses.LOSS_CONTAINER, None)
    if isinstance(container, ReportingLoss) and container.unlike and not container.has_warned:
        container.has_warned = True
        _check.warn(
            "Losses divide by different numbers, and a micro-batch has one weight for all of them: unless every "
            "micro-batch has the same share of padding or ignored elements, the update differs from that of the full "
            "batch. Pass `micro_batch_size` and `whole_batch='loss'`, or let all losses divide by examples: give "
            "padding and ignored elements a `sample_weight` of 0 instead, and hide masks from the losses by "
            f"`tf.keras.layers.Lambda(tf.identity)` at the end of each output. Received: {container.unlike}.",
        )


def warn_of_summed_losses(model: tf.keras.Model) -> None:
    """Warn once of losses that layers have just added and Keras adds up over examples."""
    summed = [loss for loss in _tf.steps.added_losses(model) if _tf.steps.sums_added_loss(loss)]
    if summed and model._accum.is_first_time("summed losses"):
        _check.warn(
            "Keras 3 adds up the entries of a loss that a layer adds by `add_loss`, and a micro-batch has fewer of "
            "them than the full batch: add their mean, or pass `micro_batch_size` and `whole_batch='loss'`. Received: "
            f"losses of shape {[tuple(loss.shape) for loss in summed]}.",
        )


def warn_of_summed_activities(model: tf.keras.Model) -> None:
    """Warn of layers whose regularization of their activity adds up over examples in the installed Keras."""
    layers = [
        layer.name for layer in _tf.models.layers_of(model) if getattr(layer, "activity_regularizer", None) is not None
    ]
    if layers and _tf.steps.sums_activities():
        _check.warn(
            "Before Keras 3.13, the regularization of a layer's activity is a sum over the examples that the layer "
            "sees, and smaller in micro-batches than in the full batch. Install Keras 3.13 or newer, or call "
            "`self.add_loss` with a mean over the examples in a layer of your own. Received: activity_regularizer of "
            f"{layers}.",
        )


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
    container = getattr(model, _tf.losses.LOSS_CONTAINER, None)
    options, arguments = model_options.for_optimizers, model_options.arguments
    is_split = (arguments["micro_batch_size"], arguments["micro_batch_tokens"]) != (None, None)
    is_split_alone = is_split and options["accum_steps"] == 1  # which is exact
    if options["reduction"] != "sum" and not is_split_alone and _tf.losses.adds_up_examples(container):
        _check.warn(
            "The gradient of a loss with reduction SUM or NONE is a sum over examples, so the mean over micro-batches "
            "differs from the full batch: pass `reduction='sum', micro_batch_weight='equal'`, or compile a loss that "
            "is a mean.",
        )
    bases = {base.__name__ for base in type(model).__mro__}
    has_own_loss = getattr(model, "_using_dummy_loss", False)  # what `transformers` calls it
    if model_options.weighs_as_keras and has_own_loss and bases & _MEANS_OVER_LABELS:
        _check.warn(
            f"The loss of {type(model).__name__} is a mean over the labels other than -100, whose number differs "
            "between micro-batches: pass `micro_batch_weight=`, a function `(x, y, sample_weight)` that counts them.",
        )
