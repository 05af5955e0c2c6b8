"""The scorecard's page is what its data give, and each of its cases differs from plain accumulation in one respect."""

import importlib.util
import json
import os

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
spec = importlib.util.spec_from_file_location("scorecard", os.path.join(ROOT, "project", "scorecard.py"))
scorecard = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scorecard)

from property_tests import cycles  # noqa: E402
from property_tests.peers import cases, judge  # noqa: E402

pytestmark = pytest.mark.slow


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def counts(**kwargs):
    return dict(
        dict.fromkeys(scorecard.OUTCOMES, 0), **{name.replace("_", " "): count for name, count in kwargs.items()}
    )


def test_the_page_is_what_the_data_give():
    assert read(scorecard.PAGE) == scorecard.page(json.loads(read(scorecard.DATA)))


def test_every_adapter_is_on_the_page():
    assert {result["peer"] for result in json.loads(read(scorecard.DATA))} == set(scorecard.peers.ADAPTERS)


def test_every_case_of_ours_passes():
    for result in json.loads(read(scorecard.DATA)):
        for law, kinds in result["laws"].items():
            for kind, entry in kinds.items():
                if result["peer"].startswith("accum"):
                    assert {"inexact", "raises", "not offered", "as L1"}.isdisjoint(entry), (law, kind)


@pytest.mark.parametrize(
    "outcomes, largest, text, is_clear",
    [
        (counts(passed=12), [1e-7], "12 / 12", True),
        (counts(passed=8, inexact=4), [0.31], "8 / 12, off by 0.31", False),
        (counts(passed=8, inexact=4), ["not finite", 0.3], "8 / 12, NaN", False),
        (counts(raises=12), [], "0 / 12, raises", False),
        (counts(inexact=10, raises=2), [0.3], "0 / 12, off by 0.3, 2 raise", False),
        (counts(not_offered=12), [], "not offered", False),
        (counts(not_offered=12), [0.3], "not offered (off by 0.3)", False),
        (counts(), [], "–", True),
    ],
)
def test_what_a_cell_says(outcomes, largest, text, is_clear):
    assert scorecard._said(outcomes, largest) == (text, is_clear)


def test_a_cell_without_a_note_is_refused():
    result = {"peer": "keras3", "laws": {"L1": {"": {"inexact": 1, "largest": 0.1}}}}
    with pytest.raises(ValueError, match="notes.py says nothing"):
        scorecard._cell(result, "L1", None, [])


@pytest.mark.parametrize("law", sorted(cases.LAWS))
def test_cases_of_a_law_are_enough_and_always_the_same(law):
    of_law = [case for case in cases.cases() if case["law"] == law]
    assert len(of_law) >= 15
    assert repr(of_law) == repr([case for case in cases.cases() if case["law"] == law])  # NaN equals nothing


class Ours:
    """The mean gradient with plain gradient descent, in NumPy; the mistake is one that peers have made."""

    optimizers, arguments, not_offered, cannot_occur = ("sgd",), (), {}, ()

    def __init__(self, case, initial, mistake=0.0):
        self._case, self._values, self._held, self._mistake = case, list(initial), [], mistake

    @classmethod
    def start(cls, case, initial):
        return cls(case, initial)

    plain = start

    def apply(self, grads):
        self._values = [value - cases.RATE * (1 + self._mistake) * grad for value, grad in zip(self._values, grads)]

    def take(self, grads, weight):
        self._held.append(grads)
        if len(self._held) == self._case["accum_steps"]:
            self.apply([sum(grads) / len(grads) for grads in zip(*self._held)])
            self._held = []

    def weights(self):
        return list(self._values)

    def slots(self):
        return []

    def close(self):
        pass


class Wrong(Ours):
    @classmethod
    def start(cls, case, initial):
        return cls(case, initial, 0.01)


def case_of(law, optimizer="sgd"):
    return next(case for case in cases.cases() if case["law"] == law and case["optimizer"] == optimizer)


def test_the_judge_passes_what_is_right_and_measures_what_is_not():
    assert judge.judge(Ours, case_of("L1"))["outcome"] == "passed"
    verdict = judge.judge(Wrong, case_of("L1"))
    assert verdict["outcome"] == "inexact" and 1e-4 < verdict["deviation"] < 1e-2


def test_the_judge_leaves_out_what_follows_from_the_first_row():
    assert judge.judge(Wrong, case_of("L4"))["outcome"] == "as L1"
    assert judge.judge(Ours, case_of("L4"))["outcome"] == "inexact"


def test_the_judge_tells_errors_from_what_is_not_there():
    assert judge.judge(Ours, case_of("L6"))["error"].startswith("AttributeError")
    assert judge.judge(Ours, case_of("L1", "adam"))["outcome"] == "absent"
    refusing = type("Refusing", (Ours,), {"not_offered": {"L6": False}})
    assert judge.judge(refusing, case_of("L6"))["outcome"] == "not offered"


def test_cases_of_a_last_cycle_have_four_steps_where_it_is_flushed_and_two_where_it_is_dropped():
    for case in (case for case in cases.cases() if case["law"] == "L6"):
        steps = cycles.steps_of(case, cases.micro_batches_of(case))
        assert sum(step is not None for step in steps) == {"flush": 4, "drop": 2}[case["kind"]]
