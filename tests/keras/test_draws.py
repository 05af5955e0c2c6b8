"""Random numbers belong to the example (law L20).

In Keras 3, the oracle is plain Keras at the full batch, with dropout on. Keras 2 has kernels whose state nobody can
read, so there a run with all examples at once is compared with the same run in parts.
"""

import random
import warnings

import numpy as np
import pytest
import tensorflow as tf
from replicas import mirrored
from versions import IS_KERAS_3, TF_VERSION
from warned import silent, warned

import accum
import accum.compat.v1
import accum.testing

pytestmark = [pytest.mark.law("L20")]

ROWS = np.random.RandomState(0)
X, Y = ROWS.normal(size=(40, 6)).astype("float32"), ROWS.normal(size=(40, 1)).astype("float32")
BATCH = 16  # 40 examples are 16, 16 and 8

layers = tf.keras.layers


def set_seeds(seed, anew=False):
    if IS_KERAS_3 and anew:
        tf.keras.backend.clear_session()  # also the seed that Keras keeps for layers without one
    if IS_KERAS_3:
        tf.keras.utils.set_random_seed(seed)
    random.seed(seed)  # some Keras seed their initializers by it
    np.random.seed(seed)
    tf.random.set_seed(seed)


def noisy():
    inputs = tf.keras.Input((6,))
    hidden = layers.Dropout(0.4)(layers.Dense(16, activation="relu")(inputs))
    hidden = layers.GaussianNoise(0.3)(layers.Dense(7)(hidden))
    hidden = layers.AlphaDropout(0.3)(layers.GaussianDropout(0.2)(hidden))
    return tf.keras.Model(inputs, layers.Dense(1)(hidden))


def attentive():
    inputs = tf.keras.Input((6,))
    hidden = layers.Reshape((4, 3))(layers.Dense(12)(inputs))
    hidden = layers.SpatialDropout1D(0.3)(layers.MultiHeadAttention(2, 4, dropout=0.3)(hidden, hidden))
    return tf.keras.Model(inputs, layers.Dense(1)(layers.Flatten()(hidden)))


def recurrent():
    inputs = tf.keras.Input((6,))
    hidden = layers.Reshape((5, 3))(layers.Dense(15)(inputs))
    return tf.keras.Model(inputs, layers.Dense(1)(layers.LSTM(4, dropout=0.3, recurrent_dropout=0.2)(hidden)))


def augmented():
    inputs = tf.keras.Input((6,))
    hidden = layers.Reshape((4, 4, 3))(layers.Dense(48)(inputs))
    for layer in (layers.RandomFlip(), layers.RandomContrast(0.5), layers.RandomRotation(0.2), layers.RandomZoom(0.2)):
        hidden = layer(hidden)
    return tf.keras.Model(inputs, layers.Dense(1)(layers.Flatten()(hidden)))


def shifted(*more):
    """A layer of the user's that draws by the seed that Keras keeps for what has none."""
    import keras

    class Shift(layers.Layer):
        def call(self, inputs):
            return inputs + keras.random.truncated_normal(tf.shape(inputs)) + keras.random.normal(tf.shape(inputs))

    inputs = tf.keras.Input((6,))
    hidden = Shift()(layers.Dense(5)(inputs))
    for layer in more:
        hidden = layer(hidden)
    return tf.keras.Model(inputs, layers.Dense(1)(hidden))


def unseeded():
    return shifted()


def seeded_too():
    return shifted(layers.Dropout(0.3, seed=5))


def reordered():
    """Each example beside another one of the batch, as in mixup."""
    import keras

    class Reordered(layers.Layer):
        def call(self, inputs):
            return inputs + tf.tanh(keras.random.shuffle(inputs, seed=seeds))

    seeds = keras.random.SeedGenerator(4)
    inputs = tf.keras.Input((6,))
    return tf.keras.Model(inputs, layers.Dense(1)(Reordered()(layers.Dense(5)(inputs))))


def trained(make, accum_steps=1, replicas=1, seed=3, plain=False, compile_with=(), batch_size=BATCH, **options):
    set_seeds(7, anew=True)
    strategy = mirrored() if replicas == 2 else tf.distribute.get_strategy()
    with strategy.scope():
        model = make()
        if not plain:
            model = accum.GradientAccumulateModel.from_model(model, accum_steps=accum_steps, **options)
        model.compile(tf.keras.optimizers.SGD(0.1), "mse", **dict(compile_with))
    set_seeds(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a batch of one part; an epoch that ends within a cycle
        model.fit(X, Y, batch_size=batch_size // accum_steps, epochs=2, shuffle=False, verbose=0)
    return model


def weights(model):
    return model.get_weights()  # in Keras 3, with the seeds


def assert_same(model, oracle, tolerance=2e-6):
    for mine, theirs in zip(weights(model), weights(oracle)):
        assert np.isfinite(theirs).all()  # `assert_allclose` takes NaN for NaN
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance)


def differs(model, oracle):
    return any(np.abs(mine - theirs).max() > 1e-3 for mine, theirs in zip(weights(model), weights(oracle)))


needs_keras_3 = pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 draws from kernels whose state nobody can read")
MODELS = {make.__name__: make for make in (noisy, attentive, recurrent, augmented, unseeded, seeded_too, reordered)}


@pytest.mark.slow
@needs_keras_3
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("kind", MODELS)
def test_the_draws_are_those_of_plain_keras_at_the_full_batch(kind):
    plain = trained(MODELS[kind], plain=True)
    assert_same(trained(MODELS[kind], micro_batch_size=5), plain)
    assert differs(trained(MODELS[kind], plain=True, seed=4, batch_size=8), plain)


@needs_keras_3
@pytest.mark.tf("2.2")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["loss", "all"])
@pytest.mark.parametrize("kind", ["noisy", "recurrent", "seeded_too"])
def test_the_draws_of_a_whole_batch_are_those_of_plain_keras(kind, how):
    assert_same(trained(MODELS[kind], micro_batch_size=5, whole_batch=how), trained(MODELS[kind], plain=True))


@needs_keras_3
@pytest.mark.tf("2.2")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unseeded", "seeded_too"])
def test_the_batches_of_a_cycle_begin_with_the_seed_of_keras(kind):
    assert_same(trained(MODELS[kind], accum_steps=4), trained(MODELS[kind], plain=True))


@pytest.mark.slow
@needs_keras_3
@pytest.mark.tf("2.2")
def test_with_xla_the_draws_are_those_of_plain_keras_with_xla():
    compile_with = {"jit_compile": True}
    plain = trained(noisy, plain=True, compile_with=compile_with)
    assert_same(trained(noisy, compile_with=compile_with, micro_batch_size=5), plain)


@pytest.mark.tf("2.2")
@pytest.mark.slow
@pytest.mark.parametrize("options", [{"micro_batch_size": 3}, {"accum_steps": 2}], ids=str)
def test_the_check_of_a_model_leaves_dropout_on(options):
    def build(seed=3, **compile_with):
        set_seeds(1)
        inputs = tf.keras.Input((6,))
        hidden = layers.Dropout(0.4, seed=seed)(layers.Dense(16, activation="relu")(inputs))
        model = tf.keras.Model(inputs, layers.Dense(1)(hidden))
        model.compile(tf.keras.optimizers.SGD(0.1), "mse", **compile_with)
        return model

    accum.testing.assert_accumulation_equals_full_batch(build, (X, Y), batch_size=8, **options)
    seeds = iter(range(100))
    unlike = (lambda: build(next(seeds))) if IS_KERAS_3 else (lambda: build(run_eagerly=True))
    with pytest.raises(AssertionError, match="Dropout"):
        accum.testing.assert_accumulation_equals_full_batch(unlike, (X, Y), batch_size=8, **options)


@pytest.mark.tf("2.2")
def test_the_draws_do_not_depend_on_the_size_of_micro_batches():
    whole = trained(noisy, micro_batch_size=BATCH)
    assert_same(trained(noisy, micro_batch_size=5), whole)
    assert (
        differs(trained(noisy, micro_batch_size=5, seed=4), whole) or IS_KERAS_3
    )  # whose layers have seeds of their own


def in_a_lambda():
    inputs = tf.keras.Input((6,))
    hidden = layers.Lambda(lambda tensor: tf.nn.dropout(tensor, 0.4))(layers.Dense(16, activation="relu")(inputs))
    return tf.keras.Model(inputs, layers.Dense(1)(hidden))


@pytest.mark.slow
@pytest.mark.tf("2.2")
def test_a_lambda_layer_may_draw():
    """Keras 2 refuses one that creates variables: those of the draws have to be there before."""
    whole = trained(in_a_lambda, micro_batch_size=BATCH)
    assert_same(trained(in_a_lambda, micro_batch_size=5), whole)
    assert_same(trained(in_a_lambda, accum_steps=4), whole)
    assert differs(trained(in_a_lambda, accum_steps=4, seed=4), whole)


K_AND_REPLICAS = [(8, 1), (1, 2), (4, 2)]


@pytest.mark.tf("2.2")
@pytest.mark.slow
@pytest.mark.parametrize("accum_steps, replicas", K_AND_REPLICAS, ids=str)
def test_the_draws_do_not_depend_on_how_many_batches_and_replicas_share_them(accum_steps, replicas):
    whole = trained(noisy, plain=True) if IS_KERAS_3 else trained(noisy, micro_batch_size=BATCH)
    options = {"micro_batch_size": BATCH} if (accum_steps, replicas) == (1, 2) else {}
    assert_same(trained(noisy, accum_steps, replicas, **options), whole)
    if accum_steps == 4:
        assert_same(trained(noisy, 2, replicas, micro_batch_size=3), whole)


@pytest.mark.tf("2.2")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["loss", "all"])
def test_a_whole_batch_draws_as_one_of_a_cycle_and_on_replicas(how):
    whole = trained(noisy, micro_batch_size=BATCH)
    assert_same(trained(noisy, 2, 2, micro_batch_size=2, whole_batch=how), whole)


class DrawsAcross(layers.Layer):
    """A layer in which examples meet, and which draws a number for each."""

    def call(self, inputs):
        if IS_KERAS_3:
            import keras

            drawn = keras.random.normal(tf.shape(inputs))
        else:
            drawn = tf.random.normal(tf.shape(inputs))
        return (inputs + drawn) / (1.0 + tf.math.reduce_std(inputs, axis=0, keepdims=True))


def across():
    inputs = tf.keras.Input((6,))
    hidden = DrawsAcross()(layers.Dropout(0.4)(layers.Dense(5)(inputs)))
    return tf.keras.Model(inputs, layers.Dense(1)(hidden))


@pytest.mark.slow
@pytest.mark.tf("2.2")
@pytest.mark.law("L19")
def test_a_layer_that_is_called_with_the_whole_batch_draws_as_ever():
    whole = trained(across, plain=True) if IS_KERAS_3 else trained(across, micro_batch_size=BATCH)
    assert_same(trained(across, micro_batch_size=5, whole_batch="all"), whole)


def normalised(rate=0.4):
    """Replicas wait for each other between its draws."""
    inputs = tf.keras.Input((6,))
    hidden = layers.Dropout(rate)(layers.Dense(16, activation="relu")(inputs))
    hidden = accum.AccumBatchNormalization(synchronized=True)(layers.Dense(8)(hidden))
    return tf.keras.Model(inputs, layers.Dense(1)(layers.Dropout(rate)(hidden)))


@pytest.mark.tf("2.2")
@pytest.mark.slow
def test_replicas_that_take_turns_draw_their_own_examples():
    alone = trained(normalised, 2)
    assert_same(trained(normalised, 2, 2), alone)
    assert differs(trained(lambda: normalised(0.0), 2, 2), alone)


class Remembers(tf.keras.callbacks.Callback):
    """Saves a checkpoint after a batch."""

    def __init__(self, batch, path):
        super().__init__()
        self.batch, self.path, self.saved = batch, path, None

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            self.saved = tf.train.Checkpoint(model=self.model, optimizer=self.model.optimizer).save(self.path)


@pytest.mark.tf("2.2")
@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 2])
def test_a_run_that_goes_on_from_a_checkpoint_in_mid_cycle_draws_the_same(tmp_path, size):
    def new():
        set_seeds(7)
        model = accum.GradientAccumulateModel.from_model(noisy(), accum_steps=3, micro_batch_size=size)
        model.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        set_seeds(3)
        return model

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)  # ten batches
    uninterrupted = new()
    remembers = Remembers(3, str(tmp_path / "state"))
    uninterrupted.fit(data.take(9), verbose=0, callbacks=[remembers])
    resumed = new()
    resumed.fit(data.take(3), verbose=0)  # creates all variables, and is then overwritten
    tf.train.Checkpoint(model=resumed, optimizer=resumed.optimizer).restore(remembers.saved)
    resumed.fit(data.skip(4).take(5), verbose=0)
    assert_same(resumed, uninterrupted, tolerance=0)
    shifted = new()
    shifted.fit(data.take(3), verbose=0)
    tf.train.Checkpoint(model=shifted, optimizer=shifted.optimizer).restore(remembers.saved)
    shifted.optimizer.reset()  # forgets the sums, and with them the place in the cycle
    shifted.fit(data.skip(4).take(5), verbose=0)
    assert differs(shifted, uninterrupted)


@pytest.mark.tf("2.2")
@pytest.mark.slow
@pytest.mark.law("L12")
@pytest.mark.parametrize("options", [{"micro_batch_size": 2}, {"accum_steps": 3}], ids=str)
def test_a_run_that_goes_on_from_a_checkpoint_between_steps_draws_the_same(tmp_path, options):
    def new():
        set_seeds(7)
        model = accum.GradientAccumulateModel.from_model(noisy(), **options)
        model.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        set_seeds(3)
        return model

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    uninterrupted = new()
    remembers = Remembers(5, str(tmp_path / "state"))
    uninterrupted.fit(data.take(9), verbose=0, callbacks=[remembers])
    resumed = new()
    resumed.fit(data.take(3), verbose=0)  # creates all variables, and is then overwritten
    tf.train.Checkpoint(model=resumed, optimizer=resumed.optimizer).restore(remembers.saved)
    resumed.fit(data.skip(6).take(3), verbose=0)
    assert_same(resumed, uninterrupted, tolerance=0)


@pytest.mark.tf("2.2")
@pytest.mark.slow
@pytest.mark.tf("2.8", because="`compile` takes no `jit_compile` here")
@pytest.mark.parametrize("how", [{}, {"whole_batch": "loss"}], ids=["split", "loss"])
def test_with_xla_the_draws_do_not_depend_on_the_size(how):
    """Also where a row is no multiple of four numbers, and parts of the whole batch are not constants."""
    compile_with = {"jit_compile": True}
    whole = trained(noisy, compile_with=compile_with, micro_batch_size=BATCH)
    assert_same(trained(noisy, compile_with=compile_with, micro_batch_size=5, **how), whole)


@pytest.mark.tf("2.2")
@pytest.mark.slow
@pytest.mark.tf("2.8", because="`compile` takes no `jit_compile` here")
def test_with_xla_the_draws_of_several_batches_are_named():
    """XLA does not know how many examples the batches before had."""
    set_seeds(7, anew=True)
    model = accum.GradientAccumulateModel.from_model(noisy(), 2, micro_batch_size=5)
    model.compile(tf.keras.optimizers.SGD(0.1), "mse", jit_compile=True)
    with pytest.warns(UserWarning, match="XLA, if an update takes several batches"):
        model.fit(X, Y, batch_size=10, verbose=0)


@pytest.mark.slow
@pytest.mark.tf("2.2")
def test_draws_on_replicas_of_a_model_without_layers_that_draw_are_named():
    inputs = tf.keras.Input((6,))
    with mirrored().scope():
        noise = layers.Lambda(lambda hidden: hidden + tf.random.normal(tf.shape(hidden)))
        model = tf.keras.Model(inputs, layers.Dense(1)(noise(layers.Dense(3)(inputs))))
        model = accum.GradientAccumulateModel.from_model(model, micro_batch_size=4)
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    with pytest.warns(UserWarning, match="several replicas, if the model has no dropout.*random_normal"):
        model.fit(X, Y, batch_size=BATCH, verbose=0)


@pytest.mark.slow
@pytest.mark.tf("2.2")
def test_a_layer_s_own_seed_is_enough():
    def make(size=5):
        inputs = tf.keras.Input((6,))
        kernel = tf.keras.initializers.Constant(0.3)
        hidden = layers.Dropout(0.5, seed=3)(layers.Dense(8, kernel_initializer=kernel)(inputs))
        model = tf.keras.Model(inputs, layers.Dense(1, kernel_initializer=kernel)(hidden))
        model = accum.GradientAccumulateModel.from_model(model, micro_batch_size=size)
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
        model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
        return model

    tf.random.set_seed(None)
    assert_same(make(), make(), tolerance=0)
    assert_same(make(), make(BATCH))


@pytest.mark.tf("2.2")
@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 2])
def test_a_batch_that_fails_draws_the_same_when_it_is_tried_again(size):
    class Fails(layers.Layer):
        def __init__(self):
            super().__init__()
            self.flag = tf.Variable(0.0, trainable=False)

        def call(self, inputs):
            with tf.control_dependencies([tf.debugging.assert_equal(self.flag.read_value(), 0.0)]):
                return tf.identity(inputs)

    def run(fails):
        set_seeds(7, anew=True)
        inputs, layer = tf.keras.Input((6,)), Fails()
        hidden = layer(layers.Dropout(0.4)(layers.Dense(16)(inputs)))
        model = tf.keras.Model(inputs, layers.Dense(1)(layers.Dropout(0.4)(hidden)))
        model = accum.GradientAccumulateModel.from_model(model, accum_steps=3, micro_batch_size=size)
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
        set_seeds(3)
        for number in range(9):
            batch = X[4 * number : 4 * number + 4], Y[4 * number : 4 * number + 4]
            if fails and number in (1, 5):  # the second of a cycle, and the last
                layer.flag.assign(1.0)
                with pytest.raises(tf.errors.InvalidArgumentError):
                    model.train_on_batch(*batch)
                layer.flag.assign(0.0)
            model.train_on_batch(*batch)
        return model

    assert_same(run(True), run(False), tolerance=0)


@pytest.mark.slow
@pytest.mark.tf("2.2")
def test_a_function_draws_the_same_for_every_size():
    kernel = tf.Variable(ROWS.normal(size=(6, 5)).astype("float32"))

    def loss(x):
        return tf.reduce_mean(
            tf.nn.dropout(tf.matmul(x, kernel) + tf.random.normal([tf.shape(x)[0], 5]), rate=0.4) ** 2
        )

    def gradient(size, **options):
        @tf.function
        def step():
            return accum.value_and_gradients(loss, tf.constant(X), [kernel], micro_batch_size=size, **options)[1][0]

        tf.random.set_seed(1)
        return [step().numpy() for _ in range(2)]

    first, second = gradient(40)
    assert np.abs(first - second).max() > 1e-3
    for grad in (gradient(7), gradient(1), gradient(7, whole_batch="batch_norm")):
        np.testing.assert_allclose(grad, [first, second], rtol=0, atol=2e-6)


v1 = tf.compat.v1
DROPOUTS = {
    "tf.nn": lambda hidden: tf.nn.dropout(hidden, rate=0.4),
    "tf.layers": lambda hidden: v1.layers.dropout(hidden, 0.4, training=True),
    "in a conditional": lambda hidden: v1.layers.dropout(hidden, 0.4, training=v1.placeholder_with_default(True, [])),
    "truncated": lambda hidden: hidden + tf.random.truncated_normal(tf.shape(hidden)),
    "whole numbers": lambda hidden: (
        hidden * tf.cast(tf.random.uniform(tf.shape(hidden), -3, 4, tf.int32), hidden.dtype)
    ),
}
HAS_V1_LAYERS = hasattr(v1, "layers") and not IS_KERAS_3


@pytest.mark.slow
@pytest.mark.parametrize("how", DROPOUTS)
def test_a_static_graph_draws_the_same_for_every_size(how):
    if not HAS_V1_LAYERS and how in ("tf.layers", "in a conditional"):
        pytest.skip("`tf.compat.v1.layers` needs Keras 2")
    start = np.linspace(-1, 1, 30).reshape(6, 5).astype("float32")

    def gradient(size, **options):
        with v1.Graph().as_default(), v1.Session() as session:
            v1.set_random_seed(5)
            inputs = v1.placeholder(tf.float32, [None, 6])
            kernel = v1.get_variable("kernel", initializer=start)

            def loss(x):
                return tf.reduce_mean(DROPOUTS[how](tf.matmul(x, kernel)) ** 2)

            value, pairs = accum.compat.v1.value_and_gradients(loss, [inputs], micro_batch_size=size, **options)
            session.run(v1.global_variables_initializer())
            return [session.run([value, pairs[0][0]], {inputs: X})[1] for _ in range(2)]

    for options in [{}] if how == "in a conditional" else [{}, {"whole_batch": "batch_norm"}]:
        first, second = gradient(40, **options)
        assert np.abs(first - second).max() > 1e-3
        np.testing.assert_allclose(gradient(7, **options), [first, second], rtol=0, atol=1e-5)


@pytest.mark.tf("2.2")
@pytest.mark.law("L20")
def test_numbers_in_a_function_are_those_of_the_whole_batch():
    def make():
        tf.random.set_seed(7)
        inputs = tf.keras.Input((6,))
        return tf.keras.Model(inputs, layers.Dense(1)(DrawsElsewhere("function")(layers.Dense(4)(inputs))))

    assert_same(trained(make, micro_batch_size=5), trained(make, micro_batch_size=BATCH))


@pytest.mark.slow
@pytest.mark.tf("2.3")
@pytest.mark.filterwarnings("ignore:With `whole_batch=\\(\\)`", "ignore:The layer .* is computed for the whole batch")
@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 5, "whole_batch": ()}, {"accum_steps": 2}], ids=str)
def test_numbers_in_a_loaded_saved_model_are_those_of_plain_keras_or_named(options, tmp_path):
    holder = tf.Module()
    holder.noise = tf.function(times_noise.python_function, input_signature=[tf.TensorSpec([None, 4])])
    tf.saved_model.save(holder, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))

    class Noisy(layers.Layer):
        def call(self, inputs):
            return loaded.noise(inputs)

    def make():
        inputs = tf.keras.Input((6,))
        return tf.keras.Model(inputs, layers.Dense(1)(Noisy()(layers.Dense(4)(inputs))))

    if not options:
        assert_same(trained(make, micro_batch_size=5), trained(make, plain=True))
        return
    model = accum.GradientAccumulateModel.from_model(make(), **options)
    model.compile("sgd", "mse")
    with pytest.warns(accum.InexactWarning, match="draw random numbers that differ with the size of micro-batches"):
        model.fit(X, Y, batch_size=BATCH, verbose=0)


@pytest.mark.tf("2.3")
def test_numbers_in_a_loaded_saved_model_are_the_reason_that_is_given_with_an_explicit_whole_batch(tmp_path):
    holder = tf.Module()
    holder.noise = tf.function(times_noise.python_function, input_signature=[tf.TensorSpec([None, 6])])
    tf.saved_model.save(holder, str(tmp_path))
    loaded, weight = tf.saved_model.load(str(tmp_path)), tf.Variable(1.0)

    @tf.function
    def step(x):
        function = lambda x: tf.reduce_mean(weight * loaded.noise(x))
        options = {"micro_batch_size": 5, "whole_batch": "batch_norm"}
        return accum.value_and_gradients(function, [x], [weight], **options)

    with warned(category=accum.InexactWarning) as texts:
        step(tf.constant(X))
    assert texts and all("draw random numbers" in text for text in texts)


class DropsOfMatrix(layers.Layer):
    """Drops entries of [examples, times, width] as a matrix, as code of BERT does."""

    def __init__(self):
        super().__init__()
        self.dropout = layers.Dropout(0.3)

    def call(self, inputs, training=None):
        matrix = self.dropout(tf.reshape(inputs, [-1, 2]), training=training)
        return tf.reshape(matrix, [-1, 3, 2])


@pytest.mark.tf("2.2")
@pytest.mark.law("L20")
@pytest.mark.parametrize("drop", [DropsOfMatrix, lambda: layers.TimeDistributed(layers.Dropout(0.3))])
def test_numbers_for_each_time_of_each_example_do_not_keep_a_network_with_batch_norm_from_being_split(drop):
    def make():
        inputs = tf.keras.Input((6,))
        hidden = layers.BatchNormalization()(layers.Reshape((3, 2))(inputs))
        hidden = layers.BatchNormalization()(layers.Dense(4)(layers.Flatten()(drop()(hidden))))
        return tf.keras.Model(inputs, layers.Dense(1)(hidden))

    assert_same(trained(make, micro_batch_size=5), trained(make, micro_batch_size=BATCH))
    if IS_KERAS_3:
        assert_same(trained(make, micro_batch_size=5), trained(make, plain=True))
    model = accum.GradientAccumulateModel.from_model(make(), micro_batch_size=5)
    model.compile("sgd", "mse")
    with silent():
        model.fit(X, Y, batch_size=BATCH, verbose=0)


class DrawsElsewhere(layers.Layer):
    """Draws in a way that is no function of the example."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.generator = tf.random.experimental.Generator.from_seed(3) if how == "generator" else None

    def call(self, inputs, training=None):
        if self.how == "generator":
            return inputs + self.generator.normal([tf.shape(inputs)[0], 1])
        if self.how == "loop":
            draw = lambda index, total: (index + 1, total + tf.random.normal([]))
            return inputs + tf.while_loop(lambda index, _: index < 2, draw, (0, 0.0))[1]
        if self.how == "function":
            return self.noisy(inputs)  # Keras may trace it before the step
        if self.how == "python":
            return inputs + tf.reshape(tf.numpy_function(lambda: np.float32(np.random.normal()), [], tf.float32), [])
        if self.how == "last axis":
            return inputs + tf.transpose(tf.random.normal([6, tf.shape(inputs)[0]]))
        return tf.random.shuffle(inputs)

    @tf.function
    def noisy(self, inputs):
        return inputs + tf.random.normal(tf.shape(inputs))


@pytest.mark.slow
@pytest.mark.tf("2.2")
@pytest.mark.filterwarnings("ignore:With `whole_batch=\\(\\)`")
@pytest.mark.parametrize("how", ["function", "loop", "last axis", "python", "shuffle"])
@pytest.mark.parametrize("is_default", [False, True])
def test_draws_that_are_no_function_of_the_example_are_named(how, is_default):
    if is_default and how != "loop":
        pytest.skip("what is drawn for the whole batch is exact")
    inputs = tf.keras.Input((6,))
    outputs = layers.Dense(1)(DrawsElsewhere(how)(inputs))
    options = {"micro_batch_size": 5, "whole_batch": None if is_default else ()}
    model = accum.GradientAccumulateModel.from_model(tf.keras.Model(inputs, outputs), **options)
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="draw random numbers that differ with the size of micro-batches"):
        model.fit(X, Y, batch_size=BATCH, verbose=0)
    model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=BATCH, verbose=0)  # the function was traced in a graph that is gone


def permuted(count):
    return tf.numpy_function(lambda number: np.random.permutation(int(number)).astype("int32"), [count], tf.int32)


ORDERS = {
    "shuffled": lambda layer, count: tf.random.shuffle(tf.range(count)),
    "shuffled rows": lambda layer, count: tf.random.shuffle(tf.stack([tf.range(count)] * 2, axis=1))[:, 1],
    "sorted": lambda layer, count: tf.argsort(tf.random.uniform([count])),
    "of a generator": lambda layer, count: tf.argsort(layer.generator.uniform([count])),
    "of Python": lambda layer, count: tf.ensure_shape(permuted(count), [None]),
}
SHARES = {  # of all examples together
    "last axis": lambda layer, count: tf.transpose(share_of_all(tf.random.uniform([6, count]), 1)),
    "gamma": lambda layer, count: share_of_all(tf.random.gamma([count, 6], 2.0), 0),
}


def share_of_all(numbers, axis):
    return numbers / tf.reduce_sum(numbers, axis=axis, keepdims=True)


class MixesBy(layers.Layer):
    """Returns what it has computed of all examples, and what it has drawn for that."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.generator = tf.random.experimental.Generator.from_seed(3)

    def call(self, inputs):
        count = tf.shape(inputs)[0]
        if self.how in SHARES:
            shares = SHARES[self.how](self, count)
            return inputs * shares, shares
        order = ORDERS[self.how](self, count)
        return 0.7 * inputs + 0.3 * tf.gather(inputs, order), order


class Mixup(tf.keras.Model):
    def __init__(self, how):
        super().__init__()
        self.dense, self.mixes, self.last = layers.Dense(6), MixesBy(how), layers.Dense(1)

    def call(self, inputs):
        mixed, drawn = self.mixes(self.dense(inputs))
        return self.last(mixed), drawn

    def train_step(self, data):
        with tf.GradientTape() as tape:
            outputs, drawn = self(data[0], training=True)
            loss = tf.reduce_mean((outputs - data[1]) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        self.drawn.assign(tf.cast(drawn, tf.float32))
        return {"loss": loss}


@pytest.mark.slow
@pytest.mark.tf("2.4", because="generators can't be read before")
@pytest.mark.law("L21")
@pytest.mark.filterwarnings("error::accum.InexactWarning", "ignore:The layer")
@pytest.mark.parametrize("how", [*ORDERS, "last axis", "gamma"])
def test_what_a_network_draws_for_all_examples_together_is_drawn_once(how):
    set_seeds(3)
    model = Mixup(how)
    model(X)
    model.drawn = tf.Variable(tf.zeros([40] if how in ORDERS else [40, 6]), trainable=False)
    first = [tf.Variable(value) for value in model.get_weights()[:4]]
    ours = accum.GradientAccumulateModel.from_model(model, micro_batch_size=7)
    ours.compile(tf.keras.optimizers.SGD(1.0), **({"jit_compile": False} if IS_KERAS_3 else {}))
    ours.fit(X, Y, batch_size=40, shuffle=False, verbose=0)
    drawn = ours.drawn.numpy()
    if how in ORDERS:
        assert sorted(drawn) == list(range(40)) and (drawn != range(40)).any()
    else:
        np.testing.assert_allclose(drawn.sum(0), 1.0, rtol=1e-5)
    with tf.GradientTape() as tape:
        hidden = tf.matmul(X, first[0]) + first[1]
        other = tf.gather(hidden, drawn.astype("int32")) if how in ORDERS else None
        mixed = hidden * drawn if other is None else 0.7 * hidden + 0.3 * other
        loss = tf.reduce_mean((tf.matmul(mixed, first[2]) + first[3] - Y) ** 2)
    for new, old, grad in zip(ours.get_weights(), first, tape.gradient(loss, first)):
        np.testing.assert_allclose(new, old - grad, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.tf("2.4", because="generators can't be read before")
@pytest.mark.filterwarnings("error::accum.InexactWarning")
@pytest.mark.parametrize("how", ["generator", "shuffle"])
def test_they_do_not_depend_on_the_size_of_micro_batches_either(how):
    def make():
        inputs = tf.keras.Input((6,))
        return tf.keras.Model(inputs, layers.Dense(1)(DrawsElsewhere(how)(inputs)))

    whole = trained(make, micro_batch_size=BATCH)
    assert_same(trained(make, micro_batch_size=5), whole)
    assert_same(trained(make, micro_batch_size=3), whole)


@pytest.mark.slow
@pytest.mark.tf("2.2")
@pytest.mark.filterwarnings("error::accum.InexactWarning")
def test_seeded_numbers_whose_last_axis_is_the_examples_are_those_of_plain_keras():
    class Noisy(layers.Layer):
        def call(self, inputs):
            return inputs * tf.transpose(tf.random.stateless_normal([6, tf.shape(inputs)[0]], [1, 2]))

    def make():
        inputs = tf.keras.Input((6,))
        return tf.keras.Model(inputs, layers.Dense(1)(Noisy()(inputs)))

    assert_same(trained(make, micro_batch_size=5), trained(make, plain=True))


@pytest.mark.slow
@pytest.mark.tf("2.11", because="earlier augmentation loops over the examples", keras=2)
@pytest.mark.filterwarnings("error::accum.InexactWarning")
def test_augmentation_does_not_depend_on_the_size_of_micro_batches():
    def make():
        inputs = tf.keras.Input((6,))
        images = layers.Reshape((2, 3, 1))(inputs)
        for layer in (layers.RandomFlip(), layers.RandomContrast(0.5), layers.RandomRotation(0.2)):
            images = layer(images)
        return tf.keras.Model(inputs, layers.Dense(1)(layers.Flatten()(images)))

    whole = trained(make, micro_batch_size=BATCH)
    assert_same(trained(make, micro_batch_size=5), whole)


class Sampling(layers.Layer):
    """As in a variational autoencoder; nothing tells that it draws."""

    def call(self, inputs):
        return inputs + tf.random.normal(tf.shape(inputs))


class Losses(tf.keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])


@pytest.mark.tf("2.2")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Random numbers differ", "ignore:These operations draw")
@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 2, "whole_batch": "loss"}], ids=["plain", "loss"])
def test_on_replicas_the_batches_of_a_cycle_draw_apart_even_if_places_are_unknown(options):
    set_seeds(3)
    with mirrored().scope():
        inputs = tf.keras.Input((6,))
        model = tf.keras.Model(inputs, layers.Dense(1, kernel_initializer="ones")(Sampling()(inputs)))
        model = accum.GradientAccumulateModel.from_model(model, accum_steps=4, **options)
        model.compile(tf.keras.optimizers.SGD(0.0), "mse")
    losses = Losses()
    model.fit(np.zeros((32, 6), np.float32), np.zeros((32, 1), np.float32), batch_size=8, verbose=0, callbacks=[losses])
    assert len(set(losses.losses)) == 4  # the means of the cycle so far


class CallsTwice(tf.keras.Model):
    """Compares two masks of the same examples, as SimCSE does."""

    def __init__(self):
        super().__init__()
        self.hidden, self.dropout = layers.Dense(9), layers.Dropout(0.5)

    def call(self, inputs, training=None):
        return self.dropout(self.hidden(inputs), training=training)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            one, other = self(data[0], training=True), self(data[0], training=True)
            loss = tf.reduce_mean(tf.abs(one - other))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
        return {"gap": loss}


@pytest.mark.tf("2.2")
@pytest.mark.slow
def test_two_calls_over_the_whole_batch_draw_apart():
    set_seeds(3)
    model = accum.GradientAccumulateModel.from_model(CallsTwice(), micro_batch_size=5, whole_batch="loss")
    model.compile(tf.keras.optimizers.SGD(0.1))
    assert model.fit(X, Y, batch_size=BATCH, epochs=1, verbose=0).history["gap"][0] > 0.05


class SeesAll(layers.Layer):
    def call(self, inputs):
        inputs += 0.0 * tf.reduce_mean(inputs, axis=0)  # the examples of a cycle do not meet
        return tf.nn.dropout(inputs, 0.4) + tf.random.truncated_normal(tf.shape(inputs))


@pytest.mark.tf("2.2")
@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_layer_that_sees_the_whole_batch_draws_for_its_place_in_the_cycle(replicas):
    def make():
        inputs = tf.keras.Input((6,))
        return tf.keras.Model(inputs, layers.Dense(1)(layers.Dropout(0.3, seed=1)(SeesAll()(inputs))))

    whole = trained(make, 1, micro_batch_size=5)
    assert_same(trained(make, 2, replicas, micro_batch_size=3), whole)


@needs_keras_3
@pytest.mark.tf("2.2")
def test_layers_whose_seeds_advance_with_each_micro_batch_of_a_function_are_named():
    kernel, dropout = tf.Variable(np.ones([6, 5], np.float32)), layers.Dropout(0.4, seed=2)

    @tf.function
    def step(**options):
        function = lambda x: tf.reduce_mean(dropout(tf.matmul(x, kernel), training=True) ** 2)  # noqa: E731
        return accum.value_and_gradients(function, tf.constant(X), [kernel], micro_batch_size=5, **options)[0]

    with pytest.warns(UserWarning, match="because each call advances the seed"):
        step(whole_batch=())
    with silent():
        step()


SEEDED = {
    "categorical": lambda: tf.random.stateless_categorical(tf.zeros([2, 1000]), 3, [1, 2]),
    "gamma": lambda: tf.random.stateless_gamma([2], [1, 2], 3.0),
    "loop": lambda: tf.while_loop(
        lambda index, _: index < 2,
        lambda index, _: (index + 1, tf.random.stateless_normal([2], [1, 2])),
        (0, tf.zeros([2])),
    )[1],
}


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("kind", SEEDED)
@pytest.mark.filterwarnings("ignore:These operations draw")
def test_what_cannot_be_drawn_in_part_still_draws_apart(kind):
    from accum._engine._draws import Draws  # as above

    def drawn(begin):
        @tf.function
        def rows(begin):
            with Draws(None, 8).of(begin, 2):
                return SEEDED[kind]()

        return rows(tf.constant(begin)).numpy()

    assert (drawn(0) == drawn(0)).all() and (drawn(0) != drawn(2)).any()


@pytest.mark.tf("2.2")
def test_noise_whose_examples_are_not_on_the_first_axis_is_named():
    from accum._engine._draws import Draws  # as above

    @tf.function
    def samples():
        with Draws(lambda: tf.constant([1, 2], tf.int64), 32).of(0, 8):
            return tf.random.normal([5, 8, 16])

    with pytest.warns(UserWarning, match="a first axis that is not that of the examples"):
        samples()


@pytest.mark.slow
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("size", [1, 2, 5], ids="by_{}".format)
@pytest.mark.parametrize("shape", [[6], [1, 6]], ids=str)
def test_noise_that_is_the_same_for_all_examples_is_the_same_for_all_micro_batches(shape, size):
    """As noise on weights is; plain Keras draws it once a batch."""

    class NoisyKernel(layers.Layer):
        def call(self, inputs):
            return inputs * tf.random.normal(shape, seed=3)

    def make():
        inputs = tf.keras.Input((6,))
        return tf.keras.Model(inputs, layers.Dense(1)(NoisyKernel()(inputs)))

    whole = trained(make, micro_batch_size=20, batch_size=20)  # all batches have 20 examples, so Keras knows the number
    assert_same(trained(make, micro_batch_size=size, batch_size=20), whole)


class Repeating(tf.keras.Model):
    """A train step that calls a network with dropout in a loop, and keeps its masks."""

    def __init__(self):
        super().__init__()
        self.network = tf.keras.Sequential([tf.keras.Input((6,)), layers.Dense(8, use_bias=False), layers.Dropout(0.5)])
        self.masks = tf.Variable(tf.zeros([4, BATCH, 8]), trainable=False)

    def call(self, inputs):
        return self.network(inputs)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            outputs = tf.map_fn(
                lambda _: self.network(data, training=True), tf.range(4), fn_output_signature=tf.float32
            )
            loss = tf.reduce_sum(outputs)
        self.masks.assign(tf.cast(outputs > 0.0, tf.float32))
        weights = self.network.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}


@pytest.mark.tf("2.4", because="`fn_output_signature` came with 2.4")
def test_each_iteration_of_a_loop_in_a_train_step_draws_other_numbers():
    """The gradient is that of the masks that the step has seen: of sums of doubled outputs, by hand."""
    set_seeds(3)
    model = Repeating()
    model.network.set_weights([np.ones([6, 8])])
    made = accum.GradientAccumulateModel.from_model(model, micro_batch_size=5)
    made.compile(tf.keras.optimizers.SGD(1e-3), **({"jit_compile": False} if IS_KERAS_3 else {}))
    inputs = np.abs(X[:BATCH])
    made.fit(tf.data.Dataset.from_tensors(inputs), verbose=0)
    masks = model.masks.numpy()
    for one, other in zip(masks, masks[1:]):
        assert 0.3 < np.mean(one == other) < 0.7
    expected = 1.0 - 1e-3 * 2.0 * inputs.T @ masks.sum(axis=0)
    np.testing.assert_allclose(model.network.get_weights()[0], expected, rtol=1e-5)


@pytest.mark.tf("2.2")
def test_eagerly_draws_are_named():
    model = accum.GradientAccumulateModel.from_model(noisy(), micro_batch_size=5)
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.warns(UserWarning, match="compile without `run_eagerly`"):
        model.fit(X, Y, batch_size=BATCH, verbose=0)


@pytest.mark.slow
@pytest.mark.tf("2.2")
def test_a_batch_of_one_example_and_one_of_none_left_draw(tmp_path):
    whole = trained(noisy, micro_batch_size=BATCH)
    assert_same(trained(noisy, micro_batch_size=1), whole)


@pytest.mark.slow
def test_rows_of_a_draw_are_those_of_the_whole_draw():
    """Whatever their number and dtype: TensorFlow's own draw of the whole batch is the oracle."""
    if not hasattr(tf.raw_ops, "StatelessRandomUniformV2") or TF_VERSION < (2, 5):
        pytest.skip("this TensorFlow draws by seeds alone")
    from accum._engine._draws import Draws  # no public function draws what the user gave a seed for

    draws = {
        "float32": lambda n, w: tf.random.stateless_uniform([n, w], [1, 2]),
        "float64": lambda n, w: tf.random.stateless_normal([n, w], [1, 2], dtype=tf.float64),
        "float16": lambda n, w: tf.random.stateless_normal([n, w], [1, 2], dtype=tf.float16),
        "bfloat16": lambda n, w: tf.random.stateless_uniform([n, w], [1, 2], dtype=tf.bfloat16),
        "int64": lambda n, w: tf.random.stateless_uniform([n, w], [1, 2], 0, 99, dtype=tf.int64),
        "truncated": lambda n, w: tf.random.stateless_truncated_normal([n, w], [1, 2]),
        "full": lambda n, w: tf.random.stateless_uniform([n, w], [1, 2], None, None, dtype=tf.int32),
    }
    for name, draw in draws.items():
        for width in (1, 3, 8):
            whole = draw(11, width).numpy()

            @tf.function
            def rows(begin, count, draw=draw, width=width):
                with Draws(None, 11).of(begin, count):
                    return draw(count, width)

            for begin, count in ((0, 11), (2, 3), (5, 6), (10, 1)):
                part = rows(tf.constant(begin), tf.constant(count)).numpy()
                assert (part == whole[begin : begin + count]).all(), (name, width, begin)


class BuiltInFit(tf.keras.Model):
    """Keras 3 infers the shapes of such layers within the first step, and draws initial weights that nobody uses."""

    def __init__(self):
        super().__init__()
        self.hidden, self.last = layers.Dense(4, activation="relu"), layers.Dense(1)

    def call(self, inputs):
        return self.last(self.hidden(inputs))


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("options", [{"micro_batch_size": 4}, {"accum_steps": 2}], ids=str)
def test_no_warning_of_the_initial_weights_of_a_model_that_fit_builds(options):
    model = accum.GradientAccumulateModel.from_model(BuiltInFit(), **options)
    model.compile("sgd", "mse")
    with silent(accum.InexactWarning):
        model.fit(X, Y, batch_size=8, verbose=0)


@tf.function
def times_noise(inputs):
    return inputs * tf.random.stateless_uniform(tf.shape(inputs), [1, 2])


def times_noise_if_wide(inputs):
    return tf.cond(tf.shape(inputs)[1] > 2, lambda: times_noise(inputs), lambda: inputs)


@pytest.mark.slow
@pytest.mark.tf("2.2")
@pytest.mark.law("L21")
@pytest.mark.filterwarnings("error::accum.InexactWarning", "ignore:The layer")
@pytest.mark.parametrize("noise", [times_noise, times_noise_if_wide])
@pytest.mark.parametrize("has_own_step", [False, True])
def test_seeded_numbers_in_a_function_that_was_traced_before_are_those_of_plain_keras(noise, has_own_step):
    class OwnStep(tf.keras.Model):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(data[0], training=True) - data[1]) ** 2)
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            return {"loss": loss}

    class Noisy(layers.Layer):
        def call(self, inputs):
            return noise(inputs)

    def make():
        inputs = tf.keras.Input((6,))
        kind = OwnStep if has_own_step else tf.keras.Model
        return kind(inputs, layers.Dense(1)(Noisy()(layers.Dense(4)(inputs))))

    plain = trained(make, plain=True)
    assert_same(trained(make, micro_batch_size=5), plain)


class Together(layers.Layer):
    """Draws one number for all examples, by the seed of the program or by one of its own."""

    def __init__(self, seed=None):
        super().__init__()
        self.seed = seed

    def call(self, inputs):
        return inputs * (1.0 + 0.5 * tf.random.normal([], seed=self.seed))


def together(seed=None):
    inputs = tf.keras.Input((6,))
    return tf.keras.Model(inputs, layers.Dense(1)(Together(seed)(layers.Dense(4)(inputs))))


@pytest.fixture
def without_seed():
    tf.random.set_seed(None)


def said_of_numbers(make, batch_size=8, **options):
    compile_with = options.pop("compile_with", {})
    model = accum.GradientAccumulateModel.from_model(make(), **options)
    model.compile("sgd", "mse", **compile_with)
    with warned(category=accum.InexactWarning) as texts:
        model.fit(X[:32], Y[:32], batch_size=batch_size, verbose=0)
    return [text for text in texts if "draw random numbers that differ" in text]


@pytest.mark.tf("2.2")
def test_numbers_for_all_examples_are_those_of_the_cycle_if_the_program_or_the_layer_has_a_seed(without_seed):
    whole = lambda make: trained(make, micro_batch_size=BATCH)
    assert_same(trained(together, accum_steps=2), whole(together))
    tf.random.set_seed(None)
    assert not said_of_numbers(lambda: together(3), accum_steps=2)


@pytest.mark.tf("2.2")
@pytest.mark.parametrize(
    "options", [{}, {"micro_batch_size": 3}, {"micro_batch_size": 3, "whole_batch": "all"}], ids=str
)
def test_numbers_for_all_examples_that_each_batch_of_a_cycle_draws_anew_are_named(options, without_seed):
    assert said_of_numbers(together, accum_steps=2, **options)
    if options:
        assert not said_of_numbers(together, **options)  # one batch, one step


@pytest.mark.tf("2.8", because="`jit_compile` is an argument of `compile` from then on")
def test_under_xla_numbers_for_all_examples_are_named_with_a_seed_too():
    tf.random.set_seed(3)
    assert said_of_numbers(together, accum_steps=2, compile_with={"jit_compile": True})


class Multiplied(layers.Layer):
    """Dropout, drawn by TensorFlow in Keras 3, too."""

    def call(self, inputs):
        return inputs * tf.cast(tf.random.uniform(tf.shape(inputs)) > 0.5, inputs.dtype)


class UpdatedElsewhere(tf.keras.Model):
    """Its train step calls none of the optimizers that the model knows."""

    def __init__(self, net, optimizers):
        super().__init__()
        self.net, self.held = net, (lambda: optimizers)

    def call(self, inputs):
        return self.net(inputs)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.net(data[0], training=True) - data[1]) ** 2)
        gradients = tape.gradient(loss, self.net.trainable_variables)
        for optimizer in self.held():
            optimizer.apply_gradients(zip(gradients, self.net.trainable_variables))
        for gradient, var in zip(gradients, self.net.trainable_variables) if not self.held() else ():
            var.assign_sub(0.0 * gradient)
        return {"error": loss}


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("has_optimizer", [False, True], ids=["by-hand", "optimizer"])
def test_each_batch_draws_anew_if_no_known_optimizer_makes_a_step(has_optimizer):
    losses = []
    for size in (5, BATCH):
        set_seeds(1, anew=True)
        inputs = tf.keras.Input((6,))
        net = tf.keras.Sequential([inputs, layers.Dense(16, "relu"), Multiplied(), layers.Dense(1)])
        optimizers = [tf.keras.optimizers.SGD(0.0)] if has_optimizer else []
        for optimizer in optimizers:
            getattr(optimizer, "build", lambda _: None)(net.trainable_variables)
        model = UpdatedElsewhere(net, optimizers)
        model(X[:1])
        model = accum.GradientAccumulateModel.from_model(model, micro_batch_size=size)
        model.compile("sgd")
        history = model.fit(X[:BATCH], Y[:BATCH], batch_size=BATCH, epochs=3, shuffle=False, verbose=0).history
        losses.append(history["error"])
    assert len({round(loss, 4) for loss in losses[0]}) == 3
    np.testing.assert_allclose(*losses, rtol=2e-5)
