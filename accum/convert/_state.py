"""The neutral description of a run, which each side reads and writes."""

from collections import namedtuple

Norm = namedtuple("Norm", ["variance_place", "moments"])
Norm.__doc__ = """The place of the moving variance, and (count, mean, variance divided by count) so far."""


class RunState:
    """A run between two micro steps. What belongs to a variable is keyed by its place in the model's list.

    Attributes:
      weights: {place: array}.
      slots: {role: {place: array}}, of the inner optimizer.
      sums: {place: array}, what the unfinished cycle has accumulated; empty between cycles.
      rows: {place: bool array [rows]}, which rows of a sparse variable's sum were touched.
      moments: {place of a moving mean: `Norm`}, what batch normalisations have gathered in the unfinished cycle.
      iterations: int, steps made.
      micro_step: int, micro steps of the unfinished cycle.
      weight_sum: float, what its micro-batches weighed together.
    """

    def __init__(self, iterations=0, micro_step=0, weight_sum=0.0):
        self.weights = {}
        self.slots = {}
        self.sums = {}
        self.rows = {}
        self.moments = {}
        self.iterations = iterations
        self.micro_step = micro_step
        self.weight_sum = weight_sum

    def weighed_anew(self, factor, reduction):
        """The same run without its slots, whose micro-batches weighed `factor` times as much.

        A running mean stays what it is.
        """
        scaled = RunState(self.iterations, self.micro_step, self.weight_sum * factor)
        scaled.weights, scaled.rows, scaled.moments = self.weights, self.rows, self.moments
        scale = 1.0 if reduction == "running_mean" else factor
        scaled.sums = {place: value * value.dtype.type(scale) for place, value in self.sums.items()}
        return scaled
