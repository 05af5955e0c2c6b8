"""`accum.InexactWarning` is the category of what may differ from the full batch, so a program can forbid it."""

import numpy as np
import pytest
import tensorflow as tf
from models import from_model
from warned import silent

import accum
import accum.compat.v1

pytestmark = pytest.mark.law("L17")

X, Y = np.sin(np.arange(24.0, dtype="float32")).reshape(8, 3), np.ones((8, 2), "float32")
tf1, layers = tf.compat.v1, tf.keras.layers


def functional(*hidden):
    return tf.keras.Sequential([tf.keras.Input((3,)), *hidden, layers.Dense(2)])


class Counts(layers.Layer):
    """Changes a variable at each call."""

    def build(self, input_shape):
        self.calls = self.add_weight(name="calls", shape=(), initializer="zeros", trainable=False)
        self.built = True

    def call(self, inputs):
        self.calls.assign_add(1.0)
        return inputs


def fitted(model, loss="mse", **options):
    model.compile("sgd", loss, **options)
    model.fit(X, Y, batch_size=4, verbose=0)


def with_batch_norm():
    fitted(from_model(functional(layers.BatchNormalization()), micro_batch_size=2, whole_batch=()))


def with_a_sum():
    fitted(from_model(functional(), 2), tf.keras.losses.MeanSquaredError(reduction="sum"))


def with_a_layer_that_counts_its_calls():
    fitted(from_model(functional(Counts()), 2))


def with_eager_draws():
    fitted(from_model(functional(layers.Dropout(0.5)), micro_batch_size=2), run_eagerly=True)


def in_a_static_graph():
    with tf.Graph().as_default():
        weights = tf1.get_variable("weights", [3, 2])
        loss = tf.reduce_sum((tf.matmul(tf1.placeholder(tf.float32, [None, 3]), weights) - 1.0) ** 2)
        accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.1), 2).minimize(loss)


class Averages(tf.keras.Model):
    """Averages its weights after each update, in an object that Keras does not track."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)
        self.average = tf.train.ExponentialMovingAverage(0.9)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        kernel = self.dense.kernel
        self.average.apply([kernel if isinstance(kernel, tf.Variable) else kernel.value])
        return {"loss": loss}


def averaging():
    model = Averages()
    model(X)
    return model


def with_an_average_that_keras_does_not_track():
    fitted(from_model(averaging(), 2), None)


def with_batches_of_different_lengths():
    texts = tf.data.Dataset.from_tensor_slices([2, 5, 3, 4]).map(
        lambda length: (tf.ones([length, 1]), tf.ones([length, 2]))
    )
    model = from_model(tf.keras.Sequential([tf.keras.Input((None, 1)), layers.Dense(2)]), 2)
    model.compile("sgd", "mse")
    model.fit(texts.padded_batch(2, ([None, 1], [None, 2])), verbose=0)


KERAS = [
    with_an_average_that_keras_does_not_track,
    with_batches_of_different_lengths,
    with_batch_norm,
    with_a_sum,
    with_a_layer_that_counts_its_calls,
    with_eager_draws,
]


@pytest.mark.parametrize(
    "program", [pytest.param(one, marks=pytest.mark.tf("2.2")) for one in KERAS] + [in_a_static_graph]
)
def test_a_program_that_forbids_what_is_inexact_ends_with_the_warning_as_an_error(program):
    with silent(accum.InexactWarning):
        with pytest.raises(accum.InexactWarning):
            program()


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("options", [{"nonfinite": "skip_cycle"}, {"use_agc": True, "clip_factor": 1e6}])
def test_an_option_of_the_update_makes_no_cycle_of_several_batches(options):
    with silent():
        fitted(from_model(averaging(), micro_batch_size=3, **options), None)


@pytest.mark.tf("2.2")
def test_what_changes_no_result_is_of_another_category():
    with silent(accum.InexactWarning):
        with pytest.warns(UserWarning, match="`accum_steps` was not given"):
            from_model(functional())
        with pytest.warns(UserWarning, match="No batch is split"):
            fitted(from_model(functional(), micro_batch_size=4))
