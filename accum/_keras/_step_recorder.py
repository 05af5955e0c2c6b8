"""Record what each step of a model did, in variables that Python reads once in a while.

The recorder is part of the graph only while a `StepLogger` follows the model. Each replica keeps its own sums, so
nothing is communicated:

    a batch begins            -> keep the sums of the last step as a row, if there was one
    gradients of a micro-batch-> add their squared norm
    the optimizer's step      -> the squared norm of its gradient, and the learning rate
    the batch ends            -> add its loss
"""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from accum import _tf
from accum._engine import _replicas
from accum._keras._internals import internals_of
from accum._tf import Gradient, GradsAndVars, Scalar, tf

ROWS = 4096
"""How many steps fit between two reads."""


class Sums(NamedTuple):
    """What a replica adds up for a step, in float32. The first five are those of `SquaredNorms`."""

    squares: Any = 0.0
    weight: Any = 0.0
    per_size: Any = 0.0
    squares_per_size: Any = 0.0
    parts: Any = 0.0
    sizes: Any = 0.0  # sum(b_i)
    divisor: Any = 0.0  # by which the gradient of the step is divided to give the mean, if it is a sum
    examples: Any = 0.0
    loss: Any = 0.0  # sum over examples
    loss_weight: Any = 0.0
    # Of the step, the same on each replica:
    steps: Any = 0.0  # 1 if a step was made
    squared_norm: Any = 0.0  # of the gradient that the inner optimizer got
    learning_rate: Any = 0.0
    number: Any = 0.0  # how many steps there were before


def squared_norm(grads: Sequence[Optional[Gradient]], compiled: bool = False) -> tf.Tensor:
    """Return the sum of squares of all gradients, a float32 scalar. Rows of a sparse gradient are summed first.

    Args:
      grads: tensors, `tf.IndexedSlices` or None.
      compiled: whether XLA compiles this, which does not know the number of different rows.
    """
    squares = [tf.constant(0.0)]
    for grad in grads:
        if isinstance(grad, tf.IndexedSlices):
            grad = tf.convert_to_tensor(grad) if compiled else _summed_rows(grad)
        if grad is not None:
            squares.append(2.0 * tf.cast(tf.nn.l2_loss(tf.cast(grad, _tf.at_least_float32(grad.dtype))), tf.float32))
    return tf.add_n(squares)


def _summed_rows(grad: tf.IndexedSlices) -> tf.Tensor:
    rows, places = tf.unique(grad.indices)
    return tf.math.unsorted_segment_sum(grad.values, places, tf.size(rows))


def norms_of_micro_batch(
    grads: Sequence[Optional[Gradient]], weight: Optional[Scalar], size: Any, compiled: bool = False
) -> Sums:
    """Return what a micro-batch adds to the sums.

    Args:
      grads: its gradients.
      weight: its weight, which then is also the measure of its size; None: 1.
      size: its number of examples.
      compiled: as for `squared_norm`.
    """
    size = tf.cast(size if weight is None else weight, tf.float32)
    weight = tf.constant(1.0) if weight is None else tf.cast(weight, tf.float32)
    per_size = tf.math.divide_no_nan(weight, size)
    return Sums(
        divisor=weight,
        squares=tf.math.multiply_no_nan(squared_norm(grads, compiled), weight),
        weight=weight,
        per_size=per_size,
        squares_per_size=weight * per_size,
        parts=tf.cast(weight > 0.0, tf.float32),
        sizes=size,
    )


def as_vector(sums: Sums) -> tf.Tensor:
    return tf.stack([tf.cast(value, tf.float32) for value in sums])


class StepRecorder:
    """Records the steps of one optimizer of one model.

    Args:
      model: a compiled Keras model.
      optimizer: its `GradientAccumulateOptimizer`.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._model = model
        self._optimizer = optimizer
        self._unwrapped: Any = None  # a train step that the user has set on a plain model
        self._given: Dict[int, Any] = {}  # replica -> the sums of a batch that was split into micro-batches
        with tf.init_scope(), model.distribute_strategy.scope():
            width = len(Sums._fields)
            self._sums = _tf.new_statistic("step_sums", [width], tf.float32)
            self._rows = _tf.new_statistic("step_rows", [ROWS, width], tf.float32)
            self._filled = _tf.new_statistic("steps_recorded", [], tf.float32)
            self._batch = _tf.new_statistic("batch_examples", [], tf.float32)
            self._losses = _tf.new_statistic("losses_so_far", [2], tf.float32)  # sum and weight, in this epoch

    # ------------------------------------------------------------------------------------------------------------
    # In and out of the model

    def attach(self) -> None:
        """Record the steps of the model from now on, in place of any other recorder."""
        internals = internals_of(self._optimizer)
        if internals.recorder is not None:
            internals.recorder.detach()
        internals.recorder = self
        if "_accum_optimizers" in self._model.__dict__:
            _tf.set_untracked(self._model, "_accum_recorder", self)
        else:
            self._wrap_train_step()
        self._model.train_function = None  # traced without a recorder

    def _wrap_train_step(self) -> None:
        """Record the train step of a plain model."""
        own, function = self._model.__dict__.get("train_step"), self._model.train_step

        def recorded_train_step(data: Any) -> Any:
            self.begin(data)
            logs = function(data)
            self.end(logs)
            return logs

        self._unwrapped = own
        _tf.set_untracked(self._model, "train_step", recorded_train_step)

    def detach(self) -> None:
        """Record nothing from now on: the model is traced again, as if there had never been a recorder."""
        internals = internals_of(self._optimizer)
        if internals.recorder is not self:
            return
        internals.recorder = None
        if self._model.__dict__.pop("_accum_recorder", None) is None:
            del self._model.__dict__["train_step"]
            if self._unwrapped is not None:
                _tf.set_untracked(self._model, "train_step", self._unwrapped)
        self._model.train_function = None

    @property
    def compiled(self) -> bool:
        """Whether XLA compiles the train step."""
        return _tf.is_compiled_by_xla(self._model)

    # ------------------------------------------------------------------------------------------------------------
    # On each replica, in a train step

    @_tf.untouched_by_autograph
    def begin(self, data: Any) -> None:
        """Begin a batch. Doing so twice is like once, as long as nothing was added."""
        sums, rows, filled = map(_replicas.local_variable, (self._sums, self._rows, self._filled))
        latest, place = sums.read_value(), filled.read_value()
        is_full = latest[Sums._fields.index("steps")] > 0.0
        row = tf.cast(tf.minimum(place, ROWS - 1.0), tf.int32)
        with tf.control_dependencies([rows.scatter_nd_update([[row]], [latest])]):
            kept = filled.assign_add(tf.cast(is_full, tf.float32), read_value=False)
        with tf.control_dependencies(_known([kept])):
            sums.assign(tf.where(is_full, tf.zeros_like(latest), latest), read_value=False)
        try:
            examples = _tf.count_examples(data)
        except ValueError:  # there is nothing to count
            examples = tf.constant(float("nan"))
        _replicas.local_variable(self._batch).assign(examples, read_value=False)

    @_tf.untouched_by_autograph
    def sums_of(self, grads: Sequence[Optional[Gradient]], weight: Optional[Scalar], size: Any) -> tf.Tensor:
        """Return what a micro-batch of a batch adds to the sums, a vector that can be added up."""
        return as_vector(norms_of_micro_batch(grads, weight, size, self.compiled))

    @_tf.untouched_by_autograph
    def give(self, vector: tf.Tensor, is_weighted: bool, grads: Any) -> None:
        """Set what the next call of the optimizer on this replica adds: the sums over the micro-batches of its batch.

        Args:
          vector: the sums.
          is_weighted: whether the call has a weight, which is the sum of those of the micro-batches.
          grads: the gradients of the batch in the unit of the sums, if the call may have others; or None.
        """
        norm = None if grads is None else squared_norm(grads, self.compiled)
        self._given[_replicas.replica_number()] = vector, is_weighted, norm

    def _given_sums(self, grads: Sequence[Optional[Gradient]]) -> Optional[Sums]:
        vector, is_weighted, norm = self._given.pop(_replicas.replica_number(), (None, None, None))
        if vector is None:
            return None
        sums = Sums(*tf.unstack(vector))
        if norm is not None:  # a `LossScaleOptimizer` has divided by its scale
            unscaled = tf.math.divide_no_nan(squared_norm(grads, self.compiled), norm)
            sums = sums._replace(squares=sums.squares * unscaled)
        if is_weighted:
            return sums
        share = tf.math.divide_no_nan(1.0, sums.weight)  # this batch counts 1, whatever its micro-batches count
        return sums._replace(
            squares=sums.squares * share,
            weight=sums.weight * share,
            per_size=sums.per_size * share,
            squares_per_size=sums.squares_per_size * share**2,
            divisor=1.0 / _replicas.count(),
        )

    @_tf.untouched_by_autograph
    def take(self, grads: Sequence[Optional[Gradient]], weight: Optional[Scalar], is_reduced: bool) -> None:
        """Add the gradients of one call of the optimizer.

        Args:
          grads: as the call has them.
          weight: the weight of the call, or None.
          is_reduced: whether they are already summed over replicas.
        """
        examples = _replicas.local_variable(self._batch).read_value()
        sums = self._given_sums(grads)
        if sums is None:
            sums = norms_of_micro_batch(grads, weight, examples, self.compiled)
            if weight is None:
                sums = sums._replace(divisor=1.0 / _replicas.count())
        factor = float(_replicas.count()) / self._scale  # Keras divides each replica's loss
        if is_reduced and _replicas.count() > 1:
            factor = float("nan")  # each replica has the same gradient, of all of their examples
        vector = as_vector(sums._replace(squares=sums.squares * factor**2, examples=examples))
        if self._optimizer._cycle.plan.nonfinite == "skip_micro":
            vector = tf.where(tf.math.is_finite(vector[0]), vector, tf.zeros_like(vector))
        _replicas.local_variable(self._sums).assign_add(vector, read_value=False)

    @property
    def _scale(self) -> float:
        """The number by which Keras multiplies the loss, and the inner optimizer divides its gradients."""
        return float(getattr(self._optimizer.optimizer, "loss_scale_factor", None) or 1.0)

    @_tf.untouched_by_autograph
    def on_step(self, grads_and_vars: GradsAndVars) -> Any:
        """Record the step that the inner optimizer makes with these gradients. Returns what to wait for."""
        inner = self._optimizer.optimizer
        norm = squared_norm([grad for grad, _ in grads_and_vars], self.compiled) / self._scale**2
        sums = Sums(
            steps=1.0,
            squared_norm=norm,
            learning_rate=_tf.learning_rate_now(inner),
            number=tf.cast(_tf.native(inner.iterations), tf.float32),
        )
        return _known([_replicas.local_variable(self._sums).assign_add(as_vector(sums), read_value=False)])

    @_tf.untouched_by_autograph
    def on_bare_step(self, grads_and_vars: GradsAndVars, is_reduced: bool) -> Tuple[GradsAndVars, bool]:
        """Record the step of an optimizer that does not accumulate. Returns its gradients, and whether reduced."""
        if not is_reduced and _replicas.count() > 1:
            variables = [var for _, var in grads_and_vars]

            def reduced(strategy: Any, grads: Any) -> Any:
                return _replicas.sum_over_replicas(strategy, list(zip(grads, variables)))

            grads = _replicas.across_replicas(reduced, [[grad for grad, _ in grads_and_vars]])
            grads_and_vars, is_reduced = list(zip(grads, variables)), True
        self.on_step(grads_and_vars)
        return grads_and_vars, is_reduced

    @_tf.untouched_by_autograph
    def end(self, logs: Any) -> None:
        """End a batch: add its loss, and forget a cycle that has ended without a step."""
        examples = _replicas.local_variable(self._batch).read_value()
        before, now = _replicas.local_variable(self._losses), self._losses_so_far()
        change = now - before.read_value()
        logged = logs.get("loss") if isinstance(logs, dict) else None
        logged = float("nan") if logged is None else tf.cast(tf.reduce_mean(logged), tf.float32)
        other = tf.stack([logged * examples, examples])
        # The metric of a loss adds up over an epoch: in between, something else may have used or reset it.
        change = tf.where(tf.equal(change[1], examples), change, tf.fill([2], float("nan")))
        change = tf.where(now[1] > 0.0, change, other)
        sums = _replicas.local_variable(self._sums)
        with tf.control_dependencies(_known([before.assign(now, read_value=False)])):
            sums.assign_add(as_vector(Sums(loss=change[0], loss_weight=change[1])), read_value=False)
        latest = sums.read_value()
        has_none = latest[Sums._fields.index("steps")] < 0.5
        is_over = tf.logical_and(has_none, tf.equal(self._optimizer.micro_step, 0))
        sums.assign(tf.where(is_over, tf.zeros_like(latest), latest), read_value=False)

    def _losses_so_far(self) -> tf.Tensor:
        """Return the sum and the weight of the losses in this epoch, from the metrics that track them."""
        found = _tf.loss_trackers(self._model)[:1] + [each for each in self._model.metrics if each.name == "loss"]
        means = {id(each): each for each in found if hasattr(each, "total") and hasattr(each, "count")}
        pairs = [
            tf.stack(
                [tf.cast(_replicas.local_variable(_tf.native(var)), tf.float32) for var in (each.total, each.count)]
            )
            for each in means.values()
        ]
        return tf.add_n(pairs) if pairs else tf.zeros([2])

    # ------------------------------------------------------------------------------------------------------------
    # Between batches

    def _parts(self, var: Any) -> List[tf.Variable]:
        return list(self._model.distribute_strategy.experimental_local_results(var))

    def begin_epoch(self) -> None:
        """Begin an epoch, for which Keras has reset its metrics."""
        for part in self._parts(self._losses):
            part.assign(tf.zeros_like(part))

    def collect(self) -> Tuple[List[Sums], int]:
        """Return the steps since the last call, summed over replicas, and the number of others that did not fit."""
        filled = int(self._parts(self._filled)[0].numpy())
        rows = np.stack([part[: min(filled, ROWS)].numpy() for part in self._parts(self._rows)]).astype(np.float64)
        latest = np.stack([part.numpy() for part in self._parts(self._sums)]).astype(np.float64)
        has_stepped = latest[0, Sums._fields.index("steps")] > 0.0
        if has_stepped:
            rows = np.concatenate([rows, latest[:, np.newaxis]], axis=1)
        self._clear(has_stepped or int(self._optimizer.micro_step) == 0)
        common = len(Sums._fields) - Sums._fields.index("steps")
        summed = np.concatenate([rows.sum(0)[:, :-common], rows[0][:, -common:]], axis=1)
        return [Sums(*map(float, row)) for row in summed], max(filled - ROWS, 0)

    def _clear(self, is_between_cycles: bool) -> None:
        for var in [self._filled] + ([self._sums] if is_between_cycles else []):
            for part in self._parts(var):
                part.assign(tf.zeros_like(part))


def _known(operations: Sequence[Any]) -> List[Any]:
    """Leave out what is None, as an assignment returns eagerly."""
    return [each for each in operations if each is not None]
