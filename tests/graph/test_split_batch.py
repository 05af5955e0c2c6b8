"""`accum.compat.v1.split_batch`: a graph that exists already, in micro-batches (laws L18, L19, L20 and L21)."""

import warnings

import numpy as np
import pytest
import tensorflow as tf
import tf_slim as slim
from equality import assert_near
from optimizers import mainly
from warned import silent, warned

import accum.compat.v1

tf1 = tf.compat.v1
KEYS = tf1.GraphKeys
HAS_LAYERS = hasattr(tf1, "layers") and not tf.__version__.startswith(("2.16", "2.17", "2.18", "2.19", "2.2"))
HAS_LAYERS = HAS_LAYERS or tf.__version__.startswith("2.2.")
RANDOM = np.random.RandomState(0)
N = 20
X = RANDOM.normal(size=(N, 6, 4)).astype("float32")
Y = RANDOM.uniform(size=(N, 1)).astype("float32")
IMAGES = RANDOM.normal(size=(N, 6, 6, 3)).astype("float32")
CLASSES = RANDOM.randint(0, 5, N).astype("int32")


@pytest.fixture(autouse=True)
def static_graph():
    with tf.Graph().as_default():
        yield


def weight(name, shape, seed=0):
    first = np.random.RandomState(len(name) + seed).normal(size=shape, scale=0.4).astype("float32")
    return tf1.get_variable(name, shape, initializer=tf1.constant_initializer(first))


def dense(x, name, units):
    return tf.matmul(x, weight(f"{name}/kernel", [x.shape.as_list()[-1], units])) + weight(f"{name}/bias", [units])


def placeholders(count=None):
    return tf1.placeholder(tf.float32, [count, 6, 4], "x"), tf1.placeholder(tf.float32, [count, 1], "y")


def unusual_loss(outputs, y):
    """A mean over selected examples, a root of a mean, a comparison of examples, and a penalty."""
    error = outputs - y
    selected = tf1.boolean_mask(error, y[:, 0] > 0.3)
    centred = tf.nn.l2_normalize(outputs - tf.reduce_mean(outputs, 0), 0)
    loss = tf.reduce_mean(selected**2) + tf.sqrt(tf.reduce_mean(error**2))
    loss += 0.1 * tf.reduce_sum(tf.matmul(centred, centred, transpose_b=True)[0])
    penalty = 0.01 * tf.add_n([tf.nn.l2_loss(var) for var in tf1.trainable_variables()])
    return loss + penalty, tf.reduce_mean(tf.cast(tf.abs(error) < 0.5, tf.float32))


def perceptron(x, y):
    hidden = tf.tanh(tf.tensordot(x, weight("first", [4, 5]), 1))
    return unusual_loss(dense(tf.reshape(hidden, [tf.shape(x)[0], 30]), "last", 1), y)


def embedding(x, y):
    words = tf.cast(tf.abs(x[:, :, 0]) * 7, tf.int32) % 11
    vectors = tf.nn.embedding_lookup(weight("table", [11, 5]), words)
    return unusual_loss(dense(tf.reduce_mean(vectors, 1), "last", 1), y)


def attention(x, y):
    keys, values = tf.tensordot(x, weight("keys", [4, 5]), 1), tf.tensordot(x, weight("values", [4, 5]), 1)
    attended = tf.matmul(tf.nn.softmax(tf.matmul(keys, keys, transpose_b=True)), values)
    return unusual_loss(dense(tf.reduce_mean(attended, 1), "last", 1), y)


def recurrent(x, y):
    """A loop over time that is in the graph itself, or a function of it."""
    kernel = weight("recurrent", [9, 5])

    def step(time, state):
        return time + 1, tf.tanh(tf.matmul(tf.concat([x[:, time], state], 1), kernel))

    _, state = tf.while_loop(lambda time, _: time < 6, step, (tf.constant(0), tf.zeros([tf.shape(x)[0], 5])))
    return unusual_loss(dense(state, "last", 1), y)


def trained(program, size=None, steps=3, data=(X, Y), batch=placeholders, after=None, rate=0.05):
    """Return ({variable: value}, [[loss, metric]]) of a program on whole batches, or on these in micro-batches."""
    with tf.Graph().as_default(), tf1.Session() as session:
        tf1.set_random_seed(1)
        tensors = batch()
        loss, metric = program(*tensors)
        if size is not None:
            loss = accum.compat.v1.split_batch(loss, tensors, size)
        step = tf1.train.get_or_create_global_step()
        optimizer = tf1.train.AdamOptimizer(rate, epsilon=1e-3)
        with tf.control_dependencies(tf1.get_collection(KEYS.UPDATE_OPS)):
            grads, variables = zip(*optimizer.compute_gradients(loss))
            clipped, _ = tf1.clip_by_global_norm(grads, 0.5)
            op = optimizer.apply_gradients(zip(clipped, variables), step)
        if after is not None:
            op = after(op)
        session.run(tf1.global_variables_initializer())
        logs = [session.run([op, loss, metric], dict(zip(tensors, data)))[1:] for _ in range(steps)]
        return session.run({var.name: var for var in tf1.global_variables()}), logs


def assert_same(one, other, tolerance=2e-6):
    values, logs = one
    others, other_logs = other
    assert set(values) == set(others)  # so checkpoints are those of the plain program
    for name in values:
        np.testing.assert_allclose(values[name], others[name], rtol=0, atol=tolerance, err_msg=name)
    np.testing.assert_allclose(logs, other_logs, rtol=0, atol=2e-5)


def tied_embedding(x, y):
    """A table that is used itself, and through what is computed of it."""
    words = tf.cast(tf.abs(x[:, 0, 0]) * 7, tf.int32) % 11
    table = weight("table", [11, 5])
    logits = tf.matmul(tf.tanh(tf.nn.embedding_lookup(table, words)), tf.transpose(table))
    return unusual_loss(logits[:, :1], y)


def by_numbers(x, y):
    """Takes the number of examples as an index, a distance, a condition and a width, also in its gradient."""
    count = tf.shape(x)[0]
    hidden = dense(tf.reduce_mean(x, 1), "first", 5)
    rolled = tf.roll(hidden, count, 1) * tf.range(1.0, 6.0)
    chosen = tf.cond(count > 7, lambda: hidden**2, lambda: hidden)
    wide = tf.tile(hidden**2, [1, tf.minimum(count, 8)])
    column = hidden[:, count % 4] ** 2 + tf.gather(hidden, count % 3, axis=1)
    everything = rolled + chosen + column[:, None] + 0.1 * tf.reduce_sum(wide, 1, keepdims=True)
    return unusual_loss(dense(everything, "last", 1), y)


def partitioned_embedding(x, y):
    """Tables of several parts, to which words go by their rest or in order, and a check that they are split."""
    words = tf.cast(tf.abs(x[:, :, 0]) * 7, tf.int32) % 11
    vectors = []
    for strategy in ("mod", "div"):
        part = tf1.fixed_size_partitioner(3)
        first = tf1.random_normal_initializer(seed=len(vectors))
        table = tf1.get_variable(f"table_{strategy}", [11, 5], initializer=first, partitioner=part)
        vectors.append(tf1.nn.embedding_lookup(table, words, partition_strategy=strategy))
    return unusual_loss(dense(tf.reduce_mean(vectors[0] * vectors[1], 1), "last", 1), y)


PROGRAMS = [perceptron, embedding, tied_embedding, partitioned_embedding, attention, by_numbers]


@pytest.mark.law("L21")
@pytest.mark.parametrize("size", mainly([1, 6, N, N + 9], 6))
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_trains_as_on_the_whole_batch(program, size):
    assert_same(trained(program, size), trained(program))


@pytest.mark.slow
@pytest.mark.law("L21")
def test_its_loss_is_not_the_mean_over_parts_of_the_batch():
    whole = trained(perceptron, steps=1)[1][0][0]
    parts = [trained(perceptron, steps=1, data=(X[i : i + 5], Y[i : i + 5]))[1][0][0] for i in range(0, N, 5)]
    assert abs(np.mean(parts) - whole) > 1e-2


@pytest.mark.slow
@pytest.mark.law("L21")
def test_a_loop_over_time_keeps_examples_apart(control_flow):
    assert_same(trained(recurrent, 6), trained(recurrent))


@pytest.mark.law("L21")
def test_lengths_of_sequences_may_stop_a_loop_over_time(control_flow):
    """As `dynamic_rnn` does, which stops at the longest of the batch."""

    def batch():
        return (*placeholders(), tf1.placeholder(tf.int32, [None], "lengths"))

    def program(x, y, lengths):
        kernel = weight("recurrent", [9, 5])
        shortest, longest = tf.reduce_min(lengths), tf.reduce_max(lengths)

        def step(time, state):
            new = tf.cond(
                time < shortest,
                lambda: tf.tanh(tf.matmul(tf.concat([x[:, time], state], 1), kernel)),
                lambda: tf.sin(tf.matmul(tf.concat([x[:, time], state], 1), kernel)),
            )
            new.set_shape([None, 5])
            return time + 1, tf1.where(time < lengths, new, state)

        loop = tf.constant(0), tf.zeros([tf.shape(x)[0], 5])
        _, state = tf.while_loop(lambda time, _: time < longest, step, loop)
        return unusual_loss(dense(state, "last", 1), y)

    data = (X, Y, (np.arange(N) % 3 + 2).astype("int32"))
    assert_same(trained(program, 6, data=data, batch=batch), trained(program, data=data, batch=batch))


@pytest.mark.law("L21")
@pytest.mark.parametrize("control_flow", mainly([1, 2], 2), indirect=True)
def test_a_loop_over_time_may_take_as_many_steps_as_the_batch_has(control_flow):
    def batch():
        return tf1.placeholder(tf.float32, [None, None, 4], "x"), tf1.placeholder(tf.float32, [None, 1], "y")

    def program(x, y):
        kernel, steps = weight("recurrent", [9, 5]), tf.shape(x)[1]

        def step(time, state):
            return time + 1, tf.tanh(tf.matmul(tf.concat([x[:, time], state], 1), kernel))

        _, state = tf.while_loop(lambda time, _: time < steps, step, (tf.constant(0), tf.zeros([tf.shape(x)[0], 5])))
        return unusual_loss(dense(state, "last", 1), y)

    assert_same(trained(program, 6, batch=batch), trained(program, batch=batch))


def centred(x, y):
    """Subtracts the mean of the batch; its variance is only logged, and so is another mean."""
    hidden = tf.tensordot(x, weight("first", [4, 5]), 1)
    mean, variance = tf.nn.moments(hidden, [0])
    tf1.summary.histogram("variance", variance)
    tf1.summary.histogram("mean", tf.reduce_mean(hidden, [0]))
    outputs = dense(tf.reshape(tf.tanh(hidden - mean), [-1, 30]), "last", 1)
    return tf.reduce_mean((outputs - y) ** 2), tf.reduce_mean(outputs)


def normalised_and_centred(x, y):
    """Has batch normalisation, with a second mean for a moving average, before something is centred."""
    hidden = tf.tensordot(x, weight("before", [4, 4]), 1)
    mean, variance = tf.nn.moments(hidden, [0, 1])
    average = tf1.get_variable("average", [4], initializer=tf1.zeros_initializer(), trainable=False)
    move = tf1.assign(average, 0.9 * average + 0.1 * tf.reduce_mean(hidden, [0, 1]))
    tf1.add_to_collection(KEYS.UPDATE_OPS, move)
    return centred((hidden - mean) / tf.sqrt(variance + 1e-3), y)


def complex_filter(x, y):
    """Learns a filter by its spectrum; complex rows meet in the loss."""
    spectrum = tf.complex(weight("real", [4]), weight("imaginary", [4]))
    filtered = tf.signal.ifft(tf.signal.fft(tf.cast(x, tf.complex64)) * spectrum)
    outputs = dense(tf.reshape(tf.tanh(tf.math.real(filtered)), [-1, 24]), "last", 1)
    power = tf.math.real(tf.reduce_mean(filtered * tf.math.conj(filtered)))
    return tf.reduce_mean((outputs - y) ** 2) + 0.1 * power, power


@pytest.mark.law("L21")
@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("program", [centred, normalised_and_centred, complex_filter])
@pytest.mark.filterwarnings("ignore:`split_batch` computes")
def test_what_a_part_of_a_program_sees_of_the_batch(program, size):
    assert_same(trained(program, size), trained(program))


def normalized_flow(x, y):
    """A layer of a flow is batch normalisation, and the loss has the logarithm of its variance."""
    hidden = dense(x[:, 0], "first", 5)
    mean, variance = tf.nn.moments(hidden, [0])
    spread = tf.reduce_sum(tf1.log(variance + 1e-3))
    outputs = dense(tf.tanh((hidden - mean) / tf.sqrt(variance + 1e-3)), "last", 1)
    return tf.reduce_mean((outputs - y) ** 2) + 0.5 * spread, spread


def penalised_critic(x, y):
    """A gradient that is part of the loss passes the batch normalisation of a critic."""
    hidden = dense(x[:, 0], "first", 5)
    mean, variance = tf.nn.moments(hidden, [0])
    outputs = dense(tf.tanh(tf.nn.batch_normalization(hidden, mean, variance, None, None, 1e-3)), "last", 1)
    slopes = tf.sqrt(tf.reduce_sum(tf.gradients(outputs, x)[0] ** 2, [1, 2]))
    return tf.reduce_mean(outputs * y) + tf.reduce_mean((slopes - 1.0) ** 2), tf.reduce_mean(slopes)


def correlation(x, y):
    """A loss that takes means and variances of outputs and labels, which nothing normalises by."""
    outputs = dense(tf.tanh(dense(x[:, 0], "first", 5)), "last", 1)[:, 0]
    mean, variance = tf.nn.moments(outputs, [0])
    mean_of_y, variance_of_y = tf.nn.moments(y[:, 0], [0])
    together = tf.reduce_mean((outputs - mean) * (y[:, 0] - mean_of_y))
    return 1.0 - 2.0 * together / (variance + variance_of_y + (mean - mean_of_y) ** 2), together


def chosen_by_conditional(x, y):
    """Batch normalisation as a well-known answer has it, whose averages follow in the branch for training."""
    hidden = dense(x[:, 0], "first", 5)
    mean, variance = tf.nn.moments(hidden, [0])
    average = tf1.train.ExponentialMovingAverage(0.9)

    def of_batch():
        with tf.control_dependencies([average.apply([mean, variance])]):
            return tf.identity(mean), tf.identity(variance)

    is_training = tf1.placeholder_with_default(True, [])
    chosen = tf.cond(is_training, of_batch, lambda: (average.average(mean), average.average(variance)))
    outputs = dense(tf.tanh(tf.nn.batch_normalization(hidden, *chosen, None, None, 1e-3)), "last", 1)
    return tf.reduce_mean((outputs - y) ** 2), tf.reduce_mean(outputs)


@pytest.mark.law("L19", "L21")
@pytest.mark.parametrize(
    "program", mainly([normalized_flow, penalised_critic, correlation], normalized_flow, correlation)
)
@pytest.mark.filterwarnings("ignore:`split_batch` computes")
def test_statistics_that_the_loss_takes_itself_have_their_gradient(program):
    whole = trained(program)
    assert_same(trained(program, 6), whole)
    parts = trained(program, data=(X[:6], Y[:6]))
    assert max(abs(parts[0][name] - whole[0][name]).max() for name in whole[0]) > 1e-2


@pytest.mark.law("L19", "L21")
@pytest.mark.filterwarnings("ignore:`split_batch` computes")
def test_a_conditional_may_take_the_statistics_of_the_batch(control_flow_of_tf_2):
    assert_same(trained(chosen_by_conditional, 6), trained(chosen_by_conditional))


@pytest.mark.slow
@pytest.mark.law("L21")
@pytest.mark.parametrize("gate", [tf1.train.Optimizer.GATE_NONE, tf1.train.Optimizer.GATE_OP])
def test_gradients_by_the_data_are_computed_only_where_somebody_asks(gate):
    """As in the plain program, although optimizers compute all gradients of an operation before they use one."""
    x, y = placeholders()
    hidden = tf.nn.conv2d(tf.expand_dims(x, 3), weight("filters", [3, 3, 1, 5]), [1, 1, 1, 1], "SAME")
    loss = unusual_loss(dense(tf.reduce_mean(tf.nn.relu(hidden), [1, 2]), "last", 1), y)[0]
    (expected,) = tf.gradients(loss, x)
    loss = accum.compat.v1.split_batch(loss, (x, y), 6)
    pairs = tf1.train.GradientDescentOptimizer(0.1).compute_gradients(loss, gate_gradients=gate)
    (by_data,) = tf.gradients(loss, x)
    told, options = tf1.RunMetadata(), tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE)
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        session.run([grad for grad, _ in pairs], {x: X, y: Y}, options, told)
        ours, theirs = session.run([by_data, expected], {x: X, y: Y})
    names = [node.node_name for device in told.step_stats.dev_stats for node in device.node_stats]
    assert any("Conv2DBackpropFilter" in name for name in names)
    assert not any("Conv2DBackpropInput" in name for name in names)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)


def unshaped(x, y):
    """Time is the first axis, and the program itself says which shape the results of its loop have."""
    kernel = weight("kernel", [4, 5])
    states = tf.TensorArray(tf.float32, size=6, infer_shape=False)
    write = lambda time, states: (time + 1, states.write(time, tf.tanh(tf.matmul(x[:, time], kernel))))
    hidden = tf.while_loop(lambda time, _: time < 6, write, (tf.constant(0), states))[1].stack()
    hidden.set_shape([6, None, 5])
    hidden -= tf.reduce_mean(hidden, 1, keepdims=True)
    return unusual_loss(dense(tf.reduce_mean(hidden**2, 0), "last", 1), y)


@pytest.mark.slow
@pytest.mark.law("L21")
def test_rows_may_lie_on_an_axis_of_what_only_the_program_knows_the_shape():
    assert_same(trained(unshaped, 6), trained(unshaped))


def time_major(x, y):
    """A tagger whose states, and so its logits, are [time * examples, …], as some of TensorFlow 1 have them."""
    hidden = tf.reshape(tf.transpose(tf.tensordot(x, weight("first", [4, 5]), 1), [1, 0, 2]), [-1, 5])
    logits = dense(tf.tanh(hidden), "last", 2)
    error = logits[:, :1] - tf.tile(y, [6, 1])
    selected = tf1.boolean_mask(error, logits[:, 1] > -0.1)
    per_time = tf.reduce_mean(tf.reshape(logits, [6, -1, 2])[:, :, 0], 1)  # which tells an order from another one
    loss = tf.reduce_mean(selected**2) + tf.sqrt(tf.reduce_mean(error**2)) + tf.reduce_sum(tf.range(6.0) * per_time**2)
    return loss, tf.reduce_max(logits)


def real_and_made(x, y, normalize=lambda x, name: x):
    """A discriminator that takes two batches, one after the other, and is then told which is which."""
    count, real = tf.shape(x)[0], tf.reshape(x, [-1, 24])
    both = tf.concat([real, dense(tf.tanh(dense(real, "maker/first", 3)), "maker/last", 24)], 0)
    hidden = tf.tanh(normalize(dense(both, "judge/first", 6), "judge/norm"))
    logits = dense(hidden, "judge/last", 1)
    loss = tf.sqrt(tf.reduce_mean((logits[:count] - y) ** 2)) + tf.reduce_mean(tf.nn.softplus(logits[count:] - y))
    return loss + tf.reduce_mean(tf.square(tf.tanh(logits))), tf.reduce_mean(logits[:count])


def noisy(x, y):
    """Noise that is drawn for each time of each example."""
    hidden = tf.reshape(tf.transpose(tf.tensordot(x, weight("first", [4, 5]), 1), [1, 0, 2]), [-1, 5])
    hidden += 0.1 * tf.reshape(tf1.random_normal([6, tf.shape(x)[0], 5], seed=7), [-1, 5])
    logits = dense(tf.tanh(hidden), "last", 1)
    return tf.sqrt(tf.reduce_mean((logits - tf.tile(y, [6, 1])) ** 2)), tf.reduce_max(logits)


def of_any_length(major, normalize=lambda x: x):
    """A tagger of sequences of any length, whose logits are [time * examples, …] or [examples * time, …]."""

    def program(x, y):
        times, hidden = tf.shape(x)[1], normalize(tf.tensordot(x, weight("first", [4, 6]), 1))
        labels = tf.tile(y, [1, times]) * tf.cast(tf.range(1, times + 1), tf.float32)
        hidden, labels = (tf.transpose(hidden, [1, 0, 2]), tf.transpose(labels)) if major else (hidden, labels)
        logits = dense(tf.tanh(tf.reshape(hidden, [-1, 6])), "last", 1)
        error = logits - tf.reshape(labels, [-1, 1])
        per_time = tf.reduce_mean(tf.reshape(error, tf.shape(labels)), 0 if major else 1)
        return tf.sqrt(tf.reduce_mean(error**2)) + tf.reduce_sum(tf.tanh(per_time)), tf.reduce_max(logits)

    return program


def of_any_length_placeholders():
    return tf1.placeholder(tf.float32, [None, None, 4]), tf1.placeholder(tf.float32, [None, 1])


def in_columns(x, y):
    """Logits [classes, time * examples], as a product with the weights first has them, and images in blocks."""
    hidden = tf.reshape(tf.transpose(tf.tensordot(x, weight("first", [4, 5]), 1), [1, 0, 2]), [-1, 5])
    logits = tf.matmul(weight("last", [2, 5]), tf.tanh(hidden), transpose_b=True)
    images = tf.reshape(tf.tensordot(x, weight("image", [4, 4]), 1), [-1, 4, 6, 1])
    blocks = tf.nn.conv2d(
        tf1.space_to_batch(images, [[0, 0], [0, 0]], 2), weight("kernel", [2, 2, 1, 3]), [1] * 4, "SAME"
    )
    errors = logits - tf.reshape(tf.tile(y, [6, 1]), [1, -1])
    loss = tf.sqrt(tf.reduce_mean(errors**2)) + tf.reduce_sum(tf.reduce_mean(tf.reshape(errors, [2, 6, -1]), 2) ** 3)
    squares = tf.reshape(tf.reduce_mean(blocks, [1, 2, 3]), [4, -1])
    return loss + tf.reduce_sum(tf.range(4.0) * tf.reduce_mean(squares, 1) ** 2), tf.reduce_max(blocks)


def normalized_sequences(x):
    return by_hand(x[:, :, None], "norm")[:, :, 0]


BLOCKS = {
    "time_major": time_major,
    "real_and_made": real_and_made,
    "normalized": lambda x, y: real_and_made(x, y, lambda x, name: by_hand(x[:, None, None], name)[:, 0, 0]),
    "noisy": noisy,
    "in_columns": in_columns,
    "of_any_length": of_any_length(major=False),
    "of_any_length_time_major": of_any_length(major=True),
    "of_any_length_normalized": of_any_length(major=False, normalize=normalized_sequences),
    "of_any_length_time_major_normalized": of_any_length(major=True, normalize=normalized_sequences),
}


def placeholders_of(name):
    return of_any_length_placeholders() if "any_length" in name else placeholders()


@pytest.mark.law("L21")
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 6, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BLOCKS)
def test_rows_of_which_each_example_has_several_may_stand_apart(name, size):
    """Their index is (block * number of examples + example) * entries + entry."""
    ours, theirs = (trained(BLOCKS[name], one, batch=lambda: placeholders_of(name)) for one in (size, None))
    assert_same(ours, theirs, 5e-6)


@pytest.mark.law("L21")
@pytest.mark.parametrize("name", BLOCKS)
def test_such_rows_are_computed_in_micro_batches(name):
    x, y = placeholders_of(name)
    loss, metric = BLOCKS[name](x, y)
    products = [op.name for op in tf1.get_default_graph().get_operations() if op.type == "MatMul"]
    loss = accum.compat.v1.split_batch(loss, (x, y), 6)
    names = nodes_of_run([tf1.train.GradientDescentOptimizer(0.1).minimize(loss), metric], {x: X, y: Y})
    assert products
    assert not set(products) & set(names)


@pytest.mark.law("L21")
def test_two_batches_that_meet_are_split_in_turn():
    """As the pairs of a two-tower network; each call splits what depends on its batch."""
    finals = []
    for size in (None, 6):
        with tf.Graph().as_default(), tf1.Session() as session:
            one, other = (tf1.placeholder(tf.float32, [None, 4]) for _ in range(2))
            kernel = weight("kernel", [4, 3])
            vectors = [tf.tanh(tf.matmul(x, kernel)) for x in (one, other)]
            loss = tf.sqrt(tf.reduce_mean(tf.matmul(*vectors, transpose_b=True) ** 2))
            loss += tf.reduce_mean(vectors[0][:1] - vectors[1])
            for batch in (one, other) if size is not None else ():
                loss = accum.compat.v1.split_batch(loss, batch, size)
            op = tf1.train.GradientDescentOptimizer(0.1).minimize(loss)
            session.run(tf1.global_variables_initializer())
            logs = [session.run([op, loss], {one: X[:, 0], other: X[:7, 1]})[1:] for _ in range(3)]
            finals.append((session.run({"kernel": tf1.trainable_variables()[0]}), logs))
    assert_same(*reversed(finals))


@pytest.mark.law("L19")
def test_rows_in_which_examples_have_met_may_be_added_behind_batch_normalisation():
    def program(images, classes):
        hidden = tf.tanh(by_hand(tf.nn.conv2d(images, weight("kernel", [3, 3, 3, 6]), [1, 1, 1, 1], "SAME"), "norm"))
        rolled = tf.matmul(tf.roll(images[:, 0, 0], 1, 0), weight("rolled", [3, 6]))
        logits = dense(tf.reduce_mean(hidden, [1, 2]) + rolled, "last", 5)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=classes, logits=logits)
        return tf.reduce_mean(losses), tf.reduce_max(logits)

    assert_same(trained_on_images(program, 6), trained_on_images(program), tolerance=2e-5)


def idioms(op):
    """What programs do after the optimizer: an average of the weights, a decay of them, a counter of their own."""
    variables = tf1.trainable_variables()
    average = tf1.train.ExponentialMovingAverage(0.5)
    counter = tf1.get_variable("own_counter", [], initializer=tf1.zeros_initializer(), trainable=False)
    with tf.control_dependencies([op]):
        decays = tf.group(*[tf1.assign_sub(var, 0.1 * var) for var in variables])
    with tf.control_dependencies([decays]):
        return tf.group(average.apply(variables), tf1.assign_add(counter, 1.0))


@pytest.mark.slow
@pytest.mark.law("L21")
def test_what_follows_the_optimizer_runs_once_for_each_batch():
    values, _ = whole = trained(perceptron, after=idioms)
    assert_same(trained(perceptron, 6, after=idioms), whole)
    assert values["own_counter:0"] == values["global_step:0"] == 3


# --------------------------------------------------------------------------------------------------------------------
# Batch normalisation, dropout


def image_placeholders():
    return tf1.placeholder(tf.float32, [None, 6, 6, 3], "images"), tf1.placeholder(tf.int32, [None], "classes")


def by_hand(x, name):
    """Batch normalisation of `tf.nn`, with an average that is moved by UPDATE_OPS."""
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    moving = tf1.get_variable(f"{name}/moving", [6], initializer=tf1.zeros_initializer(), trainable=False)
    tf1.add_to_collection(KEYS.UPDATE_OPS, tf1.assign(moving, 0.9 * moving + 0.1 * mean))
    return tf.nn.batch_normalization(x, mean, variance, weight(f"{name}/beta", [6]), weight(f"{name}/gamma", [6]), 1e-3)


def by_layers(x, name):
    return tf1.layers.batch_normalization(x, training=True, name=name, momentum=0.9)


def convolutional(normalize, rate=0.0):
    def program(images, classes):
        x = images
        for name, channels in (("one", 3), ("two", 6)):
            x = tf.nn.conv2d(x, weight(f"{name}/kernel", [3, 3, channels, 6]), [1, 1, 1, 1], "SAME")
            x = tf.nn.relu(normalize(x, f"{name}/norm"))
            x = tf1.nn.dropout(x, rate=rate) if rate else x
        logits = dense(tf.reduce_mean(x, [1, 2]), "last", 5)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=classes, logits=logits)
        is_right = tf.equal(tf.argmax(logits, 1, output_type=tf.int32), classes)
        return tf.reduce_mean(losses), tf.reduce_mean(tf.cast(is_right, tf.float32))

    return program


def trained_on_images(program, size=None):
    return trained(program, size, data=(IMAGES, CLASSES), batch=image_placeholders, rate=0.01)


NORMS = [by_hand] + ([by_layers] if HAS_LAYERS else [])


@pytest.mark.law("L19")
@pytest.mark.parametrize("normalize", mainly(NORMS, by_hand), ids=lambda normalize: normalize.__name__)
def test_batch_normalisation_and_its_averages_are_those_of_the_whole_batch(normalize):
    program = convolutional(normalize)
    assert_same(trained_on_images(program, 6), trained_on_images(program), tolerance=2e-5)


@pytest.mark.law("L19")
def test_a_weight_of_another_loss_has_no_gradient_beside_batch_normalisation():
    """Of zeros, an optimizer would create slots for it, and one with weight decay would move it."""

    def which(size):
        with tf.Graph().as_default():
            x, y = placeholders()
            hidden = dense(tf.reshape(x, [-1, 24]), "hidden", 6)
            mean, variance = tf.nn.moments(hidden, [0])
            hidden = tf.tanh(tf.nn.batch_normalization(hidden, mean, variance, None, None, 1e-3))
            heads = [dense(hidden, name, 1) for name in ("one", "other")]
            losses = [tf.sqrt(tf.reduce_mean((head - y) ** 2)) for head in heads]
            if size:
                losses = accum.compat.v1.split_batch(losses, [x, y], size)
            variables = tf1.trainable_variables()
            return [[grad is None for grad in tf.gradients(loss, variables)] for loss in losses]

    assert which(6) == which(None) == [[False] * 4 + [True] * 2, [False] * 2 + [True] * 2 + [False] * 2]


@pytest.mark.law("L19")
@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["pixels", "transposed"])
def test_pixels_behind_batch_normalisation_may_be_rows_of_the_loss(order):
    def program(images, classes):
        x = by_hand(tf.nn.conv2d(images, weight("kernel", [3, 3, 3, 6]), [1, 1, 1, 1], "SAME"), "norm")
        logits = tf.transpose(tf.reshape(dense(tf.reshape(x, [-1, 6]), "last", 5), [-1, 5]), order)
        pixels = tf.reshape(tf.tile(classes[:, None], [1, 36]), [-1])
        chosen = tf.gather(tf.transpose(logits, order), tf.where(pixels > 1)[:, 0])
        labels = tf.boolean_mask(pixels, pixels > 1)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=chosen)
        return tf.reduce_mean(losses) + tf.sqrt(tf.reduce_mean(tf.cumsum(logits**2, 1))), tf.reduce_mean(losses)

    assert_same(trained_on_images(program, 6), trained_on_images(program), tolerance=2e-5)


@pytest.mark.law("L17")
def test_a_variable_that_is_read_after_the_batch_has_changed_it_is_named_and_what_it_makes_can_be_the_batch():
    x, y = placeholders()
    mean = tf1.get_variable("mean", [4], initializer=tf1.zeros_initializer(), trainable=False, use_resource=True)
    with tf.control_dependencies([mean.assign(0.9 * mean + tf.reduce_mean(x, [0, 1]))]):
        centred = x - mean.read_value()
    losses = []
    for _ in range(2):
        with tf1.variable_scope("", reuse=tf1.AUTO_REUSE):
            losses.append(perceptron(centred, y)[0])
    with pytest.raises(ValueError, match="may meet first in 'Read.*: it reads what was changed by the batch"):
        accum.compat.v1.split_batch(losses[1], (x, y), 5)
    grads = tf.gradients(losses[0], tf1.trainable_variables())
    split = tf.gradients(accum.compat.v1.split_batch(losses[1], (centred, y), 5), tf1.trainable_variables())
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        expected = session.run(grads, {x: X, y: Y})
        session.run(tf1.variables_initializer([mean]))
        assert_near(session.run(split, {x: X, y: Y}), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.law("L20")
def test_losses_of_examples_that_are_passed_too_have_the_dropout_of_their_mean():
    x, y = placeholders()
    hidden = tf1.nn.dropout(tf.reshape(tf.tensordot(x, weight("first", [4, 5]), 1), [-1, 30]), rate=0.5)
    errors = (dense(hidden, "last", 1) - y) ** 2
    loss, ours = accum.compat.v1.split_batch((tf.reduce_mean(errors), errors), (x, y), 5)
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        mean, kept, others = session.run([loss, ours, errors], {x: X, y: Y})
    assert kept.shape == (N, 1)
    np.testing.assert_allclose(kept.mean(), mean, rtol=1e-5)
    assert abs(others - kept).max() > 1e-2  # of a tensor from before the loss


@pytest.mark.slow
@pytest.mark.law("L20")
@pytest.mark.parametrize("normalize", [lambda x, name: x, by_hand], ids=["plain", "norm"])
def test_dropout_does_not_depend_on_the_size_of_micro_batches(normalize):
    program = convolutional(normalize, rate=0.5)
    whole = trained_on_images(program, N)
    assert_same(trained_on_images(program, 6), whole, tolerance=2e-5)
    assert abs(whole[1][0][0] - trained_on_images(convolutional(normalize))[1][0][0]) > 1e-3


@pytest.mark.law("L20")
def test_numbers_drawn_for_weights_are_those_of_the_whole_batch():
    """As DropConnect draws them, or a network that adds noise to its embeddings."""

    def program(x, y):
        kernel = weight("first", [24, 1])
        return unusual_loss(tf.matmul(tf.reshape(x, [-1, 24]), kernel * tf.random.uniform([24, 1], seed=3)), y)

    assert_same(trained(program, 6), trained(program))


@pytest.mark.slow
@pytest.mark.law("L20")
@pytest.mark.parametrize("is_training", [True, False])
def test_dropout_may_be_switched_by_a_placeholder(is_training, control_flow):
    def batch():
        return (*placeholders(), tf1.placeholder(tf.bool, [], "is_training"))

    def program(x, y, training):
        hidden = tf.tanh(dense(tf.reshape(x, [-1, 24]), "first", 8))
        hidden = tf.cond(training, lambda: tf1.nn.dropout(hidden, rate=0.5), lambda: tf.identity(hidden))
        error = dense(hidden, "last", 1) - y
        return tf.sqrt(tf.reduce_mean(error**2)), tf.reduce_mean(tf.abs(error))

    data = (X, Y, is_training)
    whole = trained(program, N if is_training else None, data=data, batch=batch)
    assert_same(trained(program, 6, data=data, batch=batch), whole)


@pytest.mark.slow
@pytest.mark.law("L21")
def test_what_the_network_waits_for_runs_once():
    """As averages that are moved in place, by `updates_collections=None`."""

    def program(x, y):
        hidden = tf.tanh(dense(tf.reshape(x, [-1, 24]), "first", 4))
        calls = tf1.get_variable("calls", [], initializer=tf1.zeros_initializer(), trainable=False)
        with tf.control_dependencies([tf1.assign_add(calls, 1.0)]):
            hidden = tf.identity(hidden)
        return unusual_loss(dense(hidden, "last", 1), y)

    whole = trained(program)
    assert whole[0]["calls:0"] == 3
    assert_same(trained(program, 6), whole)


def in_place(x, name):
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    moving = tf1.get_variable(f"{name}/moving", [6], initializer=tf1.zeros_initializer(), trainable=False)
    with tf.control_dependencies([tf1.assign(moving, 0.9 * moving + 0.1 * mean)]):
        mean = tf.identity(mean)
    return tf.nn.batch_normalization(x, mean, variance, weight(f"{name}/beta", [6]), weight(f"{name}/gamma", [6]), 1e-3)


@pytest.mark.slow
@pytest.mark.law("L19")
def test_averages_that_are_moved_in_place_are_those_of_the_whole_batch():
    program = convolutional(in_place)
    assert_same(trained_on_images(program, 6), trained_on_images(program), tolerance=2e-5)


@pytest.mark.slow
@pytest.mark.law("L20")
@pytest.mark.parametrize("draw", [tf.random.uniform, tf1.random_poisson], ids=["uniform", "poisson"])
def test_numbers_drawn_behind_the_network_are_the_same_for_loss_and_gradient(draw):
    """The loss is linear in the kernel, so that it is the product with its gradient."""
    x, y = placeholders()
    kernel = weight("kernel", [24, 1])
    outputs = tf.matmul(tf.reshape(x, [-1, 24]), kernel) * y
    weights = draw(tf.shape(outputs)) if draw is tf.random.uniform else draw(1.0, tf.shape(outputs))
    loss = accum.compat.v1.split_batch(tf.reduce_mean(outputs * weights), (x, y), 6)
    (grad,) = tf.gradients(loss, [kernel])
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        value, product = session.run([loss, tf.reduce_sum(grad * kernel)], {x: X, y: Y})
    np.testing.assert_allclose(product, value, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "differentiate",
    [lambda loss, kernel: tf.gradients(tf.reduce_sum(tf.gradients(loss, [kernel])[0] ** 2), [kernel]), tf1.hessians],
    ids=["gradient", "hessians"],
)
def test_a_gradient_of_what_is_split_can_not_be_differentiated_again(differentiate):
    x, y = placeholders()
    kernel = weight("kernel", [24, 1])
    loss = tf.reduce_mean((tf.matmul(tf.reshape(x, [-1, 24]), kernel) - y) ** 2)
    loss = accum.compat.v1.split_batch(loss, (x, y), 6)
    with pytest.raises(ValueError, match="differentiated again"):
        differentiate(loss, kernel)


def weighted_by_example(x, y, normalize=lambda hidden: hidden):
    """TensorFlow's losses check the shapes of weights, and what they add up and count by waits for that."""
    outputs = dense(tf.tanh(normalize(dense(tf.reshape(x, [-1, 24]), "first", 4))), "last", 1)
    loss = tf1.losses.mean_squared_error(y, outputs, weights=tf.cast(y > 0.4, tf.float32))
    return loss + tf1.losses.absolute_difference(y, outputs, weights=y), tf.reduce_mean(outputs)


def weighted_behind_a_switch(x, y):
    """What is split is a copy of the branch for training."""

    def normalize(hidden):
        by_batch = lambda: tuple(map(tf.identity, tf.nn.moments(hidden, [0])))
        is_training = tf1.placeholder_with_default(True, [])
        mean, variance = tf.cond(is_training, by_batch, lambda: (tf.zeros([4]), tf.ones([4])))
        return (hidden - mean) / tf.sqrt(variance + 1e-3)

    return weighted_by_example(x, y, normalize)


@pytest.mark.law("L18", "L21")
@pytest.mark.parametrize("program", mainly([weighted_by_example, weighted_behind_a_switch], weighted_by_example))
def test_losses_of_tensorflow_may_be_weighted_by_example(program, control_flow):
    whole = trained(program)
    with silent():
        assert_same(trained(program, 6), whole, tolerance=5e-6)


@pytest.mark.slow
@pytest.mark.law("L21")
def test_such_a_loss_is_not_the_mean_over_parts_of_the_batch():
    whole = trained(weighted_by_example, steps=1)[1][0][0]
    parts = [trained(weighted_by_example, steps=1, data=(X[i : i + 5], Y[i : i + 5]))[1][0][0] for i in range(0, N, 5)]
    assert abs(np.mean(parts) - whole) > 1e-2


@pytest.mark.slow
@pytest.mark.law("L18")
def test_the_network_of_such_a_loss_is_computed_in_micro_batches_alone(control_flow):
    x, y = placeholders()
    loss = accum.compat.v1.split_batch(weighted_by_example(x, y)[0], (x, y), 6)
    names = nodes_of_run(tf.gradients(loss, tf1.trainable_variables()), {x: X, y: Y})
    assert "MatMul" not in names
    assert len([name for name in names if name.endswith("segment/MatMul")]) == 8  # 4 micro-batches, forward and again


@pytest.mark.law("L21")
def test_a_check_of_what_is_split_still_runs(control_flow):
    x, y = placeholders()
    limit = tf1.placeholder(tf.float32, [])
    outputs = tf.matmul(tf.reshape(x, [-1, 24]), weight("kernel", [24, 1]))
    scale = tf.identity(weight("scale", [1]))
    check = tf1.assert_less(tf.abs(outputs), limit, message="too far")
    with tf.control_dependencies([check]):
        losses = (outputs - y) ** 2 * scale
    loss = accum.compat.v1.split_batch(tf.reduce_mean(losses), (x, y), 6)
    fetched = [loss, *tf.gradients(loss, tf1.trainable_variables())]
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        for fetch in fetched:
            session.run(fetch, {x: X, y: Y, limit: 100.0})
            with pytest.raises(tf.errors.InvalidArgumentError, match="too far"):
                session.run(fetch, {x: X, y: Y, limit: 0.1})


@pytest.mark.law("L21")
def test_it_may_be_called_where_operations_wait_for_the_loss():
    x, y = placeholders()
    loss, _ = perceptron(x, y)
    average = tf1.train.ExponentialMovingAverage(0.9).apply([loss])
    with tf.control_dependencies([average]):
        loss = accum.compat.v1.split_batch(loss, (x, y), 6)
        train_op = tf1.train.GradientDescentOptimizer(0.1).minimize(loss)
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        session.run(train_op, {x: X, y: Y})


@pytest.mark.law("L17")
@pytest.mark.parametrize("control_flow", [2], indirect=True)
def test_gradients_can_not_be_taken_within_a_function(control_flow):
    tf1.get_variable_scope().set_use_resource(True)
    x, y = placeholders()
    loss = accum.compat.v1.split_batch(perceptron(x, y)[0], (x, y), 6)
    optimizer = tf1.train.GradientDescentOptimizer(0.1)
    with pytest.raises(ValueError, match="take them before"):
        tf.cond(tf1.placeholder(tf.bool, []), lambda: optimizer.minimize(loss), tf.no_op)


@pytest.mark.slow
@pytest.mark.law("L21")
def test_a_gradient_of_the_programs_own_sees_the_whole_batch():
    @tf.custom_gradient
    def clipped(outputs):
        return tf.identity(outputs), lambda upstream: tf.clip_by_norm(upstream, 0.01)

    def program(x, y):
        hidden = tf.tanh(dense(tf.reshape(x, [-1, 24]), "first", 8))
        return unusual_loss(clipped(dense(hidden, "last", 1)), y)

    assert_same(trained(program, 6), trained(program))


@pytest.mark.law("L21")
@pytest.mark.parametrize("size", [1, 6])
def test_a_gradient_of_its_own_may_belong_to_the_data(size):
    """Rows that are made for the whole batch, and are cut."""

    @tf.custom_gradient
    def doubled(labels):
        return 2.0 * labels, lambda upstream: 2.0 * upstream

    def program(x, y):
        error = dense(tf.reshape(x, [-1, 24]), "first", 1) - doubled(y)
        return unusual_loss(error, y)

    assert_same(trained(program, size), trained(program))


# --------------------------------------------------------------------------------------------------------------------
# Batch normalisation that is chosen by a placeholder


def switched_by_hand(x, name, training):
    """Both statistics in one conditional, and averages that are moved by UPDATE_OPS."""
    averages = [
        tf1.get_variable(f"{name}/moving_{one}", [6], initializer=first(), trainable=False)
        for one, first in (("mean", tf1.zeros_initializer), ("variance", tf1.ones_initializer))
    ]
    gamma, beta = weight(f"{name}/gamma", [6]), weight(f"{name}/beta", [6])

    def of_batch():
        mean, variance = tf.nn.moments(x, [0, 1, 2])
        return tf.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-3), mean, variance

    def of_averages():
        mean, variance = [tf.identity(one) for one in averages]
        return tf.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-3), mean, variance

    outputs, *statistics = tf.cond(training, of_batch, of_averages)
    for average, statistic in zip(averages, statistics):
        tf1.add_to_collection(KEYS.UPDATE_OPS, tf1.assign(average, 0.9 * average + 0.1 * statistic))
    outputs.set_shape(x.shape)
    return outputs


def switched_by_layers(x, name, training):
    return tf1.layers.batch_normalization(x, training=training, name=name, momentum=0.9, fused=True)


def switched_unfused(x, name, training):
    return tf1.layers.batch_normalization(x, training=training, name=name, momentum=0.9, fused=False)


def switched_by_contrib(x, name, training):
    from tensorflow.contrib.layers import batch_norm

    return batch_norm(x, is_training=training, scope=name, decay=0.9, scale=True)


def switched_in_place(x, name, training):
    from tensorflow.contrib.layers import batch_norm

    return batch_norm(x, is_training=training, scope=name, decay=0.9, updates_collections=None, fused=False)


SWITCHED = [switched_by_hand] + ([switched_by_layers, switched_unfused] if HAS_LAYERS else [])
SWITCHED += [switched_by_contrib] if tf.__version__.startswith("1.") else []


def trained_and_evaluated(normalize, size):
    """Return what `trained` does; a step with training on follows an evaluation with it off, and so on."""
    with tf.Graph().as_default(), tf1.Session() as session:
        tf1.set_random_seed(1)
        tf1.get_variable_scope().set_use_resource(tf1.control_flow_v2_enabled())  # its conditionals take no others
        images, classes = image_placeholders()
        training = tf1.placeholder_with_default(False, [], "is_training")
        network = convolutional(lambda x, name: normalize(x, name, training))
        loss, metric = network(images, classes)
        if size is not None:
            loss = accum.compat.v1.split_batch(loss, (images, classes), size)
        with tf.control_dependencies(tf1.get_collection(KEYS.UPDATE_OPS)):
            op = tf1.train.AdamOptimizer(0.01, epsilon=1e-3).minimize(loss)
        session.run(tf1.global_variables_initializer())
        logs = []
        for _ in range(3):
            session.run(op, {images: IMAGES, classes: CLASSES, training: True})
            logs += [session.run([loss, metric], {images: IMAGES[:11], classes: CLASSES[:11]})]
            logs += [session.run([loss, metric], {images: IMAGES, classes: CLASSES, training: True})]
        return session.run({var.name: var for var in tf1.global_variables()}), logs


@pytest.mark.law("L19")
@pytest.mark.parametrize("normalize", mainly(SWITCHED, switched_by_layers), ids=lambda one: one.__name__)
def test_batch_normalisation_may_be_switched_by_a_placeholder(normalize, control_flow):
    assert_switched(normalize)


@pytest.mark.law("L19")
@pytest.mark.tf(max="1.15", because="TensorFlow 2 has no contrib")
def test_batch_normalisation_that_is_switched_may_move_averages_in_place():
    assert_switched(switched_in_place)


def assert_switched(normalize):
    whole = trained_and_evaluated(normalize, None)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="`split_batch` computes")
        split = trained_and_evaluated(normalize, 6)
    assert_same(split, whole, tolerance=2e-5)
    assert abs(whole[1][-1][0] - whole[1][-2][0]) > 1e-3


def normalized_in_a_branch(x):
    hidden = tf.matmul(tf.reshape(x, [-1, 24]), weight("first", [24, 5]))
    averages = weight("mean", [5]), tf.exp(weight("deviation", [5]))
    mean, variance = tf.cond(
        tf1.placeholder_with_default(True, [], "training"),
        lambda: tf.nn.moments(hidden, [0]),
        lambda: tuple(tf.identity(one) for one in averages),
    )
    return tf.nn.batch_normalization(hidden, mean, variance, None, None, 1e-3)


@pytest.mark.law("L19")
def test_a_loss_may_loop_over_examples_behind_a_network_that_is_switched(control_flow):
    def program(x, y):
        outputs = dense(tf.tanh(normalized_in_a_branch(x)), "last", 1)
        _, total = tf.while_loop(
            lambda row, _: row < tf.shape(y)[0],
            lambda row, total: (row + 1, total + tf.cond(y[row, 0] > 0.5, lambda: outputs[row, 0] ** 2, lambda: 0.0)),
            (0, 0.0),
        )
        loss, metric = unusual_loss(outputs, y)
        return loss + 0.1 * total, metric

    with warned() as said:
        ours = trained(program, 6)
    assert not [text for text in said if "[accum: " in text]
    assert_same(ours, trained(program), 5e-6)


@pytest.mark.law("L19")
def test_batch_normalisation_may_be_scaled_by_a_number_of_unknown_shape():
    def program(x, y):
        hidden = tf.matmul(tf.reshape(x, [-1, 24]), weight("first", [24, 5]))
        mean, variance = tf.nn.moments(hidden, [0])
        hidden = tf.nn.batch_normalization(hidden, mean, variance, None, None, 1e-3)
        hidden *= tf1.placeholder_with_default([0.5], [None], "kept")
        hidden.set_shape([None, 5])
        return unusual_loss(dense(hidden, "last", 1), y)

    assert_same(trained(program, 6), trained(program), 5e-6)


@pytest.mark.law("L17")
def test_what_batch_normalisation_combines_with_weights_of_unknown_shape_is_named():
    x, y = placeholders()
    kernel = tf.identity(tf1.placeholder_with_default(weight("first", [24, 5]), [24, None]), name="of_any_width")
    hidden = tf.matmul(tf.reshape(x, [-1, 24]), kernel)
    hidden.set_shape([None, 5])
    mean, variance = tf.nn.moments(hidden, [0])
    hidden = tf.nn.batch_normalization(hidden, mean, variance, None, None, 1e-3)
    loss = tf.reduce_mean((dense(hidden, "last", 1) - y) ** 2)
    with pytest.raises(ValueError, match=r"shape of each tensor.*\['of_any_width:0'\].*unknown-shape"):
        accum.compat.v1.split_batch(loss, (x, y), 6)


def with_two_switches(x, name, training, dropping):
    hidden = switched_by_hand(x, name, training)
    hidden = tf.cond(dropping, lambda: tf1.nn.dropout(hidden, rate=0.5), lambda: tf.identity(hidden))
    hidden.set_shape(x.shape)
    return hidden


@pytest.mark.law("L20")
@pytest.mark.parametrize("control_flow", mainly([1, 2], 1), indirect=True)
def test_several_tensors_may_say_what_is_training(control_flow):
    """Dropout is drawn for each example; with other values, nothing is."""
    assert_same(trained_with_two_switches(6), trained_with_two_switches(N), tolerance=2e-5)


@pytest.mark.parametrize("control_flow", [1], indirect=True)
def test_a_conditional_by_a_tensor_that_is_not_given_stays_one(control_flow):
    """It is not split, what is before and behind it is."""
    with silent():
        ours = trained_with_two_switches(6, 1)
    assert_same(ours, trained_with_two_switches(None, 1), tolerance=2e-5)


def trained_with_two_switches(size, count=2):
    with tf.Graph().as_default(), tf1.Session() as session:
        tf1.set_random_seed(1)
        images, classes = image_placeholders()
        switches = [tf1.placeholder_with_default(False, [], name) for name in ("training", "dropping")]
        loss, metric = convolutional(lambda x, name: with_two_switches(x, name, *switches))(images, classes)
        given = dict.fromkeys(switches[:count], True)
        if size is not None:
            loss = accum.compat.v1.split_batch(loss, (images, classes), size, given=given)
        op = tf1.train.AdamOptimizer(0.01, epsilon=1e-3).minimize(loss)
        session.run(tf1.global_variables_initializer())
        feeds, logs = {images: IMAGES, classes: CLASSES}, []
        for _ in range(2):
            logs += [session.run([op, loss, metric], {**feeds, **given})[1:], session.run([loss, metric], feeds)]
        return session.run({var.name: var for var in tf1.global_variables()}), logs


@pytest.mark.law("L17")
def test_gradients_for_another_value_than_the_given_one_are_an_error():
    images, classes = image_placeholders()
    training = tf1.placeholder(tf.bool, [])
    loss, _ = convolutional(lambda x, name: switched_by_hand(x, name, training))(images, classes)
    loss = accum.compat.v1.split_batch(loss, (images, classes), 6, given={training: True})
    op = tf1.train.GradientDescentOptimizer(0.1).minimize(loss)
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        with pytest.raises(tf.errors.InvalidArgumentError, match="another value is fed"):
            session.run(op, {images: IMAGES, classes: CLASSES, training: False})


@pytest.mark.law("L17")
def test_numbers_that_are_drawn_for_the_batch_itself_are_not_drawn_again():
    """Whatever else uses them, such as labels that are mixed in the same way, needs the same ones."""
    images, classes = image_placeholders()
    training = tf1.placeholder(tf.bool, [])
    mixed = images * tf.random.uniform(tf.shape(images)[:1])[:, None, None, None]
    loss, _ = convolutional(lambda x, name: switched_by_hand(x, name, training))(mixed, classes)
    with pytest.raises(ValueError, match="draws numbers"):
        accum.compat.v1.split_batch(loss + tf.reduce_mean(mixed), (images, classes), 6, given={training: True})


@pytest.mark.law("L17")
@pytest.mark.parametrize("given", [True, {"training": True}])
def test_what_is_given_must_be_tensors_and_their_values(given):
    x, y = placeholders()
    with pytest.raises(TypeError, match="`given` must be a dict"):
        accum.compat.v1.split_batch(perceptron(x, y)[0], (x, y), 6, given=given)


# --------------------------------------------------------------------------------------------------------------------
# Outputs


def with_python(sizes):
    """A function that makes a program. An operation in it, which accum does not know, notes the sizes of batches."""

    def tanh(value):
        sizes.append(len(value))
        return np.tanh(value)

    def program(x, y):
        features = tf1.py_func(tanh, [tf.tensordot(x, weight("first", [4, 5]), 1)], tf.float32)
        features.set_shape([None, 6, 5])
        program.outputs = dense(tf.reshape(features, [-1, 30]), "last", 1)
        return unusual_loss(program.outputs, y)

    return program


@pytest.mark.law("L21")
def test_outputs_say_up_to_where_operations_of_which_nothing_is_known_keep_examples_apart():
    results, sizes = [], []
    for size in (None, 6):
        with tf.Graph().as_default(), tf1.Session() as session:
            program, (x, y) = with_python(sizes), placeholders()
            loss, _ = program(x, y)
            if size is not None:
                sizes.clear()
                loss = accum.compat.v1.split_batch(loss, (x, y), size, outputs=program.outputs)
            grads = tf.gradients(loss, tf1.trainable_variables()[1:])
            session.run(tf1.global_variables_initializer())
            results.append(session.run([loss, *grads], {x: X, y: Y}))
    assert max(sizes) == 6
    assert_near(*results)


@pytest.mark.law("L17")
def test_an_operation_of_which_nothing_is_known_is_named_with_the_remedy():
    x, y = placeholders()
    features = tf1.py_func(lambda value: np.tanh(value), [x], tf.float32, name="by_hand")
    features.set_shape([None, 6, 4])
    loss = tf.reduce_mean((dense(tf.reshape(features, [-1, 24]), "last", 1) - y) ** 2)
    with pytest.raises(ValueError, match=r"by_hand.*test_split_batch.py:\d+\).*`outputs`"):
        accum.compat.v1.split_batch(loss, (x, y), 6)


@pytest.mark.law("L17")
def test_outputs_behind_an_operation_in_which_examples_meet_are_an_error():
    x, y = placeholders()
    hidden = tf.tanh(dense(tf.reshape(x, [-1, 24]), "first", 4))
    outputs = dense(tf.cumsum(hidden, 0, name="running"), "last", 1)
    with pytest.raises(ValueError, match="up to `outputs`.*running.*a running sum"):
        accum.compat.v1.split_batch(tf.reduce_mean((outputs - y) ** 2), (x, y), 6, outputs=outputs)


# --------------------------------------------------------------------------------------------------------------------
# Several losses


def gan(size=None):
    """Two networks, which are trained in turn by losses of one batch."""
    with tf.Graph().as_default(), tf1.Session() as session:
        noise, real = tf1.placeholder(tf.float32, [None, 3]), tf1.placeholder(tf.float32, [None, 4])

        def judge(x):
            with tf1.variable_scope("judge", reuse=tf1.AUTO_REUSE):
                return dense(tf.tanh(dense(x, "first", 6)), "last", 1)

        with tf1.variable_scope("maker"):
            made = dense(tf.tanh(dense(noise, "first", 6)), "last", 4)
        of_judge = tf.reduce_mean(judge(made)) - tf.reduce_mean(judge(real))
        of_maker = -tf.reduce_mean(judge(made)) + tf.sqrt(tf.reduce_mean(made**2))
        if size is not None:
            of_judge, of_maker = accum.compat.v1.split_batch((of_judge, of_maker), {"noise": noise, "real": real}, size)
        ops = [
            tf1.train.MomentumOptimizer(0.1, 0.9).minimize(loss, var_list=tf1.trainable_variables(scope))
            for loss, scope in ((of_judge, "judge"), (of_maker, "maker"))
        ]
        session.run(tf1.global_variables_initializer())
        feeds = {noise: X[:, 0, :3], real: X[:, 1]}
        logs = []
        for op in ops * 2:
            session.run(op, feeds)
            logs.append(session.run([of_judge, of_maker], feeds))
        return session.run({var.name: var for var in tf1.global_variables()}), logs


@pytest.mark.slow
@pytest.mark.law("L21")
def test_two_losses_of_a_batch_are_trained_in_turn():
    assert_same(gan(6), gan())


# --------------------------------------------------------------------------------------------------------------------
# Train ops


def by_slim(loss, step):
    def clipped(pairs):
        return [(tf.clip_by_norm(tf.convert_to_tensor(grad), 0.5), var) for grad, var in pairs]

    optimizer = tf1.train.MomentumOptimizer(0.1, 0.9)
    return slim.training.create_train_op(loss, optimizer, step, transform_grads_fn=clipped)


def by_contrib(loss, step):
    layers = __import__("tensorflow.contrib.layers", fromlist=["optimize_loss"])
    return layers.optimize_loss(loss, step, 0.1, "Adagrad", clip_gradients=0.5, summaries=["loss", "gradients"])


def by_loss_scale(loss, step):
    optimizer = tf1.train.AdagradOptimizer(0.1)
    scaled = optimizer.compute_gradients(1024.0 * loss)
    return optimizer.apply_gradients([(grad / 1024.0, var) for grad, var in scaled], step)


def by_gradients(loss, step):
    """Which has a norm in the summaries."""
    variables = tf1.trainable_variables()
    grads = tf.gradients(loss, variables)
    tf1.summary.scalar("norm", tf1.global_norm(grads))
    optimizer = tf1.train.AdagradOptimizer(0.1)
    with tf.control_dependencies([tf1.summary.merge_all()]):
        return optimizer.apply_gradients(zip(grads, variables), step)


CONTRIB = pytest.mark.tf(max="1.15", because="TensorFlow 2 has no contrib")


@pytest.mark.law("L21")
@pytest.mark.parametrize(
    "train_op_of",
    [by_slim, pytest.param(by_contrib, marks=CONTRIB), by_loss_scale, by_gradients],
    ids=lambda one: one.__name__,
)
def test_a_train_op_may_be_made_in_any_way(train_op_of):
    ends = []
    for size in (6, None):
        with tf.Graph().as_default(), tf1.Session() as session:
            x, y = placeholders()
            loss, _ = embedding(x, y)
            if size is not None:
                loss = accum.compat.v1.split_batch(loss, (x, y), size)
            train_op = train_op_of(loss, tf1.train.get_or_create_global_step())
            session.run(tf1.global_variables_initializer())
            for _ in range(3):
                session.run(train_op, {x: X, y: Y})
            ends.append(session.run({var.name: var for var in tf1.global_variables()}))
    assert set(ends[0]) == set(ends[1])
    for name, value in ends[1].items():
        np.testing.assert_allclose(ends[0][name], value, rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.law("L8")
def test_gradients_of_embeddings_stay_slices():
    x, y = placeholders()
    words = tf.cast(tf.abs(x[:, :, 0]) * 7, tf.int32) % 11
    vectors = tf.nn.embedding_lookup(weight("table", [11, 5]), words)
    outputs = dense(tf.reduce_mean(vectors, 1), "last", 1)
    loss = accum.compat.v1.split_batch(tf.reduce_mean((outputs - y) ** 2), (x, y), 6)
    grads = tf.gradients(loss, tf1.trainable_variables())
    assert [isinstance(grad, tf.IndexedSlices) for grad in grads] == [True, False, False]


@pytest.mark.law("L21")
def test_each_tower_is_split():
    """As in programs that average the gradients of several GPUs by hand."""
    ends = []
    for size in (3, None):
        with tf.Graph().as_default(), tf1.Session() as session:
            x, y = placeholders()
            optimizer, towers = tf1.train.AdagradOptimizer(0.1), []
            for number, batch in enumerate(zip(tf.split(x, 2), tf.split(y, 2))):
                with tf1.variable_scope("", reuse=tf1.AUTO_REUSE), tf1.name_scope(f"tower_{number}"):
                    loss, _ = perceptron(*batch)
                    if size is not None:
                        loss = accum.compat.v1.split_batch(loss, batch, size)
                    towers.append(optimizer.compute_gradients(loss))
            averages = [(tf.add_n([grad for grad, _ in pairs]) / 2, pairs[0][1]) for pairs in zip(*towers)]
            train_op = optimizer.apply_gradients(averages)
            session.run(tf1.global_variables_initializer())
            for _ in range(3):
                session.run(train_op, {x: X, y: Y})
            ends.append(session.run(tf1.trainable_variables()))
    assert_near(*ends)


# --------------------------------------------------------------------------------------------------------------------
# What is computed


def nodes_of_run(fetches, feeds):
    """Return the names of the operations that run when something is fetched."""
    config = tf1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with tf1.Session(config=config) as session:
        session.run(tf1.global_variables_initializer())
        options, metadata = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE), tf1.RunMetadata()
        session.run(fetches, feeds, options=options, run_metadata=metadata)
    return [node.node_name for device in metadata.step_stats.dev_stats for node in device.node_stats]


@pytest.mark.slow
@pytest.mark.law("L18")
@pytest.mark.parametrize("name", ["train_op", "loss", "metric"])
def test_the_network_is_computed_in_micro_batches_alone(name):
    x, y = placeholders()
    loss, metric = perceptron(x, y)
    loss = accum.compat.v1.split_batch(loss, (x, y), 6)
    train_op = tf1.train.GradientDescentOptimizer(0.1).minimize(loss)
    names = nodes_of_run({"train_op": train_op, "loss": loss, "metric": metric}[name], {x: X, y: Y})
    calls = [one for one in names if one.endswith("/Tensordot/MatMul") and "grad" not in one.split("/")[-2]]
    assert len(calls) == (8 if name == "train_op" else 4)  # of 20 examples: 6 + 6 + 6 + 2; the loss is no mean
    assert "Tensordot/MatMul" not in names


@pytest.mark.slow
@pytest.mark.law("L18")
def test_the_gradient_of_a_mean_takes_one_pass():
    x, y = placeholders()
    outputs = dense(tf.reshape(tf.tanh(tf.tensordot(x, weight("first", [4, 5]), 1)), [-1, 30]), "last", 1)
    loss = accum.compat.v1.split_batch(tf.reduce_mean(tf.reduce_sum((outputs - y) ** 2, 1)), (x, y), 6)
    train_op = tf1.train.GradientDescentOptimizer(0.1).minimize(loss)
    names = nodes_of_run([train_op, loss], {x: X, y: Y})
    assert len([name for name in names if name.endswith("segment/Tensordot/MatMul")]) == 4


def spread_over(length, is_normalised):
    """A network with 700 numbers for each place of a text of `length`, whose shape a check compares."""

    def network():
        x, y = tf1.placeholder(tf.float32, [None, length, 4], "x"), tf1.placeholder(tf.float32, [None, None], "y")
        hidden = tf.tanh(tf.tensordot(x, weight("first", [4, 5]), 1))
        if is_normalised:
            mean, variance = tf.nn.moments(hidden, [0, 1])
            hidden = tf.nn.batch_normalization(hidden, mean, variance, None, None, 1e-3)
        spread = tf.tensordot(hidden, weight("last", [5, 700]), 1, name="spread")
        with tf.control_dependencies([tf1.assert_equal(tf.shape(y), tf.shape(spread)[:-1], message="unlike texts")]):
            return (x, y), tf.reduce_mean((tf.reduce_max(spread, 2) - y) ** 2)

    return network


SPREAD = {x: spread_over(*x) for x in [(6, False), (6, True), (None, False), (None, True)]}


@pytest.mark.law("L18")
@pytest.mark.parametrize("network", list(SPREAD.values()), ids=map(str, SPREAD))
def test_a_check_of_shapes_does_not_cost_what_it_compares(network, control_flow):
    """As `sparse_softmax_cross_entropy_with_logits` has one of logits for each place of a text or an image."""
    tensors, loss = network()
    loss = accum.compat.v1.split_batch(loss, tensors, 2)
    train_op = tf1.train.GradientDescentOptimizer(0.1).minimize(loss)
    told, options = tf1.RunMetadata(), tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE)
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        session.run([train_op, loss], dict(zip(tensors, (X, X[:, :, 0]))), options, told)
        with pytest.raises(tf.errors.InvalidArgumentError, match="unlike texts"):
            session.run(loss, dict(zip(tensors, (X, X[:, :1, 0]))))  # which could be compared by broadcasting
    nodes = [node for device in told.step_stats.dev_stats for node in device.node_stats]
    assert not [node.node_name for node in nodes if node.node_name.startswith("spread/MatMul")]
    largest = max(memory.total_bytes for node in nodes for memory in node.memory)
    assert largest < N * 6 * 700 * 4 / 2


@pytest.mark.law("L21")
def test_a_tensor_before_the_loss_still_has_its_value():
    x, y = placeholders()
    outputs = dense(tf.reshape(x, [-1, 24]), "last", 1)
    accum.compat.v1.split_batch(tf.reduce_mean((outputs - y) ** 2), (x, y), 6)
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        kernel, bias, value = session.run([*tf1.trainable_variables(), outputs], {x: X})
    np.testing.assert_allclose(value, X.reshape(N, 24) @ kernel + bias, atol=1e-5)


def relative_positions(x, y):
    """Sinusoids of the places along the first axis of the data; examples are on the second."""
    x = tf.transpose(x, [1, 0, 2])
    places = tf.range(tf.shape(x)[0] - 1, -1, -1.0)
    waves = tf.sin(tf.einsum("i,j->ij", places, 1.0 / 10.0 ** (tf.range(0, 5.0) / 5)))[:, None, :]
    hidden = tf.tensordot(x, weight("first", [4, 5]), 1) + tf.tensordot(waves, weight("places", [5, 5]), 1)
    hidden = tf.tanh(tf.tensordot(tf.tanh(hidden), weight("second", [5, 5]), 1))
    return unusual_loss(dense(tf.reduce_mean(hidden, 0), "last", 1), y)


@pytest.mark.law("L21")
def test_places_may_be_counted_by_a_range_of_real_numbers():
    with warned() as said:
        ours = trained(relative_positions, 6)
    assert not [text for text in said if "[accum: " in text]  # as where most of a program is not split
    assert_same(ours, trained(relative_positions))


# --------------------------------------------------------------------------------------------------------------------
# A number of examples that is a constant of the graph


def of_constant_size(x, y):
    """With the number of examples in shapes, in constants that hold rows, and in what is drawn."""
    hidden = tf.reshape(tf.matmul(tf.reshape(x, [N * 6, 4]), weight("first", [4, 5])), [N, 30])
    hidden = tf.concat([tf.tanh(hidden) * tf.constant(0.5, shape=[N, 30]), tf.ones([N, 1])], 1)
    hidden = tf1.nn.dropout(hidden, rate=0.4)
    mean, variance = tf.nn.moments(hidden, [0])
    hidden = tf.nn.batch_normalization(hidden, mean, variance, None, None, 1e-3)
    return unusual_loss(dense(tf.slice(hidden, [0, 1], [N, 30]), "last", 1), y)


@pytest.mark.law("L21")
@pytest.mark.parametrize("size", mainly([1, 6, N], 6))
@pytest.mark.parametrize("program", [of_constant_size, *PROGRAMS[:3], attention], ids=lambda program: program.__name__)
def test_a_batch_of_a_constant_size_is_split_as_one_of_any_size(program, size):
    def batch():
        return placeholders(N)

    with warned() as said:
        ours = trained(program, size, batch=batch)
    assert not [text for text in said if "[accum: " in text]
    assert_same(ours, trained(program, batch=batch), 5e-6)


@pytest.mark.law("L21")
def test_the_size_of_a_batch_may_be_a_constant_of_one_of_its_tensors():
    def batch():
        return placeholders(N)[0], placeholders()[1]

    assert_same(trained(of_constant_size, 6, batch=batch), trained(of_constant_size, batch=batch), 5e-6)


def of_constant_shapes(x, y):
    """With the number of examples in shapes alone, of a batch that is read with an unknown one."""
    hidden = tf.reshape(tf.matmul(tf.reshape(x, [N * 6, 4]), weight("first", [4, 5])), [N, 30])
    return unusual_loss(dense(tf.slice(tf.tanh(hidden), [0, 1], [N, 28]), "last", 1), y)


@pytest.mark.law("L21")
def test_the_size_of_a_batch_may_be_a_constant_of_shapes_alone():
    with silent():
        ours = trained(of_constant_shapes, 6)
    assert_same(ours, trained(of_constant_shapes), 5e-6)


@pytest.mark.law("L17")
def test_another_number_of_examples_than_that_of_shapes_is_an_error():
    x, y = placeholders()
    loss = accum.compat.v1.split_batch(of_constant_shapes(x, y)[0], (x, y), 6)
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"batches of {N} examples, no others"):
            session.run(loss, {x: X[1:], y: Y[1:]})


@pytest.mark.law("L21")
def test_a_batch_of_a_constant_size_may_be_normalized_in_a_branch(control_flow):
    def program(x, y):
        training = tf1.placeholder_with_default(True, [], "training")
        hidden = tf.reshape(tf.matmul(tf.reshape(x, [N * 6, 4]), weight("first", [4, 5])), [N, 30])
        averages = weight("mean", [30]), tf.exp(weight("deviation", [30]))
        mean, variance = tf.cond(
            training, lambda: tf.nn.moments(hidden, [0]), lambda: tuple(tf.identity(one) for one in averages)
        )
        hidden = tf.nn.batch_normalization(hidden, mean, variance, None, None, 1e-3)
        return unusual_loss(dense(hidden, "last", 1), y)

    def batch():
        return placeholders(N)

    with warned() as said:
        ours = trained(program, 6, batch=batch)
    assert not [text for text in said if "[accum: " in text]
    assert_same(ours, trained(program, batch=batch), 5e-6)


@pytest.mark.law("L17")
def test_a_loop_of_tensorflow_2_over_a_batch_of_a_constant_size_is_named(control_flow_of_tf_2):
    x, y = placeholders(N)
    loss, _ = recurrent(x, y)
    with pytest.raises(ValueError, match="'while.*' only takes a constant one"):
        accum.compat.v1.split_batch(loss, (x, y), 6)


# --------------------------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.law("L17")
def test_a_constant_number_of_examples_is_named():
    x, y = placeholders()
    outputs = tf.add(dense(tf.reshape(x, [-1, 24]), "last", 1), tf.ones([N, 1]), name="constant")
    with pytest.raises(ValueError, match=r"'constant' \(made in .*test_split_batch.py:\d+\)"):
        accum.compat.v1.split_batch(tf.reduce_mean((outputs - y) ** 2), (x, y), 6)


@pytest.mark.law("L21")
def test_a_run_needs_no_labels_that_it_did_not_need_before():
    """As one that predicts with a metric, or decoded labels, which are computed from joined rows."""
    x, y = placeholders()
    loss, _ = perceptron(x, y)
    (outputs,) = (op.outputs[0] for op in tf1.get_default_graph().get_operations() if op.name == "add")
    ranks = tf.argsort(outputs[:, 0])
    accum.compat.v1.split_batch(loss, (x, y), 6)
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        value, ordered = session.run([outputs, ranks], {x: X})
    np.testing.assert_array_equal(ordered, np.argsort(value[:, 0]))


@pytest.mark.law("L17")
def test_tensors_of_different_lengths_are_an_error():
    x, y = placeholders()
    outputs = dense(tf.reshape(x, [-1, 24]), "last", 1)
    loss = accum.compat.v1.split_batch(tf.reduce_mean(outputs) + tf.reduce_mean(y * weight("w", [1])), (x, y), 6)
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        with pytest.raises(tf.errors.InvalidArgumentError, match="one entry for each example"):
            session.run(loss, {x: X, y: Y[:9]})


@pytest.mark.law("L17")
def test_a_tensor_that_is_split_can_not_be_fed():
    x, y = placeholders()
    outputs = dense(tf.reshape(x, [-1, 24]), "last", 1)
    loss = accum.compat.v1.split_batch(tf.reduce_mean((outputs - y) ** 2), (x, y), 6)
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        with pytest.raises(ValueError, match="may not be fed"):
            session.run(loss, {outputs: Y, x: X, y: Y})


@pytest.mark.slow
@pytest.mark.law("L17")
def test_it_has_to_come_before_the_optimizer():
    x, y = placeholders()
    loss, _ = perceptron(x, y)
    tf1.train.GradientDescentOptimizer(0.1).minimize(loss)
    with pytest.raises(ValueError, match="before the gradients"):
        accum.compat.v1.split_batch(loss, (x, y), 6)


@pytest.mark.law("L17")
def test_a_network_whose_examples_meet_at_once_is_refused():
    x, y = placeholders()
    totals = tf.reduce_sum(x, 0) * weight("scale", [4])
    with pytest.raises(ValueError, match="keep the examples apart, before any in which they may meet"):
        accum.compat.v1.split_batch(tf.reduce_mean(totals), (x, y), 6)


@pytest.mark.law("L17")
def test_an_error_leaves_the_graph_as_it_was():
    x, y = placeholders()
    hidden = tf.tanh(dense(tf.reshape(x, [-1, 24]), "first", 4))
    largest = tf1.get_variable("largest", [], initializer=tf1.zeros_initializer(), trainable=False)
    with tf.control_dependencies([tf1.assign(largest, tf.reduce_max(hidden))]):
        hidden = tf.identity(hidden)
    loss, _ = unusual_loss(dense(hidden, "last", 1), y)
    inputs = {op.name: [one.name for one in op.inputs] for op in tf1.get_default_graph().get_operations()}
    with pytest.raises(ValueError, match="can't keep the order"):
        accum.compat.v1.split_batch(loss, (x, y), 6)
    after = {op.name: [one.name for one in op.inputs] for op in tf1.get_default_graph().get_operations()}
    assert {name: after[name] for name in inputs} == inputs


@pytest.mark.slow
@pytest.mark.law("L21")
def test_a_loss_may_be_a_number_of_the_batch_and_of_weights():
    """It has no rows to join, and nothing but a mean of data."""

    def program(x, y):
        loss, metric = perceptron(x, y)
        return loss + tf.reduce_mean(x**2) * tf.reduce_sum(weight("scale", [4]) ** 2), metric

    def alone(x, y):
        return tf.reduce_mean(x**2) * weight("scale", []), tf.reduce_mean(y)

    assert_same(trained(program, 6), trained(program))
    x, y = placeholders()
    with pytest.raises(ValueError, match="before any in which they may meet"):
        accum.compat.v1.split_batch(alone(x, y)[0], (x, y), 6)


@pytest.mark.law("L17")
def test_a_number_that_is_known_before_is_not_what_examples_meet_in():
    x, y = placeholders()
    longest = tf.reduce_max(tf.cast(tf.abs(x[:, 0, 0]) * 3, tf.int32) % 5, name="longest") + 1
    totals = tf.reduce_sum(tf.slice(x, [0, 0, 0], tf.stack([longest, 6, 4]), name="cut"), 1)
    with pytest.raises(ValueError, match="meet first in 'cut'"):
        accum.compat.v1.split_batch(tf.reduce_mean(dense(totals, "last", 1) ** 2), (x, y), 6)


@pytest.mark.law("L17")
def test_what_the_batch_lacks_is_named():
    x, y = placeholders()
    outputs = dense(tf.reshape(x, [-1, 24]), "last", 1)
    with pytest.raises(ValueError, match=r"lacks \['x:0'\]"):
        accum.compat.v1.split_batch(tf.reduce_mean((outputs - y) ** 2), y, 6)


@pytest.mark.law("L17")
@pytest.mark.parametrize("size", [0, 1.5, None, True])
def test_the_size_must_be_a_positive_int(size):
    x, y = placeholders()
    with pytest.raises((TypeError, ValueError), match="micro_batch_size"):
        accum.compat.v1.split_batch(perceptron(x, y)[0], (x, y), size)


@pytest.mark.law("L17")
def test_arrays_are_no_batch():
    x, y = placeholders()
    with pytest.raises(TypeError, match="dense tensors of the graph"):
        accum.compat.v1.split_batch(perceptron(x, y)[0], (X, Y), 6)


def test_a_graph_of_which_little_is_split_is_named():
    x, y = placeholders(N)  # a constant number, for which there is one part
    hidden = tf.tanh(dense(tf.reshape(x, [-1, 24]), "first", 4))
    shuffled = tf.roll(hidden, 1, 0, name="shuffled")
    for name in ("second", "third", "fourth"):
        shuffled = dense(shuffled, name, 4)
    with warned("'shuffled'") as said:
        accum.compat.v1.split_batch(tf.reduce_mean((shuffled - y) ** 2), (x, y), 6)
    assert said


@pytest.mark.law("L21")
@pytest.mark.parametrize("of_batch", [lambda x: x, lambda x: normalized(x)], ids=["plain", "batch-norm"])
def test_what_is_fed_in_place_of_a_default_is_what_the_split_takes(of_batch):
    """As the rate of dropout, or whether this is training."""

    def computed(size):
        with tf.Graph().as_default(), tf1.Session() as session:
            x, y = placeholders()
            rate, is_scaled = tf1.placeholder_with_default(1.0, []), tf1.placeholder_with_default(False, [])
            hidden = tf.tanh(of_batch(tf.tensordot(x, weight("first", [4, 5]), 1)) * rate)
            hidden = tf1.cond(is_scaled, lambda: 3.0 * hidden, lambda: hidden)
            loss = tf.reduce_mean((dense(tf.reshape(hidden, [-1, 30]), "last", 1) - y) ** 2)
            if size is not None:
                loss = accum.compat.v1.split_batch(loss, (x, y), size)
            grads = tf.gradients(loss, [*tf1.trainable_variables(), rate])
            session.run(tf1.global_variables_initializer())
            feeds = {x: X, y: Y}
            return session.run([loss, *grads], {**feeds, rate: 0.3, is_scaled: True}), session.run(loss, feeds)

    (fed, default), (own_fed, own_default) = computed(None), computed(6)
    assert abs(fed[0] - default) > 0.01
    assert_near([*own_fed, own_default], [*fed, default], atol=2e-6)


@pytest.mark.law("L21")
def test_a_constant_that_the_split_has_copied_can_not_be_fed():
    x, y = placeholders()
    rate = tf.constant(1.0)
    hidden = tf.reshape(tf.tanh(tf.tensordot(x, weight("first", [4, 5]), 1)) * rate, [-1, 30])
    loss = accum.compat.v1.split_batch(tf.reduce_mean((dense(hidden, "last", 1) - y) ** 2), (x, y), 6)
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        with pytest.raises(ValueError, match="may not be fed"):
            session.run(loss, {x: X, y: Y, rate: 0.3})


def normalized(x):
    mean, variance = tf.nn.moments(x, [0, 1])
    return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)


@pytest.mark.law("L21")
def test_rows_without_a_gradient_may_be_part_of_the_loss():
    def program(x, y):
        logits = dense(tf.reshape(x, [-1, 24]), "first", 4)
        classes = tf.cast(tf.argmax(logits, 1), tf.float32)
        return tf.reduce_sum((tf.reduce_mean(classes) * weight("scale", [2]) - 1.0) ** 2), tf.reduce_mean(y)

    assert_same(trained(program, 6), trained(program))


@pytest.mark.law("L18", "L21")
def test_what_a_loop_outside_iterates_over_is_joined_rows(control_flow):
    """A loop that mixes examples, as a random field over time may, begins with a list of slices."""
    x, y = placeholders()
    hidden = tf.tanh(tf.tensordot(x, weight("first", [4, 5]), 1))
    slices = tf.TensorArray(tf.float32, 6).unstack(tf.transpose(hidden, [1, 0, 2]))

    def step(time, state):
        return time + 1, tf.roll(state, 1, 0) + slices.read(time)

    _, state = tf.while_loop(lambda time, _: time < 6, step, (tf.constant(0), tf.zeros([tf.shape(x)[0], 5])))
    loss = accum.compat.v1.split_batch(tf.reduce_mean((dense(state, "last", 1) - y) ** 2), (x, y), 6)
    ancestors, stack = set(), [loss.op]
    while stack:
        op = stack.pop()
        if op not in ancestors:
            ancestors.add(op)
            stack += [tensor.op for tensor in op.inputs]
    assert "Tensordot/MatMul" not in {op.name for op in ancestors}


@pytest.mark.law("L21")
@pytest.mark.parametrize("length", [6, None], ids=["fixed", "any"])
def test_a_loop_over_time_may_read_and_write_lists(control_flow, length):
    """As `dynamic_rnn` does. The whole loop is split."""

    def program(x, y):
        kernel = weight("recurrent", [9, 5])
        times = tf.shape(x)[1]
        inputs = tf.TensorArray(tf.float32, times).unstack(tf.transpose(x, [1, 0, 2]))

        def step(time, state, states):
            state = tf.tanh(tf.matmul(tf.concat([inputs.read(time), state], 1), kernel))
            return time + 1, state, states.write(time, state)

        loop = tf.constant(0), tf.zeros([tf.shape(x)[0], 5]), tf.TensorArray(tf.float32, times)
        _, _, states = tf.while_loop(lambda time, *_: time < times, step, loop)
        outputs = tf.transpose(states.stack(), [1, 0, 2])
        outputs.set_shape([None, length, 5])
        return unusual_loss(dense(outputs[:, -1], "last", 1), y)

    def batch():
        return tf1.placeholder(tf.float32, [None, length, 4], "x"), tf1.placeholder(tf.float32, [None, 1], "y")

    with warned() as said:
        ours = trained(program, 6, batch=batch)
    assert not [text for text in said if "[accum: " in text]
    assert_same(ours, trained(program, batch=batch))


@pytest.mark.law("L21")
@pytest.mark.parametrize("shaped", [False, True], ids=["fed", "shaped"])
def test_the_longest_sequence_may_end_a_loop_over_embeddings(control_flow, shaped):
    """As `dynamic_rnn` does, whose steps are as many as its inputs have; a tagger may shape lengths as embeddings."""

    def batch():
        return (*placeholders(), tf1.placeholder(tf.int32, [None, 1], "lengths"))

    def program(x, y, lengths):
        words = tf.cast(tf.abs(x[:, :, 0]) * 7, tf.int32) % 11
        kernel, vectors = weight("recurrent", [10, 5]), tf.nn.embedding_lookup(weight("table", [11, 5]), words)
        lengths = tf.reshape(lengths, [tf.shape(vectors)[0]] if shaped else [-1])
        with tf.control_dependencies([tf1.assert_equal(tf.shape(lengths)[0], tf.shape(vectors)[0])]):
            lengths = tf.identity(lengths)
        steps = tf.minimum(tf.shape(vectors)[1], tf.maximum(1, tf.reduce_max(lengths)))

        def step(time, state):
            new = tf.tanh(tf.matmul(tf.concat([vectors[:, time], state], 1), kernel))
            return time + 1, tf1.where(time < lengths, new, state)

        _, state = tf.while_loop(lambda time, _: time < steps, step, (tf.constant(0), tf.zeros([tf.shape(x)[0], 5])))
        return unusual_loss(dense(state, "last", 1), y)

    data = (X, Y, (np.arange(N) % 3 + 2).astype("int32")[:, None])
    with warned() as said:
        ours = trained(program, 6, data=data, batch=batch)
    assert not [text for text in said if "[accum: " in text]
    assert_same(ours, trained(program, data=data, batch=batch))


@pytest.mark.law("L21")
@pytest.mark.tf(max="2.15", because="cells of TensorFlow 1 need Keras 2")
def test_a_recurrent_network_of_tensorflow_1_keeps_examples_apart(control_flow):
    """With the length of each sequence; none of it is computed from the whole batch."""

    def program(x, y):
        lengths = 1 + tf.cast(tf.abs(x[:, 0, 0]) * 7, tf.int32) % 6
        cell = tf1.nn.rnn_cell.GRUCell(5, kernel_initializer=tf1.constant_initializer(0.3))
        outputs, state = tf1.nn.dynamic_rnn(cell, x, lengths, dtype=tf.float32)
        return unusual_loss(dense(tf.concat([outputs[:, -1], outputs[:, 2], state], 1), "last", 1), y)

    with warned() as said:
        ours = trained(program, 6)
    assert not [text for text in said if "[accum: " in text]
    assert_same(ours, trained(program))


CHECKS = {  # {name: (what is asserted of the batch and of what is computed from it, whether it holds)}
    "as many": (lambda x, h: tf1.assert_equal(tf.shape(h)[0], N), True),
    "another number": (lambda x, h: tf1.assert_equal(tf.shape(h)[0], 6), False),
    "entries": (lambda x, h: tf1.assert_less(tf.abs(h), 1e3), True),
    "wrong entries": (lambda x, h: tf1.assert_less(h, -1e3), False),
    "wrong batch": (lambda x, h: tf1.assert_less(x, -1e3), False),
    "grouped": (lambda x, h: tf.group(tf1.assert_less(h, -1e3)), False),
    "sum": (lambda x, h: tf1.assert_greater(tf.reduce_sum(tf.abs(h)), float(0.9 * np.abs(X).sum())), True),
    "wrong sum": (lambda x, h: tf1.assert_less(tf.reduce_sum(tf.abs(h)), float(0.5 * np.abs(X).sum())), False),
    "mean": (
        lambda x, h: tf1.assert_near(tf.reduce_mean(h - tf.reduce_mean(h, 0), 0), tf.zeros([24]), atol=1e-4),
        True,
    ),
}


@pytest.mark.law("L21")
@pytest.mark.parametrize("is_normalized", [False, True], ids=["", "normalized"])
@pytest.mark.parametrize("name", sorted(CHECKS))
def test_what_is_asserted_is_asserted_of_the_whole_batch(name, is_normalized, control_flow):
    """Also by a run that takes gradients alone, for which the joined rows are not needed."""
    asserted, holds = CHECKS[name]

    def ends(size):
        with tf.Graph().as_default(), tf1.Session() as session:
            x, y = placeholders()
            identity = tf1.get_variable("w", initializer=np.eye(24, dtype="float32"))
            hidden = tf.matmul(tf.reshape(x, [-1, 24]), identity)
            if is_normalized:
                mean, variance = tf.nn.moments(hidden, [0])
                hidden = (hidden - mean) / tf.sqrt(variance + 1e-3) * tf.sqrt(tf.stop_gradient(variance))
                hidden += tf.stop_gradient(mean)
            with tf.control_dependencies([asserted(x, hidden)]):
                hidden = tf.identity(hidden)
            loss = tf.reduce_mean((dense(tf.tanh(hidden), "last", 1) - y) ** 2)
            loss = loss if size is None else accum.compat.v1.split_batch(loss, [x, y], size)
            op = tf1.train.GradientDescentOptimizer(0.1).minimize(loss)
            session.run(tf1.global_variables_initializer())
            try:
                session.run(op, {x: X, y: Y})
            except tf.errors.InvalidArgumentError:
                return "an error"
            return "a step"

    assert ends(6) == ends(None) == ("a step" if holds else "an error")


@pytest.mark.law("L21")
@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("place", ["branch", "loop"])
def test_what_a_branch_or_loop_asserts_is_asserted(place, holds, control_flow):
    """The update waits for the gradients, which must be alive."""

    def doubled(x):
        with tf.control_dependencies([tf1.assert_less(x, 1e3 if holds else -1e3)]):
            return 2.0 * x

    def ends(size):
        with tf.Graph().as_default(), tf1.Session() as session:
            x, y = placeholders()
            hidden = dense(tf.reshape(x, [-1, 24]), "hidden", 5)
            if place == "branch":
                hidden = tf.cond(tf1.placeholder_with_default(True, []), lambda: doubled(hidden), lambda: hidden)
            else:
                _, hidden = tf.while_loop(lambda i, _: i < 2, lambda i, one: (i + 1, doubled(one)), [0, hidden])
            loss = tf.reduce_mean((dense(tf.tanh(hidden), "last", 1) - y) ** 2)
            loss = loss if size is None else accum.compat.v1.split_batch(loss, [x, y], size)
            variables = tf1.trainable_variables()
            grads = tf.gradients(loss, variables)
            with tf.control_dependencies(grads):
                grads = list(map(tf.identity, grads))
            op = tf1.train.GradientDescentOptimizer(0.1).apply_gradients(zip(grads, variables))
            session.run(tf1.global_variables_initializer())
            try:
                session.run(op, {x: X, y: Y})
            except tf.errors.InvalidArgumentError:
                return None
            return session.run(variables)

    ours, plain = ends(6), ends(None)
    assert (ours is None) == (plain is None) == (not holds)
    if holds:
        assert_near(ours, plain, rtol=0, atol=2e-6)


@pytest.mark.law("L21")
@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("predicate", ["fed", "of the batch", "of its number", "of activations", "of their number"])
def test_a_conditional_may_choose_between_constants(predicate, is_training, control_flow):
    """Such as whether activations are scaled, in training alone."""

    def program(x, y):
        hidden = dense(tf.reshape(x, [-1, 24]), "hidden", 5)
        predicates = {
            "fed": lambda: tf1.placeholder_with_default(is_training, []),
            "of the batch": lambda: tf.equal(tf.reduce_max(x) > 0.0, is_training),
            "of its number": lambda: tf.shape(x)[0] > (N - 2 if is_training else N),
            "of their number": lambda: tf.shape(hidden)[0] > (N - 2 if is_training else N),
            "of activations": lambda: tf.equal(tf.reduce_max(hidden) > 0.0, is_training),
        }
        scale = tf.cond(predicates[predicate](), lambda: 0.5, lambda: 1.5)
        return unusual_loss(dense(scale * hidden, "last", 1), y)

    assert_same(trained(program, 6), trained(program))


def first_few(x, weights):
    return x * tf.cast(tf.shape(weights[: tf.minimum(tf.shape(x)[0], 10)])[0], tf.float32)


def as_many_rounds(x, weights):
    rounds = tf.shape(weights[: tf.minimum(tf.shape(x)[0], 10)])[0]
    return tf.while_loop(lambda i, _: i < rounds, lambda i, z: (i + 1, 1.1 * z), [0, x])[1]


def element_by_number(x, weights):
    return x * tf.TensorArray(tf.float32, 5).unstack(weights[:5]).read(tf.shape(x)[0] % 3)


def number_of_elements(x, weights):
    array = tf.TensorArray(tf.float32, tf.shape(x)[0], element_shape=[]).write(0, 30.0)
    return x * tf.reduce_mean(array.stack())


def another_length(x, weights):
    count = tf.shape(x)[0]
    return x - tf.reduce_mean(tf.slice(x, [0, 0], [tf1.where(tf.equal(count, N), 5, count), -1]), 0)


@pytest.mark.law("L21")
@pytest.mark.parametrize(
    "function",
    [first_few, as_many_rounds, element_by_number, number_of_elements, another_length],
    ids=lambda function: function.__name__,
)
def test_numbers_of_the_batch_that_look_like_constants_are_those_of_the_whole_batch(function, control_flow):
    def program(x, y):
        hidden = dense(tf.reshape(x, [-1, 24]), "hidden", 24)
        return unusual_loss(dense(tf.tanh(function(hidden, weight("table", [25, 24]))), "last", 1), y)

    assert_same(trained(program, 6), trained(program))


def pixels_of_images(normalize, size):
    """A class for each pixel, and the activations before, both of more numbers than are joined without need."""
    x = tf1.placeholder(tf.float32, [None, size, size, 3])
    classes = tf1.placeholder(tf.int32, [None, size, size])
    hidden = tf.nn.conv2d(x, weight("one", [3, 3, 3, 6]), [1] * 4, "SAME")
    hidden = tf1.nn.dropout(tf.nn.relu(normalize(hidden, "norm")), rate=0.5)
    logits = tf.nn.conv2d(hidden, weight("two", [3, 3, 6, 4]), [1] * 4, "SAME") + weight("bias", [4])
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=classes, logits=logits)
    is_right = tf.equal(tf.argmax(logits, -1, output_type=tf.int32), classes)
    return (x, classes), tf.reduce_mean(losses), tf.reduce_mean(tf.cast(is_right, tf.float32)), tf.reduce_mean(hidden)


@pytest.mark.law("L19", "L20")
@pytest.mark.parametrize("size", [40, None], ids=["large", "unknown"])
@pytest.mark.parametrize("normalize", mainly(NORMS, by_hand), ids=lambda normalize: normalize.__name__)
def test_large_results_of_a_network_with_batch_normalisation_are_joined(normalize, size):
    """Otherwise a metric that exists would compute the whole batch at once, with other dropout."""
    images = np.random.RandomState(4).normal(size=(10, 40, 40, 3)).astype("float32")
    pixels = np.random.RandomState(5).randint(4, size=(10, 40, 40))
    seen = []
    for count in (4, 10):
        with tf.Graph().as_default() as graph, tf1.Session() as session:
            tf1.set_random_seed(1)
            batch, loss, metric, before = pixels_of_images(normalize, size)
            convolutions = {op.name for op in graph.get_operations() if op.type == "Conv2D"}
            loss = accum.compat.v1.split_batch(loss, batch, count)
            train_op = tf1.train.GradientDescentOptimizer(0.1).minimize(loss)
            feed = dict(zip(batch, (images, pixels)))
            assert not convolutions & set(nodes_of_run([train_op, metric], feed))
            assert convolutions & set(nodes_of_run([before], feed))  # of what is not behind the last weight
            session.run(tf1.global_variables_initializer())
            seen.append(session.run([loss, metric], feed))
    assert_near(*seen, rtol=2e-5)
