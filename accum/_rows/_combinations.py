"""How the values of a scalar for parts of a batch give that for the batch."""

from typing import Optional

import numpy as np

from accum._rows._decisions import Decisions
from accum._rows._flat_graph import Key, Node, node_of
from accum._rows._states import depends, level_of
from accum._tf import tf

PARTS = {"L2Loss": "sum", "Mean": "mean", "Sum": "sum"}
"""How reductions of parts of a batch give that of the batch."""

LINEAR = ("Cast", "ExpandDims", "Identity", "Mean", "Neg", "Reshape", "Snapshot", "Squeeze", "StopGradient", "Sum")
PRODUCTS = ("Mul",)
QUOTIENTS = ("Div", "DivNoNan", "RealDiv")
SUMS = ("Add", "AddN", "AddV2", "Sub")


def combination_of(key: Key, decided: Decisions) -> Optional[str]:
    """Return "sum", "mean" weighted by the examples of parts, or "constant"; None for another, or one not proven."""
    state = decided.states.get(key)
    if state is None or not depends(state):
        return "constant"
    if state.kind != "whole":
        return None
    node = decided.nodes[node_of(key)]
    if decided.decisions[node.name].kind == "reduces":
        is_first = level_of(decided.states.get(node.inputs[0])) == 0
        is_rounded = node.type == "Mean" and not _is_exact(node)
        return PARTS.get(node.type) if is_first and not is_rounded else None
    if node.type in ("Cast", "Mean") and not _is_exact(node):
        return None
    if node.type == "IdentityN":
        return combination_of(node.inputs[int(key.rsplit(":", 1)[1])], decided)
    of_terms = LINEAR + PRODUCTS + QUOTIENTS + SUMS
    kinds = [combination_of(one, decided) for one in node.inputs if node.type in of_terms]
    others = [kind for kind in kinds if kind != "constant"]
    if node.type in QUOTIENTS and kinds[0] == "sum" and decided.numbers.is_multiple(node.inputs[1]):
        return "mean"
    if node.type in LINEAR + PRODUCTS or (node.type in QUOTIENTS and kinds[1] == "constant"):
        return others[0] if len(others) == 1 else None
    if node.type not in SUMS or len(set(others)) != 1:
        return None
    rest = [key for key, kind in zip(node.inputs, kinds) if kind == "constant"]  # which is the mean of itself
    return others[0] if others[0] == "mean" or all(_is_zero(one, decided) for one in rest) else None


def _is_exact(node: Node) -> bool:
    """Whether the output of an operation is no integer, to which it would have been rounded."""
    dtype = tf.as_dtype(node.dtypes[0])
    return bool(dtype.is_floating or dtype.is_complex)


def _is_zero(key: Key, decided: Decisions) -> bool:
    values = decided.values.get(key)
    return values is not None and not np.any(values)
