"""Gradient accumulation for TensorFlow: K micro-batches make the step that the full batch would have made."""

import sys

from accum import _entry

__version__ = "0.1.0"

sys.modules[__name__].__class__ = _entry.Package
if not _entry.is_command_line():  # as a library, all of it: a model can be loaded after `import accum` alone
    from accum import _public
    from accum._public import *  # noqa: F403

    __all__ = ["__version__"]
    __all__ += _public.__all__
