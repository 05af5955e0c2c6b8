"""The file of a recording: one JSON document a line, so that a run that is killed leaves all of its steps.

    {"schema": "accum.testing.record", "version": 1, "accum": ..., "numpy": ..., "python": ..., "tensorflow": ...}
    {"variables": [{"name": ..., "shape": [...], "dtype": ...}, ...]}
    {"step": 1, "loss": 0.5, "loss_error": 1e-07, "fingerprints": [[norm, mean, p_1, ..., p_8], ...]}

The second line comes before the first step that has fingerprints, which are in its order. `loss`, `loss_error` and
`fingerprints` are left out where there are none. A step that has `"start": true` is what the run starts from, and so is
step 0. What is not finite is "nan", "inf" or "-inf", as JSON has no such numbers.
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
    """What a file holds: by step, (loss, its error) and float64 [variables, 10]; and the steps before training."""

    path: str
    header: dict
    variables: List[Variable]
    steps: List[int]
    losses: Dict[int, Tuple[float, float]]
    fingerprints: Dict[int, np.ndarray]
    starts: Set[int]


class Writer:
    """Appends each line of a recording to its file at once.

    The file is created with its first lines, which replace an existing file as a whole or not at all.
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
        self._file = open(self.path, "a", encoding="utf-8", newline="\n")  # noqa: SIM115  it stays open

    def close(self):
        if self._file is not None:
            self._file.close()


def _header():
    modules = {name: getattr(sys.modules.get(name), "__version__", None) for name in ("accum", "numpy", "tensorflow")}
    return dict({"schema": SCHEMA, "version": VERSION, "python": platform.python_version()}, **modules)


def to_json(number):
    """A float for JSON: to 12 digits, or its name where it is not finite."""
    number = float(number)
    return float(f"{number:.12g}") if math.isfinite(number) else str(number)


def read(path):
    """Read a file. A last line that was cut short, as by a run that was killed, is left out.

    Raises:
      OSError: it can't be read.
      ValueError: it is not a recording, is of another version, or is damaged.
    """
    with open(path, encoding="utf-8") as file:
        try:
            lines = file.read().split("\n")[:-1]
            documents = [_object(line) for line in lines]
        except (RecursionError, ValueError) as error:  # of JSON and of Unicode
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
