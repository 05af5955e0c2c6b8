"""Choose what a merge runs: `python scripts/dev/turn.py` prints its cells, longest first, for `tox run-parallel -e`.

The cells of tox.ini's labels `lines` and `ci-beyond` always run: every TensorFlow line and every Python. Each of the
others differs from one of them only by Python. They take turns, a twentieth at a time: first those that failed or never
ran, then those that ran longest ago, according to records/evidence.json. That file is committed, so a shallow clone and
an unpacked source distribution choose the same cells, and the turn moves on with each merge that updates it.
"""

import json
import os
import sys
from typing import Dict, List, Optional

import cells
import reports

EVIDENCE = os.path.join(cells.ROOT, "records", "evidence.json")
ALWAYS = ("lines", "ci-beyond")
TAKE_TURNS = ("", "v1")
MERGES = 20
"""After this many merges, each cell has run."""


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


def main() -> int:
    with open(EVIDENCE, encoding="utf-8") as file:
        records = json.load(file).get("linux", {})
    now = turn(records)
    print(f"Their turn, {len(now)} of {len(others())}:", file=sys.stderr)
    for cell in now:
        print(f"    {cell}, which passed {last_pass(records.get(cell)) or 'never'}", file=sys.stderr)
    print(",".join(longest_first(always() + now, records)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
