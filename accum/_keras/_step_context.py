"""The step of a model that is running on this replica, which whatever takes part in it asks.

    ModelSteps, SplitStep, WholeBatchStep, TokenStep  ->  entering(model, …), while a step or a part of it runs
    optimizers, losses, metrics, calls of the model   ->  of_model(model) or of_optimizer(optimizer)

So nothing of a running step is kept in a model, and in an optimizer only the weight of `weighing`.
"""

import contextlib
from typing import Any, Dict, Iterator, NamedTuple, Optional, Sequence, Tuple

from accum._engine import _replicas
from accum._keras._step_listener import PartsSeen
from accum._tf import tf


class StepContext(NamedTuple):
    """What stands for a while in a step of a model. The classes of the values import this module, hence their type Any.

    Attributes:
      optimizers: the `GradientAccumulateOptimizer`s that it concerns.
      train_step: the `TrainStep` that watches them, or None.
      overlaps: whether gradients may be summed over workers while others are still computed.
      parts: for each listener of the optimizer, what it has seen of the micro-batches of the batch.
      calls: the `WholeBatchCalls` that stand in for calls of the model, or None.
      metrics: the `StepMetrics` of a micro-batch, or None.
      trimmed: the `TrimmedTime` of a micro-batch, or None.
    """

    optimizers: Sequence[tf.keras.optimizers.Optimizer] = ()
    train_step: Any = None
    overlaps: bool = False
    parts: Sequence[PartsSeen] = ()
    calls: Any = None
    metrics: Any = None
    trimmed: Any = None

    @property
    def collector(self) -> Any:
        """The `Collector` that takes gradients over, if a train step runs on the micro-batches of a batch, or None."""
        return None if self.train_step is None else self.train_step.collector

    @property
    def replica_losses(self) -> Any:
        """The `ReplicaLosses` that compute losses over the outputs of several replicas, or None."""
        return None if self.calls is None else self.calls.replica_losses


_NONE = StepContext()
# (Replica, id of a model) -> its context. Not by thread, because a `LossScaleOptimizer` starts some of its own.
_RUNNING: Dict[Tuple[int, int], StepContext] = {}


def of_model(model: Optional[tf.keras.Model]) -> StepContext:
    """Return the context of the step of `model` that runs on this replica; an empty one if there is none."""
    return _RUNNING.get((_replicas.replica_number(), id(model)), _NONE) if _RUNNING else _NONE


def of_optimizer(optimizer: tf.keras.optimizers.Optimizer) -> StepContext:
    """Return the context of the step on this replica that concerns `optimizer`; an empty one if there is none."""
    replica = _replicas.replica_number() if _RUNNING else None
    for (number, _), context in reversed(list(_RUNNING.items())):  # of steps within each other, the inner one
        if number == replica and any(one is optimizer for one in context.optimizers):
            return context
    return _NONE


@contextlib.contextmanager
def entering(model: tf.keras.Model, **changes: Any) -> Iterator[None]:
    """Change the context of the step of `model` on this replica.

    Args:
      model: a `GradientAccumulateModel`.
      **changes: attributes of `StepContext`.
    """
    key = _replicas.replica_number(), id(model)
    before = _RUNNING.get(key)
    _RUNNING[key] = (before or _NONE)._replace(**changes)
    try:
        yield
    finally:
        if before is None:
            del _RUNNING[key]
        else:
            _RUNNING[key] = before
