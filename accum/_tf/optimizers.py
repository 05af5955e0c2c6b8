"""The families of optimizers."""

from typing import Any, Dict, List, Optional, Sequence, Tuple

from accum._tf import layers, tracking
from accum._tf.types import GradsAndVars
from accum._tf.version import HAS_KERAS_API, IS_KERAS_3, VERSION, tf


def _legacy_base() -> Any:
    if IS_KERAS_3:
        return None
    if VERSION >= (2, 11):  # 2.11 made the new optimizers the default; dies with 2.15
        return tf.keras.optimizers.legacy.Optimizer
    return tf.keras.optimizers.Optimizer


def _new_base() -> Any:
    if VERSION >= (2, 11):
        return tf.keras.optimizers.Optimizer
    if VERSION >= (2, 9):  # a preview of the 2.11 optimizers; dies with 2.10
        return tf.keras.optimizers.experimental.Optimizer
    return None


LegacyOptimizer = _legacy_base()
"""Base class of the Keras optimizers that keep slots and hyperparameters (all up to 2.10), or None in Keras 3."""

NewOptimizer = _new_base()
"""Base class of the Keras optimizers that are built from a variable list (the default from 2.11 on), or None."""

GraphOptimizer = tf.compat.v1.train.Optimizer

FOR_STATIC_GRAPHS = "one of `tf.compat.v1.train`"
if NewOptimizer is not None and not IS_KERAS_3:  # dies with 2.15
    FOR_STATIC_GRAPHS += " or `tf.keras.optimizers.legacy`"


def is_legacy_optimizer(optimizer: Any) -> bool:
    return LegacyOptimizer is not None and isinstance(optimizer, LegacyOptimizer)


def is_new_optimizer(optimizer: Any) -> bool:
    return NewOptimizer is not None and isinstance(optimizer, NewOptimizer)


def is_keras_optimizer(optimizer: Any) -> bool:
    return is_legacy_optimizer(optimizer) or is_new_optimizer(optimizer)


def is_graph_optimizer(optimizer: Any) -> bool:
    return isinstance(optimizer, GraphOptimizer)


def _loss_scale_classes() -> Tuple[type, ...]:
    classes = []
    if HAS_KERAS_API:
        if VERSION >= (2, 4):
            classes.append(tf.keras.mixed_precision.LossScaleOptimizer)
        if VERSION < (2, 11):  # dies with 2.10
            experimental = getattr(tf.keras.mixed_precision, "experimental", None)
            if experimental is not None:
                classes.append(experimental.LossScaleOptimizer)
    return tuple(classes)


_LOSS_SCALE_CLASSES = _loss_scale_classes()


def is_loss_scale_optimizer(optimizer: Any) -> bool:
    if _LOSS_SCALE_CLASSES and isinstance(optimizer, _LOSS_SCALE_CLASSES):
        return True
    # From 2.11 on, the class for new optimizers does not derive from the concrete class behind the public name. Dies
    # with 2.15. The class of `tf.compat.v1` moved between namespaces.
    return type(optimizer).__name__.startswith(("LossScaleOptimizer", "MixedPrecisionLossScaleOptimizer"))


def without_loss_scale(optimizer: Any) -> Any:
    """Return the optimizer inside a `LossScaleOptimizer`, or any other optimizer unchanged."""
    name = attribute_within_loss_scale(optimizer)
    return optimizer if name is None else getattr(optimizer, name)


def attribute_within_loss_scale(optimizer: Any) -> Optional[str]:
    """Return the name of the attribute of a `LossScaleOptimizer` that has the optimizer inside; None for any other."""
    if optimizer is None or not is_loss_scale_optimizer(optimizer):
        return None
    # 2.2 and 2.3 have no public name for it; dies with 2.3
    return "inner_optimizer" if hasattr(optimizer, "inner_optimizer") else "_optimizer"


def loss_scale_of(optimizer: Any) -> float:
    """Return the number by which Keras 3 multiplies the loss, and `optimizer` divides its gradients; 1 for none."""
    return float(getattr(optimizer, "loss_scale_factor", None) or 1.0)


def deserialize(config: Any, custom_objects: Optional[Dict[str, Any]] = None) -> Any:
    if is_keras_optimizer(config):
        return config  # Keras 2.13 and later may have deserialized it already
    if VERSION >= (2, 11):
        # `optimizers.deserialize` returns the string "AdamW" for AdamW up to 2.15, and "Lamb" for Lamb in Keras 3. The
        # general `deserialize` does not find SGD while Keras reads H5. So look up Keras' classes here.
        inside = config.get("config", {})
        # The configs of legacy optimizers do not always contain `is_legacy_optimizer`.
        is_legacy = not IS_KERAS_3 and inside.get("is_legacy_optimizer", "decay" in inside)
        family = tf.keras.optimizers.legacy if is_legacy else tf.keras.optimizers
        cls = getattr(family, config["class_name"], None)
        is_own = bool(config.get("registered_name")) or config["class_name"] in (custom_objects or {})  # a custom class
        if cls is not None and not is_own:
            return cls.from_config(dict(config["config"]))
    return tf.keras.optimizers.deserialize(config, custom_objects=custom_objects)


def aggregated(grads_and_vars: GradsAndVars) -> List[Any]:
    """Return what `_aggregate_gradients` of a legacy optimizer returns if there is nothing to aggregate."""
    if VERSION < (2, 4):  # gradients only; dies with 2.3
        return [grad for grad, _ in grads_and_vars]
    return list(grads_and_vars)


def legacy_adam(*args: Any, **kwargs: Any) -> Any:
    """Create Keras' Adam from the family that also works in a static graph, which Keras 3 does not have."""
    if IS_KERAS_3:
        raise NotImplementedError(
            "Keras 3 has no optimizer for static graphs: install tf-keras and set TF_USE_LEGACY_KERAS=1, "
            "or use `AccumOptimizer(tf.compat.v1.train.AdamOptimizer(...), accum_steps=...)`. [accum: install]"
        )
    family = tf.keras.optimizers.legacy if VERSION >= (2, 11) else tf.keras.optimizers
    return family.Adam(*args, **kwargs)


def copy_of(optimizer: Any) -> Any:
    """Create an optimizer of the same class and hyperparameters that has made no step."""
    return type(optimizer).from_config(optimizer.get_config())


COMPUTING = ("compute_gradients", "_compute_gradients", "get_gradients", "_get_gradients", "_transform_loss")
"""The methods by which an optimizer of Keras 2 computes gradients. One of Keras 3 is only given them."""


def own_ways_to_gradients(optimizer: Any) -> List[str]:
    """Return the names of those methods of Keras that a class of the user's has in place of Keras' own."""
    if IS_KERAS_3:
        return []
    classes = [vars(optimizer)] + [vars(base) for base in type(optimizer).__mro__]
    return [name for name in COMPUTING if sum(name in attributes for attributes in classes) > 1]


def without_loss_scale_of_another(optimizer: Any) -> Any:
    """Return the optimizer, which is within a `LossScaleOptimizer`, for one of its own.

    Keras 2 keeps the loss scale among what the inner optimizer tracks, so there it is a copy that has made no step. The
    copy has what no config tells: the learning rate itself, which callbacks may set, what does not decay, what
    transforms gradients, and plain attributes of a class of the user's.

    Raises:
      ValueError: a class of the user's can't be made from its config.
    """
    if IS_KERAS_3:
        return optimizer
    held, key = (
        (optimizer._hyper, "learning_rate") if hasattr(optimizer, "_hyper") else (vars(optimizer), "_learning_rate")
    )
    rate = held.get(key)  # some optimizers around others have none
    if callable(rate) or isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule):
        held[key] = 0.0
        try:
            config = optimizer.get_config()
        finally:
            held[key] = rate
        made = _made_like(optimizer, dict(config, learning_rate=rate))
    else:
        made = _made_like(optimizer, optimizer.get_config())
        # The variable, which is only created when it is asked for.
        shared = None if rate is None else optimizer.learning_rate
        if isinstance(shared, tf.Variable) and hasattr(made, "_hyper"):
            made._hyper[key] = shared
            tracking.track(made, shared, key)
        elif isinstance(shared, tf.Variable):
            setattr(made, key, shared)
    is_of_user = not layers.comes_with_keras(type(optimizer))
    for name, value in vars(optimizer).items():
        is_plain = is_of_user and not name.startswith("_") and isinstance(value, (bool, int, float, str))
        if is_plain or name.startswith(NOT_IN_CONFIG):
            setattr(made, name, value)
    return made


NOT_IN_CONFIG = ("_exclude_from_weight_decay", "_include_in_weight_decay", "gradient_transformers")
"""Beginnings of the names of attributes that no config of Keras 2 tells."""


def _made_like(optimizer: Any, config: Dict[str, Any]) -> Any:
    try:
        return type(optimizer).from_config(config)
    except TypeError as error:
        raise ValueError(
            "An optimizer in a `LossScaleOptimizer` is made anew from its config: let `get_config` return all "
            f"arguments of its class. Received: {optimizer!r}: {error}. [accum: loss-scale]"
        ) from error


def loss_scale_around(optimizer: Any, like: Any) -> Any:
    """Create a `LossScaleOptimizer` around `optimizer`, with the settings of the loss scale optimizer `like`."""
    if IS_KERAS_3:
        return type(like)(optimizer, like.initial_scale, like.dynamic_growth_steps)
    if VERSION < (2, 4):  # dies with 2.3
        return type(like)(optimizer, like.loss_scale)
    return tf.keras.mixed_precision.LossScaleOptimizer(
        optimizer,
        dynamic=like.dynamic,
        initial_scale=like.initial_scale,
        dynamic_growth_steps=like.dynamic_growth_steps,
    )


def loss_scale_moved_to(optimizer: Any, like: Any) -> Any:
    """Create a `LossScaleOptimizer` around `optimizer` that goes on with the loss scale of `like`.

    The optimizer that `like` is around must be around `optimizer` itself.
    """
    if IS_KERAS_3:
        scale = float(like.dynamic_scale.numpy()) if like.built else like.initial_scale
        return type(like)(optimizer, scale, like.dynamic_growth_steps)
    made = object.__new__(type(like))  # Keras 2 refuses to make one around an optimizer that has had a loss scale
    inner = without_loss_scale(like)
    made.__dict__.update({name: optimizer if value is inner else value for name, value in vars(like).items()})
    return made


def register_keras_class(cls: type, name: str) -> None:
    """Let Keras find `cls` by its name alone when it loads a file, without custom objects."""
    tf.keras.utils.get_custom_objects()[name] = cls


def build_with_loss_scale(optimizer: Any, variables: Sequence[Any]) -> None:
    """Create the variables of an accumulating optimizer, and of the `LossScaleOptimizer` around it, if there is one.

    Only that of Keras 3 has variables that it does not create with the optimizer itself.
    """
    without_loss_scale(optimizer).build(variables)
    if IS_KERAS_3 and is_loss_scale_optimizer(optimizer) and not optimizer.built:
        optimizer.build(variables)
