"""Find what a train op of a static graph reads and changes in no fixed order, and put its updates in one."""

from typing import Any, Dict, List, Set, Tuple

from accum import _tf
from accum._tf import tf

PASSES = ("Identity", "RefIdentity", "ReadVariableOp") + _tf.op_walks.ENTRANCES


def order_updates(train_op: Any) -> None:
    """Let every update of a train op wait until everything that does not depend on an update is computed."""
    ops = _Ops(_checked(train_op))
    left_out = ops.after_updates | ops.behind_switches() | ops.within_loops()
    before = [op for op in ops.all if id(op) not in left_out and not _tf.graphs.is_in_control_flow(op)]
    inputs = {id(source) for op in before for source in _tf.op_walks.sources_of(op)}
    last = [op for op in before if id(op) not in inputs and op.type != "Placeholder"]
    with train_op.graph.as_default(), tf.control_dependencies(None), tf.control_dependencies(last):
        gate = tf.no_op(name="everything_is_read")
    for op in ops.updates:
        _tf.graphs.add_control_input(op, gate)


def unordered_variables(train_op: Any) -> List[str]:
    """Return the names of the variables that a train op reads and changes in no fixed order, sorted.

    Args:
      train_op: op or tensor of a static graph.
    """
    ops = _Ops(_checked(train_op))
    names = set()
    for target, updates in ops.updates_of().items():
        readers = ops.readers_of(target)
        for update in updates:
            ordered = {id(op) for op in _tf.op_walks.ancestors([update], with_control=True)} | ops.descendants(update)
            if any(id(reader) not in ordered for reader in readers):
                names.add(target)
    return sorted(names)


def _checked(train_op: Any) -> tf.Operation:
    if isinstance(train_op, tf.Tensor):
        train_op = train_op.op
    if not isinstance(train_op, tf.Operation):
        raise TypeError(f"`train_op` must be an op or a tensor of a static graph. Received: {train_op!r}.")
    return train_op


def _changes(op: tf.Operation) -> bool:
    return _tf.op_walks.changes_variable(op) and _target(op.inputs[0]) is not None


def _target(tensor: tf.Tensor) -> Any:
    """Return the name of the variable whose ref or handle a tensor is, or None."""
    op = _tf.op_walks.entered(tensor).op
    return op.name if op.type in ("VariableV2", "Variable", "VarHandleOp") else None


def _before_loop(left: tf.Operation) -> tf.Operation:
    """Return the operation before a loop of TF 1 from which a loop variable starts, given its "Exit"."""
    switch = left.inputs[0].op
    merge = switch.inputs[0].op
    return merge.inputs[0].op.inputs[0].op  # what "Enter" takes


class _Ops:
    """The ops that a train op runs.

    Attributes:
      all: list of ops.
      updates: those that change a variable.
      after_updates: ids of those that depend on an update, and of the updates themselves.
    """

    def __init__(self, train_op: tf.Operation) -> None:
        self.all = _tf.op_walks.ancestors([train_op], with_control=True)
        self.updates = [op for op in self.all if _changes(op)]
        self._users: Dict[int, List[tf.Operation]] = {}
        for op in self.all:
            for source in _tf.op_walks.sources_of(op):
                self._users.setdefault(id(source), []).append(op)
        self.after_updates: Set[int] = set()
        for op in self.updates:
            if id(op) not in self.after_updates:
                self.after_updates |= self.descendants(op)

    def descendants(self, op: tf.Operation) -> Set[int]:
        reached, waiting = set(), [op]
        while waiting:
            op = waiting.pop()
            if id(op) not in reached:
                reached.add(id(op))
                waiting += self._users.get(id(op), [])
        return reached

    def behind_switches(self) -> Set[int]:
        """Return the ids of ops that do not run if a branch is not taken, as zeros in the gradient of a conditional.

        What waits for one of them does not run either, and nothing says so.
        """
        switches = [op for op in self.all if op.type in ("Switch", "RefSwitch")]
        return self._reached([user for op in switches for user in self._users.get(id(op), [])], _tf.op_walks.MERGES)

    def within_loops(self) -> Set[int]:
        """Return the ids of ops within loops of TF 1, also of copies, which TensorFlow does not note."""
        reached = self._reached([op for op in self.all if op.type in _tf.op_walks.ENTERS], ())
        exits = [op for op in self.all if op.type in _tf.op_walks.EXITS]
        while True:  # what a loop within a loop returns is within the outer one
            inner = [op for op in exits if id(op) not in reached and id(_before_loop(op)) in reached]
            if not inner:
                return reached
            reached.update(map(id, inner))
            reached |= self._reached([user for op in inner for user in self._users.get(id(op), [])], ())

    def _reached(self, waiting: List[tf.Operation], ends: Tuple[str, ...]) -> Set[int]:
        reached: Set[int] = set()
        while waiting:
            op = waiting.pop()
            if id(op) not in reached and op.type not in ends + _tf.op_walks.EXITS:
                reached.add(id(op))
                waiting += self._users.get(id(op), [])
        return reached

    def updates_of(self) -> Dict[str, List[tf.Operation]]:
        """Return the updates of each variable, by its name."""
        by_target: Dict[str, List[tf.Operation]] = {}
        for op in self.updates:
            by_target.setdefault(_target(op.inputs[0]), []).append(op)
        return by_target

    def readers_of(self, name: str) -> List[tf.Operation]:
        """Return the ops that use the value of a variable.

        Reading a ref variable copies nothing, so what counts is when the ops after the read use it.
        """
        readers: List[tf.Operation] = []
        waiting = [op for op in self.all if op.name == name and _target(op.outputs[0]) == name]
        is_ref = any(op.type != "VarHandleOp" for op in waiting)
        while waiting:
            for user in self._users.get(id(waiting.pop()), []):
                if _changes(user) and _target(user.inputs[0]) == name:
                    continue
                if user.type == "ReadVariableOp" and not is_ref:
                    readers.append(user)
                elif user.type in PASSES:
                    waiting.append(user)
                elif user.type != "NoOp" and user.type != "VarIsInitializedOp":
                    readers.append(user)
        return readers
