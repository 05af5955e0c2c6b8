"""The conditionals and loops of TensorFlow 1, which are made of operations of the graph itself, and copies of them.

Each is a context of an operation, in another one or in none: TensorFlow differentiates loops by their contexts, and
forgets these in copies of operations. None of it has public names. Dies with `tf.compat.v1`.
"""

from typing import Any, Callable, Dict, List, Optional, Sequence

from accum._tf.graph_parts import import_part, node_of, placed
from accum._tf.graphs import in_graph_context, is_within_loop
from accum._tf.op_walks import ENTRANCES, EXITS, MERGES, NEXT, SWITCHES, ancestors, entered, sources_of
from accum._tf.random_ops import STATEFUL_DRAWS
from accum._tf.version import tf

Context = Any
"""A loop, or one of both branches of a conditional."""

_CHANGING = (*EXITS, *MERGES, *NEXT, "LoopCond")
"""Types of operations that may return something else in each iteration."""

_NAMES = ("maximum_iterations_name", "pivot_for_pred_name", "pivot_for_body_name", "pivot_name", "pred_name")


def contexts_of(op: tf.Operation) -> List[Context]:
    """Return the conditionals and loops in which an operation is, from the outermost."""
    found: List[Context] = []
    context = op._get_control_flow_context()
    while context is not None:
        if is_loop(context) or is_branch(context):
            found.insert(0, context)
        context = context.outer_context
    return found


def is_loop(context: Context) -> bool:
    return bool(context.IsWhileContext())


def is_branch(context: Context) -> bool:
    return bool(context.IsCondContext())


def pivot_of(context: Context) -> tf.Operation:
    """Return the operation for which those of a context wait that take nothing else in it."""
    return context.GetControlPivot().op


def ends_of(context: Context) -> List[tf.Operation]:
    """Return the operations that decide on a context, and the results of a loop, used or not: gradients need all."""
    definition = context.to_proto()
    graph = tf.compat.v1.get_default_graph()
    keys = [getattr(definition, field, "") for field in ("pivot_for_pred_name", "pivot_for_body_name", "pivot_name")]
    keys += getattr(definition, "loop_exit_names", ())
    return [graph.get_tensor_by_name(key).op for key in keys if key]


def entrance(context: Context, dtype: tf.DType) -> Any:
    """Return the `NodeDef` of an operation by which a tensor enters a context: for a conditional, with its decision."""
    node = tf.compat.v1.NodeDef(op="Enter" if is_loop(context) else "Switch")
    node.attr["T"].type = dtype.as_datatype_enum
    if is_loop(context):
        node.attr["frame_name"].s = context.name.encode()
        node.attr["is_constant"].b = True
        node.attr["parallel_iterations"].i = context.parallel_iterations
    return node


def hoisted(tensor: tf.Tensor) -> Optional[tf.Tensor]:
    """Return what is the same in all iterations of a loop, computed outside of it; None: it may differ."""
    tensor = entered(tensor)
    before = ancestors([tensor.op], sources=lambda op: [one.op for one in op.inputs if contexts_of(op)])
    ops = [op for op in before if contexts_of(op) and op.type not in ENTRANCES]
    changing = [op for op in ops if op.type in _CHANGING or op.op_def.is_stateful]
    if any(op.type not in STATEFUL_DRAWS or is_within_loop(op) for op in changing):
        return None
    if not ops:
        return tensor
    names, protos = {op.name for op in ops}, []
    feeds: Dict[str, tf.Tensor] = {}
    for op in ops:
        taken = [entered(one) for one in op.inputs]
        outside = {one.name: f"accum_outside/{one.name}" for one in taken if one.op.name not in names}
        feeds.update((outside[one.name], one) for one in taken if one.name in outside)
        protos.append(placed(node_of(op), [outside.get(one.name, one.name) for one in taken]))
    versions = tf.compat.v1.GraphDef(versions=tensor.graph.graph_def_versions)
    with in_graph_context((tensor.graph, None)):
        (made,) = import_part(versions, protos, feeds, [tensor.name])
    made.set_shape(tensor.shape)
    return made


def is_of_one_branch(tensor: tf.Tensor) -> bool:
    """Whether a tensor is only computed if one branch of a conditional is."""
    before = ancestors([tensor.op], sources=lambda op: [] if op.type in MERGES + EXITS else sources_of(op))
    return any(op.type in SWITCHES for op in before)


def copied(
    context: Context,
    outer: Optional[Context],
    name: str,
    key_of: Callable[[str], Optional[str]],
    members: Sequence[str],
) -> Context:
    """Return the context of copies of a conditional's branch, or of a loop, to which they belong from now on.

    Args:
      context: that of the operations that were copied.
      outer: the context around the copies, or None.
      name: of the new context; for a loop, what is the attribute `frame_name` of copies that enter it.
      key_of: function that returns the key of what stands for a tensor, or None if that was not copied.
      members: names of the copies that belong to it, and to no context within it.
    """
    definition = context.to_proto()
    definition.context_name = name
    for field in _NAMES:
        key = getattr(definition, field, "")
        if key:
            definition.MergeFrom(type(definition)(**{field: key_of(key) or key}))
    for field in ("loop_exit_names", "loop_enter_names"):
        keys = [key_of(key) for key in getattr(definition, field, ())]
        if keys:
            del getattr(definition, field)[:]
            getattr(definition, field).extend(key for key in keys if key is not None)
    definition.ClearField("nested_contexts")
    definition.ClearField("values_def")
    definition.values_def.values.extend(members)
    with in_graph_context((tf.compat.v1.get_default_graph(), outer)):
        return type(context).from_proto(definition)
