"""Batch normalisation of Keras that trains on micro-batches is named, with what is exact; where it rests, it is not."""

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_near
from models import from_model, step_by_mean_square
from versions import IS_KERAS_3
from warned import warned

import accum

pytestmark = pytest.mark.tf("2.2")

X, Y = np.sin(np.arange(48.0, dtype="float32")).reshape(16, 3), np.ones((16, 1), "float32")
layers = tf.keras.layers


def slow(parameter):
    return pytest.param(parameter, marks=pytest.mark.slow)


def functional(norm=None):
    return tf.keras.Sequential([tf.keras.Input((3,)), norm or layers.BatchNormalization(), layers.Dense(1)])


def sgd():
    return tf.keras.optimizers.SGD(0.01)


def said_in_fit(model, optimizer=None, **options):
    """What a user is told of batch normalisation in two runs of `fit`."""
    with warned("Batch normalization", accum.InexactWarning) as said:
        model.compile(optimizer or sgd(), "mse", **options)
        for _ in range(2):
            model.fit(X, Y, batch_size=4, verbose=0)
    return said


def ours(accum_steps=2):
    return accum.GradientAccumulateOptimizer(sgd(), accum_steps)


@pytest.mark.law("L13")
@pytest.mark.parametrize("run_eagerly", [False, True], ids=["traced", "eager"])
@pytest.mark.parametrize(
    "options",
    [{"accum_steps": 2}, slow({"accum_steps": {0: 1, 2: 2}}), {"micro_batch_size": 2, "whole_batch": ()}],
    ids=str,
)
def test_a_model_names_it_once_with_what_is_exact(options, run_eagerly):
    (line,) = said_in_fit(from_model(functional(), **options), run_eagerly=run_eagerly)
    assert "whole_batch='batch_norm'" in line and "batch_normalization" in line.split("Received: ")[1]
    assert ("`micro_batch_size`" in line) == ("accum_steps" in options)


@pytest.mark.law("L13")
def test_where_batches_are_split_by_tokens_the_remedy_is_to_split_them_by_examples():
    inputs = tf.keras.Input((None,), dtype="int32")
    hidden = layers.GlobalAveragePooling1D()(layers.Embedding(5, 2, mask_zero=True)(inputs))
    plain = tf.keras.Model(inputs, layers.Dense(1)(layers.BatchNormalization()(hidden)))
    model = from_model(plain, micro_batch_tokens=8)
    model.compile(sgd(), "mse", run_eagerly=True)
    with pytest.warns(accum.InexactWarning, match="`micro_batch_size` and .* in place of `micro_batch_tokens`"):
        model.fit(np.arange(32).reshape(8, 4) % 4 + 1, Y[:8], batch_size=8, verbose=0)


@pytest.mark.slow
@pytest.mark.law("L13")
@pytest.mark.parametrize("is_loop", [False, True], ids=["plain", "in a function"])
def test_an_optimizer_in_a_plain_model_or_loop_names_it_once(is_loop):
    model = functional()
    if not is_loop:
        (line,) = said_in_fit(model, ours())
    else:
        optimizer = ours()
        step = tf.function(lambda x, y: step_by_mean_square(model, optimizer, x, y))
        with pytest.warns(accum.InexactWarning) as caught:
            for _ in range(3):
                step(X[:4], Y[:4])
        (line,) = [str(one.message) for one in caught if issubclass(one.category, accum.InexactWarning)]
    assert "whole_batch='batch_norm'" in line and "moving_mean" in line.split("Received: ")[1]


def frozen():
    model = functional()
    model.layers[0].trainable = False
    return model


class Untrained(tf.keras.Model):
    """Its batch normalisation never trains."""

    def __init__(self):
        super().__init__()
        self.norm, self.dense = layers.BatchNormalization(), layers.Dense(1)

    def call(self, inputs):
        return self.dense(self.norm(inputs, training=False))


class WithoutTraining(Untrained):
    """Nor does this one in Keras 3, which passes `training` on only through a `call` that takes it."""

    def call(self, inputs):
        return self.dense(self.norm(inputs))


WAYS = {
    "a cycle": (lambda model: from_model(model, 2), None),
    "micro-batches": (lambda model: from_model(model, micro_batch_size=2), None),
    "a loss of the whole batch": (lambda model: from_model(model, micro_batch_size=2, whole_batch="loss"), None),
    "an optimizer": (lambda model: model, ours),
}


@pytest.mark.law("L13")
@pytest.mark.parametrize("run_eagerly", [True, slow(False)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [frozen, Untrained] + [WithoutTraining] * IS_KERAS_3)
def test_what_rests_is_not_named(make, way, run_eagerly):
    wrap, optimizer = WAYS[way]
    run_eagerly = run_eagerly and optimizer is None  # an optimizer sees batch normalisation in traces alone
    model = make()
    if way == "a loss of the whole batch":
        model(X[:1])
    assert said_in_fit(wrap(model), optimizer and optimizer(), run_eagerly=run_eagerly) == []


@pytest.mark.slow
@pytest.mark.law("L13")
@pytest.mark.parametrize("run_eagerly", [False, True], ids=["traced", "eager"])
def test_on_two_replicas_it_is_named_once(run_eagerly):
    with tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
        (line,) = said_in_fit(from_model(functional(), 2), run_eagerly=run_eagerly)
    assert "batch_normalization" in line.split("Received: ")[1]


@pytest.mark.slow
@pytest.mark.law("L13")
def test_what_follows_the_cycle_and_what_makes_a_step_of_each_batch_are_not_named():
    assert said_in_fit(from_model(functional(accum.AccumBatchNormalization()), 2), run_eagerly=True) == []
    assert said_in_fit(functional(accum.AccumBatchNormalization(accum_steps=2)), ours()) == []
    assert said_in_fit(from_model(functional(), 1), run_eagerly=True) == []
    assert said_in_fit(functional(), ours(1)) == []


# ----------------------------------------------------------------------------------------------------------------
# GANs, whose train step calls networks of the model, and not the model itself


class Gan(tf.keras.Model):
    def __init__(self, critic_steps, gradients):
        super().__init__()
        self.critic_steps, self.gradients_of = critic_steps, gradients
        self.generator = tf.keras.Sequential(
            [tf.keras.Input((3,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(3)]
        )
        self.critic = tf.keras.Sequential([tf.keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(1)])
        for network in (self.generator, self.critic):
            network.set_weights([np.cos(np.arange(w.size)).reshape(w.shape) ** 2 for w in network.get_weights()])

    def compile(self, g_optimizer, c_optimizer):
        super().compile()
        self.g_optimizer, self.c_optimizer = g_optimizer, c_optimizer

    def train_step(self, real):
        for _ in range(self.critic_steps):
            weights = self.critic.trainable_variables
            loss, gradients = self.gradients_of(self.critic_loss, (real,), weights)
            self.c_optimizer.apply_gradients(zip(gradients, weights))
        weights = self.generator.trainable_variables
        g_loss, gradients = self.gradients_of(self.generator_loss, (real,), weights)
        self.g_optimizer.apply_gradients(zip(gradients, weights))
        return {"c_loss": loss, "g_loss": g_loss}

    def fake(self, real):
        return self.generator(tf.sin(9.0 * real), training=True)

    def critic_loss(self, real):
        return tf.reduce_mean(self.critic(self.fake(real))) - tf.reduce_mean(self.critic(real))

    def generator_loss(self, real):
        return -tf.reduce_mean(self.critic(self.fake(real)))


def by_tape(loss, data, weights):
    with tf.GradientTape() as tape:
        value = loss(*data)
    return value, tape.gradient(value, weights)


def in_micro_batches(loss, data, weights):
    return accum.value_and_gradients(loss, data, weights, 4, whole_batch="batch_norm")


def trained(gan):
    gan.compile(sgd(), sgd())
    gan.fit(tf.data.Dataset.from_tensor_slices(X).batch(8), verbose=0, epochs=2)
    return gan.generator.get_weights() + gan.critic.get_weights()


@pytest.mark.slow
@pytest.mark.law("L17")
def test_an_error_about_a_gan_names_its_class_and_what_is_exact():
    with pytest.raises(ValueError, match=r"(?s)`Gan.train_step`.*pass `micro_batch_size` alone"):
        trained(from_model(Gan(3, by_tape), micro_batch_size=4, whole_batch=()))


@pytest.mark.slow
@pytest.mark.law("L17")
def test_the_warning_about_a_gan_names_what_is_exact():
    with pytest.warns(accum.InexactWarning, match="pass `whole_batch='batch_norm'`"):
        trained(from_model(Gan(1, by_tape), micro_batch_size=4, whole_batch=()))


@pytest.mark.law("L19")
@pytest.mark.slow
@pytest.mark.parametrize("critic_steps", [1, 3], ids=["GAN", "WGAN"])
def test_what_is_named_is_the_full_batch(critic_steps):
    plain = trained(Gan(critic_steps, by_tape))
    split = from_model(Gan(critic_steps, by_tape), micro_batch_size=4)
    for own in trained(Gan(critic_steps, in_micro_batches)), trained(split):
        assert_near(own, plain, atol=2e-5)
    start = Gan(critic_steps, by_tape)
    moved = [np.abs(a - b).max() for a, b in zip(plain, start.generator.get_weights() + start.critic.get_weights())]
    assert max(moved) > 1e-2


class TrainedAndUsed(tf.keras.layers.Layer):
    """Normalises by the batch and by the averages that this has moved, or reads these itself."""

    def __init__(self, reads):
        super().__init__()
        self.reads = reads
        self.dense = tf.keras.layers.Dense(3, kernel_initializer=tf.keras.initializers.Constant(0.3))
        self.norm = tf.keras.layers.BatchNormalization()

    def call(self, inputs):
        hidden = self.dense(inputs)
        outputs = self.norm(hidden, training=True)
        return outputs + (self.norm.moving_mean if self.reads else self.norm(hidden, training=False))


@pytest.mark.law("L19")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("reads", [False, True], ids=["calls", "reads"])
def test_averages_that_a_call_moves_are_those_that_it_finds(reads):
    generator = np.random.RandomState(0)
    x, y = generator.normal(size=[14, 4]).astype("float32"), generator.normal(size=[14, 3]).astype("float32")

    def fitted(model_class, **options):
        inputs = tf.keras.Input([4])
        model = model_class(inputs=inputs, outputs=TrainedAndUsed(reads)(inputs), **options)
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
        model.fit(x, y, batch_size=7, epochs=2, verbose=0, shuffle=False)
        return model.get_weights()

    plain = fitted(tf.keras.Model)
    with pytest.warns(UserWarning, match="reads moving statistics that the same call moves"):
        ours = fitted(accum.GradientAccumulateModel, micro_batch_size=5)
    for one, other in zip(ours, plain):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)
