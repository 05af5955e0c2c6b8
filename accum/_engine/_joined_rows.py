"""Compute operations in which examples meet with the whole batch, in the graph of a traced function (law L19).

    rows of the examples -> joined -> operations in which they meet -> rows again, or what replaces them -> …

`accum._rows` says where examples meet. What is computed from there on is computed with the whole batch, up to tensors
whose first axis, and no other, is as long as the batch: these are cut into micro-batches again.
"""

from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Set

from accum import _rows, _tf
from accum._engine._meetings import checks_of_batch, has_examples, spread_means
from accum._engine._part import Part
from accum._engine._trace import Marks
from accum._tf import tf


class Joined(NamedTuple):
    """A part of a graph that is computed with the whole batch.

    Attributes:
      inputs: what it takes of the examples.
      results: what it returns, an entry for each example.
      assigned: what it returns for assignments, which then are those of the batch.
      checks: assertions that belong to it.
    """

    inputs: List[tf.Tensor]
    results: List[tf.Tensor]
    assigned: List[tf.Tensor]
    checks: List[tf.Operation]


def join_rows(
    marks: Marks, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor], are_means: bool
) -> List[tf.Tensor]:
    """Mark what is computed with the whole batch. Returns the outputs, which may be among what is replaced.

    Args:
      marks: `Marks`, of the graph that is being traced.
      inputs: the tensors of a micro-batch.
      outputs: the outputs of the function.
      are_means: whether these are those of `spread_means`.
    """
    graph = _Graph(marks, inputs, list(outputs), are_means)
    joined = graph.joined()
    while joined is not None:
        parts = _marked(marks, graph, joined)
        replaced = graph.replace(dict(zip([tensor.name for tensor in joined.results], parts)))
        graph = _Graph(marks, inputs, replaced, are_means)
        joined = graph.joined()
    return graph.outputs


def _marked(marks: Marks, graph: "_Graph", joined: Joined) -> List[tf.Tensor]:
    """Compute a part of the graph with the whole batch. Returns what a micro-batch has of its results."""
    results = joined.results or joined.inputs[:1]  # a mark has some
    checked = [tensor for check in joined.checks for tensor in check.inputs if graph.depends(tensor)]
    part = Part(results + joined.assigned + checked, joined.inputs)
    names = [tensor.name for tensor in joined.inputs]

    def computed(*tensors: tf.Tensor) -> List[tf.Tensor]:
        values = part.compute(dict(zip(names, tensors)))
        graph.replace({tensor.name: values[tensor.name] for tensor in joined.assigned})
        _tf.graphs.replace_inputs(joined.checks, {tensor.name: values[tensor.name] for tensor in checked})
        returned = [values[tensor.name] for tensor in results]
        return returned if joined.results else list(map(tf.stop_gradient, returned))

    # What is cut from the whole batch has to be a result of the micro-batch to be joined again.
    given = {tensor.name for *_, parts in marks.wholes for tensor in parts}
    return marks.at_whole(computed, [tf.identity(one) if one.name in given else one for one in joined.inputs])


class _Graph:
    """The graph of a trace, and where examples meet in it."""

    def __init__(self, marks: Marks, inputs: Sequence[tf.Tensor], outputs: List[tf.Tensor], are_means: bool) -> None:
        self._marks = marks
        self.outputs = outputs
        taken = [tensor for tensors, *_ in marks.wholes for tensor in tensors]
        moments = [part for _, _, _, moments, _, _ in marks.statistics for part in moments]
        ops = marks.graph.get_operations()
        assigned = [op.inputs[1] for op in ops if _tf.op_walks.is_assignment(op.type) and len(op.inputs) == 2]
        wanted = outputs + taken + list(marks.rows) + moments + assigned
        self._assigned = {tensor.name for tensor in assigned}
        self._wanted = {tensor.name for tensor in wanted}
        self._own = set(marks.own) | {tensor.op.name for tensor in moments}
        rows = [*inputs, *[part for *_, parts in marks.wholes for part in parts]]
        given = {one.name: _rows.Rows(0, 1) for one in rows if has_examples(one)}
        drawn = marks.draws.names()
        self._checks = checks_of_batch(marks.graph, [tensor.op.name for tensor in wanted], given, drawn)
        wanted += [tensor for op in self._checks for tensor in op.inputs]
        self._found = _rows.analyse(marks.graph, [tensor.op.name for tensor in wanted], given, drawn=drawn)
        for op in spread_means(self._found, outputs).values() if are_means else ():
            self._own |= {tensor.op.name for tensor in op.inputs}
        mixed = [name for name in self._found.meets if name in {_tf.graph_parts.name_of(key) for key in drawn}]
        if mixed:
            raise ValueError(f"numbers are drawn that are not one row for each example. Received: {mixed}.")
        self._ops = [*_tf.op_walks.ancestors([tensor.op for tensor in wanted]), *self._checks]
        self._users: Dict[str, List[tf.Operation]] = {}
        for op in self._ops:
            for tensor in op.inputs:
                self._users.setdefault(tensor.name, []).append(op)

    def joined(self) -> Optional[Joined]:
        """Return what has to be computed with the whole batch next, or None if nothing has."""
        first = self._first()
        if first is None:
            return None
        behind = self._reached(
            [first], lambda op: [user for one in op.outputs for user in self._users.get(one.name, [])]
        )
        whole = self._reached([first], self._users_of_joined)
        results = [one for op in whole for one in op.outputs if self._is_rows(one) and self._is_used(one)]
        joined = [one for op in whole for one in op.outputs if not self._is_rows(one)]
        assigned = [one for one in joined if one.name in self._assigned]
        checks = [op for op in self._checks if op in whole]
        inputs: Dict[str, tf.Tensor] = {}

        def sources(op: tf.Operation) -> List[tf.Operation]:
            needed = [one for one in op.inputs if self._found.depends(one.name)]
            rows = [one for one in needed if self._is_rows(one) and one.op not in behind]
            inputs.update((one.name, one) for one in rows)
            return [one.op for one in needed if one.name not in inputs]

        self._reached([one.op for one in results + assigned] + checks, sources)
        if any(one.dtype == tf.variant for one in [*inputs.values(), *results]):
            raise ValueError(f"a list of tensors has no rows. Received: {first.name!r}.")
        return Joined(list(inputs.values()), results, assigned, checks)

    def _first(self) -> Optional[tf.Operation]:
        """Return the first operation in which examples meet, or which takes their number or draws for all of them."""
        found = self._found
        names = {*found.meets, *found.reduces, *found.counting, *self._marks.draws.whole} - self._own
        return next((op for op in self._ops if op.name in names), None) or next(iter(self._checks), None)

    def _users_of_joined(self, op: tf.Operation) -> List[tf.Operation]:
        """Return what takes results of an operation that are no rows, and so is computed with the whole batch too."""
        joined = [one for one in op.outputs if not self._is_rows(one)]
        if any(one.name in self._wanted and one.name not in self._assigned for one in joined):
            raise ValueError(f"an output, or a statistic, has no rows of the examples. Received: {op.name!r}.")
        return [user for one in joined for user in self._users.get(one.name, [])]

    def depends(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor depends on the examples."""
        return self._found.depends(tensor.name)

    @staticmethod
    def _reached(
        starts: Sequence[tf.Operation], following: Callable[[tf.Operation], List[tf.Operation]]
    ) -> Set[tf.Operation]:
        reached: Set[tf.Operation] = set()
        stack = list(starts)
        while stack:
            op = stack.pop()
            if op not in reached:
                reached.add(op)
                stack += following(op)
        return reached

    def _is_rows(self, tensor: tf.Tensor) -> bool:
        return self._found.is_as_long_as_the_batch(tensor.name)

    def _is_used(self, tensor: tf.Tensor) -> bool:
        return tensor.name in self._users or tensor.name in self._wanted

    def replace(self, replaced: Dict[str, tf.Tensor]) -> List[tf.Tensor]:
        """Let the rest of the graph take other tensors. Returns the outputs, which may be among them."""
        marks = self._marks
        _tf.graphs.replace_inputs(marks.graph.get_operations() if replaced else (), replaced)

        def now(tensor: tf.Tensor) -> tf.Tensor:
            return replaced.get(tensor.name, tensor)

        marks.losses = [(now(loss), is_sum) for loss, is_sum in marks.losses]
        marks.numbers = [(now(number), is_sum) for number, is_sum in marks.numbers]
        marks.rows = list(map(now, marks.rows))
        marks.statistics = [(one, begin, now(values), *others) for one, begin, values, *others in marks.statistics]
        # What is cut from the whole batch has to be a result of the micro-batch to be joined again.
        joined_again = lambda tensor: tf.identity(now(tensor)) if tensor.name in replaced else tensor
        marks.wholes = [(list(map(joined_again, tensors)), *others) for tensors, *others in marks.wholes]
        return list(map(now, self.outputs))
