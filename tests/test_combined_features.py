"""Two features together, each of which is exact alone: the step is that of the full batch, or a warning names them.

The oracle is the gradient of a linear model, computed by NumPy over the full batch, or plain Keras.
"""

import warnings

import numpy as np
import pytest
import tensorflow as tf
from exceptions import IS_KERAS_3
from loss_scales import loss_scale_optimizer
from replicas import mirrored

import accum

pytestmark = [pytest.mark.keras_api, pytest.mark.per_version, pytest.mark.law("L3")]

RANDOM = np.random.RandomState(0)
COUNT, RATE = 20, 0.1
X = RANDOM.normal(size=(COUNT, 3)).astype("float32")
Y = RANDOM.normal(size=(COUNT, 1)).astype("float32")
MASK = np.array([1, 0, 0, 0, 1, 1, 1, 1, 0.5, 2] * 2, "float32")
KERNEL = RANDOM.normal(size=(3, 1)).astype("float32")
layers = tf.keras.layers


class MeanOverMask(tf.keras.Model):
    """A model whose train step computes a mean over the mask, and says by how much it has divided."""

    how = "weighing"

    def train_step(self, data):
        x, y, mask = data
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean((self(x, training=True) - y) ** 2, axis=-1)
            loss = tf.reduce_sum(losses * mask) / tf.reduce_sum(mask)
            loss /= float(tf.distribute.get_strategy().num_replicas_in_sync)
        grads_and_vars = list(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
        if self.how == "weighing":
            with self.optimizer.weighing(tf.reduce_sum(mask)):
                self.optimizer.apply_gradients(grads_and_vars)
        else:
            self.optimizer.apply_gradients(grads_and_vars, weight=tf.reduce_sum(mask))
        return {"loss": loss}


def linear(cls=tf.keras.Model):
    inputs = tf.keras.Input((3,))
    outputs = layers.Dense(1, use_bias=False)(inputs)
    model = cls(inputs, outputs)
    model.set_weights([KERNEL])
    return model


def steps(batch, weight_of, kernel=KERNEL):
    """The kernel after an epoch of gradient descent on Σ w l / Σ w of each batch, computed by NumPy."""
    kernel = kernel.astype("float64")
    for begin in range(0, COUNT, batch):
        x, y, mask = (array[begin : begin + batch].astype("float64") for array in (X, Y, MASK))
        weight = weight_of(mask)[:, None]
        kernel = kernel - RATE * 2.0 * x.T @ (weight * (x @ kernel - y)) / weight.sum()
    return kernel


@pytest.mark.parametrize("how", ["weighing", "apply_gradients"])
@pytest.mark.parametrize("accum_steps, replicas, loss", [(1, 1, None), (2, 1, "sum"), (1, 2, None), (2, 2, None)])
def test_a_train_step_s_own_weight_counts_over_the_micro_batches_of_a_batch(how, accum_steps, replicas, loss):
    batch = COUNT // 2 // accum_steps
    with mirrored().scope() if replicas == 2 else tf.distribute.get_strategy().scope():
        model = accum.GradientAccumulateModel.from_model(
            linear(MeanOverMask), accum_steps=accum_steps, micro_batch_size=2
        )
        model.how = how
        model.compile(tf.keras.optimizers.SGD(RATE), summed() if loss == "sum" else None)
    data = tf.data.Dataset.from_tensor_slices((X, Y, MASK)).batch(batch)
    model.fit(data, epochs=1, verbose=0)
    (kernel,) = model.get_weights()
    np.testing.assert_allclose(kernel, steps(COUNT // 2, lambda mask: mask), rtol=0, atol=2e-6)
    assert np.abs(kernel - steps(COUNT // 2, np.ones_like)).max() > 1e-3


# --------------------------------------------------------------------------------------------------------------------
# Moving statistics of layers that rest


def normalised(normalise):
    inputs = tf.keras.Input((3,))
    return tf.keras.Model(inputs, layers.Dense(1)(normalise(inputs)))


@pytest.mark.law("L7")
def test_moving_statistics_rest_while_their_layer_is_frozen_after_training():
    layer = accum.AccumBatchNormalization(momentum=0.5)
    model = accum.GradientAccumulateModel.from_model(normalised(layer), accum_steps=2)
    model.compile(tf.keras.optimizers.SGD(RATE), "mse")
    model.fit(X, Y, batch_size=5, shuffle=False, verbose=0)
    before = [np.array(weight) for weight in layer.get_weights()]
    layer.trainable = False
    model.compile(model.optimizer, "mse")
    model.fit(X + 3.0, Y, batch_size=5, shuffle=False, verbose=0)
    for weight, rested in zip(layer.get_weights(), before):
        np.testing.assert_array_equal(weight, rested)
    layer.trainable = True
    model.compile(model.optimizer, "mse")
    model.fit(X + 3.0, Y, batch_size=5, shuffle=False, verbose=0)
    assert np.abs(layer.moving_mean.numpy() - before[2]).max() > 1.0


# --------------------------------------------------------------------------------------------------------------------
# Options of a model, and an optimizer that accumulates already


def doubled(grads_and_vars):
    return [(2.0 * gradient, var) for gradient, var in grads_and_vars]


def tripled(grads_and_vars):
    return [(3.0 * gradient, var) for gradient, var in grads_and_vars]


@pytest.mark.parametrize("options", [{"use_agc": True}, {"transform": doubled}])
def test_an_accumulating_optimizer_without_the_model_s_transform_is_refused(options):
    model = accum.GradientAccumulateModel.from_model(linear(), accum_steps=4, **options)
    with pytest.raises(ValueError, match="accumulates already: create it with the options of the model that"):
        model.compile(accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(RATE), 4), "mse")
    for other in (tripled, accum.AdaptiveClipping(0.5), accum.AdaptiveClipping(exclude=["bias"])):
        with pytest.raises(ValueError, match="accumulates already"):
            model.compile(accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(RATE), 4, transform=other), "mse")
    with pytest.raises(ValueError, match="accumulates already"):
        model.compile(
            loss_scale_optimizer(accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(RATE), 4), 8.0), "mse"
        )
    model.compile(tf.keras.optimizers.SGD(RATE), "mse")
    transform = options.get("transform", accum.AdaptiveClipping())
    model.compile(accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(RATE), 4, transform=transform), "mse")


@pytest.mark.law("L12")
@pytest.mark.parametrize("format", ["keras" if IS_KERAS_3 else "h5"])
def test_a_model_whose_steps_a_callback_has_changed_loads_with_them(format, tmp_path):
    model = accum.GradientAccumulateModel.from_model(linear(), accum_steps=2)
    model.compile(tf.keras.optimizers.SGD(RATE), "mse")
    schedule = accum.AccumulationScheduler({0: 2, 1: 4})
    model.fit(X, Y, batch_size=5, epochs=2, shuffle=False, verbose=0, callbacks=[schedule])
    path = str(tmp_path / f"model.{format}")
    model.save(path)
    loaded = tf.keras.models.load_model(path)
    assert loaded.optimizer.accum_steps == 4
    assert loaded.get_config()["accumulation"]["accum_steps"] == 4
    loaded.fit(X, Y, batch_size=5, shuffle=False, verbose=0)
    kernel = KERNEL
    for batch in (10, 20, 20):
        kernel = steps(batch, np.ones_like, kernel)
    np.testing.assert_allclose(loaded.get_weights()[0], kernel, rtol=0, atol=2e-6)
    assert int(loaded.optimizer.iterations.numpy()) == 4
    assert np.abs(kernel - steps(10, np.ones_like, steps(20, np.ones_like, steps(10, np.ones_like)))).max() > 1e-3


# --------------------------------------------------------------------------------------------------------------------
# Losses that are sums


class OwnLoss(tf.keras.Model):
    """A model whose train step divides the compiled loss, or adds up its own."""

    divides = True

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            if self.divides:
                loss = tf.reduce_sum((outputs - y) ** 2) / tf.cast(tf.shape(x)[0], tf.float32)
            else:
                loss = tf.reduce_sum((outputs - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


def warned(model):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, Y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    return [str(warning.message) for warning in caught if "micro-batch" in str(warning.message)]


def summed():
    return tf.keras.losses.MeanSquaredError(reduction="sum")


def test_a_train_step_that_may_divide_a_summed_loss_is_warned_of_once():
    model = accum.GradientAccumulateModel.from_model(linear(OwnLoss), accum_steps=1, micro_batch_size=2)
    model.compile(tf.keras.optimizers.SGD(0.01), summed())
    (message,) = warned(model)
    assert "has a `train_step` or `compute_loss` of its own, and a compiled loss of reduction SUM" in message
    assert "compile losses that are means, or pass `micro_batch_size` and `whole_batch='loss'`" in message


def test_a_train_step_that_adds_up_losses_of_averaged_micro_batches_is_warned_of_once():
    options = {"reduction": "sum", "micro_batch_weight": "equal"}
    model = accum.GradientAccumulateModel.from_model(linear(OwnLoss), accum_steps=2, micro_batch_size=2, **options)
    model.divides = False
    model.compile(tf.keras.optimizers.SGD(0.01))
    (message,) = warned(model)
    assert "a batch's micro-batches are averaged" in message and "of its own" in message


def test_steps_of_several_batches_that_came_after_compile_are_warned_of_with_a_summed_loss():
    model = accum.GradientAccumulateModel.from_model(linear(), accum_steps=1, micro_batch_size=2)
    model.compile(tf.keras.optimizers.SGD(0.01), summed())
    model.optimizer.accum_steps = 2
    (message,) = warned(model)
    assert "reduction SUM or NONE is a sum over examples" in message


@pytest.mark.parametrize(
    "cls, loss, options",
    [
        (OwnLoss, "mse", {}),
        (tf.keras.Model, "mse", {}),
        (tf.keras.Model, "sum", {}),
        (tf.keras.Model, "sum", {"use_agc": True}),
    ],
)
def test_other_losses_are_not_warned_of(cls, loss, options):
    model = accum.GradientAccumulateModel.from_model(linear(cls), accum_steps=1, micro_batch_size=2, **options)
    model.compile(tf.keras.optimizers.SGD(0.01), summed() if loss == "sum" else loss)
    assert warned(model) == []
