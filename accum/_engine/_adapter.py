"""What an optimizer lends to the engine: variables and where they stand, its step, its clock."""

from typing import Any, Callable, Optional, Sequence

from accum._tf import GradsAndVars, Transform, tf


class OptimizerAdapter:
    """What a face lends to the engine. The engine creates, applies and clocks through it alone.

    Attributes:
      name: what its variables are named by.
      waits_for_others: whether `apply` waits for other processes, and so can stand in no conditional and hold no lock.
      reduces: whether `apply` sums over replicas, and can't be told not to.
    """

    name: str
    waits_for_others = False
    reduces = False

    def scalar(self, name: str, initial_value: tf.Tensor, per_replica: bool = False) -> tf.Variable:
        """A new variable of shape []."""
        raise NotImplementedError

    def buffer(self, var: tf.Variable, name: str, shape: tf.TensorShape, dtype: tf.DType) -> tf.Variable:
        """A new per-replica variable of zeros that belongs to `var`, beside it on its device."""
        raise NotImplementedError

    def check(self, variables: Sequence[tf.Variable]) -> None:
        """Raise if the inner optimizer can't update `variables`."""

    def prepare(self, variables: Sequence[tf.Variable], used: Sequence[tf.Variable] = ()) -> None:
        """Create what the inner optimizer needs for `variables`, outside any trace; a trace updates `used` of them."""

    def make_step(
        self, grads_and_vars: GradsAndVars, transform: Optional[Transform], replicas: int
    ) -> Optional[tf.Operation]:
        """Transform whole gradients, the same on `replicas`, and make one step of the inner optimizer.

        Returns:
          What waits for the step, or None.
        """
        raise NotImplementedError

    def when(self, condition: tf.Tensor, function: Callable[..., Any]) -> Any:
        """`function()`, a bool tensor, where `condition` holds, and False elsewhere."""
        return tf.cond(condition, function, lambda: tf.constant(False), name="if_any")

    def count_micro_step(self, counts: Optional[tf.Tensor]) -> Optional[tf.Operation]:
        """Advance a clock of the face's own by one micro step, unless `counts`, a bool tensor, is False.

        Returns:
          An op, or None where the face has no such clock.
        """

    def steps(self) -> tf.Tensor:
        """The number of steps made, a scalar int tensor, for schedules."""
        raise NotImplementedError
