"""Record the numbers of each step of a model, in variables that Python reads at intervals.

The recorder is part of the graph only while a `StepLogger` follows the model. Each replica keeps its own sums, so
nothing is communicated:

    gradients of a micro-batch-> add their squared norm to the row of this cycle
    the optimizer's step      -> add the squared norm of its gradient, and the learning rate
    the batch ends            -> add its loss; where a cycle has ended, go on to the next row

Everything is added in place, in few operations: each waits for the one before it, which costs more than the arithmetic.
"""

import math
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from accum import _check, _tf
from accum._engine import _replicas
from accum._engine._gradients import squared_norm
from accum._keras._logging._recorded_sums import StepSums, as_vector, norms_of_micro_batch
from accum._keras._optimizer._internals import accumulation_of, internals_of
from accum._keras._optimizer._wrapper import listen
from accum._keras._step_listener import PartsSeen, StepListener, end_batch
from accum._tf import Data, Gradient, GradsAndVars, Logs, Scalar, Wait, tf

ROWS = 4096
"""How many cycles fit between two reads."""

_STEPS = StepSums._fields.index("steps")


UnfinishedRow = Tuple[Tuple[int, int], np.ndarray]
"""The micro steps and steps so far, and the sums of each replica in the present cycle."""


class StepRecorder(StepListener):
    """Records the steps of one optimizer of one model.

    Args:
      model: a compiled Keras model.
      optimizer: its `GradientAccumulateOptimizer`.
      at_end: function that is called before the recorder stops, also for another one or after an exception.
    """

    def __init__(
        self, model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer, at_end: Callable[[], None]
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._at_end = at_end
        self._unwrapped: Optional[Callable[[Data], Logs]] = None  # a train step that the user has set on a plain model
        self._is_in_batch = False
        with tf.init_scope(), model.distribute_strategy.scope():
            width = len(StepSums._fields)
            # The row of the present cycle is the one after those of `_cycles`; more than fit share the last.
            self._rows = _tf.variables.new_statistic("step_rows", [ROWS + 1, width], tf.float32)
            self._cycles = _tf.variables.new_statistic("cycles_recorded", [], tf.float32)
            self._batch = _tf.variables.new_statistic("batch_examples", [], tf.float32)
            self._losses = _tf.variables.new_statistic(
                "losses_so_far", [2], tf.float32
            )  # sum and weight, in this epoch

    # ------------------------------------------------------------------------------------------------------------
    # In and out of the model

    def attach(self) -> None:
        """Record the steps of the model from now on, in place of any other recorder."""
        internals = internals_of(self._optimizer)
        for other in [one for one in internals.listeners if isinstance(one, StepRecorder)]:
            other.stop()
        listen(self._model, self)
        self._begin_within(internals.unfinished_row)
        if accumulation_of(self._model) is None:
            self._wrap_train_step()

    @property
    def is_attached(self) -> bool:
        """Whether no other recorder has taken its place."""
        return self in internals_of(self._optimizer).listeners

    def _wrap_train_step(self) -> None:
        """Record the train step of a plain model."""
        own, function = self._model.__dict__.get("train_step"), self._model.train_step

        def recorded_train_step(data: Data) -> Logs:
            self.begin_batch(data)
            return end_batch([self], function(data))

        self._unwrapped = own
        _tf.patches.LOGGED_STEP.keep(self._model, "train_step", recorded_train_step)

    def stop(self) -> None:
        """Record nothing from now on: the model is traced again, as if there had never been a recorder."""
        internals = internals_of(self._optimizer)
        if not self.is_attached:
            return
        try:
            self._at_end()
            internals.unfinished_row = self._unfinished()
        except Exception as error:  # the user sees the one that has ended `fit`
            _check.warn(f"The last steps could not be logged. Received: {error!r}. [accum: step-logger]")
        internals.listeners.remove(self)
        if accumulation_of(self._model) is None:
            _tf.patches.LOGGED_STEP.undo(self._model, "train_step")
            if self._unwrapped is not None:
                _tf.patches.LOGGED_STEP.keep(self._model, "train_step", self._unwrapped)
        self._model.train_function = None

    def _cycle_so_far(self) -> Tuple[int, int]:
        """Return the micro steps of the present cycle, and the steps before it."""
        return int(self._optimizer.micro_step), int(_tf.variables.native(self._optimizer.iterations).numpy())

    def _unfinished(self) -> Optional[UnfinishedRow]:
        """Return what another recorder needs to go on in the present cycle, if all of it has been recorded."""
        ended = int(self._parts(self._cycles)[0].numpy())
        if ended > ROWS:
            return None
        rows = np.stack([part[ended].numpy() for part in self._parts(self._rows)])
        # An exception within a batch leaves its examples without their loss.
        is_complete = np.array_equal(
            rows[:, StepSums._fields.index("examples")], rows[:, StepSums._fields.index("loss_weight")]
        )
        return (self._cycle_so_far(), rows) if is_complete else None

    def _begin_within(self, unfinished: Optional[UnfinishedRow]) -> None:
        """Go on in the present cycle; if what came before in it is not known, neither are its sums."""
        if self._cycle_so_far()[0] == 0:
            return
        rows = np.zeros([len(self._parts(self._rows)), len(StepSums._fields)])
        rows[:, :_STEPS] = math.nan
        if unfinished is not None and unfinished[0] == self._cycle_so_far() and unfinished[1].shape == rows.shape:
            rows = unfinished[1]
        self._begin_with(rows)

    # ------------------------------------------------------------------------------------------------------------
    # On each replica, in a train step

    @_tf.graphs.untouched_by_autograph
    def begin_batch(self, data: Data) -> None:
        self._is_in_batch = True
        try:
            examples = _tf.losses.count_examples(data)
        except ValueError:  # there is nothing to count
            examples = tf.constant(float("nan"))
        _replicas.local_variable(self._batch).assign(examples, read_value=False)

    def _add(self, vector: tf.Tensor) -> Wait:
        """Add to the row of the present cycle. Returns what to wait for."""
        return _replicas.local_variable(self._rows).scatter_nd_add([[self._present()]], [vector])

    def _present(self) -> tf.Tensor:
        """Return the index of the present cycle's row, an int32 scalar."""
        return tf.cast(tf.minimum(_replicas.local_variable(self._cycles).read_value(), float(ROWS)), tf.int32)

    def _spoilt_if_begun_elsewhere(self, vector: tf.Tensor) -> tf.Tensor:
        """Return `vector`, or NaN instead of sums: Keras 2 restores a cycle only when its first batch is computed."""
        row = tf.gather(_replicas.local_variable(self._rows).read_value(), self._present())
        is_first = tf.reduce_all(tf.equal(row, 0.0)) & (self._optimizer.micro_step > 0)
        return tf.where(is_first & (tf.range(len(StepSums._fields)) < _STEPS), float("nan"), vector)

    @_tf.graphs.untouched_by_autograph
    def of_part(self, grads: Sequence[Optional[Gradient]], weight: Optional[Scalar], size: Scalar) -> tf.Tensor:
        return as_vector(norms_of_micro_batch(grads, weight, size))

    def _sums_of_parts(self, grads: Sequence[Optional[Gradient]], parts: PartsSeen) -> StepSums:
        sums = StepSums(*tf.unstack(parts.sum))
        if parts.grads is not None:  # a `LossScaleOptimizer` has divided by its scale
            before = squared_norm(parts.grads)
            unscaled = tf.math.divide_no_nan(squared_norm(grads), before)
            sums = sums._replace(squares=sums.squares * unscaled)
        if parts.is_weighted:
            return sums
        share = tf.math.divide_no_nan(1.0, sums.weight)  # this batch counts 1, whatever its micro-batches count
        return sums._replace(
            squares=sums.squares * share,
            weight=sums.weight * share,
            per_size=sums.per_size * share,
            squares_per_size=sums.squares_per_size * share**2,
            divisor=1.0 / _replicas.count(),
        )

    @_tf.graphs.untouched_by_autograph
    def on_gradients(
        self,
        grads: Sequence[Optional[Gradient]],
        weight: Optional[Scalar],
        is_reduced: bool,
        parts: Optional[PartsSeen],
    ) -> None:
        examples = _replicas.local_variable(self._batch).read_value()
        if parts is not None:
            sums = self._sums_of_parts(grads, parts)
        else:
            sums = norms_of_micro_batch(grads, weight, examples)
            if weight is None:
                sums = sums._replace(divisor=1.0 / _replicas.count())
        scale = _tf.optimizers.loss_scale_of(self._optimizer.optimizer)
        factor = float(_replicas.count()) / scale  # Keras divides each replica's loss
        if is_reduced and _replicas.count() > 1:
            factor = float("nan")  # each replica has the same gradient, of all of their examples
        vector = as_vector(sums._replace(squares=sums.squares * factor**2, examples=examples))
        if self._optimizer._cycle.plan.nonfinite == "skip_micro":
            vector = tf.where(tf.math.is_finite(vector[0]), vector, tf.zeros_like(vector))
        self._add(self._spoilt_if_begun_elsewhere(vector))

    @_tf.graphs.untouched_by_autograph
    def on_update(self, grads_and_vars: GradsAndVars, changed: GradsAndVars) -> List[Wait]:
        inner = self._optimizer.optimizer
        norm = squared_norm([grad for grad, _ in grads_and_vars]) / _tf.optimizers.loss_scale_of(inner) ** 2
        sums = StepSums(
            steps=1.0,
            squared_norm=norm,
            learning_rate=_tf.optimizer_state.learning_rate_now(inner),
            number=tf.cast(_tf.variables.native(inner.iterations), tf.float32),
        )
        return [self._add(as_vector(sums))]

    @_tf.graphs.untouched_by_autograph
    def end_batch(self, logs: Logs) -> Dict[str, tf.Tensor]:
        """Add the loss of the batch, and go on to the next row if its cycle has ended."""
        examples = _replicas.local_variable(self._batch).read_value()
        before, now = _replicas.local_variable(self._losses), self._losses_so_far()
        change = now - before.read_value()
        logged = logs.get("loss") if isinstance(logs, dict) else None
        logged = float("nan") if logged is None else tf.cast(tf.reduce_mean(logged), tf.float32)
        other = tf.stack([logged * examples, examples])
        # The metric of a loss adds up over an epoch: in between, something else may have used or reset it.
        change = tf.where(tf.equal(change[1], examples), change, tf.fill([2], float("nan")))
        change = tf.where(now[1] > 0.0, change, other)
        stored = before.assign(now, read_value=False)
        added = self._add(as_vector(StepSums(loss=change[0], loss_weight=change[1])))
        with tf.control_dependencies([op for op in (stored, added) if op is not None]):
            is_over = tf.cast(tf.equal(self._optimizer.micro_step, 0), tf.float32)
            _replicas.local_variable(self._cycles).assign_add(is_over, read_value=False)
        self._is_in_batch = False
        return {}

    def _losses_so_far(self) -> tf.Tensor:
        """Return the sum and the weight of the losses in this epoch, from the metrics that track them."""
        trackers = _tf.steps.loss_trackers(self._model)[:1] + [
            metric for metric in self._model.metrics if metric.name == "loss"
        ]
        means = {id(metric): metric for metric in trackers if hasattr(metric, "total") and hasattr(metric, "count")}
        pairs = [
            tf.stack(
                [
                    tf.cast(_replicas.local_variable(_tf.variables.native(var)), tf.float32)
                    for var in (metric.total, metric.count)
                ]
            )
            for metric in means.values()
        ]
        return tf.add_n(pairs) if pairs else tf.zeros([2])

    # ------------------------------------------------------------------------------------------------------------
    # Between batches

    def _parts(self, var: tf.Variable) -> List[tf.Variable]:
        return list(self._model.distribute_strategy.experimental_local_results(var))

    def begin_epoch(self) -> None:
        """Begin an epoch, for which Keras has reset its metrics."""
        self._is_in_batch = False  # an epoch before may have been interrupted
        for part in self._parts(self._losses):
            part.assign(tf.zeros_like(part))

    def end_cycle(self) -> None:
        """Go on to the next row, unless nothing was recorded in this one."""
        if not tf.executing_eagerly() or self._is_in_batch:
            return
        present = int(self._parts(self._cycles)[0].numpy())
        if present <= ROWS and any(np.any(part[present].numpy() != 0.0) for part in self._parts(self._rows)):
            for part in self._parts(self._cycles):
                part.assign_add(1.0)

    def collect(self) -> Tuple[List[StepSums], int]:
        """Return the steps since the last call, summed over replicas, and the number of cycles that did not fit.

        With several workers, all of them have to call this after the same batch.
        """
        ended = int(self._parts(self._cycles)[0].numpy())
        rows = np.stack([part.numpy() for part in self._parts(self._rows)]).astype(np.float64)
        present = np.full_like(rows[:, 0], math.nan) if ended > ROWS else rows[:, ended]
        is_between = int(self._optimizer.micro_step) == 0  # then only a traced `flush` can have left something there
        self._begin_with(np.zeros_like(present) if is_between else present)
        rows = rows[:, : min(ended + is_between, ROWS)]
        rows = rows[:, rows[0, :, _STEPS] > 0.0]  # not the cycles that ended without a step
        sums = rows.sum(0)[:, :_STEPS]
        if len(sums):
            sums = _replicas.sum_over_workers(self._model.distribute_strategy, sums)
        summed = np.concatenate([sums, rows[0][:, _STEPS:]], axis=1)
        return [StepSums(*map(float, row)) for row in summed], max(ended - ROWS, 0)

    def _begin_with(self, present: np.ndarray) -> None:
        """Empty the rows but for the present cycle, whose row is given for each replica."""
        for part in self._parts(self._cycles):
            part.assign(0.0)
        for part, row in zip(self._parts(self._rows), present):
            part.assign(tf.concat([[tf.cast(row, tf.float32)], tf.zeros([ROWS, len(row)])], 0))
