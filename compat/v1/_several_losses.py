"""Losses that are means over different things, such as masked words and sentences, over a cycle (law L2).

The gradient of the full batch is the sum of those of its losses, each a mean over its own number of elements:

    sum_l(sum_i(n_li g_li) / sum_i(n_li)),   for loss l and micro-batch i

The sums of the counts are known only at the end of a cycle, so each loss needs accumulators of its own. The engine
accumulates n_0i g_0i of the first loss, without weights. This listener accumulates those of the others and all counts.
"""

from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple, Union

from accum import _check, _tf
from accum._engine._accumulators import Accumulator
from accum._engine._cycle import Cycle
from accum._engine._gradients import added, weighted
from accum._engine._interfaces import CycleListener
from accum._tf import Gradient, GradsAndVars, Scalar, tf
from accum.compat.v1._engine_adapter import GraphAdapter


class LossPart(NamedTuple):
    """One loss in one micro-batch: its gradients by the key of their variable, and its count."""

    grads: Dict[int, Gradient]
    count: tf.Tensor


SAME_LOSSES = (
    "Several losses have accumulators of their own, which each train op of an optimizer shares: pass as many losses to "
    "each, and let them depend on the same variables, or use an `AccumOptimizer` for each train op. "
    "[accum: several-losses]"
)


class SeveralLosses(CycleListener):
    """Accumulate the gradients of all losses but the first, and the counts of all."""

    def __init__(self) -> None:
        self._here: List[LossPart] = []
        self._awaits_train_op = False  # whether gradients were received for which there is no train op yet
        self._counts: List[Any] = []  # variables: the sum of the counts of each loss, and the number of micro-batches
        self._accumulators: List[Dict[int, Accumulator]] = []  # for each loss but the first

    def receive(self, pairs: Sequence[GradsAndVars], counts: Sequence[Scalar]) -> GradsAndVars:
        """Take the gradients of each loss in the current micro-batch. Returns those that the engine accumulates."""
        numbers = [_check.not_negative("weight", count, _tf.variables.known_value(count)) for count in counts]
        here = [
            LossPart(
                {_tf.variables.key_of(var): grad for grad, var in listed if grad is not None},
                tf.cast(number, tf.float32),
            )
            for listed, number in zip(pairs, numbers)
        ]
        variables = {_tf.variables.key_of(var): var for listed in pairs for _, var in listed}
        self._require_same_losses(here, variables)
        self._here, self._awaits_train_op = here, True
        return [(self._first(key), var) for key, var in variables.items()]

    def _require_same_losses(self, here: Sequence[LossPart], variables: Dict[int, tf.Variable]) -> None:
        if not self._counts:
            return
        if len(here) != len(self._here):
            raise ValueError(f"{SAME_LOSSES} Received: {len(here)} losses, after {len(self._here)}.")
        for number, (part, accumulators) in enumerate(zip(here[1:], self._accumulators), start=1):
            others = [variables[key].name for key in part.grads if key not in accumulators]
            if others:
                raise ValueError(f"{SAME_LOSSES} Received: loss {number} depends on {others} only now.")

    def _first(self, key: int) -> Any:
        """Return the weighted gradient of the first loss, which also has the rows of those of the others."""
        grads = [part.grads.get(key) for part in self._here]
        if all(grad is None for grad in grads):
            return None
        if any(isinstance(grad, tf.Tensor) for grad in grads):
            first = grads[0]
            if first is None:
                return tf.zeros_like(next(grad for grad in grads if isinstance(grad, tf.Tensor)))
            return weighted(tf.convert_to_tensor(first), self._here[0].count)
        slices = [grad for grad in grads if grad is not None]
        values = [tf.zeros_like(grad.values) for grad in slices]
        if grads[0] is not None:
            values[0] = weighted(grads[0].values, self._here[0].count)
        indices = [tf.cast(grad.indices, tf.int64) for grad in slices]
        shapes = [grad.dense_shape for grad in slices if grad.dense_shape is not None]
        return tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0), shapes[0] if shapes else None)

    def follow(self, cycle: Cycle, adapter: GraphAdapter, listed: GradsAndVars) -> None:
        """Take part in a train op. Create the variables, once the engine has created its own."""
        if not self._awaits_train_op:
            raise ValueError(f"{SAME_LOSSES} Received: gradients of one loss, after {len(self._here)} losses.")
        self._awaits_train_op = False
        if self._counts:
            return
        cycle.build([var for _, var in listed], [grad for grad, _ in listed])
        with adapter.group_of_state():
            self._create_variables(cycle, adapter, listed)

    def _create_variables(self, cycle: Cycle, adapter: GraphAdapter, listed: GradsAndVars) -> None:
        names = [f"count_{number}" for number in range(len(self._here))] + ["count"]
        self._counts = [adapter.scalar(name, tf.constant(0.0)) for name in names]
        for number, part in enumerate(self._here[1:], start=1):
            made = {}
            for _, var in listed:
                if _tf.variables.key_of(var) in part.grads:
                    dtype = cycle.plan.accumulator_dtype or _tf.variables.at_least_float32(var.dtype.base_dtype)
                    total = adapter.buffer(var, f"accum_{number}", var.shape, dtype)
                    made[_tf.variables.key_of(var)] = Accumulator(total)
            self._accumulators.append(made)

    def on_micro_step(self, is_first: Union[bool, tf.Tensor]) -> Any:
        done = []
        for var, number in zip(self._counts, self._numbers()):
            assign = var.assign if is_first else var.assign_add
            done.append(assign(number, read_value=False))
        for part, accumulators in zip(self._here[1:], self._accumulators):
            for key, accumulator in accumulators.items():
                keep = accumulator.start if is_first else accumulator.add
                done.append(keep(part.grads.get(key), part.count))
        return tf.group(*done)

    def on_step(self, is_first: Union[bool, tf.Tensor]) -> Any:
        return tf.no_op()

    def on_flush(self) -> Any:
        return tf.no_op()

    def gradients_of_step(self, grads_and_vars: GradsAndVars, is_first: Union[bool, tf.Tensor]) -> GradsAndVars:
        counts = [var.read_value() for var in self._counts]
        if is_first is not False:
            counts = [tf.where(is_first, tf.zeros_like(count), count) for count in counts]
        counts = [count + number for count, number in zip(counts, self._numbers())]

        def total(accumulator: Accumulator, part: LossPart, key: Any) -> Gradient:
            return accumulator.peek(part.grads.get(key), part.count, is_first)

        return self._wholes(grads_and_vars, counts, total)

    def gradients_of_flush(self, grads_and_vars: GradsAndVars) -> GradsAndVars:
        counts = [var.read_value() for var in self._counts]
        return self._wholes(grads_and_vars, counts, lambda accumulator, part, key: accumulator.stored())

    def _wholes(
        self,
        grads_and_vars: GradsAndVars,
        counts: Sequence[tf.Tensor],
        total: Callable[[Accumulator, LossPart, Any], Gradient],
    ) -> GradsAndVars:
        """Return the sums of the means of all losses.

        Args:
          grads_and_vars: the sums for the first loss over the number of micro-batches, with their variables.
          counts: the numbers over which each loss is a mean, then that of micro-batches.
          total: function of an accumulator, its loss and the key of its variable that returns the accumulated gradient.
        """
        return [(self._whole(grad, _tf.variables.key_of(var), counts, total), var) for grad, var in grads_and_vars]

    def _whole(
        self,
        mean: Gradient,
        key: Any,
        counts: Sequence[tf.Tensor],
        total: Callable[[Accumulator, LossPart, Any], Gradient],
    ) -> Gradient:
        whole = _tf.inner_optimizer.scale_gradient(mean, tf.math.divide_no_nan(counts[-1], counts[0]))
        for part, accumulators, count in zip(self._here[1:], self._accumulators, counts[1:]):
            if key in accumulators:
                whole = added(whole, total(accumulators[key], part, key), tf.math.reciprocal_no_nan(count))
        return whole

    def _numbers(self) -> List[tf.Tensor]:
        return [part.count for part in self._here] + [tf.constant(1.0)]


def checked(loss: Sequence[Any], weight: Any, options: Sequence[Any]) -> Tuple[List[Any], List[Any]]:
    """Return the lists of losses and counts, or raise an error that says what is wrong with them."""
    losses = list(loss)
    if len(losses) < 2:
        raise ValueError(f"`loss` must be one loss or a list of at least two. Received: {loss!r}.")
    if not isinstance(weight, (list, tuple)) or len(weight) != len(losses) or any(one is None for one in weight):
        raise ValueError(
            "Several losses need `weight`: a list with the number of elements that each is a mean over, such as "
            f"[masked words, sentences]. Received: {len(losses)} losses and weight={weight!r}. [accum: several-losses]"
        )
    if options:
        raise ValueError(
            f"With several losses, `minimize` supports no other arguments. Received: {options!r}."
            " [accum: several-losses]"
        )
    return losses, list(weight)
