"""An accumulating optimizer for `tf.compat.v1` graphs, sessions and the training loops around them."""

from accum.compat.v1._hooks import CheckpointSaverHook, FlushHook
from accum.compat.v1._old_spellings import AdamAccumulated
from accum.compat.v1._optimizer import AccumOps, AccumOptimizer
from accum.compat.v1._saver import Saver
from accum.compat.v1._split_batch import split_batch
from accum.compat.v1._value_and_gradients import value_and_gradients

__all__ = [
    "AccumOps",
    "AccumOptimizer",
    "AdamAccumulated",
    "CheckpointSaverHook",
    "FlushHook",
    "Saver",
    "split_batch",
    "value_and_gradients",
]
