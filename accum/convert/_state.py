"""The neutral description of a run, which both sides read and write."""


class RunState:
    """The state of a run between two micro steps. The values of a variable have its index in the model as their key.

    Attributes:
      weights: {index: array}.
      slots: {role: {index: array}}, of the inner optimizer.
      averages: {index: array}, moving averages of the weights.
      sparse: {index: bool}, whether a variable's gradients are sparse, if known.
      sums: {index: array}, the accumulated gradients of the unfinished cycle; empty between cycles.
      rows: {index: bool array [rows]}, which rows of a sparse variable's sum were touched.
      moments: {index of a moving mean: [count, mean, variance divided by count]}, statistics of batch normalisation in
        the unfinished cycle.
      iterations: int, number of steps made.
      micro_step: int, micro steps of the unfinished cycle.
      weight_sum: float, the sum of the weights of its micro-batches.
    """

    def __init__(self, iterations=0, micro_step=0, weight_sum=0.0):
        self.weights = {}
        self.slots = {}
        self.averages = {}
        self.sparse = {}
        self.sums = {}
        self.rows = {}
        self.moments = {}
        self.iterations = iterations
        self.micro_step = micro_step
        self.weight_sum = weight_sum

    def reweighted(self, factor, reduction):
        """Return the run, without slots, with the weights of its micro-batches multiplied by `factor`.

        A running mean stays unchanged.
        """
        scaled = RunState(self.iterations, self.micro_step, self.weight_sum * factor)
        scaled.weights, scaled.rows, scaled.moments = self.weights, self.rows, self.moments
        scaled.averages, scaled.sparse = self.averages, self.sparse
        scale = 1.0 if reduction == "running_mean" else factor
        scaled.sums = {index: value * value.dtype.type(scale) for index, value in self.sums.items()}
        return scaled
