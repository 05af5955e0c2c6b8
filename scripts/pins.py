"""Write constraints/tf*.txt from environments whose tests passed: `python scripts/pins.py [LINE ...]`.

A fresh resolution and what follows from it:

    ACCUM_CONSTRAINTS=constraints/loose tox run      # the newest of everything that constraints/loose leaves open
    python scripts/pins.py                    # pins exactly what passed
    python scripts/evidence.py                       # and says so in MATRIX.md

A file of a line is what constraints/loose says, with its reasons, and the exact version of each package that
TensorFlow, tf-keras and tf-slim pull in, per Python where they differ. A wheel for every platform is pinned on every
platform, any other where it was measured: on Linux.
"""

import argparse
import json
import os
import re
import sys

import reports
from matrix import data as matrix

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDER = os.path.join(ROOT, "constraints")
ROOTS = ("tensorflow", "tensorflow-cpu", "tf-keras", "tf-slim")
"""What the library runs on. What only its tests need, such as pytest, is the user's own to choose."""

SIBLINGS = ("tensorflow", "tensorflow-cpu")
"""Two names for one build: the version of the one that was measured is pinned for both."""


class Refused(Exception):
    """A line whose file can't be written, and why."""


def passed(path):
    return os.path.exists(path) and reports.is_pass(reports.counts(path))


def freezes(folder, junit):
    """{cell: freeze} of the Linux cells whose tests passed; with `junit` None, of all."""
    found = {}
    for entry in sorted(os.listdir(folder)):
        name, suffix = os.path.splitext(entry)
        if suffix != ".json" or (junit is not None and not passed(os.path.join(junit, name + ".xml"))):
            continue
        with open(os.path.join(folder, entry), encoding="utf-8") as file:
            frozen = json.load(file)
        if frozen["system"] == "linux" and not frozen["arguments"]:
            found[name] = frozen
    return found


def needed(packages):
    """Those of a freeze's packages that ROOTS are or require, one through the other."""
    names, todo = set(), [root for root in ROOTS if root in packages]
    while todo:
        name = todo.pop()
        if name in names or name not in packages:
            continue
        names.add(name)
        plain = [text for text in packages[name]["requires"] if not re.search(r";.*\bextra\b", text)]
        todo += [re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", text).group()).lower() for text in plain]
    return {name: packages[name] for name in names}


def versions(line, frozen):
    """{package: {python: version}} and the names of those that are wheels for every platform."""
    merged, platform_wheels = {}, set()
    for name, of, python, is_keras_2 in matrix.cells():
        if of != line or (is_keras_2 and name not in frozen):
            continue
        if name not in frozen:
            raise Refused("{}: no environment that passed".format(name))
        for package, about in needed(frozen[name]["packages"]).items():
            for twin in SIBLINGS if package in SIBLINGS else (package,):
                there = merged.setdefault(twin, {}).setdefault(python, about["version"])
                if there != about["version"]:
                    other = "with Keras 2" if is_keras_2 else "with Keras 3"
                    raise Refused("{}: {} is {}, and {} {}".format(name, twin, there, about["version"], other))
                if not about["pure"]:
                    platform_wheels.add(twin)
    return merged, set(merged) - platform_wheels


def pins(merged, pure, pythons):
    """The lines that pin: one for each package and version."""
    lines = []
    for package in sorted(merged):
        by_version = {}
        for python in pythons:
            if python in merged[package]:
                by_version.setdefault(merged[package][python], []).append(python)
        for version, on in by_version.items():
            markers = [] if package in pure else ['sys_platform == "linux"']
            if on != list(pythons):
                either = " or ".join('python_version == "{}"'.format(python) for python in on)
                markers.append("({})".format(either) if len(on) > 1 and markers else either)
            lines.append("{}=={}{}".format(package, version, "; " + " and ".join(markers) if markers else ""))
    return lines


HEAD = """\
# TensorFlow {line}, for Python {first} to {last}.{note}
#     python -m pip install -c constraints/tf{line}.txt . {install}
# Written by scripts/pins.py from environments on Linux x86_64, {date}: {proof}.
# Other systems share the pins of wheels for every system; the rest is left to pip there, within the limits below.
"""


def content(line, frozen, is_proven):
    """The text of a line's file."""
    pythons = matrix.pythons(line)
    merged, pure = versions(line, frozen)
    with open(os.path.join(FOLDER, "loose", "tf{}.txt".format(line)), encoding="utf-8") as file:
        loose = file.read().strip().splitlines()
    dates = [frozen[name]["date"][:10] for name, of, _, _ in matrix.cells() if of == line and name in frozen]
    head = HEAD.format(
        line=line,
        first=pythons[0],
        last=pythons[-1],
        note="" if matrix.has_keras_face(line) else " Static graphs only.",
        install="tensorflow",
        date=" to ".join(sorted({min(dates), max(dates)})),
        proof="the tests passed in them" if is_proven else "TensorFlow imports in them, the tests have yet to run",
    )
    limits = "\n".join(text for text in loose if not text.startswith("# TensorFlow "))
    return "{}\n# limits, by hand\n{}\n\n# what was installed\n{}\n".format(
        head, limits, "\n".join(pins(merged, pure, pythons))
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("lines", nargs="*", metavar="LINE", help="such as 2.10 (default: all that were measured)")
    parser.add_argument("--work-dir", default=os.path.join(ROOT, ".tox"), help="where freeze/ and junit/ are")
    parser.add_argument("--unproven", action="store_true", help="take environments without a report of their tests too")
    arguments = parser.parse_args(argv)
    unknown = [line for line in arguments.lines if line not in matrix.LINES]
    if unknown:
        parser.error("LINE must be one of the matrix. Received: {}".format(" ".join(unknown)))
    junit = None if arguments.unproven else os.path.join(arguments.work_dir, "junit")
    folder = os.path.join(arguments.work_dir, "freeze")
    if not os.path.isdir(folder):
        parser.error("no environments in {}: run tox first.".format(folder))
    frozen = freezes(folder, junit)
    measured = [line for name, line, _, _ in matrix.cells() if name in frozen]
    status = 0
    for line in arguments.lines or sorted(set(measured), key=matrix.LINES.index):
        try:
            text = content(line, frozen, not arguments.unproven)
        except Refused as refused:
            print("tf{}: left as it is. {}".format(line, refused), file=sys.stderr)
            status = 1
            continue
        with open(os.path.join(FOLDER, "tf{}.txt".format(line)), "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        print("constraints/tf{}.txt".format(line))
    return status


if __name__ == "__main__":
    sys.exit(main())
