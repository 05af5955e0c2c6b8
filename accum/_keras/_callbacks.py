"""Callbacks that end unfinished cycles at the end of an epoch, and that set the cycle length by epoch."""

from typing import Any, Dict, List, Optional, Tuple

from accum import _check, _tf
from accum._keras._batch_norm._layer import batch_norms_of
from accum._keras._model._options import LAST_CYCLE
from accum._keras._optimizer._internals import accumulation_of
from accum._keras._optimizer._wrapper import (
    GradientAccumulateOptimizer,
    accumulating_optimizers,
    wrapped_by,
)
from accum._tf import Logs, tf
from accum._tf.types import LastCycle


def _cycles_of(model: tf.keras.Model) -> List[Any]:
    """Return the parts of a model that have cycles: accumulating optimizers, and batch normalisation layers."""
    layers = batch_norms_of(model)
    optimizer = _tf.optimizers.without_loss_scale(model.optimizer)
    is_plain = wrapped_by(model) is None and not isinstance(optimizer, GradientAccumulateOptimizer)
    return layers if layers and is_plain else accumulating_optimizers(model) + layers


def _has_counted(cycle: Any, batches: int) -> bool:
    """Whether each batch of an epoch, which has not yet ended the cycle, was one of its micro steps."""
    length = cycle.accum_steps
    if not isinstance(length, int):
        return False
    made = getattr(cycle, "micro_step", None)
    return made is None or _tf.graphs.in_static_graph() or int(made) == batches % length


class FlushCallback(tf.keras.callbacks.Callback):
    """End the last cycle of each epoch of `fit`, before the epoch's validation.

    Pass it before callbacks that save weights or change the learning rate: they have to find the last step made.
    A `GradientAccumulateModel` needs none. If the model's optimizer does not accumulate, the callback ends the cycles
    of each `AccumBatchNormalization`.

    Args:
      last_cycle: how to handle an unfinished cycle. "flush": make the step from the micro-batches so far, divided by
        their weight. "drop": discard them. "carry": continue the cycle in the next epoch.

    Raises:
      ValueError: `last_cycle` has another value; in `fit`, nothing in the model accumulates.
    """

    def __init__(self, last_cycle: LastCycle = "flush") -> None:
        super().__init__()
        self.last_cycle = _check.one_of("last_cycle", last_cycle, LAST_CYCLE)
        self._is_first_epoch = True
        self._ops: List[Tuple[Any, Any]] = []  # in a static graph: (what has a cycle, the op that ends it)

    def _warn_of_short_epoch(self) -> None:
        """Warn if no cycle of an epoch was complete, or if much of it was in unfinished ones."""
        batches = int((self.params or {}).get("steps") or 0)
        cycles = _cycles_of(self.model) if batches and self.last_cycle != "carry" else []
        lengths = [cycle.accum_steps for cycle in cycles if _has_counted(cycle, batches)]
        if lengths and min(lengths) <= batches:
            self._warn_of_uneven_epoch(batches, min(lengths))
        elif lengths:
            makes = "each epoch makes one update" if self.last_cycle == "flush" else "no update is ever made"
            _check.warn(
                f"An epoch has fewer batches than a cycle, and ends it, so {makes}: lower `accum_steps`, or pass "
                f"last_cycle='carry'. Received: accum_steps={min(lengths)}, {batches} batches in an epoch, "
                f"last_cycle={self.last_cycle!r}. [accum: epoch-end]",
            )

    def _warn_of_uneven_epoch(self, batches: int, length: int) -> None:
        """Warn if ends of epochs make a tenth more updates than whole cycles would, or discard a tenth of the data."""
        complete, left = divmod(batches, length)
        if left and 10 * (length - left if self.last_cycle == "flush" else left) > batches:
            flushed = f"make {complete + 1} updates, the last of {left} of {length} batches"
            dropped = f"make {complete} update{'s' * (complete > 1)}, without the last {left}"
            _check.warn(
                f"An epoch ends within a cycle, so its {batches} batches "
                f"{flushed if self.last_cycle == 'flush' else dropped}: let `accum_steps` divide the number of batches "
                "(`steps_per_epoch` of `fit`), or pass last_cycle='carry'. Received: "
                f"accum_steps={length}, {batches} batches in an epoch, last_cycle={self.last_cycle!r}."
                " [accum: epoch-end]",
            )

    def on_train_end(self, logs: Optional[Logs] = None) -> None:
        self._ops = []  # which would keep their graph

    def on_epoch_begin(self, epoch: int, logs: Optional[Logs] = None) -> None:
        own = getattr(self.model, "_accum", None)
        if own is not None and own.take_steps_of_loss_scales():
            _check.warn(
                "`accum_steps` was set on a `LossScaleOptimizer` while an epoch ran, but is in use from this epoch on. "
                "To change it at the next cycle, set `model.accum_steps`. [accum: set-later]"
            )

    def on_test_begin(self, logs: Optional[Logs] = None) -> None:
        # Keras validates before `on_epoch_end`. In `fit`, only this validation calls `on_test_begin`.
        self._end_epoch()

    def on_epoch_end(self, epoch: int, logs: Optional[Logs] = None) -> None:
        self._end_epoch()

    def _end_epoch(self) -> None:
        if self._is_first_epoch:  # not before, when a scheduler may yet have to set `accum_steps`
            self._is_first_epoch = False
            self._warn_of_short_epoch()
            own = accumulation_of(self.model)
            if own is not None:
                own.warn_if_none_was_split(self.model.distribute_strategy)
        self.end_cycle_of(self.model)

    def end_cycle_of(self, model: tf.keras.Model) -> None:
        """End the current cycle of a model as `last_cycle` specifies."""
        if self.last_cycle == "carry":
            return
        for ending in _cycles_of(model):
            if _tf.graphs.in_static_graph():
                self._end_in_session(ending)
            elif self.last_cycle == "flush":
                ending.flush()
            else:
                ending.reset()

    def _end_in_session(self, ending: Any) -> None:
        """End a cycle in the session of Keras, by an op that is built once."""
        op = next((op for one, op in self._ops if one is ending), None)
        if op is None:
            end = ending.flush if self.last_cycle == "flush" else ending.reset
            op = end()
            if op is None:  # nothing has accumulated
                return
            self._ops.append((ending, op))
        tf.compat.v1.keras.backend.get_session().run(op)

    def end_interrupted_cycle_of(self, model: tf.keras.Model) -> None:
        """End the cycle that an exception interrupted. If that fails too, only warn: the user sees the first one."""
        try:
            self.end_cycle_of(model)
        except Exception as error:
            _check.warn(
                "The interrupted cycle could not be ended: call `reset()` of the optimizer, or continue the cycle. "
                f"Received: {error!r}. [accum: unfinished-cycle]",
            )


class AccumulationScheduler(tf.keras.callbacks.Callback):
    """Set `accum_steps` by epoch.

    Args:
      schedule: dict `{first epoch: accum_steps}` that includes epoch 0, such as `{0: 8, 4: 2}`.

    Raises:
      TypeError, ValueError: `schedule` is not a dict, lacks epoch 0, or contains values other than ints >= 1.
    """

    def __init__(self, schedule: Dict[int, int]) -> None:
        super().__init__()
        if not isinstance(schedule, dict):
            raise TypeError(f"`schedule` must be a dict. Received: schedule={schedule!r}.")
        self.schedule = dict(_check.schedule(schedule, "schedule"))

    def on_train_begin(self, logs: Optional[Logs] = None) -> None:
        # Raise now, rather than in a later epoch, if there can be no accumulators.
        for optimizer in accumulating_optimizers(self.model):
            optimizer.accum_steps = max(self.schedule.values())

    def on_epoch_begin(self, epoch: int, logs: Optional[Logs] = None) -> None:
        first = max(first_epoch for first_epoch in self.schedule if first_epoch <= epoch)
        for optimizer in accumulating_optimizers(self.model):
            if optimizer.accum_steps != self.schedule[first]:
                optimizer.accum_steps = self.schedule[first]
