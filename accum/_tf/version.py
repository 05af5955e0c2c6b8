"""Detect the TensorFlow and Keras versions, and check that accum supports them."""

import os
import re
import warnings

SUPPORTED = "TensorFlow 1.15 or 2.2 to 2.21"

try:
    import tensorflow as tf
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    raise ImportError(
        f"accum needs {SUPPORTED}, but TensorFlow is not installed: install it with `pip install "
        "'tensorflow<2.22'`, or with the pins that `python -m accum doctor` prints. [accum: install]"
    ) from None

VERSION = tuple(int(part) for part in re.findall(r"\d+", tf.__version__)[:3])

if VERSION[:2] > (2, 21) and os.environ.get("ACCUM_UNTESTED_TENSORFLOW") == "1":
    warnings.warn(
        f"accum has been tested with {SUPPORTED}, and not with TensorFlow {tf.__version__}: before you trust it, "
        "compare a run of yours with the full batch, with `accum.testing`. [accum: install]",
        stacklevel=2,
    )
elif not (VERSION[:2] == (1, 15) or (2, 2) <= VERSION[:2] <= (2, 21)):
    raise ImportError(
        f"accum needs {SUPPORTED}, but found TensorFlow {tf.__version__}: install a supported version, such as with "
        "`pip install 'tensorflow==2.15.*'`. [accum: install]"
    )

HAS_KERAS_API = VERSION >= (2, 2)
"""TF 1.15 never calls an overridden `train_step`, so it only has the static-graph API. Dies with 1.15."""

IS_KERAS_3 = VERSION >= (2, 16) and getattr(tf.keras, "__version__", "2").startswith("3")
"""Whether `tf.keras` is Keras 3: from 2.16 on it is, unless TF_USE_LEGACY_KERAS selects `tf-keras`, Keras 2."""

WRAPS_VARIABLES = IS_KERAS_3
"""Whether the variables of Keras are objects of its own, around those of TensorFlow."""

PICKLES = IS_KERAS_3
"""Whether Keras pickles models and optimizers; those of Keras 2 don't name their class."""

if IS_KERAS_3 and tuple(int(part) for part in tf.keras.__version__.split(".")[:2]) < (3, 7):
    raise ImportError(
        f"accum needs Keras 3.7 or later, but found Keras {tf.keras.__version__}: run `pip install -U keras`, or "
        "install tf-keras and set TF_USE_LEGACY_KERAS=1. [accum: install]"
    )

if IS_KERAS_3 and tf.keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"accum needs the TensorFlow backend of Keras 3, but found {tf.keras.backend.backend()}: set "
        "KERAS_BACKEND=tensorflow. [accum: install]"
    )
