"""Models that people use make the steps of the full batch: applications, a transformer, a 3-D U-Net (laws L1, L5, L13).

The oracle is the same model by plain Keras on the full batch. Batch normalisation normalises by the micro-batch in
training, so a model with it is held to the full batch with it frozen; what it records, with weights that rest.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_near
from versions import IS_KERAS_3
from warned import silent, warned

import accum

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.slow]

RANDOM = np.random.RandomState(0)
EXAMPLES, SIZE, K = 12, 5, 3  # micro-batches of 5, 5 and 2
CLASSES = np.arange(EXAMPLES) % 3
BRIGHT = np.linspace(0.1, 1.0, EXAMPLES).reshape(-1, 1, 1, 1)  # so that statistics differ between micro-batches
PIXELS = (255.0 * BRIGHT * RANDOM.uniform(size=(EXAMPLES, 32, 32, 3))).astype("float32")  # as EfficientNet takes them
IMAGES = PIXELS / 127.5 - 1.0
layers, losses, sgd = tf.keras.layers, tf.keras.losses, tf.keras.optimizers.SGD


def filled(model):
    """A model with weights that do not depend on initialisers, and through which signals stay of order 1."""
    random, values = np.random.RandomState(1), []
    for weight, value in zip(model.weights, model.get_weights()):
        if "variance" in weight.name or "gamma" in weight.name:
            value = random.uniform(0.5, 1.5, size=value.shape)
        elif value.dtype.kind == "f" and value.ndim:
            inputs = value.shape[:2] if "depthwise" in getattr(weight, "path", weight.name) else value.shape[:-1]
            scale = np.sqrt(2.0 / np.prod(inputs)) if inputs else 0.1
            value = scale * random.normal(size=value.shape)
        values.append(value)
    model.set_weights(values)
    for layer in model.layers:
        if hasattr(layer, "finalize_state") and layer.weights:  # Keras 3 makes its constants of them only in loading
            layer.finalize_state()
    return model


def fit(model, x, y, batch_size, rate=0.05, loss="sparse_categorical_crossentropy", epochs=2):
    """Two steps of the full batch, or as many of `K` micro-batches each."""
    # The oracle is traced too: on TF 2.2, eager losses clip probabilities that traced ones take from the logits.
    model.compile(sgd(rate, momentum=0.9), loss)
    model.fit(x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == epochs
    return copies(model.get_weights())


def copies(weights):
    """Keras 3 hands out views of what it goes on to change."""
    return [np.copy(weight) for weight in weights]


def steps(model, x, y, *, accumulates, weight="examples", **options):
    """The weights after two steps of a model, which has its first ones again afterwards."""
    first = copies(model.get_weights())
    made = accum.GradientAccumulateModel.from_model(model, K, micro_batch_weight=weight) if accumulates else model
    weights = fit(made, x, y, SIZE if accumulates else EXAMPLES, **options)
    model.set_weights(first)
    return weights


def assert_same_step(ours, theirs, first):
    """That both have moved from `first` to the same weights, and so far that a wrong step would be seen."""
    assert distance(theirs, first) > 0.01
    assert_near(ours, theirs)


def distance(ours, theirs):
    return max(np.abs(one - other).max() for one, other in zip(ours, theirs) if one.size)


def assert_equals_the_full_batch(model, x, y, **options):
    for layer in model.layers:
        layer.trainable = not isinstance(layer, layers.BatchNormalization)
    full = steps(model, x, y, accumulates=False, **options)
    assert_same_step(steps(model, x, y, accumulates=True, **options), full, model.get_weights())


def assert_swapped_batch_norm_records_the_full_batch(plain, x, y, loss="sparse_categorical_crossentropy"):
    """Of the first layer: the input of any other depends on how those before it have normalised."""
    plain.trainable = True
    for layer in plain.layers:  # Keras 3 sets only the layers that it believes to differ
        layer.trainable = isinstance(layer, layers.BatchNormalization)  # what else could learn rests, and takes long
    swapped = accum.replace_batchnorm_layers(plain, K)
    predicted = plain.predict(x)
    assert predicted.std(axis=0).max() > 1e-4  # it sees the examples
    np.testing.assert_array_equal(swapped.predict(x), predicted)
    model = accum.GradientAccumulateModel(K, inputs=swapped.inputs, outputs=swapped.outputs)
    first = copies(weight.numpy() for weight in model.trainable_weights)
    fit(model, x, y, SIZE, rate=0.0, loss=loss, epochs=1)
    np.testing.assert_equal([weight.numpy() for weight in model.trainable_weights], first)

    is_batch_norm = [isinstance(layer, layers.BatchNormalization) for layer in plain.layers]
    at = is_batch_norm.index(True)
    assert all(isinstance(layer, accum.AccumBatchNormalization) for layer in np.array(model.layers)[is_batch_norm])
    before = copies(plain.layers[at].get_weights())
    tf.keras.Model(plain.inputs, plain.layers[at].output)(x, training=True)
    assert np.abs(plain.layers[at].get_weights()[3] - before[3]).max() > 1e-4
    assert_near(model.layers[at].get_weights(), plain.layers[at].get_weights())


# ----------------------------------------------------------------------------------------------------------------
# Applications


@functools.lru_cache(maxsize=None)  # made slowly, and filled anew by each test
def beginning_of_mobile_net():
    """Its first three blocks, one with strides and one with a skip: the other fourteen repeat them and take long."""
    base = tf.keras.applications.MobileNetV2(alpha=0.35, input_shape=(32, 32, 3), weights=None, include_top=False)
    return classifier(base.input, base.get_layer("block_2_add").output)


@functools.lru_cache(maxsize=None)
def beginning_of_efficient_net():
    """Its first two stages, with squeeze and excitation and a skip: the other five repeat them and take long."""
    if not hasattr(tf.keras.applications, "EfficientNetB0"):
        pytest.skip("EfficientNet came with TF 2.3")
    base = tf.keras.applications.EfficientNetB0(
        include_top=False, input_shape=(32, 32, 3), weights=None, **({} if IS_KERAS_3 else {"drop_connect_rate": 0.0})
    )
    for layer in base.layers:
        if isinstance(layer, layers.Dropout):
            layer.rate = 0.0  # Keras 3 has no argument for it
    return classifier(base.input, base.get_layer("block2b_add").output)


def classifier(inputs, hidden):
    return tf.keras.Model(inputs, layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling2D()(hidden)))


@pytest.mark.law("L1")
@pytest.mark.parametrize(
    "make,images,rate",
    [(beginning_of_mobile_net, IMAGES, 0.1), (beginning_of_efficient_net, PIXELS, 0.1)],
    ids=["mobile", "efficient"],
)
def test_an_application_with_frozen_batch_norm_equals_the_full_batch(make, images, rate):
    assert_equals_the_full_batch(filled(make()), images, CLASSES, rate=rate)


@pytest.mark.law("L13")
@pytest.mark.parametrize(
    "make,images",
    [(beginning_of_mobile_net, IMAGES), (beginning_of_efficient_net, PIXELS)],
    ids=["mobile", "efficient"],
)
def test_an_application_s_first_batch_norm_records_the_full_batch(make, images):
    assert_swapped_batch_norm_records_the_full_batch(filled(make()), images, CLASSES)


# ----------------------------------------------------------------------------------------------------------------
# A transformer

WORDS, LENGTH = 7, 6
LENGTHS = np.array([6, 5, 6, 4, 6, 1, 2, 1, 3, 1, 4, 2])  # 27, 8 and 6 tokens a micro-batch
TOKENS = np.where(np.arange(LENGTH) < LENGTHS[:, None], RANDOM.randint(1, WORDS, size=(EXAMPLES, LENGTH)), 0)
NEXT = np.roll(TOKENS, -1, axis=1) % 5


def attention(hidden, tokens):
    if not hasattr(layers, "MultiHeadAttention"):  # came with TF 2.4
        return layers.Attention()([layers.Dense(8)(hidden), layers.Dense(8)(hidden)])
    is_token = layers.Lambda(lambda ids: tf.not_equal(ids, 0)[:, tf.newaxis, :])(tokens)
    return layers.MultiHeadAttention(2, 4)(hidden, hidden, attention_mask=is_token)


def transformer(model_class=tf.keras.Model, mask_zero=True):
    tokens = tf.keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(WORDS, 8, mask_zero=mask_zero)(tokens)
    hidden = layers.LayerNormalization()(layers.Add()([hidden, attention(hidden, tokens)]))
    forward = layers.Dense(8)(layers.Dense(16, activation="relu")(hidden))
    hidden = layers.LayerNormalization()(layers.Add()([hidden, forward]))
    return filled(model_class(tokens, layers.Dense(5, activation="softmax")(hidden)))


@pytest.mark.law("L5", "L8")
def test_a_transformer_with_masked_tokens_equals_the_full_batch():
    """Whether Keras' losses divide by tokens or by examples here, "examples" is what they divide by."""
    model, options = transformer(), {"rate": 0.1}
    full = steps(model, TOKENS, NEXT, accumulates=False, **options)
    assert_same_step(steps(model, TOKENS, NEXT, accumulates=True, **options), full, model.get_weights())


def mean_over_tokens(targets, outputs, is_token):
    entropies = losses.sparse_categorical_crossentropy(targets, outputs)
    is_token = tf.cast(is_token, entropies.dtype)
    return tf.reduce_sum(entropies * is_token) / tf.reduce_sum(is_token)


class OwnTrainStep(tf.keras.Model):
    """Takes the mean over the tokens that are no padding."""

    def train_step(self, data):
        tokens, targets = data
        with tf.GradientTape() as tape:
            loss = mean_over_tokens(targets, self(tokens, training=True), tf.not_equal(tokens, 0))
        grads = tape.gradient(loss, self.trainable_variables)
        assert any(isinstance(grad, tf.IndexedSlices) for grad in grads)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        return {"loss": loss}


def compiled(targets, outputs):
    """The same as a loss to compile, which sees no tokens: padding has the target -1."""
    targets = tf.reshape(targets, tf.shape(outputs)[:-1])
    return mean_over_tokens(tf.maximum(targets, 0), outputs, targets >= 0)


WEIGHED = [
    (OwnTrainStep, None, NEXT, lambda x, y, sample_weight: tf.math.count_nonzero(x)),
    (tf.keras.Model, compiled, np.where(TOKENS, NEXT, -1), lambda x, y, sample_weight: tf.math.count_nonzero(y >= 0)),
]


@pytest.mark.law("L5", "L8")
@pytest.mark.parametrize("model_class,loss,targets,weight", WEIGHED, ids=["train_step", "compiled"])
def test_a_mean_over_tokens_is_weighed_by_tokens(model_class, loss, targets, weight):
    model = transformer(model_class, mask_zero=loss is None)
    options = {"rate": 0.1, "loss": loss}
    full = steps(model, TOKENS, targets, accumulates=False, **options)
    ours = steps(model, TOKENS, targets, accumulates=True, weight=weight, **options)
    assert_same_step(ours, full, model.get_weights())


# ----------------------------------------------------------------------------------------------------------------
# Segmentation

VOLUMES = RANDOM.normal(size=(EXAMPLES, 8, 8, 8, 1)).astype("float32")
SHARES = np.linspace(0.05, 0.6, EXAMPLES).reshape(-1, 1, 1, 1, 1)  # of the foreground, unlike in each volume
SEGMENTS = (RANDOM.uniform(size=VOLUMES.shape) < SHARES).astype("float32")


def u_net(has_batch_norm=True):
    def block(hidden, filters):
        hidden = layers.Conv3D(filters, 3, padding="same")(hidden)
        return layers.ReLU()(layers.BatchNormalization()(hidden) if has_batch_norm else hidden)

    inputs = tf.keras.Input((8, 8, 8, 1))
    skip = block(inputs, 3)
    hidden = layers.Conv3DTranspose(3, 2, strides=2)(block(layers.MaxPool3D()(skip), 4))
    hidden = block(layers.Concatenate()([skip, hidden]), 3)
    return tf.keras.Model(inputs, layers.Conv3D(1, 1, activation="sigmoid")(hidden))


@pytest.mark.law("L1")
def test_a_u_net_with_frozen_batch_norm_equals_the_full_batch():
    """A small rate: of the 6,144 voxels, a float32 gradient of the full batch is itself off by 6e-6."""
    assert_equals_the_full_batch(filled(u_net()), VOLUMES, SEGMENTS, loss="binary_crossentropy")


@pytest.mark.law("L13")
def test_a_u_net_s_first_batch_norm_records_the_full_batch():
    assert_swapped_batch_norm_records_the_full_batch(filled(u_net()), VOLUMES, SEGMENTS, "binary_crossentropy")


def dice(targets, outputs, axes):
    both = tf.reduce_sum(targets * outputs, axis=axes)
    return 1.0 - (2.0 * both + 1.0) / (tf.reduce_sum(targets, axis=axes) + tf.reduce_sum(outputs, axis=axes) + 1.0)


def dice_of_each_example(targets, outputs):
    return dice(targets, outputs, [1, 2, 3, 4])


def dice_of_the_batch(targets, outputs):
    return dice(targets, outputs, [0, 1, 2, 3, 4])


def mean_of_the_parts_dice(targets, outputs):
    """What accumulation makes of `dice_of_the_batch`: its mean over the micro-batches, weighed by their examples."""
    sizes = [SIZE, SIZE, EXAMPLES - 2 * SIZE]
    parts = zip(tf.split(targets, sizes), tf.split(outputs, sizes), sizes)
    return tf.add_n([size / EXAMPLES * dice_of_the_batch(*part) for *part, size in parts])


@pytest.mark.law("L1")
def test_dice_of_each_example_is_exact_and_dice_of_the_batch_is_a_mean_over_micro_batches():
    model = filled(u_net(has_batch_norm=False))

    def weights_after(loss, accumulates):
        return steps(model, VOLUMES, SEGMENTS, accumulates=accumulates, rate=0.2, loss=loss)

    full = weights_after(dice_of_each_example, False)
    assert_same_step(weights_after(dice_of_each_example, True), full, model.get_weights())
    ours = weights_after(dice_of_the_batch, True)
    assert_same_step(ours, weights_after(mean_of_the_parts_dice, False), model.get_weights())
    assert distance(ours, weights_after(dice_of_the_batch, False)) > 1e-4


# ----------------------------------------------------------------------------------------------------------------
# Hugging Face

ATTENDED = (TOKENS > 0).astype("int32")
TO_GUESS = np.where(TOKENS * (RANDOM.uniform(size=TOKENS.shape) < 0.6), TOKENS, -100)  # -100: no part of the loss
TO_GUESS[:, 0] = TOKENS[:, 0]
TINY = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 11,
}
BERT = [
    ("TFBertForSequenceClassification", CLASSES, "examples"),
    ("TFBertForMaskedLM", TO_GUESS, lambda x, y, sample_weight: tf.math.count_nonzero(x["labels"] + 100)),
]


@pytest.mark.law("L1", "L5", "L18")
@pytest.mark.parametrize("name,labels,weight", BERT, ids=[name for name, _, _ in BERT])
def test_a_hugging_face_model_s_own_loss_and_train_step_equal_the_full_batch(name, labels, weight):
    transformers = pytest.importorskip("transformers", reason="installed in two environments")
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    model = getattr(transformers, name)(config)
    x = {"input_ids": TOKENS, "attention_mask": ATTENDED, "labels": labels}
    model({"input_ids": TOKENS[:1]})
    filled(model)
    weights = []
    for one, batch_size in (
        (model, EXAMPLES),
        (accum.GradientAccumulateModel.from_model(model, K, micro_batch_weight=weight), SIZE),
        (accum.GradientAccumulateModel.from_model(model, micro_batch_tokens=16, micro_batch_weight=weight), EXAMPLES),
    ):
        first = model.get_weights()
        one.compile(sgd(0.1, momentum=0.9))  # without a loss, the model's own
        one.fit(x, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
        assert int(one.optimizer.iterations.numpy()) == 2
        weights.append(model.get_weights())
        model.set_weights(first)
    assert_same_step(weights[1], weights[0], first)
    assert_same_step(weights[2], weights[0], first)


@pytest.mark.slow
def test_a_pretrained_model_is_saved_under_the_name_of_its_own_class(tmp_path):
    transformers = pytest.importorskip("transformers")
    plain = transformers.TFBertForSequenceClassification(transformers.BertConfig(**TINY))
    plain(np.ones((1, 4), "int32"))
    model = accum.GradientAccumulateModel.from_model(plain, 2)
    model.save_pretrained(str(tmp_path))
    loaded = transformers.TFBertForSequenceClassification.from_pretrained(str(tmp_path))
    assert loaded.config.architectures == ["BertForSequenceClassification"]
    np.testing.assert_array_equal(loaded(np.ones((1, 4), "int32")).logits, plain(np.ones((1, 4), "int32")).logits)


@pytest.mark.slow
@pytest.mark.law("L17")
def test_a_loss_of_hugging_face_that_is_a_mean_over_labels_warns_at_compile():
    transformers = pytest.importorskip("transformers")
    make = lambda: transformers.TFBertForMaskedLM(transformers.BertConfig(**TINY))
    count = lambda x, y, sample_weight: tf.math.count_nonzero(x["labels"] != -100)
    with pytest.warns(UserWarning, match="mean over the labels other than -100.*`micro_batch_weight=`"):
        accum.GradientAccumulateModel.from_model(make(), 2).compile("sgd")
    with warned("labels") as said:
        accum.GradientAccumulateModel.from_model(make(), 2, micro_batch_weight=count).compile("sgd")
    assert not said


# --------------------------------------------------------------------------------------------------------------------
# A state that goes from batch to batch


@pytest.mark.law("L1")
@pytest.mark.parametrize("run_eagerly", [False, True], ids=["traced", "eager"])
def test_a_stateful_layer_goes_on_from_micro_batch_to_micro_batch_as_in_plain_keras(run_eagerly):
    """Two batches are two windows in time; their step is that of the longer sequence, cut for the gradient between."""
    windows = RANDOM.normal(size=(2, 4, 3, 2)).astype("float32")
    targets = RANDOM.normal(size=(2, 4, 2)).astype("float32")

    def make():
        inputs = tf.keras.Input(batch_shape=(4, 3, 2))
        return filled(tf.keras.Model(inputs, tf.keras.layers.Dense(2)(tf.keras.layers.GRU(3, stateful=True)(inputs))))

    plain, optimizer = make(), tf.keras.optimizers.SGD(0.5)
    with tf.GradientTape() as tape:
        losses = [tf.reduce_mean((plain(x, training=True) - y) ** 2) for x, y in zip(windows, targets)]
        loss = tf.add_n(losses) / 2.0
    first = copies(plain.get_weights())
    optimizer.apply_gradients(zip(tape.gradient(loss, plain.trainable_variables), plain.trainable_variables))
    model = accum.GradientAccumulateModel.from_model(make(), accum_steps=2)
    model.compile(tf.keras.optimizers.SGD(0.5), "mse", run_eagerly=run_eagerly)
    with silent():
        model.fit(windows.reshape(8, 3, 2), targets.reshape(8, 2), batch_size=4, shuffle=False, verbose=0)
    assert distance(model.get_weights(), plain.get_weights()) < 2e-6 < distance(first, plain.get_weights())
