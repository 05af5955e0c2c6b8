"""Measure the memory and the time of a batch for each size of micro-batches."""

import time
from typing import Iterator, List, NamedTuple, Optional

from accum import _tf
from accum._keras._model._model import GradientAccumulateModel
from accum._keras._steps._measured_size import Peaks
from accum._keras._steps._out_of_memory import AutoSizedSteps, Trial, begun
from accum._tf import Data, tf


class SizeRow(NamedTuple):
    """What was measured with one size of micro-batches.

    Attributes:
      size: the number of examples that were computed at once.
      peak: bytes; an estimate if `seconds` is None.
      seconds: for each example; None if the size was not tried.
      fits: whether the peak is at most the limit.
      limit: bytes that may be used.
      memory: the kind of memory.
    """

    size: int
    peak: float
    seconds: Optional[float]
    fits: bool
    limit: int
    memory: str


def measured_sizes(model: tf.keras.Model, batch: Data, memory_limit: Optional[int] = None) -> List[SizeRow]:
    """Compute the gradients of a batch with micro-batches of 1, 2, 4, … examples, up to the first that will not fit.

    Args:
      model: a compiled `tf.keras.Model`, whose variables are as before in the end.
      batch: what `fit` gives to a train step.
      memory_limit: bytes, as for `GradientAccumulateModel`.

    Raises:
      ValueError: memory can't be measured on this platform, or not for this model.
    """
    if model.distribute_strategy.num_replicas_in_sync > 1:
        raise ValueError(
            "A model of several replicas can't be measured here. Build it outside of the scope of its strategy, and "
            "divide --batch-size by the number of replicas."
        )
    if isinstance(model, GradientAccumulateModel) and model._accum.size.tokens is not None:
        raise ValueError(
            "A model with `micro_batch_tokens` has no size of micro-batches in examples. Return it without that option."
        )
    if not isinstance(model, GradientAccumulateModel):
        model = GradientAccumulateModel.from_model(model, micro_batch_size="auto")
    gauges = _tf.memory.gauges(memory_limit)
    if not gauges:
        raise ValueError("The peak of memory can't be measured on this platform, or its limit is not known.")
    with model.distribute_strategy.scope():
        return _rows(AutoSizedSteps(model), batch, gauges)


def _rows(steps: AutoSizedSteps, batch: Data, gauges: List[_tf.Gauge]) -> List[SizeRow]:
    rows: List[SizeRow] = []
    with steps.trying(batch) as trial:
        gauge = _tightest(gauges, trial)
        peaks, fits = Peaks(gauge.now(), gauge.limit), True
        for size in _sizes_up_to(trial.examples):
            fits = fits and (not rows or peaks.expected(size) <= gauge.limit)
            seconds = None
            if fits:
                gauge.begin()
                fits = trial.compute(size, trial.examples)
                start = time.perf_counter()
                if fits and trial.compute(size, trial.examples):
                    seconds = (time.perf_counter() - start) / trial.examples
                peaks.add(size, gauge.peak())
            peak = peaks.expected(size)
            fits = fits and peak <= gauge.limit
            rows.append(SizeRow(size, peak, seconds, fits, gauge.limit, gauge.name))
    return rows


def _tightest(gauges: List[_tf.Gauge], trial: Trial) -> _tf.Gauge:
    """Return the gauge with the least memory left, after everything is allocated once."""
    earlier = begun(gauges)
    trial.compute(1, min(2, trial.examples))
    usable = [gauge for gauge, peak in zip(gauges, earlier) if not gauge.is_blind(peak)]
    if not usable:
        raise ValueError("This process has used more memory before than it may now, which hides the peak of a batch.")
    return min(usable, key=lambda one: one.limit - one.now())


def _sizes_up_to(count: int) -> Iterator[int]:
    """Yield 1, 2, 4, … below `count`, and `count`."""
    size = 1
    while size < count:
        yield size
        size *= 2
    yield count
