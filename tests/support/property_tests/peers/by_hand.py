"""Accumulating by hand in a custom loop, in the two ways that guides teach."""

import tensorflow as tf

from property_tests.peers import keras_plain


class DividedSum(keras_plain.KerasPeer):
    """Gradients are added to variables; after K of them their sum is divided by K and applied."""

    title = "By hand, the sum divided by K"
    packages = ("tensorflow", "keras")
    not_offered = {"L5": True, "L6": False, "L9 skip": False, "L12": False, "L13": True}

    @classmethod
    def start(cls, case, initial):
        return cls(case, initial, keras_plain.make(case))

    def __init__(self, case, initial, optimizer):
        super().__init__(case, initial, optimizer)
        self._sums = [tf.Variable(tf.zeros_like(value), trainable=False) for value in initial]
        self._count = 0

    def take(self, grads, weight):
        for total, grad in zip(self._sums, keras_plain.tensors_of(self.case, grads)):
            total.assign_add(self._part(grad))
        self._count += 1
        if self._count == self.case["accum_steps"]:
            self._step()

    def _part(self, grad):
        return grad

    def _step(self):
        number = 1.0 if self.case["reduction"] == "sum" else self.case["accum_steps"]
        self._make_step([total / number for total in self._sums])

    def _make_step(self, grads):
        self.optimizer.apply_gradients(list(zip(grads, self.variables)))
        for total in self._sums:
            total.assign(tf.zeros_like(total))
        self._count = 0


class DividedLosses(DividedSum):
    """Each loss, and so its gradient, is divided by K; the loop also makes a step at the end of an epoch."""

    title = "By hand, each loss divided by K"
    not_offered = {"L5": True, "L6 drop": False, "L9 skip": False, "L12": False, "L13": True}

    def _part(self, grad):
        if grad is None or self.case["reduction"] == "sum":
            return grad
        if isinstance(grad, tf.IndexedSlices):
            return tf.IndexedSlices(grad.values / self.case["accum_steps"], grad.indices, grad.dense_shape)
        return grad / self.case["accum_steps"]

    def _step(self):
        self._make_step([tf.convert_to_tensor(total) for total in self._sums])

    def flush(self):
        self._step()
