"""What somebody else's error says, in one line."""

import re

# ANSI's, of which a terminal makes colours: Keras 3's errors are bold
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# TensorFlow's heading of several errors, of which the first will do
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


def in_a_line(error):
    """The class of an error, and what it says: TensorFlow and Keras say first where, by headings and whole stacks."""
    name = type(error).__name__
    lines = _COUNT.sub("", _ESCAPES.sub("", str(error))).splitlines()
    said = _beside_stacks(lines) or [line.strip() for line in lines if line.strip()] or ["no message"]
    words = " ".join(said[:2]) if said[0].endswith(":") else said[0]
    words = words[len(name) + 2 :] if words.startswith(name + ": ") else words
    return "{}: {}".format(name, words.rstrip(".:"))


def _beside_stacks(lines):
    said, frame = [], None
    for line in lines:
        words = line.strip()
        indent = len(line) - len(line.lstrip())
        if _FRAME.match(words):
            frame = indent
        elif words and not (frame is not None and indent > frame):  # what stands deeper is the frame's source
            frame = None
            if not any(words.startswith(heading) or ": " + heading in words for heading in _ONLY_WHERE):
                said.append(words)
    return said
