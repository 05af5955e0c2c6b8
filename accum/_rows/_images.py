"""Rules of convolutions, pooling, batch normalisation and what else treats the entries of the first axis apart."""

from typing import Dict, Sequence, Tuple, Union

from accum._rows._rules import INDEPENDENT, OPAQUE, Meets, Op, Outcome, rule
from accum._rows._states import Layout

BY_ENTRY: Dict[str, Sequence[int]] = {
    "AvgPool": (0,),
    "AvgPool3D": (0,),
    "Conv2D": (0,),
    "Conv3D": (0,),
    "DepthToSpace": (0,),
    "DepthwiseConv2dNative": (0,),
    "Dilation2D": (0,),
    "Dilation2DBackpropInput": (0, 2),
    "DrawBoundingBoxes": (0, 1),
    "DrawBoundingBoxesV2": (0, 1),
    "ExtractImagePatches": (0,),
    "ExtractVolumePatches": (0,),
    "LRN": (0,),
    "LRNGrad": (0, 1, 2),
    "MaxPool": (0,),
    "MaxPool3D": (0,),
    "MaxPool3DGrad": (0, 1, 2),
    "MaxPool3DGradGrad": (0, 1, 2),
    "MaxPoolGrad": (0, 1, 2),
    "MaxPoolGradGrad": (0, 1, 2),
    "MaxPoolGradGradV2": (0, 1, 2),
    "MaxPoolGradV2": (0, 1, 2),
    "MaxPoolV2": (0,),
    "ResizeArea": (0,),
    "ResizeBicubic": (0,),
    "ResizeBicubicGrad": (0, 1),
    "ResizeBilinear": (0,),
    "ResizeBilinearGrad": (0, 1),
    "ResizeNearestNeighbor": (0,),
    "ResizeNearestNeighborGrad": (0,),
    "ScaleAndTranslate": (0,),
    "ScaleAndTranslateGrad": (0, 1),
    "SpaceToDepth": (0,),
    "LSTMBlockCell": (0, 1, 2),
    "GRUBlockCell": (0, 1),
}
"""Which inputs have an entry for each example on their first axis; what else they take has none."""


RESIZES = ("ResizeArea", "ResizeBicubic", "ResizeBilinear", "ResizeNearestNeighbor")
"""Operations that resize images to the size in their second input."""


@rule(*BY_ENTRY)
def by_entry(op: Op) -> Layout:
    """Each entry of the first axis is treated apart."""
    return on_first_axis(op, BY_ENTRY[op.type])


def on_first_axis(op: Op, indices: Sequence[int]) -> Layout:
    """Return the layout of inputs that must all have the examples on their first axis."""
    op.only(*indices)
    layout = op.same(indices)
    if layout.axis != 0:
        raise Meets("the examples are not on its first axis")
    return layout


@rule("ExtractGlimpse", "ExtractGlimpseV2")
def glimpse(op: Op) -> Layout:
    """A part of each image; what lies outside of the image may be noise."""
    if op.attribute("uniform_noise").b or op.attribute("noise").s in (b"uniform", b"gaussian"):
        raise Meets("it draws random numbers")
    return on_first_axis(op, [0, 2])


@rule("CudnnRNNV3")
def recurrent(op: Op) -> Outcome:
    """A recurrent layer on a GPU: sequences and states of the examples, and the parameters, which are for all of them.

    In the place of a state of cells, which it lacks, a GRU takes and returns a scalar.
    """
    has_cells = op.attribute("rnn_mode").s == b"lstm"
    op.only(0, 1, 4, *[2] * has_cells)
    layout = op.same([0, 1] + [2] * has_cells)
    if layout.axis != int(op.attribute("time_major").b) or op.must(4) != layout.on(0):
        raise Meets("the examples are not on the axis of its sequences")
    if op.attribute("dropout").f:
        raise Meets("it draws random numbers")
    return Outcome([layout, layout, layout if has_cells else INDEPENDENT, OPAQUE, OPAQUE])


@rule("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def projective_transform(op: Op) -> Layout:
    """One transform for each image, or one for all images."""
    if op.layout(1) is None and op.dims(1)[0] == 1:
        return on_first_axis(op, [0])
    return on_first_axis(op, [0, 1])


@rule("AvgPoolGrad", "AvgPool3DGrad", shapes=(0,))
def average_pool_gradient(op: Op) -> Layout:
    """Takes the shape of its output."""
    return on_first_axis(op, [1])


@rule("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput", shapes=(0,))
def convolution_gradient_by_input(op: Op) -> Layout:
    """Takes the shape of its output."""
    return on_first_axis(op, [2])


@rule("Conv2DBackpropFilter", "Conv3DBackpropFilterV2")
@rule("DepthwiseConv2dNativeBackpropFilter", "Dilation2DBackpropFilter")
def convolution_gradient_by_filter(op: Op) -> Outcome:
    """A product that contracts the examples of an input with those of a gradient."""
    on_first_axis(op, [0, 2])
    return Outcome([None], "product")


@rule("MaxPoolWithArgmax", "MaxPoolGradWithArgmax")
def pool_with_indices(op: Op) -> Layout:
    """The indices are within an example, or within the batch."""
    if op.attribute("include_batch_in_index").b:
        raise Meets("indices within the batch")
    return on_first_axis(op, list(range(op.count)))


@rule("AdjustContrastv2")
def contrast(op: Op) -> Layout:
    """By the mean of the last three axes."""
    return _before_last(op, 3)


@rule("AdjustHue", "AdjustSaturation", "HSVToRGB", "RGBToHSV")
def colours(op: Op) -> Layout:
    """Of the last axis."""
    return _before_last(op, 1)


def _before_last(op: Op, count: int) -> Layout:
    layout = op.one()
    if layout.axis >= op.rank() - count:
        raise Meets("it works on the axis of the examples")
    return layout


@rule("SpaceToBatchND", "SpaceToBatch")
def space_to_batch(op: Op) -> Layout:
    """Places within a block come before the examples on the first axis."""
    layout = _batch_and_block(op)
    return layout._replace(blocks=layout.blocks * _block(op))


@rule("BatchToSpaceND", "BatchToSpace")
def batch_to_space(op: Op) -> Layout:
    """The reverse of `space_to_batch`."""
    layout = _batch_and_block(op)
    blocks, rest = divmod(layout.blocks, _block(op))
    if rest:
        raise Meets("the examples are not in the order of `space_to_batch`")
    return layout._replace(blocks=blocks)


def _batch_and_block(op: Op) -> Layout:
    layout = op.one()
    if layout.axis != 0:
        raise Meets("the examples are not on its first axis")
    return layout


def _block(op: Op) -> int:
    """Return the number of places within a block."""
    if op.type.endswith("ND"):
        return int(op.constant(1).prod())
    return int(op.attribute("block_size").i) ** 2


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def batch_norm(op: Op) -> Outcome:
    """In training, statistics over all axes but that of the features, and rows behind them."""
    layout = op.must(0)
    count = len(op.node.dtypes)
    if layout.axis == op.features():
        return _normalised_apart(op, count)
    op.only(0)
    if not op.attribute("is_training").b:
        if any(state is not None for state in op.states[3:]):  # which it returns
            raise Meets("its statistics depend on the examples")
        return _outcome(count, layout, INDEPENDENT, INDEPENDENT, INDEPENDENT, INDEPENDENT, OPAQUE)
    return Outcome([layout] + [None] * (count - 1), "moments", is_behind=True)


def _outcome(count: int, *outputs: Union[Layout, str, None]) -> Outcome:
    """Return the outcome for as many outputs as a version of an operation has."""
    return Outcome(outputs[:count])


def _normalised_apart(op: Op, count: int) -> Outcome:
    """Layer normalisation: the examples are in the place of the features, each with its own statistics."""
    layout = op.must(0)
    statistics = layout.on(0)
    for index in range(1, op.count):
        if op.layout(index) not in (None, statistics) or (op.layout(index) is None and op.dims(index) != [0]):
            raise Meets(f"nothing proves that input {index} is the same for all examples")
    if not op.attribute("is_training").b:
        raise Meets("the examples are on the axis of the features")
    return _outcome(count, layout, statistics, statistics, statistics, statistics, OPAQUE)


@rule("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3")
def batch_norm_gradient(op: Op) -> Outcome:
    """In training, rows behind sums over the examples; otherwise rows, beside such sums."""
    layout = op.same([0, 1])
    count = len(op.node.dtypes)
    if layout.axis == op.features():
        return _gradient_of_normalised_apart(op, count)
    op.only(0, 1)
    how = "moments" if op.attribute("is_training").b else "sum"
    outcome = _outcome(count, layout, None, None, INDEPENDENT, INDEPENDENT)
    return outcome._replace(how=how, is_behind=how == "moments")


def _gradient_of_normalised_apart(op: Op, count: int) -> Outcome:
    layout = op.must(0)
    statistics = layout.on(0)
    if any(op.layout(index) != statistics for index in (2, 3, 4)) or not op.attribute("is_training").b:
        raise Meets("the examples are on the axis of the features")
    return _outcome(count, layout, statistics, statistics, INDEPENDENT, INDEPENDENT)


@rule("BlockLSTM", "BlockLSTMV2")
def block_lstm(op: Op) -> Outcome:
    """A sequence of [time, examples, features]; states of [examples, features]."""
    _sequence_and_states(op, (1,), (2, 3))
    return Outcome([op.must(1)] * len(op.node.dtypes))


@rule("BlockLSTMGrad", "BlockLSTMGradV2")
def block_lstm_gradient(op: Op) -> Outcome:
    """The gradients by weights are sums over the examples."""
    _sequence_and_states(op, (1, *range(9, 18)), (2, 3))
    return Outcome([op.must(1), op.must(2), op.must(3)] + [None] * (len(op.node.dtypes) - 3), "product")


def _sequence_and_states(op: Op, sequences: Tuple[int, ...], states: Tuple[int, ...]) -> None:
    op.only(*sequences, *states)
    if op.same(sequences).axis != 1 or op.same(states) != op.must(1).on(0):
        raise Meets("the examples are on different axes of its inputs")
