"""A model that splits the batches of its train step trains as a plain model that computes them whole (law L18)."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_near
from optimizers import mainly
from replicas import mirrored
from versions import IS_KERAS_3, IS_WINE, TF_VERSION, XLA_ENDS
from warned import silent, warned
from whole_batches import REGULARIZED, SUMS_ACTIVITIES

import accum

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.law("L18")]

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
    """A model with weights that do not depend on TensorFlow's initialisers."""
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
    hidden = layers.Flatten()(layers.Conv2D(3, 2, activation="relu", **REGULARIZED)(inputs))
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


TRACED_AND_EAGER = [pytest.param(False, id="traced", marks=pytest.mark.slow), pytest.param(True, id="eager")]


def of_an_oracle(model):
    """What `compile` is given: a plain model computes the same eagerly, and that takes no trace."""
    return {} if hasattr(model, "micro_batch_size") else {"run_eagerly": True}


def trained(model, data, compile_with=None, fit_with=None, optimizer=None):
    """Train a model. Returns its weights, its logs, and how often `fit` called back."""
    calls = []
    counting = tf.keras.callbacks.LambdaCallback(on_batch_end=lambda batch, logs: calls.append(batch))
    made = tf.keras.optimizers.Adam(0.05) if optimizer is None else optimizer()
    options = dict({"loss": "mse"}, **JIT)
    if not {"jit_compile", "steps_per_execution"} & set(compile_with or {}):
        options.update(of_an_oracle(model))
    model.compile(made, **dict(options, **(compile_with or {})))
    fit_options = dict({"batch_size": BATCH}, **(fit_with or {}))
    history = model.fit(**data, **fit_options, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[counting]).history
    return model.get_weights(), {name: values for name, values in history.items() if name != "lr"}, calls


def split(model, micro_batch_size=8, **options):
    return accum.GradientAccumulateModel.from_model(model, micro_batch_size=micro_batch_size, **options)


def assert_same(ours, plain, rtol=2e-5):
    assert_near(ours[0], plain[0], rtol=rtol, atol=rtol)
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
        # traced: eagerly, Keras 3 itself logs other means of the losses of several outputs
        {"loss": {"left": "mse", "right": "mae"}, "loss_weights": {"left": 1.0, "right": 0.3}, "run_eagerly": False},
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
    "float64": (
        lambda: tf.keras.Sequential([tf.keras.Input((3,)), layers.Dense(2, dtype="float64")]),
        {"x": X, "y": Y.astype("float64")},
        {"run_eagerly": True},
        {},
    ),
    "eager": (one_to_one, {"x": X, "y": Y}, {"run_eagerly": True, "metrics": ["mae"]}, {}),
    "sum": (one_to_one, {"x": X, "y": Y}, {"loss": losses.MeanSquaredError(reduction="sum")}, {}),
}
if TF_VERSION >= (2, 4):
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


SIZES = [(case, 8) for case in CASES] + [("arrays", 1), ("arrays", BATCH), ("mask", 1), ("mask", BATCH)]


@functools.lru_cache(maxsize=None)
def plainly(case):
    """One oracle for all sizes."""
    make, data, compile_with, fit_with = CASES[case]
    return trained(built(make, data), data, compile_with, fit_with)


TRACED = [("arrays", 8), ("dicts, two outputs", 8), ("mask", 1), ("several steps per execution", 8)]
RUNS = mainly([(*pair, False) for pair in SIZES], *[(*pair, False) for pair in TRACED[:3]])
RUNS += [(*pair, True) for pair in SIZES if pair not in TRACED and pair != ("arrays", 1)]


@pytest.mark.parametrize("case, size, run_eagerly", RUNS)
def test_micro_batches_make_the_steps_of_the_whole_batch(case, size, run_eagerly):
    make, data, compile_with, fit_with = CASES[case]
    compile_with = dict(compile_with, run_eagerly=True) if run_eagerly else compile_with
    ours = trained(split(built(make, data), size), data, compile_with, fit_with)
    assert_same(ours, plainly(case))


@pytest.mark.slow
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


@pytest.mark.slow
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


# --------------------------------------------------------------------------------------------------------------------
# Together with everything else


class OwnTrainStep(tf.keras.Model):
    """A train step as users write it: two optimizers, a metric of its own, a number in its logs."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(4, activation="tanh"), layers.Dense(2)
        self.tracker = tf.keras.metrics.Mean(name="tracked")
        self.error = tf.keras.metrics.MeanAbsoluteError(name="error")

    @property
    def metrics(self):
        return [self.tracker, self.error]

    def call(self, inputs):
        return self.out(self.hidden(inputs))

    def compile(self, first, second):
        super().compile(**JIT)
        self.first, self.second = first, second

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = tf.reduce_mean((outputs - y) ** 2)
        variables = self.hidden.trainable_variables + self.out.trainable_variables
        grads = tape.gradient(loss, variables)
        self.first.apply_gradients(list(zip(grads[:2], variables[:2])))
        self.second.apply_gradients(list(zip(grads[2:], variables[2:])))
        self.tracker.update_state(loss)
        self.error.update_state(y, outputs)
        return {"tracked": self.tracker.result(), "error": self.error.result(), "now": tf.reduce_mean(outputs)}


def trained_by_own_step(micro_batch_size, eagerly=True):
    model = filled(built(OwnTrainStep, {"x": X}))
    if micro_batch_size:
        model = split(model, micro_batch_size, whole_batch=())
    model.compile(tf.keras.optimizers.SGD(0.2), tf.keras.optimizers.Adam(0.05))
    model.run_eagerly = eagerly
    logs = model.fit(X, Y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0).history
    return model.get_weights(), logs, []


@pytest.mark.slow
@pytest.mark.parametrize("eagerly", TRACED_AND_EAGER)
def test_a_train_step_of_the_user_runs_once_per_micro_batch(eagerly):
    plain = trained_by_own_step(None)
    assert_same(trained_by_own_step(8, eagerly), plain)
    assert differs(plain, (filled(built(OwnTrainStep, {"x": X})).get_weights(),))


class CallsTwice(OwnTrainStep):
    def train_step(self, data):
        super().train_step(data)
        return super().train_step(data)


class Adversarial(OwnTrainStep):
    """Updates its second half by a loss that sees the first half updated."""

    def train_step(self, data):
        x, y = data
        for layer, optimizer in ((self.hidden, self.first), (self.out, self.second)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            grads = tape.gradient(loss, layer.trainable_variables)
            optimizer.apply_gradients(list(zip(grads, layer.trainable_variables)))
        return {"loss": loss}


class Apart(OwnTrainStep):
    """Updates its second half after the first, and by a loss that does not see the first."""

    def train_step(self, data):
        x, y = data
        for layer, optimizer in ((self.hidden, self.first), (self.out, self.second)):
            with tf.GradientTape() as tape:
                inputs = x if layer is self.hidden else tf.ones((tf.shape(x)[0], 4))
                loss = tf.reduce_mean((layer(inputs) - 1.0) ** 2)
            grads = tape.gradient(loss, layer.trainable_variables)
            optimizer.apply_gradients(list(zip(grads, layer.trainable_variables)))
        return {"loss": loss}


SPLITS = [{"micro_batch_size": 8, "whole_batch": ()}, {"accum_steps": 2}]


def said_of_order(cls, options, eagerly):
    model = accum.GradientAccumulateModel.from_model(filled(built(cls, {"x": X})), **options)
    model.compile(tf.keras.optimizers.SGD(0.2), tf.keras.optimizers.Adam(0.05))
    model.run_eagerly = eagerly
    with warned("would see the updated weights") as said:
        model.fit(X, Y, batch_size=BATCH, verbose=0)
    return said


@pytest.mark.slow
@pytest.mark.parametrize("eagerly", TRACED_AND_EAGER)
@pytest.mark.parametrize("options", SPLITS, ids=["micro-batches", "cycles"])
def test_a_loss_that_would_see_an_earlier_update_is_warned_of_and_no_other(options, eagerly):
    assert any("SGD" in message for message in said_of_order(Adversarial, options, eagerly))
    assert not said_of_order(Apart, options, eagerly)


class Unusual(OwnTrainStep):
    """Does what can't be exact over micro-batches."""

    does = None

    def __init__(self):
        super().__init__()
        self.average = self.add_weight(name="average", shape=(), initializer="zeros", trainable=False)

    def train_step(self, data):
        logs = super().train_step(data)
        if self.does == "state":
            self.average.assign_add(1.0)
        if self.does == "derived":
            logs["perplexity"] = tf.exp(self.tracker.result())
        if self.does == "count":
            logs["count"] = tf.shape(data[0])[0]
        return logs


INEXACT = [("state", "changes variables once"), ("derived", "`Unusual.train_step`"), ("count", "`Unusual.train_step`")]


@pytest.mark.slow
@pytest.mark.parametrize("does, words", INEXACT)
def test_what_a_train_step_can_not_do_exactly_is_warned_of(does, words):
    model = split(filled(built(Unusual, {"x": X})), whole_batch=())
    model.does = does
    model.compile(tf.keras.optimizers.SGD(0.2), tf.keras.optimizers.Adam(0.05))
    with pytest.warns(UserWarning, match=words):
        model.fit(X, Y, batch_size=BATCH, verbose=0)


@pytest.mark.slow
def test_eagerly_the_variables_are_compared_in_the_first_batch_after_compile_alone():
    model = split(filled(built(Unusual, {"x": X})), whole_batch=())
    model.does = "state"
    said = []
    for _ in range(2):
        model.compile(tf.keras.optimizers.SGD(0.2), tf.keras.optimizers.Adam(0.05))
        model.run_eagerly = True
        with warned("changes variables") as lines:
            model.fit(X, Y, batch_size=BATCH, verbose=0)
        said.append(lines)
    assert [len(lines) for lines in said] == [1, 1] and "average" in said[0][0]


@pytest.mark.slow
def test_a_train_step_that_is_a_function_of_its_own_is_refused():
    class Decorated(OwnTrainStep):
        @tf.function
        def train_step(self, data):
            return OwnTrainStep.train_step(self, data)

    model = split(filled(built(Decorated, {"x": X})), whole_batch=())
    model.compile(tf.keras.optimizers.SGD(0.2), tf.keras.optimizers.Adam(0.05))
    with pytest.raises(ValueError, match="Remove the decorator"):
        model.fit(X, Y, batch_size=BATCH, verbose=0)


class EveryOther(tf.keras.Model):
    """A train step that updates in every second batch, within a conditional."""

    def __init__(self, micro_batch_size=None):
        super().__init__()
        self.out = layers.Dense(2)
        self.count = tf.Variable(0, trainable=False)
        self.size = micro_batch_size

    def call(self, inputs):
        return self.out(inputs)

    def train_step(self, data):
        loss = lambda x, y: tf.reduce_mean((self(x, training=True) - y) ** 2)
        with tf.GradientTape() as tape:
            value = loss(*data)
        grads = tape.gradient(value, self.trainable_variables)
        if self.size:
            value, grads = accum.value_and_gradients(loss, data, self.trainable_variables, self.size)

        def update():
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
            return tf.constant(1)

        tf.cond(tf.equal(self.count.assign_add(1) % 2, 0), update, lambda: tf.constant(0), name="every_other")
        return {"loss": value}


def every_other(*args):
    return filled(built(functools.partial(EveryOther, *args), {"x": X}))


@pytest.mark.slow
@pytest.mark.law("L17")
def test_an_optimizer_that_is_called_in_a_conditional_is_refused_with_its_name():
    model = split(every_other(), whole_batch=())
    model.compile("sgd", **JIT)
    with pytest.raises(ValueError, match="within a conditional or loop .*`accum.value_and_gradients`") as caught:
        model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert "Remove the decorator" not in str(caught.value) and "every_other_" in str(caught.value).split("Received")[1]


@pytest.mark.slow
def test_gradients_that_a_function_returns_may_be_applied_in_a_conditional():
    data = {"x": X, "y": Y}
    assert_same(trained(every_other(8), data, {"loss": None}), trained(every_other(), data, {"loss": None}))


def nested_gru(inputs):
    sequences = tf.keras.Input(batch_shape=(8, 3, 2))
    return tf.keras.Model(sequences, layers.GRU(2, stateful=True, name="state")(sequences))(inputs)


RECURRENT = {
    "LSTM": lambda: layers.LSTM(2, stateful=True, name="state"),
    "GRU": lambda: layers.GRU(2, stateful=True, name="state"),
    "SimpleRNN": lambda: layers.SimpleRNN(2, stateful=True, name="state"),
    "RNN": lambda: layers.RNN([layers.LSTMCell(2), layers.GRUCell(2)], stateful=True, name="state"),
    "Bidirectional": lambda: layers.Bidirectional(layers.LSTM(2, stateful=True, name="state")),
    "nested": lambda: nested_gru,
}
SEQUENCES = RANDOM.normal(size=(16, 3, 2)).astype("float32")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("kind", RECURRENT)
def test_a_state_of_each_example_is_not_handed_from_micro_batch_to_micro_batch(kind, method):
    inputs = tf.keras.Input(batch_shape=(8, 3, 2))
    model = split(tf.keras.Model(inputs, layers.Dense(2)(RECURRENT[kind]()(inputs))), 8)
    model.compile("sgd", "mse", **JIT)
    data = (SEQUENCES,) if method == "predict" else (SEQUENCES, Y[:16])
    with pytest.raises(ValueError, match="`stateful=True` has a state for each example .* Received: .*state'"):
        getattr(model, method)(*data, batch_size=16)


@pytest.mark.slow
def test_images_with_a_state_and_whole_batches_are_refused_too():
    inputs = tf.keras.Input(batch_shape=(8, 2, 4, 4, 1))
    outputs = layers.Dense(1)(layers.Flatten()(layers.ConvLSTM2D(2, 2, stateful=True, name="state")(inputs)))
    for options in ({"micro_batch_size": "auto"}, {"micro_batch_size": 8, "whole_batch": "loss"}):
        model = accum.GradientAccumulateModel.from_model(tf.keras.Model(inputs, outputs), **options)
        model.compile("sgd", "mse", run_eagerly=True)
        with pytest.raises(ValueError, match=r"Leave out `micro_batch_size`.* Received: \['state'\]"):
            model.train_on_batch(np.zeros((8, 2, 4, 4, 1), "float32"), np.zeros((8, 1), "float32"))


@pytest.mark.slow
@pytest.mark.parametrize("right", ["mse", losses.MeanSquaredError(reduction="none")], ids=["mean", "none"])
def test_losses_of_different_reductions_are_refused(right):
    model = split(filled(named()), whole_batch=())
    model.compile("sgd", {"left": losses.MeanSquaredError(reduction="sum"), "right": right}, **JIT)
    with pytest.raises(ValueError, match="either averaged or added up"):
        model.fit({"one": X, "other": OTHER}, {"left": Y, "right": Y}, batch_size=BATCH, verbose=0)


@pytest.mark.slow
def test_the_model_that_it_is_made_from_keeps_its_dropout(tmp_path):
    inputs = tf.keras.Input((3,))
    plain = tf.keras.Model(inputs, layers.Dense(2)(layers.Dropout(0.5)(inputs)))
    model = split(plain)
    model.compile("sgd", "mse", **JIT)
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert "call" not in vars(plain.layers[1])
    tf.saved_model.save(plain, str(tmp_path / "saved"))


@pytest.mark.slow
def test_an_optimizer_that_is_called_twice_in_a_train_step_is_refused():
    model = split(filled(built(CallsTwice, {"x": X})), whole_batch=())
    model.compile(tf.keras.optimizers.SGD(0.2), tf.keras.optimizers.Adam(0.05))
    with pytest.raises(ValueError, match="several times"):
        model.fit(X, Y, batch_size=BATCH, verbose=0)


@pytest.mark.slow
def test_transforms_and_clipping_see_the_gradient_of_the_batch():
    seen = []

    def halved(grads_and_vars):
        seen.append(len(grads_and_vars))
        return [(0.5 * grad, var) for grad, var in grads_and_vars]

    def halving():
        return tf.keras.optimizers.SGD(0.1)

    plain = trained(filled(one_to_one()), {"x": X, "y": Y}, optimizer=halving)
    ours = trained(
        split(filled(one_to_one()), transform=halved), {"x": X, "y": Y}, optimizer=lambda: tf.keras.optimizers.SGD(0.2)
    )
    assert_same(ours, plain)
    assert seen


@pytest.mark.slow
def test_adaptive_clipping_is_of_the_batch():
    data = {"x": X, "y": 9.0 * Y}
    whole = accum.GradientAccumulateModel.from_model(filled(one_to_one()), accum_steps=1, use_agc=True)
    plain, ours = trained(whole, data), trained(split(filled(one_to_one()), use_agc=True), data)
    assert_same(ours, plain)
    assert differs(trained(filled(one_to_one()), data, optimizer=lambda: tf.keras.optimizers.SGD(0.05)), plain)


def normalized(layer):
    inputs = tf.keras.Input((3,))
    return filled(tf.keras.Model(inputs, layers.Dense(2)(layer(inputs))))


@pytest.mark.slow
@pytest.mark.parametrize("eagerly", TRACED_AND_EAGER)
def test_batch_normalization_moves_once_a_batch(eagerly):
    plain = normalized(layers.BatchNormalization(momentum=0.5))
    ours = split(normalized(accum.AccumBatchNormalization(momentum=0.5)), whole_batch=())
    for model in (plain, ours):
        model.compile(tf.keras.optimizers.SGD(0.0), "mse", run_eagerly=eagerly or model is plain, **JIT)
        model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    for mine, whole in zip(ours.non_trainable_variables, plain.non_trainable_variables):
        np.testing.assert_allclose(mine.numpy(), whole.numpy(), rtol=2e-5, atol=2e-6)
    usual = split(normalized(layers.BatchNormalization(momentum=0.5)), whole_batch=())
    usual.compile(tf.keras.optimizers.SGD(0.0), "mse", run_eagerly=True, **JIT)
    with pytest.warns(UserWarning, match="replace_batchnorm_layers"):
        usual.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    assert np.abs(usual.non_trainable_variables[0].numpy() - plain.non_trainable_variables[0].numpy()).max() > 1e-3


@pytest.mark.slow
def test_frozen_layers_stay_and_recompiling_goes_on():
    def run(wrap):
        model = wrap(filled(one_to_one()))
        first = trained(model, {"x": X, "y": Y})
        model.layers[1].trainable = False
        second = trained(model, {"x": X, "y": Y})
        np.testing.assert_array_equal(second[0][0], first[0][0])
        return second

    assert_same(run(split), run(lambda model: model))


# --------------------------------------------------------------------------------------------------------------------
# Data of every kind


def as_ragged():
    inputs = tf.keras.Input((None,), dtype="int32", ragged=not IS_KERAS_3)
    hidden = layers.Lambda(lambda ids: tf.reduce_sum(tf.cast(ids, tf.float32), axis=1)[:, None])(inputs)
    return filled(tf.keras.Model(inputs, layers.Dense(2)(hidden)))


@pytest.mark.slow
@pytest.mark.tf(keras=2, because="the layers of Keras 3 take no ragged tensors")
def test_ragged_inputs_are_split_by_rows():
    rows = [list(row[: 1 + number % 4]) for number, row in enumerate(TOKENS)]

    def run(wrap):
        model = wrap(as_ragged())
        model.compile(tf.keras.optimizers.SGD(1e-3), "mse", **of_an_oracle(model))
        dataset = tf.data.Dataset.from_tensor_slices((tf.ragged.constant(rows, dtype=tf.int32), Y)).batch(BATCH)
        logs = model.fit(dataset, epochs=EPOCHS, verbose=0).history
        return model.get_weights(), logs, []

    assert_same(run(split), run(lambda model: model))


class TakesSparse(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.kernel = self.add_weight(name="kernel", shape=(3, 2), initializer="ones")

    def call(self, inputs):
        kernel = self.kernel if not hasattr(self.kernel, "value") or callable(self.kernel.value) else self.kernel.value
        return tf.sparse.sparse_dense_matmul(inputs, kernel)


class OwnLoop(TakesSparse):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.call(x) - y) ** 2)
        self.optimizer.apply_gradients(
            list(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
        )
        return {"loss": loss}


@pytest.mark.slow
@pytest.mark.tf(keras=2, because="the data of Keras 3's `fit` is dense")
def test_sparse_inputs_are_split_by_rows():
    def run(wrap):
        model = wrap(OwnLoop())
        model.compile(tf.keras.optimizers.SGD(0.1), **of_an_oracle(model))
        sparse = tf.sparse.from_dense(np.where(X > 0.3, X, 0.0))
        dataset = tf.data.Dataset.from_tensor_slices((sparse, Y)).batch(BATCH)
        model.fit(dataset, epochs=EPOCHS, verbose=0)
        return model.get_weights(), {}, []

    assert_same(run(split), run(lambda model: model))


class Scaled(tf.keras.Model):
    """Gets a number for the whole batch beside the examples."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, inputs):
        x, factor = inputs
        return factor * self.dense(x)


@pytest.mark.slow
def test_what_has_no_batch_axis_is_passed_on_whole():
    def run(wrap):
        plain = Scaled()
        plain((tf.constant(X[:1]), tf.constant(2.0)))
        model = wrap(filled(plain))
        model.compile(tf.keras.optimizers.SGD(0.1), "mse", **JIT, **of_an_oracle(model))
        batches = [((X[start : start + BATCH], np.float32(2.0)), Y[start : start + BATCH]) for start in (0, 20, 40)]
        signature = (
            (tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([], tf.float32)),
            tf.TensorSpec([None, 2], tf.float32),
        )
        if hasattr(tf.data.experimental, "assert_cardinality") and TF_VERSION >= (2, 4):
            dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
        else:
            types = tf.nest.map_structure(lambda spec: spec.dtype, signature)
            shapes = tf.nest.map_structure(lambda spec: spec.shape, signature)
            dataset = tf.data.Dataset.from_generator(lambda: iter(batches), types, shapes)
        model.fit(dataset, verbose=0)
        return model.get_weights(), {}, []

    assert_same(run(split), run(lambda model: model))


@pytest.mark.slow
@pytest.mark.parametrize("eagerly", [False, True], ids=["traced", "eager"])
def test_first_axes_that_differ_are_refused(eagerly):
    model = split(OwnLoopWithEdges())
    model.compile(tf.keras.optimizers.SGD(0.1), run_eagerly=eagerly, **({} if eagerly else JIT))
    dataset = tf.data.Dataset.from_tensors((X[:20], np.zeros((7, 2), "float32")))
    # The train step runs once, so its own arithmetic says so as in plain Keras; in micro-batches, accum does.
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="first axis|must be equal|Incompatible"):
        model.fit(dataset, verbose=0)


class OwnLoopWithEdges(OwnTrainStep):
    def compile(self, optimizer, **options):
        tf.keras.Model.compile(self, optimizer, **options)


# --------------------------------------------------------------------------------------------------------------------
# Arguments, files, what is shown


@pytest.mark.slow
def test_the_size_and_the_whole_batch_are_in_the_config_and_the_size_is_shown():
    model = split(one_to_one(), 8, whole_batch=["batch_norm"])
    again = type(model).from_config(model.get_config())
    assert again.micro_batch_size == model.micro_batch_size == 8
    assert tuple(again.get_config()["accumulation"]["whole_batch"]) == ("batch_norm",)
    assert accum.GradientAccumulateModel.from_model(one_to_one(), accum_steps=2).micro_batch_size is None
    assert "micro_batch_size=8" in repr(model)


@pytest.mark.slow
def test_a_saved_model_splits_its_batches_again(tmp_path):
    model = split(filled(one_to_one()), 8)
    trained(model, {"x": X, "y": Y})
    path = str(tmp_path / ("model.keras" if IS_KERAS_3 else "model.h5"))
    model.save(path)
    loaded = tf.keras.models.load_model(path)
    assert loaded.micro_batch_size == 8
    assert_same(
        (loaded.predict(X), loaded.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0).history, []),
        (model.predict(X), model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0).history, []),
    )


# --------------------------------------------------------------------------------------------------------------------
# Replicas


@pytest.mark.slow
def test_synchronized_batch_normalization_is_refused():
    with mirrored().scope():
        model = split(normalized(accum.AccumBatchNormalization(synchronized=True)), whole_batch=())
        model.compile("sgd", "mse", **JIT)
    with pytest.raises(ValueError, match="synchronized over replicas"):
        model.fit(X, Y, batch_size=BATCH, verbose=0)


@pytest.mark.slow
@pytest.mark.tf("2.4", because="TF 2.2 and 2.3 have an experimental `LossScaleOptimizer`")
def test_an_overflow_in_one_micro_batch_skips_the_step():
    def run(wrap):
        model = wrap(filled(one_to_one()))
        inner = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1))
        model.compile(inner, "mse", **JIT, **of_an_oracle(model))
        x = X[:40].copy()
        x[3] = np.inf  # in the first of two batches
        model.fit(x, Y[:40], batch_size=BATCH, shuffle=False, verbose=0)
        return model.get_weights(), {}, []

    ours, plain = run(split), run(lambda model: model)
    assert_same(ours, plain)
    assert np.isfinite(ours[0][0]).all()
    assert differs(ours, (filled(one_to_one()).get_weights(),))


@pytest.mark.skipif(IS_WINE, reason=XLA_ENDS)
@pytest.mark.slow
@pytest.mark.tf("2.5", because="`compile` takes `jit_compile` since 2.5")
@pytest.mark.parametrize("case", ["arrays", pytest.param("mask", marks=pytest.mark.slow)])
def test_xla_compiles_it(case):
    make, data, compile_with, _ = CASES[case]
    plain = trained(built(make, data), data, compile_with)
    assert_same(trained(split(built(make, data), 8), data, dict(compile_with, jit_compile=True)), plain)


@pytest.mark.slow
def test_activity_regularization_is_that_of_the_full_batch_or_warns():
    """It is a mean over examples, but a sum in Keras 3 before 3.13."""

    def made():
        return filled(tf.keras.Sequential([tf.keras.Input((3,)), layers.Dense(2, activity_regularizer="l2")]))

    plain, ours = made(), split(made(), 2)
    for model in (plain, ours):
        model.compile(tf.keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    plain.train_on_batch(X[:8], Y[:8])
    with warned("Before Keras 3.13, the regularization") as said:
        ours.train_on_batch(X[:8], Y[:8])
    assert bool(said) == SUMS_ACTIVITIES
    apart = max(np.abs(mine - whole).max() for mine, whole in zip(ours.get_weights(), plain.get_weights()))
    assert apart > 1e-3 if SUMS_ACTIVITIES else apart < 2e-6


@pytest.mark.slow
@pytest.mark.tf(keras=3, because="Keras 2 knows no reduction None")
def test_no_reduction_is_neither_a_sum_nor_a_mean():
    model = split(built(one_to_one, {"x": X}), whole_batch=())
    model.compile("sgd", losses.MeanSquaredError(reduction=None), run_eagerly=True)
    with pytest.raises(ValueError, match=r"leave out `whole_batch`.*all losses be means \(`reduction='sum_over_batch_"):
        model.train_on_batch(X[:8], Y[:8])


class Focal(losses.Loss):
    """As in TensorFlow Addons: one number for each example, of reduction NONE unless told otherwise."""

    def __init__(self, reduction=None if IS_KERAS_3 else "none"):
        super().__init__(reduction=reduction, name="focal")

    def call(self, y_true, y_pred):
        return tf.reduce_sum(tf.abs(y_true - y_pred) ** 3, axis=-1)


@pytest.mark.slow
@pytest.mark.law("L19")
@pytest.mark.parametrize(
    "loss,options",
    [(Focal, {"whole_batch": "loss"}), (lambda: Focal("sum_over_batch_size"), {}), (lambda: Focal("sum"), {})],
)
def test_what_that_error_names_is_exact(loss, options):
    plain, ours = built(one_to_one, {"x": X}), split(built(one_to_one, {"x": X}), 3, **options)
    ours.set_weights(plain.get_weights())
    for model in (plain, ours):
        model.compile(tf.keras.optimizers.SGD(0.01), loss(), run_eagerly=True)
        for _ in range(2):
            model.train_on_batch(X[:8], Y[:8])
    assert_near(ours.get_weights(), plain.get_weights())


@pytest.fixture
def float64():
    def use(dtype):
        tf.keras.backend.set_floatx(dtype)
        if hasattr(
            tf.keras.mixed_precision, "set_global_policy"
        ):  # one that was ever set, or asked for in Keras 3, stays
            tf.keras.mixed_precision.set_global_policy(dtype)

    use("float64")
    yield
    use("float32")


@pytest.mark.slow
@pytest.mark.tf("2.3", because="TF 2.2 computes losses in float32")
@pytest.mark.parametrize("options", [{}, {"whole_batch": "loss"}], ids=str)
def test_in_float64_micro_batches_add_no_rounding_of_float32(float64, options):
    """20 = 2 + 3 * 6: the share of the first is no number of float32."""

    def run(wrap):
        inputs = tf.keras.Input((3,))
        hidden = layers.Dense(4, activation="tanh", kernel_regularizer="l2")(inputs)
        model = wrap(filled(tf.keras.Model(inputs, layers.Dense(2)(hidden))))
        model.compile(tf.keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        model.fit(X[:20].astype("float64"), Y[:20].astype("float64"), batch_size=20, verbose=0)
        return model.get_weights()

    plain = run(lambda model: model)
    ours = run(lambda model: accum.GradientAccumulateModel.from_model(model, micro_batch_size=3, **options))
    assert_near(ours, plain, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"micro_batch_size": 5}, {"accum_steps": 4}], ids=str)
def test_a_mean_loss_with_regularization_warns_of_nothing(options):
    model = accum.GradientAccumulateModel.from_model(one_to_one(kernel_regularizer="l2"), **options)
    model.compile("sgd", "mse", run_eagerly=True)
    with silent():
        model.fit(X[:40], Y[:40], batch_size=5 if "accum_steps" in options else BATCH, verbose=0)


@pytest.mark.law("L18")
@pytest.mark.parametrize("accum_steps", [1, 2])
def test_weights_of_batches_do_not_weigh_the_parts_of_a_batch(accum_steps):
    """Batches count alike; of eight examples, parts have two, three and three."""
    x, y = (np.random.RandomState(at).normal(size=(16, at)).astype("float32") for at in (3, 1))
    finals = []
    for options in ({}, {"accum_steps": accum_steps, "micro_batch_size": 3, "micro_batch_weight": "equal"}):
        model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1, kernel_initializer="ones")])
        model = accum.GradientAccumulateModel.from_model(model, **options) if options else model
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
        history = model.fit(x, y, batch_size=8 if options else 8 * accum_steps, shuffle=False, verbose=0).history
        evaluated = np.ravel(model.evaluate(x, y, batch_size=8, verbose=0))
        finals.append(model.get_weights() + [np.array(history["loss"]), evaluated])
    assert_near(*finals, rtol=2e-5)
