"""What is known of a tensor: whether examples lie in it, on which axis, and behind how many reductions."""

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

Dims = Optional[List[Optional[int]]]
"""Lengths of axes; None for one that is unknown, and for a tensor of unknown rank."""

Pair = Tuple[Dims, ...]
"""The `Dims` of a tensor for the two numbers of examples with which shapes are inferred.

If axes of the batch are of unknown length, a third is with the first number, and with other lengths of these.
"""

Frozen = Optional[Tuple[Any, ...]]
"""The values of a tensor for several numbers of examples, as they can be compared."""


class Rows(NamedTuple):
    """On which axis of a tensor the examples lie.

    Attributes:
      axis: int.
      per_example: how many entries of the axis belong to each example. Those of one example are adjacent, and the
        examples are in their order.
    """

    axis: int
    per_example: int


class Layout(NamedTuple):
    """Where examples lie on an axis: its index is (block * number of examples + example) * per_example + entry.

    With one block these are `Rows`. With more, such as in a flattened [time, batch], behind `space_to_batch`, or where
    two batches stand one after the other, operations keep examples apart as well, but no slice of the tensor holds some
    examples.
    """

    axis: int
    per_example: int = 1
    blocks: int = 1

    def on(self, axis: int) -> "Layout":
        """Return the same layout on another axis."""
        return self._replace(axis=axis)

    @property
    def along(self) -> Tuple[int, int]:
        """The layout, whatever the axis."""
        return self.per_example, self.blocks

    @property
    def factor(self) -> int:
        """By which number the number of examples is multiplied in the length of the axis."""
        return self.per_example * self.blocks

    @property
    def rows(self) -> Optional[Rows]:
        """The layout as `Rows`, if slices of the tensor hold some examples."""
        return Rows(self.axis, self.per_example) if self.blocks == 1 else None


class Share(NamedTuple):
    """Rows that go to one of several parts of a table, in their order.

    Attributes:
      parts: the key of the tensor that says to which part each row goes; "" for all rows.
      number, total: which of how many parts it is.
      layout: that of all rows.
      are_places: whether these are not the rows, but the places at which they are among all of them.
    """

    parts: str
    number: int
    total: int
    layout: Layout
    are_places: bool = True


class State(NamedTuple):
    """What is known of a tensor that depends on the batch; None stands for one that doesn't.

    Attributes:
      kind: "rows": examples lie in it, and are apart. "size": it only depends on how many examples there are. "whole":
        it is computed from reductions over the examples. "joined": examples have met before it. "list": it is a list
        of tensors, or the flow of a `TensorArray`.
      layout: `Layout` of rows.
      level: behind how many reductions it is.
      element: for a list, the state of its elements; None also if it is empty.
      dims: for a list, the `Pair` of its elements; None if it is empty.
      lengths: for a list, how many elements it has, in the order of `Pair`; or None.
      values: for a list, the values that every element has, if they are known.
      share: which rows it holds, if it is no list, but examples are apart in it in another order than theirs.
      counts: for "whole", whether it may also depend on how many examples there are, as `n * longest` does.
    """

    kind: str
    layout: Optional[Layout] = None
    level: int = 0
    element: Optional["State"] = None  # type: ignore[misc]
    dims: Optional[Pair] = None
    lengths: Dims = None
    values: Frozen = None
    share: Optional[Share] = None
    counts: bool = False


SIZE = State("size")


def rows_at(layout: Layout, level: int) -> State:
    """Return the state of a tensor of rows."""
    return State("rows", layout, level)


def whole(level: int, counts: bool = False) -> State:
    """Return the state of a tensor that is computed from reductions."""
    return State("whole", level=level, counts=counts)


def joined(level: int) -> State:
    """Return the state of a tensor before which examples have met."""
    return State("joined", level=level)


def list_of(element: Optional[State], dims: Optional[Pair], lengths: Dims = None, values: Frozen = None) -> State:
    """Return the state of a list."""
    return State("list", None, level_of(element), element, dims, lengths, values)


def level_of(state: Optional[State]) -> int:
    """Return behind how many reductions a tensor is."""
    return 0 if state is None else state.level


def depends(state: Optional[State]) -> bool:
    """Whether a tensor depends on the batch."""
    return state is not None and (state.kind != "list" or state.element is not None)


def either(states: Sequence[Optional[State]]) -> Optional[State]:
    """Return the state of a tensor that is one of several."""
    first, *others = states
    for other in others:
        first = _either(first, other)
    return first


def _either(one: Optional[State], other: Optional[State]) -> Optional[State]:
    level = max(level_of(one), level_of(other))
    kinds = {"none" if state is None else state.kind for state in (one, other)}
    if one is None or other is None or kinds <= {"size", "whole"}:
        if kinds == {"none"}:
            return None
        if kinds <= {"none", "size"}:
            return SIZE
        counts = any(state is not None and (state.kind == "size" or state.counts) for state in (one, other))
        return whole(level, counts) if kinds <= {"none", "size", "whole"} else joined(level + ("joined" not in kinds))
    if kinds == {"rows"} and one.layout == other.layout:
        return one._replace(level=level)
    if kinds == {"list"}:
        lengths = one.lengths if one.lengths == other.lengths else None
        if one.dims is None or other.dims is None:  # an empty list
            return (one if other.dims is None else other)._replace(lengths=lengths)
        element, values = _either(one.element, other.element), one.values if one.values == other.values else None
        return list_of(element, either_dims(one.dims, other.dims), lengths, values)
    return joined(level + ("joined" not in kinds))


def either_dims(one: Pair, other: Pair) -> Pair:
    """Return what is known of the shape of a tensor that is one of two."""
    return tuple(_common(first, second) for first, second in zip(one, other))


def _common(one: Dims, other: Dims) -> Dims:
    if one is None or other is None or len(one) != len(other):
        return None
    return [length if length == another else None for length, another in zip(one, other)]


class Verdict(NamedTuple):
    """What an operation does with examples.

    Attributes:
      kind: "rows": it keeps them apart. "size": it only depends on how many there are. "reduces": it is a reduction
        over them, whose parts can be combined. "behind": it takes the result of a reduction, or of examples that have
        met, and makes no rows of it. "meets": examples meet, or no rule says that they don't.
      outputs: for each output, `Rows` or None. None, in "rows", is a list of tensors, or an order of which no slice
        holds some examples.
      how: for "reduces", the combination, such as "sum"; for "rows", "random" if it draws numbers; for "meets", why.
    """

    kind: str
    outputs: List[Optional[Rows]]
    how: str = ""
