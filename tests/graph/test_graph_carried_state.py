"""State that a micro-batch leaves to the next one is named, and one state for each micro-batch is exact (law L1)."""

import warnings

import numpy as np
import pytest
import tensorflow as tf
from warned import silent

import accum.compat.v1

tf1 = tf.compat.v1

K, ROWS, STEPS = 2, 3, 4  # micro-batches per step, rows of each
X = np.random.RandomState(0).normal(size=(STEPS, K * ROWS)).astype("float32")
KINDS = pytest.mark.parametrize("use_resource", [False, True], ids=["ref", "resource"])


def cell(x, state):
    """A cell whose next state is that of the row's next batch, as XLNet's memory is."""
    weight = tf1.get_variable("w", initializer=0.5)
    output = tf.tanh(weight * x + state)
    return tf.stop_gradient(output), tf.reduce_mean(output**2)


def stateful(x, rows, use_resource):
    state = tf1.get_variable("state", [rows], initializer=tf1.zeros_initializer(), trainable=False)
    state = state if use_resource else tf1.get_variable("ref_state", [rows], trainable=False, use_resource=False)
    following, loss = cell(x, state.read_value())
    with tf.control_dependencies([loss]), tf.control_dependencies([state.assign(following)]):
        return tf.identity(loss)


def optimizer(accum_steps):
    return accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.5), accum_steps)


def by_numpy():
    """The weight after full batches, each row of which continues its own state."""
    weight, state = 0.5, np.zeros(K * ROWS)
    for x in X.astype("float64"):
        output = np.tanh(weight * x + state)
        weight -= 0.5 * np.mean(2.0 * output * (1.0 - output**2) * x)
        state = output
    return weight


@KINDS
@pytest.mark.law("L17")
def test_state_that_is_assigned_in_a_micro_batch_is_named(use_resource):
    name = "'state'" if use_resource else "'ref_state'"
    with tf.Graph().as_default(), pytest.warns(UserWarning, match="carry state.*one state for each.*" + name):
        loss = stateful(tf1.placeholder(tf.float32, [ROWS]), ROWS, use_resource)
        optimizer(K).minimize(loss)


@pytest.mark.law("L17")
def test_state_in_a_local_variable_is_named():
    local = [tf1.GraphKeys.LOCAL_VARIABLES]
    with tf.Graph().as_default(), pytest.warns(UserWarning, match="carry state.*'state'"):
        with tf1.variable_scope(
            "",
            custom_getter=lambda getter, name, **options: getter(
                name, **dict(options, collections=local if name == "state" else None)
            ),
        ):
            loss = stateful(tf1.placeholder(tf.float32, [ROWS]), ROWS, True)
        optimizer(K).minimize(loss)


@KINDS
@pytest.mark.law("L17")
def test_what_is_assigned_beside_the_loss_or_once_per_step_is_not_named(use_resource):
    with tf.Graph().as_default(), silent():
        x = tf1.placeholder(tf.float32, [ROWS])
        counter = tf1.get_variable("counter", initializer=0.0, trainable=False, use_resource=use_resource)
        _, loss = cell(x, counter.read_value())
        ours = optimizer(K)
        ours.after_step(lambda: counter.assign_add(1.0))
        ours.minimize(loss, tf1.train.get_or_create_global_step())


def summed(x, use_resource, added, use=lambda loss, total: loss):
    """A loss that waits for a sum to be added to."""
    total = tf1.get_variable("total", initializer=0.0, trainable=False, use_resource=use_resource)
    loss = use(cell(x, 0.0)[1], total)
    with tf.control_dependencies([total.assign_add(added(x, total))]):
        return tf.identity(loss)


@KINDS
@pytest.mark.law("L17")
def test_sums_over_the_data_that_nothing_reads_are_not_named(use_resource):
    """Those over the micro-batches of a cycle are those over the full batch."""
    with tf.Graph().as_default(), silent():
        x = tf1.placeholder(tf.float32, [ROWS])
        optimizer(K).minimize(summed(x, use_resource, lambda x, _: tf.reduce_sum(x)))


@KINDS
@pytest.mark.law("L17")
@pytest.mark.usefixtures("control_flow_of_tf_1")
def test_sums_that_begin_with_the_first_micro_batch_are_not_named(use_resource):
    """As those that StyleGAN2 keeps for its summaries."""
    with tf.Graph().as_default(), silent():
        x = tf1.placeholder(tf.float32, [ROWS])
        total = tf1.get_variable("total", initializer=0.0, trainable=False, use_resource=use_resource)
        is_begun, first = tf1.is_variable_initialized(total), tf.reduce_sum(x)
        update = tf1.cond(is_begun, lambda: tf.group(total.assign_add(first)), lambda: tf.group(total.assign(first)))
        with tf.control_dependencies([update]):
            loss = tf.identity(cell(x, 0.0)[1])
        optimizer(K).minimize(loss)


@KINDS
@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "told, options",
    [
        ("do not depend on them", {"added": lambda x, total: 1.0}),
        ("do not depend on them", {"added": lambda x, total: tf.reduce_sum(x) - 0.1 * total}),
        ("carry state", {"added": lambda x, total: tf.reduce_sum(x), "use": lambda loss, total: loss * total}),
    ],
    ids=["a counter", "a sum that fades", "a sum that the loss reads"],
)
def test_what_is_more_than_a_sum_over_the_data_is_named(told, options, use_resource):
    with tf.Graph().as_default(), pytest.warns(UserWarning, match=told + ".*'total'"):
        optimizer(K).minimize(summed(tf1.placeholder(tf.float32, [ROWS]), use_resource, **options))


@pytest.mark.law("L17")
def test_state_that_another_variable_hands_to_the_gradients_is_named():
    with tf.Graph().as_default(), pytest.warns(UserWarning, match=r"carry state.*\['average', 'scale'\]"):
        _, loss = cell(tf1.placeholder(tf.float32, [ROWS]), 0.0)
        options = {"initializer": 1.0, "trainable": False, "use_resource": True}
        average, scale = (tf1.get_variable(name, **options) for name in ("average", "scale"))
        with tf.control_dependencies([average.assign(0.9 * average + 0.1 * loss)]):
            scaled = scale.assign(1.0 / average.read_value())
        with tf.control_dependencies([scaled]):
            optimizer(K).minimize(loss * scale.read_value())


@pytest.mark.law("L17")
@pytest.mark.usefixtures("control_flow_of_tf_1")
def test_state_that_a_loop_of_tf_1_reads_is_named():
    with tf.Graph().as_default(), pytest.warns(UserWarning, match="carry state.*'state'"):
        x = tf1.placeholder(tf.float32, [ROWS])
        weight = tf1.get_variable("w", initializer=0.5, use_resource=True)
        state = tf1.get_variable("state", initializer=1.0, trainable=False, use_resource=True)
        with tf.control_dependencies([state.assign(tf.reduce_mean(x))]):
            total = tf.while_loop(lambda i, _: i < 2, lambda i, y: [i + 1, y * weight * state.read_value()], [0, 1.0])[
                1
            ]
        ours = optimizer(K)
        ours.apply_gradients([(tf1.gradients(total, weight)[0], weight)])


@KINDS
@pytest.mark.law("L17")
def test_state_is_not_named_where_each_micro_batch_is_a_full_batch(use_resource):
    with tf.Graph().as_default(), silent():
        loss = stateful(tf1.placeholder(tf.float32, [ROWS]), ROWS, use_resource)
        plain = tf1.train.GradientDescentOptimizer(0.5)
        accum.compat.v1.AccumOptimizer(plain, 1, transform=list).minimize(loss)


def beside(x, use_resource, assigned):
    """A loss that reads a state, and the op that assigns to it without the loss having to wait for it."""
    state = tf1.get_variable("state", [ROWS], trainable=False, use_resource=use_resource)
    following, loss = cell(x, state.read_value())
    return loss, state.assign(assigned(state, following))


@KINDS
@pytest.mark.law("L17")
def test_state_that_is_assigned_beside_the_loss_is_named(use_resource):
    with tf.Graph().as_default(), pytest.warns(UserWarning, match="same micro-batch.*one state for each.*'state'"):
        loss, _ = beside(tf1.placeholder(tf.float32, [ROWS]), use_resource, lambda _, following: following)
        optimizer(K).minimize(loss)


@pytest.mark.law("L17")
def test_state_that_an_input_pipeline_moves_is_named():
    with tf.Graph().as_default(), pytest.warns(UserWarning, match="same micro-batch.*'state'"):
        data = tf1.data.make_one_shot_iterator(tf1.data.Dataset.from_tensors(X[0, :ROWS]).repeat())
        loss, _ = beside(data.get_next(), True, lambda _, following: following)
        optimizer(K).minimize(loss)


@KINDS
@pytest.mark.law("L17")
def test_state_assigned_beside_the_loss_makes_another_step_than_the_full_batch(use_resource):
    def train(accum_steps, rows):
        with tf.Graph().as_default(), tf1.Session() as session, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            x = tf1.placeholder(tf.float32, [rows])
            mean = tf1.get_variable("mean", initializer=0.0, trainable=False, use_resource=use_resource)
            _, loss = cell(x, mean.read_value())
            train_op = optimizer(accum_steps).minimize(loss)
            with tf.control_dependencies([train_op]):
                train_op = tf.group(mean.assign(tf.reduce_mean(x)))
            session.run(tf1.global_variables_initializer())
            for part in X.reshape(-1, rows):
                session.run(train_op, {x: part})
            return session.run(tf1.trainable_variables()[0])

    assert abs(train(K, ROWS) - train(1, K * ROWS)) > 1e-3


@KINDS
@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "assigned",
    [
        lambda state, _: tf.zeros_like(state),
        lambda state, _: state * 0.5,
        lambda *_: tf1.placeholder(tf.float32, [ROWS]),
        lambda *_: tf1.trainable_variables()[0] * tf.ones([ROWS]),
    ],
    ids=["reset", "decayed", "fed", "copied from weights"],
)
def test_what_may_be_assigned_at_another_time_is_not_named(assigned, use_resource):
    with tf.Graph().as_default(), silent():
        loss, _ = beside(tf1.placeholder(tf.float32, [ROWS]), use_resource, assigned)
        optimizer(K).minimize(loss)


@pytest.mark.law("L17")
def test_averages_of_batch_normalisation_that_inference_reads_are_not_named():
    with tf.Graph().as_default(), silent():
        x, training = tf1.placeholder(tf.float32, [ROWS, 2]), tf1.placeholder(tf.bool, [])
        used = normalized(x, training)
        optimizer(K).minimize(cell(used[:, 0], 0.0)[1])


def normalized(x, training, use_resource=True):
    """Batch normalisation that uses its averages in inference."""
    averages = [
        tf1.get_variable(name, [2], trainable=False, use_resource=use_resource) for name in ("average", "deviation")
    ]
    moments = tf.nn.moments(x, [0])
    for average, moment in zip(averages, moments):
        move = tf1.assign_sub(average, (average.read_value() - moment) * tf.constant(0.1))
        tf1.add_to_collection(tf1.GraphKeys.UPDATE_OPS, move)
    mean, variance = [tf.where(tf.fill([2], training), *pair) for pair in zip(moments, averages)]
    return (x - mean) / tf.sqrt(variance + 1e-3)


@KINDS
@pytest.mark.law("L13", "L17")
def test_what_the_steps_of_a_train_op_move_is_not_named_for_the_next_one(use_resource):
    with tf.Graph().as_default(), silent():
        x, training = tf1.placeholder(tf.float32, [ROWS, 2]), tf1.placeholder(tf.bool, [])
        centre = tf1.get_variable("centre", [2], trainable=False, use_resource=use_resource)
        loss = cell((normalized(x, training, use_resource) - centre)[:, 0], 0.0)[1]
        ours = optimizer(K)
        ours.accumulate_update_ops()
        ours.after_step(lambda: centre.assign(tf.reduce_mean(x, 0)))
        for _ in range(2):
            ours.minimize(loss, weight=tf.shape(x)[0])


@KINDS
@pytest.mark.law("L17")
def test_state_of_a_second_train_op_is_named(use_resource):
    with tf.Graph().as_default():
        ours, x = optimizer(K), tf1.placeholder(tf.float32, [ROWS])
        ours.minimize(cell(x, 0.0)[1])
        with tf1.variable_scope("", reuse=tf1.AUTO_REUSE):
            loss = stateful(x, ROWS, use_resource)
        with pytest.warns(UserWarning, match="carry state.*state(_1)?'"):
            ours.minimize(loss)


def centred(x, waits):
    """A loss that reads a centre, which follows the mean of the micro-batches as in DINO, and the op that moves it."""
    centre = tf1.get_variable("centre", [2], initializer=tf1.zeros_initializer(), trainable=False)
    move = tf1.assign_sub(centre, (centre.read_value() - tf.reduce_mean(x, 0)) * tf.constant(0.1))
    with tf.control_dependencies([move] if waits else []):
        loss = cell((x - centre.read_value())[:, 0], 0.0)[1]
    return loss, move


@pytest.mark.law("L17")
@pytest.mark.parametrize("waits", [False, True])
def test_the_average_of_a_mean_alone_is_named(waits):
    with tf.Graph().as_default(), pytest.warns(UserWarning, match="one state for each.*'centre'"):
        optimizer(K).minimize(centred(tf1.placeholder(tf.float32, [ROWS, 2]), waits)[0])


@pytest.mark.law("L17")
def test_the_average_of_a_mean_alone_makes_another_step_than_the_full_batch():
    batches = np.random.RandomState(1).normal(3.0, 1.0, size=(STEPS, K * ROWS, 2)).astype("float32")

    def train(accum_steps, rows):
        with tf.Graph().as_default(), tf1.Session() as session, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            x = tf1.placeholder(tf.float32, [rows, 2])
            train_op = optimizer(accum_steps).minimize(centred(x, True)[0])
            session.run(tf1.global_variables_initializer())
            for part in batches.reshape(-1, rows, 2):
                session.run(train_op, {x: part})
            return session.run(tf1.trainable_variables()[0])

    assert abs(train(K, ROWS) - train(1, K * ROWS)) > 1e-3


@pytest.mark.law("L13", "L17")
def test_averages_of_batch_normalisation_that_follow_the_cycle_are_not_named():
    with tf.Graph().as_default(), silent():
        x = tf1.placeholder(tf.float32, [ROWS, 2])
        average = tf1.get_variable("average", [2], initializer=tf1.zeros_initializer(), trainable=False)
        deviation = tf1.get_variable("deviation", [2], initializer=tf1.zeros_initializer(), trainable=False)
        mean, variance = tf.nn.moments(x, [0])
        moves = [
            tf1.assign_sub(var, (var.read_value() - value) * tf.constant(0.1))
            for var, value in ((average, mean), (deviation, variance))
        ]
        for move in moves:
            tf1.add_to_collection(tf1.GraphKeys.UPDATE_OPS, move)
        ours = optimizer(K)
        ours.accumulate_update_ops()
        with tf.control_dependencies(moves):
            _, loss = cell((x - mean)[:, 0], 0.0)
        ours.minimize(loss)


@pytest.mark.law("L13")
def test_the_average_of_a_mean_alone_is_no_obstacle_to_taking_over_those_of_layers():
    batches = np.random.RandomState(2).normal(3.0, 1.0, size=(STEPS, K * ROWS, 2)).astype("float32")
    with tf.Graph().as_default(), tf1.Session() as session:
        x, training = tf1.placeholder(tf.float32, [ROWS, 2]), tf1.placeholder_with_default(True, [])
        centre = tf1.get_variable("centre", [2], initializer=tf1.zeros_initializer(), trainable=False)
        tf1.assign_sub(centre, (centre.read_value() - tf.reduce_mean(x, 0)) * tf.constant(0.1))  # run by hand
        loss = cell(normalized(x, training)[:, 0], 0.0)[1]
        ours = optimizer(K)
        assert len(ours.accumulate_update_ops()) == 2
        train_op = ours.minimize(loss)
        session.run(tf1.global_variables_initializer())
        average = [var for var in tf1.global_variables() if var.op.name == "average"][0]
        expected = session.run(average).astype("float64")
        for part in batches.reshape(-1, ROWS, 2):
            session.run(train_op, {x: part})
        for batch in batches.astype("float64"):
            expected = 0.9 * expected + 0.1 * batch.mean(0)
        np.testing.assert_allclose(session.run(average), expected, rtol=0, atol=2e-6)


@pytest.mark.law("L1")
def test_one_state_for_each_micro_batch_is_exact_and_a_common_one_is_not():
    def train(keeps_one_each):
        with tf.Graph().as_default(), tf1.Session() as session:
            x, state = [tf1.placeholder(tf.float32, [ROWS]) for _ in range(2)]
            following, loss = cell(x, state)
            train_op = optimizer(K).minimize(loss)
            weight = tf1.trainable_variables()[0]
            session.run(tf1.global_variables_initializer())
            states = [np.zeros(ROWS, "float32")] * K
            for number, part in enumerate(X.reshape(-1, ROWS)):
                index = number % K if keeps_one_each else 0
                states[index], _ = session.run([following, train_op], {x: part, state: states[index]})
            return session.run(weight)

    assert abs(train(True) - by_numpy()) < 2e-6
    assert abs(train(False) - by_numpy()) > 1e-2


@KINDS
@pytest.mark.law("L17")
def test_an_average_of_the_loss_that_gradients_wait_for_is_named_apart(use_resource):
    """As in facenet and TensorFlow's CIFAR-10 tutorial."""
    with tf.Graph().as_default(), tf1.variable_scope("", use_resource=use_resource), silent():
        _, loss = cell(tf1.placeholder(tf.float32, [ROWS]), 0.0)
        average = tf1.train.ExponentialMovingAverage(0.9, name="avg")
        with tf.control_dependencies([average.apply([loss])]):
            ours = optimizer(K)
            pairs = ours.compute_gradients(loss)
        with pytest.warns(UserWarning, match="The gradients do not depend on them.*after_step.*/avg"):
            ours.apply_gradients(pairs)
