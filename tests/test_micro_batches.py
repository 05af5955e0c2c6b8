"""A model that splits the batches of its train step trains as a plain model that computes them whole (law L18)."""

import numpy as np
import pytest
import tensorflow as tf
from exceptions import IS_KERAS_3, LINE
from replicas import mirrored

import accum

pytestmark = [pytest.mark.keras_face, pytest.mark.law("L18")]

RANDOM = np.random.RandomState(0)
COUNT, BATCH, EPOCHS = 44, 20, 2  # the last batch of an epoch has 4 examples
X, OTHER, Y = (RANDOM.normal(size=(COUNT, size)).astype("float32") for size in (3, 3, 2))
CLASSES = RANDOM.randint(0, 3, size=COUNT)
WEIGHTS = np.linspace(0.0, 3.0, COUNT).astype("float32")
TOKENS = RANDOM.randint(1, 5, size=(COUNT, 4))
TOKENS[::3, 1:] = 0
TOKENS[8:16] = 0  # a whole micro-batch of padding
IMAGES = RANDOM.normal(size=(COUNT, 4, 4, 2)).astype("float32")
layers, losses = tf.keras.layers, tf.keras.losses
JIT = {"jit_compile": False} if IS_KERAS_3 else {}  # XLA compiles for seconds: it has tests of its own


def filled(model):
    """A model with weights that do not depend on the line's initialisers."""
    random = np.random.RandomState(1)
    model.set_weights([0.5 * random.normal(size=np.shape(weight)) for weight in model.get_weights()])
    return model


def one_to_one(**dense):
    inputs = tf.keras.Input((3,))
    hidden = layers.Dense(4, activation="tanh", **dense)(inputs)
    return tf.keras.Model(inputs, layers.Dense(2)(hidden))


def named():
    one, other = tf.keras.Input((3,), name="one"), tf.keras.Input((3,), name="other")
    hidden = layers.Dense(4, activation="tanh")(layers.Concatenate()([one, other]))
    outputs = {name: layers.Dense(2, name=name)(hidden) for name in ("left", "right")}
    return tf.keras.Model({"one": one, "other": other}, outputs)


def masked():
    inputs = tf.keras.Input((4,), dtype="int32")
    return tf.keras.Model(inputs, layers.Dense(2)(layers.Embedding(5, 3, mask_zero=True)(inputs)))


def convolutional():
    inputs = tf.keras.Input((4, 4, 2))
    hidden = layers.Flatten()(layers.Conv2D(3, 2, activation="relu", activity_regularizer="l2")(inputs))
    return tf.keras.Model(inputs, layers.Dense(3)(hidden))


class Subclassed(tf.keras.Model):
    """Sequences whose padding an embedding masks, and a loss of its own beside the compiled one."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(4, activation="tanh")
        self.out = layers.Dense(2)

    def call(self, inputs):
        hidden = self.hidden(inputs)
        self.add_loss(0.1 * tf.reduce_mean(hidden**2))
        return self.out(hidden)


def trained(model, data, compile_with=None, fit_with=None, optimizer=None):
    """Train a model. Returns its weights, its logs, and how often `fit` called back."""
    calls = []
    counting = tf.keras.callbacks.LambdaCallback(on_batch_end=lambda batch, logs: calls.append(batch))
    made = tf.keras.optimizers.Adam(0.05) if optimizer is None else optimizer()
    model.compile(made, **dict({"loss": "mse"}, **dict(JIT, **(compile_with or {}))))
    given = dict({"batch_size": BATCH}, **(fit_with or {}))
    history = model.fit(
        **data, **given, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[counting]
    ).history
    return model.get_weights(), {name: values for name, values in history.items() if name != "lr"}, calls


def split(model, micro_batch_size=8, **options):
    return accum.GradientAccumulateModel.from_model(model, micro_batch_size=micro_batch_size, **options)


def assert_same(ours, plain, rtol=2e-5):
    for mine, whole in zip(ours[0], plain[0]):
        np.testing.assert_allclose(mine, whole, rtol=rtol, atol=rtol)
    assert sorted(ours[1]) == sorted(plain[1])
    for name in plain[1]:
        np.testing.assert_allclose(ours[1][name], plain[1][name], rtol=rtol, atol=rtol, err_msg=name)
    assert ours[2] == plain[2]


def differs(ours, plain):
    return any(np.abs(mine - whole).max() > 1e-3 for mine, whole in zip(ours[0], plain[0]))


CASES = {
    "arrays": (one_to_one, {"x": X, "y": Y}, {"metrics": ["mae"]}, {"validation_data": (X, Y)}),
    "sample weights": (
        one_to_one,
        {"x": X, "y": Y, "sample_weight": WEIGHTS},
        {"weighted_metrics": ["mse"]},
        {},
    ),
    "class weights": (
        lambda: tf.keras.Sequential([layers.Dense(3)]),
        {"x": X, "y": CLASSES, "class_weight": {0: 0.2, 1: 3.0, 2: 1.0}},
        {"loss": losses.SparseCategoricalCrossentropy(from_logits=True), "metrics": ["accuracy"]},
        {},
    ),
    "dicts, two outputs": (
        named,
        {"x": {"one": X, "other": OTHER}, "y": {"left": Y, "right": 2.0 * Y}},
        {"loss": {"left": "mse", "right": "mae"}, "loss_weights": {"left": 1.0, "right": 0.3}},
        {},
    ),
    "mask": (masked, {"x": TOKENS, "y": np.repeat(Y[:, None], 4, axis=1)}, {"metrics": ["mae"]}, {}),
    "regularization": (lambda: one_to_one(kernel_regularizer="l2"), {"x": X, "y": Y}, {}, {}),
    "activity regularization": (
        convolutional,
        {"x": IMAGES, "y": CLASSES},
        {"loss": losses.SparseCategoricalCrossentropy(from_logits=True)},
        {},
    ),
    "subclassed, added loss": (Subclassed, {"x": X, "y": Y}, {}, {}),
    "eager": (one_to_one, {"x": X, "y": Y}, {"run_eagerly": True, "metrics": ["mae"]}, {}),
    "sum": (one_to_one, {"x": X, "y": Y}, {"loss": losses.MeanSquaredError(reduction="sum")}, {}),
}
if LINE >= (2, 4):
    CASES["several steps per execution"] = (
        one_to_one,
        {"x": X[:40], "y": Y[:40]},
        {"steps_per_execution": 2},
        {},
    )


def built(make, data):
    model = make()
    if not model.built:
        model(tf.nest.map_structure(lambda part: tf.constant(part[:1]), data["x"]))
    return filled(model)


@pytest.mark.line
@pytest.mark.parametrize("size", [1, 8, BATCH])
@pytest.mark.parametrize("case", CASES)
def test_micro_batches_make_the_steps_of_the_whole_batch(case, size):
    make, data, compile_with, fit_with = CASES[case]
    plain = trained(built(make, data), data, compile_with, fit_with)
    ours = trained(split(built(make, data), size), data, compile_with, fit_with)
    assert_same(ours, plain)


def test_micro_batches_that_each_make_a_step_differ():
    plain = trained(filled(one_to_one()), {"x": X, "y": Y})
    assert differs(trained(filled(one_to_one()), {"x": X, "y": Y}, fit_with={"batch_size": 8}), plain)


# --------------------------------------------------------------------------------------------------------------------
# Never more examples at once


class Counting(layers.Layer):
    """Notes how many examples each forward pass has."""

    seen = []

    def call(self, inputs):
        def note(count):
            self.seen.append(int(count))
            return np.int32(count)

        with tf.control_dependencies([tf.py_function(note, [tf.shape(inputs)[0]], tf.int32)]):
            return tf.ensure_shape(tf.identity(inputs), inputs.shape)


def counting():
    inputs = tf.keras.Input((3,))
    return filled(tf.keras.Model(inputs, layers.Dense(2)(Counting()(inputs))))


@pytest.mark.parametrize("eagerly", [False, True], ids=["traced", "eager"])
def test_no_forward_pass_has_more_examples_than_a_micro_batch(eagerly):
    model = split(counting())
    model.compile("sgd", "mse", run_eagerly=eagerly, **({} if eagerly else JIT))
    Counting.seen.clear()
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert Counting.seen == [4, 8, 8, 4, 8, 8, 4]
    Counting.seen.clear()
    model.evaluate(X, Y, batch_size=BATCH, verbose=0)
    model.predict(X, batch_size=BATCH)
    assert Counting.seen == 2 * [4, 8, 8, 4, 8, 8, 4]


def test_evaluation_and_prediction_are_those_of_the_whole_batch():
    plain, ours = filled(one_to_one()), split(filled(one_to_one()), 3)
    for model in (plain, ours):
        model.compile("sgd", "mse", metrics=["mae"], **JIT)
    np.testing.assert_allclose(ours.predict(X, batch_size=BATCH), plain.predict(X, batch_size=BATCH), atol=2e-6)
    np.testing.assert_allclose(ours.evaluate(X, Y, verbose=0), plain.evaluate(X, Y, verbose=0), rtol=2e-5)
