"""The matrix as data: which TensorFlow versions run on which Pythons and systems, and which packages they need.

The scripts of project/ read it too; a test compares it with the environments of tox.ini.
"""

PYTHONS = {
    "1.15": ("3.6", "3.7"),
    "2.2": ("3.6", "3.7", "3.8"),
    "2.3": ("3.6", "3.7", "3.8"),
    "2.4": ("3.6", "3.7", "3.8"),
    "2.5": ("3.6", "3.7", "3.8", "3.9"),
    "2.6": ("3.6", "3.7", "3.8", "3.9"),
    "2.7": ("3.7", "3.8", "3.9"),
    "2.8": ("3.7", "3.8", "3.9", "3.10"),
    "2.9": ("3.7", "3.8", "3.9", "3.10"),
    "2.10": ("3.7", "3.8", "3.9", "3.10"),
    "2.11": ("3.7", "3.8", "3.9", "3.10"),
    "2.12": ("3.8", "3.9", "3.10", "3.11"),
    "2.13": ("3.8", "3.9", "3.10", "3.11"),
    "2.14": ("3.9", "3.10", "3.11"),
    "2.15": ("3.9", "3.10", "3.11"),
    "2.16": ("3.9", "3.10", "3.11", "3.12"),
    "2.17": ("3.9", "3.10", "3.11", "3.12"),
    "2.18": ("3.9", "3.10", "3.11", "3.12"),
    "2.19": ("3.9", "3.10", "3.11", "3.12"),
    "2.20": ("3.9", "3.10", "3.11", "3.12", "3.13"),
    "2.21": ("3.10", "3.11", "3.12", "3.13"),
}
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

_INTEL_MAC_ENDS, _ARM_LINUX_BEGINS, _ARM_MAC_BEGINS = "2.16", "2.10", "2.5"


def pythons(version, system="linux"):
    """The Pythons on which a TensorFlow version is supported; () for one, or a system, outside the matrix."""
    if version not in PYTHONS or system not in SYSTEMS:
        return ()
    if system == "macos-x86_64" and is_after(version, _INTEL_MAC_ENDS):
        return ()
    if system == "linux-arm64" and is_after(_ARM_LINUX_BEGINS, version):
        return ()
    if system == "macos-arm64":
        is_there = not is_after(_ARM_MAC_BEGINS, version)
        missing = ("3.6", "3.7", "3.10") if version == "2.8" else ("3.6", "3.7")
        return tuple(python for python in PYTHONS[version] if is_there and python not in missing)
    return PYTHONS[version]


def versions(python, system="linux"):
    """The TensorFlow versions that support a Python, from the oldest to the newest."""
    return [version for version in VERSIONS if python in pythons(version, system)]


def is_after(version, other):
    return VERSIONS.index(version) > VERSIONS.index(other)


def has_keras_3(version):
    """Whether Keras 3 is the default of a TensorFlow version, so that Keras 2 must be requested."""
    return is_after(version, "2.15")


def env_name(python, version, keras_2=False):
    """The name of an environment in tox.ini: py311-tf2.15, py311-tf2.16 (Keras 3) or py311-tf2.16-keras2."""
    return "py{}-tf{}{}".format(python.replace(".", ""), version, "-keras2" if keras_2 and has_keras_3(version) else "")


def distribution(version, system):
    """The distribution that pip must install to get a TensorFlow version on a system."""
    return "tensorflow-macos" if system == "macos-arm64" and not is_after(version, "2.12") else "tensorflow"
