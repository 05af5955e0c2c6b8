"""Random cases against the full batch, a few of those that scripts/dev/random_cases.py draws by the thousand."""

import importlib.util
import io
import os
import re

import pytest
from exceptions import HAS_KERAS_API
from optimizers import legacy_family

import accum

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
COUNTS = {"optimizer": 60, "graph": 12, "model": 8}
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


@pytest.fixture
def runner():
    pytest.importorskip("hypothesis", reason="only some environments of the matrix install Hypothesis")
    import property_tests.runner

    return property_tests.runner


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.law("L1")
@pytest.mark.parametrize("kind", sorted(COUNTS))
def test_random_cases_make_the_steps_of_the_full_batch(kind, runner):
    if kind != "graph" and not HAS_KERAS_API:
        pytest.skip("this version has no Keras optimizers that accumulate")
    counts, failure = runner.run(kind, COUNTS[kind], seed=1)
    assert failure is None, failure
    assert counts["cases"] >= COUNTS[kind] and counts["L4"] + counts["L18"] > 0


MISTAKES = {
    "a micro-batch too many": ({"accum_steps": 3}, "law L3"),
    "a sum": ({"reduction": "sum"}, "law L1"),
}


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.keras_api
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


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.keras_api
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
    spec = importlib.util.spec_from_file_location(
        "random_cases", os.path.join(ROOT, "scripts", "dev", "random_cases.py")
    )
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
