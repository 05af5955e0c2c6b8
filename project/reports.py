"""Read JUnit reports. `python project/reports.py` lists the failures in the environments that tox ran.

Environments that run in parallel print thousands of lines. This prints only which tests failed, and why.
"""

import argparse
import os
import sys
import xml.etree.ElementTree as ElementTree

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

LINES = 40  # the last lines of a failure, which hold the error of a traceback


def counts(path, modules=None):
    """{"passed", "skipped", "xfailed", "failed", "seconds"} of a JUnit file, all 0 if it can't be read.

    Args:
      path: the file.
      modules: names of the test modules that count, such as ["test_fit"]; None: all.
    """
    counted = {"passed": 0, "skipped": 0, "xfailed": 0, "failed": 0, "seconds": 0}
    try:
        root = ElementTree.parse(path).getroot()
    except ElementTree.ParseError:
        return counted
    cases = [case for case in root.iter("testcase") if modules is None or _module(case) in modules]
    for case in cases:
        counted[_outcome(case)] += 1
    timed = cases
    if modules is None:  # the suite counts errors outside of tests, too, and the time between them
        timed = list(root.iter("testsuite"))
        said = sum(int(suite.get(name, 0)) for suite in timed for name in ("failures", "errors"))
        counted["failed"] = max(counted["failed"], said)
    counted["seconds"] = round(sum(float(one.get("time", 0)) for one in timed))
    return counted


def _module(case):
    return case.get("classname", "").split(".")[-1]


def _outcome(case):
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    return "xfailed" if skipped.get("type") == "pytest.xfail" else "skipped"


def is_pass(counted):
    """Whether tests passed and none failed."""
    return counted["passed"] > 0 and counted["failed"] == 0


def failures(path):
    """[(test, what it said)] of a JUnit file, in its order."""
    try:
        root = ElementTree.parse(path).getroot()
    except ElementTree.ParseError:
        return [("the whole suite", "its report can't be read")]
    failed = []
    for case in root.iter("testcase"):
        for kind in ("failure", "error"):
            for said in case.findall(kind):
                test = "::".join(part for part in (case.get("classname"), case.get("name")) if part)
                failed.append((test, said.text or said.get("message") or "no message"))
    return failed


def main(argv=None):
    parser = argparse.ArgumentParser(
        description="List what failed in the environments that tox ran; exit with 1 if any did."
    )
    parser.add_argument("--junit", default=os.path.join(ROOT, ".tox", "junit"), help="the folder of reports")
    folder = parser.parse_args(argv).junit
    if not os.path.isdir(folder):
        parser.error(f"no folder {folder}")
    names = sorted(os.listdir(folder))
    failures_of = [(os.path.splitext(name)[0], failures(os.path.join(folder, name))) for name in names]
    for env_name, tests in failures_of:
        for test, said in tests:
            print("{}: {}\n    {}".format(env_name, test, "\n    ".join(said.strip().splitlines()[-LINES:])))
    print(f"{len(names)} reports, {sum(len(tests) for _, tests in failures_of)} tests failed")
    return any(tests for _, tests in failures_of)


if __name__ == "__main__":
    sys.exit(main())
