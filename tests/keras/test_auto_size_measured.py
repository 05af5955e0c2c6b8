"""`micro_batch_size="auto"` measures memory before it trains, and leaves no trace of that (law L18)."""

import os
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest
import tensorflow as tf
from cgroups import memory_cgroup
from equality import assert_near
from replicas import mirrored
from versions import IS_KERAS_3
from warned import warned

import accum
from accum import _tf
from accum.__main__ import main
from accum.testing._sizes import measured_sizes

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.law("L18"), pytest.mark.slow]

layers = tf.keras.layers
MIB = 2**20
RANDOM = np.random.RandomState(0)
X, Y = RANDOM.normal(size=(44, 3)).astype("float32"), RANDOM.normal(size=(44, 2)).astype("float32")
BATCH = 22
JIT = {"jit_compile": False} if IS_KERAS_3 else {}
SUPPORT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "support")


class FakeGauge(_tf.Gauge):
    """A device on which each example of a micro-batch needs 10 MiB, beside 100 MiB."""

    name = "fake memory"
    sizes = []

    def __init__(self, limit):
        self.limit = limit

    def now(self):
        return 90 * MIB

    def peak(self):
        return 100 * MIB + 10 * MIB * self.sizes[-1] if self.sizes else self.now()


@pytest.fixture
def gauge(monkeypatch):
    """Let every model measure a `FakeGauge`, which sees the sizes of micro-batches."""
    from accum._keras._steps._out_of_memory import AutoSizedSteps

    attempt = AutoSizedSteps._attempt

    def seen(self, data, size, examples):
        FakeGauge.sizes.append(size)
        return attempt(self, data, size, examples)

    monkeypatch.setattr(AutoSizedSteps, "_attempt", seen)
    monkeypatch.setattr(_tf.memory, "gauges", lambda limit: [FakeGauge(150 * MIB if limit is None else limit)])
    FakeGauge.sizes = []
    return FakeGauge


def plain(dropout=0.0):
    inputs = tf.keras.Input((3,))
    hidden = layers.Dense(4, activation="tanh")(inputs)
    hidden = layers.Dropout(dropout, seed=7)(hidden) if dropout else hidden
    model = tf.keras.Model(inputs, layers.Dense(2)(accum.AccumBatchNormalization(momentum=0.5)(hidden)))
    random = np.random.RandomState(1)
    model.set_weights([0.5 * np.abs(random.normal(size=np.shape(weight))) for weight in model.get_weights()])
    return model


def trained(model):
    model.compile(tf.keras.optimizers.Adam(0.05), "mse", metrics=["mae"], **JIT)
    logs = model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    return [var.numpy() for var in model.weights] + [np.array(logs[name]) for name in ("loss", "mae")]


@pytest.mark.parametrize("options", [{}, {"whole_batch": "all"}], ids=["plain", "whole batch"])
def test_the_whole_batch_is_that_of_plain_keras_after_measuring(gauge, options):
    expected = trained(plain())
    model = accum.GradientAccumulateModel.from_model(
        plain(), micro_batch_size="auto", memory_limit=10000 * MIB, **options
    )
    got = trained(model)
    assert len(gauge.sizes) >= 2
    assert model.micro_batch_size == "auto"
    assert_near(got, expected, rtol=2e-5)


def test_a_size_that_is_chosen_makes_the_steps_of_plain_keras_at_the_full_batch(gauge):
    expected = trained(plain_with_keras_norm())
    model = accum.GradientAccumulateModel.from_model(
        plain_with_keras_norm(), micro_batch_size="auto", whole_batch="all"
    )
    with pytest.warns(UserWarning, match="`micro_batch_size` is 5 from now on.*320 MiB of fake memory, but only 150"):
        got = trained(model)
    assert model.micro_batch_size == 5
    assert max(gauge.sizes) <= 5
    assert_near(got, expected, rtol=2e-5)
    split = accum.GradientAccumulateModel.from_model(plain_with_keras_norm(), micro_batch_size=5, whole_batch=())
    assert np.max(np.abs(trained(split)[0] - expected[0])) > 1e-3  # where micro-batches normalise by themselves


def test_a_step_of_one_pass_makes_no_update_while_it_is_measured(gauge):
    def net():
        model = tf.keras.Sequential([tf.keras.Input((3,)), layers.Dense(4, activation="tanh"), layers.Dense(2)])
        random = np.random.RandomState(1)
        model.set_weights([0.5 * np.abs(random.normal(size=np.shape(weight))) for weight in model.get_weights()])
        return model

    expected = trained(net())
    model = accum.GradientAccumulateModel.from_model(net(), micro_batch_size="auto")
    with pytest.warns(UserWarning, match="`micro_batch_size` is 5 from now on"):
        got = trained(model)
    assert max(gauge.sizes) <= 5 and len(gauge.sizes) > 2
    assert_near(got, expected, rtol=2e-5)
    assert int(model.optimizer.iterations) == 4


def test_one_example_that_exceeds_the_limit_is_named(gauge):
    model = accum.GradientAccumulateModel.from_model(plain(), micro_batch_size="auto", memory_limit=105 * MIB)
    with pytest.warns(UserWarning, match="is 1 from now on.*One example at a time may not fit either"):
        trained(model)


def test_a_first_step_above_the_limit_is_named(gauge, monkeypatch):
    from accum._keras._steps._out_of_memory import AutoSizedSteps

    retrying = AutoSizedSteps._retrying

    def with_more(self, function, data):
        gauge.sizes.append(30)  # 400 MiB
        return retrying(self, function, data)

    model = accum.GradientAccumulateModel.from_model(plain(), micro_batch_size="auto", memory_limit=350 * MIB)
    monkeypatch.setattr(AutoSizedSteps, "_retrying", with_more)
    with pytest.warns(UserWarning, match="first step needed 400 MiB of fake memory, but only 350 MiB") as caught:
        trained(model)
    assert len([one for one in caught if "first step needed" in str(one.message)]) == 1
    assert model.micro_batch_size == "auto"  # the measurement found room for all 22


def plain_with_keras_norm():
    inputs = tf.keras.Input((3,))
    hidden = layers.BatchNormalization(momentum=0.5)(layers.Dense(4, activation="tanh")(inputs))
    model = tf.keras.Model(inputs, layers.Dense(2)(hidden))
    random = np.random.RandomState(1)
    model.set_weights([0.5 * np.abs(random.normal(size=np.shape(weight))) for weight in model.get_weights()])
    return model


def test_measuring_moves_no_random_numbers(gauge):
    """Dropout draws as in a run that was told its size and measured nothing."""
    tf.random.set_seed(5)
    told = trained(accum.GradientAccumulateModel.from_model(plain(0.4), micro_batch_size=5))
    assert gauge.sizes == []
    tf.random.set_seed(5)
    with pytest.warns(UserWarning, match="is 5 from now on"):
        got = trained(accum.GradientAccumulateModel.from_model(plain(0.4), micro_batch_size="auto"))
    assert max(gauge.sizes) <= 5
    for mine, theirs in zip(got, told):
        np.testing.assert_allclose(mine, theirs, rtol=2e-6, atol=2e-7)  # other numbers differ by 1e-2


def test_memory_is_measured_once_for_each_model_and_again_for_larger_batches(gauge):
    model = accum.GradientAccumulateModel.from_model(plain(), micro_batch_size="auto", memory_limit=10000 * MIB)
    model.compile("sgd", "mse", **JIT)
    attempts = []
    for batch in (11, 11, 8, 44):
        model.fit(X, Y, batch_size=batch, verbose=0)
        attempts.append(len(gauge.sizes))
    assert attempts[0] > 0
    assert attempts[0] == attempts[1] == attempts[2] < attempts[3]


def test_evaluation_and_prediction_measure_nothing(gauge):
    model = accum.GradientAccumulateModel.from_model(plain(), micro_batch_size="auto")
    model.compile("sgd", "mse", **JIT)
    model.evaluate(X, Y, batch_size=BATCH, verbose=0)
    model.predict(X, batch_size=BATCH, verbose=0)
    assert gauge.sizes == []


def test_a_model_that_cannot_compute_few_examples_trains_on_whole_batches_with_a_warning(gauge):
    def of_pairs(y_true, y_pred):
        paired = tf.reshape(y_pred - y_true, [-1, 2, 2])  # not of an odd number of examples
        return tf.repeat(tf.reduce_mean(paired**2, axis=[1, 2]), 2)

    def trained_by(model):
        model.compile("sgd", of_pairs, **JIT)
        model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
        return [var.numpy() for var in model.weights]

    expected = trained_by(plain())
    model = accum.GradientAccumulateModel.from_model(plain(), micro_batch_size="auto")
    with pytest.warns(UserWarning, match="Memory could not be measured with a part of a batch"):
        got = trained_by(model)
    assert model.micro_batch_size == "auto"
    assert_near(got, expected, rtol=2e-5)


@pytest.mark.parametrize("is_hidden", [True, False], ids=["hidden by an earlier peak", "risen"])
def test_a_peak_from_before_that_does_not_rise_is_not_taken_for_that_of_the_batch(gauge, monkeypatch, is_hidden):
    growth = 0 if is_hidden else 1
    monkeypatch.setattr(gauge, "peak", lambda self: 1000 * MIB + growth * len(self.sizes))
    model = accum.GradientAccumulateModel.from_model(plain(), micro_batch_size="auto")
    with warned() as caught:
        trained(model)
    assert model.micro_batch_size == ("auto" if is_hidden else 1)
    assert any("is 1 from now on" in one for one in caught) is not is_hidden


@pytest.mark.parametrize("absent", ["VmHWM", "VmRSS", "VmPeak"])
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures the process on Linux")
def test_a_system_that_does_not_tell_a_peak_has_no_gauge_for_it(monkeypatch, absent):
    import resource

    status = _tf.memory._status()
    assert len(_tf.memory.gauges(None)) == 1
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2**45, 2**45))
    assert len(_tf.memory.gauges(None)) == 2
    status.pop(absent)
    monkeypatch.setattr(_tf.memory, "_status", lambda: dict(status))
    assert len(_tf.memory.gauges(None)) == (1 if absent == "VmPeak" else 0)


def test_a_worker_measures_its_own_gpus():
    assert _tf.memory.own_gpus(["/device:GPU:0", "/device:GPU:1"], "localhost", 0) == ["GPU:0", "GPU:1"]
    of_all = [
        "/job:worker/replica:0/task:{}/device:GPU:{}".format(task, number) for task in (0, 1) for number in (0, 1)
    ]
    assert _tf.memory.own_gpus(of_all, "worker", 1) == ["GPU:0", "GPU:1"]
    assert _tf.memory.own_gpus(of_all[:3], "worker", 1) == ["GPU:0"]


class LateMetric(tf.keras.metrics.Metric):
    """Begins its variable, at 5, with its result, which is part of the optimizer's step."""

    late = None

    def update_state(self, y_true, y_pred, sample_weight=None):
        pass

    def result(self):
        if self.late is None:
            with tf.init_scope():
                self.late = self.add_weight(name="late", shape=(), initializer=tf.keras.initializers.Constant(5.0))
        return tf.identity(self.late)

    def reset_states(self):
        pass

    reset_state = reset_states


def test_a_variable_that_begins_with_the_first_step_keeps_its_first_value(gauge):
    def logged(model):
        model.compile("sgd", "mse", metrics=[LateMetric(name="late")], **JIT)
        return model.fit(X, Y, batch_size=BATCH, verbose=0).history["late"]

    model = accum.GradientAccumulateModel.from_model(plain(), micro_batch_size="auto", memory_limit=10000 * MIB)
    assert logged(plain()) == logged(model) == [5.0]
    assert gauge.sizes


@pytest.mark.parametrize(
    "options, error",
    [
        ({"micro_batch_size": "auto", "memory_limit": 0}, ValueError),
        ({"micro_batch_size": "auto", "memory_limit": 1e9}, TypeError),
        ({"micro_batch_size": 4, "memory_limit": 10**9}, ValueError),
    ],
    ids=["zero", "float", "a size that is told"],
)
def test_a_memory_limit_that_is_none_is_refused(options, error):
    with pytest.raises(error, match="`memory_limit`"):
        accum.GradientAccumulateModel.from_model(plain(), **options)


CGROUP_MIB = 1400


def limited(kind, extra, path):
    """The command that trains with a limit."""
    return [sys.executable, "-W", "ignore", os.path.join(SUPPORT, "limited.py"), kind, str(extra), path]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="`ulimit -v` is that of Linux")
def test_under_ulimit_the_full_batch_dies_and_auto_makes_its_steps(tmp_path):
    def run(kind, extra):
        path = str(tmp_path / f"{kind}{extra}.npz")
        done = subprocess.run(limited(kind, extra, path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return done.returncode, path

    assert run("plain", 1200)[0] != 0
    (plain_status, plain_path), (auto_status, auto_path) = run("plain", 0), run("auto", 1200)
    assert plain_status == auto_status == 0
    expected, got = np.load(plain_path), np.load(auto_path)
    assert 1 <= int(got["size"]) < 768
    for name in set(expected.files) - {"size", "said"}:
        np.testing.assert_allclose(got[name], expected[name], rtol=2e-5, atol=2e-6)


def test_in_a_cgroup_the_full_batch_is_killed_and_auto_makes_its_steps(tmp_path):
    plain_path, auto_path = str(tmp_path / "plain.npz"), str(tmp_path / "auto.npz")
    with memory_cgroup(CGROUP_MIB * MIB) as cgroup:
        assert cgroup.run(limited("plain", 0, plain_path)) == -signal.SIGKILL
        assert cgroup.kills() == 1
        assert cgroup.run(limited("auto", 0, auto_path)) == 0
        assert cgroup.kills() == 1
    assert subprocess.run(limited("plain", 0, plain_path)).returncode == 0
    expected, got = np.load(plain_path), np.load(auto_path)
    assert 1 <= int(got["size"]) < 768
    assert f"of memory, but only {0.9 * CGROUP_MIB:,.0f} MiB may be used" in str(got["said"])
    for name in set(expected.files) - {"size", "said"}:
        np.testing.assert_allclose(got[name], expected[name], rtol=2e-5, atol=2e-6)


OF_USER = """
import numpy as np
import tensorflow as tf

def make():
    model = tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=(3,))])
    model.compile("sgd", "mse", **{jit})
    return model, np.ones((16, 3), "float32"), np.ones((16, 2), "float32")
"""


TWO_INPUTS = """
import numpy as np
import tensorflow as tf

def make():
    inputs = [tf.keras.Input((3,)), tf.keras.Input((2,))]
    outputs = tf.keras.layers.Dense(2)(tf.keras.layers.Concatenate()(inputs))
    model = tf.keras.Model(inputs, outputs)
    model.compile("sgd", "mse", **{jit})
    return model, [np.ones((8, 3), "float32"), np.ones((8, 2), "float32")], np.ones((8, 2), "float32")
"""


@pytest.fixture
def file_of_user(tmp_path):
    path = tmp_path / "of_user.py"
    path.write_text(OF_USER.replace("{jit}", repr(JIT)))
    return str(path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures the process on Linux")
def test_the_command_prints_each_size_and_the_fastest(file_of_user, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["fit-size", file_of_user + ":make", "--batch-size", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines if line.startswith("|")][2:] == ["1", "2", "4", "8"]
    assert "The fastest size that fits: micro_batch_size=" in lines[-1]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures the process on Linux")
def test_the_command_marks_what_exceeds_the_limit(file_of_user, capsys):
    assert main(["fit-size", file_of_user + ":make", "--batch-size", "8", "--memory-limit", "1"]) == 1
    out = capsys.readouterr().out
    assert out.count("exceeds the limit") == 4
    assert "Not even one example at a time fits." in out


def test_the_command_says_what_is_wrong(file_of_user, capsys):
    assert main(["fit-size", file_of_user + ":absent"]) == 2
    assert "has no function absent" in capsys.readouterr().err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures the process on Linux")
def test_the_command_takes_several_arrays(tmp_path, capsys):
    (tmp_path / "two_inputs.py").write_text(TWO_INPUTS.replace("{jit}", repr(JIT)))
    assert main(["fit-size", str(tmp_path / "two_inputs.py") + ":make", "--batch-size", "2"]) == 0
    assert "| 2 |" in capsys.readouterr().out


def test_the_command_refuses_models_that_have_no_size_in_examples():
    with pytest.raises(ValueError, match="Return it without that option"):
        measured_sizes(accum.GradientAccumulateModel.from_model(plain(), micro_batch_tokens=10), (X, Y))
    with mirrored().scope():
        model = plain()
    with pytest.raises(ValueError, match="outside of the scope of its strategy"):
        measured_sizes(model, (X, Y))
