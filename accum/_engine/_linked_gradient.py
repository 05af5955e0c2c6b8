"""Tensors with a gradient that a function computes, which a tape can also differentiate again."""

import functools
from typing import Callable, Dict, List, Optional, Sequence, Set, Tuple, Union

from accum import _tf
from accum._engine._gradients import GradientFunction, custom_gradient
from accum._tf import Gradient, tf

Derive = Callable[[List[tf.Tensor], Dict[int, tf.Tensor], List[tf.Tensor]], List[tf.Tensor]]
"""What is computed from tensors that are computed again.

A function of them, of {id of the handle of a variable in the current graph: the value from which they are computed},
and of the entries of given tensors that belong to the same examples.
"""

Again = Callable[[Derive, Sequence[tf.Tensor], Sequence[bool], Sequence[tf.Tensor]], List[tf.Tensor]]
"""Computes tensors again in the current graph, for the whole batch or for each micro-batch, and what follows from them.

A function of a `Derive`; of the given tensors, whose first axis is the batch; and, for each result of the `Derive`,
whether its first axis is the batch, rather than a sum over examples, and a tensor of its shape for the whole batch. It
returns the results for the whole batch.
"""


def with_gradient(
    tensors: Sequence[tf.Tensor],
    sources: Sequence[Union[tf.Variable, tf.Tensor]],
    watched: Sequence[tf.Tensor],
    inputs: Sequence[tf.Tensor],
    backward: Callable[[Sequence[tf.Tensor]], Sequence[Optional[Gradient]]],
    again: Again,
) -> List[tf.Tensor]:
    """Return `tensors` such that a tape finds their gradients by `sources` and `watched` with the function `backward`.

    A tape that needs their gradients by `inputs` raises `ValueError`, because nobody computes them. One that
    differentiates the gradients again computes `tensors` anew.

    Args:
      tensors: list of float tensors, whose first axis is the batch, but for losses.
      sources: list of trainable variables and of tensors.
      watched: list of tensors whose first axis is the batch.
      inputs: list of the other float tensors from which `tensors` were computed.
      backward: function of the gradients by `tensors`, which returns those by `sources` and `watched`, None for no
        gradient.
      again: computes `tensors` again.
    """
    values = [tf.convert_to_tensor(source) for source in [*sources, *watched]]
    probes = [_without_gradient(tensor) for tensor in inputs]

    @custom_gradient
    def linked(*args: tf.Tensor) -> Tuple[List[tf.Tensor], GradientFunction]:
        def grad(*upstream: tf.Tensor) -> List[Optional[Gradient]]:
            if _tf.graphs.is_vectorized_here() and any(map(_tf.watching.is_recorded, values)):
                # TensorFlow makes it anew, without its own gradient. It would put another message before a ValueError.
                raise RuntimeError(NOT_IN_JACOBIAN)
            grads: List[Optional[Gradient]] = [None] * len(tensors)
            by_sources = _with_second_gradient(list(backward(upstream)), sources, values, upstream, again)
            return grads + by_sources + [tf.zeros_like(probe) for probe in probes]

        return [tf.identity(arg) for arg in args[: len(tensors)]], grad

    return list(linked(*[tf.stop_gradient(tensor) for tensor in tensors], *values, *probes))


def _without_gradient(tensor: tf.Tensor) -> tf.Tensor:
    """Return `tensor`, and raise if a tape needs a gradient by what it was computed from."""
    shown = repr(tensor)

    def grad(_upstream: tf.Tensor) -> None:
        raise ValueError(
            "With `whole_batch`, no gradient reaches this input of a layer, which no `tf.GradientTape` watched in the "
            f"call: call it within the tape, or pass the input through `tf.stop_gradient`. Received: {shown}."
            " [accum: whole-batch-gradient]"
        )

    (probe,) = custom_gradient(lambda value: ([tf.identity(value)], grad))(tensor)
    return probe


def _not_again(because: str) -> str:
    return (
        f"This gradient can't be differentiated again, as a penalty on it requires, because {because}; or, if the "
        "loss is a mean over examples that do not meet, pass `whole_batch=()`. [accum: whole-batch-gradient]"
    )


NOT_TWICE = _not_again(
    "the network has batch normalisation, an embedding, a loop, an operation that only acts, such as `tf.print`, one "
    "that draws what can't be drawn again, one with a gradient of its own, or a variable that it reads, assigns to and "
    "reads again: use a network without these"
)
NOT_THRICE = _not_again(
    "it is a gradient of a gradient already: compute the loss by `accum.value_and_gradients`, which takes any order"
)
NOT_IN_JACOBIAN = _not_again(
    "`tape.jacobian` and `tape.batch_jacobian` take it, within a tape: take `tape.gradient` of each output, or the "
    "Jacobian outside of the tape if no loss needs it"
)
NOT_IN_BRANCH = _not_again(
    "it is in a branch of `tf.cond`: compute it outside, and choose its value, as by `tf.where(chosen, penalty, 0.0)`"
)


def _with_second_gradient(
    grads: Sequence[Optional[Gradient]],
    sources: Sequence[Union[tf.Variable, tf.Tensor]],
    values: Sequence[tf.Tensor],
    upstream: Sequence[tf.Tensor],
    again: Again,
) -> List[Optional[Gradient]]:
    """Return gradients such that a tape differentiates them by what they depend on.

    Args:
      grads: list of gradients by `values`.
      sources, again: as for `with_gradient`.
      values: the values of `sources` and, after them, those that are watched.
      upstream: list of the gradients by the tensors that are computed again.
    """
    depends_on = [*values, *upstream]
    dense = [index for index, grad in enumerate(grads) if isinstance(grad, tf.Tensor)]
    asked: Set[int] = set()  # those whose gradient is taken: TensorFlow fills in zeros for the others
    are_rows = [index >= len(sources) for index in range(len(depends_on))]

    def in_function(*cotangents: tf.Tensor) -> List[tf.Tensor]:
        wanted = [(index, one) for index, one in zip(dense, cotangents) if index in asked]
        of_rows = [one for index, one in wanted if are_rows[index]]
        given = [one for one, has_rows in zip(depends_on, are_rows) if has_rows]

        def derive(tensors: List[tf.Tensor], states: Dict[int, tf.Tensor], parts: List[tf.Tensor]) -> List[tf.Tensor]:
            handles = [
                _tf.graph_parts.captured(source.handle if hasattr(source, "handle") else source) for source in sources
            ]
            by = handles + parts[: len(given)]
            of, of_cotangents = by[len(values) :], iter(parts[len(given) :])
            first = _gradients(tensors, by, of, states)
            pairs = [
                (first[index], next(of_cotangents) if are_rows[index] else _tf.graph_parts.captured(cotangent))
                for index, cotangent in wanted
            ]
            present = [(one, other) for one, other in pairs if one is not None]
            second = _gradients([one for one, _ in present], by, [other for _, other in present], states)
            like = [_tf.graph_parts.captured(value) for value in values[: len(sources)]] + by[len(sources) :]
            return [tf.zeros_like(value) if grad is None else grad for grad, value in zip(second, like)]

        return again(derive, given + of_rows, are_rows, depends_on)

    def differentiate(*cotangents: tf.Tensor) -> List[Optional[tf.Tensor]]:
        if _tf.graphs.is_gradient_of_branch():
            raise ValueError(NOT_IN_BRANCH)
        # In a function of its own, one source does not depend on another one.
        seconds = tf.function(_tf.graphs.run_as_written(in_function))(*cotangents)
        asked.clear()
        seconds = _without_gradient_by(seconds, [*cotangents, *depends_on], NOT_THRICE)
        return [None] * len(dense) + seconds  # type: ignore[operator]

    result = _linked([grads[index] for index in dense], depends_on, differentiate)
    slices = [index for index, grad in enumerate(grads) if isinstance(grad, tf.IndexedSlices)]
    rows = _without_gradient_by([grads[index].values for index in slices], depends_on)  # type: ignore[union-attr]
    ended = list(grads)
    for index, grad in zip(dense, result):
        ended[index] = noted(grad, functools.partial(asked.add, index))
    for index, row in zip(slices, rows):
        ended[index] = tf.IndexedSlices(row, grads[index].indices, grads[index].dense_shape)  # type: ignore[union-attr]
    return ended


def _gradients(
    tensors: Sequence[tf.Tensor],
    by: Sequence[tf.Tensor],
    cotangents: Sequence[tf.Tensor],
    states: Dict[int, tf.Tensor],
) -> List[Optional[tf.Tensor]]:
    """Return the gradients by handles of variables and by tensors, dense ones.

    A variable is read before, as one of `states`, and by its handle where a table or a loop reads it.
    """
    reads = [states[id(one)] for one in by if id(one) in states]
    try:
        found = tf.gradients(tensors, [*by, *reads], cotangents)
    except (LookupError, ValueError) as error:  # of a function or, in 2.2, a loop that can't be differentiated
        raise ValueError(NOT_TWICE) from error
    grads = [None if grad is None else tf.convert_to_tensor(grad) for grad in found]
    of_reads = iter(grads[len(by) :])
    pairs = [(grad, next(of_reads) if id(one) in states else None) for grad, one in zip(grads, by)]
    both = [[grad for grad in pair if grad is not None] for pair in pairs]
    return [tf.add_n(present) if present else None for present in both]


def _without_gradient_by(
    tensors: Sequence[tf.Tensor], sources: Sequence[tf.Tensor], message: str = NOT_TWICE
) -> List[tf.Tensor]:
    """Return tensors, and raise if a tape differentiates them by what they depend on."""

    def refuse(*_upstream: tf.Tensor) -> None:
        raise ValueError(message)

    return _linked(tensors, sources, refuse)


def noted(tensor: tf.Tensor, note: Callable[[], None]) -> tf.Tensor:
    """Return a tensor that calls a function where its gradient is computed."""

    def grad(upstream: tf.Tensor) -> List[tf.Tensor]:
        note()
        return [upstream]

    (result,) = custom_gradient(lambda value: ([tf.identity(value)], grad))(tensor)
    return result


def _linked(
    tensors: Sequence[tf.Tensor], sources: Sequence[tf.Tensor], grad: Callable[..., Optional[Sequence[object]]]
) -> List[tf.Tensor]:
    """Return tensors whose gradient by themselves and `sources` is that of a function."""
    count = len(tensors)
    if not count:
        return []
    return list(custom_gradient(lambda *args: ([tf.identity(arg) for arg in args[:count]], grad))(*tensors, *sources))
