"""Every Python block of the README and of the guides runs, as it stands."""

import ast
import linecache
import os
import re
import subprocess
import sys
import warnings

import pytest
import versions

import accum

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ROOT, SUPPORT = os.path.dirname(HERE), os.path.join(HERE, "support")

PAGES = ["README.md"] + [
    folder + name
    for folder in ("docs/", "docs/recipes/", "project/pages/")
    for name in sorted(os.listdir(os.path.join(ROOT, folder)))
    if name.endswith(".md")
]


OF_KERAS_2 = ("v1.layers", "tf1.layers", "get_scaled_loss", "import transformers")


def blocks(page):
    """The code between ```python and ```; what is not to run, such as that of other libraries, stands after ```py.

    A comment that begins with `first:` before a block is code that makes its names, which readers have already. One
    that begins with `then:` after a block uses what the block defines.
    """
    before, after = r"(?:<!-- first:\n(.*?)-->\n+)?", r"(?:\n+<!-- then:\n(.*?)-->)?"
    with open(os.path.join(ROOT, *page.split("/")), encoding="utf-8") as file:
        blocks = re.findall(before + r"```python\n(.*?)```" + after, file.read(), re.DOTALL)
    return ["".join(parts) for parts in blocks]


def said_first(block):
    """The first TensorFlow version on which a block runs, by its comment `# TensorFlow 2.10 or later`."""
    match = re.search(r"(?m)^# TensorFlow (\d+)\.(\d+) (?:or later|to)\b", block)
    return (int(match.group(1)), int(match.group(2))) if match else (1, 0)


def said_last(block):
    """The last one, by its comment `# TensorFlow 1.15 to 2.15`."""
    match = re.search(r"(?m)^# TensorFlow [\d.]+ to (\d+)\.(\d+)\b", block)
    return (int(match.group(1)), int(match.group(2))) if match else (9, 9)


def says_that_it_warns(block):
    """Whether a block is about a warning of a result that may differ, by its comment `# warns`."""
    return "# warns" in block


ALL = [pytest.param(page, block, id=page + "-" + str(i)) for page in PAGES for i, block in enumerate(blocks(page))]


@pytest.mark.slow
@pytest.mark.parametrize("page,block", ALL)
def test_a_block_runs_as_it_stands(page, block):
    if "accum.compat.v1" not in block and not versions.HAS_KERAS_API:
        pytest.skip("TF 1.15 has no Keras API")
    if versions.IS_KERAS_3 and any(name in block for name in OF_KERAS_2):
        pytest.skip("the block is about Keras 2")
    if not said_first(block) <= versions.TF_VERSION <= said_last(block):
        pytest.skip("the block says that it needs another TensorFlow")
    if "import transformers" in block:
        pytest.importorskip("transformers", reason="installed in two environments")
    if "MirroredStrategy()" in block:
        _run_on_two_replicas(block)
    else:
        name = f"<a block of {page}>"  # not the page: AutoGraph would read other lines of it than those of the block
        linecache.cache[name] = (len(block), None, block.splitlines(keepends=True), name)
        with warnings.catch_warnings():
            if not says_that_it_warns(block):
                warnings.simplefilter("error", accum.InexactWarning)
            exec(compile(block, name, "exec"), {})


def test_a_block_may_warn_of_what_may_differ_only_if_it_says_so():
    warns = "import warnings\nimport accum\nwarnings.warn('It may differ.', accum.InexactWarning)\n"
    with pytest.raises(accum.InexactWarning):
        test_a_block_runs_as_it_stands("a page", warns)
    with pytest.warns(accum.InexactWarning):
        test_a_block_runs_as_it_stands("a page", warns + "# warns\n")


def _run_on_two_replicas(block):
    """In a process of its own: several strategies in one mix up their collective operations, those of plain TF too."""
    strict = "" if says_that_it_warns(block) else "warnings.simplefilter('error', accum.InexactWarning)\n"
    code = "import replicas\nreplicas.make_cpus()\nreplicas.look_often_for_the_end_of_replicas()\n"
    code += f"import warnings, accum\n{strict}{block}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=SUPPORT, stderr=subprocess.PIPE, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]


def test_a_block_that_only_defines_something_is_followed_by_code_that_uses_it():
    only_defined = (ast.ClassDef, ast.FunctionDef, ast.Import, ast.ImportFrom)
    idle = [
        f"{page}: {block}"
        for page in PAGES
        for block in blocks(page)
        if all(isinstance(statement, only_defined) for statement in ast.parse(block).body)
    ]
    assert idle == []


# ----------------------------------------------------------------------------------------------------------------
# What CONTRIBUTING.md tells to type


def read(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as file:
        return file.read()


def test_the_files_that_contributing_names_are_there():
    text = read("CONTRIBUTING.md")
    named = re.findall(r"\b(?:(?:tests|project)/[\w/]+\.py|constraints/[\w./]*\w)", text)
    assert {path.split("/")[0] for path in named} == {"tests", "project", "constraints"}
    assert [path for path in named if not os.path.exists(os.path.join(ROOT, *path.split("/")))] == []
