"""Separate ops accumulate whatever `accum_steps` is, with all that belongs to a cycle (laws L6, L13, L14)."""

import os

import numpy as np
import pytest
import tensorflow as tf

import accum.compat.v1

tf1 = tf.compat.v1

K, STEPS = 3, 2
RANDOM = np.random.RandomState(0)
X = RANDOM.normal(size=(STEPS * K, 4, 5)).astype("float32") + np.arange(STEPS * K, dtype="float32")[:, None, None]
FIRST = RANDOM.normal(size=5).astype("float32")
RATE, MOMENTUM = 0.05, 0.75


def by_numpy(batches):
    """The weights after a step for each batch, and the losses before them."""
    weights, losses = FIRST.astype("float64"), []
    for x in batches:
        error = x.astype("float64").dot(weights) - 1.0
        losses.append(np.mean(error**2))
        weights = weights - RATE * 2.0 * x.T.dot(error) / len(x)
    return weights, losses


def full(numbers):
    return np.concatenate(X[list(numbers)])


class Problem:
    """A linear regression and its optimizer, with the default `accum_steps`."""

    def __init__(self):
        self.x = tf1.placeholder(tf.float32, [None, 5])
        self.weights = tf1.get_variable("w", initializer=FIRST)
        self.step = tf1.train.get_or_create_global_step()
        self.loss = tf.reduce_mean((tf.linalg.matvec(self.x, self.weights) - 1.0) ** 2)
        self.optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(RATE))


@pytest.mark.law("L6")
@pytest.mark.parametrize("name", ["flush", "reset"])
def test_flush_and_reset_act_on_what_separate_ops_have_accumulated(name):
    with tf.Graph().as_default(), tf1.Session() as session:
        problem = Problem()
        ops = problem.optimizer.accumulation_ops(problem.loss, global_step=problem.step)
        end = getattr(problem.optimizer, name)()
        session.run(tf1.global_variables_initializer())
        for x in X[:2]:
            session.run(ops.accumulate, {problem.x: x})
        session.run(end)
        session.run(ops.accumulate, {problem.x: X[2]})
        session.run(ops.apply)
        ours = session.run(problem.weights)
    batches = [full([0, 1]), X[2]] if name == "flush" else [X[2]]
    np.testing.assert_allclose(ours, by_numpy(batches)[0], rtol=0, atol=2e-6)
    assert np.abs(ours - by_numpy([full([0, 1, 2])])[0]).max() > 1e-2


@pytest.mark.slow
@pytest.mark.law("L6")
@pytest.mark.parametrize("kind", ["FlushHook", "CheckpointSaverHook"])
def test_hooks_flush_what_separate_ops_have_accumulated(kind, tmp_path):
    with tf.Graph().as_default():
        problem = Problem()
        ops = problem.optimizer.accumulation_ops(problem.loss, global_step=problem.step)
        if kind == "FlushHook":
            options = {
                "chief_only_hooks": [accum.compat.v1.FlushHook(problem.optimizer)],
                "checkpoint_dir": str(tmp_path),
            }
        else:
            hook = accum.compat.v1.CheckpointSaverHook(problem.optimizer, str(tmp_path), save_steps=100)
            options = {"hooks": [hook]}
        with tf1.train.MonitoredTrainingSession(log_step_count_steps=None, **options) as session:
            for x in X[:2]:
                session.run(ops.accumulate, {problem.x: x})
    saved = tf1.train.load_checkpoint(str(tmp_path))
    np.testing.assert_allclose(saved.get_tensor("w"), by_numpy([full([0, 1])])[0], rtol=0, atol=2e-6)
    assert os.path.basename(tf1.train.latest_checkpoint(str(tmp_path))) == "model.ckpt-1"


@pytest.mark.law("L1")
def test_the_mean_over_a_cycle_follows_separate_ops():
    with tf.Graph().as_default(), tf1.Session() as session:
        problem = Problem()
        mean = problem.optimizer.mean_over_cycle(problem.loss)
        ops = problem.optimizer.accumulation_ops(problem.loss)
        session.run(tf1.global_variables_initializer())
        means = []
        for number, x in enumerate(X, start=1):
            means.append(session.run([mean, ops.accumulate], {problem.x: x})[0])
            if number % K == 0:
                session.run(ops.apply)
    _, losses = by_numpy([full(range(K)), full(range(K, 2 * K))])
    np.testing.assert_allclose(means[K - 1 :: K], losses, rtol=2e-6)
    assert abs(np.mean((X[K - 1].dot(FIRST) - 1.0) ** 2) / losses[0] - 1.0) > 0.1


@pytest.mark.slow
@pytest.mark.law("L13")
@pytest.mark.parametrize("runs_the_others", [False, True])
@pytest.mark.parametrize("use_resource", [False, True], ids=["ref", "resource"])
def test_averages_follow_separate_ops(use_resource, runs_the_others):
    """The updates of a layer as `slim.batch_norm` creates them."""
    with tf.Graph().as_default(), tf1.Session() as session:
        problem, averages = Problem(), []
        with tf1.variable_scope("norm", use_resource=use_resource):
            for value, name in zip(tf.nn.moments(problem.x, [0]), ("moving_mean", "moving_variance")):
                averages.append(tf1.get_variable(name, [5], initializer=tf1.zeros_initializer(), trainable=False))
                delta = (averages[-1].read_value() - value) * tf.constant(1.0 - MOMENTUM)
                tf1.add_to_collection(tf1.GraphKeys.UPDATE_OPS, tf1.assign_sub(averages[-1], delta))
        assert problem.optimizer.accumulate_update_ops() == []
        others = tf1.get_collection(tf1.GraphKeys.UPDATE_OPS) if runs_the_others else []
        ops = problem.optimizer.accumulation_ops(problem.loss)
        session.run(tf1.global_variables_initializer())
        for x in X[:K]:
            session.run([ops.accumulate, others], {problem.x: x})
        session.run(ops.apply)
        ours = session.run(averages)
    for value, statistic in zip(ours, (np.mean, np.var)):
        expected = (1.0 - MOMENTUM) * statistic(full(range(K)).astype("float64"), axis=0)
        np.testing.assert_allclose(value, expected, rtol=0, atol=2e-6)


@pytest.mark.law("L14")
def test_a_train_op_beside_separate_ops_makes_the_step_of_what_they_have_accumulated():
    with tf.Graph().as_default(), tf1.Session() as session:
        problem = Problem()
        ops = problem.optimizer.accumulation_ops(problem.loss)
        train_op = problem.optimizer.minimize(problem.loss)
        session.run(tf1.global_variables_initializer())
        for x in X[:2]:
            session.run(ops.accumulate, {problem.x: x})
        for x in X[2:4]:
            session.run(train_op, {problem.x: x})
        ours = session.run(problem.weights)
    np.testing.assert_allclose(ours, by_numpy([full([0, 1, 2]), X[3]])[0], rtol=0, atol=2e-6)
    assert np.abs(ours - by_numpy(X[2:4])[0]).max() > 1e-2


@pytest.mark.law("L17")
@pytest.mark.parametrize("name", ["minimize", "flush", "reset"])
def test_separate_ops_come_before_what_takes_each_micro_batch_for_a_step(name):
    with tf.Graph().as_default():
        problem = Problem()
        getattr(problem.optimizer, name)(*[problem.loss] if name == "minimize" else [])
        with pytest.raises(ValueError, match="only the ops of `accumulation_ops` accumulate: call it first"):
            problem.optimizer.accumulation_ops(problem.loss)


@pytest.mark.law("L14")
def test_a_single_micro_step_may_train_two_lists_of_variables():
    def train(make):
        with tf.Graph().as_default(), tf1.Session() as session:
            fed, optimizer = tf1.placeholder(tf.float32, [2]), make()
            variables = [tf1.get_variable(name, initializer=[1.0, 2.0]) for name in ("a", "b")]
            losses = [tf.reduce_sum(tf.sin(var * fed)) for var in variables]
            train_ops = [optimizer.minimize(loss, var_list=[var]) for loss, var in zip(losses, variables)]
            session.run(tf1.global_variables_initializer())
            for number in range(6):
                session.run(train_ops[number % 2], {fed: X[number, 0, :2]})
            return session.run(variables), {var.op.name for var in tf1.global_variables()}

    inner = lambda: tf1.train.AdamOptimizer(0.1)
    ours, names = train(lambda: accum.compat.v1.AccumOptimizer(inner(), 1))
    theirs, plain_names = train(inner)
    np.testing.assert_array_equal(ours, theirs)
    assert names == plain_names
