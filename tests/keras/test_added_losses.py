"""Losses with an entry for each example, which layers add and Keras adds up, are those of the full batch."""

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_near
from replicas import mirrored
from versions import IS_KERAS_3
from warned import warned

import accum

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.slow]

layers = tf.keras.layers
RANDOM = np.random.RandomState(0)
X = RANDOM.normal(size=(16, 6)).astype("float32")
Y = RANDOM.normal(size=(16, 4)).astype("float32")
NOT_COMPILED = {"jit_compile": False} if IS_KERAS_3 else {}
SHAPES = {
    "one each": lambda errors: tf.reduce_mean(errors, axis=1),
    "a column": lambda errors: tf.reduce_mean(errors, axis=1, keepdims=True),
    "some each": lambda errors: errors,
    "some each, flat": lambda errors: tf.reshape(errors, [-1]),
}


class Ctc(layers.Layer):
    """Adds a loss of labels and outputs, as a layer with a CTC loss does."""

    def __init__(self, shape="a column", norm=False):
        super().__init__()
        self.shape_of_loss = SHAPES[shape]
        self.norm = layers.BatchNormalization() if norm else None

    def call(self, labels, outputs, training=None):
        outputs = outputs if self.norm is None else self.norm(outputs, training=training)
        self.add_loss(self.shape_of_loss(tf.square(labels - outputs)))
        return outputs

    def compute_output_shape(self, labels_shape, outputs_shape):
        return outputs_shape


def of_layers(shape="a column", norm=False, model_class=tf.keras.Model):
    images, labels = tf.keras.Input((6,)), tf.keras.Input((4,))
    outputs = layers.Dense(4, kernel_initializer="ones")(images)
    return model_class([images, labels], Ctc(shape, norm)(labels, outputs))


def trained(make, eagerly=False, **options):
    """Return (weights, losses logged by `fit`, `evaluate`, warnings)."""
    model = make()
    with warned("`add_loss`") as said:
        model = accum.GradientAccumulateModel.from_model(model, **options) if options else model
        model.compile(tf.keras.optimizers.SGD(0.01), run_eagerly=eagerly, **NOT_COMPILED)
        data = tf.data.Dataset.from_tensor_slices(((X, Y),)).batch(8)
        logged = model.fit(data, epochs=2, verbose=0).history["loss"]
        evaluated = np.ravel(model.evaluate(data, verbose=0))
    return model.get_weights(), [logged, evaluated], said


def assert_exact(ours, plain):
    assert_near(ours[0], plain[0], rtol=2e-5)
    assert_near(ours[1], plain[1], rtol=2e-5, atol=0)
    assert not ours[2]


@pytest.mark.law("L18")
@pytest.mark.parametrize("shape", SHAPES)
def test_micro_batches_add_up_to_the_batch(shape):
    """Batches of 8 as 2 + 3 + 3."""
    plain = trained(lambda: of_layers(shape), eagerly=True)
    assert_exact(trained(lambda: of_layers(shape), micro_batch_size=3), plain)


@pytest.mark.law("L21")
@pytest.mark.parametrize("eagerly", [False, True], ids=["traced", "eager"])
def test_entries_of_micro_batches_are_named(eagerly):
    said = trained(of_layers, eagerly=eagerly, micro_batch_size=4, whole_batch=())[2]
    assert len(said) == 1 and "Keras adds up the entries" in said[0]


class OfFeatures(layers.Layer):
    """Adds an entry for each feature, the mean over the examples."""

    def call(self, inputs):
        self.add_loss(0.1 * tf.reduce_mean(inputs**2, axis=0))
        return inputs


@pytest.mark.law("L18")
@pytest.mark.parametrize("eagerly", [False, True], ids=["traced", "eager"])
@pytest.mark.parametrize("size", [2, 4])
def test_means_of_features_are_not_taken_for_entries_of_examples(size, eagerly):
    """With arrays, the number of examples may be known in a trace."""

    def fitted(**options):
        inputs = tf.keras.Input((6,))
        model = tf.keras.Model(inputs, OfFeatures()(layers.Dense(4, kernel_initializer="ones")(inputs)))
        model = accum.GradientAccumulateModel.from_model(model, **options) if options else model
        model.compile(tf.keras.optimizers.SGD(0.01), run_eagerly=eagerly, **NOT_COMPILED)
        model.fit(X, batch_size=8, verbose=0, shuffle=False)
        return model.get_weights()

    assert_near(fitted(micro_batch_size=size), fitted(), rtol=2e-5)


@pytest.mark.law("L19")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_whole_batch_is_that_of_plain_keras(shape):
    plain = trained(lambda: of_layers(shape, norm=True), eagerly=True)
    assert_exact(trained(lambda: of_layers(shape, norm=True), micro_batch_size=3, whole_batch="all"), plain)


class OwnStep(tf.keras.Model):
    """Takes the mean of what layers have added."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            self(data[0], training=True)
            loss = tf.reduce_mean(self.losses[0])
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}


def own_step(norm=False):
    return of_layers(norm=norm, model_class=OwnStep)


@pytest.mark.law("L19")
def test_a_train_step_of_the_user_finds_the_entries_of_a_whole_batch():
    plain = trained(lambda: own_step(norm=True), eagerly=True)
    ours = trained(lambda: own_step(norm=True), micro_batch_size=3, whole_batch="all")
    assert_exact(ours, plain)


@pytest.mark.law("L21")
@pytest.mark.parametrize(
    "make, options",
    [(own_step, {"micro_batch_size": 3, "whole_batch": ()}), (of_layers, {"accum_steps": 2})],
    ids=["a train step of the user's", "accum_steps"],
)
def test_where_it_is_not_known_how_they_count_a_warning_names_them(make, options):
    said = trained(make, **options)[2]
    assert len(said) == 1 and "Keras adds up the entries" in said[0]


@pytest.mark.law("L11")
@pytest.mark.parametrize(
    "options",
    [{}, {"whole_batch": "all"}, {"whole_batch": "all", "replicas_per_group": 1}],
    ids=["split", "whole batch", "whole batch of a replica"],
)
def test_replicas_add_up_as_in_plain_keras(options):
    def fitted(**options):
        with mirrored().scope():
            return trained(of_layers, **options)

    plain = fitted()
    ours = fitted(micro_batch_size=2, **options)
    assert_near(ours[0], plain[0], rtol=2e-5)


class Penalty(layers.Layer):
    """Adds an entry for each weight, which counts once for a batch."""

    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=(6,), initializer="ones")

    def call(self, inputs):
        self.add_loss(0.1 * tf.convert_to_tensor(self.scale) ** 2)
        return self.scale * inputs


@pytest.mark.law("L18")
@pytest.mark.parametrize("whole_batch", [(), "all"])
def test_entries_for_weights_count_once(whole_batch):
    def make():
        images, labels = tf.keras.Input((6,)), tf.keras.Input((4,))
        return tf.keras.Model([images, labels], Penalty()(images))

    plain = trained(make, eagerly=True)
    ours = trained(make, micro_batch_size=3, whole_batch=whole_batch)
    np.testing.assert_allclose(ours[0][0], plain[0][0], rtol=2e-5)
    assert np.abs(plain[0][0] - 1.0).max() > 1e-4 and not ours[2]


class Energy(layers.Layer):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(6, kernel_initializer=tf.keras.initializers.Constant(0.2))

    def call(self, inputs):
        outputs = self.dense(inputs)
        self.add_loss(tf.reduce_mean(outputs**2))
        return outputs


class Around(layers.Layer):
    """Adds what a layer in it has added once more, as a mixture of experts weighs the losses of its experts."""

    def __init__(self):
        super().__init__()
        self.inner = Energy()

    def call(self, inputs):
        outputs = self.inner(inputs)
        for loss in self.inner.losses:
            self.add_loss(3.0 * loss)
        return outputs


@pytest.mark.law("L19")
def test_a_layer_finds_what_layers_in_it_have_added():
    def fitted(model_class, **options):
        tf.keras.utils.set_random_seed(1) if IS_KERAS_3 else tf.random.set_seed(1)
        inputs = tf.keras.Input([6])
        first = layers.Dense(4, kernel_initializer=tf.keras.initializers.Constant(0.1))
        model = model_class(inputs=inputs, outputs=layers.BatchNormalization()(first(Around()(inputs))), **options)
        model.compile(tf.keras.optimizers.SGD(0.01), "mse", **NOT_COMPILED)
        logs = model.fit(X, Y, batch_size=8, verbose=0, shuffle=False).history["loss"]
        return [*model.get_weights(), np.array(logs)]

    plain = fitted(tf.keras.Model)
    assert_near(fitted(accum.GradientAccumulateModel, micro_batch_size=3), plain, rtol=2e-5)
