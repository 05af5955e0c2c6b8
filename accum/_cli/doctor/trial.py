"""Import TensorFlow in a separate process, which may crash or hang without harm."""

import json
import os
import re
import signal
import subprocess
import sys
from typing import Any, NamedTuple


class Trial(NamedTuple):
    """The result of the imports.

    `stage` is what was imported last, "tensorflow", "keras" or "accum", or else "done". `error` is the line that says
    why the import failed, and `ending` the end of all that the process printed.
    """

    version: Any
    keras: Any
    file: Any
    seconds: Any
    stage: Any
    error: Any
    ending: Any


_MARK = "accum doctor: "
_CODE = """
import importlib, json, time
start = time.time()
tensorflow = importlib.import_module("tensorflow")
seconds = time.time() - start
def say(**facts):
    print("\\n" + {mark!r} + json.dumps(facts), flush=True)
version, file = getattr(tensorflow, "__version__", None), getattr(tensorflow, "__file__", None)
say(stage="keras", version=version, file=file, seconds=round(seconds, 1))
keras = getattr(tensorflow, "keras", None)  # loads lazily from TensorFlow 2.6 on
keras = getattr(keras, "__version__", None) or getattr(keras, "version", lambda: None)()
say(stage="accum", keras=keras)
importlib.import_module("accum")
say(stage="done")
"""


def run(timeout):
    """Import TensorFlow, then its Keras, then accum, for `timeout` seconds at most."""
    process = subprocess.Popen(
        [sys.executable] + _flags() + ["-c", _CODE.format(mark=_MARK)],
        env=dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3", PYTHONIOENCODING="utf-8"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        output, complaints = process.communicate(timeout=timeout)
        error = _error(process.returncode, complaints.decode("utf-8", "replace"))
    except subprocess.TimeoutExpired:
        process.kill()
        output, complaints = process.communicate()
        error = f"the import did not finish within {timeout:g} seconds"
    result = {"stage": "tensorflow"}
    for said in re.findall(f"(?m)^{_MARK}(.+?)\r?$", output.decode("utf-8", "replace")):
        result.update(json.loads(said))
    told = {field: result.get(field) for field in Trial._fields[:5]}
    return Trial(**told, error=error, ending=complaints.decode("utf-8", "replace")[-20000:] if error else "")


def _flags():
    """This Python's options for where to look for modules, so that the other process looks there too."""
    options = {"isolated": "-I", "ignore_environment": "-E", "no_user_site": "-s", "no_site": "-S"}
    return [option for flag, option in options.items() if getattr(sys.flags, flag)]


def _error(status, complaints):
    if status == 0:
        return None
    if status < 0:
        return f"the process was ended by {_signal(-status)}"
    if status in _WINDOWS:
        return f"the process was ended by {_WINDOWS[status]}"
    lines = [text.strip() for text in complaints.strip().splitlines()]
    errors = [text for text in lines if re.match(r"[\w.]*(Error|Exception|Interrupt|Exit)\b", text)]
    return (errors or lines or [f"the process ended with status {status}"])[-1]


_WINDOWS = {0xC000001D: "SIGILL (illegal instruction)", 0xC0000005: "an access violation"}


def _signal(number):
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return name + (" (illegal instruction)" if name == "SIGILL" else "")
