"""Compare what is installed with a database of known advisories. Needs neither a network nor TensorFlow.

`fixes` reads the table of TensorFlow's own flaws that comes with accum, and `osv` a database that the user passes.
Neither knows anything newer than its date.
"""

import datetime
import textwrap
from typing import Any, Dict, List, NamedTuple, Optional

from accum._cli.doctor import installed

NEVER, HERE, NOT_HERE, UNKNOWN, UNNAMED = "never", "available", "unavailable", "none known", "none named"
"""The outlooks: no fix in this minor version; a fix to install; a fix that this Python can't have; no fix at all so
far; no fix in this minor version, in a record that does not say whether it has the flaw.
"""


class Advisory(NamedTuple):
    """An advisory that concerns an installed package.

    `fixed_by` is the first version without the flaw, None if unknown. It is of another minor version if `outlook` is
    "never" or "none named". `part` is the library that has the flaw, if it is one that is built into the package.
    """

    package: str
    version: str
    id: str
    aliases: List[str]
    severity: Optional[str]
    outlook: str
    fixed_by: Optional[str]
    says: str
    part: Optional[str] = None


def find(record, packages: Dict[str, str], locked: Dict[str, str], locked_on: str) -> List[Advisory]:
    """The advisories of a record (see `osv.read` and `fixes.read`) that concern `packages`, {name: version}.

    `locked` is the lock of this TensorFlow and Python: what it holds is the newest that could be installed on
    `locked_on`.
    """
    advisories = []
    for name in sorted(set(packages) & set(record["packages"])):
        for entry in record["packages"][name]:
            hit = _range(entry["ranges"], packages[name])
            if hit is not None:
                outlook, fix = _outlook(name, packages[name], entry["ranges"], hit, locked.get(name))
                if outlook == NEVER and "limits" in record:
                    outlook = UNNAMED
                says = _says(name, packages[name], outlook, fix, locked.get(name), locked_on)
                says += _where(entry.get("part"))
                about = {field: entry.get(field) for field in ("id", "aliases", "severity", "part")}
                advisories.append(Advisory(name, packages[name], outlook=outlook, fixed_by=fix, says=says, **about))
    return advisories


def _range(ranges, version):
    """The range of an advisory that a version is in, or None."""
    for first, fixed, last in ranges:
        ours, start = installed.key(version), installed.key(first)
        is_before_end = ours < installed.key(fixed) if fixed else last is None or ours <= installed.key(last)
        if start <= ours and is_before_end:
            return first, fixed, last
    return None


def _outlook(name, version, ranges, hit, newest):
    fix = hit[1]
    if fix is None:
        later = [part[1] for part in ranges if part[1] and installed.key(part[1]) > installed.key(version)]
        if not later:
            return UNKNOWN, None
        fix = min(later, key=installed.key)
    has_patches = name in ("tensorflow", "tf-keras") or (name == "keras" and installed.release(version) < (3,))
    if has_patches and installed.minor(fix) != installed.minor(version):
        return NEVER, fix
    return (NOT_HERE if newest and installed.key(newest) < installed.key(fix) else HERE), fix


def _says(name, version, outlook, fix, newest, locked_on):
    if outlook == UNKNOWN:
        return "no fix is known"
    if outlook == UNNAMED:
        return f"no fix in {installed.minor(version)}, if it has this flaw; first fixed in {fix}"
    if outlook == NEVER:
        return f"never fixed in {installed.minor(version)}; first fixed in {fix}"
    if outlook == NOT_HERE:
        return f"fixed in {fix}, but {newest} was the newest for this TensorFlow and Python on {locked_on}"
    only = " of the package tensorflow; tensorflow-cpu has no such patch"
    return f"fixed in {fix}" + (only if name == "tensorflow" and installed.minor(fix) == "1.15" else "")


def _where(part):
    return f" (in the {part} that is built in)" if part else ""


def age(record, today=None) -> int:
    """How many days old the newest change to an advisory is."""
    date = datetime.datetime.strptime(record["date"], "%Y-%m-%d").date()
    return ((today or datetime.date.today()) - date).days


def report(record, advisories: List[Advisory], packages: Dict[str, str]) -> Dict[str, Any]:
    """The audit, as `--json` prints it. Without an accepted list, nothing is accepted."""
    return {
        "snapshot": {name: record[name] for name in ("date", "source", "limits") if name in record},
        "days_old": age(record),
        "looked_up": dict(packages),
        "advisories": [dict(advisory._asdict(), accepted=None) for advisory in advisories],
    }


def is_open(advisory: Dict[str, Any]) -> bool:
    """Whether nobody has accepted an advisory of a report, or only until a day that has passed."""
    return advisory["accepted"] is None or advisory["accepted"]["expired"]


def text(report: Dict[str, Any]) -> str:
    """The audit as text: for each package, the advisories under the version that fixes them, the worst rated first."""
    snapshot, advisories = report["snapshot"], report["advisories"]
    lines = [f"{name}: {value}" for name, value in report.get("audited", {}).items()]
    lines += [
        f"Advisories as of {snapshot['date']}, {report['days_old']} days ago. Nothing newer is known here.",
        f"Source: {snapshot['source']}.",
    ]
    lines += textwrap.wrap(snapshot.get("limits", ""), 100)
    for name, version in sorted(report["looked_up"].items(), key=lambda pair: (pair[0] != "tensorflow", pair[0])):
        of_package = [advisory for advisory in advisories if advisory["package"] == name]
        if of_package:
            lines += ["", f"{name} {version}: {_counted(len(of_package))}, {_summary(of_package)}"]
            lines += _grouped(of_package)
    lines += _accepted(report)
    clean = len(report["looked_up"]) - len({advisory["package"] for advisory in advisories})
    of_all = f"{clean} of {len(report['looked_up'])} packages looked up have none in this database"
    lines += ["", f"{_counted(len(advisories))}; {of_all}."]
    if "accepted_list" in report:
        lines += [f"{sum(map(is_open, advisories))} of them not accepted by {report['accepted_list']}."]
    return "\n".join(lines)


RATINGS = ("critical", "high", "medium", "low")
_OUTLOOKS = (HERE, NOT_HERE, NEVER, UNNAMED, UNKNOWN)


def _grouped(advisories):
    """The advisories of one package as lines, under a heading for each version that fixes some."""
    groups: Dict[Any, List[Any]] = {}
    for advisory in advisories:
        groups.setdefault((_OUTLOOKS.index(advisory["outlook"]), advisory["fixed_by"]), []).append(advisory)
    lines = []
    for group in sorted(groups, key=lambda group: (group[0], installed.key(group[1] or ""))):
        ordered = sorted(groups[group], key=_rank)
        heading = ordered[0]["says"].replace(_where(ordered[0]["part"]), "")
        lines += ["", f"  {heading[0].upper()}{heading[1:]}: {len(ordered)}"]
        lines += ["    " + _line(advisory) for advisory in ordered]
    return lines


def _rank(advisory):
    rating = advisory["severity"]
    return RATINGS.index(rating) if rating in RATINGS else len(RATINGS), installed.numbers(advisory["id"])


def _line(advisory):
    said = f"{advisory['id']:<20}{advisory['severity'] or 'unrated':<10}"
    said += f"in {advisory['part']}, built in  " if advisory["part"] else ""
    acceptance = advisory["accepted"]
    if acceptance:
        said += "accepted until {}{}".format(acceptance["until"], ", EXPIRED" if acceptance["expired"] else "")
    return said.rstrip()


def _accepted(report):
    """What the accepted list says: each reason once, and the identifiers that no longer occur."""
    acceptances = [advisory["accepted"] for advisory in report["advisories"] if advisory["accepted"]]
    reasons = [(one["until"], one["expired"], one["by"], one["accepted"], one["reason"]) for one in acceptances]
    lines = []
    for reason in sorted(set(reasons), key=reasons.index):
        until, expired, by, accepted, why = reason
        who = "".join([f" by {by}" if by else "", f" on {accepted}" if accepted else ""])
        ends = "expired on" if expired else "until"
        lines += textwrap.wrap(f"{reasons.count(reason)} accepted{who}, {ends} {until}: {why}", 100)
    unused = report.get("accepted_but_not_found")
    if unused:
        lines += textwrap.wrap(f"Accepted but not found, so they can be removed: {', '.join(unused)}", 100)
    return [""] + lines if lines else []


def _counted(number):
    return "1 advisory" if number == 1 else f"{number} advisories"


def _summary(advisories):
    outlooks = [advisory["outlook"] for advisory in advisories]
    fixes = [advisory["fixed_by"] for advisory in advisories if advisory["outlook"] == HERE]
    newest = max(fixes, key=installed.key, default=None)
    words = {HERE: f"to be fixed by an upgrade to {newest}", NOT_HERE: "out of reach on this Python"}
    words.update(
        {NEVER: "never fixed here", UNKNOWN: "without a fix", UNNAMED: "without a named fix in this minor version"}
    )
    return ", ".join(f"{outlooks.count(outlook)} {words[outlook]}" for outlook in words if outlook in outlooks)
