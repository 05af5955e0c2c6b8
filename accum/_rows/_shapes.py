"""The shapes of tensors for two numbers of examples, by TensorFlow's own shape inference.

Nodes are made anew in scratch graphs, where the batch is made of placeholders with one number of examples and another.
An axis whose length is a multiple of both depends on the number of examples. If other axes of the batch are of unknown
length, a third graph has other lengths of these.
"""

import re
from typing import Any, Container, Dict, List, Optional, Sequence

from accum import _tf
from accum._rows._flat_graph import WITHIN, Key, Node
from accum._rows._states import Dims, Pair
from accum._rows._values import SIZES
from accum._tf import tf

COUNTS = SIZES[:2]
"""The two numbers of examples."""

PRIMES = (211, 223, 227, 229, 233, 239, 241, 251, 257, 263, 269, 271, 277, 281, 283, 293, 307, 311, 313, 317, 331, 337)
"""The lengths of the other axes of the batch that are unknown: numbers that no program has."""

ALIASES = {
    "Enter",
    "Exit",
    "IdentityN",
    "LoopCond",
    "NextIteration",
    "RefEnter",
    "RefExit",
    "RefNextIteration",
    "RefSwitch",
    "Switch",
}
"""Operations that hand tensors on; they are left out of the scratch graphs."""


class ConstantBatchSize(ValueError):
    """The number of examples is a constant of the graph.

    Attributes:
      operation: the name of the operation whose shape can't be that for another number of examples.
    """

    def __init__(self, operation: str, reason: str) -> None:
        super().__init__(
            f"The graph must take any number of examples, but the operation {operation!r} only takes a constant one: "
            f"use `tf.shape(x)[0]`, or -1, in place of a number. Received: {reason}"
        )
        self.operation = operation


class NotMade(Exception):
    """A node can't be made in a scratch graph."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


class Lengths:
    """The lengths of the other axes of the batch that are unknown: each has one of its own, unless operations need it.

    Those of texts and of their masks are the same, where the ones are multiplied by the others, or where both are cut
    to the longest text. Those of questions and of answers may differ.
    """

    def __init__(self) -> None:
        self._primes: Dict[Any, int] = {}
        self._same: Dict[int, int] = {}

    def of(self, tensor: tf.Tensor, axis: int) -> int:
        """Return the length of an axis of a tensor."""
        prime = self._primes.setdefault(_length_of(tensor, axis), PRIMES[len(self._primes) % len(PRIMES)])
        return self._same.get(prime, prime)

    def unite(self, reason: str) -> bool:
        """Let lengths be the same which an operation could not take together; return whether there are any.

        Args:
          reason: what TensorFlow says, with the shapes that the operation gets. Those with an unknown length say
            nothing: into `[-1, length]`, other lengths may be reshaped too.
        """
        numbers = {int(number) for shape in re.findall(r"\[([\d,]+)\]", reason) for number in shape.split(",")} - {0}
        lengths = sorted({self._same.get(prime, prime) for prime in self._primes.values()})
        together = [length for length in lengths if any(number % length == 0 for number in numbers)]
        for prime in self._primes.values():
            if self._same.get(prime, prime) in together:
                self._same[prime] = together[0]
        return len(together) > 1


def _length_of(tensor: tf.Tensor, axis: int) -> Any:
    """Return what tells one length of an axis from another: the number to which it is cut, or where it is."""
    source = tensor
    while source.op.type in ("Identity", "PlaceholderWithDefault"):
        source = source.op.inputs[0]
    sizes = source.op.inputs[2].op if source.op.type == "Slice" else None
    number = sizes.inputs[axis] if sizes is not None and sizes.type == "Pack" else None
    return (tensor.name, axis) if number is None or number.op.type == "Const" else number.name


class Shapes:
    """The shapes of the tensors of nodes.

    Args:
      graph: the user's graph.
      inputs: keys of the tensors of the batch, whose shapes are given.
      count: how many scratch graphs there are.
      static: whether the user's own shapes of tensors hold for every number of examples.
    """

    def __init__(self, graph: tf.Graph, inputs: Container[Key], count: int, static: bool) -> None:
        self._graph, self._inputs, self._static = graph, inputs, static
        self._scratch = [tf.Graph() for _ in range(count)]
        self._tensors: Dict[Key, List[Any]] = {}
        self._aliases: Dict[Key, Key] = {}
        self._dims: Dict[Key, Pair] = {}
        self._given: Dict[Key, Pair] = {}

    def give(self, key: Key, dims: Pair, dtype: int) -> None:
        """Say which shape a tensor has, in place of inferring it."""
        self._given[key] = dims
        self._tensors[key] = []
        for scratch, lengths in zip(self._scratch, dims):
            attributes = {
                "dtype": tf.compat.v1.AttrValue(type=dtype % 100),
                "shape": tf.compat.v1.AttrValue(shape=tf.TensorShape(lengths).as_proto()),
            }
            self._tensors[key] += _tf.graph_parts.made(scratch, "Placeholder", [], "given", attributes)
        self._aliases.pop(key, None)
        self._dims[key] = dims

    def add(self, nodes: Sequence[Node], is_independent: Dict[str, bool]) -> None:
        """Infer the shapes of the outputs of nodes, of which each comes after its inputs."""
        for node in nodes:
            if node.type in ALIASES:
                self._alias(node)
            elif not (is_independent[node.name] and self._take_users_shapes(node)):
                self._add(node, is_independent[node.name])
        for node in nodes:
            for key in node.outputs:
                source = self._resolve(key)
                if key not in self._given and source in self._tensors:
                    self._dims[key] = tuple(_dims(tensor) for tensor in self._tensors[source])

    def dims(self, key: Key) -> Pair:
        """Return the `Pair` of a tensor."""
        return self._dims.get(self._resolve(key), (None, None, None))

    def is_the_same_for_other_lengths(self, key: Key, axis: int) -> bool:
        """Whether an axis has the same length if axes of the batch that are of unknown length have another."""
        pair = self.dims(key)
        return len(self._scratch) == 2 or (
            pair[0] is not None and pair[2] is not None and pair[0][axis] == pair[2][axis]
        )

    def _alias(self, node: Node) -> None:
        for index, key in enumerate(node.outputs):
            self.hand_on(node.inputs[index if node.type == "IdentityN" else 0], key)

    def hand_on(self, source: Key, key: Key) -> None:
        """Say that a tensor is another one."""
        self._aliases[key] = source

    def _resolve(self, key: Key) -> Key:
        while key in self._aliases:
            key = self._aliases[key]
        return key

    def _users_shapes(self, node: Node) -> Optional[List[Dims]]:
        """Return the shapes that the outputs have in the user's graph."""
        if WITHIN in node.name or node.name != node.owner:
            return None
        outputs = self._graph.get_operation_by_name(node.name).outputs
        return [_dims(tensor) for tensor in outputs]

    def _take_users_shapes(self, node: Node) -> bool:
        """Put placeholders in the place of a node on which nothing but shapes depends, if its shapes are known."""
        shapes = self._users_shapes(node)
        if shapes is None or node.type in ("Const", "VarHandleOp") or any(dtype > 100 for dtype in node.dtypes):
            return False
        dtypes = [tf.as_dtype(dtype % 100) for dtype in node.dtypes]
        calls = _tf.graph_parts.functions_of(node.proto)
        if node.type == "Placeholder" and node.dtypes[0] == tf.resource.as_datatype_enum:
            return self._take_variable(node)
        are_known = all(dims is not None and None not in dims for dims in shapes)
        are_values = any(dtype.is_integer or dtype.is_bool for dtype in dtypes)
        is_opaque = bool(calls) or any(dtype in (tf.variant, tf.resource) for dtype in dtypes)
        if (are_known and not are_values and not is_opaque) or calls:
            for key, dims, dtype in zip(node.outputs, shapes, node.dtypes):
                if key not in self._inputs:
                    self.give(key, (dims, dims, dims), dtype)
            return True
        return False

    def _take_variable(self, node: Node) -> bool:
        """Put a variable in the place of the handle of one that a function has captured."""
        spec = _tf.graph_parts.spec_of_variable(self._graph.get_tensor_by_name(node.outputs[0]))
        if spec is None:
            return False
        handles = []
        for scratch in self._scratch:
            with scratch.as_default():
                handles.append(tf.raw_ops.VarHandleOp(dtype=spec.dtype, shape=spec.shape, shared_name=node.name))
        self._tensors[node.outputs[0]] = handles
        return True

    def _add(self, node: Node, is_independent: bool) -> None:
        shapes = self._users_shapes(node) if is_independent or self._static else None
        keys = [self._resolve(key) for key in node.inputs]
        made = [
            self._made(node, scratch, [self._tensors[key][index] for key in keys], shapes)
            for index, scratch in enumerate(self._scratch)
        ]
        for index, key in enumerate(node.outputs):
            if key not in self._inputs:
                self._tensors[key] = [tensors[index] for tensors in made]

    @staticmethod
    def _made(node: Node, scratch: tf.Graph, inputs: List[tf.Tensor], shapes: Optional[List[Dims]]) -> List[tf.Tensor]:
        attributes = {
            name: value for name, value in node.proto.attr.items() if name not in ("_class", "_output_shapes")
        }
        if node.type == "Merge":  # maybe one of ours
            attributes["T"] = tf.compat.v1.AttrValue(type=node.dtypes[0])
            attributes["N"] = tf.compat.v1.AttrValue(i=len(inputs))
        try:
            tensors = _tf.graph_parts.made(scratch, node.type, inputs, node.name, attributes)
            for tensor, dims in zip(tensors, shapes or ()):
                tensor.set_shape(dims)
        except (ValueError, tf.errors.OpError) as error:
            raise NotMade(node, str(error)) from None
        return tensors


def _dims(tensor: Any) -> Dims:
    return None if tensor.shape.rank is None else tensor.shape.as_list()
