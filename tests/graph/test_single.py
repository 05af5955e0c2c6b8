"""K = 1 as a plain int is the plain optimizer (law L14)."""

import logging

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_identical, assert_near
from optimizers import built, graph_optimizers, keras_optimizers, keras_weights, random_gradients
from warned import warned

import accum
import accum.compat.v1

pytestmark = pytest.mark.law("L14")

tf1 = tf.compat.v1

SHAPES = [(3, 2), (2,)]


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("make", keras_optimizers())
def test_keras_single_micro_step_is_the_plain_optimizer_to_the_bit(make):
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
    assert_identical(ours, theirs)
    assert our_ops == their_ops
    assert wrapped.gradients == []


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


@pytest.mark.slow
@pytest.mark.tf("2.2")
def test_a_schedule_that_starts_at_one_has_its_accumulators_from_the_start():
    variable = tf.Variable([0.0])
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps={0: 1, 1: 2})
    optimizer.apply_gradients([(tf.constant([1.0]), variable)])
    assert len(optimizer.gradients) == 1
    np.testing.assert_array_equal(variable.numpy(), [-1.0])


@pytest.mark.slow
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("options", [{"accum_steps": 1}, {"micro_batch_size": 4}], ids=str)
def test_a_batch_without_examples_is_a_step_as_in_plain_keras(options):
    """Momentum moves the weights once more."""

    def run(wrap):
        model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(2)])
        model.set_weights([np.ones((3, 2)), np.zeros(2)])
        model = wrap(model)
        model.compile(tf.keras.optimizers.SGD(0.1, momentum=0.5), "mse", run_eagerly=True)
        for count in (4, 0):
            model.train_on_batch(np.ones((count, 3), "float32"), np.ones((count, 2), "float32"))
        return model.get_weights() + [int(model.optimizer.iterations.numpy())]

    plain = run(lambda model: model)
    assert plain[-1] == 2
    assert_near(run(lambda model: accum.GradientAccumulateModel.from_model(model, **options)), plain)


def said_of_missing_gradients(optimizer, is_traced):
    """What Keras says, by `warnings` or, up to Keras 2, by TensorFlow's logger."""
    variables, said = keras_weights([np.ones((3, 2), "float32"), np.ones((2,), "float32")]), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())

    def apply():
        optimizer.apply_gradients([(tf.ones([3, 2]), variables[0]), (None, variables[1])])

    tf.get_logger().addHandler(handler)
    try:
        with warned() as given:
            (tf.function(apply) if is_traced else apply)()
    finally:
        tf.get_logger().removeHandler(handler)
    return [line.split("[")[0] for line in said + given if "radients do not exist" in line]


@pytest.mark.slow
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("is_traced", [False, True], ids=["eager", "traced"])
def test_keras_warns_of_variables_without_gradients_as_ever(is_traced):
    plain = said_of_missing_gradients(tf.keras.optimizers.SGD(0.1), is_traced)
    ours = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.1), accum_steps=1)
    assert said_of_missing_gradients(ours, is_traced) == plain != []
