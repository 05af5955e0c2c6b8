"""The classes of accumulating models: one for each class of models that is made to accumulate."""

from typing import Any, Dict, Optional, Sequence, Tuple

from accum import _tf
from accum._tf import Options

MODEL_OPTIONS = ("inputs", "outputs", "name", "trainable", "dtype", "dynamic", "autocast")
"""Further arguments of `tf.keras.Model`. Keras 3 accepts any other name too, and ignores it."""

_CONCRETE: Dict[Tuple[type, type], type] = {}


def concrete_class(cls: type, base: type) -> type:
    """Return a subclass of both `cls` and the model class `base`, always the same one for each pair.

    When Keras creates the first functional model of a class, it makes the class functional for all its models.
    """
    if issubclass(cls, base):
        return cls
    if (cls, base) not in _CONCRETE:
        namespace = {"_root": cls, "_base": base, "__module__": cls.__module__, "__doc__": cls.__doc__}
        if hasattr(base, "save_pretrained"):  # `transformers` saves the class name
            namespace["save_pretrained"] = _as_plain("save_pretrained")
        _CONCRETE[cls, base] = type(cls.__name__, (cls, base), dict(namespace, __qualname__=cls.__qualname__))
    return _CONCRETE[cls, base]


def bases_named(name: str, module: Optional[str] = None) -> Dict[str, type]:
    """Return {name: class} for the one class of this name whose models have been made to accumulate, or {}.

    A clone or file of such a model has only the names of its class and of the `module` that defines it.
    """
    bases = {base for _, base in _CONCRETE if base.__name__ == name}
    if len(bases) > 1:
        bases = {base for base in bases if base.__module__ == module}
    return {name: bases.pop()} if len(bases) == 1 else {}


def _as_plain(name: str) -> Any:
    """Make a method that runs on the model as an instance of its original class, without accumulation."""

    def method(self: Any, *args: Sequence[object], **kwargs: Options) -> Any:
        return getattr(_tf.models.model_like(self, type(self)._base), name)(*args, **kwargs)

    return method


def is_functional(args: Sequence[object], kwargs: Options) -> bool:
    """Whether the arguments of `GradientAccumulateModel` make a functional model."""
    return "inputs" in kwargs or len(args) > 6
