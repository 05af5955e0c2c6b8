"""What is installed, and whether it can be imported: in a separate process, which may crash or hang without harm."""

import json
import os
import re
import signal
import subprocess
import sys
from typing import Any, Dict, NamedTuple


def packages(path=None) -> Dict[str, str]:
    """{name: version} on a module search path, as Python would import them.

    The names of folders say both. `importlib.metadata` starts with Python 3.8.
    """
    found: Dict[str, str] = {}
    for folder in sys.path if path is None else path:
        try:
            entries = sorted(os.listdir(folder or os.getcwd()))
        except OSError:  # a zip file, or a missing folder
            continue
        for distribution in filter(None, (re.match(r"(.+?)-(\d.*)\.dist-info$", entry) for entry in entries)):
            found.setdefault(re.sub(r"[-_.]+", "-", distribution.group(1)).lower(), distribution.group(2))
    return found


class Trial(NamedTuple):
    """`stage` is what was imported last: "tensorflow", "keras" or "accum", or else "done"; `error` says what failed."""

    error: Any
    stage: Any = "tensorflow"
    version: Any = None
    keras: Any = None
    file: Any = None


_MARK = "accum doctor: "
_CODE = """
import importlib, json
def say(**facts):
    print("\\n" + {mark!r} + json.dumps(facts), flush=True)
tensorflow = importlib.import_module("tensorflow")
say(stage="keras", version=getattr(tensorflow, "__version__", None), file=getattr(tensorflow, "__file__", None))
keras = getattr(tensorflow, "keras", None)  # loads lazily from TensorFlow 2.6 on
keras = getattr(keras, "__version__", None) or getattr(keras, "version", lambda: None)()
say(stage="accum", keras=keras)
importlib.import_module("accum")
say(stage="done")
"""


def trial(timeout):
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
    result: Dict[str, str] = {}
    for said in re.findall(f"(?m)^{_MARK}(.+?)\r?$", output.decode("utf-8", "replace")):
        result.update(json.loads(said))
    return Trial(error, **result)


def _flags():
    """This Python's options for where to look for modules, so that the other process looks there too."""
    options = {"isolated": "-I", "ignore_environment": "-E", "no_user_site": "-s", "no_site": "-S"}
    return [option for flag, option in options.items() if getattr(sys.flags, flag)]


def _error(status, complaints):
    if status == 0:
        return None
    if status < 0:
        name = {one.value: one.name for one in signal.Signals}.get(-status, f"signal {-status}")
        return f"the process was ended by {name}"
    lines = [text.strip() for text in complaints.strip().splitlines()]
    errors = [text for text in lines if re.match(r"[\w.]*(Error|Exception|Interrupt|Exit)\b", text)]
    return (errors or lines or [f"the process ended with status {status}"])[-1]
