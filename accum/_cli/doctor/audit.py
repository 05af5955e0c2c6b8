"""Compare what is installed with a database of known advisories. Needs neither a network nor TensorFlow.

`fixes` reads the table of TensorFlow's own flaws that comes with accum, and `osv` a database that the user passes.
Neither knows anything newer than its date.
"""

import datetime
import textwrap
from typing import Any, Dict, List, NamedTuple, Optional

from accum._cli.doctor import installed

NEVER, HERE, NOT_HERE, UNKNOWN, UNNAMED = "never", "available", "unavailable", "none known", "none named"
"""The outlooks: no fix on this line; a fix to install; a fix that this Python can't have; no fix at all so far; no fix
on this line in a record that does not say whether the line has the flaw.
"""


LAST_1_15 = "1.15.5"
"""The last patch of the package `tensorflow`. The lock has 1.15.0, the only one of `tensorflow-cpu`."""


class Advisory(NamedTuple):
    """An advisory that concerns an installed package.

    `fixed_by` is the first version without the flaw, None if unknown. It is of another line if `outlook` is "never" or
    "none named".
    """

    package: str
    version: str
    id: str
    aliases: List[str]
    severity: Optional[str]
    outlook: str
    fixed_by: Optional[str]
    says: str


def find(record, packages: Dict[str, str], locked: Dict[str, str], locked_on: str) -> List[Advisory]:
    """The advisories of a record (see `osv.read` and `fixes.read`) that concern `packages`, {name: version}.

    `locked` is the lock of this line and Python: what it holds is the newest that could be installed on `locked_on`.
    """
    found = []
    locked = dict(locked)
    if installed.line(locked.get("tensorflow", "")) == "1.15":
        locked["tensorflow"] = LAST_1_15
    for name in sorted(set(packages) & set(record["packages"])):
        for entry in record["packages"][name]:
            hit = _range(entry["ranges"], packages[name])
            if hit is not None:
                outlook, fix = _outlook(name, packages[name], entry["ranges"], hit, locked.get(name))
                if outlook == NEVER and "limits" in record:
                    outlook = UNNAMED
                says = _says(name, packages[name], outlook, fix, locked.get(name), locked_on)
                if "part" in entry:
                    says += f" (in the {entry['part']} that is built in)"
                about = {field: entry[field] for field in ("id", "aliases", "severity")}
                found.append(Advisory(name, packages[name], outlook=outlook, fixed_by=fix, says=says, **about))
    return found


def key(version):
    """A version as numbers that compare: 2.10 is 2.10.0."""
    numbers = installed.release(version)
    return tuple(numbers) + (0,) * (6 - len(numbers))


def _range(ranges, version):
    """The range of an advisory that a version is in, or None."""
    for first, fixed, last in ranges:
        is_before_end = key(version) < key(fixed) if fixed else last is None or key(version) <= key(last)
        if key(first) <= key(version) and is_before_end:
            return first, fixed, last
    return None


def _outlook(name, version, ranges, hit, newest):
    fix = hit[1]
    if fix is None:
        later = [part[1] for part in ranges if part[1] and key(part[1]) > key(version)]
        if not later:
            return UNKNOWN, None
        fix = min(later, key=key)
    has_lines = name in ("tensorflow", "tf-keras") or (name == "keras" and installed.release(version) < (3,))
    if has_lines and installed.line(fix) != installed.line(version):
        return NEVER, fix
    return (NOT_HERE if newest and key(newest) < key(fix) else HERE), fix


def _says(name, version, outlook, fix, newest, locked_on):
    if outlook == UNKNOWN:
        return "no fix is known"
    if outlook == UNNAMED:
        return f"no fix in {installed.line(version)}, if it has this flaw; first fixed in {fix}"
    if outlook == NEVER:
        return f"never fixed in {installed.line(version)}; first fixed in {fix}"
    if outlook == NOT_HERE:
        return f"fixed in {fix}, but {newest} was the newest for this TensorFlow and Python on {locked_on}"
    only = " of the package tensorflow; tensorflow-cpu has no such patch"
    return f"fixed in {fix}" + (only if name == "tensorflow" and installed.line(fix) == "1.15" else "")


def age(record, today=None) -> int:
    """How many days old the newest change to an advisory is."""
    date = datetime.datetime.strptime(record["date"], "%Y-%m-%d").date()
    return ((today or datetime.date.today()) - date).days


def report(record, advisories: List[Advisory], packages: Dict[str, str]) -> Dict[str, Any]:
    """The audit, as `--json` prints it."""
    return {
        "snapshot": {name: record[name] for name in ("date", "source", "limits") if name in record},
        "days_old": age(record),
        "looked_up": dict(packages),
        "advisories": [dict(advisory._asdict()) for advisory in advisories],
    }


def text(report: Dict[str, Any]) -> str:
    """The audit as text, one line for each advisory."""
    snapshot, found = report["snapshot"], report["advisories"]
    lines = [
        f"Advisories as of {snapshot['date']}, {report['days_old']} days ago. Nothing newer is known here.",
        f"Source: {snapshot['source']}.",
    ]
    lines += textwrap.wrap(snapshot.get("limits", ""), 100)
    for name, version in sorted(report["looked_up"].items(), key=lambda pair: (pair[0] != "tensorflow", pair[0])):
        of_package = [advisory for advisory in found if advisory["package"] == name]
        if of_package:
            lines += ["", f"{name} {version}: {_counted(len(of_package))}, {_summary(of_package)}"]
            lines += [
                f"  {advisory['id']:<20}{advisory['severity'] or 'unrated':<10}{advisory['says']}"
                for advisory in of_package
            ]
    clean = len(report["looked_up"]) - len({advisory["package"] for advisory in found})
    of_all = f"{clean} of {len(report['looked_up'])} packages looked up have none in this database"
    lines += ["", f"{_counted(len(found))}; {of_all}."]
    return "\n".join(lines)


def _counted(number):
    return "1 advisory" if number == 1 else f"{number} advisories"


def _summary(advisories):
    outlooks = [advisory["outlook"] for advisory in advisories]
    words = {HERE: "to be fixed by an upgrade", NOT_HERE: "out of reach on this Python", NEVER: "never fixed here"}
    words.update({UNKNOWN: "without a fix", UNNAMED: "without a named fix on this line"})
    return ", ".join(f"{outlooks.count(outlook)} {words[outlook]}" for outlook in words if outlook in outlooks)
