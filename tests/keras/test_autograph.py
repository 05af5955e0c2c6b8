"""AutoGraph converts the user's code as in plain Keras, and nothing of accum, which would take seconds (law L18)."""

import cProfile
import os
import re

import numpy as np
import pytest
import tensorflow as tf
import versions
from equality import assert_near
from versions import IS_KERAS_3
from warned import silent

import accum

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.law("L18")]

X, Y = np.linspace(0.1, 1.0, 24).reshape(8, 3).astype("float32"), np.linspace(0.0, 1.0, 8)[:, None].astype("float32")
NOT_BY_XLA = {"jit_compile": False} if IS_KERAS_3 else {}
MODES = {
    "accum_steps": {"accum_steps": 2},
    "micro_batch_size": {"micro_batch_size": 3},
    "auto": {"micro_batch_size": "auto", "memory_limit": 2**40},
    "whole_batch": {"micro_batch_size": 3, "whole_batch": "all"},
}


def doubled_if_positive(values):
    if tf.reduce_sum(values) > 0:
        values = 2.0 * values
    return values


class Doubles(tf.keras.layers.Layer):
    def call(self, inputs):
        if tf.reduce_sum(inputs) > 0:
            inputs = 2.0 * inputs
        return tf.ensure_shape(inputs, [None, 3])


def error_if_positive(targets, outputs):
    errors = (targets - outputs) ** 2
    if tf.reduce_sum(targets) > 0:
        errors = 2.0 * errors
    return errors


class BranchesInTrainStep(tf.keras.Model):
    def train_step(self, data):
        x, y = data
        if tf.reduce_sum(x) > 0:
            x = 2.0 * x
        return super().train_step((x, y))


def model_with(branch, model_class=tf.keras.Model):
    inputs = tf.keras.Input((3,))
    hidden = Doubles()(inputs) if branch == "layer" else inputs
    return model_class(inputs, tf.keras.layers.Dense(1, kernel_initializer="ones")(hidden))


def trained(branch, options):
    """The weights after an epoch, or the type of the error."""
    try:
        model = model_with(branch, BranchesInTrainStep if branch == "train_step" else tf.keras.Model)
        if options:
            model = accum.GradientAccumulateModel.from_model(model, **options)
        model.compile(
            tf.keras.optimizers.SGD(0.1),
            error_if_positive if branch == "loss" else "mse",
            metrics=[error_if_positive] if branch == "metric" else [],
            **NOT_BY_XLA,
        )
        # Where cycles have two batches, these are halves of the full batch.
        model.fit(X, Y, batch_size=8 // (options or {}).get("accum_steps", 1), verbose=0, shuffle=False)
        return model.get_weights()
    except TypeError as error:  # such as OperatorNotAllowedInGraphError
        assert "bool" in str(error)
        return "refused"


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("branch", ["layer", "loss", "metric", "train_step"])
def test_what_autograph_converts_is_that_of_plain_keras(branch, mode):
    """An `if` on a tensor works where it works without accum. Which ones do differs between versions of Keras."""
    plain, ours = trained(branch, None), trained(branch, MODES[mode])
    if isinstance(plain, str):
        assert ours == plain
        return
    assert_near(ours, plain)


@pytest.mark.slow
@pytest.mark.tf(keras=2, because="it uses no AutoGraph in `fit`")
def test_layers_and_losses_have_autograph():
    """The test above compares something."""
    assert not isinstance(trained("layer", None), str)
    if versions.TF_VERSION >= (2, 4):
        assert not isinstance(trained("loss", None), str)


@pytest.mark.slow
def test_the_functions_of_value_and_gradients_have_it_in_a_function():
    kernel = tf.Variable([[1.0], [2.0], [3.0]])

    def error(x, y):
        return tf.reduce_mean((doubled_if_positive(x) @ kernel - y) ** 2)

    def weight(x, y):
        count = tf.shape(x)[0]
        if tf.reduce_sum(x) > 0:
            count = 2 * count
        return count

    @tf.function
    def step(x, y):
        return accum.value_and_gradients(error, (x, y), [kernel], micro_batch_size=3, weight=weight)

    with silent():  # "computed at once", where one of them can't be traced
        check_doubled(kernel, *step(tf.constant(X), tf.constant(Y)))


def check_doubled(kernel, value, grads):
    """Compare with NumPy, for inputs that were doubled."""
    off = 2 * X @ kernel.numpy() - Y
    np.testing.assert_allclose(value, np.mean(off**2), rtol=2e-6)
    np.testing.assert_allclose(grads[0], 2 * (2 * X).T @ off / len(X), rtol=2e-6)
    assert abs(np.mean((X @ kernel.numpy() - Y) ** 2) - value) > 1.0


@pytest.mark.slow
def test_the_loss_of_value_and_gradients_has_it_in_a_function():
    kernel = tf.Variable([[1.0], [2.0], [3.0]])

    def network(x, y):
        return x @ kernel

    def loss(outputs, x, y):
        outputs = doubled_if_positive(outputs)
        return tf.reduce_mean((outputs - y) ** 2)

    @tf.function
    def step(x, y):
        return accum.value_and_gradients(network, (x, y), [kernel], micro_batch_size=3, whole_batch="loss", loss=loss)

    check_doubled(kernel, *step(tf.constant(X), tf.constant(Y)))


class ComputesByHand(tf.keras.Model):
    def train_step(self, data):
        def error(x, y):
            return tf.reduce_mean((self(doubled_if_positive(x), training=True) - y) ** 2)

        value, _ = accum.value_and_gradients(error, data, self.trainable_variables, micro_batch_size=3, whole_batch=())
        return {"loss": value}


def test_in_a_train_step_functions_have_what_keras_gives_it():
    """Nothing since TensorFlow 2.3, where a `train_step` runs as it is written."""
    model = model_with(None, ComputesByHand)
    model.compile("sgd", **NOT_BY_XLA)
    if versions.TF_VERSION < (2, 3):
        model.fit(X, Y, verbose=0)
        return
    with pytest.raises(TypeError, match="bool"):
        model.fit(X, Y, verbose=0)


def test_without_autograph_functions_stay_without_it():
    kernel = tf.Variable([[1.0], [2.0], [3.0]])

    def error(x, y):
        return tf.reduce_mean((doubled_if_positive(x) @ kernel - y) ** 2)

    @tf.function(autograph=False)
    def step(x, y):
        return accum.value_and_gradients(error, (x, y), [kernel], micro_batch_size=3, whole_batch=())

    with pytest.raises(TypeError, match="bool"):
        step(tf.constant(X), tf.constant(Y))


def converted(function):
    """The names of the functions that AutoGraph converts during a call, each into a file of its own."""
    profile = cProfile.Profile()
    profile.runcall(function)
    profile.create_stats()
    paths = {path for path, _, _ in profile.stats if "__autograph_generated_file" in path}
    return {re.search(r"def (tf__\w+)\(", open(path).read()).group(1) for path in paths if os.path.exists(path)}


OF_OTHERS = {"tf__call", "tf__train_function", "tf__step", "tf__error"}
OF_OTHERS |= {"tf___calling", "tf__value_and_gradients", "tf__lam"}
"""Those of the user, of Keras, and those through which accum has the user's functions converted."""


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_no_function_of_accum_is_converted_in_fit(mode):
    model = accum.GradientAccumulateModel.from_model(model_with("layer" if not IS_KERAS_3 else None), **MODES[mode])
    model.compile(tf.keras.optimizers.SGD(0.1), "mse", metrics=["mae"], **NOT_BY_XLA)

    def run():
        model.fit(X, Y, batch_size=4, verbose=0)
        model.evaluate(X, Y, batch_size=4, verbose=0)
        model.predict(X, batch_size=4, verbose=0)

    assert converted(run) <= OF_OTHERS | {"tf__test_function", "tf__predict_function"}


class TwoCalls(tf.keras.Model):
    """A train step of its own, which AutoGraph converts on TensorFlow 2.2."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2) + tf.reduce_mean(self(-x, training=True) ** 2)
        grads, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.1)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        return {"loss": loss}


def test_no_function_of_accum_is_converted_in_a_train_step_of_ones_own():
    inputs = tf.keras.Input((3,))
    hidden = tf.keras.layers.BatchNormalization()(tf.keras.layers.ActivityRegularization(0.1)(inputs))
    plain = TwoCalls(inputs, tf.keras.layers.Dense(1)(hidden))
    model = accum.GradientAccumulateModel.from_model(plain, micro_batch_size=3)
    model.compile(tf.keras.optimizers.SGD(0.1), **NOT_BY_XLA)
    names = converted(lambda: model.fit(X, Y, batch_size=8, verbose=0))
    assert names <= OF_OTHERS | {"tf__train_step", "tf____call__"}  # the `__call__` is Keras'


@pytest.mark.slow
def test_no_function_of_accum_is_converted_in_a_loop():
    kernel = tf.Variable([[1.0], [2.0], [3.0]])
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.1), accum_steps=2)

    def error(x, y):
        return tf.reduce_mean((x @ kernel - y) ** 2)

    @tf.function
    def step(x, y):
        _, grads = accum.value_and_gradients(error, (x, y), [kernel], micro_batch_size=3)
        optimizer.apply_gradients(zip(grads, [kernel]))

    names = converted(lambda: step(tf.constant(X), tf.constant(Y)))
    assert "tf__step" in names and names <= OF_OTHERS


class Counts(tf.keras.layers.Layer):
    """Counts how often it is traced."""

    calls = 0

    def call(self, inputs):
        type(self).calls += 1
        return inputs


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["micro_batch_size", "auto"])
def test_a_step_is_traced_once(mode):
    """Its variables are created before: TensorFlow traces what creates variables twice."""
    inputs = tf.keras.Input((3,))
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(Counts()(inputs)))
    model = accum.GradientAccumulateModel.from_model(model, **MODES[mode])
    model.compile(tf.keras.optimizers.Adam(0.1), "mse", metrics=["mae"], **NOT_BY_XLA)
    Counts.calls = 0
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    assert Counts.calls == 3, "to see if examples meet, for the first micro-batch, and in the loop over the others"
