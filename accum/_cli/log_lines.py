"""Keep the log lines of TensorFlow's C++ code out of what a command prints."""

import contextlib
import os
import re
import sys
import threading
from typing import Any, Iterator

STDERR = 2
END = b"\0 the end of what accum reads\n"
# Written before the log level is known, or without regard to it: "E0000 00:00:1795486079.99 12901 cuda_dnn.cc:8310] …".
LOG_LINE = re.compile(
    rb"[IWE]\d{4} \d\d:\d\d:[\d.]+ +\d+ \S+:\d+\]"
    rb"|\d{4}-\d\d-\d\d \d\d:\d\d:[\d.]+: [IWE] "
    rb"|WARNING: All log messages before absl::InitializeLog"
)


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Drop these lines from the standard error of this process and of those that it starts; all others are passed on.

    Fatal ones are kept. On Windows, whose processes get their standard error in another way, nothing is dropped.
    """
    try:
        shown = os.dup(STDERR) if os.name == "posix" else None
    except OSError:  # there is no standard error
        shown = None
    if shown is None:
        yield
        return
    reader, writer = os.pipe()
    os.dup2(writer, STDERR)
    thread = threading.Thread(target=_pass_on, args=(reader, shown), daemon=True)
    thread.start()
    try:
        yield
    finally:
        _flush(sys.stderr)
        os.dup2(shown, STDERR)
        os.write(writer, END)  # other processes may keep the pipe open, so that it never ends by itself
        thread.join()


def _flush(stream: Any) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
        stream.flush()


def _pass_on(reader: int, shown: int) -> None:
    """Write the lines from `reader` to `shown`, but for those of the log, until `END`."""
    rest = b""
    while True:
        lines = (rest + os.read(reader, 65536)).split(b"\n")
        rest = lines.pop()
        for line in lines:
            before, end, _ = (line + b"\n").partition(END)
            if before and not LOG_LINE.match(before):
                with contextlib.suppress(OSError):
                    os.write(shown, before)
            if end:
                return
