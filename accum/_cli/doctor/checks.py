"""Find what is wrong with an environment: pure functions of known facts."""

from typing import Any, Dict, Mapping, NamedTuple, Optional

from accum._cli.doctor import installed, matrix, remedies


class Facts(NamedTuple):
    """`system` as named in the matrix, `python` such as "3.11.7", `packages` as returned by `installed.packages`."""

    system: str
    python: str
    bits: int
    implementation: str
    packages: Dict[str, Any]
    environ: Mapping[str, str]
    keras_config: Any


class Finding(NamedTuple):
    """`level` is "problem" (the environment is unsupported or broken) or "warning"; `change` is None if unknown."""

    level: str
    what: str
    change: Optional[str]


VARIANTS = ("tensorflow-intel", "tensorflow-macos", "tensorflow-cpu-aws")
"""What `tensorflow` and `tensorflow-cpu` require on systems where they contain nothing themselves."""

_BUILDS = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-gpu",
    "tf-nightly",
    "tf-nightly-cpu",
    "tf-nightly-gpu",
    "tensorflow-rocm",
    "nvidia-tensorflow",
)
DISTRIBUTIONS = _BUILDS + VARIANTS
"""The distributions that may have installed the module `tensorflow`."""


def problem(what, change=None):
    return Finding("problem", what, change)


def warning(what, change=None):
    return Finding("warning", what, change)


class Case:
    """The facts, the result of the trial import, and what follows from both."""

    def __init__(self, facts, trial):
        self.facts, self.trial = facts, trial
        self.distributions = [facts.packages[name][0] for name in DISTRIBUTIONS if name in facts.packages]
        self.holder = self.distributions[0] if self.distributions else None
        self.version = trial.version or (self.holder.version if self.holder else None)
        self.tensorflow = installed.minor(self.version) if self.version else None
        self.minor = installed.minor(facts.python)
        self.is_known = self.tensorflow in matrix.VERSIONS
        self.is_in_matrix = self.is_known and self.minor in matrix.pythons(self.tensorflow, facts.system)
        self.wants_keras_2 = facts.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True")  # as TensorFlow reads it
        self.is_keras_2 = self.wants_keras_2 and self.is_known and matrix.has_keras_3(self.tensorflow)
        self.env_name = matrix.env_name(self.minor, self.tensorflow, self.wants_keras_2) if self.is_known else None
        if self.env_name is None and self.tensorflow:
            self.env_name = f"py{self.minor.replace('.', '')}-tf{self.tensorflow}"

        self.keras = trial.keras
        if (
            self.keras is None and self.is_known and installed.release(self.tensorflow) >= (2, 6)
        ):  # before 2.6, Keras was part of TensorFlow
            package = self.package("tf-keras" if self.is_keras_2 else "keras")
            self.keras = package and package.version

    def package(self, name):
        return self.facts.packages.get(name, [None])[0]

    def target(self):
        """The minor version to install: this one, or the nearest that supports this Python; None if none does."""
        versions = matrix.versions(self.minor, self.facts.system)
        newer = [
            version
            for version in versions
            if self.tensorflow and installed.release(version) >= installed.release(self.tensorflow)
        ]
        return newer[0] if newer else versions[-1] if versions else None

    def install(self, options=""):
        version = self.target()
        if version is None:
            return None
        keras_2 = self.wants_keras_2 and matrix.has_keras_3(version)
        patch = self.version if version == self.tensorflow else None
        return remedies.install(version, self.facts.system, self.holder and self.holder.name, keras_2, options, patch)


def findings(case):
    """All findings, problems first."""
    said = [finding for check in CHECKS for finding in check(case)]
    return sorted(said, key=lambda finding: finding.level != "problem")


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
    python, system = case.minor, case.facts.system
    if system in matrix.SYSTEMS and not matrix.versions(python, system):
        pythons = sorted(
            {python for version in matrix.VERSIONS for python in matrix.pythons(version, system)}, key=_order
        )
        said = f"No supported TensorFlow runs on Python {python} here."
        yield problem(said, f"use Python {pythons[0]} to {pythons[-1]}")
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


def _order(python):
    return tuple(int(part) for part in python.split("."))


def _rivals(case):
    shells = {"tensorflow", "tensorflow-cpu"} & {package.name for package in case.distributions}
    rivals = [package for package in case.distributions if not (shells and package.name in VARIANTS)]
    names = " and ".join(f"{package.name} {package.version}" for package in rivals)
    if len(rivals) > 1:
        same = len({package.version for package in rivals}) == 1
        removal = "python -m pip uninstall -y " + " ".join(package.name for package in rivals)
        change = " && ".join(part for part in (removal, case.install()) if part)
        said = f"{names} are installed over each other. They share the same files."
        yield warning(said, change) if same else problem(said, change)
    elif case.holder and case.trial.version and installed.minor(case.holder.version) != case.tensorflow:
        said = f"The package metadata say {names}, but Python imports {case.trial.version} ({case.trial.file})."
        yield problem(said, "remove the one that you do not want, or its folder from PYTHONPATH")
    for package in case.distributions:
        if package.name.startswith("tf-nightly"):
            yield problem(f"{package.name} is a nightly build, which is not supported.", case.install())
        twice = case.facts.packages[package.name]
        if len({other.version for other in twice if other.folder == package.folder}) > 1:
            versions = " and ".join(other.version for other in twice)
            yield problem(f"{package.name} is installed twice, as {versions}.", case.install("--force-reinstall"))


def _import(case):
    trial = case.trial
    if trial.error is None or (case.tensorflow is None and "No module named 'tensorflow'" in trial.error):
        return
    if trial.stage == "accum" and not case.is_in_matrix:
        return  # already reported, and rightly refused
    reason, change = remedies.of_crash(trial)
    what = f"{_NAMES[trial.stage]} cannot be imported: {trial.error.rstrip('.')}."
    if reason:
        what += f" Cause: {reason}."
    yield problem(what, change if change and case.is_in_matrix else case.install("--force-reinstall"))


_NAMES = {"tensorflow": "TensorFlow", "keras": "TensorFlow's Keras", "accum": "accum"}


def _pins(case):
    for name, limit, reason in matrix.pins(case.tensorflow) if case.is_known else []:
        package = case.package(name)
        if package and not installed.fits(package.version, limit):
            what = f"{name} {package.version} must be {limit}: {reason}."
            yield problem(what, f'python -m pip install "{name}{limit}"')


def _requirements(case):
    pinned = [name for name, _, _ in matrix.pins(case.tensorflow)] if case.is_known else []
    for holder in case.distributions:
        for name, limits in installed.requirements(holder):
            package = case.package(name)
            if package and name not in pinned and not installed.fits(package.version, limits):
                what = f"{name} is {package.version}, but {holder.name} {holder.version} requires {limits}."
                yield warning(what, f'python -m pip install "{name}{limits}"')


def _keras(case):
    if not case.is_known or not matrix.has_keras_3(case.tensorflow):
        return
    tf_keras, keras = case.package("tf-keras"), case.package("keras")
    remedy = remedies.install(case.tensorflow, case.facts.system, keras_2=True)
    if case.is_keras_2:
        if tf_keras is None:
            yield problem("TF_USE_LEGACY_KERAS asks for Keras 2, but tf-keras is not installed.", remedy)
        elif installed.minor(tf_keras.version) != case.tensorflow:
            yield problem(f"tf-keras {tf_keras.version} does not match TensorFlow {case.tensorflow}.", remedy)
        return
    if keras and installed.release(keras.version) < (3,):
        what = f"TensorFlow {case.tensorflow} uses Keras 3, but keras is {keras.version}."
        yield problem(what, f'python -m pip install "keras>=3", or {remedy} and set TF_USE_LEGACY_KERAS=1')
    backend = case.facts.environ.get("KERAS_BACKEND") or case.facts.keras_config.get("backend") or "tensorflow"
    if backend != "tensorflow":
        where = "KERAS_BACKEND is" if case.facts.environ.get("KERAS_BACKEND") else "keras.json sets the backend"
        yield problem(f"{where} {backend!r}, but accum needs the TensorFlow backend.", "set KERAS_BACKEND=tensorflow")


def _platform(case):
    system = case.facts.system
    metal = case.package("tensorflow-metal")
    if metal and case.is_known and system == "macos-arm64":
        fit = matrix.METAL.get(case.tensorflow)
        if fit is None:
            said = f"TensorFlow {case.tensorflow} has no tensorflow-metal."
            yield problem(said, "python -m pip uninstall -y tensorflow-metal")
        elif installed.release(metal.version) != installed.release(fit):
            said = f"tensorflow-metal {metal.version} does not match TensorFlow {case.tensorflow}."
            yield problem(said, f'python -m pip install "tensorflow-metal=={fit}"')
    exact = matrix.EXACT.get((system, case.tensorflow, case.minor))
    if exact and installed.release(case.version) != installed.release(exact):
        said = f"On this Python and system, only TensorFlow {exact} has wheels for all of its requirements."
        works = installed.key(case.version) > installed.key(exact) and case.trial.error is None
        yield warning(said, None if works else f'python -m pip install "tensorflow=={exact}"')


CHECKS = (_interpreter, _combination, _rivals, _import, _pins, _requirements, _keras, _platform)
