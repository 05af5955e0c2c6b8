"""Watch the optimizer calls of a model's train step, and take over their gradients for the whole batch."""

import contextlib
from typing import TYPE_CHECKING, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from accum import _check, _tf
from accum._engine._moments import Moments
from accum._keras._internals import internals_of, is_accumulating
from accum._tf import Gradient, GradsAndVars, Scalar, Wait, tf

if TYPE_CHECKING:
    from accum._keras._batch_norm._moving_statistics import MovingStatistics

_REMEDY = (
    "Pass each optimizer to `compile`, or keep it as an attribute of the model, or wrap it: "
    "`accum.GradientAccumulateOptimizer(optimizer, accum_steps)`."
)


class Call(NamedTuple):
    """One call of an optimizer during the step of one micro-batch."""

    optimizer: tf.keras.optimizers.Optimizer  # the `GradientAccumulateOptimizer`
    given: List[tf.Variable]  # the variables, as the train step gave them
    grads_and_vars: List[Tuple[Optional[Gradient], tf.Variable]]
    weight: Optional[tf.Tensor]
    has_own_weight: bool
    # Function of a list of (gradient, given variable), and of the weight if the call has its own.
    apply: Callable[..., Wait]


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
        self.moments: List[Tuple["MovingStatistics", Moments]] = []
        self.shares_overflow: List[int] = []

    def take(
        self,
        optimizer: tf.keras.optimizers.Optimizer,
        grads_and_vars: GradsAndVars,
        weight: Optional[Scalar],
        apply: Callable[..., Wait],
    ) -> None:
        """Take over the gradients of one call.

        Args:
          optimizer: the `GradientAccumulateOptimizer`.
          grads_and_vars: list of (gradient, variable) from the train step.
          weight: the `weight` of the call, or None.
          apply: function of a list of (gradient, variable), and of `weight` if the call has one, that applies them.
        """
        self.check_graph("calls an optimizer")
        grads_and_vars = list(grads_and_vars)
        if not grads_and_vars:  # Keras also trains models without trainable weights
            return
        listed = _check.pairs(optimizer._adapter.unwrapped(grads_and_vars))
        has_own = weight is not None
        weight = internals_of(optimizer).weight if weight is None else weight
        weight = None if weight is None else tf.cast(weight, tf.float32)
        variables = [var for _, var in grads_and_vars]
        self.calls.append(Call(optimizer, variables, listed, weight, has_own, apply))

    def check_graph(self, what: str) -> None:
        """Raise if the train step is within a function or branch of its own, whose tensors can't leave it."""
        if not tf.executing_eagerly() and tf.compat.v1.get_default_graph() is not self._graph:
            raise ValueError(
                f"The train step {what} within a `tf.function`, `tf.cond` or loop of its own, which a step over "
                "micro-batches can't look into. Remove the decorator: Keras traces the train step anyway."
            )


class TrainStep:
    """Watch one replica's run, or trace, of a train step.

    Args:
      name: name of the train step in error messages.
      optimizers: the model's `GradientAccumulateOptimizer`s.
      collector: what takes the gradients over, if this is one micro-batch of a batch; or None.
    """

    def __init__(
        self, name: str, optimizers: Sequence[tf.keras.optimizers.Optimizer], collector: Optional[Collector] = None
    ) -> None:
        self.collector = collector
        self._name = name
        self._optimizers = optimizers
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        # id -> (optimizer, where it was called: paths of graphs):
        self._calls: Dict[int, Tuple[tf.keras.optimizers.Optimizer, List[Sequence[tf.Graph]]]] = {}
        self.calls_through_function = False
        # An optimizer that was called before a tape began to record:
        self._records_after: Optional[tf.keras.optimizers.Optimizer] = None

    @property
    def is_traced(self) -> bool:
        return self._graph is not None

    @property
    def called(self) -> List[tf.keras.optimizers.Optimizer]:
        """The accumulating optimizers that were called."""
        return [optimizer for optimizer, _ in self._calls.values()]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the optimizers that are called in this context."""
        with contextlib.ExitStack() as stack:
            for optimizer in self._optimizers:
                stack.enter_context(internals_of(optimizer).within(self))
            stack.enter_context(_tf.watching.watching_optimizers(self._see, self._see_tape))
            yield

    def note(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        """Record that an accumulating optimizer begins a micro step.

        Raises:
          ValueError: the optimizer has already begun one in this train step, or may begin several in a loop.
        """
        self._warn_of_order(optimizer)
        path = _tf.graphs.graphs_within(self._graph)
        _, earlier = self._calls.setdefault(id(optimizer), (optimizer, []))
        if any(map(_tf.graphs.is_loop_body, path)) or any(_both_run(path, other) for other in earlier):
            self._refuse_several(optimizer)
        earlier.append(path)
        self.calls_through_function |= any(map(_tf.graphs.is_function, path))

    def _see_tape(self) -> None:
        if self._calls:
            self._records_after = self.called[-1]

    def _warn_of_order(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        """Warn of a second update whose forward pass would have seen the first, such as that of a GAN's generator."""
        first, self._records_after = self._records_after, None
        if first is not None and first is not optimizer:
            _check.warn(
                f"`{self._name}` computes the loss for {optimizer!r} after it has called {first!r}. At the full batch "
                "this loss would see the weights that the first optimizer has updated; over micro-batches it sees the "
                "old ones. Use a separate train step or loop for each update, or compute all losses first.",
            )

    def _refuse_several(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        if self.collector is not None or not internals_of(optimizer).is_passthrough:
            raise ValueError(
                f"`{self._name}` calls the optimizer around {type(optimizer.optimizer).__name__} several times. "
                "One cycle would mix gradients for different weights, unlike any full batch: use a separate train "
                "step or loop, and a separate optimizer, for each update."
            )

    def _see(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        """Take note of an optimizer that the model does not know; raise if it does not accumulate."""
        if is_accumulating(optimizer):
            self.note(optimizer)
            _check.warn(
                f"`{self._name}` calls {optimizer!r}, which is not an attribute of the model: each micro-batch has the "
                "same weight in it, and `fit` does not end its last cycle. Keep it as an attribute of the model.",
            )
            return
        raise ValueError(
            f"`{self._name}` applies gradients with an optimizer that does not accumulate. {_REMEDY} Received: "
            f"{optimizer!r}."
        )

    def check(self, may_call_none: bool, followed: Optional[tf.keras.optimizers.Optimizer]) -> None:
        """Raise if no accumulating optimizer was called, or if one was called several times through a `tf.function`.

        Args:
          may_call_none: whether it is legitimate that no call of an optimizer was seen.
          followed: the optimizer whose cycles the model's batch normalisation follows, or None.
        """
        if not self._calls and not may_call_none:
            raise ValueError(
                f"`{self._name}` has called none of the model's accumulating optimizers, so nothing accumulates. "
                f"{_REMEDY} Found: {[type(optimizer.optimizer).__name__ for optimizer in self._optimizers]}."
            )
        if followed is not None and id(followed) not in self._calls and not may_call_none:
            raise ValueError(
                f"Batch normalisation follows the cycles of {followed!r}, which `{self._name}` does not call: take "
                "it out of the model's attributes, or pass to `compile` the optimizers that are called."
            )
        for optimizer, paths in self._calls.values() if self.is_traced else ():
            self._check_functions(optimizer, paths)

    def _check_functions(self, optimizer: tf.keras.optimizers.Optimizer, paths: Sequence[Sequence[tf.Graph]]) -> None:
        for function in filter(None, map(_outermost_function, paths)):
            others = {
                id(other)
                for called, theirs in self._calls.values()
                for other in map(_outermost_function, theirs)
                if called is not optimizer and other is not None and other.name == function.name
            }
            if _tf.op_walks.count_calls(self._graph, function) > 1 + len(others):
                self._refuse_several(optimizer)


def _outermost_function(path: Sequence[tf.Graph]) -> Optional[tf.Graph]:
    """Return the graph of the `tf.function` that a train step calls itself, on a path to an optimizer, or None."""
    functions = [graph for graph in path if _tf.graphs.is_function(graph)]
    return functions[-1] if functions else None


def _both_run(path: Sequence[tf.Graph], other: Sequence[tf.Graph]) -> bool:
    return not (_tf.graphs.exclude_each_other(path, other) or _tf.graphs.are_traces_of_one_function(path, other))
