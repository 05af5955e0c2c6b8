"""A reader who follows one batch opens few files, and CONTRIBUTING's diagrams name them as they are."""

import glob
import os
import re
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPT = os.path.join(ROOT, "scripts", "dev", "way_of_a_batch.py")
BAR = 22  # not counting `accum/_tf`, which answers questions about TensorFlow
DIAGRAMS = ["How a train op is built", "How a batch travels through `fit`", "How a whole batch travels"]


@pytest.mark.slow
@pytest.mark.keras_api
def test_a_whole_batch_enters_few_files():
    output = subprocess.check_output([sys.executable, SCRIPT], cwd=ROOT, universal_newlines=True)
    paths = [path for path in output.split("\n") if path.endswith(".py") and not path.startswith("accum/_tf/")]
    assert {"accum/_keras/_model/_model.py", "accum/_engine/_segments.py", "accum/_engine/_cycle.py"} <= set(paths)
    assert len(paths) <= BAR, "\n".join(paths)


def files_named_below(heading):
    """The files that the diagram below a heading of CONTRIBUTING.md names."""
    with open(os.path.join(ROOT, "CONTRIBUTING.md"), encoding="utf-8") as file:
        section = file.read().split("\n## %s\n" % heading)[1]
    return re.findall(r"[\w/]+\.py\b", section.split("```text\n")[1].split("```")[0])


@pytest.mark.slow
@pytest.mark.parametrize("heading", DIAGRAMS)
def test_the_diagrams_of_the_code_name_files_that_exist(heading):
    folders = ["accum", "accum/_keras", "accum/_keras/*", "accum/_engine", ".", "compat/v1"]
    names = files_named_below(heading)
    assert len(names) > 3
    missing = [name for name in names if not any(glob.glob(os.path.join(ROOT, folder, name)) for folder in folders)]
    assert not missing
