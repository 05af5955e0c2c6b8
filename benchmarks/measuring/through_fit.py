"""The model API: every implementation uses `fit` over a dataset, so each includes the overhead of Keras."""

import numpy as np
import tensorflow as tf

from measuring import custom_loop
from measuring.custom_loop import consumed, inner_optimizer


class Network(tf.keras.layers.Layer):
    """A workload as a layer."""

    def __init__(self, workload):
        super().__init__()
        self._workload = workload

    def build(self, input_shape):
        named = enumerate(self._workload.shapes)
        self._parts = [self.add_weight(name=f"w{i}", shape=shape, initializer="zeros") for i, shape in named]
        super().build(input_shape)

    def call(self, x):
        # In Keras 3 a weight is no `tf.Variable`, and would be read as a whole where rows are gathered.
        weights = [weight if isinstance(weight, tf.Variable) else weight.value for weight in self._parts]
        return self._workload.logits(weights, x)


def untuned(data):
    """`data`, not tuned while it is read.

    The thread that tunes a dataset sleeps 10 ms, then 20, 40 and so on, and is not always woken when the dataset ends.
    `fit` then returns only 310, 630, 1,270, ... ms after it began, however long its steps took.
    """
    options = tf.data.Options()
    if hasattr(options, "autotune"):
        options.autotune.enabled = False
    else:  # dies with 2.6
        options.experimental_optimization.autotune = False
    return data.with_options(options)


class Fit:
    """What the implementations share; see `custom_loop.Loop`."""

    compile_options = {}

    def __init__(self, workload, initial, accum_steps, optimizer):
        self.accum_steps = accum_steps
        self._workload = workload
        inputs = tf.keras.Input(workload.input_shape, dtype=workload.input_dtype)
        self._network = Network(workload)
        self._model = self._make_model(inputs, self._network(inputs))
        self._network.set_weights(initial)  # a model may count accumulators among its weights
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._model.compile(self._make_optimizer(optimizer), loss=loss, **self.compile_options)

    def _make_model(self, inputs, outputs):
        return tf.keras.Model(inputs, outputs)

    def _make_optimizer(self, name):
        return inner_optimizer(name)

    def prepare(self, batches, times=1):
        data = tf.data.Dataset.from_tensor_slices(tuple(np.concatenate(part) for part in zip(*batches)))
        return untuned(data.batch(self._workload.batch, drop_remainder=True).repeat(times))

    def run(self, batches):
        return self._model.fit(batches, verbose=0).history["loss"]

    def settle(self):
        """Do nothing, because `fit` has already read its metrics."""

    def weights(self):
        return self._network.get_weights()


class Plain(Fit):
    """An update on every micro-batch."""


class Ours(Fit):
    def _make_model(self, inputs, outputs):
        import accum

        return accum.GradientAccumulateModel(self.accum_steps, inputs=inputs, outputs=outputs)


class OurOptimizer(Fit):
    def _make_optimizer(self, name):
        import accum

        return accum.GradientAccumulateOptimizer(inner_optimizer(name), self.accum_steps)


class GradientAccumulatorModel(Fit):
    def _make_model(self, inputs, outputs):
        import gradient_accumulator

        return gradient_accumulator.GradientAccumulateModel(
            accum_steps=self.accum_steps, inputs=inputs, outputs=outputs
        )


class GradientAccumulatorOptimizer(Fit):
    _make_optimizer = custom_loop.GradientAccumulator._make_optimizer


class Keras3(Fit):
    _make_optimizer = custom_loop.Keras3._make_optimizer


class ForwardBackward(tf.keras.Model):
    """A model whose `fit` computes gradients but does not use them."""

    def train_step(self, data):
        x, y = data
        (network,) = [layer for layer in self.layers if layer.trainable_weights]
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=self(x, training=True))
            loss = tf.reduce_mean(losses)
        weights = [w if isinstance(w, tf.Variable) else w.value for w in network.trainable_weights]
        return {"loss": consumed(loss, tape.gradient(loss, weights))[0]}


class TutorialModel(tf.keras.Model):
    """The train step of many tutorials: accumulators, and a `tf.cond` at the end of a cycle."""

    def accumulate(self, accum_steps):
        self._steps, self._count = accum_steps, tf.Variable(0, trainable=False)
        self._sums = [tf.Variable(tf.zeros(weight.shape), trainable=False) for weight in self.trainable_weights]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=self(x, training=True))
            loss = tf.reduce_mean(losses)
        weights = [w if isinstance(w, tf.Variable) else w.value for w in self.trainable_weights]
        for total, grad in zip(self._sums, tape.gradient(loss, weights)):
            total.assign_add(grad / self._steps)
        tf.cond(tf.equal(self._count.assign_add(1) % self._steps, 0), self._make_step, lambda: None)
        return {"loss": loss}

    def _make_step(self):
        self.optimizer.apply_gradients(list(zip(self._sums, self.trainable_weights)))
        for total in self._sums:
            total.assign(tf.zeros_like(total))


class ByHand(Fit):
    """`TutorialModel` in `fit`."""

    def _make_model(self, inputs, outputs):
        model = TutorialModel(inputs, outputs)
        model.accumulate(self.accum_steps)
        return model

    def _make_optimizer(self, name):
        made = super()._make_optimizer(name)
        if hasattr(made, "build"):  # not within `tf.cond`
            made.build(self._model.trainable_variables)
        return made


class LimitInFit(Fit):
    """The limit including Keras: forward and backward passes in a `fit` that makes no step, and bare applies."""

    def __init__(self, *args):
        super().__init__(*args)
        self._bare = custom_loop.Limit(*args)
        self._cycles = 0

    def _make_model(self, inputs, outputs):
        return ForwardBackward(inputs, outputs)

    def prepare(self, batches):
        self._bare.prepare(batches)
        self._cycles = len(batches) // self.accum_steps
        return super().prepare(batches)

    def run(self, batches):
        losses = super().run(batches)
        self._bare.apply(self._cycles)
        return losses


def implementations():
    """name -> (class, module that it needs)."""
    found = {"accum": (Ours, None), "accum, optimizer": (OurOptimizer, None)}
    found["an update every micro-batch"] = (Plain, None)
    found["by hand"] = (ByHand, None)
    found["limit in fit"] = (LimitInFit, "no gpu")
    found["gradient-accumulator, model"] = (GradientAccumulatorModel, "gradient_accumulator")
    found["gradient-accumulator, optimizer"] = (GradientAccumulatorOptimizer, "gradient_accumulator")
    found["Keras 3"] = (Keras3, "keras 3")
    return found
