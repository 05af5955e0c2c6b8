"""The static-graph API on the variables and loops that TF 1 pipelines have (laws L1, L8, L16)."""

import numpy as np
import pytest
import tensorflow as tf
import tf_slim as slim

import accum.compat.v1

tf1 = tf.compat.v1

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.normal(size=(12, 6)).astype("float32"), RANDOM.normal(size=(12, 1)).astype("float32")
FIRST = RANDOM.normal(size=(6, 1)).astype("float32")


def momentum():
    return tf1.train.MomentumOptimizer(0.05, 0.9)


def wrapped(accum_steps, **options):
    return accum.compat.v1.AccumOptimizer(momentum(), accum_steps, **options)


def trained(build, size, steps):
    """Run the train op that `build(x, y)` gives, over `steps` full batches in parts of `size`; returns the weights."""
    with tf.Graph().as_default(), tf1.Session() as session:
        x, y = tf1.placeholder(tf.float32, [None, 6]), tf1.placeholder(tf.float32, [None, 1])
        train_op, weights = build(x, y)
        session.run(tf1.global_variables_initializer())
        for _ in range(steps):
            for start in range(0, len(X), size):
                session.run(train_op, {x: X[start : start + size], y: Y[start : start + size]})
        return session.run(weights)


def mean_squares(x, y, weights):
    return tf.reduce_mean((tf.matmul(x, weights) - y) ** 2)


@pytest.mark.slow
@pytest.mark.law("L1")
@pytest.mark.parametrize("use_resource", [False, True], ids=["ref", "resource"])
def test_partitioned_variables_have_accumulators_with_their_slices(use_resource):
    def build(optimizer):
        def make(x, y):
            partitioner = tf1.fixed_size_partitioner(3)
            with tf1.variable_scope("net", partitioner=partitioner, use_resource=use_resource):
                weights = tf1.get_variable("w", initializer=tf.constant(FIRST))
            train_op = optimizer.minimize(mean_squares(x, y, tf.convert_to_tensor(weights)))
            if optimizer.get_slot_names() and "accum" in optimizer.get_slot_names():
                for part in weights:
                    info = optimizer.get_slot(part, "accum")._save_slice_info
                    assert info.full_name == "net/w/AccumOptimizer/accum"
            return train_op, tf.convert_to_tensor(weights)

        return make

    ours, theirs = trained(build(wrapped(3)), 4, 3), trained(build(momentum()), 12, 3)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)


ROWS = (3, 1)
CUTS = [pytest.param(ROWS, id="rows"), pytest.param((1, 2), id="columns", marks=pytest.mark.slow)]
REF_AND_RESOURCE = [pytest.param(False, id="ref", marks=pytest.mark.slow), pytest.param(True, id="resource")]


@pytest.mark.slow
@pytest.mark.law("L12")
@pytest.mark.parametrize("use_resource", REF_AND_RESOURCE)
@pytest.mark.parametrize("cuts", CUTS)
def test_a_partitioned_table_with_sparse_gradients_is_saved_in_mid_cycle(tmp_path, cuts, use_resource):
    batches = [[0, 1, 5], [5, 6], [2, 0], [6]]

    def run(optimizer, batches, restore=None, save=None):
        with tf.Graph().as_default(), tf1.Session() as session:
            partitioner = tf1.fixed_size_partitioner(max(cuts), axis=int(np.argmax(cuts)))
            with tf1.variable_scope("net", partitioner=partitioner, use_resource=use_resource):
                table = tf1.get_variable("w", [7, 2], initializer=tf1.ones_initializer())
            fed = tf1.placeholder(tf.int32, [None])
            if cuts == ROWS:
                rows = tf1.nn.embedding_lookup(table, fed, partition_strategy="div")
            else:
                rows = tf.concat([tf.gather(part, fed) for part in table], axis=1)
            train_op = optimizer.minimize(tf.reduce_sum(rows**2) / 5.0, tf1.train.get_or_create_global_step())
            session.run(tf1.global_variables_initializer())
            saver = tf1.train.Saver()
            if restore:
                saver.restore(session, restore)
            for batch in batches:
                session.run(train_op, {fed: batch})
            if save:
                saver.save(session, save)
            return session.run(tf.convert_to_tensor(table))

    expected = run(momentum(), [batches[0] + batches[1], batches[2] + batches[3]])
    path = str(tmp_path / "run")
    run(wrapped(2, reduction="sum"), batches[:3], save=path)
    ours = run(wrapped(2, reduction="sum"), batches[3:], restore=path)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-6)


@pytest.mark.law("L16")
def test_accumulators_stand_beside_their_variables():
    with tf.Graph().as_default():
        with tf1.device("/device:CPU:1"):
            variable = tf1.get_variable("w", initializer=tf.constant(FIRST))
        optimizer = wrapped(3)
        optimizer.apply_gradients([(tf.ones_like(variable), variable)])
        accumulator = optimizer.get_slot(variable, "accum")
        assert tf1.DeviceSpec.from_string(accumulator.device).device_index in (1, None)
        assert accumulator.device == variable.device or b"loc:@w" in accumulator.op.colocation_groups()


@pytest.mark.law("L1")
def test_reused_scopes():
    def build(optimizer):
        def make(x, y):
            with tf1.variable_scope("net"):
                weights = tf1.get_variable("w", initializer=tf.constant(FIRST))
            with tf1.variable_scope("net", reuse=True):
                loss = mean_squares(x, y, tf1.get_variable("w"))
            return optimizer.minimize(loss), weights  # within a reused scope no TF 1 optimizer can make its slots

        return make

    ours, theirs = trained(build(wrapped(3)), 4, 3), trained(build(momentum()), 12, 3)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.law("L1")
def test_gradients_of_unknown_static_shape():
    def build(optimizer):
        def make(x, y):
            weights = tf1.get_variable("w", initializer=tf.constant(FIRST))
            ((grad, var),) = optimizer.compute_gradients(mean_squares(x, y, weights))
            return optimizer.apply_gradients([(tf1.placeholder_with_default(grad, None), var)]), weights

        return make

    ours, theirs = trained(build(wrapped(3)), 4, 3), trained(build(momentum()), 12, 3)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.law("L1", "L3")
def test_slim_train_op_takes_it_as_any_optimizer():
    def build(optimizer):
        def make(x, y):
            with tf1.variable_scope("net"):
                weights = slim.model_variable("w", initializer=tf.constant(FIRST), shape=None)
            step = tf1.train.get_or_create_global_step()
            train_op = slim.learning.create_train_op(mean_squares(x, y, weights), optimizer)
            return train_op, [weights, step]

        return make

    (ours, our_steps), (theirs, their_steps) = trained(build(wrapped(3)), 4, 3), trained(build(momentum()), 12, 3)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)
    assert our_steps == their_steps == 3


@pytest.mark.slow
@pytest.mark.law("L3")
def test_a_monitored_session_stops_at_steps(tmp_path):
    with tf.Graph().as_default():
        step = tf1.train.get_or_create_global_step()
        weights = tf1.get_variable("w", initializer=tf.constant(FIRST))
        train_op = wrapped(3).minimize(mean_squares(tf.constant(X), tf.constant(Y), weights), step)
        runs = 0
        hooks = [tf1.train.StopAtStepHook(last_step=4)]
        with tf1.train.MonitoredTrainingSession(checkpoint_dir=str(tmp_path), hooks=hooks) as session:
            while not session.should_stop():
                session.run(train_op)
                runs += 1
        assert runs == 12
    names = [name for name, _ in tf1.train.list_variables(str(tmp_path))]
    assert "w/AccumOptimizer/accum" in names
    assert "AccumOptimizer/micro_step" in names


@pytest.mark.slow
@pytest.mark.law("L6")
@pytest.mark.parametrize("flushes", [False, True], ids=["left", "flushed"])
def test_flush_hook_applies_the_last_cycle_before_the_last_checkpoint(tmp_path, flushes):
    with tf.Graph().as_default():
        step = tf1.train.get_or_create_global_step()
        weights = tf1.get_variable("w", initializer=[0.0])
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(1.0), accum_steps=3)
        fed = tf1.placeholder(tf.float32, [1])
        train_op = optimizer.apply_gradients([(fed, weights)], step)
        hooks = [accum.compat.v1.FlushHook(optimizer)] if flushes else []
        with tf1.train.MonitoredTrainingSession(checkpoint_dir=str(tmp_path), chief_only_hooks=hooks) as session:
            for grad in (1.0, 2.0, 3.0, 10.0, 20.0):
                session.run(train_op, {fed: [grad]})
    reader = tf1.train.load_checkpoint(str(tmp_path))
    read = [reader.get_tensor(name) for name in ("w", "global_step", "AccumOptimizer/micro_step")]
    assert read == ([[-17.0], 2, 0] if flushes else [[-2.0], 1, 2])


@pytest.mark.law("L17")
def test_flush_needs_a_train_op_and_the_hook_an_optimizer():
    with tf.Graph().as_default():
        with pytest.raises(ValueError, match="needs a train op: create it first"):
            wrapped(3).flush()
        with pytest.raises(TypeError, match="must be an `AccumOptimizer`"):
            accum.compat.v1.FlushHook(momentum())


@pytest.mark.law("L17")
def test_the_graph_reads_in_scopes():
    with tf.Graph().as_default() as graph:
        weights = tf1.get_variable("w", initializer=tf.constant(FIRST))
        loss = mean_squares(tf.constant(X), tf.constant(Y), weights)
        optimizer = wrapped(3)
        optimizer.minimize(loss)
        optimizer.accumulation_ops(loss)
        scopes = {"/".join(op.name.split("/")[:2]) for op in graph.get_operations() if op.name.startswith("Accum")}
    assert scopes >= {"AccumOptimizer/" + name for name in ("cycle", "micro_step", "weight_sum")}
    assert scopes >= {"AccumOptimizer_1/" + name for name in ("accumulate", "apply", "zero")}


@pytest.mark.law("L8")
def test_a_missing_gradient_counts_as_zero_and_a_variable_without_any_rests():
    with tf.Graph().as_default(), tf1.Session() as session:
        first, second, unused = [tf1.get_variable(name, initializer=[1.0]) for name in ("first", "second", "unused")]
        fed = tf1.placeholder(tf.float32, [1])
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(1.0), 2)
        both = optimizer.apply_gradients([(fed, first), (fed, second), (None, unused)])
        one = optimizer.apply_gradients([(fed, first), (None, second), (None, unused)])
        assert [v.op.name for v in tf1.global_variables() if "unused" in v.op.name] == ["unused"]
        session.run(tf1.global_variables_initializer())
        session.run(both, {fed: [2.0]})
        session.run(one, {fed: [4.0]})
        assert session.run([first, second, unused]) == [[-2.0], [0.0], [1.0]]
