"""The weighted mean of a function over the micro-batches of a batch, and its gradients (law L18)."""

from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple, Union

from accum import _check, _tf
from accum._engine._batch import Batch
from accum._engine._combined import Sum, gradient_sum
from accum._engine._draws import Draws, uniform_seed
from accum._engine._gradients import divided, weighted
from accum._engine._micro_batches import Index, MicroBatches
from accum._engine._trace import Marks
from accum._tf import GradsAndVars, Nested, Scalar, tf
from accum._tf.types import WholeBatch

Weight = Union[str, Callable[..., Scalar]]
"""How a micro-batch counts: "examples", "equal" or a function of the micro-batch."""

WEIGHTS = ("examples", "equal")


AT_ONCE = (
    "`function` is computed for the whole batch at once, which is exact but saves no memory, because it can't be "
    "split. If it is a mean over examples that do not meet in it, pass `whole_batch=()`. The reason: {reason} "
    "[accum: not-split]"
)


class Task(NamedTuple):
    """What is computed over which micro-batches, after the checks of `checked`."""

    function: Callable[..., Nested]
    size: int  # of a micro-batch
    weight: Weight
    barriers: Tuple[str, ...] = ()
    recompute: bool = True
    loss: Optional[Callable[..., tf.Tensor]] = None


class Derived(NamedTuple):
    """A loss and its gradients, of one micro-batch or of all.

    Attributes:
      value: tensor of shape [], the loss.
      grads_and_vars: list of (gradient, variable).
      others: nested structure: of one micro-batch of `Combined`, of all of what these give.
    """

    value: tf.Tensor
    grads_and_vars: GradsAndVars
    others: Nested = ()


def checked(
    function: Callable[..., Nested],
    micro_batch_size: int,
    weight: Weight,
    whole_batch: Optional[WholeBatch] = (),
    recompute: bool = True,
    loss: Optional[Callable[..., tf.Tensor]] = None,
) -> Task:
    """Return the arguments of a public function as a `Task`, or raise `TypeError` or `ValueError`."""
    _check.function("function", function)
    size = _check.own_micro_batch_size(micro_batch_size)
    weight = weight if callable(weight) else _check.one_of("weight", weight, WEIGHTS)
    barriers = _check.whole_batch(() if whole_batch is None else whole_batch, size)
    recompute = _check.flag("recompute", recompute)
    if loss is not None:
        _check.function("loss", loss)
        if weight != "examples":
            raise ValueError(
                "With `loss`, which sees the whole batch, micro-batches have no weights: leave out `weight`, and "
                f"weight examples in `loss`. Received: weight={weight!r}. [accum: arguments]"
            )
    elif "loss" in barriers:
        raise ValueError(
            f"whole_batch={whole_batch!r} computes a loss over the whole batch, but `function` returns the loss of a "
            "micro-batch: let it return the outputs of the network and pass `loss=`, a function of them, or pass "
            "`whole_batch='batch_norm'`. [accum: arguments]"
        )
    return Task(function, size, weight, barriers, recompute, loss)


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
    return [_tf.variables.native(var) for var in listed]


def _is_variable(var: object) -> bool:
    return isinstance(_tf.variables.native(var), tf.Variable)


def mean_and_gradients(
    task: Task,
    data: Nested,
    differentiate: Callable[[Callable[[], tf.Tensor], Nested], Derived],
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
    derived: Any = None  # of the last micro-batch that Python has seen; all of them have the same variables and dtypes

    micro_batches = MicroBatches(batch, task.size, compiled)
    draws = Draws(uniform_seed, batch.count, compiled, sets_seeds_back=False)

    def micro_batch(part: Nested, index: Index) -> Nested:
        nonlocal derived
        weight = _weight(task.weight, batch, part)
        with draws.of(micro_batches.begin(index), micro_batches.size_of(index)):
            derived = differentiate(lambda: scalar_loss(called(task.function, part)), part)
        examples = [] if tf.executing_eagerly() else batch.flatten(part)
        grads = [gradient_sum(grad, var, weight, examples) for grad, var in derived.grads_and_vars]
        value = tf.cast(derived.value, _tf.variables.at_least_float32(derived.value.dtype))
        return [grads, Sum(weighted(value, weight)), Sum(weight), derived.others]

    grads, value, weight, others = micro_batches.run(micro_batch)
    variables = [var for _, var in derived.grads_and_vars]
    grads = [divided(grad, weight, var.dtype.base_dtype) for grad, var in zip(grads, variables)]
    return Derived(divided(value, weight, derived.value.dtype), _check.pairs(zip(grads, variables)), others)


class WholeBatchFunction:
    """A `Task` with barriers: what its function returns of the whole batch, and the loss of that.

    Args:
      task: a `Task` with `barriers` or `loss`.
      data: nested structure of tensors that share their first axis.

    Attributes:
      batch: the `Batch` of the data.
    """

    def __init__(self, task: Task, data: Nested) -> None:
        self._task = task
        self._data = data
        self.batch = Batch(data)
        self._structure: Nested = None

    def traced(self, tensors: Sequence[tf.Tensor], marks: Optional[Marks] = None) -> List[tf.Tensor]:
        """Return tensors with one entry for each example of a micro-batch. It is what is to be traced."""
        part = self.batch.packed(tensors)
        outputs = called(self._task.function, part)
        return self._losses(part, outputs) if self._task.loss is None else self._outputs(outputs)

    def value(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the loss of a micro-batch."""
        return scalar_loss(called(self._task.function, self.batch.packed(tensors)))

    def _losses(self, part: Nested, outputs: Nested) -> List[tf.Tensor]:
        """Return the loss and the weight of a micro-batch, spread over its examples."""
        count = self.batch.count_of(part)
        value = scalar_loss(outputs)
        value = tf.cast(value, _tf.variables.at_least_float32(value.dtype))
        share = tf.math.divide_no_nan(_weight(self._task.weight, self.batch, part), tf.cast(count, tf.float32))
        return [tf.fill([count], value), tf.fill([count], tf.cast(tf.stop_gradient(share), value.dtype))]

    def _outputs(self, outputs: Nested) -> List[tf.Tensor]:
        self._structure = tf.nest.map_structure(lambda _: None, outputs)
        flat = tf.nest.flatten(outputs)
        for tensor in flat:
            if not isinstance(tensor, tf.Tensor) or tensor.shape.rank == 0:
                raise (ValueError if isinstance(tensor, tf.Tensor) else TypeError)(
                    "With `loss`, `function` must return tensors with one entry for each example of its micro-batch, "
                    f"in any nested structure. Received: {tensor!r}. [accum: arguments]"
                )
        return flat

    def loss(self, outputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the loss of the batch, given what `traced` returns of it."""
        if self._task.loss is not None:
            packed = tf.nest.pack_sequence_as(self._structure, list(outputs))
            arguments = self._data if isinstance(self._data, (tuple, list)) else (self._data,)
            return scalar_loss(self._task.loss(packed, *arguments), "loss", "of the batch")
        values, shares = outputs
        return divided(tf.reduce_sum(tf.math.multiply_no_nan(values, shares)), tf.reduce_sum(shares), values.dtype)


def called(function: Callable[..., Nested], part: Nested) -> Nested:
    return function(*part) if isinstance(part, (tuple, list)) else function(part)


def _weight(rule: Weight, batch: Batch, part: Nested) -> tf.Tensor:
    """Return the weight of a micro-batch, a float32 scalar."""
    if rule == "equal":
        return tf.constant(1.0)
    weight = batch.count_of(part) if rule == "examples" else called(rule, part)  # type: ignore[arg-type]
    return tf.cast(_check.not_negative("weight", weight, _tf.variables.known_value(weight)), tf.float32)


def scalar_loss(loss: Nested, name: str = "function", example: str = "of its micro-batch") -> tf.Tensor:
    words = f"`{name}` must return a scalar loss, such as the mean over the examples {example}. Received: "
    if loss is None or isinstance(loss, (tuple, list, dict)):
        raise TypeError(f"{words}{loss!r}.")
    loss = tf.convert_to_tensor(loss)
    if not loss.dtype.is_floating:
        raise TypeError(f"{words}a tensor of {loss.dtype.name}.")
    if loss.shape.rank not in (None, 0):
        raise ValueError(f"{words}shape {tuple(loss.shape.as_list())}.")
    return loss if loss.shape.rank == 0 else tf.reshape(loss, [])
