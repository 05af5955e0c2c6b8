"""Which variables had a gradient in the present cycle, as far as Python sees its micro steps."""

from typing import Iterable, Set

from accum import _tf


class SeenGradients:
    """Notes the variables that have a gradient in each eager micro step.

    A variable without any in the whole cycle is not handed to the inner optimizer, as at the full batch. What a traced
    micro step does is not seen here. Once there was one, or if a cycle was not seen from its beginning, every variable
    counts as seen, so it is handed over with zeros.
    """

    def __init__(self) -> None:
        self._keys: Set[int] = set()
        self._next = 0  # the micro step that continues what was seen, -1 for none
        self._has_traced = False

    def note(self, micro_step: int, keys: Iterable[int]) -> None:
        """Note the keys of the variables that have a gradient in an eager micro step, counted from 0."""
        if micro_step == 0 and self._next != 1:
            self._keys, self._next = set(keys), 1
        elif micro_step in (self._next, self._next - 1):  # again: on another replica, or after one that was skipped
            self._keys.update(keys)
            self._next = micro_step + 1
        else:
            self._next = -1

    def note_trace(self) -> None:
        self._has_traced = True

    def end(self) -> None:
        """Forget the cycle."""
        self._keys, self._next = set(), 0

    def has_all(self, micro_steps: int) -> bool:
        """Whether each of the first `micro_steps` of this cycle was seen."""
        return not self._has_traced and self._next == micro_steps

    def __contains__(self, key: int) -> bool:
        return key in self._keys
