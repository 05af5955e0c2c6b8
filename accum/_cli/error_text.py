"""Condense a third-party exception into one line."""

import re

# ANSI escapes for colours and fonts: Keras 3 prints its errors in bold
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# The heading that TensorFlow puts before several errors; the first error is enough
_COUNT = re.compile(r"\d+ root error\(s\) found\.?\s*\(0\) ")
_FRAME = re.compile(r'File ".*", line \d+|\S+\.py:\d+ ')
_ONLY_WHERE = (
    "Call arguments received",
    "Detected at node",
    "Exception encountered when calling",
    "Graph execution error",
    "Node: ",
    "Traceback (most recent call last)",
    "in user code",
)


def one_line(error):
    """The class of an error and its message, without the headings and stacks that TensorFlow and Keras put first."""
    name = type(error).__name__
    lines = _COUNT.sub("", _ESCAPES.sub("", str(error))).splitlines()
    said = _beside_stacks(lines) or [line.strip() for line in lines if line.strip()] or ["no message"]
    words = " ".join(said[:2]) if said[0].endswith(":") else said[0]
    words = words[len(name) + 2 :] if words.startswith(name + ": ") else words
    return f"{name}: {words.rstrip('.:')}"


def _beside_stacks(lines):
    said, frame = [], None
    for line in lines:
        words = line.strip()
        indent = len(line) - len(line.lstrip())
        if _FRAME.match(words):
            frame = indent
        elif words and not (frame is not None and indent > frame):  # a deeper indent is the frame's source line
            frame = None
            if not any(words.startswith(heading) or ": " + heading in words for heading in _ONLY_WHERE):
                said.append(words)
    return said
