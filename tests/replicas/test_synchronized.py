"""Batch normalisation over replicas: its own on each, or that of all of them together (laws L11, L13)."""

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_near
from replicas import mirrored
from versions import IS_KERAS_3

import accum

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.law("L11"), pytest.mark.law("L13"), pytest.mark.slow]

layers = tf.keras.layers
RANDOM = np.random.RandomState(0)
X = (RANDOM.normal(size=(23, 3)) + 0.1 * np.arange(23)[:, None]).astype("float32")
Y = RANDOM.normal(size=(23, 1)).astype("float32")
WEIGHTS = [0.3 * RANDOM.normal(size=shape) for shape in ((3, 4), (4, 1))]


def trained(scope, batch_size, accum_steps, run_eagerly=False, **options):
    with scope:
        inputs = tf.keras.Input((3,))
        norm = accum.AccumBatchNormalization(momentum=0.5, **options)
        hidden = layers.Activation("tanh")(norm(layers.Dense(4, use_bias=False, name="first")(inputs)))
        outputs = layers.Dense(1, use_bias=False, name="last")(hidden)
        model = accum.GradientAccumulateModel(accum_steps, inputs=inputs, outputs=outputs)
        model.compile(tf.keras.optimizers.SGD(0.1), "mse", run_eagerly=run_eagerly)
    model.get_layer("first").set_weights(WEIGHTS[:1])
    model.get_layer("last").set_weights(WEIGHTS[1:])
    model.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch_size), epochs=2, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize(
    "batch_size,accum_steps",
    [
        pytest.param(6, 2, id="equal shares"),  # but for the last micro-batch
        pytest.param(11, 2, id="one replica without examples", marks=pytest.mark.slow),  # 6 + 5, 6 + 5, 1 + 0
        pytest.param(22, 2, id="one replica without examples at the end"),  # 11 + 11, 1 + 0
    ],
)
def test_synchronized_replicas_equal_one_device(batch_size, accum_steps):
    ours = trained(mirrored().scope(), batch_size, accum_steps, synchronized=True)
    assert_near(ours, trained(tf.name_scope("one"), batch_size, accum_steps, run_eagerly=True))


@pytest.mark.tf("2.12", because="Keras' batch normalisation ignored masks before TF 2.12")
def test_masked_values_and_a_replica_without_examples():
    x, mask = X[:9].reshape(3, 3, 3), np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1]], bool)
    strategy = mirrored()
    with strategy.scope():
        layer = accum.AccumBatchNormalization(2, momentum=0.0, synchronized=True)
        layer.build((None, 3, 3))
    parts = tf.data.Dataset.from_tensor_slices((x, mask)).batch(2)  # 1 + 1 and 1 + 0
    run = tf.function(lambda part, its: strategy.run(lambda a, b: layer(a, training=True, mask=b), args=(part, its)))
    for part, its in strategy.experimental_distribute_dataset(parts):
        run(part, its)
    np.testing.assert_allclose(layer.moving_mean.numpy(), x[mask].mean(0), atol=2e-6)
    np.testing.assert_allclose(layer.moving_variance.numpy(), x[mask].var(0), atol=2e-6)


@pytest.mark.tf(keras=2, because="Keras 3 only keeps the statistics of the first replica")
def test_without_it_each_replica_has_its_own_and_the_mean_of_them_is_read():
    strategy = mirrored()
    with strategy.scope():
        layer = accum.AccumBatchNormalization(2, momentum=0.0)
        layer.build((None, 3))
    x = X[:20]
    parts = tf.data.Dataset.from_tensor_slices(x).batch(10)
    run = tf.function(lambda part: strategy.run(lambda now: layer(now, training=True), args=(part,)))
    for part in strategy.experimental_distribute_dataset(parts):
        run(part)
    halves = [np.concatenate([x[0:5], x[10:15]]), np.concatenate([x[5:10], x[15:20]])]
    np.testing.assert_allclose(layer.moving_mean.numpy(), np.mean([h.mean(0) for h in halves], axis=0), atol=2e-6)
    np.testing.assert_allclose(layer.moving_variance.numpy(), np.mean([h.var(0) for h in halves], axis=0), atol=2e-6)


def test_on_one_device_it_is_the_unfused_layer():
    x = X[:20].reshape(10, 2, 1, 3)
    ours = accum.AccumBatchNormalization(synchronized=True)
    keras = layers.BatchNormalization(**({} if IS_KERAS_3 else {"fused": False}))
    np.testing.assert_array_equal(ours(x, training=True), keras(x, training=True))
    np.testing.assert_array_equal(ours.moving_variance.numpy(), keras.moving_variance.numpy())
    again = tf.keras.layers.deserialize(tf.keras.layers.serialize(ours))
    assert again.get_config() == ours.get_config() and again.get_config()["synchronized"]


def test_the_swap_keeps_what_was_synchronized():
    norms = [(layers.BatchNormalization(), False)]
    old = None if IS_KERAS_3 else layers.experimental.SyncBatchNormalization
    if old is not None:
        norms.append((old(), True))
    if IS_KERAS_3 or "synchronized" in layers.BatchNormalization().get_config() or "synchronized" in old().get_config():
        norms.append((layers.BatchNormalization(synchronized=True), True))
    model = tf.keras.Sequential([layers.Dense(3, input_shape=(3,))] + [layer for layer, _ in norms])
    swapped = accum.replace_batchnorm_layers(model, 2)
    for layer, (_, expected) in zip(swapped.layers[1:], norms):
        assert isinstance(layer, accum.AccumBatchNormalization)
        assert layer.get_config()["synchronized"] is expected
    np.testing.assert_array_equal(swapped.predict(X), model.predict(X))


@pytest.mark.tf("2.12", because="`synchronized` is an argument from then on")
def test_a_batch_that_is_split_is_normalised_over_all_replicas_if_the_layer_says_so():
    def losses(strategy, **options):
        with strategy.scope():
            norm = layers.BatchNormalization(synchronized=True)
            model = tf.keras.Sequential([tf.keras.Input((3,)), layers.Dense(4, use_bias=False), norm, layers.Dense(1)])
            model.layers[0].set_weights(WEIGHTS[:1])
            model.layers[2].set_weights([WEIGHTS[1], np.zeros(1)])
            if options:
                model = accum.GradientAccumulateModel.from_model(model, **options)
            model.compile(tf.keras.optimizers.SGD(0.1), "mse", run_eagerly=strategy.num_replicas_in_sync == 1)
        return model.fit(X[:20], Y[:20], batch_size=20, epochs=2, shuffle=False, verbose=0).history["loss"]

    assert_near(losses(mirrored(), micro_batch_size=3), losses(tf.distribute.get_strategy()))


def test_a_synchronized_layer_is_refused_where_each_replica_splits_its_batch_alone():
    with mirrored().scope():
        norm = accum.AccumBatchNormalization(synchronized=True)
        model = tf.keras.Sequential([tf.keras.Input((3,)), layers.Dense(4), norm, layers.Dense(1)])
        model = accum.GradientAccumulateModel.from_model(model, micro_batch_size=3, whole_batch=())
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"\[accum: replicas\]"):
        model.fit(X[:20], Y[:20], batch_size=20, verbose=0)
