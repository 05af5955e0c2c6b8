"""Match the variables of a static graph with those of a Keras model: by name, tf-slim's name, or position."""

import re
from typing import Any, Dict, List, NamedTuple

from accum.convert import _proposal
from accum.convert._report import ConversionError
from accum.convert._shapes import arrangement

LEAVES = {
    "weights": "kernel",
    "biases": "bias",
    "depthwise_weights": "depthwise_kernel",
    "pointwise_weights": "pointwise_kernel",
}
"""tf-slim's names of variables, and those of Keras and `tf.compat.v1.layers`."""

KINDS = {
    "fully_connected": "dense",
    "Conv": "conv2d",
    "Conv2d_transpose": "conv2d_transpose",
    "SeparableConv2d": "separable_conv2d",
    "BatchNorm": "batch_normalization",
    "LayerNorm": "layer_normalization",
    "accum_batch_normalization": "batch_normalization",
    "sync_batch_normalization": "batch_normalization",
}
"""Names of layers in tf-slim and of layers that replace Keras' own, and the corresponding names in Keras."""


class Candidates(NamedTuple):
    """The names that may be proposed, in order, and whether it is the order in which the graph created them."""

    names: List[str]
    is_of_creation: bool


_NUMBERED_NAME = re.compile(r"^(.*?)(?:_(\d+))?$")


def match(wanted, shapes, names=None, candidates=None):
    """Find the variable of a static graph for each variable of a model.

    Args:
      wanted: list of (name, shape), the model's variables in order.
      shapes: dict {name: shape} of the static graph's weights.
      names: dict {name in the model: name in the graph}, which takes precedence over matching; or a list of names in
        the graph, one for each of `wanted`. A variable with the name None stays unchanged.
      candidates: `Candidates` for a proposal; None: all of `shapes`, in no order of creation.

    Returns:
      List of names in the graph, or None where `names` says so, in the order of `wanted`.

    Raises:
      ConversionError: a variable is on one side only, matches twice, or has another shape there.
    """
    mapping = said(wanted, names)
    passed = set(mapping)
    missing = sorted({name for name in mapping.values() if name is not None and name not in shapes})
    if missing:
        raise ConversionError(f"`names` has {missing}, which the static graph does not have.")
    indices = [index for index in range(len(wanted)) if index not in mapping]
    rest = {name: shape for name, shape in shapes.items() if name not in mapping.values()}
    by_name = _found_by_name(indices, wanted, rest)
    # Match all by name or all by position: if the sides start numbering layers differently, some names match by chance.
    mapping.update(by_name if len(by_name) == len(indices) else _found_by_number(indices, wanted, rest) or by_name)
    check(wanted, shapes, mapping, passed, candidates)
    return [mapping[index] for index in range(len(wanted))]


def said(wanted, names):
    """Convert `names` to {index: name in the graph, or None}."""
    if names is None:
        return {}
    if isinstance(names, (list, tuple)):
        if len(names) != len(wanted):
            raise ConversionError(
                f"A list of `names` must have one name for each of the model's {len(wanted)} variables. Received: "
                f"{len(names)} names."
            )
        return dict(enumerate(names))
    unknown = sorted(set(names) - {name for name, _ in wanted})
    if unknown:
        raise ConversionError(
            f"`names` has {unknown}, which the model does not have. It has: {[name for name, _ in wanted]}."
        )
    return {index: names[name] for index, (name, _) in enumerate(wanted) if name in names}


def _found_by_name(indices, wanted, shapes):
    result = {}
    for index in indices:
        same = [other for other in (wanted[index][0], _as_slim(wanted[index][0])) if other in shapes]
        if same:
            result[index] = same[0]
    return result


def _as_slim(name):
    scope, _, leaf = name.rpartition("/")
    leaf = {keras: slim for slim, keras in LEAVES.items()}.get(leaf, leaf)
    return scope + "/" + leaf if scope else leaf


def _found_by_number(indices, wanted, theirs):
    """Match layers by kind and position, with their scopes or within one scope of the graph."""
    ours = {index: wanted[index][0] for index in indices}
    shapes = {index: tuple(wanted[index][1]) for index in indices}
    for names in (ours, _within(_first_scopes(ours.values()), ours)):
        if len(names) < len(ours):
            continue
        whole = _pair(names, {name: name for name in theirs}, shapes, theirs)
        if whole:
            return whole
        scopes = sorted({name.partition("/")[0] for name in theirs if "/" in name})
        fitting = {
            scope: _pair(names, _within([scope], {name: name for name in theirs}), shapes, theirs) for scope in scopes
        }
        fitting = {scope: pairs for scope, pairs in fitting.items() if pairs}
        if len(fitting) > 1:
            raise ConversionError(
                f"The model fits several scopes of the static graph: {sorted(fitting)}. Choose one with `names`."
            )
        if fitting:
            return list(fitting.values())[0]
    return {}


def _pair(ours, theirs, shapes, available):
    """Return {index: name in the graph} if each of `ours` has exactly one counterpart of its shape; otherwise {}."""
    wanted, there = _keys(ours), _keys(theirs)
    by_key: Dict[Any, Any] = {}
    for name, key in there.items():
        by_key.setdefault(key, []).append(name)
    pairs = {index: by_key.get(key, []) for index, key in wanted.items()}
    fits = all(len(names) == 1 and tuple(available[names[0]]) == shapes[index] for index, names in pairs.items())
    return {index: names[0] for index, names in pairs.items()} if fits else {}


def _first_scopes(names):
    firsts = sorted({name.partition("/")[0] for name in names if "/" in name})
    return firsts if len(firsts) == 1 else []


def _within(scopes, names):
    """Return those of `names`, {key: name}, that are in one of `scopes`, without that scope."""
    split = {key: name.partition("/") for key, name in names.items()}
    return {key: rest for key, (first, _, rest) in split.items() if rest and first in scopes}


def _keys(names):
    """Return {key of `names`: a key that identifies the layer and its variable}.

    A layer is identified by its position among the layers of its kind and scope, and by their number. If one side has
    more of them, none matches.
    """
    split = {key: _split(name) for key, name in names.items()}
    numbers: Dict[Any, Any] = {}
    for scopes, _ in split.values():
        for depth, (kind, number) in enumerate(scopes):
            numbers.setdefault((scopes[:depth], kind), set()).add(number)
    ranks = {index: {number: rank for rank, number in enumerate(sorted(there))} for index, there in numbers.items()}

    def ranked(scopes):
        of_kinds = [(ranks[scopes[:depth], kind], kind, number) for depth, (kind, number) in enumerate(scopes)]
        return tuple((kind, there[number], len(there)) for there, kind, number in of_kinds)

    return {key: (ranked(scopes), leaf) for key, (scopes, leaf) in split.items()}


def _split(name):
    """Split a name into ((kind, number) of each scope, leaf).

    tf-slim puts a batch normalisation inside the scope of the layer that it follows.
    """
    *scopes, leaf = name.split("/")
    split = tuple(_kind(scope) for scope in scopes)
    if len(scopes) > 1 and scopes[-1] == "BatchNorm" and _numbered(scopes[-2])[0] in KINDS:
        split = split[:-2] + (("batch_normalization", split[-2][1]),)
    return split, LEAVES.get(leaf, leaf)


def _kind(scope):
    name, number = _numbered(scope)
    return KINDS.get(name, name), number


def _numbered(scope):
    """Split a scope such as "dense_1" into (name, number); the number is 0 if there is none."""
    match = _NUMBERED_NAME.match(scope)
    return (match.group(1), int(match.group(2) or 0)) if match else (scope, 0)


def check(wanted, shapes, mapping, passed=(), candidates=None):
    """Raise unless `mapping`, {index: name or None}, contains each of `wanted` once, with the same shape.

    Args:
      passed: the indices that the user's `names` has. Their values may be arranged in another shape.
      candidates: as for `match`.
    """
    taken = [name for name in mapping.values() if name is not None]
    lost = {index: one for index, one in enumerate(wanted) if index not in mapping}
    if lost:
        left = sorted(set(shapes) - set(taken), key=_proposal.natural)
        raise _unmatched(
            f"Nothing in the static graph matches {[name for name, _ in lost.values()]}. Unmatched there: {left}. Pass "
            f"the counterparts: `names={{{list(lost.values())[0][0]!r}: name in the graph}}`.",
            *(wanted, shapes, mapping, passed, candidates),
        )
    twice = sorted({name for name in taken if taken.count(name) > 1})
    if twice:
        raise ConversionError(f"Several variables of the model match {twice}. Pass `names` as a list, in order.")
    wrong = [
        f"{wanted[index][0]} has shape {list(wanted[index][1])}, but {name} has {list(shapes[name])}"
        for index, name in sorted(mapping.items())
        if name is not None and _is_wrong(wanted[index][1], shapes[name], index in passed)
    ]
    if wrong:
        message = f"Shapes differ: {'; '.join(wrong)}. Is this the checkpoint of another model?"
        raise _unmatched(message, wanted, shapes, mapping, passed, candidates)


def _is_wrong(shape, other, is_passed):
    return tuple(shape) != tuple(other) and not (is_passed and arrangement(other, shape) is not None)


def _unmatched(message, wanted, shapes, mapping, passed, candidates):
    """Return an error with what matches nothing on either side, and a proposal for all that the user has not named."""
    order, is_of_creation = candidates or Candidates(sorted(shapes, key=_proposal.natural), False)
    fits = {
        index: name
        for index, name in mapping.items()
        if name is None or not _is_wrong(wanted[index][1], shapes[name], index in passed)
    }
    lost = {index: one for index, one in enumerate(wanted) if index not in fits}
    left = [(index, name, shapes[name]) for index, name in enumerate(order) if name not in fits.values()]
    said_by_user = {index: mapping[index] for index in passed if index in fits}
    ours = {index: one for index, one in enumerate(wanted) if index not in said_by_user}
    theirs = {name: shapes[name] for name in order if name not in said_by_user.values()}
    proposal = _proposal.propose(ours, theirs, is_of_creation)
    names = _proposal.passed_back(wanted, {**said_by_user, **proposal.pairs})
    error = ConversionError("\n".join([message] + _proposal.lists(lost, left) + _proposal.as_text(proposal, names)))
    error.proposal = names if proposal.pairs else None
    return error
