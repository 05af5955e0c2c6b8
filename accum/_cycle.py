"""The engine of both faces: accumulate -> is the cycle full? -> reduce -> mean -> transform -> apply.

A cycle is the `accum_steps` micro steps that make one step. On each, one question is asked across all replicas: is
this the cycle's last micro step? If not, every replica keeps its gradient to itself. If it is, sums and weights are
reduced over the replicas (the cycle's one communication), the mean is taken, transforms run once on the whole
gradient, and the inner optimizer's own `apply_gradients` makes the step.

Every order is fixed by control dependencies, so the same code runs eagerly, in a `tf.function` and in a static graph,
and no counter moves before the gradients that it counts exist.
"""

from accum import _check, _replicas, _tf
from accum._flow import Call
from accum._plan import make_plan
from accum._slots import Accumulator
from accum._tf import tf


class State(_tf.CheckpointOnly):
    """What a checkpoint keeps of an unfinished cycle.

    Attributes:
      micro_step: int64 [], micro steps in the current cycle.
      length: int64 [], micro steps that the current cycle takes; None where the graph fixes it.
      weight_sum: float32 [] per replica, the sum of the micro-batches' weights.
      accumulators: one `Accumulator` a variable, in the order in which the variables were met.
    """

    def __init__(self):
        super().__init__()
        self.micro_step = None
        self.length = None
        self.weight_sum = None
        self.accumulators = []


class Cycle:
    """Accumulates gradients for one inner optimizer.

    Args:
      plan: a `Plan`.
      host: a `Host`.
      transform: function of a list of (gradient, variable) to such a list, or None.
      accumulator_dtype: dtype of the accumulators; None: the variable's, but float32 for 16-bit ones.
      is_settable: whether `accum_steps` of a plan that is no schedule may be set later on.
    """

    def __init__(self, plan, host, transform=None, accumulator_dtype=None, is_settable=False):
        self.plan = plan
        self.state = State()
        self.host = host
        self.transform = transform
        self.strategy = None
        self.dtype = None if accumulator_dtype is None else tf.as_dtype(accumulator_dtype)
        self.is_settable = is_settable and not plan.is_schedule
        self.companions = []  # what lives by the cycle beside the gradients, in the order in which it was met
        self._requested = None  # the accum_steps of the next cycle: a variable that no checkpoint holds
        self._variables = ()  # the last call's, in order
        self._announced = None  # keys of the list that `build` was given last
        self._takes_other = False  # whether the next call may bring another list, because `build` announced one
        self._slots = {}  # variable key -> (variable, Accumulator): an id is one only while the variable lives
        self._traced_without = {}  # variable key -> name, of those without a gradient in some trace
        self._mutex = None
        self._check_strategy()

    @property
    def is_built(self):
        return self.state.micro_step is not None

    @property
    def is_bare(self):
        """Whether every cycle is one micro step for ever, and nothing happens to its gradients (law L14)."""
        return (
            self.plan.is_bare and not self.is_settable and self.transform is None and self.plan.nonfinite == "propagate"
        )

    @property
    def has_single(self):
        """Whether a cycle may be one micro step long."""
        return self.is_settable or self.plan.has_single

    def length(self, place):
        """The micro steps of the cycle that has made `place` of them, an int64 scalar. Fixed when it begins."""
        if self.is_settable:
            return tf.where(tf.equal(place, 0), self._requested.read_value(), self.state.length.read_value())
        if not self.plan.is_schedule:
            return tf.constant(self.plan.accum_steps, tf.int64)
        step = tf.cast(self.host.steps(), tf.int64)
        terms = [tf.where(step >= first, tf.constant(change, tf.int64), 0) for first, change in self.plan.increments]
        return tf.add_n(terms)

    def make_step(self, grads_and_vars, replicas):
        """Transform whole gradients and let the inner optimizer make its step, on one replica. Returns an op."""
        if self.transform is not None:
            transformed = self.transform(self.host.outwards(grads_and_vars))
            grads_and_vars = _check.pairs(self.host.inwards(transformed))
        return self.host.apply(grads_and_vars, replicas)

    def planned_anew(self, plan):
        """A cycle that differs in its plan and can be set, before anything is built."""
        return Cycle(plan, self.host, self.transform, self.dtype, is_settable=True)

    def set_accum_steps(self, plan):
        """Make `plan` hold from the next cycle on."""
        self.plan = plan
        if self.is_built:
            _tf.set_variable(self._requested, plan.accum_steps)

    # ------------------------------------------------------------------------------------------------------------
    # What a face calls, on each replica

    def micro_step(self, grads_and_vars, weight=None, is_reduced=False):
        """Take in one micro-batch's gradients and, when the cycle is full, make the step. Returns an op.

        Args:
          grads_and_vars: list of (gradient, variable); a gradient may be `tf.IndexedSlices` or None.
          weight: scalar >= 0 of any dtype, the micro-batch's weight on this replica; None: 1 on all together.
          is_reduced: whether the gradients are already the same on every replica.
        """
        if is_reduced and weight is not None and tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise ValueError(
                "Gradients that are reduced over replicas already can't be weighed: give each replica's own."
            )
        grads, weight, entries = self._enter(grads_and_vars, weight)
        call = Call(self, entries, weight is not None, is_reduced)
        return self._across(call.micro_step, grads, weight)

    def accumulate(self, grads_and_vars, weight=None):
        """Take in one micro-batch's gradients; never makes the step. Returns an op."""
        grads, weight, entries = self._enter(grads_and_vars, weight)
        return self._across(Call(self, entries, weight is not None).accumulate, grads, weight)

    def apply(self):
        """Make the step with what has been accumulated, if anything has been, and clear it. Returns an op."""
        call = Call(self, self._entries(self._variables), is_weighted=True)
        if self.host.waits_for_others:
            return _replicas.across_replicas(call.apply)
        return self._across(call.apply)

    def zero(self):
        """Discard what has been accumulated. Returns an op."""
        return self._across(Call(self, self._entries(self._variables)).zero)

    def accumulated(self):
        """The sums accumulated so far, one dense tensor a variable, zeros between cycles."""
        if not self.is_built:
            return []
        is_first = tf.equal(self.state.micro_step, 0)
        totals = [accumulator.total for _, accumulator in self._entries(self._variables)]
        return [tf.where(is_first, tf.zeros_like(total), total) for total in totals]

    # ------------------------------------------------------------------------------------------------------------
    # Variables

    def build(self, variables, grads=None):
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
                if grad is not None and self.slot(var) is None:
                    self._add_slot(var, isinstance(grad, tf.IndexedSlices) and self.plan.sparse == "rows")
            used = [var for var in variables if self.slot(var) is not None]
            # Run eagerly, the inner optimizer sees for itself which variables get a gradient.
            self.host.prepare(variables, used if is_tracing else ())
        self._variables = tuple(variables)

    def _build_here(self, variables, grads):
        """`build`; in a static graph once for all replicas, each of which may have a face of its own there."""
        if not (_tf.in_static_graph() and tf.distribute.has_strategy()):
            self.build(variables, grads)
            return
        first = _replicas.across_replicas(lambda strategy: self._built(variables, grads))
        self.state, self.strategy = first.state, first.strategy
        self._slots, self._variables, self._requested = first._slots, first._variables, first._requested

    def _built(self, variables, grads):
        self.build(variables, grads)
        return self

    def slot(self, var):
        """The `Accumulator` of `var`, or None where it has none."""
        return self._slots.get(_tf.variable_key(var), (None, None))[1]

    def _check_strategy(self):
        strategy = tf.distribute.get_strategy()
        if not self.is_bare:
            _check.strategy(strategy, _tf.is_central_storage(strategy), _tf.is_parameter_server(strategy))

    def _build_scalars(self):
        self._check_strategy()
        self.strategy = tf.distribute.get_strategy()
        self.state.weight_sum = self.host.scalar("weight_sum", tf.constant(0.0), per_replica=True)
        if self.is_settable:
            accum_steps = tf.constant(self.plan.accum_steps, tf.int64)
            self._requested = self.host.scalar("accum_steps", accum_steps)
            self.state.length = self.host.scalar("length", accum_steps)
        self.state.micro_step = self.host.scalar("micro_step", tf.constant(0, tf.int64))
        if _tf.in_static_graph() and not tf.distribute.has_strategy():
            self._mutex = tf.CriticalSection(name="accum_cycle")  # nothing else orders two train ops of one graph

    def _add_slot(self, var, is_sparse):
        if not var.shape.is_fully_defined():
            raise ValueError(
                "An accumulator needs a variable of known shape. Received: {} of shape {}.".format(var.name, var.shape)
            )
        dtype = self.dtype or _tf.at_least_float32(var.dtype.base_dtype)
        total = self.host.buffer(var, "accum", var.shape, dtype)
        rows = self.host.buffer(var, "accum_rows", var.shape[:1], tf.bool) if is_sparse else None
        accumulator = Accumulator(total, rows)
        self.state.accumulators.append(accumulator)
        self._slots[_tf.variable_key(var)] = var, accumulator

    def _entries(self, variables):
        return [(var, self.slot(var)) for var in variables if self.slot(var) is not None]

    def _enter(self, grads_and_vars, weight):
        """Check a call and create what it needs. Returns gradients and weight as tensors, and what they belong to."""
        listed = _check.pairs(grads_and_vars)
        weight = None if weight is None else _check.not_negative("weight", weight, _tf.known_value(weight))
        grads, variables = [grad for grad, _ in listed], [var for _, var in listed]
        _check.once_each([var.name for var in variables], [_tf.variable_key(var) for var in variables])
        self._check_same(listed)
        self._check_met(listed)
        self.host.check([var for grad, var in listed if grad is not None])
        self._build_here(variables, grads)
        if _tf.is_tracing():
            self._traced_without.update((_tf.variable_key(v), v.name) for v in variables if self.slot(v) is None)
        grads = [grad for grad, var in listed if self.slot(var) is not None]
        weight = None if weight is None else tf.cast(weight, tf.float32)
        return grads, weight, self._entries(variables)

    def _check_same(self, listed):
        """A cycle adds up the gradients of one list of variables; a trace may be run at any time within a cycle.

        Variables that never had a gradient may come and go.
        """
        old, new = self._variables, [var for _, var in listed]
        old_keys, new_keys = ({_tf.variable_key(var) for var in variables} for variables in (old, new))
        gone = [var for var, _ in self._entries(old) if _tf.variable_key(var) not in new_keys]
        come = [var for grad, var in listed if grad is not None and _tf.variable_key(var) not in old_keys]
        if not old or not (gone or come):
            return
        names = [var.name for var in new], [var.name for var in old]
        if self._takes_other:
            self._takes_other = False
        elif _tf.is_tracing():
            raise ValueError(
                "One optimizer accumulates for one list of variables: use an optimizer for each list, or call "
                "`build(var_list)` when it changes. Received: {}, after {}.".format(*names)
            )
        elif self.is_in_cycle():
            raise ValueError(
                "The list of variables must not change within a cycle: call `flush()` or `reset()` first. "
                "Received: {}, after {}.".format(*names)
            )

    def announce(self, variables):
        """Let the next call bring another list of variables than the last, if this is the first to hear of it.

        `LossScaleOptimizer` announces all variables before each call, and leaves out those without a gradient there.
        """
        keys = {_tf.variable_key(var) for var in variables}
        current = {_tf.variable_key(var) for var in self._variables}
        if keys in (self._announced, current):
            return
        if self.is_built and not _tf.in_static_graph() and self.is_in_cycle():
            raise ValueError(
                "The list of variables must not change within a cycle: call `flush()` or `reset()` first. "
                "Received: {}.".format([var.name for var in variables])
            )
        self._announced, self._takes_other = keys, True

    def _check_met(self, listed):
        keys = [_tf.variable_key(var) for grad, var in listed if grad is not None]
        late = [self._traced_without[key] for key in keys if key in self._traced_without]
        if late:
            raise ValueError(
                "A function was traced in which {} had no gradient, and would lose the one that they get now. "
                "Trace the function that gives them one first, or use an optimizer for each.".format(late)
            )

    def is_in_cycle(self):
        """Whether a cycle has begun, outside static graphs."""
        with tf.init_scope():
            return int(self.state.micro_step.numpy()) > 0

    def _across(self, function, *args):
        return _replicas.across_replicas(function if self._mutex is None else self._locked(function), args)

    def _locked(self, function):
        """`function`, holding the lock of this graph's train ops. Its arguments are computed before it is taken."""

        def locked(strategy, *args):
            waits = tf.control_dependencies(_replicas.local_tensors(strategy, args))
            with waits, _tf.control_flow_for(self._variables), _tf.no_record_of_locks():
                return self._mutex.execute(lambda: _replicas.true_after(function(strategy, *args)), False, "cycle").op

        return locked


def check_options(accum_steps, reduction, transform, nonfinite, accumulator_dtype, sparse):
    """Check the options of an accumulating optimizer, whatever makes it. Returns the `Plan`."""
    _check.callable_or_none("transform", transform)
    if accumulator_dtype is not None:
        _check.floating_dtype("accumulator_dtype", tf.as_dtype(accumulator_dtype))
    return make_plan(accum_steps, reduction, nonfinite, sparse)
