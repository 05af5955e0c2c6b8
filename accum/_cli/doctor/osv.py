"""Read advisories in the OSV format: a directory or a zip archive of JSON files, one for each advisory."""

import contextlib
import datetime
import json
import os
import zipfile
from typing import Any, Dict, List

from accum._cli.doctor import cvss, installed

ECOSYSTEM = "PyPI"
TENSORFLOW = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu")
"""Three names for one build: an advisory that is listed under one of them concerns all."""

KINDS = ("CVE", "GHSA", "PYSEC")
"""Databases in the order in which their identifiers name a flaw that has several."""

MALFORMED = (AttributeError, IndexError, KeyError, TypeError, ValueError)


class Unreadable(ValueError):
    """Something is not what it should be; the message says what and where."""


def read(path: str) -> Dict[str, Any]:
    """Read a database of advisories on Python packages.

    Args:
        path: a directory, searched with its subdirectories, or a zip archive, of `.json` files in the OSV format.

    Returns:
        `{"date", "source", "packages": {name: [{"id", "aliases", "severity", "ranges"}]}}`. The date is that of the
        newest change to an advisory. A range is `[first version affected, version that fixes it or None, last version
        affected or None]`.

    Raises:
        Unreadable: if the path has no such files, or one of them is malformed.
    """
    dates: List[str] = []
    pairs: List[Any] = []
    for name, content in _files(path):
        try:
            document = json.loads(content.decode("utf-8"))
            dates.append(_date(document["modified"]))
            pairs += [] if document.get("withdrawn") else _entries(document)
        except MALFORMED as error:
            raise Unreadable(
                f"{name} is not an advisory in the OSV format ({type(error).__name__}: {error})."
            ) from None
    if not dates:
        raise Unreadable(f"{path} has no .json files. Advisories in YAML must be converted to JSON first.")
    return {"date": max(dates), "source": os.path.basename(os.path.abspath(path)), "packages": _merged(pairs)}


def _date(text):
    """The date of a time such as "2026-01-02T03:04:05Z"."""
    return datetime.datetime.strptime(text[:11], "%Y-%m-%dT").strftime("%Y-%m-%d")


def _files(path):
    """(name, content) of each JSON file, in the order of the names."""
    if os.path.isdir(path):
        names = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
        for name in sorted(name for name in names if name.endswith(".json")):
            with _named(name), open(name, "rb") as file:
                content = file.read()
            yield name, content
        return
    with _named(path):
        if not zipfile.is_zipfile(path):
            with open(path, "rb"):
                raise Unreadable(f"{path} is neither a directory nor a zip archive.")
        with zipfile.ZipFile(path) as archive:
            for name in sorted(name for name in archive.namelist() if name.endswith(".json")):
                yield f"{path}: {name}", archive.read(name)


@contextlib.contextmanager
def _named(path):
    try:
        yield
    except (OSError, zipfile.BadZipFile) as error:
        raise Unreadable(f"{path} can't be read: {getattr(error, 'strerror', None) or error}.") from None


def _entries(document):
    """[(package, entry)] of an advisory; TensorFlow's distributions are still apart."""
    names = sorted({document["id"]} | set(document.get("aliases") or []), key=_rank)
    of_packages: Dict[str, List[Any]] = {}
    for affected in document.get("affected") or []:
        package = affected.get("package") or {}
        if package.get("ecosystem") == ECOSYSTEM:
            of_packages.setdefault(installed.canonical(package["name"]), []).extend(_ranges(affected))
    about = {
        "id": names[0],
        "aliases": [name for name in names[1:] if not name.startswith("PYSEC")],
        "severity": severity(document),
    }
    return [
        (package, dict(about, ranges=sorted(ranges, key=lambda part: (installed.release(part[0]), str(part)))))
        for package, ranges in sorted(of_packages.items())
        if ranges
    ]


def _rank(name):
    kind = name.split("-")[0]
    return KINDS.index(kind) if kind in KINDS else len(KINDS), name


def severity(document):
    """The rating of an advisory, such as "high": the word that the database has, or what its CVSS 3 vector says."""
    rating = str((document.get("database_specific") or {}).get("severity") or "").lower()
    vectors = [str(part.get("score")) for part in document.get("severity") or [] if part.get("type") == "CVSS_V3"]
    computed = [cvss.rating(vector) for vector in vectors]
    return {"moderate": "medium"}.get(rating, rating) or next(filter(None, computed), None)


def _ranges(affected):
    of_versions = [part for part in affected.get("ranges") or [] if part["type"] == "ECOSYSTEM"]
    if not of_versions:
        return [[str(version), None, str(version)] for version in affected.get("versions") or []]
    ranges: List[Any] = []
    for event in (event for part in of_versions for event in part["events"]):
        if "introduced" in event:
            ranges.append([str(event["introduced"]), None, None])
        elif "fixed" in event:
            ranges[-1][1] = str(event["fixed"])
        elif "last_affected" in event:
            ranges[-1][2] = str(event["last_affected"])
    return ranges


def _merged(pairs):
    """{package: [entry]}: one entry for each flaw, as the first name of TensorFlow and the first advisory have it."""
    merged: Dict[str, Dict[str, Any]] = {}
    for package, entry in sorted(pairs, key=lambda pair: pair[0]):
        flaws = merged.setdefault(TENSORFLOW[0] if package in TENSORFLOW else package, {})
        flaw = flaws.setdefault(entry["id"], entry)
        flaw["severity"] = flaw["severity"] or entry["severity"]
    return {package: [flaws[name] for name in sorted(flaws)] for package, flaws in merged.items()}
