"""Updates of metrics that look across examples.

They are made once for the whole batch, with the joined arguments of all micro-batches.
"""

import inspect
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from accum import _tf
from accum._engine._batch import Size
from accum._engine._combined import Combined, JoinedRows, Sum
from accum._engine._gradients import divided, weighted
from accum._tf import Leaf, Nested, Scalar, tf

_MEAN, _SUM, _ROWS = "mean", "sum", "rows"


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
        for (part, _), origin in zip(parts, self.origins):
            if isinstance(part, JoinedRows):
                part.origin = origin
        return parts

    @staticmethod
    def _part(leaf: Leaf, how: Optional[str], weight: Optional[Scalar]) -> List[Optional[Combined]]:
        """Return what a leaf contributes, and what its mask does."""
        if how == _ROWS:
            mask = getattr(leaf, "_keras_mask", None)
            return [JoinedRows(leaf), None if mask is None else JoinedRows(mask)]
        if how == _MEAN:
            return [Sum(weighted(as_float(leaf), weight)), None]
        return [None if how is None else Sum(tf.cast(leaf, tf.float32)), None]

    def run(self, totals: Nested, weight: Optional[tf.Tensor]) -> None:
        """Update the metric.

        Args:
          totals: the combined `parts` of all micro-batches.
          weight: the sum of their weights, None if numbers were added up.
        """
        leaves = tf.nest.flatten(self.arguments)
        for index, (how, (total, mask)) in enumerate(zip(self.combined_by, totals)):
            if mask is not None:
                total._keras_mask = mask
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


def stacks_parts(metric: tf.keras.metrics.Metric, args: Sequence[Nested], kwargs: Dict[str, Nested]) -> bool:
    """Whether a metric of Keras is given lists of tensors. It stacks them, and no longer counts the examples."""
    is_declared = getattr(metric, "looks_across_examples", None) is False
    lists = [argument for argument in [*args, *kwargs.values()] if isinstance(argument, (list, tuple))]
    # The compiled metrics of Keras 3, of several outputs. In Keras 2, each metric is a layer.
    is_container = hasattr(metric, "metrics") and not isinstance(metric, tf.keras.layers.Layer)
    return not is_declared and not is_container and any(map(tf.is_tensor, tf.nest.flatten(lists)))


def unstacked(metric: tf.keras.metrics.Metric, args: Sequence[Nested], kwargs: Dict[str, Nested]) -> Any:
    """Return (args, kwargs) of a metric of Keras with lists in place of what has been stacked of them in a graph."""
    if tf.executing_eagerly() or looks_across_examples(metric):
        return tuple(args), kwargs
    return tuple(map(_tf.graph_parts.unstacked, args)), {
        name: _tf.graph_parts.unstacked(argument) for name, argument in kwargs.items()
    }


def by_position(metric: tf.keras.metrics.Metric, args: Tuple[Nested, ...], kwargs: Dict[str, Nested]) -> Any:
    """Return (args, kwargs) of a mean or sum of numbers with the values by position and their weights by name."""
    is_plain = _tf.steps.is_mean(metric) or type(metric).update_state is tf.keras.metrics.Sum.update_state
    is_one = is_plain or isinstance(metric, (tf.keras.metrics.Mean, tf.keras.metrics.Sum))
    if is_one and not args and "values" in kwargs:
        return (kwargs["values"],), {name: value for name, value in kwargs.items() if name != "values"}
    if is_plain and len(args) == 2 and not kwargs:
        return args[:1], {"sample_weight": args[1]}
    return args, kwargs


def update_of(
    metric: tf.keras.metrics.Metric, args: Sequence[Nested], kwargs: Dict[str, Nested], count: Size
) -> Optional[MetricUpdate]:
    """Return a call of `update_state` as one that waits, or None if it can be made for each micro-batch, or must be.

    Args:
      args, kwargs: its arguments.
      count: the number of examples in the micro-batch.
    """
    looks_across = looks_across_examples(metric) or stacks_parts(metric, args, kwargs)
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


def is_sum_of_batch(metric: tf.keras.metrics.Metric, args: Sequence[Nested], kwargs: Dict[str, Nested]) -> bool:
    """Whether a metric of Keras adds up numbers, one for each call, which may be means over the examples."""
    is_declared = getattr(metric, "looks_across_examples", None) is False
    is_sum = isinstance(metric, tf.keras.metrics.Sum) or type(metric).__name__ == "MeanTensor"
    return is_sum and not is_declared and len(args) == 1 and not kwargs and _is_number(args[0])


def are_counts(args: Sequence[Nested], kwargs: Dict[str, Nested]) -> bool:
    """Whether an update is given numbers alone and one is an integer. Such numbers are counts, which add up."""
    leaves = [leaf for leaf in tf.nest.flatten((tuple(args), dict(kwargs))) if leaf is not None]
    return all(map(_is_number, leaves)) and any(tf.convert_to_tensor(leaf).dtype.is_integer for leaf in leaves)


def _has_rows(leaf: Leaf, count: Size) -> bool:
    """Whether the first axis of a tensor is that of the examples, as far as is known."""
    if not isinstance(leaf, tf.Tensor) or leaf.shape.rank == 0:
        return False
    static_size = leaf.shape[0] if leaf.shape.rank else None
    return static_size is None or (isinstance(count, int) and static_size == count)


def _is_number(value: Leaf) -> bool:
    return isinstance(value, (int, float)) or (tf.is_tensor(value) and value.shape.rank == 0)


def is_float(value: Leaf) -> bool:
    """Whether a value is a tensor of floating-point numbers. The variables of Keras 3 are none."""
    return isinstance(value, tf.Tensor) and value.dtype.is_floating


def as_float(value: Leaf) -> tf.Tensor:
    """Return a number as a tensor, in float32 at least."""
    value = tf.convert_to_tensor(value)
    return tf.cast(value, _tf.variables.at_least_float32(value.dtype) if value.dtype.is_floating else tf.float32)
