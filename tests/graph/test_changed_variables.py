"""Variables that the run changes between the rows of `split_batch` and their gradient, for which both see the same."""

import time

import numpy as np
import pytest
import tensorflow as tf
from warned import silent, warned

import accum.compat.v1

pytestmark = pytest.mark.law("L21")

tf1 = tf.compat.v1
RANDOM = np.random.RandomState(0)
N, TIME = 12, 3
X = RANDOM.normal(size=(2, N, 4)).astype("float32")
SERIES = RANDOM.normal(size=(2, N, TIME, 2)).astype("float32")
NOISE = RANDOM.normal(size=(2, N, TIME, 3)).astype("float32")
CLASSES = RANDOM.randint(0, 3, size=(2, N)).astype("int32")


def weight(name, shape, **options):
    first = np.random.RandomState(len(name)).normal(size=shape, scale=0.4).astype("float32")
    return tf1.get_variable(name, shape, initializer=tf1.constant_initializer(first), **options)


def features():
    x = tf1.placeholder(tf.float32, [None, 4])
    return x, tf.tanh(tf.matmul(x, weight("kernel", [4, 3])))


def centred(behind):
    """A loss of distances to centres, which the distances move."""
    x, hidden = features()
    classes = tf1.placeholder(tf.int32, [None])
    centres = weight("centres", [3, 3], trainable=False)
    distances = hidden - tf.gather(centres, classes)
    update = tf1.scatter_sub(centres, classes, 0.5 * distances)
    if behind:  # batch normalisation, beyond which it is computed in segments
        mean, variance = tf.nn.moments(distances, [0])
        distances = (distances - mean) / tf.sqrt(variance + 0.1) + distances
    return [tf.sqrt(tf.reduce_sum(distances**2))], [x, classes], [X, CLASSES], [update]


def normalised(in_branch):
    """Activities less their running mean, which they move, in a branch or as they are."""
    x, hidden = features()
    mean = weight("mean", [3], trainable=False)
    shifted = tf.cond(tf.reduce_sum(tf.zeros([2])) < 1.0, lambda: hidden - mean, lambda: hidden)
    shifted = shifted if in_branch else hidden - mean
    update = tf1.assign(mean, 0.5 * mean + tf.reduce_mean(shifted, 0))
    return [tf.sqrt(tf.reduce_sum(tf.tanh(shifted) ** 2))], [x], [X], [update]


def trained(program, size, is_resource):
    with tf.Graph().as_default(), tf1.Session() as session:
        with tf1.variable_scope("", use_resource=is_resource):
            losses, batch, data, updates = program()
        if size is not None:
            losses = accum.compat.v1.split_batch(losses, batch, size)
        with tf.control_dependencies(updates):
            train_op = tf1.train.GradientDescentOptimizer(0.3).minimize(losses[0])
        session.run(tf1.global_variables_initializer())
        logs = [session.run([train_op, losses], dict(zip(batch, one)))[1] for one in zip(*data)]
        return session.run({var.name: var for var in tf1.global_variables()}), logs


def assert_same(ours, theirs):
    (values, logs), (others, other_logs) = ours, theirs
    assert set(values) == set(others)
    for name in values:
        np.testing.assert_allclose(values[name], others[name], rtol=0, atol=2e-6, err_msg=name)
    np.testing.assert_allclose(logs, other_logs, rtol=2e-6)


PROGRAMS = {
    "centres": lambda: centred(False),
    "centres before batch normalisation": lambda: centred(True),
    "mean": lambda: normalised(False),
    "mean in a branch": lambda: normalised(True),
}


@pytest.mark.parametrize("is_resource", [False, True], ids=["ref", "resource"])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=list(PROGRAMS))
@pytest.mark.usefixtures("control_flow_of_tf_1")
def test_a_state_that_the_batch_moves_is_read_before(program, is_resource):
    assert_same(trained(program, 5, is_resource), trained(program, None, is_resource))


@pytest.mark.usefixtures("control_flow_of_tf_2")
def test_a_state_that_is_read_in_a_branch_of_tf_2_is_not_read_in_micro_batches():
    program = PROGRAMS["mean in a branch"]
    assert_same(trained(program, 5, True), trained(program, None, True))


# --------------------------------------------------------------------------------------------------------------------
# Several optimizers in one run


def conditional():
    """A GAN whose critic looks up a vector for each class."""
    real, classes = tf1.placeholder(tf.float32, [None, 4]), tf1.placeholder(tf.int32, [None])

    def critic(x):
        with tf1.variable_scope("critic", reuse=tf1.AUTO_REUSE):
            hidden = tf.tanh(tf.matmul(x, weight("kernel", [4, 6])))
            return tf.reduce_sum(tf.tanh(hidden * tf.nn.embedding_lookup(weight("table", [3, 6]), classes)), 1)

    with tf1.variable_scope("generator"):
        made = tf.matmul(real[:, ::-1], weight("kernel", [4, 4]))
    return critic(real), critic(made), [real, classes], [X, CLASSES]


def recurrent():
    """A GAN of series, whose networks read their weights in loops."""
    real, noise = tf1.placeholder(tf.float32, [None, TIME, 2]), tf1.placeholder(tf.float32, [None, TIME, 3])

    def states_of(x, width):
        inputs, own = weight("inputs", [width, 4]), weight("own", [4, 4])
        step = lambda state, one: tf.tanh(tf.matmul(one, inputs) + tf.matmul(state, own))
        states = tf.scan(step, tf.transpose(x, [1, 0, 2]), tf.zeros([tf.shape(x)[0], 4]))
        return tf.transpose(states, [1, 0, 2])

    def critic(x):
        with tf1.variable_scope("critic", reuse=tf1.AUTO_REUSE):
            return tf.tensordot(states_of(x, 2), weight("last", [4, 1]), 1)

    with tf1.variable_scope("generator"):
        made = tf.tensordot(states_of(noise, 3), weight("made", [4, 2]), 1)
    made.set_shape([None, TIME, 2])
    return critic(real), critic(made), [real, noise], [SERIES, NOISE]


def slowly(value):
    """Return a value that is computed late, so that what does not wait for it comes before."""

    def sleep(array):
        time.sleep(0.2)
        return array

    later = tf1.py_func(sleep, [value], value.dtype)
    later.set_shape(value.shape)
    return later


def looked_up_late():
    """A GAN whose vectors are normalised before they are looked up."""
    real, classes = tf1.placeholder(tf.float32, [None, 4]), tf1.placeholder(tf.int32, [None])
    with tf1.variable_scope("critic"):
        table = weight("table", [3, 4])
        with tf.control_dependencies([table.assign(slowly(tf.nn.l2_normalize(table, 1)))]):
            vectors = tf.nn.embedding_lookup(table, classes)
        critic = tf.tanh(tf.matmul(real, weight("kernel", [4, 4])) * vectors)
    with tf1.variable_scope("generator"):
        made = tf.tanh(tf.matmul(real[:, ::-1], weight("kernel", [4, 4])) * vectors)
    return tf.reduce_sum(critic, 1), tf.reduce_sum(made, 1), [real, classes], [X, CLASSES]


def run_in_turn(session, ops, losses, feeds, in_one_run):
    """Return the values of all variables, and the first loss of each run."""
    session.run(tf1.global_variables_initializer())
    runs = [(fetched, fed) for fed in feeds for fetched in ([ops] if in_one_run else ops)]
    logs = [session.run([fetched, losses], fed)[1][0] for fetched, fed in runs]
    return session.run({var.name: var for var in tf1.global_variables()}), logs


def took_turns(program, size, in_one_run=True):
    """Train both networks, the second after the first has moved."""
    with tf.Graph().as_default(), tf1.Session() as session:
        with tf1.variable_scope("", use_resource=True):
            real, made, batch, data = program()
        losses = [tf.reduce_mean(tf.nn.softplus(made) + tf.nn.softplus(-real)), tf.reduce_mean(tf.nn.softplus(-made))]
        if size is not None:
            losses = accum.compat.v1.split_batch(losses, batch, size)
        ops = []
        for loss, scope in zip(losses, ("critic", "generator")):
            with tf.control_dependencies(ops if in_one_run else []):
                variables = tf1.trainable_variables(scope)
                ops.append(tf1.train.AdamOptimizer(0.05, epsilon=0.01).minimize(loss, var_list=variables))
        return run_in_turn(session, ops, losses, [dict(zip(batch, one)) for one in zip(*data)], in_one_run)


@pytest.mark.parametrize("program", [conditional, recurrent, looked_up_late])
@pytest.mark.usefixtures("control_flow_of_tf_1")
def test_the_gradient_of_a_second_loss_is_that_of_the_variables_before_the_first_step(program):
    with silent():
        ours = took_turns(program, 5)
    assert_same(ours, took_turns(program, None))


@pytest.mark.usefixtures("control_flow_of_tf_2")
def test_loops_of_tf_2_that_read_variables_again_are_named():
    with warned("Train each loss in a run of its own") as said:
        ours = took_turns(recurrent, 5, in_one_run=False)
    assert len(said) == 1 and "critic/inputs" in said[0]
    assert_same(ours, took_turns(recurrent, None, in_one_run=False))


# --------------------------------------------------------------------------------------------------------------------
# What the program makes after the call


def in_two_parts():
    """A loss of vectors that are looked up, and of a matrix; each belongs to an optimizer of its own."""
    x, classes = tf1.placeholder(tf.float32, [None, 4]), tf1.placeholder(tf.int32, [None])
    with tf1.variable_scope("a"):
        table = weight("table", [3, 6])
    with tf1.variable_scope("b"):
        kernel = weight("kernel", [4, 6])
    hidden = tf.tanh(tf.matmul(x, kernel) * tf.nn.embedding_lookup(table, classes))
    return hidden, [x, classes], [X, CLASSES]


def descent():
    return tf1.train.GradientDescentOptimizer(0.5)


def minimized_in_turn(losses):
    ops = []
    for loss, scope in zip(losses, "ab"):
        with tf.control_dependencies(ops):
            ops.append(descent().minimize(loss, var_list=tf1.trainable_variables(scope)))
    return ops


def applied_early(losses, scopes):
    """Make both gradients, then the optimizers: one moves the table while the gradient of the kernel is computed."""
    ops, pairs = [], []
    for loss, scope in zip(losses, scopes):
        variables = tf1.trainable_variables(scope)
        upstream = slowly(tf.ones([])) if scope == "b" else tf.ones([])
        pairs.append(list(zip(tf.gradients(loss, variables, upstream), variables)))
    for some in pairs:
        ops.append(descent().apply_gradients(some))
    return ops


def minimized_apart(losses):
    """Make one optimizer after the other; the second moves the table while the gradient of the kernel is computed."""
    ops = []
    for loss, scope in zip(losses, "ba"):
        upstream = slowly(tf.ones([])) if scope == "b" else tf.ones([])
        ops.append(descent().minimize(loss, var_list=tf1.trainable_variables(scope), grad_loss=upstream))
    return ops


OPTIMIZERS = {
    "in turn": minimized_in_turn,
    "apart": minimized_apart,
    "the first late": lambda losses: applied_early(losses, "ba"),
    "the second late": lambda losses: applied_early(losses, "ab"),
}


def by_parts(size, optimizers, count=1, calls=1):
    """Train the parts of a network by optimizers of their own, with one loss or, if `count` is 2, with one each."""
    with tf.Graph().as_default(), tf1.Session() as session:
        with tf1.variable_scope("", use_resource=True):
            hidden, batch, data = in_two_parts()
        losses = [tf.sqrt(tf.reduce_mean(hidden**2)), tf.sqrt(tf.reduce_mean((hidden - 1.0) ** 2))][:count]
        if size is not None and calls == 1:
            losses = accum.compat.v1.split_batch(losses, batch, size)
        elif size is not None:
            losses = [accum.compat.v1.split_batch(loss, batch, size) for loss in losses]
        ops = optimizers(losses * (3 - count))
        session.run(tf1.global_variables_initializer())
        logs = [session.run([ops, losses], dict(zip(batch, one)))[1] for one in zip(*data)]
        return session.run({var.name: var for var in tf1.global_variables()}), logs


@pytest.mark.parametrize("count", [1, 2], ids=["one loss", "two losses"])
@pytest.mark.parametrize("optimizers", sorted(OPTIMIZERS))
def test_optimizers_in_one_run_see_the_variables_before_the_first_step(optimizers, count):
    with silent():
        ours = by_parts(5, OPTIMIZERS[optimizers], count)
    assert_same(ours, by_parts(None, OPTIMIZERS[optimizers], count))


def second_alone(size):
    with tf.Graph().as_default(), tf1.Session() as session:
        with tf1.variable_scope("", use_resource=True):
            hidden, (x, classes), _ = in_two_parts()
        targets, others = tf1.placeholder(tf.float32, [None, 6]), tf1.placeholder(tf.float32, [None, 6])
        if size is not None:
            hidden = accum.compat.v1.split_batch(hidden, [x, classes], size)
        losses = [tf.sqrt(tf.reduce_mean((hidden - one) ** 2)) for one in (targets, others)]
        ops = [descent().minimize(loss) for loss in losses]
        return run_in_turn(
            session, ops[1:], losses[1:], [{x: X[0], classes: CLASSES[0], others: np.ones((N, 6))}], in_one_run=True
        )


def test_a_second_optimizer_takes_nothing_that_only_the_first_one_needs():
    assert_same(second_alone(5), second_alone(None))


def test_losses_that_were_split_by_calls_of_their_own_take_turns():
    assert_same(by_parts(5, minimized_in_turn, 2, calls=2), by_parts(None, minimized_in_turn, 2))


def moved(centres, classes, distances):
    return tf1.scatter_sub(centres, classes, 0.5 * distances)


def moved_in_a_branch(centres, classes, distances):
    is_moved = tf.reduce_sum(distances) < 1e6
    return tf1.cond(is_moved, lambda: tf.identity(moved(centres, classes, distances)), lambda: tf.zeros([3, 3]))


def moved_in_a_function(centres, classes, distances):
    @tf.function
    def move(distances):
        return centres.assign_sub(tf.reshape(tf.reduce_mean(distances, 0), [1, 3]) * tf.ones([3, 1]))

    return move(distances)


def cleared(centres, classes, distances):
    return tf1.scatter_update(centres, classes, tf.zeros_like(distances))


def averaged(centres, classes, distances):
    """Beside an average of the loss, which waits for the rows."""
    average = weight("average", [], trainable=False)
    mean = tf.reduce_mean(tf1.get_collection("losses")[0])
    return tf.group(moved(centres, classes, distances), tf1.assign(average, 0.9 * average + 0.1 * mean))


def updated_later(update, size, is_resource):
    """Centres that move once the loss is there, before its gradient. Evaluates the loss first."""
    with tf.Graph().as_default(), tf1.Session() as session:
        with tf1.variable_scope("", use_resource=is_resource):
            x, hidden = features()
            classes = tf1.placeholder(tf.int32, [None])
            centres = weight("centres", [3, 3], trainable=False)
            distances = hidden - tf.gather(centres, classes)
            weights = slowly(tf.ones_like(x[:, :1]))  # so that a loop that waits for all of the batch begins late
            loss = tf.sqrt(tf.reduce_sum(weights * distances**2))
            if size is not None:
                loss = accum.compat.v1.split_batch(loss, [x, classes, weights], size)
            tf1.add_to_collection("losses", loss)
            with tf.control_dependencies([update(centres, classes, distances)]):
                train_op = descent().minimize(loss)
        session.run(tf1.global_variables_initializer())
        logs = [session.run(loss, {x: X[0], classes: CLASSES[0]})]
        logs += [session.run([train_op, loss], {x: a, classes: b})[1] for a, b in zip(X, CLASSES)]
        return session.run({var.name: var for var in tf1.global_variables()}), logs


@pytest.mark.parametrize("update", [moved, cleared, averaged, moved_in_a_branch])
@pytest.mark.parametrize("is_resource", [False, True], ids=["ref", "resource"])
@pytest.mark.usefixtures("control_flow_of_tf_1")
def test_an_update_that_is_made_after_the_call_comes_after_the_rows(is_resource, update):
    assert_same(updated_later(update, 5, is_resource), updated_later(update, None, is_resource))


@pytest.mark.parametrize("update", [moved_in_a_branch, moved_in_a_function])
@pytest.mark.usefixtures("control_flow_of_tf_2")
def test_an_update_in_a_branch_or_function_of_tf_2_comes_after_the_rows(update):
    assert_same(updated_later(update, 5, True), updated_later(update, None, True))


@pytest.mark.parametrize("is_resource", [False, True], ids=["ref", "resource"])
def test_a_table_whose_initial_value_is_computed_from_the_batch_is_initialized_as_before(is_resource):
    with tf.Graph().as_default(), tf1.Session() as session:
        with tf1.variable_scope("", use_resource=is_resource):
            x, hidden = features()
            classes = tf1.placeholder(tf.int32, [None])
            table = tf1.get_variable("table", initializer=tf.reshape(tf.reduce_mean(x, 0), [4, 1]), validate_shape=True)
        hidden = tf.gather(table, classes) * hidden
        loss = accum.compat.v1.split_batch(tf.sqrt(tf.reduce_mean(hidden**2)), [x, classes], 5)
        train_op = descent().minimize(loss)
        batch = {x: X[0], classes: CLASSES[0]}
        session.run(tf1.global_variables_initializer(), batch)
        session.run(train_op, batch)


def annealed(size):
    """A number that is read in a loop, and moved between the loss and its gradient."""
    with tf.Graph().as_default(), tf1.Session() as session:
        x = tf1.placeholder(tf.float32, [None, TIME, 2])
        with tf1.variable_scope("", use_resource=True):
            kernel = weight("kernel", [2, 3])
            factor = tf1.get_variable("factor", [], initializer=tf1.ones_initializer(), trainable=False)
        step = lambda state, one: tf.tanh(tf.matmul(one, kernel) * factor + state)
        states = tf.scan(step, tf.transpose(x, [1, 0, 2]), tf.zeros([tf.shape(x)[0], 3]))
        loss = tf.sqrt(tf.reduce_mean(states**2))
        if size is not None:
            loss = accum.compat.v1.split_batch(loss, x, size)
        with tf.control_dependencies([loss]):
            update = factor.assign_add(0.5)
        with tf.control_dependencies([update]):
            train_op = descent().minimize(loss)
        session.run(tf1.global_variables_initializer())
        logs = [session.run([train_op, loss], {x: one})[1] for one in SERIES]
        return session.run({var.name: var for var in tf1.global_variables()}), logs


@pytest.mark.usefixtures("control_flow_of_tf_1")
def test_a_number_that_moves_between_the_loss_and_its_gradient_is_that_of_the_loss():
    with silent():
        ours = annealed(5)
    assert_same(ours, annealed(None))


@pytest.mark.usefixtures("control_flow_of_tf_2")
def test_a_loop_of_tf_2_that_reads_what_moves_before_the_gradient_is_named():
    with warned("read variables again for the gradient") as said:
        annealed(5)
    assert len(said) == 1 and "'factor'" in said[0]


def beside_batch_norm(size):
    with tf.Graph().as_default(), tf1.Session() as session:
        with tf1.variable_scope("", use_resource=True):
            hidden, batch, data = in_two_parts()
        mean, variance = tf.nn.moments(hidden, [0])
        hidden = (hidden - mean) / tf.sqrt(variance + 0.1)
        losses = [tf.reduce_mean(tf.tanh(hidden) ** 2), tf.reduce_mean((tf.tanh(hidden) - 1.0) ** 2)]
        if size is not None:
            losses = accum.compat.v1.split_batch(losses, batch, size)
        ops = [descent().minimize(loss, var_list=tf1.trainable_variables(at)) for loss, at in zip(losses, "ab")]
        return run_in_turn(session, ops, losses, [dict(zip(batch, one)) for one in zip(*data)], in_one_run=False)


def test_vectors_beside_batch_normalisation_that_another_optimizer_moves_are_named():
    with warned("Layers beside batch normalisation read variables again") as said:
        ours = beside_batch_norm(5)
    assert len(said) == 1 and "'a/table'" in said[0]
    assert_same(ours, beside_batch_norm(None))
