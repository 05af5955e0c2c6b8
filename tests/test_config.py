"""An accumulating optimizer is saved as a config and made again without custom objects."""

import json

import pytest
import tensorflow as tf
from optimizers import keras_optimizers

import accum

pytestmark = pytest.mark.keras_face


@pytest.mark.parametrize("make", keras_optimizers())
def test_config_round_trip_by_keras(make):
    options = {"accum_steps": {0: 2, 5: 3}, "reduction": "sum", "nonfinite": "skip_micro", "sparse": "dense"}
    optimizer = accum.GradientAccumulateOptimizer(make(), name="mine", accumulator_dtype="float64", **options)
    config = tf.keras.optimizers.serialize(optimizer)
    again = tf.keras.optimizers.deserialize(config)
    assert isinstance(again, accum.GradientAccumulateOptimizer)
    assert isinstance(optimizer.optimizer, type(again.optimizer))  # 2.9 and 2.10 restore a legacy class as its base
    assert again.accum_steps == {0: 2, 5: 3}
    assert again.get_config() == optimizer.get_config()


def test_config_is_json():
    config = accum.GradientAccumulateOptimizer("adam", accum_steps={0: 2, 5: 3}).get_config()
    assert json.loads(json.dumps(config, default=float))["accum_steps"] == {"0": 2, "5": 3}


def test_wrapper_is_an_optimizer_of_the_inner_family():
    for family in (tf.keras.optimizers, getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers)):
        optimizer = accum.GradientAccumulateOptimizer(family.SGD(0.5), 2)
        assert isinstance(optimizer, family.Optimizer) == isinstance(family.SGD(), family.Optimizer)
        assert isinstance(optimizer, accum.GradientAccumulateOptimizer)


def test_learning_rate_is_the_inner_one_and_can_be_set():
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.5), 2)
    optimizer.learning_rate = 0.25
    assert float(tf.keras.backend.get_value(optimizer.optimizer.learning_rate)) == 0.25
    optimizer.lr = 0.125
    assert float(tf.keras.backend.get_value(optimizer.learning_rate)) == 0.125
