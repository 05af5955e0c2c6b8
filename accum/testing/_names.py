"""Names of variables."""

from typing import Dict


def names_of(variables):
    """Return a unique name for each variable in a list: its path if it has one, otherwise its name without `:0`."""
    seen: Dict[str, int] = {}
    names = []
    for var in variables:
        name = getattr(var, "path", None) or var.name  # in Keras 3, `name` is only the name within the layer
        name = name[:-2] if name.endswith(":0") else name
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names
