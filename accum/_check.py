"""Every error that an argument can cause, raised before anything is built (law L17)."""

import numbers

import numpy as np


def accum_steps(value, name="accum_steps"):
    """`value` as an int >= 1."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise TypeError("`{}` must be an int >= 1. Received: {}={!r}.".format(name, name, value))
    if value < 1:
        raise ValueError("`{}` must be an int >= 1. Received: {}={!r}.".format(name, name, value))
    return int(value)


def schedule(value, name="accum_steps"):
    """`{first: accum_steps}` as a tuple of pairs by ascending `first`."""
    for first in value:
        if isinstance(first, bool) or not isinstance(first, numbers.Integral) or first < 0:
            raise ValueError("The keys of `{}` must be ints >= 0. Received: {}={!r}.".format(name, name, value))
    if 0 not in value:
        raise ValueError(
            "The schedule `{}` must say what holds from the start: add the key 0. Received: {}={!r}.".format(
                name, name, value
            )
        )
    return tuple((int(first), accum_steps(value[first], "{}[{}]".format(name, first))) for first in sorted(value))


def one_of(name, value, choices):
    """`value` in lower case, which must be one of `choices`."""
    known = value.lower() if isinstance(value, str) else value
    if known not in choices:
        raise ValueError("`{}` must be one of {}. Received: {}={!r}.".format(name, list(choices), name, value))
    return known


def callable_or_none(name, value):
    if value is not None and not callable(value):
        raise TypeError("`{}` must be a function or None. Received: {}={!r}.".format(name, name, value))
    return value


def not_negative(name, value, known=None):
    """`value`, a scalar >= 0.

    Args:
      name: the argument's name.
      value: a number or a scalar tensor.
      known: the tensor's value where it is known already, or None.
    """
    dtype = str(getattr(value, "dtype", ""))
    if "bool" in dtype or not (dtype or _is_number(value)):
        raise TypeError("`{}` must be a scalar >= 0. Received: {}={!r}.".format(name, name, value))
    if dtype and value.shape.__len__() and tuple(value.shape):
        raise ValueError("`{}` must be a scalar >= 0. Received: shape {}.".format(name, tuple(value.shape)))
    known = value if known is None and _is_number(value) else known
    if known is not None and not known >= 0:  # a NaN is refused too
        raise ValueError("`{}` must be a scalar >= 0. Received: {}={!r}.".format(name, name, value))
    return value


def _is_number(value):
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))


def floating_dtype(name, dtype):
    """`dtype`, a `tf.DType`, which must hold fractions."""
    if not (dtype.is_floating or dtype.is_complex):
        raise ValueError("`{}` must be a floating dtype. Received: {}={}.".format(name, name, dtype.name))
    return dtype


def once_each(names, keys):
    """Every variable of a call stands in it once."""
    twice = sorted({name for name, key in zip(names, keys) if keys.count(key) > 1})
    if twice:
        raise ValueError("Each variable must stand once in `grads_and_vars`: add up the gradients of {}.".format(twice))


def gradient(grad, var):
    """A gradient must have the shape of its variable, as far as both are known."""
    if grad is None:
        return
    if hasattr(grad, "indices"):
        shape = var.shape[:1].concatenate(grad.values.shape[1:])
    elif hasattr(grad, "shape") and hasattr(grad, "dtype"):
        shape = grad.shape
    else:
        raise TypeError("A gradient must be a tensor, `tf.IndexedSlices` or None. Received: {!r}.".format(grad))
    if not var.shape.is_compatible_with(shape):
        raise ValueError(
            "A gradient must have its variable's shape. Received: shape {} for {} of shape {}.".format(
                shape, var.name, var.shape
            )
        )


def pairs(grads_and_vars):
    """`grads_and_vars` as a list of (gradient, variable), at least one of them with a gradient."""
    listed = list(grads_and_vars)
    for pair in listed:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError("`grads_and_vars` must hold (gradient, variable) pairs. Received: {!r}.".format(pair))
    if not listed or all(grad is None for grad, _ in listed):
        raise ValueError(
            "No gradient for any variable of {}: is the loss computed from them?".format([v.name for _, v in listed])
        )
    for grad, var in listed:
        gradient(grad, var)
    return listed


def strategy(chosen, is_central_storage, is_parameter_server):
    """A strategy must give each replica accumulators of its own."""
    if is_parameter_server:
        raise ValueError(
            "Under a ParameterServerStrategy workers run by themselves and would mix their micro-batches in one cycle. "
            "Use a MultiWorkerMirroredStrategy, or in a static graph, without a strategy, "
            "`accum.compat.v1.AccumOptimizer(local_accumulators=True)`. Received: {!r}.".format(chosen)
        )
    if is_central_storage and chosen.num_replicas_in_sync > 1:
        raise ValueError(
            "Under a CentralStorageStrategy replicas share every variable, so that each would accumulate the gradients "
            "of all. Use a MirroredStrategy. Received: {!r}.".format(chosen)
        )


def axes(name, value, rank=None):
    """`value`, ints that number axes, each once; with `rank` as ints >= 0, which must be axes of such a tensor."""
    is_listed = isinstance(value, (tuple, list))
    if not is_listed or any(isinstance(axis, bool) or not isinstance(axis, numbers.Integral) for axis in value):
        raise TypeError("`{}` must be a tuple of ints. Received: {}={!r}.".format(name, name, value))
    if rank is None:
        return tuple(int(axis) for axis in value)
    if any(not -rank <= axis < rank for axis in value):
        raise ValueError("`{}` must be axes of a tensor of rank {}. Received: {!r}.".format(name, rank, value))
    return tuple(int(axis) % rank for axis in value)


def axes_by_name(name, value):
    """`{name: axes}`."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise TypeError("`{}` must be a dict of names to axes. Received: {}={!r}.".format(name, name, value))
    return {key: axes("{}[{!r}]".format(name, key), value[key]) for key in value}


def names_or_function(name, value):
    """A tuple of names, or a function; None says no names."""
    value = () if value is None else value
    if callable(value):
        return value
    if not isinstance(value, (tuple, list, set)) or not all(isinstance(item, str) for item in value):
        raise TypeError(
            "`{}` must be a list of names, or a function of a variable. Received: {}={!r}.".format(name, name, value)
        )
    return tuple(sorted(value) if isinstance(value, set) else value)


def positive(name, value):
    if not _is_number(value) or not value > 0:
        raise ValueError("`{}` must be a number > 0. Received: {}={!r}.".format(name, name, value))
    return value
