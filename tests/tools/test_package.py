"""What is installed and how it says no: import errors, the one place that knows versions, the names."""

import glob
import os
import re
import subprocess
import sys

import pytest
import versions

import accum
import accum.compat.v1
import accum.convert

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SOURCES = sorted(
    path
    for folder in ("accum", "compat")
    for path in glob.glob(os.path.join(ROOT, folder, "**", "*.py"), recursive=True)
    if os.path.join("accum", "compat") not in path
)


NO_TENSORFLOW = "raise ModuleNotFoundError(\"No module named 'tensorflow'\", name='tensorflow')"


def run_with(tensorflow_source, tmp_path, *arguments):
    """Run Python where TensorFlow is this module; None: the environment's own."""
    if tensorflow_source is not None:
        (tmp_path / "tensorflow.py").write_text(tensorflow_source)
    parent = os.path.dirname(os.path.dirname(os.path.abspath(accum.__file__)))
    return subprocess.run(
        [sys.executable] + list(arguments),
        env=dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), parent])),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        cwd=str(tmp_path),
    )


def import_with(tensorflow_source, tmp_path):
    done = run_with(tensorflow_source, tmp_path, "-c", "import accum")
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_without_tensorflow_the_import_says_what_to_install(tmp_path):
    said = import_with(NO_TENSORFLOW, tmp_path)
    assert said.startswith("ImportError: accum needs TensorFlow 1.15 or 2.2 to 2.21")
    assert "pip install 'tensorflow<2.22'" in said


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.14.0", "2.0.4", "2.1.0", "2.22.0", "3.0.0"])
def test_with_an_unsupported_version_the_import_says_so(version, tmp_path):
    said = import_with(f"__version__ = {version!r}", tmp_path)
    assert said.startswith("ImportError: accum needs")
    assert f"found TensorFlow {version}" in said
    assert "pip install" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "version, is_asked_for, is_imported", [("2.22.0", "1", True), ("2.22.0", "0", False), ("2.1.0", "1", False)]
)
def test_an_untested_version_can_be_asked_for(version, is_asked_for, is_imported, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCUM_UNTESTED_TENSORFLOW", is_asked_for)
    (tmp_path / "version.py").write_text(read_version())
    done = run_with(f"__version__ = {version!r}\nclass keras: pass", tmp_path, "version.py")
    assert (done.returncode == 0) is is_imported, done.stderr
    assert ("and not with TensorFlow 2.22.0: before you trust it" in done.stderr) is is_imported


def read_version():
    """The source of accum's module that looks at the versions."""
    with open(
        os.path.join(os.path.dirname(os.path.abspath(accum.__file__)), "_tf", "version.py"), encoding="utf-8"
    ) as file:
        return file.read()


def keras_names():
    """The names that `accum/_public.py` takes from the Keras interface."""
    with open(os.path.join(os.path.dirname(accum.__file__), "_public.py")) as file:
        lines = [line for line in file if "from accum._keras." in line]
    return sorted(name.strip() for line in lines for name in line.split(" import ")[1].split(","))


@pytest.mark.skipif(versions.HAS_KERAS_API, reason="this TensorFlow has the Keras interface")
@pytest.mark.law("L17")
@pytest.mark.parametrize("name", keras_names())
def test_a_name_of_the_keras_interface_says_on_tf_1_15_what_there_is(name):
    said = f"`accum.{name}` needs TensorFlow 2.2.*use `accum.compat.v1`"
    with pytest.raises(AttributeError, match=said):
        getattr(accum, name)
    with pytest.raises(ImportError, match=said):
        exec(f"from accum import {name}")
    assert not hasattr(accum, name) and name not in accum.__all__ and not hasattr(accum, "no_such_name")


OTHER_BACKEND = """
__version__ = "2.18.0"

class keras:
    __version__ = "3.15.0"

    class backend:
        backend = staticmethod(lambda: "jax")
"""


@pytest.mark.slow
def test_keras_3_on_another_backend_is_refused_in_one_sentence(tmp_path):
    assert import_with(OTHER_BACKEND, tmp_path) == (
        "ImportError: accum needs the TensorFlow backend of Keras 3, but found jax: set KERAS_BACKEND=tensorflow."
        " [accum: install]"
    )


@pytest.mark.slow
def test_a_keras_3_that_is_too_old_is_refused_with_the_remedy(tmp_path):
    said = import_with(OTHER_BACKEND.replace("3.15.0", "3.6.0"), tmp_path)
    assert said.startswith(
        "ImportError: accum needs Keras 3.7 or later, but found Keras 3.6.0: run `pip install -U keras`"
    )


@pytest.mark.slow
def test_an_error_inside_tensorflow_is_not_hidden(tmp_path):
    assert import_with("import no_such_part_of_it", tmp_path).startswith(
        "ModuleNotFoundError: No module named 'no_such"
    )


NO_NATIVE_TENSORFLOW = "raise ImportError({!r})".format("""Traceback (most recent call last):
  File "a/pywrap_tensorflow.py", line 62, in <module>
    from tensorflow.python._pywrap_tensorflow_internal import *
ImportError: libb.so.1: cannot open shared object file


Failed to load the native TensorFlow runtime.
See https://www.tensorflow.org/install/errors for some common causes and solutions.""")
COMMANDS = ("compare", "convert", "demo", "doctor", "fit-size", "migrate", "verify")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"]] + [[name, "--help"] for name in COMMANDS], ids=" ".join
)
def test_help_and_version_need_no_tensorflow(arguments, tmp_path):
    done = run_with(NO_TENSORFLOW, tmp_path, "-m", "accum", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(("usage: python -m accum", f"accum {accum.__version__}\n"))
    assert arguments != ["--help"] or all(f"\n    {name} " in done.stdout for name in COMMANDS)


@pytest.mark.slow
def test_no_command_at_all_gets_the_usage_without_tensorflow(tmp_path):
    done = run_with(NO_TENSORFLOW, tmp_path, "-m", "accum")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("usage: python -m accum")


@pytest.mark.slow
@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "source,said",
    [
        (NO_TENSORFLOW, "accum needs TensorFlow 1.15 or 2.2 to 2.21, but TensorFlow is not installed"),
        ("__version__ = '2.1.0'", "accum needs TensorFlow 1.15 or 2.2 to 2.21, but found TensorFlow 2.1.0"),
        (
            "raise TypeError('Descriptors cannot not be created.\\nMore')",
            "TypeError: Descriptors cannot not be created: ",
        ),
        (NO_NATIVE_TENSORFLOW, "ImportError: libb.so.1: cannot open shared object file: "),
    ],
    ids=["none", "unsupported", "broken", "native"],
)
@pytest.mark.parametrize("arguments", ["demo", "verify here:f", "convert from-v1 a b --model here:f"])
def test_a_command_that_needs_tensorflow_says_so_in_a_line(arguments, source, said, tmp_path):
    done = run_with(source, tmp_path, "-m", "accum", *arguments.split())
    start = f"python -m accum {arguments.split()[0]} needs TensorFlow: "
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(start + said) and "`python -m accum doctor`" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.tf("2.2")
def test_what_a_command_imports_of_the_user_s_has_all_of_accum(tmp_path):
    (tmp_path / "mine.py").write_text("import accum; raise SystemExit(accum.GradientAccumulateOptimizer.__doc__)")
    done = run_with(None, tmp_path, "-m", "accum", "verify", "mine:f")
    assert done.returncode == 2 and "SystemExit: Accumulate the gradients of `accum_steps` micro-batches" in done.stderr


def test_compat_has_one_identity():
    assert accum.compat.v1.__name__ == "accum.compat.v1"
    done = subprocess.run(
        [sys.executable, "-c", "import compat"], cwd=ROOT, stderr=subprocess.PIPE, universal_newlines=True
    )
    assert "This package is `accum.compat`" in done.stderr


@pytest.mark.parametrize("module", [accum, accum.compat.v1], ids=["accum", "accum.compat.v1"])
def test_public_names_exist_and_say_what_they_are(module):
    for name in module.__all__:
        value = getattr(module, name)
        assert isinstance(value, str) or value.__doc__.strip()


PRIVATE_MODULES = {
    "random_ops.py": ["from tensorflow.python.framework import op_callbacks"],
    "watching.py": [
        "from tensorflow.python.eager import forwardprop_util",
        "from tensorflow.python.eager import record",
        "from tensorflow.python.eager import tape as record",
        "from tensorflow.python.ops import gradients_util",
    ],
}


@pytest.mark.parametrize("path", SOURCES, ids=[os.path.relpath(path, ROOT) for path in SOURCES])
def test_only_one_folder_knows_versions(path):
    with open(path, encoding="utf-8") as file:
        source = file.read()
    private = [line.split("  #")[0].strip() for line in source.splitlines() if "tensorflow.python" in line]
    assert private == PRIVATE_MODULES.get(os.path.basename(path), [])
    if os.path.basename(os.path.dirname(path)) != "_tf":
        assert not re.search(
            r"(?m)tf\.__version__|\btf\.version\.|hasattr\(tf|getattr\(tf|"
            r"_tf\.version( import)?\b.*\b(IS_KERAS_3|VERSION)\b|"
            r"^ *(import|from) tensorflow",
            source,
        )


MESSAGES = SOURCES + glob.glob(os.path.join(ROOT, "constraints", "*.txt"))


@pytest.mark.parametrize("path", MESSAGES, ids=[os.path.relpath(path, ROOT) for path in MESSAGES])
def test_nobody_is_told_to_install_what_is_not_published(path):
    """What needs a further package names that one, which works from a checkout, a wheel and an index alike."""
    with open(path, encoding="utf-8") as file:
        assert "tf-accum" not in file.read()


def test_golden_and_sources_were_found():
    assert len(SOURCES) > 10


@pytest.mark.law("L17")
@pytest.mark.skipif(hasattr(accum, "GradientAccumulateModel"), reason="this version has Keras")
def test_conversion_says_that_it_needs_keras():
    with pytest.raises(ValueError, match="`accum.convert` needs Keras: TensorFlow 2.2 or later."):
        accum.convert.from_v1("nowhere", [])
