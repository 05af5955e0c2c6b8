"""Write accum/_cli/doctor/advisories.json, the snapshot that `python -m accum doctor --audit` reads.

    git clone https://github.com/pypa/advisory-database
    python scripts/advisories.py advisory-database

Takes from the PyPA advisory database (CC BY 4.0), at the commit that is checked out, which versions each advisory
affects: of TensorFlow, and of the packages in the locks. The advisories' texts are left where they are. Needs PyYAML
and `cvss`.
"""

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tarfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if sys.path[0] == os.path.join(ROOT, "scripts"):
    del sys.path[0]  # `numbers` there would hide the standard library's, which `cvss` imports
FOLDER = os.path.join(ROOT, "accum", "_cli", "doctor")
TENSORFLOW = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu")
"""Three names for one build: an advisory that is listed under one of them concerns all."""


def git(clone, *arguments):
    return subprocess.run(
        ["git", "-C", clone] + list(arguments), stdout=subprocess.PIPE, check=True, universal_newlines=True
    ).stdout


def documents(clone, package):
    """The advisories on a package, parsed."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    if not git(clone, "ls-tree", "HEAD", f"vulns/{package}/"):
        return []
    archive = subprocess.run(
        ["git", "-C", clone, "archive", "HEAD", f"vulns/{package}"], stdout=subprocess.PIPE, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = [member for member in tar.getmembers() if member.isfile()]
        parsed = [yaml.load(tar.extractfile(member), loader) for member in files]
    return [document for document in parsed if not document.get("withdrawn")]


def ranges(document, package):
    """[[first version affected, version that fixes it or None, last version affected or None]] of a package."""
    found = []
    for affected in document["affected"]:
        if affected["package"]["name"].lower() != package:
            continue
        of_versions = [part for part in affected.get("ranges", []) if part["type"] == "ECOSYSTEM"]
        for event in (event for part in of_versions for event in part["events"]):
            if "introduced" in event:
                found.append([str(event["introduced"]), None, None])
            elif found:
                found[-1][1 if "fixed" in event else 2] = str(event.get("fixed", event.get("last_affected")))
        if not of_versions:
            found += [[str(version), None, str(version)] for version in affected.get("versions", [])]
    return [list(part) for part in sorted({tuple(p) for p in found}, key=lambda part: (_order(part[0]), str(part)))]


def _order(version):
    return [int(number) for number in re.findall(r"\d+", version)]


def severity(document):
    """The rating of an advisory, such as "high", where the database has one."""
    import cvss

    kinds = {"CVSS_V3": cvss.CVSS3, "CVSS_V4": getattr(cvss, "CVSS4", None)}
    for entry in document.get("severity", []):
        kind = kinds.get(entry["type"])
        if kind is not None:
            found = kind(entry["score"])
            return (found.severities()[0] if hasattr(found, "severities") else found.severity).lower()
    return None


def advisories(clone, package):
    """{"id", "aliases", "severity", "ranges"} of each advisory, one for each CVE."""
    merged = {}
    for name in TENSORFLOW if package == "tensorflow" else (package,):
        for document in documents(clone, name):
            names = sorted({document["id"]} | set(document.get("aliases") or []), key=_rank)
            affected = ranges(document, name)
            entry = {
                "id": names[0],
                "aliases": [alias for alias in names[1:] if not alias.startswith("PYSEC")],
                "severity": severity(document),
                "ranges": affected,
            }
            known = merged.setdefault(names[0], entry)
            known["severity"] = known["severity"] or entry["severity"]
    return [entry for _, entry in sorted(merged.items()) if entry["ranges"]]


def _rank(name):
    return (
        ("CVE", "GHSA", "PYSEC").index(name.split("-")[0]) if name.split("-")[0] in ("CVE", "GHSA", "PYSEC") else 3,
        name,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clone", help="a clone of the advisory database")
    parser.add_argument("--origin", default="github.com/pypa/advisory-database", help="where it was cloned from")
    arguments = parser.parse_args()
    clone = arguments.clone
    with open(os.path.join(FOLDER, "locks.json"), encoding="utf-8") as file:
        locked = set(json.load(file)["files"])
    packages = sorted({"tensorflow"} | {name for name in locked if not name.startswith("tensorflow")})
    found = {package: advisories(clone, package) for package in packages}
    record = {
        "date": git(clone, "log", "-1", "--format=%cs").strip(),
        "source": f"PyPA advisory database (CC BY 4.0), as in {arguments.origin}",
        "commit": git(clone, "log", "-1", "--format=%H").strip(),
        "packages": {package: entries for package, entries in found.items() if entries},
        "looked_up": packages,
    }
    with open(os.path.join(FOLDER, "advisories.json"), "w", encoding="utf-8", newline="\n") as file:
        file.write(written(record))
    print(f"{sum(map(len, found.values()))} advisories on {sum(map(bool, found.values()))} packages")


def written(record):
    """JSON with one line per advisory, which gives readable diffs."""
    head = {key: value for key, value in record.items() if key != "packages"}
    text = json.dumps(head, indent=1)[:-2] + ',\n "packages": {\n'
    blocks = []
    for package, entries in sorted(record["packages"].items()):
        lines = ",\n   ".join(json.dumps(entry) for entry in entries)
        blocks.append(f'  "{package}": [\n   {lines}\n  ]')
    return text + ",\n".join(blocks) + "\n }\n}\n"


if __name__ == "__main__":
    sys.exit(main())
