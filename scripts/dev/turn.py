"""Choose what a merge runs: `python scripts/dev/turn.py` prints its cells, longest first, for `tox run-parallel -e`.

The cells of tox.ini's labels `lines` and `ci-beyond` always run: every TensorFlow line and every Python. Each of the
others differs from one of them only by Python. They take turns, a twentieth at a time: first those that failed or never
ran, then those that ran longest ago, according to records/evidence.json. That file is committed, so a shallow clone and
an unpacked source distribution choose the same cells, and the turn moves on with each merge that updates it.

Of the tests marked `turns`, the oldest and the newest line of Keras 2 run a half each, and the other half at the next
merge. The newest line of all, with Keras 3, runs what the oldest does. `python scripts/dev/turn.py half` prints which
half that is now, "odd" or "even". `python scripts/dev/turn.py check` exits with 1 if the reports of both lines of Keras
2 do not have the same tests in turns: of those that only one of them has, half would run nowhere.
"""

import json
import os
import sys
import xml.etree.ElementTree as ElementTree
from typing import Dict, List, Optional

import cells
import reports

EVIDENCE = os.path.join(cells.ROOT, "records", "evidence.json")
ALWAYS = ("lines", "ci-beyond")
TAKE_TURNS = ("", "v1")
MERGES = 20
"""After this many merges, each cell has run."""
HALVES = ("py36-tf2.2", "py311-tf2.15")
"""The cells that run half of the tests that take turns: the oldest and the newest line of Keras 2."""


def always() -> List[str]:
    """The cells that every merge runs."""
    known = cells.labels()
    return [cell for label in ALWAYS for cell in known[label]]


def others() -> List[str]:
    """The cells that take turns."""
    known = cells.labels()
    return [cell for label in TAKE_TURNS for cell in known[label] if cell not in always()]


def last_pass(record: Optional[dict]) -> str:
    """When a cell ran, or "" if it did not pass then."""
    return record["date"] if record is not None and reports.is_pass(record) else ""


def turn(records: Dict[str, dict]) -> List[str]:
    """The cells whose turn it is, according to the records of this system."""
    waiting = sorted(others(), key=lambda cell: (last_pass(records.get(cell)), cells.parts(cell)))
    return waiting[: -(-len(waiting) // MERGES)]


def longest_first(chosen: List[str], records: Dict[str, dict]) -> List[str]:
    """Sort the cells so that, running in parallel, no long one is left alone at the end.

    Those that run all tests come first: what was recorded of the others may have been more than they run now.
    """
    all_tests = cells.labels()["deep"]
    seconds = {cell: records[cell]["seconds"] if cell in records else 0 for cell in chosen}
    return sorted(chosen, key=lambda cell: (cell not in all_tests, -seconds[cell]))


def half(records: Dict[str, dict]) -> str:
    """Which half of the tests in turns the first of HALVES runs now."""
    ran = records.get(HALVES[0], {}).get("tests") or ""
    return "even" if "odd" in ran else "odd"


def unlike(folder: str) -> List[str]:
    """The files whose tests in turns are not the same in the reports of HALVES."""
    said = []
    for cell in HALVES:
        report = ElementTree.parse(os.path.join(folder, cell + ".xml"))
        (found,) = [each.get("value") for each in report.iter("property") if each.get("name") == "turns"]
        said.append(json.loads(found or "{}"))
    return sorted(file for file in set(said[0]) | set(said[1]) if said[0].get(file) != said[1].get(file))


def main(argv: List[str]) -> int:
    if argv == ["check"]:
        found = unlike(os.path.join(cells.ROOT, ".tox", "junit"))
        for file in found:
            print(f"{file}: which of its tests take turns differs between {' and '.join(HALVES)}. Mark `every_landing`")
        return len(found) > 0
    with open(EVIDENCE, encoding="utf-8") as file:
        records = json.load(file).get("linux", {})
    if argv == ["half"]:
        print(half(records))
        return 0
    now = turn(records)
    print(f"Their turn, {len(now)} of {len(others())}:", file=sys.stderr)
    for cell in now:
        print(f"    {cell}, which passed {last_pass(records.get(cell)) or 'never'}", file=sys.stderr)
    print(",".join(longest_first(always() + now, records)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
