"""A `LossScaleOptimizer` stands around the accumulating optimizer (law L10)."""

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_near
from loss_scales import HAS_PUBLIC_CLASS, apply_scaled, loss_scale_optimizer, scaled_loss
from optimizers import EAGER_AND_TRACED, decays, families, legacy_family, mainly
from versions import IS_KERAS_3

import accum
import accum.testing

pytestmark = pytest.mark.tf("2.2")


@pytest.mark.slow
@pytest.mark.law("L10")
@pytest.mark.parametrize("index", mainly([None, 0, 1, 2], 1))
@pytest.mark.parametrize("is_traced", EAGER_AND_TRACED)
@pytest.mark.parametrize("family", families())
def test_each_micro_batch_is_unscaled_and_an_overflow_takes_one_more(family, is_traced, index):
    variable = tf.Variable([0.0])
    optimizer = loss_scale_optimizer(accum.GradientAccumulateOptimizer(family.SGD(1.0), accum_steps=3), 1024.0)

    def micro_step(factor):
        with tf.GradientTape() as tape:
            loss = scaled_loss(optimizer, tf.reduce_sum(variable * factor))
        apply_scaled(optimizer, tape.gradient(loss, [variable]), [variable])

    micro_step = tf.function(micro_step) if is_traced else micro_step
    factors = [1.0, 2.0, 6.0]
    if index is not None:
        factors.insert(index, np.inf)
    for factor in factors:
        micro_step(tf.constant(factor))
    np.testing.assert_array_equal(variable.numpy(), [-3.0])


@pytest.mark.slow
@pytest.mark.law("L8", "L10")
@pytest.mark.parametrize("is_traced", EAGER_AND_TRACED)
@pytest.mark.parametrize("family", families())
def test_a_variable_without_a_gradient_stays_inside_a_loss_scale(family, is_traced):
    used, unused = tf.Variable([0.0]), tf.Variable([5.0])
    optimizer = loss_scale_optimizer(accum.GradientAccumulateOptimizer(family.SGD(1.0), accum_steps=2), 4.0)

    def micro_step():
        apply_scaled(optimizer, [tf.constant([4.0]), None], [used, unused])

    micro_step = tf.function(micro_step) if is_traced else micro_step
    for _ in range(4):
        micro_step()
    np.testing.assert_array_equal([used.numpy(), unused.numpy()], [[-2.0], [5.0]])


def set_policy(name):
    if HAS_PUBLIC_CLASS:
        tf.keras.mixed_precision.set_global_policy(name)
    else:
        tf.keras.mixed_precision.experimental.set_policy(name)


@pytest.fixture
def mixed_float16():
    set_policy("mixed_float16")
    yield
    set_policy("float32")


@pytest.fixture
def mixed_bfloat16():
    set_policy("mixed_bfloat16")
    yield
    set_policy("float32")


def trained(batch_size, accum_steps, optimizer):
    random = np.random.RandomState(0)
    x, y = 0.1 * random.normal(size=(40, 4)).astype("float32"), 0.1 * random.normal(size=(40, 1)).astype("float32")
    inputs = tf.keras.Input((4,))
    hidden = tf.keras.layers.Dense(6, activation="tanh", use_bias=False)(inputs)
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1, dtype="float32")(hidden))
    if accum_steps:
        model = accum.GradientAccumulateModel(accum_steps, inputs=model.inputs, outputs=model.outputs)
    model.compile(optimizer, "mse", run_eagerly=not accum_steps)  # the oracle need not be traced
    model.set_weights([0.1 * random.normal(size=weight.shape) for weight in model.get_weights()])
    model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 4  # so none overflowed
    return model.get_weights()


@pytest.mark.slow
@pytest.mark.law("L1", "L10")
@pytest.mark.parametrize("is_explicit", [False, True], ids=["by compile", "by the user"])
@pytest.mark.parametrize("family", families())
def test_fit_under_the_float16_policy_equals_the_full_batch(mixed_float16, family, is_explicit):
    def optimizer():
        inner = family.SGD(0.05, momentum=0.9)
        return loss_scale_optimizer(inner, 256.0) if is_explicit else inner

    assert_near(trained(5, 4, optimizer()), trained(20, None, optimizer()), atol=3e-4)


@pytest.mark.slow
@pytest.mark.law("L1", "L10")
def test_fit_under_the_bfloat16_policy_equals_the_full_batch(mixed_bfloat16):
    """Nothing scales the loss there. bfloat16 rounds each micro-batch's gradients, by up to 2^-9 of them."""
    assert_near(trained(5, 4, "sgd"), trained(20, None, "sgd"), atol=3e-4)


X = np.random.RandomState(0).normal(size=(20, 3)).astype("float32")
Y = np.random.RandomState(1).normal(size=(20, 1)).astype("float32")
GOOD = [slice(start, start + 4) for start in range(0, 20, 4)]


def beside(batch_norm):
    """A model that learns beside a batch normalisation of its inputs."""
    inputs = tf.keras.Input((3,))
    outputs = [tf.keras.layers.Dense(1, dtype="float32")(inputs), batch_norm(inputs)]
    model = tf.keras.Model(inputs, outputs)
    random = np.random.RandomState(2)
    model.set_weights([random.normal(size=weight.shape) for weight in model.get_weights()[:-1]] + [np.ones(3)])
    return model


def examples(parts):
    """Micro-batches one by one; None stands for one whose loss overflows, with inputs that would be noticed."""
    for part in parts:
        x, y = (X[:4] + 100.0, Y[:4] + np.inf) if part is None else (X[part], Y[part])
        yield x, (y, x)


@pytest.mark.slow
@pytest.mark.law("L10", "L13")
@pytest.mark.parametrize("family", families())
def test_an_overflow_at_any_place_of_a_cycle_leaves_no_trace_in_fit(mixed_float16, family):
    """Neither in the weights nor in batch normalisation; and the last cycle, which it leaves unfinished, is flushed."""
    ours = accum.GradientAccumulateOptimizer(family.SGD(0.05, momentum=0.9), accum_steps=2)
    model = accum.GradientAccumulateModel.from_model(beside(accum.AccumBatchNormalization(momentum=0.5)), 2)
    model.compile(loss_scale_optimizer(ours, 256.0), ["mse", None])
    parts = [None] + GOOD[:2] + [GOOD[2], None, GOOD[3]] + [GOOD[4], None]
    types, shapes = (tf.float32, (tf.float32, tf.float32)), ([4, 3], ([4, 1], [4, 3]))
    model.fit(tf.data.Dataset.from_generator(lambda: examples(parts), types, shapes), verbose=0)
    assert all(total.dtype == tf.float32 for total in ours.gradients)
    full = beside(tf.keras.layers.BatchNormalization(momentum=0.5))
    full.compile(loss_scale_optimizer(family.SGD(0.05, momentum=0.9), 256.0), ["mse", None], run_eagerly=True)
    for rows in (slice(0, 8), slice(8, 16), slice(16, 20)):
        full.train_on_batch(X[rows], [Y[rows], X[rows]])
    assert_near(model.get_weights(), full.get_weights(), atol=3e-4)


def trained_as_compiled(optimizer, how):
    """The weights after two batches of 20, accumulated from five parts each; or whole, where `how` is None."""
    random = np.random.RandomState(0)
    model = tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=(3,)), tf.keras.layers.Dense(1)])
    model.set_weights([1.0 + 0.1 * random.normal(size=weight.shape) for weight in model.get_weights()])
    if how == "compile":
        model = accum.GradientAccumulateModel.from_model(model, 5)
    model.compile(optimizer, "mse")
    if how == "from_model":
        model = accum.GradientAccumulateModel.from_model(model, 5)
    model.fit(X, Y, batch_size=4 if how else 20, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


class WithoutConfig(tf.keras.optimizers.schedules.LearningRateSchedule if hasattr(tf.keras, "optimizers") else object):
    """A schedule as tutorials write it."""

    def __call__(self, step):
        return 0.1 / (1.0 + tf.cast(step, tf.float32))


@pytest.mark.slow
@pytest.mark.law("L1", "L10")
@pytest.mark.parametrize("how", ["compile", "from_model"])
@pytest.mark.parametrize("family", families())
def test_a_schedule_without_a_config_works_within_a_loss_scale(family, how):
    def optimizer():
        return loss_scale_optimizer(family.SGD(WithoutConfig(), momentum=0.9), 64.0)

    assert_near(trained_as_compiled(optimizer(), how), trained_as_compiled(optimizer(), None))


@pytest.mark.tf("2.10", because="`exclude_from_weight_decay` came with TF 2.10")
@pytest.mark.slow
@pytest.mark.law("L1", "L10")
@pytest.mark.parametrize("how", ["compile", "from_model"])
@pytest.mark.parametrize("make", decays()[:1])
def test_what_is_excluded_from_weight_decay_does_not_decay_within_a_loss_scale(make, how):
    def optimizer(excluded):
        made = make()
        if excluded:
            made.exclude_from_weight_decay(var_names=["bias"])
        return loss_scale_optimizer(made, 64.0)

    ours, full = trained_as_compiled(optimizer(True), how), trained_as_compiled(optimizer(True), None)
    assert_near(ours, full)
    assert np.abs(full[1] - trained_as_compiled(optimizer(False), None)[1]).max() > 1e-3


def halving(factor):
    """An optimizer of a class that has an attribute which no config tells."""
    base = tf.keras.optimizers.SGD

    class Halving(base):
        factor = 1.0

        if IS_KERAS_3:

            def apply(self, grads, *args, **kwargs):
                return super().apply([self.factor * grad for grad in grads], *args, **kwargs)

        else:

            def apply_gradients(self, grads_and_vars, *args, **kwargs):
                changed = [(self.factor * grad, var) for grad, var in grads_and_vars]
                return super().apply_gradients(changed, *args, **kwargs)

    optimizer = Halving(0.1)
    optimizer.factor = factor
    return optimizer


def transforming(factor):
    change = lambda grads_and_vars: [(factor * grad, var) for grad, var in grads_and_vars]
    return legacy_family().SGD(0.1, gradient_transformers=[change])


TRANSFORMERS = pytest.mark.tf("2.4", because="there are no `gradient_transformers` before")


@pytest.mark.law("L1", "L10")
@pytest.mark.parametrize("how", ["compile", "from_model"])
@pytest.mark.parametrize(
    "make", [halving, pytest.param(transforming, marks=TRANSFORMERS)], ids=["attribute", "transformers"]
)
def test_what_no_config_tells_is_that_of_the_optimizer_within_a_loss_scale(make, how):
    if make is transforming and IS_KERAS_3:
        pytest.skip("optimizers of Keras 3 take no `gradient_transformers`")
    ours, full = (trained_as_compiled(loss_scale_optimizer(make(0.5), 64.0), way) for way in (how, None))
    assert_near(ours, full)
    assert np.abs(full[0] - trained_as_compiled(loss_scale_optimizer(make(1.0), 64.0), None)[0]).max() > 1e-3


@pytest.mark.law("L17")
@pytest.mark.tf("2.2", keras=2, because="an optimizer of Keras 3 is not made anew")
def test_an_optimizer_that_can_t_be_made_from_its_config_is_refused_by_name():
    class Scaled(tf.keras.optimizers.SGD):
        def __init__(self, factor, **kwargs):
            super().__init__(**kwargs)
            self.factor = factor

    model = accum.GradientAccumulateModel.from_model(tf.keras.Sequential([tf.keras.layers.Dense(1)]), 2)
    with pytest.raises(ValueError, match="let `get_config` return all arguments of its class.*loss-scale"):
        model.compile(loss_scale_optimizer(Scaled(0.5), 64.0), "mse")


@pytest.mark.law("L17")
@pytest.mark.parametrize("family", families())
def test_the_learning_rate_may_be_set_by_the_optimizer_that_was_passed(mixed_float16, family):
    """As callbacks do that have it; Keras puts a loss scale around it, and Keras 2 has to make another one."""
    optimizer = family.SGD(0.1)
    model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    model = accum.GradientAccumulateModel.from_model(model, micro_batch_size=5)
    optimizer.learning_rate.assign(0.0)
    before = model.get_weights()
    model.fit(0.01 * X, 0.01 * Y, batch_size=20, verbose=0)  # which does not overflow
    np.testing.assert_array_equal(model.get_weights()[0], before[0])
    optimizer.learning_rate.assign(0.1)
    model.fit(0.01 * X, 0.01 * Y, batch_size=20, verbose=0)
    assert np.abs(model.get_weights()[0] - before[0]).max() > 1e-6


@pytest.mark.law("L10")
def test_a_loss_scale_inside_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="has to be outermost"):
        accum.GradientAccumulateOptimizer(loss_scale_optimizer(tf.keras.optimizers.SGD(1.0), 2.0), accum_steps=2)


@pytest.mark.law("L17")
@pytest.mark.parametrize("family", families())
def test_a_loss_scale_that_has_made_steps_is_not_made_anew_in_silence(family):
    optimizer, variable = loss_scale_optimizer(family.SGD(1.0), 4.0), tf.Variable([0.0])
    apply_scaled(optimizer, [tf.constant([4.0])], [variable])
    np.testing.assert_array_equal(variable.numpy(), [-1.0])
    model = accum.GradientAccumulateModel.from_model(tf.keras.Sequential([tf.keras.layers.Dense(1)]), 2)
    with pytest.raises(ValueError, match="has made steps"):
        model.compile(optimizer, tf.keras.losses.MeanSquaredError())


@pytest.mark.slow
def test_a_recording_has_the_steps_that_a_loss_scale_lets_through(tmp_path):
    model = accum.GradientAccumulateModel.from_model(tf.keras.Sequential([tf.keras.layers.Dense(1)]), 2)
    model.build((None, 3))
    model.compile(loss_scale_optimizer(tf.keras.optimizers.SGD(0.1), 4.0), tf.keras.losses.MeanSquaredError())
    with accum.testing.record(tmp_path / "a.json") as recorder:
        callbacks = [recorder.keras_callback()]
        model.fit(np.ones((8, 3)), np.ones((8, 1)), batch_size=2, verbose=0, callbacks=callbacks)
    comparison = accum.testing.compare(recorder.path, recorder.path)
    assert comparison.steps == [0, 1, 2]


class Own(tf.keras.Model):
    """A train step that scales its loss, as guides write it."""

    def __init__(self):
        super().__init__()
        self.hidden = tf.keras.layers.Dense(6, activation="tanh")
        self.out = tf.keras.layers.Dense(1, dtype="float32")

    def call(self, inputs):
        return self.out(self.hidden(inputs))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            scaled = scaled_loss(self.optimizer, loss)
        apply_scaled(self.optimizer, tape.gradient(scaled, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def overflowing(overflow):
    """Three batches of 20; in the second, one example overflows: always, or as long as the scale is not halved."""
    targets = np.tile(Y, [3, 1])
    targets[37] = np.inf if overflow == "data" else 60.0
    return np.tile(X, [3, 1]), targets


def scales_and_weights(steps, overflow, scale, **options):
    """Return the scale after each batch, and the weights at the end."""
    model = Own()
    if steps == "keras":
        model = tf.keras.Sequential([tf.keras.Input((3,)), model.hidden, model.out])
    model(X)
    model.set_weights([np.random.RandomState(4).normal(size=one.shape) for one in model.get_weights()])
    if options:
        model = accum.GradientAccumulateModel.from_model(model, **options)
    jit = {"jit_compile": False} if IS_KERAS_3 else {}
    optimizer = loss_scale_optimizer(tf.keras.optimizers.SGD(0.01, momentum=0.9), scale)
    model.compile(optimizer, **jit, **({"loss": "mse"} if steps == "keras" else {}))
    scales = []

    def note(batch, logs):
        scales.append(float(model.optimizer.dynamic_scale if IS_KERAS_3 else model.optimizer.loss_scale))

    told = [tf.keras.callbacks.LambdaCallback(on_train_batch_end=note)]
    model.fit(*overflowing(overflow), batch_size=20, epochs=2, shuffle=False, verbose=0, callbacks=told)
    return scales, model.get_weights()


@pytest.mark.tf("2.4", because="`LossScaleOptimizer` is public from then on")
@pytest.mark.law("L10", "L21")
@pytest.mark.parametrize(
    "case", [("own", "data", 2.0**8), ("own", "scale", 2.0**14), ("keras", "data", 2.0**8)], ids=str
)
def test_a_micro_batch_that_overflows_skips_the_step_and_halves_the_scale_like_the_full_batch(mixed_float16, case):
    """With Keras' own step, only if no scale is too large: the loss of a micro-batch is divided by fewer examples."""
    scales, weights = scales_and_weights(*case, micro_batch_size=6)
    expected_scales, expected = scales_and_weights(*case)
    assert scales == expected_scales and scales[0] == 2 * scales[1] == case[-1]
    assert_near(weights, expected, atol=3e-4)


def scaled_model(family):
    model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
    model = accum.GradientAccumulateModel.from_model(model, micro_batch_size=5)
    model.compile(loss_scale_optimizer(family.SGD(0.5), 64.0), "mse")
    model.fit(X, Y, batch_size=20, verbose=0)
    return model


@pytest.mark.law("L12")
@pytest.mark.parametrize("family", families())
def test_a_learning_rate_that_was_set_is_restored(tmp_path, family):
    model, other = scaled_model(family), scaled_model(family)
    model.optimizer.learning_rate = 0.25
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "at"))
    status = tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
    status.assert_existing_objects_matched()
    np.testing.assert_allclose(float(tf.convert_to_tensor(other.optimizer.learning_rate)), 0.25)
