"""Record the variables that had a gradient in the current cycle, as far as Python sees its micro steps.

A variable without a gradient in a whole cycle is not passed to the inner optimizer, just as in a full batch: an
optimizer with momentum would move it even with a gradient of zeros. In a graph, the list of variables is fixed before
the graph runs. In eager execution, Python sees every gradient.
"""

import json
from typing import List, Optional, Sequence, Set, Union

from accum import _tf
from accum._engine._gradients import is_zero
from accum._engine._step_counter import State
from accum._tf import PerReplica, tf


class SeenGradients(tf.train.experimental.PythonState):
    """Notes the variables that have a gradient in each eager micro step.

    Python does not see what a traced micro step does. If it has missed a micro step, every variable counts as one that
    had a gradient. So a checkpoint needs a note only where a variable has had none in the cycle so far, and otherwise
    holds nothing of this.

    Args:
      state: the `State` that is saved in checkpoints.
    """

    def __init__(self, state: State) -> None:
        super().__init__()
        self._state = state
        self._numbers: Set[int] = set()
        self._micro_steps = 0  # how many of this cycle have been noted
        self._is_complete = True
        self._has_traced = False

    def serialize(self) -> str:
        if not self._is_complete or self._has_traced:
            return "{}"
        return json.dumps({"micro_steps": self._micro_steps, "variables": sorted(self._numbers)})

    def deserialize(self, string_value: Union[str, bytes]) -> None:
        note = json.loads(tf.compat.as_str(string_value) or "{}")
        self._is_complete = "variables" in note
        self._micro_steps, self._numbers = note.get("micro_steps", 0), set(note.get("variables", ()))

    def claim(self) -> None:
        """Take over the note of a restored checkpoint, if it has one."""
        if _tf.tracking.awaited_children(self._state, "seen") is not None:
            self._state.seen = self

    def _keep(self, strategy: tf.distribute.Strategy, numbers: Sequence[int]) -> None:
        """Have checkpoints keep the note if a variable has had no gradient so far."""
        is_known = self._is_known(strategy, self._micro_steps)
        if is_known and not self._numbers.issuperset(numbers):
            self._state.seen = self
        elif hasattr(self._state, "seen"):
            del self._state.seen

    def note(
        self,
        strategy: tf.distribute.Strategy,
        grads: Sequence[Optional[PerReplica]],
        numbers: Sequence[int],
        micro_step_index: tf.Tensor,
        counts: Optional[tf.Tensor],
    ) -> None:
        """Note which variables have a gradient in a micro step.

        Args:
          strategy: the current strategy.
          grads: the gradients, per replica; None where there is none.
          numbers: the numbers of their variables.
          micro_step_index: int64 scalar, the micro steps made before it in this cycle.
          counts: bool scalar, whether the micro-batch counts. None: it does.
        """
        if not tf.executing_eagerly():
            self._has_traced = True  # it may run at any time from now on
        elif counts is None or bool(counts):
            self.claim()
            has_one = [any(part is not None for part in strategy.experimental_local_results(grad)) for grad in grads]
            self._note(int(micro_step_index), {number for is_there, number in zip(has_one, numbers) if is_there})
            self._keep(strategy, numbers)

    def _note(self, micro_step_index: int, numbers: Set[int]) -> None:
        if micro_step_index == 0:
            self._numbers, self._micro_steps, self._is_complete = set(), 0, True
        # The same index comes again after an error.
        self._is_complete = self._is_complete and self._micro_steps - 1 <= micro_step_index <= self._micro_steps
        self._numbers |= numbers
        self._micro_steps = micro_step_index + 1

    def only(
        self,
        strategy: tf.distribute.Strategy,
        totals: Sequence[Optional[PerReplica]],
        numbers: Sequence[int],
        micro_step_index: tf.Tensor,
        has_latest: bool,
    ) -> List[Optional[PerReplica]]:
        """Return the totals with None for each variable that is known to have had no gradient in the whole cycle.

        Args:
          strategy: the current strategy.
          totals: the sums of the cycle, per replica.
          numbers: the numbers of their variables.
          micro_step_index: int64 scalar, the micro steps of the cycle that are stored.
          has_latest: whether `totals` include one more.
        """
        if not tf.executing_eagerly():
            return list(totals)
        self.claim()
        if not self._is_known(strategy, int(micro_step_index) + has_latest):
            return list(totals)
        has_one = [number in self._numbers for number in numbers]
        merged = [
            total if is_seen or not _is_zero_everywhere(strategy, total) else None
            for total, is_seen in zip(totals, has_one)
        ]
        return merged if any(total is not None for total in merged) else list(totals)

    def _is_known(self, strategy: tf.distribute.Strategy, micro_steps: int) -> bool:
        """Whether every micro step of this cycle was seen, on all replicas: all of them are in this process."""
        is_alone = not tf.distribute.has_strategy()
        has_all = is_alone or strategy.num_replicas_in_sync == len(strategy.extended.worker_devices)
        return has_all and self._is_complete and not self._has_traced and self._micro_steps == micro_steps


def _is_zero_everywhere(strategy: tf.distribute.Strategy, total: PerReplica) -> bool:
    """Whether a total is zero, as it must be without gradients; a restored one may not be."""
    return all(is_zero(part) for part in strategy.experimental_local_results(total))
