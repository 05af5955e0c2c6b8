"""Trace a function of a micro-batch once, with marks at its barriers, and with its gradient (law L19).

While the function is traced, each barrier leaves a mark: its input tensors, and placeholders for its results, which
depend on all micro-batches. The same graph holds the gradient of the function's outputs and of the barriers' inputs.
Each of these has a placeholder for its cotangent, the gradient of the batch's loss by it. So one graph holds the whole
computation, and everything that it takes from elsewhere is a placeholder.

Barriers that nobody has marked are found in the graph. Two patterns are recognised, in any code that builds them
(`tf.nn`, tf-slim, Keras, a `tf.Module`):

    FusedBatchNorm(x, scale, offset, …), in training
    mean = Mean(x),  variance = Mean(SquaredDifference(x, mean)),  over several axes, the batch among them

The batch axis is the one whose length is unknown while tracing. The results of these operations are replaced by values
computed from the moments of the whole batch. Any other reduction over the examples can't be exact if its result is
combined with single examples again. Such reductions are reported by name.
"""

import contextlib
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from accum import _tf
from accum._engine._draws import Draws
from accum._engine._gradients import of_parts
from accum._engine._statistics import Moments, Normalization, with_bessel
from accum._tf import Wait, tf

# --------------------------------------------------------------------------------------------------------------------
# The trace, and its marks


Key = str
SCOPE = "accum_gradients"
"""The name scope of the gradient. TensorFlow puts what differentiates an operation into SCOPE/<its name>_grad/."""


class Unrepeatable(Exception):
    """A function, loop or conditional in the graph can't be computed again, or over the whole batch.

    It is no `ValueError`, because AutoGraph raises such errors in code of the user's as other ones.
    """


class Barrier:
    """Where a mean and a variance of each feature over the batch are used. An interface implements it.

    Attributes:
      order: int; barriers receive their statistics in this order.
    """

    order = 0

    def receive(self, whole: Moments) -> None:
        """Receive the `Moments` of the batch, once."""
        raise NotImplementedError


class StatisticsMark(NamedTuple):
    """The mark of a `Barrier`, with the keys of tensors and placeholders.

    Attributes:
      begins: keys of operations' outputs that belong behind the barrier, although they don't use its statistics.
      moments: the `Moments` of the micro-batch.
      number, mean, variance: placeholders for the number of values of the batch, their mean and variance, which are
        used behind the barrier.
      whole_count, whole_mean: placeholders for the number of values and mean of the batch, used before it; or None.
      cotangents: placeholders for the gradients by the mean and variance of the batch, used before it; or none.
      grads: the gradients by `mean` and `variance`, or None.
    """

    barrier: Barrier
    begins: List[Key]
    moments: Moments
    number: Key
    mean: Key
    variance: Key
    whole_count: Optional[Key]
    whole_mean: Optional[Key]
    cotangents: List[Key]
    grads: List[Optional[Key]]


class WholeMark(NamedTuple):
    """The mark of a function that is called with the whole batch.

    Attributes:
      inputs: keys of its arguments of the micro-batch.
      arguments: placeholders for those of the batch.
      results: keys of its results of the batch.
      parts: placeholders for the parts of a micro-batch in the results.
      result_cotangents, input_cotangents: placeholders for the gradients by `results` and `inputs`, or None.
      argument_grads, part_grads: the gradients by `arguments` and `parts`, or None.
    """

    inputs: List[Key]
    arguments: List[Key]
    results: List[Key]
    parts: List[Key]
    result_cotangents: List[Optional[Key]]
    input_cotangents: List[Optional[Key]]
    argument_grads: List[Optional[Key]]
    part_grads: List[Optional[Key]]


class LossMark(NamedTuple):
    """A loss that a layer has added, the mean over the examples of a micro-batch or their sum."""

    value: Key
    is_sum: bool
    cotangent: Optional[Key]


class Marks:
    """What the function leaves while it is traced. Its methods are called in the trace.

    Args:
      compiled: whether XLA will compile it.

    Attributes:
      share: float32 scalar, the share of the micro-batch in the examples of the batch.
      position: int64 scalar, the place of its first example.
      total: int64 scalar, the number of examples of the batch.
      seed: int64 tensor of shape [2], for random numbers of the batch.
      draws: the `Draws` of the batch.
      losses: list of (scalar tensor, whether it is a sum).
      moments: list of (`Moments` of the micro-batch, function that receives those of the batch, once).
      own: names of operations that compute moments.
      is_whole: whether a function is being called with the whole batch.
      unknown: names of reductions over the examples that are no barriers, though they should be.
      sources: what to differentiate by, if the function sets it: tensors of the graph, or variables.
      watched: tensors of the micro-batch by which to differentiate, too: arguments of the function.
    """

    def __init__(self, compiled: bool = False) -> None:
        self._compiled = compiled
        self.graph: tf.Graph = None
        self.losses: List[Tuple[tf.Tensor, bool]] = []
        self.moments: List[Tuple[Moments, Callable[[Moments], Wait]]] = []
        self.statistics: List[Any] = []
        self.wholes: List[Any] = []
        self.own: Set[str] = set()
        self.is_whole = False
        self.unknown: List[str] = []
        self.sources: Optional[List[Union[tf.Tensor, tf.Variable]]] = None
        self.watched: List[tf.Tensor] = []

    def begin(self) -> None:
        """Begin in the graph of the trace."""
        self.graph = tf.compat.v1.get_default_graph()
        self.share = _placeholder(tf.float32, [])
        self.position = _placeholder(tf.int64, [])
        self.total = _placeholder(tf.int64, [])
        self.seed = _placeholder(tf.int64, [2])
        self.draws = Draws(lambda: self.seed, self.total, self._compiled)

    def is_here(self) -> bool:
        """Whether operations now become part of the trace itself, rather than of a function or loop in it."""
        return tf.compat.v1.get_default_graph() is self.graph

    def at_barrier(
        self,
        barrier: Barrier,
        inputs: tf.Tensor,
        values: tf.Tensor,
        moments_of: Callable[[tf.Tensor], Moments],
        gradient: Callable[[tf.Tensor, Moments, tf.Tensor, tf.Tensor], tf.Tensor],
    ) -> Tuple[tf.Tensor, Moments]:
        """Mark a barrier.

        Args:
          barrier: a `Barrier`.
          inputs: tensor, what comes up to it.
          values: float tensor, computed from `inputs`, whose statistics are taken.
          moments_of: function of `values` that returns its `Moments`.
          gradient: function of `values`, of the `Moments` of the batch, without the variance, and of the gradients by
            its mean and variance, that returns the gradient by `values` through them: the mean is a constant for the
            variance.

        Returns:
          (`inputs` behind the barrier, the `Moments` of the batch).
        """
        begin = tf.identity(inputs)
        first_new = len(self.graph.get_operations())
        moments = moments_of(tf.stop_gradient(values))
        self.own.update(op.name for op in self.graph.get_operations()[first_new:])
        whole = Moments(*[_placeholder(value.dtype, value.shape) for value in moments])
        self.statistics.append((barrier, begin, values, moments, whole, gradient))
        return begin, whole

    def at_whole(self, function: Callable[..., Sequence[tf.Tensor]], inputs: Sequence[tf.Tensor]) -> List[tf.Tensor]:
        """Mark a function that is called with the whole batch: of tensors, which returns tensors."""
        arguments = [_placeholder(tensor.dtype, _any_length(tensor)) for tensor in inputs]
        # `total` also counts the examples that were before the batch.
        count = self.total if self._compiled else tf.shape(arguments[0], tf.int64)[0]
        self.is_whole = True
        with self.draws.of(self.total - count, count):
            results = [tf.convert_to_tensor(tensor) for tensor in function(*arguments)]
        self.is_whole = False
        parts = [_placeholder(tensor.dtype, _any_length(tensor)) for tensor in results]
        self.wholes.append((list(inputs), arguments, results, parts))
        return parts


class Trace(NamedTuple):
    """A traced function, with the keys of tensors in its graph.

    Attributes:
      graph: the `tf.Graph`.
      inputs: of the arguments, one tensor each.
      share, position, total, seed: as in `Marks`.
      draws: how many operations draw.
      other_draws: names of those whose numbers differ with the size of micro-batches.
      drawn: of the random numbers of the examples.
      outputs: of the results.
      cotangents: placeholders for the gradients by the outputs, None where there is none.
      losses: list of `LossMark`.
      moments: list of (`Moments`, function that receives those of the batch).
      statistics: list of `StatisticsMark`.
      wholes: list of `WholeMark`.
      grads: of the gradient by each variable: a key, a pair (values, indices), or None.
      watched_grads: of the gradient by each of the watched arguments: a key, or None.
      shapes: the shapes of the variables, as lists.
      unknown: as in `Marks`.
      captures: list of (tensor outside of the graph, key of the placeholder that stands for it).
      owner: what TensorFlow 1.15 takes the graph apart without.
      compiled: whether XLA will compile it.
    """

    graph: tf.Graph
    inputs: List[Key]
    share: Key
    position: Key
    total: Key
    seed: Key
    draws: int
    other_draws: List[str]
    drawn: List[Key]
    outputs: List[Key]
    cotangents: List[Optional[Key]]
    losses: List[LossMark]
    moments: List[Tuple[Moments, Callable[[Moments], Wait]]]
    statistics: List[StatisticsMark]
    wholes: List[WholeMark]
    grads: List[Any]
    watched_grads: List[Optional[Key]]
    shapes: List[List[int]]
    unknown: List[str]
    captures: List[Tuple[tf.Tensor, Key]]
    owner: Any = None
    compiled: bool = False


def trace(
    function: Callable[[Sequence[tf.Tensor], Marks], Sequence[tf.Tensor]],
    specs: Sequence[tf.TensorSpec],
    variables: Sequence[tf.Variable],
    differentiable: bool,
    compiled: bool = False,
) -> Trace:
    """Trace a function.

    Args:
      function: function of a list of tensors, those of one micro-batch, and of `Marks`. It returns a list of tensors.
      specs: the specs of the tensors.
      variables: what to differentiate by.
      differentiable: whether to take the gradient.
      compiled: whether XLA will compile it.
    """
    read: Any = None  # the `Trace`, without what the finished graph captures

    @_tf.graphs.untouched_by_autograph
    def traced(*tensors: tf.Tensor) -> List[tf.Tensor]:
        marks = Marks(compiled)
        marks.begin()
        outputs = list(function(tensors, marks))
        sources = variables if marks.sources is None else marks.sources
        nonlocal read
        read = _read(marks, tensors, outputs, sources if differentiable else None)
        return outputs

    with tf.init_scope() if tf.executing_eagerly() else contextlib.ExitStack():  # where no tape watches
        concrete = tf.function(traced).get_concrete_function(*specs)
    captures = [(outside, inside.name) for outside, inside in _tf.op_walks.captures_of(concrete.graph)]
    return read._replace(captures=captures, owner=concrete, compiled=compiled)


def _read(
    marks: Marks, inputs: Sequence[tf.Tensor], outputs: List[tf.Tensor], variables: Optional[Sequence[tf.Variable]]
) -> Trace:
    """Take the gradient, and return all keys."""
    is_on = variables is not None
    outputs = [tf.identity(output) for output in outputs]
    targets: List[tf.Tensor] = []
    cotangents: List[tf.Tensor] = []

    def target(tensor: tf.Tensor) -> Optional[tf.Tensor]:
        if not is_on or not is_differentiable(tensor):
            return None
        placeholder = _placeholder(tensor.dtype, tensor.shape)
        targets.append(tensor)
        cotangents.append(placeholder)
        return placeholder

    of_outputs = [target(output) for output in outputs]
    of_losses = [target(value) for value, _ in marks.losses]
    arounds = []
    for _, _, values, moments, _, gradient in marks.statistics:
        around = [_placeholder(part.dtype, part.shape) for part in (moments.count,) + 3 * (moments.mean,)]
        arounds.append(around if is_on else [])
        if is_on:
            targets.append(values)
            cotangents.append(gradient(values, Moments(around[0], around[1], None), around[2], around[3]))
    of_results = [[target(tensor) for tensor in results] for _, _, results, _ in marks.wholes]
    of_inputs = [[target(tensor) for tensor in tensors] for tensors, _, _, _ in marks.wholes]
    sources = [one for _, _, _, _, whole, _ in marks.statistics for one in (whole.mean, whole.variance)]
    for _, arguments, _, parts in marks.wholes:
        sources += arguments + parts
    differentiable = [tensor for tensor in sources + marks.watched if is_differentiable(tensor)]
    grads: List[Any] = []
    if targets and (variables or marks.watched):
        wanted = list(variables or ()) + differentiable
        grads = tf.gradients(targets, wanted, grad_ys=cotangents, name=SCOPE)
    for grad, source in zip(grads, wanted if grads else ()):
        if isinstance(grad, tf.Tensor) and source.dtype != tf.resource:  # a handle
            grad.set_shape(source.shape)
    by_variables = grads[: len(variables)] if grads else [None] * len(variables or ())  # type: ignore[arg-type]
    grad_of_name = dict(zip([tensor.name for tensor in differentiable], grads[len(by_variables) :]))

    def grad_of(tensor: tf.Tensor) -> Optional[Key]:
        grad = grad_of_name.get(tensor.name)
        return None if grad is None else tf.convert_to_tensor(grad).name

    statistics = [
        StatisticsMark(
            barrier,
            [begin.name],
            Moments(*[value.name for value in moments]),
            whole.count.name,
            whole.mean.name,
            whole.variance.name,
            around[0].name if around else None,
            around[1].name if around else None,
            _names(around[2:]),
            [grad_of(whole.mean), grad_of(whole.variance)],
        )
        for (barrier, begin, _, moments, whole, _), around in zip(marks.statistics, arounds)
    ]
    wholes = [
        WholeMark(
            _names(tensors),
            _names(arguments),
            _names(results),
            _names(parts),
            [_name(one) for one in cot_results],
            [_name(one) for one in cot_inputs],
            [grad_of(tensor) for tensor in arguments],
            [grad_of(tensor) for tensor in parts],
        )
        for (tensors, arguments, results, parts), cot_results, cot_inputs in zip(marks.wholes, of_results, of_inputs)
    ]
    return Trace(
        marks.graph,
        _names(inputs),
        marks.share.name,
        marks.position.name,
        marks.total.name,
        marks.seed.name,
        marks.draws.number,
        marks.draws.others,
        _names(marks.draws.drawn),
        _names(outputs),
        [_name(one) for one in of_outputs],
        [LossMark(v.name, is_sum, _name(one)) for (v, is_sum), one in zip(marks.losses, of_losses)],
        [(Moments(*[value.name for value in moments]), receive) for moments, receive in marks.moments],
        statistics,
        wholes,
        [of_parts(grad, _name) for grad in by_variables],
        [grad_of(tensor) for tensor in marks.watched],
        [var.shape.as_list() for var in variables or ()],
        marks.unknown,
        [],
    )


def is_differentiable(tensor: tf.Tensor) -> bool:
    """Whether a tensor can have a gradient."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def _name(tensor: Optional[tf.Tensor]) -> Optional[Key]:
    return None if tensor is None else tensor.name


def _names(tensors: Sequence[tf.Tensor]) -> List[Key]:
    return [tensor.name for tensor in tensors]


def _placeholder(dtype: tf.DType, shape: Union[tf.TensorShape, Sequence[Optional[int]]]) -> tf.Tensor:
    return tf.compat.v1.placeholder(dtype, shape, name="accum_placeholder")


def _any_length(tensor: tf.Tensor) -> Union[tf.TensorShape, Sequence[Optional[int]]]:
    return [None] + tensor.shape.as_list()[1:] if tensor.shape.rank else tensor.shape


# --------------------------------------------------------------------------------------------------------------------
# Barriers that nobody has marked


SQUARES = {"Square", "Pow", "Mul", "SquaredDifference"}
PASSING = ("Identity", "StopGradient")
REDUCTIONS = {"Mean", "Sum", "Max", "Min", "Prod", "All", "Any"}
SIZES = {"Shape", "ShapeN", "Size", "Rank"}

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
        self._of_patterns: Set[str] = set()  # names of means and variances that are replaced
        self._inputs = {tensor.op.name for tensor in inputs}
        self._ours = self._reached(self._inputs)
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
        self._marks.unknown = self._others()
        for op in self._ops if replaced else ():
            for index, tensor in enumerate(op.inputs):
                if tensor.name in replaced:
                    _tf.graphs.replace_input(op, index, replaced[tensor.name])
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

    def found(self) -> List["Statistics"]:
        """Return the statistics in the graph, which stays as it is."""
        statistics = [_statistics_of_fused(op) for op in self._ops if self._is_fused(op)]
        return statistics + [_statistics_of_pair(pair) for pair in map(self._pair, self._ops) if pair is not None]

    def _replace_pair(self, pair: _Pair, replaced: Dict[str, tf.Tensor]) -> Dict[str, tf.Tensor]:
        """Return {name of a mean or variance over a micro-batch: that of the batch}."""
        values = replaced.get(pair.values.name, pair.values)
        lengths = values.shape.as_list()
        shape = [1 if axis in pair.axes else length for axis, length in enumerate(lengths)]
        self._require_shape(pair.variance, shape)
        _, whole = self._at_barrier(pair.values.name, values, Normalization(pair.axes, len(lengths), shape))
        self._of_patterns.update(op.name for op in pair.means + [pair.variance])
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
        if op.type != "Mean" or axes is None:
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
                is_alike = self._axes_over_examples(source) == axes
                return _Pair(values, self._means(values, axes), op, axes) if is_alike else None
        return None

    def _means(self, values: tf.Tensor, axes: Tuple[int, ...]) -> List[tf.Operation]:
        means = [op for op in self._ops if op.type == "Mean" and op.inputs[0].name == values.name]
        return [op for op in means if self._axes_over_examples(op) == axes]

    def _axes_over_examples(self, op: tf.Operation) -> Optional[Tuple[int, ...]]:
        """Return the axes of a reduction, if it is one over the examples, otherwise None."""
        axes = self._axes(op)
        return axes if axes and self._batch_axis(op) in axes else None

    def _axes(self, op: tf.Operation) -> Tuple[int, ...]:
        """Return the axes of a reduction of what depends on the batch, or none."""
        if op.type not in REDUCTIONS or op.name not in self._ours or not op.inputs[0].shape.rank:
            return ()
        axes = tf.get_static_value(op.inputs[1])
        return () if axes is None else tuple(sorted(int(axis) % op.inputs[0].shape.rank for axis in axes.reshape(-1)))

    def _batch_axis(self, op: tf.Operation) -> Optional[int]:
        """Return the axis of the examples in what is reduced, whose length is not known in a trace, or None."""
        unknown = [axis for axis, length in enumerate(op.inputs[0].shape.as_list()) if length is None]
        if len(unknown) > 1 and op.name in self._moved:  # it may be any of them
            return None
        return unknown[0] if unknown else None

    def _may_be_over_examples(self, op: tf.Operation) -> bool:
        lengths = op.inputs[0].shape.as_list() if self._axes(op) else []
        return self._axes_over_examples(op) is not None or (
            op.name in self._moved and any(lengths[axis] is None for axis in self._axes(op))
        )

    # ------------------------------------------------------------------------------------------------------------

    def _require_none_within(self) -> None:
        """Raise if a function, loop or conditional in the graph normalises by statistics."""
        calls = [op for op in self._ops if op.type in _tf.graph_parts.CALLS and op.name in self._ours]
        library = _tf.graph_parts.Library(self._marks.graph, self._marks.graph.as_graph_def()) if calls else None
        for op in calls:
            if library is not None and library.normalizes(op.node_def):
                raise Unrepeatable(
                    "An operation that looks across examples, such as batch normalization, can't be computed over the "
                    "whole batch within a loop, a conditional or a function of its own: take it out of there, or "
                    f"pass `whole_batch=()`. Received: {op.name!r}. [accum: whole-batch-loop]"
                )

    def _others(self) -> List[str]:
        """Return the names of other reductions over examples that meet single examples again."""
        reduced: Dict[str, Set[str]] = (
            {}
        )  # {operation: the reductions over all examples that it is computed from, and nothing else}
        rows = set(self._inputs)
        names: Dict[str, None] = {}
        for op in self._ops:
            is_whole = op.name in self._of_patterns  # a statistic, now of the batch
            if op.name not in self._ours or op.type in SIZES or op.name in self._marks.own or is_whole:
                continue
            before = [tensor.op.name for tensor in op.inputs]
            met = [name for one in before for name in sorted(reduced.get(one, ()))]
            if self._may_be_over_examples(op):
                reduced[op.name] = {op.name}
            elif any(name in rows for name in before):
                rows.add(op.name)
                names.update((name, None) for name in met)
            elif met:
                reduced[op.name] = set(met)
        return list(names)


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


def statistics_in(graph: tf.Graph, inputs: Sequence[tf.Tensor]) -> List[Statistics]:
    """Return the statistics over the first axis of what is computed from `inputs`."""
    marks = Marks()
    marks.graph = graph
    return FoundStatistics(marks, inputs).found()


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
