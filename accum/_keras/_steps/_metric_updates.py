"""Updates of metrics that look across examples.

They are made once for the whole batch, with the joined arguments of all micro-batches.
"""

import inspect
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from accum import _tf
from accum._engine._batch import Size
from accum._engine._combined import Combined, JoinedRows, Sum
from accum._engine._gradients import divided, weighted
from accum._tf import Leaf, Nested, Scalar, tf

_MEAN, _SUM, _ROWS = "mean", "sum", "rows"
ATTACHED = ("_keras_mask", "_keras_logits")
"""What Keras' losses and metrics look for in an output."""


class MetricUpdate(NamedTuple):
    """A call of a metric's `update_state` that waits, to be made once, with what all micro-batches have together."""

    metric: tf.keras.metrics.Metric
    arguments: Tuple[Tuple[Nested, ...], Dict[str, Nested]]  # (args, kwargs) of this micro-batch
    combined_by: List[Optional[str]]  # for each leaf of them; None: it is the same in all micro-batches
    origins: Sequence[Optional[int]] = ()  # for each leaf, which leaf of trimmed data it is, or None

    def parts(self, weight: Optional[Scalar], is_sum: bool) -> List[List[Optional[Combined]]]:
        """Return what the micro-batch contributes: a nested structure for the engine.

        Args:
          weight: the weight of the micro-batch, or None for 1.
          is_sum: whether numbers are added up, and not averaged.
        """
        leaves = tf.nest.flatten(self.arguments)
        parts = [self._part(leaf, how, None if is_sum else weight) for leaf, how in zip(leaves, self.combined_by)]
        for (part, *_), origin in zip(parts, self.origins):
            if isinstance(part, JoinedRows):
                part.origin = origin
        return parts

    @staticmethod
    def _part(leaf: Leaf, how: Optional[str], weight: Optional[Scalar]) -> List[Optional[Combined]]:
        """Return what a leaf contributes, and what is attached to it: its mask, and the logits that it is made of."""
        if how == _ROWS:
            others = [getattr(leaf, name, None) for name in ATTACHED]
            return [JoinedRows(leaf), *[None if other is None else JoinedRows(other) for other in others]]
        of_leaf = Sum(weighted(as_float(leaf), weight)) if how == _MEAN else None
        if how == _SUM:
            of_leaf = Sum(tf.cast(leaf, tf.float32))
        return [of_leaf, *[None for _ in ATTACHED]]

    def run(self, totals: Nested, weight: Optional[tf.Tensor]) -> None:
        """Update the metric.

        Args:
          totals: the combined `parts` of all micro-batches.
          weight: the sum of their weights, None if numbers were added up.
        """
        leaves = tf.nest.flatten(self.arguments)
        for index, (how, (total, *others)) in enumerate(zip(self.combined_by, totals)):
            for name, other in zip(ATTACHED, others):
                if other is not None:
                    total = _tf.graph_parts.with_attached(total, name, other)
            if how is not None:
                leaves[index] = divided(total, weight, None) if how == _MEAN else total
        args, kwargs = tf.nest.pack_sequence_as(self.arguments, leaves)
        self.metric.update_state(*args, **kwargs)


def looks_across_examples(metric: tf.keras.metrics.Metric) -> bool:
    """Whether the result of a metric may depend on how a batch is split.

    The metrics of Keras add up over examples. One of the user's own may do anything, unless the user declares it.
    """
    function = getattr(metric, "_fn", None)
    declared = [getattr(part, "looks_across_examples", None) for part in (metric, function)]
    if any(value is not None for value in declared):
        return any(declared)
    parts = [type(metric).update_state] + ([] if function is None else [function])
    return not all(inspect.isfunction(part) and _tf.layers.comes_with_keras(part) for part in parts)


def update_of(
    metric: tf.keras.metrics.Metric, args: Sequence[Nested], kwargs: Dict[str, Nested], count: Size
) -> Optional[MetricUpdate]:
    """Return a call of `update_state` as one that waits, or None if it can be made for each micro-batch, or must be.

    Args:
      args, kwargs: its arguments.
      count: the number of examples in the micro-batch.
    """
    looks_across = looks_across_examples(metric)
    arguments = tuple(args), dict(kwargs)
    leaves = tf.nest.flatten(arguments)
    if _tf.steps.is_mean(metric) or (looks_across and isinstance(metric, tf.keras.metrics.Mean)):
        # A mean of numbers, such as losses, observes one number for the batch.
        weights = tf.nest.flatten(kwargs.get("sample_weight"))
        if len(args) == 1 and not set(kwargs) - {"sample_weight"} and _are_observed(metric, args[0], weights):
            means = [_MEAN for _ in tf.nest.flatten(args)]
            sums = [None if leaf is None else _SUM for leaf in leaves[len(means) :]]
            return MetricUpdate(metric, arguments, [*means, *sums])
    combined_by: List[Optional[str]] = [_ROWS if _has_rows(leaf, count) else None for leaf in leaves]
    is_known = [how or leaf is None or isinstance(leaf, (int, float, str)) for how, leaf in zip(combined_by, leaves)]
    if looks_across and _ROWS in combined_by and all(is_known):
        return MetricUpdate(metric, arguments, combined_by)
    return None


def _are_observed(metric: tf.keras.metrics.Metric, value: Leaf, weights: Sequence[Leaf]) -> bool:
    """Whether a mean observes `value` once, with weights that are numbers or None, and not once for each example."""
    is_whole = all(map(_is_number, tf.nest.flatten(value))) or (
        not isinstance(metric, tf.keras.metrics.Mean) and isinstance(value, tf.Tensor)
    )
    return is_whole and all(weight is None or _is_number(weight) for weight in weights)


def _has_rows(leaf: Leaf, count: Size) -> bool:
    """Whether the first axis of a tensor is that of the examples, as far as is known."""
    if not isinstance(leaf, tf.Tensor) or leaf.shape.rank == 0:
        return False
    static_size = leaf.shape[0] if leaf.shape.rank else None
    return static_size is None or (isinstance(count, int) and static_size == count)


def _is_number(value: Leaf) -> bool:
    return isinstance(value, (int, float)) or (tf.is_tensor(value) and value.shape.rank == 0)


def as_float(value: Leaf) -> tf.Tensor:
    """Return a number as a tensor, in float32 at least."""
    value = tf.convert_to_tensor(value)
    return tf.cast(value, _tf.variables.at_least_float32(value.dtype) if value.dtype.is_floating else tf.float32)
