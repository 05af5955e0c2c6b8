"""Let a graph that exists already compute a batch in micro-batches (laws L18 and L21).

    batch ─► what keeps examples apart, in a loop over micro-batches ─► rows, joined ─► loss, metrics, summaries
                                                                            │
    weights ◄─ a second loop: computed again, with its gradient ◄───────────┘ gradient by the rows

`accum._rows` proves which operations keep examples apart. Those that do, and that use variables, are *inside*. Their
last tensors are the *frontier*. Whatever else takes these takes joined rows instead and is otherwise untouched: losses,
metrics, summaries, optimizers and what follows them run once, as written, on the whole batch. Nothing that could mix
examples is inside, so a missing rule costs memory, never a wrong number. If much is left behind the frontier, a second
part begins there: with joined rows, which have a gradient, in the place of the batch.

Both loops are loops of TensorFlow 1, whose operations are in the graph itself. So a run that fetches no gradients
computes nothing of the second loop, and of each loop only what is fetched.
"""

from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import numpy as np

from accum import _check, _tf
from accum._engine._part import Key, Part
from accum._engine._trace import Marks
from accum._rows import Rows
from accum._tf import Nested, tf
from accum.compat.v1._barriers import Segmented, segmented
from accum.compat.v1._batch_in_run import BatchInRun
from accum.compat.v1._chosen_branches import choosers
from accum.compat.v1._frontier import (
    SCOPE,
    Edge,
    Frontier,
    awaited,
    frontier_of,
    inside_before,
    repoint,
    statistics_taken,
    take_lengths_of_lists,
)
from accum.compat.v1._inside import ConstantBatch, Inside, is_random
from accum.compat.v1._linked_rows import LinkedRows, links_of
from accum.compat.v1._open_batch import NotCopied, constant_count, count_within
from accum.compat.v1._shortfall import (
    require_apart,
    require_before_optimizer,
    require_gain,
    require_shapes,
    warn_of_little,
)

ENOUGH, PARTS = 0.9, 3
"""No further part is split once this share of the operations with variables is, or once there are this many parts."""

CHECKS = {"Assert", "Print", "PrintV2"} | _tf.graph_parts.CALLS
"""Types of stateful operations that themselves change nothing, so that what waits for them may be computed before."""


def split_batch(
    loss: Nested,
    batch: Nested,
    micro_batch_size: int,
    *,
    outputs: Nested = None,
    given: Optional[Dict[tf.Tensor, bool]] = None,
    recompute: bool = True,
) -> Nested:
    """Let the graph compute a batch in micro-batches from now on, forward and backward.

    Call it once, between the loss and the optimizer. Nothing else in the program changes: one run of the train op is
    one step of the optimizer, on the whole batch, with the activations of one micro-batch in memory.

        loss = tf.compat.v1.losses.softmax_cross_entropy(labels, logits)
        loss = accum.compat.v1.split_batch(loss, (images, labels), 32)
        train_op = optimizer.minimize(loss, global_step)

    The operations before the loss that keep examples apart, such as convolutions, products with weights and loops over
    time, are computed for one micro-batch after the other. Batch normalisation uses the mean and variance of the whole
    batch. At the first other operation in which examples meet, such as the mean of the losses, the results of all
    micro-batches are joined, and it is computed once. If much of the network is behind it, that is split in turn. An
    operation that is not known to keep examples apart takes more memory, but the result is that of the whole batch.
    Metrics and summaries that exist when this is called read the same joined results. What is fetched from before that
    point is computed from the whole batch at once, with the memory that this takes.

    Gradients of losses that only add up examples, such as their mean, are computed in the same loop. Otherwise, and
    with batch normalisation, each micro-batch is computed a second time for its gradient. Random numbers of dropout and
    noise do not depend on `micro_batch_size`.

    Take gradients of the loss with respect to a tensor before it, as in `tf.gradients(loss, hidden)`, before you call
    this. The loss no longer depends on that tensor afterwards: its gradient is None, and `stop_gradients=[hidden]` has
    no effect. If weights are ref variables, what is fetched from before the loss in one run with the train op may be
    computed from the weights after the update. A gradient of gradients raises an error, unless it is part of the loss
    already.

    Args:
      loss: a tensor, or a nested structure of all losses that are computed from the batch, such as those of a GAN.
      batch: nested structure of the tensors that share their first axis, the examples: placeholders, the results of an
        iterator or a queue, features and labels of an Estimator.
      micro_batch_size: the largest number of examples that are computed at a time, >= 1.
      outputs: nested structure of tensors up to which the batch is split, with one row for each example. None: it is
        split as far as examples are known to be apart. An operation that accum does not know, such as `tf.py_func`, is
        taken to compute each row of its results, along the first axis, from that example alone, if it is before
        `outputs`; it may run several times. An operation there in which examples meet is an error.
      given: {boolean tensor: its value in training}, for what chooses between branches, as in
        `tf.cond(is_training, …)` around batch normalisation. Only the branches of these values are split. With other
        values, whatever is computed from the batch is computed at once, as without `split_batch`; but gradients raise
        an error. None: the only boolean placeholder that chooses between branches, if it is about batch normalisation.
      recompute: with batch normalisation, whether to keep few of the tensors between its layers and to compute the
        others again; False: keep all.

    Returns:
      `loss`. A loss that is not a scalar is returned as another tensor, with the same values.

    Raises:
      TypeError, ValueError: an argument does not match its description above, the graph only takes a constant number of
        examples, examples meet before `outputs`, an optimizer has used the loss already, or no operation with variables
        keeps examples apart.
      RuntimeError: when executing eagerly or in a `tf.function`.
    """
    if not _tf.graphs.in_static_graph():
        raise RuntimeError(
            "`accum.compat.v1.split_batch` changes a static graph but was called eagerly: enter a `tf.Graph`, or use "
            "`accum.value_and_gradients`. [accum: graph-mode]"
        )
    size = _check.own_micro_batch_size(micro_batch_size)
    losses = [_require_tensor("loss", one) for one in tf.nest.flatten(loss)]
    tensors = [one for one in tf.nest.flatten(batch) if one is not None]
    batched = [one for one in (_require_tensor("batch", one) for one in tensors) if one.shape.rank != 0]
    if not losses or not batched:
        raise ValueError(
            "`split_batch` needs a loss, and a batch of tensors that have the examples along their first axis. "
            f"Received: loss={loss!r}, batch={batch!r}. [accum: split-batch]"
        )
    ends = [_require_tensor("outputs", one) for one in tf.nest.flatten(outputs) if one is not None]
    take_lengths_of_lists(losses[0].graph)
    with tf.control_dependencies(None), tf.name_scope(SCOPE):  # it waits for what the program's own operations do
        inside = _planned(losses, batched, ends, _require_given(given))
        joined = _joined_in_parts(inside, size, _check.flag("recompute", recompute))
    return tf.nest.map_structure(lambda one: joined.get(one.name, one), loss)  # another one if it is rows


def _require_tensor(name: str, value: Any) -> tf.Tensor:
    if not isinstance(value, tf.Tensor):
        sparse = (
            ": for sparse and ragged ones, pass what is computed from them"
            if isinstance(value, (tf.SparseTensor, tf.RaggedTensor))
            else ""
        )
        raise TypeError(f"`{name}` must consist of dense tensors of the graph{sparse}. Received: {name}={value!r}.")
    if name == "batch" and value.shape.rank is None:
        raise ValueError(
            f"The number of axes of each tensor in `batch` must be known: set its shape. Received: {value!r}."
            " [accum: unknown-shape]"
        )
    return value


def _require_given(given: Optional[Dict[tf.Tensor, bool]]) -> Optional[Dict[Key, bool]]:
    if given is None:
        return None
    is_given = isinstance(given, dict) and all(isinstance(value, (bool, np.bool_)) for value in given.values())
    if not is_given or not all(isinstance(key, tf.Tensor) and key.dtype == tf.bool for key in given):
        raise TypeError(
            "`given` must be a dict of boolean tensors and their values in training, such as {is_training: True}. "
            f"Received: given={given!r}."
        )
    return {key.name: bool(value) for key, value in given.items()}


def _planned(
    losses: Sequence[tf.Tensor],
    batch: Sequence[tf.Tensor],
    ends: Sequence[tf.Tensor],
    given: Optional[Dict[Key, bool]],
) -> Inside:
    """Return what is inside where most of the graph is."""
    links = links_of(losses[0].graph)
    if any(op.name in links for op in _tf.op_walks.ancestors([loss.op for loss in losses])):
        return Inside.of(losses, batch, ends)  # what an earlier call has split is not copied
    count = constant_count(batch)
    opened = _Opened(losses, batch, ends, given, count)
    if opened.inside is not None:
        return opened.inside
    plain, failure = None, ""
    try:
        plain = _chosen(Inside.of(losses, batch, ends), given)
    except ConstantBatch as error:
        failure = str(error)
    if count is None and (plain is None or plain.share() < 1.0):
        opened = _Opened(losses, batch, ends, given, count_within(_between(losses, batch)))
        if opened.inside is not None and opened.inside.constant is not None:
            opened.inside = None  # it is another number
    if opened.inside is not None and (plain is None or opened.inside.share() > plain.share()):
        return opened.inside
    if plain is None:
        raise ConstantBatch(f"{failure} {opened.reason}".strip() + " [accum: split-batch]")
    plain.reason = opened.reason
    return plain


class _Opened:
    """What is inside if the number of examples is a constant of the graph.

    Attributes:
      inside: `Inside`, or None if there is no such number, or if it can't be opened.
      reason: why it can't be opened, or "".
    """

    def __init__(
        self,
        losses: Sequence[tf.Tensor],
        batch: Sequence[tf.Tensor],
        ends: Sequence[tf.Tensor],
        given: Optional[Dict[Key, bool]],
        count: Optional[int],
    ) -> None:
        self.inside: Optional[Inside] = None
        self.reason = ""
        for values in [] if count is None else [given] if given else [{}, *_switches(losses, batch)]:
            try:
                inside = Inside.of(losses, batch, ends, values, count)
            except NotCopied as reason:
                self.reason = self.reason or f"The graph takes {count} examples, a constant, and {reason}."
                continue
            if given or inside.statistics:
                self.inside = inside
                return
            self.inside = self.inside if values else inside


def _between(losses: Sequence[tf.Tensor], batch: Sequence[tf.Tensor]) -> List[tf.Operation]:
    """Return the operations from which losses are computed, and which are computed from the batch."""
    users = _tf.op_walks.users_of(losses[0].graph)
    depending = _tf.op_walks.reached([op for tensor in batch for op in tensor.consumers()], users)
    return [op for op in _tf.op_walks.ancestors([loss.op for loss in losses]) if op in depending]


def _switches(losses: Sequence[tf.Tensor], batch: Sequence[tf.Tensor]) -> List[Dict[Key, bool]]:
    """Return both values of the only boolean placeholder that chooses between branches."""
    tensors = choosers(_between(losses, batch))
    return [{tensors[0].name: value} for value in (True, False)] if len(tensors) == 1 else []


def _chosen(plain: Inside, given: Optional[Dict[Key, bool]]) -> Inside:
    """Return what is inside in the branches that are chosen in training, if that is more than in the graph as it is."""
    if given is None:
        tensors = plain.choosers() if plain.share() < 1.0 else []
        candidates = [{tensors[0].name: value} for value in (True, False)] if len(tensors) == 1 else []
    else:
        candidates = [given] if given else []
    for values in candidates:
        try:
            inside = plain.with_branches(values)
        except NotCopied as reason:
            if given is None:
                break
            raise ValueError(
                f"`given` can't be used in this graph: {reason}. Received: given={given}. [accum: split-batch]"
            ) from None
        if given is not None or (inside.statistics and inside.share() > plain.share()):
            return inside
    return plain


def _joined_in_parts(inside: Inside, size: int, recompute: bool) -> Dict[Key, tf.Tensor]:
    """Split what is inside, and then what is behind that and keeps examples apart again, such as a recurrent network.

    Args:
      inside, size, recompute: as for `joined_rows`.

    Returns:
      {key of a tensor that is taken from what is split: its joined rows}.
    """
    parts, joined = [inside], joined_rows(inside, size, recompute)
    rows = _rows_from(inside, joined)
    is_open = bool(joined) and not inside.outputs and inside.count is None
    while is_open and _share_of(parts) < ENOUGH and len(parts) < PARTS:
        behind = _part_behind(inside, [joined.get(one.name, one) for one in inside.losses], rows)
        if behind is None:
            break
        try:
            more = joined_rows(behind, size, recompute)
        except ValueError:  # such as for an order that can't be kept: it is computed at once, as without this part
            break
        parts.append(behind)
        rows.update(_rows_from(behind, more))
        joined.update(more)
    if joined:
        warn_of_little(parts)
    return joined


def _part_behind(
    inside: Inside, losses: Sequence[tf.Tensor], rows: Dict[Key, Tuple[tf.Tensor, Rows]]
) -> Optional[Inside]:
    """Return what keeps examples apart behind rows, or behind those in which they meet next; None if nothing does.

    Args:
      inside: the first part.
      losses: tensors.
      rows: {key: (the rows of the whole batch, where the examples lie in them)}; gets those in which examples meet.
    """
    while True:
        try:
            behind = Inside.of(losses, inside.received, joined=list(rows.values()))
        except ConstantBatch:
            return None
        if behind.using()[1] and frontier_of(behind, is_whole=False).rows:
            return behind
        met = {one.name: (one, Rows(0, 1)) for one in behind.met_rows() if one.name not in rows}
        if not met:
            return None
        rows.update(met)


def _share_of(parts: Sequence[Inside]) -> float:
    """Return the share of the operations with variables that is in one of the parts."""
    return sum(len(one.using()[1]) for one in parts) / max(len(parts[0].using()[0]), 1)


def _rows_from(inside: Inside, joined: Dict[Key, tf.Tensor]) -> Dict[Key, Tuple[tf.Tensor, Rows]]:
    """Return {key of a tensor: (its joined rows, where the examples lie in them)} of a part, where that is known."""
    images = {key: inside.image(inside.graph.get_tensor_by_name(key)) for key in joined}
    rows = {key: inside.analysis.rows(image.name) for key, image in images.items() if image is not None}
    return {key: (joined[key], one) for key, one in rows.items() if one is not None}


def joined_rows(inside: Inside, size: int, recompute: bool) -> Dict[Key, tf.Tensor]:
    """Let whatever takes rows from inside take joined rows, computed in micro-batches.

    Args:
      inside: what of the graph is inside.
      size: the largest number of examples in a micro-batch.
      recompute: as for `split_batch`.

    Returns:
      {key of a tensor of the frontier: its joined rows}.
    """
    graph, statistics = inside.graph, inside.statistics
    frontier = frontier_of(inside, bool(statistics))
    if not frontier.rows and any(op.name in links_of(graph) for op in inside.before_losses):
        return {}  # another call has done everything, as for the second loss of a batch
    require_before_optimizer(inside)
    require_apart(inside)
    require_gain(inside, frontier.rows)
    tensors = [graph.get_tensor_by_name(key) for key in frontier.rows]
    require_shapes([tensor for tensor in tensors if tensor.shape.rank is None], "number of axes")
    run = BatchInRun(inside, size)
    rows = LinkedRows(inside, run, tensors)
    if statistics:
        made = _segmented(inside, run, rows, recompute)
        rows.link(made.rows, made.gradients)
    else:
        rows.link(run.computed(rows.forward, [run.joining(one) for one in rows.images], {}), None)
    taken = statistics_taken(inside) if statistics else {}
    try:
        _repoint_all(inside, run, frontier, rows.joined)
        if statistics:
            _use_statistics(inside, run, taken, made.statistics)
        _wait_as_before(inside, run, rows)
    except ValueError:  # then the program's own operations take what they took before
        for key, edges in [one for edges_of in (*frontier, taken) for one in edges_of.items()]:
            repoint(edges, graph.get_tensor_by_name(key))
        raise
    inside_before(graph).update(filter(inside.is_covered, graph.get_operations()))
    for op in graph.get_operations() if inside.branches is not None else rows.forward.ops:
        for tensor in op.outputs:
            image = inside.image(tensor)
            if image is not None and image.op in inside.ops and tensor.name not in inside.fed:
                graph.prevent_feeding(tensor)  # the copies would not see it
    for op in rows.forward.ops:
        if op.type == "Const":
            graph.prevent_feeding(op.outputs[0])
    return rows.joined


def _segmented(inside: Inside, run: BatchInRun, rows: LinkedRows, recompute: bool) -> Segmented:
    """Compute rows in segments, between which there is batch normalisation."""
    fed = {key: tensor for key, tensor in run.fed.items() if rows.forward.takes(key)}

    def draw(op: tf.Operation, copies: Dict[str, Any], marks: Marks, count: Any) -> None:
        if is_random(op) and op not in inside.trusted:
            run.draw(marks.draws, op, copies, marks.position, count)

    sources = [one for one in rows.sources if one.name not in inside.fed]
    layouts = [inside.layout(one) for one in rows.images]
    known = run.known(rows.forward)
    return segmented(
        rows.forward, rows.images, layouts, fed, known, run.size, sources, inside.statistics, draw, recompute
    )


def _repoint_all(inside: Inside, run: BatchInRun, frontier: Frontier, joined: Dict[Key, tf.Tensor]) -> None:
    """Let others take joined rows, and numbers that depend on their lengths."""
    for key, edges in frontier.rows.items():
        repoint(edges, joined[key])
    for edges_of, rows in ((frontier.early, {}), (frontier.sizes, joined)):
        sizes = run.sizes([inside.graph.get_tensor_by_name(key) for key in edges_of], rows)
        for key, edges in edges_of.items():
            repoint(edges, sizes[key])


def _use_statistics(
    inside: Inside, run: BatchInRun, taken: Dict[Key, List[Edge]], values: Dict[Key, tf.Tensor]
) -> None:
    """Let averages, and whatever else takes a statistic from inside, take that of the whole batch."""
    known = [inside.graph.get_tensor_by_name(key) for key in values]
    of_batch: Dict[Key, tf.Tensor] = {}
    for key in taken:
        image = inside.image_of(inside.graph.get_tensor_by_name(key))
        part = Part([image], known + list(inside.fed.values()))
        if not any(part.takes(name) for name in inside.fed):
            of_batch[key] = part.compute(values)[image.name]
    others = run.with_other_values(list(of_batch)) if inside.given and of_batch else {}
    for key, value in of_batch.items():
        repoint(taken[key], run.either(value, others[key]) if others else value)


def _wait_as_before(inside: Inside, run: BatchInRun, rows: LinkedRows) -> None:
    """Let joined rows wait for what the operations inside wait for, such as averages that are moved in place."""
    waits = awaited(inside, rows.forward.ops)
    for one in [] if inside.branches is None else inside.branches.frames:
        if one.has_effects and inside.is_frame_inside(one):
            waits.update(one.results)
    scope = inside.graph.get_name_scope() + "/"
    outlets = {joined.op for joined in rows.joined.values()}
    known = run.known(rows.forward)
    taken = [tensor.op for tensor in rows.forward.boundary if tensor.name not in known]
    needed = set(_tf.op_walks.ancestors(taken, with_control=True))
    for op in sorted(waits, key=_tf.graphs.creation_order):
        before = set(_tf.op_walks.ancestors([op], with_control=True))
        if not any(other.name.startswith(scope) for other in before):
            _tf.graphs.add_control_input(run.total.op, op)  # so that the loops wait, too
            inside.held.wait_for(op)
        elif not outlets & before:
            rows.checks.append(op)  # a run that takes gradients alone may leave out the rows
            for outlet in outlets:
                _tf.graphs.add_control_input(outlet, op)
        elif op not in needed and _changes_nothing(inside, before):
            _wait_behind(op, before, rows)
        else:
            raise ValueError(
                "`split_batch` can't keep the order of operations that wait for what is computed from the same "
                f"examples: build {op.name!r} without making others wait for it, and run it with the train op."
                " [accum: split-batch]"
            )


def _changes_nothing(inside: Inside, ops: Set[tf.Operation]) -> bool:
    """Whether operations, of those that are not inside, only read."""
    own = [op for op in ops if op in inside.depending and not inside.is_covered(op)]
    calls = [_tf.graph_parts.node_of(op) for op in own if op.type in _tf.graph_parts.CALLS]
    kinds = {op.type for op in own}.union(*map(inside.library.types_within, calls))
    changing = any(map(_tf.op_walks.changes_variable, own))
    return not changing and not any(_is_stateful(inside.graph, kind) for kind in kinds)


def _is_stateful(graph: tf.Graph, kind: str) -> bool:
    """Whether an operation of a type has, or changes, a state, other than that of a variable that it reads."""
    is_read = kind.startswith(("ReadVariable", "ResourceGather"))
    return bool(_tf.definitions.definition_of(graph, kind).is_stateful) and kind not in CHECKS and not is_read


def _wait_behind(check: tf.Operation, before: Set[tf.Operation], rows: LinkedRows) -> None:
    """Let what takes joined rows wait for a check of these rows, and let their gradient wait for it."""
    rows.checks.append(check)
    for joined in rows.joined.values():
        for user in joined.consumers():
            if user not in before and _tf.graphs.outermost_frame(user) is None:
                _tf.graphs.add_control_input(user, check)
