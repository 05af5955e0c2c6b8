"""Random cases against the full batch, a few of those that project/random_cases.py draws by the thousand."""

import importlib.util
import io
import os
import re

import pytest
from optimizers import legacy_family
from versions import HAS_KERAS_API

import accum
import accum.compat.v1

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
COUNTS = {"optimizer": 60, "graph": 12, "model": 4, "static": 3, "step": 2}
FED = {
    "api": "optimizer",
    "optimizer": "SGD",
    "family": "legacy" if legacy_family() else "new",
    "arguments": {"momentum": 0.9},
    "accum_steps": 2,
    "reduction": "mean",
    "nonfinite": "propagate",
    "variables": [{"shape": [2], "is_sparse": False}, {"shape": [5, 2], "is_sparse": True}],
    "resource": True,
    "micro_batches": [{"grads": ["dense", [0, 3]], "weight": 1.0 + n, "then": None} for n in range(4)],
    "bad": {},
    "resume": 2,
    "seed": 0,
}
TRAINED = {
    "input": "vector",
    "has_second_input": False,
    "has_masks": False,
    "is_stateful": False,
    "layers": ["dense"],
    "outputs": 2,
    "names": "dict",
    "is_per_token": False,
    "is_ragged": False,
    "loss": "mse",
    "loss_reduction": "mean",
    "metrics": ["distance", "of_batch"],
    "sample_weight": "examples",
    "optimizer": "SGD",
    "arguments": {},
    "options": {"micro_batch_size": 2},
    "how": "train_on_batch",
    "sizes": [5, 3],
    "epochs": 1,
    "strategy": None,
    "is_traced": False,
    "then": ["evaluate", "predict"],
    "precision": "float32",
    "resume": None,
    "seed": 0,
}
STEP = {
    "encoder": ["centred", "batch norm"],
    "head": ["tanh"],
    "phases": [
        {
            "reads": "teacher",
            "losses": ["mean", "covariance"],
            "by_inputs": False,
            "change": "clip all",
            "optimizer": "first",
            "trains": "all",
            "after": ["teacher"],
        }
    ],
    "sizes": [7, 6],
    "micro_batch_size": 3,
    "run_eagerly": False,
    "seed": 0,
}
STATIC = {
    "input": "vector",
    "has_masks": False,
    "is_stateful": False,
    "layers": ["dense"],
    "outputs": 1,
    "is_per_token": False,
    "is_ragged": False,
    "has_weights": False,
    "has_metric": True,
    "optimizer": "GradientDescentOptimizer",
    "arguments": {},
    "options": {"accum_steps": 2, "micro_batch_size": None, "whole_batch": None},
    "last_cycle": "flush",
    "sizes": [3, 2, 1],
    "strategy": None,
    "precision": "float32",
    "resource": True,
    "resume": None,
    "seed": 0,
}


@pytest.fixture
def runner():
    pytest.importorskip("hypothesis", reason="only some environments of the matrix install Hypothesis")
    import property_tests.runner

    return property_tests.runner


@pytest.mark.slow
@pytest.mark.law("L1")
@pytest.mark.parametrize("kind", sorted(COUNTS))
def test_random_cases_make_the_steps_of_the_full_batch(kind, runner):
    if kind in ("optimizer", "model") and not HAS_KERAS_API:
        pytest.skip("this version has no Keras optimizers that accumulate")
    counts, failure = runner.run(kind, COUNTS[kind], seed=1)
    assert failure is None, failure
    assert counts["cases"] >= COUNTS[kind]
    if kind == "step":
        assert counts["exact"]
    else:
        assert any(" + " in name for name in counts) if kind in ("model", "static") else counts["L4"] > 0


MISTAKES = {
    "a micro-batch too many": ({"accum_steps": 3}, "law L3"),
    "a sum": ({"reduction": "sum"}, "law L1"),
}


@pytest.mark.slow
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("mistake", sorted(MISTAKES))
def test_a_case_fails_if_the_optimizer_does_something_else(mistake, runner, monkeypatch):
    options, said = MISTAKES[mistake]
    real = accum.GradientAccumulateOptimizer
    runner.fed.check(FED)

    def mistaken(inner, accum_steps, reduction, **others):
        return real(inner, **dict({"accum_steps": accum_steps, "reduction": reduction}, **others, **options))

    monkeypatch.setattr(accum, "GradientAccumulateOptimizer", mistaken)
    with pytest.raises(runner.fed.Deviation, match=said):
        runner.fed.check(FED)


def _counting_alike(steps, real):
    """Return a function that weights micro-batches of different sizes alike."""
    return lambda *arguments, **options: real(*arguments, **dict(options, **steps))


@pytest.mark.slow
@pytest.mark.tf("2.2")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_case_fails_if_a_train_step_runs_on_each_micro_batch(runner, monkeypatch):
    steps = runner.steps
    steps.check(STEP)
    real = steps.trained

    def on_each(case, **options):
        with steps.warnings.catch_warnings():
            steps.warnings.simplefilter("ignore")
            return real(case, **dict(options, whole_batch=()) if options else {})

    monkeypatch.setattr(steps, "trained", on_each)
    with pytest.raises(AssertionError, match="after batch 1"):
        steps.check(STEP)


@pytest.mark.slow
@pytest.mark.tf("2.2")
@pytest.mark.filterwarnings("ignore:With `whole_batch=\\(\\)`")
def test_a_case_fails_if_a_model_does_something_else(runner, monkeypatch):
    runner.trained.check(TRAINED)
    model = accum.GradientAccumulateModel
    counting = {
        "micro_batch_weight": lambda *_: 1.0,
        "whole_batch": (),
    }  # else the step would run once, without weights
    monkeypatch.setattr(model, "from_model", _counting_alike(counting, model.from_model))
    with pytest.raises(runner.trained.Deviation, match="law L1: after batch 0"):
        runner.trained.check(TRAINED)


@pytest.mark.slow
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("part", ["logs", "evaluated", "predicted", "references"])
def test_a_case_fails_for_what_else_is_seen(part, runner, monkeypatch):
    real, kept = runner.trained.accumulated.run, []

    def mistaken(case, batches):
        seen = real(case, batches)
        if part == "logs":
            seen.logs[1]["out1_loss"] += 1e-3
        elif part == "evaluated":
            seen.evaluated["loss"] += 1e-3
        elif part == "predicted":
            seen.predicted["out1"][4] += 1e-3
        else:
            kept.append(seen.references[0]())
        return seen

    monkeypatch.setattr(runner.trained.accumulated, "run", mistaken)
    said = {"logs": "'out1_loss'", "evaluated": "'loss' of evaluate", "predicted": "predict", "references": "alive"}
    with pytest.raises(runner.trained.Deviation, match=said[part]):
        runner.trained.check(TRAINED)


@pytest.mark.slow
def test_a_case_fails_if_a_static_graph_does_something_else(runner, monkeypatch):
    runner.static_trained.check(STATIC)
    real = accum.compat.v1.AccumOptimizer
    monkeypatch.setattr(accum.compat.v1, "AccumOptimizer", _counting_alike({"reduction": "sum"}, real))
    with pytest.raises(runner.static_trained.Deviation, match="law L1: after batch 1"):
        runner.static_trained.check(STATIC)


@pytest.mark.slow
@pytest.mark.tf("2.2")
def test_a_failure_is_a_script_that_reproduces_it(runner, monkeypatch):
    real = runner.fed.cycles.steps_of
    monkeypatch.setattr(runner.fed.cycles, "steps_of", lambda case, dtype: [None for _ in real(case, dtype)])
    _, failure = runner.run("optimizer", 40, seed=1)
    first, _, script = failure.partition("\n")
    assert first.startswith("# Deviation: law L3: 1 steps were counted, not 0")
    with pytest.raises(runner.fed.Deviation, match="law L3"):
        exec(compile(script, "script", "exec"), {})
    case = re.search(r"'micro_batches': \[(.*?)\]\s*,\s*'nonfinite'", script, re.DOTALL).group(1)
    assert case.count("grads") == 1  # shrunk


def _script():
    spec = importlib.util.spec_from_file_location("random_cases", os.path.join(ROOT, "project", "random_cases.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_counts_that_were_recorded():
    script = _script()
    with io.open(script.PAGE, encoding="utf-8") as file:
        text = file.read()
    shown = text[text.index(script.BEGIN) + len(script.BEGIN) : text.index(script.END)]
    records = script._read(script.DATA)
    assert shown == script.tables(records)


def test_a_run_is_counted_once_and_replaces_one_at_another_commit(tmp_path):
    script, path = _script(), str(tmp_path / "records.json")

    def counted(commit, seed, count):
        pair = {"tensorflow": "2.15.1", "kind": "model", "date": "2026-11-26", "commit": commit}
        script._add(path, [dict(pair, seeds=[seed], counts={"cases": count})])
        return [(record["commit"], record["seeds"], record["counts"]["cases"]) for record in script._read(path)]

    assert counted("one", 1, 10) == [("one", [1], 10)]
    assert counted("one", 1, 10) == [("one", [1], 10)]
    assert counted("one", 2, 5) == [("one", [1, 2], 15)]
    assert counted("other", 3, 7) == [("one", [1, 2], 15), ("other", [3], 7)]
    assert counted("third", 3, 8) == [("one", [1, 2], 15), ("third", [3], 8)]
