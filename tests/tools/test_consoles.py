"""The command line on any console and path: characters that the encoding lacks, blanks, and files in UTF-8."""

import ast
import errno
import glob
import os
import subprocess
import sys

import numpy as np
import pytest
from test_package import NO_TENSORFLOW

import accum
import accum.__main__
from accum._cli import migrate, named_function, requirements
from accum._cli.convert import run as convert
from accum.testing import record

pytestmark = pytest.mark.slow

FOLDER = "with blanks, \xe4 and \u4e2d"
ENCODINGS = pytest.mark.parametrize("encoding", ["cp1252", "ascii", "utf-8"])


def run(tmp_path, encoding, *arguments):
    """(exit status, output, errors) of the command line in a process without TensorFlow."""
    (tmp_path / "tensorflow.py").write_text(NO_TENSORFLOW)
    parent = os.path.dirname(os.path.dirname(os.path.abspath(accum.__file__)))
    path = os.pathsep.join([str(tmp_path), parent])
    done = subprocess.run(
        [sys.executable, "-m", "accum"] + [str(argument) for argument in arguments],
        env=dict(os.environ, PYTHONPATH=path, PYTHONIOENCODING=encoding, PYTHONUTF8="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=str(tmp_path),
    )
    return done.returncode, done.stdout.decode(encoding), done.stderr.decode(encoding)


def two_recordings(folder):
    folder.mkdir()
    for name, value in (("a.json", 1.0), ("b.json", 2.0)):
        with record(folder / name) as recorder:
            recorder.step(variables={"\xe4/\u03b2": np.ones(3) * value})
    return folder / "a.json", folder / "b.json"


def shown(text, encoding):
    """What a console shows of a text."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


@ENCODINGS
def test_compare_names_variables_and_files_on_every_console(tmp_path, encoding):
    status, out, errors = run(tmp_path, encoding, "compare", *two_recordings(tmp_path / FOLDER))
    assert (status, errors) == (1, "")
    assert shown("\xe4/\u03b2", encoding) in out


@ENCODINGS
def test_a_file_that_is_not_there_is_named_on_every_console(tmp_path, encoding):
    missing = tmp_path / FOLDER / "a.json"
    status, out, errors = run(tmp_path, encoding, "compare", missing, missing)
    assert (status, out) == (2, "") and "Traceback" not in errors
    assert "with blanks, " in errors and ascii("\u4e2d").strip("'") in errors.replace("\u4e2d", "\\u4e2d")


@pytest.mark.parametrize("arguments", ["--help", "demo --help", "doctor --json", "migrate --help", "verify --help"])
@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_help_and_reports_can_be_printed_on_every_console(tmp_path, encoding, arguments):
    status, out, errors = run(tmp_path, encoding, *arguments.split())
    assert out and "Traceback" not in errors and "UnicodeEncodeError" not in errors
    assert status == (1 if "doctor" in arguments else 0)


def test_a_function_in_a_file_on_a_drive_is_found(tmp_path, monkeypatch):
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / "their_model.py").write_text("def make():\n    return 7\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    named = str(folder / "their_model.py") + ":make"
    assert named_function.check(named) is None
    assert named_function.module_of(named_function.split(named)[0]).make() == 7
    monkeypatch.setattr(os.path, "isfile", lambda path: path == "C:\\a b\\model.py")
    assert named_function.check("C:\\a b\\model.py:make") is None
    assert named_function.split("C:\\a b\\model.py:make") == ("C:\\a b\\model.py", "make")


def test_names_to_convert_are_read_as_utf_8(tmp_path):
    path = tmp_path / "names.json"
    path.write_bytes('{"\xe4": "\u4e2d"}'.encode("utf-8"))
    assert convert._names(str(path)) == {"\xe4": "\u4e2d"}


def opened_as_text(path):
    """The lines of a file that open text without naming its encoding, which is not UTF-8 on Windows."""
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    for call in ast.walk(tree):
        is_open = isinstance(call, ast.Call) and getattr(call.func, "id", "") == "open"
        if is_open and not is_binary(call.args[1:2]) and "encoding" not in [one.arg for one in call.keywords]:
            yield call.lineno


def is_binary(mode):
    """Whether the argument of `open`, if there is one, is a constant that names a binary mode."""
    try:
        return any("b" in ast.literal_eval(one) for one in mode)
    except ValueError:
        return False


def test_every_file_of_text_is_opened_with_its_encoding():
    folder = os.path.dirname(os.path.abspath(accum.__file__))
    paths = glob.glob(os.path.join(folder, "**", "*.py"), recursive=True)
    assert len(paths) > 50
    assert [(path, line) for path in paths for line in opened_as_text(path)] == []


def closed_pipe(*_):
    raise OSError(errno.EINVAL, "Invalid argument")


def test_on_windows_a_closed_pipe_is_no_error(monkeypatch, capsys):
    discarded = []
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(accum.__main__, "_run", closed_pipe)
    monkeypatch.setattr(requirements, "discard_output", lambda: discarded.append(True))
    assert accum.__main__.main([]) == accum.__main__.READER_GONE
    assert (discarded, capsys.readouterr().err) == ([True], "")


def test_an_invalid_argument_of_a_file_is_shown(monkeypatch):
    def bad_name(*_):
        raise OSError(errno.EINVAL, "Invalid argument", "a?b")

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(accum.__main__, "_run", bad_name)
    with pytest.raises(OSError, match="Invalid argument"):
        accum.__main__.main([])


def test_on_windows_migrate_goes_on_when_the_reader_is_gone(monkeypatch):
    redirected = []
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os, "dup2", lambda *_: redirected.append(True))
    monkeypatch.setattr(sys, "stdout", open(os.devnull, "w"))  # noqa: SIM115  which has a number
    migrate._for_reader(closed_pipe)
    assert redirected == [True]
