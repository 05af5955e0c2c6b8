"""What docs/migrating.md says of the numbers: the rules of other libraries in NumPy, beside ours."""

import numpy as np
import pytest
import tensorflow as tf

import accum
import accum.compat.v1

pytestmark = pytest.mark.slow


tf1 = tf.compat.v1
K = 4
GRADIENTS = np.random.RandomState(0).normal(size=(3, K, 2)).astype("float32")


def moved_in_a_graph(rate, **options):
    """Where our optimizer moves weights of 0 by the cycles of `GRADIENTS`."""
    with tf.Graph().as_default(), tf1.Session() as session:
        variable = tf1.get_variable("variable", [2], initializer=tf1.zeros_initializer())
        fed = tf1.placeholder(tf.float32, [2])
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.MomentumOptimizer(rate, 0.9), K, **options)
        train_op = optimizer.apply_gradients([(fed, variable)])
        session.run(tf1.global_variables_initializer())
        for grad in GRADIENTS.reshape(-1, 2):
            session.run(train_op, {fed: grad})
        return session.run(variable)


@pytest.mark.law("L4")
@pytest.mark.parametrize(
    "rate,options", [(0.01, {"reduction": "sum"}), (0.01 * K, {})], ids=["sum", "K-times-the-rate"]
)
def test_tensorpack_and_horovod_and_hand_written_sums_are_kept_in_either_way(rate, options):
    weights, velocity = np.zeros(2), np.zeros(2)
    for cycle in GRADIENTS.astype("float64"):
        velocity = 0.9 * velocity + cycle.sum(0)
        weights = weights - 0.01 * velocity
    np.testing.assert_allclose(moved_in_a_graph(rate, **options), weights, rtol=0, atol=2e-6)


def positions(optimizer):
    """Where an optimizer of ours stands after each of two cycles of gradients of 1, from 0."""
    variable, seen = tf.Variable([0.0]), []
    for _ in range(2 * K):
        optimizer.apply_gradients([(tf.constant([1.0]), variable)])
        seen.append(float(variable.numpy()[0]))
    return seen


@pytest.mark.law("L3")
@pytest.mark.tf("2.2")
def test_a_step_counter_of_micro_batches_makes_adam_s_first_step_smaller():
    """As up to GradientAccumulator 0.4 and with Horovod: bias is corrected by t = K, where the moments are of t = 1."""
    m, v = 0.1, 0.001
    theirs = 0.1 * np.sqrt(1 - 0.999**K) / (1 - 0.9**K) * m / (np.sqrt(v) + 1e-7)
    assert round(theirs, 3) == 0.058
    ours = positions(accum.GradientAccumulateOptimizer(tf.keras.optimizers.Adam(0.1), K))
    np.testing.assert_allclose(ours[:K], [0.0] * (K - 1) + [-0.1], rtol=0, atol=2e-6)


@pytest.mark.law("L2")
@pytest.mark.tf("2.2")
def test_zeros_between_steps_let_momentum_roll():
    """As in GradientAccumulator 0.5, whose weight is at 1, 1.9, 2.71, 3.44 after the first step of 1."""
    velocity, at, theirs = 0.0, 0.0, []
    for grad in [1.0] + [0.0] * (K - 1):
        velocity = 0.9 * velocity + grad
        at += velocity
        theirs.append(round(at, 2))
    assert theirs == [1.0, 1.9, 2.71, 3.44]
    ours = positions(accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0, momentum=0.9), K))
    np.testing.assert_allclose(ours, [0.0] * 3 + [-1.0] * 4 + [-2.9], rtol=0, atol=2e-6)
