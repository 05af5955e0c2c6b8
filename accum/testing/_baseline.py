"""Make the full-batch program of a static graph a baseline that accumulation can be compared with."""

from typing import Any, List, Sequence


def order_updates(train_op: Any) -> None:
    """Let every update of a train op wait until everything that does not depend on an update is computed.

    The published train ops of many TensorFlow 1 programs race: they read a variable, such as `global_step` or a weight,
    while another op changes it. Two equal runs then differ, and neither is a baseline to compare with. After this call,
    a run computes the loss, all gradients and the learning rate from the values before the step. Call it before the
    session runs anything. The graph is changed in place.

    Args:
      train_op: op or tensor of a static graph.

    Example:
      >>> train_op = create_optimizer(loss, …)  # the user's own
      >>> accum.testing.order_updates(train_op)
    """
    from accum.testing import _order  # needs TensorFlow

    _order.order_updates(train_op)


def sum_duplicate_rows(gradients: Sequence[Any]) -> List[Any]:
    """Return gradients in which each row of an embedding occurs once, with the sum of its slices.

    An id that occurs several times in a batch gives its row several slices. Clipping by a norm takes them one by one,
    so the norm is not that of the gradient. Accumulation, which passes each row once, therefore clips by another norm
    than the full batch. Call this before `tf.clip_by_global_norm` in the full-batch program to compare with. Dense
    gradients are returned unchanged.

    Args:
      gradients: list of tensors, `tf.IndexedSlices` and None.

    Returns:
      A list of the same length.

    Example:
      >>> grads = accum.testing.sum_duplicate_rows(tf.gradients(loss, variables))
      >>> grads, _ = tf.clip_by_global_norm(grads, 1.0)
    """
    from accum._engine._gradients import with_each_row_once  # needs TensorFlow

    return with_each_row_once(gradients)
