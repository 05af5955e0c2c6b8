"""What an inner optimizer keeps, for conversion."""

from accum._tf._families import is_legacy_optimizer, is_new_optimizer
from accum._tf._line import HAS_KERAS_FACE, IS_KERAS_3, VERSION, tf

CONVERTS = HAS_KERAS_FACE and not IS_KERAS_3
"""Whether Keras' optimizers are those whose slots are known here; those of Keras 3 are not."""

_NEW_SLOTS = {
    "SGD": {"momentum": "momentums"},
    "Adam": {"m": "_momentums", "v": "_velocities"},
    "RMSprop": {"rms": "_velocities", "momentum": "_momentums", "mg": "_average_gradients"},
    "Adagrad": {"accumulator": "_accumulators"},
}
"""Where a new optimizer keeps the slots that a legacy one gives by name. Dies with 2.15."""


def rule_name(optimizer):
    """ "SGD", "Adam", "RMSprop" or "Adagrad" for Keras' own optimizer of that class; None for any other."""
    homes = [tf.keras.optimizers]
    homes += [getattr(homes[0], name) for name in ("legacy", "experimental") if hasattr(homes[0], name)]
    names = [name for name in _NEW_SLOTS for home in homes if type(optimizer) is getattr(home, name, None)]
    return names[0] if names else None


def slot_variable(optimizer, var, role):
    """The slot of `var` in a built optimizer, by the name that legacy optimizers give it."""
    if not is_new_optimizer(optimizer):
        return optimizer.get_slot(var, role)
    slots = getattr(optimizer, _NEW_SLOTS[rule_name(optimizer)][role])
    return slots[optimizer._index_dict[optimizer._var_key(var)]]


def hyperparameter(optimizer, name):
    """A hyperparameter as it is now, a float."""
    is_hyper = is_legacy_optimizer(optimizer) and name in optimizer._hyper
    value = optimizer._get_hyper(name) if is_hyper else getattr(optimizer, name)
    return float(tf.keras.backend.get_value(value))


def rate_of_step(optimizer, step):
    """(the learning rate of the step that follows `step` of them, whether it follows a schedule)."""
    legacy = is_legacy_optimizer(optimizer)
    rate = optimizer._get_hyper("learning_rate") if legacy else optimizer._learning_rate
    is_scheduled = isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule)
    rate = float(tf.keras.backend.get_value(rate(tf.cast(step, tf.float32)) if is_scheduled else rate))
    decay = optimizer._initial_decay if legacy else 0.0
    if decay > 0.0:
        return rate / (1.0 + hyperparameter(optimizer, "decay") * step), True
    return rate, is_scheduled


def is_epsilon_beside_root(optimizer):
    """Whether an optimizer of a `rule_name` adds epsilon to the root, rather than under it."""
    rule = rule_name(optimizer)
    if rule == "RMSprop" and not is_new_optimizer(optimizer):
        return not hyperparameter(optimizer, "momentum") > 0.0  # with momentum it has v1's kernel
    if rule == "RMSprop":
        return VERSION < (2, 11)  # the preview; dies with 2.10
    return rule == "Adam" or not is_new_optimizer(optimizer)


def has_rate_in_momentum(optimizer):
    """Whether RMSprop's momentum sums steps; that of the preview does not. Dies with 2.10."""
    return not is_new_optimizer(optimizer) or VERSION >= (2, 11)


def has_odd_centering(optimizer):
    """Whether a centered RMSprop subtracts something else than the square of a mean: the preview's. Dies with 2.10."""
    return optimizer.centered and is_new_optimizer(optimizer) and VERSION < (2, 11)


def is_of_several_replicas(var):
    """Whether a variable is a mirrored one, of which there are several."""
    strategy = getattr(var, "_distribute_strategy", None)  # has no public name
    return strategy is not None and strategy.num_replicas_in_sync > 1


def write_bundle(prefix, values):
    """Write {name: array} as a `Saver` of the second format does, in eager execution."""
    names = sorted(values)
    tensors = [tf.constant(values[name]) for name in names]
    tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=[""] * len(names), tensors=tensors)
