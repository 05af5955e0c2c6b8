"""Find the names and versions of installed packages; nothing is imported."""

import os
import re
import sys
from typing import Dict


def packages(path=None) -> Dict[str, str]:
    """{name: version} on a module search path, as Python would import them.

    The names of folders say both. `importlib.metadata` starts with Python 3.8.
    """
    found: Dict[str, str] = {}
    for folder in sys.path if path is None else path:
        try:
            entries = sorted(os.listdir(folder or os.getcwd()))
        except OSError:  # a zip file, or a missing folder
            continue
        for distribution in filter(None, (re.match(r"(.+?)-(\d.*)\.dist-info$", entry) for entry in entries)):
            found.setdefault(re.sub(r"[-_.]+", "-", distribution.group(1)).lower(), distribution.group(2))
    return found


def release(version):
    """The numbers of a version: (2, 15, 0) for "2.15.0rc1"."""
    numbers = re.match(r"\D*(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in numbers.group(1).split(".")) if numbers else ()


def minor(version):
    """The minor version of a release of TensorFlow, Keras or Python: "2.15" for "2.15.0"."""
    return ".".join(str(part) for part in release(version)[:2])
