"""Steps that try the same batch again with smaller micro-batches when memory runs out (law L18, "auto").

    batch = next(iterator)            # outside of the traced functions, so that it can be tried again
    kept = the variables that a forward pass changes
    sums = gradients(batch, size)     # memory runs out: restore what was kept, halve the size, try again
    logs = apply(sums)                # the only part that changes weights

The loop over attempts is in Python, because a graph can't catch an error.
"""

from typing import Callable, Dict, Iterator, List, Optional, Sequence

from accum import _tf
from accum._engine import _replicas
from accum._engine._batch import Batch, Size
from accum._keras._steps._changed_variables import warn_of_batch_norms
from accum._keras._steps._draws_of_batch import counters_of
from accum._keras._steps._loss_denominator import warn_of_unlike_losses
from accum._keras._steps._split_step import SplitStep
from accum._tf import Data, Leaf, Logs, Nested, PerReplica, tf


class AutoSizedSteps:
    """Makes the functions that Keras calls for each batch, for a model whose micro-batches shrink.

    Args:
      model: a `GradientAccumulateModel` with `micro_batch_size="auto"`.
    """

    def __init__(self, model: tf.keras.Model) -> None:
        self._model = model
        self._strategy = model.distribute_strategy
        self._size = model._accum.size
        self._steps: Dict[int, SplitStep] = {}  # replica -> what knows the structure of its sums
        self._gradients = self._function(self._on_gradients)
        self._apply = self._function(self._on_apply)
        self._test = self._function(self._on_test)
        self._predict = self._function(self._on_predict)
        self._traced: List[Callable[..., PerReplica]] = []
        self._known: List[tf.Variable] = []  # what a forward pass may change, in the order in which it was met
        # Not by XLA, which would copy them all, frozen weights too, and can't read those of several devices.
        self._read = self._read_state if model.run_eagerly else tf.function(self._read_state)

    def train_function(self, iterator: Iterator[Data]) -> Logs:
        return _each_step(iterator, _tf.steps_per_execution(self._model), self._train)

    def test_function(self, iterator: Iterator[Data]) -> Logs:
        return _each_step(iterator, _tf.steps_per_execution(self._model), self._evaluate)

    def predict_function(self, iterator: Iterator[Data]) -> Nested:
        outputs: List[Nested] = []
        _each_step(iterator, _tf.steps_per_execution(self._model), lambda data: outputs.append(self._outputs(data)))
        return tf.nest.map_structure(lambda *parts: tf.concat(parts, axis=0), *outputs)

    # ------------------------------------------------------------------------------------------------------------

    def _train(self, data: Data) -> Logs:
        totals = self._retrying(self._gradients, data)
        try:
            logs = self._apply(totals)
        except tf.errors.ResourceExhaustedError as error:
            raise RuntimeError(
                "Memory ran out while the optimizer made its step, so some weights may be updated and others not: "
                "restore a checkpoint. Splitting the batch further does not help: the optimizer's variables and one "
                "gradient have to fit beside the weights."
            ) from error
        return self._first(logs)

    def _evaluate(self, data: Data) -> Logs:
        return self._first(self._retrying(self._test, data))

    def _outputs(self, data: Data) -> Nested:
        outputs = self._retrying(self._predict, data)
        return tf.nest.map_structure(lambda part: tf.concat(self._local(part), axis=0), outputs)

    def _first(self, logs: PerReplica) -> Logs:
        """Return the logs of the first replica: metrics are the same on all."""
        return tf.nest.map_structure(lambda value: self._local(value)[0], logs)

    def _local(self, value: PerReplica) -> Sequence[Leaf]:
        return self._strategy.experimental_local_results(value)

    def _retrying(self, function: Callable[..., PerReplica], data: Data) -> PerReplica:
        """Call `function(data, size)` with smaller and smaller sizes until memory suffices."""
        if hasattr(function, "get_concrete_function") and function not in self._traced:
            function.get_concrete_function(data, self._argument())  # creates the variables that are missing
            self._traced.append(function)
        kept = self._read(self._count_known())
        has_halved = False
        while True:
            result, error = None, None
            try:
                result = function(data, self._argument())
            except tf.errors.ResourceExhaustedError as raised:
                error = raised
            if not self._has_failed_anywhere(error):
                break
            self._restore(kept)
            self._size.halve(self._count(data), error)
            has_halved = True
        if has_halved:
            self._size.report()
            if "batch_norm" not in self._model._accum.whole_batch:
                warn_of_batch_norms(self._model)
            warn_of_unlike_losses(self._model)
        return result

    def _argument(self) -> Size:
        """Return the size as an argument. A tensor traces nothing anew, but XLA has to know it."""
        limit = self._size.limit
        return limit if _tf.is_compiled_by_xla(self._model) else tf.constant(limit)

    def _has_failed_anywhere(self, error: Optional[BaseException]) -> bool:
        """Whether memory ran out on any worker: all have to agree on a size."""
        if self._strategy.num_replicas_in_sync == _tf.count_local_replicas(self._strategy):
            return error is not None
        flag = tf.constant(0.0 if error is None else 1.0)
        flags = self._strategy.run(lambda: tf.distribute.get_replica_context().all_reduce(_replicas.SUM, flag))
        return float(self._local(flags)[0]) > 0.0

    def _count(self, data: Data) -> int:
        """The number of examples of the replica that has most of them."""
        replicas = range(_tf.count_local_replicas(self._strategy))

        def of(replica: int) -> Data:
            return tf.nest.map_structure(lambda leaf: self._local(leaf)[replica], data)

        return max(int(Batch(of(replica)).count) for replica in replicas)

    # ------------------------------------------------------------------------------------------------------------
    # State

    def _count_known(self) -> int:
        """Look for variables that a forward pass may change, one for each replica. Returns how many there are."""
        variables = _tf.state_of(self._model) + counters_of(self._model) + _tf.seeds_without_model()
        found = [part for var in variables for part in self._local(_tf.native(var))]
        known = {id(part) for part in self._known}
        self._known.extend({id(part): part for part in found if id(part) not in known}.values())
        return len(self._known)

    def _read_state(self, count: int) -> List[tf.Tensor]:
        return [tf.identity(part) for part in self._known[:count]]

    def _restore(self, kept: List[tf.Tensor]) -> None:
        self._count_known()
        for part, value in zip(self._known, kept):
            part.assign(value)
        for part in self._known[len(kept) :]:  # of metrics, which an attempt has created that failed
            part.assign(tf.zeros_like(part))

    # ------------------------------------------------------------------------------------------------------------
    # On each replica

    def _function(self, on_replica: Callable[..., Nested]) -> Callable[..., PerReplica]:
        """Return a function that runs `on_replica` on each replica, traced unless the model runs eagerly."""

        def function(*args: PerReplica) -> PerReplica:
            return self._strategy.run(on_replica, args=args)

        return _tf.compiled_unless_eager(self._model, function)

    def _on_gradients(self, data: Data, size: Size) -> Nested:
        step = self._steps[_replicas.replica_number()] = self._model._accum.steps.for_size(size)
        if self._model._accum.recorder is not None:
            self._model._accum.recorder.begin(data)
        return step.gradients(data)

    def _on_apply(self, totals: Nested) -> Logs:
        logs = self._steps[_replicas.replica_number()].apply(totals)
        if self._model._accum.recorder is not None:
            self._model._accum.recorder.end(logs)
        _tf.count_batch(self._model, "_train_counter", logs)
        return logs

    def _on_test(self, data: Data, size: Size) -> Logs:
        logs = self._model._accum.steps.for_size(size).test(data)
        _tf.count_batch(self._model, "_test_counter", logs)
        return logs

    def _on_predict(self, data: Data, size: Size) -> Nested:
        outputs = self._model._accum.steps.for_size(size).predict(data)
        _tf.count_batch(self._model, "_predict_counter", outputs)
        return outputs


def _each_step(iterator: Iterator[Data], steps: int, function: Callable[[Data], Nested]) -> Nested:
    """Call `function` on the next `steps` batches, or on as many as there are. Returns what the last call returned."""
    result = None
    batches = iter(iterator) if isinstance(iterator, list) else iterator  # Keras 3 predicts a list of batches
    for number in range(steps):
        try:
            data = _tf.without_optionals(next(batches))
        except (StopIteration, tf.errors.OutOfRangeError):
            if number == 0:
                raise
            break
        result = function(data)
    return result
