"""K = 1 as a plain int is the bare optimizer (law L14)."""

import numpy as np
import pytest
import tensorflow as tf
from optimizers import built, graph_optimizers, keras_optimizers, keras_weights, random_gradients

import accum
import accum.compat.v1

pytestmark = pytest.mark.line

tf1 = tf.compat.v1

SHAPES = [(3, 2), (2,)]


@pytest.mark.law("L14")
@pytest.mark.keras_face
@pytest.mark.parametrize("make", keras_optimizers())
def test_keras_single_micro_step_is_the_bare_optimizer_to_the_bit(make):
    first, gradients = random_gradients(1, SHAPES, seed=1)[0], random_gradients(3, SHAPES)

    def run(optimizer):
        variables = keras_weights(first)
        built(optimizer, variables)

        @tf.function
        def step(*grads):
            optimizer.apply_gradients(zip(grads, variables))

        for grads in gradients:
            step(*map(tf.constant, grads))
        ops = sorted(
            op.type for op in step.get_concrete_function(*map(tf.constant, gradients[0])).graph.get_operations()
        )
        return [v.numpy() for v in variables], ops

    wrapped = accum.GradientAccumulateOptimizer(make(), accum_steps=1)
    (ours, our_ops), (theirs, their_ops) = run(wrapped), run(make())
    for one, other in zip(ours, theirs):
        np.testing.assert_array_equal(one, other)
    assert our_ops == their_ops
    assert wrapped.gradients == []


@pytest.mark.law("L14")
@pytest.mark.parametrize("make", graph_optimizers())
def test_graph_single_micro_step_adds_no_op_and_no_variable(make):
    def run(wraps):
        with tf.Graph().as_default() as graph:
            step = tf1.train.get_or_create_global_step()
            variable = tf1.get_variable("w", initializer=np.ones((3, 2), np.float32))
            optimizer = make(step)
            if wraps:
                optimizer = accum.compat.v1.AccumOptimizer(optimizer, accum_steps=1)
            optimizer.apply_gradients([(tf.ones([3, 2]), variable)], step)
            return sorted(op.type for op in graph.get_operations()), [v.name for v in tf1.global_variables()]

    assert run(wraps=True) == run(wraps=False)


@pytest.mark.law("L14")
@pytest.mark.keras_face
def test_a_schedule_that_starts_at_one_has_its_accumulators_from_the_start():
    variable = tf.Variable([0.0])
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps={0: 1, 1: 2})
    optimizer.apply_gradients([(tf.constant([1.0]), variable)])
    assert len(optimizer.gradients) == 1
    np.testing.assert_array_equal(variable.numpy(), [-1.0])
