"""A step of a model that holds a whole batch of sequences and runs on micro-batches of about equally many tokens."""

from typing import Any, Callable, List, Optional

from accum import _check, _tf
from accum._engine._batch import Size, as_tensor
from accum._engine._combined import Sum
from accum._engine._draws import Chosen
from accum._engine._micro_batches import Index, within_function
from accum._keras import _step_context
from accum._keras._steps._split_step import SplitStep
from accum._keras._steps._user_steps import UserSteps
from accum._keras._tokens._budget import Sequences, TokenBatches
from accum._keras._tokens._sequence_lengths import sequences_of
from accum._keras._tokens._trimmed_time import TrimmedTime, check_batch_norms, probe
from accum._tf import Data, Leaf, Nested, tf


class TokenStep(SplitStep):
    """Runs the steps of a model over the micro-batches of one batch, on one replica.

    Args:
      steps: the `UserSteps` of the model.
      budget: int >= 1, the largest number of tokens in a micro-batch, padding included.
      lengths_of: function of x that returns the lengths of its examples, or None.
    """

    def __init__(self, steps: UserSteps, budget: int, lengths_of: Optional[Callable[[Nested], tf.Tensor]]) -> None:
        super().__init__(steps, tf.int32.max)  # any number of examples may fit
        if self._compiled:
            raise ValueError(
                "`micro_batch_tokens` cuts a batch by its lengths, and XLA compiles for fixed shapes only: pass "
                "`jit_compile=True` to `compile`, and XLA compiles each micro-batch instead of the whole step."
                " [accum: tokens-xla]"
            )
        self._compiles_parts = steps.model._accum.compiles_micro_batches and not tf.executing_eagerly()
        self._budget = budget
        self._lengths_of = lengths_of
        self._batches: Any = None
        self._trimmed: Any = None

    def _over_micro_batches(
        self, function: Callable[[Data, Index], Nested], data: Data, is_training: bool = False
    ) -> Nested:
        if is_training:
            check_batch_norms(self._model)
        data = tf.nest.map_structure(as_tensor, data)
        sequences = sequences_of(self._model, data, self._lengths_of)
        if self._compiles_parts and sequences.padded is None:
            raise ValueError(
                "XLA compiles for fixed shapes only, and ragged inputs have none: pad them, and mask padding or pass "
                "`sequence_lengths`, or compile with `jit_compile=False`. [accum: tokens-xla]"
            )
        self._trimmed = trimmed = TrimmedTime(self._model, self._output_shapes(data, sequences))
        self._batches = TokenBatches(
            data, sequences, self._budget, self._as_function, trimmed.has_time, self._compiles_parts
        )
        trimmed.padded = self._batches.padded
        probes: List[Any] = []
        if sequences.padded is not None:
            probes = probe(self._model, self._batches, sequences.lengths)

        with tf.control_dependencies(probes):
            totals = super()._over_micro_batches(function, data, is_training)
        self._warn_of_other_losses(is_training)
        timed = [leaf for leaf, is_timed in zip(tf.nest.flatten(data), sequences.are_timed) if is_timed]
        checks = trimmed.checks(data, sequences.lengths, timed)
        with tf.control_dependencies(checks):
            return tf.nest.map_structure(_after, totals, expand_composites=True) if checks else totals

    def _on_part(self, function: Callable[[], Nested], part: Data, index: Index) -> Nested:
        self._trimmed.part = tf.nest.flatten(part)
        self._trimmed.length = self._batches.length_of(index)
        with _step_context.entering(self._model, trimmed=self._trimmed):
            return self._compiled_part(function) if self._compiles_parts else function()

    def _compiled_part(self, function: Callable[[], Nested]) -> Nested:
        """Run `function()`, compiled by XLA for each shape of a micro-batch when it first comes."""

        def with_lengths() -> Nested:
            with self._trimmed.noting_lengths() as lengths:
                returned = function()
            return returned, [Sum(length) for length in lengths]

        returned, lengths = within_function(with_lengths, jit_compile=True)
        self._trimmed.check_lengths([length for total in lengths for length in total.values])
        return returned

    def _cut(self, data: Data) -> TokenBatches:
        return self._batches

    def _chosen(self, index: Index) -> Optional[Chosen]:
        batches = self._batches
        return Chosen(batches.places(index), batches.length_of(index), batches.padded)

    def _count_at(self, index: Index) -> Size:
        size = self._batches.size_of(index)
        return int(size) if tf.executing_eagerly() else size

    def _share_of(self, weight: tf.Tensor, is_first: bool) -> Optional[tf.Tensor]:
        return weight

    def _output_shapes(self, data: Data, sequences: Sequences) -> List[tf.TensorShape]:
        """Return the shapes of the model's outputs for sequences of any length; none are needed in a graph."""
        own = self._model._accum
        if not tf.executing_eagerly() or sequences.padded is None:
            return []
        if own.output_shapes is None:
            x = _tf.losses.unpack_data(data)[0]
            leaves = zip(tf.nest.flatten(x), sequences.are_timed)
            own.output_shapes = _tf.models.output_shapes(
                self._model, tf.nest.pack_sequence_as(x, [_spec(leaf, is_timed) for leaf, is_timed in leaves])
            )
        return own.output_shapes

    def _warn_of_other_losses(self, is_training: bool) -> None:
        if self._batches.padded is None or not is_training:
            return
        own = not self._trimmed.has_losses and self._model._accum.options.weighs_as_keras
        added = bool(_tf.steps.added_losses(self._model))
        if (own or added) and self._model._accum.is_first_time("other losses of trimmed sequences"):
            where = "layers add (`add_loss`)" if added else "the train step computes itself"
            _check.warn(
                f"`micro_batch_tokens` trims padding, and can't tell whether it counts in losses that {where}: the "
                "update is that of the full batch if padding has no part in them and they are means over examples; "
                "else pass `micro_batch_weight=`, a function `(x, y, sample_weight)` that counts what they divide by."
                " [accum: tokens-padding]",
                _check.InexactWarning,
            )


def _after(leaf: Optional[tf.Tensor]) -> Optional[tf.Tensor]:
    return None if leaf is None else tf.identity(leaf)


def _spec(leaf: Leaf, is_timed: bool) -> Any:
    """Return the spec of a leaf of x for any number of examples and tokens."""
    if not isinstance(leaf, tf.Tensor):
        return leaf
    shape = leaf.shape.as_list()
    return tf.TensorSpec([None] * min(len(shape), 2 if is_timed else 1) + shape[2 if is_timed else 1 :], leaf.dtype)
