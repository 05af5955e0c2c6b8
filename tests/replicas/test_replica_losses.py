"""Losses over the outputs of several replicas (law L19). The oracle is plain Keras, with the batch on one device."""

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_near
from replicas import mirrored
from versions import IS_KERAS_3
from whole_batches import CLASSES, OTHER, TRACED, Towers, X, Y, batch_dice, contrastive, covariance, dense, filled

import accum

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.law("L19"), pytest.mark.slow]

WEIGHTS = np.linspace(0.1, 3.0, len(X)).astype("float32")
HALVES = np.clip(np.abs(Y), 0.0, 1.0)


layers = tf.keras.layers


def named_outputs():
    inputs = tf.keras.Input((3,))
    hidden = layers.Dense(4, activation="tanh")(inputs)
    outputs = [layers.Dense(2, activation="sigmoid", name=name)(hidden) for name in ("left", "right")]
    return tf.keras.Model(inputs, outputs)


CASES = {  # the model, x, y, sample weights, loss
    "one number per example": (Towers, (X, OTHER), CLASSES, WEIGHTS, contrastive),
    "one number": (dense, X, HALVES, None, batch_dice),
    "two outputs": (named_outputs, X, [HALVES, HALVES], None, [batch_dice, "mse"]),
    "targets by name": (named_outputs, X, {"left": HALVES, "right": HALVES}, None, [batch_dice, "mse"]),
    "sum": (dense, X, Y, None, tf.keras.losses.MeanSquaredError(reduction="sum")),
}


def compiled(make, loss, whole_batch=None, accum_steps=1, rate=0.02, is_traced=False, **options):
    model = make()
    if not model.built:
        model((X[:2], OTHER[:2]))
    filled(model)
    if whole_batch is not None:
        options.update(micro_batch_size=4, whole_batch=whole_batch, accum_steps=accum_steps)
        model = accum.GradientAccumulateModel.from_model(model, **options)
    elif accum_steps > 1:
        model = accum.GradientAccumulateModel.from_model(model, accum_steps=accum_steps)
    how = TRACED if is_traced else {"run_eagerly": True}
    model.compile(tf.keras.optimizers.SGD(rate, momentum=0.5), loss, **how)
    return model


def trained(model, x, y, weights, count=32, batch=16, epochs=1):
    data = (x, tuple(y) if isinstance(y, list) else y) + (() if weights is None else (weights,))
    data = tf.nest.map_structure(lambda part: part[:count], data)
    data = tf.data.Dataset.from_tensor_slices(data).batch(batch)
    history = model.fit(data, epochs=epochs, verbose=0).history
    return model.get_weights(), history


def on_replicas(*args, **kwargs):
    with mirrored().scope():
        return compiled(*args, **kwargs)


def assert_same(ours, plain, but=()):
    assert_near(ours[0], plain[0], rtol=2e-5, atol=2e-5)
    for name, whole in plain[1].items():
        if name not in but:
            np.testing.assert_allclose(ours[1][name], whole, rtol=2e-5, err_msg=name)


def differs(ours, plain):
    return any(np.abs(mine - whole).max() > 1e-4 for mine, whole in zip(ours[0], plain[0]))


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_that_of_the_batch_of_all_replicas(name):
    make, x, y, weights, loss = CASES[name]
    rate = 0.002 if "sum" in name else 0.05
    plain = trained(compiled(make, loss, rate=rate), x, y, weights)
    is_traced = name == "one number per example"
    assert_same(trained(on_replicas(make, loss, "loss", rate=rate, is_traced=is_traced), x, y, weights), plain)


@pytest.mark.parametrize("name", ["one number per example", "one number"])
def test_on_request_each_replica_computes_its_own(name):
    """As plain Keras does under a strategy, which differs from the batch of all."""
    make, x, y, weights, loss = CASES[name]
    ours = trained(on_replicas(make, loss, "loss", replicas_per_group={"loss": 1}), x, y, weights)
    assert_same(ours, trained(on_replicas(make, loss), x, y, weights))
    assert differs(ours, trained(compiled(make, loss), x, y, weights))


@pytest.mark.parametrize("accum_steps", [1, 2])
def test_replicas_with_unequal_parts(accum_steps):
    """Of 31 examples, the last batch has 8 and 7 on the replicas; a mean of two means would weigh both alike."""
    make, x, y, weights, loss = CASES["one number per example"]
    plain = trained(compiled(make, loss, accum_steps=accum_steps), x, y, weights, count=31)
    ours = trained(on_replicas(make, loss, "loss", accum_steps=accum_steps), x, y, weights, count=31)
    assert_same(ours, plain)


@pytest.mark.parametrize("accum_steps", [1, 2])
def test_a_loss_that_a_layer_adds_counts_by_the_examples_of_its_replica(accum_steps):
    """Of 31 examples, the last batch has 8 and 7 on the replicas; or of 25, with 5 and 4 of the last 9."""

    class Adds(layers.Layer):
        def call(self, inputs):
            self.add_loss(tf.reduce_mean(inputs**2))
            return inputs

    def make():
        return tf.keras.Sequential([tf.keras.Input((3,)), layers.Dense(4), Adds(), layers.Dense(2)])

    for count in (31, 25):
        plain = trained(compiled(make, "mse", accum_steps=accum_steps), X, Y, None, count=count)
        ours = trained(on_replicas(make, "mse", "loss", accum_steps=accum_steps), X, Y, None, count=count)
        assert_same(ours, plain)


def test_evaluation():
    make, x, y, _, loss = CASES["one number per example"]
    plain, ours = compiled(make, loss), on_replicas(make, loss, "loss")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    np.testing.assert_allclose(ours.evaluate(data, verbose=0), plain.evaluate(data, verbose=0), rtol=2e-5)


@pytest.mark.tf("2.9", because="Keras has `Model.compute_loss` since TF 2.9")
def test_a_loss_of_the_user():
    """It is divided by the number of replicas, as any loss of one's own under a strategy."""

    class Own(tf.keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return covariance(y, y_pred) / tf.distribute.get_strategy().num_replicas_in_sync

    def make():
        return Own([tf.keras.Input((3,)), layers.Dense(2)])

    plain = trained(compiled(make, None), X, Y, None)
    assert_same(trained(on_replicas(make, None, "loss"), X, Y, None), plain, but=("loss",))


def test_outputs_that_are_one_number_for_each_example():
    def make():
        return tf.keras.Sequential([tf.keras.Input((3,)), layers.Dense(1), layers.Reshape(())])

    def loss(y_true, y_pred):
        return tf.reduce_mean((tf.reshape(y_pred, [-1]) - tf.reduce_mean(y_pred)) ** 2 * tf.reshape(y_true, [-1]))

    plain = trained(compiled(make, loss), X, Y[:, 0], None)
    assert_same(trained(on_replicas(make, loss, "loss"), X, Y[:, 0], None), plain, but=("loss",))
    assert differs(trained(on_replicas(make, loss, "loss", replicas_per_group={"loss": 1}), X, Y[:, 0], None), plain)


def test_groups_of_replicas():
    """Of four replicas, pairs: two halves of the batch, each with its own, and the mean of their gradients."""

    def make():
        between = [layers.Dense(4), layers.BatchNormalization(), layers.Dense(2)]
        return tf.keras.Sequential([tf.keras.Input((3,)), *between])

    with mirrored(replicas=4).scope():
        model = compiled(make, covariance, "all", replicas_per_group=2)
    ours = trained(model, X, Y, None, count=16)
    first, second, both = (
        trained(compiled(make, covariance), X[part], Y[part], None)
        for part in (slice(0, 8), slice(8, 16), slice(0, 16))
    )
    for number, (mine, one, other) in enumerate(zip(ours[0], first[0], second[0])):
        # Of moving statistics that differ between replicas, Keras 2 returns the mean, and Keras 3 those of the first.
        is_of_first = IS_KERAS_3 and number in (4, 5)
        np.testing.assert_allclose(mine, one if is_of_first else (one + other) / 2, rtol=2e-5, atol=2e-5)
    assert differs(ours, both)


def test_bad_arguments():
    make, x, y, weights, _ = CASES["sum"]
    mixed = [tf.keras.losses.MeanSquaredError(reduction="sum"), "mse"]
    with pytest.raises(ValueError, match="losses must be means, or all have the reduction SUM"):
        trained(on_replicas(named_outputs, mixed, "loss"), X, [Y, Y], None)
    with pytest.raises(ValueError, match="must divide the number of replicas"):
        trained(on_replicas(make, "mse", "loss", replicas_per_group=3), x, y, weights)
    for bad, error in ((0, ValueError), (1.5, TypeError), (True, TypeError), ({"dice": 1}, ValueError)):
        with pytest.raises(error, match="`replicas_per_group` must be an int"):
            compiled(make, "mse", "loss", replicas_per_group=bad)
    with pytest.raises(ValueError, match="`replicas_per_group` groups the replicas for `whole_batch`"):
        accum.GradientAccumulateModel.from_model(dense(), micro_batch_size=4, replicas_per_group=1)


def test_a_train_step_whose_loss_is_out_of_sight_is_refused():
    class Own(tf.keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = covariance(y, self(x, training=True))
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
            return {"loss": loss}

    def make():
        return Own([tf.keras.Input((3,)), layers.Dense(2)])

    with pytest.raises(ValueError, match="computes a loss that can't be computed over the outputs of all replicas"):
        trained(on_replicas(make, None, "loss"), X, Y, None)
    trained(on_replicas(make, None, "loss", replicas_per_group={"loss": 1}), X, Y, None)


def test_small_integers_large_weights_and_16_bits_travel_between_replicas():
    """In float32 and int32: collectives know few dtypes, and 70000 is no float16."""

    def make():
        half = layers.Activation("linear", dtype="float16")
        return filled(tf.keras.Sequential([tf.keras.Input((3,)), layers.Dense(3), half]))

    loss, classes = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), CLASSES.astype("uint8")
    options = {"accum_steps": 2, "micro_batch_weight": lambda x, y, sample_weight: 70000.0}
    ours = trained(on_replicas(make, loss, "loss", rate=0.1, **options), X, classes, None)
    plain = trained(compiled(make, loss, accum_steps=2, rate=0.1), X, classes, None)
    assert_near(ours[0], plain[0], atol=3e-4)


@pytest.mark.tf("2.4", because="`fit` takes no dataset of one pipeline per worker")
def test_replicas_whose_sequences_have_other_lengths_are_refused_by_name():
    """In the second batch: Keras 3 looks at the first one beforehand."""
    inputs = tf.keras.Input((None, 3))
    with mirrored().scope():
        model = tf.keras.Model(inputs, layers.Dense(2)(inputs))
        model = accum.GradientAccumulateModel.from_model(model, micro_batch_size=2, whole_batch="loss")
        model.compile("sgd", "mse", run_eagerly=True)
    strategy = model.distribute_strategy

    def of_replica(length):
        return tf.ones([2, length, 3]), tf.ones([2, length, 2])

    def batches(_):
        return tf.data.Dataset.from_generator(
            lambda: map(of_replica, (4, 4, 4, 5)), (tf.float32, tf.float32), ((None, None, 3), (None, None, 2))
        )

    name = "distribute_datasets_from_function"
    distribute = getattr(strategy, name, None) or getattr(strategy, f"experimental_{name}")
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="pad the batch before it is distributed"):
        model.fit(distribute(batches), steps_per_epoch=2, verbose=0)


@pytest.mark.law("L11")
def test_metrics_by_name_are_those_of_plain_keras():
    def logs(strategy, **options):
        with strategy.scope():
            model = filled(dense())
            if options:
                model = accum.GradientAccumulateModel.from_model(model, **options)
            model.compile(tf.keras.optimizers.SGD(0.02), "mse", metrics=["mae"])
        return model.fit(X, Y, batch_size=len(X), epochs=2, shuffle=False, verbose=0).history

    ours, plain = logs(mirrored(), micro_batch_size=3), logs(tf.distribute.get_strategy())
    assert_near([ours[name] for name in sorted(plain)], [plain[name] for name in sorted(plain)])
