"""Importing TensorFlow where it can do no harm: in a process of its own, which may crash or hang."""

import collections
import json
import os
import re
import signal
import subprocess
import sys

Trial = collections.namedtuple("Trial", "version keras file seconds stage error ending")
"""What came of it: `stage` is what was to be imported last, "tensorflow", "keras", "accum", or "done"; `error` is the
line that says why it failed there, `ending` the whole."""

_MARK = "accum doctor: "
_CODE = """
import importlib, json, time
start = time.time()
found = importlib.import_module("tensorflow")
seconds = time.time() - start
def say(**facts):
    print("\\n" + {mark!r} + json.dumps(facts), flush=True)
version, file = getattr(found, "__version__", None), getattr(found, "__file__", None)
say(stage="keras", version=version, file=file, seconds=round(seconds, 1))
keras = getattr(found, "keras", None)  # loads lazily from TensorFlow 2.6 on
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
        error = "the import did not end within {:g} seconds".format(timeout)
    found = {"stage": "tensorflow"}
    for said in re.findall("(?m)^{}(.+?)\r?$".format(_MARK), output.decode("utf-8", "replace")):
        found.update(json.loads(said))
    told = [found.get(field) for field in Trial._fields[:5]]
    return Trial(*told, error=error, ending=complaints.decode("utf-8", "replace")[-20000:] if error else "")


def _flags():
    """The options that say where this Python looks for modules, so that the other one looks there too."""
    options = {"isolated": "-I", "ignore_environment": "-E", "no_user_site": "-s", "no_site": "-S"}
    return [option for flag, option in options.items() if getattr(sys.flags, flag)]


def _error(status, complaints):
    if status == 0:
        return None
    if status < 0:
        return "the process was ended by {}".format(_signal(-status))
    if status in _WINDOWS:
        return "the process was ended by {}".format(_WINDOWS[status])
    lines = [text.strip() for text in complaints.strip().splitlines()]
    errors = [text for text in lines if re.match(r"[\w.]*(Error|Exception|Interrupt|Exit)\b", text)]
    return (errors or lines or ["the process ended with status {}".format(status)])[-1]


_WINDOWS = {0xC000001D: "SIGILL (illegal instruction)", 0xC0000005: "an access violation"}


def _signal(number):
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "signal {}".format(number)
    return name + (" (illegal instruction)" if name == "SIGILL" else "")
