"""Make each known mistake of gradient accumulation on purpose, and see whether the tests notice.

    python project/mutants.py check                # whether each still fits the sources; a second, any Python
    python project/mutants.py run                  # all mutants of the TensorFlow that is installed: ten minutes
    python project/mutants.py run --only NAME ...  # some of them
    python project/mutants.py run --unchanged      # their tests on the unchanged sources, which have to pass
    python project/mutants.py page                 # write pages/mutants.md from records/mutants.json

The mistakes are in project/mutants.txt. Each is planted in a copy of the package, which the tests then import; the
sources are not touched. The text that a mutant replaces must occur exactly once: a change that moves it fails here and
in project/tests/test_mutants.py, so that no mutant is lost unnoticed. `run` needs Python 3.8 or later; `--python` may
be older.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from typing import List, NamedTuple, Tuple

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
LIST = os.path.join(HERE, "mutants.txt")
RESULTS = os.path.join(HERE, "records", "mutants.json")
PAGE = os.path.join(HERE, "pages", "mutants.md")

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
# Mutants

Gradient accumulation is easy to get almost right. This page lists {count} mistakes, many of them found in other
libraries. Each was planted in a copy of accum's sources, one at a time, and the test that should notice it ran on this
mutant. The last column names the test that failed. A mutant that no test noticed would be a hole in the tests.

`python project/mutants.py page` writes this page. The runs are of {dates}, on TensorFlow {versions}. The numbers L1
to L20 are those of the [guarantees](guarantees.md).

| the mistake | breaks | found in | caught by |
|---|---|---|---|
"""


class Broken(Exception):
    """A mutant can't be read or made, or its tests can't be run; the message names it."""


class Mutant(NamedTuple):
    """A mutant; mutants.txt says what its fields are. `edits` are of a file, an old and a new text."""

    name: str
    law: str
    says: str
    edits: List[Tuple[str, str, str]]
    tests: List[str]
    seen: List[str]
    tensorflow: str


def read(path=LIST):
    """The mutants in a file, in its order."""
    with open(path, encoding="utf-8") as file:
        text = re.sub(r"(?m)^#.*\n", "", file.read())
    blocks = re.split(r"(?m)^\[(\w+)\]\n", text)
    if blocks[0].strip():
        raise Broken(f"{path}: a mutant must begin with [name]. Received: {blocks[0].strip()}")
    return [_mutant(name, body) for name, body in zip(blocks[1::2], blocks[2::2])]


def _mutant(name, body):
    fields, edits = {}, []
    for line in body.splitlines():
        key, _, value = line.partition(": ")
        if line.startswith("edit "):
            edits.append((line[len("edit ") :], [], []))
        elif line[:1] in ("-", "+") and edits:
            edits[-1]["-+".index(line[0]) + 1].append(line[1:])
        elif key in ("law", "says", "test", "seen", "tensorflow") and value and not edits:
            fields.setdefault(key, []).append(value)
        elif line:
            raise Broken(f"{name}: a line must be a field, an edit, or begin with - or +. Received: {line}")
    lacking = [key for key in ("law", "says", "test") if key not in fields]
    if lacking or not all(old and new for _, old, new in edits) or not edits:
        raise Broken(f"{name}: it must have {', '.join(lacking) or 'edits, each with - and + lines'}.")
    texts = [(file, "\n".join(old), "\n".join(new)) for file, old, new in edits]
    (law,), (says,), (version,) = fields["law"], fields["says"], fields.get("tensorflow", ["2.15"])
    return Mutant(name, law, says, texts, fields["test"], fields.get("seen", []), version)


MUTANTS = read()


def edited(mutant, path_of):
    """{path: text} of the files that a mutant changes; `place` maps the name of a file to its path."""
    texts = {}
    for name, old, new in mutant.edits:
        path = path_of(name)
        if path not in texts:
            if not os.path.isfile(path):
                raise Broken(f"{mutant.name}: there is no file {name}")
            with open(path, encoding="utf-8") as file:
                texts[path] = file.read()
        if texts[path].count(old) != 1:
            raise Broken(f"{mutant.name}: the text to replace occurs {texts[path].count(old)} times in {name}:\n{old}")
        texts[path] = texts[path].replace(old, new)
    return texts


def in_checkout(name):
    return os.path.join(ROOT, *name.split("/"))


def plant(mutant, folder):
    """Make the edits of a mutant in the copy of the sources that is in `folder`."""

    def in_copy(name):  # which holds the static-graph package where it is installed
        return os.path.join(folder, *("accum/" + name if name.startswith("compat/") else name).split("/"))

    for path, text in edited(mutant, in_copy).items():
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)


def copy_sources(folder):
    """Copy the package to `folder`, with a plugin that checks that pytest imports this copy."""
    ignored = shutil.ignore_patterns("__pycache__", "compat")
    shutil.copytree(os.path.join(ROOT, "accum"), os.path.join(folder, "accum"), ignore=ignored)
    shutil.copytree(os.path.join(ROOT, "compat"), os.path.join(folder, "accum", "compat"), ignore=ignored)
    with open(os.path.join(folder, "only_this_copy.py"), "w", encoding="utf-8") as file:
        file.write(PLUGIN)


def tested(mutant, python, folder):
    """Run the tests of a mutant on the sources in `folder`, up to the first that fails.

    Returns:
      (seconds, None if all pass, otherwise the failed test and the beginning of its message).
    """
    report = os.path.join(folder, "report.xml")
    environment = dict(os.environ, PYTHONPATH=folder, PYTHONDONTWRITEBYTECODE="1")
    arguments = [os.path.join(ROOT, part) if part.startswith("tests/") else part for part in mutant.tests]
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
        raise Broken(f"{mutant.name}: its tests can't be run (exit status {done.returncode}).\n{done.stdout[-3000:]}")
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
    """Make mutants and run their tests. Returns the exit status: 1 if one was not caught."""
    names = [mutant.name for mutant in MUTANTS]
    unknown = [name for name in arguments.only if name not in names]
    if unknown:
        raise Broken(f"NAME must be one of: {' '.join(names)}. Received: {' '.join(unknown)}")
    version = version_of(arguments.python)
    tf_version = ".".join(version.split(".")[:2])
    chosen = [
        mutant
        for mutant in MUTANTS
        if (mutant.name in arguments.only if arguments.only else mutant.tensorflow == tf_version)
    ]
    if arguments.missing:
        recorded = read_results()
        chosen = [mutant for mutant in chosen if not recorded.get(mutant.name, {}).get("caught")]
    missed = []
    for mutant in chosen:
        try:
            with tempfile.TemporaryDirectory() as folder:
                copy_sources(folder)
                if not arguments.unchanged:
                    plant(mutant, folder)
                seconds, failure = tested(mutant, arguments.python, folder)
        except Broken as broken:
            print(broken, file=sys.stderr, flush=True)
            missed.append(mutant.name)
            continue
        is_right = (failure is None) if arguments.unchanged else (failure is not None)
        print("{:<36} {:>4} s  {}".format(mutant.name, seconds, failure or "passed"), flush=True)
        if not is_right:
            missed.append(mutant.name)
        if not arguments.unchanged:
            results = read_results()  # anew, because another run may have written meanwhile
            results[mutant.name] = {
                "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
                "tensorflow": version,
                "seconds": seconds,
                "caught": failure,
            }
            recorded = {name: results[name] for name in names if name in results}
            with open(RESULTS, "w", encoding="utf-8", newline="\n") as file:
                file.write(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")
    if missed:
        print("Failed on the unchanged sources: " if arguments.unchanged else "Not caught: ", " ".join(missed))
    return 1 if missed else 0


def check():
    """Print which mutants do not fit the sources. Returns the exit status."""
    problems = []
    for mutant in MUTANTS:
        try:
            edited(mutant, in_checkout)
        except Broken as broken:
            problems.append(str(broken))
    print("\n".join(problems) or f"{len(MUTANTS)} mutants fit the sources.")
    return 1 if problems else 0


def page(results):
    """The text of pages/mutants.md."""
    listed = [mutant for mutant in MUTANTS if mutant.name in results]
    records = [results[mutant.name] for mutant in listed]
    dates = sorted({record["date"] for record in records})
    versions = sorted({record["tensorflow"] for record in records})
    text = HEAD.format(
        count=len(listed), dates=" to ".join(sorted({dates[0], dates[-1]})), versions=" and ".join(versions)
    )
    for mutant in listed:
        caught = results[mutant.name]["caught"]
        seen = ", ".join("[{}]({})".format(what, _address(what)) for what in mutant.seen) or "–"
        test = f"`{caught['test'].split('[')[0]}`" if caught else "**nothing**"
        text += f"| {mutant.says} | {mutant.law} | {seen} | {test} |\n"
    return text


def _address(what):
    repository, number = what.split("#")
    return f"https://github.com/{repository}/issues/{number}"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", metavar="check | run | page")
    commands.add_parser("check", help="name the mutants that no longer fit the sources, with status 1")
    runs = commands.add_parser("run", help="make the mutants and run their tests; writes records/mutants.json")
    runs.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these alone, on any TensorFlow")
    runs.add_argument("--missing", action="store_true", help="only those that no recorded run has caught")
    runs.add_argument("--python", default=sys.executable, help="that has TensorFlow and pytest (default: this one)")
    runs.add_argument("--unchanged", action="store_true", help="plant nothing: the tests have to pass")
    commands.add_parser("page", help="write pages/mutants.md")
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 2
    if arguments.command == "check":
        return check()
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
