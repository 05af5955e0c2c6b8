"""GradientAccumulator 0.5: the wrapper of an optimizer, and the wrapper of a model."""

import gradient_accumulator
import numpy as np
import tensorflow as tf

from property_tests import cycles
from property_tests.peers import keras_plain


class OptimizerWrapper(keras_plain.KerasPeer):
    title = "GradientAccumulator, optimizer"
    packages = ("gradient-accumulator", "tensorflow")
    not_offered = {"L5": True, "L6 flush": False, "L6 drop": True, "L9 skip": False}

    @classmethod
    def start(cls, case, initial):
        optimizer = gradient_accumulator.GradientAccumulateOptimizer(
            optimizer=keras_plain.make(case), accum_steps=case["accum_steps"], reduction=case["reduction"].upper()
        )
        return cls(case, initial, optimizer)

    def reset(self):
        self.optimizer.reset()

    def slots(self):
        inner = self.optimizer.optimizer
        names = inner.get_slot_names()
        return [inner.get_slot(var, name).numpy() for var in self.variables for name in names]

    def resumed(self, folder):
        return self.restored(folder, self.start(self.case, [np.zeros_like(value) for value in self.weights()]))

    @classmethod
    def batch_norm(cls, case, batches, whole):
        layer = gradient_accumulator.AccumBatchNormalization(
            accum_steps=case["accum_steps"], momentum=keras_plain.MOMENTUM
        )
        return keras_plain.moved_by(layer, batches), keras_plain.moved_by_whole(whole)


class Products(tf.keras.layers.Layer):
    """The sum of each variable times its input, so that the mean input of a batch is the variable's gradient."""

    def __init__(self, variables, initial):
        super().__init__()
        self._are_sparse = [variable["is_sparse"] for variable in variables]
        self.mine = [tf.Variable(value) for value in initial]

    def call(self, inputs):
        inputs, total = list(inputs), 0.0
        for var, is_sparse in zip(self.mine, self._are_sparse):
            rows = tf.gather(var, inputs.pop(0)) if is_sparse else var
            product = rows * inputs.pop(0)
            total += tf.reduce_sum(product, axis=list(range(1, len(product.shape))))
        return total


class ModelWrapper(keras_plain.KerasPeer):
    """A model whose gradients are its inputs; a micro-batch of weight n has n equal examples."""

    title = "GradientAccumulator, model"
    packages = ("gradient-accumulator", "tensorflow")
    not_offered = {"L4": True, "L5": True, "L6": False, "L9 skip": False}
    batch_norm = OptimizerWrapper.batch_norm

    def __init__(self, case, initial, optimizer):
        self.case, self.optimizer = case, optimizer
        inputs = []
        for variable in case["variables"]:
            if variable["is_sparse"]:
                inputs.append(tf.keras.Input([None], dtype="int64"))
                inputs.append(tf.keras.Input([None] + variable["shape"][1:]))
            else:
                inputs.append(tf.keras.Input(variable["shape"]))
        layer = Products(case["variables"], initial)
        self.model = gradient_accumulator.GradientAccumulateModel(
            accum_steps=case["accum_steps"], inputs=inputs, outputs=layer(inputs)
        )
        self.model.compile(optimizer, loss=lambda y, outputs: outputs)
        self.variables = layer.mine

    @classmethod
    def start(cls, case, initial):
        return cls(case, initial, keras_plain.make(case))

    def take(self, grads, weight):
        """The wrapper asks for zeros where a variable has no gradient, so None is an input of zeros."""
        count, inputs = int(weight or 1), []
        for variable, grad in zip(self.case["variables"], grads):
            if isinstance(grad, cycles.Rows):
                inputs.append(np.stack([grad.indices] * count))
                grad = grad.values
            inputs.append(np.stack([np.zeros(variable["shape"], "float32") if grad is None else grad] * count))
        self.model.train_on_batch(inputs, np.zeros(count, "float32"))

    def resumed(self, folder):
        path = tf.train.Checkpoint(model=self.model, optimizer=self.optimizer).save(folder + "/run")
        other = self.start(self.case, [np.zeros_like(value) for value in self.weights()])
        tf.train.Checkpoint(model=other.model, optimizer=other.optimizer).restore(path)
        return other
