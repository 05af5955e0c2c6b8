"""A model that takes a whole batch and computes it in micro-batches, exactly (law L19).

In a train step, `model(x, training=True)` is replaced. It returns the outputs of the whole batch, and a tape that
differentiates them computes each micro-batch again. So the rest of the train step is that of the full batch: the loss,
metrics, regularization and sample weights are computed by Keras, or by the user's code, on all outputs at once.
"""

import contextlib
import inspect
from typing import Any, Callable, Dict, Iterator, List, Sequence

from accum import _tf
from accum._engine import _replicas
from accum._engine._batch import Batch
from accum._engine._micro_batches import MicroBatches
from accum._engine._segments import Ran, Segment, SegmentedFunction, State, is_differentiable, with_gradient
from accum._keras._batch_norm import batch_norms_of
from accum._keras._batch_norm_barrier import BatchNormBarrier, mask_of, refusal_of
from accum._keras._batch_step import Collector
from accum._keras._state_watch import StateWatch
from accum._tf import tf


class WholeBatchCall:
    """Stands in for the call of a model during one step, on one replica.

    Args:
      model: a `GradientAccumulateModel`.
      size: int or int32 scalar tensor, the largest number of examples in a micro-batch.
      barriers: of "loss" and "batch_norm".
      group_size: the number of replicas whose examples are normalised together.
      weight: function that returns the weight of this replica's batch, or None for 1.

    Attributes:
      losses: what layers have added as losses in the calls so far: list of scalars.
      is_used: whether the model has been called.
    """

    def __init__(
        self, model: Any, size: Any, barriers: Sequence[str], group_size: int, weight: Callable[[], Any]
    ) -> None:
        self._model = model
        self._size = size
        self._barriers = barriers
        self._group_size = group_size
        self._weight = weight
        self._is_within = False
        self.losses: List[tf.Tensor] = []
        self.is_used = False

    def __call__(self, call: Callable[..., Any], args: Sequence[Any], kwargs: Dict[str, Any]) -> Any:
        """Call the model.

        Args:
          call: the `__call__` of the model's class.
          args, kwargs: its arguments.
        """
        if self._is_within:
            return call(*args, **kwargs)
        self.is_used = True
        batch = Batch((tuple(args), dict(kwargs)))
        micro_batches = MicroBatches(
            batch, self._size, _tf.is_compiled_by_xla(self._model), _tf.must_not_be_in_loop(self._model)
        )
        if not self._model.built:
            with self._within():
                _build(call, batch)
        segments = self._segments(call, args, kwargs)
        state = State(*_state_of(self._model))
        segmented = SegmentedFunction(segments.segments, micro_batches, state, self._group_size, self._weight)
        watch = StateWatch.of_first_batch(self._model)
        with self._within():
            whole, losses = segmented.forward(segments.is_returned)
        if watch is not None:
            watch.warn_of_changes()
        for tensor in whole.values():
            _require_examples(tensor, batch.count)
        floats = [key for key, tensor in whole.items() if is_differentiable(tensor)]
        variables = [_tf.native(var) for var in self._model.trainable_variables]

        def backward(upstream: Sequence[tf.Tensor]) -> List[Any]:
            with self._within():
                grads = segmented.backward(dict(zip(floats, upstream)), upstream[len(floats) :])
            return [_in_dtype_of(var, grads.get(id(var))) for var in variables]

        inputs = [leaf for leaf in tf.nest.flatten((args, kwargs)) if tf.is_tensor(leaf) and is_differentiable(leaf)]
        linked = with_gradient([whole[key] for key in floats] + losses, variables, inputs, backward)
        whole.update(zip(floats, linked))
        self.losses = linked[len(floats) :]  # Keras keeps those of the latest call
        return segments.outputs(whole)

    @contextlib.contextmanager
    def _within(self) -> Iterator[None]:
        """Let the model compute a micro-batch in this context, as its class does."""
        before, self._is_within = self._is_within, True
        try:
            yield
        finally:
            self._is_within = before

    def _segments(self, call: Callable[..., Any], args: Sequence[Any], kwargs: Dict[str, Any]) -> Any:
        names = list(inspect.signature(type(self._model).call).parameters)[1:]
        training = dict(zip(names, args), **kwargs).get("training")
        has_barriers = "batch_norm" in self._barriers and any(
            layer.trainable for layer in _tf.batch_norms_in(self._model)
        )
        if has_barriers and tf.is_tensor(training):
            raise ValueError(
                "With batch normalisation over the whole batch, `training` must be a bool when the model is called. "
                f"Received: training={training!r}."
            )
        if has_barriers and training or any(map(_looks_across_examples, _tf.layers_of(self._model))):
            return GraphSegments(self._model, call, bool(has_barriers and training))
        return CallSegment(self._model, call)


def _require_examples(tensor: tf.Tensor, count: Any) -> None:
    """Raise, or let the graph raise, unless the first axis of an output is the batch."""
    message = (
        "The outputs of micro-batches are concatenated, so the first axis of each must be the batch: leave out "
        "`whole_batch`, or return one entry for each example."
    )
    known = tensor.shape[0] if tensor.shape.rank else None
    if tensor.shape.rank == 0 or (isinstance(count, int) and known not in (None, count)):
        raise ValueError(f"{message} Received: {tensor!r}.")
    if known is None or not isinstance(count, int):
        tf.debugging.assert_equal(tf.shape(tensor)[0], count, message=message)


def _build(call: Callable[..., Any], batch: Batch) -> None:
    """Let a model create its variables."""

    def first_call() -> None:
        args, kwargs = batch.part(0, 1)
        call(*args, **kwargs)

    tf.function(first_call).get_concrete_function()  # changes nothing, unlike a call


def _state_of(model: Any) -> Any:
    """Return (variables to rewind, variables to restore) of this replica, when a part of a model is run again."""
    rewound = _tf.seeds_of(model) + _tf.own_state_of(model) + _tf.generators_of(model)
    rewound += model.__dict__["_accum_noises"].counters
    restored = [var for layer in _tf.batch_norms_in(model) for var in (layer.moving_mean, layer.moving_variance)]
    restored += [var for metric in _tf.metrics_of_layers(model) for var in metric.variables]
    found: Dict[int, Any] = {}
    for var in rewound + restored:
        found.setdefault(id(_tf.native(var)), _replicas.local_variable(_tf.native(var)))
    distinct = {id(_tf.native(var)) for var in rewound}
    return [var for key, var in found.items() if key in distinct], [
        var for key, var in found.items() if key not in distinct
    ]


def _in_dtype_of(var: tf.Variable, grad: Any) -> Any:
    dtype = var.dtype.base_dtype
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(grad.values, dtype), grad.indices, grad.dense_shape)
    return None if grad is None else tf.cast(grad, dtype)


class _Watched:
    """What layers do in a segment beside computing their outputs."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._collector = Collector()
        self._repeatability = _tf.RepeatabilityWatch()
        self.losses: List[tf.Tensor] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Take over losses that layers add and moments of batch normalisation, and let random numbers repeat."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._model.__dict__["_accum_noises"].drawing())
            for layer in batch_norms_of(self._model):
                stack.enter_context(layer.accum_statistics.collected_by(self._collector))
            for layer in [self._model] + _tf.layers_of(self._model):
                stack.enter_context(_tf.own_methods(layer, add_loss=self._adding(layer.add_loss)))
            yield
        unrepeatable = self._repeatability.found(
            self._model, [var for state in _state_of(self._model) for var in state]
        )
        if unrepeatable:
            raise ValueError(
                "With `whole_batch`, each micro-batch is computed twice, and must be the same again. These draw random "
                "numbers that can't be repeated, or change variables of their own: use `tf.keras.layers.Dropout` and "
                "its kin, or leave out `whole_batch`. On Keras 3, give each layer a `keras.random.SeedGenerator`. "
                f"Received: {unrepeatable}."
            )

    def _adding(self, add_loss: Callable[..., Any]) -> Callable[..., Any]:
        def add(losses: Any, *args: Any, **kwargs: Any) -> None:
            for loss in tf.nest.flatten(losses):
                if callable(loss):
                    add_loss(loss, *args, **kwargs)
                else:
                    self.losses.append(tf.reduce_mean(loss))

        return add

    @property
    def moments(self) -> List[Any]:
        return [(moments, statistics.receive_whole) for statistics, moments in self._collector.moments]


def _with_masks(tensors: Dict[str, Any]) -> Dict[str, Any]:
    """Return tensors, and under keys of their own the masks that Keras has attached to them."""
    masks = {mask_of(key): getattr(tensor, "_keras_mask", None) for key, tensor in tensors.items()}
    return {**tensors, **{key: mask for key, mask in masks.items() if mask is not None}}


def _with_masks_attached(tensors: Dict[str, Any]) -> Dict[str, Any]:
    """Return the tensors that `_with_masks` was given."""
    masked = {key: tensors[mask_of(key)] for key in tensors if mask_of(key) in tensors}
    masks = {mask_of(key) for key in masked}
    found = {key: tf.identity(tensor) if key in masked else tensor for key, tensor in tensors.items()}
    for key, mask in masked.items():
        found[key]._keras_mask = mask
    return {key: tensor for key, tensor in found.items() if key not in masks}


class CallSegment:
    """A model as one segment: no barrier but its outputs.

    Args:
      model: a `GradientAccumulateModel`.
      call: the `__call__` of its class.
    """

    def __init__(self, model: Any, call: Callable[..., Any]) -> None:
        self._model = model
        self._call = call
        self._structure: Any = None
        variables = [_tf.native(var) for var in model.trainable_variables]
        own = [layer.name for layer in _tf.layers_of(model) if not _tf.is_of_keras(layer)]
        name = f"one of the layers {own}" if own else f"the model {model.name!r}"
        self.segments = [Segment(self._run, lambda key: False, [], [], variables, False, name)]

    def _run(self, part: Any, tensors: Any, statistics: Any) -> Ran:
        args, kwargs = part
        watched = _Watched(self._model)
        with watched.watching():
            outputs = self._call(*args, **kwargs)
        self._structure = outputs
        found = {f"output {number}": tensor for number, tensor in enumerate(tf.nest.flatten(outputs))}
        found = _with_masks(found)
        return Ran(found, found, watched.losses, watched.moments)

    def is_returned(self, key: str) -> bool:
        """Whether a tensor belongs to the outputs."""
        return True

    def outputs(self, whole: Dict[str, Any]) -> Any:
        """Return the outputs of the model, given the tensors of the whole batch."""
        tensors = _with_masks_attached(whole)
        flat = [tensors[f"output {number}"] for number, _ in enumerate(tf.nest.flatten(self._structure))]
        return tf.nest.pack_sequence_as(self._structure, flat)


class GraphSegments:
    """A functional or Sequential model in segments, between which lies batch normalisation.

    The level of a tensor is the largest number of barriers on a way to it, and a segment is a level. Batch
    normalisation layers side by side share a barrier.

    Args:
      model: a `GradientAccumulateModel`.
      call: the `__call__` of its class.
      in_training: whether batch normalisation is a barrier.

    Raises:
      ValueError: a batch normalisation layer can't be reached, or is of an unknown kind.
    """

    def __init__(self, model: Any, call: Callable[..., Any], in_training: bool) -> None:
        self._model = model
        self._call = call
        self._variables = [_tf.native(var) for var in model.trainable_variables]
        self._graph = _checked(model, _tf.layer_calls(model))
        level: Dict[str, int] = dict.fromkeys(self._graph.inputs, 0)
        self._barriers: Dict[int, BatchNormBarrier] = {}
        self._levels: List[int] = []
        for number, each in enumerate(self._graph.calls):
            depth = max([level[key] for key in each.inputs] or [0])
            self._levels.append(depth)
            if in_training and _is_barrier(each):
                self._barriers[number] = BatchNormBarrier(each.layer, each.inputs, number)
            level.update({key: depth + self._is_passed(number) for key in each.outputs})
        self._outputs = set(tf.nest.flatten(self._graph.outputs))
        self.segments: List[Segment] = []
        for depth in range(max(level.values()) + 1):
            self._add_segments(depth)

    def _add_segments(self, depth: int) -> None:
        """Add the segment of a level, and that of the layers after it that are called with the whole batch."""
        numbers = [number for number, level in enumerate(self._levels) if level == depth]
        own = [self._graph.calls[number] for number in numbers if not self._is_passed(number)]
        starts = [number for number in self._barriers if self._levels[number] == depth - 1]
        ends = [number for number in self._barriers if self._levels[number] == depth]
        self._add(own, starts, ends, False)
        whole = [number for number in numbers if _looks_across_examples(self._graph.calls[number].layer)]
        if whole:
            self._add([self._graph.calls[number] for number in whole], [], [], True)

    def _is_passed(self, number: int) -> bool:
        return number in self._barriers or _looks_across_examples(self._graph.calls[number].layer)

    def _add(self, calls: Sequence[Any], starts: Sequence[int], ends: Sequence[int], is_whole: bool) -> None:
        begun = [self._graph.calls[number] for number in starts]
        made = {key for call in list(calls) + begun for key in call.outputs}
        needed = {key for call in list(calls) + begun for key in call.inputs}
        needed |= {key for number in ends for key in self._graph.calls[number].inputs}
        needed -= made | set(self._graph.inputs)
        elsewhere = {key for call in self._graph.calls if call not in calls for key in call.inputs}
        given = sorted(made & (elsewhere | self._outputs))
        if not self.segments:  # a model may return its inputs
            given += sorted(self._outputs & set(self._graph.inputs))
        layers = {id(call.layer): call.layer for call in list(calls) + begun}.values()
        names = [layer.name for layer in layers if not _tf.is_of_keras(layer)] or [layer.name for layer in layers]
        normalized = [(self._barriers[number], self._graph.calls[number].outputs[0]) for number in starts]

        def run(part: Any, tensors: Any, statistics: Any) -> Ran:
            return self._run(part, tensors, statistics, calls, normalized, given)

        self.segments.append(
            Segment(
                run,
                lambda key: key in needed or any(key == mask_of(each) for each in needed),
                [self._barriers[number] for number in starts],
                [self._barriers[number] for number in ends],
                self._variables,
                is_whole,
                f"one of the layers {names}",
            )
        )

    def _run(self, part: Any, tensors: Any, statistics: Any, calls: Any, normalized: Any, given: Any) -> Ran:
        args, kwargs = part
        watched = _Watched(self._model)
        known: Dict[str, Any] = {}

        def run_calls(inputs: Any) -> Any:
            known.update(self._graph.begin(inputs))
            known.update(_with_masks_attached(tensors))
            for barrier, key in normalized:
                known[key] = barrier.normalized(known[barrier.key], statistics[barrier])
            for call in calls:
                known.update(zip(call.outputs, call.run(known)))
            return tf.nest.flatten(inputs)[0]

        with watched.watching(), _tf.running_as_graph(self._model, run_calls):
            self._call(*args, **kwargs)
        returned = _with_masks({key: known[key] for key in given})
        return Ran(returned, _with_masks(known), watched.losses, watched.moments)

    def is_returned(self, key: str) -> bool:
        """Whether a tensor belongs to the outputs."""
        return key in self._outputs or any(key == mask_of(each) for each in self._outputs)

    def outputs(self, whole: Dict[str, Any]) -> Any:
        """Return the outputs of the model, given the tensors of the whole batch."""
        tensors = _with_masks_attached(whole)
        return tf.nest.map_structure(lambda key: tensors[key], self._graph.outputs)


def _is_barrier(call: Any) -> bool:
    return isinstance(call.layer, _tf.BATCH_NORMS) and call.layer.trainable and call.in_training


def _looks_across_examples(layer: Any) -> bool:
    """Whether the user has declared that a layer must be called with the whole batch."""
    return bool(getattr(layer, "looks_across_examples", False))


def _checked(model: Any, layers: Any) -> Any:
    """Return the `LayerCalls` of a model, or raise unless all its batch normalisation layers can be barriers."""
    if layers is None:
        name = getattr(type(model), "_base", type(model)).__name__
        raise ValueError(
            "Batch normalization over the whole batch takes a model apart at these layers, which it can do with a "
            f"built functional or Sequential model alone: build {name!r} from `tf.keras.Input`, or pass "
            "`whole_batch='loss'` and use `accum.AccumBatchNormalization`, whose moving statistics are exact."
        )
    met = {id(call.layer) for call in layers.calls}
    for call in layers.calls:
        if not call.in_training and hasattr(call.layer, "trainable_variables"):
            met.update(id(layer) for layer in _tf.layers_of(call.layer))
    across = [layer for layer in _tf.layers_of(model) if _looks_across_examples(layer)]
    across += [layer for layer in _tf.batch_norms_in(model) if layer.trainable]
    hidden = [layer.name for layer in across if id(layer) not in met]
    if hidden:
        raise ValueError(
            "A layer that looks across examples, such as batch normalization, can't be computed over the whole batch "
            "within another layer, or within a model that has a `call` of its own: make it a part of a functional or "
            f"Sequential model. Received: {hidden}."
        )
    for call in layers.calls:
        reason = refusal_of(call.layer) if _is_barrier(call) else None
        if reason is not None:
            raise ValueError(
                f"The layer {call.layer.name!r} can't be computed over the whole batch: {reason}. Received: "
                f"{call.layer!r}."
            )
    return layers
