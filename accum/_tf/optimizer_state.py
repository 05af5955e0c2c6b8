"""The state and hyperparameters of inner optimizers, for conversion."""

from typing import Any, Dict, Optional, Tuple

from accum._tf.models import layers_of
from accum._tf.optimizers import is_legacy_optimizer, is_new_optimizer
from accum._tf.types import GradsAndVars
from accum._tf.variables import native
from accum._tf.version import HAS_KERAS_API, IS_KERAS_3, VERSION, tf

CONVERTS = HAS_KERAS_API
"""Whether this version has Keras optimizers whose slots this module knows."""

_NEW_SLOTS = {
    "SGD": {"momentum": "momentums"},
    "Adam": {"m": "_momentums", "v": "_velocities"},
    "RMSprop": {"rms": "_velocities", "momentum": "_momentums", "mg": "_average_gradients"},
    "Adagrad": {"accumulator": "_accumulators"},
}
"""The attributes in which a new optimizer keeps the slots that a legacy optimizer returns by name."""


def rule_name(optimizer: Any) -> Optional[str]:
    """Return "SGD", "Adam", "RMSprop" or "Adagrad" for Keras' optimizer of that class; None for any other."""
    homes = [tf.keras.optimizers]
    homes += [getattr(homes[0], name) for name in ("legacy", "experimental") if hasattr(homes[0], name)]
    names = [name for name in _NEW_SLOTS for home in homes if type(optimizer) is getattr(home, name, None)]
    return names[0] if names else None


def slot_variable(optimizer: Any, var: tf.Variable, role: str) -> tf.Variable:
    """Return the slot of `var` in a built optimizer, by its name in legacy optimizers."""
    if not is_new_optimizer(optimizer):
        return optimizer.get_slot(var, role)
    return _of_variable(optimizer, getattr(optimizer, _NEW_SLOTS[str(rule_name(optimizer))][role]), var)


def average_variable(optimizer: Any, var: tf.Variable) -> Any:
    """Return the moving average of `var` that a built optimizer keeps with `use_ema`, or None."""
    if not getattr(optimizer, "use_ema", False):
        return None
    return _of_variable(optimizer, optimizer._model_variables_moving_average, var)


def _of_variable(optimizer: Any, listed: GradsAndVars, var: tf.Variable) -> Any:
    index = optimizer._trainable_variables_indices if IS_KERAS_3 else optimizer._index_dict
    return listed[index[optimizer._var_key(var)]]


def hyperparameter(optimizer: Any, name: str) -> float:
    """Return the current value of a hyperparameter."""
    is_hyper = is_legacy_optimizer(optimizer) and name in optimizer._hyper
    value = optimizer._get_hyper(name) if is_hyper else getattr(optimizer, name)
    return _number(value)


def _number(value: Any) -> Any:
    return float(value if isinstance(value, (int, float)) else native(value).numpy())


def rate_of_step(optimizer: Any, step: int) -> Tuple[float, bool]:
    """Return (the learning rate of the next step after `step` steps, whether it follows a schedule)."""
    legacy = is_legacy_optimizer(optimizer)
    rate = optimizer._get_hyper("learning_rate") if legacy else optimizer._learning_rate
    is_scheduled = _is_schedule(rate)
    rate = _number(rate(tf.cast(step, tf.float32)) if is_scheduled else rate)
    decay = optimizer._initial_decay if legacy else 0.0
    if decay > 0.0:
        return rate / (1.0 + hyperparameter(optimizer, "decay") * step), True
    return rate, is_scheduled


def learning_rate_now(optimizer: Any) -> tf.Tensor:
    """Return the learning rate of the next step as a float32 tensor; NaN if the optimizer has none of its own."""
    if is_legacy_optimizer(optimizer):
        return optimizer._decayed_lr(tf.float32)  # includes schedule and `decay`; has no public name
    rate = getattr(optimizer, "_learning_rate", None)  # the public one of Keras 2 is that of the step before
    if callable(rate) and not hasattr(rate, "shape"):
        rate = rate(native(optimizer.iterations)) if _is_schedule(rate) else rate()
    return tf.cast(float("nan") if rate is None else native(rate), tf.float32)


def _is_schedule(rate: Any) -> bool:
    return isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule)


def is_epsilon_beside_root(optimizer: Any) -> bool:
    """Whether an optimizer with a `rule_name` adds epsilon outside the square root, rather than inside it."""
    rule = rule_name(optimizer)
    if rule == "RMSprop" and not is_new_optimizer(optimizer):
        return not hyperparameter(optimizer, "momentum") > 0.0  # with momentum it uses the kernel of v1
    if rule == "RMSprop":
        return VERSION < (2, 11)  # the preview; dies with 2.10
    return rule == "Adam" or not is_new_optimizer(optimizer)


def has_rate_in_momentum(optimizer: Any) -> bool:
    """Whether RMSprop's momentum is a sum of steps that include the learning rate; not in the preview (2.9, 2.10)."""
    return not is_new_optimizer(optimizer) or VERSION >= (2, 11)


def has_odd_centering(optimizer: Any) -> bool:
    """Whether a centered RMSprop subtracts something other than the squared mean, as the preview (2.9, 2.10) does."""
    return optimizer.centered and is_new_optimizer(optimizer) and VERSION < (2, 11)


def moves_touched_rows_only(optimizer: Any) -> Any:
    """Whether momentum and RMSprop only update the rows in a sparse gradient, as v1 optimizers do.

    Legacy optimizers do. New optimizers decay the slots of all rows, and update all rows.
    """
    return is_legacy_optimizer(optimizer)


def _with_rows() -> Any:
    if IS_KERAS_3:
        return "a legacy optimizer of tf-keras, Keras 2 (TF_USE_LEGACY_KERAS=1)"
    return "one of `tf.keras.optimizers{}`".format(".legacy" if VERSION >= (2, 11) else "")


WITH_ROWS = _with_rows() if HAS_KERAS_API else None
"""A description of the optimizers that only update touched rows, for error messages."""


def embeddings_of(model: tf.keras.Model) -> Any:
    """Return the tables of a model's embedding layers, whose gradients are sparse."""
    layers = layers_of(model) if isinstance(model, tf.keras.Model) else []
    return [weight for layer in layers if isinstance(layer, tf.keras.layers.Embedding) for weight in layer.weights[:1]]


def is_of_several_replicas(var: tf.Variable) -> bool:
    """Whether a variable is mirrored over several replicas."""
    strategy = getattr(native(var), "_distribute_strategy", None)  # has no public name
    return strategy is not None and strategy.num_replicas_in_sync > 1


def write_bundle(prefix: str, values: Dict[str, Any]) -> None:
    """Write {name: array} in eager execution, in the V2 format of `Saver`."""
    names = sorted(values)
    tensors = [tf.constant(values[name]) for name in names]
    tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=[""] * len(names), tensors=tensors)
