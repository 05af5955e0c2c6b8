"""The one table of what TensorFlow itself makes impossible on a line. Each row is a strict xfail with its reason."""

import re

import tensorflow as tf

LINE = tuple(int(part) for part in re.findall(r"\d+", tf.__version__)[:2])
HAS_KERAS_FACE = LINE >= (2, 2)

# (part of the test's id, first line, last line, reason)
TABLE = []


def reasons(item):
    """Why `item` cannot pass on this line: none, or one reason a matching row."""
    return [why for part, first, last, why in TABLE if part in item.nodeid and first <= LINE <= last]
