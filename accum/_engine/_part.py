"""A part of a static graph that is computed again, in a loop, for other values of some of its tensors.

The operations of the part are copied: those that depend on what is fed, and whatever belongs to their loops and
conditionals. What they take from elsewhere, such as the values of variables, they take from the graph as it is.
"""

from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

from accum import _tf
from accum._engine._held_values import NOTHING, HeldValues, on_value, takes_values
from accum._tf import tf

Key = str


class Part:
    """Operations between fed and fetched tensors.

    Args:
      fetches: tensors that are computed again.
      fed: tensors that get other values each time.
      is_taken: function of (operation, index of an input) that says whether this input keeps the value that it has in
        the graph, although it depends on what is fed.
      held: the values that are taken in place of variables.

    Attributes:
      ops: the operations that are copied, in the order in which they were created.
      boundary: tensors that these take as they are.
    """

    def __init__(
        self,
        fetches: Sequence[tf.Tensor],
        fed: Sequence[tf.Tensor],
        is_taken: Callable[[tf.Operation, int], bool] = lambda op, index: False,
        held: HeldValues = NOTHING,
    ) -> None:
        self._graph = fetches[0].graph
        self._held = held
        self._fed = {tensor.name for tensor in fed}
        self._is_taken = is_taken
        wanted = self._wanted(fetches)
        kept = self._depending(wanted)
        kept |= self._waiting(wanted, kept)
        kept |= self._of_frames(wanted, kept)
        kept |= _guarded(wanted, kept)
        kept |= {op for op in wanted if _tf.graphs.makes_container(op)}  # each copy needs its own
        kept |= _constants(wanted)  # from which TensorFlow infers shapes, and we read axes
        self.ops = sorted(kept, key=_tf.graphs.creation_order)
        self._names = {op.name for op in self.ops}
        boundary: Dict[Key, tf.Tensor] = {}
        self._protos = [self._proto(op, boundary) for op in self.ops]
        self._free = [op.name for op, proto in zip(self.ops, self._protos) if _is_free(op, proto)]
        self.boundary = list(boundary.values())
        self._fetches = list(fetches)
        taken = {key for proto in self._protos for key in proto.input} | {tensor.name for tensor in fetches}
        self._needed = taken & self._fed

    def _wanted(self, fetches: Sequence[tf.Tensor]) -> List[tf.Operation]:
        """Return all operations between fed and fetched tensors, in the order in which they were created."""
        found: Set[tf.Operation] = set()
        stack = [tensor.op for tensor in fetches if tensor.name not in self._fed]
        while stack:
            op = stack.pop()
            if op not in found:
                found.add(op)
                stack += [tensor.op for tensor in op.inputs if tensor.name not in self._fed]
                frame = _tf.graphs.outermost_frame(op)
                if frame is not None:  # in which the forward pass pushes what the gradient pops
                    waited = [one for one in op.control_inputs if _tf.graphs.outermost_frame(one) == frame]
                    stack += [one for one in waited if not _tf.op_walks.changes_variable(one)]
                else:
                    stack += filter(_is_guard, op.control_inputs)
        return sorted(found, key=_tf.graphs.creation_order)

    def _depending(self, wanted: Sequence[tf.Operation]) -> Set[tf.Operation]:
        """Return the operations that depend on what is fed, through loops too."""
        users: Dict[tf.Operation, List[tf.Operation]] = {}
        stack: List[tf.Operation] = []
        for op in wanted:
            for index, tensor in enumerate(op.inputs):
                if self._is_taken(op, index):
                    continue
                if tensor.name in self._fed:
                    stack.append(op)
                else:
                    users.setdefault(tensor.op, []).append(op)
        kept: Set[tf.Operation] = set()
        while stack:
            op = stack.pop()
            if op not in kept:
                kept.add(op)
                stack += users.get(op, [])
        return kept

    def _waiting(self, wanted: Sequence[tf.Operation], kept: Set[tf.Operation]) -> Set[tf.Operation]:
        """Return the operations that depend on nothing that is fed but wait for it, as constants in gradients do."""
        awaited = kept | {self._graph.get_tensor_by_name(key).op for key in self._fed}
        return {op for op in wanted if op not in kept and any(other in awaited for other in op.control_inputs)}

    @staticmethod
    def _of_frames(wanted: Sequence[tf.Operation], kept: Set[tf.Operation]) -> Set[tf.Operation]:
        """Return the rest of TF 1's loops and conditionals that are copied, and what decides between branches."""
        frames = {_tf.graphs.outermost_frame(op) for op in kept} - {None}
        inside = {op for op in wanted if _tf.graphs.outermost_frame(op) in frames}
        stack = [other for op in inside | kept for other in op.control_inputs]
        pivots: Set[tf.Operation] = set()
        while stack:
            op = stack.pop()
            if op not in pivots and _is_pivot(op):
                pivots.add(op)
                stack += [tensor.op for tensor in op.inputs]
        return inside | pivots

    def _proto(self, op: tf.Operation, boundary: Dict[Key, tf.Tensor]) -> Any:
        inputs, variable = [], self._variable_held(op)
        for index, tensor in enumerate(op.inputs):
            is_inside = tensor.op.name in self._names or tensor.name in self._fed
            if is_inside and (not self._is_taken(op, index) or _are_in_one_frame(op, tensor.op)):
                inputs.append(tensor.name)
                continue
            boundary[tensor.name] = tensor
            if tensor is variable or (tensor.dtype != tf.resource and self._held.holds(tensor)):
                tensor = self._held.value(tensor)
                boundary[tensor.name] = tensor
            inputs.append(outside_key(tensor.name))
        inputs += [f"^{other.name}" for other in op.control_inputs if other.name in self._names]
        proto = _tf.graph_parts.placed(_tf.graph_parts.node_of(op), inputs)
        return proto if variable is None else on_value(op, proto, _tf.graph_parts.dtype_of_handle(variable))

    def _variable_held(self, op: tf.Operation) -> Optional[tf.Tensor]:
        """Return the handle of a variable whose value the copy of an operation gets; None if there is none."""
        while op.inputs and op.inputs[0].dtype == tf.resource:
            handle = op.inputs[0]
            if handle.op.name not in self._names:
                return handle if self._held.holds(handle) and takes_values(op) else None
            op = handle.op
        return None

    def takes(self, key: Key) -> bool:
        """Whether the part needs a tensor that is fed."""
        return key in self._needed

    def compute(
        self, values: Dict[Key, tf.Tensor], here: Callable[[tf.Tensor], tf.Tensor] = lambda tensor: tensor
    ) -> Dict[Key, Any]:
        """Copy the operations into the current graph and context.

        Args:
          values: {key: tensor} for what is fed and taken.
          here: function that returns what stands for a tensor of `boundary` where the operations are copied to.

        Returns:
          {key: tensor} for what is fetched, and {name: operation} for all operations that were copied.
        """
        feeds = dict(values)
        feeds.update((outside_key(tensor.name), here(tensor)) for tensor in self.boundary)
        wanted = [tensor.name for tensor in self._fetches if tensor.op.name in self._names]
        names = [op.name for op in self.ops]
        protos, _ = with_own_frames(self._protos, self._graph)
        fetches = wanted + names
        made = _tf.graph_parts.import_part(self._definition(), protos, feeds, fetches, self._graph) if names else []
        result = dict(zip(wanted + names, made))
        for name in self._free:  # TensorFlow lets them wait for the loop in which they are copied, not for their own
            _tf.graphs.remove_control_inputs(result[name])
        for tensor in self._fetches:
            if tensor.name not in result:
                result[tensor.name] = values[tensor.name] if tensor.name in values else here(tensor)
        return result

    def _definition(self) -> Any:
        """Return the versions of the graph and, for another graph, its functions; to write all of it takes long.

        Within the graph, TensorFlow would put others in the place of its functions, and forget them.
        """
        calls = any(_tf.graph_parts.functions_of(proto) for proto in self._protos)
        if calls and self._graph is not tf.compat.v1.get_default_graph():
            return self._graph.as_graph_def()
        return tf.compat.v1.GraphDef(versions=self._graph.graph_def_versions)


def _is_free(op: tf.Operation, proto: Any) -> bool:
    """Whether an operation takes tensors of a loop of TF 1, and waits for nothing else."""
    is_within = any(_tf.graphs.is_within_loop(one.op) for one in op.inputs)
    return is_within and not any(key.startswith("^") for key in proto.input)


def with_own_frames(protos: Sequence[Any], graph: tf.Graph) -> Tuple[List[Any], str]:
    """Return nodes whose loops have names that no others have, and how these end: TensorFlow knows loops by name."""
    if not any("frame_name" in proto.attr for proto in protos):
        return list(protos), ""
    notes = _tf.graphs.notes_of(graph)
    notes["frames"] = number = notes.get("frames", 0) + 1
    suffix = f"_accum_{number}"
    renamed = []
    for proto in protos:
        copy = tf.compat.v1.NodeDef()
        copy.CopyFrom(proto)
        if "frame_name" in copy.attr:
            copy.attr["frame_name"].s += suffix.encode()
        renamed.append(copy)
    return renamed, suffix


def _constants(ordered: Sequence[tf.Operation]) -> Set[tf.Operation]:
    """Return the operations that compute small constants."""
    constants: Set[tf.Operation] = set()
    for op in ordered:
        is_constant = op.type == "Const" if not op.inputs else all(tensor.op in constants for tensor in op.inputs)
        is_constant = is_constant and op.type not in ("PlaceholderWithDefault", *_tf.op_walks.MERGES)  # fed, or chosen
        sizes = [tensor.shape.num_elements() for tensor in op.outputs]
        if (
            is_constant
            and not op.op_def.is_stateful
            and sizes
            and all(size is not None and size <= 1024 for size in sizes)
        ):
            constants.add(op)
    return constants


def outside_key(key: Key) -> Key:
    """Return what the copies call a tensor that they take from the graph as it is."""
    return f"accum_outside/{key}"


def _are_in_one_frame(op: tf.Operation, other: tf.Operation) -> bool:
    """Whether two operations are in the same loop or conditional of TF 1, of whose branches only one has values."""
    frame = _tf.graphs.outermost_frame(op)
    return frame is not None and frame == _tf.graphs.outermost_frame(other)


def _is_guard(op: tf.Operation) -> bool:
    """Whether what waits for an operation is computed in one branch of a conditional of TF 1 alone."""
    switches = _tf.op_walks.SWITCHES
    return op.type in switches or (op.type == "Identity" and op.inputs[0].op.type in switches)


def _guarded(wanted: Sequence[tf.Operation], kept: Set[tf.Operation]) -> Set[tf.Operation]:
    """Return what those that are copied take, and is computed in one branch alone: zeros in gradients of the other.

    What is not computed in the graph can't be taken from there. Results of a whole conditional can.
    """
    users: Dict[tf.Operation, List[tf.Operation]] = {}
    for op in wanted:
        for source in _tf.op_walks.sources_of(op):
            users.setdefault(source, []).append(op)
    switches = [op for op in wanted if op.type in _tf.op_walks.SWITCHES and not _tf.graphs.is_within_loop(op)]
    guarded = _tf.op_walks.reached(switches, users, _tf.op_walks.MERGES) - kept
    sources = lambda op: [one for one in _tf.op_walks.sources_of(op) if one in guarded]
    return guarded.intersection(_tf.op_walks.ancestors(kept, sources=sources))


def _is_pivot(op: tf.Operation) -> bool:
    """Whether an operation passes the condition of a conditional of TF 1 on, by which its branches wait."""
    around = [op, *(tensor.op for tensor in op.inputs), *(user for one in op.outputs for user in one.consumers())]
    switches = _tf.op_walks.SWITCHES
    is_condition = any(tensor.dtype.base_dtype == tf.bool for tensor in op.outputs)
    return is_condition and op.type in (*switches, "Identity") and any(one.type in switches for one in around)
