"""What a JUnit report says."""

import xml.etree.ElementTree as ElementTree


def counts(path):
    """{"passed", "skipped", "xfailed", "failed", "seconds"} of a JUnit file; one that can't be read has failed."""
    try:
        root = ElementTree.parse(path).getroot()
    except ElementTree.ParseError:
        return {"passed": 0, "skipped": 0, "xfailed": 0, "failed": 0, "seconds": 0}
    suites = list(root.iter("testsuite"))
    found = {"passed": 0, "skipped": 0, "xfailed": 0, "failed": 0}
    for case in root.iter("testcase"):
        found[_outcome(case)] += 1
    said = sum(int(suite.get(name, 0)) for suite in suites for name in ("failures", "errors"))
    found["failed"] = max(found["failed"], said)
    found["seconds"] = round(sum(float(suite.get("time", 0)) for suite in suites))
    return found


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
