"""Walk the operations of a graph, and tell what they do to variables."""

import re
from typing import Any, Callable, Container, Dict, Iterable, Iterator, List, Optional, Sequence, Set

from accum._tf.version import tf

FUSED_BATCH_NORMS = ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
SWITCHES = ("Switch", "RefSwitch")
"""Types of operations by which TensorFlow 1 enters a branch of a conditional."""

ENTERS = ("Enter", "RefEnter")
ENTRANCES = SWITCHES + ENTERS
"""By which a tensor enters a conditional or a loop of TF 1."""

MERGES = ("Merge", "RefMerge")
"""At which the branches of a conditional meet, and a loop begins again."""

NEXT = ("NextIteration", "RefNextIteration")
EXITS = ("Exit", "RefExit")
"""By which a loop hands a tensor to its next iteration, and to what is outside of it."""

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def ancestors(
    ops: Iterable[tf.Operation],
    ends: Container[tf.Operation] = (),
    with_control: bool = False,
    sources: Optional[Callable[[tf.Operation], List[tf.Operation]]] = None,
) -> List[tf.Operation]:
    """Return operations and all from which they are computed, each after what it uses, as far back as `ends`.

    Args:
      ops: operations of one graph.
      ends: operations that are left out, with all before them.
      with_control: whether to return also those that run before by a control dependency.
      sources: function that returns the operations that one uses, in place of `with_control`.
    """
    ordered: List[tf.Operation] = []
    done: Set[tf.Operation] = set()
    stack = [(op, False) for op in ops]
    while stack:
        op, is_ready = stack.pop()
        if is_ready:
            ordered.append(op)
        elif op not in done and op not in ends:
            done.add(op)
            stack.append((op, True))
            before = sources_of(op, with_control) if sources is None else sources(op)
            stack.extend((source, False) for source in before)
    return ordered


def sources_of(op: tf.Operation, with_control: bool = True) -> List[tf.Operation]:
    """Return the operations whose tensors an operation uses, and those for which it waits."""
    return [tensor.op for tensor in op.inputs] + (list(op.control_inputs) if with_control else [])


def depends_on_variables_alone(
    tensor: tf.Tensor, or_lengths: bool = False, examples: Container[tf.Operation] = ()
) -> bool:
    """Whether a tensor of a function is computed from variables and constants, and not drawn.

    Args:
      tensor: the tensor.
      or_lengths: whether it may be computed from lengths of other tensors too, but for their first axes.
      examples: operations that compute examples, perhaps from constants.
    """
    stack, seen = [tensor], set()
    while stack:
        one = stack.pop()
        op = one.op
        if one.name in seen or (or_lengths and _is_inner_length(one)):
            continue
        seen.add(one.name)
        is_state = op.type in ("VarHandleOp", *_READS) or (op.type == "Placeholder" and one.dtype == tf.resource)
        if not is_state and (op.type == "Placeholder" or op.op_def.is_stateful or op in examples):
            return False
        stack += op.inputs
    return True


def _is_inner_length(tensor: tf.Tensor) -> bool:
    """Whether a tensor has lengths of another one, but not that of its first axis."""
    op = tensor.op
    source = op.inputs[0].op if op.type in ("StridedSlice", "Unpack") else None
    if source is None or source.type != "Shape":
        return False
    if op.type == "Unpack":
        return tensor.value_index > 0
    begin, rank = tf.get_static_value(op.inputs[1]), source.inputs[0].shape.rank
    strides = tf.get_static_value(op.inputs[3])
    if begin is None or len(begin) != 1 or op.get_attr("begin_mask") or strides is None or strides[0] != 1:
        return False
    return begin[0] > 0 or (begin[0] < 0 and rank is not None and rank + begin[0] > 0)


OF_SHAPES = frozenset(["OnesLike", "Rank", "Shape", "ShapeN", "Size", "ZerosLike"])
"""Types of operations that know the shape of what they take, and nothing else of it."""


def holds_values(tensor: tf.Tensor) -> bool:
    """Whether a tensor is computed from placeholders otherwise than by their shapes."""
    sources = lambda op: [] if op.type in OF_SHAPES else sources_of(op, with_control=False)
    return any(op.type == "Placeholder" for op in ancestors([tensor.op], sources=sources))


def differentiated_by(tensors: Iterable[tf.Tensor]) -> Set[str]:
    """Return the names of the tensors of a graph to which gradients of `tensors` may flow, without these themselves."""
    names: Set[str] = set()
    waiting = list(tensors)
    while waiting:
        tensor = waiting.pop()
        has_none = tensor.op.type in OF_SHAPES or tensor.op.type in ("PreventGradient", "StopGradient")
        if has_none or not (tensor.dtype.is_floating or tensor.dtype.is_complex):
            continue
        new = [one for one in tensor.op.inputs if one.name not in names]
        names.update(one.name for one in new)
        waiting += new
    return names


def are_alike(one: tf.Tensor, other: tf.Tensor, but_for_shapes: bool = False) -> bool:
    """Whether two tensors of a graph are computed by the same operations from the same inputs, other than at random.

    Args:
      one, other: the tensors.
      but_for_shapes: whether shapes are taken to be the same, whatever they are of.
    """
    stack, seen = [(one, other)], set()
    while stack:
        pair = [_before_identity(tensor) for tensor in stack.pop()]
        first, second = (tensor.op for tensor in pair)
        if first is second or (first, second) in seen:
            if pair[0].value_index != pair[1].value_index:
                return False
            continue
        seen.add((first, second))
        if but_for_shapes and first.type == second.type and first.type in OF_SHAPES:
            continue
        is_source = first.type == "Placeholder" or first.op_def.is_stateful
        attributes = [{key: str(value) for key, value in op.node_def.attr.items()} for op in (first, second)]
        if is_source or first.type != second.type or attributes[0] != attributes[1]:
            return False
        if pair[0].value_index != pair[1].value_index or len(first.inputs) != len(second.inputs):
            return False
        stack += zip(first.inputs, second.inputs)
    return True


def _before_identity(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type == "Identity":
        (tensor,) = tensor.op.inputs
    return tensor


def descendants(ops: Iterable[tf.Operation]) -> Set[tf.Operation]:
    """Return operations of one graph and all that use them or wait for them, but for what a loop hands back."""
    reached = set(ops)
    graph = next((op.graph for op in reached), None)
    has_begun = False
    for op in graph.get_operations() if graph is not None else ():  # in the order in which they were created
        has_begun = has_begun or op in reached
        if has_begun and op not in reached and any(source in reached for source in sources_of(op)):
            reached.add(op)
    return reached


def users_of(graph: tf.Graph, with_control: bool = False) -> Dict[tf.Operation, List[tf.Operation]]:
    """Return {operation: those that take its tensors}, and with `with_control` those that wait for it."""
    users: Dict[tf.Operation, List[tf.Operation]] = {}
    for op in graph.get_operations():
        for source in sources_of(op, with_control):
            users.setdefault(source, []).append(op)
    return users


def reached(
    starts: Iterable[tf.Operation], users: Dict[tf.Operation, List[tf.Operation]], ends: Container[str] = ()
) -> Set[tf.Operation]:
    """Return operations and all that are computed from them, through loops too, but not through types of `ends`."""
    found: Set[tf.Operation] = set()
    stack = list(starts)
    while stack:
        op = stack.pop()
        if op not in found and op.type not in ends:
            found.add(op)
            stack += users.get(op, [])
    return found


def following(ordered: Sequence[tf.Operation], first: Set[tf.Operation], ends: Sequence[str] = ()) -> Set[tf.Operation]:
    """Return `first` and what is computed from them, other than by ops of the types `ends`, among `ordered` ops."""
    reached = set(first)
    for op in ordered:
        if op.type not in ends and any(tensor.op in reached for tensor in op.inputs):
            reached.add(op)
    return reached


def gives_data(op: tf.Operation) -> bool:
    """Whether an op provides a micro-batch, or a part of it: a scalar, such as a rate or a mode, is none."""
    is_source = op.type.startswith(("Placeholder", "IteratorGetNext", "QueueDequeue", "Unstage"))
    return is_source and any(tensor.shape.rank != 0 for tensor in op.outputs)


def entered(tensor: Any) -> Any:
    """Return the tensor that was passed into a conditional or loop of TF 1, for a tensor at its entrance."""
    while tensor.op.type in ENTRANCES:
        tensor = tensor.op.inputs[0]
    return tensor


_ELEMENTWISE = frozenset(
    ["Add", "AddV2", "BiasAdd", "Div", "DivNoNan", "Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "Maximum"]
    + ["Minimum", "Mul", "MulNoNan", "Pow", "RealDiv", "Select", "SelectV2", "SquaredDifference", "Sub"]
)


def meets_rows(tensor: tf.Tensor, of_one: bool) -> bool:
    """Whether a tensor in a graph, or what is computed of its rows, is combined with one row by row of data.

    Args:
      tensor: a tensor whose first axis has a known length.
      of_one: whether data of one row count, which broadcast. Else those of an unknown number of rows do.
    """
    waiting, seen = [tensor], {tensor.name}
    while waiting:
        part = waiting.pop()
        for op in part.consumers():
            others = [one for one in op.inputs if one.name != part.name and one.shape.rank == part.shape.rank]
            if _is_row_by_row(op) and any(_has_rows_of_data(other, of_one) for other in others):
                return True
            new = [one for one in op.outputs if one.shape.rank and one.shape[0] == part.shape[0]]
            waiting.extend(one for one in new if one.name not in seen)
            seen.update(one.name for one in new)
    return False


def _is_row_by_row(op: tf.Operation) -> bool:
    """Whether an operation takes as many rows of each tensor, or repeats the only row of one."""
    return op.type in _ELEMENTWISE or (op.type == "ConcatV2" and tf.get_static_value(op.inputs[-1]) not in (0, None))


def _has_rows_of_data(tensor: tf.Tensor, of_one: bool) -> bool:
    length = tensor.shape[0]
    if length is not None and (not (of_one and int(length) == 1) or _has_new_first_axis(tensor)):
        return False
    before = ancestors([tensor.op], sources=lambda op: [] if "Random" in op.type else sources_of(op, False))
    return any(gives_data(op) for op in before)


def _has_new_first_axis(tensor: tf.Tensor) -> bool:
    """Whether the first axis of a tensor has been added to it, so that it broadcasts on purpose."""
    op = tensor.op
    if op.type == "ExpandDims":
        return bool(tf.get_static_value(op.inputs[1]) == 0)
    if op.type == "StridedSlice":
        return bool(op.get_attr("new_axis_mask") & 1)
    alike = [one for one in op.inputs if one.shape.rank == tensor.shape.rank]
    passes = op.type in _ELEMENTWISE or op.type in ("Cast", "Exp", "Identity", "Neg", "Softplus", "Sqrt", "Square")
    return passes and any(_has_new_first_axis(one) for one in alike)


_TO_PARTS = ("LookupTableInsert", "LookupTableRemove", "StridedSliceAssign")
"""Operations that assign to parts of a variable, or of a table."""


def is_assignment(kind: str) -> bool:
    """Whether an operation of this type assigns to a resource variable, or to parts of it or of a table."""
    own = kind[len("Resource") :] if kind.startswith("Resource") else kind
    return (
        own.startswith(_TO_PARTS)
        or kind.startswith("ResourceScatter")
        or (kind.startswith("Assign") and kind.endswith("Op"))
    )


def changes_variable(op: tf.Operation) -> bool:
    """Whether an operation itself changes a variable, by its ref or its handle."""
    if not is_change(op.type) or not len(op.inputs):
        return False
    dtype = op.inputs[0].dtype
    return dtype == tf.resource or dtype != dtype.base_dtype


def is_change(kind: str) -> bool:
    """Whether operations of a type change what they take first, if that is a variable."""
    kind = kind[len("Resource") :] if kind.startswith("Resource") else kind
    return kind.startswith(("Assign", "Scatter", "CountUpTo", "Apply", "SparseApply", *_TO_PARTS))


def assigned_in_branches(
    graph: Any, operations: Iterable[tf.Operation], conditions: Sequence[tf.Tensor] = ()
) -> Set[int]:
    """Return the ids of the resource tensors to which operations assign in the branch of a conditional.

    Args:
      graph: the graph of a function.
      operations: operations of it.
      conditions: handles of variables, which this graph captures. What their values decide is left out.
    """
    spared = {id(inside) for outside, inside in captures_of(graph) if any(outside is one for one in conditions)}
    library, handles = None, set()  # type: Any, Set[int]
    for op in operations:
        if op.type not in ("If", "StatelessIf"):
            continue
        before = ancestors([op.inputs[0].op])
        if any(id(tensor) in spared for one in before for tensor in one.inputs):
            continue
        library = library or {function.signature.name: function for function in graph.as_graph_def().library.function}
        for branch in ("then_branch", "else_branch"):
            arguments = _assigned_arguments(library, op.get_attr(branch).name)
            handles.update(id(op.inputs[1 + index]) for index in arguments)
    return handles


def assigned_handles(graph: Any, operations: Iterable[tf.Operation]) -> Set[int]:
    """Return the ids of the resource tensors to which operations assign, themselves or in a function that they call.

    Branches and loops are left out, because they may not run.
    """
    handles: Set[int] = set()
    calls = []
    for op in operations:
        if is_assignment(op.type):
            handles.add(id(op.inputs[0]))
        elif op.type in _CALLS and _may_assign(op):
            calls.append(op)
    if calls:
        library = {function.signature.name: function for function in graph.as_graph_def().library.function}
        for op in calls:
            handles.update(id(op.inputs[index]) for index in _assigned_arguments(library, op.get_attr("f").name))
    return handles


_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp", "VariableShape")


def changed_outside(graph: Any) -> Set[int]:
    """Return the ids of the outermost resource tensors to which operations of a graph do more than read."""
    outside = outermost_of(graph)
    return {id(outside(tensor)) for tensor in more_than_read(graph.get_operations())}


def more_than_read(operations: Iterable[tf.Operation]) -> List[tf.Tensor]:
    """Return the resource tensors to which operations do more than read, also in a branch, loop or function."""
    changed: List[tf.Tensor] = []
    for op in operations:
        if op.type not in _READS:
            changed += [op.inputs[index] for index in _not_only_read(op)]
    return changed


def may_assign_beside(graph: Any, spared: Iterable[tf.Tensor]) -> bool:
    """Whether the graph of a function may assign to variables other than those with the handles `spared`.

    In a loop, conditional or function that it calls, any assignment counts.
    """
    library = graph.as_graph_def().library.function
    if any(is_assignment(node.op) for function in library for node in function.node_def):
        return True
    assigned, kept = assigned_handles(graph, graph.get_operations()), {id(handle) for handle in spared}
    return any(id(inside) in assigned and id(outside) not in kept for outside, inside in captures_of(graph))


def assigned_variables(graph: Any, operations: Optional[Iterable[tf.Operation]] = None) -> List[tf.Variable]:
    """Return the variables to which operations of a function's graph, or all of them, assign outside of branches."""
    handles = assigned_handles(graph, graph.get_operations() if operations is None else operations)
    outside = {id(captured) for captured, inside in captures_of(graph) if id(inside) in handles}
    # What `graph.variables` returns is known only when the trace has ended.
    return [var for var in getattr(graph, "_watched_variables", ()) if id(getattr(var, "handle", None)) in outside]


def may_change(ops: Iterable[tf.Operation], var: Any) -> bool:
    """Whether one of `ops`, which are all of the current graph, may assign to `var`, or calls a function that may.

    Dies with `tf.compat.v1`.
    """
    outside = outermost()
    owner = var.handle if hasattr(var, "handle") else var

    def is_var(tensor: tf.Tensor) -> bool:
        return outside(entered(tensor)).op is owner.op

    calls = ("If", "While", "Case") + _CALLS
    return any((changes_variable(op) or op.type.startswith(calls)) and any(map(is_var, op.inputs)) for op in ops)


def count_calls(graph: tf.Graph, function_graph: tf.Graph) -> int:
    """Count the calls in `graph` of a `tf.function` that has the name of the one traced as `function_graph`."""
    name = re.compile(r"__(inference|forward)_{}_\d+$".format(re.escape(function_graph.name)))
    calls = [op for op in graph.get_operations() if op.type in _CALLS]
    return len([op for op in calls if name.match(op.get_attr("f").name)])


def captures_of(graph: Any) -> Any:
    """Return a list of (tensor outside, tensor inside) for what the graph of a function captures."""
    captures = getattr(graph, "captures", ())
    return list(captures() if callable(captures) else captures)


_KEEPING = ("Cast", "ExpandDims", "Identity", "Reshape", "Squeeze")


def sources_of_value(tensor: tf.Tensor) -> Iterator[tf.Tensor]:
    """Yield a tensor, and those whose values it has, but for its dtype and axes of length 1, out of functions too."""
    while tensor is not None:
        yield tensor
        if tensor.op.type in _KEEPING and tf.bool not in (tensor.dtype, tensor.op.inputs[0].dtype):
            tensor = tensor.op.inputs[0]
        else:
            tensor = next((outside for outside, inside in captures_of(tensor.graph) if inside is tensor), None)


def _captured(graph: Any) -> List[Any]:
    """Return a list of (tensor in the outermost graph, tensor inside)."""
    outer = getattr(graph, "outer_graph", None)
    further = {id(inside): outside for outside, inside in _captured(outer)} if outer is not None else {}
    return [(further.get(id(outside), outside), inside) for outside, inside in captures_of(graph)]


def outermost() -> Callable[[Any], Any]:
    """Return a function that returns a tensor of the current graph as it is outside of conditionals and functions.

    That is the tensor which they capture, or the tensor itself. Dies with `tf.compat.v1`.
    """
    return outermost_of(tf.compat.v1.get_default_graph())


def outermost_of(graph: Any) -> Callable[[Any], Any]:
    """Return what `outermost` does, for the tensors of any graph."""
    outer = {id(inside): outside for outside, inside in _captured(graph)}
    return lambda tensor: outer.get(id(tensor), tensor)


def _may_assign(op: tf.Operation) -> bool:
    """Whether a function that is called receives a variable to which it does more than read."""
    return bool(_not_only_read(op))


def _not_only_read(op: tf.Operation) -> List[int]:
    """Return the places of the resources among the inputs of an operation which it is not said only to read."""
    places = [index for index, tensor in enumerate(op.inputs) if tensor.dtype == tf.resource]
    if not places:
        return []
    try:
        reads: Sequence[int] = op.get_attr("_read_only_resource_inputs")
    except ValueError:  # no call, or called where nothing orders operations automatically
        reads = ()
    return [index for index in places if index not in reads]


def _assigned_arguments(library: Dict[str, Any], name: str) -> Set[int]:
    """Return the places of the arguments of a function to which it assigns."""
    function = library[name]
    index_of_argument = {argument.name: index for index, argument in enumerate(function.signature.input_arg)}
    assigned: Set[str] = set()
    for node in function.node_def:
        if is_assignment(node.op):
            assigned.add(node.input[0])
        elif node.op in _CALLS:
            assigned.update(node.input[index] for index in _assigned_arguments(library, node.attr["f"].func.name))
    return {index_of_argument[name] for name in assigned if name in index_of_argument}
