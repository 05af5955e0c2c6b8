"""The moving statistics of one batch normalisation layer, which follow the cycle (law L13)."""

from typing import Any, Callable, Dict, List, NamedTuple, Union

from accum._engine._interfaces import CycleListener, OptimizerAdapter
from accum._engine._statistics import Moments, pooled, so_far, with_bessel, without_bessel
from accum._tf import tf
from accum.compat.v1._every_run import note_moves
from accum.compat.v1._update_ops import Average


class Use(NamedTuple):
    """One call of a layer: the averages that it updates, and the variables for its moments over a cycle."""

    mean: Average
    variance: Average
    total: Moments

    @property
    def here(self) -> Moments:
        """The moments of the current micro-batch."""
        return moments_of(self.mean, self.variance)

    @property
    def stored(self) -> Moments:
        return Moments(*[var.read_value() for var in self.total])


class MovingAverages(CycleListener):
    """Accumulate the moments of one layer over the micro-batches of a cycle, and update its moving averages.

    A layer that is called several times in a graph has moments for each call. Each moves the averages, in order.

    Args:
      adapter: an `OptimizerAdapter`, which creates the variables, colocated with the averages.
    """

    def __init__(self, adapter: OptimizerAdapter) -> None:
        self._adapter = adapter
        self._uses: List[Use] = []

    def is_of(self, mean: Average) -> bool:
        """Whether these are the statistics of the layer that updates the average `mean`."""
        return any(use.mean.var is mean.var for use in self._uses)

    def add(self, mean: Average, variance: Average) -> None:
        """Add a call of the layer, from the `Average`s that it updates."""
        number = f"_{len(self._uses)}" if self._uses else ""

        def buffer(average: Average, name: str, shape: tf.TensorShape) -> tf.Variable:
            return self._adapter.buffer(average.var, name + number, shape, average.var.dtype.base_dtype)

        total = Moments(
            count=buffer(mean, "accum_count", tf.TensorShape([])),
            mean=buffer(mean, "accum", mean.var.shape),
            variance=buffer(variance, "accum", variance.var.shape),
        )
        self._uses.append(Use(mean, variance, total))

    def on_micro_step(self, is_first: Union[bool, tf.Tensor]) -> Any:
        return tf.group(*[_keep(use, is_first) for use in self._uses])

    def on_step(self, is_first: Union[bool, tf.Tensor]) -> Any:
        return self._moved_to(lambda use: _whole(use, is_first))

    def on_flush(self) -> Any:
        return self._moved_to(lambda use: use.stored)

    def _moved_to(self, moments: Callable[[Use], Moments]) -> Any:
        """Move the averages of all uses in turn."""
        done: List[tf.Operation] = []
        for use in self._uses:
            with tf.control_dependencies(done):
                done = moves(use.mean, use.variance, moments(use))
        return tf.group(*done)


def _whole(use: Use, is_first: Union[bool, tf.Tensor]) -> Moments:
    return pooled(so_far(use.stored, is_first), use.here)


def _keep(use: Use, is_first: Union[bool, tf.Tensor]) -> tf.Operation:
    whole = _whole(use, is_first)
    with tf.control_dependencies(list(whole)):
        return tf.group(*[var.assign(value, read_value=False) for var, value in zip(use.total, whole)])


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


class MovesInTurn:
    """Adds ops that move averages to UPDATE_OPS. A layer that was called several times moves its averages in turn.

    Nothing else would order them, and one move would overwrite the other.
    """

    def __init__(self) -> None:
        self._latest: Dict[int, List[tf.Operation]] = {}

    def add(self, mean: Average, variance: Average, whole: Moments) -> None:
        """Move the averages of a layer to the moments `whole`, after the earlier moves of the same averages."""
        with tf.control_dependencies(self._latest.get(id(mean.var), [])):
            self._latest[id(mean.var)] = moves(mean, variance, whole)
        for var, move in zip([mean.var, variance.var], self._latest[id(mean.var)]):
            note_moves(var, [move])
            tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.UPDATE_OPS, move)


def _move(average: Average, value: tf.Tensor) -> tf.Operation:
    """Create the op average -= (average - value) * decay, as the layer does."""
    delta = average.var.read_value() - tf.cast(value, average.var.dtype.base_dtype)
    # A layer that does not train has decay 0. On TF 1.15, its value is then uninitialised memory.
    delta = tf.math.multiply_no_nan(delta, average.decay)
    return average.var.assign_sub(delta, use_locking=True, read_value=False)  # `still` says why
