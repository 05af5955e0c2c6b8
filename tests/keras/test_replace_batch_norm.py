"""The swap of a model's batch normalisation leaves everything else as it was (law L13)."""

import inspect
import warnings

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_identical

import accum

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.law("L13"), pytest.mark.slow]

layers = tf.keras.layers
KERAS = layers.BatchNormalization


def sequential():
    inner = [layers.Dense(4, input_shape=(6,)), KERAS(momentum=0.7, epsilon=0.02, name="norm"), layers.ReLU()]
    return tf.keras.Sequential(inner + [layers.Dense(2)])


def deferred():
    model = tf.keras.Sequential([layers.Dense(4), KERAS(), layers.Dense(2)])
    model.build((None, 6))
    return model


def functional():
    """Batch normalisation shared by two inputs, on another axis, in a nested model that is used twice, and frozen."""
    inputs = tf.keras.Input((6,))
    shared = KERAS(name="shared", scale=False)
    both = layers.Add()([shared(inputs), shared(layers.Dense(6)(inputs))])
    nested_in = tf.keras.Input((3, 2))
    nested_out = layers.Flatten()(KERAS(axis=1, name="axis")(nested_in))
    nested = tf.keras.Model(nested_in, KERAS(name="frozen", trainable=False)(nested_out), name="nested")
    one, other = nested(layers.Reshape((3, 2))(both)), nested(layers.Reshape((3, 2))(inputs), training=False)
    return tf.keras.Model(inputs, [layers.Dense(2, name="left")(one), layers.Dense(2, name="right")(other)])


MODELS = [sequential, deferred, functional]


class Pair(layers.Layer):
    """A user's own layer, with layers of equal shapes inside. Its config does not tell which of them are frozen."""

    def __init__(self, normalizes_by=None, frozen=(), **kwargs):
        super().__init__(**kwargs)
        self.first, self.second = layers.Dense(6, name="first"), layers.Dense(6, name="second")
        self.norm = layers.ReLU() if normalizes_by is None else normalizes_by(name="inner_norm")
        for name in frozen:
            getattr(self, name).trainable = False

    def call(self, inputs):
        return self.second(self.norm(self.first(inputs)))

    def get_config(self):
        return dict(super().get_config(), normalizes_by=None if type(self.norm) is layers.ReLU else type(self.norm))


def dense_pair(first, second):
    return tf.keras.Sequential([layers.Dense(6, trainable=first, input_shape=(6,)), layers.Dense(6, trainable=second)])


def in_time(inner):
    inputs = tf.keras.Input((6,))
    each = layers.TimeDistributed(inner)(layers.Reshape((1, 6))(inputs))
    return tf.keras.Model(inputs, layers.Dense(2)(KERAS()(layers.Flatten()(each))))


def wrapper_with_one_frozen():
    return in_time(dense_pair(False, True))


def wrapper_that_is_frozen_but_for_one():
    inner = dense_pair(True, True)
    model = in_time(inner)
    model.layers[2].trainable = False
    inner.layers[1].trainable = True
    return model


def composite_with_one_frozen():
    return tf.keras.Sequential([tf.keras.Input((6,)), Pair(frozen=["first"]), KERAS(), layers.Dense(2)])


def frozen_model_with_a_composite():
    model = tf.keras.Sequential([tf.keras.Input((6,)), Pair(frozen=["second"]), KERAS(), layers.Dense(2)])
    model.trainable = False
    model.layers[0].second.trainable = True
    return model


def one_thawed_later():
    """Keras 2 lists weights that are trainable first, and these are told from each other by their order alone."""
    model = tf.keras.Sequential([tf.keras.Input((6,)), Pair(frozen=["first", "second"]), KERAS(), layers.Dense(2)])
    model.layers[0].second.trainable = True
    return model


PARTLY_FROZEN = [
    wrapper_with_one_frozen,
    wrapper_that_is_frozen_but_for_one,
    composite_with_one_frozen,
    frozen_model_with_a_composite,
    one_thawed_later,
]


def trained(make):
    """A model whose moving statistics are none that it began with."""
    random = np.random.RandomState(0)
    model = make()
    model.set_weights([random.uniform(0.5, 1.5, size=weight.shape) for weight in model.get_weights()])
    return model, random.normal(size=(8, 6)).astype("float32")


def names(weights):
    """Without the scope, which TF 2.2 makes unique in a process."""
    return [weight.name.split("/")[-1] for weight in weights]


def all_layers(model):
    for layer in model.layers:
        yield layer
        if hasattr(layer, "layers"):
            for inner in all_layers(layer):
                yield inner


@pytest.mark.parametrize("make", MODELS)
def test_predict_gives_the_same_bits(make):
    model, x = trained(make)
    swapped = accum.replace_batchnorm_layers(model, accum_steps=4)
    before = [np.copy(weight) for weight in model.get_weights()]
    assert_identical(tf.nest.flatten(swapped.predict(x)), tf.nest.flatten(model.predict(x)))
    swapped.set_weights([weight + 1.0 for weight in before])  # they share no variable
    assert_identical(model.get_weights(), before)


@pytest.mark.skipif(not hasattr(layers.Dense, "enable_lora"), reason="Keras 3 brought LoRA")
def test_weights_that_are_frozen_one_by_one_stay_so():
    model = tf.keras.Sequential([tf.keras.Input((6,)), layers.Dense(4), KERAS(), layers.Dense(2)])
    model.layers[0].enable_lora(2)
    swapped = accum.replace_batchnorm_layers(model, accum_steps=4)
    assert names(swapped.trainable_weights) == names(model.trainable_weights)
    assert len(model.trainable_weights) == 7  # of 8: all but the kernel


def test_an_adapted_normalization_keeps_its_statistics():
    home = layers if hasattr(layers, "Normalization") else layers.experimental.preprocessing  # dies with 2.5
    x = np.random.RandomState(0).normal(3.0, 2.0, size=(8, 6)).astype("float32")
    model = tf.keras.Sequential([tf.keras.Input((6,)), home.Normalization(), layers.Dense(4), KERAS()])
    model.layers[0].adapt(x)
    swapped = accum.replace_batchnorm_layers(model, accum_steps=4)
    np.testing.assert_array_equal(swapped.predict(x), model.predict(x))


@pytest.mark.tf(keras=3, because="Keras 2 holds them in weights")
def test_an_adapted_discretization_keeps_its_boundaries():
    x = np.random.RandomState(0).normal(size=(32, 6)).astype("float32")
    binned = layers.Discretization(num_bins=4)
    binned.adapt(x)
    model = tf.keras.Sequential([tf.keras.Input((6,)), binned, layers.Embedding(4, 2), KERAS()])
    swapped = accum.replace_batchnorm_layers(model, accum_steps=4)
    np.testing.assert_array_equal(swapped.predict(x), model.predict(x))


@pytest.mark.parametrize("make", MODELS)
def test_every_batch_norm_is_swapped_and_keeps_its_name_arguments_and_state(make):
    model, _ = trained(make)
    swapped = accum.replace_batchnorm_layers(model, accum_steps=4)
    assert type(swapped) is type(model)
    assert swapped.name == model.name
    pairs = list(zip(all_layers(swapped), all_layers(model)))
    assert len(pairs) == len(list(all_layers(model)))
    for ours, theirs in pairs:
        if isinstance(theirs, tf.keras.layers.InputLayer):
            continue  # Keras 3 gives that of a copy a name of its own
        assert (ours.name, ours.trainable) == (theirs.name, theirs.trainable)
        if type(theirs) is not KERAS:
            assert type(ours) is type(theirs)
            continue
        assert isinstance(ours, accum.AccumBatchNormalization)
        assert ours.get_config() == dict(theirs.get_config(), accum_steps=4, synchronized=False)
        assert names(ours.weights) == names(theirs.weights)
        assert_identical(ours.get_weights(), theirs.get_weights())


def test_what_was_frozen_stays_frozen_and_nothing_else():
    model, _ = trained(functional)
    model.get_layer("nested").get_layer("axis").trainable = False
    model.get_layer("left").trainable = False
    swapped = accum.replace_batchnorm_layers(model, 2)
    assert names(swapped.trainable_weights) == names(model.trainable_weights)
    assert [w.shape for w in swapped.trainable_weights] == [w.shape for w in model.trainable_weights]


@pytest.mark.parametrize("make", PARTLY_FROZEN)
def test_what_is_frozen_inside_of_other_layers_stays_frozen_with_its_weights(make):
    model, x = trained(make)
    swapped = accum.replace_batchnorm_layers(model, 2)
    np.testing.assert_array_equal(swapped.predict(x), model.predict(x))
    assert len(swapped.trainable_weights) == len(model.trainable_weights)
    for ours, theirs in zip(swapped.trainable_weights, model.trainable_weights):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


def test_swapping_again_sets_accum_steps():
    swapped = accum.replace_batchnorm_layers(accum.replace_batchnorm_layers(sequential(), 2), 5)
    assert swapped.get_layer("norm").accum_steps == 5


def test_a_subclass_with_code_of_its_own_stays_with_a_warning():
    class Mine(KERAS):
        pass

    model = tf.keras.Sequential([layers.Dense(2, input_shape=(3,)), Mine(name="mine")])
    with pytest.warns(UserWarning, match="mine is a Mine, .* it is not replaced"):
        assert type(accum.replace_batchnorm_layers(model, 2).get_layer("mine")) is Mine


OUTER = {
    "own": lambda cls: Pair(cls, name="outer"),
    "wrapper": lambda cls: layers.TimeDistributed(cls(name="inner_norm"), name="outer"),
}


@pytest.mark.parametrize("make", OUTER.values(), ids=list(OUTER))
def test_batch_norm_inside_of_another_layer_stays_with_a_warning(make):
    model = tf.keras.Sequential([tf.keras.Input((3, 6)), make(KERAS)])
    with pytest.warns(UserWarning, match=r"outer is a .*, whose inner layers \['inner_norm'\] are not replaced: use"):
        accum.replace_batchnorm_layers(model, 2)


@pytest.mark.parametrize("make", OUTER.values(), ids=list(OUTER))
def test_what_the_warning_advises_brings_none(make):
    model = tf.keras.Sequential([tf.keras.Input((3, 6)), make(accum.AccumBatchNormalization)])
    x = np.random.RandomState(0).normal(size=(4, 3, 6)).astype("float32")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*not replaced")
        swapped = accum.replace_batchnorm_layers(model, 2)
    np.testing.assert_array_equal(swapped.predict(x), model.predict(x))


@pytest.mark.law("L17")
def test_bad_arguments_are_refused():
    class Subclassed(tf.keras.Model):
        pass

    for model in (Subclassed(), None, layers.Dense(2)):
        with pytest.raises(TypeError, match="`model` must be a functional or Sequential model. Received"):
            accum.replace_batchnorm_layers(model, 2)
    with pytest.raises(ValueError, match="`accum_steps` must be an int >= 1. Received: accum_steps=0."):
        accum.replace_batchnorm_layers(sequential(), 0)
    with pytest.raises(ValueError, match="`position` must be one of"):
        accum.replace_batchnorm_layers(sequential(), 2, position="after")
    if "renorm" in inspect.signature(KERAS.__init__).parameters:  # Keras 3 had none at first
        renorm = tf.keras.Sequential([KERAS(renorm=True, input_shape=(3,))])
        with pytest.raises(ValueError, match="does not support `renorm`"):
            accum.replace_batchnorm_layers(renorm, 2)
