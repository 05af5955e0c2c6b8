"""Find what the losses of a static graph divide by: examples, masked words, or nothing. Dies with `tf.compat.v1`."""

import itertools
import re
from typing import Any, List, NamedTuple, Optional, Sequence, Set, Tuple

from accum._tf.op_walks import ancestors, following, gives_data, sources_of
from accum._tf.variables import known_value
from accum._tf.version import tf

ADDS = ("Add", "AddN", "AddV2", "Sub")
DIVISIONS = ("Div", "DivNoNan", "RealDiv")
SIZES = ("OnesLike", "Shape", "Size", "ZerosLike")
SELECTIONS = ("DynamicPartition", "NonMaxSuppression", "Unique", "Where")  # `tf.boolean_mask` uses `Where`
PASSES = ("Cast", "CheckNumerics", "ExpandDims", "Identity", "Neg", "Print", "Reshape", "Squeeze")  # the first input
CONSTANTS = ("Add", "AddV2", "Maximum", "StopGradient") + PASSES  # may add a constant to a count
CHOICES = ("Select", "SelectV2")
A_SUM = 0.5  # a factor of a sum that is no larger may stand for one over the number of examples
# A quotient that passes one of these may have been a mean over the examples, and is one no more.
CURVED: Tuple[str, ...] = ("Exp", "Log", "Log1p", "Pow", "Sigmoid", "Softplus", "Square", "SquaredDifference", "Tanh")
CURVED += ("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits")
# The result has as many rows as the first input, or as all of them.
ROWS_OF_FIRST = ("BiasAdd", "MatMul", "Mean", "Slice", "StridedSlice", "Sum") + PASSES
ROWS_OF_ALL = ("Abs", "Maximum", "Minimum", "Mul", "Relu", "Sqrt") + ADDS + CHOICES + CURVED + DIVISIONS
# Unless it is the loss itself, one of these may divide by the number of examples.
HIDING: Tuple[str, ...] = ("Case", "Exit", "If", "Mean", "PartitionedCall", "RefExit", "Softmax")
HIDING += ("StatefulPartitionedCall", "StatelessCase", "StatelessIf", "StatelessWhile", "While")


def _sources(last: tf.Operation, ends: Any = ()) -> Set[tf.Operation]:
    reached: Set[tf.Operation] = set()
    waiting = [last]
    while waiting:
        op = waiting.pop()
        if op not in reached and op.type not in ends:
            reached.add(op)
            waiting += sources_of(op, with_control=False)
    return reached


# ----------------------------------------------------------------------------------------------------------------
# The losses of gradients


def differentiated(gradients: Sequence[tf.Tensor]) -> List[tf.Tensor]:
    """Return the losses that `tf.gradients` has differentiated to these gradients, as far as their names show it.

    A loss is left out that was given a gradient of its own; and all are if something was done to the gradients since.
    """
    seeds = {seed: scope for gradient in gradients for scope, seed in _seeds(gradient.op)}  # in this order
    losses = [_differentiated(scope, seed) for seed, scope in seeds.items()]
    return [loss for loss in losses if loss is not None]


def _seeds(op: tf.Operation) -> List[Tuple[str, tf.Operation]]:
    """Return the gradients, one for each loss, with which the call of `tf.gradients` began that has created an op.

    Each comes with the name scope of the call, which ends with a slash.
    """
    for end in re.finditer("/", op.name):
        scope, seeds = op.name[: end.end()], []
        for number in itertools.count():
            try:
                seeds.append((scope, op.graph.get_operation_by_name(f"{scope}grad_ys_{number}")))
            except KeyError:
                break
        if seeds:
            return seeds
    return []


def _differentiated(scope: str, seed: tf.Operation) -> Optional[tf.Tensor]:
    """Return the loss whose gradient begins with a seed, unless that was given, or does not show it."""
    if seed.type == "Identity":  # what was given
        return None
    fill = re.compile(f"{re.escape(scope)}Fill(_[0-9]+)?$")  # of that seed, in TensorFlow 2.2; not any more in 2.8
    ones = next((op for op in seed.outputs[0].consumers() if fill.match(op.name)), seed)
    if ones.type == "Fill" and ones.inputs[0].op.type == "Shape":
        return ones.inputs[0].op.inputs[0]
    for user in ones.outputs[0].consumers():
        of_loss = re.match(f"{re.escape(scope)}(.*)_grad/", user.name)
        if of_loss:
            losses = seed.graph.get_operation_by_name(of_loss.group(1)).outputs
            return next((loss for loss in losses if loss.shape.as_list() == ones.outputs[0].shape.as_list()), None)
    return None


# ----------------------------------------------------------------------------------------------------------------
# The terms of one loss


class Terms(NamedTuple):
    """What a loss is added up of that is no mean over examples.

    Attributes:
      sums: operations that add up examples, by whose number nothing divides.
      means: pairs of an operation that divides, and the count in it, that of a mask.
    """

    sums: List[tf.Operation]
    means: List[Tuple[tf.Operation, tf.Tensor]]


def terms_of(loss: tf.Tensor, trained: Sequence[tf.Operation]) -> Terms:
    """Return the terms of a loss. What is neither clearly a sum nor a mean over a mask is left out.

    Args:
      loss: scalar tensor.
      trained: the operations of trainable variables or of their handles.
    """
    reading = _Reading(loss, trained)
    reading.read()
    return Terms(reading.sums, reading.means)


def uses_values(weight: Any) -> bool:
    """Whether a weight is computed from values that are fed, or selected by them, and not only from their shapes."""
    if not isinstance(weight, tf.Tensor):
        return False
    return any(map(_is_fed, _sources(weight.op, SIZES))) or any(
        op.type.startswith(SELECTIONS) for op in _sources(weight.op)
    )


def _is_fed(op: tf.Operation) -> bool:
    return op.type.startswith("Placeholder") or gives_data(op)


class _Reading:
    """Reads one loss, from its sum down. Each operation is looked at a few times."""

    def __init__(self, loss: tf.Tensor, trained: Sequence[tf.Operation]) -> None:
        self.sums: List[tf.Operation] = []
        self.means: List[Tuple[tf.Operation, tf.Tensor]] = []
        self._loss = loss
        ordered = ancestors([loss.op])
        self._of_batch = following(ordered, {op for op in ordered if gives_data(op)})  # of its size, too
        self._of_data = following(ordered, {op for op in ordered if gives_data(op)}, SIZES)
        self._of_fed = following(ordered, {op for op in ordered if _is_fed(op)})
        self._of_trained = following(ordered, set(trained), SIZES)

    def read(self) -> None:
        waiting: List[Tuple[tf.Tensor, float]] = [(self._loss, 1.0)]
        seen: Set[tf.Operation] = set()
        while waiting:
            tensor, factor = waiting.pop()
            op = tensor.op
            if op in seen or op not in self._of_batch:
                continue
            seen.add(op)
            parts = _stacked(op)
            if op.type in ADDS:
                waiting += [(part, factor) for part in op.inputs]
            elif op.type in CHOICES and op.inputs[0].shape.rank == 0:  # such as zero, if there are no weights
                waiting += [(part, factor) for part in op.inputs[1:]]
            elif op.type in PASSES or op.type == "Sum" and op.inputs[0].shape.rank == 0:
                waiting.append((op.inputs[0], factor))
            elif parts is not None:
                share = factor / len(parts) if op.type == "Mean" else factor
                waiting += [(part, share) for part in parts]
            elif op.type == "Mul":
                waiting += self._scaled(op, factor)
            elif op.type in DIVISIONS:
                self._read_division(op, op.inputs[1])
            elif op.type in ("Sum", "L2Loss", "Mean"):
                self._read_reduction(op, factor)

    def _scaled(self, product: tf.Operation, factor: float) -> List[Tuple[tf.Tensor, float]]:
        """Return the factor of a product that is a loss, with what it is scaled by, or [] if that can't be told."""
        losses = [tensor for tensor in product.inputs if tensor.op in self._of_batch]
        scales = [tensor for tensor in product.inputs if tensor.op not in self._of_batch]
        if len(losses) != 1 or scales[0].op in self._of_fed:
            return []
        scale = known_value(scales[0])
        return [(losses[0], factor if scale is None else factor * abs(scale))]

    def _read_division(self, op: tf.Operation, divisor: tf.Tensor) -> None:
        """Keep a mean over a mask: a quotient by a sum over data, but not by what the network computes."""
        for size in [source.op for part in _sources(divisor.op, SIZES) for source in part.inputs]:
            if size.type in SIZES:
                self._read_rows(op, size.inputs[0])
        count = divisor
        while count.op.type in CONSTANTS:
            data = [source for source in count.op.inputs if source.op in self._of_data]
            if len(data) != 1:
                return
            count = data[0]
        is_count = count.op.type in ("Sum", "Mean") and count.shape.rank == 0
        if is_count and count.op in self._of_data and count.op not in self._of_trained and self._is_of_mask(count):
            self.means.append((op, count))

    def _is_of_mask(self, count: tf.Tensor) -> bool:
        """Whether what is counted may be zero: not if TensorFlow counts weights that are not zero, which few are."""
        tensor = count.op.inputs[0]
        while tensor.op.type in PASSES + ("Mul",) and len(tensor.op.inputs):
            data = [source for source in tensor.op.inputs if source.op in self._of_data]
            if len(data) != 1:
                return True
            tensor = data[0]
        if tensor.op.type not in CHOICES or tensor.op.inputs[0].op.type != "Equal":
            return True
        weights = tensor.op.inputs[0].op.inputs[0]
        while weights.op.type in PASSES and not _is_discrete(weights):
            weights = weights.op.inputs[0]
        return _is_discrete(weights)

    def _read_rows(self, op: tf.Operation, values: tf.Tensor) -> None:
        """Keep a mean over rows that the data select, so that their number differs between micro-batches."""
        waiting: List[tf.Tensor] = [values]
        seen: Set[tf.Operation] = set()
        while waiting:
            tensor = waiting.pop()
            part, has_count = tensor.op, bool(tensor.shape.rank) and tensor.shape.as_list()[0] is not None
            if has_count or part in seen or part not in self._of_batch:
                continue
            seen.add(part)
            if part.type.startswith(SELECTIONS):
                by = part.inputs[1] if part.type == "DynamicPartition" else part.inputs[0]
                if by.op in self._of_data and (tensor.value_index == 0 or not part.type.startswith("Unique")):
                    self.means.append((op, tensor))
                    return
            elif part.type.startswith("Gather"):
                waiting.append(part.inputs[1])
            elif part.type in ROWS_OF_FIRST:
                is_row = part.type not in ("Mean", "Sum") or _keeps_examples(part)
                waiting += [part.inputs[0]] if is_row else []
            elif part.type in ROWS_OF_ALL:
                waiting += [source for source in part.inputs if source.shape.rank != 0]

    def _read_reduction(self, op: tf.Operation, factor: float) -> None:
        """Keep a sum over examples, unless what is added up has been divided, and a mean over selected ones."""
        values = op.inputs[0]
        if values.shape.rank in (0, None) or op not in self._of_trained:
            return
        if op.type == "Mean" and not _keeps_examples(op):
            self._read_rows(op, values)
        may_be_sum = op.type != "Mean" and tf.compat.dimension_value(values.shape[0]) is None and factor > A_SUM
        waiting, seen = [values], {op}
        others: List[tf.Operation] = []  # behind which a division may be
        while waiting:
            part = waiting.pop().op
            if part in seen or part not in self._of_batch:
                continue
            seen.add(part)
            if part.type in DIVISIONS and _is_common(part.inputs[1]):
                may_be_sum = False
                self._read_division(part, part.inputs[1])
            elif part.type in DIVISIONS or part.type in PASSES:
                waiting.append(part.inputs[0])
            elif part.type == "Mean":
                may_be_sum = may_be_sum and _keeps_examples(part)
                waiting.append(part.inputs[0])
            elif part.type == "Sum":
                waiting.append(part.inputs[0])
            elif part.type in ADDS + ("Mul",):
                may_be_sum = may_be_sum and not any(map(self._may_divide, part.inputs if part.type == "Mul" else []))
                waiting += list(part.inputs)
            elif part.type not in CURVED:
                others.append(part)
        if may_be_sum and not self._may_be_divided(others):
            self.sums.append(op)

    def _may_be_divided(self, ops: Sequence[tf.Operation]) -> bool:
        """Whether there may be a division by the number of examples in what these operations compute."""
        curved = {op for op in ancestors(ops) if op.type in CURVED}
        for op in ancestors(ops, curved):
            factors = op.inputs[1:] if op.type in DIVISIONS else op.inputs if op.type == "Mul" else []
            is_divided = any(map(_is_common if op.type in DIVISIONS else self._may_divide, factors))
            if op in self._of_batch and (op.type in HIDING or is_divided):
                return True
        return False

    def _may_divide(self, factor: tf.Tensor) -> bool:
        """Whether a factor may stand for one over the number of examples."""
        scale = known_value(factor)
        is_fed = factor.op in self._of_fed or factor.op in self._of_batch
        return abs(scale) <= A_SUM if scale is not None else _is_common(factor) and is_fed


def _stacked(op: tf.Operation) -> Optional[List[tf.Tensor]]:
    """Return the scalars of which an operation is the sum or mean, such as the losses of towers, or None."""
    if op.type not in ("Mean", "Sum") or op.inputs[0].op.type != "Pack":
        return None
    parts = list(op.inputs[0].op.inputs)
    return parts if all(part.shape.rank == 0 for part in parts) else None


def _is_common(tensor: tf.Tensor) -> bool:
    """Whether a tensor has one value for all examples."""
    rank = tensor.shape.rank
    return rank == 0 or rank is None or tf.compat.dimension_value(tensor.shape[0]) == 1


def _is_discrete(tensor: tf.Tensor) -> bool:
    return tensor.dtype.base_dtype.is_bool or tensor.dtype.base_dtype.is_integer


def _keeps_examples(mean: tf.Operation) -> bool:
    """Whether a mean is over axes of known lengths only, as of features, and not the first one."""
    axes, shape = tf.get_static_value(mean.inputs[1]), mean.inputs[0].shape
    if axes is None or shape.rank is None:
        return False
    lengths = [tf.compat.dimension_value(shape[int(axis)]) for axis in axes.reshape(-1)]
    return None not in lengths and all(int(axis) % shape.rank != 0 for axis in axes.reshape(-1))
