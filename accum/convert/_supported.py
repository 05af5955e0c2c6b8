"""Check which models and optimizers can be converted, and in which mode."""

from accum import _tf
from accum.convert._report import ConversionError

KERAS_RULES = {"SGD": "sgd", "Adam": "adam", "RMSprop": "rmsprop", "Adagrad": "adagrad"}


def require_eager():
    if not _tf.optimizer_state.CONVERTS:
        raise ConversionError("`accum.convert` needs Keras: TensorFlow 2.2 or later.")
    if _tf.graphs.in_static_graph():
        raise ConversionError("A conversion sets variables, which works in eager execution only.")


def unwrapped(optimizer):
    """Return (the accumulating optimizer or None, the inner optimizer)."""
    if optimizer is None:
        raise ConversionError("The model has no optimizer. Compile it, or pass `optimizer`.")
    optimizer = _tf.optimizers.without_loss_scale(optimizer)
    if hasattr(optimizer, "_internals"):
        return optimizer, optimizer.optimizer
    return None, optimizer


def rule_of(optimizer):
    name = _tf.optimizer_state.rule_name(optimizer)
    if name is None:
        raise ConversionError(
            f"{type(optimizer).__name__} can't be converted. Only SGD, Adam, RMSprop and Adagrad can."
        )
    rule = KERAS_RULES[name]
    if rule == "sgd" and _tf.optimizer_state.hyperparameter(optimizer, "momentum") > 0.0:
        return "momentum"
    if rule == "rmsprop" and _tf.optimizer_state.has_odd_centering(optimizer):
        raise ConversionError(
            "The centered RMSprop in the preview of TensorFlow 2.9 and 2.10 has a rule that v1 does not have."
        )
    if rule == "rmsprop" and optimizer.centered:
        return "centered rmsprop"
    return rule


def weights_of(model):
    try:
        return list(getattr(model, "weights", ()))
    except ValueError:  # a model that is not built either has no weights or raises
        return []
