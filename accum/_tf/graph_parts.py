"""Read the graph of a function, and run parts of it."""

import contextlib
import inspect
import itertools
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from accum._tf.graphs import graphs_within, notes_of
from accum._tf.op_walks import (
    FUSED_BATCH_NORMS,
    ancestors,
    assigned_handles,
    captures_of,
    is_assignment,
    more_than_read,
    outermost_of,
)
from accum._tf.random_ops import DRAWING, STATEFUL_DRAWS
from accum._tf.version import IS_KERAS_3, VERSION, tf

Key = str
"""The name of a tensor in a graph, such as "model/dense/MatMul:0"."""


class Node(NamedTuple):
    """An operation of a graph.

    Attributes:
      name, type: str.
      inputs: keys of the tensors that it takes. Control dependencies are left out.
      proto: its `NodeDef`.
    """

    name: str
    type: str
    inputs: List[Key]
    proto: Any


def nodes_of(graph_def: Any) -> Dict[str, Node]:
    """Return {name: `Node`} of a `GraphDef`, in the order in which the operations were created."""
    return {node.name: Node(node.name, node.op, [_key(name) for name in _data(node)], node) for node in graph_def.node}


def node_of(op: tf.Operation) -> Node:
    """Return the `Node` of an operation."""
    return Node(op.name, op.type, [tensor.name for tensor in op.inputs], op.node_def)


def _data(node: Any) -> List[str]:
    return [name for name in node.input if not name.startswith("^")]


def _key(name: str) -> Key:
    return name if ":" in name else f"{name}:0"


def name_of(key: Key) -> str:
    """Return the name of the operation that makes a tensor."""
    return key.split(":")[0]


def new_node(name: str, kind: str, inputs: Sequence[Key], **dtypes: tf.DType) -> Node:
    """Return a `Node` for a graph, with dtypes as its attributes."""
    proto = tf.compat.v1.NodeDef(name=name, op=kind)
    for attribute, dtype in dtypes.items():
        proto.attr[attribute].type = dtype.as_datatype_enum
    return Node(name, kind, list(inputs), proto)


def placed(node: Node, inputs: Sequence[Key]) -> Any:
    """Return the `NodeDef` of a node with other inputs, and without what ties it to operations elsewhere."""
    proto = tf.compat.v1.NodeDef()
    proto.CopyFrom(node.proto)
    del proto.input[:]
    proto.input.extend(inputs)
    proto.attr.pop("_class", None)  # with which operations it shares a device
    return proto


def import_part(
    graph_def: Any,
    protos: Sequence[Any],
    feeds: Dict[Key, tf.Tensor],
    fetches: Sequence[str],
    source: Optional[tf.Graph] = None,
) -> List[Any]:
    """Add operations of another graph to the current one.

    Args:
      graph_def: a `GraphDef` with the versions and functions of the graph from which they are.
      protos: list of `NodeDef`.
      feeds: {key: tensor of the current graph that takes the place of that one}; they may take fewer.
      fetches: keys of tensors, or names of operations.
      source: the graph from which they are, if that is another one. If they call its functions, what is traced keeps it
        alive: TensorFlow forgets the functions of a graph that is collected.

    Returns:
      List of the tensors and operations in `fetches`.
    """
    part = tf.compat.v1.GraphDef()
    part.versions.CopyFrom(graph_def.versions)
    if any(functions_of(proto) for proto in protos):
        part.library.CopyFrom(graph_def.library)
        for graph in graphs_within(None)[-1:]:
            notes_of(graph).setdefault("accum_sources", set()).add(source)
    part.node.extend(protos)
    taken = {key for proto in protos for key in proto.input}
    taken_feeds = {key: tensor for key, tensor in feeds.items() if key in taken}
    return tf.graph_util.import_graph_def(part, input_map=taken_feeds, return_elements=list(fetches), name="segment")


_create_op = inspect.unwrap(tf.Graph.create_op)  # that which looks for deprecated arguments takes twice the time


def made(
    graph: tf.Graph, kind: str, inputs: Sequence[tf.Tensor], name: str, attributes: Dict[str, Any]
) -> List[tf.Tensor]:
    """Add one operation to a graph and return its outputs, whose shapes TensorFlow infers.

    To import many small parts takes longer: in old versions of TensorFlow, each import looks at the whole graph.

    Args:
      graph: the graph.
      kind: the type of the operation.
      inputs: tensors of the graph.
      name: of the operation; if there is one of this name, a number is added.
      attributes: {name: `AttrValue`}.

    Raises:
      ValueError, tf.errors.OpError: the operation can't take these inputs.
    """
    return list(_create_op(graph, kind, inputs, name=name, attrs=attributes).outputs)


def plain_session() -> Any:
    """Return a session on the host, for the current graph, which is computed as it is written."""
    config = tf.compat.v1.ConfigProto(device_count={"GPU": 0}, allow_soft_placement=True)
    config.graph_options.optimizer_options.opt_level = -1
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return tf.compat.v1.Session(config=config)


def is_settled_at_once(graph: Any, operations: Sequence[tf.Operation], handle: Any) -> bool:
    """Whether operations that run again find a variable as they used it before, because they mask or clip it first.

    They do if they assign once, before anything else uses the variable, what is computed from it and constants alone,
    and if that stays as it is when it is computed from itself, for numbers at random.

    Args:
      graph: the graph of a function.
      operations: those that run, in their order.
      handle: of the variable, in that graph.
    """
    value = _value_before_use(graph, operations, handle)
    if value is None or not value.dtype.is_floating or not value.shape.is_fully_defined():
        return False
    ops = ancestors([value.op])
    reads = [op for op in ops if op.type == "ReadVariableOp"]
    outside = outermost_of(graph)
    fed = [op.outputs[0] for op in ops if op.type == "Placeholder" and op.outputs[0].dtype != tf.resource]
    constants = {tensor.name: outside(tensor) for tensor in fed}
    is_known = all(hasattr(constant, "numpy") for constant in constants.values())
    others = [op for op in ops if op not in reads and op.type != "Placeholder" and op.op_def.is_stateful]
    if others or not is_known or not reads or any(op.inputs[0] is not handle for op in reads):
        return False
    part = tf.compat.v1.GraphDef()
    part.versions.CopyFrom(graph.as_graph_def().versions)
    copied = [op for op in ops if op not in reads and op.type != "Placeholder"]
    part.node.extend([placed(node_of(op), _data(op.node_def)) for op in copied])  # those of a conditional wait for it
    with tf.Graph().as_default(), plain_session() as session:
        before = tf.compat.v1.placeholder(value.dtype, value.shape)
        feeds = {name: tf.constant(constant.numpy()) for name, constant in constants.items()}
        feeds.update((op.outputs[0].name, before) for op in reads)
        (after,) = tf.graph_util.import_graph_def(part, input_map=feeds, return_elements=[value.name], name="part")
        once = session.run(after, {before: 2.0 * np.random.RandomState(0).normal(size=value.shape.as_list())})
        return np.allclose(session.run(after, {before: once}), once, rtol=1e-5, atol=1e-6)


def _value_before_use(graph: Any, operations: Sequence[tf.Operation], handle: Any) -> Optional[tf.Tensor]:
    """Return what operations assign to a variable, if they do so once, and use it before only to compute that."""
    uses = [index for index, op in enumerate(operations) if any(tensor is handle for tensor in op.inputs)]
    assigns = [index for index in uses if is_assignment(operations[index].type)]
    if len(assigns) != 1 or operations[assigns[0]].type != "AssignVariableOp":
        return None
    (index,) = assigns
    if id(handle) in assigned_handles(graph, operations[index + 1 :]):
        return None
    value = operations[index].inputs[1]
    computing = {*ancestors([value.op]), operations[index]}
    earlier = [operations[use] for use in uses if use < index]
    users = {user for read in earlier for output in read.outputs for user in output.consumers()}
    return value if {*earlier, *users} <= computing else None


def captured(tensor: Any) -> Any:
    """Return a tensor of an outer graph, or an eager one, as a tensor of the current graph, a function's."""
    graph = tf.compat.v1.get_default_graph()
    is_here = getattr(tensor, "graph", None) is graph if not hasattr(tensor, "numpy") else False
    return tensor if is_here or not hasattr(graph, "capture") else graph.capture(tensor)


def functions_of(proto: Any) -> List[str]:
    """Return the names of the functions that an operation calls."""
    names = []
    for value in proto.attr.values():
        if value.HasField("func"):
            names.append(value.func.name)
        names += [function.name for function in value.list.func]
    return names


def own_gradients_in(graph: tf.Graph) -> Set[str]:
    """Return the names of operations that have, or whose functions have, another gradient than that of the type."""
    graph_def = graph.as_graph_def()
    bodies = {function.signature.name: function.node_def for function in graph_def.library.function}
    marked: Set[str] = set()

    def names_in(nodes: Any) -> Set[str]:
        return {one.name for one in nodes if "_gradient_op_type" in one.attr or marked.intersection(functions_of(one))}

    before = None
    while before != len(marked):
        before = len(marked)
        marked.update(name for name, nodes in bodies.items() if name not in marked and names_in(nodes))
    return names_in(graph_def.node)


REPEATABLE = {
    "CheckNumerics",
    "CheckNumericsV2",
    "Placeholder",
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
    "VarHandleOp",
    "VariableV2",
    "Variable",
    "VarIsInitializedOp",
    "VariableShape",
    "CudnnRNNV3",
    "CudnnRNNBackpropV3",
}
"""Stateful operations that compute the same when they run again."""

LOOPS = {"While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase"}
CALLS = LOOPS | {"PartitionedCall", "StatefulPartitionedCall"}


NEXT = ("CandidateSampler", "CountUpTo", "Dequeue", "DistortedBoundingBox", "GetNext", "NonDeterministicInts") + (
    "RandomCrop",
    "ReaderRead",
    "RecordInput",
    "Timestamp",
    "Unstage",
)
"""Parts of types of operations that return something else each time, which all examples of a batch get."""

FILLING = ("BarrierClose", "BarrierInsertMany", "Enqueue", "LookupTableImport", "QueueClose", "Stage") + (
    "ResourceApply",
    "ResourceSparseApply",
)
"""Parts of types of operations that change a table, a queue or the like, or make an optimizer's step."""

ACTING = {"Assert", "PrintV2", "PyFunc", "EagerPyFunc"}
"""Operations that conditionals and loops contain for their effect."""


def is_repeatable(kind: str) -> bool:
    """Whether a type of operations is known to compute the same again, though some of them are said to have a state."""
    return kind in REPEATABLE or kind.startswith(("Stateless", "TensorArray", "TensorList", "Stack"))


class Library:
    """The functions that a graph calls, and what they do beside computing.

    Args:
      graph: a `tf.Graph`.
      graph_def: its `GraphDef`.
    """

    def __init__(self, graph: Any, graph_def: Any) -> None:
        self._graph = graph
        self._functions = {function.signature.name: function for function in graph_def.library.function}
        self._stateful: Dict[str, bool] = {}
        self._ops_of: Dict[str, Set[str]] = {}

    def is_stateful(self, node: Node) -> bool:
        """Whether an operation may compute something else when it runs again, or has an effect."""
        if is_repeatable(node.type):
            return False
        if node.type not in self._stateful:
            try:
                definition = self._graph.get_operation_by_name(node.name).op_def
            except KeyError:  # a node of ours
                return False
            self._stateful[node.type] = bool(definition is not None and definition.is_stateful)
        return self._stateful[node.type]

    def only_acts(self, node: Node) -> bool:
        """Whether an operation is there for its effect alone: an assertion, a print, a call of Python."""
        try:
            outputs = self._graph.get_operation_by_name(node.name).outputs
        except KeyError:  # a node of ours
            return False
        if not outputs:
            return node.type != "NoOp"
        return node.type in LOOPS and bool(self.types_within(node) & ACTING)

    def hidden(self, node: Node) -> Set[str]:
        """Return the types of operations in the functions that `node` calls, at any depth, that can't be repeated."""
        names: Set[str] = set()
        for name in functions_of(node.proto):
            names |= self._within(name)
        return names

    def changes(self, node: Node) -> Set[str]:
        """Return the types of operations that change a variable, a table or a queue, in functions that `node` calls.

        If `node` itself fills a table or a queue, it is its type.
        """
        within = self.types_within(node) if node.type in CALLS else set()
        return set(filter(_fills, (node.type, *within))) | set(filter(is_assignment, within))

    def types_within(self, node: Node) -> Set[str]:
        """Return the types of operations in the functions that `node` calls, at any depth."""
        types: Set[str] = set()
        waiting, seen = functions_of(node.proto), set()
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                for inner in getattr(self._functions.get(name), "node_def", ()):
                    types.add(inner.op)
                    waiting += functions_of(inner)
        return types

    def draws_in_call(self, proto: Any, is_called: bool = False) -> bool:
        """Whether an operation calls a function that draws random numbers, perhaps in a conditional or loop.

        Args:
          proto: its `NodeDef`.
          is_called: whether it is within such a function.
        """
        is_called = is_called or proto.op in CALLS - LOOPS
        bodies = [self._functions[name].node_def for name in functions_of(proto) if name in self._functions]
        inner = [node for body in bodies for node in body]
        return any((is_called and node.op in DRAWING) or self.draws_in_call(node, is_called) for node in inner)

    def normalizes(self, proto: Any) -> bool:
        """Whether the functions that an operation calls normalise, or may do so, by statistics of their first axis."""
        functions = [self._functions.get(name) for name in functions_of(proto)]
        bodies = [list(function.node_def) for function in functions if function is not None]
        return any(_normalizes(body, proto.op in LOOPS) or any(map(self.normalizes, body)) for body in bodies)

    def _within(self, name: str) -> Set[str]:
        if name not in self._ops_of:
            self._ops_of[name] = set()
            for node in getattr(self._functions.get(name), "node_def", ()):
                is_draw = node.op in STATEFUL_DRAWS or (node.op.startswith("Stateful") and node.op not in CALLS)
                if (
                    is_draw
                    or is_assignment(node.op)
                    or node.op in ("PyFunc", "EagerPyFunc")
                    or _takes_the_next(node.op)
                ):
                    self._ops_of[name].add(node.op)
                for inner in functions_of(node):
                    self._ops_of[name] |= self._within(inner)
        return self._ops_of[name]


def calls_that_draw(graph: Any, ops: Sequence[tf.Operation]) -> List[str]:
    """Return the names of those operations of a graph that call a function which draws random numbers."""
    return _calling(graph, ops, lambda library, op: library.draws_in_call(op.node_def))


def taking_the_next(graph: Any, ops: Sequence[tf.Operation]) -> List[str]:
    """Return the names of operations that return something else each time that they run, as what reads a queue does.

    Random numbers that are drawn for each example, and what Python returns, are told otherwise.
    """
    within = _calling(graph, ops, lambda library, op: any(map(_takes_the_next, library.types_within(node_of(op)))))
    return within + [op.name for op in ops if _takes_the_next(op.type)]


def filling(graph: Any) -> List[str]:
    """Return the types of the operations that fill a table or a queue, in a graph or the functions that it calls."""
    functions = graph.as_graph_def().library.function
    types = {op.type for op in graph.get_operations()} | {node.op for one in functions for node in one.node_def}
    return sorted(filter(_fills, types))


def _calling(
    graph: Any, ops: Sequence[tf.Operation], is_wanted: Callable[["Library", tf.Operation], bool]
) -> List[str]:
    """Return the names of the operations that call functions and for which `is_wanted` is true."""
    calls = [op for op in ops if functions_of(op.node_def)]
    library = Library(graph, graph.as_graph_def()) if calls else None
    return [op.name for op in calls if library is not None and is_wanted(library, op)]


def _fills(kind: str) -> bool:
    return any(part in kind for part in FILLING)


def _takes_the_next(kind: str) -> bool:
    return not kind.startswith("Stateless") and any(one in kind for one in NEXT)


def _normalizes(body: Sequence[Any], is_loop: bool) -> bool:
    """Whether operations of a function compute a variance over the first axis.

    In a loop, a product may be of anything, and the first axis is often another one than that of the examples.
    """
    nodes = {node.name: node for node in body}

    def is_over_first(node: Any) -> bool:
        axes = nodes.get(node.input[1].split(":")[0])
        if axes is None or axes.op != "Const":
            return False
        return 0 in _constant(axes)

    def is_variance(node: Any) -> bool:
        source = nodes.get(node.input[0].split(":")[0]) if node.op == "Mean" else None
        is_square = source is not None and source.op in ("SquaredDifference", "Square")
        if source is not None and source.op in ("Mul", "Pow") and not is_loop:
            other = nodes.get(source.input[1].split(":")[0])
            is_two = other is not None and other.op == "Const" and bool((_constant(other) == 2.0).all())
            is_square = is_two if source.op == "Pow" else source.input[0] == source.input[1]
        return is_square and is_over_first(node)

    def is_fused(node: Any) -> bool:
        if node.op not in FUSED_BATCH_NORMS or not node.attr["is_training"].b:
            return False
        scale = nodes.get(node.input[1].split(":")[0])
        return scale is None or scale.op != "Fill"  # ones, one for each example, of a layer normalisation

    return any(map(is_fused, body)) or any(map(is_variance, body))


def _constant(node: Any) -> Any:
    return tf.make_ndarray(node.attr["value"].tensor)


def spec_of(graph: Any, node: Node, key: Key) -> tf.TensorSpec:
    """Return shape and dtype of a tensor, whose first axis may have any length; for a `new_node`, any shape."""
    try:
        tensor = graph.get_tensor_by_name(key)
    except KeyError:
        own = [node.proto.attr[name].type for name in ("type", "dtype", "T") if name in node.proto.attr]
        return tf.TensorSpec(None, tf.as_dtype(own[0]))
    shape = tensor.shape
    return tf.TensorSpec([None] + shape.as_list()[1:] if shape.rank else shape, tensor.dtype)


def spec_of_variable(handle: Any) -> Optional[tf.TensorSpec]:
    """Return shape and dtype of a variable, given its handle, which has no public name for them; None: unknown.

    Where a function has captured the handle, perhaps only that outside of it knows them.
    """
    data = getattr(handle, "_handle_data", None)
    if data is None and not hasattr(handle, "numpy"):
        captured = (outside for outside, inside in captures_of(handle.graph) if inside.name == handle.name)
        data = getattr(next(captured, None), "_handle_data", None)
    parts: Any = getattr(data, "shape_and_type", ())
    return tf.TensorSpec(tf.TensorShape(parts[0].shape), tf.as_dtype(parts[0].dtype)) if len(parts) == 1 else None


def value_of(source: tf.Tensor) -> tf.Tensor:
    """Return a tensor, or the value of the variable whose handle it is."""
    return read_handle(source, dtype_of_handle(source)) if source.dtype == tf.resource else source


def dtype_of_handle(handle: tf.Tensor) -> tf.DType:
    """Return the dtype of the variable that a `VarHandleOp` makes."""
    return tf.as_dtype(handle.op.get_attr("dtype"))


def read_handle(handle: Any, dtype: tf.DType) -> tf.Tensor:
    """Return the value of a variable, given its handle."""
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)


def change_from_now(handles: Sequence[Any]) -> Callable[[], bool]:
    """Return a function that tells whether one of some variables may have changed since this call, given their handles.

    In a graph, what takes them is looked at, also of tables of words; eagerly, all values of variables are compared.
    """
    specs = [(handle, spec_of_variable(handle)) for handle in handles]
    if not tf.executing_eagerly():
        graph = tf.compat.v1.get_default_graph()
        variables = {id(handle) for handle, spec in specs if spec is not None}
        tables = {id(handle) for handle, spec in specs if spec is None}  # TensorFlow does not say what only reads them
        done = len(graph.get_operations())

        def may_have_changed() -> bool:
            ops = graph.get_operations()[done:]
            has_changed = not variables.isdisjoint(map(id, more_than_read(ops)))
            return has_changed or not tables.isdisjoint(assigned_handles(graph, ops))

        return may_have_changed
    before = [(handle, read_handle(handle, spec.dtype)) for handle, spec in specs if spec is not None]

    def has_changed(handle: Any, value: tf.Tensor) -> bool:
        now = read_handle(handle, value.dtype)
        return bool(tf.reduce_any((now != value) & (now == now)))

    return lambda: any(itertools.starmap(has_changed, before))


def assign_handle(handle: Any, value: tf.Tensor) -> Any:
    """Assign to a variable, given its handle."""
    return tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def attached(output: tf.Tensor, is_eager: bool) -> List[Tuple[str, tf.Tensor]]:
    """Return what Keras' losses find attached to an output of a model: its mask, and the logits that it is made of.

    Args:
      output: a tensor of a graph.
      is_eager: whether the model is called eagerly, where losses don't know of the operation that has made a tensor.

    Returns:
      List of (name, tensor), as `with_attached` takes them.
    """
    attributes = [(name, getattr(output, name, None)) for name in ("_keras_mask", "_keras_logits")]
    if attributes[1][1] is None and not is_eager and output.op.type in _OF_LOGITS:
        attributes[1] = output.op.type, output.op.inputs[0]
    return [(name, value) for name, value in attributes if isinstance(value, tf.Tensor)]


_OF_LOGITS = {"Softmax": tf.nn.softmax, "Sigmoid": tf.sigmoid}
"""Types of operations whose input Keras' crossentropies take, if an output is made by them."""


def with_attached(output: tf.Tensor, name: str, value: tf.Tensor) -> tf.Tensor:
    """Return an output of a model to which something that `attached` has found is attached again."""
    if name in _OF_LOGITS and VERSION < (2, 4):  # Keras looks at the operation, and at no attribute yet
        return _OF_LOGITS[name](value)
    setattr(output, "_keras_logits" if name in _OF_LOGITS else name, value)
    return output


def learning_phase() -> Any:
    """Return whether a layer that is called without `training` is in training."""
    return False if IS_KERAS_3 else tf.keras.backend.learning_phase()


@contextlib.contextmanager
def running_functions_directly(is_on: bool = True) -> Iterator[None]:
    """Let calls of a `tf.function` run its Python code in this context, so that its operations are in the same graph.

    The only switch is process-wide, so it is on for one trace alone. TensorFlow 1.15 has none.
    """
    if not is_on or VERSION < (2,):
        yield
        return
    prefix = "" if VERSION >= (2, 3) else "experimental_"  # dies with 2.2
    switch = getattr(tf.config, f"{prefix}run_functions_eagerly")
    before = getattr(tf.config, f"{prefix}functions_run_eagerly")()
    switch(True)
    try:
        yield
    finally:
        switch(before)
