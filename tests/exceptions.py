"""The one table of what TensorFlow itself makes impossible on a line. Each row is a strict xfail with its reason."""

import re

import tensorflow as tf

LINE = tuple(int(part) for part in re.findall(r"\d+", tf.__version__)[:2])
HAS_KERAS_FACE = LINE >= (2, 2)

# (part of the test's id, first line, last line, reason)
SLIM = "tf_slim 1.1.0 takes this layer from a module that Keras 2.13 dropped"
TABLE = [
    ("[slim.batch_norm]", (2, 13), (2, 15), SLIM),
    ("[slim.batch_norm-rank2-ref-plain", (2, 13), (2, 15), SLIM),
    ("[slim.batch_norm-rank2-ref-fused", (2, 15), (2, 15), "tf_slim 1.1.0 uses `ops.Tensor`, which TF 2.15 dropped"),
    ("[slim.batch_norm-rank4", (2, 13), (2, 15), SLIM),
    ("[slim.batch_norm-rank5", (2, 13), (2, 15), SLIM),
    (
        "test_fit_goes_on_from_a_backup_in_mid_cycle",
        (2, 3),
        (2, 3),
        "TF 2.3's BackupAndRestore fails under several workers where it deletes its backup",
    ),
    ("test_slim_s_own", (2, 13), (2, 15), "tf_slim 1.1.0 uses `ops.IndexedSlices`, which TF 2.13 dropped"),
]
# As above, where TensorFlow does not even fail but hangs: these are not run.
HANGS = [
    (
        "test_estimator_under_a_mirrored_strategy",
        (2, 13),
        (2, 15),
        "from TF 2.13 on, a plain Estimator under MirroredStrategy over two CPUs never ends its first run",
    ),
]


def reasons(item):
    """Why `item` cannot pass on this line, and whether it can be run: none, or one pair a matching row."""
    rows = [(row, True) for row in TABLE] + [(row, False) for row in HANGS]
    return [(why, runs) for (part, first, last, why), runs in rows if part in item.nodeid and first <= LINE <= last]
