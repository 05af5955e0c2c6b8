"""Trace the call of a Keras model, with marks at the layers that look across examples (law L19)."""

import contextlib
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

from accum import _tf
from accum._engine import _replicas
from accum._engine._batch import Batch
from accum._engine._segments import Segments
from accum._engine._trace import Marks, Unrepeatable
from accum._engine._whole_call import segments_of
from accum._keras._batch_norm._barrier import BatchNormBarrier, refusal_of
from accum._keras._batch_norm._layer import batch_norms_of
from accum._keras._steps._optimizer_calls import Collector
from accum._tf import Leaf, Nested, Wait, tf


class TracedCall(NamedTuple):
    """A traced call.

    Attributes:
      segments: its `Segments`, whose outputs are those of the model, and after them what Keras has attached to these.
      structure: the nested structure of the outputs of the model, without tensors.
      attached: list of (which output, name of the attribute).
    """

    segments: Segments
    structure: Nested
    attached: List[Tuple[int, str]]

    def outputs(self, tensors: Sequence[tf.Tensor]) -> Nested:
        """Return the outputs of the model, given those of the segments."""
        count = len(tensors) - len(self.attached)
        outputs = list(tensors[:count])
        for index in {index for index, _ in self.attached}:
            outputs[index] = tf.identity(outputs[index])
        for (index, name), tensor in zip(self.attached, tensors[count:]):
            setattr(outputs[index], name, tensor)
        return tf.nest.pack_sequence_as(self.structure, outputs)


class Traces(dict):  # type: ignore[type-arg]
    """{what a call depends on: `TracedCall`} of one model, which copies and pickles of it leave out."""

    def __deepcopy__(self, memo: Dict[int, object]) -> "Traces":
        return Traces()

    def __reduce__(self) -> Tuple[type, Tuple[()]]:
        return Traces, ()


def traced_call(
    model: tf.keras.Model,
    call: Callable[..., Nested],
    batch: Batch,
    has_barriers: bool,
    differentiable: bool,
    recompute: bool,
) -> TracedCall:
    """Trace the call of a model on a micro-batch.

    Args:
      model: a `GradientAccumulateModel`.
      call: the `__call__` of its class.
      batch: its arguments, `(args, kwargs)`.
      has_barriers: whether batch normalisation is a barrier.
      differentiable: whether the gradient is needed.
      recompute: whether groups of segments are computed again.

    Raises:
      ValueError: a batch normalisation layer is of an unknown kind, or within a loop or conditional; an output is not a
        dense tensor; something can't be computed again.
    """
    seen: Dict[str, Any] = {}
    is_eager = tf.executing_eagerly()

    def function(tensors: Sequence[tf.Tensor], marks: Marks) -> List[tf.Tensor]:
        args, kwargs = batch.packed(tensors)
        with _marking(model, marks, has_barriers):
            outputs = _tf.graphs.called_as_in_fit(call, *args, **kwargs)
        flat = [_dense(tensor) for tensor in tf.nest.flatten(outputs)]
        attached = [
            (index, name, value)
            for index, one in enumerate(flat)
            for name, value in _tf.graph_parts.attached(one, is_eager)
        ]
        seen["structure"] = tf.nest.map_structure(lambda _: None, outputs)
        seen["attached"] = [(index, name) for index, name, _ in attached]
        return flat + [value for _, _, value in attached]

    variables = [_replicas.local_variable(_tf.variables.native(var)) for var in model.trainable_variables]
    segments = segments_of(
        function,
        batch,
        variables,
        recompute,
        has_barriers,
        differentiable,
        compiled=_tf.steps.is_compiled_by_xla(model),
    )
    return TracedCall(segments, seen["structure"], seen["attached"])


def _dense(tensor: Leaf) -> tf.Tensor:
    """Return an output of a model, or raise unless it is dense."""
    if not isinstance(tensor, tf.Tensor):
        raise ValueError(
            "With `whole_batch`, the outputs of a model must be dense tensors: make them so, or leave out "
            f"`whole_batch`. Received: {tensor!r}."
        )
    return tensor


@contextlib.contextmanager
def _marking(model: tf.keras.Model, marks: Marks, has_barriers: bool) -> Iterator[None]:
    """Let layers leave marks in this context, and hand over what they add beside their outputs."""
    collector = Collector()
    layers = _tf.models.layers_of(model)
    with contextlib.ExitStack() as stack:
        for layer in batch_norms_of(model):
            stack.enter_context(layer.accum_statistics.collected_by(collector))
        for layer in [model] + layers:
            stack.enter_context(_tf.steps.own_methods(layer, add_loss=_adding(layer.add_loss, marks)))
        for metric in _tf.steps.metrics_of_layers(model):
            stack.enter_context(_tf.steps.own_methods(metric, update_state=_updating(metric.update_state, marks)))
        for layer in _tf.batch_norm.batch_norms_in(model) if has_barriers else ():
            stack.enter_context(_tf.steps.own_methods(layer, call=_normalizing(layer, marks)))
        for layer in layers:
            if looks_across_examples(layer):
                stack.enter_context(_tf.steps.own_methods(layer, call=_at_once(layer, marks)))
        yield
    marks.moments.extend((moments, statistics.receive_whole) for statistics, moments in collector.moments)


def looks_across_examples(layer: tf.keras.layers.Layer) -> bool:
    """Whether the user has declared that a layer must be called with the whole batch."""
    return bool(getattr(layer, "looks_across_examples", False))


def _require_here(layer: tf.keras.layers.Layer, marks: Marks) -> None:
    """Raise unless a layer is called where a mark can be left."""
    if marks.is_here():
        return
    raise Unrepeatable(
        "An operation that looks across examples, such as batch normalization, can't be computed over the whole batch "
        "within a loop or conditional, whose body may run any number of times: take it out of there, or leave out "
        "`whole_batch`. "
        f"Received: {layer.name!r}."
    )


def _normalizing(layer: tf.keras.layers.Layer, marks: Marks) -> Callable[..., tf.Tensor]:
    """Return what stands in for the `call` of a batch normalisation layer."""
    own = layer.call

    @_tf.graphs.untouched_by_autograph
    def call(
        inputs: tf.Tensor, training: Union[bool, tf.Tensor, None] = None, mask: Optional[tf.Tensor] = None
    ) -> tf.Tensor:
        if training is None:
            training = _tf.graph_parts.learning_phase()
        if tf.is_tensor(training):
            raise ValueError(
                "With batch normalisation over the whole batch, `training` must be a bool when the model is called. "
                f"Received: training={training!r} for {layer.name!r}."
            )
        if not (training and layer.trainable):
            return _tf.batch_norm.call_batch_norm(own, inputs, training, mask)
        reason = refusal_of(layer)
        if reason is not None:
            raise ValueError(
                f"The layer {layer.name!r} can't be computed over the whole batch: {reason}. Received: {layer!r}."
            )
        _require_here(layer, marks)
        mask = getattr(inputs, "_keras_mask", None) if mask is None else mask
        return BatchNormBarrier(layer, len(marks.statistics)).call(inputs, mask, marks)

    return call


def _at_once(layer: tf.keras.layers.Layer, marks: Marks) -> Callable[..., Nested]:
    """Return what stands in for the `call` of a layer that is called with the whole batch."""
    own = layer.call

    @_tf.graphs.untouched_by_autograph
    def call(*args: object, **kwargs: object) -> Nested:
        _require_here(layer, marks)
        leaves = tf.nest.flatten((args, kwargs))
        indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0]
        structure: List[Nested] = []

        def whole(*tensors: tf.Tensor) -> List[tf.Tensor]:
            own_leaves = list(leaves)
            for index, tensor in zip(indices, tensors):
                own_leaves[index] = tensor
            own_args, own_kwargs = tf.nest.pack_sequence_as((args, kwargs), own_leaves)
            structure.append(own(*own_args, **own_kwargs))
            return tf.nest.flatten(structure[0])

        parts = marks.at_whole(whole, [leaves[index] for index in indices])
        return tf.nest.pack_sequence_as(structure[0], parts)

    return call


def _adding(add_loss: Callable[..., None], marks: Marks) -> Callable[..., None]:
    def add(losses: Nested, *args: object, **kwargs: object) -> None:
        for loss in tf.nest.flatten(losses):
            if callable(loss):
                add_loss(loss, *args, **kwargs)
            elif _tf.steps.sums_added_loss(loss):
                marks.losses.append((tf.reduce_sum(loss), True))
            else:
                marks.losses.append((tf.reduce_mean(loss), False))

    return add


def _updating(update_state: Callable[..., Wait], marks: Marks) -> Callable[..., Wait]:
    """Return a function that updates the mean of a layer's numbers, each one that of a micro-batch, with them."""

    def update(values: tf.Tensor, sample_weight: Nested = None) -> Wait:
        if sample_weight is None and getattr(values, "shape", None) == ():
            sample_weight = tf.cast(marks.share, values.dtype)
        return update_state(values, sample_weight=sample_weight)

    return update
