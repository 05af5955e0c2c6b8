"""What is installed and how it says no: import errors, the one place that knows versions, the names."""

import glob
import os
import re
import subprocess
import sys

import pytest

import accum
import accum.compat.v1
import accum.convert

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SOURCES = sorted(
    path
    for folder in ("accum", "compat")
    for path in glob.glob(os.path.join(ROOT, folder, "**", "*.py"), recursive=True)
    if os.path.join("accum", "compat") not in path
)


def import_with(tensorflow_source, tmp_path):
    """Import accum in a process whose TensorFlow is this module; None: there is none."""
    if tensorflow_source is not None:
        (tmp_path / "tensorflow.py").write_text(tensorflow_source)
    hide = "import sys; sys.modules['tensorflow'] = None; " if tensorflow_source is None else ""
    parent = os.path.dirname(os.path.dirname(os.path.abspath(accum.__file__)))
    path = os.pathsep.join([str(tmp_path), parent])
    done = subprocess.run(
        [sys.executable, "-c", hide + "import accum"],
        env=dict(os.environ, PYTHONPATH=path),
        stderr=subprocess.PIPE,
        universal_newlines=True,
        cwd=str(tmp_path),
    )
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


def test_without_tensorflow_the_import_says_what_to_install(tmp_path):
    said = import_with(None, tmp_path)
    assert said.startswith("ImportError: accum runs on TensorFlow 1.15 or 2.2 to 2.21")
    assert "pip install 'tensorflow<2.22'" in said


@pytest.mark.parametrize("version", ["1.14.0", "2.0.4", "2.1.0", "2.22.0", "3.0.0"])
def test_on_an_unsupported_line_the_import_says_so(version, tmp_path):
    said = import_with("__version__ = {!r}".format(version), tmp_path)
    assert said.startswith("ImportError: accum runs on")
    assert "found TensorFlow {}".format(version) in said
    assert "pip install" in said


OTHER_BACKEND = """
__version__ = "2.18.0"

class keras:
    __version__ = "3.15.0"

    class backend:
        backend = staticmethod(lambda: "jax")
"""


def test_keras_3_on_another_backend_is_refused_in_one_sentence(tmp_path):
    assert import_with(OTHER_BACKEND, tmp_path) == (
        "ImportError: accum runs on Keras 3 over TensorFlow, and found it over jax: set KERAS_BACKEND=tensorflow."
    )


def test_a_keras_3_that_is_too_old_is_refused_with_the_remedy(tmp_path):
    said = import_with(OTHER_BACKEND.replace("3.15.0", "3.6.0"), tmp_path)
    assert said.startswith("ImportError: accum runs on Keras 3.7 and later, and found 3.6.0: `pip install -U keras`")


def test_an_error_inside_tensorflow_is_not_hidden(tmp_path):
    assert import_with("import no_such_part_of_it", tmp_path).startswith(
        "ModuleNotFoundError: No module named 'no_such"
    )


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


@pytest.mark.parametrize("path", SOURCES, ids=[os.path.relpath(path, ROOT) for path in SOURCES])
def test_only_one_file_knows_versions(path):
    with open(path, encoding="utf-8") as file:
        source = file.read()
    assert "tensorflow.python" not in source
    if os.path.basename(path) != "_tf.py":
        assert not re.search(
            r"(?m)tf\.__version__|tf\.version\.|hasattr\(tf|getattr\(tf|^ *(import|from) tensorflow", source
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
@pytest.mark.skipif(hasattr(accum, "GradientAccumulateModel"), reason="this line has Keras")
def test_conversion_says_that_it_needs_keras():
    with pytest.raises(ValueError, match="`accum.convert` needs Keras 2: TensorFlow 2.2 to 2.15."):
        accum.convert.from_v1("nowhere", [])
