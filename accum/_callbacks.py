"""Callbacks: what happens to an unfinished cycle at the end of an epoch, and cycles whose length depends on it."""

import warnings

from accum import _check, _tf
from accum._batch_norm import batch_norms_of
from accum._optimizer import GradientAccumulateOptimizer
from accum._tf import tf

LAST_CYCLE = ("flush", "carry", "drop")


def accumulating_optimizer(optimizer):
    """The `GradientAccumulateOptimizer` that a model was compiled with, also inside a `LossScaleOptimizer`."""
    inner = _tf.without_loss_scale(optimizer)
    if not isinstance(inner, GradientAccumulateOptimizer):
        raise ValueError(
            "The model must be compiled with a `GradientAccumulateOptimizer`. Received: optimizer={!r}.".format(inner)
        )
    return inner


def accumulating_optimizers(model):
    """All of them: a model with a `compile` of its own may have several."""
    several = model.__dict__.get("_accum_optimizers") or [model.optimizer]
    return [accumulating_optimizer(optimizer) for optimizer in several]


class FlushCallback(tf.keras.callbacks.Callback):
    """End the last cycle of each epoch of `fit`, before the epoch's validation.

    Args:
      last_cycle: "flush" makes the step with what is there, divided by what is there; "drop" discards it; "carry"
        leaves it for the next epoch to go on with.

    Raises:
      ValueError: any other `last_cycle`.
    """

    def __init__(self, last_cycle="flush"):
        super().__init__()
        self.last_cycle = _check.one_of("last_cycle", last_cycle, LAST_CYCLE)

    def on_test_begin(self, logs=None):
        # Of the callbacks of `fit`, only the validation inside `fit` calls this: Keras validates before `on_epoch_end`.
        self.end_cycle_of(self.model)

    def on_epoch_end(self, epoch, logs=None):
        self.end_cycle_of(self.model)

    def end_cycle_of(self, model):
        """End the cycle that a model is in, by `last_cycle`."""
        if self.last_cycle == "carry":
            return
        for ending in accumulating_optimizers(model) + batch_norms_of(model):
            if self.last_cycle == "flush":
                ending.flush()
            else:
                ending.reset()

    def end_interrupted_cycle_of(self, model):
        """End the cycle that an exception cut short; should that fail too, it is still what the user sees."""
        try:
            self.end_cycle_of(model)
        except Exception as error:
            warnings.warn(
                "The cycle that was cut short could not be ended: call `reset()` of the optimizer, or go on with the "
                "cycle. Received: {!r}.".format(error),
                stacklevel=3,
            )


class AccumulationScheduler(tf.keras.callbacks.Callback):
    """Set `accum_steps` by epoch.

    Args:
      schedule: dict `{first epoch: accum_steps}` that holds epoch 0, such as `{0: 8, 4: 2}`.

    Raises:
      ValueError: a schedule without epoch 0 or with other than ints >= 1.
    """

    def __init__(self, schedule):
        super().__init__()
        if not isinstance(schedule, dict):
            raise TypeError("`schedule` must be a dict. Received: schedule={!r}.".format(schedule))
        self.schedule = dict(_check.schedule(schedule, "schedule"))

    def on_train_begin(self, logs=None):
        # Says now, rather than in a later epoch, if there can be no accumulators.
        for optimizer in accumulating_optimizers(self.model):
            optimizer.accum_steps = max(self.schedule.values())

    def on_epoch_begin(self, epoch, logs=None):
        first = max(known for known in self.schedule if known <= epoch)
        for optimizer in accumulating_optimizers(self.model):
            if optimizer.accum_steps != self.schedule[first]:
                optimizer.accum_steps = self.schedule[first]
