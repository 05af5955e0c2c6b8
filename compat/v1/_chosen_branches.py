"""A copy of a part of the graph in which conditionals are replaced by one of their branches.

Whether a network is in training is often fed, and chooses between branches: batch normalisation by the statistics of
the batch, or by averages. The copies are those of one value. They stand in the graph itself, outside of conditionals,
so that they can be taken apart like what was built with a Python bool. A batch of a constant size is opened in them.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set

from accum import _tf
from accum._engine._part import Key, outside_key
from accum._tf import tf
from accum.compat.v1._open_batch import OpenBatch

CONDITIONALS = ("If", "StatelessIf")
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
MERGES = ("Merge", "RefMerge")
LEFT = ("VariableV2", "Variable", "VarHandleOp")
"""Types of operations that are never copied."""


class Conditional(NamedTuple):
    """A conditional that is replaced by one of its branches.

    Attributes:
      copies: copies of operations in that branch.
      results: the operations that return its results.
      has_effects: whether a branch assigns to variables.
    """

    copies: List[tf.Operation]
    results: List[tf.Operation]
    has_effects: bool


class NotChosen(Exception):
    """A part of the graph can't be copied in this way."""


def choosers(ops: Sequence[tf.Operation]) -> List[tf.Tensor]:
    """Return the boolean placeholders that choose between the branches of conditionals."""
    found: Dict[Key, tf.Tensor] = {}
    for op in ops:
        if op.type in _tf.op_walks.SWITCHES + CONDITIONALS:
            predicate = _root(op.inputs[op.type in _tf.op_walks.SWITCHES])
            if predicate.dtype == tf.bool and predicate.op.type in ("Placeholder", "PlaceholderWithDefault"):
                found[predicate.name] = predicate
    return list(found.values())


def _root(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type in ("Identity", "LogicalNot") + _tf.op_walks.SWITCHES:
        tensor = tensor.op.inputs[0]
    return tensor


class ChosenBranches:
    """A copy of the operations from a batch to losses, in which conditionals are one of their branches.

    Args:
      losses: tensors of the current graph.
      batch: tensors from which they are computed.
      values: {key of a boolean tensor: its value}.
      of_variables: the operations that are computed from variables.
      open_batch: an `OpenBatch`, from which the copies are computed, or None.

    Attributes:
      batch: tensors from which the copies are computed.
      ops: the copies.
      before_losses: the operations from which the losses are computed.
      left: those of them that are not copied although they depend on the batch: loops of TF 1, conditionals that depend
        on other tensors, and what is computed from these.
      ends: tensors of the copies, from which the losses are computed.
      conditionals: list of `Conditional`.

    Raises:
      NotChosen: a loop of TF 1, or a conditional that depends on other tensors, is within a branch, or takes a batch of
        a constant size; or the batch itself is drawn at random, since a copy would draw other numbers.
    """

    def __init__(
        self,
        losses: Sequence[tf.Tensor],
        batch: Sequence[tf.Tensor],
        values: Dict[Key, bool],
        of_variables: Set[tf.Operation],
        open_batch: Optional[OpenBatch] = None,
    ) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self._graph_def = self._graph.as_graph_def()
        self._functions = {function.signature.name: function for function in self._graph_def.library.function}
        self._library = _tf.graph_parts.Library(self._graph, self._graph_def)
        self._values = dict(values)
        self._of_variables = of_variables
        self._aliases: Dict[Key, Optional[Key]] = {}  # {key: what it is in the copy; None: it is not computed}
        self._protos: Dict[str, Any] = {}
        self._owners: Dict[str, tf.Operation] = {}
        self._open = open_batch
        self._batch = {tensor.name for tensor in batch}
        if open_batch is not None:
            self._aliases.update(open_batch.aliases)
            self._batch = {tensor.name for tensor in open_batch.tensors}
        self._frames: Set[Any] = set()  # conditionals of TF 1
        self._calls: List[tf.Operation] = []  # those of TF 2
        self.left: Set[tf.Operation] = set()
        self._owner: tf.Operation = losses[0].op
        ordered = _tf.op_walks.ancestors([loss.op for loss in losses])
        self.before_losses = set(ordered)
        switches = [op for op in ordered if op.type in _tf.op_walks.SWITCHES and _root(op.inputs[1]).name in values]
        self._chosen = {_tf.graphs.outermost_frame(op) for op in switches}
        for op in ordered:
            self._owner = op
            if self._is_left(op):
                if self._is_within():
                    raise NotChosen(f"{op.name!r} is in a branch, and depends on a loop or on another conditional")
                self.left.add(op)
                continue
            self._visit(op.name, op.node_def, [tensor.name for tensor in op.inputs], len(op.outputs))
        self._copies = self._imported()
        self.batch = list(batch) if open_batch is None else open_batch.tensors
        self.ops = set(self._copies.values()) | set([] if open_batch is None else open_batch.ops)
        self._sources = {copy: self._owners[name] for name, copy in self._copies.items()}
        taken = [*losses, *(tensor for op in self.left for tensor in op.inputs)]
        images = [image for image in map(self.image, taken) if image is not None]
        self.ends = [image for image in images if image.op not in self.left]
        self.conditionals = [self._of_frame(frame) for frame in self._frames]
        self.conditionals += [self._of_call(call) for call in self._calls]

    # ------------------------------------------------------------------------------------------------------------

    def _is_left(self, op: tf.Operation) -> bool:
        """Whether an operation that depends on the batch belongs to another loop or conditional, or depends on one."""
        is_behind = any(tensor.op in self.left for tensor in op.inputs)
        if is_behind or self._open is not None or op.type not in _tf.op_walks.ENTRANCES:
            return is_behind
        keys = [self._aliases.get(tensor.name, tensor.name) for tensor in op.inputs]
        return not self._is_within() and any(key is None or self._depends(key) for key in keys)

    def _is_within(self) -> bool:
        """Whether what is visited is within a conditional whose branch is chosen."""
        frame = _tf.graphs.outermost_frame(self._owner)
        return frame in self._chosen or (frame is not None and self._open is not None)

    def _depends(self, key: Key) -> bool:
        return key in self._batch or _tf.graph_parts.name_of(key) in self._protos

    def _visit(self, name: str, proto: Any, inputs: Sequence[Key], count: int) -> None:
        taken = [self._aliases.get(key, key) for key in inputs]
        outputs = [f"{name}:{index}" for index in range(count)]
        keys = [key for key in taken if key is not None]
        decided = [self._values.get(key) for key in keys]
        if proto.op in MERGES and len(keys) < len(taken):
            self._aliases.update(dict.fromkeys(outputs))
            if keys:
                self._aliases[outputs[0]] = keys[0]
        elif len(keys) < len(taken):
            self._aliases.update(dict.fromkeys(outputs))
        elif proto.op in _tf.op_walks.SWITCHES and decided[1] is not None:
            self._aliases.update({outputs[decided[1]]: keys[0], outputs[not decided[1]]: None})
            self._frames.add(_tf.graphs.outermost_frame(self._owner))
        elif proto.op in CONDITIONALS and decided[0] is not None:
            self._note_call(proto)
            branch = proto.attr["then_branch" if decided[0] else "else_branch"].func.name
            self._write_out(name, branch, keys[1:], outputs)
        elif proto.op in CALLS and any(value is not None for value in decided):
            self._write_out(name, proto.attr["f"].func.name, keys, outputs)
        else:
            self._copy(name, proto, keys, list(keys) != list(inputs))
            if proto.op in ("Identity", "LogicalNot") and decided[0] is not None:
                self._values[outputs[0]] = decided[0] != (proto.op == "LogicalNot")

    def _copy(self, name: str, proto: Any, keys: List[Key], is_other: bool) -> None:
        depends = any(map(self._depends, keys))
        is_within = self._is_within() or name != self._owner.name
        if f"{name}:0" in self._batch or proto.op in LEFT or not (depends or is_other or is_within):
            return
        if self._owner not in self._of_variables and (
            proto.op in _tf.random_ops.STATEFUL_DRAWS or "PyFunc" in proto.op
        ):
            raise NotChosen(f"{name!r} draws numbers, or runs Python, before anything uses a variable")
        if _tf.op_walks.is_assignment(proto.op) or _tf.op_walks.changes_variable(self._owner):
            if is_within:
                raise NotChosen(f"{name!r} assigns to a variable")
            return
        if proto.op in _tf.op_walks.SWITCHES + MERGES + ("Enter", "RefEnter", "Exit", "RefExit", "NextIteration"):
            raise NotChosen(f"{name!r} belongs to a loop, or to a conditional by another tensor")
        if self._open is not None and depends:
            if proto.op in _tf.graph_parts.LOOPS:
                raise NotChosen(f"{name!r} has the constant number of examples in the shapes of its results")
            keys = [
                self._open.key(proto.op, index, key) if self._is_outside(key) else key for index, key in enumerate(keys)
            ]
            if name == self._owner.name:
                keys = [
                    self._open.number(self._owner, index, key) if self._is_outside(key) else key
                    for index, key in enumerate(keys)
                ]
        self._protos[name] = _tf.graph_parts.placed(
            _tf.graph_parts.Node(name, proto.op, keys, proto),
            [key if _tf.graph_parts.name_of(key) in self._protos else outside_key(key) for key in keys],
        )
        self._protos[name].name = name
        self._owners[name] = self._owner

    def _is_outside(self, key: Key) -> bool:
        return key not in self._batch and _tf.graph_parts.name_of(key) not in self._protos

    def _note_call(self, proto: Any) -> None:
        assigned = self._library.hidden(_tf.graph_parts.Node("", proto.op, [], proto))
        if any(map(_tf.op_walks.is_assignment, assigned)):
            raise NotChosen(f"{self._owner.name!r} assigns to a variable")
        if self._owner not in self._calls:
            self._calls.append(self._owner)

    def _write_out(self, name: str, function: str, arguments: Sequence[Key], outputs: Sequence[Key]) -> None:
        """Replace a call by the operations of its function."""
        body = self._functions[function]
        keys: Dict[str, Optional[Key]] = dict(zip((one.name for one in body.signature.input_arg), arguments))
        protos = {proto.name: proto for proto in body.node_def}
        done: Set[str] = set()

        def key_of(inner: str) -> Key:
            if ":" not in inner:
                return str(keys[inner])
            node, output, index = inner.split(":")
            return f"{name}/chosen/{node}:{self._first_outputs(protos[node])[output] + int(index)}"

        def visit(proto: Any) -> None:
            done.add(proto.name)
            data = [inner for inner in proto.input if not inner.startswith("^")]
            for inner in data:
                if ":" in inner and inner.split(":")[0] not in done:
                    visit(protos[inner.split(":")[0]])
            definition = _tf.definitions.definition_of(self._graph, proto.op)
            count = len(_tf.definitions.output_types(definition, proto))
            self._visit(f"{name}/chosen/{proto.name}", proto, [key_of(inner) for inner in data], count)

        for proto in body.node_def:
            if proto.name not in done:
                visit(proto)
        for output, argument in zip(outputs, body.signature.output_arg):
            key = key_of(body.ret[argument.name])
            self._aliases[output] = self._aliases.get(key, key)

    def _first_outputs(self, proto: Any) -> Dict[str, int]:
        definition = _tf.definitions.definition_of(self._graph, proto.op)
        return _tf.definitions.first_outputs(definition, proto)

    def _imported(self) -> Dict[str, tf.Operation]:
        feeds = {
            key: self._graph.get_tensor_by_name(key[len(outside_key("")) :])
            for proto in self._protos.values()
            for key in proto.input
            if key.startswith(outside_key(""))
        }
        names = list(self._protos)
        made = _tf.graph_parts.import_part(self._graph_def, list(self._protos.values()), feeds, names) if names else []
        copies = dict(zip(names, made))
        for name, copy in copies.items():
            if name == self._owners[name].name:
                for output, tensor in zip(copy.outputs, self._owners[name].outputs):
                    output.set_shape(tensor.shape if self._open is None else self._open.shape_of(tensor))
        return copies

    def _of_frame(self, frame: Any) -> Conditional:
        within = [op for op in self._graph.get_operations() if _tf.graphs.outermost_frame(op) is frame]
        results = {user for op in within for tensor in op.outputs for user in tensor.consumers()} - set(within)
        has_effects = any(map(_tf.op_walks.changes_variable, within))
        return Conditional(
            [self._copies[op.name] for op in within if op.name in self._copies], list(results), has_effects
        )

    def _of_call(self, call: tf.Operation) -> Conditional:
        return Conditional([copy for copy, owner in self._sources.items() if owner is call], [call], False)

    # ------------------------------------------------------------------------------------------------------------

    def image(self, tensor: tf.Tensor) -> Optional[tf.Tensor]:
        """Return what a tensor is in the copy: itself if it is the same for any value; None if it isn't computed."""
        key = self._aliases.get(tensor.name, tensor.name)
        if key is None:
            return None
        copy = self._copies.get(_tf.graph_parts.name_of(key))
        if copy is not None:
            return copy.outputs[int(key.split(":")[1])]
        return self._graph.get_tensor_by_name(key)

    def copy_of(self, op: tf.Operation) -> Optional[tf.Operation]:
        """Return the copy of an operation, or None."""
        return self._copies.get(op.name)

    def source(self, op: tf.Operation) -> tf.Operation:
        """Return the original of a copy, or the conditional whose branch it was in; any other operation itself."""
        return self._sources.get(op, op)

    def conditional_of(self, op: tf.Operation) -> Optional[Conditional]:
        """Return the conditional to which an operation belongs that is no copy, or None."""
        frame = _tf.graphs.outermost_frame(op)
        frames = list(self._frames)
        if frame is not None:
            return self.conditionals[frames.index(frame)] if frame in self._frames else None
        return self.conditionals[len(frames) + self._calls.index(op)] if op in self._calls else None
