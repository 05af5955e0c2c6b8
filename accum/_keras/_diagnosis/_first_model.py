"""Do losses or metrics read in the model that `from_model` has received what a `call` of the other one sets?"""

import functools
import inspect
from types import CodeType
from typing import Any, Iterator, List, Set

from accum import _check, _tf
from accum._keras._diagnosis._seen import Seen
from accum._keras._steps._one_pass import name_of
from accum._tf import tf


@_check.rule
def warn_of_first_model(seen: Seen) -> None:
    """Warn once if losses or metrics hold the first model and read what the `call` of the new one has set since."""
    model, reference = seen.model, seen.model._accum.first_model
    first = None if reference is None else reference()
    if first is None:
        return
    set_since = {
        name for name, value in vars(model).items() if _is_result(value) and vars(first).get(name) is not value
    }
    compiled = _tf.losses.compiled_losses(model) + _tf.losses.compiled_metrics(model) if set_since else []
    found = [name_of(one) for one in compiled if not isinstance(one, str) and set_since & _read_by(one, first)]
    if found and model._accum.is_first_time("first model"):
        _check.warn(
            "Losses or metrics refer to the model that `from_model` has received, but what a `call` sets, such as "
            f"{sorted(set_since)[0]!r}, is an attribute of the model that it has returned: let them refer to that one. "
            f"Received: {_check.shown(found)}. [accum: other-model]",
            _check.InexactWarning,
        )


def _is_result(value: Any) -> bool:
    return bool(tf.is_tensor(value)) and not isinstance(value, tf.Variable)


def _read_by(one: Any, model: tf.keras.Model) -> Set[str]:
    """Return the names in the code of a loss or metric that has a model, and in methods of the model that it names."""
    function = getattr(one, "fn", getattr(one, "_fn", one))
    while isinstance(function, functools.partial):
        function = function.func
    held: List[Any] = [getattr(function, "__self__", None), *getattr(function, "__dict__", {}).values()]
    function = getattr(function, "__func__", getattr(function, "call", function))
    function = getattr(function, "__func__", function)
    if not inspect.isfunction(function):
        return set()
    closure = inspect.getclosurevars(function)
    if not any(value is model for value in (*held, *closure.nonlocals.values(), *closure.globals.values())):
        return set()
    names: Set[str] = set()
    waiting = [function.__code__]
    while waiting:
        new = {name for code in _within(waiting.pop()) for name in code.co_names} - names
        names |= new
        methods = [getattr(type(model), name, None) for name in new]
        waiting += [method.__code__ for method in methods if inspect.isfunction(method)]
    return names


def _within(code: CodeType) -> Iterator[CodeType]:
    """Yield a code and those of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _within(constant)
