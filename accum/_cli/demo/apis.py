"""The training, through each API of the library; a run without `accum_steps` uses plain TensorFlow.

The classes share the same methods, so that the caller need not know which one is used.
"""

from typing import Any, Dict

import numpy as np

import accum
from accum._cli.demo import network
from accum._cli.demo.data import batches
from accum._cli.demo.settings import MICRO_BATCHES
from accum._tf import tf
from accum.compat.v1 import AccumOptimizer

MOMENTUM = 0.9


class GraphAPI:
    """A static graph and its Session, with `accum.compat.v1.AccumOptimizer`."""

    def __init__(self, run, settings):
        self.run = run
        weights = network.initial_weights(settings.seed)
        with tf.Graph().as_default():
            self._images = tf.compat.v1.placeholder(tf.float32, [None, 8, 8, 1])
            self._labels = tf.compat.v1.placeholder(tf.int32, [None])
            self._variables = [tf.compat.v1.Variable(value) for value in weights]
            self._logits = network.graph_logits(self._variables, self._images)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=self._labels, logits=self._logits)
            self._loss = tf.reduce_mean(losses)
            self._global_step = tf.compat.v1.train.get_or_create_global_step()
            self._train_op, self._flush_op = self._make_ops()
            self._session = tf.compat.v1.Session()
            self._session.run(tf.compat.v1.global_variables_initializer())

    def _make_ops(self):
        optimizer = tf.compat.v1.train.MomentumOptimizer(self.run.learning_rate, MOMENTUM)
        if self.run.accum_steps is None:
            return optimizer.minimize(self._loss, self._global_step), tf.no_op()
        optimizer = AccumOptimizer(optimizer, self.run.accum_steps)
        pairs = optimizer.compute_gradients(self._loss)
        weight = tf.size(self._labels)
        train_op = optimizer.apply_gradients(pairs, self._global_step, weight=weight)
        ops = optimizer.accumulation_ops(grads_and_vars=pairs, global_step=self._global_step, weight=weight)
        return train_op, ops.apply

    def train(self, examples, epochs, progress):
        """Train, telling `progress` the epoch's loss so far after each micro-batch. Returns each epoch's mean loss."""
        return _train_by_loop(self, examples, epochs, progress)

    def micro_step(self, batch):
        feed = {self._images: batch.images, self._labels: batch.labels}
        return self._session.run([self._loss, self._train_op], feed)[0]

    def end_epoch(self):
        self._session.run(self._flush_op)

    def updates(self):
        """The number of steps made, by the optimizer's own step counter."""
        return self._session.run(self._global_step)

    def weights(self):
        return self._session.run(self._variables)

    def logits(self, images):
        return self._session.run(self._logits, {self._images: images})


class _KerasAPI:
    """What the two Keras APIs share: the model, and what is read from it."""

    def __init__(self, run, settings):
        self.run = run
        self._model = self._make_model(settings)
        self._optimizer = tf.keras.optimizers.SGD(learning_rate=run.learning_rate, momentum=MOMENTUM)
        self._loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def _make_model(self, settings):
        return network.keras_model(network.initial_weights(settings.seed))

    def updates(self):
        """The number of steps made, by the optimizer's own step counter."""
        return self._optimizer.iterations.numpy()

    def weights(self):
        return self._model.get_weights()

    def logits(self, images):
        return self._model(images).numpy()


class OptimizerAPI(_KerasAPI):
    """A custom loop around a `tf.function`, with `GradientAccumulateOptimizer`."""

    def __init__(self, run, settings):
        super().__init__(run, settings)
        self._is_plain = run.accum_steps is None
        if not self._is_plain:
            self._optimizer = accum.GradientAccumulateOptimizer(self._optimizer, run.accum_steps)
        signature = tf.TensorSpec([None, 8, 8, 1], tf.float32), tf.TensorSpec([None], tf.int32)
        self._traced_step = tf.function(self._step, input_signature=signature)

    def _step(self, images, labels):
        with tf.GradientTape() as tape:
            loss = self._loss(labels, self._model(images, training=True))
        variables = self._model.trainable_variables
        pairs = list(zip(tape.gradient(loss, variables), variables))
        if self._is_plain:
            self._optimizer.apply_gradients(pairs)
        else:
            self._optimizer.apply_gradients(pairs, weight=tf.size(labels))
        return loss

    def train(self, examples, epochs, progress):
        """Train, telling `progress` the epoch's loss so far after each micro-batch. Returns each epoch's mean loss."""
        return _train_by_loop(self, examples, epochs, progress)

    def micro_step(self, batch):
        return self._traced_step(batch.images, batch.labels).numpy()

    def end_epoch(self):
        if not self._is_plain:
            self._optimizer.flush()


class ModelAPI(_KerasAPI):
    """`fit` of a `GradientAccumulateModel`."""

    def __init__(self, run, settings):
        super().__init__(run, settings)
        self._wrap(run, settings)
        self._model.compile(self._optimizer, loss=self._loss)

    def _wrap(self, run, settings):
        if run.accum_steps is not None:
            self._model = accum.GradientAccumulateModel(
                run.accum_steps,
                inputs=self._model.inputs,
                outputs=self._model.outputs,
                micro_batch_weight="examples",
                last_cycle="flush",
            )

    def train(self, examples, epochs, progress):
        """Train, telling `progress` the epoch's loss so far after each micro-batch. Returns each epoch's mean loss."""
        tell = tf.keras.callbacks.LambdaCallback(on_batch_end=lambda _, logs: progress(logs["loss"]))
        history = self._model.fit(
            examples.images,
            examples.labels,
            batch_size=self.run.batch_size,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=[tell],
        )
        return [float(loss) for loss in history.history["loss"]]


class MicroBatchAPI(ModelAPI):
    """`fit` of a `GradientAccumulateModel` that splits each batch itself, with batch normalisation in the network."""

    def _make_model(self, settings):
        return network.batch_norm_model(settings.seed)

    def _wrap(self, run, settings):
        if run.micro_batch_size is not None:
            whole_batch = () if run.whole_batch == "none" else run.whole_batch
            self._model = accum.GradientAccumulateModel.from_model(
                self._model, micro_batch_size=run.micro_batch_size, whole_batch=whole_batch
            )

    def warm_up(self, examples):
        """Trace and run the training at a learning rate of 0, in batches of two, and leave nothing changed."""
        run, before = self.run, self._model.get_weights()
        self.run, self._optimizer.learning_rate = run._replace(batch_size=2), 0.0
        self.train(examples, 1, lambda loss: None)
        self.run, self._optimizer.learning_rate = run, run.learning_rate
        self._optimizer.iterations.assign(0)
        self._model.set_weights(before)  # moving statistics, too

    def weights(self):
        """The trained weights; moving statistics are on another scale."""
        return [var.numpy() for var in self._model.trainable_variables]

    def logits(self, images):
        return np.concatenate([self._model(part, training=False).numpy() for part in np.array_split(images, 24)])


def _train_by_loop(api, examples, epochs, progress):
    losses = []
    for _ in range(epochs):
        total, count = 0.0, 0
        for batch in batches(examples, api.run.batch_size):
            total += float(api.micro_step(batch)) * len(batch.labels)
            count += len(batch.labels)
            progress(total / count)
        api.end_epoch()
        losses.append(total / count)
    return losses


BY_NAME: Dict[str, Any] = {
    "v1": GraphAPI,
    "optimizer": OptimizerAPI,
    "model": ModelAPI,
    MICRO_BATCHES: MicroBatchAPI,
}
