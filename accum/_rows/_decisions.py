"""One pass over the nodes of a graph decides by the rules where the examples lie, and where they meet.

A loop is repeated until it hands back what it begins with. A missing rule costs memory, since its operation is computed
on the joined rows; a wrong one would cost exactness. So whatever is not proven is said to meet.
"""

import operator
from typing import Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from accum import _tf
from accum._rows import _axes, _elementwise, _images, _products, _reductions
from accum._rows._effects import Effects, has_effect
from accum._rows._flat_graph import MERGES, NEXT, WITHIN, FlatGraph, Key, Node, node_of
from accum._rows._known_shapes import OF_SHAPE, KnownShapes
from accum._rows._lists import (
    LIST_RULES,
    LISTS,
    ON_LISTS,
    PLACES,
    POPS,
    PUSHES,
    SCALAR,
    STACK_KINDS,
    STACKED,
    UNKNOWN,
    Given,
    Result,
    popped,
    pushed,
)
from accum._rows._numbers import Numbers
from accum._rows._partitions import GATHERS, KINDS, STITCHES, is_share, results_of
from accum._rows._rules import OPAQUE, RULES, SHAPES, Meets, Op, Outcome, multiples_of
from accum._rows._shapes import ALIASES, COUNTS, Lengths, NotMade, Shapes
from accum._rows._states import (
    SIZE,
    Layout,
    Pair,
    Rows,
    State,
    depends,
    either,
    either_dims,
    joined,
    level_of,
    list_of,
    rows_at,
    whole,
)
from accum._rows._values import SIZES, Values, are_compared_for_all, constant_of, is_constant
from accum._tf import tf

RULED = (_axes, _elementwise, _images, _products, _reductions)
"""The files whose functions are in the table of rules."""

ELEMENTWISE = {*_elementwise.UNARY, *_elementwise.SEVERAL}
"""Operations of which no input says how long an axis of the output is."""

COMPARISONS = ("Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual")
EXTREMES = ("Minimum", "Maximum")

ROUNDS = 4
"""After so many repetitions, what a loop hands back with ever more reductions before it is said to have met."""


class Guess(NamedTuple):
    """What is assumed of the user's graph.

    Attributes:
      others: what is added to `Lengths`, those of other axes of the batch that are unknown, in a third graph;
        None if they stay unknown.
      scalars: whether placeholders of unknown rank, such as a rate of dropout, are scalars.
    """

    others: Optional[int]
    scalars: bool


class Decision(NamedTuple):
    """What is said of a node."""

    kind: str
    how: str = ""


def may_be_scalar(graph: tf.Graph, node: Node) -> bool:
    """Whether a node is a placeholder of the user's, of unknown rank, for which a guess is needed.

    In a function, such placeholders stand for its arguments and for what it captures, and nobody tells of the guess.
    """
    if node.type != "Placeholder" or node.name != node.owner or _tf.graphs.is_function(graph):
        return False
    tensor = graph.get_tensor_by_name(node.outputs[0])
    return tensor.shape.rank is None and tensor.dtype not in (tf.resource, tf.variant)


class Decisions:
    """Decides the state of every tensor."""

    def __init__(
        self,
        graph: tf.Graph,
        flat: FlatGraph,
        inputs: Dict[str, Rows],
        guess: Guess,
        with_places: bool,
        other_lengths: Lengths,
    ) -> None:
        self.graph, self.flat, self.inputs, self.guess = graph, flat, inputs, guess
        self._with_places, self._other_lengths = with_places, other_lengths
        self.states: Dict[Key, Optional[State]] = {}
        self.values: Dict[Key, Optional[Values]] = {}
        self.decisions: Dict[str, Decision] = {}
        self.scalars: List[str] = []
        self.unruled: List[str] = []
        self.nodes = {node.name: node for unit in flat.units for node in unit}
        self._back: Dict[str, Tuple[Optional[State], Pair]] = {}
        self._stacks: Dict[str, State] = {}
        self._guards: Dict[str, Optional[State]] = {}
        self._same: Set[Key] = set()
        self._compared: Set[Key] = set()
        self._unsure: Set[Key] = set()  # what is perhaps as long as the batch for the numbers of `COUNTS` alone
        self._unfit: Set[str] = set()  # nodes in a branch that is for other lengths of axes than the assumed ones
        self._independent = self._independent_nodes()
        is_any = any(None in self._lengths_beside(name) for name in inputs)
        count = 3 if guess.others is not None and is_any else 2
        is_open = all(self._dims_of_input(name)[rows.axis] is None for name, rows in inputs.items())
        self.numbers = Numbers(self.nodes, self.values, self.counts)
        self.shapes = Shapes(graph, inputs, count, is_open)
        self._known_shapes = KnownShapes(
            graph, self.nodes, inputs, self.shapes, self.values, self.numbers, self._unsure
        )
        self._effects = Effects(flat, self.nodes, inputs)
        for name, rows in inputs.items():
            self._begin(name, rows)
        for unit in flat.units:
            self._decide_unit(unit)

    # What is given

    def _dims_of_input(self, name: str) -> List[Optional[int]]:
        shape = self.graph.get_tensor_by_name(name).shape
        if shape.rank is None:
            raise ValueError(
                f"The rank of each tensor of the batch must be known. Received: {name}, of unknown shape."
                " [accum: unknown-shape]"
            )
        return shape.as_list()

    def _lengths_beside(self, name: str) -> List[Optional[int]]:
        dims = self._dims_of_input(name)
        return dims[: self.inputs[name].axis] + dims[self.inputs[name].axis + 1 :]

    def _begin(self, name: str, rows: Rows) -> None:
        layout = Layout(*rows)
        pair = []
        tensor = self.graph.get_tensor_by_name(name)
        for count, more in ((COUNTS[0], 0), (COUNTS[1], 0), (COUNTS[0], self.guess.others)):
            dims = self._dims_of_input(name)
            for axis, length in enumerate(dims):
                if axis == layout.axis:
                    dims[axis] = layout.factor * count
                elif length is None and more is not None and self.guess.others is not None:
                    dims[axis] = self._other_lengths.of(tensor, axis) + more
            pair.append(dims)
        self.shapes.give(name, tuple(pair), tensor.dtype.base_dtype.as_datatype_enum)
        self.states[name] = rows_at(layout, 0)

    def _independent_nodes(self) -> Dict[str, bool]:
        """Return {name: whether a node takes nothing that depends on the batch}."""
        takers: Dict[str, List[str]] = {}
        for node in self.nodes.values():
            for key in node.inputs:
                takers.setdefault(key if key in self.inputs else node_of(key), []).append(node.name)
        reached: Set[str] = set()
        waiting = [name for key in self.inputs for name in takers.get(key, ())]
        waiting += [node.name for node in self.nodes.values() if node.type in POPS or node.type in LIST_RULES]
        while waiting:
            name = waiting.pop()
            if name not in reached:
                reached.add(name)
                waiting.extend(takers.get(name, ()))
        return {name: name not in reached for name in self.nodes}

    # The order of decisions

    def _decide_unit(self, unit: List[Node]) -> None:
        merges = [node for node in unit if node.is_loop_merge]
        for round_ in range(40):
            held = dict(self._stacks)
            self._decide_all(unit)
            changes = [self._hand_back(merge, round_) for merge in merges]
            if not any(changes) and held == self._stacks or not merges:
                return
        raise AssertionError(f"the loop of {unit[0].owner} does not settle")

    def _decide_all(self, nodes: Sequence[Node]) -> None:
        pending: List[Node] = []
        for node in nodes:
            if node.outputs and all(key in self.inputs for key in node.outputs):
                continue
            if node.is_loop_merge or node.type in LIST_RULES or node.type in STACK_KINDS + PUSHES + POPS:
                self._decide_pending(pending)
                self._decide_apart(node)
            elif node.type in STITCHES:
                self._decide_pending(pending)
                self._decide_pending([node])
            elif self._known_shapes.may_tell(node, self._independent[node.name]):
                self._decide_pending(pending)
                self._decide_shaped(node)
            else:
                pending.append(node)
        self._decide_pending(pending)

    def _decide_pending(self, pending: List[Node]) -> None:
        nodes = []
        for node in pending:
            if self._take_scalar(node):
                continue
            nodes.append(node)
        self._add_shapes(nodes)
        for node in pending:
            self._note_order(node)
            self._decide(node)
        pending.clear()

    def _add_shapes(self, nodes: List[Node]) -> None:
        """Infer the shapes of nodes. Those in branches of TF 1 may not fit, as what is for one time step alone."""
        while True:
            try:
                self.shapes.add(nodes, self._independent)
                return
            except NotMade as failure:
                node = failure.node
                op = self.graph.get_operation_by_name(node.owner)
                if _tf.graphs.outermost_frame(op) is None or _tf.graphs.is_within_loop(op):
                    raise
                self._unfit.add(node.name)
                nodes = [one for one in nodes if one is not node]
                for key, dtype in zip(node.outputs, node.dtypes):
                    self.shapes.give(key, (None, None, None), dtype)

    def _decide_shaped(self, node: Node) -> None:
        """Decide a node whose shape may follow from all that is decided before it."""
        pair = self._known_shapes.dims_of(node)
        if pair is None:
            self.shapes.add([node], self._independent)
        else:
            self.shapes.give(node.outputs[0], pair, node.dtypes[0])
        self._note_order(node)
        self._decide(node)

    def _take_scalar(self, node: Node) -> bool:
        """Assume that a placeholder of unknown rank is a scalar."""
        if not self.guess.scalars or not may_be_scalar(self.graph, node) or node.outputs[0] in self.inputs:
            return False
        self.scalars.append(node.outputs[0])
        self.shapes.give(node.outputs[0], SCALAR, node.dtypes[0])
        return True

    def _note_order(self, node: Node) -> None:
        sources = [node_of(key) for key in node.inputs] + node.controls
        guards = [self._guards.get(source) for source in sources]
        if node.type in ("Switch", "RefSwitch"):
            guards.append(self.states.get(node.inputs[1]))
        kept = [guard for guard in guards if guard is not None and guard.kind in ("size", "whole", "joined")]
        self._guards[node.name] = either(kept) if kept else None
        self._effects.follow(node, sources)

    # Loops

    def _decide_apart(self, node: Node) -> None:
        self._note_order(node)
        if node.is_loop_merge:
            results = [self._merged(node), Result(None, SCALAR)]
        elif node.type in LIST_RULES:
            results = self._of_list(node)
        else:
            results = self._of_stack(node)
        for key, dtype, result in zip(node.outputs, node.dtypes, results):
            self.states[key] = result.state
            self.values[key] = result.values
            if result.state == SIZE and result.values is not None:
                self._same.add(key)
            self.shapes.give(key, result.dims, dtype)
        if node.is_loop_merge and node.dtypes[0] == tf.resource.as_datatype_enum and self._hands_back_itself(node):
            self.shapes.hand_on(self._entering(node), node.outputs[0])  # with the shape of the variable

    def _entering(self, merge: Node) -> Key:
        """Return what a loop begins with."""
        return next(key for key in merge.inputs if self._type_of(key) not in NEXT)

    def _merged(self, node: Node) -> Result:
        first = self._entering(node)
        state, dims = self.states.get(first), self.shapes.dims(first)
        if node.name in self._back:
            back, back_dims = self._back[node.name]
            state, dims = either([state, back]), either_dims(dims, back_dims)
        if _is_new_meeting(state, [self.states.get(key) for key in node.inputs]):
            self._meet(node, "what the loop hands back has the examples on another axis than what it begins with")
        else:
            self._say(node, self._kind_of(state))
        if state == SIZE and first in self._same and self._hands_back_itself(node):
            self._same.add(node.outputs[0])
        return Result(state, dims)

    def _hand_back(self, merge: Node, round_: int) -> bool:
        """Note what a loop hands back; return whether that is more than before."""
        (key,) = [key for key in merge.inputs if self._type_of(key) in NEXT]
        state, dims = self.states.get(key), self.shapes.dims(key)
        before = self._back.get(merge.name)
        if before is not None:
            state, dims = either([before[0], state]), either_dims(before[1], dims)
        current = self.states.get(merge.outputs[0]), self.shapes.dims(merge.outputs[0])
        new = either([current[0], state]), either_dims(current[1], dims)
        if round_ >= ROUNDS and new[0] != current[0]:
            state = (
                joined(level_of(current[0]) + 1) if current[0] is None or current[0].kind != "joined" else current[0]
            )
            new = state, new[1]
        self._back[merge.name] = state, dims
        return new != current

    def _type_of(self, key: Key) -> str:
        node = self.nodes.get(node_of(key))
        return node.type if node is not None else ""

    # Lists and stacks

    def _given(self, node: Node) -> List[Given]:
        return [Given(self.states.get(key), self.shapes.dims(key), self.values.get(key)) for key in node.inputs]

    def _of_list(self, node: Node) -> List[Result]:
        given = self._given(node)
        level = max((level_of(one.state) for one in given), default=0)
        try:
            met = [one for one in given if one.state is not None and one.state.kind == "joined"]
            results = [] if met else LIST_RULES[node.type](node, given)
            if not met and node.type in PLACES and self.counts(node.inputs[PLACES[node.type]]):
                raise Meets("the place of an element, or how many there are, depends on the number of examples")
        except Meets as reason:
            self._meet(node, str(reason))
            return [Result(joined(level + 1), self._dims_of_stack(node)) for _ in node.dtypes]
        if met:
            self._say(node, "behind")
            return [Result(joined(level), self._dims_of_stack(node)) for _ in node.dtypes]
        results = [
            result if result.values is not None else result._replace(state=_at_least(result.state, level))
            for result in results
        ]
        kinds = [self._kind_of(result.state) for result in results]
        if any(depends(one.state) for one in given):
            self._say(node, worst([*kinds, "size"]))
        return results

    def _dims_of_stack(self, node: Node) -> Pair:
        """Return the shape of the elements of a list, in which examples have met, as one tensor.

        They are as many as there are examples, if the list was made for that number; the program may know other axes.
        """
        if node.type not in STACKED or node.name != node.owner:
            return UNKNOWN
        key = node.inputs[0]
        while self._type_of(key) in (*ALIASES, *MERGES, "Identity"):
            source = self.nodes[node_of(key)]
            if not source.is_loop_merge and source.type in MERGES:
                return UNKNOWN
            index = int(key.rsplit(":", 1)[1]) if source.type == "IdentityN" else 0
            key = self._entering(source) if source.is_loop_merge else source.inputs[index]
        shape = self.graph.get_operation_by_name(node.name).outputs[0].shape
        made = self.nodes[node_of(key)]
        sizes = (
            self.values.get(made.inputs[-1]) if made.type in LISTS and not made.proto.attr["dynamic_size"].b else None
        )
        if sizes is None or not shape.rank or any(map(operator.ne, sizes, SIZES)) or not self._takes_all(node, made):
            return UNKNOWN
        return tuple([count, *shape.as_list()[1:]] for count in (*COUNTS, COUNTS[0]))

    def _takes_all(self, node: Node, made: Node) -> bool:
        """Whether an operation takes all elements of a list, in their order."""
        if node.type != "TensorArrayGatherV3":
            return True
        places = self.nodes[node_of(node.inputs[1])]
        if places.type != "Range":
            return False
        return places.inputs[1] == made.inputs[-1] or self._type_of(places.inputs[1]) == "TensorArraySizeV3"

    def _of_stack(self, node: Node) -> List[Result]:
        if node.type in STACK_KINDS:
            return [Result(None, UNKNOWN)]
        stack, given = self._creator(node.inputs[0]), self._given(node)
        if node.type in PUSHES:
            self._stacks[stack] = pushed(self._stacks.get(stack), given[1])
            result = Result(*given[1])
        else:
            result = popped(self._stacks.get(stack))
        if result.state is not None:
            self._say(node, self._kind_of(result.state))
        return [result]

    def _creator(self, key: Key) -> str:
        """Return the name of the node that has made a handle, which may have been passed through loops."""
        node = self.nodes[node_of(key)]
        while node.inputs and node.type not in STACK_KINDS:
            index = int(key.rsplit(":", 1)[1]) if node.type == "IdentityN" else 0
            key = node.inputs[index]
            node = self.nodes[node_of(key)]
        return node.name

    # One operation

    def _decide(self, node: Node) -> None:
        states = [self.states.get(key) for key in node.inputs]
        if node.type == "Const":
            results: List[Optional[State]] = [None]
            self._keep_values(node, [constant_of(node)])
        elif node.type in ALIASES:
            results = self._handed_on(node, states)
            inputs = node.inputs if node.type == "IdentityN" else node.inputs[:1] * len(node.dtypes)
            is_alike = node.type in ("Enter", "RefEnter", "IdentityN", "Switch", "RefSwitch")
            self._keep_values(node, [self.values.get(key) if is_alike else None for key in inputs])
        else:
            results = self._computed(node, states)
            # Of a length with a limit, shapes are known for two numbers of examples alone.
            is_guess = node.type in OF_SHAPE and node.type != "Rank" and any(map(self.counts, node.inputs))
            self._keep_values(node, [None] * len(node.dtypes) if is_guess else self._known_shapes.values_of(node))
        is_unsure = any(map(self._unsure.__contains__, node.inputs)) or self._takes_a_limit(node, states)
        if is_unsure or self._seems_as_long(node, results):
            self._unsure.update(node.outputs)
        for key, state in zip(node.outputs, results):
            if key not in self.inputs:
                self.states[key] = state
                self._note_size(node, key)

    def _seems_as_long(self, node: Node, results: Sequence[Optional[State]]) -> bool:
        """Whether a number that is no multiple of the examples, but seems one, says how long axes are."""
        has_met = any(state is not None and state.kind in ("joined", "whole") for state in results)
        may_be_any = has_met and node.type not in ELEMENTWISE
        keys = [key for index, key in enumerate(node.inputs) if may_be_any or index in SHAPES.get(node.type, ())]
        numbers = map(self.values.get, keys)
        return not self._compared.isdisjoint(keys) or any(
            values is not None and _seems_multiple(values) for values in numbers
        )

    def _takes_a_limit(self, node: Node, states: Sequence[Optional[State]]) -> bool:
        """Whether rows may be as long on an axis as a number that is no multiple of the examples, as `k` in `top_k`.

        Where such a number is the same for those of `COUNTS`, so are the inferred shapes.
        """
        if node.type not in RULES or node.type in ELEMENTWISE or not any(map(has_rows, states)):
            return False
        numbers = [self.values.get(key) for key in node.inputs if self.is_count(key)]
        lengths = [values for values in numbers if values is not None and np.issubdtype(values[0].dtype, np.integer)]
        return not all(_are_regular(values) for values in lengths if len({value.shape for value in values}) == 1)

    def _note_size(self, node: Node, key: Key) -> None:
        """Note whether a size is the same for any number of examples."""
        values = self.values.get(key)
        sizes = [one for one in node.inputs if self.states.get(one) == SIZE]
        is_same = values is not None and all(np.array_equal(value, values[0]) for value in values)
        if self._is_compared(node, key, is_same):
            self._compared.add(key)
        else:
            self._compared.discard(key)
        is_same = is_same and key not in self._compared
        is_chosen = node.type in MERGES and self._guards[node.name] is not None  # by a size, or by less
        is_of_same = values is None and sizes and self._same.issuperset(sizes) and not is_chosen
        if self.states[key] == SIZE and (is_same or is_of_same):
            self._same.add(key)
        else:
            self._same.discard(key)

    def _is_compared(self, node: Node, key: Key, is_same: bool) -> bool:
        """Whether a size follows from a comparison that another number of examples than those of `SIZES` may change.

        Such as `tf.shape(x)[0] == 22`, one with two limits, or `tf.maximum(0, 3 - abs(tf.shape(x)[0] - 22))`.
        """
        if self.states[key] != SIZE:  # not of the lengths of rows that are computed with it, either
            return False
        if not self._compared.isdisjoint(node.inputs):
            return True
        if node.type in EXTREMES:
            return is_same and not are_compared_for_all(*map(self.values.get, node.inputs))
        if node.dtypes[node.outputs.index(key)] != tf.bool.as_datatype_enum:
            return False
        is_any = node.type not in COMPARISONS or are_compared_for_all(*map(self.values.get, node.inputs))
        return not (is_same and is_any)

    def _check_numbers(self, node: Node) -> None:
        """Raise if a function takes a number that depends on how many examples there are.

        Elsewhere such a number can be that of the whole batch. A function that runs on a part of it only has that of
        the part, which is right for a shape.
        """
        for index, key in enumerate(node.inputs if WITHIN in node.name else ()):
            is_shape = index in SHAPES.get(node.type, ())
            is_axis = node.type in _reductions.REDUCTIONS and index == 1 and is_constant(self.values.get(key))
            if self.counts(key) and not is_shape and not is_axis:
                raise Meets("within a function, it takes a number that depends on how many examples there are")

    def _check_lengths(self, node: Node) -> None:
        """Raise unless each length that an operation takes is the same for any batch, or a multiple of its examples.

        The scratch graphs only have two large batches, for which `tf.minimum(n, 10)` is a constant.
        """
        for index in SHAPES.get(node.type, ()):
            key = node.inputs[index] if index < len(node.inputs) else ""
            values = self.values.get(key)
            if not self.is_count(key):
                continue
            if values is None or key in self._compared:
                raise Meets("how a length depends on the number of examples is not known")
            if not _are_regular(values):
                raise Meets("a length depends on the number of examples, and is no multiple of it")

    def _keep_values(self, node: Node, values: Sequence[Optional[Values]]) -> None:
        self.values.update(zip(node.outputs, values))

    def _handed_on(self, node: Node, states: List[Optional[State]]) -> List[Optional[State]]:
        if node.type in ("Switch", "RefSwitch"):
            predicate = states[1]
            is_known_later = predicate is not None and predicate.kind in ("whole", "joined")
            is_behind = is_known_later and not self._is_invariant(node)
            if has_rows(states[0]) and self._is_chosen_within(node):
                self._meet(node, "within a function, a choice depends on how many examples there are")
                return [joined(level_of(states[0]) + 1)] * 2
            results = [_behind(states[0], predicate) if is_behind else states[0]] * 2
        elif node.type in _tf.op_walks.EXITS:
            switch = self.nodes[node_of(node.inputs[0])]
            counts = switch.type in ("Switch", "RefSwitch") and not self._is_invariant(switch)
            is_size = counts and states[0] is None and self.states.get(switch.inputs[1]) is not None
            state = SIZE if is_size else states[0]
            is_filled = counts and state is not None and state.kind == "list" and not depends(state)
            if state is not None and is_filled and self.is_count(switch.inputs[1]):
                state = state._replace(element=SIZE)  # as many as there are examples
            results = [state]
        elif node.type == "IdentityN":
            results = states
        else:
            results = states[:1]
        kinds = [self._kind_of(state) for state in results]
        if any(depends(state) for state in results):
            self._say(node, worst(kinds))
        return results

    def _is_chosen_within(self, switch: Node) -> bool:
        """Whether a predicate, of a loop or in a function, depends on how many examples there are."""
        predicate = switch.inputs[1]
        is_loop = self._type_of(predicate) == "LoopCond"
        is_within = switch.name.count(WITHIN) > (0 if is_loop else 1)
        return is_within and self.counts(predicate)

    def _is_invariant(self, switch: Node) -> bool:
        """Whether a loop hands back what it was given."""
        merge = self.nodes.get(node_of(switch.inputs[0]))
        return merge is not None and merge.is_loop_merge and self._hands_back_itself(merge)

    def _hands_back_itself(self, merge: Node) -> bool:
        (key,) = [key for key in merge.inputs if self._type_of(key) in NEXT]
        while self._type_of(key) in ALIASES and not self._is_switch_of(key, merge):
            node = self.nodes[node_of(key)]
            key = node.inputs[int(key.rsplit(":", 1)[1]) if node.type == "IdentityN" else 0]
        return self._is_switch_of(key, merge)

    def _is_switch_of(self, key: Key, merge: Node) -> bool:
        node = self.nodes.get(node_of(key))  # None: a tensor of the batch
        return node is not None and node.type in ("Switch", "RefSwitch") and node_of(node.inputs[0]) == merge.name

    def _computed(self, node: Node, states: List[Optional[State]]) -> List[Optional[State]]:
        level = max((level_of(state) for state in states), default=0)
        if self._effects.reads_changed(node):
            self._meet(node, "it reads what was changed by the batch in the same run")
            return [joined(level + 1) for _ in node.dtypes]
        if node.name in self._unfit:
            self._meet(node, "the shapes of its operands do not fit in general")
            return [joined(level + 1) for _ in node.dtypes]
        if node.type in MERGES:
            return self._chosen(node, states)
        if not any(depends(state) for state in states):
            is_handed_on = node.type == "Identity"  # an empty list stays one
            return states[:1] if is_handed_on else [None] * len(node.dtypes)
        if any(state is not None and state.kind == "joined" for state in states):
            self._effects.note(node)
            self._say(node, "behind")
            return [joined(level) for _ in node.dtypes]
        try:
            return self._by_rule(node, states, level)
        except Meets as reason:
            self._meet(node, str(reason))
            return [joined(level + 1) for _ in node.dtypes]

    def _chosen(self, node: Node, states: List[Optional[State]]) -> List[Optional[State]]:
        """Return the state of what is one of several branches."""
        state = either(states)
        guard = self._guards[node.name]
        if guard is not None:
            state = _behind(state, guard)
            if guard.kind == "size" and state is not None and state.kind == "list" and not depends(state):
                self._meet(node, "a list is chosen by how many examples there are")
                return [joined(level_of(state) + 1), SIZE]
        if depends(state):
            if _is_new_meeting(state, states):
                self._meet(node, "its branches have the examples on different axes")
            else:
                self._say(node, self._kind_of(state))
        return [state, SIZE if guard is not None and guard.kind == "size" else (None if guard is None else guard)]

    def _by_rule(self, node: Node, states: List[Optional[State]], level: int) -> List[Optional[State]]:
        if has_effect(node):
            self._effects.note(node)
            if "PyFunc" in node.type:
                self.unruled.append(node.type)
            raise Meets("it has an effect")
        is_of_share = any(map(is_share, states)) and node.type in GATHERS
        if self._with_places and (is_of_share or (node.type in KINDS and self._is_about_rows(node, states))):
            return self._of_shares(node, level)
        if any(state is not None and state.kind == "list" for state in states):
            return self._on_lists(node, states)
        if node.type in OF_SHAPE:
            return self._of_shape(node, states)
        pairs = [self.shapes.dims(key) for key in node.outputs]
        is_of_rows = any(has_rows(state) for state in states)
        if not is_of_rows and not any(_depends_on_count(pair) for pair in pairs):
            return self._of_numbers(node, states, level, pairs)
        if node.type not in RULES:
            self.unruled.append(node.type)
            raise Meets(f"no rule for {node.type}")
        self._check_numbers(node)
        self._check_lengths(node)
        given = self._given(node)
        op = Op(node, states, [one.dims for one in given], [one.values for one in given], pairs, self.numbers)
        outcome = RULES[node.type](op)
        if not isinstance(outcome, Outcome):
            outcome = Outcome([outcome] * len(node.dtypes))
        return self._checked(op, outcome, pairs, level)

    def _checked(self, op: Op, outcome: Outcome, pairs: Sequence[Pair], level: int) -> List[Optional[State]]:
        """Return the states of outputs, after a look at their shapes."""
        reduces = outcome.how not in ("", "random")
        results: List[Optional[State]] = []
        for index in SHAPES.get(op.type, ()):
            state, (first, *_) = op.states[index] if index < op.count else None, outcome.outputs
            places = self.numbers.places(op.node.inputs[index]) if state is not None and state.counts else []
            if places is None or any(not isinstance(first, Layout) or place != first.axis for place in places):
                raise Meets("the length of another axis depends on the number of examples")
        for pair, layout in zip(pairs, outcome.outputs):
            if isinstance(layout, str):
                first = outcome.outputs[0]
                element = rows_at(first, level) if isinstance(first, Layout) else None
                results.append(list_of(element, UNKNOWN) if layout == OPAQUE else None)
                continue
            found = multiples_of(pair) if pair[0] is not None else {}
            expected = {} if layout is None else {layout.axis: layout.factor}
            if layout is not None and pair[0] is None or found != expected:
                raise Meets("the length of an axis of its output is not as the rule says")
            if op.type not in ELEMENTWISE and op.has_size() and (pair[0] is None or None in pair[0]):
                raise Meets("the length of an axis of its output is not known")
            behind = level + (reduces and (layout is None or outcome.is_behind))
            results.append(whole(behind) if layout is None else rows_at(layout, behind))
        self._say(op.node, "reduces" if reduces else "rows", outcome.how)
        return results

    def _of_numbers(
        self, node: Node, states: List[Optional[State]], level: int, pairs: Sequence[Pair]
    ) -> List[Optional[State]]:
        """Return the states of what is computed from sizes and results of reductions."""
        is_whole = any(state is not None and state.kind == "whole" for state in states)
        is_shaped = all(pair[0] is not None and None not in pair[0] for pair in pairs)
        if not is_whole and not is_shaped and None in self._known_shapes.values_of(node):
            raise Meets("its shape is not known")
        self._say(node, "behind" if is_whole else "size")
        counts = any(map(self.counts, node.inputs))
        return [whole(level, counts) if is_whole else SIZE] * len(pairs)

    def _is_about_rows(self, node: Node, states: List[Optional[State]]) -> bool:
        return any(map(has_rows, states)) or any(map(self.is_count, node.inputs))

    def _of_shares(self, node: Node, level: int) -> List[Optional[State]]:
        """Return the states of rows, or of their places, that go to parts of a table and come back."""
        results = results_of(node, self._given(node), self.shapes.dims(node.outputs[0]), level)
        for key, dtype, result in zip(node.outputs, node.dtypes, results):
            self.shapes.give(key, result.dims, dtype)
        self._say(node, "rows")
        return [result.state for result in results]

    def _of_shape(self, node: Node, states: List[Optional[State]]) -> List[Optional[State]]:
        for key, state in zip(node.inputs, states):
            dims = self.shapes.dims(key)
            is_known = dims[0] is not None and (node.type == "Rank" or None not in dims[0])
            if not is_known:
                raise Meets("the shape of its input is not known")
            if not has_rows(state) and node.type != "Rank" and _depends_on_count(dims):
                raise Meets("the shape of its input depends on the number of examples")
        self._say(node, "size")
        return [SIZE] * len(node.dtypes)

    def _on_lists(self, node: Node, states: List[Optional[State]]) -> List[Optional[State]]:
        takes_opaque = node.type.startswith("FusedBatchNormGrad") and states[5:] and has_rows(states[0])
        if takes_opaque:
            return self._by_rule(node, states[:5] + [None], max(level_of(state) for state in states))
        if node.type not in ON_LISTS:
            raise Meets(f"no rule for {node.type} of a list")
        state = either(states)
        if state is not None and node.type == "ZerosLike":
            state = state._replace(share=None)  # zeros are no places of rows
        self._say(node, self._kind_of(state))
        return [state] * len(node.dtypes)

    def _say(self, node: Node, kind: str, how: str = "") -> None:
        """Note a decision; within a loop, what has met, or was reduced, in an earlier round remains so."""
        before = self.decisions.get(node.name)
        if before is None or before.kind not in ("meets", "reduces") or kind == "meets":
            self.decisions[node.name] = Decision(kind, how)

    def _meet(self, node: Node, why: str) -> None:
        self._effects.note(node)
        self._say(node, "meets", why)

    def is_count(self, key: Key) -> bool:
        """Whether a size may differ for other numbers of examples, unlike how many steps there are in each of them."""
        return self.states.get(key) == SIZE and key not in self._same

    def counts(self, key: Key) -> bool:
        """Whether a number may differ for other numbers of examples, also if it depends on a reduction as well."""
        state = self.states.get(key)
        return self.is_count(key) or (state is not None and state.counts)

    def layout_of(self, key: Key) -> Optional[Layout]:
        """Return the `Layout` of a tensor of rows, unless both its numbers may depend on the lengths of other axes."""
        state = self.states.get(key)
        layout = None if state is None else state.layout
        if layout is None or 1 in layout.along or self._is_fixed(key, layout):
            return layout
        return None

    def _is_fixed(self, key: Key, layout: Layout) -> bool:
        return self.shapes.is_the_same_for_other_lengths(key, layout.axis)

    def rows_of(self, key: Key) -> Optional[Rows]:
        """Return the `Rows` of a tensor, if slices of it hold some examples."""
        layout = self.layout_of(key)
        return layout.rows if layout is not None and self._is_fixed(key, layout) else None

    def is_as_long_as_the_batch(self, key: Key) -> bool:
        """Whether the first axis of a tensor, and no other, is as long as there are examples."""
        one, other = self.shapes.dims(key)[:2]
        if key in self._unsure or not one or not other or (one[0], other[0]) != COUNTS or one[1:] != other[1:]:
            return False
        return self.shapes.is_the_same_for_other_lengths(key, 0)

    def _kind_of(self, state: Optional[State]) -> str:
        if not depends(state) or state is None:
            return "independent"
        if state.kind == "list":
            return self._kind_of(state.element)
        return {"rows": "rows", "size": "size"}.get(state.kind, "behind")


def _behind(state: Optional[State], predicate: Optional[State]) -> Optional[State]:
    """Return the state of a tensor that is there, or not, by a predicate."""
    if predicate is None or state is None or state.kind not in ("rows", "list"):
        return either([state, predicate])
    return joined(level_of(predicate)) if predicate.kind == "joined" else _at_least(state, level_of(predicate))


def _are_regular(values: Values) -> bool:
    """Whether integers are each the same for any number of examples, or a multiple of it."""
    lengths = np.stack([np.ravel(value) for value in values])
    per_example = lengths[0] // SIZES[0]
    is_same, is_multiple = lengths == lengths[:1], lengths == np.outer(SIZES, per_example)
    return bool(np.all(is_same.all(axis=0) | is_multiple.all(axis=0)))


def _seems_multiple(values: Values) -> bool:
    """Whether integers are multiples of the number of examples, or none, for those of `COUNTS` but not for others."""
    if not np.issubdtype(values[0].dtype, np.integer):
        return False
    if len({value.shape for value in values}) > 1:
        return True
    numbers = np.stack([np.ravel(value) for value in values])
    is_multiple = numbers == np.outer(SIZES, numbers[0] // SIZES[0])
    return bool(np.any(is_multiple[: len(COUNTS)].all(axis=0) & ~is_multiple.all(axis=0)))


def _is_new_meeting(state: Optional[State], states: Sequence[Optional[State]]) -> bool:
    """Whether examples have met in a tensor that is one of several, in none of which they have."""
    was_joined = any(one is not None and one.kind == "joined" for one in states)
    return state is not None and state.kind == "joined" and not was_joined


def has_rows(state: Optional[State]) -> bool:
    """Whether a state is that of rows, or of a list of them."""
    return state is not None and (state.kind == "rows" or (state.kind == "list" and has_rows(state.element)))


def _at_least(state: Optional[State], level: int) -> Optional[State]:
    """Return a state behind at least so many reductions."""
    if state is None or state.kind == "size":
        return whole(level, counts=state is not None) if level else state
    if state.level >= level:
        return state
    if state.kind == "list":
        is_fixed = state.dims is None or state.values is not None  # empty, or whichever element is taken is the same
        return state._replace(level=level, element=state.element if is_fixed else _at_least(state.element, level))
    return state._replace(level=level)


def _depends_on_count(pair: Pair) -> bool:
    return pair[0] is not None and pair[0] != pair[1]


_ORDER = ("meets", "reduces", "rows", "behind", "size", "independent")


def worst(kinds: Sequence[str]) -> str:
    return min(kinds, key=_ORDER.index)
