"""The list of public accumulators, the page that says how many of them `migrate` names, and how that is measured."""

import subprocess

import accumulators
import pytest

SUMS = """
import tensorflow as tf
def train(opt, loss, held):
    adding = [h.assign_add(g) for h, (g, v) in zip(held, opt.compute_gradients(loss))]
    return opt.apply_gradients(zip(held, variables))
"""


def entry(**changes):
    whole = {"repository": "them/it", "commit": "0" * 40, "folder": "", "files": [], "set": "held out"}
    return dict(whole, **changes)


def result(files=(), missed=(), weak=(), others=()):
    return entry(files=list(files), missed=list(missed), weak=list(weak), others=list(others))


def test_the_list_holds_enough_of_each_kind():
    entries = accumulators.checked(accumulators.read(accumulators.LIST))
    assert sum(bool(entry["files"]) for entry in entries) >= 40
    assert sum(not entry["files"] for entry in entries) >= 40
    assert {entry["set"] for entry in entries} == set(accumulators.SETS)


def test_every_entry_of_the_list_is_measured():
    keys = [[entry[key] for key in sorted(accumulators.KEYS)] for entry in accumulators.read(accumulators.LIST)]
    assert keys == [
        [entry[key] for key in sorted(accumulators.KEYS)] for entry in accumulators.read(accumulators.RESULTS)
    ]


def test_recall_and_precision_are_at_least_95_percent():
    recall, precision = accumulators.counts(accumulators.read(accumulators.RESULTS))[-2:]
    assert recall >= 0.95 and precision >= 0.95


def test_the_page_is_what_the_results_give():
    with open(accumulators.PAGE, encoding="utf-8") as file:
        assert file.read() == accumulators.page(accumulators.read(accumulators.RESULTS))


def test_an_accumulator_is_named_only_if_each_of_its_files_is():
    named, missed = result(["a.py"], others=["b.py"]), result(["a.py", "b.py"], missed=["b.py"])
    innocent, accused = result(), result(others=["c.py"])
    assert accumulators.counts([named, missed, innocent, accused]) == (2, 1, 2, 1, 0.5, 0.5)


@pytest.mark.parametrize(
    "changes", [{"commit": "abc"}, {"set": "all"}, {"name": "it"}], ids=["no-commit", "no-set", "another-key"]
)
def test_an_entry_of_another_form_is_refused_by_name(changes):
    with pytest.raises(accumulators.Broken, match="them/it: an entry must have"):
        accumulators.checked([entry(**changes)])


def test_a_repository_is_listed_once():
    with pytest.raises(accumulators.Broken, match="them/it: listed twice"):
        accumulators.checked([entry(), entry()])


@pytest.fixture
def theirs(tmp_path):
    """(folder with a git directory, entry of its commit)."""
    git = tmp_path / "them+it"
    command = ["git", "-c", "user.name=us", "-c", "user.email=us@example.com", "-C", str(git)]
    subprocess.check_call(["git", "init", "-q", str(git)])
    (git / "a.py").write_text(SUMS)
    (git / "b.py").write_text("x = 1\n")
    subprocess.check_call(command + ["add", "."])
    subprocess.check_call(command + ["commit", "-qm", "all"])
    commit = subprocess.check_output(command + ["rev-parse", "HEAD"]).decode().strip()
    return str(tmp_path), entry(commit=commit, files=["a.py"])


def test_a_commit_is_measured(theirs):
    pytest.importorskip("libcst", reason="`migrate` is an extra, tested where tox.ini installs LibCST")
    folder, listed = theirs
    assert accumulators.measured((folder, listed)) == dict(listed, missed=[], weak=[], others=[])
    assert accumulators.measured((folder, dict(listed, files=["b.py"])))["missed"] == ["b.py"]
    assert accumulators.measured((folder, dict(listed, files=[])))["others"] == ["a.py"]


def test_what_the_repository_lacks_is_named(theirs):
    folder, listed = theirs
    with pytest.raises(accumulators.Broken, match="them/it: no file c.py"):
        accumulators.measured((folder, dict(listed, files=["c.py"])))
    with pytest.raises(accumulators.Broken, match="them/it: git can't archive 0000"):
        accumulators.measured((folder, dict(listed, commit="0" * 40)))
    with pytest.raises(accumulators.Broken, match="they/it: no git directory"):
        accumulators.measured((folder, dict(listed, repository="they/it")))
