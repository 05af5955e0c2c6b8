"""Single numbers of a shape in which others are computed from the batch, such as `n` in `[n, longest]`."""

from typing import Callable, Dict, List, Optional

from accum._rows._flat_graph import Key, Node, node_of
from accum._rows._values import SIZES, Values

HANDS_ON = ("Cast", "Identity", "StopGradient")


class Numbers:
    """What is known of single numbers in vectors.

    Args:
      nodes: {name: `Node`}.
      values: {key of a tensor: its `Values`, or None}.
      is_count: function of a key that says whether a number may depend on how many examples there are.
    """

    def __init__(
        self, nodes: Dict[str, Node], values: Dict[Key, Optional[Values]], is_count: Callable[[Key], bool]
    ) -> None:
        self._nodes, self._values, self._is_count = nodes, values, is_count

    def value(self, key: Key, place: int) -> Optional[Values]:
        """Return a number of a vector for each of `SIZES`; None if it is unknown."""
        values = self._values.get(key)
        if values is not None:
            return [value[place] for value in values]
        source = self._source(key, place)
        return None if source is None else self._values.get(source)

    def is_length(self, key: Key, place: int, factor: int) -> bool:
        """Whether a number of a vector is -1, or `factor` times the number of examples.

        A product of this number and one that is computed from the batch, as in `[n * longest, width]`, is taken for it:
        its factor is that of the scratch graphs.
        """
        values = self.value(key, place)
        if values is not None:
            return all(value in (-1, factor * size) for value, size in zip(values, SIZES))
        source = self._source(key, place)
        return source is not None and self._is_product(source)

    def places(self, key: Key) -> Optional[List[int]]:
        """Return which numbers of a vector may depend on how many examples there are; None if that is not known."""
        node = self._made_by(key)
        if node is None or node.type != "Pack":
            return None
        return [place for place, number in enumerate(node.inputs) if self._is_count(number)]

    def is_multiple(self, key: Key) -> bool:
        """Whether a scalar is a constant times the number of examples."""
        values = self._values.get(key)
        if values is None or values[0].ndim or not values[0]:
            return False
        return all(value * SIZES[0] == values[0] * size for value, size in zip(values, SIZES))

    def _source(self, key: Key, place: int) -> Optional[Key]:
        """Return the key of a number of a vector."""
        node = self._made_by(key)
        is_vector = node is not None and node.type == "Pack" and place < len(node.inputs)
        return node.inputs[place] if node is not None and is_vector else None

    def _is_product(self, key: Key) -> bool:
        node = self._made_by(key)
        if node is None or node.type != "Mul":
            return False
        return any(
            (self.is_multiple(one) or self._is_product(one)) and not self._is_count(other)
            for one, other in (node.inputs, node.inputs[::-1])
        )

    def _made_by(self, key: Key) -> Optional[Node]:
        """Return the node that has computed a tensor, before it was handed on."""
        node = self._nodes.get(node_of(key))
        while node is not None and node.type in HANDS_ON:
            node = self._nodes.get(node_of(node.inputs[0]))
        return node
