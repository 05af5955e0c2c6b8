"""A training graph that is written to a file can be loaded and trained on: MetaGraphs and SavedModels (law L12)."""

import numpy as np
import pytest
import tensorflow as tf

import accum.compat.v1

tf1 = tf.compat.v1

TRAIN_OP = tf1.GraphKeys.TRAIN_OP
GRADIENTS = np.random.RandomState(0).normal(size=(4, 3)).astype("float32")
TAGS = ["train"]


def adam():
    return tf1.train.AdamOptimizer(0.1)


def build(optimizer, use_resource=True):
    """A training graph in the default graph; returns its train op."""
    weights = tf1.get_variable("w", initializer=[1.0, 2.0, 3.0], use_resource=use_resource)
    fed = tf1.placeholder(tf.float32, [3], name="fed")
    return optimizer.minimize(tf.reduce_sum(weights * fed), tf1.train.get_or_create_global_step())


def read(session):
    """The weights and the steps."""
    by_name = {var.op.name: var for var in tf1.global_variables()}
    return session.run([by_name["w"], by_name["global_step"]])


def full_batch():
    """The weights and the steps after two plain steps on the means of two gradients each."""
    with tf.Graph().as_default(), tf1.Session() as session:
        train_op = build(adam())
        session.run(tf1.global_variables_initializer())
        for pair in np.split(GRADIENTS, 2):
            session.run(train_op, {"fed:0": pair.mean(axis=0)})
        return read(session)


def write_meta_graph(session, folder):
    path = tf1.train.Saver().save(session, folder + "/run")
    return lambda loaded: tf1.train.import_meta_graph(path + ".meta").restore(loaded, path)


def write_saved_model(session, folder):
    builder = tf1.saved_model.Builder(folder + "/saved")
    builder.add_meta_graph_and_variables(session, TAGS)
    builder.save()
    return lambda loaded: tf1.saved_model.load(loaded, TAGS, folder + "/saved")


@pytest.mark.law("L12")
@pytest.mark.parametrize("use_resource", [False, True], ids=["ref", "resource"])
@pytest.mark.parametrize("write", [write_meta_graph, write_saved_model], ids=["meta graph", "saved model"])
def test_a_training_graph_that_was_written_in_mid_cycle_trains_on(tmp_path, write, use_resource):
    with tf.Graph().as_default(), tf1.Session() as session:
        train_op = build(accum.compat.v1.AccumOptimizer(adam(), 2), use_resource)
        session.run(tf1.global_variables_initializer())
        session.run(train_op, {"fed:0": GRADIENTS[0]})
        load = write(session, str(tmp_path))
    with tf.Graph().as_default(), tf1.Session() as session:
        load(session)
        (train_op,) = tf1.get_collection(TRAIN_OP)
        for grad in GRADIENTS[1:]:
            session.run(train_op, {"fed:0": grad})
        weights, steps = read(session)
    expected, expected_steps = full_batch()
    np.testing.assert_allclose(weights, expected, rtol=0, atol=2e-6)
    assert steps == expected_steps == 2


@pytest.mark.law("L17")
def test_the_collection_of_train_ops_holds_the_one_that_was_returned():
    with tf.Graph().as_default() as graph:
        optimizer = accum.compat.v1.AccumOptimizer(adam(), 2)
        train_op = build(optimizer)
        optimizer.flush()
        assert tf1.get_collection(TRAIN_OP) == [train_op]
        assert train_op.graph is graph


@pytest.mark.law("L17")
def test_a_train_op_of_the_user_s_own_stays_in_the_collection():
    with tf.Graph().as_default():
        other = tf.no_op()
        tf1.add_to_collection(TRAIN_OP, other)
        train_op = build(accum.compat.v1.AccumOptimizer(adam(), 2))
        assert tf1.get_collection(TRAIN_OP) == [other, train_op]


@pytest.mark.law("L14")
def test_without_accumulation_the_collection_holds_the_plain_train_op():
    with tf.Graph().as_default():
        train_op = build(accum.compat.v1.AccumOptimizer(adam(), 1))
        assert tf1.get_collection(TRAIN_OP) == [train_op]


@pytest.mark.law("L17")
def test_the_ops_of_a_cycle_leave_nothing_in_the_collection_of_train_ops():
    with tf.Graph().as_default():
        weights = tf1.get_variable("w", initializer=[1.0])
        accum.compat.v1.AccumOptimizer(adam(), 2).accumulation_ops(tf.reduce_sum(weights**2))
        assert tf1.get_collection(TRAIN_OP) == []
