"""The mean of a loss or metric over the micro-batches of a cycle, which takes the place of the batch's value."""

from typing import Any, List, NamedTuple, Optional, Union

from accum import _check, _tf
from accum._engine._cycle import Cycle
from accum._engine._gradients import count_nonfinite
from accum._engine._interfaces import CycleListener
from accum._tf import GradsAndVars, Scalar, tf
from accum.compat.v1._engine_adapter import GraphAdapter


class Sums(NamedTuple):
    """The weighted sum of a value over micro-batches, and the sum of their weights: scalar tensors or variables."""

    total: Any
    weight: Any


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
        self._here: Any = None  # Sums of the current micro-batch
        self._stored: Any = None  # Sums of the current cycle
        self._latest: Any = None  # Sums of the latest cycle

    @property
    def follows_train_op(self) -> bool:
        """Whether its weights are those of the train op."""
        return self._own_weight is None

    def follow(self, cycle: Cycle, adapter: GraphAdapter, listed: GradsAndVars, weight: Optional[Scalar]) -> None:
        """Take part in a train op that is about to be created from the gradients `listed`."""
        weight = self._own_weight if self._own_weight is not None else 1.0 if weight is None else weight
        with tf.name_scope("mean_over_cycle"):
            share = tf.cast(weight, self._dtype)
            self._here = Sums(tf.math.multiply_no_nan(tf.cast(self._value, self._dtype), share), share)
        if self.now is None:
            cycle.build([var for _, var in listed], [grad for grad, _ in listed])
            self._create_variables(adapter)
            with tf.name_scope("mean_over_cycle"):
                self.now = self._mean(cycle, [grad for grad, _ in listed])
            _tf.graphs.replace_input(self.tensor.op, 0, self.now)

    def _create_variables(self, adapter: GraphAdapter) -> None:
        zero, number = tf.zeros([], self._dtype), f"_{self._number}" if self._number else ""
        names = [f"mean{number}_{part}" for part in ("total", "weight", "latest_total", "latest_weight")]
        with adapter.group_of_state():
            variables = [adapter.scalar(name, zero) for name in names]
        self._stored, self._latest = Sums(*variables[:2]), Sums(*variables[2:])

    def _mean(self, cycle: Cycle, grads: List[Any]) -> tf.Tensor:
        """Return the mean as it will be after the run, from what the variables hold before it."""
        micro_step_index = cycle.state.micro_step.read_value()
        is_last = micro_step_index + 1 >= cycle.counter.length(micro_step_index)
        here, before = self._here, self._so_far(tf.equal(micro_step_index, 0))
        if cycle.plan.nonfinite == "skip_micro":
            counts = tf.equal(count_nonfinite([grad for grad in grads if grad is not None]), 0)
            is_last = tf.logical_and(is_last, counts)
            here = Sums(*[tf.where(counts, part, tf.zeros_like(part)) for part in here])
        latest = Sums(*[var.read_value() for var in self._latest])
        is_running = tf.logical_or(is_last, tf.equal(latest.weight, 0.0))
        whole = Sums(*[tf.where(is_running, one + other, last) for one, other, last in zip(before, here, latest)])
        return tf.cast(tf.math.divide_no_nan(*whole), self._value.dtype)

    def _so_far(self, is_first: Union[bool, tf.Tensor]) -> Sums:
        """Return the `Sums` over the earlier micro-batches of the cycle."""
        return Sums(*[tf.where(is_first, tf.zeros([], self._dtype), var.read_value()) for var in self._stored])

    def _whole(self, is_first: Union[bool, tf.Tensor]) -> Sums:
        return Sums(*[one + other for one, other in zip(self._so_far(is_first), self._here)])

    def on_micro_step(self, is_first: Union[bool, tf.Tensor]) -> Any:
        return _assign(self._stored, self._whole(is_first))

    def on_step(self, is_first: Union[bool, tf.Tensor], has_latest: bool) -> Any:
        return _assign(self._latest, self._whole(is_first) if has_latest else self._so_far(is_first))


def _assign(variables: Sums, values: Sums) -> tf.Operation:
    with tf.control_dependencies(list(values)):
        return tf.group(*[var.assign(value, read_value=False) for var, value in zip(variables, values)])
