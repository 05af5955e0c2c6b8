"""Lookups in a table of several parts, as `tf.nn.embedding_lookup` makes them: rows go to their parts, and come back.

    rows ── DynamicPartition ──► those of part 0, 1, … ── Gather ──► their entries ──┐
      └──► part of each row                                                          ├─ DynamicStitch ──► rows
    0, 1, 2, … ── DynamicPartition, by the same parts ──► places of these rows ──────┘

Each row that comes back is computed from the one that was at its place. Between, rows of examples are apart, but not in
their order, so they have the state of a list.
"""

from typing import List, Optional, Sequence

from accum._rows._flat_graph import Node
from accum._rows._lists import Given, Result
from accum._rows._rules import SHAPES, Meets
from accum._rows._shapes import COUNTS
from accum._rows._states import Layout, Pair, Share, State, list_of, rows_at
from accum._rows._values import SIZES, Values, is_constant

GATHERS = ("Gather", "GatherV2", "ResourceGather")
STITCHES = ("DynamicStitch", "ParallelDynamicStitch")
KINDS = ("Range", "DynamicPartition", *STITCHES)

SHAPES["Range"] = (1,)


def is_share(state: Optional[State]) -> bool:
    """Whether a tensor holds the rows that go to a part, or the places of all rows."""
    return state is not None and state.share is not None


def results_of(node: Node, given: Sequence[Given], dims: Pair, level: int) -> List[Result]:
    """Return what is known of the outputs of an operation of `KINDS`, or of one of `GATHERS` of a share.

    Args:
      node: the operation.
      given: its inputs.
      dims: the inferred shape of its first output.
      level: behind how many reductions it is.
    """
    if node.type == "Range":
        return [_places(given, level)]
    if node.type == "DynamicPartition":
        return _divided(node, given, level)
    if node.type in STITCHES:
        return [_put_back(given, level)]
    return [_gathered(node, given, dims, level)]


def _share(share: Share, dims: Pair, level: int) -> Result:
    rows = rows_at(share.layout, level)
    return Result(list_of(rows, dims)._replace(share=share), dims)


def _places(given: Sequence[Given], level: int) -> Result:
    """0, 1, 2, … up to a multiple of the number of examples."""
    first, end, step = (one.values for one in given)
    factor = 0 if end is None else int(end[0]) // SIZES[0]
    is_multiple = end is not None and factor and all(int(one) == factor * size for one, size in zip(end, SIZES))
    if not is_multiple or not _is(first, 0) or not _is(step, 1):
        raise Meets("it counts something else than rows of the examples")
    return _share(Share("", 0, 0, Layout(0, factor)), _pair(factor, ([],) * len(given[0].dims)), level)


def _is(values: Optional[Values], number: int) -> bool:
    return values is not None and is_constant(values) and int(values[0]) == number


def _divided(node: Node, given: Sequence[Given], level: int) -> List[Result]:
    data, parts = given
    layout = _layout_of(parts)
    if layout is None or parts.dims[0] is None or len(parts.dims[0]) != 1:
        raise Meets("the parts are not those of rows")
    places = data.state.share if data.state is not None else None
    if places is not None:
        fits = not places.parts and places.layout.factor == layout.factor
    else:
        fits = _layout_of(data) == layout
    if not fits:
        raise Meets("what it divides are other rows")
    count = node.proto.attr["num_partitions"].i
    dims: Pair = tuple(None if one is None else [None, *one[1:]] for one in data.dims)
    shares = (Share(node.inputs[1], number, count, layout, places is not None) for number in range(count))
    return [_share(share, dims, level) for share in shares]


def _layout_of(given: Given) -> Optional[Layout]:
    layout = None if given.state is None or given.state.kind != "rows" else given.state.layout
    return layout if layout is not None and layout.axis == 0 else None


def _gathered(node: Node, given: Sequence[Given], dims: Pair, level: int) -> Result:
    table, indices = given[:2]
    share = indices.state.share if indices.state is not None else None
    is_first_axis = node.type != "GatherV2" or _is(given[2].values, 0)
    is_plain = is_first_axis and not node.proto.attr["batch_dims"].i
    if share is None or share.are_places or not share.parts or table.state is not None or not is_plain:
        raise Meets("it is no table from which a part is taken")
    return _share(share, dims, level)


def _put_back(given: Sequence[Given], level: int) -> Result:
    count = len(given) // 2
    shares = [one.state.share if one.state is not None else None for one in given]
    first = shares[-1]
    if first is None or not first.parts or first.total != count:
        raise Meets("it puts other rows together")
    for index, share in enumerate(shares):
        if share != first._replace(number=index % count, are_places=index < count):
            raise Meets("it puts rows to other places")
    return Result(rows_at(first.layout, level), _pair(first.layout.factor, tuple(d and d[1:] for d in given[-1].dims)))


def _pair(factor: int, rest: Pair) -> Pair:
    counts = (*COUNTS, COUNTS[0])
    return tuple(None if one is None else [factor * count, *one] for count, one in zip(counts, rest))
