"""The frontier of what is inside: which operations take tensors from there, and so take joined rows."""

from typing import Dict, List, NamedTuple, Sequence, Set

from accum import _tf
from accum._engine._part import Key
from accum._tf import tf
from accum.compat.v1._inside import Inside

SCOPE = "accum_split_batch"


class Edge(NamedTuple):
    """Which operation takes a tensor, as which of its inputs."""

    op: tf.Operation
    place: int


class Frontier(NamedTuple):
    """What others take from inside.

    Attributes:
      rows: {key of rows: where they are taken}.
      sizes: {key of a number that depends on lengths: where it is taken}.
    """

    rows: Dict[Key, List[Edge]]
    sizes: Dict[Key, List[Edge]]


def repoint(edges: Sequence[Edge], tensor: tf.Tensor) -> None:
    """Let operations take `tensor`."""
    for op, index in edges:
        _tf.graphs.replace_input(op, index, tensor)


def inside_before(graph: tf.Graph) -> Set[tf.Operation]:
    """Return the operations that earlier calls have copied: the gradients of the originals are still needed."""
    ops: Set[tf.Operation] = _tf.graphs.notes_of(graph).setdefault(SCOPE, set())
    return ops


def frontier_of(inside: Inside, is_whole: bool) -> Frontier:
    """Return what others take from inside.

    Args:
      inside: what of a graph is inside.
      is_whole: whether all rows are computed in each run, so that large ones that losses do not need are left out.
    """
    rows: Dict[Key, List[Edge]] = {}
    sizes: Dict[Key, List[Edge]] = {}
    before = _known_before(inside)
    before_losses = inside.before_losses_as_built
    for op in inside.graph.get_operations():
        if inside.is_covered(op) or op in before or op in inside_before(inside.graph):
            continue
        for index, tensor in enumerate(op.inputs):
            image = inside.image(tensor)
            if image is None or not _gives_rows(inside, image):
                continue
            if _tf.graphs.outermost_frame(tensor.op) is not None and not _tf.graphs.leaves_frame(tensor.op):
                continue  # within a loop, that of the losses
            if is_whole and op not in before_losses and not _is_small(image):
                continue
            kind = sizes if inside.analysis.is_size(image.name) else rows
            kind.setdefault(tensor.name, []).append(Edge(op, index))
    for tensor in inside.losses:
        image = inside.image(tensor)
        if image is not None and _gives_rows(inside, image):
            rows.setdefault(tensor.name, [])
    for key in sizes:
        for tensor in rows_behind(inside, key):
            rows.setdefault(tensor.name, [])
    return Frontier(rows, sizes)


def _gives_rows(inside: Inside, tensor: tf.Tensor) -> bool:
    return tensor.op in inside.ops and tensor.op in inside.of_variables and not inside.is_statistic(tensor)


def _known_before(inside: Inside) -> Set[tf.Operation]:
    """Return the operations from which rows inside take numbers of the batch, which can't wait for the loop."""
    of_rows = [op for op in inside.ops if any(inside.analysis.holds_rows(one.name) for one in op.outputs)]
    ops = inside.ops.intersection(_tf.op_walks.ancestors(of_rows))
    taken = [tensor.op for op in ops for i, tensor in enumerate(op.inputs) if inside.is_taken(op, i)]
    return inside.depending.intersection(_tf.op_walks.ancestors(taken, with_control=True))


def rows_behind(inside: Inside, key: Key) -> List[tf.Tensor]:
    """Return the rows whose lengths a number depends on."""
    found: Dict[Key, tf.Tensor] = {}
    stack = [inside.graph.get_tensor_by_name(key)]
    while stack:
        for tensor in stack.pop().op.inputs:
            image = inside.image_of(tensor)
            if inside.analysis.layout(image.name) is not None:
                found[tensor.name] = tensor
            elif image.op in inside.ops:
                stack.append(tensor)
    return [tensor for tensor in found.values() if tensor.name not in inside.fed]


def statistics_taken(inside: Inside) -> Dict[Key, List[Edge]]:
    """Return {key of a statistic of examples inside: where it is taken by others, such as moving averages}."""
    edges: Dict[Key, List[Edge]] = {}
    for op in inside.graph.get_operations():
        for index, tensor in enumerate(op.inputs if _takes_statistics(inside, op) else ()):
            image = inside.image(tensor)
            is_inside = image is not None and image.op in inside.ops and inside.is_statistic(image)
            if is_inside and (inside.branches is None or _tf.graphs.outermost_frame(tensor.op) is None):
                edges.setdefault(tensor.name, []).append(Edge(op, index))
    return edges


def _takes_statistics(inside: Inside, op: tf.Operation) -> bool:
    """Whether an operation is outside, or in a conditional that moves averages."""
    frame = None if inside.branches is None else inside.branches.frame_of(op)
    return not inside.is_covered(op) or (frame is not None and frame.has_effects)


def _is_small(tensor: tf.Tensor) -> bool:
    """Whether rows have few numbers for each example, at most 4,096."""
    lengths = tensor.shape.as_list()[1:] if tensor.shape.rank else []
    return None not in lengths and tf.TensorShape(lengths).num_elements() <= 4096
