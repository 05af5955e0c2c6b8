"""Windows' cells under Wine: the cells and files are those of Windows, and results say that Wine ran them."""

import json
import os
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "scripts"))

import cells as CELLS  # noqa: E402
import wine  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.exists(os.path.join(ROOT, ".git")), reason="only a clone has a list of its files"),
    pytest.mark.skipif(os.name == "nt", reason="Wine runs on Linux"),
]


def test_every_windows_cell_from_python_3_8_on_has_an_interpreter():
    assert [cell for cell in CELLS.cells("windows") if cell not in wine.possible()] == [
        cell for cell in CELLS.cells("windows") if CELLS.parts(cell)[1] < 8
    ]


def test_lines_are_one_cell_of_each_line_that_can_run():
    expected = {CELLS.parts(cell)[0] for cell in wine.possible()}
    assert [CELLS.parts(cell)[0] for cell in wine.lines()] == sorted(expected)
    assert {"py39-tf2.10", "py311-tf2.15", "py38-tf2.2"} < set(wine.lines())


def test_a_cell_without_an_interpreter_is_refused():
    with pytest.raises(wine.Failed, match="CELL must be one of: .*Received: py36-tf2.2"):
        wine.chosen(["py38-tf2.2", "py36-tf2.2"])


def test_links_are_copied_as_git_on_windows_makes_them(tmp_path):
    if not os.path.islink(os.path.join(ROOT, "accum", "compat")):
        pytest.skip("this clone has no links")
    wine.copy_checkout(str(tmp_path))
    assert (tmp_path / "accum" / "compat").read_text() == os.path.join(os.pardir, "compat")
    assert (tmp_path / "compat" / "v1" / "__init__.py").is_file()
    assert wine.freeze.source_digest(str(tmp_path)) == wine.freeze.source_digest()


def test_a_result_says_under_what_and_of_which_commit_it_is(tmp_path, monkeypatch):
    cell, left = "py38-tf2.4", tmp_path / "root" / "cell" / "work"
    for kind, name, text in (("freeze", cell + ".json", '{"cell": "py38-tf2.4"}'), ("junit", cell + ".xml", "<x/>")):
        (left / kind).mkdir(parents=True)
        (left / kind / name).write_text(text)
    monkeypatch.setattr(wine, "wine_version", lambda folder: "Wine 10.0")
    monkeypatch.setattr(wine.freeze, "commit", lambda: "abcdef0123")
    wine.keep_results(str(tmp_path), cell)
    frozen = json.loads((tmp_path / "results" / "freeze" / (cell + ".json")).read_text())
    assert frozen == {"cell": cell, "under": "Wine 10.0", "commit": "abcdef0123"}
    assert (tmp_path / "results" / "junit" / (cell + ".xml")).read_text() == "<x/>"


def test_an_earlier_report_is_not_taken_for_that_of_a_run_that_was_broken_off(tmp_path, monkeypatch):
    cell = "py38-tf2.4"
    (tmp_path / "results" / "junit").mkdir(parents=True)
    earlier = tmp_path / "results" / "junit" / (cell + ".xml")
    earlier.write_text("<x/>")
    (tmp_path / "root" / "cell" / "work" / "freeze").mkdir(parents=True)
    (tmp_path / "root" / "cell" / "work" / "freeze" / (cell + ".json")).write_text("{}")
    monkeypatch.setattr(wine, "wine_version", lambda folder: "Wine 10.0")
    wine.keep_results(str(tmp_path), cell)
    assert not earlier.exists()


@pytest.mark.parametrize("said", ["Signature verification: failed", "Signature verification: ok, of another"])
def test_an_interpreter_that_others_signed_is_refused(tmp_path, monkeypatch, said):
    (tmp_path / "python.exe").write_bytes(b"MZ")
    monkeypatch.setattr(wine, "run", lambda command: f"CN=Somebody\n{said}")
    with pytest.raises(wine.Failed, match="python.exe is not signed by the Python Software Foundation"):
        wine.check_signatures(str(tmp_path), "3.10")
