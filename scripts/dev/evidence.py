"""Gather what tox measured into MATRIX.md: `python scripts/dev/evidence.py`.

Each environment of tox leaves a freeze and a JUnit report. They become a record of the environment on its system in
records/evidence.json, beside the records of other systems and earlier runs; `--merge FILE` adds the records of another
machine. MATRIX.md and docs/matrix.svg are written from all records. An environment without a record is "not run".

`--patches FOLDER` keeps, in records/patches.json, the records of freezes and reports that were made by hand with a
patch that no environment runs (`OWN_PATCHES` in scripts/release/pins.py), under the name of the environment that has
the same minor version and Python:

    python -m pip install -c constraints/tf1.15.txt . tensorflow pytest tf-slim
    export PYTEST_ADDOPTS='-m "not slow and not per_version"'
    python scripts/dev/freeze.py FOLDER py37-tf1.15
    python -m pytest tests --junitxml=FOLDER/junit/py37-tf1.15.xml
"""

import argparse
import json
import os

import freeze
import picture
import reports
import strategies
from matrix import data as matrix

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PACKAGES = ("tensorflow", "keras", "tf-keras", "numpy", "protobuf")
TESTS = {
    '-m ""': "all",
    '-m "not deferred"': "all but weekly",
    '-m "not slow and not deferred"': "all but slow, weekly",
    '-m "not slow"': "main, per_version",
    '-m "not slow and not per_version"': "main",
}
"""What the options that tox.ini gives to pytest select."""


# ----------------------------------------------------------------------------------------------------------------
# Records


def record(frozen, counted):
    """The record of an environment's run."""
    packages = frozen["packages"]
    versions = {name: packages[name]["version"] for name in PACKAGES if name in packages}
    if "tensorflow" not in versions:
        versions.update(tensorflow=packages["tensorflow-cpu"]["version"] if "tensorflow-cpu" in packages else None)
    about = {name: frozen[name] for name in ("date", "python", "commit", "sources")}
    version = packages["tf-accum"]["version"] if "tf-accum" in packages else None
    under = {"under": frozen["under"]} if frozen.get("under") else {}
    return dict(about, version=version, packages=versions, tests=TESTS.get(frozen.get("options")), **under, **counted)


def collect(work_dir):
    """Returns ({system: {environment: record}}, [what was left out, and why])."""
    records, left_out = {}, []
    folders = {name: os.path.join(work_dir, name) for name in ("freeze", "junit")}
    names = {name: _names(folder) for name, folder in folders.items()}
    for name in sorted(names["freeze"] | names["junit"]):
        report = os.path.join(folders["junit"], name + ".xml")
        if name not in names["freeze"]:
            left_out.append(f"{name}: there is no freeze of its packages")
            continue
        with open(os.path.join(folders["freeze"], name + ".json"), encoding="utf-8") as file:
            frozen = json.load(file)
        if name not in {env_name for env_name, _, _, _ in matrix.environments(frozen["system"])}:
            left_out.append(f"{name}: not in the matrix on {frozen['system']}")
        elif frozen["arguments"]:
            left_out.append(f"{name}: only part of the suite ran: {' '.join(frozen['arguments'])}")
        elif not os.path.exists(report):
            left_out.append(f"{name}: its tests did not finish")
        else:
            records.setdefault(frozen["system"], {})[name] = record(frozen, reports.counts(report))
    return records, left_out


def _names(folder):
    return {os.path.splitext(name)[0] for name in os.listdir(folder)} if os.path.isdir(folder) else set()


def merge(records, others):
    """Add to `records` those of `others` that are not older, and not worth less."""
    for system, env_names in others.items():
        for name, other in env_names.items():
            there = records.setdefault(system, {}).get(name)
            if there is None or (there["date"] <= other["date"] and not _is_worth_less(other, there)):
                records[system][name] = other


def _is_worth_less(other, there):
    """Whether the same sources ran natively before, and now under Wine or emulated."""
    return picture.way(other) != "native" and picture.way(there) == "native" and other["sources"] == there["sources"]


# ----------------------------------------------------------------------------------------------------------------
# States and tables


def state(kept, sources):
    """ "passed", "failed", "old" (passed with earlier sources) or "not run"."""
    if kept is None:
        return "not run"
    if not reports.is_pass(kept):
        return "failed"
    return "passed" if kept["sources"] == sources else "old"


def states(records, sources):
    """{system: {environment: state}} of every environment of the matrix."""
    return {
        system: {
            name: state(records.get(system, {}).get(name), sources) for name, _, _, _ in matrix.environments(system)
        }
        for system in matrix.SYSTEMS
    }


WORDS = {"passed": "passed", "failed": "**failed**", "old": "passed (old)", "not run": "not run"}
WAYS = {"native": "", "Wine": " under Wine", "emulated": " emulated"}


def summary(states_of, records):
    """How many environments are in which state, such as "2 passed under Wine, 75 not run, of 77 environments"."""
    values = [(what, picture.way(records.get(name))) for name, what in states_of.items()]
    names = {"passed": "passed", "old": "passed (old)", "failed": "failed", "not run": "not run"}
    parts = [
        f"{values.count((name, way))} {word}{how}"
        for name, word in names.items()
        for way, how in WAYS.items()
        if (name, way) in values
    ]
    return "{}, of {} environments".format(", ".join(parts), len(values))


def _row(env_names):
    return f"| {' | '.join((str(env_name) for env_name in env_names))} |"


def _word(states_of, records, name):
    if name not in states_of:
        return "–"
    return WORDS[states_of[name]] + WAYS[picture.way(records.get(name))]


def grid(system, states_of, records):
    """A table of TensorFlow versions and Pythons."""
    lines = [_row(["TensorFlow"] + ["Python " + python for python in picture.PYTHONS])]
    lines.append("|---" * (len(picture.PYTHONS) + 1) + "|")
    for version, keras_2 in picture.columns():
        if matrix.pythons(version, system):
            names = [matrix.env_name(python, version, keras_2) for python in picture.PYTHONS]
            lines.append(_row([picture.label(version, keras_2)] + [_word(states_of, records, name) for name in names]))
    return lines


DETAILS = ("environment", "state", "run", "tests", "passed", "skipped", "xfailed", "failed", "seconds", "Python")
DETAILS += ("TensorFlow", "Keras", "NumPy", "protobuf", "accum", "commit", "date")


def details(states_of, records):
    """A table of the environments that have run."""
    lines = [_row(DETAILS), "|---" * len(DETAILS) + "|"]
    for name, what in states_of.items():
        if name not in records:
            continue
        kept = records[name]
        packages = kept["packages"]
        keras = packages.get("tf-keras" if name.endswith("-keras2") else "keras")
        row = [name, WORDS[what], kept.get("under", "native"), kept.get("tests")]
        row += [kept[field] for field in DETAILS[4:9]]
        row += [kept["python"], packages.get("tensorflow"), keras, packages.get("numpy"), packages.get("protobuf")]
        row += [kept["version"], kept["commit"], kept["date"][:10]]
        lines.append(_row("" if env_name is None else env_name for env_name in row))
    return lines


HEAD = """\
# Test results by TensorFlow, Python and system

`python scripts/dev/evidence.py` writes this page from `records/evidence.json`, which holds the results of `tox`.
Nothing here is typed by hand.

![{alt}](docs/matrix.svg)

Each combination is one environment of `tox`, with a name such as `py311-tf2.15`. The names with `keras2` use Keras 2
(the package tf-keras) where Keras 3 is the default.

- **passed**: all tests selected for this environment ran with the present sources, and none failed.
- **passed (old)**: the same with earlier sources, those of the commit in the table. Each change is tested on
  TensorFlow 1.15, 2.2, 2.15 and 2.21, and on a third of the other versions, which the change's sources draw, each with
  one Python. Up to 2.15, a twentieth of the other environments also runs each time, in turns (`scripts/dev/turn.py`).
- **failed**: a test failed, or no test ran.
- **under Wine**: TensorFlow's build for Windows and Python's ran on Linux, under Wine. This does not test Windows
  itself: its kernel, its drivers and GPUs.
- **emulated**: TensorFlow's build for the other processor ran under QEMU.
- **not run**: it has not been run, or not to the end. It may work.
- **–**: TensorFlow has no wheel for it.

In the tables, "run" is "native", or the program under which the tests ran. "tests" says which tests were selected. The
"main" tests run in every environment. Those marked "per_version" differ by TensorFlow version, but not by Python.
"all" adds those that start processes or differ little between versions ("slow"). "all but weekly" leaves out those that
say the same on TensorFlow 2.2, 2.15 and 2.21, which every change runs on 1.15, and the weekly run on the others. ("odd
turns" and "even turns" were halves of them.) "skipped" counts tests that do not apply to the environment, and "xfailed"
known limits of its TensorFlow, with reasons in `tests/support/exceptions.py`.
"""


STRATEGIES = """\
## Strategies

`python scripts/dev/strategies.py` runs all tests of each distribution strategy, those of the weekly run too, and writes
`records/strategies.json`. Every other environment runs some of them with its own tests. [Multiple GPUs and
workers](docs/distribution.md) says what is exact where.
"""


def page(records, sources):
    """The text of MATRIX.md."""
    parts = [HEAD.format(alt=picture.ALT)]
    for system, states_of in states(records, sources).items():
        ran = records.get(system, {})
        parts.append(f"## {matrix.SYSTEMS[system]}\n\n{summary(states_of, ran)}.\n")
        parts.append("\n".join(grid(system, states_of, ran)) + "\n")
        if ran:
            parts.append("\n".join(details(states_of, ran)) + "\n")
    parts.append(STRATEGIES + "\n" + "\n".join(strategies.table(strategies.load())) + "\n")
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


def keep_patches(folder, store):
    """Add the records of the runs in a folder, of Linux x86_64, to records/patches.json."""
    records = {"linux": _load(store) if os.path.exists(store) else {}}
    collected, left_out = collect(folder)
    merge(records, {"linux": collected.get("linux", {})})
    _save(store, json.dumps(records["linux"], indent=1, sort_keys=True) + "\n")
    for what in left_out:
        print("Left out: " + what)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work-dir", default=os.path.join(ROOT, ".tox"), help="where freeze/ and junit/ are")
    parser.add_argument("--merge", action="append", default=[], metavar="FILE", help="an evidence.json from elsewhere")
    parser.add_argument(
        "--patches", metavar="FOLDER", help="keep records of a patch that no environment runs, nothing else"
    )
    parser.add_argument(
        "--root", default=ROOT, help="where docs/ and records/ are and MATRIX.md goes (default: this checkout)"
    )
    arguments = parser.parse_args(argv)
    if arguments.patches:
        return keep_patches(arguments.patches, os.path.join(arguments.root, "records", "patches.json"))
    store = os.path.join(arguments.root, "records", "evidence.json")
    records = _load(store) if os.path.exists(store) else {}
    collected, left_out = collect(arguments.work_dir)
    under_wine, too = collect(os.path.join(arguments.work_dir, "wine", "results"))  # where .ci/run has them
    for others in [collected, under_wine] + [_load(path) for path in arguments.merge]:
        merge(records, others)
    sources = freeze.source_digest()
    _save(store, json.dumps(records, indent=1, sort_keys=True) + "\n")
    _save(os.path.join(arguments.root, "MATRIX.md"), page(records, sources))
    _save(os.path.join(arguments.root, "docs", "matrix.svg"), drawing(records, sources))
    for what in left_out + too:
        print("Left out: " + what)
    for system, states_of in states(records, sources).items():
        print(f"{matrix.SYSTEMS[system]}: {summary(states_of, records.get(system, {}))}")


if __name__ == "__main__":
    main()
