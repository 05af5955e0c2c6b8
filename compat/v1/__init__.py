"""The static-graph face: an optimizer for `tf.compat.v1` graphs, Sessions and the loops around them."""

from accum.compat.v1._hooks import FlushHook
from accum.compat.v1._lineage import AdamAccumulated
from accum.compat.v1._optimizer import AccumOps, AccumOptimizer
from accum.compat.v1._saver import Saver

__all__ = ["AccumOps", "AccumOptimizer", "AdamAccumulated", "FlushHook", "Saver"]
