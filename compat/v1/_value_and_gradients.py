"""The gradients of a whole batch in a static graph, with the memory of one micro-batch (laws L18 and L19).

A function is called once, with the whole batch, and `split_batch` splits what it has built.

With `whole_batch=()`, weights, or ragged or sparse data, it is called twice: for the first micro-batch, and in the body
of the loop over all others. Both calls share their variables. Together they leave the graph as one call with the whole
batch would: with the same names, and without entries for a single micro-batch in the collections.
"""

from typing import Any, Callable, List, Optional, Sequence, Tuple

from accum import _check, _tf
from accum._engine._batch import Batch
from accum._engine._combined import Pooled
from accum._engine._value_and_gradients import Derived, Weight, checked, checked_variables, mean_and_gradients
from accum._tf import Gradient, tf
from accum._tf.types import WholeBatch
from accum.compat.v1._carried_state import warn_of_repeated_changes
from accum.compat.v1._checks import note_computed
from accum.compat.v1._collections import Additions, depends_on, is_in_loop, ops_of
from accum.compat.v1._first_call import FirstCall
from accum.compat.v1._loss_counts import warn_of_split_counts
from accum.compat.v1._moving_statistics import MovesInTurn, moments_of
from accum.compat.v1._update_ops import Average, require_none_in_place, taken_over
from accum.compat.v1._whole_batch import whole_value

KEYS = tf.compat.v1.GraphKeys
REFUSAL = (
    "`function` creates a variable in its second call too, instead of using that of its first: create variables and "
    "Keras layers outside of `function`, or by `tf.compat.v1.get_variable` with a fixed name. [accum: created-twice]"
)

NORMALIZED_APART = (
    "With ragged or sparse data, or with `weight`, `function` is called for each micro-batch, so its batch "
    "normalisation uses the mean and variance of a micro-batch: make the data dense, and leave out `weight`. Or accept "
    "by `whole_batch=()` that it differs from the full batch."
)


def value_and_gradients(
    function: Callable[..., tf.Tensor],
    data: Any,
    variables: Optional[Sequence[tf.Variable]] = None,
    micro_batch_size: int = None,  # type: ignore[assignment]  # required, though it stands behind one that is not
    *,
    weight: Weight = "examples",
    whole_batch: Optional[WholeBatch] = None,
    recompute: bool = True,
    loss: Optional[Callable[..., tf.Tensor]] = None,
) -> Tuple[tf.Tensor, List[Tuple[Optional[Gradient], tf.Variable]]]:
    """Compute a loss over a whole batch and its gradients in a static graph, with the memory of one micro-batch.

        value     = function(data)
        gradients = d function(data) / d variables

    `function` is called once, with the whole batch, and `split_batch` splits what it has built. So batch normalisation,
    losses of any kind, and what is added to collections are those of the whole batch. What can't be split is computed
    at once, with a warning. One run of the train op is one step, without `accum_steps`: `global_step`, hooks and an
    `input_fn` that gives whole batches stay as they are.

    With `loss`, `function` returns the outputs of a network, one row for each example, up to which the batch is split,
    and `loss(outputs, *data)` is computed from those of all examples. If the graph is built on the whole batch already,
    `split_batch` needs no function, only one line.

    With `whole_batch=()`, `weight="equal"`, or ragged or sparse data, `function` is called for each micro-batch.
    The batch is split along its first axis, in order, into one remainder of at most `micro_batch_size` examples, which
    comes first, and micro-batches x_i of `micro_batch_size` examples. A loop in the graph runs one after the other:

        value     = sum_i(w_i function(x_i)) / sum_i(w_i)
        gradients = sum_i(w_i d function(x_i) / d variables) / sum_i(w_i)

    This equals the full batch if `function` is a mean over its examples, or what `weight` counts, and they do not meet
    in it. Python calls it twice, and the second call uses the variables that the first one created. So it must create
    them by `tf.compat.v1.get_variable`, `tf.compat.v1.layers` or tf-slim, or use existing ones. What it adds to the
    graph's collections is treated as in one call with the whole batch:

    - UPDATE_OPS receives ops that move the averages of batch normalisation once per batch, to the statistics of the
      whole batch. Run them with the train op, as usual.
    - LOSSES has the losses of the micro-batch within a call, such as for `tf.compat.v1.losses.get_total_loss`, and is
      restored afterwards.
    - Other collections keep what does not depend on a micro-batch, such as the regularization losses of variables.
      Create summaries from the returned value.

    A warning names the variables that `function` assigns to before it computes its result, because it does so for each
    micro-batch.

    Args:
      function: function of the data, a scalar loss; with `loss`, a nested structure of tensors whose first axis is that
        of the data. If `data` is a tuple or a list, it is called as `function(*data)`, otherwise as `function(data)`.
        The number of examples is not known to Python in it.
      data: nested structure of tensors, `tf.RaggedTensor` or `tf.SparseTensor` that share their first axis, the
        examples. Scalars, None and objects other than tensors are passed to each call unchanged.
      variables: list of variables to differentiate with respect to; None: all trainable variables of the graph,
        including the ones that `function` creates.
      micro_batch_size: the largest number of examples that are computed at a time, >= 1.
      weight: the weight w_i of a micro-batch. "examples": its number of examples. "equal": 1. Or a function of the
        micro-batch, called like `function`, that returns a scalar >= 0, such as its number of unmasked elements. It is
        not needed, and not called, where `function` sees the whole batch.
      whole_batch: None: `function` sees the whole batch, unless data is ragged or sparse, or `weight` is "equal". ():
        it sees micro-batches. "batch_norm", "loss", both as a tuple, or "all": as None, but what can't be split is an
        error. "loss" and "all" need `loss`, which implies them, and which may take ragged or sparse targets.
      recompute: as for `split_batch`.
      loss: function `loss(outputs, *data)`, or `loss(outputs, data)` if `data` is neither a tuple nor a list: a scalar.

    Returns:
      `(value, grads_and_vars)`. The value is a tensor of shape []. The list of (gradient, variable) is what
      `compute_gradients` of a `tf.compat.v1.train.Optimizer` would return for the whole batch, for `apply_gradients`: a
      gradient is a tensor of its variable's shape and dtype, `tf.IndexedSlices` or None. If all weights are 0, so are
      value and gradients.

    Raises:
      TypeError, ValueError: an argument does not match its description above, the loss depends on no variable, or
        `split_batch` can't split what it must. With micro-batches, also: `function` creates variables in its second
        call, or what it adds to a collection can't be treated as above.
      RuntimeError: when executing eagerly or in a `tf.function`.

    Example:
      >>> def model_fn(features, labels, mode):
      ...     def loss(features, labels):
      ...         return tf.compat.v1.losses.mean_squared_error(labels, network(features, mode))
      ...     value, grads_and_vars = accum.compat.v1.value_and_gradients(
      ...         loss, (features, labels), micro_batch_size=32
      ...     )
      ...     with tf.control_dependencies(tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)):
      ...         train_op = optimizer.apply_gradients(grads_and_vars, tf.compat.v1.train.get_global_step())
      ...     return tf.estimator.EstimatorSpec(mode, loss=value, train_op=train_op)
    """
    if not _tf.graphs.in_static_graph():
        raise RuntimeError(
            "`accum.compat.v1.value_and_gradients` creates ops of a static graph but was called eagerly: enter a "
            "`tf.Graph`, or use `accum.value_and_gradients`. [accum: graph-mode]"
        )
    task = checked(function, micro_batch_size, weight, whole_batch, recompute, loss)
    listed = None if variables is None else checked_variables(_parts(variables))
    is_default = whole_batch is None and task.weight != "equal" and Batch(data).is_dense
    if is_default or task.barriers or task.loss is not None:
        task = task._replace(weight="examples") if is_default else task  # the whole batch needs no weights
        value, pairs = whole_value(task, data, listed, is_default)
        note_computed(pairs)
        return value, pairs
    calls = _Calls(listed, is_by_examples=task.weight == "examples" and task.size > 1)
    # Only loops of TF 1 take ref variables, and only in theirs can update ops be read.
    with _tf.graphs.control_flow_of_tf(1):
        derived = mean_and_gradients(task, data, calls.differentiate)
    if whole_batch is None and calls.averages:
        names = sorted({average.var.op.name for pair in calls.averages for average in pair})
        _check.warn(f"{NORMALIZED_APART} Received: {names}. [accum: batch-norm]", _check.InexactWarning)
    in_turn = MovesInTurn()
    for (mean, variance), whole in zip(calls.averages, derived.others):
        in_turn.add(mean, variance, whole)
    note_computed(derived.grads_and_vars)
    return derived.value, list(derived.grads_and_vars)


def _parts(variables: Any) -> Any:
    """Replace partitioned variables in a list by their parts."""
    if not isinstance(variables, (tuple, list)):
        return variables
    listed: List[Any] = []
    for var in variables:
        is_partitioned = hasattr(var, "as_tensor") and not isinstance(var, (tf.Variable, tf.IndexedSlices))
        listed.extend(var if is_partitioned else [var])
    return listed


class _Calls:
    """Calls of one function that stand for a single call with the whole batch.

    Args:
      variables: list of variables, or None for all trainable ones.
      is_by_examples: whether micro-batches, of several examples, count by their number.

    Attributes:
      averages: list of pairs of `Average`, (mean, variance), of the batch normalisation layers in the first call.
    """

    def __init__(self, variables: Optional[List[tf.Variable]], is_by_examples: bool) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self._variables = variables
        self._is_by_examples = is_by_examples
        self._first_call = FirstCall(REFUSAL)
        self._is_first = True
        self._kept_losses: List[tf.Operation] = []  # regularization losses of the first call that the others use too
        self.averages: List[Tuple[Average, Average]] = []

    def differentiate(self, compute: Callable[[], tf.Tensor], part: Any) -> Derived:
        additions = Additions(self._graph)
        loss, averages = (self._first if self._is_first else self._again)(compute, ops_of(part), additions)
        self._is_first = False
        variables = tf.compat.v1.trainable_variables() if self._variables is None else self._variables
        # The base class scales the loss for the strategy of an Estimator, as the optimizers do.
        optimizer = tf.compat.v1.train.Optimizer(use_locking=False, name="gradients")
        pairs = optimizer.compute_gradients(loss, variables)
        return Derived(loss, pairs, [Pooled(*moments_of(mean, variance)) for mean, variance in averages])

    def _first(self, compute: Callable[[], tf.Tensor], sources: List[tf.Operation], additions: Additions) -> Any:
        """Call the function outside of the loop, where it creates its variables."""
        count = len(self._graph.get_operations())
        loss = compute()
        created, update_ops = self._graph.get_operations()[count:], additions.of(KEYS.UPDATE_OPS)
        require_none_in_place(created, update_ops)
        self.averages = taken_over(update_ops)
        warn_of_repeated_changes(loss, created)
        if self._is_by_examples and tf.is_tensor(loss):
            warn_of_split_counts(loss)
        local = (KEYS.UPDATE_OPS, KEYS.LOSSES)
        additions.keep(lambda key, added: key not in local and not depends_on(added, sources))
        self._kept_losses = ops_of(additions.of(KEYS.REGULARIZATION_LOSSES))
        return loss, self.averages

    def _again(self, compute: Callable[[], tf.Tensor], sources: List[tf.Operation], additions: Additions) -> Any:
        """Call the function in the body of the loop, where it finds the variables and names of the first call."""
        with self._first_call.again():
            loss = compute()
        averages = taken_over(additions.of(KEYS.UPDATE_OPS))
        if [id(mean.var) for mean, _ in averages] != [id(mean.var) for mean, _ in self.averages]:
            raise ValueError(
                "A micro-batch updates other averages of batch normalisation than the one before it."
                " [accum: unlike-micro-batches]"
            )
        self._require_losses_once(loss, additions, sources)
        local = (KEYS.UPDATE_OPS, KEYS.LOSSES, KEYS.REGULARIZATION_LOSSES)
        additions.keep(lambda key, added: key not in local and not is_in_loop(added) and additions.is_new(key, added))
        return loss, averages

    def _require_losses_once(self, loss: tf.Tensor, additions: Additions, sources: List[tf.Operation]) -> None:
        """Reject regularization losses of variables that each call adds, so that the loss holds them twice."""
        added = [one for one in additions.of(KEYS.REGULARIZATION_LOSSES) if not depends_on(one, sources)]
        if added and depends_on(loss, self._kept_losses):
            raise ValueError(
                "`function` adds losses of variables to REGULARIZATION_LOSSES itself. It is called twice, and "
                "would count them twice: add them before, outside of `function`, or pass `regularizer=` where the "
                f"variable is created. Received: {[one.name for one in added]}. [accum: function-effects]"
            )
