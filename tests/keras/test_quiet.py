"""Until the last micro step of a cycle nothing that a reader of the model can see changes (law L2)."""

import numpy as np
import pytest
import tensorflow as tf
from optimizers import graph_optimizers, keras_optimizers, keras_weights, mainly, random_gradients

import accum
import accum.compat.v1

pytestmark = pytest.mark.law("L2")

tf1 = tf.compat.v1

K = 4
SHAPES = [(3, 2), (2,)]


def keras_variables(optimizer):
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)


@pytest.mark.law("L3")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("make", mainly(keras_optimizers(), "keras-Adam", "legacy-Adam"))
def test_keras_weights_slots_and_step_counters_rest_between_steps(make):
    inner = make()
    variables = keras_weights(random_gradients(1, SHAPES, seed=1)[0])
    optimizer = accum.GradientAccumulateOptimizer(inner, accum_steps=K)

    @tf.function
    def micro_step(*grads):
        optimizer.apply_gradients(zip(grads, variables))

    def seen():
        return [v.numpy().tobytes() for v in variables + keras_variables(inner)]

    before = None
    for count, grads in enumerate(random_gradients(2 * K + 1, SHAPES), start=1):
        micro_step(*map(tf.constant, grads))
        assert int(optimizer.iterations.numpy()) == count // K
        assert int(optimizer.micro_step) == count % K
        after = seen()
        if count % K and before is not None:
            assert after == before
        elif before is not None:
            assert after != before
        before = after


@pytest.mark.slow
@pytest.mark.law("L3")
@pytest.mark.parametrize(
    "use_resource", [pytest.param(False, id="ref", marks=pytest.mark.slow), pytest.param(True, id="resource")]
)
@pytest.mark.parametrize("make", graph_optimizers())
def test_graph_weights_slots_and_step_counters_rest_between_steps(make, use_resource):
    with tf.Graph().as_default(), tf1.Session() as session:
        step = tf1.train.get_or_create_global_step()
        with tf1.variable_scope("net", use_resource=use_resource):
            first = random_gradients(1, SHAPES, seed=1)[0]
            variables = [tf1.get_variable("w%d" % i, initializer=value) for i, value in enumerate(first)]
        fed = [tf1.placeholder(tf.float32, shape) for shape in SHAPES]
        inner = make(step)
        optimizer = accum.compat.v1.AccumOptimizer(inner, accum_steps=K)
        train_op = optimizer.apply_gradients(list(zip(fed, variables)), step)
        session.run(tf1.global_variables_initializer())
        watched = variables + list(inner.variables()) + [step]
        before = [value.tobytes() for value in session.run(watched)]
        for count, grads in enumerate(random_gradients(2 * K + 1, SHAPES), start=1):
            session.run(train_op, dict(zip(fed, grads)))
            after = [value.tobytes() for value in session.run(watched)]
            assert session.run([step, optimizer.micro_step]) == [count // K, count % K]
            assert (after == before) is (count % K != 0)
            before = after


def test_no_kernel_of_the_inner_optimizer_runs_between_steps():
    with tf.Graph().as_default(), tf1.Session() as session:
        variable = tf1.get_variable("w", initializer=np.ones(3, np.float32), use_resource=True)
        fed = tf1.placeholder(tf.float32, [3])
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.AdamOptimizer(), accum_steps=2)
        train_op = optimizer.apply_gradients([(fed, variable)])
        session.run(tf1.global_variables_initializer())

        def kernels():
            options, metadata = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE), tf1.RunMetadata()
            session.run(train_op, {fed: np.ones(3)}, options=options, run_metadata=metadata)
            labels = [node.timeline_label for device in metadata.step_stats.dev_stats for node in device.node_stats]
            return [label for label in labels if "= ResourceApplyAdam(" in label]

        assert not kernels()
        assert kernels()
