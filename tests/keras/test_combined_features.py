"""Two features together, each of which is exact alone: the step is that of the full batch, or a warning names them.

The oracle is the gradient of a linear model, computed by NumPy over the full batch, or plain Keras.
"""

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_identical, assert_near
from loss_scales import loss_scale_optimizer
from replicas import mirrored
from versions import IS_KERAS_3
from warned import warned

import accum

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.law("L3"), pytest.mark.slow]

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
    last = layers.Dense(1, use_bias=False)
    model = cls(inputs, last(inputs))
    last.set_weights([KERNEL])
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
    assert_identical(layer.get_weights(), before)
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
    with pytest.raises(
        ValueError, match="accumulates already, with other options than the model.*: transform=None, and"
    ):
        model.compile(accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(RATE), 4), "mse")
    adaptive = r"AdaptiveClipping\(clip_factor=0.5, eps=0.001, exclude=\(\), before=None\)"
    others = (
        (tripled, "tripled"),
        (accum.AdaptiveClipping(0.5), adaptive),
        (accum.AdaptiveClipping(exclude=["b"]), "'b'"),
    )
    for other, shown in others:
        with pytest.raises(ValueError, match=f"accumulates already.*transform=.*{shown}.*, and the model's is "):
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


def said_of(model):
    with warned("micro-batch") as said:
        model.fit(X, Y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    return [one for one in said if "With `whole_batch=()`" not in one]


def summed():
    return tf.keras.losses.MeanSquaredError(reduction="sum")


@pytest.mark.parametrize("micro_batch_size", [2, None])
@pytest.mark.parametrize("accum_steps, is_said", [(1, False), (2, True)])
def test_compile_warns_of_a_summed_loss_only_where_batches_are_averaged(
    recwarn, accum_steps, is_said, micro_batch_size
):
    model = accum.GradientAccumulateModel.from_model(linear(), accum_steps, micro_batch_size=micro_batch_size)
    model.compile(tf.keras.optimizers.SGD(0.01), summed())
    said = [one for one in recwarn if "reduction SUM or NONE is a sum over examples" in str(one.message)]
    assert len(said) == is_said


@pytest.mark.parametrize("micro_batch_size", [2, None])
def test_steps_of_several_batches_that_came_after_compile_are_warned_of_with_a_summed_loss(micro_batch_size):
    model = accum.GradientAccumulateModel.from_model(linear(), accum_steps=1, micro_batch_size=micro_batch_size)
    model.compile(tf.keras.optimizers.SGD(0.01), summed())
    model.optimizer.accum_steps = 2
    (message,) = said_of(model)
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
    assert said_of(model) == []


# --------------------------------------------------------------------------------------------------------------------
# Code of the user's that a step over micro-batches runs several times, or once


def said_in_fit(model, words, **options):
    with warned(words) as said:
        history = model.fit(X, Y, **dict({"batch_size": 10, "shuffle": False, "verbose": 0}, **options)).history
    return said, history


class Anneals(tf.keras.Model):
    """Counts its calls in a variable that no Keras 3 tracks, alone or in a list."""

    def __init__(self, in_list=False):
        super().__init__()
        self.dense = layers.Dense(1)
        calls = tf.Variable(0.0, trainable=False, name="calls")
        self.calls = [calls] if in_list else calls

    def call(self, inputs):
        calls = self.calls[0] if isinstance(self.calls, (list, tuple)) else self.calls
        calls.assign_add(tf.reduce_mean(tf.ones_like(inputs)))
        return tf.minimum(1.0, calls / 100.0) * self.dense(inputs)


@pytest.mark.parametrize("in_list", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"micro_batch_size": 2, "whole_batch": ()}, {"accum_steps": 2}, {"micro_batch_size": 2, "whole_batch": "loss"}],
)
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_plain_variable_that_each_micro_batch_changes_is_named(options, in_list, run_eagerly):
    own = Anneals(in_list)
    own(X[:2])
    model = accum.GradientAccumulateModel.from_model(own, **options)
    model.compile(tf.keras.optimizers.SGD(RATE), "mse", run_eagerly=run_eagerly)
    messages, _ = said_in_fit(model, "changes variables once per micro-batch")
    assert messages and "calls" in messages[0]


class LogsScore(tf.keras.Model):
    """Logs a number that it computes from results of metrics, as F1 from precision and recall."""

    how = "derived"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.one, self.other = tf.keras.metrics.Mean(name="one"), tf.keras.metrics.MeanAbsoluteError(name="other")

    @property
    def metrics(self):
        return [self.one, self.other]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = tf.reduce_mean((outputs - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.one.update_state(y)
        self.other.update_state(y, outputs)
        one, other = self.one.result(), self.other.result()
        derived = {"score": 2.0 * one * other / (one + other + 3.0), "loss": loss, "one": one}
        if self.how == "python":
            return {"score": float(one) / (float(other) + 3.0), "loss": loss}
        return derived if self.how == "derived" else {"one": one, "other": other, "loss": loss}


@pytest.mark.law("L8")
@pytest.mark.parametrize("run_eagerly, how", [(False, "derived"), (True, "derived"), (True, "python")])
def test_a_train_step_that_logs_what_it_computes_from_results_is_named(run_eagerly, how):
    options = {"micro_batch_size": 2, "whole_batch": ()}
    model = accum.GradientAccumulateModel.from_model(linear(LogsScore), **options)
    model.how = how
    model.compile(tf.keras.optimizers.SGD(RATE), run_eagerly=run_eagerly)
    (message,), history = said_in_fit(model, "see those of a micro-batch")
    assert "`LogsScore.train_step`" in message
    plain = linear(LogsScore)
    plain.how = how
    plain.compile(tf.keras.optimizers.SGD(RATE), run_eagerly=True)
    assert abs(said_in_fit(plain, "")[1]["score"][0] - history["score"][0]) > 1e-3


class OwnVariable(tf.keras.metrics.Metric):
    """A metric whose result is its variable, as in the documentation of Keras 3."""

    def __init__(self):
        super().__init__(name="own")
        self.total = self.add_weight(name="total", shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(y_true))

    def result(self):
        return self.total if IS_KERAS_3 else tf.convert_to_tensor(self.total)


@pytest.mark.law("L8")
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_the_result_of_a_metric_may_be_a_variable(run_eagerly):
    metric = OwnVariable()
    metric.looks_across_examples = False
    model = accum.GradientAccumulateModel.from_model(linear(), micro_batch_size=2)
    model.compile(tf.keras.optimizers.SGD(RATE), "mse", metrics=[metric], run_eagerly=run_eagerly)
    messages, history = said_in_fit(model, "micro-batch")
    assert not messages
    np.testing.assert_allclose(history["own"], [Y.sum()], rtol=1e-5)


class EvaluatesBatches(tf.keras.Model):
    """Evaluates by the largest output of the batch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.largest = tf.keras.metrics.Sum(name="largest")

    @property
    def metrics(self):
        return [self.largest]

    def test_step(self, data):
        self.largest.update_state(tf.reduce_max(self(data[0])))
        return {"largest": self.largest.result()}


@pytest.mark.law("L8")
def test_a_test_step_that_sees_the_batch_is_named_and_exact_by_default():
    def largest(**options):
        model = accum.GradientAccumulateModel.from_model(linear(EvaluatesBatches), accum_steps=1, **options)
        model.compile(tf.keras.optimizers.SGD(RATE))
        with warned("see those of a micro-batch") as said:
            found = model.evaluate(X, Y, batch_size=10, verbose=0)
        return float(np.ravel(found)[0]), said

    plain = largest()[0]
    given_up, (message,) = largest(micro_batch_size=2, whole_batch=())
    assert "`EvaluatesBatches.test_step`" in message and "the test step may differ" in message
    assert abs(given_up - plain) > 1e-2
    ours, said = largest(micro_batch_size=2)
    assert not said
    np.testing.assert_allclose(ours, plain, rtol=2e-6)


class AddsUp(LogsScore):
    """Adds up its loss, a mean over examples, or the sum over them."""

    how = "mean"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.one = tf.keras.metrics.Sum(name="one")

    def train_step(self, data):
        x, y = data
        outputs = self(x, training=True)
        losses = tf.reduce_sum((outputs - y) ** 2, axis=-1)
        self.optimizer.apply_gradients([(tf.zeros_like(KERNEL), self.trainable_variables[0])])
        self.one.update_state(tf.reduce_mean(losses) if self.how == "mean" else losses)
        return {"one": self.one.result()}


@pytest.mark.law("L8")
def test_a_train_step_that_adds_up_one_number_for_each_micro_batch_is_named():
    def one(how, **options):
        model = accum.GradientAccumulateModel.from_model(linear(AddsUp), accum_steps=1, **options)
        model.how = how
        model.compile(tf.keras.optimizers.SGD(RATE))
        return said_in_fit(model, "see those of a micro-batch")

    (message,), history = one("mean", micro_batch_size=2, whole_batch=())
    assert "`AddsUp.train_step`" in message
    full = one("mean")[1]["one"]
    assert history["one"][0] > 2.0 * full[0]
    messages, history = one("mean", micro_batch_size=2)
    assert not messages
    np.testing.assert_allclose(history["one"], full, rtol=2e-6)
    history = one("sum", micro_batch_size=2, whole_batch=())[1]
    np.testing.assert_allclose(history["one"], one("sum")[1]["one"], rtol=2e-6)


class OfBatch(tf.keras.Model):
    """A model whose call does something that `whole_batch` has to know of."""

    does = ""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)
        self.table = tf.Variable(np.ones((4, 3), "float32"), trainable=False, name="table")
        self.scale = 0.0

    def call(self, inputs, training=False):
        outputs = self.dense(inputs)
        if self.does == "function":
            outputs = normalized(outputs)
        if self.does == "table":
            self.table.assign(0.5 * tf.convert_to_tensor(self.table))
            outputs += tf.gather(self.table, tf.cast(inputs[:, 0] > 0.0, tf.int32))
        if self.does == "rows":
            self.table.scatter_update(tf.IndexedSlices(tf.zeros([1, 3]), [0]))
            outputs += self.table.read_value()[0]
        if self.does == "python":
            outputs *= tf.map_fn(lambda row: row + tf.numpy_function(draw, [], tf.float32), outputs)
        if self.does == "matrix":
            outputs = tf.matmul(outputs, outputs, transpose_a=True)
        if self.does == "scale":
            outputs *= self.scale
        return outputs


def draw():
    return np.float32(RANDOM.uniform())


@tf.function
def normalized(inputs):
    mean = tf.reduce_mean(inputs, axis=0)
    variance = tf.reduce_mean((inputs - mean) ** 2, axis=0)
    return (inputs - mean) * tf.math.rsqrt(variance + 1e-3)


TARGETS = RANDOM.normal(size=(COUNT, 3)).astype("float32")


def of_batch(does, is_ours=True, cls=OfBatch, whole_batch="all", run_eagerly=False, jit=None):
    model = cls()
    model(X[:2])
    model.set_weights(
        [np.linspace(-1.0, 1.0, weight.size).reshape(weight.shape).astype("float32") for weight in model.get_weights()]
    )
    model.does = does
    if is_ours:
        model = accum.GradientAccumulateModel.from_model(model, micro_batch_size=3, whole_batch=whole_batch)
    model.compile(tf.keras.optimizers.SGD(RATE), "mse", run_eagerly=run_eagerly)
    return model


@pytest.mark.law("L19")
def test_statistics_by_any_square_in_a_function_of_the_user_s_are_those_of_the_batch():
    ours, plain = of_batch("function"), of_batch("function", False)
    for model in (ours, plain):
        model.fit(X, TARGETS, batch_size=10, shuffle=False, verbose=0)
    assert_near(ours.get_weights(), plain.get_weights(), atol=2e-5)
    other = of_batch("function", whole_batch="loss")
    other.fit(X, TARGETS, batch_size=10, shuffle=False, verbose=0)
    assert np.abs(other.get_weights()[0] - plain.get_weights()[0]).max() > 1e-4


@pytest.mark.law("L19")
@pytest.mark.parametrize(
    "does, words",
    [
        ("table", "can't assign to a variable and also look up rows of it"),
        ("rows", "can't assign to parts of a variable: assign to all of it"),
        ("python", "calls Python, which may draw"),
        ("matrix", "first axis of each must be the batch"),
    ],
)
def test_what_a_whole_batch_can_not_compute_again_is_refused(does, words):
    with pytest.raises(ValueError, match=words):
        of_batch(does).fit(X, TARGETS[:, None] if does == "matrix" else TARGETS, batch_size=9, verbose=0)


@pytest.mark.law("L19")
def test_python_in_the_call_of_a_whole_batch_is_warned_of_if_it_seems_to_run_each_time():
    model = of_batch("scale", whole_batch="loss", run_eagerly=True)
    with warned("runs once") as said:
        for scale in (1.0, 0.0):
            model.scale = scale
            loss = model.train_on_batch(X, TARGETS)
    assert len(said) == 1 and "`run_eagerly=True`" in said[0]
    assert abs(np.mean(np.asarray(loss)) - np.mean(TARGETS**2)) > 1e-3  # the scale is still 1
