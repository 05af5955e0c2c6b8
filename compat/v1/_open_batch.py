"""A batch whose number of examples is a constant of the graph, as tensors that may hold any number of examples.

Programs of TensorFlow 1 often feed or read batches of a constant size B. Then the shapes of what is computed from them,
and numbers such as those in `tf.reshape(x, [B, -1])`, hold for B alone. A copy of the graph is made of what this gives:
open tensors in place of the batch, and of constants that hold rows, and B times a number computed in each run.
"""

from typing import Any, Dict, Iterable, List, Optional, Sequence, Set

from accum import _tf
from accum._engine._part import Key
from accum._tf import tf

SHAPES = {
    "BroadcastTo": 1,
    "Conv2DBackpropInput": 0,
    "Conv3DBackpropInputV2": 0,
    "Reshape": 1,
    "ScatterNd": 2,
    "Slice": 2,
}
"""{type of an operation: which of its inputs is the shape of its output}"""


class NotCopied(Exception):
    """A part of the graph can't be copied with another number of examples, or with chosen branches."""


INDICES = ("TensorArrayGatherV3", "TensorArrayScatterV3")
"""Types of operations whose second input says which elements of a list they take or make."""


def constant_count(batch: Sequence[tf.Tensor]) -> Optional[int]:
    """Return the number of examples, above 1, if it is a constant in some tensors, and the same one in all of these."""
    counts = {tensor.shape.as_list()[0] for tensor in batch} - {None}
    count = counts.pop() if counts else None
    return count if not counts and count is not None and count > 1 else None


def count_within(ops: Iterable[tf.Operation]) -> Optional[int]:
    """Return the number of examples, above 1, that operations make constant which take any; None if it is unclear."""
    made = [op for op in ops if op.type in ("Reshape", "Slice")]
    counts: Set[Optional[int]] = set()
    for op in made:
        old, new = op.inputs[0].shape, op.outputs[0].shape
        if old.rank and old.as_list()[0] is None and op.type == "Slice":
            counts.update(new.as_list()[:1])
        elif old.rank and old.as_list()[0] is None:
            numbers, others = new.num_elements(), old[1:].num_elements()
            counts.add(numbers // others if numbers and others and not numbers % others else None)
    counts -= {None, 1}
    return counts.pop() if len(counts) == 1 else None


class OpenBatch:
    """Open tensors in place of those of a batch.

    Args:
      batch: tensors whose first axes have the length `count`.
      count: the number of examples.
      of_variables: operations that are computed from variables.

    Attributes:
      tensors: the open ones, of the batch and of constants that hold rows.
      keys: of these.
      aliases: {key of a tensor: key of the open one}.
      ops: operations that compute shapes from the number of examples.
    """

    def __init__(self, batch: Sequence[tf.Tensor], count: int, of_variables: Set[tf.Operation]) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self._count = count
        self._of_variables = of_variables
        self.tensors: List[tf.Tensor] = []
        self.keys: Set[Key] = set()
        self.aliases: Dict[Key, Key] = {}
        self.ops: List[tf.Operation] = []
        self._invariant: Dict[Key, Optional[tf.Tensor]] = {}  # what is computed in a loop, as computed before it
        self._any = tf.compat.v1.placeholder(tf.int32, name="any")
        for tensor in batch:
            self._open(tensor)

    def key(self, kind: str, index: int, key: Key, is_state: bool = False) -> Key:
        """Return what an operation on examples takes in place of an input that is computed from none of them.

        Args:
          kind: the type of the operation.
          index: which of its inputs it is.
          key: that of the input.
          is_state: whether a loop begins with it, and hands back what is computed from the examples.
        """
        if key not in self.aliases and not (kind in INDICES and index == 1):
            tensor = self._graph.get_tensor_by_name(key)
            if SHAPES.get(kind) == index:
                self.aliases[key] = self._shape(tensor)
            elif self._has_rows(tensor, is_state):
                self._open(tensor)
        return self.aliases.get(key, key)

    def number(self, op: tf.Operation, index: int, key: Key) -> Key:
        """Return what an operation on examples takes in place of a number, from which it computes lengths of axes.

        Args:
          op: the operation, such as that of `n * longest`, or of `[n, longest]`.
          index: which of its inputs it is.
          key: that of the input, which is computed from no examples.
        """
        tensor = self._graph.get_tensor_by_name(key)
        if key in self.aliases or not (tensor.dtype.is_integer and tensor.shape.rank == 0):
            return key
        if not _is_length(op, index):
            return key
        before = len(self._graph.get_operations())
        first = self._opened(self._constants(tf.stack([tensor]))[0])
        if first is None:
            return key
        result = tf.cast(first, tensor.dtype, name="open_length")
        self.ops += self._graph.get_operations()[before:]
        return str(result.name)

    def key_within(self, kind: str, index: int, tensor: tf.Tensor, is_state: bool = False) -> Optional[Key]:
        """Return what an operation in a loop takes in place of an input that is computed there, but from no examples.

        Args:
          kind: the type of the operation.
          index: which of its inputs it is.
          tensor: the input.
          is_state: as for `key`.

        Returns:
          The key of a tensor outside of the loop, or None if nothing has to take the place of the input.

        Raises:
          NotCopied: there is a row for each example, and perhaps another one each time.
        """
        has_rows = self._has_rows(tensor, is_state)
        if (not has_rows and SHAPES.get(kind) != index) or (kind in INDICES and index == 1):
            return None
        if tensor.name not in self._invariant:
            self._invariant[tensor.name] = _tf.frames.hoisted(tensor)
        invariant = self._invariant[tensor.name]
        if has_rows and invariant is None:
            raise NotCopied(f"{tensor.name!r} has a row for each example, and may change in a loop")
        opened = None if invariant is None else self.key(kind, index, invariant.name, is_state)
        return None if invariant is None or opened == invariant.name else opened

    def open_elements(self, proto: Any) -> None:
        """Let the elements of a tensor array hold any number of examples, given the `NodeDef` of what makes it."""
        for name in ("element_shape", "element_shape_except0") if proto.op.startswith("TensorArray") else ():
            for length in proto.attr[name].shape.dim if name in proto.attr else ():
                length.size = -1 if length.size % self._count == 0 else length.size

    def shape_of(self, tensor: tf.Tensor) -> tf.TensorShape:
        """Return what is known of a shape for any number of examples."""
        if tensor.shape.rank is None:
            return tensor.shape
        lengths = tensor.shape.as_list()
        return tf.TensorShape([None if length is None or length % self._count == 0 else length for length in lengths])

    def _open(self, tensor: tf.Tensor) -> None:
        lengths = tensor.shape.as_list()
        opened = tf.compat.v1.placeholder_with_default(tensor, [None, *lengths[1:]], name="open")
        self.tensors.append(opened)
        self.keys.add(opened.name)
        self.aliases[tensor.name] = opened.name

    def _has_rows(self, tensor: tf.Tensor, is_state: bool) -> bool:
        """Whether a tensor holds one row for each example, such as the initial state of a recurrent network.

        Other vectors of constants, such as the order of axes, do not.
        """
        is_made = tensor.op.type != "Const" or (tensor.shape.rank or 0) > 1 or is_state
        is_long = bool(tensor.shape.rank) and tensor.shape.as_list()[0] == self._count
        is_made = is_made and tensor.op not in self._of_variables and tensor.dtype.base_dtype == tensor.dtype
        # The batch of each run is computed, and nothing that is only computed in some runs can be a part of it.
        return (
            is_made and is_long and not (_tf.frames.is_of_one_branch(tensor) and not _tf.frames.contexts_of(tensor.op))
        )

    def _shape(self, tensor: tf.Tensor) -> Key:
        """Return the key of a shape whose first number depends on the number of examples, or of the shape itself."""
        before = len(self._graph.get_operations())
        lengths = self._constants(tensor)
        first = self._opened(lengths[0]) if lengths else None
        if first is None and lengths and tensor.op.type == "Pack":
            first = self._product(tensor.op.inputs[0])
        if first is None:
            return str(tensor.name)
        result = tf.concat([[tf.cast(first, tensor.dtype)], tensor[1:]], 0, name="open_shape")
        self.ops += self._graph.get_operations()[before:]
        return str(result.name)

    def _constants(self, shape: tf.Tensor) -> List[Optional[int]]:
        """Return the lengths in a shape, None for those that are no constants."""
        known = tf.reshape(self._any, shape).shape
        return known.as_list() if known.rank else []

    def _opened(self, length: Optional[int]) -> Optional[tf.Tensor]:
        """Return a constant multiple of the number of examples as a tensor that depends on it."""
        if not length or length % self._count:
            return None
        return tf.shape(self.tensors[0])[0] * (length // self._count)

    def _product(self, number: tf.Tensor) -> Optional[tf.Tensor]:
        """Return a product of the number of examples and of a number that is no constant."""
        factors = list(number.op.inputs) if number.op.type == "Mul" else []
        for factor, other in (factors, factors[::-1]) if factors else ():
            value: Any = tf.get_static_value(factor)
            first = None if value is None else self._opened(int(value))
            if first is not None:
                return tf.cast(first, number.dtype) * other
        return None


def _is_length(op: tf.Operation, index: int) -> bool:
    """Whether the result of an operation is nothing but a shape, with an input as a factor of its first length."""
    if op.type not in ("Mul", "Pack") or (op.type == "Pack" and index):
        return False
    uses = [
        (user, place) for user in op.outputs[0].consumers() for place, one in enumerate(user.inputs) if one.op is op
    ]
    return bool(uses) and all(SHAPES.get(user.type) == place or _is_length(user, place) for user, place in uses)
