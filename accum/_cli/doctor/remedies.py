"""What to change: the command that installs a supported environment, and the causes of known import errors."""

import os
import re

from accum._cli.doctor import installed, matrix

_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_FOLDERS = os.path.join(_HERE, "_constraints"), os.path.join(os.path.dirname(_HERE), "constraints")
"""Where the constraints files are: in an installed package, and in a checkout."""


def constraints(version):
    """The path of a version's constraints file on this machine, or None."""
    for folder in _FOLDERS:
        path = os.path.join(folder, f"tf{version}.txt")
        if os.path.isfile(path):
            return path
    return None


def pinned_patch(path, name):
    """The newest version of a package that a constraints file pins, or None."""
    with open(path, encoding="utf-8") as file:
        versions = re.findall(rf"(?m)^{re.escape(name)}==([\d.]+\d)(?:;|$)", file.read())
    return max(versions, key=installed.key, default=None)


def install(version, system, name=None, keras_2=False, options="", patch=None):
    """The command that installs a TensorFlow `version`, such as "2.15", with its pins.

    `name` is the distribution that is installed now, and `patch` its release, such as "2.15.1". Where the pins are
    of an older patch, the command leaves them out rather than going back to it.
    """
    path = constraints(version)
    if name != "tensorflow-cpu" or system.startswith("macos"):
        name = matrix.distribution(version, system)
    packages = ["tensorflow", "tf-keras"] if keras_2 else [name]
    pinned_at = patch and path and pinned_patch(path, packages[0])
    if pinned_at and installed.key(patch) > installed.key(pinned_at):
        limits = [f'"{package}{limit}"' for package, limit, _ in matrix.pins(version)]
        rest = [f'"{package}=={version}.*"' for package in packages[1:]]
        wanted = [f'"{packages[0]}>={patch},=={version}.*"'] + rest + limits
        return " ".join(["python -m pip install"] + ([options] if options else []) + wanted)
    pinned = [] if path is None else ["-c", f'"{path}"' if " " in path else path]
    if path is None:
        packages = [f'"{package}=={version}.*"' for package in packages]
    return " ".join(["python -m pip install"] + ([options] if options else []) + pinned + packages)


CRASHES = (
    (
        r"Descriptors cannot (not )?be created directly",
        "protobuf is newer than this TensorFlow",
        'python -m pip install "protobuf<3.21"',
    ),
    (
        r"cannot import name '(runtime_version|builder)' from 'google\.protobuf|google\.protobuf\.\w+.*VersionError",
        "protobuf is older than this TensorFlow",
        None,
    ),
    (
        r"Unable to convert function return value to a Python type|_ARRAY_API not found|compiled using NumPy 1\.x|"
        r"numpy\.core\.\w+ failed to import|numpy\.dtype size changed",
        "NumPy 2 is installed, but this TensorFlow was built against NumPy 1",
        'python -m pip install "numpy<2"',
    ),
    (
        r"module 'numpy' has no attribute '(object|bool|int|float|typeDict|complex|str)'",
        "NumPy is newer than this TensorFlow",
        'python -m pip install "numpy<1.24"',
    ),
    (
        r"SIGILL|illegal instruction",
        "this processor lacks instructions that the wheel uses (all wheels since TensorFlow 1.6 use AVX)",
        "use another machine, or a TensorFlow that was built for this processor",
    ),
    (
        r"libmetal_plugin|tensorflow-plugins|pluggable_device",
        "tensorflow-metal was built for another TensorFlow",
        None,
    ),
    (
        r"DLL load failed",
        "a Windows library is missing, usually the Microsoft Visual C++ Redistributable 2015-2022",
        "install the Microsoft Visual C++ Redistributable (x64)",
    ),
    (
        r"GLIBC(XX)?_[\d.]+. not found",
        "this system's C library is older than the one that the wheel was built for",
        None,
    ),
    (
        r"Keras cannot be imported|No module named '(tf_keras|keras)|from 'keras|module 'keras",
        "Keras is missing, or its version does not match TensorFlow",
        None,
    ),
    (
        r"No module named 'pkg_resources'",
        "setuptools is too new for the installed packages",
        'python -m pip install "setuptools<81"',
    ),
)


def of_crash(trial):
    """Returns (reason or None, what to change or None) for an import that failed."""
    for pattern, reason, change in CRASHES:
        if re.search(pattern, f"{trial.ending}\n{trial.error}"):
            return reason, change
    return None, None
