"""Run the tests of each distribution strategy: `python scripts/dev/strategies.py py311-tf2.15 py39-tf2.10 …`.

The named environments of tox must exist (`tox run --notest -e …`). Whatever their tests' marks, all of a strategy's are
run, against these sources. The results go to records/strategies.json, and scripts/dev/evidence.py writes them into
MATRIX.md.
"""

import argparse
import datetime
import json
import os
import subprocess
import tempfile

import freeze
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


def table(records):
    """The lines of a table: TensorFlow, and what passed under each strategy."""
    lines = ["| environment | " + " | ".join(TESTS) + " |", "|---" * (len(TESTS) + 1) + "|"]
    for env_name in sorted(records, key=_by_version):
        cells = [_cell(records[env_name].get(strategy)) for strategy in TESTS]
        lines.append("| " + " | ".join([env_name] + cells) + " |")
    return lines


def _by_version(env_name):
    return [int(part) for part in env_name.partition("tf")[2].partition("-")[0].split(".")]


def _cell(counted):
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
    parser.add_argument("environments", nargs="+", metavar="ENVIRONMENT")
    records = load()
    for env_name in parser.parse_args().environments:
        for strategy, files in TESTS.items():
            about = {"date": str(datetime.date.today()), "sources": freeze.source_digest()}
            records.setdefault(env_name, {})[strategy] = dict(run(env_name, files), **about)
            with open(STORE, "w", encoding="utf-8", newline="\n") as file:
                file.write(json.dumps(records, indent=1, sort_keys=True) + "\n")
    print("\n".join(table(records)))


if __name__ == "__main__":
    main()
