"""Build the ops of one call of the engine: store a micro-batch, make the step of a full cycle, clear, count.

Methods named `_on_*` run on each replica, and of these only the step itself communicates. All other methods run once,
in cross-replica context: on a replica, TensorFlow rejects a `tf.cond` around anything that communicates (keras#20582).
"""

from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple, Union

from accum import _tf
from accum._engine import _gradients, _replicas
from accum._engine._accumulators import Accumulator
from accum._engine._adapter import OptimizerAdapter
from accum._engine._listener import CycleListener
from accum._engine._replicas import true_after
from accum._engine._seen_gradients import SeenGradients
from accum._engine._step_counter import StepCounter
from accum._engine._weighted_sums import WeightedSums, is_first_micro_step
from accum._tf import Gradient, GradsAndVars, PerReplica, Transform, Wait, tf


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
      counter: the `StepCounter` of the cycle.
      adapter: the `OptimizerAdapter`.
      entries: list of `Entry`.
      seen: the `SeenGradients` of the cycle.
      listeners: the `CycleListener`s.
      transform: function from a list of (gradient, variable) to such a list, or None.
      is_weighted: whether there are weights, whose sum may be zero.
      is_reduced: whether the gradients are already the same on every replica.
    """

    def __init__(
        self,
        counter: StepCounter,
        adapter: OptimizerAdapter,
        entries: Sequence[Entry],
        seen: SeenGradients,
        listeners: Sequence[CycleListener],
        transform: Optional[Transform],
        is_weighted: bool = False,
        is_reduced: bool = False,
    ) -> None:
        self._counter = counter
        self._plan = counter.plan
        self._adapter = adapter
        self._numbers = [entry.number for entry in entries]
        self._variables = [entry.variable for entry in entries]
        self._accumulators = [entry.accumulator for entry in entries]
        self._seen = seen
        self._listeners = tuple(listeners)
        self._transform = transform
        self._is_weighted = is_weighted
        self._is_reduced = is_reduced
        self._is_running = self._plan.reduction == "running_mean"
        self._sums = WeightedSums(counter.state, self._accumulators, self._plan, self._listeners, is_reduced)

    # ------------------------------------------------------------------------------------------------------------
    # Across replicas

    def micro_step(
        self, strategy: tf.distribute.Strategy, grads: Sequence[Optional[PerReplica]], weight: Optional[PerReplica]
    ) -> tf.Operation:
        now = self._counter.read()
        counts = self._counts(strategy, grads)
        self._seen.note(strategy, grads, self._numbers, now.micro_step, counts)
        with _tf.variables.on_host():
            is_last = tf.greater_equal(now.micro_step + 1, now.length)

        def finish() -> tf.Tensor:
            return self._finish(strategy, grads, weight, now.micro_step)

        def store() -> tf.Tensor:
            return tf.logical_not(self._store(strategy, grads, weight, now.micro_step))

        has_stepped = _if_counts(counts, lambda: tf.cond(is_last, finish, store, name="if_full"))
        with _tf.variables.on_host():
            following = tf.where(is_last, tf.zeros_like(now.micro_step), now.micro_step + 1)
        return self._counter.end_micro_step(strategy, has_stepped, now, following, counts)

    def accumulate(
        self, strategy: tf.distribute.Strategy, grads: Sequence[Optional[PerReplica]], weight: Optional[PerReplica]
    ) -> tf.Operation:
        now = self._counter.read()
        counts = self._counts(strategy, grads)
        self._seen.note(strategy, grads, self._numbers, now.micro_step, counts)

        def store() -> tf.Tensor:
            return tf.logical_not(self._store(strategy, grads, weight, now.micro_step))

        has_stepped = _if_counts(counts, store)
        with _tf.variables.on_host():
            following = now.micro_step + 1
        return self._counter.end_micro_step(strategy, has_stepped, now, following, counts)

    def apply(self, strategy: tf.distribute.Strategy) -> tf.Operation:
        now = self._counter.read()
        with _tf.variables.on_host():
            is_any, following = tf.greater(now.micro_step, 0), tf.zeros_like(now.micro_step)

        def finish() -> tf.Tensor:
            with tf.control_dependencies([self._finish(strategy, None, None, now.micro_step)]):
                return self._clear(strategy)

        done = self._adapter.when(is_any, finish)  # nothing runs at the end of an epoch that ends with a full cycle
        return self._counter.advance(strategy, done, now, following)

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
        if self._is_running:
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
        needs_whole = self._transform is not None or self._plan.nonfinite == "skip_cycle"
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

        `is_first` and `has_latest` are as for `CycleListener.on_step`.

        Returns:
          Bool tensor, whether the step was made.
        """

        def step() -> tf.Tensor:
            on_step = lambda t, w: self._on_step(t, w, strategy, is_first, has_latest)
            with self._adapter.stepping():
                stepped = _replicas.each_replica(strategy, on_step, [totals, weight])
                settled = self._each(strategy, lambda: self._on_settle(is_first, has_latest))
                return self._adapter.end_step(true_after(_replicas.local_tensors(strategy, [stepped, settled])))

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
        return [listener.on_step(is_first, has_latest) for listener in self._listeners]

    def _on_step(
        self,
        totals: Sequence[Optional[Gradient]],
        weight: tf.Tensor,
        strategy: tf.distribute.Strategy,
        is_first: Union[bool, tf.Tensor],
        has_latest: bool,
    ) -> tf.Tensor:
        """Reduce the totals as planned, transform them, and make the inner optimizer's step."""
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
                grads_and_vars = listener.on_gradients(grads_and_vars, is_first, has_latest)
        step = self._adapter.make_step(grads_and_vars, self._transform, 1 if is_share else replicas)
        return true_after(step)


def _if_counts(counts: Optional[tf.Tensor], function: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Return the bool tensor of `function()` if the micro-batch counts, or False if it is skipped."""
    return function() if counts is None else tf.cond(counts, function, lambda: tf.constant(False), name="if_counts")
