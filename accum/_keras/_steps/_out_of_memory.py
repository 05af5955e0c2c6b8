"""Steps whose micro-batches fit into memory (law L18, "auto").

Before the first one, the memory of few examples is measured, and the largest size chosen that is expected to fit:

    for a few sizes:
        gradients(the first size + 1 examples, size)     # a remainder of one, and a micro-batch in the loop
        note the peak of memory
    restore the variables that a forward pass changes

Where memory cannot be measured, or runs out all the same, the same batch is tried again with smaller micro-batches:

    batch = next(iterator)            # outside of the traced functions, so that it can be tried again
    kept = the variables that a step changes before its first update
    logs = step(batch, size)          # memory runs out: restore what was kept, halve the size, try again

The loop over attempts is in Python, because a graph can't catch an error. Between the gradients and the first update
there is a gate: it records that weights may have changed, after which nothing can be tried again, and it ends the
trials in which memory is measured.

Where there are several workers, gradients and update are two functions: memory may run out on one of them, so all have
to agree before they update.
"""

import contextlib
import math
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from accum import _check, _tf
from accum._engine import _replicas
from accum._engine._batch import Batch, Size
from accum._keras._diagnosis import _rules
from accum._keras._model._size_in_use import WHOLE_BATCH
from accum._keras._optimizer._internals import internals_of
from accum._keras._optimizer._wrapper import accumulating_optimizers, listeners_of
from accum._keras._step_listener import end_batch
from accum._keras._steps._batch_draws import counters_of
from accum._keras._steps._measured_size import REACH, Peaks, chosen_size, evened, next_size
from accum._keras._steps._model_steps import create_variables_ahead
from accum._keras._steps._split_step import SplitStep
from accum._keras._steps._update_gate import END_OF_TRIAL, EndOfTrial, GateVariables, UpdateGate
from accum._tf import Data, Gauge, Leaf, Logs, Nested, PerReplica, tf

MIB = 2**20

IN_UPDATE = (
    "Memory ran out while the optimizer made its step, or after it, so some weights may be updated and others not: "
    "restore a checkpoint. Splitting the batch further does not help an update: the optimizer's variables and one "
    "gradient have to fit in addition to the weights. A train step that computes more gradients after an update needs "
    "a number as `micro_batch_size`. [accum: out-of-memory]"
)

LOGS, SUMS = "logs", "sums"

State = List[Tuple[tf.Tensor, tf.Tensor]]
"""(The handle of a variable, its value) for each."""


class Trial(NamedTuple):
    """A batch whose gradients can be computed without an update.

    Attributes:
      examples: the number of examples in the batch; of the replica that has most of them.
      compute: function of the size of micro-batches, and of the number of examples, the first of the batch. Returns
        whether memory sufficed.
    """

    examples: int
    compute: Callable[[int, int], bool]


class Prepared(NamedTuple):
    """What is known before the first measurement, of each kind of memory that can be measured.

    Attributes:
      gauges: what measures it.
      bases: bytes in use before the first gradients.
      reserved: bytes to reserve for the graph of the optimizer's first step.
    """

    gauges: List[Gauge]
    bases: List[int]
    reserved: List[int]


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
        self._gates: Dict[int, UpdateGate] = {}  # replica -> that of its latest trace, if gradients and update are one
        self._train = self._function(self._on_train)
        self._apply = self._function(self._on_apply)
        self._test = self._function(self._on_test)
        self._predict = self._function(self._on_predict)
        self._gathered = tf.function(
            lambda number: self._strategy.run(_number_of_each_replica, args=(number,)), autograph=False
        )
        # Function, traced for a kind of data -> (handles of the variables that it may change before the gate, a reader)
        self._changing: Dict[object, Tuple[List[tf.Tensor], Callable[[], List[tf.Tensor]]]] = {}
        self._watched: List[Gauge] = []  # until the first step after the measurement
        if model._accum.gate_variables is None:
            model._accum.gate_variables = GateVariables()
        self._variables: GateVariables = model._accum.gate_variables

    def train_function(self, iterator: Iterator[Data]) -> Logs:
        return _each_step(iterator, _tf.steps.steps_per_execution(self._model), self._train_on)

    def test_function(self, iterator: Iterator[Data]) -> Logs:
        return _each_step(iterator, _tf.steps.steps_per_execution(self._model), self._evaluate)

    def predict_function(self, iterator: Iterator[Data]) -> Nested:
        outputs: List[Nested] = []
        _each_step(
            iterator, _tf.steps.steps_per_execution(self._model), lambda data: outputs.append(self._outputs(data))
        )
        return tf.nest.map_structure(lambda *parts: tf.concat(parts, axis=0), *outputs)

    # ------------------------------------------------------------------------------------------------------------

    def _train_on(self, data: Data) -> Logs:
        if not self._changing:
            create_variables_ahead(self._model, data)
        self._measure_once(data)
        result = self._retrying(self._train, data)
        if SUMS in result:
            with _naming_lack_of_memory():
                result = {LOGS: self._apply(result[SUMS])}
        self._warn_of_exceeded_limit()
        return self._reduced(result[LOGS])

    def _warn_of_exceeded_limit(self) -> None:
        """Warn if the first step after the measurement has needed more memory than it may."""
        for gauge in self._watched:
            if gauge.peak() > gauge.limit:
                _check.warn(
                    f"The first step needed {gauge.peak() / MIB:,.0f} MiB of {gauge.name}, but only "
                    f"{gauge.limit / MIB:,.0f} MiB may be used (`memory_limit`). The optimizer's step can't be "
                    "measured in advance: pass a lower `memory_limit`, or set `micro_batch_size`. [accum: auto-size]"
                )
        self._watched = []

    def _evaluate(self, data: Data) -> Logs:
        return self._reduced(self._retrying(self._test, data))

    def _outputs(self, data: Data) -> Nested:
        outputs = self._retrying(self._predict, data)
        return tf.nest.map_structure(lambda part: tf.concat(self._local(part), axis=0), outputs)

    def _reduced(self, logs: PerReplica) -> Logs:
        """Return the logs of all replicas as Keras does. Metrics are the same on all, and no longer `PerReplica`."""
        return tf.nest.map_structure(
            lambda value: value if tf.is_tensor(value) else _tf.steps.reduced_logs(self._model, self._local(value)),
            logs,
        )

    def _local(self, value: PerReplica) -> Sequence[Leaf]:
        return self._strategy.experimental_local_results(value)

    def _retrying(self, function: Callable[..., PerReplica], data: Data) -> PerReplica:
        """Call `function(data, size)` with smaller and smaller sizes until memory suffices."""
        kept = self._state(function, data)
        has_halved = False
        while True:
            result, error = None, None
            self._set_gates(is_trial=False)
            try:
                result = function(data, *self._arguments(self._size.limit))
            except tf.errors.ResourceExhaustedError as raised:
                error = raised
            if not self._has_failed_anywhere(error):
                break
            if self._has_updated():
                raise RuntimeError(IN_UPDATE) from error
            self._restore(kept)
            self._size.halve(self._largest(self._count(data)), error)
            has_halved = True
        if has_halved:
            self._size.report()
            _rules.apply('"auto" has begun to split', _rules.Seen(self._model, is_split=True))
        return result

    def _arguments(
        self, size: int, examples: int = WHOLE_BATCH, is_trial: bool = False
    ) -> Tuple[Size, Optional[Size], bool]:
        """Return as arguments the size, the number of a batch's first examples, None for all, and whether to end early.

        Tensors trace nothing anew, but XLA has to know the numbers.
        """
        if _tf.steps.is_compiled_by_xla(self._model):
            return size, None if examples == WHOLE_BATCH else examples, is_trial
        return tf.constant(size), tf.constant(examples), False

    def _set_gates(self, is_trial: bool) -> None:
        for part in self._local(self._variables.updates):
            part.assign(0.0)
        for part in self._local(self._variables.is_trial):
            part.assign(float(is_trial))

    def _has_updated(self) -> bool:
        return any(float(part) for part in self._local(self._variables.updates))

    def _has_failed_anywhere(self, error: Optional[BaseException]) -> bool:
        """Whether memory ran out on any worker: all have to agree on a size."""
        if self._is_alone():
            return error is not None
        return max(self._numbers_of_all(int(error is not None))) > 0

    def _can_agree(self) -> bool:
        """Whether workers can agree on a size: TensorFlow 2.2 and 2.3 give the replicas of each the same numbers."""
        return self._is_alone() or not _tf.strategies.has_replicas_of_one_number(self._strategy)

    def _is_alone(self) -> bool:
        """Whether all replicas are those of this process."""
        return not _tf.strategies.has_several_workers(self._strategy)

    def _is_possible_everywhere(self, is_possible: bool) -> bool:
        """Whether something is possible on all workers."""
        return self._smallest(int(is_possible)) > 0

    def _smallest(self, number: int) -> int:
        """Return the smallest of the numbers of all workers, which are at most `WHOLE_BATCH`."""
        if self._is_alone():
            return number
        return min(*self._numbers_of_all(number), WHOLE_BATCH)  # which is no float32

    def _numbers_of_all(self, number: int) -> List[int]:
        """Return the numbers of all workers, once for each of its replicas, or sums if these have the same numbers."""
        return [int(one) for one in self._local(self._gathered(tf.constant(float(number))))[0]]

    def _largest(self, number: int) -> int:
        """Return the largest of the numbers of all workers that can agree, otherwise the number itself."""
        return -self._smallest(-number) if self._can_agree() else number

    def _count(self, data: Data) -> int:
        """The number of examples of the replica that has most of them."""
        replicas = range(_tf.strategies.count_local_replicas(self._strategy))

        def of(replica: int) -> Data:
            return tf.nest.map_structure(lambda leaf: self._local(leaf)[replica], data)

        return max(int(Batch(of(replica)).count) for replica in replicas)

    # ------------------------------------------------------------------------------------------------------------
    # The size that fits

    def _measure_once(self, data: Data) -> None:
        """Choose the size of micro-batches by measuring small ones, before the first batch and any larger one.

        Whether workers go on depends only on what all of them have agreed on: otherwise some would wait forever.
        """
        count = self._count(data)
        # Eagerly, Python code of the user's would run more often, and its random numbers can't be set back.
        if self._model.run_eagerly or not self._can_agree():
            return
        if not self._size.is_to_be_measured(count, self._is_alone()):
            return
        self._size.measured = max(count, 1)
        gauges = _tf.memory.gauges(self._size.memory_limit)
        if not self._is_possible_everywhere(bool(gauges) and count > 1):
            return
        kept = self._state(self._train, data)
        try:
            ready = self._prepared(data, gauges)
            peaks = None if ready is None else self._peaks(data, count, ready)
        except (tf.errors.OpError, ValueError) as error:  # such as of a loss that needs several examples
            peaks = None
            _check.warn(
                "Memory could not be measured with a part of a batch, so `micro_batch_size` stays 'auto', which halves "
                f"it whenever memory runs out. Received: {error!r}. [accum: auto-size]"
            )
        finally:
            self._restore(kept)
        if peaks is None or ready is None:
            return
        self._watched = list(ready.gauges)
        begun(self._watched)
        own = chosen_size(peaks, count)
        size = self._smallest(WHOLE_BATCH if own >= count else own)
        if size == WHOLE_BATCH:
            return
        text = described(peaks, ready.gauges, count) if own < count else "memory of another worker is short"
        self._size.choose(evened(size, self._largest(count)), text)
        _rules.apply('"auto" has begun to split', _rules.Seen(self._model, is_split=True))

    def _prepared(self, data: Data, gauges: Sequence[Gauge]) -> Optional[Prepared]:
        """Let everything be allocated that is so only once. None if that fails, or no gauge can be used."""
        self._create_slots()
        bases = [gauge.now() for gauge in gauges]
        earlier = begun(gauges)
        result = self._attempt(data, 1, 2)
        if result is None:
            return None
        usable = [not gauge.is_blind(peak) for gauge, peak in zip(gauges, earlier)]
        if not self._is_possible_everywhere(any(usable)):
            return None
        gauges = [gauge for gauge, is_usable in zip(gauges, usable) if is_usable]
        bases = [base for base, is_usable in zip(bases, usable) if is_usable]
        reserved = self._reserved(result[SUMS], gauges) if SUMS in result else [0 for _ in gauges]
        return Prepared(gauges, bases, reserved)

    def _bytes_of_weights(self) -> int:
        weights = [_tf.variables.native(var) for var in self._model.trainable_variables]
        return sum(var.shape.num_elements() * var.dtype.size for var in weights)

    def _peaks(self, data: Data, count: int, ready: Prepared) -> Optional[List[Peaks]]:
        """Measure micro-batches of more and more examples. Returns the peaks of each gauge, for a batch of `count`.

        None if memory runs out although it should suffice: then only halving finds a size.
        """
        gauges, bases, reserved = ready
        least, of_examples = 0, [0.0 for _ in gauges]
        if self._model._accum.whole_batch:  # then tensors of the whole batch need memory too
            least = max(2, math.ceil(count / REACH))
            few, more = (self._measured(data, 1, examples, gauges) for examples in (least // 2, least))
            if few is None or more is None:
                return None
            of_examples = [max(0, most - fewer) / (least - least // 2) for fewer, most in zip(few, more)]
        sums = self._bytes_of_weights()
        peaks = [
            Peaks(base + sums + reserve + int(slope * count), gauge.limit)
            for gauge, base, reserve, slope in zip(gauges, bases, reserved, of_examples)
        ]
        size = 1
        while 0 < size < WHOLE_BATCH:
            examples = max(least, size + 1)  # a remainder of one, and the loop, in which a sum is kept already
            measured = self._measured(data, size, examples, gauges)
            if measured is None:
                return None
            for own, gauge, peak, base, reserve, slope in zip(peaks, gauges, measured, bases, reserved, of_examples):
                spread = int(gauge.spread * (peak - base + slope * (count - examples)))
                own.add(size, base + spread + reserve)
            fits = all(own.fits(count) for own in peaks)  # here; another worker may have to measure more
            size = self._smallest(WHOLE_BATCH if fits else next_size(peaks, count))
        return peaks

    def _create_slots(self) -> None:
        """Create the variables of the optimizers, which need memory beside any micro-batch."""
        optimizers = self._model._accum.optimizers
        if len(optimizers) == 1:  # otherwise, only the train step knows which has which variables
            with self._strategy.scope():
                _tf.optimizers.build_with_loss_scale(optimizers[0], self._model.trainable_variables)

    def _reserved(self, totals: Nested, gauges: Sequence[Gauge]) -> List[int]:
        """Trace the optimizer's step, and return the bytes to reserve for its first run.

        TensorFlow optimizes and prepares the graph then, which needs about twice as much as the trace.
        """
        before = [gauge.now() for gauge in gauges]
        traced: Any = self._apply
        if len(self._model._accum.optimizers) == 1:
            traced.get_concrete_function(totals)
        return [2 * max(0, gauge.now() - earlier) for gauge, earlier in zip(gauges, before)]

    def _measured(self, data: Data, size: int, examples: int, gauges: Sequence[Gauge]) -> Optional[List[int]]:
        """Compute the gradients of the first examples. Returns the peak of each gauge, None if memory runs out."""
        if _tf.steps.is_compiled_by_xla(self._model) and self._attempt(data, size, examples) is None:
            return None  # this has compiled it
        begun(gauges)
        if self._attempt(data, size, examples) is None:
            return None
        return [gauge.peak() for gauge in gauges]

    @contextlib.contextmanager
    def trying(self, data: Data) -> Iterator["Trial"]:
        """Let the gradients of a batch be computed in this context, which sets the model's state back in the end."""
        kept = self._state(self._train, data)
        self._create_slots()

        def compute(size: int, examples: int) -> bool:
            return self._attempt(data, size, examples) is not None

        try:
            yield Trial(self._count(data), compute)
        finally:
            self._restore(kept)

    def _attempt(self, data: Data, size: int, examples: int) -> Nested:
        """Compute the gradients of the first examples of a batch. Returns None if memory runs out.

        An error of another kind is raised, but where it is not, other workers return None.
        """
        result: Nested = None
        error: Optional[Exception] = None
        self._set_gates(is_trial=True)
        try:
            result = self._train(data, *self._arguments(size, examples, is_trial=True))
        except (tf.errors.OpError, ValueError) as raised:
            lacks_memory = isinstance(raised, tf.errors.ResourceExhaustedError)
            error = raised if lacks_memory or END_OF_TRIAL not in str(raised) else None
            result = {LOGS: ()} if error is None else None
        if self._has_updated():
            raise RuntimeError(IN_UPDATE) from error
        has_failed = self._has_failed_anywhere(error)
        if error is not None and not isinstance(error, tf.errors.ResourceExhaustedError):
            raise error
        return None if has_failed else result

    # ------------------------------------------------------------------------------------------------------------
    # State

    def _state(self, function: Callable[..., PerReplica], data: Data) -> State:
        """Return the values of all variables that a function may change before the gate.

        They are found in its graph, wherever they live; eagerly, among those of the model, its layers and metrics.
        """
        if not hasattr(function, "get_concrete_function"):
            handles = self._eager_handles()
            return list(zip(handles, _read(handles)))
        self._gates.clear()
        traced = function.get_concrete_function(data, *self._arguments(self._size.limit))  # type: ignore[attr-defined]
        if traced not in self._changing:
            handles = self._handles_of(traced)
            # Not by XLA, which can't read the variables of several devices.
            self._changing[traced] = handles, tf.function(lambda: _read(handles), autograph=False)
            self._warn_of_later_updates()
        handles, read = self._changing[traced]
        return list(zip(handles, read() if handles else ()))

    def _handles_of(self, traced: Any) -> List[tf.Tensor]:
        """Return the handles of the variables that a traced function may change before its first update."""
        changed = _tf.op_walks.changed_outside(traced.graph)
        spared = {id(part.handle) for var in self._behind_gates() for part in self._local(_tf.variables.native(var))}
        spared |= set().union(*(gate.updated for gate in self._gates.values()))
        outside = [outer for outer, _ in _tf.op_walks.captures_of(traced.graph) if id(outer) in changed]
        is_variable = _tf.graph_parts.spec_of_variable
        return [handle for handle in outside if id(handle) not in spared and is_variable(handle) is not None]

    def _behind_gates(self) -> List[tf.Variable]:
        """Return the variables that change only in the step of an optimizer, and those of the gates."""
        optimizers = accumulating_optimizers(self._model) if self._model._accum.optimizers else []
        own = [self._variables.updates, self._variables.is_trial]
        return own + [var for optimizer in optimizers for var in internals_of(optimizer).variables()]

    def _warn_of_later_updates(self) -> None:
        if any(gate.passes > 1 for gate in self._gates.values()) and self._model._accum.is_first_time("later updates"):
            _check.warn(
                'The train step updates several times, and `micro_batch_size="auto"` measures what comes before the '
                "first update. If memory runs out later, pass a number as `micro_batch_size`. [accum: auto-size]",
            )

    def _eager_handles(self) -> List[tf.Tensor]:
        model = self._model
        variables = list(model.variables) + _tf.steps.state_of(model) + counters_of(model)
        variables += _tf.steps.seeds_without_model()
        parts = [part for var in variables for part in self._local(_tf.variables.native(var))]
        return list({id(part.handle): part.handle for part in parts}.values())

    def _restore(self, kept: State) -> None:
        for handle, value in kept:
            _tf.graph_parts.assign_handle(handle, value)
        if not self._model.run_eagerly:
            return
        known = {id(handle) for handle, _ in kept}
        variables = [var for metric in self._model.metrics for var in metric.variables]
        for part in [part for var in variables for part in self._local(_tf.variables.native(var))]:
            if id(part.handle) not in known:  # of a metric that the attempt has created
                part.assign(tf.zeros_like(part))

    # ------------------------------------------------------------------------------------------------------------
    # On each replica

    def _function(self, on_replica: Callable[..., Nested]) -> Callable[..., PerReplica]:
        """Return a function that runs `on_replica` on each replica, traced unless the model runs eagerly."""

        def function(*args: PerReplica) -> PerReplica:
            return self._strategy.run(on_replica, args=args)

        return _tf.steps.compiled_unless_eager(self._model, function)

    @_tf.graphs.run_as_written
    def _on_train(self, data: Data, size: Size, examples: Optional[Size], is_trial: bool) -> Nested:
        """Return {LOGS: those of a step}, or if gradients and update are two functions, {SUMS: what `apply` takes}."""
        data, replica, own = _first_examples(data, examples), _replicas.replica_number(), self._model._accum
        step = self._steps[replica] = own.steps.for_size(size, "train_step", data)
        for listener in [] if is_trial else listeners_of(self._model):
            listener.begin_batch(data)
        if not self._is_alone():
            return {SUMS: step.gradients(data)}
        is_compiled = _tf.steps.is_compiled_by_xla(self._model)
        gate = self._gates[replica] = UpdateGate(None if is_compiled else self._variables, is_trial)
        try:
            return {LOGS: self._ended(step.train(data, gate))}
        except EndOfTrial as end:
            return {LOGS: end.grads}

    @_tf.graphs.run_as_written
    def _on_apply(self, totals: Nested) -> Logs:
        return self._ended(self._steps[_replicas.replica_number()].apply(totals))

    def _ended(self, logs: Logs) -> Logs:
        logs = end_batch(listeners_of(self._model), logs)
        _tf.steps.count_batch(self._model, "_train_counter", logs)
        return logs

    @_tf.graphs.run_as_written
    def _on_test(self, data: Data, size: Size, *_: object) -> Logs:
        logs = self._model._accum.steps.for_size(size, "test_step", data).test(data)
        _tf.steps.count_batch(self._model, "_test_counter", logs)
        return logs

    @_tf.graphs.run_as_written
    def _on_predict(self, data: Data, size: Size, *_: object) -> Nested:
        outputs = self._model._accum.steps.for_size(size, "predict_step", data).predict(data)
        _tf.steps.count_batch(self._model, "_predict_counter", outputs)
        return outputs


def _number_of_each_replica(number: tf.Tensor) -> tf.Tensor:
    """Return the numbers of all replicas, given that of this one."""
    own = tf.one_hot(_replicas.number_among_all(), _replicas.count(), on_value=number)
    return tf.distribute.get_replica_context().all_reduce(_replicas.SUM, own)


def _read(handles: Sequence[tf.Tensor]) -> List[tf.Tensor]:
    """Return the values of variables, given their handles."""
    specs = map(_tf.graph_parts.spec_of_variable, handles)
    dtypes = [spec.dtype for spec in specs if spec is not None]
    return [tf.identity(_tf.graph_parts.read_handle(*pair)) for pair in zip(handles, dtypes)]


def begun(gauges: Sequence[Gauge]) -> List[int]:
    """Begin to measure. Returns the peaks so far, in bytes."""
    for gauge in gauges:
        gauge.begin()
    return [gauge.peak() for gauge in gauges]


def described(peaks: Sequence[Peaks], gauges: Sequence[Gauge], count: int) -> str:
    """Return what was measured, in words, by the gauge whose limit a whole batch would exceed most."""
    own, gauge = max(zip(peaks, gauges), key=lambda pair: pair[0].estimate(count) / pair[0].limit)
    parts = ", ".join(f"{point.peak / MIB:,.0f} MiB with {point.size}" for point in own.points)
    unlike = "" if own.expected(1) <= own.limit else ". One example at a time may not fit either"
    return (
        f"{count} examples at once would need about {own.estimate(count) / MIB:,.0f} MiB of {gauge.name}, but only "
        f"{own.limit / MIB:,.0f} MiB may be used (`memory_limit`){unlike}. Measured: {parts}"
    )


@_tf.graphs.untouched_by_autograph
def _first_examples(data: Data, examples: Optional[Size]) -> Data:
    """Return the first examples of a replica's part of a batch; None: all of them."""
    if examples is None:
        return data
    batch = Batch(data)
    is_known = isinstance(examples, int) and isinstance(batch.count, int)
    return batch.part(0, min(examples, batch.count) if is_known else tf.minimum(examples, batch.count))


@contextlib.contextmanager
def _naming_lack_of_memory() -> Iterator[None]:
    """Say in words what it means if the optimizer runs out of memory in this context."""
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        raise RuntimeError(IN_UPDATE) from error


def _each_step(iterator: Iterator[Data], steps: int, function: Callable[[Data], Nested]) -> Nested:
    """Call `function` on the next `steps` batches, or on as many as there are. Returns what the last call returned."""
    result = None
    batches = iter(iterator) if isinstance(iterator, list) else iterator  # Keras 3 predicts a list of batches
    for number in range(steps):
        try:
            data = _tf.steps.without_optionals(next(batches))
        except (StopIteration, tf.errors.OutOfRangeError):
            if number == 0:
                raise
            break
        result = function(data)
    return result
