"""The segments of a model, between which lies what looks across examples (law L19)."""

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Sequence

from accum import _tf
from accum._engine._batch import Batch
from accum._engine._segments import AddedLoss, Ran, Segment, State, share_of
from accum._keras._batch_norm import batch_norms_of
from accum._keras._batch_norm_barrier import BatchNormBarrier, mask_of, refusal_of
from accum._keras._collector import Collector
from accum._tf import tf


class _Watched:
    """What layers do in a segment beside computing their outputs.

    Args:
      model: a `GradientAccumulateModel`.
      state: the variables that change when a part of it runs.
      share: scalar, the share of the micro-batch in the examples.
    """

    def __init__(self, model: Any, state: State, share: tf.Tensor) -> None:
        self._model = model
        self._state = state
        self._share = share
        self._collector = Collector()
        self._repeatability = _tf.RepeatabilityWatch()
        self.losses: List[AddedLoss] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Take over losses that layers add and moments of batch normalisation, and let random numbers repeat."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._model.__dict__["_accum_noises"].drawing())
            for layer in batch_norms_of(self._model):
                stack.enter_context(layer.accum_statistics.collected_by(self._collector))
            for layer in [self._model] + _tf.layers_of(self._model):
                stack.enter_context(_tf.own_methods(layer, add_loss=self._adding(layer.add_loss)))
            for metric in _tf.metrics_of_layers(self._model):
                update = self._updating(metric.update_state)
                stack.enter_context(_tf.own_methods(metric, update_state=update))
            yield
        unrepeatable = self._repeatability.found(self._model, self._state.variables)
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
                elif _tf.sums_added_loss(loss):
                    self.losses.append(AddedLoss(tf.reduce_sum(loss), is_sum=True))
                else:
                    self.losses.append(AddedLoss(tf.reduce_mean(loss), is_sum=False))

        return add

    def _updating(self, update_state: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that updates the mean of a layer's numbers, each one that of a micro-batch, with them."""

        def update(values: Any, sample_weight: Any = None) -> Any:
            if sample_weight is None and getattr(values, "shape", None) == ():
                sample_weight = tf.cast(self._share, values.dtype)
            return update_state(values, sample_weight=sample_weight)

        return update

    @property
    def moments(self) -> List[Any]:
        return [(moments, statistics.receive_whole) for statistics, moments in self._collector.moments]


def _with_masks(tensors: Dict[str, Any]) -> Dict[str, Any]:
    """Return tensors, and under keys of their own the masks that Keras has attached to them."""
    masks = {mask_of(key): getattr(tensor, "_keras_mask", None) for key, tensor in tensors.items()}
    return {**tensors, **{key: mask for key, mask in masks.items() if mask is not None}}


def _dense(tensors: Dict[str, Any]) -> Dict[str, Any]:
    """Return tensors that are kept for later segments, or raise unless they can be."""
    for tensor in tensors.values():
        if not isinstance(tensor, tf.Tensor):
            raise ValueError(
                "With `whole_batch`, the outputs of a model, and what passes from before a batch normalisation layer "
                "to behind it, must be dense tensors: make them so, or leave out `whole_batch`. Received: "
                f"{tensor!r}."
            )
    return tensors


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
      state: the variables that change when a part of it runs.
      batch: the arguments of the call.
    """

    def __init__(self, model: Any, call: Callable[..., Any], state: State, batch: Batch) -> None:
        self._model = model
        self._call = call
        self._state = state
        self._batch = batch
        self._structure: Any = None
        variables = [_tf.native(var) for var in model.trainable_variables]
        own = [layer.name for layer in _tf.layers_of(model) if not _tf.is_of_keras(layer)]
        name = f"one of the layers {own}" if own else f"the model {model.name!r}"
        self.segments = [Segment(self._run, lambda key: False, [], [], variables, False, name)]

    def _run(self, part: Any, tensors: Any, statistics: Any) -> Ran:
        args, kwargs = part
        watched = _Watched(self._model, self._state, share_of(self._batch, part))
        with watched.watching():
            outputs = self._call(*args, **kwargs)
        self._structure = outputs
        outputs = _dense({f"output {number}": tensor for number, tensor in enumerate(tf.nest.flatten(outputs))})
        found = _with_masks(outputs)
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
      state: the variables that change when a part of it runs.
      batch: the arguments of the call.
      has_barriers: whether batch normalisation is a barrier.
      training: whether the model is called in training.

    Raises:
      ValueError: a batch normalisation layer can't be reached, or is of an unknown kind.
    """

    def __init__(
        self, model: Any, call: Callable[..., Any], state: State, batch: Batch, has_barriers: bool, training: bool
    ) -> None:
        self._model = model
        self._call = call
        self._state = state
        self._batch = batch
        self._variables = [_tf.native(var) for var in model.trainable_variables]
        self._graph = _checked(model, _tf.layer_calls(model), training)
        level: Dict[str, int] = dict.fromkeys(self._graph.inputs, 0)
        self._barriers: Dict[int, BatchNormBarrier] = {}
        self._levels: List[int] = []
        for number, each in enumerate(self._graph.calls):
            depth = max([level[key] for key in each.inputs] or [0])
            self._levels.append(depth)
            if has_barriers and _is_barrier(each, training):
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
        whole = [number for number in numbers if looks_across_examples(self._graph.calls[number].layer)]
        if whole:
            self._add([self._graph.calls[number] for number in whole], [], [], True)

    def _is_passed(self, number: int) -> bool:
        return number in self._barriers or looks_across_examples(self._graph.calls[number].layer)

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
        watched = _Watched(self._model, self._state, share_of(self._batch, part))
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
        returned = _with_masks(_dense({key: known[key] for key in given}))
        return Ran(returned, _with_masks(known), watched.losses, watched.moments)

    def is_returned(self, key: str) -> bool:
        """Whether a tensor belongs to the outputs."""
        return key in self._outputs or any(key == mask_of(each) for each in self._outputs)

    def outputs(self, whole: Dict[str, Any]) -> Any:
        """Return the outputs of the model, given the tensors of the whole batch."""
        tensors = _with_masks_attached(whole)
        return tf.nest.map_structure(lambda key: tensors[key], self._graph.outputs)


def _is_barrier(call: Any, training: bool) -> bool:
    is_active = training if call.training is None else call.training
    return is_active and isinstance(call.layer, _tf.BATCH_NORMS) and call.layer.trainable


def always_normalizes(model: Any) -> bool:
    """Whether a model was built with batch normalisation that is in training even in evaluation and prediction."""
    graph = _tf.layer_calls(model)
    return graph is not None and any(call.training and _is_barrier(call, True) for call in graph.calls)


def looks_across_examples(layer: Any) -> bool:
    """Whether the user has declared that a layer must be called with the whole batch."""
    return bool(getattr(layer, "looks_across_examples", False))


def _checked(model: Any, layers: Any, training: bool) -> Any:
    """Return the `LayerCalls` of a model, or raise unless all its batch normalisation layers can be barriers."""
    if layers is None:
        name = getattr(type(model), "_base", type(model)).__name__
        raise ValueError(
            "Batch normalization over the whole batch, and layers that look across examples, take a model apart there, "
            f"which only works with a built functional or Sequential model: build {name!r} from `tf.keras.Input`, or "
            "pass `whole_batch='loss'` and use `accum.AccumBatchNormalization`, whose moving statistics are exact."
        )
    met = {id(call.layer) for call in layers.calls}
    for call in layers.calls:
        if call.training is False and hasattr(call.layer, "trainable_variables"):
            met.update(id(layer) for layer in _tf.layers_of(call.layer))
    across = [layer for layer in _tf.layers_of(model) if looks_across_examples(layer)]
    across += [layer for layer in _tf.batch_norms_in(model) if layer.trainable]
    hidden = [layer.name for layer in across if id(layer) not in met]
    if hidden:
        raise ValueError(
            "A layer that looks across examples, such as batch normalization, can't be computed over the whole batch "
            "within another layer, or within a model that has a `call` of its own: make it a part of a functional or "
            f"Sequential model. Received: {hidden}."
        )
    for call in layers.calls:
        reason = refusal_of(call.layer) if _is_barrier(call, training) else None
        if reason is not None:
            raise ValueError(
                f"The layer {call.layer.name!r} can't be computed over the whole batch: {reason}. Received: "
                f"{call.layer!r}."
            )
    return layers
