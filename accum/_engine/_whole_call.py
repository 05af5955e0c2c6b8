"""A call with the whole batch: a function in segments, with the gradient of its outputs (law L19).

`segments_of` traces a function and cuts it into segments. `whole_call` computes its outputs for a whole batch.
"""

import functools
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple, Union

from accum import _check, _tf
from accum._engine._batch import Batch, Size
from accum._engine._draws import warn_of_others
from accum._engine._found_statistics import FoundStatistics, Receive
from accum._engine._gradients import divided
from accum._engine._joined_rows import join_rows
from accum._engine._linked_gradient import Derive, noted, with_gradient
from accum._engine._meetings import drawing_for_all, meetings
from accum._engine._micro_batches import MicroBatches
from accum._engine._part import Key
from accum._engine._replicas import local_variable, replica_number
from accum._engine._segments import NOT_BATCHED, SegmentedFunction, Segments, with_examples
from accum._engine._trace import Marks, Trace, Unrepeatable, is_differentiable, trace
from accum._tf import Gradient, Scalar, tf

NOT_WHOLE = (
    "With `whole_batch`, these operations may look across the examples of each micro-batch instead of the whole batch, "
    "and then outputs or added losses depend on how the batch is split: leave out `whole_batch`, and the step is "
    "exact whatever the network computes, or compute their results behind the network. [accum: examples-meet]"
)
Function = Callable[[Sequence[tf.Tensor], Marks], Sequence[tf.Tensor]]


class ExamplesMeet(ValueError):
    """Examples meet, or may meet, where that can't be computed with the whole batch."""


def segments_of(
    function: Function,
    batch: Batch,
    variables: Sequence[tf.Variable],
    recompute: bool,
    finds_statistics: bool,
    differentiable: bool = True,
    receive: Optional[Receive] = None,
    compiled: bool = False,
    are_means: bool = False,
    looks_for_meetings: bool = True,
    refuses_meetings: bool = False,
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
      are_means: whether the outputs are those of `spread_means`.
      looks_for_meetings: whether to look for operations in which examples meet, which takes a while. If statistics are
        found too, they are computed with the whole batch.
      refuses_meetings: whether those that can't be raise `ExamplesMeet`, instead of a warning.

    Raises:
      ValueError: something can't be computed again, or over the whole batch.
    """

    can_join = looks_for_meetings and batch.is_dense and (finds_statistics or refuses_meetings)

    def traced(tensors: Sequence[tf.Tensor], marks: Marks, directly: bool, joins: bool) -> Sequence[tf.Tensor]:
        count = batch.count_of(batch.packed(tensors))
        marks.draws.joins = can_join
        with _tf.graph_parts.running_functions_directly(directly), marks.draws.of(marks.position, count):
            outputs = function(tensors, marks)
        if finds_statistics:
            outputs = FoundStatistics(marks, tensors, receive).replace(outputs)
        return join_rows(marks, tensors, outputs, are_means) if joins else outputs

    def segments(directly: bool, joins: bool = False) -> Segments:
        function_of_part = lambda tensors, marks: traced(tensors, marks, directly, joins)
        return Segments(trace(function_of_part, batch.specs(), variables, differentiable, compiled), recompute)

    try:
        made = segments(False)
    except Unrepeatable:  # perhaps only because it is in a `tf.function` of the user's
        try:
            made = segments(True)
        except Unrepeatable as error:
            raise ValueError(str(error)) from None
    for key in made.graph.trace.outputs:
        _require_examples(made.graph.trace.graph.get_tensor_by_name(key))
    if not looks_for_meetings:
        return made
    unknown = _meetings(made, batch, are_means, has_calls=can_join)
    if unknown and can_join:
        # TensorFlow's own gradient of a function that was copied is not that of the function.
        joined = _joined(lambda: segments(True, joins=True), batch, are_means)
        if joined is not None:
            return joined
        unknown = _meetings(made, batch, are_means)
    if unknown and refuses_meetings:
        raise ExamplesMeet(f"operations look across examples, or may do so. Received: {_check.shown(unknown)}.")
    if unknown and replica_number() == 0:  # the others compute the same
        if set(unknown) <= set(drawing_for_all(made.graph.trace, unknown)):
            warn_of_others(unknown)
            return made
        _check.warn(f"{NOT_WHOLE} Received: {_check.shown(unknown)}.", _check.InexactWarning)
    return made


def _meetings(made: Segments, batch: Batch, are_means: bool, has_calls: bool = False) -> List[str]:
    """Return the names of operations in which examples meet, or may meet, other than at barriers."""
    if not batch.is_dense:
        return ["inputs that are ragged or sparse, for which that is not known"]
    return meetings(made.graph.trace, are_means, has_calls)


def _joined(segments: Callable[[], Segments], batch: Batch, are_means: bool) -> Optional[Segments]:
    """Return segments that compute what examples meet in with the whole batch, or None if that isn't possible."""
    try:
        made = segments()
    except Exception:  # what is wrong with the function itself has shown before
        return None
    return None if _meetings(made, batch, are_means) else made


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
    watched: Sequence[tf.Tensor] = (),
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
      watched: those of the whole batch which the trace has watched.

    Returns:
      (outputs, losses). The gradient by `sources` and by `watched` flows through them.
    """
    run = SegmentedFunction(segments, MicroBatches(batch, size, compiled), group_size, weight, draws)
    # Loops of TensorFlow 2 free what they have kept as soon as nobody needs it.
    with _tf.graphs.control_flow_of_tf(2), _tf.watching.unrecorded():
        outputs, losses = run.forward()
    outputs = [with_examples(tensor, batch.count) for tensor in outputs]
    floats = [index for index, tensor in enumerate(outputs) if is_differentiable(tensor)]

    results = [segments.graph.trace.outputs[index] for index in floats]
    results += [loss.value for loss in segments.graph.trace.losses]
    asked: Set[Key] = set()  # for which of the results there is a gradient: TensorFlow fills in zeros for the others
    require_unchanged = segments.graph.watching_reads()

    def backward(upstream: Sequence[tf.Tensor]) -> List[Optional[Gradient]]:
        require_unchanged()
        if not segments.graph.trace.grads and sources:
            raise ValueError(
                "`test_step` and `predict_step` of a model with `whole_batch` can't take gradients of weights: do so "
                "by a model without `micro_batch_size`. [accum: whole-batch-gradient]"
            )
        by_outputs: List[Optional[tf.Tensor]] = [None] * len(outputs)
        for index, grad in zip(floats, upstream):
            by_outputs[index] = grad
        with _tf.graphs.control_flow_of_tf(2), _tf.watching.unrecorded():
            by_variables, by_watched = run.backward(by_outputs, upstream[len(floats) :])
        pairs = zip(by_variables + by_watched, [*sources, *watched])
        grads = [divided(grad, None, source.dtype.base_dtype) for grad, source in pairs]
        if len(asked) < len(results):
            others = _variables_behind(segments.graph.trace, results) - _variables_behind(segments.graph.trace, asked)
            grads = [None if id(_handle_of(one)) in others else grad for one, grad in zip([*sources, *watched], grads)]
        asked.clear()
        # All or none: an optimizer of a graph would move the last layers while earlier ones may yet fail.
        return list(tf.tuple(grads)) if any(grad is not None for grad in grads) else grads

    def again(
        derive: Derive, given: Sequence[tf.Tensor], are_rows: Sequence[bool], like: Sequence[tf.Tensor]
    ) -> List[tf.Tensor]:
        require_unchanged()

        def derived(
            fetched: Dict[Key, tf.Tensor], states: Dict[int, tf.Tensor], parts: List[tf.Tensor]
        ) -> List[tf.Tensor]:
            return derive([fetched[key] for key in results], states, parts)

        return run.again(derived, given, are_rows, like)

    tensors = [outputs[index] for index in floats] + losses
    linked = with_gradient(tensors, sources, watched, inputs, backward, again)
    linked = [noted(tensor, functools.partial(asked.add, key)) for tensor, key in zip(linked, results)]
    for index, tensor in zip(floats, linked):
        outputs[index] = tensor
    return outputs, linked[len(floats) :]


def _variables_behind(trace: Trace, keys: Iterable[Key]) -> Set[int]:
    """Return the ids of the handles of the variables from which tensors of a trace are computed."""
    sources = {part: whole.results for whole in trace.wholes for part in whole.parts}  # of placeholders
    sources.update((argument, whole.inputs) for whole in trace.wholes for argument in whole.arguments)
    sources.update((key, list(mark.moments)) for mark in trace.statistics for key in (mark.mean, mark.variance))
    names: Set[str] = set()
    waiting = list(keys)
    while waiting:
        ops = _tf.op_walks.ancestors([trace.graph.get_tensor_by_name(key).op for key in waiting])
        new = {op.name for op in ops} - names
        names |= new
        waiting = [
            source for key, of_key in sources.items() if _tf.graph_parts.name_of(key) in new for source in of_key
        ]
    return {id(outside) for outside, key in trace.captures if _tf.graph_parts.name_of(key) in names}


def _handle_of(source: Union[tf.Variable, tf.Tensor]) -> Optional[tf.Tensor]:
    return local_variable(source).handle if isinstance(source, tf.Variable) else None


def _require_examples(output: tf.Tensor) -> None:
    """Raise unless the first axis of an output of the trace, where the number of examples is unknown, is unknown."""
    if output.shape.rank == 0 or (output.shape.rank and output.shape.as_list()[0] is not None):
        raise ValueError(f"{NOT_BATCHED} Received: {output!r}.")
