"""Micro-batches by tokens: sorted by length, cut by a budget, trimmed, and the step of the full batch (law L18).

The oracle is plain Keras at the full batch, which computes all of the padding.
"""

import random
import warnings
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_identical, assert_near
from replicas import mirrored
from versions import IS_KERAS_3, TF_VERSION
from warned import warned

import accum
from accum._keras._tokens import _step
from accum._keras._tokens._budget import plan_of

pytestmark = [pytest.mark.law("L18"), pytest.mark.tf("2.2")]

layers = tf.keras.layers
ROWS = np.random.RandomState(0)
COUNT, TIME, WORDS, BUDGET = 18, 14, 30, 32
LENGTHS = np.clip(ROWS.lognormal(1.3, 0.7, size=COUNT).astype(int) + 1, 1, TIME)
IS_TOKEN = np.arange(TIME)[None] < LENGTHS[:, None]
TOKENS = np.where(IS_TOKEN, ROWS.randint(1, WORDS, size=(COUNT, TIME)), 0).astype("int32")
TAGS = ROWS.randint(0, 5, size=(COUNT, TIME)).astype("int32")
SCORES = ROWS.normal(size=(COUNT, 1)).astype("float32")
NOT_COMPILED = {"jit_compile": False} if IS_KERAS_3 else {}


def set_seeds(seed=1):
    tf.keras.backend.clear_session()
    if IS_KERAS_3:
        tf.keras.utils.set_random_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    tf.random.set_seed(seed)


def scorer(rate=0.0):
    inputs = tf.keras.Input((None,), dtype="int32")
    hidden = layers.Embedding(WORDS, 8, mask_zero=True)(inputs)
    hidden = layers.Dropout(rate)(hidden) if rate else hidden
    return tf.keras.Model(
        inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(layers.Dense(6, activation="tanh")(hidden)))
    )


def tagger(rate=0.0):
    inputs = tf.keras.Input((None,), dtype="int32")
    hidden = layers.Embedding(WORDS, 8, mask_zero=True)(inputs)
    hidden = layers.Dropout(rate)(hidden) if rate else hidden
    return tf.keras.Model(inputs, layers.Dense(5)(layers.Dense(6, activation="tanh")(hidden)))


def cross_entropy():
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Reader(tf.keras.Model):
    """A small transformer that takes what those of `transformers` take."""

    def __init__(self, rate=0.0, masks=True):
        super().__init__()
        self.embedding = layers.Embedding(WORDS, 8)
        self.places = layers.Embedding(TIME, 8)
        self.query, self.key, self.value = (layers.Dense(8, use_bias=False) for _ in range(3))
        self.dropout = layers.Dropout(rate)
        self.normalization = layers.LayerNormalization()
        self.head = layers.Dense(5)
        self.masks = masks

    def call(self, inputs, training=None):
        tokens, mask = inputs["input_ids"], inputs["attention_mask"]
        hidden = self.embedding(tokens) + self.places(tf.range(tf.shape(tokens)[1]))[None]
        scores = tf.matmul(self.query(hidden), self.key(hidden), transpose_b=True)
        if self.masks:
            scores += -1e9 * (1.0 - tf.cast(mask, tf.float32))[:, None]
        attended = tf.matmul(self.dropout(tf.nn.softmax(scores), training=training), self.value(hidden))
        return self.head(self.normalization(hidden + self.dropout(attended, training=training)))


def reading():
    return {"input_ids": TOKENS, "attention_mask": IS_TOKEN.astype("int32")}


def train(
    make,
    x,
    y,
    budget=None,
    weights=None,
    batch_size=9,
    epochs=2,
    compiling=None,
    optimizer="sgd",
    only_fit=False,
    **options,
):
    """Return (weights, history, evaluation, predictions) of a run, of plain Keras without options."""
    set_seeds()
    model = make()
    if budget is not None or options:
        options = dict(options, **({} if budget is None else {"micro_batch_tokens": budget}))
        model = accum.GradientAccumulateModel.from_model(model, **options)
    compiling = {"loss": "mse", **(compiling or {})}
    rates = {"sgd": lambda: tf.keras.optimizers.SGD(0.5, momentum=0.9), "slow": lambda: tf.keras.optimizers.SGD(0.1)}
    model.compile(rates[optimizer](), **dict(NOT_COMPILED, **compiling))
    fit = {"batch_size": batch_size, "shuffle": False, "verbose": 0, "sample_weight": weights}
    history = model.fit(x, y, epochs=epochs, **fit).history
    if only_fit:
        return model.get_weights(), history, 0.0, None
    evaluated = model.evaluate(x, y, batch_size=batch_size, verbose=0, sample_weight=weights)
    return model.get_weights(), history, np.ravel(evaluated), model.predict(x, batch_size=batch_size, verbose=0)


def assert_same(ours, plain):
    assert_near(ours[0], plain[0])
    assert set(ours[1]) == set(plain[1])
    for name in plain[1]:
        np.testing.assert_allclose(ours[1][name], plain[1][name], rtol=0, atol=2e-5, err_msg=name)
    np.testing.assert_allclose(ours[2], plain[2], rtol=0, atol=2e-5)


def assert_same_predictions(ours, plain):
    assert ours.shape == plain.shape
    if ours.ndim == 3:
        assert not ours[~IS_TOKEN].any()
        ours, plain = ours[IS_TOKEN], plain[IS_TOKEN]
    np.testing.assert_allclose(ours, plain, rtol=0, atol=2e-6)


# ----------------------------------------------------------------------------------------------------------------
# The plan


def planned_by_numpy(lengths, budget):
    order = np.argsort(-lengths, kind="stable")
    begins = []
    begin = 0
    while begin < len(lengths):
        begins.append(begin)
        begin += max(1, budget // lengths[order[begin]])
    sizes = np.diff(begins + [len(lengths)])
    return order, np.array(begins), sizes, lengths[order[begins]]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_plan_holds_every_example_once_and_keeps_the_budget(seed):
    lengths = np.random.RandomState(seed).randint(1, 40, size=25).astype("int32")
    for plan in (plan_of(tf.constant(lengths), 64), tf.function(plan_of)(tf.constant(lengths), 64)):
        plan = [part.numpy() for part in plan]
        assert_identical(plan, planned_by_numpy(lengths, 64))
        order, begins, sizes, longest = plan
        assert sorted(order) == list(range(25)) and sizes.sum() == 25
        assert all(size * length <= 64 for size, length in zip(sizes, longest))
        for begin, size, length in zip(begins, sizes, longest):
            assert lengths[order[begin : begin + size]].max() == length


def test_an_example_longer_than_the_budget_is_alone():
    plan = plan_of(tf.constant([9, 2, 2]), 4)
    assert plan.sizes.numpy().tolist() == [1, 2]


# ----------------------------------------------------------------------------------------------------------------
# The step of the full batch
@pytest.mark.slow
def test_one_score_for_each_sequence():
    plain = train(scorer, TOKENS, SCORES, compiling={"metrics": ["mae"]})
    ours = train(scorer, TOKENS, SCORES, BUDGET, compiling={"metrics": ["mae"]})
    assert_same(ours, plain)
    assert_same_predictions(ours[3], plain[3])


@pytest.mark.slow
def test_masked_tags_for_each_token():
    compiling = {"loss": cross_entropy(), "weighted_metrics": ["accuracy"]}
    weights = IS_TOKEN.astype("float32")
    plain = train(tagger, TOKENS, TAGS, weights=weights, compiling=compiling)
    ours = train(tagger, TOKENS, TAGS, BUDGET, weights=weights, compiling=compiling)
    assert_same(ours, plain)
    assert_same_predictions(ours[3], plain[3])


@pytest.mark.slow
def test_masked_tags_without_weights():
    more = {"compiling": {"loss": cross_entropy()}, "only_fit": True}
    assert_same(train(tagger, TOKENS, TAGS, BUDGET, **more), train(tagger, TOKENS, TAGS, **more))


@pytest.mark.slow
def test_a_dict_with_an_attention_mask_and_weights_for_tokens():
    compiling = {"loss": cross_entropy(), "weighted_metrics": ["accuracy"]}
    weights = np.where(IS_TOKEN, ROWS.uniform(0.5, 2.0, size=IS_TOKEN.shape), 0.0).astype("float32")
    plain = train(Reader, reading(), TAGS, weights=weights, compiling=compiling, optimizer="slow")
    ours = train(Reader, reading(), TAGS, BUDGET, weights=weights, compiling=compiling, optimizer="slow")
    assert_same(ours, plain)
    assert_same_predictions(ours[3], plain[3])


@pytest.mark.slow
def test_several_inputs_outputs_and_losses_that_layers_add():
    class Activity(layers.Layer):
        def call(self, inputs):
            self.add_loss(0.1 * tf.reduce_mean(tf.square(inputs)))
            return inputs

    def make():
        tokens, extra = tf.keras.Input((None,), dtype="int32", name="tokens"), tf.keras.Input((3,), name="extra")
        hidden = layers.Embedding(WORDS, 8, mask_zero=True)(tokens)
        tags = layers.Dense(5, name="tags")(layers.Dense(6, activation="tanh")(hidden))
        pooled = Activity()(layers.Dense(4)(layers.GlobalAveragePooling1D()(hidden)))
        score = layers.Dense(1, name="score", kernel_regularizer=tf.keras.regularizers.l2(0.01))
        return tf.keras.Model([tokens, extra], [tags, score(layers.Concatenate()([pooled, extra]))])

    extra = ROWS.normal(size=(COUNT, 3)).astype("float32")
    compiling = {"loss": [cross_entropy(), "mse"], "loss_weights": [0.3, 1.0]}
    weights = [np.full(IS_TOKEN.shape, 1.0, "float32") * IS_TOKEN, np.linspace(0.5, 2, COUNT).astype("float32")]
    with warned() as caught:
        ours = train(
            make, [TOKENS, extra], [TAGS, SCORES], BUDGET, weights=weights, compiling=compiling, optimizer="slow"
        )
    assert any("`add_loss`" in warning for warning in caught)
    # With a mask, some versions divide the two losses by different numbers, which warns.
    if not any("Losses divide by different numbers" in warning for warning in caught):
        plain = train(make, [TOKENS, extra], [TAGS, SCORES], weights=weights, compiling=compiling, optimizer="slow")
        assert_same(ours, plain)
        for mine, theirs in zip(ours[3], plain[3]):
            assert_same_predictions(mine, theirs)


@pytest.mark.slow
def test_features_behind_a_masking_layer_and_batches_of_a_cycle():
    def make():
        inputs = tf.keras.Input((None, 3))
        hidden = layers.Dense(6, activation="tanh")(layers.Masking(mask_value=-1.0)(inputs))
        return tf.keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(hidden)))

    x = np.where(IS_TOKEN[..., None], ROWS.normal(size=(COUNT, TIME, 3)), -1.0).astype("float32")
    plain = train(make, x, SCORES, batch_size=18, only_fit=True)
    ours = train(make, x, SCORES, BUDGET, batch_size=9, accum_steps=2, only_fit=True)
    assert_near(ours[0], plain[0])


@pytest.mark.slow
def test_a_function_tells_the_lengths():
    def make():
        inputs = tf.keras.Input((None, 3))
        scores = layers.Dense(4, activation="tanh")(inputs) * tf.cast(tf.math.sign(tf.abs(inputs[..., :1])), tf.float32)
        return tf.keras.Model(inputs, layers.Dense(1)(tf.reduce_sum(scores, axis=1) / TIME))

    if IS_KERAS_3:
        pytest.skip("Keras 3 takes no TensorFlow functions on symbolic inputs")
    x = (IS_TOKEN[..., None] * (1 + ROWS.uniform(size=(COUNT, TIME, 3)))).astype("float32")
    plain = train(make, x, SCORES, optimizer="slow", only_fit=True)
    lengths = lambda x: tf.reduce_sum(tf.cast(tf.not_equal(x[..., 0], 0.0), tf.int32), axis=1)  # noqa: E731
    ours = train(make, x, SCORES, BUDGET, optimizer="slow", only_fit=True, sequence_lengths=lengths)
    assert_same(ours, plain)


@pytest.mark.slow
@pytest.mark.tf(keras=2, because="ragged inputs ended with Keras 2")
def test_ragged_inputs():
    def make():
        inputs = tf.keras.Input((None,), dtype="int32", ragged=True)
        hidden = layers.Embedding(WORDS, 8)(inputs)
        return tf.keras.Model(inputs, layers.Dense(1)(layers.Lambda(lambda ragged: tf.reduce_mean(ragged, 1))(hidden)))

    x = tf.RaggedTensor.from_tensor(TOKENS, padding=0)
    plain = train(make, x, SCORES)
    ours = train(make, x, SCORES, BUDGET)
    assert_same(ours, plain)
    assert_same_predictions(ours[3], plain[3])


@pytest.mark.slow
@pytest.mark.law("L20")
@pytest.mark.tf(keras=2, because="ragged inputs ended with Keras 2")
def test_dropout_over_the_values_of_ragged_inputs_runs():
    def make():
        inputs = tf.keras.Input((None,), dtype="int32", ragged=True)
        drop = layers.Lambda(lambda ragged: ragged.with_flat_values(tf.nn.dropout(ragged.flat_values, 0.5)))
        hidden = drop(layers.Embedding(WORDS, 8)(inputs))
        return tf.keras.Model(inputs, layers.Dense(1)(layers.Lambda(lambda ragged: tf.reduce_mean(ragged, 1))(hidden)))

    history = train(make, tf.RaggedTensor.from_tensor(TOKENS, padding=0), SCORES, BUDGET, epochs=1, only_fit=True)[1]
    assert np.isfinite(history["loss"]).all()


@pytest.mark.slow
@pytest.mark.law("L20")
def test_dropout_draws_for_an_example_and_time_step_what_the_batch_draws():
    def make():
        return Reader(0.3)

    compiling = {"loss": cross_entropy()}
    weights = IS_TOKEN.astype("float32")
    more = {"weights": weights, "compiling": compiling, "optimizer": "slow", "only_fit": True}
    # Keras 2 draws from kernels whose state nobody can read: there, all examples at once are the oracle.
    plain = train(make, reading(), TAGS, **more, **({} if IS_KERAS_3 else {"micro_batch_size": COUNT}))
    ours = train(make, reading(), TAGS, BUDGET, **more)
    without = train(Reader, reading(), TAGS, **more)
    assert_same(ours, plain)
    assert max(np.abs(one - other).max() for one, other in zip(ours[0], without[0])) > 1e-4


@pytest.mark.slow
@pytest.mark.law("L20")
def test_recurrent_layers_with_dropout():
    def make():
        inputs = tf.keras.Input((None,), dtype="int32")
        hidden = layers.SpatialDropout1D(0.2)(layers.Embedding(WORDS, 8, mask_zero=True)(inputs))
        hidden = layers.Bidirectional(layers.SimpleRNN(6, return_sequences=True))(hidden)
        if not IS_KERAS_3:  # whose layer gives other values where the length is not static, as the probe finds
            hidden = layers.TimeDistributed(layers.Dropout(0.2))(hidden)
        return tf.keras.Model(inputs, layers.Dense(1)(layers.SimpleRNN(6)(hidden)))

    more = {"only_fit": True, "optimizer": "slow"}
    plain = train(make, TOKENS, SCORES, **more, **({} if IS_KERAS_3 else {"micro_batch_size": COUNT}))
    assert_same(train(make, TOKENS, SCORES, BUDGET, **more), plain)


@pytest.mark.slow
@pytest.mark.law("L20")
@pytest.mark.parametrize(
    "layer, eagerly",
    [("LSTM", True), ("GRU", True), pytest.param("GRU", False, marks=pytest.mark.slow)],
    ids=["LSTM", "GRU", "GRU, traced"],
)
@pytest.mark.tf(keras=3, because="Keras 2 keeps no seed of a layer in a variable")
@pytest.mark.filterwarnings("ignore:Eagerly, dropout")
def test_the_check_of_padding_leaves_the_seeds_of_layers_alone(layer, eagerly):
    def make():
        inputs = tf.keras.Input((None,), dtype="int32")
        hidden = layers.Embedding(WORDS, 8, mask_zero=True)(inputs)
        hidden = getattr(layers, layer)(3, seed=1, dropout=0.3, recurrent_dropout=0.3)(hidden)
        return tf.keras.Model(inputs, layers.Dense(1)(hidden))

    def seeds(**options):
        set_seeds()
        model = make()
        model = accum.GradientAccumulateModel.from_model(model, **options) if options else model
        model.compile("sgd", "mse", run_eagerly=eagerly, **NOT_COMPILED)
        model.fit(TOKENS[:6], SCORES[:6], batch_size=6, verbose=0)
        return [var.numpy() for var in model.non_trainable_variables if "seed" in var.path]

    np.testing.assert_array_equal(seeds(micro_batch_tokens=10**6), seeds())


@pytest.mark.slow
def test_a_step_that_runs_eagerly():
    compiling = {"loss": cross_entropy(), "run_eagerly": True}
    plain = train(tagger, TOKENS, TAGS, compiling=compiling, epochs=1)
    ours = train(tagger, TOKENS, TAGS, BUDGET, compiling=compiling, epochs=1)
    assert_same(ours, plain)
    assert_same_predictions(ours[3], plain[3])


@pytest.mark.slow
@pytest.mark.law("L11")
def test_two_replicas():
    set_seeds()
    with mirrored().scope():
        model = accum.GradientAccumulateModel.from_model(scorer(), micro_batch_tokens=BUDGET)
        model.compile(tf.keras.optimizers.SGD(0.5, momentum=0.9), "mse", **NOT_COMPILED)
    model.fit(TOKENS, SCORES, batch_size=9, shuffle=False, verbose=0, epochs=2)
    plain = train(scorer, TOKENS, SCORES)
    assert_near(model.get_weights(), plain[0])


# ----------------------------------------------------------------------------------------------------------------
# What can't be exact is named


def failing(make, x, y, match, error=(ValueError, tf.errors.InvalidArgumentError), compiling=None, **options):
    with pytest.raises(error, match=match):
        train(make, x, y, BUDGET, epochs=1, compiling=compiling, only_fit=True, **options)


@pytest.mark.slow
def test_a_model_that_reads_padding_is_named():
    failing(
        lambda: Reader(masks=False),
        reading(),
        TAGS,
        "depend on its padding",
        weights=IS_TOKEN.astype("float32"),
        compiling={"loss": cross_entropy()},
    )


@pytest.mark.slow
def test_tokens_without_a_mask_that_count_in_the_loss_are_named():
    failing(Reader, reading(), TAGS, "Padding counts in the loss", compiling={"loss": cross_entropy()})


@pytest.mark.slow
def test_padding_with_a_weight_is_named():
    failing(
        Reader,
        reading(),
        TAGS,
        "Padding has a `sample_weight` other than 0",
        weights=np.ones_like(TAGS, "float32"),
        compiling={"loss": cross_entropy()},
    )


@pytest.mark.slow
@pytest.mark.tf(keras=3, because="Keras 2 passes the mask to every metric")
def test_a_metric_that_counts_padding_is_named():
    with pytest.warns(UserWarning, match="'accuracy' counts padding"):
        train(
            Reader,
            reading(),
            TAGS,
            BUDGET,
            weights=IS_TOKEN.astype("float32"),
            epochs=1,
            only_fit=True,
            compiling={"loss": cross_entropy(), "metrics": ["accuracy"]},
        )


class KeptAndRight(tf.keras.metrics.Metric):
    """The share of tokens whose target is not -100 that have the right class."""

    def __init__(self):
        super().__init__(name="right")
        self.kept, self.right = (self.add_weight(name=name, initializer="zeros") for name in ("kept", "sum"))

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_true = tf.cast(y_true, tf.int32)
        y_true = tf.reshape(y_true, tf.shape(y_pred)[:2])
        kept = tf.cast(tf.not_equal(y_true, -100), tf.float32)
        right = tf.cast(tf.equal(tf.argmax(y_pred, axis=-1, output_type=tf.int32), y_true), tf.float32)
        self.kept.assign_add(tf.reduce_sum(kept))
        self.right.assign_add(tf.reduce_sum(kept * right))

    def result(self):
        return self.right / self.kept


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"run_eagerly": True}, {"jit_compile": True}], ids=["graph", "eager", "xla"])
def test_a_metric_of_ones_own_sees_the_padding_of_targets(more):
    if "jit_compile" in more and TF_VERSION < (2, 8):
        pytest.skip("`compile` takes no `jit_compile` here")
    tags = np.where(IS_TOKEN, TAGS, -100)

    def loss(y_true, y_pred):
        y_true = tf.maximum(tf.reshape(tf.cast(y_true, tf.int32), tf.shape(y_pred)[:2]), 0)
        return tf.keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)

    def run(*budget):
        # Up to 2.10, XLA can't compile the plain optimizer's step for rows.
        xla = {"jit_compile": False} if "jit_compile" in more and not budget else {}
        compiling = {"loss": loss, "metrics": [KeptAndRight()], **more, **xla}
        return train(tagger, TOKENS, tags, *budget, compiling=compiling, epochs=1)

    assert_same(run(BUDGET), run())


class Translator(tf.keras.Model):
    """An encoder and a decoder that have a table of words in common, with a loss over the decoder's tokens."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = layers.Embedding(WORDS, 8), layers.Dense(5)

    def call(self, inputs):
        mask = tf.cast(inputs["attention_mask"], tf.float32)[..., None]
        read = (
            tf.reduce_sum(self.embedding(inputs["input_ids"]) * mask, 1, keepdims=True)
            / tf.reduce_sum(mask, 1)[:, None]
        )
        return self.head(self.embedding(inputs["decoder_input_ids"]) + read)


@pytest.mark.slow
@pytest.mark.parametrize("told", ["encoder", "decoder", "function", "places"])
def test_tokens_of_a_decoder_behind_the_end_of_the_encoder_s(told):
    x = dict(reading(), decoder_input_ids=TOKENS[::-1])
    weights = IS_TOKEN[::-1].astype("float32")
    options = {"weights": weights, "compiling": {"loss": cross_entropy()}, "only_fit": True, "optimizer": "slow"}
    if told == "encoder":
        failing(Translator, x, TAGS, "have tokens there: add a .*decoder_attention_mask", weights=weights)
        return
    if told == "places":  # as some models of `transformers` count them
        x["position_ids"] = np.maximum(np.cumsum(IS_TOKEN, 1) - 1, 0).astype("int32")
        x["decoder_input_ids"] = np.tile(np.arange(TIME, dtype="int32"), [COUNT, 1])
        options["weights"] = IS_TOKEN.astype("float32")
    plain = train(Translator, x, np.where(options["weights"] > 0, TAGS, 0), **options)
    if told == "decoder":
        x["decoder_attention_mask"] = IS_TOKEN[::-1].astype("int32")
    elif told == "function":
        options["sequence_lengths"] = lambda x: tf.reduce_max(
            [tf.reduce_sum(tf.cast(x[name] != 0, tf.int32), 1) for name in ("input_ids", "decoder_input_ids")], 0
        )
    assert_same(train(Translator, x, np.where(options["weights"] > 0, TAGS, 0), BUDGET, **options), plain)


@pytest.mark.slow
def test_batches_that_tell_no_lengths_are_refused():
    def make():
        inputs = tf.keras.Input((None, 3))
        return tf.keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(inputs)))

    failing(make, np.ones([COUNT, TIME, 3], "float32"), SCORES, "`micro_batch_tokens` needs to know where", ValueError)


@pytest.mark.slow
def test_sparse_tensors_beside_the_tokens_are_refused():
    def make():
        tokens, extra = tf.keras.Input((None,), dtype="int32"), tf.keras.Input((4,), sparse=True)
        hidden = layers.GlobalAveragePooling1D()(layers.Embedding(WORDS, 2, mask_zero=True)(tokens))
        return tf.keras.Model([tokens, extra], layers.Dense(1)(hidden) + layers.Dense(1)(extra))

    data = (TOKENS, tf.sparse.from_dense(np.eye(COUNT, 4, dtype="float32"))), SCORES
    model = accum.GradientAccumulateModel.from_model(make(), micro_batch_tokens=BUDGET)
    model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    with pytest.raises(ValueError, match="can't sort a `tf.SparseTensor`: make it dense or ragged, or pass"):
        model.fit(tf.data.Dataset.from_tensor_slices(data).batch(COUNT), verbose=0)


def test_inputs_of_one_length_are_refused():
    def make():
        inputs = tf.keras.Input((TIME,), dtype="int32")
        return tf.keras.Model(
            inputs, layers.Dense(1)(layers.Flatten()(layers.Embedding(WORDS, 2, mask_zero=True)(inputs)))
        )

    failing(make, TOKENS, SCORES, r"create them with `tf.keras.Input\(\(None, …\)\)`", ValueError)


def test_batch_normalization_over_time_steps_is_refused():
    def make():
        inputs = tf.keras.Input((None,), dtype="int32")
        hidden = layers.BatchNormalization()(layers.Embedding(WORDS, 2, mask_zero=True)(inputs))
        return tf.keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(hidden)))

    failing(make, TOKENS, SCORES, "Batch normalization over time steps counts padding", ValueError)


# --------------------------------------------------------------------------------------------------------------------
# XLA, which compiles each micro-batch for its shape

HAS_JIT_COMPILE = pytest.mark.skipif(TF_VERSION < (2, 8), reason="`compile` takes no `jit_compile` here")
XLA = {"jit_compile": True}


@pytest.mark.parametrize("seed", range(4))
def test_few_shapes_hold_every_example_once_and_keep_the_budget(seed):
    lengths = np.random.RandomState(seed).randint(1, 40, size=25).astype("int32")
    rounded = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 39]  # and the padded length
    for budget in (64, 30):
        order, begins, sizes, longest = [part.numpy() for part in plan_of(tf.constant(lengths), budget, 39)]
        assert sorted(order) == list(range(25)) and begins.tolist() == (np.cumsum(sizes) - sizes).tolist()
        assert set(sizes) <= {1, 2, 4, 8, 16}
        for begin, size, length in zip(begins, sizes, longest):
            own = lengths[order[begin : begin + size]].max()
            assert own <= length and (length in rounded or length == budget or size == 1)
            assert size * length <= budget or (size == 1 and length == own)


@pytest.mark.slow
@HAS_JIT_COMPILE
@pytest.mark.parametrize("accum_steps", [1, 2])
def test_xla_compiles_each_micro_batch(accum_steps):
    compiling = {"loss": cross_entropy(), "weighted_metrics": ["accuracy"]}
    plain = train(tagger, TOKENS, TAGS, weights=IS_TOKEN.astype("float32"), compiling=compiling, batch_size=18)
    more = {"weights": IS_TOKEN.astype("float32"), "compiling": dict(compiling, **XLA), "accum_steps": accum_steps}
    with mock.patch.object(_step, "within_function", wraps=_step.within_function) as compiled:
        ours = train(tagger, TOKENS, TAGS, BUDGET, batch_size=18 // accum_steps, **more)
    assert len(compiled.call_args_list) >= 6  # the first and the others, of each kind of step
    assert all(call[1] == XLA for call in compiled.call_args_list)
    assert_same(
        ours if accum_steps == 1 else (ours[0], {}, plain[2]), plain if accum_steps == 1 else (plain[0], {}, plain[2])
    )
    assert_same_predictions(ours[3], plain[3])


@pytest.mark.slow
@HAS_JIT_COMPILE
def test_xla_and_dropout():
    """In Keras 3, XLA draws what plain Keras draws with XLA; everywhere the same for each budget."""
    compiling = {"loss": cross_entropy(), **XLA}
    ours = train(lambda: tagger(0.3), TOKENS, TAGS, BUDGET, compiling=compiling, only_fit=True)
    if IS_KERAS_3:
        other = train(lambda: tagger(0.3), TOKENS, TAGS, compiling=compiling, only_fit=True)
    else:
        other = train(lambda: tagger(0.3), TOKENS, TAGS, 3 * BUDGET, compiling=compiling, only_fit=True)
    assert_same(ours, other)
    still = train(tagger, TOKENS, TAGS, BUDGET, compiling=compiling, only_fit=True)
    assert max(abs(one - two).max() for one, two in zip(ours[0], still[0])) > 1e-3


@HAS_JIT_COMPILE
@pytest.mark.slow
def test_xla_on_two_replicas():
    set_seeds()
    with mirrored().scope():
        model = accum.GradientAccumulateModel.from_model(scorer(), micro_batch_tokens=BUDGET)
        model.compile(tf.keras.optimizers.SGD(0.5, momentum=0.9), "mse", jit_compile=True)
    model.fit(TOKENS, SCORES, batch_size=9, shuffle=False, verbose=0, epochs=2)
    assert_same((model.get_weights(), {}, 0.0), (train(scorer, TOKENS, SCORES)[0], {}, 0.0))


@HAS_JIT_COMPILE
def test_xla_and_ragged_inputs():
    model = accum.GradientAccumulateModel.from_model(scorer(), micro_batch_tokens=BUDGET, sequence_lengths=None)
    model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(ValueError, match="ragged inputs have none: pad them"):
        model.fit(tf.RaggedTensor.from_tensor(TOKENS, padding=0), SCORES, verbose=0)


@HAS_JIT_COMPILE
def test_a_compiled_model_that_starts_to_split():
    """Keras 3 compiles by default on a GPU, so only Keras 2 can tell that this is asked for."""
    plain = scorer()
    plain.compile("sgd", "mse", jit_compile=True)
    model = accum.GradientAccumulateModel.from_model(plain, micro_batch_tokens=BUDGET)
    with mock.patch.object(_step, "within_function", wraps=_step.within_function) as compiled:
        model.fit(TOKENS, SCORES, verbose=0)
    assert compiled.called is not IS_KERAS_3


@pytest.mark.parametrize(
    "options, error, match",
    [
        ({"micro_batch_tokens": 0}, ValueError, "`micro_batch_tokens` must be an int >= 1"),
        ({"micro_batch_tokens": 2.5}, TypeError, "`micro_batch_tokens` must be an int >= 1"),
        ({"micro_batch_tokens": 9, "micro_batch_size": 2}, ValueError, "pass one of them"),
        (
            {"micro_batch_tokens": 9, "whole_batch": "loss"},
            ValueError,
            "`whole_batch` needs micro-batches of one shape",
        ),
        ({"micro_batch_tokens": 9, "micro_batch_weight": "equal"}, ValueError, "would count their means alike"),
        ({"sequence_lengths": len, "accum_steps": 2}, ValueError, "`sequence_lengths` tells `micro_batch_tokens`"),
        ({"sequence_lengths": 3, "micro_batch_tokens": 9}, TypeError, "`sequence_lengths` must be a function or None"),
    ],
    ids=["zero", "float", "size", "whole batch", "equal weights", "lengths alone", "lengths"],
)
def test_bad_arguments(options, error, match):
    with pytest.raises(error, match=match):
        accum.GradientAccumulateModel.from_model(tf.keras.Sequential([layers.Dense(1)]), **options)


def test_the_model_says_how_it_splits():
    model = accum.GradientAccumulateModel.from_model(scorer(), micro_batch_tokens=BUDGET)
    assert f"micro_batch_tokens={BUDGET}" in repr(model)
    with pytest.raises(ValueError, match="split by `micro_batch_tokens`"):
        model.micro_batch_size = 3


@pytest.mark.slow
@pytest.mark.law("L5")
def test_no_noise_scale_is_measured_between_micro_batches_sorted_by_length():
    set_seeds()
    model = accum.GradientAccumulateModel.from_model(scorer(), micro_batch_tokens=BUDGET)
    model.compile(tf.keras.optimizers.SGD(0.1), "mse", **NOT_COMPILED)
    logger = accum.StepLogger(verbose=0)
    model.fit(TOKENS, SCORES, batch_size=9, verbose=0, callbacks=[logger])
    assert np.isnan(logger.history["noise_scale"]).all()
    assert "sorts examples by length" in logger.summary


@pytest.mark.slow
def test_a_weight_for_each_example_is_no_weight_for_tokens():
    failing(
        Reader,
        reading(),
        TAGS,
        "Padding counts in the loss",
        weights=np.ones([COUNT, 1], "float32"),
        compiling={"loss": cross_entropy()},
    )


class Shifted(tf.keras.Model):
    """A model of the next token, with a loss over the tokens but the first."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = layers.Embedding(WORDS, 8), layers.Dense(5)

    def call(self, inputs):
        return self.head(self.embedding(inputs["input_ids"])[:, :-1])

    def train_step(self, data):
        x, y, weights = data
        with tf.GradientTape() as tape:
            loss = self.compiled_loss(y[:, 1:], self(x, training=True), weights[:, 1:])
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
        return {"loss": loss}


@pytest.mark.slow
@pytest.mark.tf(keras=2, because="`compiled_loss` ended with Keras 2")
def test_outputs_of_another_length_than_the_sequences_are_named():
    weights = IS_TOKEN.astype("float32")
    for more in [{}] + ([XLA] if TF_VERSION >= (2, 8) else []):
        failing(Shifted, reading(), TAGS, "axis 1 of an", weights=weights, compiling={"loss": cross_entropy(), **more})


class LateReader(tf.keras.Model):
    """A model that reads padding, as its outputs show after the first update only: they begin as zeros."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = layers.Embedding(WORDS, 8), layers.Dense(1, kernel_initializer="zeros")

    def call(self, inputs):
        return self.head(tf.reduce_mean(self.embedding(inputs["input_ids"]), axis=1))


def of_pairs(y, outputs):
    return tf.reduce_mean((outputs - tf.transpose(outputs) - y + tf.transpose(y)) ** 2, axis=-1)


class Clipping(tf.keras.Model):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(data[0], training=True) - data[1]) ** 2)
        clipped, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.1)
        self.optimizer.apply_gradients(zip(clipped, self.trainable_variables))
        return {"loss": loss}


@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "kind, loss, words",
    [
        (tf.keras.Model, of_pairs, "looks across.*each micro-batch by tokens.*loss-counts"),
        (tf.keras.Model, lambda y, outputs: tf.reduce_sum((outputs - y) ** 2), "adds up the examples.*accum: sum"),
        (Clipping, "mse", "accum: clipping"),
    ],
)
def test_what_micro_batches_by_tokens_see_apart_is_named(kind, loss, words):
    """What is named ends elsewhere than at the full batch."""

    def make():
        model = scorer()
        return kind(model.inputs, model.outputs)

    plain = train(make, TOKENS, SCORES, compiling={"loss": loss}, optimizer="slow", only_fit=True)
    with pytest.warns(accum.InexactWarning, match=words):
        ours = train(make, TOKENS, SCORES, BUDGET, compiling={"loss": loss}, optimizer="slow", only_fit=True)
    assert max(np.abs(one - other).max() for one, other in zip(plain[0], ours[0])) > 1e-4


def test_integers_beside_the_sequences_are_no_sequences():
    """A user, say, with as many numbers as he has."""

    def make():
        tokens, others = tf.keras.Input((None,), dtype="int32"), tf.keras.Input((3,), dtype="int32")
        words = layers.GlobalAveragePooling1D()(layers.Embedding(WORDS, 8, mask_zero=True)(tokens))
        mixed = layers.Concatenate()([words, layers.Flatten()(layers.Embedding(5, 2)(others))])
        return tf.keras.Model([tokens, others], layers.Dense(1)(mixed))

    data = (TOKENS, np.arange(3 * COUNT).reshape(COUNT, 3) % 5)
    data = tf.data.Dataset.from_tensor_slices((data, SCORES)).batch(9)

    def trained(**options):
        set_seeds()
        model = make()
        model = accum.GradientAccumulateModel.from_model(model, **options) if options else model
        model.compile(tf.keras.optimizers.SGD(0.1), "mse", **NOT_COMPILED)
        model.fit(data, epochs=2, verbose=0)
        return model.get_weights()

    assert_near(trained(micro_batch_tokens=BUDGET), trained())


@pytest.mark.slow
def test_outputs_that_say_nothing_of_padding_are_probed_again():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "`micro_batch_tokens` trims padding")  # it can be checked
        failing(LateReader, reading(), SCORES, "depend on its padding")


class Gated(LateReader):
    """A gate that starts at 0 hides that it reads padding, as those of ReZero and LoRA do."""

    def __init__(self):
        super().__init__()
        self.head, self.gate = layers.Dense(1), self.add_weight(name="gate", shape=(), initializer="zeros")

    def call(self, inputs):
        embedded, mask = self.embedding(inputs["input_ids"]), tf.cast(inputs["attention_mask"], tf.float32)
        read = tf.reduce_sum(mask[..., None] * embedded, axis=1)
        return self.head(read + self.gate * tf.reduce_mean(embedded, axis=1))


@pytest.mark.parametrize("run_eagerly", [False, True], ids=["", "eager"])
def test_padding_that_a_gate_hides_at_first_is_named_in_a_later_batch(run_eagerly):
    compiling = {"run_eagerly": run_eagerly}
    failing(Gated, reading(), SCORES, "depend on its padding", batch_size=6, compiling=compiling)


def test_a_model_that_is_compiled_again_is_probed_again():
    def fit(batches):
        model.compile(tf.keras.optimizers.SGD(0.0), "mse", **NOT_COMPILED)
        for _ in range(batches):
            model.fit(reading(), SCORES, batch_size=COUNT, verbose=0)

    model = Gated()
    model(reading())
    model = accum.GradientAccumulateModel.from_model(model, micro_batch_tokens=BUDGET)
    fit(batches=4)  # the fifth is not looked at
    model.gate.assign(1.0)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="depend on its padding"):
        fit(batches=1)


@pytest.mark.slow
def test_a_model_with_noise_in_prediction_can_not_be_checked():
    class Noisy(LateReader):
        def call(self, inputs):
            noise = tf.random.normal([tf.shape(inputs["input_ids"])[0], 1])
            mask = tf.cast(inputs["attention_mask"], tf.float32)[..., None]
            return self.head(tf.reduce_sum(mask * self.embedding(inputs["input_ids"]), axis=1)) + noise

    with pytest.warns(UserWarning, match="draws random numbers in prediction"):
        train(Noisy, reading(), SCORES, BUDGET, epochs=1, only_fit=True)


@pytest.mark.slow
@pytest.mark.tf(keras=2, because="the train step of Keras 2")
def test_a_model_that_is_not_called_with_x_can_not_be_checked():
    class Picks(Shifted):
        def call(self, inputs):
            return self.head(self.embedding(inputs))

        def train_step(self, data):
            x, y, weights = data
            return super().train_step((x["input_ids"], y, weights))

    weights = np.where(IS_TOKEN, 1.0, 0.0).astype("float32")
    with pytest.warns(UserWarning, match="calling it with x raises"), pytest.raises(tf.errors.InvalidArgumentError):
        train(Picks, reading(), TAGS, BUDGET, weights=weights, epochs=1, only_fit=True)
