"""`python -m accum doctor`: on environments made of metadata, of modules that fail, and on the environment itself."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys

import pytest

import accum
from accum._cli.doctor import checks, command, environment, matrix

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PYTHON = "{}.{}".format(*sys.version_info)
HERE = command.system(sys.platform, platform.machine())
VERSIONS_HERE = matrix.versions(PYTHON, HERE)

pytestmark = pytest.mark.skipif(HERE not in matrix.SYSTEMS, reason="the matrix does not have this system")


# ----------------------------------------------------------------------------------------------------------------
# Processes that have this Python and nothing but what a test gives them


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A folder with the package and nothing else: beside an installed one, there are others."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.copytree(os.path.dirname(os.path.abspath(accum.__file__)), str(folder / "accum"))
    return folder


def add_package(folder, name, version):
    (folder / f"{name.replace('-', '_')}-{version}.dist-info").mkdir()


def run(folder, alone, *arguments, **options):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("KERAS_", "TF_"))}
    environ.update(PYTHONPATH=os.pathsep.join([str(folder), str(alone)]), **options.pop("env", {}))
    return subprocess.run(
        [sys.executable, "-S"] + list(arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        env=environ,
        cwd=str(folder),
    )


def examine(folder, alone):
    done = run(folder, alone, "-m", "accum", "doctor", "--json")
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert (done.returncode == 0) == (report["verdict"] == "supported")
    return report


def problems(report):
    return [(finding["what"], finding["change"]) for finding in report["findings"] if finding["level"] == "problem"]


def test_without_tensorflow_it_says_how_to_install_the_newest(tmp_path, alone):
    report = examine(tmp_path, alone)
    assert (report["verdict"], report["environment"], report["tensorflow"]) == ("not supported", None, None)
    ((what, change),) = problems(report)
    assert what == "TensorFlow is not installed."
    assert change.startswith("python -m pip install") and VERSIONS_HERE[-1] in change


@pytest.mark.slow
def test_for_people_it_says_the_same(tmp_path, alone):
    done = run(tmp_path, alone, "-m", "accum", "doctor")
    assert done.returncode == 1
    assert done.stdout.startswith(f"accum {accum.__version__}: this environment is not supported.\n")
    assert "\nProblem: TensorFlow is not installed.\n  Change: python -m pip install" in done.stdout
    assert "None" not in done.stdout and "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.14.0", "2.1.0", "3.0.0"])
def test_an_unsupported_version_is_named_with_the_nearest_supported(version, tmp_path, alone):
    add_package(tmp_path, "tensorflow", version)
    (tmp_path / "tensorflow.py").write_text(f"__version__ = {version!r}")
    report = examine(tmp_path, alone)
    assert report["verdict"] == "not supported"
    assert report["environment"] == f"py{PYTHON.replace('.', '')}-tf{matrix.minor(version)}"
    ((what, change),) = problems(report)
    assert what.startswith(f"TensorFlow {version} is not supported")
    newer = [tf_version for tf_version in VERSIONS_HERE if matrix.release(tf_version) >= matrix.release(version)]
    nearest = newer[0] if newer else VERSIONS_HERE[-1]
    assert re.search(r"tf{0}\.txt|=={0}\.\*".format(re.escape(nearest)), change)


def wrong_version():
    return next(version for version in matrix.VERSIONS if version not in VERSIONS_HERE)


@pytest.mark.slow
def test_a_version_on_the_wrong_python_says_on_which_it_runs(tmp_path, alone):
    version = wrong_version()
    add_package(tmp_path, "tensorflow-cpu", version + ".0")
    report = examine(tmp_path, alone)  # the metadata of a wheel that was forced in, and no module
    assert report["verdict"] == "not supported"
    what, change = problems(report)[0]
    assert f"TensorFlow {version}.0 is not supported on {matrix.SYSTEMS[HERE]} with Python {PYTHON}. It runs" in what
    assert change.endswith(" tensorflow-cpu") == HERE.startswith(("linux", "windows")) or "==" in change


CRASHES = {
    "protobuf": (
        "raise TypeError('Descriptors cannot not be created directly.\\nIf this call came from a _pb2.py file')",
        "TypeError: Descriptors cannot not be created directly",
        "--force-reinstall",
    ),
    "own": ("import no_such_part_of_it", "No module named 'no_such_part_of_it'", "--force-reinstall"),
    "exit": ("import os; os._exit(3)", "the process ended with status 3", "--force-reinstall"),
}


@pytest.mark.slow
@pytest.mark.parametrize("crash", sorted(CRASHES))
def test_an_import_that_fails_is_a_finding(crash, tmp_path, alone):
    source, says, remedy = CRASHES[crash]
    add_package(tmp_path, "tensorflow", VERSIONS_HERE[0] + ".0")
    (tmp_path / "tensorflow.py").write_text(source)
    report = examine(tmp_path, alone)
    assert report["verdict"] == "broken" and report["tensorflow"] == VERSIONS_HERE[0] + ".0"
    ((what, change),) = problems(report)
    assert what.startswith("TensorFlow cannot be imported: ") and says in what and remedy in change


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no such signals on Windows")
def test_an_import_that_kills_its_process_is_a_finding(tmp_path, alone):
    add_package(tmp_path, "tensorflow", VERSIONS_HERE[0] + ".0")
    (tmp_path / "tensorflow.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    ((what, change),) = problems(examine(tmp_path, alone))
    assert "was ended by SIGILL" in what and "AVX" in what and "another machine" in change


@pytest.mark.slow
def test_an_import_that_hangs_ends_and_says_so(tmp_path, monkeypatch):
    (tmp_path / "tensorflow.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert environment.trial(0.5).error == "the import did not finish within 0.5 seconds"


@pytest.mark.slow
def test_a_keras_that_fails_and_noise_are_told_apart(tmp_path, alone):
    source = (
        "print('noise'); __version__ = '{}.0'\nclass Lazy:\n    def __getattr__(self, name): raise ImportError(name)"
    )
    (tmp_path / "tensorflow.py").write_text(source.format(VERSIONS_HERE[0]) + "\nkeras = Lazy()")
    report = examine(tmp_path, alone)
    assert report["distributions"] == {} and report["tensorflow"] == VERSIONS_HERE[0] + ".0"
    ((what, _),) = problems(report)
    assert what.startswith("TensorFlow's Keras cannot be imported: ImportError: __version__")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--jason"], ["more"]], ids=" ".join)
def test_wrong_arguments_are_usage(arguments, tmp_path, alone):
    done = run(tmp_path, alone, "-m", "accum", "doctor", *arguments)
    assert done.returncode == 2 and "usage: python -m accum" in done.stderr


@pytest.mark.slow
def test_only_the_command_line_gets_in_without_tensorflow(tmp_path, alone):
    other = tmp_path / "other"
    other.mkdir()
    (other / "__main__.py").write_text("")
    uses = "import accum; accum.AdaptiveClipping"  # before Python 3.10, the import in `other` can't know
    (other / "__init__.py").write_text(uses)
    for entry in (["-m", "other", "doctor"], ["-c", "import sys; sys.argv.clear(); import accum"]):
        done = run(tmp_path, alone, *entry)
        assert done.returncode == 1, entry
        assert re.search(r"ImportError: accum needs|No module named 'numpy'", done.stderr.splitlines()[-1]), entry


@pytest.mark.slow
def test_this_environment_is_supported():
    parent = os.path.dirname(os.path.dirname(os.path.abspath(accum.__file__)))
    done = subprocess.run(
        [sys.executable, "-m", "accum", "doctor", "--json"],
        stdout=subprocess.PIPE,
        universal_newlines=True,
        env=dict(os.environ, PYTHONPATH=parent),
        cwd=os.path.dirname(os.path.abspath(__file__)),
    )
    report = json.loads(done.stdout)
    assert (report["verdict"], done.returncode, problems(report)) == ("supported", 0, [])
    assert report["environment"].startswith(f"py{PYTHON.replace('.', '')}-tf")
    with open(report["constraints"]) as file:  # it exists on this machine, and pins this version
        assert f"\ntensorflow=={matrix.minor(report['tensorflow'])}" in file.read()
    assert report["constraints"] in report["install"].replace('"', "")


# ----------------------------------------------------------------------------------------------------------------
# What follows from facts


def diagnose(packages, system="linux", python="3.11.7", bits=64, environ=(), **said):
    """The report on an environment of these packages ({name: version}), in which everything imports."""
    holder = next((packages[name] for name in checks.DISTRIBUTIONS if name in packages), None)
    tried = environment.Trial(None, "done", holder, file="/site-packages/tensorflow/__init__.py")._replace(**said)
    return command.diagnosis(checks.Case(tried, system, python, bits, dict(packages), dict(environ)))


def what(report):
    return [(finding["level"], finding["what"]) for finding in report["findings"]]


SUPPORTED = {
    "linux": {"packages": {"tensorflow-cpu": "2.15.1", "numpy": "1.26.4"}},
    "linux-gpu": {"packages": {"tensorflow-gpu": "2.10.1", "protobuf": "3.19.6"}, "python": "3.10.1"},
    "static graphs": {"packages": {"tensorflow": "1.15.5"}, "python": "3.7.16"},
    "windows": {"packages": {"tensorflow": "2.12.0", "tensorflow-intel": "2.12.0"}, "system": "windows"},
    "linux on arm": {
        "packages": {"tensorflow": "2.15.1", "tensorflow-cpu-aws": "2.15.1"},
        "system": "linux-arm64",
    },
    "apple": {"packages": {"tensorflow-macos": "2.9.2"}, "system": "macos-arm64", "python": "3.9.1"},
    "apple shell": {"packages": {"tensorflow": "2.15.0", "tensorflow-macos": "2.15.0"}, "system": "macos-arm64"},
    "keras 3": {"packages": {"tensorflow-cpu": "2.18.0", "keras": "3.6.0"}},
    "keras 2": {
        "packages": {"tensorflow": "2.18.0", "keras": "3.6.0", "tf-keras": "2.18.0"},
        "environ": {"TF_USE_LEGACY_KERAS": "1"},
    },
    "new protobuf with a new version": {"packages": {"tensorflow": "2.12.1", "protobuf": "4.25.9"}},
}


ENVIRONMENTS = {
    "linux": "py311-tf2.15",
    "linux on arm": "py311-tf2.15",
    "windows": "py311-tf2.12",
    "apple": "py39-tf2.9",
    "keras 2": "py311-tf2.18-keras2",
}


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS))
def test_the_environment_has_the_name_that_tox_gives_it_on_its_system(name):
    assert diagnose(**SUPPORTED[name])["environment"] == ENVIRONMENTS[name]


@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_these_are_supported(name):
    report = diagnose(**SUPPORTED[name])
    assert (report["verdict"], what(report)) == ("supported", [])


REFUSED = {
    "two versions": (
        {"packages": {"tensorflow": "2.15.1", "tensorflow-cpu": "2.14.1"}},
        "tensorflow 2.15.1 and tensorflow-cpu 2.14.1 are installed over each other",
        "python -m pip uninstall -y tensorflow tensorflow-cpu && python -m pip install",
    ),
    "metal": (
        {
            "packages": {"tensorflow-macos": "2.9.2", "tensorflow-metal": "1.1.0"},
            "system": "macos-arm64",
            "python": "3.9.1",
            "stage": "tensorflow",
            "error": "NotFoundError: dlopen(/site-packages/tensorflow-plugins/libmetal_plugin.dylib, 6)",
        },
        "tensorflow-metal was built for another TensorFlow",
        "uninstall -y tensorflow-metal",
    ),
    "Intel Macs end at 2.16": (
        {"packages": {"tensorflow": "2.17.0"}, "system": "macos-x86_64"},
        "TensorFlow 2.17.0 is not supported on macOS on Intel",
        "2.16",
    ),
    "Linux aarch64 begins at 2.10": (
        {"packages": {"tensorflow": "2.9.3"}, "system": "linux-arm64", "python": "3.10.1"},
        "TensorFlow 2.9.3 is not supported on Linux aarch64",
        "2.10",
    ),
    "Apple silicon begins at Python 3.8": (
        {
            "packages": {},
            "system": "macos-arm64",
            "python": "3.7.16",
            "stage": "tensorflow",
            "error": "No module named 'tensorflow'",
        },
        "No supported TensorFlow runs on Python 3.7 here",
        "use Python 3.8 to 3.13",
    ),
    "a Python to come": (
        {"packages": {"tensorflow": "2.21.0"}, "python": "3.14.0"},
        "No supported TensorFlow runs on Python 3.14 here",
        "use Python 3.6 to 3.13",
    ),
    "metadata of another": (
        {"packages": {"tensorflow": "2.14.0"}, "version": "2.15.1"},
        "The package metadata say tensorflow 2.14.0, but Python imports 2.15.1",
        "PYTHONPATH",
    ),
    "32 bits": ({"packages": {"tensorflow": "2.10.0"}, "python": "3.9.1", "bits": 32}, "32 bits", "64-bit"),
    "no keras 2": (
        {
            "packages": {"tensorflow": "2.18.0"},
            "environ": {"TF_USE_LEGACY_KERAS": "true"},
            "stage": "keras",
            "error": "ImportError: Keras cannot be imported. Check that it is installed.",
        },
        "TensorFlow's Keras cannot be imported: ImportError: Keras cannot be imported",
        "tensorflow tf-keras",
    ),
    "no jax": (
        {
            "packages": {"tensorflow": "2.18.0"},
            "stage": "keras",
            "error": "ModuleNotFoundError: No module named 'jax'",
        },
        "Keras is set to another backend than TensorFlow",
        "set KERAS_BACKEND=tensorflow",
    ),
    "accum": (
        {"packages": {"tensorflow": "2.15.0"}, "stage": "accum", "error": "AttributeError: no such thing"},
        "accum cannot be imported: AttributeError: no such thing",
        "--force-reinstall",
    ),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_these_are_not_and_it_says_what_to_change(name):
    environment, says, change = REFUSED[name]
    report = diagnose(**environment)
    ((problem, remedy),) = problems(report)
    assert report["verdict"] in ("not supported", "broken")
    assert says in problem and change in remedy


def test_one_version_under_two_names_is_a_warning():
    report = diagnose({"tensorflow": "2.15.1", "tensorflow-cpu": "2.15.1"})
    ((level, warning),) = what(report)
    assert (report["verdict"], level) == ("supported", "warning") and "are installed over each other" in warning


def test_what_accum_itself_refuses_says_what_to_change():
    error = "ImportError: accum needs the TensorFlow backend of Keras 3, but found jax: set KERAS_BACKEND=tensorflow."
    report = diagnose({"tensorflow": "2.18.0"}, stage="accum", error=error)
    assert report["verdict"] == "broken" and problems(report) == [("accum cannot be imported: " + error, None)]


def test_what_is_not_of_the_matrix_is_said_of_a_system():
    report = diagnose({"tensorflow": "2.15.0"}, system="freebsd-x86_64")
    assert report["verdict"] == "not supported"
    assert "This system, freebsd-x86_64, is not supported." in problems(report)[0][0]


def test_of_two_copies_of_a_package_the_one_that_python_imports_is_read(tmp_path):
    for folder, version in (("first", "2.10.0"), ("second", "2.15.1")):
        (tmp_path / folder).mkdir()
        add_package(tmp_path / folder, "Tensor_Flow", version)
    assert environment.packages([str(tmp_path / "first"), str(tmp_path / "second"), "nowhere"]) == {
        "tensor-flow": "2.10.0"
    }


# ----------------------------------------------------------------------------------------------------------------
# The matrix


@pytest.mark.parametrize("version", matrix.VERSIONS)
def test_each_version_has_its_pins(version):
    path = checks.constraints(version)
    assert path is not None, f"tf{version}.txt is not where the package looks"
    with open(os.path.join(ROOT, "constraints", "loose", f"tf{version}.txt")) as file:
        loose = file.read()
    with open(os.path.join(ROOT, "constraints", f"tf{version}.txt")) as file:
        complete = file.read()
    pythons = matrix.pythons(version)
    head = f"# TensorFlow {version}, for Python {pythons[0]} to {pythons[-1]}"
    assert complete.startswith(head) and loose.startswith(head)
    assert set(loose.splitlines()[1:]) <= set(complete.splitlines())
    for name in ("tensorflow", "tensorflow-cpu"):
        assert f"\n{name}=={version}.*\n" in loose
