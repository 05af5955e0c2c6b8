"""The variables of an unfinished cycle."""

from typing import Any, List

from accum._engine._accumulators import Accumulator
from accum._tf import CheckpointOnly


class State(CheckpointOnly):
    """The part of a cycle that is saved in checkpoints.

    Attributes:
      micro_step: int64 [], the micro steps made so far in the current cycle.
      length: int64 [], the length of the current cycle; None if it is a constant of the graph.
      weight_sum: float32 [] per replica, the sum of the micro-batches' weights.
      accumulators: list of `Accumulator`, one for each variable, in the order in which they first had a gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.micro_step: Any = None
        self.length: Any = None
        self.weight_sum: Any = None
        self.accumulators: List[Accumulator] = []
