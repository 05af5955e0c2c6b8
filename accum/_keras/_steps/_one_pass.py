"""Is one pass over the micro-batches of a batch proven to make the step of the full batch?

It is if Keras' own step runs, and each of its losses is a mean or sum of losses that belong to one example each. For
that the call of the model is traced on a batch of unknown size, and `accum._rows` looks at its graph. All else is
computed as by `whole_batch="batch_norm"`, whose train step runs once.
"""

import itertools
from typing import Any, Callable, List, Optional, Sequence, Set, Tuple

from accum import _check, _rows, _tf
from accum._engine import _replicas
from accum._engine._batch import Batch
from accum._engine._meetings import (
    calls_that_check,
    checks_of_batch,
    looked_up_by_shapes,
    looked_up_for_all,
    own_gradients,
)
from accum._keras import _step_context
from accum._tf import Data, Nested, tf

ACROSS_EXAMPLES = frozenset(["dice", "tversky", "circle", "pearsoncorrelation", "concordancecorrelation"])
"""Losses and metrics of Keras that compare the examples of a batch, or add them up before a quotient: plain names."""

BY_LABELS = ("hinge", "squaredhinge")
"""Those that convert labels of 0 and 1, if all of the batch are."""

BY_SHAPES = ("accuracy", "acc", "crossentropy", "ce")
"""Names for which Keras chooses a metric by the shapes of targets and outputs, sparse ones among them."""


def what_sees_the_batch(model: tf.keras.Model, name: str, step: Callable[[Data], Nested], data: Data) -> Optional[str]:
    """Return what may see several examples at once in a step, in words; None if it is proven that nothing does.

    Args:
      model: a `GradientAccumulateModel`.
      name: "train_step", "test_step" or "predict_step".
      step: what runs for it, Keras' own or the user's.
      data: what Keras gives to it.
    """
    before = what_is_known_to_see_it(model, name, step)
    if before is not None:
        return before
    x, y, weights = _tf.losses.unpack_data(data)
    is_training = name == "train_step"
    if not Batch(x).is_dense or any(isinstance(leaf, tf.RaggedTensor) for leaf in tf.nest.flatten(y)):
        return "inputs or targets that are not dense"
    losses = metrics = []  # type: List[Any]
    if name != "predict_step":
        losses, metrics = _tf.losses.compiled_losses(model), _tf.losses.compiled_metrics(model)
    if losses and _tf.losses.is_neither_sum_nor_mean(getattr(model, _tf.losses.LOSS_CONTAINER, None)):
        return "losses that are neither all means nor all sums"
    across = [one for one in losses + metrics if not may_be_apart(one)]
    if across:
        return f"a loss or metric ({_check.shown(list(map(name_of, across)))})"
    functions = [one for one in losses + metrics if not (_tf.losses.is_of_keras(one) or _is_declared_apart(one))]
    if functions and len(tf.nest.flatten(y)) != 1:
        return f"a loss or metric of your own with several targets ({_check.shown(list(map(name_of, functions)))})"
    is_built = model.built  # Keras 2 says so of a subclassed model before its `call` has run
    try:
        if not is_built:
            _build(model, x, is_training)  # by the batch as it is
            is_built = True
        return _Call(model, x, y, weights, is_training, functions, losses, metrics).what_meets()
    except Exception as error:  # what can't be traced isn't proven; the step itself raises what is wrong with it
        if not (is_built or model.run_eagerly):
            raise  # what the user has to see
        return f"a call that can't be looked at ({type(error).__name__}: {error})"


def call_of_any_size(
    model: tf.keras.Model, x: Nested
) -> Tuple[tf.Graph, List[tf.Tensor], List[tf.Tensor], List[tf.Tensor]]:
    """Trace the call of a model in training, which is not split, for any number of examples.

    Returns:
      (graph, inputs, outputs, losses that layers add)
    """
    call = _Call(model, x, None, None, True, [], [], [])
    with _tf.watching.replacing_calls(None), _step_context.entering(model, calls=None), _tf.steps.setting_back_layers(
        model
    ):
        graph = call.graph()
    return graph, call.inputs, call.rows[: call.outputs], call._others


def what_is_known_to_see_it(model: tf.keras.Model, name: str, step: Callable[[Data], Nested]) -> Optional[str]:
    """Return what `what_sees_the_batch` does, as far as no data are needed to tell."""
    found = methods_of_user(model, name, step)
    norms = [layer.name for layer in _tf.batch_norm.batch_norms_in(model) if layer.trainable and name == "train_step"]
    return ", ".join(found + [f"batch normalization ({_check.shown(norms)})"] * bool(norms)) or None


def methods_of_user(model: tf.keras.Model, name: str, step: Callable[[Data], Nested]) -> List[str]:
    """Return the names of a step, and of methods that steps of Keras call, that are the user's."""
    methods = [
        method
        for method in ("compute_loss", "compute_metrics", "get_metrics_result")
        if _tf.losses.is_of_user(getattr(model, method, None), method)
    ]
    own = [] if _tf.steps.is_step_of_keras(step, name) else [name]
    return [f"`{_tf.models.name_of_class(model)}.{method}`" for method in own + methods]


def kind_of(model: tf.keras.Model, data: Data) -> str:
    """Return what the answer depends on that may change between steps: the kind of the data, and what is frozen.

    Lengths of axes are part of it, as far as they are known in the trace: Python code of the user's may ask for them.
    """
    leaves = [(type(leaf).__name__, getattr(leaf, "dtype", None), _shape(leaf)) for leaf in tf.nest.flatten(data)]
    trainable = [bool(layer.trainable) for layer in _tf.batch_norm.batch_norms_in(model)]
    return repr((tf.nest.map_structure(lambda leaf: 0, data), leaves, trainable))


def _called(model: tf.keras.Model, x: Nested, is_training: bool) -> Nested:
    """Call a model as its step does."""
    call = next(vars(base)["__call__"] for base in type(model).__mro__ if _is_of_others(base))
    return _tf.graphs.called_as_in_fit(call, model, x, training=is_training)


def _build(model: tf.keras.Model, x: Nested, is_training: bool) -> None:
    """Let a model create its variables."""
    batch = Batch(x)

    @_tf.graphs.untouched_by_autograph
    def first_call(*tensors: tf.Tensor) -> None:
        _called(model, batch.packed(tensors), is_training)

    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in batch.flatten(x)]
    with tf.init_scope():
        tf.function(first_call).get_concrete_function(*specs)


def _is_of_others(base: type) -> bool:
    """Whether a class has a `__call__` that is not accum's own."""
    return "__call__" in vars(base) and not base.__module__.startswith("accum.")


def _shape(leaf: Any) -> Optional[List[Optional[int]]]:
    """Return the lengths of axes, but for that of the examples; None if not even the number of axes is known."""
    shape = tf.TensorShape(getattr(leaf, "shape", None))
    return None if shape.rank is None else [None] * bool(shape.rank) + shape.as_list()[1:]


def name_of(one: Any) -> str:
    """Return the name of a loss or metric, or of the function that it computes, as the user knows it."""
    if isinstance(one, str):
        return one
    function = getattr(one, "fn", getattr(one, "_fn", None))
    return str(getattr(one, "__name__", getattr(function, "__name__", type(one).__name__)))


def names_of(one: Any) -> Set[str]:
    """Return the names of a loss or metric, and of the function that it computes."""
    if isinstance(one, str):
        return {one}
    functions = [one, getattr(one, "fn", None), getattr(one, "_fn", None)]
    return {type(one).__name__} | {getattr(function, "__name__", "") for function in functions}


def _is_sparse(one: Any) -> bool:
    """Whether the targets of a loss or metric may be numbers of classes, which have an axis less than outputs."""
    return any(name.lower().startswith("sparse") or name in BY_SHAPES for name in names_of(one))


def _are_alike(targets: Sequence[tf.TensorShape], outputs: Sequence[tf.Tensor], is_paired: bool) -> bool:
    """Whether targets have the axes of outputs, or one more or less, of length 1, which Keras takes away."""
    is_paired = is_paired and len(targets) == len(outputs)
    pairs = zip(targets, outputs) if is_paired else itertools.product(targets, outputs)
    return all(_is_alike(target, output.shape) for target, output in pairs)


def _is_alike(target: tf.TensorShape, output: tf.TensorShape) -> bool:
    if target.rank is None or output.rank is None:
        return False
    shorter, longer = sorted([target.as_list(), output.as_list()], key=len)
    return len(shorter) == len(longer) or (len(shorter) == len(longer) - 1 and longer[-1] == 1)


def _is_declared_apart(one: Any) -> bool:
    """Whether the user has declared that a metric adds up over micro-batches."""
    return getattr(one, "looks_across_examples", None) is False


def may_be_apart(one: Any) -> bool:
    """Whether a loss or metric may be the sum of its values for single examples, as far as its class tells."""
    if isinstance(one, tf.keras.metrics.Metric) and not _tf.layers.comes_with_keras(type(one)):
        return _is_declared_apart(one)
    if isinstance(one, tf.keras.losses.Loss) and not _tf.layers.comes_with_keras(type(one).__call__):
        return False
    plain = {name.replace("_", "").lower() for name in names_of(one)}
    if plain & ACROSS_EXAMPLES.union(BY_LABELS) and _tf.losses.is_of_keras(one):
        return False
    return is_along_last_axis(one)


def is_along_last_axis(one: Any) -> bool:
    """Whether a loss or metric reduces the last axis, or none that it is told."""
    return bool(getattr(one, "axis", getattr(one, "_fn_kwargs", {}).get("axis", -1)) == -1)


class _Call:
    """The call of a model, traced on a batch of any size.

    Args:
      model: the model.
      x, y, weights: the inputs and targets of a batch, and the weights of its examples.
      is_training: whether it is called as in training.
      functions: losses of the user, called as Keras calls them.
      losses, metrics: those that the model was compiled with.

    Attributes, of its graph:
      inputs: the tensors that stand for the batch.
      rows: the outputs, their masks, and what `functions` return.
      outputs: the number of outputs.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        x: Nested,
        y: Nested,
        weights: Nested,
        is_training: bool,
        functions: List[Callable[..., tf.Tensor]],
        losses: List[Any],
        metrics: List[Any],
    ) -> None:
        self._model = model
        self._batch = Batch((x, y) if functions else (x,))
        self._is_training = is_training
        self._functions = functions
        self._losses = losses
        self._compiled = losses + metrics
        self._sums = bool(losses) and _tf.losses.sums_over_examples(getattr(model, _tf.losses.LOSS_CONTAINER, None))
        self.rows: List[tf.Tensor] = []
        self.outputs = 0
        self._others: List[tf.Tensor] = []
        self.inputs: List[tf.Tensor] = []
        self._targets = [tf.TensorShape(leaf.shape) for leaf in tf.nest.flatten(y) if leaf is not None]
        self._weights = [tf.TensorShape(leaf.shape) for leaf in tf.nest.flatten(weights) if leaf is not None]
        self._ranks: List[Optional[int]] = []  # of losses
        self._is_dict = isinstance(y, dict)
        self._has_several_outputs = self._has_masks = self._lacks_axes = self._may_broadcast = self._is_paired = False

    def graph(self, directly: bool = False) -> tf.Graph:
        """Trace the call, with the functions of the user's in it, or `directly`: with what these compute."""

        @_tf.graphs.untouched_by_autograph
        def call(*tensors: tf.Tensor) -> List[tf.Tensor]:
            with _tf.graph_parts.running_functions_directly(directly):
                return self._traced(*tensors)

        traced = tf.function(call)
        with tf.init_scope():
            return traced.get_concrete_function(*self._batch.specs()).graph

    def what_meets(self) -> Optional[str]:
        """Return what is not one entry for each example, or is assigned, in words; None if there is no such thing."""
        parts = [part for part in _tf.models.parts_of_user(self._model) + self._functions if hasattr(part, "__dict__")]
        before = _tf.python_state.PythonState(parts)
        graph = self.graph()
        has_drawn = before.has_moved(graph)  # or another thread has: two passes are exact
        if has_drawn:  # what only the first trace sets is no counter
            before = _tf.python_state.PythonState(parts)
            graph = self.graph()
            has_drawn = before.has_moved(graph)
        graph = self.graph(directly=True) if calls_that_check(graph) else graph
        leaves_out = self._has_masks or any(map(_tf.losses.may_leave_out, self._losses))
        if self._losses and self._has_several_outputs and leaves_out:  # one loss may be for all outputs
            return "losses that may divide by different numbers"
        if self._lacks_axes:
            return "outputs without an axis beside that of the batch"
        if self._compiled and not self._fit_weights():
            return "weights of examples that have fewer axes than their losses"
        if self._may_broadcast and not all(map(_is_sparse, self._compiled)):
            return "targets and outputs whose axes differ, so that examples may meet in a loss or metric"
        if self._sums and self._others:
            return "losses that are sums, beside others, which each micro-batch would add"
        if self._assigns(graph):
            return "variables that the call changes"
        if has_drawn and (self._functions or _tf.models.has_code_of_user(self._model)):
            return "Python code that draws or counts while it is traced"  # which two passes do once
        filling = _tf.graph_parts.filling(graph)
        if filling:
            return f"a table or a queue that the call fills ({_check.shown(filling)})"
        inputs = {tensor.name: _rows.Rows(0, 1) for tensor in self.inputs if tensor.shape.rank != 0}
        names = [tensor.op.name for tensor in self.rows + self._others]
        ops = _tf.op_walks.ancestors(map(graph.get_operation_by_name, names))
        drawing = [op.name for op in ops if _tf.random_ops.draws_for_all(op)]
        drawing += _tf.graph_parts.calls_that_draw(graph, ops)
        taking = _tf.graph_parts.taking_the_next(graph, ops)
        if taking:
            return f"operations that return something else each time that they run ({_check.shown(taking)})"
        if drawing:
            return f"random numbers that are not one for each example ({_check.shown(drawing)})"
        own = own_gradients(graph, names if self._is_training else [])
        found = _rows.analyse(graph, names + own.operations, inputs)
        mixing = own.mixing(found)
        if mixing or not own.are_linear:
            return f"gradients of its own, across examples or not linear ({_check.shown(mixing or own.users)})"
        checks = [op.name for op in checks_of_batch(graph, names, inputs)]
        if checks:
            return f"assertions of the whole batch ({_check.shown(checks)})"
        if any(found.verdict(tensor.op.name) for tensor in self._others):
            return "losses that layers add"
        for_all = looked_up_for_all(graph) if self._is_training and tf.executing_eagerly() else []
        if for_all:
            return f"rows of a table that are the same for all examples, eagerly ({_check.shown(for_all)})"
        by_shapes = looked_up_by_shapes(graph, found) if self._is_training else []
        if by_shapes:
            return f"rows of a table that are looked up by shapes alone ({_check.shown(by_shapes)})"
        is_apart = [found.rows(one.name) == _rows.Rows(0, 1) and found.level(one.name) == 0 for one in self.rows]
        if all(is_apart) and not found.counting:
            return None
        met = found.meets or found.counting or found.reduces
        what = (
            f"operations across examples ({_check.shown(met)})" if met else "outputs that are not one for each example"
        )
        functions = [name_of(function) for function in self._functions]
        meeting = [name for name, one in zip(functions[::-1], is_apart[::-1]) if not one]
        is_of_functions = all(is_apart[: len(is_apart) - len(functions)]) and meeting
        return f"{what} in {_check.shown(sorted(meeting))}" if is_of_functions else what

    def _traced(self, *tensors: tf.Tensor) -> List[tf.Tensor]:
        self.inputs = list(tensors)
        x, *targets = self._batch.packed(tensors)
        outputs = _called(self._model, x, self._is_training)
        flat = tf.nest.flatten(outputs)
        self._has_several_outputs = len(flat) > 1
        self._has_masks = any(_tf.losses.mask_of(one) is not None for one in flat)
        self._lacks_axes = bool(self._compiled) and any(one.shape.rank in (None, 0, 1) for one in flat)
        # A dict of targets is sorted by names, a list of outputs is not.
        self._is_paired = isinstance(outputs, dict) or not self._is_dict
        self._may_broadcast = not _are_alike(self._targets, flat, self._is_paired)
        self.outputs = len(flat)
        masks = [mask for mask in map(_tf.losses.mask_of, flat) if mask is not None]
        self.rows = [tf.identity(one) for one in flat + masks]
        self._ranks = [None if one.shape.rank is None else one.shape.rank - 1 for one in flat]
        for function in self._functions:
            (output,), (target,) = flat, tf.nest.flatten(targets)
            is_loss = any(function is one for one in self._losses)
            target, output = _tf.losses.ranked_as_in_compile(function, target, output, is_loss)
            elements = _tf.losses.loss_of_elements(function, target, output)
            if _tf.losses.mask_of(elements) is not None:
                raise ValueError("a loss has a mask of its own")
            self.rows.append(tf.identity(elements))
            self._ranks.append(elements.shape.rank)
        self._others = [tf.identity(loss) for loss in self._model.losses]
        return self.rows + self._others

    def _fit_weights(self) -> bool:
        """Whether weights have the axes of losses, but for one that Keras adds or removes: others would broadcast."""

        def fits(rank: Optional[int], weights: tf.TensorShape) -> bool:
            if rank is None or weights.rank is None:
                return False
            missing = rank - weights.rank
            return 0 <= missing <= _tf.losses.AXES_ADDED_TO_WEIGHTS or (missing == -1 and weights[-1] == 1)

        is_paired = self._is_paired and len(self._ranks) == len(self._weights)
        pairs = zip(self._ranks, self._weights) if is_paired else itertools.product(self._ranks, self._weights)
        return all(itertools.starmap(fits, pairs))

    def _assigns(self, graph: tf.Graph) -> bool:
        """Whether the call changes a variable other than the seeds of Keras' random numbers."""
        seeds = _tf.steps.seeds_of(self._model) + _tf.steps.seeds_without_model()
        local = [_replicas.local_variable(_tf.variables.native(seed)) for seed in seeds]
        return _tf.op_walks.may_assign_beside(graph, [variable.handle for variable in local])
