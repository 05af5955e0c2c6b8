"""`accum.InexactWarning` is the category of what may differ from the full batch, so a program can forbid it."""

import gc

import numpy as np
import pytest
import tensorflow as tf
from models import from_model
from replicas import mirrored
from versions import IS_KERAS_3
from warned import silent, warned

import accum
import accum.compat.v1
from accum._keras._diagnosis import _losses_in_parts

pytestmark = pytest.mark.law("L17")

X, Y = np.sin(np.arange(24.0, dtype="float32")).reshape(8, 3), np.ones((8, 2), "float32")
tf1, layers = tf.compat.v1, tf.keras.layers


def functional(*hidden):
    return tf.keras.Sequential([tf.keras.Input((3,)), *hidden, layers.Dense(2)])


class Counts(layers.Layer):
    """Changes a variable at each call."""

    def build(self, input_shape):
        self.calls = self.add_weight(name="calls", shape=(), initializer="zeros", trainable=False)
        self.built = True

    def call(self, inputs):
        self.calls.assign_add(1.0)
        return inputs


def fitted(model, loss="mse", **options):
    model.compile("sgd", loss, **options)
    model.fit(X, Y, batch_size=4, verbose=0)


def with_batch_norm():
    fitted(from_model(functional(layers.BatchNormalization()), micro_batch_size=2, whole_batch=()))


def with_a_sum():
    fitted(from_model(functional(), 2), tf.keras.losses.MeanSquaredError(reduction="sum"))


def with_a_layer_that_counts_its_calls():
    fitted(from_model(functional(Counts()), 2))


def with_eager_draws():
    fitted(from_model(functional(layers.Dropout(0.5)), micro_batch_size=2), run_eagerly=True)


def in_a_static_graph():
    with tf.Graph().as_default():
        weights = tf1.get_variable("weights", [3, 2])
        loss = tf.reduce_sum((tf.matmul(tf1.placeholder(tf.float32, [None, 3]), weights) - 1.0) ** 2)
        accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.1), 2).minimize(loss)


class Averages(tf.keras.Model):
    """Averages its weights after each update, in an object that Keras does not track."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)
        self.average = tf.train.ExponentialMovingAverage(0.9)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        kernel = self.dense.kernel
        self.average.apply([kernel if isinstance(kernel, tf.Variable) else kernel.value])
        return {"loss": loss}


def averaging():
    model = Averages()
    model(X)
    return model


def fitted_to_texts(loss, *head, shape=(2,), value=1.0):
    lengths = tf.data.Dataset.from_tensor_slices([2, 5, 3, 4])
    texts = lengths.map(lambda length: (tf.ones([length, 1]), tf.fill([length, *shape], value)))
    model = from_model(tf.keras.Sequential([tf.keras.Input((None, 1)), layers.Dense(4), *head]), 2)
    model.compile("sgd", loss)
    model.fit(texts.padded_batch(2, ([None, 1], [None, *shape])), verbose=0)


KERAS = [
    with_batch_norm,
    with_a_sum,
    with_a_layer_that_counts_its_calls,
    with_eager_draws,
]


@pytest.mark.parametrize(
    "program", [pytest.param(one, marks=pytest.mark.tf("2.2")) for one in KERAS] + [in_a_static_graph]
)
def test_a_program_that_forbids_what_is_inexact_ends_with_the_warning_as_an_error(program):
    with silent(accum.InexactWarning):
        with pytest.raises(accum.InexactWarning):
            program()


@pytest.mark.tf("2.2")
def test_an_average_that_keras_does_not_track_is_named():
    with pytest.warns(accum.InexactWarning, match="changed-variables"):
        fitted(from_model(averaging(), 2), None)


TOTALS = [tf.keras.metrics.Mean(name="elsewhere"), tf.keras.metrics.MeanAbsoluteError(name="elsewhere too")]


class Measures(tf.keras.Model):
    """Updates metrics that it does not list in `metrics`, and perhaps counts its steps beside."""

    def __init__(self, count=None):
        super().__init__()
        self.head, self.count_of = layers.Dense(1), lambda: count

    def call(self, inputs):
        return self.head(inputs)

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = tf.reduce_mean((outputs - y) ** 2)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
        TOTALS[0].update_state(loss)
        TOTALS[1].update_state(y, outputs)
        if self.count_of() is not None:
            self.count_of().assign_add(1)
        return {"loss": loss}


@pytest.mark.tf("2.2")
def test_a_metric_that_no_attribute_holds_adds_up_over_micro_batches_and_is_not_named_but_a_counter_is():
    def fitted_with(*count):
        model = Measures(*count)
        model(X)
        fitted(from_model(model, 2), None)

    with silent(accum.InexactWarning):
        fitted_with()
    with pytest.warns(accum.InexactWarning, match=r"Changed: \['count.*changed-variables"):
        fitted_with(tf.Variable(0, name="count", trainable=False))


@pytest.mark.tf("2.2")
def test_batches_of_different_lengths_are_named_if_the_loss_divides_by_their_padding():
    for head, shape in [([], (4,)), ([layers.Dense(1), layers.Reshape((-1,))], ())]:
        with pytest.warns(accum.InexactWarning, match="padded to different.*loss-counts"):
            fitted_to_texts("mse", *head, shape=shape)
    for axis in (-1, [1, 2], None):
        with pytest.warns(accum.InexactWarning, match="padded to different.*loss-counts"):
            fitted_to_texts(lambda y, outputs, axis=axis: tf.reduce_mean(tf.abs(y - outputs), axis=axis), shape=(4,))
    with silent(accum.InexactWarning):
        fitted_to_texts(lambda y, outputs: tf.reduce_sum((y - outputs) ** 2, axis=[1, 2]), shape=(4,))


def voids_left_out(y, outputs):
    options = {"from_logits": True, "ignore_class": -1}
    return tf.keras.losses.sparse_categorical_crossentropy(tf.cast(y, tf.int32)[..., 0], outputs, **options)


def one_number(y, outputs):
    return tf.reduce_mean(tf.square(y - outputs))


LOSSES = [
    pytest.param(voids_left_out, {}, marks=pytest.mark.tf("2.10", because="there is no `ignore_class` before")),
    pytest.param(one_number, {"mask_zero": True}, marks=pytest.mark.tf("2.2")),
    pytest.param(one_number, {}, marks=pytest.mark.tf("2.2")),
]


@pytest.mark.law("L5")
@pytest.mark.parametrize("loss, options", LOSSES, ids=["ignored class", "one number of masked", "one number"])
def test_a_loss_that_divides_by_a_number_of_its_own_is_named_in_cycles(loss, options):
    """What is named ends elsewhere than at the full batch."""
    count, time = 8, 6
    lengths = np.array([6, 5, 6, 6, 1, 1, 2, 1])
    is_token = np.arange(time) < lengths[:, None]
    x = np.where(is_token, 1 + np.arange(count * time).reshape(count, time) % 8, 0).astype("int32")
    y = np.where(is_token, np.arange(count * time).reshape(count, time) % 4, -1).astype("float32")[..., None]
    ended = []
    for accum_steps in (1, 2):
        model = tf.keras.Sequential(
            [tf.keras.Input((time,), dtype="int32"), layers.Embedding(9, 4, **options), layers.Dense(4)]
        )
        model.set_weights([np.cos(np.arange(np.size(part))).reshape(np.shape(part)) for part in model.get_weights()])
        model = from_model(model, accum_steps) if accum_steps > 1 else model
        model.compile(tf.keras.optimizers.SGD(0.5), loss)
        with warned(category=accum.InexactWarning) as said:
            model.fit(x, y, batch_size=count // accum_steps, epochs=2, shuffle=False, verbose=0)
        ended.append(model.get_weights())
    is_named = loss is voids_left_out or bool(options)
    assert ["divides by a number of its own" in line for line in said] == [True] * is_named
    apart = max(np.abs(one - other).max() for one, other in zip(*ended))
    assert (apart > 1e-4) == is_named


def across(y, outputs):
    logits = tf.matmul(outputs, y, transpose_b=True)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(logits)[0]), logits)


class CountsExamples(tf.keras.metrics.Sum):
    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(tf.ones(tf.shape(y_true)[:1]))


@pytest.mark.tf("2.2")
def test_what_was_named_before_another_compile_is_named_again():
    model = from_model(functional(), micro_batch_size=2, whole_batch=())
    for options in ({"metrics": [CountsExamples()]}, {"loss": across}):
        with warned("whatever sees several examples", accum.InexactWarning) as said:
            fitted(model, **options)
            model.fit(X, Y, batch_size=4, verbose=0)
        assert len(said) == 1


@pytest.mark.tf("2.2")
def test_a_loss_is_named_after_each_compile():
    """Although the losses of those before are gone, and with them what they were known by."""
    model = from_model(functional(), 2)
    for _ in range(8):
        loss = lambda y, outputs: across(y, outputs)
        model.compile("sgd", loss, run_eagerly=True)
        with warned(category=accum.InexactWarning) as said:
            for _ in range(2):
                model.train_on_batch(X, Y)
        assert ["looks across the examples" in line for line in said] == [True]
        gc.collect()


@pytest.mark.tf("2.16", keras=3, because="Keras 2 has no CTC loss")
@pytest.mark.parametrize("loss", ["ctc", "CTC"])
def test_a_loss_with_a_number_for_each_example_does_not_divide_by_time_steps(loss):
    with silent(accum.InexactWarning):
        fitted_to_texts(loss if loss == "ctc" else tf.keras.losses.CTC(), layers.Softmax(), shape=(), value=1)


class Decorated(tf.keras.Model):
    @tf.function
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(data[0], training=True) - data[1]) ** 2)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
        return {"loss": loss}


@pytest.mark.slow
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("program", ["accumulating batch norm", "decorated", "two replicas"])
def test_what_only_accum_and_keras_change_is_not_named(program):
    with silent(accum.InexactWarning), mirrored().scope() if program == "two replicas" else tf.name_scope("one"):
        inputs = tf.keras.Input((3,))
        norm = layers.BatchNormalization() if program == "accumulating batch norm" else layers.Activation("tanh")
        outputs = layers.Dense(2)(norm(layers.Dense(4)(inputs)))
        model = (Decorated if program == "decorated" else tf.keras.Model)(inputs, outputs)
        if program == "accumulating batch norm":
            model = accum.replace_batchnorm_layers(model, accum_steps=2)
        model = from_model(model, 2)
        fitted(model, metrics=None if program == "decorated" else ["mae"])


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("options", [{"nonfinite": "skip_cycle"}, {"use_agc": True, "clip_factor": 1e6}])
def test_an_option_of_the_update_makes_no_cycle_of_several_batches(options):
    with silent():
        fitted(from_model(averaging(), micro_batch_size=3, **options), None)


@pytest.mark.tf("2.2")
def test_what_changes_no_result_is_of_another_category():
    with silent(accum.InexactWarning):
        with pytest.warns(UserWarning, match="`accum_steps` was not given"):
            from_model(functional())
        with pytest.warns(UserWarning, match="No batch is split"):
            fitted(from_model(functional(), micro_batch_size=4))


@pytest.mark.tf("2.2")
@pytest.mark.rule_fails
def test_a_rule_that_fails_is_no_error_of_the_program(monkeypatch, caplog):
    """Rules read what users write, of whatever kind that is."""

    def failing(*args):
        raise RuntimeError("on purpose")

    model = from_model(tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)]), 2)
    monkeypatch.setattr("accum._tf.losses.adds_up_examples", failing)
    with caplog.at_level("DEBUG", "accum"):
        model.compile("sgd", "mse")
        model.fit(np.ones((4, 3)), np.ones((4, 1)), batch_size=2, verbose=0)
    assert "warn_of_inexact_loss has failed" in caplog.text
    assert model.history.history["loss"]


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("options", [{}, {"whole_batch": "loss"}], ids=["metric", "loss"])
def test_masked_time_steps_of_a_split_batch_of_a_cycle_are_no_meeting(options):
    layers = tf.keras.layers
    words = np.random.RandomState(0).randint(1, 9, size=(24, 7))
    stack = [tf.keras.Input((7,)), layers.Embedding(9, 4, mask_zero=True), layers.LSTM(5), layers.Dense(1)]
    for meets in (False, True):
        before = [layers.Lambda(lambda hidden: hidden - tf.roll(hidden, 1, 0), output_shape=(5,))] if meets else []
        plain = tf.keras.Sequential(stack[:3] + before + [layers.Dense(1)])
        model = accum.GradientAccumulateModel.from_model(plain, 2, micro_batch_size=3, **options)
        model.compile(tf.keras.optimizers.SGD(0.1), "mse", metrics=[] if options else [lambda y, p: tf.reduce_max(p)])
        if meets:
            with warned("batch of a cycle has only some.*Received: operations.*examples-meet", accum.InexactWarning):
                model.fit(words, words[:, :1], batch_size=12, verbose=0)
        else:
            with silent(accum.InexactWarning):
                model.fit(words, words[:, :1], batch_size=12, verbose=0)


@pytest.mark.tf("2.2")
def test_the_learning_rate_is_that_of_the_inner_optimizer_by_whatever_method_it_is_read():
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    family = tf.keras.optimizers if IS_KERAS_3 else getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers)
    optimizer = family.SGD(schedule)
    names = [name for name in ("_decayed_lr", "_get_current_learning_rate") if hasattr(optimizer, name)]
    assert names
    wrapped = accum.GradientAccumulateOptimizer(optimizer, 2)
    var = tf.Variable([1.0])
    for _ in range(4):
        wrapped.apply_gradients([(tf.constant([1.0]), var)])
    for name in names:
        arguments = [tf.float32] if name == "_decayed_lr" else []
        np.testing.assert_allclose(float(getattr(wrapped, name)(*arguments)), 0.025, rtol=1e-6)


class Centred(layers.Layer):
    """Takes the mean of the batch from each example."""

    def call(self, inputs):
        return inputs - tf.reduce_mean(inputs, axis=0, keepdims=True)


def behind(*before):
    def make():
        return tf.keras.Sequential([tf.keras.Input((3,)), layers.Dense(4), *[one() for one in before], layers.Dense(2)])

    return make


def frozen():
    return layers.BatchNormalization(trainable=False)


class Adding(layers.Layer):
    """Adds the loss that a function computes of what it gets."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def call(self, inputs):
        self.add_loss(self.loss(inputs))
        return inputs


def contrast(hidden):
    similar = tf.matmul(hidden, hidden, transpose_b=True)
    labels = tf.range(tf.shape(similar)[0])
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=similar))


def of_positive(hidden):
    counted = tf.cast(hidden > 0, tf.float32)
    return tf.reduce_sum(counted * hidden**2) / (1.0 + tf.reduce_sum(counted))


def divergence(hidden):
    return tf.reduce_mean(tf.reduce_sum(tf.exp(hidden) - hidden - 1.0, axis=1))


class ClipsAMean(tf.keras.Model):
    """Divides its gradients by the number of examples, and clips them."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((self(data[0], training=True) - data[1]) ** 2)
        number = tf.cast(tf.shape(data[0])[0], tf.float32)
        gradients = [one / number for one in tape.gradient(loss, self.trainable_variables)]
        gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"error": loss / number}


def clipping():
    inputs = tf.keras.Input((3,))
    return ClipsAMean(inputs, layers.Dense(2)(inputs))


class Where(layers.Layer):
    """Its output has the mask of those steps that are 1, or of the others."""

    def __init__(self, is_one):
        super().__init__()
        self.is_one = is_one
        self.supports_masking = True

    def call(self, pair):
        return tf.identity(pair[0])

    def compute_mask(self, pair, mask=None):
        compared = __import__("keras").ops if IS_KERAS_3 else tf
        return compared.equal(pair[1], 1) if self.is_one else compared.not_equal(pair[1], 0)

    def compute_output_shape(self, shapes):
        return shapes[0]


def masked(*are_one):
    def make():
        words = tf.keras.Input((5,), dtype="int32")
        hidden = layers.Embedding(4, 3)(words)
        outputs = [layers.Dense(2)(Where(is_one)([hidden, words])) for is_one in are_one]
        return tf.keras.Model(words, outputs)

    return make


WORDS = np.random.RandomState(5).randint(0, 4, size=(16, 5))
TAGS = tuple(np.random.RandomState(at).normal(size=(16, 5, 2)).astype("float32") for at in (6, 7))
FEATURES = tuple(np.random.RandomState(at).normal(size=(16, at)).astype("float32") for at in (3, 2))
SINCE_MASKS_COUNT = pytest.mark.tf("2.11", because="before, losses do not divide by what a mask leaves")
NAMED = "examples-meet"


@pytest.mark.tf("2.2")
@pytest.mark.parametrize(
    "make, loss, data, named",
    [
        pytest.param(behind(frozen, Centred), "mse", FEATURES, NAMED, id="behind a frozen batch norm"),
        pytest.param(behind(frozen), "mse", FEATURES, None, id="a frozen batch norm"),
        pytest.param(behind(lambda: Adding(contrast)), "mse", FEATURES, NAMED, id="added contrast"),
        pytest.param(behind(lambda: Adding(contrast)), None, FEATURES, NAMED, id="nothing but added contrast"),
        pytest.param(behind(lambda: Adding(of_positive)), "mse", FEATURES, NAMED, id="added mean of some"),
        pytest.param(behind(lambda: Adding(divergence)), "mse", FEATURES, None, id="added mean"),
        pytest.param(clipping, None, FEATURES, "accum: clipping", id="clipped mean"),
        pytest.param(masked(True, False), "mse", (WORDS, TAGS), "loss-counts", id="masks", marks=SINCE_MASKS_COUNT),
        pytest.param(masked(True, True), "mse", (WORDS, TAGS), None, id="same masks", marks=SINCE_MASKS_COUNT),
        pytest.param(
            behind(), lambda: tf.keras.losses.CosineSimilarity(axis=0), FEATURES, "loss-counts", id="first axis"
        ),
    ],
)
def test_a_cycle_that_ends_elsewhere_is_named_and_no_other(make, loss, data, named):
    ended = []
    for accum_steps in (None, 4):
        model = make()
        random = np.random.RandomState(1)
        model.set_weights([random.uniform(0.2, 1.0, size=weight.shape) for weight in model.get_weights()])
        if accum_steps:
            model = accum.GradientAccumulateModel.from_model(model, accum_steps)
        model.compile(tf.keras.optimizers.SGD(0.1), loss() if callable(loss) else loss)
        with warned(category=accum.InexactWarning) as said:
            model.fit(tf.data.Dataset.from_tensor_slices(data).batch(4 if accum_steps else 16), verbose=0)
        ended.append(model.get_weights())
    assert [named in line for line in said] == [True] if named else not said
    apart = max(np.abs(one - other).max() for one, other in zip(*ended))
    assert apart > 1e-4 if named else apart < 2e-6


@pytest.mark.tf("2.2")
def test_batch_normalisation_of_replicas_is_no_meeting_beside_an_added_loss():
    with mirrored().scope():
        model = behind(layers.BatchNormalization, lambda: Adding(divergence))()
        model = accum.GradientAccumulateModel.from_model(model, 2)
        model.compile("sgd", "mse")
    with warned(category=accum.InexactWarning) as said:
        model.fit(tf.data.Dataset.from_tensor_slices(FEATURES).batch(8), verbose=0)
    assert ["examples-meet" in line for line in said] == [False]


class AsInCall(layers.Layer):
    """Applies a function that TensorFlow can't look into to each example, and adds the mean of a square."""

    def call(self, inputs):
        hidden = tf.numpy_function(np.sin, [inputs], tf.float32)
        self.add_loss(tf.reduce_mean(tf.reshape(hidden, tf.shape(inputs)) ** 2))
        return inputs


@pytest.mark.tf("2.2")
def test_what_an_unknown_operation_computes_of_added_losses_is_no_meeting():
    model = accum.GradientAccumulateModel.from_model(behind(AsInCall)(), 2)
    model.compile("sgd", "mse")
    with warned("examples-meet", accum.InexactWarning) as said:
        model.fit(tf.data.Dataset.from_tensor_slices(FEATURES).batch(8), verbose=0)
    assert not said


@pytest.mark.tf("2.2", keras=2, because="a trace changes no layer of Keras 3")
def test_a_look_at_the_network_leaves_seeds_and_losses_of_layers_as_they_were():
    inputs = tf.keras.Input((3,))
    hidden = Adding(divergence)(layers.Dropout(0.5, seed=3)(layers.Dense(4)(inputs)))
    model = tf.keras.Model(inputs, layers.Dense(2)(hidden))
    model = accum.GradientAccumulateModel.from_model(model, 2)
    model.compile("sgd", "mse")
    model(X)
    held = [getattr(layer, "_random_generator", None) for layer in model.layers]
    before = [getattr(one, "_seed", None) for one in held]
    assert _losses_in_parts._met_in_network(model, tf.constant(X), [], True) == []
    assert [getattr(one, "_seed", None) for one in held] == before
    assert float(model.losses[0]) > 0.0  # of the call before, which is no tensor of a graph
