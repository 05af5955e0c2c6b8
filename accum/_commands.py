"""`python -m accum` runs where TensorFlow does not: a command brings it in when it is its turn."""

import importlib
import sys

import accum
from accum._words import in_a_line


def needs_tensorflow():
    """Whether the import of `accum` that is under way has to bring TensorFlow: always but for its command line.

    While Python looks for the module that `-m` names, which imports its package, `sys.argv` is `["-m", ...]`. That
    alone is also so in `python -m other` whose package imports accum; there, the importer is not runpy.
    """
    if sys.argv[:1] != ["-m"]:
        return True
    frame = sys._getframe(2)  # whatever is behind accum/__init__.py
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("importlib", "_frozen_importlib")):
        frame = frame.f_back
    return frame is None or frame.f_globals.get("__name__") != "runpy"


def without_tensorflow():
    """Import all that `accum` has, for a command that needs it; returns why that can't be, or None."""
    if "accum._tf" in sys.modules:
        return None
    try:
        importlib.reload(accum)
    except Exception as error:  # whatever a broken installation of TensorFlow raises
        words = str(error) if str(error).startswith("accum runs on ") else in_a_line(error)
        return words if "accum doctor" in words else "{}: `python -m accum doctor` says more.".format(words.rstrip("."))
    return None
