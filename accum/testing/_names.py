"""Names of variables."""

from typing import Dict


def names_of(variables):
    """A name for each of a list of variables, each name once: by path where they have one, without `:0`."""
    seen: Dict[str, int] = {}
    names = []
    for var in variables:
        name = getattr(var, "path", None) or var.name  # from Keras 3 on the name is that within the layer
        name = name[:-2] if name.endswith(":0") else name
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names
