"""Numbers that depend on how many examples there are, and on what is computed from all of them (law L21).

As the length of an axis of rows, such a number is that of a micro-batch; anywhere else, it is that of the batch.
"""

import numpy as np
import pytest
import tensorflow as tf
from warned import silent, warned

import accum.compat.v1

pytestmark = pytest.mark.law("L21")

tf1 = tf.compat.v1
RANDOM = np.random.RandomState(0)
N = 8
X = RANDOM.normal(size=(N, 6)).astype("float32")
Y = RANDOM.normal(size=(N, 1)).astype("float32")
SQUARE = RANDOM.normal(size=(N, N)).astype("float32")


def weight(name, shape):
    first = np.random.RandomState(len(name) + sum(shape)).normal(size=shape, scale=0.4).astype("float32")
    return tf1.get_variable(name, shape, initializer=tf1.constant_initializer(first))


def real(number):
    return tf.cast(number, tf.float32)


def normalized(h):
    return tf.nn.batch_normalization(h, *tf.nn.moments(h, [0]), weight("offset", [5]), None, 1e-3)


def twice(h, step):
    """A loop of two rounds."""
    return tf.while_loop(lambda time, _: time < 2, lambda time, h: (time + 1, step(h)), (0, h))[1]


def in_a_loop_that_adds(h, n, k):
    _, _, h = tf.while_loop(
        lambda time, *_: time < 2, lambda time, s, h: (time + 1, s + n, tf.tanh(h * 10 / real(s))), (0, k, h)
    )
    return h


def of_outside(h, n, k, use):
    """With a product that is made outside of a loop, conditional or function."""
    number = n * k
    return use(h, lambda h: h * 10 / real(number))


def chosen(h, scale, k):
    return tf.cond(k > 1, lambda: scale(h), lambda: h)


NUMBERS = {
    "itself": lambda h, n, k: h * 10 / real(n * k),
    "sum of ones": lambda h, n, k: h * 10 / tf.reduce_sum(tf.ones([n * k])),
    "sum of ones behind statistics": lambda h, n, k: normalized(h) * 10 / tf.reduce_sum(tf.ones([n * k])),
    "sum of a range": lambda h, n, k: h + tf.reduce_mean(real(tf.range(n * k))),
    "mask": lambda h, n, k: h / tf.reduce_sum(tf.sequence_mask(5, n * k, dtype=tf.float32) + 1),
    "repeated": lambda h, n, k: h / tf.reduce_sum(tf.tile([[1.0]], [n * k, 2])),
    "broadcast weights": lambda h, n, k: h + tf.reduce_sum(tf.broadcast_to(weight("v", [5]), [n * k, 5]), 0),
    "gathered weights": lambda h, n, k: h + tf.reduce_mean(tf.gather(weight("v", [50, 5]), tf.range(n * k) % 50), 0),
    "index": lambda h, n, k: tf.roll(h, n * k, 1) * tf.range(1.0, 6.0) + tf.gather(h, n * k % 5, axis=1)[:, None],
    "as often side by side": lambda h, n, k: h + tf.reduce_sum(tf.tile(h, [1, n * k]), 1, keepdims=True) / 100,
    "as often on an axis": lambda h, n, k: h + tf.reduce_sum(tf.broadcast_to(h[:, None], [n, n * k, 5]), 1) / 100,
    "in a conditional": lambda h, n, k: chosen(h, lambda h: h * 10 / real(n * k), k),
    "count in a conditional": lambda h, n, k: chosen(h, lambda h: h * 10 / real(n), k),
    "in a loop": lambda h, n, k: twice(h, lambda h: tf.tanh(h * 10 / real(n * k))),
    "carried by a loop": in_a_loop_that_adds,
    "in a function": lambda h, n, k: tf.function(lambda h, n, k: h * 10 / real(n * k))(h, n, k),
    "for a conditional": lambda h, n, k: of_outside(h, n, k, lambda h, scale: chosen(h, scale, k)),
    "for a loop": lambda h, n, k: of_outside(h, n, k, twice),
}


def trained(network, size, data=X, shape=None):
    """Return the loss of a batch and its gradients."""
    with tf.Graph().as_default(), tf1.Session() as session:
        x, y = tf1.placeholder(tf.float32, [shape, data.shape[1]]), tf1.placeholder(tf.float32, [shape, 1])
        outputs = tf.matmul(tf.tanh(tf.matmul(network(x), weight("second", [5, 5]))), weight("third", [5, 1]))
        loss = tf.reduce_mean((outputs - y) ** 2)
        if size is not None:
            loss = accum.compat.v1.split_batch(loss, (x, y), size)
        fetched = [loss, *tf1.gradients(loss, tf1.trainable_variables())]
        session.run(tf1.global_variables_initializer())
        return [session.run(tf.convert_to_tensor(one), {x: data, y: Y}) for one in fetched]


def assert_same(one, other):
    for ours, theirs in zip(one, other):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)


@pytest.fixture
def with_resources():
    """Variables that may be read in functions."""
    before = tf1.resource_variables_enabled()
    tf1.enable_resource_variables()
    yield
    (tf1.enable_resource_variables if before else tf1.disable_resource_variables)()


@pytest.mark.parametrize("name", list(NUMBERS))
def test_a_number_of_the_batch_is_that_of_the_batch(name, control_flow, with_resources):
    def network(x):
        h = tf.tanh(tf.matmul(x, weight("first", [6, 5])))
        return NUMBERS[name](h, tf.shape(x)[0], tf.reduce_max(tf.cast(tf.abs(x) * 3, tf.int32)))

    with warned():  # most of some graphs is not split
        ours = trained(network, 3)
    assert_same(ours, trained(network, None))


def test_weights_may_be_repeated_for_each_word():
    """Of texts that are cut to the longest one, as relative positions are in attention."""

    def network(x):
        n, longest = tf.shape(x)[0], tf.reduce_max(tf.reduce_sum(tf.cast(x > -0.5, tf.int32), 1))
        words = x[:, :longest, None] * weight("words", [5])
        flat = tf.reshape(tf.matmul(tf.reshape(words, [n * longest, 5]), weight("kernel", [5, 5])), [n, longest, 5])
        scores = tf.matmul(flat, words, transpose_b=True) + tf.tile(weight("scores", [1, 1, 1]), [n, longest, longest])
        words = tf.matmul(tf.nn.softmax(scores), words) + tf.tile(weight("bias", [1, 1, 5]), [n, longest, 1])
        return tf.reduce_sum(tf.tanh(words), 1)

    with silent():
        ours = trained(network, 3)
    assert_same(ours, trained(network, None))


@pytest.mark.parametrize("scale", ["deviation", "maximum", "covariance"])
def test_statistics_of_data_are_no_rows_even_if_they_are_as_many(scale):
    """Eight columns of eight examples, a constant number."""

    def network(x):
        centred = x - tf.reduce_mean(x, 0)
        if scale == "deviation":
            x = centred / (1e-3 + tf.math.reduce_std(x, 0))
        else:
            x = x / tf.reduce_max(x, 0) if scale == "maximum" else tf.matmul(x, tf.matmul(x, x, transpose_a=True))
        return tf.tanh(tf.matmul(x, weight("first", [8, 5])))

    with silent():
        ours = trained(network, 3, SQUARE, N)
    for one, other in zip(ours, trained(network, None, SQUARE, N)):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-6)


def sliced(x):
    """Takes the part of a batch that has labels, besides all of it."""
    h = tf.tanh(tf.matmul(x, weight("first", [6, 5])))
    return h + 0.1 * tf.reduce_sum(tf.slice(h, [0, 0], [4, 5]), 0)


def folded(x):
    return tf.reshape(tf.tanh(tf.matmul(tf.reshape(x, [-1, 2]), weight("first", [2, 5]))), [8, 15])[:, :5]


@pytest.mark.parametrize("network", [sliced, folded], ids=["sliced", "folded"])
def test_a_constant_of_a_shape_may_be_another_number_than_that_of_examples(network):
    def function(x, y):
        return tf.reduce_mean((tf.matmul(network(x), weight("third", [5, 1])) - y) ** 2)

    losses = []
    for size in (None, 3):
        with tf.Graph().as_default(), tf1.Session() as session, warned():
            x, y = tf1.placeholder(tf.float32, [None, 6]), tf1.placeholder(tf.float32, [None, 1])
            loss = function(x, y)
            if size is not None:
                with tf1.variable_scope(tf1.get_variable_scope(), reuse=True):
                    loss, _ = accum.compat.v1.value_and_gradients(function, (x, y), micro_batch_size=size)
            session.run(tf1.global_variables_initializer())
            losses.append(session.run(loss, {x: X, y: Y}))
    np.testing.assert_allclose(*losses, rtol=1e-5)
