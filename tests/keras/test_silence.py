"""No silence: a model whose train step does not accumulate says so, and so does an argument that means nothing."""

import contextlib
import functools
import types
import warnings

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_identical, assert_near
from loss_scales import loss_scale_optimizer
from models import from_model, step_by_mean_square
from optimizers import legacy_family
from replicas import mirrored
from versions import IS_KERAS_3, TF_VERSION
from warned import silent, warned

import accum

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.slow]

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.normal(size=(16, 3)).astype("float32"), RANDOM.normal(size=(16, 2)).astype("float32")
layers = tf.keras.layers
PER_ELEMENT = {"sample_weight_mode": "temporal"} if TF_VERSION < (2, 3) else {}  # for sample weights


def sgd():
    return tf.keras.optimizers.SGD(0.1)


def functional():
    inputs = tf.keras.Input((3,))
    return tf.keras.Model(inputs, linear()(inputs))


def linear():
    """One kernel: a trace costs by variable."""
    return layers.Dense(2, use_bias=False)


class Own(tf.keras.Model):
    """A model whose train step asks `apply` for the optimizers that it calls."""

    def __init__(self):
        super().__init__()
        self.dense = linear()

    def call(self, inputs):
        return self.dense(inputs)

    def step_by(self, optimizer, data):
        return step_by_mean_square(self, optimizer, *data)

    def train_step(self, data):
        return self.step_by(self.chosen(), data)


class InList(Own):
    def compile(self, optimizers):
        super().compile()
        self.both = optimizers

    def chosen(self):
        return self.both[1]


class InDict(Own):
    def compile(self, optimizers):
        super().compile()
        self.by_name = {"outer": [optimizers]}

    def chosen(self):
        return self.by_name["outer"][0]["d"]


class ByName(Own):
    def compile(self, d_optimizer):
        super().compile()
        self.d_optimizer = tf.keras.optimizers.get(d_optimizer)

    def chosen(self):
        return self.d_optimizer


class MadeInCompile(Own):
    def compile(self, rate):
        super().compile(loss="mse")
        self.own_optimizer = tf.keras.optimizers.SGD(rate)

    def chosen(self):
        return self.own_optimizer


class MadeInInit(Own):
    def __init__(self):
        super().__init__()
        self.own_optimizer = sgd()

    def chosen(self):
        return self.own_optimizer


class Decorated(Own):
    @tf.function
    def train_step(self, data):
        return self.step_by(self.optimizer, data)


def steps_of(model):
    return int(model.chosen().iterations.numpy())


def fitted(plain, *arguments, **options):
    """An accumulating model after 8 micro-batches, which are two steps; the others are given to `compile`."""
    model = from_model(plain, accum_steps=4)
    model(X)
    model.compile(*arguments, **options)
    model.fit(X, Y, batch_size=2, shuffle=False, verbose=0)
    return model


@pytest.mark.law("L3")
@pytest.mark.parametrize(
    "make,make_arguments",
    [
        (InList, lambda: [[sgd(), sgd()]]),
        (InDict, lambda: [{"g": sgd(), "d": sgd()}]),
        (ByName, lambda: ["sgd"]),
        (MadeInCompile, lambda: [0.1]),
        (MadeInInit, lambda: ["adam"]),
    ],
)
def test_optimizers_are_found_wherever_a_model_keeps_them(make, make_arguments):
    assert steps_of(fitted(make(), *make_arguments())) == 2


@pytest.mark.law("L3")
def test_optimizers_of_a_compiled_model_are_found_too():
    plain = InList()
    plain.compile([sgd(), sgd()])
    model = from_model(plain, accum_steps=4)
    model.fit(X, Y, batch_size=2, verbose=0)
    assert steps_of(model) == 2
    assert not isinstance(plain.both[1], accum.GradientAccumulateOptimizer)


@pytest.mark.law("L3")
@pytest.mark.parametrize("has_trained", [False, True])
def test_an_optimizer_that_is_set_after_compile_accumulates(has_trained):
    model = from_model(functional(), accum_steps=4)
    model.compile("sgd", "mse")
    if has_trained:
        model.fit(X, Y, batch_size=2, verbose=0)
    model.optimizer = tf.keras.optimizers.Adam(0.1)
    model.fit(X, Y, batch_size=2, verbose=0)
    assert isinstance(model.optimizer, accum.GradientAccumulateOptimizer)
    assert type(model.optimizer.optimizer).__name__ == "Adam" and int(model.optimizer.iterations.numpy()) == 2


class Hidden(Own):
    """Its optimizer is bound into a function that was made before anything could find it."""

    def __init__(self):
        super().__init__()
        optimizer = sgd()
        self.update = tf.function(lambda data: self.step_by(optimizer, data))

    def train_step(self, data):
        return self.update(data)


class HiddenButAccumulating(Own):
    """As `Hidden`, with the remedy that its error gives."""

    def __init__(self):
        super().__init__()
        self.iterations_of = lambda: int(optimizer.iterations.numpy())
        optimizer = accum.GradientAccumulateOptimizer(sgd(), accum_steps=4)
        self.update = tf.function(lambda data: self.step_by(optimizer, data))

    def train_step(self, data):
        return self.update(data)


@pytest.mark.law("L3")
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_hidden_optimizer_that_accumulates_is_called_with_a_warning(run_eagerly):
    with pytest.warns(UserWarning, match="is not an attribute of the model"):
        model = fitted(HiddenButAccumulating(), "sgd", run_eagerly=run_eagerly)
    assert model.iterations_of() == 2


@pytest.mark.law("L3")
def test_an_attribute_that_contains_itself_is_no_obstacle():
    plain = Own()
    plain.__dict__["around"] = around = {"optimizers": []}
    around["optimizers"].append(around)
    plain.train_step = types.MethodType(double_loss, plain)
    assert int(fitted(plain, "sgd").optimizer.iterations.numpy()) == 2


class Gan(Own):
    """As keras.io writes one: its `compile` lets Keras make an optimizer, and nobody calls that."""

    def __init__(self):
        super().__init__()
        self.norm = accum.AccumBatchNormalization(accum_steps=2)

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def call(self, inputs, training=None):
        return self.dense(self.norm(inputs, training=training))

    def train_step(self, data):
        self.step_by(self.d_optimizer, data)
        return self.step_by(self.g_optimizer, data)


class TwoFunctions(Own):
    """Two functions of one name, each with an optimizer of its own."""

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.update_d = tf.function(lambda data: self.step_by(self.d_optimizer, data))
        self.update_g = tf.function(lambda data: self.step_by(self.g_optimizer, data))

    def train_step(self, data):
        self.update_d(data)
        return self.update_g(data)


@pytest.mark.law("L3")
def test_two_functions_of_one_name_are_not_one_that_is_called_twice():
    model = fitted(TwoFunctions(), sgd(), sgd())
    assert [int(one.iterations.numpy()) for one in (model.d_optimizer, model.g_optimizer)] == [2, 2]


@pytest.mark.law("L3", "L13")
def test_batch_normalisation_follows_an_optimizer_that_is_called():
    model = from_model(Gan(), accum_steps=4)
    model(X)
    before = model.norm.moving_mean.numpy()
    model.compile(sgd(), sgd())
    model.fit(X, Y, batch_size=2, verbose=0)
    assert [int(one.iterations.numpy()) for one in (model.d_optimizer, model.g_optimizer)] == [2, 2]
    assert np.abs(model.norm.moving_mean.numpy() - before).max() > 1e-4


class IgnoresItsArgument(MadeInInit):
    def __init__(self):
        super().__init__()
        self.norm = accum.AccumBatchNormalization(accum_steps=2)

    def call(self, inputs, training=None):
        return self.dense(self.norm(inputs, training=training))


@pytest.mark.law("L17")
def test_batch_normalisation_that_follows_an_optimizer_nobody_calls_is_refused():
    with pytest.raises(ValueError, match="Batch normalisation follows the cycles of"):
        fitted(IgnoresItsArgument(), "adam")


class KeepsItsArgument(Own):
    def compile(self, optimizer, **kwargs):
        super().compile(optimizer=optimizer, **kwargs)
        self.chosen_one = optimizer

    def chosen(self):
        return self.optimizer


@pytest.mark.law("L3")
@pytest.mark.parametrize("is_scaled", [False, True])
def test_an_optimizer_that_is_kept_twice_accumulates_once(is_scaled):
    model = from_model(KeepsItsArgument(), accum_steps=4)
    optimizer = sgd()
    model.compile(loss_scale_optimizer(optimizer, 8.0) if is_scaled else optimizer, loss="mse")
    model.train_step = types.MethodType(lambda self, data: base_train_step(self, data), model)
    model.fit(X, Y, batch_size=2, verbose=0)
    assert model.optimizer is model.chosen_one and int(model.optimizer.iterations.numpy()) == 2


def base_train_step(model, data):
    return tf.keras.Model.train_step(model, data)


class SkipsAtTimes(Own):
    has_begun = False

    def train_step(self, data):
        if float(tf.reduce_sum(data[0])) < 0.0 and self.has_begun:
            return {"loss": 0.0}
        self.has_begun = True
        return self.step_by(self.optimizer, data)


@pytest.mark.law("L3")
def test_an_eager_train_step_may_skip_a_micro_batch():
    model = fitted(SkipsAtTimes(), sgd(), run_eagerly=True)
    made = 4 * int(model.optimizer.iterations.numpy())
    assert model.has_begun and made <= 8


class ByHand(Own):
    def train_step(self, data):
        self.trainable_variables[0].assign_sub(0.1 * tf.ones_like(self.trainable_variables[0]))
        return {"loss": 0.0}


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_an_optimizer_that_does_not_accumulate_is_refused_in_a_train_step(run_eagerly):
    with pytest.raises(ValueError, match="applies gradients with an optimizer that does not accumulate"):
        fitted(Hidden(), "sgd", run_eagerly=run_eagerly)


class Assigning:
    """Gradient descent in one's own words."""

    def apply_gradients(self, grads_and_vars):
        for grad, var in grads_and_vars:
            var.assign_sub(0.1 * grad)


@pytest.mark.law("L21")
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("optimizer", [sgd, Assigning])
def test_a_train_step_that_runs_once_may_update_without_an_optimizer_that_accumulates(optimizer, run_eagerly):
    def by(optimizer):
        class Elsewhere(Own):
            def train_step(self, data):
                return self.step_by(optimizer, data)

        return Elsewhere()

    ended = []
    for wrap in (lambda model: model, lambda model: from_model(model, micro_batch_size=3)):
        model = wrap(by(optimizer()))
        model(X[:1])
        model.dense.set_weights([np.ones((3, 2))])
        model.compile(run_eagerly=run_eagerly)
        model.fit(X, Y, batch_size=8, shuffle=False, epochs=2, verbose=0)
        ended.append(model.dense.get_weights())
    assert np.abs(ended[0][0] - 1.0).max() > 0.01
    assert_near(*ended)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_train_step_that_calls_no_accumulating_optimizer_is_refused(run_eagerly):
    with pytest.raises(ValueError, match="has called none of the model's accumulating optimizers"):
        fitted(ByHand(), "sgd", run_eagerly=run_eagerly)


def test_a_refused_train_step_leaves_other_models_alone():
    with pytest.raises(ValueError, match="does not accumulate"):
        fitted(Hidden(), "sgd")
    plain = functional()
    plain.compile(sgd(), "mse")
    plain.fit(X, Y, batch_size=2, verbose=0)
    assert int(plain.optimizer.iterations.numpy()) == 8


def double_loss(self, data):
    return dict(self.step_by(self.optimizer, data), patched=1.0)


@pytest.mark.law("L3")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_train_step_that_was_set_on_the_instance_is_run(when):
    plain = Own()
    model = plain if when == "before" else from_model(plain, accum_steps=4)
    model.train_step = types.MethodType(double_loss, model)
    model = from_model(model, accum_steps=4) if when == "before" else model
    model.compile(sgd())
    model.train_step = types.MethodType(double_loss, model) if when == "after" else model.train_step
    assert "patched" in model.fit(X, Y, batch_size=2, verbose=0).history
    assert int(model.optimizer.iterations.numpy()) == 2


# ----------------------------------------------------------------------------------------------------------------
# One optimizer, called several times in a train step


class Critic(Own):
    def train_step(self, data):
        self.step_by(self.optimizer, data)
        return self.step_by(self.optimizer, data)


class CriticInLoop(Own):
    def train_step(self, data):
        def update(turn):
            self.step_by(self.optimizer, data)
            return (turn + 1,)

        tf.while_loop(lambda turn: turn < 3, update, (tf.constant(0),), name="critic")
        return {"loss": 0.0}


class CriticInFunction(Own):
    @tf.function
    def update(self, data):
        return self.step_by(self.optimizer, data)

    def train_step(self, data):
        self.update(data)
        return self.update(data)


@pytest.mark.parametrize("make", [Critic, CriticInLoop, CriticInFunction])
def test_one_optimizer_that_is_called_several_times_is_refused(make):
    with pytest.raises(ValueError, match="several times"):
        fitted(make(), sgd())


class EitherBranch(Own):
    def train_step(self, data):
        def update():
            return self.step_by(self.optimizer, data)["loss"]

        return {"loss": tf.cond(tf.reduce_sum(data[0]) > 0.0, update, update)}


@pytest.mark.law("L3")
def test_one_call_in_each_branch_of_a_conditional_is_one_call():
    assert int(fitted(EitherBranch(), sgd()).optimizer.iterations.numpy()) == 2


# ----------------------------------------------------------------------------------------------------------------
# A train step that is a `tf.function`


def weights_after(model, batch_size, rate=0.1, **compiled):
    model(X)
    model.set_weights([np.ones((3, 2))])
    model.compile(tf.keras.optimizers.SGD(rate), **compiled)
    model.fit(X[:14], Y[:14], batch_size=batch_size, shuffle=False, verbose=0)
    return model.get_weights()


@functools.lru_cache(maxsize=None)
def full_batch_weights(rate):
    """What plain Keras makes of batches of 8 and 6; this need not be traced."""
    return weights_after(functional(), 8, rate, loss="mse", run_eagerly=True)


class Signed(Own):
    @tf.function(input_signature=[(tf.TensorSpec([None, 3]), tf.TensorSpec([None, 2]))])
    def train_step(self, data):
        return self.step_by(self.optimizer, data)


class Helped(Own):
    """The compiled loss is called in a `tf.function`, and the optimizer outside."""

    @tf.function
    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x, y, outputs) if hasattr(self, "compute_loss") else self.compiled_loss(y, outputs)
        return loss, tape.gradient(loss, self.trainable_variables)

    def train_step(self, data):
        loss, grads = self.gradients(*data)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        return {"loss": loss}


@pytest.mark.law("L1", "L5")
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("make", [Decorated, Signed, Helped])
def test_a_decorated_train_step_equals_the_full_batch_for_each_model_and_compile(make, run_eagerly):
    compiled = {"run_eagerly": run_eagerly, "loss": "mse"}
    for rates in ((0.1, 0.02), (0.1,)):  # a model that is compiled again, and another
        model = from_model(make(), accum_steps=2)
        for rate in rates:  # trained from the same weights
            got = weights_after(model, 4, rate, **compiled)  # 4 + 4, 4 + 2
            assert_near(got, full_batch_weights(rate))
    if not run_eagerly:
        mean_of_means = weights_after(from_model(make(), accum_steps=2, micro_batch_weight="equal"), 4, **compiled)
        assert np.abs(mean_of_means[0] - full_batch_weights(0.1)[0]).max() > 1e-3


# ----------------------------------------------------------------------------------------------------------------
# Arguments


@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "kwargs,hint",
    [
        ({"acum_steps": 4}, "Did you mean `accum_steps`"),
        ({"gradient_accumulation_steps": 4}, "Did you mean `accum_steps`"),
        ({"foo": 1}, "`foo` is an unknown argument. Received: foo=1"),
    ],
)
def test_an_unknown_argument_is_refused_with_the_name_that_was_meant(kwargs, hint):
    plain = functional()
    with pytest.raises(TypeError, match=hint):
        accum.GradientAccumulateModel(accum_steps=2, inputs=plain.inputs, outputs=plain.outputs, **kwargs)
    with pytest.raises(TypeError, match=hint):
        from_model(plain, 2, **kwargs)


@pytest.mark.law("L17")
def test_a_model_without_accum_steps_warns_that_nothing_accumulates():
    plain = functional()
    for make in (
        lambda **kwargs: accum.GradientAccumulateModel.from_model(plain, **kwargs),
        lambda **kwargs: accum.GradientAccumulateModel(inputs=plain.inputs, outputs=plain.outputs, **kwargs),
    ):
        with pytest.warns(UserWarning, match="`accum_steps` was not given") as caught:
            make()
        assert len([w for w in caught if "accum_steps" in str(w.message)]) == 1 and caught[0].filename == __file__
        with silent():
            make(accum_steps=1)


@pytest.mark.law("L17")
@pytest.mark.parametrize("reduction", ["sum", None if IS_KERAS_3 else "none"])
def test_a_loss_that_sums_over_examples_warns_at_compile_unless_sums_were_asked_for(reduction):
    """The gradient of a vector, which "none" leaves, is the sum of its elements' gradients."""
    loss = tf.keras.losses.MeanSquaredError(reduction=reduction)
    with pytest.warns(UserWarning, match="`reduction='sum', micro_batch_weight='equal'`"):
        from_model(functional(), 2).compile("sgd", loss)
    with silent():
        from_model(functional(), 2, reduction="sum", micro_batch_weight="equal").compile("sgd", loss)
        from_model(functional(), 2).compile("sgd", "mse")


@pytest.mark.law("L17")
@pytest.mark.parametrize("reduction", ["sum", None if IS_KERAS_3 else "none"])
def test_so_does_one_that_was_compiled_before_the_model_accumulates(reduction):
    plain = functional()
    plain.compile("sgd", tf.keras.losses.MeanSquaredError(reduction=reduction))
    with pytest.warns(accum.InexactWarning, match="`reduction='sum', micro_batch_weight='equal'`"):
        from_model(plain, 2)
    with silent():
        from_model(plain, 2, reduction="sum", micro_batch_weight="equal")
        from_model(plain, 1)


# ----------------------------------------------------------------------------------------------------------------
# Several outputs

TOKENS = RANDOM.randint(1, 5, size=(2, 8, 3))  # of two inputs
TOKENS[0, ::3, 1:], TOKENS[1, ::2, :2] = 0, 0
TARGETS = RANDOM.normal(size=(8, 3, 2)).astype("float32")
PADDED_CLASSES = np.where(TOKENS[0] == 0, 2, TOKENS[0] % 2).astype("float32")


class AddsLoss(layers.Layer):
    """Adds a loss of the values that it passes on: their mean, or in Keras 3 also one number for each example."""

    def __init__(self, is_vector=False):
        super().__init__()
        self.is_vector = is_vector
        self.supports_masking = True

    def call(self, inputs):
        self.add_loss(tf.reduce_mean(inputs**2, axis=[1, 2] if self.is_vector else None))
        return inputs


def with_outputs(kind):
    """A model of two inputs, and its compiled losses and targets."""
    inputs = [tf.keras.Input((3,), dtype="int32") for _ in range(2)]
    one, other = (layers.Embedding(5, 2, mask_zero=kind != "ignored", name=name)(inputs[0]) for name in "ab")
    hidden = layers.Embedding(5, 2, mask_zero=True)(inputs[1])
    unmasked = layers.Lambda(tf.identity)
    outputs = {
        "alike": lambda: [one, linear()(one)],
        "alike, masks made twice": lambda: [one, layers.Add()([one, other])],
        "no mask": lambda: [unmasked(one), unmasked(other)],
        "one output": lambda: [one],
        "one output, added loss": lambda: [AddsLoss()(one)],
        "one output, regularized activity": lambda: [layers.Dense(2, activity_regularizer="l2")(one)],
        "one output, summed loss": lambda: [AddsLoss(is_vector=True)(one)],
        "one output, no mask, added loss": lambda: [AddsLoss()(unmasked(one))],
        "mask": lambda: [one, unmasked(hidden)],
        "masks": lambda: [one, hidden],
        "ignored": lambda: [linear()(one), other],
    }[kind]()
    outputs = [layers.Activation("linear", name=name)(output) for name, output in zip(("left", "right"), outputs)]
    plain = tf.keras.Model(inputs, outputs[0] if "one output" in kind else outputs)
    plain.set_weights([np.cos(np.arange(np.size(weight))).reshape(np.shape(weight)) for weight in plain.get_weights()])
    if "one output" in kind:
        return plain, "mse", TARGETS
    if kind != "ignored":
        return plain, ["mse"] * len(outputs), [TARGETS] * len(outputs)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2)
    return plain, [loss, "mse"], [PADDED_CLASSES, TARGETS]


WAYS = {
    "accum_steps": ({"accum_steps": 3}, 2),
    "micro_batch_size": ({"micro_batch_size": 3, "whole_batch": ()}, 8),
    "exact": ({"micro_batch_size": 3}, 8),
    "auto": ({"micro_batch_size": "auto"}, 8),
    "auto and accum_steps": ({"micro_batch_size": "auto", "accum_steps": 2}, 4),
    "none": ({"accum_steps": 1}, 4),
}


def said_of_losses(kind, way, run_eagerly):
    """What a user is told of the losses in two runs of `fit` with one `compile`."""
    options, batch_size = WAYS[way]
    plain, loss, y = with_outputs(kind)
    model = from_model(plain, **options)
    model.compile(sgd(), loss, run_eagerly=run_eagerly)
    with warned() as said:
        for _ in range(2):
            data = list(TOKENS), y
            model.fit(*data, batch_size=batch_size, validation_data=data, shuffle=False, verbose=0)
    return [one for one in said if "losses" in one and "With `whole_batch=()`" not in one]


@pytest.mark.law("L5")
@pytest.mark.tf("2.11", because="losses divide by all elements")
@pytest.mark.parametrize("kind", ["mask", "masks"])
@pytest.mark.parametrize(
    "way, run_eagerly",
    [("accum_steps", False), ("accum_steps", True), ("micro_batch_size", False), ("micro_batch_size", True)],
)
def test_losses_of_outputs_that_divide_by_different_numbers_are_warned_of_once(kind, way, run_eagerly):
    said = said_of_losses(kind, way, run_eagerly)
    assert len(said) == 1 and "`tf.keras.layers.Lambda(tf.identity)`" in said[0]
    right = "examples" if kind == "mask" else "elements that count"
    assert f"Received: {{'left': 'elements that count', 'right': '{right}'}}." in said[0]


@pytest.mark.law("L5")
@pytest.mark.tf("2.11", because="losses divide by all elements")
@pytest.mark.parametrize("way", ["accum_steps", "micro_batch_size"])
@pytest.mark.parametrize("kind", ["one output, added loss", "one output, regularized activity"])
@pytest.mark.filterwarnings("ignore:Before Keras 3.13")
def test_a_loss_that_divides_by_unmasked_elements_beside_one_that_a_layer_adds_is_warned_of(kind, way):
    (said,) = [one for one in said_of_losses(kind, way, run_eagerly=True) if "Losses divide" in one]
    assert "'elements that count', 'losses that layers add': 'examples'}" in said
    assert "Pass `micro_batch_size` alone" in said


class OwnTerms(tf.keras.Model):
    """A model of tokens, with a term of its own beside the compiled loss."""

    def __init__(self, kind):
        super().__init__()
        self.embedding, self.kind = layers.Embedding(5, 2, mask_zero=True), kind
        self.scale = tf.Variable(0.5, trainable=False)

    def call(self, inputs):
        return self.embedding(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
        compiled = super().compute_loss(x, y, y_pred, sample_weight, **kwargs)
        return {
            "none": lambda: compiled,
            "scaled": lambda: self.scale * compiled + 0.0 * tf.reduce_sum(self.trainable_variables[0] ** 2),
            "term": lambda: compiled + 0.1 * tf.reduce_mean(y_pred**2),
            "twice": lambda: compiled + super(OwnTerms, self).compute_loss(x, y, unmasked(y_pred), sample_weight),
            "mean": lambda: tf.reduce_mean([compiled, compiled]) - 1.0,
        }[self.kind]()


def unmasked(output):
    """Return an output with a mask of ones, whose loss divides by all elements."""
    output = tf.identity(output)
    output._keras_mask = tf.ones(tf.shape(output)[:2], tf.bool)
    return output


@pytest.mark.law("L5")
@pytest.mark.tf("2.11", because="losses divide by all elements")
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize(
    "kind, is_said", [("none", False), ("scaled", False), ("mean", False), ("term", True), ("twice", True)]
)
def test_a_term_of_ones_own_beside_a_loss_that_divides_by_unmasked_elements_is_warned_of(kind, is_said, run_eagerly):
    model = from_model(OwnTerms(kind), 3)
    model.compile(sgd(), "mse", run_eagerly=run_eagerly)
    with warned("Losses divide") as said:
        model.fit(TOKENS[0], TARGETS, batch_size=2, shuffle=False, verbose=0)
    assert bool(said) is (is_said and not (run_eagerly and kind == "term"))  # which docs/exact.md says
    assert not said or ("terms of `compute_loss`" if kind == "term" else "second call") in said[0]


@pytest.mark.law("L5")
@pytest.mark.tf(keras=3, because="Keras 2 takes scalars")
@pytest.mark.parametrize("way", ["accum_steps", "micro_batch_size"])
def test_an_added_loss_that_keras_sums_over_examples_is_warned_of_once(way):
    said = [one for one in said_of_losses("one output, summed loss", way, run_eagerly=True) if "adds up" in one]
    assert len(said) == 1 and "add their mean" in said[0]


@pytest.mark.law("L5")
@pytest.mark.tf("2.10", because="no `ignore_class`")
@pytest.mark.parametrize("way", ["accum_steps", "micro_batch_size"])
def test_a_loss_that_ignores_a_class_beside_one_that_does_not_is_warned_of(way):
    (said,) = said_of_losses("ignored", way, run_eagerly=False)
    assert "{'left': 'elements that count', 'right': 'examples'}" in said


@pytest.mark.law("L5")
@pytest.mark.parametrize(
    "kind, way, run_eagerly",
    [
        ("alike", "accum_steps", False),
        ("alike", "micro_batch_size", False),
        ("alike, masks made twice", "accum_steps", False),
        ("alike, masks made twice", "micro_batch_size", False),
        ("alike, masks made twice", "micro_batch_size", True),
        ("no mask", "micro_batch_size", False),
        ("one output", "micro_batch_size", False),
        ("one output, no mask, added loss", "micro_batch_size", False),
        ("mask", "none", False),
        ("mask", "exact", False),
        ("masks", "exact", True),
        ("one output, added loss", "exact", True),
        ("mask", "auto", False),  # it computes the whole batch at once
    ],
)
def test_no_warning_where_the_losses_of_all_outputs_are_exact(kind, way, run_eagerly):
    assert not said_of_losses(kind, way, run_eagerly)


@pytest.mark.law("L5")
@pytest.mark.tf("2.11", because="losses divide by all elements")
def test_whole_batches_in_a_cycle_are_warned_of_too():
    assert len(said_of_losses("mask", "auto and accum_steps", run_eagerly=False)) == 1


@pytest.mark.law("L5")
def test_weights_of_zero_in_place_of_masks_are_exact():
    """What the warning advises."""
    weights = [(tokens != 0).astype("float32") for tokens in TOKENS]

    def fitted(is_split):
        plain, loss, y = with_outputs("masks")
        plain = tf.keras.Model(plain.inputs, [layers.Lambda(tf.identity)(output) for output in plain.outputs])
        model = from_model(plain, micro_batch_size=3) if is_split else plain
        model.compile(sgd(), loss, **PER_ELEMENT)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="The losses of the outputs")
            model.fit(list(TOKENS), y, sample_weight=weights, batch_size=8, shuffle=False, verbose=0)
        return model.get_weights()

    assert_near(fitted(is_split=True), fitted(is_split=False))


# ----------------------------------------------------------------------------------------------------------------
# `has_stepped`


@pytest.mark.law("L3")
@pytest.mark.parametrize("is_traced", [False, True])
def test_has_stepped_tells_the_micro_steps_that_make_a_step(is_traced):
    var = tf.Variable([1.0])
    optimizer = accum.GradientAccumulateOptimizer(sgd(), accum_steps=3)

    def micro_step(weight):
        optimizer.apply_gradients([(tf.ones([1]), var)], weight=weight)
        return optimizer.has_stepped

    run = tf.function(micro_step) if is_traced else micro_step
    assert not optimizer.has_stepped
    weights = [1.0] * 6 + [0.0] * 3 + [1.0] * 3
    told = [bool(run(tf.constant(weight))) for weight in weights]
    assert told == [False, False, True] * 2 + [False] * 3 + [False, False, True]
    assert bool(optimizer.has_stepped)


class Asking(Own):
    """Counts the steps that it is told of."""

    def __init__(self):
        super().__init__()
        self.told = tf.Variable(0, trainable=False)

    def train_step(self, data):
        logs = step_by_mean_square(self, self.optimizer, *data)
        self.told.assign_add(tf.cast(self.optimizer.has_stepped, tf.int32))
        return logs


@pytest.mark.law("L3")
@pytest.mark.parametrize("run_eagerly", [pytest.param(False, marks=pytest.mark.slow), True], ids=["traced", "eager"])
@pytest.mark.parametrize("options", [{"accum_steps": 2}, {"micro_batch_size": 2, "whole_batch": "loss"}], ids=str)
def test_a_train_step_that_runs_once_per_batch_is_told_of_each_step(options, run_eagerly):
    model = from_model(Asking(), **options)
    model(X[:1])
    model.compile(sgd(), run_eagerly=run_eagerly)
    model.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    assert int(model.told.numpy()) == int(model.optimizer.iterations.numpy()) == (4 if "accum_steps" in options else 8)


@pytest.mark.law("L3", "L17")
@pytest.mark.parametrize("run_eagerly", [False, True], ids=["traced", "eager"])
@pytest.mark.parametrize("options", [{}, {"accum_steps": 2}], ids=str)
def test_a_train_step_that_runs_once_per_micro_batch_can_not_be_told_of_steps(options, run_eagerly):
    """Its gradients are collected, and the optimizer makes its step after the last micro-batch."""
    model = from_model(Asking(), micro_batch_size=2, whole_batch=(), **options)
    model(X[:1])
    model.compile(sgd(), run_eagerly=run_eagerly)
    with pytest.raises(ValueError, match="`has_stepped` is not known while.*leave out `whole_batch`"):
        model.fit(X, Y, batch_size=4, verbose=0)


class Decaying(layers.Layer):
    """Moves a variable to a value that is computed from it, before it uses it."""

    def build(self, shape):
        self.level = self.add_weight(name="level", shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        self.level.assign(0.9 * self.level + 1.0)
        return inputs * self.level


@pytest.mark.parametrize("options", [{"micro_batch_tokens": 8}, {"micro_batch_size": 2, "whole_batch": ()}])
def test_what_a_layer_moves_in_each_micro_batch_is_named(options):
    stack = [tf.keras.Input((None,)), layers.Embedding(5, 3, mask_zero=True), layers.GlobalAveragePooling1D()]
    model = from_model(tf.keras.Sequential([*stack, Decaying(), layers.Dense(1)]), 1, **options)
    model.compile("sgd", "mse")
    with warned("accum: changed-variables") as said:
        model.train_on_batch(RANDOM.randint(1, 5, size=(4, 4)), RANDOM.normal(size=(4, 1)))
    assert len(said) == 1 and "level" in said[0]


@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "options,named", [({"accum_steps": 2}, True), ({"micro_batch_size": 2, "whole_batch": ()}, False)], ids=str
)
def test_a_warning_of_changed_variables_names_has_stepped_where_it_is_known(options, named):
    (line,) = said_of_changes(from_model(with_layer(Counts), **options), run_eagerly=True)
    assert ("`has_stepped`" in line) == named and "in a callback" in line


@pytest.mark.law("L17")
@pytest.mark.skipif(legacy_family() is None, reason="Keras 3 has no optimizers for static graphs")
def test_has_stepped_is_refused_in_a_static_graph():
    with tf.Graph().as_default():
        var = tf.compat.v1.get_variable("var", initializer=[1.0], use_resource=True)
        optimizer = accum.GradientAccumulateOptimizer(legacy_family().SGD(0.1), accum_steps=3)
        optimizer.apply_gradients([(tf.ones([1]), var)])
        with pytest.raises(RuntimeError, match="`has_stepped` does not exist in a static graph"):
            optimizer.has_stepped  # noqa: B018


@pytest.mark.law("L3", "L9")
def test_a_micro_batch_that_is_skipped_has_not_stepped():
    var = tf.Variable([1.0])
    optimizer = accum.GradientAccumulateOptimizer(sgd(), accum_steps=2, nonfinite="skip_micro")
    told = []
    for value in (1.0, np.nan, 1.0, np.nan, 1.0, 1.0):
        optimizer.apply_gradients([(tf.constant([value]), var)])
        told.append(bool(optimizer.has_stepped))
    assert told == [False, False, True, False, False, True]


# ----------------------------------------------------------------------------------------------------------------
# What needs no word


@pytest.mark.law("L3")
@pytest.mark.parametrize("by", ["scheduler", "accum_steps"])
def test_a_model_takes_its_own_optimizer_again_whatever_its_accum_steps(by):
    model = from_model(functional(), 4)
    model.compile("sgd", "mse")
    scheduler = accum.AccumulationScheduler({0: 2})
    if by == "accum_steps":
        model.optimizer.accum_steps = 2
    model.fit(X, Y, batch_size=4, verbose=0, callbacks=[scheduler] if by == "scheduler" else [])
    model.compile(model.optimizer, "mse")
    model.fit(X, Y, batch_size=4, verbose=0)
    assert model.optimizer.accum_steps == 2 and int(model.optimizer.iterations.numpy()) == 4


def test_a_model_without_trainable_weights_fits_as_a_plain_one():
    plain = functional()
    plain.trainable = False
    model = from_model(plain, 2)
    before = model.get_weights()
    model.compile("sgd", "mse")
    plain.compile("sgd", "mse")
    losses = [one.fit(X, Y, batch_size=4, shuffle=False, verbose=0).history["loss"] for one in (model, plain)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    assert_identical(model.get_weights(), before)


@pytest.mark.law("L13")
def test_flush_callback_ends_the_cycles_of_batch_normalisation_in_a_plain_model():
    def make(layer):
        inputs = tf.keras.Input((3,))
        return tf.keras.Model(inputs, layers.Dense(2)(layer(inputs)))

    layer, keras = accum.AccumBatchNormalization(accum_steps=4, momentum=0.9), layers.BatchNormalization(momentum=0.9)
    model = make(layer)
    model.compile("sgd", "mse")
    model.fit(X[:12], Y[:12], batch_size=4, shuffle=False, verbose=0, callbacks=[accum.FlushCallback()])  # 3 of 4
    make(keras)
    keras(X[:12], training=True)
    np.testing.assert_allclose(layer.moving_mean.numpy(), keras.moving_mean.numpy(), rtol=0, atol=2e-6)
    assert np.abs(layer.moving_mean.numpy()).max() > 1e-3


@pytest.mark.law("L17")
def test_flush_callback_in_a_model_that_accumulates_nothing_is_refused():
    model = functional()
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="compiled with a `GradientAccumulateOptimizer`"):
        model.fit(X, Y, verbose=0, callbacks=[accum.FlushCallback()])


def test_fit_of_a_model_that_is_not_compiled_says_that_alone():
    model = from_model(functional(), 2)
    with silent():
        with pytest.raises((RuntimeError, ValueError), match="compile"):
            model.fit(X, Y, verbose=0)


# ----------------------------------------------------------------------------------------------------------------
# Layers that change variables of their own


class Counts(layers.Layer):
    """Changes a variable at each call in training."""

    def build(self, input_shape):
        self.calls = self.add_weight(name="calls", shape=(), initializer="zeros", trainable=False)
        super().build(input_shape)

    def call(self, inputs, training=None):
        if training:
            self.count()
        return inputs

    def count(self):
        self.calls.assign_add(1.0)


class CountsInFunction(Counts):
    @tf.function
    def count(self):
        self.calls.assign_add(1.0)


class Spectral(layers.Wrapper):
    """Spectral normalization as in TensorFlow Addons: in a function, a step of the power iteration for each call."""

    def build(self, input_shape):
        if not self.layer.built:
            self.layer.build(input_shape)
        self.u = self.add_weight(name="u", shape=(1, 3), initializer="ones", trainable=False)
        self.built = True

    @tf.function
    def normalize(self):
        kernel = tf.convert_to_tensor(self.layer.kernel)
        v = tf.math.l2_normalize(tf.matmul(tf.convert_to_tensor(self.u), kernel, transpose_b=True))
        u = tf.math.l2_normalize(tf.matmul(v, kernel))
        self.u.assign(u)
        self.layer.kernel.assign(kernel / tf.matmul(tf.matmul(v, kernel), u, transpose_b=True))

    def call(self, inputs, training=None):
        if training:
            self.normalize()
        return self.layer(inputs)


CHANGING = {
    "a layer of one's own": (Counts, ["calls"]),
    "in a function": (CountsInFunction, ["calls"]),
    "spectral normalization of TensorFlow Addons": (lambda: Spectral(layers.Dense(3)), ["kernel", "u"]),
}
if IS_KERAS_3:
    spectral = lambda: layers.SpectralNormalization(layers.Dense(3))
    CHANGING["spectral normalization of Keras"] = spectral, ["kernel", "vector_u"]


def with_layer(make):
    inputs = tf.keras.Input((3,))
    return tf.keras.Model(inputs, linear()(make()(inputs)))


CYCLES_AND_MICRO_BATCHES = [{"accum_steps": 2}, {"micro_batch_size": 2, "whole_batch": ()}]


def said_of_changes(model, **options):
    """What a user is told of in two runs of `fit` with one `compile`."""
    with warned("once per micro-batch") as said:
        model.compile(sgd(), "mse", **options)
        for _ in range(2):
            model.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    return said


@pytest.mark.law("L2")
@pytest.mark.parametrize("run_eagerly", [False, True], ids=["traced", "eager"])
@pytest.mark.parametrize("options", CYCLES_AND_MICRO_BATCHES, ids=["cycles", "micro-batches"])
@pytest.mark.parametrize("kind", CHANGING)
def test_a_layer_that_changes_its_variables_at_each_call_is_warned_of_once(kind, options, run_eagerly):
    make, names = CHANGING[kind]
    (line,) = said_of_changes(from_model(with_layer(make), **options), run_eagerly=run_eagerly)
    shown = line.split("Changed: ")[1].split(" [accum")[0]
    assert [name.split("/")[-1].strip("'].") for name in shown.split(", ")] == names


@pytest.mark.law("L2")
def test_such_a_layer_ends_elsewhere_than_with_the_full_batch():
    """So the warning is no false alarm."""
    ended = []
    for wrap, batch_size in ((lambda model: model, 8), (lambda model: from_model(model, 2), 4)):
        model = with_layer(lambda: Spectral(layers.Dense(3)))
        model.set_weights([np.cos(np.arange(np.size(part))).reshape(np.shape(part)) for part in model.get_weights()])
        model = wrap(model)
        model.compile(sgd(), "mse", run_eagerly=True)
        model.fit(X, Y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
        ended.append(model.get_weights())
    assert max(np.abs(one - other).max() for one, other in zip(*ended)) > 1e-4


class Averaging(Own):
    """Keeps an average of its weights as the documentation says."""

    def __init__(self):
        super().__init__()
        self.average = self.add_weight(name="average", shape=(3, 2), initializer="zeros", trainable=False)

    def train_step(self, data):
        logs = step_by_mean_square(self, self.optimizer, *data)

        def updated():
            self.average.assign(0.9 * tf.convert_to_tensor(self.average) + 0.1 * self.dense.kernel)
            return 1

        tf.cond(self.optimizer.has_stepped, updated, lambda: 0)
        return logs


class MovesTarget(Own):
    """Moves the weights of a target network in every other step, which it does not train."""

    def __init__(self):
        super().__init__()
        self.target = linear()
        self.target.build((None, 3))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y - 0.5 * self.target(x)) ** 2)
        weights = self.dense.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))

        def move():
            self.target.kernel.assign(0.5 * self.target.kernel + 0.5 * self.dense.kernel)
            return 0

        tf.cond(self.is_time(), move, lambda: 0)
        return {"loss": loss}

    def is_time(self):
        return tf.equal(tf.convert_to_tensor(self.optimizer.iterations) % 2, 0)


class MovesTargetAfterSteps(MovesTarget):
    def is_time(self):
        return self.optimizer.has_stepped


@pytest.mark.law("L2")
@pytest.mark.parametrize(
    "model_class, names", [(MovesTarget, ["kernel"]), (MovesTargetAfterSteps, [])], ids=["by time", "by steps"]
)
def test_a_variable_that_a_conditional_changes_is_warned_of_unless_it_asks_for_steps(model_class, names):
    model = model_class()
    model(X[:1])
    said = said_of_changes(from_model(model, 2))
    assert [line.split("Changed: ")[1].split(" [accum")[0].split("/")[-1].strip("[].'") for line in said] == names


class Assigned(layers.Layer):
    """A dense layer that assigns to its kernel in each call."""

    def __init__(self, function, is_first=True):
        super().__init__()
        self.function, self.is_first, self.dense = function, is_first, layers.Dense(3, use_bias=False)

    def build(self, input_shape):
        self.dense.build(input_shape)
        self.built = True

    def call(self, inputs):
        outputs = None if self.is_first else self.dense(inputs)
        self.dense.kernel.assign(self.function(tf.convert_to_tensor(self.dense.kernel)))
        return self.dense(inputs) if self.is_first else outputs


MASK = np.tril(np.ones((3, 3), "float32"))
SETTLED = {
    "masked, as in PixelCNN": lambda kernel: kernel * MASK,
    "clipped, as in WGAN": lambda kernel: tf.clip_by_value(kernel, -0.1, 0.1),
    "not negative": tf.nn.relu,
    "of unit norm": lambda kernel: tf.math.l2_normalize(kernel, axis=0),
}


@pytest.mark.law("L2")
@pytest.mark.parametrize("options", [{"accum_steps": 2}, {"micro_batch_size": 4}], ids=["cycles", "micro-batches"])
@pytest.mark.parametrize("kind", SETTLED)
def test_what_is_the_same_in_each_micro_batch_is_exact_and_not_warned_of(kind, options):
    ended = []
    for wrap, batch_size in (
        (lambda model: model, 8),
        (lambda model: from_model(model, **options), 4 if "accum_steps" in options else 8),
    ):
        model = with_layer(lambda: Assigned(SETTLED[kind]))
        model.set_weights([np.cos(np.arange(np.size(part))).reshape(np.shape(part)) for part in model.get_weights()])
        model = wrap(model)
        with silent(accum.InexactWarning):
            model.compile(sgd(), "mse")
            model.fit(X, Y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
        ended.append(model.get_weights())
    assert_near(*ended)


@pytest.mark.law("L2")
@pytest.mark.parametrize("options", CYCLES_AND_MICRO_BATCHES, ids=["cycles", "micro-batches"])
@pytest.mark.parametrize(
    "function,is_first",
    [(lambda kernel: 0.99 * kernel, True), (tf.nn.relu, False)],
    ids=["decays", "is clipped after it was used"],
)
def test_a_kernel_that_differs_in_each_micro_batch_is_warned_of(function, is_first, options):
    made = from_model(with_layer(lambda: Assigned(function, is_first)), **options)
    assert len(said_of_changes(made, run_eagerly=False)) == 1


def ordinary():
    inputs = tf.keras.Input((3,))
    hidden = layers.Dropout(0.2)(layers.BatchNormalization()(layers.Dense(3)(inputs)))
    hidden = accum.AccumBatchNormalization()(layers.GaussianNoise(0.1)(hidden))
    return tf.keras.Model(inputs, linear()(hidden))


@pytest.mark.law("L2")
@pytest.mark.parametrize("run_eagerly", [False, True], ids=["traced", "eager"])
@pytest.mark.parametrize("accum_steps", [1, 2, {0: 1, 3: 2}], ids=str)
@pytest.mark.parametrize("make", [ordinary, Averaging])
def test_no_warning_of_statistics_noise_metrics_and_averages_per_step(make, accum_steps, run_eagerly):
    model = make()
    model(X[:1])
    options = {} if make is Averaging else {"metrics": ["mae"]}
    assert not said_of_changes(from_model(model, accum_steps), run_eagerly=run_eagerly, **options)


def contrastive(y_true, y_pred):
    logits = tf.matmul(y_pred, y_true, transpose_b=True)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(y_pred)[0]), logits)


def overlap(y_true, y_pred, axis=None):
    return tf.reduce_sum(y_true * y_pred, axis) / (1.0 + tf.reduce_sum(y_true**2 + y_pred**2, axis))


def by_pairs(y_true, y_pred):
    distances = tf.reduce_mean((y_pred[:, None] - y_pred[None]) ** 2, -1)
    return tf.reduce_mean(tf.nn.relu(1.0 - distances) + (y_true - y_pred)[:, 0] ** 2)


def root_mean_square(y_true, y_pred):
    return tf.sqrt(tf.reduce_mean((y_true - y_pred) ** 2))


def of_some(y_true, y_pred):
    kept = tf.cast(y_true > 0.0, tf.float32)
    return tf.reduce_sum(kept * (y_true - y_pred) ** 2) / tf.reduce_sum(kept)


LOSSES_OF_BATCH = {
    "contrastive": contrastive,
    "overlap of a batch": lambda y, p: 1.0 - overlap(y, p),
    "pairs": by_pairs,
    "root of a mean": root_mean_square,
    "mean over some": of_some,
    "beside one by example": lambda y, p: tf.reduce_mean((y - p) ** 2) - overlap(y, p),
}
if hasattr(tf.keras.losses, "Dice"):
    LOSSES_OF_BATCH["Dice of Keras"] = tf.keras.losses.Dice()

LOSSES_THAT_SUM = {
    "sum": lambda y, p: tf.reduce_sum((y - p) ** 2),
    "sum over a number": lambda y, p: tf.reduce_sum(tf.reduce_mean((y - p) ** 2, axis=-1)) / 8.0,
    "average of TensorFlow": lambda y, p: tf.nn.compute_average_loss((y - p)[:, 0] ** 2, global_batch_size=8),
}

LOSSES_BY_EXAMPLE = {
    "of Keras": "mse",
    "by element": lambda y, p: (y - p) ** 2,
    "overlap of each example": lambda y, p: 1.0 - overlap(y, p, axis=-1),
    "mean of overlaps": lambda y, p: 1.0 - tf.reduce_mean(overlap(y, p, axis=1)),
    "one number": lambda y, p: tf.reduce_mean(tf.abs(tf.reshape(y, [-1]) - tf.reshape(p, [-1]))),
    "sum by shape": lambda y, p: tf.reduce_sum((y - p) ** 2) / tf.cast(tf.shape(p)[0], tf.float32),
    "sum by size": lambda y, p: tf.reduce_sum((y - p) ** 2) / tf.cast(tf.size(p), tf.float32),
    "sum by ones": lambda y, p: tf.reduce_sum((y - p) ** 2) / tf.reduce_sum(tf.ones_like(p)),
    "object of Keras in it": lambda y, p: tf.keras.losses.MeanSquaredError()(y, p),
    "one row for each": lambda y, p: tf.gather_nd((y - p) ** 2, tf.range(tf.shape(p)[0])[:, None]),
    "in a map": lambda y, p: tf.map_fn(lambda one: tf.reduce_mean((one[0] - one[1]) ** 2), (y, p), dtype=tf.float32),
    "mean of means": lambda y, p: tf.reduce_mean([tf.reduce_mean((y - p) ** 2), tf.reduce_mean(tf.abs(y - p))]),
    "stopped": lambda y, p: tf.reduce_mean((y - p) ** 2) + tf.stop_gradient(tf.reduce_mean(p)),
}


def ends_of_cycles(loss, **options):
    """What is said in cycles of two batches, and how far from the full batch they end."""
    ended = []
    for accum_steps, batch_size in ((1, 8), (2, 4)):
        model = functional()
        model.set_weights([np.cos(np.arange(np.size(part))).reshape(np.shape(part)) for part in model.get_weights()])
        model = from_model(model, accum_steps, **options)
        model.compile(sgd(), loss)
        with warned(category=accum.InexactWarning) as said:
            model.fit(X, Y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
        ended.append(model.get_weights())
    return said, max(np.abs(one - other).max() for one, other in zip(*ended))


@pytest.mark.law("L1", "L17")
@pytest.mark.parametrize("kind", sorted(LOSSES_OF_BATCH) + sorted(LOSSES_THAT_SUM) + sorted(LOSSES_BY_EXAMPLE))
def test_a_compiled_loss_of_the_whole_batch_is_named_in_cycles(kind):
    """What is named ends elsewhere than at the full batch, and what is not ends there."""
    said, apart = ends_of_cycles(dict(LOSSES_OF_BATCH, **LOSSES_THAT_SUM, **LOSSES_BY_EXAMPLE)[kind])
    words = {"A compiled loss looks across": LOSSES_OF_BATCH, "A compiled loss adds up": LOSSES_THAT_SUM}
    found = [next((some for some in words if some in line), line) for line in said]
    assert found == [some for some, losses in words.items() if kind in losses]
    assert (apart > 1e-4) == (kind not in LOSSES_BY_EXAMPLE)


@pytest.mark.law("L1", "L17")
@pytest.mark.parametrize("kind", sorted(LOSSES_THAT_SUM))
def test_gradients_of_a_loss_that_adds_up_examples_may_be_added_up(kind):
    said, apart = ends_of_cycles(LOSSES_THAT_SUM[kind], reduction="sum", micro_batch_weight="equal")
    assert said == [] and apart < 2e-6


class Deviation(layers.Layer):
    """Adds how far the examples of a batch are apart to each, as the discriminators of some GANs do."""

    def call(self, inputs):
        return inputs + tf.sqrt(tf.reduce_mean((inputs - tf.reduce_mean(inputs, axis=0)) ** 2) + 1e-3)


class InPairs(layers.Layer):
    """Takes the features by twos. If all batches have one size, its graph takes that from a constant."""

    def call(self, inputs):
        pairs = tf.reshape(inputs, [tf.shape(inputs)[0], 2, 2])
        return tf.reshape(tf.tanh(pairs), [tf.shape(inputs)[0], 4])


@pytest.mark.law("L1", "L17")
@pytest.mark.parametrize("is_constant", [False, True], ids=["", "constant"])
@pytest.mark.parametrize("has_replicas", [False, True], ids=["", "replicas"])
@pytest.mark.parametrize("meets", [False, True], ids=["apart", "meets"])
def test_a_network_in_which_examples_meet_is_named_in_cycles(meets, has_replicas, is_constant):
    """What is named ends elsewhere than at the full batch, and what is not ends there."""
    ended = []
    for accum_steps, batch_size in ((1, 8), (2, 4)):
        with mirrored().scope() if has_replicas and accum_steps > 1 else contextlib.ExitStack():
            model = tf.keras.Sequential(
                [
                    tf.keras.Input((3,)),
                    layers.Dense(4),
                    InPairs(),
                    Deviation() if meets else layers.Activation("tanh"),
                    linear(),
                ]
            )
            weights = [np.cos(np.arange(np.size(part))).reshape(np.shape(part)) for part in model.get_weights()]
            model.set_weights(weights)
            model = from_model(model, accum_steps)
            model.compile(sgd(), "mse")
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch_size, drop_remainder=is_constant)
        with warned(category=accum.InexactWarning) as said:
            model.fit(data, epochs=2, verbose=0)
        ended.append(model.get_weights())
    assert ["examples of a batch meet in the network" in line for line in said] == [True] * meets
    assert (max(np.abs(one - other).max() for one, other in zip(*ended)) > 1e-4) == meets


class AveragingEachTime(Averaging):
    def train_step(self, data):
        logs = step_by_mean_square(self, self.optimizer, *data)
        self.average.assign(0.9 * tf.convert_to_tensor(self.average) + 0.1 * self.dense.kernel)
        return logs


def normalized():
    inputs = tf.keras.Input((3,))
    return tf.keras.Model(inputs, linear()(layers.BatchNormalization(momentum=0.5)(layers.Dense(3)(inputs))))


@pytest.mark.law("L2")
@pytest.mark.parametrize("run_eagerly", [False, True], ids=["traced", "eager"])
@pytest.mark.parametrize(
    "make, code", [(Averaging, None), (AveragingEachTime, "changed-variables"), (normalized, "batch-norm")]
)
def test_cycles_of_batches_that_are_split_are_watched_too(make, code, run_eagerly):
    """What is named ends elsewhere than at the full batch, and the average that asks for steps ends there."""
    ended = []
    for options, batch_size in (({}, 8), ({"accum_steps": 2, "micro_batch_size": 2}, 4)):
        model = make()
        model(X[:1])
        model.set_weights([np.cos(np.arange(np.size(part))).reshape(np.shape(part)) for part in model.get_weights()])
        model = from_model(model, options.pop("accum_steps", 1), **options)
        model.compile(sgd(), "mse", run_eagerly=run_eagerly)
        with warned(category=accum.InexactWarning) as said:
            model.fit(X, Y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
        ended.append(model.get_weights())
    codes = {line.split("[accum: ")[1].rstrip("]") for line in said} - {"python-once"}
    assert codes == ({code} if code else set())
    assert (max(np.abs(one - other).max() for one, other in zip(*ended)) > 1e-4) == (code is not None)


@pytest.mark.law("L14")
def test_no_warning_without_accumulation():
    assert not said_of_changes(from_model(with_layer(Counts), 1), run_eagerly=False)


# ----------------------------------------------------------------------------------------------------------------
# Gradients that are changed before an optimizer accumulates them


class Changing(Own):
    """Applies what `change` makes of its gradients."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        grads = self.change(tape.gradient(loss, self.trainable_variables))
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        return {"loss": loss}


def clipped(grads):
    return tf.clip_by_global_norm(grads, 0.1)[0]


def clipped_together(grads_and_vars):
    return list(zip(clipped([grad for grad, _ in grads_and_vars]), [var for _, var in grads_and_vars]))


NONLINEAR = {
    "global norm": clipped,
    "norm": lambda grads: [tf.clip_by_norm(grad, 0.1) for grad in grads],
    "value": lambda grads: [tf.clip_by_value(grad, -0.01, 0.01) for grad in grads],
    "sign": lambda grads: [tf.sign(grad) for grad in grads],
}
LINEAR = {
    "nothing": lambda grads: grads,
    "scaled": lambda grads: [0.5 * grad / 3.0 for grad in grads],
    "finite": lambda grads: [tf.where(tf.math.is_finite(grad), grad, tf.zeros_like(grad)) for grad in grads],
}
CHANGED = "gradients of each micro-batch are changed after they are computed"


def changing(change, wrap=lambda model: model, batch_size=8, optimizer=sgd, **options):
    model = Changing(change)
    model(X[:1])
    model.set_weights([np.cos(np.arange(6)).reshape(3, 2)])
    model = wrap(model)
    model.compile(optimizer(), **options)
    with warned(CHANGED, accum.InexactWarning) as said:
        for _ in range(2):
            model.fit(X, Y, batch_size=batch_size, shuffle=False, verbose=0)
    return model.get_weights()[0], said


@pytest.mark.law("L7", "L17")
@pytest.mark.parametrize("kind", NONLINEAR)
def test_gradients_that_a_train_step_clips_per_micro_batch_are_named_once(kind):
    weights, said = changing(NONLINEAR[kind], lambda model: from_model(model, 2), 4)
    assert len(said) == 1
    assert np.abs(weights - changing(NONLINEAR[kind])[0]).max() > 1e-4


@pytest.mark.law("L7", "L17")
def test_what_that_warning_advises_is_exact():
    full, _ = changing(clipped)
    for change, options, batch_size in (
        (clipped, {"micro_batch_size": 4}, 8),
        (LINEAR["nothing"], {"accum_steps": 2, "transform": clipped_together}, 4),
    ):
        weights, said = changing(change, functools.partial(from_model, **options), batch_size)
        assert not said
        np.testing.assert_allclose(weights, full, rtol=0, atol=2e-6)


@pytest.mark.law("L7")
@pytest.mark.parametrize("kind", LINEAR)
def test_gradients_that_are_scaled_or_left_out_are_not_named(kind):
    assert not changing(LINEAR[kind], lambda model: from_model(model, 2), 4)[1]


@pytest.mark.law("L7", "L17")
def test_gradients_that_a_loop_clips_are_named():
    optimizer, var = accum.GradientAccumulateOptimizer(sgd(), 2), tf.Variable([1.0, 2.0])

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x * var) ** 2)
        optimizer.apply_gradients([(tf.clip_by_norm(tape.gradient(loss, var), 0.1), var)])

    with warned(CHANGED, accum.InexactWarning) as said:
        step(tf.ones([4, 2]))
    assert len(said) == 1
