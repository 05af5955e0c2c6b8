"""What is right and wrong with an environment, from what is known of it: pure functions of facts."""

import collections

from accum import _matrix
from accum._doctor import installed, remedies

Facts = collections.namedtuple("Facts", "system python bits implementation packages environ keras_config")
"""`system` as in the matrix, `python` as "3.11.7", `packages` as of `installed.packages`."""

Finding = collections.namedtuple("Finding", "level what change")
"""`level`: "problem", which makes the environment unsupported or broken, or "warning"; `change`: None if unknown."""

VARIANTS = ("tensorflow-intel", "tensorflow-macos", "tensorflow-cpu-aws")
"""What `tensorflow` and `tensorflow-cpu` pull in on some systems, where they are shells."""

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
"""What the module `tensorflow` may have come from."""


def problem(what, change=None):
    return Finding("problem", what, change)


def warning(what, change=None):
    return Finding("warning", what, change)


class Case:
    """The facts, what importing came to, and what follows from both."""

    def __init__(self, facts, trial):
        self.facts, self.trial = facts, trial
        self.found = [facts.packages[name][0] for name in DISTRIBUTIONS if name in facts.packages]
        self.holder = self.found[0] if self.found else None
        self.version = trial.version or (self.holder.version if self.holder else None)
        self.line = installed.line(self.version) if self.version else None
        self.minor = installed.line(facts.python)
        self.is_known = self.line in _matrix.LINES
        self.is_in_matrix = self.is_known and self.minor in _matrix.pythons(self.line, facts.system)
        self.wants_keras_2 = facts.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True")  # as TensorFlow reads it
        self.is_keras_2 = self.wants_keras_2 and self.is_known and _matrix.has_keras_3(self.line)
        self.cell = _matrix.cell(self.minor, self.line, self.wants_keras_2) if self.is_known else None
        if self.cell is None and self.line:
            self.cell = "py{}-tf{}".format(self.minor.replace(".", ""), self.line)

        self.keras = trial.keras
        if self.keras is None and self.is_known and installed.release(self.line) >= (2, 6):  # before, a part of it
            package = self.package("tf-keras" if self.is_keras_2 else "keras")
            self.keras = package and package.version

    def package(self, name):
        return self.facts.packages.get(name, [None])[0]

    def target(self):
        """The line to go to: this one, or the nearest that this Python has; None if it has none."""
        lines = _matrix.lines(self.minor, self.facts.system)
        newer = [line for line in lines if self.line and installed.release(line) >= installed.release(self.line)]
        return newer[0] if newer else lines[-1] if lines else None

    def install(self, options=""):
        line = self.target()
        if line is None:
            return None
        keras_2 = self.wants_keras_2 and _matrix.has_keras_3(line)
        return remedies.install(line, self.facts.system, self.holder and self.holder.name, keras_2, options)


def findings(case):
    """Everything that is to be said, the problems first."""
    said = [finding for check in CHECKS for finding in check(case)]
    return sorted(said, key=lambda finding: finding.level != "problem")


def _interpreter(case):
    facts = case.facts
    if facts.system not in _matrix.SYSTEMS:
        known = ", ".join(_matrix.SYSTEMS.values())
        yield problem("The matrix does not have this system, {}. It has: {}.".format(facts.system, known))
    if facts.implementation != "CPython":
        yield problem("TensorFlow has no wheels for {}.".format(facts.implementation), "use CPython")
    if facts.bits != 64:
        yield problem("This Python has {} bits; TensorFlow needs 64.".format(facts.bits), "install a 64-bit Python")


def _combination(case):
    python, system = case.minor, case.facts.system
    if system in _matrix.SYSTEMS and not _matrix.lines(python, system):
        pythons = sorted({python for line in _matrix.LINES for python in _matrix.pythons(line, system)}, key=_order)
        said = "No supported TensorFlow runs on Python {} here.".format(python)
        yield problem(said, "use Python {} to {}".format(pythons[0], pythons[-1]))
    elif case.line is None and case.trial.stage == "tensorflow":
        yield problem("TensorFlow is not installed.", case.install())
    elif not case.is_known:
        known = "1.15 and 2.2 to {}".format(_matrix.LINES[-1])
        yield problem("TensorFlow {} is not supported; {} are.".format(case.version, known), case.install())
    elif not case.is_in_matrix and system in _matrix.SYSTEMS:
        there = _matrix.pythons(case.line, system)
        said = "TensorFlow {} and Python {} are no cell of the matrix on {}: ".format(
            case.line, python, _matrix.SYSTEMS[system]
        )
        on = "this line runs on Python {}.".format(", ".join(there)) if there else "this line has no wheels there."
        yield problem(said + on, case.install())


def _order(python):
    return tuple(int(part) for part in python.split("."))


def _rivals(case):
    shells = {"tensorflow", "tensorflow-cpu"} & {package.name for package in case.found}
    rivals = [package for package in case.found if not (shells and package.name in VARIANTS)]
    names = " and ".join("{} {}".format(package.name, package.version) for package in rivals)
    if len(rivals) > 1:
        same = len({package.version for package in rivals}) == 1
        removal = "python -m pip uninstall -y " + " ".join(package.name for package in rivals)
        change = " && ".join(part for part in (removal, case.install()) if part)
        said = "{} are installed over each other: they share their files.".format(names)
        yield warning(said, change) if same else problem(said, change)
    elif case.holder and case.trial.version and installed.line(case.holder.version) != case.line:
        said = "The metadata say {}, but what is imported is {} ({}).".format(
            names, case.trial.version, case.trial.file
        )
        yield problem(said, "remove the one that is not meant, or its folder from PYTHONPATH")
    for package in case.found:
        if package.name.startswith("tf-nightly"):
            yield problem("{} is a build of no line.".format(package.name), case.install())
        twice = case.facts.packages[package.name]
        if len({other.version for other in twice if other.folder == package.folder}) > 1:
            versions = " and ".join(other.version for other in twice)
            yield problem("{} is there twice, as {}.".format(package.name, versions), case.install("--force-reinstall"))


def _import(case):
    trial = case.trial
    if trial.error is None or (case.line is None and "No module named 'tensorflow'" in trial.error):
        return
    if trial.stage == "accum" and not case.is_in_matrix:
        return  # said already, and rightly refused
    reason, change = remedies.of_crash(trial)
    what = "{} does not import: {}.".format(_NAMES[trial.stage], trial.error.rstrip("."))
    if reason:
        what += " That is: {}.".format(reason)
    yield problem(what, change if change and case.is_in_matrix else case.install("--force-reinstall"))


_NAMES = {"tensorflow": "TensorFlow", "keras": "TensorFlow's Keras", "accum": "accum"}


def _pins(case):
    for name, limit, reason in _matrix.pins(case.line) if case.is_known else []:
        package = case.package(name)
        if package and not installed.fits(package.version, limit):
            what = "{} {} is not {}: {}.".format(name, package.version, limit, reason)
            yield problem(what, 'python -m pip install "{}{}"'.format(name, limit))


def _requirements(case):
    pinned = [name for name, _, _ in _matrix.pins(case.line)] if case.is_known else []
    for holder in case.found:
        for name, limits in installed.requirements(holder):
            package = case.package(name)
            if package and name not in pinned and not installed.fits(package.version, limits):
                what = "{} {} is not what {} {} asks for, {}.".format(
                    name, package.version, holder.name, holder.version, limits
                )
                yield warning(what, 'python -m pip install "{}{}"'.format(name, limits))


def _keras(case):
    if not case.is_known or not _matrix.has_keras_3(case.line):
        return
    tf_keras, keras = case.package("tf-keras"), case.package("keras")
    remedy = remedies.install(case.line, case.facts.system, keras_2=True)
    if case.is_keras_2:
        if tf_keras is None:
            yield problem("TF_USE_LEGACY_KERAS asks for Keras 2, and tf-keras is not installed.", remedy)
        elif installed.line(tf_keras.version) != case.line:
            yield problem("tf-keras {} is not of TensorFlow {}.".format(tf_keras.version, case.line), remedy)
        return
    if keras and installed.release(keras.version) < (3,):
        what = "TensorFlow {} uses Keras 3, and keras is {}.".format(case.line, keras.version)
        yield problem(what, 'python -m pip install "keras>=3", or {} and set TF_USE_LEGACY_KERAS=1'.format(remedy))
    backend = case.facts.environ.get("KERAS_BACKEND") or case.facts.keras_config.get("backend") or "tensorflow"
    if backend != "tensorflow":
        where = "KERAS_BACKEND is" if case.facts.environ.get("KERAS_BACKEND") else "keras.json sets the backend"
        yield problem(
            "{} {!r}: accum accumulates in TensorFlow.".format(where, backend), "set KERAS_BACKEND=tensorflow"
        )


def _platform(case):
    system = case.facts.system
    metal = case.package("tensorflow-metal")
    if metal and case.is_known and system == "macos-arm64":
        fit = _matrix.METAL.get(case.line)
        if fit is None:
            said = "TensorFlow {} has no tensorflow-metal.".format(case.line)
            yield problem(said, "python -m pip uninstall -y tensorflow-metal")
        elif installed.release(metal.version) != installed.release(fit):
            said = "tensorflow-metal {} is not that of TensorFlow {}.".format(metal.version, case.line)
            yield problem(said, 'python -m pip install "tensorflow-metal=={}"'.format(fit))
    exact = _matrix.EXACT.get((system, case.line, case.minor))
    if exact and installed.release(case.version) != installed.release(exact):
        said = "On this Python and system only TensorFlow {} has all that it is made of.".format(exact)
        yield warning(said, 'python -m pip install "tensorflow=={}"'.format(exact))


CHECKS = (_interpreter, _combination, _rivals, _import, _pins, _requirements, _keras, _platform)
