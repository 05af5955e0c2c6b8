"""Loss scaling in a static graph (law L10)."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import accum.compat.v1

tf1 = tf.compat.v1

NAMESPACES = [getattr(tf1, "mixed_precision", None), tf1.train.experimental]  # it moved with TF 2.4
NAMESPACE = [space for space in NAMESPACES if hasattr(space, "MixedPrecisionLossScaleOptimizer")][0]
RANDOM = np.random.RandomState(0)
X, Y = RANDOM.normal(size=(12, 6)).astype("float32"), RANDOM.normal(size=(12, 1)).astype("float32")
FIRST = RANDOM.normal(size=(6, 1)).astype("float32")
K = 3


def wrapped(learning_rate=0.5):
    return accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(learning_rate), K)


def scaled(optimizer, scale="dynamic"):
    return NAMESPACE.MixedPrecisionLossScaleOptimizer(optimizer, scale)


def weights_variable(initial_value, dtype=tf.float32):
    return tf1.get_variable("w", initializer=tf.constant(initial_value, dtype), use_resource=True)


@pytest.mark.law("L10")
@pytest.mark.parametrize("bad", range(K))
def test_an_overflow_drops_its_micro_batch_and_the_cycle_takes_one_more(bad):
    gradients = RANDOM.normal(size=(K, 4)).astype("float32")
    fed_in = np.insert(gradients, bad, [np.inf, 1.0, np.nan, 0.0], axis=0)
    with tf.Graph().as_default(), tf1.Session() as session:
        step, weights = tf1.train.get_or_create_global_step(), weights_variable(np.ones(4, "float32"))
        fed = tf1.placeholder(tf.float32, [4])
        train_op = scaled(wrapped()).minimize(tf.reduce_sum(weights * fed), step)
        session.run(tf1.global_variables_initializer())
        steps = []
        for grad in fed_in:
            session.run(train_op, {fed: grad})
            steps.append(session.run(step))
        assert steps == [0] * K + [1]
        np.testing.assert_allclose(session.run(weights), 1.0 - 0.5 * gradients.mean(0), rtol=0, atol=2e-6)


@pytest.mark.law("L10")
def test_each_micro_batch_is_unscaled_by_the_scale_that_scaled_it():
    with tf.Graph().as_default(), tf1.Session() as session:
        weights, fed = weights_variable(np.zeros(1, "float32")), tf1.placeholder(tf.float32, [1])
        optimizer = scaled(wrapped())
        train_op = optimizer.minimize(tf.reduce_sum(weights * fed), tf1.train.get_or_create_global_step())
        (scale,) = [v for v in tf1.global_variables() if "loss_scale" in v.op.name]
        session.run(tf1.global_variables_initializer())
        for grad, now in ((1.0, 8.0), (2.0, 1024.0), (6.0, 2.0)):
            scale.load(now, session)
            session.run(train_op, {fed: [grad]})
        assert session.run(weights) == [-1.5]


def by_hand(optimizer, loss, step):
    """As programs wrote it before TensorFlow had one."""
    scale = tf1.get_variable("scale", initializer=1024.0, trainable=False, use_resource=True)
    grads_and_vars = [(grad / scale, var) for grad, var in optimizer.compute_gradients(loss * scale)]
    is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(grad)) for grad, _ in grads_and_vars])
    train_op = optimizer.apply_gradients(grads_and_vars, step)
    return tf.group(train_op, scale.assign(tf.where(is_finite, scale * 1.0, scale / 2.0)))


@pytest.mark.law("L10", "L17")
@pytest.mark.parametrize(
    "make", [lambda optimizer, loss, step: scaled(optimizer).minimize(loss, step), by_hand], ids=["TensorFlow's", "own"]
)
def test_a_dynamic_loss_scale_is_silent_and_right(make):
    with tf.Graph().as_default(), tf1.Session() as session, warnings.catch_warnings():
        warnings.filterwarnings("error", ".*micro-batch", UserWarning)
        step, weights = tf1.train.get_or_create_global_step(), weights_variable(FIRST)
        x, y = tf1.placeholder(tf.float32, [None, 6]), tf1.placeholder(tf.float32, [None, 1])
        optimizer = wrapped(0.005)
        train_op = make(optimizer, tf.reduce_mean((tf.matmul(x, weights) - y) ** 2), step)
        optimizer.check_graph()
        session.run(tf1.global_variables_initializer())
        for features, labels in zip(np.split(X, K), np.split(Y, K)):
            session.run(train_op, {x: features, y: labels})
        first = FIRST.astype("float64")
        expected = first - 0.005 * 2.0 * X.T.dot(X.dot(first) - Y) / len(X)
        np.testing.assert_allclose(session.run(weights), expected, rtol=0, atol=2e-6)


@pytest.mark.law("L10")
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=["float16", "bfloat16"])
def test_16_bit_compute_is_near_the_full_batch_in_float32(dtype):
    with tf.Graph().as_default(), tf1.Session() as session:
        x, y = tf1.placeholder(tf.float32, [None, 6]), tf1.placeholder(tf.float32, [None, 1])
        weights = weights_variable(FIRST)
        outputs = tf.cast(tf.matmul(tf.cast(x, dtype), tf.cast(weights, dtype)), tf.float32)
        train_op = scaled(wrapped(0.005), 128.0).minimize(tf.reduce_mean((outputs - y) ** 2))
        session.run(tf1.global_variables_initializer())
        for i in range(0, len(X), len(X) // K):
            session.run(train_op, {x: X[i : i + len(X) // K], y: Y[i : i + len(X) // K]})
        ours = session.run(weights)
    first = FIRST.astype("float64")
    expected = first - 0.005 * 2.0 * X.T.dot(X.dot(first) - Y) / len(X)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=3e-4)


@pytest.mark.law("L10")
def test_16_bit_variables_have_accumulators_of_32_bits():
    with tf.Graph().as_default(), tf1.Session() as session:
        weights, fed = weights_variable(np.zeros(1), tf.float16), tf1.placeholder(tf.float16, [1])
        optimizer = wrapped()
        train_op = optimizer.apply_gradients([(fed, weights)])
        assert optimizer.get_slot(weights, "accum").dtype.base_dtype == tf.float32
        session.run(tf1.global_variables_initializer())
        for grad in (2048.0, 1.0, 1.0):  # 2048 + 1 is 2048 in float16
            session.run(train_op, {fed: [grad]})
        assert session.run(weights) == np.float16(-0.5 * (2050.0 / 3.0))


@pytest.mark.law("L10")
def test_the_graph_rewrite_goes_around():
    with tf.Graph().as_default(), tf1.Session() as session:
        weights, fed = weights_variable(np.zeros(1, "float32")), tf1.placeholder(tf.float32, [1])
        optimizer = NAMESPACE.enable_mixed_precision_graph_rewrite(wrapped())
        try:
            train_op = optimizer.minimize(tf.reduce_sum(weights * fed))
            session.run(tf1.global_variables_initializer())
            for grad in (1.0, 2.0, 6.0):
                session.run(train_op, {fed: [grad]})
            assert session.run(weights) == [-1.5]
        finally:
            NAMESPACE.disable_mixed_precision_graph_rewrite()


@pytest.mark.law("L17")
def test_a_loss_scale_inside_is_refused_with_the_remedy():
    inner = scaled(tf1.train.GradientDescentOptimizer(0.5))
    with pytest.raises(ValueError, match="put MixedPrecisionLossScaleOptimizer around"):
        accum.compat.v1.AccumOptimizer(inner, K)


@pytest.mark.law("L17")
def test_the_mean_over_a_cycle_needs_a_fixed_scale():
    def mean_and_loss(scale):
        with tf.Graph().as_default(), tf1.Session() as session:
            weights, fed = weights_variable(np.ones(1, "float32")), tf1.placeholder(tf.float32, [1])
            loss = tf.reduce_mean(weights * fed)
            optimizer = wrapped()
            mean = optimizer.mean_over_cycle(loss)
            train_op = scaled(optimizer, scale).minimize(loss)
            session.run(tf1.global_variables_initializer())
            return [session.run([mean, train_op], {fed: [number]})[0] for number in (1.0, 2.0, 6.0)]

    with pytest.raises(ValueError, match="`mean_over_cycle` needs a train op outside of conditionals.*fixed scale"):
        mean_and_loss("dynamic")
    assert mean_and_loss(8.0)[-1] == 3.0
