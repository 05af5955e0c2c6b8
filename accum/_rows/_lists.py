"""Lists of tensors: `TensorArray`, tensor lists and stacks. The examples lie in each of their elements."""

from typing import Callable, Dict, List, NamedTuple, Optional, Sequence

import numpy as np

from accum._rows._flat_graph import Node
from accum._rows._rules import SHAPES, Meets
from accum._rows._states import SIZE, Dims, Pair, State, either, joined, list_of
from accum._rows._values import SIZES, Values, frozen, is_constant, thawed

UNKNOWN: Pair = (None, None, None)


class Given(NamedTuple):
    """What is known of an input of an operation on a list."""

    state: Optional[State]
    dims: Pair
    values: Optional[Values]


class Result(NamedTuple):
    """What is known of an output of an operation on a list."""

    state: Optional[State]
    dims: Pair
    values: Optional[Values] = None


Results = List[Result]

ListRule = Callable[[Node, Sequence[Given]], Results]
LIST_RULES: Dict[str, ListRule] = {}
SCALAR: Pair = ([], [], [])
EMPTY = list_of(None, None)

LISTS = ("TensorArrayV3", "TensorListReserve")
"""Operations that make lists of as many elements as their last input says."""

STACKED = ("TensorArrayGatherV3", "TensorListStack")
"""Operations that make one tensor of the elements of a list."""

PLACES = dict.fromkeys(
    (
        "TensorArrayGatherV3",
        "TensorArrayReadV3",
        "TensorArrayScatterV3",
        "TensorArrayWriteV3",
        "TensorListGetItem",
        "TensorListReserve",
        "TensorListSetItem",
    ),
    1,
)
PLACES["TensorArrayV3"] = 0
"""{type of an operation on a list: which input says where an element is, or how many there are}."""

ON_LISTS = ("Add", "AddN", "AddV2", "Identity", "Snapshot", "StopGradient", "ZerosLike")
"""Operations on a list as a whole; a sum of flows waits for both."""


def _rule(*kinds: str, shapes: Sequence[int] = ()) -> Callable[[ListRule], ListRule]:
    def register(function: ListRule) -> ListRule:
        LIST_RULES.update(dict.fromkeys(kinds, function))
        if shapes:
            SHAPES.update(dict.fromkeys(kinds, shapes))
        return function

    return register


def _list(given: Given) -> State:
    """Return the list that is given; one that is not known to be empty may hold anything that is independent."""
    if given.state is None:
        return list_of(None, UNKNOWN)
    if given.state.kind != "list":
        raise Meets("the list depends on the examples")
    return given.state


def _counts(values: Optional[Values]) -> Dims:
    """Return how many elements there are, if it is a number that does not depend on the number of examples."""
    if values is None or not is_constant(values) or values[0].ndim:
        return None
    return [int(values[0]), int(values[0]), None]


def _without_first(dims: Pair) -> Pair:
    return tuple(None if one is None else one[1:] for one in dims)


def _with_first(lengths: Dims, dims: Pair) -> Pair:
    lengths = [None] * len(dims) if lengths is None else lengths
    return tuple(None if one is None else [length, *one] for length, one in zip(lengths, dims))


def _elements_of(given: Given) -> Optional[State]:
    """Return the state of the elements into which a tensor is taken apart along its first axis."""
    state = given.state
    if state is None or state.layout is None:
        return state
    if state.layout.axis == 0:
        raise Meets("it takes the examples one by one")
    return state._replace(layout=state.layout.on(state.layout.axis - 1))


def _stacked(state: Optional[State]) -> Optional[State]:
    """Return the state of a tensor that joins elements along a new first axis."""
    if state is None or state.layout is None:
        return state
    return state._replace(layout=state.layout.on(state.layout.axis + 1))


def _with(held: State, value: Given, lengths: Dims = None) -> State:
    """Return a list with another element."""
    merged = either([held, list_of(value.state, value.dims, None, frozen(value.values))])
    assert merged is not None
    return merged._replace(lengths=lengths)


def _element(held: State) -> Result:
    """Return what is known of any element."""
    return Result(held.element, held.dims or UNKNOWN, thawed(held.values))


@_rule("TensorArrayV3")
def tensor_array(node: Node, given: Sequence[Given]) -> Results:
    """(handle, flow) of an empty one; the size is that of the whole batch, and unknown if the array may grow."""
    lengths = None if node.proto.attr["dynamic_size"].b else _counts(given[0].values)
    return [Result(None, UNKNOWN), Result(EMPTY._replace(lengths=lengths), SCALAR)]


@_rule("TensorArrayGradV3", "TensorArrayGradWithShape")
def tensor_array_gradient(node: Node, given: Sequence[Given]) -> Results:
    """(handle, flow) of that for gradients, whose elements have the shapes of those of the other."""
    return [Result(None, UNKNOWN), Result(_list(given[1]), SCALAR)]


@_rule("TensorArrayWriteV3")
def write(node: Node, given: Sequence[Given]) -> Results:
    """Element by element."""
    _is_plain(given[1])
    held = _list(given[3])
    return [Result(_with(held, given[2], held.lengths), SCALAR)]


@_rule("TensorArrayReadV3")
def read(node: Node, given: Sequence[Given]) -> Results:
    """Element by element."""
    _is_plain(given[1])
    return [_element(_list(given[2]))]


@_rule("TensorArrayScatterV3")
def scatter(node: Node, given: Sequence[Given]) -> Results:
    """Take a tensor apart into elements."""
    _is_plain(given[1])
    held, value = _list(given[3]), given[2]
    return [Result(_with(held, Given(_elements_of(value), _without_first(value.dims), None), held.lengths), SCALAR)]


@_rule("TensorArrayGatherV3")
def gather(node: Node, given: Sequence[Given]) -> Results:
    """Join elements, as many as there are indices."""
    _is_plain(given[1])
    held = _list(given[2])
    lengths: Dims = [None if one is None else one[0] for one in given[1].dims]
    lengths = held.lengths if not lengths or lengths[0] is None else lengths
    return [Result(_stacked(held.element), _with_first(lengths, held.dims or UNKNOWN))]


@_rule("TensorArraySizeV3")
def size(node: Node, given: Sequence[Given]) -> Results:
    """A number that no example changes."""
    lengths = _list(given[1]).lengths
    values = None if lengths is None or lengths[0] is None else [np.array(lengths[0], np.int64)] * len(SIZES)
    return [Result(SIZE, SCALAR, values)]


@_rule("TensorArrayCloseV3")
def close(node: Node, given: Sequence[Given]) -> Results:
    """Return nothing."""
    return []


@_rule("TensorListReserve", "EmptyTensorList", shapes=(0,))
def empty_list(node: Node, given: Sequence[Given]) -> Results:
    """A list without elements, or of zeros of the shape of what is written."""
    lengths = _counts(given[1].values) if node.type == "TensorListReserve" else None
    return [Result(EMPTY._replace(lengths=lengths), SCALAR)]


@_rule("TensorListFromTensor", shapes=(1,))
def list_from_tensor(node: Node, given: Sequence[Given]) -> Results:
    """Take a tensor apart."""
    dims = given[0].dims
    lengths = [one[0] if one else None for one in dims]
    return [Result(list_of(_elements_of(given[0]), _without_first(dims), lengths), SCALAR)]


@_rule("TensorListStack", shapes=(1,))
def stack_list(node: Node, given: Sequence[Given]) -> Results:
    """Join all elements."""
    held = _list(given[0])
    count = node.proto.attr["num_elements"].i
    lengths: Dims = [count] * 3 if count >= 0 else held.lengths
    return [Result(_stacked(held.element), _with_first(lengths, held.dims or UNKNOWN))]


@_rule("TensorListGetItem", shapes=(2,))
def get_item(node: Node, given: Sequence[Given]) -> Results:
    """One element."""
    _is_plain(given[1])
    return [_element(_list(given[0]))]


@_rule("TensorListSetItem")
def set_item(node: Node, given: Sequence[Given]) -> Results:
    """One element."""
    _is_plain(given[1])
    held = _list(given[0])
    return [Result(_with(held, given[2], held.lengths), SCALAR)]


@_rule("TensorListPushBack")
def push_back(node: Node, given: Sequence[Given]) -> Results:
    """One more element."""
    return [Result(_with(_list(given[0]), given[1]), SCALAR)]


@_rule("TensorListPopBack", shapes=(1,))
def pop_back(node: Node, given: Sequence[Given]) -> Results:
    """One element less."""
    held = _list(given[0])
    return [Result(held._replace(lengths=None), SCALAR), _element(held)]


@_rule("TensorListLength")
def length_of(node: Node, given: Sequence[Given]) -> Results:
    """A number that no example changes."""
    return [Result(SIZE, SCALAR)]


@_rule("TensorListElementShape")
def element_shape(node: Node, given: Sequence[Given]) -> Results:
    """The shape of the elements, or what is known of it; whoever makes a list takes it."""
    return [Result(SIZE, UNKNOWN)]


def _is_plain(index: Given) -> None:
    """Raise if an index depends on the examples themselves."""
    if index.state is not None and index.state.kind not in ("size", "whole"):
        raise Meets("its index depends on the examples")


@_rule("LookupTableFind", "LookupTableFindV2")
def find_in_table(node: Node, given: Sequence[Given]) -> Results:
    """A value for each key, of the shape of the default value. No list, but its shape is not inferred either."""
    if given[2].dims[0] != []:
        raise Meets("the shape of its values is not known")
    return [Result(given[1].state, given[1].dims)]


STACK_KINDS = ("StackV2", "Stack")
PUSHES = ("StackPushV2", "StackPush")
POPS = ("StackPopV2", "StackPop")


def pushed(held: Optional[State], value: Given) -> State:
    """Return what a stack holds with one more element."""
    return _with(held or EMPTY, value)


def popped(held: Optional[State]) -> Result:
    """Return what is known of an element of a stack, to which something must have been pushed before."""
    return Result(joined(1), UNKNOWN) if held is None else _element(held)
