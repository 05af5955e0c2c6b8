"""`split_batch` behind sparse and ragged features, and with a loss scale (law L21)."""

import numpy as np
import pytest
import tensorflow as tf
from warned import silent

import accum.compat.v1

pytestmark = pytest.mark.law("L21")

tf1 = tf.compat.v1


def weight(name, shape):
    first = np.random.RandomState(sum(shape)).normal(size=shape, scale=0.5).astype("float32")
    return tf1.get_variable(name, shape, initializer=tf1.constant_initializer(first))


def of_sparse_features():
    features = tf1.sparse_placeholder(tf.float32, [None, 5])
    return features, tf1.sparse_tensor_dense_matmul(features, weight("kernel", [5, 3]))


def of_ragged_words():
    words = tf1.ragged.placeholder(tf.int32, 1, [])
    vectors = tf.nn.embedding_lookup(weight("table", [7, 3]), words.values)
    return words, tf.reduce_sum(words.with_values(vectors), axis=1)


def values(features, random):
    if not isinstance(features, tf.SparseTensor):
        return tf1.ragged.constant_value([[1, 2], [3], [0, 5, 6], [], [4]], dtype="int32")
    dense = random.normal(size=(5, 5)) * (random.uniform(size=(5, 5)) > 0.5)
    return tf1.SparseTensorValue(np.argwhere(dense), dense[dense != 0.0].astype("float32"), dense.shape)


def root_of_mean(outputs, targets):
    return tf.sqrt(mean(outputs, targets))


def mean(outputs, targets):
    return tf.reduce_mean((outputs - targets) ** 2)


def trained(program, loss_of, optimizer, size, naively=False):
    """Return the weights after three steps; `naively`, the loss is the mean of those of micro-batches."""
    with tf.Graph().as_default(), tf1.Session() as session:
        targets = tf1.placeholder(tf.float32, [None, 2])
        features, hidden = program()
        hidden = tf.tanh(tf.matmul(hidden, weight("hidden", [3, 4])))
        outputs = tf.matmul(hidden, weight("outputs", [4, 2]))
        if naively:
            parts = zip(tf.split(outputs, [2, 2, 1]), tf.split(targets, [2, 2, 1]))
            loss = tf.add_n([loss_of(one, other) / 3.0 for one, other in parts])
        else:
            loss = loss_of(outputs, targets)
        if size is not None:
            batch = [hidden.op.inputs[0].op.inputs[0], targets]  # what is computed from the features
            with silent():
                loss = accum.compat.v1.split_batch(loss, batch, size)
        train_op = optimizer().minimize(loss)
        session.run(tf1.global_variables_initializer())
        for step in range(3):
            random = np.random.RandomState(step)
            feeds = {features: values(features, random), targets: random.normal(size=(5, 2))}
            session.run(train_op, feeds)
        return session.run({var.name: var for var in tf1.global_variables()})


def adam():
    return tf1.train.AdamOptimizer(0.05)


def with_loss_scale():
    """Scales by 2 ** 15 first, and doubles that after each step."""
    scale = tf1.train.experimental.DynamicLossScale(increment_period=1)
    return tf1.train.experimental.MixedPrecisionLossScaleOptimizer(tf1.train.MomentumOptimizer(0.1, 0.9), scale)


@pytest.mark.parametrize("optimizer", [adam, with_loss_scale])
@pytest.mark.parametrize("loss_of", [mean, root_of_mean])
@pytest.mark.parametrize("program", [of_sparse_features, of_ragged_words])
def test_dense_tensors_that_sparse_features_become_are_a_batch(program, loss_of, optimizer):
    """No weight moves before the gradients by these tensors are there: ref variables would be read too late."""
    ours, expected = trained(program, loss_of, optimizer, 2), trained(program, loss_of, optimizer, None)
    assert set(ours) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-6, atol=2e-6, err_msg=name)
    others = trained(program, loss_of, optimizer, None, naively=True)
    assert max(np.abs(others[name] - value).max() for name, value in expected.items()) > 1e-3


@pytest.mark.parametrize("program", [of_sparse_features, of_ragged_words])
def test_sparse_features_themselves_are_refused_by_name(program):
    with tf.Graph().as_default():
        features, hidden = program()
        with pytest.raises(TypeError, match="for sparse and ragged ones, pass what is computed from them"):
            accum.compat.v1.split_batch(tf.reduce_mean(hidden**2), features, 2)
