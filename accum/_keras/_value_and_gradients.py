"""The gradients of a whole batch in a custom training loop, with the memory of one micro-batch (law L18)."""

import functools
import weakref
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from accum import _check, _rows, _tf
from accum._engine._batch import Batch, as_tensor
from accum._engine._cut_graph import CutGraph
from accum._engine._draws import warn_of_others
from accum._engine._gradients import keeping_gradients
from accum._engine._meetings import looked_up_by_shapes, looked_up_for_all, own_gradients
from accum._engine._value_and_gradients import (
    AT_ONCE,
    Derived,
    Task,
    Weight,
    WholeBatchFunction,
    called,
    checked,
    checked_variables,
    mean_and_gradients,
)
from accum._engine._whole_call import segments_of, whole_call
from accum._tf import Gradient, Nested, tf
from accum._tf.types import WholeBatch

ValueAndGradients = Tuple[tf.Tensor, List[Optional[Gradient]]]


def value_and_gradients(
    function: Callable[..., tf.Tensor],
    data: Nested,
    variables: Sequence[tf.Variable],
    micro_batch_size: int,
    *,
    weight: Weight = "examples",
    whole_batch: Optional[WholeBatch] = None,
    recompute: bool = True,
    loss: Optional[Callable[..., tf.Tensor]] = None,
) -> Tuple[tf.Tensor, List[Optional[Gradient]]]:
    """Compute a loss over a whole batch and its gradients, with the memory of one micro-batch.

    The batch is split along its first axis, in order, into one remainder of at most `micro_batch_size` examples, which
    comes first, and micro-batches x_i of `micro_batch_size` examples. They run one after the other:

        value     = sum_i(w_i function(x_i)) / sum_i(w_i)
        gradients = sum_i(w_i d function(x_i) / d variables) / sum_i(w_i)

    A `function` that is a mean over its examples gives the value and the gradients of the whole batch. So does any
    other with the default `whole_batch`, which traces it once more to prove what it is. It works eagerly, in a
    `tf.function` (with `jit_compile=True`, if shapes are static), under a `tf.GradientTape` of your own, which then
    keeps the memory of all micro-batches, and in `strategy.run`, where each replica computes the mean and the
    statistics over its own part of the batch.

    With `loss`, `function` returns the outputs of a network, and `loss(outputs, *data)` is computed once, over the
    whole batch. By default or with `whole_batch="batch_norm"`, batch normalisation in `function` uses the mean and
    variance of the whole batch, and moves its averages once, whether it is a layer of Keras, `tf.nn.moments` or a fused
    operation. See `whole_batch` of `GradientAccumulateModel`. Where that is needed, an eager call traces `function` in
    each call, so decorate your step with `tf.function`. The value can't be differentiated again.

    Args:
      function: function of one micro-batch, a scalar loss; with `loss`, a nested structure of tensors whose first axis
        is the micro-batch. If `data` is a tuple or a list, it is called as
        `function(*micro_batch)`, otherwise as `function(micro_batch)`. In a `tf.function`, it is traced at most three
        times. Eagerly, it is traced in its first call, and again for other `variables` or another kind of `data`, but
        not when a Python variable that it reads has changed.
      data: nested structure of tensors, `tf.RaggedTensor`, `tf.SparseTensor` or arrays that share their first axis, the
        examples. Scalars, None and objects other than tensors are passed to each call unchanged.
      variables: list of variables to differentiate with respect to.
      micro_batch_size: the largest number of examples in a call of `function`, >= 1.
      weight: the weight w_i of a micro-batch. "examples": its number of examples. "equal": 1. Or a function of the
        micro-batch, called like `function`, that returns a scalar >= 0, such as its number of unmasked elements. By
        default, the result is `function` of the whole batch whatever the weight, which may save a pass over the batch.
      whole_batch: what is computed over the whole batch. None: what exactness needs. A mean over examples that provably
        do not meet takes one pass; so does a sum over them, divided by what a `weight` of your own computes in the
        same operations. Otherwise, it is computed as with "batch_norm", or, if it can't be split, at once, with a
        warning. (): nothing, as in the formulas above, for memory or time. Or "batch_norm", "loss", both as a tuple, or
        "all". "loss" needs `loss`, which implies it.
      recompute: whether to keep few of the tensors between barriers, and to compute the others again; False: keep all.
      loss: function `loss(outputs, *data)`, or `loss(outputs, data)` if `data` is neither a tuple nor a list: a scalar.

    Returns:
      `(value, gradients)`. The value is a tensor of shape []. The gradients are a list in the order of `variables`: for
      each a tensor of its shape and dtype, `tf.IndexedSlices` or None. If all weights are 0, so are value and
      gradients.

    Raises:
      TypeError, ValueError: an argument does not match its description above, the loss depends on no variable, or
        something in `function` can't be computed over the whole batch.
      RuntimeError: in a static graph, for which there is `accum.compat.v1.value_and_gradients`.

    Example:
      >>> def loss(x, y):
      ...     return tf.reduce_mean((model(x, training=True) - y) ** 2)
      >>> value, gradients = accum.value_and_gradients(loss, (x, y), model.trainable_variables, micro_batch_size=32)
      >>> optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    """
    # Where AutoGraph converts the caller, it converts this function and these, and so what they call, but none below.
    calls = {
        "function": lambda *args: function(*args),
        "weight": lambda *args: weight(*args),  # type: ignore[operator]
        "loss": lambda *args: loss(*args),  # type: ignore[misc]
    }
    options = {"weight": weight, "whole_batch": whole_batch, "recompute": recompute, "loss": loss}
    return _value_and_gradients(function, data, variables, micro_batch_size, calls, options)


@_tf.graphs.run_as_written
def _value_and_gradients(
    function: Callable[..., tf.Tensor],
    data: Nested,
    variables: Sequence[tf.Variable],
    micro_batch_size: int,
    calls: Dict[str, Callable[..., Any]],
    options: Dict[str, Any],
) -> ValueAndGradients:
    """Check the arguments, and compute the loss and its gradients.

    Args:
      calls: what calls the function, the weight and the loss of the user as the caller would.
      options: the other arguments of `value_and_gradients`.
    """
    if _tf.graphs.in_static_graph():
        raise RuntimeError(
            "`accum.value_and_gradients` runs eagerly or in a `tf.function`: in a static graph, use "
            "`accum.compat.v1.value_and_gradients`. [accum: graph-mode]"
        )
    task = checked(function, micro_batch_size, **options)
    listed = checked_variables(variables)
    is_default = options["whole_batch"] is None
    if is_default and (task.loss is not None or not _is_one_pass(task, data, listed)):
        # The function sees the whole batch then, and needs no weights.
        task = task._replace(barriers=("batch_norm",), weight="examples" if callable(task.weight) else task.weight)
    weight = calls["weight"] if callable(task.weight) else task.weight
    task = task._replace(weight=weight, loss=None if task.loss is None else calls["loss"])
    if task.barriers or task.loss is not None:
        with keeping_gradients():
            return _over_whole_batch(task, data, listed, is_default)

    task = task._replace(function=calls["function"])

    def differentiate(compute: Callable[[], tf.Tensor], _part: Nested) -> Derived:
        value, grads = _differentiated(compute, listed)
        return Derived(value, list(zip(grads, listed)))

    derived = mean_and_gradients(task, data, differentiate, _tf.graphs.is_compiled_by_xla_here())
    return derived.value, [grad for grad, _ in derived.grads_and_vars]


def _differentiated(compute: Callable[[], tf.Tensor], variables: Sequence[tf.Variable]) -> ValueAndGradients:
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(variables)
        value = compute()
    return value, tape.gradient(value, variables)


def _over_whole_batch(task: Task, data: Nested, variables: List[tf.Variable], is_default: bool) -> ValueAndGradients:
    """Compute the loss and its gradients with `task.barriers`, or with whatever exactness needs if `is_default`."""
    whole = WholeBatchFunction(_as_in_function_of_users(task), data)
    compiled, finds = _tf.graphs.is_compiled_by_xla_here(), "batch_norm" in task.barriers
    try:
        segments = segments_of(
            whole.traced,
            whole.batch,
            variables,
            task.recompute,
            finds,
            compiled=compiled,
            are_means=task.loss is None,
            refuses_meetings=is_default,
        )
        _check_moved(segments.graph, is_default)
    except Exception as error:  # what is wrong with the function itself, it raises once more
        if not is_default:
            raise
        segments, reason = None, str(error) if isinstance(error, ValueError) else repr(error)

    def loss() -> tf.Tensor:
        if segments is None:
            return whole.loss(whole.traced(whole.batch.flatten(whole.batch.part(0, whole.batch.count))))
        outputs, _ = whole_call(segments, whole.batch, task.size, variables, [], compiled)
        return whole.loss(outputs)

    value, grads = _differentiated(loss, variables)
    _check.pairs(zip(grads, variables))
    if segments is None:
        _check.warn(AT_ONCE.format(reason=_check.reason_of(reason)))
    return value, grads


def _as_in_function_of_users(task: Task) -> Task:
    """Return a task whose functions AutoGraph converts, as in a `tf.function` of the user's."""
    touched = functools.partial(functools.partial, _tf.graphs.touched_by_autograph)
    weight = touched(task.weight) if callable(task.weight) else task.weight
    return task._replace(function=touched(task.function), weight=weight)


PLAIN = (bool, int, float, str, type(None))
"""Types of data whose representation says all of them."""

Proofs = Dict[str, List["weakref.ref[tf.Variable]"]]
"""{kind of data and variables for which one pass is proven: these variables}. Others may have their ids later."""

_PROVEN: "weakref.WeakKeyDictionary[Any, Tuple[Any, Dict[str, Proofs]]]" = weakref.WeakKeyDictionary()
"""{function of the user's: ({weight of the user's: proofs}, {name of a weight: proofs})}"""


def _is_one_pass(task: Task, data: Nested, variables: Sequence[tf.Variable]) -> bool:
    """Whether a function provably is what its micro-batches give in one pass: a mean over examples that do not meet.

    With a `weight` of the user's, it may be a sum over examples that is divided by what `weight` computes. A graph
    traces the function for that in any case; eagerly, the proof holds for a function, the kind of its data and the
    variables, as the trace of a `tf.function` does.
    """
    batch = Batch(data)
    if not batch.is_dense:
        return False
    leaves = [as_tensor(leaf) for leaf in tf.nest.flatten(data)]
    others = [leaf for leaf in leaves if not isinstance(leaf, tf.Tensor)]
    places = tf.nest.pack_sequence_as(data, [isinstance(leaf, tf.Tensor) for leaf in leaves])
    kind = repr((places, batch.specs(), others, [id(variable) for variable in variables]))
    proven: Proofs = {}
    if tf.executing_eagerly() and all(isinstance(leaf, PLAIN) for leaf in others):
        try:
            of_weights, of_names = _PROVEN.setdefault(task.function, (weakref.WeakKeyDictionary(), {}))
            proofs: Any = of_weights if callable(task.weight) else of_names
            proven = proofs.setdefault(task.weight, proven)
        except TypeError:  # nothing can refer to one of them
            pass
    for gone in [one for one, refs in proven.items() if any(ref() is None for ref in refs)]:
        del proven[gone]
    if kind not in proven and _is_proven(_as_in_function_of_users(task), data, batch):
        proven[kind] = [weakref.ref(variable) for variable in variables]
    return kind in proven


def _is_proven(task: Task, data: Nested, batch: Batch) -> bool:
    inputs: List[tf.Tensor] = []
    whole = WholeBatchFunction(task, data)

    @_tf.graphs.untouched_by_autograph
    def traced(*tensors: tf.Tensor) -> List[tf.Tensor]:
        inputs.extend(tensors)
        with _tf.graph_parts.running_functions_directly(True):
            weights = [called(task.weight, batch.packed(tensors))] if callable(task.weight) else []
            return [tf.identity(whole.value(tensors)), *map(tf.convert_to_tensor, weights)]

    try:
        before = _tf.python_state.PythonState()
        graph = tf.function(traced).get_concrete_function(*batch.specs()).graph
        has_drawn = before.has_moved(graph)
        value, *weights = graph.outputs
        drawing = [op for op in graph.get_operations() if _tf.random_ops.random_op_of(op) is not None]
        own = own_gradients(graph, [value.op.name])
        rows = {one.name: _rows.Rows(0, 1) for one in inputs if one.shape.rank != 0}
        found = _rows.analyse(graph, [value.op.name] + own.operations, rows)
    except Exception:  # what can't be looked at isn't proven; what is wrong with it, the function itself raises
        return False
    if has_drawn or own.mixing(found) or not own.are_linear or looked_up_by_shapes(graph, found):
        return False
    if any(map(_tf.random_ops.draws_for_all, drawing)) or (tf.executing_eagerly() and looked_up_for_all(graph)):
        return False
    if _tf.op_walks.may_assign_beside(graph, []) or _tf.graph_parts.filling(graph):
        return False
    is_proven = not found.counting and _is_mean(found, value, *weights)
    if is_proven and drawing and tf.executing_eagerly():  # nothing is replaced then
        warn_of_others([op.name for op in drawing])
    return is_proven


def _is_mean(found: _rows.Analysis, value: tf.Tensor, weight: Optional[tf.Tensor] = None) -> bool:
    """Whether a loss is a mean over examples, or a sum over them that is divided by `weight`, perhaps scaled."""
    op, kind = value.op, found.combination(value.name)
    if kind == "constant" or (kind == "mean" and weight is None):
        return True
    if weight is None or not op.inputs:
        return False
    kinds = [found.combination(one.name) for one in op.inputs]
    if op.type in ("Div", "DivNoNan", "RealDiv") and kinds[:2] == ["sum", "sum"]:
        return _tf.op_walks.are_alike(op.inputs[1], weight)
    if op.type in ("Cast", "EnsureShape", "Identity", "Neg", "Reshape"):
        others = [op.inputs[0]]
    elif op.type in ("Add", "AddV2", "Mul", "Sub") or (op.type in ("Div", "RealDiv") and kinds[1] == "constant"):
        others = [one for one, kind in zip(op.inputs, kinds) if kind != "constant"]
    else:
        return False
    return len(others) == 1 and _is_mean(found, others[0], weight)


def _check_moved(graph: CutGraph, is_refused: bool) -> None:
    """Raise, or warn, if there are variables to which each micro-batch assigns."""
    moved = {id(handle) for handle in graph.variables.moved}
    names = sorted(var.name for var in getattr(graph.trace.graph, "variables", ()) if id(var.handle) in moved)
    if names and is_refused:
        raise ValueError(f"it changes variables by the examples. Received: {names}.")
    if names:
        _check.warn(
            "`function` changes variables once per micro-batch, unlike at the full batch, whose result this may "
            f"change: change them outside of it, once. Changed: {names}. [accum: changed-variables]",
            _check.InexactWarning,
        )
