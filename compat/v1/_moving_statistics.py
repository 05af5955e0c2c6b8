"""The moving statistics of one batch normalisation layer, which follow the cycle (law L13)."""

from typing import Any, List, Union

from accum._engine._interfaces import CycleListener, OptimizerAdapter
from accum._engine._statistics import Moments, pooled, so_far, with_bessel, without_bessel
from accum._tf import tf
from accum.compat.v1._update_ops import Average


class MovingStatistics(CycleListener):
    """Accumulate the moments of one layer over the micro-batches of a cycle, and update its moving averages.

    Args:
      mean, variance: the `Average`s of one layer.
      adapter: an `OptimizerAdapter`, which creates the variables, colocated with the averages.
    """

    def __init__(self, mean: Average, variance: Average, adapter: OptimizerAdapter) -> None:
        self._mean = mean
        self._variance = variance
        self._total = Moments(
            count=adapter.buffer(mean.var, "accum_count", tf.TensorShape([]), mean.var.dtype.base_dtype),
            mean=adapter.buffer(mean.var, "accum", mean.var.shape, mean.var.dtype.base_dtype),
            variance=adapter.buffer(variance.var, "accum", variance.var.shape, variance.var.dtype.base_dtype),
        )

    def on_micro_step(self, is_first: Union[bool, tf.Tensor]) -> Any:
        whole = pooled(so_far(self._stored(), is_first), self._here())
        with tf.control_dependencies(list(whole)):
            return tf.group(*[var.assign(value, read_value=False) for var, value in zip(self._total, whole)])

    def on_step(self, is_first: Union[bool, tf.Tensor], has_latest: bool) -> Any:
        whole = so_far(self._stored(), is_first)
        if has_latest:
            whole = pooled(whole, self._here())
        return tf.group(*moves(self._mean, self._variance, whole))

    def _here(self) -> Moments:
        """Return the moments of the current micro-batch."""
        return moments_of(self._mean, self._variance)

    def _stored(self) -> Moments:
        return Moments(*[var.read_value() for var in self._total])


def moments_of(mean: Average, variance: Average) -> Moments:
    """Return the moments of what one layer normalises, from the `Average`s that it updates."""
    size = tf.size(mean.inputs, out_type=tf.int64) // tf.size(mean.value, out_type=tf.int64)
    count = tf.cast(size, mean.value.dtype)
    uncorrected = without_bessel(variance.value, count) if variance.is_corrected else variance.value
    return Moments(count, mean.value, uncorrected)


def moves(mean: Average, variance: Average, whole: Moments) -> List[tf.Operation]:
    """Create the ops that move the averages of one layer to the moments of a whole batch, as the layer does."""
    corrected = with_bessel(whole.variance, whole.count) if variance.is_corrected else whole.variance
    return [_move(mean, whole.mean), _move(variance, corrected)]


def _move(average: Average, value: tf.Tensor) -> tf.Operation:
    """Create the op average -= (average - value) * decay, as the layer does."""
    delta = average.var.read_value() - tf.cast(value, average.var.dtype.base_dtype)
    # A layer that does not train has decay 0. On TF 1.15, its value is then uninitialised memory.
    delta = tf.math.multiply_no_nan(delta, average.decay)
    return average.var.assign_sub(delta, use_locking=True, read_value=False)  # `still` says why
