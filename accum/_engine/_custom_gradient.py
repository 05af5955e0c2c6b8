"""Functions with a custom gradient that release the model once the step has been traced."""

import contextlib
import threading
import weakref
from typing import Any, Callable, Iterator, List, Optional, Tuple

from accum._tf import Nested, tf

GradientFunction = Callable[..., Nested]
"""A function of the gradients by results, which returns those by arguments."""

DifferentiatedFunction = Callable[..., Tuple[List[tf.Tensor], GradientFunction]]
"""A function that returns a list of results, and their gradient function."""

_in_this_thread = threading.local()  # .kept: list of (gradient function, list of results) of the current step, or None


@contextlib.contextmanager
def keeping_gradients() -> Iterator[None]:
    """Keep the gradient functions that are made in this context until it ends. Gradients must be computed in it."""
    before = getattr(_in_this_thread, "kept", None)
    kept: List[Tuple[GradientFunction, List[Optional[tf.Tensor]]]] = []
    _in_this_thread.kept = kept
    try:
        yield
    finally:
        _in_this_thread.kept = before
        for _, results in kept:
            results[:] = [None] * len(results)  # whose number TensorFlow compares
        kept.clear()


def custom_gradient(
    function: DifferentiatedFunction,
) -> Callable[..., List[tf.Tensor]]:
    """Decorate a function as `tf.custom_gradient` does; within `keeping_gradients`, its gradient ends with that.

    In a graph, TensorFlow registers the gradient function under a new name, for ever, with everything that it refers
    to. From 2.11 on, this includes the results, and by them the graph and the variables of a model.

    Args:
      function: function of tensors that returns (list of results, function of the gradients by them).
    """
    kept = getattr(_in_this_thread, "kept", None)
    if kept is None or tf.executing_eagerly():  # eagerly, the tape holds the gradient function
        return tf.custom_gradient(function)

    def briefly_kept(*args: tf.Tensor) -> Tuple[List[tf.Tensor], GradientFunction]:
        results, grad = function(*args)
        kept.append((grad, results))
        reference: Any = weakref.ref(grad)

        def while_kept(*upstream: tf.Tensor) -> Nested:
            if not kept:
                raise ValueError(
                    "What was computed over a whole batch has been differentiated once and can't be again, because a "
                    "graph would keep all it needs for ever: use the gradients that were returned with it, or pass it "
                    "through `tf.stop_gradient`."
                )
            return reference()(*upstream)

        return results, while_kept

    return tf.custom_gradient(briefly_kept)
