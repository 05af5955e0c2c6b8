"""Record the packages of a tox environment before its tests run.

    python project/freeze.py WORK_DIR ENV_NAME [ARGUMENTS]

The environment's own Python, 3.6 included, runs it, so it needs only the standard library. It writes
WORK_DIR/freeze/ENV_NAME.json and removes WORK_DIR/junit/ENV_NAME.xml. So a report beside a freeze always belongs to the
same run, and an interrupted run leaves no report. ARGUMENTS are those passed to pytest to run only part of the suite.
"""

import datetime
import json
import os
import platform
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def system():
    """The operating system and machine as the evidence names them: linux, windows, macos-arm64, macos-x86_64."""
    machine = {"amd64": "x86_64", "aarch64": "arm64"}.get(platform.machine().lower(), platform.machine().lower())
    if sys.platform == "darwin":
        return "macos-" + machine
    name = "windows" if sys.platform == "win32" else "linux"
    return name if machine == "x86_64" else f"{name}-{machine}"


def commit(root=ROOT):
    """The commit that is checked out; None if it is unknown, or if files that git knows differ from it."""
    git = ["git", "-C", root]
    try:
        changed = subprocess.check_output(
            git + ["status", "--porcelain", "--untracked-files=no"], stderr=subprocess.DEVNULL
        )
        named = subprocess.check_output(git + ["rev-parse", "--short=10", "HEAD"], stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return None
    return None if changed else named.decode("ascii").strip()


def _pure(wheel_text):
    """Whether a wheel was built for every platform, according to its WHEEL file."""
    tags = re.findall(r"(?m)^Tag: *\S+-\S+-(\S+)", wheel_text or "")
    return bool(tags) and set(tags) == {"any"}


def installed():
    """{name: {"version", "requires", "pure"}} of the packages in this environment."""
    packages = {}
    for folder in sys.path:
        if not os.path.isdir(folder):
            continue
        for entry in sorted(os.listdir(folder)):
            metadata = os.path.join(folder, entry, "METADATA")
            if not entry.endswith(".dist-info") or not os.path.isfile(metadata):
                continue
            with open(metadata, encoding="utf-8", errors="replace") as file:
                head = file.read().split("\n\n")[0]
            wheel = os.path.join(folder, entry, "WHEEL")
            text = None
            if os.path.isfile(wheel):
                with open(wheel, encoding="utf-8", errors="replace") as file:
                    text = file.read()
            name = canonical(re.search(r"(?m)^Name: *(\S+)", head).group(1))
            about = {
                "version": re.search(r"(?m)^Version: *(\S+)", head).group(1),
                "requires": re.findall(r"(?m)^Requires-Dist: *(.+?)\s*$", head),
                "pure": _pure(text),
            }
            packages.setdefault(name, about)  # the first on the path is the one that is imported
    return packages


def freeze(arguments):
    return {
        "arguments": arguments,
        "date": datetime.datetime.utcnow().strftime("%Y-%m-%dT%H:%MZ"),
        "system": system(),
        "python": platform.python_version(),
        "commit": commit(),
        "packages": installed(),
    }


def main(argv):
    work_dir, env_name = argv[:2]
    report = os.path.join(work_dir, "junit", env_name + ".xml")
    if os.path.exists(report):
        os.remove(report)
    os.makedirs(os.path.join(work_dir, "freeze"), exist_ok=True)
    with open(os.path.join(work_dir, "freeze", env_name + ".json"), "w", encoding="utf-8") as file:
        json.dump(freeze(argv[2:]), file, indent=1, sort_keys=True)
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1:])
