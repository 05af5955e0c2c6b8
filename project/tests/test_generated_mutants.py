"""Mutants that project/generated_mutants.py makes, and the page, which shows their record and that of long runs."""

import os
import sys

import generated_mutants
import long_runs
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

SOURCE = '''
LIMIT = 3  # what runs at import is left alone


def function(first: int = 1, *rest):
    """A docstring."""
    with tf.name_scope("name"), tf.control_dependencies(rest):
        first += 2
    if first > 3 and rest:
        rest.append(tf.equal(first, LIMIT))
    return call(first, rest) if not rest else first ** 2
'''
MUTANTS = {
    "tf.control_dependencies(rest)": '__import__("contextlib").nullcontext()',
    "first += 2": "pass",
    "2": "3",
    "first > 3 and rest": "(not (first > 3 and rest))",
    " > ": " >= ",
    " and ": " or ",
    "3": "4",
    "rest.append(tf.equal(first, LIMIT))": "pass",
    "tf.equal": "tf.not_equal",
    "first, rest": "rest, first",
    "not rest": "bool(rest)",
}
needs_spans = pytest.mark.skipif(sys.version_info < (3, 8), reason="the ends of nodes are known since Python 3.8")


@needs_spans
def test_each_change_is_one_that_a_person_could_make():
    mutants = generated_mutants.Source("path.py", SOURCE).mutants
    changes = {SOURCE[mutant.start : mutant.end]: mutant.text for mutant in mutants}
    assert changes == MUTANTS
    for mutant in mutants:
        changed = SOURCE[: mutant.start] + mutant.text + SOURCE[mutant.end :]
        compile(changed, "path.py", "exec")
        assert changed.count("\n") == SOURCE.count("\n")  # no other line moves


@needs_spans
def test_a_mutant_keeps_its_name_where_other_functions_change():
    one = generated_mutants.Source("path.py", SOURCE).mutants
    other = generated_mutants.Source("path.py", "def before(a):\n    return a == 1\n" + SOURCE).mutants
    names = {generated_mutants.key_of(mutant, one) for mutant in one}
    assert len(names) == len(one)
    assert names < {generated_mutants.key_of(mutant, other) for mutant in other}


@needs_spans
def test_a_seed_draws_from_every_part_of_the_sources_in_turns():
    drawn = [key for key, _ in generated_mutants.drawn(0)]
    for index, part in enumerate(generated_mutants.PARTS):
        assert drawn[index].startswith(part + "/")
    assert drawn == [key for key, _ in generated_mutants.drawn(0)]
    assert drawn != [key for key, _ in generated_mutants.drawn(1)]


@needs_spans
def test_a_record_is_dropped_with_its_mutant(monkeypatch, tmp_path):
    drawn = generated_mutants.drawn(0)
    (kept, mutant), (changed, _) = drawn[:2]
    record = dict(zip(("before", "after"), generated_mutants.change_of(mutant)))
    monkeypatch.setattr(generated_mutants, "RECORD", str(tmp_path / "record.json"))
    generated_mutants.write_record({kept: record, changed: record, "accum/gone.py function constant 0": record})
    generated_mutants.drop_what_is_gone(drawn)
    assert generated_mutants.read_record() == {kept: record}


def test_a_map_can_be_made_of_two():
    one = {"tests": ["a", "b"], "seconds": [1.0, 2.0], "lines": {"x.py": {"3": [0, 1]}}}
    other = {"tests": ["c"], "seconds": [3.0], "lines": {"x.py": {"3": [0], "4": [0]}, "y.py": {"1": [0]}}}
    assert generated_mutants.together(one, other) == {
        "tests": ["a", "b", "c"],
        "seconds": [1.0, 2.0, 3.0],
        "lines": {"x.py": {"3": [0, 1, 2], "4": [2]}, "y.py": {"1": [2]}},
    }


@pytest.mark.parametrize("script", [generated_mutants, long_runs], ids=["mutants", "long runs"])
def test_the_page_shows_what_was_recorded(script):
    with open(script.PAGE, encoding="utf-8") as file:
        text = file.read()
    shown = text[text.index(script.BEGIN) + len(script.BEGIN) : text.index(script.END)]
    assert shown == script.section(script.read_record()), "run the script's `page`"
