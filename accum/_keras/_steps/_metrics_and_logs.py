"""Metrics of a step that runs on several micro-batches, and the logs made of them after the last one.

Metrics that look across examples are updated once for the whole batch, with the joined arguments of all micro-batches.
"""

import contextlib
import functools
import inspect
import math
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from accum import _check, _tf
from accum._engine._gradients import divided, weighted
from accum._engine._micro_batches import Combined, JoinedRows, Size, Sum
from accum._tf import Leaf, Logs, Nested, Scalar, Wait, tf
from accum._tf.types import KerasContainer

# --------------------------------------------------------------------------------------------------------------------
# Metrics that are updated once for the whole batch


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


def _is_float(value: Leaf) -> bool:
    """Whether a value is a tensor of floating-point numbers. The variables of Keras 3 are none."""
    return isinstance(value, tf.Tensor) and value.dtype.is_floating


def as_float(value: Leaf) -> tf.Tensor:
    """Return a number as a tensor, in float32 at least."""
    value = tf.convert_to_tensor(value)
    return tf.cast(value, _tf.variables.at_least_float32(value.dtype) if value.dtype.is_floating else tf.float32)


# --------------------------------------------------------------------------------------------------------------------
# Results, and the step's logs


class _Entry(NamedTuple):
    """A value in the logs of a step: an entry in the result of `metric`, or a number to be averaged, or neither."""

    metric: tf.keras.metrics.Metric = None
    key: Optional[str] = None
    number: Optional[tf.Tensor] = None
    other: Leaf = None


class StepMetrics:
    """Watches the metrics of a model while its step runs on one micro-batch.

    Metrics that add up over examples take each micro-batch as it comes. There are two exceptions. Their result is that
    of the whole batch only after the last micro-batch. And what does not add up waits, to be updated once: a mean that
    is given one number for a micro-batch, such as a loss, and metrics of the user's own.

    Args:
      model: a `GradientAccumulateModel`.
      count: the number of examples in the micro-batch.
    """

    def __init__(self, model: tf.keras.Model, count: Size) -> None:
        self._model = model
        self._count = count
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._stack = contextlib.ExitStack()
        self._watched: List[tf.keras.metrics.Metric] = []
        # id of a value -> (itself, metric, key in its result):
        self._results: Dict[int, Tuple[Leaf, tf.keras.metrics.Metric, Optional[str]]] = {}
        # Eagerly, what is computed from results. Nothing else is recorded:
        self._tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
        self._updates: List[MetricUpdate] = []
        self._are_sums: List[bool] = []  # for each update
        self._entries: List[_Entry] = []
        self._logs: Logs = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the metrics of the model in this context."""
        with contextlib.ExitStack() as self._stack:
            self._model._accum.step_metrics = self
            self._stack.callback(setattr, self._model._accum, "step_metrics", None)
            if self._graph is None:
                self._stack.enter_context(self._tape)
            for container in _tf.steps.containers_of(self._model):
                self._stack.enter_context(
                    _tf.steps.when_built(container, functools.partial(self._watch_within, container))
                )
            self.watch(self._model.metrics)
            yield

    def _watch_within(self, container: KerasContainer) -> None:
        """Watch what Keras creates for the first batch: compiled metrics, and those that track losses."""
        self.watch(container.metrics)

    def watch(self, metrics: Sequence[tf.keras.metrics.Metric]) -> None:
        """Watch `metrics` too."""
        inner = [part for metric in metrics for part in getattr(metric, "metrics", ())]  # the compiled ones of Keras 3
        for metric in list(metrics) + inner:
            if not any(watched is metric for watched in self._watched):
                self._watched.append(metric)
                methods = {"result": self._result_of(metric), "update_state": self._update_state_of(metric)}
                self._stack.enter_context(_tf.steps.own_methods(metric, **methods))

    def _result_of(self, metric: tf.keras.metrics.Metric) -> Callable[[], Nested]:
        own_result = _tf.steps.local_result(metric)

        def result() -> Nested:
            try:
                value = own_result()
            except Exception:
                if not any(update.metric is metric for update in self._updates):
                    raise
                value = tf.constant(math.nan)  # it waits for its first update
            entries = value.items() if isinstance(value, dict) else [(None, value)]
            self._results.update({id(part): (part, metric, key) for key, part in entries})
            if self._graph is None:
                self._tape.watch([part for _, part in entries if _is_float(part)])
            return value

        return result

    def _update_state_of(self, metric: tf.keras.metrics.Metric) -> Callable[..., Wait]:
        update_state = metric.update_state

        def update(*args: Any, **kwargs: Any) -> Wait:
            args, kwargs = unstacked(metric, *by_position(metric, args, kwargs))
            trimmed = self._model._accum.trimmed
            if trimmed is not None:
                trimmed.warn_of_metric(metric, args, kwargs)
            waiting = None if self._is_elsewhere() else update_of(metric, args, kwargs, self._count)
            if waiting is not None:
                if trimmed is not None:
                    leaves = tf.nest.flatten(waiting.arguments)
                    waiting = waiting._replace(origins=[trimmed.origin_of(leaf) for leaf in leaves])
                self._updates.append(waiting)
                return None
            may_look_across = looks_across_examples(metric) or is_sum_of_batch(metric, args, kwargs)
            may_look_across = may_look_across or stacks_parts(metric, args, kwargs)
            if may_look_across and not are_counts(args, kwargs):
                self._warn_of_parts(metric)
            if trimmed is not None:
                args, kwargs = trimmed.reweighted(metric, args, kwargs)
            return update_state(*args, **kwargs)

        return update

    def _warn_of_parts(self, metric: tf.keras.metrics.Metric) -> None:
        """Warn once for each `compile` of a metric of the user's own that can't wait for the whole batch."""
        warned = self._model._accum.told_of_metrics
        if metric.name not in warned:
            warned.add(metric.name)
            _check.warn(
                f"The metric {metric.name!r} is updated once for each micro-batch, which is only exact if it adds up "
                "over examples. If it does, set its attribute `looks_across_examples = False`. If not, call its "
                "`update_state` with tensors whose first axis is the batch, outside of any `tf.function`, condition "
                "or loop of the train step's own, or leave out `whole_batch`. [accum: metrics]",
                _check.InexactWarning,
            )

    # ------------------------------------------------------------------------------------------------------------

    def parts(self, logs: Any, weight: Optional[Scalar], sums: bool) -> Nested:
        """Return what the micro-batch contributes to the metrics of the batch: a nested structure for the engine.

        Args:
          logs: what the step returned.
          weight: the weight of the micro-batch, a scalar, or None for 1.
          sums: whether the losses of a batch are the sums of those of its micro-batches, and not their means.
        """
        self._logs = logs
        self._entries = [self._entry(leaf) for leaf in tf.nest.flatten(logs)]
        self._warn_of_derived_values(logs)
        losses = _tf.steps.loss_trackers(self._model) if sums else []
        self._are_sums = [any(update.metric is loss for loss in losses) for update in self._updates]
        return [
            [None if entry.number is None else Sum(weighted(entry.number, weight)) for entry in self._entries],
            [update.parts(weight, is_sum) for update, is_sum in zip(self._updates, self._are_sums)],
            Sum(tf.constant(1.0) if weight is None else tf.cast(weight, tf.float32)),
        ]

    def _entry(self, leaf: Leaf) -> _Entry:
        if id(leaf) in self._results:
            _, metric, key = self._results[id(leaf)]
            return _Entry(metric=metric, key=key)
        is_number = tf.is_tensor(leaf) or (isinstance(leaf, (int, float)) and not isinstance(leaf, bool))
        dtype = tf.as_dtype(leaf.dtype) if tf.is_tensor(leaf) else tf.float32
        if is_number and not (dtype.is_bool or dtype == tf.string):
            return _Entry(number=as_float(leaf))
        if tf.is_tensor(leaf) and not tf.executing_eagerly():
            raise ValueError(
                "The logs of a train step over micro-batches must be numbers or results of metrics, which can be "
                f"averaged. Received: {leaf!r}. [accum: metrics]"
            )
        return _Entry(other=leaf)

    def _is_elsewhere(self) -> bool:
        """Whether this is a branch or function within the step, which may not be run."""
        return not tf.executing_eagerly() and tf.compat.v1.get_default_graph() is not self._graph

    def _warn_of_derived_values(self, logs: Any) -> None:
        """Warn of numbers that are averaged but computed from results, or that count: neither has a mean."""
        leaves = [leaf for leaf in tf.nest.flatten(logs) if tf.is_tensor(leaf) and id(leaf) not in self._results]
        derived = [leaf for leaf in leaves if self._is_derived(leaf)] or self._may_be_derived(logs)
        has_counts = any(tf.as_dtype(leaf.dtype).is_integer for leaf in leaves)
        if (derived or has_counts) and self._model._accum.is_first_time("derived logs"):
            _check.warn(
                "Numbers in the logs of a train step are averaged over micro-batches, which is not exact for counts, "
                "sums, and values computed from `metric.result()`: return the result itself, or use a metric. "
                f"Received: {logs!r}. [accum: metrics]",
                _check.InexactWarning,
            )

    def _is_derived(self, leaf: Leaf) -> bool:
        """Whether a number depends on the result of a metric."""
        if self._graph is None:
            results = [part for part, _, _ in self._results.values() if _is_float(part)]
            grads = self._tape.gradient(leaf, results) if results and _is_float(leaf) else []
            return any(grad is not None for grad in grads)
        waiting: List[tf.Tensor] = [leaf]
        seen = {id(leaf)}
        while waiting:
            tensor = waiting.pop()
            if id(tensor) in self._results:
                return True
            new = [part for part in tensor.op.inputs if id(part) not in seen]
            seen.update(map(id, new))
            waiting.extend(new)
        return False

    def _may_be_derived(self, logs: Any) -> List[float]:
        """Return the numbers of Python in the logs, if a metric was asked for its result but is not there by itself.

        Some releases of Keras 3 log results as such numbers, under the names of their metrics.
        """
        leaves = tf.nest.flatten(logs)
        asked = {id(metric): metric.name for _, metric, _ in self._results.values()}
        logged = {id(self._results[id(leaf)][1]) for leaf in leaves if id(leaf) in self._results}
        if not isinstance(logs, dict) or set(asked) == logged:
            return []
        names = set(asked.values()) | {key for _, _, key in self._results.values()}
        return [leaf for name, leaf in logs.items() if isinstance(leaf, float) and name not in names]

    def finish(self, totals: Nested) -> Logs:
        """Give the metrics what they have waited for, and return the logs of the batch.

        Args:
          totals: the combined `parts` of all micro-batches.
        """
        numbers, updates, weight = totals
        for update, is_sum, parts in zip(self._updates, self._are_sums, updates):
            update.run(parts, None if is_sum else weight)
        results: Dict[int, Nested] = {}
        flat = []
        for entry, number in zip(self._entries, numbers):
            if entry.metric is not None and id(entry.metric) not in results:
                results[id(entry.metric)] = entry.metric.result()
            flat.append(self._value(entry, number, weight, results))
        return tf.nest.pack_sequence_as(self._logs, flat)

    @staticmethod
    def _value(entry: _Entry, number: Optional[tf.Tensor], weight: tf.Tensor, results: Dict[int, Nested]) -> Leaf:
        if entry.metric is not None:
            result = results[id(entry.metric)]
            return result if entry.key is None else result[entry.key]
        return entry.other if number is None else divided(number, weight, None)
