"""The training: a static graph on TensorFlow 1.15, a Keras model elsewhere. Both classes have the same methods."""

import numpy as np

import accum
from accum._cli.demo import network
from accum._cli.demo.data import batches
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

    def warm_up(self, examples):
        """A graph is complete before it runs."""

    def train(self, examples, epochs, progress):
        """Train, telling `progress` the epoch's loss so far after each micro-batch. Returns each epoch's mean loss."""
        losses = []
        for _ in range(epochs):
            total, count = 0.0, 0
            for batch in batches(examples, self.run.batch_size):
                total += float(self._micro_step(batch)) * len(batch.labels)
                count += len(batch.labels)
                progress(total / count)
            self._session.run(self._flush_op)
            losses.append(total / count)
        return losses

    def _micro_step(self, batch):
        feed = {self._images: batch.images, self._labels: batch.labels}
        return self._session.run([self._loss, self._train_op], feed)[0]

    def updates(self):
        """The number of steps made, by the optimizer's own step counter."""
        return self._session.run(self._global_step)

    def weights(self):
        return self._session.run(self._variables)

    def logits(self, images):
        return self._session.run(self._logits, {self._images: images})


class ModelAPI:
    """`fit` of a model with batch normalisation; `GradientAccumulateModel` where it splits each batch."""

    def __init__(self, run, settings):
        self.run = run
        self._model = network.batch_norm_model(settings.seed)
        self._optimizer = tf.keras.optimizers.SGD(learning_rate=run.learning_rate, momentum=MOMENTUM)
        if run.micro_batch_size is not None:
            self._model = accum.GradientAccumulateModel.from_model(
                self._model, micro_batch_size=run.micro_batch_size, whole_batch=run.whole_batch
            )
        self._model.compile(self._optimizer, loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def warm_up(self, examples):
        """Trace and run the training at a learning rate of 0, in batches of two, and leave nothing changed."""
        run, before = self.run, self._model.get_weights()
        self.run, self._optimizer.learning_rate = run._replace(batch_size=2), 0.0
        self.train(examples, 1, lambda loss: None)
        self.run, self._optimizer.learning_rate = run, run.learning_rate
        self._optimizer.iterations.assign(0)
        self._model.set_weights(before)  # moving statistics, too

    def train(self, examples, epochs, progress):
        """Train, telling `progress` the epoch's loss so far after each batch. Returns each epoch's mean loss."""
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

    def updates(self):
        """The number of steps made, by the optimizer's own step counter."""
        return self._optimizer.iterations.numpy()

    def weights(self):
        """The trained weights; moving statistics are on another scale."""
        return [var.numpy() for var in self._model.trainable_variables]

    def logits(self, images):
        return np.concatenate([self._model(part, training=False).numpy() for part in np.array_split(images, 24)])
