"""The recipes as notebooks: their text and their tested code, and what the code prints.

    python project/notebooks.py write FOLDER     # without outputs; the site does this
    python project/notebooks.py run FOLDER       # with outputs: runs each recipe in a process of its own; a minute

Nothing of Jupyter is needed. Code that needs a package that is not installed, or another TensorFlow, gets no output.
"""

import argparse
import ast
import contextlib
import importlib.util
import io
import json
import linecache
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RECIPES = os.path.join(ROOT, "docs", "recipes")
OTHER_PACKAGES = ("transformers", "tf_slim")
LIMIT = 300  # seconds for one recipe
BLOCK = re.compile(r"(?:<!-- first:\n(?P<first>.*?)-->\n+)?```python\n(?P<code>.*?)```\n?", re.DOTALL)
INSTALL = """\
*The recipe "{title}" of accum {version}, as a notebook. Install accum beside your own TensorFlow first: run
`python -m pip install .` in a clone of its repository.*
"""


def names():
    """The recipes, without `.md`."""
    return sorted(name[:-3] for name in os.listdir(RECIPES) if name.endswith(".md"))


def version():
    with open(os.path.join(ROOT, "accum", "__init__.py"), encoding="utf-8") as file:
        return re.search(r'__version__ = "(.+?)"', file.read()).group(1)


def read(name):
    with open(os.path.join(RECIPES, name + ".md"), encoding="utf-8") as file:
        return file.read()


def without_links(text):
    """Links to other pages lead nowhere from a file that was downloaded: only their words stay."""
    return re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


def split(text):
    """Yield (kind of cell, its source) of a recipe."""
    end = 0
    for block in BLOCK.finditer(text):
        yield "markdown", without_links(text[end : block.start()])
        yield "code", block.group("first") or ""
        yield "code", block.group("code")
        end = block.end()
    yield "markdown", without_links(text[end:])


def notebook(text):
    """The notebook of a recipe, in version 4.4 of the format, without outputs."""
    title = re.match(r"# (.+)", text).group(1)
    parts = [("markdown", INSTALL.format(title=title, version=version()))] + list(split(text))
    cells = []
    for kind, source in parts:
        if source.strip():
            cell = {"cell_type": kind, "metadata": {}, "source": source.strip("\n").splitlines(keepends=True)}
            cells.append(dict(cell, execution_count=None, outputs=[]) if kind == "code" else cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 4}


def says_another_tensorflow(code):
    """Whether a comment such as `# TensorFlow 1.15 to 2.15` leaves out the installed one."""
    bounds = re.search(r"(?m)^# TensorFlow (\d+)\.(\d+) (?:or later|to (\d+)\.(\d+))", code)
    if bounds is None:
        return False
    import tensorflow as tf

    tf_version = tuple(int(part) for part in tf.__version__.split(".")[:2])
    first, last = tuple(map(int, bounds.group(1, 2))), bounds.group(3, 4)
    return not first <= tf_version <= (tuple(map(int, last)) if last[0] else tf_version)


def is_possible(code):
    missing = [name for name in OTHER_PACKAGES if importlib.util.find_spec(name) is None]
    return not any(f"import {name}" in code for name in missing) and not says_another_tensorflow(code)


def run_cell(code, namespace):
    """Run a cell. Returns its outputs: what it printed, and the value of an expression that ends it."""
    name = f"<cell {len(namespace)}>"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)  # AutoGraph reads sources
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    value, printed = None, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    outputs = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    if value is not None and " object at 0x" not in repr(value):
        outputs.append({"data": {"text/plain": repr(value).splitlines(keepends=True)}, "metadata": {}})
        outputs[-1].update(execution_count=None, output_type="execute_result")
    return outputs


def with_outputs(book):
    """The notebook after its cells have run, one after the other."""
    namespace, count = {"__name__": "__main__"}, 0
    for cell in book["cells"]:
        code = "".join(cell["source"])
        if cell["cell_type"] == "code" and is_possible(code):
            count += 1
            cell.update(execution_count=count, outputs=run_cell(code, namespace))
            for output in cell["outputs"]:
                output.update({"execution_count": count} if "execution_count" in output else {})
    return book


def save(book, folder, name):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, name + ".ipynb"), "w", encoding="utf-8") as file:
        json.dump(book, file, indent=1, ensure_ascii=False)
        file.write("\n")


def write(folder):
    """Write every recipe's notebook without outputs."""
    for name in names():
        save(notebook(read(name)), folder, name)


def run(folder):
    """Write every recipe's notebook with outputs. Returns the names of those that failed."""
    failed = []
    for name in names():
        command = [sys.executable, os.path.abspath(__file__), "one", folder, name]
        environment = dict(os.environ, PYTHONPATH=ROOT, TF_CPP_MIN_LOG_LEVEL="3")
        done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, timeout=LIMIT)
        if done.returncode:
            failed.append(name)
            sys.stderr.write(f"{name}: {done.stderr.decode(errors='replace')[-2000:]}\n")
    return failed


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["write", "run", "one"])
    parser.add_argument("folder")
    parser.add_argument("recipe", nargs="?")
    chosen = parser.parse_args(arguments)
    if chosen.what == "write":
        write(chosen.folder)
    elif chosen.what == "one":
        save(with_outputs(notebook(read(chosen.recipe))), chosen.folder, chosen.recipe)
    else:
        return 1 if run(chosen.folder) else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
