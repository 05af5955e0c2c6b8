"""The weighted mean of a function over the micro-batches of a batch, and its gradients (law L18)."""

from typing import Any, Callable, List, NamedTuple, Union

from accum import _check, _tf
from accum._engine._accumulators import weighted
from accum._engine._batch import Batch
from accum._engine._combined import Sum, divided, gradient_sum
from accum._engine._micro_batches import over_micro_batches
from accum._tf import GradsAndVars, Scalar, tf

Weight = Union[str, Callable[..., Scalar]]
"""How a micro-batch counts: "examples", "equal" or a function of the micro-batch."""

WEIGHTS = ("examples", "equal")


class Task(NamedTuple):
    """What is computed over which micro-batches, after the checks of `checked`."""

    function: Callable[..., Any]
    size: int  # of a micro-batch
    weight: Weight


class Derived(NamedTuple):
    """A loss and its gradients, of one micro-batch or of all.

    Attributes:
      value: tensor of shape [], the loss.
      grads_and_vars: list of (gradient, variable).
      others: nested structure: of one micro-batch of `Combined`, of all of what these give.
    """

    value: tf.Tensor
    grads_and_vars: GradsAndVars
    others: Any = ()


def checked(function: Any, micro_batch_size: Any, weight: Any) -> Task:
    """Return the arguments of a public function as a `Task`, or raise `TypeError` or `ValueError`."""
    _check.function("function", function)
    size = _check.own_micro_batch_size(micro_batch_size)
    return Task(function, size, weight if callable(weight) else _check.one_of("weight", weight, WEIGHTS))


def checked_variables(variables: Any) -> List[tf.Variable]:
    """Return `variables` as a list of `tf.Variable`, after checking that it holds these, and at least one."""
    is_list = hasattr(variables, "__iter__") and not isinstance(variables, (str, bytes, dict, tf.Tensor))
    if not is_list or _is_variable(variables):
        raise TypeError(f"`variables` must be a list of variables. Received: {variables!r}.")
    listed = list(variables)
    for var in listed:
        if not _is_variable(var):
            raise TypeError(f"`variables` must be a list of variables. Received: {var!r} in it.")
    if not listed:
        raise ValueError(
            "`variables` must hold at least one variable. Received: an empty list. A model creates its variables when "
            "it is built or first called: call it once before."
        )
    return [_tf.native(var) for var in listed]


def _is_variable(var: Any) -> bool:
    return isinstance(_tf.native(var), tf.Variable)


def mean_and_gradients(
    task: Task,
    data: Any,
    differentiate: Callable[[Callable[[], tf.Tensor], Any], Derived],
    compiled: bool = False,
) -> Derived:
    """Compute the weighted mean of a function over the micro-batches of `data`, and its gradients.

        value = sum_i(w_i f(x_i)) / sum_i(w_i),   gradients = sum_i(w_i df/dv(x_i)) / sum_i(w_i)

    Args:
      task: a `Task`.
      data: nested structure of tensors that share their first axis.
      differentiate: function of a function without arguments that computes the loss of a micro-batch, and of that
        micro-batch. It returns a `Derived`.
      compiled: whether XLA compiles this.

    Returns:
      `Derived`. The gradients have the dtype of their variables.

    Raises:
      ValueError: the loss depends on none of the variables.
    """
    batch = Batch(data)
    seen: List[Derived] = []

    def micro_batch(part: Any) -> Any:
        weight = _weight(task.weight, batch, part)
        derived = differentiate(lambda: _scalar_loss(_call(task.function, part)), part)
        seen[:] = [derived]
        grads = [gradient_sum(grad, var, weight) for grad, var in derived.grads_and_vars]
        value = tf.cast(derived.value, _tf.at_least_float32(derived.value.dtype))
        return [grads, Sum(weighted(value, weight)), Sum(weight), derived.others]

    grads, value, weight, others = over_micro_batches(micro_batch, batch, task.size, compiled)
    variables = [var for _, var in seen[0].grads_and_vars]
    grads = [divided(grad, weight, var.dtype.base_dtype) for grad, var in zip(grads, variables)]
    return Derived(divided(value, weight, seen[0].value.dtype), _check.pairs(zip(grads, variables)), others)


def _call(function: Callable[..., Any], part: Any) -> Any:
    return function(*part) if isinstance(part, (tuple, list)) else function(part)


def _weight(rule: Weight, batch: Batch, part: Any) -> tf.Tensor:
    """Return the weight of a micro-batch, a float32 scalar."""
    if rule == "equal":
        return tf.constant(1.0)
    weight = batch.count_of(part) if rule == "examples" else _call(rule, part)  # type: ignore[arg-type]
    return tf.cast(_check.not_negative("weight", weight, _tf.known_value(weight)), tf.float32)


def _scalar_loss(loss: Any) -> tf.Tensor:
    words = "`function` must return a scalar loss, such as the mean over the examples of its micro-batch. Received: "
    if loss is None or isinstance(loss, (tuple, list, dict)):
        raise TypeError(f"{words}{loss!r}.")
    loss = tf.convert_to_tensor(loss)
    if not loss.dtype.is_floating:
        raise TypeError(f"{words}a tensor of {loss.dtype.name}.")
    if loss.shape.rank not in (None, 0):
        raise ValueError(f"{words}shape {tuple(loss.shape.as_list())}.")
    return loss if loss.shape.rank == 0 else tf.reshape(loss, [])
