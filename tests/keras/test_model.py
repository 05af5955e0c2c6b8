"""The model: what it weighs, whatever `train_step` runs, and how its cycle's length may change (laws L5, L14)."""

import gc

import numpy as np
import pytest
import tensorflow as tf
from optimizers import mainly

import accum

pytestmark = pytest.mark.tf("2.2")

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.normal(size=(20, 3)).astype("float32"), RANDOM.normal(size=(20, 1)).astype("float32")
FIRST = RANDOM.normal(size=(3, 1)).astype("float32")
TRACED_AND_EAGER = [pytest.param(False, id="traced", marks=pytest.mark.slow), pytest.param(True, id="eager")]


def parts():
    inputs = tf.keras.Input((3,))
    return {"inputs": inputs, "outputs": tf.keras.layers.Dense(1, use_bias=False)(inputs)}


def expected_step(rate=0.1):
    return FIRST - rate * 2.0 * X.T @ (X @ FIRST - Y) / len(X)


def batches(*ends):
    def generate():
        for start, end in zip((0,) + ends, ends):
            yield X[start:end], Y[start:end]

    shapes = tf.TensorShape([None, 3]), tf.TensorShape([None, 1])
    return tf.data.Dataset.from_generator(generate, (tf.float32, tf.float32), shapes)


class OwnTrainStep(accum.GradientAccumulateModel if hasattr(accum, "GradientAccumulateModel") else object):
    """A subclass that does all of a train step by itself."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        return {"loss": loss}


@pytest.mark.slow
@pytest.mark.law("L5")
def test_a_train_step_of_the_user_is_weighed_too():
    model = OwnTrainStep(3, **parts())
    model.compile(tf.keras.optimizers.SGD(0.1))
    model.set_weights([FIRST])
    model.fit(batches(8, 16, 20), verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], expected_step(), rtol=0, atol=2e-6)


@pytest.mark.law("L5")
@pytest.mark.parametrize("run_eagerly", TRACED_AND_EAGER)
def test_weights_stay_in_force_when_the_cycle_was_one_for_a_while(run_eagerly):
    model = accum.GradientAccumulateModel(2, **parts())
    model.compile(tf.keras.optimizers.SGD(0.1), "mse", run_eagerly=run_eagerly)
    model.optimizer.accum_steps = 1
    model.train_on_batch(X[:4], Y[:4])
    model.optimizer.accum_steps = 2
    model.set_weights([FIRST])
    for part in (slice(0, 12), slice(12, 20)):
        model.train_on_batch(X[part], Y[part])
    np.testing.assert_allclose(model.get_weights()[0], expected_step(), rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.law("L5")
def test_a_function_can_weigh():
    model = accum.GradientAccumulateModel(
        2, micro_batch_weight=lambda x, y, sample_weight: tf.shape(x)[0] * 3, **parts()
    )
    model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    model.set_weights([FIRST])
    model.fit(batches(13, 20), verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], expected_step(), rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.law("L14")
@pytest.mark.parametrize("options", mainly([{}, {"use_agc": True}, {"nonfinite": "skip_micro"}], {}))
def test_a_scheduler_can_start_from_one(options):
    model = accum.GradientAccumulateModel(1, **dict(parts(), **options))
    model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=5, epochs=3, verbose=0, callbacks=[accum.AccumulationScheduler({0: 1, 2: 4})])
    assert int(model.optimizer.iterations.numpy()) == 4 + 4 + 1


@pytest.mark.law("L17")
@pytest.mark.parametrize("options", [{}, {"use_agc": True}])
def test_a_scheduler_says_at_once_that_there_can_be_no_accumulators(options):
    model = accum.GradientAccumulateModel(1, **dict(parts(), **options))
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(X, Y, batch_size=5, verbose=0)
    with pytest.raises(ValueError, match="there are no accumulators"):
        model.fit(X, Y, verbose=0, callbacks=[accum.AccumulationScheduler({0: 1, 9: 4})])


@pytest.mark.tf(keras=2, because="an optimizer of Keras 3 has only one list of variables")
@pytest.mark.law("L1")
def test_variables_that_are_gone_leave_nothing_to_those_that_follow():
    """An id belongs to a variable only while it lives: the next may get it, and another shape."""
    legacy = getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers)  # the others have one list of variables
    optimizer = accum.GradientAccumulateOptimizer(legacy.SGD(1.0), accum_steps=2)
    for size in range(1, 9):
        variable = tf.Variable(tf.zeros([size]))
        optimizer.build([variable])
        for grad in (1.0, 3.0):
            optimizer.apply_gradients([(tf.fill([size], grad), variable)])
        np.testing.assert_array_equal(variable.numpy(), np.full(size, -2.0))
        assert [tuple(total.shape) for total in optimizer.gradients] == [(size,)]
        del variable
        gc.collect(0)


@pytest.mark.law("L1")
@pytest.mark.parametrize("run_eagerly", TRACED_AND_EAGER)
def test_dictionaries_in_and_one_batch_at_a_time(run_eagerly):
    inputs = {name: tf.keras.Input((3,), name=name) for name in ("left", "right")}
    outputs = tf.keras.layers.Dense(1, use_bias=False)(tf.keras.layers.Add()(list(inputs.values())))
    model = accum.GradientAccumulateModel(2, inputs=inputs, outputs=outputs)
    model.compile(tf.keras.optimizers.SGD(0.1), "mse", run_eagerly=run_eagerly)
    model.set_weights([FIRST])
    for part in (slice(0, 13), slice(13, 20)):
        model.train_on_batch({"left": 0.25 * X[part], "right": 0.75 * X[part]}, Y[part])
    np.testing.assert_allclose(model.get_weights()[0], expected_step(), rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.law("L1")
def test_a_recurrent_layer_with_dropout_trains():
    """On TF 2.2 it holds a mask for each graph, among which Keras' search for what is in a model can't find its way."""
    cell = tf.keras.layers.SimpleRNN(1, recurrent_dropout=0.5)
    model = accum.GradientAccumulateModel.from_model(tf.keras.Sequential([cell]), 2)
    model.compile("sgd", "mse")
    for part in (slice(0, 2), slice(2, 3), slice(3, 20), slice(0, 2)):
        model.train_on_batch(X[part, :, None], Y[part])
    assert int(model.optimizer.iterations.numpy()) == 2


@pytest.mark.slow
@pytest.mark.law("L16")
@pytest.mark.parametrize("options", [{"accum_steps": 2}, {"micro_batch_size": 4, "whole_batch": "loss"}])
def test_a_model_gets_one_attribute(options):
    """And steps of its own in the place of those of its class; all else stands in that attribute."""

    def attributes(wrap):
        model = wrap(tf.keras.Model(**parts()))
        model.compile("sgd", "mse")
        model.fit(X, Y, batch_size=10, verbose=0)
        model.evaluate(X, Y, verbose=0)
        return set(vars(model))

    plain = attributes(lambda model: model)
    ours = attributes(lambda model: accum.GradientAccumulateModel.from_model(model, **options))
    of_keras = {"_auto_config"}  # for models of a subclass
    assert ours - plain - of_keras <= {"_accum", "train_step", "test_step", "predict_step"}


def test_the_class_of_a_model_makes_models_of_this_class():
    model = accum.GradientAccumulateModel(2, **parts())
    assert type(type(model)(2, **parts())) is type(model)


@pytest.mark.law("L13")
def test_batch_normalisation_follows_the_optimizer_of_compile_among_others_of_the_model():
    inputs = tf.keras.Input((3,))
    layer = accum.AccumBatchNormalization(momentum=0.5)
    model = accum.GradientAccumulateModel.from_model(tf.keras.Model(inputs, tf.keras.layers.Dense(1)(layer(inputs))), 2)
    model.another = tf.keras.optimizers.SGD(0.1)  # as for a phase of the training that comes later
    model.compile(tf.keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    model.fit(X, Y, batch_size=10, shuffle=False, verbose=0)
    np.testing.assert_allclose(layer.moving_mean.numpy(), 0.5 * X.mean(axis=0), rtol=0, atol=2e-6)


@pytest.mark.law("L17")
def test_a_train_step_that_calls_no_optimizer_any_more_is_refused_after_another_compile():
    model = OwnTrainStep(2, **parts())
    model.compile(tf.keras.optimizers.SGD(0.1), run_eagerly=True)
    model.fit(X, Y, batch_size=10, verbose=0)
    model.compile(tf.keras.optimizers.SGD(0.1), run_eagerly=True)
    model.train_step = lambda data: {"loss": tf.reduce_mean(model(data[0]))}
    with pytest.raises(ValueError, match="has called none of the model's accumulating optimizers"):
        model.fit(X, Y, batch_size=10, verbose=0)
