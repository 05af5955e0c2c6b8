"""The steps of `one_step`, in whole calls of `fit` over a dataset that tf.data does not tune."""

import numpy as np
import tensorflow as tf

from measuring import one_step
from measuring.through_fit import Fit, untuned


class InFit:
    """Calls `fit` on batches of K micro-batches, or on micro-batches for implementations that accumulate over calls."""

    def prepare(self, batches, times=1):
        size = self.size * (self.accum_steps if self.takes_whole_batches else 1)
        data = tf.data.Dataset.from_tensor_slices(tuple(np.concatenate(part) for part in zip(*batches)))
        return untuned(data.batch(size, drop_remainder=True).repeat(times))

    def run(self, batches):
        return Fit.run(self, batches)


def implementations():
    """name -> (class, module that it needs)."""
    known = one_step.implementations().items()
    return {name: (type(f"{made.__name__}InFit", (InFit, made), {}), needed) for name, (made, needed) in known}
