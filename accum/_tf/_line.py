"""Which TensorFlow and which Keras this is, and whether accum runs on it."""

import re

SUPPORTED = "TensorFlow 1.15 or 2.2 to 2.21"

try:
    import tensorflow as tf
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    raise ImportError(
        "accum runs on {}, which is yours to choose and was not found: "
        "install it with `pip install 'tensorflow<2.22'`, or by the pins that `python -m accum doctor` names.".format(
            SUPPORTED
        )
    ) from None

VERSION = tuple(int(part) for part in re.findall(r"\d+", tf.__version__)[:3])

if not (VERSION[:2] == (1, 15) or (2, 2) <= VERSION[:2] <= (2, 21)):
    raise ImportError(
        "accum runs on {} and found TensorFlow {}: "
        "install a supported line, such as `pip install 'tensorflow==2.15.*'`.".format(SUPPORTED, tf.__version__)
    )

HAS_KERAS_FACE = VERSION >= (2, 2)
"""TF 1.15 never calls an overridden `train_step`, so it has the static-graph face only. Dies with 1.15."""

IS_KERAS_3 = VERSION >= (2, 16) and getattr(tf.keras, "__version__", "2").startswith("3")
"""Whether `tf.keras` is Keras 3: from 2.16 on it is, unless TF_USE_LEGACY_KERAS makes it `tf-keras`, Keras 2."""

if IS_KERAS_3 and tuple(int(part) for part in tf.keras.__version__.split(".")[:2]) < (3, 7):
    raise ImportError(
        "accum runs on Keras 3.7 and later, and found {}: "
        "`pip install -U keras`, or set TF_USE_LEGACY_KERAS=1 with tf-keras installed.".format(tf.keras.__version__)
    )

if IS_KERAS_3 and tf.keras.backend.backend() != "tensorflow":
    raise ImportError(
        "accum runs on Keras 3 over TensorFlow, and found it over {}: set KERAS_BACKEND=tensorflow.".format(
            tf.keras.backend.backend()
        )
    )
