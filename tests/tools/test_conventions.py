"""What TensorFlow's own optimizers are by default in each version: recorded for people who migrate."""

import inspect
import json

import numpy as np
import pytest
import tensorflow as tf
from optimizers import legacy_family

tf1 = tf.compat.v1
KERAS = ("SGD", "Adam", "RMSprop", "Adagrad")
GRAPH = ("MomentumOptimizer", "AdamOptimizer", "RMSPropOptimizer", "AdagradOptimizer")
TOLD = ("learning_rate", "momentum", "rho", "decay", "beta_1", "beta_2", "epsilon", "initial_accumulator_value")


def told(config):
    told = {name: value for name, value in config.items() if name in TOLD}
    numbers = {name: value for name, value in told.items() if isinstance(value, (float, np.floating))}
    return {name: float(f"{value:.6g}") for name, value in numbers.items()}


@pytest.mark.tf("2.2")
def test_the_defaults_of_keras_optimizers_are_recorded(record_property):
    defaults = {name: told(getattr(tf.keras.optimizers, name)().get_config()) for name in KERAS}
    record_property("keras defaults", json.dumps(defaults, sort_keys=True))
    if legacy_family() not in (None, tf.keras.optimizers):
        defaults = {name: told(getattr(legacy_family(), name)().get_config()) for name in KERAS}
        record_property("keras legacy defaults", json.dumps(defaults, sort_keys=True))
    assert defaults["Adagrad"]["initial_accumulator_value"] == 0.1 and defaults["Adam"]["epsilon"] == 1e-7


def test_the_defaults_of_graph_optimizers_are_recorded(record_property):
    defaults = {}
    for name in GRAPH:
        parameters = inspect.signature(getattr(tf1.train, name).__init__).parameters.values()
        defaults[name] = told({parameter.name: parameter.default for parameter in parameters})
    record_property("graph defaults", json.dumps(defaults, sort_keys=True))
    assert defaults["AdamOptimizer"]["epsilon"] == 1e-8 and defaults["RMSPropOptimizer"]["epsilon"] == 1e-10


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("family", ["keras", "legacy"])
def test_the_first_steps_of_keras_optimizers_are_recorded(family, record_property):
    """The first step of a single weight 1 with gradient 0.5. It shows where epsilon is added, and the initial slots."""
    module = tf.keras.optimizers if family == "keras" else legacy_family()
    if module is None or (family == "legacy" and module is tf.keras.optimizers):
        pytest.skip("this version has one family of Keras optimizers")
    makes = {
        "Adam": lambda: module.Adam(0.5, epsilon=1.0),
        "RMSprop": lambda: module.RMSprop(0.5, epsilon=1.0),
        "RMSprop, momentum": lambda: module.RMSprop(0.5, epsilon=1.0, momentum=0.5),
        "Adagrad": lambda: module.Adagrad(0.5, epsilon=1.0),
    }
    steps = {}
    for name, make in makes.items():
        weight = tf.Variable([1.0])
        make().apply_gradients([(tf.constant([0.5]), weight)])
        steps[name] = round(1.0 - float(weight.numpy()[0]), 6)
    record_property(f"{family} first steps", json.dumps(steps, sort_keys=True))
    assert all(0.0 < step < 1.0 for step in steps.values())


def test_the_first_steps_of_graph_optimizers_are_recorded(record_property):
    makes = {
        "Adam": lambda: tf1.train.AdamOptimizer(0.5, epsilon=1.0),
        "RMSprop": lambda: tf1.train.RMSPropOptimizer(0.5, epsilon=1.0),
        "RMSprop, momentum": lambda: tf1.train.RMSPropOptimizer(0.5, epsilon=1.0, momentum=0.5),
        "Adagrad": lambda: tf1.train.AdagradOptimizer(0.5),
    }
    steps = {}
    for name, make in makes.items():
        with tf.Graph().as_default(), tf1.Session() as session:
            weight = tf1.get_variable("weight", initializer=[1.0])
            train_op = make().apply_gradients([(tf.constant([0.5]), weight)])
            session.run(tf1.global_variables_initializer())
            session.run(train_op)
            steps[name] = round(1.0 - float(session.run(weight)[0]), 6)
    record_property("graph first steps", json.dumps(steps, sort_keys=True))
    assert all(0.0 < step < 1.0 for step in steps.values())
