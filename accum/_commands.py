"""Which commands of `python -m accum` run where TensorFlow does not."""

import sys

WITHOUT_TENSORFLOW = ("compare", "doctor", "migrate")


def needs_tensorflow():
    """Whether the import of `accum` that is under way has to bring TensorFlow: always but for one of these commands.

    While Python looks for the module that `-m` names, which imports its package, `sys.argv` is `["-m", COMMAND, ...]`.
    That alone is also so in `python -m other doctor` whose package imports accum; there, the importer is not runpy.
    Nothing of TensorFlow is tried and caught: an import may end the process.
    """
    if sys.argv[:1] != ["-m"] or sys.argv[1:2] == [] or sys.argv[1] not in WITHOUT_TENSORFLOW:
        return True
    frame = sys._getframe(2)  # whatever is behind accum/__init__.py
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("importlib", "_frozen_importlib")):
        frame = frame.f_back
    return frame is None or frame.f_globals.get("__name__") != "runpy"


def has_tensorflow():
    """Whether the import of `accum` brought TensorFlow in, so that the other commands can be offered."""
    return "accum._tf" in sys.modules
