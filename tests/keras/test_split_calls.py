"""Train steps that call several networks, and use them as they like, under `whole_batch` (law L21).

Each call of a layer is split, and the step runs once. The oracle is plain Keras, which trains on the whole batch.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_near
from optimizers import mainly
from replicas import mirrored
from versions import IS_KERAS_3
from warned import silent, warned

import accum

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.law("L21")]

layers = tf.keras.layers
RANDOM = np.random.RandomState(0)
X = RANDOM.normal(size=(40, 5)).astype("float32")
TOKENS = RANDOM.randint(1, 7, size=(40, 6)).astype("int32")
TOKENS[::2, 4:] = 0
BATCH = 20
JIT = {"jit_compile": False} if IS_KERAS_3 else {}  # XLA compiles no `py_function`


def dense(outputs, inputs, hidden=8, norm=False):
    stack = [tf.keras.Input((inputs,)), layers.Dense(hidden, activation="tanh")]
    return tf.keras.Sequential(stack + [layers.BatchNormalization()] * norm + [layers.Dense(outputs)])


class Steps(tf.keras.Model):
    """A model whose train step uses its networks instead of its `call`."""

    def __init__(self, rate=0.05):
        super().__init__()
        self.rate = rate
        self.make()

    def compile(self, **options):
        super().compile(**options)
        self.first = tf.keras.optimizers.SGD(self.rate)
        self.second = tf.keras.optimizers.SGD(self.rate)

    def call(self, inputs):
        return inputs

    @staticmethod
    def update(optimizer, tape, loss, variables):
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))


class Adversarial(Steps):
    """Two updates of the critic with own clipping, weight clipping, and a generator that sees the new critic."""

    critic_updates = 2

    def compile(self, **options):
        super().compile(**options)
        for optimizer, network in ((self.first, self.critic), (self.second, self.generator)):
            if hasattr(optimizer, "build"):  # otherwise, the step would be traced twice
                optimizer.build(network.trainable_variables)

    def make(self):
        self.generator, self.critic = dense(5, 3, norm=True), dense(1, 5)
        self.average = dense(5, 3, norm=True)

    def train_step(self, batch):
        data, _ = batch
        noise = data[:, :3]
        for _ in range(self.critic_updates):
            with tf.GradientTape() as tape:
                on_real = self.critic(data, training=True)
                on_fake = self.critic(self.generator(noise, training=True), training=True)
                loss = tf.reduce_mean(on_fake) - tf.reduce_mean(on_real) + tf.sqrt(tf.reduce_mean(on_real**2))
            weights = self.critic.trainable_variables
            grads, _ = tf.clip_by_global_norm(tape.gradient(loss, weights), 0.3)
            self.first.apply_gradients(zip(grads, weights))
            for weight in weights:
                weight.assign(tf.clip_by_value(weight, -0.6, 0.6))
        with tf.GradientTape() as tape:
            fake = self.generator(noise, training=True)
            centred = fake - tf.reduce_mean(fake, axis=0)
            loss_of_generator = tf.reduce_mean(centred**4) - tf.reduce_mean(self.critic(fake, training=True))
        self.update(self.second, tape, loss_of_generator, self.generator.trainable_variables)
        for average, weight in zip(self.average.weights, self.generator.weights):
            average.assign(0.5 * average + 0.5 * weight)
        return {"critic": loss, "generator": loss_of_generator}


class InTurn(Adversarial):
    """One update of each, which takes less to trace on two replicas."""

    critic_updates = 1


class BothAtOnce(Steps):
    """The step of the DCGAN of keras.io and tensorflow.org: examples of both kinds in one call, two tapes."""

    def make(self):
        self.generator, self.critic = dense(5, 3), dense(1, 5, norm=True)

    def train_step(self, batch):
        data, _ = batch
        noise = data[:, :3]
        labels = tf.concat([tf.ones_like(data[:, :1]), tf.zeros_like(data[:, :1])], axis=0)
        cross_entropy = tf.nn.sigmoid_cross_entropy_with_logits
        with tf.GradientTape() as of_generator, tf.GradientTape() as of_critic:
            fake = self.generator(noise, training=True)
            logits = self.critic(tf.concat([data, fake], axis=0), training=True)
            loss = tf.reduce_mean(cross_entropy(labels, logits))
            loss_of_generator = tf.reduce_mean(cross_entropy(1.0 - labels, logits))
        self.update(self.first, of_critic, loss, self.critic.trainable_variables)
        self.update(self.second, of_generator, loss_of_generator, self.generator.trainable_variables)
        return {"critic": loss, "generator": loss_of_generator}


class Divergence(layers.Layer):
    def call(self, inputs):
        self.add_loss(0.1 * tf.reduce_mean(inputs**2))
        return inputs


class AutoEncoder(Steps):
    """Encoder and decoder, with a loss that a layer adds, and a regularized kernel."""

    def make(self):
        self.encoder = tf.keras.Sequential(
            [tf.keras.Input((5,)), layers.Dense(4, kernel_regularizer=tf.keras.regularizers.l2(0.1)), Divergence()]
        )
        self.decoder = dense(5, 4, norm=True)

    def train_step(self, batch):
        data, _ = batch
        with tf.GradientTape() as tape:
            outputs = self.decoder(self.encoder(data, training=True), training=True)
            added = sum(self.encoder.losses)
            loss = tf.reduce_mean((outputs - data) ** 2) / tf.math.reduce_std(data) + added
        weights = self.encoder.trainable_variables + self.decoder.trainable_variables
        self.update(self.first, tape, loss, weights)
        return {"loss": loss, "added": added}


class Masked(Steps):
    """Layers called one by one; the first makes a mask, which the second uses."""

    def make(self):
        self.embedding, self.recurrent = layers.Embedding(7, 4, mask_zero=True), layers.SimpleRNN(4)
        self.head = layers.Dense(1)

    def call(self, inputs):
        return self.head(self.recurrent(self.embedding(inputs)))

    def train_step(self, batch):
        data, _ = batch
        with tf.GradientTape() as tape:
            hidden = self.recurrent(self.embedding(data), training=True)
            outputs = self.head(hidden)
            loss = tf.reduce_mean(outputs**2) / tf.reduce_max(outputs)
        weights = self.embedding.trainable_variables + self.recurrent.trainable_variables
        self.update(self.first, tape, loss, weights + self.head.trainable_variables)
        return {"loss": loss}


class AfterUpdate(Steps):
    """A gradient through a network that has been updated since it was called, by the weights that it had."""

    def make(self):
        self.encoder, self.head = dense(4, 5), dense(1, 4)

    def train_step(self, batch):
        data, _ = batch
        with tf.GradientTape() as tape, tf.GradientTape() as of_head:
            outputs = self.head(self.encoder(data))
            loss = tf.reduce_mean(outputs**2)
        self.update(self.first, of_head, loss, self.head.trainable_variables)
        self.update(self.second, tape, loss, self.encoder.trainable_variables)
        return {"loss": loss}


class Momentum(Steps):
    """A teacher that moves after the update, and similarities of all pairs of examples."""

    def make(self):
        self.encoder, self.teacher = dense(4, 5, norm=True), dense(4, 5, norm=True)
        self.queue = tf.Variable(tf.random.stateless_normal([10, 4], [1, 2]), trainable=False)

    def train_step(self, batch):
        data, _ = batch
        with tf.GradientTape() as tape:
            queries = tf.math.l2_normalize(self.encoder(data, training=True), axis=1)
            keys = tf.math.l2_normalize(self.teacher(data[::-1], training=False), axis=1)
            logits = tf.matmul(queries, tf.concat([keys, self.queue], axis=0), transpose_b=True)
            targets = tf.range(tf.shape(data)[0])
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, 10.0 * logits))
        self.update(self.first, tape, loss, self.encoder.trainable_variables)
        self.queue.assign(tf.concat([keys, self.queue], axis=0)[:10])
        for slow, fast in zip(self.teacher.weights, self.encoder.weights):
            slow.assign(0.9 * slow + 0.1 * fast)
        return {"loss": loss}


class Penalty(Steps):
    """The gradient penalty of a WGAN, which differentiates a gradient."""

    def make(self):
        self.critic = dense(1, 5)

    def train_step(self, batch):
        data, _ = batch
        with tf.GradientTape() as tape:
            loss = self.penalty(data)
        self.update(self.first, tape, loss, self.critic.trainable_variables)
        return {"loss": loss}

    def penalty(self, data):
        with tf.GradientTape() as of_inputs:
            of_inputs.watch(data)
            outputs = self.critic(data, training=True)
        return tf.reduce_mean(of_inputs.gradient(outputs, data) ** 2)


class Scaled(layers.Layer):
    """Assigns to its weights in a call, as spectral normalisation does.

    Args:
      order: what it does with them.
      in_branch: whether a conditional reads them.
    """

    def __init__(self, order, in_branch):
        super().__init__()
        self.order, self.in_branch = order, in_branch

    def build(self, shape):
        self.kernel = self.add_weight(name="kernel", shape=(shape[-1], 4), initializer="glorot_uniform", trainable=True)

    def call(self, inputs):
        outputs = 0.0
        for does in self.order:
            if does == "read":
                outputs += tf.tanh(tf.matmul(inputs, tf.convert_to_tensor(self.kernel)))
            else:
                kernel = tf.convert_to_tensor(self.kernel)
                norm = tf.norm(kernel)
                read = (lambda: tf.convert_to_tensor(self.kernel)) if self.in_branch else (lambda w=kernel: w)
                self.kernel.assign(tf.cond(norm > 9.0, read, lambda n=norm, r=read: 0.8 * r() / tf.sqrt(n)))
        return outputs


class PenaltyBehindAssignment(Penalty):
    order, in_branch = ("assign", "read"), True

    def make(self):
        scaled = Scaled(self.order, self.in_branch)
        self.critic = tf.keras.Sequential([tf.keras.Input((5,)), scaled, layers.Dense(1)])


class PenaltyAroundAssignment(PenaltyBehindAssignment):
    order = ("read", "assign", "read")


class PenaltyBetweenAssignments(PenaltyBehindAssignment):
    order, in_branch = ("assign", "read", "assign"), False


class BehindAssignment(PenaltyBehindAssignment):
    def penalty(self, data):
        return tf.reduce_mean((self.critic(data, training=True) - 1.0) ** 2)


class AroundAssignment(BehindAssignment):
    order = ("read", "assign", "read")


class BetweenAssignments(BehindAssignment):
    order, in_branch = ("assign", "read", "assign"), False


class ReadInBranchBehindAssignment(BehindAssignment):
    order = ("assign", "assign", "read")


class PenaltyOnWeights(Steps):
    """Trains on its loss and on the squares of its gradient by the weights."""

    def make(self):
        self.critic = dense(1, 5)

    def train_step(self, batch):
        data, _ = batch
        variables = self.critic.trainable_variables
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_mean((self.critic(data, training=True) - 1.0) ** 2)
            penalties = [tf.reduce_sum(tf.convert_to_tensor(one) ** 2) for one in inner.gradient(loss, variables)]
            total = loss + 0.01 * tf.add_n(penalties)
        self.update(self.first, outer, total, variables)
        return {"loss": total}


class PenaltyBehindNormalization(Penalty):
    def make(self):
        self.critic = dense(1, 5, norm=True)


class ConditionalPenalty(Penalty):
    """As that of a critic that knows the class of each example; one tape gives two gradients."""

    def make(self):
        inputs = [tf.keras.Input((5,)), tf.keras.Input((3,))]
        hidden = layers.Concatenate()([inputs[0], layers.Dense(3, activation="tanh")(inputs[1])])
        self.critic = tf.keras.Model(inputs, [dense(1, 8)(hidden), dense(2, 8)(hidden)])

    def penalty(self, data):
        mixed = 0.5 * (data + data[::-1])
        with tf.GradientTape(persistent=True) as of_inputs:
            of_inputs.watch(mixed)
            first, second = self.critic([mixed, data[:, :3]], training=True)
            sums = tf.reduce_sum(second, axis=1)
        slopes = [of_inputs.gradient(one, mixed) for one in (first, sums)]
        lengths = [tf.sqrt(tf.reduce_sum(slope**2, axis=1) + 1e-3) for slope in slopes]
        return tf.reduce_mean((lengths[0] - 1.0) ** 2) + tf.reduce_mean(first * lengths[1][:, None])


class PenaltyOfPairs(Penalty):
    """Of a network that takes the same tensor twice."""

    def make(self):
        inputs = [tf.keras.Input((5,)), tf.keras.Input((5,))]
        hidden = layers.Concatenate()([layers.Dense(3, activation="tanh")(inputs[0]), inputs[1]])
        self.critic = tf.keras.Model(inputs, dense(1, 8)(hidden))

    def penalty(self, data):
        mixed = tf.tanh(data)
        with tf.GradientTape() as of_inputs:
            of_inputs.watch(mixed)
            outputs = self.critic([mixed, mixed], training=True)
        return tf.reduce_mean(of_inputs.gradient(outputs, mixed) ** 2)


class PenaltyAlong(Penalty):
    """Of a derivative along the inputs themselves, which depend on weights."""

    def make(self):
        self.generator, self.critic = dense(5, 5), dense(5, 5)

    def train_step(self, batch):
        data, _ = batch
        with tf.GradientTape() as tape:
            made = self.generator(data, training=True)
            with tf.GradientTape() as of_inputs:
                of_inputs.watch(made)
                outputs = self.critic(made, training=True)
            loss = tf.reduce_mean(of_inputs.gradient(outputs, made, output_gradients=made) ** 2)
        self.update(self.first, tape, loss, self.generator.trainable_variables + self.critic.trainable_variables)
        return {"loss": loss}


class PenaltyOfTwoOutputs(Penalty):
    """Of a sum of outputs, whose gradients are the same tensor, in a network that is computed at once."""

    def make(self):
        inputs = tf.keras.Input((5,))
        hidden = AddsLoss()(layers.Dense(4, activation="tanh")(inputs))
        self.critic = tf.keras.Model(inputs, [dense(1, 4)(hidden), dense(1, 4)(hidden)])

    def penalty(self, data):
        with tf.GradientTape() as of_inputs:
            of_inputs.watch(data)
            outputs = sum(self.critic(data, training=True)) ** 2
        return tf.reduce_mean(of_inputs.gradient(outputs, data) ** 2) + tf.add_n(self.critic.losses)


class Compared(layers.Layer):
    """Appends the share of each example in all of them."""

    def call(self, inputs):
        return tf.concat([inputs, tf.nn.softmax(inputs, axis=0)], axis=1)


class PenaltyAmongExamples(Penalty):
    def make(self):
        stack = [tf.keras.Input((5,)), layers.Dense(4, activation="tanh"), Compared(), layers.Dense(1)]
        self.critic = tf.keras.Sequential(stack)


class AddsLoss(layers.Layer):
    def call(self, inputs):
        self.add_loss(tf.reduce_mean(inputs**2))
        return inputs


class PenaltyBesideAddedLoss(Penalty):
    def make(self):
        stack = [tf.keras.Input((5,)), layers.Dense(4, activation="tanh"), AddsLoss(), layers.Dense(1)]
        self.critic = tf.keras.Sequential(stack)

    def penalty(self, data):
        return super().penalty(data) + tf.add_n(self.critic.losses)


class PenaltyWithNoise(Penalty):
    def make(self):
        stack = [tf.keras.Input((5,)), layers.Dense(8, activation="tanh"), layers.Dropout(0.5, seed=1), layers.Dense(1)]
        self.critic = tf.keras.Sequential(stack)


class PenaltyInLoop(Penalty):
    def make(self):
        loop = lambda x: tf.while_loop(lambda n, _: n < 2, lambda n, y: (n + 1, y + tf.sin(y)), [0, x])[1]
        stack = [tf.keras.Input((5,)), layers.Dense(4), layers.Lambda(loop), layers.Dense(1)]
        self.critic = tf.keras.Sequential(stack)


class PenaltyOnTable(PenaltyOnWeights):
    def make(self):
        cut = layers.Lambda(lambda data: tf.cast(data > 0.0, tf.int32))
        stack = [tf.keras.Input((5,)), cut, layers.Embedding(2, 3), layers.Flatten(), layers.Dense(1)]
        self.critic = tf.keras.Sequential(stack)


class LazyPenalty(Penalty):
    """As that of StyleGAN2, which is computed in some steps alone."""

    def penalty(self, data):
        penalty = super().penalty
        return tf.cond(tf.reduce_sum(data) > 0.0, lambda: penalty(data), lambda: 0.0)


class TwoTasks(Steps):
    """Two tasks, each with a loss and an update of its own: the other head has no gradient, not one of zeros."""

    def compile(self, **options):
        super().compile(**options)
        self.first = tf.keras.optimizers.SGD(self.rate, momentum=0.9)

    def make(self):
        inputs = tf.keras.Input([5])
        hidden = dense(4, 5)(inputs)
        self.network = tf.keras.Model(inputs, [dense(1, 4)(hidden), dense(2, 4)(hidden)])

    def train_step(self, batch):
        data, _ = batch
        for task in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.network(data, training=True)[task] - 1.0) ** 2)
            self.update(self.first, tape, loss, self.network.trainable_variables)
        return {"loss": loss}


class JacobianPenalty(Penalty):
    """As that of a contractive autoencoder."""

    def penalty(self, data):
        with tf.GradientTape() as of_inputs:
            of_inputs.watch(data)
            outputs = self.critic(data, training=True)
        return tf.reduce_mean(of_inputs.batch_jacobian(outputs, data) ** 2)


class ChosenPenalty(Penalty):
    """What the error of `LazyPenalty` advises."""

    def penalty(self, data):
        return tf.where(tf.reduce_sum(data) > 0.0, super().penalty(data), 0.0)


class ThirdDerivative(Steps):
    """The loss of a differential equation of the second order."""

    def make(self):
        self.net = dense(1, 5)

    def train_step(self, batch):
        data, _ = batch
        with tf.GradientTape() as tape:
            with tf.GradientTape() as second:
                second.watch(data)
                with tf.GradientTape() as first:
                    first.watch(data)
                    values = self.net(data)
                slopes = first.gradient(values, data)
            loss = tf.reduce_mean((second.gradient(slopes, data) + slopes) ** 2)
        self.update(self.first, tape, loss, self.net.trainable_variables[:1])
        return {"loss": loss}


class Seeing(layers.Layer):
    def __init__(self, metric):
        super().__init__()
        self.metric = metric

    def call(self, inputs):
        self.metric.update_state(tf.reduce_mean(inputs**2))
        return tf.identity(inputs)


class KeepsMetric(tf.keras.Model):
    """Its `call` updates a metric of the model itself, and one that is an attribute of a layer, too."""

    def __init__(self):
        super().__init__()
        self.net, self.seen = dense(5, 5), tf.keras.metrics.Mean(name="seen")
        self.seeing = Seeing(self.seen)  # so the metric is found twice
        self.own = tf.keras.metrics.Mean(name="own")

    def call(self, inputs):
        self.own.update_state(tf.reduce_mean(inputs))
        return self.net(self.seeing(inputs))


class KeepsMetricInStep(Steps):
    def make(self):
        self.net = KeepsMetric()

    def train_step(self, batch):
        data, _ = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.net(data) - data) ** 2)
        self.update(self.first, tape, loss, self.net.trainable_variables)
        return {"loss": loss, "seen": self.net.seen.result(), "own": self.net.own.result()}


class BuiltInTrace(Steps):
    """Keras 2 builds a Sequential of no known shape anew in the trace, whose layers then add other losses."""

    def make(self):
        stack = [layers.Dense(3, activity_regularizer="l2"), layers.BatchNormalization(), layers.Dense(5)]
        self.net = tf.keras.Sequential(stack)

    def call(self, inputs, training=None):
        return self.net(inputs, training=training)

    def train_step(self, batch):
        data, _ = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(data, training=True) - data) ** 2) + tf.add_n(self.losses)
        self.update(self.first, tape, loss, self.trainable_variables)
        return {"loss": loss}


class LooksAtNumbers(Steps):
    """Its `call` needs the numbers of tensors, so it can only run eagerly."""

    def make(self):
        self.net = dense(5, 5)

    def call(self, inputs):
        return self.net(inputs) / (1.0 + float(np.mean(inputs.numpy() ** 2)))

    def train_step(self, batch):
        data, _ = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(data) - data) ** 2)
        self.update(self.first, tape, loss, self.trainable_variables)
        return {"loss": loss}


class Slope(layers.Layer):
    """Returns the gradient of a network by its inputs, as forces are; `forward`: by forward accumulation."""

    def __init__(self, forward):
        super().__init__()
        self.net, self.forward = dense(1, 5, norm=True), forward

    def call(self, inputs, training=None):
        if self.forward:
            with tf.autodiff.ForwardAccumulator(inputs, tf.cos(inputs)) as accumulator:
                values = self.net(inputs, training=training)
            return accumulator.jvp(values)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            values = self.net(inputs, training=training)
        return tape.gradient(values, inputs)


class Forces(Steps):
    """Trains on a gradient that a layer takes through batch normalisation."""

    forward = False

    def make(self):
        self.slope = Slope(self.forward)

    def train_step(self, batch):
        data, _ = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.slope(data, training=True) - 0.5 * data) ** 2)
        self.update(self.first, tape, loss, self.slope.net.trainable_variables)
        return {"loss": loss}


class ForwardForces(Forces):
    forward = True


class Directional(Steps):
    """Trains on a derivative in a direction of its inputs, by forward accumulation around the call."""

    of_weight = False

    def make(self):
        self.net = dense(1, 5, norm=True)

    def train_step(self, batch):
        data, _ = batch
        weight = self.net.layers[-1].kernel
        primal = getattr(weight, "value", weight) if IS_KERAS_3 else weight
        primal = primal if self.of_weight else data
        with tf.GradientTape() as tape:
            with tf.autodiff.ForwardAccumulator(
                primal, tf.ones(primal.shape if self.of_weight else tf.shape(data))
            ) as a:
                values = self.net(data, training=True)
            loss = tf.reduce_mean((values - 1.0) ** 2) + tf.reduce_mean(a.jvp(values) ** 2)
        self.update(self.first, tape, loss, self.net.trainable_variables)
        return {"loss": loss}


class DirectionalByWeight(Directional):
    of_weight = True


class Vectorized(Steps):
    def make(self):
        self.net = dense(1, 5)

    def train_step(self, batch):
        data, _ = batch
        with tf.GradientTape() as tape:
            values = tf.vectorized_map(lambda row: self.net(row[tf.newaxis])[0], data)
            loss = tf.reduce_mean((values - 1.0) ** 2)
        self.update(self.first, tape, loss, self.net.trainable_variables)
        return {"loss": loss}


class Decoding(Steps):
    """Looks up, behind batch normalisation, what the step before has chosen, in the same table."""

    network = None

    def make(self):
        self.decoder = (self.network or Decoder)()
        self.decoder(tf.constant(X[:2]))  # so that it has its weights

    def train_step(self, batch):
        data, _ = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.decoder(data, training=True) - data[:, :4]) ** 2)
        self.update(self.first, tape, loss, self.decoder.trainable_variables)
        return {"loss": loss}


class Decoder(layers.Layer):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.out = layers.Embedding(5, 4), layers.BatchNormalization(), layers.Dense(4)

    def call(self, inputs, training=None):
        tokens, total = tf.argmax(inputs, 1), 0.0
        for _ in range(3):
            hidden = self.norm(tf.tanh(self.table(tokens)) + inputs[:, :4], training=training)
            chosen = self.out(hidden)
            tokens, total = tf.argmax(chosen, 1), total + chosen
        return total


class Counted(layers.Layer):
    """Looks up in a table, and compares with the largest of all examples."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = layers.BatchNormalization(), layers.Dense(4)
        numbers = tf.range(3, dtype=tf.int64)
        pairs = tf.lookup.KeyValueTensorInitializer(numbers, 2 * numbers + 1)
        self.numbers = tf.lookup.StaticHashTable(pairs, -1)

    def call(self, inputs, training=None):
        found = tf.cast(self.numbers.lookup(tf.cast(tf.abs(inputs), tf.int64)), tf.float32)
        hidden = tf.concat([found / tf.reduce_max(found), inputs * found], 1)
        return self.norm(tf.tanh(self.out(hidden)), training=training)


class Looking(Decoding):
    network = Counted


class LookingTwice(Steps):
    """Calls a network with a table twice before its gradient."""

    def make(self):
        self.network = Counted()
        self.network(X[:2])

    def train_step(self, batch):
        data, _ = batch
        with tf.GradientTape() as tape:
            outputs = self.network(data, training=True) + self.network(data[:, ::-1], training=True)
            loss = tf.reduce_mean(outputs**2)
        self.update(self.first, tape, loss, self.network.trainable_variables)
        return {"loss": loss}


class GradientNoise(Penalty):
    """A network that adds noise to its gradient, and checks its numbers."""

    draws = True

    def make(self):
        @tf.custom_gradient
        def noisy(values):
            def grad(upstream):
                if not self.draws:
                    return tf.debugging.check_numerics(upstream, "gradient")
                return upstream * (1.0 + tf.random.stateless_uniform(tf.shape(upstream), [1, 2]))

            return tf.debugging.check_numerics(values, "values"), grad

        hidden = [layers.Dense(4), layers.Lambda(noisy), layers.BatchNormalization(), layers.Dense(1)]
        self.critic = tf.keras.Sequential([tf.keras.Input((5,)), *hidden])

    def penalty(self, data):
        return tf.reduce_mean((self.critic(data, training=True) - 1.0) ** 2)


class CheckedGradient(GradientNoise):
    draws = False


class Scheduled(layers.Layer):
    """Moves one variable, a second one by it, and a third one in a conditional before it is set."""

    def __init__(self, in_branch=False):
        super().__init__()
        self.in_branch = in_branch

    def build(self, shape):
        names = ("count", "rate", "kernel")
        shapes = ((), (), (shape[-1], 4))
        self.count, self.rate, self.kernel = (
            self.add_weight(name=name, shape=one, initializer="ones", trainable=name == "kernel")
            for name, one in zip(names, shapes)
        )

    def call(self, inputs):
        count, rate = (tf.convert_to_tensor(one) for one in (self.count, self.rate))
        self.rate.assign(0.5 * rate)
        if self.in_branch:
            assigned = lambda: tf.convert_to_tensor(self.count.assign(3.0))
            tf.cond(count < 9.0, assigned, lambda: tf.convert_to_tensor(self.count))
        self.count.assign(tf.convert_to_tensor(self.count) + 1.0)
        self.rate.assign(tf.convert_to_tensor(self.rate) + 1.0 / (2.0 + tf.convert_to_tensor(self.count) ** 2))
        return tf.tanh(inputs @ tf.convert_to_tensor(self.kernel)) * tf.convert_to_tensor(self.rate)


class Moving(PenaltyBehindAssignment):
    """A network whose variables are assigned to in turn."""

    in_branch = False

    def make(self):
        self.critic = tf.keras.Sequential([tf.keras.Input((5,)), Scheduled(self.in_branch), layers.Dense(1)])


class MovingWithoutPenalty(Moving):
    def penalty(self, data):
        return tf.reduce_mean((self.critic(data, training=True) - 1.0) ** 2)


class MovingInBranch(MovingWithoutPenalty):
    in_branch = True


class NormalizedInLoop(Steps):
    def make(self):
        self.norm = layers.BatchNormalization()

    def call(self, inputs, training=None):
        for _ in tf.range(2):
            inputs = self.norm(inputs, training=training)
        return inputs

    def train_step(self, batch):
        data, _ = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(data, training=True) - 2.0 * data) ** 2)
        self.update(self.first, tape, loss, self.trainable_variables)
        return {"loss": loss}


class WithoutCache(layers.Layer):
    """Returns what it computes and no cache, as blocks of a Transformer do in training."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(5, activation="tanh")

    def build(self, shape):
        self.inner.build(shape)
        super().build(shape)

    def call(self, inputs):
        return None, {"hidden": self.inner(inputs), "cache": None}


class OptionalOutputs(Steps):
    """A train step with own clipping of parts that return None beside tensors."""

    def make(self):
        self.block, self.out = WithoutCache(), dense(5, 5)
        self.block.build((None, 5))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            nothing, outputs = self.block(x)
            assert nothing is None and outputs["cache"] is None
            loss = tf.reduce_mean((self.out(outputs["hidden"]) - y) ** 2)
        grads, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.1)
        self.first.apply_gradients(zip(grads, self.trainable_variables))
        return {"loss": loss}


class Beside(layers.Layer):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(5)

    def call(self, inputs):
        rows, table = inputs
        return tf.matmul(self.dense(rows), table, transpose_b=True)


class Unsplit(Steps):
    """A layer that takes something else than examples beside them."""

    def make(self):
        self.encoder, self.mixed, self.table = dense(5, 5), Beside(), tf.constant(X[:3])
        self.mixed([X, self.table])

    def train_step(self, batch):
        data, _ = batch
        with tf.GradientTape() as tape:
            outputs = self.mixed([self.encoder(data), self.table])
            loss = tf.reduce_mean(outputs**2)
        self.update(self.first, tape, loss, self.encoder.trainable_variables + self.mixed.trainable_variables)
        return {"loss": loss}


class Modes(Steps):
    """A network with two ways, each told by the name of an argument, and with a variable as another argument."""

    def make(self):
        self.net, self.latents = Ways(), tf.Variable(X[:BATCH] ** 2)
        self.net(X, left=X)
        self.net(X, right=X)

    def train_step(self, batch):
        data, _ = batch
        with tf.GradientTape() as tape:
            outputs = self.net(data, left=data) - 2.0 * self.net(data, right=data) + self.net(self.latents, left=data)
            loss = tf.reduce_mean(outputs**2)
        self.update(self.first, tape, loss, self.net.trainable_variables + [self.latents])
        return {"loss": loss}


class Ways(layers.Layer):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(5, activation="tanh")

    def call(self, inputs, left=None, right=None):
        return self.dense(inputs * left) if right is None else self.dense(inputs) + right


class Pairs(Steps):
    """Similarities of all pairs of examples in a layer with a weight, beside an encoder."""

    def make(self):
        self.encoder, self.pairs = dense(5, 5), Similarity()
        self.pairs([X, X])

    def train_step(self, batch):
        data, _ = batch
        with tf.GradientTape() as tape:
            encoded = self.encoder(data)
            loss = tf.reduce_mean(tf.math.reduce_logsumexp(self.pairs([encoded, data]), axis=1))
        self.update(self.first, tape, loss, self.encoder.trainable_variables + self.pairs.trainable_variables)
        return {"loss": loss}


class Similarity(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=(), initializer="ones")

    def call(self, inputs):
        return self.scale * tf.matmul(inputs[0], inputs[1], transpose_b=True)


class Conditional(layers.Layer):
    def __init__(self):
        super().__init__()
        self.embedding, self.dense = layers.Embedding(7, 4), layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs[0] * self.embedding(inputs[1]))


class LateTable(Steps):
    """An embedding that is updated between the call of a network and a gradient through it."""

    def make(self):
        self.generator, self.critic = dense(4, 5), Conditional()
        self.critic([X[:, :4], TOKENS[:, 0]])

    def train_step(self, batch):
        data, _ = batch
        labels = tf.cast(tf.abs(data[:, 0]), tf.int32)
        with tf.GradientTape() as of_generator, tf.GradientTape() as of_critic:
            loss = tf.reduce_mean(self.critic([self.generator(data), labels]) ** 2)
        self.update(self.first, of_critic, loss, self.critic.trainable_variables)
        self.update(self.second, of_generator, loss, self.generator.trainable_variables)
        return {"loss": loss}


class Decided(LateTable):
    """The same, updated by what is decided in the graph, as by a `LossScaleOptimizer`."""

    def update(self, optimizer, tape, loss, variables):
        grads = tape.gradient(loss, variables)
        apply = lambda: optimizer.apply_gradients(zip(grads, variables)) is None
        tf.cond(tf.reduce_sum(tf.abs(grads[0])) >= 0.0, apply, lambda: False)


class Helper(Steps):
    """A part of the step that is a `tf.function`, which evaluation traces first."""

    def make(self):
        self.encoder = dense(4, 5)

    @tf.function
    def loss_of(self, data):
        return tf.reduce_mean(self.encoder(data) ** 2)

    def test_step(self, batch):
        return {"loss": self.loss_of(batch[0])}

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss = self.loss_of(batch[0])
        self.update(self.first, tape, loss, self.encoder.trainable_variables)
        return {"loss": loss}


class Memory(layers.Layer):
    """Computes at most `fits` examples at once: more run out of memory. Notes how many it has computed."""

    fits = 1000
    counts = []

    def call(self, inputs):
        def allocate(count):
            self.counts.append(int(count))
            if count > Memory.fits:
                raise MemoryError("injected")

        with tf.control_dependencies([tf.py_function(allocate, [tf.shape(inputs)[0]], [])]):
            return tf.ensure_shape(tf.identity(inputs), inputs.shape)


@pytest.fixture()
def memory():
    yield Memory
    Memory.fits, Memory.counts = 1000, []


class State:
    """Variables that Keras does not know of."""

    def __init__(self):
        self.before, self.after = (tf.Variable(0.0, trainable=False, name=name) for name in ("before", "after"))


class Sharpness(Steps):
    """Weights are moved for a second gradient, and back. Variables beside the model change before and after that."""

    def make(self):
        self.encoder = dense(4, 5)
        self.late = tf.keras.Sequential([tf.keras.Input((4,)), Memory(), layers.Dense(1)])
        self._beside = (State(),)
        self.steps = tf.Variable(0.0, name="steps")  # Keras takes it for a weight

    def call(self, inputs):
        return self.late(self.encoder(inputs))

    def train_step(self, batch):
        data, _ = batch
        (state,) = self._beside
        state.before.assign_add(1.0)
        weights = self.encoder.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.encoder(data, training=True) ** 2)
        steps = [0.3 * grad for grad in tape.gradient(loss, weights)]
        for weight, step in zip(weights, steps):
            weight.assign_add(step)
        with tf.GradientTape() as tape:
            moved = tf.reduce_mean(self.late(self.encoder(data, training=True), training=True) ** 2)
        grads = tape.gradient(moved, weights + self.late.trainable_variables)
        for weight, step in zip(weights, steps):
            weight.assign_sub(step)
        self.first.apply_gradients(zip(grads, weights + self.late.trainable_variables))
        state.after.assign_add(tf.reduce_sum(weights[0]))
        self.steps.assign_add(1.0)
        return {"loss": loss, "moved": moved}


class SharpnessInFunctions(Sharpness):
    """The same, moved in a conditional and updated in functions of its own."""

    @tf.function
    def move_by(self, steps):
        if tf.reduce_all(tf.math.is_finite(steps[0])):
            for weight, step in zip(self.encoder.trainable_variables, steps):
                weight.assign_add(step)

    @tf.function
    def update_by(self, grads, steps):
        weights = self.encoder.trainable_variables
        for weight, step in zip(weights, steps):
            weight.assign_sub(step)
        self.first.apply_gradients(zip(grads, weights + self.late.trainable_variables))

    def train_step(self, batch):
        data, _ = batch
        weights = self.encoder.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.encoder(data, training=True) ** 2)
        steps = [0.3 * grad for grad in tape.gradient(loss, weights)]
        self.move_by(steps)
        with tf.GradientTape() as tape:
            moved = tf.reduce_mean(self.late(self.encoder(data, training=True), training=True) ** 2)
        grads = tape.gradient(moved, weights + self.late.trainable_variables)
        self.update_by(grads, steps)
        return {"loss": loss, "moved": moved}


class UnequalParts(Sharpness):
    """An update that only the larger one of two replicas has no memory for."""

    def train_step(self, batch):
        data, _ = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(data, training=True) ** 2)
        self.update(self.first, tape, loss, self.encoder.trainable_variables)
        return {"loss": loss}


class SecondUpdate(Sharpness):
    """Memory runs out only after the first update."""

    def train_step(self, batch):
        data, _ = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.encoder(data, training=True) ** 2)
        self.update(self.first, tape, loss, self.encoder.trainable_variables)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.late(self.encoder(data, training=True), training=True) ** 2)
        self.update(self.second, tape, loss, self.late.trainable_variables)
        return {"loss": loss}


STEPS = {Masked: TOKENS, UnequalParts: X[:13]}
MODELS = [Adversarial, BothAtOnce, TwoTasks, AutoEncoder, Masked, AfterUpdate, Momentum, Modes, OptionalOutputs]


def trained(make, epochs=2, run_eagerly=False, evaluates=False, replicas=1, examples=None, **options):
    """Train, and return all variables and logs. Plain Keras computes the same eagerly, and that takes no trace."""
    run_eagerly = run_eagerly or (not options and replicas == 1)
    with mirrored(replicas=replicas).scope() if replicas > 1 else tf.name_scope("one"):
        return trained_here(make, epochs, run_eagerly, evaluates, examples, **options)


plain = functools.lru_cache(maxsize=None)(trained)  # of a train step, for all tests of it


def trained_here(make, epochs, run_eagerly, evaluates, examples, **options):
    tf.random.set_seed(1)
    data = STEPS.get(make, X)[:examples]
    model = make()
    model(data[:2])
    generator = np.random.RandomState(3)
    for var in model.variables:
        if "seed" not in var.name and var.dtype != "int64" and "variance" not in getattr(var, "path", var.name):
            var.assign((0.5 * generator.normal(size=var.shape)).astype("float32"))
    if options:
        model = accum.GradientAccumulateModel.from_model(model, **options)
    model.compile(run_eagerly=run_eagerly, **JIT)
    if evaluates:
        model.evaluate(data, data, batch_size=BATCH, verbose=0)
    logs = model.fit(data, data, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0).history
    values = [var.numpy() for var in model.variables if "seed" not in var.name]
    if hasattr(model, "queue"):
        values.append(model.queue.numpy())
    if hasattr(model, "_beside"):
        values += [model._beside[0].before.numpy(), model._beside[0].after.numpy()]
    return values, logs


def assert_same(values, expected):
    assert_near(values, expected, rtol=2e-5, atol=3e-6)


@pytest.mark.filterwarnings("ignore:With .whole_batch., the Python code")
@pytest.mark.filterwarnings("error::accum.InexactWarning")
@pytest.mark.filterwarnings("error:The layer .* is computed for the whole batch at once")
@pytest.mark.parametrize(
    "make, run_eagerly",
    mainly(
        [(make, False) for make in MODELS] + [(AutoEncoder, True), (TwoTasks, True)],
        *[(make, False) for make in (AutoEncoder, BothAtOnce, Momentum)],
    ),
)
def test_a_step_that_calls_several_networks_is_that_of_the_full_batch(make, run_eagerly):
    expected, logs = plain(make)
    weights, own_logs = trained(make, run_eagerly=run_eagerly, accum_steps=1, micro_batch_size=6, whole_batch="all")
    assert_same(weights, expected)
    assert_same(own_logs.values(), logs.values())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make", mainly([AutoEncoder, Masked, Momentum], AutoEncoder))
def test_the_same_step_on_each_micro_batch_makes_another_one(make):
    expected, _ = plain(make)
    weights, _ = trained(make, accum_steps=1, micro_batch_size=6, whole_batch=())
    assert max(np.abs(own - value).max() for own, value in zip(weights, expected)) > 1e-4


def test_a_function_within_the_step_that_was_traced_before_is_refused_by_name():
    with pytest.raises(ValueError, match="If a `tf.function` within a train step has computed it, remove its"):
        trained(Helper, evaluates=True, accum_steps=1, micro_batch_size=6, whole_batch="all")


def test_a_call_that_fails_when_it_is_being_split_is_not_made_at_once_too(monkeypatch):
    """Its moving statistics have moved by then, and would move again."""

    def fails(*args):
        raise ValueError("while it was linked")

    monkeypatch.setattr("accum._engine._whole_call.with_gradient", fails)
    with pytest.raises(ValueError, match="while it was linked"):
        trained(AutoEncoder, micro_batch_size=6)


@pytest.mark.parametrize("make", [Unsplit, Pairs])
def test_a_layer_that_cannot_be_split_is_named_and_exact(make):
    expected, _ = plain(make)
    with pytest.warns(UserWarning, match="is computed for the whole batch at once"):
        weights, _ = trained(make, accum_steps=1, micro_batch_size=6, whole_batch="all")
    assert_same(weights, expected)


@pytest.mark.parametrize("make", [BehindAssignment, AroundAssignment, BetweenAssignments, MovingWithoutPenalty])
def test_a_network_that_assigns_to_its_weights_is_split_without_a_word(make):
    expected, logs = plain(make)
    with silent():
        weights, own_logs = trained(make, accum_steps=1, micro_batch_size=6)
    assert_same(weights, expected)
    assert_same(own_logs.values(), logs.values())
    with warned("once per micro-batch"):
        others, _ = trained(make, accum_steps=1, micro_batch_size=6, whole_batch=())
    assert max(np.abs(one - other).max() for one, other in zip(others, expected)) > 1e-4


@pytest.mark.parametrize(
    "make",
    [ReadInBranchBehindAssignment]
    + [pytest.param(MovingInBranch, marks=pytest.mark.tf(keras=2, because="Keras 3 can't assign in a branch"))],
)
def test_a_conditional_that_reads_what_was_assigned_before_or_assigns_is_computed_at_once(make):
    expected, _ = plain(make)
    with warned("computed for the whole batch at once") as said:
        assert_same(trained(make, micro_batch_size=6)[0], expected)
    assert len(said) == 1 and "[accum: whole-batch-loop]" in said[0]


PENALTIES = [Penalty, PenaltyOnWeights, PenaltyBehindAssignment, Moving, ConditionalPenalty]
PENALTIES += [PenaltyOfPairs, PenaltyAlong]


@pytest.mark.filterwarnings("ignore:With .whole_batch., the Python code")
@pytest.mark.filterwarnings("error:.* computed for the whole batch at once")
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize(
    "make", PENALTIES + [pytest.param(PenaltyInLoop, marks=pytest.mark.tf("2.8", because="2.2 can't"))]
)
def test_a_second_gradient_is_that_of_the_full_batch(make, run_eagerly):
    expected, logs = plain(make)
    weights, own_logs = trained(make, run_eagerly=run_eagerly, accum_steps=1, micro_batch_size=6)
    assert_same(weights, expected)
    assert_same(own_logs.values(), logs.values())


@pytest.mark.filterwarnings("error:.* computed for the whole batch at once")
@pytest.mark.parametrize("make", [Penalty, PenaltyOnWeights])
def test_a_second_gradient_on_replicas_is_that_of_the_full_batch(make):
    expected, _ = trained(make, replicas=2, run_eagerly=False)
    assert_same(trained(make, replicas=2, accum_steps=1, micro_batch_size=3)[0], expected)


def test_a_second_gradient_draws_for_each_example_what_the_first_did():
    expected, _ = trained(PenaltyWithNoise, micro_batch_size=10)
    assert_same(trained(PenaltyWithNoise, micro_batch_size=6)[0], expected)
    assert max(np.abs(one - other).max() for one, other in zip(expected, plain(Penalty)[0])) > 1e-4


def products_of(make, **options):
    """Return the lengths of the first axis of all matrix products in a traced step of a batch of constant size."""
    model = make()
    model(X[:2])
    model = accum.GradientAccumulateModel.from_model(model, **options)
    model.compile(**JIT)
    step = tf.function(lambda data: model.train_step((data, data)))
    graph_def = step.get_concrete_function(tf.TensorSpec([BATCH, 5])).graph.as_graph_def(add_shapes=True)
    nodes = [*graph_def.node, *(node for function in graph_def.library.function for node in function.node_def)]
    shapes = [node.attr["_output_shapes"].list.shape[0] for node in nodes if node.op == "MatMul"]
    return {shape.dim[0].size for shape in shapes if shape.dim}


@pytest.mark.filterwarnings("ignore:.* computed for the whole batch at once")
def test_a_second_gradient_is_computed_for_each_micro_batch():
    assert BATCH not in products_of(Penalty, micro_batch_size=6)
    assert BATCH in products_of(PenaltyAmongExamples, micro_batch_size=6)


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("make", [PenaltyAmongExamples, PenaltyBesideAddedLoss, PenaltyOfTwoOutputs])
def test_a_second_gradient_where_examples_meet_is_computed_at_once_and_named(make, run_eagerly):
    expected, _ = plain(make)
    with warned("A gradient of a gradient is computed for the whole batch at once"):
        assert_same(trained(make, micro_batch_size=6, run_eagerly=run_eagerly)[0], expected)


@pytest.mark.parametrize(
    "make",
    [
        PenaltyBehindNormalization,
        PenaltyAroundAssignment,
        PenaltyBetweenAssignments,
        PenaltyOnTable,
        pytest.param(PenaltyInLoop, marks=pytest.mark.tf(max="2.2", because="later ones can")),
    ],
)
def test_a_second_gradient_through_what_has_a_gradient_of_its_own_is_refused_by_name(make):
    with pytest.raises(ValueError, match="can't be differentiated again"):
        trained(make, accum_steps=1, micro_batch_size=6)


@pytest.mark.parametrize(
    "make, because",
    [
        (LazyPenalty, "in a branch of `tf.cond`"),
        (ThirdDerivative, "a gradient of a gradient already"),
        (JacobianPenalty, "`tape.jacobian` and `tape.batch_jacobian` take it"),
    ],
)
def test_a_second_gradient_in_a_branch_or_jacobian_and_a_third_one_are_refused_by_name(make, because):
    with pytest.raises((ValueError, RuntimeError), match=f"can't be differentiated again.*{because}"):
        trained(make, accum_steps=1, micro_batch_size=6)


@pytest.mark.tf(keras=2, because="Keras 3 converts no loop over a tensor")
def test_why_a_call_is_computed_at_once_is_said_without_a_traceback():
    expected, _ = plain(NormalizedInLoop)
    with warned("computed for the whole batch at once") as said:
        assert_same(trained(NormalizedInLoop, micro_batch_size=6)[0], expected)
    assert len(said) == 1 and "\n" not in said[0] and "[accum: whole-batch-loop]" in said[0]


def test_what_the_errors_of_second_gradients_advise_is_that_of_the_full_batch():
    expected, _ = plain(ChosenPenalty)
    assert_same(trained(ChosenPenalty, micro_batch_size=6)[0], expected)
    net, generator = dense(1, 5), np.random.RandomState(3)
    net.set_weights([0.5 * generator.normal(size=weight.shape) for weight in net.get_weights()])

    def loss_of(data):
        with tf.GradientTape() as second:
            second.watch(data)
            with tf.GradientTape() as first:
                first.watch(data)
                values = net(data)
            slopes = first.gradient(values, data)
        return tf.reduce_mean((second.gradient(slopes, data) + slopes) ** 2)

    data, kernels = tf.constant(X[:BATCH]), [layer.kernel for layer in net.layers]
    with tf.GradientTape() as tape:
        value = loss_of(data)
    own_value, grads = accum.value_and_gradients(loss_of, (data,), kernels, 6)
    assert_same([own_value, *grads], [value, *tape.gradient(value, kernels)])


@pytest.mark.filterwarnings("error::accum.InexactWarning")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            KeepsMetricInStep, marks=pytest.mark.filterwarnings("error:The layer .* is computed for the whole")
        ),
        BuiltInTrace,  # at once on 2.8 and 2.10, where the shape of its outputs is not known
    ],
)
def test_metrics_and_losses_of_what_is_called_are_those_of_the_whole_batch(make):
    expected, logs = plain(make)
    weights, own_logs = trained(make, micro_batch_size=6)
    assert_same(weights, expected)
    assert_same([own_logs[name] for name in sorted(logs)], [logs[name] for name in sorted(logs)])


def test_a_network_that_needs_numbers_is_computed_at_once():
    expected, logs = plain(LooksAtNumbers)
    with pytest.warns(UserWarning, match="is computed for the whole batch at once"):
        weights, own_logs = trained(LooksAtNumbers, micro_batch_size=6, run_eagerly=True)
    assert_same(weights, expected)
    assert_same(own_logs["loss"], logs["loss"])


def test_a_network_with_a_table_may_be_called_twice():
    expected, logs = plain(LookingTwice)
    weights, own_logs = trained(LookingTwice, micro_batch_size=6, whole_batch="all")
    assert_same(weights, expected)
    assert_same(own_logs["loss"], logs["loss"])


@pytest.mark.tf(keras=2, because="Keras 3 reads the whole table first, and the gradient uses what was read")
@pytest.mark.parametrize("make, run_eagerly", [(LateTable, False), (Decided, False), (LateTable, True)])
def test_an_embedding_that_is_updated_before_a_gradient_through_it_is_refused_by_name(make, run_eagerly):
    with pytest.raises(ValueError, match="before an embedding in it, or a variable .* is updated"):
        trained(make, accum_steps=1, micro_batch_size=6, whole_batch="all", run_eagerly=run_eagerly)


@pytest.mark.law("L11")
@pytest.mark.tf("2.4", because="a weight can't be assigned to on a replica before")
@pytest.mark.filterwarnings("error::accum.InexactWarning")
@pytest.mark.slow
@pytest.mark.parametrize("replicas, size", [(2, 3), (2, "auto"), (4, 3)])
def test_on_several_replicas_several_updates_are_those_of_plain_keras(replicas, size):
    expected, logs = plain(InTurn, replicas=replicas)
    weights, own_logs = trained(InTurn, replicas=replicas, micro_batch_size=size)
    assert_same(weights, expected)
    assert_same(own_logs.values(), logs.values())


@pytest.mark.law("L11")
@pytest.mark.tf("2.4", because="a weight can't be assigned to on a replica before")
@pytest.mark.filterwarnings("error::accum.InexactWarning")
@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("make", [AfterUpdate, TwoTasks])
def test_on_unequal_replicas_a_step_of_ones_own_is_that_of_one_device(make, replicas):
    """One of four replicas gets 2 of the 17 examples of the last batch, and counts as 2.

    The loss of the step is a mean on each replica, and Keras adds up the gradients of replicas.
    """
    expected, _ = plain(lambda: make(rate=0.05 * replicas), examples=37)
    weights, _ = trained(make, replicas=replicas, examples=37, micro_batch_size=3)
    assert_same(weights, expected)
    others, _ = plain(make, replicas=replicas, examples=37)  # there, each replica counts as 1
    assert max(np.abs(own - value).max() for own, value in zip(others, expected)) > 1e-4


@pytest.mark.law("L18")
@pytest.mark.filterwarnings("error::accum.InexactWarning")
@pytest.mark.parametrize("make", mainly([Sharpness, SharpnessInFunctions], SharpnessInFunctions))
def test_a_step_that_runs_out_of_memory_is_made_again_and_all_that_it_had_changed_is_set_back(make, memory):
    """Also weights that move before the update, and variables that nobody has told Keras of."""
    expected, logs = plain(make)
    memory.fits, memory.counts = 10, []
    with pytest.warns(UserWarning, match="Memory ran out, so `micro_batch_size` is 10 from now on"):
        weights, own_logs = trained(make, micro_batch_size="auto")
    assert max(memory.counts) == 20
    assert_same(weights, expected)
    assert_same(own_logs.values(), logs.values())


@pytest.mark.law("L18")
def test_memory_that_runs_out_after_an_update_is_an_error_because_nothing_can_be_set_back(memory):
    memory.fits = 7
    with pytest.raises(RuntimeError, match="Memory ran out while the optimizer made its step, or after it"):
        trained(SecondUpdate, micro_batch_size="auto")


@pytest.mark.law("L18", "L11")
def test_no_replica_updates_while_another_one_lacks_memory(memory):
    expected, logs = trained(UnequalParts, replicas=2, micro_batch_size=3)
    memory.fits = 6  # of 7 and 6
    with pytest.warns(UserWarning, match="Memory ran out, so `micro_batch_size` is 3 from now on"):
        weights, own_logs = trained(UnequalParts, replicas=2, micro_batch_size="auto")
    assert_same(weights, expected)
    assert_same(own_logs.values(), logs.values())


@pytest.mark.law("L18")
@pytest.mark.filterwarnings("ignore:The first step needed")
def test_measuring_memory_changes_nothing_although_the_step_is_begun(memory):
    expected, _ = plain(Sharpness)
    with pytest.warns(UserWarning, match="`micro_batch_size` is 1 from now on"):
        weights, _ = trained(Sharpness, micro_batch_size="auto", memory_limit=1)
    assert_same(weights, expected)


def test_what_a_network_only_does_is_done_for_each_micro_batch(memory):
    """An assertion, a print or a Python function, for which an output waits."""
    trained(Sharpness, epochs=1, micro_batch_size=8)
    assert sorted(memory.counts[-6:]) == [4, 4, 8, 8, 8, 8]
    memory.fits = 7
    with pytest.raises(tf.errors.ResourceExhaustedError):
        trained(Sharpness, epochs=1, micro_batch_size=8)


class SemiSupervised(Steps):
    """Learns from a small batch with labels and a large one without, as in FixMatch."""

    def make(self):
        self.encoder, self.head = dense(4, 5, norm=True), dense(1, 4)

    def train_step(self, batch):
        others, (labelled, labels) = batch
        with tf.GradientTape() as tape:
            outputs = self.head(self.encoder(labelled, training=True), training=True)
            hidden = self.encoder(others, training=True)
            loss = tf.reduce_mean((outputs - labels) ** 2) + 0.1 * tf.math.reduce_std(hidden)
        self.update(self.first, tape, loss, self.encoder.trainable_variables + self.head.trainable_variables)
        return {"loss": loss}


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("is_known", [True, False], ids=["static", "dynamic"])
def test_a_step_may_have_two_batches_of_different_sizes(is_known):
    def batches(arrays, size):
        return tf.data.Dataset.from_tensor_slices(arrays).batch(size, drop_remainder=is_known)

    ended = []
    for options in ({}, {"micro_batch_size": 7}):
        model = SemiSupervised()
        model.encoder.set_weights(
            [np.cos(np.arange(w.size)).reshape(w.shape) ** 2 for w in model.encoder.get_weights()]
        )
        model.head.set_weights([np.sin(np.arange(w.size)).reshape(w.shape) for w in model.head.get_weights()])
        made = accum.GradientAccumulateModel.from_model(model, **options) if options else model
        made.compile(**JIT)
        data = tf.data.Dataset.zip((batches(X, 20), batches((X[:10, ::-1], X[:10, :1]), 5)))
        made.fit(data, shuffle=False, epochs=2, verbose=0)
        ended.append(model.encoder.get_weights() + model.head.get_weights())
    assert_same(*ended)


class Attends(layers.Layer):
    def __init__(self):
        super().__init__()
        self.query, self.value = layers.Dense(4), layers.Dense(4)

    def call(self, inputs, mask):
        scores = tf.matmul(self.query(inputs), inputs, transpose_b=True) - 1e9 * (1.0 - mask)
        return tf.matmul(tf.nn.softmax(scores), self.value(inputs))


def causal_mask(inputs):
    times = tf.shape(inputs)[1]
    return tf.linalg.band_part(tf.ones([times, times]), -1, 0)


class Causal(Steps):
    """Passes a mask [times, times] to a layer, beside a batch of texts."""

    def make(self):
        self.attention = Attends()

    def call(self, inputs):
        return self.attention(inputs, causal_mask(inputs))

    def train_step(self, data):
        inputs, targets = data
        mask = causal_mask(inputs)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.attention(inputs, mask) - targets) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"loss": loss}


@pytest.mark.parametrize("times", [[5, 4], [8, 5]], ids=["shorter than the batch", "as long as the batch"])
def test_a_mask_without_examples_whose_lengths_are_unknown_may_be_passed_beside_them(times):
    """The layer can't be split then, so nothing asks for as many rows of the mask as there are examples."""
    chance = np.random.RandomState(0)
    texts = [chance.normal(size=(8, length, 4)).astype("float32") for length in times]
    shapes = (tf.TensorShape([None, None, 4]),) * 2
    data = tf.data.Dataset.from_generator(
        lambda: ((text, text[:, ::-1]) for text in texts), (tf.float32, tf.float32), shapes
    )
    results = []
    for options in ({}, {"micro_batch_size": 3}):
        model = Causal()
        model(texts[0])
        model.set_weights([np.random.RandomState(1).normal(size=one.shape) for one in model.get_weights()])
        if options:
            model = accum.GradientAccumulateModel.from_model(model, **options)
        model.compile(optimizer=tf.keras.optimizers.SGD(0.1), **JIT)
        model.fit(data, epochs=1, verbose=0)
        results.append(model.get_weights())
    for one, other in zip(*results):
        np.testing.assert_allclose(one, other, atol=2e-6, rtol=0)


@pytest.mark.law("L21")
@pytest.mark.parametrize("make", [Forces, ForwardForces, Directional, DirectionalByWeight, Vectorized, GradientNoise])
def test_a_derivative_that_is_no_gradient_of_the_outputs_is_computed_at_once(make):
    """By the network as it is: what TensorFlow would find in the place of its gradient is none, or another one."""
    expected, logs = plain(make)
    with warned("computed for the whole batch at once") as said:
        weights, own_logs = trained(make, micro_batch_size=6)
    assert len(said) == 1
    assert_same(weights, expected)
    assert_same(own_logs.values(), logs.values())


@pytest.mark.law("L21")
@pytest.mark.parametrize("make", [Decoding, Looking, CheckedGradient])
def test_what_is_looked_up_or_checked_around_batch_normalization_is_that_of_the_full_batch(make):
    expected, logs = plain(make)
    with silent():
        weights, own_logs = trained(make, micro_batch_size=6)
    assert_same(weights, expected)
    assert_same(own_logs.values(), logs.values())


class ByPrototype(layers.Layer):
    """Normalises by mean and variance over the time of the mean example, whose first axis is of unknown length too."""

    def call(self, inputs):
        mean, variance = tf.nn.moments(tf.reduce_mean(inputs, axis=0), [0])
        return (inputs - mean) * tf.math.rsqrt(variance + 1e-3)


class Next(layers.Layer):
    """Adds the next number of a dataset to all examples."""

    def __init__(self):
        super().__init__()
        self.numbers = iter(tf.data.Dataset.range(1, 100))

    def call(self, inputs):
        return inputs + tf.cast(next(self.numbers), tf.float32)


class NextInBranch(Next):
    """The same in a conditional."""

    def call(self, inputs):
        adding = lambda: inputs + tf.cast(next(self.numbers), tf.float32)
        return tf.cond(self.numbers_are_taken > 0.5, adding, lambda: inputs)

    def build(self, shape):
        self.numbers_are_taken = tf.Variable(1.0, trainable=False)


class Candidates(layers.Layer):
    """Adds classes that are drawn for all examples together, as for a sampled softmax."""

    def call(self, inputs):
        true = tf.zeros([1, 1], tf.int64)
        drawn = tf.random.uniform_candidate_sampler(true, 1, 3, True, 50, seed=1)[0]
        return inputs + tf.reduce_mean(tf.cast(drawn, tf.float32)) / 10.0


@pytest.mark.parametrize("make", [ByPrototype, Next, NextInBranch, Candidates])
def test_what_only_looks_like_a_part_of_the_batch_is_computed_at_once(make):
    texts = RANDOM.normal(size=(BATCH, 6, 4)).astype("float32")
    shapes = tf.TensorShape([None, None, 4]), tf.TensorShape([None, 1])
    example = lambda: iter([(texts, X[:BATCH, :1])] * 2)
    results = []
    for options in ({}, {"micro_batch_size": 6}, {"micro_batch_size": 6, "whole_batch": ()}):
        inputs = tf.keras.Input((None, 4))
        hidden = layers.GlobalAveragePooling1D()(make()(inputs))
        model = tf.keras.Model(inputs, layers.Dense(1, kernel_initializer="ones")(hidden))
        model = accum.GradientAccumulateModel.from_model(model, **options) if options else model
        model.compile(optimizer=tf.keras.optimizers.SGD(0.1), loss="mse", **JIT)
        with warned("") as said:
            model.fit(tf.data.Dataset.from_generator(example, (tf.float32, tf.float32), shapes), verbose=0)
        results.append(model.get_weights())
        assert options != {"micro_batch_size": 6} or any("for the whole batch at once" in one for one in said)
    assert_same(results[1], results[0])
    assert max(np.abs(one - other).max() for one, other in zip(results[2], results[0])) > 1e-3


class OverExamples(tf.keras.Model):
    """The last operation is over the examples; another output is what it takes, and no loss takes that."""

    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(4), layers.Dense(3)

    def call(self, inputs):
        hidden = self.last(tf.tanh(self.first(inputs)))
        return {"shares": tf.nn.softmax(hidden, axis=0), "rows": hidden}


class Certain(tf.keras.Model):
    """Ends with a softmax of large logits, which Keras' crossentropy takes in its place."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = layers.Dense(4), layers.BatchNormalization(), layers.Dense(3)

    def call(self, inputs, training=None):
        return tf.nn.softmax(40.0 * self.last(self.norm(self.first(inputs), training=training)))


KINDS = np.eye(3, dtype="float32")[RANDOM.randint(0, 3, size=BATCH)]
ENDS = {
    "over examples": (OverExamples, {"shares": "mse", "rows": None}, {"shares": KINDS}),
    "certain": (Certain, "categorical_crossentropy", KINDS),
}


@pytest.mark.parametrize("end", sorted(ENDS))
def test_what_a_loss_takes_of_the_last_operation_is_that_of_the_full_batch(end):
    make, loss, targets = ENDS[end]
    if end == "over examples" and IS_KERAS_3:
        targets = {"shares": KINDS, "rows": KINDS}  # which it wants for each output
    results = []
    for options in ({}, {"micro_batch_size": 6}):
        model = make()
        model(X[:2])
        model.set_weights([np.random.RandomState(1).normal(size=one.shape) for one in model.get_weights()])
        first = model.get_weights()
        model = accum.GradientAccumulateModel.from_model(model, **options) if options else model
        model.compile(optimizer=tf.keras.optimizers.SGD(0.05), loss=loss, **JIT)
        with silent():
            logs = model.fit(X[:BATCH], targets, batch_size=BATCH, shuffle=False, verbose=0).history["loss"]
        results.append([*model.get_weights(), *logs])
    for one, other in zip(*results):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=5e-6)
    moved = [np.abs(one - other).max() for one, other in zip(first, results[0])]
    assert max(moved) > 1e-4


class TargetsOrPairs(tf.keras.Model):
    """Takes targets in some batches, and pairs of the inputs in others."""

    def __init__(self):
        super().__init__()
        self.encoder, self.norm = layers.Dense(3), layers.BatchNormalization()

    def call(self, x, target=None, pairs=None, training=False):
        hidden = self.norm(self.encoder(x), training=training)
        return (hidden - target) ** 2 if target is not None else 0.1 * hidden * self.encoder(pairs)

    def train_step(self, data):
        data = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(data["x"], data.get("target"), data.get("pairs"), training=True))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}


@pytest.mark.parametrize("run_eagerly", [False, True], ids=["", "eager"])
def test_arguments_that_are_none_in_turn_are_told_apart(run_eagerly):
    ends = []
    for size in (None, 6):
        model = TargetsOrPairs()
        model(X[:2, :3], X[:2, :3])
        model.set_weights([np.random.RandomState(2).uniform(size=one.shape) for one in model.get_weights()])
        model = model if size is None else accum.GradientAccumulateModel.from_model(model, micro_batch_size=size)
        is_eager = run_eagerly or size is None  # traced by TensorFlow 2.21, plain Keras logs another loss now and then
        model.compile(tf.keras.optimizers.SGD(0.1), "mse", run_eagerly=is_eager, **JIT)
        batches = [{"x": X[:BATCH, :3], name: X[BATCH:, :3]} for name in ("target", "pairs", "target")]
        logs = [model.train_on_batch(batch, return_dict=True)["loss"] for batch in batches]
        ends.append([np.array(logs, "float32"), *model.get_weights()])
    assert_near(*ends, rtol=2e-5, atol=3e-6)


class Disturbed(tf.keras.Model):
    """Trains its head on features that are disturbed along the gradient of the loss by them."""

    def __init__(self, has_two_calls, is_apart=False):
        super().__init__()
        inputs = tf.keras.Input((5,))
        hidden = layers.Dense(4, activation="tanh")(inputs)
        self.encoder, self.head = tf.keras.Model(inputs, hidden), layers.Dense(1)
        outputs = self.head(layers.Dense(4)(inputs) if is_apart else hidden)
        self.both = tf.keras.Model(inputs, [hidden, outputs])
        self.has_two_calls = has_two_calls

    def call(self, inputs):
        return self.both(inputs)[1]

    def of_both(self, x):
        if not self.has_two_calls:
            return self.both(x)
        hidden = self.encoder(x)
        return hidden, self.head(hidden)

    def train_step(self, data):
        (x,) = data if isinstance(data, tuple) else (data,)
        with tf.GradientTape(persistent=True) as tape:
            hidden, outputs = self.of_both(x)
            loss = tf.reduce_mean(outputs**2) + 0.1 * tf.reduce_mean(hidden**2)
        by_hidden = tape.gradient(loss, hidden)
        weights = self.head.trainable_variables
        with tf.GradientTape() as tape:
            disturbed = tf.reduce_mean((self.head(tf.stop_gradient(hidden + 5.0 * by_hidden)) - 1.0) ** 2)
        self.optimizer.apply_gradients(zip(tape.gradient(disturbed, weights), weights))
        return {"loss": loss, "norm": tf.norm(by_hidden)}


@pytest.mark.parametrize("run_eagerly", [False, True], ids=["", "eager"])
@pytest.mark.parametrize(
    "has_two_calls, is_apart", [(False, False), (True, False), (False, True)], ids=["one-call", "two-calls", "apart"]
)
def test_a_gradient_by_an_output_from_which_others_are_computed_is_refused_by_name(
    has_two_calls, is_apart, run_eagerly
):
    ends = []
    for size in (None, 6):
        model = Disturbed(has_two_calls, is_apart)
        model.set_weights([np.random.RandomState(2).uniform(size=one.shape) for one in model.get_weights()])
        model = model if size is None else accum.GradientAccumulateModel.from_model(model, micro_batch_size=size)
        model.compile(tf.keras.optimizers.SGD(0.1), run_eagerly=run_eagerly, **JIT)
        if size is not None and not (has_two_calls or is_apart):
            with pytest.raises(ValueError, match=r"lack the way through other outputs or losses.*two calls"):
                model.fit(X, batch_size=BATCH, shuffle=False, verbose=0)
            return
        logs = model.fit(X, batch_size=BATCH, shuffle=False, verbose=0).history
        ends.append([*map(np.array, logs.values()), *model.get_weights()])
    assert_near(*ends, rtol=2e-5, atol=3e-6)


class Returning(layers.Layer):
    """Returns what a function makes of its activations."""

    def __init__(self, function):
        super().__init__()
        self.function, self.dense = function, layers.Dense(4, activation="tanh")

    def build(self, shape):
        self.dense.build(shape)
        super().build(shape)

    def call(self, inputs):
        return self.function(self, self.dense(inputs))


def with_added_loss(layer, hidden):
    layer.add_loss(0.3 * tf.reduce_mean(tf.abs(hidden)))
    return hidden


RETURNED = {  # {name: (function of a layer and its activations, whether the gradient by the first output is complete)}
    "halves": (lambda layer, hidden: tuple(tf.split(hidden, 2, axis=1)), True),
    "ids": (lambda layer, hidden: (hidden, tf.argmax(hidden, -1)), True),
    "no gradient": (lambda layer, hidden: (hidden, tf.stop_gradient(hidden)), True),
    "shape": (lambda layer, hidden: (hidden, tf.zeros_like(hidden)), True),
    "twice": (lambda layer, hidden: (hidden, hidden), False),
    "square": (lambda layer, hidden: (hidden, hidden**2), False),
    "added loss": (with_added_loss, False),
}


class ByFirstOutput(tf.keras.Model):
    def __init__(self, function, has_tape=True):
        super().__init__()
        self.encoder, self.scale, self.has_tape = Returning(function), tf.Variable(1.0), has_tape

    def call(self, inputs):
        return self.encoder(inputs)

    def train_step(self, data):
        (x,) = data if isinstance(data, tuple) else (data,)
        with tf.GradientTape() as tape:
            outputs = tf.nest.flatten(self.encoder(x))
            added = tf.add_n(list(self.encoder.losses) or [0.0])
            loss = tf.add_n([tf.reduce_mean(tf.cast(one, tf.float32) ** 2) for one in outputs]) + added
        grad = tape.gradient(loss, outputs[0]) if self.has_tape else tf.gradients(loss, outputs[0])[0]
        self.scale.assign(tf.norm(grad))
        return {"norm": tf.norm(grad)}


@pytest.mark.parametrize("has_tape", [True, False], ids=["tape", "gradients"])
@pytest.mark.parametrize("name", sorted(RETURNED))
def test_only_a_gradient_by_an_output_that_lacks_something_is_refused(name, has_tape):
    function, is_complete = RETURNED[name]
    logs = []
    for size in (None, 6):
        model = ByFirstOutput(function, has_tape)
        model(X[:2])
        model.encoder.set_weights(
            [np.random.RandomState(2).normal(size=one.shape) for one in model.encoder.get_weights()]
        )
        model = model if size is None else accum.GradientAccumulateModel.from_model(model, micro_batch_size=size)
        model.compile(tf.keras.optimizers.SGD(0.1), **JIT)
        if size is not None and not is_complete:
            with pytest.raises(ValueError, match="lack the way through other outputs or losses"):
                model.fit(X, batch_size=BATCH, shuffle=False, verbose=0)
            return
        logs.append(model.fit(X, batch_size=BATCH, shuffle=False, verbose=0).history["norm"])
    np.testing.assert_allclose(*logs, rtol=1e-5)
