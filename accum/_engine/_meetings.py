"""Where do the examples of a traced function meet, other than at its barriers (law L19)?

Between two barriers, the results of an example must not depend on other examples. `accum._rows` proves that from the
operations of the graph. Whatever it has no rule for may mix examples, and is reported.
"""

from typing import Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from accum import _rows, _tf
from accum._engine._statistics import NORMALIZED
from accum._engine._trace import SCOPE, Key, LossMark, StatisticsMark, Trace, is_differentiable
from accum._tf import tf
from accum._tf.graph_parts import name_of

OF_EXAMPLES = _rows.Rows(0, 1)


def spread_means(found: _rows.Analysis, outputs: Sequence[tf.Tensor]) -> Dict[Key, tf.Operation]:
    """Return {output: operation that fills it} for a mean over examples and its weight, spread over the examples.

    Args:
      found: the analysis.
      outputs: a number and its weight, spread over the examples. The number counts only if it is proven to be a mean.
    """
    filling: Dict[Key, tf.Operation] = {}
    for output in outputs:
        op = output.op
        while op.type == "Identity":
            op = op.inputs[0].op
        is_weight = output is not outputs[0]
        if op.type == "Fill" and (is_weight or found.combination(op.inputs[1].name) in ("mean", "constant")):
            filling[output.name] = op
    return filling


def meetings(trace: Trace, are_means: bool = False, has_calls: bool = False) -> List[str]:
    """Return the names of the operations in which examples meet, or may meet; none if all results are proven apart.

    Args:
      trace: the function. All that it takes of an example must be dense.
      are_means: whether the outputs are those of `spread_means`.
      has_calls: whether to name calls of functions that assert something, since the graph could contain these instead.
    """
    graph = trace.graph
    checking = calls_that_check(graph) if has_calls else []
    if checking:
        return checking
    unknown = [key for key in trace.inputs if graph.get_tensor_by_name(key).shape.rank is None]
    if unknown:
        return list(map(name_of, unknown))
    rows = trace.outputs + [key for mark in trace.wholes for key in mark.inputs]
    moments = [key for mark in trace.statistics for key in mark.moments]
    scalars = [loss.value for loss in trace.losses] + [key for key, _ in trace.numbers]
    begins = [key for mark in trace.statistics for key in mark.begins]
    names = list(dict.fromkeys(map(name_of, rows + begins + moments + scalars + trace.rows)))
    drawing = drawing_for_all(trace, names)
    if drawing:
        return drawing
    needed = _tf.op_walks.ancestors(map(graph.get_operation_by_name, names))
    taking = _tf.graph_parts.taking_the_next(graph, needed)
    if taking:
        return taking
    given = trace.inputs + [part for mark in trace.wholes for part in mark.parts]
    inputs = {key: OF_EXAMPLES for key in given if has_examples(graph.get_tensor_by_name(key))}
    try:
        own = own_gradients(graph, names) if any(trace.cotangents) else OwnGradients([], True)
        found = _rows.analyse(graph, names + own.operations, inputs, drawn=trace.drawn)
    except _rows.ConstantBatchSize as error:
        return [error.operation]
    except Exception:  # what can't be looked at isn't proven
        return names
    mixing = own.mixing(found) or [op.name for op in checks_of_batch(graph, names, inputs, trace.drawn)]
    if mixing:
        return mixing
    outputs = list(map(graph.get_tensor_by_name, trace.outputs))
    filling = spread_means(found, outputs) if are_means else {}
    levels = dict.fromkeys(filling, 1)
    own_ops = set(map(name_of, moments))  # and what spreads a mean
    own_ops |= {tensor.op.name for op in filling.values() for tensor in op.inputs}
    counting = [name for name in found.counting if name not in own_ops]
    unlike = [loss.value for loss in trace.losses if not _adds_up(found, loss)]
    unlike += [key for key, is_sum in trace.numbers if not _is_sum_or_mean(found, key, is_sum)]
    unlike += [key for key in trace.rows if not (found.depends(key) and _is_apart(found, key, 0))]
    are_apart = all(_is_apart(found, key, levels.get(key, 0)) for key in rows)
    if are_apart and not counting and all(_pools(found, mark) for mark in trace.statistics):
        return list(map(name_of, unlike))
    met = [name for name in found.meets if graph.get_operation_by_name(name).outputs]
    return met or counting or [name for name in found.reduces if name not in own_ops] or names


def drawing_for_all(trace: Trace, names: List[str]) -> List[str]:
    """Return the names of operations, needed for others, that draw something else than numbers for each example.

    A function that draws may have been traced before, where nobody has seen it.
    """
    needed = _tf.op_walks.ancestors(map(trace.graph.get_operation_by_name, names))
    drawing = set(trace.whole_draws)
    within = [op for op in needed if _tf.graph_parts.functions_of(op.node_def)]
    if within:
        library = _tf.graph_parts.Library(trace.graph, trace.graph.as_graph_def())
        types = {op.name: library.types_within(_tf.graph_parts.node_of(op)) for op in within}
        drawing |= {name for name, found in types.items() if found & _tf.random_ops.DRAWING}
    return [op.name for op in needed if op.name in drawing]


def checks_of_batch(
    graph: tf.Graph, names: Sequence[str], given: Dict[Key, _rows.Rows], drawn: Optional[Dict[Key, Key]] = None
) -> List[tf.Operation]:
    """Return the assertions in a graph that have to see the whole batch: not each example, alone, has to fulfil them.

    What functions assert that are called, loops, and branches that return something, is not looked at.

    Args:
      graph: the graph.
      names: of the operations that are needed for results.
      given, drawn: as `inputs` and `drawn` of `accum._rows.analyse`.
    """
    kinds, needed = _tf.graph_parts.LOOPS, set(map(graph.get_operation_by_name, names))
    ops = [op for op in graph.get_operations() if op.type in kinds and op not in needed and not _is_taken(op, needed)]
    ops = [op for op in graph.get_operations() if op.type == "Assert"] + _asserting(graph, ops)
    if not ops:
        return []
    taken = list(dict.fromkeys(tensor.op.name for op in ops for tensor in op.inputs))
    found = _rows.analyse(graph, taken, given, drawn=drawn)
    counting = set(found.counting)

    def is_of_batch(op: tf.Operation) -> bool:
        if op.type != "Assert" and not op.name.rsplit("/", 1)[-1].startswith(GUARD):
            return any(found.depends(tensor.name) for tensor in op.inputs)  # a conditional of the user's
        return not _holds_for_each(found, op.inputs[0], counting)

    return list(filter(is_of_batch, ops))


def calls_that_check(graph: tf.Graph) -> List[str]:
    """Return the names of operations that call a function which asserts something."""
    calls = [op for op in graph.get_operations() if op.type in _tf.graph_parts.CALLS - _tf.graph_parts.LOOPS]
    return [op.name for op in _asserting(graph, calls)]


def _asserting(graph: tf.Graph, ops: Sequence[tf.Operation]) -> List[tf.Operation]:
    """Return the operations, of some that run functions, whose functions assert something."""
    if not ops:
        return []
    library = _tf.graph_parts.Library(graph, graph.as_graph_def())
    return [op for op in ops if "Assert" in library.types_within(_tf.graph_parts.node_of(op))]


def _is_taken(op: tf.Operation, needed: Set[tf.Operation]) -> bool:
    """Whether another operation takes a result of an operation, or only waits for it; what is `needed` is taken."""
    users = [user for tensor in op.outputs for user in tensor.consumers()]
    return any(user.type != "Identity" or user in needed or _is_taken(user, needed) for user in users)


GUARD = "AssertGuard"
"""What TensorFlow calls the conditional that asserts something only if it does not hold."""

LIMITS = {"Greater": "Min", "GreaterEqual": "Min", "Less": "Max", "LessEqual": "Max"}
"""{type of a comparison: what of numbers fulfils it if each of them does}."""


def _holds_for_each(found: _rows.Analysis, condition: tf.Tensor, counting: Set[str]) -> bool:
    """Whether a condition holds for a batch if, and only if, it does for each of its parts."""

    def are_rows(tensor: tf.Tensor) -> bool:
        """Whether something is computed of each example, from nothing of the others."""
        before = [one.name for one in _tf.op_walks.ancestors([tensor.op])]
        return found.rows(tensor.name) is not None and not found.level(tensor.name) and counting.isdisjoint(before)

    op = condition.op
    if not found.depends(condition.name) or (found.is_size(condition.name) and not found.is_count(condition.name)):
        return True
    if op.type in ("Identity", "LogicalAnd"):
        return all(_holds_for_each(found, one, counting) for one in op.inputs)
    if op.type == "All":
        return are_rows(op.inputs[0]) or _holds_for_each(found, op.inputs[0], counting)
    if op.type == "LogicalNot":
        return op.inputs[0].op.type == "Any" and are_rows(op.inputs[0].op.inputs[0])
    if op.type in LIMITS:
        (limited, other), kind = op.inputs, LIMITS[op.type]
        return not found.depends(other.name) and limited.op.type == kind and are_rows(limited.op.inputs[0])
    return False


class OwnGradient(NamedTuple):
    """A gradient of the user's, computed from the operations' own outputs in the place of gradients.

    Attributes:
      key: what the operations take.
      users: their names.
      grad: the gradient by it.
    """

    key: Key
    users: List[str]
    grad: Key


class OwnGradients(NamedTuple):
    """The gradients of the user's in a graph.

    Attributes:
      grads: list of `OwnGradient`.
      are_linear: whether they are linear in the gradients that come up to them, so that each loss may be scaled: that
        of a micro-batch is divided by fewer examples than that of the batch.
    """

    grads: List[OwnGradient]
    are_linear: bool

    @property
    def operations(self) -> List[str]:
        """Names of the operations to look at."""
        return [name_of(key) for one in self.grads for key in (one.key, one.grad)]

    @property
    def users(self) -> List[str]:
        """Names of the operations that have the gradients."""
        return list(dict.fromkeys(name for one in self.grads for name in one.users))

    def mixing(self, found: _rows.Analysis) -> List[str]:
        """Return the names of operations in whose gradients examples meet, or are not added up."""
        mixed = [one for one in self.grads if not _keeps_apart(found, one.key, one.grad)]
        return self._replace(grads=mixed).users


def _keeps_apart(found: _rows.Analysis, key: Key, grad: Key) -> bool:
    """Whether the gradient of an example is its own, and what is none of an example gets the sum of theirs."""
    if not found.depends(key):
        return found.combination(grad) == "sum"
    rows = found.rows(key)
    return rows is not None and found.rows(grad) == rows and found.level(grad) == found.level(key)


GATHERS = "ResourceGather", "ResourceGatherNd", "GatherV2"
"""Types of operations that look up rows; the first ones, of a variable."""


def looked_up_by_shapes(graph: tf.Graph, found: _rows.Analysis) -> List[str]:
    """Return the names of operations that look up rows of a table for each example, but by shapes alone.

    Where the size of a micro-batch is known, they look like positions, which are the same for all examples: TensorFlow
    makes constants of the rows. For the full batch they are the rows of each example.
    """
    gathers = [op for op in graph.get_operations() if op.type in GATHERS]
    of_rows = [op for op in gathers if found.holds_rows(op.inputs[1].name)]
    return [op.name for op in of_rows if not _tf.op_walks.holds_values(op.inputs[1])]


def looked_up_for_all(graph: tf.Graph) -> List[str]:
    """Return the names of operations that look up the same rows of a variable for all examples, such as positions.

    The gradient of the full batch has these rows once, and those of micro-batches have them again and again. A graph
    adds them up; in eager execution, nothing tells them from rows that examples have named.
    """
    is_same = _tf.op_walks.depends_on_variables_alone
    ops = graph.get_operations()
    tables = [op for op in ops if op.type in GATHERS and (op.inputs[0].dtype.is_floating or op.type in GATHERS[:2])]
    same = [op.name for op in tables if is_same(op.inputs[1], or_lengths=True) and is_same(op.inputs[0])]
    calls = [op for op in ops if _tf.graph_parts.functions_of(op.node_def)]
    if not calls:
        return same
    library = _tf.graph_parts.Library(graph, graph.as_graph_def())
    return same + [op.name for op in calls if library.types_within(_tf.graph_parts.node_of(op)) & set(GATHERS)]


def own_gradients(graph: tf.Graph, names: List[str]) -> OwnGradients:
    """Compute the gradients of the user's in a graph, which may mix examples that the operations keep apart.

    Args:
      graph: the graph of a function.
      names: of operations; these and those before them are looked at.
    """
    marked = _tf.graph_parts.own_gradients_in(graph)
    ops = _tf.op_walks.ancestors([graph.get_operation_by_name(name) for name in names]) if marked else []
    own = [op for op in ops if op.name in marked and f"{NORMALIZED}/" not in op.name]
    grads: List[OwnGradient] = []
    are_linear = True
    with graph.as_default():
        for behind_each_other in _in_turn(own):
            of_these, given = _gradients_of(behind_each_other)
            grads += of_these
            ends = set(given) | {graph.get_tensor_by_name(one.key).op for one in of_these} | set(behind_each_other)
            are_linear &= _is_linear([graph.get_tensor_by_name(one.grad).op for one in of_these], set(given), ends)
    return OwnGradients(grads, are_linear)


def _in_turn(own: Sequence[tf.Operation]) -> List[List[tf.Operation]]:
    """Return operations in lists, such that none takes what another one in its list returns.

    Gradients end at what the operations of a list take, so none must be behind another one.
    """
    turns: Dict[tf.Operation, int] = {}
    lists: List[List[tf.Operation]] = []
    for op in own:  # each after those that it takes something of
        turns[op] = 1 + max([turns[tensor.op] for tensor in op.inputs if tensor.op in turns], default=-1)
        lists += [[]] * (turns[op] == len(lists))
        lists[turns[op]] = lists[turns[op]] + [op]
    return lists


def _gradients_of(own: Sequence[tf.Operation]) -> Tuple[List[OwnGradient], List[tf.Operation]]:
    """Return the gradients of some operations, and what stands for the gradients that come up to them."""
    outputs = [tensor for op in own for tensor in op.outputs if is_differentiable(tensor)]
    users: Dict[Key, Tuple[tf.Tensor, List[str]]] = {}
    for op in own:
        for tensor in op.inputs:
            if is_differentiable(tensor) or tensor.dtype == tf.resource:
                users.setdefault(tensor.name, (tensor, []))[1].append(op.name)
    if not outputs or not users:
        return [], []
    inputs = [tensor for tensor, _ in users.values()]
    upstream = list(map(tf.identity, outputs))
    # From what they take, not from what that was computed from.
    by_inputs = tf.gradients(outputs, inputs, grad_ys=upstream, stop_gradients=inputs, name=SCOPE)
    found = [
        OwnGradient(key, names, tf.convert_to_tensor(grad).name)
        for (key, (_, names)), grad in zip(users.items(), by_inputs)
        if grad is not None
    ]
    return found, [tensor.op for tensor in upstream]


IN_ALL = ("Add", "AddN", "AddV2", "Sub", "ZerosLike")
IN_ONE = ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul", "Mul")
IN_FIRST = ("BroadcastTo", "Cast", "DivNoNan", "ExpandDims", "Identity", "Mean", "Neg", "RealDiv", "Reshape") + (
    "Squeeze",
    "StridedSlice",
    "Sum",
    "Tile",
    "Transpose",
)
"""Types of operations that are linear in all inputs together, in any one alone, or in the first alone."""


def _is_linear(ops: List[tf.Operation], given: Set[tf.Operation], ends: Set[tf.Operation]) -> bool:
    """Whether `ops` are linear in `given`, computed from these and from `ends`."""
    linear = set(given)
    for op in _tf.op_walks.ancestors(ops, ends):
        takes = [tensor.op in linear for tensor in op.inputs]
        is_linear = (op.type in IN_ALL and all(takes)) or (op.type in IN_ONE and sum(takes) == 1)
        if is_linear or (op.type in IN_FIRST and takes[0] and not any(takes[1:])):
            linear.update([op] if any(takes) else [])
        elif any(takes) and op.type != "Shape":
            return False
    return all(op in linear for op in ops)


def has_examples(tensor: tf.Tensor) -> bool:
    """Whether the examples may lie along the first axis of a tensor: its length is unknown."""
    return bool(tensor.shape.rank) and tensor.shape.as_list()[0] is None


def _is_apart(found: _rows.Analysis, key: Key, level: int) -> bool:
    """Whether a tensor has one entry for each example, or does not depend on them."""
    return not found.depends(key) or (found.rows(key) == OF_EXAMPLES and found.level(key) <= level)


def _pools(found: _rows.Analysis, mark: StatisticsMark) -> bool:
    """Whether moments are those of examples that have not met: a variance is the mean of what lies behind a mean."""
    moments = mark.moments
    if any(map(found.level, mark.begins)):  # of a mean over the examples: its other axes may look like theirs
        return False
    is_first = max(found.level(moments.count), found.level(moments.mean), found.level(moments.variance) - 1) < 2
    return is_first and not any(map(found.has_met, moments))


def _adds_up(found: _rows.Analysis, loss: LossMark) -> bool:
    """Whether an added loss of the batch is the sum, or the mean weighted by examples, of those of its parts."""
    return found.combination(loss.value) in ("constant", "sum" if loss.is_sum else "mean")


def _is_sum_or_mean(found: _rows.Analysis, key: Key, is_sum: bool) -> bool:
    """Whether a number of the batch is the sum of those of its parts; or their mean, which a constant is, too."""
    return found.combination(key) in (("sum",) if is_sum else ("mean", "constant"))
