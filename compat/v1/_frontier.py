"""The frontier of what is inside: which operations take tensors from there, and so take joined rows."""

from typing import Dict, Iterable, List, NamedTuple, Sequence, Set, Tuple

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
      sizes: {key of a number that depends on lengths, or of a shape: where it is taken}.
      early: the same, where it is taken by what rows inside wait for.
    """

    rows: Dict[Key, List[Edge]]
    sizes: Dict[Key, List[Edge]]
    early: Dict[Key, List[Edge]]


def repoint(edges: Sequence[Edge], tensor: tf.Tensor) -> None:
    """Let operations take `tensor`."""
    for op, index in edges:
        _tf.graphs.replace_input(op, index, tensor)


def edges_of(tensor: tf.Tensor) -> List[Edge]:
    """Return where a tensor is taken."""
    return [Edge(user, at) for user in tensor.consumers() for at, one in enumerate(user.inputs) if one is tensor]


def take_lengths_of_lists(graph: tf.Graph) -> None:
    """Let what takes the length of a list of TF 1 take the number that this was made with.

    TensorFlow asks a list for it behind the loop that fills it, which would be computed for the whole batch.
    """
    for op in graph.get_operations():
        made = op.inputs[0].op if op.type == "TensorArraySizeV3" else None
        if made is None or made.type != "TensorArrayV3" or made.get_attr("dynamic_size"):
            continue
        if _tf.frames.contexts_of(made) == _tf.frames.contexts_of(op):
            repoint(edges_of(op.outputs[0]), made.inputs[0])


def inside_before(graph: tf.Graph) -> Set[tf.Operation]:
    """Return the operations that earlier calls have copied: the gradients of the originals are still needed."""
    ops: Set[tf.Operation] = _tf.graphs.notes_of(graph).setdefault(SCOPE, set())
    return ops


def frontier_of(inside: Inside, is_whole: bool) -> Frontier:
    """Return what others take from inside.

    Args:
      inside: what of a graph is inside.
      is_whole: whether all rows are computed in each run, so that large ones that losses do not need are left out,
        unless they are results of the network.
    """
    rows: Dict[Key, List[Edge]] = {}
    sizes: Dict[Key, List[Edge]] = {}
    early: Dict[Key, List[Edge]] = {}
    before = _known_before(inside)
    copied = inside.ops.union(one.op for op in inside.ops for one in op.inputs)  # with constants, which wait too
    needed = set(_tf.op_walks.ancestors(awaited(inside, copied), with_control=True))
    needed |= inside.before_losses_as_built
    results = _results_of_network(inside) if is_whole else set()
    for op in inside.graph.get_operations():
        if inside.is_covered(op) or op in inside_before(inside.graph):
            continue
        for index, tensor in enumerate(op.inputs):
            if is_of_shapes(inside, tensor):
                (early if op in before else sizes).setdefault(tensor.name, []).append(Edge(op, index))
                continue
            if op in before:
                continue
            image = inside.image(tensor)
            if image is None or not _gives_rows(inside, image) or any(_is_shape(inside, one) for one in op.outputs):
                continue
            if _is_framed(tensor.op):
                continue  # that of the losses
            if is_whole and op not in needed and not _is_small(image) and image.name not in results:
                continue
            kind = sizes if inside.analysis.is_size(image.name) else rows
            if kind is sizes and any(_is_framed(one.op) for one in taken_by_size(inside, tensor.name)[0]):
                continue  # the whole loop is computed for it
            kind.setdefault(tensor.name, []).append(Edge(op, index))
    for tensor in inside.losses:
        image = inside.image(tensor)
        if image is not None and _gives_rows(inside, image) and not inside.analysis.is_size(image.name):
            rows.setdefault(tensor.name, [])
    for key in sizes:
        for tensor in taken_by_size(inside, key)[0]:
            rows.setdefault(tensor.name, [])
    return Frontier(rows, sizes, early)


def _results_of_network(inside: Inside) -> Set[Key]:
    """Return the rows from which the losses are computed without a further variable, such as logits."""
    found: Set[Key] = set()
    stack = [image for image in map(inside.image, inside.losses) if image is not None]
    while stack:
        tensor = stack.pop()
        found.add(tensor.name)
        sources = [one for one in tensor.op.inputs if one.op in inside.of_variables]
        if all(one.op in inside.depending for one in sources):
            stack += [one for one in sources if one.name not in found]
    return found


def _is_framed(op: tf.Operation) -> bool:
    """Whether an operation is within a loop or conditional of TF 1."""
    return len(_tf.frames.contexts_of(op)) > int(_tf.graphs.leaves_frame(op))


def _gives_rows(inside: Inside, tensor: tf.Tensor) -> bool:
    return tensor.op in inside.ops and tensor.op in inside.of_variables and not inside.is_statistic(tensor)


def _known_before(inside: Inside) -> Set[tf.Operation]:
    """Return the operations from which rows inside take numbers of the batch, which can't wait for the loop."""
    of_rows = [op for op in inside.ops if any(inside.analysis.holds_rows(one.name) for one in op.outputs)]
    ops = inside.ops.intersection(_tf.op_walks.ancestors(of_rows))
    taken = [tensor.op for op in ops for i, tensor in enumerate(op.inputs) if inside.is_taken(op, i)]
    return inside.depending.intersection(_tf.op_walks.ancestors(taken, with_control=True))


def awaited(inside: Inside, ops: Iterable[tf.Operation]) -> Set[tf.Operation]:
    """Return the operations for which some of those inside wait, and that are outside, or there for their effect.

    Such as checks of shapes, or of examples.

    Args:
      inside: what is inside.
      ops: those that are copied.
    """
    own = set(ops if inside.branches is None else map(inside.branches.source, ops))
    found = {other for op in own for other in op.control_inputs if other not in own}
    found = {op for op in found if not inside.is_covered(op) or not any(one.consumers() for one in op.outputs)}
    found -= {op for op in found if op.type in ("Switch", "Const") or _is_framed(op)}
    return found - {tensor.op for tensor in inside.batch}


def is_of_shapes(inside: Inside, tensor: tf.Tensor) -> bool:
    """Whether a tensor is computed from shapes of rows inside, and from nothing else inside."""
    stack, seen, has_shapes = [tensor], {tensor.name}, False
    while stack:
        one = stack.pop()
        if _is_shape(inside, one):
            has_shapes = True
            continue
        image = inside.image(one)
        if image is None or image.op in inside.of_variables:
            if image is None or image.op not in inside.ops or inside.analysis.layout(image.name) is not None:
                return False
            if _tf.graphs.is_within_loop(one.op):
                return False
            stack += [source for source in one.op.inputs if source.name not in seen]
            seen.update(source.name for source in one.op.inputs)
    return has_shapes


def _is_shape(inside: Inside, tensor: tf.Tensor) -> bool:
    """Whether a tensor is the shape of rows inside, outside of loops and conditionals of TF 1."""
    if tensor.op.type != "Shape" or not tensor.op.inputs[0].shape.rank:
        return False
    rows = tensor.op.inputs[0]
    image = inside.image(rows)
    is_of_rows = image is not None and _gives_rows(inside, image) and inside.analysis.layout(image.name) is not None
    return is_of_rows and not any(_tf.graphs.outermost_frame(op) is not None for op in (rows.op, tensor.op))


def taken_by_size(inside: Inside, key: Key) -> Tuple[List[tf.Tensor], List[tf.Tensor]]:
    """Return what a number depends on: shapes, and rows by whose lengths it does otherwise."""
    rows: Dict[Key, tf.Tensor] = {}
    shapes: Dict[Key, tf.Tensor] = {}
    stack, seen = [inside.graph.get_tensor_by_name(key)], {key}
    while stack:
        one = stack.pop()
        if _is_shape(inside, one):
            shapes[one.name] = one
            continue
        for tensor in one.op.inputs:
            image = inside.image_of(tensor)
            if tensor.name in seen or image.op not in inside.of_variables:
                continue
            seen.add(tensor.name)
            if inside.analysis.layout(image.name) is not None:
                rows[tensor.name] = tensor
            elif image.op in inside.ops:
                stack.append(tensor)
    return list(rows.values()), list(shapes.values())


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
