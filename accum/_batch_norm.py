"""Batch normalisation whose moving statistics move once a cycle, to what the full batch would have recorded (L13)."""

import contextlib

from accum import _check, _replicas, _tf
from accum._moments import Moments, over_replicas, without_bessel
from accum._moving import MovingStatistics
from accum._tf import tf


class AccumBatchNormalization(*_tf.BATCH_NORM_BASES):  # type: ignore[misc]
    """Batch normalisation whose moving mean and variance move once a cycle, as those of the full batch.

        count    = sum_i(n_i)
        mean     = sum_i(n_i mean_i) / count
        variance = sum_i(n_i variance_i) / count + sum_i(n_i (mean_i - mean)^2) / count

    over the cycle's micro-batches, n_i the number of values of micro-batch i; the variance then gets Bessel's factor
    count / (count - 1) exactly where Keras' own layer of this TensorFlow has it (rank 4; rank 5 on newer lines). What
    follows is Keras' own: moving = momentum * moving + (1 - momentum) * new. Inference is Keras' own code.

    Inside a `GradientAccumulateModel` the layer follows the model's clock, whatever its own `accum_steps`: it moves
    when the model makes a step, a flushed one included, and forgets what the model drops or skips. Anywhere else it
    counts its own calls in training, and moves on every `accum_steps`-th; `flush` and `reset` end such a cycle, and
    `FlushCallback` calls them in `fit`.

    What people ask:
      *Does training see the full batch?* No. A forward pass normalises by its own micro-batch's statistics, as it must:
      the other micro-batches are not there yet. So a network with batch normalisation trains as one with batches of
      the micro-batch's size do ("ghost" batch normalisation), while what it infers with is that of the full batch. Of
      which batch statistics to take, and when they mislead: Wu and Johnson, "Rethinking 'Batch' in BatchNorm", 2021,
      arXiv:2110.12484.
      *Would a lower momentum do?* Almost, for the mean: momentum^(1/K) forgets as fast over K micro-batches. The
      variance misses the variance between the micro-batches, a ragged micro-batch weighs as much as any other, and
      the average is taken over activations of a network that a cycle has not moved, in unequal parts.
      *A layer shared by several inputs?* In a `GradientAccumulateModel`, each call within the train step has statistics
      of its own, and the layer moves once for each in their order, as Keras' layer would. Alone, every call counts as
      a micro-batch: give it `accum_steps` times the number of calls, and it moves once for all of them.

    Args:
      accum_steps: int >= 1, the calls a cycle, where no model's clock is followed. 1 is Keras' layer.
      *args: as `tf.keras.layers.BatchNormalization` takes them: `axis`, `momentum`, `epsilon`, …
      synchronized: whether statistics are those of all replicas together, in training and in the moving averages, as
        those of Keras' `SyncBatchNormalization` are: replicas x micro-batches then equal one device that sees each
        micro-batch whole, where replicas are equal, and in a `GradientAccumulateModel` where they are not. It costs two
        small reductions over the replicas a call, forwards and backwards. False: each replica has its own, and the
        moving averages are read as their mean, as those of Keras' layer are.
      **kwargs: as `args`.

    Call arguments:
      inputs: float tensor of any rank, 16-bit ones included: statistics are float32.
      training: bool; None: what Keras says.
      mask: bool tensor, used where Keras' own layer uses it.

    Raises:
      TypeError, ValueError: `accum_steps` is no int >= 1; `renorm` or `virtual_batch_size` is asked for, which have no
        statistics of the full batch to be equal to; `fused=True` with `synchronized`, which no fused kernel can be.

    Example:
      >>> layer = accum.AccumBatchNormalization(accum_steps=4, momentum=0.9)
    """

    def __init__(self, accum_steps=1, *args, synchronized=False, **kwargs):
        accum_steps = _check.accum_steps(accum_steps)
        _check_supported(kwargs)
        self.__dict__["_accum_captured"] = {}  # replica -> the statistics of its call in training
        super().__init__(*args, **(_unfused(kwargs) if synchronized else kwargs))
        self.__dict__["_accum_synchronized"] = bool(synchronized)
        self.__dict__["accum_statistics"] = MovingStatistics(self, accum_steps)
        _tf.track(self, self.accum_statistics, "accumulation")

    @property
    def accum_steps(self):
        """The calls a cycle, where no model's clock is followed."""
        return self.accum_statistics.accum_steps

    def get_config(self):
        """The config, from which `from_config` makes the same layer without custom objects."""
        return dict(super().get_config(), accum_steps=self.accum_steps, synchronized=self._accum_synchronized)

    def flush(self):
        """Move the moving statistics by the unfinished cycle of calls that the layer counted by itself, if any."""
        return self.accum_statistics.flush()

    def reset(self):
        """Discard the unfinished cycle of calls that the layer counted by itself."""
        return self.accum_statistics.reset()

    def call(self, inputs, training=None, mask=None):
        return self._accum_call(inputs, training, mask)

    @_tf.untouched_by_autograph
    def _accum_call(self, inputs, training, mask):
        if not self.trainable or self.accum_statistics.is_bare or _tf.is_no_real_call():
            return _tf.call_batch_norm(super().call, inputs, training, mask)
        if _tf.in_static_graph():
            raise ValueError(
                "In a static graph no cycle can order the updates that Keras collects: `AccumBatchNormalization` takes "
                "accum_steps=1 there. Received: accum_steps={!r}.".format(self.accum_steps)
            )
        if isinstance(training, tf.Tensor):
            return tf.cond(
                tf.cast(training, tf.bool),
                lambda: self._accum_call(inputs, True, mask),
                lambda: self._accum_call(inputs, False, mask),
            )
        with self._accum_capturing() as captured:
            outputs = _tf.call_batch_norm(super().call, inputs, training, mask)
        if captured:  # Keras' layer has computed statistics, so this was a call in training
            self.accum_statistics.receive(self._accum_moments(inputs, mask, captured))
        return outputs

    @contextlib.contextmanager
    def _accum_capturing(self):
        """Have Keras' layer hand over this replica's statistics of the batch, in the place of moving by them.

        The fused kernel moves by itself; where it is told to move all of the way, Keras hands over what it computed.
        """
        momentum, replica = self.momentum, _replicas.replica_number()
        captured = self._accum_captured[replica] = {}
        self.__dict__["momentum"] = 0.0 if _tf.is_fused(self) else momentum
        try:
            yield captured
        finally:
            self.__dict__["momentum"] = momentum
            del self._accum_captured[replica]

    @property
    def accum_is_capturing(self):
        """Whether this replica's statistics are being handed over."""
        return _replicas.replica_number() in self._accum_captured

    @property
    def _accum_moving_mean(self):
        return _tf.native(self.__dict__["moving_mean"])

    @property
    def _accum_dtype(self):
        """In which moments are computed: in Keras 3 the moving statistics themselves may be of 16 bits."""
        return _tf.at_least_float32(self._accum_moving_mean.dtype.base_dtype)

    def _assign_new_value(self, variable, value):
        if self._accum_capture(self._accum_name(variable), value):
            return value
        return super()._assign_new_value(variable, value)

    def _assign_moving_average(self, variable, value, momentum, inputs_size):
        if self._accum_capture(self._accum_name(variable), value):
            return value
        return super()._assign_moving_average(variable, value, momentum, inputs_size)

    def _calculate_mean_and_var(self, inputs, reduction_axes, keep_dims, **kwargs):
        """Keras' own computation, then taken together with those of the other replicas where that is asked for."""

        def calculate(values):
            return super(AccumBatchNormalization, self)._calculate_mean_and_var(
                values, reduction_axes, keep_dims, **kwargs
            )

        return self._accum_over_replicas(calculate, inputs, kwargs.get("mask"))

    def accum_hand_over(self, calculate, inputs, mask):
        """The same in Keras 3, of which this is all: `calculate(inputs, mask)` is its own."""
        mean, variance = self._accum_over_replicas(lambda values: calculate(values, mask), inputs, mask)
        self._accum_capture("mean", mean)
        self._accum_capture("variance", variance)
        return mean, variance

    def _accum_over_replicas(self, calculate, inputs, mask):
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

    def _accum_capture(self, name, value):
        captured = self._accum_captured.get(_replicas.replica_number())
        if captured is None:
            return False
        # Of an empty batch Keras makes zeros, also where other replicas have given some examples.
        captured.setdefault(name, tf.stop_gradient(value))
        return True

    def _accum_name(self, variable):
        return "mean" if variable is self.__dict__["moving_mean"] else "variance"

    def _accum_moments(self, inputs, mask, captured):
        dtype = self._accum_dtype
        count = captured["count"] if "count" in captured else self._accum_count(inputs, mask)
        shape = self._accum_moving_mean.shape
        mean, variance = (tf.reshape(tf.cast(captured[name], dtype), shape) for name in ("mean", "variance"))
        if _tf.records_unbiased_variance(self):
            variance = without_bessel(variance, count)
        return Moments(count, mean, variance)

    def _accum_count(self, inputs, mask):
        """The number of values a feature, a scalar."""
        dtype = self._accum_dtype
        features = max(self._accum_moving_mean.shape.num_elements(), 1)
        count = tf.cast(tf.size(inputs, out_type=tf.int64), dtype) / features
        if mask is not None and _tf.uses_mask(self):
            unmasked = tf.reduce_sum(tf.cast(mask, dtype))
            count *= tf.math.divide_no_nan(unmasked, tf.cast(tf.size(mask), dtype))  # of no example there is no mean
        return count


@contextlib.contextmanager
def on_the_clock_of(optimizer, model):
    """Let the batch normalisation in `model` follow `optimizer` in the train step within."""
    layers = batch_norms_of(model)
    for layer in layers:
        layer.accum_statistics.follow(optimizer)
    try:
        yield
    finally:
        for layer in layers:
            layer.accum_statistics.follow(None)


def batch_norms_of(model):
    """Every `AccumBatchNormalization` in a model, however deep, once each."""
    return [layer for layer in _tf.layers_of(model) if isinstance(layer, AccumBatchNormalization)]


def _unfused(options):
    if options.get("fused"):
        raise ValueError("No fused kernel can be `synchronized`: leave `fused` out. Received: fused=True.")
    return _tf.unfused(options)


def _check_supported(options):
    reasons = {
        "renorm": "it normalises by moving statistics that move within a cycle, so no full batch is equal to it",
        "virtual_batch_size": "which examples share a virtual batch would depend on how the batch was split",
    }
    for name, reason in reasons.items():
        if options.get(name):
            raise ValueError(
                "`AccumBatchNormalization` takes no `{}`: {}. Received: {}={!r}.".format(
                    name, reason, name, options[name]
                )
            )


_tf.register_keras_class(AccumBatchNormalization, "AccumBatchNormalization")
