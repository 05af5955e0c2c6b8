"""The ops of one call of the engine: keep a micro-batch, make the step of a full cycle, clear, move the clock.

Methods called `_on_*` are called for each replica, and but for the step itself never communicate; all others run once,
across replicas. A `tf.cond` around anything that communicates has to stand across replicas: inside a replica TensorFlow
refuses it (keras#20582).
"""

from accum import _replicas, _tf
from accum._replicas import true_after
from accum._tf import tf


class Call:
    """The ops of one call of a face, built in cross-replica context. Per-replica functions are called `_on_*`."""

    def __init__(self, cycle, entries, is_weighted=False, is_reduced=False):
        self._cycle = cycle
        self._plan = cycle.plan
        self._state = cycle.state
        self._host = cycle.host
        self._variables = [var for var, _ in entries]
        self._slots = [slot for _, slot in entries]
        self._companions = tuple(cycle.companions)
        self._is_weighted = is_weighted  # whether the weights may sum to zero
        self._is_reduced = is_reduced
        self._is_running = self._plan.reduction == "running_mean"

    # ------------------------------------------------------------------------------------------------------------
    # Across replicas

    def micro_step(self, strategy, grads, weight):
        place, length = self._read_clock()
        is_taken = self._is_taken(strategy, grads)
        with _tf.on_host():
            is_last = tf.greater_equal(place + 1, length)

        def finish():
            return self._finish(strategy, grads, weight, place)

        def store():
            return self._store(strategy, grads, weight, place)

        done = self._if_taken(is_taken, lambda: tf.cond(is_last, finish, store, name="if_full"))
        with _tf.on_host():
            following = _where_taken(is_taken, tf.where(is_last, tf.zeros_like(place), place + 1), place)
        return self._advance_clock(strategy, done, following, length, is_taken)

    def accumulate(self, strategy, grads, weight):
        place, length = self._read_clock()
        is_taken = self._is_taken(strategy, grads)
        done = self._if_taken(is_taken, lambda: self._store(strategy, grads, weight, place))
        with _tf.on_host():
            following = _where_taken(is_taken, place + 1, place)
        return self._advance_clock(strategy, done, following, length, is_taken)

    def apply(self, strategy):
        place, length = self._read_clock()
        with _tf.on_host():
            is_any, following = tf.greater(place, 0), tf.zeros_like(place)

        def finish():
            with tf.control_dependencies([self._finish(strategy, None, None, place)]):
                return self._clear(strategy)

        done = self._host.when(is_any, finish)  # an epoch that ends with a full cycle costs nothing
        return self._advance_clock(strategy, done, following, length)

    def zero(self, strategy):
        place, length = self._read_clock()
        return self._advance_clock(strategy, self._clear(strategy), tf.zeros_like(place), length)

    def _clear(self, strategy):
        with tf.name_scope("clear"):
            return self._each(strategy, self._on_clear)

    def _read_clock(self):
        """The micro steps made in this cycle before this one, and the cycle's length: two int64 scalars."""
        with tf.name_scope("clock"), _tf.on_host():
            place = self._state.micro_step.read_value()
            return place, self._cycle.length(place)

    def _advance_clock(self, strategy, done, place, length, is_taken=False):
        """One op that moves the clock to `place` and keeps the length of the cycle begun, after `done` only.

        `done` waits for the gradients: where a dataset turns out to have ended, the clock stands still.
        """
        with tf.control_dependencies(tf.nest.flatten(done)), tf.name_scope("clock"):
            ops = [_assign(strategy, self._state.micro_step, place)]
            if self._state.length is not None:
                ops.append(_assign(strategy, self._state.length, length))
            if is_taken is not False:
                ops.append(self._host.count_micro_step(is_taken))
            return tf.group(*[op for op in ops if op is not None])

    def _is_taken(self, strategy, grads):
        """Whether the micro-batch counts: with `nonfinite="skip_micro"`, one verdict for all replicas."""
        if self._plan.nonfinite != "skip_micro":
            return True
        with tf.name_scope("is_finite"):
            bad = _replicas.per_replica(strategy, _replicas.on_each(strategy, count_nonfinite, [grads]))
        return tf.equal(strategy.reduce(_replicas.SUM, bad, axis=None), 0)

    @staticmethod
    def _if_taken(is_taken, function):
        return function() if is_taken is True else tf.cond(is_taken, function, _true, name="if_taken")

    def _store(self, strategy, grads, weight, place):
        """Keep a micro-batch that ends no cycle. Returns a tensor to wait for."""
        is_first = _is_first(place)
        if self._is_running:
            return self._each(strategy, lambda g, w: self._on_keep_running(g, w, is_first), grads, weight)
        return tf.cond(
            is_first,
            lambda: self._each(strategy, lambda g, w: self._on_keep("start", g, w), grads, weight),
            lambda: self._each(strategy, lambda g, w: self._on_keep("add", g, w), grads, weight),
            name="if_first",
        )

    def _finish(self, strategy, grads, weight, place):
        """Make the step of a full cycle, or with `grads` None of what is stored. Returns a tensor to wait for."""
        is_first = _is_first(place) if grads is not None and self._cycle.has_single else False
        how = place, is_first, self._reduces(strategy)
        with tf.name_scope("sum"):
            sums = _replicas.on_each(strategy, lambda g, w: self._on_sum(g, w, *how), [grads, weight])
        waits = _replicas.local_tensors(strategy, sums)
        totals, weight = _replicas.per_replica(strategy, sums)
        if self._reduces(strategy):
            totals, weight = self._reduce(strategy, totals, weight)
        done = self._step(strategy, totals, weight, lambda: self._on_settle(is_first, grads is not None))
        if all(slot.rows is None for slot in self._slots):
            return done
        with tf.control_dependencies([done] + waits):
            return self._each(strategy, self._on_clear_rows)

    def _reduces(self, strategy):
        return strategy.num_replicas_in_sync > 1 and not self._is_reduced

    def _reduce(self, strategy, totals, weight):
        """Sum over replicas, everything in one call: the cycle's one communication."""
        pairs = [] if self._leaves_sums else list(zip(totals, self._variables))
        reduced = strategy.extended.batch_reduce_to(_replicas.SUM, pairs + [(weight, self._state.micro_step)])
        return totals if self._leaves_sums else reduced[:-1], reduced[-1]

    @property
    def _leaves_sums(self):
        """Whether the inner optimizer sums over replicas, and nothing before it has to see the whole gradient."""
        needs_whole = self._cycle.transform is not None or self._plan.nonfinite == "skip_cycle"
        return self._host.reduces and not needs_whole

    def _step(self, strategy, totals, weight, settle):
        """The inner optimizer's step, unless the weights sum to zero or the plan forbids what came out."""

        def step():
            stepped = _replicas.each_replica(strategy, lambda t, w: self._on_step(t, w, strategy), [totals, weight])
            return true_after(_replicas.local_tensors(strategy, [stepped, self._each(strategy, settle)]))

        verdicts = []
        if self._is_weighted:
            verdicts.append(tf.greater(strategy.experimental_local_results(weight)[0], 0.0))
        if self._plan.nonfinite == "skip_cycle":
            bad = count_nonfinite([strategy.experimental_local_results(total)[0] for total in totals])
            verdicts.append(tf.equal(bad, 0))
        return self._host.when(tf.reduce_all(verdicts), step) if verdicts else step()

    @staticmethod
    def _each(strategy, function, *args):
        """Call `function` for every replica. Returns one tensor that waits for all of them."""
        return true_after(_replicas.local_tensors(strategy, _replicas.on_each(strategy, function, args)))

    # ------------------------------------------------------------------------------------------------------------
    # On each replica

    def _on_keep(self, how, grads, weight):
        """Start or continue the sums by one micro-batch."""
        with tf.name_scope(how):
            kept = [self._on_start(grads, weight) if how == "start" else self._on_add(grads, weight)]
            total = _replicas.local_variable(self._state.weight_sum)
            assign = total.assign if how == "start" else total.assign_add
            kept.append(assign(self._weight_of(weight), read_value=False))
            return true_after(kept + [companion.keep(how == "start") for companion in self._companions])

    def _on_start(self, grads, weight):
        factor = self._factor(weight)
        return [slot.start(grad, factor) for slot, grad in zip(self._slots, grads)]

    def _on_add(self, grads, weight):
        """Add a micro-batch to the sums. Of one of weight 0 rows are touched, and no number is taken in."""
        factor = self._factor(weight)
        in_one, added = [], []
        for slot, grad in zip(self._slots, grads):
            if factor is not None and slot.has_one_pass(grad):
                in_one.append((slot, grad))
            else:
                added.append(slot.add(grad, factor))

        def add():
            return true_after([slot.add_in_one_pass(grad, factor) for slot, grad in in_one])

        if in_one:
            added.append(add() if weight is None else tf.cond(tf.not_equal(weight, 0.0), add, _true, name="if_weighs"))
        return added

    def _on_keep_running(self, grads, weight, is_first):
        """Move the running means by one micro-batch that ends no cycle."""
        blended = self._on_blend(grads, weight, is_first)
        return true_after([blended] + [companion.keep(is_first) for companion in self._companions])

    def _on_settle(self, is_first, has_latest):
        return [companion.settle(is_first, has_latest) for companion in self._companions]

    def _on_blend(self, grads, weight, is_first):
        """m += (w / W) (g - m), W the weights so far with w."""
        so_far = self._weight_so_far(weight, is_first)
        share = tf.math.divide_no_nan(self._weight_of(weight), so_far)
        factor = self._factor(None)  # the weight is in the share
        if factor is not None:
            grads = [grad if grad is None else _tf.scale_gradient(grad, factor) for grad in grads]
        moved = [slot.blend(grad, share, is_first) for slot, grad in zip(self._slots, grads)]
        with tf.control_dependencies([share]):
            moved.append(_replicas.local_variable(self._state.weight_sum).assign(so_far, read_value=False))
        return true_after(moved)

    def _weight_so_far(self, weight, is_first):
        stored = _replicas.local_variable(self._state.weight_sum).read_value()
        if is_first is not False:
            stored = tf.where(is_first, 0.0, stored)
        return stored + self._weight_of(weight)

    def _on_sum(self, grads, weight, place, is_first, is_for_all):
        """This replica's sums over the cycle and its sum of weights, the last micro-batch included.

        A running mean becomes the sum for which it stands if it `is_for_all`, to be added to those of other replicas.
        """
        if grads is not None and not self._is_running:
            factor = self._factor(weight)
            sums = [slot.peek(grad, factor, is_first) for slot, grad in zip(self._slots, grads)]
            return sums, self._weight_so_far(weight, is_first)
        kept = [] if grads is None else [self._on_blend(grads, weight, _is_first(place))]
        with tf.control_dependencies(kept):
            sums = [slot.stored() for slot in self._slots]
            weight = _replicas.local_variable(self._state.weight_sum).read_value()
            if is_for_all and self._is_running:  # in float32 the sum cannot overflow
                sums = [_tf.scale_gradient(_cast(mean, tf.float32), weight) for mean in sums]
            return sums, weight

    def _on_step(self, totals, weight, strategy):
        """Reduce by the plan, transform, and let the inner optimizer make its step."""
        replicas = strategy.num_replicas_in_sync
        with tf.name_scope(self._plan.reduction):
            divisor = self._divisor(weight)
            totals = totals if divisor is None else [_divide(total, divisor) for total in totals]
            grads_and_vars = [(_cast(total, var.dtype.base_dtype), var) for total, var in zip(totals, self._variables)]
        is_share = self._leaves_sums and self._reduces(strategy)
        return true_after(self._cycle.make_step(grads_and_vars, 1 if is_share else replicas))

    # What the replicas hold means the same for any number of them: their sums add up to `w_i` times the micro-batch's
    # whole gradient, their weights to `w_i`, which is 1 if none was given. A gradient comes scaled by 1 / replicas, as
    # Keras scales each replica's loss; one that is reduced already comes whole to each.

    def _factor(self, weight):
        """What multiplies a gradient on its way into the sum, or None for 1."""
        replicas = _replicas.count()
        if replicas == 1:
            return weight
        if self._is_reduced:
            return 1.0 / replicas
        return None if weight is None else float(replicas) * weight

    def _weight_of(self, weight):
        """What is added to this replica's sum of weights."""
        return 1.0 / _replicas.count() if weight is None else weight

    def _divisor(self, weight):
        """What divides a replica's total to the gradient of the step, or None for 1."""
        replicas = _replicas.count()
        if self._plan.reduction == "mean":
            return weight
        if replicas == 1:
            return None
        if self._is_reduced:  # nothing is added up: each replica has its share, and makes it whole by itself
            return 1.0 / replicas
        return weight / replicas if self._is_running else None

    def _on_clear(self):
        cleared = [slot.clear() for slot in self._slots]
        weight = _replicas.local_variable(self._state.weight_sum)
        return true_after(cleared + [weight.assign(0.0, read_value=False)])

    def _on_clear_rows(self):
        return true_after([slot.clear_rows() for slot in self._slots if slot.rows is not None])


def count_nonfinite(grads):
    """How many of `grads` hold a NaN or an infinity, a float32 scalar."""
    flat = [tensor for tensor in tf.nest.flatten(grads, expand_composites=True) if tensor is not None]
    sizes = [tf.abs(tensor) for tensor in flat if tensor.dtype.is_floating or tensor.dtype.is_complex]
    return tf.add_n([tf.cast(tf.reduce_any(~tf.math.is_finite(size)), tf.float32) for size in sizes])


def _is_first(place):
    with _tf.on_host():
        return tf.equal(place, 0)


def _where_taken(is_taken, following, place):
    return following if is_taken is True else tf.where(is_taken, following, place)


def _true():
    return tf.constant(True)


def _assign(strategy, var, value):
    def assign(counter, new):
        with _tf.on_host():
            return counter.assign(new, read_value=False)

    return strategy.extended.update(var, assign, args=(value,))


def _divide(total, weight):
    if isinstance(total, tf.IndexedSlices):
        return tf.IndexedSlices(_divide(total.values, weight), total.indices, total.dense_shape)
    return total / tf.cast(weight, total.dtype)


def _cast(grad, dtype):
    if grad.dtype == dtype:
        return grad
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(grad.values, dtype), grad.indices, grad.dense_shape)
    return tf.cast(grad, dtype)
