"""project/pages/guarantees.md and the `law` marks of the tests agree. Reads source only, so it needs no TensorFlow."""

import ast
import os
import re

import pytest

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGE = os.path.join(os.path.dirname(HERE), "project", "pages", "guarantees.md")
HEADING = re.compile(r"(?m)^## (L\d+): .+?( \(planned\))?$")


def headings():
    """`{law: whether it is planned}`, as the page has them."""
    with open(PAGE, encoding="utf-8") as file:
        return {law: bool(planned) for law, planned in HEADING.findall(file.read())}


def is_law_mark(node):
    is_mark = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "law"
    return is_mark and ast.dump(node.func.value) == ast.dump(ast.parse("pytest.mark", mode="eval").body)


def marks_of(path):
    """The laws of each `pytest.mark.law(...)` in a file, whether a decorator, in `pytestmark` or in a parameter."""
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read(), path)
    return {ast.literal_eval(law) for node in ast.walk(tree) if is_law_mark(node) for law in node.args}


def marks():
    """`{law: names of the files that mark a test with it}`."""
    tests_of_law = {}
    for folder, _, names in os.walk(HERE):
        for name in sorted(names):
            if name.endswith(".py"):
                for law in marks_of(os.path.join(folder, name)):
                    tests_of_law.setdefault(law, []).append(name)
    return tests_of_law


LAWS, MARKS = headings(), marks()


def test_the_laws_are_numbered_without_gaps():
    assert list(LAWS) == [f"L{number}" for number in range(1, len(LAWS) + 1)]


@pytest.mark.parametrize("law", sorted(MARKS))
def test_a_marked_law_has_a_heading(law):
    assert law in LAWS, f"{law} is marked in {MARKS[law]} and has no heading in project/pages/guarantees.md"


@pytest.mark.parametrize("law", [law for law, is_planned in LAWS.items() if not is_planned])
def test_a_law_that_is_not_planned_has_a_test(law):
    assert law in MARKS, f"no test is marked with {law}, and its heading does not say that it is planned"


@pytest.mark.parametrize("law", [law for law, is_planned in LAWS.items() if is_planned])
def test_a_planned_law_has_no_test_yet(law):
    assert law not in MARKS, f"{law} has tests in {MARKS[law]}: take `(planned)` out of its heading"
