"""What a loss that a layer adds is computed from."""

from typing import Any, FrozenSet, List

from accum import _tf
from accum._tf import tf


def may_have_entries(loss: tf.Tensor) -> bool:
    """Whether a loss that Keras adds up may have entries for each example, rather than for weights."""
    return _tf.steps.is_summed(loss) and (tf.executing_eagerly() or not is_of_no_example(loss))


def is_of_no_example(tensor: tf.Tensor) -> bool:
    """Whether a tensor in a graph is computed from constants and variables alone."""
    graph = tensor.graph
    return all(graph.get_tensor_by_name(name).op.type == "ReadVariableOp" for name in sources(tensor))


def sources(tensor: tf.Tensor) -> FrozenSet[str]:
    """Return the names of the tensors in a graph from whose values this one is computed."""
    names, seen, waiting = set(), {tensor.name}, [tensor]
    while waiting:
        part = waiting.pop()
        inputs: List[Any] = [] if part.op.type == "Shape" else list(part.op.inputs)
        if not any(source.dtype in (tf.resource, tf.variant) for source in inputs) and inputs:
            waiting.extend(source for source in inputs if source.name not in seen)
            seen.update(source.name for source in inputs)
        elif part.op.type not in ("Const", "Shape"):
            names.add(part.name)
    return frozenset(names)
