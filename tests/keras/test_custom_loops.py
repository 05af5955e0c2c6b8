"""The optimizer in loops of the user's own: several in one program, lists of variables that change, look-ups."""

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_near
from optimizers import MAINLY_EAGER, legacy_family, new_family
from warned import warned

import accum

pytestmark = pytest.mark.tf("2.2")

RANDOM = np.random.RandomState(0)
NOISE, REAL = RANDOM.normal(size=(24, 2)).astype("float32"), RANDOM.normal(size=(24, 3)).astype("float32")
FIRST = [0.5 * RANDOM.normal(size=shape).astype("float32") for shape in ((2, 3), (3,), (3, 1), (1,))]
layers = tf.keras.layers
legacy = legacy_family()


def dense(units, inputs, weights, **kwargs):
    layer = layers.Dense(units, **kwargs)
    layer.build((None, inputs))
    layer.set_weights(weights)
    return layer


@pytest.mark.law("L2")
@pytest.mark.parametrize("nonfinite", ["propagate", "skip_cycle"])
@pytest.mark.parametrize("is_traced", MAINLY_EAGER)
def test_code_that_follows_each_step_follows_that_of_a_flush_too(is_traced, nonfinite):
    variable, moved = tf.Variable([1.0]), []
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.1), 4, nonfinite=nonfinite)

    def take(gradient):
        optimizer.apply_gradients([(gradient, variable)])

    take = tf.function(take) if is_traced else take
    for gradients in (10 * [1.0], 8 * [1.0], [1.0, np.inf]):
        for gradient in gradients:
            take(tf.constant([gradient]))
        optimizer.flush()
        moved.append(bool(optimizer.has_stepped))
    assert moved == [True, False, nonfinite == "propagate"]


# ----------------------------------------------------------------------------------------------------------------
# Several optimizers


class Gan:
    """A generator and a discriminator, each with an optimizer; one step moves both."""

    def __init__(self, wrap=lambda optimizer: optimizer, is_traced=True):
        self.generator = dense(3, 2, FIRST[:2], activation="tanh")
        self.discriminator = dense(1, 3, FIRST[2:])
        self.optimizers = [wrap(tf.keras.optimizers.Adam(0.05)), wrap(tf.keras.optimizers.SGD(0.1, momentum=0.9))]
        self.step = tf.function(self._step) if is_traced else self._step

    def _step(self, noise, real, weights):
        players, others = [self.generator, self.discriminator], tf.nn.sigmoid_cross_entropy_with_logits
        with tf.GradientTape(persistent=True) as tape:
            fake, true = self.discriminator(self.generator(noise)), self.discriminator(real)
            fools = tf.reduce_mean(others(labels=tf.ones_like(fake), logits=fake))
            tells = tf.reduce_mean(others(labels=tf.zeros_like(fake), logits=fake))
            tells += tf.reduce_mean(others(labels=tf.ones_like(true), logits=true))
        for optimizer, player, loss in zip(self.optimizers, players, (fools, tells)):
            grads = tape.gradient(loss, player.trainable_variables)
            optimizer.apply_gradients(zip(grads, player.trainable_variables), **weights)

    def weights(self):
        return self.generator.get_weights() + self.discriminator.get_weights()


@pytest.mark.law("L1", "L5", "L6")
@pytest.mark.parametrize("is_traced", MAINLY_EAGER)
def test_two_optimizers_in_one_loop_equal_the_full_batch(is_traced):
    full = Gan(is_traced=False)
    ours = Gan(lambda optimizer: accum.GradientAccumulateOptimizer(optimizer, accum_steps=3), is_traced)
    for start, end in ((0, 10), (10, 20), (20, 24)):
        full.step(NOISE[start:end], REAL[start:end], {})
    for start, end in ((0, 4), (4, 8), (8, 10), (10, 14), (14, 18), (18, 20), (20, 22), (22, 24)):
        part = slice(start, end)
        ours.step(NOISE[part], REAL[part], {"weight": float(end - start)})
    for optimizer in ours.optimizers:
        optimizer.flush()
        assert int(optimizer.iterations.numpy()) == 3
    assert_near(ours.weights(), full.weights())


class InTurn(Gan):
    """The generator's loss is that of the updated discriminator, as in most GANs."""

    def _step(self, noise, real, weights):
        others = tf.nn.sigmoid_cross_entropy_with_logits
        for optimizer, player in zip(self.optimizers[::-1], (self.discriminator, self.generator)):
            with tf.GradientTape() as tape:
                fake, true = self.discriminator(self.generator(noise)), self.discriminator(real)
                if player is self.generator:
                    loss = tf.reduce_mean(others(labels=tf.ones_like(fake), logits=fake))
                else:
                    loss = tf.reduce_mean(others(labels=tf.zeros_like(fake), logits=fake))
                    loss += tf.reduce_mean(others(labels=tf.ones_like(true), logits=true))
            grads = tape.gradient(loss, player.trainable_variables)
            optimizer.apply_gradients(zip(grads, player.trainable_variables), **weights)


class CycleByCycle(Gan):
    """A cycle of the discriminator, and then one of the generator, in one function."""

    def _step(self, noise, real, weights):
        others, parts = tf.nn.sigmoid_cross_entropy_with_logits, 3 if hasattr(self.optimizers[0], "accum_steps") else 1
        for optimizer, player in zip(self.optimizers[::-1], (self.discriminator, self.generator)):
            for at in range(parts):
                with tf.GradientTape() as tape:
                    fake, true = (
                        self.discriminator(one[at * 12 // parts : (at + 1) * 12 // parts])
                        for one in (self.generator(noise), real)
                    )
                    labels = tf.ones_like(fake) if player is self.generator else tf.zeros_like(fake)
                    loss = tf.reduce_mean(others(labels=labels, logits=fake))
                    loss += tf.reduce_mean(others(labels=tf.ones_like(true), logits=true))
                grads = tape.gradient(loss, player.trainable_variables)
                optimizer.apply_gradients(zip(grads, player.trainable_variables), **weights)


class Unrolled(Gan):
    """Three micro-batches in one function, each with the gradients of both before either is applied."""

    def _step(self, noise, real, weights):
        parts = 3 if hasattr(self.optimizers[0], "accum_steps") else 1
        for at in range(parts):
            part = slice(at * 12 // parts, (at + 1) * 12 // parts)
            super()._step(noise[part], real[part], weights)


@pytest.mark.law("L6", "L17")
@pytest.mark.parametrize("kind, size", [(InTurn, 4), (Gan, 4), (CycleByCycle, 12), (Unrolled, 12)])
def test_an_optimizer_that_waits_for_the_step_of_another_one_is_named(kind, size):
    is_named = kind is InTurn
    full = kind(is_traced=False)
    ours = kind(lambda optimizer: accum.GradientAccumulateOptimizer(optimizer, accum_steps=3))
    for start in (0, 12):
        full.step(NOISE[start : start + 12], REAL[start : start + 12], {})
    with warned("after it was called", accum.InexactWarning) as said:
        for start in range(0, 24, size):
            ours.step(NOISE[start : start + size], REAL[start : start + size], {})
    assert len(said) == is_named
    apart = max(np.abs(one - other).max() for one, other in zip(ours.weights(), full.weights()))
    assert apart > 1e-3 if is_named else apart < 5e-6


@pytest.mark.law("L3")
def test_each_of_several_has_a_cycle_of_its_own():
    one, other = tf.Variable([0.0]), tf.Variable([0.0])
    often = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps=2)
    seldom = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps=3, reduction="sum")

    @tf.function
    def micro_step(grad):
        often.apply_gradients([(grad, one)])
        seldom.apply_gradients([(grad, other)])

    for value in range(1, 7):
        micro_step(tf.constant([float(value)]))
    seldom.reset()
    np.testing.assert_array_equal([one.numpy(), other.numpy()], [[-1.5 - 3.5 - 5.5], [-21.0]])


# ----------------------------------------------------------------------------------------------------------------
# The same in `fit` and in loops, with cycles whose length changes

X, Y = RANDOM.normal(size=(24, 3)).astype("float32"), RANDOM.normal(size=(24, 1)).astype("float32")
STEPS = [slice(0, 6), slice(6, 12), slice(12, 24)]  # in micro-batches of 3: cycles of 2, 2 and 4
SCHEDULE = {0: 2, 2: 4}


def regression(optimizer, **compiled):
    inputs = tf.keras.Input((3,))
    model = tf.keras.Model(inputs, layers.Dense(1)(inputs))
    model.set_weights(FIRST[2:])
    model.compile(optimizer, "mse", **compiled)
    return model


def loop(model, size, is_traced=True):
    def micro_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        grads = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(grads, model.trainable_variables))

    micro_step = tf.function(micro_step) if is_traced else micro_step
    for start in range(0, len(X), size):
        micro_step(X[start : start + size], Y[start : start + size])


def momentum():
    return tf.keras.optimizers.SGD(0.1, momentum=0.9)


@pytest.fixture(scope="module")
def full_batches():
    model = regression(momentum(), run_eagerly=True)
    for part in STEPS:
        model.train_on_batch(X[part], Y[part])
    return model.get_weights()


@pytest.mark.law("L1", "L3")
@pytest.mark.parametrize("how", [pytest.param("fit", marks=pytest.mark.slow), "loop"])
def test_a_schedule_of_cycles_equals_batches_of_these_sizes(how, full_batches):
    model = regression(accum.GradientAccumulateOptimizer(momentum(), accum_steps=SCHEDULE))
    if how == "fit":
        model.fit(X, Y, batch_size=3, shuffle=False, verbose=0)
    else:
        loop(model, 3)
    assert (int(model.optimizer.iterations.numpy()), int(model.optimizer.micro_step)) == (3, 0)
    assert_near(model.get_weights(), full_batches)


@pytest.mark.law("L1", "L6")
def test_a_scheduler_by_epoch_serves_a_plain_model():
    model = regression(accum.GradientAccumulateOptimizer(momentum(), accum_steps=8), run_eagerly=True)
    callbacks = [accum.AccumulationScheduler({0: 2, 1: 5}), accum.FlushCallback()]
    model.fit(X, Y, batch_size=3, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    full = regression(momentum(), run_eagerly=True)
    for start, end in ((0, 6), (6, 12), (12, 18), (18, 24), (0, 15), (15, 24)):
        full.train_on_batch(X[start:end], Y[start:end])
    assert int(model.optimizer.iterations.numpy()) == 6
    assert_near(model.get_weights(), full.get_weights())


# ----------------------------------------------------------------------------------------------------------------
# Frozen and added variables, missing gradients


@pytest.mark.law("L5", "L17")
@pytest.mark.parametrize("entered", ["within", "outside, a variable", "outside, a tensor", "outside, an array"])
def test_a_weight_around_a_traced_step_is_that_of_each_call_or_refused(entered):
    x, counts = np.random.RandomState(0).normal(size=(2, 10)).astype("float32"), (10, 2)
    var, optimizer = tf.Variable(1.0), accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.5), 2)
    optimizer.build([var])
    held = tf.Variable(0.0)

    def step(x, mask):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(mask * (var * x - 1.0) ** 2) / tf.reduce_sum(mask)
        optimizer.apply_gradients([(tape.gradient(loss, var), var)])

    def weighed(x, mask):
        with optimizer.weighing(tf.reduce_sum(mask)):
            step(x, mask)

    taken = tf.function(weighed if entered == "within" else step)
    of_mask = {"outside, a tensor": tf.reduce_sum, "outside, an array": np.sum}
    for row, count in zip(x, counts):
        mask = np.where(np.arange(10) < count, 1.0, 0.0).astype("float32")
        if entered == "within":
            taken(tf.constant(row), tf.constant(mask))
        elif entered == "outside, a variable":
            held.assign(mask.sum())
            with optimizer.weighing(held):
                taken(tf.constant(row), tf.constant(mask))
        else:
            with pytest.raises(ValueError, match="would keep the weight of its first call.*`weight=`"):
                with optimizer.weighing(of_mask[entered](mask)):
                    taken(tf.constant(row), tf.constant(mask))
            assert int(optimizer.micro_step) == 0
            return
    counted = np.concatenate([row[:count] for row, count in zip(x, counts)]).astype("float64")
    assert abs(var.numpy() - (1.0 - 0.5 * np.mean(2.0 * (counted - 1.0) * counted))) < 2e-6


@pytest.mark.law("L5")
def test_an_array_may_weigh_within_a_traced_step():
    var, optimizer = tf.Variable(0.0), accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), 2)
    optimizer.build([var])

    @tf.function
    def step(x):  # traced for each shape
        with optimizer.weighing(np.float32(np.prod(x.shape))):
            optimizer.apply_gradients([(tf.reduce_mean(x), var)])

    step(tf.constant([1.0, 2.0]))
    step(tf.constant([3.0, 4.0, 8.0]))
    np.testing.assert_allclose(var.numpy(), -18.0 / 5.0, rtol=1e-6)


def take(optimizer, variables, grads, is_traced):
    def micro_step():
        pairs = [(None if grad is None else tf.constant([grad]), var) for grad, var in zip(grads, variables)]
        optimizer.apply_gradients(pairs)

    (tf.function(micro_step) if is_traced else micro_step)()


@pytest.mark.law("L8")
@pytest.mark.parametrize(
    "index,is_traced", [pytest.param(0, True, marks=pytest.mark.slow), (0, False), (1, False), (2, False)]
)
def test_a_gradient_may_be_missing_at_any_place_of_the_list(index, is_traced):
    variables = [tf.Variable([0.0]) for _ in range(3)]
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps=3)
    grads = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    for micro_step, row in enumerate(grads):
        with_none = [None if (micro_step, i) in ((1, index), (2, (index + 1) % 3)) else g for i, g in enumerate(row)]
        take(optimizer, variables, with_none, is_traced)
    grads[1, index] = grads[2, (index + 1) % 3] = 0.0
    np.testing.assert_allclose([v.numpy()[0] for v in variables], -grads.mean(axis=0), rtol=1e-6)


@pytest.mark.law("L1")
def test_a_frozen_layer_stays_and_the_rest_equals_the_full_batch():
    def trained(optimizer, size, is_traced=False):
        inputs = tf.keras.Input((3,))
        frozen = layers.Dense(2, activation="tanh", trainable=False)
        model = tf.keras.Model(inputs, layers.Dense(1)(frozen(inputs)))
        model.set_weights([FIRST[0].T, np.zeros(2), FIRST[0][:, :1], np.zeros(1)])
        model.compile(optimizer)
        loop(model, size, is_traced)
        return model.get_weights()

    adam = tf.keras.optimizers.Adam
    ours, full = trained(accum.GradientAccumulateOptimizer(adam(0.05), 4), 3, True), trained(adam(0.05), 12)
    np.testing.assert_array_equal(ours[0], FIRST[0].T)
    assert_near(ours, full)


@pytest.mark.tf(keras=2, because="an optimizer of Keras 3 has only one list of variables")
@pytest.mark.law("L8")
@pytest.mark.parametrize("is_traced", MAINLY_EAGER)
def test_a_variable_added_between_cycles_is_accumulated_from_then_on(is_traced):
    one, other = tf.Variable([0.0]), tf.Variable([0.0])
    optimizer = accum.GradientAccumulateOptimizer(legacy.SGD(1.0, momentum=0.5), accum_steps=2)
    optimizer.build([one])
    for _ in range(2):
        take(optimizer, [one], [1.0], is_traced)
    optimizer.build([one, other])
    for grads in ([3.0, 4.0], [5.0, 8.0]):
        take(optimizer, [one, other], grads, is_traced)
    np.testing.assert_allclose([one.numpy()[0], other.numpy()[0]], [-1.0 - 4.5, -6.0])


@pytest.mark.law("L8")
@pytest.mark.parametrize("accum_steps", [1, 2])
def test_a_variable_may_get_its_first_gradient_late(accum_steps):
    used, late = tf.Variable([0.0]), tf.Variable([0.0])
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps)
    for grads in [[1.0, None]] * accum_steps + [[1.0, 2.0]] * accum_steps:
        take(optimizer, [used, late], grads, is_traced=False)
    np.testing.assert_array_equal([used.numpy(), late.numpy()], [[-2.0], [-2.0]])


@pytest.mark.tf("2.9", because="older optimizers take every variable")
@pytest.mark.law("L17")
@pytest.mark.parametrize("is_traced", MAINLY_EAGER)
@pytest.mark.parametrize("is_announced", [False, True], ids=["unannounced", "built"])
def test_a_variable_that_the_inner_optimizer_cannot_take_is_refused_at_once(is_announced, is_traced):
    one, other = tf.Variable([0.0], name="one"), tf.Variable([0.0], name="other")
    optimizer = accum.GradientAccumulateOptimizer(new_family().SGD(1.0), accum_steps=2)
    optimizer.build([one])
    for _ in range(2):
        take(optimizer, [one], [1.0], is_traced)
    with pytest.raises(ValueError, match="other"):
        if is_announced:
            optimizer.build([one, other])
        else:
            take(optimizer, [one, other], [1.0, 1.0], is_traced)
    for _ in range(2):
        take(optimizer, [one], [1.0], is_traced)
    np.testing.assert_array_equal(one.numpy(), [-2.0])


@pytest.mark.tf(keras=2, because="an optimizer of Keras 3 has only one list of variables")
@pytest.mark.law("L17")
def test_an_optimizer_in_use_for_another_list_is_refused_in_words():
    first, second = dense(3, 2, FIRST[:2]), dense(1, 3, FIRST[2:])
    optimizer = accum.GradientAccumulateOptimizer(legacy.SGD(1.0), accum_steps=2)
    take_in = lambda layer: optimizer.apply_gradients([(tf.ones_like(v), v) for v in layer.trainable_variables])
    take_in(first)
    for is_traced in (False, True):
        with pytest.raises(ValueError, match="within a cycle|an optimizer for each list"):
            (tf.function(lambda: take_in(second)) if is_traced else lambda: take_in(second))()
    take_in(first)
    assert_near(first.get_weights(), [weight - 1.0 for weight in FIRST[:2]])
    assert_near(second.get_weights(), FIRST[2:])


# ----------------------------------------------------------------------------------------------------------------
# Look-ups

WORDS, TEXTS = (
    8,
    np.array([[1, 1], [2, 3], [1, 4], [2, 2], [5, 1], [6, 2], [5, 5], [3, 6], [1, 2], [2, 7], [3, 4], [5, 6]]),
)
LABELS = RANDOM.normal(size=(12, 1)).astype("float32")
TABLE = [RANDOM.normal(size=(WORDS, 2)).astype("float32"), RANDOM.normal(size=(2, 1)).astype("float32")]


def look_up(optimizer, size, texts, **compiled):
    inputs = tf.keras.Input((2,), dtype="int32")
    pooled = layers.GlobalAveragePooling1D()(layers.Embedding(WORDS, 2)(inputs))
    model = tf.keras.Model(inputs, layers.Dense(1, use_bias=False)(pooled))
    model.set_weights(TABLE)
    model.compile(optimizer, "mse", **compiled)
    model.fit(texts, LABELS, batch_size=size, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.tf(keras=2, because="an optimizer of Keras 3 has only one list of variables")
@pytest.mark.slow
@pytest.mark.law("L8")
@pytest.mark.parametrize("sparse", ["rows", pytest.param("dense", marks=pytest.mark.slow)])
def test_an_embedding_in_fit_equals_the_full_batch(sparse):
    """Rows that no text of a cycle holds keep their momentum; where every row is touched, dense is the same."""
    texts = TEXTS if sparse == "rows" else np.arange(24).reshape(12, 2) % WORDS  # every four texts hold all words
    make = lambda: legacy.SGD(0.2, momentum=0.9)
    ours = look_up(accum.GradientAccumulateOptimizer(make(), accum_steps=2, sparse=sparse), 2, texts)
    assert_near(ours, look_up(make(), 4, texts, run_eagerly=True))
