"""The command line: `python -m accum` and `accum`, its checks before TensorFlow is imported, and its exit statuses."""

import errno
import os
import subprocess
import sys

import pytest
from test_package import NO_TENSORFLOW, run_with

import accum.__main__
from accum._cli import named_function

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SCRIPT = (
    "import sys\nfrom accum.__main__ import run\nif __name__ == '__main__':\n    sys.exit(run())\n"  # as pip writes it
)


@pytest.fixture()
def command(tmp_path):
    """The path of the command `accum`, as an installation has it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "accum").write_text(SCRIPT)
    return str(tmp_path / "bin" / "accum")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments,status,said",
    [
        ("--version", 0, "accum "),
        ("verify", 2, "usage: accum verify"),
        ("verify here", 2, "MODULE:FUNCTION must name a module and a function"),
        ("verify no_such_file.py:f", 2, "There is no file no_such_file.py."),
        ("convert from-v1 a b --model here", 2, "MODULE:FUNCTION must name a module and a function"),
        ("convert from-v1 a b --model m:f --names none.json", 2, "there is no file none.json."),
        ("demo --batch-size 10 --micro-batch-size 30", 2, "usage: accum demo"),
        ("demo --plot curves.pdf", 2, "--plot must name a .png file"),
        ("demo", 2, "accum demo needs TensorFlow"),
    ],
)
def test_the_installed_command_checks_its_arguments_without_tensorflow(arguments, status, said, tmp_path, command):
    done = run_with(NO_TENSORFLOW, tmp_path, command, *arguments.split())
    assert done.returncode == status
    assert said in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_the_installed_command_is_in_the_package():
    with open(os.path.join(ROOT, "setup.py"), encoding="utf-8") as file:
        assert '"accum = accum.__main__:run"' in file.read()
    assert callable(accum.__main__.run)


@pytest.mark.slow
@pytest.mark.tf("2.2")
def test_a_program_that_is_called_like_the_command_has_all_of_accum(tmp_path, command):
    with open(command, "w") as file:
        file.write(
            "import accum\nfrom accum import *\nprint(accum.GradientAccumulateModel.__name__, len(accum.__all__))"
        )
    done = run_with(None, tmp_path, command)
    assert done.stdout == f"GradientAccumulateModel {len(accum.__all__)}\n" and done.returncode == 0
    assert "Traceback" not in done.stderr and "Warning:" not in done.stderr  # TensorFlow logs lines of its own there


def test_a_function_in_a_file_is_found_with_the_modules_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_it_for_accum.py").write_text("number = 7")
    (tmp_path / "numbers.py").write_text("import beside_it_for_accum as b\nfunction = lambda: b.number")
    where, name = named_function.split(str(tmp_path / "numbers.py") + ":function")
    assert named_function.check(f"{where}:{name}") is None
    import numbers

    assert getattr(named_function.module_of(where), name)() == 7
    assert sys.modules["numbers"] is numbers  # Python's own


@pytest.mark.parametrize("named", ["", ":", "m", "m:", ":f", "a/m:f", "missing.py:f"])
def test_a_name_without_a_module_or_function_is_refused(named):
    assert "must name a module and a function" in named_function.check(named)


def raising(error):
    def perform(*_):
        raise error

    return perform


def test_ctrl_c_ends_a_command_in_a_line(monkeypatch, capsys):
    monkeypatch.setattr(accum.__main__, "_run", raising(KeyboardInterrupt()))
    assert accum.__main__.main([]) == 130
    assert capsys.readouterr().err == "python -m accum: interrupted\n"


def test_other_errors_of_the_system_are_not_hidden(monkeypatch):
    monkeypatch.setattr(accum.__main__, "_run", raising(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError):
        accum.__main__.main([])


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a full disk to write to")
def test_a_full_disk_is_an_error_in_a_line(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "accum", "--version"], stdout=full, stderr=subprocess.PIPE, universal_newlines=True
        )
    assert (done.returncode, done.stderr) == (1, "python -m accum: No space left on device\n")
