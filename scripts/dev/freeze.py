"""Record the packages of a tox environment before its tests run.

    python scripts/dev/freeze.py WORK_DIR ENV_NAME [ARGUMENTS]

The environment's own Python, 3.6 included, runs it, so it needs only the standard library. It writes
WORK_DIR/freeze/ENV_NAME.json and removes WORK_DIR/junit/ENV_NAME.xml. So a report beside a freeze always belongs to the
same run, and an interrupted run leaves no report. ARGUMENTS are those passed to pytest to run only part of the suite;
PYTEST_ADDOPTS are those by which tox.ini selects the tests of an environment by their marks.
"""

import datetime
import hashlib
import json
import os
import platform
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SOURCES = ["accum", "compat", "tests", "setup.py"]
"""A result holds for the sources with the same digest."""


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def system():
    """The operating system and machine as the evidence names them: linux, windows, macos-arm64, macos-x86_64."""
    machine = {"amd64": "x86_64", "aarch64": "arm64"}.get(platform.machine().lower(), platform.machine().lower())
    if sys.platform == "darwin":
        return "macos-" + machine
    name = "windows" if sys.platform == "win32" else "linux"
    return name if machine == "x86_64" else f"{name}-{machine}"


def source_digest(root=ROOT):
    """A digest of the files in SOURCES, the same on every operating system."""
    paths = []
    for source in SOURCES:
        path = os.path.join(root, source)
        if os.path.isfile(path):
            paths.append(path)
        for folder, folders, files in os.walk(path):
            folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
            paths += [os.path.join(folder, name) for name in files if not name.endswith((".pyc", ".pyo"))]
    digest = hashlib.sha256()
    # A checkout without symbolic links has a file in the place of accum/compat; it ships nowhere.
    link = os.path.join(root, "accum", "compat")
    for path in sorted(set(paths) - {link}):
        with open(path, "rb") as file:
            content = file.read().replace(b"\r\n", b"\n")
        name = os.path.relpath(path, root).replace(os.sep, "/")
        digest.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode("utf-8"))
    return digest.hexdigest()[:16]


def commit(root=ROOT):
    """The commit that is checked out, or None if unknown."""
    command = ["git", "-C", root, "rev-parse", "--short=10", "HEAD"]
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL).decode("ascii").strip()
    except (OSError, subprocess.CalledProcessError):
        return None


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


def freeze(env_name, arguments):
    return {
        "cell": env_name,
        "arguments": arguments,
        "options": os.environ.get("PYTEST_ADDOPTS"),
        "date": datetime.datetime.utcnow().strftime("%Y-%m-%dT%H:%MZ"),
        "system": system(),
        "python": platform.python_version(),
        "commit": commit(),
        "sources": source_digest(),
        "packages": installed(),
    }


def main(argv):
    work_dir, env_name = argv[:2]
    report = os.path.join(work_dir, "junit", env_name + ".xml")
    if os.path.exists(report):
        os.remove(report)
    os.makedirs(os.path.join(work_dir, "freeze"), exist_ok=True)
    with open(os.path.join(work_dir, "freeze", env_name + ".json"), "w", encoding="utf-8") as file:
        json.dump(freeze(env_name, argv[2:]), file, indent=1, sort_keys=True)
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1:])
