"""The benchmarks run, and refuse to time what is not equal; their numbers are for a quiet machine."""

import importlib.util
import json
import os
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from versions import HAS_KERAS_API

BENCHMARKS = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "benchmarks")
PAGE = os.path.join(os.path.dirname(BENCHMARKS), "project", "pages", "speed.md")

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def benchmarks_importable(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.mark.parametrize("name", sorted(name for name in os.listdir(BENCHMARKS) if name.endswith(".py")))
def test_whatever_a_script_imports_is_there(name, monkeypatch):
    """Of the package, too, which moves its private modules."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location(f"script_{name[:-3]}", os.path.join(BENCHMARKS, name))
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def task(api, workload):
    return {
        "api": api,
        "workload": workload,
        "accum_steps": 2,
        "optimizer": "momentum",
        "smoke": True,
        "rounds": 1,
        "warm_up": 0,
    }


APIS = [("v1", "conv")] + ([("optimizer", "transformer"), ("model", "mlp")] if HAS_KERAS_API else [])


@pytest.mark.parametrize("api,workload", APIS)
def test_every_api_is_timed_beside_the_limit(api, workload):
    from measuring.timing import time_one

    result = time_one(task(api, workload))
    rows = {row["implementation"]: row for row in result["times"]}
    assert {"limit", "accum", "an update every micro-batch"} <= set(rows)
    assert rows["limit"]["ratio"] == 1.0
    assert rows["accum"]["deviation"] <= 2e-6 < rows["an update every micro-batch"]["deviation"]


@pytest.mark.skipif(not HAS_KERAS_API, reason="no `GradientAccumulateModel` here")
@pytest.mark.parametrize("api", ["one step", "step in fit"])
def test_a_step_over_micro_batches_is_timed_beside_the_full_batch(api):
    from measuring.timing import time_one

    result = time_one(task(api, "mlp"))
    rows = {row["implementation"]: row for row in result["times"]}
    for name in (
        "plain, full batch",
        "accum, micro_batch_size",
        'accum, micro_batch_size="auto"',
        "accum, accum_steps",
    ):
        assert rows[name]["deviation"] <= 2e-6
    assert "accum, micro_batch_size, to the plain, full batch" in rows


@pytest.mark.skipif(not HAS_KERAS_API, reason="no `GradientAccumulateModel` here")
@pytest.mark.parametrize("kind", ["micro-batch", "accumulated", "full batch"])
def test_the_memory_of_a_step_over_micro_batches_is_measured(kind):
    from measuring.memory import measure_one

    (row,) = measure_one(dict(task("one step", "mlp"), kind=kind, batch=4))["memory"]
    assert row["peak_mib"] >= row["idle_mib"] > 0


@pytest.mark.skipif(not HAS_KERAS_API, reason="no `GradientAccumulateModel` here")
@pytest.mark.parametrize("workload", ["residual", "towers"])
def test_whole_batch_is_timed_beside_plain_splitting_and_the_full_batch(workload):
    from measuring.whole_batch import EXACT, PLAIN, SPLIT, time_one

    rows = {row["implementation"]: row for row in time_one(task("whole batch", workload))["times"]}
    assert rows[SPLIT]["ratio"] == 1.0
    assert rows[EXACT]["deviation"] <= 2e-5 < rows[SPLIT]["deviation"]
    assert {PLAIN, f"{EXACT}, to the {PLAIN}"} <= set(rows)


@pytest.mark.skipif(not HAS_KERAS_API, reason="no `GradientAccumulateModel` here")
def test_the_memory_of_whole_batch_is_measured():
    from measuring.memory import measure_one

    (row,) = measure_one(dict(task("whole batch", "towers"), kind="exact", batch=4))["memory"]
    assert row["peak_mib"] >= row["idle_mib"] > 0


@pytest.mark.skipif(not HAS_KERAS_API, reason="no `GradientAccumulateModel` here")
def test_the_command_for_a_gpu_runs_without_one(monkeypatch, tmp_path, capsys):
    import networks

    monkeypatch.setattr(networks, "work", lambda task: json.loads(json.dumps(networks.work_here(task))))
    assert networks.main(["gpu", "--smoke", "--json", str(tmp_path / "found.json")]) == 0
    measured = json.loads((tmp_path / "found.json").read_text())
    rows = {(result["task"]["what"], row.get("run")): row for result in measured["results"] for row in result["rows"]}
    assert {what for what, _ in rows} == {"memory", "time", "auto", "fit"}
    assert rows["memory", "full batch"]["host_mib"] > -1  # the kernel's count lags behind by some pages a thread
    assert max(rows["time", '"all"']["apart"]) < 1e-3 < min(rows["time", "plain splitting"]["apart"])
    assert rows["auto", None]["size"] == 2 and max(rows["auto", None]["apart"]) <= 1e-4
    assert "plain Keras, a step for each micro-batch" in capsys.readouterr().out
    assert networks.main(["table", str(tmp_path / "found.json")]) == 0


def test_what_ends_in_other_weights_is_not_timed(monkeypatch):
    from measuring import static_graph, timing

    monkeypatch.setattr(static_graph, "Ours", static_graph.Plain)
    with pytest.raises(AssertionError, match="off the limit's weights"):
        timing.time_one(task("v1", "mlp"))


def test_tables_go_between_the_marks_and_nothing_else_changes():
    from measuring import machine, report

    row = {"workload": "mlp", "api": "v1", "accum_steps": 4, "seconds": 0.1}
    spread = {"ratio": 1.25, "ratio_25": 1.2, "ratio_75": 1.3, "deviation": None}
    result = {
        "machine": machine.described(),
        "versions": {"tensorflow": "2.15.1", "gpus": [], "threads": [0, 0]},
        "settings": {"smoke": False},
        "times": [dict(row, implementation="limit", **spread), dict(row, implementation="accum", **spread)],
        "memory": [],
        "absent": [],
    }
    with open(PAGE, encoding="utf-8") as file:
        text = file.read()
    merged = report.merged(text, [result])
    assert "100.0 ms" in merged and "1.25 (1.20–1.30)" in merged
    assert report.merged(merged, []) == report.merged(text, [])
    assert merged.split(report.BEGIN)[0] == text.split(report.BEGIN)[0]


def test_the_page_on_memory_quotes_what_was_measured():
    root = os.path.dirname(BENCHMARKS)
    with open(os.path.join(root, "project", "records", "benchmarks", "py311-tf2.15.json"), encoding="utf-8") as file:
        result = json.load(file)
    with open(os.path.join(root, "docs", "out-of-memory.md"), encoding="utf-8") as file:
        words = " ".join(file.read().split())

    def ratios(api, implementation):
        key = lambda row: (row["api"], row["implementation"], row["accum_steps"])
        listed = [row["ratio"] for row in result["times"] if key(row) == (api, implementation, 8)]
        return f"{min(listed):.2f} to {max(listed):.2f}"

    loop, by_hand, fit = ratios("optimizer", "accum"), ratios("optimizer", "by hand"), ratios("model", "accum")
    assert f"accum took {loop} times that in a loop, and loops by hand {by_hand}." in words
    assert f"In `fit`, it took {fit} times" in words
    peaks = {}
    for row in result["memory"]:
        if (row["workload"], row["api"]) == ("conv", "optimizer"):
            peaks.setdefault(row["kind"], []).append(row["peak_mib"])
    told = {kind: f"{sorted(sizes)[len(sizes) // 2]:,.0f}" for kind, sizes in peaks.items()}
    assert (
        f"was {told['full batch']} MiB with 4,096 images at once, and {told['accumulated']} MiB with 64 micro-" in words
    )
    assert f"batches of 64 without accumulation took {told['micro-batch']} MiB." in words


def networks_measured(pages):
    with open(pages.RESULT, encoding="utf-8") as file:
        return json.load(file)


def test_the_pages_show_what_was_measured_of_networks():
    import pages

    assert pages.changes(networks_measured(pages)) == [], "run python benchmarks/networks.py pages --write"


def test_other_measurements_change_every_row_of_the_pages():
    import pages

    recorded = networks_measured(pages)
    for row in [row for result in recorded["results"] for row in result["rows"]]:
        row.update({key: 2 * row.get(key, 0) for key in ("host_mib", "device_mib")})
        row["plan"] = row.get("plan") and {key: 3 * value for key, value in row["plan"].items()}
        row["first"] = row.get("first") and [2 * seconds for seconds in row["first"]]
        row["clocks"] = row.get("clocks") and [[2 * seconds for seconds in clock] for clock in row["clocks"]]
        row["later"] = [[2 * seconds for seconds in clock] for clock in row.get("later", [])]
    changed = [line.split(":")[0] for line in pages.changes(recorded)]
    rows = {page: 0 for page, _, _ in pages.TABLES}
    for page, _, rows_from in pages.TABLES:
        rows[page] += len(rows_from(recorded["results"]))
    sentences = {page: changed.count(page) - count for page, count in rows.items()}
    assert sentences.pop("docs/whole-batch.md") > 0
    assert sentences == {"README.md": 0, "docs/index.md": 0, "benchmarks/README.md": 0}


def test_the_figure_shows_what_was_measured(monkeypatch):
    monkeypatch.syspath_prepend(os.path.join(os.path.dirname(BENCHMARKS), "project"))
    import picture

    with open(picture.RESULT, encoding="utf-8") as file:
        drawn = picture.draw_speed(json.load(file))
    with open(picture.SPEED, encoding="utf-8") as file:
        assert file.read() == drawn, "run project/picture.py"
    ElementTree.fromstring(drawn)
