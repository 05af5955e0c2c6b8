"""What a rule sees of an operation, what it says, and the table of rules by operation type."""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Union

import numpy as np

from accum._rows._flat_graph import Node
from accum._rows._numbers import Numbers
from accum._rows._states import Dims, Layout, Pair, State
from accum._rows._values import SIZES, Values, is_constant


class Meets(Exception):
    """Examples meet in an operation, or nothing proves that they don't. The message says why."""


OPAQUE = "opaque"
"""An output that belongs to the examples, and of which nothing else is known: reserve space."""

INDEPENDENT = "independent"
"""An output that does not depend on the examples."""


class Outcome(NamedTuple):
    """What a rule says of an operation: an input has rows, or the length of an output is a number of examples.

    Attributes:
      outputs: the `Layout` of each; None for one that is reduced over the examples; `OPAQUE` or `INDEPENDENT`.
      how: the combination of a reduction, or "random".
      is_behind: whether the outputs with a layout are behind the reduction as well.
    """

    outputs: Sequence[Union[Layout, str, None]]
    how: str = ""
    is_behind: bool = False


Rule = Callable[["Op"], Union[Layout, Outcome]]
RULES: Dict[str, Rule] = {}
SHAPES: Dict[str, Sequence[int]] = {}
"""Which inputs of an operation only say how long axes of its output are."""


def rule(*kinds: str, shapes: Sequence[int] = ()) -> Callable[[Rule], Rule]:
    """Enter a function into the table, for types of operations whose inputs `shapes` say how long axes are."""

    def register(function: Rule) -> Rule:
        for kind in kinds:
            assert kind not in RULES, kind
            RULES[kind] = function
            if shapes:
                SHAPES[kind] = shapes
        return function

    return register


def names(text: str) -> List[str]:
    """Return the types of operations that a text lists."""
    return text.split()


class Op:
    """An operation, and what is known of its inputs.

    Args:
      node: a `Node`.
      states: of its inputs.
      dims: the `Pair` of each input.
      values: the `Values` of each input, or None.
      output_dims: the `Pair` of each output.
      numbers: what is known of single numbers in inputs.
    """

    def __init__(
        self,
        node: Node,
        states: Sequence[Optional[State]],
        dims: Sequence[Pair],
        values: Sequence[Optional[Values]],
        output_dims: Sequence[Pair],
        numbers: Numbers,
    ) -> None:
        self.node, self.type, self.states = node, node.type, states
        self._numbers = numbers
        self._dims, self._values, self._output_dims = dims, values, output_dims
        self.count = len(states)

    def layout(self, index: int) -> Optional[Layout]:
        """The layout of an input of rows, else None."""
        state = self.states[index] if index < self.count else None
        return state.layout if state is not None else None

    @property
    def batched(self) -> List[int]:
        """The inputs that have rows."""
        return [index for index in range(self.count) if self.layout(index) is not None]

    def only(self, *indices: int) -> None:
        """Raise unless no other inputs than these have rows."""
        others = [index for index in self.batched if index not in indices]
        if others:
            raise Meets(f"input {others[0]} has an axis of examples")

    def one(self, index: int = 0) -> Layout:
        """Return the layout of the only input that has rows."""
        self.only(index)
        return self.must(index)

    def must(self, index: int) -> Layout:
        """Return the layout of an input that must have rows."""
        layout = self.layout(index)
        if layout is None:
            raise Meets(f"input {index} has no axis of examples")
        return layout

    def same(self, indices: Sequence[int]) -> Layout:
        """Return the layout of inputs that must all have the same."""
        layouts = {self.must(index) for index in indices}
        if len(layouts) != 1:
            raise Meets("the examples are on different axes of its inputs")
        return layouts.pop()

    def dims(self, index: int) -> List[Optional[int]]:
        """Return the lengths of the axes of an input; None: unknown, or by the number of examples."""
        return _fixed(self._dims[index], f"the rank of input {index} is not known")

    def rank(self, index: int = 0) -> int:
        """Return the rank of an input."""
        return len(self.dims(index))

    def output_rank(self, index: int = 0) -> int:
        """Return the rank of an output."""
        return len(_fixed(self._output_dims[index], "the rank of its output is not known"))

    def output_dims(self, index: int = 0) -> List[Optional[int]]:
        """Return the lengths of the axes of an output, as `dims` does."""
        return _fixed(self._output_dims[index], "the rank of its output is not known")

    def multiples(self, index: int = 0) -> Dict[int, int]:
        """Return {axis: factor} for the axes of an output whose length is a multiple of the number of examples."""
        return multiples_of(self._output_dims[index])

    def axis(self, axis: int, rank: int) -> int:
        """Return an axis that may be counted from the last as one counted from the first."""
        if not -rank <= axis < rank:
            raise Meets("its axis is outside of its input")
        return axis % rank

    def constant(self, index: int) -> Any:
        """Return the value of an input, which must not depend on the number of examples."""
        values = self._values[index]
        if not is_constant(values):
            raise Meets(f"input {index} is not a constant")
        assert values is not None
        return values[0]

    def axes(self, index: int, rank: int) -> List[int]:
        """Return the value of an input that names axes."""
        return [self.axis(int(axis), rank) for axis in np.ravel(self.constant(index))]

    def features(self) -> int:
        """Return the axis of the features of an input of images or rows."""
        return 1 if self.attribute("data_format").s.startswith(b"NC") else self.rank() - 1

    def by_size(self, index: int) -> Values:
        """Return the value of an input for each of `SIZES`."""
        values = self._values[index]
        if values is None:
            raise Meets(f"input {index} is not known before it is computed")
        return values

    def number(self, index: int, place: int) -> Values:
        """Return one number of an input for each of `SIZES`, also if others in it are not known."""
        values = self._numbers.value(self.node.inputs[index], place)
        if values is None:
            raise Meets(f"input {index} is not known before it is computed")
        return values

    def is_length(self, index: int, place: int, factor: int) -> bool:
        """Whether a number of an input is -1, or so many times the number of examples."""
        return self._numbers.is_length(self.node.inputs[index], place, factor)

    def has_size(self) -> bool:
        """Whether an input depends on how many examples there are, and on nothing else of them."""
        return any(state is not None and state.kind == "size" for state in self.states)

    def attribute(self, name: str) -> Any:
        """Return the `AttrValue` of an attribute."""
        return self.node.proto.attr[name]

    def layout_is(self, layout: Layout, lengths: Sequence[Any]) -> bool:
        """Whether numbers, one for each of `SIZES`, are those of entries of a layout."""
        return all(int(length) == layout.factor * size for length, size in zip(lengths, SIZES))


def multiples_of(pair: Pair) -> Dict[int, int]:
    """Return {axis: factor} for the axes whose length is a multiple of the number of examples."""
    if pair[0] is None or pair[1] is None:
        raise Meets("the rank of its output is not known")
    found = {}
    for axis, (length, other) in enumerate(zip(pair[0], pair[1])):
        if length is not None and other is not None and length != other:
            factor, rest = divmod(length, SIZES[0])
            if rest or not factor or factor * SIZES[1] != other:
                raise Meets("the length of an axis of its output depends on the number of examples, and is no multiple")
            found[axis] = factor
    return found


def _fixed(pair: Pair, message: str) -> List[Optional[int]]:
    one, other = pair[:2]
    if one is None or other is None or len(one) != len(other):
        raise Meets(message)
    return [length if length == another else None for length, another in zip(one, other)]


def product(dims: Dims) -> int:
    """Return the product of lengths, which must be known."""
    total = 1
    for length in dims or ():
        if length is None:
            raise Meets("the length of an axis is not known")
        total *= length
    return total
