"""The engine of both faces: accumulate -> is the cycle full? -> reduce -> mean -> transform -> apply.

A cycle is the `accum_steps` micro steps that make one step. On each, one question is asked across all replicas: is
this the cycle's last micro step? If not, every replica keeps its gradient to itself. If it is, sums and weights are
reduced over the replicas (the cycle's one communication), the mean is taken, transforms run once on the whole
gradient, and the inner optimizer's own `apply_gradients` makes the step.

Every order is fixed by control dependencies, so the same code runs eagerly, in a `tf.function` and in a static graph,
and no counter moves before the gradients that it counts exist.
"""

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from accum import _check, _tf
from accum._engine import _replicas
from accum._engine._accumulators import Accumulator
from accum._engine._adapter import OptimizerAdapter
from accum._engine._listener import CycleListener
from accum._engine._ops import CycleOps
from accum._engine._plan import Plan, make_plan
from accum._engine._variable_list import VariableList
from accum._tf import AccumSteps, GradsAndVars, Scalar, Transform, tf


class State(_tf.CheckpointOnly):
    """What a checkpoint keeps of an unfinished cycle.

    Attributes:
      micro_step: int64 [], micro steps in the current cycle.
      length: int64 [], micro steps that the current cycle takes; None where the graph fixes it.
      weight_sum: float32 [] per replica, the sum of the micro-batches' weights.
      accumulators: one `Accumulator` a variable, in the order in which the variables were met.
    """

    def __init__(self) -> None:
        super().__init__()
        self.micro_step: Any = None
        self.length: Any = None
        self.weight_sum: Any = None
        self.accumulators: List[Accumulator] = []


class Cycle:
    """Accumulates gradients for one inner optimizer.

    Args:
      plan: a `Plan`.
      adapter: an `OptimizerAdapter`.
      transform: function of a list of (gradient, variable) to such a list, or None.
      accumulator_dtype: dtype of the accumulators; None: the variable's, but float32 for 16-bit ones.
      is_settable: whether `accum_steps` of a plan that is no schedule may be set later on.
    """

    def __init__(
        self,
        plan: Plan,
        adapter: OptimizerAdapter,
        transform: Optional[Transform] = None,
        accumulator_dtype: Any = None,
        is_settable: bool = False,
    ) -> None:
        self.plan = plan
        self.state = State()
        self.adapter = adapter
        self.transform: Any = transform
        self.strategy: Any = None
        self.dtype = None if accumulator_dtype is None else tf.as_dtype(accumulator_dtype)
        self.is_settable = is_settable and not plan.is_schedule
        # what lives by the cycle beside the gradients, in the order in which it was met
        self.listeners: List[CycleListener] = []
        self.stepped: Any = None  # whether the last micro step made a step: a variable that no checkpoint holds
        self._requested: Any = None  # the accum_steps of the next cycle: a variable that no checkpoint holds
        self._variables = VariableList()
        # variable key -> (variable, Accumulator): an id is one only while the variable lives
        self._accumulators: Dict[int, Tuple[tf.Variable, Accumulator]] = {}
        self._mutex: Any = None
        self._check_strategy()

    @property
    def is_built(self) -> bool:
        return self.state.micro_step is not None

    @property
    def is_bare(self) -> bool:
        """Whether every cycle is one micro step for ever, and nothing happens to its gradients (law L14)."""
        return (
            self.plan.is_bare and not self.is_settable and self.transform is None and self.plan.nonfinite == "propagate"
        )

    @property
    def has_single(self) -> bool:
        """Whether a cycle may be one micro step long."""
        return self.is_settable or self.plan.has_single

    def length(self, micro_step_index: tf.Tensor) -> tf.Tensor:
        """The micro steps of the cycle that has made `micro_step_index` of them, an int64 scalar.

        Fixed when it begins.
        """
        if self.is_settable:
            return tf.where(tf.equal(micro_step_index, 0), self._requested.read_value(), self.state.length.read_value())
        if not self.plan.is_schedule:
            return tf.constant(self.plan.accum_steps, tf.int64)
        step = tf.cast(self.adapter.steps(), tf.int64)  # within the engine's `on_host`
        terms = [tf.where(step >= first, tf.constant(change, tf.int64), 0) for first, change in self.plan.increments]
        return tf.add_n(terms)

    def planned_anew(self, plan: Plan) -> "Cycle":
        """A cycle that differs in its plan and can be set, before anything is built."""
        return Cycle(plan, self.adapter, self.transform, self.dtype, is_settable=True)

    def set_accum_steps(self, plan: Plan) -> None:
        """Make `plan` hold from the next cycle on."""
        self.plan = plan
        if self.is_built:
            _tf.set_variable(self._requested, plan.accum_steps)

    # ------------------------------------------------------------------------------------------------------------
    # What a face calls, on each replica

    def micro_step(
        self, grads_and_vars: GradsAndVars, weight: Optional[Scalar] = None, is_reduced: bool = False
    ) -> tf.Operation:
        """Take in one micro-batch's gradients and, when the cycle is full, make the step. Returns an op.

        Args:
          grads_and_vars: list of (gradient, variable) that `_check.pairs` has seen; a gradient may be
            `tf.IndexedSlices` or None.
          weight: scalar >= 0 of any dtype, the micro-batch's weight on this replica; None: 1 on all together.
          is_reduced: whether the gradients are already the same on every replica.
        """
        if is_reduced and weight is not None and tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise ValueError(
                "Gradients that are reduced over replicas already can't be weighed: give each replica's own."
            )
        grads, weight, entries = self._enter(grads_and_vars, weight)
        call = CycleOps(self, entries, weight is not None, is_reduced)
        return self._across(call.micro_step, grads, weight)

    def accumulate(self, grads_and_vars: GradsAndVars, weight: Optional[Scalar] = None) -> tf.Operation:
        """Take in one micro-batch's gradients, as `micro_step` does, but never make the step. Returns an op."""
        grads, weight, entries = self._enter(grads_and_vars, weight)
        return self._across(CycleOps(self, entries, weight is not None).accumulate, grads, weight)

    def apply(self) -> tf.Operation:
        """Make the step with what has been accumulated, if anything has been, and clear it. Returns an op."""
        call = CycleOps(self, self._entries(self._variables.current), is_weighted=True)
        if self.adapter.waits_for_others:
            return _replicas.across_replicas(call.apply)
        return self._across(call.apply)

    def zero(self) -> tf.Operation:
        """Discard what has been accumulated. Returns an op."""
        return self._across(CycleOps(self, self._entries(self._variables.current)).zero)

    def accumulated(self) -> List[tf.Tensor]:
        """The sums accumulated so far, one dense tensor a variable, zeros between cycles."""
        if not self.is_built:
            return []
        is_first = tf.equal(self.state.micro_step, 0)
        totals = [accumulator.total for _, accumulator in self._entries(self._variables.current)]
        return [tf.where(is_first, tf.zeros_like(total), total) for total in totals]

    def has_stepped(self) -> tf.Tensor:
        """Whether the last micro step made a step, a bool tensor.

        Raises:
          RuntimeError: in a static graph, where `steps` tells.
        """
        if self.stepped is None:
            raise RuntimeError("In a static graph there is no `has_stepped`: compare the number of steps.")
        return self.stepped.read_value()

    # ------------------------------------------------------------------------------------------------------------
    # Variables

    def build(self, variables: Sequence[tf.Variable], grads: Optional[Sequence[Any]] = None) -> None:
        """Create the state for `variables`, outside any trace.

        Args:
          variables: list of trainable variables.
          grads: their gradients, which tell sparse variables and those that have none; None: all are dense.
        """
        grads = [0.0] * len(variables) if grads is None else grads
        is_tracing = _tf.is_tracing()
        with tf.init_scope():
            if not self.is_built:
                self._build_scalars()
            for var, grad in zip(variables, grads):
                if grad is not None and self.accumulator_of(var) is None:
                    self._add_accumulator(var, isinstance(grad, tf.IndexedSlices) and self.plan.sparse == "rows")
            used = [var for var in variables if self.accumulator_of(var) is not None]
            # Run eagerly, the inner optimizer sees for itself which variables get a gradient.
            self.adapter.prepare(variables, used if is_tracing else ())
        self._variables.current = tuple(variables)

    def _build_here(self, variables: Sequence[tf.Variable], grads: Sequence[Any]) -> None:
        """`build`; in a static graph once for all replicas, each of which may have a face of its own there."""
        if not (_tf.in_static_graph() and tf.distribute.has_strategy()):
            self.build(variables, grads)
            return
        first = _replicas.across_replicas(lambda strategy: self._built(variables, grads))
        self.state, self.strategy = first.state, first.strategy
        self._accumulators, self._variables, self._requested = first._accumulators, first._variables, first._requested

    def _built(self, variables: Sequence[tf.Variable], grads: Optional[Sequence[Any]]) -> "Cycle":
        self.build(variables, grads)
        return self

    def accumulator_of(self, var: tf.Variable) -> Optional[Accumulator]:
        """The `Accumulator` of `var`, or None where it has none."""
        return self._accumulators.get(_tf.variable_key(var), (None, None))[1]

    def _check_strategy(self) -> None:
        strategy = tf.distribute.get_strategy()
        if not self.is_bare:
            _check.strategy(strategy, _tf.is_central_storage(strategy), _tf.is_parameter_server(strategy))

    def _build_scalars(self) -> None:
        self._check_strategy()
        self.strategy = tf.distribute.get_strategy()
        self.state.weight_sum = self.adapter.scalar("weight_sum", tf.constant(0.0), per_replica=True)
        if self.is_settable:
            accum_steps = tf.constant(self.plan.accum_steps, tf.int64)
            self._requested = self.adapter.scalar("accum_steps", accum_steps)
            self.state.length = self.adapter.scalar("length", accum_steps)
        self.state.micro_step = self.adapter.scalar("micro_step", tf.constant(0, tf.int64))
        if not _tf.in_static_graph():
            self.stepped = self.adapter.scalar("has_stepped", tf.constant(False))
        elif not tf.distribute.has_strategy():
            self._mutex = tf.CriticalSection(name="accum_cycle")  # nothing else orders two train ops of one graph

    def _add_accumulator(self, var: tf.Variable, is_sparse: bool) -> None:
        if not var.shape.is_fully_defined():
            raise ValueError(
                f"An accumulator needs a variable of known shape. Received: {var.name} of shape {var.shape}."
            )
        dtype = self.dtype or _tf.at_least_float32(var.dtype.base_dtype)
        total = self.adapter.buffer(var, "accum", var.shape, dtype)
        rows = self.adapter.buffer(var, "accum_rows", var.shape[:1], tf.bool) if is_sparse else None
        accumulator = Accumulator(total, rows)
        self.state.accumulators.append(accumulator)
        self._accumulators[_tf.variable_key(var)] = var, accumulator

    def _entries(self, variables: Sequence[tf.Variable]) -> List[Tuple[tf.Variable, Accumulator]]:
        found = [(var, self.accumulator_of(var)) for var in variables]
        return [(var, accumulator) for var, accumulator in found if accumulator is not None]

    def _enter(
        self, listed: GradsAndVars, weight: Optional[Scalar]
    ) -> Tuple[List[Any], Optional[tf.Tensor], List[Tuple[tf.Variable, Accumulator]]]:
        """Check a call and create what it needs. Returns gradients and weight as tensors, and what they belong to."""
        weight = None if weight is None else _check.not_negative("weight", weight, _tf.known_value(weight))
        grads, variables = [grad for grad, _ in listed], [var for _, var in listed]
        _check.once_each([var.name for var in variables], [_tf.variable_key(var) for var in variables])
        accumulated = [var for var, _ in self._entries(self._variables.current)]
        self._variables.check(listed, accumulated, self.is_in_cycle)
        self.adapter.check([var for grad, var in listed if grad is not None])
        self._build_here(variables, grads)
        if _tf.is_tracing():
            self._variables.note_without_gradient([var for var in variables if self.accumulator_of(var) is None])
        grads = [grad for grad, var in listed if self.accumulator_of(var) is not None]
        weight = None if weight is None else tf.cast(weight, tf.float32)
        return grads, weight, self._entries(variables)

    def announce(self, variables: Sequence[tf.Variable]) -> None:
        """Let the next call bring another list of variables than the last, if this is the first to hear of it."""
        may_ask = self.is_built and not _tf.in_static_graph()
        self._variables.announce(variables, lambda: may_ask and self.is_in_cycle())

    def is_in_cycle(self) -> bool:
        """Whether a cycle has begun, outside static graphs."""
        with tf.init_scope():
            return int(self.state.micro_step.numpy()) > 0

    def _across(self, function: Callable[..., Any], *args: Any) -> Any:
        return _replicas.across_replicas(function if self._mutex is None else self._locked(function), args)

    def _locked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, holding the lock of this graph's train ops. Its arguments are computed before it is taken."""

        def locked(strategy: tf.distribute.Strategy, *args: Any) -> tf.Operation:
            waits = tf.control_dependencies(_replicas.local_tensors(strategy, args))
            with waits, _tf.control_flow_for(self._variables.current), _tf.unrecorded(_tf.LOCKS):
                return self._mutex.execute(lambda: _replicas.true_after(function(strategy, *args)), False, "cycle").op

        return locked


def check_options(
    accum_steps: AccumSteps,
    reduction: str,
    transform: Optional[Transform],
    nonfinite: str,
    accumulator_dtype: Any,
    sparse: str,
) -> Plan:
    """Check the options of an accumulating optimizer, whatever makes it. Returns the `Plan`."""
    _check.callable_or_none("transform", transform)
    if accumulator_dtype is not None:
        _check.floating_dtype("accumulator_dtype", tf.as_dtype(accumulator_dtype))
    return make_plan(accum_steps, reduction, nonfinite, sparse)
