"""Batch normalisation whose moving statistics are updated once per cycle, as by the full batch (law L13)."""

import contextlib
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

from accum import _check, _tf
from accum._engine import _replicas
from accum._engine._moments import Moments, over_replicas, without_bessel
from accum._keras._batch_norm._moving_statistics import MovingStatistics
from accum._keras._steps._optimizer_calls import Collector
from accum._tf import Options, Scalar, Wait, tf
from accum._tf.types import Config


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
      *Does training use the statistics of the full batch?* No. A forward pass can only normalise by the statistics of
      its own micro-batch, because the other micro-batches are not available yet. So the network trains like one whose
      batch size is that of the micro-batch ("ghost" batch normalisation), but its inference uses the statistics of the
      full batch. On the choice of batch statistics, and when they mislead, see Wu and Johnson, "Rethinking 'Batch' in
      BatchNorm", 2021, arXiv:2110.12484.
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
                f"needs accum_steps=1 there. Received: accum_steps={self.accum_steps!r}."
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
            unmasked = tf.reduce_sum(tf.cast(mask, dtype))
            count *= tf.math.divide_no_nan(unmasked, tf.cast(tf.size(mask), dtype))  # no mean over 0 elements
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
            )


_tf.optimizers.register_keras_class(AccumBatchNormalization, "AccumBatchNormalization")
