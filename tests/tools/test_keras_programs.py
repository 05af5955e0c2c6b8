"""The page of public Keras programs is what its records say."""

import importlib.util
import os

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
path = os.path.join(ROOT, "project", "keras_programs.py")
spec = importlib.util.spec_from_file_location("keras_programs", path)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

pytestmark = [pytest.mark.law("L21")]
RECORD = {
    "repository": "someone/something",
    "path": "examples/a.py",
    "commit": "0123456789",
    "accum": "abcdef0123, 2026-01-31",
    "split": {"off": 1e-7, "logs": 3e-7, "said": ["Slow. [accum: not-split]"]},
    "rounding": {"off": 2e-7, "logs": 0.0},
    "each": {"error": "No. [accum: train-step-order]"},
}


def is_exact(record):
    split, rounding = record["split"], record["rounding"]
    return max(split.get("off", 1), split.get("logs", 1)) <= max(1e-5, 5 * rounding["off"])


def test_the_page_is_generated_from_the_records():
    with open(script.PAGE, encoding="utf-8") as file:
        assert file.read() == script.page(script.records())


def test_every_record_is_exact_or_has_a_code():
    for name, by_version in script.records().items():
        for version, record in by_version.items():
            assert is_exact(record) or script.codes_of(record["split"]), f"{name} on {version}: {record['split']}"


NOT_SPLIT, EAGER = "[accum: not-split]", "[accum: python-once]"  # exact, but slower; what Python might do


def test_exact_programs_warn_of_nothing_that_may_differ():
    for name, by_version in script.records().items():
        for version, record in by_version.items():
            said = [text for text in record["split"].get("said", ()) if not text.endswith((NOT_SPLIT, EAGER))]
            assert not (said and is_exact(record)), f"{name} on {version}: {said}"


def test_a_row_shows_what_was_said():
    page = script.page({"vae": {"2.15.1": RECORD}})
    row = "| someone/something, a.py | `0123456789` | 2.15.1 | 3e-07 | 2e-07 | `train-step-order` | `not-split` | abc"
    assert row in page


@pytest.mark.parametrize("source, names", [("import a\nx = 3\ny = f()\nz = f()\nclass C: pass\nf()", "x y")])
def test_only_definitions_constants_and_what_is_named_is_run(source, names):
    tree = script.statements(source, ["y"])
    assert [type(node).__name__ for node in tree.body] == ["Import", "Assign", "Assign", "ClassDef"]
