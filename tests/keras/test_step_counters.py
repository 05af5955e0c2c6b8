"""Steps are counted by `iterations` and `global_step`, micro steps by a counter of their own (law L3)."""

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_near
from optimizers import MAINLY_EAGER

import accum
import accum.compat.v1

tf1 = tf.compat.v1


def ones_like_gradients(optimizer, variable, count):
    for _ in range(count):
        optimizer.apply_gradients([(tf.ones_like(variable), variable)])


@pytest.mark.law("L3")
@pytest.mark.tf("2.2")
def test_first_adam_step_uses_t_equal_to_one():
    variable = tf.Variable([1.0])
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.Adam(0.1), accum_steps=5)
    ones_like_gradients(optimizer, variable, 5)
    np.testing.assert_allclose(variable.numpy(), [0.9], atol=2e-6)  # bias-corrected, the first step is lr


@pytest.mark.law("L3")
@pytest.mark.tf("2.2")
def test_learning_rate_schedule_follows_steps():
    schedule = tf.keras.optimizers.schedules.PiecewiseConstantDecay([1], [1.0, 0.5])
    variable = tf.Variable([0.0])
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(schedule), accum_steps=3)
    ones_like_gradients(optimizer, variable, 6)
    np.testing.assert_allclose(variable.numpy(), [-2.0])  # steps 0 and 1 at 1.0
    ones_like_gradients(optimizer, variable, 3)
    np.testing.assert_allclose(variable.numpy(), [-2.5])


@pytest.mark.law("L3")
@pytest.mark.parametrize("counts_micro_steps", [False, True], ids=["steps", "micro steps"])
def test_global_step_counts_what_was_asked_for(counts_micro_steps):
    with tf.Graph().as_default(), tf1.Session() as session:
        step = tf1.train.get_or_create_global_step()
        rate = tf1.train.exponential_decay(1.0, step, decay_steps=1, decay_rate=0.5)
        variable = tf1.get_variable("w", initializer=[0.0], use_resource=True)
        optimizer = accum.compat.v1.AccumOptimizer(
            tf1.train.GradientDescentOptimizer(rate), accum_steps=2, count_micro_steps=counts_micro_steps
        )
        train_op = optimizer.apply_gradients([(tf.ones([1]), variable)], step)
        session.run(tf1.global_variables_initializer())
        for _ in range(4):
            session.run(train_op)
        if counts_micro_steps:
            assert session.run(step) == 4
        else:
            assert session.run(step) == 2
            np.testing.assert_allclose(session.run(variable), [-1.5])


UNKNOWN_LENGTH = {
    "accumulating": (1, {"accum_steps": 5, "last_cycle": "carry"}),
    "one": (5, {"accum_steps": 1}),
    "micro-batches": (5, {"micro_batch_size": 2}),
    "whole batch": (5, {"micro_batch_size": 2, "whole_batch": "all"}),
}


@pytest.mark.slow
@pytest.mark.law("L3")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("is_traced", MAINLY_EAGER)
@pytest.mark.parametrize("case", sorted(UNKNOWN_LENGTH))
def test_step_counters_stand_still_where_a_generator_ends(case, is_traced):
    """Keras calls its train function once more. Its own step counter moves then, on TF 2.15 and in Keras 3."""
    batch_size, options = UNKNOWN_LENGTH[case]
    random = np.random.RandomState(0)
    x, y = random.normal(size=(10, 3)).astype("float32"), random.normal(size=(10, 1)).astype("float32")

    def generate():
        for start in range(0, 10, batch_size):
            yield x[start : start + batch_size], y[start : start + batch_size]

    def compiled(wrap):
        inputs = tf.keras.Input((3,))
        outputs = tf.keras.layers.Dense(1, kernel_initializer="ones")(inputs)
        model = wrap(tf.keras.Model(inputs, outputs))
        model.compile(tf.keras.optimizers.Adam(0.05), "mse", run_eagerly=not is_traced)
        return model

    full = compiled(lambda model: model)
    full.fit(x, y, batch_size=5, epochs=3, shuffle=False, verbose=0)
    ours = compiled(lambda model: accum.GradientAccumulateModel.from_model(model, **options))
    shapes = tf.TensorShape([None, 3]), tf.TensorShape([None, 1])
    for _ in range(3):  # each ends where the length of its data is not known yet
        ours.fit(tf.data.Dataset.from_generator(generate, (tf.float32, tf.float32), shapes), epochs=1, verbose=0)
    assert int(ours.optimizer.iterations.numpy()) == 6
    assert_near(ours.get_weights(), full.get_weights())


@pytest.mark.slow
@pytest.mark.law("L3")
@pytest.mark.tf("2.2")
def test_micro_steps_stand_still_where_a_generator_ends_within_a_traced_step():
    """There, what does not wait for the data runs once more. Eagerly, nothing does."""

    def generate():
        for _ in range(3):
            yield np.ones((2, 3), "float32"), np.ones((2, 1), "float32")

    shapes = tf.TensorShape([None, 3]), tf.TensorShape([None, 1])
    inputs = tf.keras.Input((3,))
    model = accum.GradientAccumulateModel(
        100, inputs=inputs, outputs=tf.keras.layers.Dense(1)(inputs), last_cycle="carry"
    )
    model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    for ended in range(1, 6):  # `fit` knows the length from its second epoch on
        model.fit(tf.data.Dataset.from_generator(generate, (tf.float32, tf.float32), shapes), verbose=0)
        assert int(model.optimizer.micro_step) == 3 * ended


@pytest.mark.law("L3")
@pytest.mark.tf("2.2")
def test_schedule_of_accum_steps_counts_steps():
    variable = tf.Variable([0.0])
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps={0: 1, 2: 3, 3: 2})
    lengths, since = [], 0
    for _ in range(11):
        before = int(optimizer.iterations.numpy())
        ones_like_gradients(optimizer, variable, 1)
        since += 1
        if int(optimizer.iterations.numpy()) > before:
            lengths, since = lengths + [since], 0
    assert lengths == [1, 1, 3, 2, 2, 2]
    np.testing.assert_allclose(variable.numpy(), [-6.0])


@pytest.mark.law("L3")
def test_schedule_of_accum_steps_follows_the_global_step():
    with tf.Graph().as_default(), tf1.Session() as session:
        step = tf1.train.get_or_create_global_step()
        variable = tf1.get_variable("w", initializer=[0.0])
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(1.0), {0: 1, 2: 3, 3: 2})
        train_op = optimizer.apply_gradients([(tf.ones([1]), variable)], step)
        session.run(tf1.global_variables_initializer())
        steps = []
        for _ in range(8):
            session.run(train_op)
            steps.append(int(session.run(step)))
        assert steps == [1, 2, 2, 2, 3, 3, 4, 4]


@pytest.mark.law("L17")
@pytest.mark.tf("2.2")
def test_new_accum_steps_hold_from_the_next_cycle_on():
    variable = tf.Variable([0.0])
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps=3)

    @tf.function
    def micro_step():
        ones_like_gradients(optimizer, variable, 1)

    micro_step()
    optimizer.accum_steps = 2
    steps = []
    for _ in range(6):
        micro_step()
        steps.append(int(optimizer.iterations.numpy()))
    assert steps == [0, 1, 1, 2, 2, 3]
    optimizer.accum_steps = 1
    micro_step()
    assert int(optimizer.iterations.numpy()) == 4
    np.testing.assert_allclose(variable.numpy(), [-4.0])
