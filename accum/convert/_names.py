"""Which variable of a static graph is which of a Keras model: by name, by what tf-slim calls it, or by its number."""

import re

from accum.convert._report import ConversionError

LEAVES = {
    "weights": "kernel",
    "biases": "bias",
    "depthwise_weights": "depthwise_kernel",
    "pointwise_weights": "pointwise_kernel",
}
"""What tf-slim calls a variable, and what Keras and `tf.compat.v1.layers` do."""

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
"""Names that tf-slim, and layers that take the place of others, are numbered under; and what Keras calls these."""

_NUMBERED_NAME = re.compile(r"^(.*?)(?:_(\d+))?$")


def match(wanted, found, names=None):
    """Find for each variable of a model the one of a static graph.

    Args:
      wanted: list of (name, shape), the model's variables in order.
      found: dict {name: shape} of the static graph's weights.
      names: dict {name in the model: name in the graph}, which goes before what is found here; or a list of names of
        the graph, one for each of `wanted`. None for a name leaves that variable as it is.

    Returns:
      List of names in the graph, or None where `names` says so, in the order of `wanted`.

    Raises:
      ConversionError: a variable is found on one side only, twice, or has another shape there.
    """
    given = said(wanted, names)
    missing = sorted({name for name in given.values() if name is not None and name not in found})
    if missing:
        raise ConversionError("`names` says {}, which the static graph does not have.".format(missing))
    places = [place for place in range(len(wanted)) if place not in given]
    rest = {name: shape for name, shape in found.items() if name not in given.values()}
    by_name = _found_by_name(places, wanted, rest)
    # All by name or all by number: where one side counts its layers from another number, some names fit by chance.
    given.update(by_name if len(by_name) == len(places) else _found_by_number(places, wanted, rest) or by_name)
    check(wanted, found, given)
    return [given[place] for place in range(len(wanted))]


def said(wanted, names):
    """{place: name in the graph, or None}, of what `names` says."""
    if names is None:
        return {}
    if isinstance(names, (list, tuple)):
        if len(names) != len(wanted):
            raise ConversionError(
                "A list of `names` must have one for each of the model's {} variables. Received: {}.".format(
                    len(wanted), len(names)
                )
            )
        return dict(enumerate(names))
    unknown = sorted(set(names) - {name for name, _ in wanted})
    if unknown:
        raise ConversionError(
            "`names` says {}, which the model does not have. It has: {}.".format(unknown, [name for name, _ in wanted])
        )
    return {place: names[name] for place, (name, _) in enumerate(wanted) if name in names}


def _found_by_name(places, wanted, found):
    result = {}
    for place in places:
        same = [other for other in (wanted[place][0], _as_slim(wanted[place][0])) if other in found]
        if same:
            result[place] = same[0]
    return result


def _as_slim(name):
    scope, _, leaf = name.rpartition("/")
    leaf = {keras: slim for slim, keras in LEAVES.items()}.get(leaf, leaf)
    return scope + "/" + leaf if scope else leaf


def _found_by_number(places, wanted, found):
    """Match what layers of the same kind, numbered alike, hold: with their scopes, or within one scope of the graph."""
    ours = {place: wanted[place][0] for place in places}
    shapes = {place: tuple(wanted[place][1]) for place in places}
    for names in (ours, _within(_first_scopes(ours.values()), ours)):
        if len(names) < len(ours):
            continue
        whole = _pair(names, {name: name for name in found}, shapes, found)
        if whole:
            return whole
        scopes = sorted({name.partition("/")[0] for name in found if "/" in name})
        fitting = {
            scope: _pair(names, _within([scope], {name: name for name in found}), shapes, found) for scope in scopes
        }
        fitting = {scope: pairs for scope, pairs in fitting.items() if pairs}
        if len(fitting) > 1:
            raise ConversionError(
                "The model fits what the static graph has in each of {}: say by `names` which it is.".format(
                    sorted(fitting)
                )
            )
        if fitting:
            return list(fitting.values())[0]
    return {}


def _pair(ours, theirs, shapes, found):
    """{place: name in the graph} where each of `ours` has one of its own there, in its shape; or {}."""
    wanted, there = _keys(ours), _keys(theirs)
    by_key = {}
    for name, key in there.items():
        by_key.setdefault(key, []).append(name)
    pairs = {place: by_key.get(key, []) for place, key in wanted.items()}
    fits = all(len(names) == 1 and tuple(found[names[0]]) == shapes[place] for place, names in pairs.items())
    return {place: names[0] for place, names in pairs.items()} if fits else {}


def _first_scopes(names):
    firsts = sorted({name.partition("/")[0] for name in names if "/" in name})
    return firsts if len(firsts) == 1 else []


def _within(scopes, names):
    """What of `names`, {key: name}, stands in one of `scopes`, without it."""
    split = {key: name.partition("/") for key, name in names.items()}
    return {key: rest for key, (first, _, rest) in split.items() if rest and first in scopes}


def _keys(names):
    """{key of `names`: what says the layer and its variable}.

    A layer's number is its place among those of its kind and scope, and how many there are: where one side has more of
    them, none fits.
    """
    split = {key: _split(name) for key, name in names.items()}
    numbers = {}
    for scopes, _ in split.values():
        for depth, (kind, number) in enumerate(scopes):
            numbers.setdefault((scopes[:depth], kind), set()).add(number)
    ranks = {place: {number: rank for rank, number in enumerate(sorted(there))} for place, there in numbers.items()}

    def ranked(scopes):
        of_kinds = [(ranks[scopes[:depth], kind], kind, number) for depth, (kind, number) in enumerate(scopes)]
        return tuple((kind, there[number], len(there)) for there, kind, number in of_kinds)

    return {key: (ranked(scopes), leaf) for key, (scopes, leaf) in split.items()}


def _split(name):
    """((kind, number) of each scope, leaf). tf-slim puts a batch normalisation inside of the layer that it follows."""
    *scopes, leaf = name.split("/")
    split = tuple(_kind(scope) for scope in scopes)
    if len(scopes) > 1 and scopes[-1] == "BatchNorm" and _NUMBERED_NAME.match(scopes[-2]).group(1) in KINDS:
        split = split[:-2] + (("batch_normalization", split[-2][1]),)
    return split, LEAVES.get(leaf, leaf)


def _kind(scope):
    name, number = _NUMBERED_NAME.match(scope).groups()
    return KINDS.get(name, name), int(number or 0)


def check(wanted, found, given):
    """Raise unless `given`, {place: name or None}, has each of `wanted` once, in its shape."""
    taken = [name for name in given.values() if name is not None]
    lost = [name for place, (name, _) in enumerate(wanted) if place not in given]
    if lost:
        raise ConversionError(
            "Nothing in the static graph was found for {}; left there are {}. Say which is which: "
            "`names={{{!r}: name in the graph}}`.".format(lost, sorted(set(found) - set(taken)), lost[0])
        )
    twice = sorted({name for name in taken if taken.count(name) > 1})
    if twice:
        raise ConversionError("Several variables of the model are {}: give `names` as a list, in order.".format(twice))
    wrong = [
        "{} has shape {}, and {} {}".format(wanted[place][0], list(wanted[place][1]), name, list(found[name]))
        for place, name in sorted(given.items())
        if name is not None and tuple(found[name]) != tuple(wanted[place][1])
    ]
    if wrong:
        raise ConversionError("Shapes differ: {}. Is it a checkpoint of another model?".format("; ".join(wrong)))
