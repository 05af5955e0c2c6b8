"""Do losses or metrics read what only the new model knows from the one that `from_model` has received?"""

import functools
import inspect
from typing import Any, List

from accum import _check, _tf
from accum._keras._diagnosis._seen import Seen
from accum._keras._steps._one_pass import name_of
from accum._tf import tf


@_check.rule
def warn_of_first_model(seen: Seen) -> None:
    """Warn once if losses or metrics hold the first model, while the `call` of the new one sets other attributes."""
    model, reference = seen.model, seen.model._accum.first_model
    first = None if reference is None else reference()
    if first is None:
        return
    set_since = [
        name for name, value in vars(model).items() if _is_result(value) and vars(first).get(name) is not value
    ]
    if not set_since:
        return
    compiled = _tf.losses.compiled_losses(model) + _tf.losses.compiled_metrics(model)
    found = [name_of(one) for one in compiled if not isinstance(one, str) and _holds(one, first)]
    if found and model._accum.is_first_time("first model"):
        _check.warn(
            "Losses or metrics refer to the model that `from_model` has received, but what a `call` sets, such as "
            f"`{set_since[0]}`, is an attribute of the model that it has returned: let them refer to that one. "
            f"Received: {_check.shown(found)}. [accum: other-model]",
            _check.InexactWarning,
        )


def _is_result(value: Any) -> bool:
    return bool(tf.is_tensor(value)) and not isinstance(value, tf.Variable)


def _holds(one: Any, model: tf.keras.Model) -> bool:
    """Whether a function, or an object with one, has a model in itself or in what its code names."""
    function = getattr(one, "fn", getattr(one, "_fn", one))
    while isinstance(function, functools.partial):
        function = function.func
    held: List[Any] = [getattr(function, "__self__", None), *getattr(function, "__dict__", {}).values()]
    function = getattr(function, "__func__", function)
    if inspect.isfunction(function):
        names = inspect.getclosurevars(function)
        held += [*names.nonlocals.values(), *names.globals.values()]
    return any(value is model for value in held)
