"""A graph as one list of nodes, with the bodies of functions, conditionals and loops written out.

A functional loop or conditional becomes the nodes of which TensorFlow 1 makes them (Enter, Merge, Switch, …), so there
is one kind of either.
"""

import heapq
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple

from accum import _tf
from accum._tf import tf

Key = str
LOOPS = ("While", "StatelessWhile")
CONDITIONALS = ("If", "StatelessIf", "Case", "StatelessCase")
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
NEXT, MERGES = _tf.op_walks.NEXT, _tf.op_walks.MERGES
WITHIN = "/-/"
"""What separates the name of a call from that of an operation in the function; no name of an operation has it."""


class Node:
    """An operation.

    Attributes:
      name, type: str.
      inputs: keys of the tensors that it takes.
      controls: names of the nodes for which it waits.
      proto: its `NodeDef`.
      dtypes: of its outputs, as enums.
      owner: the name of the user's operation to which it belongs.
      frame: the names of the loops in which it is, from the outermost.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        inputs: List[Key],
        dtypes: List[int],
        owner: str,
        controls: Sequence[str] = (),
        proto: Any = None,
    ) -> None:
        self.name, self.type, self.inputs, self.dtypes, self.owner = name, kind, inputs, dtypes, owner
        self.controls = list(controls)
        self.proto = tf.compat.v1.NodeDef(name=name, op=kind) if proto is None else proto
        self.frame: Tuple[str, ...] = ()

    @property
    def is_loop_merge(self) -> bool:
        """Whether this is where a loop begins again."""
        return self.type in MERGES and self.is_in_loop_header

    is_in_loop_header = False

    @property
    def outputs(self) -> List[Key]:
        """The keys of its outputs."""
        return [f"{self.name}:{index}" for index in range(len(self.dtypes))]

    def __repr__(self) -> str:
        return f"Node({self.type} {self.name} {self.inputs})"


def node_of(key: Key) -> str:
    """Return the name of the node that makes a tensor."""
    return key.rsplit(":", 1)[0]


class FlatGraph:
    """The nodes from which operations are computed, as units: all nodes of an outermost loop, or those between two.

    Args:
      graph: a `tf.Graph`.
      operations: names of operations.
      ends: keys of tensors that are given.
      drawn: {key of random numbers: key of those in whose place they are}, of operations with one output.

    Attributes:
      units: list of lists of `Node`, each after what it takes, but for what a loop hands back.
      users: the names of the user's operations, in their order.
      kinds: {name: type} of these.
      written_out: the names of those that are functions, conditionals or loops, whose bodies are among the nodes.
    """

    def __init__(self, graph: tf.Graph, operations: Sequence[str], ends: Iterable[Key], drawn: Dict[Key, Key]) -> None:
        graph_def = graph.as_graph_def()
        self._graph, self._ends = graph, set(ends)
        self.drawn = {node_of(key): source for key, source in drawn.items()}
        self._protos = {node.name: node for node in graph_def.node}
        self.library = {function.signature.name: function for function in graph_def.library.function}
        self._definitions: Dict[str, Any] = {}
        self._nodes: Dict[str, Node] = {}
        self.users = self._ancestors(operations)
        self.kinds = {name: self._protos[name].op for name in self.users}
        self.written_out: Set[str] = set()
        for name in self.users:
            proto = self._protos[name]
            node = self._node(name, proto, *self._split(proto.input), name)
            source = self.drawn.get(name)
            self._add(node if source is None else Node(name, "IdentityN", [source], node.dtypes, name))
        self.units = _units(self._nodes)

    def definition(self, kind: str) -> Any:
        """Return the `OpDef` of a type of operation."""
        if kind not in self._definitions:
            function = self.library.get(kind)
            found = function.signature if function is not None else _tf.definitions.definition_of(self._graph, kind)
            self._definitions[kind] = found
        return self._definitions[kind]

    def _split(self, names: Sequence[str]) -> Tuple[List[Key], List[str]]:
        data = [name if ":" in name else f"{name}:0" for name in names if not name.startswith("^")]
        return data, [name[1:] for name in names if name.startswith("^")]

    def _ancestors(self, operations: Sequence[str]) -> List[str]:
        """Return names of operations and of all from which they are computed, in the order of the graph."""
        seen: Set[str] = set()
        waiting = list(operations)
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            inputs, controls = self._split(self._protos[name].input)
            if name in self.drawn:
                inputs, controls = [self.drawn[name]], []
            waiting.extend(node_of(key) for key in inputs if key not in self._ends)
            waiting.extend(controls)
        return [name for name in self._protos if name in seen]

    def _node(self, name: str, proto: Any, inputs: List[Key], controls: Sequence[str], owner: str) -> Node:
        dtypes = _tf.definitions.output_types(self.definition(proto.op), proto)
        return Node(name, proto.op, inputs, dtypes, owner, controls, proto)

    def _add(self, node: Node) -> None:
        bodies = self._bodies(node)
        if bodies is not None:
            self.written_out.add(node.name)
        if bodies is None:
            self._nodes[node.name] = node
        elif node.type in LOOPS:
            self._add_loop(node, *bodies)
        elif node.type in CONDITIONALS:
            self._add_conditional(node, bodies)
        else:
            self._add_call(node, bodies[0])

    def _bodies(self, node: Node) -> Optional[List[Any]]:
        """Return the functions of which an operation is made, or None if it isn't, or they can't be written out."""
        attributes = node.proto.attr
        names: List[str] = []
        if node.type in self.library:
            names = [node.type]
        elif node.type in CALLS:
            names = [attributes["f"].func.name]
        elif node.type in LOOPS:
            names = [attributes["cond"].func.name, attributes["body"].func.name]
        elif node.type in ("If", "StatelessIf"):
            names = [attributes["else_branch"].func.name, attributes["then_branch"].func.name]
        elif node.type in CONDITIONALS:
            names = [function.name for function in attributes["branches"].list.func]
        bodies = [self.library.get(name) for name in names]
        are_plain = all(body is not None and _is_plain(body) for body in bodies)
        return bodies if bodies and are_plain else None

    def _named(self, node: Node, results: List[Key]) -> Node:
        """Return a node with the name of a call and the results of its body."""
        return Node(node.name, "IdentityN", results, node.dtypes, node.owner, node.controls)

    def _add_call(self, node: Node, body: Any) -> None:
        results = self._add_body(node, "call", body, node.inputs, node.controls)
        call = self._nodes[node.name] = self._named(node, results)
        call.controls += [f"{node.name}{WITHIN}call{WITHIN}{name}" for name in body.control_ret.values()]

    def _add_body(self, call: Node, part: str, body: Any, arguments: List[Key], controls: Sequence[str]) -> List[Key]:
        """Write out a function that is called with tensors, and return the keys of what it returns."""
        prefix = f"{call.name}{WITHIN}{part}{WITHIN}"
        keys = dict(zip((argument.name for argument in body.signature.input_arg), arguments))
        firsts = {node.name: self._first_outputs(node) for node in body.node_def}

        def key_of(name: str) -> Key:
            if ":" not in name and name in keys:
                return keys[name]
            node, output, index = name.split(":")
            return f"{prefix}{node}:{firsts[node][output] + int(index)}"

        for stripped in body.node_def:
            proto = _tf.definitions.with_defaults(self.definition(stripped.op), stripped)
            inputs = [key_of(name) for name in proto.input if not name.startswith("^")]
            waits = [prefix + name[1:] for name in proto.input if name.startswith("^") and name[1:] in firsts]
            waits += controls if not inputs and not waits else []
            self._add(self._node(prefix + proto.name, proto, inputs, waits, call.owner))
        return [key_of(body.ret[output.name]) for output in body.signature.output_arg]

    def _first_outputs(self, proto: Any) -> Dict[str, int]:
        return _tf.definitions.first_outputs(self.definition(proto.op), proto)

    def _new(self, call: Node, name: str, kind: str, inputs: List[Key], dtypes: List[int]) -> List[Key]:
        node = Node(f"{call.name}{WITHIN}{name}", kind, inputs, dtypes, call.owner, call.controls)
        self._nodes[node.name] = node
        return node.outputs

    def _add_loop(self, call: Node, condition: Any, body: Any) -> None:
        merges, nexts = [], []
        for index, (key, dtype) in enumerate(zip(call.inputs, call.dtypes)):
            (enter,) = self._new(call, f"enter_{index}", "Enter", [key], [dtype])
            self._nodes[node_of(enter)].proto.attr["frame_name"].s = call.name.encode()
            nexts.append(f"{call.name}{WITHIN}next_{index}")
            merges.append(
                self._new(
                    call, f"merge_{index}", "Merge", [enter, f"{nexts[-1]}:0"], [dtype, tf.int32.as_datatype_enum]
                )[0]
            )
        pivot = [node_of(merge) for merge in merges[:1]]
        predicate = self._add_body(call, "cond", condition, merges, pivot)[0]
        (again,) = self._new(call, "again", "LoopCond", [predicate], [tf.bool.as_datatype_enum])
        switches = [
            self._new(call, f"switch_{index}", "Switch", [key, again], [dtype, dtype])
            for index, (key, dtype) in enumerate(zip(merges, call.dtypes))
        ]
        results = self._add_body(call, "body", body, [switch[1] for switch in switches], [node_of(again)])
        for index, (key, dtype) in enumerate(zip(results, call.dtypes)):
            self._new(call, f"next_{index}", "NextIteration", [key], [dtype])
        exits = [
            self._new(call, f"exit_{index}", "Exit", [switch[0]], [dtype])[0]
            for index, (switch, dtype) in enumerate(zip(switches, call.dtypes))
        ]
        self._nodes[call.name] = self._named(call, exits)

    def _add_conditional(self, call: Node, branches: Sequence[Any]) -> None:
        predicate, *arguments = call.inputs
        pivot = self._new(call, "pivot", "Switch", [predicate, predicate], [tf.bool.as_datatype_enum] * 2)
        types = [
            dtype
            for argument in branches[0].signature.input_arg
            for dtype in _tf.definitions.argument_types(argument, call.proto)
        ]
        entered = [
            self._new(call, f"switch_{index}", "Switch", [key, predicate], [dtype, dtype])[0]
            for index, (key, dtype) in enumerate(zip(arguments, types))
        ]
        results = [
            self._add_body(call, f"branch_{index}", branch, entered, [node_of(pivot[0])])
            for index, branch in enumerate(branches)
        ]
        merges = [
            self._new(call, f"merge_{index}", "Merge", list(keys), [dtype, tf.int32.as_datatype_enum])[0]
            for index, (keys, dtype) in enumerate(zip(zip(*results), call.dtypes))
        ]
        for merge in merges:  # also one of two arguments depends on the predicate
            self._nodes[node_of(merge)].controls.append(node_of(pivot[0]))
        self._nodes[call.name] = self._named(call, merges)


def _is_plain(body: Any) -> bool:
    """Whether a function is for certain dtypes, not for any."""
    return not any(value.placeholder for node in body.node_def for value in node.attr.values())


def _sources(node: Node, nodes: Dict[str, Node]) -> List[str]:
    """Return the names of the nodes that run before one, but for what a loop hands back."""
    names = [node_of(key) for key in node.inputs] + node.controls
    return [name for name in names if name in nodes and not (node.type in MERGES and nodes[name].type in NEXT)]


def _units(nodes: Dict[str, Node]) -> List[List[Node]]:
    order = _ordered(list(nodes), lambda name: _sources(nodes[name], nodes))
    for name in order:
        node = nodes[name]
        node.is_in_loop_header = any(nodes[node_of(key)].type in NEXT for key in node.inputs if node_of(key) in nodes)
        frames = [_frame_behind(nodes[source]) for source in _sources(node, nodes)]
        node.frame = max(frames, key=len, default=())
        if node.type in ("Enter", "RefEnter"):
            node.frame += (node.proto.attr["frame_name"].s.decode(),)
    units: Dict[str, List[Node]] = {}
    for name in order:
        node = nodes[name]
        is_exit = node.type in _tf.op_walks.EXITS and len(node.frame) == 1
        units.setdefault(name if is_exit or not node.frame else "loop " + node.frame[0], []).append(node)
    unit_of = {node.name: unit for unit, members in units.items() for node in members}

    def before(unit: str) -> List[str]:
        sources = (unit_of[source] for node in units[unit] for source in _sources(node, nodes))
        return [source for source in sources if source != unit]

    joined: List[List[Node]] = [[]]
    for unit in _ordered(list(units), before):
        is_loop = unit.startswith("loop ")
        if is_loop:
            joined += [units[unit], []]
        else:
            joined[-1] += units[unit]
    return [nodes_of_unit for nodes_of_unit in joined if nodes_of_unit]


def _frame_behind(node: Node) -> Tuple[str, ...]:
    return node.frame[:-1] if node.type in _tf.op_walks.EXITS else node.frame


def _ordered(names: List[str], before: Callable[[str], List[str]]) -> List[str]:
    """Return names, each after those `before` it, otherwise in the order that they have."""
    place = {name: index for index, name in enumerate(names)}
    sources = {name: set(before(name)) for name in names}
    users: Dict[str, List[str]] = {name: [] for name in names}
    for name, needed in sources.items():
        for source in needed:
            users[source].append(name)
    free = [place[name] for name in names if not sources[name]]
    heapq.heapify(free)
    ordered = []
    while free:
        name = names[heapq.heappop(free)]
        ordered.append(name)
        for user in users[name]:
            sources[user].discard(name)
            if not sources[user]:
                heapq.heappush(free, place[user])
    if len(ordered) != len(names):
        raise ValueError(
            f"`graph` has a circle without a loop. Received: {sorted(set(names) - set(ordered))[:5]}. [accum: bug]"
        )
    return ordered
