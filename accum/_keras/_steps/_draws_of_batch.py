"""The random numbers of a batch that a model computes in micro-batches (law L20)."""

import contextlib
from typing import Any, Callable, Iterator, List

from accum import _check, _tf
from accum._engine import _replicas
from accum._engine._draws import Draws, random_seed
from accum._engine._micro_batches import FIRST, MicroBatches
from accum._keras._callbacks import accumulating_optimizers
from accum._tf import tf


def seed_of_step(model: Any) -> Any:
    """Return the seed of a batch that is trained on, an int64 tensor of shape [2], or None in eager execution.

    It is a function of the program's seed and of the step, if the program has a seed: also after a restart.
    """
    if tf.executing_eagerly() or _tf.seed_of_graph() is None:
        return random_seed()
    optimizer = accumulating_optimizers(model)[0]
    with _tf.on_host():
        step = tf.cast(_tf.native(optimizer.iterations), tf.int64) * 2**20 + tf.cast(optimizer.micro_step, tf.int64)
        return tf.stack([tf.constant(_tf.seed_of_graph(), tf.int64), step])


class BatchDraws:
    """What a model draws for the micro-batches of a batch.

    In Keras 3, each draw takes its seed from a variable and advances it. Here each micro-batch begins with the seeds
    of the batch, so they advance once.

    Args:
      model: a `GradientAccumulateModel`.
      micro_batches: `MicroBatches`.
      seed: function that returns the seed of the batch, as for `Draws`.
    """

    def __init__(self, model: Any, micro_batches: MicroBatches, seed: Callable[[], Any]) -> None:
        self._noises = model._accum.noises
        self._micro = micro_batches
        self._seeds: List[Any] = []
        self._draws: Any = None
        if tf.executing_eagerly():
            self._warn(model)
            return
        self._seeds = [_replicas.local_variable(_tf.native(var)) for var in _tf.seeds_of(model)]
        self._before = [tf.identity(var.read_value()) for var in self._seeds]
        self._draws = Draws(seed(), micro_batches.batch.count, micro_batches.compiled)

    @contextlib.contextmanager
    def of(self, index: Any) -> Iterator[None]:
        """Let the model draw the numbers of a micro-batch in this context."""
        if self._draws is None:
            with self._noises.drawing():
                yield
            return
        for var, value in zip(self._seeds, self._before) if index is not FIRST else ():
            var.assign(value)
        with self._draws.of(self._micro.begin(index), self._micro.size_of(index)):
            yield

    def _warn(self, model: Any) -> None:
        if (_tf.seeds_of(model) or self._noises.counters) and model._accum.is_first_time("eager draws"):
            _check.warn(
                "Eagerly, dropout and noise draw other numbers for each size of micro-batches: compile without "
                "`run_eagerly` for the numbers of the whole batch."
            )
