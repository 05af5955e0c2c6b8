"""Losses that layers add as a sum over examples, divided as Keras divides them."""

from typing import Any, FrozenSet, List

from accum import _tf
from accum._engine._batch import Size
from accum._tf import tf


class AddedSums:
    """Scales losses with an entry for each example, which layers add and Keras adds up, to their sum over the batch.

    The losses of micro-batches are averaged by their examples. So each of these has as many times its value as the
    batch has its examples.

    Args:
      count, total: the number of examples in the micro-batch, and in the batch.

    Where the number of examples is known while the layer is called, a length does not tell entries for examples from
    those for features. Such a loss stays as it is, and is warned of.

    Attributes:
      has_scaled: whether Keras has added up such a loss.
    """

    def __init__(self, count: Size, total: Size) -> None:
        self._count = count
        self._total = total
        self.has_scaled = False

    def of_batch(self, loss: tf.Tensor) -> tf.Tensor:
        """Return what stands for a loss that a layer has added to the micro-batch."""
        if not self.has_entries(loss):
            return loss
        self.has_scaled = True
        scaled = loss * (tf.cast(self._total, loss.dtype) / tf.cast(self._count, loss.dtype))
        return scaled + tf.stop_gradient(loss - scaled) if _tf.steps.LOGS_ADDED_MEAN else scaled

    def has_entries(self, loss: tf.Tensor) -> bool:
        """Whether a loss has entries for each example, as its unknown length tells."""
        return may_have_entries(loss) and (not loss.shape.rank or loss.shape[0] is None)

    def is_ambiguous(self, loss: tf.Tensor) -> bool:
        """Whether a loss may have entries for each example, or as many for something else."""
        if self.has_entries(loss) or not may_have_entries(loss):
            return False
        return not isinstance(self._count, int) or loss.shape[0] % max(self._count, 1) == 0


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
