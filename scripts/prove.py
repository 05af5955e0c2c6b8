"""Prove the laws on thousands of random cases: `python scripts/prove.py --cases 1000 --seed 1`.

Needs an environment with TensorFlow and Hypothesis. A failure is shrunk and printed as a script that reproduces it.
"""

import argparse
import collections
import json
import os
import pprint
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# In place of this script's folder, where numbers.py would hide Python's own.
sys.path[:1] = [os.path.join(ROOT, folder) for folder in (os.path.join("tests", "support"), "tests", "")]
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hypothesis  # noqa: E402
import tensorflow as tf  # noqa: E402
from prover import fed, fed_cases, model_cases, trained  # noqa: E402
from replicas import look_often_for_the_end_of_replicas, make_cpus  # noqa: E402

tf.get_logger().setLevel("ERROR")

SCRIPT = """\
import sys

sys.path[:0] = ["tests", "tests/support"]
from prover import {module}

{module}.check(
{case}
)"""


KINDS = {
    "optimizer": (fed_cases.fed_cases(("optimizer",)), fed, fed_cases.laws),
    "graph": (fed_cases.fed_cases(("conditional", "explicit")), fed, fed_cases.laws),
    "model": (model_cases.model_cases(), trained, model_cases.laws),
}
"""What can be proved: the cases, the module that checks them, and the laws that they are about."""


def prove(strategy, module, laws, count, seed):
    """Check `count` cases. Returns {law: number of cases}, and the script of the first failure or None."""
    found, failed = collections.Counter(), []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
    )
    @hypothesis.given(strategy)
    def case_holds(case):
        failed[:] = [case]  # Hypothesis ends with the smallest
        module.check(case)
        failed[:] = []
        found.update(laws(case))
        found["cases"] += 1

    try:
        case_holds()
    except Exception as error:
        name = module.__name__.split(".")[-1]
        shown = "\n".join("    " + line for line in pprint.pformat(failed[0], width=112).splitlines())
        return found, f"# {type(error).__name__}: {error}\n" + SCRIPT.format(module=name, case=shown)
    return found, None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--of", nargs="*", choices=sorted(KINDS), default=sorted(KINDS))
    parser.add_argument("--json", help="a file to add the counts to")
    arguments = parser.parse_args()
    make_cpus()
    look_often_for_the_end_of_replicas()
    failures = []
    for kind in arguments.of:
        start = time.time()
        strategy, module, laws = KINDS[kind]
        found, failure = prove(strategy, module, laws, arguments.cases, arguments.seed)
        seconds = time.time() - start
        counts = json.dumps(found, sort_keys=True)
        print(f"TensorFlow {tf.__version__}, {kind}: {counts} in {seconds:.0f} s", flush=True)
        if failure:
            failures.append(failure)
            print(failure, flush=True)
    return len(failures) > 0


if __name__ == "__main__":
    sys.exit(main())
