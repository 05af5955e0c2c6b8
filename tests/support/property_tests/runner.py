"""Check random cases of one kind, and print a case that fails as a script."""

import collections
import pprint
from unittest import mock

import hypothesis
from hypothesis.internal.conjecture import engine
from versions import HAS_KERAS_API

from property_tests import features, fed, fed_cases, static_cases, static_trained

SCRIPT = """\
import sys

sys.path.insert(0, "tests/support")
from property_tests import {module}
from replicas import make_cpus

make_cpus()
{module}.check(
{case}
)"""


def _of_static(case):
    """Return what a case counts for in which a network of a static graph is trained."""
    of_case = static_cases.features_of(case)
    how = {"in a Session"} | ({"on replicas"} if case["strategy"] == "mirrored" else set())
    return static_cases.laws(case) | how | of_case | set(features.pairs(of_case))


KINDS = {
    "optimizer": (fed_cases.fed_cases(("optimizer",)), fed, fed_cases.laws),
    "graph": (fed_cases.fed_cases(("conditional", "explicit")), fed, fed_cases.laws),
    "static": (static_cases.static_cases(), static_trained, _of_static),
}
"""What can be checked: the cases, the module that checks them, and what a case counts for, such as its laws."""

if HAS_KERAS_API:
    from property_tests import model_cases, steps, trained

    def _of_model(case):
        """Return what a case counts for in which a Keras model is trained."""
        of_case = features.features_of(case)
        how = {"on replicas"} if case["strategy"] == "mirrored" else set()
        how |= {"in a tf.function" if case["is_traced"] else "eagerly"}
        return model_cases.laws(case) | how | of_case | set(features.pairs(of_case))

    KINDS["model"] = model_cases.model_cases(), trained, _of_model
    KINDS["step"] = steps.step_cases(), steps, steps.laws


def run(kind, count, seed, shrinks=True):
    """Check random cases.

    Hypothesis would follow each case by mutations of it, which are too much alike to count.

    Args:
      kind: a name in `KINDS`.
      count: how many cases.
      seed: an int; the same one draws the same cases on one TensorFlow.
      shrinks: whether to look for the smallest case that fails, which takes minutes.

    Returns:
      A `collections.Counter` of the cases that hold, in all ("cases"), by law, and of models by feature and by pair of
      features; and None, or if a case fails the error and a script with it.
    """
    strategy, module, counted_for = KINDS[kind]
    counts, failed = collections.Counter(), [None]

    phases = [hypothesis.Phase.generate] + ([hypothesis.Phase.shrink] if shrinks else [])

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        phases=phases,
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
        counts.update(counted_for(case))
        counts["cases"] += 1

    with mock.patch.object(engine.ConjectureRunner, "generate_mutations_from", lambda self, data: None):
        try:
            case_holds()
        except Exception as error:
            return counts, f"# {type(error).__name__}: {error}\n{script_of(module, failed[0])}"
    return counts, None


def script_of(module, case):
    """Return a script that checks one case."""
    shown = "\n".join("    " + line for line in pprint.pformat(case, width=112).splitlines())
    return SCRIPT.format(module=module.__name__.split(".")[-1], case=shown)
