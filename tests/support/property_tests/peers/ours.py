"""accum's optimizer for Keras."""

import numpy as np

import accum
from property_tests.peers import keras_plain


class Accum(keras_plain.KerasPeer):
    title = "accum, optimizer"
    packages = ("accum", "tensorflow", "keras")

    @classmethod
    def start(cls, case, initial):
        optimizer = accum.GradientAccumulateOptimizer(
            keras_plain.make(case), case["accum_steps"], case["reduction"], nonfinite=case["nonfinite"]
        )
        return cls(case, initial, optimizer)

    def take(self, grads, weight):
        pairs = list(zip(keras_plain.tensors_of(self.case, grads), self.variables))
        self.optimizer.apply_gradients(pairs, **({} if weight is None else {"weight": weight}))

    def flush(self):
        self.optimizer.flush()

    def reset(self):
        self.optimizer.reset()

    def slots(self):
        return keras_plain.slots_of(self.optimizer.optimizer)

    def resumed(self, folder):
        return self.restored(folder, self.start(self.case, [np.zeros_like(value) for value in self.weights()]))

    @classmethod
    def batch_norm(cls, case, batches, whole):
        layer = accum.AccumBatchNormalization(case["accum_steps"], momentum=keras_plain.MOMENTUM)
        return keras_plain.moved_by(layer, batches), keras_plain.moved_by_whole(whole)
