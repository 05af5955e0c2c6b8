"""What an optimizer has traced is freed with it, and freeing it leaves the sums of other libraries alone."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from versions import IS_KERAS_3

import accum

pytestmark = pytest.mark.tf("2.2")


def graphs_alive():
    gc.collect()
    return [obj for obj in gc.get_objects() if issubclass(type(obj), tf.Graph)]


def train_by_a_function():
    var = tf.Variable([1.0])
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.1), accum_steps=2)

    @tf.function
    def micro_step(grad):
        optimizer.apply_gradients([(grad, var)])

    micro_step(tf.ones([1]))


@pytest.mark.slow
def test_what_was_traced_is_freed_with_its_optimizer():
    train_by_a_function()  # makes what is made once
    before = graphs_alive()  # kept, so that no new graph gets the identity of an old one
    earlier = {id(graph) for graph in before}
    train_by_a_function()
    assert [graph for graph in graphs_alive() if id(graph) not in earlier] == []


def sums_doubled(grads_and_vars):
    return [(2.0 * grad, var) for grad, var in grads_and_vars]


class SumsByItself(tf.keras.optimizers.SGD):
    """As Horovod makes one: its sum is not Keras'."""

    def aggregate_gradients(self, grads_and_vars):
        return sums_doubled(grads_and_vars)


def moved_by_one_step(inner):
    var = tf.Variable([1.0])
    optimizer = accum.GradientAccumulateOptimizer(inner, accum_steps=2)
    for _ in range(2):
        optimizer.apply_gradients([(tf.ones([1]), var)])
    return var.numpy()


@pytest.mark.law("L7")
@pytest.mark.skipif(
    IS_KERAS_3 or not hasattr(tf.keras.optimizers.SGD, "aggregate_gradients"), reason="Keras 2 since 2.11 calls it"
)
def test_an_inner_optimizer_that_sums_in_its_own_way_still_does():
    np.testing.assert_allclose(moved_by_one_step(SumsByItself(0.1)), [0.8], rtol=1e-6)


@pytest.mark.law("L7")
@pytest.mark.skipif(
    IS_KERAS_3 or not hasattr(tf.keras.optimizers, "legacy"), reason="legacy optimizers have a name of their own here"
)
def test_a_gradient_aggregator_of_the_inner_optimizer_still_sums():
    inner = tf.keras.optimizers.legacy.SGD(0.1, gradient_aggregator=sums_doubled)
    np.testing.assert_allclose(moved_by_one_step(inner), [0.8], rtol=1e-6)


def normalised():
    layers = tf.keras.layers
    return tf.keras.Sequential([tf.keras.Input((3,)), layers.Dense(2), layers.BatchNormalization(), layers.Dense(1)])


def references_after_training(options):
    """Train a model on one batch and drop it. Returns weak references to it and its layers."""
    model = accum.GradientAccumulateModel.from_model(normalised(), **options)
    model.compile("adam", "mse", **({"jit_compile": False} if IS_KERAS_3 else {}))
    model.fit(np.ones((4, 3), "float32"), np.ones((4, 1), "float32"), batch_size=4, verbose=0)
    return [weakref.ref(part) for part in [model] + model.layers]


def alive_after(count, options):
    references = [reference for _ in range(count) for reference in references_after_training(options)]
    tf.keras.backend.clear_session()
    gc.collect()
    return [reference() for reference in references if reference() is not None]


SPLIT = [
    {"micro_batch_size": 3},
    {"micro_batch_size": "auto"},
    {"micro_batch_size": 3, "whole_batch": "loss"},
    {"micro_batch_size": 3, "whole_batch": "all"},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", SPLIT, ids=str)
@pytest.mark.filterwarnings("ignore:Batch normalization updates")
def test_a_model_that_is_dropped_is_freed_with_all_that_it_traced(options):
    """In plain Keras since 2.11, the graphs of the train step stay, and with them the memory of the weights."""
    alive_after(1, options)  # makes what is made once
    before = len(graphs_alive())
    assert alive_after(2, options) == []
    assert len(graphs_alive()) == before


@pytest.mark.slow
def test_of_twenty_models_that_are_made_trained_and_dropped_none_is_alive():
    assert alive_after(20, {"micro_batch_size": 3, "whole_batch": "all"}) == []
