"""An accumulating optimizer is saved as a config and made again without custom objects."""

import json

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_identical
from optimizers import built, families, keras_optimizers
from versions import TF_VERSION

import accum

pytestmark = pytest.mark.tf("2.2")


@pytest.mark.parametrize("make", keras_optimizers())
def test_keras_makes_an_equal_wrapper_from_its_config(make):
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


@pytest.mark.parametrize("family", families())
def test_wrapper_is_an_optimizer_of_the_inner_family(family):
    optimizer = accum.GradientAccumulateOptimizer(family.SGD(0.5), 2)
    assert isinstance(optimizer, family.Optimizer)
    assert isinstance(optimizer, accum.GradientAccumulateOptimizer)


@pytest.mark.parametrize("family", families())
def test_optimizers_of_one_family_have_one_class(family):
    optimizer = accum.GradientAccumulateOptimizer(family.SGD(0.5), 2)
    assert type(accum.GradientAccumulateOptimizer(family.Adam(), 3)) is type(optimizer)
    assert type(type(optimizer)(family.SGD(0.5), 2)) is type(optimizer)
    assert type(type(optimizer).from_config(optimizer.get_config())) is type(optimizer)


def test_learning_rate_is_the_inner_one_and_can_be_set():
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.5), 2)
    optimizer.learning_rate = 0.25
    assert float(tf.keras.backend.get_value(optimizer.optimizer.learning_rate)) == 0.25
    optimizer.lr = 0.125
    assert float(tf.keras.backend.get_value(optimizer.learning_rate)) == 0.125


def test_hyperparameters_are_the_inner_ones():
    inner = tf.keras.optimizers.SGD(0.5, momentum=0.25, clipnorm=2.0)
    optimizer = accum.GradientAccumulateOptimizer(inner, 2)
    assert (float(tf.keras.backend.get_value(optimizer.momentum)), optimizer.clipnorm) == (0.25, 2.0)
    optimizer.momentum = 0.75
    assert float(tf.keras.backend.get_value(inner.momentum)) == 0.75
    with pytest.raises(AttributeError):
        optimizer.no_such_hyperparameter  # noqa: B018


def test_an_optimizer_of_the_user_s_own_called_like_one_of_keras_comes_back(tmp_path):
    if TF_VERSION < (2, 13):
        pytest.skip("files that name the package of a class came with TF 2.13")
    SGD = tf.keras.utils.register_keras_serializable("mine")(type("SGD", (tf.keras.optimizers.SGD,), {}))
    optimizer = accum.GradientAccumulateOptimizer(SGD(0.5), 2)
    again = accum.GradientAccumulateOptimizer.from_config(json.loads(json.dumps(optimizer.get_config(), default=float)))
    assert type(again.optimizer) is SGD


def test_from_config_keeps_a_subclass():
    class Mine(accum.GradientAccumulateOptimizer):
        pass

    optimizer = Mine("SGD", 3)
    assert isinstance(type(optimizer).from_config(optimizer.get_config()), Mine)


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
def test_a_plain_model_with_the_wrapper_loads_from_h5(family, tmp_path):
    inputs = tf.keras.Input((2,))
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(inputs))
    model.compile(
        accum.GradientAccumulateOptimizer(family.Adam(0.5), accum_steps=2), tf.keras.losses.MeanSquaredError()
    )
    model.fit(np.ones((4, 2)), np.ones((4, 1)), batch_size=1, verbose=0)
    model.save(str(tmp_path / "model.h5"))
    again = tf.keras.models.load_model(str(tmp_path / "model.h5"))
    assert again.optimizer.accum_steps == 2
    assert int(again.optimizer.iterations.numpy()) == 2
    assert_identical(again.get_weights(), model.get_weights())


def doubled(grads_and_vars):
    return [(2.0 * grad, var) for grad, var in grads_and_vars]


REGISTERS = hasattr(tf.keras.utils, "register_keras_serializable")
if REGISTERS:
    doubled = tf.keras.utils.register_keras_serializable("accum_tests")(doubled)


def sum_and_move(optimizer):
    """The dtype of a sum in mid-cycle, and how far a step moves a weight of 1 by gradients of 1."""
    var = tf.Variable([1.0])
    optimizer = built(optimizer, [var])
    optimizer.apply_gradients([(tf.constant([1.0]), var)])
    dtype = optimizer.gradients[0].dtype
    optimizer.apply_gradients([(tf.constant([1.0]), var)])
    return dtype, float(1.0 - var.numpy()[0])


@pytest.mark.skipif(not REGISTERS, reason="TF 1.15 has no registry of functions")
@pytest.mark.parametrize("extra", [{}, {"is_legacy_optimizer": True}], ids=["own", "as Keras 2.11 writes it"])
def test_an_optimizer_from_a_config_accumulates_and_transforms_as_before(extra):
    options = {"accumulator_dtype": "float64", "transform": doubled}
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.125), 2, **options)
    plain = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.125), 2)
    configs = [dict(made.get_config(), **extra) for made in (optimizer, plain)]
    made, other = (accum.GradientAccumulateOptimizer.from_config(config) for config in configs)
    assert sum_and_move(made) == sum_and_move(optimizer) == (tf.float64, 0.25)
    assert sum_and_move(other) == (tf.float32, 0.125)
