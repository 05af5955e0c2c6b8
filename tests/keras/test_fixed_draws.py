"""Random numbers for a fixed number of examples can't be combined with a part of a batch: that is named (law L20)."""

import numpy as np
import pytest
import tensorflow as tf
from versions import IS_KERAS_3

import accum

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.law("L20"), pytest.mark.slow]

BATCH = 8
IMAGES = np.random.RandomState(0).rand(16, 4, 4, 3).astype("float32")
NOT_COMPILED = {"jit_compile": False} if IS_KERAS_3 else {}
NAMED = "random numbers for a fixed number of examples"
layers = tf.keras.layers


def normal(shape):
    """As a program of the installed Keras draws."""
    return tf.keras.random.normal(shape, seed=1) if IS_KERAS_3 else tf.random.normal(shape)


def fixed(shape):
    """The same numbers in each call."""
    return tf.random.stateless_normal(shape, seed=[1, 2])


class Diffusion(tf.keras.Model):
    """Predicts noise, as many of it as `count(images)` says."""

    def __init__(self, count, draw):
        super().__init__()
        self.network = tf.keras.Sequential([tf.keras.Input((4, 4, 3)), layers.Conv2D(3, 3, padding="same")])
        self.count = count
        self.draw = draw

    def call(self, images, training=False):
        return self.network(images, training=training)

    def train_step(self, images):
        noises = self.draw((self.count(images), 4, 4, 3))
        rates = self.rates(self.count(images))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.abs(noises - self(rates * images + (1.0 - rates) * noises, training=True)))
        weights = self.network.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}

    def rates(self, count):
        return tf.random.uniform((count, 1, 1, 1)) ** 0.5


class FixedRates(Diffusion):
    def rates(self, count):
        return fixed((count, 1, 1, 1)) ** 2


class NoiseInCall(tf.keras.Model):
    def __init__(self, count, draw):
        super().__init__()
        self.dense = layers.Dense(2)
        self.count = count
        self.draw = draw

    def call(self, images, training=False):
        return self.dense(images + 0.1 * self.draw((self.count(images), 4, 4, 3)))


class NoisyKernel(tf.keras.Model):
    """Draws for its weights, of which there are as many as examples."""

    def build(self, shape):
        self.kernel = self.add_weight(name="kernel", shape=(BATCH, 3), initializer="ones")

    def call(self, images, training=False):
        pixels = tf.reshape(images, [-1, 48])[:, :BATCH]
        return tf.matmul(pixels, self.kernel + 0.1 * tf.random.normal((BATCH, 3)))


class Concatenated(NoiseInCall):
    """Puts noise beside the data, as a conditional generator does with labels."""

    def call(self, images, training=False):
        return self.dense(tf.concat([self.draw((self.count(images), 4, 4, 3)), images], -1))


class NoisyKernelAndMistake(NoisyKernel):
    """Combines tensors that never fit each other, whatever is drawn."""

    def call(self, images, training=False):
        return super().call(images + images[:, :2])


def fit(model, size=None, eagerly=False, **options):
    model.compile(tf.keras.optimizers.SGD(0.01), "mse", run_eagerly=eagerly, **NOT_COMPILED)
    if size is not None:
        model = accum.GradientAccumulateModel.from_model(model, micro_batch_size=size, **options)
    data = (IMAGES,) if isinstance(model, Diffusion) else (IMAGES, np.zeros([16, 1, 1, 2], "float32"))
    data = data if not isinstance(model, NoisyKernel) else (IMAGES, np.zeros([16, 3], "float32"))
    batches = tf.data.Dataset.from_tensor_slices(data if len(data) > 1 else data[0]).batch(BATCH)
    model.fit(batches, epochs=1, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize(
    "size, eagerly", [(4, False), (1, False), (3, False), (4, True)], ids=["4", "1", "3, 3 and 2", "eager"]
)
@pytest.mark.parametrize("draw", [tf.random.normal, normal], ids=["TensorFlow", "Keras"])
def test_a_train_step_that_draws_for_the_whole_batch_is_named(size, eagerly, draw):
    with pytest.raises(ValueError, match=NAMED):
        fit(Diffusion(lambda images: BATCH, draw), size, eagerly, whole_batch=())


@pytest.mark.parametrize("whole_batch", [(), "loss"])
@pytest.mark.parametrize("size", [4, 1])
def test_a_model_that_draws_for_the_whole_batch_is_named(size, whole_batch):
    with pytest.raises(ValueError, match=NAMED):
        fit(NoiseInCall(lambda images: BATCH, tf.random.normal), size, whole_batch=whole_batch)


@pytest.mark.parametrize("size", [4, 1])
def test_numbers_for_the_whole_batch_that_are_put_beside_the_data_are_named(size):
    with pytest.raises(ValueError, match=NAMED):
        fit(Concatenated(lambda images: BATCH, tf.random.normal), size, whole_batch=())


def test_another_error_of_shapes_is_left_as_it_is():
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)) as caught:
        fit(NoisyKernelAndMistake(), 4)
    assert NAMED not in str(caught.value)


@pytest.mark.parametrize("model_class", [Diffusion, NoiseInCall, Concatenated])
def test_numbers_for_the_examples_that_there_are_may_be_drawn(model_class):
    fit(model_class(lambda images: tf.shape(images)[0], tf.random.normal), 4)


def test_a_batch_that_is_no_larger_than_a_micro_batch_may_be_drawn_for():
    fit(Diffusion(lambda images: BATCH, tf.random.normal), BATCH)


@pytest.mark.parametrize("size", [4, 1])
def test_numbers_for_weights_may_be_as_many(size):
    fit(NoisyKernel(), size)


@pytest.mark.law("L21")
@pytest.mark.parametrize("eagerly", [False, True], ids=["traced", "eager"])
@pytest.mark.parametrize("size", [4, 1])
@pytest.mark.parametrize("model_class", [FixedRates, NoiseInCall, Concatenated])
def test_by_default_numbers_for_the_whole_batch_are_those_of_plain_keras(model_class, size, eagerly):
    trained = []
    for micro_batch_size in (None, size):
        model = model_class(lambda images: BATCH, fixed)
        model(IMAGES[:BATCH])
        model.set_weights([np.cos(np.arange(np.size(part))).reshape(np.shape(part)) for part in model.get_weights()])
        trained.append(fit(model, micro_batch_size, eagerly))
    for plain, ours in zip(*trained):
        np.testing.assert_allclose(ours, plain, rtol=0, atol=2e-6)
