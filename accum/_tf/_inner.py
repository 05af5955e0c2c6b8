"""The inner optimizer, called as a black box."""

import contextlib

from accum._tf._families import is_graph_optimizer, is_legacy_optimizer, is_new_optimizer
from accum._tf._line import IS_KERAS_3, VERSION, tf
from accum._tf._variables import variable_key


def build_inner(optimizer, variables):
    """Create the inner optimizer's variables now, so that no trace of a branch has to."""
    if is_new_optimizer(optimizer):
        if not (IS_KERAS_3 and optimizer.built):  # it would make all of its variables again
            optimizer.build(list(variables))
    elif is_legacy_optimizer(optimizer):
        if VERSION >= (2, 2):
            optimizer._create_all_weights(variables)
        else:  # dies with 1.15
            _ = optimizer.iterations  # made where it is first read
            optimizer._create_hypers()
            optimizer._create_slots(variables)
    # v1 optimizers lift their slots out of the branch by themselves.


def create_graph_slots(optimizer, variables):
    """Create a v1 optimizer's slots where it would do so alone, so that checkpoints know them by the same names.

    Adam names its powers of beta after the scope that it creates them in, a branch of the conditional for one.
    """
    if is_graph_optimizer(optimizer) and not tf.distribute.has_strategy():
        with tf.init_scope():
            optimizer._create_slots(variables)


def prepare_inner(optimizer, variables, used):
    """Create the inner optimizer's variables where it needs them now.

    A new one is built once, as Keras does: for the whole list, also for what has no gradient yet. A legacy one gets
    what it needs for `used`, those of `variables` that a trace updates.
    """
    if is_new_optimizer(optimizer):
        build_inner(optimizer, variables)
    elif used:
        build_inner(optimizer, used)


def refused_by_inner(optimizer, variables):
    """Those of `variables` that the inner optimizer can't update: a new one is built once, for one list."""
    names = ("_trainable_variables_indices", "built") if IS_KERAS_3 else ("_index_dict", "_built")
    index = getattr(optimizer, names[0], None) if is_new_optimizer(optimizer) else None
    if index is None or not getattr(optimizer, names[1], False):
        return []
    return [var for var in variables if optimizer._var_key(var) not in index]


def _clipped_as_in_fit(optimizer, grads_and_vars):
    """Clip by the inner optimizer's `clipnorm` / `clipvalue` where its own `apply_gradients` does not.

    TF 2.2 and 2.3 clip in `minimize` and in `fit`; from 2.4 on `apply_gradients` does. Dies with 2.3.
    """
    if not is_legacy_optimizer(optimizer) or VERSION >= (2, 4):
        return grads_and_vars
    clipnorm, clipvalue = getattr(optimizer, "clipnorm", None), getattr(optimizer, "clipvalue", None)

    def clip(grad):
        grad = grad if clipnorm is None else tf.clip_by_norm(grad, clipnorm)
        return grad if clipvalue is None else tf.clip_by_value(grad, -clipvalue, clipvalue)

    return [(grad if grad is None else clip(grad), var) for grad, var in grads_and_vars]


def apply_inner(optimizer, grads_and_vars, replicas, global_step=None, name=None):
    """One step of the inner optimizer on whole gradients, which it must not reduce over replicas again."""
    if is_graph_optimizer(optimizer):
        # v1 always reduces: each replica hands in its share of the whole. Dies with the v1 optimizers.
        if replicas > 1:
            grads_and_vars = [(scale_gradient(grad, 1.0 / replicas), var) for grad, var in grads_and_vars]
        return optimizer.apply_gradients(grads_and_vars, global_step=global_step, name=name)
    grads_and_vars = _clipped_as_in_fit(optimizer, grads_and_vars)
    if IS_KERAS_3:
        if hasattr(optimizer, "optimizers"):  # a MultiOptimizer wants each of its variables
            given = {variable_key(var) for _, var in grads_and_vars}
            missing = [var for var in optimizer._trainable_variables if variable_key(var) not in given]
            grads_and_vars = list(grads_and_vars) + [(None, var) for var in missing]
        with _without_reduction(optimizer, replicas):
            done = optimizer.apply_gradients(grads_and_vars)
    elif replicas == 1:
        done = optimizer.apply_gradients(grads_and_vars)
    elif is_new_optimizer(optimizer):
        done = optimizer.apply_gradients(grads_and_vars, skip_gradients_aggregation=True)
    else:
        done = optimizer.apply_gradients(grads_and_vars, experimental_aggregate_gradients=False)
    if global_step is not None:
        with tf.control_dependencies([done]):
            done = global_step.assign_add(tf.ones([], global_step.dtype.base_dtype))
    return done


def awaited(done):
    """What to wait for, from what `apply_inner` gave; in Keras 3 nothing, where a trace orders all by itself."""
    return None if IS_KERAS_3 else done


@contextlib.contextmanager
def _without_reduction(optimizer, replicas):
    """Keep an optimizer of Keras 3 from summing over replicas, which it does after it has clipped and can't be told."""
    parts = [optimizer] + list(getattr(optimizer, "optimizers", ()))  # those that a MultiOptimizer calls
    for part in parts if replicas > 1 else ():
        part.__dict__["_all_reduce_sum_gradients"] = list
    try:
        yield
    finally:
        for part in parts:
            part.__dict__.pop("_all_reduce_sum_gradients", None)


def slot_names(optimizer):
    """Names of an optimizer's slots; one that is built from a list of variables has none."""
    return [] if is_new_optimizer(optimizer) else sorted(optimizer.get_slot_names())


def as_operation(value):
    """What `session.run` runs for its effect: an operation, from a tensor, a variable or an operation."""
    return value if isinstance(value, tf.Operation) else tf.group(value)


def scale_gradient(grad, factor):
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values * tf.cast(factor, grad.dtype), grad.indices, grad.dense_shape)
    return grad * tf.cast(factor, grad.dtype)
