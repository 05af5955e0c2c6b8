"""Metrics of a model that splits its batches are those of plain Keras, also the user's own (laws L17, L18)."""

import warnings

import numpy as np
import pytest
import tensorflow as tf
from models import from_model
from replicas import mirrored
from versions import IS_KERAS_3, IS_WINE, XLA_ENDS
from warned import silent

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.law("L18"), pytest.mark.slow]

RANDOM = np.random.RandomState(0)
COUNT, BATCH = 44, 20  # the last batch of an epoch has 4 examples
X = RANDOM.normal(size=(COUNT, 3)).astype("float32")
Y = (RANDOM.uniform(size=(COUNT, 2)) > 0.6).astype("float32")
WEIGHTS = np.linspace(0.0, 3.0, COUNT).astype("float32")
TOKENS = RANDOM.randint(0, 3, size=(COUNT, 3))
layers, metrics = tf.keras.layers, tf.keras.metrics
JIT = {"jit_compile": False} if IS_KERAS_3 else {}
EAGER = [pytest.param(False, id="traced", marks=pytest.mark.slow), pytest.param(True, id="eager")]


def dice(y_true, y_pred):
    """One number for all examples, which no mean over micro-batches gives."""
    y_true, y_pred = tf.cast(y_true, tf.float32), tf.cast(y_pred, tf.float32)
    return 2.0 * tf.reduce_sum(y_true * y_pred) / (tf.reduce_sum(y_true) + tf.reduce_sum(y_pred) + 1e-3)


def root_mean_square(y_true, y_pred):
    """One number too, that no sum near zero divides."""
    return tf.sqrt(tf.reduce_mean((tf.cast(y_true, tf.float32) - y_pred) ** 2))


def worst_of_each_class(y_true, y_pred):
    return tf.reduce_max(tf.abs(tf.cast(y_true, tf.float32) - y_pred), axis=0)


class MeanOfNumbers(metrics.Metric):
    """Adds one number per call."""

    def __init__(self, function=dice, name="of_numbers"):
        super().__init__(name=name)
        self.function = function
        self.total = self.add_weight(name="total", shape=(), initializer="zeros")
        self.calls = self.add_weight(name="calls", shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        number = self.function(y_true, y_pred)
        if sample_weight is not None:
            number *= tf.reduce_max(tf.cast(sample_weight, tf.float32))
        self.total.assign_add(number)
        self.calls.assign_add(1.0)

    def result(self):
        return tf.math.divide_no_nan(tf.convert_to_tensor(self.total), tf.convert_to_tensor(self.calls))


class Dice(metrics.Mean):
    """A subclass of Keras' mean."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(dice(y_true, y_pred))


class Counted(MeanOfNumbers):
    """Says that it adds up over examples, though it does not."""

    looks_across_examples = False


def network(seed=1):
    inputs = tf.keras.Input((3,))
    return filled(tf.keras.Model(inputs, layers.Dense(2, activation="sigmoid")(inputs)), seed)


def filled(model, seed=1):
    random = np.random.RandomState(seed)
    model.set_weights([random.normal(size=np.shape(weight)) for weight in model.get_weights()])
    return model


def logged(model, x=X, y=Y, epochs=2, **compile_with):
    """The logs of training and validation, and those of `evaluate`."""
    model.compile(tf.keras.optimizers.SGD(0.5), **dict({"loss": "mse"}, **compile_with))
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    logs = model.fit(x, y, epochs=epochs, validation_data=(x, y), **options).history
    return dict(logs, evaluated=model.evaluate(x, y, batch_size=BATCH, verbose=0))


def assert_same(ours, plain):
    assert sorted(ours) == sorted(plain)
    for name, values in plain.items():
        np.testing.assert_allclose(ours[name], values, rtol=2e-5, err_msg=name)


def own_metrics():
    return [MeanOfNumbers(), Dice(name="subclass"), dice, worst_of_each_class, "mae", metrics.AUC(name="auc")]


@pytest.mark.parametrize("eagerly", EAGER)
@pytest.mark.parametrize("size", [8, "auto"])
def test_metrics_of_the_user_see_the_whole_batch(eagerly, size):
    plain = logged(network(), metrics=own_metrics(), run_eagerly=True)
    options = {"run_eagerly": eagerly, **({} if eagerly else JIT)}
    with silent():
        warnings.filterwarnings(
            "ignore", "With `whole_batch`, the Python code of the model's `call` runs once"
        )  # eagerly
        ours = logged(from_model(network(), micro_batch_size=size), metrics=own_metrics(), **options)
    assert_same(ours, plain)


def test_they_would_differ_as_means_of_micro_batches():
    plain = logged(network(), metrics=[MeanOfNumbers()], run_eagerly=True)
    ours = logged(from_model(network(), micro_batch_size=8, whole_batch=()), metrics=[Counted()], run_eagerly=True)
    assert np.abs(np.subtract(ours["of_numbers"], plain["of_numbers"])).max() > 1e-3


def test_weights_and_several_outputs_reach_them_too():
    def run(wrap):
        inputs = tf.keras.Input((3,))
        outputs = [layers.Dense(2, activation="sigmoid", name=name)(inputs) for name in ("left", "right")]
        model = wrap(filled(tf.keras.Model(inputs, outputs)))
        kinds = {"left": [MeanOfNumbers(), "mae"], "right": [MeanOfNumbers(name="second")]}
        weighted = {"right": [MeanOfNumbers(name="weighted")]}
        model.compile(tf.keras.optimizers.SGD(0.5), "mse", metrics=kinds, weighted_metrics=weighted, **JIT)
        data = tf.data.Dataset.from_tensor_slices((X, (Y, 1.0 - Y), (WEIGHTS, WEIGHTS[::-1]))).batch(BATCH)
        return model.fit(data, epochs=2, verbose=0).history

    assert_same(run(lambda model: from_model(model, micro_batch_size=8)), run(lambda model: model))


@pytest.mark.parametrize("eagerly", EAGER)
def test_masks_reach_them_too(eagerly):
    def of_each_token(y_true, y_pred):  # compared with the whole batch
        errors = tf.reduce_max(tf.abs(tf.cast(y_true, tf.float32) - y_pred), axis=-1)
        return errors / tf.reduce_max(errors)

    def make():
        inputs = tf.keras.Input((3,), dtype="int32")
        return filled(tf.keras.Model(inputs, layers.Dense(2)(layers.Embedding(4, 2, mask_zero=True)(inputs))))

    def kinds():
        numbers = [MeanOfNumbers(root_mean_square, name) for name in ("one", "other")]
        return {"metrics": [numbers[0], of_each_token], "weighted_metrics": [numbers[1]]}

    x, y = TOKENS, np.repeat(Y[:, None], 3, axis=1)
    plain = logged(make(), x, y, run_eagerly=True, **kinds())
    options = {"run_eagerly": eagerly, **({} if eagerly else JIT)}
    assert_same(logged(from_model(make(), micro_batch_size=8), x, y, **kinds(), **options), plain)


class OwnStep(tf.keras.Model):
    """A train step that updates its own metrics: with examples, or with numbers."""

    def __init__(self, others=()):
        super().__init__()
        self.dense = layers.Dense(2, activation="sigmoid")
        self.whole, self.mean, self.others = MeanOfNumbers(), MeanOfLosses(name="mean"), list(others)

    @property
    def metrics(self):
        return [self.whole, self.mean] + self.others

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = tf.reduce_mean((outputs - y) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        self.whole.update_state(y, outputs)
        self.mean.update_state(loss)
        for metric in self.others:
            self.update(metric, y, outputs)
        return {metric.name: metric.result() for metric in self.metrics}

    def update(self, metric, y, outputs):
        metric.update_state(tf.reduce_sum(outputs))


class MeanOfLosses(metrics.Mean):
    def update_state(self, values, sample_weight=None):
        return super().update_state(tf.exp(values), sample_weight=sample_weight)


def stepped(model_class=OwnStep, wrap=None, eagerly=True, others=()):
    model = model_class(others)
    model(X[:1])
    model = filled(model) if wrap is None else wrap(filled(model))
    model.compile(tf.keras.optimizers.SGD(0.5), run_eagerly=eagerly, **({} if eagerly else JIT))
    return model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history


def split(model):
    return from_model(model, micro_batch_size=8)


@pytest.mark.parametrize("eagerly", EAGER)
def test_a_train_step_of_the_user_updates_them_once(eagerly):
    assert_same(stepped(wrap=split, eagerly=eagerly), stepped())


class ByName(OwnStep):
    """Passes the arguments of means in other ways."""

    def update(self, metric, y, outputs):
        loss = tf.reduce_mean((y - outputs) ** 2)
        if metric.name == "values":
            metric.update_state(values=loss)
        elif metric.name == "both":
            metric.update_state(values=loss, sample_weight=tf.reduce_sum(outputs**2))
        else:
            metric.update_state(loss, tf.reduce_sum(outputs**2))


@pytest.mark.law("L18")
@pytest.mark.parametrize("eagerly", EAGER)
def test_a_mean_is_updated_once_however_its_arguments_are_passed(eagerly):
    def others():
        return [metrics.Mean(name=name) for name in ("values", "both", "by position")]

    assert_same(stepped(ByName, split, eagerly, others()), stepped(ByName, others=others()))


class OfParts(OwnStep):
    """Passes parts of the outputs, which a metric stacks and then counts, whatever the number of examples."""

    def update(self, metric, y, outputs):
        errors = [tf.abs(part) for part in tf.unstack(y - outputs, axis=1)]
        if metric.name == "numbers":
            metric.update_state([tf.reduce_mean(part) for part in errors], [tf.reduce_sum(part) for part in errors])
        elif metric.name == "rows":
            metric.update_state(errors)
        elif metric.name == "stacked":
            metric.update_state(tf.stack(errors))
        else:
            metric.update_state(tf.unstack(y, axis=1), tf.unstack(outputs, axis=1))


@pytest.mark.law("L18")
@pytest.mark.parametrize("eagerly", EAGER)
def test_a_metric_that_stacks_parts_counts_them_once(eagerly):
    def others():
        means = [metrics.Mean(name=name) for name in ("numbers", "rows")] + [metrics.Mean(name="stacked")][eagerly:]
        return [*means, metrics.MeanSquaredError(name="squares"), metrics.BinaryAccuracy(name="accuracy")]

    assert_same(stepped(OfParts, split, eagerly, others()), stepped(OfParts, others=others()))


class Seen(metrics.Metric):
    """Notes how many examples each update has."""

    def __init__(self, looks_across_examples=None):
        super().__init__(name="seen")
        self.examples = []
        self.looks_across_examples = looks_across_examples

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.examples.append(int(y_true.shape[0]))

    def result(self):
        return tf.constant(float(np.mean(self.examples)) if self.examples else 1 / 0)


@pytest.mark.parametrize("declared, counts", [(None, [20, 20, 4]), (False, [4, 8, 8, 4, 8, 8, 4])])
def test_a_metric_that_is_declared_to_add_up_never_sees_more_than_a_micro_batch(declared, counts):
    metric, model = Seen(declared), split(network())
    model.compile("sgd", "mse", metrics=[metric], run_eagerly=True)
    model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    assert metric.examples == counts


def test_each_replica_updates_them_with_its_part():
    def run(wrap):
        with mirrored().scope():
            model = wrap(network())
            model.compile(tf.keras.optimizers.SGD(0.5), "mse", metrics=[MeanOfNumbers(), dice], **JIT)
        return model.fit(X[:40], Y[:40], batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history

    assert_same(run(split), run(lambda model: model))


@pytest.mark.skipif(IS_WINE, reason=XLA_ENDS)
@pytest.mark.tf("2.5", because="`compile` takes `jit_compile` since 2.5")
def test_xla_compiles_it():
    plain = logged(network(), metrics=[MeanOfNumbers(), dice], run_eagerly=True)
    ours = logged(split(network()), metrics=[MeanOfNumbers(), dice], jit_compile=True)
    assert_same(ours, plain)
