"""Build the inner optimizer and make its steps."""

from typing import Any, Callable, List, Optional, Sequence

from accum._tf import patches
from accum._tf.optimizers import (
    LegacyOptimizer,
    NewOptimizer,
    is_graph_optimizer,
    is_legacy_optimizer,
    is_new_optimizer,
)
from accum._tf.types import Gradient, GradsAndVars, Scalar
from accum._tf.variables import key_of, native
from accum._tf.version import IS_KERAS_3, VERSION, tf
from accum._tf.watching import unwatched


def variables_of(optimizer: Any) -> List[Any]:
    """Return the variables of an inner optimizer, which are those of its own that its step changes."""
    variables = optimizer.variables  # a method before 2.11
    return list(variables() if callable(variables) else variables)


def build(optimizer: Any, variables: Sequence[tf.Variable]) -> None:
    """Create the inner optimizer's variables now, rather than while a branch is traced."""
    if is_new_optimizer(optimizer):
        if not (IS_KERAS_3 and optimizer.built):  # building again would recreate all variables
            _build_new(optimizer, list(variables))
    elif is_legacy_optimizer(optimizer):
        if VERSION >= (2, 2):
            optimizer._create_all_weights(variables)
        else:  # dies with 1.15
            _ = optimizer.iterations  # created when it is first read
            optimizer._create_hypers()
            optimizer._create_slots(variables)
    # v1 optimizers lift the creation of slots out of the branch themselves.


def _build_new(optimizer: Any, variables: List[Any]) -> None:
    """Build a new optimizer, or say in our words that it begins with values that the variables do not have yet."""
    try:
        optimizer.build(variables)
    except Exception as error:
        with tf.init_scope():
            if not tf.executing_eagerly() or all(bool(native(var).is_initialized()) for var in variables):
                raise
        raise ValueError(
            f"{type(optimizer).__name__} starts from the values of the variables, which the model creates only in its "
            "first step: call `model.build(input_shape)`, or the model on a batch, before `fit`. [accum: build-first]"
        ) from error


def create_graph_slots(optimizer: Any, variables: Sequence[tf.Variable]) -> None:
    """Create the inner optimizer's variables where it would create them on its own, so that checkpoint names match.

    If they were created in a branch of the conditional, their names would include it. A v1 optimizer creates its
    variables in cross-replica context; a Keras optimizer creates them on each replica, in its own scope.
    """
    if is_graph_optimizer(optimizer):
        with tf.init_scope():
            optimizer._create_slots(variables)
    else:
        with tf.name_scope(optimizer._name), tf.init_scope():
            build(optimizer, variables)


def prepare(optimizer: Any, variables: Sequence[tf.Variable], used: Sequence[tf.Variable]) -> None:
    """Create the variables that the inner optimizer needs now.

    A new optimizer is built once, as Keras does: for the whole list, including variables without a gradient yet. A
    legacy optimizer creates only the slots for `used`, the subset of `variables` that a trace updates.
    """
    if is_new_optimizer(optimizer):
        build(optimizer, variables)
    elif used:
        build(optimizer, used)


def refused_by_inner(optimizer: Any, variables: Sequence[tf.Variable]) -> List[tf.Variable]:
    """Return those `variables` that the inner optimizer can't update: a new optimizer is built once, for one list."""
    names = ("_trainable_variables_indices", "built") if IS_KERAS_3 else ("_index_dict", "_built")
    index = getattr(optimizer, names[0], None) if is_new_optimizer(optimizer) else None
    if index is None or not getattr(optimizer, names[1], False):
        return []
    return [var for var in variables if optimizer._var_key(var) not in index]


def _clipped_as_in_fit(optimizer: Any, grads_and_vars: GradsAndVars) -> GradsAndVars:
    """Clip by the inner optimizer's `clipnorm` / `clipvalue` if its own `apply_gradients` does not.

    TF 2.2 and 2.3 clip in `minimize` and in `fit`; from 2.4 on `apply_gradients` does. Dies with 2.3.
    """
    if not is_legacy_optimizer(optimizer) or VERSION >= (2, 4):
        return grads_and_vars
    clipnorm, clipvalue = getattr(optimizer, "clipnorm", None), getattr(optimizer, "clipvalue", None)

    def clip(grad: Gradient) -> Gradient:
        grad = grad if clipnorm is None else tf.clip_by_norm(grad, clipnorm)
        return grad if clipvalue is None else tf.clip_by_value(grad, -clipvalue, clipvalue)

    return [(grad if grad is None else clip(grad), var) for grad, var in grads_and_vars]


def apply(
    optimizer: Any,
    grads_and_vars: GradsAndVars,
    replicas: int,
    global_step: Optional[tf.Variable] = None,
    name: Optional[str] = None,
) -> Any:
    """Make one step of the inner optimizer with fully reduced gradients, which it must not reduce again."""
    with unwatched():
        if is_graph_optimizer(optimizer):
            # v1 always sums over replicas: each replica passes its share of the gradient. Dies with the v1 optimizers.
            if replicas > 1:
                grads_and_vars = [(scale_gradient(grad, 1.0 / replicas), var) for grad, var in grads_and_vars]
            return optimizer.apply_gradients(grads_and_vars, global_step=global_step, name=name)
        grads_and_vars = _clipped_as_in_fit(optimizer, grads_and_vars)
        if IS_KERAS_3:
            if hasattr(optimizer, "optimizers"):  # a MultiOptimizer expects all of its variables
                passed = {key_of(var) for _, var in grads_and_vars}
                missing = [var for var in optimizer._trainable_variables if key_of(var) not in passed]
                grads_and_vars = list(grads_and_vars) + [(None, var) for var in missing]
            # Without summing over replicas after clipping; there is no public switch for that.
            parts = _parts(optimizer) if replicas > 1 else []
            with patches.SUMS.on_all(parts, "_all_reduce_sum_gradients", list):
                done = optimizer.apply_gradients(grads_and_vars)
        elif replicas == 1 or VERSION < (2, 2):
            if replicas > 1:  # in TF 1.15 they always reduce, like v1 optimizers; dies with 1.15
                grads_and_vars = [(scale_gradient(grad, 1.0 / replicas), var) for grad, var in grads_and_vars]
            done = optimizer.apply_gradients(grads_and_vars)
        elif is_new_optimizer(optimizer):
            done = optimizer.apply_gradients(grads_and_vars, skip_gradients_aggregation=True)
        else:
            done = optimizer.apply_gradients(grads_and_vars, experimental_aggregate_gradients=False)
        if global_step is not None:
            with tf.control_dependencies([done]):
                done = global_step.assign_add(tf.ones([], global_step.dtype.base_dtype))
        return done


def takes_some_variables(optimizer: Any) -> bool:
    """Whether a step may leave out some of the variables that the inner optimizer was built with."""
    if hasattr(optimizer, "optimizers"):
        return False  # a part of a `MultiOptimizer` raises an error if it is left without a variable
    # Before 2.14, averages of the weights belong to the variables of a call by position.
    has_averages = is_new_optimizer(optimizer) and getattr(optimizer, "use_ema", False)
    return IS_KERAS_3 or VERSION >= (2, 14) or not has_averages


def awaited(done: Any) -> Any:
    """Return what to wait for after `apply`: nothing in Keras 3, where traces order ops automatically."""
    return None if IS_KERAS_3 else done


def without_sum_of_one(optimizer: Any) -> Any:
    """Return a context in which an optimizer does not sum over replicas, if there is only one.

    That sum changes nothing, but since 2.11 TensorFlow registers a gradient for it that is never released. The gradient
    keeps the graph in which it was traced. Here that is the graph of a conditional, which keeps all graphs of a micro
    step.
    """
    is_single = VERSION >= (2, 11) and tf.distribute.get_strategy().num_replicas_in_sync == 1
    name = _name_of_reduction(optimizer)
    parts = [part for part in _parts(optimizer) if is_single and _reduces_as_keras(part, name)]
    return patches.SUMS.on_all(parts, name, list)


_BEFORE_SUMS = [
    "apply_gradients",
    "apply",
    "_backend_apply_gradients",
    "_clip_gradients",
    "_transform_unaggregated_gradients",
]
"""What an optimizer may do before it sums gradients over replicas."""


def sums_before_all_else(optimizer: Any) -> bool:
    """Whether gradients can be summed over replicas for an optimizer, which would itself do so first, as Keras does.

    Keras 3 clips before it sums.
    """
    base: Any = NewOptimizer if is_new_optimizer(optimizer) else LegacyOptimizer
    is_as_keras = all(getattr(type(optimizer), name, None) is getattr(base, name, None) for name in _BEFORE_SUMS)
    clips = any(getattr(optimizer, kind, None) for kind in ("clipnorm", "clipvalue", "global_clipnorm"))
    name = _name_of_reduction(optimizer)
    # In the thread of another replica, which is making its step, it may be replaced.
    reduces = vars(optimizer).get(name) is list or _reduces_as_keras(optimizer, name)
    return is_as_keras and not (IS_KERAS_3 and clips) and reduces


def _parts(optimizer: Any) -> List[Any]:
    return [optimizer] + list(getattr(optimizer, "optimizers", ()))  # the parts of a MultiOptimizer


def _name_of_reduction(optimizer: Any) -> str:
    if IS_KERAS_3:
        return "_all_reduce_sum_gradients"
    return "aggregate_gradients" if is_new_optimizer(optimizer) else "_aggregate_gradients"


def _reduces_as_keras(optimizer: Any, name: str) -> bool:
    """Whether an optimizer sums gradients as Keras does; libraries that sum over processes override the method."""
    base: Any = NewOptimizer if is_new_optimizer(optimizer) else LegacyOptimizer
    is_own = name not in vars(optimizer) and getattr(type(optimizer), name) is getattr(base, name)
    aggregator = getattr(optimizer, "gradient_aggregator", None)  # an argument of legacy optimizers; dies with 2.15
    return is_own and (aggregator is None or aggregator is base("any").gradient_aggregator)


def slot_names(optimizer: Any) -> List[str]:
    """Return the names of an optimizer's slots. An optimizer that is built from a list of variables has none."""
    return [] if is_new_optimizer(optimizer) else sorted(optimizer.get_slot_names())


def as_operation(value: Any) -> tf.Operation:
    """Convert a tensor, a variable or an operation to an operation, which `session.run` runs for its effect."""
    return value if isinstance(value, tf.Operation) else tf.group(value)


def on_values(function: Callable[[tf.Tensor], tf.Tensor], grad: Gradient) -> Gradient:
    """Return a gradient with `function` of its values, dense or those of `tf.IndexedSlices`."""
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(function(grad.values), grad.indices, grad.dense_shape)
    return function(grad)


def scale_gradient(grad: Gradient, factor: Scalar) -> Gradient:
    return on_values(lambda values: values * tf.cast(factor, values.dtype), grad)
