"""Compute a function of a batch in segments, so that operations across examples see the whole batch (law L19).

    batch -> segment: each micro-batch in turn -> barrier -> segment: each micro-batch in turn -> ... -> outputs

All micro-batches reach a barrier before any of them passes it. Barriers are means and variances over the batch,
functions that are called with the whole batch at once, and the outputs, from which a loss is computed. A segment is a
level of the traced function; see `_cut_graph`. Tensors that later segments need are kept until the last of these has
run. For the gradient, only the tensors that cross a few cuts are kept. The backward pass goes through the segments in
reverse. It first recomputes the group of segments behind each kept cut. Then it recomputes each segment of the group
together with its gradient, one micro-batch after the other.

The gradient of a mean or variance by the micro-batches follows. Let x be the normalised tensor and N the number of
values of a feature in the whole batch. Let m and v be the gradients of the loss by mean and variance, summed by the
later segment over its micro-batches. The earlier segment differentiates, for each micro-batch,

    m * sum(x) / N + v * sum((x - mean)^2) / N

where `mean` is a constant, because the derivative of the variance by it is 0. So the gradient by x is

    m / N + 2 * v * (x - mean) / N
"""

import copy
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from accum import _check, _tf
from accum._engine._batch import Batch, Size
from accum._engine._combined import JoinedRows, Kept, KeptTensors, Pooled, PooledFinite, SlicesSum, Sum
from accum._engine._cut_graph import CutGraph, Phase
from accum._engine._draws import uniform_seed
from accum._engine._gradients import weighted
from accum._engine._graph_variables import Assigned
from accum._engine._kept_cuts import Crossing, chosen_cuts, kept_keys, read_again
from accum._engine._linked_gradient import NOT_TWICE
from accum._engine._micro_batches import FIRST, WHOLE, Index, MicroBatches
from accum._engine._replicas import sum_of_group
from accum._engine._statistics import Moments, over_replicas
from accum._engine._trace import LossMark, Trace, WholeMark, is_differentiable
from accum._tf import Gradient, Nested, Scalar, tf

Key = str


class Segments:
    """A traced function in segments, which can be computed any number of times.

    Args:
      trace: a `Trace`.
      recompute: whether to compute groups of segments again instead of keeping what crosses all cuts.

    Attributes:
      graph: the `CutGraph`.
      groups: list of (first level, level after the last, `Phase` that computes the group's tensors again, or None).
      last_uses: {key of a tensor: the last level whose forward phase uses it}.
      first_needs: {key of a tensor that the gradient needs: the lowest level before whose end it does}.
      kept: keys that are kept for the gradient.
      backward: list of the backward `Phase` of each level, which may read what the level itself has made.
      of_positions: keys of gradients by rows that depend on no example.
    """

    def __init__(self, trace: Trace, recompute: bool = True) -> None:
        self.graph = graph = CutGraph(trace)
        self._functions: Dict[int, Tuple[Callable[..., Nested], Phase]] = {}
        uses = {
            key: Crossing(
                level, min(backward - {level}, default=None), max(later | backward | {level}), _bytes(graph, key)
            )
            for key, (level, later, backward) in graph.uses.items()
        }
        cuts = chosen_cuts(list(uses.values()), graph.leveled.count, recompute)
        self.last_uses = {key: max(later | {level}) for key, (level, later, _) in graph.uses.items()}
        is_needed = {key: one for key, one in uses.items() if graph.uses[key][1] or graph.uses[key][2]}
        self.kept = kept_keys(is_needed, cuts)
        self.kept |= {key for key in uses if _tf.graph_parts.name_of(key) in graph.leveled.drawn}
        self.groups: List[Tuple[int, int, Optional[Phase]]] = []
        again: List[Key] = []
        for begin, end in zip(cuts, cuts[1:] + [graph.leveled.count]):
            inner = [
                key
                for key, (level, _, backward) in graph.uses.items()
                if begin <= level and any(level < use < end for use in backward) and key not in self.kept
            ]
            again += inner
            if end == graph.leveled.count:  # the forward pass has just computed them
                self.kept.update(inner)
                inner = []
            self.groups.append((begin, end, graph.recomputed(begin, inner) if inner else None))
        needs = [(level, phase) for _, end, phase in self.groups if phase is not None for level in [end - 1]]
        needs += [(phase.level, phase) for phase in graph.wholes_backward]
        self.first_needs = {key: min(backward) for key, (_, _, backward) in graph.uses.items() if backward}
        for level, phase in needs:
            self.first_needs.update({key: min(level, self.first_needs.get(key, level)) for key in phase.feeds})
        candidates = [
            key
            for key in dict.fromkeys(again + sorted(self.kept))
            if key in self.first_needs and _tf.graph_parts.name_of(key) in graph.backward[uses[key].level].nodes
        ]
        read = read_again(uses, candidates, self.kept, cuts, graph.leveled.count)
        self.first_needs.update({key: uses[key].level for key in read})
        self.backward = graph.reading(read)
        rows = {grad[0]: trace.graph.get_tensor_by_name(grad[1]) for grad in trace.grads if isinstance(grad, tuple)}
        alone = _tf.op_walks.depends_on_variables_alone
        self.of_positions = {key for key, tensor in rows.items() if alone(tensor, or_lengths=True)}

    def run(self, phase: Phase, feeds: Dict[Key, tf.Tensor]) -> Dict[Key, tf.Tensor]:
        """Compute a phase, given {key: tensor} for what it takes. It is a function of its own, which is made once."""
        if not tf.executing_eagerly():
            return self.graph.run(phase, feeds)
        keys = [key for key in phase.feeds if key in feeds]
        if id(phase) not in self._functions:

            @_tf.graphs.untouched_by_autograph
            def function(*values: tf.Tensor) -> List[tf.Tensor]:
                fetched = self.graph.run(phase, dict(zip(keys, values)))
                return [fetched[key] for key in phase.fetches]

            traced = tf.function(function).get_concrete_function(*map(self.graph.leveled.spec, keys))
            self._functions[id(phase)] = traced, phase
        # Eagerly, no tape of the user's must record this, or it would keep all tensors of all micro-batches.
        with tf.init_scope():
            fetched = self._functions[id(phase)][0](*[feeds[key] for key in keys])
        return dict(zip(phase.fetches, fetched if isinstance(fetched, (list, tuple)) else [fetched]))


def _bytes(graph: CutGraph, key: Key) -> int:
    """Return the bytes of a tensor, for one example."""
    spec = graph.leveled.spec(key)
    size = spec.dtype.size
    for length in (spec.shape.as_list() if spec.shape.rank else [1])[1:]:
        size *= length or 1
    return size


def _stored_whole(tensor: tf.Tensor) -> KeptTensors:
    """Return a tensor of all micro-batches that was computed at once: it has no `others`."""
    return KeptTensors(tensor, None, lambda: tensor)


def _assign(finals: Sequence[Assigned], values: Dict[Key, tf.Tensor]) -> None:
    for final in finals:
        _tf.graph_parts.assign_handle(final.handle, values[final.value])


class _Forward(NamedTuple):
    """What the forward phase of a level leaves of all micro-batches: lists of `Combined`, then of their results."""

    crossing: List[Any]  # what later phases need
    outputs: List[Any]
    losses: List[Any]
    statistics: List[Any]  # the moments of the barriers that the level comes up to
    moments: List[Any]  # those that are only reported


class _Backward(NamedTuple):
    """What the backward phase of a level leaves of all micro-batches: lists of `Combined`, then of their results."""

    late: List[Any]  # what the backward phases of earlier levels need
    sums: List[Any]  # gradients by statistics and variables
    rows: List[Any]  # gradients by rows of variables
    watched: List[Any]  # gradients by arguments


class SegmentedFunction:
    """One run of a function in segments, and its gradient.

    Args:
      segments: `Segments`.
      micro_batches: `MicroBatches` of the batch.
      group_size: int, the number of replicas over whose examples statistics are computed together.
      weight: function that returns the scalar >= 0 by which this replica's gradients will be multiplied later, or None
        for 1; called when they are computed. See `_statistics.over_replicas`.
      draws: object with functions `seed_of_call` and `known_base`, as `BatchDraws` has; None for random numbers of this
        batch alone.
    """

    def __init__(
        self,
        segments: Segments,
        micro_batches: MicroBatches,
        group_size: int,
        weight: Callable[[], Optional[Scalar]],
        draws: Any,
    ) -> None:
        self._draws = draws
        self._segments = segments
        self._cut = segments.graph
        self._trace = segments.graph.trace
        self._micro = micro_batches
        self._group_size = group_size
        self._weight = weight
        self._stored: Dict[Key, KeptTensors] = {}
        self._kept: Dict[Key, KeptTensors] = {}  # what `forward` leaves to each run of `backward`
        self._whole_values: Dict[Key, tf.Tensor] = {}  # what is the same for all micro-batches
        self._begun: Dict[Key, tf.Tensor] = {}  # those of them that are known when the run begins
        self._is_at_once = False
        self._leaves: Optional[List[tf.Tensor]] = None  # the examples of the one micro-batch that is computed
        self._loss_grads: Dict[Optional[Key], Tuple[LossMark, tf.Tensor]] = {}
        cut = self._cut
        self._of_wholes = {key for phase in cut.wholes + cut.wholes_backward for key in phase.feeds}
        self._of_wholes.update(key for mark in self._trace.wholes for key in mark.inputs + mark.part_grads if key)
        self._wholes: List[Moments] = [Moments(None, None, None)] * len(self._trace.statistics)
        pairs = zip(self._trace.grads, self._trace.shapes)
        self._rows = {grad[0]: (grad[1], shape) for grad, shape in pairs if isinstance(grad, tuple)}

    def forward(self) -> Tuple[List[tf.Tensor], List[tf.Tensor]]:
        """Run the function. Returns (its outputs, the losses that were added)."""
        cut, trace = self._cut, self._trace
        self._zeros: Dict[Tuple[tf.DType, Tuple[Optional[int], ...]], tf.Tensor] = {}
        if any(trace.seed in phase.feeds for phase in [*cut.forward, *cut.wholes, *cut.first, cut.finals]):
            self._whole_values[trace.seed] = self._seed_of_batch()
        for key, handle in cut.variables.read.items():
            self._whole_values[key] = _tf.graph_parts.read_handle(handle, cut.leveled.spec(key).dtype)
        for phase, (key, final) in zip(cut.first, cut.variables.assigned_first.items()):
            self._whole_values[key] = self._segments.run(phase, self._feeds(phase, FIRST))[final.value]
        self._begun = dict(self._whole_values)
        fetched = self._fetched()
        self._kept = dict(self._stored)
        self._end_states()
        self._receive(fetched)
        return [fetched[key] for key in trace.outputs], [fetched[loss.value] for loss in trace.losses]

    def again(
        self,
        derive: Callable[[Dict[Key, tf.Tensor], Dict[int, tf.Tensor], List[tf.Tensor]], List[tf.Tensor]],
        given: Sequence[tf.Tensor],
        are_rows: Sequence[bool],
        like: Sequence[tf.Tensor],
    ) -> List[tf.Tensor]:
        """Compute again what `forward` has returned, for a second derivative, and what follows from it.

        It has the same draws, and nothing is assigned. Where no examples meet in the function, each micro-batch is
        computed apart. Otherwise, the batch is one micro-batch.

        Args:
          derive: function of {key: tensor} of outputs and losses; of {id of the handle of a variable in this graph: the
            value as which `forward` read it}; and of the parts of `given`.
          given: tensors whose first axis is the batch.
          are_rows: for each of the results of `derive`, whether their first axis is the batch. Others are added up.
          like: for each of them, a tensor of its dtype and of its shape for the batch.

        Returns:
          The results for the batch.

        Raises:
          ValueError: the function normalises by statistics, has operations with gradients of their own, or effects,
            draws what can't be drawn again, or reads a variable both before and behind an assignment to it.
        """
        self._require_repeatable()
        batch, watched = self._micro.batch, given[: len(self._trace.watched_grads)]
        places: Dict[int, List[int]] = {}  # of a tensor in the batch, which may be several of its inputs
        for place, one in enumerate(batch.tensors):
            places.setdefault(id(one), []).append(place)
        if any(id(one) not in places for one in watched):
            raise ValueError(NOT_TWICE)

        def own_leaves(leaves: Sequence[tf.Tensor]) -> List[tf.Tensor]:
            """Return those of the batch's tensors, each another one, that stand for what is watched."""
            following = {key: iter(of_key) for key, of_key in places.items()}
            return [leaves[next(following[id(one)])] for one in watched]

        def here(one: tf.Tensor) -> tf.Tensor:
            """Return a tensor of its own, even for one that is given twice: each has a derivative of its own."""
            return tf.identity(_tf.graph_parts.captured(one))

        if self._trace.wholes or self._trace.losses or len(self._cut.forward) > 1:
            _check.warn(
                "A gradient of a gradient is computed for the whole batch at once, which is exact but saves no memory, "
                "because examples meet in the network, or it adds losses. [accum: not-split]"
            )
            run, states = self._beginning_again()
            run._leaves = [here(one) for one in batch.tensors]
            others = [here(one) for one in given[len(watched) :]]
            return derive(run._fetched(), states, own_leaves(run._leaves) + others)
        (phase,) = self._cut.forward

        def combined(values: Sequence[Any]) -> List[Any]:
            return [JoinedRows(one) if has_rows else Sum(one) for one, has_rows in zip(values, are_rows)]

        def begin() -> List[Any]:
            zeros = [_float32(tf.zeros_like(_tf.graph_parts.captured(one))) for one in like]
            specs = [
                tf.TensorSpec([None] + one.shape.as_list()[1:] if one.shape.rank else None, one.dtype) for one in like
            ]
            return combined([spec if has_rows else zero for spec, zero, has_rows in zip(specs, zeros, are_rows)])

        def micro_batch(_: Nested, index: Index) -> List[Any]:
            run, states = self._beginning_again()
            run._leaves = batch.flatten(self._micro.part(batch, index))
            parts = [self._micro.part(Batch(one), index) for one in given[len(watched) :]]
            fetched = self._segments.run(phase, run._feeds(phase, index))
            values = derive(fetched, states, own_leaves(run._leaves) + parts)
            return combined([one if has_rows else _float32(one) for one, has_rows in zip(values, are_rows)])

        totals = self._micro.run(micro_batch, begin)
        return [tf.cast(total, one.dtype) for total, one in zip(totals, like)]

    def _require_repeatable(self) -> None:
        """Raise unless what `forward` has returned can be computed again and differentiated twice."""
        trace, phases = self._trace, self._cut.forward + self._cut.wholes
        nodes = {name for phase in phases for name in phase.nodes} & _tf.graph_parts.own_gradients_in(trace.graph)
        drawn = map(trace.graph.get_operation_by_name, self._cut.leveled.drawn)
        acts = any(phase.effects for phase in phases) or any(map(_tf.random_ops.random_op_of, drawn))
        handles = [id(handle) for key, handle in self._values_read() if is_differentiable(self._cut.leveled.spec(key))]
        if nodes or trace.statistics or acts or self._cut.variables.read_between or len(handles) > len(set(handles)):
            raise ValueError(NOT_TWICE)

    def _values_read(self) -> List[Tuple[Key, tf.Tensor]]:
        """Return (key, handle) for each value of a variable that the forward phases take."""
        taken = {key for phase in self._cut.forward + self._cut.wholes for key in phase.feeds}
        return [pair for pair in self._cut.variables.read_as() if pair[0] in taken]

    def _beginning_again(self) -> Tuple["SegmentedFunction", Dict[int, tf.Tensor]]:
        """Return a run in the current graph that begins with the values of this one, and the `states` of `again`."""
        run, states = copy.copy(self), {}
        run._is_at_once, run._stored, run._whole_values = True, {}, dict(self._begun)
        for key, handle in self._values_read():
            value = tf.stop_gradient(_tf.graph_parts.captured(self._begun[key]))
            run._whole_values[key] = states[id(_tf.graph_parts.captured(handle))] = value
        return run, states

    def _fetched(self) -> Dict[Key, Any]:
        """Run the forward phases. Returns {key: what is fetched of the whole batch}."""
        cut, trace = self._cut, self._trace
        fetched: Dict[Key, Any] = {}
        losses = {loss.value: loss for loss in trace.losses}
        for level, phase in enumerate(cut.forward):
            for number, (mark, whole) in enumerate(zip(trace.wholes, cut.wholes)):
                if whole.level == level:
                    results, parts = self._run_whole(mark, whole), zip(mark.parts, mark.results)
                    wholes = {key: with_examples(results[one], self._micro.batch.count, NOT_ROWS) for key, one in parts}
                    self._stored.update({key: _stored_whole(value) for key, value in wholes.items()})
                    if not self._is_at_once:
                        _assign(cut.variables.assigned_at_once.get(number, []), results)
            if phase.fetches or phase.effects:
                self._forward(level, phase, losses, fetched)
            for key in [key for key in self._stored if self._is_done(key, level)]:
                del self._stored[key]
        return fetched

    def _seed_of_batch(self) -> tf.Tensor:
        return (
            uniform_seed()
            if self._draws is None
            else self._draws.seed_of_call(self._trace.draws, self._trace.shared_draws)
        )

    @property
    def _base(self) -> Scalar:
        """How many examples were before those of the batch, an int64 scalar tensor or 0."""
        return 0 if self._draws is None else self._draws.known_base()

    def _is_done(self, key: Key, level: int) -> bool:
        return key not in self._segments.kept and self._segments.last_uses.get(key, level + 1) <= level

    def _end_states(self) -> None:
        """Assign, once, what does not depend on the batch."""
        cut = self._cut
        values = self._segments.run(cut.finals, self._feeds(cut.finals, FIRST)) if cut.finals.fetches else {}
        values.update((final.value, self._begun[key]) for key, final in cut.variables.assigned_first.items())
        _assign([*cut.variables.assigned_first.values(), *cut.variables.assigned], values)

    def _receive(self, fetched: Dict[Key, Any]) -> None:
        ordered = sorted(range(len(self._wholes)), key=lambda number: self._trace.statistics[number].barrier.order)
        for number in ordered:
            self._trace.statistics[number].barrier.receive(self._wholes[number])
        for moments, receive in self._trace.moments:
            receive(fetched[moments.mean])

    def _forward(self, level: int, phase: Phase, losses: Dict[Key, LossMark], fetched: Dict[Key, Any]) -> None:
        trace, cut = self._trace, self._cut
        ends = [
            (number, mark)
            for number, mark in enumerate(trace.statistics)
            if cut.leveled.level(mark.moments.mean) == level
        ]
        others = [moments for moments, _ in trace.moments if (cut.leveled.level(moments.mean) or 0) == level]
        crossing = [key for key in phase.fetches if key in cut.uses]
        outputs = [
            key
            for key in dict.fromkeys(trace.outputs)
            if key in phase.fetches and (cut.leveled.level(key) or 0) == level
        ]
        added = [key for key in losses if key in phase.fetches]
        reusable = self._reusable(crossing, lambda key: self._is_done(key, level))

        def combined(
            value: Callable[[Key], tf.Tensor],
            part_of_loss: Callable[[Key], tf.Tensor],
            moment: Callable[[Key], tf.Tensor],
        ) -> _Forward:
            return _Forward(
                [Kept(value(key), reusable.get(key)) for key in crossing],
                [JoinedRows(value(key)) for key in outputs],
                [Sum(part_of_loss(key)) for key in added],
                [PooledFinite(*[moment(key) for key in mark.moments]) for _, mark in ends],
                [Pooled(*[moment(key) for key in keys]) for keys in others],
            )

        def micro_batch(_: Nested, index: Index) -> _Forward:
            values = self._segments.run(phase, self._feeds(phase, index))
            value = values.__getitem__
            return combined(value, lambda key: self._part_of(losses[key], value(key), index), value)

        zeros = self._zeros_like
        results: _Forward
        if self._is_at_once:
            results = self._micro.run_at_once(micro_batch)
            results = results._replace(crossing=[_stored_whole(kept.joined()) for kept in results.crossing])
        else:
            results = self._micro.run(micro_batch, lambda: combined(self._cut.leveled.spec, zeros, zeros))
        self._stored.update(zip(crossing, results.crossing))
        fetched.update(zip(outputs, results.outputs))
        fetched.update(zip(added, results.losses))
        for (number, mark), own in zip(ends, results.statistics):
            part = Moments(*own)
            whole = part if self._group_size == 1 else over_replicas(part, None, self._group_size)
            self._wholes[number] = whole
            self._whole_values.update(zip((mark.number, mark.mean, mark.variance), whole))
            if mark.whole_count is not None and mark.whole_mean is not None:
                self._whole_values[mark.whole_count], self._whole_values[mark.whole_mean] = whole.count, whole.mean
        fetched.update({moments.mean: Moments(*own) for moments, own in zip(others, results.moments)})

    def _zeros_like(self, key: Key) -> tf.Tensor:
        """Return zeros for a sum, the same for all tensors of a shape in this pass."""
        tensor = self._trace.graph.get_tensor_by_name(key)
        kind = tensor.dtype, tuple(tensor.shape.as_list())
        if kind not in self._zeros:
            self._zeros[kind] = tf.zeros(tensor.shape, _tf.variables.at_least_float32(tensor.dtype))
        return self._zeros[kind]

    def _reusable(self, keys: Sequence[Key], is_done: Callable[[Key], bool]) -> Dict[Key, KeptTensors]:
        """Return {key of a tensor that a loop makes: a tensor of the same shape that this loop reads last}."""
        free = [kept for key, kept in self._stored.items() if key not in self._of_wholes and is_done(key)]
        reusable = {}
        for key in keys:
            match = next((kept for kept in free if kept.is_like(self._cut.leveled.spec(key))), None)
            if match is not None:
                reusable[key] = match
                free.remove(match)
        return reusable

    def _run_whole(self, mark: WholeMark, phase: Phase) -> Dict[Key, tf.Tensor]:
        """Compute a phase of what is called with the whole batch."""
        for key, input_key in zip(mark.arguments, mark.inputs):
            self._whole_values[key] = self._stored[input_key].joined()
        results = self._segments.run(phase, self._feeds(phase, WHOLE))
        for key in mark.arguments:
            del self._whole_values[key]
        return results

    def _part_of(self, loss: LossMark, value: tf.Tensor, index: Index) -> tf.Tensor:
        """Return the part of a micro-batch in a loss of the batch."""
        value = _float32(value)
        if self._cut.leveled.level(loss.value) is None or not loss.is_sum:
            return weighted(value, self._micro.share(index, value.dtype))
        return value

    def _feeds(self, phase: Phase, index: Index) -> Dict[Key, tf.Tensor]:
        """Return {key: tensor} for what a phase takes of a micro-batch."""
        trace = self._trace
        feeds: Dict[Key, tf.Tensor] = {}
        leaves = self._leaves
        for key in phase.feeds:
            if key in self._whole_values:
                feeds[key] = self._cast(key, self._whole_values[key])
            elif key in self._stored:
                feeds[key] = self._cast(key, self._at(self._stored[key], index))
            elif key in trace.inputs:
                if leaves is None:
                    leaves = self._micro.batch.flatten(self._micro.part(self._micro.batch, index))
                feeds[key] = leaves[trace.inputs.index(key)]
            elif key == trace.share:
                feeds[key] = self._micro.share(index)
            elif key == trace.total:
                feeds[key] = tf.cast(self._micro.batch.count, tf.int64) + self._base
            elif key == trace.position:
                feeds[key] = tf.cast(self._micro.begin(index), tf.int64) + self._base
            elif key in self._loss_grads:
                loss, grad = self._loss_grads[key]
                share = tf.ones([], grad.dtype) if loss.is_sum else self._micro.share(index, grad.dtype)
                feeds[key] = self._cast(key, grad * share)
            elif self._cut.leveled.is_cotangent(key):  # of what has no effect on the loss
                tensor = trace.graph.get_tensor_by_name(key)
                feeds[key] = tf.zeros(tensor.shape, tensor.dtype)
        return feeds

    def _cast(self, key: Key, value: tf.Tensor) -> tf.Tensor:
        return tf.cast(value, self._cut.leveled.spec(key).dtype)

    def _at(self, kept: KeptTensors, index: Index) -> tf.Tensor:
        if kept.others is None:
            return self._micro.part(Batch(kept.first), index)
        return kept.first if index is FIRST else kept.at(index)

    # ------------------------------------------------------------------------------------------------------------

    def backward(
        self, grads: Sequence[Optional[tf.Tensor]], loss_grads: Sequence[tf.Tensor]
    ) -> Tuple[List[Optional[Gradient]], List[Optional[tf.Tensor]]]:
        """Differentiate what `forward` has returned, as often as a persistent tape asks for it.

        Args:
          grads: list of the gradients by the outputs, None for those that can't have one.
          loss_grads: list of the gradients by the losses.

        Returns:
          (list of the gradients by the variables, in float32 at least, or None; list of those by the watched arguments)
        """
        cut, trace = self._cut, self._trace
        self._zeros = {}
        self._by_watched: Dict[Key, tf.Tensor] = {}
        output_grads = [(key, grad) for key, grad in zip(trace.cotangents, grads) if key is not None]
        self._stored = {key: copy.copy(kept) for key, kept in self._kept.items()}
        self._stored.update({key: _stored_whole(grad) for key, grad in output_grads})
        self._loss_grads = {loss.cotangent: (loss, grad) for loss, grad in zip(trace.losses, loss_grads)}
        totals: Dict[Key, Gradient] = {}
        after: Sequence[tf.Tensor] = [grad for _, grad in output_grads] + list(loss_grads)
        for begin, end, phase in reversed(self._segments.groups):
            if phase is not None:
                self._recompute(phase, after)
            for level in reversed(range(begin, end)):
                if self._segments.backward[level].fetches or self._segments.backward[level].effects:
                    after = self._backward(level, totals, after)
                for mark, whole in zip(trace.wholes, cut.wholes_backward):
                    if whole.level == level:
                        self._backward_whole(mark, whole, totals)
                for key in [key for key in self._stored if self._is_done_backward(key, level)]:
                    del self._stored[key]
        return self._by_variables(totals), [self._by_watched.get(key or "") for key in trace.watched_grads]

    def _is_done_backward(self, key: Key, level: int) -> bool:
        """Whether no earlier level needs a tensor."""
        if key in self._cut.late:
            return self._cut.late[key] >= level
        return key in self._cut.uses and self._segments.first_needs.get(key, level) >= level

    def _recompute(self, phase: Phase, after: Sequence[tf.Tensor]) -> None:
        """Compute the tensors of a group again."""

        def combined(value: Callable[[Key], tf.Tensor]) -> List[Kept]:
            return [Kept(value(key)) for key in phase.fetches]

        def micro_batch(_: None, index: Index) -> List[Kept]:
            return combined(self._segments.run(phase, self._feeds(phase, index)).__getitem__)

        kept = self._micro.run(micro_batch, lambda: combined(self._cut.leveled.spec), after)
        self._stored.update(zip(phase.fetches, kept))

    def _backward(self, level: int, totals: Dict[Key, Gradient], after: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """Compute a segment again with its gradient. Returns tensors that are there when it is done."""
        cut, trace = self._cut, self._trace
        phase = self._segments.backward[level]
        rows = self._rows
        part_grads = {key for mark in trace.wholes for key in mark.part_grads}
        sums = {key for mark in trace.statistics for key in mark.grads} | set(cut.summed)
        sums |= {grad for grad in trace.grads if isinstance(grad, str)}
        own_rows = [key for key in phase.fetches if key in rows]
        late = [key for key in phase.fetches if key in cut.late or key in part_grads]
        summed = [key for key in phase.fetches if key in sums]
        watched = [key for key in phase.fetches if key in trace.watched_grads]
        reusable = self._reusable(late, lambda key: self._is_done_backward(key, level))

        def combined(value: Callable[[Key], tf.Tensor], added: Callable[[Key], tf.Tensor]) -> _Backward:
            return _Backward(
                [Kept(value(key), reusable.get(key)) for key in late],
                [Sum(added(key)) for key in summed],
                [
                    SlicesSum(value(key), value(rows[key][0]), rows[key][1], key in self._segments.of_positions)
                    for key in own_rows
                ],
                [JoinedRows(value(key)) for key in watched],
            )

        def micro_batch(_: None, index: Index) -> _Backward:
            value = self._segments.run(phase, self._feeds(phase, index)).__getitem__
            return combined(value, lambda key: _float32(value(key)))

        results: _Backward = self._micro.run(
            micro_batch, lambda: combined(self._cut.leveled.spec, self._zeros_like), after
        )
        self._stored.update(zip(late, results.late))
        totals.update(zip(summed, results.sums))
        totals.update(zip(own_rows, results.rows))
        self._by_watched.update(zip(watched, results.watched))
        for mark in trace.statistics:
            if any(grad in summed for grad in mark.grads):
                by_statistics = self._over_replicas([totals.get(grad) for grad in mark.grads])  # type: ignore[arg-type]
                pairs = zip(mark.cotangents, by_statistics)
                self._whole_values.update({key: grad for key, grad in pairs if grad is not None and key is not None})
        return [getattr(total, "values", total) for total in results.sums + results.rows] or after

    def _backward_whole(self, mark: WholeMark, phase: Phase, totals: Dict[Key, Gradient]) -> None:
        """Differentiate what is called with the whole batch."""
        for cotangent, grad in zip(mark.result_cotangents, mark.part_grads):
            if cotangent is not None and grad is not None:
                self._whole_values[cotangent] = self._stored.pop(grad).joined()
        fetched = self._run_whole(mark, phase)
        for cotangent, grad in zip(mark.input_cotangents, mark.argument_grads):
            if cotangent is not None and grad is not None:
                self._stored[cotangent] = _stored_whole(fetched[grad])
        for key, value in fetched.items():
            if key in self._trace.watched_grads:
                self._by_watched[key] = value
            else:
                totals[key] = self._as_slices(key, fetched)

    def _as_slices(self, key: Key, fetched: Dict[Key, tf.Tensor]) -> Gradient:
        """Return what a phase has fetched as the gradient of a variable, or of rows of it."""
        if key not in self._rows:
            return _float32(fetched[key])
        indices, shape = self._rows[key]
        return tf.IndexedSlices(_float32(fetched[key]), fetched[indices], tf.constant(shape, fetched[indices].dtype))

    def _by_variables(self, totals: Dict[Key, Gradient]) -> List[Optional[Gradient]]:
        cut = self._cut
        feeds = {key: totals[key] for key in cut.weights.feeds if key in totals}
        for key in cut.weights.feeds:
            if key in self._whole_values:
                feeds[key] = self._whole_values[key]
            elif key in self._loss_grads:
                feeds[key] = self._loss_grads[key][1]
        for key in feeds:
            feeds[key] = tf.cast(feeds[key], self._cut.leveled.spec(key).dtype)
        if cut.weights.fetches:
            fetched = self._segments.run(cut.weights, feeds)
            totals.update({key: self._as_slices(key, fetched) for key in fetched})
        return [
            None if grad is None else totals[grad if isinstance(grad, str) else grad[0]] for grad in self._trace.grads
        ]

    def _over_replicas(self, grads: Sequence[Optional[tf.Tensor]]) -> List[Optional[tf.Tensor]]:
        """Add up the gradients by statistics over the replicas, which share them, each by the weight of its replica."""
        if self._group_size == 1 or all(grad is None for grad in grads):
            return list(grads)
        weight = self._weight()
        weight = tf.cast(1.0 if weight is None else weight, next(grad for grad in grads if grad is not None).dtype)
        sums = sum_of_group([weight * grad for grad in grads if grad is not None], self._group_size)
        following = iter(sums)
        return [None if grad is None else tf.math.divide_no_nan(next(following), weight) for grad in grads]


def _float32(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, _tf.variables.at_least_float32(tensor.dtype))


NOT_BATCHED = (
    "The outputs of micro-batches are concatenated, so the first axis of each must be the batch: return one entry for "
    f"each example{_check.OR_AT_ONCE}. [accum: batch-axis]"
)


NOT_ROWS = (
    "A tensor that is computed from all examples should have one entry for each of them, but has another number for "
    "this batch: leave out `micro_batch_size`, or let lengths be multiples of the number of examples, or constants."
    " [accum: examples-meet]"
)


def with_examples(tensor: tf.Tensor, count: Size, message: str = NOT_BATCHED) -> tf.Tensor:
    """Return a tensor, and raise, or let the graph raise, unless its first axis is the batch."""
    static_size = tensor.shape.as_list()[0] if tensor.shape.rank else None
    if static_size is not None and isinstance(count, int):
        if static_size != count:
            raise ValueError(f"{message} Received: {tensor!r}.")
        return tensor
    check = tf.debugging.assert_equal(tf.shape(tensor)[0], count, message=message)
    with tf.control_dependencies([check]):
        tensor = tf.identity(tensor)
    if isinstance(count, int) and tensor.shape.rank:
        tensor.set_shape([count] + tensor.shape.as_list()[1:])
    return tensor
