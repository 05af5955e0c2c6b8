"""What is watched while a model's train step runs on micro-batches: optimizer calls, changed variables and losses.

A `Collector` takes over the gradients of optimizer calls, for the whole batch. A `StateWatch` warns of variables that
change once per micro-batch, where the full batch would change them once. A `ReportingLoss` reports the number by which
a loss divides, each time that it is computed (law L5).
"""

import contextlib
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    FrozenSet,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import numpy as np

from accum import _check, _tf
from accum._engine import _replicas
from accum._engine._micro_batches import Size
from accum._engine._statistics import Moments
from accum._keras._optimizer._wrapper import Internals, internals_of, is_accumulating
from accum._tf import Data, Gradient, GradsAndVars, Nested, Scalar, Wait, tf
from accum._tf.types import KerasContainer

if TYPE_CHECKING:
    from accum._keras._batch_norm._layer import MovingStatistics
    from accum._keras._steps._losses_over_replicas import ReplicaLosses
    from accum._keras._steps._trimmed_time import TrimmedTime


# --------------------------------------------------------------------------------------------------------------------
# Optimizer calls, and their gradients


_REMEDY = (
    "Pass each optimizer to `compile`, or keep it as an attribute of the model, or wrap it: "
    "`accum.GradientAccumulateOptimizer(optimizer, accum_steps)`."
)


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
        internals = internals_of(optimizer)
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
            "or use a plain `tf.keras.Model`, compute the gradients by `accum.value_and_gradients` before the "
            f"conditional, and apply them in it. Received: {branches[-1].name!r}. [accum: inner-function]"
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
        with self._stack as stack:
            for optimizer in self._optimizers:
                stack.enter_context(internals_of(optimizer).within(self))
            stack.enter_context(_tf.watching.watching_optimizers(self._see))
            yield

    @contextlib.contextmanager
    def calling(self, optimizer: tf.keras.optimizers.Optimizer, grads_and_vars: GradsAndVars) -> Iterator[None]:
        """Record that an accumulating optimizer makes a micro step in this context.

        Raises:
          ValueError: as `note` does.
        """
        self.note(optimizer)
        yield
        reads = self._stack.enter_context(_tf.watching.VariableReads())
        self._read_since.append((optimizer, [var for _, var in grads_and_vars], reads))

    def note(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        """Record that an accumulating optimizer begins a micro step.

        Raises:
          ValueError: the optimizer has already begun one in this train step, or may begin several in a loop.
        """
        if self.collector is not None or not internals_of(optimizer).is_passthrough:
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
        if self.collector is not None or not internals_of(optimizer).is_passthrough:
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
        raise ValueError(
            f"`{self._name}` applies gradients with an optimizer that does not accumulate. {_REMEDY} Received: "
            f"{optimizer!r}. [accum: optimizer-not-found]"
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


# --------------------------------------------------------------------------------------------------------------------
# Changed variables


class StateWatch:
    """Compares the variables of a model before and after one micro-batch.

    In a graph it looks for assignments. Batch normalisation has a warning of its own, and metrics are left out. So is
    what an optimizer changes, or a user in a conditional that asks `has_stepped` of an optimizer.
    """

    @staticmethod
    def of_cycle(model: tf.keras.Model, optimizers: Sequence[tf.keras.optimizers.Optimizer]) -> Optional["StateWatch"]:
        """Return a `StateWatch` like `of_first_batch`, but eagerly only where no optimizer makes its step next."""
        if tf.executing_eagerly() and not (model._accum.is_state_watched or all(map(_goes_on, optimizers))):
            return None
        return StateWatch.of_first_batch(model)

    @staticmethod
    def of_first_batch(model: tf.keras.Model) -> Optional["StateWatch"]:
        """Return a `StateWatch` for each trace, but eagerly, where it copies all variables, one for each `compile`."""
        if tf.executing_eagerly():
            if model._accum.is_state_watched:
                return None
            model._accum.is_state_watched = True
        return StateWatch(model)

    def __init__(self, model: tf.keras.Model) -> None:
        self._model = model
        self._variables = _candidates(model)
        self._norms: List[tf.Variable] = []
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._before: List[np.ndarray] = []
        if self._graph is None:
            self._norms = [var for _, var in _moving_means(model)]
            self._before = [_tf.variables.native(var).numpy() for var in self._variables + self._norms]
        else:
            self._count = len(self._graph.get_operations())

    def warn_of_changes(self) -> None:
        """Warn if a variable has changed, or will change, since this object was created."""
        if self._graph is None:
            watched = self._variables + self._norms
            now = [_tf.variables.native(var).numpy() for var in watched]
            moved = {id(var) for var, old, new in zip(watched, self._before, now) if not np.array_equal(old, new)}
            changed = [var for var in self._variables if id(var) in moved]
            norms = [layer for layer, var in _moving_means(self._model) if id(var) in moved]
        else:
            graph, ops = self._graph, self._graph.get_operations()[self._count :]
            handles = _tf.op_walks.assigned_handles(graph, ops)
            cycles = [
                internals_of(_tf.optimizers.without_loss_scale(one)).cycle for one in self._model._accum.optimizers
            ]
            clocks = [var for cycle in cycles for var in (cycle.counter.has_stepped, cycle.state.micro_step)]
            in_branches = _tf.op_walks.assigned_in_branches(graph, ops, [_handle_of(var) for var in clocks])
            inside_of = {id(outside): inside for outside, inside in _tf.op_walks.captures_of(graph)}
            inside = {id(var): inside_of.get(id(_handle_of(var))) for var in self._variables}
            changed = [var for var in self._variables if id(inside[id(var)]) in handles]
            is_settled = _tf.graph_parts.is_settled_at_once  # the next micro-batch finds it as the full batch would
            changed = [var for var in changed if not is_settled(graph, ops, inside[id(var)])]
            changed += [
                var
                for var in self._variables
                if id(inside[id(var)]) in in_branches - handles
                and not any(cycle.accumulator_of(_tf.variables.native(var)) for cycle in cycles)
            ]
            means = _moving_means(self._model)
            norms = [layer for layer, var in means if id(inside_of.get(id(_handle_of(var)))) in handles]
        _warn_of(self._model, _names_of(changed))
        _note_batch_norms(self._model, norms)


def warn_of_moved(model: tf.keras.Model, handles: Iterable[tf.Tensor]) -> None:
    """Warn of variables to which each micro-batch of a whole batch assigns, given their handles."""
    moved = {id(handle) for handle in handles}
    if moved:
        _warn_of(model, names_of_moved(model, handles))
        _note_batch_norms(model, [layer for layer, var in _moving_means(model) if id(_handle_of(var)) in moved])


def names_of_moved(model: tf.keras.Model, handles: Iterable[tf.Tensor]) -> List[str]:
    """Return the names of variables, given their handles, but for those of metrics, batch norms and random numbers."""
    moved = {id(handle) for handle in handles}
    changed = [var for var in _candidates(model) if id(_handle_of(var)) in moved] if moved else []
    others = len(moved - {id(_handle_of(var)) for var in [*_expected(model), *changed]}) if moved else 0
    more = [f"{others} that no attribute of the model or of a layer holds"] if others else []
    return _names_of(changed) + more


def _moving_means(model: tf.keras.Model) -> List[Tuple[tf.keras.layers.Layer, tf.Variable]]:
    """Return (layer, its moving mean) for the batch normalisation that moves it at each call in training."""
    layers = [layer for layer in _tf.batch_norm.batch_norms_in(model) if not _tf.batch_norm.is_accumulating(layer)]
    return [(layer, layer.moving_mean) for layer in layers if getattr(layer, "moving_mean", None) is not None]


def _note_batch_norms(model: tf.keras.Model, layers: Sequence[tf.keras.layers.Layer]) -> None:
    """Note which batch normalisation has run in training, and warn of it once batches are split."""
    own = model._accum
    own.batch_norms_in_training = [layer.name for layer in layers] or own.batch_norms_in_training
    if not own.size.is_auto or own.size.in_use != "auto":
        warn_of_batch_norms(model)


def _names_of(variables: Sequence[tf.Variable]) -> List[str]:
    return sorted(_tf.variables.path_of(var) for var in variables)


def _warn_of(model: tf.keras.Model, names: List[str]) -> None:
    if names and names != model._accum.told_of_state:
        model._accum.told_of_state = names
        other_way = "or where `has_stepped` of the optimizer is true"
        if model._accum.whole_batch:
            other_way = "or in the train step"
        elif model._accum.size.splits:
            other_way = "or in the train step without `whole_batch=()`, where it runs once per batch"
        _check.warn(
            "The train step changes variables once per micro-batch, and before the optimizer has made its step, "
            "unlike at the full batch, whose result this may change: freeze the layers that do so, or change the "
            f"variables in a callback {other_way}. Changed: {names}. [accum: changed-variables]",
            _check.InexactWarning,
        )


def _candidates(model: tf.keras.Model) -> List[tf.Variable]:
    """Return the variables of a model but for those of metrics, batch normalisation and random numbers."""
    ids = {id(_tf.variables.native(var)) for var in _expected(model)}
    variables = list(model.variables) + _tf.models.untracked_variables(model)
    return [var for var in variables if id(_tf.variables.native(var)) not in ids]


def _expected(model: tf.keras.Model) -> List[tf.Variable]:
    """Return the variables of metrics, batch normalisation and random numbers."""
    expected = [var for layer in _tf.batch_norm.batch_norms_in(model) for var in layer.variables]
    metrics = list(model.metrics) + _tf.steps.metrics_of_layers(model)
    return expected + [var for metric in metrics for var in metric.variables] + _tf.steps.seeds_of(model)


def _goes_on(optimizer: tf.keras.optimizers.Optimizer) -> bool:
    """Whether the next micro step of an accumulating optimizer begins a cycle of several."""
    accum_steps = optimizer.accum_steps
    if isinstance(accum_steps, dict):
        steps = int(_tf.variables.native(optimizer.iterations).numpy())
        accum_steps = accum_steps[max(first for first in accum_steps if first <= steps)]
    return accum_steps > 1 and int(optimizer.micro_step) == 0


def _handle_of(var: tf.Variable) -> Optional[tf.Tensor]:
    return getattr(_replicas.local_variable(_tf.variables.native(var)), "handle", None)


_BATCH_NORMS = (
    "Batch normalization updates its moving statistics for every micro-batch, and normalises by it alone, unlike at "
    "the full batch: "
)


def warn_of_batch_norms(model: tf.keras.Model) -> None:
    """Warn once of the batch normalisation of Keras that has run in training."""
    own = model._accum
    if not own.batch_norms_in_training or not own.is_first_time("batch norms"):
        return
    whole = "pass `whole_batch='batch_norm'`"
    if own.size.requested is None:
        other = "accum_steps" if own.size.tokens is None else "micro_batch_tokens"
        whole = f"train on full batches with `micro_batch_size` and `whole_batch='batch_norm'` in place of `{other}`"
    _check.warn(
        f"{_BATCH_NORMS}{whole}. `accum.replace_batchnorm_layers` makes the moving statistics alone those of the full "
        f"batch. Received: {_check.shown(own.batch_norms_in_training)}. [accum: batch-norm]",
        _check.InexactWarning,
    )


def warn_of_batches_in_prediction(model: tf.keras.Model) -> None:
    """Warn once of batch normalisation that was built with `training=True`, if evaluation and prediction are split."""
    if not model._accum.is_first_time("batch norms in prediction"):
        return
    norms = _tf.layer_calls.batch_norms_always_in_training(model)
    layers = sorted({layer.name for layer in norms if layer.trainable})
    if layers:
        _check.warn(
            "Batch normalization that is always in training normalises by micro-batches in `evaluate` and `predict` "
            "too, unlike the full batch: pass `whole_batch='batch_norm'`, or call the layers without `training=True`. "
            f"Received: {layers}. [accum: batch-norm]",
            _check.InexactWarning,
        )


# --------------------------------------------------------------------------------------------------------------------
# The number by which a loss divides


class ReportingLoss:
    """Wrap Keras' container of compiled losses, and report their denominator if it is not the number of examples.

    Args:
      container: the container that Keras' `compile` made; all other attributes are read from it.
      report: function of the denominator, a float32 scalar tensor; None: report nothing.
      over_replicas: function that returns the `ReplicaLosses` of the current step, or None.
      added: function that returns the losses that layers have added.
      sums: function that returns the `AddedSums` of the current micro-batch, or None.
      trimmed: function that returns the `TrimmedTime` of the current micro-batch, or None.

    Attributes:
      container: the same.
      unlike: names of losses, of outputs or added by layers, that divide by different numbers -> what each divides by.
      has_warned: whether the user has been told.
    """

    def __init__(
        self,
        container: KerasContainer,
        report: Optional[Callable[[tf.Tensor], None]],
        over_replicas: Callable[[], Optional["ReplicaLosses"]],
        added: Callable[[], Sequence[tf.Tensor]],
        sums: Callable[[], Optional["AddedSums"]],
        trimmed: Callable[[], Optional["TrimmedTime"]],
    ) -> None:
        self.container = container
        self._report = report
        self._over_replicas = over_replicas
        self._added = added
        self._sums = sums
        self._trimmed = trimmed
        self.unlike: Dict[str, str] = {}
        self.has_warned = False
        # Replica -> what calls in its current train step have reported and returned.
        self._reported: Dict[int, List[Tuple[List[tf.Tensor], tf.Tensor]]] = {}

    @contextlib.contextmanager
    def of_train_step(self) -> Iterator[None]:
        """Look for terms beside the compiled losses in this context, in which a replica runs a train step."""
        replica = _replicas.replica_number()
        self._reported[replica] = []
        try:
            yield
        finally:  # tensors keep their graph
            self._reported.pop(replica, None)

    def compare(self, total: Any, added: Sequence[tf.Tensor]) -> None:
        """Note whether what a `compute_loss` of the user's returns has terms beside the compiled losses, in a graph.

        Args:
          total: what it has returned.
          added: the losses that layers have added.
        """
        compiled = [returned for _, returned in self._reported.get(_replicas.replica_number(), ())]
        if not compiled or tf.executing_eagerly() or not isinstance(total, tf.Tensor):
            return
        if total.graph is compiled[0].graph and not _adds_up(total, [*compiled, *added]):
            self.unlike = {"compiled losses": "elements that count", "terms of `compute_loss`": "examples"}

    def __call__(
        self, y_true: Nested, y_pred: Nested, sample_weight: Nested = None, *args: object, **kwargs: object
    ) -> tf.Tensor:
        sums, name = self._sums(), "regularization_losses"  # in Keras 2, which passes it by name
        if sums is not None and kwargs.get(name):
            kwargs[name] = [sums.of_batch(loss) for loss in kwargs[name]]  # type: ignore[attr-defined]
        over_replicas = self._over_replicas()
        if over_replicas is None:
            return self._computed(y_true, y_pred, sample_weight, *args, **kwargs)
        with over_replicas.compiled(self.container, y_true, y_pred, sample_weight) as gathered:
            return self._computed(*gathered, *args, **kwargs)

    def _computed(
        self, y_true: Nested, y_pred: Nested, sample_weight: Nested, *args: object, **kwargs: object
    ) -> tf.Tensor:
        trimmed = self._trimmed()
        changed = _tf.losses.zero_if_all_are_ignored(self.container) if trimmed is None else trimmed.scaled
        if self._report is None and changed is None:
            return self.container(y_true, y_pred, sample_weight, *args, **kwargs)
        outputs, weights = _tf.losses.without_empty_masks(y_pred, sample_weight)
        with _tf.losses.recording_losses(self.container, y_true, y_pred, changed) as calls:
            total = self.container(y_true, outputs, weights, *args, **kwargs)
        if self._report is None:
            return total
        named = _tf.losses.counted_by_losses(calls)
        counted = [one for _, one in named]
        if counted and not any(one is None for one in counted):
            # Exact if all outputs share the same mask and weights.
            self._report(tf.add_n([tf.reduce_sum(one) for one in counted]))
            reported = self._reported.get(_replicas.replica_number())
            if reported is not None:
                if not _divide_alike([one for before, _ in reported for one in before] + counted):
                    self.unlike = {"compiled losses": "elements that count", "their second call": "other elements"}
                reported.append((counted, total))
        if self._added():
            named.append(("losses that layers add", None))
        if not _divide_alike([one for _, one in named]):
            self.unlike = {name: "examples" if one is None else "elements that count" for name, one in named}
        return total

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "container" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.container, name)


def _divide_alike(counted: Sequence[Optional[tf.Tensor]]) -> bool:
    """Whether the numbers by which losses divide are in the same proportion in all micro-batches, as far as is known.

    Args:
      counted: for each loss, what each element counts; None: 1 each.
    """
    if all(one is None for one in counted):
        return True
    if tf.executing_eagerly():
        shares = [1.0 if one is None else float(tf.reduce_mean(one)) for one in counted]
        return np.allclose(shares, shares[0])
    return len({None if one is None else _sources(one) for one in counted}) == 1


# Operations whose gradient reaches all their inputs alike, so that their output is a sum of terms, perhaps scaled.
_SUMMING = frozenset(
    ["Add", "AddN", "AddV2", "Cast", "CheckNumerics", "EnsureShape", "ExpandDims", "Identity", "IdentityN", "Mean"]
    + ["Neg", "Pack", "Reshape", "Squeeze", "StridedSlice", "Sub", "Sum"]
)


def _adds_up(total: tf.Tensor, losses: Sequence[tf.Tensor]) -> bool:
    """Whether a loss in a graph is a sum of compiled and added losses, and of terms that depend on no example."""
    ends, waiting = {loss.name for loss in losses}, [total]
    while waiting:
        term = waiting.pop()
        if term.name in ends or term.op.type == "Const":
            continue
        if term.op.type in _SUMMING:
            waiting.extend(term.op.inputs)
        elif term.op.type in ("Mul", "RealDiv") and any(_is_of_no_example(factor) for factor in term.op.inputs):
            waiting.extend(factor for factor in term.op.inputs if not _is_of_no_example(factor))
        elif not _is_of_no_example(term):
            return False
    return True


def _is_of_no_example(tensor: tf.Tensor) -> bool:
    """Whether a tensor in a graph is computed from constants and variables alone."""
    graph = tensor.graph
    return all(graph.get_tensor_by_name(name).op.type == "ReadVariableOp" for name in _sources(tensor))


def _sources(tensor: tf.Tensor) -> FrozenSet[str]:
    """Return the names of the tensors in a graph from whose values this one is computed."""
    sources, seen, waiting = set(), {tensor.name}, [tensor]
    while waiting:
        part = waiting.pop()
        inputs: List[Any] = [] if part.op.type == "Shape" else list(part.op.inputs)
        if not any(source.dtype in (tf.resource, tf.variant) for source in inputs) and inputs:
            waiting.extend(source for source in inputs if source.name not in seen)
            seen.update(source.name for source in inputs)
        elif part.op.type not in ("Const", "Shape"):
            sources.add(part.name)
    return frozenset(sources)


def warn_of_unlike_losses(model: tf.keras.Model) -> None:
    """Warn once for each `compile` if the losses that have just been computed divide by different numbers."""
    container = getattr(model, _tf.losses.LOSS_CONTAINER, None)
    if isinstance(container, ReportingLoss) and container.unlike and not container.has_warned:
        container.has_warned = True
        _check.warn(
            "Losses divide by different numbers, and a micro-batch has one weight for all of them: unless every "
            "micro-batch has the same share of padding or ignored elements, the update differs from that of the full "
            "batch. Pass `micro_batch_size` alone, or let all losses divide by examples: give "
            "padding and ignored elements a `sample_weight` of 0 instead, and hide masks from the losses by "
            f"`tf.keras.layers.Lambda(tf.identity)` at the end of each output. Received: {container.unlike}."
            " [accum: loss-counts]",
            _check.InexactWarning,
        )


class AddedSums:
    """Scales losses with an entry for each example, which layers add and Keras adds up, to their sum over the batch.

    The losses of micro-batches are averaged by their examples. So each of these has as many times its value as the
    batch has its examples.

    Args:
      count, total: the number of examples in the micro-batch, and in the batch.

    Where the number of examples is known while the layer is called, a length does not tell entries for examples from
    those for features. Such a loss stays as it is, and is warned of.

    Attributes:
      has_scaled: whether Keras has added up such a loss.
    """

    def __init__(self, count: Size, total: Size) -> None:
        self._count = count
        self._total = total
        self.has_scaled = False

    def of_batch(self, loss: tf.Tensor) -> tf.Tensor:
        """Return what stands for a loss that a layer has added to the micro-batch."""
        if not self.has_entries(loss):
            return loss
        self.has_scaled = True
        scaled = loss * (tf.cast(self._total, loss.dtype) / tf.cast(self._count, loss.dtype))
        return scaled + tf.stop_gradient(loss - scaled) if _tf.steps.LOGS_ADDED_MEAN else scaled

    def has_entries(self, loss: tf.Tensor) -> bool:
        """Whether a loss has entries for each example, as its unknown length tells."""
        return may_have_entries(loss) and (not loss.shape.rank or loss.shape[0] is None)

    def is_ambiguous(self, loss: tf.Tensor) -> bool:
        """Whether a loss may have entries for each example, or as many for something else."""
        if self.has_entries(loss) or not may_have_entries(loss):
            return False
        return not isinstance(self._count, int) or loss.shape[0] % max(self._count, 1) == 0


def may_have_entries(loss: tf.Tensor) -> bool:
    """Whether a loss that Keras adds up may have entries for each example, rather than for weights."""
    return _tf.steps.is_summed(loss) and (tf.executing_eagerly() or not _is_of_no_example(loss))


def warn_of_summed_losses(model: tf.keras.Model, is_split: bool, is_cycle: bool) -> None:
    """Warn once of losses that layers have just added, and Keras adds up over fewer examples than the full batch has.

    Args:
      model: a `GradientAccumulateModel`.
      is_split: whether losses are those of the micro-batches of a batch.
      is_cycle: whether gradients of several batches are averaged.
    """
    sums, added = model._accum.added_sums, _tf.steps.added_losses(model)
    summed = [loss for loss in added if (may_have_entries if sums is None else sums.has_entries)(loss)]
    if not is_cycle and (not is_split or (sums is not None and sums.has_scaled)):
        summed = []
    summed += [loss for loss in added if sums is not None and sums.is_ambiguous(loss)]
    if summed and model._accum.is_first_time("summed losses"):
        _check.warn(
            "Keras adds up the entries of a loss that a layer adds by `add_loss`, and a micro-batch has fewer of "
            "them than the full batch: add their mean, or pass `micro_batch_size`, without "
            f"`accum_steps`. Received: losses of shape {[tuple(loss.shape) for loss in summed]}. [accum: added-losses]",
            _check.InexactWarning,
        )


def warn_of_summed_activities(model: tf.keras.Model) -> None:
    """Warn of layers whose regularization of their activity adds up over examples in the installed Keras."""
    layers = [
        layer.name for layer in _tf.models.layers_of(model) if getattr(layer, "activity_regularizer", None) is not None
    ]
    if layers and _tf.steps.sums_activities():
        _check.warn(
            "Before Keras 3.13, the regularization of a layer's activity is a sum over the examples that the layer "
            "sees, and smaller in micro-batches than in the full batch. Install Keras 3.13 or newer, or call "
            "`self.add_loss` with a mean over the examples in a layer of your own. Received: activity_regularizer of "
            f"{layers}. [accum: added-losses]",
            _check.InexactWarning,
        )


# Base classes in `transformers` whose built-in loss is a mean over the labels other than -100. The number of these
# labels differs between texts.
_MEANS_OVER_LABELS = {
    "TFCausalLanguageModelingLoss",
    "TFMaskedLanguageModelingLoss",
    "TFNextSentencePredictionLoss",
    "TFTokenClassificationLoss",
}


_MEAN_OF_SUMS = (
    "The gradient of a loss with reduction SUM or NONE is a sum over examples, so the mean over micro-batches "
    "differs from the full batch: pass `reduction='sum', micro_batch_weight='equal'`, or compile a loss that "
    "is a mean. [accum: sum]"
)


def warn_of_sums_in_cycle(model: tf.keras.Model, optimizers: Sequence[tf.keras.optimizers.Optimizer]) -> None:
    """Warn once of losses that are sums over examples if updates have come to take several batches after `compile`."""
    options = model._accum.options.for_optimizers
    if options["accum_steps"] != 1 or options["reduction"] == "sum":  # `compile` has warned, or they are added up
        return
    adds_up = _tf.losses.adds_up_examples(getattr(model, _tf.losses.LOSS_CONTAINER, None))
    accumulates = any(internals_of(optimizer).may_take_several for optimizer in optimizers)
    if adds_up and accumulates and model._accum.is_first_time("sums in a cycle"):
        _check.warn(_MEAN_OF_SUMS, _check.InexactWarning)


def warn_of_sums_in_batch(model: tf.keras.Model, train_step: Callable[[Data], Nested], sums: bool) -> None:
    """Warn once of losses that may be sums over examples, where the micro-batches of a batch are put together.

    Args:
      model: a `GradientAccumulateModel` whose batches are split.
      train_step: what runs on each micro-batch.
      sums: whether the compiled losses sum over examples, so that gradients are added up.
    """
    options, own = model._accum.options, model._accum
    is_mean = options.for_optimizers["reduction"] != "sum"
    has_own_loss = _tf.losses.is_of_user(getattr(model, "compute_loss", None), "compute_loss")
    if _tf.steps.is_step_of_keras(train_step, "train_step") and not has_own_loss:
        return
    name = f"`{_tf.models.name_of_class(model)}`"
    if sums and own.is_first_time("sums in a train step"):
        _check.warn(
            f"{name} has a `train_step` or `compute_loss` of its own, and a compiled loss of reduction SUM. So the "
            "gradients of a batch's micro-batches are added up, which differs from the full batch if the loss is "
            "divided by the number of examples, and logs other than the losses of Keras are averaged: compile losses "
            "that are means, or pass `micro_batch_size` alone. [accum: sum]",
            _check.InexactWarning,
        )
    if not sums and not is_mean and not options.weighs_as_keras and own.is_first_time("means in a train step"):
        _check.warn(
            f"{name} has a `train_step` or `compute_loss` of its own. `reduction='sum'` adds up the batches of a "
            "cycle, but the gradients of a batch's micro-batches are averaged, which differs from the full batch if "
            "the loss is a sum over examples: let it be a mean, or pass `micro_batch_size` alone, "
            "or `accum_steps` alone. [accum: sum]",
            _check.InexactWarning,
        )


def warn_of_inexact_loss(model: tf.keras.Model, model_options: Any) -> None:
    """Warn if the compiled loss of `model` is not exact with the arguments in `model_options`."""
    container = getattr(model, _tf.losses.LOSS_CONTAINER, None)
    options = model_options.for_optimizers
    accumulates = options["accum_steps"] != 1  # batches: what is only split is exact
    if options["reduction"] != "sum" and accumulates and _tf.losses.adds_up_examples(container):
        _check.warn(_MEAN_OF_SUMS, _check.InexactWarning)
    bases = {base.__name__ for base in type(model).__mro__}
    has_own_loss = getattr(model, "_using_dummy_loss", False)  # what `transformers` calls it
    if model_options.weighs_as_keras and has_own_loss and bases & _MEANS_OVER_LABELS:
        _check.warn(
            f"The loss of {type(model).__name__} is a mean over the labels other than -100, whose number differs "
            "between micro-batches: pass `micro_batch_weight=`, a function `(x, y, sample_weight)` that counts them."
            " [accum: loss-counts]",
            _check.InexactWarning,
        )
