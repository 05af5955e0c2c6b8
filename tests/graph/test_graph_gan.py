"""Two networks with a loss and an `AccumOptimizer` each in one graph, written as pix2pix is (laws L2, L11, L15)."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_identical, assert_near

import accum.compat.v1

pytestmark = pytest.mark.slow

tf1 = tf.compat.v1


K, STEPS, ROWS, WIDTH = 3, 3, 6, 4
RANDOM = np.random.RandomState(0)
FULL = [tuple(RANDOM.normal(size=(2, ROWS, WIDTH)).astype("float32")) for _ in range(STEPS)]
PARTS = [slice(0, 1), slice(1, 3), slice(3, 6)]  # of unequal size
MICRO = [tuple(array[part] for array in batch) for batch in FULL for part in PARTS]
KINDS = pytest.mark.parametrize("use_resource", [False, True], ids=["ref", "resource"])


class Pix2pix:
    """A generator, a discriminator that sees pairs, and their losses, which share the pass through the generator."""

    def __init__(self, use_resource=True):
        self.inputs, self.targets = (tf1.placeholder(tf.float32, [None, WIDTH]) for _ in range(2))
        self._use_resource = use_resource
        with tf1.variable_scope("generator"):
            self.outputs = tf.tanh(self._dense(self.inputs, WIDTH))
        real, fake = self.judged(self.targets), self.judged(self.outputs)
        self.d_loss = tf.reduce_mean(tf.nn.softplus(-real) + tf.nn.softplus(fake))
        self.g_loss = self.loss_of_generator(fake)
        self.step = tf1.train.get_or_create_global_step()

    def judged(self, images):
        with tf1.variable_scope("discriminator", reuse=tf1.AUTO_REUSE):
            return self._dense(tf.concat([self.inputs, images], 1), 1)

    def loss_of_generator(self, fake):
        return tf.reduce_mean(tf.nn.softplus(-fake)) + tf.reduce_mean(tf.abs(self.targets - self.outputs))

    def _dense(self, x, units):
        first = np.random.RandomState(units).normal(size=(int(x.shape[1]), units)).astype("float32")
        return tf.matmul(x, tf1.get_variable("kernel", initializer=first, use_resource=self._use_resource))

    @property
    def size(self):
        return tf.shape(self.inputs)[0]

    def variables_of(self, network):
        return tf1.get_collection(tf1.GraphKeys.TRAINABLE_VARIABLES, network)

    def train(self, train_ops, batches, restore=None, save=None):
        """Run each of `train_ops` on each of `batches` in turn. Returns the weights and the step."""
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            saver = tf1.train.Saver()
            if restore:
                saver.restore(session, restore)
            for batch in batches:
                session.run(train_ops, dict(zip((self.inputs, self.targets), batch)))
            if save:
                saver.save(session, save)
            return session.run([*tf1.trainable_variables(), self.step])


def adam():
    return tf1.train.AdamOptimizer(0.01, beta1=0.5, epsilon=1e-3)


def accumulating(name):
    return accum.compat.v1.AccumOptimizer(adam(), K, name=name)


def simultaneous(model, d_optimizer, g_optimizer, **weight):
    """Create the train op of both networks, whose gradients are computed before either network moves."""
    d_pairs = d_optimizer.compute_gradients(model.d_loss, model.variables_of("discriminator"))
    g_pairs = g_optimizer.compute_gradients(model.g_loss, model.variables_of("generator"))
    with tf.control_dependencies([grad for grad, _ in d_pairs + g_pairs]):
        d_train = d_optimizer.apply_gradients(d_pairs, **weight)
        return tf.group(d_train, g_optimizer.apply_gradients(g_pairs, model.step, **weight))


def plain(use_resource):
    with tf.Graph().as_default():
        model = Pix2pix(use_resource)
        return model.train(simultaneous(model, adam(), adam()), FULL)


@pytest.mark.law("L2")
@KINDS
def test_both_networks_make_the_steps_of_the_full_batch(use_resource):
    with tf.Graph().as_default():
        model = Pix2pix(use_resource)
        train_op = simultaneous(model, accumulating("d"), accumulating("g"), weight=model.size)
        assert_near(model.train(train_op, MICRO), plain(use_resource))


@pytest.mark.law("L11")
def test_both_cycles_continue_from_a_checkpoint_with_the_same_bits(tmp_path):
    def train(batches, **options):
        with tf.Graph().as_default():
            model = Pix2pix()
            train_op = simultaneous(model, accumulating("d"), accumulating("g"), weight=model.size)
            return model.train(train_op, batches, **options)

    path = str(tmp_path / "run")
    train(MICRO[: K + 2], save=path)
    assert_identical(train(MICRO[K + 2 :], restore=path), train(MICRO))


def alternating(model, wrap):
    """Create the train op of the discriminator, and one of the generator that is judged by the new discriminator."""
    d_optimizer, g_optimizer = wrap("d"), wrap("g")
    weight = {} if isinstance(d_optimizer, tf1.train.AdamOptimizer) else {"weight": model.size}
    d_pairs = d_optimizer.compute_gradients(model.d_loss, model.variables_of("discriminator"))
    d_train = d_optimizer.apply_gradients(d_pairs, **weight)
    with tf.control_dependencies([d_train]):
        loss = model.loss_of_generator(model.judged(model.outputs))
        g_pairs = g_optimizer.compute_gradients(loss, model.variables_of("generator"))
    return d_train, g_optimizer.apply_gradients(g_pairs, model.step, **weight)


@pytest.mark.law("L2")
def test_alternating_networks_need_a_cycle_each_and_one_run_for_both_is_named():
    """In one run per micro-batch, only the last one of a cycle would be judged by the new discriminator."""

    def full_batch():
        with tf.Graph().as_default():
            model = Pix2pix()
            return model.train(alternating(model, lambda name: adam()), FULL)

    def a_cycle_each():
        with tf.Graph().as_default():
            model = Pix2pix()
            d_train = accumulating("d").minimize(
                model.d_loss, None, model.variables_of("discriminator"), weight=model.size
            )
            g_train = accumulating("g").minimize(
                model.g_loss, model.step, model.variables_of("generator"), weight=model.size
            )
            with tf1.Session() as session:
                session.run(tf1.global_variables_initializer())
                for start in range(0, len(MICRO), K):
                    for train_op in (d_train, g_train):
                        for batch in MICRO[start : start + K]:
                            session.run(train_op, dict(zip((model.inputs, model.targets), batch)))
                return session.run([*tf1.trainable_variables(), model.step])

    with tf.Graph().as_default():
        model = Pix2pix()
        with pytest.warns(UserWarning, match="wait for the train op of another `AccumOptimizer`.*\\['d'\\]"):
            train_ops = alternating(model, accumulating)
        in_one_run = model.train(train_ops, MICRO)
    expected = full_batch()
    assert_near(a_cycle_each(), expected)
    assert max(np.abs(one - other).max() for one, other in zip(in_one_run, expected)) > 1e-4


def normalised(x, units):
    first = np.random.RandomState(units).normal(size=(int(x.shape[1]), units)).astype("float32")
    hidden = tf.matmul(x, tf1.get_variable("kernel", initializer=first))
    mean, variance = tf.nn.moments(hidden, [0])
    return tf.nn.batch_normalization(hidden, mean, variance, None, None, 1e-3)


def of_layers_that_are_shared(inputs, targets):
    """Return outputs and judgements of networks whose batch normalisation both losses see."""

    def judged(images):
        with tf1.variable_scope("discriminator", reuse=tf1.AUTO_REUSE):
            return tf.reduce_sum(tf.nn.relu(normalised(tf.concat([inputs, images], 1), 3)), 1)

    with tf1.variable_scope("generator", reuse=tf1.AUTO_REUSE):
        outputs = tf.tanh(normalised(inputs, WIDTH))
    return outputs, judged(targets), judged(outputs)


def d_loss(networks, inputs, targets):
    _, real, fake = networks
    return tf.reduce_mean(tf.nn.softplus(-real) + tf.nn.softplus(fake))


def g_loss(networks, inputs, targets):
    outputs, _, fake = networks
    return tf.reduce_mean(tf.nn.softplus(-fake)) + tf.reduce_mean(tf.abs(targets - outputs))


def trained_together(pairs_of):
    """Train both networks, whose gradients `pairs_of(loss, *batch)` computes before either network moves."""
    with tf.Graph().as_default(), tf1.Session() as session:
        batch = [tf1.placeholder(tf.float32, [None, WIDTH]) for _ in range(2)]
        losses = {"discriminator": d_loss, "generator": g_loss}
        pairs = {name: pairs_of(loss, *batch) for name, loss in losses.items()}
        own = {name: [(grad, var) for grad, var in pairs[name] if var.op.name.startswith(name)] for name in losses}
        with tf.control_dependencies([grad for name in losses for grad, _ in own[name]]):
            train_op = tf.group(*(adam().apply_gradients(own[name]) for name in losses))
        session.run(tf1.global_variables_initializer())
        for values in FULL:
            session.run(train_op, dict(zip(batch, values)))
        return session.run(tf1.trainable_variables())


@pytest.mark.law("L19")
def test_two_losses_over_shared_batch_normalisation_take_a_call_each():
    def whole(loss, *batch):
        return adam().compute_gradients(loss(of_layers_that_are_shared(*batch), *batch))

    def split(whole_batch, loss, *batch):
        return accum.compat.v1.value_and_gradients(
            of_layers_that_are_shared, batch, micro_batch_size=4, whole_batch=whole_batch, loss=loss
        )[1]

    def by_function(whole_batch, loss, *batch):
        function = lambda *batch: loss(of_layers_that_are_shared(*batch), *batch)
        return accum.compat.v1.value_and_gradients(function, batch, micro_batch_size=4, whole_batch=whole_batch)[1]

    expected = trained_together(whole)
    for whole_batch in ("all", "loss"):
        assert_near(trained_together(functools.partial(split, whole_batch)), expected)
    assert_near(trained_together(functools.partial(by_function, None)), expected)
    without = trained_together(functools.partial(by_function, ()))
    assert max(np.abs(one - other).max() for one, other in zip(without, expected)) > 1e-3
