"""Find state that a micro-batch leaves to the next one, such as that of a stateful cell, and steps made in between."""

from typing import Dict, List, Optional, Sequence, Set

from accum import _check, _tf
from accum._tf import Gradient, tf
from accum.compat.v1._engine_adapter import ops_outside_of_steps
from accum.compat.v1._update_ops import Average, averages_of_layers

CARRIED = (
    "Each micro-batch changes variables before its gradients are computed, so they carry state from one micro-batch to "
    "the next; in a full batch, they would change once per step. If rows continue from batch to batch, as in stateful "
    "cells and XLNet's memory, keep one state for each micro-batch of the cycle, or split the whole batch by "
    "`accum.compat.v1.value_and_gradients`, with the state among the data. Move what follows the steps, such as a "
    "counter or an average, in `after_step`. [accum: carried-state]"
)

APART = (
    "Each micro-batch changes variables before its gradients are computed, such as averages of losses. The gradients "
    "do not depend on them, but in a full batch, they would change once per step. Where that matters, such as for a "
    "learning rate that reads one of them, change them in `after_step`. [accum: carried-state]"
)

BESIDE = (
    "The gradients are computed from variables to which the graph assigns what it computes from the same micro-batch. "
    "If this runs along with the train op, such as in UPDATE_OPS, they carry state from one micro-batch to the next; "
    "in a full batch, they would change once per step. If rows continue from batch to batch, as in stateful cells, "
    "keep one state for each micro-batch of the cycle. Otherwise, assign in `after_step`. [accum: carried-state]"
)

REPEATED = (
    "`function` changes variables before it computes its loss, which happens once for each micro-batch; in a call with "
    "the whole batch, it would happen once. Assign outside of `function`, such as by ops that wait for the returned "
    "value, or pass the state of each example among the data. [accum: carried-state]"
)

AFTER_ANOTHER = (
    "The gradients wait for the train op of another `AccumOptimizer`, which makes a step only in the last micro-batch "
    "of a cycle. There, they may be computed with the updated variables, and in the other micro-batches with the old "
    "ones, which no full batch does. Compute the gradients of both before either is applied, or run a cycle of one and "
    "then a cycle of the other. [accum: two-optimizers]"
)


ADDS, STARTS = ("AssignAdd", "AssignAddVariableOp"), ("Assign", "AssignVariableOp")
ASKS = ("IsVariableInitialized", "VarIsInitializedOp")
PASSES = ("Identity", "RefIdentity", "ReadVariableOp", "Merge", "RefMerge") + _tf.op_walks.ENTRANCES


@_check.rule
def warn_of_carried_state(tensors: Sequence[Gradient], splits: bool) -> None:
    """Warn of variables that are assigned where gradients and losses are computed, or beside them, and name them.

    Those that the tensors do not depend on are named apart. If another optimizer that accumulates assigns them, the
    warning names that optimizer instead. Beside them, only what is computed from the same data counts: whoever resets a
    state, copies weights to a target network or counts may do so at any other time.

    Left out are the moving averages of batch normalisation, with which `accumulate_update_ops` deals, what the steps of
    an `AccumOptimizer` assign, and sums over the data that nothing reads, as for summaries: over the micro-batches of a
    cycle, they are those over the full batch. Where each micro-batch is a full batch (`splits` is False), only other
    optimizers count.
    """
    flat = tf.nest.flatten(list(tensors), expand_composites=True)
    ops = [op for op in _tf.op_walks.ancestors([tensor.op for tensor in flat], with_control=True) if not _is_still(op)]
    averages = averages_of_layers(tf.compat.v1.get_default_graph())
    changed = _changed_by(ops, averages)
    others = _accumulating_optimizers(list(changed))
    if others:
        _check.warn(f"{AFTER_ANOTHER} Received: {others}.", _check.InexactWarning)
    if others or not splits:
        return
    used = _used_by([tensor.op for tensor in flat], ops) if changed else set()
    beside = [name for name in _assigned_beside(ops, averages) if name not in changed]
    carried = [name for name, owner in changed.items() if owner in used]
    apart = [name for name in changed if name not in carried]
    for told, names in ((CARRIED, carried), (APART, apart), (BESIDE, beside)):
        if names:
            _check.warn(f"{told} Received: {names}.", _check.InexactWarning)


def _used_by(results: Sequence[tf.Operation], ops: Sequence[tf.Operation]) -> Set[tf.Operation]:
    """Return the ops from whose values `results` are computed, also through variables and stacks that `ops` write."""
    used: Set[tf.Operation] = set()
    more = set(_tf.op_walks.ancestors(results))
    writes = [op for op in ops if _tf.op_walks.changes_variable(op) or op.type.startswith("StackPush")]
    while more:
        used |= more
        read = [op for op in writes if _tf.op_walks.entered(op.inputs[0]).op in used]
        more = set(_tf.op_walks.ancestors([tensor.op for op in read for tensor in list(op.inputs)[1:]])) - used
    return used


@_check.rule
def warn_of_repeated_changes(loss: tf.Tensor, created: Sequence[tf.Operation]) -> None:
    """Warn of variables that a function of a micro-batch changes, by those of the ops it `created` that `loss` runs."""
    own_ops = set(created)
    ops = [op for op in _tf.op_walks.ancestors([loss.op], with_control=True) if op in own_ops and not _is_still(op)]
    changed = _changed_by(ops, [])
    if changed:
        _check.warn(f"{REPEATED} Received: {list(changed)}.", _check.InexactWarning)


def _changed_by(ops: Sequence[tf.Operation], averages: Sequence[Average]) -> Dict[str, tf.Operation]:
    """Return the variables that `ops` change, but for those of `averages`: {name: op of the variable or its handle}."""
    assigned = _tf.op_walks.assigned_handles(tf.compat.v1.get_default_graph(), ops)
    moved = {id(average.var) for average in averages}
    changes = [op for op in ops if _tf.op_walks.changes_variable(op) and "Apply" not in op.type]
    changed = {id(_tf.op_walks.entered(op.inputs[0]).op) for op in changes}
    named = [var for var in _variables() if id(var) not in moved]
    named = [var for var in named if id(var.op) in changed or id(getattr(var, "handle", None)) in assigned]
    sums = _Sums(ops if named else [])
    owners = {var.op.name: getattr(var, "handle", var).op for var in named}
    return {name: owner for name, owner in sorted(owners.items()) if not sums.is_one(owner)}


class _Sums:
    """Tells which variables are no more than sums over the data, among the ops that compute gradients."""

    def __init__(self, ops: Sequence[tf.Operation]) -> None:
        self._data = {op for op in ops if _tf.op_walks.gives_data(op)}
        self._users: Dict[tf.Operation, List[tf.Operation]] = {}
        for op in ops:
            for tensor in op.inputs:
                self._users.setdefault(tensor.op, []).append(op)

    def is_one(self, owner: tf.Operation) -> bool:
        """Whether the ops only add to a variable, or begin such a sum, and none of them reads it.

        Args:
          owner: the op of a ref variable, or that of a handle.
        """
        waiting, added = [owner], False
        while waiting:
            op = waiting.pop()
            for user in self._users.get(op, []):
                if user.type in ADDS + STARTS and user.inputs[1].op is not op and self._is_of_data(user.inputs[1]):
                    added = added or user.type in ADDS
                elif user.type not in ASKS + PASSES:
                    return False
                waiting += [] if user.type in ASKS else [user]
        return added

    def _is_of_data(self, value: tf.Tensor) -> bool:
        return not self._data.isdisjoint(_tf.op_walks.ancestors([value.op]))


def assigned_behind(tensors: Sequence[tf.Tensor], last: int, others: Set[tf.Operation]) -> List[str]:
    """Return the names of variables that tensors depend on and that `others`, created later, assign from the same data.

    Args:
      tensors: gradients and losses.
      last: number of the last train op in the order of creation; `warn_of_carried_state` has seen what was before it.
      others: operations.
    """
    ops = _tf.op_walks.ancestors([tensor.op for tensor in tensors], with_control=True)
    later = [op for op in others if _tf.graphs.creation_order(op) > last]
    return _assigned_beside(ops, averages_of_layers(tf.compat.v1.get_default_graph()), set(later))


def _assigned_beside(
    ops: Sequence[tf.Operation], averages: Sequence[Average], among: Optional[Set[tf.Operation]] = None
) -> List[str]:
    """Return the names of variables that `ops` read and that others assign, `among` some, from data that `ops` use."""
    own_ops, data = set(ops), {op for op in ops if _tf.op_walks.gives_data(op)}
    trained = {id(var) for var in tf.compat.v1.trainable_variables()}
    read = {id(owner): var for var in _variables() for owner in [getattr(var, "handle", var).op] if owner in own_ops}
    read = {owner: var for owner, var in read.items() if id(var) not in trained}
    if not read or not data:
        return []
    of_layers = {average.assign for average in averages}
    outside = ops_outside_of_steps()
    verdicts = {
        op for op in outside if op.type in _tf.gradient_changes.ASKS_IF_FINITE
    }  # which move a dynamic loss scale, and that cancels
    assigns = [op for op in outside if _tf.op_walks.changes_variable(op) and op not in of_layers]
    assigns = [op for op in assigns if among is None or op in among]
    others = [op for op in assigns if op not in own_ops and id(_tf.op_walks.entered(op.inputs[0]).op) in read]
    names: Set[str] = set()
    for op in others:
        values = [tensor.op for tensor in list(op.inputs)[1:]]
        if not data.isdisjoint(_tf.op_walks.ancestors(values, verdicts)):
            names.add(read[id(_tf.op_walks.entered(op.inputs[0]).op)].op.name)
    return sorted(names)


def _variables() -> List[tf.Variable]:
    """Return the variables of the graph, but for those of metrics."""
    metrics = {id(var) for var in tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.METRIC_VARIABLES)}
    local = [var for var in tf.compat.v1.local_variables() if id(var) not in metrics]
    return tf.compat.v1.global_variables() + local


def _accumulating_optimizers(names: Sequence[str]) -> List[str]:
    """Return the names of the `AccumOptimizer`s whose `micro_step` is among `names`."""
    ending, var_names = "/micro_step", {var.op.name for var in _variables()}
    scopes = [name[: -len(ending)] for name in names if name.endswith(ending)]
    return [scope for scope in scopes if scope + "/weight_sum" in var_names]


def _is_still(op: tf.Operation) -> bool:
    """Whether an op subtracts zeros, as those do that `accumulate_update_ops` has taken over."""
    return op.type in ("AssignSub", "AssignSubVariableOp") and op.inputs[1].op.type == "Const"
