"""Name what runs along with a train op, so with every micro-batch, although a full batch would do it once per step."""

import weakref
from typing import Any, Dict, Iterable, List, Optional, Sequence, Set

from accum import _check, _tf
from accum._engine._replicas import local_variable
from accum._tf import GradsAndVars, tf
from accum.compat.v1._carried_state import BESIDE, assigned_behind
from accum.compat.v1._engine_adapter import ops_outside_of_steps
from accum.compat.v1._update_ops import Average, averages_of_layers

MOVES = (
    "Moving averages of batch normalisation move with every micro-batch, so `accum_steps` times as fast as with full "
    "batches, and without what differs between micro-batches. [accum: moving-averages]"
)
TAKE_OVER = (
    "Call `accumulate_update_ops()` of the `AccumOptimizer` after the model is built and before the train op is "
    "created; it says so if it can't take over an update."
)
ON_REPLICAS = (
    "`accumulate_update_ops` does not support several replicas: run the ops in UPDATE_OPS once per step, by themselves "
    "instead of with the train op."
)
LARGER_BATCHES = (
    "`accum.compat.v1.value_and_gradients` moves them once for each batch that it splits: pass it the whole batch of a "
    "step, with the same `micro_batch_size`, and set `accum_steps=1`. That is exact."
)

AVERAGES_OF_WEIGHTS = (
    "Averages of the weights move with every micro-batch, although the weights change only in a step; so does whatever "
    "else is computed from them and from itself, such as the vectors of a spectral normalisation: create them in a "
    "function that you pass to `after_step` of the `AccumOptimizer`, such as `optimizer.after_step(lambda: "
    "average.apply(variables))`, before the train op. [accum: averages-of-weights]"
)

CHANGED_WEIGHTS = (
    "Trained variables change in each run, so with every micro-batch, beside the optimizer, such as by a weight decay: "
    "let a function that you pass to `after_step` of the `AccumOptimizer` change them, before the train op is created. "
    "[accum: averages-of-weights]"
)

COUNTER = (
    "is advanced with every micro-batch, and the step reads it, such as for its learning rate, which therefore changes "
    "`accum_steps` times too fast: pass it as `global_step` to the train op, which then counts steps, and remove what "
    "adds 1 in each run, or let that follow each step by `after_step`. [accum: global-step]"
)

_MOVED_BY_BATCH: "weakref.WeakKeyDictionary[tf.Graph, Dict[str, str]]" = weakref.WeakKeyDictionary()
"""In a graph: the averages that `value_and_gradients` moves, by the ops that do so. Only names, which hold no graph."""


def note_moves(var: tf.Variable, moves: Iterable[tf.Operation]) -> None:
    """Note that `moves` change an average of batch normalisation once for each batch."""
    graph = _tf.graphs.outermost_graph()
    _MOVED_BY_BATCH.setdefault(graph, {}).update({move.name: var.op.name for move in moves})


ADDING = ("AssignAdd", "AssignAddVariableOp")
MOVING = ADDING + ("AssignSub", "AssignSubVariableOp")
SETTING = ("Assign", "AssignVariableOp")
READING = ("Identity", "ReadVariableOp", "RefIdentity")
PASSING = READING + _tf.op_walks.ENTRANCES
LINEAR = ("Add", "AddN", "AddV2", "Neg", "Sub")
SCALING = ("Div", "Mul", "RealDiv")
FED = "PlaceholderWithDefault"
CONDITIONALS = ("If", "StatelessIf", "Case", "StatelessCase")
CHOOSING = (
    "DynamicPartition",
    "Gather",
    "ResourceGather",
    "Slice",
    "StatelessMultinomial",
    "StatelessRandom",
    "StatelessTruncated",
    "StridedSlice",
    "TensorArrayRead",
)
"""How the types of operations begin that take entries, or draw numbers, by another input than the first."""


class EveryRun:
    """What runs along with the train ops of one `AccumOptimizer`. Each kind of it is named once."""

    def __init__(self) -> None:
        self._train_ops: List[tf.Operation] = []
        self._run: List[tf.Operation] = []  # these and separate ops, and what computes their losses
        self._losses: List[tf.Operation] = []  # what computes their losses
        self._gradients: List[tf.Tensor] = []
        self._knows_losses = True
        self._trained: Set[tf.Operation] = set()  # of the variables or their handles
        self._is_replicated = False
        self._said: Set[str] = set()

    def add(
        self, op: tf.Operation, losses: Sequence[tf.Tensor], listed: GradsAndVars, is_train_op: bool = True
    ) -> None:
        """Look at what runs before a new op that accumulates, or before its losses.

        Args:
          op: the op.
          losses: list of tensors whose gradients it accumulates.
          listed: list of (gradient, variable) that it accumulates.
          is_train_op: whether it makes steps too.
        """
        if op.graph is not _tf.graphs.outermost_graph():
            return  # a branch, which can't be seen from outside
        self._train_ops += [op] if is_train_op else []
        of_losses = [loss.op for loss in losses if loss.graph is op.graph]
        self._losses += of_losses
        self._knows_losses = self._knows_losses and bool(of_losses)
        self._run += [op] + of_losses
        grads = tf.nest.flatten([grad for grad, _ in listed if grad is not None], expand_composites=True)
        self._gradients += [grad for grad in grads if grad.graph is op.graph]
        self._trained.update(_owner(var) for _, var in listed)
        self._is_replicated = tf.distribute.get_strategy().num_replicas_in_sync > 1
        self._name_averages(_tf.op_walks.ancestors(self._run, with_control=True))

    @_check.rule
    def look_again(self, is_counted: bool) -> None:
        """Look also at what runs after the train ops, or is run by the same op, now that the graph is complete.

        Args:
          is_counted: whether the train ops were given a `global_step`.
        """
        if not self._train_ops or self._is_replicated:  # outside of replicas, their variables can't be told apart
            return
        before = _tf.op_walks.ancestors(self._run, with_control=True)
        following = _tf.op_walks.descendants(self._train_ops)
        running = before + _tf.op_walks.ancestors(following, set(before), with_control=True)
        self._name_averages(running, of_others=True)
        results = [grad.op for grad in self._gradients] + self._losses
        carried = set(_tf.op_walks.ancestors(results, with_control=True))  # of which another warning tells
        self._name_changes(running, carried)
        self._name_state_behind(set(running).difference(before))
        self._name_counters(running, set(before), is_counted)

    def _name_averages(self, running: Sequence[tf.Operation], of_others: bool = False) -> None:
        """Warn of averages of batch normalisation that the ops `running` move.

        Args:
          running: list of operations.
          of_others: whether those of layers count that have nothing to do with the trained variables, such as those of
            the other network of a GAN. Its optimizer may still take them over.
        """
        ops, graph = set(running), _tf.graphs.outermost_graph()
        moved = _MOVED_BY_BATCH.get(graph, {})
        by_batch = sorted({moved[op.name] for op in (running if moved else ()) if op.name in moved})
        averages = [
            average for average in averages_of_layers(graph) if average.assign in ops and not _is_at_rest(average)
        ]
        if not of_others and averages:
            averages = _of_trained(averages, self._trained)
        names = sorted({average.var.op.name for average in averages})
        if names:
            remedy = ON_REPLICAS if self._is_replicated else TAKE_OVER
            self._say("averages", f"{MOVES} {remedy} Received: {_check.shown(names)}.")
        if by_batch:
            self._say("by batch", f"{MOVES} {LARGER_BATCHES} Received: {_check.shown(by_batch)}.")

    def _name_changes(self, running: Sequence[tf.Operation], carried: Set[tf.Operation]) -> None:
        """Warn of variables that the ops `running` change from what they and the trained variables are, not from data.

        These are trained variables that change by themselves or by numbers; others that become a linear combination of
        themselves and trained variables, such as averages; and others that losses read and that are computed from
        themselves and trained variables, such as the vectors of a spectral normalisation.

        Left out are copies, and projections, such as what is clipped or masked, which are the same after each
        micro-batch; scalars, such as an average of a loss; and what runs before the train op, which is state that
        micro-batches carry.
        """
        trainable = {_owner(var) for var in tf.compat.v1.trainable_variables()}
        averages, weights = set(), set()
        for op in self._unguarded(running, carried):
            owner, value = _tf.op_walks.entered(op.inputs[0]).op, op.inputs[1]
            if owner in self._trained:
                if op.type in MOVING or (op.type in SETTING and _is_scaled(value, owner)):
                    weights.add(owner.name)
            elif owner not in trainable and value.shape.rank != 0 and owner.name not in averages:
                sources = set(_tf.op_walks.ancestors([value.op]))
                is_read = owner in carried and not self._trained.isdisjoint(sources)
                is_read = is_read and not _is_projection(value, owner)
                is_of_itself = op.type in MOVING or owner in sources
                if is_of_itself and (is_read or _is_linear_in(value, self._trained)):
                    averages.add(owner.name)
        if averages:
            self._say("averages of weights", f"{AVERAGES_OF_WEIGHTS} Received: {_check.shown(sorted(averages))}.")
        if weights:
            self._say("changed weights", f"{CHANGED_WEIGHTS} Received: {_check.shown(sorted(weights))}.")

    @staticmethod
    def _unguarded(running: Sequence[tf.Operation], carried: Set[tf.Operation]) -> List[tf.Operation]:
        """Return those ops that change a variable, by other values than data's, in every run of the train op."""
        of_data = _tf.op_walks.following(running, {op for op in running if _tf.op_walks.gives_data(op)})
        outside = set(ops_outside_of_steps()) - carried
        changes = [op for op in running if op in outside and _tf.op_walks.changes_variable(op) and len(op.inputs) > 1]
        return [op for op in changes if op.inputs[1].op not in of_data and not _is_guarded(op)]

    def _name_state_behind(self, others: Set[tf.Operation]) -> None:
        """Warn of variables that losses read and that `others`, which run along, assign from the same data."""
        last = max(map(_tf.graphs.creation_order, self._train_ops))
        names = assigned_behind(self._gradients + [op.outputs[0] for op in self._losses], last, others)
        if names:
            self._say("state behind", f"{BESIDE} Received: {names}.")

    def _name_counters(self, running: Sequence[tf.Operation], before: Set[tf.Operation], is_counted: bool) -> None:
        """Warn if the ops `running` add a constant to a counter, and the steps use it.

        Left out are what counts examples, what adds in a conditional of the program's own, the steps of optimizers that
        accumulate, and what waits for other optimizers, such as that of a generator, which count steps of their own;
        and a counter other than `global_step` by which a loss may choose the data, or random numbers.
        """
        counters = self._counters(before, is_counted)
        outside = set(ops_outside_of_steps()) - before if counters else set()
        for op in running:
            owner = op.inputs[0].op if op in outside and len(op.inputs) else None
            added = _added(op, owner) if owner in counters else None
            if added is None:
                continue
            is_constant = not any(map(_tf.op_walks.gives_data, _tf.op_walks.ancestors([added.op])))
            may_be_named = is_constant and not _tf.graphs.is_in_control_flow(op)
            if may_be_named and not _follows_other_steps(op, outside) and not self._is_choice(owner):
                self._say("counter", f"`{counters[owner]}` {COUNTER} Received: {op.name!r}.")

    def _counters(self, before: Set[tf.Operation], is_counted: bool) -> Dict[Any, str]:
        """Return the names of the counters that the steps use, by their ops or handles."""
        step, own = _tf.graphs.global_step(), []  # type: Any, List[Any]
        if self._knows_losses:
            scalars = [var for var in tf.compat.v1.global_variables() if var.shape.rank == 0]
            own = [var for var in scalars if var is not step and not getattr(var, "trainable", False)]
        counters = own + ([] if is_counted or step is None else [step])
        return {_owner(var): var.op.name for var in counters if _owner(var) in before}

    def _is_choice(self, counter: tf.Operation) -> bool:
        """Whether losses choose data or numbers by a counter that is not that of the steps."""
        step = _tf.graphs.global_step()
        is_step = step is not None and counter is _owner(step)
        return not is_step and _chooses(counter, _tf.op_walks.ancestors(self._losses))

    def _say(self, kind: str, message: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            _check.warn(message, _check.InexactWarning)


def _is_at_rest(average: Average) -> bool:
    """Whether an update op leaves its average as it is, because its momentum is 1."""
    return _tf.variables.known_value(average.decay) == 0.0


def _of_trained(averages: Sequence[Average], trained: Set[tf.Operation]) -> List[Average]:
    """Return the averages of those layers whose inputs depend on variables `trained`, or on no trainable variable."""
    ops = _tf.graphs.outermost_graph().get_operations()
    after = _tf.op_walks.following(ops, trained)
    others = _tf.op_walks.following(ops, {_owner(var) for var in tf.compat.v1.trainable_variables()})
    return [average for average in averages if average.inputs.op in after or average.inputs.op not in others]


def _is_guarded(op: tf.Operation) -> bool:
    """Whether an op that changes a variable is in a loop, or in a conditional that may choose a micro-batch of a cycle.

    One that asks for the number of steps chooses them all.
    """
    if not _tf.graphs.is_in_control_flow(op):
        return False
    step, entrance = _tf.graphs.global_step(), op.inputs[0].op
    while entrance.type in _tf.op_walks.SWITCHES:
        asked = [one for one in _tf.op_walks.ancestors([entrance.inputs[1].op]) if not one.inputs or one.type == FED]
        if any(one.type != "Const" and (step is None or one is not _owner(step)) for one in asked):
            return True
        entrance = entrance.inputs[0].op
    return entrance.type in _tf.op_walks.ENTRANCES or entrance is op.inputs[0].op


def _is_projection(value: tf.Tensor, owner: tf.Operation) -> bool:
    """Whether a value is its variable, masked or limited by what does not depend on it: the same if computed again."""
    op = _unread(value)
    operands = list(op.inputs) if op.type in ("Maximum", "Minimum", "Mul") else []
    others = [one.op for one in operands if _unread(one) is not owner]
    if len(others) != 1 or owner in _tf.op_walks.ancestors(others):
        return False
    (other,) = others
    return op.type != "Mul" or (other.type == "Cast" and other.inputs[0].dtype == tf.bool)


def _is_linear_in(value: tf.Tensor, trained: Set[tf.Operation]) -> bool:
    """Whether a value, no scalar, is a sum of scaled tensors of its shape, among them a trained variable."""
    shape = value.shape
    if not shape.rank or not shape.is_fully_defined():
        return False
    waiting, seen = [value], set()
    while waiting:
        tensor = waiting.pop()
        op, inputs = tensor.op, list(tensor.op.inputs)
        if op in seen or tensor.shape.as_list() != shape.as_list() or tensor.dtype.base_dtype != value.dtype.base_dtype:
            continue
        seen.add(op)
        if op in trained or op.type == "ReadVariableOp" and _tf.op_walks.entered(inputs[0]).op in trained:
            return True
        if op.type in LINEAR:
            waiting += inputs
        elif op.type in PASSING:
            waiting += inputs[:1]
        elif op.type in SCALING:
            is_scaled = inputs[1].shape.rank == 0
            waiting += inputs[:1] if is_scaled else inputs[1:] if op.type == "Mul" and inputs[0].shape.rank == 0 else []
    return False


def _is_scaled(value: tf.Tensor, owner: tf.Operation) -> bool:
    """Whether a value is the variable of `owner` scaled, or with something added, by what does not depend on it."""

    def is_apart(tensor: tf.Tensor) -> bool:
        return owner not in _tf.op_walks.ancestors([tensor.op])

    def is_of_owner(tensor: tf.Tensor) -> bool:
        op = _unread(tensor)
        inputs = list(op.inputs)
        if op.type in SCALING:
            pairs = [inputs] if op.type != "Mul" else [inputs, inputs[::-1]]
            return any(is_of_owner(one) and scale.shape.rank == 0 and is_apart(scale) for one, scale in pairs)
        if op.type in LINEAR:
            own = [is_of_owner(one) for one in inputs]
            return any(own) and all(is_own or is_apart(one) for is_own, one in zip(own, inputs))
        return op is owner

    return _unread(value) is not owner and is_of_owner(value)


def _chooses(counter: tf.Operation, of_losses: Sequence[tf.Operation]) -> bool:
    """Whether losses take entries of something, or draw, by a counter, or take one or the other data."""
    if counter not in of_losses:
        return False
    after = _tf.op_walks.following(of_losses, {counter})
    of_data = _tf.op_walks.following(of_losses, {op for op in of_losses if _tf.op_walks.gives_data(op)})

    def is_choice(op: tf.Operation) -> bool:
        first, *others = [tensor.op for tensor in op.inputs] or [None]
        if op.type in _tf.op_walks.SWITCHES:
            return others[0] in after and first in of_data
        if op.type in CONDITIONALS:
            return first in after and not of_data.isdisjoint(others)
        return op.type.startswith(CHOOSING) and not after.isdisjoint(others)

    return any(map(is_choice, after))


def _added(op: tf.Operation, owner: tf.Operation) -> Optional[tf.Tensor]:
    """Return what an op adds to a variable, as `assign_add(var, added)` or `assign(var, var + added)`, or None."""
    if op.type not in ADDING + SETTING or op.inputs[0].op is not owner:
        return None
    if op.type in ADDING:
        return op.inputs[1]
    total = _unread(op.inputs[1])
    if total.type not in ("Add", "AddV2"):
        return None
    first, second = total.inputs
    return second if _unread(first) is owner else first if _unread(second) is owner else None


def _unread(tensor: tf.Tensor) -> tf.Operation:
    """Return the op of the variable that a tensor was read from, or else the op that computes it."""
    op = tensor.op
    while op.type in PASSING:
        op = op.inputs[0].op
    return op


def _follows_other_steps(op: tf.Operation, outside: Set[tf.Operation]) -> bool:
    """Whether an op waits for an optimizer that accumulates nothing."""
    before = _tf.op_walks.ancestors([op], with_control=True)
    return any(one in outside and "Apply" in one.type and _tf.op_walks.changes_variable(one) for one in before)


def _owner(var: Any) -> tf.Operation:
    var = local_variable(var)  # hooks begin outside of replicas
    return getattr(var, "handle", var).op
