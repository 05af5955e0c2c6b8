"""Undo the wrapping: a plain Keras model from one that accumulates, for places where accum is not installed."""

from typing import Dict, List, Tuple

from accum import _tf
from accum._keras._batch_norm._layer import AccumBatchNormalization
from accum._keras._model._model import GradientAccumulateModel
from accum._keras._model._optimizers import holds_optimizer, replace_optimizers, replaced_within
from accum._keras._old_spellings import GAModelWrapper
from accum._keras._optimizer._internals import internals_of
from accum._keras._optimizer._wrapper import GradientAccumulateOptimizer
from accum._keras._steps._reporting_loss import ReportingLoss
from accum._tf import tf

STEPS = ("train_step", "test_step", "predict_step")


def unwrap(model: tf.keras.Model) -> tf.keras.Model:
    """Return a plain Keras model with the layers, weights and optimizer state of a model that accumulates.

    What it saves loads where accum is not installed. It shares its variables with `model`, which stays as it is; so
    train only one of them. If `model` is compiled, so is the plain one, with the same loss and metrics, and with the
    inner optimizer, which has made the same steps.

    Args:
      model: a `GradientAccumulateModel`, or a Keras model compiled with a `GradientAccumulateOptimizer`.

    Returns:
      An instance of the class that `model` had before it was wrapped. It computes each batch at once, and each batch
      makes one step.

    Raises:
      TypeError: `model` is not a Keras model, or its class derives from `GradientAccumulateModel`.
      ValueError: `model` does not accumulate; is in an unfinished cycle; has an `AccumBatchNormalization`, which needs
        accum; or has a `GradientAccumulateModel` among its layers.

    Example:
      >>> accum.unwrap(model).save("model.keras")
    """
    base = _base_of(model)
    _check_cycles(model)
    _check_layers(model)
    made = _tf.models.model_like(model, base)
    made.__dict__.pop("_accum", None)
    _restore_functions(model, made)
    container = getattr(made, _tf.losses.LOSS_CONTAINER, None)
    if isinstance(container, ReportingLoss):
        _tf.patches.LOSSES.keep(made, _tf.losses.LOSS_CONTAINER, container.container)
    replacements: Dict[int, Tuple[tf.keras.optimizers.Optimizer, tf.keras.optimizers.Optimizer]] = {}

    def plain(optimizer: tf.keras.optimizers.Optimizer) -> tf.keras.optimizers.Optimizer:
        if id(optimizer) not in replacements:
            replacements[id(optimizer)] = optimizer, _plain(optimizer)
        return replacements[id(optimizer)][1]

    replace_optimizers(made, plain)
    _tf.models.replace_in_compile_config(made, lambda value: replaced_within(value, plain))
    return made


def _base_of(model: tf.keras.Model) -> type:
    """Return the class of the plain model."""
    if not isinstance(model, tf.keras.Model):
        raise TypeError(f"`model` must be a `tf.keras.Model`. Received: model={model!r}.")
    cls = type(model)
    if not isinstance(model, GradientAccumulateModel):
        if not any(map(_accumulates, _optimizers_of(model))):
            raise ValueError(f"`model` must be a model that accumulates. Received: {model!r}.")
        return cls
    root = getattr(cls, "_root", cls)
    if root not in (GradientAccumulateModel, GAModelWrapper):
        raise TypeError(
            "`model` must not be of a class that derives from `GradientAccumulateModel`: methods of the class can't be "
            "carried. Build the plain model, and copy the weights with `set_weights`. Received: "
            f"{root.__name__}."
        )
    return getattr(cls, "_base", _tf.models.Functional)


def _optimizers_of(model: tf.keras.Model) -> List[tf.keras.optimizers.Optimizer]:
    optimizers: List[tf.keras.optimizers.Optimizer] = []
    for value in list(vars(model).values()):
        if holds_optimizer(value):
            replaced_within(value, lambda optimizer: optimizers.append(optimizer) or optimizer)  # type: ignore[func-returns-value]
    return optimizers


def _accumulates(optimizer: tf.keras.optimizers.Optimizer) -> bool:
    return isinstance(_tf.optimizers.without_loss_scale(optimizer), GradientAccumulateOptimizer)


def _check_cycles(model: tf.keras.Model) -> None:
    for optimizer in filter(_accumulates, _optimizers_of(model)):
        accumulating = _tf.optimizers.without_loss_scale(optimizer)
        micro_step = int(accumulating.micro_step) if internals_of(accumulating).cycle.is_built else 0
        if micro_step > 0:
            raise ValueError(
                "`model` must not be in an unfinished cycle: call `flush()` of its optimizer to make a step from it, "
                f"or `reset()` to drop it. Received: micro_step={micro_step}."
            )


def _check_layers(model: tf.keras.Model) -> None:
    layers = _tf.models.layers_of(model)
    ours = [layer.name for layer in layers if isinstance(layer, AccumBatchNormalization)]
    if ours:
        raise ValueError(
            "`model` must not have an AccumBatchNormalization, which is a layer of accum: build the model with "
            "BatchNormalization, and copy the weights with `set_weights`; both layers have the same ones. Received: "
            f"{', '.join(ours[:4])}{' and more' if len(ours) > 4 else ''}."
        )
    inner = [layer.name for layer in layers if isinstance(layer, GradientAccumulateModel)]
    if inner:
        raise ValueError(f"`model` must not have a GradientAccumulateModel among its layers. Received: {inner[0]}.")


def _restore_functions(model: tf.keras.Model, made: tf.keras.Model) -> None:
    """Give `made` the steps and the loss that the user has set on the instance, and otherwise those of the class."""
    if not isinstance(model, GradientAccumulateModel):
        return
    for name in STEPS:
        _tf.patches.STEPS.undo(made, name)
        own = model._accum.own_steps.get(name)
        if own is not None:
            made.__dict__[name] = _tf.models.bound_to(made, model, own)
    loss = made.__dict__.get("compute_loss")
    own = getattr(loss, "__wrapped__", None)
    if own is not None:  # what sees the losses of several replicas, around the user's
        _tf.patches.COMPUTE_LOSS.undo(made, "compute_loss")
        if getattr(own, "__func__", None) is not getattr(type(made), "compute_loss", None):
            made.__dict__["compute_loss"] = _tf.models.bound_to(made, model, own)


def _plain(optimizer: tf.keras.optimizers.Optimizer) -> tf.keras.optimizers.Optimizer:
    """Return the optimizer inside an accumulating one, in a `LossScaleOptimizer` like the one around it."""
    if not _accumulates(optimizer):
        return optimizer
    accumulating = _tf.optimizers.without_loss_scale(optimizer)
    if optimizer is accumulating:
        return accumulating.optimizer
    return _tf.optimizers.loss_scale_moved_to(accumulating.optimizer, like=optimizer)
