"""Sum the slices of a gradient that belong to the same row of an embedding."""

from typing import Any, List, Sequence


def sum_duplicate_rows(gradients: Sequence[Any]) -> List[Any]:
    """Return gradients in which each row of an embedding occurs once, with the sum of its slices."""
    from accum._engine._gradients import with_each_row_once

    return with_each_row_once(gradients)
