"""Medians, and ratios of neighbours."""

import numpy as np


def row(name, seconds):
    """What is told of a contender.

    Args:
      name: of the contender.
      seconds: contender, "limit" among them -> seconds a cycle, one a round.

    Returns:
      A dict: the median of its seconds; of the ratios to the limit of the same round, the median and the quartiles.
    """
    ratios = np.divide(seconds[name], seconds["limit"])
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return {
        "contender": name,
        "seconds": float(np.median(seconds[name])),
        "ratio": float(middle),
        "ratio_25": float(low),
        "ratio_75": float(high),
        "rounds": len(ratios),
    }
