"""Rules of matrix products, linear algebra, and operations on axes at the end of a tensor."""

from typing import List, Optional, Set, Tuple

from accum._rows._rules import Meets, Op, Outcome, rule
from accum._rows._states import Layout

PRODUCT = "product"


@rule("MatMul", "SparseMatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def matrix_product(op: Op) -> Outcome:
    """Rows of the first factor, columns of the second, and axes before them remain; the others are contracted."""
    rank = op.output_rank()
    if op.type.startswith("Batch"):
        turned = op.attribute("adj_x").b, op.attribute("adj_y").b
    else:
        turned = op.attribute("transpose_a").b, op.attribute("transpose_b").b
    found: Set[Optional[Layout]] = set()
    for index in op.batched:
        layout = op.must(index)
        place = layout.axis - op.rank(index)
        kept = (-2 if index == 0 else -1) if not turned[index] else (-1 if index == 0 else -2)
        if place < -2:
            found.add(layout.on(place + rank))
        elif place == kept:
            found.add(layout.on(rank - 2 + index))
        else:
            found.add(None)
    if op.type.startswith("Batch"):
        _others_are_broadcast(
            op, [layout.axis - rank for layout in found if layout is not None and layout.axis < rank - 2]
        )
    return product_of(op, found)


def _others_are_broadcast(op: Op, places: List[int]) -> None:
    for place in places:
        for index in range(op.count):
            dims = op.dims(index)
            if op.layout(index) is None and len(dims) >= -place and dims[place] != 1:
                raise Meets(f"nothing proves that input {index} is the same for all examples")


def product_of(op: Op, found: Set[Optional[Layout]]) -> Outcome:
    """Return the outcome of a product whose factors have examples on axes that remain, or None: are contracted."""
    if len(found) != 1:
        raise Meets("a product of examples with each other")
    layout = found.pop()
    if layout is not None:
        return Outcome([layout])
    if len(op.batched) != op.count or len({op.must(index).along for index in op.batched}) != 1:
        raise Meets("a product that contracts the examples with something else")
    return Outcome([None], PRODUCT)


@rule("Einsum")
def einsum(op: Op) -> Outcome:
    """The label of the axis of the examples remains, or is contracted."""
    equation = op.attribute("equation").s.decode().replace(" ", "")
    left, right = equation.split("->")
    output = _labels(right, op.output_rank())
    found: Set[Optional[Layout]] = set()
    names: Set[str] = set()
    labels = [_labels(part, op.rank(index)) for index, part in enumerate(left.split(","))]
    for index in op.batched:
        layout = op.must(index)
        name = labels[index][layout.axis]
        if labels[index].count(name) > 1:
            raise Meets("a diagonal along the examples")
        names.add(name)
        found.add(layout.on(output.index(name)) if name in output else None)
    if len(names) != 1:
        raise Meets("a product of examples with each other")
    for index in range(op.count):
        name = next(iter(names))
        if op.layout(index) is None and name in labels[index] and op.dims(index)[labels[index].index(name)] != 1:
            raise Meets(f"nothing proves that input {index} is the same for all examples")
    return product_of(op, found)


def _labels(part: str, rank: int) -> List[str]:
    """Return the name of each axis; those of an ellipsis are named by their place before what follows it."""
    if "..." not in part:
        return list(part)
    before, after = part.split("...")
    count = rank - len(before) - len(after)
    return list(before) + [f"...{index - count}" for index in range(count)] + list(after)


def leading(op: Op, inner: Tuple[int, ...], shared: bool = True) -> Layout:
    """Return the layout of examples that are on axes before those on which an operation works.

    Args:
      op: an `Op`.
      inner: for each input, on how many axes at its end it works.
      shared: whether an input without an axis of examples must have no more than its inner axes.
    """
    layouts = set()
    for index in range(op.count):
        layout = op.layout(index)
        if layout is None:
            if shared and op.rank(index) > inner[index]:
                raise Meets(f"nothing proves that input {index} is the same for all examples")
        elif layout.axis >= op.rank(index) - inner[index]:
            raise Meets("it works on the axis of the examples")
        else:
            layouts.add(layout.on(layout.axis - (op.rank(index) - inner[index])))
    if len(layouts) != 1:
        raise Meets("the examples are on different axes of its inputs")
    first = op.batched[0]
    return layouts.pop().on(op.must(first).axis)


@rule("FFT", "IFFT", "IRFFT", "LogSoftmax", "MatrixDiag", "RFFT", "Softmax")
def on_last_axis(op: Op) -> Layout:
    """They work on the last axis; another input is a length."""
    return leading(op, (1, 1))


@rule("Cholesky", "Eig", "FFT2D", "IFFT2D", "LogMatrixDeterminant", "Lu", "MatrixDeterminant", "MatrixDiagPart")
@rule("IRFFT2D", "MatrixInverse", "MatrixLogarithm", "MatrixSquareRoot", "Qr", "RFFT2D", "SelfAdjointEigV2", "Svd")
def on_two_axes(op: Op) -> Layout:
    """They work on the last two axes; another input has two lengths."""
    return leading(op, (2, 1))


@rule("CholeskyGrad", "MatrixSolve", "MatrixTriangularSolve")
def pairs_of_matrices(op: Op) -> Layout:
    """Both operands have the axes before their matrices."""
    leading(op, (2, 2))
    return op.same([0, 1])


@rule("FFT3D", "IFFT3D", "IRFFT3D", "RFFT3D")
def on_three_axes(op: Op) -> Layout:
    """They work on the last three axes; another input has three lengths."""
    return leading(op, (3, 1))


@rule("MatrixBandPart")
def band_part(op: Op) -> Layout:
    """Two numbers say how many diagonals are kept."""
    return leading(op, (2, 0, 0))


@rule("MatrixSetDiag", "MatrixSetDiagV2", "MatrixSetDiagV3")
def set_diagonals(op: Op) -> Layout:
    """One diagonal or, if two numbers give the first and the last, several."""
    op.only(0, 1)
    if op.rank(1) != op.rank(0) - 1:
        raise Meets("it sets several diagonals")
    leading(op, (2, 1, 1))
    return op.same([0, 1])


@rule("MatrixDiagPartV2", "MatrixDiagPartV3")
def diagonals_of(op: Op) -> Layout:
    """The other inputs say which diagonals, and what they are padded with."""
    return leading(op, (2, 1, 1))


@rule("MatrixDiagV2", "MatrixDiagV3")
def matrix_of_diagonals(op: Op) -> Layout:
    """One diagonal is on the last axis; several take one more."""
    layout = op.one()
    if layout.axis >= op.rank() - (1 if op.output_rank() == op.rank() + 1 else 2):
        raise Meets("it works on the axis of the examples")
    return layout


@rule("Cross")
def cross(op: Op) -> Layout:
    """Both operands have one shape."""
    layout = op.same([0, 1])
    if layout.axis == op.rank() - 1:
        raise Meets("it works on the axis of the examples")
    return layout


@rule("SparseTensorDenseMatMul")
def sparse_product(op: Op) -> Layout:
    """A sparse matrix without examples, times columns of which each belongs to an example."""
    layout = op.one(3)
    if layout.axis != (0 if op.attribute("adjoint_b").b else 1):
        raise Meets("a product that contracts the examples with something else")
    return layout.on(1)


@rule("NthElement", "TopKV2")
def top(op: Op) -> Layout:
    """The largest entries of the last axis."""
    layout = op.one()
    if layout.axis == op.rank() - 1:
        raise Meets("it sorts the examples")
    return layout


@rule("InTopK", "InTopKV2")
def in_top(op: Op) -> Layout:
    """A target for each row of predictions."""
    op.only(0, 1)
    layout = op.same([0, 1])
    if layout.axis != 0:
        raise Meets("it sorts the examples")
    return layout


@rule("SoftmaxCrossEntropyWithLogits")
def cross_entropy(op: Op) -> Outcome:
    """Logits and labels are broadcast to one another; the loss has no axis of classes."""
    for index in range(2):
        if op.layout(index) is None and op.dims(index)[0] != 1:
            raise Meets(f"nothing proves that input {index} is the same for all examples")
    layout = op.same(op.batched)
    if layout.axis != 0:
        raise Meets("the examples are on the axis of the classes")
    return Outcome([layout, layout])


@rule("SparseSoftmaxCrossEntropyWithLogits")
def sparse_cross_entropy(op: Op) -> Outcome:
    """A label for each row of logits."""
    layout = op.same([0, 1])
    if layout.axis != 0:
        raise Meets("the examples are on the axis of the classes")
    return Outcome([layout, layout])
