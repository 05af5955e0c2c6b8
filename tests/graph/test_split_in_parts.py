"""`accum.compat.v1.split_batch` splits what is behind a meeting of examples in turn (laws L18 to L21)."""

import numpy as np
import pytest
import tensorflow as tf
from warned import silent

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


def recurrent(sequence, name, time_major=True):
    """The last state of a recurrent network on [time, examples, features], or on [examples, time, features]."""
    kernel = weight(f"{name}/kernel", [sequence.shape.as_list()[-1] + 4, 4])
    steps = sequence.shape.as_list()[0 if time_major else 1]

    def step(time, state):
        inputs = sequence[time] if time_major else sequence[:, time]
        return time + 1, tf.tanh(tf.matmul(tf.concat([inputs, state], 1), kernel))

    examples = tf.shape(sequence)[1 if time_major else 0]
    _, state = tf.while_loop(lambda time, _: time < steps, step, (tf.constant(0), tf.zeros([examples, 4])))
    return state


def convolved(images):
    return tf.nn.conv2d(images, weight("filters", [3, 3, 3, 4]), strides=[1, 1, 1, 1], padding="SAME")


def images_to_text(images, labels, training):
    """Convolutions and batch normalisation, then a loop over the columns: as networks that read texts are built."""
    hidden = tf.nn.relu(normalised(convolved(images)))
    columns = tf.reshape(tf.transpose(hidden, [2, 0, 1, 3]), [5, -1, 24])
    return tf.reduce_mean((dense(recurrent(columns, "columns"), "last", 2) - labels) ** 2)


def images_to_text_or_not(images, labels, training):
    hidden = tf.nn.relu(normalised(convolved(images), training))
    columns = tf.reshape(tf.transpose(hidden, [2, 0, 1, 3]), [5, -1, 24])
    return tf.reduce_mean((dense(recurrent(columns, "columns"), "last", 2) - labels) ** 2)


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


def met_twice(images, labels, training):
    """Three parts, the last of which also takes rows of the first, with dropout and a table in them."""
    first = tf.tanh(dense(tf.reshape(images, [-1, 90]), "first", 6))
    centred = tf1.nn.l2_normalize(first, 0)
    words = tf.cast(tf.abs(images[:, 0, 0, 0]) * 7, tf.int32) % 11
    table = tf.nn.embedding_lookup(weight("table", [11, 6]), words)
    second = tf1.nn.dropout(tf.tanh(dense(centred + table, "second", 5)), rate=0.3)
    ranked = tf.cumsum(second, 0) / 5.0
    third = tf.tanh(dense(tf.concat([ranked, first], 1), "third", 4))
    return tf.reduce_mean((dense(third, "last", 2) - labels) ** 2) + 0.01 * tf.reduce_sum(tf.abs(third))


def scaled_by_the_batch(images, labels, training):
    """Rows in which examples meet twice, without a weight between."""
    first = tf.tanh(dense(tf.reshape(images, [-1, 90]), "first", 6))
    ranked = tf.cumsum(first, 0) / 5.0
    scaled = ranked * (1.0 + tf.reduce_mean(ranked**2))
    error = dense(tf.tanh(dense(scaled, "second", 5)), "last", 2) - labels
    return tf.reduce_mean(error**2) + 0.1 * tf.reduce_mean(tf.abs(ranked))


def trained(program, size=None, steps=3, is_last_in_training=True):
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


def assert_same(one, other, tolerance=5e-6):
    assert set(one[0]) == set(other[0])
    for name in one[0]:
        np.testing.assert_allclose(one[0][name], other[0][name], rtol=0, atol=tolerance, err_msg=name)
    np.testing.assert_allclose(one[1], other[1], rtol=0, atol=2e-5)


PROGRAMS = [images_to_text, images_to_text_or_not, weighed_by_others, weighed_in_a_function]
PROGRAMS += [met_twice, scaled_by_the_batch]


@pytest.mark.law("L19", "L21")
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_behind_a_meeting_of_examples_is_the_full_batch_s(program, control_flow):
    with silent():
        ours = trained(program, SIZE)
    whole = trained(program, N if program is met_twice else None)  # which draws dropout as `split_batch` does
    assert_same(ours, whole)


def parts_of(program):
    """Return (operations with variables that are split, all of them), for each part, given a program."""
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
    """Two losses, of which one is rows, with an optimizer each; and metrics that take tensors within the parts."""

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
