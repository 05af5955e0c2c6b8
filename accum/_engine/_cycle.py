"""The engine of every interface: accumulate -> is the cycle full? -> reduce -> mean -> transform -> apply.

A cycle is the `accum_steps` micro steps that make one step. Each micro step asks one question across all replicas: is
it the last of its cycle? If not, each replica only accumulates its own gradients. If it is, the sums and weights are
reduced over the replicas (the only communication of the cycle), divided to give the mean, and transformed once. Then
the inner optimizer's own `apply_gradients` makes the step.

Control dependencies fix the order of all ops, so the same code runs eagerly, in a `tf.function` and in a static graph,
and no counter advances before the gradients that it counts have been computed.

`Cycle` decides, and `CycleOps` builds what it decides. `TrainOpLock` lets the train ops of a graph run one after the
other. Methods named `_on_*` run on each replica, and of these only the
step itself communicates. All other methods run once, in cross-replica context: on a replica, TensorFlow rejects a
`tf.cond` around anything that communicates (keras#20582).
"""

from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from accum import _check, _tf
from accum._engine import _gradients, _replicas
from accum._engine._accumulators import Accumulator
from accum._engine._cycle_state import (
    CycleState,
    SeenGradients,
    StepCounter,
    VariableList,
    WeightedSums,
    is_first_micro_step,
)
from accum._engine._interfaces import CycleListener, OptimizerAdapter
from accum._engine._plan import Plan
from accum._engine._replicas import true_after
from accum._tf import Gradient, GradsAndVars, PerReplica, Scalar, Wait, tf

# --------------------------------------------------------------------------------------------------------------------
# The order of train ops


class TrainOpLock:
    """A lock that each train op of a graph holds while it accumulates or makes a step."""

    def __init__(self) -> None:
        self._mutex = tf.CriticalSection(name="accum_cycle")

    def around(
        self, function: Callable[..., tf.Operation], variables: Iterable[tf.Variable]
    ) -> Callable[..., tf.Operation]:
        """Return a function that runs `function(strategy, *args)` under the lock.

        Args:
          function: function to run in cross-replica context. Its arguments are computed before the lock is taken.
          variables: the variables that it uses.
        """

        def locked(strategy: tf.distribute.Strategy, *args: PerReplica) -> tf.Operation:
            computed = tf.group(*_replicas.local_tensors(strategy, args))
            with tf.control_dependencies([computed]), _tf.graphs.control_flow_for(variables), _tf.graphs.unrecorded(
                _tf.graphs.LOCKS
            ):
                return self._mutex.execute(lambda: _replicas.true_after(function(strategy, *args)), False, "cycle").op

        return locked


# --------------------------------------------------------------------------------------------------------------------
# The ops of one micro step


class Entry(NamedTuple):
    """A variable that the engine accumulates gradients for.

    Attributes:
      number: its number in the order in which variables were first passed.
      variable: the trainable variable.
      accumulator: its `Accumulator`.
    """

    number: int
    variable: tf.Variable
    accumulator: Accumulator


class CycleOps:
    """Builds the ops of one call of an interface in cross-replica context.

    Args:
      cycle: the `Cycle`.
      entries: list of `Entry`.
      is_weighted: whether there are weights, whose sum may be zero.
      is_reduced: whether the gradients are already the same on every replica.
    """

    def __init__(
        self, cycle: "Cycle", entries: Sequence[Entry], is_weighted: bool = False, is_reduced: bool = False
    ) -> None:
        self._counter = cycle.counter
        self._plan = cycle.plan
        self._adapter = cycle.adapter
        self._numbers = [entry.number for entry in entries]
        self._variables = [entry.variable for entry in entries]
        self._accumulators = [entry.accumulator for entry in entries]
        self._seen = cycle.seen
        self._listeners = tuple(cycle.listeners)
        self._is_weighted = is_weighted
        self._is_reduced = is_reduced
        self._sums = WeightedSums(cycle.state, self._accumulators, self._plan, self._listeners, is_reduced)

    # ------------------------------------------------------------------------------------------------------------
    # Across replicas

    def micro_step(
        self,
        strategy: tf.distribute.Strategy,
        grads: Sequence[Optional[PerReplica]],
        weight: Optional[PerReplica],
        may_step: bool = True,
    ) -> tf.Operation:
        now = self._counter.read(may_be_full=not may_step)
        counts = self._counts(strategy, grads)
        self._seen.note(strategy, grads, self._numbers, now.micro_step, counts)

        def finish() -> tf.Tensor:
            return self._finish(strategy, grads, weight, now.micro_step)

        def store() -> tf.Tensor:
            return tf.logical_not(self._store(strategy, grads, weight, now.micro_step))

        if may_step:
            with _tf.variables.on_host():
                is_last = tf.greater_equal(now.micro_step + 1, now.length)
            has_stepped = _if_counts(counts, lambda: tf.cond(is_last, finish, store, name="if_full"))
        else:
            has_stepped = _if_counts(counts, store)
        with _tf.variables.on_host():
            following = now.micro_step + 1
            if may_step:
                following = tf.where(is_last, tf.zeros_like(now.micro_step), following)
        return self._counter.end_micro_step(strategy, has_stepped, now, following, counts)

    def accumulate(
        self, strategy: tf.distribute.Strategy, grads: Sequence[Optional[PerReplica]], weight: Optional[PerReplica]
    ) -> tf.Operation:
        return self.micro_step(strategy, grads, weight, may_step=False)

    def apply(self, strategy: tf.distribute.Strategy) -> tf.Operation:
        now = self._counter.read()
        with _tf.variables.on_host():
            is_any, following = tf.greater(now.micro_step, 0), tf.zeros_like(now.micro_step)

        def finish() -> tf.Tensor:
            has_stepped = self._finish(strategy, None, None, now.micro_step)
            with tf.control_dependencies([has_stepped]):
                return tf.logical_and(self._clear(strategy), has_stepped)

        # Nothing runs at the end of an epoch that ends with a full cycle.
        has_stepped = self._adapter.when(is_any, finish)
        with tf.control_dependencies(self._counter.keep_has_stepped(strategy, has_stepped)):
            return self._counter.advance(strategy, has_stepped, now, following)

    def zero(self, strategy: tf.distribute.Strategy) -> tf.Operation:
        now = self._counter.read()
        return self._counter.advance(strategy, self._clear(strategy), now, tf.zeros_like(now.micro_step))

    def _clear(self, strategy: tf.distribute.Strategy) -> tf.Tensor:
        with tf.name_scope("clear"):
            return self._each(strategy, self._sums.clear)

    def _counts(self, strategy: tf.distribute.Strategy, grads: Sequence[Optional[PerReplica]]) -> Optional[tf.Tensor]:
        """Return whether the micro-batch counts, a bool tensor common to all replicas; None if every one counts."""
        if self._plan.nonfinite != "skip_micro":
            return None
        with tf.name_scope("is_finite"):
            bad = _replicas.per_replica(strategy, _replicas.on_each(strategy, _gradients.count_nonfinite, [grads]))
        return tf.equal(strategy.reduce(_replicas.SUM, bad, axis=None), 0)

    def _store(
        self,
        strategy: tf.distribute.Strategy,
        grads: Sequence[Optional[PerReplica]],
        weight: Optional[PerReplica],
        micro_step_index: tf.Tensor,
    ) -> tf.Tensor:
        """Store a micro-batch that is not the last of its cycle. Returns a tensor to wait for."""
        is_first = is_first_micro_step(micro_step_index)
        if self._plan.is_running_mean:
            return self._each(strategy, lambda g, w: self._sums.keep_running(g, w, is_first), grads, weight)
        return tf.cond(
            is_first,
            lambda: self._each(strategy, lambda g, w: self._sums.keep("start", g, w), grads, weight),
            lambda: self._each(strategy, lambda g, w: self._sums.keep("add", g, w), grads, weight),
            name="if_first",
        )

    def _finish(
        self,
        strategy: tf.distribute.Strategy,
        grads: Optional[Sequence[Optional[PerReplica]]],
        weight: Optional[PerReplica],
        micro_step_index: tf.Tensor,
    ) -> tf.Tensor:
        """Make the step of a cycle with the last micro-batch, or if `grads` is None from the stored sums alone.

        Returns:
          Bool tensor, whether the step was made.
        """
        is_first = is_first_micro_step(micro_step_index) if grads is not None and self._counter.has_single else False
        how = micro_step_index, is_first, self._reduces(strategy)
        with tf.name_scope("sum"):
            sums = _replicas.on_each(strategy, lambda g, w: self._sums.total(g, w, *how), [grads, weight])
        waits = _replicas.local_tensors(strategy, sums)
        totals, weight = _replicas.per_replica(strategy, sums)
        if self._reduces(strategy):
            totals, weight = self._reduce(strategy, totals, weight)
        if self._adapter.takes_some_variables():
            totals = self._seen.only(strategy, totals, self._numbers, micro_step_index, grads is not None)
        done = self._step(strategy, totals, weight, is_first, grads is not None)
        if all(accumulator.rows is None for accumulator in self._accumulators):
            return done
        with tf.control_dependencies([done] + waits):
            return tf.logical_and(done, self._each(strategy, self._sums.clear_rows))

    def _reduces(self, strategy: tf.distribute.Strategy) -> bool:
        return strategy.num_replicas_in_sync > 1 and not self._is_reduced

    def _reduce(
        self, strategy: tf.distribute.Strategy, totals: Sequence[PerReplica], weight: Optional[PerReplica]
    ) -> Tuple[PerReplica, PerReplica]:
        """Sum everything over the replicas in one call, the only communication of the cycle."""
        pairs = [] if self._leaves_sums else list(zip(totals, self._variables))
        reduced = _replicas.sum_over_replicas(strategy, pairs + [(weight, self._counter.state.micro_step)])
        return totals if self._leaves_sums else self._together(strategy, reduced[:-1]), reduced[-1]

    @staticmethod
    def _together(strategy: tf.distribute.Strategy, values: Sequence[Optional[PerReplica]]) -> PerReplica:
        """Let sums go on only when all have been computed: workers may sum gradients one after the other."""
        if not _replicas.overlap():
            return values
        return _replicas.per_replica(strategy, _replicas.on_each(strategy, _replicas.after_all, [values]))

    @property
    def _leaves_sums(self) -> bool:
        """Whether the inner optimizer sums over replicas, and nothing needs the summed gradient before that."""
        needs_whole = self._plan.changes_updates or self._plan.nonfinite == "skip_cycle"
        return self._adapter.reduces and not needs_whole

    def _step(
        self,
        strategy: tf.distribute.Strategy,
        totals: Sequence[PerReplica],
        weight: Optional[PerReplica],
        is_first: Union[bool, tf.Tensor],
        has_latest: bool,
    ) -> tf.Tensor:
        """Make the inner optimizer's step, unless the weights sum to zero or "skip_cycle" forbids the gradients.

        Args:
          strategy: the strategy.
          totals, weight: the sums of the cycle.
          is_first: whether the last micro-batch is the first of its cycle.
          has_latest: whether a micro step makes the step, rather than a flush.

        Returns:
          Bool tensor, whether the step was made.
        """

        def step() -> tf.Tensor:
            on_step = lambda t, w: self._on_step(t, w, strategy, is_first, has_latest)
            with self._adapter.stepping():
                stepped = _replicas.each_replica(strategy, on_step, [totals, weight])
                settled = self._each(strategy, lambda: self._on_settle(is_first, has_latest))
                done = true_after(_replicas.local_tensors(strategy, [stepped, settled]))
                return self._adapter.end_step(done, has_latest)

        verdicts = []
        if self._is_weighted:
            verdicts.append(tf.greater(strategy.experimental_local_results(weight)[0], 0.0))
        if self._plan.nonfinite == "skip_cycle":
            bad = _gradients.count_nonfinite([strategy.experimental_local_results(total)[0] for total in totals])
            verdicts.append(tf.equal(bad, 0))
        return self._adapter.when(tf.reduce_all(verdicts), step) if verdicts else step()

    @staticmethod
    def _each(strategy: tf.distribute.Strategy, function: Callable[..., Wait], *args: PerReplica) -> tf.Tensor:
        """Call `function` for every replica. Returns one tensor that waits for all results."""
        return true_after(_replicas.local_tensors(strategy, _replicas.on_each(strategy, function, args)))

    # ------------------------------------------------------------------------------------------------------------
    # On each replica

    def _on_settle(self, is_first: Union[bool, tf.Tensor], has_latest: bool) -> List[Wait]:
        return [listener.on_step(is_first) if has_latest else listener.on_flush() for listener in self._listeners]

    def _on_step(
        self,
        totals: Sequence[Optional[Gradient]],
        weight: tf.Tensor,
        strategy: tf.distribute.Strategy,
        is_first: Union[bool, tf.Tensor],
        has_latest: bool,
    ) -> tf.Tensor:
        """Reduce the totals as planned, change them as planned, and make the inner optimizer's step."""
        replicas = strategy.num_replicas_in_sync
        is_share = self._leaves_sums and self._reduces(strategy)
        if self._reduces(strategy) and not self._leaves_sums:
            # TensorFlow only concatenates the rows of replicas; norms and Keras 3's Adam would square each part.
            totals = _gradients.with_each_row_once(totals)
        with tf.name_scope(self._plan.reduction):
            divisor = self._sums.divisor(weight)
            pairs = [(total, var) for total, var in zip(totals, self._variables) if total is not None]
            means = pairs if divisor is None else [(_gradients.mean(total, divisor), var) for total, var in pairs]
            grads_and_vars: GradsAndVars = [(_gradients.cast(mean, var.dtype.base_dtype), var) for mean, var in means]
            for listener in self._listeners:
                if has_latest:
                    grads_and_vars = listener.gradients_of_step(grads_and_vars, is_first)
                else:
                    grads_and_vars = listener.gradients_of_flush(grads_and_vars)
        changed = self._changed(grads_and_vars)
        with tf.control_dependencies(self._adapter.tell_of_update(grads_and_vars, changed)):
            return true_after(self._adapter.make_step(changed, 1 if is_share else replicas))

    def _changed(self, grads_and_vars: GradsAndVars) -> GradsAndVars:
        """Return the gradients of an update changed as planned: all that `Plan.changes_updates` names.

        Each replica does so by itself, to the same gradients, and has to get the same: what is random is drawn with
        `tf.random.stateless_normal` and its like, by a seed of `self._adapter.steps()`, the number of updates so far.
        """
        transform = self._plan.transform
        if transform is not None:
            grads_and_vars = _check.pairs(self._adapter.transformed(transform, grads_and_vars))
        return grads_and_vars


def _if_counts(counts: Optional[tf.Tensor], function: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Return the bool tensor of `function()` if the micro-batch counts, or False if it is skipped."""
    return function() if counts is None else tf.cond(counts, function, lambda: tf.constant(False), name="if_counts")


# --------------------------------------------------------------------------------------------------------------------
# The cycle


class Cycle:
    """Accumulates gradients for one inner optimizer.

    Args:
      plan: a `Plan`.
      adapter: an `OptimizerAdapter`.
      is_settable: whether `accum_steps` may be changed later, unless it is a schedule.
    """

    def __init__(
        self,
        plan: Plan,
        adapter: OptimizerAdapter,
        is_settable: bool = False,
    ) -> None:
        self.counter = StepCounter(plan, adapter, is_settable and not plan.is_schedule)
        self.adapter = adapter
        self.strategy: Optional[tf.distribute.Strategy] = None
        self.listeners: List[CycleListener] = []
        self.seen = SeenGradients()
        self._variables = VariableList()
        # Variable key -> (variable, Accumulator). It holds the variable because the key is unique only while it exists.
        self._accumulators: Dict[int, Tuple[tf.Variable, Accumulator]] = {}
        self._lock: Optional[TrainOpLock] = None
        self._with_late_rows: Set[int] = set()  # numbers of variables, of which a warning has told
        self._check_strategy()

    @property
    def plan(self) -> Plan:
        return self.counter.plan

    @property
    def state(self) -> CycleState:
        return self.counter.state

    @property
    def is_built(self) -> bool:
        return self.counter.is_built

    @property
    def is_settable(self) -> bool:
        """Whether `accum_steps` may be changed."""
        return self.counter.is_settable

    @property
    def is_passthrough(self) -> bool:
        """Whether every cycle is always one micro step whose gradients are passed on unchanged (law L14)."""
        return (
            self.plan.is_one_micro_step
            and not self.is_settable
            and not self.plan.changes_updates
            and self.plan.nonfinite == "propagate"
        )

    # ------------------------------------------------------------------------------------------------------------
    # Calls of an interface, on each replica

    def micro_step(
        self,
        grads_and_vars: GradsAndVars,
        weight: Optional[Scalar] = None,
        is_reduced: bool = False,
        before: Callable[[], None] = lambda: None,
    ) -> tf.Operation:
        """Accumulate the gradients of one micro-batch and, if it is the last of its cycle, make the step.

        Args:
          grads_and_vars: list of (gradient, variable) that `_check.pairs` has checked; a gradient may be
            `tf.IndexedSlices` or None.
          weight: scalar >= 0 of any dtype, the weight of this replica's part of the micro-batch. None: 1 for all
            replicas together.
          is_reduced: whether the gradients are already the same on every replica.
          before: function that is called when the state exists, before the micro step changes it.

        Returns:
          An op.
        """
        self._require_replica(is_reduced)
        if is_reduced and weight is not None and tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise ValueError(
                "Gradients that are already reduced over replicas can't be weighted: pass each replica's own gradients."
                " [accum: gradients]"
            )
        grads, weight, entries = self._enter(grads_and_vars, weight)
        before()
        call = CycleOps(self, entries, weight is not None, is_reduced)
        return self._across(call.micro_step, grads, weight)

    def accumulate(self, grads_and_vars: GradsAndVars, weight: Optional[Scalar] = None) -> tf.Operation:
        """Accumulate the gradients of one micro-batch as `micro_step` does, but never make the step. Returns an op."""
        self._require_replica()
        grads, weight, entries = self._enter(grads_and_vars, weight)
        return self._across(CycleOps(self, entries, weight is not None).accumulate, grads, weight)

    @staticmethod
    def _require_replica(is_reduced: bool = False) -> None:
        """Raise where nothing says which replica gradients belong to: they would be counted once for each."""
        if _replicas.count() > 1 and not is_reduced and not _replicas.is_on_replica():
            raise RuntimeError(
                "With several replicas, `apply_gradients` must be called on each, in the function that `strategy.run` "
                "runs. If the gradients are summed over replicas already, a Keras optimizer takes "
                "`skip_gradients_aggregation=True`. [accum: gradients]"
            )

    def apply(self) -> tf.Operation:
        """Make the step from the accumulated gradients, if there are any, and clear them. Returns an op."""
        call = CycleOps(self, self._entries_between(), is_weighted=True)
        if self.adapter.waits_for_others:
            return _replicas.across_replicas(call.apply)
        return self._across(call.apply)

    def zero(self) -> tf.Operation:
        """Discard the accumulated gradients. Returns an op."""
        return self._across(CycleOps(self, self._entries_between()).zero)

    def accumulated(self) -> List[tf.Tensor]:
        """Return the sums so far, a list with one dense tensor for each variable; zeros between cycles."""
        if not self.is_built:
            return []
        is_first = tf.equal(self.state.micro_step, 0)
        totals = [entry.accumulator.total for entry in self._entries(self._variables.current)]
        return [tf.where(is_first, tf.zeros_like(total), total) for total in totals]

    def has_stepped(self) -> tf.Tensor:
        """Return whether the last micro step made a step, a bool tensor.

        Raises:
          RuntimeError: in a static graph.
        """
        if self.counter.has_stepped is None:
            raise RuntimeError(
                "`has_stepped` does not exist in a static graph: compare the number of steps instead."
                " [accum: has-stepped]"
            )
        return self.counter.has_stepped.read_value()

    # ------------------------------------------------------------------------------------------------------------
    # Variables

    def build(self, variables: Sequence[tf.Variable], grads: Optional[Sequence[Optional[Gradient]]] = None) -> None:
        """Create the state for `variables`, outside any trace.

        Args:
          variables: list of trainable variables.
          grads: their gradients, which show whether a variable needs a dense accumulator, a sparse one or none. None:
            all are dense.
        """
        grads = [0.0] * len(variables) if grads is None else grads
        is_tracing = not tf.executing_eagerly()
        with tf.init_scope():
            if not self.is_built:
                self._build_scalars()
            self._check_restored(variables)
            self._variables.number(variables)
            for var, grad in zip(variables, grads):
                accumulator = self.accumulator_of(var)
                if accumulator is None:
                    self._add_accumulator(var, grad)
                elif isinstance(grad, tf.IndexedSlices) and accumulator.rows is None and self.plan.sparse != "dense":
                    self._warn_of_rows(var)
            used = [var for var in variables if self.accumulator_of(var) is not None]
            # In eager execution, the inner optimizer creates its variables when it receives gradients.
            self.adapter.prepare(variables, used if is_tracing else ())
        self._variables.use(variables)

    def _warn_of_rows(self, var: tf.Variable) -> None:
        """Warn once of rows after dense gradients: traces and train ops that exist already do not mark rows."""
        if self._variables.number_of(var) not in self._with_late_rows:
            self._with_late_rows.add(self._variables.number_of(var))
            _check.warn(
                "The gradients of a variable were dense before, so its accumulator does not tell rows apart, and now "
                "they are `tf.IndexedSlices`: the inner optimizer gets zeros for the other rows, which one with "
                "momentum may move. Compute these gradients first, or pass `sparse='dense'`, with which all gradients "
                f"are dense. Received: {var.name}. [accum: gradients]",
                _check.InexactWarning,
            )

    def _check_restored(self, variables: Sequence[tf.Variable]) -> None:
        """Raise if a restored cycle has sums for more variables than all that are known, before any gets a number."""
        if _tf.graphs.in_static_graph():
            return
        variable_count = self._variables.count_with(variables)
        if self.state.accumulators.are_awaited_from(variable_count) and self.is_in_cycle():
            raise ValueError(
                "The restored cycle has accumulated gradients for more variables than were passed: pass the same "
                "variables in the same order, with None for a variable without a gradient. "
                f"Received: {[var.name for var in variables]}. [accum: restored-cycle]"
            )

    def _build_here(self, variables: Sequence[tf.Variable], grads: Sequence[Optional[Gradient]]) -> None:
        """Call `build`; in a static graph, once for all replicas, even if each has its own accumulating optimizer."""
        if not (_tf.graphs.in_static_graph() and tf.distribute.has_strategy()):
            self.build(variables, grads)
            return
        first = _replicas.across_replicas(lambda strategy: self._built(variables, grads))
        self.counter, self.strategy = first.counter, first.strategy
        self._accumulators, self._variables = first._accumulators, first._variables

    def _built(self, variables: Sequence[tf.Variable], grads: Optional[Sequence[Optional[Gradient]]]) -> "Cycle":
        self.build(variables, grads)
        return self

    def accumulator_of(self, var: tf.Variable) -> Optional[Accumulator]:
        """Return the `Accumulator` of `var`, or None."""
        return self._accumulators.get(_tf.variables.key_of(var), (None, None))[1]

    def number_of(self, var: tf.Variable) -> int:
        """Return the number of a variable in the order in which they were first passed, as checkpoints name it."""
        return self._variables.number_of(var)

    def _check_strategy(self) -> None:
        strategy = tf.distribute.get_strategy()
        _tf.strategies.separate_collectives(strategy)
        if not self.is_passthrough:
            _check.strategy(
                strategy, _tf.strategies.is_central_storage(strategy), _tf.strategies.is_parameter_server(strategy)
            )

    def _build_scalars(self) -> None:
        self._check_strategy()
        self.strategy = tf.distribute.get_strategy()
        self.counter.build()
        # A section of several replicas would wait for itself, because TensorFlow synchronises their threads (1.15).
        if _tf.graphs.in_static_graph() and self.strategy.num_replicas_in_sync == 1:
            self._lock = TrainOpLock()

    def _add_accumulator(self, var: tf.Variable, grad: Optional[Gradient]) -> None:
        """Create the accumulator of a variable that has a gradient now, or that a restored checkpoint has a sum for."""
        number = self._variables.number_of(var)
        awaited = self.state.accumulators.awaited(number)
        if grad is None and awaited is None:
            return
        is_sparse = self.plan.sparse == "rows" and (isinstance(grad, tf.IndexedSlices) or "rows" in (awaited or ()))
        if is_sparse and awaited is not None and "rows" not in awaited:
            raise ValueError(
                "The checkpoint holds a sum of all rows of a variable, which had dense gradients or an optimizer with "
                "`sparse='dense'`, and now the rows with a gradient are to be told apart: pass `sparse='dense'` again. "
                f"Received: {var.name}. [accum: restored-cycle]"
            )
        if not var.shape.is_fully_defined():
            raise ValueError(
                f"An accumulator needs a variable of known shape. Received: {var.name} with shape {var.shape}."
                " [accum: unknown-shape]"
            )
        dtype = self.plan.accumulator_dtype or _tf.variables.at_least_float32(var.dtype.base_dtype)
        total = self.adapter.buffer(var, "accum", var.shape, dtype)
        if self.plan.is_running_mean:
            _tf.variables.save_mean_over_replicas(total, self.state.weight_sum)
        rows = self.adapter.buffer(var, "accum_rows", var.shape[:1], tf.bool) if is_sparse else None
        accumulator = Accumulator(total, rows)
        self.state.accumulators.add(number, accumulator)
        self._accumulators[_tf.variables.key_of(var)] = var, accumulator

    def accumulators(self) -> List[Accumulator]:
        """Return the accumulators of all variables that have one."""
        return [accumulator for _, accumulator in self._accumulators.values()]

    def _entries(self, variables: Sequence[tf.Variable]) -> List[Entry]:
        entries = [(self.number_of(var), var, self.accumulator_of(var)) for var in variables]
        return [Entry(number, var, accumulator) for number, var, accumulator in entries if accumulator is not None]

    def _entries_between(self) -> List[Entry]:
        """Return the variables of the last call with their accumulators, and those that were restored since then."""
        with tf.init_scope():
            for var in self._variables.current:
                if self.accumulator_of(var) is None:
                    self._add_accumulator(var, None)
        return self._entries(self._variables.current)

    def _enter(
        self, listed: GradsAndVars, weight: Optional[Scalar]
    ) -> Tuple[List[Optional[Gradient]], Optional[tf.Tensor], List[Entry]]:
        """Check a call and create its state. Returns (gradients, weight, list of `Entry`)."""
        weight = None if weight is None else _check.not_negative("weight", weight, _tf.variables.known_value(weight))
        grads, variables = [grad for grad, _ in listed], [var for _, var in listed]
        _check.once_each([var.name for var in variables], [_tf.variables.key_of(var) for var in variables])
        self._variables.check(listed, lambda var: self.accumulator_of(var) is not None, self.is_in_cycle)
        self.adapter.check([var for grad, var in listed if grad is not None])
        self._build_here(variables, grads)
        if not tf.executing_eagerly():
            self._variables.note_without_gradient([var for var in variables if self.accumulator_of(var) is None])
        grads = [grad for grad, var in listed if self.accumulator_of(var) is not None]
        weight = None if weight is None else tf.cast(weight, tf.float32)
        return grads, weight, self._entries(variables)

    def announce(self, variables: Sequence[tf.Variable]) -> None:
        """Let the next call have another list of variables, unless this list is already known."""
        may_ask = self.is_built and not _tf.graphs.in_static_graph()
        self._variables.announce(variables, lambda: may_ask and self.is_in_cycle())

    def micro_step_so_far(self) -> tf.Tensor:
        """Return the number of micro steps in the current cycle so far, which may have been restored."""
        if self.is_built:
            return self.state.micro_step.read_value()
        restored = _tf.tracking.awaited_value(self.state, "micro_step")
        return tf.constant(0, tf.int64) if restored is None else restored

    def forget_restored(self) -> None:
        """Drop a cycle that was restored, before its next micro-batch, but not the length of the next one."""
        for owner in (self.state, self.state.accumulators):
            _tf.tracking.forget_awaited(owner, kept=["requested"])

    def is_in_cycle(self) -> bool:
        """Whether a cycle has begun. Not for static graphs."""
        with tf.init_scope():
            return int(self.micro_step_so_far().numpy()) > 0

    def _across(self, function: Callable[..., tf.Operation], *args: PerReplica) -> tf.Operation:
        if self._lock is not None:
            used = [*self._variables.current, *self.adapter.others()]
            strategy = tf.distribute.get_strategy()
            used = [one for var in used for one in strategy.experimental_local_results(var)]
            function = self._lock.around(function, used)
        else:
            function = _after_arguments(function)
        return _replicas.across_replicas(function, args)


def _after_arguments(function: Callable[..., tf.Operation]) -> Callable[..., tf.Operation]:
    """Return a function that does as `function(strategy, *args)`, but changes nothing before all of `args` are there.

    In a graph, each sum could move as soon as its own gradient is computed. If another one then fails, as for lack of
    memory, trying the micro-batch again would add it twice. The price is that all gradients are in memory at once.
    """

    def waiting(strategy: tf.distribute.Strategy, *args: PerReplica) -> tf.Operation:
        values = [one for value in tf.nest.flatten(args) for one in strategy.experimental_local_results(value)]
        with tf.control_dependencies(_tf.graphs.waits_for_all(values)):
            return function(strategy, *args)

    return waiting
