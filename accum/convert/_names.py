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
}
"""Names that tf-slim numbers layers under, and those that Keras and `tf.compat.v1.layers` do."""

NUMBERED = set(KINDS.values()) | {"conv1d", "conv3d", "conv3d_transpose", "depthwise_conv2d", "embedding"}
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
    places = [(place, wanted[place][0]) for place in range(len(wanted)) if place not in given]
    rest = set(found) - set(given.values())
    by_name = _found_by_name(places, rest)
    # All by name or all by number: where one side counts its layers from another number, some names fit by chance.
    given.update(by_name if len(by_name) == len(places) else _found_by_number(places, rest) or by_name)
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


def _found_by_name(places, found):
    result = {}
    for place, name in places:
        same = [other for other in (name, _as_slim(name)) if other in found]
        if same:
            result[place] = same[0]
    return result


def _as_slim(name):
    scope, _, leaf = name.rpartition("/")
    leaf = {keras: slim for slim, keras in LEAVES.items()}.get(leaf, leaf)
    return scope + "/" + leaf if scope else leaf


def _found_by_number(places, found):
    """Match what layers of the same kind, numbered alike, hold; with or without the scope that all of a side share."""
    ours = {place: name for place, name in places}
    for of_ours in (ours, _without_scope(ours)):
        for theirs in ({name: name for name in found}, _without_scope({name: name for name in found})):
            wanted, there = _keys(of_ours), _keys(theirs)
            by_key = {}
            for name, key in there.items():
                by_key.setdefault(key, []).append(name)
            matched = {place: by_key.get(key, []) for place, key in wanted.items()}
            if matched and all(len(names) == 1 for names in matched.values()):
                return {place: names[0] for place, names in matched.items()}
    return {}


def _without_scope(names):
    """Names without their first scope, where all have the same."""
    firsts = {name.partition("/")[0] for name in names.values()}
    if len(firsts) != 1 or not all("/" in name for name in names.values()):
        return names
    return {key: name.partition("/")[2] for key, name in names.items()}


def _keys(names):
    """{key of `names`: what says the layer and its variable}, in which the numbers of layers are those of their order."""
    split = {key: _split(name) for key, name in names.items()}
    numbers = {}
    for scopes, _ in split.values():
        for depth, (kind, number) in enumerate(scopes):
            if number is not None:
                numbers.setdefault((scopes[:depth], kind), set()).add(number)
    ranks = {place: {number: rank for rank, number in enumerate(sorted(there))} for place, there in numbers.items()}

    def ranked(scopes):
        return tuple(
            (kind, None if number is None else ranks[scopes[:depth], kind][number])
            for depth, (kind, number) in enumerate(scopes)
        )

    return {key: (ranked(scopes), leaf) for key, (scopes, leaf) in split.items()}


def _split(name):
    """((kind, number) of each scope, leaf). tf-slim puts a batch normalisation inside of the layer that it follows."""
    *scopes, leaf = name.split("/")
    split = tuple(_kind(scope) for scope in scopes)
    if len(split) > 1 and scopes[-1] == "BatchNorm" and split[-2][1] is not None:
        split = split[:-2] + (("batch_normalization", split[-2][1]),)
    return split, LEAVES.get(leaf, leaf)


def _kind(scope):
    name, number = _NUMBERED_NAME.match(scope).groups()
    kind = KINDS.get(name, name)
    return (kind, int(number or 0)) if kind in NUMBERED else (scope, None)


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
