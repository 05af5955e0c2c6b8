"""The mean of a loss or metric over the micro-batches of a cycle, which takes the place of the batch's value."""

from typing import Any, Callable, List, NamedTuple, Optional, Union

from accum import _check, _tf
from accum._engine._cycle import Cycle
from accum._engine._gradients import count_nonfinite
from accum._engine._interfaces import CycleListener
from accum._tf import GradsAndVars, Scalar, tf
from accum.compat.v1._engine_adapter import GraphAdapter

OTHER_WEIGHTS = (
    "`mean_over_cycle` returns one tensor for all train ops, which has the weights of the first: pass the same tensor "
    "as `weight` to each, or its own `weight` to `mean_over_cycle`. [accum: mean-over-cycle]"
)
OTHER_GRADIENTS = (
    "`mean_over_cycle` leaves out the micro-batches that `nonfinite` skips by the gradients of the first train op: "
    'pass the same gradients to each train op, or `nonfinite="propagate"`, or use an `AccumOptimizer` for each.'
    " [accum: mean-over-cycle]"
)

IN_CONDITIONAL = (
    "`mean_over_cycle` needs a train op outside of conditionals, because its mean is computed in each run. A dynamic "
    'loss scale applies gradients in a conditional: use a fixed scale, with `nonfinite="skip_micro"` if gradients may '
    "overflow, or show the loss of the micro-batch. [accum: mean-over-cycle]"
)


class CycleSums(NamedTuple):
    """Over micro-batches, as scalar tensors or variables; None, if it is always 0.

    Attributes:
      total: the weighted sum of a value.
      weight: the sum of the weights.
      refusals: how many micro-batches allow no step.
    """

    total: Any
    weight: Any
    refusals: Any


class CycleMean(CycleListener):
    """Accumulate a value over the micro-batches of a cycle.

    Args:
      value: scalar tensor.
      weight: its weight in each micro-batch, or None for that of the train op.
      number: the number of means before it.

    Attributes:
      tensor: the mean, for users. It is computed from what `follow` provides; until then, it is the value itself.
      now: the mean; train ops wait for it, because they change the variables that it is computed from.
    """

    def __init__(self, value: tf.Tensor, weight: Optional[Scalar], number: int) -> None:
        if not tf.is_tensor(value) or not value.dtype.is_floating:
            raise TypeError(f"`value` must be a floating-point tensor, such as a loss. Received: {value!r}.")
        if value.shape.rank not in (0, None):
            raise ValueError(f"`value` must be a scalar, such as a mean over examples. Received: {value!r}.")
        if weight is not None:
            weight = _check.not_negative("weight", weight, _tf.variables.known_value(weight))
        self._value = value
        self._own_weight = weight
        self._number = number
        self._dtype = _tf.variables.at_least_float32(value.dtype.base_dtype)
        with tf.name_scope("mean_over_cycle"):
            self.tensor = tf.identity(value)
        self.now: Any = None
        self._here: Any = None  # CycleSums of the current micro-batch
        self._stored: Any = None  # CycleSums of the current cycle
        self._latest: Any = None  # CycleSums of the latest cycle
        self._of_first: Any = None  # weight and gradients of the first train op

    @property
    def follows_train_op(self) -> bool:
        """Whether its weights are those of the train op."""
        return self._own_weight is None

    def follow(self, cycle: Cycle, adapter: GraphAdapter, listed: GradsAndVars, weight: Optional[Scalar]) -> None:
        """Take part in a train op that is about to be created from the gradients `listed`."""
        grads = [grad for grad, _ in listed]
        if self.now is not None:
            self._require_same(cycle, weight, grads)
            return
        if _tf.graphs.is_in_conditional():
            raise ValueError(IN_CONDITIONAL)
        self._of_first = weight, grads
        cycle.build([var for _, var in listed], grads)
        with tf.name_scope("mean_over_cycle"):
            is_finite = None
            if cycle.plan.nonfinite != "propagate":
                is_finite = tf.equal(count_nonfinite([grad for grad in grads if grad is not None]), 0)
            self._here = self._sums_of(weight, is_finite if cycle.plan.nonfinite == "skip_cycle" else None)
        self._create_variables(adapter)
        with tf.name_scope("mean_over_cycle"):
            self.now = self._mean(cycle, weight, is_finite if cycle.plan.nonfinite == "skip_micro" else None)
        _tf.graphs.replace_input(self.tensor.op, 0, self.now)

    def _require_same(self, cycle: Cycle, weight: Optional[Scalar], grads: List[Any]) -> None:
        """Raise if a further train op would need another mean."""
        first_weight, first_grads = self._of_first
        if self.follows_train_op and weight is not first_weight:
            numbers = [_tf.variables.known_value(one) for one in (weight, first_weight) if one is not None]
            if len(numbers) != 2 or None in numbers or numbers[0] != numbers[1]:
                raise ValueError(f"{OTHER_WEIGHTS} Received: weight={weight!r}, after {first_weight!r}.")
        skips = cycle.plan.nonfinite != "propagate"
        if skips and (
            len(grads) != len(first_grads) or any(one is not first for one, first in zip(grads, first_grads))
        ):
            raise ValueError(f"{OTHER_GRADIENTS} Received: nonfinite={cycle.plan.nonfinite!r}.")

    def _sums_of(self, weight: Optional[Scalar], allows_step: Optional[tf.Tensor]) -> CycleSums:
        """Return the `CycleSums` of the current micro-batch, which may not allow a step to be made from its cycle."""
        own = weight if self._own_weight is None else self._own_weight
        share = tf.cast(1.0 if own is None else own, self._dtype)
        total = tf.math.multiply_no_nan(tf.cast(self._value, self._dtype), share)
        if allows_step is None:
            return CycleSums(total, share, None)
        if weight is not None:  # a gradient of weight 0 is left out
            allows_step = tf.logical_or(allows_step, tf.equal(tf.cast(weight, tf.float32), 0.0))
        return CycleSums(total, share, 1.0 - tf.cast(allows_step, self._dtype))

    def _create_variables(self, adapter: GraphAdapter) -> None:
        zero, number = tf.zeros([], self._dtype), f"_{self._number}" if self._number else ""
        parts = ["total", "weight", "latest_total", "latest_weight"]
        parts += [] if self._here.refusals is None else ["refusals"]
        with adapter.group_of_state():
            made = {part: adapter.scalar(f"mean{number}_{part}", zero) for part in parts}
        self._stored = CycleSums(made["total"], made["weight"], made.get("refusals"))
        self._latest = CycleSums(made["latest_total"], made["latest_weight"], None)

    def _mean(self, cycle: Cycle, weight: Optional[Scalar], counts: Optional[tf.Tensor]) -> tf.Tensor:
        """Return the mean as it will be after the run, from what the variables hold before it.

        Args:
          cycle: the `Cycle`.
          weight: weight of the current micro-batch in the train op.
          counts: bool scalar, whether the micro-batch counts; None: it does.
        """
        micro_step_index = cycle.state.micro_step.read_value()
        is_first = tf.equal(micro_step_index, 0)
        makes_step = micro_step_index + 1 >= cycle.counter.length(micro_step_index)
        here, before = self._here, self._so_far(is_first)
        if counts is not None:
            makes_step = tf.logical_and(makes_step, counts)
            here = _each(lambda part: tf.where(counts, part, tf.zeros_like(part)), here)
        if weight is not None:
            stored = tf.where(is_first, 0.0, cycle.state.weight_sum.read_value())
            makes_step = tf.logical_and(makes_step, tf.greater(stored + tf.cast(weight, tf.float32), 0.0))
        so_far, latest = _added(before, here), _each(lambda var: var.read_value(), self._latest)
        is_running = tf.logical_or(tf.logical_and(makes_step, _allow_step(so_far)), tf.equal(latest.weight, 0.0))
        shown = [tf.where(is_running, new, old) for new, old in zip(so_far[:2], latest[:2])]
        return tf.cast(tf.math.divide_no_nan(*shown), self._value.dtype)

    def _so_far(self, is_first: Union[bool, tf.Tensor]) -> CycleSums:
        """Return the `CycleSums` over the earlier micro-batches of the cycle."""
        return _each(lambda var: tf.where(is_first, tf.zeros([], self._dtype), var.read_value()), self._stored)

    def _whole(self, is_first: Union[bool, tf.Tensor]) -> CycleSums:
        return _added(self._so_far(is_first), self._here)

    def on_micro_step(self, is_first: Union[bool, tf.Tensor]) -> Any:
        return _assign(self._stored, self._whole(is_first))

    def on_step(self, is_first: Union[bool, tf.Tensor]) -> Any:
        return self._show(self._whole(is_first))

    def on_flush(self) -> Any:
        return self._show(self._so_far(False))

    def _show(self, whole: CycleSums) -> Any:
        """Let the sums of a cycle be the latest ones, unless its step is not made."""
        kept = [tf.where(_allow_step(whole), new, var.read_value()) for new, var in zip(whole[:2], self._latest[:2])]
        return _assign(self._latest, CycleSums(kept[0], kept[1], None))


def _each(function: Callable[[Any], Any], sums: CycleSums) -> CycleSums:
    return CycleSums(*[None if one is None else function(one) for one in sums])


def _added(one: CycleSums, other: CycleSums) -> CycleSums:
    return CycleSums(*[None if part is None else part + more for part, more in zip(one, other)])


def _allow_step(sums: CycleSums) -> tf.Tensor:
    has_weight = tf.greater(sums.weight, 0.0)
    return has_weight if sums.refusals is None else tf.logical_and(has_weight, tf.equal(sums.refusals, 0.0))


def _assign(variables: CycleSums, values: CycleSums) -> tf.Operation:
    pairs = [(var, value) for var, value in zip(variables, values) if var is not None]
    with tf.control_dependencies([value for _, value in pairs]):
        return tf.group(*[var.assign(value, read_value=False) for var, value in pairs])
