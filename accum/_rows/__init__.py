"""On which axis of each tensor of a graph do the examples lie, and which operations keep them apart?"""

from accum._rows._analysis import Analysis, analyse
from accum._rows._shapes import ConstantBatchSize
from accum._rows._states import Layout, Rows, Verdict

__all__ = ["Analysis", "ConstantBatchSize", "Layout", "Rows", "Verdict", "analyse"]
