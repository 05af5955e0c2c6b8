"""Sum the slices of a gradient that belong to the same row of an embedding."""

from typing import Any, List, Sequence

from accum import _tf
from accum._tf import tf


def sum_duplicate_rows(gradients: Sequence[Any]) -> List[Any]:
    """Return gradients in which each row of an embedding occurs once, with the sum of its slices."""
    return [_tf.summed_rows(grad) if isinstance(grad, tf.IndexedSlices) else grad for grad in gradients]
