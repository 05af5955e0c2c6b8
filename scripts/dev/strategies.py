"""Count the tests of each distribution strategy: `python scripts/dev/strategies.py [py311-tf2.15 py39-tf2.10 …]`.

In the named environments of tox, which must exist (`tox run --notest -e …`), all tests of each strategy are run against
these sources, whatever their marks. Without names, the reports are read that tox has left: those of a change have the
main tests, and in some environments more. The results go to records/strategies.json, from where scripts/dev/evidence.py
writes them into MATRIX.md.
"""

import argparse
import datetime
import json
import os
import subprocess
import tempfile

import freeze
import matrix
import reports

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
STORE = os.path.join(ROOT, "records", "strategies.json")
TESTS = {
    "MirroredStrategy": ["test_replicas.py", "test_strategies.py"],
    "MultiWorkerMirroredStrategy": ["test_workers.py"],
    "parameter servers, SyncReplicas, Estimators": ["test_cluster.py"],
}


def run(env_name, files):
    """Run test files in an environment of tox, and return their counts."""
    folder = os.path.join(ROOT, ".tox", env_name, "Scripts" if os.name == "nt" else "bin")
    with tempfile.TemporaryDirectory() as temporary:
        report = os.path.join(temporary, "report.xml")
        command = [os.path.join(folder, "python"), "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}"] + [os.path.join(ROOT, "tests", name) for name in files]
        subprocess.call(command, cwd=ROOT, env=dict(os.environ, PYTHONPATH=ROOT))
        return reports.counts(report)


def from_reports(folder):
    """{environment: {strategy: counts}}, from a folder of JUnit files. A strategy without a test that ran is absent."""
    found = {}
    for name in sorted(os.listdir(folder)):
        env_name, extension = os.path.splitext(name)
        if extension == ".xml" and env_name in _environments():
            report = os.path.join(folder, name)
            for strategy, files in TESTS.items():
                counted = reports.counts(report, [os.path.splitext(file)[0] for file in files])
                if counted["passed"] + counted["failed"]:
                    found.setdefault(env_name, {})[strategy] = counted
    return found


def _environments():
    return [env_name for env_name, _, _, _ in matrix.data.environments("linux")]


def keep(records, env_name, strategy, counted):
    """Add counts to the records, unless there are those of more tests with the same sources."""
    there = records.setdefault(env_name, {}).get(strategy)
    counted = dict(counted, date=str(datetime.date.today()), sources=freeze.source_digest())
    is_less = there is not None and there["sources"] == counted["sources"] and _ran(there) > _ran(counted)
    if not is_less:
        records[env_name][strategy] = counted


def _ran(counted):
    return sum(counted[name] for name in ("passed", "xfailed", "failed"))


def table(records):
    """The lines of a table with a row for each TensorFlow: what passed under each strategy, in how many tests."""
    rows = ["| TensorFlow | " + " | ".join(TESTS) + " |", "|---" * (len(TESTS) + 1) + "|"]
    ran = {version: [name for name in records if _version(name) == version] for version in map(_version, records)}
    for version in sorted({_version(env_name) for env_name in _environments()}):
        cells = [_cell([records[name].get(strategy) for name in ran.get(version, [])]) for strategy in TESTS]
        rows.append("| " + " | ".join([".".join(map(str, version)), *cells]) + " |")
    return rows


def _version(env_name):
    return tuple(int(part) for part in env_name.partition("tf")[2].partition("-")[0].split("."))


def _cell(counts):
    """The counts of the environment that ran most tests of a strategy."""
    counted = max(filter(None, counts), key=_ran, default=None)
    if counted is None:
        return "not run"
    ran = ", ".join(f"{counted[name]} {name}" for name in ("passed", "xfailed", "failed") if counted[name])
    return ran and f"{ran} ({counted['date']})" or "none apply"


def load():
    """The records, by environment and strategy."""
    if not os.path.exists(STORE):
        return {}
    with open(STORE, encoding="utf-8") as file:
        return json.load(file)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("environments", nargs="*", metavar="ENVIRONMENT")
    parser.add_argument("--work-dir", default=os.path.join(ROOT, ".tox"), help="where junit/ is (default: .tox)")
    arguments = parser.parse_args()
    records = load()
    if not arguments.environments:
        for env_name, counts in from_reports(os.path.join(arguments.work_dir, "junit")).items():
            for strategy, counted in counts.items():
                keep(records, env_name, strategy, counted)
        _save(records)
    for env_name in arguments.environments:
        for strategy, files in TESTS.items():
            keep(records, env_name, strategy, run(env_name, files))
            _save(records)
    print("\n".join(table(records)))


def _save(records):
    with open(STORE, "w", encoding="utf-8", newline="\n") as file:
        file.write(json.dumps(records, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
