"""Which models and optimizers can be converted, and where."""

from accum import _tf
from accum.convert._report import ConversionError

KERAS_RULES = {"SGD": "sgd", "Adam": "adam", "RMSprop": "rmsprop", "Adagrad": "adagrad"}


def require_eager():
    if not _tf.CONVERTS:
        raise ConversionError("`accum.convert` needs Keras 2: TensorFlow 2.2 to 2.15, or tf-keras after.")
    if _tf.in_static_graph():
        raise ConversionError("A conversion sets variables, and can do so in eager execution only.")


def unwrapped(optimizer):
    """(the accumulating optimizer or None, the one that makes the steps)."""
    if optimizer is None:
        raise ConversionError("The model has no optimizer: compile it, or give `optimizer`.")
    optimizer = _tf.without_loss_scale(optimizer)
    if hasattr(optimizer, "accumulates_as"):
        return optimizer, optimizer.optimizer
    return None, optimizer


def rule_of(optimizer):
    name = _tf.rule_name(optimizer)
    if name is None:
        raise ConversionError(
            "{} has no counterpart here: SGD, Adam, RMSprop and Adagrad can be converted.".format(
                type(optimizer).__name__
            )
        )
    rule = KERAS_RULES[name]
    if rule == "sgd" and _tf.hyperparameter(optimizer, "momentum") > 0.0:
        return "momentum"
    if rule == "rmsprop" and _tf.has_odd_centering(optimizer):
        raise ConversionError(
            "The centered RMSprop of TF 2.9 and 2.10's preview has a rule of its own, which v1 has not."
        )
    if rule == "rmsprop" and optimizer.centered:
        return "centered rmsprop"
    return rule


def weights_of(model):
    try:
        return list(getattr(model, "weights", ()))
    except ValueError:  # a model that is not built may have none, or raise
        return []
