"""Shapes, and numbers of them, that follow from what is decided of earlier nodes and that TensorFlow does not infer."""

from typing import Any, Container, Dict, List, Optional

import numpy as np

from accum._rows._flat_graph import Key, Node, node_of
from accum._rows._images import RESIZES
from accum._rows._numbers import Numbers
from accum._rows._rules import Meets, multiples_of
from accum._rows._shapes import COUNTS, Shapes
from accum._rows._states import Dims, Pair
from accum._rows._values import SIZES, Values, constant_of, value_of
from accum._tf import tf

OF_SHAPE = ("Rank", "Shape", "ShapeN", "Size")
"""Operations that take nothing of a tensor but its shape."""


class KnownShapes:
    """What is known of shapes beside what `Shapes` infers.

    Args:
      graph: the user's graph.
      nodes: {name: `Node`}.
      inputs: keys of the tensors of the batch.
      shapes: the `Shapes` of all nodes before the one that is asked for.
      values: {key of a tensor: its `Values`, or None}, of the same.
      numbers: the `Numbers` of the same.
      unsure: keys of tensors that may only seem to be as long as the batch.
    """

    def __init__(
        self,
        graph: tf.Graph,
        nodes: Dict[str, Node],
        inputs: Container[Key],
        shapes: Shapes,
        values: Dict[Key, Optional[Values]],
        numbers: Numbers,
        unsure: Container[Key],
    ) -> None:
        self._graph, self._nodes, self._inputs = graph, nodes, inputs
        self._shapes, self._values, self._numbers, self._unsure = shapes, values, numbers, unsure
        self._dims_of = {
            "Range": self._dims_of_range,
            "Slice": self._dims_of_slice,
            "RaggedTensorToTensor": self._dims_of_ragged,
            **dict.fromkeys(RESIZES, self._dims_of_resized),
        }

    def may_tell(self, node: Node, is_independent: bool) -> bool:
        """Whether the shape of what a node returns may be known here.

        Args:
          node: the node.
          is_independent: whether it takes nothing that depends on the batch.
        """
        if node.type in RESIZES:
            return not (node.name == node.owner and self._is_sized(node))
        sizes = self._nodes.get(node_of(node.inputs[2])) if node.type == "Slice" else None
        is_slice = sizes is not None and sizes.type == "Pack"
        return (is_slice or node.type in ("RaggedTensorToTensor", "Range")) and not is_independent

    def dims_of(self, node: Node) -> Optional[Pair]:
        """Return the `Pair` of what a node returns for which `may_tell` is true; None if it is not known."""
        return self._dims_of[node.type](node)

    def values_of(self, node: Node) -> List[Optional[Values]]:
        """Return the values of the outputs of a node; None for unknown ones."""
        if node.type == "StridedSlice":
            source = self._nodes.get(node_of(node.inputs[0]))
            if source is not None and source.type == "StringSplitV2":
                return [self._number_of_texts(node, source)]
        if node.type not in OF_SHAPE:
            return value_of(node, [self._values.get(key) for key in node.inputs])
        if any(map(self._unsure.__contains__, node.inputs)):
            return [None] * len(node.dtypes)
        return value_of(node, [self._lengths(node, key) for key in node.inputs])

    def _is_sized(self, node: Node) -> bool:
        dims = self._graph.get_operation_by_name(node.name).outputs[0].shape
        return dims.rank is not None and None not in dims.as_list()[1:]

    def _dims_of_resized(self, node: Node) -> Optional[Pair]:
        """Images of a computed size, which TensorFlow 1 does not infer."""
        images = self._shapes.dims(node.inputs[0])
        sizes = [self._computed_before(node.inputs[1], index) for index in range(len(images))]
        if any(dims is None or size is None for dims, size in zip(images, sizes)):
            return None
        return tuple([dims[0], *map(int, size), dims[3]] for dims, size in zip(images, sizes))  # type: ignore[index,arg-type]

    def _dims_of_range(self, node: Node) -> Optional[Pair]:
        """How many numbers there are; for other lengths of axes, which may be among them, that is not known."""
        (values,) = self.values_of(node)
        return None if values is None else ([len(values[0])], [len(values[1])], [None])

    def _dims_of_slice(self, node: Node) -> Optional[Pair]:
        """The lengths that are known, if only some are: TensorFlow infers few of them where one size is -1."""
        if self._values.get(node.inputs[2]) is not None:
            return None
        pair: List[Dims] = []
        for index, dims in enumerate(self._shapes.dims(node.inputs[0])):
            lengths: List[Optional[int]] = []
            for axis, length in enumerate(dims or ()):
                begins, sizes = (self._numbers.value(key, axis) for key in node.inputs[1:])
                size = None if sizes is None else int(sizes[index % len(COUNTS)])
                if size == -1:
                    size = None if begins is None or length is None else length - int(begins[index % len(COUNTS)])
                lengths.append(size)
            pair.append(lengths or None)
        return tuple(pair)

    def _dims_of_ragged(self, node: Node) -> Optional[Pair]:
        """As many rows as an operand says, if the shape leaves that open, and the user's lengths of the other axes."""
        shape, rows = self._values.get(node.inputs[0]), self._values.get(node.inputs[3])
        is_number = node.proto.attr["row_partition_types"].list.s[:1] == [b"FIRST_DIM_SIZE"]
        if not is_number or node.name != node.owner or rows is None or shape is None:
            return None
        if shape[0].ndim != 1 or any(value[0] != -1 for value in shape):
            return None
        others = self._graph.get_operation_by_name(node.owner).outputs[0].shape.as_list()[1:]
        return tuple([int(rows[index % len(COUNTS)]), *others] for index in range(3))  # type: ignore[return-value]

    def _computed_before(self, key: Key, index: int) -> Optional[Any]:
        """Return the value of a small tensor that is computed from shapes, in one of the scratch graphs."""
        node = self._nodes.get(node_of(key))
        if node is None or key in self._inputs:
            return None
        if node.type == "Const":
            value = constant_of(node)
            return None if value is None else value[0]
        if node.type == "Shape":
            dims = self._shapes.dims(node.inputs[0])[index]
            return None if dims is None or None in dims else np.array(dims)
        inputs = [self._computed_before(one, index) for one in node.inputs]
        if not inputs or any(one is None for one in inputs):
            return None
        values = value_of(node, [[one] * len(SIZES) for one in inputs])[int(key.rsplit(":", 1)[1])]
        return None if values is None else values[0]

    def _number_of_texts(self, node: Node, split: Node) -> Optional[Values]:
        """Return how many texts are split into words, if that is what is taken of the shape of the words."""
        begins = self._values.get(node.inputs[1])
        is_scalar = node.proto.attr["shrink_axis_mask"].i == 1 and not node.proto.attr["new_axis_mask"].i
        if node.inputs[0] != split.outputs[2] or begins is None or begins[0].tolist() != [0] or not is_scalar:
            return None
        is_same = self._shapes.is_the_same_for_other_lengths(split.inputs[0], 0)
        lengths = self._lengths(split, split.inputs[0]) if is_same else None
        return None if lengths is None else [length[0] for length in lengths]

    def _lengths(self, node: Node, key: Key) -> Optional[Values]:
        """Return the shape of a tensor for each of `SIZES`, or what else of it is asked."""
        pair = self._shapes.dims(key)
        if pair[0] is None or (node.type != "Rank" and None in pair[0]):
            return None
        if node.type == "Rank":
            return [np.array(len(pair[0]))] * len(SIZES)
        try:
            factors = multiples_of(pair)
        except Meets:
            return None
        shapes = [
            np.array(
                [factors[axis] * size if axis in factors else length for axis, length in enumerate(pair[0])], np.int64
            )
            for size in SIZES
        ]
        shapes = shapes if factors else [shapes[0]] * len(SIZES)
        return [shape.prod() for shape in shapes] if node.type == "Size" else shapes
