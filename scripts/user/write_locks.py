"""Write the locks: for each environment of the matrix, the exact packages to install and the sha256 of their files.

    python scripts/user/write_locks.py           into locks/
    python scripts/user/write_locks.py FOLDER

Their one source is accum/_cli/doctor/locks.json, which the package includes: `python -m accum doctor --pins NAME`
prints a single lock. Any Python from 3.6 on runs this; nothing needs to be installed.
"""

import argparse
import importlib.util
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FOLDER = os.path.join(ROOT, "locks")
OURS = re.compile(r"py3\d+-tf\d+\.\d+(-\w+)?\.txt|pylock\.py3\d+-tf\d+_\d+(-\w+)?\.toml")
"""The names of locks."""

PIPS = {"3.6": "21.3.1", "3.7": "24.0", "3.8": "25.0.1", "3.9": "26.0.1"}
"""The last pip of each old Python; the pip that comes with these Pythons may be too old for the locks."""


def _load(path):
    """The module at `path`, without its package, which would import TensorFlow."""
    spec = importlib.util.spec_from_file_location("locks_data", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


data = _load(os.path.join(ROOT, "accum", "_cli", "doctor", "locks.py"))


def texts(record):
    """{file name: text} of all locks, in both forms, and of the last pips."""
    files = {
        data.file_name(env_name, form): render(record, data.lock(record, env_name))
        for env_name in record["locks"]
        for form, render in data.FORMS.items()
    }
    return dict(files, **{"pip.txt": pip_text(record)})


def pip_text(record):
    """The last pip of each old Python, for pips that are older."""
    lines = ["# The last pip of each Python up to 3.9: python -m pip install --require-hashes -r pip.txt"]
    for python, version in PIPS.items():
        files = [data.File(name, sha) for name, sha in record["files"]["pip"][version].items()]
        lines.append(data.hashed(f'pip=={version} ; python_version == "{python}"', files))
    return "\n".join(lines) + "\n"


def write(record, folder):
    """Write all locks into a folder, and remove those that an older record had. Returns how many there are now."""
    os.makedirs(folder, exist_ok=True)
    wanted = texts(record)
    for name in os.listdir(folder):
        if OURS.fullmatch(name) and name not in wanted:
            os.remove(os.path.join(folder, name))
    for name, text in wanted.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
    return len(wanted)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default=FOLDER, metavar="FOLDER", help="default: locks/ of this checkout")
    arguments = parser.parse_args(argv)
    print(f"{write(data.read(), arguments.folder)} files are in {arguments.folder}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
