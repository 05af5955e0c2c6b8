"""What programs of TensorFlow 1 do around their train op: count steps, average weights, log losses, save at the end."""

import warnings

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_near
from replicas import RUN, mirrored
from warned import silent

import accum.compat.v1

tf1 = tf.compat.v1

K, STEPS, SIZE = 3, 4, 8
RANDOM = np.random.RandomState(0)
X = RANDOM.normal(size=(STEPS, SIZE, 5)).astype("float32")
Y = RANDOM.normal(size=(STEPS, SIZE)).astype("float32")
FIRST = RANDOM.normal(size=5).astype("float32")
PARTS = [slice(0, 4), slice(4, 6), slice(6, 8)]  # micro-batches of unequal size
FULL = [(x, y) for x, y in zip(X, Y)]
MICRO = [(x[part], y[part]) for x, y in zip(X, Y) for part in PARTS]
KINDS = pytest.mark.parametrize("use_resource", [False, True], ids=["ref", "resource"])


class Problem:
    """A linear regression in a graph: its inputs, weights, step counter and loss."""

    def __init__(self, use_resource=True):
        self.x, self.y = tf1.placeholder(tf.float32, [None, 5]), tf1.placeholder(tf.float32, [None])
        first = tf.constant(FIRST)
        self.weights = tf1.get_variable("w", initializer=first, use_resource=use_resource)
        self.step = tf1.get_variable(
            "global_step",
            [],
            tf.int64,
            tf1.zeros_initializer(),
            trainable=False,
            use_resource=use_resource,
            collections=[tf1.GraphKeys.GLOBAL_VARIABLES, tf1.GraphKeys.GLOBAL_STEP],
        )
        self.loss = tf.reduce_mean((tf.linalg.matvec(self.x, self.weights) - self.y) ** 2)
        self.size = tf.shape(self.x)[0]

    def feed(self, batch):
        return {self.x: batch[0], self.y: batch[1]}

    def run(self, train_op, batches, fetches, last=None):
        """Run the train op on each batch. Returns the values of `fetches` after all."""
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            for batch in batches:
                session.run(train_op, self.feed(batch))
            if last is not None:
                session.run(last)
            return session.run(fetches)


class Lamb(tf1.train.Optimizer):
    """Layerwise adaptive moments as published: it reads the step for its bias correction, and does not advance it.

    Its moments are created in `apply_gradients`, and the learning rate may be a function of the step.
    """

    def __init__(self, rate):
        super().__init__(False, "Lamb")
        self._rate = rate

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        moves = []
        for grad, var in grads_and_vars:
            zeros = {"shape": var.shape.as_list(), "trainable": False, "initializer": tf1.zeros_initializer()}
            m, v = [tf1.get_variable("{}/lamb_{}".format(var.op.name, moment), **zeros) for moment in "mv"]
            next_m, next_v = 0.9 * m + 0.1 * grad, 0.99 * v + 0.01 * grad**2
            count = tf.cast(global_step, tf.float32) + 1.0
            update = next_m / (1.0 - 0.9**count) / (tf.sqrt(next_v / (1.0 - 0.99**count)) + 1e-6)
            trust = tf.norm(var) / tf.norm(update)
            with tf.control_dependencies([next_m, next_v, trust]):
                moves += [var.assign(var - self._rate * trust * update), m.assign(next_m), v.assign(next_v)]
        return tf.group(*moves, name=name)


def by_numpy(rates):
    """What LAMB makes of the full batches, in float64, from the learning rate of each step."""
    weights, m, v = FIRST.astype("float64"), 0.0, 0.0
    for count, ((x, y), rate) in enumerate(zip(FULL, rates), start=1):
        grad = 2.0 * x.T.dot(x.dot(weights) - y) / len(x)
        m, v = 0.9 * m + 0.1 * grad, 0.99 * v + 0.01 * grad**2
        update = m / (1.0 - 0.9**count) / (np.sqrt(v / (1.0 - 0.99**count)) + 1e-6)
        weights = weights - rate * np.linalg.norm(weights) / np.linalg.norm(update) * update
    return weights


def decayed(step):
    return 0.1 * 0.5 ** (tf.cast(step, tf.float32) if tf.is_tensor(step) else step)


RATES = [0.1 * 0.5**step for step in range(STEPS)]

# ----------------------------------------------------------------------------------------------------------------
# Who counts the steps


def scheduled(problem):
    return Lamb(0.1 * 0.5 ** tf.cast(problem.step, tf.float32))


@KINDS
@pytest.mark.law("L1", "L3")
def test_an_optimizer_whose_caller_counts_the_steps_makes_those_of_the_full_batch(use_resource):
    with tf.Graph().as_default():
        problem = Problem(use_resource)
        optimizer = accum.compat.v1.AccumOptimizer(scheduled(problem), K, count_steps=True)
        train_op = optimizer.minimize(problem.loss, problem.step, weight=problem.size)
        weights, step = problem.run(train_op, MICRO, [problem.weights, problem.step])
    np.testing.assert_allclose(weights, by_numpy(RATES), rtol=0, atol=2e-6)
    assert step == STEPS


@pytest.mark.law("L3")
def test_the_published_way_to_count_ends_elsewhere_with_micro_batches():
    with tf.Graph().as_default(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problem = Problem()
        optimizer = accum.compat.v1.AccumOptimizer(scheduled(problem), K)
        train_op = optimizer.minimize(problem.loss, problem.step, weight=problem.size)
        with tf.control_dependencies([train_op]):
            train_op = problem.step.assign_add(1)
        weights, step = problem.run(train_op, MICRO, [problem.weights, problem.step])
    assert step == STEPS * K
    assert np.abs(weights - by_numpy(RATES)).max() > 1e-2


@pytest.mark.law("L3", "L6")
@pytest.mark.parametrize("form", ["flush", "separate ops", "one micro-batch per step"])
def test_each_op_that_makes_a_step_counts_it(form):
    with tf.Graph().as_default():
        problem = Problem()
        steps = 1 if form == "one micro-batch per step" else 100
        optimizer = accum.compat.v1.AccumOptimizer(scheduled(problem), steps, count_steps=True)
        if form == "separate ops":
            ops = optimizer.accumulation_ops(problem.loss, global_step=problem.step)
            run, last = ops.accumulate, ops.apply
        else:
            run = optimizer.minimize(problem.loss, problem.step)
            last = optimizer.flush()
        weights, step = problem.run(run, FULL[:1], [problem.weights, problem.step], last)
    np.testing.assert_allclose(weights, by_numpy(RATES[:1]), rtol=0, atol=2e-6)
    assert step == 1


@KINDS
@pytest.mark.law("L17")
@pytest.mark.parametrize("accum_steps", [1, K])
def test_steps_that_nobody_counts_are_named(accum_steps, use_resource):
    with tf.Graph().as_default(), pytest.warns(UserWarning, match="does not advance.*count_steps=True.*Lamb"):
        problem = Problem(use_resource)
        optimizer = accum.compat.v1.AccumOptimizer(Lamb(0.1), accum_steps)
        optimizer.minimize(problem.loss, problem.step)


@KINDS
@pytest.mark.law("L17")
@pytest.mark.parametrize("accum_steps", [1, K])
def test_steps_are_not_counted_twice(accum_steps, use_resource):
    with tf.Graph().as_default():
        problem = Problem(use_resource)
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.AdamOptimizer(), accum_steps, count_steps=True)
        with pytest.raises(ValueError, match="count_steps=True. would count each step twice"):
            optimizer.minimize(problem.loss, problem.step)


@KINDS
@pytest.mark.law("L17")
def test_an_optimizer_that_counts_is_not_warned_of(use_resource):
    inner = tf1.train.GradientDescentOptimizer(0.1)
    for accum_steps, options in [(1, {}), (K, {}), (K, {"count_micro_steps": True})]:
        with tf.Graph().as_default(), silent():
            problem = Problem(use_resource)
            optimizer = accum.compat.v1.AccumOptimizer(inner, accum_steps, **options)
            optimizer.minimize(problem.loss, problem.step)
            optimizer.flush()


class Uncounted(tf1.train.GradientDescentOptimizer):
    """An optimizer that leaves it to its caller to count steps."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        return super().apply_gradients(grads_and_vars, None, name)


def steps_under(strategy, inner, accum_steps=2, **options):
    """The weight and `global_step` after four micro-batches, whose gradients are 1 on all replicas together."""
    with tf.Graph().as_default():
        with strategy.scope():
            step = tf1.train.get_or_create_global_step()
            variable = tf1.get_variable("w", initializer=[0.0], use_resource=True)
            optimizer = accum.compat.v1.AccumOptimizer(inner, accum_steps, **options)
        share = [1.0 / strategy.num_replicas_in_sync]
        done = getattr(strategy, RUN)(lambda: optimizer.apply_gradients([(tf.constant(share), variable)], step))
        train_op = tf.group(*strategy.experimental_local_results(done))
        with tf1.Session(config=tf1.ConfigProto(device_count={"CPU": 2}, allow_soft_placement=True)) as session:
            session.run(tf1.global_variables_initializer())
            for _ in range(4):
                session.run(train_op)
            return session.run([variable, step])


STRATEGIES = pytest.mark.parametrize(
    "make_strategy", [mirrored, lambda: tf.distribute.OneDeviceStrategy("/cpu:0")], ids=["mirrored", "one device"]
)


@pytest.mark.slow
@STRATEGIES
@pytest.mark.law("L3", "L17")
def test_steps_are_counted_once_under_a_strategy(make_strategy):
    counted = tf1.train.GradientDescentOptimizer(1.0)
    with pytest.raises(ValueError, match="count_steps=True. would count each step twice"):
        steps_under(make_strategy(), counted, count_steps=True)
    with pytest.warns(UserWarning, match="does not advance.*count_steps=True.*Uncounted"):
        weight, step = steps_under(make_strategy(), Uncounted(1.0))
    assert (weight, step) == (-2.0, 0)
    with silent():
        assert steps_under(make_strategy(), Uncounted(1.0), count_steps=True) == [-2.0, 2]
        assert steps_under(make_strategy(), counted) == [-2.0, 2]
        assert steps_under(make_strategy(), counted, count_micro_steps=True) == [-2.0, 4]
        assert steps_under(make_strategy(), counted, accum_steps=1) == [-4.0, 4]


@pytest.mark.law("L17")
def test_a_step_counter_counts_steps_or_micro_steps():
    with pytest.raises(ValueError, match="pass `count_micro_steps` or `count_steps`"):
        accum.compat.v1.AccumOptimizer(Lamb(0.1), K, count_micro_steps=True, count_steps=True)


# ----------------------------------------------------------------------------------------------------------------
# What follows a step


def averaged_by_numpy():
    """Weights by gradient descent on the full batches, and their average whose decay grows with the steps."""
    weights = average = FIRST.astype("float64")
    for step, (x, y) in enumerate(FULL, start=1):
        weights = weights - 0.05 * 2.0 * x.T.dot(x.dot(weights) - y) / len(x)
        decay = min(0.9, (1.0 + step) / (10.0 + step))
        average = decay * average + (1.0 - decay) * weights
    return weights, average


def averaging(problem, accum_steps, is_after_each_run=False):
    """A train op, and the average of the weights."""
    average = tf1.train.ExponentialMovingAverage(0.9, num_updates=problem.step)
    optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.05), accum_steps)
    if not is_after_each_run:
        optimizer.after_step(lambda: average.apply([problem.weights]))
    train_op = optimizer.minimize(problem.loss, problem.step, weight=problem.size)
    if is_after_each_run:
        with tf.control_dependencies([train_op]):
            train_op = average.apply([problem.weights])
    return train_op, average.average(problem.weights), optimizer


@KINDS
@pytest.mark.law("L12")
@pytest.mark.parametrize("accum_steps", [1, K])
def test_an_average_of_the_weights_moves_once_per_step_by_the_number_of_steps(accum_steps, use_resource):
    with tf.Graph().as_default():
        problem = Problem(use_resource)
        train_op, average, _ = averaging(problem, accum_steps)
        assert average.op.name == "w/ExponentialMovingAverage"
        ours = problem.run(train_op, FULL if accum_steps == 1 else MICRO, [problem.weights, average])
    assert_near(ours, averaged_by_numpy())


@pytest.mark.law("L12")
def test_an_average_after_each_run_ends_elsewhere():
    with tf.Graph().as_default():
        problem = Problem()
        train_op, average, _ = averaging(problem, K, is_after_each_run=True)
        ours = problem.run(train_op, MICRO, average)
    assert np.abs(ours - averaged_by_numpy()[1]).max() > 5e-3


@pytest.mark.law("L3", "L12")
def test_what_follows_a_step_may_be_of_the_other_kind_of_variable():
    with tf.Graph().as_default():
        problem = Problem(use_resource=True)
        counter = tf1.get_variable("counter", [], initializer=tf1.zeros_initializer(), use_resource=False)
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.05), K)
        optimizer.after_step(lambda: tf1.assign_add(counter, 1.0))
        train_op = optimizer.minimize(problem.loss, problem.step, var_list=[problem.weights])
        assert problem.run(train_op, MICRO, counter) == STEPS


@pytest.mark.law("L6", "L12")
def test_a_flush_moves_the_average_once_and_between_steps_nothing_moves():
    with tf.Graph().as_default(), tf1.Session() as session:
        problem = Problem()
        train_op, average, optimizer = averaging(problem, 100)
        flush = optimizer.flush()
        session.run(tf1.global_variables_initializer())
        session.run(train_op, problem.feed(FULL[0]))
        np.testing.assert_array_equal(session.run(average), FIRST)
        for _ in range(2):  # the second has nothing to flush
            session.run(flush)
            weights = FIRST - 0.05 * 2.0 * X[0].T.dot(X[0].dot(FIRST) - Y[0]) / SIZE
            expected = FIRST * 2.0 / 11.0 + weights * 9.0 / 11.0
            np.testing.assert_allclose(session.run(average), expected, rtol=0, atol=2e-6)


@pytest.mark.law("L12", "L13")
def test_averages_of_model_variables_follow_the_moving_statistics_and_run_in_order():
    with tf.Graph().as_default():
        problem = Problem()
        moving = [tf1.get_variable(name, [], initializer=tf1.zeros_initializer(), trainable=False) for name in "ab"]
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.05), K)
        optimizer.after_step(lambda: [moving[0].assign_add(tf.cast(problem.step.read_value(), tf.float32)), None])
        optimizer.after_step(lambda: moving[1].assign_add(2.0 * moving[0].read_value()))
        train_op = optimizer.minimize(problem.loss, problem.step)
        one, other = problem.run(train_op, MICRO, moving)
    assert one == 1 + 2 + 3 + 4
    assert other == 2 * (1 + 3 + 6 + 10)


def batch_normalized(x):
    """A layer as slim makes it, from public ops: its averages move in UPDATE_OPS."""
    mean, variance = tf.nn.moments(x, [0])
    for name, value in [("mean", mean), ("variance", variance)]:
        var = tf1.get_variable("moving_" + name, [5], initializer=tf1.zeros_initializer(), trainable=False)
        move = tf1.assign_sub(var, (var.read_value() - value) * tf.constant(0.1))
        tf1.add_to_collection(tf1.GraphKeys.UPDATE_OPS, move)
        tf1.add_to_collection(tf1.GraphKeys.MODEL_VARIABLES, var)
    return (x - mean) / tf.sqrt(variance + 1e-3)


@pytest.mark.slow
@pytest.mark.law("L12", "L13")
def test_averages_of_moving_statistics_see_those_of_the_step():
    with tf.Graph().as_default():
        problem = Problem()
        normalized = batch_normalized(problem.x)
        loss = tf.reduce_mean((tf.linalg.matvec(normalized, problem.weights) - problem.y) ** 2)
        average = tf1.train.ExponentialMovingAverage(0.5)
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.05), K)
        optimizer.accumulate_update_ops()
        optimizer.after_step(lambda: average.apply(tf1.model_variables()))
        train_op = optimizer.minimize(loss, problem.step, weight=problem.size)
        ours = problem.run(train_op, MICRO, [average.average(var) for var in tf1.model_variables()])
    for moving_value, statistic in zip(ours, [np.mean, np.var]):
        moving = averaged = np.zeros(5)
        for x, _ in FULL:
            moving = 0.9 * moving + 0.1 * statistic(x.astype("float64"), axis=0)
            averaged = 0.5 * averaged + 0.5 * moving
        np.testing.assert_allclose(moving_value, averaged, rtol=0, atol=2e-6)


@KINDS
@pytest.mark.law("L3")
@pytest.mark.parametrize("accum_steps", [1, K])
@pytest.mark.parametrize("options", [{}, {"count_micro_steps": True}], ids=["steps", "micro steps"])
def test_what_follows_a_step_sees_the_counter_after_it(options, accum_steps, use_resource):
    with tf.Graph().as_default(), tf1.Session() as session:
        problem = Problem(use_resource)
        seen = tf1.get_variable("seen", [], tf.int64, tf1.zeros_initializer(), use_resource=use_resource)
        inner = tf1.train.GradientDescentOptimizer(0.05)
        optimizer = accum.compat.v1.AccumOptimizer(inner, accum_steps, **options)
        optimizer.after_step(lambda: seen.assign(problem.step.read_value()))
        train_op = optimizer.minimize(problem.loss, problem.step)
        session.run(tf1.global_variables_initializer())
        counted = []
        for batch in MICRO[: 2 * K + 1]:
            session.run(train_op, problem.feed(batch))
            counted.append(tuple(session.run([seen, problem.step])))
        session.run(optimizer.flush())
        counted.append(tuple(session.run([seen, problem.step])))
    runs = np.arange(1, 2 * K + 2)
    steps = runs // accum_steps
    if not options:
        counters, last = [(step, step) for step in steps], (-(-runs[-1] // accum_steps),) * 2
    else:
        counters, last = [(step * accum_steps, run) for step, run in zip(steps, runs)], (runs[-1],) * 2
    assert counted == counters + [last]


@pytest.mark.law("L17")
@pytest.mark.parametrize("name, argument", [("after_step", lambda: None), ("mean_over_cycle", 1.0)])
def test_what_follows_a_step_is_said_before_the_train_op(name, argument):
    with tf.Graph().as_default():
        problem = Problem()
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.05), K)
        optimizer.minimize(problem.loss, problem.step)
        with pytest.raises(ValueError, match="`" + name + "` must be called before the first train op"):
            getattr(optimizer, name)(argument)


@pytest.mark.law("L17")
def test_nothing_follows_a_step_that_the_chief_makes():
    sync = tf1.train.SyncReplicasOptimizer(tf1.train.GradientDescentOptimizer(0.05), 2)
    with tf.Graph().as_default():
        optimizer = accum.compat.v1.AccumOptimizer(sync, K, local_accumulators=True)
        with pytest.raises(ValueError, match="`after_step` does not support a `SyncReplicasOptimizer`"):
            optimizer.after_step(tf.no_op)


@pytest.mark.law("L17")
@pytest.mark.parametrize("name", ["flush", "reset"])
def test_a_cycle_whose_step_the_chief_makes_is_ended_by_separate_ops(name):
    sync = tf1.train.SyncReplicasOptimizer(tf1.train.GradientDescentOptimizer(0.05), 2)
    with tf.Graph().as_default():
        optimizer = accum.compat.v1.AccumOptimizer(sync, K, local_accumulators=True)
        with pytest.raises(ValueError, match=f"use the ops of `accumulation_ops` instead of `{name}`"):
            getattr(optimizer, name)()


@pytest.mark.law("L9", "L17")
def test_no_worker_skips_a_cycle_that_others_wait_for():
    sync = tf1.train.SyncReplicasOptimizer(tf1.train.GradientDescentOptimizer(0.05), 2)
    with pytest.raises(ValueError, match="SyncReplicasOptimizer.*use `nonfinite=.skip_micro"):
        accum.compat.v1.AccumOptimizer(sync, K, local_accumulators=True, nonfinite="skip_cycle")


@pytest.mark.law("L14", "L15")
@pytest.mark.usefixtures("control_flow_of_tf_2")
def test_two_train_ops_may_stand_in_the_branches_of_a_conditional():
    with tf.Graph().as_default():
        problem = Problem()
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.05), K)

        def branch():
            with tf.control_dependencies([optimizer.minimize(problem.loss, problem.step, weight=problem.size)]):
                return tf.constant(True)

        train_op = tf.cond(problem.size > 2, branch, branch)
        weights, step = problem.run(train_op, MICRO, [problem.weights, problem.step])
    expected = FIRST.astype("float64")
    for x, y in FULL:
        expected = expected - 0.05 * 2.0 * x.T.dot(x.dot(expected) - y) / len(x)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=2e-6)
    assert step == STEPS


@pytest.mark.law("L17")
def test_what_follows_a_step_must_be_a_function():
    with tf.Graph().as_default(), pytest.raises(TypeError, match="`function` must be a function"):
        accum.compat.v1.AccumOptimizer(Lamb(0.1), K).after_step(tf.no_op())


# ----------------------------------------------------------------------------------------------------------------
# The mean of a loss over a cycle


def losses_of_full_batches():
    """The loss of each full batch before its step, by gradient descent in float64."""
    weights, losses = FIRST.astype("float64"), []
    for x, y in FULL:
        losses.append(np.mean((x.dot(weights) - y) ** 2))
        weights = weights - 0.05 * 2.0 * x.T.dot(x.dot(weights) - y) / len(x)
    return losses


def with_mean(problem, accum_steps=K, weight=None, **options):
    optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.05), accum_steps, **options)
    mean = optimizer.mean_over_cycle(problem.loss, weight)
    return optimizer, mean, optimizer.minimize(problem.loss, problem.step, weight=problem.size)


@KINDS
@pytest.mark.law("L1")
def test_the_mean_over_a_cycle_is_the_loss_of_the_full_batch(use_resource):
    with tf.Graph().as_default(), tf1.Session() as session:
        problem = Problem(use_resource)
        _, mean, train_op = with_mean(problem)
        session.run(tf1.global_variables_initializer())
        seen = [session.run([mean, train_op], problem.feed(batch))[0] for batch in MICRO]
    full = losses_of_full_batches()
    np.testing.assert_allclose(seen[K - 1 :: K], full, rtol=2e-6)
    np.testing.assert_array_equal(seen[K : 2 * K - 1], [seen[K - 1]] * (K - 1))  # still that of the latest step
    np.testing.assert_allclose(seen[0], np.mean((X[0][PARTS[0]].dot(FIRST) - Y[0][PARTS[0]]) ** 2), rtol=2e-6)


@pytest.mark.law("L1")
def test_the_loss_of_a_micro_batch_is_not_that_of_the_full_batch():
    with tf.Graph().as_default(), tf1.Session() as session:
        problem = Problem()
        _, _, train_op = with_mean(problem)
        session.run(tf1.global_variables_initializer())
        seen = [session.run([problem.loss, train_op], problem.feed(batch))[0] for batch in MICRO]
    assert np.abs(np.array(seen[K - 1 :: K]) - losses_of_full_batches()).max() > 0.1


@pytest.mark.slow
@pytest.mark.law("L1")
def test_each_mean_has_the_weights_it_is_given():
    with tf.Graph().as_default(), tf1.Session() as session:
        problem = Problem()
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.05), K)
        equal = optimizer.mean_over_cycle(problem.loss, 1.0)
        none = optimizer.mean_over_cycle(problem.loss, 0.0)
        ours = optimizer.mean_over_cycle(problem.loss)
        train_op = optimizer.minimize(problem.loss, problem.step, weight=problem.size)
        session.run(tf1.global_variables_initializer())
        for batch in MICRO[:K]:
            seen = session.run([equal, none, ours, train_op], problem.feed(batch))
    losses = [np.mean((x.dot(FIRST) - y) ** 2) for x, y in MICRO[:K]]
    np.testing.assert_allclose(seen[:3], [np.mean(losses), 0.0, losses_of_full_batches()[0]], rtol=2e-6)


def means_of(weights, factors, own_weight=None, **options):
    """The means that runs of a train op show, whose micro-batches have `weights` and whose losses are multiplied."""
    with tf.Graph().as_default(), tf1.Session() as session:
        problem = Problem()
        weight, factor = [tf1.placeholder(tf.float32, []) for _ in range(2)]
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.05), K, **options)
        mean = optimizer.mean_over_cycle(problem.loss, weight if own_weight == "weight" else own_weight)
        train_op = optimizer.minimize(problem.loss * factor, weight=weight if own_weight is None else None)
        session.run(tf1.global_variables_initializer())
        seen = []
        for batch, one, other in zip(MICRO, weights, factors):
            feed = problem.feed(batch)
            feed.update({weight: one, factor: other})
            seen.append(session.run([mean, train_op], feed)[0])
        return seen


SIZES = [4.0, 2.0, 2.0]


@pytest.mark.law("L5")
@pytest.mark.parametrize("own_weight", [None, "weight"])
def test_a_cycle_whose_weights_sum_to_zero_keeps_the_mean_of_the_latest_step(own_weight):
    seen = means_of(SIZES + [0.0] * K + SIZES, [1.0] * 3 * K, own_weight)
    np.testing.assert_allclose(seen[K - 1], losses_of_full_batches()[0], rtol=2e-6)
    np.testing.assert_array_equal(seen[K : 3 * K - 1], [seen[K - 1]] * (2 * K - 1))
    assert seen[-1] != seen[K - 1]


@pytest.mark.law("L9")
@pytest.mark.parametrize("own_weight", [None, 1.0])
def test_a_skipped_cycle_keeps_the_mean_of_the_latest_step(own_weight):
    factors = [1.0] * K + [1.0, np.nan, 1.0] + [1.0] * K
    seen = means_of(SIZES * 3, factors, own_weight, nonfinite="skip_cycle")
    np.testing.assert_array_equal(seen[K : 3 * K - 1], [seen[K - 1]] * (2 * K - 1))
    assert np.isfinite(seen[-1]) and seen[-1] != seen[K - 1]


@pytest.mark.law("L9")
def test_the_mean_is_finite_if_the_very_first_cycle_is_skipped():
    """A hook that stops at NaN must not stop for gradients that overflow in half precision."""
    seen = means_of(SIZES * 2, [1.0, np.inf, 1.0] + [1.0] * K, nonfinite="skip_cycle")
    plain = means_of(SIZES * 2, [0.0] * K + [1.0] * K)  # whose first step moves nothing
    assert np.isfinite(seen).all()
    np.testing.assert_allclose(seen[2 * K - 1], plain[2 * K - 1], rtol=2e-6)


@pytest.mark.law("L9")
def test_a_gradient_of_weight_zero_skips_no_cycle_and_no_mean():
    weights, factors = SIZES + [4.0, 0.0, 2.0], [1.0] * K + [1.0, np.nan, 1.0]
    seen = means_of(weights, factors, nonfinite="skip_cycle")
    assert np.isfinite(seen).all() and seen[-1] != seen[K - 1]


@pytest.mark.slow
@pytest.mark.law("L5", "L17")
def test_train_ops_of_other_weights_or_skips_have_no_common_mean():
    def optimizer(**options):
        made = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.05), K, **options)
        return made, made.mean_over_cycle(problem.loss)

    with tf.Graph().as_default(), tf1.Session() as session:
        problem = Problem()
        ours, mean = optimizer()
        train_ops = [ours.minimize(problem.loss, weight=problem.size) for _ in range(2)]
        for weight in (None, 1.0, tf.identity(problem.size)):
            with pytest.raises(ValueError, match="one tensor for all train ops.*same tensor as `weight`"):
                ours.minimize(problem.loss, weight=weight)
        session.run(tf1.global_variables_initializer())
        seen = [session.run([mean, train_ops[n % 2]], problem.feed(batch))[0] for n, batch in enumerate(MICRO)]
        np.testing.assert_allclose(seen[K - 1 :: K], losses_of_full_batches(), rtol=2e-6)
        known, _ = optimizer()
        for _ in range(2):
            known.minimize(problem.loss, weight=2.0)
        skipping, _ = optimizer(nonfinite="skip_micro")
        skipping.minimize(problem.loss)
        with pytest.raises(ValueError, match="same gradients to each.*Received: nonfinite='skip_micro'"):
            skipping.minimize(problem.loss)


class StopBelow(tf1.train.SessionRunHook):
    """Early stopping: ends a loop once a step has been made and the loss is below a bound."""

    def __init__(self, loss, bound, step):
        self.loss, self.bound, self.step = loss, bound, step

    def before_run(self, run_context):
        return tf1.train.SessionRunArgs(self.loss)

    def after_run(self, run_context, run_values):
        if run_values.results < self.bound and run_context.session.run(self.step) > 0:
            run_context.request_stop()


@pytest.mark.law("L1")
def test_a_hook_stops_at_the_step_whose_full_batch_is_below_a_bound():
    full, bound = losses_of_full_batches(), 1.5
    batches = [(x[part], y[part]) for x, y in FULL for part in PARTS[::-1]]  # the first has a loss of 0.2 at once
    runs = 0
    with tf.Graph().as_default():
        problem = Problem()
        _, mean, train_op = with_mean(problem)
        hook = StopBelow(mean, bound, problem.step)
        with tf1.train.MonitoredTrainingSession(hooks=[hook], log_step_count_steps=None) as session:
            while not session.should_stop():
                session.run(train_op, problem.feed(batches[runs]))
                runs += 1
    assert [loss < bound for loss in full[:3]] == [False, False, True] and runs == 3 * K


@pytest.mark.law("L10")
@pytest.mark.parametrize("nonfinite", ["skip_micro", "skip_cycle", "propagate"])
def test_the_mean_leaves_out_what_the_step_leaves_out(nonfinite):
    broken = (np.full_like(X[0][:2], np.nan), Y[0][:2])
    with tf.Graph().as_default(), tf1.Session() as session:
        problem = Problem()
        _, mean, train_op = with_mean(problem, nonfinite=nonfinite)
        session.run(tf1.global_variables_initializer())
        batches = MICRO[:2] + [broken] + MICRO[2 : K + 2]
        seen = [session.run([mean, train_op], problem.feed(batch))[0] for batch in batches]
    full = losses_of_full_batches()
    if nonfinite == "skip_micro":
        np.testing.assert_allclose(seen[3:], [full[0]] * 3, rtol=2e-6)
        assert np.isfinite(seen).all()
    else:
        assert np.isnan(seen[2])
        assert np.isnan(seen[3]) == (nonfinite == "propagate")  # a skipped cycle makes no step


@pytest.mark.slow
@pytest.mark.law("L6")
def test_a_flush_ends_the_cycle_of_a_mean_and_a_reset_discards_it():
    with tf.Graph().as_default(), tf1.Session() as session:
        problem = Problem()
        optimizer, mean, train_op = with_mean(problem, 100)
        flush, reset = optimizer.flush(), optimizer.reset()
        session.run(tf1.global_variables_initializer())
        session.run(train_op, problem.feed(FULL[1]))
        session.run(reset)
        for batch in MICRO[:K]:
            session.run(train_op, problem.feed(batch))
        session.run(flush)
        seen = session.run([mean, train_op], problem.feed(FULL[2]))[0]
    np.testing.assert_allclose(seen, losses_of_full_batches()[0], rtol=2e-6)


@pytest.mark.law("L14")
def test_without_accumulation_the_mean_is_the_value():
    with tf.Graph().as_default(), tf1.Session() as session:
        problem = Problem()
        _, mean, train_op = with_mean(problem, 1)
        session.run(tf1.global_variables_initializer())
        seen = [session.run([mean, train_op], problem.feed(batch))[0] for batch in FULL]
    np.testing.assert_allclose(seen, losses_of_full_batches(), rtol=2e-6)


@pytest.mark.slow
@pytest.mark.law("L11")
def test_a_mean_continues_from_a_checkpoint_in_the_middle_of_its_cycle(tmp_path):
    def train(batches, restored=None, saver_of=lambda optimizer: tf1.train.Saver()):
        with tf.Graph().as_default(), tf1.Session() as session:
            problem = Problem()
            optimizer, mean, train_op = with_mean(problem)
            session.run(tf1.global_variables_initializer())
            saver = saver_of(optimizer)
            if restored:
                saver.restore(session, restored)
            seen = [session.run([mean, train_op], problem.feed(batch))[0] for batch in batches]
            return seen, saver.save(session, str(tmp_path / "at"))

    whole, _ = train(MICRO)
    first, path = train(MICRO[: K + 1])
    assert first + train(MICRO[K + 1 :], path)[0] == whole


@pytest.mark.slow
@pytest.mark.law("L11")
def test_a_checkpoint_from_before_the_mean_restores_with_the_saver(tmp_path):
    with tf.Graph().as_default(), tf1.Session() as session:
        problem = Problem()
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.05), K)
        train_op = optimizer.minimize(problem.loss, problem.step, weight=problem.size)
        session.run(tf1.global_variables_initializer())
        for batch in MICRO[: K + 1]:
            session.run(train_op, problem.feed(batch))
        path = tf1.train.Saver().save(session, str(tmp_path / "before"))
        accumulated = session.run(optimizer.get_slot(problem.weights, "accum"))
    with tf.Graph().as_default(), tf1.Session() as session:
        problem = Problem()
        optimizer, mean, train_op = with_mean(problem)
        with pytest.warns(UserWarning, match="from the middle of a cycle.*AccumOptimizer/mean"):
            accum.compat.v1.Saver(optimizer).restore(session, path)
        np.testing.assert_array_equal(session.run(optimizer.get_slot(problem.weights, "accum")), accumulated)
        assert session.run(optimizer.micro_step) == 1
        assert np.isfinite(session.run([mean, train_op], problem.feed(MICRO[K + 1]))[0])


@pytest.mark.law("L17")
def test_a_mean_needs_a_scalar_of_floating_point():
    with tf.Graph().as_default():
        optimizer = accum.compat.v1.AccumOptimizer(Lamb(0.1), K)
        for value in (1.0, tf.constant(1)):
            with pytest.raises(TypeError, match="`value` must be a floating-point tensor"):
                optimizer.mean_over_cycle(value)
        with pytest.raises(ValueError, match="`value` must be a scalar"):
            optimizer.mean_over_cycle(tf.ones([2]))
        with pytest.raises(ValueError, match="weight"):
            optimizer.mean_over_cycle(tf.constant(1.0), -1.0)


# ----------------------------------------------------------------------------------------------------------------
# The last save


def saved(folder, name="w"):
    return tf1.train.load_checkpoint(str(folder)).get_tensor(name)


def flushed_by_numpy(batches):
    """One step of gradient descent on all examples of `batches` together, which have unequal sizes."""
    x, y = [np.concatenate(part).astype("float64") for part in zip(*batches)]
    return FIRST - 0.05 * 2.0 * x.T.dot(x.dot(FIRST) - y) / len(x)


@pytest.mark.slow
@pytest.mark.law("L6")
@pytest.mark.parametrize("options", [{}, {"count_micro_steps": True}], ids=["steps", "micro steps"])
@pytest.mark.parametrize("save_steps", [None, 1, 2])
def test_the_last_checkpoint_of_a_monitored_session_has_the_flushed_step(tmp_path, save_steps, options):
    with tf.Graph().as_default():
        problem = Problem()
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.05), 100, **options)
        train_op = optimizer.minimize(problem.loss, problem.step, weight=problem.size)
        hook = accum.compat.v1.CheckpointSaverHook(optimizer, str(tmp_path), save_steps=save_steps)
        with tf1.train.MonitoredTrainingSession(
            checkpoint_dir=str(tmp_path), hooks=[hook], log_step_count_steps=None
        ) as session:
            for batch in MICRO[:2]:
                session.run(train_op, problem.feed(batch))
    np.testing.assert_allclose(saved(tmp_path), flushed_by_numpy(MICRO[:2]), rtol=0, atol=2e-6)
    assert saved(tmp_path, "AccumOptimizer/micro_step") == 0


@pytest.mark.slow
@pytest.mark.law("L6")
@pytest.mark.parametrize("place", ["chief_only_hooks", "hooks", "hooks, own saver"])
@pytest.mark.parametrize("save_steps", [1, 100])
@pytest.mark.parametrize("kind", ["micro steps", "without a counter", "steps"])
def test_the_last_checkpoint_has_the_flushed_step_wherever_the_flush_hook_stands(tmp_path, kind, save_steps, place):
    with tf.Graph().as_default(), warnings.catch_warnings():
        warnings.filterwarnings("error", ".*FlushHook", UserWarning)
        problem = Problem()
        inner, options = tf1.train.GradientDescentOptimizer(0.05), {"count_micro_steps": kind == "micro steps"}
        optimizer = accum.compat.v1.AccumOptimizer(inner, 100, **options)
        step = None if kind == "without a counter" else problem.step
        train_op = optimizer.minimize(problem.loss, step, weight=problem.size)
        saver = accum.compat.v1.Saver(optimizer) if "own" in place else None
        with tf1.train.MonitoredTrainingSession(
            checkpoint_dir=str(tmp_path),
            scaffold=tf1.train.Scaffold(saver=saver),
            save_checkpoint_steps=save_steps,
            log_step_count_steps=None,
            **{place.split(",")[0]: [accum.compat.v1.FlushHook(optimizer)]},
        ) as session:
            for batch in MICRO[:2]:
                session.run(train_op, problem.feed(batch))
    np.testing.assert_allclose(saved(tmp_path), flushed_by_numpy(MICRO[:2]), rtol=0, atol=2e-6)
    assert saved(tmp_path, "AccumOptimizer/micro_step") == 0


@pytest.mark.slow
@pytest.mark.law("L6")
def test_a_flush_hook_writes_no_checkpoint_where_nothing_is_flushed_or_nothing_saves(tmp_path):
    for save_steps, count in [(100, K), (None, 2)]:
        folder = tmp_path / str(count)
        with tf.Graph().as_default():
            problem = Problem()
            optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.05), K)
            train_op = optimizer.minimize(problem.loss, problem.step)
            hooks = [accum.compat.v1.FlushHook(optimizer)]
            with tf1.train.MonitoredTrainingSession(
                checkpoint_dir=str(folder),
                hooks=hooks,
                save_checkpoint_steps=save_steps,
                save_checkpoint_secs=None,
                log_step_count_steps=None,
            ) as session:
                for batch in MICRO[:count]:
                    session.run(train_op, problem.feed(batch))
        written = sorted(path.name for path in folder.glob("*.index"))
        assert written == (["model.ckpt-0.index", "model.ckpt-1.index"] if save_steps else [])


def input_fn():
    for x, y in MICRO[:2]:
        yield x, y


def data():
    shapes = (tf.TensorShape([None, 5]), tf.TensorShape([None]))
    return tf.data.Dataset.from_generator(input_fn, (tf.float32, tf.float32), shapes)


def model_fn(features, labels, mode, params):
    weights = tf1.get_variable("w", initializer=tf.constant(FIRST))
    loss = tf.reduce_mean((tf.linalg.matvec(features, weights) - labels) ** 2)
    specs = tf1.estimator.tpu.TPUEstimatorSpec if params["is_tpu"] else tf1.estimator.EstimatorSpec
    if mode != tf1.estimator.ModeKeys.TRAIN:
        return specs(mode, loss=loss)
    optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.05), 100)
    mean_loss = optimizer.mean_over_cycle(loss)
    train_op = optimizer.minimize(loss, tf1.train.get_global_step(), weight=tf.shape(features)[0])
    hook = accum.compat.v1.CheckpointSaverHook(optimizer, params["folder"], save_steps=100)
    more = {}
    if params["is_tpu"]:
        more["scaffold_fn"] = lambda: tf1.train.Scaffold(saver=accum.compat.v1.Saver(optimizer))
    return specs(mode, loss=mean_loss, train_op=train_op, training_hooks=[hook], **more)


def estimator(folder, is_tpu):
    params = {"is_tpu": is_tpu, "folder": str(folder)}
    if not is_tpu:
        return tf1.estimator.Estimator(model_fn, str(folder), params=params)
    tpu = tf1.estimator.tpu
    config = tpu.RunConfig(model_dir=str(folder), tpu_config=tpu.TPUConfig(iterations_per_loop=10))
    return tpu.TPUEstimator(
        model_fn, config=config, params=params, use_tpu=False, train_batch_size=8, eval_batch_size=8
    )


@pytest.mark.tf(max="2.15", because="TF 2.16 removed Estimators")
@pytest.mark.slow
@pytest.mark.law("L6")
@pytest.mark.parametrize("is_tpu", [False, True], ids=["Estimator", "TPUEstimator"])
def test_estimator_has_the_flushed_step_in_its_last_checkpoint(tmp_path, is_tpu):
    made = estimator(tmp_path, is_tpu)
    made.train(lambda params: data())
    np.testing.assert_allclose(saved(tmp_path), flushed_by_numpy(MICRO[:2]), rtol=0, atol=2e-6)
    assert saved(tmp_path, "AccumOptimizer/micro_step") == 0
    assert made.evaluate(lambda params: data(), steps=1)["global_step"] == 1


@pytest.mark.tf(max="2.15", because="TF 2.16 removed Estimators")
@pytest.mark.slow
@pytest.mark.law("L11")
def test_estimator_for_tpus_restores_a_checkpoint_without_accumulators_by_its_scaffold_fn(tmp_path):
    with tf.Graph().as_default(), tf1.Session() as session:
        tf1.get_variable("w", initializer=tf.constant(2.0 * FIRST))
        tf1.train.get_or_create_global_step().assign(0)
        session.run(tf1.global_variables_initializer())
        tf1.train.Saver().save(session, str(tmp_path / "model.ckpt"), global_step=0)
    estimator(tmp_path, True).train(lambda params: data())
    x, y = [np.concatenate(part).astype("float64") for part in zip(*MICRO[:2])]
    expected = 2.0 * FIRST - 0.05 * 2.0 * x.T.dot(x.dot(2.0 * FIRST) - y) / len(x)
    np.testing.assert_allclose(saved(tmp_path), expected, rtol=0, atol=2e-6)


@pytest.mark.law("L17")
def test_the_hook_that_saves_needs_accumulating_optimizers_with_train_ops(tmp_path):
    with pytest.raises(TypeError, match="`optimizers` must be `AccumOptimizer`s"):
        accum.compat.v1.CheckpointSaverHook([Lamb(0.1)], str(tmp_path))
    with tf.Graph().as_default():
        hook = accum.compat.v1.CheckpointSaverHook(accum.compat.v1.AccumOptimizer(Lamb(0.1), K), str(tmp_path))
        with pytest.raises(ValueError, match="needs a train op"):
            hook.begin()
