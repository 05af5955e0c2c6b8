"""Optimizers of the user's own, of Keras and of the lineage in a static graph (laws L1, L7)."""

import numpy as np
import pytest
import tensorflow as tf
from optimizers import legacy_family

import accum.compat.v1

tf1 = tf.compat.v1

K = 4
GRADIENTS = np.random.RandomState(0).normal(size=(3 * K, 5)).astype("float32")
KERAS = legacy_family()  # the new ones need eager execution


class Clipped(tf1.train.Optimizer):
    """A wrapper as pipelines have them: clips by the global norm and hands on."""

    def __init__(self, inner):
        super().__init__(False, "Clipped")
        self._inner = inner
        self.calls = 0

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        self.calls += 1
        grads, variables = zip(*grads_and_vars)
        return self._inner.apply_gradients(
            list(zip(tf.clip_by_global_norm(grads, 0.5)[0], variables)), global_step=global_step, name=name
        )


def run(make, gradients):
    """Weights and steps after a train op made by `make()` has been given `gradients`."""
    with tf.Graph().as_default(), tf1.Session() as session:
        step = tf1.train.get_or_create_global_step()
        weights = tf1.get_variable("w", initializer=np.ones(5, "float32"), use_resource=True)
        fed = tf1.placeholder(tf.float32, [5])
        train_op = make().apply_gradients([(fed, weights)], global_step=step)
        session.run(tf1.global_variables_initializer())
        for grad in gradients:
            session.run(train_op, {fed: grad})
        return session.run([weights, step])


def means():
    return GRADIENTS.reshape(3, K, 5).mean(1)


def momentum():
    return tf1.train.MomentumOptimizer(0.1, 0.9)


def clipped(grad):
    return grad * min(1.0, 0.5 / np.linalg.norm(grad))


def by_momentum(gradients):
    weights, velocity = np.ones(5), 0.0
    for grad in gradients.astype("float64"):
        velocity = 0.9 * velocity + grad
        weights = weights - 0.1 * velocity
    return weights


@pytest.mark.law("L7")
def test_a_wrapper_of_the_user_s_own_inside_sees_the_accumulated_gradient():
    ours, steps = run(lambda: accum.compat.v1.AccumOptimizer(Clipped(momentum()), K), GRADIENTS)
    expected = by_momentum(np.array([clipped(mean) for mean in means()]))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-6)
    assert steps == 3


@pytest.mark.law("L7")
def test_a_wrapper_of_the_user_s_own_around_sees_each_micro_batch():
    ours, steps = run(lambda: Clipped(accum.compat.v1.AccumOptimizer(momentum(), K)), GRADIENTS)
    expected = by_momentum(np.array([clipped(grad) for grad in GRADIENTS]).reshape(3, K, 5).mean(1))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-6)
    assert steps == 3


@pytest.mark.law("L7")
@pytest.mark.parametrize("options", [{"clipnorm": 0.5}, {"clipvalue": 0.1}], ids=["clipnorm", "clipvalue"])
def test_clipping_of_a_keras_optimizer_acts_on_the_accumulated_gradient(options):
    ours, steps = run(lambda: accum.compat.v1.AccumOptimizer(KERAS.SGD(1.0, **options), K), GRADIENTS)
    clip = clipped if "clipnorm" in options else lambda grad: np.clip(grad, -0.1, 0.1)
    np.testing.assert_allclose(ours, 1.0 - sum(clip(mean) for mean in means()), rtol=0, atol=2e-6)
    assert steps == 3


@pytest.mark.law("L7")
def test_adaptive_clipping_acts_on_the_accumulated_gradient():
    def transform(grads_and_vars):
        grads, variables = zip(*grads_and_vars)
        return list(zip(accum.adaptive_clip_grad(variables, grads, clip_factor=0.1), variables))

    sgd = tf1.train.GradientDescentOptimizer
    ours, _ = run(lambda: accum.compat.v1.AccumOptimizer(sgd(1.0), K, transform=transform), GRADIENTS)
    weights = np.ones(5)
    for mean in means().astype("float64"):
        weights = weights - mean * min(1.0, 0.1 * max(np.linalg.norm(weights), 1e-3) / np.linalg.norm(mean))
    np.testing.assert_allclose(ours, weights, rtol=0, atol=2e-6)


@pytest.mark.law("L1")
def test_h2g_net_s_steps_per_update_is_accum_steps():
    with pytest.warns(DeprecationWarning, match="now called `accum_steps`"):
        ours, steps = run(lambda: accum.compat.v1.AccumOptimizer(momentum(), steps_per_update=K), GRADIENTS)
    np.testing.assert_allclose(ours, by_momentum(means()), rtol=0, atol=2e-6)
    assert steps == 3


@pytest.mark.law("L1")
def test_h2g_net_s_adam_accumulated_is_adam_on_the_full_batch():
    with pytest.warns(DeprecationWarning, match="AccumOptimizer"):
        ours, steps = run(lambda: accum.compat.v1.AdamAccumulated(accumulation_steps=K, learning_rate=0.1), GRADIENTS)
    weights, m, v = np.ones(5), 0.0, 0.0
    for t, grad in enumerate(means().astype("float64"), 1):
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        weights = weights - 0.1 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (np.sqrt(v) + 1e-7)
    np.testing.assert_allclose(ours, weights, rtol=0, atol=2e-6)
    assert steps == 3


@pytest.mark.law("L17")
def test_both_spellings_of_accum_steps_are_one_too_many():
    with pytest.raises(ValueError, match="Pass `accum_steps` only"):
        accum.compat.v1.AccumOptimizer(momentum(), 4, steps_per_update=4)
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="`steps_per_update` must be an int >= 1"):
        accum.compat.v1.AccumOptimizer(momentum(), steps_per_update=0)
