"""Call a traced function with a whole batch, in micro-batches. The gradient recomputes each of them (law L19)."""

from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

from accum import _check, _tf
from accum._engine._batch import Batch, Size
from accum._engine._found_statistics import FoundStatistics, Receive
from accum._engine._gradients import divided
from accum._engine._micro_batches import MicroBatches
from accum._engine._segments import SegmentedFunction, Segments, with_gradient
from accum._engine._trace import Marks, Unrepeatable, is_differentiable, trace
from accum._tf import Gradient, Scalar, tf

NOT_WHOLE = (
    "With `whole_batch`, these operations look across the examples of each micro-batch, not of the whole batch, and "
    "what they return meets single examples again: make them a mean and variance of `tf.nn.moments` over the examples, "
    "or move them behind the model, into the loss."
)
Function = Callable[[Sequence[tf.Tensor], Marks], Sequence[tf.Tensor]]


def segments_of(
    function: Function,
    batch: Batch,
    variables: Sequence[tf.Variable],
    recompute: bool,
    finds_statistics: bool,
    differentiable: bool = True,
    receive: Optional[Receive] = None,
    compiled: bool = False,
) -> Segments:
    """Trace a function on a micro-batch, and return it in segments.

    Args:
      function: as for `trace`.
      batch: the `Batch`.
      variables: what to differentiate by.
      recompute: as for `Segments`.
      finds_statistics: whether what normalises by the statistics of a batch, in whatever way, is a barrier.
      differentiable: whether the gradient is needed.
      receive: as for `FoundStatistics`.
      compiled: whether XLA will compile it.

    Raises:
      ValueError: something can't be computed again, or over the whole batch.
    """

    def traced(tensors: Sequence[tf.Tensor], marks: Marks, directly: bool) -> Sequence[tf.Tensor]:
        count = batch.count_of(batch.packed(tensors))
        with _tf.graph_parts.running_functions_directly(directly), marks.draws.of(marks.position, count):
            outputs = function(tensors, marks)
        if not finds_statistics:
            return outputs
        return FoundStatistics(marks, tensors, receive).replace(outputs)

    def segments(directly: bool) -> Segments:
        function_of_part = lambda tensors, marks: traced(tensors, marks, directly)
        return Segments(trace(function_of_part, batch.specs(), variables, differentiable, compiled), recompute)

    try:
        made = segments(False)
    except Unrepeatable:  # perhaps only because it is in a `tf.function` of the user's
        try:
            made = segments(True)
        except Unrepeatable as error:
            raise ValueError(str(error)) from None
    if made.graph.trace.unknown:
        _check.warn(f"{NOT_WHOLE} Received: {_check.shown(made.graph.trace.unknown)}.")
    return made


def whole_call(
    segments: Segments,
    batch: Batch,
    size: Size,
    sources: Sequence[Union[tf.Tensor, tf.Variable]],
    inputs: Sequence[tf.Tensor],
    compiled: bool = False,
    group_size: int = 1,
    weight: Callable[[], Optional[Scalar]] = lambda: None,
    draws: Any = None,
) -> Tuple[List[tf.Tensor], List[tf.Tensor]]:
    """Compute the outputs of the whole batch, and the losses that were added.

    Args:
      segments: `Segments`.
      batch: the `Batch`.
      size: int or int32 scalar tensor, the largest number of examples in a micro-batch.
      sources: variables and tensors, by which the trace has been differentiated.
      inputs: float tensors from which the outputs are computed, but without a gradient.
      compiled: whether XLA compiles this.
      group_size, weight, draws: as for `SegmentedFunction`.

    Returns:
      (outputs, losses). The gradient by `sources` flows through them.
    """
    run = SegmentedFunction(segments, MicroBatches(batch, size, compiled), batch.flatten, group_size, weight, draws)
    with _tf.graphs.control_flow_of_tf(2):  # whose loops free what they have kept as soon as nobody needs it
        outputs, losses = run.forward()
    outputs = [_with_examples(tensor, batch.count) for tensor in outputs]
    floats = [index for index, tensor in enumerate(outputs) if is_differentiable(tensor)]

    def backward(upstream: Sequence[tf.Tensor]) -> List[Optional[Gradient]]:
        by_outputs: List[Optional[tf.Tensor]] = [None] * len(outputs)
        for index, grad in zip(floats, upstream):
            by_outputs[index] = grad
        with _tf.graphs.control_flow_of_tf(2):
            grads = run.backward(by_outputs, upstream[len(floats) :])
        grads = [divided(grad, None, source.dtype.base_dtype) for grad, source in zip(grads, sources)]
        # All or none: an optimizer of a graph would move the last layers while earlier ones may yet fail.
        return list(tf.tuple(grads)) if any(grad is not None for grad in grads) else grads

    linked = with_gradient([outputs[index] for index in floats] + losses, sources, inputs, backward)
    for index, tensor in zip(floats, linked):
        outputs[index] = tensor
    return outputs, linked[len(floats) :]


def _with_examples(tensor: tf.Tensor, count: Size) -> tf.Tensor:
    """Return an output, and raise, or let the graph raise, unless its first axis is the batch."""
    message = (
        "The outputs of micro-batches are concatenated, so the first axis of each must be the batch: leave out "
        "`whole_batch`, or return one entry for each example."
    )
    static_size = tensor.shape[0] if tensor.shape.rank else None
    static_size = getattr(static_size, "value", static_size)  # a `Dimension` in a static graph of TF 1.15
    if tensor.shape.rank == 0 or (isinstance(count, int) and static_size not in (None, count)):
        raise ValueError(f"{message} Received: {tensor!r}.")
    if static_size is not None and isinstance(count, int):
        return tensor
    check = tf.debugging.assert_equal(tf.shape(tensor)[0], count, message=message)
    with tf.control_dependencies([] if check is None else [check]):
        return tf.identity(tensor)
