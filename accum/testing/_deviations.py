"""Measure how far arrays are apart, including NaN and Inf."""

import numpy as np


def deviation(ours, theirs):
    """Return the largest absolute difference. Elements that are equal, or NaN in both, do not differ."""
    ours, theirs = wide(ours), wide(theirs)
    same = (ours == theirs) | ((ours != ours) & (theirs != theirs))
    with np.errstate(invalid="ignore"):
        off = np.where(same, 0.0, np.abs(ours - theirs))
    return float(np.max(np.where(off == off, off, np.inf))) if off.size else 0.0


def scale(values):
    finite = np.abs(wide(values))
    finite = finite[np.isfinite(finite)]
    return max(1.0, float(finite.max())) if finite.size else 1.0


def wide(values):
    values = np.asarray(values)
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)
