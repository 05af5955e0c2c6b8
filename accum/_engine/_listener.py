"""The interface of objects that follow a cycle, such as the moving statistics of batch normalisation."""

from typing import Union

from accum._tf import GradsAndVars, Wait, tf


class CycleListener:
    """An object that accumulates something other than gradients over a cycle.

    Every method runs on one replica, and returns an op or tensor to wait for.
    """

    def on_micro_step(self, is_first: Union[bool, tf.Tensor]) -> Wait:
        """Accumulate the current micro-batch.

        Args:
          is_first: bool or bool tensor, whether it is the first of its cycle.
        """
        raise NotImplementedError

    def on_gradients(
        self, grads_and_vars: GradsAndVars, is_first: Union[bool, tf.Tensor], has_latest: bool
    ) -> GradsAndVars:
        """Return the gradients for the step, from those that were accumulated.

        Args:
          grads_and_vars: list of (reduced gradient, variable).
          is_first, has_latest: as for `on_step`.
        """
        return grads_and_vars

    def on_step(self, is_first: Union[bool, tf.Tensor], has_latest: bool) -> Wait:
        """Update with the whole cycle when the optimizer makes its step.

        Args:
          is_first: bool or bool tensor, whether the last micro-batch is the first of its cycle.
          has_latest: bool, whether there is a current micro-batch to include; there is none when a cycle is flushed.
        """
        raise NotImplementedError
