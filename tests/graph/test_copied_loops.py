"""Loops and conditionals of TensorFlow 1 in graphs that are copied: for one number of examples, or of branches (L21).

Recurrent networks are often built for batches of a constant size, which then stands in loops too: in shapes, in rows
that are made there, in tensor arrays. What chooses between training and inference may be in a loop, or around one.
"""

import numpy as np
import pytest
import tensorflow as tf
from warned import silent, warned

import accum.compat.v1

pytestmark = [pytest.mark.law("L21"), pytest.mark.usefixtures("control_flow_of_tf_1")]

tf1 = tf.compat.v1
KEYS = tf1.GraphKeys
RANDOM = np.random.RandomState(0)
STEPS, N, TIME, FEATURES, UNITS = 3, 8, 5, 4, 6
X = RANDOM.normal(size=(STEPS, N, TIME, FEATURES)).astype("float32")
Y = RANDOM.normal(size=(STEPS, N, 1)).astype("float32")
LENGTHS = RANDOM.randint(1, TIME + 1, size=(STEPS, N)).astype("int32")


def weight(name, shape):
    first = np.random.RandomState(len(name)).normal(size=shape, scale=0.4).astype("float32")
    return tf1.get_variable(name, shape, initializer=tf1.constant_initializer(first))


def cell():
    kernel = weight("kernel", [FEATURES + UNITS, UNITS])
    return lambda x, state: tf.tanh(tf.matmul(tf.concat([x, state], 1), kernel))


def looped(body, *values):
    """Run a function of (number, *values) for each time step."""
    step = lambda i, *values: (i + 1, *body(i, *values))
    return tf.while_loop(lambda i, *_: i < TIME, step, (0, *values))[1:]


# Each gets the batch, its number of examples, and a boolean tensor: whether this is training.


def with_shapes(x, n, training):
    step = cell()
    body = lambda i, state: (tf.reshape(tf.reshape(step(x[:, i], state), [n * 2, -1]), [n, UNITS]),)
    return looped(body, tf.zeros([n, UNITS]))[0]


def with_lists(x, n, training):
    step, length = cell(), n if isinstance(n, int) else None
    array = tf.TensorArray(tf.float32, TIME, element_shape=[length, FEATURES]).unstack(tf.transpose(x, [1, 0, 2]))

    def body(i, state, states):
        state = tf.reshape(step(array.read(i), state), [n, UNITS])
        return state, states.write(i, state)

    states = looped(body, tf.zeros([n, UNITS]), tf.TensorArray(tf.float32, TIME, element_shape=[length, UNITS]))[1]
    return tf.reshape(tf.transpose(states.stack(), [1, 0, 2]), [n, TIME * UNITS])


def scanned(x, n, training):
    step = cell()
    body = lambda state, x: tf.reshape(step(x, state), [n, UNITS])
    return tf.scan(body, tf.transpose(x, [1, 0, 2]), initializer=tf.ones([n, UNITS]) * 0.1)[-1]


def with_two_states(x, n, training):
    """As an LSTM: nothing outside of the loop takes the second one, which has a gradient all the same."""
    step, gate = cell(), weight("gate", [FEATURES, UNITS])

    def body(i, state, memory):
        memory = memory * tf.sigmoid(tf.matmul(x[:, i], gate)) + step(x[:, i], state)
        return tf.tanh(memory), memory

    return tf.reshape(looped(body, tf.zeros([n, UNITS]), tf.zeros([n, UNITS]))[0], [n, UNITS])


def with_a_loop_in_it(x, n, training):
    """Whose body takes a weight through both loops."""
    step, inner = cell(), weight("inner", [UNITS, UNITS])

    def body(i, state):
        state = step(x[:, i], state)
        settle = lambda j, other: (j + 1, tf.tanh(tf.matmul(other, inner)) + state)
        return (tf.while_loop(lambda j, _: j < 2, settle, (0, tf.reshape(state, [n, UNITS])))[1],)

    return looped(body, tf.zeros([n, UNITS]))[0]


def left_out_at_random(x, n, training):
    hidden = tf.matmul(tf.reshape(x, [n, TIME * FEATURES]), weight("kernel", [TIME * FEATURES, UNITS]))
    for chance in (0.0, 1.0):
        deeper = lambda hidden=hidden: tf.reshape(tf.tanh(hidden), [n, UNITS])
        hidden = tf.cond(tf.random.uniform([]) < chance, lambda hidden=hidden: hidden * 2.0, deeper)
    return hidden


def in_every_second_step(x, n, training):
    """A conditional in a loop, one of whose branches has constants for rows."""
    step = cell()

    def body(i, state):
        state = tf.reshape(step(x[:, i], state), [n, UNITS])
        return (tf.cond(tf.equal(i % 2, 0), lambda: state, lambda: state + tf.ones([n, UNITS]) * 0.3),)

    return looped(body, tf.zeros([n, UNITS]))[0]


def chosen_in_the_loop(x, n, training):
    step = cell()

    def body(i, state):
        new = step(x[:, i], state)
        return (tf.cond(training, lambda: new * 0.7 + tf.reshape(state, [n, UNITS]) * 0.3, lambda: new),)

    return looped(body, tf.zeros([n, UNITS]))[0]


def before_batch_normalisation(x, n, training):
    """Which is chosen by a placeholder, and whose averages UPDATE_OPS move."""
    hidden = tf.matmul(scanned(x, n, training), weight("last", [UNITS, UNITS]))
    average = tf1.get_variable("average", [UNITS], initializer=tf1.zeros_initializer(), trainable=False)
    of_batch = lambda: tuple(tf.nn.moments(hidden, [0]))
    mean, variance = tf.cond(training, of_batch, lambda: (tf.identity(average), tf.ones([UNITS])))
    tf1.add_to_collection(KEYS.UPDATE_OPS, tf1.assign(average, 0.9 * average + 0.1 * mean))
    return tf.nn.batch_normalization(hidden, mean, variance, None, None, 1e-3)


def made_in_a_loop_in_it(x, n, training):
    step, inner = cell(), weight("inner", [UNITS, UNITS])

    def body(i, state):
        state = step(x[:, i], state)
        settle = lambda j, other: (j + 1, tf.tanh(tf.matmul(other, inner)) + state)
        other = tf.while_loop(lambda j, _: j < 2, settle, (0, tf.zeros([n, UNITS])))[1]
        return (tf.reshape(state + other, [n, UNITS]),)

    return looped(body, tf.zeros([n, UNITS]))[0]


def in_a_branch(x, n, training):
    """A loop in a branch that is chosen, and which begins with constants of that branch."""
    step = cell()
    body = lambda i, state: (tf.reshape(step(x[:, i], state), [n, UNITS]),)
    trained = lambda: looped(body, tf.zeros([n, UNITS]))[0] * 2.0
    return tf.cond(training, trained, lambda: tf.zeros([n, UNITS]))


def with_rows_of_another_loop(x, n, training):
    body = lambda i, rows: (tf.reshape(rows * 0.5 + tf.cast(i, tf.float32) * 0.1, [n, UNITS]),)
    kernel = weight("kernel", [TIME * FEATURES, UNITS])
    return tf.matmul(tf.reshape(x, [n, -1]), kernel) * looped(body, tf.ones([n, UNITS]))[0]


def chosen_at_random(x, n, training):
    """Layers with weights of their own in both branches, and a loop in one."""
    hidden = tf.matmul(tf.reshape(x, [n, TIME * FEATURES]), weight("first", [TIME * FEATURES, UNITS]))
    step, kernel, bias = cell(), weight("second", [UNITS, UNITS]), weight("bias", [UNITS])
    body = lambda i, state: (tf.reshape(step(x[:, i], state), [n, UNITS]),)
    for chance in (0.0, 1.0):
        in_loop = lambda hidden=hidden: looped(body, hidden)[0] + bias
        at_once = lambda hidden=hidden: tf.reshape(tf.tanh(tf.matmul(hidden, kernel)), [n, UNITS])
        hidden = tf.cond(tf.random.uniform([]) < chance, in_loop, at_once)
    return hidden


def with_constants_for_the_next_step(x, n, training):
    step = cell()
    body = lambda i, state, last: (tf.reshape(step(x[:, i], state) + last, [n, UNITS]), tf.ones([n, UNITS]) * 0.3)
    return looped(body, tf.zeros([n, UNITS]), tf.zeros([n, UNITS]))[0]


def with_the_batch_for_the_next_step(x, n, training):
    step, first = cell(), x[:, 0] * 0.5
    body = lambda i, state, last: (tf.reshape(step(x[:, i] + last, state), [n, UNITS]), x[:, 0])
    return looped(body, tf.zeros([n, UNITS]), first)[0]


def with_a_number_for_each_example(x, n, training):
    """As the probability of a sequence, which begins as a vector of constants."""
    step = cell()

    def body(i, state, total):
        state = tf.reshape(step(x[:, i], state), [n, UNITS])
        return state, total + 0.1 * tf.reduce_mean(state**2, 1)

    state, total = looped(body, tf.zeros([n, UNITS]), tf.zeros([n]))
    return state + tf.reshape(total, [n, 1])


def with_a_gradient_through_a_branch(x, n, training):
    kernel = weight("kernel", [TIME * FEATURES, UNITS])
    flat = tf.reshape(x, [n, TIME * FEATURES])
    hidden = tf.tanh(tf.matmul(flat, kernel))
    other = weight("other", [UNITS, UNITS])
    hidden = tf.cond(tf.random.uniform([]) < 1.0, lambda: tf.tanh(tf.matmul(hidden, other)), lambda: hidden)
    return tf.reshape(hidden, [n, UNITS]) + tf.reduce_mean(tf.gradients(hidden, flat)[0] ** 2, 1, keepdims=True)


def with_weights_of_a_branch(x, n, training):
    """Which draws and counts, once for all examples: nothing of it is computed for each micro-batch."""
    kernel = weight("kernel", [TIME * FEATURES, UNITS])
    count = tf1.get_variable("count", [], initializer=tf1.zeros_initializer(), trainable=False)

    def of_mask():
        mask = tf.cast(tf.random.uniform([TIME * FEATURES, UNITS]) < 2.0, tf.float32)
        return kernel * mask * tf.minimum(tf1.assign_add(count, 1.0), 1.0)

    masked = tf.cond(tf.random.uniform([]) < 1.0, of_mask, lambda: tf.identity(kernel))
    hidden = tf.matmul(tf.reshape(x, [n, TIME * FEATURES]), masked)
    return tf.cond(tf.random.uniform([]) < 1.0, lambda: tf.tanh(hidden) * weight("last", [UNITS]), lambda: hidden)


OF_ANY_SIZE = [
    with_weights_of_a_branch,
    with_a_number_for_each_example,
    with_shapes,
    with_lists,
    scanned,
    with_two_states,
    with_a_loop_in_it,
    left_out_at_random,
    in_every_second_step,
    chosen_in_the_loop,
    before_batch_normalisation,
    made_in_a_loop_in_it,
    in_a_branch,
    with_rows_of_another_loop,
    chosen_at_random,
    with_constants_for_the_next_step,
    with_the_batch_for_the_next_step,
]


def made_in_the_loop(x, n, training):
    """Rows that are computed there from nothing but constants."""
    step = cell()

    def body(i, state):
        places = tf.one_hot(tf.range(n) % UNITS, UNITS) * 0.5
        return (tf.reshape(step(x[:, i], state) + places + tf.ones([n, 1]), [n, UNITS]),)

    return looped(body, tf.zeros([n, UNITS]))[0]


OF_A_CONSTANT_SIZE = [*OF_ANY_SIZE, made_in_the_loop]
HARDLY_SPLIT = [with_a_gradient_through_a_branch]


def trained(program, size, number=N, count=N):
    """Return (losses, values of all variables), with the loss of other branches last."""
    with tf.Graph().as_default(), tf1.Session() as session:
        x = tf1.placeholder(tf.float32, [number, TIME, FEATURES])
        y = tf1.placeholder(tf.float32, [number, 1])
        training = tf1.placeholder(tf.bool, [])
        hidden = program(x, number or tf.shape(x)[0], training)
        hidden = tf.reshape(hidden, [-1, int(hidden.shape[-1])])
        outputs = tf.matmul(hidden, weight("outputs", [int(hidden.shape[-1]), 1]))
        loss = tf.sqrt(tf.reduce_mean((outputs - y) ** 2))
        if size is not None:
            with warned() if program in HARDLY_SPLIT else silent():
                loss = accum.compat.v1.split_batch(loss, (x, y), size)
        with tf.control_dependencies(tf1.get_collection(KEYS.UPDATE_OPS)):
            step = tf1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        require_gates(tf1.get_default_graph())
        session.run(tf1.global_variables_initializer())
        feeds = [{x: X[i, :count], y: Y[i, :count], training: True} for i in range(STEPS)]
        losses = [session.run([loss, step], feed)[0] for feed in feeds]
        feeds[0][training] = False
        losses.append(session.run(loss, feeds[0]))
        return [*losses, *session.run(tf1.global_variables())]


def require_gates(graph):
    """TensorFlow hands constants to each iteration, also behind the last: what takes nothing else must wait for it."""
    constant = lambda op: op.type == "Enter" and op.get_attr("is_constant")
    free = [op for op in graph.get_operations() if op.inputs and all(constant(one.op) for one in op.inputs)]
    ungated = [op.name for op in free if op.type not in ("Enter", "Switch") and not op.control_inputs]
    assert not ungated, ungated


def assert_same(ours, others):
    for one, other in zip(ours, others):
        np.testing.assert_allclose(one, other, rtol=0, atol=5e-6)


@pytest.mark.parametrize("size", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("program", OF_A_CONSTANT_SIZE, ids=lambda program: program.__name__)
def test_a_loop_of_a_constant_number_of_examples_is_split(program, size):
    whole = trained(program, None)
    assert_same(trained(program, size), whole)


@pytest.mark.parametrize("program", OF_ANY_SIZE, ids=lambda program: program.__name__)
def test_a_loop_of_any_number_of_examples_is_split_with_what_is_around_it(program):
    whole = trained(program, None, None)
    assert_same(trained(program, 3, None), whole)
    others = trained(program, None, None, count=3)
    assert max(np.abs(one - other).max() for one, other in zip(whole, others)) > 1e-3


def with_waiting(x, n, training):
    """The optimizer waits for an assignment of what the loop computes."""
    hidden = scanned(x, n, training)
    total = tf1.get_variable("total", [], initializer=tf1.zeros_initializer(), trainable=False)
    tf1.add_to_collection(KEYS.UPDATE_OPS, tf1.assign_add(total, tf.reduce_mean(hidden)))
    return hidden


@pytest.mark.parametrize("number", [N, None], ids=["constant", "any"])
def test_an_optimizer_may_wait_for_what_is_assigned_once(number):
    """TensorFlow takes what an operation in a loop waits for as data: it must not be copied into ours."""
    assert_same(trained(with_waiting, 3, number), trained(with_waiting, None, number))


@pytest.mark.parametrize("number", [N, None], ids=["constant", "any"])
@pytest.mark.parametrize("program", HARDLY_SPLIT, ids=lambda program: program.__name__)
def test_what_is_hardly_split_is_exact(program, number):
    """Such as gradients of one branch, which are in no branch: nothing can be joined of them in a run of the other."""
    assert_same(trained(program, 3, number), trained(program, None, number))


def test_there_may_be_as_many_time_steps_as_examples():
    def gradients(size):
        with tf.Graph().as_default(), tf1.Session() as session:
            x = tf1.placeholder(tf.float32, [N, N, FEATURES])
            step = cell()
            states = tf.scan(lambda state, x: step(x, state), tf.transpose(x, [1, 0, 2]), tf.zeros([N, UNITS]))
            loss = tf.sqrt(tf.reduce_mean(tf.transpose(states, [1, 0, 2]) ** 2))
            if size is not None:
                with silent():
                    loss = accum.compat.v1.split_batch(loss, x, size)
            (grad,) = tf.gradients(loss, tf1.trainable_variables())
            session.run(tf1.global_variables_initializer())
            data = np.random.RandomState(1).normal(size=[N, N, FEATURES])
            return session.run([loss, tf.convert_to_tensor(grad)], {x: data})

    assert_same(gradients(3), gradients(None))


def test_two_losses_of_a_constant_number_may_be_passed_one_after_the_other():
    def gradients(size):
        with tf.Graph().as_default(), tf1.Session() as session:
            x = tf1.placeholder(tf.float32, [N, TIME, FEATURES])
            hidden = with_shapes(x, N, None)
            losses = [tf.sqrt(tf.reduce_mean(hidden**2)), tf.reduce_max(hidden)]
            if size is not None:
                losses = [accum.compat.v1.split_batch(loss, x, size) for loss in losses]
            grads = [tf.convert_to_tensor(tf.gradients(loss, tf1.trainable_variables())[0]) for loss in losses]
            session.run(tf1.global_variables_initializer())
            return session.run(losses + grads, {x: X[0]})

    assert_same(gradients(3), gradients(None))


@pytest.mark.law("L20")
def test_dropout_in_a_branch_is_that_of_the_batch():
    def losses(size, rate=0.4):
        with tf.Graph().as_default(), tf1.Session() as session:
            tf1.set_random_seed(1)
            x = tf1.placeholder(tf.float32, [N, FEATURES])
            hidden = tf.reshape(tf.matmul(x, weight("kernel", [FEATURES, UNITS])), [N, UNITS])
            dropped = lambda: tf1.nn.dropout(hidden, rate=rate) if rate else tf.identity(hidden)
            hidden = tf.cond(tf.random.uniform([]) < 1.0, dropped, lambda: hidden)
            loss = accum.compat.v1.split_batch(tf.sqrt(tf.reduce_mean(hidden**2)), x, size)
            session.run(tf1.global_variables_initializer())
            return [session.run(loss, {x: X[0, :, 0]}) for _ in range(2)]

    whole = losses(N)
    assert_same(losses(3), whole)
    assert_same(losses(1), whole)
    assert abs(whole[0] - whole[1]) > 1e-3
    assert abs(whole[0] - losses(N, rate=0.0)[0]) > 1e-3


@pytest.mark.law("L17")
def test_rows_that_may_change_in_a_loop_are_named():
    def program(x, n, training):
        step = cell()
        body = lambda i, state: (step(x[:, i], state) + tf.random.normal([n, UNITS]),)
        return looped(body, tf.zeros([n, UNITS]))[0]

    with pytest.raises(ValueError, match="'while/random_normal.*' (has a row for each example|draws numbers)"):
        trained(program, 3)


@pytest.mark.law("L17")
def test_a_loop_that_assigns_is_named():
    def program(x, n, training):
        step, count = cell(), tf1.get_variable("count", [], initializer=tf1.zeros_initializer(), trainable=False)

        def body(i, state):
            with tf.control_dependencies([tf1.assign_add(count, 1.0)]):
                return (tf.reshape(step(x[:, i], state), [n, UNITS]),)

        return looped(body, tf.zeros([n, UNITS]))[0]

    with pytest.raises(ValueError, match="'while/.*' belongs to a loop, or a conditional, that assigns to a variable"):
        trained(program, 3)


def in_a_branch(hidden, count):
    def counted():
        with tf.control_dependencies([count.assign_add(1.0)]):
            return tf.tanh(hidden)

    return tf.cond(tf1.placeholder_with_default(True, []), counted, lambda: tf.sin(hidden))


def in_a_loop(hidden, count):
    def body(i, hidden):
        with tf.control_dependencies([count.assign_add(1.0)]):
            return i + 1, tf.tanh(hidden)

    return tf.while_loop(lambda i, _: i < 3, body, (0, hidden))[1]


def before(hidden, count):
    """The network waits for a loop, and takes nothing of it."""

    def body(i):
        with tf.control_dependencies([count.assign_add(1.0)]):
            return [i + 1]

    with tf.control_dependencies(tf.nest.flatten(tf.while_loop(lambda i: i < 3, body, [0]))):
        return tf.tanh(tf.identity(hidden))


def drawn(hidden, count):
    """Noise that is the same for all examples, in a branch."""
    noisy = lambda: hidden + tf.random.normal([UNITS], seed=3)
    return tf.cond(tf1.placeholder_with_default(True, []), noisy, lambda: tf.sin(hidden))


@pytest.mark.parametrize("make, calls", [(in_a_branch, 1), (in_a_loop, 3), (before, 3), (drawn, 0)])
def test_what_happens_once_in_a_run_does_so_in_a_loop_or_a_branch_too(make, calls):
    def step(size):
        with tf.Graph().as_default(), tf1.Session() as session:
            tf1.set_random_seed(1)
            x = tf1.placeholder(tf.float32, [None, FEATURES])
            first = tf1.zeros_initializer()
            count = tf1.get_variable("count", [], initializer=first, trainable=False, use_resource=True)
            hidden = make(tf.matmul(x, weight("first", [FEATURES, UNITS])), count)
            loss = tf.reduce_mean(tf.matmul(hidden, weight("last", [UNITS, 1])) ** 2)
            if size is not None:
                loss = accum.compat.v1.split_batch(loss, x, size)
            step = tf1.train.GradientDescentOptimizer(0.1).minimize(loss)
            session.run(tf1.global_variables_initializer())
            before = session.run(tf1.trainable_variables())
            session.run(step, {x: X[0, :, 0]})
            return before, session.run(tf1.trainable_variables()), session.run(count)

    before, expected, count = step(None)
    assert count == calls
    assert max(np.abs(one - other).max() for one, other in zip(before, expected)) > 1e-2
    for size in (3, N):
        _, values, count = step(size)
        assert count == calls
        assert_same(values, expected)


def dropped(hidden):
    """What draws for each example, in a conditional that is copied."""
    kept = lambda: tf.nn.dropout(hidden, rate=0.5, seed=3)
    return tf.cond(tf1.placeholder_with_default(True, []), kept, lambda: hidden)


@pytest.mark.parametrize("count", [None, N])
def test_a_branch_that_draws_for_each_example_is_split(count):
    def step(size):
        with tf.Graph().as_default(), tf1.Session() as session:
            tf1.set_random_seed(1)
            x = tf1.placeholder(tf.float32, [count, FEATURES])
            hidden = dropped(tf.matmul(x, weight("first", [FEATURES, UNITS])))
            for name in ("second", "third", "fourth"):
                hidden = tf.matmul(hidden, weight(name, [UNITS, UNITS]))
            loss = tf.reduce_mean(hidden**2)
            with silent():  # it says if little is split
                loss = accum.compat.v1.split_batch(loss, x, size)
            step = tf1.train.GradientDescentOptimizer(0.01).minimize(loss)
            session.run(tf1.global_variables_initializer())
            session.run(step, {x: X[0, :, 0]})
            return session.run(tf1.trainable_variables())

    assert_same(step(3), step(N))
