"""Arithmetic on gradients: tensors, or `tf.IndexedSlices`, which hold rows whose indices may repeat.

Weight 0 gives 0 even for NaN, which is the mean of an empty micro-batch.

`custom_gradient` is `tf.custom_gradient`. Within `keeping_gradients`, it releases the model when that ends.
"""

import contextlib
import threading
import weakref
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

from accum import _tf
from accum._tf import Gradient, Nested, Scalar, tf

# --------------------------------------------------------------------------------------------------------------------
# Arithmetic


def cast(grad: Gradient, dtype: tf.DType) -> Gradient:
    return grad if grad.dtype == dtype else _tf.inner_optimizer.on_values(lambda values: tf.cast(values, dtype), grad)


def weighted(value: tf.Tensor, weight: Optional[Scalar]) -> tf.Tensor:
    """Return `weight * value`, a tensor."""
    if weight is None:
        return value
    return tf.math.multiply_no_nan(value, tf.cast(weight, value.dtype))


def divided(total: Optional[Gradient], weight: Optional[Scalar], dtype: Optional[tf.DType]) -> Optional[Gradient]:
    """Return a sum of gradients divided by `weight`, in `dtype` if there is one. Weight 0 gives 0."""

    def divide(values: tf.Tensor) -> tf.Tensor:
        if weight is not None:
            values = tf.math.divide_no_nan(values, tf.cast(weight, values.dtype))
        return values if dtype is None else tf.cast(values, dtype)

    return None if total is None else _tf.inner_optimizer.on_values(divide, total)


def mean(total: Gradient, weight: Scalar) -> Gradient:
    """Return a sum of gradients divided by `weight`, which is not 0."""
    return _tf.inner_optimizer.on_values(lambda values: values / tf.cast(weight, values.dtype), total)


def shifted(grad: Gradient, number: tf.Tensor) -> Gradient:
    """Return a gradient with a scalar added to each of its values."""
    return _tf.inner_optimizer.on_values(lambda values: values + tf.cast(number, values.dtype), grad)


def added(grad: Gradient, other: tf.Tensor, factor: tf.Tensor) -> Gradient:
    """Return `grad + factor * other` in the rows that `grad` has; `other` is dense."""
    if isinstance(grad, tf.IndexedSlices):
        other = tf.gather(other, grad.indices)
    term = other * tf.cast(factor, other.dtype)
    return _tf.inner_optimizer.on_values(lambda values: values + tf.cast(term, values.dtype), grad)


def with_each_row_once(grads: Sequence[Optional[Gradient]]) -> List[Optional[Gradient]]:
    """Return the gradients with the slices of each row added up, for what squares or clips them."""
    return [_tf.variables.summed_rows(grad) if isinstance(grad, tf.IndexedSlices) else grad for grad in grads]


def count_nonfinite(grads: Sequence[Optional[Gradient]]) -> tf.Tensor:
    """Count the gradients that contain NaN or infinity, as a float32 scalar."""
    flat = [tensor for tensor in tf.nest.flatten(grads, expand_composites=True) if tensor is not None]
    sizes = [tf.abs(tensor) for tensor in flat if tensor.dtype.is_floating or tensor.dtype.is_complex]
    return tf.add_n([tf.cast(tf.reduce_any(~tf.math.is_finite(size)), tf.float32) for size in sizes])


def entries_of(grad: Gradient) -> tf.Tensor:
    """Return a gradient as a tensor; of a sparse one the rows that it has, those of one index summed."""
    if not isinstance(grad, tf.IndexedSlices):
        return grad
    if _tf.graphs.is_compiled_by_xla_here():  # which does not know the number of different rows
        return tf.convert_to_tensor(grad)
    return _tf.variables.summed_rows(grad).values


def squared_norm(grads: Sequence[Optional[Gradient]]) -> tf.Tensor:
    """Return the sum of squares of all gradients, a float32 scalar. Rows of a sparse gradient are summed first.

    Args:
      grads: tensors, `tf.IndexedSlices` or None.
    """
    squares = []
    for grad in grads:
        if grad is not None:
            entries = entries_of(grad)
            dtype = _tf.variables.at_least_float32(entries.dtype)
            squares.append(tf.cast(tf.nn.l2_loss(tf.cast(entries, dtype)), tf.float32))
    return 2.0 * tf.add_n(squares) if squares else tf.constant(0.0)


def is_zero(grad: Gradient) -> bool:
    """Whether a gradient is zero; eagerly only."""
    values = grad.values if isinstance(grad, tf.IndexedSlices) else grad
    return not bool(tf.reduce_any(tf.not_equal(values, 0)))


def of_parts(grad: Optional[Gradient], of_tensor: Callable[[Any], Any]) -> Any:
    """Return `of_tensor` of a gradient, or the pair of it for the values and indices of `tf.IndexedSlices`."""
    if isinstance(grad, tf.IndexedSlices):
        return of_tensor(grad.values), of_tensor(grad.indices)
    return of_tensor(grad)


# --------------------------------------------------------------------------------------------------------------------
# Custom gradients


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
                    "A result over a whole batch has been differentiated once and can't be again, because what this "
                    "needs is not kept: use the gradients that were returned with it, or pass it through "
                    "`tf.stop_gradient`. If a `tf.function` within a train step has computed it, remove its decorator: "
                    "the step is traced anyway. [accum: whole-batch-gradient]"
                )
            return reference()(*upstream)

        return results, while_kept

    return tf.custom_gradient(briefly_kept)
