"""Lists of tensors: `TensorArray`, tensor lists and stacks. The examples lie in each of their elements."""

from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from accum._rows._flat_graph import Node
from accum._rows._rules import SHAPES, Meets
from accum._rows._states import SIZE, Pair, State, either, list_of
from accum._rows._values import Values, is_constant

UNKNOWN: Pair = (None, None)


class Given(NamedTuple):
    """What is known of an input of an operation on a list."""

    state: Optional[State]
    dims: Pair
    values: Optional[Values]


Results = List[Tuple[Optional[State], Pair]]
"""For each output its state, and its shape."""

ListRule = Callable[[Node, Sequence[Given]], Results]
LIST_RULES: Dict[str, ListRule] = {}
SCALAR: Pair = ([], [])
EMPTY = list_of(None, None, None)


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
        return list_of(None, UNKNOWN, None)
    if given.state.kind != "list":
        raise Meets("the list depends on the examples")
    return given.state


def _count(values: Optional[Values]) -> Optional[int]:
    return int(values[0]) if values is not None and is_constant(values) and values[0].ndim == 0 else None


def _without_first(dims: Pair) -> Pair:
    one, other = dims
    return (None if one is None else one[1:], None if other is None else other[1:])


def _with_first(length: Optional[int], dims: Pair) -> Pair:
    one, other = dims
    return (None if one is None else [length] + one, None if other is None else [length] + other)


def _elements_of(given: Given) -> Optional[State]:
    """Return the state of the elements into which a tensor is taken apart along its first axis."""
    state = given.state
    if state is None or state.kind != "rows":
        return state
    assert state.layout is not None
    if state.layout.axis == 0:
        raise Meets("it takes the examples one by one")
    return state._replace(layout=state.layout.on(state.layout.axis - 1))


def _stacked(state: Optional[State]) -> Optional[State]:
    """Return the state of a tensor that joins elements along a new first axis."""
    if state is None or state.kind != "rows":
        return state
    assert state.layout is not None
    return state._replace(layout=state.layout.on(state.layout.axis + 1))


def _with(held: State, element: Optional[State], dims: Pair, length: Optional[int]) -> State:
    """Return a list with another element."""
    merged = either([held, list_of(element, dims, None)])
    assert merged is not None
    return merged._replace(length=length)


@_rule("TensorArrayV3")
def tensor_array(node: Node, given: Sequence[Given]) -> Results:
    """(handle, flow) of an empty one; the size is that of the whole batch."""
    return [(None, UNKNOWN), (EMPTY._replace(length=_count(given[0].values)), SCALAR)]


@_rule("TensorArrayGradV3", "TensorArrayGradWithShape")
def tensor_array_gradient(node: Node, given: Sequence[Given]) -> Results:
    """(handle, flow) of that for gradients, whose elements have the shapes of those of the other."""
    return [(None, UNKNOWN), (_list(given[1]), SCALAR)]


@_rule("TensorArrayWriteV3")
def write(node: Node, given: Sequence[Given]) -> Results:
    """Element by element."""
    _is_plain(given[1])
    held = _list(given[3])
    return [(_with(held, given[2].state, given[2].dims, held.length), SCALAR)]


@_rule("TensorArrayReadV3")
def read(node: Node, given: Sequence[Given]) -> Results:
    """Element by element."""
    _is_plain(given[1])
    held = _list(given[2])
    return [(held.element, held.dims or UNKNOWN)]


@_rule("TensorArrayScatterV3")
def scatter(node: Node, given: Sequence[Given]) -> Results:
    """Take a tensor apart into elements."""
    _is_plain(given[1])
    held, value = _list(given[3]), given[2]
    return [(_with(held, _elements_of(value), _without_first(value.dims), held.length), SCALAR)]


@_rule("TensorArrayGatherV3")
def gather(node: Node, given: Sequence[Given]) -> Results:
    """Join elements, as many as there are indices."""
    _is_plain(given[1])
    held, (indices, _) = _list(given[2]), given[1].dims
    length = held.length if indices is None or indices[0] is None else indices[0]
    return [(_stacked(held.element), _with_first(length, held.dims or UNKNOWN))]


@_rule("TensorArraySizeV3")
def size(node: Node, given: Sequence[Given]) -> Results:
    """A number that no example changes."""
    return [(SIZE, SCALAR)]


@_rule("TensorArrayCloseV3")
def close(node: Node, given: Sequence[Given]) -> Results:
    """Return nothing."""
    return []


@_rule("TensorListReserve", "EmptyTensorList", shapes=(0,))
def empty_list(node: Node, given: Sequence[Given]) -> Results:
    """A list without elements, or of zeros of the shape of what is written."""
    length = _count(given[1].values) if node.type == "TensorListReserve" else None
    return [(EMPTY._replace(length=length), SCALAR)]


@_rule("TensorListFromTensor", shapes=(1,))
def list_from_tensor(node: Node, given: Sequence[Given]) -> Results:
    """Take a tensor apart."""
    dims = given[0].dims
    length = dims[0][0] if dims[0] else None
    return [(list_of(_elements_of(given[0]), _without_first(dims), length), SCALAR)]


@_rule("TensorListStack", shapes=(1,))
def stack_list(node: Node, given: Sequence[Given]) -> Results:
    """Join all elements."""
    held = _list(given[0])
    attribute = node.proto.attr["num_elements"].i
    length = attribute if attribute >= 0 else held.length
    return [(_stacked(held.element), _with_first(length, held.dims or UNKNOWN))]


@_rule("TensorListGetItem", shapes=(2,))
def get_item(node: Node, given: Sequence[Given]) -> Results:
    """One element."""
    _is_plain(given[1])
    held = _list(given[0])
    return [(held.element, held.dims or UNKNOWN)]


@_rule("TensorListSetItem")
def set_item(node: Node, given: Sequence[Given]) -> Results:
    """One element."""
    _is_plain(given[1])
    held = _list(given[0])
    return [(_with(held, given[2].state, given[2].dims, held.length), SCALAR)]


@_rule("TensorListPushBack")
def push_back(node: Node, given: Sequence[Given]) -> Results:
    """One more element."""
    held = _list(given[0])
    return [(_with(held, given[1].state, given[1].dims, None), SCALAR)]


@_rule("TensorListPopBack", shapes=(1,))
def pop_back(node: Node, given: Sequence[Given]) -> Results:
    """One element less."""
    held = _list(given[0])
    return [(held._replace(length=None), SCALAR), (held.element, held.dims or UNKNOWN)]


@_rule("TensorListLength")
def length_of(node: Node, given: Sequence[Given]) -> Results:
    """A number that no example changes."""
    return [(SIZE, SCALAR)]


@_rule("TensorListElementShape")
def element_shape(node: Node, given: Sequence[Given]) -> Results:
    """The shape of the elements, which may have any number of examples."""
    raise Meets("the shape of elements is not followed")


def _is_plain(index: Given) -> None:
    """Raise if an index depends on the examples themselves."""
    if index.state is not None and index.state.kind not in ("size", "whole"):
        raise Meets("its index depends on the examples")


@_rule("LookupTableFind", "LookupTableFindV2")
def find_in_table(node: Node, given: Sequence[Given]) -> Results:
    """A value for each key, of the shape of the default value. No list, but its shape is not inferred either."""
    if given[2].dims[0] != []:
        raise Meets("the shape of its values is not known")
    return [(given[1].state, given[1].dims)]


STACK_KINDS = ("StackV2", "Stack")
PUSHES = ("StackPushV2", "StackPush")
POPS = ("StackPopV2", "StackPop")


def pushed(held: Optional[State], value: Given) -> State:
    """Return what a stack holds with one more element."""
    return _with(held or EMPTY, value.state, value.dims, None)


def popped(held: Optional[State]) -> Tuple[Optional[State], Pair]:
    """Return the state and shape of an element of a stack."""
    return (None, UNKNOWN) if held is None else (held.element, held.dims or UNKNOWN)
