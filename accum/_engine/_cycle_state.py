"""What a cycle keeps: its counters, the weighted sums of its gradients, and the list of its variables.

`StepCounter` counts micro steps. `WeightedSums` adds the weighted gradients of one replica to its accumulators, and
their weights to each other.

`VariableList` says for which variables gradients are accumulated, and `SeenGradients` which of them had one. A variable
without a gradient in a whole cycle is not passed to the inner optimizer, just as in a full batch: an optimizer with
momentum would move it even with a gradient of zeros. In a graph, the list of variables is fixed before the graph runs.
In eager execution, Python sees every gradient.
"""

from typing import Any, Callable, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from accum import _tf
from accum._engine import _gradients, _replicas
from accum._engine._accumulators import Accumulator, Accumulators
from accum._engine._gradients import is_zero
from accum._engine._interfaces import CycleListener, OptimizerAdapter
from accum._engine._plan import Plan
from accum._engine._replicas import true_after
from accum._tf import Gradient, GradsAndVars, PerReplica, Scalar, Wait, tf
from accum._tf.tracking import CheckpointOnly

TOO_MANY = (
    "The restored cycle holds as many micro-batches as `accum_steps`, or more, because it began with a larger one: run "
    "`flush()` of the optimizer after restoring, which makes a step from them, or `reset()`, which "
    "discards them; or finish the cycle with the former `accum_steps`. Received: accum_steps="
)


# --------------------------------------------------------------------------------------------------------------------
# Counters


class CycleState(CheckpointOnly):
    """The part of a cycle that is saved in checkpoints.

    Attributes:
      micro_step: int64 [], the micro steps made so far in the current cycle.
      length: int64 [], the length of the current cycle, or 0 if it is not known; None if it is a constant of the graph.
      weight_sum: float32 [] per replica, the sum of the micro-batches' weights.
      accumulators: the `Accumulators`, one for each variable that had a gradient.
      draws: the `CycleDraws` of the cycle; it exists only if the model draws random numbers.
      requested: int64 [], the length of the next cycle; it exists only after `keep_request`.
    """

    draws: Any
    requested: Any

    def __init__(self) -> None:
        super().__init__()
        self.micro_step: tf.Variable = None
        self.length: tf.Variable = None
        self.weight_sum: tf.Variable = None
        self.accumulators = Accumulators()


class Count(NamedTuple):
    """Where a cycle is: int64 scalars, the micro steps made so far in it, and its length."""

    micro_step: tf.Tensor
    length: tf.Tensor


class StepCounter:
    """Counts the micro steps of a cycle, and knows how long it is.

    Args:
      plan: a `Plan`.
      adapter: the `OptimizerAdapter` that creates the variables and counts the steps.
      is_settable: whether the length of later cycles may be changed.

    Attributes:
      plan: the `Plan`; `request` replaces it.
      state: the `CycleState`.
      has_stepped: bool variable, whether the last micro step made a step; None in a static graph, and before `build`.
    """

    def __init__(self, plan: Plan, adapter: OptimizerAdapter, is_settable: bool) -> None:
        self.plan = plan
        self.state = CycleState()
        self.is_settable = is_settable
        # Two variables that are not saved in checkpoints, but for `keep_request`:
        self.has_stepped: Optional[tf.Variable] = None
        self._requested: tf.Variable = None  # the length of the next cycle
        self._keeps_request = False
        self._adapter = adapter

    def build(self) -> None:
        """Create the variables."""
        self.state.weight_sum = self._adapter.scalar("weight_sum", tf.constant(0.0), per_replica=True)
        if self.is_settable:
            accum_steps = tf.constant(self.plan.accum_steps, tf.int64)
            self._requested = self._adapter.scalar("accum_steps", accum_steps)
            self.state.length = self._adapter.scalar("length", accum_steps)
            if self._keeps_request:
                self.state.requested = self._requested
        elif self.plan.is_schedule and not _tf.graphs.in_static_graph():
            self.state.length = self._adapter.scalar("length", tf.constant(0, tf.int64))
        self.state.micro_step = self._adapter.scalar("micro_step", tf.constant(0, tf.int64))
        if not _tf.graphs.in_static_graph():
            self.has_stepped = self._adapter.scalar("has_stepped", tf.constant(False))

    @property
    def is_built(self) -> bool:
        return self.state.micro_step is not None

    @property
    def has_single(self) -> bool:
        """Whether a cycle may be one micro step long."""
        return self.is_settable or self.plan.has_single

    def request(self, plan: Plan) -> None:
        """Use `plan` from the next cycle on."""
        self.plan = plan
        if self.is_built:
            _tf.variables.set_variable(self._requested, plan.accum_steps)

    def requested(self) -> Any:
        """Return the length of the next cycle, which may have been restored, or its schedule. Not for static graphs."""
        can_be_restored = self.is_settable and self.is_built
        return int(_tf.variables.native(self._requested).numpy()) if can_be_restored else self.plan.accum_steps

    def keep_request(self) -> None:
        """Save the length of the next cycle in checkpoints from now on."""
        self._keeps_request = True
        if self.is_built and self.is_settable:
            self.state.requested = self._requested

    def read(self, may_be_full: bool = True) -> Count:
        """Return where the cycle is.

        Args:
          may_be_full: False where another micro-batch would be one too many for a cycle that has been restored whole,
            which then raises, in a static graph. Where a cycle is one micro step long, separate ops may have
            accumulated others before.
        """
        with tf.name_scope("step_counter"), _tf.variables.on_host():
            micro_step = self.state.micro_step.read_value()
            if not may_be_full and _tf.graphs.in_static_graph() and self.plan.longest > 1:
                is_open = tf.less(micro_step, self.plan.longest)
                received = [f"{TOO_MANY}{self.plan.accum_steps}, with micro-batches:", tf.cast(micro_step, tf.int32)]
                with tf.control_dependencies([tf.debugging.Assert(is_open, received)]):
                    micro_step = tf.identity(micro_step)
            return Count(micro_step, self.length(micro_step))

    def length(self, micro_step: tf.Tensor) -> tf.Tensor:
        """Return the length of the current cycle, an int64 scalar, which is fixed when the cycle begins.

        Args:
          micro_step: int64 scalar, the micro steps made so far in the cycle.
        """
        if self.is_settable:
            return tf.where(tf.equal(micro_step, 0), self._requested.read_value(), self.state.length.read_value())
        if not self.plan.is_schedule:
            return tf.constant(self.plan.accum_steps, tf.int64)
        step = tf.cast(self._adapter.steps(), tf.int64)  # the caller has entered `on_host`
        terms = [tf.where(step >= first, tf.constant(change, tf.int64), 0) for first, change in self.plan.increments]
        scheduled = tf.add_n(terms)
        if self.state.length is None:
            return scheduled
        # A restored cycle ends as it began, whatever the schedule is now.
        begun = self.state.length.read_value()
        return tf.where(tf.equal(micro_step, 0) | tf.equal(begun, 0), scheduled, begun)

    def end_micro_step(
        self,
        strategy: tf.distribute.Strategy,
        has_stepped: tf.Tensor,
        now: Count,
        following: tf.Tensor,
        counts: Optional[tf.Tensor],
    ) -> tf.Operation:
        """Create an op that, after the micro step, advances every counter and stores `has_stepped`.

        Args:
          strategy: the current strategy; this is in cross-replica context.
          has_stepped: bool scalar, whether the micro step made a step. It waits for everything that it does.
          now: the `Count` before it.
          following: int64 scalar, `micro_step` after it.
          counts: bool scalar, whether the micro step counts; None: it does.
        """
        if counts is not None:
            with _tf.variables.on_host():
                following = tf.where(counts, following, now.micro_step)
        with tf.control_dependencies([has_stepped]), tf.name_scope("step_counter"):
            counted = self._adapter.count_micro_step(counts, has_stepped)
            kept = self.keep_has_stepped(strategy, has_stepped)
        with tf.control_dependencies(kept if counted is None else [counted, *kept]):
            return self.advance(strategy, has_stepped, now, following)

    def keep_has_stepped(self, strategy: tf.distribute.Strategy, has_stepped: tf.Tensor) -> List[tf.Operation]:
        """Store whether a step was made. Returns ops to wait for."""
        kept = None if self.has_stepped is None else _assign(strategy, self.has_stepped, has_stepped)
        return [] if kept is None else [kept]

    def advance(
        self, strategy: tf.distribute.Strategy, done: tf.Tensor, now: Count, following: tf.Tensor
    ) -> tf.Operation:
        """Create an op that, after `done`, stores the next `micro_step`, and the length of the cycle.

        `done` waits for the gradients, so `micro_step` does not change when a dataset turns out to have ended.
        """
        with tf.control_dependencies([done]), tf.name_scope("step_counter"):
            ops = [_assign(strategy, self.state.micro_step, following)]
            if self.state.length is not None:
                ops.append(_assign(strategy, self.state.length, now.length))
            return tf.group(*[op for op in ops if op is not None])


def _assign(strategy: tf.distribute.Strategy, var: tf.Variable, value: tf.Tensor) -> Optional[tf.Operation]:
    def assign(counter: tf.Variable, new: tf.Tensor) -> tf.Operation:
        with _tf.variables.on_host():
            return counter.assign(new, read_value=False)

    return strategy.extended.update(var, assign, args=(value,))


# --------------------------------------------------------------------------------------------------------------------
# The weighted sums of one replica


class WeightedSums:
    """Sums one replica's gradients and weights. Every method runs on one replica, and none communicates.

    Args:
      state: the cycle's `CycleState`.
      accumulators: list of `Accumulator`, one for each variable.
      plan: a `Plan`.
      listeners: the `CycleListener`s that accumulate each micro-batch too.
      is_reduced: whether the gradients are already the same on every replica.
    """

    def __init__(
        self,
        state: CycleState,
        accumulators: List[Accumulator],
        plan: Plan,
        listeners: Sequence[CycleListener],
        is_reduced: bool,
    ) -> None:
        self._state = state
        self._accumulators = accumulators
        self._plan = plan
        self._listeners = listeners
        self._is_reduced = is_reduced

    def keep(self, how: str, grads: Sequence[Optional[Gradient]], weight: Optional[Scalar]) -> tf.Tensor:
        """Start the sums with a micro-batch, or add it to them; `how` is "start" or "add"."""
        with tf.name_scope(how):
            kept = [self._start(grads, weight) if how == "start" else self._add(grads, weight)]
            total = _replicas.local_variable(self._state.weight_sum)
            assign = total.assign if how == "start" else total.assign_add
            kept.append(assign(self._weight_of(weight), read_value=False))
            return true_after(kept + [listener.on_micro_step(how == "start") for listener in self._listeners])

    def _start(self, grads: Sequence[Optional[Gradient]], weight: Optional[Scalar]) -> List[Wait]:
        factor = self._factor(weight)
        return [accumulator.start(grad, factor) for accumulator, grad in zip(self._accumulators, grads)]

    def _add(self, grads: Sequence[Optional[Gradient]], weight: Optional[Scalar]) -> List[Wait]:
        """Add a micro-batch to the sums. With weight 0, its rows are marked as touched, but nothing is added."""
        factor = self._factor(weight)
        in_one, added = [], []
        for accumulator, grad in zip(self._accumulators, grads):
            if factor is not None and accumulator.has_one_pass(grad):
                in_one.append((accumulator, grad))
            else:
                added.append(accumulator.add(grad, factor))

        def add() -> tf.Tensor:
            return true_after([accumulator.add_in_one_pass(grad, factor) for accumulator, grad in in_one])

        if in_one:
            weighs = None if weight is None else tf.not_equal(weight, 0.0)
            added.append(add() if weight is None else tf.cond(weighs, add, lambda: tf.constant(True), name="if_weighs"))
        return added

    def keep_running(
        self, grads: Sequence[Optional[Gradient]], weight: Optional[Scalar], is_first: Union[bool, tf.Tensor]
    ) -> tf.Tensor:
        """Update the running means with a micro-batch that is not the last of its cycle."""
        blended = self._blend(grads, weight, is_first)
        return true_after([blended] + [listener.on_micro_step(is_first) for listener in self._listeners])

    def _blend(
        self, grads: Sequence[Optional[Gradient]], weight: Optional[Scalar], is_first: Union[bool, tf.Tensor]
    ) -> tf.Tensor:
        """Update the running means: m += (w / W) (g - m), where W is the sum of the weights so far, including w."""
        so_far = self._weight_so_far(weight, is_first)
        share = tf.math.divide_no_nan(self._weight_of(weight), so_far)
        factor = self._factor(None)  # `share` contains the weight
        if factor is not None:
            grads = [grad if grad is None else _tf.inner_optimizer.scale_gradient(grad, factor) for grad in grads]
        moved = [accumulator.blend(grad, share, is_first) for accumulator, grad in zip(self._accumulators, grads)]
        with tf.control_dependencies([share]):
            moved.append(_replicas.local_variable(self._state.weight_sum).assign(so_far, read_value=False))
        return true_after(moved)

    def _weight_so_far(self, weight: Optional[Scalar], is_first: Union[bool, tf.Tensor]) -> tf.Tensor:
        stored = _replicas.local_variable(self._state.weight_sum).read_value()
        if is_first is not False:
            stored = tf.where(is_first, 0.0, stored)
        return stored + self._weight_of(weight)

    def total(
        self,
        grads: Optional[Sequence[Optional[Gradient]]],
        weight: Optional[Scalar],
        micro_step_index: tf.Tensor,
        is_first: Union[bool, tf.Tensor],
        is_for_all: bool,
    ) -> Tuple[List[Gradient], tf.Tensor]:
        """Return this replica's sums of gradients and of weights over the cycle, including the last micro-batch.

        Args:
          grads: gradients of the last micro-batch; None to return the stored sums.
          weight: its weight, or None.
          micro_step_index: int64 scalar, the micro steps made before it in this cycle.
          is_first: bool tensor, whether it is the first of its cycle; False if it is known not to be.
          is_for_all: whether the sums will be added to those of other replicas. A running mean is then converted to
            the sum.
        """
        if grads is not None and not self._plan.is_running_mean:
            factor = self._factor(weight)
            sums = [accumulator.peek(grad, factor, is_first) for accumulator, grad in zip(self._accumulators, grads)]
            return sums, self._weight_so_far(weight, is_first)
        kept = [] if grads is None else [self._blend(grads, weight, is_first_micro_step(micro_step_index))]
        with tf.control_dependencies(kept):
            sums = [accumulator.stored() for accumulator in self._accumulators]
            weight = _replicas.local_variable(self._state.weight_sum).read_value()
            if is_for_all and self._plan.is_running_mean:  # in float32, so that the sum does not overflow
                sums = [_tf.inner_optimizer.scale_gradient(_gradients.cast(mean, tf.float32), weight) for mean in sums]
            return sums, weight

    # The state means the same for any number of replicas. Each micro-batch adds `w_i` times the gradient of the whole
    # micro-batch to the sums of all replicas together, and `w_i` to their weights (1 if no weight was given). Each
    # replica's gradient is scaled by 1 / replicas, as Keras scales its loss. A gradient that is already reduced is that
    # of the whole micro-batch, and the same on every replica.

    def _factor(self, weight: Optional[Scalar]) -> Optional[Scalar]:
        """Return the factor by which a gradient is multiplied before it is added to the sum, or None for 1."""
        replicas = _replicas.count()
        if replicas == 1:
            return weight
        if self._is_reduced:
            return 1.0 / replicas
        return None if weight is None else float(replicas) * weight

    def _weight_of(self, weight: Optional[Scalar]) -> Scalar:
        """Return the number that is added to this replica's sum of weights."""
        return 1.0 / _replicas.count() if weight is None else weight

    def divisor(self, weight: tf.Tensor) -> Optional[Scalar]:
        """Return the number by which a total is divided to give the gradient of the step, or None for 1."""
        replicas = _replicas.count()
        if self._plan.reduction == "mean":
            return weight
        if replicas == 1:
            return None
        if self._is_reduced:  # the replicas' shares are not summed, so each replica scales its own share up
            return 1.0 / replicas
        return weight / replicas if self._plan.is_running_mean else None

    def clear(self) -> tf.Tensor:
        cleared = [accumulator.clear() for accumulator in self._accumulators]
        weight = _replicas.local_variable(self._state.weight_sum)
        return true_after(cleared + [weight.assign(0.0, read_value=False)])

    def clear_rows(self) -> tf.Tensor:
        return true_after(
            [accumulator.clear_rows() for accumulator in self._accumulators if accumulator.rows is not None]
        )


def is_first_micro_step(micro_step_index: tf.Tensor) -> tf.Tensor:
    with _tf.variables.on_host():
        return tf.equal(micro_step_index, 0)


# --------------------------------------------------------------------------------------------------------------------
# Variables


class VariableList:
    """Checks that all calls within a cycle have the same list of variables.

    Attributes:
      current: the variables of the last call, in order.
    """

    def __init__(self) -> None:
        self.current: Tuple[tf.Variable, ...] = ()
        # Their keys -> the variables of an earlier call. It may run again without Python, because it was traced.
        self._used: Dict[FrozenSet[int], Tuple[tf.Variable, ...]] = {}
        self._announced: Optional[Set[int]] = None  # keys of the last announced list
        self._may_change = False  # whether the next call may have another list, because one was announced
        # Variable key -> (variable, number). It holds the variable because the key is unique only while it exists.
        self._numbers: Dict[int, Tuple[tf.Variable, int]] = {}
        self._traced_without: Dict[int, str] = {}  # variable key -> name, for variables without a gradient in a trace

    def use(self, variables: Sequence[tf.Variable]) -> None:
        """Make `variables` those of the last call."""
        self.current = tuple(variables)
        self._used[frozenset(_keys(variables))] = self.current

    def number(self, variables: Sequence[tf.Variable]) -> None:
        """Number those of `variables` that are new, in order."""
        for var in variables:
            self._numbers.setdefault(_tf.variables.key_of(var), (var, len(self._numbers)))

    def number_of(self, var: tf.Variable) -> int:
        return self._numbers[_tf.variables.key_of(var)][1]

    def count_with(self, variables: Sequence[tf.Variable]) -> int:
        """How many variables will have a number once `variables` have one."""
        return len(_keys(variables).union(self._numbers))

    def check(
        self, listed: GradsAndVars, has_accumulator: Callable[[tf.Variable], bool], is_in_cycle: Callable[[], bool]
    ) -> None:
        """Raise if a call has another list of variables within a cycle. A traced call may run at any time in a cycle.

        Variables that never had a gradient may be added and removed.

        Args:
          listed: list of (gradient or None, variable) of the call.
          has_accumulator: function that returns whether a variable has an accumulator.
          is_in_cycle: function that returns whether a cycle has begun.
        """
        keys, current = _keys([var for _, var in listed]), _keys(self.current)
        gone = _keys([var for var in self.current if has_accumulator(var)]) - keys
        # A variable that has an accumulator comes even without a gradient: with the sum of an earlier cycle.
        come = _keys([var for grad, var in listed if grad is not None or has_accumulator(var)]) - current
        if self.current and (gone or come):
            self._refuse_change([var.name for _, var in listed], is_in_cycle)
        self._may_change = False
        self._check_traces(listed)

    def _refuse_change(self, names: Sequence[str], is_in_cycle: Callable[[], bool]) -> None:
        received = f"Received: {names}, after {[var.name for var in self.current]}."
        if self._may_change and not is_in_cycle():
            return
        if not tf.executing_eagerly():
            raise ValueError(
                "One optimizer accumulates for one list of variables: use an optimizer for each list. "
                f"{received} [accum: variable-list]"
            )
        if is_in_cycle():
            raise ValueError(
                f"The list of variables must not change within a cycle: call `flush()` or `reset()` first. {received}"
                " [accum: variable-list]"
            )

    def _check_traces(self, listed: GradsAndVars) -> None:
        keys = [_tf.variables.key_of(var) for grad, var in listed if grad is not None]
        late = [self._traced_without[key] for key in keys if key in self._traced_without]
        if late:
            raise ValueError(
                f"{late} had no gradient in a function that was traced earlier, which would lose the gradients that "
                "they get now. Trace the function that computes these gradients first, or use an optimizer for each "
                "function. [accum: variable-list]"
            )

    def note_without_gradient(self, variables: Sequence[tf.Variable]) -> None:
        """Remember that a trace has no gradients for `variables`."""
        self._traced_without.update((_tf.variables.key_of(var), var.name) for var in variables)

    def announce(self, variables: Sequence[tf.Variable], is_in_cycle: Callable[[], bool]) -> None:
        """Let the next call have another list of variables, unless the last one had this list.

        `LossScaleOptimizer` announces all variables before each call, but then calls without those that have no
        gradient.
        """
        self.number(variables)
        keys = _keys(variables)
        if keys == _keys(self.current):
            return
        if is_in_cycle():
            if keys == self._announced:
                return
            raise ValueError(
                "The list of variables must not change within a cycle: call `flush()` or `reset()` first. "
                f"Received: {[var.name for var in variables]}. [accum: variable-list]"
            )
        self._announced, self._may_change = keys, True
        self.current = self._used.get(frozenset(keys), self.current)


def _keys(variables: Sequence[tf.Variable]) -> Set[int]:
    return {_tf.variables.key_of(var) for var in variables}


# --------------------------------------------------------------------------------------------------------------------
# Variables with a gradient in this cycle


class SeenGradients:
    """Notes the variables that have a gradient in each eager micro step.

    Python does not see what a traced micro step does, and no checkpoint tells it what was seen before. If it has missed
    a micro step, every variable counts as one that had a gradient.
    """

    def __init__(self) -> None:
        self._numbers: Set[int] = set()
        self._micro_steps = 0  # how many of this cycle have been noted
        self._is_complete = True
        self._has_traced = False

    def note(
        self,
        strategy: tf.distribute.Strategy,
        grads: Sequence[Optional[PerReplica]],
        numbers: Sequence[int],
        micro_step_index: tf.Tensor,
        counts: Optional[tf.Tensor],
    ) -> None:
        """Note which variables have a gradient in a micro step.

        Args:
          strategy: the current strategy.
          grads: the gradients, per replica; None where there is none.
          numbers: the numbers of their variables.
          micro_step_index: int64 scalar, the micro steps made before it in this cycle.
          counts: bool scalar, whether the micro-batch counts. None: it does.
        """
        if not tf.executing_eagerly():
            self._has_traced = True  # it may run at any time from now on
        elif counts is None or bool(counts):
            has_one = [any(part is not None for part in strategy.experimental_local_results(grad)) for grad in grads]
            self._note(int(micro_step_index), {number for is_there, number in zip(has_one, numbers) if is_there})

    def _note(self, micro_step_index: int, numbers: Set[int]) -> None:
        if micro_step_index == 0:
            self._numbers, self._micro_steps, self._is_complete = set(), 0, True
        # The same index comes again after an error.
        self._is_complete = self._is_complete and self._micro_steps - 1 <= micro_step_index <= self._micro_steps
        self._numbers |= numbers
        self._micro_steps = micro_step_index + 1

    def only(
        self,
        strategy: tf.distribute.Strategy,
        totals: Sequence[Optional[PerReplica]],
        numbers: Sequence[int],
        micro_step_index: tf.Tensor,
        has_latest: bool,
    ) -> List[Optional[PerReplica]]:
        """Return the totals with None for each variable that is known to have had no gradient in the whole cycle.

        Args:
          strategy: the current strategy.
          totals: the sums of the cycle, per replica.
          numbers: the numbers of their variables.
          micro_step_index: int64 scalar, the micro steps of the cycle that are stored.
          has_latest: whether `totals` include one more.
        """
        if not tf.executing_eagerly():
            return list(totals)
        if not self._is_known(strategy, int(micro_step_index) + has_latest):
            return list(totals)
        has_one = [number in self._numbers for number in numbers]
        merged = [
            total if is_seen or not _is_zero_everywhere(strategy, total) else None
            for total, is_seen in zip(totals, has_one)
        ]
        return merged if any(total is not None for total in merged) else list(totals)

    def _is_known(self, strategy: tf.distribute.Strategy, micro_steps: int) -> bool:
        """Whether every micro step of this cycle was seen, on all replicas: all of them are in this process."""
        has_all = not _tf.strategies.has_several_workers(strategy)
        return has_all and self._is_complete and not self._has_traced and self._micro_steps == micro_steps


def _is_zero_everywhere(strategy: tf.distribute.Strategy, total: PerReplica) -> bool:
    """Whether a total is zero, as it must be without gradients; a restored one may not be."""
    return all(is_zero(part) for part in strategy.experimental_local_results(total))
