"""What of a graph can be computed in micro-batches: the operations that keep examples apart (`accum._rows`)."""

from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

from accum import _rows, _tf
from accum._engine._found_statistics import SQUARES, Statistics, statistics_in
from accum._engine._held_values import HeldValues, takes_values
from accum._engine._part import Key
from accum._rows import Analysis, Layout, Rows
from accum._tf import tf
from accum.compat.v1._chosen_branches import ChosenBranches, Frame, choosers
from accum.compat.v1._open_batch import NotCopied, OpenBatch

VARIABLES = ("VariableV2", "Variable", "VarHandleOp")
STEPS = ("Apply", "ResourceApply", "SparseApply", "ResourceSparseApply")
"""Types with which the operations begin by which optimizers change variables."""

LENGTHS = ("Cast", "Identity", "Mul", "Pack", "StopGradient")
"""Types of operations by which programs compute the lengths of axes from numbers."""

MADE = ("Fill", "ZerosLike")
"""Types of operations that make rows which programs feed, such as the initial state of a recurrent network."""


ROUNDS = 4
"""How often rows that are known before are looked for, each time behind those that have been found."""


class ConstantBatch(ValueError):
    """The graph takes a constant number of examples, which the shapes of the batch do not tell."""


class Inside:
    """Finds what of a graph keeps the examples of a batch apart, up to the tensors whose rows are joined.

    It changes no operation of the graph. With `given`, it adds copies in which branches are chosen.

    Args:
      losses: tensors.
      batch: tensors that share their first axis, the examples.
      outputs: tensors up to which the batch is split; if there are none, as far as possible.
      given: {key of a boolean tensor: its value}; the branches of these values are split. None: the graph as it is.
      count: the number of examples, if that is a constant of the graph.
      known: other rows, which are computed once, and cut: examples have met before them, but no variable is.
      joined: {joined rows of what has been split before: where the examples lie in them}; only what is computed from
        these, and needed for losses, is looked at.

    Attributes:
      received: `batch`, as passed.
      joined: {key of a tensor of `joined`: as there}.
      known: `known`, and more such rows, if there are any.
      ops: the operations inside.
      statistics: of batch normalisation inside, which are those of the whole batch.
      batch: the tensors from which `ops` are computed; with `given`, those of a copy.
      fed: {key: tensor} of `batch`, and of other rows that are computed once for the whole batch, and cut.
      branches: the `ChosenBranches`, or None.
      of_batch: the operations that are computed from the batch, in the order of their creation.
      depending: set of these.
      of_variables: the operations that are computed from variables.
      not_constant: those that are computed from anything but constants, not only from shapes.
      before_losses: the operations from which the losses are computed.
      ends: what `outputs` are.
      before_outputs: the operations from which these are computed.
      trusted: unknown operations before `outputs`, which are taken to keep examples apart.
      steps: names of optimizers' operations that are computed from the batch.
      held: the values of variables that the run may change, as they are before that: of variables that something other
        than an optimizer changes; with several losses, of all that have handles, since optimizers then take turns.
      constant: an operation that takes a constant number of examples, or None.
      reason: a sentence that says why a constant number of examples could not be opened, or "".
      analysis: where the examples lie in each tensor.
    """

    def __init__(
        self,
        losses: Sequence[tf.Tensor],
        batch: Sequence[tf.Tensor],
        outputs: Sequence[tf.Tensor] = (),
        given: Optional[Dict[Key, bool]] = None,
        count: Optional[int] = None,
        known: Sequence[tf.Tensor] = (),
        joined: Sequence[Tuple[tf.Tensor, Rows]] = (),
    ) -> None:
        self.graph = tf.compat.v1.get_default_graph()
        self.joined = {tensor.name: rows for tensor, rows in joined}
        self.received, self.given, self.count = list(batch), given, count
        self.constant: Optional[tf.Operation] = None
        self.reason = ""
        batch = [*batch, *known]
        self.branches = None if given is None else self._copied(losses, batch, given)
        self.losses = list(losses)
        self.outputs = list(outputs)
        self.batch = list(batch) if self.branches is None else self.branches.batch
        self.fed = {tensor.name: tensor for tensor in [*self.batch, *(tensor for tensor, _ in joined)]}
        users = _tf.op_walks.users_of(self.graph)
        self._found_lengths = lengths_found_in(self.graph)
        for op in self._found_lengths:
            users.pop(op, None)  # they are the same in each micro-batch
        self._of_original = _tf.op_walks.reached([op for tensor in batch for op in tensor.consumers()], users)
        self.steps = [
            op.name for op in sorted(self._of_original, key=_tf.graphs.creation_order) if op.type.startswith(STEPS)
        ]
        changes = [op for op in self._of_original if _tf.op_walks.changes_variable(op)]
        changed = {op.inputs[0].op for op in changes if not op.type.startswith(STEPS)}
        self.held = HeldValues(changed, holds_handles=len(self.losses) > 1)
        ends_of_losses = self.losses if self.branches is None else self.branches.ends
        self._joined_ops = {tensor.op for tensor, _ in joined}
        self.before_losses = set(_tf.op_walks.ancestors([tensor.op for tensor in ends_of_losses], self._joined_ops))
        self._of_value = _before_but_for_shapes([tensor.op for tensor in ends_of_losses], self._joined_ops)
        self._before_joined = set(_tf.op_walks.ancestors(self._joined_ops, with_control=True))  # can't wait for a loop
        starts = [*self.batch, *(tensor for op in self._joined_ops for tensor in op.outputs)]
        ops = _tf.op_walks.reached([op for tensor in starts for op in tensor.consumers()], users)
        if joined or self.branches is not None:
            ops &= self.before_losses if self.branches is None else self.branches.ops
        self.of_batch = sorted(ops, key=_tf.graphs.creation_order)
        self.depending = set(self.of_batch)
        operations = self.graph.get_operations()
        variables = variables_of(self.graph)
        self.of_variables = _tf.op_walks.reached(variables, users)
        self._of_values = _tf.op_walks.reached(variables, users, _tf.op_walks.OF_SHAPES)
        not_constant = [op for op in operations if not op.inputs and op.type != "Const"]
        not_constant += [op for op in operations if op.type == "PlaceholderWithDefault"]
        self.not_constant = _tf.op_walks.reached(not_constant, users, _tf.op_walks.OF_SHAPES)
        images = [image for image in map(self.image, self.outputs) if image is not None]
        self.ends = [image for image in images if image.op in self.before_losses]  # no loss needs the others
        self.before_outputs = set(_tf.op_walks.ancestors([image.op for image in self.ends]))
        self.trusted: Set[tf.Operation] = set()
        # What waits for a check of what may be inside can't be known before it, nor what a copy takes of that.
        self._behind = _tf.op_walks.descendants(self.of_variables & self._of_original.union(self.of_batch))
        self.analysis = self._analysed(users)
        self.known = [*known, *self._known_rows({one.name for one in batch})]
        self._lengths = self._mixed_lengths()
        self.library = _tf.graph_parts.Library(self.graph, self.graph.as_graph_def())
        self._feed_known()
        self.statistics = self._find()

    @classmethod
    def of(
        cls,
        losses: Sequence[tf.Tensor],
        batch: Sequence[tf.Tensor],
        outputs: Sequence[tf.Tensor] = (),
        given: Optional[Dict[Key, bool]] = None,
        count: Optional[int] = None,
        joined: Sequence[Tuple[tf.Tensor, Rows]] = (),
    ) -> "Inside":
        """Return what is inside, where rows that are known before are taken for rows of the batch if that helps."""
        rounds = [cls(losses, batch, outputs, given, count, (), joined)]
        known: List[tf.Tensor] = []
        while len(rounds) < ROUNDS and rounds[-1].share() < 1.0 and len(rounds[-1].known) > len(known):
            known = rounds[-1].known
            try:
                rounds.append(cls(losses, batch, outputs, given, count, known, joined))
            except (ConstantBatch, NotCopied):
                break  # what was found before is split all the same
        return max(rounds, key=cls.share)  # the first of equal ones

    def with_branches(self, given: Dict[Key, bool]) -> "Inside":
        """Return what is inside if branches are chosen by these values."""
        return Inside.of(self.losses, self.received, self.outputs, given)

    def _copied(
        self, losses: Sequence[tf.Tensor], batch: Sequence[tf.Tensor], given: Dict[Key, bool]
    ) -> ChosenBranches:
        users = _tf.op_walks.users_of(self.graph)
        of_variables = _tf.op_walks.reached(variables_of(self.graph), users)
        of_batch = _tf.op_walks.reached([op for tensor in batch for op in tensor.consumers()], users)
        opened = None if self.count is None else OpenBatch(batch, self.count, of_variables)
        return ChosenBranches(losses, batch, given, of_variables, of_batch, opened)

    @property
    def before_losses_as_built(self) -> Set[tf.Operation]:
        """`before_losses` of the program's own operations, if `ops` are copies."""
        return self.before_losses if self.branches is None else self.branches.before_losses

    def choosers(self) -> List[tf.Tensor]:
        """Return the boolean placeholders that choose between branches, if there is batch normalisation."""
        ops = [op for op in self.of_batch if op in self.before_losses]
        return choosers(ops) if any(map(self._may_normalize, ops)) else []

    def _may_normalize(self, op: tf.Operation) -> bool:
        if op.type in _tf.graph_parts.CALLS:
            return self.library.normalizes(op.node_def)
        is_spread = op.type == "Mean" and op.inputs[0].op.type in SQUARES
        return is_spread or op.type in _tf.op_walks.FUSED_BATCH_NORMS

    def image(self, tensor: tf.Tensor) -> Optional[tf.Tensor]:
        """Return what a tensor of the graph is if the branches are chosen; None if it is not computed."""
        return tensor if self.branches is None else self.branches.image(tensor)

    def image_of(self, tensor: tf.Tensor) -> tf.Tensor:
        image = self.image(tensor)
        assert image is not None
        return image

    def is_covered(self, op: tf.Operation) -> bool:
        """Whether an operation is inside, itself or as a copy, or chooses between branches that are."""
        if op in self.ops:
            return True
        if self.branches is None:
            return False
        frame = self.branches.frame_of(op)
        if frame is None:
            copy = self.branches.copy_of(op)
            return copy in self.ops if copy is not None else op in self.branches.ops
        return self.is_frame_inside(frame)

    def is_frame_inside(self, frame: Frame) -> bool:
        return all(op in self.ops for op in frame.copies if op in self.depending)

    def source(self, op: tf.Operation) -> tf.Operation:
        return op if self.branches is None else self.branches.source(op)

    def named(self, op: tf.Operation) -> str:
        """Return the name of an operation of the program, and where it is made."""
        line = _tf.graphs.line_of(self.source(op))
        return repr(self.source(op).name) + (f" (made in {line})" if line else "")

    def layout(self, tensor: tf.Tensor) -> Layout:
        """Return where the examples lie in a tensor of rows."""
        return self.analysis.layout(tensor.name) or Layout(0)

    # ------------------------------------------------------------------------------------------------------------
    # What is known of each operation

    def _analysed(self, users: Dict[tf.Operation, List[tf.Operation]]) -> Analysis:
        inputs = {name: self.joined.get(name, Rows(0, 1)) for name in self.fed}
        changing = _tf.op_walks.reached([op for op in self.of_batch if _tf.op_walks.changes_variable(op)], users)
        ops = [op for op in self.of_batch if op not in changing]
        while True:
            analysis = (
                self._analysed_with(ops, inputs) if self.count is None else self._analysed_open(ops, inputs, users)
            )
            unknown = [op for op in ops if self._is_unknown(op, analysis)]
            if not unknown:
                return analysis
            self.trusted.add(unknown[0])
            inputs.update((tensor.name, Rows(0, 1)) for tensor in unknown[0].outputs)

    def _analysed_with(self, ops: Sequence[tf.Operation], inputs: Dict[Key, Rows]) -> Analysis:
        try:
            return _rows.analyse(self.graph, [op.name for op in ops], inputs, with_places=True)
        except _rows.ConstantBatchSize:  # perhaps only of a summary, which is not split then
            before = [op.name for op in ops if op in self.before_losses]
        try:
            return _rows.analyse(self.graph, before, inputs, with_places=True)
        except _rows.ConstantBatchSize as error:
            named = self.named(self.graph.get_operation_by_name(error.operation))
            raise ConstantBatch(f"{error} In {named}.") from None

    def _analysed_open(
        self, ops: Sequence[tf.Operation], inputs: Dict[Key, Rows], users: Dict[tf.Operation, List[tf.Operation]]
    ) -> Analysis:
        """Return what is known of operations, but of those that still take a constant number of examples."""
        while True:
            try:
                return _rows.analyse(self.graph, [op.name for op in ops], inputs, with_places=True)
            except _rows.ConstantBatchSize as error:
                constant = _tf.op_walks.reached([self.graph.get_operation_by_name(error.operation)], users)
                if constant.isdisjoint(ops):
                    raise NotCopied(str(error)) from None
                self.constant = self.constant or self.graph.get_operation_by_name(error.operation)
                ops = [op for op in ops if op not in constant]

    def _is_unknown(self, op: tf.Operation, analysis: Analysis) -> bool:
        """Whether accum does not know an operation before `outputs`, which is said to keep examples apart."""
        verdict = analysis.verdict(op.name)
        if op not in self.before_outputs or verdict is None or verdict.kind != "meets":
            return False
        if op.type not in analysis.unruled or op in self.trusted:
            return False
        unclear = [tensor.name for tensor in op.outputs if not tensor.shape.rank]
        if unclear:
            raise ValueError(
                "An operation before `outputs` that accum does not know must return one row for each example: set the "
                f"shape of its results, such as [None, 10]. Received: {unclear} of {self.named(op)}."
                " [accum: split-batch]"
            )
        return True

    def _mixed_lengths(self) -> Set[tf.Operation]:
        """Return what computes lengths of axes from how many examples there are and from what is known of all of them.

        As a shape, `[n * longest, 5]` is that of a micro-batch. Elsewhere, it is the number of the whole batch.
        """
        ops = [op for op in self.of_batch if op.type in LENGTHS and _tf.graphs.outermost_frame(op) is None]
        numbers = [(op, one) for op in ops for one in op.outputs if one.dtype.is_integer]
        return {op for op, one in numbers if self.analysis.is_mixed(one.name)}

    def _known_rows(self, batch: Set[Key]) -> List[tf.Tensor]:
        """Return rows of the program in which examples have met, as where each text is cut to the longest one.

        The first of them that depend on no variable can be computed once.
        """
        return [one for one in self._first_met(self._behind) if one.name not in batch]

    def met_rows(self) -> List[tf.Tensor]:
        """Return rows behind what is inside in which examples have met: what is behind these may keep them apart."""
        return [one for one in self._first_met(self.ops) if one.op in self.of_variables]

    def _first_met(self, left_out: Set[tf.Operation]) -> List[tf.Tensor]:
        """Return rows of the program in which examples have met, but for those that are computed from such rows."""
        found: List[tf.Tensor] = []
        behind: Set[tf.Operation] = set()
        for op in self.of_batch:
            if any(tensor.op in behind for tensor in op.inputs):
                behind.add(op)
            elif op not in left_out and op in self.before_losses and _tf.graphs.outermost_frame(op) is None:
                rows = [self.source(op).outputs[one.value_index] for one in op.outputs if self._must_be_known(one)]
                found += rows
                behind.update([op] if rows else [])
        return found

    def _must_be_known(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor has one row for each example, before which examples have met, and is in the program."""
        level, original = self.analysis.level(tensor.name), self.source(tensor.op).outputs
        is_own = tensor.value_index < len(original) and self.image(original[tensor.value_index]) is tensor
        if not level or not is_own or self.analysis.is_list(tensor.name):
            return False
        if self.analysis.rows(tensor.name) == Rows(0, 1) or self.analysis.is_as_long_as_the_batch(tensor.name):
            return True
        is_constant = self.count is not None and self.analysis.has_met(tensor.name) and bool(tensor.shape.rank)
        return is_constant and tensor.shape.as_list()[0] == self.count

    def _feed_known(self) -> None:
        """Let rows that depend on no variable, and are made for the whole batch, be made once and cut.

        They are random numbers, initial states, and what may look at all examples, such as a gradient of its own.
        """
        for op in self.of_batch:
            if op in self._behind or _tf.graphs.outermost_frame(op) is not None:
                continue
            is_whole = op in self.before_losses and not self._keeps_apart(op, set())
            if is_random(op) or op.type in MADE or is_whole:
                self.fed.update((one.name, one) for one in op.outputs if self.analysis.rows(one.name) is not None)

    def _proven(self, barriers: Set[tf.Operation]) -> Set[tf.Operation]:
        """Return the operations that keep examples apart, and whose operands are rows or known before.

        Args:
          barriers: operations that compute statistics of the batch, which are known where they are used.
        """
        candidates = {op for op in self.of_batch if self._keeps_apart(op, barriers)} - self._of_one_branch()
        candidates -= self._before_joined
        if self.ends:
            candidates &= self.before_outputs
        frames, busy = self._frames(), self._busy_frames()
        for ops in frames:
            framed = [op for op in ops if _tf.graphs.outermost_frame(op) is not None]  # not copies of a chosen branch
            is_busy = any(_tf.graphs.outermost_frame(op) in busy for op in framed)
            if barriers or is_busy or not self._is_frame_apart(framed):
                candidates.difference_update(framed)
        while True:
            wrong = {op for op in candidates if not all(self._is_known(one, candidates) for one in op.inputs)}
            wrong |= {op for op in candidates if self._hands_list_on(op, candidates)}
            wrong |= {op for op in candidates if self._takes_length(op, candidates)}
            for ops in frames:  # loops and conditionals are inside as a whole, or not at all
                if any(op not in candidates or op in wrong for op in ops):
                    wrong.update(op for op in ops if op in candidates)
            if not wrong:
                return candidates - self._unused_numbers(candidates)
            candidates -= wrong

    def _unused_numbers(self, candidates: Set[tf.Operation]) -> Set[tf.Operation]:
        """Return numbers that nothing inside takes, but perhaps a conditional behind it, which would wait for them."""
        frames = {_tf.graphs.outermost_frame(op) for op in candidates & self.before_losses} - {None}
        of_branches = {op for one in ([] if self.branches is None else self.branches.frames) for op in one.copies}
        numbers = [op for op in self.of_batch if op in candidates and op not in of_branches and self._is_number(op)]
        unused: Set[tf.Operation] = set()
        for op in reversed(numbers):
            users = {user for tensor in op.outputs for user in tensor.consumers()}
            frame = _tf.graphs.outermost_frame(op)
            leads_out = (users or frame is not None) and not _tf.graphs.leaves_frame(op)
            if leads_out and frame not in frames and candidates.intersection(users) <= unused:
                unused.add(op)
        return unused

    def _is_number(self, op: tf.Operation) -> bool:
        """Whether an operation computes numbers from how many examples there are, or from lengths."""
        return bool(op.outputs) and all(self.analysis.is_size(one.name) for one in op.outputs)

    def _of_one_branch(self) -> Set[tf.Operation]:
        """Return what is computed in one branch alone but belongs to none, as gradients in a loss are.

        Nothing could be joined of it in a run of the other branch.
        """
        own = {op for op in self.of_batch if _tf.graphs.outermost_frame(op) is None}
        own = {op for op in own if op.type not in _tf.op_walks.MERGES}
        users = {op: [user for one in op.outputs for user in one.consumers() if user in own] for op in own}
        return _tf.op_walks.reached([op for op in own if op.type in _tf.op_walks.SWITCHES and users[op]], users)

    def _frames(self) -> List[List[tf.Operation]]:
        """Return the operations of each loop and conditional of TF 1, and of each chosen branch."""
        if self.branches is not None:
            return [[op for op in one.copies if op in self.depending] for one in self.branches.frames]
        frames: Dict[Any, List[tf.Operation]] = {}
        for op in self.of_batch:
            frames.setdefault(_tf.graphs.outermost_frame(op), []).append(op)
        frames.pop(None, None)
        return [[op for op in ops if op in self.before_losses] or ops for ops in frames.values()]

    def _busy_frames(self) -> Set[Any]:
        """Return the loops and conditionals of TF 1 in which something must happen once in a run.

        It assigns to a variable, or its result is another each time and yet the same for all examples, such as noise.
        """
        busy = set()
        for op in self.graph.get_operations() if self.branches is None else self.branches.ops:
            frame = _tf.graphs.outermost_frame(op)
            if frame is not None and frame not in busy and (_tf.op_walks.changes_variable(op) or self._is_drawn(op)):
                busy.add(frame)
        return busy

    def _is_drawn(self, op: tf.Operation) -> bool:
        """Whether what an operation returns may be another each time that it runs, but is the same for all examples."""
        if op in self.depending or op not in self.before_losses or op.type == "Print":
            return False
        if _tf.graph_parts.is_repeatable(op.type):
            return False
        return op.op_def is not None and bool(op.op_def.is_stateful)

    def _keeps_apart(self, op: tf.Operation, barriers: Set[tf.Operation]) -> bool:
        verdict = self.analysis.verdict(op.name)
        if any(one.name in self.fed for one in op.outputs):
            return False
        if op not in barriers and any(map(self.held.is_changed, op.inputs)) and (barriers or not takes_values(op)):
            return False  # it would read again what the run has changed; segments hold no values
        if op in self.trusted:
            return not _tf.graphs.has_own_gradient(op)
        if verdict is None:  # independent of the examples, such as a counter of a loop
            return _tf.graphs.outermost_frame(op) is not None
        if op in barriers:
            return verdict.kind == "reduces"
        is_within = _tf.graphs.outermost_frame(op) is not None  # where numbers of the whole batch may be compared
        is_number = verdict.kind == "behind" and not any(self.analysis.has_met(one.name) for one in op.outputs)
        if op in self._lengths:
            return True
        if verdict.kind == "behind" and any(self.analysis.is_mixed(one.name) for one in [*op.inputs, *op.outputs]):
            return False  # that of the whole batch, unless it is the length of an axis
        lengths = [one for i, one in enumerate(op.inputs) if not self.analysis.shapes_only(op.name, i)]
        numbers = [*self.analysis.counts_taken_by(op.name), *(one for one in lengths if one.op in self._lengths)]
        if verdict.kind == "rows" and not all(one.dtype.is_floating for one in numbers):
            return False  # an index or a condition: its gradient would take the number of the micro-batch
        if verdict.kind not in ("rows", "size") and not ((barriers or is_within or self._is_same(op)) and is_number):
            return False
        if _tf.graphs.has_own_gradient(op):
            return False  # which may look at all examples, unlike that of an operation that keeps them apart
        if op.type in _tf.graph_parts.CALLS and self.library.hidden(_tf.graph_parts.node_of(op)):
            return False  # it draws or assigns
        takes_statistics = barriers and any(self.analysis.level(tensor.name) for tensor in op.inputs)
        if op.type in _tf.graph_parts.CALLS and takes_statistics:
            return False  # as a conditional that chooses between statistics
        if not is_random(op):
            return True
        drawn, layout = _tf.random_ops.random_op_of(op), self.analysis.layout(op.outputs[0].name)
        can_be_cut = drawn is not None and drawn.kind is not None and not _tf.graphs.is_within_loop(op)
        return can_be_cut and layout is not None and layout.axis == 0 and layout.blocks == 1

    def _is_same(self, op: tf.Operation) -> bool:
        """Whether what an operation computes from numbers of the whole batch is the same in each micro-batch."""
        return not any(self.analysis.holds_rows(one.name) or self.analysis.is_count(one.name) for one in op.inputs)

    def _is_frame_apart(self, ops: Sequence[tf.Operation]) -> bool:
        """Whether a loop or conditional of TF 1 takes no number of examples."""
        for op in ops:
            verdict = self.analysis.verdict(op.name)
            is_of_rows = verdict is not None and verdict.kind == "rows"
            is_mixed = any(self.analysis.is_mixed(one.name) for one in op.inputs)
            if is_of_rows and (is_mixed or self.analysis.counts_taken_by(op.name)):
                return False
        return True

    def _hands_list_on(self, op: tf.Operation, candidates: Set[tf.Operation]) -> bool:
        """Whether others take what can't be joined: a list, as a loop iterates over, or rows of an unknown layout."""
        analysis = self.analysis
        unclear = [one for one in op.outputs if analysis.holds_rows(one.name) and analysis.layout(one.name) is None]
        lists = [tensor for tensor in op.outputs if analysis.is_list(tensor.name)] + unclear
        return any(user not in candidates and user in self.depending for one in lists for user in one.consumers())

    def _takes_length(self, op: tf.Operation, candidates: Set[tf.Operation]) -> bool:
        """Whether an operation takes a number of examples for a length, and gets that of the whole batch."""
        verdict = self.analysis.verdict(op.name)
        is_size = verdict is not None and verdict.kind == "size"
        for index, tensor in enumerate(op.inputs):
            is_outside = tensor.op not in candidates and tensor.op not in self._lengths and tensor.name not in self.fed
            is_length = is_size or self.analysis.shapes_only(op.name, index)
            if is_outside and is_length and self.analysis.is_count(tensor.name):
                return True
        return False

    def _is_known(self, tensor: tf.Tensor, candidates: Set[tf.Operation]) -> bool:
        """Whether a tensor is inside, or is known before: one that the whole batch and each micro-batch share.

        If a number depends on variables by the shape of what is inside alone, that is computed up to there once more.
        """
        op = tensor.op
        if tensor.name in self.fed or op in candidates:
            return True
        if op in self._lengths or op in self._joined_ops:
            return False
        if op not in self.depending:
            return not self._is_chosen_inside(tensor)
        is_before = op not in (self.of_variables if self.analysis.is_size(tensor.name) else self._of_values)
        return is_before and not self.analysis.holds_rows(tensor.name)

    def _is_chosen_inside(self, tensor: tf.Tensor) -> bool:
        """Whether a conditional of TF 1 returns what no example changes, but chooses by what is computed of them."""
        if tensor.op.type not in _tf.op_walks.MERGES:
            return False
        inside = self.of_variables if self.analysis.is_size(tensor.name) else self._of_values
        before = _tf.op_walks.ancestors([tensor.op], with_control=True)
        return any(one in self.depending and one in inside for one in before)

    def is_taken(self, op: tf.Operation, index: int) -> bool:
        """Whether an operation takes an input as it is in the graph, computed from the whole batch."""
        tensor = op.inputs[index]
        if tensor.op in self._found_lengths:
            return True
        if tensor.name in self.fed or tensor.op not in self.depending:
            return False
        if tensor.op not in self.ops:
            return True
        if tensor.op in self._lengths and op in self.ops:
            return op not in self._lengths and not self.analysis.shapes_only(op.name, index)
        if not self.analysis.is_size(tensor.name) and tensor.op not in self._lengths:
            return False
        frame = _tf.graphs.outermost_frame(tensor.op)
        if frame is not None and frame == _tf.graphs.outermost_frame(op):
            return False
        if op not in self.ops:  # of a gradient, whose integers are shapes
            return bool(tensor.dtype.is_floating)
        verdict = self.analysis.verdict(op.name)
        return verdict is not None and verdict.kind == "rows" and not self.analysis.shapes_only(op.name, index)

    # ------------------------------------------------------------------------------------------------------------
    # What is inside

    def _find(self) -> List[Statistics]:
        """Find what is inside: up to where examples meet, or beyond batch normalisation. Returns its statistics."""
        self.ops = self._proven(set())
        statistics = statistics_in(self.graph, self.batch, self.before_losses)
        statistics = [one for one in statistics if self._of_values.intersection(one.ops)]  # others are known before
        layouts = {one.key: self.analysis.layout(one.key) for one in statistics}
        statistics = [one for one in statistics if (layouts[one.key] or Layout(0)).axis == 0]  # as segments need it
        barriers = {op for one in statistics for op in one.ops}
        for key, tensor in self.fed.items():  # which segments take by their first axis, and without a gradient
            is_computed = tensor.op in self.of_variables and tensor.dtype.base_dtype.is_floating
            if is_computed or self.analysis.rows(key) not in (None, Rows(0, 1)):
                barriers = set()
        beyond = self._proven(barriers) if barriers else set()
        used = beyond & self.before_losses
        if not used & barriers or any(_tf.graphs.outermost_frame(op) is not None for op in used):
            return []
        if sum(map(self._uses_variable, used)) < sum(map(self._uses_variable, self.ops & self.before_losses)):
            return []  # loops before batch normalisation are worth more than what is behind it
        found = [one for one in statistics if not used.isdisjoint(one.ops)]
        if not all(used.issuperset(one.ops) for one in found):
            return []  # the mean alone would be that of a micro-batch
        others = self.before_losses - used
        computed = used & self._of_values
        if any(one.op in computed and self.is_statistic(one) for op in others for one in op.inputs):
            return []  # joined rows have a gradient, statistics have none
        self.ops = used
        return found

    def is_statistic(self, tensor: tf.Tensor) -> bool:
        return self.analysis.layout(tensor.name) is None and not self.analysis.is_size(tensor.name)

    def using(self) -> Tuple[List[tf.Operation], List[tf.Operation]]:
        """Return the operations before the losses that use variables, and those of them that are inside.

        What losses need the shape of alone does not count.
        """
        before = [op for op in self.of_batch if op in self._of_value]
        using = [op for op in before if self._uses_variable(op)]
        return using, [op for op in using if op in self.ops]

    def share(self) -> float:
        """Return the share of the operations with variables that is computed in micro-batches."""
        using, inside = self.using()
        return len(inside) / max(len(using), 1)

    def _uses_variable(self, op: tf.Operation) -> bool:
        """Whether an operation combines examples with what is computed from variables alone."""
        sources = [one.op for one in op.inputs if one.op in self.of_variables]
        return any(source not in self.depending and source not in self._of_original for source in sources)


def lengths_found_in(graph: tf.Graph) -> Set[tf.Operation]:
    """Return the operations that give shapes of one example, which has been computed to find lengths."""
    found: Set[tf.Operation] = _tf.graphs.notes_of(graph).setdefault("accum_lengths", set())
    return found


def _before_but_for_shapes(ops: Sequence[tf.Operation], ends: Set[tf.Operation]) -> Set[tf.Operation]:
    """Return the operations whose values are needed for those of others, and not only their shapes."""
    takes_values = lambda op: op not in ends and op.type not in _tf.op_walks.OF_SHAPES
    return set(
        _tf.op_walks.ancestors(ops, sources=lambda op: [one.op for one in op.inputs] if takes_values(op) else [])
    )


def is_random(op: tf.Operation) -> bool:
    return _tf.random_ops.random_op_of(op) is not None


def variables_of(graph: tf.Graph) -> List[tf.Operation]:
    return [op for op in graph.get_operations() if op.type in VARIABLES]
