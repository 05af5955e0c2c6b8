"""Compute a function over a whole batch in a static graph, by `split_batch` (laws L18 and L19)."""

import re
from typing import Any, Optional, Sequence, Tuple

from accum import _check
from accum._engine._batch import as_tensor
from accum._engine._value_and_gradients import AT_ONCE, Task, called, scalar_loss
from accum._tf import tf
from accum.compat.v1._split_batch import split_batch


def whole_value(
    task: Task, data: Any, variables: Optional[Sequence[tf.Variable]], is_default: bool
) -> Tuple[tf.Tensor, Any]:
    """Return the loss of a whole batch, and what `compute_gradients` returns for it.

    Args:
      task: a `Task`.
      data: nested structure of tensors that share their first axis. What is computed from ragged and sparse ones is
        computed at once.
      variables: list of variables, or None for all trainable ones.
      is_default: whether what can't be split is computed at once, with a warning; otherwise, it is an error.
    """
    if task.weight != "examples":
        raise ValueError(
            "With `whole_batch` or `loss`, `function` sees the whole batch, so micro-batches have no weights: leave "
            f"out `weight`. Received: weight={task.weight!r}. [accum: arguments]"
        )
    batch = tf.nest.map_structure(lambda leaf: _of_any_length(as_tensor(leaf)), data)
    tensors = [leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.Tensor)]
    if not any(leaf.shape.rank for leaf in tensors):
        raise ValueError(
            "With `whole_batch` or `loss`, `data` needs a dense tensor, whose first axis is split: leave them out, so "
            f"that `function` is called for each micro-batch. Received: {data!r}. [accum: arguments]"
        )
    outputs = called(task.function, batch)
    if task.loss is None:
        value, outputs = scalar_loss(outputs), None
    else:
        arguments = batch if isinstance(batch, (tuple, list)) else (batch,)
        value = scalar_loss(task.loss(outputs, *arguments), "loss", "of the batch")
    reason = None
    try:
        value = split_batch(value, tensors, task.size, outputs=outputs, recompute=task.recompute)
    except ValueError as error:
        if not is_default:
            raise
        reason = error
    # The base class scales the loss for the strategy of an Estimator, as the optimizers do.
    optimizer = tf.compat.v1.train.Optimizer(use_locking=False, name="gradients")
    pairs = _check.pairs(optimizer.compute_gradients(value, variables))
    if reason is not None:
        _check.warn(AT_ONCE.format(reason=_reason_here(reason, task.loss is None)))
    return value, pairs


def _reason_here(error: Exception, may_have_loss: bool) -> str:
    """Return what `split_batch` says, without what names its arguments, behind a remedy that there is here."""
    sentences = re.split(r"(?<=\.) ", _check.reason_of(error))
    kept = [one for one in sentences if "`outputs`" not in one and "`given`" not in one]
    remedy = ["If only a loss of the outputs needs the whole batch, return these, and pass `loss`."]
    return " ".join(remedy * may_have_loss + kept)


def _of_any_length(leaf: Any) -> Any:
    """Return data of a batch whose number of examples is no constant in the graph."""
    if isinstance(leaf, tf.SparseTensor):
        shape = tf.compat.v1.placeholder_with_default(leaf.dense_shape, leaf.dense_shape.shape)
        return tf.SparseTensor(_of_any_length(leaf.indices), _of_any_length(leaf.values), shape)
    if isinstance(leaf, tf.RaggedTensor):
        parts = map(_of_any_length, tf.nest.flatten(leaf, expand_composites=True))
        return tf.nest.pack_sequence_as(leaf, list(parts), expand_composites=True)
    if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank:
        return leaf
    return tf.compat.v1.placeholder_with_default(leaf, [None, *leaf.shape.as_list()[1:]])
