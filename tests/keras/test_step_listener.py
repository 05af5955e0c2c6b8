"""A `StepListener`, as CONTRIBUTING says how to write one: the norm of each update's gradient in the logs."""

import numpy as np
import pytest
import tensorflow as tf
from replicas import mirrored

import accum
from accum._engine import _replicas
from accum._engine._gradients import squared_norm
from accum._keras._model import _options
from accum._keras._optimizer._internals import internals_of
from accum._keras._optimizer._wrapper import listen
from accum._keras._step_listener import StepListener
from accum._tf.optimizers import loss_scale_of
from accum._tf.variables import new_statistic

pytestmark = pytest.mark.tf("2.2")

X = np.random.RandomState(0).normal(size=(16, 3)).astype("float32")
Y = np.random.RandomState(1).normal(size=(16, 1)).astype("float32")


class UpdateNorm(StepListener):
    """Logs the norm of the gradient of the latest update as "update_norm"."""

    def __init__(self, strategy, optimizer):
        self.inner = optimizer.optimizer
        with strategy.scope():
            self.norm = new_statistic("update_norm", [], tf.float32)

    def on_update(self, grads_and_vars, changed):
        norm = tf.sqrt(squared_norm([grad for grad, _ in grads_and_vars])) / loss_scale_of(self.inner)
        return [_replicas.local_variable(self.norm).assign(norm, read_value=False)]

    def end_batch(self, logs):
        return {"update_norm": _replicas.local_variable(self.norm).read_value()}


class ChangedNorm(UpdateNorm):
    """Logs the norm of the gradient that the inner optimizer gets."""

    def on_update(self, grads_and_vars, changed):
        return super().on_update(changed, changed)


class LogUpdateNorm(tf.keras.callbacks.Callback):
    """What users would pass to `fit`."""

    def set_model(self, model):
        listen(model, UpdateNorm(model.distribute_strategy, model.optimizer))


def compiled():
    model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    return model


def norm_of_full_batch(model):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(X) - Y) ** 2)
    return float(tf.linalg.global_norm(tape.gradient(loss, model.trainable_variables)))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("options", [{"micro_batch_size": 3}, {"accum_steps": 2}], ids=["split", "cycle"])
def test_a_listener_logs_the_norm_of_each_update(options, replicas):
    strategy = mirrored() if replicas == 2 else tf.distribute.get_strategy()
    with strategy.scope():
        model = accum.GradientAccumulateModel.from_model(compiled(), **options)
    expected = norm_of_full_batch(model)
    size = 8 if "accum_steps" in options else 16
    history = model.fit(X, Y, batch_size=size, shuffle=False, verbose=0, callbacks=[LogUpdateNorm()]).history
    np.testing.assert_allclose(history["update_norm"], [expected], rtol=2e-6)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_listener_sees_the_gradient_before_and_after_it_is_changed(replicas, monkeypatch):
    strategy = mirrored() if replicas == 2 else tf.distribute.get_strategy()
    norms = []
    for listener in (UpdateNorm, ChangedNorm):
        monkeypatch.setitem(_options.LISTENERS, "recompute", listener)
        with strategy.scope():
            model = accum.GradientAccumulateModel.from_model(compiled(), micro_batch_size=3, transform=halved)
        expected = norm_of_full_batch(model)
        history = model.fit(X, Y, batch_size=16, shuffle=False, verbose=0).history
        norms.append(history["update_norm"][0] / expected)
    np.testing.assert_allclose(norms, [1.0, 0.5], rtol=2e-6)


def halved(grads_and_vars):
    return [(0.5 * grad, var) for grad, var in grads_and_vars]


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_option_has_a_listener(replicas, monkeypatch):
    monkeypatch.setitem(_options.LISTENERS, "recompute", UpdateNorm)
    strategy = mirrored() if replicas == 2 else tf.distribute.get_strategy()
    with strategy.scope():
        with_it = accum.GradientAccumulateModel.from_model(compiled(), micro_batch_size=3, recompute=True)
        without = accum.GradientAccumulateModel.from_model(compiled(), micro_batch_size=3, recompute=False)
        with_it.compile(with_it.optimizer, "mse")  # it comes again, and is heard once
    assert [type(one) for one in internals_of(with_it.optimizer).listeners] == [UpdateNorm]
    expected = norm_of_full_batch(with_it)
    history = with_it.fit(X, Y, batch_size=16, shuffle=False, verbose=0).history
    np.testing.assert_allclose(history["update_norm"], [expected], rtol=2e-6)
    assert "update_norm" not in without.fit(X, Y, batch_size=16, verbose=0).history
