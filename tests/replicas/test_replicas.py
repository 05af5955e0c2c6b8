"""R replicas x K micro steps equal one device on the whole batch (law L11)."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf
from loss_scales import apply_scaled, scaled_loss
from optimizers import families
from replicas import mirrored as several_cpus
from whole_batches import TRACED

import accum

R, K, CYCLES, N = 2, 3, 3, 4  # N examples a replica and micro step

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.law("L11")]


def data():
    random = np.random.RandomState(0)
    x = random.normal(size=(CYCLES * K * R * N, 5)).astype("float32")
    return x, random.normal(size=(len(x), 1)).astype("float32"), random.normal(size=(5, 1)).astype("float32")


def mirrored():
    ops = tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=ops)


def on_one_device(optimizer):
    x, y, first = data()
    weights = tf.Variable(first)
    for start in range(0, len(x), K * R * N):
        part = slice(start, start + K * R * N)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x[part] @ weights - y[part]) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, weights), weights)])
    return weights.numpy()


def on_two_replicas(make, **options):
    """A custom loop in which each replica gives its own gradient, scaled as Keras does."""
    x, y, first = data()
    strategy = mirrored()
    with strategy.scope():
        weights = tf.Variable(first)
        optimizer = accum.GradientAccumulateOptimizer(make(), accum_steps=K, **options)

    def micro_step(x_now, y_now):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x_now @ weights - y_now) ** 2) / R
        optimizer.apply_gradients([(tape.gradient(loss, weights), weights)])

    run = tf.function(lambda x_now, y_now: getattr(strategy, RUN)(micro_step, args=(x_now, y_now)))
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(R * N)
    for x_now, y_now in strategy.experimental_distribute_dataset(batches):
        run(x_now, y_now)
    assert int(optimizer.iterations.numpy()) == CYCLES
    return weights.numpy()


RUN = "run" if hasattr(tf.distribute.Strategy, "run") else "experimental_run_v2"


@pytest.mark.parametrize(
    "make,reduction",
    [
        pytest.param(
            lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9),
            "mean",
            id="momentum-mean",
        ),
        pytest.param(
            lambda: tf.keras.optimizers.Adam(0.1), "running_mean", id="adam-running_mean", marks=pytest.mark.slow
        ),
    ],
)
def test_two_replicas_equal_one_device(make, reduction):
    np.testing.assert_allclose(on_two_replicas(make, reduction=reduction), on_one_device(make()), rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.law("L7")
def test_transform_acts_once_on_the_reduced_gradient():
    clip = lambda grads_and_vars: [(tf.clip_by_norm(grad, 0.5), var) for grad, var in grads_and_vars]

    class Clipped(tf.keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars, *args, **kwargs):
            return super().apply_gradients(clip(list(grads_and_vars)), *args, **kwargs)

    ours = on_two_replicas(lambda: tf.keras.optimizers.SGD(0.1), transform=clip)
    np.testing.assert_allclose(ours, on_one_device(Clipped(0.1)), rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.law("L5")
def test_fit_on_two_replicas_equals_fit_on_one_device():
    x, y, first = data()
    x, y = x[:50], y[:50]  # 50 examples in batches of 8: the last is ragged, and so is the last cycle

    def trained(scope, batch_size, accum_steps):
        with scope:
            inputs = tf.keras.Input((5,))
            outputs = tf.keras.layers.Dense(1, use_bias=False)(inputs)
            model = accum.GradientAccumulateModel(accum_steps, inputs=inputs, outputs=outputs)
            # One device is the oracle, which need not be traced.
            model.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), "mse", run_eagerly=accum_steps == 1)
        model.set_weights([first])
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)
        model.fit(batches, epochs=2, verbose=0)
        return model.get_weights()[0]

    ours = trained(mirrored().scope(), 8, accum_steps=3)
    np.testing.assert_allclose(ours, trained(tf.name_scope("one"), 24, accum_steps=1), rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.tf("2.4", keras=2, because="Keras 3 only checks the gradients of the first replica")
@pytest.mark.law("L10")
@pytest.mark.parametrize("family", families())
def test_an_overflow_on_one_replica_only_is_everyones(family):
    strategy = mirrored()
    with strategy.scope():
        weights = tf.Variable([0.0])
        inner = accum.GradientAccumulateOptimizer(family.SGD(1.0), accum_steps=2)
        optimizer = tf.keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=1024.0)

    def micro_step(factor):
        scaled = scaled_loss(optimizer, factor) / R  # the gradient of factor * weights / R
        apply_scaled(optimizer, [tf.reshape(scaled, [1])], [weights])

    run = tf.function(lambda factors: strategy.run(micro_step, args=(factors,)))
    # Of each micro step, a factor for each replica; the verdict is taken on the first.
    batches = [[1.0, 3.0], [2.0, np.inf], [5.0, 7.0]]
    data = tf.data.Dataset.from_tensor_slices(np.ravel(batches).astype("float32")).batch(R)
    for factors in strategy.experimental_distribute_dataset(data):
        run(factors)
    np.testing.assert_array_equal([part.numpy() for part in strategy.experimental_local_results(weights)], [[-4.0]] * R)


def trained_on(replicas, accum_steps, dtype):
    """The weights of a model that saw the same micro-batches of four examples, spread over replicas and time."""
    random = np.random.RandomState(0)
    x, y = (random.normal(size=(3 * 8 * 4, width)).astype("float32") for width in (7, 3))
    with several_cpus(replicas=replicas).scope() if replicas > 1 else contextlib.ExitStack():
        inputs = tf.keras.Input((7,))
        hidden = tf.keras.layers.Dense(16, activation="tanh")(inputs)
        model = accum.GradientAccumulateModel(
            accum_steps, inputs=inputs, outputs=tf.keras.layers.Dense(3)(hidden), accumulator_dtype=dtype
        )
        model.set_weights([random.normal(size=weight.shape) for weight in model.get_weights()])
        model.compile(tf.keras.optimizers.Adam(0.01), "mse", **TRACED)
    model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(4 * replicas), verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 3
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


@pytest.mark.slow
def test_float64_sums_give_the_same_bits_for_any_number_of_replicas():
    alone, *others = [trained_on(replicas, 8 // replicas, "float64") for replicas in (1, 2, 4)]
    for other in others:
        np.testing.assert_array_equal(other, alone)
    assert (trained_on(4, 2, None) != trained_on(1, 8, None)).any()  # sums in float32 depend on their order


@pytest.mark.slow
@pytest.mark.law("L9")
@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize("nonfinite, moved", [("skip_micro", -4.0), ("skip_cycle", -8.0)])
def test_a_nan_on_one_replica_is_skipped_on_all(nonfinite, moved, replica):
    strategy = mirrored()
    with strategy.scope():
        weights = tf.Variable([0.0])
        optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps=2, nonfinite=nonfinite)

    def micro_step(factor):
        optimizer.apply_gradients([(factor / R, weights)])

    run = tf.function(lambda factors: getattr(strategy, RUN)(micro_step, args=(factors,)))
    batches = np.array([[1.0, 3.0], [2.0, 4.0], [5.0, 7.0], [9.0, 11.0]], "float32")
    batches[1, replica] = np.nan  # leaves the mean of 2 and 6, or, of the second cycle, of 6 and 10
    data = tf.data.Dataset.from_tensor_slices(np.ravel(batches)).batch(R)
    for factors in strategy.experimental_distribute_dataset(data):
        run(factors)
    np.testing.assert_array_equal(
        [part.numpy() for part in strategy.experimental_local_results(weights)], [[moved]] * R
    )
