"""The calls of optimizers in a model's train step.

A `Collector` takes over their gradients, for the whole batch. A `TrainStep` checks which are called, and how often.
"""

import contextlib
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from accum import _check, _tf
from accum._engine import _replicas
from accum._engine._statistics import Moments
from accum._keras import _step_context
from accum._keras._optimizer._internals import Internals, internals_of, is_accumulating
from accum._tf import Gradient, GradsAndVars, Scalar, Wait, tf

_REMEDY = "Pass each optimizer to `compile`, or keep it as an attribute of the model."


def read_weight(weight: Union[Scalar, tf.Variable, None]) -> Optional[Scalar]:
    """Return this replica's value of a weight that may be a variable."""
    return _replicas.local_variable(weight).read_value() if isinstance(weight, tf.Variable) else weight


class Gate:
    """What comes between the gradients of a step and its first update."""

    def released(self, grads_and_vars: GradsAndVars, graph: Optional[tf.Graph]) -> GradsAndVars:
        """Return the gradients, which can be used as soon as the gate lets them pass.

        Args:
          grads_and_vars: list of (gradient, variable) from the train step.
          graph: that of the step, or None if it runs eagerly.
        """
        raise NotImplementedError


class Call(NamedTuple):
    """One call of an optimizer during the step of one micro-batch."""

    optimizer: tf.keras.optimizers.Optimizer  # the `GradientAccumulateOptimizer`
    variables: List[tf.Variable]  # those of the gradients, as the train step gave them
    grads_and_vars: List[Tuple[Optional[Gradient], tf.Variable]]
    weight: Optional[tf.Tensor]
    has_own_weight: bool  # the user's, from `apply_gradients`, `minimize` or `weighing`
    # Function of a list of (gradient, variable as given), and of the weight if the call has its own.
    apply: Callable[..., Wait]


class Collector:
    """What the train step of one micro-batch leaves for the whole batch.

    Args:
      is_of_part: whether the step sees a part of the batch alone.

    Attributes:
      calls: the calls of optimizers.
      moments: list of (`Moments`, function that receives those of the batch), one for each call of a batch norm layer.
      shares_overflow: ids of the optimizers whose gradients TF 2.2 reduces outside of them.
    """

    def __init__(self, is_of_part: bool = False) -> None:
        self._is_of_part = is_of_part
        self._graph = tf.compat.v1.get_default_graph() if not tf.executing_eagerly() else None
        self.calls: List[Call] = []
        self.moments: List[Tuple[Moments, Callable[[Moments], Wait]]] = []
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
        internals = internals_of(optimizer)
        if self._is_of_part:
            internals.warn_of_changed_gradients([grad for grad, _ in listed if grad is not None], is_of_part=True)
        has_own = weight is not None
        if weight is None:
            weight, has_own = internals.weight, internals.has_own_weight
            apply = _weighing(internals, apply) if has_own else apply
        weight = None if weight is None else tf.cast(weight, tf.float32)
        variables = [var for _, var in grads_and_vars]
        self.calls.append(Call(optimizer, variables, listed, weight, has_own, apply))

    def check_graph(self, what: str) -> None:
        """Raise if the train step is within a function or branch of its own, whose tensors can't leave it."""
        if tf.executing_eagerly() or tf.compat.v1.get_default_graph() is self._graph:
            return
        branches = [graph for graph in _tf.graphs.graphs_within(self._graph) if not _tf.graphs.is_function(graph)]
        if not branches:
            raise ValueError(
                f"The train step {what} within a `tf.function` of its own, which a step over micro-batches can't look "
                "into. Remove the decorator: Keras traces the train step anyway. [accum: inner-function]"
            )
        raise ValueError(
            f"The train step {what} within a conditional or loop on tensors (`tf.cond`, `tf.while_loop`, or an `if` or "
            "`for` that AutoGraph converts), which a step over micro-batches can't look into. Move the call out of it; "
            "or leave out `whole_batch=()`, if you pass it; or use a plain `tf.keras.Model`, compute the gradients by "
            "`accum.value_and_gradients` before the conditional, "
            f"and apply them in it. Received: {branches[-1].name!r}. [accum: inner-function]"
        )


def _weighing(internals: Internals, apply: Callable[[GradsAndVars], Wait]) -> Callable[..., Wait]:
    def weighed(grads_and_vars: GradsAndVars, weight: Scalar) -> Wait:
        with internals.weighing(weight, is_own=True):
            return apply(grads_and_vars)

    return weighed


class TrainStep:
    """Watch one replica's run, or trace, of a train step.

    Args:
      name: name of the train step in error messages.
      optimizers: the model's `GradientAccumulateOptimizer`s.
      collector: what takes the gradients over, if this is one micro-batch of a batch; or None.
      gate: what comes between the gradients and the first update, or None.

    Attributes:
      weight_of_replica: the weight of this replica's part of the batch, for optimizers that do not accumulate: Keras
        averages over replicas, which may have unequal parts. None: they need none.
    """

    def __init__(
        self,
        name: str,
        optimizers: Sequence[tf.keras.optimizers.Optimizer],
        collector: Optional[Collector] = None,
        gate: Optional["Gate"] = None,
    ) -> None:
        self.collector = collector
        self._gate = gate
        self.weight_of_replica: Union[Scalar, tf.Variable, None] = None
        self._name = name
        self._optimizers = optimizers
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        # id -> (optimizer, where it was called: paths of graphs):
        self._calls: Dict[int, Tuple[tf.keras.optimizers.Optimizer, List[Sequence[tf.Graph]]]] = {}
        self.calls_through_function = False
        self._stack = contextlib.ExitStack()
        # For each call: (optimizer, its variables, which variables have been read since the call)
        self._read_since: List[Tuple[tf.keras.optimizers.Optimizer, List[tf.Variable], _tf.watching.VariableReads]] = []
        self._made: Set[tf.Operation] = set()  # while optimizers were called, in the graph of the step

    @property
    def is_traced(self) -> bool:
        return self._graph is not None

    @property
    def called(self) -> List[tf.keras.optimizers.Optimizer]:
        """The accumulating optimizers that were called."""
        return [optimizer for optimizer, _ in self._calls.values()]

    @contextlib.contextmanager
    def watching(self, model: tf.keras.Model) -> Iterator[None]:
        """Watch the optimizers that are called in this context, in which the train step of `model` runs."""
        with self._stack as stack:
            stack.enter_context(_step_context.entering(model, optimizers=self._optimizers, train_step=self))
            stack.enter_context(_tf.watching.watching_optimizers(self._see))
            yield

    @contextlib.contextmanager
    def calling(self, optimizer: tf.keras.optimizers.Optimizer, grads_and_vars: GradsAndVars) -> Iterator[None]:
        """Record that an accumulating optimizer makes a micro step in this context.

        Raises:
          ValueError: as `note` does.
        """
        self.note(optimizer)
        before = len(self._operations())
        yield
        self._made.update(self._operations()[before:])
        reads = self._stack.enter_context(_tf.watching.VariableReads())
        self._read_since.append((optimizer, [var for _, var in grads_and_vars], reads))

    def operations_beside(self, count: int) -> List[tf.Operation]:
        """Return the operations of the step's graph behind the first `count`, but for those of optimizers' calls.

        None if that can't be told: replicas share a graph, and a function holds the optimizer's with the user's.
        """
        if not self._calls or self.calls_through_function or _replicas.count() > 1:
            return []
        return [op for op in self._operations()[count:] if op not in self._made]

    def _operations(self) -> List[tf.Operation]:
        return [] if self._graph is None else self._graph.get_operations()

    def note(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        """Record that an accumulating optimizer begins a micro step.

        Raises:
          ValueError: the optimizer has already begun one in this train step, or may begin several in a loop.
        """
        if self.collector is not None or internals_of(optimizer).may_take_several:
            self._warn_of_order(optimizer)
        path = _tf.graphs.graphs_within(self._graph)
        _, earlier = self._calls.setdefault(id(optimizer), (optimizer, []))
        if any(map(_tf.graphs.is_loop_body, path)) or any(_both_run(path, other) for other in earlier):
            self._refuse_several(optimizer)
        earlier.append(path)
        self.calls_through_function |= any(map(_tf.graphs.is_function, path))

    def weighted(self, optimizer: tf.keras.optimizers.Optimizer, grads_and_vars: GradsAndVars) -> GradsAndVars:
        """Return gradients, weighted by this replica's share in the batch if `optimizer` does not do so itself."""
        internals = internals_of(optimizer)
        if self.weight_of_replica is None or not internals.is_passthrough or internals.has_own_weight:
            return grads_and_vars
        factor = _replicas.share_of_replica(read_weight(self.weight_of_replica))
        return [
            (None if grad is None else _tf.inner_optimizer.scale_gradient(grad, factor), var)
            for grad, var in grads_and_vars
        ]

    def released(self, grads_and_vars: GradsAndVars) -> GradsAndVars:
        """Return gradients as an optimizer may have them: behind the gate, if there is one."""
        return grads_and_vars if self._gate is None else self._gate.released(grads_and_vars, self._graph)

    def note_moments(self, layer: str) -> None:
        """Record that a batch normalisation layer keeps the moments of a call.

        Raises:
          ValueError: it is called in a loop.
        """
        if any(map(_tf.graphs.is_loop_body, _tf.graphs.graphs_within(self._graph))):
            raise ValueError(
                f"`{self._name}` calls batch normalization in a loop, and only the moments of the last call would be "
                f"kept: call it without a loop. Received: layer {layer!r}. [accum: batch-norm-layer]"
            )

    def _warn_of_order(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        """Warn of a second update whose forward pass would have seen the first, such as that of a GAN's generator."""
        for first, variables, reads in self._read_since:
            if first is not optimizer and reads.include_any(variables):
                _check.warn(
                    f"`{self._name}` computes with the weights of {first!r} after it has called this optimizer, and "
                    f"then calls {optimizer!r}. At the full batch its loss would see the updated weights; over "
                    "micro-batches it sees the old ones. Use a separate train step or loop for each update, or compute "
                    "all losses first. [accum: train-step-order]",
                    _check.InexactWarning,
                )

    def _refuse_several(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        if self.collector is not None or internals_of(optimizer).may_take_several:
            raise ValueError(
                f"`{self._name}` calls the optimizer around {type(optimizer.optimizer).__name__} several times. "
                "One cycle would mix gradients for different weights, unlike any full batch. Instead, pass "
                "`micro_batch_size` alone, with which the train step runs once and each call of a network is split; "
                "or use a separate train step or loop, and a separate optimizer, for each update."
                " [accum: train-step-order]"
            )

    def _see(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        """Take note of an optimizer that the model does not know; raise if it does not accumulate."""
        if is_accumulating(optimizer):
            self.note(optimizer)
            _check.warn(
                f"`{self._name}` calls {optimizer!r}, which is not an attribute of the model: each micro-batch has the "
                "same weight in it, and `fit` does not end its last cycle. Keep it as an attribute of the model."
                " [accum: optimizer-not-found]",
                _check.InexactWarning,
            )
            return
        if self._runs_once:
            return
        raise ValueError(
            f"`{self._name}` applies gradients with an optimizer that does not accumulate. {_REMEDY} Received: "
            f"{optimizer!r}. [accum: optimizer-not-found]"
        )

    @property
    def _runs_once(self) -> bool:
        """Whether the step runs for the full batch, and nothing but the optimizers themselves has to know of a call."""
        is_alone = self.collector is None and self._gate is None and self.weight_of_replica is None
        return is_alone and not any(internals_of(optimizer).may_take_several for optimizer in self._optimizers)

    def check(self, may_call_none: bool, followed: Optional[tf.keras.optimizers.Optimizer]) -> None:
        """Raise if no accumulating optimizer was called, or if one was called several times through a `tf.function`.

        Args:
          may_call_none: whether it is legitimate that no call of an optimizer was seen.
          followed: the optimizer whose cycles the model's batch normalisation follows, or None.
        """
        if not self._calls and not may_call_none and not self._runs_once:
            raise ValueError(
                f"`{self._name}` has called none of the model's accumulating optimizers, so nothing accumulates. "
                f"{_REMEDY} Found: {[type(optimizer.optimizer).__name__ for optimizer in self._optimizers]}."
                " [accum: optimizer-not-found]"
            )
        if followed is not None and id(followed) not in self._calls and not may_call_none:
            raise ValueError(
                f"Batch normalisation follows the cycles of {followed!r}, which `{self._name}` does not call: take "
                "it out of the model's attributes, or pass to `compile` the optimizers that are called."
                " [accum: batch-norm-layer]"
            )
        if not self.is_traced:
            return
        for optimizer, paths in self._calls.values():
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
