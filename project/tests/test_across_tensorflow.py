"""constraints/across_tensorflow.sh, with which other projects test on each TensorFlow."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from environments import data

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
UV = """\
#!/usr/bin/env bash
# Notes how it is called, and what the override files say, and installs nothing.
echo "uv $*" >> "$CALLS"
while [ $# -gt 0 ]; do
    [ "$1" != --overrides ] || cat "$2" >> "$CALLS"
    shift
done
mkdir -p ".across/$ENVIRONMENT/bin"
ln -sf "$PYTHON" ".across/$ENVIRONMENT/bin/python"
"""
SMALL_LIBRARY = os.path.join(ROOT, "tests", "support", "small_library")


@pytest.mark.skipif(os.name == "nt", reason="a script for bash")
def test_another_project_is_installed_with_its_dependencies_beside_the_tensorflow_of_its_name(tmp_path):
    """uv is a stand-in here; docs/evidence.md says what was run with uv itself."""
    project, calls = tmp_path / "project", tmp_path / "calls.txt"
    shutil.copytree(SMALL_LIBRARY, str(project))
    (tmp_path / "uv").write_text(UV)
    (tmp_path / "uv").chmod(0o755)
    environment = dict(os.environ, ENVIRONMENT="py37-tf1.15-cpu", COMMAND='echo "tests ran" >> "$CALLS"')
    environment.update(CALLS=str(calls), PYTHON=sys.executable)
    environment["PATH"] = str(tmp_path) + os.pathsep + os.environ["PATH"]
    script = os.path.join(ROOT, "constraints", "across_tensorflow.sh")
    subprocess.run(["bash", script], cwd=str(project), env=environment, check=True)
    *before, ran = calls.read_text().splitlines()
    made, tensorflow, installed, *overrides = before
    assert "--python 3.7 " in made and tensorflow.endswith(f" -c {ROOT}/constraints/tf1.15.txt tensorflow-cpu")
    assert f"-c {ROOT}/constraints/tf1.15.txt " in installed and installed.endswith(" . pytest")
    assert "--no-deps" not in installed
    assert [line for line in overrides if not line.endswith(" ; python_version < '3'")] == []
    assert {"tensorflow", "tensorflow-cpu"} <= {line.split()[0] for line in overrides}
    assert ran == "tests ran"


def read(*parts):
    with open(os.path.join(ROOT, *parts), encoding="utf-8") as file:
        return file.read()


def test_the_made_up_library_depends_on_tensorflow_and_on_what_no_constraint_has():
    text = read("tests", "support", "small_library", "setup.cfg")
    needed = re.findall(r"(?m)^    ([\w-]+)", text.split("install_requires =")[1])
    pinned = re.findall(r"(?m)^([\w-]+)==", "".join(read("constraints", f"tf{of}.txt") for of in data.VERSIONS))
    assert "tensorflow" in needed and any(name not in pinned for name in needed[1:])
    assert "tests/support/small_library" in read("docs", "evidence.md")
