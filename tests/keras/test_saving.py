"""Files and copies of a model that accumulates are never worse than those of a plain one (law L12)."""

import copy
import functools
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
import versions
from equality import assert_near

import accum

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.slow, pytest.mark.law("L12")]

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.normal(size=(20, 3)).astype("float32"), RANDOM.normal(size=(20, 2)).astype("float32")
# Keras 3 builds the optimizer of an H5 file for no variables, so that it can't go on.
FORMATS = [] if versions.IS_KERAS_3 else ["tf", "h5"]
FORMATS += ["keras"] if versions.TF_VERSION >= (2, 13) else []  # 2.12 writes H5 under that name
layers = tf.keras.layers


def functional():
    inputs = {"a": tf.keras.Input((3,), name="a")} if versions.TF_VERSION >= (2, 4) else tf.keras.Input((3,), name="a")
    hidden = layers.Dense(4, use_bias=False)(inputs["a"] if isinstance(inputs, dict) else inputs)
    return tf.keras.Model(inputs, layers.Dense(2)(accum.AccumBatchNormalization()(hidden)))


def sequential():
    return tf.keras.Sequential([layers.Dense(4, input_shape=(3,)), layers.Dense(2)])


def doubled(grads_and_vars):
    return [(2.0 * grad, var) for grad, var in grads_and_vars]


if versions.HAS_KERAS_API:
    doubled = tf.keras.utils.register_keras_serializable(package="tests")(doubled)


OPTIONS = {"use_agc": True, "last_cycle": "carry", "transform": doubled, "micro_batch_weight": "equal"}


def trained(make, accumulates=True, **options):
    model = make()
    if accumulates:
        model = accum.GradientAccumulateModel.from_model(model, {0: 2, 100: 3}, **dict(OPTIONS, **options))
    metrics = [tf.keras.metrics.MeanAbsoluteError()]
    model.compile(tf.keras.optimizers.Adam(0.01), tf.keras.losses.MeanSquaredError(), metrics=metrics)
    model.fit({"a": X} if make is functional else X, Y, batch_size=5, epochs=2, verbose=0)
    return model


@functools.lru_cache(maxsize=None)
def trained_once(make):
    """A trained model that no test changes."""
    return trained(make)


@functools.lru_cache(maxsize=None)
def within_a_cycle():
    """A trained model in an unfinished cycle, which no test changes."""
    model = trained(sequential)
    model.train_on_batch(X, Y)
    return model


def file_of(tmp_path, format):
    return str(tmp_path / {"tf": "model", "h5": "model.h5", "keras": "model.keras"}[format])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("make", [functional, sequential])
def test_a_file_brings_back_the_model_and_trains_on(make, format, tmp_path, recwarn):
    model, x = trained_once(make), X if make is sequential else {"a": X}
    model.save(file_of(tmp_path, format))
    again = tf.keras.models.load_model(file_of(tmp_path, format))
    np.testing.assert_array_equal(again.predict(x), model.predict(x))
    assert int(again.optimizer.iterations.numpy()) == (0 if format == "tf" else 4)  # a SavedModel keeps no plain ones
    assert again.optimizer.accum_steps == {0: 2, 100: 3}
    assert not [one for one in recwarn if "Skipping variable loading" in str(one.message)]
    if versions.TF_VERSION == (2, 2) and format == "tf":
        return  # comes back as a plain `Model` of the accumulating optimizer
    assert isinstance(again, accum.GradientAccumulateModel)
    assert again.get_config()["accumulation"] == model.get_config()["accumulation"]
    before = int(again.optimizer.iterations.numpy())
    again.fit(x, Y, batch_size=5, verbose=0)
    assert int(again.optimizer.iterations.numpy()) == before + 2


@pytest.mark.parametrize("format", FORMATS)
def test_an_unfinished_cycle_is_left_out_with_a_warning(format, tmp_path, recwarn):
    model = within_a_cycle()
    model.save(file_of(tmp_path, format))
    said = [str(warning.message) for warning in recwarn if "unfinished cycle is left out" in str(warning.message)]
    assert len(said) == (0 if format == "tf" else 1)
    again = tf.keras.models.load_model(file_of(tmp_path, format))
    assert int(again.optimizer.micro_step) == 0


@pytest.mark.tf(keras=2, because="Keras 3 only exports inference, with `model.export`")
@pytest.mark.law("L16")
def test_an_export_holds_no_accumulator(tmp_path):
    model = trained_once(functional)
    model.save(str(tmp_path / "saved"))
    tf.saved_model.save(model, str(tmp_path / "exported"))
    for folder in ("saved", "exported"):
        names = [name for name, _ in tf.train.list_variables(str(tmp_path / folder / "variables" / "variables"))]
        assert not [name for name in names if "accum" in name]
    again = tf.saved_model.load(str(tmp_path / "exported"))
    served = again.signatures["serving_default"](a=tf.constant(X))
    np.testing.assert_allclose(list(served.values())[0].numpy(), model.predict({"a": X}), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_process_that_only_imported_accum_loads_every_file(tmp_path):
    model = trained(sequential, transform=None)
    np.save(str(tmp_path / "x.npy"), X)
    for format in FORMATS:
        model.save(file_of(tmp_path, format))
    program = """
import sys, numpy as np, tensorflow as tf, accum
x = np.load("x.npy")
for path in sys.argv[1:]:
    model = tf.keras.models.load_model(path)
    model.fit(x, np.zeros((20, 2)), batch_size=5, verbose=0)
    print(type(model).__name__, dict(model.optimizer.accum_steps) == {0: 2, 100: 3})
"""
    parent = os.path.dirname(os.path.dirname(os.path.abspath(accum.__file__)))
    said = subprocess.check_output(
        [sys.executable, "-c", program] + [file_of(tmp_path, format) for format in FORMATS],
        cwd=str(tmp_path),
        env=dict(os.environ, PYTHONPATH=parent),
        universal_newlines=True,
    )
    ours = ["GradientAccumulateModel True"] * len(FORMATS)
    if versions.TF_VERSION == (2, 2):
        ours[0] = "Model True"
    assert said.split("\n")[: len(FORMATS)] == ours


@pytest.mark.parametrize("make", [functional, sequential])
def test_a_config_makes_an_equal_model(make):
    model = trained_once(make)
    again = type(model).from_config(model.get_config())
    assert isinstance(again, accum.GradientAccumulateModel)
    again.set_weights(model.get_weights())
    x = X if make is sequential else {"a": X}
    np.testing.assert_array_equal(again.predict(x), model.predict(x))
    assert again.get_config()["accumulation"] == model.get_config()["accumulation"]
    assert again.name == model.name


def test_a_function_that_is_not_registered_is_left_out_with_a_warning():
    model = accum.GradientAccumulateModel.from_model(sequential(), 2, transform=lambda pairs: pairs)
    with pytest.warns(UserWarning, match="`transform` is left out of the config: register it"):
        assert model.get_config()["accumulation"]["transform"] is None
    optimizer = accum.GradientAccumulateOptimizer("sgd", 2, transform=lambda pairs: pairs)
    with pytest.warns(UserWarning, match="`transform` is left out of the config: register it"):
        assert optimizer.get_config()["transform"] is None


def test_a_function_that_is_registered_no_more_is_missed_in_words():
    config = accum.GradientAccumulateOptimizer("sgd", 2, transform=doubled).get_config()
    config["transform"] = {"registered": "tests>tripled"}
    with pytest.raises(ValueError, match="`transform` must be registered .* Received: 'tests>tripled'"):
        accum.GradientAccumulateOptimizer.from_config(config)
    custom = {"tests>tripled": doubled}
    again = accum.GradientAccumulateOptimizer.from_config(config, custom_objects=custom)
    assert again.get_config()["transform"] == {"registered": "tests>doubled"}


def one_input():
    inputs = tf.keras.Input((3,))
    return tf.keras.Model(inputs, layers.Dense(2)(layers.Dense(4)(inputs)))


def unbuilt():
    return tf.keras.Sequential([layers.Dense(4), layers.Dense(2)])


class Subclassed(tf.keras.Model):
    """Is not registered with Keras."""

    def __init__(self, units=2):
        super().__init__()
        self.dense = layers.Dense(units)

    def call(self, inputs):
        return self.dense(inputs)

    def get_config(self):
        return {"units": 2}


@pytest.mark.parametrize("make", [functional, sequential])
def test_a_clone_has_the_options_of_the_model(make):
    model, x = trained_once(make), {"a": X} if make is functional else X
    again = tf.keras.models.clone_model(model)
    assert isinstance(again, accum.GradientAccumulateModel) and again is not model
    assert again.get_config()["accumulation"] == model.get_config()["accumulation"]
    again.set_weights(model.get_weights())
    np.testing.assert_array_equal(again.predict(x), model.predict(x))


@pytest.mark.tf("2.12", because="Keras made no subclassed models from configs before")
def test_a_clone_is_of_its_own_class_if_another_has_the_same_name():
    other = type("Subclassed", (tf.keras.Model,), {"__module__": "elsewhere", "call": lambda self, inputs: inputs})
    accum.GradientAccumulateModel.from_model(other(), accum_steps=2)
    model = accum.GradientAccumulateModel.from_model(Subclassed(), accum_steps=2)
    again = accum.GradientAccumulateModel.from_config(model.get_config())
    assert isinstance(again, Subclassed) and again.dense.units == 2


def copied_layer(layer):
    return type(layer).from_config(layer.get_config())


CLONED = [(sequential, None), (sequential, copied_layer), (unbuilt, None), (one_input, copied_layer), (one_input, None)]
if versions.TF_VERSION >= (2, 12):  # Keras cloned no subclassed models before
    CLONED.append((Subclassed, None))


@pytest.mark.law("L1")
@pytest.mark.parametrize("is_compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("options", [{"accum_steps": 2}, {"micro_batch_size": 10}], ids=["cycles", "micro-batches"])
@pytest.mark.parametrize("make, function", CLONED)
def test_a_clone_makes_the_step_of_the_full_batch(make, function, options, is_compiled):
    model = accum.GradientAccumulateModel.from_model(make(), **options)
    model.predict(X)
    if is_compiled:
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    again, plain = tf.keras.models.clone_model(model, clone_function=function), make()
    for one in (again, plain):
        one.predict(X)  # creates the weights
        one.set_weights([np.cos(np.arange(np.size(part))).reshape(np.shape(part)) for part in model.get_weights()])
        if not getattr(one, "optimizer", None):
            one.compile(tf.keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    plain.train_on_batch(X, Y)
    again.fit(X, Y, batch_size=12 if "accum_steps" in options else 20, shuffle=False, verbose=0)  # 12 + 8 examples
    assert isinstance(again, accum.GradientAccumulateModel) and int(again.optimizer.iterations.numpy()) == 1
    assert_near(again.get_weights(), plain.get_weights())


def test_models_that_do_not_accumulate_are_cloned_as_ever():
    again = tf.keras.models.clone_model(sequential())
    assert type(again) is tf.keras.Sequential


def pickled(made):
    return pickle.loads(pickle.dumps(made))


needs_pickles = pytest.mark.skipif(versions.TF_VERSION < (2, 13), reason="Keras pickles its models well from 2.13 on")
needs_keras_3 = pytest.mark.skipif(not versions.IS_KERAS_3, reason="Keras pickles optimizers from Keras 3 on")


@needs_pickles
@pytest.mark.parametrize("make,copied", [(functional, pickled), (sequential, copy.deepcopy)])
def test_a_pickle_and_a_copy_train_on_as_the_model_itself(make, copied, recwarn):
    model, x = trained(make), X if make is sequential else {"a": X}
    again = copied(model)
    assert isinstance(again, accum.GradientAccumulateModel) and int(again.optimizer.iterations.numpy()) == 4
    assert again.get_config()["accumulation"] == model.get_config()["accumulation"]
    for one in (model, again):
        one.fit(x, Y, batch_size=5, verbose=0, shuffle=False)
    assert_near(again.get_weights(), model.get_weights())
    if versions.IS_KERAS_3:
        assert not [warning for warning in recwarn if "unfinished" in str(warning.message)]
        model.train_on_batch(x, Y)
        with pytest.warns(UserWarning, match="unfinished cycle is left out of a pickle or copy"):
            assert int(copied(model).optimizer.micro_step) == 0


@needs_keras_3
def test_an_optimizer_is_pickled_by_its_config_as_a_plain_one():
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.Adam(0.5), {0: 2, 9: 3}, transform=doubled)
    again = pickled(optimizer)
    assert isinstance(again, accum.GradientAccumulateOptimizer)
    assert again.get_config() == optimizer.get_config()
    assert pickled(optimizer.optimizer).get_config() == optimizer.optimizer.get_config()


@needs_pickles
def test_a_process_that_has_imported_nothing_loads_a_pickle(tmp_path):
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(trained(sequential, transform=None)))
    program = "import pickle; print(type(pickle.load(open('model.pickle', 'rb'))).__name__)"
    said = subprocess.check_output(
        [sys.executable, "-c", program],
        cwd=str(tmp_path),
        env=dict(os.environ, PYTHONPATH=os.path.dirname(os.path.dirname(os.path.abspath(accum.__file__)))),
        universal_newlines=True,
    )
    assert said.strip() == "GradientAccumulateModel"


def test_a_deep_copy_is_no_worse_than_that_of_a_plain_model():
    model = trained_once(sequential)
    try:
        copy.deepcopy(trained(sequential, accumulates=False))
    except TypeError:  # up to TF 2.8, where locks cannot be copied
        return
    again = copy.deepcopy(model)
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    assert isinstance(again, accum.GradientAccumulateModel)


@pytest.mark.tf("2.13", because="files of weights hold no optimizer")
def test_a_plain_optimizer_reads_its_state_from_a_file_of_weights(tmp_path):
    def compiled(optimizer):
        model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
        model.compile(optimizer, "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    ours = compiled(accum.GradientAccumulateOptimizer(tf.keras.optimizers.Adam(0.1), 2))
    ours.fit(X[:4, :2], Y[:4, :1], batch_size=1, verbose=0)
    ours.save_weights(str(tmp_path / "model.weights.h5"))
    plain = compiled(tf.keras.optimizers.Adam(0.1))
    plain.load_weights(str(tmp_path / "model.weights.h5"))
    inner = ours.optimizer.optimizer
    assert int(plain.optimizer.iterations.numpy()) == 2 and len(plain.optimizer.variables) == len(inner.variables)
    for one, other in zip(plain.optimizer.variables, inner.variables):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.parametrize("imports", ["import accum, tensorflow as tf", "import tensorflow as tf, accum"])
def test_a_process_that_only_imports_accum_loads_a_model_in_either_order(imports, tmp_path):
    """In these formats, Keras finds the class by its registration alone."""
    model = accum.GradientAccumulateModel.from_model(
        tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,))]), accum_steps=2
    )
    model.compile("sgd", "mse")
    path = file_of(tmp_path, "keras" if versions.IS_KERAS_3 else "h5")
    model.save(path)
    source = f"{imports}; print(type(tf.keras.models.load_model({path!r})).__mro__)"
    parent = os.path.dirname(os.path.dirname(os.path.abspath(accum.__file__)))
    environ = dict(os.environ, PYTHONPATH=parent)
    done = subprocess.run([sys.executable, "-c", source], stdout=subprocess.PIPE, env=environ, check=True)
    assert b"accum._keras._model._model.GradientAccumulateModel" in done.stdout
