"""Spellings of GradientAccumulator up to 0.3: they work, with a word of what they are called now."""

import numpy as np
import pytest
import tensorflow as tf

import accum

pytestmark = pytest.mark.tf("2.2")

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.normal(size=(20, 3)).astype("float32"), RANDOM.normal(size=(20, 1)).astype("float32")
FIRST = RANDOM.normal(size=(3, 1)).astype("float32")
STEP = 2.0 * X.T @ (X @ FIRST - Y) / len(X)


def parts():
    inputs = tf.keras.Input((3,))
    return {"inputs": inputs, "outputs": tf.keras.layers.Dense(1, use_bias=False)(inputs)}


@pytest.mark.slow
@pytest.mark.law("L1")
@pytest.mark.parametrize("spelling", ["n_gradients", "accum_steps"])
def test_the_model_of_old_accumulates_and_loads(spelling, tmp_path):
    with pytest.warns(DeprecationWarning, match=r"is now called `GradientAccumulateModel\(accum_steps=K"):
        model = accum.GAModelWrapper(mixed_precision=False, **dict(parts(), **{spelling: 3}))
    assert isinstance(model, accum.GradientAccumulateModel)
    model.compile(tf.keras.optimizers.SGD(0.1), tf.keras.losses.MeanSquaredError(), run_eagerly=True)
    model.set_weights([FIRST])
    model.fit(X, Y, batch_size=8, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], FIRST - 0.1 * STEP, rtol=0, atol=2e-6)
    model.save(str(tmp_path / "model.h5"))
    again = tf.keras.models.load_model(str(tmp_path / "model.h5"))
    assert isinstance(again, accum.GradientAccumulateModel) and again.optimizer.accum_steps == 3
    np.testing.assert_array_equal(again.predict(X), model.predict(X))


@pytest.mark.law("L4")
@pytest.mark.parametrize("options,factor", [({}, 1.0), ({"reduction": "SUM"}, 4.0)], ids=["default", "sum"])
def test_the_optimizer_of_old_accumulates_with_its_own_defaults(options, factor):
    with pytest.warns(DeprecationWarning, match="is now called `GradientAccumulateOptimizer`"):
        optimizer = accum.GAOptimizerWrapper(tf.keras.optimizers.SGD(0.1), **options)
    variable = tf.Variable(FIRST)
    for _ in range(4):
        optimizer.apply_gradients([(tf.constant(STEP), variable)])
    np.testing.assert_allclose(variable.numpy(), FIRST - 0.1 * factor * STEP, rtol=0, atol=2e-6)
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config() and isinstance(again, accum.GradientAccumulateOptimizer)


@pytest.mark.law("L17")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_both_spellings_at_once_are_refused():
    with pytest.raises(TypeError, match="`n_gradients` is another name of `accum_steps`"):
        accum.GAModelWrapper(2, n_gradients=4, **parts())
    with pytest.raises(TypeError, match="`n_gradients` is another name of `accum_steps`"):
        accum.GAOptimizerWrapper("sgd", 2, n_gradients=4)
    with pytest.raises(ValueError, match="`accum_steps` must be an int >= 1. Received: accum_steps=0."):
        accum.GAModelWrapper(n_gradients=0, **parts())
