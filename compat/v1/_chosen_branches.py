"""A copy of a part of the graph in which conditionals are replaced by one of their branches.

Whether a network is in training is often fed, and chooses between branches: batch normalisation by the statistics of
the batch, or by averages. The copies are those of one value. They stand in the graph itself, outside of conditionals,
so that they can be taken apart like what was built with a Python bool. A batch of a constant size is opened in them.
Loops of TensorFlow 1, and its conditionals that other tensors decide, are copied as they are.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from accum import _tf
from accum._engine._part import Key, outside_key, with_own_frames
from accum._tf import tf
from accum.compat.v1._open_batch import NotCopied, OpenBatch

CONDITIONALS = ("If", "StatelessIf")
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
ENTERS, MERGES, NEXT = _tf.op_walks.ENTERS, _tf.op_walks.MERGES, _tf.op_walks.NEXT
LEFT = ("VariableV2", "Variable", "VarHandleOp")
"""Types of operations that are never copied."""


PASSING = ("Identity",) + _tf.op_walks.ENTRANCES
"""Types of operations that hand on what they take."""


class Frame(NamedTuple):
    """A conditional that is replaced by one of its branches, or a loop or conditional of TF 1 that is copied.

    Attributes:
      copies: copies of its operations.
      results: the operations that return its results.
      has_effects: whether it assigns to variables.
    """

    copies: List[tf.Operation]
    results: List[tf.Operation]
    has_effects: bool


def choosers(ops: Sequence[tf.Operation]) -> List[tf.Tensor]:
    """Return the boolean placeholders that choose between the branches of conditionals."""
    found: Dict[Key, tf.Tensor] = {}
    for op in ops:
        if op.type in _tf.op_walks.SWITCHES + CONDITIONALS:
            predicate, _ = _root(op.inputs[op.type in _tf.op_walks.SWITCHES])
            if predicate.dtype == tf.bool and predicate.op.type in ("Placeholder", "PlaceholderWithDefault"):
                found[predicate.name] = predicate
    return list(found.values())


def _root(tensor: tf.Tensor) -> Tuple[tf.Tensor, bool]:
    """Return the tensor that a predicate is, and whether it is negated."""
    is_negated = False
    while tensor.op.type in ("LogicalNot", *PASSING):
        is_negated = is_negated != (tensor.op.type == "LogicalNot")
        tensor = tensor.op.inputs[0]
    return tensor, is_negated


class ChosenBranches:
    """A copy of the operations from a batch to losses, in which conditionals are one of their branches.

    Args:
      losses: tensors of the current graph.
      batch: tensors from which they are computed.
      values: {key of a boolean tensor: its value}.
      of_variables: the operations that are computed from variables.
      of_batch: those that are computed from the batch.
      open_batch: an `OpenBatch`, from which the copies are computed, or None.

    Attributes:
      batch: tensors from which the copies are computed.
      ops: the copies.
      before_losses: the operations from which the losses are computed.
      ends: tensors of the copies, from which the losses are computed.
      frames: list of `Frame`.

    Raises:
      NotCopied: a copy would assign to a variable, or draw the batch itself again; or a batch of a constant size can't
        be opened.
    """

    def __init__(
        self,
        losses: Sequence[tf.Tensor],
        batch: Sequence[tf.Tensor],
        values: Dict[Key, bool],
        of_variables: Set[tf.Operation],
        of_batch: Set[tf.Operation],
        open_batch: Optional[OpenBatch] = None,
    ) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self._graph_def = self._graph.as_graph_def()
        self._functions = {function.signature.name: function for function in self._graph_def.library.function}
        self._library = _tf.graph_parts.Library(self._graph, self._graph_def)
        self._values = dict(values)
        self._of_variables, self._of_batch = of_variables, of_batch
        self._aliases: Dict[Key, Optional[Key]] = {}  # {key: what it is in the copy; None: it is not computed}
        self._protos: Dict[str, Any] = {}
        self._owners: Dict[str, tf.Operation] = {}
        self._contexts: Dict[str, List[Any]] = {}  # {name: the loops and conditionals of TF 1 in which a copy is}
        self._moving: Set[str] = set()  # the names of copies that are computed from the batch
        self._open = open_batch
        self._begin = {tensor.name for tensor in batch}  # what is before these is not copied
        self._batch = self._begin
        if open_batch is not None:
            self._aliases.update(open_batch.aliases)
            self._batch = open_batch.keys
        self._calls: List[tf.Operation] = []  # conditionals of TF 2
        self._places: Dict[Any, int] = {}  # {loop or conditional of TF 1: its number}
        self._owner: tf.Operation = losses[0].op
        self.before_losses = set(_tf.op_walks.ancestors([loss.op for loss in losses]))
        self._outermost = self._frames_of_tf_1()
        for op in self._ordered([loss.op for loss in losses] + self._other_results()):
            if self._is_begin(op):
                continue
            self._owner = op
            self._visit(op.name, op.node_def, [tensor.name for tensor in op.inputs], len(op.outputs))
        self._copies = self._imported()
        self.batch = list(batch) if open_batch is None else open_batch.tensors
        self.ops = set(self._copies.values()) | set([] if open_batch is None else open_batch.ops)
        self._sources = {copy: self._owners[name] for name, copy in self._copies.items()}
        self.ends = [image for image in map(self.image, losses) if image is not None]
        self._frames = {**self._copied_frames(), **{call: self._of_call(call) for call in self._calls}}
        self.frames = list(self._frames.values())

    # ------------------------------------------------------------------------------------------------------------
    # Loops and conditionals of TensorFlow 1

    def _frames_of_tf_1(self) -> Set[Any]:
        """Return what stands for the outermost loops and conditionals that are copied, or of whose branches one is."""
        found: Set[Any] = set()
        for op in self.before_losses:
            contexts = _tf.frames.contexts_of(op)
            if contexts and (op in self._of_batch or any(self._choice(one) is not None for one in contexts)):
                found.add(_tf.graphs.outermost_frame(op))
        return found

    def _other_results(self) -> List[tf.Operation]:
        """Return the other results of conditionals whose branch is chosen, such as statistics for moving averages."""
        contexts = {id(one) for op in self.before_losses for one in _tf.frames.contexts_of(op)}  # and of no copy

        def is_chosen(op: tf.Operation) -> bool:
            return any(id(one) in contexts and self._choice(one) is not None for one in _tf.frames.contexts_of(op))

        merges = [op for op in self._graph.get_operations() if op.type in _tf.op_walks.MERGES]
        others = [op for op in merges if op not in self.before_losses and not _tf.frames.contexts_of(op)]
        return [op for op in others if any(is_chosen(one.op) for one in op.inputs)]

    def _choice(self, context: Any) -> Optional[bool]:
        """Return the value that is chosen for what decides between the branches of a conditional, or None."""
        if not _tf.frames.is_branch(context):
            return None
        tensor, is_negated = _root(context.pred)
        value = self._values.get(tensor.name)
        return None if value is None else value != is_negated

    def _is_in_frame(self, op: tf.Operation) -> bool:
        return _tf.graphs.outermost_frame(op) in self._outermost

    def _contexts_of(self, op: tf.Operation) -> List[Any]:
        """Return the loops and conditionals in which the copy of an operation is."""
        contexts = _tf.frames.contexts_of(op) if self._is_in_frame(op) else []
        return [one for one in contexts if self._choice(one) is None]

    def _is_dead(self, op: tf.Operation) -> bool:
        """Whether an operation is in a branch that is not chosen."""
        contexts = _tf.frames.contexts_of(op) if self._is_in_frame(op) else []
        return any(self._choice(one) not in (None, bool(one.branch)) for one in contexts if _tf.frames.is_branch(one))

    def _ordered(self, ends: Sequence[tf.Operation]) -> List[tf.Operation]:
        """Return what is computed before operations, each after what it takes, but for what a loop hands back."""

        def sources(op: tf.Operation) -> List[tf.Operation]:
            if self._is_begin(op):
                return []
            waited = op.control_inputs if self._is_in_frame(op) else []
            within = [one for one in waited if self._is_in_frame(one) and not _tf.op_walks.changes_variable(one)]
            return [one.op for one in op.inputs if one.op.type not in NEXT] + within

        starts = list(ends)
        while True:
            ordered = _tf.op_walks.ancestors(starts, sources=sources)
            found = set(ordered)
            framed = [op for op in ordered if self._is_in_frame(op)]
            contexts = {context: None for op in framed for context in self._contexts_of(op)}
            new = [op for context in contexts for op in _tf.frames.ends_of(context)]
            new += [one.op for op in framed for one in op.inputs if one.op.type in NEXT]
            if found.issuperset(new):
                return ordered
            starts += [op for op in new if op not in found]

    # ------------------------------------------------------------------------------------------------------------

    def _is_begin(self, op: tf.Operation) -> bool:
        used = [tensor.name for tensor in op.outputs if tensor.consumers()]
        return bool(used) and self._begin.issuperset(used)

    def _depends(self, key: Key) -> bool:
        return key in self._batch or _tf.graph_parts.name_of(key) in self._protos

    def _is_moving(self, key: Key) -> bool:
        return key in self._batch or _tf.graph_parts.name_of(key) in self._moving

    def _visit(self, name: str, proto: Any, inputs: Sequence[Key], count: int) -> None:
        taken = [self._aliases.get(key, key) for key in inputs]
        outputs = [f"{name}:{index}" for index in range(count)]
        begin = {key: self._aliases.get(key, key) for key in outputs if key in self._begin}
        keys = [key for key in taken if key is not None]
        decided = [self._values.get(key) for key in keys]
        if self._is_dead(self._owner):
            self._aliases.update(dict.fromkeys(outputs))
        elif proto.op in MERGES and len(keys) < len(taken):
            self._aliases.update(dict.fromkeys(outputs))
            if keys:
                self._aliases[outputs[0]] = keys[0]
        elif len(keys) < len(taken):
            self._aliases.update(dict.fromkeys(outputs))
        elif proto.op in _tf.op_walks.SWITCHES and decided[1] is not None:
            self._aliases.update({outputs[decided[1]]: keys[0], outputs[not decided[1]]: None})
        elif proto.op in CONDITIONALS and decided[0] is not None:
            self._note_call(proto)
            branch = proto.attr["then_branch" if decided[0] else "else_branch"].func.name
            self._write_out(name, branch, keys[1:], outputs)
        elif proto.op in CALLS and any(value is not None for value in decided):
            self._write_out(name, proto.attr["f"].func.name, keys, outputs)
        else:
            self._copy(name, proto, keys, list(keys) != list(inputs))
            if proto.op in ("LogicalNot", *PASSING) and decided[0] is not None:
                self._values.update(dict.fromkeys(outputs, decided[0] != (proto.op == "LogicalNot")))
        self._aliases.update(begin)

    def _copy(self, name: str, proto: Any, keys: List[Key], is_other: bool) -> None:
        depends = any(map(self._depends, keys))
        is_within = self._is_in_frame(self._owner) or name != self._owner.name
        is_list = bool(self._outermost) and _tf.graphs.makes_container(self._owner)  # which each loop fills
        if proto.op in LEFT or not (depends or is_other or is_within or is_list):
            return
        is_drawn = proto.op in _tf.random_ops.STATEFUL_DRAWS or "PyFunc" in proto.op
        if is_drawn and not self._is_behind_variables(self._owner):
            raise NotCopied(f"{name!r} draws numbers, or runs Python, before anything uses a variable")
        if _tf.op_walks.is_assignment(proto.op) or _tf.op_walks.changes_variable(self._owner):
            if is_within:
                raise NotCopied(f"{name!r} assigns to a variable")
            return
        contexts = self._contexts_of(self._owner)
        is_moving = self._owner in self._of_batch or any(map(self._is_moving, keys))
        if self._open is not None and (is_moving or proto.op in ENTERS + NEXT):
            if proto.op in _tf.graph_parts.LOOPS:
                raise NotCopied(f"{name!r} has the constant number of examples in the shapes of its results")
            keys = [self._opened(name, proto, index, key) for index, key in enumerate(keys)]
            is_moving = is_moving or any(map(self._is_moving, keys))
        if is_moving:
            self._moving.add(name)
        self._add(name, proto, keys, contexts)
        if self._open is not None:
            self._open.open_elements(self._protos[name])

    def _is_behind_variables(self, op: tf.Operation) -> bool:
        """Whether what is computed from examples and an operation is computed from variables, too."""
        stack, done = [op], {op}
        while stack:
            one = stack.pop()
            if one not in self._of_variables and (one in self._of_batch or not self._is_in_frame(one)):
                return False
            users = [user for tensor in one.outputs for user in tensor.consumers() if one not in self._of_variables]
            stack += [user for user in users if user not in done]
            done.update(users)
        return True

    def _add(self, name: str, proto: Any, keys: Sequence[Key], contexts: List[Any]) -> None:
        self._protos[name] = _tf.graph_parts.placed(
            _tf.graph_parts.Node(name, proto.op, list(keys), proto),
            [key if self._is_copied(key) else outside_key(key) for key in keys],
        )
        self._protos[name].name = name
        self._owners[name] = self._owner
        self._contexts[name] = contexts

    def _is_copied(self, key: Key) -> bool:
        """Whether a tensor is that of a copy, perhaps of one to come, by which a loop hands a value back."""
        name = _tf.graph_parts.name_of(key)
        if name in self._protos:
            return key not in self._begin
        return self._owner.type in MERGES and any(one.name == key and one.op.type in NEXT for one in self._owner.inputs)

    def _opened(self, name: str, proto: Any, index: int, key: Key) -> Key:
        """Return what a copy takes in place of an input that is computed from no examples."""
        assert self._open is not None
        if self._is_moving(key):
            return key
        is_state = proto.op in ENTERS and any(
            one.op.type in NEXT and one.op in self._of_batch
            for merge in self._owner.outputs[0].consumers()
            for one in merge.inputs
        )
        if not self._is_copied(key):
            opened = self._open.key(proto.op, index, key, is_state)
            return opened if name != self._owner.name else self._open.number(self._owner, index, opened)
        producer = _tf.graph_parts.name_of(key)
        owner = self._owners.get(producer)
        if owner is None or owner.name != producer:  # what a loop hands back, or of a function
            return key
        tensor = owner.outputs[int(key.split(":")[1])]
        within = self._open.key_within(proto.op, index, tensor, is_state)
        if within is None:
            return key
        if proto.op in MERGES and any(one.op.type in NEXT for one in self._owner.inputs):
            raise NotCopied(f"a loop begins with {tensor.name!r}, which has a row for each example")
        return self._entered(self._graph.get_tensor_by_name(within), self._contexts[producer])

    def _entered(self, tensor: tf.Tensor, contexts: Sequence[Any]) -> Key:
        """Return the key of a tensor of the graph within loops and conditionals."""
        key = str(tensor.name)
        for number, context in enumerate(contexts):
            name = f"{_tf.graph_parts.name_of(key)}/into_{self._places.setdefault(context, len(self._places))}"
            is_loop = _tf.frames.is_loop(context)
            if name not in self._protos:
                node = _tf.frames.entrance(context, tensor.dtype)
                predicate = [] if is_loop else [str(self._aliases.get(context.pred.name) or context.pred.name)]
                self._add(name, node, [key, *predicate], list(contexts[: number + 1]))
                self._moving.update([name] if self._is_moving(key) else [])
            key = f"{name}:{0 if is_loop else int(context.branch)}"
        return key

    def _note_call(self, proto: Any) -> None:
        assigned = self._library.hidden(_tf.graph_parts.Node("", proto.op, [], proto))
        if any(map(_tf.op_walks.is_assignment, assigned)):
            raise NotCopied(f"{self._owner.name!r} assigns to a variable")
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
        for name, contexts in self._contexts.items():
            self._protos[name].input.extend(f"^{other}" for other in self._controls(name, contexts))
        feeds = {
            key: self._graph.get_tensor_by_name(key[len(outside_key("")) :])
            for proto in self._protos.values()
            for key in proto.input
            if key.startswith(outside_key(""))
        }
        names = list(self._protos)
        protos, suffix = with_own_frames(list(self._protos.values()), self._graph)
        made = _tf.graph_parts.import_part(self._graph_def, protos, feeds, names) if names else []
        copies = dict(zip(names, made))
        for name, copy in copies.items():
            if name == self._owners[name].name:
                for output, tensor in zip(copy.outputs, self._owners[name].outputs):
                    output.set_shape(tensor.shape if self._open is None else self._open.shape_of(tensor))
        self._place_in_contexts(copies, suffix)
        return copies

    def _controls(self, name: str, contexts: Sequence[Any]) -> List[str]:
        """Return the names of the copies for which one waits, so that it belongs to its loop or conditional."""
        if not contexts:
            return []
        waited = self._owners[name].control_inputs if name == self._owners[name].name else []
        names = [one.name for one in waited if self._contexts.get(one.name)]
        if names or self._protos[name].op in ENTERS:
            return names
        made = [self._protos.get(_tf.graph_parts.name_of(key)) for key in self._protos[name].input]
        is_free = all(one is not None and one.op in ENTERS and one.attr["is_constant"].b for one in made)
        # TensorFlow hands constants to every iteration, and what is computed from these alone begins another one.
        return [_tf.frames.pivot_of(contexts[-1]).name] if is_free else []

    def _place_in_contexts(self, copies: Dict[str, tf.Operation], suffix: str) -> None:
        """Tell TensorFlow to which loops and conditionals copies belong."""
        members: Dict[Any, List[str]] = {}
        for name, contexts in self._contexts.items():
            exits = contexts[-2:-1] if _tf.graphs.leaves_frame(copies[name]) else []  # also known around it
            for context in contexts[-1:] + exits:
                names = [tensor.name for tensor in copies[name].outputs] or [copies[name].name]
                members.setdefault(context, []).extend(names)

        def key_of(key: Key) -> Optional[Key]:
            image = self._aliases.get(key) or key
            copy = copies.get(_tf.graph_parts.name_of(image))
            return None if copy is None else str(copy.outputs[int(image.split(":")[1])].name)

        made: Dict[Any, Any] = {}
        outers = {context: contexts[:-1] for contexts in self._contexts.values() for context in contexts[-1:]}
        for context, outer in sorted(outers.items(), key=lambda one: len(one[1])):
            around = made[outer[-1]] if outer else None
            made[context] = _tf.frames.copied(context, around, context.name + suffix, key_of, members[context])

    def _copied_frames(self) -> Dict[Any, Frame]:
        within: Dict[Any, List[tf.Operation]] = {}
        for op in self._graph.get_operations():
            within.setdefault(_tf.graphs.outermost_frame(op), []).append(op)
        frames = {}
        for outermost in self._outermost:
            ops = within[outermost]
            results = {user for op in ops for tensor in op.outputs for user in tensor.consumers()} - set(ops)
            has_effects = any(map(_tf.op_walks.changes_variable, ops))
            if has_effects and all(self._choice(one) is None for one in _tf.frames.contexts_of(ops[0])[:1]):
                raise NotCopied(f"{ops[0].name!r} belongs to a loop, or a conditional, that assigns to a variable")
            copies = [self._copies[op.name] for op in ops if op.name in self._copies]
            frames[outermost] = Frame(copies, list(results), has_effects)
        return frames

    def _of_call(self, call: tf.Operation) -> Frame:
        return Frame([copy for copy, owner in self._sources.items() if owner is call], [call], False)

    # ------------------------------------------------------------------------------------------------------------

    def image(self, tensor: tf.Tensor) -> Optional[tf.Tensor]:
        """Return what a tensor is in the copy: itself if it is the same for any value; None if it isn't computed."""
        key = self._aliases.get(tensor.name, tensor.name)
        if key is None:
            return None
        copy = None if key in self._begin else self._copies.get(_tf.graph_parts.name_of(key))
        if copy is not None:
            return copy.outputs[int(key.split(":")[1])]
        return self._graph.get_tensor_by_name(key)

    def copy_of(self, op: tf.Operation) -> Optional[tf.Operation]:
        """Return the copy of an operation, or None."""
        return self._copies.get(op.name)

    def source(self, op: tf.Operation) -> tf.Operation:
        """Return the original of a copy, or the conditional whose branch it was in; any other operation itself."""
        return self._sources.get(op, op)

    def frame_of(self, op: tf.Operation) -> Optional[Frame]:
        """Return the conditional or loop to which an operation belongs that is no copy, or None."""
        outermost = _tf.graphs.outermost_frame(op)
        return self._frames.get(op if outermost is None else outermost)
