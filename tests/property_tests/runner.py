"""Check random cases of one kind, and print a case that fails as a script."""

import collections
import pprint

import hypothesis

from property_tests import fed, fed_cases, model_cases, trained

SCRIPT = """\
import sys

sys.path[:0] = ["tests", "tests/support"]
from property_tests import {module}

{module}.check(
{case}
)"""

KINDS = {
    "optimizer": (fed_cases.fed_cases(("optimizer",)), fed, fed_cases.laws),
    "graph": (fed_cases.fed_cases(("conditional", "explicit")), fed, fed_cases.laws),
    "model": (model_cases.model_cases(), trained, model_cases.laws),
}
"""What can be checked: the cases, the module that checks them, and the laws that they are about."""


def run(kind, count, seed):
    """Check random cases.

    Args:
      kind: a name in `KINDS`.
      count: how many cases.
      seed: an int; the same one draws the same cases on one TensorFlow.

    Returns:
      A `collections.Counter` of the cases that hold, in all ("cases") and by law; and None, or if a case fails the
      error and a script with the smallest such case.
    """
    strategy, module, laws = KINDS[kind]
    counts, failed = collections.Counter(), [None]

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.given(strategy)
    def case_holds(case):
        try:
            module.check(case)
        except Exception:
            failed[:] = [case]  # Hypothesis ends with the smallest
            raise
        counts.update(laws(case))
        counts["cases"] += 1

    try:
        case_holds()
    except Exception as error:
        return counts, f"# {type(error).__name__}: {error}\n{script_of(module, failed[0])}"
    return counts, None


def script_of(module, case):
    """Return a script that checks one case."""
    shown = "\n".join("    " + line for line in pprint.pformat(case, width=112).splitlines())
    return SCRIPT.format(module=module.__name__.split(".")[-1], case=shown)
