"""The counters of a cycle: its micro steps, its length, and a flag for a step made by the last micro step."""

from typing import Any, NamedTuple, Optional

from accum import _tf
from accum._engine._accumulators import Accumulators
from accum._engine._adapter import OptimizerAdapter
from accum._engine._plan import Plan
from accum._tf import tf
from accum._tf.tracking import CheckpointOnly


class State(CheckpointOnly):
    """The part of a cycle that is saved in checkpoints.

    Attributes:
      micro_step: int64 [], the micro steps made so far in the current cycle.
      length: int64 [], the length of the current cycle; None if it is a constant of the graph.
      weight_sum: float32 [] per replica, the sum of the micro-batches' weights.
      accumulators: the `Accumulators`, one for each variable that had a gradient.
      seen: the `SeenGradients` of the cycle; it exists only while checkpoints have to keep them.
      draws: the `CycleDraws` of the cycle; it exists only if the model draws random numbers.
      requested: int64 [], the length of the next cycle; it exists only after `keep_request`.
    """

    seen: Any
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
      state: the `State`.
      has_stepped: bool variable, whether the last micro step made a step; None in a static graph, and before `build`.
    """

    def __init__(self, plan: Plan, adapter: OptimizerAdapter, is_settable: bool) -> None:
        self.plan = plan
        self.state = State()
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

    def read(self) -> Count:
        with tf.name_scope("step_counter"), _tf.variables.on_host():
            micro_step = self.state.micro_step.read_value()
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
        return tf.add_n(terms)

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
            counted = self._adapter.count_micro_step(counts)
            kept = None if self.has_stepped is None else _assign(strategy, self.has_stepped, has_stepped)
        with tf.control_dependencies([op for op in (counted, kept) if op is not None]):
            return self.advance(strategy, has_stepped, now, following)

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
