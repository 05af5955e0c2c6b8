"""The separate ops of a cycle."""

from typing import NamedTuple

from accum._tf import tf


class AccumOps(NamedTuple):
    """The ops of a cycle, for users who run them in their own loop.

    Attributes:
      accumulate: op that accumulates the gradients of one micro-batch, without making a step.
      apply: op that makes the step from any number of accumulated micro-batches and clears the accumulators. If
        nothing has been accumulated, it changes nothing.
      zero: op that discards the accumulated gradients.
      micro_step: int64 scalar tensor, the number of micro steps in the current cycle so far.
    """

    accumulate: tf.Operation
    apply: tf.Operation
    zero: tf.Operation
    micro_step: tf.Tensor
