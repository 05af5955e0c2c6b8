"""Batch normalisation whose moving statistics are updated once per cycle, as by the full batch (law L13).

`MovingStatistics` is the cycle of one layer: it follows a model's optimizer, or counts the layer's own calls. With
`BatchNormBarrier`, all micro-batches of a whole batch use the statistics of all of it (law L19).
"""

import contextlib
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

from accum import _check, _tf
from accum._engine import _replicas
from accum._engine._interfaces import CycleListener
from accum._engine._replicas import local_variable, true_after
from accum._engine._statistics import (
    Moments,
    MomentsAccumulator,
    Normalization,
    over_replicas,
    with_bessel,
    without_bessel,
)
from accum._engine._trace import Barrier, Marks
from accum._keras import _step_context
from accum._keras._optimizer._internals import internals_of
from accum._keras._steps._optimizer_calls import Collector
from accum._tf import Options, Scalar, Wait, tf
from accum._tf.types import Config

# --------------------------------------------------------------------------------------------------------------------
# Moving statistics


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
        self.__dict__["_optimizers"] = []  # weak references to those that it has followed
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
            self._collector.moments.append((moments, self.receive_whole))
            return None
        optimizer, number = self._following()
        if optimizer is None:
            return self._count(moments)
        self._followed[_replicas.replica_number()] = optimizer, number + 1
        internals = internals_of(optimizer)
        self._follow_alone(optimizer)
        internals.add_cycle_listener(self)
        train_step = _step_context.of_optimizer(optimizer).train_step
        if train_step is not None:
            train_step.note_moments(self._layer.name)
        return self._accumulator_of_call(number).receive(moments)

    def _follow_alone(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        """Warn if another optimizer, whose cycles the layer follows too, is in the middle of one."""
        self._optimizers[:] = [known for known in self._optimizers if known() is not None]
        known = [known() for known in self._optimizers]
        if not any(one is optimizer for one in known):
            self._optimizers.append(weakref.ref(optimizer))
        others = [one for one in known if one is not None and one is not optimizer]
        cycles = [internals_of(other).cycle for other in others]
        if any(cycle.is_built and cycle.is_in_cycle() for cycle in cycles):
            _check.warn(
                "A batch normalization layer is called in the middle of cycles of two optimizers, and would mix their "
                "moments: finish one of them before, by the last batch of its cycle or by `flush()`, or give each "
                f"model a layer of its own. Received: layer {self._layer.name!r}. [accum: batch-norm-layer]",
                _check.InexactWarning,
            )

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

    def on_step(self, is_first: Union[bool, tf.Tensor]) -> Wait:
        return self._end_of_followed([accumulator.whole(is_first) for accumulator in self.places])

    def on_flush(self) -> Wait:
        return self._end_of_followed([accumulator.without_latest() for accumulator in self.places])

    def _end_of_followed(self, wholes: Sequence[Moments]) -> Wait:
        self.follow(self._following()[0])
        moved = self._move(wholes)
        # A later cycle may not call the layer in training, because it was frozen.
        return true_after([accumulator.forget_latest(moved) for accumulator in self.places])

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
                lambda: self._move([self.alone.whole(False)]),
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
        return self._end_cycle(lambda: self._move([self.alone.without_latest()]))

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


# --------------------------------------------------------------------------------------------------------------------
# The layer


class AccumBatchNormalization(*_tf.batch_norm.BASES):  # type: ignore[misc]
    """Batch normalisation whose moving mean and variance are updated once per cycle, as by the full batch.

    The new mean and variance are

        count    = sum_i(n_i)
        mean     = sum_i(n_i mean_i) / count
        variance = sum_i(n_i variance_i) / count + sum_i(n_i (mean_i - mean)^2) / count

    over the micro-batches i of a cycle, where n_i is the number of values of micro-batch i. The variance is multiplied
    by Bessel's factor count / (count - 1) exactly when Keras' layer does so in the installed TensorFlow (rank 4; in
    newer versions, rank 5 too). The update is the one of Keras: moving = momentum * moving + (1 - momentum) * new.
    Inference runs Keras' code.

    Inside a `GradientAccumulateModel`, the layer ignores its own `accum_steps` and follows the model: it updates its
    statistics when the model makes a step, including a flushed one, and discards what the model drops or skips.
    Anywhere else it counts its own calls in training, and updates on every `accum_steps`-th call. `flush` and `reset`
    end such a cycle; in `fit`, `FlushCallback` calls them.

    Frequent questions:
      *Does training use the statistics of the full batch?* Only in a model with `micro_batch_size`, which needs no
      layer of this class (unless `whole_batch=()` opts out). Otherwise a forward pass can only normalise by the
      statistics of its own micro-batch, because the other micro-batches are not available yet. So the network
      trains like one whose batch size is that of the micro-batch ("ghost" batch normalisation), but its inference uses
      the statistics of the full batch. On the choice of batch statistics, and when they mislead, see Wu and Johnson,
      "Rethinking 'Batch' in BatchNorm", 2021, arXiv:2110.12484.
      *Is a different momentum enough?* Almost, for the mean: momentum^(1/K) decays as fast over K micro-batches. But
      the variance then lacks the variance between the micro-batches, a smaller micro-batch has the same weight as any
      other, and the micro-batches of one cycle, all computed with the same weights, contribute unequally.
      *What if several inputs share the layer?* In a `GradientAccumulateModel`, each call within the train step has its
      own statistics, and the layer is updated once for each call, in order, as Keras' layer would be. Alone, the layer
      counts every call as a micro-batch: multiply `accum_steps` by the number of calls, and it is updated once for all
      of them.

    Args:
      accum_steps: calls per cycle, >= 1, if the layer does not follow a model. 1 is equivalent to Keras' layer.
      *args: as for `tf.keras.layers.BatchNormalization`: `axis`, `momentum`, `epsilon`, …
      synchronized: whether to compute statistics over all replicas, in training and for the moving averages, like
        Keras' `SyncBatchNormalization`. Several replicas are then equivalent to one device that sees each micro-batch
        as a whole if all replicas have the same number of examples; in a `GradientAccumulateModel`, even if they
        have not. The cost is two small reductions over the replicas per call, forwards and backwards. False: each
        replica has its own statistics, and the moving averages are read as the mean over replicas, as in Keras' layer.
      **kwargs: as for `tf.keras.layers.BatchNormalization`.

    Call arguments:
      inputs: float tensor of any rank. Statistics are computed in float32 for 16-bit inputs.
      training: bool; None: Keras decides.
      mask: bool tensor, used if Keras' layer uses it.

    Raises:
      TypeError, ValueError: `accum_steps` is not an int >= 1; `renorm` or `virtual_batch_size` is given, whose
        statistics cannot equal those of the full batch; `fused=True` is combined with `synchronized=True`, which no
        fused kernel supports.

    Example:
      >>> layer = accum.AccumBatchNormalization(accum_steps=4, momentum=0.9)
    """

    def __init__(self, accum_steps: int = 1, *args: object, synchronized: bool = False, **kwargs: object) -> None:
        accum_steps = _check.accum_steps(accum_steps)
        _check_supported(kwargs)
        self.__dict__["_accum_captured"] = {}  # replica -> the statistics of its call in training
        super().__init__(*args, **(_unfused(kwargs) if synchronized else kwargs))
        self.__dict__["_accum_synchronized"] = bool(synchronized)
        self.__dict__["accum_statistics"] = MovingStatistics(self, accum_steps)
        _tf.tracking.track(self, self.accum_statistics, "accumulation")

    @property
    def accum_steps(self) -> int:
        """Calls per cycle, if the layer does not follow a model."""
        return self.accum_statistics.accum_steps

    def get_config(self) -> Config:
        """Return the config. `from_config` makes the same layer from it, without custom objects."""
        return dict(super().get_config(), accum_steps=self.accum_steps, synchronized=self._accum_synchronized)

    def flush(self) -> Wait:
        """Update the moving statistics with an unfinished cycle, if the layer counts its own calls."""
        return self.accum_statistics.flush()

    def reset(self) -> Wait:
        """Discard an unfinished cycle, if the layer counts its own calls."""
        return self.accum_statistics.reset()

    def __call__(self, *args: object, **kwargs: object) -> tf.Tensor:
        self._check_rank(args[0] if args else kwargs.get("inputs"))
        return super().__call__(*args, **kwargs)

    def _check_rank(self, inputs: tf.Tensor) -> None:
        """Raise unless the inputs have the rank of those of the first call, where Keras fails in many ways."""
        expected = getattr(self.input_spec, "ndim", None) if self.built else None
        shape = getattr(inputs, "shape", None)
        rank = shape.rank if isinstance(shape, tf.TensorShape) else None if shape is None else len(shape)
        if None not in (expected, rank) and rank != expected:
            raise ValueError(
                f"The inputs of {self.name!r} must have rank {expected}, as in its first call: use another layer, or "
                f"reshape inputs of several ranks to [values, features]. Received: inputs of shape {shape}."
                " [accum: batch-norm-layer]"
            )

    def call(
        self, inputs: tf.Tensor, training: Optional[Union[bool, tf.Tensor]] = None, mask: Optional[tf.Tensor] = None
    ) -> tf.Tensor:
        return self._accum_call(inputs, training, mask)

    @_tf.graphs.untouched_by_autograph
    def _accum_call(
        self, inputs: tf.Tensor, training: Optional[Union[bool, tf.Tensor]], mask: Optional[tf.Tensor]
    ) -> tf.Tensor:
        if not self.trainable or self.accum_statistics.is_passthrough or _tf.layers.is_no_real_call():
            return _tf.batch_norm.call_batch_norm(super().call, inputs, training, mask)
        if _tf.graphs.in_static_graph():
            raise ValueError(
                "In a static graph, no cycle can order the updates that Keras collects: `AccumBatchNormalization` "
                f"needs accum_steps=1 there. Received: accum_steps={self.accum_steps!r}. [accum: batch-norm-layer]"
            )
        if isinstance(training, tf.Tensor):
            return tf.cond(
                tf.cast(training, tf.bool),
                lambda: self._accum_call(inputs, True, mask),
                lambda: self._accum_call(inputs, False, mask),
            )
        with self._accum_capturing() as captured:
            outputs = _tf.batch_norm.call_batch_norm(super().call, inputs, training, mask)
        if captured:  # Keras' layer has computed statistics, so this was a call in training
            self.accum_statistics.receive(self._accum_moments(inputs, mask, captured))
        return outputs

    @contextlib.contextmanager
    def _accum_capturing(self) -> Iterator[Dict[str, tf.Tensor]]:
        """Capture the batch statistics of Keras' layer on this replica, instead of updating the moving statistics.

        The fused kernel applies the momentum itself; with momentum 0, its result is the batch statistic.
        """
        momentum, replica = self.momentum, _replicas.replica_number()
        captured: Dict[str, tf.Tensor] = {}
        self._accum_captured[replica] = captured
        self.__dict__["momentum"] = 0.0 if _tf.batch_norm.is_fused(self) else momentum
        try:
            yield captured
        finally:
            self.__dict__["momentum"] = momentum
            del self._accum_captured[replica]

    @property
    def accum_is_capturing(self) -> bool:
        """Whether the batch statistics of this replica are being captured."""
        return _replicas.replica_number() in self._accum_captured

    @property
    def _accum_moving_mean(self) -> tf.Variable:
        return _tf.variables.native(self.__dict__["moving_mean"])

    @property
    def _accum_dtype(self) -> tf.DType:
        """The dtype in which moments are computed: in Keras 3, the moving statistics may be 16-bit."""
        return _tf.variables.at_least_float32(self._accum_moving_mean.dtype.base_dtype)

    def _assign_new_value(self, variable: tf.Variable, value: tf.Tensor) -> Wait:
        if self._accum_capture(self._accum_name(variable), value):
            return value
        return super()._assign_new_value(variable, value)

    def _assign_moving_average(
        self, variable: tf.Variable, value: tf.Tensor, momentum: Scalar, inputs_size: Optional[tf.Tensor]
    ) -> Wait:
        if self._accum_capture(self._accum_name(variable), value):
            return value
        return super()._assign_moving_average(variable, value, momentum, inputs_size)

    def _calculate_mean_and_var(
        self, inputs: tf.Tensor, reduction_axes: Sequence[int], keep_dims: bool, **kwargs: object
    ) -> Tuple[tf.Tensor, tf.Tensor]:
        """Compute the statistics as Keras does, and combine them over replicas if `synchronized`."""

        def calculate(values: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
            return super(AccumBatchNormalization, self)._calculate_mean_and_var(
                values, reduction_axes, keep_dims, **kwargs
            )

        return self._accum_over_replicas(calculate, inputs, kwargs.get("mask"))

    def accum_hand_over(
        self, calculate: Callable[..., Tuple[tf.Tensor, tf.Tensor]], inputs: tf.Tensor, mask: Optional[tf.Tensor]
    ) -> Tuple[tf.Tensor, tf.Tensor]:
        """Compute and capture the statistics in Keras 3, whose own computation is `calculate(inputs, mask)`."""
        mean, variance = self._accum_over_replicas(lambda values: calculate(values, mask), inputs, mask)
        self._accum_capture("mean", mean)
        self._accum_capture("variance", variance)
        return mean, variance

    def _accum_over_replicas(
        self, calculate: Callable[..., Tuple[tf.Tensor, tf.Tensor]], inputs: tf.Tensor, mask: Optional[tf.Tensor]
    ) -> Tuple[tf.Tensor, tf.Tensor]:
        if not (self._accum_synchronized and _replicas.is_one_of_several()):
            return calculate(inputs)
        dtype = self._accum_dtype
        mean, variance = calculate(tf.cast(inputs, dtype))
        count = self._accum_count(inputs, mask)
        whole = over_replicas(Moments(count, mean, variance), self.accum_statistics.weight_of())
        self._accum_captured.get(_replicas.replica_number(), {}).update(
            {name: tf.stop_gradient(value) for name, value in whole._asdict().items()}
        )
        return tf.cast(whole.mean, inputs.dtype), tf.cast(whole.variance, inputs.dtype)

    def _accum_capture(self, name: str, value: tf.Tensor) -> bool:
        captured = self._accum_captured.get(_replicas.replica_number())
        if captured is None:
            return False
        # For an empty batch Keras passes zeros, even if other replicas have examples: keep what is already captured.
        captured.setdefault(name, tf.stop_gradient(value))
        return True

    def _accum_name(self, variable: tf.Variable) -> str:
        return "mean" if variable is self.__dict__["moving_mean"] else "variance"

    def _accum_moments(self, inputs: tf.Tensor, mask: Optional[tf.Tensor], captured: Dict[str, tf.Tensor]) -> Moments:
        dtype = self._accum_dtype
        count = captured["count"] if "count" in captured else self._accum_count(inputs, mask)
        shape = self._accum_moving_mean.shape
        mean, variance = (tf.reshape(tf.cast(captured[name], dtype), shape) for name in ("mean", "variance"))
        if _tf.batch_norm.records_unbiased_variance(self):
            variance = without_bessel(variance, count)
        return Moments(count, mean, variance)

    def _accum_count(self, inputs: tf.Tensor, mask: Optional[tf.Tensor]) -> tf.Tensor:
        """The number of values per feature, a scalar."""
        dtype = self._accum_dtype
        features = max(self._accum_moving_mean.shape.num_elements(), 1)
        count = tf.reduce_prod(tf.cast(tf.shape(inputs), dtype)) / features  # float, so that it cannot overflow
        if mask is not None and _tf.batch_norm.uses_mask(self):
            count *= _unmasked(tf.cast(mask, dtype))
            if _masks_features(self, inputs, mask):
                _check.warn(
                    f"The layer {self.name!r} weighs the statistics of micro-batches by how many values are not masked "
                    "in all features together, but its mask differs between these: let `axis` be the last one. "
                    f"Received: axis={self.axis}. [accum: batch-norm-layer]",
                    _check.InexactWarning,
                )
        return count


@contextlib.contextmanager
def batch_norm_following(
    optimizer: tf.keras.optimizers.Optimizer, model: tf.keras.Model, collector: Optional[Collector] = None
) -> Iterator[None]:
    """Let the batch normalisation in `model` follow `optimizer` within this context, which surrounds a train step.

    Args:
      optimizer: a `GradientAccumulateOptimizer`.
      model: a Keras model.
      collector: what takes the moments over, if the context is one micro-batch of a batch; or None.
    """
    layers = batch_norms_of(model)
    for layer in layers:
        layer.accum_statistics.follow(optimizer, collector)
    try:
        yield
    finally:
        for layer in layers:
            layer.accum_statistics.follow(None)


def batch_norms_of(model: tf.keras.Model) -> List[AccumBatchNormalization]:
    """Return every `AccumBatchNormalization` in a model, at any depth, once each."""
    return [layer for layer in _tf.models.layers_of(model) if isinstance(layer, AccumBatchNormalization)]


def _unfused(options: Options) -> Options:
    if options.get("fused"):
        raise ValueError("`fused` must not be True with `synchronized=True`: leave it out. Received: fused=True.")
    return _tf.batch_norm.unfused(options)


def _check_supported(options: Options) -> None:
    reasons = {
        "renorm": "it normalises by moving statistics that change within a cycle, so no full batch is equivalent",
        "virtual_batch_size": "the examples that share a virtual batch would depend on how the batch was split",
    }
    for name, reason in reasons.items():
        if options.get(name):
            raise ValueError(
                f"`AccumBatchNormalization` does not support `{name}`: {reason}. Received: {name}={options[name]!r}."
                " [accum: batch-norm-layer]"
            )


_tf.optimizers.register_keras_class(AccumBatchNormalization, "AccumBatchNormalization")


# --------------------------------------------------------------------------------------------------------------------
# The barrier in a whole batch


class BatchNormBarrier(Barrier):
    """One call of a batch normalisation layer in training.

    Args:
      layer: a built `tf.keras.layers.BatchNormalization`, of Keras' class or this library's.
      order: which of the calls of the model this is.
    """

    def __init__(self, layer: tf.keras.layers.Layer, order: int) -> None:
        self.order = order
        self._layer = layer

    def call(self, inputs: tf.Tensor, mask: Optional[tf.Tensor], marks: Marks) -> tf.Tensor:
        """Return what the layer returns of a micro-batch, by the statistics of the batch."""
        layer = self._layer
        dtype = _tf.models.compute_dtype_of(layer)
        inputs = tf.convert_to_tensor(inputs)
        exact = _tf.variables.at_least_float32(dtype)
        values = tf.cast(tf.cast(inputs, dtype), exact)
        rank = inputs.shape.rank
        features = [axis % rank for axis in _listed(layer.axis)]
        # With several axes, Keras keeps the others with length 1.
        shape = _tf.variables.native(layer.moving_mean).shape.as_list()
        rule = Normalization(tuple(axis for axis in range(rank) if axis not in features), rank, shape)
        taken, count = self._taken(values, mask, rule.count(values))

        def gradient(values: tf.Tensor, whole: Moments, by_mean: tf.Tensor, by_variance: tf.Tensor) -> tf.Tensor:
            return rule.gradient(values, whole, by_mean, by_variance, taken)

        behind, whole = marks.at_barrier(
            self, inputs, values, lambda values: rule.moments(values, count, taken), gradient
        )
        values = tf.cast(tf.cast(behind, dtype), exact)
        gamma = tf.cast(_tf.variables.native(layer.gamma), exact) if layer.scale else None
        beta = tf.cast(_tf.variables.native(layer.beta), exact) if layer.center else None
        epsilon = float(_tf.batch_norm.epsilon_of(layer))
        outputs = rule.normalized(values, whole.mean, whole.variance, gamma, beta, epsilon, marks.require_end)
        return tf.cast(outputs, dtype)

    def receive(self, whole: Moments) -> None:
        if isinstance(self._layer, AccumBatchNormalization):
            self._layer.accum_statistics.receive_whole(whole)
        else:
            move(self._layer, [whole])

    def moved(self) -> List[tf.Variable]:
        layer = self._layer
        is_own = isinstance(layer, AccumBatchNormalization)
        return [] if is_own else list(map(_tf.variables.native, (layer.moving_mean, layer.moving_variance)))

    def _taken(
        self, values: tf.Tensor, mask: Optional[tf.Tensor], count: tf.Tensor
    ) -> Tuple[Optional[tf.Tensor], tf.Tensor]:
        """Return 1 or 0 for what counts or is masked, None without a mask, and the number of values of a feature."""
        if mask is None or not _tf.batch_norm.uses_mask(self._layer):
            return None, count
        mask = tf.cast(mask, values.dtype)
        ones = tf.ones([values.shape.rank - mask.shape.rank], tf.int32)
        return tf.reshape(mask, tf.concat([tf.shape(mask), ones], axis=0)), count * _unmasked(mask)


def _unmasked(mask: tf.Tensor) -> tf.Tensor:
    """Return which share of all values counts, more than 0 if there are any: in Keras, statistics of none are 0."""
    counted = tf.maximum(tf.reduce_sum(mask), 1e-7)
    return tf.math.divide_no_nan(counted, tf.cast(tf.size(mask), mask.dtype))


def _listed(axis: Union[int, Sequence[int]]) -> List[int]:
    return [int(one) for one in axis] if hasattr(axis, "__iter__") else [int(axis)]


def _masks_features(layer: tf.keras.layers.Layer, inputs: tf.Tensor, mask: Optional[tf.Tensor]) -> bool:
    """Whether a mask of inputs differs between their features."""
    if mask is None or not _tf.batch_norm.uses_mask(layer):
        return False
    rank, rank_of_mask = (tf.TensorShape(one.shape).rank for one in (inputs, mask))
    return any(axis % rank < (rank_of_mask or rank - 1) for axis in _listed(layer.axis))


def refusal_of(layer: tf.keras.layers.Layer, inputs: tf.Tensor, mask: Optional[tf.Tensor]) -> Optional[str]:
    """Return why a batch normalisation layer can't be a barrier, or None."""
    if _masks_features(layer, inputs, mask):
        return "its mask differs between its features"
    is_supported = _tf.batch_norm.is_plain(layer) or type(layer) is AccumBatchNormalization
    if not is_supported:
        return "its class is not known, and may compute something else"
    for name in ("renorm", "virtual_batch_size"):
        if getattr(layer, name, None):
            return f"`{name}` normalises by other statistics"
    return None
