"""Check how an `AccumOptimizer` is created and called."""

import re
import weakref
from typing import Any, List, Optional, Sequence, Set

from accum import _check, _rows, _tf
from accum._engine._cycle import Cycle
from accum._engine._plan import Plan
from accum._tf import GradsAndVars, tf
from accum._tf.types import AccumSteps

LIBRARIES = ("tensorflow", "tensorflow_core", "tensorflow_estimator", "horovod")  # tf.contrib is in one of them
DIFFERENTIATES = re.compile(r"(^|/)gradients(_\d+)?/")  # the name scope of `tf.gradients`

WITH_SUM = ", and divide penalties on weights by `accum_steps`, because each micro-batch adds them once more."
NO_COMMON_WEIGHT = (
    "With several losses, each has its own count: pass them as a list to `minimize`, and their own `weight` to "
    "`mean_over_cycle`, without `weighing`. [accum: several-losses]"
)


def either_accum_steps(accum_steps: AccumSteps, steps_per_update: Optional[int]) -> AccumSteps:
    """Return `accum_steps`, or `steps_per_update` if it is given instead."""
    if steps_per_update is None:
        return accum_steps
    if accum_steps != 1:
        raise ValueError("Pass `accum_steps` only: `steps_per_update` is another name of it. [accum: arguments]")
    _check.warn("`steps_per_update` is now called `accum_steps`. [accum: renamed]", DeprecationWarning)
    return _check.accum_steps(steps_per_update, "steps_per_update")


def require_inner(optimizer: Any) -> None:
    """Raise unless `optimizer` can be the inner optimizer."""
    if _tf.optimizers.is_loss_scale_optimizer(optimizer):
        raise ValueError(
            "A loss scale optimizer has to be outermost, where it checks each micro-batch for overflow: put "
            f"{type(optimizer).__name__} around the `AccumOptimizer`. [accum: loss-scale]"
        )
    if not _tf.optimizers.is_graph_optimizer(optimizer) and not _tf.optimizers.is_keras_optimizer(optimizer):
        raise TypeError(
            "`optimizer` must be a `tf.compat.v1.train.Optimizer` or a legacy Keras optimizer. "
            f"Received: {optimizer!r}."
        )
    if _tf.optimizers.is_new_optimizer(optimizer):
        raise TypeError(
            "A Keras optimizer that is built from a list of variables does not update them in a static graph, where "
            f"only its counter is run: use {_tf.optimizers.FOR_STATIC_GRAPHS}. Received: {optimizer!r}."
            " [accum: graph-optimizer]"
        )


@_check.rule
def warn_of_changed_gradients(optimizer: Any, listed: GradsAndVars, before: int) -> None:
    """Warn if a user's `compute_gradients` computes something of gradients that is not linear.

    Args:
      optimizer: the inner optimizer.
      listed: list of (gradient, variable) that it returned.
      before: the number of operations that the graph had before.
    """
    owner = next((cls for cls in type(optimizer).__mro__ if "compute_gradients" in vars(cls)), type(optimizer))
    if owner.__module__.split(".")[0] in LIBRARIES:
        return
    grads = tf.nest.flatten([grad for grad, _ in listed if grad is not None], expand_composites=True)
    used = set(_tf.op_walks.ancestors([grad.op for grad in grads]))
    changing: Set[tf.Operation] = set()  # of gradients
    created = tf.compat.v1.get_default_graph().get_operations()[before:]
    for op in created:
        sources = [tensor.op for tensor in op.inputs]
        if not DIFFERENTIATES.search(op.name) and any(
            one in changing or DIFFERENTIATES.search(one.name) for one in sources
        ):
            changing.add(op)
    kinds = {op.type for op in changing & used} & _tf.gradient_changes.NONLINEAR
    others = [op for op in created if op in used and not DIFFERENTIATES.search(op.name)]
    kinds |= {op.type for op in others} & _tf.random_ops.DRAWING
    if kinds:
        _check.warn(
            f"`{owner.__name__}.compute_gradients` changes the gradients of each micro-batch. In a full batch, "
            "clipping, noise and whatever is not linear act on the mean: leave them out there, and pass them as "
            f"`transform=` to the `AccumOptimizer`. Received: {type(optimizer).__name__}, with operations of type "
            f"{sorted(kinds)}. [accum: clipping]",
            _check.InexactWarning,
        )


_COMPUTED: "weakref.WeakKeyDictionary[tf.Graph, Set[str]]" = weakref.WeakKeyDictionary()
"""In a graph: the names of operations whose results were returned as gradients, beside those of `tf.gradients`."""


def note_computed(listed: GradsAndVars) -> None:
    """Note that these (gradient, variable) were just computed."""
    names = [getattr(grad, "values", grad).op.name for grad, _ in listed if grad is not None]
    _COMPUTED.setdefault(_tf.graphs.outermost_graph(), set()).update(names)


@_check.rule
def warn_of_gradients_changed_between(listed: GradsAndVars) -> bool:
    """Warn if what is not linear has been done to gradients after they were computed. Returns whether it has.

    All is left out where gradients are computed in a way that is not recognized, as by a tape.

    Args:
      listed: list of (gradient, variable) from which a train op is to be created.
    """
    computed = _COMPUTED.get(_tf.graphs.outermost_graph(), set())
    found = _tf.gradient_changes.nonlinear_changes(
        [grad for grad, _ in listed if grad is not None],
        lambda op: op.name in computed or DIFFERENTIATES.search(op.name) is not None,
    )
    if found:
        _check.warn(
            "The gradients of each micro-batch are changed after they are computed and before `AccumOptimizer` "
            "receives them. In a full batch, clipping, noise and whatever is not linear act on the mean gradient: "
            "leave them out there, and pass them as `transform=` to the `AccumOptimizer`. Received: operations of type "
            f"{sorted({op.type for op in found})}, such as {found[-1].name!r}. [accum: clipping]",
            _check.InexactWarning,
        )
    return bool(found)


def require_graph() -> None:
    """Raise unless a static graph is being built."""
    if not _tf.graphs.in_static_graph():  # a `tf.function`, such as the train step of Keras' `fit`, is not one either
        raise RuntimeError(
            "`AccumOptimizer` creates ops of a static graph but was called eagerly: enter a `tf.Graph`, or use "
            "`accum.GradientAccumulateOptimizer`. [accum: graph-mode]"
        )


def what_is_counted(count_micro_steps: bool, count_steps: bool) -> str:
    """Return what accumulation itself counts in `global_step`: "micro_steps", "steps" or nothing, ""."""
    if count_micro_steps and count_steps:
        raise ValueError(
            "`global_step` counts either: pass `count_micro_steps` or `count_steps`, but not both. [accum: arguments]"
        )
    return "micro_steps" if count_micro_steps else "steps" if count_steps else ""


def require_scalar(loss: Any, reduction: str) -> None:
    """Raise if the gradient of a loss is that of a sum of several elements, but micro-batches are averaged."""
    if reduction != "sum" and tf.is_tensor(loss) and loss.shape.rank and _has_elements_for_examples(loss):
        raise ValueError(
            "`loss` must be a scalar: TensorFlow differentiates the sum of its elements, and the mean of such sums "
            "over micro-batches is a fraction of the gradient of the full batch. Pass `tf.reduce_mean(loss)`. Or, for "
            f'the sum, pass `reduction="sum"` to the `AccumOptimizer`{WITH_SUM} Received: loss={loss!r}.'
        )


def losses_of(listed: GradsAndVars, reduction: str) -> List[tf.Tensor]:
    """Return the losses that `tf.gradients` has differentiated to gradients; raises as `require_scalar` does.

    Args:
      listed: list of (gradient, variable), with which nothing has been done since, or there are no losses.
      reduction: how micro-batches are reduced.
    """
    losses = _tf.graph_losses.differentiated([getattr(grad, "values", grad) for grad, _ in listed if grad is not None])
    for loss in losses:
        require_scalar(loss, reduction)
    return losses


def _has_elements_for_examples(loss: tf.Tensor) -> bool:
    """Whether the elements of a loss may be those of examples, rather than a fixed number of means."""
    if loss.shape.num_elements() == 1:
        return False
    before = _tf.op_walks.ancestors([loss.op])
    data = [tensor for op in before if _tf.op_walks.gives_data(op) for tensor in op.outputs if tensor.shape.rank]
    if loss.shape.num_elements() is None or not data:
        return True
    try:
        rows = _rows.analyse(loss.graph, [op.name for op in before], {tensor.name: _rows.Rows(0, 1) for tensor in data})
    except _rows.ConstantBatchSize:
        return True
    return rows.rows(loss.name) is not None


def require_before_train_op(name: str, has_train_op: bool) -> None:
    """Raise if a method is called too late, or where there are several replicas."""
    if has_train_op:
        raise ValueError(f"`{name}` must be called before the first train op is created, which takes it into account.")
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        raise ValueError(f"`{name}` does not support several replicas. [accum: replicas]")


def require_before_single_steps(has_train_op: bool, has_idle_op: bool) -> None:
    """Raise if an optimizer with `accum_steps=1` is to accumulate, but has given out an op that does not expect it."""
    if has_train_op or has_idle_op:
        what = (
            "a train op, which makes a step by itself" if has_train_op else "a `flush` or `reset`, which does nothing"
        )
        raise ValueError(
            "With `accum_steps=1`, only the ops of `accumulation_ops` accumulate: call it first, or pass "
            "another `accum_steps` to the optimizer. "
            f"Received: accum_steps=1, after {what}. [accum: no-accumulation]"
        )


def require_own_step(name: str, waits_for_others: bool) -> None:
    """Raise where the chief makes the steps of all workers, so that nothing can run after one of them here."""
    if waits_for_others:
        raise ValueError(
            f"`{name}` does not support a `SyncReplicasOptimizer`, whose steps are made by the chief's queue runner: "
            "run what should follow a step on the chief, when `global_step` has changed. [accum: sync-replicas]"
        )


def require_no_skipped_cycle(plan: Plan, waits_for_others: bool) -> None:
    """Raise where a step that is left out would leave the other workers waiting."""
    if waits_for_others and plan.nonfinite == "skip_cycle":
        raise ValueError(
            "A worker that skips a cycle gives no gradient to the other workers of a `SyncReplicasOptimizer`, which "
            'wait for it: use `nonfinite="skip_micro"` or "propagate". Received: nonfinite=\'skip_cycle\'.'
            " [accum: sync-replicas]"
        )


def require_several_losses(plan: Plan, default_weight: Any) -> None:
    """Raise where losses that are means over different things can't be accumulated, each by its own count."""
    if plan.reduction != "mean":
        raise ValueError(
            f'Several losses, each with its own count, need `reduction="mean"`. Received: {plan.reduction!r}.'
            " [accum: several-losses]"
        )
    if plan.nonfinite != "propagate":
        raise ValueError(
            f'Several losses, each with its own count, need `nonfinite="propagate"`. Received: {plan.nonfinite!r}.'
            " [accum: several-losses]"
        )
    if default_weight is not None:
        raise ValueError(NO_COMMON_WEIGHT)
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        raise ValueError("Several losses, each with its own count, do not support several replicas. [accum: replicas]")


def require_no_waiting(listed: GradsAndVars, waits_for_others: bool) -> None:
    """Raise if workers wait for each other on every run, because a conditional train op does not step then."""
    is_around = any("AccumulatorTakeGradient" in grad.op.type for grad, _ in listed if isinstance(grad, tf.Tensor))
    if is_around or waits_for_others:
        raise ValueError(
            "`SyncReplicasOptimizer` makes a step on every run and can't be inside a conditional: make it the "
            "inner optimizer, and run the ops of `accumulation_ops`, with `apply` once per step on every worker."
            " [accum: sync-replicas]"
        )


def require_same_step_counter(cycle: Cycle, known_step: Any, global_step: Any, counts_micro_steps: bool) -> None:
    """Raise if a schedule has no step counter, or if `global_step` or the graph differs from that of earlier calls.

    Args:
      cycle: the optimizer's `Cycle`.
      known_step: the `global_step` of the earlier calls.
      global_step: that of this call.
      counts_micro_steps: whether it counts micro steps.
    """
    if cycle.plan.is_schedule and (global_step is None or counts_micro_steps):
        raise ValueError(
            "A schedule of `accum_steps` needs a step counter: pass a `global_step`, without `count_micro_steps`."
            " [accum: arguments]"
        )
    if cycle.is_built and cycle.state.micro_step.graph is not _tf.graphs.outermost_graph():
        raise ValueError(
            "An `AccumOptimizer` belongs to the graph of its first call: create one for each graph. [accum: graph-mode]"
        )
    if cycle.is_built and known_step is not global_step:
        raise ValueError(
            f"`global_step` must be the same in all calls. Received: {global_step!r}, after {known_step!r}."
        )


def require_updatable(optimizer: Any, variables: Sequence[tf.Variable]) -> None:
    """Raise unless the inner optimizer can update `variables` of this kind."""
    if _tf.optimizers.is_keras_optimizer(optimizer) and any(map(_tf.graphs.is_ref_variable, variables)):
        raise ValueError(
            "A Keras optimizer only updates resource variables: create them with `use_resource=True`, or pass a "
            "`tf.compat.v1.train.Optimizer` to `AccumOptimizer`. [accum: graph-optimizer]"
        )
