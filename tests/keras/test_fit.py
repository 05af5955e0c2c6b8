"""Every kind of data and every way to fit equals the full batch of a plain model (laws L1, L3, L5, L10)."""

import contextlib
import inspect

import numpy as np
import pytest
import tensorflow as tf
import versions
from equality import assert_near
from optimizers import mainly

import accum

pytestmark = pytest.mark.tf("2.2")

RANDOM = np.random.RandomState(0)
X, OTHER, Y = (RANDOM.normal(size=(20, size)).astype("float32") for size in (3, 3, 2))
CLASSES = np.array([0, 2, 1, 1] * 5)
WEIGHTS = np.linspace(0.0, 3.0, 20).astype("float32")  # whose sums differ from micro-batch to micro-batch
TOKENS = RANDOM.randint(1, 5, size=(20, 3))
for _row in (0, 5, 9, 17):
    TOKENS[_row, 1:] = 0
TOKENS[10:20, 2] = 0
TOKENS[8:16] = 0  # one micro-batch is nothing but padding
SEQUENCES = RANDOM.normal(size=(20, 3, 2)).astype("float32")
layers, losses = tf.keras.layers, tf.keras.losses


def filled(model):
    """A model with weights that do not depend on TensorFlow's initialisers."""
    random = np.random.RandomState(1)
    model.set_weights([0.5 * random.normal(size=weight.shape) for weight in model.get_weights()])
    return model


def one_to_one():
    inputs = tf.keras.Input((3,))
    return tf.keras.Model(inputs, layers.Dense(2)(layers.Dense(4, activation="tanh", use_bias=False)(inputs)))


def two_to_two():
    one, other = tf.keras.Input((3,), name="one"), tf.keras.Input((3,), name="other")
    hidden = layers.Dense(4, activation="tanh", use_bias=False)(layers.Concatenate()([one, other]))
    outputs = [layers.Dense(2, use_bias=False, name=name)(hidden) for name in ("left", "right")]
    return tf.keras.Model([one, other], outputs)


def named():
    model = two_to_two()
    outputs = dict(zip(("left", "right"), model.outputs))
    return tf.keras.Model(dict(zip(("one", "other"), model.inputs)), outputs)


class OwnLoss(tf.keras.Model):
    """Has data without targets, and a loss of its own."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3, kernel_regularizer=tf.keras.regularizers.l2(0.1))

    def call(self, inputs):
        outputs = self.dense(inputs)
        self.add_loss(tf.reduce_mean((outputs - inputs) ** 2))
        return outputs


def own_loss():
    model = OwnLoss()
    model(X[:1])
    return model


def classifier():
    inputs = tf.keras.Input((3,))
    return tf.keras.Model(inputs, layers.Dense(3, activation="softmax")(inputs))


class Parts(tf.keras.utils.Sequence):
    """The examples in batches that are ragged as those of `fit` are, with weights."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return -(-20 // self.size)

    def __getitem__(self, number):
        part = slice(number * self.size, (number + 1) * self.size)
        return X[part], Y[part], WEIGHTS[part]


def two_targets():
    return {"x": [X, OTHER], "y": [Y, 2.0 * Y], "sample_weight": [WEIGHTS, 1.0 + WEIGHTS[::-1]]}


def endless_dictionaries(size):
    while True:
        for start in range(0, 20, size):
            x, other, y, weights = (array[start : start + size] for array in (X, OTHER, Y, WEIGHTS))
            yield {"one": x, "other": other}, {"left": y, "right": 2.0 * y}, {"left": weights, "right": 1.0 + weights}


# (what, the model, the loss and its weights, what `fit` is given in batches of a size)
KINDS = [
    ("lists", two_to_two, {"loss": ["mse", "mse"], "loss_weights": [0.3, 2.0]}, lambda size: two_targets()),
    (
        "generator of dictionaries",
        named,
        {"loss": {"left": "mse", "right": "mae"}},
        lambda size: {"x": endless_dictionaries(size), "steps_per_epoch": len(Parts(size))},
    ),
    ("x alone", own_loss, {}, lambda size: {"x": X}),
    (
        "class_weight",
        classifier,
        {"loss": "sparse_categorical_crossentropy"},
        lambda size: {"x": X, "y": CLASSES, "class_weight": {0: 1.0, 1: 5.0, 2: 0.0}},
    ),
    ("Sequence", one_to_one, {"loss": "mse"}, lambda size: {"x": Parts(size)}),
]


def sized(data, size):
    """What `fit` is given, with the batch size where it does not come with the data."""
    return data if "steps_per_epoch" in data or isinstance(data["x"], Parts) else dict(data, batch_size=size)


@pytest.mark.law("L1", "L5")
@pytest.mark.parametrize("what,make,compiled,data", mainly(KINDS, KINDS[0]), ids=[kind[0] for kind in KINDS])
def test_every_kind_of_data_equals_the_full_batch(what, make, compiled, data):
    full, model = filled(make()), accum.GradientAccumulateModel.from_model(filled(make()), 3)
    history = []
    for one, size in ((full, 20), (model, 8)):  # 8 + 8 + 4
        # The oracle need not be traced, which costs most of the time.
        one.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), run_eagerly=one is full, **compiled)
        history.append(one.fit(epochs=2, shuffle=False, verbose=0, **sized(data(size), size)).history)
    assert_near(model.get_weights(), full.get_weights())
    assert sorted(history[1]) == sorted(history[0])
    for name, values in history[1].items():  # no weight moves within a cycle, so the losses are those of the full batch
        if what == "x alone":
            break  # Keras takes the mean of the batches' losses there, whatever their sizes
        if versions.IS_KERAS_3 and name != "loss":
            continue  # as it does with the losses of single outputs
        np.testing.assert_allclose(values, history[0][name], rtol=1e-5, err_msg=name)


# ----------------------------------------------------------------------------------------------------------------
# Masks


def masked(*outputs):
    """Outputs that have the mask of one embedding, or none."""
    inputs = tf.keras.Input((3,), dtype="int32")
    hidden = layers.Embedding(5, 4, mask_zero=True)(inputs)
    return tf.keras.Model(inputs, [output(hidden) for output in outputs])


def per_token():
    return masked(layers.Dense(2))


def two_per_token():
    return masked(layers.Dense(2), layers.Dense(2, activation="tanh"))


def pooled_and_per_token():
    return masked(layers.Lambda(lambda hidden: tf.reduce_mean(hidden, axis=1)), layers.Dense(2))


MASKED = [
    ("one output", per_token, lambda: "mse", SEQUENCES),
    ("two outputs", two_per_token, lambda: "mse", [SEQUENCES, 2.0 * SEQUENCES]),
]
if versions.IS_KERAS_3:  # which lists the losses that there are, and not the outputs without
    MASKED.append(("second output alone", pooled_and_per_token, lambda: [None, "mse"], [Y, SEQUENCES]))
if versions.TF_VERSION >= (2, 10):  # the version that brought `ignore_class`
    IGNORED = RANDOM.randint(0, 3, size=(20, 3, 1)).astype("float32")
    sparse = lambda: losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2)
    MASKED.append(("ignored class", lambda: masked(layers.Dense(3)), sparse, IGNORED))
    MASKED.append(("ignored class, no mask", classifier, sparse, IGNORED[:, 0, 0]))


@pytest.mark.slow
@pytest.mark.law("L5")
@pytest.mark.parametrize("what,make,loss,y", MASKED, ids=[kind[0] for kind in MASKED])
def test_a_masked_model_is_exact_whatever_its_keras_divides_by(what, make, loss, y):
    full, model = filled(make()), accum.GradientAccumulateModel.from_model(filled(make()), 3)
    x = X if make is classifier else TOKENS
    # Keras 3 takes no weight of a whole sequence beside a mask.
    weights = WEIGHTS if make is classifier or not versions.IS_KERAS_3 else np.repeat(WEIGHTS, 3).reshape(20, 3)
    weights = [weights] * 2 if isinstance(y, list) and versions.IS_KERAS_3 else weights
    weights = [WEIGHTS, weights[1]] if make is pooled_and_per_token else weights
    for one, size in ((full, 20), (model, 8)):
        one.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), loss(), run_eagerly=one is full or what != "one output")
        one.fit(x, y, batch_size=size, epochs=2, shuffle=False, verbose=0, sample_weight=weights)
    assert_near(model.get_weights(), full.get_weights())


@pytest.mark.slow
@pytest.mark.law("L5")
@pytest.mark.tf("2.10", because="no `ignore_class`")
@pytest.mark.parametrize(
    "options",
    [{}, {"micro_batch_weight": lambda x, y, weight: tf.reduce_sum(tf.cast(tf.not_equal(y, 2.0), tf.float32))}],
    ids=["as Keras", "own weight"],
)
def test_a_micro_batch_whose_targets_are_all_ignored_counts_nothing(options):
    targets = np.where(np.arange(20) // 8 == 1, 2.0, IGNORED[:, 0, 0]).astype("float32")  # the second of three
    full, model = filled(classifier()), accum.GradientAccumulateModel.from_model(filled(classifier()), 3, **options)
    for one, size in ((full, 20), (model, 8)):
        one.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), sparse())
        logged = one.fit(X, targets, batch_size=size, epochs=2, shuffle=False, verbose=0).history["loss"]
        assert np.all(np.isfinite(logged))
    assert_near(model.get_weights(), full.get_weights())


def in_structure(kind, one, other):
    """A pair of outputs, targets or weights, or the first alone, in a list, or in a dict by the outputs' names."""
    structures = {
        "list": lambda: [one, other],
        "dict": lambda: {"one": one, "other": other},
        "dict of one": lambda: {"one": one},
        "list of one": lambda: [one],
        "leaf": lambda: one,
        "none": lambda: None,
    }
    return structures[kind]()


def masked_in_structure(kind):
    inputs = tf.keras.Input((3,), dtype="int32")
    hidden = layers.Embedding(5, 4, mask_zero=True)(inputs)
    outputs = [layers.Dense(2, name="one")(hidden), layers.Dense(2, activation="tanh", name="other")(hidden)]
    return filled(tf.keras.Model(inputs, in_structure(kind, *outputs)))


STRUCTURES = [  # of outputs, targets and weights, which plain Keras takes
    ("list", "list", "list"),
    ("list", "dict", "none"),
    ("dict", "dict", "dict"),
    ("dict of one", "leaf", "none"),
    ("dict of one", "leaf", "dict of one"),
    ("leaf", "list of one", "none"),
    ("leaf", "leaf", "list of one"),
]
if versions.IS_KERAS_3:
    STRUCTURES += [("dict", "list", "none"), ("dict of one", "list of one", "none")]
SPLITS = {
    "accum_steps": ({"accum_steps": 3}, 8),
    "micro_batch_size": ({"micro_batch_size": 8}, 20),
    "whole_batch": ({"micro_batch_size": 8, "whole_batch": "loss"}, 20),
}


@pytest.mark.slow
@pytest.mark.law("L5")
@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("outputs, targets, weights", STRUCTURES, ids=["-".join(kind) for kind in STRUCTURES])
def test_masks_count_whatever_structure_the_targets_have(outputs, targets, weights, how):
    options, batch_size = SPLITS[how]
    y = in_structure(targets, SEQUENCES, 2.0 * SEQUENCES)
    per_position = np.repeat(WEIGHTS, 3).reshape(20, 3)
    sample_weight = in_structure(weights, per_position, per_position[::-1])
    full = masked_in_structure(outputs)
    model = accum.GradientAccumulateModel.from_model(masked_in_structure(outputs), **options)
    for one, size in ((full, 20), (model, batch_size)):
        one.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), "mse", run_eagerly=True)
        one.fit(TOKENS, y, sample_weight=sample_weight, batch_size=size, epochs=2, shuffle=False, verbose=0)
    assert_near(model.get_weights(), full.get_weights())


@pytest.mark.slow
@pytest.mark.law("L5")
@pytest.mark.parametrize("how", ["accum_steps", "micro_batch_size"])
def test_targets_by_output_name_are_matched_in_a_trace_too(how):
    options, batch_size = SPLITS[how]
    y, logs = {"one": SEQUENCES, "other": 2.0 * SEQUENCES}, []
    full = masked_in_structure("list")
    model = accum.GradientAccumulateModel.from_model(masked_in_structure("list"), **options)
    for one, size in ((full, 20), (model, batch_size)):
        one.compile(tf.keras.optimizers.SGD(0.1), {"one": "mse", "other": "mae"}, metrics={"other": ["mae"]})
        logs.append(one.fit(TOKENS, y, batch_size=size, epochs=2, shuffle=False, verbose=0).history)
    assert_near(model.get_weights(), full.get_weights())
    assert sorted(logs[1]) == sorted(logs[0])
    if how == "micro_batch_size":
        for name, values in logs[0].items():
            np.testing.assert_allclose(logs[1][name], values, rtol=2e-5, err_msg=name)


TARGETS = {"list": lambda one, other: [one, other], "dict": lambda one, other: {"one": one, "other": other}}


@pytest.mark.slow
@pytest.mark.law("L18")
@pytest.mark.parametrize("targets", sorted(TARGETS))
@pytest.mark.parametrize("outputs", ["list", "dict", "leaf"])
def test_targets_of_any_structure_are_matched_in_a_trace(outputs, targets):
    """Or refused, as in plain Keras."""

    def trained(options):
        inputs = tf.keras.Input((3,))
        made = [layers.Dense(2, name=name)(inputs) for name in ("one", "other")]
        model = tf.keras.Model(inputs, made[0] if outputs == "leaf" else TARGETS[outputs](*made))
        model = filled(accum.GradientAccumulateModel.from_model(model, **options) if options else model)
        model.compile(tf.keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        y = [Y] if outputs == "leaf" else TARGETS[targets](Y, 2.0 * Y)
        try:
            logs = model.fit(X, y, batch_size=20, epochs=2, shuffle=False, verbose=0).history
        except (KeyError, TypeError, ValueError) as error:
            return type(error)
        return model.get_weights() + [logs[name] for name in sorted(logs)]

    plain, ours = trained({}), trained({"micro_batch_size": 6})
    if isinstance(plain, type):
        assert ours is plain
        return
    assert_near(ours, plain, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.law("L5")
def test_outputs_that_differ_in_their_masks_are_weighed_by_examples():
    """No one weight serves two denominators: what is promised is the mean over the examples of what Keras computes."""
    make = lambda: filled(masked(layers.Dense(2), layers.Lambda(lambda hidden: tf.reduce_mean(hidden, axis=1))))
    model, first = accum.GradientAccumulateModel.from_model(make(), 3), make().get_weights()
    y = [SEQUENCES, np.tile(Y, 2)]
    moved = [np.zeros_like(weight) for weight in first]
    parts = [(slice(0, 8), 8), (slice(8, 12), 4), (slice(16, 20), 4)]  # each with a token that is no padding
    tokens = np.where(TOKENS == 0, [[1, 0, 0]], TOKENS)
    model.compile(tf.keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    for part, size in parts:
        targets = [array[part] for array in y]
        plain = make()
        plain.compile(tf.keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        plain.train_on_batch(tokens[part], targets)
        moved = [so_far + size / 16.0 * (w - f) for so_far, w, f in zip(moved, plain.get_weights(), first)]
        model.train_on_batch(tokens[part], targets)
    assert_near(model.get_weights(), [f + m for f, m in zip(first, moved)])


# ----------------------------------------------------------------------------------------------------------------
# Ways to fit

COMPILES = inspect.signature(tf.keras.Model.compile).parameters if versions.HAS_KERAS_API else {}
WAY = {name: value for name, value in (("steps_per_execution", 2), ("jit_compile", True)) if name in COMPILES}


def with_batch_norm(batch_norm):
    """A model with statistics of its inputs beside what it learns."""
    inputs = tf.keras.Input((3,))
    learnt = layers.Dense(2)(inputs)
    return filled(tf.keras.Model(inputs, [learnt, batch_norm(inputs)]))


@pytest.mark.slow
@pytest.mark.law("L1", "L13")
def test_several_batches_an_execution_and_compiled_by_xla_where_the_version_has_it():
    full = with_batch_norm(layers.BatchNormalization(momentum=0.5))
    model = with_batch_norm(accum.AccumBatchNormalization(momentum=0.5))
    model = accum.GradientAccumulateModel(3, inputs=model.inputs, outputs=model.outputs)
    for one, size, options in ((full, 12, {"run_eagerly": True}), (model, 4, WAY)):  # 3 + 2 micro-batches
        one.compile(tf.keras.optimizers.Adam(0.01), ["mse", None], **options)
        one.fit(X, [Y, X], batch_size=size, epochs=2, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 4
    assert_near(model.get_weights(), full.get_weights())


@pytest.mark.slow
@pytest.mark.law("L1")
@pytest.mark.parametrize("how", ["with a new optimizer", "with the same optimizer", "not at all"])
def test_fit_again_after_freezing_a_layer(how):
    """Compiled again, with a layer frozen and then thawed; not compiled again, it is not frozen, as Keras says."""
    full, model = filled(one_to_one()), accum.GradientAccumulateModel.from_model(filled(one_to_one()), 3)
    for one, size, is_eager in ((full, 20, True), (model, 8, False)):
        optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
        one.compile(optimizer, "mse", run_eagerly=is_eager)
        for is_trainable in (True, False, True) if how == "with the same optimizer" else (True, False):
            one.layers[1].trainable = is_trainable or (how == "not at all" and is_eager)
            if how == "with a new optimizer":
                one.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), "mse", run_eagerly=is_eager)
            elif how == "with the same optimizer":
                one.compile(one.optimizer, "mse", run_eagerly=is_eager)
            one.fit(X, Y, batch_size=size, epochs=2, shuffle=False, verbose=0)
    assert_near(model.get_weights(), full.get_weights())


@pytest.mark.law("L17")
def test_compiling_with_other_variables_within_a_cycle_is_refused_and_loses_nothing():
    model = accum.GradientAccumulateModel.from_model(filled(one_to_one()), 2)
    model.compile("sgd", "mse", run_eagerly=True)
    model.train_on_batch(X[:5], Y[:5])
    model.layers[1].trainable = False
    with pytest.raises(ValueError, match=r"call `flush\(\)` or `reset\(\)` first"):
        model.compile(model.optimizer, "mse")
    assert int(model.optimizer.micro_step) == 1
    model.optimizer.flush()
    model.compile(model.optimizer, "mse", run_eagerly=True)
    model.train_on_batch(X[:5], Y[:5])
    assert int(model.optimizer.iterations.numpy()) == 1


# ----------------------------------------------------------------------------------------------------------------
# What is logged


def last_bar(capsys):
    """The progress bar of the fit that has ended, without its seconds."""
    bar = capsys.readouterr().out.replace("\r", "\n").replace("\b", "").strip().split("\n")[-1]
    return bar.split(" ")[0] + bar[bar.index("loss: ") :]


@pytest.mark.slow
@pytest.mark.law("L6")
def test_logs_are_those_of_weights_that_rest_within_a_cycle(capsys):
    """The oracle is NumPy: a linear model whose losses and metrics are those of its first weights, until the flush."""
    inputs = tf.keras.Input((3,))
    model = tf.keras.Model(inputs, layers.Dense(2, use_bias=False)(inputs))
    model = accum.GradientAccumulateModel(3, inputs=model.inputs, outputs=model.outputs)
    kernel = RANDOM.normal(size=(3, 2)).astype("float32")
    model.compile(tf.keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    model.set_weights([kernel])
    seen, errors = [], X @ kernel - Y
    so_far = [{"loss": np.mean(errors[:end] ** 2), "mae": np.mean(np.abs(errors[:end]))} for end in (8, 16, 20)]
    record = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(dict(logs)))
    history = model.fit(X, Y, batch_size=8, shuffle=False, verbose=1, callbacks=[record]).history
    for logs, expected in zip(seen, so_far):
        assert {"loss", "mae"} <= set(logs) <= {"loss", "mae", "batch", "size"}  # 2.2 has the last two
        np.testing.assert_allclose([logs["loss"], logs["mae"]], [expected["loss"], expected["mae"]], rtol=1e-5)
    assert len(seen) == 3 and sorted(history) == ["loss", "mae"]
    np.testing.assert_allclose([history["loss"][0], history["mae"][0]], list(so_far[-1].values()), rtol=1e-5)
    bars = [last_bar(capsys)]
    np.testing.assert_allclose(model.get_weights()[0], kernel - 0.1 * X.T @ errors / 20, rtol=0, atol=2e-6)
    resting = tf.keras.Model(model.inputs, model.outputs)
    resting.set_weights([kernel])
    resting.compile(tf.keras.optimizers.SGD(0.0), "mse", metrics=["mae"], run_eagerly=True)
    resting.fit(X, Y, batch_size=8, shuffle=False, verbose=1)
    bars.append(last_bar(capsys))  # 2.4 and others show a mean of means
    assert bars[0] == bars[1] and "3/3" in bars[0] and "loss: " in bars[0]


@pytest.mark.parametrize("options", [{"accum_steps": 2}, {"micro_batch_size": 3}, {"micro_batch_size": "auto"}])
def test_a_train_function_can_be_traced_before_the_first_step(options):
    model = accum.GradientAccumulateModel.from_model(one_to_one(), **options)
    model.compile("sgd", "mse")
    made = model.make_train_function() or model.train_function
    plain = one_to_one()
    plain.compile("sgd", "mse")
    if hasattr(plain.make_train_function() or plain.train_function, "get_concrete_function"):
        assert hasattr(made, "get_concrete_function") or options.get("micro_batch_size") == "auto"


def test_a_dataset_that_is_empty_at_first_leaves_a_train_function():
    counts = []

    def batches():
        counts.append(1)
        for _ in range(len(counts) > 1):
            yield np.ones((6, 3), "float32"), np.ones((6, 2), "float32")

    spec = (tf.TensorSpec([None, 3]), tf.TensorSpec([None, 2]))
    types, shapes = (tuple(getattr(one, name) for one in spec) for name in ("dtype", "shape"))
    dataset = tf.data.Dataset.from_generator(batches, types, shapes)
    model = accum.GradientAccumulateModel.from_model(one_to_one(), micro_batch_size=3)
    model.compile("sgd", "mse")
    with contextlib.suppress(ValueError, TypeError):  # of Keras 2, which requires data
        model.fit(dataset, verbose=0)
    before = model.get_weights()
    model.fit(dataset, verbose=0)
    assert np.any(model.get_weights()[0] != before[0])
