"""Rows behind batch normalisation: the part of the graph before them, in segments, over the whole batch (law L19)."""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

from accum import _tf
from accum._engine._batch import Batch
from accum._engine._found_statistics import Statistics
from accum._engine._micro_batches import MicroBatches
from accum._engine._part import Key, Part
from accum._engine._segments import SegmentedFunction
from accum._engine._statistics import Moments
from accum._engine._trace import Marks, is_differentiable
from accum._engine._whole_call import segments_of
from accum._rows import Layout
from accum._tf import Gradient, tf
from accum.compat.v1._micro_batch_loop import examples_first, examples_in_place


class Segmented(NamedTuple):
    """Rows of a whole batch that were computed in segments.

    Attributes:
      rows: the joined rows, in the order of the part's fetches.
      statistics: {key of a statistic in the graph: that of the whole batch}.
      gradients: function of the gradients by `rows`, each a tensor or None, that returns those by the sources.
    """

    rows: List[tf.Tensor]
    statistics: Dict[Key, tf.Tensor]
    gradients: Callable[[Sequence[Optional[tf.Tensor]]], List[Optional[Gradient]]]


def segmented(
    part: Part,
    fetches: Sequence[tf.Tensor],
    layouts: Sequence[Layout],
    fed: Dict[Key, tf.Tensor],
    known: Dict[Key, tf.Tensor],
    size: int,
    sources: Sequence[tf.Tensor],
    statistics: Sequence[Statistics],
    draw: Callable[[tf.Operation, Dict[str, Any], Marks, Any], None],
    recompute: bool,
) -> Segmented:
    """Compute a part of the graph with batch normalisation, whose statistics are those of the whole batch.

    Args:
      part: the `Part`, without loops and conditionals of TF 1.
      fetches: what it computes, rows.
      layouts: where the examples lie in each of them.
      fed: {key of a tensor that is fed: its value in the batch}; all share their first axis.
      known: {key of a tensor that the part takes from the graph: what it takes instead}.
      size: the largest number of examples in a micro-batch.
      sources: tensors of its boundary, or handles of variables, by which to differentiate.
      statistics: what is found in it.
      draw: function that replaces the random numbers of an operation of the part, given the copies and their number
        of examples.
      recompute: as for `segments_of`.
    """
    batch = Batch(list(fed.values()))
    names: Dict[Key, Key] = {}
    moments: Dict[Key, Moments] = {}
    plain = {one.name: tf.identity(one) for one in part.boundary if one.dtype != one.dtype.base_dtype}  # no refs
    plain.update(known)

    def here(tensor: tf.Tensor) -> tf.Tensor:
        return _tf.graph_parts.captured(plain.get(tensor.name, tensor))

    def function(tensors: Sequence[tf.Tensor], marks: Marks) -> List[tf.Tensor]:
        values = dict(zip(fed, tensors))
        names.update((tensor.name, key) for key, tensor in values.items())
        copies = part.compute(values, here)
        for op in part.ops:
            for copy, tensor in zip(copies[op.name].outputs, op.outputs):
                if tensor.shape.rank and tensor.shape.as_list()[0] is None:
                    copy.set_shape(tensor.shape)  # which the program may have set itself
        count = batch.count_of(batch.packed(tensors))
        for op in part.ops:
            draw(op, copies, marks, count)
        names.update((copies[op.name].outputs[i].name, one.name) for op in part.ops for i, one in enumerate(op.outputs))
        marks.sources = [here(source) for source in sources]
        return [_by_example(copies[tensor.name], layout, count) for tensor, layout in zip(fetches, layouts)]

    def receive(key: Key, whole: Moments) -> None:
        moments[names[key]] = whole

    segments = segments_of(function, batch, [], recompute, True, receive=receive, looks_for_meetings=False)
    run = SegmentedFunction(segments, MicroBatches(batch, size), 1, lambda: None, None)
    with _tf.graphs.control_flow_of_tf(2):
        rows, _ = run.forward()
    of_batch: Dict[Key, tf.Tensor] = {}
    for one in statistics:
        if one.key not in moments:
            raise RuntimeError(
                f"The statistics of {one.key!r} were not found again in a copy of the graph: please report it."
                " [accum: bug]"
            )
        of_batch.update(one.values(moments[one.key]))

    def gradients(upstream: Sequence[Optional[tf.Tensor]]) -> List[Optional[Gradient]]:
        total = tf.shape(next(iter(fed.values())))[0]
        by_rows = [
            None if grad is None or not is_differentiable(tensor) else _by_example(grad, layout, total)
            for tensor, grad, layout in zip(fetches, upstream, layouts)
        ]
        with _tf.graphs.control_flow_of_tf(2):
            by_sources, _ = run.backward(by_rows, [])
        return by_sources

    return Segmented(
        [_as_before(*each) for each in zip(rows, layouts, [len(one.shape) for one in fetches])], of_batch, gradients
    )


def _by_example(tensor: tf.Tensor, layout: Layout, count: tf.Tensor) -> tf.Tensor:
    """Return rows of `count` examples with one entry for each along the first axis."""
    first = examples_first(tensor, layout, len(tensor.shape), count)
    if layout.per_example == 1:
        return first
    shape = tf.shape(first)
    return tf.reshape(first, tf.concat([[count, shape[0] // tf.maximum(count, 1)], shape[1:]], 0))


def _as_before(tensor: tf.Tensor, layout: Layout, rank: int) -> tf.Tensor:
    """Return rows with the axes that they had before `_by_example`."""
    if layout.per_example != 1:
        shape = tf.shape(tensor)
        tensor = tf.reshape(tensor, tf.concat([[shape[0] * shape[1]], shape[2:]], 0))
    return examples_in_place(tensor, layout, rank)
