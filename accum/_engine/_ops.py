"""Build the ops of one call of the engine: store a micro-batch, make the step of a full cycle, clear, count.

Methods named `_on_*` run on each replica, and of these only the step itself communicates. All other methods run once,
in cross-replica context: on a replica, TensorFlow rejects a `tf.cond` around anything that communicates (keras#20582).
"""

from typing import TYPE_CHECKING, Any, Callable, List, Optional, Sequence, Tuple, Union

from accum import _tf
from accum._engine import _replicas
from accum._engine._accumulators import Accumulator
from accum._engine._replicas import true_after
from accum._engine._weighted_sums import WeightedSums, cast_gradient, is_first_micro_step
from accum._tf import Gradient, GradsAndVars, Scalar, tf

if TYPE_CHECKING:
    from accum._engine._cycle import Cycle


class CycleOps:
    """Builds the ops of one call of a face in cross-replica context."""

    def __init__(
        self,
        cycle: "Cycle",
        entries: Sequence[Tuple[tf.Variable, Accumulator]],
        is_weighted: bool = False,
        is_reduced: bool = False,
    ) -> None:
        self._cycle = cycle
        self._plan = cycle.plan
        self._state = cycle.state
        self._adapter = cycle.adapter
        self._variables = [var for var, _ in entries]
        self._numbers = [cycle.number_of(var) for var in self._variables]
        self._accumulators = [accumulator for _, accumulator in entries]
        self._listeners = tuple(cycle.listeners)
        self._is_weighted = is_weighted  # then the weights may sum to zero
        self._is_reduced = is_reduced
        self._is_running = self._plan.reduction == "running_mean"
        self._sums = WeightedSums(self._state, self._accumulators, self._plan, self._listeners, is_reduced)

    # ------------------------------------------------------------------------------------------------------------
    # Across replicas

    def micro_step(self, strategy: tf.distribute.Strategy, grads: Any, weight: Any) -> tf.Operation:
        micro_step_index, length = self._read_clock()
        counts = self._counts(strategy, grads)
        self._cycle.seen.note(strategy, grads, self._numbers, micro_step_index, counts)
        with _tf.on_host():
            is_last = tf.greater_equal(micro_step_index + 1, length)

        def finish() -> tf.Tensor:
            return self._finish(strategy, grads, weight, micro_step_index)

        def store() -> tf.Tensor:
            return tf.logical_not(self._store(strategy, grads, weight, micro_step_index))

        has_stepped = _if_counts(counts, lambda: tf.cond(is_last, finish, store, name="if_full"))
        with _tf.on_host():
            following = tf.where(is_last, tf.zeros_like(micro_step_index), micro_step_index + 1)
            following = following if counts is None else tf.where(counts, following, micro_step_index)
        return self._end_micro_step(strategy, has_stepped, following, length, counts)

    def accumulate(self, strategy: tf.distribute.Strategy, grads: Any, weight: Any) -> tf.Operation:
        micro_step_index, length = self._read_clock()
        counts = self._counts(strategy, grads)
        self._cycle.seen.note(strategy, grads, self._numbers, micro_step_index, counts)

        def store() -> tf.Tensor:
            return tf.logical_not(self._store(strategy, grads, weight, micro_step_index))

        has_stepped = _if_counts(counts, store)
        with _tf.on_host():
            following = micro_step_index + 1
            following = following if counts is None else tf.where(counts, following, micro_step_index)
        return self._end_micro_step(strategy, has_stepped, following, length, counts)

    def apply(self, strategy: tf.distribute.Strategy) -> tf.Operation:
        micro_step_index, length = self._read_clock()
        with _tf.on_host():
            is_any, following = tf.greater(micro_step_index, 0), tf.zeros_like(micro_step_index)

        def finish() -> tf.Tensor:
            with tf.control_dependencies([self._finish(strategy, None, None, micro_step_index)]):
                return self._clear(strategy)

        done = self._adapter.when(is_any, finish)  # nothing runs at the end of an epoch that ends with a full cycle
        return self._advance_clock(strategy, done, following, length)

    def zero(self, strategy: tf.distribute.Strategy) -> tf.Operation:
        micro_step_index, length = self._read_clock()
        return self._advance_clock(strategy, self._clear(strategy), tf.zeros_like(micro_step_index), length)

    def _clear(self, strategy: tf.distribute.Strategy) -> tf.Tensor:
        with tf.name_scope("clear"):
            return self._each(strategy, self._sums.clear)

    def _read_clock(self) -> Tuple[tf.Tensor, tf.Tensor]:
        """Return two int64 scalars: the micro steps made so far in this cycle, and the cycle's length."""
        with tf.name_scope("clock"), _tf.on_host():
            micro_step_index = self._state.micro_step.read_value()
            return micro_step_index, self._cycle.length(micro_step_index)

    def _end_micro_step(
        self,
        strategy: tf.distribute.Strategy,
        has_stepped: tf.Tensor,
        micro_step_index: tf.Tensor,
        length: tf.Tensor,
        counts: Optional[tf.Tensor],
    ) -> tf.Operation:
        """Create an op that, after the micro step, advances every counter and stores `has_stepped`."""
        with tf.control_dependencies([has_stepped]), tf.name_scope("clock"):
            counted = self._adapter.count_micro_step(counts)
            kept = None if self._cycle.stepped is None else _assign(strategy, self._cycle.stepped, has_stepped)
        with tf.control_dependencies([op for op in (counted, kept) if op is not None]):
            return self._advance_clock(strategy, has_stepped, micro_step_index, length)

    def _advance_clock(
        self, strategy: tf.distribute.Strategy, done: tf.Tensor, micro_step_index: tf.Tensor, length: tf.Tensor
    ) -> tf.Operation:
        """Create an op that, after `done`, sets `micro_step` and stores the length of the cycle.

        `done` waits for the gradients, so `micro_step` does not change when a dataset turns out to have ended.
        """
        with tf.control_dependencies([done]), tf.name_scope("clock"):
            ops = [_assign(strategy, self._state.micro_step, micro_step_index)]
            if self._state.length is not None:
                ops.append(_assign(strategy, self._state.length, length))
            return tf.group(*[op for op in ops if op is not None])

    def _counts(self, strategy: tf.distribute.Strategy, grads: Any) -> Optional[tf.Tensor]:
        """Return whether the micro-batch counts, a bool tensor common to all replicas; None if every one counts."""
        if self._plan.nonfinite != "skip_micro":
            return None
        with tf.name_scope("is_finite"):
            bad = _replicas.per_replica(strategy, _replicas.on_each(strategy, count_nonfinite, [grads]))
        return tf.equal(strategy.reduce(_replicas.SUM, bad, axis=None), 0)

    def _store(
        self, strategy: tf.distribute.Strategy, grads: Any, weight: Any, micro_step_index: tf.Tensor
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

    def _finish(self, strategy: tf.distribute.Strategy, grads: Any, weight: Any, micro_step_index: tf.Tensor) -> Any:
        """Make the step of a cycle with the last micro-batch, or if `grads` is None from the stored sums alone.

        Returns:
          Bool tensor, whether the step was made.
        """
        is_first = is_first_micro_step(micro_step_index) if grads is not None and self._cycle.has_single else False
        how = micro_step_index, is_first, self._reduces(strategy)
        with tf.name_scope("sum"):
            sums = _replicas.on_each(strategy, lambda g, w: self._sums.total(g, w, *how), [grads, weight])
        waits = _replicas.local_tensors(strategy, sums)
        totals, weight = _replicas.per_replica(strategy, sums)
        if self._reduces(strategy):
            totals, weight = self._reduce(strategy, totals, weight)
        if self._adapter.takes_some_variables():
            totals = self._cycle.seen.only(strategy, totals, self._numbers, micro_step_index, grads is not None)
        done = self._step(strategy, totals, weight, is_first, grads is not None)
        if all(accumulator.rows is None for accumulator in self._accumulators):
            return done
        with tf.control_dependencies([done] + waits):
            return tf.logical_and(done, self._each(strategy, self._sums.clear_rows))

    def _reduces(self, strategy: tf.distribute.Strategy) -> bool:
        return strategy.num_replicas_in_sync > 1 and not self._is_reduced

    def _reduce(self, strategy: tf.distribute.Strategy, totals: Any, weight: Any) -> Tuple[Any, Any]:
        """Sum everything over the replicas in one call, the only communication of the cycle."""
        pairs = [] if self._leaves_sums else list(zip(totals, self._variables))
        reduced = _replicas.sum_over_replicas(strategy, pairs + [(weight, self._state.micro_step)])
        return totals if self._leaves_sums else reduced[:-1], reduced[-1]

    @property
    def _leaves_sums(self) -> bool:
        """Whether the inner optimizer sums over replicas, and nothing needs the summed gradient before that."""
        needs_whole = self._cycle.transform is not None or self._plan.nonfinite == "skip_cycle"
        return self._adapter.reduces and not needs_whole

    def _step(
        self,
        strategy: tf.distribute.Strategy,
        totals: Any,
        weight: Any,
        is_first: Union[bool, tf.Tensor],
        has_latest: bool,
    ) -> Any:
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
            bad = count_nonfinite([strategy.experimental_local_results(total)[0] for total in totals])
            verdicts.append(tf.equal(bad, 0))
        return self._adapter.when(tf.reduce_all(verdicts), step) if verdicts else step()

    @staticmethod
    def _each(strategy: tf.distribute.Strategy, function: Callable[..., Any], *args: Any) -> tf.Tensor:
        """Call `function` for every replica. Returns one tensor that waits for all results."""
        return true_after(_replicas.local_tensors(strategy, _replicas.on_each(strategy, function, args)))

    # ------------------------------------------------------------------------------------------------------------
    # On each replica

    def _on_settle(self, is_first: Union[bool, tf.Tensor], has_latest: bool) -> List[Any]:
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
            totals = [_tf.summed_rows(t) if isinstance(t, tf.IndexedSlices) else t for t in totals]
        with tf.name_scope(self._plan.reduction):
            divisor = self._sums.divisor(weight)
            pairs = [(total, var) for total, var in zip(totals, self._variables) if total is not None]
            means = pairs if divisor is None else [(_divide(total, divisor), var) for total, var in pairs]
            grads_and_vars: GradsAndVars = [(cast_gradient(mean, var.dtype.base_dtype), var) for mean, var in means]
            for listener in self._listeners:
                grads_and_vars = listener.on_gradients(grads_and_vars, is_first, has_latest)
        step = self._adapter.make_step(grads_and_vars, self._cycle.transform, 1 if is_share else replicas)
        return true_after(step)


def count_nonfinite(grads: Sequence[Optional[Gradient]]) -> tf.Tensor:
    """Count the gradients that contain NaN or infinity, as a float32 scalar."""
    flat = [tensor for tensor in tf.nest.flatten(grads, expand_composites=True) if tensor is not None]
    sizes = [tf.abs(tensor) for tensor in flat if tensor.dtype.is_floating or tensor.dtype.is_complex]
    return tf.add_n([tf.cast(tf.reduce_any(~tf.math.is_finite(size)), tf.float32) for size in sizes])


def _if_counts(counts: Optional[tf.Tensor], function: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Return the bool tensor of `function()` if the micro-batch counts, or False if it is skipped."""
    return function() if counts is None else tf.cond(counts, function, lambda: tf.constant(False), name="if_counts")


def _assign(strategy: tf.distribute.Strategy, var: tf.Variable, value: tf.Tensor) -> Any:
    def assign(counter: tf.Variable, new: tf.Tensor) -> tf.Operation:
        with _tf.on_host():
            return counter.assign(new, read_value=False)

    return strategy.extended.update(var, assign, args=(value,))


def _divide(total: Gradient, weight: Scalar) -> Gradient:
    if isinstance(total, tf.IndexedSlices):
        return tf.IndexedSlices(_divide(total.values, weight), total.indices, total.dense_shape)
    return total / tf.cast(weight, total.dtype)
