"""The interfaces through which the engine uses what is not its own.

`OptimizerAdapter` has the variables of an optimizer, its step and its step counter. A `CycleListener` follows a cycle,
as do the moving statistics of batch normalisation.
"""

import contextlib
from typing import Callable, ContextManager, Optional, Sequence, Union

from accum._tf import GradsAndVars, Transform, Wait, tf

# --------------------------------------------------------------------------------------------------------------------
# The optimizer


class OptimizerAdapter:
    """What each interface implements, so that the engine can create variables, make steps and read the step counter.

    Attributes:
      name: prefix of the names of variables.
      waits_for_others: whether a step waits for other processes, so it must not be in a conditional or hold a lock.
      reduces: whether the inner optimizer always sums gradients over replicas.
    """

    name: str
    waits_for_others = False
    reduces = False

    def scalar(self, name: str, initial_value: tf.Tensor, per_replica: bool = False) -> tf.Variable:
        """Create a scalar variable."""
        raise NotImplementedError

    def buffer(self, var: tf.Variable, name: str, shape: tf.TensorShape, dtype: tf.DType) -> tf.Variable:
        """Create a per-replica variable of zeros that belongs to `var`, on the same device."""
        raise NotImplementedError

    def check(self, variables: Sequence[tf.Variable]) -> None:
        """Raise if the inner optimizer can't update `variables`."""

    def prepare(self, variables: Sequence[tf.Variable], used: Sequence[tf.Variable] = ()) -> None:
        """Create the inner optimizer's variables outside any trace.

        Args:
          variables: list of trainable variables.
          used: those of `variables` that the current trace updates.
        """

    def takes_some_variables(self) -> bool:
        """Whether a step of the inner optimizer may leave out variables that earlier steps had."""
        return True

    def stepping(self) -> ContextManager[object]:
        """Return the context in which `make_step` is called on each replica, to be entered across replicas."""
        return contextlib.ExitStack()

    def tell_of_update(self, grads_and_vars: GradsAndVars, changed: GradsAndVars) -> Sequence[Wait]:
        """Show the gradients of a step, before and after they are changed as planned, to its listeners.

        Returns what the step waits for.
        """
        return ()

    def transformed(self, transform: Transform, grads_and_vars: GradsAndVars) -> GradsAndVars:
        """Return what a user's function, which gets the user's variables, makes of the engine's pairs."""
        return list(transform(list(grads_and_vars)))

    def make_step(self, grads_and_vars: GradsAndVars, replicas: int) -> Optional[tf.Operation]:
        """Make one step of the inner optimizer.

        Args:
          grads_and_vars: list of (gradient, variable).
          replicas: the number of replicas on which the gradients are the same.

        Returns:
          An op that makes the step, or None.
        """
        raise NotImplementedError

    def others(self) -> Sequence[tf.Variable]:
        """Return the variables that `end_step` may use."""
        return ()

    def end_step(self, done: tf.Tensor, has_latest: bool = False) -> tf.Tensor:
        """Do what follows a step, across replicas. Takes and returns a tensor to wait for.

        Args:
          done: tensor to wait for.
          has_latest: whether a micro step makes the step, rather than a flush.
        """
        return done

    def when(self, condition: tf.Tensor, function: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Return the bool tensor of `function()` if `condition` is true, otherwise False."""
        return tf.cond(condition, function, lambda: tf.constant(False), name="if_any")

    def count_micro_step(self, counts: Optional[tf.Tensor], has_stepped: tf.Tensor) -> Optional[tf.Operation]:
        """Advance the interface's own counter of micro steps, if it has one.

        Args:
          counts: bool tensor, whether this micro step counts; None: it does.
          has_stepped: bool tensor, whether it made a step, so that `end_step` may have counted it.

        Returns:
          An op, or None if the interface has no such counter.
        """

    def steps(self) -> tf.Tensor:
        """Return the number of steps made so far, a scalar int tensor, for schedules."""
        raise NotImplementedError


# --------------------------------------------------------------------------------------------------------------------
# Objects that follow a cycle


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

    def on_step(self, is_first: Union[bool, tf.Tensor]) -> Wait:
        """Update with the whole cycle, the current micro-batch included, when the optimizer makes its step.

        Args:
          is_first: as for `on_micro_step`.
        """
        raise NotImplementedError

    def on_flush(self) -> Wait:
        """Update with the micro-batches so far when an unfinished cycle is flushed: there is no current one."""
        raise NotImplementedError

    def gradients_of_step(self, grads_and_vars: GradsAndVars, is_first: Union[bool, tf.Tensor]) -> GradsAndVars:
        """Return the gradients for the step of a whole cycle, from those that were accumulated.

        Args:
          grads_and_vars: list of (reduced gradient, variable).
          is_first: as for `on_micro_step`.
        """
        return grads_and_vars

    def gradients_of_flush(self, grads_and_vars: GradsAndVars) -> GradsAndVars:
        """Return the gradients for the step of an unfinished cycle, like `gradients_of_step`."""
        return grads_and_vars
