"""Metrics of a step that runs on several micro-batches: asked for their results after the last of them."""

import contextlib
import warnings
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence

from accum import _tf
from accum._engine._accumulators import weighted
from accum._engine._combined import Sum, divided
from accum._tf import Scalar, tf


class _Update(NamedTuple):
    """One call of `update_state` of a mean, with a number for the whole micro-batch."""

    metric: Any
    value: tf.Tensor
    sample_weight: Optional[tf.Tensor]


class _Entry(NamedTuple):
    """A value in the logs of a step: an entry in the result of `metric`, or a number to be averaged, or neither."""

    metric: Any = None
    key: Any = None
    number: Any = None
    other: Any = None


class StepMetrics:
    """Watches the metrics of a model while its step runs on one micro-batch.

    Metrics add up over examples, so they take each micro-batch as it comes. There are two exceptions. Their result is
    that of the whole batch only after the last micro-batch. And a mean that is given one number for a micro-batch, such
    as a loss, has to be given the number of the whole batch, once.
    """

    def __init__(self, model: tf.keras.Model) -> None:
        self._model = model
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._stack = contextlib.ExitStack()
        self._known: List[Any] = []
        self._results: Dict[int, Any] = {}  # id of a value -> (itself, metric, key in its result)
        self._updates: List[_Update] = []
        self._are_sums: List[bool] = []  # for each update
        self._entries: List[_Entry] = []
        self._logs: Any = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the metrics of the model in this context."""
        with contextlib.ExitStack() as self._stack:
            _tf.set_untracked(self._model, "_accum_step_metrics", self)
            self._stack.callback(self._model.__dict__.pop, "_accum_step_metrics")
            self.watch(self._model.metrics)
            yield

    def watch(self, metrics: Sequence[Any]) -> None:
        """Watch `metrics` too: Keras creates some of them during the first step."""
        inner = [part for metric in metrics for part in getattr(metric, "metrics", ())]  # the compiled ones of Keras 3
        for metric in list(metrics) + inner:
            if any(known is metric for known in self._known):
                continue
            self._known.append(metric)
            methods = {"result": self._result_of(metric)}
            if isinstance(metric, tf.keras.metrics.Mean) and _updates_as_a_mean(metric):
                methods["update_state"] = self._update_state_of(metric)
            if hasattr(metric, "_fn"):
                methods["_fn"] = self._warning_of_numbers(metric)
            self._stack.enter_context(_tf.own_methods(metric, **methods))

    def _result_of(self, metric: Any) -> Any:
        own_result = _tf.local_result(metric)

        def result() -> Any:
            value = own_result()
            entries = value.items() if isinstance(value, dict) else [(None, value)]
            self._results.update({id(part): (part, metric, key) for key, part in entries})
            return value

        return result

    def _warning_of_numbers(self, metric: Any) -> Any:
        """Return the function of a metric, with a warning if it returns one number for all examples."""
        function = metric._fn

        def call(*args: Any, **kwargs: Any) -> Any:
            values = function(*args, **kwargs)
            if tf.is_tensor(values) and values.shape.rank == 0:
                warnings.warn(
                    f"The metric {metric.name!r} returns one number for a batch, and is logged as the mean of the "
                    "micro-batches' numbers: return one number per example, or use a `tf.keras.metrics.Metric`.",
                    stacklevel=2,
                )
            return values

        return call

    def _update_state_of(self, metric: Any) -> Any:
        update_state = metric.update_state

        def update(values: Any, sample_weight: Any = None) -> Any:
            is_number = _is_scalar(values) and (sample_weight is None or _is_scalar(sample_weight))
            if not is_number or self._is_elsewhere():
                return update_state(values, sample_weight=sample_weight)
            values = _as_float(values)
            sample_weight = None if sample_weight is None else tf.cast(sample_weight, tf.float32)
            self._updates.append(_Update(metric, values, sample_weight))
            return None

        return update

    # ------------------------------------------------------------------------------------------------------------

    def parts(self, logs: Any, weight: Optional[Scalar], sums: bool) -> Any:
        """Return what the micro-batch contributes to the metrics of the batch: a nested structure for the engine.

        Args:
          logs: what the step returned.
          weight: the weight of the micro-batch, a scalar, or None for 1.
          sums: whether the losses of a batch are the sums of those of its micro-batches, and not their means.
        """
        self._logs = logs
        self._entries = [self._entry(leaf) for leaf in tf.nest.flatten(logs)]
        self._warn_of_derived_values(logs)
        one = tf.constant(1.0)
        losses = _tf.loss_trackers(self._model) if sums else []
        self._are_sums = [any(update.metric is loss for loss in losses) for update in self._updates]
        values = [
            update.value if is_sum else weighted(update.value, weight)
            for update, is_sum in zip(self._updates, self._are_sums)
        ]
        return [
            [None if entry.number is None else Sum(weighted(entry.number, weight)) for entry in self._entries],
            [Sum(value) for value in values],
            [None if update.sample_weight is None else Sum(update.sample_weight) for update in self._updates],
            Sum(one if weight is None else tf.cast(weight, tf.float32)),
        ]

    def _entry(self, leaf: Any) -> _Entry:
        if id(leaf) in self._results:
            _, metric, key = self._results[id(leaf)]
            return _Entry(metric=metric, key=key)
        is_number = tf.is_tensor(leaf) or (isinstance(leaf, (int, float)) and not isinstance(leaf, bool))
        if is_number and not (tf.is_tensor(leaf) and (leaf.dtype.is_bool or leaf.dtype == tf.string)):
            return _Entry(number=_as_float(leaf))
        if tf.is_tensor(leaf) and not tf.executing_eagerly():
            raise ValueError(
                "The logs of a train step over micro-batches must be numbers or results of metrics, which can be "
                f"averaged. Received: {leaf!r}."
            )
        return _Entry(other=leaf)

    def _is_elsewhere(self) -> bool:
        """Whether this is a branch or function within the step, which may not be run."""
        return not tf.executing_eagerly() and tf.compat.v1.get_default_graph() is not self._graph

    def _warn_of_derived_values(self, logs: Any) -> None:
        """Warn of numbers that are averaged but computed from results, or that count: neither has a mean."""
        leaves = [leaf for leaf in tf.nest.flatten(logs) if tf.is_tensor(leaf) and id(leaf) not in self._results]
        derived = [leaf for leaf in leaves if self._graph is not None and self._is_derived(leaf)]
        if derived or any(leaf.dtype.is_integer for leaf in leaves):
            warnings.warn(
                "Numbers in the logs of a train step are averaged over micro-batches, which is not exact for counts, "
                "sums, and values computed from `metric.result()`: return the result itself, or use a metric. "
                f"Received: {logs!r}.",
                stacklevel=2,
            )

    def _is_derived(self, leaf: Any) -> bool:
        """Whether a number depends on the result of a metric, by the graph."""
        waiting: List[Any] = [leaf]
        seen = {id(leaf)}
        while waiting:
            tensor = waiting.pop()
            if id(tensor) in self._results:
                return True
            new = [part for part in tensor.op.inputs if id(part) not in seen]
            seen.update(map(id, new))
            waiting.extend(new)
        return False

    def finish(self, totals: Any) -> Any:
        """Give the metrics what they have waited for, and return the logs of the batch.

        Args:
          totals: the combined `parts` of all micro-batches.
        """
        numbers, values, sample_weights, weight = totals
        for update, is_sum, value, sample_weight in zip(self._updates, self._are_sums, values, sample_weights):
            value = value if is_sum else divided(value, weight, None)
            update.metric.update_state(value, sample_weight=sample_weight)
        results: Dict[int, Any] = {}
        flat = []
        for entry, number in zip(self._entries, numbers):
            if entry.metric is not None and id(entry.metric) not in results:
                results[id(entry.metric)] = entry.metric.result()
            flat.append(self._value(entry, number, weight, results))
        return tf.nest.pack_sequence_as(self._logs, flat)

    @staticmethod
    def _value(entry: _Entry, number: Any, weight: tf.Tensor, results: Dict[int, Any]) -> Any:
        if entry.metric is not None:
            result = results[id(entry.metric)]
            return result if entry.key is None else result[entry.key]
        return entry.other if number is None else divided(number, weight, None)


def _updates_as_a_mean(metric: Any) -> bool:
    """Whether a metric is updated with values, by the method of Keras' mean."""
    return type(metric).update_state is tf.keras.metrics.Mean.update_state or type(metric) is tf.keras.metrics.Mean


def _as_float(value: Any) -> tf.Tensor:
    value = tf.convert_to_tensor(value)
    return tf.cast(value, _tf.at_least_float32(value.dtype) if value.dtype.is_floating else tf.float32)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float)) or (tf.is_tensor(value) and value.shape.rank == 0)
