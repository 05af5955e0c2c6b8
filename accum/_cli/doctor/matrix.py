"""The matrix as data: which TensorFlow versions run on which Pythons and systems, and which packages they need.

The scripts of project/ read it too; a test compares it with the environments of tox.ini.
"""

import re

_PYTHONS = {
    "1.15": "3.6 3.7",
    "2.2 2.3 2.4": "3.6 3.7 3.8",
    "2.5 2.6": "3.6 3.7 3.8 3.9",
    "2.7": "3.7 3.8 3.9",
    "2.8 2.9 2.10 2.11": "3.7 3.8 3.9 3.10",
    "2.12 2.13": "3.8 3.9 3.10 3.11",
    "2.14 2.15": "3.9 3.10 3.11",
    "2.16 2.17 2.18 2.19": "3.9 3.10 3.11 3.12",
    "2.20": "3.9 3.10 3.11 3.12 3.13",
    "2.21": "3.10 3.11 3.12 3.13",
}
PYTHONS = {version: tuple(_PYTHONS[names].split()) for names in _PYTHONS for version in names.split()}
"""The Pythons for which each TensorFlow version has wheels on Linux x86_64, from the oldest to the newest."""

VERSIONS = tuple(PYTHONS)

SYSTEMS = {
    "linux": "Linux x86_64",
    "linux-arm64": "Linux aarch64",
    "windows": "Windows",
    "macos-x86_64": "macOS on Intel",
    "macos-arm64": "macOS on Apple silicon",
}
"""The systems of the matrix, by their names in results."""

_FIRST_AND_LAST = {
    "linux-arm64": ("2.10", VERSIONS[-1]),
    "macos-x86_64": (VERSIONS[0], "2.16"),
    "macos-arm64": ("2.5", VERSIONS[-1]),
}
"""For systems that do not have all versions."""


def pythons(version, system="linux"):
    """The Pythons on which a TensorFlow version is supported; () for one, or a system, outside the matrix."""
    first, last = _FIRST_AND_LAST.get(system, (VERSIONS[0], VERSIONS[-1]))
    if version not in PYTHONS or system not in SYSTEMS or is_after(first, version) or is_after(version, last):
        return ()
    missing = () if system != "macos-arm64" else ("3.6", "3.7", "3.10") if version == "2.8" else ("3.6", "3.7")
    return tuple(python for python in PYTHONS[version] if python not in missing)


def versions(python, system="linux"):
    """The TensorFlow versions that support a Python, from the oldest to the newest."""
    return [version for version in VERSIONS if python in pythons(version, system)]


def is_after(version, other):
    return release(version) > release(other)


def has_keras_3(version):
    """Whether Keras 3 is the default of a TensorFlow version, so that Keras 2 must be requested."""
    return is_after(version, "2.15")


def env_name(python, version, keras_2=False):
    """The name of an environment in tox.ini: py311-tf2.15, py311-tf2.16 (Keras 3) or py311-tf2.16-keras2."""
    return "py{}-tf{}{}".format(python.replace(".", ""), version, "-keras2" if keras_2 and has_keras_3(version) else "")


def distribution(version, system):
    """The distribution that pip must install to get a TensorFlow version on a system."""
    return "tensorflow-macos" if system == "macos-arm64" and not is_after(version, "2.12") else "tensorflow"


def release(version):
    """The numbers of a version: (2, 15, 0) for "2.15.0rc1"."""
    numbers = re.match(r"\D*(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in numbers.group(1).split(".")) if numbers else ()


def minor(version):
    """The minor version of a release of TensorFlow, Keras or Python: "2.15" for "2.15.0"."""
    return ".".join(str(part) for part in release(version)[:2])
