"""Parse the name of a variable: its role in the layer, the words of its scopes, and the numbers of its layers."""

import re
from typing import Any, Dict, FrozenSet, List, NamedTuple, Optional, Set, Tuple

_ROLES = {
    "matrix": ["kernel", "weights", "weight", "w", "embeddings", "depthwise_kernel", "depthwise_weights"],
    "offset": ["bias", "biases", "b", "beta"],
    "scale": ["gamma", "g", "scale"],
    "mean": ["moving_mean"],
    "variance": ["moving_variance"],
}
_ROLE_OF_LEAF = {leaf: role for role, leaves in _ROLES.items() for leaf in leaves}
_OF_NORM = ("gamma", "g", "beta", "moving_mean", "moving_variance")

_SYNONYMS = {
    "attn": ["attention"],
    "batchnorm": ["norm"],
    "bn": ["norm"],
    "emb": ["embedding"],
    "embd": ["embedding"],
    "embed": ["embedding"],
    "ffn": ["mlp"],
    "k": ["key"],
    "layernorm": ["norm"],
    "ln": ["norm"],
    "normalization": ["norm"],
    "out": ["output"],
    "pos": ["position"],
    "proj": ["projection"],
    "q": ["query"],
    "segment": ["type"],
    "tok": ["token"],
    "v": ["value"],
    "word": ["token"],
    "wpe": ["position", "embedding"],
    "wte": ["token", "embedding"],
}

_LIBRARY_NAMES = re.compile(
    r"^(accum_batch_normalization|batch_norm|batch_normalization|batchnorm|conv|conv[123]d|conv[123]d_transpose|dense"
    r"|depthwise_conv2d|einsum_dense|embedding|fully_connected|functional|gru|layernorm|layer_normalization|lstm|model"
    r"|multi_head_attention|separable_conv2d|sequential|sync_batch_normalization)(_\d+)?$",
    re.IGNORECASE,
)
"""Names that a library gives to layers. Their numbers depend on what else the process has made."""

_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


class Facts(NamedTuple):
    """What a name says about its variable.

    Attributes:
      role: "matrix", "offset", "scale", "mean" or "variance"; None if the name does not tell.
      is_of_norm: whether it belongs to a normalisation.
      words: the words of its scopes and of a leaf that names no role.
      positions: for each numbered scope, outermost first, its position among its siblings and their number.
      scope: the name without its leaf, if the leaf names a role; otherwise None.
    """

    role: Optional[str]
    is_of_norm: bool
    words: FrozenSet[str]
    positions: Tuple[Tuple[int, int], ...]
    scope: Optional[str]


def facts_of(shapes: Dict[Any, Tuple[str, Tuple[int, ...]]]) -> Dict[Any, Facts]:
    """Return {key: `Facts`} of the variables of one side, {key: (name, shape)}."""
    split = {key: [_parts(part) for part in name.split("/")] for key, (name, _) in shapes.items()}
    siblings: Dict[Any, Set[int]] = {}
    for components in split.values():
        for position, number in _numbers(components):
            siblings.setdefault(position, set()).add(number)
    return {key: _facts(name, shape, split[key], siblings) for key, (name, shape) in shapes.items()}


def has_library_name(name: str) -> bool:
    """Whether a scope of `name` has a name that a library gives to layers."""
    return any(_LIBRARY_NAMES.match(component) for component in name.split("/")[:-1])


def library_number(name: str) -> Tuple[Any, int]:
    """Return (scopes, kind and leaf; number) of a variable in a layer that a library has named; otherwise (None, 0)."""
    scopes, _, leaf = name.rpartition("/")
    outer, _, layer = scopes.rpartition("/")
    match = _LIBRARY_NAMES.match(layer)
    if match is None:
        return None, 0
    return (outer, match.group(1), leaf), int((match.group(2) or "_0")[1:])


def _facts(name, shape, components, siblings):
    scope, _, leaf = name.rpartition("/")
    role = _ROLE_OF_LEAF.get(leaf)
    words = {word for words_of_component, _ in components[: -1 if role else None] for word in words_of_component}
    positions = [
        (sorted(siblings[position]).index(number), len(siblings[position])) for position, number in _numbers(components)
    ]
    return Facts(
        role=_by_shape(role, leaf, shape),
        is_of_norm=leaf in _OF_NORM or "norm" in (components[-2][0] if len(components) > 1 else ()),
        words=frozenset(words),
        positions=tuple(position for position in positions if position[1] > 1),
        scope=scope if role else None,
    )


def _by_shape(role, leaf, shape):
    """Return the role. Where the leaf names none, as `wte` and `output_bias`, the shape helps to tell it."""
    is_flat = sum(size != 1 for size in shape) <= 1
    if role in (None, "matrix"):
        return "offset" if leaf.endswith("bias") else None if is_flat else "matrix"
    return role


def _parts(component):
    """Return (words, numbers) of a scope or leaf; a name that a library gave says at most that it normalises."""
    parts = [part.lower() for part in _PARTS.findall(re.sub(r"(?<=[a-z])[123]d(?![a-z])", "", component))]
    words: List[str] = []
    for part in parts:
        plain = part[:-1] if len(part) > 3 and part.endswith("s") and not part.endswith("ss") else part
        words += [] if part.isdigit() else _SYNONYMS.get(plain, [plain])
    if _LIBRARY_NAMES.match(component):
        return [word for word in words if word == "norm"], None
    return words, tuple(int(part) for part in parts if part.isdigit())


def _numbers(components):
    """Yield (a key of the place in which numbers count siblings, the number); 0 where a sibling has none."""
    before: List[Any] = []
    for words, numbers in components[:-1]:
        if numbers is not None:
            for position, number in enumerate(numbers or (0,)):
                yield (tuple(before), tuple(words), position, numbers[:position]), number
            before.append((tuple(words), numbers))
