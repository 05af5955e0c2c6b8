"""The mutants that project/mutants.py makes: each fits the sources, and the page is what the results say."""

import os
import re

import mutants
import pytest
from mutants import MUTANTS, Mutant

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_sources(mutant, tmp_path):
    mutants.copy_sources(str(tmp_path))
    before = {name: (tmp_path / installed(name)).read_text(encoding="utf-8") for name, _, _ in mutant.edits}
    mutants.plant(mutant, str(tmp_path))
    for name, text in before.items():
        changed = (tmp_path / installed(name)).read_text(encoding="utf-8")
        assert changed != text
        compile(changed, name, "exec")


def installed(name):
    return "accum/" + name if name.startswith("compat/") else name


@pytest.mark.parametrize("old", ["nowhere in the file", "return"], ids=["gone", "several"])
def test_a_text_that_does_not_occur_once_is_an_error_that_names_the_mutant(tmp_path, old):
    mutants.copy_sources(str(tmp_path))
    mutant = Mutant("some_mutant", "L1", "It is wrong.", [("accum/_engine/_cycle.py", old, "pass")], [], [], "2.15")
    with pytest.raises(
        mutants.Broken, match=r"some_mutant: the text to replace occurs \d+ times in accum/_engine/_cycle"
    ):
        mutants.plant(mutant, str(tmp_path))


def test_check_names_the_mutants_that_no_longer_fit(capsys, monkeypatch):
    assert mutants.main(["check"]) == 0 and f"{len(MUTANTS)} mutants fit" in capsys.readouterr().out
    gone = MUTANTS[0]._replace(name="gone", edits=[("accum/_engine/_cycle.py", "nowhere in the file", "pass")])
    moved = MUTANTS[0]._replace(name="moved", edits=[("accum/_engine/_no_such_file.py", "pass", "return")])
    monkeypatch.setattr(mutants, "MUTANTS", [MUTANTS[0], gone, moved])
    assert mutants.main(["check"]) == 1
    said = capsys.readouterr().out
    assert "gone: the text to replace occurs 0 times in accum/_engine/_cycle.py:\nnowhere in the file\n" in said
    assert "moved: there is no file accum/_engine/_no_such_file.py\n" in said and MUTANTS[0].name not in said


ENTRY = """\
# a comment
[one]
law: L1
says: It is wrong: always.
test: tests/test_a.py::test_b
seen: some/library#1
seen: another/library#2
edit accum/a.py
-    if x:
-        y = "- z"
+
+    if not x:
edit accum/b.py
-# a comment
+pass
"""


def test_an_entry_is_read_as_it_stands_with_its_indents_and_empty_lines(tmp_path):
    path = tmp_path / "mutants.txt"
    path.write_text(
        ENTRY + "\n" + ENTRY.replace("[one]", "[two]").replace("edit accum/a", "tensorflow: 2.21\nedit accum/a")
    )
    one, two = mutants.read(str(path))
    assert (one.name, one.law, one.says, one.tensorflow) == ("one", "L1", "It is wrong: always.", "2.15")
    assert (one.tests, one.seen) == (["tests/test_a.py::test_b"], ["some/library#1", "another/library#2"])
    edits = [("accum/a.py", '    if x:\n        y = "- z"', "\n    if not x:"), ("accum/b.py", "# a comment", "pass")]
    assert one.edits == edits and two == one._replace(name="two", tensorflow="2.21")


@pytest.mark.parametrize(
    "old, new, says",
    [
        ("law: L1\n", "", "one: it must have law"),
        ("+pass\n", "", "one: it must have edits, each with - and [+] lines"),
        ("says:", "says", "one: a line must be a field, an edit, or begin with - or [+]. Received: says It is wrong"),
        ("[one]\n", "", r"a mutant must begin with \[name\]. Received: law: L1"),
    ],
    ids=["no law", "no new text", "no field", "no name"],
)
def test_an_entry_that_can_not_be_read_is_an_error_that_names_it(tmp_path, old, new, says):
    path = tmp_path / "mutants.txt"
    path.write_text(ENTRY.replace(old, new))
    with pytest.raises(mutants.Broken, match=says):
        mutants.read(str(path))


def test_the_sources_are_not_touched(tmp_path):
    path = os.path.join(ROOT, *MUTANTS[0].edits[0][0].split("/"))
    with open(path, encoding="utf-8") as file:
        before = file.read()
    mutants.copy_sources(str(tmp_path))
    mutants.plant(MUTANTS[0], str(tmp_path))
    with open(path, encoding="utf-8") as file:
        assert file.read() == before


def test_mutants_have_names_of_their_own_and_tests_that_exist():
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 25
    for mutant in MUTANTS:
        for test in mutant.tests:
            file, function = re.match(r"(tests/\w+/test_\w+\.py)::(test_\w+)", test).groups()
            with open(os.path.join(ROOT, *file.split("/")), encoding="utf-8") as source:
                assert f"def {function}(" in source.read(), mutant.name


def test_every_mutant_was_caught():
    results = mutants.read_results()
    assert [mutant.name for mutant in MUTANTS] == list(results)
    assert all(record["caught"] for record in results.values())


def test_the_page_is_what_the_results_say():
    with open(mutants.PAGE, encoding="utf-8") as file:
        assert file.read() == mutants.page(mutants.read_results()), "run project/mutants.py page"


def test_a_mutant_that_nothing_caught_is_shown():
    record = {"date": "2026-11-22", "tensorflow": "2.15.1", "seconds": 4, "caught": None}
    assert mutants.page({MUTANTS[0].name: record}).endswith("| **nothing** |\n")
