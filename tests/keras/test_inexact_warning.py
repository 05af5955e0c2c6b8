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


KERAS = [
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
def test_what_changes_no_result_is_of_another_category():
    with silent(accum.InexactWarning):
        with pytest.warns(UserWarning, match="`accum_steps` was not given"):
            from_model(functional())
        with pytest.warns(UserWarning, match="No batch is split"):
            fitted(from_model(functional(), micro_batch_size=4))
