"""The known traps that scripts/dev/mutants.py plants: each fits the sources, and the page is what the results say."""

import os
import re
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "scripts", "dev"))

import mutants  # noqa: E402
from known_traps import TRAPS, Trap  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.turns]


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_a_trap_fits_the_sources(trap, tmp_path):
    mutants.copy_sources(str(tmp_path))
    before = {name: (tmp_path / installed(name)).read_text(encoding="utf-8") for name, _, _ in trap.edits}
    mutants.plant(trap, str(tmp_path))
    for name, text in before.items():
        changed = (tmp_path / installed(name)).read_text(encoding="utf-8")
        assert changed != text
        compile(changed, name, "exec")


def installed(name):
    return "accum/" + name if name.startswith("compat/") else name


@pytest.mark.parametrize("old", ["nowhere in the file", "return"], ids=["gone", "several"])
def test_a_text_that_does_not_occur_once_is_an_error_that_names_the_trap(tmp_path, old):
    mutants.copy_sources(str(tmp_path))
    trap = Trap("some_trap", "L1", "It is wrong.", [("accum/_engine/_ops.py", old, "pass")], [])
    with pytest.raises(mutants.Broken, match=r"some_trap: the text to replace occurs \d+ times in accum/_engine/_ops"):
        mutants.plant(trap, str(tmp_path))


def test_the_sources_are_not_touched(tmp_path):
    path = os.path.join(ROOT, *TRAPS[0].edits[0][0].split("/"))
    with open(path, encoding="utf-8") as file:
        before = file.read()
    mutants.copy_sources(str(tmp_path))
    mutants.plant(TRAPS[0], str(tmp_path))
    with open(path, encoding="utf-8") as file:
        assert file.read() == before


def test_traps_have_names_of_their_own_and_tests_that_exist():
    names = [trap.name for trap in TRAPS]
    assert len(set(names)) == len(names) >= 25
    for trap in TRAPS:
        for test in trap.tests:
            file, function = re.match(r"(tests/test_\w+\.py)::(test_\w+)", test).groups()
            with open(os.path.join(ROOT, *file.split("/")), encoding="utf-8") as source:
                assert f"def {function}(" in source.read(), trap.name


def test_every_trap_was_caught():
    results = mutants.read_results()
    assert [trap.name for trap in TRAPS] == list(results)
    assert all(record["caught"] for record in results.values())


def test_the_page_is_what_the_results_say():
    with open(mutants.PAGE, encoding="utf-8") as file:
        assert file.read() == mutants.page(mutants.read_results()), "run scripts/dev/mutants.py page"


def test_a_trap_that_nothing_caught_is_shown():
    record = {"date": "2026-11-22", "tensorflow": "2.15.1", "seconds": 4, "caught": None}
    assert mutants.page({TRAPS[0].name: record}).endswith("| **nothing** |\n")
