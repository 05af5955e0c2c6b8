"""`python -m accum migrate` and files: which it looks at, what it keeps of them, and when it writes nothing."""

import ast
import glob
import importlib.util
import os
import stat

import pytest

import accum
from accum.__main__ import main

pytestmark = pytest.mark.slow

HAS_LIBCST = importlib.util.find_spec("libcst") is not None
needs_libcst = pytest.mark.skipif(not HAS_LIBCST, reason="`migrate` is an extra, tested where tox.ini installs LibCST")

BEFORE = b'from gradient_accumulator import GradientAccumulateOptimizer\nmake = GradientAccumulateOptimizer("sgd", 4)\n'
AFTER = b'import accum\nmake = accum.GradientAccumulateOptimizer("sgd", 4)\n'
FILES = sorted(glob.glob(os.path.join(os.path.dirname(accum.__file__), "_migrate", "**", "*.py"), recursive=True))
PYTHON_2 = b'import gradient_accumulator\nprint "two"\n'


@pytest.fixture
def their(tmp_path):
    """A function that makes a file: `their("a/b.py")`, of what there is to rewrite or of another content."""

    def make(name, content=BEFORE):
        path = tmp_path.joinpath(*name.split("/"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    return make


def migrate(*arguments):
    return main(["migrate"] + [str(argument) for argument in arguments])


@needs_libcst
def test_without_write_there_is_a_diff_and_nothing_else(their, capsys):
    path = their("a.py")
    before = os.stat(str(path))
    assert migrate(path) == 0
    after = os.stat(str(path))
    assert path.read_bytes() == BEFORE and (after.st_ino, after.st_mtime) == (before.st_ino, before.st_mtime)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["--- {}".format(path), "+++ {}".format(path)]
    assert [line for line in lines[3:] if line[0] == "+"] == ["+" + line for line in AFTER.decode().splitlines()]


KEPT = {
    "crlf": (BEFORE.replace(b"\n", b"\r\n"), AFTER.replace(b"\n", b"\r\n")),
    "mixed": (b"a = 1\r\nb = 2\n" + BEFORE + b"c = '\x0c'\r\n", b"a = 1\r\nb = 2\n" + AFTER + b"c = '\x0c'\r\n"),
    "bom": (b"\xef\xbb\xbf" + BEFORE, b"\xef\xbb\xbf" + AFTER),
    "latin-1": (b"# coding: latin-1\n'\xe9'\n" + BEFORE, b"# coding: latin-1\n'\xe9'\n" + AFTER),
    "utf-8": ("'\u4e2d\u2028'\n".encode() + BEFORE, "'\u4e2d\u2028'\n".encode() + AFTER),
    "tabs-and-no-last-line-end": (
        BEFORE + b"if 1:\n\tx = [1 ,2]  ;y=3 # \t",
        AFTER + b"if 1:\n\tx = [1 ,2]  ;y=3 # \t",
    ),
}


@needs_libcst
@pytest.mark.parametrize("name", sorted(KEPT))
def test_every_other_byte_stays(their, name, capsys):
    before, after = KEPT[name]
    path = their("a.py", before)
    assert migrate("--write", path) == 0
    assert path.read_bytes() == after


@needs_libcst
def test_folders_are_searched_but_for_what_is_hidden_installed_or_linked(their, tmp_path, capsys):
    found = [their("a.py"), their("package/deep/b.py")]
    left = [
        their(name) for name in (".tox/c.py", "env/lib/c.py", "site-packages/c.py", ".c.py", "c.txt", "package/c.pyi")
    ]
    their("env/pyvenv.cfg", b"")
    elsewhere = their("../elsewhere/d.py")
    os.symlink(str(elsewhere), str(tmp_path / "linked.py"))
    os.symlink(str(elsewhere.parent), str(tmp_path / "linked"))
    assert migrate("--write", tmp_path, found[0]) == 0
    assert [path.read_bytes() for path in found] == [AFTER] * 2
    assert {path.read_bytes() for path in left + [elsewhere]} == {BEFORE}


@needs_libcst
def test_permissions_stay_and_a_link_stays_a_link(their, tmp_path, capsys):
    path = their("tool.py")
    os.chmod(str(path), 0o751)
    link = tmp_path / "link"
    os.symlink("tool.py", str(link))
    assert migrate("--write", link) == 0
    assert os.path.islink(str(link)) and path.read_bytes() == AFTER
    assert stat.S_IMODE(os.stat(str(path)).st_mode) == 0o751
    assert sorted(os.listdir(str(tmp_path))) == ["link", "tool.py"]


@needs_libcst
def test_a_file_with_nothing_to_change_is_not_touched(their, capsys):
    paths = [their("a.py", AFTER), their("b.py", b"import gradient_accumulator\n"), their("c.py", b"print 'two'\n")]
    for path in paths:
        os.utime(str(path), (1, 1))
    assert migrate("--write", *paths) == 0
    assert [os.stat(str(path)).st_mtime for path in paths] == [1] * 3


UNREADABLE = {
    "Python 2": (PYTHON_2, "not understood as Python 3: line 2"),
    "bytes": (b"\n\n\n# gradient_accumulator \xff\n", "can't decode"),
    "cookie": (b"# coding: klingon\nimport gradient_accumulator\n", "klingon"),
}


@needs_libcst
@pytest.mark.parametrize("name", sorted(UNREADABLE))
def test_one_unreadable_file_and_nothing_is_written(their, name, tmp_path, capsys):
    content, words = UNREADABLE[name]
    good, bad = their("a.py"), their("b.py", content)
    assert migrate("--write", tmp_path) == 2
    assert (good.read_bytes(), bad.read_bytes()) == (BEFORE, content)
    said = capsys.readouterr()
    assert said.out == "" and "{}: ".format(bad) in said.err and words in said.err


@needs_libcst
def test_a_path_that_is_not_there_is_named(their, tmp_path, capsys):
    path = their("a.py")
    assert migrate("--write", path, tmp_path / "b.py") == 2
    assert path.read_bytes() == BEFORE
    assert "b.py: no such file or folder" in capsys.readouterr().err


@needs_libcst
@pytest.mark.parametrize("broken", ["access", "replace"])
def test_a_file_that_can_t_be_replaced_is_as_it_was(their, broken, tmp_path, monkeypatch, capsys):
    path = their("a.py")

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, fail if broken == "replace" else lambda path, mode: False)
    assert migrate("--write", path) == 2
    assert path.read_bytes() == BEFORE and os.listdir(str(tmp_path)) == ["a.py"]
    assert "a.py: " in capsys.readouterr().err


def test_without_libcst_there_is_one_sentence_with_the_remedy(their, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert migrate("--write", their("a.py")) == 2
    assert "python -m pip install libcst" in capsys.readouterr().err


def test_no_path_at_all_is_a_wrong_argument(capsys):
    with pytest.raises(SystemExit) as caught:
        migrate()
    assert caught.value.code == 2


def imported(path):
    """Full names of the modules that a file imports, at its top or later."""
    with open(path, encoding="utf-8") as file:
        nodes = list(ast.walk(ast.parse(file.read())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return names + [node.module for node in nodes if isinstance(node, ast.ImportFrom)]


@pytest.mark.parametrize("path", FILES, ids=[os.path.basename(path) for path in FILES])
def test_nothing_of_it_imports_tensorflow(path):
    """So that it runs where there is none: also by no other part of accum, all of which do."""
    for name in imported(path):
        assert name.split(".")[0] not in ("tensorflow", "keras", "numpy")
        assert name.split(".")[0] != "accum" or name.startswith("accum._migrate")
    if os.path.basename(path) in ("command.py", "files.py"):
        assert not any(name.startswith("libcst") for name in imported(path))
