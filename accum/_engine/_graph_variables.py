"""The variables of a traced function: what it reads and assigns is made a function of the graph's inputs (law L19).

- A variable is read once, before the batch. What reads it after an assignment takes what was assigned.
- If the function assigns a value that does not depend on the batch, it is assigned once. Where the value needs no
  statistic of the batch, it is computed before the batch.
- Any other operation that can't be repeated is "drawn": it runs in the forward phase, and its result is kept.
"""

from typing import Any, Dict, List, NamedTuple, Sequence, Set, Tuple

from accum import _check, _tf
from accum._engine._leveled_graph import Key, LeveledGraph
from accum._engine._trace import Unrepeatable
from accum._tf import tf
from accum._tf.graph_parts import name_of


class Assigned(NamedTuple):
    """What the function assigns to a variable.

    Attributes:
      handle: that of the variable, outside of the graph.
      value: key of its last value.
      operations: names of the operations that assign to it.
    """

    handle: tf.Tensor
    value: Key
    operations: List[str]


class GraphVariables:
    """The variables of a `LeveledGraph`, in which what reads them takes other tensors from then on.

    Attributes:
      read: {key in the graph: handle of the variable that is read once, before the batch}.
      read_between: handles of variables of floats that are read behind an assignment, but not as `assigned_first`.
      assigned: list of `Assigned`, what is assigned once.
      assigned_first: {key of the value in the graph: `Assigned`}, what is known before the batch.
      assigned_at_once: {which of `trace.wholes`: list of `Assigned`, what it assigns}.
      moved: handles of the variables to which each micro-batch assigns.
    """

    def __init__(self, graph: LeveledGraph) -> None:
        self._graph = graph
        self.read: Dict[Key, tf.Tensor] = {}
        self.read_between: List[tf.Tensor] = []
        self.assigned: List[Assigned] = []
        self.assigned_first: Dict[Key, Assigned] = {}
        self.assigned_at_once: Dict[int, List[Assigned]] = {}
        self.moved: List[tf.Tensor] = []
        self._assigns: List[str] = []  # names of all operations that assign
        self._dropped: Set[str] = set()  # those of them in whose place something else assigns
        self._reads: Dict[Key, List[Key]] = {}  # handle in the graph -> what has read the variable
        self._read_once()
        graph.find_levels()
        self._forward_state()
        self._find_drawn()
        self._assign_first()

    def read_as(self) -> List[Tuple[Key, tf.Tensor]]:
        """Return the keys of the values as which variables are read, each with the handle of the variable."""
        return [*self.read.items(), *((key, final.handle) for key, final in self.assigned_first.items())]

    def effects(self, of_gradients: bool) -> Dict[int, List[str]]:
        """Return {level: names of operations that only have an effect}, of the forward or the backward pass."""
        graph = self._graph
        by_level: Dict[int, List[str]] = {}
        for name in graph.ordered:
            if (name in graph.gradients) != of_gradients or name in self._dropped or name in graph.islands:
                continue
            if name in self._assigns or (name not in graph.drawn and graph.library.only_acts(graph.nodes[name])):
                by_level.setdefault(graph.levels[name] or 0, []).append(name)
        return by_level

    def effects_at_once(self, number: int) -> List[str]:
        """Return the names of operations that only have an effect, and run with what one of `trace.wholes` computes."""
        graph = self._graph
        own = [name for name in graph.ordered if graph.islands.get(name) == number and name not in graph.gradients]
        acting = [name for name in own if name not in self._assigns and graph.library.only_acts(graph.nodes[name])]
        return [
            name for name in acting if all(self._is_at_once(key, number) for key in graph.inputs(graph.nodes[name]))
        ]

    def _is_at_once(self, key: Key, number: int) -> bool:
        graph = self._graph
        return graph.level(key) is None or graph.islands.get(name_of(key)) == number

    def _read_once(self) -> None:
        """Let all phases have the value that a variable has now, whatever is assigned to it before the gradient."""
        graph = self._graph
        assigned = {node.inputs[0] for node in graph.nodes.values() if _tf.op_walks.is_assignment(node.type)}
        for node in list(graph.nodes.values()):
            if node.type == "ReadVariableOp" and node.inputs[0] in graph.captures and node.inputs[0] not in assigned:
                graph.aliases[f"{node.name}:0"] = self._state_of(node.inputs[0], _dtype(node))

    def _state_of(self, handle: Key, dtype: tf.DType) -> Key:
        """Return the key of a placeholder for the value of a variable before the batch."""
        key = self._state_key(handle)
        if key not in self.read:
            self._graph.add(_tf.graph_parts.new_node(name_of(key), "Placeholder", [], dtype=dtype))
            self.read[key] = self._graph.captures[handle]
        return key

    def _state_key(self, handle: Key) -> Key:
        return f"accum_state/{name_of(handle)}:0"

    def _forward_state(self) -> None:
        """Let what reads a variable after an assignment in the function use what was assigned."""
        graph = self._graph
        created = [
            node
            for node in graph.nodes.values()
            if node.type == "ReadVariableOp" or _tf.op_walks.is_assignment(node.type)
        ]
        assigned: Dict[Key, List[str]] = {}
        for node in created:
            if _tf.op_walks.is_assignment(node.type) and node.inputs[0] in graph.captures:
                assigned.setdefault(node.inputs[0], []).append(node.name)
        self._assigns = [name for names in assigned.values() for name in names]
        self._reads = {handle: [] for handle in assigned}
        if not assigned:
            self._require_repeatable()
            return
        finals = self._forward([node for node in created if node.inputs[0] in assigned])
        graph.find_levels()
        once = [final for final in finals.values() if graph.is_of_batch(final)]
        reached = graph.reached(graph.data_fetches() + once)
        for handle, final in finals.items():
            outside = graph.captures[handle]
            if graph.is_of_batch(final):
                self.assigned.append(Assigned(outside, final, assigned[handle]))
                self._dropped.update(assigned[handle])
                continue
            if name_of(final) in graph.islands:
                own = self.assigned_at_once.setdefault(graph.islands[name_of(final)], [])
                own.append(Assigned(outside, final, assigned[handle]))
                self._dropped.update(assigned[handle])
                continue
            self.moved.append(outside)
            if name_of(self._state_key(handle)) not in reached:  # only its own next value depends on it
                reads = [node.name for node in created if node.type == "ReadVariableOp" and node.inputs[0] == handle]
                for name in reads:
                    graph.aliases.pop(f"{name}:0", None)
                self.read.pop(self._state_key(handle), None)
        graph.find_levels()
        self._require_repeatable()

    def _forward(self, nodes: Sequence[Any]) -> Dict[Key, Key]:
        """Let what reads variables use what was assigned to them before. Returns {handle: key of its last value}.

        Args:
          nodes: those that assign to the variables or read them, in the order in which they were created.
        """
        graph = self._graph
        values: Dict[Key, Key] = {}
        for node in nodes:
            handle = node.inputs[0]
            if node.type not in ("ReadVariableOp", "AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"):
                raise ValueError(
                    "With `whole_batch`, a layer can't assign to parts of a variable: assign to all of it. Received: "
                    f"{node.name!r}, a {node.type}. [accum: whole-batch-loop]"
                )
            current = values.get(handle) or self._state_of(handle, _dtype(node))
            if node.type == "ReadVariableOp":
                graph.aliases[f"{node.name}:0"] = values[handle] = current
                self._reads[handle].append(f"{node.name}:0")
                continue
            added = graph.aliases.get(node.inputs[1], node.inputs[1])
            values[handle] = added
            if node.type != "AssignVariableOp":
                kind, name = "AddV2" if node.type == "AssignAddVariableOp" else "Sub", f"accum_next/{node.name}"
                graph.add(_tf.graph_parts.new_node(name, kind, [current, added], T=_dtype(node)))
                values[handle] = f"{name}:0"
        return values

    def _find_drawn(self) -> None:
        """Find what can be computed only once: what has a state, but is no variable."""
        graph = self._graph
        for name in graph.reached(graph.data_fetches()):
            node = graph.nodes[name]
            if name not in self._dropped and graph.library.is_stateful(node) and node.type not in _tf.graph_parts.CALLS:
                graph.drawn.add(name)
        if not graph.drawn:
            return
        graph.find_levels()
        for final in [final for final in self.assigned if not graph.is_of_batch(final.value)]:  # it is drawn
            self.assigned.remove(final)
            self.moved.append(final.handle)
            self._dropped.difference_update(final.operations)

    def _assign_first(self) -> None:
        """Let what reads a variable behind its last assignment take a value that is known before the batch."""
        graph = self._graph
        if not self._reads:
            return
        first = {id(final.handle): final for final in self.assigned if graph.level(final.value) is None}
        self.assigned = [final for final in self.assigned if id(final.handle) not in first]
        numbers = {name: number for number, name in enumerate(graph.nodes)}  # in the order of their creation
        assigns_of: Dict[Key, List[str]] = {}
        for name in sorted(self._assigns, key=numbers.__getitem__):
            assigns_of.setdefault(graph.nodes[name].inputs[0], []).append(name)
        between: List[Tuple[Key, tf.Tensor]] = []
        # What is assigned last may read what was assigned before, and not the other way round.
        for handle in sorted(assigns_of, key=lambda one: numbers[assigns_of[one][-1]]):
            assigns, outside = assigns_of[handle], graph.captures[handle]
            dtype = _dtype(graph.nodes[assigns[0]])
            behind = [key for key in self._reads[handle] if numbers[name_of(key)] > numbers[assigns[0]]]
            if id(outside) in first:
                key = f"accum_assigned/{name_of(handle)}:0"
                graph.add(_tf.graph_parts.new_node(name_of(key), "Placeholder", [], dtype=dtype))
                self.assigned_first[key] = first[id(outside)]
                last = [one for one in behind if numbers[name_of(one)] > numbers[assigns[-1]]]
                graph.aliases.update((one, key) for one in last)
                behind = [one for one in behind if one not in last]
            between += [(one, outside) for one in behind if dtype.is_floating or dtype.is_complex]
        if self.assigned_first:
            graph.find_levels()
        reached = graph.reached(graph.data_fetches())
        taken = {key for name in reached for key in graph.nodes[name].inputs}.union(graph.data_fetches())
        self.read_between = [outside for key, outside in between if key in taken]
        self._require_plain_reads()

    def _require_plain_reads(self) -> None:
        """Raise if a variable is assigned to, and then read by other operations than those that are replaced.

        What decides over the value that is assigned first may be such an operation, as in a spectral normalisation.
        """
        graph = self._graph
        kinds = _tf.graph_parts.CALLS | {"ResourceGather", "ResourceGatherNd"}
        late = [final.value for finals in [self.assigned, *self.assigned_at_once.values()] for final in finals]
        effects = [
            name for of_gradients in (False, True) for names in self.effects(of_gradients).values() for name in names
        ]
        others = graph.reached([*graph.data_fetches(), *late, *effects])
        begun = set()  # handles that have been assigned to
        for name, node in graph.nodes.items():
            if name in self._assigns:
                begun.add(node.inputs[0])
            handles = self._reads.keys() & set(node.inputs) if node.type in kinds else set()
            if handles and (name in others or handles & begun or graph.library.hidden(node)):
                raise Unrepeatable(
                    "With `whole_batch`, a layer can't assign to a variable and also look up rows of it, or read it "
                    "within a loop, a conditional or a function of its own: read all of it first, with "
                    f"`tf.convert_to_tensor`{_check.OR_AT_ONCE}. Received: {name!r}."
                    " [accum: whole-batch-loop]"
                )

    def _require_repeatable(self) -> None:
        """Raise if a loop, conditional or function in the graph draws random numbers or changes a variable.

        What is there for such a change alone is no result of the graph, so it would run for no micro-batch, or for all.
        """
        graph = self._graph
        reached = graph.reached(graph.data_fetches())
        for name, node in graph.nodes.items():
            hidden = graph.library.changes(node)
            if name in reached and node.type in _tf.graph_parts.CALLS:
                hidden |= graph.library.hidden(node)
            if hidden:
                raise Unrepeatable(
                    "With `whole_batch`, each micro-batch is computed again, and must be the same. Within a loop, "
                    "a conditional or a function of its own, a layer draws random numbers, assigns to a variable, or "
                    "calls Python, which may draw (`tf.numpy_function(…, stateful=False)` says that it does not); or "
                    f"it fills a table or a queue: do that before it{_check.OR_AT_ONCE}. Received: {name!r}, with "
                    f"{sorted(hidden)}. [accum: whole-batch-loop]"
                )


def _dtype(node: Any) -> tf.DType:
    return tf.as_dtype(node.proto.attr["dtype"].type)
