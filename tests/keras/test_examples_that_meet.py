"""What examples meet in is computed with the whole batch, and the rest of a network in micro-batches (law L19).

The oracle is plain Keras on the whole batch. What can't be split at all is computed at once, which a warning says.
"""

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_near
from versions import IS_KERAS_3, TF_VERSION
from warned import warned

import accum

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.law("L19"), pytest.mark.slow]

layers = tf.keras.layers
COUNT, TIMES, FEATURES, SIZE = 8, 6, 4, 4
RANDOM = np.random.RandomState(3)
X = (RANDOM.normal(size=(COUNT, TIMES, FEATURES)) * np.linspace(0.3, 2.0, COUNT)[:, None, None]).astype("float32")
Y = RANDOM.normal(size=(COUNT, 2)).astype("float32")


def attention_between_examples(hidden):
    flat = tf.reshape(hidden, [-1, TIMES * FEATURES])
    return hidden * (1.0 + tf.reduce_sum(tf.nn.softmax(tf.matmul(flat, flat, transpose_b=True)) ** 2, 1)[:, None, None])


@tf.function
def by_the_largest(hidden):
    return hidden / (3.0 + tf.reduce_max(hidden, axis=0))


@tf.function
def by_the_last_axes(hidden):
    mean = tf.reduce_mean(hidden, axis=-3)
    return (hidden - mean) * tf.math.rsqrt(tf.reduce_mean((hidden - mean) ** 2, axis=-3) + 1e-3)


MEETING = {
    "softmax": lambda hidden: tf.nn.softmax(hidden, axis=0),
    "attention": attention_between_examples,
    "einsum": lambda hidden: hidden * tf.reduce_mean(tf.einsum("btf,ctf->bc", hidden, hidden) / 24.0, 1)[:, None, None],
    "gram matrix": lambda hidden: tf.tensordot(hidden, tf.tensordot(hidden, hidden, [[0, 1], [0, 1]]), 1) / 100.0,
    "rolled": lambda hidden: 0.7 * hidden + 0.3 * tf.roll(hidden, 1, axis=0),
    "reversed": lambda hidden: 0.7 * hidden + 0.3 * hidden[::-1],
    "summed up": lambda hidden: tf.cumsum(hidden, axis=0),
    "sorted": lambda hidden: tf.sort(hidden, axis=0),
    "norm": lambda hidden: hidden / tf.math.reduce_euclidean_norm(hidden, axis=0),
    "number of examples": lambda hidden: hidden / tf.cast(tf.shape(hidden)[0], tf.float32),
    "largest one": lambda hidden: hidden * tf.cast(tf.argmax(hidden, axis=0), tf.float32),
    "in a function": by_the_largest,
    "in a function, from the last axis": by_the_last_axes,
}


def net(function, **last):
    inputs = tf.keras.Input((TIMES, FEATURES))
    hidden = layers.BatchNormalization()(layers.Dense(FEATURES)(inputs))
    hidden = layers.Lambda(function)(hidden) if not isinstance(function, layers.Layer) else function(hidden)
    return tf.keras.Model(inputs, layers.Dense(2, **last)(layers.Flatten()(hidden)))


def trained(made, options, run_eagerly=False):
    """Train for a step. Returns the weights, and the warnings of layers that are computed at once."""
    random = np.random.RandomState(1)
    made.set_weights([random.uniform(0.5, 1.5, w.shape) if w.ndim == 1 else w for w in made.get_weights()])
    if options is not None:
        made = accum.GradientAccumulateModel.from_model(made, **{"micro_batch_size": SIZE, **options})
    made.compile(tf.keras.optimizers.SGD(0.05), "mse", run_eagerly=run_eagerly)
    with warned("at once") as said:
        made.fit(X, Y, batch_size=COUNT, shuffle=False, verbose=0)
    return made.get_weights(), said


def both(make, **options):
    """(Our weights, those of plain Keras, what was said)."""
    plain = make()
    ours = make()
    ours.set_weights(plain.get_weights())
    weights, said = trained(ours, options or {"whole_batch": "all"})
    return weights, trained(plain, None)[0], said


@pytest.mark.parametrize("name", MEETING)
def test_examples_meet_in_the_whole_batch(name):
    ours, plain, said = both(lambda: net(MEETING[name]))
    assert not said
    assert_near(ours, plain, rtol=2e-5, atol=2e-5)


@pytest.mark.filterwarnings("ignore:With `whole_batch=\\(\\)`")
@pytest.mark.parametrize("name", ["softmax", "number of examples", "in a function"])
def test_they_would_meet_in_micro_batches_otherwise(name):
    ours, plain, _ = both(lambda: net(MEETING[name]), whole_batch=())
    assert max(np.abs(one - other).max() for one, other in zip(ours, plain)) > 1e-4


class Halved(layers.Layer):
    """A convolution by blocks that stand beside each other in the batch axis for a while."""

    def call(self, inputs):
        blocks = tf.space_to_batch_nd(inputs[..., None], [2, 2], [[0, 0], [0, 0]])
        return tf.batch_to_space(tf.tanh(blocks), [2, 2], [[0, 0], [0, 0]])[..., 0]


APART = {
    "elementwise": lambda: tf.nn.relu,
    "softmax": lambda: tf.nn.softmax,
    "time first": lambda: lambda hidden: tf.transpose(tf.cumsum(tf.transpose(hidden, [1, 0, 2]), axis=0), [1, 0, 2]),
    "flat": lambda: lambda hidden: tf.reshape(tf.tanh(tf.reshape(hidden, [-1, FEATURES])), [-1, TIMES, FEATURES]),
    "blocks": Halved,
    "layer normalisation": layers.LayerNormalization,
    "convolution": lambda: layers.Conv1D(3, 2, dilation_rate=2),
    "recurrent": lambda: layers.LSTM(3, return_sequences=True),
    "distributed": lambda: layers.TimeDistributed(layers.Dense(3)),
}
if TF_VERSION >= (2, 5):
    APART["attention"] = lambda: Attends()


class Attends(layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 3) if TF_VERSION >= (2, 5) else None

    def build(self, shape):
        if IS_KERAS_3:
            self.attention.build(shape, shape)
        super().build(shape)

    def call(self, inputs):
        return self.attention(inputs, inputs)


@pytest.mark.parametrize("name", APART)
def test_operations_within_an_example_are_not_named(name):
    ours, plain, said = both(lambda: net(APART[name]()))
    assert not said
    assert_near(ours, plain, rtol=2e-5, atol=2e-5)


IDS = RANDOM.randint(0, 30, size=(COUNT, 7))


def of_tokens(function, length=7, words=30):
    """A model of ids, whose rows of a large table are small beside biases and products."""
    inputs = tf.keras.Input((length,), dtype="int32")
    hidden = layers.Lambda(function)(layers.Embedding(words, 16)(inputs))
    hidden = layers.Dense(4)(layers.Dense(8, activation="relu")(hidden))
    return tf.keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(hidden)))


@pytest.mark.parametrize("name", ["rolled", "reversed", "softmax", "elementwise"])
def test_examples_of_tokens_meet_too(name):
    make = MEETING[name] if name in MEETING else APART[name]()
    assert_exact(lambda: of_tokens(make, 7, 30000), IDS)


def assert_exact(make, data, targets=Y, at_once=0):
    """Assert that a step is that of plain Keras, and whether a layer is computed at once."""
    plain = make()
    model = accum.GradientAccumulateModel.from_model(make(), micro_batch_size=SIZE - 1, whole_batch="all")
    model.set_weights(plain.get_weights())
    with warned("at once") as said:
        for one in (plain, model):
            one.compile(tf.keras.optimizers.SGD(0.05), "mse")
            one.train_on_batch(data, targets)
    assert len(said) == at_once
    assert_near(model.get_weights(), plain.get_weights(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("layer", [layers.DepthwiseConv2D(3), layers.SeparableConv2D(4, 3)])
def test_examples_may_meet_before_a_convolution_of_each_channel(layer):
    def make():
        inputs = tf.keras.Input((6, 6, 64))
        hidden = layers.Lambda(lambda hidden: 0.5 * hidden + 0.5 * tf.roll(hidden, 1, axis=0))(inputs)
        hidden = type(layer).from_config(layer.get_config())(hidden)
        return tf.keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling2D()(hidden)))

    assert_exact(make, RANDOM.normal(size=(COUNT, 6, 6, 64)).astype("float32"))


def test_large_examples_are_not_named():
    inputs = tf.keras.Input((1100, 1000))
    outputs = layers.Dense(2)(layers.Lambda(lambda images: tf.reduce_mean(images, axis=2)[:, :5])(inputs))
    model = accum.GradientAccumulateModel(inputs=inputs, outputs=outputs, micro_batch_size=1, whole_batch="all")
    model.compile(tf.keras.optimizers.SGD(0.05), "mse")
    with warned("across the examples") as said:
        model.train_on_batch(np.ones((2, 1100, 1000), "float32"), Y[:2])
    assert not said


@pytest.mark.parametrize("groups", [[4, -1], [-1, 4], [-1, 2]])
def test_groups_of_examples_are_those_of_the_batch(groups):
    """A micro-batch fills other groups than the batch."""

    def function(hidden):
        grouped = tf.reshape(hidden, groups + [TIMES, FEATURES])
        return tf.reshape(tf.cumsum(grouped, axis=1 - groups.index(-1)), [-1, TIMES, FEATURES])

    ours, plain, said = both(lambda: net(function))
    assert not said
    assert_near(ours, plain, rtol=2e-5, atol=2e-5)


def normalised_over_the_batch(hidden):
    """Normalises what examples have met in, and what has them on its last axis."""
    last = tf.nn.softmax(tf.transpose(hidden, [1, 2, 0]))
    mean, variance = tf.nn.moments(last, [2], keepdims=True)
    return tf.transpose((last - mean) * tf.math.rsqrt(variance + 1e-2), [2, 0, 1])


NOT_PROVEN = {
    "statistics of a softmax over examples": normalised_over_the_batch,
    "loop over examples": lambda hidden: tf.map_fn(lambda one: one / (4.0 + tf.reduce_max(one, axis=0)), hidden),
    "rows by number": lambda hidden: (
        hidden
        + tf.gather_nd(hidden, tf.stack([tf.range(tf.shape(hidden)[0]), tf.ones_like(hidden[:, 0, 0], tf.int32)], 1))[
            :, None
        ]
    ),
}


@pytest.mark.parametrize("name", NOT_PROVEN)
def test_what_is_not_proven_to_keep_examples_apart_is_exact(name):
    ours, plain, _ = both(lambda: net(NOT_PROVEN[name]))
    assert_near(ours, plain, rtol=2e-5, atol=2e-5)


def test_text_is_not_named():
    inputs = tf.keras.Input((2,), dtype="string")
    lengths = layers.Lambda(lambda words: tf.cast(tf.strings.length(words), "float32"), output_shape=(2,))(inputs)
    model = accum.GradientAccumulateModel(
        inputs=inputs, outputs=layers.Dense(1)(lengths), micro_batch_size=1, whole_batch="all"
    )
    model.compile(tf.keras.optimizers.SGD(0.05), "mse", **({"jit_compile": False} if IS_KERAS_3 else {}))
    with warned("across the examples") as said:
        model.train_on_batch(tf.constant([["a", "bc"], ["def", ""]]), tf.zeros([2, 1]))
    assert not said


class AddsSquare(layers.Layer):
    def call(self, inputs):
        self.add_loss(tf.reduce_mean(inputs) ** 2)
        return inputs


def test_a_layer_that_adds_a_loss_in_which_examples_meet_is_computed_at_once():
    def make():
        inputs = tf.keras.Input((FEATURES,))
        return tf.keras.Model(inputs, layers.Dense(2)(AddsSquare()(layers.Dense(3)(inputs))))

    assert_exact(make, X[:, 0], at_once=1)


class ByTotal(layers.Layer):
    """Divides by a sum over all examples that it has seen."""

    def build(self, shape):
        self.total = self.add_weight(name="total", shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        self.total.assign_add(tf.reduce_sum(inputs**2, name="of_all"))
        return inputs / (1.0 + tf.cast(self.total, inputs.dtype))


def test_a_layer_whose_examples_meet_in_a_variable_is_computed_at_once():
    ours, plain, said = both(lambda: net(ByTotal()))
    assert len(said) == 1
    assert_near(ours, plain, rtol=2e-5, atol=2e-5)


def count_of(hidden):
    return tf.shape(hidden)[0]


BY_NUMBER = {
    "padded to a length": lambda hidden: tf.pad(hidden, [[0, tf.maximum(0, 12 - count_of(hidden))], [0, 0], [0, 0]]),
    "padded to a multiple": lambda hidden: tf.pad(tf.sort(hidden, 0), [[0, -count_of(hidden) % 5], [0, 0], [0, 0]]),
    "without a rest": lambda hidden: tf.sort(hidden, 0)[: count_of(hidden) // 5 * 5],
    "with others": lambda hidden: tf.concat(
        [hidden, tf.zeros([tf.maximum(0, 12 - count_of(hidden)), TIMES, FEATURES])], 0
    ),
    "repeated": lambda hidden: tf.gather(hidden, tf.range(tf.maximum(count_of(hidden), 12)) % count_of(hidden)),
}


@pytest.mark.parametrize("name", BY_NUMBER)
def test_what_is_as_long_as_large_batches_alone_has_no_rows(name):
    """Lengths are inferred for numbers of examples for which these are those numbers."""
    ours, plain, said = both(
        lambda: net(lambda hidden: hidden / tf.reduce_sum(tf.exp(BY_NUMBER[name](hidden)), 0)), micro_batch_size=3
    )
    assert len(said) == 1
    assert_near(ours, plain, rtol=2e-5, atol=2e-5)


def test_numbers_that_are_drawn_for_pairs_of_examples_are_those_of_the_batch():
    tf.random.set_seed(3)
    function = lambda hidden: (  # noqa: E731
        hidden + tf.reduce_sum(tf.random.uniform([count_of(hidden), count_of(hidden)]), 1)[:, None, None]
    )
    for size in (3, COUNT):
        made = accum.GradientAccumulateModel.from_model(net(function), micro_batch_size=size)
        with warned("at once") as said:
            made.compile("sgd", "mse")
            made.train_on_batch(X, Y)
        assert len(said) == 1


@tf.custom_gradient
def sine(values):
    return tf.sin(values), lambda upstream: upstream * tf.cos(values)


@pytest.mark.parametrize("size", [1, SIZE - 1])
def test_a_gradient_that_takes_what_was_computed_of_a_micro_batch_is_computed_at_once(size):
    """It is a function of the tensors that it was defined with, also where its operation is copied."""

    def by_pairs(hidden):
        pairs = tf.einsum("btf,ctf->bc", hidden, hidden)
        return hidden + tf.reduce_mean(sine(pairs), 1)[:, None, None]

    ours, plain, said = both(lambda: net(by_pairs), micro_batch_size=size)
    assert len(said) == 1
    assert_near(ours, plain, rtol=2e-5, atol=2e-5)


KERNEL = RANDOM.normal(size=(FEATURES, 3)).astype("float32")
KEYS = np.arange(COUNT) % 3
ORDER = tf.constant(RANDOM.randint(0, FEATURES, 200))  # too long to become a constant of a function
ZEROS = tf.Variable(np.zeros(FEATURES, "int32"), trainable=False)


def stepped(function, data, how, specs=None):
    """The value and the gradient of a loss of what `function` returns for the data, and what was said."""
    kernel = tf.Variable(KERNEL)

    def loss(*data):
        hidden = tf.matmul(function(*data), kernel)
        mean, variance = tf.nn.moments(hidden, [0])
        return tf.reduce_mean(tf.nn.relu((hidden - mean) * tf.math.rsqrt(variance + 1e-3) + 0.3))

    def step(*data):
        if how is not None:
            return accum.value_and_gradients(loss, data, [kernel], SIZE - 1, **how)
        with tf.GradientTape() as tape:
            value = loss(*data)
        return value, tape.gradient(value, [kernel])

    step = tf.function(step, input_signature=specs) if specs else step
    with warned() as said:
        value, (gradient,) = step(*data)
    return [value, gradient], said


FLAT = X[:, 0]
OF_EVERY_KIND = {
    "a number": (lambda hidden, scale: hidden * scale, [tf.constant(1.5)]),
    "an integer": (lambda hidden, power: hidden ** tf.cast(power + 1, tf.float32), [tf.constant(1)]),
    "a flag": (lambda hidden, flag: tf.where(flag, hidden, 0.0 * hidden), [tf.constant(True)]),
    "a mask": (lambda hidden, mask: hidden * tf.cast(mask, tf.float32)[:, None], [tf.constant(KEYS > 0)]),
    "a long constant": (lambda hidden: tf.gather(hidden, ORDER, axis=1)[:, 7:11], []),
    "a variable of integers": (lambda hidden: hidden + tf.gather(hidden[:, :1], ZEROS, axis=1), []),
}


@pytest.mark.parametrize("name", OF_EVERY_KIND)
def test_arguments_and_constants_of_every_kind_are_understood(name):
    function, others = OF_EVERY_KIND[name]
    data = [tf.constant(FLAT)] + others
    ours, said = stepped(function, data, {"whole_batch": "batch_norm"})
    assert not said
    assert_near(ours, stepped(function, data, None)[0], rtol=2e-5, atol=2e-5)
    rolled = lambda *data: tf.roll(function(*data), 1, axis=0) + function(*data)  # noqa: E731
    ours, said = stepped(rolled, data, {"whole_batch": "batch_norm"})
    assert not said
    assert_near(ours, stepped(rolled, data, None)[0], rtol=2e-5, atol=2e-5)


def test_what_a_table_holds_for_an_example_is_its_own():
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([0, 1, 2], [0.5, 1.0, 2.0]), 0.0)
    data = [tf.constant(FLAT), tf.constant(KEYS, tf.int32)]
    for look_up in (table.lookup, tf.function(table.lookup)):
        function = lambda hidden, keys: hidden * look_up(keys)[:, None]  # noqa: B023, E731
        ours, said = stepped(function, data, {"whole_batch": "batch_norm"})
        assert not said
        assert_near(ours, stepped(function, data, None)[0], rtol=2e-5, atol=2e-5)


def test_data_of_unknown_rank_are_named():
    function, specs = lambda hidden: tf.ensure_shape(hidden, [None, 4]), [tf.TensorSpec(None)]  # noqa: E731
    ours, said = stepped(function, [tf.constant(FLAT)], {"whole_batch": "batch_norm"}, specs)
    assert len(said) == 1 and "may look across the examples" in said[0]
    assert_near(ours, stepped(function, [tf.constant(FLAT)], None)[0], rtol=2e-5, atol=2e-5)


def test_integers_from_outside_may_be_places_within_an_example():
    kernel = tf.Variable(KERNEL)

    @tf.function
    def step(features, shift, **how):
        shift += 1

        def loss(features):
            return tf.reduce_mean(tf.nn.relu(tf.matmul(tf.roll(features, shift, axis=1), kernel)))

        if how:
            return accum.value_and_gradients(loss, [features], [kernel], SIZE - 1, **how)
        return loss(features), tf.gradients(loss(features), [kernel])

    with warned("across the examples") as said:
        ours = step(tf.constant(FLAT), tf.constant(1), whole_batch="batch_norm")
    assert not said
    assert_near(tf.nest.flatten(ours), tf.nest.flatten(step(tf.constant(FLAT), tf.constant(1))), rtol=2e-5, atol=2e-5)


class UnderTwoTapes(tf.keras.Model):
    """A model whose train step calls it within two tapes, as one with a penalty of gradients does."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape, tf.GradientTape():
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}


def test_a_conditional_that_asks_all_examples_may_be_called_within_two_tapes():
    def larger_or_smaller(hidden):
        return tf.cond(tf.reduce_mean(hidden) > 0.0, lambda: 2.0 * hidden, lambda: tf.sin(hidden))

    def make():
        inputs = tf.keras.Input((TIMES, FEATURES))
        hidden = layers.Lambda(larger_or_smaller)(layers.Dense(FEATURES)(inputs))
        return UnderTwoTapes(inputs, layers.Dense(2)(layers.Flatten()(hidden)))

    ours, plain, said = both(make)
    assert not said
    assert_near(ours, plain)


class DoubledIfPositive(layers.Layer):
    """A conditional on all examples, which AutoGraph or `tf.cond` makes an operation with functions."""

    def call(self, inputs):
        return tf.cond(tf.reduce_sum(inputs) > 0.0, lambda: 2.0 * inputs, lambda: inputs)


@pytest.mark.law("L21")
def test_a_conditional_on_all_examples_is_evaluated_as_for_the_full_batch():
    """Its functions are still there when the graph from which they are copied is not."""
    inputs = tf.keras.Input((3,))
    plain = tf.keras.Model(inputs, layers.Dense(1)(DoubledIfPositive()(inputs)))
    model = accum.GradientAccumulateModel.from_model(plain, micro_batch_size=3)
    x = np.concatenate([np.full((4, 3), 2.0), np.full((4, 3), -1.0)]).astype("float32")  # one part would not be doubled
    for one in (plain, model):
        one.compile("sgd", "mse")
    outputs = [one.predict(x, batch_size=8, verbose=0) for one in (plain, model)]
    np.testing.assert_allclose(*outputs, rtol=1e-5)
    targets = np.ones((8, 1), "float32")
    losses = [one.evaluate(x, targets, batch_size=8, verbose=0) for one in (plain, model)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
