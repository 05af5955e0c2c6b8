"""Compute a whole batch in a static graph, so that batch normalisation and the loss see all examples (law L19).

    function(micro-batch) -> ops in the graph -> their part that depends on the batch, traced as a function -> segments

The function is called once, with the first micro-batch, and the operations that it adds to the graph are only read. The
part that depends on the batch is imported into the graph of a function, which is cut into segments. All other
operations, such as reads of variables, stay where they are. So gradients by variables of any kind are the graph's own.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from accum import _tf
from accum._engine._draws import Draws
from accum._engine._gradients import keeping_gradients
from accum._engine._micro_batches import FIRST, MicroBatches
from accum._engine._segments import segments_of, whole_call
from accum._engine._statistics import Moments
from accum._engine._trace import Marks, is_differentiable
from accum._engine._value_and_gradients import Task, WholeBatchFunction
from accum._tf import tf
from accum.compat.v1._collections import Additions, depends_on, ops_of
from accum.compat.v1._moving_statistics import MovesInTurn
from accum.compat.v1._update_ops import Average, require_none_in_place, taken_over

KEYS = tf.compat.v1.GraphKeys
CONTROL_FLOW = {"Switch", "RefSwitch", "Merge", "RefMerge", "Enter", "RefEnter", "Exit", "RefExit", "NextIteration"}


class _Part(NamedTuple):
    """The part of a graph that depends on a batch.

    Attributes:
      ops: its operations, in the order in which they were created.
      boundary: tensors that they use, which do not depend on the batch.
      graph_def: a `GraphDef` with the versions and functions of the graph.
    """

    ops: List[tf.Operation]
    boundary: List[tf.Tensor]
    graph_def: Any


def whole_value(task: Task, data: Any, variables: Optional[Sequence[tf.Variable]]) -> Tuple[tf.Tensor, Any]:
    """Return the loss of a whole batch, and what `compute_gradients` returns for it.

    Args:
      task: a `Task` with barriers or a loss.
      data: nested structure of tensors that share their first axis.
      variables: list of variables, or None for all trainable ones.
    """
    with keeping_gradients():
        return _StaticCall(task, data).value_and_gradients(variables)


class _StaticCall:
    def __init__(self, task: Task, data: Any) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self._task = task
        self._whole = WholeBatchFunction(task, data)
        self._averages: Dict[str, List[Tuple[Average, Average]]] = {}  # by the name of what is normalised
        self._moments: Dict[str, Moments] = {}  # of the whole batch, by the same name
        self._stilled: Set[tf.Operation] = set()  # which update these
        # Of the micro-batch and the batch, as in the trace:
        self._position = tf.compat.v1.placeholder(tf.int64, [], "accum_position")
        self._total = tf.compat.v1.placeholder(tf.int64, [], "accum_total")
        self._seed = tf.compat.v1.placeholder(tf.int64, [2], "accum_seed")
        self._drawn: List[tf.Tensor] = []  # random numbers of the examples
        self._names: Dict[str, str] = {}  # {name of a tensor in the trace: its name in the graph}

    def value_and_gradients(self, variables: Optional[Sequence[tf.Variable]]) -> Tuple[tf.Tensor, Any]:
        template, outputs, created = self._call()
        part = self._part(template, outputs, created)
        listed = list(tf.compat.v1.trainable_variables()) if variables is None else list(variables)
        outside = [tf.identity(one) if one.dtype != one.dtype.base_dtype else one for one in part.boundary]  # no refs
        values, handles = _sources(outside, listed)
        finds = "batch_norm" in self._task.barriers

        def function(tensors: Sequence[tf.Tensor], marks: Marks) -> List[tf.Tensor]:
            feeds = {one.name: tensor for one, tensor in zip(template, tensors)}
            inside = [_tf.graph_parts.captured(one) for one in outside]
            feeds.update((one.name, tensor) for one, tensor in zip(part.boundary, inside))
            self._names = {tensor.name: name for name, tensor in feeds.items()}
            own = (self._position, marks.position), (self._total, marks.total), (self._seed, marks.seed)
            feeds.update((one.name, tensor) for one, tensor in own)
            marks.sources = [tensor for one, tensor in zip(outside, inside) if any(one is value for value in values)]
            marks.sources += handles
            drawn = [tensor for tensor in self._drawn if tensor.op in part.ops]
            imported = self._imported(part, feeds, outputs + drawn)
            marks.draws.drawn += imported[len(outputs) :]
            return imported[: len(outputs)]

        segments = segments_of(
            function,
            self._whole.batch,
            [],
            self._task.recompute,
            finds,
            receive=self._receive,
            are_means=self._task.loss is None,
        )
        results, _ = whole_call(segments, self._whole.batch, self._task.size, values + handles, [])
        missing = [mean for name, pairs in self._averages.items() if name not in self._moments for mean, _ in pairs]
        if missing:
            cause = "were not found in the graph: leave out `whole_batch`"
            if not finds:
                cause = 'are computed only with `whole_batch="batch_norm"`: pass it besides `loss`'
            raise ValueError(
                "These averages of batch normalisation are updated, but the statistics of the whole batch towards "
                f"which they move {cause}. Received: {[mean.var.op.name for mean in missing]}. [accum: moving-averages]"
            )
        additions = Additions(self._graph)
        value = self._whole.loss(results)
        additions.keep(lambda key, _: key != KEYS.LOSSES)
        self._move_averages()
        # The base class scales the loss for the strategy of an Estimator, as the optimizers do.
        optimizer = tf.compat.v1.train.Optimizer(use_locking=False, name="gradients")
        return value, optimizer.compute_gradients(value, listed)

    def _call(self) -> Tuple[List[tf.Tensor], List[tf.Tensor], List[tf.Operation]]:
        """Call the function with the first micro-batch. Returns what it was given, its results, and its operations."""
        batch = self._whole.batch
        part = MicroBatches(batch, self._task.size).part(batch, FIRST)
        template = [
            tf.compat.v1.placeholder_with_default(tensor, spec.shape)  # so that no length becomes a constant
            for tensor, spec in zip(batch.flatten(part), batch.specs())
        ]
        additions = Additions(self._graph)
        before = len(self._graph.get_operations())
        count = batch.count_of(batch.packed(template))
        draws = Draws(lambda: self._seed, self._total)
        with draws.of(self._position, count):
            outputs = self._whole.traced(template)
        self._drawn = draws.drawn
        created = self._graph.get_operations()[before:]
        self._take_over(additions, created, ops_of(template))
        return template, outputs, created

    def _take_over(self, additions: Additions, ops: Sequence[tf.Operation], sources: List[tf.Operation]) -> None:
        """Treat what the function has added to collections as if it came from the whole batch."""
        update_ops = additions.of(KEYS.UPDATE_OPS)
        require_none_in_place(ops, update_ops)
        for mean, variance in taken_over(update_ops):
            self._averages.setdefault(mean.inputs.name, []).append((mean, variance))
            self._stilled.update((mean.assign, variance.assign))
        activities = [one for one in additions.of(KEYS.REGULARIZATION_LOSSES) if depends_on(one, sources)]
        lost = additions.of(KEYS.LOSSES) + activities
        if lost and self._task.loss is not None:
            raise ValueError(
                "`function` adds losses of its micro-batch to a collection, but with `loss` its results alone count: "
                f"return them too, and add them up in `loss`. Received: {[one.name for one in lost]}."
                " [accum: function-effects]"
            )
        local = (KEYS.UPDATE_OPS, KEYS.LOSSES)
        additions.keep(lambda key, added: key not in local and not depends_on(added, sources))

    def _receive(self, key: str, whole: Moments) -> None:
        """Take the moments of the batch at what was normalised."""
        self._moments[self._names.get(key, key.split("/", 1)[1] if "/" in key else key)] = whole

    def _move_averages(self) -> None:
        """Let averages move to the moments of the batch, once, in the order in which the layers were called."""
        in_turn = MovesInTurn()
        for name in [name for name in self._averages if name in self._moments]:
            whole = self._moments[name]
            for mean, variance in self._averages[name]:
                shaped = [tf.reshape(value, mean.var.shape) for value in (whole.mean, whole.variance)]
                in_turn.add(mean, variance, Moments(whole.count, *shaped))

    # ------------------------------------------------------------------------------------------------------------

    def _part(
        self, template: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor], created: Sequence[tf.Operation]
    ) -> _Part:
        """Return the part of the graph from which outputs are computed, as far as it depends on the template."""
        before = {tensor.op for tensor in [*template, self._position, self._total, self._seed]}
        ends = [tensor.op for tensor in outputs]
        wanted = _tf.op_walks.ancestors(ends, before)
        own = set(before)
        is_constant: Dict[tf.Operation, bool] = {}
        ops = []
        for op in wanted:
            depends = any(tensor.op in own for tensor in op.inputs)
            is_constant[op] = not depends and (
                op.type == "Const" or bool(op.inputs) and all(is_constant[t.op] for t in op.inputs)
            )
            if depends:
                own.add(op)
            if depends or is_constant[op]:
                ops.append(op)
        _require_repeatable(ops)
        lost = set(_tf.op_walks.ancestors(ends, before, True)) & set(created) - set(wanted) - self._stilled
        _require_no_effects([op for op in created if op in lost] + ops)
        inside = set(ops) | before
        boundary = {tensor.name: tensor for op in ops for tensor in op.inputs if tensor.op not in inside}
        boundary.update((tensor.name, tensor) for tensor in outputs if tensor.op not in inside)
        return _Part(ops, list(boundary.values()), self._graph.as_graph_def(from_version=self._graph.version))

    def _imported(self, part: _Part, feeds: Dict[str, tf.Tensor], outputs: Sequence[tf.Tensor]) -> List[tf.Tensor]:
        """Import the part into the graph of a function. Returns the outputs there."""
        protos = []
        for op in part.ops:
            keys = [tensor.name for tensor in op.inputs]
            protos.append(_tf.graph_parts.placed(_tf.graph_parts.Node(op.name, op.type, keys, op.node_def), keys))
        wanted = [tensor.name for tensor in outputs if tensor.name not in feeds]
        imported = dict(zip(wanted, _tf.graph_parts.import_part(part.graph_def, protos, feeds, wanted)))
        for tensor in outputs:
            if tensor.name in imported:
                imported[tensor.name].set_shape(tensor.shape)  # which layers may have set themselves
        return [feeds[tensor.name] if tensor.name in feeds else imported[tensor.name] for tensor in outputs]


def _require_no_effects(ops: Sequence[tf.Operation]) -> None:
    names = [op.name for op in ops if _tf.op_walks.changes_variable(op)]
    if names:
        raise ValueError(
            "With `whole_batch`, `function` must not assign to variables, but for the averages in UPDATE_OPS: do that "
            f"outside of it, once. Received: {names}. [accum: function-effects]"
        )


def _require_repeatable(ops: Sequence[tf.Operation]) -> None:
    names = [op.name for op in ops if op.type in CONTROL_FLOW]
    if names:
        raise ValueError(
            "With `whole_batch`, `function` must not contain loops and conditionals of TF 1: pass `training` as a "
            "bool, call `tf.compat.v1.enable_control_flow_v2()` first, or leave out `whole_batch`. Received: "
            f"{names[0]!r} and {len(names) - 1} others. [accum: function-effects]"
        )


def _sources(boundary: Sequence[tf.Tensor], variables: Sequence[tf.Variable]) -> Tuple[List[tf.Tensor], List[Any]]:
    """Return (tensors in `boundary` that are computed from variables, variables whose handles are in it)."""
    handles = {var.handle.name: var for var in variables if hasattr(var, "handle")}
    owners = [var.handle.op if hasattr(var, "handle") else var.op for var in variables]
    values = [one for one in boundary if is_differentiable(one) and depends_on(one, owners)]
    return values, [handles[one.name] for one in boundary if one.name in handles]
