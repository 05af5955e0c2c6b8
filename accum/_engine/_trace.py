"""Trace a function of a micro-batch once, with marks at its barriers, and with its gradient (law L19).

While the function is traced, each barrier leaves a mark: its input tensors, and placeholders for its results, which
depend on all micro-batches. The same graph holds the gradient of the function's outputs and of the barriers' inputs.
Each of these has a placeholder for its cotangent, the gradient of the batch's loss by it. So one graph holds the whole
computation, and everything that it takes from elsewhere is a placeholder.
"""

import contextlib
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from accum import _tf
from accum._engine._draws import Draws
from accum._engine._gradients import of_parts
from accum._engine._statistics import Moments
from accum._tf import Wait, tf

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

    def moved(self) -> List[tf.Variable]:
        """Return the variables that `receive` changes, behind the whole call."""
        return []


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
      numbers: list of (scalar tensor, whether it is a sum): what metrics of layers add up, or average, over the batch.
      rows: tensors that metrics of layers take, which must have an entry for each example.
      moments: list of (`Moments` of the micro-batch, function that receives those of the batch, once).
      own: names of operations that compute moments.
      sources: what to differentiate by, if the function sets it: tensors of the graph, or variables.
      watched: tensors of the micro-batch by which to differentiate, too: arguments of the function.
    """

    def __init__(self, compiled: bool = False) -> None:
        self._compiled = compiled
        self._is_open = True
        self.graph: tf.Graph = None
        self.losses: List[Tuple[tf.Tensor, bool]] = []
        self.numbers: List[Tuple[tf.Tensor, bool]] = []
        self.rows: List[tf.Tensor] = []
        self.moments: List[Tuple[Moments, Callable[[Moments], Wait]]] = []
        self.statistics: List[Any] = []
        self.wholes: List[Any] = []
        self.own: Set[str] = set()
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

    def require_end(self) -> None:
        """Raise if the function takes a gradient, which would not go through the statistics of the batch."""
        if self._is_open:
            raise Unrepeatable(
                "a gradient is taken within the call, through batch normalisation: take it outside of the call."
                " [accum: whole-batch-gradient]"
            )

    def end(self) -> None:
        """End the function: from now on, gradients are those of the trace."""
        self._is_open = False

    def at_whole(self, function: Callable[..., Sequence[tf.Tensor]], inputs: Sequence[tf.Tensor]) -> List[tf.Tensor]:
        """Mark a function that is called with the whole batch: of tensors, which returns tensors."""
        arguments = [_placeholder(tensor.dtype, _any_length(tensor)) for tensor in inputs]
        results = list(function(*arguments))
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
      whole_draws: names of those that draw for the whole batch.
      shared_draws: those that draw for all examples together, as `shared` of `Draws`.
      drawn: {of random numbers of the examples: of those in whose place they are}.
      outputs: of the results.
      cotangents: placeholders for the gradients by the outputs, None where there is none.
      losses: list of `LossMark`.
      moments: list of (`Moments`, function that receives those of the batch).
      statistics: list of `StatisticsMark`.
      wholes: list of `WholeMark`.
      grads: of the gradient by each variable: a key, a pair (values, indices), or None.
      watched_grads: of the gradient by each of the watched arguments: a key, or None.
      shapes: the shapes of the variables, as lists.
      numbers: list of (key, whether it is a sum), as in `Marks`.
      rows: of those in `Marks`.
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
    whole_draws: List[str]
    shared_draws: Dict[str, str]
    drawn: Dict[Key, Key]
    outputs: List[Key]
    cotangents: List[Optional[Key]]
    losses: List[LossMark]
    moments: List[Tuple[Moments, Callable[[Moments], Wait]]]
    statistics: List[StatisticsMark]
    wholes: List[WholeMark]
    grads: List[Any]
    watched_grads: List[Optional[Key]]
    shapes: List[List[int]]
    numbers: List[Tuple[Key, bool]]
    rows: List[Key]
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
        marks.end()
        sources = variables if marks.sources is None else marks.sources
        nonlocal read
        read = _read(marks, tensors, outputs, sources if differentiable else None)
        return outputs

    traced.__name__ = _tf.graphs.NAME_WITHOUT_WRAPPERS
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
        done = len(marks.graph.get_operations())
        grads = tf.gradients(targets, wanted, grad_ys=cotangents, name=SCOPE)
        _require_no_draws(marks.graph, marks.graph.get_operations()[done:])
    for grad, source in zip(grads, wanted if grads else ()):
        if isinstance(grad, tf.Tensor):
            is_handle = source.dtype == tf.resource
            spec = _tf.graph_parts.spec_of_variable(source) if is_handle else source
            grad.set_shape(spec.shape if spec is not None else None)
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
        marks.draws.whole,
        marks.draws.shared,
        marks.draws.names(),
        _names(outputs),
        [_name(one) for one in of_outputs],
        [LossMark(v.name, is_sum, _name(one)) for (v, is_sum), one in zip(marks.losses, of_losses)],
        [(Moments(*[value.name for value in moments]), receive) for moments, receive in marks.moments],
        statistics,
        wholes,
        [of_parts(grad, _name) for grad in by_variables],
        [grad_of(tensor) for tensor in marks.watched],
        [_lengths(var) for var in variables or ()],
        [(value.name, is_sum) for value, is_sum in marks.numbers],
        _names(marks.rows),
        [],
    )


def _require_no_draws(graph: tf.Graph, ops: Sequence[tf.Operation]) -> None:
    """Raise if a gradient draws random numbers: of the examples, it would draw those of the first ones for all."""
    drawing = [op.name for op in ops if _tf.random_ops.random_op_of(op) is not None]
    drawing += _tf.graph_parts.calls_that_draw(graph, ops)
    if drawing:
        raise Unrepeatable(f"its gradient draws random numbers. Received: {drawing}. [accum: whole-batch-loop]")


def is_differentiable(tensor: tf.Tensor) -> bool:
    """Whether a tensor can have a gradient."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def _lengths(source: Any) -> List[int]:
    """Return the shape of what is differentiated by, which can be a variable's handle."""
    spec = _tf.graph_parts.spec_of_variable(source) if source.dtype == tf.resource else None
    shape: tf.TensorShape = source.shape if spec is None else spec.shape
    return shape.as_list()  # type: ignore[no-any-return]


def _name(tensor: Optional[tf.Tensor]) -> Optional[Key]:
    return None if tensor is None else tensor.name


def _names(tensors: Sequence[tf.Tensor]) -> List[Key]:
    return [tensor.name for tensor in tensors]


def _placeholder(dtype: tf.DType, shape: Union[tf.TensorShape, Sequence[Optional[int]]]) -> tf.Tensor:
    return tf.compat.v1.placeholder(dtype, shape, name="accum_placeholder")


def _any_length(tensor: tf.Tensor) -> Union[tf.TensorShape, Sequence[Optional[int]]]:
    return [None] + tensor.shape.as_list()[1:] if tensor.shape.rank else tensor.shape
