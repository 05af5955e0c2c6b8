"""Which variables had a gradient in the current cycle, as far as Python sees its micro steps.

A variable that has none in a whole cycle is not passed to the inner optimizer, as at the full batch: an optimizer with
momentum would move it even with a gradient of zeros. In a graph, what is passed can't depend on the run. But eagerly,
Python sees every gradient.
"""

from typing import Any, List, Optional, Sequence, Set

from accum import _tf
from accum._tf import tf


class SeenGradients:
    """Notes the variables that have a gradient in each eager micro step.

    Python does not see what a traced micro step does, nor what was accumulated before a checkpoint was restored. If it
    has missed a micro step, every variable counts as one that had a gradient.
    """

    def __init__(self) -> None:
        self._keys: Set[int] = set()
        self._micro_steps = 0  # how many of this cycle have been noted
        self._is_complete = True
        self._has_traced = False

    def note(
        self,
        strategy: tf.distribute.Strategy,
        grads: Sequence[Any],
        variables: Sequence[tf.Variable],
        micro_step_index: tf.Tensor,
        counts: Optional[tf.Tensor],
    ) -> None:
        """Note which variables have a gradient in a micro step.

        Args:
          strategy: the current strategy.
          grads: the gradients, per replica; None where there is none.
          variables: their variables.
          micro_step_index: int64 scalar, the micro steps made before it in this cycle.
          counts: bool scalar, whether the micro-batch counts. None: it does.
        """
        if not tf.executing_eagerly():
            self._has_traced = True  # it may run at any time from now on
        elif counts is None or bool(counts):
            has_one = [any(part is not None for part in strategy.experimental_local_results(grad)) for grad in grads]
            keys = {_tf.variable_key(var) for is_there, var in zip(has_one, variables) if is_there}
            self._note(int(micro_step_index), keys)

    def _note(self, micro_step_index: int, keys: Set[int]) -> None:
        if micro_step_index == 0:
            self._keys, self._micro_steps, self._is_complete = set(), 0, True
        # The same index comes again after an error.
        self._is_complete = self._is_complete and self._micro_steps - 1 <= micro_step_index <= self._micro_steps
        self._keys |= keys
        self._micro_steps = micro_step_index + 1

    def only(
        self,
        strategy: tf.distribute.Strategy,
        totals: Sequence[Any],
        variables: Sequence[tf.Variable],
        micro_step_index: tf.Tensor,
        has_latest: bool,
    ) -> List[Any]:
        """Return the totals with None for each variable that is known to have had no gradient in the whole cycle.

        Args:
          strategy: the current strategy.
          totals: the sums of the cycle, per replica.
          variables: their variables.
          micro_step_index: int64 scalar, the micro steps of the cycle that are stored.
          has_latest: whether `totals` include one more.
        """
        if not tf.executing_eagerly() or not self._is_known(strategy, int(micro_step_index) + has_latest):
            return list(totals)
        has_one = [_tf.variable_key(var) in self._keys for var in variables]
        found = [total if is_seen or not _is_zero(strategy, total) else None for total, is_seen in zip(totals, has_one)]
        return found if any(total is not None for total in found) else list(totals)

    def _is_known(self, strategy: tf.distribute.Strategy, micro_steps: int) -> bool:
        """Whether every micro step of this cycle was seen, on all replicas: all of them are in this process."""
        is_alone = not tf.distribute.has_strategy()
        has_all = is_alone or strategy.num_replicas_in_sync == len(strategy.extended.worker_devices)
        return has_all and self._is_complete and not self._has_traced and self._micro_steps == micro_steps


def _is_zero(strategy: tf.distribute.Strategy, total: Any) -> bool:
    """Whether a total is zero, as it must be without gradients; a restored one may not be."""
    parts = strategy.experimental_local_results(total)
    values = [part.values if isinstance(part, tf.IndexedSlices) else part for part in parts]
    return not any(bool(tf.reduce_any(tf.not_equal(value, 0))) for value in values)
