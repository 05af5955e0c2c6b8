"""The page of public programs is what its records say, and the script changes no more than it is told to."""

import os
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "scripts", "dev"))

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
    "exports": False,
}


def test_the_page_is_generated_from_the_records():
    with open(script.PAGE, encoding="utf-8") as file:
        assert file.read() == script.page(script.records())


def test_every_program_has_a_record():
    assert set(script.records()) == set(script.PROGRAMS)


def test_every_program_that_ran_agrees_resumes_and_exports():
    ran = {name: record for name, record in script.records().items() if "failed" not in record}
    assert len(ran) >= 20
    for name, record in ran.items():
        assert record["agreement"] <= 5e-6 < 100 * 5e-6 < record["unaccumulated"], name
        assert record["resumes"] and record["exports"], name


def test_a_row_says_what_a_record_does():
    page = script.page({"one": RECORD, "other": {"repository": "a/b", "what": "`f`", "failed": "it imports gym"}})
    assert "| `0123456789` | `train` | +3 −2 | 3e-07 | 0e+00 | 1e-01 | 5e-02; `global_step`, `a` and 1 more |" in page
    assert "| `bias` | yes | **no** |" in page and "can't run: it imports gym" in page
    assert "| yes, 1e-07 | **no** |" in script.page({"one": dict(RECORD, resumed_off=1e-7)})
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1


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
    place = tmp_path / "owner+name" / "repo"
    place.mkdir(parents=True)
    git = ["git", "-C", str(place), "-c", "user.name=n", "-c", "user.email=n@example.org"]
    subprocess.run(git + ["init", "-q"], check=True)
    (place / "file.py").write_text("pass\n")
    subprocess.run(git + ["add", "."], check=True)
    subprocess.run(git + ["commit", "-qm", "m"], check=True)
    program = script.PROGRAMS["tf_unet"]._replace(inside="inside")
    found = script.git_directory(str(tmp_path), "owner/name")
    assert len(script.make_tree(found, str(tmp_path / "tree"), program)) == 40
    assert (tmp_path / "tree" / "inside" / "file.py").read_text() == "pass\n"
    with pytest.raises(script.Failed, match="not in the folder"):
        script.git_directory(str(tmp_path), "owner/other")
