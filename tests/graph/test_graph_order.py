"""In a static graph, control dependencies fix the order: accumulate, read, apply, zero (law L15)."""

import numpy as np
import pytest
import tensorflow as tf
from optimizers import mainly
from replicas import RUN, mirrored

import accum.compat.v1

tf1 = tf.compat.v1

SHAPE = (64, 32)


def build(use_resource, train_ops=1, accum_steps=3):
    step = tf1.train.get_or_create_global_step()
    variable = tf1.get_variable("w", initializer=np.ones(SHAPE, np.float32), use_resource=use_resource)
    fed = [tf1.placeholder(tf.float32, SHAPE) for _ in range(train_ops)]
    optimizer = accum.compat.v1.AccumOptimizer(tf1.train.MomentumOptimizer(0.1, 0.9), accum_steps)
    return variable, step, fed, [optimizer.apply_gradients([(grad, variable)], step) for grad in fed]


@pytest.mark.slow
@pytest.mark.law("L15")
@pytest.mark.parametrize("use_resource", [False, True], ids=["ref", "resource"])
def test_fifty_sessions_over_the_same_data_end_bit_identical(use_resource):
    gradients = np.random.RandomState(0).normal(size=(6,) + SHAPE).astype("float32")
    ends = set()
    with tf.Graph().as_default():
        variable, _, (fed,), (train_op,) = build(use_resource)
        initialize = tf1.global_variables_initializer()
        for _ in range(50):
            with tf1.Session() as session:
                session.run(initialize)
                for grad in gradients:
                    session.run(train_op, {fed: grad})
                ends.add(session.run(variable).tobytes())
    assert len(ends) == 1


@pytest.mark.law("L15")
@pytest.mark.parametrize("use_resource", [False, True], ids=["ref", "resource"])
def test_two_train_ops_in_one_run_do_not_race(use_resource):
    random = np.random.RandomState(0)
    pairs = random.normal(size=(40, 2) + SHAPE).astype("float32")
    with tf.Graph().as_default(), tf1.Session() as session:
        variable, step, fed, train_ops = build(use_resource, train_ops=2, accum_steps=2)
        session.run(tf1.global_variables_initializer())
        for pair in pairs:
            session.run(train_ops, dict(zip(fed, pair)))
        ours = session.run(variable)
        assert session.run(step) == len(pairs)
    weights, velocity = np.ones(SHAPE, "float32"), np.zeros(SHAPE, "float32")
    for one, other in pairs:  # whichever came first, the sum of two is the same to the bit
        velocity = np.float32(0.9) * velocity + (one + other) / np.float32(2.0)
        weights = weights - np.float32(0.1) * velocity
    np.testing.assert_allclose(ours, weights, rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.law("L15")
def test_two_train_ops_in_one_run_do_not_race_under_a_strategy_for_one_device():
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    with tf.Graph().as_default(), tf1.Session(config=tf1.ConfigProto(allow_soft_placement=True)) as session:
        fed = [tf1.placeholder(tf.float32, [200000]) for _ in range(2)]
        with strategy.scope():
            step = tf1.train.get_or_create_global_step()
            variables = [tf1.get_variable(name, initializer=np.zeros(200000, "float32")) for name in "abcd"]
            optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(1.0), 2)
        train_ops = []
        for grad in fed:
            pairs = [(tf.sqrt(grad), var) for var in variables]
            done = getattr(strategy, RUN)(lambda pairs=pairs: optimizer.apply_gradients(pairs, step))
            train_ops.append(tf.group(*strategy.experimental_local_results(done)))
        session.run(tf1.global_variables_initializer())
        for number in range(100):
            session.run(train_ops, {one: np.full(200000, (number + k) ** 2, "float32") for k, one in enumerate(fed)})
        ours, steps = session.run([variables, step])
    np.testing.assert_array_equal(ours, np.full((4, 200000), -sum(number + 0.5 for number in range(100)), "float32"))
    assert steps == 100


@pytest.mark.law("L15")
def test_two_optimizers_in_one_graph_keep_to_themselves():
    with tf.Graph().as_default(), tf1.Session() as session:
        ours = []
        for name, accum_steps in (("generator", 2), ("discriminator", 3)):
            variable = tf1.get_variable(name, initializer=[0.0])
            optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(1.0), accum_steps)
            ours.append((variable, optimizer.apply_gradients([(tf.ones([1]), variable)])))
        session.run(tf1.global_variables_initializer())
        for _ in range(6):
            session.run([train_op for _, train_op in ours])
        assert session.run([variable for variable, _ in ours]) == [[-3.0], [-2.0]]


@pytest.mark.law("L11")
@pytest.mark.parametrize("options", mainly([{}, {"nonfinite": "skip_micro"}, {"nonfinite": "skip_cycle"}], {}), ids=str)
@pytest.mark.parametrize("reduction,moved", [("mean", -4.0), ("sum", -8.0), ("running_mean", -4.0)])
def test_two_replicas_in_a_session(options, reduction, moved):
    with tf.Graph().as_default():
        strategy = mirrored()
        with strategy.scope():
            variable = tf1.get_variable("w", initializer=[0.0], use_resource=True)
            inner = tf1.train.GradientDescentOptimizer(1.0)
            optimizer = accum.compat.v1.AccumOptimizer(inner, 2, reduction, **options)
        done = getattr(strategy, RUN)(lambda: optimizer.apply_gradients([(tf.constant([1.0]), variable)]))
        train_op = tf.group(*strategy.experimental_local_results(done))
        with tf1.Session(config=tf1.ConfigProto(device_count={"CPU": 2})) as session:
            session.run(tf1.global_variables_initializer())
            for _ in range(4):  # each replica's share of the gradient is 1, the whole 2
                session.run(train_op)
            values = session.run(strategy.experimental_local_results(variable))
    np.testing.assert_array_equal(values, [[moved]] * 2)


@pytest.mark.law("L7", "L11")
def test_a_transform_sees_the_whole_gradient_of_two_replicas_in_a_session():
    shares = np.array([[[3.0, 0.0], [0.0, 4.0]], [[1.0, 2.0], [5.0, -3.0]]])  # of each replica, in each micro step
    with tf.Graph().as_default():
        strategy = mirrored()
        with strategy.scope():
            variable = tf1.get_variable("w", initializer=[0.0, 0.0], use_resource=True)
            clip = lambda pairs: [(tf.clip_by_norm(grad, 0.5), var) for grad, var in pairs]
            optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(1.0), 2, transform=clip)
        fed = tf1.placeholder(tf.float32, [2, 2])

        def micro_step():
            number = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int32)
            return optimizer.apply_gradients([(fed[number], variable)])

        train_op = tf.group(*strategy.experimental_local_results(getattr(strategy, RUN)(micro_step)))
        with tf1.Session(config=tf1.ConfigProto(device_count={"CPU": 2})) as session:
            session.run(tf1.global_variables_initializer())
            for share in shares:
                session.run(train_op, {fed: share})
            values = session.run(strategy.experimental_local_results(variable))
    mean = shares.sum(axis=1).mean(axis=0)
    np.testing.assert_allclose(values, [-0.5 * mean / np.linalg.norm(mean)] * 2, rtol=1e-6)
