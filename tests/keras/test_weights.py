"""What a micro-batch weighs in the mean: what the loss of the full batch divides by, whatever the data look like."""

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_near
from loss_scales import loss_scale_optimizer
from models import from_model, step_by_mean_square
from versions import IS_KERAS_3, TF_VERSION

import accum

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.slow]

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.normal(size=(14, 3)).astype("float32"), RANDOM.normal(size=(14, 2)).astype("float32")
layers = tf.keras.layers
PARTS = (slice(0, 8), slice(8, 14)), (slice(0, 4), slice(4, 8), slice(8, 12), slice(12, 14))


class Own(tf.keras.Model):
    """Takes its inputs out of whatever data it is given."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)
        self.dense.build((None, 3))
        self.dense.set_weights([np.ones((3, 2)), np.zeros(2)])

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        return step_by_mean_square(self, self.optimizer, *self.taken_from(data))


class WithTemperature(Own):
    """Its first input is a scalar, the next one is no batch."""

    @staticmethod
    def data(part):
        return {"edges": np.zeros((5, 2), "float32"), "a_temperature": np.float32(2.0), "x": X[part]}, Y[part]

    def taken_from(self, data):
        x, y = data
        return x["x"] * (x["a_temperature"] / 2.0), y


class OfFourTensors(Own):
    @staticmethod
    def data(part):
        return X[part], Y[part], X[part], Y[part]

    def taken_from(self, data):
        return data[0], data[3]


def trained(model, parts, run_eagerly=False):
    first = model.data(parts[0])
    flat = [tuple(tf.nest.flatten(model.data(part))) for part in parts]
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(flat),
        tuple(tf.as_dtype(leaf.dtype) for leaf in flat[0]),
        tuple((None,) + leaf.shape[1:] if leaf.ndim else () for leaf in flat[0]),
    )
    dataset = dataset.map(lambda *leaves: tf.nest.pack_sequence_as(first, leaves))
    model.compile(tf.keras.optimizers.SGD(0.1), run_eagerly=run_eagerly)
    model.fit(dataset, epochs=1, verbose=0)
    return model.dense.get_weights()


@pytest.mark.law("L5")
@pytest.mark.parametrize("make", [WithTemperature, OfFourTensors])
def test_examples_are_counted_where_the_data_have_a_batch(make):
    batches, micro_batches = PARTS
    full = trained(make(), batches, run_eagerly=True)  # the oracle need not be traced
    assert_near(trained(from_model(make(), 2), micro_batches), full)
    mean_of_means = trained(from_model(make(), 2, micro_batch_weight="equal"), micro_batches, run_eagerly=True)
    assert np.abs(mean_of_means[0] - full[0]).max() > 1e-3


@pytest.mark.law("L17")
def test_data_without_a_batch_ask_for_a_weight():
    model = from_model(Own(), 2)
    model.taken_from = lambda data: (X, Y)
    model.compile("sgd")
    with pytest.raises(ValueError, match="no batch whose examples could be counted: pass `micro_batch_weight='equal'`"):
        model.train_step((tf.constant(1.0),))


@pytest.mark.law("L5")
@pytest.mark.tf(keras=3, because="the reduction is Keras 3's")
@pytest.mark.parametrize("is_masked", [False, True])
def test_a_loss_that_divides_by_the_sum_of_sample_weights_equals_the_full_batch(is_masked):
    tokens = np.array([[1, 2, 0], [3, 0, 0], [2, 2, 2], [1, 3, 0], [2, 0, 0], [3, 3, 1]])
    targets = RANDOM.normal(size=(6, 3, 2)).astype("float32")
    weights = RANDOM.uniform(0.1, 3.0, size=(6, 3)).astype("float32")

    def make():
        inputs = tf.keras.Input((3,), dtype="int32")
        outputs = layers.Embedding(4, 2, mask_zero=is_masked, name="table")(inputs)
        return tf.keras.Model(inputs, layers.Dense(2)(outputs))

    def fitted(model, batch_size, run_eagerly=True):
        model.set_weights([np.ones((4, 2)), np.eye(2), np.zeros(2)])
        loss = tf.keras.losses.MeanSquaredError("mean_with_sample_weight")
        model.compile(tf.keras.optimizers.SGD(0.1), loss, run_eagerly=run_eagerly)
        model.fit(tokens, targets, sample_weight=weights, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    full = fitted(make(), 6)
    assert_near(fitted(from_model(make(), 3), 2, run_eagerly=False), full)
    by_examples = from_model(make(), 3, micro_batch_weight=lambda x, y, sample_weight: tf.shape(x)[0])
    assert max(np.abs(a - b).max() for a, b in zip(fitted(by_examples, 2), full)) > 1e-3


@pytest.mark.law("L5", "L10")
@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_micro_batch_of_nothing_but_padding_is_no_overflow(is_scaled):
    tokens = np.array([[1, 2, 0], [3, 0, 0], [0, 0, 0], [0, 0, 0]])
    targets = RANDOM.normal(size=(4, 3, 2)).astype("float32")

    def make():
        inputs = tf.keras.Input((3,), dtype="int32")
        outputs = layers.Embedding(4, 2, mask_zero=True)(inputs)
        return tf.keras.Model(inputs, layers.Dense(2)(outputs))

    def fitted(model, batch_size, run_eagerly=False):
        model.set_weights([np.ones((4, 2)), np.eye(2), np.zeros(2)])
        optimizer = tf.keras.optimizers.SGD(0.1)
        optimizer = loss_scale_optimizer(optimizer, 64.0) if is_scaled else optimizer
        model.compile(optimizer, "mse", run_eagerly=run_eagerly)
        losses = model.fit(tokens, targets, batch_size=batch_size, shuffle=False, verbose=0).history["loss"]
        return model.get_weights(), losses

    full, _ = fitted(make(), 4, run_eagerly=True)
    model = from_model(make(), 2)
    ours, losses = fitted(model, 2)
    assert_near(ours, full)
    assert np.isfinite(losses).all()
    optimizer = getattr(model.optimizer, "inner_optimizer", getattr(model.optimizer, "_optimizer", model.optimizer))
    assert int(optimizer.iterations.numpy()) == 1


class MaskedHelper(tf.keras.Model):
    """Its compiled loss is computed in a `tf.function`, which the trace of the next `fit` calls without tracing it."""

    def __init__(self):
        super().__init__()
        self.parts = [layers.Embedding(4, 2, mask_zero=True), layers.Dense(2)]

    def call(self, inputs):
        hidden = self.parts[0](inputs)
        return self.parts[1](hidden)

    @tf.function
    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x, y, outputs) if IS_KERAS_3 else self.compiled_loss(y, outputs)
        return loss, tape.gradient(loss, self.trainable_variables)

    def train_step(self, data):
        loss, grads = self.gradients(*data)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        return {"loss": loss}


@pytest.mark.law("L5")
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_masked_loss_in_a_function_of_its_own_equals_the_full_batch(run_eagerly):
    tokens = np.array([[1, 2, 3], [3, 0, 0], [2, 2, 2], [1, 3, 0], [2, 0, 0], [3, 0, 0]])
    targets = RANDOM.normal(size=(6, 3, 2)).astype("float32")

    def fitted(model, batch_size, compiles):
        model(tokens)
        for _ in range(compiles):  # the second time, the function is there already
            model.set_weights([np.ones((4, 2)), np.eye(2), np.zeros(2)])
            model.compile(tf.keras.optimizers.SGD(0.1), "mse", run_eagerly=run_eagerly)
            model.fit(tokens, targets, batch_size=batch_size, shuffle=False, verbose=0)
        return model.get_weights()

    assert_near(fitted(from_model(MaskedHelper(), 3), 2, compiles=2), fitted(MaskedHelper(), 6, compiles=1))


@pytest.mark.law("L5")
def test_an_output_without_a_mask_beside_a_masked_one_has_the_loss_of_plain_keras():
    tokens, images = np.array([[1, 2, 0], [3, 0, 0]]), RANDOM.normal(size=(2, 4, 4, 1)).astype("float32")
    y = [RANDOM.normal(size=(2, 3, 2)).astype("float32"), images]

    def make():
        text, picture = tf.keras.Input((3,), dtype="int32"), tf.keras.Input((4, 4, 1))
        hidden = layers.Embedding(4, 2, mask_zero=True)(text)
        return tf.keras.Model([text, picture], [layers.Dense(2)(hidden), layers.Conv2D(1, 1)(picture)])

    losses = []
    for model, is_oracle in ((make(), True), (from_model(make(), 2), False)):
        model.set_weights([np.ones((4, 2)), np.eye(2), np.zeros(2), np.ones((1, 1, 1, 1)), np.ones(1)])
        model.compile(tf.keras.optimizers.SGD(0.1), "mse", run_eagerly=is_oracle)
        losses.append(model.train_on_batch([tokens, images], y))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


LENGTHS = np.array([1, 4, 2, 2, 4, 4, 3, 1, 1, 1, 4, 2, 3, 3])


def ragged_losses(kind, wrap, batch_size):
    """The weights of a model after an epoch of sequences of different lengths, and the log of its loss."""
    random = np.random.RandomState(0)
    rows = tf.RaggedTensor.from_row_lengths(random.normal(size=(LENGTHS.sum(), 2)).astype("float32"), LENGTHS)
    inputs = tf.keras.Input((None, 2), ragged=True)
    outputs = [layers.TimeDistributed(layers.Dense(2, name=f"dense_{kind}"))(inputs)]
    targets = [rows.with_flat_values(rows.flat_values * 0.5 + 1.0)]
    model = tf.keras.Model(inputs, outputs)
    model.set_weights([random.normal(size=weight.shape) for weight in model.get_weights()])
    model = wrap(model)
    model.compile(tf.keras.optimizers.SGD(0.1), kind)
    data = tf.data.Dataset.from_tensor_slices((rows, *targets)).batch(batch_size)
    history = model.fit(data, verbose=0).history
    return model.get_weights(), history["loss"]


@pytest.mark.law("L5")
@pytest.mark.skipif(TF_VERSION < (2, 5) or IS_KERAS_3, reason="no losses of ragged outputs")
@pytest.mark.parametrize("options", [{"accum_steps": 2}, {"micro_batch_size": 4}, {"micro_batch_size": 3}], ids=str)
@pytest.mark.parametrize("kind", ["mse", "mae"])
def test_losses_of_ragged_outputs_divide_by_their_elements(kind, options):
    is_split = "micro_batch_size" in options
    plain = ragged_losses(kind, lambda model: model, 14)
    ours = ragged_losses(kind, lambda model: from_model(model, **options), 14 if is_split else 7)
    assert_near(ours[0], plain[0])
    assert not is_split or np.allclose(ours[1], plain[1], rtol=2e-5)
    options = dict(options, micro_batch_weight=rows_of, **({"whole_batch": ()} if is_split else {}))
    by_examples = ragged_losses(kind, lambda model: from_model(model, **options), 14 if is_split else 7)
    assert max(np.abs(one - other).max() for one, other in zip(by_examples[0], plain[0])) > 1e-4


def rows_of(x, y, sample_weight):
    return tf.cast(x.nrows(), tf.float32)


@pytest.mark.law("L21")
def test_weights_of_examples_that_broadcast_over_others_are_those_of_the_full_batch():
    """Losses of shape [batch, 1, 1] times weights of shape [batch] are [batch, 1, batch]: examples meet."""
    generator = np.random.RandomState(0)
    x, y, weights = (generator.uniform(size=[12, *shape]).astype("float32") for shape in ([4, 4, 2], [1, 1, 3], []))

    def fitted(model_class, **options):
        inputs = tf.keras.Input([4, 4, 2])
        head = tf.keras.layers.Conv2D(3, 4, kernel_initializer=tf.keras.initializers.Constant(0.1))
        model = model_class(inputs=inputs, outputs=head(inputs), **options)
        model.compile(tf.keras.optimizers.SGD(0.5), "mse")
        model.fit(x, y, sample_weight=weights * np.arange(12), batch_size=12, epochs=2, verbose=0)
        return model.get_weights()

    plain = fitted(tf.keras.Model)
    for one, other in zip(fitted(accum.GradientAccumulateModel, micro_batch_size=5), plain):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)
