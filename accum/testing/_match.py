"""Match the variables of two recordings."""

from typing import NamedTuple


class Pair(NamedTuple):
    """Two variables that were compared.

    Attributes:
      name_a, name_b: their names.
      how: "names" for a pair that the user gave, "name" for the same name, "order" for the same position.
      index_a, index_b: their places in the recordings.
      size: the number of their elements.
    """

    name_a: str
    name_b: str
    how: str
    index_a: int
    index_b: int
    size: int


def match(ours, theirs, names, ignore):
    """Pair the variables of two recordings.

    Args:
      ours, theirs: lists of `Variable`.
      names: dict from names of `ours` to names of `theirs`.
      ignore: names of either list to leave out.

    Returns:
      (list of `Pair` in the order of `ours`, (names of `ours` without a counterpart, those of `theirs`)).

    Raises:
      TypeError, ValueError: `names` or `ignore` have another type, contain unknown names, or pair different shapes.
    """
    _check_names(ours, theirs, names, ignore)
    matching = _Matching(ours, theirs, ignore)
    for name, other in names.items():
        matching.pair(matching.ours[name], matching.theirs[other], "names")
    if [ours[index].shape for index in matching.left_a] == [theirs[index].shape for index in matching.left_b]:
        matching.pair_in_order()
    by_name = {theirs[index].name: index for index in matching.left_b}
    for index in list(matching.left_a):
        other = by_name.get(ours[index].name)
        if other is not None and ours[index].shape == theirs[other].shape:
            matching.pair(index, other, "name")
    for shape in sorted({ours[index].shape for index in matching.left_a}):
        alike = [index for index in matching.left_a if ours[index].shape == shape]
        others = [index for index in matching.left_b if theirs[index].shape == shape]
        if len(alike) == len(others):
            for index, other in zip(alike, others):
                matching.pair(index, other, "order")
    return matching.result()


class _Matching:
    """The pairs found so far, and the remaining variables of both recordings."""

    def __init__(self, ours, theirs, ignore):
        self._lists = ours, theirs
        self._pairs = []
        self.ours = {var.name: index for index, var in enumerate(ours)}
        self.theirs = {var.name: index for index, var in enumerate(theirs)}
        self.left_a = [index for index, var in enumerate(ours) if var.name not in ignore]
        self.left_b = [index for index, var in enumerate(theirs) if var.name not in ignore]

    def pair(self, index, other, how):
        ours, theirs = self._lists[0][index], self._lists[1][other]
        if ours.shape != theirs.shape:
            raise ValueError(
                f"`names` must pair variables of one shape. Received: {ours.name} {ours.shape} and {theirs.name} "
                f"{theirs.shape}."
            )
        size = 2 if "complex" in ours.dtype else 1
        for length in ours.shape:
            size *= length
        self._pairs.append(Pair(ours.name, theirs.name, how, index, other, size))
        self.left_a.remove(index)
        self.left_b.remove(other)

    def pair_in_order(self):
        """Pair all variables of lists with the same shapes in order, unless all can be paired by name.

        Never pair some by name and the others in order. Keras numbers layers, so the names in one model may be `dense`
        and `dense_1`, and in the same model created later `dense_1` and `dense_2`.
        """
        ours, theirs = self._lists
        names = {theirs[index].name: index for index in self.left_b}
        is_named = all(
            ours[index].name in names and theirs[names[ours[index].name]].shape == ours[index].shape
            for index in self.left_a
        )
        if not is_named:
            for index, other in list(zip(self.left_a, self.left_b)):
                self.pair(index, other, "name" if ours[index].name == theirs[other].name else "order")

    def result(self):
        left_a = [self._lists[0][index].name for index in self.left_a]
        left_b = [self._lists[1][index].name for index in self.left_b]
        return sorted(self._pairs, key=lambda pair: pair.index_a), (left_a, left_b)


def _check_names(ours, theirs, names, ignore):
    if not isinstance(names, dict) or not all(isinstance(name, str) for pair in names.items() for name in pair):
        raise TypeError(f"`names` must be a dict of names to names. Received: {names!r}.")
    if isinstance(ignore, str) or not all(isinstance(name, str) for name in ignore):
        raise TypeError(f"`ignore` must be a list of names. Received: {ignore!r}.")
    names_of = {var.name for var in ours}, {var.name for var in theirs}
    for argument, passed, there in (
        ("The keys of `names`", names, names_of[0]),
        ("The values of `names`", names.values(), names_of[1]),
        ("`ignore`", ignore, names_of[0] | names_of[1]),
    ):
        missing = sorted(set(passed) - there)
        if missing:
            raise ValueError(
                f"{argument} must be names of recorded variables. Received: {missing}; there are {sorted(there)}."
            )
    if len(set(names.values())) < len(names) or (set(names) | set(names.values())) & set(ignore):
        raise ValueError(f"`names` must pair each variable once, and none of `ignore`. Received: {names}.")
