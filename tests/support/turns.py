"""Tests that take turns: of the two lines of Keras 2 that run all tests, each runs half of them at a merge.

Without the marks `odd` and `even` in `-m`, as everywhere but in `.ci/run`, a cell runs both halves.
"""

import json
import zlib

import exceptions

LINES = [(2, 2), (2, 15)]
"""Where tests take turns: here each of them has to run, with the same parameters."""
NOT_ALIKE = ("every_landing", "skip", "skipif", "xfail")


def takes_turns(item):
    """Return whether `item` is one of the tests that are marked `turns` and run on both lines."""
    marks = {mark.name for mark in item.iter_markers()}
    if "turns" not in marks or not marks & {"line", "slow"} or marks.intersection(NOT_ALIKE):
        return False
    return not any(part in item.nodeid for part in exceptions.parts())


def half(item):
    """Return "odd" or "even", the same on every line and every Python."""
    return "odd" if zlib.crc32(item.nodeid.encode("utf-8")) % 2 else "even"


def digests(items):
    """Return JSON of {file: digest of its tests that take turns}, which is the same on both lines."""
    found = {}
    for item in sorted(items, key=lambda item: item.nodeid):
        file = item.nodeid.split("::")[0]
        found[file] = zlib.crc32(item.nodeid.encode("utf-8"), found.get(file, 0))
    return json.dumps(found, sort_keys=True)
