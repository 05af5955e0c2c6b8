"""Medians, and ratios of neighbouring measurements."""

import numpy as np


def row(name, seconds, base="limit"):
    """The result for a implementation.

    Args:
      name: of the implementation.
      seconds: implementation -> seconds a cycle, one a round.
      base: the implementation that the ratios are to.

    Returns:
      A dict: the median of its seconds; of the ratios to `base` in the same round, the median and the quartiles.
    """
    ratios = np.divide(seconds[name], seconds[base])
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return {
        "implementation": name,
        "seconds": float(np.median(seconds[name])),
        "ratio": float(middle),
        "ratio_25": float(low),
        "ratio_75": float(high),
        "rounds": len(ratios),
    }
