"""`accum.testing.record` and `compare`: a run written down under one TensorFlow, compared with one under another."""

import importlib.util
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import accum
import accum.compat.v1
from accum.__main__ import main
from accum.testing import compare, record

tf1 = tf.compat.v1

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.normal(size=(20, 3)).astype("float32"), RANDOM.normal(size=(20, 1)).astype("float32")
FIRST = RANDOM.normal(size=(3, 1)).astype("float32")
BATCH, K = 8, 4
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
BLOCK = 2**15  # elements that are fingerprinted in one go


def lines(path):
    with open(str(path)) as file:
        return [json.loads(line) for line in file]


def recorded(path, steps, **options):
    """A recording of a list of dicts of arrays, or of pairs of a loss and such a dict."""
    with record(path, **options) as recorder:
        for step in steps:
            loss, variables = step if isinstance(step, tuple) else (None, step)
            recorder.step(loss, variables)
    return path


def momentum_steps(epochs=3):
    """(loss, weights) of each step of SGD with momentum on batches of 8, 8 and 4 examples, in float64."""
    weights, velocity, steps = FIRST.astype("float64"), 0.0, []
    for start in [0, 8, 16] * epochs:
        x, y = X[start : start + BATCH].astype("float64"), Y[start : start + BATCH]
        error = x.dot(weights) - y
        velocity = 0.9 * velocity + 2.0 * x.T.dot(error) / len(x)
        weights = weights - 0.05 * velocity
        steps.append((np.mean(error**2), weights))
    return steps


@pytest.fixture
def by_numpy(tmp_path):
    """The recording of the full batches, by hand."""
    with record(tmp_path / "numpy.json") as recorder:
        recorder.step(variables={"w": FIRST.astype("float64")}, step=0)
        for loss, weights in momentum_steps():
            recorder.step(loss, {"w": weights})
    return tmp_path / "numpy.json"


def hashed(i, j):
    """u_ji by Python's own integers."""
    bits = (i * 4 + j // 2 + 1) * 0x9E3779B97F4A7C15 % 2**64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    bits ^= bits >> 31
    return ((bits % 2**32 if j % 2 else bits >> 32) + 0.5) / 2**32 - 0.5


def test_a_fingerprint_is_what_its_formula_says(tmp_path):
    large = np.zeros((3, BLOCK), "float32")
    indices = [0, 5, BLOCK - 1, BLOCK, 2 * BLOCK + 7]
    large.reshape(-1)[indices] = [1.5, -2.0, 0.25, 3.0, -1.0]
    variables = {
        "small": np.array([[1, -2], [3, 4]], "int64"),
        "large": large,
        "empty": np.zeros((0, 2)),
        "scalar": True,
    }
    written = lines(recorded(tmp_path / "a.json", [variables]))
    assert [(var["name"], var["shape"], var["dtype"]) for var in written[1]["variables"]] == [
        ("small", [2, 2], "int64"),
        ("large", [3, BLOCK], "float32"),
        ("empty", [0, 2], "float64"),
        ("scalar", [], "bool"),
    ]
    for row, value in zip(written[2]["fingerprints"], variables.values()):
        value = np.ravel(value).astype("float64")
        expected = [math.sqrt(np.sum(value**2)), value.mean() if value.size else 0.0]
        used = np.flatnonzero(value)
        expected += [math.fsum(hashed(int(i), j) * value[i] for i in used) for j in range(8)]
        np.testing.assert_allclose(row, expected, rtol=0, atol=1e-11)


def test_a_difference_is_estimated_and_never_missed(tmp_path):
    """60 differences of each kind: the estimate is right to a third in the mean, and never short by a factor of 10."""
    kinds = {
        "dense": RANDOM.normal(size=(60, 200)),
        "one element": np.eye(200)[:60],
        "two that cancel": np.eye(200)[:60] - np.eye(200)[1:61],
        "constant": np.ones((60, 200)) * np.arange(1, 61)[:, None],
    }
    base = RANDOM.normal(size=200)
    for kind, differences in kinds.items():
        steps = [{"w": base + 1e-3 * difference} for difference in differences]
        recorded(tmp_path / "a.json", steps, overwrite=True)
        recorded(tmp_path / "b.json", [{"w": base}] * len(steps), overwrite=True)
        comparison = compare(tmp_path / "a.json", tmp_path / "b.json")
        true = 1e-3 * np.sqrt(np.mean(differences**2, axis=1))
        allowed = 1e-5 * max(1.0, np.sqrt(np.mean(base**2)))
        ratios = np.array(comparison.curves["deviation"]) * allowed / true
        assert ratios.min() > 0.1 and ratios.max() < 2.5, kind
        if kind != "constant":  # those are all one direction
            assert abs(np.sqrt(np.mean(ratios**2)) - 1.0) < 0.33, kind


@pytest.mark.slow
@pytest.mark.tf("2.2")
@pytest.mark.law("L3", "L6")
def test_fit_of_micro_batches_is_recorded_as_the_full_batch(tmp_path, by_numpy):
    inputs = tf.keras.Input((3,))
    unit = tf.keras.layers.Dense(1, use_bias=False, name="unit")
    model = accum.GradientAccumulateModel(K, inputs=inputs, outputs=unit(inputs))
    model.compile(tf.keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    model.set_weights([FIRST])
    with record(tmp_path / "keras.json") as recorder:
        callbacks = [recorder.keras_callback()]
        for epochs in (2, 1):  # the last cycle of each, two micro-batches, is flushed before the validation
            fit = {"batch_size": BATCH // K, "shuffle": False, "verbose": 0, "callbacks": callbacks}
            model.fit(X, Y, validation_data=(X, 2.0 * Y), epochs=epochs, **fit)
        steps = lines(tmp_path / "keras.json")[2:]  # before it is closed
    assert [step["step"] for step in steps] == list(range(10))
    comparison = compare(tmp_path / "keras.json", by_numpy, tolerance=2e-6, names={"unit/kernel": "w"})
    assert comparison.agrees and comparison.steps == list(range(10)) and comparison.has_losses == (True, True)
    assert [pair.how for pair in comparison.pairs] == ["names"]
    with pytest.raises(ValueError, match="records one run"):
        model.optimizer.iterations.assign(2)
        model.fit(X, Y, verbose=0, callbacks=callbacks)


@pytest.mark.slow
@pytest.mark.skipif(tf.executing_eagerly(), reason="on TF 2, Keras is in a static graph only where all of TF is")
def test_keras_in_a_static_graph_is_recorded(tmp_path, by_numpy):
    inputs = tf.keras.Input((3,))
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1, use_bias=False)(inputs))
    model.compile(tf.keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    model.set_weights([FIRST])
    with record(tmp_path / "keras.json") as recorder:
        callbacks = [recorder.keras_callback()]
        model.fit(X, Y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
    comparison = compare(tmp_path / "keras.json", by_numpy, tolerance=2e-6)
    assert comparison.agrees and comparison.steps == list(range(10)) and comparison.has_losses == (True, True)


@pytest.mark.tf("2.4", because="`steps_per_execution` came with TF 2.4")
@pytest.mark.slow
@pytest.mark.tf("2.2")
def test_several_steps_in_one_execution_are_recorded_without_a_loss_of_one(tmp_path):
    inputs = tf.keras.Input((3,))
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1, use_bias=False)(inputs))
    model.compile("sgd", "mse", steps_per_execution=2)
    with record(tmp_path / "several.json") as recorder:
        model.fit(X, Y, batch_size=4, verbose=0, callbacks=[recorder.keras_callback()])
    steps = lines(tmp_path / "several.json")[2:]
    assert [(step["step"], "loss" in step) for step in steps] == [(0, False), (2, False), (4, False), (5, True)]


@pytest.mark.tf("2.2")
def test_the_loss_that_a_train_step_of_the_user_returns_is_recorded(tmp_path):
    class Own(tf.keras.Model):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(data[0]) - data[1]) ** 2)
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            return {"loss": loss}

    inputs = tf.keras.Input((3,))
    model = Own(inputs, tf.keras.layers.Dense(1, use_bias=False)(inputs))
    model.compile(tf.keras.optimizers.SGD(0.0), run_eagerly=True)
    model.set_weights([FIRST])
    with record(tmp_path / "own.json", every=2) as recorder:
        callback = recorder.keras_callback(lambda model: model.weights)
        model.fit(X, Y, batch_size=5, shuffle=False, verbose=0, callbacks=[callback])
    steps = lines(tmp_path / "own.json")[2:]
    assert [step["step"] for step in steps] == [0, 2, 4]
    assert steps[1]["loss"] == pytest.approx(np.mean((X[5:10].dot(FIRST) - Y[5:10]) ** 2), abs=1e-6)


@pytest.mark.slow
@pytest.mark.law("L3")
@pytest.mark.parametrize("accum_steps", [1, K], ids=["full batch", "accumulated"])
def test_a_session_is_recorded_step_by_step(tmp_path, by_numpy, accum_steps):
    optimizer = tf1.train.MomentumOptimizer(0.05, 0.9)
    size = BATCH // accum_steps
    with record(tmp_path / "graph.json") as recorder, tf.Graph().as_default():
        x, y = tf1.placeholder(tf.float32, [None, 3]), tf1.placeholder(tf.float32, [None, 1])
        weights = tf1.get_variable("w", initializer=tf.constant(FIRST))
        loss = tf.reduce_mean((tf.matmul(x, weights) - y) ** 2, name="loss")
        global_step = tf1.train.get_or_create_global_step()
        hooks = [recorder.session_hook("loss:0")]
        if accum_steps > 1:
            optimizer = accum.compat.v1.AccumOptimizer(optimizer, accum_steps)
            hooks = [accum.compat.v1.FlushHook(optimizer)] + hooks
        train_op = optimizer.minimize(loss, global_step)
        with tf1.train.MonitoredSession(hooks=hooks) as session:
            for start in range(0, 20, size):  # the last cycle is flushed
                session.run(train_op, {x: X[start : start + size], y: Y[start : start + size]})
    steps = lines(tmp_path / "graph.json")[2:]
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    comparison = compare(tmp_path / "graph.json", by_numpy, tolerance=2e-6)
    assert comparison.first is None and len(comparison.pairs) == 1 and comparison.pairs[0].how == "name"
    assert comparison.only_in_b == [4, 5, 6, 7, 8, 9] and "Only in the second: 6 steps, from 4 to 9" in str(comparison)


@pytest.mark.law("L17")
def test_a_session_without_variables_or_a_global_step(tmp_path):
    recorder = record(tmp_path / "a.json")
    with tf.Graph().as_default():
        with pytest.raises(ValueError, match="no variable to record"):
            tf1.train.MonitoredSession(hooks=[recorder.session_hook()])
        count = tf1.get_variable("count", initializer=0, trainable=False)
        add = tf1.assign_add(count, 2)
        with tf1.train.MonitoredSession(hooks=[recorder.session_hook(variables=lambda: [count])]) as session:
            for _ in range(2):
                session.run(add)
    recorder.close()
    assert [(step["step"], step["fingerprints"][0][0]) for step in lines(recorder.path)[2:]] == [(0, 0), (1, 2), (2, 4)]


def drifting(at=None, by=1e-2):
    """Ten steps of two variables and a loss; from a step on, one of them is off."""
    steps = []
    for step in range(1, 11):
        off = by if at is not None and step >= at else 0.0
        steps.append((1.0 / step, {"a": np.full(50, 0.1 * step), "b": np.arange(20.0) + off}))
    return steps


def test_the_first_divergence_and_the_largest_are_found(tmp_path):
    a, b = recorded(tmp_path / "a.json", drifting()), recorded(tmp_path / "b.json", drifting(at=7))
    comparison = compare(a, b)
    assert not comparison.agrees and comparison.first.step == 7 and comparison.first.what == "b"
    assert 0.4e-2 < comparison.first.size < 2.5e-2
    assert comparison.largest.what == "b" and comparison.largest.size >= comparison.first.size
    assert compare(a, b, tolerance=0.1).agrees
    assert compare(a, b, ignore=["b"]).agrees
    assert "First divergence: step 7, `b`, by" in str(comparison)


@pytest.mark.parametrize("loss,says", [(0.26, "step 4, the loss, by 1.0e-02"), (float("nan"), "by inf")])
def test_a_loss_that_diverges_is_named(tmp_path, loss, says):
    steps = drifting()
    steps[3] = (loss, steps[3][1])
    comparison = compare(recorded(tmp_path / "a.json", drifting()), recorded(tmp_path / "b.json", steps))
    assert comparison.first.step == 4 and comparison.first.what == "loss" and says in str(comparison)


def test_the_rounding_of_a_loss_is_allowed_for(tmp_path):
    for name, loss in (("a.json", 0.5), ("b.json", 0.5001)):
        with record(tmp_path / name) as recorder:
            recorder.step(loss)
            recorder.step(loss, loss_error=1e-4)
    comparison = compare(tmp_path / "a.json", tmp_path / "b.json")
    assert comparison.first.step == 1 and compare(tmp_path / "a.json", tmp_path / "b.json", tolerance=1.1e-4).agrees
    assert comparison.curves["deviation"][1] < 1.0


def test_what_is_no_number_in_both_agrees(tmp_path):
    steps = [(float("nan"), {"a": [1.0, float("inf")]}), (float("inf"), {"a": [float("nan"), 0.0]})]
    a, b = recorded(tmp_path / "a.json", steps), recorded(tmp_path / "b.json", steps)
    assert compare(a, b).agrees
    finite = recorded(tmp_path / "c.json", [(1.0, {"a": [1.0, 1.0]})] * 2)
    assert compare(a, finite).first.size == math.inf


@pytest.mark.parametrize("start", [0, 100], ids=["fresh", "resumed"])
def test_a_run_that_ends_before_it_trains_agrees_with_none(tmp_path, start, capsys):
    ended, whole = tmp_path / "ended.json", tmp_path / "whole.json"
    for path, steps in ((ended, 0), (whole, 3)):
        with record(path) as recorder:
            recorder.step(variables={"a": np.zeros(3)}, step=start, is_start=start > 0)
            for step in range(steps):
                recorder.step(1.0, {"a": np.full(3, 1.0 + step)})
    for pair in ((ended, whole), (whole, ended)):
        assert main(["compare"] + [str(path) for path in pair]) == 2
        captured = capsys.readouterr()
        assert not captured.out and "share no step of training" in captured.err
    assert main(["compare", str(whole), str(whole)]) == 0


def test_runs_that_start_from_different_values_diverge_though_one_has_not_trained(tmp_path):
    for name, value in (("a.json", 0.0), ("b.json", 1.0)):
        with record(tmp_path / name) as recorder:
            recorder.step(variables={"a": [value]}, step=0)
    comparison = compare(tmp_path / "a.json", tmp_path / "b.json")
    assert not comparison.agrees and "start from different values" in str(comparison)


@pytest.mark.slow
@pytest.mark.tf("2.2")
def test_a_fit_that_goes_on_is_recorded_from_its_start(tmp_path):
    inputs = tf.keras.Input((3,))
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1, use_bias=False)(inputs))
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(X, Y, batch_size=10, verbose=0)
    with record(tmp_path / "more.json") as recorder:
        model.fit(X, Y, batch_size=10, verbose=0, callbacks=[recorder.keras_callback()])
    steps = lines(tmp_path / "more.json")[2:]
    assert [(step["step"], step.get("start", False)) for step in steps] == [(2, True), (3, False), (4, False)]


A, B, C = np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0, 6.0]), np.ones((2, 2))


@pytest.mark.parametrize(
    "theirs,options,pairs,unmatched",
    [
        ({"b": B, "a": A, "c": C}, {}, {"a": "a", "b": "b", "c": "c"}, ([], [])),  # by name, in any order
        ({"b": A, "b_1": B, "c": C}, {}, {"a": "b", "b": "b_1", "c": "c"}, ([], [])),  # Keras counts on
        ({"x": C, "y": A, "z": B}, {}, {"a": "y", "b": "z", "c": "x"}, ([], [])),  # by shapes
        ({"x": B, "y": A, "c": C}, {"names": {"a": "y"}}, {"a": "y", "b": "x", "c": "c"}, ([], [])),
        ({"a": A, "y": B, "z": B, "c": C}, {}, {"a": "a", "c": "c"}, (["b"], ["y", "z"])),
        ({"a": A, "b": C}, {}, {"a": "a", "c": "b"}, (["b"], [])),
        ({"a": A, "z": A[:2]}, {"ignore": ["b", "c", "z"]}, {"a": "a"}, ([], [])),
    ],
    ids=["names", "numbered", "order", "map", "one more", "other shape", "ignored"],
)
def test_variables_find_their_counterparts_and_none_is_dropped_in_silence(tmp_path, theirs, options, pairs, unmatched):
    a = recorded(tmp_path / "a.json", [{"a:0": A, "b:0": B, "c:0": C}])
    comparison = compare(a, recorded(tmp_path / "b.json", [theirs]), **options)
    assert {pair.name_a: pair.name_b for pair in comparison.pairs} == pairs
    assert (comparison.unmatched_a, comparison.unmatched_b) == unmatched
    assert comparison.first is None and comparison.agrees == (unmatched == ([], []))
    assert all("`names`" in str(comparison) and name in str(comparison) for names in unmatched for name in names)


@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "options,said",
    [
        ({"tolerance": 0.0}, "`tolerance` must be"),
        ({"tolerance": float("nan")}, "`tolerance` must be"),
        ({"names": {"x": "a"}}, "keys of `names`"),
        ({"names": {"a": "x"}}, "values of `names`"),
        ({"names": {"a": "c"}}, "of one shape"),
        ({"names": {"a": "b", "b": "b"}}, "once"),
        ({"names": {"a": "a"}, "ignore": ["a"]}, "none of `ignore`"),
        ({"names": ["a"]}, "`names` must be a dict"),
        ({"ignore": "a"}, "`ignore` must be a list"),
        ({"ignore": ["x"]}, "`ignore` must be names"),
        ({"ignore": ["a", "b", "c"]}, "nothing in common"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, options, said):
    a = recorded(tmp_path / "a.json", [{"a": A, "b": B, "c": C}])
    with pytest.raises((TypeError, ValueError), match=said):
        compare(a, a, **options)


HEADER = '{"schema": "accum.testing.record", "version": 1}\n'


@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "content,said",
    [
        (b"", "is not a recording"),
        (b"\x89PNG\r\n\x1a\n", "is not a recording"),
        (b"[1, 2]\n", "is not a recording"),
        (b'{"schema": "something else"}\n', "is not a recording"),
        (HEADER.replace("1}", "2}").encode(), "recording of version 2"),
        (HEADER.encode() + b'{"step": 1}\n{"step": 1}\n', "damaged"),
        (HEADER.encode() + b'{"step": 1, "fingerprints": [[1]]}\n', "damaged"),
        (HEADER.encode() + b'{"stop": 1}\n', "damaged"),
        (HEADER.encode() + b'{"step": Infinity}\n', "damaged"),
        (HEADER.encode() + b'{"variables": [{"name": "a", "shape": [1e999], "dtype": "int64"}]}\n', "damaged"),
        (b"[" * 100000 + b"\n", "is not a recording"),
        (HEADER.encode() + b'{"step": 1, "lo\n', "is not a recording"),
        (HEADER.encode(), "no step in common"),
        (HEADER.encode() + b'{"step": 99, "loss": 1}\n', "no step in common"),
        (HEADER.encode() + b'{"step": 1, "loss": 1}\n', "nothing in common"),
        (None, "No such file"),
    ],
)
def test_files_that_are_no_recordings_are_refused_with_status_2(tmp_path, content, said, capsys):
    good, bad = recorded(tmp_path / "good.json", [{"a": A}]), tmp_path / "bad.json"
    if content is not None:
        bad.write_bytes(content)
    assert main(["compare", str(bad), str(good)]) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.startswith("python -m accum compare: ") and said in captured.err


def test_compare_on_the_command_line(tmp_path, capsys):
    steps = [(loss, {"a_1": values["a"], "b_1": values["b"]}) for loss, values in drifting(at=3)]
    a, b = (str(recorded(tmp_path / name, made)) for name, made in (("a.json", drifting()), ("b.json", steps)))
    assert main(["compare", a, b]) == 1
    said = capsys.readouterr().out
    assert said.startswith("First divergence: step 3, `b`, by ") and "Paired by their order" in said
    (tmp_path / "names.json").write_text('{"a": "a_1", "b": "b_1"}')
    assert main(["compare", a, b, "--tolerance", "0.1", "--names", str(tmp_path / "names.json")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("No divergence in 10 steps (1 to 10), 2 variables") and "Paired" not in said
    (tmp_path / "names.json").write_text("{")
    assert main(["compare", a, b, "--names", str(tmp_path / "names.json")]) == 2
    assert "is not JSON" in capsys.readouterr().err
    (tmp_path / "names.json").write_text("null")
    assert main(["compare", a, b, "--names", str(tmp_path / "names.json")]) == 2
    assert "must hold a JSON object that maps names to names" in capsys.readouterr().err


def pipe_without_reader():
    """What standard output is after `| head -0`."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("arguments", [["compare", "a.json", "b.json"], ["--help"]], ids=lambda arguments: arguments[0])
def test_a_command_whose_reader_is_gone_gives_no_verdict(tmp_path, monkeypatch, arguments):
    recorded(tmp_path / "a.json", drifting())
    recorded(tmp_path / "b.json", drifting())
    monkeypatch.chdir(tmp_path)
    with open(pipe_without_reader(), "w") as output, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", output)
        assert main(arguments) == 128 + 13  # as a shell has it where SIGPIPE has ended a process


@pytest.mark.slow
def test_a_process_whose_reader_is_gone_ends_without_a_traceback(tmp_path):
    recorded(tmp_path / "a.json", drifting())
    command = [sys.executable, "-m", "accum", "compare", "a.json", "a.json"]
    writer = pipe_without_reader()
    done = subprocess.run(command, cwd=str(tmp_path), stdout=writer, stderr=subprocess.PIPE, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + 13, b"")


@pytest.mark.law("L17")
@pytest.mark.parametrize("option,value", [("--plot", "curves.pdf"), ("--tolerance", "inf"), ("--tolerance", "nan")])
def test_wrong_arguments_of_compare_get_the_usage(option, value, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["compare", "a.json", "b.json", option, value])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("usage: python -m accum compare")


@pytest.mark.slow
@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="the curves need the `plot` extra")
def test_the_curves_of_a_comparison_are_drawn(tmp_path, capsys):
    a = str(recorded(tmp_path / "a.json", drifting()))
    b = str(recorded(tmp_path / "b.json", [values for _, values in drifting(at=3)]))  # without losses
    path = tmp_path / "curves.png"
    assert main(["compare", a, b, "--plot", str(path)]) == 1
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    said = capsys.readouterr().out
    assert f"Curves: {path}" in said and "Only the first has losses." in said


def test_curves_without_matplotlib_are_refused_at_once(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as stopped:
        main(["compare", "a.json", "b.json", "--plot", "curves.png"])
    assert stopped.value.code == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_a_run_that_is_killed_leaves_its_steps(tmp_path):
    path = tmp_path / "a.json"
    recorder = record(path)
    assert not path.exists()  # before the first step there is nothing, or what has been there
    for number, (loss, values) in enumerate(drifting(), start=1):
        recorder.step(loss, values)
        assert lines(path)[-1]["step"] == number  # neither closed nor flushed
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])  # killed in the middle of a line
    comparison = compare(path, recorded(tmp_path / "b.json", drifting()))
    assert comparison.agrees and comparison.steps == list(range(1, 10)) and comparison.only_in_b == [10]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = recorded(tmp_path / "a.json", drifting())
    before = path.read_bytes()
    with pytest.raises(ValueError, match="overwrite=True"):
        record(path)
    recorder = record(path, overwrite=True)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", lambda *paths: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            recorder.step(1.0)
    assert path.read_bytes() == before and os.listdir(str(tmp_path)) == ["a.json"]
    recorder.step(1.0)
    assert len(lines(path)) == 2
    recorder.close()
    with pytest.raises(ValueError, match="closed"):
        recorder.step(1.0)


@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "arguments,said",
    [
        ({}, "must have a `loss` or `variables`"),
        ({"loss": [1.0, 2.0]}, "`loss` must be a scalar"),
        ({"loss": "low"}, "`loss` must be a scalar"),
        ({"variables": {}}, "must hold at least one"),
        ({"variables": [A]}, "must be a dict of names"),
        ({"variables": {"a": "text"}}, "must hold numbers"),
        ({"variables": {"b": A}}, "the same variables"),
        ({"variables": {"a": C}}, "the same variables"),
        ({"loss": 1.0, "step": 3}, "that grows"),
        ({"loss": 1.0, "step": -1}, "that grows"),
        ({"loss": 1.0, "step": 4.0}, "`step` must be an int"),
    ],
)
def test_a_step_that_cannot_be_recorded_is_refused_and_costs_nothing(tmp_path, arguments, said):
    with record(tmp_path / "a.json") as recorder:
        recorder.step(1.0, {"a": A}, step=3)
        before = (tmp_path / "a.json").read_bytes()
        with pytest.raises((TypeError, ValueError), match=said):
            recorder.step(**arguments)
        assert recorder.last_step == 3 and (tmp_path / "a.json").read_bytes() == before


@pytest.mark.law("L17")
def test_what_cannot_be_a_recording_is_refused(tmp_path):
    for path in (tmp_path / "no" / "a.json", tmp_path):
        with pytest.raises(ValueError, match="`path` must be a file"):
            record(path)
    for every in (0, 1.5, True):
        with pytest.raises((TypeError, ValueError), match="`every` must be an int >= 1"):
            record(tmp_path / "a.json", every=every)


def test_variables_of_tensorflow_are_recorded_by_their_names(tmp_path):
    if not tf.executing_eagerly():
        pytest.skip("there are no eager variables on TF 1")
    variables = [tf.Variable(A, name="twin"), tf.Variable(B, name="twin"), tf.Variable(C, name="other")]
    with record(tmp_path / "a.json") as recorder:
        recorder.step(tf.constant(0.5), variables)
    written = lines(recorder.path)
    assert [var["name"] for var in written[1]["variables"]] == ["twin", "twin#2", "other"]
    assert written[0]["tensorflow"] == tf.__version__ and written[0]["accum"] == accum.__version__


WITHOUT_TENSORFLOW = """
import sys, types
sys.modules["tensorflow"] = None
package = types.ModuleType("accum")
package.__path__ = [sys.argv[1]]
sys.modules["accum"] = package
from accum.testing import compare, record
from accum._cli.compare.command import add_parser
from accum._cli.verify import add_parser
with record("a.json") as recorder:
    recorder.step(0.5, {"w": [1.0, 2.0]})
print(compare("a.json", "a.json"))
"""


@pytest.mark.slow
def test_recordings_are_made_and_compared_without_tensorflow(tmp_path):
    command = [sys.executable, "-c", WITHOUT_TENSORFLOW, os.path.dirname(accum.__file__)]
    done = subprocess.run(command, cwd=str(tmp_path), stdout=subprocess.PIPE, universal_newlines=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("No divergence in 1 steps")
