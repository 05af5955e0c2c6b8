"""The one table of what TensorFlow itself makes impossible on a line, each row with its reason.

What fails is a strict xfail, what hangs is not run, and what a line does not have yet can't be tried there.
"""

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
# (part of the test's id, first line that can try it, reason)
NEW_FAMILY = "the optimizers that TF 2.11 made the default came with TF 2.9, as a preview"
LOSS_SCALE = "TF 2.2 and 2.3 have an experimental `LossScaleOptimizer` of another interface"
CAME_LATER = [
    ("test_the_equation_of_a_layer_says_its_units", (2, 3), "`EinsumDense` came with TF 2.3"),
    ("test_backup_and_restore_goes_on", (2, 3), "`BackupAndRestore` came with TF 2.3"),
    ("test_fit_goes_on_from_a_backup_in_mid_cycle", (2, 3), "`BackupAndRestore` came with TF 2.3"),
    ("[several in one execution]", (2, 4), "`steps_per_execution` came with TF 2.4"),
    ("test_several_steps_in_one_execution", (2, 4), "`steps_per_execution` came with TF 2.4"),
    ("test_an_overflow_on_one_replica_only", (2, 4), LOSS_SCALE),
    ("test_a_loss_scale_shares_one_scalar", (2, 4), LOSS_SCALE),
    ("test_the_inner_optimizer_clips_the_reduced_mean", (2, 4), "TF 2.2 and 2.3 clip under no strategy"),
    ("test_a_variable_that_the_inner_optimizer_cannot_take", (2, 9), "older optimizers take every variable"),
    ("test_averages_of_the_weights", (2, 9), NEW_FAMILY),
    ("test_averages_end_well", (2, 9), NEW_FAMILY),
    ("test_the_end_of_fit_puts_the_averages_in_place", (2, 9), NEW_FAMILY),
    ("test_decoupled_weight_decay", (2, 9), NEW_FAMILY),
    ("test_what_is_excluded_from_weight_decay", (2, 10), "Keras excludes from weight decay from TF 2.10 on"),
    ("test_masked_values_", (2, 12), "Keras' batch normalisation had no use for a mask before"),
]


def reasons(item):
    """Why `item` cannot pass on this line, and whether it can be run: none, or one pair a matching row."""
    rows = [(row, True) for row in TABLE] + [(row, False) for row in HANGS]
    return [(why, runs) for (part, first, last, why), runs in rows if part in item.nodeid and first <= LINE <= last]


def lacks(item):
    """Why this line has not yet got what `item` is about: none, or one reason a matching row."""
    return [why for part, first, why in CAME_LATER if part in item.nodeid and first > LINE]
