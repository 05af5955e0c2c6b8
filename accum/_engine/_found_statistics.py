"""Find batch normalisation that nobody has marked, in the graph of a traced function (law L19).

Two patterns are recognised, in any code that builds them (`tf.nn`, tf-slim, Keras, a `tf.Module`):

    FusedBatchNorm(x, scale, offset, …), in training
    mean = Mean(x),  variance = Mean(SquaredDifference(x, mean)),  over several axes, the batch among them

The batch axis is the one whose length is unknown while tracing. The results of these operations are replaced by values
computed from the moments of the whole batch. Where examples meet otherwise, `_meetings` tells.
"""

from typing import Callable, Container, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from accum import _check, _tf
from accum._engine._statistics import Moments, Normalization, with_bessel
from accum._engine._trace import Barrier, Key, Marks, Unrepeatable
from accum._tf import tf

SQUARES = {"Square", "Pow", "Mul", "SquaredDifference"}
PASSING = ("Identity", "StopGradient")

Receive = Callable[[str, Moments], None]


class FoundBarrier(Barrier):
    """Statistics that were found in the graph.

    Args:
      order: which of those in the graph these are.
      key: of what they are taken.
      receive_moments: function of `key` and of the `Moments` of the batch.
    """

    def __init__(self, order: int, key: str, receive_moments: Optional[Receive]) -> None:
        self.order = order
        self._key = key
        self._receive_moments = receive_moments

    def receive(self, whole: Moments) -> None:
        if self._receive_moments is not None:
            self._receive_moments(self._key, whole)


class _Pair(NamedTuple):
    """Operations that compute a mean and a variance."""

    values: tf.Tensor
    means: List[tf.Operation]
    variance: tf.Operation
    axes: Tuple[int, ...]


class FoundStatistics:
    """The statistics in the graph of a trace.

    Args:
      marks: `Marks`, of the graph that is being traced.
      inputs: tensors of a micro-batch.
      receive: function of (key of what is normalised, its `Moments` in the batch), or None.

    """

    def __init__(self, marks: Marks, inputs: Sequence[tf.Tensor], receive: Optional[Receive] = None) -> None:
        self._marks = marks
        self._receive = receive
        self._ops = marks.graph.get_operations()
        self._ours = self._reached({tensor.op.name for tensor in inputs})
        self._moved = self._with_another_axis_first()

    def replace(self, outputs: Sequence[tf.Tensor]) -> List[tf.Tensor]:
        """Make barriers of all patterns. Returns the outputs, which may be among what is replaced."""
        self._require_none_within()
        replaced: Dict[str, tf.Tensor] = {}
        pairs = {pair.variance.name: pair for pair in map(self._pair, self._ops) if pair is not None}
        for op in self._ops:
            if self._is_fused(op):
                replaced.update(self._replace_fused(op, replaced))
            elif op.name in pairs:
                replaced.update(self._replace_pair(pairs[op.name], replaced))
        _tf.graphs.replace_inputs(self._ops if replaced else (), replaced)
        self._marks.losses = [(replaced.get(loss.name, loss), is_sum) for loss, is_sum in self._marks.losses]
        return [replaced.get(tensor.name, tensor) for tensor in outputs]

    def _reached(self, starts: Set[str]) -> Set[str]:
        """Return the names of operations that depend on some others."""
        names = set(starts)
        for op in self._ops:
            if any(tensor.op.name in names for tensor in op.inputs):
                names.add(op.name)
        return names

    def _with_another_axis_first(self) -> Set[str]:
        """Return the names of operations behind a transposition, where the first axis may not be the batch."""
        names: Set[str] = set()
        for op in self._ops:
            is_moved = any(tensor.op.name in names for tensor in op.inputs)
            if op.type == "Transpose" and op.name in self._ours:
                order = tf.get_static_value(op.inputs[1])
                is_moved = is_moved != (order is None or order[0] != 0)
            if is_moved:
                names.add(op.name)
        return names

    # ------------------------------------------------------------------------------------------------------------

    def _at_barrier(self, key: str, inputs: tf.Tensor, rule: Normalization) -> Tuple[tf.Tensor, Moments]:
        """Mark a barrier. Returns what is normalised, behind it, and the moments of the batch."""
        values = tf.cast(inputs, _tf.variables.at_least_float32(inputs.dtype))

        def moments_of(values: tf.Tensor) -> Moments:
            return rule.moments(values, rule.count(values))

        barrier = FoundBarrier(len(self._marks.statistics), key, self._receive)
        behind, whole = self._marks.at_barrier(barrier, inputs, values, moments_of, rule.gradient)
        return tf.cast(behind, values.dtype), whole

    def _is_fused(self, op: tf.Operation) -> bool:
        """Whether this is a batch normalisation in training.

        Layers that normalise each example use the same operation, with examples in the place of features.
        """
        is_fused = op.type in _tf.op_walks.FUSED_BATCH_NORMS and op.get_attr("is_training")
        if not is_fused or op.inputs[0].op.name not in self._ours or op.name in self._marks.own:
            return False
        shape = op.inputs[0].shape
        is_batch_first = shape.rank is None or shape.as_list()[0] is None
        return is_batch_first and op.inputs[1].op.name not in self._ours

    def _replace_fused(self, op: tf.Operation, replaced: Dict[str, tf.Tensor]) -> Dict[str, tf.Tensor]:
        """Return {name of an output of a fused batch normalisation: what takes its place}."""
        inputs, scale, offset = op.inputs[0], op.inputs[1], op.inputs[2]
        inputs = replaced.get(inputs.name, inputs)
        layout = op.get_attr("data_format").decode()
        rank = len(layout)
        axes = tuple(axis for axis, name in enumerate(layout) if name != "C")
        rule = Normalization(axes, rank, scale.shape.as_list())
        self._require_shape(op, rule.shape)
        values, whole = self._at_barrier(op.inputs[0].name, inputs, rule)
        epsilon = op.get_attr("epsilon")
        outputs = rule.normalized(values, whole.mean, whole.variance, scale, offset, epsilon)
        return dict(_of_fused(op, whole), **{op.outputs[0].name: tf.cast(outputs, op.outputs[0].dtype)})

    def found(self, among: Container[tf.Operation]) -> List["Statistics"]:
        """Return the statistics that operations of `among` compute. The graph stays as it is."""
        ops = [op for op in self._ops if op in among]
        pairs = [pair for pair in map(self._pair, ops) if pair is not None]
        pairs = [pair._replace(means=[mean for mean in pair.means if mean in among]) for pair in pairs]
        return [_statistics_of_fused(op) for op in ops if self._is_fused(op)] + list(map(_statistics_of_pair, pairs))

    def _replace_pair(self, pair: _Pair, replaced: Dict[str, tf.Tensor]) -> Dict[str, tf.Tensor]:
        """Return {name of a mean or variance over a micro-batch: that of the batch}."""
        values = replaced.get(pair.values.name, pair.values)
        lengths = values.shape.as_list()
        shape = [1 if axis in pair.axes else length for axis, length in enumerate(lengths)]
        self._require_shape(pair.variance, shape)
        _, whole = self._at_barrier(pair.values.name, values, Normalization(pair.axes, len(lengths), shape))
        return _of_pair(pair, whole)

    def _require_shape(self, op: tf.Operation, shape: Sequence[Optional[int]]) -> None:
        if any(length is None for length in shape):
            raise ValueError(
                "Normalisation by the statistics of the batch needs to know the number of features when the graph is "
                f"built: set the shape of what comes before it. Received: {op.name!r}, with statistics of shape "
                f"{tuple(shape)}. [accum: unknown-shape]"
            )

    def _pair(self, op: tf.Operation) -> Optional[_Pair]:
        """Return the mean and variance if `op` computes the variance, otherwise None."""
        axes = self._axes_over_examples(op)
        if axes is None:
            return None
        squares = op.inputs[0].op
        if squares.type not in SQUARES or (
            squares.type == "Pow" and _tf.variables.known_value(squares.inputs[1]) != 2.0
        ):
            return None
        apart = squares
        if squares.type != "SquaredDifference":
            apart = squares.inputs[0].op
            if apart.type != "Sub" or (squares.type == "Mul" and squares.inputs[1].op is not apart):
                return None
        for values, mean in (apart.inputs[:2], reversed(apart.inputs[:2])):
            source = _source(mean)
            if source.type == "Mean" and source.inputs[0].name == values.name:
                means = self._means(values, axes)
                return _Pair(values, means, op, axes) if source in means else None
        return None

    def _means(self, values: tf.Tensor, axes: Tuple[int, ...]) -> List[tf.Operation]:
        means = [op for op in self._ops if self._axes_over_examples(op) == axes]
        return [op for op in means if op.inputs[0].name == values.name]

    def _axes_over_examples(self, op: tf.Operation) -> Optional[Tuple[int, ...]]:
        """Return the axes of a mean of what depends on the batch, if it is one over the examples, otherwise None."""
        if op.type != "Mean" or op.name not in self._ours or not op.inputs[0].shape.rank:
            return None
        known = tf.get_static_value(op.inputs[1])
        axes = () if known is None else tuple(sorted(int(axis) % op.inputs[0].shape.rank for axis in known.reshape(-1)))
        return axes if self._batch_axis(op) in axes else None

    def _batch_axis(self, op: tf.Operation) -> Optional[int]:
        """Return the axis of the examples in what is reduced, whose length is not known in a trace, or None."""
        unknown = [axis for axis, length in enumerate(op.inputs[0].shape.as_list()) if length is None]
        if len(unknown) > 1 and op.name in self._moved:  # it may be any of them
            return None
        return unknown[0] if unknown else None

    # ------------------------------------------------------------------------------------------------------------

    def _require_none_within(self) -> None:
        """Raise if a function, loop or conditional in the graph normalises by statistics."""
        calls = [op for op in self._ops if op.type in _tf.graph_parts.CALLS and op.name in self._ours]
        library = _tf.graph_parts.Library(self._marks.graph, self._marks.graph.as_graph_def()) if calls else None
        for op in calls:
            if library is not None and library.normalizes(op.node_def):
                raise Unrepeatable(
                    "An operation that looks across examples, such as batch normalization, can't be computed over the "
                    "whole batch within a loop, a conditional or a function of its own: take it out of "
                    f"there{_check.OR_AT_ONCE}. Received: {op.name!r}. [accum: whole-batch-loop]"
                )


class Statistics(NamedTuple):
    """The mean and variance of a batch, as operations of a graph compute them.

    Attributes:
      ops: the operations.
      key: of what is normalised.
      values: function of the `Moments` of the batch that returns {key of a statistic: its value}.
    """

    ops: List[tf.Operation]
    key: Key
    values: Callable[[Moments], Dict[Key, tf.Tensor]]


def statistics_in(graph: tf.Graph, inputs: Sequence[tf.Tensor], among: Container[tf.Operation]) -> List[Statistics]:
    """Return the statistics over the first axis of what is computed from `inputs`, by operations of `among`."""
    marks = Marks()
    marks.graph = graph
    return FoundStatistics(marks, inputs).found(among)


def _statistics_of_fused(op: tf.Operation) -> Statistics:
    return Statistics([op], op.inputs[0].name, lambda whole: _of_fused(op, whole))


def _statistics_of_pair(pair: _Pair) -> Statistics:
    return Statistics(pair.means + [pair.variance], pair.values.name, lambda whole: _of_pair(pair, whole))


def _of_fused(op: tf.Operation, whole: Moments) -> Dict[Key, tf.Tensor]:
    """Return {key: statistic of the batch} for what a fused batch normalisation returns beside its outputs."""
    mean, variance = whole.mean, with_bessel(whole.variance, whole.count)
    share = _factor(op)
    if share != 1.0:  # it returns moving averages, already moved
        mean = (1.0 - share) * op.inputs[3] + share * mean
        variance = (1.0 - share) * op.inputs[4] + share * variance
    pairs = zip(op.outputs[1:3], (mean, variance))
    return {output.name: tf.cast(value, output.dtype) for output, value in pairs}


def _of_pair(pair: _Pair, whole: Moments) -> Dict[Key, tf.Tensor]:
    """Return {key: statistic of the batch} for operations that compute a mean and a variance."""
    shape = [1 if axis in pair.axes else length for axis, length in enumerate(pair.values.shape.as_list())]
    return {
        op.outputs[0].name: tf.cast(tf.reshape(value, _shape_of(op, shape, pair.axes)), op.outputs[0].dtype)
        for op, value in [(mean, whole.mean) for mean in pair.means] + [(pair.variance, whole.variance)]
    }


def _factor(op: tf.Operation) -> float:
    try:
        return float(op.get_attr("exponential_avg_factor"))
    except ValueError:  # TF 2.2 and older
        return 1.0


def _source(tensor: tf.Tensor) -> tf.Operation:
    while tensor.op.type in PASSING:
        tensor = tensor.op.inputs[0]
    return tensor.op


def _shape_of(op: tf.Operation, shape: Sequence[int], axes: Sequence[int]) -> List[int]:
    """Return the shape of a statistic as an operation returns it, given that with ones for `axes`."""
    if op.get_attr("keep_dims"):
        return list(shape)
    return [length for axis, length in enumerate(shape) if axis not in axes]
