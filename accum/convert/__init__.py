"""Continue a run of a static graph in Keras, or a run of Keras in a static graph, even in the middle of a cycle.

Both sides are converted through a neutral description, a `RunState`: weights, the slots of the inner optimizer by role,
accumulators and counters. `_reading`, `_writing` and `_v1` read and write it as a `Saver`'s checkpoint, and `_keras` as
a live model and optimizer. `_rules` does the arithmetic where the two sides store the same thing differently.
"""

from accum.convert._conversion import from_v1, to_v1
from accum.convert._report import ConversionError, Disagreement, Entry, Report

__all__ = ["ConversionError", "Disagreement", "Entry", "Report", "from_v1", "to_v1"]
