"""The weighted sum of one replica's gradients over a cycle, and the sum of the weights."""

from typing import List, Optional, Sequence, Tuple, Union

from accum import _tf
from accum._engine import _gradients, _replicas
from accum._engine._accumulators import Accumulator
from accum._engine._listener import CycleListener
from accum._engine._plan import Plan
from accum._engine._replicas import true_after
from accum._engine._step_counter import State
from accum._tf import Gradient, Scalar, Wait, tf


class WeightedSums:
    """Sums one replica's gradients and weights. Every method runs on one replica, and none communicates.

    Args:
      state: the cycle's `State`.
      accumulators: list of `Accumulator`, one for each variable.
      plan: a `Plan`.
      listeners: the `CycleListener`s that accumulate each micro-batch too.
      is_reduced: whether the gradients are already the same on every replica.
    """

    def __init__(
        self,
        state: State,
        accumulators: List[Accumulator],
        plan: Plan,
        listeners: Sequence[CycleListener],
        is_reduced: bool,
    ) -> None:
        self._state = state
        self._accumulators = accumulators
        self._plan = plan
        self._listeners = listeners
        self._is_reduced = is_reduced
        self._is_running = plan.reduction == "running_mean"

    def keep(self, how: str, grads: Sequence[Optional[Gradient]], weight: Optional[Scalar]) -> tf.Tensor:
        """Start the sums with a micro-batch, or add it to them; `how` is "start" or "add"."""
        with tf.name_scope(how):
            kept = [self._start(grads, weight) if how == "start" else self._add(grads, weight)]
            total = _replicas.local_variable(self._state.weight_sum)
            assign = total.assign if how == "start" else total.assign_add
            kept.append(assign(self._weight_of(weight), read_value=False))
            return true_after(kept + [listener.on_micro_step(how == "start") for listener in self._listeners])

    def _start(self, grads: Sequence[Optional[Gradient]], weight: Optional[Scalar]) -> List[Wait]:
        factor = self._factor(weight)
        return [accumulator.start(grad, factor) for accumulator, grad in zip(self._accumulators, grads)]

    def _add(self, grads: Sequence[Optional[Gradient]], weight: Optional[Scalar]) -> List[Wait]:
        """Add a micro-batch to the sums. With weight 0, its rows are marked as touched, but nothing is added."""
        factor = self._factor(weight)
        in_one, added = [], []
        for accumulator, grad in zip(self._accumulators, grads):
            if factor is not None and accumulator.has_one_pass(grad):
                in_one.append((accumulator, grad))
            else:
                added.append(accumulator.add(grad, factor))

        def add() -> tf.Tensor:
            return true_after([accumulator.add_in_one_pass(grad, factor) for accumulator, grad in in_one])

        if in_one:
            added.append(add() if weight is None else tf.cond(tf.not_equal(weight, 0.0), add, true, name="if_weighs"))
        return added

    def keep_running(
        self, grads: Sequence[Optional[Gradient]], weight: Optional[Scalar], is_first: Union[bool, tf.Tensor]
    ) -> tf.Tensor:
        """Update the running means with a micro-batch that is not the last of its cycle."""
        blended = self._blend(grads, weight, is_first)
        return true_after([blended] + [listener.on_micro_step(is_first) for listener in self._listeners])

    def _blend(
        self, grads: Sequence[Optional[Gradient]], weight: Optional[Scalar], is_first: Union[bool, tf.Tensor]
    ) -> tf.Tensor:
        """Update the running means: m += (w / W) (g - m), where W is the sum of the weights so far, including w."""
        so_far = self._weight_so_far(weight, is_first)
        share = tf.math.divide_no_nan(self._weight_of(weight), so_far)
        factor = self._factor(None)  # `share` contains the weight
        if factor is not None:
            grads = [grad if grad is None else _tf.inner_optimizer.scale_gradient(grad, factor) for grad in grads]
        moved = [accumulator.blend(grad, share, is_first) for accumulator, grad in zip(self._accumulators, grads)]
        with tf.control_dependencies([share]):
            moved.append(_replicas.local_variable(self._state.weight_sum).assign(so_far, read_value=False))
        return true_after(moved)

    def _weight_so_far(self, weight: Optional[Scalar], is_first: Union[bool, tf.Tensor]) -> tf.Tensor:
        stored = _replicas.local_variable(self._state.weight_sum).read_value()
        if is_first is not False:
            stored = tf.where(is_first, 0.0, stored)
        return stored + self._weight_of(weight)

    def total(
        self,
        grads: Optional[Sequence[Optional[Gradient]]],
        weight: Optional[Scalar],
        micro_step_index: tf.Tensor,
        is_first: Union[bool, tf.Tensor],
        is_for_all: bool,
    ) -> Tuple[List[Gradient], tf.Tensor]:
        """Return this replica's sums of gradients and of weights over the cycle, including the last micro-batch.

        Args:
          grads: gradients of the last micro-batch; None to return the stored sums.
          weight: its weight, or None.
          micro_step_index: int64 scalar, the micro steps made before it in this cycle.
          is_first: bool tensor, whether it is the first of its cycle; False if it is known not to be.
          is_for_all: whether the sums will be added to those of other replicas. A running mean is then converted to
            the sum.
        """
        if grads is not None and not self._is_running:
            factor = self._factor(weight)
            sums = [accumulator.peek(grad, factor, is_first) for accumulator, grad in zip(self._accumulators, grads)]
            return sums, self._weight_so_far(weight, is_first)
        kept = [] if grads is None else [self._blend(grads, weight, is_first_micro_step(micro_step_index))]
        with tf.control_dependencies(kept):
            sums = [accumulator.stored() for accumulator in self._accumulators]
            weight = _replicas.local_variable(self._state.weight_sum).read_value()
            if is_for_all and self._is_running:  # in float32, so that the sum does not overflow
                sums = [_tf.inner_optimizer.scale_gradient(_gradients.cast(mean, tf.float32), weight) for mean in sums]
            return sums, weight

    # The state means the same for any number of replicas. Each micro-batch adds `w_i` times the gradient of the whole
    # micro-batch to the sums of all replicas together, and `w_i` to their weights (1 if no weight was given). Each
    # replica's gradient is scaled by 1 / replicas, as Keras scales its loss. A gradient that is already reduced is that
    # of the whole micro-batch, and the same on every replica.

    def _factor(self, weight: Optional[Scalar]) -> Optional[Scalar]:
        """Return the factor by which a gradient is multiplied before it is added to the sum, or None for 1."""
        replicas = _replicas.count()
        if replicas == 1:
            return weight
        if self._is_reduced:
            return 1.0 / replicas
        return None if weight is None else float(replicas) * weight

    def _weight_of(self, weight: Optional[Scalar]) -> Scalar:
        """Return the number that is added to this replica's sum of weights."""
        return 1.0 / _replicas.count() if weight is None else weight

    def divisor(self, weight: tf.Tensor) -> Optional[Scalar]:
        """Return the number by which a total is divided to give the gradient of the step, or None for 1."""
        replicas = _replicas.count()
        if self._plan.reduction == "mean":
            return weight
        if replicas == 1:
            return None
        if self._is_reduced:  # the replicas' shares are not summed, so each replica scales its own share up
            return 1.0 / replicas
        return weight / replicas if self._is_running else None

    def clear(self) -> tf.Tensor:
        cleared = [accumulator.clear() for accumulator in self._accumulators]
        weight = _replicas.local_variable(self._state.weight_sum)
        return true_after(cleared + [weight.assign(0.0, read_value=False)])

    def clear_rows(self) -> tf.Tensor:
        return true_after(
            [accumulator.clear_rows() for accumulator in self._accumulators if accumulator.rows is not None]
        )


def true() -> tf.Tensor:
    return tf.constant(True)


def is_first_micro_step(micro_step_index: tf.Tensor) -> tf.Tensor:
    with _tf.variables.on_host():
        return tf.equal(micro_step_index, 0)
