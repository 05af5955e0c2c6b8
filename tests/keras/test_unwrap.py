"""`accum.unwrap`: a plain model with the same weights and state, whose files need no accum."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
import versions
from equality import assert_near

import accum

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.slow]

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.normal(size=(20, 3)).astype("float32"), RANDOM.normal(size=(20, 2)).astype("float32")
layers = tf.keras.layers


class Doubling(tf.keras.Model):
    """A model with a train step of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = 2.0 * tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


def functional(cls=tf.keras.Model):
    inputs = tf.keras.Input((3,))
    hidden = layers.BatchNormalization()(layers.Dense(4, activation="tanh")(inputs))
    return cls(inputs, layers.Dense(2)(hidden))


def sequential():
    return tf.keras.Sequential([layers.Dense(4, input_shape=(3,)), layers.Dense(2)])


def doubling():
    return functional(Doubling)


def compiled(model, optimizer=None):
    optimizer = tf.keras.optimizers.Adam(0.01) if optimizer is None else optimizer
    model.compile(optimizer, "mse", metrics=None if isinstance(model, Doubling) else ["mae"])
    return model


def wrapped(make, **options):
    return compiled(accum.GradientAccumulateModel.from_model(make(), **dict({"accum_steps": 2}, **options)))


def by_optimizer(make, **options):
    return compiled(make(), accum.GradientAccumulateOptimizer(tf.keras.optimizers.Adam(0.01), 2))


def by_class(make, **options):
    plain = make()
    return compiled(accum.GradientAccumulateModel(accum_steps=2, inputs=plain.inputs, outputs=plain.outputs))


def trained(model):
    model.fit(X, Y, batch_size=5, epochs=2, shuffle=False, verbose=0)
    return model


CASES = [(wrapped, functional, {}), (wrapped, sequential, {}), (wrapped, doubling, {}), (by_class, functional, {})]
CASES += [(by_optimizer, sequential, {})]
CASES += [(wrapped, functional, {"accum_steps": 1, "micro_batch_size": 2, "whole_batch": "all"})]
IDS = ["functional", "sequential", "own-train-step", "by-class", "by-optimizer", "whole-batch"]


def state_of(model):
    variables = model.optimizer.variables
    return variables() if callable(variables) else variables


def of_accum(value):
    return type(value).__module__.startswith("accum")


@pytest.mark.parametrize("how,make,options", CASES, ids=IDS)
def test_a_plain_model_goes_on_as_one_that_has_never_accumulated(how, make, options):
    model = trained(how(make, **options))
    plain = accum.unwrap(model)
    assert (
        not of_accum(plain) and not of_accum(plain.optimizer) and not isinstance(plain, accum.GradientAccumulateModel)
    )
    assert plain.optimizer is model.optimizer.optimizer  # with its slots
    # With `micro_batch_size`, `predict` multiplies smaller matrices, and some processors then round differently.
    np.testing.assert_allclose(plain.predict(X), model.predict(X), rtol=0, atol=1e-6)
    steps = int(plain.optimizer.iterations.numpy())
    assert steps == int(model.optimizer.iterations.numpy()) > 0

    oracle = compiled(make())  # of plain Keras, brought to the same place
    before = [var.numpy() for var in state_of(plain)]
    oracle.fit(X[:10], Y[:10], batch_size=10, verbose=0)
    oracle.set_weights(plain.get_weights())
    for var, value in zip(state_of(oracle), before):
        var.assign(value)
    for trained_model in (plain, oracle):
        trained_model.fit(X[:10], Y[:10], batch_size=10, verbose=0)
    assert int(plain.optimizer.iterations.numpy()) == steps + 1  # one batch, one step
    assert_near(plain.get_weights(), oracle.get_weights())


LOADING = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "accum":
            raise ImportError("accum is not installed here")

sys.meta_path.insert(0, Refuse())
import numpy as np
import tensorflow as tf

model = tf.keras.models.load_model(sys.argv[1]) if sys.argv[3] == "keras" else tf.saved_model.load(sys.argv[1])
x = np.load(sys.argv[2])
if sys.argv[3] == "keras":
    outputs = model.predict(x)
    steps = int(model.optimizer.iterations.numpy())
    assert steps == int(sys.argv[4]) or not sys.argv[1].endswith((".h5", ".keras")), steps
    model.fit(x, outputs, verbose=0)
else:
    outputs = list(model.signatures["serving_default"](tf.constant(x)).values())[0].numpy()
np.save(sys.argv[2], outputs)
assert not [name for name in sys.modules if name.split(".")[0] == "accum"]
"""
FORMATS = ["export"] if versions.IS_KERAS_3 else ["tf", "h5"]
FORMATS += ["keras"] if versions.TF_VERSION >= (2, 13) else []


@pytest.mark.parametrize("make", [functional, sequential])
@pytest.mark.parametrize("format", FORMATS)
def test_its_files_load_where_accum_is_not_installed(make, format, tmp_path):
    model = trained(wrapped(make))
    plain = accum.unwrap(model)
    path = str(tmp_path / {"tf": "model", "export": "model", "h5": "model.h5", "keras": "model.keras"}[format])
    (plain.export if format == "export" else plain.save)(path)
    np.save(str(tmp_path / "x.npy"), X)
    (tmp_path / "load.py").write_text(LOADING)
    kind = "export" if format == "export" else "keras"
    steps = str(int(model.optimizer.iterations.numpy()))
    command = [sys.executable, str(tmp_path / "load.py"), path, str(tmp_path / "x.npy"), kind, steps]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, stderr=subprocess.PIPE, universal_newlines=True, env=environ, cwd=str(tmp_path))
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.load(str(tmp_path / "x.npy")), model.predict(X), rtol=0, atol=2e-6)


def test_a_model_in_an_unfinished_cycle_is_refused_until_it_is_flushed():
    model = wrapped(sequential)
    model.train_on_batch(X, Y)
    with pytest.raises(ValueError, match="unfinished cycle: call `flush\\(\\)`.*Received: micro_step=1"):
        accum.unwrap(model)
    model.optimizer.flush()
    assert int(accum.unwrap(model).optimizer.iterations.numpy()) == 1


def test_what_cannot_be_carried_is_refused_by_name():
    class Own(accum.GradientAccumulateModel):
        pass

    plain = sequential()
    with pytest.raises(TypeError, match="derives from `GradientAccumulateModel`.*Received: Own"):
        accum.unwrap(Own(accum_steps=2, inputs=plain.inputs, outputs=plain.outputs))
    with pytest.raises(ValueError, match="must be a model that accumulates"):
        accum.unwrap(plain)
    with pytest.raises(TypeError, match="must be a `tf.keras.Model`"):
        accum.unwrap("model")
    norm = tf.keras.Sequential([layers.Dense(2, input_shape=(3,)), accum.AccumBatchNormalization(name="ours")])
    with pytest.raises(ValueError, match="AccumBatchNormalization.*Received: ours"):
        accum.unwrap(accum.GradientAccumulateModel.from_model(norm, 2))


def test_a_model_that_is_not_compiled_stays_so():
    plain = accum.unwrap(accum.GradientAccumulateModel.from_model(sequential(), 2))
    assert not of_accum(plain) and getattr(plain, "optimizer", None) is None
    assert trained(compiled(plain)).optimizer.iterations.numpy() == 8


@pytest.mark.tf("2.4", because="the public LossScaleOptimizer begins with 2.4")
def test_a_loss_scale_is_kept():
    made = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.01))
    model = compiled(accum.GradientAccumulateModel.from_model(sequential(), 2), made)
    trained(model)
    plain = accum.unwrap(model)
    assert not of_accum(plain.optimizer) and type(plain.optimizer) is type(model.optimizer)
    before = int(plain.optimizer.inner_optimizer.iterations.numpy())
    trained(plain)
    assert int(plain.optimizer.inner_optimizer.iterations.numpy()) == before + 8
