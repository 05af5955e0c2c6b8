"""Choose what a merge runs: `python scripts/dev/turn.py` prints its environments, longest first, for tox.

The environments of tox.ini's label `deep` always run: TensorFlow 1.15, 2.2, 2.15 and 2.21. The labels `versions` and
`ci-beyond` have every TensorFlow but 2.17 and 2.19, and every Python. A third of their other environments runs: the
digest of the sources draws which, so that each change runs others. Each of the remaining environments differs from one
of these only by Python. They take turns, a twentieth at a time: first those that failed or never ran, then those that
ran longest ago, according to records/evidence.json. That file is committed, so a shallow clone and an unpacked source
distribution choose the same environments, and the turn moves on with each merge that updates it.
"""

import hashlib
import json
import os
import sys
from typing import Dict, List, Optional

import environments
import freeze
import reports

EVIDENCE = os.path.join(environments.ROOT, "records", "evidence.json")
ONE_OF_EACH_VERSION = ("versions", "ci-beyond")
TAKE_TURNS = ("", "v1")
MERGES = 20
"""After this many merges, each environment has run."""


def always() -> List[str]:
    """The environments that every merge runs."""
    return list(environments.labels()["deep"])


def one_of_each_version() -> List[str]:
    """One environment of each version, without those that every merge runs. A merge runs a third of them."""
    names_of_label = environments.labels()
    names = [env_name for label in ONE_OF_EACH_VERSION for env_name in names_of_label[label]]
    return [env_name for env_name in names if env_name not in always()]


def third(digest: str) -> List[str]:
    """The third of `one_of_each_version` that sources with this digest run."""
    drawn = sorted(one_of_each_version(), key=lambda name: hashlib.sha256((digest + name).encode()).hexdigest())
    return drawn[: -(-len(drawn) // 3)]


def others() -> List[str]:
    """The environments that take turns."""
    names_of_label = environments.labels()
    known = always() + one_of_each_version()
    return [env_name for label in TAKE_TURNS for env_name in names_of_label[label] if env_name not in known]


def last_pass(record: Optional[dict]) -> str:
    """When an environment ran, or "" if it did not pass then."""
    return record["date"] if record is not None and reports.is_pass(record) else ""


def turn(records: Dict[str, dict]) -> List[str]:
    """The environments whose turn it is, according to the records of this system."""
    waiting = sorted(others(), key=lambda env_name: (last_pass(records.get(env_name)), environments.parts(env_name)))
    return waiting[: -(-len(waiting) // MERGES)]


def longest_first(chosen: List[str], records: Dict[str, dict]) -> List[str]:
    """Sort the environments so that, running in parallel, no long one is left alone at the end.

    Those that run all tests come first: what was recorded of the others may have been more than they run now.
    """
    all_tests = environments.labels()["deep"]
    seconds = {env_name: records[env_name]["seconds"] if env_name in records else 0 for env_name in chosen}
    return sorted(chosen, key=lambda env_name: (env_name not in all_tests, -seconds[env_name]))


def main() -> int:
    with open(EVIDENCE, encoding="utf-8") as file:
        records = json.load(file).get("linux", {})
    now, drawn = turn(records), third(freeze.source_digest())
    print(f"Their turn, {len(now)} of {len(others())}:", file=sys.stderr)
    for env_name in now:
        print(f"    {env_name}, which passed {last_pass(records.get(env_name)) or 'never'}", file=sys.stderr)
    print(",".join(longest_first(always() + drawn + now, records)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
