"""Rules of operations that move, join, cut or repeat axes."""

from typing import List, NamedTuple, Optional, Tuple

from accum._rows._rules import Meets, Op, product, rule
from accum._rows._states import Layout


@rule("Reshape", shapes=(1,))
def reshape(op: Op) -> Layout:
    """What comes before the examples stays before them, and what belongs to one stays together."""
    op.only(0)
    layout = op.layout(0)
    (axis, factor), *others = op.multiples().items() or [(-1, 0)]
    if others or axis < 0:
        raise Meets("the examples are not on one axis of its output")
    if not op.is_length(1, axis, factor):
        raise Meets("the length of an axis is no multiple of the number of examples")
    if layout is None:
        raise Meets("its input has no axis of examples")
    before, after = product(op.dims(0)[: layout.axis]) * layout.blocks, product(op.output_dims()[:axis])
    if not after:
        raise Meets("it has no entries")
    blocks, rest = divmod(before, after)
    per_example, more = divmod(factor, blocks) if blocks else (0, 1)
    if rest or more:
        raise Meets("it takes examples apart")
    return Layout(axis, per_example, blocks)


@rule("Transpose", "ConjugateTranspose")
def transpose(op: Op) -> Layout:
    """The axes in another order."""
    layout = op.one()
    return layout.on([int(axis) for axis in op.constant(1)].index(layout.axis))


@rule("ExpandDims")
def expand_dims(op: Op) -> Layout:
    """A new axis of one entry."""
    layout = op.one()
    (axis,) = op.axes(1, op.rank() + 1)
    return layout.on(layout.axis + (axis <= layout.axis))


@rule("Squeeze")
def squeeze(op: Op) -> Layout:
    """Without certain axes of one entry; if all such are meant, a single example's would be among them."""
    layout = op.one()
    axes = {op.axis(axis, op.rank()) for axis in op.attribute("squeeze_dims").list.i}
    if not axes or layout.axis in axes:
        raise Meets("it removes the axis of a single example")
    return layout.on(layout.axis - sum(axis < layout.axis for axis in axes))


@rule("ConcatV2", "Concat")
def concat(op: Op) -> Layout:
    """Side by side on another axis; on that of the examples they become blocks."""
    place = op.count - 1 if op.type == "ConcatV2" else 0
    parts = [index for index in range(op.count) if index != place]
    op.only(*parts)
    layouts = [op.must(index) for index in parts]
    (axis,) = op.axes(place, op.rank(parts[0]))
    if len({layout._replace(blocks=0 if layout.axis == axis else layout.blocks) for layout in layouts}) != 1:
        raise Meets("the examples are on different axes of its inputs")
    first = layouts[0]
    if first.axis != axis:
        return first
    return first._replace(blocks=sum(layout.blocks for layout in layouts))


@rule("Pack")
def pack(op: Op) -> Layout:
    """Side by side on a new axis."""
    layout = op.same(range(op.count))
    axis = op.axis(op.attribute("axis").i, op.output_rank())
    return layout.on(layout.axis + (axis <= layout.axis))


@rule("Unpack")
def unpack(op: Op) -> Layout:
    """The entries of another axis."""
    layout = op.one()
    axis = op.axis(op.attribute("axis").i, op.rank())
    if axis == layout.axis:
        raise Meets("it takes the examples one by one")
    return layout.on(layout.axis - (axis < layout.axis))


@rule("Split", "SplitV")
def split(op: Op) -> Layout:
    """Parts of another axis; of that of the examples, equally many blocks."""
    data, place = (1, 0) if op.type == "Split" else (0, 2)
    layout = op.one(data)
    (axis,) = op.axes(place, op.rank(data))
    if axis != layout.axis:
        return layout
    blocks, rest = divmod(layout.blocks, len(op.node.dtypes))
    if rest or op.type == "SplitV":
        raise Meets("it divides the examples")
    return layout._replace(blocks=blocks)


@rule("Slice", shapes=(2,))
def slice_of(op: Op) -> Layout:
    """All examples, and some entries of the other axes."""
    layout = op.one()
    lengths = op.number(2, layout.axis)
    are_all = all(length == -1 for length in lengths) or op.layout_is(layout, lengths)
    if any(op.number(1, layout.axis)) or not are_all:
        raise Meets("it takes some of the examples")
    return layout


class Cut(NamedTuple):
    """What a strided slice does with an axis of its input.

    Attributes:
      place: where it stands in the slice's numbers; None if nothing is said about the axis.
      output: the axis of the output; None if it is removed.
    """

    place: Optional[int]
    output: Optional[int]


def cuts_of(op: Op, rank: int, count: int) -> List[Cut]:
    """Return what a strided slice does with each axis of an input.

    Args:
      op: an `Op` with the masks of a strided slice.
      rank: the rank of what is sliced.
      count: for how many places it has numbers.
    """
    new, shrink, ellipsis = (op.attribute(f"{name}_mask").i for name in ("new_axis", "shrink_axis", "ellipsis"))
    taken = sum(not (new | ellipsis) >> place & 1 for place in range(count))
    cuts: List[Cut] = []
    output = 0
    for place in range(count):
        if ellipsis >> place & 1:
            for _ in range(rank - taken):
                cuts.append(Cut(None, output))
                output += 1
        elif new >> place & 1:
            output += 1
        elif shrink >> place & 1:
            cuts.append(Cut(place, None))
        else:
            cuts.append(Cut(place, output))
            output += 1
    while len(cuts) < rank:
        cuts.append(Cut(None, output))
        output += 1
    return cuts


@rule("StridedSlice")
def strided_slice(op: Op) -> Layout:
    """All examples, and some entries of the other axes."""
    layout = op.one()
    cut = cuts_of(op, op.rank(), _places(op, 1))[layout.axis]
    if cut.output is None or not _is_whole(op, cut.place, layout, 1):
        raise Meets("it takes some of the examples")
    return layout.on(cut.output)


def _places(op: Op, index: int) -> int:
    (count,) = op.dims(index)
    if count is None:
        raise Meets("the length of a slice's numbers is not known")
    return count


def _is_whole(op: Op, place: Optional[int], layout: Layout, first: int) -> bool:
    """Whether a strided slice takes all of an axis; its begin, end and strides are inputs, from `first` on."""
    if place is None:
        return True
    if any(int(stride[place]) != 1 for stride in op.by_size(first + 2)):
        return False
    begins_first = op.attribute("begin_mask").i >> place & 1
    begins_first = begins_first or not any(int(begin[place]) for begin in op.by_size(first))
    ends_last = op.attribute("end_mask").i >> place & 1
    ends_last = ends_last or op.layout_is(layout, [end[place] for end in op.by_size(first + 1)])
    return bool(begins_first and ends_last)


@rule("StridedSliceGrad", shapes=(0,))
def strided_slice_gradient(op: Op) -> Layout:
    """Zeros of a shape, with a gradient in the place of a slice."""
    layout = op.one(4)
    cuts = cuts_of(op, op.output_rank(), _places(op, 1))
    axes = [axis for axis, cut in enumerate(cuts) if cut.output == layout.axis]
    if len(axes) != 1 or not _is_whole(op, cuts[axes[0]].place, layout, 1):
        raise Meets("it places the examples among others")
    return layout.on(axes[0])


@rule("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def pad(op: Op) -> Layout:
    """More entries of other axes."""
    layout = op.one()
    if op.constant(1)[layout.axis].any():
        raise Meets("it pads the axis of the examples")
    return layout


@rule("Tile", shapes=(1,))
def tile(op: Op) -> Layout:
    """Repeated on other axes; what is the same for all examples can be repeated for each."""
    op.only(0)
    layout = op.layout(0)
    if layout is not None:
        times = set(map(int, op.number(1, layout.axis)))
        if len(times) != 1:
            raise Meets("it repeats the examples by a number that is not constant")
        return layout._replace(blocks=layout.blocks * times.pop())
    (axis, factor), *others = op.multiples().items() or [(-1, 0)]
    length = op.dims(0)[axis]
    if others or axis < 0 or not length:
        raise Meets("the examples are not on one axis of its output")
    times_each = Layout(axis, factor // length)
    if factor % length or not op.layout_is(times_each, op.number(1, axis)):
        raise Meets("the length of an axis is no multiple of the number of examples")
    return Layout(axis, factor)


@rule("ReverseV2")
def reverse(op: Op) -> Layout:
    """Other axes backwards."""
    layout = op.one()
    if layout.axis in op.axes(1, op.rank()):
        raise Meets("it reverses the order of the examples")
    return layout


@rule("ReverseSequence")
def reverse_sequence(op: Op) -> Layout:
    """The first entries of one axis backwards, as many as is said for each entry of another one."""
    layout, (sequence, batch) = op.must(0), (op.attribute(name).i for name in ("seq_dim", "batch_dim"))
    if layout.axis == sequence or op.layout(1) not in (None, layout.on(0)):
        raise Meets("it reverses the order of the examples")
    if (layout.axis == batch) != (op.layout(1) is not None):
        raise Meets("its lengths are not those of the examples")
    return layout


@rule("Roll")
def roll(op: Op) -> Layout:
    """Other axes shifted."""
    layout = op.one()
    if layout.axis in op.axes(2, op.rank()):
        raise Meets("it shifts the examples")
    return layout


@rule("OneHot")
def one_hot(op: Op) -> Layout:
    """A new axis of classes."""
    layout, axis = op.one(), op.attribute("axis").i
    axis = op.rank() if axis == -1 else axis
    return layout.on(layout.axis + (axis <= layout.axis))


def _axes_of_gather(op: Op) -> Tuple[int, int]:
    """Return how many first axes are shared, and the axis of which entries are taken."""
    batch = op.attribute("batch_dims").i
    batch += op.rank(1) if batch < 0 else 0
    return batch, op.axes(2, op.rank(0))[0] if op.type == "GatherV2" else batch


@rule("Gather", "GatherV2", "ResourceGather")
def gather(op: Op) -> Layout:
    """Entries of one axis, which are named by indices; first axes may be shared by both."""
    op.only(0, 1)
    data, indices = op.layout(0), op.layout(1)
    batch, axis = _axes_of_gather(op)
    count = op.rank(1)
    if data is not None and indices is not None:
        if data != indices or data.axis >= batch:
            raise Meets("it takes entries of other examples")
        return data
    if indices is not None:
        if indices.axis < batch:
            raise Meets("its first input has no axis of examples")
        return indices.on(axis + indices.axis - batch)
    data = op.must(0)
    if data.axis == axis or data.axis < batch:
        raise Meets("it takes some of the examples")
    return data if data.axis < axis else data.on(data.axis - 1 + count - batch)


@rule("GatherNd", "ResourceGatherNd")
def gather_nd(op: Op) -> Layout:
    """Entries that are named by their place, on the last axis of the indices."""
    layout = op.one(1)
    if layout.axis == op.rank(1) - 1:
        raise Meets("the examples are on the axis of a place")
    return layout
