"""Gather what tox measured into MATRIX.md: `python scripts/evidence.py`.

Each cell of tox leaves a freeze and a JUnit report. They become a record of the cell on its system in
docs/evidence.json, which keeps those of other systems and earlier runs; `--merge FILE` takes in the records of another
machine. From all of them come MATRIX.md and docs/matrix.svg. What has no record is "not run", whatever else is there.
"""

import argparse
import json
import os

import freeze
import picture
import reports
from matrix import data as matrix

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PACKAGES = ("tensorflow", "keras", "tf-keras", "numpy", "protobuf")


# ----------------------------------------------------------------------------------------------------------------
# Records


def record(frozen, counted):
    """What is kept of a cell's run."""
    packages = frozen["packages"]
    versions = {name: packages[name]["version"] for name in PACKAGES if name in packages}
    if "tensorflow" not in versions:
        versions.update(tensorflow=packages["tensorflow-cpu"]["version"] if "tensorflow-cpu" in packages else None)
    about = {name: frozen[name] for name in ("date", "python", "commit", "sources")}
    version = packages["tf-accum"]["version"] if "tf-accum" in packages else None
    return dict(about, version=version, packages=versions, **counted)


def collect(work_dir):
    """({system: {cell: record}}, [what was left out, and why])."""
    records, left_out = {}, []
    folders = {name: os.path.join(work_dir, name) for name in ("freeze", "junit")}
    names = {name: _names(folder) for name, folder in folders.items()}
    for name in sorted(names["freeze"] | names["junit"]):
        report = os.path.join(folders["junit"], name + ".xml")
        if name not in names["freeze"]:
            left_out.append("{}: nothing says what it was made of".format(name))
            continue
        with open(os.path.join(folders["freeze"], name + ".json"), encoding="utf-8") as file:
            frozen = json.load(file)
        if name not in {cell for cell, _, _, _ in matrix.cells(frozen["system"])}:
            left_out.append("{}: no cell of the matrix on {}".format(name, frozen["system"]))
        elif frozen["arguments"]:
            left_out.append("{}: not the whole suite, but {}".format(name, " ".join(frozen["arguments"])))
        elif not os.path.exists(report):
            left_out.append("{}: its tests did not end".format(name))
        else:
            records.setdefault(frozen["system"], {})[name] = record(frozen, reports.counts(report))
    return records, left_out


def _names(folder):
    return {os.path.splitext(name)[0] for name in os.listdir(folder)} if os.path.isdir(folder) else set()


def merge(records, others):
    """Take into `records` those of `others` that are not older."""
    for system, cells in others.items():
        for name, other in cells.items():
            there = records.setdefault(system, {}).get(name)
            if there is None or there["date"] <= other["date"]:
                records[system][name] = other


# ----------------------------------------------------------------------------------------------------------------
# What they say


def state(kept, sources):
    """ "passed", "failed", "old" (passed with other sources than these) or "not run"."""
    if kept is None:
        return "not run"
    if not reports.is_pass(kept):
        return "failed"
    return "passed" if kept["sources"] == sources else "old"


def states(records, sources):
    """{system: {cell: state}} of every cell that there is."""
    return {
        system: {name: state(records.get(system, {}).get(name), sources) for name, _, _, _ in matrix.cells(system)}
        for system in matrix.SYSTEMS
    }


WORDS = {"passed": "passed", "failed": "**failed**", "old": "passed (old)", "not run": "not run"}


def summary(found):
    """How many cells are in which state, such as "2 passed, 75 not run of 77"."""
    values = list(found.values())
    parts = ["{} {}".format(values.count(name), name) for name in ("passed", "old", "failed") if name in values]
    return "{} of {} cells".format(", ".join(parts + ["{} not run".format(values.count("not run"))]), len(values))


def _row(cells):
    return "| {} |".format(" | ".join(str(cell) for cell in cells))


def grid(system, found):
    """A table of TensorFlow lines and Pythons."""
    lines = [_row(["TensorFlow"] + ["Python " + python for python in picture.PYTHONS])]
    lines.append("|---" * (len(picture.PYTHONS) + 1) + "|")
    for line, keras_2 in picture.columns():
        if matrix.pythons(line, system):
            names = [matrix.cell(python, line, keras_2) for python in picture.PYTHONS]
            lines.append(_row([picture.label(line, keras_2)] + [WORDS.get(found.get(name), "–") for name in names]))
    return lines


DETAILS = ("cell", "state", "passed", "skipped", "xfailed", "failed", "seconds", "Python", "TensorFlow", "Keras")
DETAILS += ("NumPy", "protobuf", "accum", "commit", "date")


def details(found, records):
    """A table of the cells that ran."""
    lines = [_row(DETAILS), "|---" * len(DETAILS) + "|"]
    for name, what in found.items():
        if name not in records:
            continue
        kept = records[name]
        packages = kept["packages"]
        keras = packages.get("tf-keras" if name.endswith("-keras2") else "keras")
        row = [name, WORDS[what]] + [kept[field] for field in DETAILS[2:7]]
        row += [kept["python"], packages.get("tensorflow"), keras, packages.get("numpy"), packages.get("protobuf")]
        row += [kept["version"], kept["commit"], kept["date"][:10]]
        lines.append(_row("" if cell is None else cell for cell in row))
    return lines


HEAD = """\
# The matrix: what ran

Written by `python scripts/evidence.py` from `docs/evidence.json`, which `tox` fills; nothing here is typed by hand.

![{alt}](docs/matrix.svg)

- **passed**: the whole suite of the cell ran with the sources that are here, and nothing failed. "skipped" are tests
  that the cell is not made for, "xfailed" are known limits of its TensorFlow, with reasons in `tests/exceptions.py`.
- **passed (old)**: the same, with other sources; the commit says which.
- **failed**: something failed, or no test ran.
- **not run**: nobody has run it, or not to its end. It may work.
- **–**: TensorFlow has no wheel for it.

`keras2` is Keras 2 by tf-keras, where Keras 3 is the default.
"""


def page(records, sources):
    """The text of MATRIX.md."""
    parts = [HEAD.format(alt=picture.ALT)]
    for system, found in states(records, sources).items():
        parts.append("## {}\n\n{}.\n".format(matrix.SYSTEMS[system], summary(found)))
        parts.append("\n".join(grid(system, found)) + "\n")
        if records.get(system):
            parts.append("\n".join(details(found, records[system])) + "\n")
    return "\n".join(parts)


def drawing(records, sources):
    """The text of docs/matrix.svg."""
    return picture.draw(states(records, sources), records)


# ----------------------------------------------------------------------------------------------------------------
# The command


def _load(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def _save(path, text):
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work-dir", default=os.path.join(ROOT, ".tox"), help="where freeze/ and junit/ are")
    parser.add_argument("--merge", action="append", default=[], metavar="FILE", help="an evidence.json from elsewhere")
    parser.add_argument("--root", default=ROOT, help="where docs/ is and MATRIX.md goes (default: this checkout)")
    arguments = parser.parse_args(argv)
    store = os.path.join(arguments.root, "docs", "evidence.json")
    records = _load(store) if os.path.exists(store) else {}
    found, left_out = collect(arguments.work_dir)
    for others in [found] + [_load(path) for path in arguments.merge]:
        merge(records, others)
    sources = freeze.source_digest()
    _save(store, json.dumps(records, indent=1, sort_keys=True) + "\n")
    _save(os.path.join(arguments.root, "MATRIX.md"), page(records, sources))
    _save(os.path.join(arguments.root, "docs", "matrix.svg"), drawing(records, sources))
    for what in left_out:
        print("Left out: " + what)
    for system, found in states(records, sources).items():
        print("{}: {}".format(matrix.SYSTEMS[system], summary(found)))


if __name__ == "__main__":
    main()
