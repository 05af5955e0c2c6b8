"""On which axis of each tensor of a graph do the examples lie, and which operations keep them apart?"""

from typing import Dict, List, Optional, Sequence

from accum._rows._combinations import combination_of
from accum._rows._decisions import Decision, Decisions, Guess, has_rows, may_be_scalar, worst
from accum._rows._flat_graph import CONDITIONALS, FlatGraph
from accum._rows._rules import SHAPES
from accum._rows._shapes import ConstantBatchSize, Lengths, NotMade
from accum._rows._states import SIZE, Layout, Rows, Verdict, depends, level_of
from accum._tf import tf

GUESSES = [Guess(others, scalars) for others in (-194, 22, None) for scalars in (True, False)]
"""What is assumed, one after the other, until shapes can be inferred: small other lengths say most."""


def analyse(
    graph: tf.Graph,
    operations: Sequence[str],
    inputs: Dict[str, Rows],
    with_places: bool = False,
    drawn: Optional[Dict[str, str]] = None,
) -> "Analysis":
    """Find the axis of the examples in each tensor of a graph.

    Args:
      graph: a static graph, or that of a `tf.function`.
      operations: names of the operations to look at; those from which they are computed are added.
      inputs: {name of a tensor: its `Rows`}, the batch.
      with_places: whether lookups in tables of several parts may be split, in which each micro-batch counts its rows.
      drawn: {name of a tensor of random numbers: name of that in whose place they are}, whose shape tells which are
        those of an example.

    Raises:
      ConstantBatchSize: if the number of examples is a constant of the graph.
    """
    flat = FlatGraph(graph, operations, inputs, drawn or {})
    may_guess = any(may_be_scalar(graph, node) for unit in flat.units for node in unit)
    attempts = [(guess, Lengths()) for guess in GUESSES if guess.scalars or may_guess]
    while True:
        guess, lengths = attempts[0]
        try:
            return Analysis(Decisions(graph, flat, inputs, guess, with_places, lengths))
        except NotMade as failure:
            attempts = attempts if lengths.unite(failure.reason) else attempts[1:]
            if not attempts:
                raise ConstantBatchSize(failure.node.owner, failure.reason) from None
            flat = FlatGraph(graph, operations, inputs, drawn or {})  # rules leave empty attributes in its nodes


class Analysis:
    """What is known of the operations and tensors of a graph.

    Attributes:
      meets, reduces: names of operations in which examples meet, or over which they are reduced, in their order.
      scalars: names of placeholders of unknown rank that are assumed to be scalars.
      unruled: types of operations on examples without a rule.
    """

    def __init__(self, decided: Decisions) -> None:
        self._states, self._decided = decided.states, decided
        self._verdicts = _verdicts(decided)
        self.meets = [name for name, verdict in self._verdicts.items() if verdict.kind == "meets"]
        self.reduces = [name for name, verdict in self._verdicts.items() if verdict.kind == "reduces"]
        self.scalars = decided.scalars
        self.unruled = decided.unruled

    def verdict(self, op_name: str) -> Optional[Verdict]:
        """Return the `Verdict` of an operation; None for one that is independent of the batch."""
        return self._verdicts.get(op_name)

    def rows(self, tensor_name: str) -> Optional[Rows]:
        """Return the `Rows` of a tensor; None for one that has none, or of which no slice holds some examples."""
        return self._decided.rows_of(tensor_name)

    def layout(self, tensor_name: str) -> Optional[Layout]:
        """Return the `Layout` of a tensor; None if it has none, or if both its numbers may differ from run to run.

        If only one of them may, the other is 1, and the length of the axis tells it.
        """
        return self._decided.layout_of(tensor_name)

    def depends(self, tensor_name: str) -> bool:
        """Whether a tensor depends on the batch, if only on how many examples there are."""
        return depends(self._states.get(tensor_name))

    def combination(self, tensor_name: str) -> Optional[str]:
        """Return how parts of a batch give a scalar: "sum", "mean" weighted by their examples, or "constant"; or None.

        None stands for any other combination, and for one that isn't proven.
        """
        return combination_of(tensor_name, self._decided)

    def is_size(self, tensor_name: str) -> bool:
        """Whether a tensor depends on how many examples there are, and on nothing else of them."""
        return self._states.get(tensor_name) == SIZE

    def is_count(self, tensor_name: str) -> bool:
        """Whether a size differs for other numbers of examples, unlike how many steps there are in each of them."""
        return self._decided.is_count(tensor_name)

    def is_mixed(self, tensor_name: str) -> bool:
        """Whether a number depends on how many examples there are, and on what they are reduced to."""
        state = self._states.get(tensor_name)
        return state is not None and state.counts

    def is_list(self, tensor_name: str) -> bool:
        """Whether a tensor stands for a list of what is computed from the batch, such as a `tf.TensorArray`."""
        state = self._states.get(tensor_name)
        return state is not None and state.kind == "list"

    @property
    def counting(self) -> List[str]:
        """Names of operations on rows that take a number of examples as such, rather than as the length of an axis."""
        of_rows = [name for name, one in self._verdicts.items() if one.kind == "rows" or any(one.outputs)]
        return [name for name in of_rows if name not in self._decided.flat.drawn and self.counts_taken_by(name)]

    def counts_taken_by(self, op_name: str) -> List[tf.Tensor]:
        """Return the numbers of examples that an operation takes otherwise than as the length of an axis."""
        inputs = enumerate(self._decided.graph.get_operation_by_name(op_name).inputs)
        return [one for index, one in inputs if self.is_count(one.name) and not self.shapes_only(op_name, index)]

    def is_as_long_as_the_batch(self, tensor_name: str) -> bool:
        """Whether the first axis of a tensor, and no other, is as long as there are examples."""
        return self._decided.is_as_long_as_the_batch(tensor_name)

    def holds_rows(self, tensor_name: str) -> bool:
        """Whether a tensor, or a list that it stands for, holds examples apart, also where no slice of it does."""
        return has_rows(self._states.get(tensor_name))

    def has_met(self, tensor_name: str) -> bool:
        """Whether examples have met in a tensor other than by a reduction."""
        state = self._states.get(tensor_name)
        while state is not None and state.kind == "list":
            state = state.element
        return state is not None and state.kind == "joined"

    def level(self, tensor_name: str) -> int:
        """Return behind how many reductions or meetings a tensor is."""
        return level_of(self._states.get(tensor_name))

    def shapes_only(self, op_name: str, index: int) -> bool:
        """Whether an input of an operation only says how long axes of its output are.

        That holds for any size that a function, conditional or loop takes, but for the predicate of a conditional: one
        in which a size is a number has the verdict "meets".
        """
        kind = self._decided.flat.kinds.get(op_name, "")
        if op_name in self._decided.flat.written_out:
            return not (index == 0 and kind in CONDITIONALS)
        return index in SHAPES.get(kind, ())


def _verdicts(decided: Decisions) -> Dict[str, Verdict]:
    """Return the verdicts of the user's operations, of which a call has those of all nodes in its function."""
    found: Dict[str, List[Decision]] = {}
    for name, decision in decided.decisions.items():
        if decision.kind != "independent":
            found.setdefault(decided.nodes[name].owner, []).append(decision)
    verdicts = {}
    for owner, decisions in found.items():
        kind = worst([decision.kind for decision in decisions])
        hows = list(dict.fromkeys(one.how for one in decisions if one.how and one.kind == kind))
        outputs = [decided.rows_of(key) for key in decided.nodes[owner].outputs]
        verdicts[owner] = Verdict(kind, outputs, ", ".join(hows))
    return {name: verdicts[name] for name in decided.flat.users if name in verdicts}
