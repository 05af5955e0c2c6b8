"""The flaws of TensorFlow that its release notes name as fixed, gathered in `fixes.json` on the date that it states.

Each group there has the patches that fix its flaws, the last one of each minor version, and the flaws: TensorFlow's
own, and those of libraries that are built into its wheels. A release of a newer minor version than all of these counts
as fixed.

Source: https://github.com/tensorflow/tensorflow/blob/master/RELEASE.md, read in the copy at
https://github.com/ROCm/tensorflow-upstream/blob/0652361b8a42ee027ebb8d2b6db5d5137ca4adeb/RELEASE.md. Where four of its
notes name CVE-2022-35935 for two flaws, the second is taken for CVE-2022-35991, whose operation they name.
"""

import json
import os
from typing import Any, Dict, List

from accum._cli.doctor import installed

LIMITS = (
    "This covers TensorFlow itself, not other packages, and only what its release notes name. They have named no flaw "
    "after {newest_with_fixes}, although that does not mean that there was none. For everything else pass a database "
    "in the OSV format with --advisories PATH."
)


def read() -> Dict[str, Any]:
    """Read the table that comes with accum, in the form of `osv.read`, with `limits` to tell the reader."""
    with open(os.path.join(os.path.dirname(__file__), "fixes.json"), encoding="utf-8") as file:
        table = json.load(file)
    entries = [_entry(flaw, owner, group["fixed_in"]) for group in table["groups"] for owner, flaw in _flaws(group)]
    return {
        "date": table["date"],
        "source": f"TensorFlow's release notes up to {table['newest_notes']}",
        "limits": LIMITS.format(**table),
        "packages": {"tensorflow": sorted(entries, key=lambda entry: _number(entry["id"]))},
    }


def _flaws(group):
    return [(owner, flaw) for owner, flaws in group.items() if owner != "fixed_in" for flaw in flaws]


def _number(flaw):
    _, year, number = flaw.split("-")
    return int(year), int(number)


def _entry(flaw, owner, fixed_in):
    about: Dict[str, Any] = {"id": flaw, "aliases": [], "severity": None, "ranges": _ranges(fixed_in)}
    if owner != "tensorflow":
        about["part"] = owner
    return about


def _ranges(fixed_in):
    """From each fix, the releases of all minor versions after the one before it, as `[first, fix, None]`.

    The notes do not say which versions have a flaw, so it counts for all before the fix.
    """
    ranges: List[Any] = []
    first = "0"
    for fix in fixed_in:
        ranges.append([first, fix, None])
        major, minor = installed.release(fix)[:2]
        first = "2.0" if major == 1 else f"{major}.{minor + 1}"
    return ranges
