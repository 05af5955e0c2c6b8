"""What sees the steps of an optimizer, so that something of them can be logged: a `StepListener`."""

from typing import Dict, List, NamedTuple, Optional, Sequence

from accum._engine import _replicas
from accum._tf import Data, Gradient, GradsAndVars, Logs, Scalar, Wait, tf


class PartsSeen(NamedTuple):
    """What a listener has seen of the micro-batches of a batch, whose gradients an optimizer gets together.

    Attributes:
      sum: the sum of what its `of_part` has returned.
      is_weighted: whether the call has a weight, which is the sum of those of the micro-batches.
      grads: the gradients of the batch in the unit of the sums, if the optimizer may get others; or None.
    """

    sum: tf.Tensor
    is_weighted: bool
    grads: Optional[Sequence[Optional[Gradient]]]


class StepListener:
    """Sees the steps of one optimizer, once it is in `internals_of(optimizer).listeners`.

    The methods run on each replica in the train step, so in its trace, but `end_cycle` and `stop`.
    """

    def begin_batch(self, data: Data) -> None:
        """Begin a batch of `fit`. Doing so twice is like once."""

    def of_part(self, grads: Sequence[Optional[Gradient]], weight: Optional[Scalar], size: Scalar) -> tf.Tensor:
        """Return what a micro-batch of `size` examples adds to `PartsSeen.sum`."""
        return tf.zeros([])

    def on_gradients(
        self,
        grads: Sequence[Optional[Gradient]],
        weight: Optional[Scalar],
        is_reduced: bool,
        parts: Optional[PartsSeen],
    ) -> None:
        """See the gradients with which the optimizer is called.

        Args:
          grads: as the call has them.
          weight: the weight of the call, or None.
          is_reduced: whether they are already summed over replicas.
          parts: what was seen of micro-batches, if these are their gradients together, or None.
        """

    def on_update(self, grads_and_vars: GradsAndVars, changed: GradsAndVars) -> List[Wait]:
        """See an update of the inner optimizer. Returns what the update waits for.

        Args:
          grads_and_vars: list of (gradient, variable), as the step of the cycle has them: reduced over replicas, before
            `transform` and clipping, and still multiplied by `_tf.optimizers.loss_scale_of` the inner optimizer.
            Variables without a gradient are not in it. A gradient may be `tf.IndexedSlices` whose rows repeat:
            `_engine._gradients.entries_of` adds these up.
          changed: the same after `transform` and adaptive clipping, as the inner optimizer gets it.
        """
        return []

    def end_batch(self, logs: Logs) -> Dict[str, tf.Tensor]:
        """End a batch with the logs of its step. Returns scalars to be logged too: their mean over replicas is.

        It also ends a batch without an update, as within a cycle.
        """
        return {}

    def end_cycle(self) -> None:
        """See that something other than a batch has ended an unfinished cycle: `flush` or `reset`.

        If a `flush` follows the last batch of an epoch, what `on_update` saw then is logged with the next batch.
        """

    def stop(self) -> None:
        """See that an exception has ended `fit`: a listener that belongs to one `fit` listens no more."""


def end_batch(listeners: Sequence[StepListener], logs: Logs) -> Logs:
    """End a batch for `listeners`, on each replica. Returns its logs, with what they add."""
    entries: Dict[str, tf.Tensor] = {}
    for listener in listeners:
        entries.update(listener.end_batch(logs))
    return {**logs, **_replicas.across_replicas(_means, [entries])} if entries else logs


def _means(strategy: tf.distribute.Strategy, entries: Dict[str, tf.Tensor]) -> Dict[str, tf.Tensor]:
    # One tensor for all replicas: of one for each, Keras 2 logs the sum since TensorFlow 2.11, and Keras 3 the mean.
    return {name: strategy.reduce(tf.distribute.ReduceOp.MEAN, value, axis=None) for name, value in entries.items()}
