"""C cycles of K micro steps equal C steps of the plain optimizer on the same float32 means (law L1)."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_identical, assert_near
from optimizers import (
    built,
    float32_mean,
    graph_optimizers,
    keras_optimizers,
    keras_weights,
    mainly,
    random_gradients,
)

import accum
import accum.compat.v1

pytestmark = pytest.mark.law("L1")

tf1 = tf.compat.v1

K, CYCLES = 3, 4
SHAPES = [(4, 3), (3,)]


def cycles_of(gradients):
    return [gradients[start : start + K] for start in range(0, len(gradients), K)]


def means_of(gradients):
    return [[float32_mean(parts) for parts in zip(*cycle)] for cycle in cycles_of(gradients)]


def run_keras(optimizer, gradients, first, is_traced):
    """Weights after `optimizer` has been given each list of gradients."""
    variables = keras_weights(first)
    built(optimizer, variables)

    def step(*grads):
        optimizer.apply_gradients(zip(grads, variables))

    step = tf.function(step) if is_traced else step
    for grads in gradients:
        step(*map(tf.constant, grads))
    return [v.numpy() for v in variables]


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("make", keras_optimizers())
def test_keras_optimizers_make_the_plain_step(make):
    is_equal_to_the_plain_step(make, is_traced=False)


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("make", mainly(keras_optimizers(), "keras-Adam", "legacy-Adam"))
def test_keras_optimizers_make_the_plain_step_in_a_function(make):
    is_equal_to_the_plain_step(make, is_traced=True)


def is_equal_to_the_plain_step(make, is_traced):
    first = random_gradients(1, SHAPES, seed=1)[0]
    gradients = random_gradients(K * CYCLES, SHAPES)
    expected = run_keras(make(), means_of(gradients), first, is_traced)
    wrapped = accum.GradientAccumulateOptimizer(make(), accum_steps=K)
    for ours, theirs in zip(run_keras(wrapped, gradients, first, is_traced), expected):
        # Bit-equal but for what the compiler fuses otherwise inside the branch.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=0)


def run_graph(make, gradients, first, use_resource, how):
    """Weights and the global step after the optimizer has been given each list of gradients in a Session."""
    with tf.Graph().as_default(), tf1.Session() as session:
        with tf1.variable_scope("net", use_resource=use_resource):
            variables = [tf1.get_variable("w%d" % i, initializer=value) for i, value in enumerate(first)]
        fed = [tf1.placeholder(tf.float32, value.shape) for value in first]
        step = tf1.train.get_or_create_global_step()
        optimizer = make(step)
        pairs = list(zip(fed, variables))
        if how == "plain":
            micro_step, apply = optimizer.apply_gradients(pairs, step), None
        elif how == "conditional":
            wrapped = accum.compat.v1.AccumOptimizer(optimizer, accum_steps=K)
            micro_step, apply = wrapped.apply_gradients(pairs, step), None
        else:
            wrapped = accum.compat.v1.AccumOptimizer(optimizer, accum_steps=K)
            micro_step, apply, _, _ = wrapped.accumulation_ops(grads_and_vars=pairs, global_step=step)
        session.run(tf1.global_variables_initializer())
        for count, grads in enumerate(gradients, start=1):
            session.run(micro_step, dict(zip(fed, grads)))
            if apply is not None and count % K == 0:
                session.run(apply)
        return session.run(variables), session.run(step)


@pytest.mark.slow
@pytest.mark.law("L3")
@pytest.mark.parametrize(
    "use_resource,how",
    [
        pytest.param(False, "conditional", id="ref-conditional"),
        pytest.param(True, "conditional", id="resource-conditional"),
        pytest.param(True, "explicit", id="resource-explicit"),
        pytest.param(False, "explicit", id="ref-explicit", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("make", graph_optimizers())
def test_graph_optimizers_make_the_plain_step(make, use_resource, how):
    first = random_gradients(1, SHAPES, seed=1)[0]
    gradients = random_gradients(K * CYCLES, SHAPES)
    weights, steps = run_graph(make, gradients, first, use_resource, how)
    assert steps == CYCLES
    assert_identical(weights, plain_graph_weights(make, use_resource))


@functools.lru_cache(maxsize=None)
def plain_graph_weights(make, use_resource):
    """One oracle for both ways to drive the optimizer."""
    first = random_gradients(1, SHAPES, seed=1)[0]
    return run_graph(make, means_of(random_gradients(K * CYCLES, SHAPES)), first, use_resource, "plain")[0]


def mlp():
    inputs = tf.keras.Input((6,))
    hidden = tf.keras.layers.Dense(8, activation="tanh", use_bias=False)(inputs)
    return tf.keras.Model(inputs, tf.keras.layers.Dense(2)(hidden))


def linear():
    """One kernel: a trace of few operations, for many optimizers."""
    inputs = tf.keras.Input((6,))
    return tf.keras.Model(inputs, tf.keras.layers.Dense(2, use_bias=False)(inputs))


def through_fit(make_model, optimizer, batch_size, accum_steps=None, epochs=2, run_eagerly=False):
    """Weights after epochs over 44 examples, which neither batch size divides."""
    random = np.random.RandomState(0)
    x, y = random.normal(size=(44, 6)).astype("float32"), random.normal(size=(44, 2)).astype("float32")
    model = make_model()  # with weights from NumPy: not every TensorFlow's initialisers repeat themselves for a seed
    model.set_weights([0.5 * random.normal(size=weight.shape) for weight in model.get_weights()])
    if accum_steps is not None:
        model = accum.GradientAccumulateModel(accum_steps, inputs=model.inputs, outputs=model.outputs)
    model.compile(optimizer, "mse", run_eagerly=run_eagerly)
    model.fit(x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0)
    return model.get_weights()


FIT = [
    pytest.param(lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9), id="momentum"),
    pytest.param(lambda: tf.keras.optimizers.Adam(0.01), id="adam"),
    pytest.param(lambda: tf.keras.optimizers.SGD(0.1, clipnorm=0.05), id="clipnorm"),
]


@pytest.mark.slow
@pytest.mark.law("L5", "L6")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("make", mainly(FIT, "adam"))
def test_fit_on_ragged_micro_batches_equals_fit_on_the_full_batch(make):
    ours, full = through_fit(mlp, make(), 5, accum_steps=4), through_fit(mlp, make(), 20, run_eagerly=True)
    assert_near(ours, full)


HELD = ("SGD", "Adam", "RMSprop", "Adagrad")  # by the goldens
BUILT_IN_A_TRACE = ("ScheduleFreeAdamW",)  # by Keras' own `fit`, and takes variables for zeros there


@pytest.mark.slow
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("make", keras_optimizers(but=HELD + BUILT_IN_A_TRACE))
def test_fit_with_every_other_optimizer_equals_fit_on_the_full_batch(make):
    # The oracle is traced too: Keras' Nadam makes other steps eagerly.
    ours, full = through_fit(linear, make(), 5, accum_steps=4, epochs=1), through_fit(linear, make(), 20, epochs=1)
    assert_near(ours, full)
