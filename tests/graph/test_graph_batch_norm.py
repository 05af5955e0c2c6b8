"""Batch normalisation in a static graph: averages move once a cycle, to the full batch's statistics (law L13)."""

import numpy as np
import pytest
import tensorflow as tf
import tf_slim as slim
from equality import assert_near
from optimizers import mainly

import accum.compat.v1

tf1 = tf.compat.v1

pytestmark = pytest.mark.tf(keras=2, because="`tf.compat.v1.layers` need Keras 2")

RANDOM = np.random.RandomState(0)
MOMENTUM = 0.75
RAGGED = (5, 4, 3)


def slim_layer(x, **options):
    options = {"is_training" if name == "training" else name: value for name, value in options.items()}
    return slim.batch_norm(x, decay=MOMENTUM, **options)


def tf_layer(x, **options):
    return tf1.layers.batch_normalization(x, momentum=MOMENTUM, **dict({"training": True}, **options))


SLIM = "tf_slim 1.1.0 takes this from a module that Keras 2.13 dropped"
LAYERS = [
    pytest.param(slim_layer, id="slim.batch_norm", marks=pytest.mark.tf(max="2.12", because=SLIM)),
    pytest.param(tf_layer, id="tf.layers"),
]


class Graph:
    """One batch normalisation of what is fed, and a train op behind it."""

    def __init__(self, layer, shape, accum_steps=None, use_resource=False, train=True, **options):
        self.x = tf1.placeholder(tf.float32, (None,) + shape)
        with tf1.variable_scope("net", use_resource=use_resource):
            outputs = layer(self.x, **options)
        loss = tf.reduce_mean(tf.square(outputs - 1.0))
        optimizer = tf1.train.GradientDescentOptimizer(0.1)
        if accum_steps:
            optimizer = accum.compat.v1.AccumOptimizer(optimizer, accum_steps)
            self.taken = optimizer.accumulate_update_ops()
        self.optimizer = optimizer
        if train:
            with tf.control_dependencies(tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)):
                self.train_op = optimizer.minimize(loss)
        else:
            self.ops = optimizer.accumulation_ops(loss)
        self.averages = [v for v in tf1.global_variables() if v.op.name.endswith(("moving_mean", "moving_variance"))]


def averages_after(batches, *args, **options):
    with tf.Graph().as_default(), tf1.Session() as session:
        graph = Graph(*args, **options)
        session.run(tf1.global_variables_initializer())
        for batch in batches:
            session.run(graph.train_op, {graph.x: batch})
        return session.run(graph.averages)


def cycles(count, shape):
    """`count` full batches, and the ragged micro-batches that they fall into."""
    full = [RANDOM.normal(3.0, 2.0, (sum(RAGGED),) + shape).astype("float32") for _ in range(count)]
    return full, [part for batch in full for part in np.split(batch, np.cumsum(RAGGED)[:-1])]


VARIABLES = [
    pytest.param((5,), False, id="rank2-ref"),
    pytest.param((3, 2, 5), False, id="rank4-ref"),
    pytest.param((3, 2, 5), True, id="rank4-resource"),
    pytest.param((2, 2, 2, 3), True, id="rank5-resource"),
]


@pytest.mark.slow
@pytest.mark.law("L13")
@pytest.mark.parametrize("is_fused", [None, False], ids=["fused", "plain"])
@pytest.mark.parametrize("shape,use_resource", VARIABLES)
@pytest.mark.parametrize("layer", LAYERS)
def test_averages_move_to_the_full_batch_s_statistics(layer, shape, is_fused, use_resource):
    full, parts = cycles(2, shape)
    options = {"use_resource": use_resource, "fused": is_fused}
    theirs = averages_after(full, layer, shape, **options)
    ours = averages_after(parts, layer, shape, accum_steps=len(RAGGED), **options)
    assert_near(ours, theirs)


def as_slim_deploys(make, loss, update_ops):
    """As in tf-slim's deploy scripts: the update ops that were collected first run beside the train op."""
    return tf.group(*list(update_ops) + [make().minimize(loss())])


def as_optimize_loss(make, loss, update_ops):
    """As `tf.contrib.layers.optimize_loss` does with a function that makes the optimizer: after the update ops."""
    with tf.control_dependencies(list(update_ops)):
        waiting = tf.identity(loss())
    return make().minimize(waiting)


@pytest.mark.slow
@pytest.mark.law("L13")
@pytest.mark.parametrize("is_tensor", [False, True], ids=["training", "training as a tensor"])
@pytest.mark.parametrize("use_resource", [False, True], ids=["ref", "resource"])
@pytest.mark.parametrize("train_op_of", [as_slim_deploys, as_optimize_loss])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.usefixtures("control_flow_of_tf_1")
def test_update_ops_that_were_collected_before_change_nothing(layer, train_op_of, use_resource, is_tensor):
    full, parts = cycles(2, (5,))

    def run(batches, accum_steps):
        def make():
            optimizer = tf1.train.GradientDescentOptimizer(0.1)
            if accum_steps:
                optimizer = accum.compat.v1.AccumOptimizer(optimizer, accum_steps)
                assert len(optimizer.accumulate_update_ops()) == 2
            return optimizer

        with tf.Graph().as_default(), tf1.Session() as session:
            x = tf1.placeholder(tf.float32, [None, 5])
            training = tf1.placeholder_with_default(True, []) if is_tensor else True
            with tf1.variable_scope("net", use_resource=use_resource):
                outputs = layer(x, training=training, fused=False)
            update_ops = tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)
            train_op = train_op_of(make, lambda: tf.reduce_mean(tf.square(outputs - 1.0)), update_ops)
            session.run(tf1.global_variables_initializer())
            for batch in batches:
                session.run(train_op, {x: batch})
            return session.run([v for v in tf1.global_variables() if v.op.name.split("/")[-1].startswith("moving_")])

    assert_near(run(parts, len(RAGGED)), run(full, None))


@pytest.mark.law("L13")
@pytest.mark.parametrize("layer", mainly(LAYERS, "tf.layers"))
def test_averages_rest_between_steps_and_follow_flush_and_reset(layer):
    _, (first, second, third) = cycles(1, (5,))
    with tf.Graph().as_default(), tf1.Session() as session:
        graph = Graph(layer, (5,), accum_steps=4, fused=False)
        flush, reset = graph.optimizer.flush(), graph.optimizer.reset()
        session.run(tf1.global_variables_initializer())
        before = [value.tobytes() for value in session.run(graph.averages)]
        session.run(graph.train_op, {graph.x: first})
        session.run(graph.train_op, {graph.x: np.full_like(first, np.nan)})
        session.run(reset)
        for part in (second, third):
            session.run(graph.train_op, {graph.x: part})
            assert [value.tobytes() for value in session.run(graph.averages)] == before
        session.run(flush)
        mean, variance = session.run(graph.averages)
        session.run(flush)  # nothing is there: nothing moves
        assert [value.tobytes() for value in session.run(graph.averages)] == [mean.tobytes(), variance.tobytes()]
    seen = np.concatenate([second, third]).astype("float64")
    np.testing.assert_allclose(mean, (1.0 - MOMENTUM) * seen.mean(0), rtol=0, atol=2e-6)
    np.testing.assert_allclose(variance, MOMENTUM + (1.0 - MOMENTUM) * seen.var(0), rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.law("L13")
def test_explicit_ops_move_averages_with_the_step():
    _, parts = cycles(1, (5,))
    with tf.Graph().as_default(), tf1.Session() as session:
        graph = Graph(tf_layer, (5,), accum_steps=2, train=False, fused=False)
        session.run(tf1.global_variables_initializer())
        for part in parts:
            session.run(graph.ops.accumulate, {graph.x: part})
        session.run(graph.ops.apply)
        mean, variance = session.run(graph.averages)
    seen = np.concatenate(parts).astype("float64")
    np.testing.assert_allclose(mean, (1.0 - MOMENTUM) * seen.mean(0), rtol=0, atol=2e-6)
    np.testing.assert_allclose(variance, MOMENTUM + (1.0 - MOMENTUM) * seen.var(0), rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.law("L13")
@pytest.mark.parametrize("is_fused", [None, False], ids=["fused", "plain"])
@pytest.mark.usefixtures("control_flow_of_tf_1")
def test_training_as_a_tensor_under_the_control_flow_of_tf_1(is_fused):
    full, parts = cycles(2, (3, 2, 5))

    def run(batches, accum_steps):
        with tf.Graph().as_default(), tf1.Session() as session:
            flag = tf1.placeholder_with_default(True, [])
            graph = Graph(tf_layer, (3, 2, 5), accum_steps, use_resource=True, training=flag, fused=is_fused)
            session.run(tf1.global_variables_initializer())
            for batch in batches:
                session.run(graph.train_op, {graph.x: batch})
            trained = session.run(graph.averages)
            for batch in parts if accum_steps else []:  # TF 1.15's own layer adds 0 times what stood in memory
                session.run(graph.train_op, {graph.x: batch, flag: False})
            np.testing.assert_array_equal(session.run(graph.averages), trained)
            return trained

    assert_near(run(parts, len(RAGGED)), run(full, None))


@pytest.mark.slow
@pytest.mark.law("L12", "L13")
@pytest.mark.parametrize("taken", ["at once", "one by one"])
@pytest.mark.parametrize("use_resource", [False, True], ids=["ref", "resource"])
def test_each_use_of_a_layer_moves_the_averages_in_turn(use_resource, taken, tmp_path):
    (full, _), parts = cycles(2, (5,))
    other_full, other_parts = 0.5 * full - 2.0, [0.5 * part - 2.0 for part in parts]

    def session_after(batches, path, save):
        with tf.Graph().as_default(), tf1.Session() as session:
            x, y = [tf1.placeholder(tf.float32, [None, 5]) for _ in range(2)]
            with tf1.variable_scope("net", use_resource=use_resource):
                outputs = [
                    tf_layer(one, fused=False, name="norm", reuse=reuse) for one, reuse in ((x, False), (y, True))
                ]
            loss = tf.add_n([tf.reduce_mean(tf.square(one - 1.0)) for one in outputs])
            optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.1), len(RAGGED))
            update_ops = tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)
            assert len(update_ops) == 4
            for ops in [update_ops] if taken == "at once" else [update_ops[:2], update_ops[2:]]:
                assert len(optimizer.accumulate_update_ops(ops)) == len(ops)
            train_op, saver = optimizer.minimize(loss), tf1.train.Saver()
            session.run(tf1.global_variables_initializer())
            if not save:
                saver.restore(session, path)
            for one, other in batches:
                session.run(train_op, {x: one, y: other})
            if save:
                saver.save(session, path)
            return session.run([var for var in tf1.global_variables() if "moving_" in var.op.name])

    pairs, path = list(zip(parts, other_parts))[: len(RAGGED)], str(tmp_path / "in the middle")
    session_after(pairs[:2], path, True)
    ours = session_after(pairs[2:], path, False)
    for value, statistic, start in zip(ours, (np.mean, np.var), (0.0, 1.0)):
        moved = start * np.ones(5)
        for batch in (full, other_full):
            moved = MOMENTUM * moved + (1.0 - MOMENTUM) * statistic(batch.astype("float64"), axis=0)
        np.testing.assert_allclose(value, moved, rtol=0, atol=2e-6)
        once = MOMENTUM * start + (1.0 - MOMENTUM) * statistic(full.astype("float64"), axis=0)
        assert np.abs(moved - once).max() > 0.1


@pytest.mark.slow
@pytest.mark.law("L13")
def test_a_skipped_micro_batch_leaves_no_trace_in_the_averages():
    _, parts = cycles(1, (5,))
    with tf.Graph().as_default(), tf1.Session() as session:
        x = tf1.placeholder(tf.float32, [None, 5])
        factor = tf1.placeholder_with_default(1.0, [])
        loss = tf.reduce_mean(tf.square(tf_layer(x) - 1.0)) * factor
        inner = tf1.train.GradientDescentOptimizer(0.1)
        optimizer = accum.compat.v1.AccumOptimizer(inner, 2, nonfinite="skip_micro")
        optimizer.accumulate_update_ops()
        train_op = optimizer.minimize(loss)
        session.run(tf1.global_variables_initializer())
        session.run(train_op, {x: parts[0]})
        session.run(train_op, {x: parts[1], factor: np.nan})
        session.run(train_op, {x: parts[2]})
        (mean,) = session.run([v for v in tf1.global_variables() if v.op.name.endswith("moving_mean")])
    seen = np.concatenate([parts[0], parts[2]]).astype("float64")
    np.testing.assert_allclose(mean, (1.0 - MOMENTUM) * seen.mean(0), rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.law("L13")
def test_what_is_taken_over_leaves_the_collection_and_nothing_else_does():
    with tf.Graph().as_default():
        x = tf1.placeholder(tf.float32, [None, 5])
        tf_layer(x)
        norm = tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)
        other = tf1.assign(tf1.get_variable("seen", [], trainable=False), 1.0)
        tf1.add_to_collection(tf1.GraphKeys.UPDATE_OPS, other)
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.1), 2)
        with pytest.raises(ValueError, match="can't be taken over: ..Assign"):
            optimizer.accumulate_update_ops()
        assert len(tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)) == 3
        assert len(optimizer.accumulate_update_ops(norm)) == 2
        assert tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)[0] is other


@pytest.mark.slow
@pytest.mark.law("L17")
def test_updates_that_cannot_be_taken_over_are_refused():
    with tf.Graph().as_default():
        x = tf1.placeholder(tf.float32, [None, 5])
        tf_layer(x, renorm=True)
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.1), 2)
        with pytest.raises(ValueError, match="without `renorm`"):
            optimizer.accumulate_update_ops()


@pytest.mark.slow
@pytest.mark.tf(max="2.12", because="tf_slim 1.1.0 takes this from a module that Keras 2.13 dropped")
@pytest.mark.law("L17")
@pytest.mark.parametrize("is_fused", [None, False], ids=["fused", "plain"])
@pytest.mark.parametrize("is_tensor", [False, True], ids=["training", "training as a tensor"])
def test_averages_that_are_updated_in_place_are_refused(is_tensor, is_fused):
    with tf.Graph().as_default():
        training = tf1.placeholder_with_default(True, []) if is_tensor else True
        x = tf1.placeholder(tf.float32, [None, 3, 2, 5])
        slim_layer(x, training=training, updates_collections=None, fused=is_fused, scope="norm")
        tf_layer(x)
        ours = tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.1), 2)
        names = "updates_collections=tf.compat.v1.GraphKeys.UPDATE_OPS.*'norm/moving_mean', 'norm/moving_variance']"
        with pytest.raises(ValueError, match=names):
            optimizer.accumulate_update_ops()
        assert tf1.get_collection(tf1.GraphKeys.UPDATE_OPS) == ours
        assert optimizer.accumulate_update_ops(ours) == ours


@pytest.mark.slow
@pytest.mark.law("L13")
def test_averages_of_a_loss_are_not_those_of_batch_norm():
    with tf.Graph().as_default():
        outputs = tf_layer(tf1.placeholder(tf.float32, [None, 5]))
        loss = tf.reduce_mean(tf.square(outputs))
        tf1.train.ExponentialMovingAverage(0.9).apply([loss])
        inner = tf1.train.GradientDescentOptimizer(0.1)
        optimizer, other = [accum.compat.v1.AccumOptimizer(inner, 2) for _ in range(2)]
        assert len(optimizer.accumulate_update_ops()) == 2
        optimizer.minimize(loss)
        assert other.accumulate_update_ops() == []


@pytest.mark.slow
@pytest.mark.law("L17")
def test_averages_are_taken_over_before_the_train_op_is_made():
    with tf.Graph().as_default():
        graph = Graph(tf_layer, (5,), accum_steps=2)
        with pytest.raises(ValueError, match="must be called before the first train op"):
            graph.optimizer.accumulate_update_ops()


@pytest.mark.slow
@pytest.mark.law("L14")
def test_a_single_micro_step_leaves_the_update_ops_where_they_are():
    with tf.Graph().as_default():
        graph = Graph(tf_layer, (5,), accum_steps=1)
        assert graph.taken == []
        assert len(tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)) == 2
