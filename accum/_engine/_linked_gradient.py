"""Tensors with a gradient that a function computes, which a tape can also differentiate again."""

from typing import Callable, Dict, List, Optional, Sequence, Tuple, Union

from accum import _check, _tf
from accum._engine._gradients import GradientFunction, custom_gradient
from accum._tf import Gradient, tf


def with_gradient(
    tensors: Sequence[tf.Tensor],
    sources: Sequence[Union[tf.Variable, tf.Tensor]],
    inputs: Sequence[tf.Tensor],
    backward: Callable[[Sequence[tf.Tensor]], Sequence[Optional[Gradient]]],
    at_once: Callable[[], Tuple[List[tf.Tensor], Dict[int, tf.Tensor]]],
) -> List[tf.Tensor]:
    """Return `tensors` such that a tape finds their gradients by `sources` with the function `backward`.

    A tape that needs their gradients by `inputs` raises `ValueError`, because nobody computes them. One that
    differentiates the gradients again computes `tensors` anew for the whole batch.

    Args:
      tensors: list of float tensors.
      sources: list of trainable variables and of tensors.
      inputs: list of the other float tensors from which `tensors` were computed.
      backward: function of the gradients by `tensors`, which returns those by `sources`, None for no gradient.
      at_once: function that computes `tensors` again in the current graph. It returns them, and {id of the handle of a
        variable in this graph: the value from which they are computed}.
    """
    values = [tf.convert_to_tensor(source) for source in sources]
    probes = [_without_gradient(tensor) for tensor in inputs]

    @custom_gradient
    def linked(*args: tf.Tensor) -> Tuple[List[tf.Tensor], GradientFunction]:
        def grad(*upstream: tf.Tensor) -> List[Optional[Gradient]]:
            if _tf.graphs.is_vectorized_here() and any(map(_tf.watching.is_recorded, values)):
                # TensorFlow makes it anew, without its own gradient. It would put another message before a ValueError.
                raise RuntimeError(NOT_IN_JACOBIAN)
            grads: List[Optional[Gradient]] = [None] * len(tensors)
            by_sources = _with_second_gradient(list(backward(upstream)), sources, values, upstream, at_once)
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
    at_once: Callable[[], Tuple[List[tf.Tensor], Dict[int, tf.Tensor]]],
) -> List[Optional[Gradient]]:
    """Return gradients such that a tape differentiates them by what they depend on, for the whole batch at once.

    Args:
      grads: list of gradients by `sources`.
      sources, at_once: as for `with_gradient`.
      values: the values of `sources`.
      upstream: list of the gradients by the results of `at_once`.
    """
    depends_on = [*values, *upstream]
    dense = [index for index, grad in enumerate(grads) if isinstance(grad, tf.Tensor)]

    def in_function(*cotangents: tf.Tensor) -> List[tf.Tensor]:
        tensors, states = at_once()
        handles = [
            _tf.graph_parts.captured(source.handle if hasattr(source, "handle") else source) for source in sources
        ]
        # A variable is read before, and by its handle where a table or a loop reads it.
        by = handles + [states[id(handle)] for handle in handles if id(handle) in states]
        of = [_tf.graph_parts.captured(one) for one in upstream]

        def by_sources(ys: Sequence[tf.Tensor], grad_ys: Sequence[tf.Tensor]) -> List[Optional[tf.Tensor]]:
            try:
                found = tf.gradients(ys, by + of, grad_ys)
            except (LookupError, ValueError) as error:  # of a function or, in 2.2, a loop that can't be differentiated
                raise ValueError(NOT_TWICE) from error
            grads = [None if grad is None else tf.convert_to_tensor(grad) for grad in found]
            following = iter(grads[len(handles) :])
            pairs = [(grad, next(following) if id(handle) in states else None) for grad, handle in zip(grads, handles)]
            sums = [
                tf.add_n(both) if both else None
                for both in ([one for one in pair if one is not None] for pair in pairs)
            ]
            return sums + list(following)

        first = by_sources(tensors, of)
        pairs = [(first[index], cotangent) for index, cotangent in zip(dense, cotangents) if first[index] is not None]
        second = by_sources([one for one, _ in pairs], [other for _, other in pairs])
        return [tf.zeros_like(value) if grad is None else grad for grad, value in zip(second, depends_on)]

    def differentiate(*cotangents: tf.Tensor) -> List[Optional[tf.Tensor]]:
        if _tf.graphs.is_gradient_of_branch():
            raise ValueError(NOT_IN_BRANCH)
        _check.warn(
            "A gradient of a gradient is computed for the whole batch at once, which is exact but saves no memory."
            " [accum: not-split]"
        )
        # In a function of its own, one source does not depend on another one.
        seconds = tf.function(_tf.graphs.run_as_written(in_function))(*cotangents)
        seconds = _without_gradient_by(seconds, [*cotangents, *depends_on], NOT_THRICE)
        return [None] * len(dense) + seconds  # type: ignore[operator]

    result = _linked([grads[index] for index in dense], depends_on, differentiate)
    slices = [index for index, grad in enumerate(grads) if isinstance(grad, tf.IndexedSlices)]
    rows = _without_gradient_by([grads[index].values for index in slices], depends_on)  # type: ignore[union-attr]
    ended = list(grads)
    for index, grad in zip(dense, result):
        ended[index] = grad
    for index, row in zip(slices, rows):
        ended[index] = tf.IndexedSlices(row, grads[index].indices, grads[index].dense_shape)  # type: ignore[union-attr]
    return ended


def _without_gradient_by(
    tensors: Sequence[tf.Tensor], sources: Sequence[tf.Tensor], message: str = NOT_TWICE
) -> List[tf.Tensor]:
    """Return tensors, and raise if a tape differentiates them by what they depend on."""

    def refuse(*_upstream: tf.Tensor) -> None:
        raise ValueError(message)

    return _linked(tensors, sources, refuse)


def _linked(
    tensors: Sequence[tf.Tensor], sources: Sequence[tf.Tensor], grad: Callable[..., Optional[Sequence[object]]]
) -> List[tf.Tensor]:
    """Return tensors whose gradient by themselves and `sources` is that of a function."""
    count = len(tensors)
    if not count:
        return []
    return list(custom_gradient(lambda *args: ([tf.identity(arg) for arg in args[:count]], grad))(*tensors, *sources))
