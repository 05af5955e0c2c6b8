"""Rows in which examples have met before any variable is used, which `split_batch` computes once (law L21).

Programs that read texts cut a batch to its longest one, whose length is computed from all of its examples.
"""

import numpy as np
import pytest
import tensorflow as tf
from warned import silent

import accum.compat.v1

pytestmark = pytest.mark.law("L21")

tf1 = tf.compat.v1
RANDOM = np.random.RandomState(0)
N, LENGTH = 8, 12
TEXTS = RANDOM.randint(1, 20, size=(N, LENGTH)).astype("int32")
TEXTS[np.arange(LENGTH) >= np.array([7, 3, 5, 2, 9, 4, 6, 3])[:, None]] = 0
CLASSES = RANDOM.randint(0, 3, size=N).astype("int32")


def weight(name, shape):
    first = np.random.RandomState(len(name)).normal(size=shape, scale=0.4).astype("float32")
    return tf1.get_variable(name, shape, initializer=tf1.constant_initializer(first))


def lengths_of(words):
    return tf.reduce_sum(tf.cast(tf.cast(words, tf.bool), tf.int32), 1)


def sliced_to_the_end(words, longest, count):
    return tf.slice(words, [0, 0], [-1, longest]), tf.cast(longest, tf.float32)


def sliced_by_the_count(words, longest, count):
    return tf.slice(words, [0, 0], [count, longest]), tf.cast(longest, tf.float32)


def in_strides(words, longest, count):
    return words[:, :longest], tf.cast(longest, tf.float32)


def in_another_order(words, longest, count):
    """Longest first, as for packed sequences; the labels stay, so texts are compared with those of others."""
    return tf.gather(words, tf.argsort(lengths_of(words), direction="DESCENDING")), tf.constant(5.0)


def masked_by_the_longest(words, longest, count):
    mask = tf.sequence_mask(lengths_of(words))
    return words[:, : tf.shape(mask)[1]] * tf.cast(mask, tf.int32), tf.constant(5.0)


CUTS = [sliced_to_the_end, sliced_by_the_count, in_strides, in_another_order, masked_by_the_longest]


def loss_of(words, classes, cut, count, rate=0.0):
    """Attention over words and their places. One length in its shapes is computed from the batch."""
    words, divisor = cut(words, tf.reduce_max(lengths_of(words)), count)
    longest = tf.reduce_max(lengths_of(words))
    if cut is in_another_order:
        longest = LENGTH
    vectors = tf.nn.embedding_lookup(weight("table", [30, 6]), words)
    vectors += tf.nn.embedding_lookup(weight("places", [LENGTH, 6]), tf.range(tf.shape(words)[1]))
    mask = tf.cast(words > 0, tf.float32)
    words_in_all = count * longest  # in a shape that of a micro-batch, elsewhere that of the batch
    flat = tf.matmul(tf.reshape(vectors, [words_in_all, 6]), weight("kernel", [6, 6]))
    flat = tf1.nn.dropout(flat, rate=rate) if rate else flat
    keys = tf.tanh(tf.reshape(flat, [count, longest, 6])) * (1.0 + 0.01 * tf.cast(words_in_all, tf.float32))
    scores = tf.matmul(keys, vectors, transpose_b=True) - 9.0 * (1.0 - mask)[:, None, :]
    attended = tf.matmul(tf.nn.softmax(scores), vectors) * mask[:, :, None]
    logits = tf.matmul(tf.reduce_sum(attended, 1) / divisor, weight("classes", [6, 3]))
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=classes, logits=logits))


def trained(cut, size, is_constant, texts=TEXTS, classes=CLASSES, rate=0.0, count=None):
    """Return ({variable: value}, losses) after three steps on a batch, of a known number of examples or not."""
    with tf.Graph().as_default(), tf1.Session() as session:
        tf1.set_random_seed(1)
        shape = [N if is_constant else None]
        fed = tf1.placeholder(tf.int32, [*shape, LENGTH], "words"), tf1.placeholder(tf.int32, shape, "classes")
        count = tf.shape(fed[0])[0] if count is None and not is_constant else N
        loss = loss_of(*fed, cut, count, rate)
        if size is not None:
            loss = accum.compat.v1.split_batch(loss, fed, size)
        train_op = tf1.train.GradientDescentOptimizer(1.0).minimize(loss)
        session.run(tf1.global_variables_initializer())
        losses = [session.run([loss, train_op], dict(zip(fed, (texts, classes))))[0] for _ in range(3)]
        return session.run({var.name: var for var in tf1.trainable_variables()}), losses


@pytest.mark.parametrize("is_constant", [False, True], ids=["any size", "constant size"])
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.__name__)
def test_a_network_behind_them_is_split(cut, is_constant):
    with silent():
        values, losses = trained(cut, 3, is_constant)
    others, other_losses = trained(cut, None, is_constant)
    for name in others:
        np.testing.assert_allclose(values[name], others[name], rtol=0, atol=2e-6, err_msg=name)
    np.testing.assert_allclose(losses, other_losses, rtol=0, atol=2e-6)


@pytest.mark.law("L20")
def test_dropout_is_that_of_the_batch_where_an_example_has_as_many_numbers_as_the_longest_one():
    """Only a run knows how many: the mask of words side by side is cut all the same."""
    results = [trained(in_strides, size, False, rate=0.4) for size in (N, 3, 1)]
    for values, losses in results[1:]:
        np.testing.assert_allclose(losses, results[0][1], rtol=0, atol=2e-6)
        for name in values:
            np.testing.assert_allclose(values[name], results[0][0][name], rtol=0, atol=2e-6, err_msg=name)
    assert abs(results[0][1][0] - trained(in_strides, N, False)[1][0]) > 1e-3


def test_the_size_of_a_batch_may_be_known_from_what_is_sliced_alone():
    """As `tf.slice(x, [0, 0], [64, longest])` says it."""
    with silent():
        values, losses = trained(sliced_by_the_count, 3, False, count=N)
    others, other_losses = trained(sliced_by_the_count, None, False)
    np.testing.assert_allclose(losses, other_losses, rtol=0, atol=2e-6)
    for name in others:
        np.testing.assert_allclose(values[name], others[name], rtol=0, atol=2e-6, err_msg=name)


def test_its_loss_is_not_the_mean_over_parts_of_the_batch():
    whole = trained(in_strides, None, False)[1][0]
    parts = [trained(in_strides, None, False, TEXTS[i : i + 4], CLASSES[i : i + 4])[1][0] for i in (0, 4)]
    assert abs(np.mean(parts) - whole) > 1e-3


def gradients(loss_of, data, numbers, size, by_data=False):
    """Return the gradients of a loss by weights, and perhaps by the data."""
    with tf.Graph().as_default(), tf1.Session() as session:
        fed = tf1.placeholder(tf.float32, [None, *data.shape[1:]]), tf1.placeholder(tf.int32, [None])
        loss = loss_of(*fed)
        if size is not None:
            with silent():
                loss = accum.compat.v1.split_batch(loss, fed, size)
        grads = tf1.gradients(loss, [*tf1.trainable_variables(), *fed[:by_data]])
        session.run(tf1.global_variables_initializer())
        return session.run(grads, dict(zip(fed, (data, numbers))))


def assert_split(loss_of, shape, **options):
    """Assert that the gradients of a split batch are those of the whole one."""
    data = RANDOM.uniform(size=(N, *shape)).astype("float32")
    whole = gradients(loss_of, data, CLASSES, None, **options)
    for one, other in zip(gradients(loss_of, data, CLASSES, 3, **options), whole):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)
        assert np.abs(other).max() > 1e-3


def losses_of(x, classes):
    logits = tf.matmul(tf.tanh(tf.matmul(x, weight("kernel", [x.shape.as_list()[-1], 5]))), weight("last", [5, 3]))
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=classes, logits=logits)


def test_data_that_are_normalized_with_each_other_have_their_gradient():
    def loss_of(x, classes):
        mean, variance = tf.nn.moments(x, [0])
        return tf.reduce_mean(losses_of((x - mean) * tf1.rsqrt(variance + 1e-3), classes))

    assert_split(loss_of, [4], by_data=True)


def test_images_may_be_standardized_one_by_one(control_flow):
    """By `tf.map_fn`, a loop over examples before the network."""

    def loss_of(x, classes):
        standardized = tf.map_fn(tf.image.per_image_standardization, x)
        return tf.reduce_mean(losses_of(tf.reshape(standardized, [-1, 108]), classes))

    assert_split(loss_of, [6, 6, 3])


def test_a_list_that_grows_may_hold_weights_of_examples(control_flow_of_tf_1):
    """One for each example, and of as many examples as are written; the network is split as without them."""

    def loss_of(x, classes):
        scales = tf.TensorArray(tf.float32, 0, dynamic_size=True, element_shape=[])
        write = lambda i, scales: (i + 1, scales.write(i, tf.reduce_sum(x[i]) ** 2))
        _, scales = tf.while_loop(lambda i, *_: i < tf.shape(x)[0], write, (0, scales))
        return tf.reduce_mean(scales.stack() * losses_of(x, classes))

    assert_split(loss_of, [4])


def test_batch_normalisation_and_the_loss_may_take_the_same_number_of_the_data():
    """As where the longest text ends a loop behind the network; it has no gradient by weights, unlike a statistic."""

    def loss_of(x, lengths):
        steps = tf.cast(tf.minimum(tf.reduce_max(lengths), 5), tf.float32)
        hidden = tf.matmul(x, weight("kernel", [4, 5])) / steps
        hidden = tf.nn.batch_normalization(hidden, *tf.nn.moments(hidden, [0]), None, None, 1e-3)
        return tf.reduce_mean(tf.matmul(tf.tanh(hidden), weight("last", [5, 1])) ** 2) * steps

    assert_split(loss_of, [4])


def trained_with_noise(size, given, is_normalised):
    """Return the gradients by weights with noise, and without, of a network to which noise may be fed.

    Two Booleans are fed: whether there is noise, and whether the network is in training.
    """
    with tf.Graph().as_default(), tf1.Session() as session:
        x, classes = tf1.placeholder(tf.float32, [None, 4]), tf1.placeholder(tf.int32, [None])
        noise = tf1.placeholder_with_default(tf.zeros_like(x), [None, 4])
        is_noisy, training = (tf1.placeholder_with_default(False, [], name) for name in ("noisy", "training"))
        hidden = tf.cond(is_noisy, lambda: x + noise, lambda: x)
        if is_normalised:
            hidden = tf.matmul(hidden, weight("before", [4, 4]))
            hidden = tf.nn.batch_normalization(hidden, *tf.nn.moments(hidden, [0]), None, None, 1e-3)
        loss = tf.reduce_mean(losses_of(tf.cond(training, lambda: 2.0 * hidden, lambda: hidden), classes))
        if size is not None:
            with silent():
                chosen = {is_noisy: True, training: True}
                loss = accum.compat.v1.split_batch(
                    loss, (x, classes), size, given={t: chosen[t] for t in given(chosen)}
                )
        grads = tf1.gradients(loss, tf1.trainable_variables())
        session.run(tf1.global_variables_initializer())
        data = np.random.RandomState(1).normal(size=(2, N, 4)).astype("float32")
        feeds = {x: data[0], classes: CLASSES, is_noisy: True, training: True}
        return session.run(grads, {**feeds, noise: data[1]}), session.run(grads, feeds)


@pytest.mark.parametrize("is_normalised", [False, True], ids=["", "behind batch normalisation"])
@pytest.mark.parametrize(
    "given", [list, lambda both: list(both)[:1], lambda both: list(both)[1:]], ids=["both", "noise", "training"]
)
def test_rows_that_may_be_fed_are_taken_where_a_branch_is_chosen(given, is_normalised, control_flow):
    """They are those of the examples: by default, they are computed from these. A branch takes them alone."""
    ours, whole = trained_with_noise(3, given, is_normalised), trained_with_noise(None, given, is_normalised)
    for one, other in zip(sum(ours, []), sum(whole, [])):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)
    assert np.abs(whole[0][0] - whole[1][0]).max() > 1e-3


@pytest.mark.law("L17")
def test_why_a_constant_number_of_examples_is_not_split_is_named(control_flow_of_tf_2):
    """A loop of TensorFlow 2, whose body holds the number."""
    with tf.Graph().as_default():
        x = tf1.placeholder(tf.float32, [N, 4], "x")
        hidden = tf.matmul(tf.reshape(x, [N, 4]), weight("kernel", [4, 4]))
        step = lambda i, hidden: (i + 1, tf.tanh(tf.reshape(hidden, [N, 4])))
        hidden = tf.while_loop(lambda i, _: i < 3, step, (0, hidden))[1]
        with pytest.raises(ValueError, match=f"takes {N} examples, a constant, and 'while' has the constant number"):
            accum.compat.v1.split_batch(tf.reduce_mean(hidden**2), x, 3)
