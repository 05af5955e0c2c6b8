"""What a program does to variables between the rows of a batch and their gradient, which reads some of them again."""

from typing import Dict, List, NamedTuple, Sequence, Set

from accum import _check, _tf
from accum._engine._held_values import takes_values, variable_read_by
from accum._engine._part import Part
from accum._tf import tf


class LaterChanges(NamedTuple):
    """What changes variables, but not before the rows.

    Attributes:
      ops: {the operation that creates a variable: the operations that change it}.
      are_behind: whether all of them come after the rows in every run.
    """

    ops: Dict[tf.Operation, List[tf.Operation]]
    are_behind: bool


NO_CHANGES = LaterChanges({}, are_behind=True)


def read_again(part: Part) -> Set[tf.Operation]:
    """Return the operations that create the variables that a part reads each time that it is computed."""
    return {op for op in map(variable_read_by, part.boundary) if op is not None}


def later_changes(
    variables: Set[tf.Operation],
    batch: Sequence[tf.Tensor],
    rows: Sequence[tf.Tensor],
    grads: Sequence[tf.Operation],
    known: Set[tf.Operation],
) -> LaterChanges:
    """Return what changes variables after the rows of a batch have been computed, or at any time in that run.

    What a loop of TensorFlow 1 changes is not seen.

    Args:
      variables: the operations that create the variables.
      batch: tensors; what does not depend on them belongs to other runs, and so do initializers.
      rows: what has been computed from `batch`.
      grads: operations that compute earlier gradients. What these change of ref variables is left out: plain TensorFlow
        computes later gradients from a mixture of old and new values.
      known: operations that need no look, because they had one; gets those that have one now.
    """
    graph = rows[0].graph
    changed_by = _changed_by(graph, variables, [op for op in graph.get_operations() if op not in known])
    known.update(changed_by)
    starts = {op for tensor in batch for op in tensor.consumers()}
    outlets = {tensor.op for tensor in rows}
    changing = [op for op, changed in changed_by.items() if changed]
    if starts.union(outlets).isdisjoint(_tf.op_walks.ancestors(changing, with_control=True)):
        return NO_CHANGES
    users = _tf.op_walks.users_of(graph, with_control=True)
    of_batch = _tf.op_walks.reached(starts | outlets, users)
    before = {*_tf.op_walks.ancestors(outlets, with_control=True), *_tf.graphs.initializers()}
    updates = _tf.op_walks.reached(grads, users)
    ops: Dict[tf.Operation, List[tf.Operation]] = {}
    for op, changed in changed_by.items():
        for tensor in changed:
            if op in of_batch and op not in before and (tensor.dtype == tf.resource or op not in updates):
                ops.setdefault(_tf.op_walks.entered(tensor).op, []).append(op)
    later = {op for some in ops.values() for op in some}
    return LaterChanges(ops, _tf.op_walks.reached(outlets, users).issuperset(later))


def _changed_by(
    graph: tf.Graph, variables: Set[tf.Operation], ops: Sequence[tf.Operation]
) -> Dict[tf.Operation, List[tf.Tensor]]:
    """Return {operation: its inputs that are variables which it may change, itself or in a function or branch}.

    Functions that change any variable may change all. Of those that change none, the list is empty.
    """
    ops = [op for op in ops if not _tf.graphs.is_within_loop(op)]
    takes = {op: [one for one in op.inputs if _tf.op_walks.entered(one).op in variables] for op in ops}
    found = {op: takes[op][:1] for op in ops if takes[op] and _tf.op_walks.changes_variable(op)}
    calls = [op for op in ops if takes[op] and op.type in _tf.graph_parts.CALLS]
    if calls:
        library = _tf.graph_parts.Library(graph, graph.as_graph_def())
        kinds = {op: library.types_within(_tf.graph_parts.node_of(op)) for op in calls}
        found.update((op, takes[op] if any(map(_tf.op_walks.is_change, kinds[op])) else []) for op in calls)
    return found


@_check.rule
def warn_of_reading_again(variables: Set[tf.Operation], part: Part, is_segmented: bool) -> None:
    """Warn of variables that a part reads again for a gradient, in operations that can't take an earlier value."""
    reading = [op for op in part.ops if is_segmented or not takes_values(op)]
    read = sorted({one.op.name for op in reading for one in op.inputs if variable_read_by(one) in variables})
    if read:
        what = "Layers beside batch normalisation" if is_segmented else "Loops, branches and functions of TensorFlow 2"
        remedy = "" if is_segmented else ", or call `tf.compat.v1.disable_control_flow_v2()` before the graph is built"
        _check.warn(
            f"{what} read variables again for the gradient: if the same run updates them first, as several "
            "optimizers in turn do, the gradient may see the new values. Train each loss in a run of its own, take all "
            "gradients of a loss in one call of `tf.gradients`, and make other updates after the train op"
            f"{remedy}. Received: {_check.shown(read)}. [accum: split-batch]",
            _check.InexactWarning,
        )
