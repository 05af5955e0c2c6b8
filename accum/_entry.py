"""How accum is entered: as a library, or by its command line, which also runs without TensorFlow."""

import sys
import types
from typing import Optional


def needs_tensorflow() -> bool:
    """Whether the import of `accum` that is under way has to bring TensorFlow: always but for its command line.

    While Python looks for the module that `-m` names, which imports its package, `sys.argv` is `["-m", ...]`. That
    alone is also so in `python -m other` whose package imports accum; there, the importer is not runpy.
    """
    if sys.argv[:1] != ["-m"]:
        return True
    frame: Optional[types.FrameType] = sys._getframe(2)  # whatever is behind accum/__init__.py
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("importlib", "_frozen_importlib")):
        frame = frame.f_back
    return frame is None or frame.f_globals.get("__name__") != "runpy"
