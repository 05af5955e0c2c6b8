"""Functions in configs: a file names them, so they have to be registered with Keras under a name."""

import warnings

from accum import _tf


def to_config(argument, value):
    """What stands for `value`, a function, an object with a config, or anything else, in a config that becomes JSON.

    Args:
      argument: the argument's name.
      value: a function registered by `tf.keras.utils.register_keras_serializable`, which is named; an instance of such
        a class with `get_config`, whose config is given; or what needs no name. A function that is not registered
        is left out, with a warning: whoever loads the file has to give it anew.
    """
    if not callable(value):
        return value
    if hasattr(value, "get_config") and _tf.registered_name(type(value)):
        return {"class_name": _tf.registered_name(type(value)), "config": value.get_config()}
    name = _tf.registered_name(value)
    if name is None:
        warnings.warn(
            "`{}` is left out of the config: register it with `tf.keras.utils.register_keras_serializable`, or give "
            "it again after loading. Received: {}={!r}.".format(argument, argument, value),
            stacklevel=3,
        )
    return None if name is None else {"registered": name}


def from_config(argument, value, custom_objects=None):
    """The function or object that `to_config` wrote down.

    Raises:
      ValueError: nothing is registered under its name.
    """
    if not isinstance(value, dict) or not ("registered" in value or "class_name" in value):
        return value
    name = value.get("registered", value.get("class_name"))
    found = _tf.registered_object(name, custom_objects)
    if found is None:
        raise ValueError(
            "`{}` must be registered under the name with which it was saved: import what registers it, or give "
            "`custom_objects`. Received: {!r}.".format(argument, name)
        )
    return found if "registered" in value else found(**value["config"])


def int_keys_to_config(accum_steps):
    """`accum_steps`, a schedule with its keys as strings: JSON has no others."""
    return (
        {str(first): length for first, length in accum_steps.items()} if isinstance(accum_steps, dict) else accum_steps
    )


def int_keys_from_config(accum_steps):
    """`accum_steps`, a schedule with its keys as ints."""
    return (
        {int(first): length for first, length in accum_steps.items()} if isinstance(accum_steps, dict) else accum_steps
    )
