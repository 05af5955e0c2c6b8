"""The cycle of one layer's moving statistics, which follows a model's optimizer or counts the layer's own calls."""

import contextlib
import weakref
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple, Union

from accum import _tf
from accum._engine import _replicas
from accum._engine._listener import CycleListener
from accum._engine._moments import Moments, MomentsAccumulator, with_bessel
from accum._engine._replicas import local_variable, true_after
from accum._keras._internals import internals_of
from accum._keras._steps._optimizer_calls import Collector
from accum._tf import Scalar, Wait, tf


class MovingStatistics(_tf.tracking.CheckpointOnly, CycleListener):
    """Keep the moments of a cycle, and update a layer's `moving_mean` and `moving_variance` at its end.

    Args:
      layer: a built or unbuilt batch normalisation layer.
      accum_steps: calls per cycle, >= 1, if the layer does not follow an optimizer.

    Attributes:
      places: one `MomentsAccumulator` for each call of the layer in a micro step of a model, in order.
      alone: `MomentsAccumulator` of the calls that the layer counts itself, or None.
      calls: scalar per replica, the number of such calls in the current cycle, or None.
    """

    def __init__(self, layer: tf.keras.layers.Layer, accum_steps: int) -> None:
        super().__init__()
        self.places: List[MomentsAccumulator] = []
        self.alone: Any = None
        self.calls: tf.Variable = None
        # Hidden from checkpoints and from the list of a model's layers.
        self.__dict__["_layer"] = layer
        self.__dict__["accum_steps"] = accum_steps
        self.__dict__["_followed"] = {}  # replica -> (the optimizer whose micro step is running, calls so far)
        self.__dict__["_collectors"] = {}  # replica -> what takes over the moments of one micro-batch of a batch

    @property
    def is_passthrough(self) -> bool:
        """Whether a call of the layer on this replica should now run Keras' layer unmodified."""
        optimizer, _ = self._following()
        if self._collector is not None:
            return False
        return self.accum_steps == 1 if optimizer is None else internals_of(optimizer).is_passthrough

    @property
    def _collector(self) -> Optional[Collector]:
        return self._collectors.get(_replicas.replica_number())

    def weight_of(self) -> Optional[Callable[[], Scalar]]:
        """Return a function that returns the weight of this replica's micro-batch, or None if all weights are 1."""
        optimizer, _ = self._following()
        if optimizer is None or internals_of(optimizer).weight is None:
            return None
        # TensorFlow never releases the gradient function that this becomes a part of:
        reference = weakref.ref(optimizer)
        return lambda: internals_of(reference()).weight

    def follow(self, optimizer: Optional[tf.keras.optimizers.Optimizer], collector: Optional[Collector] = None) -> None:
        """Follow an accumulating optimizer from this replica's next call on; None: count the layer's calls again.

        Args:
          optimizer: a `GradientAccumulateOptimizer`, or None.
          collector: what takes the moments over, or None to keep them here.
        """
        self._followed[_replicas.replica_number()] = optimizer, 0
        self._collectors[_replicas.replica_number()] = collector

    @contextlib.contextmanager
    def collected_by(self, collector: Optional[Collector]) -> Iterator[None]:
        """Let `collector` take the moments over in this context."""
        before = self._collector
        self._collectors[_replicas.replica_number()] = collector
        try:
            yield
        finally:
            self._collectors[_replicas.replica_number()] = before

    def receive(self, moments: Moments) -> Wait:
        """Accumulate the moments of one call in training."""
        if self._collector is not None:
            self._collector.check_graph("calls batch normalization")
            self._collector.moments.append((self, moments))
            return None
        optimizer, number = self._following()
        if optimizer is None:
            return self._count(moments)
        self._followed[_replicas.replica_number()] = optimizer, number + 1
        internals_of(optimizer).add_listener(self)
        return self._accumulator_of_call(number).receive(moments)

    def receive_whole(self, moments: Moments) -> Wait:
        """Accumulate the moments of one call over all micro-batches of a batch, or update with them at once."""
        optimizer, _ = self._following()
        is_passthrough = optimizer is not None and internals_of(optimizer).is_passthrough
        return self._move([moments]) if is_passthrough else self.receive(moments)

    def _following(self) -> Tuple[Optional[tf.keras.optimizers.Optimizer], int]:
        return self._followed.get(_replicas.replica_number(), (None, 0))

    # ------------------------------------------------------------------------------------------------------------
    # Following an optimizer

    def on_micro_step(self, is_first: Union[bool, tf.Tensor]) -> Wait:
        self.follow(self._following()[0])
        return true_after([accumulator.keep(is_first) for accumulator in self.places])

    def on_step(self, is_first: Union[bool, tf.Tensor], has_latest: bool) -> Wait:
        self.follow(self._following()[0])
        return self._move([accumulator.whole(is_first, has_latest) for accumulator in self.places])

    def _accumulator_of_call(self, number: int) -> MomentsAccumulator:
        with tf.init_scope():
            if number == len(self.places):
                self.places.append(self._new_moments(f"place_{number}"))
        return self.places[number]

    # ------------------------------------------------------------------------------------------------------------
    # Counting the layer's own calls

    def _count(self, moments: Moments) -> Wait:
        """Keep the moments of a call; on the last call of a cycle, update the moving statistics."""
        self._begin_alone()
        calls = local_variable(self.calls)
        number = calls.read_value()
        is_last = number + 1.0 >= float(self.accum_steps)
        with tf.control_dependencies([self.alone.receive(moments)]):
            done = tf.cond(
                is_last,
                lambda: self._move([self.alone.whole(False, True)]),
                lambda: self.alone.keep(tf.equal(number, 0.0)),
            )
        with tf.control_dependencies([done]):
            return calls.assign(tf.where(is_last, 0.0, number + 1.0), read_value=False)

    def _begin_alone(self) -> None:
        with tf.init_scope():
            if self.alone is None:
                self.alone = self._new_moments("alone")
                self.calls = _tf.variables.new_statistic(self._layer.name + "/calls", [], tf.float32)

    def flush(self) -> Wait:
        """Update with an unfinished cycle of calls, if there is one. Returns an op or tensor to wait for, or None."""
        return self._end_cycle(lambda: self._move([self.alone.whole(False, False)]))

    def reset(self) -> Wait:
        """Discard an unfinished cycle of calls. Returns an op or tensor to wait for, or None."""
        return self._end_cycle(lambda: true_after([]))

    def _end_cycle(self, function: Callable[[], tf.Tensor]) -> Wait:
        if self.calls is None:
            return None
        return _replicas.across_replicas(lambda strategy: _replicas.on_each(strategy, self._on_end, [function]))

    def _on_end(self, function: Callable[[], tf.Tensor]) -> tf.Tensor:
        calls = local_variable(self.calls)
        done = tf.cond(calls.read_value() > 0.0, function, lambda: true_after([]))
        with tf.control_dependencies([done]):
            return true_after(calls.assign(0.0, read_value=False))

    # ------------------------------------------------------------------------------------------------------------
    # The state of a cycle, read and set outside any trace

    def begun(self, follows: bool) -> List[Moments]:
        """Return the `Moments` so far of an unfinished cycle.

        Args:
          follows: whether the layer follows a model; the list then has one entry per place.
        """
        if follows:
            return [kept.total for kept in self.places]
        return [self.alone.total] if self.calls_made() else []

    def calls_made(self) -> int:
        """Return how many calls the layer has counted in its own cycle."""
        return 0 if self.calls is None else int(self.calls.numpy())

    def resume(self, moments: Sequence[Any], micro_step: int, follows: bool) -> None:
        """Continue a cycle whose first `micro_step` micro-batches had the given `Moments`, as numbers and arrays."""
        if not follows:
            self._begin_alone()
            self.calls.assign(float(micro_step))
        for var, value in zip(self._accumulator_of_call(0).total if follows else self.alone.total, moments):
            var.assign(tf.cast(value, var.dtype))

    # ------------------------------------------------------------------------------------------------------------

    def _move(self, wholes: Sequence[Moments]) -> Wait:
        return move(self._layer, wholes)

    def _new_moments(self, name: str) -> MomentsAccumulator:
        mean = _tf.variables.native(self._layer.moving_mean)
        dtype = _tf.variables.at_least_float32(mean.dtype.base_dtype)
        return MomentsAccumulator(f"{self._layer.name}/{name}", mean.shape, dtype)


def move(layer: tf.keras.layers.Layer, wholes: Sequence[Moments]) -> Wait:
    """Update the moving statistics of a batch normalisation layer as Keras would, once for each of several batches.

    Args:
      layer: a layer of this library or of Keras.
      wholes: list of `Moments`, each of one batch. One that covers no value changes nothing.

    Returns:
      A tensor to wait for.
    """
    done = true_after([])
    for count, mean, variance in wholes:
        if _tf.batch_norm.records_unbiased_variance(layer):
            variance = with_bessel(variance, count)
        share = tf.where(count > 0.0, tf.constant(1.0 - layer.momentum, mean.dtype), tf.zeros([], mean.dtype))
        with tf.control_dependencies([done]):
            moved = [_moved(_tf.variables.native(layer.moving_mean), mean, share)]
            moved.append(_moved(_tf.variables.native(layer.moving_variance), variance, share))
            done = true_after(moved)
    return done


def _moved(variable: tf.Variable, value: tf.Tensor, share: tf.Tensor) -> tf.Operation:
    """Move a variable by a share of its distance to `value`, which may be NaN if the share is 0."""
    variable = local_variable(variable)
    way = tf.math.multiply_no_nan(tf.cast(variable.read_value(), value.dtype) - value, share)
    return variable.assign_sub(tf.cast(way, variable.dtype.base_dtype), read_value=False)
