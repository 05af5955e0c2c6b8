"""How accum is entered: as a library, or by its command line, which also runs without TensorFlow."""

import sys
import types
from typing import Any, Optional

SCRIPT = "accum._script"


def needs_tensorflow() -> bool:
    """Whether the import of `accum` that is under way has to bring TensorFlow: always but for its command line.

    While Python looks for the module that `-m` names, which imports its package, `sys.argv` is `["-m", ...]`. That
    alone is also so in `python -m other` whose package imports accum; there, the importer is not runpy.

    The command `accum` imports `accum._script`, and Python imports the package first. Processes that the command starts
    run its file too, though not as `__main__`, and need all of accum.
    """
    wanted = None
    frame: Optional[types.FrameType] = sys._getframe(2)  # whatever is behind accum/__init__.py
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("importlib", "_frozen_importlib")):
        wanted = frame.f_locals.get("name", wanted)  # in the end, that of the outermost import
        frame = frame.f_back
    importer = None if frame is None else frame.f_globals.get("__name__")
    if importer == "__main__" and wanted == SCRIPT:
        return False
    return sys.argv[:1] != ["-m"] or importer != "runpy"


class OfStaticGraphs(types.ModuleType):
    """The package on TensorFlow 1.15, where the names of the Keras interface raise an error that says what there is.

    A function `__getattr__` of the module would do the same from Python 3.7 on.
    """

    KERAS_NAMES = (
        "AccumBatchNormalization",
        "AccumulationScheduler",
        "FlushCallback",
        "GAModelWrapper",
        "GAOptimizerWrapper",
        "GradientAccumulateModel",
        "GradientAccumulateOptimizer",
        "NoiseScaleScheduler",
        "StepLogger",
        "replace_batchnorm_layers",
        "unwrap",
        "value_and_gradients",
    )

    def __getattr__(self, name: str) -> Any:
        if name not in self.KERAS_NAMES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        # `from accum import name` shows only the message of an `ImportError`, and `hasattr` expects the other.
        is_import = sys._getframe(1).f_globals.get("__name__", "").startswith(("importlib", "_frozen_importlib"))
        raise (ImportError if is_import else AttributeError)(
            f"`accum.{name}` needs TensorFlow 2.2 or later. On TensorFlow 1.15, use `accum.compat.v1`: its "
            "`AccumOptimizer` accumulates in static graphs."
        )
