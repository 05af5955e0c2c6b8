"""Write constraints/tf*.txt from environments whose tests passed: `python project/pins.py [VERSION ...]`.

To resolve anew and pin the result:

    ACCUM_CONSTRAINTS=constraints/loose tox run      # the newest versions that constraints/loose allows
    python project/pins.py                           # pins exactly what passed
    python project/matrix.py                         # and reports it in MATRIX.md

The file of a TensorFlow holds the limits of constraints/loose, with their reasons, and the exact version of each
package that TensorFlow, tf-keras and tf-slim require, per Python where they differ. A wheel for every platform is
pinned on every platform; any other wheel only on Linux, where it was tested.
"""

import argparse
import json
import os
import re
import subprocess
import sys

import reports
from environments import data as matrix
from environments import environments

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
FOLDER = os.path.join(ROOT, "constraints")
ROOTS = ("tensorflow", "tensorflow-cpu", "tf-keras", "tf-slim")
"""What the library runs on. Packages that only its tests need, such as pytest, are not pinned."""

SIBLINGS = ("tensorflow", "tensorflow-cpu")
"""Two names for one build: the tested version of one is pinned for both."""

OWN_PATCHES = {("1.15", "tensorflow"): "1.15.5"}
"""Patches that only one of the siblings has. The environments run the other, tensorflow-cpu; the main tests passed with
these too, by hand, on both Pythons (2026-11-24)."""

BY_MACHINE = ("tensorflow", "tensorflow-cpu", "tensorflow-io-gcs-filesystem")
"""What has other patch releases for Linux aarch64: pinned for x86_64 alone."""

LEFT_TO_ARM_MACS = {
    "2.6": ("typing-extensions",),
    "2.7": ("six",),
    "2.8": ("six",),
    "2.9": ("six",),
    "2.12": ("jax",),
}
"""What tensorflow-macos or tensorflow-metal require another version of than Linux has: pinned elsewhere alone."""
NO_ARM_MAC = 'sys_platform != "darwin" or platform_machine != "arm64"'


class Refused(Exception):
    """The file of a TensorFlow can't be written; the message says why."""


def passed(path):
    return os.path.exists(path) and reports.is_pass(reports.counts(path))


def freezes(folder, junit):
    """{environment: freeze} of the Linux environments whose tests passed; with `junit` None, of all."""
    freezes = {}
    for entry in sorted(os.listdir(folder)):
        name, suffix = os.path.splitext(entry)
        if suffix != ".json" or (junit is not None and not passed(os.path.join(junit, name + ".xml"))):
            continue
        with open(os.path.join(folder, entry), encoding="utf-8") as file:
            frozen = json.load(file)
        if frozen["system"] == "linux" and not frozen["arguments"]:
            freezes[name] = frozen
    return freezes


def working(work_dir, frozen):
    """The environments in which smoke.py succeeds: plain TensorFlow may fail although it can be imported."""
    freezes = {}
    for name in sorted(frozen):
        python = os.path.join(work_dir, name, "bin", "python")
        command = [python, "-I", os.path.join(HERE, "smoke.py")]
        if not os.path.exists(python):
            print(f"{name}: the environment no longer exists, so it can't be tried.", file=sys.stderr)
        elif subprocess.call(command) != 0:
            print(f"{name}: plain TensorFlow fails in it.", file=sys.stderr)
        else:
            freezes[name] = frozen[name]
    return freezes


def needed(packages):
    """The packages of a freeze that are in ROOTS or required by them, directly or indirectly."""
    names, todo = set(), [root for root in ROOTS if root in packages]
    while todo:
        name = todo.pop()
        if name in names or name not in packages:
            continue
        names.add(name)
        plain = [text for text in packages[name]["requires"] if not re.search(r";.*\bextra\b", text)]
        todo += [re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", text).group()).lower() for text in plain]
    return {name: packages[name] for name in names}


def versions(tf_version, frozen):
    """{package: {python: version}} and the names of those that are wheels for every platform."""
    merged, platform_wheels = {}, set()
    for name, of, python, is_keras_2 in environments():
        if of != tf_version or (is_keras_2 and name not in frozen):
            continue
        if name not in frozen:
            raise Refused(f"{name}: no environment that passed")
        for package, about in needed(frozen[name]["packages"]).items():
            for twin in SIBLINGS if package in SIBLINGS else (package,):
                version = OWN_PATCHES.get((tf_version, twin), about["version"])
                there = merged.setdefault(twin, {}).setdefault(python, version)
                if there != version:
                    other = "with Keras 2" if is_keras_2 else "with Keras 3"
                    raise Refused(f"{name}: {twin} is {there}, and {version} {other}")
                if not about["pure"]:
                    platform_wheels.add(twin)
    return merged, set(merged) - platform_wheels


def pins(merged, pure, pythons, left_to_arm_macs=()):
    """The pins, one line for each package and version."""
    lines = []
    for package in sorted(merged):
        by_version = {}
        for python in pythons:
            if python in merged[package]:
                by_version.setdefault(merged[package][python], []).append(python)
        for version, on in by_version.items():
            markers = [] if package in pure else ['sys_platform == "linux"']
            if package in BY_MACHINE:
                markers.append('platform_machine == "x86_64"')
            if package in left_to_arm_macs:
                markers.append(f"({NO_ARM_MAC})" if markers or on != list(pythons) else NO_ARM_MAC)
            if on != list(pythons):
                either = " or ".join(f'python_version == "{python}"' for python in on)
                markers.append(f"({either})" if len(on) > 1 and markers else either)
            lines.append("{}=={}{}".format(package, version, "; " + " and ".join(markers) if markers else ""))
    return lines


HEAD = """\
# TensorFlow {tf_version}, for Python {first} to {last}.{note}
#     python -m pip install -c constraints/tf{tf_version}.txt . {install}
# Written by project/pins.py from environments on Linux x86_64, {date}: {proof}.
# Other systems share the pins of wheels for every system; the rest is left to pip there, within the limits below.
"""


def content(tf_version, frozen, is_proven):
    """The text of a TensorFlow's file."""
    pythons = matrix.pythons(tf_version)
    merged, pure = versions(tf_version, frozen)
    with open(os.path.join(FOLDER, "loose", f"tf{tf_version}.txt"), encoding="utf-8") as file:
        loose = file.read().strip().splitlines()
    dates = [frozen[name]["date"][:10] for name, of, _, _ in environments() if of == tf_version and name in frozen]
    head = HEAD.format(
        tf_version=tf_version,
        first=pythons[0],
        last=pythons[-1],
        note=" Static graphs only." if tf_version == "1.15" else "",
        install="tensorflow",
        date=" to ".join(sorted({min(dates), max(dates)})),
        proof="the tests passed in them" if is_proven else "plain TensorFlow trains in them, the tests have yet to run",
    )
    limits = "\n".join(text for text in loose if not text.startswith("# TensorFlow "))
    return "{}\n# limits, by hand\n{}\n\n# what was installed\n{}\n".format(
        head, limits, "\n".join(pins(merged, pure, pythons, LEFT_TO_ARM_MACS.get(tf_version, ())))
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="such as 2.10 (default: all that were measured)")
    parser.add_argument("--work-dir", default=os.path.join(ROOT, ".tox"), help="where freeze/ and junit/ are")
    parser.add_argument("--unproven", action="store_true", help="without tests, by project/smoke.py alone")
    arguments = parser.parse_args(argv)
    unknown = [tf_version for tf_version in arguments.versions if tf_version not in matrix.VERSIONS]
    if unknown:
        parser.error(f"VERSION must be one of the matrix. Received: {' '.join(unknown)}")
    junit = None if arguments.unproven else os.path.join(arguments.work_dir, "junit")
    folder = os.path.join(arguments.work_dir, "freeze")
    if not os.path.isdir(folder):
        parser.error(f"no environments in {folder}: run tox first.")
    frozen = freezes(folder, junit)
    if arguments.unproven:
        frozen = working(arguments.work_dir, frozen)
    measured = [tf_version for name, tf_version, _, _ in environments() if name in frozen]
    status = 0
    for tf_version in arguments.versions or sorted(set(measured), key=matrix.VERSIONS.index):
        try:
            text = content(tf_version, frozen, not arguments.unproven)
        except Refused as refused:
            print(f"tf{tf_version}: left as it is. {refused}", file=sys.stderr)
            status = 1
            continue
        with open(os.path.join(FOLDER, f"tf{tf_version}.txt"), "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        print(f"constraints/tf{tf_version}.txt")
    return status


if __name__ == "__main__":
    sys.exit(main())
