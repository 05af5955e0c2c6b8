"""The advisories that a project accepts: a JSON file with a reason and a last day for each.

    [{"ids": ["CVE-2021-29512"], "reason": "our models and data come from this company", "until": "2027-06-30"}]

`by` and `accepted`, who decided and when, are optional.
"""

import datetime
import json
from typing import Any, Dict, List, NamedTuple, Optional

FIELDS = ("ids", "reason", "until", "by", "accepted")


class Unreadable(ValueError):
    """The file is not what it should be; the message says what and where."""


class Acceptance(NamedTuple):
    """One entry of the file; `until` is the last day on which it counts."""

    ids: List[str]
    reason: str
    until: datetime.date
    by: Optional[str]
    accepted: Optional[str]


def read(path: str) -> List[Acceptance]:
    """Read an accepted list.

    Raises:
        Unreadable: if the file is missing, or an entry lacks a field, a reason or a date.
    """
    try:
        with open(path, encoding="utf-8") as file:
            entries = json.load(file)
    except OSError as error:
        raise Unreadable(f"{path} can't be read: {error.strerror}.") from None
    except ValueError as error:
        raise Unreadable(f"{path} is not JSON: {error}.") from None
    if not isinstance(entries, list):
        raise Unreadable(f"{path} must be a list of entries with ids, reason and until.")
    return [_entry(f"{path}, entry {number}", entry) for number, entry in enumerate(entries, 1)]


def _entry(where, entry):
    if not isinstance(entry, dict):
        raise Unreadable(f"{where} must be an object with ids, reason and until.")
    unknown = sorted(set(entry) - set(FIELDS))
    if unknown:
        raise Unreadable(f"{where}: unknown field {unknown[0]}. The fields are {', '.join(FIELDS)}.")
    ids, reason = entry.get("ids"), entry.get("reason")
    if not isinstance(ids, list) or not ids or not all(isinstance(name, str) and name for name in ids):
        raise Unreadable(f"{where}: `ids` must be a list of identifiers such as CVE-2021-29512.")
    if not isinstance(reason, str) or not reason.strip():
        raise Unreadable(f"{where}: `reason` must say why these are acceptable.")
    if entry.get("accepted") is not None:
        _date(where, entry, "accepted")
    return Acceptance(ids, reason.strip(), _date(where, entry, "until"), entry.get("by"), entry.get("accepted"))


def _date(where, entry, field):
    try:
        return datetime.datetime.strptime(str(entry.get(field)), "%Y-%m-%d").date()
    except ValueError:
        said = f"{where}: `{field}` must be a date such as 2027-06-30. Received: {entry.get(field)}."
        raise Unreadable(said) from None


def apply(acceptances: List[Acceptance], advisories: List[Dict[str, Any]], today: datetime.date) -> List[str]:
    """Set `accepted` of each advisory, as `--json` prints it: None, or why, until when, and whether that has passed.

    Of several entries for one advisory, the one that lasts longest counts.

    Returns:
        The identifiers in the list that no advisory has.
    """
    by_id = {}
    for acceptance in sorted(acceptances, key=lambda acceptance: acceptance.until):
        by_id.update(dict.fromkeys(acceptance.ids, acceptance))
    matched = set()
    for advisory in advisories:
        names = [name for name in [advisory["id"]] + list(advisory["aliases"]) if name in by_id]
        matched.update(names)
        best = max((by_id[name] for name in names), key=lambda acceptance: acceptance.until, default=None)
        advisory["accepted"] = best and {
            "reason": best.reason,
            "until": best.until.isoformat(),
            "by": best.by,
            "accepted": best.accepted,
            "expired": best.until < today,
        }
    return sorted(set(by_id) - matched)
