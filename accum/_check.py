"""Validate arguments before anything is built (law L17)."""

import difflib
import functools
import inspect
import logging
import numbers
import re
import sys
import warnings
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple, Type, TypeVar, Union, cast

import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)


class _LeftOut(int):
    """A default that can be told apart from the same number passed explicitly."""


LEFT_OUT = _LeftOut(1)
"""The value of `accum_steps` when the caller did not pass it."""


def accum_steps(value: Any, name: str = "accum_steps", allowed: str = "an int >= 1") -> int:
    """Return `value` as an int, after checking that it is >= 1."""
    message = f"`{name}` must be {allowed}. Received: {name}={value!r}."
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise TypeError(message)
    if value < 1:
        raise ValueError(message)
    return int(value)


def schedule(value: Dict[Any, Any], name: str = "accum_steps") -> Tuple[Tuple[int, int], ...]:
    """Return `{first: accum_steps}` as a tuple of pairs, sorted by `first`."""
    for first in value:
        if isinstance(first, bool) or not isinstance(first, numbers.Integral) or first < 0:
            raise ValueError(f"The keys of `{name}` must be ints >= 0. Received: {name}={value!r}. [accum: arguments]")
    if 0 not in value:
        raise ValueError(
            f"The schedule `{name}` must define its value from the start: add the key 0. Received: {name}={value!r}."
            " [accum: arguments]"
        )
    return tuple((int(first), accum_steps(value[first], f"{name}[{first}]")) for first in sorted(value))


def one_of(name: str, value: Any, choices: Sequence[str]) -> str:
    """Return `value` in lower case, after checking that it is one of `choices`."""
    choice = value.lower() if isinstance(value, str) else value
    if choice not in choices:
        raise ValueError(f"`{name}` must be one of {list(choices)}. Received: {name}={value!r}.")
    return choice


_CALLED_ELSEWHERE = dict.fromkeys(
    ("accumulation_steps", "grad_accum_steps", "gradient_accumulation_steps", "n_gradients", "steps_per_update"),
    "accum_steps",
)


class InexactWarning(UserWarning):
    """Warns of a result that may differ from that of the full batch. The message says what differs, why, and a remedy.

    Other warnings of accum, such as of an argument that has no effect, are of other categories.

    Example:
      >>> warnings.simplefilter("error", accum.InexactWarning)  # raises an error in place of each such warning
    """

    # AutoGraph raises what a traced function has raised anew, and keeps the class only of errors with this constructor.
    __init__ = Exception.__init__  # type: ignore[assignment]


InexactWarning.__module__ = "accum"  # so a filter of the command line finds it: -W error::accum.InexactWarning


def warn(message: str, category: Type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's code that was running, whatever of accum, Keras and TensorFlow is in between.

    In a replica's thread, where none of the user's code may be, it is the line of accum.
    """
    here: Any = sys._getframe(1)
    frame = here
    while frame is not None and _is_internal(frame):
        frame = frame.f_back
    frame = here if frame is None else frame
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__", "__main__")
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


OR_AT_ONCE = ", or leave out `whole_batch`, and it is computed for the whole batch at once"
"""Ends the remedies of errors that are only a reason of a warning if `whole_batch` was not passed."""


def reason_of(error: Union[str, Exception]) -> str:
    """Return what an error says, for a warning of what has been computed at once because of it."""
    return str(error).replace(OR_AT_ONCE, "")


def rule(function: Function) -> Function:
    """Decorate a function that reads a user's program to warn of it: an error of its own ends it, and is only logged.

    Warnings that the user has made errors go on, and so do the errors of accum.
    """

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Warning:
            raise
        except Exception as error:
            if "[accum: " in str(error):
                raise
            logging.getLogger("accum").debug("%s has failed", function.__name__, exc_info=True)

    return cast(Function, guarded)


def _is_internal(frame: Any) -> bool:
    package = frame.f_globals.get("__name__", "").split(".")[0]
    return package in _PACKAGES or "__autograph_generated" in frame.f_code.co_filename


_PACKAGES = frozenset(
    ["accum", "concurrent", "contextlib", "functools", "keras", "tensorflow", "tensorflow_core"]
    + ["tensorflow_estimator", "tf_keras", "tf_slim", "threading"]
)


def known_options(passed: Dict[str, Any], names: Sequence[str]) -> None:
    """Raise a `TypeError` for any argument in `passed` that is not one of `names`."""
    for name in passed:
        if name not in names:
            near = [_CALLED_ELSEWHERE[name]] if name in _CALLED_ELSEWHERE else difflib.get_close_matches(name, names)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            raise TypeError(
                f"`{name}` is an unknown argument.{hint} Received: {name}={passed[name]!r}. [accum: arguments]"
            )


def taking(declared: Callable[..., Any]) -> Callable[[Function], Function]:
    """Decorate a function whose `**options` are the other parameters of `declared`, which its signature then shows.

    An unknown keyword argument raises the `TypeError` of `known_options`.
    """

    def decorated(function: Function) -> Function:
        signature = inspect.signature(function)
        parameters = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        own = [one.name for one in parameters]
        others = [one for one in inspect.signature(declared).parameters.values() if one.name not in own]
        parameters += [one.replace(kind=one.KEYWORD_ONLY) for one in others]
        names = [one.name for one in parameters if one.name not in ("self", "cls", "args")]

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            known_options(kwargs, names)
            return function(*args, **kwargs)

        checked.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return decorated


def describing(declared: Callable[..., Any]) -> Callable[[Class], Class]:
    """Decorate a class whose docstring has a line `**options: …`, which becomes the `Args` of `declared`."""

    def decorated(cls: Class) -> Class:
        if cls.__doc__ and declared.__doc__:  # `python -OO` leaves them out
            described = inspect.cleandoc(declared.__doc__).split("Args:\n")[1].split("\n\n")[0]
            cls.__doc__ = re.sub(r"(?m)^ +\*\*options: .*$", lambda _: described, inspect.cleandoc(cls.__doc__))
        return cls

    return decorated


def arguments_of(cls: Any, passed: Dict[str, Any]) -> None:
    """Raise a `TypeError` for any keyword argument in `passed` that `cls` does not take."""
    parameters = inspect.signature(cls.__init__).parameters
    if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        known_options(passed, list(parameters)[1:])


def shown(names: Sequence[str]) -> str:
    """Return names as a list, or only the first of many and their number."""
    return f"{list(names)}" if len(names) <= 4 else f"{len(names)}, such as {list(names[:3])}"


def micro_batch_size(value: Any) -> Any:
    """Return a size of micro-batches, after checking that it is an int >= 1, "auto" or None."""
    if value is None or (isinstance(value, str) and value == "auto"):
        return value
    return accum_steps(value, "micro_batch_size", "an int >= 1, 'auto' or None")


def micro_batch_tokens(value: Any, micro_batch_size: Any, whole_batch: Sequence[str] = ()) -> Optional[int]:
    """Return a number of tokens, after checking that it is an int >= 1 or None, and that nothing contradicts it."""
    if value is None:
        return None
    tokens = accum_steps(value, "micro_batch_tokens")
    if micro_batch_size is not None:
        raise ValueError(
            "A batch is split either by `micro_batch_tokens` or by `micro_batch_size`: pass one of them. Received: "
            f"micro_batch_tokens={value!r}, micro_batch_size={micro_batch_size!r}. [accum: arguments]"
        )
    if whole_batch:
        raise ValueError(
            "`whole_batch` needs micro-batches of one shape, but `micro_batch_tokens` makes them unequally long: pass "
            f"`micro_batch_size`. Received: micro_batch_tokens={value!r}, whole_batch={whole_batch!r}."
            " [accum: arguments]"
        )
    return tokens


def sequence_lengths(value: Any, micro_batch_tokens: Optional[int]) -> Any:
    """Return a function that tells the lengths of sequences, or None, after checking that it is needed."""
    if value is not None and micro_batch_tokens is None:
        raise ValueError(
            "`sequence_lengths` tells `micro_batch_tokens` where sequences end: pass both. Received: "
            f"sequence_lengths={value!r}, micro_batch_tokens=None. [accum: arguments]"
        )
    return callable_or_none("sequence_lengths", value)


def memory_limit(value: Any, micro_batch_size: Any) -> Optional[int]:
    """Return a number of bytes, after checking that it is an int >= 1 or None, and that it is used."""
    if value is None:
        return None
    limit = accum_steps(value, "memory_limit", "an int >= 1, in bytes, or None")
    if micro_batch_size != "auto":
        raise ValueError(
            "`memory_limit` chooses the size of micro-batches, so it needs micro_batch_size='auto'. Received: "
            f"memory_limit={value!r}, micro_batch_size={micro_batch_size!r}. [accum: arguments]"
        )
    return limit


WHOLE_BATCH = ("loss", "batch_norm")


def whole_batch(value: Any, micro_batch_size: Any) -> Tuple[str, ...]:
    """Return what is computed over the whole batch, after checking that it is known, and that batches are split."""
    message = (
        f"`whole_batch` must be of {list(WHOLE_BATCH)}, a tuple of them, or 'all'. Received: whole_batch={value!r}."
    )
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, (tuple, list, set, frozenset)) or not all(isinstance(name, str) for name in names):
        raise TypeError(message)
    names = [name.lower() for name in names]
    if not set(names) <= {*WHOLE_BATCH, "all"}:
        raise ValueError(message)
    parts = WHOLE_BATCH if "all" in names else tuple(name for name in WHOLE_BATCH if name in names)
    if parts and micro_batch_size is None:
        raise ValueError(
            "`whole_batch` needs `micro_batch_size`: without it, no batch is split. Over the micro-batches of a cycle, "
            "which arrive one by one, nothing can be computed over the whole batch. Received: "
            f"whole_batch={value!r}, micro_batch_size=None. [accum: arguments]"
        )
    return parts


def replicas_per_group(value: Any, whole_batch: Sequence[str]) -> Dict[str, Optional[int]]:
    """Return the number of replicas in a group for each of `WHOLE_BATCH`, None for all, after checking it."""
    sizes = dict(value) if isinstance(value, dict) else dict.fromkeys(WHOLE_BATCH, value)
    unknown = [name for name in sizes if name not in WHOLE_BATCH]
    message = (
        "`replicas_per_group` must be an int >= 1, None for all replicas, or a dict of them whose keys are of "
        f"{list(WHOLE_BATCH)}. Received: replicas_per_group={value!r}."
    )
    for size in sizes.values():
        if size is not None and (isinstance(size, (bool, np.bool_)) or not isinstance(size, numbers.Integral)):
            raise TypeError(message)
    if unknown or any(size is not None and size < 1 for size in sizes.values()):
        raise ValueError(message)
    if value is not None and not whole_batch:
        raise ValueError(
            "`replicas_per_group` groups the replicas for `whole_batch`, which is not given: pass both. Received: "
            f"replicas_per_group={value!r}. [accum: arguments]"
        )
    return {name: None if sizes.get(name) is None else int(sizes[name]) for name in WHOLE_BATCH}


def group_size(size: Optional[int], replicas: int) -> int:
    """Return the number of replicas in a group, after checking that groups have equally many."""
    if size is not None and replicas % size:
        raise ValueError(
            "`replicas_per_group` must divide the number of replicas. Received: "
            f"replicas_per_group={size}, replicas={replicas}."
        )
    return replicas if size is None else size


def own_micro_batch_size(value: Any) -> int:
    """Return a size of micro-batches as an int >= 1, after checking that it is neither "auto" nor None."""
    if value is None or (isinstance(value, str) and value == "auto"):
        raise (TypeError if value is None else ValueError)(
            "`micro_batch_size` must be an int >= 1; None and 'auto' are for `GradientAccumulateModel`, which can run "
            f"a batch whole or again. Received: micro_batch_size={value!r}."
        )
    return accum_steps(value, "micro_batch_size")


def callable_or_none(name: str, value: Any) -> Optional[Callable[..., Any]]:
    if value is not None and not callable(value):
        raise TypeError(f"`{name}` must be a function or None. Received: {name}={value!r}.")
    return value


def function(name: str, value: Any) -> Callable[..., Any]:
    if not callable(value):
        raise TypeError(f"`{name}` must be a function. Received: {name}={value!r}.")
    return value


def not_negative(name: str, value: Any, static_value: Optional[float] = None) -> Any:
    """Return `value`, after checking as far as possible that it is a scalar >= 0.

    Args:
      name: the argument's name.
      value: a number or a scalar tensor.
      static_value: the tensor's value, if it is already known, or None.
    """
    dtype = str(getattr(value, "dtype", ""))
    if "bool" in dtype or not (dtype or _is_number(value)):
        raise TypeError(f"`{name}` must be a scalar >= 0. Received: {name}={value!r}.")
    if dtype and value.shape.__len__() and tuple(value.shape):
        raise ValueError(f"`{name}` must be a scalar >= 0. Received: shape {tuple(value.shape)}.")
    static_value = value if static_value is None and _is_number(value) else static_value
    if static_value is not None and not static_value >= 0:  # also rejects NaN
        raise ValueError(f"`{name}` must be a scalar >= 0. Received: {name}={value!r}.")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))


def floating_dtype(name: str, dtype: Any) -> Any:
    """Return `dtype`, a `tf.DType`, after checking that it is a floating or complex dtype."""
    if not (dtype.is_floating or dtype.is_complex):
        raise ValueError(f"`{name}` must be a floating dtype. Received: {name}={dtype.name}.")
    return dtype


def once_each(names: Sequence[str], keys: List[int]) -> None:
    """Raise a `ValueError` if a call contains the same variable more than once."""
    twice = sorted({name for name, key in zip(names, keys) if keys.count(key) > 1})
    if twice:
        raise ValueError(
            f"Each variable must appear only once in `grads_and_vars`: sum the gradients of {twice}. [accum: gradients]"
        )


def gradient(grad: Any, var: Any) -> None:
    """Check that a gradient has the shape of its variable, as far as both shapes are known."""
    if grad is None:
        return
    if hasattr(grad, "indices"):
        shape = var.shape[:1].concatenate(grad.values.shape[1:])
    elif hasattr(grad, "shape") and hasattr(grad, "dtype"):
        shape = grad.shape
    else:
        raise TypeError(
            f"A gradient must be a tensor, `tf.IndexedSlices` or None. Received: {grad!r}. [accum: gradients]"
        )
    if not var.shape.is_compatible_with(shape):
        raise ValueError(
            f"A gradient must have its variable's shape. Received: shape {shape} for {var.name} of shape "
            f"{var.shape}. [accum: gradients]"
        )


def pairs(grads_and_vars: Iterable[Any]) -> List[Tuple[Any, Any]]:
    """Return `grads_and_vars` as a list of (gradient, variable), and raise an error if no pair has a gradient."""
    listed = list(grads_and_vars)
    for pair in listed:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"`grads_and_vars` must hold (gradient, variable) pairs. Received: {pair!r}.")
    if not listed or all(grad is None for grad, _ in listed):
        raise ValueError(
            f"No gradient for any variable in {[v.name for _, v in listed]}: does the loss depend on them?"
            " [accum: gradients]"
        )
    for grad, var in listed:
        gradient(grad, var)
    return listed


def flag(name: str, value: Any) -> bool:
    """Check that `value` is a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"`{name}` must be a bool. Received: {name}={value!r}.")
    return bool(value)


def strategy(chosen: Any, is_central_storage: bool, is_parameter_server: bool) -> None:
    """Reject strategies that cannot give each replica its own accumulators."""
    if is_parameter_server:
        raise ValueError(
            "The workers of a ParameterServerStrategy run independently and would mix their micro-batches in one "
            "cycle. Use a MultiWorkerMirroredStrategy or, in a static graph without a strategy, "
            f"`accum.compat.v1.AccumOptimizer(local_accumulators=True)`. Received: {chosen!r}."
            " [accum: parameter-servers]"
        )
    if is_central_storage and chosen.num_replicas_in_sync > 1:
        raise ValueError(
            "The replicas of a CentralStorageStrategy share every variable, so each would accumulate the "
            f"gradients of all replicas. Use a MirroredStrategy. Received: {chosen!r}. [accum: replicas]"
        )


def axes(name: str, value: Any, rank: Optional[int] = None) -> Tuple[int, ...]:
    """Return a sequence of axis numbers as a tuple of ints.

    Args:
      name: the argument's name.
      value: tuple or list of ints.
      rank: the rank of the tensor to which the axes belong; the returned axes are then >= 0. None: leave them as given.
    """
    is_listed = isinstance(value, (tuple, list))
    if not is_listed or any(isinstance(axis, bool) or not isinstance(axis, numbers.Integral) for axis in value):
        raise TypeError(f"`{name}` must be a tuple of ints. Received: {name}={value!r}.")
    if rank is None:
        return tuple(int(axis) for axis in value)
    if any(not -rank <= axis < rank for axis in value):
        raise ValueError(f"`{name}` must be axes of a tensor of rank {rank}. Received: {value!r}.")
    return tuple(int(axis) % rank for axis in value)


def axes_by_name(name: str, value: Any) -> Dict[str, Tuple[int, ...]]:
    """Return a dict `{name: axes}` after checking each entry with `axes`."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"`{name}` must be a dict of names to axes. Received: {name}={value!r}.")
    return {key: axes(f"{name}[{key!r}]", value[key]) for key in value}


def names_or_function(name: str, value: Any) -> Union[Tuple[str, ...], Callable[[Any], bool]]:
    """Return names as a tuple, or a function unchanged; None means no names."""
    value = () if value is None else value
    if callable(value):
        return value
    if not isinstance(value, (tuple, list, set)) or not all(isinstance(item, str) for item in value):
        raise TypeError(f"`{name}` must be a list of names, or a function of a variable. Received: {name}={value!r}.")
    return tuple(sorted(value) if isinstance(value, set) else value)


def positive(name: str, value: Any) -> float:
    if not _is_number(value) or not value > 0:
        error = ValueError if _is_number(value) else TypeError
        raise error(f"`{name}` must be a number > 0. Received: {name}={value!r}.")
    return value
