"""The last micro-batch of a batch may run after the loop over the others, so that gradients can be summed earlier.

Workers sum them while it still computes others (tests/replicas/test_workers.py); here, one device does the same.
"""

import numpy as np
import pytest
import tensorflow as tf
from replicas import mirrored
from versions import IS_KERAS_3, TF_VERSION
from worker_problems import CYCLES, problem, tall_network, trained_tall

import accum
from accum import _tf
from accum._engine import _replicas

pytestmark = [
    pytest.mark.slow,
    pytest.mark.tf("2.2"),
    pytest.mark.law("L18"),
    pytest.mark.skipif(TF_VERSION < (2, 5), reason="TF 2.4 and earlier can't sum gradients over workers in packs"),
]


def compiled(model):
    model.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def plainly_trained(make_network, batch_size):
    x, y, _ = problem()
    net = compiled(make_network())
    net.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    return np.concatenate([np.ravel(value) for value in net.get_weights()])


@pytest.mark.parametrize("case", CYCLES)
def test_a_last_micro_batch_outside_of_the_loop_counts_once(monkeypatch, case):
    monkeypatch.setattr(_replicas, "overlap", lambda: not tf.executing_eagerly())
    make_network, accum_steps, is_static = CYCLES[case]
    model = compiled(
        accum.GradientAccumulateModel.from_model(make_network(), accum_steps, micro_batch_size=7, last_cycle="flush")
    )
    weights = trained_tall(model, is_static)
    np.testing.assert_allclose(weights, plainly_trained(make_network, 24 * accum_steps), rtol=0, atol=2e-6)
    assert np.max(np.abs(weights - plainly_trained(make_network, 24 if accum_steps == 2 else 12))) > 1e-3


def test_a_batch_of_one_micro_batch_has_no_other_last_one(monkeypatch):
    monkeypatch.setattr(_replicas, "overlap", lambda: not tf.executing_eagerly())
    x, y, _ = problem()
    model = compiled(accum.GradientAccumulateModel.from_model(tall_network(), micro_batch_size=16))
    model.fit(x[:36], y[:36], batch_size=26, shuffle=False, verbose=0)  # 26 = 10 + 16, and then 10
    weights = np.concatenate([np.ravel(value) for value in model.get_weights()])
    net = compiled(tall_network())
    net.fit(x[:36], y[:36], batch_size=26, shuffle=False, verbose=0)
    expected = np.concatenate([np.ravel(value) for value in net.get_weights()])
    np.testing.assert_allclose(weights, expected, rtol=0, atol=2e-6)


class Rounded(tf.keras.optimizers.SGD):
    """An optimizer that rounds the gradients of each replica."""

    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        rounded = [(tf.round(grad), variable) for grad, variable in grads_and_vars]
        return super().apply_gradients(rounded, *args, **kwargs)


def test_gradients_are_not_summed_ahead_of_what_an_optimizer_does_with_those_of_a_replica():
    assert _tf.inner_optimizer.sums_before_all_else(tf.keras.optimizers.Adam())
    assert not _tf.inner_optimizer.sums_before_all_else(Rounded())
    assert _tf.inner_optimizer.sums_before_all_else(tf.keras.optimizers.SGD(clipnorm=1.0)) != IS_KERAS_3


@pytest.mark.law("L14")
@pytest.mark.parametrize("make", [Rounded, lambda rate: tf.keras.optimizers.SGD(rate, clipnorm=0.5)])
def test_a_logger_changes_no_step_of_several_replicas(make):
    def trained(logs, batch_size=24):
        with mirrored().scope():
            net = tall_network()
            net.compile(accum.GradientAccumulateOptimizer(make(0.1), 1) if logs else make(0.1), "mse")
        x, y, _ = problem()
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)
        net.fit(data, epochs=1, verbose=0, callbacks=[accum.StepLogger(verbose=0)] if logs else [])
        return np.concatenate([np.ravel(value) for value in net.get_weights()])

    np.testing.assert_allclose(trained(True), trained(False), rtol=0, atol=2e-6)
    assert np.max(np.abs(trained(False, 12) - trained(False))) > 1e-3
