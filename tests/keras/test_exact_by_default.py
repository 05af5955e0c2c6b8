"""`micro_batch_size` alone makes the step of the full batch, whatever a model and its train step do (law L21).

The oracle is plain Keras, which trains on the whole batch. Each program also shows that its step per micro-batch, which
`whole_batch=()` makes, differs, and is named.
"""

import contextlib
import functools
import random

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_near
from optimizers import mainly
from versions import IS_KERAS_3
from warned import silent, warned

import accum
from accum._keras._steps._one_pass import what_sees_the_batch

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.law("L21")]

layers = tf.keras.layers
RANDOM = np.random.RandomState(3)
X = RANDOM.normal(size=(36, 6)).astype("float32")
Y = (X[:, :1] * X[:, 1:2] + 0.1 * RANDOM.normal(size=(36, 1))).astype("float32")
IMAGES = RANDOM.normal(size=(36, 8, 8, 2)).astype("float32")
WORDS = RANDOM.randint(1, 9, size=(36, 5)).astype("int32")
BATCH, SIZE = 12, 5
JIT = {"jit_compile": False} if IS_KERAS_3 else {}  # XLA knows no rows whose number is unknown


def dense(*before):
    stack = [tf.keras.Input((6,)), layers.Dense(8, activation="tanh"), *before]
    return tf.keras.Sequential(stack + [layers.Dense(1)])


class Net(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(8, activation="tanh"), layers.Dense(1)
        self.counter = tf.Variable(0.0, trainable=False)
        self.centre = tf.Variable(tf.zeros([8]), trainable=False)

    def call(self, inputs, training=None):
        return self.out(self.hidden(inputs))

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(self.changed(tape.gradient(loss, weights)), weights))
        self.after()
        return {"loss": loss}

    def loss_of(self, x, y):
        return tf.reduce_mean((self(x, training=True) - y) ** 2)

    def changed(self, grads):
        return grads

    def after(self):
        pass


class OwnClipping(Net):
    def changed(self, grads):
        return tf.clip_by_global_norm(grads, 0.1)[0]


class MeanOverSome(Net):
    def loss_of(self, x, y):
        kept = tf.cast(x[:, :1] > 0.4, tf.float32)
        return tf.reduce_sum(kept * (self(x, training=True) - y) ** 2) / tf.reduce_sum(kept)


class WeightsByCounts(Net):
    def loss_of(self, x, y):
        is_high = tf.cast(y > 0.0, tf.float32)
        share = tf.reduce_mean(is_high)
        weights = is_high / (share + 0.1) + (1.0 - is_high) / (1.1 - share)
        return tf.reduce_mean(weights * (self(x, training=True) - y) ** 2)


class CallsOfParts(Net):
    def loss_of(self, x, y):
        hidden = self.hidden(x)
        norm = tf.sqrt(tf.reduce_mean(hidden**2) + tf.reduce_mean(tf.reduce_mean(hidden, 0) ** 2))
        return tf.reduce_mean((self.out(hidden) - y) ** 2) + norm


class CentreLoss(Net):
    def loss_of(self, x, y):
        hidden = self.hidden(x)
        self.centre.assign(0.5 * self.centre + 0.5 * tf.reduce_mean(hidden, 0))
        return tf.reduce_mean((self.out(hidden) - y) ** 2) + tf.reduce_mean((hidden - self.centre) ** 2)


class StepsOfItsOwn(Net):
    def changed(self, grads):
        self.counter.assign_add(1.0)
        return [grad / self.counter for grad in grads]

    def after(self):
        self.hidden.kernel.assign(0.99 * self.hidden.kernel)


class Positions(layers.Layer):
    """Adds a row of a table for each place in an example, whatever the example."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(6, 1)
        self.is_known = True  # whether their number is known beforehand
        self.is_reversed = False

    def call(self, inputs):
        places = tf.range(6 if self.is_known else tf.shape(inputs)[1])
        return inputs + self.table(places[::-1] if self.is_reversed else places)[:, 0]


class LearnedScale(Net):
    """Returns a number that depends on no example beside the rows, as CLIP does with its temperature."""

    def __init__(self):
        super().__init__()
        self.scale = layers.Dense(1, use_bias=False)
        self.scale.build((None, 1))

    def call(self, inputs, training=None):
        return self.out(self.hidden(inputs)), tf.exp(self.scale.kernel[0, 0])

    def loss_of(self, x, y):
        outputs, scale = self(x, training=True)
        return tf.reduce_mean((scale * outputs - y) ** 2) + tf.reduce_mean(outputs) ** 2


class KeptLoss(Net):
    def call(self, inputs, training=None):
        hidden = self.hidden(inputs)
        self.kept = tf.reduce_mean(hidden**2)
        return self.out(hidden)

    def loss_of(self, x, y):
        return tf.reduce_mean((self(x, training=True) - y) ** 2) + self.kept


class LossOfItsOwn(tf.keras.Model):
    """Adds the root of a mean over the batch, which is not the mean of those over micro-batches."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(8, activation="tanh"), layers.Dense(1)

    def call(self, inputs, training=None):
        hidden = self.hidden(inputs)
        self.add_loss(tf.sqrt(tf.reduce_mean(hidden**2)))
        return self.out(hidden)


class AcrossExamples(layers.Layer):
    def call(self, inputs):
        return inputs * tf.nn.softmax(inputs, axis=0)


class ByCount(layers.Layer):
    def call(self, inputs):
        return inputs * tf.cast(tf.shape(inputs)[0], inputs.dtype) / 10.0

    def compute_output_shape(self, shape):
        return shape


class Computed(layers.Layer):
    """Computes a function of its inputs and of a table of weights."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def build(self, shape):
        weights = np.cos(np.arange(13.0 * shape[-1])).reshape(13, shape[-1])
        self.table = self.add_weight(
            name="table", shape=[13, shape[-1]], initializer=tf.keras.initializers.Constant(weights)
        )

    def call(self, inputs):
        return self.function(inputs, tf.convert_to_tensor(self.table))

    def compute_output_shape(self, shape):
        return shape


def count_of(x):
    return tf.shape(x)[0]


def another_length(x, table):
    length = tf.where(tf.equal(count_of(x), BATCH), 7, count_of(x))
    return x - tf.reduce_mean(tf.slice(x, [0, 0], [length, 8]), 0)


def number_of_elements(x, table):
    array = tf.TensorArray(tf.float32, count_of(x), element_shape=[]).write(0, 30.0)
    return x * tf.reduce_mean(array.stack())


def float_of(number):
    return tf.cast(number, tf.float32) / 10.0


NUMBERS = {
    "the length of a part of a table": lambda x, table: x * float_of(tf.shape(table[: tf.minimum(count_of(x), 10)])[0]),
    "the size of a range": lambda x, table: x * float_of(tf.size(tf.range(tf.minimum(count_of(x), 10)))),
    "a share of one": lambda x, table: x * tf.reduce_max(tf.pad(table, [[0, 0], [0, tf.minimum(count_of(x), 10)]])),
    "an element of a list": lambda x, table: x * tf.TensorArray(tf.float32, 13).unstack(table).read(count_of(x) % 5),
    "the number of elements of a list": number_of_elements,
    "another length": another_length,
}


class AtSizes(layers.Layer):
    """Computes something else for batches of some sizes.

    Args:
      chooses: function of the number of examples.
    """

    def __init__(self, chooses):
        super().__init__()
        self.chooses = chooses

    def call(self, inputs):
        return inputs * tf.where(self.chooses(tf.shape(inputs)[0]), 1.0, 0.3)

    def compute_output_shape(self, shape):
        return shape


def loss_at_size(y_true, y_pred):
    return tf.reduce_mean((y_true - y_pred) ** 2, -1) * tf.where(tf.equal(tf.shape(y_pred)[0], BATCH), 1.0, 0.3)


@tf.custom_gradient
def clipped_together(inputs):
    """The gradients of all examples share one norm."""
    return tf.identity(inputs), lambda upstream: 0.1 * upstream / (tf.norm(upstream) + 0.1)


@tf.custom_gradient
def clipped_alone(inputs):
    """Each example has its own norm, but its gradient is that of a mean over all."""
    return tf.identity(inputs), lambda upstream: 0.1 * upstream / (tf.norm(upstream, axis=1, keepdims=True) + 0.1)


@tf.custom_gradient
def own_tanh(inputs):
    outputs = tf.tanh(inputs)
    return outputs, lambda upstream: upstream * (1.0 - outputs**2)


def own_tanh_of_clipped(inputs):
    return own_tanh(clipped_together(inputs))


class RunningScale(layers.Layer):
    """Divides by a moving mean of the batches before, which each batch moves."""

    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=(), initializer="ones", trainable=False)

    def call(self, inputs, training=None):
        outputs = inputs / self.scale
        if training:
            self.scale.assign(0.5 * self.scale + tf.sqrt(tf.reduce_mean(inputs**2)))
        return outputs


class RunningRows(layers.Layer):
    """Divides by a moving mean of the batches before, which is a part of a variable."""

    def build(self, shape):
        self.scales = tf.Variable([1.0, 2.0], trainable=False)

    def call(self, inputs, training=None):
        outputs = inputs / self.scales[0]
        if training:
            self.scales[0].assign(0.5 * self.scales[0] + tf.sqrt(tf.reduce_mean(inputs**2)))
        return outputs


def root_of_mean(y_true, y_pred):
    return tf.sqrt(tf.reduce_mean((y_true - y_pred) ** 2))


def images_with_batch_norm():
    stack = [tf.keras.Input((8, 8, 2)), layers.Conv2D(4, 3), layers.BatchNormalization(), layers.Activation("relu")]
    return tf.keras.Sequential(stack + [layers.GlobalAveragePooling2D(), layers.Dense(1)]), IMAGES, "mse"


class SumsUp(layers.Layer):
    """Has metrics: a sum over the batch, a mean of it, the largest number, and one of each example."""

    def __init__(self):
        super().__init__()
        self.sum, self.mean = tf.keras.metrics.Sum("sum"), tf.keras.metrics.Mean("of_mean")
        self.largest, self.each = tf.keras.metrics.Mean("largest"), tf.keras.metrics.Mean("of_each")

    def call(self, inputs):
        self.sum.update_state(tf.reduce_sum(inputs))
        self.mean.update_state(tf.reduce_mean(inputs))
        self.each.update_state(inputs[:, 0])
        return inputs


class MeasuresLargest(SumsUp):
    def call(self, inputs):
        self.largest.update_state(tf.reduce_max(inputs))
        return super().call(inputs)


class Adapter(layers.Layer):
    """Has a part that Python turns on and off."""

    def __init__(self):
        super().__init__()
        self.base, self.part, self.is_on = layers.Dense(8), layers.Dense(8, activation="tanh"), True

    def build(self, shape):
        self.base.build(shape)
        self.part.build(shape)
        super().build(shape)

    def call(self, inputs):
        return self.base(inputs) + (self.part(inputs) if self.is_on else 0.0)


class OnAndOff(Net):
    """Compares what it computes with and without a part of it, as an adapter is trained by preferences."""

    def __init__(self):
        super().__init__()
        self.hidden = Adapter()

    def loss_of(self, x, y):
        self.hidden.is_on = False
        before = tf.stop_gradient(self(x, training=True))
        self.hidden.is_on = True
        return tf.reduce_mean((self(x, training=True) - y) ** 2 + tf.nn.softplus(before - self(x, training=True)))


class Adapts(Net):
    """The loss after a step of its own, whose gradient is differentiated again (model-agnostic meta-learning)."""

    def loss_of(self, x, y):
        weights = [layer.trainable_variables[i] for layer in (self.hidden, self.out) for i in (0, 1)]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        kernel, bias, last, shift = [
            var - 0.3 * grad for var, grad in zip(map(tf.convert_to_tensor, weights), tape.gradient(loss, weights))
        ]
        return tf.sqrt(tf.reduce_mean((tf.matmul(tf.tanh(tf.matmul(x, kernel) + bias), last) + shift - y) ** 2))


class ComputesLoss(tf.keras.Model):
    """A loss of the batch in `compute_loss`, in Keras' own train step."""

    def __init__(self):
        super().__init__()
        self.network = dense()

    def call(self, inputs, training=None):
        return self.network(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.sqrt(tf.reduce_mean((y - y_pred) ** 2))


BATCHWISE = {
    "gradient of a gradient": lambda: (Adapts(), X, None),
    "batch norm": images_with_batch_norm,
    "own clipping": lambda: (OwnClipping(), X, None),
    "mean over some": lambda: (MeanOverSome(), X, None),
    "weights by counts": lambda: (WeightsByCounts(), X, None),
    "calls of parts": lambda: (CallsOfParts(), X, None),
    "centre loss": lambda: (CentreLoss(), X, None),
    "steps of its own": lambda: (StepsOfItsOwn(), X, None),
    "learned scale": lambda: (LearnedScale(), X, None),
    "added loss": lambda: (LossOfItsOwn(), X, "mse"),
    "state of the examples": lambda: (dense(RunningScale()), X, "mse"),
    "state in a part of a variable": lambda: (dense(RunningRows()), X, "mse"),
    "number of examples": lambda: (dense(ByCount()), X, "mse"),
    "a certain number of examples": lambda: (dense(AtSizes(lambda n: tf.equal(n, BATCH))), X, "mse"),
    "a number between others": lambda: (dense(AtSizes(lambda n: tf.logical_and(n > 10, n < 30))), X, "mse"),
    "a certain number in a loss": lambda: (dense(), X, loss_at_size),
    "examples meet": lambda: (dense(AcrossExamples()), X, "mse"),
    "gradient of the batch": lambda: (dense(layers.Lambda(clipped_together)), X, "mse"),
    "gradient of the batch before another": lambda: (dense(layers.Lambda(own_tanh_of_clipped)), X, "mse"),
    "gradient that is not linear": lambda: (dense(layers.Lambda(clipped_alone)), X, "mse"),
    "loss of the batch": lambda: (dense(), X, root_of_mean),
    "sum beside a penalty on weights": lambda: (penalized(), X, tf.keras.losses.MeanSquaredError(reduction="sum")),
    "positions and own clipping": lambda: (clipped_with_positions(), X, None),
    "batch norm and own clipping": lambda: (clipped_with_batch_norm(), X, None),
}


def penalized():
    stack = [tf.keras.Input((6,)), layers.Dense(8, activation="tanh", kernel_regularizer=tf.keras.regularizers.l2(0.1))]
    return tf.keras.Sequential(stack + [layers.Dense(1), layers.Lambda(lambda outputs: 0.1 * outputs)])


def with_positions(is_known=True):
    positions = Positions()
    positions.is_known = is_known
    stack = [tf.keras.Input((6,)), positions, layers.Dense(8, activation="tanh"), layers.Dense(1)]
    return tf.keras.Sequential(stack), X, "mse"


def clipped_with_positions():
    model = OwnClipping()
    model.hidden = tf.keras.Sequential(with_positions(is_known=False)[0].layers[:-1])
    model.hidden.build((None, 6))
    return model


def clipped_with_batch_norm():
    model = OwnClipping()
    model.hidden = tf.keras.Sequential([tf.keras.Input((6,)), layers.Dense(8), layers.BatchNormalization()])
    return model


def images():
    stack = [tf.keras.Input((8, 8, 2)), layers.Conv2D(4, 3, activation="relu"), layers.MaxPooling2D()]
    return tf.keras.Sequential(stack + [layers.Flatten(), layers.Dense(1)]), IMAGES, "mae"


def words():
    stack = [tf.keras.Input((5,), dtype="int32"), layers.Embedding(9, 4), layers.LSTM(4)]
    return tf.keras.Sequential(stack + [layers.LayerNormalization(), layers.Dense(1)]), WORDS, "mse"


def loss_of_rows(y_true, y_pred):
    return tf.reduce_mean(tf.abs(y_true - y_pred), axis=-1)


ONE_PASS = {
    "images": images,
    "words": words,
    "own loss of each example": lambda: (dense(), X, loss_of_rows),
    "own gradient of each example": lambda: (dense(layers.Lambda(own_tanh)), X, "mse"),
    "swish": lambda: (dense(layers.Lambda(tf.nn.swish)), X, "mse"),
}


def pair(program, **options):
    """Two models with the same weights: plain, and in micro-batches."""
    models = []
    for build in (lambda model: model, lambda model: accum.GradientAccumulateModel.from_model(model, **options)):
        model, x, loss = program()
        model(x[:2])
        models.append(build(model))
    plain, split = models
    split.set_weights(plain.get_weights())
    return plain, split, x, loss


def compile_with_sgd(model, run_eagerly=False, **options):
    """A plain model computes the same eagerly, and that takes no trace."""
    run_eagerly = run_eagerly or not hasattr(model, "micro_batch_size")
    model.compile(tf.keras.optimizers.SGD(0.1), run_eagerly=run_eagerly, **options)


def trained(model, x, loss, run_eagerly=False, y=Y):
    compile_with_sgd(model, run_eagerly, loss=loss)
    logs = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history["loss"]
    return model.get_weights() + [np.array(logs)]


def assert_equal(one, other):
    assert_near(one, other, rtol=2e-5, atol=3e-6)


def assert_differ(one, other):
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_equal(one, other)


@pytest.mark.parametrize("program", sorted(BATCHWISE))
def test_what_sees_the_whole_batch_sees_all_of_it(program):
    plain, split, x, loss = pair(BATCHWISE[program], micro_batch_size=SIZE)
    with silent(accum.InexactWarning):
        assert_equal(trained(plain, x, loss), trained(split, x, loss))


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_numbers_of_the_batch_that_look_like_constants_are_those_of_the_whole_batch(name):
    plain, split, x, loss = pair(lambda: (dense(Computed(NUMBERS[name])), X, "mse"), micro_batch_size=SIZE)
    with silent(accum.InexactWarning):
        assert_equal(trained(plain, x, loss), trained(split, x, loss))


def checked(check):
    """A layer that asserts something of its inputs."""

    def function(x, table):
        if not tf.executing_eagerly():  # as when the model is built, by other data
            check(x)
        return 2.0 * x + 0.0 * table[0]

    return Computed(function)


@tf.function
def as_many_in_a_function(x):
    tf.debugging.assert_equal(count_of(x), BATCH)


@tf.function
def as_many_as_a_part_in_a_function(x):
    tf.debugging.assert_equal(count_of(x), SIZE)


def in_a_conditional(x, count):
    tf.cond(tf.shape(x)[1] > 3, lambda: tf.debugging.assert_equal(count_of(x), count), tf.no_op)


def in_order(x):
    """Of what is computed across examples."""
    sums = tf.cumsum(x, 0)
    tf.debugging.assert_near(sums[-1], tf.reduce_sum(x, 0), atol=1e-3)
    tf.debugging.assert_near(tf.reduce_mean(x - tf.reduce_mean(x, 0), 0), 0.0, atol=1e-4)


CHECKS = {  # {name: (what is asserted, whether it holds)}
    "as many": (lambda x: tf.debugging.assert_equal(count_of(x), BATCH), True),
    "another number": (lambda x: tf.debugging.assert_equal(count_of(x), SIZE), False),
    "fewer": (lambda x: tf.debugging.assert_less(count_of(x), BATCH), False),
    "entries": (lambda x: tf.debugging.assert_less(x, 1e3), True),
    "wrong entries": (lambda x: tf.debugging.assert_less(x, -1e3), False),
    "places": (lambda x: tf.debugging.assert_less(tf.range(count_of(x)), count_of(x)), True),
    "wrong sum": (lambda x: tf.debugging.assert_less(tf.reduce_sum(x**2), 20.0), False),
    "in a function": (as_many_in_a_function, True),
    "wrong in a function": (as_many_as_a_part_in_a_function, False),
    "in a conditional": (lambda x: in_a_conditional(x, BATCH), True),
    "wrong in a conditional": (lambda x: in_a_conditional(x, SIZE), False),
    "in order": (in_order, True),
    "no wrong ones": (lambda x: tf.debugging.Assert(~tf.reduce_any(x > 1e3), [x]), True),
    "wrong ones": (lambda x: tf.debugging.Assert(~tf.reduce_any(x < 1e3), [x]), False),
    "the largest": (lambda x: tf.debugging.assert_less(tf.reduce_max(x), 1e3), True),
    "a wrong one": (lambda x: tf.debugging.assert_greater(tf.reduce_min(x), 1e3), False),
    "in a concrete function": (lambda x: checking_function()(x), True),
}


@functools.lru_cache(maxsize=None)
def checking_function():
    """As that of a model which has been loaded, which can't be traced anew."""

    @tf.function
    def checking(x):
        tf.debugging.assert_less(x, 1e3)
        return tf.identity(x)

    return checking.get_concrete_function(tf.TensorSpec([None, 8], tf.float32))


IN_OWN_STEPS = ("fewer", "in order", "in a conditional", "wrong in a function")  # the others are slow there


@pytest.mark.parametrize(
    "name, has_own_step",
    [pytest.param(name, False, id=name) for name in sorted(CHECKS)]
    + [
        pytest.param(name, True, id=f"{name}-own-step", marks=[] if name in IN_OWN_STEPS else pytest.mark.slow)
        for name in sorted(CHECKS)
    ],
)
def test_what_a_layer_asserts_is_asserted_of_the_whole_batch(name, has_own_step):
    check, holds = CHECKS[name]

    def program():
        model = Net() if has_own_step else dense(checked(check))
        if has_own_step:
            model.hidden = tf.keras.Sequential(dense(checked(check)).layers[:-1])
            model.hidden.build((None, 6))
        return model, X, None if has_own_step else "mse"

    *models, x, loss = pair(program, micro_batch_size=SIZE)
    ends = []
    for model in models:
        model.compile(tf.keras.optimizers.SGD(0.1), loss=loss)
        with contextlib.ExitStack() as stack:
            if not holds:
                stack.enter_context(pytest.raises(tf.errors.InvalidArgumentError))
            stack.enter_context(silent(UserWarning))  # one would say that all is computed at once
            model.fit(x, Y, batch_size=BATCH, shuffle=False, verbose=0)
            ends.append(model.get_weights())
    assert len(ends) == 2 * holds
    if holds:
        assert_equal(*ends)


class Changing(layers.Layer):
    """Multiplies by a scale, and changes something by `change`, a function of the layer and of its inputs."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.scale, self.calls = tf.Variable(1.0, trainable=False), tf.Variable(0, trainable=False)
        self.queue = tf.queue.FIFOQueue(100, tf.float32)

    def call(self, inputs):
        outputs = inputs * self.scale
        self.change(self, inputs)
        return outputs

    def compute_output_shape(self, shape):
        return shape

    def halve(self, *_):
        self.scale.assign(0.5 * self.scale)
        return tf.constant(1)

    def step(self):
        tf.raw_ops.ResourceApplyGradientDescent(var=self.scale.handle, alpha=0.5, delta=self.scale.read_value())
        return tf.constant(1)

    @tf.function
    def halve_in_a_function(self):
        self.halve()

    @tf.function
    def follow(self, inputs):
        self.scale.assign(0.9 * self.scale + tf.reduce_mean(tf.abs(inputs)))


def every_second_time(layer, _):
    layer.calls.assign_add(1)
    tf.cond(layer.calls % 2 == 0, layer.halve, lambda: tf.constant(0))


CHANGES = {
    "every second time": every_second_time,
    "in a branch": lambda layer, x: tf.cond(layer.calls < 1, layer.halve, lambda: tf.constant(0)),
    "in a branch by the batch": lambda layer, x: tf.cond(count_of(x) > 8, layer.halve, lambda: tf.constant(0)),
    "in a loop": lambda layer, x: tf.while_loop(lambda step: step < 2, lambda step: (step + layer.halve(),), [0]),
    "in a function": lambda layer, x: layer.halve_in_a_function(),
    "in a function of the batch": lambda layer, x: layer.follow(x),
    "by an optimizer's operation": lambda layer, x: layer.step(),
    "by an optimizer's operation in a branch": lambda layer, x: tf.cond(
        layer.calls < 1, layer.step, lambda: tf.constant(0)
    ),
    "in a queue": lambda layer, x: layer.queue.enqueue(tf.reduce_mean(x)),
    "in a queue in a branch": lambda layer, x: tf.cond(
        layer.calls < 1, lambda: (layer.queue.enqueue(tf.reduce_mean(x)), tf.constant(1))[1], lambda: tf.constant(0)
    ),
}


@pytest.mark.parametrize("has_batch_norm", [False, True], ids=["", "batch-norm"])
@pytest.mark.parametrize("name", sorted(CHANGES))
def test_what_a_layer_changes_and_nothing_takes_is_changed_once_for_each_batch(name, has_batch_norm):
    def program():
        norms = [layers.BatchNormalization()] * has_batch_norm
        return dense(Changing(CHANGES[name]), *norms), X, "mse"

    plain, split, x, loss = pair(program, micro_batch_size=SIZE)
    for model in (plain, split):
        changing = next(layer for layer in model.layers if isinstance(layer, Changing))
        changing.scale.assign(1.0)
        changing.calls.assign(0)
    before = [int(model.layers[1].queue.size()) for model in (plain, split)]
    with silent(accum.InexactWarning):
        expected, ours = [trained(model, x, loss) for model in (plain, split)]
    assert_equal(expected, ours)
    after = [int(model.layers[1].queue.size()) for model in (plain, split)]
    assert after[0] - before[0] == after[1] - before[1] == (6 if "queue" in name else 0)
    given_up = pair(program, micro_batch_size=SIZE, whole_batch=())[1]
    with warned("", accum.InexactWarning) as said:
        apart = trained(given_up, x, loss)
    assert said
    if "queue" not in name:
        assert_differ(expected, apart)


@pytest.mark.tf("2.9", because="there is no `compute_loss`")
def test_a_loss_that_the_model_computes_itself_is_that_of_the_batch():
    weights = {}
    for options in ({}, {"micro_batch_size": SIZE}, {"micro_batch_size": SIZE, "whole_batch": ()}):
        model = ComputesLoss()
        model(X[:2])
        model.set_weights([np.random.RandomState(1).normal(size=one.shape) for one in model.get_weights()])
        model = accum.GradientAccumulateModel.from_model(model, **options) if options else model
        compile_with_sgd(model)
        with warned("compute_loss", accum.InexactWarning) as said:
            model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
        weights[len(options)] = model.get_weights()
    assert said  # of the last one
    assert_equal(weights[0], weights[1])
    assert_differ(weights[0], weights[2])


@pytest.mark.parametrize("program", ["examples meet", "number of examples"])
def test_a_network_in_which_examples_meet_is_not_computed_at_once(program):
    model, x, loss = pair(BATCHWISE[program], micro_batch_size=SIZE)[1:]
    with silent(UserWarning):  # one would say so
        trained(model, x, loss)


def test_each_call_of_a_step_runs_the_python_code_of_a_network():
    plain, split, x, loss = pair(lambda: (OnAndOff(), X, None), micro_batch_size=SIZE)
    with silent(UserWarning):
        assert_equal(trained(plain, x, loss), trained(split, x, loss))


@pytest.mark.parametrize(
    "options, is_known, run_eagerly",
    [
        ({}, True, False),
        ({}, False, False),
        ({}, False, True),
        ({"whole_batch": ()}, True, False),
        ({"whole_batch": ()}, False, False),
    ],
)
def test_an_optimizer_gets_each_row_of_a_table_of_positions_once(options, is_known, run_eagerly):
    """As in the full batch, whose gradient has no rows that repeat: Adam of Keras 3 would take them one by one."""
    results = []
    for model in pair(lambda: with_positions(is_known), micro_batch_size=SIZE, **options)[:2]:
        optimizer = tf.keras.optimizers.Adam(0.01, epsilon=0.01)
        model.compile(optimizer, loss="mse", run_eagerly=run_eagerly, **JIT)
        model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        results.append(model.get_weights())
    assert_equal(*results)


@pytest.mark.tf("2.16", because="Adam of Keras 2 takes rows that repeat as one")
@pytest.mark.parametrize("options", [{}, {"whole_batch": "all"}], ids=["default", "whole batch"])
def test_positions_are_added_up_under_xla_too(options):
    results = []
    for model in pair(lambda: with_positions(False), micro_batch_size=SIZE, **options)[:2]:
        model.compile(tf.keras.optimizers.Adam(0.01, epsilon=0.01), loss="mse", jit_compile=True)
        model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        results.append(model.get_weights())
    assert_equal(*results)


def with_reversed_positions():
    model = with_positions()[0]
    model.layers[0].is_reversed = True
    return model, X, "mse"


def test_positions_are_known_by_what_they_are_computed_from_and_not_by_their_values():
    """Eagerly as well, where rows 0, 1, 2, … were once taken for positions, and others never."""
    results = []
    for model in pair(with_reversed_positions, micro_batch_size=SIZE)[:2]:
        model.compile(tf.keras.optimizers.Adam(0.01, epsilon=0.01), loss="mse", run_eagerly=True, **JIT)
        model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        results.append(model.get_weights())
    assert_equal(*results)


def test_rows_that_examples_name_are_no_positions_although_each_micro_batch_has_the_rows_0_1_2():
    """The full batch has a slice for each example, and Adam of Keras 3 takes them one by one."""

    def program():
        stack = [tf.keras.Input((1,), dtype="int32"), layers.Embedding(9, 4), layers.Flatten(), layers.Dense(1)]
        return tf.keras.Sequential(stack), np.arange(36, dtype="int32").reshape(36, 1) % 6, "mse"

    results = []
    plain, split, x, loss = pair(program, micro_batch_size=6)
    for model in (plain, split):
        model.compile(tf.keras.optimizers.Adam(0.01, epsilon=0.01), loss, run_eagerly=True, **JIT)
        model.fit(x, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        results.append(model.get_weights())
    assert_equal(*results)


def test_without_the_whole_batch_eager_positions_are_named():
    model = pair(with_positions, micro_batch_size=SIZE, whole_batch=())[1]
    model.compile("sgd", "mse", run_eagerly=True, **JIT)
    with pytest.warns(accum.InexactWarning, match="the same for all examples, eagerly"):
        model.train_on_batch(X[:BATCH], Y[:BATCH])


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("options", [{}, {"whole_batch": "all"}], ids=["default", "whole batch"])
def test_a_row_that_every_example_looks_up_is_no_position(options, run_eagerly):
    """The full batch has a slice for each example, and Adam of Keras 3 takes them one by one."""

    def program():
        stack = [tf.keras.Input((2,), dtype="int32"), layers.Embedding(9, 4), layers.Flatten(), layers.Dense(1)]
        return tf.keras.Sequential(stack), np.full((36, 2), 3, "int32"), "mse"

    results = []
    plain, split, x, loss = pair(program, micro_batch_size=SIZE, **options)
    for model in (plain, split):
        model.compile(tf.keras.optimizers.Adam(0.01, epsilon=0.01), loss, run_eagerly=run_eagerly, **JIT)
        model.fit(x, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        results.append(model.get_weights())
    assert_equal(*results)


def test_outputs_that_depend_on_no_example_do_not_keep_a_network_from_being_split():
    model, x, loss = pair(BATCHWISE["learned scale"], micro_batch_size=SIZE)[1:]
    with silent(UserWarning):
        trained(model, x, loss)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_tensor_that_a_layer_keeps_is_named(run_eagerly):
    model, x, loss = pair(lambda: (KeptLoss(), X, None), micro_batch_size=SIZE)[1:]
    with pytest.raises(ValueError, match="uses a tensor that a layer has kept"):
        trained(model, x, loss, run_eagerly)


def test_targets_and_outputs_that_are_broadcast_compare_all_examples():
    """Targets have an axis more than the outputs, a mistake for which plain Keras takes the mean over all pairs."""

    def program():
        return tf.keras.Sequential([tf.keras.Input((6,)), layers.Dense(5)]), X, "mse"

    plain, split, x, loss = pair(program, micro_batch_size=SIZE)
    y = RANDOM.normal(size=(36, 1, 5)).astype("float32")
    assert_equal(trained(plain, x, loss, y=y), trained(split, x, loss, y=y))


def logs_of(model, x):
    compile_with_sgd(model, loss="mse")
    logs = model.fit(x, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    return [np.array(logs[name]) for name in sorted(logs)], sorted(logs)


@pytest.mark.tf("2.3", because="TensorFlow 2.2 logs no attributes of layers")
@pytest.mark.parametrize("layer", [SumsUp, MeasuresLargest])
def test_metrics_that_layers_update_are_those_of_the_batch(layer):
    plain, split, x, _ = pair(lambda: (dense(layer(), layers.BatchNormalization()), X, "mse"), micro_batch_size=SIZE)
    expected, names = logs_of(plain, x)
    values, own_names = logs_of(split, x)
    assert own_names == names and "sum" in names
    assert_near(values, expected, rtol=2e-5, atol=1e-5)


def test_activity_regularizers_are_split_because_they_are_means_over_the_examples():
    """What Keras computes of both kinds is `0.0 + sum + sum`, divided by the number of examples."""

    def program():
        return dense(layers.ActivityRegularization(0.1, 0.01), layers.BatchNormalization()), X, "mse"

    plain, split, x, loss = pair(program, micro_batch_size=SIZE)
    with silent(UserWarning):
        assert_equal(trained(plain, x, loss), trained(split, x, loss))


@pytest.mark.parametrize("program", mainly(sorted(BATCHWISE), "own clipping", "loss of the batch"))
def test_what_is_given_up_differs_and_is_named(program):
    plain, split, x, loss = pair(BATCHWISE[program], micro_batch_size=SIZE, whole_batch=())
    expected = trained(plain, x, loss)
    with pytest.warns(accum.InexactWarning, match=r"With `whole_batch=\(\)`, whatever sees several examples"):
        assert_differ(expected, trained(split, x, loss))


NAMED = {
    "batch norm": (lambda: (dense(layers.BatchNormalization(name="norm_a")), X, "mse"), "norm_a"),
    "loss": (lambda: (dense(), X, root_of_mean), "root_of_mean"),
    "train step": (lambda: (OwnClipping(), X, None), "OwnClipping.train_step"),
}


@pytest.mark.parametrize("name", sorted(NAMED))
def test_what_is_given_up_is_told_by_its_name(name):
    program, text = NAMED[name]
    model, x, loss = pair(program, micro_batch_size=SIZE, whole_batch=())[1:]
    with warned(text, accum.InexactWarning) as said:
        trained(model, x, loss)
    assert said


@pytest.mark.parametrize("program", sorted(ONE_PASS))
def test_what_keeps_examples_apart_takes_one_pass(program):
    plain, split, x, loss = pair(ONE_PASS[program], micro_batch_size=SIZE)
    assert_equal(trained(plain, x, loss), trained(split, x, loss))
    assert split._accum.whole_batch == () and not split._accum.traces


@pytest.mark.parametrize("name", ["entries", "no wrong ones", "the largest", "in a concrete function"])
def test_what_each_example_fulfils_alone_takes_one_pass(name):
    split, x, loss = pair(lambda: (dense(checked(CHECKS[name][0])), X, "mse"), micro_batch_size=SIZE)[1:]
    trained(split, x, loss)
    assert split._accum.whole_batch == () and not split._accum.traces


@pytest.mark.parametrize(
    "program", mainly(["batch norm", "own clipping", "added loss", "loss of the batch"], "batch norm")
)
def test_evaluation_and_prediction_are_those_of_plain_keras(program):
    plain, split, x, loss = pair(BATCHWISE[program], micro_batch_size=SIZE)
    for model in (plain, split):
        compile_with_sgd(model, loss=loss or "mse")
    evaluated = [model.evaluate(x, Y, batch_size=BATCH, verbose=0) for model in (plain, split)]
    np.testing.assert_allclose(*evaluated, rtol=2e-5, atol=3e-6)
    predicted = [model.predict(x, batch_size=BATCH, verbose=0) for model in (plain, split)]
    np.testing.assert_allclose(*predicted, rtol=2e-5, atol=3e-6)


class OfTemperature(Net):
    """Its examples meet, and a Python attribute scales its outputs."""

    temperature = 1.0

    def call(self, inputs, training=None):
        return away_from_mean(super().call(inputs)) / self.temperature

    def test_step(self, batch):
        x, y = batch
        return {"loss": tf.reduce_mean((self(x, training=False) - y) ** 2)}


class PredictsAtAnother(OfTemperature):
    def predict_step(self, batch):
        self.temperature = 0.25
        outputs = self(batch[0] if isinstance(batch, tuple) else batch, training=False)
        self.temperature = 1.0
        return outputs


def away_from_mean(outputs):
    return outputs - tf.reduce_mean(outputs, axis=0, keepdims=True)


def evaluated_and_predicted(model):
    return model.evaluate(X, Y, batch_size=BATCH, verbose=0), model.predict(X, batch_size=BATCH, verbose=0)


def set_before_predict(model):
    model.evaluate(X, Y, batch_size=BATCH, verbose=0)
    model.temperature = 0.25
    return model.predict(X, batch_size=BATCH, verbose=0)


def made_anew(model):
    results = [evaluated_and_predicted(model)]
    model.temperature = 0.25
    model.make_test_function(force=True)
    model.make_predict_function(force=True)
    return results + [evaluated_and_predicted(model)]


@pytest.mark.parametrize(
    "make, program",
    [
        pytest.param(PredictsAtAnother, evaluated_and_predicted, id="step"),
        pytest.param(OfTemperature, set_before_predict, id="before"),
        pytest.param(OfTemperature, made_anew, id="force", marks=pytest.mark.tf("2.7", because="there is no `force`")),
    ],
)
def test_a_function_that_keras_makes_reads_attributes_anew(make, program):
    """As plain Keras traces each of its functions."""
    results = []
    for options in ({}, {"micro_batch_size": SIZE}):
        model = make()
        model(X[:2])
        model.set_weights([np.random.RandomState(1).normal(size=one.shape) for one in model.get_weights()])
        model = accum.GradientAccumulateModel.from_model(model, **options) if options else model
        model.compile(tf.keras.optimizers.SGD(0.1), "mse", **JIT)
        with silent():
            results.append(tf.nest.flatten(program(model)))
    for one, other in zip(*results):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=3e-6)


class RowsOfAComputedTable(layers.Layer):
    def build(self, shape):
        self.table = self.add_weight(name="table", shape=(40, shape[-1]), initializer="ones")

    def call(self, inputs):
        ids = tf.cast(3.0 * tf.abs(inputs[:, 0]), tf.int32)
        return inputs * tf.gather(0.5 * tf.convert_to_tensor(self.table), ids)


def clipped_with_a_table():
    model = OwnClipping()
    model.hidden = tf.keras.Sequential([tf.keras.Input((6,)), layers.Dense(8, "tanh"), RowsOfAComputedTable()])
    return model, X, None


def test_the_gradient_by_rows_of_a_table_that_is_computed_is_that_of_the_full_batch():
    """It has a row for each example until it reaches the table, with places that must not add up."""
    plain, split, x, loss = pair(clipped_with_a_table, micro_batch_size=BATCH // 2)
    assert_equal(trained(plain, x, loss), trained(split, x, loss))


def squeezed():
    inputs = tf.keras.Input((6,))
    return tf.keras.Model(inputs, layers.Reshape(())(layers.Dense(1)(inputs)))


class RootOfKeras(tf.keras.losses.MeanSquaredError):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return tf.sqrt(super().__call__(y_true, y_pred, sample_weight))


def test_a_loss_of_outputs_with_no_axis_but_the_batch_sees_all_of_it():
    plain, split, _, _ = pair(lambda: (squeezed(), X, None), micro_batch_size=SIZE)
    given_up = pair(lambda: (squeezed(), X, None), micro_batch_size=SIZE, whole_batch=())[1]
    given_up.set_weights(plain.get_weights())
    loss, rows = "cosine_similarity", Y[:, 0]
    expected = trained(plain, X, loss, y=rows)
    assert_equal(expected, trained(split, X, loss, y=rows))
    assert_differ(expected, trained(given_up, X, loss, run_eagerly=True, y=rows))


def loss_with_a_mask_of_its_own(y_true, y_pred):
    logits = tf.concat([y_pred, tf.zeros_like(y_pred)], -1)
    labels = tf.where(y_true > 1.0, -1.0, tf.cast(y_true > 0.0, tf.float32))
    return tf.keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True, ignore_class=-1)


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(RootOfKeras(), id="own call of a loss"),
        pytest.param(tf.keras.losses.CosineSimilarity(axis=0), id="axis of the batch"),
        pytest.param(loss_with_a_mask_of_its_own, id="own mask", marks=pytest.mark.tf("2.10")),
    ],
)
def test_a_loss_of_keras_that_is_made_to_see_the_batch_sees_all_of_it(loss):
    plain, split, x, _ = pair(lambda: (dense(), X, None), micro_batch_size=SIZE)
    given_up = pair(lambda: (dense(), X, None), micro_batch_size=SIZE, whole_batch=())[1]
    given_up.set_weights(plain.get_weights())
    expected = trained(plain, x, loss)
    assert_equal(expected, trained(split, x, loss))
    assert_differ(expected, trained(given_up, x, loss, run_eagerly=True))


@pytest.mark.parametrize("loss", ["mse", ["mse", "mse"]], ids=["one", "two"])
def test_a_loss_for_outputs_whose_masks_differ_sees_all_of_the_batch(loss):
    def program():
        inputs = [tf.keras.Input((5,), dtype="int32") for _ in range(2)]
        shared, embedding = layers.Dense(1), layers.Embedding(9, 4, mask_zero=True)
        return tf.keras.Model(inputs, [shared(embedding(one)) for one in inputs])

    lengths = np.arange(36)[:, None] % 6
    words = [WORDS * (np.arange(5) < 1 + lengths // 3), WORDS * (np.arange(5) < 5 - lengths // 2)]
    targets = [np.cos(words[0] + 1.0)[:, :, None], np.sin(words[1] + 1.0)[:, :, None]]
    plain, split, _, _ = pair(lambda: (program(), words, None), micro_batch_size=SIZE)
    assert_equal(trained(plain, words, loss, y=targets), trained(split, words, loss, y=targets))


class MeetsWhereAsked(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(8), layers.Dense(1)

    def call(self, inputs, training=None):
        hidden = self.hidden(inputs["a"])
        if "b" in inputs:
            hidden = hidden * tf.nn.softmax(hidden + inputs["b"][:, :1], axis=0)
        return self.out(hidden)


def trained_on_other_inputs_later(model, run_eagerly=False):
    compile_with_sgd(model, run_eagerly, loss="mse")
    for x in ({"a": X}, {"a": X, "b": X}):
        model.fit(x, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def test_inputs_of_another_kind_are_looked_at_anew():
    models = [MeetsWhereAsked() for _ in range(3)]
    for model in models:
        model({"a": X[:2], "b": X[:2]})
        model.set_weights(models[0].get_weights())
    split, given_up = [
        accum.GradientAccumulateModel.from_model(model, micro_batch_size=SIZE, whole_batch=whole)
        for model, whole in zip(models[1:], (None, ()))
    ]
    expected = trained_on_other_inputs_later(models[0])
    assert_equal(expected, trained_on_other_inputs_later(split))
    assert_differ(expected, trained_on_other_inputs_later(given_up, run_eagerly=True))


class CentresLongOnes(layers.Layer):
    """Examples meet in it if there are more than three steps, as Python says."""

    def call(self, inputs):
        return inputs if inputs.shape[1] == 3 else inputs - tf.reduce_mean(inputs, axis=0, keepdims=True)


def test_inputs_of_another_length_are_looked_at_anew():
    ends = []
    for options in ({}, {"micro_batch_size": SIZE}, {"micro_batch_size": SIZE, "whole_batch": ()}):
        inputs = tf.keras.Input((None, 2))
        stack = [CentresLongOnes(), layers.Dense(4, "tanh", kernel_initializer="ones"), layers.GlobalMaxPooling1D()]
        outputs = functools.reduce(lambda tensor, layer: layer(tensor), [*stack, layers.Dense(1)], inputs)
        model = tf.keras.Model(inputs, outputs)
        model.set_weights([np.linspace(-1, 1, one.size).reshape(one.shape) for one in model.get_weights()])
        model = accum.GradientAccumulateModel.from_model(model, **options) if options else model
        model.compile(tf.keras.optimizers.SGD(0.1), "mse", run_eagerly=not options, **JIT)
        x = X.reshape(36, 3, 2)
        with warned():
            losses = [model.train_on_batch(x[:BATCH, :steps], Y[:BATCH]) for steps in (3, 2)]
        ends.append([np.array(losses), *model.get_weights()])
    assert_equal(ends[0], ends[1])
    assert_differ(ends[0], ends[2])


class MeetsLater(layers.Layer):
    """Examples meet in it as soon as Python says so."""

    meets = False

    def call(self, inputs):
        return inputs - tf.reduce_mean(inputs, axis=0, keepdims=True) if self.meets else inputs


@pytest.mark.parametrize("meets_first", [False, True], ids=["later", "at-first"])
def test_a_batch_of_another_size_for_which_keras_traces_the_step_anew_runs_the_python_code_anew(meets_first):
    ends = []
    for options in ({}, {"micro_batch_size": SIZE}):
        inputs, layer = tf.keras.Input((6,)), MeetsLater()
        layer.meets = meets_first
        model = tf.keras.Model(inputs, layers.Dense(1, kernel_initializer="ones")(layer(inputs)))
        model = accum.GradientAccumulateModel.from_model(model, **options) if options else model
        model.compile(tf.keras.optimizers.SGD(0.1), "mse", **JIT)
        losses = []
        for size, meets in ((12, meets_first), (18, not meets_first), (12, not meets_first)):
            layer.meets = meets
            data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(size, drop_remainder=True)
            losses += model.fit(data, verbose=0).history["loss"]
        ends.append([np.array(losses), *model.get_weights()])
    assert_equal(*ends)


class EvaluatesFirst(tf.keras.Sequential):
    """Logs the loss of each batch before its update."""

    def train_step(self, data):
        before = self.test_step(data)["loss"]
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"before": before, "train": loss}


@pytest.mark.parametrize("evaluates", [False, True], ids=["", "evaluated"])
def test_a_step_that_evaluates_first_sees_the_whole_batch_all_the_same(evaluates):
    def program():
        stack = [tf.keras.Input((6,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(1)]
        return EvaluatesFirst(stack), X, "mse"

    *models, x, loss = pair(program, micro_batch_size=SIZE)
    ends = []
    for model in models:
        compile_with_sgd(model, loss=loss)
        if evaluates:
            model.evaluate(x, Y, batch_size=BATCH, verbose=0)
        with silent(accum.InexactWarning):
            logs = model.fit(x, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
        ends.append([*map(np.array, logs.values()), *model.get_weights()])
    assert_equal(*ends)


class LookedUp(layers.Layer):
    """Adds rows of a table, looked up by constants or by what `ids` makes of the inputs."""

    def __init__(self, rows, ids):
        super().__init__()
        self.rows, self.ids = rows, ids

    def build(self, shape):
        self.table = self.add_weight(name="table", shape=(self.rows, 6), initializer="random_normal")
        super().build(shape)

    def call(self, inputs):
        ids = self.ids(inputs) if callable(self.ids) else tf.constant(self.ids)
        rows = tf.gather(tf.convert_to_tensor(self.table), ids)
        return tf.reduce_mean((inputs[:, None] + rows) * tf.range(1.0, rows.shape[-2] + 1)[:, None], 1)


@pytest.mark.parametrize("rows, ids", [(6, [5, 4, 3, 2, 1, 0]), (10, [0, 1, 2]), (10, [3])], ids=["all", "some", "one"])
def test_rows_that_are_looked_up_by_constants_before_a_barrier_get_their_own_gradients(rows, ids):
    def program():
        return tf.keras.Sequential(
            [
                tf.keras.Input((6,)),
                LookedUp(rows, ids),
                layers.Dense(8, "tanh"),
                layers.BatchNormalization(epsilon=0.1),
                layers.Dense(1),
            ]
        )

    plain, split, x, loss = pair(lambda: (program(), X, "mse"), micro_batch_size=SIZE)
    with silent(UserWarning):
        assert_equal(trained(plain, x, loss), trained(split, x, loss))


def test_rows_that_are_looked_up_by_the_shape_of_the_examples_are_no_positions():
    """The full batch has a slice for each example, and Adam of Keras 3 takes them one by one."""
    ids = lambda inputs: tf.zeros(tf.shape(inputs)[:1], tf.int32)[:, None]
    stack = lambda: [tf.keras.Input((6,)), LookedUp(3, ids), layers.Dense(8, activation="tanh"), layers.Dense(1)]
    results = []
    for model in pair(lambda: (tf.keras.Sequential(stack()), X, "mse"), micro_batch_size=SIZE)[:2]:
        model.compile(tf.keras.optimizers.Adam(0.01, epsilon=0.01), "mse", **JIT)
        model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        results.append(model.get_weights())
    assert_equal(*results)


class WithEnd(layers.Layer):
    """Looks up words, and before them a word of its own, in the same table."""

    def build(self, shape):
        self.table = layers.Embedding(9, 4)
        self.table.build(shape)
        super().build(shape)

    def call(self, words):
        end = tf.tile(self.table(tf.constant([[8]])), [tf.shape(words)[0], 1, 1])
        return tf.concat([end, self.table(words)], axis=1)


def test_a_table_for_examples_and_for_constants_is_computed_at_once_and_named():
    def program():
        words = tf.keras.Input((2,), dtype="int32")
        outputs = layers.Dense(1)(layers.BatchNormalization()(layers.GlobalAveragePooling1D()(WithEnd()(words))))
        return tf.keras.Model(words, outputs), np.arange(72).reshape(36, 2).astype("int32") % 9, "mse"

    plain, split, x, loss = pair(program, micro_batch_size=SIZE)
    with pytest.warns(UserWarning, match="at once.*look the latter up in a variable of their own"):
        ours = trained(split, x, loss)
    assert_equal(trained(plain, x, loss), ours)


@pytest.mark.tf(keras=2, because="the layers of Keras 3 take no ragged tensors")
def test_ragged_inputs_are_not_proven_apart_and_computed_at_once():
    """They may be padded to the longest one of those that are computed together."""
    lengths = [2, 3, 2, 3, 9, 4, 3, 8]
    values = np.random.RandomState(3).normal(size=(sum(lengths), 4)).astype("float32")
    x = tf.RaggedTensor.from_row_lengths(values, lengths)

    def program():
        inputs = tf.keras.Input((None, 4), ragged=True)
        padded = layers.Lambda(lambda rows: rows.to_tensor())(inputs)
        outputs = layers.Dense(1)(layers.GlobalAveragePooling1D()(layers.Dense(3)(padded)))
        return tf.keras.Model(inputs, outputs), x, None

    results = []
    for model in pair(program, micro_batch_size=4)[:2]:
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
        with warned("computed for the whole batch at once") as said:
            model.train_on_batch(x, Y[:8])
        results.append(model.get_weights())
    assert_equal(*results)
    assert said


@pytest.mark.parametrize("metrics", [["mae", "cosine_similarity"], ["MeanSquaredError"]])
def test_metrics_by_name_are_looked_at_again_for_data_of_another_kind(metrics):
    """Those of Keras 3 have variables at once, which must not be made in a later trace of a step."""

    def logs(**options):
        model = accum.GradientAccumulateModel.from_model(dense(), **options) if options else dense()
        model.set_weights([np.full(var.shape, 0.1, "float32") for var in model.get_weights()])
        model.compile(tf.keras.optimizers.SGD(0.05), "mse", metrics=metrics, **JIT)
        model.train_on_batch(X[:BATCH], Y[:BATCH])
        found = list(model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0).history.values())
        weights = np.linspace(0.1, 1.0, len(X)).astype("float32")
        found += model.fit(X, Y, sample_weight=weights, batch_size=BATCH, shuffle=False, verbose=0).history.values()
        return [*found, model.evaluate(X, Y, batch_size=BATCH, verbose=0), *model.get_weights()]

    with silent():
        assert_near(logs(micro_batch_size=SIZE), logs(), rtol=2e-5, atol=3e-6)


def errors(targets, outputs):
    """A loss for each element."""
    return (targets - outputs) ** 2


@pytest.mark.parametrize("loss", [errors, "mse"], ids=["elements", "means"])
def test_weights_with_fewer_axes_than_losses_see_the_batch(loss):
    """Keras adds an axis to weights, or none; TensorFlow takes what is missing then for an axis of the examples."""
    x, y = np.stack([X[:BATCH]] * BATCH, 1), np.stack([Y[:BATCH]] * BATCH, 1)  # as many time steps as examples
    weights = np.linspace(0.0, 1.0, BATCH).astype("float32") ** 2

    def trained(wrap):
        model = wrap(tf.keras.Sequential([tf.keras.Input(x.shape[1:]), layers.Dense(y.shape[-1])]))
        model.set_weights([np.full(var.shape, 0.1, "float32") for var in model.get_weights()])
        model.compile(tf.keras.optimizers.SGD(0.5), loss, **JIT)
        logs = model.fit(x, y, sample_weight=weights, batch_size=BATCH, shuffle=False, verbose=0).history
        return [*logs.values(), *model.get_weights()]

    with silent():
        ours = trained(lambda model: accum.GradientAccumulateModel.from_model(model, micro_batch_size=1))
    expected = trained(lambda model: model)
    assert_near(ours, expected, rtol=2e-5, atol=3e-6)


class Warmed(tf.keras.Model):
    """Mixes examples after an epoch, as Python says."""

    mixes = False

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(8, activation="tanh"), layers.Dense(1)

    def call(self, inputs):
        hidden = self.hidden(inputs)
        return self.out(0.7 * hidden + 0.3 * tf.reverse(hidden, [0]) if self.mixes else hidden)


class DropsAtRandom(layers.Layer):
    """Draws with NumPy, eagerly for each call."""

    def __init__(self):
        super().__init__()
        self.random = np.random.RandomState(1)

    def call(self, inputs):
        return inputs if self.random.rand() < 0.5 else 2.0 * inputs

    def compute_output_shape(self, shape):
        return shape


@pytest.mark.parametrize("options", [{}, {"whole_batch": ()}], ids=["default", "given-up"])
def test_python_code_that_runs_for_each_micro_batch_is_named(options):
    split = pair(lambda: (dense(DropsAtRandom()), X, "mse"), micro_batch_size=SIZE, **options)[1]
    with warned("[accum: python-once]", accum.InexactWarning) as said:
        trained(split, X, "mse", run_eagerly=True)
    assert len(said) == 1
    others = [layers.Dense(4, activation=tf.nn.relu, kernel_constraint=lambda kernel: 0.9 * kernel)]
    split = pair(lambda: (dense(*others), X, "mse"), micro_batch_size=SIZE, **options)[1]
    with silent(accum.InexactWarning):  # of Keras' own layers and TensorFlow's functions
        trained(split, X, "mse", run_eagerly=True)
    by_hand = layers.Dense(4, activation=lambda values: tf.tanh(values))
    split = pair(lambda: (dense(by_hand), X, "mse"), micro_batch_size=SIZE, **options)[1]
    with warned("[accum: python-once]", accum.InexactWarning) as said:
        trained(split, X, "mse", run_eagerly=True)
    assert len(said) == 1


def squares(y, outputs):
    return tf.reduce_mean((y - outputs) ** 2, axis=-1)


@pytest.mark.parametrize("part", ["loss", "metric", "regularizer"])
def test_python_code_beside_the_layers_that_runs_for_each_micro_batch_is_named(part):
    own = layers.Dense(4, kernel_regularizer=(lambda kernel: 0.1 * tf.reduce_sum(kernel)) if part[0] == "r" else "l2")
    loss, metrics = squares if part == "loss" else "mse", [squares if part == "metric" else "mae"]
    for is_named, compiled in (
        (True, {"loss": loss, "metrics": metrics}),
        (False, {"loss": "mse", "metrics": ["mae"]}),
    ):
        layer = own if is_named else layers.Dense(4, kernel_regularizer="l2")
        split = pair(lambda layer=layer: (dense(layer), X, "mse"), micro_batch_size=SIZE)[1]
        split.compile(tf.keras.optimizers.SGD(0.1), run_eagerly=True, **compiled)
        with warned("[accum: python-once]", accum.InexactWarning) if is_named else silent(accum.InexactWarning):
            split.train_on_batch(X[:12], Y[:12])


class DropsByPython(layers.Layer):
    """Leaves itself out by Python's and NumPy's random numbers while it is traced, as LayerDrop is often written."""

    def __init__(self, of_numpy):
        super().__init__()
        self.kept, self.of_numpy = [], of_numpy

    def call(self, inputs):
        self.kept.append(2.0 if self.of_numpy or random.random() < 0.5 else 3.0)
        self.kept.append(5.0 if self.of_numpy and np.random.uniform() < 0.5 else 7.0)
        return inputs * self.kept[-1] * self.kept[-2]

    def compute_output_shape(self, shape):
        return shape


@pytest.mark.parametrize("of_numpy", [False, True], ids=["random", "numpy"])
def test_all_micro_batches_of_a_batch_see_the_same_numbers_of_python(of_numpy):
    layer = DropsByPython(of_numpy)
    model = pair(lambda: (dense(layer), X, "mse"), micro_batch_size=5)[1]
    outputs = model(X[:12]).numpy() / np.prod(layer.kept[-2:])  # only a bias, which is 0, is between them and the layer
    possible = [np.mean((outputs * one * other - Y[:12]) ** 2) for one in (2.0, 3.0) for other in (5.0, 7.0)]
    drawn = set()
    for seed in range(6):
        model.compile(tf.keras.optimizers.SGD(0.0), "mse", **JIT)
        random.seed(seed)
        np.random.seed(seed)
        loss = model.train_on_batch(X[:12], Y[:12])
        assert min(np.abs(loss / one - 1.0) for one in possible) < 1e-5
        drawn.add(round(float(loss), 3))
    assert len(drawn) > 1


class DrawsInPython(layers.Layer):
    """Draws one number for the batch in the Python of an operation."""

    def __init__(self):
        super().__init__()
        self.drawn, self.random = [], np.random.RandomState(0)

    def call(self, inputs):
        number = tf.py_function(lambda: self.drawn.append(self.random.uniform()) or self.drawn[-1], [], tf.float32)
        number.set_shape([])
        return inputs * number

    def compute_output_shape(self, shape):
        return shape


def test_a_python_operation_that_draws_for_the_batch_runs_once():
    layer = DrawsInPython()
    split = pair(lambda: (dense(layer), X, "mse"), micro_batch_size=5)[1]
    del layer.drawn[:]
    split.compile(tf.keras.optimizers.SGD(0.1), "mse", **JIT)
    with warned("[accum: not-split]"):
        split.train_on_batch(X[:12], Y[:12])
    assert len(layer.drawn) == 1


@pytest.mark.filterwarnings("ignore:With .*, the Python code")
def test_eagerly_each_batch_is_looked_at(monkeypatch):
    def trained_eagerly(**options):
        model = Warmed()
        model(X[:2])
        model.set_weights([np.linspace(-1, 1, var.size).reshape(var.shape) for var in model.get_weights()])
        if options:
            model = accum.GradientAccumulateModel.from_model(model, **options)
        model.compile(tf.keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        for mixes in (False, True):
            monkeypatch.setattr(Warmed, "mixes", mixes)
            model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
        return model.get_weights()

    assert_near(trained_eagerly(micro_batch_size=SIZE), trained_eagerly(), rtol=2e-5, atol=3e-6)


class Largest(tf.keras.metrics.Metric):
    """A mean over batches of their largest entry."""

    def __init__(self):
        super().__init__(name="seen")
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, values, sample_weight=None):
        self.total.assign_add(tf.reduce_max(values))
        self.count.assign_add(1.0)

    def result(self):
        return self.total / self.count


UPDATES = {  # {name: (metric of a layer, function that updates it)}
    "rows without axes": (
        lambda: tf.keras.metrics.MeanAbsoluteError(name="seen"),
        lambda metric, x: metric.update_state(x[:, 0], x[:, 1]),
    ),
    "own": (Largest, lambda metric, x: metric.update_state(x)),
    "weighted number": (
        lambda: tf.keras.metrics.Sum(name="seen"),
        lambda metric, x: metric.update_state(tf.reduce_sum(x), sample_weight=0.5),
    ),
    "rows": (
        lambda: tf.keras.metrics.MeanAbsoluteError(name="seen"),
        lambda metric, x: metric.update_state(x[:, :2], x[:, 2:4]),
    ),
}


class Measuring(layers.Layer):
    def __init__(self, make, update):
        super().__init__()
        self.metric, self.update = make(), update

    def call(self, inputs):
        self.update(self.metric, inputs)
        return inputs + 0.0

    def compute_output_shape(self, shape):
        return shape


@pytest.mark.parametrize("name", sorted(UPDATES))
def test_a_metric_in_a_layer_that_does_not_add_up_over_examples_sees_the_batch(name):
    plain, split, x, loss = pair(lambda: (dense(Measuring(*UPDATES[name])), X, "mse"), micro_batch_size=5)
    logs = []
    for model in (plain, split):
        model.compile(tf.keras.optimizers.SGD(0.1), loss, **JIT)
        with warned("[accum: not-split]") if model is split and name != "rows" else contextlib.ExitStack():
            history = model.fit(x, Y, batch_size=BATCH, shuffle=False, verbose=0).history
        (layer,) = [one for one in model.layers if isinstance(one, Measuring)]
        logs.append([float(layer.metric.result()), *history["loss"]])
    np.testing.assert_allclose(*logs, rtol=1e-5)


class HidesHalf(layers.Layer):
    """Hides from losses the examples that are below the mean of the batch."""

    def call(self, inputs, mask=None):
        return inputs + 0.0

    def compute_mask(self, inputs, mask=None):
        return tf.squeeze(inputs, -1) > tf.reduce_mean(inputs)

    def compute_output_shape(self, shape):
        return shape


@pytest.mark.skipif(IS_KERAS_3, reason="a functional model of Keras 3 takes no such mask")
def test_a_mask_in_which_examples_meet_is_that_of_the_batch():
    program = lambda: (tf.keras.Sequential([*dense().layers, HidesHalf()]), X, "mse")  # noqa: E731
    plain, split, x, loss = pair(program, micro_batch_size=5)
    assert_equal(trained(split, x, loss), trained(plain, x, loss))


class CountsInPython(layers.Layer):
    """Multiplies by a number that Python counts or draws, by a generator of its own."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.number = kind, 1
        self.drawing = np.random.RandomState(1) if kind == "state" else np.random.default_rng(1)

    def call(self, inputs):
        self.number += 1
        return inputs * float(self.number if self.kind == "count" else self.drawing.uniform())

    def compute_output_shape(self, shape):
        return shape


@pytest.mark.parametrize("kind", ["count", "state", "generator"])
def test_examples_of_a_batch_see_one_number_of_python(kind):
    split = pair(lambda: (dense(CountsInPython(kind)), X, "mse"), micro_batch_size=5)[1]
    split.compile("sgd", "mse", **JIT)
    outputs = split.predict(np.ones((12, 6), "float32"), batch_size=12)
    np.testing.assert_allclose(outputs, np.tile(outputs[:1], (12, 1)), rtol=1e-6)


def mean_squares(y, outputs):
    return tf.reduce_mean((y - outputs) ** 2, axis=-1)


mean_squares.__module__ = tf.keras.losses.MeanSquaredError.__module__  # so is a function made by `functools.wraps`


@functools.wraps(mean_squares)
def hardest(y, outputs):
    return tf.reduce_mean(tf.sort(mean_squares(y, outputs))[-4:])


def labels_of_three():
    return np.sign(Y) * (np.arange(len(Y)) % 5 > 1)[:, None]


LOSSES_OF_BATCHES = {  # {name: (loss, targets)}
    "named like one of Keras": (hardest, Y),
    "all pairs by broadcasting": (lambda y, outputs: tf.square(y - outputs[:, 0]), Y[:, 0]),
    "labels -1, 0 and 1": ("hinge", labels_of_three()),
}


@pytest.mark.parametrize("name", sorted(LOSSES_OF_BATCHES))
def test_a_loss_that_looks_like_one_for_each_example_is_that_of_the_batch(name):
    loss, y = LOSSES_OF_BATCHES[name]
    ends = []
    for model in pair(lambda: (dense(), X, "mse"), micro_batch_size=2)[:2]:
        ends.append(trained(model, X, loss, y=y))
    assert_equal(*ends)


def of_probabilities(y, outputs):
    return tf.keras.losses.binary_crossentropy(y, outputs)


@pytest.mark.tf("2.4")
def test_a_metric_of_your_own_finds_the_logits_of_the_outputs():
    x = np.linspace(-60.0, 60.0, 8, dtype="float32")[:, None]
    ends = []
    for options in (None, {"micro_batch_size": 3}):
        one = layers.Dense(1, activation="sigmoid", kernel_initializer="ones")
        model = tf.keras.Sequential([tf.keras.Input((1,)), one])
        model = model if options is None else accum.GradientAccumulateModel.from_model(model, **options)
        model.compile("sgd", "mse", metrics=[of_probabilities])
        ends.append(model.evaluate(x, (x < 0).astype("float32"), batch_size=8, verbose=0))
    assert ends[0][1] > 20.0  # of probabilities alone, it would be at most 16.1
    np.testing.assert_allclose(*ends, rtol=1e-5)


class AddsCode(layers.Layer):
    """Adds random numbers for time steps, the same for all examples."""

    def call(self, inputs):
        return inputs + tf.random.stateless_normal(tf.shape(inputs)[1:], [1, 2])

    def compute_output_shape(self, shape):
        return shape


def test_numbers_for_time_steps_whose_number_is_unknown_are_the_same_for_all_examples():
    x = np.tile(RANDOM.normal(size=(1, 4, 3)).astype("float32"), (9, 1, 1))
    inputs = tf.keras.Input((None, 3))
    model = tf.keras.Model(inputs, layers.Dense(1, kernel_initializer="ones")(AddsCode()(inputs)))
    split = accum.GradientAccumulateModel.from_model(model, micro_batch_size=4)
    split.compile("sgd", "mse", **JIT)
    data = tf.data.Dataset.from_generator(lambda: iter([x]), tf.float32, tf.TensorShape([None, None, 3]))
    np.testing.assert_allclose(split.predict(data), model.predict(data), rtol=1e-5)


class AddsMean(layers.Layer):
    def call(self, inputs):
        return inputs[0] + tf.reduce_mean(inputs[1], axis=0)


@pytest.mark.tf("2.5")
def test_xla_does_not_leave_out_rows_of_an_input_that_has_more_than_the_batch():
    x, table, y = (RANDOM.normal(size=(rows, width)).astype("float32") for rows, width in ((8, 4), (16, 4), (8, 1)))
    spec = tuple(tf.TensorSpec([None, width]) for width in (4, 4, 1))
    data = tf.data.Dataset.from_generator(
        lambda: iter([((x, table), y)]), output_signature=((spec[0], spec[1]), spec[2])
    )
    inputs = tf.keras.Input((4,)), tf.keras.Input((4,))
    model = tf.keras.Model(inputs, layers.Dense(1)(AddsMean()(list(inputs))))
    split = accum.GradientAccumulateModel.from_model(model, micro_batch_size=4)
    split.compile("sgd", "mse", jit_compile=True)
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
        split.fit(data, verbose=0)


class CountsOnce(layers.Layer):
    """Sets attributes when it is first traced, and draws as Keras' backend does."""

    width = 0

    def call(self, inputs):
        self.width = inputs.shape[-1]
        shape = tf.shape(inputs)
        if hasattr(tf.keras.backend, "random_normal"):  # Keras 2
            return inputs + 0.1 * tf.keras.backend.random_normal(shape)
        return inputs + 0.1 * tf.random.normal(shape)

    def compute_output_shape(self, shape):
        return shape


class AddsToken(layers.Layer):
    """Drops out a token that is repeated for each example."""

    def build(self, shape):
        self.token = self.add_weight(name="token", shape=(1, 1, 4), initializer="ones")
        self.drop = layers.Dropout(0.1)
        self.built = True

    def call(self, inputs, training=None):
        return inputs + self.drop(tf.broadcast_to(self.token, [tf.shape(inputs)[0], 1, 4]), training=training)

    def compute_output_shape(self, shape):
        return shape


IN_ONE_PASS = {
    "LSTM": lambda: [layers.LSTM(4, dropout=0.3)],
    "GRU": lambda: [layers.GRU(4, recurrent_dropout=0.3)],
    "masked": lambda: [layers.Masking(), layers.LSTM(4)],
    "noise": lambda: [layers.GaussianNoise(0.2), layers.SpatialDropout1D(0.1), layers.Flatten()],
    "backend": lambda: [CountsOnce(), layers.Flatten()],
    "token": lambda: [AddsToken(), layers.Flatten()],
}


@pytest.mark.parametrize("loss", ["mse", squares], ids=["mse", "own"])
@pytest.mark.parametrize("name", sorted(IN_ONE_PASS))
def test_what_draws_for_each_example_takes_one_pass(name, loss):
    model = tf.keras.Sequential([tf.keras.Input((7, 4)), *IN_ONE_PASS[name](), layers.Dense(1)])
    model = accum.GradientAccumulateModel.from_model(model, micro_batch_size=5)
    model.compile("sgd", loss, **JIT)
    data = tf.ones((12, 7, 4)), tf.ones((12, 1))
    assert what_sees_the_batch(model, "train_step", model._accum.steps.of_class_or_user("train_step"), data) is None
