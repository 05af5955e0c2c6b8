"""Options have one default, whoever takes them."""

import inspect
import re
import threading

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_near
from optimizers import mainly
from versions import TF_VERSION
from warned import silent

import accum
import accum.compat.v1
from accum._keras._model import _options
from accum._keras._optimizer import _families

pytestmark = pytest.mark.tf("2.2")


def defaults_of(function):
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


OPTIMIZERS = [accum.compat.v1.AccumOptimizer]
OPTIMIZERS += [accum.GradientAccumulateOptimizer] if hasattr(accum, "GradientAccumulateOptimizer") else []
OF_ONE = {"self", "optimizer", "accum_steps", "name"}
SHARED = sorted(set.intersection(*(set(defaults_of(one.__init__)) for one in OPTIMIZERS)) - OF_ONE)


@pytest.mark.parametrize("name", SHARED)
def test_an_option_is_described_wherever_it_is_taken(name):
    for cls in (*OPTIMIZERS, accum.GradientAccumulateModel):
        assert len(re.findall(rf"(?m)^ +{name}: ", cls.__doc__)) == 1
        assert "**options" not in cls.__doc__


@pytest.mark.parametrize("name", SHARED)
def test_an_option_has_the_same_default_in_keras_and_in_static_graphs(name):
    keras = defaults_of(accum.GradientAccumulateOptimizer.__init__)
    graph = defaults_of(accum.compat.v1.AccumOptimizer.__init__)
    assert keras[name] == graph[name]


@pytest.mark.parametrize("name", SHARED)
def test_a_model_gives_its_optimizer_the_default_of_the_optimizer(name):
    inputs = tf.keras.Input((2,))
    plain = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(inputs))
    model = accum.GradientAccumulateModel.from_model(plain, 2)
    expected = defaults_of(accum.GradientAccumulateOptimizer.__init__)[name]
    assert model.get_config()["accumulation"][name] == expected


def net():
    first = tf.keras.initializers.RandomNormal(seed=1)
    layers = [tf.keras.layers.Dense(4, "tanh", kernel_initializer=first), tf.keras.layers.Dense(1)]
    model = tf.keras.Sequential([tf.keras.Input((3,))] + layers)
    model.set_weights([np.random.RandomState(at).normal(size=w.shape) for at, w in enumerate(model.get_weights())])
    return model


X, Y = (np.random.RandomState(at).normal(size=(24, width)).astype("float32") for at, width in ((0, 3), (1, 1)))


class Sizes(tf.keras.layers.Layer):
    """Notes how many examples it gets."""

    seen = []

    def call(self, inputs):
        tf.py_function(lambda size: self.seen.append(int(size)), [tf.shape(inputs)[0]], [])
        return inputs


@pytest.mark.slow
@pytest.mark.law("L18")
@pytest.mark.parametrize("before", [None, 12], ids=["none", "another"])
def test_the_size_of_micro_batches_can_be_set_later(before):
    """In training, evaluation and prediction; also of a model that was made without one. The steps stay exact."""
    plain = net()
    plain.compile("sgd", "mse")
    plain.fit(X, Y, batch_size=12, epochs=2, shuffle=False, verbose=0)
    inner = net()
    model = tf.keras.Sequential([tf.keras.Input((3,)), Sizes()] + inner.layers)
    model = accum.GradientAccumulateModel.from_model(model, 1, micro_batch_size=before)
    model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=12, shuffle=False, verbose=0)
    model.micro_batch_size = 5
    assert model.micro_batch_size == 5 and "micro_batch_size=5" in repr(model)
    Sizes.seen.clear()
    model.fit(X, Y, batch_size=12, shuffle=False, verbose=0)
    np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), plain.evaluate(X, Y, verbose=0), rtol=2e-5)
    model.predict(X, verbose=0)
    assert set(Sizes.seen) == {2, 4, 5}
    assert_near(model.get_weights(), plain.get_weights())
    assert model.get_config()["accumulation"]["micro_batch_size"] == 5


@pytest.mark.law("L21")
def test_a_size_that_is_set_later_is_as_exact_as_one_that_was_given():
    def with_batch_norm():
        layers = [tf.keras.layers.Dense(4), tf.keras.layers.BatchNormalization(), tf.keras.layers.Dense(1)]
        model = tf.keras.Sequential([tf.keras.Input((3,))] + layers)
        weights = [np.random.RandomState(at).uniform(0.5, 1.5, w.shape) for at, w in enumerate(model.get_weights())]
        model.set_weights(weights)
        return model

    plain, model = with_batch_norm(), accum.GradientAccumulateModel.from_model(with_batch_norm(), accum_steps=1)
    model.micro_batch_size = 5
    for one in (plain, model):
        one.compile(tf.keras.optimizers.SGD(0.1), "mse")
        with silent():
            one.fit(X, Y, batch_size=12, epochs=2, shuffle=False, verbose=0)
    assert_near(model.get_weights(), plain.get_weights())


class SizeOfEpochs(tf.keras.callbacks.Callback):
    """Sets the size in the middle of an epoch, and before evaluation."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.micro_batch_size = 3 + batch

    def on_test_batch_end(self, batch, logs=None):
        self.model.micro_batch_size = 7


@pytest.mark.law("L18")
def test_a_callback_may_set_the_size():
    inner = net()
    model = tf.keras.Sequential([tf.keras.Input((3,)), Sizes()] + inner.layers)
    plain, model = net(), accum.GradientAccumulateModel.from_model(model, micro_batch_size=6)
    for one in (plain, model):
        one.compile("sgd", "mse")
    Sizes.seen.clear()
    histories = [
        one.fit(X, Y, batch_size=12, epochs=2, shuffle=False, validation_data=(X, Y), verbose=0, callbacks=more)
        for one, more in ((plain, []), (model, [SizeOfEpochs()]))
    ]
    assert TF_VERSION < (2, 3) or set(Sizes.seen) > {6, 3, 4, 7}  # there, `fit` keeps the function that it began with
    assert_near(model.get_weights(), plain.get_weights())
    np.testing.assert_allclose(histories[1].history["val_loss"], histories[0].history["val_loss"], rtol=2e-5)


@pytest.mark.law("L17")
def test_a_size_that_can_t_be_set_changes_nothing():
    model = accum.GradientAccumulateModel.from_model(net(), micro_batch_size=4)
    for size, error in ((None, ValueError), (0, ValueError), ("all", TypeError), (2.5, TypeError)):
        with pytest.raises(error, match="micro_batch_size"):
            model.micro_batch_size = size
    assert model.micro_batch_size == 4
    with pytest.raises(ValueError, match="set its `micro_batch_size`"):
        accum.GradientAccumulateModel.from_model(model, micro_batch_size=8)


@pytest.mark.law("L17")
def test_an_unknown_argument_names_the_one_that_was_meant():
    sgd = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    for make in (
        lambda **options: accum.GradientAccumulateOptimizer("sgd", **options),
        lambda **options: accum.compat.v1.AccumOptimizer(sgd, **options),
    ):
        with pytest.raises(TypeError, match="Did you mean `accum_steps`"):
            make(accumulation_steps=8)
        with pytest.raises(TypeError, match="Did you mean `reduction`"):
            make(reductoin="sum")
        with pytest.raises(TypeError, match="`colour` is an unknown argument. Received: colour='red'"):
            make(colour="red")
    with pytest.raises(TypeError, match="call `GradientAccumulateModel.from_model"):
        accum.GradientAccumulateModel(net(), micro_batch_size=8)


@pytest.mark.slow
@pytest.mark.law("L17")
def test_a_warning_names_the_first_of_many_layers():
    norms = [tf.keras.layers.BatchNormalization(name=f"norm_{number}") for number in range(9)]
    model = tf.keras.Sequential([tf.keras.Input((3,))] + norms + [tf.keras.layers.Dense(1)])
    model = accum.GradientAccumulateModel.from_model(model, micro_batch_size=4, whole_batch=())
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match=r"Received: 9, such as \['norm_0', 'norm_1', 'norm_2'\]\. \[accum") as caught:
        model.fit(X, Y, batch_size=12, verbose=0)
    (warning,) = [one for one in caught if "Received: 9" in str(one.message)]
    assert warning.filename == __file__  # the line that called `fit`, through Keras and TensorFlow


@pytest.mark.slow
@pytest.mark.law("L17")
def test_a_scheduler_that_begins_with_shorter_cycles_is_no_mistake(recwarn):
    model = accum.GradientAccumulateModel.from_model(net(), 2)
    model.compile("sgd", "mse")
    scheduler = accum.AccumulationScheduler({0: 2, 4: 8})
    model.fit(X, Y, batch_size=4, epochs=1, verbose=0, callbacks=[scheduler])
    assert not [one for one in recwarn if "fewer batches than a cycle" in str(one.message)]


@pytest.mark.slow
@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "steps,last_cycle,updates,said",
    [(6, "flush", 2, "6 batches make 2 updates, the last of 2 of 4 batches")]
    + [(6, "drop", 1, "6 batches make 1 update, without the last 2:"), (6, "carry", 1, None)]
    + [(4, "flush", 1, None), (31, "flush", 8, None)],
)
def test_an_epoch_that_ends_within_a_cycle_says_how_many_updates_it_makes(recwarn, steps, last_cycle, updates, said):
    model = accum.GradientAccumulateModel.from_model(net(), 4, last_cycle=last_cycle)
    model.compile("sgd", "mse", run_eagerly=True)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(1).repeat()
    for _ in range(2):
        model.fit(data, steps_per_epoch=steps, verbose=0)
        model.optimizer.reset()
    messages = [str(one.message) for one in recwarn if "ends within a cycle" in str(one.message)]
    assert int(model.optimizer.iterations) == 2 * updates
    assert len(messages) == (said is not None) and all(said in one and "steps_per_epoch" in one for one in messages)


@pytest.mark.law("L17")
@pytest.mark.parametrize("size,is_said", [(8, True), (4, True), (3, False), (None, False)])
def test_batches_that_are_not_split_are_told_once(recwarn, size, is_said):
    model = accum.GradientAccumulateModel.from_model(net(), 2, micro_batch_size=size)
    model.compile("sgd", "mse", run_eagerly=True)
    for _ in range(2):
        model.fit(X[:8], Y[:8], batch_size=4, verbose=0)
    messages = [str(one.message) for one in recwarn if "No batch is split" in str(one.message)]
    assert len(messages) == is_said and all(f"micro_batch_size={size}, batch_size=4" in one for one in messages)


def batched(drop_remainder):
    return tf.data.Dataset.from_tensor_slices((X[:8], Y[:8])).batch(4, drop_remainder=drop_remainder)


def generated(*sizes):
    return ((X[:size], Y[:size]) for size in sizes)


class Listed(tf.keras.utils.Sequence):
    """Two batches."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return X[: self.size], Y[: self.size]


@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "options,size,received",
    [
        (lambda: {"x": X[:8], "y": Y[:8], "batch_size": 32}, 8, "micro_batch_size=8, batch_size=32, 8 examples"),
        (lambda: {"x": X[:8], "y": Y[:8], "batch_size": 32}, 7, None),
        (
            lambda: {"x": X[:8], "y": Y[:8], "validation_split": 0.25},
            6,
            "micro_batch_size=6, batch_size=32, 6 examples",
        ),
        (lambda: {"x": batched(drop_remainder=True)}, 4, "micro_batch_size=4, batches of 4 examples"),
        (lambda: {"x": batched(drop_remainder=True)}, 3, None),
        (lambda: {"x": batched(drop_remainder=False)}, 4, "micro_batch_size=4, batches of at most 4 examples"),
        (lambda: {"x": batched(drop_remainder=False)}, 3, None),
        (lambda: {"x": generated(4, 4), "steps_per_epoch": 2}, 4, "micro_batch_size=4, batches of at most 4 examples"),
        (lambda: {"x": generated(4, 3), "steps_per_epoch": 2}, 3, None),  # the last batch is smaller
        (lambda: {"x": Listed(4)}, 5, "micro_batch_size=5, batches of at most 4 examples"),
        (lambda: {"x": Listed(4)}, 3, None),
    ],
)
def test_the_data_tell_what_a_batch_has(recwarn, options, size, received):
    model = accum.GradientAccumulateModel.from_model(net(), micro_batch_size=size)
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(verbose=0, **options())
    messages = [str(one.message) for one in recwarn if "No batch is split" in str(one.message)]
    assert [one.split("Received: ")[1] for one in messages] == (
        [received + ". [accum: batch-sizes]"] if received else []
    )


@pytest.mark.law("L17")
@pytest.mark.parametrize("run_eagerly", [pytest.param(False, id="traced", marks=pytest.mark.slow), True])
@pytest.mark.parametrize("size,is_said", [(4, True), (3, False)])
def test_train_on_batch_tells_once_that_nothing_is_split(recwarn, size, is_said, run_eagerly):
    model = accum.GradientAccumulateModel.from_model(net(), micro_batch_size=size)
    model.compile("sgd", "mse", run_eagerly=run_eagerly)
    for last in (4, 4, 2):
        model.train_on_batch(X[:last], Y[:last])
    assert len([one for one in recwarn if "No batch is split" in str(one.message)]) == is_said


@pytest.mark.law("L17")
def test_evaluation_and_prediction_tell_nothing_of_batches_that_are_not_split(recwarn):
    model = accum.GradientAccumulateModel.from_model(net(), micro_batch_size=4)
    model.compile("sgd", "mse", run_eagerly=True)
    model.evaluate(batched(drop_remainder=False), verbose=0)
    model.predict(X[:4])
    assert not [one for one in recwarn if "No batch is split" in str(one.message)]


@pytest.mark.law("L17")
@pytest.mark.parametrize("size,is_said", mainly([(4, True), (3, False)], (4, True)))
def test_batches_of_a_dataset_are_compared_as_a_replica_has_them(recwarn, size, is_said):
    with tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
        model = accum.GradientAccumulateModel.from_model(net(), micro_batch_size=size)
        model.compile("sgd", "mse", run_eagerly=True)
    model.fit(tf.data.Dataset.from_tensor_slices((X[:8], Y[:8])).batch(8), verbose=0)
    assert len([one for one in recwarn if "No batch is split" in str(one.message)]) == is_said


@pytest.mark.slow
@pytest.mark.law("L17")
def test_a_batch_is_compared_with_micro_batches_as_a_replica_has_it(recwarn):
    with tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
        model = accum.GradientAccumulateModel.from_model(net(), 2, micro_batch_size=4)
        model.compile("sgd", "mse")
        split_already = accum.GradientAccumulateModel.from_model(net(), 2, micro_batch_size=2)
        split_already.compile("sgd", "mse")
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    split_already.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    said = [str(one.message) for one in recwarn]
    assert [one.split("Received: ")[1] for one in said if "No batch is split" in one] == [
        "micro_batch_size=4, batch_size=8, 2 replicas. [accum: batch-sizes]"
    ]
    (one,) = [one for one in said if "leave out `accum_steps`" in one]
    assert "Each update counts 16 examples" in one and "batch_size=8, 2 replicas. [" in one


@pytest.mark.law("L17")
@pytest.mark.parametrize("size,steps,is_said", [(2, 2, True), (2, 3, False), (2, 1, False), (2, {0: 2}, False)])
def test_an_update_of_more_than_the_batch_that_was_meant_is_told_once(recwarn, size, steps, is_said):
    """Who thinks of `batch_size = micro_batch_size * accum_steps` gets an update of `accum_steps` times as many."""
    model = accum.GradientAccumulateModel.from_model(net(), steps, micro_batch_size=size)
    model.compile("sgd", "mse", run_eagerly=True)
    for _ in range(2):
        model.fit(X[:8], Y[:8], batch_size=4, verbose=0)
    messages = [str(one.message) for one in recwarn if "leave out `accum_steps`" in str(one.message)]
    assert len(messages) == is_said and all("Each update counts 8 examples" in one for one in messages)


@pytest.mark.law("L17")
def test_steps_that_keras_divides_the_data_by_are_not_taken_for_batches_of_32(recwarn):
    model = accum.GradientAccumulateModel.from_model(net(), micro_batch_size=32)
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(np.tile(X, [6, 1])[:128], np.tile(Y, [6, 1])[:128], steps_per_epoch=2, verbose=0)
    assert not [one for one in recwarn if "No batch is split" in str(one.message)]


class TwoUpdatesABatch(tf.keras.Model):
    """As the critic of a GAN is trained."""

    def __init__(self):
        super().__init__()
        self.dense = tf.keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
        return {"loss": loss}


@pytest.mark.law("L17")
@pytest.mark.parametrize("with_validation", [False, True])
def test_an_optimizer_that_is_called_twice_a_batch_ends_its_cycles_as_it_counts_them(recwarn, with_validation):
    model = TwoUpdatesABatch()
    model.compile(accum.GradientAccumulateOptimizer("sgd", 4), "mse", run_eagerly=True)
    options = {"validation_data": (X[:4], Y[:4])} if with_validation else {}
    model.fit(X[:10], Y[:10], batch_size=1, verbose=0, callbacks=[accum.FlushCallback()], **options)
    assert int(model.optimizer.iterations) == 5
    assert not [one for one in recwarn if "epoch" in str(one.message)]


@pytest.mark.law("L17")
def test_autograph_has_no_complaints(caplog):
    model = accum.GradientAccumulateModel.from_model(net(), micro_batch_size=2)
    model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=4, verbose=0)
    assert "AutoGraph" not in caplog.text


@pytest.mark.law("L17")
def test_an_optimizer_without_accum_steps_says_that_nothing_accumulates(recwarn):
    with pytest.warns(UserWarning, match="`accum_steps` was not given, so each micro-batch makes a step"):
        assert accum.GradientAccumulateOptimizer("sgd").accum_steps == 1
    recwarn.clear()
    again = accum.GradientAccumulateOptimizer("sgd", 1)
    accum.GradientAccumulateOptimizer.from_config(again.get_config())
    assert not [one for one in recwarn if "accum_steps" in str(one.message)]


@pytest.mark.law("L17")
def test_a_warning_in_a_thread_without_code_of_the_user_s_points_into_accum():
    with pytest.warns(UserWarning, match="left out of the config") as caught:
        thread = threading.Thread(target=accum._config.to_config, args=("transform", lambda pairs: pairs))
        thread.start()
        thread.join()
    assert caught[0].filename == accum._config.__file__


@pytest.mark.slow
@pytest.mark.law("L17")
@pytest.mark.parametrize("last_cycle,said", [("flush", "one update"), ("drop", "no update"), ("carry", None)])
def test_an_epoch_shorter_than_a_cycle_says_so(recwarn, last_cycle, said):
    model = accum.GradientAccumulateModel.from_model(net(), 8, last_cycle=last_cycle)
    model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=4, epochs=2, verbose=0)  # 6 batches
    messages = [str(one.message) for one in recwarn if "fewer batches than a cycle" in str(one.message)]
    assert len(messages) == (said is not None)
    if said:
        assert said in messages[0] and "accum_steps=8, 6 batches" in messages[0]
    assert int(model.optimizer.iterations) == {"flush": 2, "drop": 0, "carry": 1}[last_cycle]


# --------------------------------------------------------------------------------------------------------------------
# Options that are set as attributes


def compiled(accum_steps=4, optimizer="sgd"):
    model = accum.GradientAccumulateModel.from_model(net(), accum_steps)
    model.compile(tf.keras.optimizers.SGD(0.1) if optimizer == "sgd" else optimizer, "mse")
    return model


def updates(model, batches):
    before = int(model.optimizer.iterations)
    for at in range(batches):
        model.train_on_batch(X[2 * at : 2 * at + 2], Y[2 * at : 2 * at + 2])
    return int(model.optimizer.iterations) - before


@pytest.mark.slow
@pytest.mark.law("L7")
def test_accum_steps_of_a_model_can_be_set():
    model = compiled()
    assert model.accum_steps == 4 and updates(model, 4) == 1
    model.accum_steps = 2
    assert model.accum_steps == model.optimizer.accum_steps == 2 and updates(model, 4) == 2
    with pytest.raises(ValueError, match="must be an int >= 1"):
        model.accum_steps = 0
    with pytest.warns(UserWarning, match="which the model does not have yet"):
        accum.GradientAccumulateModel.from_model(net(), 4).accum_steps = 2


@pytest.mark.slow
@pytest.mark.law("L7")
@pytest.mark.skipif(not hasattr(tf.keras.mixed_precision, "LossScaleOptimizer"), reason="came with 2.4")
def test_accum_steps_that_is_set_on_a_loss_scale_optimizer_is_used(recwarn):
    inner = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1))
    model = compiled(optimizer=inner)
    optimizer = model.optimizer.inner_optimizer
    model.optimizer.accum_steps = 2
    model.train_on_batch(X[:2], Y[:2])
    model.train_on_batch(X[:2], Y[:2])
    assert optimizer.accum_steps == 2 and int(optimizer.iterations) == 1
    model.optimizer.accum_steps = 3
    model.fit(X, Y, batch_size=4, verbose=0)
    assert optimizer.accum_steps == 3 and int(optimizer.iterations) == 3
    assert not [one for one in recwarn if "LossScaleOptimizer" in str(one.message)]

    class Late(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.optimizer.accum_steps = 6

    with pytest.warns(UserWarning, match="is in use from this epoch on"):
        model.fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=[Late()])
    assert optimizer.accum_steps == 6 and int(optimizer.iterations) == 3 + 2 + 1


def test_names_of_options_are_those_of_options():
    assert not _options.OF_ACCUM_ALONE - set(_options.ModelOptions.NAMES)
    assert sorted(_families.FIXED) == SHARED


@pytest.mark.law("L17")
def test_other_options_that_are_set_are_named():
    model = compiled()
    with pytest.warns(UserWarning, match="`last_cycle` is an option of accum, and an attribute of this name changes"):
        model.last_cycle = "carry"
    with pytest.raises(AttributeError, match="`reduction` of an optimizer that accumulates can't be changed"):
        model.optimizer.reduction = "sum"
    model.optimizer.learning_rate = 0.5  # that of the inner optimizer


class WithAttributes(tf.keras.Model):
    """A model whose own attributes have names of options."""

    def __init__(self):
        super().__init__()
        self.head = tf.keras.layers.Dense(1)
        self.accum_steps, self.reduction = 7, "own"

    def call(self, inputs):
        assert (self.accum_steps, self.reduction) in [(7, "own"), (8, "other")]
        return self.head(inputs)

    def compile(self, *args, eps=0.1, **kwargs):
        super().compile(*args, **kwargs)
        self.eps = eps


class OfTheClass(WithAttributes):
    accum_steps = 7

    def __init__(self):
        tf.keras.Model.__init__(self)
        self.head, self.reduction = tf.keras.layers.Dense(1), "own"


class SetsInCompile(tf.keras.Sequential):
    def compile(self, *args, accum_steps=4, **kwargs):
        super().compile(*args, **kwargs)
        self.accum_steps = accum_steps


@pytest.mark.slow
@pytest.mark.law("L17")
@pytest.mark.parametrize("cls", [WithAttributes, OfTheClass, SetsInCompile])
def test_attributes_of_the_users_class_remain_its_own(cls, recwarn):
    plain = cls([tf.keras.layers.Dense(1)]) if cls is SetsInCompile else cls()
    model = accum.GradientAccumulateModel.from_model(plain, 4)
    model.compile("sgd", "mse")
    assert model.accum_steps == (4 if cls is SetsInCompile else 7)
    assert updates(model, 4) == 1
    if cls is not SetsInCompile:  # whose value is K, and may have set it
        model.accum_steps, model.reduction = 8, "other"
        assert updates(model, 4) == 1
    assert not [one for one in recwarn if "an option of accum" in str(one.message)]


@pytest.mark.slow
@pytest.mark.law("L17")
def test_another_optimizer_in_the_middle_of_a_cycle_is_named(recwarn):
    model = compiled()
    updates(model, 1)
    model.compile(model.optimizer, "mae")
    assert not [one for one in recwarn if "another optimizer" in str(one.message)]
    with pytest.warns(UserWarning, match="another optimizer in the middle of a cycle, whose gradients are lost"):
        model.compile(model.optimizer.optimizer, "mse")


def test_the_schedule_that_an_optimizer_shows_is_a_copy():
    optimizer = accum.GradientAccumulateOptimizer("sgd", {0: 2, 10: 3})
    optimizer.accum_steps[0] = 5
    assert optimizer.accum_steps == {0: 2, 10: 3}
