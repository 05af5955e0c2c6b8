"""What the train step of one micro-batch leaves for the whole batch: calls of optimizers, and moments."""

from typing import Any, Callable, List, NamedTuple, Optional

from accum import _check
from accum._keras._internals import internals_of
from accum._tf import GradsAndVars, Scalar, tf


class Call(NamedTuple):
    """One call of an optimizer during the step of one micro-batch."""

    optimizer: Any  # the `GradientAccumulateOptimizer`
    given: List[Any]  # the variables, as the train step gave them
    grads_and_vars: List[Any]
    weight: Optional[tf.Tensor]
    has_own_weight: bool
    # Function of a list of (gradient, given variable), and of the weight if the call has its own.
    apply: Callable[..., Any]


class Collector:
    """What the train step of one micro-batch leaves for the whole batch.

    Attributes:
      calls: the calls of optimizers.
      moments: list of (`MovingStatistics`, `Moments`), one entry for each call of a batch normalisation layer.
      shares_overflow: ids of the optimizers whose gradients TF 2.2 reduces outside of them.
    """

    def __init__(self) -> None:
        self._graph = tf.compat.v1.get_default_graph() if not tf.executing_eagerly() else None
        self.calls: List[Call] = []
        self.moments: List[Any] = []
        self.shares_overflow: List[int] = []

    def take(self, optimizer: Any, given: GradsAndVars, weight: Optional[Scalar], apply: Callable[..., Any]) -> None:
        """Take over the gradients of one call.

        Args:
          optimizer: the `GradientAccumulateOptimizer`.
          given: list of (gradient, variable) from the train step.
          weight: the `weight` of the call, or None.
          apply: function of a list of (gradient, variable), and of `weight` if the call has one, that applies them.
        """
        self.check_graph("calls an optimizer")
        given = list(given)
        if not given:  # Keras also trains models without trainable weights
            return
        listed = _check.pairs(optimizer._adapter.unwrapped(given))
        has_own = weight is not None
        weight = internals_of(optimizer).weight if weight is None else weight
        weight = None if weight is None else tf.cast(weight, tf.float32)
        variables = [var for _, var in given]
        self.calls.append(Call(optimizer, variables, listed, weight, has_own, apply))

    def check_graph(self, what: str) -> None:
        """Raise if the train step is within a function or branch of its own, whose tensors can't leave it."""
        if not tf.executing_eagerly() and tf.compat.v1.get_default_graph() is not self._graph:
            raise ValueError(
                f"The train step {what} within a `tf.function`, `tf.cond` or loop of its own, which a step over "
                "micro-batches can't look into. Remove the decorator: Keras traces the train step anyway."
            )
