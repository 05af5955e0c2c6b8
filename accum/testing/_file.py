"""The file of a recording: one JSON document per line, so that a run that is killed leaves all of its steps.

    {"schema": "accum.testing.record", "version": 1, "accum": ..., "numpy": ..., "python": ..., "tensorflow": ...}
    {"variables": [{"name": ..., "shape": [...], "dtype": ...}, ...]}
    {"step": 1, "loss": 0.5, "loss_error": 1e-07, "fingerprints": [[norm, mean, p_1, ..., p_8], ...]}

The second line comes before the first step with fingerprints, and gives their order. A step without a loss has no
`loss` and `loss_error`, and one without fingerprints no `fingerprints`. A step with `"start": true`, and step 0, hold
the initial values of a run. Numbers that are not finite are "nan", "inf" or "-inf", because JSON does not have them.
"""

import json
import math
import os
import platform
import sys
from typing import Dict, List, NamedTuple, Set, Tuple

import numpy as np

from accum.testing._fingerprint import PROJECTIONS

SCHEMA, VERSION = "accum.testing.record", 1


class Variable(NamedTuple):
    name: str
    shape: Tuple[int, ...]
    dtype: str


class Recording(NamedTuple):
    """The content of a file. For each step: (loss, its error), and fingerprints as float64 [variables, 10].

    `starts` are the steps that hold initial values.
    """

    path: str
    header: dict
    variables: List[Variable]
    steps: List[int]
    losses: Dict[int, Tuple[float, float]]
    fingerprints: Dict[int, np.ndarray]
    starts: Set[int]


class Writer:
    """Appends each line of a recording to its file immediately.

    The file is created together with its first lines. If there is a file already, it is replaced atomically.
    """

    def __init__(self, path, overwrite):
        self.path = os.fspath(path)
        folder = os.path.dirname(self.path) or "."
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            raise ValueError(f"`path` must be a file in an existing, writable folder. Received: {path!r}.")
        if os.path.isdir(self.path):
            raise ValueError(f"`path` must be a file. Received the folder {path!r}.")
        if os.path.exists(self.path) and not overwrite:
            raise ValueError(f"`path` must be a new file, or pass overwrite=True to replace it. Received: {path!r}.")
        self._file = None

    def write(self, *documents):
        lines = "".join(json.dumps(document, allow_nan=False) + "\n" for document in documents)
        if self._file is None:
            self._begin(json.dumps(_header()) + "\n" + lines)
        else:
            self._file.write(lines)
            self._file.flush()

    def _begin(self, lines):
        unfinished = f"{self.path}.{os.getpid()}.tmp"
        try:
            with open(unfinished, "w", encoding="utf-8", newline="\n") as file:
                file.write(lines)
            os.replace(unfinished, self.path)
        except BaseException:
            if os.path.exists(unfinished):
                os.remove(unfinished)
            raise
        self._file = open(self.path, "a", encoding="utf-8", newline="\n")  # noqa: SIM115  until `close`

    def close(self):
        if self._file is not None:
            self._file.close()


def _header():
    modules = {name: getattr(sys.modules.get(name), "__version__", None) for name in ("accum", "numpy", "tensorflow")}
    return dict({"schema": SCHEMA, "version": VERSION, "python": platform.python_version()}, **modules)


def to_json(number):
    """Convert a number for JSON: to a float with 12 digits, or to a string if it is not finite."""
    number = float(number)
    return float(f"{number:.12g}") if math.isfinite(number) else str(number)


def read(path):
    """Read a file. An incomplete last line, as a killed run leaves it, is ignored.

    Raises:
      OSError: the file can't be read.
      ValueError: it is not a recording, has another version, or is damaged.
    """
    with open(path, encoding="utf-8") as file:
        try:
            lines = file.read().split("\n")[:-1]
            documents = [_object(line) for line in lines]
        except (RecursionError, ValueError) as error:  # invalid JSON or Unicode
            raise ValueError(f"{path} is not a recording: {error}.") from None
    if not documents or documents[0].get("schema") != SCHEMA:
        raise ValueError(f"{path} is not a recording of `accum.testing.record`.")
    if documents[0].get("version") != VERSION:
        raise ValueError(
            f"{path} is a recording of version {documents[0].get('version')}, but this accum reads version "
            f"{VERSION}: use the accum that wrote it."
        )
    recording = Recording(str(path), documents[0], [], [], {}, {}, set())
    try:
        for document in documents[1:]:
            _take(recording, document)
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is a damaged recording: {error!r}.") from None
    return recording


def _object(line):
    document = json.loads(line)
    if not isinstance(document, dict):
        raise ValueError("a line is not an object")
    return document


def _take(recording, document):
    if "variables" in document:
        recording.variables.extend(
            Variable(str(var["name"]), tuple(int(size) for size in var["shape"]), str(var["dtype"]))
            for var in document["variables"]
        )
        return
    step = int(document["step"])
    if recording.steps and step <= recording.steps[-1]:
        raise ValueError(f"step {step} after step {recording.steps[-1]}")
    recording.steps.append(step)
    if step == 0 or document.get("start"):
        recording.starts.add(step)
    if "loss" in document:
        recording.losses[step] = float(document["loss"]), float(document.get("loss_error", 0.0))
    if "fingerprints" in document:
        rows = np.array([[float(number) for number in row] for row in document["fingerprints"]])
        if rows.shape != (len(recording.variables), PROJECTIONS + 2):
            raise ValueError(f"the fingerprints of step {step}")
        recording.fingerprints[step] = rows
