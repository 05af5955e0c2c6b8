"""Any Keras model accumulates: it keeps its class's methods, its variables and what it was compiled with."""

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_near
from versions import IS_KERAS_3
from warned import silent, warned

import accum

pytestmark = pytest.mark.tf("2.2")

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.normal(size=(22, 3)).astype("float32"), RANDOM.normal(size=(22, 2)).astype("float32")
WEIGHTS = [0.5 * RANDOM.normal(size=shape) for shape in ((3, 4), (4, 2), (2,))]
layers = tf.keras.layers


def functional():
    inputs = tf.keras.Input((3,))
    return tf.keras.Model(inputs, layers.Dense(2)(hidden()(inputs)))


def hidden(**kwargs):
    return layers.Dense(4, activation="tanh", use_bias=False, **kwargs)


def sequential():
    return tf.keras.Sequential([hidden(input_shape=(3,)), layers.Dense(2)])


def deferred():
    model = tf.keras.Sequential([hidden(), layers.Dense(2)])
    model.build((None, 3))
    return model


class Subclassed(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.parts = [hidden(), layers.Dense(2)]

    def call(self, inputs, training=None):
        return self.parts[1](self.parts[0](inputs))

    def greet(self):
        return "hello"


class OwnTrainStep(Subclassed):
    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        return {"loss": loss, "mine": loss * 2.0}


def built(make):
    model = make()
    model(X[:1])
    model.set_weights(WEIGHTS)
    return model


SLOW = [pytest.param(make, marks=pytest.mark.slow) for make in (sequential, deferred)]
MODELS = [functional, Subclassed, OwnTrainStep] + SLOW


@pytest.mark.slow
@pytest.mark.law("L1", "L5")
@pytest.mark.parametrize("make", MODELS)
def test_fit_on_ragged_micro_batches_equals_fit_on_the_full_batch(make):
    full, model = built(make), accum.GradientAccumulateModel.from_model(built(make), 4)
    assert isinstance(model, type(full)) and isinstance(model, accum.GradientAccumulateModel)
    for one, size in ((full, 20), (model, 5)):
        one.compile(tf.keras.optimizers.Adam(0.01), "mse", run_eagerly=one is full)  # a trace costs most of the time
        history = one.fit(X, Y, batch_size=size, epochs=2, shuffle=False, verbose=0).history
        assert ("mine" in history) == (make is OwnTrainStep)
    assert int(model.optimizer.iterations.numpy()) == int(full.optimizer.iterations.numpy()) == 4
    assert_near(model.get_weights(), full.get_weights())


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS)
def test_it_shares_variables_and_goes_on_with_what_the_model_was_compiled_with(make):
    if make is OwnTrainStep and IS_KERAS_3:
        pytest.skip("Keras 3 expects the train step of a user to update the metrics that the model was compiled with")
    plain = built(make)
    is_eager = make not in (functional, OwnTrainStep)  # which it is compiled with too
    plain.compile(tf.keras.optimizers.Adam(0.01), "mse", metrics=["mae"], run_eagerly=is_eager)
    plain.fit(X[:20], Y[:20], batch_size=5, verbose=0)
    model = accum.GradientAccumulateModel.from_model(plain, accum_steps=2)
    assert [id(v) for v in model.weights] == [id(v) for v in plain.weights]
    history = model.fit(X[:20], Y[:20], batch_size=5, verbose=0).history
    assert ("mae" in history) == (make is not OwnTrainStep)
    assert int(model.optimizer.iterations.numpy()) == 4 + 2
    assert model.evaluate(X, Y, verbose=0) == plain.evaluate(X, Y, verbose=0)


@pytest.mark.slow
def test_the_model_itself_is_left_as_it_is():
    plain = built(Subclassed)
    plain.compile(tf.keras.optimizers.SGD(0.1), "mse")
    model = accum.GradientAccumulateModel.from_model(plain, 2)
    model.fit(X[:20], Y[:20], batch_size=5, verbose=0)
    assert type(plain) is Subclassed
    plain.fit(X[:20], Y[:20], batch_size=5, verbose=0)
    assert int(plain.optimizer.iterations.numpy()) == 2 + 4
    assert model.greet() == "hello"


@pytest.mark.law("L12")
@pytest.mark.parametrize("options", [{"accum_steps": 1}, {"micro_batch_size": 5}], ids=str)
def test_a_model_that_is_frozen_after_it_was_compiled_trains_as_keras_trains_it(options):
    """Keras 2 trains what was trainable in `compile`: the critic of a GAN, which is frozen for the generator."""
    ended = []
    for make in (lambda model: model, lambda model: accum.GradientAccumulateModel.from_model(model, **options)):
        plain = built(functional)
        plain.compile(tf.keras.optimizers.SGD(0.1), "mse")
        critic = make(plain)
        critic.trainable = False
        generator = tf.keras.Sequential([tf.keras.Input((3,)), layers.Dense(3, kernel_initializer="ones"), critic])
        generator.compile(tf.keras.optimizers.SGD(0.1), "mse")
        before = critic.get_weights()
        for _ in range(2):
            critic.train_on_batch(X[:10], Y[:10])
            generator.train_on_batch(X[:10], Y[:10])
        assert any((old != new).any() for old, new in zip(before, critic.get_weights())) != IS_KERAS_3
        ended.append(generator.get_weights())
    assert_near(*ended)


@pytest.mark.slow
def test_a_functional_model_makes_no_other_functional():
    plain = functional()
    accum.GradientAccumulateModel(2, inputs=plain.inputs, outputs=plain.outputs)
    model = accum.GradientAccumulateModel.from_model(Subclassed(), 2)  # not built yet
    model.compile("sgd", "mse")
    model.fit(X[:20], Y[:20], batch_size=5, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 2
    assert "Functional" not in [base.__name__ for base in type(model).__mro__]


@pytest.mark.slow
def test_a_subclass_whose_init_makes_the_layers_leaves_the_class_as_it_is():
    class Own(accum.GradientAccumulateModel):
        def __init__(self):
            inputs = tf.keras.Input((3,))
            super().__init__(accum_steps=2, inputs=inputs, outputs=layers.Dense(2)(inputs))

    before = accum.GradientAccumulateModel.__bases__
    own = Own()
    assert isinstance(own, Own) and accum.GradientAccumulateModel.__bases__ == before
    for model in (own, accum.GradientAccumulateModel.from_model(Subclassed(), 2)):
        model.compile("sgd", "mse")
        model.fit(X[:20], Y[:20], batch_size=5, verbose=0)
        assert int(model.optimizer.iterations.numpy()) == 2


@pytest.mark.slow
def test_a_checkpoint_of_the_plain_model_restores_into_it_and_back(tmp_path):
    plain = built(Subclassed)
    plain.compile(tf.keras.optimizers.Adam(0.01), "mse", run_eagerly=True)
    plain.fit(X[:20], Y[:20], batch_size=5, verbose=0)
    model = accum.GradientAccumulateModel.from_model(built(Subclassed), 2)
    model.compile(tf.keras.optimizers.Adam(0.01), "mse", run_eagerly=True)
    suffix = ".weights.h5" if IS_KERAS_3 else ""
    if IS_KERAS_3:  # loads no more than what is there
        model.optimizer.build(model.trainable_variables)
    plain.save_weights(str(tmp_path / "plain") + suffix)
    model.load_weights(str(tmp_path / "plain") + suffix)
    np.testing.assert_array_equal(model.predict(X), plain.predict(X))
    model.fit(X[:20], Y[:20], batch_size=5, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 4 + 2
    model.save_weights(str(tmp_path / "ours") + suffix)
    plain.load_weights(str(tmp_path / "ours") + suffix)
    np.testing.assert_array_equal(model.predict(X), plain.predict(X))


class TwoOptimizers(tf.keras.Model):
    """As a GAN is written: its own `compile` and two optimizers, each for variables of its own."""

    def __init__(self):
        super().__init__()
        self.one, self.other = tf.Variable([0.0]), tf.Variable([0.0])

    def compile(self, one_optimizer, other_optimizer):
        super().compile()
        self.one_optimizer, self.other_optimizer = one_optimizer, other_optimizer

    def call(self, inputs):
        return inputs * self.one * self.other

    def train_step(self, data):
        mean = tf.reduce_mean(data)
        self.one_optimizer.apply_gradients([(tf.reshape(mean, [1]), self.one)])
        self.other_optimizer.apply_gradients([(tf.reshape(10.0 * mean, [1]), self.other)])
        return {"loss": mean}


@pytest.mark.slow
@pytest.mark.law("L5", "L6")
def test_several_optimizers_accumulate_each_for_itself():
    model = accum.GradientAccumulateModel.from_model(TwoOptimizers(), 3)
    sgd = tf.keras.optimizers.SGD
    model.compile(sgd(1.0), other_optimizer=sgd(1.0))
    data = np.arange(10, dtype="float32")
    model.fit(data, batch_size=2, shuffle=False, verbose=0)  # cycles of 3 and 2 micro-batches
    moved = data[:6].mean() + data[6:].mean()
    np.testing.assert_allclose([model.one.numpy()[0], model.other.numpy()[0]], [-moved, -10.0 * moved], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.law("L6")
@pytest.mark.parametrize("last_cycle,steps,left", [("flush", 1, 0), ("drop", 0, 0), ("carry", 0, 2)])
def test_a_fit_cut_short_leaves_no_cycle_to_the_next(last_cycle, steps, left):
    model = accum.GradientAccumulateModel.from_model(built(functional), 4, last_cycle=last_cycle)
    model.compile("sgd", "mse", run_eagerly=last_cycle != "flush")  # what is traced is the same for each

    class Stop(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.fit(X[:20], Y[:20], batch_size=5, verbose=0, callbacks=[Stop()])
    assert (int(model.optimizer.iterations.numpy()), int(model.optimizer.micro_step)) == (steps, left)


@pytest.mark.law("L17")
def test_from_model_refuses():
    for model in (None, layers.Dense(2), functional):
        with pytest.raises(TypeError, match="`model` must be a `tf.keras.Model`. Received"):
            accum.GradientAccumulateModel.from_model(model, 2)
    once = accum.GradientAccumulateModel.from_model(functional(), 2)
    with pytest.raises(ValueError, match="`model` accumulates already"):
        accum.GradientAccumulateModel.from_model(once, 2)
    with pytest.raises(ValueError, match="`accum_steps` must be an int >= 1. Received: accum_steps=0."):
        accum.GradientAccumulateModel.from_model(functional(), 0)
    with pytest.raises(TypeError, match="last_cycles"):
        accum.GradientAccumulateModel.from_model(functional(), 2, last_cycles="flush")
    with pytest.raises(ValueError, match="accumulates already.*: accum_steps=3, and the model's is 2"):
        once.compile(accum.GradientAccumulateOptimizer("sgd", 3), "mse")


class Choosing(tf.keras.Sequential):
    """Understands a word in place of an optimizer, as the tasks of KerasHub do."""

    def compile(self, optimizer="auto", loss="auto", **kwargs):
        optimizer = tf.keras.optimizers.SGD(0.1) if optimizer == "auto" else optimizer
        super().compile(optimizer=optimizer, loss="mse" if loss == "auto" else loss, **kwargs)


@pytest.mark.law("L17")
@pytest.mark.parametrize("passed", [{}, {"optimizer": "auto"}, {"optimizer": "sgd"}], ids=str)
def test_a_class_may_understand_other_words_for_an_optimizer_than_keras(passed):
    ended = []
    for accum_steps, batch_size in ((0, 10), (2, 5)):
        model = Choosing([tf.keras.Input((3,)), layers.Dense(2, kernel_initializer="ones")])
        model = accum.GradientAccumulateModel.from_model(model, accum_steps) if accum_steps else model
        model.compile(**passed)
        model.fit(X[:20], Y[:20], batch_size=batch_size, shuffle=False, verbose=0)
        ended.append(model.get_weights())
    assert int(model.optimizer.iterations.numpy()) == 2
    assert_near(*ended)


class Penalised(tf.keras.Model):
    """Sets an attribute in its `call`, which a loss reads."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out, self.kl = tf.keras.layers.Dense(6), tf.keras.layers.Dense(1), 0.0
        self.penalty = self.elbo

    def call(self, inputs):
        hidden = self.hidden(inputs)
        self.kl = tf.reduce_sum(hidden**2, -1)
        return self.out(hidden)

    def elbo(self, y, outputs):
        return tf.reduce_mean((y - outputs) ** 2, -1) + 0.1 * self.kl


def l2_of(model):
    return 0.1 * tf.reduce_sum(model.hidden.kernel**2)


LOSSES_OF_A_MODEL = {  # {name: function of the model, and of the first, that returns a loss}
    "method kept before": lambda model, first: lambda y, outputs: model.penalty(y, outputs),
    "closure": lambda model, first: lambda y, outputs: model.elbo(y, outputs),
    "closure over the first": lambda model, first: lambda y, outputs: first.elbo(y, outputs),
    "method of the first": lambda model, first: first.elbo,
    "weights of another": lambda model, first: lambda y, outputs: (y - outputs) ** 2 + l2_of(first),
}


@pytest.mark.parametrize("name", sorted(LOSSES_OF_A_MODEL))
def test_a_loss_that_reads_an_attribute_which_a_call_sets_has_to_be_of_the_new_model(name):
    random = np.random.RandomState(0)
    x, y = random.normal(size=(12, 4)).astype("float32"), random.normal(size=(12, 1)).astype("float32")
    weights = [random.normal(size=shape) for shape in ((4, 6), (6,), (6, 1), (1,))]
    ends = []
    for size in (None, 5):
        first = model = Penalised()
        model(x[:2])
        first.kl = 0.0
        if size is not None:
            model = accum.GradientAccumulateModel.from_model(first, micro_batch_size=size)
        model.set_weights(weights)
        model.compile(tf.keras.optimizers.SGD(0.1), LOSSES_OF_A_MODEL[name](model, first))
        is_named = size is not None and name.endswith("first")
        with warned("[accum: other-model]", accum.InexactWarning) if is_named else silent(accum.InexactWarning):
            model.train_on_batch(x, y)
        ends.append(model.get_weights())
    if name.endswith("first"):
        with pytest.raises(AssertionError):
            assert_near(*ends)
    else:
        assert_near(*ends)


def test_a_model_may_keep_any_bound_method_of_its_own():
    model = Penalised()
    model.__dict__["as_is"] = [model.__setattr__, model.elbo]
    model.__dict__["built_in"] = model.__reduce_ex__
    assert accum.GradientAccumulateModel.from_model(model, 2).built_in is model.built_in
