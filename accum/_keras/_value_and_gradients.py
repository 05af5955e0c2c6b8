"""The gradients of a whole batch in a loop of one's own, with the memory of one micro-batch (law L18)."""

from typing import Any, Callable, List, Optional, Sequence, Tuple

from accum import _tf
from accum._engine._value_and_gradients import Derived, Weight, checked, checked_variables, mean_and_gradients
from accum._tf import Gradient, tf


def value_and_gradients(
    function: Callable[..., tf.Tensor],
    data: Any,
    variables: Sequence[tf.Variable],
    micro_batch_size: int,
    *,
    weight: Weight = "examples",
) -> Tuple[tf.Tensor, List[Optional[Gradient]]]:
    """Compute a loss over a whole batch and its gradients, with the memory of one micro-batch.

    The batch is split along its first axis, in order, into micro-batches x_i of `micro_batch_size` examples and one
    smaller remainder, which run one after the other:

        value     = sum_i(w_i function(x_i)) / sum_i(w_i)
        gradients = sum_i(w_i d function(x_i) / d variables) / sum_i(w_i)

    With the default weights, a `function` that is a mean over its examples gives the value and the gradients of the
    whole batch. It works eagerly, in a `tf.function` (with `jit_compile=True`, if shapes are static), under a
    `tf.GradientTape` of your own, which then keeps the memory of all micro-batches, and in `strategy.run`, where each
    replica computes the mean over its own part of the batch.

    Args:
      function: function of one micro-batch, a scalar loss. If `data` is a tuple or a list, it is called as
        `function(*micro_batch)`, otherwise as `function(micro_batch)`. In a `tf.function`, it is traced at most twice.
      data: nested structure of tensors, `tf.RaggedTensor`, `tf.SparseTensor` or arrays that share their first axis, the
        examples. Scalars, None and objects other than tensors are passed to each call unchanged.
      variables: list of variables to differentiate with respect to.
      micro_batch_size: the largest number of examples in a call of `function`, >= 1.
      weight: the weight w_i of a micro-batch. "examples": its number of examples. "equal": 1. Or a function of the
        micro-batch, called like `function`, that returns a scalar >= 0, such as its number of unmasked elements.

    Returns:
      `(value, gradients)`. The value is a tensor of shape []. The gradients are a list in the order of `variables`: for
      each a tensor of its shape and dtype, `tf.IndexedSlices` or None. If all weights are 0, so are value and
      gradients.

    Raises:
      TypeError, ValueError: an argument does not match its description above, or the loss depends on no variable.
      RuntimeError: in a static graph, for which there is `accum.compat.v1.value_and_gradients`.

    Example:
      >>> def loss(x, y):
      ...     return tf.reduce_mean((model(x, training=True) - y) ** 2)
      >>> value, gradients = accum.value_and_gradients(loss, (x, y), model.trainable_variables, micro_batch_size=32)
      >>> optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    """
    if _tf.in_static_graph():
        raise RuntimeError(
            "`accum.value_and_gradients` runs eagerly or in a `tf.function`: in a static graph, use "
            "`accum.compat.v1.value_and_gradients`."
        )
    task, listed = checked(function, micro_batch_size, weight), checked_variables(variables)

    def differentiate(compute: Callable[[], tf.Tensor], part: Any) -> Derived:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            for var in listed:
                tape.watch(var)
            value = compute()
        return Derived(value, list(zip(tape.gradient(value, listed), listed)))

    derived = mean_and_gradients(task, data, differentiate, _tf.is_compiled_by_xla_here())
    return derived.value, [grad for grad, _ in derived.grads_and_vars]
