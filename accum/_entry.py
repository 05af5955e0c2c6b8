"""How accum is entered: as a library, which brings TensorFlow, or by its command line, which also runs without it."""

import os
import re
import sys
import types
from typing import Any


def is_command_line() -> bool:
    """Whether this process is about to run the command line: by `python -m accum`, or the script `accum`.

    Python documents `sys.argv[0]`: the script's path, or "-m" while the module to run is located, which imports its
    package. What follows "-m", from Python 3.10 on, stands in `sys.orig_argv`. Where this guesses wrong, as in
    `python3.9 -m other` whose package imports accum, the names come when the first of them is used.
    """
    argv = getattr(sys, "argv", None) or [""]  # an embedded Python may have none
    if argv[0] == "-m":
        called = getattr(sys, "orig_argv", ["accum"] * len(argv))
        return re.fullmatch("(-[a-zA-Z]*m)?accum", called[-len(argv)]) is not None
    return os.path.basename(argv[0]).lower() in ("accum", "accum.exe", "accum-script.py")


class Package(types.ModuleType):
    """The module `accum`: it imports its public names when one is used, unless they are there from the start.

    On TensorFlow 1.15, those of the Keras interface raise an error that says what there is. Module functions
    `__getattr__` would do the same from Python 3.7 on.
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
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if "__all__" not in vars(self):
            from accum import _public

            self.__all__ = ["__version__"] + _public.__all__
            vars(self).update((public, getattr(_public, public)) for public in _public.__all__)
            return getattr(self, name)
        if name not in self.KERAS_NAMES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        # `from accum import name` shows only the message of an `ImportError`, and `hasattr` expects the other.
        is_import = sys._getframe(1).f_globals.get("__name__", "").startswith(("importlib", "_frozen_importlib"))
        raise (ImportError if is_import else AttributeError)(
            f"`accum.{name}` needs TensorFlow 2.2 or later. On TensorFlow 1.15, use `accum.compat.v1`: its "
            "`AccumOptimizer` accumulates in static graphs. [accum: install]"
        )
