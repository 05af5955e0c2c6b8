"""`accum.testing`: a model of the user's own against its full batch, and what is said where it can't agree."""

import ast
import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf
from versions import IS_KERAS_3

import accum.testing
from accum import _tf
from accum.__main__ import main
from accum.testing import _diagnosis, assert_accumulation_equals_full_batch

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.normal(size=(14, 4)).astype("float32"), RANDOM.normal(size=(14, 1)).astype("float32")
needs_keras_api = pytest.mark.tf("2.2")
layers = tf.keras.layers


def sgd(rate=0.1, **options):
    return tf.keras.optimizers.SGD(rate, **options)


def maker(*inner, loss="mse", optimizer=sgd, model=tf.keras.Model, **compiled):
    """A function that builds a model of the layers that the functions `inner` make, and one unit."""

    def build_model():
        outputs = inputs = tf.keras.Input((4,))
        for make in inner:
            outputs = make()(outputs)
        made = model(inputs, layers.Dense(1, name="unit")(outputs))
        made.compile(optimizer(), loss, **dict({"run_eagerly": True}, **compiled))
        return made

    return build_model


def message_of(build_model, data=(X, Y), accum_steps=3, **options):
    with pytest.raises(AssertionError) as raised:
        assert_accumulation_equals_full_batch(build_model, data, accum_steps, **options)
    return str(raised.value)


class ClippingTrainStep(tf.keras.Model):
    """Clips the gradients of each micro-batch, where the full batch's would be clipped once."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(
            [(tf.clip_by_norm(grad, 0.1), var) for grad, var in zip(grads, self.trainable_variables)]
        )
        return {"loss": loss}


class Gentle(layers.Dropout):
    """A layer of the user's own, which is random by what it is derived from."""


class CountsCalls(layers.Layer):
    def build(self, shape):
        self.calls = self.add_weight(name="calls", shape=(), initializer="zeros", trainable=False)

    def call(self, inputs, training=None):
        if training:
            self.calls.assign_add(1.0)
        return inputs


class WholeNumbers(layers.Layer):
    def build(self, shape):
        self.number = self.add_weight(name="number", shape=(), dtype="int32", initializer="zeros")

    def call(self, inputs):
        return inputs


def contrast(targets, outputs):
    """Compares the examples of a batch."""
    return tf.reduce_mean((outputs - tf.reduce_mean(outputs)) ** 2) + 0.0 * tf.reduce_mean(targets)


@pytest.mark.slow
@needs_keras_api
@pytest.mark.law("L1")
def test_a_model_that_agrees_gets_a_report():
    def build_model():
        inputs = {name: tf.keras.Input((4,), name=name) for name in ("left", "right")}
        hidden = layers.Dense(3, activation="tanh")(layers.Concatenate()(list(inputs.values())))
        model = tf.keras.Model(inputs, layers.Dense(1, kernel_regularizer="l2", name="unit")(hidden))
        model.compile(tf.keras.optimizers.Adam(0.01), "mse", run_eagerly=True)
        return model

    data = {"left": X, "right": 2.0 * X}, Y, RANDOM.uniform(size=14)
    report = assert_accumulation_equals_full_batch(
        build_model, data, 3, batch_size=4, steps=4
    )  # 4 + 4 + 4, 2, and again
    assert report.is_equal and report.steps == 4 and report.accum_steps == 3 and report.tolerance == 2e-6
    assert len(report.deviations) == 4 and any(re.match("unit.*/kernel$", name) for name in report.deviations)
    assert max(report.deviations.values()) <= 2e-6
    assert str(report).startswith("Accumulation equals the full batch: 4 steps of 3 micro-batches")


@pytest.mark.slow
@needs_keras_api
@pytest.mark.law("L1")
@pytest.mark.parametrize(
    "options, sizes", [({"batch_size": 10}, [4, 4, 2]), ({}, [4, 4, 4, 2])], ids=["batches", "all"]
)
def test_a_model_that_splits_its_batches_is_checked_as_it_splits_them(options, sizes, monkeypatch):
    fed = []
    train_on = _tf.models.train_on
    monkeypatch.setattr(
        _tf.models,
        "train_on",
        lambda model, batch: fed.append((type(model).__name__, len(batch[0]))) or train_on(model, batch),
    )
    report = assert_accumulation_equals_full_batch(maker(), (X, Y), micro_batch_size=4, steps=1, **options)
    assert report.is_equal and report.split == "micro_batch_size=4" and report.accum_steps == len(sizes)
    assert [size for _, size in fed[:2]] == [sum(sizes)] * 2  # both models are given the full batch


@pytest.mark.slow
@needs_keras_api
def test_batch_size_is_that_of_fit(monkeypatch):
    fed = []
    train_on = _tf.models.train_on
    monkeypatch.setattr(
        _tf.models,
        "train_on",
        lambda model, batch: fed.append(len(batch[0])) or train_on(model, batch),
    )
    assert_accumulation_equals_full_batch(maker(), (X, Y), 3, batch_size=4, steps=2)
    assert fed[:6] == [12, 4, 4, 4, 2, 2]  # a full batch and its micro-batches, and what is left


@needs_keras_api
@pytest.mark.parametrize("whole_batch, last", [((), "the loss"), (("loss",), "your own layers")])
def test_rounding_is_named_before_the_users_own_layers(whole_batch, last):
    def causes(excess, **options):
        return [
            suspect.what for suspect in _diagnosis._whatever_is_left(FakePair(maker(**options)(), whole_batch), excess)
        ]

    assert causes(3.0) == ["rounding", last]
    assert causes(300.0) == [last]
    assert causes(300.0, optimizer=lambda: tf.keras.optimizers.Adam(0.01)) == ["rounding", last]


class FakePair:
    """What the search for rounding reads of a pair of models."""

    def __init__(self, full, whole_batch):
        self.full, self.whole_batch = full, whole_batch


@pytest.mark.slow
@needs_keras_api
@pytest.mark.law("L13")
def test_every_layer_that_cannot_agree_is_named_with_a_remedy():
    def frozen():
        return layers.BatchNormalization(trainable=False, name="frozen")

    inner = [
        lambda: layers.BatchNormalization(name="norm"),
        lambda: accum.AccumBatchNormalization(name="accum_norm"),
        frozen,
        lambda: layers.Dropout(0.5, name="drop"),
        lambda: layers.Dropout(0.0, name="no_drop"),
        lambda: Gentle(0.1, name="gentle"),
        lambda: layers.GaussianNoise(0.1, name="noise"),
        lambda: CountsCalls(name="counter"),
        lambda: layers.Reshape((2, 2)),
        lambda: layers.SpatialDropout1D(0.1, name="spatial"),
        lambda: layers.Bidirectional(layers.SimpleRNN(2, recurrent_dropout=0.1)),
        lambda: layers.RepeatVector(2),
        lambda: layers.SimpleRNN(2, name="no_drop_either"),
    ]
    said = message_of(maker(*inner), (X[:6], Y[:6]), 2)
    lines = {line.split(": ")[0]: line for line in said.splitlines() if line.startswith("  - ")}
    norms, accum_norms, counters = (
        next(line for part, line in lines.items() if name in part) for name in ("`norm`", "`accum_norm`", "`counter`")
    )
    assert "accum.replace_batchnorm_layers(model, accum_steps)" in norms and "freeze" in norms
    assert "moving statistics" not in accum_norms and "freeze" in accum_norms
    assert "whole_batch='batch_norm'" in norms and "whole_batch='batch_norm'" in accum_norms
    assert "updates variables that have no gradient" in counters
    draws = next(line for line in lines.values() if "may draw other random numbers" in line)
    assert "`drop` (Dropout), `gentle` (Gentle), `noise` (GaussianNoise), `spatial` (SpatialDropout1D)" in draws
    assert "and 2 more" in draws  # the two directions, and none of their cells
    assert not any(re.search("frozen|no_drop", line) for line in lines.values())


@pytest.mark.slow
@needs_keras_api
@pytest.mark.law("L19")
def test_over_the_whole_batch_normalisation_and_losses_agree():
    build_model = maker(lambda: layers.BatchNormalization(), loss=contrast)
    for which, said in (("loss", "`whole_batch='batch_norm'`"), ("batch_norm", None), ("all", None)):
        if said is not None:
            with pytest.warns(UserWarning, match="Batch normalization updates"):
                assert said in message_of(build_model, whole_batch=which)
        else:
            report = assert_accumulation_equals_full_batch(build_model, (X, Y), 3, whole_batch=which)
            assert report.is_equal and report.accum_steps == 3
    across = maker(lambda: layers.Lambda(lambda x: x - tf.reduce_mean(x, 0)))
    assert assert_accumulation_equals_full_batch(across, (X, Y), 3, whole_batch="all").is_equal


@pytest.mark.slow
@needs_keras_api
@pytest.mark.law("L1")
@pytest.mark.parametrize(
    "build_model,options,said",
    [
        (maker(), {"reduction": "sum"}, "Use reduction='mean' for a loss that is a mean"),
        (
            maker(),
            {"micro_batch_weight": "equal"},
            "with this `micro_batch_weight`: without training, it is",
        ),
        (maker(loss=tf.keras.losses.MeanSquaredError("sum")), {}, "reduction SUM its gradient is a sum"),
        (maker(loss=tf.keras.losses.MeanSquaredError("none")), {}, "reduction='sum' and micro_batch_weight='equal'"),
        (
            maker(loss=lambda y, p: tf.reduce_sum((y - p) ** 2)),
            {},
            "it is the sum over the micro-batches, not their mean",
        ),
        (maker(loss=contrast), {}, "Losses that compare the examples of a batch"),
        (maker(model=ClippingTrainStep), {}, "`train_step` of ClippingTrainStep: any change that it makes"),
        (
            maker(lambda: layers.Dense(2, kernel_regularizer="l2")),
            {"reduction": "sum"},
            "regularisation: with reduction",
        ),
        (maker(lambda: layers.Lambda(lambda x: x - tf.reduce_mean(x, 0))), {}, "Losses that compare the examples"),
        (maker(lambda: layers.Lambda(lambda x: x * tf.random.uniform(tf.shape(x)))), {}, "the loss: without training"),
    ],
    ids=["sum", "equal", "SUM", "NONE", "own-sum", "contrastive", "clipping", "regularised", "batch-mean", "random"],
)
def test_a_step_that_is_not_that_of_the_full_batch_is_found(build_model, options, said):
    message = message_of(build_model, **options)
    assert re.match(
        r"Accumulation diverges from the full batch at step 1: `\S+` is off by \d\.\de[+-]\d\d, where", message
    )
    assert said in message


def ratio(targets, outputs):
    """A ratio of sums over the batch, which no mean of its micro-batches' ratios is."""
    weights = 1.0 + 0.2 * tf.abs(targets)
    return tf.reduce_sum(weights * (outputs - targets) ** 2) / tf.reduce_sum(weights)


@pytest.mark.slow
@needs_keras_api
@pytest.mark.law("L1")
def test_a_loss_that_is_a_ratio_of_sums_passes_at_no_learning_rate():
    assert "diverges from the full batch" in message_of(maker(loss=ratio))
    with pytest.raises(ValueError, match="can't tell a wrong step from rounding.* larger learning rate"):
        assert_accumulation_equals_full_batch(maker(loss=ratio, optimizer=lambda: sgd(3e-6)), (X, Y), 3)


@pytest.mark.slow
@needs_keras_api
@pytest.mark.law("L17")
def test_micro_batches_that_are_all_alike_check_nothing():
    with pytest.raises(
        ValueError, match="drops all micro-batches of a step but the first .* examples that differ more"
    ):
        assert_accumulation_equals_full_batch(maker(), (np.ones((6, 4)), np.ones((6, 1))), 3)


@pytest.mark.slow
@needs_keras_api
@pytest.mark.law("L14")
def test_a_single_micro_batch_is_checked_against_a_model_that_does_not_train():
    assert assert_accumulation_equals_full_batch(maker(), (X, Y), 1).sensitivity > 100.0
    with pytest.raises(ValueError, match="a run that does not train ends only 0 tolerances"):
        assert_accumulation_equals_full_batch(maker(optimizer=lambda: sgd(0.0)), (X, Y), 1)


@pytest.mark.slow
@needs_keras_api
@pytest.mark.law("L1")
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop", "sgd"])
def test_an_optimizer_with_its_usual_learning_rate_can_be_checked(optimizer):
    build_model = maker(lambda: layers.Dense(8, activation="tanh"), optimizer=lambda: optimizer)
    report = assert_accumulation_equals_full_batch(build_model, (X, Y), 3)
    assert report.is_equal and report.sensitivity > 100.0


REPEATED = np.array([[0, 1], [1, 1], [2, 3], [3, 0], [4, 1], [1, 2]])  # ids
DISTINCT = np.arange(12).reshape(6, 2)


def embedding(optimizer):
    def build_model():
        ids = tf.keras.Input((2,), dtype="int32")
        rows = layers.Embedding(12, 3, name="table")(ids)
        model = tf.keras.Model(ids, layers.Dense(1)(layers.Flatten()(rows)))
        model.compile(optimizer(), "mse", run_eagerly=True)
        return model

    return build_model


@pytest.mark.slow
@needs_keras_api
@pytest.mark.law("L8")
@pytest.mark.parametrize(
    "optimizer,is_line,said",
    [
        (lambda: tf.keras.optimizers.Adagrad(0.1), IS_KERAS_3, "Adagrad treats one by one"),
        (lambda: tf.keras.optimizers.Adam(), IS_KERAS_3, "Adam treats one by one"),
        (lambda: sgd(clipnorm=0.01), True, "SGD with its clipping treats one by one"),
        (lambda: sgd(clipvalue=0.01), True, "SGD with its clipping treats one by one"),
    ],
    ids=["Adagrad", "Adam", "clipnorm", "clipvalue"],
)
def test_duplicate_rows_are_named_where_the_plain_optimizer_does_not_add_them_up(optimizer, is_line, said):
    arguments = embedding(optimizer), (REPEATED, Y[:6]), 2
    if not is_line:
        assert assert_accumulation_equals_full_batch(*arguments).is_equal
        return
    message = message_of(*arguments)
    assert "  - duplicate rows of `table` (Embedding): " in message and said in message
    assert "sum of its slices" in message and "mean over examples" not in message


@pytest.mark.slow
@needs_keras_api
@pytest.mark.law("L8")
@pytest.mark.parametrize(
    "ids,options", [(DISTINCT, {"clipnorm": 9.0}), (REPEATED, {"momentum": 0.9})], ids=["distinct", "added up"]
)
def test_duplicate_rows_are_not_named_where_they_do_nothing(ids, options):
    message = message_of(embedding(lambda: sgd(**options)), (ids, Y[:6]), 2, reduction="sum")
    assert "Use reduction='mean'" in message and "duplicate rows" not in message


@pytest.mark.slow
@needs_keras_api
@pytest.mark.law("L1")
def test_the_first_step_and_the_variable_that_is_furthest_off_are_named():
    def late():  # the first step moves nothing
        schedule = tf.keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.0, 1.0])
        return tf.keras.optimizers.Adam(schedule)

    with pytest.raises(AssertionError) as raised:
        assert_accumulation_equals_full_batch(
            maker(optimizer=late), (X, Y), 7, reduction="sum", micro_batch_weight="equal", tolerance=1e-7
        )
    report = raised.value.report
    assert not report.is_equal and report.diverged_at == 2 and report.steps == 2
    first = report.diverged[0]
    assert first.size > first.allowed >= 1e-7 and report.deviations[first.variable] == first.size
    assert f"at step 2: `{first.variable}` is off" in str(report)


@pytest.mark.slow
@needs_keras_api
@pytest.mark.law("L4")
def test_a_sum_over_examples_agrees_by_the_reduction_that_is_named():
    loss = tf.keras.losses.MeanSquaredError("sum")
    build_model = maker(loss=loss, optimizer=lambda: sgd(0.01), run_eagerly=False)
    batches = tf.data.Dataset.from_tensor_slices((X[:12], Y[:12])).batch(6)
    assert assert_accumulation_equals_full_batch(
        build_model, batches, 2, reduction="sum", micro_batch_weight="equal"
    ).is_equal


def bfloat16_policy():
    home = tf.keras.mixed_precision
    return (home if hasattr(home, "Policy") else home.experimental).Policy("mixed_bfloat16")


@pytest.mark.slow
@needs_keras_api
@pytest.mark.law("L10")
@pytest.mark.parametrize(
    "dtype,tolerance", [(lambda: "float16", 2.0**-9), (bfloat16_policy, 2.4e-3)], ids=["16", "mixed"]
)
def test_batches_from_a_generator_and_a_model_that_is_built_late_and_computes_in_16_bit(dtype, tolerance):
    def generate():
        while True:
            yield X[:6], Y[:6]

    class Late(tf.keras.Model):
        def __init__(self):
            super().__init__()
            # not drawn: one in fifty draws is a step so large that its rounding is past the tolerance
            self.unit = layers.Dense(1, dtype=dtype(), kernel_initializer=tf.keras.initializers.Constant(0.25))

        def call(self, inputs):
            return self.unit(inputs)

    def build_model():
        model = Late()
        model.compile(sgd(), "mse", run_eagerly=True)
        return model

    report = assert_accumulation_equals_full_batch(build_model, generate(), 2, steps=2)
    assert report.tolerance == tolerance and max(report.deviations.values()) < tolerance / 2
    said = message_of(build_model, generate(), 3, tolerance=1e-9)
    assert "layers compute in {}float16".format("" if tolerance == 2.0**-9 else "b") in said and "in float32" in said


@needs_keras_api
@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "arguments,said",
    [
        ({"data": (X[:2], Y[:2])}, "must hold at least `accum_steps` examples"),
        ({"data": (X, Y), "batch_size": 7}, "must hold at least `accum_steps \\* batch_size` examples: as in `fit`"),
        ({"accum_steps": None}, "Pass either `accum_steps` or `micro_batch_size`"),
        ({"micro_batch_size": 2}, "Pass either `accum_steps` or `micro_batch_size`"),
        ({"accum_steps": None, "micro_batch_size": 14}, "must hold more than `micro_batch_size` examples"),
        ({"accum_steps": None, "micro_batch_size": 0}, "`micro_batch_size` must be an int >= 1"),
        ({"data": (X, Y[:5])}, "the same number of examples"),
        ({"data": (X[:0], Y[:0])}, "must hold at least one batch"),
        ({"data": tf.data.Dataset.from_tensor_slices(X[:0]).batch(2)}, "must hold at least one batch"),
        ({"data": (X, Y, Y, Y)}, "at most \\(x, y, sample_weight\\). Received: a tuple of 4"),
        ({"data": 3}, "must be arrays"),
        ({"data": (X, 3.0)}, "first axis"),
        ({"data": iter([(X, Y)]), "batch_size": 7}, "`batch_size` is for arrays"),
        ({"accum_steps": 0}, "`accum_steps` must be an int >= 1"),
        ({"steps": 0}, "`steps` must be an int >= 1"),
        ({"tolerance": 0.0}, "`tolerance` must be a number > 0"),
        ({"use_agc": True}, "plain Keras has no counterpart"),
        ({"build_model": lambda: 3}, "must return a `tf.keras.Model`"),
        ({"build_model": lambda: tf.keras.Sequential()}, "must compile its model"),
        ({"build_model": maker(optimizer=lambda: accum.GradientAccumulateOptimizer(sgd(), 2))}, "does not accumulate"),
        ({"build_model": maker(optimizer=lambda: sgd(0.0))}, "can't tell a wrong step from rounding"),
        ({"data": (X * np.nan, Y)}, "Step 1 of the full batch itself turns `.*` into NaN or Inf"),
        ({"build_model": maker(lambda: WholeNumbers())}, "trainable weights floating point. Received: `whole_numbers"),
    ],
)
def test_what_cannot_be_checked_is_refused(arguments, said):
    kwargs = dict({"build_model": maker(), "data": (X, Y), "accum_steps": 3}, **arguments)
    with pytest.raises((TypeError, ValueError), match=said):
        assert_accumulation_equals_full_batch(**kwargs)


@pytest.mark.slow
@needs_keras_api
@pytest.mark.law("L17")
def test_a_function_that_makes_no_new_model_is_refused():
    same_model = maker()()
    with pytest.raises(TypeError, match="`build_model` must be a function"):
        assert_accumulation_equals_full_batch(same_model, (X, Y), 2)
    with pytest.raises(ValueError, match="new model at each call"):
        assert_accumulation_equals_full_batch(lambda: same_model, (X, Y), 2)
    units = iter([1, 2])
    with pytest.raises(ValueError, match="the same model at each call"):
        assert_accumulation_equals_full_batch(maker(lambda: layers.Dense(next(units))), (X, Y), 2)


@pytest.mark.law("L17")
def test_a_static_graph_is_referred_to_recordings():
    with tf.Graph().as_default():
        with pytest.raises(NotImplementedError, match="accum.testing.record"):
            assert_accumulation_equals_full_batch(lambda: None, (X, Y), 2)


MODULE = """
import test_testing as here

noise = lambda: here.layers.GaussianNoise(1.0, name="noise")
agrees = lambda: (here.maker(), (here.X, here.Y), 2)
diverges = lambda: {"build_model": here.maker(noise), "data": (here.X, here.Y), "accum_steps": 2}
no_steps = lambda: {"build_model": here.maker(), "data": (here.X, here.Y)}
fails = lambda: 1 / 0
nothing = lambda: None
misspelt = lambda: dict(diverges(), tolerence=1)
asserts = lambda: (lambda: [].pop(), (here.X, here.Y), 2)
leaves = lambda: exit(0)
leaves_later = lambda: (lambda: exit(0), (here.X, here.Y), 2)


def coloured():
    raise ValueError("Exception encountered when calling Bad.call().\\n\\n\\x1b[1mits own words\\x1b[0m")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "checked_by_accum.py").write_text(MODULE)
    (tmp_path / "broken_for_accum.py").write_text("import no_such_module_at_all")
    (tmp_path / "leaving_accum.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "checked_by_accum"


@pytest.mark.slow
@needs_keras_api
def test_verify_says_on_the_command_line_whether_a_model_agrees(module, capsys):
    assert main(["verify", module + ":agrees", "--accum-steps", "3", "--steps", "2", "--batch-size", "4"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("Accumulation equals the full batch: 2 steps of 3 micro-batches") and not said.err
    assert main(["verify", module + ":diverges"]) == 1
    said = capsys.readouterr()
    assert "diverges from the full batch at step 1" in said.out and "`noise` (GaussianNoise)" in said.out
    assert main(["verify", module + ":agrees", "--micro-batch-size", "5", "--batch-size", "12"]) == 0
    assert "3 steps of 3 micro-batches" in capsys.readouterr().out
    assert main(["verify", module + ":no_steps", "--micro-batch-size", "5", "--whole-batch", "all"]) == 0
    assert main(["verify", module + ":diverges", "--micro-batch-size", "5"]) == 1
    assert "(micro_batch_size=5, tolerance" in capsys.readouterr().out
    assert main(["verify", module + ":diverges", "--tolerance", "1e9", "--steps", "1"]) == 2  # it could not fail


@needs_keras_api
@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "named,said",
    [
        ("checked_by_accum", "must name a module and a function"),
        ("checked_by_accum.py:agrees", "must name a module and a function"),
        ("no_such_module_at_all:f", "could not be imported: ModuleNotFoundError"),
        ("broken_for_accum:f", "could not be imported: ModuleNotFoundError"),
        ("checked_by_accum:none", "has no function none"),
        ("checked_by_accum:MODULE", "has no function MODULE"),
        ("checked_by_accum:fails", "checked_by_accum:fails failed: ZeroDivisionError"),
        ("checked_by_accum:nothing", "must return (build_model, data), (build_model, data, accum_steps)"),
        ("checked_by_accum:no_steps", "Pass --accum-steps"),
        ("checked_by_accum:misspelt", "the check failed: TypeError"),
        ("checked_by_accum:asserts", "the check failed: IndexError"),
        ("checked_by_accum:coloured", "failed: ValueError: its own words."),
        ("checked_by_accum:leaves", "checked_by_accum:leaves failed: SystemExit: 0"),
        ("checked_by_accum:leaves_later", "the check failed: SystemExit: 0"),
        ("leaving_accum:f", "leaving_accum could not be imported: SystemExit: 0"),
    ],
)
def test_verify_says_in_a_line_what_it_cannot_use(module, named, said, capsys):
    assert main(["verify", named]) == 2
    captured = capsys.readouterr()
    assert not captured.out and said in captured.err
    assert captured.err.startswith("python -m accum verify: ") and captured.err.count("\n") == 1


@pytest.mark.law("L17")
@pytest.mark.parametrize("arguments", [[], ["m:f", "--accum-steps", "0"], ["m:f", "--tolerance", "-1"]], ids=" ".join)
def test_wrong_arguments_of_verify_get_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["verify"] + arguments)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("usage: python -m accum verify")


def test_public_names_say_what_they_are():
    for name in accum.testing.__all__:
        assert getattr(accum.testing, name).__doc__.strip()


def imports_within(package):
    """Module -> the modules of the package that it imports, those within functions too."""
    files = {
        path.stem: ast.parse(path.read_text("utf-8")) for path in pathlib.Path(package.__file__).parent.glob("*.py")
    }
    imports = {}
    for name, tree in files.items():
        statements = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        imported = {
            node.module.rpartition(".")[2] for node in statements if node.module.startswith(package.__name__ + ".")
        }
        imported.update(alias.name for node in statements if node.module == package.__name__ for alias in node.names)
        imports[name] = imported & set(files)
    return imports


def test_no_module_of_accum_testing_imports_one_that_imports_it():
    left = imports_within(accum.testing)
    assert "_diagnosis" in left["_training"]
    while any(not (imported & set(left)) for imported in left.values()):
        left = {name: imported for name, imported in left.items() if imported & set(left)}
    assert not left
