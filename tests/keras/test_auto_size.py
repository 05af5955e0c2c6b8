"""`micro_batch_size="auto"` loses nothing when memory runs out, and ends as a run that began at that size (law L18)."""

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_identical, assert_near
from replicas import mirrored
from versions import IS_KERAS_3, TF_VERSION
from warned import silent, warned

import accum

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.law("L18"), pytest.mark.slow]

layers = tf.keras.layers
RANDOM = np.random.RandomState(0)
X, Y = RANDOM.normal(size=(44, 3)).astype("float32"), RANDOM.normal(size=(44, 2)).astype("float32")
BATCH = 20
JIT = {"jit_compile": False} if IS_KERAS_3 else {}  # XLA compiles no `py_function`


TRACED_AND_EAGER = [pytest.param(False, id="traced", marks=pytest.mark.slow), pytest.param(True, id="eager")]


class Memory(layers.Layer):
    """A device that holds `examples` examples at once in the pass `fails_in`: more raise what TensorFlow would."""

    examples = 1000
    fails_in = "forward"

    def call(self, inputs):
        if self.fails_in == "backward":
            return _failing_backwards(inputs)
        with tf.control_dependencies([_need_memory(inputs)]):
            return tf.ensure_shape(tf.identity(inputs), inputs.shape)


def _need_memory(tensor):
    def allocate(count):
        if int(count) > Memory.examples:
            raise MemoryError("injected")

    return tf.py_function(allocate, [tf.shape(tensor)[0]], [])


@tf.custom_gradient
def _failing_backwards(inputs):
    def grad(upstream):
        with tf.control_dependencies([_need_memory(upstream)]):
            return tf.identity(upstream)

    return tf.identity(inputs), grad


@pytest.fixture(autouse=True)
def memory():
    yield Memory
    Memory.examples, Memory.fails_in = 1000, "forward"


def model_of(micro_batch_size, draws=True, **options):
    """A model with everything that a forward pass changes, and little to trace."""
    of_statistics = {"momentum": 0.5, "center": False, "scale": False}
    inputs = tf.keras.Input((3,))
    hidden = layers.Dense(4, activation="tanh", use_bias=False)(inputs)
    hidden = accum.AccumBatchNormalization(**of_statistics)(hidden)
    if draws:
        hidden = layers.GaussianNoise(0.1, **({"seed": 3} if IS_KERAS_3 else {}))(layers.Dropout(0.4, seed=7)(hidden))
    hidden = Memory()(hidden)
    outputs = layers.Dense(2, use_bias=False)(layers.BatchNormalization(**of_statistics)(hidden))
    plain = tf.keras.Model(inputs, outputs)
    random = np.random.RandomState(1)
    plain.set_weights([0.5 * np.abs(random.normal(size=np.shape(weight))) for weight in plain.get_weights()])
    return accum.GradientAccumulateModel.from_model(plain, micro_batch_size=micro_batch_size, **options)


def small():
    """One kernel behind the memory: a trace of few operations, for what is not about the state of layers."""
    inputs = tf.keras.Input((3,))
    plain = tf.keras.Model(inputs, layers.Dense(2)(Memory()(inputs)))
    return accum.GradientAccumulateModel.from_model(plain, micro_batch_size="auto")


def loss_scale_around(optimizer):
    return tf.keras.mixed_precision.LossScaleOptimizer(optimizer) if TF_VERSION >= (2, 4) else optimizer


def run(model, loss_scale=False, **options):
    tf.random.set_seed(5)
    made = tf.keras.optimizers.Adam(0.05)
    model.compile(loss_scale_around(made) if loss_scale else made, "mse", metrics=["mae"], **dict(JIT, **options))
    logs = model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    logs.pop("lr", None)
    return [var.numpy() for var in model.weights], logs


def assert_same_bits(one, other):
    assert_identical(one[0], other[0])
    assert one[1] == other[1]


@pytest.mark.parametrize(
    "eagerly, fails_in, loss_scale",
    [(False, "forward", True), (False, "backward", False), (True, "forward", False), (True, "backward", True)],
    ids=["traced-forward-loss scale", "traced-backward", "eager-forward", "eager-backward-loss scale"],
)
@pytest.mark.filterwarnings("ignore:With `whole_batch=\\(\\)`")
def test_the_run_ends_as_one_that_began_at_the_size_that_fits(memory, eagerly, fails_in, loss_scale):
    # Eagerly, a whole batch draws other numbers when it is tried again, and in Keras 2 so does a micro-batch.
    options = {"whole_batch": (), "draws": IS_KERAS_3} if eagerly else {}
    tf.random.set_seed(5)
    began = run(model_of(5, **options), loss_scale, run_eagerly=eagerly)
    tf.random.set_seed(5)
    model = model_of("auto", **options)
    memory.examples, memory.fails_in = 9, fails_in
    with pytest.warns(UserWarning, match="Memory ran out, so `micro_batch_size` is 5 from now on"):
        ended = run(model, loss_scale, run_eagerly=eagerly)
    assert model.micro_batch_size == 5
    assert_same_bits(ended, began)


def test_where_memory_suffices_the_whole_batch_is_computed_at_once():
    tf.random.set_seed(5)
    whole = run(model_of(1000))
    tf.random.set_seed(5)
    model = model_of("auto")
    with silent():
        assert_same_bits(run(model), whole)
    assert model.micro_batch_size == "auto"


class Seen(layers.Layer):
    """Notes what comes by."""

    values = []

    def call(self, inputs):
        noted = tf.py_function(lambda tensor: self.values.append(tensor.numpy()), [inputs], [])
        with tf.control_dependencies([noted]):
            return tf.ensure_shape(tf.identity(inputs), inputs.shape)


@pytest.mark.filterwarnings("ignore:Eagerly, dropout and noise draw")
def test_alpha_dropout_gives_the_two_values_of_keras():
    def values_of(size):
        inputs = tf.keras.Input((1,))
        model = tf.keras.Model(inputs, layers.Dense(1)(Seen()(layers.AlphaDropout(0.4)(inputs))))
        if size is not None:
            model = accum.GradientAccumulateModel.from_model(model, micro_batch_size=size)
        model.compile("sgd", "mse", run_eagerly=True)
        Seen.values.clear()
        model.fit(np.ones((64, 1)), np.ones((64, 1)), batch_size=64, verbose=0)
        return np.unique(np.concatenate(Seen.values).round(4))

    expected = values_of(None)
    assert len(expected) == 2
    np.testing.assert_allclose(values_of("auto"), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("eagerly", TRACED_AND_EAGER)
def test_it_says_so_once_and_halves_again_later(memory, eagerly):
    model = small()
    model.compile("sgd", "mse", run_eagerly=eagerly, **JIT)
    memory.examples = 12
    with pytest.warns(UserWarning) as first:
        model.fit(X, Y, batch_size=BATCH, verbose=0)
    memory.examples = 3
    with pytest.warns(UserWarning) as second:
        model.fit(X, Y, batch_size=BATCH, verbose=0)
    said = [[str(each.message) for each in record if "Memory" in str(each.message)] for record in (first, second)]
    assert [len(lines) for lines in said] == [1, 1]
    assert "is 10 from" in said[0][0] and "is 2 from" in said[1][0]


@pytest.mark.tf("2.11", because="losses divide by all elements")
def test_outputs_that_divide_by_different_numbers_are_warned_of_once_micro_batches_are_smaller(memory):
    inputs = tf.keras.Input((3,), dtype="int32")
    hidden = layers.Embedding(5, 2, mask_zero=True)(inputs)
    outputs = [layers.Dense(1, name="masked")(hidden), layers.Dense(1, name="plain")(Memory()(hidden))]
    options = {"micro_batch_size": "auto", "whole_batch": ()}
    model = accum.GradientAccumulateModel.from_model(tf.keras.Model(inputs, outputs), **options)
    model.compile("sgd", ["mse", "mse"], run_eagerly=True, **JIT)
    targets = [X[:, :, np.newaxis]] * 2
    said = []
    for examples in (1000, 12, 3):
        memory.examples = examples
        with warned() as caught:
            model.fit(np.arange(132).reshape(44, 3) % 5, targets, batch_size=BATCH, verbose=0)
        lines = [each for each in caught if "With `whole_batch=()`" not in each]
        said.append(["'masked'" in line for line in lines if "losses" in line])
    assert said == [[], [True], []]


@pytest.mark.parametrize("eagerly", TRACED_AND_EAGER)
def test_evaluation_and_prediction_halve_too(memory, eagerly):
    model = small()
    model.compile("sgd", "mse", metrics=["mae"], run_eagerly=eagerly, **JIT)
    whole = model.evaluate(X, Y, batch_size=BATCH, verbose=0), model.predict(X, batch_size=BATCH, verbose=0)
    memory.examples = 12
    with pytest.warns(UserWarning, match="is 10 from now on"):
        np.testing.assert_allclose(model.evaluate(X, Y, batch_size=BATCH, verbose=0), whole[0], rtol=2e-5)
    memory.examples = 6
    with pytest.warns(UserWarning, match="is 5 from now on"):
        np.testing.assert_allclose(model.predict(X, batch_size=BATCH, verbose=0), whole[1], atol=2e-6)


@pytest.mark.parametrize("eagerly", TRACED_AND_EAGER)
def test_a_single_example_that_does_not_fit_is_an_error_in_words(memory, eagerly):
    model = model_of("auto")
    model.compile("sgd", "mse", run_eagerly=eagerly, **JIT)
    before = [var.numpy() for var in model.weights]
    memory.examples = 0
    with pytest.raises(RuntimeError, match="one example at a time"):
        model.fit(X[:4], Y[:4], batch_size=2, verbose=0)  # each halving is another trace
    for mine, theirs in zip(before, model.weights):
        np.testing.assert_array_equal(mine, theirs.numpy())


class FailingStep(tf.keras.optimizers.SGD):
    """Runs out of memory while it updates."""

    def fail(self):
        raise tf.errors.ResourceExhaustedError(None, None, "injected")

    def apply_gradients(self, *args, **kwargs):
        self.fail()

    def apply(self, *args, **kwargs):
        self.fail()


def test_memory_that_runs_out_while_the_optimizer_works_is_an_error_in_words():
    model = small()
    model.compile(FailingStep(0.1), "mse", run_eagerly=True)
    with pytest.raises(RuntimeError, match="while the optimizer made its step"):
        model.fit(X, Y, batch_size=BATCH, verbose=0)


def test_an_error_of_another_kind_is_raised_as_it_is():
    class Broken(layers.Layer):
        def call(self, inputs):
            raise ValueError("broken on purpose")

    model = accum.GradientAccumulateModel.from_model(tf.keras.Sequential([Broken()]), micro_batch_size="auto")
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(Exception, match="broken on purpose"):
        model.fit(X, Y, batch_size=BATCH, verbose=0)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.tf("2.4", because="`steps_per_execution` came with 2.4")
def test_steps_and_callbacks_are_those_of_plain_training(steps):
    def calls_of(model):
        calls = []
        note = tf.keras.callbacks.LambdaCallback(on_batch_end=lambda batch, logs: calls.append(batch))
        model.compile("sgd", "mse", steps_per_execution=steps, **JIT)
        model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[note])
        return calls, int(model.optimizer.iterations)

    plain = tf.keras.Sequential([layers.Dense(2)])
    plain(X[:1])
    ours = accum.GradientAccumulateModel.from_model(plain, micro_batch_size="auto")
    assert calls_of(ours) == calls_of(tf.keras.models.clone_model(plain))


def test_replicas_agree_on_a_size(memory):
    def trained(size):
        with mirrored().scope():
            tf.random.set_seed(5)
            model = model_of(size)
        model.compile("sgd", "mse", **JIT)
        logs = model.fit(X[:40], Y[:40], batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
        return model, ([var.numpy() for var in model.weights], logs)

    began = trained(5)[1]
    memory.examples = 6  # of the 10 of each replica
    with pytest.warns(UserWarning, match="is 5 from now on"):
        model, ended = trained("auto")
    assert model.micro_batch_size == 5
    assert_near(ended[0], began[0], rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("memory_limit, is_said", [(None, False), (1, True)], ids=["fits", "split"])
def test_batch_norm_beside_a_loss_of_the_whole_batch_is_warned_of_when_a_batch_is_split(memory_limit, is_said, recwarn):
    norm = [tf.keras.layers.Dense(3), tf.keras.layers.BatchNormalization(), tf.keras.layers.Dense(1)]
    plain = tf.keras.Sequential([tf.keras.Input((3,))] + norm)
    options = {"micro_batch_size": "auto", "whole_batch": "loss", "memory_limit": memory_limit}
    model = accum.GradientAccumulateModel.from_model(plain, **options)
    model.compile("sgd", "mse")
    model.fit(np.ones([8, 3], "float32"), np.ones([8, 1], "float32"), batch_size=8, verbose=0)
    said = [one for one in recwarn if "Batch normalization updates its moving statistics" in str(one.message)]
    assert bool(said) == is_said
