"""What a rule is given to look at: a `Seen`."""

from typing import NamedTuple, Sequence

from accum._tf import Data, tf


class Seen(NamedTuple):
    """A model, and what has just happened to it. What does not belong to the event has its default.

    Attributes:
      model: a `GradientAccumulateModel`.
      data: what Keras has given to the step.
      is_split: whether the losses are those of the micro-batches of a batch.
      is_cycle: whether an update may take several batches.
      sums: whether the compiled losses of micro-batches add up.
      handles: those of variables to which each micro-batch of a whole batch assigns.
    """

    model: tf.keras.Model
    data: Data = None
    is_split: bool = False
    is_cycle: bool = False
    sums: bool = False
    handles: Sequence[tf.Tensor] = ()

    @property
    def is_trimmed(self) -> bool:
        """Whether a part of the full batch is a micro-batch by tokens, in place of a batch of a cycle."""
        return self.model._accum.size.tokens is not None and not self.is_cycle

    @property
    def is_in_parts(self) -> bool:
        """Whether the step saw a part of the full batch alone."""
        return self.is_cycle or self.model._accum.size.tokens is not None

    @property
    def is_mean(self) -> bool:
        """Whether the gradients of the batches of a cycle are averaged, rather than added up."""
        return bool(self.model._accum.options.plan.reduction != "sum")
