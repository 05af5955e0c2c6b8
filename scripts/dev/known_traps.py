"""The known traps of gradient accumulation, each as an edit of the sources that falls into it, for mutants.py.

`old` occurs exactly once in its file, and is short, so that it survives other changes there. An issue or pull request
stands in `seen` if it reports this very mistake, in whatever library.
"""

from typing import NamedTuple, Sequence, Tuple


class Trap(NamedTuple):
    """A trap.

    Attributes:
      name: what `mutants.py run --only` takes.
      law: the law that it breaks.
      says: what goes wrong, in one sentence.
      edits: list of (file, old text, new text).
      tests: what of the suite catches it, as arguments of pytest.
      seen: issues and pull requests where it was found.
      line: the TensorFlow that is to catch it.
    """

    name: str
    law: str
    says: str
    edits: Sequence[Tuple[str, str, str]]
    tests: Sequence[str]
    seen: Sequence[str] = ()
    line: str = "2.15"


ACCUMULATORS = "accum/_engine/_accumulators.py"
BATCH_STEP = "accum/_keras/_steps/_split_step.py"
CALLBACKS = "accum/_keras/_callbacks.py"
CYCLE = "accum/_engine/_cycle.py"
GRAPH_ADAPTER = "compat/v1/_engine_adapter.py"
KERAS_ADAPTER = "accum/_keras/_optimizer/_engine_adapter.py"
MOMENTS = "accum/_engine/_moments.py"
MOVING = "accum/_keras/_batch_norm/_moving_statistics.py"
OPS = "accum/_engine/_ops.py"
OPTIMIZER = "accum/_keras/_optimizer/_wrapper.py"
REPLICAS = "accum/_engine/_replicas.py"
SEGMENTS = "accum/_engine/_segments.py"
SUMS = "accum/_engine/_weighted_sums.py"

KERAS_STEPS = "    def steps(self) -> tf.Tensor:\n        return _tf.native(self._wrapper.iterations)"
TOTAL = "lambda g, w: self._sums.total(g, w, *how)"
MEAN = '        if self._plan.reduction == "mean":\n            return weight'


def on_micro_steps(code):
    """Edits after which the Keras optimizer wrapper runs `code` on every micro step."""
    method = f"    def count_micro_step(self, counts):\n{code}\n"
    return [(KERAS_ADAPTER, KERAS_STEPS, method + "\n" + KERAS_STEPS)]


def on_each_replica(code):
    """Edits after which each replica computes `code` of its `totals` and `weight` before they are reduced."""
    function = f"def _changed(cycle, totals, weight):\n{code}\n    return totals, weight\n\n\n"
    return [
        (OPS, TOTAL, "lambda g, w: _changed(self._cycle, *self._sums.total(g, w, *how))"),
        (OPS, "def count_nonfinite(", function + "def count_nonfinite("),
    ]


TRAPS = [
    Trap(
        "zeros_between_steps",
        "L2",
        "The optimizer runs on every micro step, on zeros until the last one.",
        [
            (
                OPS,
                'tf.cond(is_last, finish, store, name="if_full")',
                'tf.cond(is_last, finish, lambda: _fed_zeros(self, strategy, store), name="if_full")',
            ),
            (
                OPS,
                "def count_nonfinite(",
                "def _fed_zeros(ops, strategy, store):\n"
                "    stored = store()\n"
                "    zeros = [(tf.zeros_like(var), var) for var in ops._variables]\n"
                "    step = lambda: true_after(ops._adapter.make_step(zeros, None, 1))\n"
                "    fed = _replicas.each_replica(strategy, step)\n"
                "    with tf.control_dependencies(_replicas.local_tensors(strategy, fed)):\n"
                "        return tf.identity(stored)\n\n\n"
                "def count_nonfinite(",
            ),
        ],
        ["tests/test_quiet.py::test_keras_weights_slots_and_clocks_rest_between_steps"],
        ["keras-team/keras#19990"],
    ),
    Trap(
        "decay_per_micro_step",
        "L2",
        "Decoupled weight decay acts on every micro step.",
        on_micro_steps(
            "        inner = self._wrapper.optimizer\n"
            "        for var in self._wrapper._cycle._variables.current:\n"
            "            if getattr(inner, 'weight_decay', None):\n"
            "                var.assign_sub(var * tf.cast(inner.weight_decay * inner.learning_rate, var.dtype))"
        ),
        ["tests/test_inner_optimizers.py::test_decoupled_weight_decay_is_taken_once_a_step"],
        ["keras-team/keras#19990"],
    ),
    Trap(
        "averages_per_micro_step",
        "L2",
        "The moving average of the weights moves on every micro step.",
        on_micro_steps(
            "        if getattr(self._wrapper.optimizer, 'use_ema', False):\n"
            "            current = self._wrapper._cycle._variables.current\n"
            "            self._wrapper.optimizer._update_model_variables_moving_average(current)"
        ),
        ["tests/test_inner_optimizers.py::test_averages_of_the_weights_move_with_steps"],
        ["SWivid/F5-TTS#631"],
    ),
    Trap(
        "clock_in_micro_steps",
        "L3",
        "`iterations` counts micro-batches, so bias correction and schedules run K times too fast.",
        on_micro_steps("        _tf.native(self._wrapper.iterations).assign_add(1)"),
        ["tests/test_clocks.py::test_first_adam_step_uses_t_equal_to_one"],
        ["keras-team/keras#19990", "tracel-ai/burn#5695"],
    ),
    Trap(
        "global_step_in_micro_steps",
        "L3",
        "In a static graph, `global_step` advances on every micro step, although nobody asked for it.",
        [
            (
                GRAPH_ADAPTER,
                'if self._counts != "micro_steps" or self.global_step is None:',
                "if self.global_step is None:",
            )
        ],
        ["tests/test_clocks.py::test_global_step_counts_what_was_asked_for"],
        ["Lightning-AI/pytorch-lightning#831", "horovod/horovod#2715"],
    ),
    Trap(
        "clock_without_gradients",
        "L3",
        "Where a dataset of unknown length ends, the micro step counts although no gradients came.",
        [
            (OPS, 'with tf.control_dependencies([done]), tf.name_scope("clock"):', 'with tf.name_scope("clock"):'),
            (
                OPS,
                'with tf.control_dependencies([has_stepped]), tf.name_scope("clock"):',
                'with tf.name_scope("clock"):',
            ),
            (OPS, "_assign(strategy, self._cycle.stepped, has_stepped)", "None"),
        ],
        ["tests/test_clocks.py::test_micro_steps_stand_still_where_a_generator_ends_within_a_traced_step"],
    ),
    Trap(
        "graph_clock_without_gradients",
        "L15",
        "In a static graph, the micro step counts before the gradients are stored.",
        [(OPS, 'with tf.control_dependencies([done]), tf.name_scope("clock"):', 'with tf.name_scope("clock"):')],
        ["tests/test_clocks.py::test_global_step_counts_what_was_asked_for"],
    ),
    Trap(
        "schedule_within_a_cycle",
        "L3",
        "A schedule of `accum_steps` is read with micro steps, so the length changes within a cycle.",
        [
            (
                CYCLE,
                "step = tf.cast(self.adapter.steps(), tf.int64)",
                "step = tf.cast(self.adapter.steps(), tf.int64) + micro_step_index",
            )
        ],
        ["tests/test_clocks.py::test_schedule_of_accum_steps_counts_steps"],
    ),
    Trap(
        "new_length_within_a_cycle",
        "L17",
        "A new `accum_steps` takes effect in the cycle that has begun.",
        [
            (
                CYCLE,
                "tf.where(tf.equal(micro_step_index, 0), self._requested.read_value(), self.state.length.read_value())",
                "self._requested.read_value()",
            )
        ],
        ["tests/test_clocks.py::test_new_accum_steps_hold_from_the_next_cycle_on"],
    ),
    Trap(
        "one_micro_batch_too_many",
        "L1",
        "The step comes one micro-batch late.",
        [(OPS, "tf.greater_equal(micro_step_index + 1, length)", "tf.greater_equal(micro_step_index, length)")],
        ["tests/test_reduction.py::test_mean_moves_by_minus_the_mean"],
    ),
    Trap(
        "step_on_the_first",
        "L1",
        "The step comes on the first micro-batch of a cycle, because the counter is read before it counts.",
        [(OPS, "tf.greater_equal(micro_step_index + 1, length)", "tf.equal(micro_step_index, 0)")],
        ["tests/test_reduction.py::test_mean_moves_by_minus_the_mean"],
        ["rasbt/LLMs-from-scratch#299"],
    ),
    Trap(
        "last_micro_batch_left_out",
        "L1",
        "The step is made before the last micro-batch is added.",
        [
            (ACCUMULATORS, "return total.read_value() + grad", "return total.read_value()"),
            (ACCUMULATORS, "lambda: total.read_value() + grad)", "lambda: total.read_value())"),
        ],
        ["tests/test_reduction.py::test_mean_moves_by_minus_the_mean"],
    ),
    Trap(
        "old_sum_kept",
        "L1",
        "The first micro-batch is added to the sum of the cycle before.",
        [(OPS, 'self._sums.keep("start", g, w)', 'self._sums.keep("add", g, w)')],
        ["tests/test_equivalence.py::test_keras_optimizers_make_the_bare_step"],
        ["dice-group/dice-embeddings#432"],
    ),
    Trap(
        "sum_not_divided",
        "L4",
        'Under "mean", the sum of the gradients is applied.',
        [(SUMS, MEAN, MEAN.replace("return weight", "return None"))],
        ["tests/test_reduction.py::test_mean_moves_by_minus_the_mean"],
        ["huggingface/transformers#35438"],
    ),
    Trap(
        "divided_twice",
        "L4",
        "The sum is divided by the number of micro-batches twice.",
        [(SUMS, MEAN, MEAN.replace("return weight", "return weight * weight"))],
        ["tests/test_reduction.py::test_mean_moves_by_minus_the_mean"],
        ["areal-project/AReaL#1273", "modelscope/ms-swift#10117"],
    ),
    Trap(
        "running_mean_by_count",
        "L5",
        "A running mean takes 1 / K of each micro-batch, whatever its weight.",
        [
            (
                SUMS,
                "share = tf.math.divide_no_nan(self._weight_of(weight), so_far)",
                "share = tf.constant(1.0 / self._plan.accum_steps)",
            )
        ],
        ["tests/test_reduction.py::test_weights_weigh_the_mean"],
    ),
    Trap(
        "mean_of_means",
        "L5",
        "Weights are ignored: a small micro-batch, or one of few tokens, counts as much as any other.",
        [(CYCLE, "weight = None if weight is None else tf.cast(weight, tf.float32)", "weight = None")],
        ["tests/test_reduction.py::test_weights_weigh_the_mean"],
        [
            "huggingface/transformers#34191",
            "allenai/open-instruct#1728",
            "NVIDIA-NeMo/RL#212",
            "ml-explore/mlx-lm#1544",
        ],
    ),
    Trap(
        "step_without_weight",
        "L5",
        "A cycle whose weights sum to zero makes a step of 0 / 0.",
        [(OPS, "if self._is_weighted:", "if False:")],
        ["tests/test_reduction.py::test_weights_that_sum_to_zero_make_no_step"],
    ),
    Trap(
        "regularization_per_micro_batch",
        "L19",
        "A loss beside that of the outputs, such as regularization, counts once for each micro-batch.",
        [(SEGMENTS, "return weighted(value, self._micro.share(index, value.dtype))", "return value")],
        ["tests/test_whole_batch.py::test_losses_beside_the_call"],
        ["NVIDIA-NeMo/Automodel#3359", "NVIDIA/Megatron-LM#4070"],
    ),
    Trap(
        "flush_divides_by_k",
        "L6",
        "The last, unfinished cycle is divided by K instead of the number of its micro-batches.",
        [
            (
                SUMS,
                MEAN,
                MEAN.replace("return weight", "return tf.constant(float(self._plan.accum_steps))"),
            )
        ],
        ["tests/test_cycle_ends.py::test_flush_divides_by_what_is_there_and_reset_discards"],
        ["Lightning-AI/pytorch-lightning#19987", "jingyaogong/minimind#749"],
    ),
    Trap(
        "zero_before_apply",
        "L6",
        "A flush clears the accumulators before it reads them.",
        [
            (OPS, "with tf.control_dependencies([self._finish(strategy, None, None, micro_step_index)]):", "if True:"),
            (
                OPS,
                "                return self._clear(strategy)",
                "                with tf.control_dependencies([self._clear(strategy)]):\n"
                "                    return self._finish(strategy, None, None, micro_step_index)",
            ),
        ],
        ["tests/test_cycle_ends.py::test_flush_divides_by_what_is_there_and_reset_discards"],
    ),
    Trap(
        "flush_after_validation",
        "L6",
        "The last cycle of an epoch ends after its validation.",
        [
            (
                CALLBACKS,
                "only this validation calls `on_test_begin`.\n        self._end_epoch()",
                "only this validation calls `on_test_begin`.\n        return",
            )
        ],
        ["tests/test_cycle_ends.py::test_flush_comes_before_the_validation_of_the_epoch"],
    ),
    Trap(
        "carry_drops",
        "L6",
        "The cycle that an epoch leaves unfinished is lost, although it is to be carried over.",
        [(CALLBACKS, 'if self.last_cycle == "carry":', "if False:")],
        ["tests/test_cycle_ends.py::test_policies_hold_where_an_epoch_is_shorter_than_a_cycle"],
        ["tomhosking/torchseq#8", "timoschick/pet#36"],
    ),
    Trap(
        "drop_applies",
        "L6",
        "The cycle that an epoch leaves unfinished is applied, although it is to be dropped.",
        [(CALLBACKS, "ending.reset()", "ending.flush()")],
        ["tests/test_cycle_ends.py::test_policies_hold_where_an_epoch_is_shorter_than_a_cycle"],
    ),
    Trap(
        "drop_carries",
        "L6",
        "What is to be dropped stays, and leaks into the first step of the next epoch.",
        [(CALLBACKS, "ending.reset()", "pass")],
        ["tests/test_cycle_ends.py::test_policies_hold_where_an_epoch_is_shorter_than_a_cycle"],
        ["WalkingMeatAxolotl/AnimaLoraStudio#305"],
    ),
    Trap(
        "reset_keeps_rows",
        "L6",
        "Discarding an unfinished cycle sets the counter back, but leaves the rows of embeddings.",
        [
            (
                OPS,
                "self._advance_clock(strategy, self._clear(strategy), tf.zeros_like(micro_step_index), length)",
                "self._advance_clock(strategy, tf.constant(True), tf.zeros_like(micro_step_index), length)",
            )
        ],
        ["tests/test_sparse.py::test_reset_discards_the_rows_of_the_cycle_and_that_they_were_touched"],
    ),
    Trap(
        "hook_without_flush",
        "L6",
        "A training loop in a static graph ends without the step of the last micro-batches.",
        [("compat/v1/_hooks.py", "session.run(self._flush_op)", "pass")],
        ["tests/test_graph_variables.py::test_flush_hook_applies_the_last_cycle_before_the_last_checkpoint"],
        ["tracel-ai/burn#5695"],
    ),
    Trap(
        "clip_per_micro_batch",
        "L7",
        "Clipping, or another transform, acts on each micro-batch.",
        [
            (
                CYCLE,
                "call = CycleOps(self, entries, weight is not None, is_reduced)",
                "if self.transform is not None:\n"
                "            variables = [var for var, _ in entries]\n"
                "            grads = [grad for grad, _ in self.transform(list(zip(grads, variables)))]\n"
                "        call = CycleOps(self, entries, weight is not None, is_reduced)",
            )
        ],
        ["tests/test_reduction.py::test_transform_acts_once_on_the_mean"],
        ["keras-team/keras#19998", "lukas-blecher/LaTeX-OCR#222"],
    ),
    Trap(
        "clip_before_replicas_are_reduced",
        "L7",
        "Each replica clips its own mean, before the replicas are added up.",
        on_each_replica(
            "    if cycle.transform is not None:\n"
            "        pairs = [(total / weight, var) for total, (var, _) in zip(totals, cycle._accumulators.values())]\n"
            "        totals = [grad * weight for grad, _ in cycle.transform(pairs)]"
        ),
        ["tests/test_replicas.py::test_transform_acts_once_on_the_reduced_gradient"],
    ),
    Trap(
        "missing_gradient_drops_the_sum",
        "L8",
        "A variable without a gradient in the last micro-batch counts as one without any in the cycle.",
        [(ACCUMULATORS, "            value = total.read_value()", "            value = tf.zeros_like(total)")],
        ["tests/test_sparse.py::test_a_missing_gradient_counts_as_zero_in_its_cycle"],
    ),
    Trap(
        "missing_gradient_keeps_the_old_sum",
        "L8",
        "A variable without a gradient in the first micro-batch keeps the sum of the cycle before.",
        [(ACCUMULATORS, "return total.assign(tf.zeros_like(total), read_value=False)", "return tf.no_op()")],
        ["tests/test_sparse.py::test_a_missing_gradient_counts_as_zero_in_its_cycle"],
    ),
    Trap(
        "rows_of_the_last_micro_batch_alone",
        "L8",
        "Of an embedding, only the rows of the last micro-batch reach the optimizer.",
        [
            (
                ACCUMULATORS,
                "return scatter(mask, grad.indices, tf.ones_like(grad.indices, tf.bool))",
                "with tf.control_dependencies([mask.assign(tf.zeros_like(mask), read_value=False)]):\n"
                "                return scatter(mask, grad.indices, tf.ones_like(grad.indices, tf.bool))",
            )
        ],
        ["tests/test_sparse.py::test_sparse_rows_reach_the_inner_optimizer_as_their_union"],
    ),
    Trap(
        "rows_of_the_last_cycle",
        "L8",
        "Rows that the cycle before touched count as touched, so momentum and lazy optimizers move them.",
        [(ACCUMULATORS, "return mask.assign(tf.zeros_like(mask), read_value=False)", "return tf.no_op()")],
        ["tests/test_sparse.py::test_sparse_rows_reach_the_inner_optimizer_as_their_union"],
    ),
    Trap(
        "all_rows_touched",
        "L8",
        "The gradient of an embedding becomes dense, so rows move that no example touched.",
        [
            (
                ACCUMULATORS,
                "return scatter(mask, grad.indices, tf.ones_like(grad.indices, tf.bool))",
                "return mask.assign(tf.ones_like(mask), read_value=False)",
            )
        ],
        ["tests/test_sparse.py::test_sparse_rows_reach_the_inner_optimizer_as_their_union"],
    ),
    Trap(
        "rows_not_cleared",
        "L8",
        "A row keeps its sum, and takes it into the next cycle that touches it.",
        [
            (
                ACCUMULATORS,
                'tf.zeros(row_shape, total.dtype.base_dtype), "update"',
                'tf.zeros(row_shape, total.dtype.base_dtype), "add"',
            )
        ],
        ["tests/test_sparse.py::test_sparse_rows_reach_the_inner_optimizer_as_their_union"],
    ),
    Trap(
        "row_twice_in_a_micro_batch",
        "L8",
        "Of a row that is in a micro-batch twice, the last gradient overwrites the first.",
        [
            (
                ACCUMULATORS,
                'added = scatter(total, grad.indices, values, "add")',
                'added = scatter(total, grad.indices, values, "update")',
            )
        ],
        ["tests/test_sparse.py::test_sparse_rows_reach_the_inner_optimizer_as_their_union"],
    ),
    Trap(
        "nan_stays",
        "L9",
        "Clearing multiplies by 0, so a NaN stays in the accumulator for ever.",
        [
            (
                ACCUMULATORS,
                "return total.assign(weighted(tf.cast(grad, total.dtype.base_dtype), weight), read_value=False)",
                "grad = weighted(tf.cast(grad, total.dtype.base_dtype), weight)\n"
                "        return total.assign(0.0 * total.read_value() + grad, read_value=False)",
            )
        ],
        ["tests/test_reduction.py::test_skip_cycle_makes_no_step_and_the_next_is_clean"],
        ["espnet/espnet#3283"],
    ),
    Trap(
        "infinity_is_finite",
        "L9",
        "Only NaN is looked for, so an infinite gradient passes.",
        [(OPS, "~tf.math.is_finite(size)", "tf.math.is_nan(size)")],
        ["tests/test_reduction.py::test_skip_micro_takes_one_more"],
    ),
    Trap(
        "skipped_micro_batch_counts",
        "L9",
        "A micro-batch that is skipped counts all the same, so the step lacks it.",
        [
            (
                OPS,
                "tf.where(is_last, tf.zeros_like(micro_step_index), micro_step_index + 1)\n"
                "            following = following if counts is None else "
                "tf.where(counts, following, micro_step_index)",
                "tf.where(is_last, tf.zeros_like(micro_step_index), micro_step_index + 1)",
            )
        ],
        ["tests/test_reduction.py::test_skip_micro_takes_one_more"],
    ),
    Trap(
        "skipped_cycle_applies",
        "L9",
        "A cycle with a NaN makes its step, although it is to be skipped.",
        [(OPS, "verdicts.append(tf.equal(bad, 0))", "verdicts.append(tf.equal(bad, bad))")],
        ["tests/test_reduction.py::test_skip_cycle_makes_no_step_and_the_next_is_clean"],
    ),
    Trap(
        "one_replica_decides_to_skip",
        "L9",
        "The first replica decides alone whether a micro-batch is skipped; a NaN on another one gets through.",
        [
            (
                OPS,
                "strategy.reduce(_replicas.SUM, bad, axis=None)",
                "tf.identity(strategy.experimental_local_results(bad)[0])",
            )
        ],
        ["tests/test_replicas.py::test_a_nan_on_one_replica_is_skipped_on_all"],
    ),
    Trap(
        "sixteen_bit_sums",
        "L10",
        "Gradients of 16-bit variables are added up in 16 bits.",
        [(CYCLE, "self.dtype or _tf.at_least_float32(var.dtype.base_dtype)", "self.dtype or var.dtype.base_dtype")],
        ["tests/test_reduction.py::test_sixteen_bit_gradients_accumulate_in_float32"],
        ["deepspeedai/DeepSpeed#2768"],
    ),
    Trap(
        "unscaled_at_the_end",
        "L10",
        "A loss scale inside is accepted: the sum is unscaled by the scale at the end of the cycle.",
        [(OPTIMIZER, "if _tf.is_loss_scale_optimizer(inner):", "if False:")],
        ["tests/test_mixed_precision.py::test_a_loss_scale_inside_is_refused_with_the_remedy"],
    ),
    Trap(
        "overflow_on_one_replica",
        "L10",
        "Each replica decides about an overflow by itself, so that only some of them leave the micro-batch out.",
        [(REPLICAS, "spoil = tf.where(total > 0.0,", "spoil = tf.where(bad > 0.0,")],
        ["tests/test_replicas.py::test_an_overflow_on_one_replica_only_is_everyones"],
    ),
    Trap(
        "replicas_not_reduced",
        "L11",
        "Each replica makes its step from its own gradients.",
        [
            (
                OPS,
                "return strategy.num_replicas_in_sync > 1 and not self._is_reduced",
                "return False",
            )
        ],
        ["tests/test_replicas.py::test_fit_on_two_replicas_equals_fit_on_one_device"],
        ["modelscope/FunASR#3472"],
    ),
    Trap(
        "reduced_every_micro_step",
        "L11",
        "Replicas exchange their gradients on every micro step.",
        [
            (
                OPS,
                "            is_last = tf.greater_equal(micro_step_index + 1, length)",
                "            is_last = tf.greater_equal(micro_step_index + 1, length)\n"
                "        if self._reduces(strategy):\n"
                "            _replicas.sum_over_replicas(strategy, list(zip(grads, self._variables)))",
            )
        ],
        ["tests/test_strategies.py::test_fit_talks_once_a_step_and_weighs_unequal_replicas"],
        ["facebookresearch/pytext#695", "huggingface/accelerate#106"],
    ),
    Trap(
        "replicas_reduced_twice",
        "L11",
        "The optimizer sums over replicas what has been summed already.",
        [
            (
                "accum/_tf/_inner_optimizer.py",
                "skip_gradients_aggregation=True)",
                "skip_gradients_aggregation=False)",
            )
        ],
        ["tests/test_replicas.py::test_two_replicas_equal_one_device"],
        ["neuralmagic/sparseml#135"],
    ),
    Trap(
        "mean_of_replicas",
        "L11",
        "Replicas are averaged, whatever the number of their examples.",
        on_each_replica(
            "    totals, weight = [total / weight for total in totals], tf.ones_like(weight)",
        ),
        ["tests/test_strategies.py::test_fit_talks_once_a_step_and_weighs_unequal_replicas"],
    ),
    Trap(
        "reduced_gradients_reduced_again",
        "L11",
        "Gradients that the user has summed over replicas are summed once more.",
        [
            (
                OPTIMIZER,
                "is_reduced = is_reduced and not self._takes_back()",
                "is_reduced = self._takes_back() and False",
            )
        ],
        ["tests/test_strategies.py::test_gradients_that_the_user_has_reduced_are_not_reduced_again"],
    ),
    Trap(
        "checkpoint_without_sums",
        "L12",
        "Checkpoints lack the accumulators, so a run that resumes has lost part of a cycle.",
        [(OPTIMIZER, '_tf.track(self, cycle.state, "accumulation")', "pass")],
        ["tests/test_checkpoint.py::test_a_run_restored_after_any_micro_step_ends_as_the_uninterrupted_one"],
        ["huggingface/transformers#22143", "Nerogar/OneTrainer#1465"],
    ),
    Trap(
        "batch_norm_per_micro_batch",
        "L13",
        "The moving statistics of batch normalization move on every micro-batch.",
        [
            (
                MOVING,
                "return self.accum_steps == 1 if clock is None else internals_of(clock).is_bare",
                "return True",
            )
        ],
        ["tests/test_batch_norm.py::test_a_cycle_of_calls_records_what_keras_records_for_the_full_batch"],
        ["andreped/GradientAccumulator#6", "run-ai/runai#14"],
    ),
    Trap(
        "variance_between_micro_batches",
        "L13",
        "The moving variance is the mean of the micro-batches' variances, without that of their means.",
        [
            (
                MOMENTS,
                "((other.variance - one.variance) + apart * (apart - step))",
                "(other.variance - one.variance)",
            )
        ],
        ["tests/test_batch_norm.py::test_a_cycle_of_calls_records_what_keras_records_for_the_full_batch"],
    ),
    Trap(
        "no_bessel",
        "L13",
        "The moving variance lacks Bessel's factor where Keras' layer has it.",
        [(MOVING, "if _tf.records_unbiased_variance(layer):", "if False:")],
        ["tests/test_batch_norm.py::test_a_cycle_of_calls_records_what_keras_records_for_the_full_batch"],
    ),
    Trap(
        "bessel_per_micro_batch",
        "L13",
        "Bessel's factor is that of the micro-batch instead of the full batch.",
        [
            (MOVING, "if _tf.records_unbiased_variance(layer):", "if False:"),
            ("accum/_keras/_batch_norm/_layer.py", "if _tf.records_unbiased_variance(self):", "if False:"),
        ],
        ["tests/test_batch_norm.py::test_a_cycle_of_calls_records_what_keras_records_for_the_full_batch"],
    ),
    Trap(
        "small_micro_batch_in_statistics",
        "L13",
        "In the moving statistics, a small micro-batch counts as much as any other.",
        [(MOMENTS, "share = tf.math.divide_no_nan(other.count, count)", "share = 0.5")],
        ["tests/test_batch_norm.py::test_statistics_of_a_cycle_follow_the_law_of_total_variance"],
    ),
    Trap(
        "reads_before_writes",
        "L15",
        "In a static graph, nothing makes the step wait for the last micro-batch to be stored.",
        [(ACCUMULATORS, "with tf.control_dependencies([] if kept is None else [kept]):", "if True:")],
        ["tests/test_sparse.py::test_sparse_rows_in_a_session"],
    ),
    Trap(
        "two_train_ops_race",
        "L15",
        "Two train ops in one run of a session read the same counter.",
        [(CYCLE, "self._lock = TrainOpLock()", "self._lock = None")],
        ["tests/test_graph_order.py::test_two_train_ops_in_one_run_do_not_race[resource]"],
    ),
    Trap(
        "split_without_weights",
        "L18",
        "Micro-batches of one batch are averaged, although the first of them is smaller.",
        [(BATCH_STEP, "share = self._share_of(tf.cast(weight, one.dtype), is_first)", "share = None")],
        ["tests/test_micro_batches.py::test_micro_batches_make_the_steps_of_the_whole_batch"],
    ),
    Trap(
        "remainder_lost",
        "L18",
        "The examples that do not fill a micro-batch are left out.",
        [
            (
                "accum/_engine/_micro_batches.py",
                "first = (count - 1) % size + 1 if count else 0",
                "first = min(count, size)",
            ),
            (
                "accum/_engine/_micro_batches.py",
                "tf.minimum(tf.math.floormod(count - 1, size) + 1, count)",
                "tf.minimum(count, size)",
            ),
        ],
        ["tests/test_micro_batches.py::test_micro_batches_make_the_steps_of_the_whole_batch"],
    ),
    Trap(
        "norms_of_micro_batches",
        "L19",
        "In training, batch normalization uses the statistics of the micro-batch, although it is to use the batch's.",
        [
            (
                "accum/_engine/_normalization.py",
                "mean, variance = tf.cast(mean, dtype), tf.cast(variance, dtype)",
                "mean, variance = tf.nn.moments(values, list(self.axes))",
            )
        ],
        ["tests/test_whole_batch.py::test_the_step_is_that_of_the_full_batch"],
        ["giotto-ai/giotto-deep#75"],
    ),
    Trap(
        "gradient_without_variance",
        "L19",
        "The gradient through the batch's variance is missing.",
        [
            (
                "accum/_engine/_normalization.py",
                "2.0 * tf.math.divide_no_nan(by_variance, whole.count)",
                "0.0 * by_variance",
            )
        ],
        ["tests/test_whole_batch.py::test_the_step_is_that_of_the_full_batch"],
    ),
    Trap(
        "gradient_without_mean",
        "L19",
        "The gradient through the batch's mean is missing.",
        [
            (
                "accum/_engine/_normalization.py",
                "offset = tf.math.divide_no_nan(by_mean, whole.count)",
                "offset = tf.zeros_like(by_mean)",
            )
        ],
        ["tests/test_whole_batch.py::test_the_step_is_that_of_the_full_batch"],
    ),
    Trap(
        "tensor_replaced_too_early",
        "L19",
        "The gradient by a tensor takes its place before the level that made it has read it again.",
        [(SEGMENTS, "self.first_needs.update({key: uses[key].level for key in read})", "pass")],
        ["tests/test_whole_batch.py::test_the_step_is_that_of_the_full_batch"],
    ),
    Trap(
        "loss_per_micro_batch",
        "L19",
        "A loss that compares the examples of a batch, such as a contrastive one, sees a micro-batch at a time.",
        [
            (
                "accum/_keras/_steps/_train_test_predict.py",
                "(WholeBatchStep if self._accum.whole_batch else BatchStep)(self, size)",
                "BatchStep(self, size)",
            )
        ],
        ["tests/test_whole_batch.py::test_the_step_is_that_of_the_full_batch[contrastive]"],
        ["huggingface/sentence-transformers#1822", "mdiephuis/SimCLR#13"],
    ),
    Trap(
        "rows_of_keras_3",
        "L8",
        "In Keras 3, the gradient of an embedding becomes dense, so lazy optimizers move rows that no example touched.",
        [(CYCLE, 'is_sparse = self.plan.sparse == "rows" and', "is_sparse = False and")],
        ["tests/test_sparse.py::test_sparse_argument_says_what_the_inner_optimizer_receives"],
        line="2.21",
    ),
    Trap(
        "replicas_alike",
        "L11",
        "A replica with one example of a split batch counts like one with many.",
        [(BATCH_STEP, "factor = _replicas.share_of_replica(weight)", "factor = 1.0")],
        ["tests/test_strategies.py::test_a_split_batch_weighs_unequal_replicas"],
    ),
    Trap(
        "ragged_by_examples",
        "L5",
        "Micro-batches with ragged outputs are weighted by examples, though losses divide by elements.",
        [("accum/_tf/_losses.py", "return _elements_of_ragged(output)", "return None")],
        ["tests/test_weights.py::test_losses_of_ragged_outputs_divide_by_their_elements"],
    ),
    Trap(
        "float32_share",
        "L18",
        "The share of the first micro-batch is rounded to float32 in a float64 model.",
        [(BATCH_STEP, "tf.float64 if tf.float64 in dtypes else tf.float32", "tf.float32")],
        ["tests/test_micro_batches.py::test_in_float64_micro_batches_add_no_rounding_of_float32"],
    ),
    Trap(
        "predictions_by_micro_batch",
        "L19",
        "Batch normalisation that is always in training predicts by the statistics of micro-batches.",
        [
            (
                "accum/_keras/_steps/_whole_batch_call.py",
                'has_barriers = "batch_norm" in self._barriers',
                'has_barriers = self._is_training and "batch_norm" in self._barriers',
            )
        ],
        [
            "tests/test_whole_batch.py::test_batch_normalisation_that_is_always_in_training_sees_whole_batches_in_prediction"
        ],
    ),
    Trap(
        "draws_again",
        "L20",
        "A micro-batch that is computed again draws other random numbers.",
        [("accum/_engine/_cut_graph.py", "(name in self.drawn and not is_first)", "False")],
        ["tests/test_whole_batch.py::test_whatever_is_random_is_the_same_when_a_micro_batch_is_computed_again"],
    ),
    Trap(
        "one_mask_for_all",
        "L20",
        "All micro-batches of a batch draw the same random numbers.",
        [("accum/_engine/_cut_graph.py", "seeds.append(self.trace.offset64)", "pass")],
        ["tests/test_whole_batch.py::test_whatever_is_random_is_the_same_when_a_micro_batch_is_computed_again"],
    ),
    Trap(
        "assigns_again",
        "L19",
        "What a layer assigns once per batch is assigned by each micro-batch.",
        [("accum/_engine/_cut_graph.py", "if self._is_of_batch(final):", "if False:")],
        ["tests/test_whole_batch.py::test_what_a_layer_assigns_without_the_data_is_assigned_once"],
    ),
    Trap(
        "own_moments_by_hand",
        "L19",
        "Batch normalisation written with `tf.nn.moments` uses the statistics of the micro-batch.",
        [("accum/_engine/_found_statistics.py", "elif op.name in pairs:", "elif False:")],
        ["tests/test_value_and_gradients.py::test_batch_normalisation_and_the_loss_see_the_whole_batch"],
    ),
    Trap(
        "average_of_part",
        "L13",
        "The variance towards which a fused batch normalisation moves its average is not corrected by the whole batch.",
        [("compat/v1/_whole_batch.py", "Moments(whole.count, *shaped)", "Moments(whole.count / 2, *shaped)")],
        ["tests/test_graph_whole_batch.py::test_batch_normalisation_sees_the_whole_batch"],
    ),
    Trap(
        "ops_lost",
        "L17",
        "What a function assigns in a static graph is lost with `whole_batch`.",
        [
            (
                "compat/v1/_whole_batch.py",
                'if names:\n        raise ValueError(\n            "With `whole_batch`, `function` must not assign',
                'if False:\n        raise ValueError(\n            "With `whole_batch`, `function` must not assign',
            )
        ],
        ["tests/test_graph_whole_batch.py::test_assignments_and_losses_that_would_be_lost_are_refused"],
    ),
    Trap(
        "traces_for_ever",
        "L16",
        "A model that is dropped stays in memory, because TensorFlow keeps the gradient functions of its traces.",
        [
            (
                "accum/_engine/_custom_gradient.py",
                "            results[:] = [None] * len(results)",
                "            del results",
            )
        ],
        ["tests/test_memory.py::test_a_model_that_is_dropped_is_freed_with_all_that_it_traced"],
    ),
]
