"""The page of public programs is what its records say, and the script changes no more than it is told to."""

import os
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "project"))

import programs as script  # noqa: E402

pytestmark = pytest.mark.skipif(not os.path.exists(os.path.join(ROOT, ".git")), reason="only a clone has its scripts")

RECORD = {
    "repository": "owner/name",
    "what": "`train`",
    "commit": "0123456789abcdef",
    "added": 3,
    "removed": 2,
    "agreement": 3e-7,
    "rows": 0.0,
    "unaccumulated": 0.1,
    "own_runs_differ": 0.05,
    "unordered": ["global_step", "a", "b"],
    "rounded": ["bias"],
    "resumes": True,
    "resumed_off": 0.0,
    "killed_after": 7,
    "exports": False,
    "tensorflow": "1.15.0",
    "accum": "abcdef0123, 2026-01-31",
}


def near(record):
    """How far a program may be off its full batch: farther where its order of examples moves variables by 5e-6."""
    return 1e-5 if record["rounded"] else 5e-6


def test_the_page_is_generated_from_the_records():
    with open(script.PAGE, encoding="utf-8") as file:
        assert file.read() == script.page(script.records())


def test_every_program_has_a_record():
    accumulating = {name for name, program in script.PROGRAMS.items() if program.edits is not None}
    assert {name for name, record in script.records().items() if "tensorflow" in record} == accumulating
    assert set(script.records()) <= set(script.PROGRAMS)


def test_every_program_that_ran_agrees_resumes_and_exports():
    ran = {name: record for name, record in script.records().items() if "agreement" in record}
    assert len(ran) >= 38
    for name, record in ran.items():
        assert record["agreement"] <= near(record) < 100 * 5e-6 < record["unaccumulated"], name
        assert record["resumes"] and record["exports"], name
        assert 0 < record.get("resumed_from", 1) < record.get("killed_after", 2), name


ROUNDED = {"pix2pix": 1e-5, "pspnet": 6e-6, "ugatit": 1e-5, "yolov3-slim": 6e-5}
"""How far off four programs are that miss the bar. With other last digits in its inputs, the full batch of yolov3-slim
moves as far, and that of pix2pix about half as far; those of pspnet and ugatit were not tried."""

FINER = {"dc-tts": 1e-8}
"""A bar below `BAR` for a program whose weights move less than that in its three steps."""


AT_ONCE = ("sequence-tagging", "transformer-xl")
"""A step of these also computes some of it for the whole batch: letters whose shape gives the lengths of words, and in
transformer-xl positions, in which there are no examples."""


@pytest.mark.law("L21")
def test_every_program_that_is_split_in_one_line_agrees_in_all_variables():
    splits = {name: record["split"] for name, record in script.records().items() if "split" in record}
    ran = {name: record for name, record in splits.items() if "failed" not in record}
    assert len(ran) >= 14
    for name, record in ran.items():
        bar = dict(ROUNDED, **FINER).get(name, script.BAR)
        assert record["agreement"] <= bar < record["moved"], name
        assert record["as_it_is"] <= bar + 2 * record["own_as_it_is"], name
        assert record["added"] - record["removed"] <= 3 and record["same_variables"], name
        assert not record.get("whole") or name in AT_ONCE, name
    unruled = sum(sum(record["unruled"].values()) for record in ran.values())
    assert unruled <= 0.01 * sum(record["operations"] for record in ran.values())


def test_every_evaluation_is_that_of_the_full_batch_or_as_near_as_one_with_another_order_of_examples():
    evaluated = {name: record for name, record in script.records().items() if "evaluated" in record}
    assert len(evaluated) >= 20
    exact = {name: record for name, record in evaluated.items() if record["evaluated"] <= 1e-5}
    assert len(exact) >= len(evaluated) - 3
    for name, record in exact.items():
        assert record["evaluation_moved"] > 100 * 1e-5, name
    for name in set(evaluated) - set(exact):  # they predict from variables that are not compared either
        record = evaluated[name]
        assert record["rounded"] and record["evaluated"] <= 2 * record["evaluation_rounded"], name
        assert record["evaluated"] <= 0.03 * record["evaluation_moved"], name


def test_what_ran_on_tensorflow_2_agrees_resumes_and_exports_too():
    parts = [part for record in script.records().values() for part in record.get("also", {}).values()]
    ran = [part for part in parts if "failed" not in part]
    assert len(ran) >= 5
    for part in ran:
        assert part["agreement"] <= near(part) < 100 * 5e-6 < part["unaccumulated"]
        assert part["resumes"] and part["exports"]


def test_some_programs_run_through_an_estimator():
    kinds = {name: program.estimator for name, program in script.PROGRAMS.items() if program.estimator}
    assert set(kinds.values()) == {"Estimator", "TPUEstimator"}
    for name in kinds:
        assert script.records()[name]["mean_loss"] <= 5e-6, name


def test_a_row_says_what_a_record_does():
    page = script.page(
        {
            "one": RECORD,
            "other": {
                "repository": "a/b",
                "what": "`f`",
                "failed": "it imports gym",
                "accum": "fedcba9876, 2026-02-01",
            },
        }
    )
    assert "| `0123456789` | 1.15.0 | `train` | +3 −2 | 3e-07 | 0e+00 | 1e-01 |" in page
    assert "| 5e-02; `global_step`, `a` and 1 more | `bias` | yes | **no** |  | `abcdef0123`, 2026-01-31 |" in page
    assert "| `fedcba9876`, 2026-02-01 |" in page
    assert "can't run: it imports gym" in page and "Not tried on TensorFlow 2: one, other." in page
    assert "| yes, 1e-07 | **no** |" in script.page({"one": dict(RECORD, resumed_off=1e-7)})
    assert "| **no** | 2e-08 |" in script.page({"one": dict(RECORD, evaluated=2e-8)})
    decided = dict(RECORD, evaluated=2e-4, evaluation_rounded=3e-4)
    assert "| **no** | 2e-04 (3e-04) |" in script.page({"one": decided})
    closed = {name: value for name, value in RECORD.items() if name != "killed_after"}
    assert "| yes, from a closed session |" in script.page({"one": closed})
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows[2:6]}) == 1  # behind the head of the table of what is split


def test_what_runs_on_tensorflow_2_is_a_part_of_a_record_and_stays_when_1_15_runs_again():
    records = {"one": dict(RECORD), "other": dict(RECORD)}
    script.keep(records, "one", dict(RECORD, tensorflow="2.10.1", agreement=4e-7), is_tf2=True)
    script.keep(records, "other", dict(RECORD, failed="no contrib", tensorflow="2.10.1"), is_tf2=True)
    script.keep(records, "one", dict(RECORD, agreement=5e-7), is_tf2=False)
    assert records["one"]["agreement"] == 5e-7 and records["one"]["also"]["2.10.1"]["agreement"] == 4e-7
    page = script.page(records)
    assert "| 1.15.0, 2.10.1 |" in page and "| one | 2.10.1 | 4e-07 | 1e-01 | yes | **no** |  | `abcdef0123`" in page
    assert "| other | 2.10.1 | can't run: no contrib |" in page and "Not tried" not in page


def test_a_program_that_is_split_has_a_row_beside_its_k_runs():
    part = {"commit": "89abcdef0123", "added": 2, "removed": 0, "agreement": 2e-7, "as_it_is": 0.1, "own_as_it_is": 0.2}
    part.update(variables=12, rounded=["bias"], inside=3, using=4, statistics=1, operations=100, unruled={"PyFunc": 1})
    part.update(said=["It computes 3 of 4. More."], accum="fedcba9876, 2026-02-01")
    records = {"one": dict(RECORD, split=part), "other": {"repository": "a/b", "what": "`f`"}}
    script.keep(records, "other", {"repository": "a/b", "what": "`f`", "failed": "ValueError: -1"}, False, True)
    page = script.page(records)
    assert "| `89abcdef01` | `train` | +2 −0 | 2e-07 | 1e-01 (2e-01) | 12, but for `bias` | 3 of 4, 1 norms |" in page
    assert "| 99 of 100 | It computes 3 of 4. | +3 −2, 3e-07 | `fedcba9876`, 2026-02-01 |" in page
    assert "| ValueError: -1 |" in page and "99.00 % of 100 operations on the batch have a rule" in page
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows[:4]}) == 1


def test_a_warning_is_its_first_sentence_and_what_it_received():
    assert "Warnings" not in script.page({"one": RECORD})
    text = "Each micro-batch changes variables. Move what follows the steps. Received: ['a', 'b', 'c']."
    page = script.page({"one": dict(RECORD, warned=[text, "One optimizer counts. Received: Adam. [accum: one]"])})
    assert "\n- one: Each micro-batch changes variables. Received: `a`, `b` and 1 more.\n" in page
    assert "\n- one: One optimizer counts. Received: Adam.\n" in page


@pytest.mark.slow
def test_the_commit_of_accum_is_the_last_of_its_sources(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=n@example.org"]
    subprocess.run(git + ["init", "-q"], check=True)
    for name in ("accum", "compat", "docs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file.py").write_text("pass\n")
        subprocess.run(git + ["add", "."], check=True)
        subprocess.run(git + ["commit", "-qm", name], check=True)
    last = subprocess.run(git + ["rev-parse", "HEAD^"], stdout=subprocess.PIPE, check=True).stdout.decode()
    monkeypatch.setattr(script, "ROOT", str(tmp_path))
    assert script.sources().split(", ")[0] == last[:10]
    assert len(script.sources().split(", ")) == 2
    (tmp_path / "compat" / "file.py").write_text("x = 1\n")
    assert script.sources().endswith(", changed")


def test_the_reason_of_a_failure_is_the_line_that_names_the_error():
    output = "Traceback\n  File x\nAttributeError: module 'numpy' has no attribute 'bool'.\n`np.bool` was\n    a link\n"
    assert script.reason_in(output) == "AttributeError: module 'numpy' has no attribute 'bool'."
    assert script.reason_in("killed\n") == "killed"


def test_imports_of_tensorflow_1_become_those_of_tensorflow_2(tmp_path):
    before = "import tensorflow as tf\nfrom tensorflow.contrib import slim\nfrom tensorflow.contrib import slim as s\n"
    before += "x = tf.contrib.layers.layer_norm(x)\n"
    (tmp_path / "file.py").write_text(before + "import tensorflow as tfv\n")
    script.modernize(str(tmp_path))
    after = "import tensorflow.compat.v1 as tf\nimport tf_slim as slim\nimport tf_slim as s\nx = LAYERS.layer_norm(x)\n"
    after = after.replace("LAYERS", script.LAYERS)
    assert (tmp_path / "file.py").read_text() == after + "import tensorflow as tfv\n"


def test_changes_are_counted_and_those_that_no_longer_fit_are_refused(tmp_path):
    (tmp_path / "file.py").write_text("import a\nb = 1\nc = b\n")
    assert script.change(
        str(tmp_path), {"file.py": [(r"b = 1", "b = 2", 1), (r"^import ", "import x\nimport ", 1)]}
    ) == (
        2,
        1,
    )
    assert (tmp_path / "file.py").read_text() == "import x\nimport a\nb = 2\nc = b\n"
    with pytest.raises(script.Failed, match="file.py has no 'gone' any more"):
        script.change(str(tmp_path), {"file.py": [("gone", "", 1)]})


@pytest.mark.slow
def test_a_tree_is_that_of_the_newest_commit_and_a_missing_repository_is_named(tmp_path):
    checkout = tmp_path / "owner+name" / "repo"
    checkout.mkdir(parents=True)
    git = ["git", "-C", str(checkout), "-c", "user.name=n", "-c", "user.email=n@example.org"]
    subprocess.run(git + ["init", "-q"], check=True)
    (checkout / "file.py").write_text("pass\n")
    subprocess.run(git + ["add", "."], check=True)
    subprocess.run(git + ["commit", "-qm", "m"], check=True)
    program = script.PROGRAMS["tf_unet"]._replace(inside="inside")
    repository = script.git_directory(str(tmp_path), "owner/name")
    assert len(script.make_tree(repository, str(tmp_path / "tree"), program)) == 40
    assert (tmp_path / "tree" / "inside" / "file.py").read_text() == "pass\n"
    with pytest.raises(script.Failed, match="not in the folder"):
        script.git_directory(str(tmp_path), "owner/other")
