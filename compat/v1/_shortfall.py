"""What `split_batch` says where it can't split a graph, or little of it, and why."""

from typing import Container, Sequence, Set

from accum import _check, _tf
from accum._tf import tf
from accum.compat.v1._inside import Inside


def require_before_optimizer(inside: Inside) -> None:
    """Raise if an optimizer has used what is computed from the batch."""
    if inside.steps:
        raise ValueError(
            "`split_batch` must be called before the gradients of the loss are taken: move it between the losses "
            f"and the first optimizer, and pass it all losses of the batch. Received: {inside.steps[0]!r}."
        )


def require_apart(inside: Inside) -> None:
    """Raise if examples may meet before `outputs`."""
    wrong = [one.name for one in inside.ends if one.op not in inside.ops or inside.analysis.layout(one.name) is None]
    if wrong:
        raise ValueError(
            "The batch can't be split up to `outputs`, before which each example must be computed by itself, from "
            f"`batch` and variables. {_meeting(inside, inside.before_outputs)} Received: {wrong}. [accum: split-batch]"
        )


def require_gain(inside: Inside, rows: Container[str]) -> None:
    """Raise if nothing is inside, so that there are no rows to be joined."""
    if not rows:
        raise ValueError(
            "`split_batch` needs operations that take the examples of `batch` and variables, and that keep the "
            f"examples apart, before any in which they may meet. {_shortfall(inside)} Received: "
            f"{[one.name for one in inside.received]}. [accum: split-batch]"
        )


@_check.rule
def warn_of_little(parts: Sequence[Inside]) -> None:
    """Warn if little is inside all parts of a graph that are split, one behind the other."""
    using, _ = parts[0].using()
    split = sum(len(one.using()[1]) for one in parts)
    if 2 * split < len(using):
        _check.warn(
            f"`split_batch` computes {split} of {len(using)} operations with variables in micro-batches, and "
            f"the others from the whole batch, with the memory that this takes. {_shortfall(parts[-1])}"
            " [accum: not-split]"
        )


def require_shapes(unknown: Sequence[tf.Tensor], what: str) -> None:
    """Raise if any tensor is passed. `what` says which property of them is unknown, such as the number of axes."""
    if unknown:
        raise ValueError(
            f"The {what} of each tensor that is split must be known: set the shape of what it is computed from. "
            f"Received: {[tensor.name for tensor in unknown]}. [accum: unknown-shape]"
        )


def _shortfall(inside: Inside) -> str:
    """Return sentences about where examples may meet, and about data that is not in the batch."""
    words = [_loop_behind_statistics(inside) or _meeting(inside, inside.before_losses)]
    if inside.branches is None and len(inside.choosers()) > 1:
        names = sorted(tensor.name for tensor in inside.choosers())
        words.append(f"If one of {names} says whether this is training, pass its value as `given`.")
    if inside.constant is not None:
        words.append(f"{inside.named(inside.constant)} only takes a constant number of examples.")
    if inside.constant is not None or inside.reason:
        words.append(f"{inside.reason} Use `tf.shape(x)[0]`, or -1, in place of a number.".strip())
    data = [op for op in inside.before_losses if _tf.op_walks.gives_data(op)]
    known = {one.name for one in inside.fed.values()} | set(inside.fed)
    known |= {one.op.inputs[0].name for one in inside.batch if one.op.type == "PlaceholderWithDefault"}
    lacking = [one for op in data for one in op.outputs if one.name not in known and _has_examples(one)]
    missing = [f"{inside.source(one.op).name}:{one.value_index}" for one in lacking]
    if missing:
        words.append(f"`batch` lacks {sorted(missing)}.")
    return " ".join(filter(None, words))


def _loop_behind_statistics(inside: Inside) -> str:
    """Return a sentence about a loop or conditional that is not split, although it keeps examples apart."""
    loops = [op for op in inside.of_batch if op in inside.before_losses and op not in inside.ops]
    loops = [op for op in loops if _tf.graphs.is_within_loop(op) or op.type in _tf.graph_parts.LOOPS]
    if not loops or not inside.statistics:
        return ""
    return f"A loop or conditional behind batch normalisation is not split: that of {inside.named(loops[0])}."


def _meeting(inside: Inside, before: Set[tf.Operation]) -> str:
    """Return a sentence about the first of these operations in which examples may meet."""
    outside = [op for op in inside.graph.get_operations() if op in before and op not in inside.ops]
    verdicts = [(op, inside.analysis.verdict(op.name)) for op in outside]
    meeting = [(op, one) for op, one in verdicts if one is not None and one.kind in ("meets", "reduces")]
    using = [(op, verdict) for op, verdict in meeting if op in inside.of_variables]
    meeting.sort(key=lambda one: one[1].kind == "reduces")  # what data is reduced to can be known before
    for op, verdict in ((using if inside.ops & inside.of_variables else []) or meeting)[:1]:
        said = f"Examples may meet first in {inside.named(op)}: {verdict.how}."
        is_unknown = op.type in inside.analysis.unruled and not inside.outputs
        remedy = " If it keeps them apart, pass the tensors up to which all operations do as `outputs`"
        other = "" if op in inside.of_variables else ", or its result as a part of `batch`"
        return said + (f"{remedy}{other}." if is_unknown else "")
    return ""


def _has_examples(tensor: tf.Tensor) -> bool:
    """Whether a tensor of data may have the examples along its first axis."""
    return tensor.shape.rank is None or (tensor.shape.rank > 0 and tensor.shape.as_list()[0] is None)
