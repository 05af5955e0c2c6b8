"""What is installed, by its metadata: nothing of it is imported.

Read by hand, since `importlib.metadata` begins with Python 3.8 and `pkg_resources` ended with setuptools 81; so that a
package that is there twice is seen twice.
"""

import collections
import os
import re
import sys

Package = collections.namedtuple("Package", "name version requires folder")


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def packages(path=None):
    """{name: [Package, ...]} on a module search path; of several, the first is the one that Python imports."""
    found = {}
    for folder in _unique(sys.path if path is None else path):
        for entry in _entries(folder):
            package = _read(os.path.join(folder, entry), folder)
            if package is not None:
                found.setdefault(package.name, []).append(package)
    return found


def _unique(path):
    folders = [os.path.realpath(folder or os.getcwd()) for folder in path]
    return sorted(set(folders), key=folders.index)


def _entries(folder):
    try:
        return sorted(name for name in os.listdir(folder) if name.endswith((".dist-info", ".egg-info")))
    except OSError:  # a zip file, or a folder that is not there
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
            return Package(canonical(name[0]), version[0], _field(head, "Requires-Dist"), folder)
    return None


def _field(head, name):
    return re.findall(r"(?mi)^{}: *(.+?)\s*$".format(name), head)


# ----------------------------------------------------------------------------------------------------------------
# Versions


def release(version):
    """The numbers of a version: (2, 15, 0) of "2.15.0rc1"."""
    numbers = re.match(r"\D*(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in numbers.group(1).split(".")) if numbers else ()


def line(version):
    """The line of a TensorFlow or Keras version: "2.15" of "2.15.0"."""
    return ".".join(str(part) for part in release(version)[:2])


def fits(version, limits):
    """Whether a version is within limits such as "<2,>=1.23.5"; what is not understood is taken to fit."""
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
    """[(name, limits)] of what a package requires on every system and Python."""
    plain = [text for text in package.requires if ";" not in text]
    split = [re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*\(?([^)]*)", text) for text in plain]
    return [(canonical(match.group(1)), match.group(2).strip()) for match in split if match]
