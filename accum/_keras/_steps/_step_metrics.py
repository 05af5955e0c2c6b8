"""The metrics of a step that runs on several micro-batches, and the logs made of them after the last one."""

import contextlib
import functools
import math
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from accum import _tf
from accum._engine._batch import Size
from accum._engine._combined import Sum
from accum._engine._gradients import divided, weighted
from accum._keras import _step_context
from accum._keras._steps._metric_updates import (
    MetricUpdate,
    as_float,
    update_of,
)
from accum._tf import Leaf, Logs, Nested, Scalar, Wait, tf
from accum._tf.types import KerasContainer


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
        self._updates: List[MetricUpdate] = []
        self._are_sums: List[bool] = []  # for each update
        self._entries: List[_Entry] = []
        self._logs: Logs = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the metrics of the model in this context."""
        with contextlib.ExitStack() as self._stack:
            self._stack.enter_context(_step_context.entering(self._model, metrics=self))
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
                self._stack.enter_context(_tf.patches.METRICS.on(metric, **methods))

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
            return value

        return result

    def _update_state_of(self, metric: tf.keras.metrics.Metric) -> Callable[..., Wait]:
        update_state = metric.update_state

        def update(*args: Any, **kwargs: Any) -> Wait:
            trimmed = _step_context.of_model(self._model).trimmed
            if trimmed is not None:
                trimmed.warn_of_metric(metric, args, kwargs)
            waiting = None if self._is_elsewhere() else update_of(metric, args, kwargs, self._count)
            if waiting is not None:
                if trimmed is not None:
                    leaves = tf.nest.flatten(waiting.arguments)
                    waiting = waiting._replace(origins=[trimmed.origin_of(leaf) for leaf in leaves])
                self._updates.append(waiting)
                return None
            if trimmed is not None:
                args, kwargs = trimmed.reweighted(metric, args, kwargs)
            return update_state(*args, **kwargs)

        return update

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
