"""`python -m accum demo`: real data, three runs, a table and the loss curves."""

import importlib.util
import os
import re
import signal
import subprocess
import sys

import pytest

import accum
from accum.__main__ import main
from accum._cli import log_lines

IS_GRAPH = not hasattr(accum, "GradientAccumulateModel")
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
# 1437 training images are 5 batches and a rest of 157, which ends in a micro-batch of 29; on TensorFlow 1.15, within a
# cycle.
COMMAND = [sys.executable, "-m", "accum", "demo", "--epochs", "1", "--micro-batch-size", "32"]


def _table(output):
    """The rows of the table, each a dict by the header."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in output.splitlines()]
    start = next(i for i, cells in enumerate(lines) if cells[0] == "run")
    return [dict(zip(lines[start], cells)) for cells in lines[start + 1 : start + 4]]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """(output, folder) of the command: full batch, split batch, and micro-batches that miss the batch."""
    folder = tmp_path_factory.mktemp("demo")
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    process = subprocess.run(
        COMMAND,
        cwd=str(folder),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )
    assert (process.returncode, process.stderr) == (0, "")
    return process.stdout, folder


@pytest.fixture
def rows(demo):
    return _table(demo[0])


@pytest.mark.law("L1", "L19")
@pytest.mark.slow
def test_the_split_batch_ends_at_the_weights_of_the_full_batch(rows):
    assert float(rows[1]["weight deviation"]) < (1e-5 if IS_GRAPH else 1e-3)
    assert float(rows[1]["final loss"]) == pytest.approx(float(rows[0]["final loss"]), rel=3e-4)


@pytest.mark.slow
def test_the_micro_batches_alone_end_elsewhere(rows):
    assert float(rows[2]["weight deviation"]) > 1e-3


@pytest.mark.law("L3")
@pytest.mark.slow
def test_the_updates_are_those_of_the_full_batch(rows):
    assert [int(row["updates"]) for row in rows] == [6, 6, 45 if IS_GRAPH else 6]


@pytest.mark.slow
def test_the_table_names_each_run_and_what_it_cost(rows):
    split = ["accumulated 8 x 32", "micro-batch 32"]
    if not IS_GRAPH:
        split = ['micro-batches of 32, whole_batch="all"', "micro-batches of 32"]
    assert [row["run"] for row in rows] == ["full batch 256"] + split
    for row in rows:
        assert 0 < float(row["test accuracy"].rstrip("%")) <= 100
        assert float(row["seconds"]) >= 0
        assert row["peak memory (MiB)"] == "n/a" or float(row["peak memory (MiB)"]) > 50
    if rows[0]["for training (MiB)"] != "n/a":
        assert float(rows[1]["for training (MiB)"]) < float(rows[0]["for training (MiB)"])


@pytest.mark.slow
@pytest.mark.tf("2.2")
def test_the_demo_says_what_follows_from_the_table(demo):
    assert "the same batches of 256" in demo[0] and "the same network, whose weights differ by" in demo[0]


@pytest.mark.slow
def test_the_curves_are_drawn_where_matplotlib_is_installed(demo):
    output, folder = demo
    assert (folder / "accum-demo.png").exists() == HAS_MATPLOTLIB
    assert ("Loss curves: accum-demo.png" if HAS_MATPLOTLIB else "pip install matplotlib") in output


@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["walk"],
        ["--walk"],
        ["demo", "--micro-batch-size", "0"],
        ["demo", "--micro-batch-size", "two"],
        ["demo", "--micro-batch-size", "257"],
        ["demo", "--batch-size", "-8"],
        ["demo", "--epochs", "0"],
        ["demo", "--seed", "-1"],
        ["demo", "--plot", "curves.pdf"],
        ["demo", "--plot", "no-such-folder/curves.png"],
        ["demo", "spare"],
    ],
    ids=" ".join,
)
def test_wrong_arguments_get_the_usage_and_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("usage: python -m accum")


def test_a_plot_without_matplotlib_is_refused_before_the_training(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--plot", "curves.png"])
    assert stopped.value.code == 2
    assert "pip install matplotlib" in capsys.readouterr().err


NO_PLACE = "--plot must name a writable file in an existing folder. Received: "
NEEDS_MATPLOTLIB = pytest.mark.skipif(not HAS_MATPLOTLIB, reason="without matplotlib nothing is drawn")


@pytest.fixture
def read_only(tmp_path, monkeypatch):
    """A function that makes a path in the working folder read-only, though root may write everywhere."""
    monkeypatch.chdir(tmp_path)

    def make(name):
        refused = os.path.realpath(name)
        monkeypatch.setattr(os, "access", lambda path, mode: os.path.realpath(path) != refused)

    return make


@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "plot,read_only_name",
    [("folder.png", None), ("there.png", "there.png"), ("new.png", ".")],
    ids=["folder", "file", "new"],
)
@pytest.mark.parametrize("command", [["demo"], ["compare", "a.json", "b.json"]], ids=["demo", "compare"])
def test_a_plot_that_can_t_be_written_is_refused_at_once(command, plot, read_only_name, read_only, tmp_path, capsys):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "there.png").write_bytes(b"")
    read_only(read_only_name or "nothing")
    with pytest.raises(SystemExit) as stopped:
        main(command + ["--plot", plot])
    assert stopped.value.code == 2
    assert NO_PLACE + plot in capsys.readouterr().err


@pytest.mark.law("L17")
@NEEDS_MATPLOTLIB
def test_the_default_plot_is_refused_at_once_where_it_can_t_be_written(read_only, capsys):
    read_only(".")
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--epochs", "1"])
    assert stopped.value.code == 2
    assert NO_PLACE + "accum-demo.png" in capsys.readouterr().err


@NEEDS_MATPLOTLIB
def test_a_plot_that_is_there_needs_no_writable_folder(read_only, tmp_path, capsys):
    (tmp_path / "there.png").write_bytes(b"")
    read_only(".")
    assert main(["compare", "a.json", "b.json", "--plot", "there.png"]) == 2
    assert "a.json" in capsys.readouterr().err  # what is wrong is the recording


@pytest.mark.skipif(not IS_GRAPH, reason="only static graphs accumulate micro-batches of one size")
def test_a_batch_that_static_graphs_can_t_divide_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--batch-size", "100", "--micro-batch-size", "8"])
    assert stopped.value.code == 2
    assert "--batch-size must be divisible by --micro-batch-size. Received: 100 and 8." in capsys.readouterr().err


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"accum {accum.__version__}\n"


LOG_LINES = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
E0000 00:00:1795486079.999174   12901 cuda_executor.cc:1228] failed call to cuInit: UNKNOWN ERROR (303)
I0000 00:00:1795486079.999174   12901 port.cc:153] oneDNN custom operations are on.
2026-11-24 02:00:00.123456: E tensorflow/stream_executor/cuda/cuda_driver.cc:313] failed call to cuInit
"""
OTHER_LINES = """\
Traceback (most recent call last):
F0000 00:00:1795486079.999174   12901 tensor.cc:1] Check failed: a crash is shown
E1234 is no log line
without an end of line"""


@pytest.mark.skipif(sys.platform == "win32", reason="there, nothing is dropped")
def test_log_lines_of_tensorflow_are_hidden_and_all_others_are_shown():
    """Those that a process of its own writes, too, and those in a process that outlives the context."""
    code = (
        "import os, runpy, subprocess, sys\n"
        "with runpy.run_path(sys.argv[3])['hidden']():\n"
        "    os.write(2, sys.argv[1].encode())\n"
        "    print('from Python', file=sys.stderr, flush=True)\n"
        "    left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "    child = 'import os, sys; os.write(2, sys.argv[1].encode())'\n"
        "    subprocess.check_call([sys.executable, '-c', child, sys.argv[1] + sys.argv[2] + '\\n'])\n"
        "    os.write(2, sys.argv[2].encode())\n"
        "left.kill()\n"
        "os.write(2, b' after')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, LOG_LINES, OTHER_LINES, log_lines.__file__],
        stderr=subprocess.PIPE,
        universal_newlines=True,
        timeout=60,
    )
    assert done.stderr == "from Python\n" + OTHER_LINES + "\n" + OTHER_LINES + " after"


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a full disk to write to")
def test_a_demo_on_a_full_disk_ends_in_a_line(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            COMMAND, cwd=str(tmp_path), stdout=full, stderr=subprocess.PIPE, universal_newlines=True, timeout=120
        )
    assert done.returncode == 1
    assert done.stderr == "python -m accum demo: [Errno 28] No space left on device\n"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no such signal on Windows")
def test_ctrl_c_ends_the_demo_in_a_line(tmp_path):
    command = [sys.executable, "-m", "accum", "demo", "--epochs", "2"]
    process = subprocess.Popen(
        command,
        cwd=str(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    assert process.stdout.readline().startswith("full batch 256: ")  # the second run has begun, or is about to
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, "")
    assert errors.strip() == "python -m accum: interrupted"
