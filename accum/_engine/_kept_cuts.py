"""Choose the cuts of a graph whose tensors are kept from the forward to the backward pass, by their bytes (law L19).

There is a cut before each level. Tensors that cross a kept cut are stored. The levels between two kept cuts form
a group. The backward pass recomputes a group when it reaches it, and then holds all its tensors. The memory is

    bytes of the kept cuts + bytes of the largest group

The gradient by a tensor reuses the memory of the tensor as soon as no level needs the tensor any more. If several
levels use it, both exist between the last and the first of them.

The level that computes a tensor also needs it for the gradient of its own statistics. Recomputing it takes time.
Keeping it takes memory, because tensor and gradient then exist at once. So it is kept if this does not raise the peak.

With many equal cuts, about the square root of their number is kept.
"""

from typing import Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

Key = str


class Crossing(NamedTuple):
    """A tensor that later levels use.

    Attributes:
      level: the level that makes it.
      first: the first level after it whose gradient uses it, or None.
      last: the last level that uses it.
      size: its bytes, for one example.
    """

    level: int
    first: Optional[int]
    last: int
    size: int


def chosen_cuts(crossings: Sequence[Crossing], count: int, recompute: bool) -> List[int]:
    """Return the cuts that are kept, such that kept and largest group together are small: levels, the first of them 0.

    Args:
      crossings: list of `Crossing`.
      count: the number of levels.
      recompute: False: keep all.
    """
    if not recompute or count < 3:
        return list(range(count))
    groups = _group_bytes(crossings, count)
    added = _added_bytes(crossings, count)
    limits = sorted(set(groups.values()))
    best = None
    for limit in _some(limits, 48):
        choice = _least_kept(groups, added, count, limit)
        if choice is not None and (best is None or choice[0] + limit < best[0]):
            best = choice[0] + limit, choice[1]
    assert best is not None  # the largest limit allows a single group
    return best[1]


def _group_bytes(crossings: Sequence[Crossing], count: int) -> Dict[Tuple[int, int], int]:
    """Return {(first level, level after the last): bytes of a group, and of gradients beside their tensors}."""
    both = [
        sum(one.size for one in crossings if one.first is not None and one.first < cut <= one.last)
        for cut in range(count + 1)
    ]
    groups = {}
    made = [[one for one in crossings if one.level == level] for level in range(count)]
    for begin in range(count):
        inner: List[Crossing] = []
        for end in range(begin + 1, count + 1):
            # Those made in [begin, end - 1), but not what is alive behind the group, which its next cut keeps.
            inner += made[end - 2] if end - 2 >= begin else []
            within = sum(one.size for one in inner if one.last < end)
            groups[begin, end] = within + max(both[begin + 1 : end + 1])
    return groups


def _added_bytes(crossings: Sequence[Crossing], count: int) -> Dict[Tuple[int, int], int]:
    """Return {(cut, next kept cut): bytes that the latter adds to what is kept}."""
    added = {}
    for cut in range(1, count):
        alive = [one for one in crossings if one.level < cut <= one.last]
        for before in range(cut):
            added[before, cut] = sum(one.size for one in alive if one.level >= before)
    return added


def _least_kept(groups: Dict, added: Dict, count: int, limit: int) -> "Tuple[int, List[int]]":  # type: ignore[type-arg]
    """Return the least bytes to keep such that no group exceeds `limit`, and the cuts; None if there is no way."""
    best: Dict[int, Tuple[int, List[int]]] = {0: (0, [0])}
    for cut in range(1, count):
        ways = [
            (best[before][0] + added[before, cut], before)
            for before in range(cut)
            if before in best and groups[before, cut] <= limit
        ]
        if ways:
            size, before = min(ways)
            best[cut] = size, best[before][1] + [cut]
    ends = [best[cut] for cut in best if groups[cut, count] <= limit]
    return min(ends) if ends else None  # type: ignore[return-value]


def _some(values: Sequence[int], number: int) -> Sequence[int]:
    """Return at most `number` of sorted values, spread evenly, with the last."""
    if len(values) <= number:
        return values
    return [values[round(index * (len(values) - 1) / (number - 1))] for index in range(number)]


def read_again(
    uses: Dict[Key, Crossing], candidates: Sequence[Key], kept: Set[Key], cuts: Sequence[int], count: int
) -> List[Key]:
    """Return the tensors that the level which makes them reads in its backward phase, instead of computing them.

    Args:
      uses: {key: `Crossing`} of all tensors.
      candidates: keys of those that are there when the gradient comes to their level.
      kept: keys of those that are kept from the forward pass.
      cuts: list of the kept cuts.
      count: the number of levels.
    """
    begins = [max(begin for begin in cuts if begin < max(cut, 1)) for cut in range(count + 1)]
    # When the level behind a cut is done: tensors or what takes their place, and gradients that have no such place.
    alive = [
        sum(
            one.size * (2 if one.first is not None and one.first < one.last and one.first < cut <= one.last + 1 else 1)
            for key, one in uses.items()
            if one.level < cut and (key in kept or one.level >= begins[cut])
        )
        for cut in range(count + 1)
    ]
    most = max(alive)
    chosen = []
    for key in candidates:
        level, first, _, size = uses[key]
        within = range(level + 1, min(level + 1 if first is None else first + 1, count) + 1)
        if all(alive[cut] + size <= most for cut in within):
            chosen.append(key)
            for cut in within:
                alive[cut] += size
    return chosen


def kept_keys(uses: Dict[Key, Crossing], cuts: Sequence[int]) -> Set[Key]:
    """Return the keys of the tensors that cross a kept cut."""
    return {key for key, one in uses.items() if any(one.level < cut <= one.last for cut in cuts)}
