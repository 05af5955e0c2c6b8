"""Find what is wrong with an environment, and what to change: pure functions of known facts."""

import os
import re
from typing import NamedTuple, Optional

from accum._cli.doctor import matrix


class Finding(NamedTuple):
    """`change` is None if unknown; `level` is "problem" (the environment is unsupported or broken) or "warning"."""

    what: str
    change: Optional[str] = None
    level: str = "problem"


VARIANTS = ("tensorflow-intel", "tensorflow-macos", "tensorflow-cpu-aws")
"""What `tensorflow` and `tensorflow-cpu` require on systems where they contain nothing themselves."""

DISTRIBUTIONS = (
    ("tensorflow", "tensorflow-cpu", "tensorflow-gpu")
    + ("tf-nightly", "tf-nightly-cpu", "tf-nightly-gpu", "tensorflow-rocm", "nvidia-tensorflow")
    + VARIANTS
)
"""The distributions that may have installed the module `tensorflow`."""


class Case:
    """An environment, the result of the trial import in it, and what follows from both.

    `system` is as named in the matrix, `python` such as "3.11.7", `packages` as returned by `environment.packages`.
    """

    def __init__(self, trial, system, python, bits, packages, environ):
        self.trial, self.system, self.python_version, self.bits, self.packages = trial, system, python, bits, packages
        self.distributions = {name: packages[name] for name in DISTRIBUTIONS if name in packages}
        self.version = trial.version or next(iter(self.distributions.values()), None)
        self.tensorflow = matrix.minor(self.version) if self.version else None
        self.python = matrix.minor(python)
        self.is_in_matrix = self.python in matrix.pythons(self.tensorflow, system)
        self.wants_keras_2 = environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True")  # as TensorFlow reads it
        self.name = self.tensorflow and matrix.env_name(self.python, self.tensorflow, self.wants_keras_2)

    def install(self, options=""):
        """The command that installs this TensorFlow with its pins, or the nearest that supports this Python."""
        versions = matrix.versions(self.python, self.system)
        ours = matrix.release(self.tensorflow or "")
        newer = [version for version in versions if ours and matrix.release(version) >= ours]
        if not versions:
            return None
        version = (newer or versions[-1:])[0]
        keras_2 = self.wants_keras_2 and matrix.has_keras_3(version)
        keeps_cpu = "tensorflow-cpu" in self.packages and not self.system.startswith("macos") and not keras_2
        names = ["tensorflow-cpu" if keeps_cpu else matrix.distribution(version, self.system)]
        path = constraints(version)
        pinned = [f'-c "{path}"' if " " in path else f"-c {path}"] if path else []
        wanted = [name if path else f'"{name}=={version}.*"' for name in names + ["tf-keras"] * keras_2]
        return " ".join(["python -m pip install"] + options.split() + pinned + wanted)


def constraints(version):
    """The path of a version's constraints file on this machine, or None."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    folders = os.path.join(package, "_constraints"), os.path.join(os.path.dirname(package), "constraints")
    paths = [os.path.join(folder, f"tf{version}.txt") for folder in folders]  # of an installed package, and a checkout
    return next(filter(os.path.isfile, paths), None)


def findings(case):
    """All findings, problems first."""
    checks = (_combination, _rivals, _import)
    return sorted((one for check in checks for one in check(case)), key=lambda finding: finding.level != "problem")


def _combination(case):
    python, system = case.python, case.system
    if case.bits != 64:
        yield Finding(f"This Python has {case.bits} bits; TensorFlow needs 64.", "install a 64-bit Python")
    if system not in matrix.SYSTEMS:
        supported = ", ".join(matrix.SYSTEMS.values())
        yield Finding(f"This system, {system}, is not supported. Supported are: {supported}.")
    elif not matrix.versions(python, system):
        pythons = {python for version in matrix.VERSIONS for python in matrix.pythons(version, system)}
        first, *_, last = sorted(pythons, key=matrix.release)
        yield Finding(f"No supported TensorFlow runs on Python {python} here.", f"use Python {first} to {last}")
    elif case.tensorflow is None and case.trial.stage == "tensorflow":
        yield Finding("TensorFlow is not installed.", case.install())
    elif not case.is_in_matrix:
        there = ", ".join(matrix.pythons(case.tensorflow, system))
        said = f"TensorFlow {case.version} is not supported on {matrix.SYSTEMS[system]} with Python {python}."
        yield Finding(f"{said} It runs on Python {there}." if there else said, case.install())


def _rivals(case):
    has_shell = "tensorflow" in case.distributions or "tensorflow-cpu" in case.distributions
    rivals = {name: of for name, of in case.distributions.items() if not (has_shell and name in VARIANTS)}
    names = " and ".join(f"{name} {version}" for name, version in rivals.items())
    if len(rivals) > 1:
        removal = "python -m pip uninstall -y " + " ".join(rivals)
        level = "warning" if len(set(rivals.values())) == 1 else "problem"
        change = " && ".join(part for part in (removal, case.install()) if part)
        yield Finding(f"{names} are installed over each other. They share the same files.", change, level)
    elif rivals and case.trial.version and matrix.minor(next(iter(rivals.values()))) != case.tensorflow:
        said = f"The package metadata say {names}, but Python imports {case.trial.version} ({case.trial.file})."
        yield Finding(said, "remove the one that you do not want, or its folder from PYTHONPATH")


NAMES = {"tensorflow": "TensorFlow", "keras": "TensorFlow's Keras", "accum": "accum"}

CRASHES = (
    ("SIGILL", "this processor lacks instructions that the wheel uses, such as AVX", "use another machine"),
    (
        "libmetal_plugin|pluggable_device",
        "tensorflow-metal was built for another TensorFlow",
        "python -m pip uninstall -y tensorflow-metal, or install the version that the pins name",
    ),
    (
        "DLL load failed",
        "a Windows library is missing, usually the Microsoft Visual C++ Redistributable 2015-2022",
        "install the Microsoft Visual C++ Redistributable (x64)",
    ),
    (
        "No module named '(jax|torch|openvino)",
        "Keras is set to another backend than TensorFlow",
        "set KERAS_BACKEND=tensorflow",
    ),
)
"""What no other installation of the packages mends: part of the error, its cause, and what to change."""


def _import(case):
    error, stage = case.trial.error, case.trial.stage
    if error is None or stage == "accum" and not case.is_in_matrix:  # which is reported, and rightly refused
        return
    if case.tensorflow is None and "No module named 'tensorflow'" in error:
        return
    what = f"{NAMES[stage]} cannot be imported: {error.rstrip('.')}."
    reason, change = next((row[1:] for row in CRASHES if re.search(row[0], error)), (None, None))
    if "accum needs" in what:  # and says what to change
        yield Finding(what)
    elif change and case.is_in_matrix:
        yield Finding(f"{what} Cause: {reason}.", change)
    else:
        yield Finding(what, case.install("--force-reinstall"))
