"""Rules of reductions: they keep the examples apart, or combine all of them."""

from accum._rows._rules import Meets, Op, Outcome, rule
from accum._rows._states import Layout

REDUCTIONS = {
    "Sum": "sum",
    "Mean": "mean",
    "Max": "max",
    "Min": "min",
    "Prod": "prod",
    "All": "all",
    "Any": "any",
    "EuclideanNorm": "euclidean_norm",
}


@rule(*REDUCTIONS)
def reduction(op: Op) -> Outcome:
    """Over some axes; the axis of the examples remains, or is among them."""
    layout = op.one()
    axes = set(op.axes(1, op.rank()))
    if layout.axis in axes:
        return Outcome([None], REDUCTIONS[op.type])
    is_kept = op.attribute("keep_dims").b
    return Outcome([layout if is_kept else layout.on(layout.axis - sum(axis < layout.axis for axis in axes))])


@rule("L2Loss")
def l2_loss(op: Op) -> Outcome:
    """Half the sum of squares."""
    op.one()
    return Outcome([None], "sum")


@rule("BiasAddGrad")
def bias_add_gradient(op: Op) -> Outcome:
    """The sum over all axes but that of the features."""
    layout = op.one()
    if layout.axis == op.features():
        raise Meets("the examples are on the axis of the features")
    return Outcome([None], "sum")


@rule("BiasAdd", "BiasAddV1")
def bias_add(op: Op) -> Layout:
    """A number for each feature."""
    layout = op.one()
    if layout.axis == op.features():
        raise Meets("the examples are on the axis of the features")
    return layout


@rule("ArgMax", "ArgMin")
def arg_reduction(op: Op) -> Layout:
    """An index on one axis."""
    layout = op.one()
    (axis,) = op.axes(1, op.rank())
    if axis == layout.axis:
        raise Meets("an index of an example")
    return layout.on(layout.axis - (axis < layout.axis))


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp")
def cumulative(op: Op) -> Layout:
    """Along one axis."""
    layout = op.one()
    if layout.axis in op.axes(1, op.rank()):
        raise Meets("a running sum over the examples")
    return layout


SEGMENTS = {
    "UnsortedSegmentSum": "segment_sum",
    "UnsortedSegmentMax": "segment_max",
    "UnsortedSegmentMin": "segment_min",
    "UnsortedSegmentProd": "segment_prod",
}


@rule(*SEGMENTS)
def segments(op: Op) -> Outcome:
    """Entries with the same number are combined; the axes of the numbers become one of the segments."""
    op.only(0, 1)
    count = op.rank(1)
    layout = op.must(0)
    if layout.axis >= count:
        op.only(0)
        return Outcome([layout.on(layout.axis - count + 1)])
    op.same([0, 1])
    return Outcome([None], SEGMENTS[op.type])


@rule("Bincount")
def bincount(op: Op) -> Outcome:
    """How often each number occurs, or the sum of its weights."""
    op.only(0, 2)
    op.must(0)
    _weights_are_alike(op)
    return Outcome([None], "bincount")


@rule("DenseBincount")
def dense_bincount(op: Op) -> Outcome:
    """As `Bincount`, for each row if there are two axes."""
    op.only(0, 2)
    layout = op.must(0)
    _weights_are_alike(op)
    if op.rank() == 2 and layout.axis == 0:
        return Outcome([layout])
    return Outcome([None], "any" if op.attribute("binary_output").b else "bincount")


def _weights_are_alike(op: Op) -> None:
    """Weights have the shape of what is counted, or are empty."""
    if op.layout(2) is not None:
        op.same([0, 2])
    elif 0 not in op.dims(2):
        raise Meets("its weights have no axis of examples")


@rule("ScatterNd")
def scatter(op: Op) -> Outcome:
    """Updates are added at their places, of which the last axis of the indices holds one each."""
    op.only(0, 1)
    layout = op.same([0, 1])
    if layout.axis >= op.rank(0) - 1:
        raise Meets("the examples are on the axis of a place")
    return Outcome([None], "sum")
