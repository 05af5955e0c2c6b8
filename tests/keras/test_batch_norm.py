"""Moving statistics move once a cycle, to what Keras' own layer would have recorded for the whole batch (L13)."""

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_near
from saving import FORMATS, saved
from versions import IS_KERAS_3
from warned import warned

import accum

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.law("L13")]

RANDOM = np.random.RandomState(0)
PARTS = (slice(0, 5), slice(5, 9), slice(9, 12))  # a ragged cycle of 12 examples
KERAS = tf.keras.layers.BatchNormalization

# (what, shape of an example, arguments)
LAYERS = [
    ("rank 2", (3,), {}),
    ("rank 3", (4, 3), {}),
    ("rank 3 first axis", (4, 3), {"axis": 1}),
    ("rank 4", (2, 3, 3), {}),
    ("rank 4 unfused", (2, 3, 3), {"fused": False}),
    ("rank 4 two axes", (2, 3, 2), {"axis": [1, 3]}),
    ("rank 5", (2, 3, 1, 2), {}),
    ("rank 5 first axis, no scale", (2, 3, 1, 2), {"axis": 1, "scale": False, "center": False, "fused": False}),
    ("float64", (3,), {"dtype": "float64"}),
]
if IS_KERAS_3:  # which has no fused kernel and takes one axis
    LAYERS = [(what, shape, options) for what, shape, options in LAYERS if not {"fused"} & set(options)]
    LAYERS = [layer for layer in LAYERS if layer[0] != "rank 4 two axes"]


def examples(shape, count=12):
    """Values whose mean differs from part to part, so that the variance between them matters."""
    drift = np.arange(count, dtype=np.float32).reshape((-1,) + (1,) * len(shape))
    return (drift + RANDOM.normal(size=(count,) + shape)).astype(np.float32)


def statistics(layer):
    return [layer.moving_mean.numpy(), layer.moving_variance.numpy()]


def assert_close(ours, theirs, rtol=2e-6):
    assert_near(ours, theirs, rtol=rtol)


@pytest.mark.slow
@pytest.mark.parametrize("what,shape,options", LAYERS, ids=[what for what, _, _ in LAYERS])
def test_a_cycle_of_calls_records_what_keras_records_for_the_full_batch(what, shape, options):
    keras, ours = KERAS(momentum=0.5, **options), accum.AccumBatchNormalization(3, momentum=0.5, **options)
    for _ in range(2):
        x = examples(shape)
        keras(x, training=True)
        for part in PARTS[:-1]:
            before = statistics(ours) if ours.built else None
            ours(x[part], training=True)
            assert before is None or np.array_equal(before, statistics(ours))
        ours(x[PARTS[-1]], training=True)
    assert_close(statistics(ours), statistics(keras))


@pytest.mark.parametrize("rank", [2, 4])
def test_statistics_of_a_cycle_follow_the_law_of_total_variance(rank):
    x = examples((3,) if rank == 2 else (2, 2, 3))
    layer = accum.AccumBatchNormalization(3, momentum=0.0)
    for part in PARTS:
        layer(x[part], training=True)
    values = x.reshape(-1, 3).astype(np.float64)
    ddof = 0 if rank == 2 or IS_KERAS_3 else 1  # where Keras computes by the fused kernel, which is unbiased
    assert_close(statistics(layer), [values.mean(axis=0), values.var(axis=0, ddof=ddof)])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float16"])
def test_sixteen_bit_inputs_have_float32_statistics(policy):
    x = examples((3,))
    module = tf.keras.mixed_precision
    policy = (module if hasattr(module, "Policy") else module.experimental).Policy(policy)
    layer, keras = accum.AccumBatchNormalization(3, dtype=policy, momentum=0.5), KERAS(dtype=policy, momentum=0.5)
    dtype = layer(x[:1]).dtype
    x = tf.cast(x, dtype)
    for part in PARTS:
        assert layer(x[part], training=True).dtype == dtype
    keras(x, training=True)
    if IS_KERAS_3 and policy.name == "float16":  # keeps its statistics in float16 too
        assert_close(statistics(layer), statistics(keras), rtol=1e-3)
    else:
        assert tf.as_dtype(layer.moving_mean.dtype) == tf.float32
        assert_close(statistics(layer), statistics(keras))


@pytest.mark.slow
def test_training_normalises_by_the_micro_batch_and_inference_by_the_moving_statistics():
    x = examples((2, 2, 3))
    layer, keras = accum.AccumBatchNormalization(3), KERAS()
    for one in (layer, keras):
        one.build((None, 2, 2, 3))
    np.testing.assert_array_equal(layer(x[:5], training=True), keras(x[:5], training=True))
    layer.set_weights(keras.get_weights())
    for call in (lambda one: one(x), lambda one: one(x, training=False), tf.function(lambda one: one(x))):
        np.testing.assert_array_equal(call(layer), call(keras))


@pytest.mark.law("L14")
def test_one_micro_step_a_cycle_is_keras_layer_to_the_bit(tmp_path):
    layer, keras = accum.AccumBatchNormalization(), KERAS()
    for _ in range(2):
        x = examples((2, 2, 3))
        np.testing.assert_array_equal(layer(x, training=True), keras(x, training=True))
    np.testing.assert_array_equal(statistics(layer), statistics(keras))
    saved = tf.train.list_variables(tf.train.Checkpoint(layer=layer).save(str(tmp_path / "at")))
    assert not [name for name, _ in saved if "accumulation" in name]


CALLS = {
    "training": lambda layer, x: layer(x, training=True),
    "inference": lambda layer, x: layer(tf.constant(x), training=False),
    "symbolic": lambda layer, x: layer(inputs=tf.keras.Input(x.shape[1:])),
    "traced": lambda layer, x: tf.function(layer)(tf.constant(x)),
}


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
@pytest.mark.parametrize("shapes", [[(3,), (2, 2, 3)], [(2, 2, 3), (3,)]], ids=["2 then 4", "4 then 2"])
def test_one_layer_takes_inputs_of_one_rank_as_keras_layer_does(shapes, call):
    """The error is ours. Inputs of several ranks can be reshaped to [values, features]."""
    first, other = map(examples, shapes)
    keras, layer = KERAS(), accum.AccumBatchNormalization(2)
    keras(first, training=True)
    with pytest.raises((ValueError, IndexError, tf.errors.InvalidArgumentError)):
        keras(other, training=True)
    layer(first, training=True)
    with pytest.raises(ValueError, match=rf"must have rank {first.ndim}, .* Received: inputs of shape \("):
        call(layer, other)
    layer, keras = accum.AccumBatchNormalization(2), KERAS()
    flat = [x.reshape([-1, 3]) for x in (first, other)]
    for x in flat:
        layer(x, training=True)
    keras(np.concatenate(flat), training=True)
    np.testing.assert_allclose(statistics(layer), statistics(keras), rtol=0, atol=2e-6)


@pytest.mark.slow
def test_a_frozen_layer_moves_nothing_and_normalises_by_what_it_has():
    layer = accum.AccumBatchNormalization(2, trainable=False)
    x = examples((3,))
    for _ in range(2):
        np.testing.assert_array_equal(layer(x, training=True), layer(x, training=False))
    np.testing.assert_array_equal(statistics(layer), [np.zeros(3), np.ones(3)])


@pytest.mark.slow
@pytest.mark.parametrize("is_traced", [False, True], ids=["eager", "function"])
def test_flush_moves_by_what_is_there_and_reset_forgets_it(is_traced):
    layer, keras, x = accum.AccumBatchNormalization(3), KERAS(), examples((3,))
    call = lambda x: layer(x, training=True)
    call = tf.function(call, input_signature=[tf.TensorSpec([None, 3])]) if is_traced else call
    call(x[:5])
    layer.reset()
    layer.flush()  # with nothing there it changes nothing
    call(x[5:9])
    call(x[9:12])
    layer.flush()
    keras(x[5:12], training=True)
    assert_close(statistics(layer), statistics(keras))


@pytest.mark.slow
def test_training_may_be_a_tensor():
    layer, keras, x = accum.AccumBatchNormalization(2), KERAS(), examples((3,))
    call = tf.function(lambda x, training: layer(x, training=training))
    for part, training in ((PARTS[0], True), (PARTS[1], False), (PARTS[2], True)):
        call(tf.constant(x[part]), tf.constant(training))
    keras(np.concatenate([x[PARTS[0]], x[PARTS[2]]]), training=True)
    assert_close(statistics(layer), statistics(keras))


# ----------------------------------------------------------------------------------------------------------------
# By a model's step counter


def model_of(layers, run_eagerly=False, **options):
    inputs = tf.keras.Input((3,))
    outputs = inputs
    for layer in layers:
        outputs = layer(outputs)
    outputs = tf.keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)(outputs)
    model = accum.GradientAccumulateModel(inputs=inputs, outputs=outputs, **options)
    model.compile(tf.keras.optimizers.SGD(0.01), "mse", run_eagerly=run_eagerly)
    return model


def in_parts(micro_batches):
    """A dataset of micro-batches of several sizes, for which a train step is traced once; all targets are zero."""
    one = micro_batches[0]
    types = (tf.nest.map_structure(lambda _: tf.float32, one), tf.float32)
    shapes = (tf.nest.map_structure(lambda _: tf.TensorShape([None, 3]), one), tf.TensorShape([None, 1]))
    pairs = [(parts, np.zeros((len(tf.nest.flatten(parts)[0]), 1), "float32")) for parts in micro_batches]
    return tf.data.Dataset.from_generator(lambda: pairs, types, shapes)


def recorded(batches):
    """What Keras' layer records for these batches."""
    keras = KERAS()
    for batch in batches:
        keras(batch, training=True)
    return statistics(keras)


FIRST, SECOND = list(range(12)), list(range(12, 18))  # 18 examples in micro-batches of 4 and 2: two cycles of 3 and 2


@pytest.mark.slow
@pytest.mark.law("L6")
@pytest.mark.parametrize(
    "last_cycle,cycles,reduction",
    [
        ("flush", [FIRST, SECOND, FIRST, SECOND], "mean"),
        ("flush", [FIRST, SECOND, FIRST, SECOND], "running_mean"),
        ("drop", [FIRST, FIRST], "mean"),
        ("carry", [FIRST, SECOND + list(range(4)), list(range(4, 16))], "mean"),
    ],
)
def test_the_layer_follows_the_models_step_counter(last_cycle, cycles, reduction):
    x, layer = examples((3,), 18), accum.AccumBatchNormalization()
    model = model_of([layer], accum_steps=3, last_cycle=last_cycle, reduction=reduction)
    model.fit(x, np.zeros((18, 1)), batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert_close(statistics(layer), recorded([x[cycle] for cycle in cycles]))


@pytest.mark.law("L9")
def test_a_skipped_micro_batch_leaves_no_trace():
    x, layer = examples((3,)), accum.AccumBatchNormalization()
    model = model_of([layer], accum_steps=3, nonfinite="skip_micro")
    bad = np.full((4, 3), np.inf, np.float32)
    model.fit(in_parts([x[PARTS[0]], bad, x[PARTS[1]], x[PARTS[2]]]), verbose=0)
    assert_close(statistics(layer), recorded([x]))
    assert int(model.optimizer.iterations.numpy()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("run_eagerly", [False, True], ids=["traced", "eager"])
def test_a_shared_layer_moves_once_for_each_of_its_inputs(run_eagerly):
    inputs = [tf.keras.Input((3,)), tf.keras.Input((3,))]
    layer, keras = accum.AccumBatchNormalization(), KERAS()
    outputs = tf.keras.layers.Dense(1)(tf.keras.layers.Add()([layer(one) for one in inputs]))
    model = accum.GradientAccumulateModel(3, inputs=inputs, outputs=outputs)
    model.compile("sgd", "mse", run_eagerly=run_eagerly)
    micro_batches = []
    for _ in range(2):
        one, other = examples((3,)), 3.0 + 2.0 * examples((3,))
        micro_batches += [(one[part], other[part]) for part in PARTS]
        keras(one, training=True)
        keras(other, training=True)
    model.fit(in_parts(micro_batches), verbose=0)
    assert_close(statistics(layer), statistics(keras))


@pytest.mark.slow
@pytest.mark.law("L14")
def test_a_model_of_single_micro_steps_has_keras_layer():
    x, y, layer = examples((3,)), np.zeros((12, 1)), accum.AccumBatchNormalization(4)
    model_of([layer], accum_steps=1).fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert_close(statistics(layer), recorded([x[:4], x[4:8], x[8:]]))


@pytest.mark.slow
def test_a_call_outside_of_the_train_step_is_the_layers_own():
    x, layer = examples((3,)), accum.AccumBatchNormalization()
    model = model_of([layer], accum_steps=2, run_eagerly=True)
    model.train_on_batch(x[:5], np.zeros((5, 1)))
    model(x, training=True)  # as Keras' layer, which `accum_steps=1` is
    assert_close(statistics(layer), recorded([x]))
    model.train_on_batch(x[5:9], np.zeros((4, 1)))
    assert_close(statistics(layer), recorded([x, x[:9]]))


@pytest.mark.slow
def test_flush_callback_ends_the_cycle_in_a_plain_model():
    x, layer = examples((3,), 18), accum.AccumBatchNormalization(3)
    inputs = tf.keras.Input((3,))
    plain = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(layer(inputs)))
    plain.compile(accum.GradientAccumulateOptimizer("sgd", 3), "mse")
    flush = accum.FlushCallback("flush")
    plain.fit(x, np.zeros((18, 1)), batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[flush])
    assert_close(statistics(layer), recorded([x[FIRST], x[SECOND]] * 2))


@pytest.mark.slow
@pytest.mark.law("L12")
def test_a_checkpoint_in_mid_cycle_keeps_the_statistics(tmp_path):
    x, y = examples((3,)), np.zeros((12, 1))

    def model():
        layer = accum.AccumBatchNormalization()
        return layer, model_of([layer], accum_steps=3, run_eagerly=True)

    layer, before = model()
    for part in PARTS[:2]:
        before.train_on_batch(x[part], y[part])
    path = tf.train.Checkpoint(model=before).save(str(tmp_path / "at"))
    layer, after = model()
    tf.train.Checkpoint(model=after).restore(path)
    after.train_on_batch(x[PARTS[2]], y[PARTS[2]])
    assert_close(statistics(layer), recorded([x]))


@pytest.mark.slow
@pytest.mark.law("L12")
@pytest.mark.parametrize("format", FORMATS)
def test_a_saved_model_infers_alike_and_holds_no_accumulator(format, tmp_path):
    x, y, layer = examples((3,)), np.zeros((12, 1)), accum.AccumBatchNormalization(2, momentum=0.5, name="norm")
    inputs = tf.keras.Input((3,))
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(layer(inputs)))
    model.compile(accum.GradientAccumulateOptimizer("sgd", 2), tf.keras.losses.MeanSquaredError())
    model.fit(x, y, batch_size=4, verbose=0)
    path = saved(model, tmp_path / "model", format)
    again = tf.keras.models.load_model(path)
    assert isinstance(again.get_layer("norm"), accum.AccumBatchNormalization)
    assert again.get_layer("norm").accum_steps == 2
    np.testing.assert_array_equal(again.predict(x), model.predict(x))
    if format == "tf":
        names = [name for name, _ in tf.train.list_variables(path + "/variables/variables")]
        assert not [name for name in names if "accumulation" in name]


@pytest.mark.slow
@pytest.mark.law("L16")
def test_no_accumulator_is_a_weight_of_the_layer():
    layer = accum.AccumBatchNormalization(2)
    layer(examples((3,)), training=True)
    assert [len(layer.weights), len(layer.trainable_weights), layer.count_params()] == [4, 2, 12]


@pytest.mark.slow
def test_keras_makes_an_equal_layer_from_its_config():
    layer = accum.AccumBatchNormalization(4, axis=1, momentum=0.5, center=False, name="norm")
    again = tf.keras.layers.deserialize(tf.keras.layers.serialize(layer))
    assert isinstance(again, accum.AccumBatchNormalization)
    assert again.get_config() == layer.get_config()
    assert (again.accum_steps, again.axis, again.momentum, again.center) == (4, 1, 0.5, False)


@pytest.mark.slow
@pytest.mark.tf("2.12", because="Keras' batch normalisation ignored masks before TF 2.12")
def test_masked_values_count_for_nothing():
    x, mask = examples((4, 3)), RANDOM.uniform(size=(12, 4)) < 0.7
    layer, keras = accum.AccumBatchNormalization(3), KERAS()
    for part in PARTS:
        layer(x[part], training=True, mask=mask[part])
    keras(x, training=True, mask=mask)
    assert_close(statistics(layer), statistics(keras))


@pytest.mark.law("L19")
@pytest.mark.tf("2.12", because="Keras' batch normalisation ignored masks before TF 2.12")
@pytest.mark.parametrize("options", [{"micro_batch_size": 5}, {"accum_steps": 1}], ids=["split", "cycle"])
def test_statistics_move_too_where_everything_is_masked(options):
    x, results = np.zeros([12, 4, 3], "float32"), []
    x[6:, :2] = RANDOM.normal(size=(6, 2, 3))  # the first batch is padding alone
    for accumulating in (False, True):
        inputs = tf.keras.Input((4, 3))
        hidden = KERAS(momentum=0.5)(tf.keras.layers.Masking()(inputs))
        model = tf.keras.Model(inputs, tf.keras.layers.Dense(1, kernel_initializer="ones")(hidden[:, -1]))
        if accumulating:
            model = accum.GradientAccumulateModel.from_model(model, **options)
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
        model.fit(x[:6], x[:6, 0, :1], batch_size=6, verbose=0)
        np.testing.assert_allclose(model.non_trainable_variables[1].numpy(), 0.5, rtol=2e-6)  # from 1 to 0, by half
        model.fit(x, x[:, 0, :1], batch_size=12, verbose=0)
        results.append([var.numpy() for var in model.non_trainable_variables])
    for one, other in zip(*results):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)


@pytest.mark.slow
@pytest.mark.law("L19")
@pytest.mark.tf("2.12", because="Keras' batch normalisation ignored masks before TF 2.12")
def test_a_mask_that_differs_between_features_is_that_of_the_full_batch():
    x, results = RANDOM.normal(size=(12, 4, 3)).astype("float32"), []
    for number, text in enumerate(x):
        text[1 + number % 4 :] = 0
    for options in ({}, {"micro_batch_size": 5}):
        inputs = tf.keras.Input((4, 3))
        hidden = tf.keras.layers.Flatten()(KERAS(axis=1)(tf.keras.layers.Masking()(inputs)))
        model = tf.keras.Model(inputs, tf.keras.layers.Dense(1, kernel_initializer="ones")(hidden))
        model = accum.GradientAccumulateModel.from_model(model, **options) if options else model
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
        with warned("its mask differs between its features") as said:
            model.fit(x, x[:, 0, :1], batch_size=12, verbose=0)
        assert len(said) == len(options)
        results.append(model.get_weights())
    for one, other in zip(*results):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)


@pytest.mark.slow
@pytest.mark.law("L17")
@pytest.mark.tf("2.12", because="Keras' batch normalisation ignored masks before TF 2.12")
def test_a_mask_that_differs_between_features_is_named_in_a_cycle():
    for axis, count in ((1, 1), (-1, 0)):
        with warned("its mask differs between these", accum.InexactWarning) as said:
            accum.AccumBatchNormalization(2, axis=axis)(examples((4, 3)), training=True, mask=np.ones([12, 4], bool))
        assert len(said) == count


@pytest.mark.slow
@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "options,error,words",
    [
        ({"accum_steps": 0}, ValueError, "`accum_steps` must be an int >= 1. Received: accum_steps=0."),
        ({"accum_steps": {0: 2}}, TypeError, "`accum_steps` must be an int >= 1"),
        ({"renorm": True}, ValueError, "does not support `renorm`: it normalises by moving statistics"),
        ({"virtual_batch_size": 2}, ValueError, "does not support `virtual_batch_size`: the examples that share"),
        ({"synchronized": True, "fused": True}, ValueError, "`fused` must not be True with `synchronized=True`"),
    ],
)
def test_the_layer_refuses_options_that_it_cannot_serve(options, error, words):
    with pytest.raises(error) as caught:
        accum.AccumBatchNormalization(**options)
    assert words in str(caught.value)


@pytest.mark.slow
@pytest.mark.law("L17")
def test_the_layer_refuses_a_static_graph():
    layer = accum.AccumBatchNormalization(2)
    with tf.Graph().as_default(), pytest.raises(ValueError, match="accum_steps=1 there. Received: accum_steps=2"):
        layer(tf.ones([2, 3]), training=True)


def normalizing(layer):
    inputs = tf.keras.Input((3,))
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(layer(inputs)))
    model = accum.GradientAccumulateModel.from_model(model, 2)
    model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.slow
def test_a_layer_in_two_models_whose_cycles_mix_is_named(recwarn):
    layer, x, y = accum.AccumBatchNormalization(), examples((3,)), np.ones([12, 1], "float32")
    one, other = normalizing(layer), normalizing(layer)
    for model in (one, other):  # whole cycles in turn
        model.fit(x, y, batch_size=6, verbose=0)
    assert not [warning for warning in recwarn if "batch normalization" in str(warning.message)]
    one, other, failing = (normalizing(layer) for _ in range(3))
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):  # after the forward pass of its first step
        failing.train_on_batch(x, np.ones([5, 7, 2], "float32"))
    one.train_on_batch(x, y)
    with pytest.warns(UserWarning, match="in the middle of cycles of two optimizers, and would mix their moments"):
        other.train_on_batch(x, y)


class Contrasting(tf.keras.Model):
    """Encodes two halves of each example, as for a contrastive loss."""

    def __init__(self, calls):
        super().__init__()
        self.norm, self.head, self.calls = accum.AccumBatchNormalization(momentum=0.5), tf.keras.layers.Dense(1), calls

    def call(self, x, training=None):
        return self.head(self.norm(x, training=training))

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            if self.calls == "loop":
                parts = tf.stack([x[:, :3], x[:, 3:]])
                outputs = tf.map_fn(lambda part: self(part, training=True), parts)
            else:
                outputs = self(x[:, :3], training=True), self(x[:, 3:], training=True)
            loss = tf.reduce_mean((outputs[0] - outputs[1]) ** 2)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        return {"loss": loss}


@pytest.mark.slow
def test_a_layer_that_a_train_step_calls_twice(monkeypatch):
    # `tf.map_fn` leaves a caching device here when its function raises, and no strategy could be entered afterwards
    monkeypatch.setattr(tf.compat.v1.get_variable_scope(), "_caching_device", None)
    model, x = Contrasting("one by one"), examples((6,))
    model(x[:, :3])
    model = accum.GradientAccumulateModel.from_model(model, 2)

    def train():
        model.compile(tf.keras.optimizers.SGD(0.1), **({"jit_compile": False} if IS_KERAS_3 else {}))
        model.fit(x, np.ones(len(x)), batch_size=6, shuffle=False, verbose=0)

    train()
    keras = KERAS(momentum=0.5)
    for part in (x[:, :3], x[:, 3:]):
        keras(part, training=True)
    assert_close(statistics(model.norm), statistics(keras))
    model.calls = "loop"
    with pytest.raises(ValueError, match="calls batch normalization in a loop, and only the moments"):
        train()
