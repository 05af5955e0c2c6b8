"""The engine of every interface: accumulate -> is the cycle full? -> reduce -> mean -> transform -> apply.

A cycle is the `accum_steps` micro steps that make one step. Each micro step asks one question across all replicas: is
it the last of its cycle? If not, each replica only accumulates its own gradients. If it is, the sums and weights are
reduced over the replicas (the only communication of the cycle), divided to give the mean, and transformed once. Then
the inner optimizer's own `apply_gradients` makes the step.

Control dependencies fix the order of all ops, so the same code runs eagerly, in a `tf.function` and in a static graph,
and no counter advances before the gradients that it counts have been computed.
"""

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from accum import _check, _tf
from accum._engine import _replicas
from accum._engine._accumulators import Accumulator
from accum._engine._adapter import OptimizerAdapter
from accum._engine._listener import CycleListener
from accum._engine._lock import TrainOpLock
from accum._engine._ops import CycleOps, Entry
from accum._engine._plan import Plan, make_plan
from accum._engine._seen_gradients import SeenGradients
from accum._engine._step_counter import State, StepCounter
from accum._engine._variable_list import VariableList
from accum._tf import Gradient, GradsAndVars, PerReplica, Scalar, Transform, tf
from accum._tf.types import AccumSteps, Dtype


class Cycle:
    """Accumulates gradients for one inner optimizer.

    Args:
      plan: a `Plan`.
      adapter: an `OptimizerAdapter`.
      transform: function from a list of (gradient, variable) to such a list, or None.
      accumulator_dtype: dtype of the accumulators. None: the dtype of the variable, but float32 for a 16-bit variable.
      is_settable: whether `accum_steps` may be changed later, unless it is a schedule.
    """

    def __init__(
        self,
        plan: Plan,
        adapter: OptimizerAdapter,
        transform: Optional[Transform] = None,
        accumulator_dtype: Optional[Dtype] = None,
        is_settable: bool = False,
    ) -> None:
        self.counter = StepCounter(plan, adapter, is_settable and not plan.is_schedule)
        self.adapter = adapter
        self.transform: Any = transform
        self.strategy: Optional[tf.distribute.Strategy] = None
        self.dtype = None if accumulator_dtype is None else tf.as_dtype(accumulator_dtype)
        self.listeners: List[CycleListener] = []
        self.seen = SeenGradients(self.state)
        self._variables = VariableList()
        # Variable key -> (variable, Accumulator). It holds the variable because the key is unique only while it exists.
        self._accumulators: Dict[int, Tuple[tf.Variable, Accumulator]] = {}
        self._lock: Optional[TrainOpLock] = None
        self._check_strategy()

    @property
    def plan(self) -> Plan:
        return self.counter.plan

    @property
    def state(self) -> State:
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
            self.plan.is_passthrough
            and not self.is_settable
            and self.transform is None
            and self.plan.nonfinite == "propagate"
        )

    def planned_anew(self, plan: Plan) -> "Cycle":
        """Return a cycle with another plan whose `accum_steps` can be changed; only before anything is built."""
        return Cycle(plan, self.adapter, self.transform, self.dtype, is_settable=True)

    def set_accum_steps(self, plan: Plan) -> None:
        """Use `plan` from the next cycle on."""
        self.counter.request(plan)

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
        if is_reduced and weight is not None and tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise ValueError(
                "Gradients that are already reduced over replicas can't be weighted: pass each replica's own gradients."
            )
        grads, weight, entries = self._enter(grads_and_vars, weight)
        before()
        call = self._ops(entries, weight is not None, is_reduced)
        return self._across(call.micro_step, grads, weight)

    def accumulate(self, grads_and_vars: GradsAndVars, weight: Optional[Scalar] = None) -> tf.Operation:
        """Accumulate the gradients of one micro-batch as `micro_step` does, but never make the step. Returns an op."""
        grads, weight, entries = self._enter(grads_and_vars, weight)
        return self._across(self._ops(entries, weight is not None).accumulate, grads, weight)

    def apply(self) -> tf.Operation:
        """Make the step from the accumulated gradients, if there are any, and clear them. Returns an op."""
        call = self._ops(self._entries_between(), is_weighted=True)
        if self.adapter.waits_for_others:
            return _replicas.across_replicas(call.apply)
        return self._across(call.apply)

    def zero(self) -> tf.Operation:
        """Discard the accumulated gradients. Returns an op."""
        return self._across(self._ops(self._entries_between()).zero)

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
            raise RuntimeError("`has_stepped` does not exist in a static graph: compare the number of steps instead.")
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
        is_tracing = _tf.graphs.is_tracing()
        with tf.init_scope():
            if not self.is_built:
                self._build_scalars()
            self._check_restored(variables)
            self.seen.claim()
            self._variables.number(variables)
            for var, grad in zip(variables, grads):
                if self.accumulator_of(var) is None:
                    self._add_accumulator(var, grad)
            used = [var for var in variables if self.accumulator_of(var) is not None]
            # In eager execution, the inner optimizer creates its variables when it receives gradients.
            self.adapter.prepare(variables, used if is_tracing else ())
        self._variables.current = tuple(variables)

    def _check_restored(self, variables: Sequence[tf.Variable]) -> None:
        """Raise if a restored cycle has sums for more variables than all that are known, before any gets a number."""
        if _tf.graphs.in_static_graph():
            return
        variable_count = self._variables.count_with(variables)
        if self.state.accumulators.are_awaited_from(variable_count) and self.is_in_cycle():
            raise ValueError(
                "The restored cycle has accumulated gradients for more variables than were passed: pass the same "
                "variables in the same order, with None as the gradient of those that have none. "
                f"Received: {[var.name for var in variables]}."
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
        if _tf.graphs.in_static_graph() and not tf.distribute.has_strategy():
            self._lock = TrainOpLock()

    def _add_accumulator(self, var: tf.Variable, grad: Optional[Gradient]) -> None:
        """Create the accumulator of a variable that has a gradient now, or that a restored checkpoint has a sum for."""
        number = self._variables.number_of(var)
        awaited = self.state.accumulators.awaited(number) if grad is None else None
        if grad is None and awaited is None:
            return
        is_sparse = self.plan.sparse == "rows" and (isinstance(grad, tf.IndexedSlices) or "rows" in (awaited or ()))
        if not var.shape.is_fully_defined():
            raise ValueError(
                f"An accumulator needs a variable of known shape. Received: {var.name} with shape {var.shape}."
            )
        dtype = self.dtype or _tf.variables.at_least_float32(var.dtype.base_dtype)
        total = self.adapter.buffer(var, "accum", var.shape, dtype)
        rows = self.adapter.buffer(var, "accum_rows", var.shape[:1], tf.bool) if is_sparse else None
        accumulator = Accumulator(total, rows)
        self.state.accumulators.add(number, accumulator)
        self._accumulators[_tf.variables.key_of(var)] = var, accumulator

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
        accumulated = [entry.variable for entry in self._entries(self._variables.current)]
        self._variables.check(listed, accumulated, self.is_in_cycle)
        self.adapter.check([var for grad, var in listed if grad is not None])
        self._build_here(variables, grads)
        if _tf.graphs.is_tracing():
            self._variables.note_without_gradient([var for var in variables if self.accumulator_of(var) is None])
        grads = [grad for grad, var in listed if self.accumulator_of(var) is not None]
        weight = None if weight is None else tf.cast(weight, tf.float32)
        return grads, weight, self._entries(variables)

    def announce(self, variables: Sequence[tf.Variable]) -> None:
        """Let the next call have another list of variables, unless this list is already known."""
        may_ask = self.is_built and not _tf.graphs.in_static_graph()
        self._variables.announce(variables, lambda: may_ask and self.is_in_cycle())

    def is_in_cycle(self) -> bool:
        """Whether a cycle has begun. Not for static graphs."""
        with tf.init_scope():
            return int(self.state.micro_step.numpy()) > 0

    def _ops(self, entries: Sequence[Entry], is_weighted: bool = False, is_reduced: bool = False) -> CycleOps:
        return CycleOps(
            self.counter, self.adapter, entries, self.seen, self.listeners, self.transform, is_weighted, is_reduced
        )

    def _across(self, function: Callable[..., tf.Operation], *args: PerReplica) -> tf.Operation:
        if self._lock is not None:
            function = self._lock.around(function, [*self._variables.current, *self.adapter.others()])
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


def check_options(
    accum_steps: AccumSteps,
    reduction: str,
    transform: Optional[Transform],
    nonfinite: str,
    accumulator_dtype: Optional[Dtype],
    sparse: str,
) -> Plan:
    """Check the options of an accumulating optimizer of any interface. Returns the `Plan`."""
    _check.callable_or_none("transform", transform)
    if accumulator_dtype is not None:
        _check.floating_dtype("accumulator_dtype", tf.as_dtype(accumulator_dtype))
    return make_plan(accum_steps, reduction, nonfinite, sparse)
