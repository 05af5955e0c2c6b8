"""Warnings of losses that add up examples, and of those that are no mean over them."""

from accum import _check, _tf
from accum._keras._diagnosis._seen import Seen
from accum._keras._steps._added_losses import may_have_entries
from accum._keras._steps._reporting_loss import ReportingLoss


@_check.rule
def warn_of_unlike_losses(seen: Seen) -> None:
    """Warn once for each `compile` if the losses that have just been computed divide by different numbers."""
    if not (seen.is_split or seen.is_cycle):
        return
    container = getattr(seen.model, _tf.losses.LOSS_CONTAINER, None)
    if isinstance(container, ReportingLoss) and container.unlike and not container.has_warned:
        container.has_warned = True
        _check.warn(
            "Losses divide by different numbers, and a micro-batch has one weight for all of them: unless every "
            "micro-batch has the same share of padding or ignored elements, the update differs from that of the full "
            "batch. Pass `micro_batch_size` alone, or let all losses divide by examples: give "
            "padding and ignored elements a `sample_weight` of 0 instead, and hide masks from the losses by "
            f"`tf.keras.layers.Lambda(tf.identity)` at the end of each output. Received: {container.unlike}."
            " [accum: loss-counts]",
            _check.InexactWarning,
        )


@_check.rule
def warn_of_summed_losses(seen: Seen) -> None:
    """Warn once of losses that layers have just added, and Keras adds up over fewer examples than there are."""
    own = seen.model._accum
    is_proven = own.is_exact_by_default and own.size.tokens is None  # to depend on no example, or else it is not split
    summed = [loss for loss in _tf.steps.added_losses(seen.model) if may_have_entries(loss)]
    may_differ = not is_proven if seen.is_split and not seen.sums else seen.is_cycle and seen.is_mean
    if summed and may_differ and own.is_first_time("summed losses"):
        _check.warn(
            "Keras adds up the entries of a loss that a layer adds by `add_loss`, and a micro-batch has fewer of "
            "them than the full batch: add their mean, or pass `micro_batch_size` alone. "
            f"Received: losses of shape {[tuple(loss.shape) for loss in summed]}. [accum: added-losses]",
            _check.InexactWarning,
        )


@_check.rule
def warn_of_summed_activities(seen: Seen) -> None:
    """Warn of layers whose regularization of their activity adds up over examples in the installed Keras."""
    all_layers = _tf.models.layers_of(seen.model)
    layers = [layer.name for layer in all_layers if getattr(layer, "activity_regularizer", None) is not None]
    if layers and _tf.steps.sums_activities():
        _check.warn(
            "Before Keras 3.13, the regularization of a layer's activity is a sum over the examples that the layer "
            "sees, and smaller in micro-batches than in the full batch. Install Keras 3.13 or newer, or call "
            "`self.add_loss` with a mean over the examples in a layer of your own. Received: activity_regularizer of "
            f"{layers}. [accum: added-losses]",
            _check.InexactWarning,
        )


# Base classes in `transformers` whose built-in loss is a mean over the labels other than -100. The number of these
# labels differs between texts.
_MEANS_OVER_LABELS = {
    "TFCausalLanguageModelingLoss",
    "TFMaskedLanguageModelingLoss",
    "TFNextSentencePredictionLoss",
    "TFTokenClassificationLoss",
}


BY_REDUCTION = "compile a `tf.keras.losses.Loss` with the reduction SUM"
BY_SUM = (
    "`reduction='sum', micro_batch_weight='equal'` with penalties on weights divided by `accum_steps`, because each "
    "batch adds them once more"
)
_MEAN_OF_SUMS = (
    "The gradient of a loss with reduction SUM or NONE is a sum over examples, so the mean over micro-batches "
    "differs from the full batch: pass larger batches and `micro_batch_size` in place of `accum_steps`, or "
    f"{BY_SUM}; or compile a loss that is a mean. [accum: sum]"
)


@_check.rule
def warn_of_sums_in_cycle(seen: Seen) -> None:
    """Warn once of losses that are sums over examples if updates have come to take several batches after `compile`."""
    model = seen.model
    if model._accum.options.plan.accum_steps != 1 or not seen.is_mean:  # `compile` has warned, or they are added up
        return
    adds_up = _tf.losses.adds_up_examples(getattr(model, _tf.losses.LOSS_CONTAINER, None))
    if adds_up and seen.is_cycle and model._accum.is_first_time("sums in a cycle"):
        _check.warn(_MEAN_OF_SUMS, _check.InexactWarning)


@_check.rule
def warn_of_penalties(seen: Seen) -> None:
    """Warn once of losses that do not depend on the batch, beside those that are sums: both are added up over parts."""
    are_sums = _tf.losses.sums_over_examples(getattr(seen.model, _tf.losses.LOSS_CONTAINER, None))
    penalties = seen.model.losses if are_sums and seen.is_cycle and not seen.is_mean else []
    if penalties and seen.model._accum.is_first_time("penalties"):
        _check.warn(
            "With losses that are sums and `reduction='sum'`, losses that the model adds, such as penalties on "
            "weights, count once for each batch of a cycle: divide these by `accum_steps`, and ignore this warning, or "
            f"pass larger batches and `micro_batch_size` in place of `accum_steps`. Received: {len(penalties)} losses."
            " [accum: sum]",
            _check.InexactWarning,
        )


@_check.rule
def warn_of_inexact_loss(seen: Seen) -> None:
    """Warn if the compiled loss of a model is not exact with the arguments of the model."""
    model, model_options = seen.model, seen.model._accum.options
    container = getattr(model, _tf.losses.LOSS_CONTAINER, None)
    accumulates = model_options.plan.accum_steps != 1  # batches: what is only split is exact
    if seen.is_mean and accumulates and _tf.losses.adds_up_examples(container):
        _check.warn(_MEAN_OF_SUMS, _check.InexactWarning)
    is_equal = model_options.arguments["micro_batch_weight"] == "equal"
    if model._accum.size.tokens is not None and is_equal and container and not _tf.losses.sums_over_examples(container):
        _check.warn(
            "`micro_batch_weight='equal'` counts micro-batches by tokens alike, although they have different sizes, "
            "which is right only for compiled losses with the reduction SUM: leave `micro_batch_weight` out, or "
            f"{BY_REDUCTION}. [accum: sum]",
            _check.InexactWarning,
        )
    bases = {base.__name__ for base in type(model).__mro__}
    has_own_loss = getattr(model, "_using_dummy_loss", False)  # what `transformers` calls it
    if model_options.weighs_as_keras and has_own_loss and bases & _MEANS_OVER_LABELS:
        _check.warn(
            f"The loss of {type(model).__name__} is a mean over the labels other than -100, whose number differs "
            "between micro-batches: pass `micro_batch_weight=`, a function `(x, y, sample_weight)` that counts them."
            " [accum: loss-counts]",
            _check.InexactWarning,
        )
