"""What operations change, and which others read it in the same run."""

from typing import Container, Dict, Sequence, Set

from accum._rows._flat_graph import MERGES, WITHIN, FlatGraph, Key, Node, node_of
from accum._rows._lists import LIST_RULES, POPS, PUSHES, STACK_KINDS
from accum._rows._rules import RULES
from accum._rows._shapes import ALIASES
from accum._tf import tf

CHANGES = ("Assign", "Scatter", "ResourceScatter", "ResourceApply", "Apply", "SparseApply")
"""Operations that change variables; a reader that waits for one reads what the batch has made of it."""

EFFECTS = CHANGES + ("Assert", "Print")
OTHER_EFFECTS = ("Queue", "Summary", "PyFunc", "Save", "WriteFile", "Enqueue", "Dequeue", "CountUpTo")
READS = ("ReadVariableOp", "VariableShape", "VarIsInitializedOp")


def has_effect(node: Node) -> bool:
    """Whether an operation does something beside returning tensors."""
    return node.type not in RULES and (
        node.type.startswith(EFFECTS) or any(name in node.type for name in OTHER_EFFECTS)
    )


class Effects:
    """Follows which nodes wait for a change that is made by the batch.

    Args:
      flat: the graph.
      nodes: {name: `Node`}.
      inputs: keys of the tensors of the batch.
    """

    def __init__(self, flat: FlatGraph, nodes: Dict[str, Node], inputs: Container[Key]) -> None:
        self._flat, self._nodes, self._inputs = flat, nodes, inputs
        self._after: Set[str] = set()

    def follow(self, node: Node, sources: Sequence[str]) -> None:
        """Note that a node waits for those of the names `sources`."""
        if any(source in self._after for source in sources):
            self._after.add(node.name)

    def note(self, node: Node) -> None:
        """Note that an operation runs with what is made of the batch."""
        if node.type.startswith(CHANGES) or self._may_change_state(node):
            parts = node.name.split(WITHIN)
            self._after.update(WITHIN.join(parts[:count]) for count in range(1, len(parts) + 1))

    def reads_changed(self, node: Node) -> bool:
        """Whether an operation takes a variable or a table, and waits for such a change."""
        return node.name in self._after and self._reads_state(node)

    def _may_change_state(self, node: Node) -> bool:
        """Whether an operation without a rule has a state that it may change."""
        is_known = node.type in RULES or node.type in LIST_RULES or node.type in STACK_KINDS + PUSHES + POPS + READS
        is_own = node.type in ALIASES or node.type in MERGES or node.type.startswith(("Assert", "Print", "EagerPyFunc"))
        return not is_known and not is_own and bool(self._flat.definition(node.type).is_stateful)

    def _reads_state(self, node: Node) -> bool:
        for key in node.inputs:
            source = self._nodes.get(node_of(key))
            if source is not None and key not in self._inputs:
                dtype = source.dtypes[int(key.rsplit(":", 1)[1])]
                if dtype > 100 or dtype == tf.resource.as_datatype_enum:
                    return node.type != "VariableShape"
        return False
