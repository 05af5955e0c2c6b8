"""Unpack the data of a train step, and find the arguments that determine the denominator of its loss."""

import contextlib
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np

from accum._tf import patches
from accum._tf.layers import comes_with_keras
from accum._tf.steps import when_built
from accum._tf.version import IS_KERAS_3, VERSION, tf

AXES_ADDED_TO_WEIGHTS = 0 if IS_KERAS_3 else 1
"""How many axes Keras adds to weights of examples that have fewer than their losses."""


def unpack_data(data: Any) -> Tuple[Any, Any, Any]:
    """Unpack the data of a `train_step` into (x, y, sample_weight); data of any other structure is x."""
    if isinstance(data, tuple) and not 1 <= len(data) <= 3:
        return data, None, None
    if VERSION >= (2, 3):
        return tf.keras.utils.unpack_x_y_sample_weight(data)
    data = data if isinstance(data, tuple) else (data,)  # dies with 2.2
    return data + (None,) * (3 - len(data))


def count_examples(data: Any) -> tf.Tensor:
    """Count the examples in the data of a `train_step`, as a float32 scalar.

    Targets and sample weights have one entry for each example. Inputs may also contain other things, such as the edges
    of a graph, so they are used last.
    """
    first = _first_batched(data)
    if first is None:
        raise ValueError(
            "There is no batch whose examples could be counted: pass `micro_batch_weight='equal'`, or a function of "
            f"the data. Received: {data!r}. [accum: batch-axis]"
        )
    return tf.cast(_length(first), tf.float32)


def known_count(data: Any) -> Any:
    """Return what `count_examples` counts, an int if it is known now, otherwise an int32 scalar; or None."""
    first = _first_batched(data)
    if first is None:
        return None
    static_size = None if isinstance(first, tf.SparseTensor) else first.shape[0]
    static_size = getattr(static_size, "value", static_size)  # a `Dimension` in a static graph of TF 1.15
    return tf.cast(_length(first), tf.int32) if static_size is None else int(static_size)


def _first_batched(data: Any) -> Any:
    x, y, sample_weight = unpack_data(data)
    return next((leaf for leaf in tf.nest.flatten((y, sample_weight, x)) if _has_axes(leaf)), None)


def _length(leaf: Any) -> tf.Tensor:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows()
    return (leaf.dense_shape if isinstance(leaf, tf.SparseTensor) else tf.shape(leaf))[0]


def _has_axes(leaf: Any) -> Any:
    shape = getattr(leaf, "shape", ())
    rank = shape.rank if isinstance(shape, tf.TensorShape) else len(shape)
    return leaf is not None and rank != 0


class LossCall(NamedTuple):
    """What one compiled loss of a model has been called with."""

    name: str  # of the output
    loss: Any
    target: Any
    output: Any
    weights: Any


@contextlib.contextmanager
def recording_losses(
    container: Any, y_true: Any, y_pred: Any, changed: Optional[Callable[[LossCall, Any], Any]] = None
) -> Iterator[List[LossCall]]:
    """Record what the losses of a container are called with in this context, for outputs with a loss and a target.

    Args:
      container: Keras' container of compiled losses.
      y_true, y_pred: what it will be called with.
      changed: function of a call and of the loss that it returns -> the loss to be used instead. None: the same.
    """
    calls: List[LossCall] = []
    with contextlib.ExitStack() as stack:
        if IS_KERAS_3:

            def record() -> None:
                watched = [entry._replace(loss=_recorded(entry, calls, changed)) for entry in container._flat_losses]
                stack.enter_context(patches.RECORDED_LOSSES.on(container, _flat_losses=watched))

            stack.enter_context(when_built(container, record))
        elif changed is not None:

            def change() -> None:
                named = zip(container._output_names, container._losses)
                losses = [loss and _ChangedLoss(name, loss, changed) for name, loss in named]
                stack.enter_context(patches.RECORDED_LOSSES.on(container, _losses=losses))

            stack.enter_context(when_built(container, change))
        yield calls
    if not IS_KERAS_3:
        structures = [tf.nest.flatten(part) for part in (container._conform_to_outputs(y_pred, y_true), y_pred)]
        entries = zip(container._output_names, container._losses, *structures)
        calls.extend(LossCall._make((*entry, None)) for entry in entries if not (entry[1] is None or entry[2] is None))


class _ChangedLoss:
    """A loss of Keras 2 whose value is changed; all other attributes are its own."""

    def __init__(self, name: str, loss: Any, changed: Callable[[LossCall, Any], Any]) -> None:
        self._name = name
        self._loss = loss
        self._changed = changed

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        call = LossCall(self._name, self._loss, y_true, y_pred, sample_weight)
        return self._changed(call, self._loss(y_true, y_pred, sample_weight=sample_weight))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)


def _recorded(
    entry: Any, calls: List[LossCall], changed: Optional[Callable[[LossCall, Any], Any]] = None
) -> Callable[..., Any]:
    """Return the loss of an entry in Keras 3's list as a function that records its calls."""

    def loss(target: Any, output: Any, weights: Any = None) -> Any:
        name = entry.name or ".".join(map(str, entry.path))
        tensor = tf.convert_to_tensor(target) if isinstance(target, np.ndarray) else target  # of eager `train_on_batch`
        calls.append(LossCall(name, entry.loss, tensor, output, weights))
        value = entry.loss(target, output, weights)
        return value if changed is None else changed(calls[-1], value)

    return loss


def mask_of(output: Any) -> Any:
    """Return the mask that layers have passed on to an output, or None; it has no public name."""
    return getattr(output, "_keras_mask", None)


def divides_by_counted(call: LossCall) -> bool:
    """Whether a loss divides by fewer than all elements, such as the unmasked ones: see `counted_by_losses`."""
    return _counted(*call[1:]) is not None


def ignored_class(loss: Any) -> Optional[int]:
    """Return the `ignore_class` of a loss, or None."""
    is_sparse = isinstance(loss, tf.keras.losses.SparseCategoricalCrossentropy)
    return loss.get_config().get("ignore_class") if is_sparse else None


def zero_if_all_are_ignored(container: Any) -> Optional[Callable[[LossCall, Any], Any]]:
    """Return a function of a loss and its value that is 0 where all targets have its `ignore_class`, if one has any.

    From 2.10 to 2.15, Keras divides by 0 there: no gradient is affected, but the logged mean is NaN.
    """
    losses = [] if IS_KERAS_3 or VERSION < (2, 10) else tf.nest.flatten(container._user_losses)  # has no public name

    def value_or_zero(call: LossCall, value: Any) -> Any:
        counted = None if ignored_class(call.loss) is None else _counted(*call[1:])
        return value if counted is None else tf.where(tf.reduce_any(counted > 0.0), value, tf.zeros_like(value))

    return value_or_zero if any(ignored_class(loss) is not None for loss in losses) else None


def elements_of_users_loss(call: LossCall) -> Any:
    """Return the losses before their reduction if the loss is not one of Keras, else None."""
    return None if is_of_keras(call.loss) else call.loss.call(call.target, call.output)


_MEANS = ("auto", "sum_over_batch_size", "mean")


def is_mean(loss: Any) -> bool:
    """Whether a compiled loss divides what it has computed by the number of its elements."""
    return getattr(loss, "reduction", None) in _MEANS


def counted_by_losses(calls: List[LossCall]) -> List[Tuple[str, Optional[tf.Tensor]]]:
    """Return (name of the output, what each element counts) for each loss of a model: it divides by their sum.

    From 2.11 on, a built-in reduction divides the loss of a masked output by the number of unmasked elements. From
    2.10 on, a loss with an `ignore_class` divides by the number of elements of other classes. "mean_with_sample_weight"
    of Keras 3 divides by the sum of the weights. The loss of a ragged output divides by the number of elements that it
    has. All other losses divide by all elements: None.
    """
    has_ragged = any(isinstance(call.output, tf.RaggedTensor) for call in calls)
    if VERSION < (2, 10) and not has_ragged:  # dies with 2.9
        return []
    return [(call.name, _counted(*call[1:])) for call in calls]


def scalars_as_means(container: Any) -> Any:
    """Return a context in which a loss that is one number for a batch is divided by the number of replicas.

    Keras divides means by it, so that losses can be added up over replicas. Keras 3 does not divide a loss whose
    function returned a scalar: no reduction took place.
    """
    stack = contextlib.ExitStack()

    def replace_calls() -> None:
        losses = {id(loss): loss for _, loss, *_ in container._flat_losses if loss is not None}  # has no public name
        for loss in losses.values():
            stack.enter_context(patches.RECORDED_LOSSES.on(loss, call=_with_axis(loss.call)))

    if IS_KERAS_3:
        stack.enter_context(when_built(container, replace_calls))
    return stack


def _with_axis(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function return a scalar with an axis of length 1."""

    def call(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        return tf.reshape(value, [1]) if value.shape.rank == 0 else value

    return call


def is_of_user(method: Any, name: str) -> bool:
    """Whether a method overrides that of `tf.keras.Model`, if this version has it, as `compute_loss` since TF 2.9."""
    keras_own = getattr(tf.keras.Model, name, None)
    return keras_own is not None and getattr(method, "__func__", method) is not keras_own


def compiled_losses(model: Any) -> List[Any]:
    """Return the losses that a model was compiled with: objects and functions."""
    return [tf.keras.losses.get(loss) for loss in _passed_losses(getattr(model, LOSS_CONTAINER, None))]


def compiled_metrics(model: Any) -> List[Any]:
    """Return the metrics that a model was compiled with: objects, functions, and names of those of Keras.

    None is made of its name: those of Keras 3 have variables at once, which a later trace of a function must not make.
    """
    container = getattr(model, "_compile_metrics" if IS_KERAS_3 else "compiled_metrics", None)
    weighted = "_user_weighted_metrics" if hasattr(container, "_user_weighted_metrics") else "_weighted_metrics"
    passed = _passed(container, "_user_metrics") + _passed(container, weighted)
    registered = tf.keras.utils.get_custom_objects()
    return [registered.get(metric, metric) if isinstance(metric, str) else metric for metric in passed]


def _passed_losses(container: Any) -> List[Any]:
    return _passed(container, "_user_loss" if IS_KERAS_3 else "_user_losses")


def _passed(container: Any, name: str) -> List[Any]:
    """Return what `compile` was passed, which has no public name in any version."""
    return [one for one in tf.nest.flatten(getattr(container, name, None)) if one is not None]


def is_of_keras(one: Any) -> bool:
    """Whether a loss or metric, or the function that it wraps, is one of Keras."""
    if isinstance(one, str):
        return True
    function = getattr(one, "fn", getattr(one, "_fn", None))
    own = one if not hasattr(type(one), "update_state") and not hasattr(one, "reduction") else type(one)
    return comes_with_keras(own) and (function is None or comes_with_keras(function))


def may_leave_out(loss: Any) -> bool:
    """Whether a loss divides by fewer than all elements, whatever the mask of its output."""
    return getattr(loss, "reduction", None) == "mean_with_sample_weight" or ignored_class(loss) is not None


def ranked_as_in_compile(one: Any, target: tf.Tensor, output: tf.Tensor, is_loss: bool) -> Tuple[tf.Tensor, tf.Tensor]:
    """Return a target and an output with the axes with which Keras calls a compiled loss or metric of the user's."""
    ranks = target.shape.rank, output.shape.rank
    if not IS_KERAS_3:
        return (tf.expand_dims(target, -1) if ranks == (1, 2) else target), output
    if None in ranks or not is_loss or isinstance(one, tf.keras.losses.Loss):
        return target, output
    longer, shorter = (target, output) if ranks[0] > ranks[1] else (output, target)
    if abs(ranks[0] - ranks[1]) != 1 or longer.shape[-1] != 1:
        return target, output
    if shorter.shape.rank == 1:
        shorter = tf.expand_dims(shorter, -1)
    else:
        longer = tf.squeeze(longer, -1)
    return (longer, shorter) if ranks[0] > ranks[1] else (shorter, longer)


def loss_of_elements(loss: Any, target: tf.Tensor, output: tf.Tensor) -> tf.Tensor:
    """Return the losses of the elements of a batch before their reduction.

    Args:
      loss: a function, or an object whose `call` or `fn` is one.
      target, output: of a batch.
    """
    if output.dtype.is_floating and not target.dtype.is_floating and not isinstance(loss, tf.keras.losses.Loss):
        target = tf.cast(target, output.dtype)  # as Keras does
    if isinstance(loss, tf.keras.losses.Loss):
        return loss.call(target, output)
    return (loss._fn if isinstance(loss, tf.keras.metrics.Metric) else loss)(target, output)


LOSS_CONTAINER = "_compile_loss" if IS_KERAS_3 else "compiled_loss"
"""The attribute of a compiled model that computes its losses; in Keras 3 it has no public name."""


def sums_over_examples(container: Any) -> bool:
    """Whether a loss that a model was compiled with has the reduction SUM."""
    return "sum" in reductions(container)


def adds_up_examples(container: Any) -> bool:
    """Whether the gradient of a loss that a model was compiled with is a sum over examples: reduction SUM or NONE."""
    return not {"sum", "none"}.isdisjoint(reductions(container))


def is_neither_sum_nor_mean(container: Any) -> bool:
    """Whether only some losses that a model was compiled with have the reduction SUM, or one has the reduction NONE."""
    names = reductions(container)
    return "none" in names or ("sum" in names and set(names) != {"sum"})


def reductions(container: Any) -> List[Optional[str]]:
    """Return the reductions of the losses that a model was compiled with, None for plain functions."""
    losses = _passed_losses(container)
    return ["none" if getattr(loss, "reduction", "") is None else getattr(loss, "reduction", None) for loss in losses]


def _counted(loss: Any, target: Any, output: Any, weights: Any) -> Optional[tf.Tensor]:
    """Return what each element counts in the number by which a loss divides, or None if all count 1."""
    mask = getattr(output, "_keras_mask", None) if VERSION >= (2, 11) else None  # has no public name; dies with 2.10
    mask = None if mask is None else tf.cast(mask, tf.float32)
    if loss.reduction == "mean_with_sample_weight":
        return mask if weights is None else _masked_weights(weights, mask)
    if loss.reduction not in _MEANS:
        return None
    if isinstance(output, tf.RaggedTensor):
        return _elements_of_ragged(output)
    ignored = ignored_class(loss)
    if ignored is None:
        return mask
    taken = tf.cast(tf.not_equal(target, tf.cast(ignored, target.dtype)), tf.float32)
    taken = tf.reshape(taken, tf.shape(output)[:-1])
    return taken if mask is None else mask * taken


def _elements_of_ragged(output: tf.RaggedTensor) -> Optional[tf.Tensor]:
    """Return how many elements the loss of each example has, one for each vector along the last axis; None for 1."""
    rank = output.shape.rank
    if rank is None or rank < 3:
        return None
    if output.ragged_rank == rank - 1:
        ones = tf.ones_like(output.row_lengths(axis=rank - 1), tf.float32)
    else:
        ones = output.with_flat_values(tf.ones(tf.shape(output.flat_values)[:-1]))
    return tf.reduce_sum(ones, axis=list(range(1, rank - 1)))


def _masked_weights(weights: Any, mask: Optional[tf.Tensor]) -> tf.Tensor:
    weights = tf.cast(tf.convert_to_tensor(weights), tf.float32)
    return weights if mask is None else _squeezed(weights, mask) * _squeezed(mask, weights)


def _squeezed(tensor: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Remove a last axis of length 1 that the other tensor lacks, as Keras 3 does."""
    has_one_more = tensor.shape.rank == other.shape.rank + 1 and tensor.shape[-1] == 1
    return tf.squeeze(tensor, -1) if has_one_more else tensor


def without_empty_masks(y_pred: Any, sample_weight: Any) -> Any:
    """Return (outputs, sample weights) with which a micro-batch that is all padding has loss 0 and no gradient.

    From 2.11 to 2.15, Keras divides by 0 unmasked elements: the loss is NaN, which a `LossScaleOptimizer` mistakes for
    an overflow.
    """
    masks = [getattr(output, "_keras_mask", None) for output in tf.nest.flatten(y_pred)]
    if IS_KERAS_3 or VERSION < (2, 11) or not any(mask is not None for mask in masks):
        return y_pred, sample_weight
    if sample_weight is not None and not tf.is_tensor(sample_weight):
        return y_pred, sample_weight  # weights of a structure that only Keras can match
    outputs, weights = [], []
    for output, mask in zip(tf.nest.flatten(y_pred), masks):
        weight = sample_weight
        if mask is not None:
            mask = tf.cast(mask, tf.bool)
            is_any = tf.reduce_any(mask)
            output = tf.identity(output)
            output._keras_mask = mask | ~is_any
            ones = tf.ones(tf.shape(mask)) if weight is None else weight
            weight = tf.where(is_any, ones, tf.zeros_like(ones))
        outputs.append(output)
        weights.append(weight)
    return tf.nest.pack_sequence_as(y_pred, outputs), tf.nest.pack_sequence_as(y_pred, weights)
