"""The TensorFlow and the Keras on which the tests run, and what the mark `tf` asks of them."""

import ctypes
import re
import sys

import tensorflow as tf

TF_VERSION = tuple(int(part) for part in re.findall(r"\d+", tf.__version__)[:2])
HAS_KERAS_API = TF_VERSION >= (2, 2)
IS_KERAS_3 = TF_VERSION >= (2, 16) and getattr(tf.keras, "__version__", "2").startswith("3")

IS_WINE = sys.platform == "win32" and hasattr(ctypes.WinDLL("ntdll"), "wine_get_version")  # type: ignore[attr-defined]
XLA_ENDS = "LLVM ends the process under Wine, whose memory gives it no sections in ascending order"


def missing(min=None, max=None, keras=None, because=None):
    """Return why a test marked `tf(...)` is not for this TensorFlow; None if it is.

    Args:
      min: the first TensorFlow that has what the test needs, such as "2.4".
      max: the last one.
      keras: 2 or 3, if the test needs this Keras.
      because: what other versions lack.
    """
    wanted = [f"TensorFlow {min} or later"] if min is not None and _parsed(min) > TF_VERSION else []
    wanted += [f"TensorFlow {max} or earlier"] if max is not None and _parsed(max) < TF_VERSION else []
    wanted += [f"Keras {keras}"] if keras is not None and keras != (3 if IS_KERAS_3 else 2) else []
    return f"needs {' and '.join(wanted)}: {because or 'the Keras API'}" if wanted else None


def _parsed(version):
    return tuple(int(part) for part in version.split("."))
