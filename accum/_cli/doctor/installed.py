"""List the installed packages from their metadata; nothing is imported.

The metadata are parsed here because `importlib.metadata` starts with Python 3.8, `pkg_resources` ended with setuptools
81, and a package that is installed twice must be seen twice.
"""

import os
import re
import sys
from typing import Any, Dict, List, NamedTuple, Optional, Tuple


class Package(NamedTuple):
    name: str
    version: str
    requires: List[str]
    folder: str
    license_expression: Optional[str] = None
    license_words: Tuple[str, ...] = ()


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def packages(path=None):
    """{name: [Package, ...]} on a module search path; Python imports the first of each list."""
    packages: Dict[Any, Any] = {}
    for folder in _unique(sys.path if path is None else path):
        for entry in _entries(folder):
            package = _read(os.path.join(folder, entry), folder)
            if package is not None:
                packages.setdefault(package.name, []).append(package)
    return packages


def _unique(path):
    folders = [os.path.realpath(folder or os.getcwd()) for folder in path]
    return sorted(set(folders), key=folders.index)


def _entries(folder):
    try:
        return sorted(name for name in os.listdir(folder) if name.endswith((".dist-info", ".egg-info")))
    except OSError:  # a zip file, or a missing folder
        return []


def _read(entry, folder):
    for name in ("METADATA", "PKG-INFO"):
        try:
            with open(os.path.join(entry, name), encoding="utf-8", errors="replace") as file:
                head = file.read().split("\n\n")[0]
        except OSError:
            continue
        name, version = _field(head, "Name"), _field(head, "Version")
        if name and version:
            expression = _field(head, "License-Expression")
            classifiers = [text for text in _field(head, "Classifier") if text.startswith("License ::")]
            words = _field(head, "License") + [text.split("::")[-1].strip() for text in classifiers]
            about = _field(head, "Requires-Dist"), folder, (expression or [None])[0], tuple(words)
            return Package(canonical(name[0]), version[0], *about)
    return None


def _field(head, name):
    return re.findall(r"(?mi)^{}: *(.+?)\s*$".format(name), head)


# ----------------------------------------------------------------------------------------------------------------
# Versions


def release(version):
    """The numbers of a version: (2, 15, 0) for "2.15.0rc1"."""
    numbers = re.match(r"\D*(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in numbers.group(1).split(".")) if numbers else ()


def key(version):
    """A version as numbers that compare: 2.10 is 2.10.0."""
    numbers = release(version)
    return tuple(numbers) + (0,) * (6 - len(numbers))


def numbers(text):
    """A text with its numbers as numbers, for sorting: CVE-2021-9 comes before CVE-2021-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def minor(version):
    """The minor version of a release of TensorFlow, Keras or Python: "2.15" for "2.15.0"."""
    return ".".join(str(part) for part in release(version)[:2])


def fits(version, limits):
    """Whether a version is within limits such as "<2,>=1.23.5"; limits that are not understood are ignored."""
    return all(_fits(release(version), *limit) for limit in re.findall(r"(~=|[=!<>]=|<|>)\s*([^\s,;()]+)", limits))


def _fits(numbers, operator, text):
    other = release(text)
    width = max(len(numbers), len(other))
    ours, theirs = (parts + (0,) * (width - len(parts)) for parts in (numbers, other))
    if operator in ("==", "!="):
        same = ours[: len(other)] == other if text.endswith(".*") else ours == theirs
        return same == (operator == "==")
    if operator == "~=":
        return ours >= theirs and ours[: len(other) - 1] == other[:-1]
    return {"<": ours < theirs, ">": ours > theirs, "<=": ours <= theirs, ">=": ours >= theirs}[operator]


def requirements(package):
    """[(name, limits)] of the requirements that a package has on every system and Python."""
    plain = [text for text in package.requires if ";" not in text]
    split = [re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*\(?([^)]*)", text) for text in plain]
    return [(canonical(match.group(1)), match.group(2).strip()) for match in split if match]
