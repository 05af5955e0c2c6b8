"""Operations that look across examples see the whole batch, although it is computed in micro-batches (law L19).

The oracle is always plain Keras, which trains on the whole batch at once.
"""

import contextlib
import inspect

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_near
from replicas import mirrored
from versions import IS_KERAS_3, IS_WINE, TF_VERSION, XLA_ENDS
from warned import warned
from whole_batches import (
    CLASSES,
    COUNT,
    IMAGES,
    MASKS,
    OTHER,
    REGULARIZED,
    TRACED,
    Towers,
    X,
    Y,
    batch_dice,
    contrastive,
    covariance,
    dense,
    filled,
)

import accum

pytestmark = [
    pytest.mark.tf("2.2"),
    pytest.mark.law("L19"),
    pytest.mark.filterwarnings("error:With `whole_batch`, these operations"),
]

layers, losses = tf.keras.layers, tf.keras.losses
BATCH = 20  # 20 = 4 + 8 + 8 and 12 = 4 + 8
TOKENS = np.random.RandomState(1).randint(1, 6, size=(COUNT, 4))
TOKENS[::3, 2:] = 0
FROM_LOGITS = losses.SparseCategoricalCrossentropy(from_logits=True)
EAGERLY = {"run_eagerly": True}


def block(inputs, filters, **options):
    hidden = layers.Conv2D(filters, 3, padding="same", use_bias=False)(inputs)
    return layers.ReLU()(layers.BatchNormalization(**options)(hidden))


def residual():
    inputs = tf.keras.Input((8, 8, 2))
    hidden = block(inputs, 4)
    for _ in range(2):
        branch = layers.Conv2D(4, 3, padding="same", use_bias=False)(block(hidden, 4))
        hidden = layers.ReLU()(layers.Add()([hidden, layers.BatchNormalization()(branch)]))
    return tf.keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(hidden)))


def u_net():
    inputs = tf.keras.Input((8, 8, 2))
    top = block(inputs, 3)
    middle = block(layers.MaxPooling2D()(top), 4)
    bottom = block(layers.MaxPooling2D()(middle), 4)
    middle = block(layers.Concatenate()([layers.UpSampling2D()(bottom), middle]), 4)
    top = block(layers.Concatenate()([layers.UpSampling2D()(middle), top]), 3)
    return tf.keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid")(top))


def sequential():
    return tf.keras.Sequential(
        [tf.keras.Input((3,)), layers.Dense(4), layers.BatchNormalization(scale=False, momentum=0.8), layers.Dense(2)]
    )


def nested():
    """A Sequential and a functional model within another one, which is called twice, before a shared layer."""
    inner_inputs = tf.keras.Input((3,))
    inner = tf.keras.Model(inner_inputs, layers.BatchNormalization()(layers.Dense(4)(inner_inputs)))
    one, other = tf.keras.Input((3,)), tf.keras.Input((3,))
    shared = tf.keras.Sequential(
        [tf.keras.Input((4,)), layers.BatchNormalization(center=False), layers.Activation("tanh")]
    )
    both = layers.Concatenate()([shared(inner(one)), shared(inner(other))])
    return tf.keras.Model([one, other], [layers.Dense(2, name="left")(both), layers.Dense(1, name="right")(both)])


def at_once():
    """Batch normalisation of the inputs, of batch normalisation, and side by side; one frozen, one for inference."""
    inputs = tf.keras.Input((3,))
    hidden = layers.BatchNormalization()(layers.BatchNormalization()(inputs))
    sides = [layers.BatchNormalization(trainable=trainable)(layers.Dense(3)(hidden)) for trainable in (True, False)]
    return tf.keras.Model(inputs, layers.Dense(2)(layers.Add()(sides)))


def over_other_axes():
    inputs = tf.keras.Input((8, 8, 2))
    hidden = layers.BatchNormalization(axis=1)(layers.Conv2D(3, 3, padding="same")(inputs))
    return tf.keras.Model(inputs, layers.Dense(3)(layers.Flatten()(layers.BatchNormalization(axis=-1)(hidden))))


def of_tokens():
    """Rows of an embedding, whose padding is masked."""
    inputs = tf.keras.Input((4,), dtype="int32")
    hidden = layers.BatchNormalization()(layers.Embedding(6, 3, mask_zero=True)(inputs))
    return tf.keras.Model(inputs, layers.Dense(2)(hidden))


def of_steps():
    """The same with a layer that applies batch normalisation to each time step, if `call` has an argument `mask`."""
    inputs = tf.keras.Input((4,), dtype="int32")
    hidden = layers.TimeDistributed(layers.BatchNormalization())(layers.Embedding(6, 3, mask_zero=True)(inputs))
    return tf.keras.Model(inputs, layers.Dense(2)(hidden))


class OfTokens(tf.keras.Model):
    """The same in a model of the user's, which passes no mask."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = layers.Embedding(6, 3, mask_zero=True), layers.BatchNormalization()
        self.last = layers.Dense(2)

    def call(self, inputs, training=False):
        return self.last(self.norm(self.table(inputs), training=training))


def with_losses_of_its_own():
    inputs = tf.keras.Input((3,))
    hidden = layers.Dense(4, kernel_regularizer="l2", **REGULARIZED)(inputs)
    hidden = layers.BatchNormalization(gamma_regularizer="l1")(hidden)
    return tf.keras.Model(inputs, layers.Dense(2)(hidden))


def small():
    """Two convolutions with batch normalisation: what is traced takes its time by the number of layers."""
    inputs = tf.keras.Input((8, 8, 2))
    hidden = block(layers.MaxPooling2D(4)(block(inputs, 3)), 3)
    return tf.keras.Model(inputs, layers.Dense(3)(layers.Flatten()(hidden)))


def replaced():
    return accum.replace_batchnorm_layers(small(), accum_steps=1)


def tied():
    """A weight that is used before and behind a barrier, there by a function."""
    inputs = tf.keras.Input((3,))
    first = layers.Dense(3, use_bias=False)
    hidden = layers.BatchNormalization()(first(inputs))
    outputs = layers.Lambda(lambda values: tf.matmul(values, tf.convert_to_tensor(first.kernel)))(hidden)
    return tf.keras.Model(inputs, layers.Dense(2)(outputs))


def almost_constant():
    """Small variances, to which the fused kernel of Keras 2 adds more than a small epsilon."""
    inputs = tf.keras.Input((8, 8, 2))
    hidden = layers.Conv2D(2, 1, use_bias=False)(layers.Lambda(lambda values: 0.003 * values)(inputs))
    hidden = layers.BatchNormalization(epsilon=1e-7)(hidden)
    return tf.keras.Model(inputs, layers.Dense(2)(layers.GlobalMaxPooling2D()(hidden)))


def in_inference_mode():
    """Batch normalisation that the model was built to run in inference, which Keras 3 overrules."""
    inputs = tf.keras.Input((3,))
    base = tf.keras.Sequential([tf.keras.Input((4,)), layers.BatchNormalization()])
    hidden = base(layers.Dense(4)(inputs), training=False)
    hidden = layers.BatchNormalization()(layers.BatchNormalization()(hidden, training=0))
    return tf.keras.Model(inputs, layers.Dense(2)(hidden))


def with_dict():
    """A nested model that is called with a dict, whose keys are in another order than its inputs."""
    one, other = tf.keras.Input((3,), name="z"), tf.keras.Input((3,), name="a")
    inner = tf.keras.Model([one, other], layers.Dense(3)(layers.Subtract()([one, other])))
    inputs, more = tf.keras.Input((3,)), tf.keras.Input((3,))
    hidden = layers.BatchNormalization()(inner({"z": inputs, "a": more}))
    return tf.keras.Model([inputs, more], layers.Dense(2)(hidden))


def at_two_levels():
    """One layer before and behind another: its moving statistics move twice, in this order."""
    inputs = tf.keras.Input((3,))
    shared = layers.BatchNormalization(momentum=0.6)
    late = shared(layers.Dense(3)(inputs))
    early = shared(layers.Dense(3)(layers.BatchNormalization()(layers.Dense(3)(inputs))))
    return tf.keras.Model(inputs, layers.Dense(2)(layers.Concatenate()([layers.ReLU()(early), late])))


CASES = {  # the model, x, y, what it is compiled with
    "residual": (residual, IMAGES, CLASSES, {"loss": FROM_LOGITS, "metrics": ["accuracy"]}),
    "u-net, batch Dice": (u_net, IMAGES, MASKS, {"loss": batch_dice}),
    "sequential": (sequential, X, Y, {"loss": "mse"}),
    "nested": (nested, [X, OTHER], [Y, Y[:, :1]], {"loss": ["mse", "mae"], "loss_weights": [1.0, 0.3]}),
    "at once": (at_once, X, Y, {"loss": "mse"}),
    "other axes": (over_other_axes, IMAGES, CLASSES, {"loss": FROM_LOGITS}),
    "tokens": (of_tokens, TOKENS, np.repeat(Y[:, None], 4, axis=1), {"loss": "mse"}),
    "time steps": (of_steps, TOKENS, np.repeat(Y[:, None], 4, axis=1), {"loss": "mse"}),
    "tokens in a model of the user's": (OfTokens, TOKENS, np.repeat(Y[:, None], 4, axis=1), {"loss": "mse"}),
    "losses of its own": (with_losses_of_its_own, X, Y, {"loss": "mse"}),
    "tied": (tied, X, Y, {"loss": "mse"}),
    "almost constant": (almost_constant, IMAGES, Y, {"loss": "mse"}),
    "in inference mode": (in_inference_mode, X, Y, {"loss": "mse"}),
    "dict": (with_dict, [X, OTHER], Y, {"loss": "mse"}),
    "two levels": (at_two_levels, X, Y, {"loss": "mse"}),
    "AccumBatchNormalization": (replaced, IMAGES, CLASSES, {"loss": FROM_LOGITS}),
    "contrastive": (Towers, (X, OTHER), CLASSES, {"loss": contrastive}),
    "covariance": (dense, X, Y, {"loss": covariance, "metrics": [covariance]}),
    "none, clipped": (sequential, X, Y, {"loss": losses.MeanSquaredError(reduction="none"), "clipnorm": 0.1}),
    "sum": (sequential, X, Y, {"loss": losses.MeanSquaredError(reduction="sum"), "lr": 0.002}),
}


def on_every_environment(names, *chosen):
    """Names as parameters, whose tests run on one Python of each version alone unless they are `chosen`."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.slow) for name in names]


def trained(make, x, y, compile_with, wrap=lambda model: model, epochs=1, optimizer=None, **fit_with):
    """Train a model for two steps an epoch. Returns it with its weights and logs."""
    model = make()
    if not model.built:
        model(tf.nest.map_structure(lambda part: part[:2], x))
    model = wrap(filled(model))
    compile_with = dict(compile_with)
    rate = compile_with.pop("lr", 0.05)
    clip = {name: compile_with.pop(name) for name in ("clipnorm",) if name in compile_with}
    made = tf.keras.optimizers.SGD(rate, momentum=0.5, **clip) if optimizer is None else optimizer()
    model.compile(made, **compile_with)
    options = dict({"batch_size": BATCH, "shuffle": False, "verbose": 0, "epochs": epochs}, **fit_with)
    history = model.fit(x, y, **options).history
    return model, model.get_weights(), history


def split(micro_batch_size=8, whole_batch="all", **options):
    def wrap(model):
        return accum.GradientAccumulateModel.from_model(
            model, micro_batch_size=micro_batch_size, whole_batch=whole_batch, **options
        )

    return wrap


def assert_same(ours, plain, tolerance=2e-5):
    assert_near(ours[1], plain[1], rtol=tolerance, atol=tolerance)
    assert sorted(ours[2]) == sorted(plain[2])
    for name, whole in plain[2].items():
        np.testing.assert_allclose(ours[2][name], whole, rtol=tolerance, atol=tolerance, err_msg=name)


def differs(ours, plain):
    return any(np.abs(mine - whole).max() > 1e-3 for mine, whole in zip(ours[1], plain[1]))


@pytest.mark.parametrize("name", on_every_environment(CASES, "sequential", "contrastive"))
def test_the_step_is_that_of_the_full_batch(name):
    make, x, y, compile_with = CASES[name]
    compile_with = dict(compile_with, **EAGERLY)
    plain = trained(make, x, y, compile_with)
    assert_same(trained(make, x, y, compile_with, split()), plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", on_every_environment(["residual", "u-net, batch Dice", "contrastive", "covariance"], "contrastive")
)
@pytest.mark.filterwarnings("ignore:Batch normalization updates")
def test_without_it_micro_batches_differ(name):
    make, x, y, compile_with = CASES[name]
    compile_with = dict(compile_with, **EAGERLY)
    plain = trained(make, x, y, compile_with)
    assert differs(trained(make, x, y, compile_with, split(whole_batch=())), plain)


class Counts(layers.Layer):
    """Scales by the number of calls: a state that has to go back when it is called again."""

    def build(self, input_shape):
        self.calls = self.add_weight(name="calls", shape=(), initializer="ones", trainable=False)

    def call(self, inputs):
        self.calls.assign_add(1.0)
        return inputs * tf.cast(self.calls, inputs.dtype)


class Remembers(layers.Layer):
    """Keeps the largest input."""

    def build(self, input_shape):
        self.largest = self.add_weight(name="largest", shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        self.largest.assign(tf.maximum(tf.convert_to_tensor(self.largest), tf.reduce_max(inputs)))
        return inputs


class Lies(layers.Layer):
    """Draws random numbers where nobody sees it."""

    def call(self, inputs):
        noise = tf.numpy_function(
            lambda values: np.random.uniform(size=values.shape).astype("f4"), [inputs], tf.float32
        )
        noise.set_shape(inputs.shape)
        return noise


class Draws(layers.Layer):
    """Draws by every kind of random operation."""

    def call(self, inputs):
        shape = tf.shape(inputs)
        noise = tf.random.uniform(shape) + 0.1 * tf.random.normal(shape) + 0.1 * tf.random.truncated_normal(shape)
        noise += 0.1 * tf.cast(tf.random.uniform(shape, maxval=5, dtype=tf.int32), tf.float32)
        return noise + 0.1 * tf.random.gamma([], tf.ones(shape))


def with_layer(layer):
    inputs = tf.keras.Input((3,))
    hidden = layer(layers.BatchNormalization()(layers.Dense(4)(inputs)))
    return tf.keras.Model(inputs, layers.Dense(2)(layers.BatchNormalization()(layers.Dense(3)(hidden))))


class Uniform(layers.Layer):
    def call(self, inputs):
        return tf.random.uniform(tf.shape(inputs))


class DrawsInFunction(Uniform):
    @tf.function
    def call(self, inputs):
        return super().call(inputs)


class DrawsBySeed(layers.Layer):
    """By seeds that are the same for each call: gamma and categorical numbers, whose seeds come as other arguments."""

    def call(self, inputs):
        numbers = tf.random.stateless_uniform(tf.shape(inputs), [1, 2])
        if TF_VERSION >= (2, 5):
            numbers += 0.1 * tf.random.stateless_gamma(tf.shape(inputs), [1, 2], 1.0)
        return numbers + tf.cast(tf.random.stateless_categorical(0.0 * inputs, 4, [1, 2]), tf.float32)


class Given(layers.Layer):
    """Returns fixed numbers in place of random ones."""

    numbers = None

    def call(self, inputs):
        return tf.constant(Given.numbers)


@pytest.mark.slow
@pytest.mark.law("L20")
@pytest.mark.parametrize("how", ["eager", pytest.param("traced", marks=pytest.mark.slow)])
@pytest.mark.parametrize("draw", [Lies, Draws, Uniform, DrawsInFunction, DrawsBySeed])
def test_whatever_is_random_is_the_same_when_a_micro_batch_is_computed_again(draw, how):
    """Against plain Keras with the numbers that were drawn. Other numbers in the gradient would make another step."""

    def make(layer):
        inputs = tf.keras.Input((3,))
        hidden = layers.BatchNormalization()(layers.Dense(4)(inputs))
        noise = layer()(hidden)
        hidden = layers.BatchNormalization()(layers.Dense(3)(layers.Multiply()([hidden, noise])))
        return Seen(inputs, [layers.Dense(2)(hidden), noise])

    class Seen(tf.keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                outputs, noise = self(x, training=True)
                loss = tf.reduce_mean((outputs - y) ** 2)
            self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
            seen.assign(noise)
            return {"loss": loss}

    seen = tf.Variable(tf.zeros([BATCH, 4]))
    compile_with = EAGERLY if how == "eager" else TRACED
    one_batch = {"batch_size": BATCH, "epochs": 1}
    ours = trained(lambda: make(draw), X[:BATCH], Y[:BATCH], compile_with, split(), **one_batch)
    Given.numbers = seen.numpy()
    assert len(np.unique(Given.numbers)) > 60  # each example has numbers of its own
    plain = trained(lambda: make(Given), X[:BATCH], Y[:BATCH], compile_with, **one_batch)
    assert_same(ours, plain)
    Given.numbers = Given.numbers[::-1].copy()
    assert differs(trained(lambda: make(Given), X[:BATCH], Y[:BATCH], compile_with, **one_batch), plain)


@pytest.mark.law("L20")
@pytest.mark.parametrize("compile_with", [EAGERLY, TRACED], ids=["eager", "traced"])
def test_what_draws_where_nobody_sees_it_runs_once_for_each_micro_batch(compile_with):
    drawn = []

    class Hidden(layers.Layer):
        def call(self, inputs):
            noise = tf.numpy_function(draw, [inputs], tf.float32)
            noise.set_shape(inputs.shape)
            return inputs * noise

    class Replayed(layers.Layer):
        def call(self, inputs):
            return inputs * tf.constant(np.concatenate(drawn))

    def draw(values):
        drawn.append(np.random.uniform(size=values.shape).astype("f4"))
        return drawn[-1]

    def make(layer):
        return tf.keras.Sequential([tf.keras.Input((3,)), layers.Dense(4), layer, layers.Dense(2)])

    one_batch = {"batch_size": BATCH, "epochs": 1}
    compile_with = dict(compile_with, loss="mse")
    own = split(whole_batch="loss")  # otherwise, the model is computed at once
    with pytest.warns(accum.InexactWarning, match="these operations may look across the examples"):
        ours = trained(lambda: make(Hidden()), X[:BATCH], Y[:BATCH], compile_with, own, **one_batch)
    assert len(drawn) > 1 and sum(map(len, drawn)) == BATCH
    assert_same(ours, trained(lambda: make(Replayed()), X[:BATCH], Y[:BATCH], compile_with, **one_batch))


@pytest.mark.slow
@pytest.mark.tf("2.3", because="the fused batch normalisation of TF 2.2 has no float64")
def test_mobile_net():
    """52 batch normalisations, in float64: in float32 the smallest maps amplify rounding to percents."""

    def made():
        return tf.keras.applications.MobileNetV2((32, 32, 3), alpha=0.35, weights=None, classes=3)

    images = np.random.RandomState(2).normal(size=(6, 32, 32, 3))
    with policy_of("float64"):
        weights = [np.array(weight) for weight in made().get_weights()]
        runs = []
        for wrap in (unchanged, split(3)):
            model = made()
            model.set_weights(weights)
            model = wrap(model)
            model.compile(tf.keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy", **EAGERLY)
            model.train_on_batch(images, CLASSES[:6])
            runs.append((model, model.get_weights(), {}))
    assert_same(*runs)
    assert differs((None, weights), runs[0])


@pytest.mark.slow
@pytest.mark.skipif(IS_WINE, reason=XLA_ENDS)
@pytest.mark.skipif(
    TF_VERSION < (2, 8), reason="`compile` takes `jit_compile` since TF 2.5, and XLA knows all ops since 2.8"
)
def test_the_step_is_that_of_the_full_batch_when_compiled_by_xla():
    plain = trained(small, IMAGES, CLASSES, dict(EAGERLY, loss=FROM_LOGITS))
    assert_same(trained(small, IMAGES, CLASSES, {"jit_compile": True, "loss": FROM_LOGITS}, split()), plain)


BEHIND = {
    "dropout": lambda: [layers.Dropout(0.4, seed=1)],
    "before and after": lambda: [
        layers.Dropout(0.3, seed=1),
        layers.Dense(4),
        layers.BatchNormalization(),
        layers.GaussianNoise(0.4, seed=2),
    ],
    "spatial dropout": lambda: [layers.Reshape((3, 2)), layers.SpatialDropout1D(0.4, seed=1), layers.Flatten()],
}


@pytest.mark.slow
@pytest.mark.law("L20")
@pytest.mark.tf("2.5", because="`compile` has no `jit_compile` yet")
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("behind", BEHIND)
def test_what_is_random_behind_batch_normalisation_is_compiled_by_xla(behind, recompute):
    """XLA draws other numbers than TensorFlow, so the whole batch is the oracle as one micro-batch."""

    def make():
        inputs = tf.keras.Input((3,))
        hidden = layers.BatchNormalization()(layers.Dense(6)(inputs))
        for layer in BEHIND[behind]():
            hidden = layer(hidden)
        return tf.keras.Model(inputs, layers.Dense(2)(hidden))

    def run(size):
        tf.random.set_seed(3)
        return trained(make, X, Y, {"loss": "mse", "jit_compile": True}, split(size, recompute=recompute))

    assert_same(run(8), run(BATCH))


@pytest.mark.slow
@pytest.mark.law("L19")
@pytest.mark.tf("2.5", because="`compile` has no `jit_compile` yet")
def test_a_skip_around_batch_normalisation_is_compiled_by_xla():
    """The gradient of a product asks for the shapes of both factors, and one factor was made before the cut."""

    def make():
        inputs = tf.keras.Input((3,))
        hidden = layers.Dense(6)(inputs)
        return tf.keras.Model(inputs, layers.Dense(2)(layers.multiply([hidden, layers.BatchNormalization()(hidden)])))

    plain = trained(make, X, Y, {"loss": "mse", "jit_compile": True})
    assert_same(trained(make, X, Y, {"loss": "mse", "jit_compile": True}, split()), plain)


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 20, 64])
def test_any_size_of_micro_batches(size):
    plain = trained(at_once, X, Y, dict(EAGERLY, loss="mse"))
    assert_same(trained(at_once, X, Y, dict(EAGERLY, loss="mse"), split(size)), plain)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Batch normalization updates")
def test_the_loss_alone_leaves_batch_normalisation_to_the_micro_batches():
    """`AccumBatchNormalization` moves its statistics once, by those of the whole batch, also when computed again."""
    make, x, y, compile_with = CASES["AccumBatchNormalization"]
    compile_with = dict(compile_with, **EAGERLY)
    with pytest.warns(accum.InexactWarning, match="may look across the examples"):
        by_loss = trained(make, x, y, compile_with, split(whole_batch="loss"))
    without = trained(make, x, y, compile_with, split(whole_batch=()))
    assert_same(by_loss, without)
    assert differs(by_loss, trained(make, x, y, compile_with))


@pytest.mark.slow
def test_the_loss_alone_names_where_examples_meet():
    stack = [tf.keras.Input((3,)), layers.Dense(4), layers.Softmax(axis=0), layers.Dense(2)]
    at_once = lambda: tf.keras.Sequential(stack)  # noqa: E731
    expected = trained(at_once, X, Y, dict(EAGERLY, loss="mse"))
    with pytest.warns(accum.InexactWarning, match="may look across the examples"):
        assert differs(trained(at_once, X, Y, dict(EAGERLY, loss="mse"), split(whole_batch="loss")), expected)
    assert_same(trained(at_once, X, Y, dict(EAGERLY, loss="mse"), split()), expected)


@pytest.mark.slow
def test_a_batch_is_tried_again_when_memory_runs_out():
    """Under "auto": at half the size, with the same numbers in the end."""

    class Full(layers.Layer):
        is_full = True

        def call(self, inputs):
            def check(count):
                if count > 10 and Full.is_full:
                    raise MemoryError

            with tf.control_dependencies([tf.py_function(check, [tf.shape(inputs)[0]], [])]):
                return tf.identity(inputs)

    def with_dropout():
        return with_layer(tf.keras.Sequential([Full(), layers.Dropout(0.5, seed=3)]))

    compile_with = dict({"loss": "mse", "metrics": ["mae"]}, **TRACED)
    with pytest.warns(UserWarning, match="Memory ran out, so `micro_batch_size` is 10"):
        ours = trained(with_dropout, X, Y, compile_with, split("auto"))
    Full.is_full = False
    assert_same(ours, trained(with_dropout, X, Y, compile_with, split(10)))


@pytest.mark.slow
@pytest.mark.parametrize("accum_steps", [1, 2])
def test_replicas_share_the_statistics(accum_steps):
    """Cycles weight replicas by their examples: of 31, the second batch has 8 and 7 on them."""
    batch, count = (BATCH, COUNT) if accum_steps == 1 else (16, 31)
    strategy = mirrored()
    with strategy.scope():
        model = split(accum_steps=accum_steps)(filled(small()))
        how = TRACED if accum_steps == 1 else EAGERLY
        model.compile(tf.keras.optimizers.SGD(0.05, momentum=0.5), FROM_LOGITS, **how)
    data = tf.data.Dataset.from_tensor_slices((IMAGES[:count], CLASSES[:count])).batch(batch)
    history = model.fit(data, epochs=2, verbose=0).history
    wrap = unchanged if accum_steps == 1 else plainly_accumulated
    images, classes = IMAGES[:count], CLASSES[:count]
    plain = trained(small, images, classes, dict(EAGERLY, loss=FROM_LOGITS), wrap, epochs=2, batch_size=batch)
    if accum_steps == 1:
        assert_same((model, model.get_weights(), history), plain)
    else:  # Keras' moving statistics move once per batch here as there
        assert_same((model, model.get_weights(), {}), (model, plain[1], {}))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.filterwarnings("ignore:Batch normalization updates")
def test_mixed_precision(policy):
    """Against float32: in float16, plain Keras loses a step to an overflow that sums of micro-batches don't have."""

    def made():
        return with_layer(layers.ReLU())

    exact = trained(made, X, Y, dict(EAGERLY, loss="mse"), epochs=1)
    with policy_of(policy):
        compile_with = dict({"loss": "mse"}, **TRACED)
        ours, without = (trained(made, X, Y, compile_with, split(whole_batch=which), epochs=1) for which in ("all", ()))
    assert_same(ours, exact, 2e-3)
    assert any(np.abs(mine - whole).max() > 1e-2 for mine, whole in zip(without[1], exact[1]))


@pytest.mark.law("L10")
@pytest.mark.tf("2.4", because="its kernels for processors know no bfloat16")
def test_the_gradient_of_a_weight_that_is_read_in_sixteen_bits_counts_once():
    """Keras 2 lists another object than the variable that is read. A step moves weights by up to 0.1."""
    with policy_of("mixed_bfloat16"):
        ours, plain = (trained(dense, X, Y, dict(EAGERLY, loss="mse"), wrap) for wrap in (split(), unchanged))
    assert_near(ours[1], plain[1], atol=2e-3)


@pytest.mark.slow
def test_cycles_of_whole_batches():
    """`accum_steps` counts batches. Each has statistics of its own, as in plain accumulation of such batches."""
    compile_with = dict(EAGERLY, loss=FROM_LOGITS)
    cycles = split(8, accum_steps=2)
    plain = trained(
        replaced_for_cycles, IMAGES, CLASSES, compile_with, lambda model: plainly_accumulated(model), batch_size=16
    )
    assert_same(trained(replaced_for_cycles, IMAGES, CLASSES, compile_with, cycles, batch_size=16), plain)


def replaced_for_cycles():
    return accum.replace_batchnorm_layers(small(), accum_steps=2)


def plainly_accumulated(model):
    return accum.GradientAccumulateModel.from_model(model, accum_steps=2)


def unchanged(model):
    return model


@contextlib.contextmanager
def policy_of(name):
    home = tf.keras.mixed_precision if TF_VERSION >= (2, 4) else tf.keras.mixed_precision.experimental
    choose = home.set_global_policy if TF_VERSION >= (2, 4) else home.set_policy
    choose(name)
    try:
        yield
    finally:
        choose("float32")


@pytest.mark.slow
def test_rows_of_embeddings_stay_rows():
    """The gradient of a table that is used twice, before and after a barrier, has its rows of both."""
    grads = []

    def taken(grads_and_vars):
        grads.extend(grad for grad, var in grads_and_vars if tuple(var.shape) == (6, 3))
        return grads_and_vars

    def table():
        tokens = tf.keras.Input((4,), dtype="int32")
        shared = layers.Embedding(6, 3)
        hidden = layers.BatchNormalization()(shared(tokens))
        hidden = layers.BatchNormalization()(layers.Add()([hidden, shared(tokens)]))
        return tf.keras.Model(tokens, layers.Dense(2)(hidden))

    y = np.repeat(Y[:, None], 4, axis=1)
    ours = trained(table, TOKENS, y, dict(EAGERLY, loss="mse"), split(transform=taken))
    assert_same(ours, trained(table, TOKENS, y, dict(EAGERLY, loss="mse")))
    assert grads and all(isinstance(grad, tf.IndexedSlices) for grad in grads)


@pytest.mark.slow
def test_what_a_layer_of_the_user_computes_across_examples_is_that_of_the_batch():
    class AwayFromOthers(layers.Layer):
        """Appends the standard deviation over the examples, as a GAN's discriminator does."""

        def call(self, inputs):
            spread = tf.math.reduce_std(inputs, axis=0, keepdims=True)
            return tf.concat([inputs, tf.repeat(spread, tf.shape(inputs)[0], axis=0)], axis=1)

    compile_with = dict(EAGERLY, loss="mse")
    plain = trained(lambda: with_layer(AwayFromOthers()), X, Y, compile_with)
    assert_same(trained(lambda: with_layer(AwayFromOthers()), X, Y, compile_with, split()), plain)
    with pytest.warns(accum.InexactWarning):
        assert differs(trained(lambda: with_layer(AwayFromOthers()), X, Y, compile_with, split(whole_batch=())), plain)

    def alone():
        inputs = tf.keras.Input((3,))
        return tf.keras.Model(inputs, layers.Dense(2)(AwayFromOthers()(layers.Dense(4)(inputs))))

    ours, plain = (trained(alone, X, Y, compile_with, wrap) for wrap in (split(), unchanged))
    assert_same(ours, plain)
    for method in ("evaluate", "predict"):
        data = (X,) if method == "predict" else (X, Y)
        results = [getattr(model, method)(*data, batch_size=BATCH, verbose=0) for model, _, _ in (ours, plain)]
        np.testing.assert_allclose(results[0], results[1], rtol=2e-5, atol=2e-5)

    class Wraps(layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = AwayFromOthers(name="hidden_one")

        def call(self, inputs):
            return self.inner(inputs)

    plain = trained(lambda: with_layer(Wraps()), X, Y, compile_with)
    assert_same(trained(lambda: with_layer(Wraps()), X, Y, compile_with, split()), plain)


class Centred(layers.Layer):
    """Subtracts the mean over the examples and time steps that are not masked."""

    def call(self, inputs, mask=None):
        counted = tf.ones_like(inputs) if mask is None else tf.cast(mask, inputs.dtype)[..., None]
        return inputs - tf.reduce_sum(inputs * counted) / tf.reduce_sum(tf.ones_like(inputs) * counted)


class AsksFor(layers.Layer):
    """Calls another layer with the mask of its inputs, if that has an argument for it, as wrappers of Keras 2 do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, inputs, mask=None):
        takes_it = "mask" in inspect.getfullargspec(self.inner.call).args
        return self.inner(inputs, mask=mask) if takes_it else self.inner(inputs)


@pytest.mark.slow
@pytest.mark.parametrize("inner", [Centred, layers.BatchNormalization])
def test_a_layer_may_ask_which_arguments_another_one_takes(inner):
    def make():
        inputs = tf.keras.Input((4,), dtype="int32")
        hidden = AsksFor(inner())(layers.Embedding(6, 3, mask_zero=True)(inputs))
        return tf.keras.Model(inputs, layers.Dense(2)(hidden))

    y, compile_with = np.repeat(Y[:, None], 4, axis=1), dict(EAGERLY, loss="mse")
    plain = trained(make, TOKENS, y, compile_with)
    assert_same(trained(make, TOKENS, y, compile_with, split()), plain)


class WithRanks(layers.Layer):
    """Returns also integers, and a number by which others only decide."""

    def call(self, inputs):
        centred = inputs - tf.reduce_mean(inputs, axis=0)
        return centred, tf.argsort(tf.argsort(inputs[:, 0])), tf.reduce_sum(centred, axis=1)


class ByRanks(layers.Layer):
    def call(self, inputs):
        centred, ranks, sums = inputs
        return centred * (0.1 * tf.cast(ranks, tf.float32) + tf.cast(sums > 0.0, tf.float32))[:, None]


class AwayFromItsClass(layers.Layer):
    """Takes also integers, and numbers that only decide."""

    def call(self, inputs):
        hidden, classes, gates = inputs
        same = tf.cast(classes[:, None] == classes[None, :], tf.float32)
        hidden -= tf.matmul(same, hidden) / tf.reduce_sum(same, axis=1, keepdims=True)
        return hidden * tf.cast(gates > tf.reduce_mean(gates, axis=0), tf.float32)


class OfTable(layers.Layer):
    """Has a table of its own, whose gradient is one of rows."""

    def build(self, shape):
        self.table = self.add_weight(name="table", shape=(6, 3), initializer="ones")

    def call(self, tokens):
        hidden = tf.reduce_mean(tf.gather(tf.convert_to_tensor(self.table), tokens), axis=1)
        return hidden - tf.reduce_mean(hidden, axis=0)


def ranked():
    inputs = tf.keras.Input((3,))
    return tf.keras.Model(inputs, layers.Dense(2)(ByRanks()(WithRanks()(layers.Dense(4)(inputs)))))


def by_class():
    inputs, classes = tf.keras.Input((3,)), tf.keras.Input((), dtype="int32")
    hidden = [layers.Dense(4)(inputs), classes, layers.Dense(4)(inputs)]
    return tf.keras.Model([inputs, classes], layers.Dense(2)(AwayFromItsClass()(hidden)))


def of_table():
    tokens = tf.keras.Input((4,), dtype="int32")
    return tf.keras.Model(tokens, layers.Dense(2)(OfTable()(tokens)))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", "traced"])
@pytest.mark.parametrize(
    "make,data",
    [(ranked, X), (by_class, [X, CLASSES[: len(X)].astype("int32")]), (of_table, TOKENS)],
    ids=["ranked", "by class", "of table"],
)
def test_what_examples_meet_in_may_take_and_return_what_has_no_gradient(make, data, how):
    compile_with = dict({"loss": "mse"}, **(EAGERLY if how == "eager" else TRACED))
    assert_same(trained(make, data, Y, compile_with, split()), trained(make, data, Y, compile_with))


class MovesCentre(layers.Layer):
    """Moves an average of what it is given, and reads it before or after that."""

    def __init__(self, is_after):
        super().__init__()
        self.is_after = is_after

    def build(self, shape):
        self.centre = self.add_weight(name="centre", shape=(4,), initializer="zeros", trainable=False)
        self.largest = tf.keras.metrics.Mean(name="largest")

    def call(self, inputs):
        before = tf.convert_to_tensor(self.centre)
        self.centre.assign(0.9 * before + 0.1 * tf.reduce_mean(inputs, axis=0))
        self.largest.update_state(tf.reduce_max(inputs))
        return inputs - (tf.convert_to_tensor(self.centre) if self.is_after else before)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", "traced"])
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.filterwarnings("error:The train step changes variables")
def test_what_a_layer_assigns_is_that_of_the_batch(is_after, how):
    """Each of two steps, also a metric that it updates."""

    def make():
        inputs = tf.keras.Input((3,))
        hidden = layers.BatchNormalization()(MovesCentre(is_after)(layers.Dense(4)(inputs)))
        return tf.keras.Model(inputs, layers.Dense(2)(hidden))

    compile_with = dict({"loss": "mse"}, **(EAGERLY if how == "eager" else TRACED))
    plain = trained(make, X, Y, compile_with)
    assert_same(trained(make, X, Y, compile_with, split()), plain)


class Notes(layers.Layer):
    def call(self, inputs):
        self.noted = 2.0 * inputs
        return self.noted


class AwayFromNoted(layers.Layer):
    """Takes the mean of what it is given, or of what another layer has noted."""

    def __init__(self, layer, is_given):
        super().__init__()
        self.others, self.is_given = layer, is_given

    def call(self, inputs):
        hidden, noted = inputs
        return hidden - tf.reduce_mean(noted if self.is_given else self.others.noted, axis=0)


@pytest.mark.slow
def test_a_layer_may_take_what_another_one_has_noted():
    def make(is_given):
        inputs, notes = tf.keras.Input((3,)), Notes()
        noted = notes(layers.Dense(4)(inputs))
        return tf.keras.Model(inputs, layers.Dense(2)(AwayFromNoted(notes, is_given)([layers.Dense(4)(noted), noted])))

    compile_with = dict({"loss": "mse"}, **EAGERLY)
    plain = trained(lambda: make(False), X, Y, compile_with)
    for is_given in (False, True):
        assert_same(trained(lambda: make(is_given), X, Y, compile_with, split()), plain)  # noqa: B023


class Branches(layers.Layer):
    """Needs AutoGraph, which Keras 2 uses for layers in a train function."""

    def call(self, inputs):
        hidden = inputs
        if tf.equal(tf.math.mod(tf.shape(inputs)[1], 2), 0):
            hidden = 2.0 * inputs
        return tf.ensure_shape(hidden, inputs.shape)


@pytest.mark.slow
@pytest.mark.tf(keras=2, because="its train function uses no AutoGraph")
def test_a_layer_that_needs_autograph_has_it():
    net = behind(Branches())
    initial, plain = net.get_weights(), tf.keras.models.clone_model(net)
    plain.set_weights(initial)
    plain.compile("sgd", FROM_LOGITS)
    plain.train_on_batch(IMAGES[:BATCH], CLASSES[:BATCH])
    step_of(net, "all")
    assert_near(net.get_weights(), plain.get_weights(), atol=2e-5)


class LooksWithin(layers.Layer):
    """Meets examples only where that is no error: in a loss, and in what a barrier of its own gets."""

    def __init__(self):
        super().__init__()
        self._norm, self._attention = layers.LayerNormalization(), layers.MultiHeadAttention(1, 2)

    def call(self, inputs):
        self.add_loss(0.01 * tf.reduce_mean(inputs**2))
        rows = tf.reshape(self._norm(inputs), [-1, 64, 2])
        return tf.reshape(self._attention(rows, rows), tf.shape(inputs)) + tf.reduce_max(inputs, [1, 2], keepdims=True)


def behind(layer):
    inputs = tf.keras.Input((8, 8, 2))
    hidden = layers.BatchNormalization()(layer(inputs))
    return tf.keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(hidden)))


def step_of(net, whole_batch):
    model = accum.GradientAccumulateModel.from_model(net, micro_batch_size=8, whole_batch=whole_batch)
    model.compile("sgd", FROM_LOGITS)
    model.train_on_batch(IMAGES[:BATCH], CLASSES[:BATCH])


@pytest.mark.slow
@pytest.mark.tf("2.5", because="no `MultiHeadAttention`, or one that needs static shapes")
@pytest.mark.parametrize("how", ["eager", "traced"])
def test_what_looks_within_an_example_is_neither_a_barrier_nor_named(how):
    """A layer normalisation is the same operation as a batch normalisation, with examples as its features."""
    compile_with = dict({"loss": FROM_LOGITS}, **(EAGERLY if how == "eager" else TRACED))
    plain = trained(lambda: behind(LooksWithin()), IMAGES, CLASSES, compile_with)
    assert_same(trained(lambda: behind(LooksWithin()), IMAGES, CLASSES, compile_with, split()), plain)


def slots_of(model):
    variables = model.optimizer.variables
    return list(variables() if callable(variables) else variables)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["residual", "sequential"])
def test_the_step_is_traced_once(name):
    """TensorFlow would trace it again if its first trace created slots or metrics, as it does for plain Keras."""
    traces = []

    def loss(y_true, y_pred):
        traces.append(name)
        return tf.reduce_mean((tf.cast(y_true, tf.float32) - y_pred) ** 2, axis=-1)

    def fitted(wrap):
        model = wrap(globals()[name]())
        model.compile(tf.keras.optimizers.Adam(), loss, metrics=["mae"])
        x = np.ones((12,) + tuple(model.input_shape[1:]), "float32")
        model.fit(x, np.ones((12,) + tuple(model.output_shape[1:]), "float32"), batch_size=12, verbose=0)
        return model

    plain = fitted(lambda model: model)
    assert len(traces) > 1
    traces.clear()
    ours = fitted(split())
    assert len(traces) == 1
    assert [metric.name for metric in ours.metrics] == [metric.name for metric in plain.metrics]
    assert len(slots_of(ours)) == len(slots_of(plain))


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"run_eagerly": True}, {}], ids=["eagerly", "traced"])
def test_a_train_step_that_differentiates_twice(how):
    """A persistent tape asks for the gradient of one forward pass as often as it likes."""

    class Own(tf.keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                outputs = self(x, training=True)
                loss, sparsity = covariance(y, outputs), tf.reduce_mean(tf.abs(outputs))
            grads, others = (tape.gradient(one, self.trainable_variables) for one in (loss, sparsity))
            grads = [one + 0.5 * other for one, other in zip(grads, others)]
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
            return {"loss": loss}

    def own():
        inputs = tf.keras.Input((3,))
        hidden = layers.BatchNormalization()(layers.Dense(4)(inputs))
        return Own(inputs, layers.Dense(2)(layers.ReLU()(hidden)))

    plain = trained(own, X, Y, dict(how))
    for recompute in (True, False):
        assert_same(trained(own, X, Y, dict(how), split(recompute=recompute)), plain)
    with pytest.warns(accum.InexactWarning, match="may look across the examples"):
        assert differs(trained(own, X, Y, dict(how), split(whole_batch="loss")), plain)


@pytest.mark.slow
def test_a_train_step_that_calls_no_layer_is_exact_and_named():
    class Own(tf.keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.matmul(x, self.layers[-1].kernel) - y) ** 2)
            self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
            return {"loss": loss}

    def own():
        inputs = tf.keras.Input((3,))
        return Own(inputs, layers.Dense(2)(inputs))

    with pytest.warns(UserWarning, match="calls no layer with weights"):
        split_weights = trained(own, X, Y, dict(EAGERLY), split())
    assert_same(split_weights, trained(own, X, Y, dict(EAGERLY)))


class Block(layers.Layer):
    """A residual block, whose batch normalisation nobody sees from outside."""

    def __init__(self, decorated=False):
        super().__init__()
        self.first, self.second = layers.Conv2D(4, 3, padding="same"), layers.Conv2D(4, 3, padding="same")
        self.norms = [layers.BatchNormalization(), layers.BatchNormalization()]
        if decorated:
            self.run = tf.function(self.run)

    def call(self, inputs, training=None):
        return self.run(inputs, training)

    def run(self, inputs, training):
        hidden = tf.nn.relu(self.norms[0](self.first(inputs), training=training))
        return tf.nn.relu(inputs + self.norms[1](self.second(hidden), training=training))


class OfBlocks(tf.keras.Model):
    """A subclassed model, one of whose blocks runs twice, and one of which is a `tf.function`."""

    def __init__(self, decorated=False):
        super().__init__()
        self.stem, self.norm = layers.Conv2D(4, 3, padding="same"), layers.BatchNormalization()
        self.blocks = [Block(), Block(decorated)]
        self.head = layers.Dense(3)

    def call(self, inputs, training=None):
        hidden = (
            tf.nn.silu(self.norm(self.stem(inputs), training=training)) if TF_VERSION >= (2, 5) else self.stem(inputs)
        )
        for block in self.blocks + self.blocks[:1]:
            hidden = block(hidden, training=training)
        return self.head(tf.reduce_mean(hidden, [1, 2]))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", pytest.param("traced", marks=pytest.mark.slow)])
@pytest.mark.parametrize("decorated", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "tf.function"])
def test_batch_normalisation_within_layers_and_models_of_the_users_own(decorated, how):
    compile_with = dict({"loss": FROM_LOGITS}, **(EAGERLY if how == "eager" else TRACED))
    plain = trained(OfBlocks, IMAGES, CLASSES, compile_with)
    assert_same(trained(lambda: OfBlocks(decorated), IMAGES, CLASSES, compile_with, split()), plain)
    with pytest.warns(accum.InexactWarning, match="may look across the examples"):
        assert differs(trained(OfBlocks, IMAGES, CLASSES, compile_with, split(whole_batch="loss")), plain)


class ByHand(layers.Layer):
    """Normalises by `tf.nn`, as code without Keras does, and keeps a moving average itself."""

    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=(shape[-1],), initializer="ones")
        self.average = self.add_weight(name="average", shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, inputs):
        mean, variance = tf.nn.moments(inputs, [0, 1, 2])
        self.average.assign(0.75 * self.average + 0.25 * mean)
        return tf.nn.batch_normalization(inputs, mean, variance, None, tf.convert_to_tensor(self.scale), 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", "traced"])
def test_batch_normalisation_by_operations_of_tensorflow(how):
    """Beside that of Keras. The user's average moves once."""

    def make():
        inputs = tf.keras.Input((6, 6, 2))
        hidden = layers.BatchNormalization()(layers.Conv2D(4, 3)(inputs))
        hidden = ByHand()(layers.Conv2D(4, 3)(tf.keras.layers.ReLU()(hidden)))
        return tf.keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(hidden)))

    images = IMAGES[:, :6, :6, :2] if IMAGES.shape[-1] >= 2 else np.concatenate([IMAGES] * 2, -1)[:, :6, :6]
    compile_with = dict({"loss": FROM_LOGITS}, **(EAGERLY if how == "eager" else TRACED))
    plain = trained(make, images, CLASSES, compile_with)
    assert_same(trained(make, images, CLASSES, compile_with, split()), plain)
    with pytest.warns(accum.InexactWarning, match="may look across the examples"):
        assert differs(trained(make, images, CLASSES, compile_with, split(whole_batch="loss")), plain)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", "traced"])
def test_randomness_within_a_loop_is_refused_by_name(how):
    class Hidden(layers.Layer):
        def call(self, inputs):
            return tf.while_loop(
                lambda step, _: step < 2, lambda step, x: (step + 1, x * tf.random.uniform(tf.shape(x))), (0, inputs)
            )[1]

    compile_with = dict({"loss": "mse"}, **(EAGERLY if how == "eager" else TRACED))
    with pytest.raises(ValueError, match="hidden_loop.*RandomUniform"):
        trained(lambda: with_layer(Hidden(name="hidden_loop")), X, Y, compile_with, split())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", "traced"])
def test_a_sum_over_the_examples_may_be_added_behind_a_barrier(how):

    class Scaled(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = layers.Dense(4), layers.BatchNormalization(), layers.Dense(2)

        def call(self, inputs, training=None):
            size = tf.reduce_sum(0.1 * inputs)
            return self.last(self.norm(self.first(inputs), training=training)) + size

    compile_with = dict({"loss": "mse"}, **(EAGERLY if how == "eager" else TRACED))
    plain = trained(Scaled, X, Y, compile_with)
    assert_same(trained(Scaled, X, Y, compile_with, split()), plain)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", "traced"])
def test_what_is_drawn_and_assigned_is_named(how):
    class Keeps(layers.Layer):
        def build(self, input_shape):
            self.drawn = self.add_weight(name="drawn", shape=(), initializer="zeros", trainable=False)

        def call(self, inputs):
            self.drawn.assign(tf.random.gamma([], 1.0))
            return inputs * (1.0 + 0.0 * tf.convert_to_tensor(self.drawn))

    compile_with = dict({"loss": "mse"}, **(EAGERLY if how == "eager" else TRACED))
    with pytest.warns(UserWarning, match="changes variables once per micro-batch.*drawn"):
        model, weights, _ = trained(lambda: with_layer(Keeps()), X, Y, compile_with, split())
    assert all(np.isfinite(weight).all() for weight in weights)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loop", "conditional"])
def test_batch_normalisation_within_a_loop_or_conditional_is_refused_by_name(kind):
    class Hides(layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = layers.BatchNormalization(name="hidden_one")

        def build(self, shape):
            self.inner.build(shape)

        def call(self, inputs, training=None):
            if kind == "loop":
                return tf.while_loop(
                    lambda step, _: step < 2, lambda step, x: (step + 1, self.inner(x, training=True)), (0, inputs)
                )[1]
            is_large = tf.reduce_mean(inputs) > 0.0
            return tf.cond(is_large, lambda: self.inner(inputs, training=True), lambda: tf.identity(inputs))

    with pytest.raises(ValueError, match="within a loop or conditional.*hidden_one"):
        trained(lambda: with_layer(Hides()), X, Y, dict(TRACED, loss="mse"), split())


@pytest.mark.slow
def test_batch_normalisation_of_another_class_is_refused_by_name():
    class Own(layers.BatchNormalization):
        pass

    with pytest.raises(ValueError, match="its_own.*class"):
        trained(lambda: with_layer(Own(name="its_own")), X, Y, dict(EAGERLY, loss="mse"), split())


@pytest.mark.slow
def test_the_gradient_is_the_finite_difference():
    """In float64, of a loss of the whole batch by the weights before and between barriers."""
    with policy_of("float64"):
        grads = []

        def taken(grads_and_vars):
            grads.extend(np.array(grad) for grad, _ in grads_and_vars)
            return grads_and_vars

        def loss_of(weights):
            model = at_once()
            model.set_weights(weights)
            outputs = model(tf.constant(X[:12], tf.float64), training=True)
            return float(covariance(tf.constant(Y[:12], tf.float64), outputs))

        model = filled(at_once())
        weights = model.get_weights()
        trainable = [
            index for index, var in enumerate(model.weights) if any(var is one for one in model.trainable_weights)
        ]
        ours = split(5, transform=taken)(model)
        ours.compile(tf.keras.optimizers.SGD(0.0), covariance, **EAGERLY)
        ours.train_on_batch(X[:12].astype("float64"), Y[:12].astype("float64"))
        for index, grad in zip(trainable, grads):
            position = tuple(size // 2 for size in grad.shape)
            sides = []
            for sign in (1.0, -1.0):
                moved = [np.array(weight) for weight in weights]
                moved[index][position] += sign * 1e-5
                sides.append(loss_of(moved))
            np.testing.assert_allclose(grad[position], (sides[0] - sides[1]) / 2e-5, rtol=1e-5, atol=1e-7)


def own_train_step(loss_of, model_class=tf.keras.Model):
    """A model class whose train step computes `loss_of(model, x, y)`."""

    class Own(model_class):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = loss_of(self, x, y)
            self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
            return {"loss": loss}

    return Own


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", "traced"])
@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.filterwarnings("ignore:.*from_logits=True")
def test_losses_find_the_logits_behind_a_softmax(from_logits, how):
    """Keras computes the loss from them, also if it is wrongly told that probabilities are logits."""

    def make():
        inputs = tf.keras.Input((3,))
        hidden = layers.BatchNormalization()(layers.Dense(4)(inputs))
        return tf.keras.Model(inputs, layers.Dense(3, activation="softmax")(hidden))

    loss = losses.SparseCategoricalCrossentropy(from_logits=from_logits)
    compile_with = dict({"loss": loss, "metrics": ["accuracy"]}, **(EAGERLY if how == "eager" else TRACED))
    plain = trained(make, X, CLASSES, compile_with)
    assert_same(trained(make, X, CLASSES, compile_with, split()), plain)


@pytest.mark.slow
def test_losses_beside_the_call():
    """A layer that the train step calls itself adds its loss, and a model that is called twice adds those of a call."""

    def loss_of(model, x, y):
        first = model(x, training=True)
        second = model(2.0 * x, training=True)
        return tf.reduce_mean((first - y) ** 2) + tf.reduce_mean(second**2) + tf.add_n(model.losses)

    def make():
        inputs = tf.keras.Input((3,))
        hidden = layers.BatchNormalization()(layers.Dense(4, **REGULARIZED)(inputs))
        return own_train_step(loss_of)(inputs, layers.Dense(2, kernel_regularizer="l2")(hidden))

    assert_same(trained(make, X, Y, EAGERLY, split()), trained(make, X, Y, EAGERLY))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", pytest.param("traced", marks=pytest.mark.slow)])
def test_a_gradient_by_the_inputs_is_that_of_the_whole_batch(how):
    def loss_of(model, x, y):
        return tf.reduce_mean((model(x * tf.cast(model.scale, x.dtype), training=True) - y) ** 2)

    class Scaled(tf.keras.Sequential):
        def __init__(self):
            super().__init__([tf.keras.Input((3,)), layers.Dense(2)])
            self.scale = tf.Variable(1.0)

    compile_with = EAGERLY if how == "eager" else TRACED
    make = own_train_step(loss_of, Scaled)
    assert_same(trained(make, X, Y, compile_with, split()), trained(make, X, Y, compile_with))


@pytest.mark.slow
def test_outputs_without_a_batch_axis_are_refused():
    class Wrong(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, inputs):
            return tf.matmul(inputs, self.dense(inputs), transpose_a=True)

    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="first axis of each must be the batch"):
        trained(Wrong, X, np.zeros((COUNT, 2), "float32"), dict(EAGERLY, loss=covariance), split(), batch_size=16)


@pytest.mark.slow
def test_an_optimizer_that_does_not_accumulate_stays_plain():
    """No accumulators: a checkpoint has the variables of a plain optimizer."""
    ours, plain = (trained(dense, X, Y, dict(EAGERLY, loss="mse"), wrap)[0] for wrap in (split(), unchanged))
    variables = [
        model.optimizer.variables() if callable(model.optimizer.variables) else model.optimizer.variables
        for model in (ours, plain)
    ]
    assert sorted(tuple(var.shape) for var in variables[0]) == sorted(tuple(var.shape) for var in variables[1])


@pytest.mark.slow
def test_what_moves_per_micro_batch_warns():
    with warned() as said:
        trained(sequential, X, Y, dict(EAGERLY, loss="mse"), split(whole_batch="loss"))
    for words in ("Batch normalization updates", "may look across the examples"):
        assert any(words in text for text in said)
    with pytest.warns(UserWarning, match="changes variables once per micro-batch.*largest"):
        trained(lambda: with_layer(Remembers()), X, Y, dict(EAGERLY, loss="mse"), split())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", "traced"])
def test_what_a_layer_assigns_without_the_data_is_assigned_once(how):
    """A count of calls, which scales what the layer returns: plain Keras counts each batch once."""
    compile_with = dict({"loss": "mse"}, **(EAGERLY if how == "eager" else TRACED))
    plain = trained(lambda: with_layer(Counts()), X, Y, compile_with)
    assert_same(trained(lambda: with_layer(Counts()), X, Y, compile_with, split()), plain)


@pytest.mark.slow
@pytest.mark.law("L9", "L19")
def test_nan_propagates_as_in_the_full_batch():
    """NaN differs from itself, but it is no sign of a layer that computes something else the second time."""
    inputs = tf.keras.Input((3,))
    model = tf.keras.Model(inputs, layers.Dense(2)(inputs))
    model = accum.GradientAccumulateModel.from_model(model, micro_batch_size=2, whole_batch="loss")
    model.set_weights([np.full([3, 2], np.nan), np.zeros(2)])
    model.compile(tf.keras.optimizers.SGD(0.1), covariance, **TRACED)
    model.fit(X[:4], Y[:4], batch_size=4, epochs=2, verbose=0)
    assert all(np.isnan(weight).all() for weight in model.get_weights())


class OfSparse(layers.Layer):
    """A dense layer for sparse inputs, which Keras 3 lacks."""

    def build(self, input_shape):
        self.kernel = self.add_weight(name="kernel", shape=(6, 4))

    def call(self, inputs):
        return tf.sparse.sparse_dense_matmul(inputs, tf.convert_to_tensor(self.kernel))


def of_sparse():
    inputs = tf.keras.Input((6,), sparse=True)
    return tf.keras.Model(inputs, layers.Dense(2)(layers.BatchNormalization()(OfSparse()(inputs))))


@pytest.mark.slow
def test_inputs_may_be_sparse():
    dense = np.random.RandomState(0).normal(size=(COUNT, 6)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(np.where(dense > 0.3, dense, 0.0)), Y))

    def run(wrap, **options):
        model = wrap(filled(of_sparse()))
        model.compile(tf.keras.optimizers.SGD(0.05), "mse", **TRACED)
        history = model.fit(data.batch(BATCH), verbose=0, **options).history
        return model, model.get_weights(), history

    plain = run(lambda model: model)
    assert_same(run(split()), plain)


@pytest.mark.slow
@pytest.mark.skipif(TF_VERSION < (2, 5) or IS_KERAS_3, reason="no losses of ragged outputs")
def test_a_ragged_output_is_refused_by_name():
    inputs = tf.keras.Input((None, 1), ragged=True)
    model = split(whole_batch="loss")(tf.keras.Model(inputs, layers.TimeDistributed(layers.Dense(1))(inputs)))
    model.compile("sgd", "mse", **EAGERLY)
    rows = tf.RaggedTensor.from_row_lengths(np.ones((4, 1), "float32"), [1, 3])
    with pytest.raises(ValueError, match="must be dense tensors"):
        model.train_on_batch(rows, rows)


def always_in_training():
    """Batch normalisation that uses the batch even in prediction, alone and in a nested model; one that follows."""
    inner_inputs = tf.keras.Input((4,))
    inner = tf.keras.Model(inner_inputs, layers.BatchNormalization()(layers.Dense(3)(inner_inputs)))
    inputs = tf.keras.Input((3,))
    hidden = layers.BatchNormalization()(layers.Dense(4)(inputs), training=True)
    hidden = inner(layers.Activation("tanh")(hidden), training=True)
    return tf.keras.Model(inputs, layers.Dense(2)(layers.BatchNormalization()(hidden)))


@pytest.mark.slow
@pytest.mark.law("L13")
@pytest.mark.parametrize("whole_batch", ["all", "batch_norm"])
@pytest.mark.filterwarnings("ignore:Batch normalization updates")
def test_batch_normalisation_that_is_always_in_training_sees_whole_batches_in_prediction(whole_batch):
    """As in pix2pix. Evaluating moves its statistics too, as in plain Keras."""

    def run(wrap):
        model = trained(always_in_training, X, Y, dict({"loss": "mse"}, **EAGERLY), wrap)[0]
        predicted = model.predict(X, batch_size=BATCH, verbose=0)
        evaluated = model.evaluate(X, Y, batch_size=BATCH, verbose=0)
        return [predicted, evaluated] + model.get_weights()

    ours, plain = run(split(whole_batch=whole_batch)), run(lambda model: model)
    assert_near(ours, plain, rtol=2e-5, atol=2e-5)
    if not IS_KERAS_3:  # which lets the model decide
        with pytest.warns(UserWarning, match="always in training normalises by micro-batches in `evaluate`"):
            by_micro_batches = run(split(whole_batch=()))
        assert np.abs(by_micro_batches[0] - plain[0]).max() > 1e-2


class AddsMetric(layers.Layer):
    def call(self, inputs):
        self.add_metric(tf.reduce_mean(inputs), name="mean", aggregation="mean")
        return inputs


class AddsPenalty(layers.Layer):
    """Adds a loss of its weights alone, in each call."""

    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=(int(shape[-1]),), initializer="ones")

    def call(self, inputs):
        self.add_loss(0.1 * tf.reduce_sum(tf.convert_to_tensor(self.scale) ** 2))
        return self.scale * inputs


class AddsByName(layers.Layer):
    def call(self, inputs):
        self.add_loss(**{"loss" if IS_KERAS_3 else "losses": tf.reduce_mean(inputs**2)})
        return inputs


class AddsByOwnMethod(AddsByName):
    def add_loss(self, *args, **kwargs):
        super().add_loss(*args, **kwargs)


class AddsLosses(layers.Layer):
    """Adds one number for each example, which Keras adds up, and one for all."""

    def call(self, inputs):
        self.add_loss(0.1 * tf.reduce_mean(inputs**2, axis=-1))
        self.add_loss(0.2 * tf.reduce_mean(inputs**2))
        return inputs


class AddsGrowingPenalty(layers.Layer):
    """Adds a loss of its weights, by the number of calls."""

    def build(self, shape):
        self.calls = self.add_weight(name="calls", shape=(), initializer="zeros", trainable=False)
        self.scale = self.add_weight(name="scale", shape=(int(shape[-1]),), initializer="ones")

    def call(self, inputs):
        self.calls.assign_add(1.0)
        self.add_loss(0.1 * tf.convert_to_tensor(self.calls) * tf.reduce_sum(tf.convert_to_tensor(self.scale) ** 2))
        return self.scale * inputs


@pytest.mark.slow
@pytest.mark.parametrize("whole_batch", ["all", "loss"])
@pytest.mark.parametrize(
    "layer",
    [
        AddsByName,
        AddsByOwnMethod,
        AddsPenalty,
        AddsGrowingPenalty,
        pytest.param(AddsMetric, marks=pytest.mark.skipif(IS_KERAS_3, reason="layers of Keras 3 add no metrics")),
        pytest.param(AddsLosses, marks=pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 adds up one shape")),
    ],
)
def test_what_layers_add_is_that_of_the_batch(layer, whole_batch):
    """Batches of 20 as 4 + 8 + 8."""

    def make():
        inputs = tf.keras.Input((3,))
        hidden = layer()(layers.Dense(4)(inputs))
        hidden = layers.BatchNormalization()(hidden) if whole_batch == "all" else hidden
        return tf.keras.Model(inputs, layers.Dense(2)(hidden))

    compile_with = dict({"loss": "mse"}, **EAGERLY)
    plain = trained(make, X, Y, compile_with)
    assert_same(trained(make, X, Y, compile_with, split(whole_batch=whole_batch)), plain)
