"""Find and replace the optimizers of a model, in its attributes and in lists, tuples and dicts there."""

import collections
import copy
from typing import Any, Callable, Dict, List, Tuple

from accum import _tf
from accum._tf import tf

# Prefixes of internal attributes of Keras, TensorFlow and accum, which may refer to optimizers too.
_NOT_THE_USERS = ("_self_", "_unconditional_", "_obj_reference", "_accum", "_layers")


def replace_optimizers(model: tf.keras.Model, replace: Callable[[Any], Any]) -> List[Any]:
    """Replace each Keras optimizer in the attributes of `model` with `replace(optimizer)`.

    Args:
      model: a Keras model.
      replace: function of an optimizer; called for each place where one is found.

    Returns:
      List of the replacements, each once.
    """
    found: Dict[int, Any] = {}  # id of a replacement -> itself

    def replaced(optimizer: Any) -> Any:
        new = replace(optimizer)
        found[id(new)] = new
        return new

    for name, value in list(vars(model).items()):
        if not name.startswith(_NOT_THE_USERS) and holds_optimizer(value):
            new = replaced_within(value, replaced)
            if new is not value:
                setattr(model, name, new)
    return list(found.values())


def holds_optimizer(value: Any) -> bool:
    """Whether `value` is a Keras optimizer, or a list, tuple or dict that contains one at any depth."""
    seen, waiting = {id(value)}, [value]
    while waiting:
        part = waiting.pop()
        if _tf.is_keras_optimizer(part):
            return True
        new = [child for child in _children(part) if id(child) not in seen]  # a dict may contain itself
        seen.update(map(id, new))
        waiting.extend(new)
    return False


def replaced_within(value: Any, replace: Callable[[Any], Any], around: Tuple[int, ...] = ()) -> Any:
    """Return `value` with each optimizer in it replaced, or `value` itself if none of them changes.

    Args:
      value: an optimizer, a list, tuple or dict, or anything else.
      replace: function of an optimizer.
      around: ids of the lists, tuples and dicts around `value`, which may contain itself.
    """
    if _tf.is_keras_optimizer(value):
        return replace(value)
    if id(value) in around or not holds_optimizer(value):
        return value
    children = [replaced_within(child, replace, around + (id(value),)) for child in _children(value)]
    if all(new is old for new, old in zip(children, _children(value))):
        return value
    if isinstance(value, (collections.OrderedDict, collections.defaultdict)):
        made = copy.copy(value)
        made.update(zip(value, children))
        return made
    if isinstance(value, dict):
        return dict(zip(value, children))
    if hasattr(value, "_fields"):
        return type(value)(*children)
    return tuple(children) if isinstance(value, tuple) else children


def _children(value: Any) -> List[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else []
