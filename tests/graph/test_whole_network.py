"""After `split_batch`, a step computes nothing of the network for the whole batch (laws L18 and L21)."""

import numpy as np
import pytest
import tensorflow as tf

import accum.compat.v1
import accum.testing
from accum import _tf

tf1 = tf.compat.v1
RANDOM = np.random.RandomState(0)
N, TIME, SIZE = 10, 6, 4
IMAGES = RANDOM.normal(size=(N, TIME, 5, 3)).astype("float32")
LENGTHS = RANDOM.randint(1, TIME + 1, size=N).astype("int32")


def weight(name, shape):
    first = np.random.RandomState(sum(map(ord, name))).normal(size=shape, scale=0.4).astype("float32")
    return tf1.get_variable(name, shape, initializer=tf1.constant_initializer(first))


def convolved(images, is_normalised):
    hidden = tf.nn.conv2d(
        images, weight("filters", [3, 3, 3, 4]), strides=[1, 1, 1, 1], padding="SAME", name="filtered"
    )
    if is_normalised:
        mean, variance = tf.nn.moments(hidden, [0, 1, 2])
        average = tf1.get_variable("average", [4], initializer=tf1.zeros_initializer(), trainable=False)
        tf1.add_to_collection(tf1.GraphKeys.UPDATE_OPS, average.assign(0.9 * average + 0.1 * mean))
        hidden = tf.nn.batch_normalization(hidden, mean, variance, None, None, 1e-3)
    return tf.nn.relu(hidden)


def read_as_text(images, lengths, is_normalised):
    """Convolutions, then a loop over the columns of as many steps as the longest text, as `dynamic_rnn` has."""
    hidden = convolved(images, is_normalised)
    shape = tf.shape(hidden)
    hidden *= tf.math.rsqrt(tf.cast(shape[1], tf.float32))
    columns = tf.transpose(tf.reshape(hidden, [shape[0], shape[1], 20]), [1, 0, 2])
    with tf.control_dependencies([tf1.assert_equal(tf.shape(lengths), tf.shape(columns)[1:2], message="lengths")]):
        lengths = tf.identity(lengths)
    steps = tf.minimum(tf.shape(columns)[0], tf.reduce_max(lengths))
    kernel = weight("recurrent", [24, 4])

    def step(time, state):
        new = tf.tanh(tf.matmul(tf.concat([columns[time], state], 1), kernel))
        keep = tf.cast(time < lengths, tf.float32)[:, tf.newaxis]
        return time + 1, keep * new + (1.0 - keep) * state

    first = tf.constant(0), tf.zeros([tf.shape(columns)[1], 4])
    return tf.reduce_mean(tf.while_loop(lambda time, _: time < steps, step, first)[1] ** 2)


def routed(images, lengths, is_normalised):
    """A loop without weights that begins with zeros, as many as there are examples, as between capsules."""
    capsules = tf.reshape(convolved(images, is_normalised), [-1, TIME, 20]) * weight("votes", [20])
    votes = tf.stop_gradient(capsules)
    step = lambda time, state: (time + 1, state + tf.reduce_sum(tf.tanh(votes * state[:, :, tf.newaxis] + 1.0), 2))
    first = tf.constant(0), tf.zeros([tf.shape(capsules)[0], TIME])
    shares = tf.nn.softmax(tf.while_loop(lambda time, _: time < 3, step, first)[1])
    return tf.reduce_mean(tf.reduce_sum(shares[:, :, tf.newaxis] * capsules, [1, 2]) ** 2)


def tagged(images, lengths, is_normalised, repeats=False):
    """What a loop returns is put together, and how many columns there are decides how the loss is computed."""
    hidden = convolved(images, is_normalised)
    shape = tf.shape(hidden)
    columns = tf.transpose(tf.reshape(hidden, [shape[0], shape[1], 20]), [1, 0, 2])
    kernel = weight("recurrent", [24, 4])

    def repeat(number, state, column):
        return number + 1, tf.tanh(tf.matmul(tf.concat([column, state], 1), kernel)), column

    def step(time, state, states):
        first = 0, state, columns[time]
        _, state, _ = tf.while_loop(lambda number, *_: number < 2, repeat, first) if repeats else repeat(*first)
        return time + 1, state, states.write(time, state)

    states = tf.TensorArray(tf.float32, tf.shape(columns)[0], element_shape=[None, 4])
    first = tf.constant(0), tf.zeros([tf.shape(columns)[1], 4]), states
    states = tf.while_loop(lambda time, *_: time < tf.shape(columns)[0], step, first)[2].stack()
    scores = tf.tensordot(tf.transpose(states, [1, 0, 2]), weight("tags", [4, 3]), 1)
    single = tf.equal(tf.shape(scores)[1], 1)
    scores = tf.cond(single, lambda: scores[:, 0], lambda: tf.reduce_logsumexp(scores, 1))
    scores -= tf.reduce_mean(scores, 0)
    for name in ("one", "more", "most"):  # much of the network is behind the first meeting of examples
        scores = tf.tanh(tf.matmul(3.0 * scores, weight(name, [3, 3])))
    loss = tf.reduce_mean((scores - 0.5) ** 2)
    return tf.cond(single, lambda: loss, lambda: 9.0 * loss)


def nested(images, lengths, is_normalised):
    return tagged(images, lengths, is_normalised, repeats=True)


def attended(images, lengths, is_normalised):
    """Attention whose mask conditionals choose by the numbers of queries, of keys, and of all examples."""
    hidden = convolved(images, is_normalised)
    hidden = tf.reshape(hidden, [tf.shape(hidden)[0], tf.shape(hidden)[1], 20])
    queries = tf.tensordot(hidden, weight("queries", [20, 20]), 1)
    count, time = tf.shape(queries)[0], tf.shape(queries)[1]
    beams = count // tf.shape(hidden)[0]
    mask = -9.0 * (1.0 - tf.linalg.band_part(tf.ones([1, time, time]), -1, 0))
    mask = tf.cond(beams > 1, lambda: tf.tile(mask, [beams, 1, 1]), lambda: mask)
    mask = tf.cond(count > SIZE, lambda: mask + 0.2 * tf.cast(tf.linspace(0.0, 1.0, time), tf.float32), lambda: mask)
    scores = tf.nn.softmax(tf.matmul(queries, hidden, transpose_b=True) + mask)
    return tf.reduce_mean(tf.matmul(scores, hidden) ** 2)


def with_lengths_that_are_set(images, lengths, is_normalised):
    """Batch normalisation with a statistic for each row, whose number `tf.tensordot` sets."""
    hidden = tf.reshape(convolved(images, False), [-1, TIME, 20])
    hidden = tf.tanh(tf.tensordot(hidden, weight("first", [20, 20]), 1))
    mean, variance = tf.nn.moments(hidden, [0, 2], keepdims=True)
    hidden = tf.nn.batch_normalization(hidden, mean, variance, None, None, 1e-3)
    return tf.reduce_mean(tf.tensordot(hidden[:, 1], weight("last", [20, 1]), 1) ** 2)


def chosen(images, lengths, is_normalised):
    """Batch normalisation whose statistics are those of a batch in training alone, with averages behind it."""
    hidden = convolved(images, False)
    averages = [
        tf1.get_variable(name, [4], initializer=tf1.ones_initializer(), trainable=False)
        for name in ("mean", "variance")
    ]

    def by(mean, variance):
        return tf.nn.batch_normalization(hidden, mean, variance, None, None, 1e-3), mean, variance

    training = tf1.placeholder_with_default(True, [])
    hidden, *statistics = tf.cond(training, lambda: by(*tf.nn.moments(hidden, [0, 1, 2])), lambda: by(*averages))
    for average, value in zip(averages, statistics):
        tf1.add_to_collection(tf1.GraphKeys.UPDATE_OPS, average.assign(0.9 * average + 0.1 * value))
    return tf.reduce_mean(tf.matmul(tf.reduce_mean(tf.nn.relu(hidden), [1, 2]), weight("last", [4, 1])) ** 2)


def pooled(images, lengths, is_normalised):
    hidden = tf.reduce_sum(convolved(images, is_normalised), [1, 2])
    return tf.reduce_mean(tf.matmul(hidden, weight("last", [4, 1])) ** 2)


def built(program, is_normalised, time, size=None, count=None):
    """Add a program to the current graph. Returns (tensors to feed, loss, train op)."""
    images = tf1.placeholder(tf.float32, [count, time, 5, 3])
    lengths = tf1.placeholder(tf.int32, [count])
    loss = program(images, lengths, is_normalised)
    if size is not None:
        loss = accum.compat.v1.split_batch(loss, (images, lengths), size)
    with tf.control_dependencies(tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)):
        return (images, lengths), loss, tf1.train.GradientDescentOptimizer(0.02).minimize(loss)


def trained(*arguments):
    """Return ({variable: value}, losses) after three steps."""
    with tf.Graph().as_default(), tf1.Session() as session:
        tensors, loss, train_op = built(*arguments)
        session.run(tf1.global_variables_initializer())
        feeds = dict(zip(tensors, (IMAGES, LENGTHS)))
        logs = [session.run([loss, train_op], feeds)[0] for _ in range(3)]
        return session.run({var.name: var for var in tf1.global_variables()}), logs


CASES = [(read_as_text, False, TIME), (read_as_text, True, TIME), (read_as_text, False, None)]
CASES += [(read_as_text, True, None), (routed, True, TIME), (routed, False, TIME)]
CASES += [(with_lengths_that_are_set, True, TIME), (tagged, False, TIME), (tagged, True, TIME), (tagged, False, None)]
CASES += [(chosen, True, TIME), (nested, False, None), (attended, False, TIME), (attended, True, None)]


@pytest.mark.law("L19", "L21")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}-{case[2]}")
def test_three_steps_are_those_of_the_full_batch(case, control_flow):
    values, losses = trained(*case, SIZE)
    expected, expected_losses = trained(*case)
    assert abs(losses[2] - losses[0]) > 1e-3  # so steps were made
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=2e-6)
    for name in expected:
        np.testing.assert_allclose(values[name], expected[name], rtol=0, atol=5e-6, err_msg=name)


@pytest.mark.law("L18")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}-{case[2]}")
def test_a_step_does_not_take_the_network_of_the_whole_batch(case, control_flow):
    """Not even its shape, for how many steps a loop has, and for what a check compares; as built, not as optimized."""
    told, options = tf1.RunMetadata(), tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE)
    config = tf1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with tf.Graph().as_default(), tf1.Session(config=config) as session:
        tensors, loss, train_op = built(*case, SIZE)
        session.run(tf1.global_variables_initializer())
        session.run([loss, train_op], dict(zip(tensors, (IMAGES, LENGTHS))), options, told)
    names = [node.node_name for device in told.step_stats.dev_stats for node in device.node_stats]
    assert "filtered" not in names
    assert any(name.endswith("/filtered") for name in names)


@pytest.mark.law("L18")
def test_what_nothing_takes_joins_no_rows():
    """Such as the size of a tensor within the network, which something took that is gone."""

    def joins(has_size):
        def program(images, lengths, is_normalised):
            hidden = convolved(images, is_normalised)
            unused = tf.size(hidden) if has_size else None
            del unused
            return tf.reduce_mean(tf.matmul(tf.reduce_sum(hidden, [1, 2]), weight("last", [4, 1])) ** 2)

        with tf.Graph().as_default() as graph:
            built(program, False, TIME, SIZE)
        return [op.name for op in graph.get_operations() if op.type.startswith("TensorArrayConcat")]

    assert joins(True) == joins(False) != []


@pytest.mark.law("L21")
def test_an_update_waits_for_all_that_the_loss_is_computed_from():
    """Also where its gradient is a constant: what reads ref variables after the update would see other weights."""
    with tf.Graph().as_default():
        _, loss, train_op = built(pooled, True, TIME, SIZE, N)
        loops = {op for op in _tf.op_walks.ancestors([loss.op], with_control=True) if op.type.endswith("While")}
        assert loops and loops <= set(_tf.op_walks.ancestors([train_op], with_control=True))


@pytest.mark.law("L21")
def test_updates_can_be_put_in_order_where_loops_are_copied(control_flow_of_tf_1):
    """Nothing outside of a loop waits for an operation within it, also of copies, which TensorFlow does not note."""
    with tf.Graph().as_default(), tf1.Session() as session:
        tensors, loss, train_op = built(nested, False, None, SIZE)
        accum.testing.order_updates(train_op)
        session.run(tf1.global_variables_initializer())
        ours = session.run([loss, train_op], dict(zip(tensors, (IMAGES, LENGTHS))))[0]
    np.testing.assert_allclose(ours, trained(nested, False, None)[1][0], rtol=0, atol=2e-6)
