"""`accum.compat.v1.split_batch` splits what is behind a meeting of examples in turn (laws L18 to L21)."""

import numpy as np
import pytest
import tensorflow as tf
from warned import silent, warned

import accum.compat.v1

tf1 = tf.compat.v1
RANDOM = np.random.RandomState(0)
N, SIZE = 20, 6
IMAGES = RANDOM.normal(size=(N, 6, 5, 3)).astype("float32")
LABELS = RANDOM.uniform(size=(N, 2)).astype("float32")


def weight(name, shape):
    first = np.random.RandomState(sum(map(ord, name))).normal(size=shape, scale=0.4).astype("float32")
    return tf1.get_variable(name, shape, initializer=tf1.constant_initializer(first))


def dense(x, name, units):
    return tf.matmul(x, weight(f"{name}/kernel", [x.shape.as_list()[-1], units])) + weight(f"{name}/bias", [units])


def normalised(x, training=None):
    """Batch normalisation by hand, whose average is moved by an update operation."""
    axes = list(range(x.shape.rank - 1))
    average = tf1.get_variable("average", x.shape[-1:], initializer=tf1.zeros_initializer(), trainable=False)

    def in_training():
        mean, variance = tf.nn.moments(x, axes)
        return mean, variance

    if training is None:
        mean, variance = in_training()
    else:
        mean, variance = tf.cond(training, in_training, lambda: (average, tf.ones_like(average)))
    tf1.add_to_collection(tf1.GraphKeys.UPDATE_OPS, average.assign(0.9 * average + 0.1 * mean))
    return tf.nn.batch_normalization(x, mean, variance, weight("offset", x.shape[-1:]), None, 1e-3)


def recurrent(sequence):
    """The last state of a recurrent network on [time, examples, features]."""
    steps, _, features = sequence.shape.as_list()
    kernel = weight("recurrent/kernel", [features + 4, 4])

    def step(time, state):
        return time + 1, tf.tanh(tf.matmul(tf.concat([sequence[time], state], 1), kernel))

    first = tf.constant(0), tf.zeros([tf.shape(sequence)[1], 4])
    return tf.while_loop(lambda time, _: time < steps, step, first)[1]


def convolved(images):
    return tf.nn.conv2d(images, weight("filters", [3, 3, 3, 4]), strides=[1, 1, 1, 1], padding="SAME")


def images_to_text(images, labels, training, switch=None):
    """Convolutions and batch normalisation, then a loop over the columns, as in networks that read texts."""
    hidden = tf.nn.relu(normalised(convolved(images), switch))
    columns = tf.reshape(tf.transpose(hidden, [2, 0, 1, 3]), [5, -1, 24])
    return tf.reduce_mean((dense(recurrent(columns), "last", 2) - labels) ** 2)


def images_to_text_in_training(images, labels, training):
    return images_to_text(images, labels, training, training)


def normalised_in_time(images, labels, training):
    """Batch normalisation of [time, examples, features], and a loop."""
    columns = tf.reshape(tf.transpose(images, [2, 0, 1, 3]), [5, -1, 18])
    hidden = tf.tensordot(columns, weight("first", [18, 6]), 1)
    return tf.reduce_mean((dense(recurrent(normalised(hidden)), "last", 2) - labels) ** 2)


def attended_by(rows):
    return tf.matmul(tf.nn.softmax(tf.matmul(rows, rows, transpose_b=True)), rows)


def weighed_in_a_function(images, labels, training):
    return weighed_by_others(images, labels, training, tf.function(attended_by))


def weighed_by_others(images, labels, training, attend=attended_by):
    """Attention over the examples in the middle of a network, and what was before it once more behind."""
    first = tf.tanh(dense(tf.reshape(images, [-1, 90]), "first", 6))
    attended = attend(first)
    attended.set_shape([None, 6])
    second = tf.tanh(dense(tf.concat([attended, first], 1), "second", 5))
    return tf.reduce_mean((dense(second, "last", 2) - labels) ** 2)


def met_twice(images, labels, training, rate=0.0):
    """Three parts, one with a table; the last one takes rows of the first, too."""
    first = tf.tanh(dense(tf.reshape(images, [-1, 90]), "first", 6))
    centred = tf1.nn.l2_normalize(first, 0)
    words = tf.cast(tf.abs(images[:, 0, 0, 0]) * 7, tf.int32) % 11
    table = tf.nn.embedding_lookup(weight("table", [11, 6]), words)
    second = tf.tanh(dense(centred + table, "second", 5))
    second = tf1.nn.dropout(second, rate=rate) if rate else second
    ranked = tf.cumsum(second, 0) / 5.0
    third = tf.tanh(dense(tf.concat([ranked, first], 1), "third", 4))
    return tf.reduce_mean((dense(third, "last", 2) - labels) ** 2) + 0.01 * tf.reduce_sum(tf.abs(third))


def met_twice_with_dropout(images, labels, training):
    return met_twice(images, labels, training, 0.3)


def scaled_by_the_batch(images, labels, training):
    """Rows in which examples meet twice, without a weight between."""
    first = tf.tanh(dense(tf.reshape(images, [-1, 90]), "first", 6))
    ranked = tf.cumsum(first, 0) / 5.0
    scaled = ranked * (1.0 + tf.reduce_mean(ranked**2))
    error = dense(tf.tanh(dense(scaled, "second", 5)), "last", 2) - labels
    return tf.reduce_mean(error**2) + 0.1 * tf.reduce_mean(tf.abs(ranked))


def pushed(images, labels, training):
    """A loss of data that the gradient of another loss has moved, as in virtual adversarial training."""

    def network(x):
        with tf1.variable_scope("network", reuse=tf1.AUTO_REUSE):
            return dense(tf.tanh(dense(x, "first", 6)), "last", 2)

    x = tf.reshape(images, [-1, 90])
    other = tf.reduce_mean(tf.reduce_sum(tf.nn.softmax(network(x)) * network(1.1 * x), 1))
    push = tf.stop_gradient(tf.gradients(other, x)[0])
    return tf.reduce_mean((network(x + 20.0 * push) - labels) ** 2)


def trained(program, size=None, steps=3):
    """Return ({variable: value}, losses) after steps on whole batches, or on these in micro-batches."""
    with tf.Graph().as_default(), tf1.Session() as session:
        tf1.set_random_seed(1)
        images, labels = tf1.placeholder(tf.float32, [None, 6, 5, 3]), tf1.placeholder(tf.float32, [None, 2])
        training = tf1.placeholder_with_default(True, [], "training")
        loss = program(images, labels, training)
        if size is not None:
            loss = accum.compat.v1.split_batch(loss, (images, labels), size)
        optimizer = tf1.train.AdamOptimizer(0.05, epsilon=1e-3)
        grads, variables = zip(*optimizer.compute_gradients(loss))
        clipped, norm = tf1.clip_by_global_norm(grads, 0.5)
        with tf.control_dependencies(tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)):
            op = optimizer.apply_gradients(zip(clipped, variables))
        session.run(tf1.global_variables_initializer())
        feeds, logs = {images: IMAGES, labels: LABELS}, []
        for _ in range(steps):
            logs += session.run([op, loss, norm], feeds)[1:]
        logs.append(session.run(loss, {images: IMAGES[:7], labels: LABELS[:7], training: False}))
        return session.run({var.name: var for var in tf1.global_variables()}), logs


def assert_same(one, other):
    assert set(one[0]) == set(other[0])
    for name in one[0]:
        np.testing.assert_allclose(one[0][name], other[0][name], rtol=0, atol=5e-6, err_msg=name)
    np.testing.assert_allclose(one[1], other[1], rtol=0, atol=2e-5)


PROGRAMS = [images_to_text, images_to_text_in_training, weighed_by_others, weighed_in_a_function]
PROGRAMS += [met_twice, scaled_by_the_batch, pushed]


@pytest.mark.law("L19", "L21")
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_behind_a_meeting_of_examples_is_the_full_batch_s(program, control_flow):
    # In older TensorFlows, the gradient in `pushed` has operations without a rule, and a warning says so.
    with warned() if program is pushed else silent():
        ours = trained(program, SIZE)
    assert_same(ours, trained(program))


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_mean_of_the_losses_of_micro_batches_is_another_one(program):
    with tf.Graph().as_default(), tf1.Session() as session:
        images, labels = tf1.placeholder(tf.float32, [None, 6, 5, 3]), tf1.placeholder(tf.float32, [None, 2])
        loss = program(images, labels, tf.constant(True))
        session.run(tf1.global_variables_initializer())
        parts = [slice(begin, begin + 5) for begin in range(0, N, 5)]
        values = [session.run(loss, {images: IMAGES[part], labels: LABELS[part]}) for part in parts]
        assert abs(np.mean(values) - session.run(loss, {images: IMAGES, labels: LABELS})) > 1e-4


@pytest.mark.law("L17", "L21")
def test_batch_normalisation_of_sequences_with_the_time_on_the_first_axis_is_computed_at_once(control_flow):
    with warned():  # with a loop that is in the graph itself, less than half is split
        ours = trained(normalised_in_time, SIZE)
    assert_same(ours, trained(normalised_in_time))


@pytest.mark.law("L20")
def test_dropout_in_a_part_does_not_depend_on_the_size_of_micro_batches(control_flow):
    assert_same(trained(met_twice_with_dropout, SIZE), trained(met_twice_with_dropout, N))


@pytest.mark.law("L18", "L21")
def test_what_takes_tensors_within_parts_later_has_their_whole_gradient(control_flow):
    """A loss that is added after the call is computed from the whole batch at once."""

    def computed(size):
        with tf.Graph().as_default(), tf1.Session() as session:
            images, labels = tf1.placeholder(tf.float32, [None, 6, 5, 3]), tf1.placeholder(tf.float32, [None, 2])
            first = tf.tanh(dense(tf.reshape(images, [-1, 90]), "first", 6))
            second = dense(attended_by(first), "second", 5)
            loss = tf.reduce_mean((dense(tf.tanh(second), "last", 2) - labels) ** 2)
            if size is not None:
                loss = accum.compat.v1.split_batch(loss, (images, labels), size)
            variables = tf1.trainable_variables()
            tf.gradients(loss, variables)
            later = [loss + tf.reduce_mean(second**2)]
            later += tf.gradients(later[0], variables)
            session.run(tf1.global_variables_initializer())
            return session.run(later, {images: IMAGES, labels: LABELS})

    for own, whole in zip(computed(SIZE), computed(None)):
        np.testing.assert_allclose(own, whole, rtol=0, atol=2e-6)


@pytest.mark.law("L17", "L21")
@pytest.mark.parametrize("control_flow", [1], indirect=True)
def test_a_loop_behind_batch_normalisation_of_a_constant_number_of_examples_is_named(control_flow):
    with tf.Graph().as_default():
        images, labels = tf1.placeholder(tf.float32, [N, 6, 5, 3]), tf1.placeholder(tf.float32, [N, 2])
        hidden = normalised(convolved(images))
        state = recurrent(tf.reshape(tf.transpose(hidden, [2, 0, 1, 3]), [5, N, 24]))
        for name in "abcd":
            state = dense(state, name, 4)
        with warned("A loop or conditional behind batch normalisation is not split: that of '") as said:
            accum.compat.v1.split_batch(tf.reduce_mean((dense(state, "last", 2) - labels) ** 2), (images, labels), SIZE)
    assert said


def parts_of(program):
    """Return (how many operations with variables are split, how many there are) for each part of a program."""
    import accum.compat.v1._split_batch as module

    parts, join = [], module.joined_rows

    def noted(inside, *others):
        parts.append(tuple(map(len, inside.using()[::-1])))
        return join(inside, *others)

    module.joined_rows = noted
    try:
        trained(program, SIZE, steps=1)
    finally:
        module.joined_rows = join
    return parts


@pytest.mark.law("L21")
@pytest.mark.parametrize("program, count", [(images_to_text, 2), (weighed_by_others, 2), (met_twice, 3)])
def test_each_part_is_split(program, count, control_flow):
    parts = parts_of(program)
    assert len(parts) == count
    assert sum(split for split, _ in parts) == parts[0][1]  # all operations that take examples and variables


@pytest.mark.law("L18", "L21")
def test_gradients_by_the_batch_pass_all_parts(control_flow):
    def computed(size):
        with tf.Graph().as_default(), tf1.Session() as session:
            images, labels = tf1.placeholder(tf.float32, [None, 6, 5, 3]), tf1.placeholder(tf.float32, [None, 2])
            loss = weighed_by_others(images, labels, None)
            if size is not None:
                loss = accum.compat.v1.split_batch(loss, (images, labels), size)
            found = [loss, *tf.gradients(loss, [images, labels])]
            session.run(tf1.global_variables_initializer())
            return session.run(found, {images: IMAGES, labels: LABELS})

    for own, whole in zip(computed(SIZE), computed(None)):
        np.testing.assert_allclose(own, whole, rtol=0, atol=2e-6)


@pytest.mark.law("L18", "L21")
def test_losses_for_each_example_and_metrics_may_be_of_several_parts(control_flow):
    """One of the two losses is rows. The metrics take tensors within the parts."""

    def computed(size):
        with tf.Graph().as_default(), tf1.Session() as session:
            images, labels = tf1.placeholder(tf.float32, [None, 6, 5, 3]), tf1.placeholder(tf.float32, [None, 2])
            first = tf.tanh(dense(tf.reshape(images, [-1, 90]), "first", 6))
            second = tf.tanh(dense(tf1.nn.l2_normalize(first, 0), "second", 5))
            outputs = dense(second, "last", 2)
            metrics = [tf.reduce_mean(tf.abs(outputs - labels)), tf.reduce_max(second), tf.reduce_mean(first)]
            losses = [
                tf.reduce_sum((outputs - labels) ** 2, 1),
                tf.reduce_mean(tf.abs(second)) + tf.reduce_mean(first**2),
            ]
            if size is not None:
                losses = accum.compat.v1.split_batch(losses, (images, labels), size)
            ops = [tf1.train.GradientDescentOptimizer(0.1).minimize(loss) for loss in losses]
            session.run(tf1.global_variables_initializer())
            logs = []
            for op in ops:
                session.run(op, {images: IMAGES, labels: LABELS})
                logs += session.run([*losses, *metrics, *tf1.trainable_variables()], {images: IMAGES, labels: LABELS})
            return logs

    for own, whole in zip(computed(SIZE), computed(None)):
        np.testing.assert_allclose(own, whole, rtol=0, atol=5e-6)
