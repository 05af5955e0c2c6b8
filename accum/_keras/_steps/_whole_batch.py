"""A step of a model that holds a whole batch, whose train step sees all of it at once (law L19).

In a train step, `model(x, training=True)` is replaced, and so is any other call of a layer with weights. It returns the
outputs of the whole batch, and a tape that differentiates them computes each micro-batch again. So the rest of the
train step is that of the full batch: losses, metrics, regularization, further networks, clipping and any number of
updates are computed by Keras, or by the user's code, on all outputs at once.

A call is traced once, with marks at the layers that look across examples.
"""

import contextlib
import inspect
import re
import weakref
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

from accum import _check, _tf
from accum._engine import _replicas
from accum._engine._batch import Batch, Size, as_tensor, largest_count
from accum._engine._combined import Sum
from accum._engine._gradients import keeping_gradients
from accum._engine._micro_batches import Index, MicroBatches
from accum._engine._segments import Segments
from accum._engine._trace import Marks, Trace, Unrepeatable, is_differentiable
from accum._engine._whole_call import ExamplesMeet, segments_of, whole_call
from accum._keras import _step_context
from accum._keras._batch_norm._layer import BatchNormBarrier, batch_norms_of, refusal_of
from accum._keras._diagnosis import _rules
from accum._keras._optimizer._internals import internals_of
from accum._keras._steps._batch_draws import BatchDraws
from accum._keras._steps._losses_over_replicas import ReplicaLosses
from accum._keras._steps._metric_updates import looks_across_examples
from accum._keras._steps._one_pass import may_be_apart
from accum._keras._steps._optimizer_calls import Collector, Gate, read_weight
from accum._keras._steps._split_step import SplitStep
from accum._tf import Data, Leaf, Logs, Nested, Scalar, Wait, tf

# --------------------------------------------------------------------------------------------------------------------
# The call of the model, traced with marks


class TracedCall(NamedTuple):
    """A traced call.

    Attributes:
      segments: its `Segments`, whose outputs are those of the model, after them what Keras has attached to these, and
        after that the losses of `added` with entries for each example.
      structure: the nested structure of the outputs of the model, of whether each is a tensor, or None.
      attached: list of (which output, name of what is attached to it).
      added: for each loss that layers add, (the layer, whether it has entries for each example, or is a scalar).
      variables: those by which it has been differentiated.
      alike: which outputs depend on no example, such as a weight. The segments return them once for each example.
      used: which outputs others are computed from, which the gradient by one of them alone would lack.
    """

    segments: Segments
    structure: Nested
    attached: List[Tuple[int, str]]
    added: List[Tuple[tf.keras.layers.Layer, bool]]
    variables: List[tf.Variable]
    alike: List[int]
    used: List[int]

    def outputs(self, tensors: Sequence[tf.Tensor]) -> Nested:
        """Return the outputs of the model, given those of the segments."""
        count = len(tensors) - len(self.attached) - self._entries
        outputs = list(tensors[:count])
        for index in {index for index, _ in self.attached}:
            outputs[index] = tf.identity(outputs[index])
        for index in self.alike:
            outputs[index] = outputs[index][0]
        for (index, name), tensor in zip(self.attached, tensors[count:]):
            outputs[index] = _tf.graph_parts.with_attached(outputs[index], name, tensor)
        rest = iter(outputs)
        return tf.nest.map_structure(lambda is_tensor: next(rest) if is_tensor else None, self.structure)

    def losses(self, tensors: Sequence[tf.Tensor], scalars: Sequence[tf.Tensor]) -> List[tf.Tensor]:
        """Return the losses that layers add, given the outputs of the segments, and those losses that are scalars."""
        entries, others = iter(tensors[len(tensors) - self._entries :]), iter(scalars)
        return [_joined_entries(next(entries)) if has_entries else next(others) for _, has_entries in self.added]

    @property
    def _entries(self) -> int:
        return sum(has_entries for _, has_entries in self.added)


class Traces(dict):  # type: ignore[type-arg]
    """{what a call depends on, first the step: (the layer, `TracedCall`)} of one model.

    Copies and pickles of the model leave them out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._graphs: Dict[str, "weakref.ref[tf.Graph]"] = {}  # step -> that of the function in which it was traced

    def begins_anew(self, step: str) -> bool:
        """Whether a step is traced in another function than before, so that Python code of the user's runs anew."""
        graph = _tf.graphs.outermost_function()
        before = self._graphs.get(step)
        if graph is None or (before is not None and before() is graph):
            return False
        self._graphs[step] = weakref.ref(graph)
        return True

    def forget(self, step: str) -> None:
        """Forget the calls within one step, such as "test_step"."""
        for key in [key for key in self if key[0] == step]:
            del self[key]

    def __deepcopy__(self, memo: Dict[int, object]) -> "Traces":
        return Traces()

    def __reduce__(self) -> Tuple[type, Tuple[()]]:
        return Traces, ()


class Arguments:
    """The arguments of a call.

    Args:
      args, kwargs: the arguments.
      is_nested: whether they are in a loop, conditional or function of the step, where no tape tells what it records.

    Attributes:
      args, kwargs: the same.
      batch: `Batch` of them and of the masks that Keras has attached to them.
      leaves: the arguments as a flat list of tensors and others.
      watched: for each leaf, whether its gradient may be needed.
      kind: what tells such arguments from others, but for what tensors and other leaves are.
    """

    def __init__(self, args: Sequence[Nested], kwargs: Dict[str, Nested], is_nested: bool) -> None:
        self.args, self.kwargs = args, kwargs
        structure = tuple(args), dict(kwargs)
        self.leaves = leaves = [as_tensor(leaf) for leaf in tf.nest.flatten(structure)]
        masks = {index: getattr(leaf, "_keras_mask", None) for index, leaf in enumerate(leaves)}
        self._masks = {index: mask for index, mask in masks.items() if isinstance(mask, tf.Tensor)}
        self.batch = Batch((*tf.nest.pack_sequence_as(structure, leaves), self._masks))
        self.watched = [
            isinstance(leaf, tf.Tensor) and is_differentiable(leaf) and (is_nested or _tf.watching.is_recorded(leaf))
            for leaf in leaves
        ]
        places = tf.nest.pack_sequence_as(structure, [int(isinstance(leaf, tf.Tensor)) for leaf in leaves])
        self.kind = places, sorted(self._masks), self.watched

    def packed(self, tensors: Sequence[tf.Tensor]) -> Tuple[Sequence[Nested], Dict[str, Nested], List[tf.Tensor]]:
        """Return (args, kwargs, those of them that are watched) with other tensors, those of a micro-batch."""
        args, kwargs, masks = self.batch.packed(tensors)
        leaves = tf.nest.flatten((args, kwargs))
        for index, mask in masks.items():
            leaves[index]._keras_mask = mask
        return args, kwargs, [leaf for leaf, is_watched in zip(leaves, self.watched) if is_watched]


def traced_call(
    model: tf.keras.Model,
    call: Callable[..., Nested],
    arguments: Arguments,
    has_barriers: bool,
    differentiable: bool,
    recompute: bool,
    size: Size,
    compiled: bool,
) -> TracedCall:
    """Trace the call of a model or layer on a micro-batch.

    Args:
      model: the model or layer.
      call: the `__call__` of its class.
      arguments: its `Arguments`.
      has_barriers: whether batch normalisation is a barrier.
      differentiable: whether the gradient is needed.
      recompute: whether groups of segments are computed again.
      size: the largest number of examples that are computed at once.
      compiled: whether XLA compiles it.

    Raises:
      ExamplesMeet: examples meet where that can't be computed with the whole batch.
      ValueError: a batch normalisation layer is of an unknown kind, or within a loop or conditional; an output is not a
        dense tensor; something can't be computed again.
    """
    seen: Dict[str, Any] = {}
    is_eager = tf.executing_eagerly()
    batch = arguments.batch
    variables = [_replicas.local_variable(_tf.variables.native(var)) for var in model.trainable_variables]
    known = set(map(_tf.variables.key_of, map(_tf.variables.native, model.variables)))

    def function(tensors: Sequence[tf.Tensor], marks: Marks) -> List[tf.Tensor]:
        args, kwargs, marks.watched = arguments.packed(tensors)
        marks.draws.size = size if isinstance(size, int) else None
        added: List[Tuple[tf.keras.layers.Layer, Optional[tf.Tensor]]] = []
        reads = _tf.watching.VariableReads()
        with contextlib.ExitStack() as stack:
            if _tf.watching.READS_COST_NOTHING:
                stack.enter_context(reads)
            stack.enter_context(
                _marking(model, marks, has_barriers, _Added(marks, batch.count_of(batch.packed(tensors)), added))
            )
            outputs = _tf.graphs.called_as_in_fit(call, *args, **kwargs)
        others = [var for var in reads.variables() if _tf.variables.key_of(var) not in known]
        marks.sources = seen["variables"] = variables + [_replicas.local_variable(var) for var in others]
        flat = [_dense(tensor) for tensor in tf.nest.flatten(outputs) if tensor is not None]
        alike = [index for index, one in enumerate(flat) if _tf.op_walks.depends_on_variables_alone(one)]
        attached = [
            (index, name, value)
            for index, one in enumerate(flat)
            for name, value in _tf.graph_parts.attached(one, is_eager)
        ]
        seen["structure"] = tf.nest.map_structure(lambda output: output is not None, outputs)
        seen["attached"] = [(index, name) for index, name, _ in attached]
        seen["added"] = [(layer, entries is not None) for layer, entries in added]
        losses = [value for value, _ in marks.losses] + [entries for _, entries in added if entries is not None]
        seen["alike"], seen["used"] = alike, _used_by_others(flat, losses)
        for index in alike:
            shape = tf.concat([[batch.count_of(batch.packed(tensors))], tf.shape(flat[index])], axis=0)
            flat[index] = tf.broadcast_to(flat[index], shape)
        return flat + [value for _, _, value in attached] + [entries for _, entries in added if entries is not None]

    segments = segments_of(
        function,
        batch,
        variables,
        recompute,
        has_barriers,
        differentiable,
        compiled=compiled,
        refuses_meetings=has_barriers,
    )
    names = ("structure", "attached", "added", "variables", "alike", "used")
    return TracedCall(segments, *map(seen.__getitem__, names))


def _used_by_others(outputs: Sequence[tf.Tensor], losses: Sequence[tf.Tensor]) -> List[int]:
    """Return which outputs a gradient of others, or of losses, flows to."""
    others = [*outputs, *losses]
    behind = [_tf.op_walks.differentiated_by([other]) for other in others] if len(others) > 1 else []

    def is_used(index: int, by: int) -> bool:
        return by != index and (outputs[index].name in behind[by] or outputs[index] is others[by])

    return [index for index in range(len(outputs)) if any(is_used(index, by) for by in range(len(behind)))]


def _dense(tensor: Leaf) -> tf.Tensor:
    """Return an output of a model, or raise unless it is dense."""
    native = _tf.variables.native(tensor)
    tensor = tf.convert_to_tensor(native) if isinstance(native, tf.Variable) else tensor
    if not isinstance(tensor, tf.Tensor):
        raise ValueError(
            f"With `whole_batch`, the outputs of a model must be dense tensors: make them so{_check.OR_AT_ONCE}. "
            f"Received: {tensor!r}. [accum: batch-axis]"
        )
    return tensor


@contextlib.contextmanager
def _marking(model: tf.keras.Model, marks: Marks, has_barriers: bool, added: "_Added") -> Iterator[None]:
    """Let layers leave marks in this context, and hand over what they add beside their outputs."""
    collector = Collector()
    layers = _tf.models.layers_of(model)
    with contextlib.ExitStack() as stack:
        for layer in batch_norms_of(model):
            stack.enter_context(layer.accum_statistics.collected_by(collector))
        for layer in [model] + layers:
            stack.enter_context(_tf.patches.MARKS.on(layer, add_loss=added.adding(layer)))
        for metric in _tf.steps.metrics_of_layers(model):
            stack.enter_context(_tf.patches.MARKS.on(metric, update_state=_updating(metric, marks)))
        for layer in filter(_tf.batch_norm.is_batch_norm, [model] + layers) if has_barriers else ():
            stack.enter_context(_tf.patches.MARKS.on(layer, call=_normalizing(layer, marks)))
        yield
    marks.moments.extend(collector.moments)


def _require_here(layer: tf.keras.layers.Layer, marks: Marks) -> None:
    """Raise unless a layer is called where a mark can be left."""
    if marks.is_here():
        return
    raise Unrepeatable(
        "An operation that looks across examples, such as batch normalization, can't be computed over the whole batch "
        "within a loop or conditional, whose body may run any number of times: take it out of "
        f"there{_check.OR_AT_ONCE}. Received: {layer.name!r}. [accum: whole-batch-loop]"
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
                f"Received: training={training!r} for {layer.name!r}. [accum: training-flag]"
            )
        if not (training and layer.trainable):
            return _tf.batch_norm.call_batch_norm(own, inputs, training, mask)
        reason = refusal_of(layer, inputs, mask)
        if reason is not None:
            raise ValueError(
                f"The layer {layer.name!r} can't be computed over the whole batch: {reason}. Received: {layer!r}."
                " [accum: batch-norm-layer]"
            )
        _require_here(layer, marks)
        return BatchNormBarrier(layer, len(marks.statistics)).call(inputs, mask, marks)

    return call


def _reason(error: Exception) -> str:
    """Return what an error says, without the lines that AutoGraph and Keras put around it."""
    lines = re.sub("\x1b\\[[0-9;]*m", "", _check.reason_of(error)).splitlines()  # Keras 3 prints some in bold
    own = [line for line in lines if "[accum: " in line]
    if own or (len(lines) == 1 and isinstance(error, (ValueError, Unrepeatable))):
        return (own or lines)[-1].strip()
    return f"{type(error).__name__}{': ' + lines[0] if len(lines) == 1 else ''}, where it is traced."


class _Added:
    """The losses that layers add in one call.

    Args:
      marks: the `Marks`.
      count: the number of examples in the micro-batch.
      added: a list, which gets the layer, and the entries of a loss for each example, or None for a scalar among
        `marks.losses`.
    """

    def __init__(
        self, marks: Marks, count: Size, added: List[Tuple[tf.keras.layers.Layer, Optional[tf.Tensor]]]
    ) -> None:
        self._marks = marks
        self._count = count
        self._added = added

    def adding(self, layer: tf.keras.layers.Layer) -> Callable[..., None]:
        """Return what stands in for a layer's `add_loss`."""
        add_loss = layer.add_loss
        name, *_ = inspect.signature(add_loss).parameters

        def add(*args: Nested, **kwargs: Nested) -> None:
            # A method that the layer overrides may take any arguments. Keras 3 calls the losses `loss`.
            losses, *others = args or (kwargs.pop(next(key for key in (name, "losses", "loss") if key in kwargs)),)
            for loss in tf.nest.flatten(losses):
                if callable(loss) or _tf.graphs.is_scratch():
                    add_loss(loss, *others, **kwargs)
                else:
                    self._add(layer, loss)
                    add_loss(loss, *others, **kwargs)  # for a layer around it, which may read `losses` in its call

        return add

    def _add(self, layer: tf.keras.layers.Layer, loss: Leaf) -> None:
        is_of_examples = _tf.steps.is_summed(loss) and (loss.shape.rank is None or loss.shape[0] is None)
        if is_of_examples and loss.shape.rank and self._marks.is_here():
            self._added.append((layer, _entries(loss, self._count)))
            return
        self._added.append((layer, None))
        self._marks.losses.append((tf.reduce_sum(loss), is_of_examples))


def _entries(loss: tf.Tensor, count: Size) -> tf.Tensor:
    """Return the entries of a loss by examples, with their number in an axis of its own."""
    shape = tf.shape(loss)
    message = (
        "A loss that a layer adds must be a scalar, or have the same number of entries for each example."
        " [accum: added-losses]"
    )
    with tf.control_dependencies([tf.debugging.assert_equal(shape[0] % tf.maximum(count, 1), 0, message)]):
        entries = tf.reshape(loss, tf.concat([[count, shape[0] // tf.maximum(count, 1)], shape[1:]], axis=0))
    entries.set_shape([None, None] + loss.shape.as_list()[1:])
    return entries


def _joined_entries(entries: tf.Tensor) -> tf.Tensor:
    """Return the loss with such entries, without their axis."""
    return tf.reshape(entries, tf.concat([[-1], tf.shape(entries)[2:]], axis=0))


def _updating(metric: tf.keras.metrics.Metric, marks: Marks) -> Callable[..., Wait]:
    """Return what stands in for the `update_state` of a metric in a layer, which is called for each micro-batch.

    It must add up over examples: a `Mean` or `Sum` of entries for examples, or another metric of Keras, with two axes
    if it is a mean of what reduces the last one. A `Mean` may also get the mean of a micro-batch, a `Sum` its sum.
    """
    update_state, is_sum = metric.update_state, isinstance(metric, tf.keras.metrics.Sum)
    is_plain = type(metric) in (tf.keras.metrics.Mean, tf.keras.metrics.Sum)

    def update(*args: Nested, **kwargs: Nested) -> Wait:
        leaves = [leaf for leaf in tf.nest.flatten((args, kwargs)) if leaf is not None]
        tensors = [leaf for leaf in leaves if tf.is_tensor(leaf)]
        if not marks.is_here() or not tensors:
            raise ValueError(
                "With `whole_batch`, what a layer gives to a metric must be tensors that it computes outside of loops "
                f"and conditionals: do so{_check.OR_AT_ONCE}. Received: the metric {metric.name!r}."
                " [accum: whole-batch-loop]"
            )
        is_number = len(leaves) == 1 and tensors[0].shape.rank == 0 and is_plain
        adds_up = is_plain or (may_be_apart(metric) and not looks_across_examples(metric))
        ranks = [-1 if one.shape.rank is None else one.shape.rank for one in tensors]
        axes = 2 if hasattr(metric, "_fn") else 1  # the mean of a function of the last axis, or else of all entries
        if not is_number and (len(tensors) < len(leaves) or not adds_up or min(ranks) < 1 or max(ranks) < axes):
            raise ValueError(
                f"A metric in a layer must add up what it gets for each example{_check.OR_AT_ONCE}. Received: the "
                f"metric {metric.name!r}. [accum: whole-batch-loop]"
            )
        if is_number:
            marks.numbers.append((tf.identity(tensors[0]), is_sum))
            share = {} if is_sum else {"sample_weight": tf.cast(marks.share, tensors[0].dtype)}
            return update_state(tensors[0], **share)
        marks.rows.extend(map(tf.identity, tensors))
        return update_state(*args, **kwargs)

    return update


# --------------------------------------------------------------------------------------------------------------------
# The call that replaces it in a train step


def _require_batch(arguments: Nested) -> None:
    """Raise if arguments of a layer are no batch: if one is a scalar with a gradient, or has another first axis."""
    natives = map(_tf.variables.native, tf.nest.flatten(arguments))
    leaves = [leaf for leaf in natives if isinstance(leaf, (tf.Tensor, tf.Variable))]
    scalars = [leaf for leaf in leaves if leaf.shape.rank == 0 and is_differentiable(leaf)]
    if any(isinstance(leaf, tf.Variable) or _tf.watching.is_recorded(leaf) for leaf in scalars):
        raise ValueError(f"the gradient by a scalar argument may be needed. Received: {scalars}.")
    tensors = [leaf for leaf in tf.nest.flatten(arguments) if tf.is_tensor(leaf) and leaf.shape.rank]
    lengths = {leaf.shape.as_list()[0] for leaf in tensors}
    if len(lengths) > 1:
        raise ValueError(f"its arguments have first axes of different lengths. Received: {tensors}.")


def _require_unread(trace: Trace) -> None:
    """Raise if a call reads variables that are changed behind it, which plain Keras would have changed within it."""
    read = {id(outside) for outside, _ in trace.captures}
    moved = [var for mark in trace.statistics for var in mark.barrier.moved()]
    stale = [var.name for var in moved if id(_replicas.local_variable(var).handle) in read]
    if stale:
        raise ExamplesMeet(f"it reads moving statistics that the same call moves. Received: {stale}.")


def _require_tape(layer: tf.keras.layers.Layer, leaves: Sequence[Nested]) -> None:
    """Raise where TensorFlow would not ask what a layer returns for its gradient."""
    if _tf.graphs.is_vectorized_here():
        raise ExamplesMeet("it is called within `tf.vectorized_map`, which makes operations anew.")
    tensors = [leaf for leaf in tf.nest.flatten(list(leaves), expand_composites=True) if tf.is_tensor(leaf)]
    if _tf.watching.is_accumulated([*tensors, *map(_tf.variables.native, layer.trainable_variables)]):
        raise ExamplesMeet("a `tf.autodiff.ForwardAccumulator` watches it.")


class WholeBatchCalls:
    """Stands in for the calls of a model, and of other layers, during one step, on one replica.

    Args:
      model: a `GradientAccumulateModel`.
      size: int or int32 scalar tensor, the largest number of examples in a micro-batch.
      weight: function that returns the weight of this replica's batch, or None for 1.
      step: "train_step", whose gradient is needed, "test_step" or "predict_step".
      draws: the `BatchDraws` of the step.

    Attributes:
      replica_losses: what computes losses over the outputs of several replicas, or None.
      is_used: whether a layer with weights has been called.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        size: Size,
        weight: Callable[[], Optional[Scalar]],
        step: str,
        draws: BatchDraws,
    ) -> None:
        self._model = model
        self._step = step
        self._draws = draws
        self._recompute = model._accum.recompute
        self._size = size
        self._weight = weight
        sizes = model._accum.replicas_per_group
        groups = {name: _check.group_size(sizes[name], _replicas.count()) for name in model._accum.whole_batch}
        self._group_size = groups.get("batch_norm", 1)
        self._loss_group = groups.get("loss", 1)
        self.replica_losses = None if self._loss_group == 1 else ReplicaLosses(model, self._loss_group, weight)
        self._is_within = False
        self._numbers: Dict[int, int] = {}  # id of a layer: how often it has been called
        self._used: Dict[int, Tuple[Any, str]] = {}  # id of an output from which others are computed: (it, the layer)
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self.is_used = False

    @_tf.graphs.run_as_written
    def of_model(self, call: Callable[..., Nested], args: Sequence[Nested], kwargs: Dict[str, Nested]) -> Nested:
        """Call the model.

        Args:
          call: the `__call__` of the model's class.
          args, kwargs: its arguments.
        """
        if self._is_within:
            return call(*args, **kwargs)
        if self._model._accum.is_exact_by_default:
            return self.of_layer(self._model, call, args, kwargs)
        try:
            arguments = self._arguments(args, kwargs)
            traced = self._repeatable(self._model, call, arguments)
        except ExamplesMeet as error:
            return self._at_once(self._model, call, args, kwargs, error)
        return self._split(self._model, traced, arguments)

    def _arguments(self, args: Sequence[Nested], kwargs: Dict[str, Nested]) -> Arguments:
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        return Arguments(args, kwargs, graph is not None and graph is not self._graph)

    @_tf.graphs.run_as_written
    def of_layer(
        self,
        layer: tf.keras.layers.Layer,
        call: Callable[..., Nested],
        args: Sequence[Nested],
        kwargs: Dict[str, Nested],
    ) -> Nested:
        """Call a layer: split if it has weights and can be, otherwise as it is."""
        leaves = tf.nest.flatten((args, kwargs), expand_composites=True)  # for 2.2, what is ragged is no tensor
        if self._is_within or not any(map(tf.is_tensor, leaves)):
            return call(*args, **kwargs)
        try:
            _require_batch((args, kwargs))
            arguments = self._arguments(args, kwargs)
            if not layer.built:
                with self._within():
                    _build(call, arguments.batch)
            if not layer.weights:
                return call(*args, **kwargs)
            traced = self._repeatable(layer, call, arguments)
        except tf.errors.OpError:  # of what runs, as eagerly: perhaps out of memory
            raise
        except Exception as error:  # what is wrong with the call itself shows when it is made at once
            return self._at_once(layer, call, args, kwargs, error)
        return self._split(layer, traced, arguments)

    def _at_once(
        self,
        layer: tf.keras.layers.Layer,
        call: Callable[..., Nested],
        args: Sequence[Nested],
        kwargs: Dict[str, Nested],
        error: Exception,
    ) -> Nested:
        """Call a layer with the whole batch, because it can't be split."""
        self.is_used = True
        with self._within():
            result = call(*args, **kwargs)
        if self._model._accum.is_first_time(f"computed at once: {id(layer)}"):
            _check.warn(
                f"The layer {layer.name!r} is computed for the whole batch at once, which is exact but saves no "
                f"memory, because it can't be split: {_reason(error)} [accum: not-split]"
            )
        return result

    def _repeatable(
        self, layer: tf.keras.layers.Layer, call: Callable[..., Nested], arguments: Arguments
    ) -> TracedCall:
        """Return a traced call, or raise if it can't be split. It creates no operation that changes anything."""
        if not layer.built:
            with self._within():
                _build(call, arguments.batch)
        _require_tape(layer, arguments.leaves)
        traced = self._traced(layer, call, arguments)
        segments = traced.segments
        moved = _rules.names_of_moved(self._model, segments.graph.variables.moved) if self._is_exact(layer) else []
        if moved:
            raise ValueError(f"each micro-batch would change variables of it by its own examples. Received: {moved}.")
        _require_unread(segments.graph.trace)
        return traced

    def _split(self, layer: tf.keras.layers.Layer, traced: TracedCall, arguments: Arguments) -> Nested:
        """Return the outputs of a layer, and let it have added the losses of its latest call, as Keras does.

        It moves statistics, and so does the call at once, which therefore can't take its place if it fails.
        """
        batch, segments = arguments.batch, traced.segments
        self.is_used = True
        watched = [leaf for leaf, is_watched in zip(arguments.leaves, arguments.watched) if is_watched]
        others = [leaf for leaf, is_watched in zip(arguments.leaves, arguments.watched) if not is_watched]
        others = tf.nest.flatten(others, expand_composites=True)  # a sparse tensor is its values and others
        others += [outside for outside, _ in segments.graph.trace.captures if outside.dtype != tf.resource]
        with _tf.steps.keeping_added_losses(self._model):  # of other layers
            whole, losses = whole_call(
                segments,
                batch,
                self._size,
                traced.variables,
                [leaf for leaf in others if tf.is_tensor(leaf) and is_differentiable(leaf)],
                _tf.steps.is_compiled_by_xla(self._model),
                self._group_size,
                self._weight,
                self._draws,
                watched,
            )
            losses = self._as_shares(traced.losses(whole, losses), batch)
        _rules.apply("whole batch computed", _rules.Seen(self._model, handles=segments.graph.variables.moved))
        _tf.layers.replace_added_losses(layer, list(zip([one for one, _ in traced.added], losses)))
        outputs = traced.outputs(whole)
        present = [one for one in tf.nest.flatten(outputs) if one is not None]
        used = [present[index] for index in traced.used]
        self._used.update((id(output), (weakref.ref(output), layer.name)) for output in used)
        return outputs

    def require_sources(self, sources: Nested) -> None:
        """Raise if a gradient is taken by an output from which other outputs, or losses, of its call are computed."""
        entries = [(self._used.get(id(one)), one) for one in tf.nest.flatten(sources)]
        names = [entry[1] for entry, one in entries if entry is not None and entry[0]() is one]
        if names:
            raise ValueError(
                "A gradient by an output of a layer would lack the way through other outputs or losses of the same "
                "call, which are computed from it, because the call is split: let the train step make two calls, as in "
                f"`hidden = self.encoder(x)` and `y = self.head(hidden)`. Received: an output of {names}."
                " [accum: whole-batch-gradient]"
            )

    def _is_exact(self, layer: tf.keras.layers.Layer) -> bool:
        """Whether a layer that moves state by its examples is computed at once: not if `whole_batch` was given."""
        return layer is not self._model or self._model._accum.is_exact_by_default

    def _as_shares(self, losses: List[tf.Tensor], batch: Batch) -> List[tf.Tensor]:
        """Weight what layers of this replica have added by its examples, if replicas share a loss.

        Keras then averages the replicas' losses, in the logs and, unless the gradients are weighted later, in the step.
        """
        if self._loss_group == 1 or not losses:
            return losses
        share = _replicas.share_of_replica(tf.cast(batch.count, tf.float32), self._loss_group)
        shares = [loss * tf.cast(share, loss.dtype) for loss in losses]
        steps = shares if self._weight() is None else losses
        logs = losses if _tf.steps.LOGS_COUNT_EXAMPLES else shares
        return [step + tf.stop_gradient(log - step) for step, log in zip(steps, logs)]

    @contextlib.contextmanager
    def _within(self) -> Iterator[None]:
        """Let the model compute a micro-batch in this context, as its class does."""
        before, self._is_within = self._is_within, True
        try:
            yield
        finally:
            self._is_within = before

    def _traced(self, layer: tf.keras.layers.Layer, call: Callable[..., Nested], arguments: Arguments) -> TracedCall:
        """Return the traced call, which is traced once for all batches of a kind, as a `tf.function` is."""
        model = self._model
        names = list(inspect.signature(type(layer).call).parameters)[1:]
        training = dict(zip(names, arguments.args), **arguments.kwargs).get("training")
        has_barriers = "batch_norm" in model._accum.whole_batch
        if (
            has_barriers
            and tf.is_tensor(training)
            and any(norm.trainable for norm in _tf.batch_norm.batch_norms_in(layer))
        ):
            raise ValueError(
                "With batch normalisation over the whole batch, `training` must be a bool when the model is called. "
                f"Received: training={training!r}. [accum: training-flag]"
            )

        if tf.executing_eagerly() and model._accum.is_first_time("traced eagerly"):
            _check.warn(
                "With `whole_batch`, the Python code of the model's `call` runs once, even with `run_eagerly=True`, in "
                "a step that sees the whole batch. What it reads or changes in Python stays as it was then, such as an "
                "attribute that a callback sets or a draw of NumPy: keep it in a `tf.Variable`, or call `compile` "
                "again after a change. [accum: python-once]",
                _check.InexactWarning,
            )
        leaves = [leaf for leaf in arguments.leaves if not tf.is_tensor(leaf)]
        flags = [bool(one.trainable) for one in [layer] + _tf.models.layers_of(layer)]
        kind = _replicas.replica_number(), arguments.batch.specs(), leaves, arguments.kind, flags
        differentiable = self._step == "train_step" or any(arguments.watched)
        # Python code may compute something else in each step and call, such as by an attribute that the step changes.
        number = self._numbers[id(layer)] = self._numbers.get(id(layer), 0) + 1
        key = self._step, id(layer), repr((kind, has_barriers, differentiable, number))
        traces = model._accum.traces
        if key in traces:
            return traces[key][1]
        compiled = _tf.steps.is_compiled_by_xla(model)
        options = has_barriers, differentiable, self._recompute, self._size, compiled
        with self._within():
            traced = traced_call(layer, call, arguments, *options)
        if all(hasattr(outside, "numpy") for outside, _ in traced.segments.graph.trace.captures):
            traces[key] = layer, traced  # it knows no tensor of a function that is being traced
        return traced


def _build(call: Callable[..., Nested], batch: Batch) -> None:
    """Let a model create its variables."""

    def first_call() -> None:
        args, kwargs, _ = batch.part(0, 1)
        call(*args, **kwargs)

    tf.function(first_call).get_concrete_function()  # changes nothing, unlike a call


# --------------------------------------------------------------------------------------------------------------------
# The step


class WholeBatchStep(SplitStep):
    """Runs the steps of a model on a whole batch; the calls of the model within them are split into micro-batches."""

    @contextlib.contextmanager
    def _calling(self, name: str, data: Data) -> Iterator[BatchDraws]:
        """Let calls of the model be split in this context, in the step `name` of a batch, and yield what it draws."""
        count = largest_count(data)
        model = self._model
        optimizers = [_tf.optimizers.without_loss_scale(optimizer) for optimizer in model._accum.optimizers or ()]

        def weight() -> Optional[Scalar]:
            train_step = _step_context.of_model(model).train_step
            if train_step is not None and train_step.weight_of_replica is not None:
                return read_weight(train_step.weight_of_replica)
            accumulating = [optimizer for optimizer in optimizers if not internals_of(optimizer).is_passthrough]
            return internals_of(accumulating[0]).weight if accumulating else None

        draws = BatchDraws(model, count, self._compiled, name == "train_step")
        step = f"{_tf.models.name_of_class(model)}.{name}"
        calls = WholeBatchCalls(model, self._size, weight, name, draws)
        with keeping_gradients(), draws.batch(), _tf.watching.replacing_calls(
            calls.of_layer
        ), _tf.watching.checking_gradients(calls.require_sources):
            with _step_context.entering(model, calls=calls), self._naming_kept_tensors(step):
                yield draws
        if not calls.is_used:
            self._warn_of_none(step)
        if (
            name == "train_step"
            and calls.replica_losses is not None
            and not calls.replica_losses.is_used
            and not _tf.steps.is_step_of_keras(self._steps.of_class_or_user("train_step"), "train_step")
        ):
            raise ValueError(
                f"`{step}` computes a loss that can't be computed over the "
                "outputs of all replicas: let it call `self.compute_loss` or the compiled loss, or pass "
                "`replicas_per_group={'loss': 1}`, with which each replica computes its own. [accum: replicas-loss]"
            )

    @staticmethod
    @contextlib.contextmanager
    def _naming_kept_tensors(step: str) -> Iterator[None]:
        """Say in other words than TensorFlow's that a tensor of a micro-batch can't be used in this context."""
        try:
            yield
        except (TypeError, ValueError) as error:
            if not _tf.graphs.is_of_another_function(error):
                raise
            raise ValueError(
                f"`{step}` uses a tensor that a layer has kept from a micro-batch, such as in an attribute: "
                "let the layer return it as an output or pass it to `add_loss`, or compute it in the step. "
                "[accum: kept-tensor]"
            ) from error

    def _warn_of_none(self, step: str) -> None:
        if self._model._accum.is_first_time(f"no call in {step}"):
            _check.warn(
                f"`{step}` calls no layer with weights, such as `self(x, training=True)` or `self.encoder(x)`, so its "
                "batch is computed at once, which is exact but saves no memory: let it call one, outside of a "
                "`tf.function` of its own. [accum: not-split]"
            )

    def _check_batch_norms(self) -> None:
        """Refuse batch normalisation layers that are no barrier and can't be in a loop."""
        if "batch_norm" not in self._model._accum.whole_batch:
            self._check_layers()

    def train(self, data: Data, gate: Optional[Gate] = None) -> Logs:
        self._check_batch_norms()
        if gate is not None:
            self._refuse_loss_scale_on_replicas()
        with self._calling("train_step", data) as draws, self._without_sums_of_one(), draws.counting_idle_steps():
            logs, _ = self._steps.run_train(data, weighs_replicas=self._weighs_replicas, gate=gate)
        return logs

    @property
    def _weighs_replicas(self) -> bool:
        """As for any step; but a loss over the outputs of all replicas weights them by itself."""
        own = self._model._accum
        is_scaled = any(map(_tf.optimizers.is_loss_scale_optimizer, own.optimizers))
        is_sum = _tf.losses.sums_over_examples(getattr(self._model, _tf.losses.LOSS_CONTAINER, None))
        return super()._weighs_replicas and not is_scaled and not is_sum and "loss" not in own.whole_batch

    def gradients(self, data: Data) -> Nested:
        """As for any step. Called under "auto" with several workers, which have to agree before they update."""
        self._check_batch_norms()
        self._collector = Collector()
        scaled = [
            optimizer
            for optimizer in self._model._accum.optimizers
            if _tf.optimizers.is_loss_scale_optimizer(optimizer)
        ]
        self._refuse_loss_scale_on_replicas()
        if not _tf.steps.is_step_of_keras(self._steps.of_class_or_user("train_step"), "train_step"):
            raise ValueError(
                "With several workers, `micro_batch_size='auto'` can't run a `train_step` of your own, because what "
                "follows its update would run before it: pass a number as `micro_batch_size`. [accum: auto-impossible]"
            )
        with contextlib.ExitStack() as stack:
            for optimizer in scaled:
                stack.enter_context(self._intercepting(optimizer, self._collector))
            stack.enter_context(self._calling("train_step", data))
            logs, _ = self._steps.run_train(data, self._collector, self._weighs_replicas)
        self._metrics = _Logs(logs)

        def parts(_part: Data, _index: Index) -> Nested:
            calls = [self._parts_of(call, False) + [[]] for call in self._collector.calls]
            moments = [[Sum(value) for value in call_moments] for call_moments, _ in self._collector.moments]
            return [calls, moments, self._metrics.parts()]

        batch = Batch(data)
        micro_batches = MicroBatches(batch, batch.count)
        self._sizes = micro_batches.sizes
        return micro_batches.run_at_once(parts)

    def _refuse_loss_scale_on_replicas(self) -> None:
        """Raise if a `LossScaleOptimizer` would have to agree with other replicas, under "auto"."""
        if any(map(_tf.optimizers.is_loss_scale_optimizer, self._model._accum.optimizers)) and _replicas.count() > 1:
            raise ValueError(
                "`whole_batch` with `micro_batch_size='auto'` can't have a `LossScaleOptimizer` on several replicas: "
                "pass a number as `micro_batch_size`, or train in bfloat16. [accum: auto-impossible]"
            )

    def test(self, data: Data) -> Logs:
        with self._calling("test_step", data):
            logs, _ = self._steps.run_test(data)
        return logs

    def predict(self, data: Data) -> Nested:
        with self._calling("predict_step", data):
            return self._steps.run("predict_step", data)


class _Logs:
    """The logs of a step, whose tensors have to leave the function in which it ran."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs

    def parts(self) -> List[Optional[Sum]]:
        return [Sum(leaf) if tf.is_tensor(leaf) else None for leaf in tf.nest.flatten(self._logs)]

    def finish(self, tensors: Sequence[Optional[tf.Tensor]]) -> Logs:
        pairs = zip(tf.nest.flatten(self._logs), tensors)
        return tf.nest.pack_sequence_as(self._logs, [leaf if value is None else value for leaf, value in pairs])
