"""`python -m accum demo`: real data, three runs, a table and the loss curves."""

import contextlib
import importlib.util
import io
import os
import re
import signal
import subprocess
import sys

import pytest

import accum
from accum.__main__ import main
from accum._cli import log_lines

KERAS_APIS = ["optimizer", "model"] if hasattr(accum, "GradientAccumulateModel") else []
APIS = KERAS_APIS + ["v1"]  # v1 last: it is on its way in the meantime
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
# 1437 training images are 5 batches and a rest of 157: an unfinished cycle of 64 + 64 + 29 in each epoch.
ARGUMENTS = ["demo", "--batch-size", "256", "--accum-steps", "4", "--epochs", "2", "--seed", "3"]


def _start_command(folder):
    command = [sys.executable, "-m", "accum"] + ARGUMENTS + ["--api", "v1"]
    return subprocess.Popen(command, cwd=str(folder), stdout=subprocess.PIPE, universal_newlines=True)


def _end_command(process):
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0
    return output


def _in_process(api, folder):
    arguments = ARGUMENTS + ["--api", api]
    if HAS_MATPLOTLIB:
        arguments += ["--plot", str(folder / "curves.png")]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(arguments) == 0
    return output.getvalue()


def _table(output):
    """The rows of the table, each a dict by the header."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in output.splitlines()]
    start = next(i for i, cells in enumerate(lines) if cells[0] == "run")
    return [dict(zip(lines[start], cells)) for cells in lines[start + 1 : start + 4]]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A function that gives the demo by an API: (output, folder).

    v1 runs as a command, beside the others, which need no process of their own around those of their runs: each
    process that imports TensorFlow costs up to 5 s.
    """
    folders = {api: tmp_path_factory.mktemp(api) for api in APIS}
    process = _start_command(folders["v1"])
    outputs = {}

    def run(api):
        if api not in outputs:
            outputs[api] = _end_command(process) if api == "v1" else _in_process(api, folders[api])
        return outputs[api], folders[api]

    yield run
    process.wait()
    process.stdout.close()


@pytest.fixture
def rows(demo, api):
    """Full batch, accumulated, micro-batch."""
    return _table(demo(api)[0])


@pytest.mark.law("L1")
@pytest.mark.slow
@pytest.mark.parametrize("api", APIS)
def test_the_accumulated_run_ends_at_the_weights_of_the_full_batch(rows):
    assert float(rows[1]["weight deviation"]) < 1e-5
    assert float(rows[1]["final loss"]) == pytest.approx(float(rows[0]["final loss"]), abs=1e-5)
    assert rows[1]["test accuracy"] == rows[0]["test accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS)
def test_the_micro_batches_alone_end_elsewhere(rows):
    assert float(rows[2]["weight deviation"]) > 1e-2


@pytest.mark.law("L3")
@pytest.mark.slow
@pytest.mark.parametrize("api", APIS)
def test_the_updates_are_those_of_the_full_batch(rows):
    assert [int(row["updates"]) for row in rows] == [2 * 6, 2 * 6, 2 * 23]


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS)
def test_the_table_names_each_run_and_what_it_cost(rows):
    assert [row["run"] for row in rows] == ["full batch 256", "accumulated 4 x 64", "micro-batch 64"]
    for row in rows:
        assert 0 < float(row["test accuracy"].rstrip("%")) <= 100
        assert float(row["seconds"]) >= 0
        assert row["peak memory (MiB)"] == "n/a" or float(row["peak memory (MiB)"]) > 50


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS)
def test_every_api_trains_alike(demo, rows):
    for ours, graph in zip(rows, _table(demo("v1")[0])):
        assert float(ours["final loss"]) == pytest.approx(float(graph["final loss"]), abs=1e-5)


@pytest.mark.slow
def test_the_curves_are_drawn_where_matplotlib_is_installed(demo):
    output, folder = demo("v1")
    assert (folder / "accum-demo.png").exists() == HAS_MATPLOTLIB
    assert ("Loss curves: accum-demo.png" if HAS_MATPLOTLIB else "pip install matplotlib") in output


@pytest.mark.slow
@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="the curves need the `plot` extra")
@pytest.mark.skipif(not KERAS_APIS, reason="this TensorFlow has no Keras API")
def test_the_curves_are_drawn_in_the_file_asked_for(demo):
    output, folder = demo("model")
    assert (folder / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert f"Loss curves: {folder / 'curves.png'}" in output


@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["walk"],
        ["--walk"],
        ["demo", "--api", "tf1"],
        ["demo", "--accum-steps", "0"],
        ["demo", "--accum-steps", "two"],
        ["demo", "--batch-size", "-8"],
        ["demo", "--batch-size", "100", "--accum-steps", "8"],
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


@pytest.mark.skipif(bool(KERAS_APIS), reason="this TensorFlow has every API")
def test_an_api_that_this_tensorflow_lacks_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--api", "model"])
    assert stopped.value.code == 2
    assert "v1" in capsys.readouterr().err


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"accum {accum.__version__}\n"


@pytest.fixture(scope="module")
def micro_batches(tmp_path_factory):
    """What the demo prints without one, after one epoch."""
    folder = tmp_path_factory.mktemp("micro-batches")
    command = [
        sys.executable,
        "-m",
        "accum",
        "demo",
        "--epochs",
        "1",
        "--batch-size",
        "256",
        "--micro-batch-size",
        "32",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    process = subprocess.run(
        command,
        cwd=str(folder),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )
    assert (process.returncode, process.stderr) == (0, "")
    return process.stdout


@pytest.mark.law("L19")
@pytest.mark.slow
@pytest.mark.tf("2.2")
def test_a_batch_in_micro_batches_trains_as_the_full_batch_with_batch_normalisation(micro_batches):
    rows = _table(micro_batches)
    assert [row["run"] for row in rows] == [
        "full batch 256",
        'micro-batches of 32, whole_batch="all"',
        "micro-batches of 32",
    ]
    assert [int(row["updates"]) for row in rows] == [6, 6, 6]
    assert float(rows[1]["weight deviation"]) < 1e-3 < float(rows[2]["weight deviation"])
    assert float(rows[1]["final loss"]) == pytest.approx(float(rows[0]["final loss"]), rel=3e-4)
    if rows[0]["for training (MiB)"] != "n/a":
        assert float(rows[1]["for training (MiB)"]) < float(rows[0]["for training (MiB)"])
    assert "the same batches of 256" in micro_batches and "the same network, whose weights differ by" in micro_batches


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


@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "arguments",
    ["--micro-batch-size 0", "--micro-batch-size 257", "--whole-batch some", "--api model --micro-batch-size 8"],
)
def test_wrong_sizes_of_micro_batches_get_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["demo"] + arguments.split())
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("usage: python -m accum demo")


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a full disk to write to")
def test_a_demo_on_a_full_disk_ends_in_a_line(tmp_path):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "accum"] + ARGUMENTS + ["--api", "v1"]
        done = subprocess.run(
            command, cwd=str(tmp_path), stdout=full, stderr=subprocess.PIPE, universal_newlines=True, timeout=120
        )
    assert done.returncode == 1
    assert done.stderr == "python -m accum demo: [Errno 28] No space left on device\n"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no such signal on Windows")
def test_ctrl_c_ends_the_demo_in_a_line(tmp_path):
    command = [sys.executable, "-m", "accum", "demo", "--api", "v1", "--epochs", "8"]
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
