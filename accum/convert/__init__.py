"""Continue a run on the other side: from a `tf.compat.v1.train.Saver` checkpoint in Keras, or back, also mid-cycle.

Both sides are reduced to one neutral description, a `RunState`: weights, the slots of the inner optimizer by role,
accumulators and counters. `_v1` reads and writes it as a Saver's checkpoint, `_keras` as a live model and optimizer.
`_rules` does the arithmetic where the two sides store the same thing by different conventions.
"""

from accum.convert._conversion import from_v1, to_v1
from accum.convert._report import ConversionError, Disagreement, Entry, Report

__all__ = ["ConversionError", "Disagreement", "Entry", "Report", "from_v1", "to_v1"]
