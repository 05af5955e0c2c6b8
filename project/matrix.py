"""Write MATRIX.md: `python project/matrix.py` first adds the runs in .tox to project/records/runs.json.

Each environment of tox leaves a freeze of its packages and a JUnit report. Of a whole run of a clean checkout, the
commit, the versions and the counts are kept; whatever else ran is named and left out. `--work-dir FOLDER` takes the
runs of another folder, such as those of `wine.py` and `emulated.py`, or those of another machine.
"""

import argparse
import itertools
import json
import os
import string

import environments
import reports

ROOT = environments.ROOT
PACKAGES = ("tensorflow", "keras", "tf-keras", "numpy", "protobuf")


# ----------------------------------------------------------------------------------------------------------------
# Records


def record(frozen, counted):
    """The record of an environment's run."""
    packages = frozen["packages"]
    versions = {name: packages[name]["version"] for name in PACKAGES if name in packages}
    if "tensorflow" not in versions:
        versions.update(tensorflow=packages["tensorflow-cpu"]["version"] if "tensorflow-cpu" in packages else None)
    about = {name: frozen[name] for name in ("date", "python", "commit", "under") if frozen.get(name)}
    return dict(about, packages=versions, **counted)


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
        frozen = _load(os.path.join(folders["freeze"], name + ".json"))
        why = _is_no_result(name, frozen, report)
        if why:
            left_out.append(f"{name}: {why}")
        else:
            records.setdefault(frozen["system"], {})[name] = record(frozen, reports.counts(report))
    return records, left_out


def _is_no_result(name, frozen, report):
    """Why a run says nothing about an environment, or None."""
    if name not in {env_name for env_name, _, _, _ in environments.environments(frozen["system"])}:
        return f"not in the matrix on {frozen['system']}"
    if frozen["arguments"] not in ([], ["--slow"]):
        return f"only part of the suite ran: {' '.join(frozen['arguments'])}"
    if not frozen["commit"]:
        return "its sources were those of no commit"
    return None if os.path.exists(report) else "its tests did not finish"


def _names(folder):
    return {os.path.splitext(name)[0] for name in os.listdir(folder)} if os.path.isdir(folder) else set()


def merge(records, others):
    """Add to `records` those of `others` that are not older."""
    for system, env_names in others.items():
        for name, other in env_names.items():
            there = records.setdefault(system, {}).get(name)
            if there is None or there["date"] <= other["date"]:
                records[system][name] = other


# ----------------------------------------------------------------------------------------------------------------
# The page


HEAD = """\
# Where the tests have passed

Each cell lists the Pythons on which the tests passed, with a letter for the tested commit. The second table lists the
commits. "–" means that TensorFlow has no wheel for the system. Under Wine and QEMU, the tests run on the builds of
Python and TensorFlow for a system, but not on the system itself.

`python project/matrix.py` writes this page from `project/records/runs.json`, the results of tox.
"""


def rows():
    """[(version, whether of Keras 2 beside Keras 3)], from the oldest to the newest."""
    matrix = environments.data
    both = ((version, two) for version in matrix.VERSIONS for two in (False, True))
    return [(version, two) for version, two in both if matrix.has_keras_3(version) or not two]


def cell(system, version, keras_2, records, letters):
    """Such as "3.9 a, 3.10 b; not run: 3.11", or "–" where there is no wheel of TensorFlow."""
    pythons = environments.data.pythons(version, system)
    kept = {python: records.get(environments.data.env_name(python, version, keras_2)) for python in pythons}
    ran = ", ".join(f"{python} {_mark(run, letters)}" for python, run in kept.items() if run)
    not_run = ", ".join(python for python, run in kept.items() if not run)
    if not ran:
        return "not run" if pythons else "–"
    return f"{ran}; not run: {not_run}" if not_run else ran


def _mark(run, letters):
    return letters[_sources(run)] if reports.is_pass(run) else f"**failed** {letters[_sources(run)]}"


def _sources(run):
    """The commit that was tested, and under what."""
    return run["commit"], run.get("under", "")


def page(records):
    """The text of MATRIX.md."""
    systems = environments.data.SYSTEMS
    runs = sorted((run for env_names in records.values() for run in env_names.values()), key=lambda run: run["date"])
    letters = dict(zip(dict.fromkeys(map(_sources, runs)), names()))
    lines = ["| TensorFlow | " + " | ".join(systems.values()) + " |", "|---" * (len(systems) + 1) + "|"]
    for version, keras_2 in rows():
        cells = [cell(system, version, keras_2, records.get(system, {}), letters) for system in systems]
        lines.append(f"| {version}{', Keras 2' if keras_2 else ''} | {' | '.join(cells)} |")
    lines += ["", "| | commit | under | dates | environments |", "|---|---|---|---|---:|"]
    for sources, letter in letters.items():
        dates = [run["date"][:10] for run in runs if _sources(run) == sources]
        span = " to ".join(sorted({dates[0], dates[-1]}))
        lines.append(f"| {letter} | `{sources[0]}` | {sources[1]} | {span} | {len(dates)} |")
    return HEAD + "\n" + "\n".join(lines) + "\n"


def names():
    """a to z, then aa to zz."""
    yield from string.ascii_lowercase
    yield from ("".join(pair) for pair in itertools.product(string.ascii_lowercase, repeat=2))


# ----------------------------------------------------------------------------------------------------------------
# The command


def _load(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def _save(path, text):
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)


def keep(store, others):
    """Merge runs into a file of records, and return all."""
    records = _load(store) if os.path.exists(store) else {}
    merge(records, others)
    _save(store, json.dumps(records, indent=1, sort_keys=True) + "\n")
    return records


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work-dir", default=os.path.join(ROOT, ".tox"), help="where freeze/ and junit/ are")
    parser.add_argument("--root", default=ROOT, help="where MATRIX.md and project/ are (default: this checkout)")
    arguments = parser.parse_args(argv)
    collected, left_out = collect(arguments.work_dir)
    for what in left_out:
        print("Left out: " + what)
    records = keep(os.path.join(arguments.root, "project", "records", "runs.json"), collected)
    _save(os.path.join(arguments.root, "MATRIX.md"), page(records))


if __name__ == "__main__":
    main()
