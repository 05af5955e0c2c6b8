"""The only table of tests that can't pass on some TensorFlow because of TensorFlow itself, with a reason in each row.

A test that fails is a strict xfail. A test that hangs, or needs a feature that the version does not have, is skipped.
"""

import ctypes
import re
import sys

import tensorflow as tf

TF_VERSION = tuple(int(part) for part in re.findall(r"\d+", tf.__version__)[:2])
HAS_KERAS_API = TF_VERSION >= (2, 2)
IS_KERAS_3 = TF_VERSION >= (2, 16) and getattr(tf.keras, "__version__", "2").startswith("3")

IS_WINE = sys.platform == "win32" and hasattr(ctypes.WinDLL("ntdll"), "wine_get_version")  # type: ignore[attr-defined]

# (part of the test's id, first version, last version, reason)
NEWEST = (9, 9)
SLIM = "tf_slim 1.1.0 takes this layer from a module that Keras 2.13 dropped"
BACKUP = "TF 2.3's BackupAndRestore fails with several workers when it deletes its backup"
TABLE = [
    ("[slim.batch_norm]", (2, 13), NEWEST, SLIM),
    ("[slim.batch_norm-rank2-ref-plain", (2, 13), NEWEST, SLIM),
    ("[slim.batch_norm-rank2-ref-fused", (2, 15), NEWEST, "tf_slim 1.1.0 uses `ops.Tensor`, which TF 2.15 dropped"),
    ("[slim.batch_norm-as_", (2, 13), NEWEST, SLIM),
    ("test_averages_that_are_updated_in_place_are_refused", (2, 13), NEWEST, SLIM),
    ("[slim.batch_norm-rank4", (2, 13), NEWEST, SLIM),
    ("[slim.batch_norm-rank5", (2, 13), NEWEST, SLIM),
    (
        "test_workers_agree_on_a_smaller_micro_batch",
        (2, 2),
        (2, 2),
        "TF 2.2 cancels the collectives of a worker for ever, once any of its functions has raised an error",
    ),
    ("test_fit_goes_on_from_a_backup_in_mid_cycle", (2, 3), (2, 3), BACKUP),
    ("test_fit_goes_on_from_the_backup_of_an_epoch", (2, 3), (2, 3), BACKUP),
    (
        "test_the_batch_of_all_workers_is_normalised_as_one",
        (2, 2),
        (2, 3),
        "TF 2.2 and 2.3 give the replicas of each worker the same numbers, so a loss can't tell whose is whose",
    ),
    ("test_slim_s_own", (2, 13), NEWEST, "tf_slim 1.1.0 uses `ops.IndexedSlices`, which TF 2.13 dropped"),
]
# Tests that fail with Keras 3 on every TensorFlow: (part of the test's id, reason)
KERAS_3 = [
    ("test_an_overflow_on_one_replica_only", "Keras 3 only checks the gradients of the first replica for overflow"),
    (
        "test_it_shares_variables_and_goes_on_with_what_the_model_was_compiled_with[OwnTrainStep]",
        "Keras 3 expects the user's own train step to update the metrics that the model was compiled with",
    ),
    ("test_fit_goes_on_from_a_backup_in_mid_cycle", "Keras 3's BackupAndRestore does not save an unfinished cycle"),
    ("test_backup_and_restore_goes_on", "Keras 3's BackupAndRestore does not save an unfinished cycle"),
]
# Tests that hang, with the same columns as `TABLE`. They are skipped.
HANGS = [
    (
        "test_estimator_under_a_mirrored_strategy",
        (2, 13),
        (2, 15),
        "from TF 2.13 on, even a plain Estimator hangs in its first run under a MirroredStrategy on two CPUs",
    ),
]
# Tests that fail under Wine on every TensorFlow: (part of the test's id, reason)
WINE = [
    ("test_permissions_stay_and_a_link_stays_a_link", "Wine says that it made a symbolic link, and makes none"),
]
# Tests that end the process under Wine, with the columns of `TABLE`. They are skipped there.
XLA = "LLVM ends the process if its sections are not in ascending order, which Wine's memory does not give it"
WINE_ENDS = [
    ("test_xla_compiles_it", (2, 5), NEWEST, XLA),
    ("-compiled]", (2, 2), NEWEST, XLA),
    ("test_the_step_is_that_of_the_full_batch_when_compiled_by_xla", (2, 8), NEWEST, XLA),
]
# Tests of features that came later: (part of the test's id, first version that has it, reason)
NEW_FAMILY = "the optimizers that TF 2.11 made the default were added in TF 2.9, as a preview"
LOSS_SCALE = "TF 2.2 and 2.3 have an experimental `LossScaleOptimizer` with another interface"
CAME_LATER = [
    ("test_the_equation_of_a_layer_says_its_units", (2, 3), "`EinsumDense` came with TF 2.3"),
    ("test_backup_and_restore_goes_on", (2, 3), "`BackupAndRestore` came with TF 2.3"),
    ("test_fit_goes_on_from_a_backup_in_mid_cycle", (2, 3), "`BackupAndRestore` came with TF 2.3"),
    ("test_fit_goes_on_from_the_backup_of_an_epoch", (2, 3), "`BackupAndRestore` came with TF 2.3"),
    ("[several in one execution]", (2, 4), "`steps_per_execution` came with TF 2.4"),
    ("test_several_steps_in_one_execution", (2, 4), "`steps_per_execution` came with TF 2.4"),
    ("test_an_overflow_on_one_replica_only", (2, 4), LOSS_SCALE),
    ("test_a_loss_scale_shares_one_scalar", (2, 4), LOSS_SCALE),
    ("test_the_inner_optimizer_clips_the_reduced_mean", (2, 4), "TF 2.2 and 2.3 do not clip under a strategy"),
    ("test_a_variable_that_the_inner_optimizer_cannot_take", (2, 9), "older optimizers take every variable"),
    ("test_averages_of_the_weights", (2, 9), NEW_FAMILY),
    ("test_averages_end_well", (2, 9), NEW_FAMILY),
    ("test_the_end_of_fit_puts_the_averages_in_place", (2, 9), NEW_FAMILY),
    ("test_decoupled_weight_decay", (2, 9), NEW_FAMILY),
    ("test_what_is_excluded_from_weight_decay", (2, 10), "`exclude_from_weight_decay` came with TF 2.10"),
    ("test_masked_values_", (2, 12), "Keras' batch normalisation ignored masks before TF 2.12"),
]

# Tests of features that were removed: (part of the test's id, last version that has it, reason)
ESTIMATORS = "TF 2.16 removed Estimators"
WENT = [
    ("test_estimator", (2, 15), ESTIMATORS),
    ("test_flush_hook_ends_the_last_cycle_of_an_estimator", (2, 15), ESTIMATORS),
    ("test_slim_tests_pass_on_", (2, 12), "most of tf_slim 1.1.0's own tests fail from TF 2.13 on"),
]
# Tests of features that Keras 3 does not have: (part of the test's id, reason)
STATIC = "Keras 3 has no optimizer for static graphs"
SEVERAL_LISTS = "an optimizer of Keras 3 has only one list of variables"
NOT_IN_KERAS_3 = [
    ("test_batch_normalisation_goes_on_in_mid_cycle", "`tf.compat.v1.layers` need Keras 2"),
    ("test_a_public_architecture_goes_on_in_keras_by_the_proposal[resnet", "`tf.compat.v1.layers` need Keras 2"),
    ("test_graph_batch_norm.py", "`tf.compat.v1.layers` need Keras 2"),
    ("test_averages_taken_over_later_begin_at_zero", "`tf.compat.v1.layers` need Keras 2"),
    ("test_averages_of_batch_norm_", "`tf.compat.v1.layers` need Keras 2"),
    ("test_batch_normalisation_sees_the_whole_batch[tf.layers", "`tf.compat.v1.layers` need Keras 2"),
    ("test_a_loop_or_conditional_of_tf_1_is_refused", "`tf.compat.v1.layers` need Keras 2"),
    ("test_slim_runs_the_update_ops_that_are_left", "tf_slim's batch normalisation needs Keras 2"),
    ("test_fit_in_graph_mode_equals", STATIC),
    ("test_an_export_holds_no_accumulator", "Keras 3 only exports inference, with `model.export`"),
    ("test_clipping_of_a_keras_optimizer", STATIC),
    ("test_h2g_net_s_adam_accumulated_is_adam", STATIC),
    ("test_a_variable_added_between_cycles", SEVERAL_LISTS),
    ("test_an_embedding_in_fit_equals_the_full_batch", SEVERAL_LISTS),
    ("test_an_optimizer_in_use_for_another_list", SEVERAL_LISTS),
    ("test_variables_that_are_gone_leave_nothing", SEVERAL_LISTS),
    ("test_without_it_each_replica_has_its_own", "Keras 3 only keeps the statistics of the first replica"),
]


def _rows():
    """Return the rows of tests that fail or hang here: [(part of the test's id, reason, whether to run it)]."""
    rows = [(part, why, True) for part, first, last, why in TABLE if first <= TF_VERSION <= last]
    rows += [(part, why, False) for part, first, last, why in HANGS if first <= TF_VERSION <= last]
    rows += [(part, why, False) for part, first, last, why in WINE_ENDS if IS_WINE and first <= TF_VERSION <= last]
    rows += [(part, why, True) for part, why in WINE if IS_WINE]
    return rows + [(part, why, True) for part, why in KERAS_3 if IS_KERAS_3]


def _rows_of_lacks():
    """Return the rows of tests of features that this version does not have: [(part of the test's id, reason)]."""
    rows = [(part, why) for part, first, why in CAME_LATER if first > TF_VERSION]
    rows += [(part, why) for part, last, why in WENT if last < TF_VERSION]
    return rows + [row for row in NOT_IN_KERAS_3 if IS_KERAS_3]


def reasons(item):
    """Return (reason why `item` can't pass with this version, whether to run it) for each matching row."""
    return [(why, runs) for part, why, runs in _rows() if part in item.nodeid]


def lacks(item):
    """Return the reason why this version does not have the feature that `item` tests, for each matching row."""
    return [why for part, why in _rows_of_lacks() if part in item.nodeid]


def idle(nodeids):
    """Return the names in this version's rows that match no test id."""
    parts = [row[0] for row in _rows() + _rows_of_lacks()]
    return [part for part in parts if not any(part in nodeid for nodeid in nodeids)]
