"""Measure whether a check could fail: how many tolerances a plainly wrong run ends away from the full batch."""

from accum import _tf
from accum._tf import tf
from accum.testing._deviations import deviation, scale

ENOUGH = 100.0  # tolerances: mistakes in accumulation come to some hundredths of the plainly wrong run's and more
ENOUGH_IN_16_BIT = 10.0  # there rounding itself comes to hundredths of a step, and smaller errors can't be told from it


def checked_sensitivity(pair, before, cut, tolerance):
    """How many tolerances a plainly wrong run ends away from the full batch, at the weight that is furthest off.

    The wrong run drops all micro-batches of a step but the first. It moves about as far as the full batch, in another
    direction, which is also what mistakes in accumulation do. Where a step has one micro-batch only, it does not train.

    Raises:
      ValueError: the wrong run is too close for the check to detect a mistake.
    """
    is_whole = all(len(parts) == 1 for parts in cut)
    wrong = before if is_whole else pair.train_on_first_parts(before, cut)
    sensitivity = max(
        deviation(ours, theirs) / (tolerance * scale(theirs))
        for name, ours, theirs in zip(pair.names, wrong, pair.full.get_weights())
        if name in pair.trained
    )
    enough = ENOUGH_IN_16_BIT if _has_16_bit(pair.full) else ENOUGH
    if sensitivity < enough:
        raise ValueError(
            "The check can't tell a wrong step from rounding: a run that {} ends only {:.2g} tolerances away from the "
            "full batch, and at least {:.0f} are needed. Train with a larger learning rate or for more `steps`, check "
            "in float32 or with a smaller `tolerance`, or give examples that differ more. Received: steps={}, "
            "tolerance={:.0e}.".format(
                "does not train" if is_whole else "drops all micro-batches of a step but the first",
                sensitivity,
                enough,
                len(cut),
                tolerance,
            )
        )
    return sensitivity


def _has_16_bit(model):
    dtypes = _tf.compute_dtypes(model) | {tf.as_dtype(var.dtype).name for var in model.weights}
    return bool(dtypes & {"float16", "bfloat16"})
