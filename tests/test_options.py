"""Options have one default, whoever takes them."""

import inspect

import pytest
import tensorflow as tf

import accum
import accum.compat.v1

pytestmark = pytest.mark.keras_face

SHARED = ["accumulator_dtype", "nonfinite", "reduction", "sparse", "transform"]


def defaults_of(function):
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


@pytest.mark.parametrize("name", SHARED)
def test_an_option_has_the_same_default_in_keras_and_in_static_graphs(name):
    keras = defaults_of(accum.GradientAccumulateOptimizer.__init__)
    graph = defaults_of(accum.compat.v1.AccumOptimizer.__init__)
    assert keras[name] == graph[name]


@pytest.mark.parametrize("name", SHARED)
def test_a_model_gives_its_optimizer_the_default_of_the_optimizer(name):
    inputs = tf.keras.Input((2,))
    plain = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(inputs))
    model = accum.GradientAccumulateModel.from_model(plain, 2)
    expected = defaults_of(accum.GradientAccumulateOptimizer.__init__)[name]
    assert model.get_config()["accumulation"][name] == expected
