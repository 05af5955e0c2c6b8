"""Find what is wrong with an environment, and what to change: pure functions of known facts."""

import os
import re
from typing import Any, Dict, Mapping, NamedTuple, Optional

from accum._cli.doctor import installed, matrix


class Facts(NamedTuple):
    """`system` as named in the matrix, `python` such as "3.11.7", `packages` as returned by `installed.packages`."""

    system: str
    python: str
    bits: int
    implementation: str
    packages: Dict[str, str]
    environ: Mapping[str, str]


class Finding(NamedTuple):
    """`level` is "problem" (the environment is unsupported or broken) or "warning"; `change` is None if unknown."""

    level: str
    what: str
    change: Optional[str]


def problem(what, change=None):
    return Finding("problem", what, change)


VARIANTS = ("tensorflow-intel", "tensorflow-macos", "tensorflow-cpu-aws")
"""What `tensorflow` and `tensorflow-cpu` require on systems where they contain nothing themselves."""

DISTRIBUTIONS = (
    ("tensorflow", "tensorflow-cpu", "tensorflow-gpu")
    + ("tf-nightly", "tf-nightly-cpu", "tf-nightly-gpu", "tensorflow-rocm", "nvidia-tensorflow")
    + VARIANTS
)
"""The distributions that may have installed the module `tensorflow`."""


class Case:
    """The facts, the result of the trial import, and what follows from both."""

    def __init__(self, facts, trial):
        self.facts, self.trial = facts, trial
        self.distributions = {name: facts.packages[name] for name in DISTRIBUTIONS if name in facts.packages}
        self.version = trial.version or next(iter(self.distributions.values()), None)
        self.tensorflow = installed.minor(self.version) if self.version else None
        self.python = installed.minor(facts.python)
        self.is_known = self.tensorflow in matrix.VERSIONS
        self.is_in_matrix = self.is_known and self.python in matrix.pythons(self.tensorflow, facts.system)
        self.wants_keras_2 = facts.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True")  # as TensorFlow reads it
        self.env_name = None
        if self.tensorflow:
            wants_keras_2 = self.wants_keras_2 and self.is_known
            self.env_name = matrix.env_name(self.python, self.tensorflow, wants_keras_2)

    def install(self, options=""):
        """The command that installs this TensorFlow with its pins, or the nearest that supports this Python."""
        versions = matrix.versions(self.python, self.facts.system)
        ours = installed.release(self.tensorflow or "")
        newer = [version for version in versions if ours and installed.release(version) >= ours]
        if not versions:
            return None
        version = (newer or versions[-1:])[0]
        return install(version, self.facts, self.wants_keras_2 and matrix.has_keras_3(version), options)


def constraints(version):
    """The path of a version's constraints file on this machine, or None."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    folders = os.path.join(package, "_constraints"), os.path.join(os.path.dirname(package), "constraints")
    paths = [os.path.join(folder, f"tf{version}.txt") for folder in folders]  # of an installed package, and a checkout
    return next(filter(os.path.isfile, paths), None)


def install(version, facts, keras_2=False, options=""):
    """The command that installs a TensorFlow `version`, such as "2.15", with its pins."""
    keeps_cpu = "tensorflow-cpu" in facts.packages and not facts.system.startswith("macos") and not keras_2
    names = ["tensorflow-cpu" if keeps_cpu else matrix.distribution(version, facts.system)]
    names += ["tf-keras"] if keras_2 else []
    path = constraints(version)
    pinned = [f'-c "{path}"' if " " in path else f"-c {path}"] if path else []
    wanted = names if path else [f'"{name}=={version}.*"' for name in names]
    return " ".join(["python -m pip install"] + ([options] if options else []) + pinned + wanted)


def findings(case):
    """All findings, problems first."""
    checks = (_interpreter, _combination, _rivals, _import, _metal)
    return sorted((one for check in checks for one in check(case)), key=lambda finding: finding.level != "problem")


def _interpreter(case):
    facts = case.facts
    if facts.system not in matrix.SYSTEMS:
        supported = ", ".join(matrix.SYSTEMS.values())
        yield problem(f"This system, {facts.system}, is not supported. Supported are: {supported}.")
    if facts.implementation != "CPython":
        yield problem(f"TensorFlow has no wheels for {facts.implementation}.", "use CPython")
    if facts.bits != 64:
        yield problem(f"This Python has {facts.bits} bits; TensorFlow needs 64.", "install a 64-bit Python")


def _combination(case):
    python, system = case.python, case.facts.system
    if system in matrix.SYSTEMS and not matrix.versions(python, system):
        pythons = {python for version in matrix.VERSIONS for python in matrix.pythons(version, system)}
        first, *_, last = sorted(pythons, key=installed.release)
        yield problem(f"No supported TensorFlow runs on Python {python} here.", f"use Python {first} to {last}")
    elif case.tensorflow is None and case.trial.stage == "tensorflow":
        yield problem("TensorFlow is not installed.", case.install())
    elif not case.is_known:
        supported = f"1.15 and 2.2 to {matrix.VERSIONS[-1]}"
        yield problem(f"TensorFlow {case.version} is not supported. Supported are {supported}.", case.install())
    elif not case.is_in_matrix and system in matrix.SYSTEMS:
        there = matrix.pythons(case.tensorflow, system)
        said = f"TensorFlow {case.tensorflow} with Python {python} is not supported on {matrix.SYSTEMS[system]}: "
        on = f"this TensorFlow runs on Python {', '.join(there)}." if there else "this TensorFlow has no wheels there."
        yield problem(said + on, case.install())


def _rivals(case):
    has_shell = "tensorflow" in case.distributions or "tensorflow-cpu" in case.distributions
    rivals = {name: of for name, of in case.distributions.items() if not (has_shell and name in VARIANTS)}
    names = " and ".join(f"{name} {version}" for name, version in rivals.items())
    if len(rivals) > 1:
        removal = "python -m pip uninstall -y " + " ".join(rivals)
        level = "warning" if len(set(rivals.values())) == 1 else "problem"
        change = " && ".join(part for part in (removal, case.install()) if part)
        yield Finding(level, f"{names} are installed over each other. They share the same files.", change)
    elif rivals and case.trial.version and installed.minor(next(iter(rivals.values()))) != case.tensorflow:
        said = f"The package metadata say {names}, but Python imports {case.trial.version} ({case.trial.file})."
        yield problem(said, "remove the one that you do not want, or its folder from PYTHONPATH")


def _import(case):
    trial = case.trial
    if trial.error is None or (case.tensorflow is None and "No module named 'tensorflow'" in trial.error):
        return
    if trial.stage == "accum" and not case.is_in_matrix:
        return  # already reported, and rightly refused
    reason, change = of_crash(trial)
    what = f"{_NAMES[trial.stage]} cannot be imported: {trial.error.rstrip('.')}."
    if "accum needs" not in what:  # otherwise the error says what to change
        change = change if change and case.is_in_matrix else case.install("--force-reinstall")
    yield problem(what + (f" Cause: {reason}." if reason else ""), change)


_NAMES = {"tensorflow": "TensorFlow", "keras": "TensorFlow's Keras", "accum": "accum"}


def _metal(case):
    """The wheels of tensorflow-metal do not say which TensorFlow they were built for; the constraints do."""
    metal, path = case.facts.packages.get("tensorflow-metal"), case.is_known and constraints(case.tensorflow)
    if not metal or not path or case.facts.system != "macos-arm64":
        return
    with open(path, encoding="utf-8") as file:
        fit = re.search(r"(?m)^tensorflow-metal==(.+)$", file.read())
    if fit is None:
        said = f"TensorFlow {case.tensorflow} has no tensorflow-metal."
        yield problem(said, "python -m pip uninstall -y tensorflow-metal")
    elif installed.release(metal) != installed.release(fit.group(1)):
        said = f"tensorflow-metal {metal} does not match TensorFlow {case.tensorflow}."
        yield problem(said, f'python -m pip install "tensorflow-metal=={fit.group(1)}"')


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
    (r"libmetal_plugin|pluggable_device", "tensorflow-metal was built for another TensorFlow", None),
    (
        r"DLL load failed",
        "a Windows library is missing, usually the Microsoft Visual C++ Redistributable 2015-2022",
        "install the Microsoft Visual C++ Redistributable (x64)",
    ),
    (r"GLIBC(XX)?_[\d.]+. not found", "the wheel was built for a newer C library than this system has", None),
    (
        r"No module named '(jax|torch|openvino)",
        "Keras is set to another backend than TensorFlow",
        "set KERAS_BACKEND=tensorflow",
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


def of_crash(trial) -> Any:
    """Returns (reason or None, what to change or None) for an import that failed."""
    for pattern, reason, change in CRASHES:
        if re.search(pattern, f"{trial.ending}\n{trial.error}"):
            return reason, change
    return None, None
