"""Cut a traced graph at its barriers into phases, each a part of the graph (law L19).

The level of an operation is the largest number of barriers on any path to it, or None if it does not depend on the
batch. The gradient of an operation belongs to the same level. So each level has a forward phase and a backward phase.
The edges of the graph define the inputs that a phase takes from other phases:

    forward 0 -> forward 1 -> ... -> outputs -> loss -> ... -> backward 1 -> backward 0 -> weights

Operations that do not depend on the batch, such as those that read a variable, are repeated in each phase that needs
them. Their gradients are computed once, from sums over the micro-batches, in the phase `weights`.

Three kinds of operations are not functions of the graph's inputs, and are made so:
- A random operation takes its examples' share of the random numbers of the batch; see `_draws`.
- If the function assigns a value that does not depend on the batch, the variable is read once and assigned once. Where
  no statistic of the batch is needed for the value, it is computed before the batch.
- Any other operation that can't be repeated runs in the forward phase, and its result is kept.
"""

import functools
from typing import Any, Callable, Container, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

from accum import _tf
from accum._engine._trace import SCOPE, Trace, Unrepeatable, WholeMark
from accum._tf import tf
from accum._tf.graph_parts import name_of

Key = str
WEIGHTS = -1
"""The level of the gradients of what does not depend on the batch."""
JOIN_ROWS = ("ConcatV2", "UnsortedSegmentSum")
"""What takes the rows of `tf.IndexedSlices`, whose places do not add up as gradients do."""


class Phase(NamedTuple):
    """A part of the graph.

    Attributes:
      level: int.
      fetches: keys of what it computes.
      effects: names of operations that run with it.
      nodes: names of its operations, in the order in which they were created.
      feeds: keys of what it takes.
    """

    level: int
    fetches: List[Key]
    effects: List[str]
    nodes: List[str]
    feeds: List[Key]


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


class CutGraph:
    """A `Trace` in phases.

    Attributes:
      trace: the same.
      forward: list of the forward `Phase` of each level.
      backward: list of the backward `Phase` of each level.
      wholes: list of the forward phases of what is called with the whole batch, one for each of `trace.wholes`.
      wholes_backward: list of their backward phases.
      weights: the `Phase` that ends the gradients by what does not depend on the batch.
      uses: {key of a tensor that later phases use: (its level, forward levels that use it, backward levels)}.
      drawn: names of operations that can't be computed again, and are always kept.
      late: {key of a gradient that a backward phase computes for others: the last level, the lowest, that takes it}.
      summed: keys that the backward phases compute for `weights`.
      assigned: list of `Assigned`, what is assigned once.
      assigned_first: {key of the value in the graph: `Assigned`}, what is known before the batch.
      assigned_at_once: {which of `wholes`: list of `Assigned`, what it assigns}.
      first: list of the phases that compute `assigned_first`, one for each, in an order in which they can.
      finals: the `Phase` that computes `assigned`.
      read_between: handles of variables of floats that are read behind an assignment, but not as `assigned_first`.
      states: {key in the graph: handle of the variable that is read once, before the batch}.
      moved: handles of the variables to which each micro-batch assigns.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._graph_def = trace.graph.as_graph_def()
        self._nodes = _tf.graph_parts.nodes_of(self._graph_def)
        self._library = _tf.graph_parts.Library(trace.graph, self._graph_def)
        self._captures = {key: outside for outside, key in trace.captures}
        self._of_trace = set(self._nodes)
        self._aliases: Dict[Key, Key] = {}
        self._order_of: Dict[str, int] = {}
        self.states: Dict[Key, tf.Tensor] = {}
        self.drawn: Set[str] = set()
        self.assigned: List[Assigned] = []
        self.assigned_first: Dict[Key, Assigned] = {}
        self.assigned_at_once: Dict[int, List[Assigned]] = {}
        self.read_between: List[tf.Tensor] = []
        self.moved: List[tf.Tensor] = []
        self._end_without_effect()
        self._read_once()
        self._order()
        self._find_levels()
        self._forward_state()
        self._find_drawn()
        self._assign_first()
        self._everywhere = self._counts() if trace.compiled else set()
        self._cut()

    # ------------------------------------------------------------------------------------------------------------
    # The graph

    def _inputs(self, node: Any) -> List[Key]:
        return [self._aliases.get(key, key) for key in node.inputs]

    def _end_without_effect(self) -> None:
        """Let the gradient be 0 by what is called with the whole batch, or by what it returns, but has no effect."""
        for whole in self.trace.wholes:
            ends = list(zip(whole.result_cotangents, whole.results, whole.part_grads))
            ends += zip(whole.input_cotangents, whole.inputs, whole.argument_grads)
            for cotangent, tensor, grad in ends:
                if cotangent is not None and grad is None:
                    zeros = f"accum_zeros/{name_of(cotangent)}"
                    dtype = self.trace.graph.get_tensor_by_name(tensor).dtype
                    self._add(_tf.graph_parts.new_node(zeros, "ZerosLike", [tensor], T=dtype))
                    self._aliases[cotangent] = f"{zeros}:0"

    def _read_once(self) -> None:
        """Let all phases have the value that a variable has now, whatever is assigned to it before the gradient."""
        assigned = {node.inputs[0] for node in self._nodes.values() if _tf.op_walks.is_assignment(node.type)}
        for node in list(self._nodes.values()):
            if node.type == "ReadVariableOp" and node.inputs[0] in self._captures and node.inputs[0] not in assigned:
                self._aliases[f"{node.name}:0"] = self._state_of(node.inputs[0], _dtype(node))

    def require_unchanged(self, graph: tf.Graph, operations: Sequence[tf.Operation]) -> None:
        """Raise if operations assign to a variable that is read anew for the gradient: a table, or within a loop."""
        read = {key for phase in self.forward + self.backward + self.wholes for key in phase.feeds} & set(
            self._captures
        )
        outside = [self._captures[key] for key in sorted(read) if self._captures[key].dtype == tf.resource]
        handles = {id(_tf.graph_parts.captured(handle)) for handle in outside}
        changed = _tf.op_walks.assigned_handles(graph, operations)
        changed |= {id(op.inputs[0]) for op in operations if _tf.op_walks.changes_variable(op)}
        if handles & changed:
            raise ValueError(
                "With `whole_batch`, the gradient of a network must be computed before an embedding in it, or a "
                "variable that it reads in a loop, is updated: call `tape.gradient` before `apply_gradients`."
                " [accum: whole-batch-gradient]"
            )

    def _state_of(self, handle: Key, dtype: tf.DType) -> Key:
        """Return the key of a placeholder for the value of a variable before the batch."""
        key = self._state_key(handle)
        if key not in self.states:
            self._add(_tf.graph_parts.new_node(name_of(key), "Placeholder", [], dtype=dtype))
            self.states[key] = self._captures[handle]
        return key

    def _order(self) -> None:
        """Sort the operations such that each comes after what it takes, and what is behind a barrier after that."""
        waits: Dict[str, List[Key]] = {}
        for mark in self.trace.statistics:
            for key in [mark.number, mark.mean, mark.variance] + mark.begins:
                waits[name_of(key)] = list(mark.moments)
        for whole in self.trace.wholes:
            for key in whole.arguments:
                waits[name_of(key)] = whole.inputs
            for key in whole.parts:
                waits[name_of(key)] = whole.results
        self._waits = waits
        done: Set[str] = set()
        self._ordered: List[str] = []
        for first in self._nodes:
            stack = [(first, False)]
            while stack:
                name, is_ready = stack.pop()
                if is_ready:
                    self._ordered.append(name)
                elif name not in done:
                    done.add(name)
                    stack.append((name, True))
                    for key in self._inputs(self._nodes[name]) + waits.get(name, []):
                        if name_of(key) not in done:
                            stack.append((name_of(key), False))
        self._order_of = {name: number for number, name in enumerate(self._ordered)}

    def level(self, key: Key) -> Optional[int]:
        """Return the level of a tensor, None if it does not depend on the batch."""
        return self._levels[name_of(key)]

    def _find_levels(self) -> None:
        trace = self.trace
        self._levels: Dict[str, Optional[int]] = {}
        self._islands: Dict[str, int] = {}  # operations that run with the whole batch -> which of `trace.wholes`
        shared = {name_of(key) for mark in trace.statistics for key in (mark.number, mark.mean, mark.variance)}
        behind = shared | {name_of(key) for mark in trace.statistics for key in mark.begins}
        arguments = {name_of(key): number for number, whole in enumerate(trace.wholes) for key in whole.arguments}
        parts = {name_of(key) for whole in trace.wholes for key in whole.parts}
        inputs = {name_of(key) for key in trace.inputs + [trace.share, trace.position]}
        cotangents = self._cotangents()
        is_gradient: Dict[str, bool] = {}
        self._own: Set[str] = set()  # what is another for each micro-batch
        for name in self._ordered:
            node = self._nodes[name]
            before = [name_of(key) for key in self._inputs(node)]
            is_gradient[name] = name in cotangents or any(is_gradient[one] for one in before)
            is_drawn = name in self.drawn and name not in self._islands
            if name in inputs or name in parts or is_drawn or any(one in self._own for one in before):
                self._own.add(name)
            levels = [self._levels[one] for one in before if not is_gradient[one]]
            levels += [self._levels[name_of(key)] for key in self._waits.get(name, [])]
            level = max([one for one in levels if one is not None], default=None)
            if name in inputs or (name in self.drawn and level is None):
                level = 0
            elif name in arguments or name in behind:
                level = 0 if level is None else level + 1
            elif name in parts:
                level = (level or 0) + 1
            islands = [self._islands[one] for one in before if one in self._islands and not is_gradient[one]]
            if name in arguments:
                self._islands[name] = arguments[name]
            elif islands and name not in parts:
                self._islands[name] = islands[0]
            self._levels[name] = level
        self._gradients = {name for name, flag in is_gradient.items() if flag}
        self._find_levels_of_gradients(cotangents)
        self.count = 1 + max([level for level in self._levels.values() if level is not None], default=0)

    def _counts(self) -> Set[str]:
        """Return the names of operations that compute integers from shapes alone.

        XLA must know a number of examples that shapes another tensor, and forgets what a loop has kept of it. So each
        phase computes it anew. It knows the shape of a tensor that has been kept.
        """
        counts: Set[str] = set()
        for name in self._ordered:
            node = self._nodes[name]
            before = {name_of(key) for key in self._inputs(node)}
            dependent = {one for one in before if self._levels[one] is not None}
            is_count = bool(dependent) and (node.type in ("Shape", "ShapeN", "Size") or dependent <= counts)
            is_alone = (
                name in self._of_trace
                and name not in self._islands
                and name not in self._gradients
                and name not in self._waits
            )
            if is_count and is_alone and name not in self.drawn:
                outputs = self.trace.graph.get_operation_by_name(name).outputs
                if outputs and all(output.dtype.is_integer or output.dtype.is_bool for output in outputs):
                    counts.add(name)
        return counts

    def _cotangents(self) -> Dict[str, Key]:
        """Return {name of a placeholder: the tensor by which it is the gradient}."""
        trace = self.trace
        pairs = list(zip(trace.cotangents, trace.outputs)) + [(loss.cotangent, loss.value) for loss in trace.losses]
        for mark in trace.statistics:
            pairs += [(key, mark.moments.mean) for key in mark.cotangents]
        for whole in trace.wholes:
            pairs += list(zip(whole.result_cotangents, whole.results)) + list(zip(whole.input_cotangents, whole.inputs))
        return {name_of(self._aliases.get(one, one)): other for one, other in pairs if one}  # type: ignore[arg-type]

    def _find_levels_of_gradients(self, cotangents: Dict[str, Any]) -> None:
        users: Dict[str, List[str]] = {}
        forward: Dict[str, Optional[str]] = {}
        for name in self._ordered:
            if name in self._gradients:
                forward[name] = self._differentiated(name)
                for key in self._inputs(self._nodes[name]):
                    users.setdefault(name_of(key), []).append(name)
        ends = {name_of(grad) for grad in self.trace.grads if isinstance(grad, str)}
        is_weights: Dict[str, bool] = {}
        for name in reversed(self._ordered):
            if name in self._gradients and name not in cotangents:
                one = forward[name]
                if one is not None:  # casts come before sums, which have more digits than what is cast
                    is_weights[name] = self._levels[one] is None and self._nodes[name].type != "Cast"
                else:
                    uses = users.get(name, [])
                    all_are = all(is_weights[use] for use in uses) and (bool(uses) or name in ends)
                    is_weights[name] = self._nodes[name].type == "AddN" and all_are
        for name in self._ordered:
            if name in cotangents:
                level, made_by = self.level(cotangents[name]), name_of(cotangents[name])
                self._levels[name] = WEIGHTS if level is None else level
                if made_by in self._islands and name not in self._input_cotangents():
                    self._islands[name] = self._islands[made_by]
            elif name in self._gradients:
                before = [name_of(key) for key in self._inputs(self._nodes[name])]
                one = forward[name]
                levels = [self._levels[before_it] for before_it in before if before_it in self._gradients]
                levels += [] if one is None else [self._levels[one]]
                joins = self._nodes[name].type in JOIN_ROWS
                known = {level for level in levels if level is not None}
                if joins and WEIGHTS in known and len(known) > 1:
                    raise Unrepeatable(
                        "rows of a variable are looked up by the examples, and others independently of them: look the "
                        f"latter up in a variable of their own. Received: {name!r}. [accum: whole-batch-gradient]"
                    )
                self._levels[name] = WEIGHTS if is_weights[name] and not joins else min(known)
                islands = {self._islands.get(before_it) for before_it in before if before_it in self._gradients}
                number = next(iter(islands)) if one is None and len(islands) == 1 else self._islands.get(one or "")
                if number is not None:
                    self._islands[name] = number

    def _input_cotangents(self) -> Set[str]:
        return {name_of(key) for whole in self.trace.wholes for key in whole.input_cotangents if key is not None}

    def _differentiated(self, name: str) -> Optional[str]:
        """Return the name of the operation whose gradient an operation computes, or None."""
        if not name.startswith(SCOPE + "/"):
            return None
        end = len(name)
        while end > 0:
            end = name.rfind("_grad/", 0, end)
            if end > 0 and name[len(SCOPE) + 1 : end] in self._nodes:
                return name[len(SCOPE) + 1 : end]
        return None

    # ------------------------------------------------------------------------------------------------------------
    # State and random numbers

    def _data_fetches(self) -> List[Key]:
        wholes = [key for whole in self.trace.wholes for key in whole.inputs + whole.results]
        return self._forward_keys() + wholes + self._grad_keys()

    def _forward_keys(self) -> List[Key]:
        trace = self.trace
        keys = trace.outputs + [loss.value for loss in trace.losses]
        keys += [key for moments, _ in trace.moments for key in moments]
        return keys + [key for mark in trace.statistics for key in mark.moments]

    def _reached(self, keys: Iterable[Key]) -> Set[str]:
        """Return the names of the operations from which tensors are computed."""
        names: Set[str] = set()
        stack = [name_of(key) for key in keys]
        while stack:
            name = stack.pop()
            if name not in names:
                names.add(name)
                stack += [name_of(key) for key in self._inputs(self._nodes[name])]
                stack += [name_of(key) for key in self._waits.get(name, [])]
        return names

    def _forward_state(self) -> None:
        """Let what reads a variable after an assignment in the function use what was assigned."""
        created = [
            node
            for node in self._nodes.values()
            if node.type == "ReadVariableOp" or _tf.op_walks.is_assignment(node.type)
        ]
        assigned: Dict[Key, List[str]] = {}
        for node in created:
            if _tf.op_walks.is_assignment(node.type) and node.inputs[0] in self._captures:
                assigned.setdefault(node.inputs[0], []).append(node.name)
        self._assigns = [name for names in assigned.values() for name in names]
        self._reads: Dict[Key, List[Key]] = {handle: [] for handle in assigned}
        self._dropped: Set[str] = set()
        if not assigned:
            self._require_repeatable()
            return
        finals = self._forward([node for node in created if node.inputs[0] in assigned])
        self._order()
        self._find_levels()
        once = [final for final in finals.values() if self._is_of_batch(final)]
        reached = self._reached(self._data_fetches() + once)
        for handle, final in finals.items():
            outside = self._captures[handle]
            if self._is_of_batch(final):
                self.assigned.append(Assigned(outside, final, assigned[handle]))
                self._dropped.update(assigned[handle])
                continue
            if name_of(final) in self._islands:
                own = self.assigned_at_once.setdefault(self._islands[name_of(final)], [])
                own.append(Assigned(outside, final, assigned[handle]))
                self._dropped.update(assigned[handle])
                continue
            self.moved.append(outside)
            if name_of(self._state_key(handle)) not in reached:  # only its own next value depends on it
                reads = [node.name for node in created if node.type == "ReadVariableOp" and node.inputs[0] == handle]
                for name in reads:
                    self._aliases.pop(f"{name}:0", None)
                self.states.pop(self._state_key(handle), None)
        self._order()
        self._find_levels()
        self._require_repeatable()

    def _is_of_batch(self, key: Key) -> bool:
        """Whether a tensor is the same for all micro-batches, and known without what is called with all of them."""
        return name_of(key) not in self._own and name_of(key) not in self._islands

    def _state_key(self, handle: Key) -> Key:
        return f"accum_state/{name_of(handle)}:0"

    def read_as(self) -> List[Tuple[Key, tf.Tensor]]:
        """Return the keys of the values as which variables are read, each with the handle of the variable."""
        return [*self.states.items(), *((key, final.handle) for key, final in self.assigned_first.items())]

    def _forward(self, nodes: Sequence[Any]) -> Dict[Key, Key]:
        """Let what reads variables use what was assigned to them before. Returns {handle: key of its last value}.

        Args:
          nodes: those that assign to the variables or read them, in the order in which they were created.
        """
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
                self._aliases[f"{node.name}:0"] = values[handle] = current
                self._reads[handle].append(f"{node.name}:0")
                continue
            added = self._aliases.get(node.inputs[1], node.inputs[1])
            values[handle] = added
            if node.type != "AssignVariableOp":
                kind, name = "AddV2" if node.type == "AssignAddVariableOp" else "Sub", f"accum_next/{node.name}"
                self._add(_tf.graph_parts.new_node(name, kind, [current, added], T=_dtype(node)))
                values[handle] = f"{name}:0"
        return values

    def _assign_first(self) -> None:
        """Let what reads a variable behind its last assignment take a value that is known before the batch."""
        if not self._reads:
            return
        first = {id(final.handle): final for final in self.assigned if self.level(final.value) is None}
        self.assigned = [final for final in self.assigned if id(final.handle) not in first]
        numbers = {name: number for number, name in enumerate(self._nodes)}  # in the order of their creation
        assigns_of: Dict[Key, List[str]] = {}
        for name in sorted(self._assigns, key=numbers.__getitem__):
            assigns_of.setdefault(self._nodes[name].inputs[0], []).append(name)
        between: List[Tuple[Key, tf.Tensor]] = []
        # What is assigned last may read what was assigned before, and not the other way round.
        for handle in sorted(assigns_of, key=lambda one: numbers[assigns_of[one][-1]]):
            assigns, outside = assigns_of[handle], self._captures[handle]
            dtype = _dtype(self._nodes[assigns[0]])
            behind = [key for key in self._reads[handle] if numbers[name_of(key)] > numbers[assigns[0]]]
            if id(outside) in first:
                key = f"accum_assigned/{name_of(handle)}:0"
                self._add(_tf.graph_parts.new_node(name_of(key), "Placeholder", [], dtype=dtype))
                self.assigned_first[key] = first[id(outside)]
                last = [one for one in behind if numbers[name_of(one)] > numbers[assigns[-1]]]
                self._aliases.update((one, key) for one in last)
                behind = [one for one in behind if one not in last]
            between += [(one, outside) for one in behind if dtype.is_floating or dtype.is_complex]
        if self.assigned_first:
            self._order()
            self._find_levels()
        reached = self._reached(self._data_fetches())
        taken = {key for name in reached for key in self._nodes[name].inputs}.union(self._data_fetches())
        self.read_between = [outside for key, outside in between if key in taken]
        self._require_plain_reads()

    def _require_plain_reads(self) -> None:
        """Raise if a variable is assigned to, and then read by other operations than those that are replaced.

        What decides over the value that is assigned first may be such an operation, as in a spectral normalisation.
        """
        kinds = _tf.graph_parts.CALLS | {"ResourceGather", "ResourceGatherNd"}
        late = [final.value for finals in [self.assigned, *self.assigned_at_once.values()] for final in finals]
        effects = [
            name for of_gradients in (False, True) for names in self._effects(of_gradients).values() for name in names
        ]
        others = self._reached([*self._data_fetches(), *late, *effects])
        begun = set()  # handles that have been assigned to
        for name, node in self._nodes.items():
            if name in self._assigns:
                begun.add(node.inputs[0])
            handles = self._reads.keys() & set(node.inputs) if node.type in kinds else set()
            if handles and (name in others or handles & begun or self._library.hidden(node)):
                raise Unrepeatable(
                    "With `whole_batch`, a layer can't assign to a variable and also look up rows of it, or read it "
                    "within a loop, a conditional or a function of its own: read all of it first, with "
                    f"`tf.convert_to_tensor`, or pass `whole_batch=()`. Received: {name!r}."
                    " [accum: whole-batch-loop]"
                )

    def spec(self, key: Key) -> tf.TensorSpec:
        """Return shape and dtype of a tensor of a micro-batch."""
        return _tf.graph_parts.spec_of(self.trace.graph, self._nodes[name_of(key)], key)

    def _add(self, node: Any) -> None:
        self._nodes[node.name] = node

    def _require_repeatable(self) -> None:
        """Raise if a loop, conditional or function in the graph draws random numbers or assigns to a variable."""
        for name in self._reached(self._data_fetches()):
            node = self._nodes[name]
            hidden = self._library.hidden(node) if node.type in _tf.graph_parts.CALLS else set()
            if hidden:
                raise Unrepeatable(
                    "With `whole_batch`, each micro-batch is computed again, and must be the same. Within a loop, "
                    "a conditional or a function of its own, a layer draws random numbers, assigns to a variable, or "
                    "calls Python, which may draw (`tf.numpy_function(…, stateful=False)` says that it does not): do "
                    f"that before it, or pass `whole_batch=()`. Received: {name!r}, with {sorted(hidden)}."
                    " [accum: whole-batch-loop]"
                )

    def is_cotangent(self, key: Key) -> bool:
        """Whether a placeholder stands for a gradient of the loss of the batch."""
        return name_of(key) in self._cotangents()

    def _find_drawn(self) -> None:
        """Find what can be computed only once: what has a state, but is no variable."""
        for name in self._reached(self._data_fetches()):
            node = self._nodes[name]
            if name not in self._dropped and self._library.is_stateful(node) and node.type not in _tf.graph_parts.CALLS:
                self.drawn.add(name)
        if not self.drawn:
            return
        self._order()
        self._find_levels()
        for final in [final for final in self.assigned if not self._is_of_batch(final.value)]:  # it is drawn
            self.assigned.remove(final)
            self.moved.append(final.handle)
            self._dropped.difference_update(final.operations)

    # ------------------------------------------------------------------------------------------------------------
    # Phases

    def _cut(self) -> None:
        trace, count = self.trace, self.count
        self.uses: Dict[Key, Tuple[int, Set[int], Set[int]]] = {}
        self.late: Dict[Key, int] = {}
        self.summed: Set[Key] = set()
        fetches: Dict[int, List[Key]] = {level: [] for level in range(WEIGHTS, count)}
        islands: Dict[int, List[Key]] = {number: [] for number, _ in enumerate(trace.wholes)}

        def add(key: Key) -> None:
            name = name_of(key)
            own = islands[self._islands[name]] if name in self._islands else fetches[self._levels[name] or 0]
            if self._levels[name] == WEIGHTS:
                own = fetches[WEIGHTS]
            if key not in own:
                own.append(key)

        pairs = [grad for grad in trace.grads if isinstance(grad, tuple)]
        places: Dict[Key, Key] = dict(pairs)
        for key in self._grad_keys():
            if key not in places.values():
                add(key)
        for own in [*fetches.values(), *islands.values()]:  # the places of rows are taken with the rows
            own += dict.fromkeys(places[key] for key in own if places.get(key, key) not in own)
        self.weights = self._phase(WEIGHTS, fetches[WEIGHTS], [], lambda name: self._levels[name] in (None, WEIGHTS))
        for key in self.weights.feeds:
            if name_of(key) in self._gradients and not self._is_base(key):
                add(key)
                self.summed.add(key)
        self.backward: List[Phase] = []
        effects = self._effects(of_gradients=True)
        for level in range(count):
            phase = self._phase(
                level, fetches[level], effects.get(level, []), functools.partial(self._is_within, level, False)
            )
            for key in phase.feeds:
                self._use(key, level, add)
            self.backward.append(phase)
        self.wholes_backward = []
        for number, whole in enumerate(trace.wholes):
            phase = self._phase(
                self.level(whole.results[0]) or 0, islands[number], [], functools.partial(self._is_island, number)
            )
            self._require_arguments(whole, phase)
            again = self.drawn.intersection(phase.nodes)
            if again:
                raise ValueError(f"the gradient of what is computed with the whole batch would draw again: {again}")
            self.wholes_backward.append(phase)
        self._cut_forward()

    def _grad_keys(self) -> List[Key]:
        trace = self.trace
        keys = [key for mark in trace.statistics for key in mark.grads if key is not None]
        for whole in trace.wholes:
            keys += [key for key in whole.argument_grads + whole.part_grads if key is not None]
        for grad in trace.grads:
            keys += [] if grad is None else [grad] if isinstance(grad, str) else list(grad)
        return keys + [key for key in trace.watched_grads if key is not None]

    def _use(self, key: Key, level: int, add: Callable[[Key], None]) -> None:
        """Note that a backward phase takes a tensor."""
        name = name_of(key)
        if self._is_base(key):
            return
        if name in self._gradients or (self._levels[name] or 0) > level:
            add(key)
            self.late.setdefault(key, level)  # levels are cut in order
        else:
            self._used(key)[2].add(level)

    def _used(self, key: Key) -> Tuple[int, Set[int], Set[int]]:
        return self.uses.setdefault(key, (self.level(key) or 0, set(), set()))

    def _cut_forward(self) -> None:
        trace, count = self.trace, self.count
        wanted: Dict[int, List[Key]] = {level: [] for level in range(count)}
        for key in self._forward_keys():
            wanted[self.level(key) or 0].append(key)
        self.wholes = []
        for number, whole in enumerate(trace.wholes):
            fetches = whole.results + [final.value for final in self.assigned_at_once.get(number, [])]
            phase = self._phase(
                self.level(whole.arguments[0]) or 0, fetches, [], functools.partial(self._is_island, number)
            )
            self._require_arguments(whole, phase)
            self.wholes.append(phase)
            for key in whole.inputs:
                self._used(key)[1].add(phase.level)
                self._used(key)[2].add(phase.level)
        for name in self._reached([key for key, (_, _, backward) in self.uses.items() if backward]):
            for key in self._inputs(self._nodes[name]):  # of what is computed again
                if name_of(key) in self.drawn and name_of(key) not in self._islands:
                    self._used(key)[2].add(self.level(key) or 0)
        effects = self._effects(of_gradients=False)
        phases = {}
        for level in reversed(range(count)):
            keys = list(dict.fromkeys(wanted[level] + [key for key, use in self.uses.items() if use[0] == level]))
            keys = [key for key in keys if not self._is_base(key)] + [key for key in keys if self._is_base(key)]
            phase = self._phase(level, keys, effects.get(level, []), functools.partial(self._is_within, level, True))
            for key in phase.feeds:
                if not self._is_base(key):
                    self._used(key)[1].add(level)
            phases[level] = phase
        self.forward = [phases[level] for level in range(count)]
        self._require_results()
        *self.first, self.finals = (
            self._phase(0, [final.value for final in finals], [], lambda name: self._is_of_batch(f"{name}:0"))
            for finals in [*([final] for final in self.assigned_first.values()), self.assigned]
        )

    def _require_arguments(self, whole: WholeMark, phase: Phase) -> None:
        """Raise if what is called with the whole batch also takes a tensor of the micro-batch."""
        trace = self.trace
        stored = {key for mark in trace.wholes for key in mark.inputs}
        own = set(whole.arguments + whole.result_cotangents) | set(trace.inputs) - stored
        own |= {trace.share, trace.position}
        others = sorted(key for key in phase.feeds if key not in own and self.level(key) is not None)
        if others:
            raise ValueError(f"what is computed with the whole batch takes tensors of a micro-batch: {others}")

    def _require_results(self) -> None:
        """Raise if micro-batches take more of what is computed with the whole batch than its results."""
        taken = [key for phase in self.forward + self.backward for key in phase.feeds]
        others = sorted({key for key in taken if name_of(key) in self._islands and not self._is_base(key)})
        if others:
            raise ValueError(
                f"micro-batches take what is computed with the whole batch, and no entry of them: {others}"
            )

    def _effects(self, of_gradients: bool) -> Dict[int, List[str]]:
        """Return {level: names of operations that only have an effect}, of the forward or the backward pass."""
        by_level: Dict[int, List[str]] = {}
        for name in self._ordered:
            if (name in self._gradients) != of_gradients or name in self._dropped or name in self._islands:
                continue
            if name in self._assigns or (name not in self.drawn and self._library.only_acts(self._nodes[name])):
                by_level.setdefault(self._levels[name] or 0, []).append(name)
        return by_level

    def reading(self, keys: Iterable[Key]) -> List[Phase]:
        """Return the backward phases, where tensors are taken instead of computed by the level that makes them."""
        taken: Dict[int, Set[Key]] = {}
        for key in keys:
            taken.setdefault(self.level(key) or 0, set()).add(key)
        return [
            (
                self._phase(
                    level,
                    phase.fetches,
                    phase.effects,
                    functools.partial(self._is_within, level, False),
                    taken[level],
                )
                if level in taken
                else phase
            )
            for level, phase in enumerate(self.backward)
        ]

    def recomputed(self, begin: int, fetches: Sequence[Key]) -> Phase:
        """Return the part of the graph that computes tensors again from what crosses the cut before a level."""
        return self._phase(
            begin, list(fetches), [], lambda name: self._is_between(name, begin) and name not in self.drawn
        )

    def _is_between(self, name: str, begin: int) -> bool:
        level = self._levels[name]
        is_later = level is None or level >= begin or name in self._everywhere
        return name not in self._gradients and name not in self._islands and is_later

    def _is_within(self, level: int, is_first: bool, name: str) -> bool:
        """Whether an operation belongs to the phases of a level, or to all; `is_first`: where nothing is drawn yet."""
        if name in self._islands or (name in self.drawn and not is_first):
            return False
        return self._levels[name] in (None, level) or name in self._everywhere

    def _is_island(self, number: int, name: str) -> bool:
        return self._levels[name] is None or self._islands.get(name) == number

    def _is_base(self, key: Key) -> bool:
        """Whether a tensor is known in every phase: a placeholder, but for what stands for a variable."""
        return self._nodes[name_of(key)].type == "Placeholder"

    def _phase(
        self,
        level: int,
        fetches: Sequence[Key],
        effects: Sequence[str],
        is_own: Callable[[str], bool],
        taken: Container[Key] = (),
    ) -> Phase:
        """Collect the operations that compute `fetches`, as far as they are of this phase and not `taken`."""
        names: Set[str] = set()
        feeds: Dict[Key, None] = {}
        stack: List[Key] = list(fetches) + [f"{name}:0" for name in effects]
        own = {f"{name}:0" for name in effects}
        while stack:
            key = stack.pop()
            name = name_of(key)
            node = self._nodes[name]
            if key not in own and (key in taken or node.type == "Placeholder" or not is_own(name)):
                feeds[key] = None
            elif name not in names:
                names.add(name)
                stack += self._inputs(node)
        order = sorted(names, key=self._order_of.__getitem__)
        return Phase(level, list(fetches), list(effects), order, list(feeds))

    # ------------------------------------------------------------------------------------------------------------

    def run(self, phase: Phase, feeds: Dict[Key, tf.Tensor]) -> Dict[Key, tf.Tensor]:
        """Compute a phase in the current graph, given {key: tensor} for all that it takes, captures left out."""
        values = {
            key: _tf.graph_parts.captured(feeds[key] if key in feeds else self._captures[key]) for key in phase.feeds
        }
        protos = [_tf.graph_parts.placed(self._nodes[name], self._inputs(self._nodes[name])) for name in phase.nodes]
        wanted = [key for key in phase.fetches if key not in values]
        tensors: List[Any] = []
        if protos:
            fetches = wanted + list(phase.effects)
            tensors = _tf.graph_parts.import_part(self._graph_def, protos, values, fetches, self.trace.graph)
        result = dict(zip(wanted, tensors))
        result.update({key: values[key] for key in phase.fetches if key in values})
        with tf.control_dependencies(tensors[len(wanted) :] if not tf.executing_eagerly() else []):
            return {key: tf.identity(value) for key, value in result.items()} if phase.effects else result


def _dtype(node: Any) -> tf.DType:
    return tf.as_dtype(node.proto.attr["dtype"].type)
