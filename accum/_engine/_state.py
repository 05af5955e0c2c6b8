"""The variables of an unfinished cycle."""

from typing import Any, Optional, Set

from accum import _tf
from accum._engine._accumulators import Accumulator
from accum._tf import CheckpointOnly


class Accumulators(CheckpointOnly):
    """The accumulators of a cycle. A checkpoint names each by the number of its variable in the list of variables.

    The numbers do not depend on which variable has a gradient first, so a run resumed in mid-cycle finds its sums.
    """

    def add(self, number: int, accumulator: Accumulator) -> None:
        setattr(self, str(number), accumulator)

    def awaited(self, number: int) -> Optional[Set[str]]:
        """Return the names of the parts that a restored checkpoint holds for an accumulator that has not been created.

        None: it holds none.
        """
        return _tf.awaited_children(self, str(number))

    def are_awaited_from(self, number: int) -> bool:
        """Whether a restored checkpoint holds an accumulator with this number or a higher one, not created yet."""
        return any(name.isdigit() and int(name) >= number for name in _tf.awaited_names(self))


class State(CheckpointOnly):
    """The part of a cycle that is saved in checkpoints.

    Attributes:
      micro_step: int64 [], the micro steps made so far in the current cycle.
      length: int64 [], the length of the current cycle; None if it is a constant of the graph.
      weight_sum: float32 [] per replica, the sum of the micro-batches' weights.
      accumulators: the `Accumulators`, one for each variable that had a gradient.
      seen: the `SeenGradients` of the cycle; it exists only while checkpoints have to keep them.
    """

    seen: Any

    def __init__(self) -> None:
        super().__init__()
        self.micro_step: Any = None
        self.length: Any = None
        self.weight_sum: Any = None
        self.accumulators = Accumulators()
