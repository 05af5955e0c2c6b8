"""Find what is done to gradients after they are computed, and before an optimizer receives them."""

from typing import Callable, Container, List, Sequence, Set

from accum._tf.op_walks import OF_SHAPES, ancestors, gives_data, outermost
from accum._tf.random_ops import DRAWING
from accum._tf.types import Gradient
from accum._tf.version import tf

NONLINEAR = frozenset(
    ["Abs", "ClipByValue", "Elu", "Exp", "Floor", "L2Loss", "Log", "Log1p", "Max", "Maximum", "Min", "Minimum", "Pow"]
    + ["Prod", "Relu", "Round", "Rsqrt", "Select", "SelectV2", "Sigmoid", "Sign", "Softplus", "Sqrt", "Square", "Tanh"]
    + ["TopK", "TopKV2", "Where", "EuclideanNorm", "FakeQuantWithMinMaxArgs", "FakeQuantWithMinMaxVars"]
)
"""Operations whose result for a mean of gradients is not the mean of the results."""
CHOICES = ("Select", "SelectV2")  # linear, unless gradients decide what is chosen
PRINTS = ("Print",)  # and give back their first input
ASKS_IF_FINITE = ("IsFinite", "IsInf", "IsNan")
LOOPS = ("Exit", "RefExit", "While", "StatelessWhile")  # a gradient that one returns may be a sum over examples


class _Ends(Container[tf.Operation]):
    """Where a walk back from gradients ends: at what computes them."""

    def __init__(self, is_gradient: Callable[[tf.Operation], bool]) -> None:
        self._is_gradient = is_gradient

    def __contains__(self, op: object) -> bool:
        assert isinstance(op, tf.Operation)
        is_of_others = "_grad/" in op.name or is_of_tape(op)  # computed in another way, so not understood
        is_end = op.type in LOOPS + ASKS_IF_FINITE or op.type in OF_SHAPES or "/pfor/" in op.name
        return self._is_gradient(op) or is_of_others or is_end


def is_of_tape(op: tf.Operation) -> bool:
    """Whether an op differentiates another one for a `tf.GradientTape`."""
    return "gradient_tape/" in op.name


def nonlinear_changes(gradients: Sequence[Gradient], is_gradient: Callable[[tf.Operation], bool]) -> List[tf.Operation]:
    """Return the ops, not linear or random, by which gradients have been changed, in the order of their creation.

    Left out is what sets gradients that are not finite to zero, and what a loop does to those of single examples; and
    all of it where the way back from gradients leads to data, and so through the loss: what follows other gradients
    there, such as a penalty, is a part of it.

    Args:
      gradients: list of tensors or `tf.IndexedSlices`, as they are in the end.
      is_gradient: function that tells whether an op computes a gradient.
    """
    ends, outside = _Ends(is_gradient), outermost()

    def source_of(tensor: tf.Tensor) -> tf.Operation:
        captured = outside(tensor)
        return (tensor if hasattr(captured, "numpy") else captured).op  # one that was computed eagerly has no op

    def sources_of(op: tf.Operation) -> List[tf.Operation]:
        return [source_of(tensor) for tensor in list(op.inputs)[: 1 if op.type in PRINTS else None]]

    changing: Set[tf.Operation] = set()  # of gradients

    def is_of_gradients(op: tf.Operation) -> bool:
        return op in changing or is_gradient(op)

    found: List[tf.Operation] = []
    tensors = [getattr(grad, "values", grad) for grad in gradients]
    last = [source_of(tensor) for tensor in tensors if not hasattr(tensor, "numpy")]
    ops = ancestors(last, ends, sources=sources_of)
    for op in ops if not any(map(gives_data, ops)) else ():
        sources = sources_of(op)
        if op.type in DRAWING:  # noise, of which the mean would have less
            found.append(op)
        elif op.type not in OF_SHAPES and any(map(is_of_gradients, sources)):
            changing.add(op)
            if op.type in NONLINEAR and (op.type not in CHOICES or is_of_gradients(sources[0])):
                found.append(op)
    return found
