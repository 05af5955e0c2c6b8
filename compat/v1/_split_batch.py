"""Let a graph that exists already compute a batch in micro-batches (laws L18 and L21).

    batch ─► what keeps examples apart, in a loop over micro-batches ─► rows, joined ─► loss, metrics, summaries
                                                                            │
    weights ◄─ a second loop: computed again, with its gradient ◄───────────┘ gradient by the rows

`accum._rows` proves which operations keep examples apart. Those that do, and that use variables, are *inside*. Their
last tensors are the *frontier*. Whatever else takes these takes joined rows instead and is otherwise untouched: losses,
metrics, summaries, optimizers and what follows them run once, as written, on the whole batch. Nothing that could mix
examples is inside, so a missing rule costs memory, never a wrong number.

Both loops are loops of TensorFlow 1, whose operations are in the graph itself. So a run that fetches no gradients
computes nothing of the second loop, and of each loop only what is fetched.
"""

import contextlib
from typing import Any, Callable, Container, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from accum import _check, _rows, _tf
from accum._engine._draws import Draws, uniform_seed
from accum._engine._found_statistics import SQUARES, Statistics, statistics_in
from accum._engine._gradients import divided
from accum._engine._part import Key, Part
from accum._engine._trace import Marks
from accum._rows import Analysis, Rows
from accum._tf import Gradient, Nested, tf
from accum.compat.v1._barriers import Segmented, segmented
from accum.compat.v1._chosen_branches import ChosenBranches, Conditional, NotChosen, choosers
from accum.compat.v1._micro_batch_loop import (
    Added,
    Joined,
    Slices,
    fetches_of,
    over_micro_batches,
    rows_of_micro_batch,
)
from accum.compat.v1._open_batch import OpenBatch, constant_count

tf1 = tf.compat.v1
VARIABLES = ("VariableV2", "Variable", "VarHandleOp")
STEPS = ("Apply", "ResourceApply", "SparseApply", "ResourceSparseApply")
"""Types with which the operations begin by which optimizers change variables."""

CHECKS = ("Assert", "Print", "PrintV2")
"""Types of stateful operations that change nothing, so that what waits for them may be computed before them."""

MADE = ("Fill", "PlaceholderWithDefault", "ZerosLike")
"""Types of operations that make rows which programs feed, such as the initial state of a recurrent network."""

GRADIENT = "AccumSplitBatch"
"""The name under which the gradient of joined rows is registered, once for all graphs."""

SCOPE = "accum_split_batch"

_BITS = {2: tf.int16, 4: tf.int32, 8: tf.int64}
"""Integers of as many bytes as a floating-point number."""


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
    micro-batches are joined, and the rest of the graph is computed once. So is every operation that is not known to
    keep examples apart: it takes more memory, but the result is that of the whole batch. Metrics and summaries that
    exist when this is called read the same joined results. What is fetched from before that point is computed from the
    whole batch at once, with the memory that this takes.

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
    with tf.control_dependencies(None), tf.name_scope(SCOPE):  # it waits for what the program's own operations do
        split = _planned(losses, batched, size, ends, _require_given(given))
        split.join(_check.flag("recompute", recompute))
    return tf.nest.map_structure(split.replaced, loss)


def _require_tensor(name: str, value: Any) -> tf.Tensor:
    if not isinstance(value, tf.Tensor):
        sparse = ": leave out sparse and ragged ones" if isinstance(value, (tf.SparseTensor, tf.RaggedTensor)) else ""
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
    size: int,
    ends: Sequence[tf.Tensor],
    given: Optional[Dict[Key, bool]],
) -> "_Split":
    """Return the split that does most of the graph in micro-batches."""
    count = constant_count(batch)
    if count is None:
        return _chosen(_Split(losses, batch, size, ends), given)
    opened = []
    for values in [given] if given else [{}, *_switches(losses, batch)]:
        with contextlib.suppress(NotChosen):
            split = _Split(losses, batch, size, ends, values, count)
            if given or split.statistics:
                return split
            opened += [] if values else [split]
    return opened[0] if opened else _chosen(_Split(losses, batch, size, ends), given)


def _switches(losses: Sequence[tf.Tensor], batch: Sequence[tf.Tensor]) -> List[Dict[Key, bool]]:
    """Return both values of the only boolean placeholder that chooses between branches."""
    users = _tf.op_walks.users_of(losses[0].graph)
    depending = _reached([op for tensor in batch for op in tensor.consumers()], users)
    tensors = choosers([op for op in _tf.op_walks.ancestors([loss.op for loss in losses]) if op in depending])
    return [{tensors[0].name: value} for value in (True, False)] if len(tensors) == 1 else []


def _chosen(plain: "_Split", given: Optional[Dict[Key, bool]]) -> "_Split":
    """Return a split of the branches that are chosen in training, if it does more than one of the graph as it is."""
    if given is None:
        tensors = plain.choosers() if plain.share() < 1.0 else []
        candidates = [{tensors[0].name: value} for value in (True, False)] if len(tensors) == 1 else []
    else:
        candidates = [given] if given else []
    for values in candidates:
        try:
            split = plain.with_branches(values)
        except NotChosen as reason:
            if given is None:
                break
            raise ValueError(
                f"`given` can't be used in this graph: {reason}. Received: given={given}. [accum: split-batch]"
            ) from None
        if given is not None or (split.statistics and split.share() > plain.share()):
            return split
    return plain


Gradients = Callable[[Sequence[Optional[tf.Tensor]]], List[Optional[Gradient]]]
"""A function of the gradients by joined rows, which returns those by the sources."""


class _Edge(NamedTuple):
    """Which operation takes a tensor, as which of its inputs."""

    op: tf.Operation
    place: int


class _Template(NamedTuple):
    """A gradient in the graph that is only copied.

    Attributes:
      upstream: placeholders for the gradients by tensors of the frontier.
      grads: the gradient by each source, or None.
      part: the `Part` that computes them, or None if there is no gradient.
    """

    upstream: List[tf.Tensor]
    grads: List[Optional[Gradient]]
    part: Optional[Part]


class _Split:
    """A batch that a graph computes in micro-batches.

    Args:
      losses: tensors.
      batch: tensors that share their first axis, the examples.
      size: the largest number of examples in a micro-batch.
      outputs: tensors up to which it is split; if there are none, as far as possible.
      given: {key of a boolean tensor: its value}; the branches of these values are split. None: the graph as it is.
      count: the number of examples, if that is a constant of the graph.

    Attributes:
      statistics: of batch normalisation, which are those of the whole batch.
    """

    def __init__(
        self,
        losses: Sequence[tf.Tensor],
        batch: Sequence[tf.Tensor],
        size: int,
        outputs: Sequence[tf.Tensor] = (),
        given: Optional[Dict[Key, bool]] = None,
        count: Optional[int] = None,
    ) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self._size = size
        self._given = given
        self._count, self._constant = count, None  # type: Optional[int], Optional[tf.Operation]
        self._branches = None if given is None else self._copied(losses, batch, given)
        self._losses = list(losses)
        self._outputs = list(outputs)
        self._batch = list(batch) if self._branches is None else self._branches.batch
        self._fed = {tensor.name: tensor for tensor in self._batch}
        users = _tf.op_walks.users_of(self._graph)
        self._of_batch = _reached([op for tensor in batch for op in tensor.consumers()], users)
        self._steps = [op.name for op in _sorted(self._of_batch) if op.type.startswith(STEPS)]
        ops = _reached([op for tensor in self._batch for op in tensor.consumers()], users)
        self._ops = _sorted(ops if self._branches is None else ops & self._branches.ops)
        self._left = set() if self._branches is None else self._branches.left
        self._depending = set(self._ops) | self._left
        operations = self._graph.get_operations()
        variables = _variables(self._graph)
        self._of_variables = _reached(variables, users)
        self._of_values = _reached(variables, users, LENGTHS)
        not_constant = [op for op in operations if not op.inputs and op.type != "Const"]
        self._not_constant = _reached(not_constant, users, LENGTHS)
        ends_of_losses = self._losses if self._branches is None else self._branches.ends
        self._before_losses = set(_tf.op_walks.ancestors([tensor.op for tensor in ends_of_losses]))
        images = [image for image in map(self._image, self._outputs) if image is not None]
        self._ends = [image for image in images if image.op in self._before_losses]  # no loss needs the others
        self._before_outputs = set(_tf.op_walks.ancestors([image.op for image in self._ends]))
        self._trusted: Set[tf.Operation] = set()
        self._analysis = self._analysed(users)
        self._library = _tf.graph_parts.Library(self._graph, self._graph.as_graph_def())
        self._feed_known()
        self._joined: Dict[Key, tf.Tensor] = {}
        self._inlets: Dict[Key, _Edge] = {}
        self._templates: Dict[Tuple[Key, ...], _Template] = {}
        self._total: tf.Tensor = None
        self._checks: List[tf.Operation] = []  # of joined rows, for which their gradients wait
        self._values_fed: Dict[Key, tf.Tensor] = {}  # what is fed, or of it one example where nothing takes the result
        self.statistics = self._find_inside()

    # ------------------------------------------------------------------------------------------------------------
    # Branches that are chosen in training, and a number of examples that is a constant

    def with_branches(self, given: Dict[Key, bool]) -> "_Split":
        """Return a split of the branches that are chosen by these values."""
        return _Split(self._losses, self._batch, self._size, self._outputs, given)

    def _copied(
        self, losses: Sequence[tf.Tensor], batch: Sequence[tf.Tensor], given: Dict[Key, bool]
    ) -> ChosenBranches:
        of_variables = _reached(_variables(self._graph), _tf.op_walks.users_of(self._graph))
        opened = None if self._count is None else OpenBatch(batch, self._count, of_variables)
        return ChosenBranches(losses, batch, given, of_variables, opened)

    def choosers(self) -> List[tf.Tensor]:
        """Return the boolean placeholders that choose between branches, if there is batch normalisation."""
        ops = [op for op in self._ops if op in self._before_losses]
        return choosers(ops) if any(map(self._may_normalize, ops)) else []

    def _may_normalize(self, op: tf.Operation) -> bool:
        if op.type in _tf.graph_parts.CALLS:
            return self._library.normalizes(op.node_def)
        is_spread = op.type == "Mean" and op.inputs[0].op.type in SQUARES
        return is_spread or op.type in _tf.op_walks.FUSED_BATCH_NORMS

    def _image(self, tensor: tf.Tensor) -> Optional[tf.Tensor]:
        """Return what a tensor of the graph is if the branches are chosen; None if it is not computed."""
        return tensor if self._branches is None else self._branches.image(tensor)

    def _image_of(self, tensor: tf.Tensor) -> tf.Tensor:
        image = self._image(tensor)
        assert image is not None
        return image

    def _is_covered(self, op: tf.Operation) -> bool:
        """Whether an operation is inside, itself or as a copy, or chooses between branches that are."""
        if op in self._inside:
            return True
        if self._branches is None:
            return False
        conditional = self._branches.conditional_of(op)
        if conditional is None:
            copy = self._branches.copy_of(op)
            return copy in self._inside if copy is not None else op in self._branches.ops
        return self._is_conditional_inside(conditional)

    def _is_conditional_inside(self, conditional: Conditional) -> bool:
        return all(op in self._inside for op in conditional.copies if op in self._depending)

    def _with_other_values(self, keys: Sequence[Key]) -> Dict[Key, tf.Tensor]:
        """Return tensors of the graph as they are if other branches are chosen; otherwise, those of one example.

        Then nothing takes these. They are computed by copies of both branches, from the whole batch at once.
        """
        tensors = [self._graph.get_tensor_by_name(key) for key in keys]
        count = tf.where(self._is_given, tf.minimum(self._whole, 1), self._whole)
        part = Part(tensors, self._batch)
        feeds = {one.name: rows_of_micro_batch(one, 0, tf.constant(0), count, self._whole) for one in self._batch}
        return dict(part.compute({key: rows for key, rows in feeds.items() if part.takes(key)}))

    def _either(self, value: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
        """Return one value if the branches are the given ones, else the other."""
        with _tf.graphs.control_flow_of_tf(1):
            result = tf1.cond(self._is_given, lambda: tf.identity(value), lambda: tf.identity(other))
        result.set_shape(other.shape)
        return result

    def _choose(self) -> None:
        """Let the split compute one example if the branches are others."""
        assert self._given is not None
        matches = [
            tf.equal(self._graph.get_tensor_by_name(key), value, name="is_given") for key, value in self._given.items()
        ]
        self._is_given = tf.reduce_all(tf.stack(matches))
        self._total = tf.where(self._is_given, self._whole, tf.minimum(self._whole, 1))
        for key, tensor in self._fed.items():
            self._values_fed[key] = rows_of_micro_batch(
                tensor, self._axis(tensor), tf.constant(0), self._total, self._whole
            )

    def _require_chosen(self, upstream: tf.Tensor) -> tf.Tensor:
        """Return a gradient that raises an error where the branches are others than the split ones."""
        if not self._given:
            return upstream
        check = tf1.assert_equal(
            self._is_given,
            True,
            message=f"The gradients that `split_batch` computes are for given={self._given}, but another value is fed."
            " [accum: split-batch]",
        )
        with tf.control_dependencies([check]):
            return tf.identity(upstream)

    # ------------------------------------------------------------------------------------------------------------
    # What is inside

    def _analysed(self, users: Dict[tf.Operation, List[tf.Operation]]) -> Analysis:
        inputs = {name: Rows(0, 1) for name in self._fed}
        changing = _reached([op for op in self._ops if _tf.op_walks.changes_variable(op)], users)
        ops = [op for op in self._ops if op not in changing]
        while True:
            analysis = (
                self._analysed_with(ops, inputs) if self._count is None else self._analysed_open(ops, inputs, users)
            )
            unknown = [op for op in ops if self._is_unknown(op, analysis)]
            if not unknown:
                return analysis
            self._trusted.add(unknown[0])
            inputs.update((tensor.name, Rows(0, 1)) for tensor in unknown[0].outputs)

    def _analysed_with(self, ops: Sequence[tf.Operation], inputs: Dict[Key, Rows]) -> Analysis:
        try:
            return _rows.analyse(self._graph, [op.name for op in ops], inputs, with_places=True)
        except _rows.ConstantBatchSize:  # perhaps only of a summary, which is not split then
            before = [op.name for op in ops if op in self._before_losses]
        try:
            return _rows.analyse(self._graph, before, inputs, with_places=True)
        except _rows.ConstantBatchSize as error:
            raise ValueError(f"{error} In {self._named(self._graph.get_operation_by_name(error.operation))}.") from None

    def _analysed_open(
        self, ops: Sequence[tf.Operation], inputs: Dict[Key, Rows], users: Dict[tf.Operation, List[tf.Operation]]
    ) -> Analysis:
        """Return what is known of operations, but of those that still take a constant number of examples."""
        while True:
            try:
                return _rows.analyse(self._graph, [op.name for op in ops], inputs, with_places=True)
            except _rows.ConstantBatchSize as error:
                constant = _reached([self._graph.get_operation_by_name(error.operation)], users)
                if constant.isdisjoint(ops):
                    raise NotChosen(str(error)) from None
                self._constant = self._constant or self._graph.get_operation_by_name(error.operation)
                ops = [op for op in ops if op not in constant]

    def _is_unknown(self, op: tf.Operation, analysis: Analysis) -> bool:
        """Whether accum does not know an operation before `outputs`, which is said to keep examples apart."""
        verdict = analysis.verdict(op.name)
        if op not in self._before_outputs or verdict is None or verdict.kind != "meets":
            return False
        if op.type not in analysis.unruled or op in self._trusted:
            return False
        unclear = [tensor.name for tensor in op.outputs if not tensor.shape.rank]
        if unclear:
            raise ValueError(
                "An operation before `outputs` that accum does not know must return one row for each example: set the "
                f"shape of its results, such as [None, 10]. Received: {unclear} of {self._named(op)}."
                " [accum: split-batch]"
            )
        return True

    def _source(self, op: tf.Operation) -> tf.Operation:
        return op if self._branches is None else self._branches.source(op)

    def _named(self, op: tf.Operation) -> str:
        """Return the name of an operation of the program, and where it is made."""
        line = _tf.graphs.line_of(self._source(op))
        return repr(self._source(op).name) + (f" (made in {line})" if line else "")

    def _feed_known(self) -> None:
        """Let rows that depend on no variable, and are made for the whole batch, be made once and cut.

        They are random numbers, initial states, and what may look at all examples, such as a gradient of its own.
        """
        for op in self._ops:
            if op in self._of_variables:
                continue
            is_whole = op in self._before_losses and _tf.graphs.outermost_frame(op) is None
            if _is_random(op) or op.type in MADE or (is_whole and not self._keeps_apart(op, set())):
                self._fed.update((one.name, one) for one in op.outputs if self._analysis.rows(one.name) is not None)

    def _proven(self, barriers: Set[tf.Operation]) -> Set[tf.Operation]:
        """Return the operations that keep examples apart, and whose operands are rows or known before.

        Args:
          barriers: operations that compute statistics of the batch, which are known where they are used.
        """
        candidates = {op for op in self._ops if self._keeps_apart(op, barriers)}
        if self._ends:
            candidates &= self._before_outputs
        frames = self._frames()
        if self._branches is None:
            candidates -= {op for ops in frames if barriers or not self._is_frame_apart(ops) for op in ops}
        while True:
            wrong = {op for op in candidates if not all(self._is_known(one, candidates) for one in op.inputs)}
            wrong |= {op for op in candidates if self._hands_list_on(op, candidates)}
            for ops in frames:  # loops and conditionals are inside as a whole, or not at all
                if any(op not in candidates or op in wrong for op in ops):
                    wrong.update(op for op in ops if op in candidates)
            if not wrong:
                return candidates
            candidates -= wrong

    def _frames(self) -> List[List[tf.Operation]]:
        """Return the operations of each loop and conditional of TF 1, or of each chosen branch."""
        if self._branches is not None:
            return [[op for op in one.copies if op in self._depending] for one in self._branches.conditionals]
        frames: Dict[Any, List[tf.Operation]] = {}
        for op in self._ops:
            if op in self._before_losses:
                frames.setdefault(_tf.graphs.outermost_frame(op), []).append(op)
        frames.pop(None, None)
        return list(frames.values())

    def _keeps_apart(self, op: tf.Operation, barriers: Set[tf.Operation]) -> bool:
        verdict = self._analysis.verdict(op.name)
        if any(one.name in self._fed for one in op.outputs):
            return False
        if op in self._trusted:
            return not _tf.graphs.has_own_gradient(op)
        if verdict is None:  # independent of the examples, such as a counter of a loop
            return _tf.graphs.outermost_frame(op) is not None
        if op in barriers:
            return verdict.kind == "reduces"
        is_within = _tf.graphs.outermost_frame(op) is not None  # where numbers of the whole batch may be compared
        is_number = verdict.kind == "behind" and not any(self._analysis.has_met(one.name) for one in op.outputs)
        if verdict.kind == "rows" and not all(one.dtype.is_floating for one in self._analysis.counts_taken_by(op.name)):
            return False  # an index or a condition: its gradient would take the number of the micro-batch
        if verdict.kind not in ("rows", "size") and not ((barriers or is_within or self._is_same(op)) and is_number):
            return False
        if _tf.graphs.has_own_gradient(op):
            return False  # which may look at all examples, unlike that of an operation that keeps them apart
        if op.type in _tf.graph_parts.CALLS and self._library.hidden(_tf.graph_parts.node_of(op)):
            return False  # it draws or assigns
        takes_statistics = barriers and any(self._analysis.level(tensor.name) for tensor in op.inputs)
        if op.type in _tf.graph_parts.CALLS and takes_statistics:
            return False  # as a conditional that chooses between statistics
        if not _is_random(op):
            return True
        drawn, rows = _tf.random_ops.random_op_of(op), self._analysis.rows(op.outputs[0].name)
        can_be_cut = drawn is not None and drawn.kind is not None and not _tf.graphs.is_within_loop(op)
        return can_be_cut and rows is not None and rows.axis == 0

    def _is_same(self, op: tf.Operation) -> bool:
        """Whether what an operation computes from numbers of the whole batch is the same in each micro-batch."""
        return not any(
            self._analysis.rows(one.name) is not None or self._analysis.is_count(one.name) for one in op.inputs
        )

    def _is_frame_apart(self, ops: Sequence[tf.Operation]) -> bool:
        """Whether a loop or conditional of TF 1 takes no number of examples, and a conditional nothing of variables."""
        for op in ops:
            verdict = self._analysis.verdict(op.name)
            if verdict is not None and verdict.kind == "rows" and self._analysis.counts_taken_by(op.name):
                return False
        is_loop = any(_tf.graphs.is_within_loop(op) for op in ops)
        return is_loop or not any(self._uses_variable(op) for op in ops)

    def _hands_list_on(self, op: tf.Operation, candidates: Set[tf.Operation]) -> bool:
        """Whether a list, such as what a loop iterates over, is taken by others, which need joined rows."""
        lists = [tensor for tensor in op.outputs if self._analysis.is_list(tensor.name)]
        return any(user not in candidates and user in self._depending for one in lists for user in one.consumers())

    def _is_known(self, tensor: tf.Tensor, candidates: Set[tf.Operation]) -> bool:
        """Whether a tensor is inside, or is known before: one that the whole batch and each micro-batch share.

        If a number depends on variables by the shape of what is inside alone, that is computed up to there once more.
        """
        op = tensor.op
        if tensor.name in self._fed or op in candidates or op not in self._depending:
            return True
        is_before = op not in (self._of_variables if self._analysis.is_size(tensor.name) else self._of_values)
        return is_before and not self._analysis.holds_rows(tensor.name)

    def _is_taken(self, op: tf.Operation, index: int) -> bool:
        """Whether an operation takes an input as it is in the graph, computed from the whole batch."""
        tensor = op.inputs[index]
        if tensor.name in self._fed or tensor.op not in self._depending:
            return False
        if tensor.op not in self._inside:
            return True
        if not self._analysis.is_size(tensor.name):
            return False
        frame = _tf.graphs.outermost_frame(tensor.op)
        if frame is not None and frame is _tf.graphs.outermost_frame(op):
            return False
        if op not in self._inside:  # of a gradient, whose integers are shapes
            return bool(tensor.dtype.is_floating)
        verdict = self._analysis.verdict(op.name)
        return verdict is not None and verdict.kind == "rows" and not self._analysis.shapes_only(op.name, index)

    # ------------------------------------------------------------------------------------------------------------
    # The frontier

    def join(self, recompute: bool) -> None:
        """Let whatever takes rows from inside take joined rows, computed in micro-batches."""
        statistics = self.statistics
        rows, sizes = self._edges(bool(statistics))
        if self._is_split(rows):
            return
        self._require_before_optimizer()
        self._require_apart()
        self._require_gain(rows)
        self._frontier = [self._graph.get_tensor_by_name(key) for key in rows]
        self._require_shapes([tensor for tensor in self._frontier if tensor.shape.rank is None], "number of axes")
        self._scope = self._graph.get_name_scope() + "/"
        self._images = list({one.name: one for one in map(self._image_of, self._frontier)}.values())
        self._whole = self._total = self._number_of_examples()
        self._values_fed = dict(self._fed)
        if self._given:
            self._choose()
        self._draws = Draws(uniform_seed, self._total)
        self._numbers = {op.name: number for number, op in enumerate(filter(_is_random, self._ops))}
        self._forward = Part(self._images, list(self._fed.values()), self._is_taken)
        self._sources = [one for one in self._forward.boundary if self._can_be_source(one)]
        if statistics:  # whose gradients are sums of a known shape; nobody learns data, such as a rate of dropout
            tensors = [one for one in self._sources if one.dtype != tf.resource]
            unknown = [one for one in tensors if not one.shape.is_fully_defined()]
            self._require_shapes([one for one in unknown if one.op in self._of_variables], "shape")
            self._sources = [one for one in self._sources if all(one is not other for other in unknown)]
        self._weights = self._sources
        self._data = [one for one in self._fed.values() if one.dtype.base_dtype.is_floating]
        self._sources = self._weights + self._data
        self._is_once = bool(self._given)  # what runs for other values must not wait for gradients
        if statistics:
            made = self._segmented(statistics, recompute)
            self._link(made.rows, made.gradients)
        else:
            self._link(self._computed(self._forward, [self._joining(one) for one in self._images], {}), None)
        for key, edges in rows.items():
            self._repoint(edges, self._joined[key])
        for key, edges in sizes.items():
            self._repoint(edges, self._size_of_joined(key))
        if statistics:
            self._use_statistics(made.statistics)
        self._wait_as_before()
        _inside_before(self._graph).update(filter(self._is_covered, self._graph.get_operations()))
        for op in self._graph.get_operations() if self._branches is not None else self._forward.ops:
            for tensor in op.outputs:
                image = self._image(tensor)
                if image is not None and image.op in self._inside and tensor.name not in self._fed:
                    self._graph.prevent_feeding(tensor)  # the copies would not see it

    @staticmethod
    def _require_shapes(unknown: Sequence[tf.Tensor], what: str) -> None:
        if unknown:
            raise ValueError(
                f"The {what} of each tensor that is split must be known: set the shape of what it is computed from. "
                f"Received: {[tensor.name for tensor in unknown]}. [accum: unknown-shape]"
            )

    def _number_of_examples(self) -> tf.Tensor:
        lengths = [tf.shape(tensor)[0] for tensor in self._batch]
        checks = [
            tf1.assert_equal(
                tf.rank(self._graph.get_tensor_by_name(key)), 0, message=f"{key} must be a scalar. [accum: split-batch]"
            )
            for key in self._analysis.scalars
        ]
        checks += [
            tf1.assert_equal(
                length,
                lengths[0],
                message=f"All tensors of a batch need one entry for each example: {tensor.name}. [accum: batch-axis]",
            )
            for tensor, length in zip(self._batch[1:], lengths[1:])
        ]
        with tf.control_dependencies(checks):
            return tf.identity(lengths[0])

    def _wait_as_before(self) -> None:
        """Let joined rows wait for what the operations inside wait for, such as averages that are moved in place."""
        ops = self._forward.ops if self._branches is None else map(self._branches.source, self._forward.ops)
        awaited = {other for op in ops for other in op.control_inputs if not self._is_covered(other)}
        awaited -= {
            op for op in awaited if op.type in ("Switch", "Const") or _tf.graphs.outermost_frame(op) is not None
        }
        awaited -= {tensor.op for tensor in self._batch}
        for one in [] if self._branches is None else self._branches.conditionals:
            if one.has_effects and self._is_conditional_inside(one):
                awaited.update(one.results)
        outlets = {rows.op for rows in self._joined.values()}
        taken = [tensor.op for tensor in self._forward.boundary]
        needed = set(_tf.op_walks.ancestors(taken, with_control=True))
        for op in sorted(awaited, key=_tf.graphs.creation_order):
            before = set(_tf.op_walks.ancestors([op], with_control=True))
            if not any(other.name.startswith(self._scope) for other in before):
                _tf.graphs.add_control_input(self._total.op, op)  # so that the loops wait, too
                continue
            if outlets & before and self._changes_nothing(before) and op not in needed:
                self._wait_behind(op, before)
                continue
            if outlets & before:
                raise ValueError(
                    "`split_batch` can't keep the order of operations that wait for what is computed from the same "
                    f"examples: build {op.name!r} without making others wait for it, and run it with the train op."
                    " [accum: split-batch]"
                )
            for outlet in outlets:
                _tf.graphs.add_control_input(outlet, op)

    def _changes_nothing(self, ops: Set[tf.Operation]) -> bool:
        """Whether operations, of those that are not inside, only read."""
        own = (op for op in ops if op in self._depending and not self._is_covered(op))
        return not any(_tf.op_walks.changes_variable(op) or _is_stateful(op) for op in own)

    def _wait_behind(self, check: tf.Operation, before: Set[tf.Operation]) -> None:
        """Let what takes joined rows wait for a check of these rows, and let their gradient wait for it."""
        self._checks.append(check)
        for rows in self._joined.values():
            for user in rows.consumers():
                if user not in before and _tf.graphs.outermost_frame(user) is None:
                    _tf.graphs.add_control_input(user, check)

    def _find_inside(self) -> List[Statistics]:
        """Find what is inside: up to where examples meet, or beyond batch normalisation. Returns its statistics."""
        self._inside = self._proven(set())
        statistics = statistics_in(self._graph, self._batch)
        barriers = {op for one in statistics for op in one.ops}
        for key, tensor in self._fed.items():  # which segments take by their first axis, and without a gradient
            is_computed = tensor.op in self._of_variables and tensor.dtype.base_dtype.is_floating
            if is_computed or self._analysis.rows(key) not in (None, Rows(0, 1)):
                barriers = set()
        beyond = self._proven(barriers) if barriers else set()
        used = beyond & self._before_losses
        if not used & barriers or any(_tf.graphs.outermost_frame(op) is not None for op in used):
            return []
        if sum(map(self._uses_variable, used)) < sum(map(self._uses_variable, self._inside & self._before_losses)):
            return []  # loops before batch normalisation are worth more than what is behind it
        self._inside = used
        return [one for one in statistics if set(one.ops) <= used]

    def _segmented(self, statistics: Sequence[Statistics], recompute: bool) -> Segmented:
        fed = {key: tensor for key, tensor in self._values_fed.items() if self._forward.takes(key)}

        def draw(op: tf.Operation, copies: Dict[str, Any], marks: Marks, count: Any) -> None:
            if _is_random(op) and op not in self._trusted:
                self._draw(marks.draws, op, copies, marks.position, count)

        sources = [one for one in self._sources if one.name not in self._fed]
        places = [self._analysis.rows(one.name) or Rows(0, 1) for one in self._images]
        return segmented(self._forward, self._images, places, fed, self._size, sources, statistics, draw, recompute)

    def _use_statistics(self, values: Dict[Key, tf.Tensor]) -> None:
        """Let averages, and whatever else takes a statistic from inside, take that of the whole batch."""
        edges: Dict[Key, List[_Edge]] = {}
        for op in self._graph.get_operations():
            for index, tensor in enumerate(op.inputs if self._takes_statistics(op) else ()):
                image = self._image(tensor)
                is_inside = image is not None and image.op in self._inside and self._is_statistic(image)
                if is_inside and (self._branches is None or _tf.graphs.outermost_frame(tensor.op) is None):
                    edges.setdefault(tensor.name, []).append(_Edge(op, index))
        known = [self._graph.get_tensor_by_name(key) for key in values]
        of_batch: Dict[Key, tf.Tensor] = {}
        for key in edges:
            image = self._image_of(self._graph.get_tensor_by_name(key))
            part = Part([image], known + list(self._fed.values()))
            if not any(part.takes(name) for name in self._fed):
                of_batch[key] = part.compute(values)[image.name]
        others = self._with_other_values(list(of_batch)) if self._given and of_batch else {}
        for key, value in of_batch.items():
            self._repoint(edges[key], self._either(value, others[key]) if others else value)

    def _takes_statistics(self, op: tf.Operation) -> bool:
        """Whether an operation is outside, or in a conditional that moves averages."""
        conditional = None if self._branches is None else self._branches.conditional_of(op)
        return not self._is_covered(op) or (conditional is not None and conditional.has_effects)

    def _is_statistic(self, tensor: tf.Tensor) -> bool:
        return self._analysis.rows(tensor.name) is None and not self._analysis.is_size(tensor.name)

    def _edges(self, is_whole: bool) -> Tuple[Dict[Key, List[_Edge]], Dict[Key, List[_Edge]]]:
        """Return what others take from inside: {rows: where}, {numbers that depend on lengths: where}.

        Args:
          is_whole: whether all rows are computed in each run, so that large ones that losses do not need are left out.
        """
        rows: Dict[Key, List[_Edge]] = {}
        sizes: Dict[Key, List[_Edge]] = {}
        before = self._known_before()
        before_losses = self._before_losses if self._branches is None else self._branches.before_losses
        for op in self._graph.get_operations():
            if self._is_covered(op) or op in before or op in _inside_before(self._graph):
                continue
            for index, tensor in enumerate(op.inputs):
                image = self._image(tensor)
                if image is None or not self._gives_rows(image):
                    continue
                if _tf.graphs.outermost_frame(tensor.op) is not None and not _tf.graphs.leaves_frame(tensor.op):
                    continue  # within a loop, that of the losses
                if is_whole and op not in before_losses and not _is_small(image):
                    continue
                kind = sizes if self._analysis.is_size(image.name) else rows
                kind.setdefault(tensor.name, []).append(_Edge(op, index))
        for tensor in self._losses:
            image = self._image(tensor)
            if image is not None and image.op in self._inside and image.op in self._of_variables:
                rows.setdefault(tensor.name, [])
        for key in sizes:
            for tensor in self._rows_behind(key):
                rows.setdefault(tensor.name, [])
        return rows, sizes

    def _gives_rows(self, tensor: tf.Tensor) -> bool:
        return tensor.op in self._inside and tensor.op in self._of_variables and not self._is_statistic(tensor)

    def _known_before(self) -> Set[tf.Operation]:
        """Return the operations from which rows inside take numbers of the batch, which can't wait for the loop."""
        of_rows = [op for op in self._inside if any(self._analysis.holds_rows(one.name) for one in op.outputs)]
        inside = self._inside.intersection(_tf.op_walks.ancestors(of_rows))
        taken = [tensor.op for op in inside for i, tensor in enumerate(op.inputs) if self._is_taken(op, i)]
        return self._depending.intersection(_tf.op_walks.ancestors(taken, with_control=True))

    def _rows_behind(self, key: Key) -> List[tf.Tensor]:
        """Return the rows whose lengths a number depends on."""
        found: Dict[Key, tf.Tensor] = {}
        stack = [self._graph.get_tensor_by_name(key)]
        while stack:
            for tensor in stack.pop().op.inputs:
                image = self._image_of(tensor)
                if self._analysis.rows(image.name) is not None:
                    found[tensor.name] = tensor
                elif image.op in self._inside:
                    stack.append(tensor)
        return [tensor for tensor in found.values() if tensor.name not in self._fed]

    def _size_of_joined(self, key: Key) -> tf.Tensor:
        rows = self._rows_behind(key)
        part = Part([self._graph.get_tensor_by_name(key)], rows + list(self._fed.values()))
        return part.compute(dict(self._fed, **{one.name: self._joined[one.name] for one in rows}))[key]

    @staticmethod
    def _repoint(edges: Sequence[_Edge], tensor: tf.Tensor) -> None:
        for op, index in edges:
            _tf.graphs.replace_input(op, index, tensor)

    def _require_before_optimizer(self) -> None:
        if self._steps:
            raise ValueError(
                "`split_batch` must be called before the gradients of the loss are taken: move it between the losses "
                f"and the first optimizer, and pass it all losses of the batch. Received: {self._steps[0]!r}."
            )

    def _is_split(self, rows: Dict[Key, List[_Edge]]) -> bool:
        """Whether another call has done everything, as for the second loss of a batch."""
        return not rows and any(op.name in _links(self._graph) for op in self._before_losses)

    def _require_apart(self) -> None:
        """Raise if examples may meet before `outputs`."""
        wrong = [one.name for one in self._ends if one.op not in self._inside or self._analysis.rows(one.name) is None]
        if wrong:
            raise ValueError(
                "The batch can't be split up to `outputs`, before which each example must be computed by itself, from "
                f"`batch` and variables. {self._meeting(self._before_outputs)} Received: {wrong}. [accum: split-batch]"
            )

    def _require_gain(self, rows: Dict[Key, List[_Edge]]) -> None:
        if not rows:
            raise ValueError(
                "`split_batch` needs operations that take the examples of `batch` and variables, and that keep the "
                f"examples apart, before any in which they may meet. {self._shortfall()} Received: "
                f"{[one.name for one in self._batch]}. [accum: split-batch]"
            )
        using, inside = self._using()
        if 2 * len(inside) < len(using):
            _check.warn(
                f"`split_batch` computes {len(inside)} of {len(using)} operations with variables in micro-batches, and "
                f"the others from the whole batch, with the memory that this takes. {self._shortfall()}"
                " [accum: not-split]"
            )

    def _using(self) -> Tuple[List[tf.Operation], List[tf.Operation]]:
        """Return the operations before the losses that use variables, and those of them that are inside."""
        before = [op for op in self._ops if op in self._before_losses]
        using = [op for op in [*before, *self._left] if self._uses_variable(op)]
        return using, [op for op in using if op in self._inside]

    def share(self) -> float:
        """Return the share of the operations with variables that is computed in micro-batches."""
        using, inside = self._using()
        return len(inside) / max(len(using), 1)

    def _uses_variable(self, op: tf.Operation) -> bool:
        """Whether an operation combines examples with what is computed from variables alone."""
        sources = [one.op for one in op.inputs if one.op in self._of_variables]
        return any(source not in self._depending and source not in self._of_batch for source in sources)

    def _shortfall(self) -> str:
        """Return sentences about where examples may meet, and about data that is not in the batch."""
        words = [self._loop_behind_statistics() or self._meeting(self._before_losses)]
        if self._branches is None and len(self.choosers()) > 1:
            names = sorted(tensor.name for tensor in self.choosers())
            words.append(f"If one of {names} says whether this is training, pass its value as `given`.")
        if self._constant is not None:
            words.append(
                f"{self._named(self._constant)} only takes a constant number of examples: use `tf.shape(x)[0]`, or -1, "
                "in place of a number."
            )
        data = [op for op in self._before_losses if _tf.op_walks.gives_data(op)]
        missing = [one.name for op in data for one in op.outputs if one.name not in self._fed and _has_examples(one)]
        if missing:
            words.append(f"`batch` lacks {sorted(missing)}.")
        return " ".join(filter(None, words))

    def _loop_behind_statistics(self) -> str:
        """Return a sentence about a loop or conditional that is not split, although it keeps examples apart."""
        loops = [op for op in self._ops if op in self._before_losses and op not in self._inside]
        loops = [op for op in loops if _tf.graphs.is_within_loop(op) or op.type in _tf.graph_parts.LOOPS]
        if not loops or not self.statistics:
            return ""
        return f"A loop or conditional behind batch normalisation is not split: that of {self._named(loops[0])}."

    def _meeting(self, before: Set[tf.Operation]) -> str:
        """Return a sentence about the first of these operations in which examples may meet."""
        outside = [op for op in self._ops if op in before and op not in self._inside]
        verdicts = [(op, self._analysis.verdict(op.name)) for op in outside]
        meeting = [(op, one) for op, one in verdicts if one is not None and one.kind in ("meets", "reduces")]
        using = [(op, verdict) for op, verdict in meeting if op in self._of_variables]
        meeting.sort(key=lambda one: one[1].kind == "reduces")  # what data is reduced to can be known before
        for op, verdict in ((using if self._inside & self._of_variables else []) or meeting)[:1]:
            said = f"Examples may meet first in {self._named(op)}: {verdict.how}."
            is_unknown = op.type in self._analysis.unruled and not self._outputs
            remedy = " If it keeps them apart, pass the tensors up to which all operations do as `outputs`"
            other = "" if op in self._of_variables else ", or its result as a part of `batch`"
            return said + (f"{remedy}{other}." if is_unknown else "")
        return ""

    def replaced(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return what takes the place of a loss: itself, unless it is rows."""
        return self._joined.get(tensor.name, tensor)

    # ------------------------------------------------------------------------------------------------------------
    # The loops

    def _computed(self, part: Part, combined: Sequence[Any], upstream: Dict[Key, Tuple[tf.Tensor, int]]) -> List[Any]:
        """Compute a part for each micro-batch.

        Args:
          part: a `Part`.
          combined: what is kept of each micro-batch.
          upstream: {key of a placeholder in the part: (gradient of the batch, axis of its examples)}.
        """
        random = [op for op in part.ops if _is_random(op) and op not in self._trusted]
        if random:
            self._draws.begin()
        whole = {key: (tensor, self._axis(self._fed[key])) for key, tensor in self._values_fed.items()}
        whole.update(upstream)

        def compute(begin: tf.Tensor, count: tf.Tensor) -> Dict[str, Any]:
            fed = {
                key: rows_of_micro_batch(tensor, axis, begin, count, self._total)
                for key, (tensor, axis) in whole.items()
                if part.takes(key)
            }
            values = part.compute(fed)
            for op in random:
                self._draw(self._draws, op, values, begin, count)
            return values

        return over_micro_batches(self._total, self._size, compute, combined)

    def _draw(self, draws: Draws, op: tf.Operation, values: Dict[str, Any], begin: tf.Tensor, count: tf.Tensor) -> None:
        """Let what has been computed use the examples' share of the batch's random numbers."""
        copy = values[op.name]
        users = [
            (copy_of, index) for copy_of in copy.outputs[0].consumers() for index, one in enumerate(copy_of.inputs)
        ]
        users = [(user, index) for user, index in users if user.inputs[index] is copy.outputs[0]]
        drawn = _tf.random_ops.random_op_of(copy)
        assert drawn is not None
        rows = draws.rows(drawn, self._numbers[op.name], begin, count)
        for user, index in users:
            _tf.graphs.replace_input(user, index, rows)
        for key in [key for key, value in values.items() if value is copy.outputs[0]]:
            values[key] = rows

    def _axis(self, tensor: tf.Tensor) -> int:
        rows = self._analysis.rows(tensor.name)
        return 0 if rows is None else rows.axis

    def _joining(self, tensor: tf.Tensor) -> Joined:
        return Joined(tensor, self._axis(tensor), tensor.shape)

    # ------------------------------------------------------------------------------------------------------------
    # The gradient

    def _can_be_source(self, tensor: tf.Tensor) -> bool:
        if tensor.dtype == tf.resource:
            return tensor.op.type == "VarHandleOp" and _tf.graph_parts.dtype_of_handle(tensor).is_floating
        return bool(tensor.dtype.base_dtype.is_floating) and tensor.op in self._not_constant

    def _link(self, joined: Sequence[tf.Tensor], gradients: Optional[Gradients]) -> None:
        """Give joined rows a gradient: those on the way to the losses together, the others each by itself.

        Args:
          joined: rows of the whole batch, for each tensor of the frontier.
          gradients: function that computes the gradient of all rows; None: it is computed for each group.
        """
        of_images = {tensor.name: rows for tensor, rows in zip(self._images, joined)}
        rows_of = {tensor.name: of_images[self._image_of(tensor).name] for tensor in self._frontier}
        if self._given:
            others = self._with_other_values(list(rows_of))
            rows_of = {key: self._either(rows, others[key]) for key, rows in rows_of.items()}
        floats = [one for one in self._frontier if one.dtype.base_dtype.is_floating]
        of_losses = [one for one in floats if self._is_of_losses(one)]
        for group in [of_losses] + [[one] for one in floats if not self._is_of_losses(one)]:
            if group:
                self._link_group(group, [rows_of[tensor.name] for tensor in group], gradients)
        for tensor in self._frontier:
            if tensor.name not in self._joined:
                self._joined[tensor.name] = self._passed(tensor, rows_of[tensor.name])

    def _is_of_losses(self, tensor: tf.Tensor) -> bool:
        is_loss = any(tensor is loss for loss in self._losses)
        before = self._before_losses if self._branches is None else self._branches.before_losses
        return is_loss or any(op in before and not self._is_covered(op) for op in tensor.consumers())

    def _link_group(
        self, group: Sequence[tf.Tensor], values: Sequence[tf.Tensor], gradients: Optional[Gradients]
    ) -> None:
        # The gradient of reading a variable is that of its handle, also where it is `tf.IndexedSlices`.
        has_own_data = gradients is None and bool(self._data)
        sources = [_tf.graph_parts.value_of(one) for one in (self._weights if has_own_data else self._sources)]
        if gradients is not None:
            sources = [_final(value) if one.name in self._fed else value for one, value in zip(self._sources, sources)]
        passed = [self._passed(tensor, rows) for tensor, rows in zip(group, values)]
        with self._graph.gradient_override_map({"IdentityN": GRADIENT}):
            linked = tf.identity_n(passed + sources)
        joined = linked[: len(group)]
        for tensor, rows in zip(group, self._with_data(group, joined) if has_own_data else joined):
            rows.set_shape(tensor.shape)
            self._joined[tensor.name] = rows

        def of_group(upstream: Sequence[Optional[tf.Tensor]]) -> List[Optional[Gradient]]:
            if gradients is None:
                return self.gradients(group, upstream, self._weights)
            grads = {tensor.name: grad for tensor, grad in zip(group, upstream)}
            return self._of_segments([grads.get(tensor.name) for tensor in self._frontier], gradients)

        _links(self._graph)[linked[0].op.name] = _Link(len(group), of_group)

    def _with_data(self, group: Sequence[tf.Tensor], joined: Sequence[tf.Tensor]) -> List[tf.Tensor]:
        """Return joined rows that have a gradient by the data too, which is computed only if it is asked for.

        Optimizers compute all gradients of an operation before they use one of them (`GATE_OP`). So that by the data
        belongs to an operation of its own, which no way from variables to losses passes.
        """
        upstream: List[Optional[tf.Tensor]] = []

        def of_rows(grads: Sequence[Optional[tf.Tensor]]) -> List[Optional[Gradient]]:
            upstream[:] = [None if grad is None or _is_zeros(grad) else grad for grad in grads[: len(group)]]
            return [*upstream, tf.zeros([])]

        def of_data(_: Sequence[Optional[tf.Tensor]]) -> List[Optional[Gradient]]:
            return [*self.gradients(group, upstream, self._data), None]

        with self._graph.gradient_override_map({"IdentityN": GRADIENT}):
            data = tf.identity_n([*self._data, tf.zeros([])])
            rows: List[tf.Tensor] = tf.identity_n([*joined, data[-1]])
        _links(self._graph)[data[0].op.name] = _Link(0, of_data)
        _links(self._graph)[rows[0].op.name] = _Link(0, of_rows)
        return rows[: len(group)]

    def _of_segments(self, upstream: Sequence[Optional[tf.Tensor]], gradients: Gradients) -> List[Optional[Gradient]]:
        """Return the gradients by all sources, of rows that were computed in segments."""
        filled = [
            tf.zeros_like(self._joined[tensor.name]) if grad is None else tf.convert_to_tensor(grad)
            for tensor, grad in zip(self._frontier, upstream)
        ]
        of_images: Dict[Key, tf.Tensor] = {}
        for tensor, grad in zip(self._frontier, filled):
            key = self._image_of(tensor).name
            of_images[key] = of_images[key] + grad if key in of_images else grad
        sums = iter(gradients([self._require_chosen(of_images[one.name]) for one in self._images]))
        grads: List[Optional[Gradient]] = []
        for source in self._sources:
            if source.name in self._fed:  # whose identity raises an error where somebody asks for its gradient
                grads.append(tf.zeros_like(source))
            else:
                grad = divided(next(sums), None, _tf.graph_parts.value_of(source).dtype)
                grads.append(None if grad is None else _final(grad, checks=self._checks))
        return grads

    def _passed(self, tensor: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        """Return joined rows by an operation whose input can be replaced later, and which hides the loop.

        TensorFlow walks from variables to losses by floating-point tensors. Others end the walk.
        """
        bits = _BITS.get(rows.dtype.size) if rows.dtype.is_floating else None
        first = tf.identity(rows) if bits is None else tf.bitcast(rows, bits)
        self._inlets[tensor.name] = _Edge(first.op, 0)
        return first if bits is None else tf.bitcast(first, rows.dtype)

    def gradients(
        self, group: Sequence[tf.Tensor], upstream: Sequence[Optional[tf.Tensor]], sources: Sequence[tf.Tensor]
    ) -> List[Optional[Gradient]]:
        """Return the gradient by each of some sources, given those by joined rows."""
        live = [
            (
                self._image_of(tensor),
                self._require_chosen(tf.convert_to_tensor(grad)),
            )  # of rows that have been gathered, `tf.IndexedSlices`
            for tensor, grad in zip(group, upstream)
            if grad is not None and not _is_zeros(grad)
        ]
        template = self._template([tensor for tensor, _ in live], sources)
        if template.part is None:
            return [None for _ in sources]
        is_apart = self._is_once or sources is not self._weights
        own = None if is_apart else self._without_rows([tensor for tensor, _ in live], [grad for _, grad in live])
        grads = [grad for _, grad in live] if own is None else own
        fed = {
            placeholder.name: (grad, self._axis(tensor))
            for placeholder, (tensor, _), grad in zip(template.upstream, live, grads)
        }
        combined = [self._summing(g, source) for g, source in zip(template.grads, sources) if g is not None]
        if own is None:
            sums = iter(self._computed(template.part, combined, fed))
        else:
            with tf.control_dependencies(None):
                sums = iter(self._at_once(template, combined, fed))
        # TensorFlow finds them by what is computed from these, but not the loop, which it can't differentiate again.
        links = [_tf.graph_parts.value_of(source) for source in self._sources] + [grad for _, grad in live]
        return [None if grad is None else _final(next(sums), links, self._checks) for grad in template.grads]

    # ------------------------------------------------------------------------------------------------------------
    # Forward and backward in one loop

    def _at_once(self, template: _Template, combined: List[Any], fed: Dict[Key, Tuple[tf.Tensor, int]]) -> List[Any]:
        """Compute the gradient of each micro-batch with its rows, which come from this loop from now on."""
        self._is_once = True
        fetches = [tensor for grad in template.grads if grad is not None for tensor in fetches_of(grad)]
        part = Part(self._images + fetches, list(self._fed.values()) + template.upstream, self._is_taken)
        joining: List[Any] = [self._joining(tensor) for tensor in self._images]
        results = self._computed(part, joining + combined, fed)
        rows_of = {tensor.name: rows for tensor, rows in zip(self._images, results)}
        for tensor in self._frontier:
            self._repoint([self._inlets[tensor.name]], rows_of[self._image_of(tensor).name])
        return results[len(joining) :]

    def _without_rows(self, live: Sequence[tf.Tensor], grads: Sequence[tf.Tensor]) -> Optional[List[tf.Tensor]]:
        """Return the gradients by joined rows without waiting for these, or None if they depend on their values.

        The gradient of a mean or a sum over examples depends only on how many there are. Then no example's gradient
        waits for another example.
        """
        joined = [self._joined[tensor.name] for tensor in self._frontier]
        if tf.float16 in [one.dtype.base_dtype for one in live] or _tf.graphs.is_in_conditional():
            return None
        if not _depend_on_lengths_alone(grads, {rows.op for rows in joined}):
            return None
        proxies = {rows.name: self._zeros_like_rows(self._image_of(one)) for one, rows in zip(self._frontier, joined)}
        with tf.control_dependencies(None):
            part = Part(list(grads), joined)
            is_repeatable = not any(_is_random(op) or op.op_def.is_stateful for op in part.ops)
            if not is_repeatable or any(proxies[key] is None for key in proxies if part.takes(key)):
                return None
            values = part.compute(
                {key: proxy() for key, proxy in proxies.items() if proxy is not None and part.takes(key)}
            )
        return [values[grad.name] for grad in grads]

    def _zeros_like_rows(self, tensor: tf.Tensor) -> Optional[Callable[[], tf.Tensor]]:
        """Return a function that returns zeros in the shape of joined rows, or None if that is not known before."""
        rows = self._analysis.rows(tensor.name)
        lengths = tensor.shape.as_list()
        others = [length for axis, length in enumerate(lengths) if rows is None or axis != rows.axis]
        varies = any(None in one.shape.as_list()[1:] for one in self._fed.values())
        if rows is None or None in others or (varies and rows.per_example != 1):
            return None
        lengths[rows.axis] = self._total * rows.per_example
        return lambda: tf.zeros(tf.stack(lengths), tensor.dtype.base_dtype)

    def _summing(self, grad: Gradient, source: tf.Tensor) -> Any:
        if source.name in self._fed:
            return Joined(grad, self._axis(source), source.shape)
        return Slices(grad) if isinstance(grad, tf.IndexedSlices) else Added(grad, source)

    def _template(self, tensors: Sequence[tf.Tensor], sources: Sequence[tf.Tensor]) -> _Template:
        key = tuple(tensor.name for tensor in [*tensors, *sources])
        if key not in self._templates:
            upstream = [tf.compat.v1.placeholder(one.dtype.base_dtype, one.shape, "upstream") for one in tensors]
            # One source may be computed from another one, whose gradient it then passes on itself.
            grads = tf.gradients(tensors, sources, upstream, name="gradients", stop_gradients=self._sources)
            grads = [
                tf.convert_to_tensor(grad) if grad is not None and source.name in self._fed else grad
                for grad, source in zip(grads, sources)
            ]
            fetches = [tensor for grad in grads if grad is not None for tensor in fetches_of(grad)]
            part = Part(fetches, list(self._fed.values()) + upstream, self._is_taken) if fetches else None
            self._templates[key] = _Template(upstream, grads, part)
        return self._templates[key]


class _Link(NamedTuple):
    """What the gradient of an operation that joins rows needs.

    Attributes:
      number: how many of its first operands have no gradient: rows, whose gradient is that by the sources.
      gradients: function of the gradients by its results that returns those by its other operands.
    """

    number: int
    gradients: Gradients


def _links(graph: tf.Graph) -> Dict[str, _Link]:
    links: Dict[str, _Link] = _tf.graphs.notes_of(graph).setdefault(GRADIENT, {})
    return links


def _inside_before(graph: tf.Graph) -> Set[tf.Operation]:
    """Return the operations that earlier calls have copied: the gradients of the originals are still needed."""
    ops: Set[tf.Operation] = _tf.graphs.notes_of(graph).setdefault(SCOPE, set())
    return ops


@tf.RegisterGradient(GRADIENT)
def _gradient(op: tf.Operation, *upstream: Optional[tf.Tensor]) -> List[Optional[Gradient]]:
    if tf1.get_default_graph() is not op.graph:
        raise ValueError(
            "The gradients of what `split_batch` has split can't be taken within a conditional, loop or function of "
            f"TensorFlow 2: take them before, and apply them there. Received: {op.name!r}. [accum: split-batch]"
        )
    link = _links(op.graph).get(op.name)
    if link is None:
        raise ValueError(
            "The rows that `split_batch` has joined have no gradient in a graph that was imported: build the model in "
            f"this graph and call `split_batch` in it. Received: {op.name!r}. [accum: split-batch]"
        )
    return [None] * link.number + link.gradients(upstream)


NO_GRADIENT = "AccumSplitBatchNoGradient"


def _final(grad: Gradient, links: Sequence[tf.Tensor] = (), checks: Sequence[tf.Operation] = ()) -> Gradient:
    """Return a gradient that raises an error where it is differentiated in turn.

    Args:
      grad: a gradient.
      links: what it is computed from, if operations between are hidden; none if they are not.
      checks: operations for which it waits.
    """
    graph = tf1.get_default_graph()

    def final(value: tf.Tensor) -> tf.Tensor:
        value = _hidden(value) if links else value
        with graph.gradient_override_map({"IdentityN": NO_GRADIENT}), tf.control_dependencies(checks):
            return tf.identity_n([value, *links])[0]

    return _tf.inner_optimizer.on_values(final, grad)


def _hidden(value: tf.Tensor) -> tf.Tensor:
    """Return a tensor behind one of integers, at which TensorFlow ends its walk from variables to losses."""
    bits = _BITS.get(value.dtype.size) if value.dtype.is_floating else None
    return value if bits is None else tf.bitcast(tf.bitcast(value, bits), value.dtype)


@tf.RegisterGradient(NO_GRADIENT)
def _no_gradient(op: tf.Operation, *upstream: tf.Tensor) -> None:
    del upstream
    raise ValueError(
        "A gradient through what `split_batch` has split can't be differentiated again, and with batch normalisation, "
        "there is no gradient by the batch: take gradients that are part of the loss before you call `split_batch`. "
        f"Received: {op.inputs[0].name!r}. [accum: split-batch]"
    )


LENGTHS = {"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"}
"""Operations whose results depend on the shapes of their operands alone."""


def _depend_on_lengths_alone(tensors: Sequence[tf.Tensor], ops: Set[tf.Operation]) -> bool:
    """Whether tensors depend on the results of operations by their shapes alone, and wait for them no further."""
    stack = [tensor.op for tensor in tensors]
    done: Set[tf.Operation] = set()
    while stack:
        op = stack.pop()
        if op in ops:
            return False
        if op not in done:
            done.add(op)
            stack += [] if op.type in LENGTHS else [tensor.op for tensor in op.inputs]
            stack += op.control_inputs
    return True


def _is_stateful(op: tf.Operation) -> bool:
    """Whether an operation has, or changes, a state, other than that of a variable that it reads."""
    is_read = op.type.startswith(("ReadVariable", "ResourceGather"))
    return bool(op.op_def.is_stateful) and op.type not in CHECKS and not is_read


def _is_zeros(grad: tf.Tensor) -> bool:
    """Whether TensorFlow has made up a gradient where there is none."""
    return isinstance(grad, tf.Tensor) and grad.op.type == "ZerosLike"


def _has_examples(tensor: tf.Tensor) -> bool:
    """Whether a tensor of data may have the examples along its first axis."""
    return tensor.shape.rank is None or (tensor.shape.rank > 0 and tensor.shape.as_list()[0] is None)


def _is_small(tensor: tf.Tensor) -> bool:
    """Whether rows have few numbers for each example, at most 4,096."""
    lengths = tensor.shape.as_list()[1:] if tensor.shape.rank else []
    return None not in lengths and tf.TensorShape(lengths).num_elements() <= 4096


def _is_random(op: tf.Operation) -> bool:
    return _tf.random_ops.random_op_of(op) is not None


def _variables(graph: tf.Graph) -> List[tf.Operation]:
    return [op for op in graph.get_operations() if op.type in VARIABLES]


def _reached(
    starts: Sequence[tf.Operation], users: Dict[tf.Operation, List[tf.Operation]], ends: Container[str] = ()
) -> Set[tf.Operation]:
    """Return operations and all that are computed from them, through loops too, but not through types of `ends`."""
    found: Set[tf.Operation] = set()
    stack = list(starts)
    while stack:
        op = stack.pop()
        if op not in found and op.type not in ends:
            found.add(op)
            stack += users.get(op, [])
    return found


def _sorted(ops: Set[tf.Operation]) -> List[tf.Operation]:
    return sorted(ops, key=_tf.graphs.creation_order)
