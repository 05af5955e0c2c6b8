"""Write arguments into configs, functions by the names under which they are registered with Keras."""

from typing import Any, Dict, Iterable, Optional

from accum import _check, _tf
from accum._tf import tf


def to_config(argument: str, value: Any) -> Any:
    """Convert an argument to a value that can be stored in JSON.

    Args:
      argument: the argument's name, for the warning.
      value: the argument. A function registered with `tf.keras.utils.register_keras_serializable` is stored by name.
        An instance of a registered class that has `get_config` is stored as its class name and config. Any other
        callable is left out, with a warning, and must be passed again after loading. A dtype is stored by name, and the
        keys of a schedule as strings, because JSON allows no other keys. Everything else is returned unchanged.
    """
    if argument == "accum_steps" and isinstance(value, dict):
        return {str(first): length for first, length in value.items()}
    if isinstance(value, tf.DType):
        return value.name
    if not callable(value):
        return value
    if hasattr(value, "get_config") and _tf.models.registered_name(type(value)):
        return {"class_name": _tf.models.registered_name(type(value)), "config": value.get_config()}
    name = _tf.models.registered_name(value)
    if name is None:
        _check.warn(
            f"`{argument}` is left out of the config: register it with "
            "`tf.keras.utils.register_keras_serializable`, or pass it again after loading. Received: "
            f"{argument}={value!r}. [accum: unregistered]",
        )
    return None if name is None else {"registered": name}


def options_to_config(options: Dict[str, Any]) -> Dict[str, Any]:
    """Convert arguments by their names, as `to_config` does each."""
    return {name: to_config(name, value) for name, value in options.items()}


def options_from_config(
    config: Dict[str, Any], names: Iterable[str], custom_objects: Optional[Dict[str, Any]] = None
) -> Dict[str, Any]:
    """Restore those of the arguments `names` that a config has, as `from_config` does each."""
    return {name: from_config(name, config[name], custom_objects) for name in names if name in config}


def from_config(argument: str, value: Any, custom_objects: Optional[Dict[str, Any]] = None) -> Any:
    """Restore the argument that `to_config` stored.

    Raises:
      ValueError: nothing is registered under the stored name.
    """
    if argument == "accum_steps" and isinstance(value, dict):
        return {int(first): length for first, length in value.items()}
    if not isinstance(value, dict) or not ("registered" in value or "class_name" in value):
        return value
    name = value.get("registered", value.get("class_name"))
    registered = _tf.models.registered_object(name, custom_objects)
    if registered is None:
        raise ValueError(
            f"`{argument}` must be registered under the name with which it was saved: import the module that "
            f"registers it, or pass `custom_objects`. Received: {name!r}."
        )
    return registered if "registered" in value else registered(**value["config"])
