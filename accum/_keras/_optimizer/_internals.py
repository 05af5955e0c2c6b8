"""What a `GradientAccumulateOptimizer` knows beside the methods of an optimizer: its `Internals`."""

import contextlib
import itertools
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

import numpy as np

from accum import _check, _tf
from accum._clipping._transform import act_alike
from accum._engine import _replicas
from accum._engine._cycle import Cycle
from accum._engine._interfaces import CycleListener
from accum._engine._plan import Plan
from accum._keras import _step_context
from accum._keras._step_listener import StepListener
from accum._tf import Gradient, GradsAndVars, Scalar, Wait, tf

READ = "ReadVariableOp"


class _Call(NamedTuple):
    """Calls of an accumulating optimizer, one after the other, in a graph.

    Attributes:
      optimizer: its id.
      name: of the class of the inner optimizer.
      handles: ids of the handles of its variables.
      last: number of the last operation before the last call, in the order of creation.
      number: how many calls.
      accum_steps: how many make a step, or None.
    """

    optimizer: int
    name: str
    handles: Set[int]
    last: int
    number: int
    accum_steps: Optional[int]

    @property
    def is_within_cycle(self) -> bool:
        return self.accum_steps is None or self.number % self.accum_steps != 0


class Internals:
    """The package-internal interface of one `GradientAccumulateOptimizer`, returned by `internals_of`.

    Args:
      optimizer: the `GradientAccumulateOptimizer`.
    """

    def __init__(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        self._optimizer = optimizer
        # Replica, or None for all -> default weight of its current micro-batch, and whether it is the user's own:
        self._weights: Dict[Optional[int], Tuple[Union[Scalar, tf.Variable, None], bool, bool]] = {}
        self.looks_for_batch_norms = True  # until a warning has named some; a model that accumulates looks itself
        self.looks_for_changes = True  # of gradients, until a warning has named some
        self.looks_for_order = True  # of calls in a loop, likewise
        self.listeners: List[StepListener] = []
        self.unfinished_row: Any = None  # what a `StepRecorder` among them has left of the present cycle

    @property
    def cycle(self) -> Cycle:
        """The engine's `Cycle`."""
        return self._optimizer._cycle

    @property
    def is_passthrough(self) -> bool:
        """Whether the inner optimizer works alone, on every gradient as it comes."""
        return self.cycle.is_passthrough

    @property
    def may_take_several(self) -> bool:
        """Whether a step may be made of several micro steps, now or after a change of `accum_steps`."""
        return self.cycle.is_settable or not self.cycle.plan.is_one_micro_step

    def differences_from(self, plan: Plan) -> str:
        """Name the options that differ from `plan`, with both values; "" if none. It may have a `transform` besides."""
        own = self.cycle.plan
        if plan.transform is None or act_alike(plan.transform, own.transform):
            plan = plan._replace(transform=own.transform)
        options = zip(Plan._fields, own, plan)
        return "; ".join(
            f"{name}={one!r}, and the model's is {other!r}" for name, one, other in options if one != other
        )

    def variables(self) -> List[tf.Variable]:
        """Return what the step of this optimizer changes beside weights, and its sums of gradients."""
        sums = [accumulator.total for accumulator in self.cycle.accumulators()]
        return _tf.inner_optimizer.variables_of(self._optimizer.optimizer) + sums

    def add_cycle_listener(self, listener: CycleListener) -> None:
        """Notify `listener` of the events of this optimizer's cycle from now on."""
        if not any(registered is listener for registered in self.cycle.listeners):
            self.cycle.listeners.append(listener)

    def show(self, model: tf.keras.Model) -> None:
        """Tell the `transform` about the layers of `model`, if it has a `watch` method."""
        self.looks_for_batch_norms = False
        watch = getattr(self.cycle.plan.transform, "watch", None)
        if watch is not None:
            watch(model)

    def warn_of_batch_norms(self) -> None:
        """Warn once of batch normalisation that trains in the current graph."""
        if not self.looks_for_batch_norms or tf.executing_eagerly() or not self.may_take_several:
            return
        moved = _tf.op_walks.assigned_variables(tf.compat.v1.get_default_graph())
        names = [var.name.split(":")[0] for var in moved]
        names = sorted(name for name in names if name.split("/")[-1] == "moving_mean")
        self.looks_for_batch_norms = not names
        if names:
            _check.warn(
                "Batch normalization updates its moving statistics for every micro-batch, and normalises by it alone, "
                "unlike at the full batch. An optimizer can't change that: train on full batches, with "
                "`accum.GradientAccumulateModel.from_model(model, micro_batch_size=…)`, or in a loop of your own with "
                "`accum.value_and_gradients` and `whole_batch='batch_norm'`. `accum.replace_batchnorm_layers` makes "
                "only the moving statistics those of the full batch. "
                f"Received: {_check.shown(names)}. [accum: batch-norm]",
                _check.InexactWarning,
            )

    def warn_of_changed_gradients(self, grads: Sequence[Gradient], is_of_part: bool = False) -> None:
        """Warn once of what the current graph does to gradients that has to be done to those of the full batch."""
        if not self.looks_for_changes or tf.executing_eagerly() or not (self.may_take_several or is_of_part):
            return
        changes = _tf.gradient_changes
        found = changes.nonlinear_changes(grads, changes.is_of_tape)
        self.looks_for_changes = not found
        if found:
            _check.warn(
                "The gradients of each micro-batch are changed after they are computed and before the accumulating "
                "optimizer receives them. In a full batch, clipping, noise and whatever is not linear act on the "
                "mean: let the inner optimizer clip, by `clipnorm`, `clipvalue` or `global_clipnorm`, or pass them as "
                "`transform=`; or pass `micro_batch_size` alone to a `GradientAccumulateModel`, "
                "whose train step then runs once for the full batch. Received: operations of type "
                f"{sorted({op.type for op in found})}, such as {found[-1].name!r}. [accum: clipping]",
                _check.InexactWarning,
            )

    @_check.rule
    def warn_of_order(self, listed: GradsAndVars) -> None:
        """Warn once of gradients that depend on weights which another accumulating optimizer has had before, in a loop.

        Such as those of a GAN's generator, after the step of its discriminator, which only the last micro-batch makes.
        Left out is what follows whole cycles of the other one.
        """
        if tf.executing_eagerly() or _tf.graphs.in_static_graph() or not self.may_take_several:
            return
        graph, own = tf.compat.v1.get_default_graph(), id(self._optimizer)
        calls = _tf.graphs.notes_of(graph).setdefault("micro steps", [])
        if any(call.optimizer == own for call in calls) and calls[-1].optimizer != own:
            calls.clear()  # another round, in which all gradients may be computed first
        before = [call for call in calls if call.optimizer != own and call.is_within_cycle]
        if before and self.looks_for_order:
            self._warn_of_reads_since(before, [getattr(grad, "values", grad) for grad, _ in listed])
        last = max(map(_tf.graphs.creation_order, graph.get_operations()[-1:]), default=0)
        variables = [_replicas.local_variable(_tf.variables.native(var)) for _, var in listed]
        handles = {id(getattr(var, "handle", None)) for var in variables}
        number = 1 + sum(call.number for call in calls if call.optimizer == own)
        steps = self.cycle.plan.accum_steps if isinstance(self.cycle.plan.accum_steps, int) else None
        calls[:] = [call for call in calls if call.optimizer != own]
        calls.append(_Call(own, type(self._optimizer.optimizer).__name__, handles, last, number, steps))

    def _warn_of_reads_since(self, calls: Sequence["_Call"], grads: Sequence[Any]) -> None:
        outside = _tf.op_walks.outermost()
        ops = _tf.op_walks.ancestors([grad.op for grad in grads if grad is not None and not hasattr(grad, "numpy")])
        reads = [(_tf.graphs.creation_order(op), id(outside(op.inputs[0]))) for op in ops if op.type == READ]
        names = [call.name for call in calls if any(order > call.last and one in call.handles for order, one in reads)]
        if names:
            self.looks_for_order = False
            _check.warn(
                "Gradients are computed with the weights of another accumulating optimizer, after it was called. It "
                "makes its step only in the last micro-batch of a cycle, so they are computed with the new weights "
                "there, and with the old ones in the others, which no full batch does: compute the gradients of both "
                "before either is applied, or run a cycle of one and then a cycle of the other. Received: that around "
                f"{type(self._optimizer.optimizer).__name__} after that around {_check.shown(names)}."
                " [accum: train-step-order]",
                _check.InexactWarning,
            )

    def tell_of_gradients(
        self, grads: Sequence[Optional[Gradient]], weight: Optional[Scalar], is_reduced: bool
    ) -> None:
        """Tell listeners of the gradients, weighted or not, with which this optimizer is called."""
        seen = _step_context.of_optimizer(self._optimizer).parts
        for listener, parts in itertools.zip_longest(self.listeners, seen):
            listener.on_gradients(grads, weight, is_reduced, parts)

    def tell_of_update(self, grads_and_vars: GradsAndVars, changed: GradsAndVars) -> List[Wait]:
        """Tell listeners of an update by these gradients of all replicas. Returns what it waits for."""
        waits = [wait for listener in self.listeners for wait in listener.on_update(grads_and_vars, changed)]
        return [wait for wait in waits if wait is not None]

    def expect(self, model: tf.keras.Model) -> None:
        """Allow the next micro step to bring a different list of variables: those that `model` trains now."""
        if self.cycle.is_built:
            self.cycle.announce(model.trainable_variables)

    # ------------------------------------------------------------------------------------------------------------
    # Within a micro step

    @property
    def weight(self) -> Optional[Scalar]:
        """The default weight of this replica's current micro-batch, a scalar, or None."""
        weight, _, was_eager = self._current_weight
        is_known = isinstance(weight, (np.ndarray, np.generic)) or (tf.is_tensor(weight) and hasattr(weight, "numpy"))
        if was_eager and is_known and not isinstance(weight, tf.Variable) and not tf.executing_eagerly():
            raise ValueError(
                "`weighing` has a value from outside of the `tf.function` that takes the gradients, which would keep "
                "the weight of its first call: enter `weighing` in the function, pass `weight=` to `apply_gradients`, "
                f"or weigh by a `tf.Variable`. Received: {weight!r}. [accum: traced-weight]"
            )
        return _replicas.local_variable(weight).read_value() if isinstance(weight, tf.Variable) else weight

    @property
    def has_own_weight(self) -> bool:
        """Whether the user has set the default weight of this replica's current micro-batch."""
        _, is_own, _ = self._current_weight
        return is_own

    @property
    def _current_weight(self) -> Tuple[Union[Scalar, tf.Variable, None], bool, bool]:
        """(The default weight, whether the user has set it, whether eagerly)."""
        for_all = self._weights.get(None, (None, False, False))
        return self._weights.get(_replicas.replica_number(), for_all)

    @contextlib.contextmanager
    def weighing(self, weight: Union[Scalar, tf.Variable, None], is_own: bool = False) -> Iterator[None]:
        """Set the default `weight` of this replica's micro steps in this context; outside of replicas, of all of them.

        Args:
          weight: scalar, or a variable that each micro step reads; None leaves the default unchanged.
          is_own: whether the user sets it, and not a model.
        """
        replica = _replicas.replica_number() if _replicas.is_on_replica() else None
        before, current = self._weights.get(replica), self._current_weight
        self._weights[replica] = current if weight is None else (weight, is_own, is_own and tf.executing_eagerly())
        try:
            yield
        finally:
            del self._weights[replica]
            if before is not None:
                self._weights[replica] = before


def is_accumulating(optimizer: tf.keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer is a `GradientAccumulateOptimizer`."""
    return "_internals" in vars(optimizer)


def internals_of(optimizer: tf.keras.optimizers.Optimizer) -> Internals:
    """The `Internals` of a `GradientAccumulateOptimizer`."""
    return optimizer._internals


def accumulation_of(model: tf.keras.Model) -> Any:
    """Return the `ModelAccumulation` of a model; None for any other model, or one that is still being constructed."""
    return model.__dict__.get("_accum")
