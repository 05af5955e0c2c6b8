"""Choose the size of micro-batches by peaks of memory that were measured with small ones.

A peak is assumed to be `a + b * size`, and at least as high as some floor. What is known of the line depends on what
was measured:

    before the floor is left:  `a` is at least what was in use before, so k times the size needs at most k times as
                               much beyond that.
    three points that rise:    the line through them; if it rises more steeply than before, it will do so again.

A larger size is only tried if it is expected to fit.
"""

import math
from typing import List, NamedTuple, Sequence, Tuple

REACH = 4.0
"""By how much the size that is chosen may exceed the largest one that was measured."""

LEAP = 8
"""By how much one size that is tried may exceed the one before it, where there is memory for its square."""

RISE = 0.1
"""The share of a point's own memory by which it must exceed the point before it, if the line counts."""

BEND = 1.5
"""By how much more steeply a curve must rise than before, to be none but a line with noise."""

RESOLUTION = 2**21
"""Bytes: less than this can't be told from what TensorFlow and Python allocate beside tensors."""


class Point(NamedTuple):
    """A peak of memory.

    Attributes:
      size: the number of examples that were computed at once.
      peak: bytes.
    """

    size: int
    peak: int


class Peaks:
    """The peaks of one kind of memory.

    Args:
      base: bytes that any size needs, such as weights, the optimizer's variables and the sum of gradients.
      limit: bytes that may be used.
    """

    def __init__(self, base: int, limit: int) -> None:
        self.base = base
        self.limit = limit
        self.points: List[Point] = []

    def add(self, size: int, peak: int) -> None:
        """Add the peak of a size, which is larger than all before. A peak below an earlier one counts as that one."""
        self.points.append(Point(size, max([peak] + [point.peak for point in self.points])))

    def expected(self, size: int) -> float:
        """Return the bytes that a size is expected to need: for one beyond all points, the least that is certain."""
        for low, high in zip(self.points, self.points[1:]):
            if low.size <= size <= high.size:
                return low.peak + (high.peak - low.peak) * (size - low.size) / (high.size - low.size)
        last = self.points[-1]
        if size <= last.size:
            return float(self.points[0].peak)
        return last.peak + (size - last.size) * self._slope()

    def estimate(self, size: int) -> float:
        """Return the bytes that a size probably needs, by the last two points; `expected` is more cautious."""
        last = self.points[-1]
        if len(self.points) == 1 or size <= last.size:
            return self.expected(size)
        return last.peak + (size - last.size) * _slope_between(self.points[-2], last)

    def _growth(self) -> int:
        """Return the bytes of the last point beyond `base`."""
        return max(self.points[-1].peak - self.base, RESOLUTION)

    def _slope(self) -> float:
        """Return the bytes that each example beyond the last point is expected to need."""
        last = self.points[-1]
        most = self._growth() / last.size
        earlier, latest = self._slopes()
        if latest > BEND * earlier:  # a floor is left, or examples meet, such as in a matrix of similarities
            return max(latest * min(latest / earlier, LEAP), most)
        return max(latest, _slope_between(self.points[-3], last)) if self._is_line() else most

    def _slopes(self) -> Tuple[float, float]:
        """Return the slopes up to the last point but one, and from there; the first point rises from `base`."""
        if len(self.points) == 1:
            return self._growth() / self.points[0].size, 0.0
        before = self.points[-3] if len(self.points) > 2 else Point(0, self.base)
        middle, last = self.points[-2:]
        least = RESOLUTION / middle.size
        return max(_slope_between(before, middle), least), _slope_between(middle, last)

    def _is_line(self) -> bool:
        """Whether the last three points rise alike, so that the floor is left behind."""
        if len(self.points) < 3:
            return False
        earlier, latest = self._slopes()
        rises = self.points[-1].peak - self.points[-2].peak >= max(RISE * self._growth(), RESOLUTION)
        return rises and latest <= BEND * earlier

    def fits(self, size: int) -> bool:
        """Whether a size is sure to fit."""
        last = self.points[-1]
        if size <= last.size:
            return last.peak <= self.limit
        factor = size / last.size
        if factor <= LEAP and self.base + self._growth() * factor**2 <= self.limit:
            return True
        return factor <= (REACH if self._is_line() else 2) and self.expected(size) <= self.limit

    def next_size(self, count: int) -> int:
        """Return the next size to try, at most `count`; 0 if none larger is expected to fit."""
        last = self.points[-1]
        if last.peak > self.limit:
            return 0
        leap = min(LEAP, int(math.sqrt(max(self.limit - self.base, 0) / self._growth())))
        following = min(last.size * leap, math.ceil(count / REACH))  # from there on, `fits` can tell
        following = max(following, 2 * last.size)
        if leap < 2 and self.expected(following) > self.limit:
            if self._is_line():
                return 0  # `largest` is on the line
            following = self.largest(count)
        following = min(following, count)
        return following if following >= 1.1 * last.size else 0

    def largest(self, count: int) -> int:
        """Return the largest size that is expected to fit, at least 1 and at most `count`."""
        low, high = 1, min(count, int(REACH * self.points[-1].size))
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.expected(middle) <= self.limit else (low, middle - 1)
        return low


def _slope_between(one: Point, other: Point) -> float:
    return (other.peak - one.peak) / (other.size - one.size)


def next_size(peaks: Sequence[Peaks], count: int) -> int:
    """Return the next size to try for a batch of `count` examples, or 0 if enough is known."""
    sizes = [one.next_size(count - 1) for one in peaks if not one.fits(count)]
    return min(sizes) if sizes else 0


def chosen_size(peaks: Sequence[Peaks], count: int) -> int:
    """Return the size to use for a batch of `count` examples: `count` if it fits."""
    return min(count if one.fits(count) else one.largest(count) for one in peaks)


def evened(size: int, count: int) -> int:
    """Return the least size that cuts a batch of `count` examples into as few micro-batches as `size` does.

    Micro-batches of one size use the same memory one after the other; of two sizes, each leaves gaps for the other.
    """
    return math.ceil(count / math.ceil(count / size))
