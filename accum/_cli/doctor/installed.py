"""List the installed packages from their metadata; nothing is imported.

The metadata are parsed here because `importlib.metadata` starts with Python 3.8, and `pkg_resources` ended with
setuptools 81.
"""

import os
import re
import sys
from typing import Dict


def packages(path=None) -> Dict[str, str]:
    """{name: version} on a module search path, as Python would import them."""
    found: Dict[str, str] = {}
    for folder in sys.path if path is None else path:
        for entry in _entries(folder or os.getcwd()):
            name, version = _name_and_version(entry)
            if name and version:
                found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return found


def _entries(folder):
    try:
        names = sorted(os.listdir(folder))
    except OSError:  # a zip file, or a missing folder
        return []
    return [os.path.join(folder, name) for name in names if name.endswith((".dist-info", ".egg-info"))]


def _name_and_version(entry):
    for file_name in ("METADATA", "PKG-INFO"):
        try:
            with open(os.path.join(entry, file_name), encoding="utf-8", errors="replace") as file:
                head = file.read().split("\n\n")[0]
        except OSError:
            continue
        fields = [re.search(rf"(?mi)^{field}: *(.+?)\s*$", head) for field in ("Name", "Version")]
        return tuple(field and field.group(1) for field in fields)
    return None, None


def release(version):
    """The numbers of a version: (2, 15, 0) for "2.15.0rc1"."""
    numbers = re.match(r"\D*(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in numbers.group(1).split(".")) if numbers else ()


def minor(version):
    """The minor version of a release of TensorFlow, Keras or Python: "2.15" for "2.15.0"."""
    return ".".join(str(part) for part in release(version)[:2])
