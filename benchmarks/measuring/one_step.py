"""Steps of a Keras model as `fit` makes them: its train function, called on an iterator that stays open.

What a call of `fit` does around its steps is left out; `step_in_fit` includes it.
"""

import numpy as np
import tensorflow as tf

from measuring import through_fit
from measuring.custom_loop import IS_KERAS_3, Keras3
from measuring.through_fit import Fit

PLAIN = "plain, full batch"


class Steps(Fit):
    """What the implementations share; see `custom_loop.Loop`. Each gets whole batches of K micro-batches.

    Attributes:
      size: the number of examples in a micro-batch.
    """

    compile_options = {"jit_compile": False} if IS_KERAS_3 else {}
    takes_whole_batches = True

    def __init__(self, workload, initial, accum_steps, optimizer):
        self.size = workload.batch
        super().__init__(workload, initial, accum_steps, optimizer)
        self._calls = None

    def prepare(self, batches, times=1):
        """An endless iterator over what is in memory already, and how often to call the train function."""
        size = self.size * (self.accum_steps if self.takes_whole_batches else 1)
        arrays = [np.concatenate(part) for part in zip(*batches)]
        data = tuple(tf.constant(array.reshape((-1, size) + array.shape[1:])) for array in arrays)
        return iter(tf.data.Dataset.from_tensor_slices(data).repeat()), times * len(arrays[0]) // size

    def run(self, batches):
        iterator, calls = batches
        self._model.make_train_function()
        losses = []
        for _ in range(calls):
            self._model.reset_metrics()
            logs = self._model.train_function(iterator)
            losses.append((logs.get_value() if hasattr(logs, "get_value") else logs)["loss"])
        return [float(loss) for loss in losses]


class WholeBatch(Steps):
    """The whole batch at once, without the library."""


class Plain(Steps):
    """An update on every micro-batch, without the library."""

    takes_whole_batches = False


class Split(Steps):
    """`micro_batch_size=m`."""

    def _make_model(self, inputs, outputs):
        import accum

        return accum.GradientAccumulateModel(micro_batch_size=self.size, inputs=inputs, outputs=outputs)


class SplitByItself(Steps):
    """`micro_batch_size="auto"`, after memory has run out at twice the size."""

    def _make_model(self, inputs, outputs):
        import accum

        model = accum.GradientAccumulateModel(micro_batch_size="auto", inputs=inputs, outputs=outputs)
        model._accum.size.halve(2 * self.size, None)
        return model


class Cycles(Steps):
    """`accum_steps=K` on batches of m examples."""

    takes_whole_batches = False
    _make_model = through_fit.Ours._make_model


class GradientAccumulator(Steps):
    takes_whole_batches = False
    _make_model = through_fit.GradientAccumulatorModel._make_model


class KerasCycles(Steps):
    takes_whole_batches = False
    _make_optimizer = Keras3._make_optimizer


Ours = Split


def implementations():
    """name -> (class, module that it needs)."""
    found = {PLAIN: (WholeBatch, None), "accum, micro_batch_size": (Split, None)}
    found['accum, micro_batch_size="auto"'] = (SplitByItself, None)
    found["accum, accum_steps"] = (Cycles, None)
    found["gradient-accumulator, model"] = (GradientAccumulator, "gradient_accumulator")
    found["Keras 3, gradient_accumulation_steps"] = (KerasCycles, "keras 3")
    return found
