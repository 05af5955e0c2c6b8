"""The gradient noise scale, from the squared norms of micro-batch gradients. Needs no TensorFlow.

With g_i the mean gradient of micro-batch i, b_i its number of examples and a_i its share of the step, sum_i(a_i) = 1:

    E |g_i|^2         = |G|^2 + tr(Sigma) / b_i
    E |sum a_i g_i|^2 = |G|^2 + tr(Sigma) sum(a_i^2 / b_i)

where G is the true gradient and Sigma the covariance of the gradients of single examples. Two equations, so both
numbers have unbiased estimates, whatever the sizes of the micro-batches:

    tr(Sigma) ~ (sum(a_i |g_i|^2) - |g|^2) / (sum(a_i / b_i) - sum(a_i^2 / b_i)),     g = sum(a_i g_i)
    |G|^2     ~ |g|^2 - tr(Sigma) sum(a_i^2 / b_i)

With micro-batches of equal size these are those of McCandlish et al. 2018, appendix A.1, B_small being the micro-batch
and B_big the step. The noise scale is tr(Sigma) / |G|^2, in examples. A ratio of two noisy numbers is biased, so each
is averaged over many steps first.

Source: https://arxiv.org/abs/1812.06162
"""

import math
from typing import NamedTuple


class SquaredNorms(NamedTuple):
    """Sums over the micro-batches of a step; w_i is the weight of a micro-batch and b_i its size.

    Attributes:
      squares: sum(w_i |g_i|^2).
      weight: sum(w_i).
      per_size: sum(w_i / b_i).
      squares_per_size: sum(w_i^2 / b_i).
      parts: the number of micro-batches that have a weight.
      mean: |g|^2, of the mean gradient.
    """

    squares: float
    weight: float
    per_size: float
    squares_per_size: float
    parts: float
    mean: float


class Estimate(NamedTuple):
    """Unbiased estimates from one step: `variance` of tr(Sigma), for one unit of b_i, and `squared` of |G|^2."""

    variance: float
    squared: float


FEWEST_STEPS, LARGEST_ERROR = 10.0, 0.5
"""What advice needs: an error from fewer steps means nothing, and a larger one hides a factor of two."""

NONE = Estimate(math.nan, math.nan)


def estimate(norms: SquaredNorms) -> Estimate:
    """Estimate the variance and the squared norm of the gradient; NaN if there are not two micro-batches."""
    if not norms.parts > 1.5 or not norms.weight > 0.0:
        return NONE
    share = norms.squares_per_size / norms.weight**2
    difference = norms.per_size / norms.weight - share
    if not difference > 0.0:
        return NONE
    variance = (norms.squares / norms.weight - norms.mean) / difference
    return Estimate(variance, norms.mean - variance * share)


class NoiseScale:
    """Averages the estimates of the steps, each with weight 1 - 1 / `average_over` in the next average."""

    def __init__(self, average_over: int) -> None:
        self._decay = 1.0 - 1.0 / average_over
        self._variance = self._squared = 0.0
        self._total = self._total_of_squares = 0.0
        self._squares_of_variance = self._squares_of_squared = 0.0

    def add(self, latest: Estimate) -> None:
        """Take the estimates of a step into the averages, unless they are not finite."""
        if math.isfinite(latest.variance) and math.isfinite(latest.squared):
            self._variance = self._decay * self._variance + latest.variance
            self._squared = self._decay * self._squared + latest.squared
            self._squares_of_variance = self._decay * self._squares_of_variance + latest.variance**2
            self._squares_of_squared = self._decay * self._squares_of_squared + latest.squared**2
            self._total = self._decay * self._total + 1.0
            self._total_of_squares = self._decay**2 * self._total_of_squares + 1.0

    @property
    def has_any(self) -> bool:
        return self._total > 0.0

    @property
    def is_meaningful(self) -> bool:
        """Whether enough steps were averaged, and their relative standard error leaves the order of magnitude."""
        count = self._total**2 / self._total_of_squares if self.has_any else 0.0
        return count >= FEWEST_STEPS and self._error(count) <= LARGEST_ERROR

    def _error(self, count: float) -> float:
        """The relative standard error of the noise scale, from `count` independent steps."""
        error = 0.0
        pairs = (self._variance, self._squares_of_variance), (self._squared, self._squares_of_squared)
        for total, squares in pairs:
            mean = total / self._total
            spread = max(0.0, squares / self._total - mean**2) / (count - 1.0)
            error += spread / mean**2 if mean > 0.0 else math.inf
        return math.sqrt(error)

    @property
    def value(self) -> float:
        """The noise scale; NaN while the averages are so noisy that one of them is not positive."""
        if not (self._variance > 0.0 and self._squared > 0.0):
            return math.nan
        return self._variance / self._squared


def advice(noise_scale: float, examples: float) -> str:
    """Say in a sentence or two whether a larger batch would still help.

    To reach the same loss takes a number of steps proportional to 1 + noise_scale / batch size.
    """
    saved = 1.0 - (1.0 + noise_scale / (2.0 * examples)) / (1.0 + noise_scale / examples)
    now = f"The gradient noise scale is about {rounded(noise_scale)} examples; a step has {rounded(examples)}."
    if noise_scale > examples:
        return f"{now} A larger batch would still help: twice the batch would need about {saved:.0%} fewer steps."
    return f"{now} A larger batch would help little: twice the batch would need only about {saved:.0%} fewer steps."


def rounded(number: float) -> str:
    """Return a number with two digits that count, such as 2,900; below 1,000 as a whole number."""
    if number < 1000:
        return f"{number:.2g}" if number < 10 else f"{number:.0f}"
    digits = int(math.floor(math.log10(number))) - 1
    return f"{round(number / 10**digits) * 10**digits:,}"
