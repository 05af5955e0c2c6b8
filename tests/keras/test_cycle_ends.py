"""Partial cycles: flush, carry and drop, by the wrapper and by the model (law L6)."""

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_near

import accum
import accum.compat.v1

tf1 = tf.compat.v1


@pytest.mark.law("L6")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("is_traced", [False, True], ids=["eager", "function"])
def test_flush_divides_by_what_is_there_and_reset_discards(is_traced):
    variable = tf.Variable([0.0])
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps=4)

    def micro_step(grad):
        optimizer.apply_gradients([(grad, variable)])

    micro_step = tf.function(micro_step) if is_traced else micro_step
    for grad in (1.0, 3.0):
        micro_step(tf.constant([grad]))
    np.testing.assert_array_equal(optimizer.gradients[0].numpy(), [4.0])
    optimizer.flush()
    optimizer.flush()  # with nothing accumulated it changes nothing
    assert (variable.numpy()[0], int(optimizer.iterations.numpy())) == (-2.0, 1)
    micro_step(tf.constant([np.nan]))
    optimizer.reset()
    assert int(optimizer.micro_step) == 0
    np.testing.assert_array_equal(optimizer.gradients[0].numpy(), [0.0])
    for _ in range(4):
        micro_step(tf.constant([1.0]))
    assert (variable.numpy()[0], int(optimizer.iterations.numpy())) == (-3.0, 2)


@pytest.mark.law("L6")
@pytest.mark.parametrize("use_resource", [False, True], ids=["ref", "resource"])
def test_explicit_ops_apply_what_is_there_and_zero_discards(use_resource):
    with tf.Graph().as_default(), tf1.Session() as session:
        variable = tf1.get_variable("w", initializer=[0.0], use_resource=use_resource)
        step, fed = tf1.train.get_or_create_global_step(), tf1.placeholder(tf.float32, [1])
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(1.0), accum_steps=4)
        ops = optimizer.accumulation_ops(grads_and_vars=[(fed, variable)], global_step=step)
        session.run(tf1.global_variables_initializer())
        session.run(ops.apply)
        assert session.run([variable, step, ops.micro_step]) == [[0.0], 0, 0]
        for grad in (1.0, 3.0, 5.0, 7.0, 9.0):  # more than accum_steps: the user drives
            session.run(ops.accumulate, {fed: [grad]})
        assert session.run(ops.micro_step) == 5
        session.run(ops.apply)
        assert session.run([variable, step, ops.micro_step]) == [[-5.0], 1, 0]
        session.run(ops.accumulate, {fed: [np.nan]})
        session.run(ops.zero)
        assert session.run(optimizer.get_slot(variable, "accum")) == [0.0]
        session.run(ops.accumulate, {fed: [2.0]})
        session.run(ops.apply)
        assert session.run([variable, step]) == [[-7.0], 2]


X = np.arange(1, 8, dtype="float32")[:, None]  # 7 examples in batches of 2: three and a half


def model(last_cycle, accum_steps, **compiled):
    inputs = tf.keras.Input((1,))
    outputs = tf.keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False)(inputs)
    made = accum.GradientAccumulateModel(accum_steps, inputs=inputs, outputs=outputs, last_cycle=last_cycle)
    made.compile(tf.keras.optimizers.SGD(1e-3), "mse", **compiled)
    return made


@pytest.mark.law("L6")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("last_cycle,steps,left", [("flush", 2, 0), ("carry", 2, 2), ("drop", 0, 0)])
def test_policies_hold_where_an_epoch_is_shorter_than_a_cycle(last_cycle, steps, left):
    made = model(last_cycle, accum_steps=5 if last_cycle != "carry" else 3, run_eagerly=last_cycle != "flush")
    made.fit(X, X, batch_size=2, epochs=2, shuffle=False, verbose=0)
    assert int(made.optimizer.iterations.numpy()) == steps
    assert int(made.optimizer.micro_step) == left


@pytest.mark.law("L6")
@pytest.mark.tf("2.2")
def test_flush_comes_before_the_validation_of_the_epoch():
    made = model("flush", accum_steps=10, run_eagerly=True)
    history = made.fit(X, X, batch_size=2, epochs=1, shuffle=False, verbose=0, validation_data=(X, X)).history
    moved = 1e-3 * 2.0 * float(np.mean(X * X))
    np.testing.assert_allclose(history["val_loss"], [np.mean((moved * X - X) ** 2)], rtol=1e-5)
    np.testing.assert_allclose(history["loss"], [np.mean(X**2)], rtol=1e-5)


class TakesOthers(tf.keras.Sequential):
    def fit(self, x=None, y=None, batch_size=None, **kwargs):
        return super().fit(x, y, batch_size=batch_size, **kwargs)


class TakesNone(tf.keras.Sequential):
    def fit(self, x=None, y=None):
        return super().fit(x, y, batch_size=2, epochs=3, shuffle=False, verbose=0)


def of_class(made_of):
    return made_of([tf.keras.Input((1,)), tf.keras.layers.Dense(1, kernel_initializer="ones")])


@pytest.mark.law("L6")
@pytest.mark.tf("2.2")
def test_an_epoch_ends_the_cycle_in_a_class_whose_fit_passes_callbacks_on_unnamed():
    plain, ours = of_class(TakesOthers), accum.GradientAccumulateModel.from_model(of_class(TakesOthers), accum_steps=3)
    epochs = []
    for one, size in ((plain, 6), (ours, 2)):
        one.compile(tf.keras.optimizers.SGD(1e-3), "mse")
        told = tf.keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch))
        one.fit(X, X, batch_size=size, epochs=3, shuffle=False, verbose=0, callbacks=told)
    assert epochs == 2 * [0, 1, 2]
    assert int(ours.optimizer.iterations.numpy()) == int(plain.optimizer.iterations.numpy()) == 6
    assert_near(ours.get_weights(), plain.get_weights())


@pytest.mark.law("L17")
@pytest.mark.tf("2.2")
def test_a_class_whose_fit_takes_no_callbacks_is_named():
    ours = accum.GradientAccumulateModel.from_model(of_class(TakesNone), accum_steps=3)
    ours.compile("sgd", "mse")
    with pytest.warns(accum.InexactWarning, match="`TakesNone.fit` takes no `callbacks`.*epoch-end"):
        ours.fit(X, X)


@pytest.mark.law("L6")
@pytest.mark.tf("2.2")
def test_evaluating_within_an_epoch_ends_no_cycle():
    made = model("flush", accum_steps=4, run_eagerly=True)
    steps = []

    class Evaluate(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.evaluate(X, X, verbose=0)
                steps.append(int(self.model.optimizer.iterations.numpy()))

    made.fit(X, X, batch_size=2, epochs=1, shuffle=False, verbose=0, callbacks=[Evaluate()])
    assert steps == [0]
    assert int(made.optimizer.iterations.numpy()) == 1


@pytest.mark.law("L6")
@pytest.mark.tf("2.2")
def test_flush_callback_serves_the_optimizer_wrapper():
    inputs = tf.keras.Input((1,))
    plain = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(inputs))
    plain.compile(accum.GradientAccumulateOptimizer("SGD", accum_steps=3), "mse", run_eagerly=True)
    plain.fit(X, X, batch_size=2, epochs=2, verbose=0, callbacks=[accum.FlushCallback()])
    assert int(plain.optimizer.iterations.numpy()) == 4


@pytest.mark.law("L17")
@pytest.mark.tf("2.2")
def test_accumulation_scheduler_sets_the_cycle_by_epoch():
    made = model("flush", accum_steps=4, run_eagerly=True)
    steps = []
    record = tf.keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: steps.append(int(made.optimizer.iterations.numpy()))
    )
    scheduler = accum.AccumulationScheduler({0: 4, 1: 2, 2: 1})
    made.fit(X, X, batch_size=2, epochs=3, verbose=0, callbacks=[scheduler, record])
    assert np.diff([0] + steps).tolist() == [1, 2, 4]
