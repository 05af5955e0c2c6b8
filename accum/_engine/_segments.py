"""A function of a batch that is computed in segments, so that what looks across examples sees the whole batch (L19).

    batch -> segment: each micro-batch in turn -> barrier -> segment: each micro-batch in turn -> ... -> outputs

All micro-batches come up to a barrier before any passes it. Barriers are means and variances over the batch, layers
that are called with the whole batch at once, and the outputs, on which a loss is computed. Only the tensors between
segments are kept. The gradient goes through the segments in reverse, and computes each of them again, one micro-batch
after the other, under a tape.

The gradient of a mean or variance by the micro-batches is found like this. Let x be what is normalised, N the number of
values of a feature in the whole batch, and let m and v be the gradients of the loss by mean and variance, which the
later segment has added up over its micro-batches. Then the earlier segment differentiates, for each micro-batch,

    m * sum(x) / N + v * sum((x - mean)^2) / N

where `mean` is a constant, because the derivative of the variance by it is 0.
"""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from accum import _tf
from accum._engine._accumulators import weighted
from accum._engine._batch import Batch
from accum._engine._combined import Kept, KeptTensors, Pooled, Sum, gradient_sum
from accum._engine._custom_gradient import custom_gradient
from accum._engine._micro_batches import FIRST, WHOLE, MicroBatches
from accum._engine._moments import Moments, over_replicas
from accum._engine._replicas import sum_of_group
from accum._tf import Gradient, Scalar, tf

Key = str
Tensors = Dict[Key, Any]


class Statistics:
    """A barrier: the mean and variance of each feature over the batch. A face implements it.

    Attributes:
      order: int; statistics are received in this order.
    """

    order = 0

    def moments(self, tensors: Tensors) -> Moments:
        """Return the `Moments` of a micro-batch, given all that its segment knows."""
        raise NotImplementedError

    def parts(self, tensors: Tensors, whole: Moments) -> List[tf.Tensor]:
        """Return the part of a micro-batch in the mean, and in the variance around the constant `whole.mean`."""
        raise NotImplementedError

    def receive(self, whole: Moments) -> None:
        """Receive the `Moments` of the batch, once."""
        raise NotImplementedError


class AddedLoss(NamedTuple):
    """A loss of a micro-batch, a scalar: the mean over its examples, or their sum."""

    value: tf.Tensor
    is_sum: bool


class Ran(NamedTuple):
    """What a segment returns of a micro-batch.

    Attributes:
      tensors: those that later segments or the caller need.
      known: all that it knows, for the statistics at its end.
      losses: list of `AddedLoss`.
      moments: list of (`Moments`, function that receives those of the whole batch, once): further statistics, which
        nothing waits for.
    """

    tensors: Tensors
    known: Tensors
    losses: Sequence[AddedLoss]
    moments: Sequence[Tuple[Moments, Callable[[Moments], Any]]]


class Segment(NamedTuple):
    """A part of the function between two barriers.

    Attributes:
      run: function of a micro-batch of the batch, of the `Tensors` of earlier segments, and of
        {`Statistics`: (mean, variance)}, which returns a `Ran`.
      needs: function of a key: whether this segment reads that tensor of an earlier one.
      starts: the `Statistics` that it uses.
      ends: the `Statistics` that are computed from its tensors.
      variables: the trainable variables that it may use.
      is_whole: whether it runs once, with the whole batch, and not on each micro-batch.
      name: what to call it in an error message.
    """

    run: Callable[[Any, Tensors, Dict[Statistics, Tuple[tf.Tensor, tf.Tensor]]], Ran]
    needs: Callable[[Key], bool]
    starts: Sequence[Statistics]
    ends: Sequence[Statistics]
    variables: Sequence[tf.Variable]
    is_whole: bool
    name: str


class State:
    """The variables that a segment changes when it runs, such as the state of random numbers.

    Args:
      rewound: variables that have to be as they were when a segment is computed again.
      restored: other variables, which only must not have changed after it was computed again.

    Attributes:
      variables: all of them.
    """

    def __init__(self, rewound: Sequence[tf.Variable], restored: Sequence[tf.Variable]) -> None:
        self._rewound = rewound
        self.variables = list(rewound) + list(restored)

    def read(self) -> List[tf.Tensor]:
        """Return the values to which `rewind` can go back, each with an additional first axis."""
        return [tf.expand_dims(var.read_value(), axis=0) for var in self._rewound]

    def rewind(self, values: Sequence[tf.Tensor]) -> None:
        """Go back to what `read` has returned."""
        for var, value in zip(self._rewound, values):
            var.assign(tf.reshape(value, var.shape))

    def read_all(self) -> List[tf.Tensor]:
        """Return the values of all variables, for `restore_all`."""
        return [tf.identity(var.read_value()) for var in self.variables]

    def restore_all(self, values: Sequence[tf.Tensor]) -> None:
        """Set all variables to what `read_all` has returned."""
        for var, value in zip(self.variables, values):
            var.assign(value)


class _Stored(NamedTuple):
    """A tensor of all micro-batches."""

    kept: KeptTensors
    is_whole: bool  # whether it was computed at once


class _Gradients:
    """The gradients that are known when the segments behind have been computed again.

    Attributes:
      by_variables: {id of a variable: gradient, or None}.
      by_tensors: {key of a tensor: list of what is to be added up}.
      by_statistics: {`Statistics`: [gradient by the mean, by the variance]}.
    """

    def __init__(self, grads: Dict[Key, tf.Tensor]) -> None:
        self.by_variables: Dict[int, Optional[Gradient]] = {}
        self.by_tensors = {key: [_stored_whole(grad)] for key, grad in grads.items()}
        self.by_statistics: Dict[Statistics, List[Optional[tf.Tensor]]] = {}


def _stored_whole(tensor: tf.Tensor) -> _Stored:
    return _Stored(KeptTensors(tensor, None, 0, lambda: tensor), True)


class SegmentedFunction:
    """One run of a function in segments, and its gradient.

    Args:
      segments: list of `Segment`, in order.
      micro_batches: `MicroBatches` of the batch.
      state: what the segments change.
      group_size: int, the number of replicas over whose examples statistics are computed together.
      weight: function that returns the scalar >= 0 by which this replica's gradients will be multiplied later, or None
        for 1; called when they are computed. See `_moments.over_replicas`.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        micro_batches: MicroBatches,
        state: State,
        group_size: int = 1,
        weight: Callable[[], Optional[Scalar]] = lambda: None,
    ) -> None:
        self._segments = segments
        self._micro = micro_batches
        self._state = state
        self._group_size = group_size
        self._weight = weight
        self._stored: Dict[Key, _Stored] = {}
        self._states: List[List[_Stored]] = []  # of each segment, before each micro-batch
        self._wholes: Dict[Statistics, Moments] = {}
        self._loss_counts: List[int] = []

    def forward(self, keys: Callable[[Key], bool]) -> Tuple[Tensors, List[tf.Tensor]]:
        """Run the function.

        Args:
          keys: function of a key: whether that tensor of the whole batch is returned.

        Returns:
          ({key: tensor}, list of losses).
        """
        losses: List[tf.Tensor] = []
        for segment in self._segments:
            losses.extend(self._forward(segment))
        for statistics in sorted(self._wholes, key=lambda statistics: statistics.order):
            statistics.receive(self._wholes[statistics])
        return {key: stored.kept.joined() for key, stored in self._stored.items() if keys(key)}, losses

    def _forward(self, segment: Segment) -> List[tf.Tensor]:
        keys: List[Key] = []
        receivers: List[Callable[[Moments], Any]] = []

        def micro_batch(part: Any, index: Any) -> Any:
            before = self._state.read()
            with tf.control_dependencies(before):
                ran = segment.run(part, self._tensors(segment, index), self._statistics(segment))
            keys[:] = list(ran.tensors)
            receivers[:] = [receive for _, receive in ran.moments]
            return [
                [Kept(value) for value in before],
                [Kept(tensor) for tensor in ran.tensors.values()],
                [Sum(self._part_of(loss, part)) for loss in ran.losses],
                [Pooled(*statistics.moments(ran.known)) for statistics in segment.ends],
                [Pooled(*moments) for moments, _ in ran.moments],
            ]

        states, kept, losses, moments, others = self._run(segment, micro_batch)
        self._states.append([_Stored(state, segment.is_whole) for state in states])
        self._stored.update({key: _Stored(tensor, segment.is_whole) for key, tensor in zip(keys, kept)})
        self._loss_counts.append(len(losses))
        for statistics, pooled in zip(segment.ends, moments):
            part = Moments(*pooled)
            self._wholes[statistics] = part if self._group_size == 1 else over_replicas(part, None, self._group_size)
        for receive, pooled in zip(receivers, others):
            receive(Moments(*pooled))
        return losses

    def _run(self, segment: Segment, function: Callable[[Any, Any], Any]) -> Any:
        return self._micro.run_at_once(function) if segment.is_whole else self._micro.run(function)

    def _part_of(self, loss: AddedLoss, part: Any) -> tf.Tensor:
        """Return the part of a micro-batch in a loss of the batch."""
        value = _float32(loss.value)
        return value if loss.is_sum else weighted(value, share_of(self._micro.batch, part, value.dtype))

    def _tensors(self, segment: Segment, index: Any) -> Tensors:
        return {key: self._at(stored, index) for key, stored in self._stored.items() if segment.needs(key)}

    def _at(self, stored: _Stored, index: Any) -> tf.Tensor:
        if index is WHOLE:
            return stored.kept.joined()
        if stored.is_whole:
            return self._micro.part(Batch(stored.kept.first), index)
        return stored.kept.first if index is FIRST else stored.kept.at(index)

    def _statistics(self, segment: Segment) -> Dict[Statistics, Tuple[tf.Tensor, tf.Tensor]]:
        wholes = [(statistics, self._wholes[statistics]) for statistics in segment.starts]
        # New tensors, which a tape can watch within a loop.
        return {statistics: (tf.identity(whole.mean), tf.identity(whole.variance)) for statistics, whole in wholes}

    # ------------------------------------------------------------------------------------------------------------

    def backward(self, grads: Dict[Key, tf.Tensor], loss_grads: Sequence[tf.Tensor]) -> Dict[int, Optional[Gradient]]:
        """Differentiate what `forward` has returned.

        Args:
          grads: {key: gradient by that tensor of the whole batch}.
          loss_grads: list of the gradients by the losses.

        Returns:
          {id of a variable: its gradient, in float32 at least, or None}.
        """
        after = self._state.read_all()
        known = _Gradients(grads)
        losses = list(loss_grads)
        for number in reversed(range(len(self._segments))):
            begin = len(losses) - self._loss_counts[number]
            losses, own_losses = losses[:begin], losses[begin:]
            self._backward(number, known, own_losses)
        self._state.restore_all(after)
        return known.by_variables

    def _backward(self, number: int, known: _Gradients, loss_grads: Sequence[tf.Tensor]) -> None:
        """Compute a segment again, and add the gradients by what it needed to `known`."""
        segment = self._segments[number]
        keys: List[Key] = []

        def micro_batch(part: Any, index: Any) -> Any:
            self._state.rewind([self._at(state, index) for state in self._states[number]])
            tensors, statistics = self._tensors(segment, index), self._statistics(segment)
            keys[:] = [key for key, tensor in tensors.items() if is_differentiable(tensor)]
            sources = [list(segment.variables), [tensors[key] for key in keys], list(statistics.values())]
            with _tf.unwatched(), tf.GradientTape() as tape:
                tape.watch(sources[1:])
                ran = segment.run(part, tensors, statistics)
                targets = self._targets(segment, ran, known, index)
                targets += [(self._part_of(loss, part), grad) for loss, grad in zip(ran.losses, loss_grads)]
            self._check_repeats(segment, ran, index)
            if not targets:
                return tf.nest.map_structure(lambda _: None, sources)
            values, upstream = [value for value, _ in targets], [grad for _, grad in targets]
            by_variables, by_tensors, by_statistics = tape.gradient(values, sources, upstream)
            return [
                [gradient_sum(grad, var, None) for grad, var in zip(by_variables, segment.variables)],
                [None if grad is None else Kept(tf.convert_to_tensor(grad)) for grad in by_tensors],
                [tuple(None if grad is None else Sum(grad) for grad in pair) for pair in by_statistics],
            ]

        by_variables, by_tensors, by_statistics = self._run(segment, micro_batch)
        for var, grad in zip(segment.variables, by_variables):
            known.by_variables[id(var)] = _plus(known.by_variables.get(id(var)), grad)
        for key, kept in zip(keys, by_tensors):
            if kept is not None:
                known.by_tensors.setdefault(key, []).append(_Stored(kept, segment.is_whole))
        for statistics, pair in zip(segment.starts, by_statistics):
            known.by_statistics[statistics] = self._over_replicas(pair)

    def _over_replicas(self, grads: Sequence[Any]) -> List[Optional[tf.Tensor]]:
        """Add up the gradients by statistics over the replicas, which share them, each by the weight of its replica."""
        if self._group_size == 1 or all(grad is None for grad in grads):
            return list(grads)
        weight = self._weight()
        weight = tf.cast(1.0 if weight is None else weight, grads[0].dtype)
        sums = sum_of_group([weight * grad for grad in grads], self._group_size)
        return [tf.math.divide_no_nan(total, weight) for total in sums]

    def _targets(self, segment: Segment, ran: Ran, known: _Gradients, index: Any) -> List[Tuple[tf.Tensor, tf.Tensor]]:
        """Return what is differentiated in a segment, as a list of (tensor, gradient by it)."""
        targets = []
        for key, tensor in ran.tensors.items():
            grads = [tf.cast(self._at(stored, index), tensor.dtype) for stored in known.by_tensors.get(key, ())]
            if grads:
                targets.append((tensor, tf.add_n(grads)))
        for statistics in segment.ends:
            pairs = zip(statistics.parts(ran.known, self._wholes[statistics]), known.by_statistics[statistics])
            targets += [(part, tf.cast(grad, part.dtype)) for part, grad in pairs if grad is not None]
        return targets

    def _check_repeats(self, segment: Segment, ran: Ran, index: Any) -> None:
        """Check that a segment has computed the same once more. The first micro-batch is enough to tell."""
        if self._micro.compiled or (index is not FIRST and not segment.is_whole):  # XLA can't raise
            return
        same = tf.constant(True)
        for key, tensor in ran.tensors.items():
            if tensor.dtype.is_floating:
                before, now = _float32(self._at(self._stored[key], index)), _float32(tensor)
                apart, size = tf.reduce_sum(tf.abs(now - before)), tf.reduce_sum(tf.abs(before))
                allowed = (0.05 if tensor.dtype.size < 4 else 1e-3) * size
                # NaN is the same. In a graph, TensorFlow makes `<=` of `not >`, which NaN is not either.
                same &= (apart <= allowed) | tf.math.is_nan(apart)
        message = (
            f"A layer must compute the same when it is run again on the same micro-batch, but {segment.name} did not. "
            "Random numbers must come from a generator of Keras, and nothing may depend on how often a layer is called."
        )
        if not tf.executing_eagerly():
            tf.debugging.Assert(same, [message])
        elif not same:
            raise ValueError(message)


def with_gradient(
    tensors: Sequence[tf.Tensor],
    variables: Sequence[tf.Variable],
    inputs: Sequence[tf.Tensor],
    backward: Callable[[Sequence[tf.Tensor]], Sequence[Optional[Gradient]]],
) -> List[tf.Tensor]:
    """Return `tensors` such that a tape finds their gradients by `variables` with the function `backward`.

    A tape that needs their gradients by `inputs` raises `ValueError`, because nobody computes them.

    Args:
      tensors: list of float tensors.
      variables: list of trainable variables.
      inputs: list of the float tensors from which `tensors` were computed.
      backward: function of the gradients by `tensors`, which returns those by `variables`, None for no gradient.
    """
    values = [tf.convert_to_tensor(var) for var in variables]
    probes = [_without_gradient(tensor) for tensor in inputs]

    @custom_gradient
    def linked(*args: tf.Tensor) -> Any:
        def grad(*upstream: tf.Tensor) -> List[Optional[Gradient]]:
            found: List[Optional[Gradient]] = [None] * len(tensors)
            return found + list(backward(upstream)) + [tf.zeros_like(probe) for probe in probes]

        return [tf.identity(arg) for arg in args[: len(tensors)]], grad

    return list(linked(*[tf.stop_gradient(tensor) for tensor in tensors], *values, *probes))


def _without_gradient(tensor: tf.Tensor) -> Any:
    """Return `tensor`, and raise if a tape needs a gradient by what it was computed from."""
    shown = repr(tensor)

    def grad(upstream: tf.Tensor) -> None:
        raise ValueError(
            "A model with `whole_batch` has no gradient by its inputs, but they are computed from trainable variables "
            "or watched by a `tf.GradientTape`: make what comes before the model a part of it, or pass its inputs "
            f"through `tf.stop_gradient`. Received: {shown}."
        )

    (probe,) = custom_gradient(lambda value: ([tf.identity(value)], grad))(tensor)
    return probe


def share_of(batch: Batch, part: Any, dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Return the share of a micro-batch in the examples of a batch, a scalar."""
    return tf.math.divide_no_nan(tf.cast(batch.count_of(part), dtype), tf.cast(batch.count, dtype))


def is_differentiable(tensor: tf.Tensor) -> bool:
    """Whether a tensor can have a gradient."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def _float32(tensor: Any) -> tf.Tensor:
    return tf.cast(tensor, _tf.at_least_float32(tensor.dtype))


def _plus(one: Optional[Gradient], other: Optional[Gradient]) -> Optional[Gradient]:
    """Add two gradients. Rows stay rows if both are."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        values, indices = tf.concat([one.values, other.values], 0), tf.concat([one.indices, other.indices], 0)
        return tf.IndexedSlices(values, indices, one.dense_shape)
    return tf.convert_to_tensor(one) + tf.convert_to_tensor(other)
