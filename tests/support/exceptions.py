"""The only table of what TensorFlow itself makes impossible on a line, with a reason in each row.

What fails is a strict xfail, what hangs is not run, and what a line does not have yet can't be tried there.
"""

import re

import tensorflow as tf

LINE = tuple(int(part) for part in re.findall(r"\d+", tf.__version__)[:2])
HAS_KERAS_FACE = LINE >= (2, 2)
IS_KERAS_3 = LINE >= (2, 16) and getattr(tf.keras, "__version__", "2").startswith("3")

# (part of the test's id, first line, last line, reason)
NEWEST = (9, 9)
SLIM = "tf_slim 1.1.0 takes this layer from a module that Keras 2.13 dropped"
UNEQUAL = "Keras 3 averages the first micro-batch over the replicas, on all of which it has to be of one size"
TABLE = [
    ("[slim.batch_norm]", (2, 13), NEWEST, SLIM),
    ("[slim.batch_norm-rank2-ref-plain", (2, 13), NEWEST, SLIM),
    ("[slim.batch_norm-rank2-ref-fused", (2, 15), NEWEST, "tf_slim 1.1.0 uses `ops.Tensor`, which TF 2.15 dropped"),
    ("[slim.batch_norm-rank4", (2, 13), NEWEST, SLIM),
    ("[slim.batch_norm-rank5", (2, 13), NEWEST, SLIM),
    (
        "test_fit_goes_on_from_a_backup_in_mid_cycle",
        (2, 3),
        (2, 3),
        "TF 2.3's BackupAndRestore fails under several workers where it deletes its backup",
    ),
    ("test_slim_s_own", (2, 13), NEWEST, "tf_slim 1.1.0 uses `ops.IndexedSlices`, which TF 2.13 dropped"),
]
# What Keras 3 itself makes impossible, on any line: (part of the test's id, reason)
KERAS_3 = [
    ("test_an_overflow_on_one_replica_only", "Keras 3 asks the first replica alone whether its gradients overflowed"),
    ("test_synchronized_replicas_equal_one_device[one replica without examples]", UNEQUAL),
    (
        "test_it_shares_variables_and_goes_on_with_what_the_model_was_compiled_with[OwnTrainStep]",
        "Keras 3 wants a train step of the user's own to update the metrics that the model was compiled with",
    ),
    (
        "test_fit_goes_on_from_a_backup_in_mid_cycle",
        "Keras 3's `fit` can't look at the micro-batches of several workers",
    ),
    ("test_backup_and_restore_goes_on", "Keras 3's BackupAndRestore keeps steps, and nothing of an unfinished cycle"),
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


# (part of the test's id, last line that can try it, reason)
ESTIMATORS = "Estimators left TensorFlow with 2.16"
WENT = [
    ("test_estimator", (2, 15), ESTIMATORS),
    ("test_flush_hook_ends_the_last_cycle_of_an_estimator", (2, 15), ESTIMATORS),
]
# (part of the test's id, reason)
STATIC = "Keras 3 has no optimizer for static graphs"
SEVERAL_LISTS = "an optimizer of Keras 3 has one list of variables"
NOT_IN_KERAS_3 = [
    ("test_batch_normalisation_goes_on_in_mid_cycle", "`tf.compat.v1.layers` are Keras 2's"),
    ("test_graph_batch_norm.py", "`tf.compat.v1.layers` are Keras 2's"),
    ("test_averages_taken_over_later_begin_at_zero", "`tf.compat.v1.layers` are Keras 2's"),
    ("test_slim_runs_the_update_ops_that_are_left", "tf_slim's batch normalisation is Keras 2's"),
    ("test_fit_in_graph_mode_equals", STATIC),
    ("test_an_export_holds_no_accumulator", "Keras 3 exports inference alone, by `model.export`"),
    ("test_clipping_of_a_keras_optimizer", STATIC),
    ("test_h2g_net_s_adam_accumulated_is_adam", STATIC),
    ("test_a_variable_added_between_cycles", SEVERAL_LISTS),
    ("test_an_embedding_in_fit_equals_the_full_batch", SEVERAL_LISTS),
    ("test_an_optimizer_in_use_for_another_list", SEVERAL_LISTS),
    ("test_variables_that_are_gone_leave_nothing", SEVERAL_LISTS),
    ("test_without_it_each_replica_has_its_own", "Keras 3 keeps the statistics of the first replica"),
]


def _rows():
    """[(part of the test's id, reason, whether it can be run)] of the rows for tests that fail on this line."""
    rows = [(part, why, True) for part, first, last, why in TABLE if first <= LINE <= last]
    rows += [(part, why, False) for part, first, last, why in HANGS if first <= LINE <= last]
    return rows + [(part, why, True) for part, why in KERAS_3 if IS_KERAS_3]


def _rows_of_lacks():
    """[(part of the test's id, reason)] of the rows for features that this line does not have."""
    rows = [(part, why) for part, first, why in CAME_LATER if first > LINE]
    rows += [(part, why) for part, last, why in WENT if last < LINE]
    return rows + [row for row in NOT_IN_KERAS_3 if IS_KERAS_3]


def reasons(item):
    """The reasons why `item` cannot pass on this line, and whether it can be run: one pair per matching row."""
    return [(why, runs) for part, why, runs in _rows() if part in item.nodeid]


def lacks(item):
    """The reasons why this line does not have (yet, or any more) what `item` tests: one per matching row."""
    return [why for part, why in _rows_of_lacks() if part in item.nodeid]


def idle(nodeids):
    """Names in the rows of this line that match the id of no test."""
    parts = [row[0] for row in _rows() + _rows_of_lacks()]
    return [part for part in parts if not any(part in nodeid for nodeid in nodeids)]
