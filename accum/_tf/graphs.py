"""Questions about static graphs and traces."""

import contextlib
import re
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple, TypeVar

from accum._tf.version import IS_KERAS_3, VERSION, tf

Function = TypeVar("Function", bound=Callable[..., Any])


def in_static_graph() -> bool:
    """Whether ops are being added to a `tf.compat.v1` graph rather than run, or traced for a `tf.function`."""
    with tf.init_scope():
        return not tf.executing_eagerly()


def is_ref_variable(var: Any) -> bool:
    """Whether this is a TF 1 ref variable, whose value is a mutable tensor in the graph. Dies with `tf.compat.v1`."""
    return isinstance(var, tf.Variable) and not hasattr(var, "handle")


def is_of_a_cluster(var: Any) -> bool:
    """Whether a variable's device names a job, such as that of a parameter server. Dies with `tf.compat.v1`."""
    return tf.compat.v1.DeviceSpec.from_string(var.device or "").job not in (None, "localhost")


def slice_info(var: Any) -> Any:
    """Return the `SaveSliceInfo` of a part of a partitioned variable, else None. Dies with `tf.compat.v1`."""
    return var._get_save_slice_info() if hasattr(var, "_get_save_slice_info") else None


def save_as_part(slot: tf.Variable, var: Any) -> None:
    """Let a `Saver` save the slot of one part of a partitioned variable, even if the slot has fewer axes.

    TF 1.15 gives a row mask the slice information of its variable, for which no `Saver` can be built. If the parts
    share rows, because the variable is partitioned by columns, each part saves a mask under its own name. Dies with
    `tf.compat.v1`.
    """
    info, rank = slice_info(slot), slot.shape.rank
    if info is None or rank == len(slice_info(var).full_shape):
        return
    whole = slice_info(var)
    part = None
    if rank and list(whole.full_shape[rank:]) == list(whole.var_shape[rank:]):
        shapes = whole.full_shape[:rank], whole.var_offset[:rank], whole.var_shape[:rank]
        part = tf.Variable.SaveSliceInfo(info.full_name, *shapes)
    slot._set_save_slice_info(part)


def replace_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Replace an input of an op that is in a graph already; there is no public name. Dies with `tf.compat.v1`."""
    op._update_input(index, tensor)


def replace_inputs(ops: Iterable[tf.Operation], replaced: Dict[str, tf.Tensor]) -> None:
    """Replace inputs of ops that are in a graph already, given {name of a tensor: what takes its place}."""
    for op in ops:
        for index, tensor in enumerate(op.inputs):
            if tensor.name in replaced:
                replace_input(op, index, replaced[tensor.name])


def add_control_input(op: tf.Operation, other: tf.Operation) -> None:
    """Let an op that is in a graph already wait for another; there is no public name. Dies with `tf.compat.v1`."""
    op._add_control_input(other)


def initializers() -> Set[tf.Operation]:
    """Return the initializers of all variables of the current graph."""
    variables = tf.compat.v1.global_variables() + tf.compat.v1.local_variables()
    return {op for op in (getattr(var, "initializer", None) for var in variables) if op is not None}


def remove_control_inputs(op: tf.Operation) -> None:
    """Let an op wait for no other from which it takes nothing; there is no public name. Dies with `tf.compat.v1`."""
    if op.control_inputs:
        op._remove_all_control_inputs()


def is_in_control_flow(op: tf.Operation) -> bool:
    """Whether an op is inside a conditional or a loop of TF 1. Dies with `tf.compat.v1`."""
    return op._get_control_flow_context() is not None  # has no public name


def creation_order(op: tf.Operation) -> int:
    """Return a number that is larger for operations that were created later. Dies with `tf.compat.v1`."""
    return int(op._id)  # has no public name


def line_of(op: tf.Operation) -> str:
    """Return the line of the program that made an operation, as in "model.py:12"; "" if it isn't known."""
    frames = [tuple(frame)[:2] for frame in op.traceback or ()]
    own = [f"{path}:{line}" for path, line in frames if not _OF_TENSORFLOW.search(path)]
    return own[-1] if own else ""


_OF_TENSORFLOW = re.compile(r"-packages[/\\](tensorflow|tf_|keras)\w*[/\\]|<")
"""The paths of files in which a program's operations are made without its having written them."""


def outermost_frame(op: tf.Operation) -> Any:
    """Return what stands for the outermost conditional, with both branches, or loop of TF 1 in which an operation is.

    None: it is in none. Dies with `tf.compat.v1`.
    """
    context = op._get_control_flow_context()  # has no public name
    while context is not None and context.outer_context is not None:
        context = context.outer_context
    return context.pred.name if context is not None and context.IsCondContext() else context


def is_within_loop(op: tf.Operation) -> bool:
    """Whether an operation is in a loop of TF 1, which may run it any number of times. Dies with `tf.compat.v1`."""
    context = op._get_control_flow_context()  # has no public name
    while context is not None and not context.IsWhileContext():
        context = context.outer_context
    return context is not None


def has_own_gradient(op: tf.Operation) -> bool:
    """Whether a program has given an operation another gradient than that of its type."""
    return "_gradient_op_type" in op.node_def.attr


def leaves_frame(op: tf.Operation) -> bool:
    """Whether an operation gives the result of a loop of TF 1 to what is outside of it. Dies with `tf.compat.v1`."""
    return op.type in ("Exit", "RefExit")


_CONTAINERS = ("TensorArray", "TensorArrayV2", "TensorArrayV3", "Stack", "StackV2")


def makes_container(op: tf.Operation) -> bool:
    """Whether an operation makes a tensor array or a stack that others write to. Dies with `tf.compat.v1`."""
    return op.type in _CONTAINERS


def notes_of(graph: tf.Graph) -> Dict[str, Any]:
    """Return a dict that lives as long as a graph, unlike what is in a collection, in no exported graph."""
    try:
        notes: Dict[str, Any] = graph._accum_notes
    except AttributeError:
        notes = graph._accum_notes = {}
    return notes


def is_in_conditional() -> bool:
    """Whether operations are created now in a conditional, a loop or a function. Dies with `tf.compat.v1`."""
    graph = tf.compat.v1.get_default_graph()
    return graph is not outermost_graph() or graph._get_control_flow_context() is not None  # has no public name


def hold_lock(assign: tf.Operation) -> None:
    """Let an op assign to its ref variable under the variable's lock. Dies with `tf.compat.v1`."""
    assign._set_attr("use_locking", tf.compat.v1.AttrValue(b=True))  # has no public name


@contextlib.contextmanager
def control_flow_for(variables: Iterable[Any]) -> Iterator[None]:
    """Build conditionals that can use `variables`: conditionals of TF 2 are functions, which reject ref variables.

    In some versions (2.10) they also reject a variable on a parameter server together with ops on a worker. Dies with
    `tf.compat.v1`.
    """
    needs_old = any(is_ref_variable(var) or is_of_a_cluster(var) for var in variables)
    with control_flow_of_tf(1) if needs_old else contextlib.ExitStack():
        yield


@contextlib.contextmanager
def control_flow_of_tf(version: int) -> Iterator[None]:
    """Build conditionals and loops as TF 1 does, of ops in the graph itself, or as TF 2, of functions that it calls.

    The only switch is process-wide, so it is reset immediately. Dies with `tf.compat.v1`.
    """
    switches = [tf.compat.v1.disable_control_flow_v2, tf.compat.v1.enable_control_flow_v2]
    must_switch = tf.compat.v1.control_flow_v2_enabled() != (version == 2)
    if must_switch:
        switches[version == 2]()
    try:
        yield
    finally:
        if must_switch:
            switches[version != 2]()


def default_names() -> Dict[str, int]:
    """Return how often each name of a variable scope has been used in the graph. Dies with `tf.compat.v1`."""
    return dict(_scope_store().variable_scopes_count)


def set_default_names(counts: Dict[str, int]) -> None:
    """Let variable scopes take the names again that they took after `default_names`. Dies with `tf.compat.v1`."""
    store = _scope_store()
    store.variable_scopes_count.clear()
    store.variable_scopes_count.update(counts)


def _scope_store() -> Any:
    """Return what counts the names of variable scopes, in a collection of the graph that has no public name."""
    tf.compat.v1.get_variable_scope()  # creates it
    return tf.compat.v1.get_collection(("__varscope",))[0]


@contextlib.contextmanager
def unrecorded(collection: str) -> Iterator[List[Any]]:
    """Discard additions to a collection of the graph in this context; the graphs of conditionals share collections.

    A MetaGraph can't store the executions that a `tf.CriticalSection` records, nor an op inside a conditional.

    Yields:
      A list, which has what was added when the context ends.
    """
    before, added = list(tf.compat.v1.get_collection(collection)), []  # type: List[Any], List[Any]
    try:
        yield added
    finally:
        recorded = tf.compat.v1.get_collection_ref(collection)
        added += [one for one in recorded if not any(one is other for other in before)]
        recorded[:] = before


def record_train_op(op: tf.Operation) -> None:
    """Add an op to the collection TRAIN_OP, as every v1 optimizer does, unless it is inside a conditional."""
    if op.graph is not outermost_graph() or not op.graph.is_fetchable(op):
        return
    recorded = op.graph.get_collection_ref(tf.compat.v1.GraphKeys.TRAIN_OP)
    if not any(op is train_op for train_op in recorded):
        recorded.append(op)


def global_step() -> Any:
    """Return the `global_step` of the current graph or None. TensorFlow's own function raises for a float variable."""
    steps = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.GLOBAL_STEP)
    steps = steps or [var for var in tf.compat.v1.global_variables() if var.op.name == "global_step"]
    return steps[0] if steps else None


def outermost_graph() -> tf.Graph:
    """Return the graph around those of all conditionals, loops and functions in which ops are created now."""
    with tf.init_scope():
        return tf.compat.v1.get_default_graph()


def outermost_function() -> Optional[tf.Graph]:
    """Return the graph of the outermost function that is being traced, or None if operations run eagerly."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
        graph = graph.outer_graph  # type: ignore[union-attr]
    return graph


LOCKS = "critical_section_executions"
"""The collection in which a `tf.CriticalSection` records its executions."""

NAME_WITHOUT_WRAPPERS = "cflow_gradient_wrapper"
"""The name of a function in whose graph TensorFlow puts no loop or conditional into a function of its own.

It does so where two tapes watch. But it has no gradient for a copy of a function that has a conditional.
"""

untouched_by_autograph = tf.autograph.experimental.do_not_convert


def _calling(call: Any, args: Any, kwargs: Any) -> Any:
    return call(*args, **kwargs)


_MARKS = {name: mark for name, mark in vars(untouched_by_autograph(_calling)).items() if name != "__wrapped__"}


def run_as_written(function: Function) -> Function:
    """Decorate a function of ours, or a class whose objects are called: AutoGraph then converts nothing of ours in it.

    Converting a hundred functions takes seconds. Unlike in `untouched_by_autograph`, the layers that Keras calls are
    converted. What the user has passed is not.
    """
    for name, mark in _MARKS.items():
        setattr(function, name, mark)
    return function


def touched_by_autograph(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function such that AutoGraph converts what it calls, also within one that AutoGraph leaves alone."""
    return tf.autograph.to_graph(_calling)(call, args, kwargs)


def is_of_another_function(error: Exception) -> bool:
    """Whether an error says that a tensor of another function or graph was used."""
    words = "out of scope", "cannot be accessed", "outside of the function building code"
    return any(some in str(error) for some in words)


def called_as_train_step(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a step of the model's class or of the user with AutoGraph where Keras does: in a graph of TensorFlow 2.2."""
    converts = VERSION < (2, 3) and not tf.executing_eagerly()
    return touched_by_autograph(call, *args, **kwargs) if converts else call(*args, **kwargs)


def called_as_in_fit(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function of Keras with AutoGraph where the train function has it: not in Keras 3."""
    return call(*args, **kwargs) if IS_KERAS_3 else touched_by_autograph(call, *args, **kwargs)


def graphs_within(outer: Any) -> Any:
    """Return the graphs being built, from the innermost out to `outer`, exclusive; None means eager execution."""
    if tf.executing_eagerly():
        return []
    graphs, graph = [], tf.compat.v1.get_default_graph()
    while graph is not None and graph is not outer:
        graphs.append(graph)
        graph = getattr(graph, "outer_graph", None)
    return [graph for graph in graphs if hasattr(graph, "outer_graph")]  # eager code has a default graph too


_BRANCH = re.compile(r"(.*)_(true|false|branch\d+)_\d+$")


def is_compiled_by_xla_here() -> bool:
    """Whether XLA compiles the `tf.function` that is being traced, or one around it."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()  # has no public name
        while context is not None:
            if context.IsXLAContext():
                return True
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)
    return False


def is_vectorized_here() -> bool:
    """Whether operations are created now which TensorFlow makes anew for all rows, as `tape.jacobian` does."""
    scope = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph().get_name_scope()
    return "loop_body" in (scope or "")  # on a replica, TF 2.2 has none


def is_loop_body(graph: tf.Graph) -> bool:
    """Whether a graph is the body of a `tf.while_loop`, which may run any number of times."""
    return type(graph).__name__ == "WhileBodyFuncGraph"


GraphContext = Tuple[Optional[tf.Graph], Any]
"""A graph, and a conditional or loop of TF 1 in it."""


def current_graph_context() -> GraphContext:
    """Return where operations are created now: the graph, and the conditional or loop of TF 1 in it."""
    if tf.executing_eagerly():
        return None, None
    graph = tf.compat.v1.get_default_graph()
    return graph, graph._get_control_flow_context()  # has no public name


@contextlib.contextmanager
def in_graph_context(graph_context: GraphContext) -> Iterator[None]:
    """Create operations in a `GraphContext`, from code in functions, conditionals and loops."""
    graph, context = graph_context
    assert graph is not None
    with graph.as_default(), tf.control_dependencies(None):
        graph._set_control_flow_context(context)  # has no public name; what follows restores it
        yield


def is_in_loop_within(graph_context: GraphContext) -> bool:
    """Whether operations are created now in a loop that has begun since `graph_context` was taken."""
    outer, outermost = graph_context
    if any(map(is_loop_body, graphs_within(outer))):
        return True
    context = tf.compat.v1.get_default_graph()._get_control_flow_context()
    while context is not None and context is not outermost:
        if context.IsWhileContext():
            return True
        context = context.outer_context
    return False


def forget_traces(instance: Any) -> None:
    """Let those methods of an object that are a `tf.function` be traced again."""
    for cls in type(instance).__mro__:
        for method in list(vars(cls).values()):
            getattr(method, "_descriptor_cache", {}).pop(instance, None)  # instance -> its function; no public name


def is_scratch() -> bool:
    """Whether the current graph is one in which Keras infers shapes, and whose operations never run."""
    name = str(getattr(tf.compat.v1.get_default_graph(), "name", ""))
    return name.startswith("scratch_graph") or name.endswith("_scratch_graph")  # Keras 3, Keras 2


def is_gradient_of_branch() -> bool:
    """Whether the current graph is that of the gradient of a branch of `tf.cond`, which TensorFlow takes apart.

    What it takes must be of the branch or of a graph around it: a value of eager execution makes TensorFlow fail.
    """
    return type(tf.compat.v1.get_default_graph()).__name__ == "_CondGradFuncGraph"


def is_function(graph: tf.Graph) -> bool:
    """Whether a graph belongs to a `tf.function`, which later traces may call without tracing it again."""
    return type(graph).__name__ == "FuncGraph"


def exclude_each_other(graphs: Sequence[tf.Graph], others: Sequence[tf.Graph]) -> bool:
    """Whether two paths from `graphs_within` lead through different branches of one conditional, so only one runs."""
    return any(
        conditional == other and branch != another
        for conditional, branch in _branches(graphs)
        for other, another in _branches(others)
    )


def _branches(graphs: Sequence[tf.Graph]) -> Any:
    """Return the set of (conditional, branch) through which a path leads."""
    matches = [(graph, _BRANCH.match(graph.name)) for graph in graphs]
    return {((id(graph.outer_graph), match.group(1)), match.group(2)) for graph, match in matches if match}


def are_traces_of_one_function(path: Sequence[tf.Graph], other: Sequence[tf.Graph]) -> bool:
    """Whether two paths from `graphs_within` lead through two traces of what may be the same `tf.function`."""
    names = [[graph.name for graph in reversed(graphs) if is_function(graph)] for graphs in (path, other)]
    return bool(names[0]) and names[0] == names[1] and path[0] is not other[0]


def waits_for_all(values: Sequence[Any]) -> List[Any]:
    """Return what an op of the current graph can wait for until all of `values` have been computed.

    It is one op for any number of values: each of the many ops that are created under `tf.control_dependencies` would
    wait for each of them otherwise.
    """
    if tf.executing_eagerly():
        return []
    tensors = tensors_here(values)
    return [tf.group(*tensors)] if len(tensors) > 1 else tensors


def tensors_here(values: Sequence[Any]) -> List[tf.Tensor]:
    """Return the tensors among `values`, or of the rows among them, each as a tensor of the current graph."""
    tensors = [tensor for tensor in (getattr(value, "values", value) for value in values) if tf.is_tensor(tensor)]
    graph = tf.compat.v1.get_default_graph()  # TF 2.2 can't wait for a tensor of an outer graph; dies with 2.2
    return [tensor if getattr(tensor, "graph", None) is graph else tf.identity(tensor) for tensor in tensors]
