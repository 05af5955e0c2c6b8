"""Fall into each known trap of gradient accumulation on purpose, and see whether the tests notice.

    python scripts/dev/mutants.py run                  # all traps of the TensorFlow that is installed: ten minutes
    python scripts/dev/mutants.py run --only NAME ...  # some of them
    python scripts/dev/mutants.py run --unchanged      # their tests on the unchanged sources, which have to pass
    python scripts/dev/mutants.py page                 # write docs/mutants.md from records/mutants.json

The traps are in scripts/dev/known_traps.py. Each is planted in a copy of the package, which the tests then import; the
sources are not touched. The text that a trap replaces must occur exactly once: a change that moves it fails here and in
tests/test_mutants.py, so that no trap is disarmed unnoticed. Needs Python 3.8 or later; `--python` may be older.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree

from known_traps import TRAPS

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RESULTS = os.path.join(ROOT, "records", "mutants.json")
PAGE = os.path.join(ROOT, "docs", "mutants.md")

PLUGIN = '''\
"""Loaded into pytest: a run whose tests imported another accum than the copy is none."""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def pytest_sessionfinish(session):
    imported = sys.modules.get("accum")
    if imported is None or not os.path.abspath(imported.__file__).startswith(HERE + os.sep):
        session.exitstatus = 99
'''

HEAD = """\
# Known traps

Gradient accumulation is easy to get almost right. This page lists {count} mistakes, many of them found in other
libraries. Each was planted in a copy of accum's sources, one at a time, together with the test that should notice it.
The last column names the test that failed. A mistake that no test noticed would be a hole in the tests.

`python scripts/dev/mutants.py page` writes this page. The runs are of {dates}, on TensorFlow {versions}. The numbers L1
to L19 are those of the [guarantees](semantics.md).

| the mistake | breaks | found in | caught by |
|---|---|---|---|
"""


class Broken(Exception):
    """A trap can't be planted, or its tests can't be run; the message names it."""


def plant(trap, folder):
    """Make the edits of a trap in the copy of the sources that is in `folder`."""
    for name, old, new in trap.edits:
        # the copy holds the static-graph package where it is installed
        path = os.path.join(folder, *("accum/" + name if name.startswith("compat/") else name).split("/"))
        with open(path, encoding="utf-8") as file:
            text = file.read()
        if text.count(old) != 1:
            raise Broken(f"{trap.name}: the text to replace occurs {text.count(old)} times in {name}:\n{old}")
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            file.write(text.replace(old, new))


def copy_sources(folder):
    """Copy the package to `folder`, with a plugin that checks that pytest imports this copy."""
    ignored = shutil.ignore_patterns("__pycache__", "compat")
    shutil.copytree(os.path.join(ROOT, "accum"), os.path.join(folder, "accum"), ignore=ignored)
    shutil.copytree(os.path.join(ROOT, "compat"), os.path.join(folder, "accum", "compat"), ignore=ignored)
    with open(os.path.join(folder, "only_this_copy.py"), "w", encoding="utf-8") as file:
        file.write(PLUGIN)


def tested(trap, python, folder):
    """Run the tests of a trap on the sources in `folder`, up to the first that fails.

    Returns:
      (seconds, None if all pass, otherwise the failed test and the beginning of its message).
    """
    report = os.path.join(folder, "report.xml")
    environment = dict(os.environ, PYTHONPATH=folder, PYTHONDONTWRITEBYTECODE="1")
    arguments = [os.path.join(ROOT, part) if part.startswith("tests/") else part for part in trap.tests]
    command = [python, "-m", "pytest", "-q", "-x", "-m", "", "-p", "no:cacheprovider", "-p", "only_this_copy"]
    command += ["--rootdir", ROOT, "-c", os.path.join(ROOT, "pyproject.toml"), "--junitxml", report] + arguments
    start = time.time()
    # In its folder: `python -m pytest` would import the sources of the current one.
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        timeout=1200,
    )
    seconds = round(time.time() - start)
    if done.returncode == 0:
        return seconds, None
    if done.returncode != 1:
        raise Broken(f"{trap.name}: its tests can't be run (exit status {done.returncode}).\n{done.stdout[-3000:]}")
    return seconds, _failure(report)


def _failure(report):
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        for failed in list(case.iter("failure")) + list(case.iter("error")):
            file = case.get("classname").split(".")[-1]
            said = " ".join(failed.get("message").split())
            return {"test": f"{file}.py::{case.get('name')}", "says": said[:120]}
    raise Broken(f"{report}: no test failed")


def version_of(python):
    command = [python, "-c", "import tensorflow as tf; print(tf.__version__)"]
    return subprocess.run(command, stdout=subprocess.PIPE, universal_newlines=True, check=True).stdout.split()[-1]


def read_results():
    if not os.path.exists(RESULTS):
        return {}
    with open(RESULTS, encoding="utf-8") as file:
        return json.load(file)


def run(arguments):
    """Plant traps and run their tests. Returns the exit status: 1 if one was not caught."""
    names = [trap.name for trap in TRAPS]
    unknown = [name for name in arguments.only if name not in names]
    if unknown:
        raise Broken(f"NAME must be one of: {' '.join(names)}. Received: {' '.join(unknown)}")
    version = version_of(arguments.python)
    line = ".".join(version.split(".")[:2])
    chosen = [trap for trap in TRAPS if (trap.name in arguments.only if arguments.only else trap.line == line)]
    if arguments.missing:
        known = read_results()
        chosen = [trap for trap in chosen if not known.get(trap.name, {}).get("caught")]
    missed = []
    for trap in chosen:
        try:
            with tempfile.TemporaryDirectory() as folder:
                copy_sources(folder)
                if not arguments.unchanged:
                    plant(trap, folder)
                seconds, failure = tested(trap, arguments.python, folder)
        except Broken as broken:
            print(broken, file=sys.stderr, flush=True)
            missed.append(trap.name)
            continue
        is_right = (failure is None) if arguments.unchanged else (failure is not None)
        print("{:<36} {:>4} s  {}".format(trap.name, seconds, failure or "passed"), flush=True)
        if not is_right:
            missed.append(trap.name)
        if not arguments.unchanged:
            results = read_results()  # anew, because another run may have written meanwhile
            results[trap.name] = {
                "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
                "tensorflow": version,
                "seconds": seconds,
                "caught": failure,
            }
            known = {name: results[name] for name in names if name in results}
            with open(RESULTS, "w", encoding="utf-8", newline="\n") as file:
                file.write(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    if missed:
        print("Failed on the unchanged sources: " if arguments.unchanged else "Not caught: ", " ".join(missed))
    return 1 if missed else 0


def page(results):
    """The text of docs/mutants.md."""
    listed = [trap for trap in TRAPS if trap.name in results]
    records = [results[trap.name] for trap in listed]
    dates = sorted({record["date"] for record in records})
    versions = sorted({record["tensorflow"] for record in records})
    text = HEAD.format(
        count=len(listed), dates=" to ".join(sorted({dates[0], dates[-1]})), versions=" and ".join(versions)
    )
    for trap in listed:
        caught = results[trap.name]["caught"]
        seen = ", ".join("[{}]({})".format(what, _address(what)) for what in trap.seen) or "–"
        test = f"`{caught['test'].split('[')[0]}`" if caught else "**nothing**"
        text += f"| {trap.says} | {trap.law} | {seen} | {test} |\n"
    return text


def _address(what):
    repository, number = what.split("#")
    return f"https://github.com/{repository}/issues/{number}"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", metavar="run | page")
    runs = commands.add_parser("run", help="plant the traps and run their tests; writes records/mutants.json")
    runs.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these alone, on any TensorFlow")
    runs.add_argument("--missing", action="store_true", help="only those that no recorded run has caught")
    runs.add_argument("--python", default=sys.executable, help="that has TensorFlow and pytest (default: this one)")
    runs.add_argument("--unchanged", action="store_true", help="plant nothing: the tests have to pass")
    commands.add_parser("page", help="write docs/mutants.md")
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 2
    try:
        if arguments.command == "run":
            return run(arguments)
    except Broken as broken:
        print(broken, file=sys.stderr)
        return 2
    with open(PAGE, "w", encoding="utf-8", newline="\n") as file:
        file.write(page(read_results()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
