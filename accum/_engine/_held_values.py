"""Copies of operations that take the value of a variable, read once in a run, in place of the variable.

What is copied is computed twice, for the rows and for their gradient. In between, the run may change the variable.
"""

from typing import Any, Dict, Iterable, List, Optional, Set

from accum import _tf
from accum._tf import tf

Key = str

HANDS_ON = ("Enter", "Identity", "Switch")
"""Types of operations that hand a variable on, into a loop or branch of TensorFlow 1."""

ON_VALUES = {
    "ReadVariableOp": "Identity",
    "ResourceGather": "Gather",
    "ResourceGatherNd": "GatherNd",
    "VariableShape": "Shape",
}
"""What computes the same of the value of a variable."""

_DTYPES = {"Gather": "Tparams", "GatherNd": "Tparams"}
_OTHERS = {"Gather": ["validate_indices", "Tindices"], "GatherNd": ["Tindices"], "Shape": ["out_type"]}


class HeldValues:
    """The values that copies take.

    Args:
      changed: the operations that create those variables that a run changes.
      holds_handles: whether the values of all resource variables are held, because something may yet change them.

    Attributes:
      holds_handles: as passed.
    """

    def __init__(self, changed: Set[tf.Operation], holds_handles: bool) -> None:
        self._changed, self.holds_handles = set(changed), holds_handles
        self._values: Dict[Key, tf.Tensor] = {}
        self._awaited: List[tf.Operation] = []
        self._waiting: Dict[tf.Operation, List[tf.Operation]] = {}

    def wait_for(self, op: tf.Operation) -> None:
        """Let the values be read once an operation is done, for which the program waits before it reads them."""
        self._awaited.append(op)
        for value in self._values.values():
            _tf.graphs.add_control_input(value.op, op)

    def hold(self, changes: Dict[tf.Operation, List[tf.Operation]]) -> bool:
        """Hold the values of more variables, read before they change. Returns whether that is new.

        Args:
          changes: {the operation that creates a variable: operations that change it}.
        """
        missing = set(changes) - self._changed
        self._changed.update(changes)
        for variable, ops in changes.items():
            self._waiting.setdefault(variable, []).extend(ops)
            for key, value in self._values.items():
                if variable_read_by(value.graph.get_tensor_by_name(key)) is variable:
                    _wait(ops, value)
        return any(not (self.holds_handles and op.type == "VarHandleOp") for op in missing)

    def is_changed(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor is the handle of a variable that is changed, or reads one by its ref."""
        return variable_read_by(tensor) in self._changed

    def holds(self, tensor: tf.Tensor) -> bool:
        """Whether the value of a variable is held, given its handle, or what reads it by its ref."""
        is_held = self.holds_handles and tensor.dtype == tf.resource and tensor.op.type == "VarHandleOp"
        return is_held or self.is_changed(tensor)

    def value(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the value that is held, for a tensor for which `holds` is true."""
        if tensor.name not in self._values:
            with tensor.graph.as_default(), tf.control_dependencies(None):
                is_handle = tensor.dtype == tf.resource
                # What reads a ref shares the memory of the variable.
                value = _tf.graph_parts.value_of(tensor) if is_handle else tf.raw_ops.DeepCopy(x=tensor)
            for op in self._awaited:
                _tf.graphs.add_control_input(value.op, op)
            _wait(self._waiting.get(variable_read_by(tensor), ()), value)
            self._values[tensor.name] = value
        return self._values[tensor.name]


def _wait(ops: Iterable[tf.Operation], value: tf.Tensor) -> None:
    for op in ops:
        _tf.graphs.add_control_input(op, value.op)


NOTHING = HeldValues(set(), holds_handles=False)


def variable_read_by(tensor: tf.Tensor) -> Optional[tf.Operation]:
    """Return what creates the variable whose handle a tensor is, or which it reads by its ref; None: it is another."""
    source = tensor.op.inputs[0] if tensor.op.type == "Identity" else tensor
    return source.op if source.dtype == tf.resource or source.dtype != source.dtype.base_dtype else None


def takes_values(op: tf.Operation) -> bool:
    """Whether an operation takes only the value of a variable, and so does whatever it hands the variable on to."""
    if not any(one.dtype == tf.resource for one in op.inputs):
        return True
    if op.type in HANDS_ON:
        handles = [one for one in op.outputs if one.dtype == tf.resource]
        return all(takes_values(user) for one in handles for user in one.consumers())
    return op.type in ON_VALUES and not (op.type == "ResourceGather" and op.get_attr("batch_dims"))


def on_value(op: tf.Operation, proto: Any, dtype: tf.DType) -> Any:
    """Return the node for an operation that gets the value of a variable in place of the variable.

    Args:
      op: an operation for which `takes_values` is true.
      proto: its node, with the inputs of the copy.
      dtype: that of the variable.
    """
    if op.type in HANDS_ON:
        proto.attr["T"].type = dtype.as_datatype_enum
        return proto
    kind = ON_VALUES[op.type]
    node = tf.compat.v1.NodeDef(name=proto.name, op=kind, input=proto.input, device=proto.device)
    node.attr[_DTYPES.get(kind, "T")].type = dtype.as_datatype_enum
    for name in _OTHERS.get(kind, ()):
        node.attr[name].CopyFrom(proto.attr[name])
    return node
