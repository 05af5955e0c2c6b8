"""The page of rules is what its records and the table of rules say, and nearly all operations have one (law L21)."""

import importlib.util
import os

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
spec = importlib.util.spec_from_file_location("rows_page", os.path.join(ROOT, "project", "rows.py"))
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

pytestmark = [pytest.mark.law("L21")]
BAR = 99.0  # percent


def test_the_page_is_generated_from_the_records_and_the_rules():
    with open(script.PAGE, encoding="utf-8") as file:
        assert file.read() == script.page(script.records())


def test_nearly_all_operations_have_a_rule_on_each_version():
    kept = script.records()
    assert {version.split(".")[0] for version in kept} == {"1", "2"}
    for version, record in kept.items():
        assert script.share_of(list(record["networks"].values())) >= BAR, version


def test_a_row_counts_what_has_no_rule():
    network = {
        "operations": 300,
        "kinds": {"rows": 190, "reduces": 3, "behind": 4, "acts": 1, "meets": 2},
        "without": {"Fancy": 3},
    }
    text = script.page({"2.15.1": {"date": "2026-01-31", "networks": {"net": network}}})
    assert "| net | 2.15.1 | 300 | 200 | 190 | 0 | 7 | 1 | 2 | 98.50 % |" in text
    assert "Without a rule: `Fancy` (3)." in text
