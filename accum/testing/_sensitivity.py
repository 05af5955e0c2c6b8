"""Measure whether a check could fail: by how many tolerances a plainly wrong run differs from the full batch."""

from accum import _tf
from accum._tf import tf
from accum.testing._deviations import deviation, scale

# In tolerances. The error of a real mistake is at least some hundredths of that of the plainly wrong run.
ENOUGH = 100.0
# With 16 bits, rounding errors reach hundredths of a step themselves, so smaller mistakes can't be detected anyway.
ENOUGH_IN_16_BIT = 10.0


def checked_sensitivity(pair, before, cut, tolerance):
    """Return by how many tolerances a plainly wrong run differs from the full batch, at the weight furthest off.

    The wrong run drops all micro-batches of a step but the first. Like a real mistake in accumulation, it moves about
    as far as the full batch, but in another direction. If all steps have only one micro-batch, it does not train.

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
    dtypes = _tf.models.compute_dtypes(model) | {tf.as_dtype(var.dtype).name for var in model.weights}
    return bool(dtypes & {"float16", "bfloat16"})
