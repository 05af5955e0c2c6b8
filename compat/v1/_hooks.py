"""A hook that makes the step of the last, unfinished cycle when a training loop ends."""

from accum._tf import tf
from accum.compat.v1._optimizer import AccumOptimizer


class FlushHook(tf.compat.v1.train.SessionRunHook):
    """Make the step of an unfinished cycle when a session with hooks ends without an error.

    The `end` methods of hooks run in order, and one of them writes the last checkpoint. Pass this hook to
    `MonitoredTrainingSession` in `chief_only_hooks`, which come first, so that the checkpoint includes the last step.
    An `Estimator` puts its own saver before all other hooks: pass it both hooks, as in
    `EstimatorSpec(training_chief_hooks=[FlushHook(optimizer), CheckpointSaverHook(model_dir, save_steps=…)])`.

    Args:
      optimizer: the `AccumOptimizer` of the session's graph. Its train op must exist when the session is created.

    Raises:
      TypeError: `optimizer` is not an `AccumOptimizer`.
      ValueError: when the session is created, if the optimizer has no train op yet.

    Example:
      >>> hooks = [FlushHook(optimizer)]
      >>> with tf.compat.v1.train.MonitoredTrainingSession(checkpoint_dir=path, chief_only_hooks=hooks) as session:
      ...     while not session.should_stop():
      ...         session.run(train_op)
    """

    def __init__(self, optimizer: AccumOptimizer) -> None:
        if not isinstance(optimizer, AccumOptimizer):
            raise TypeError(f"`optimizer` must be an `AccumOptimizer`. Received: {optimizer!r}.")
        self._optimizer = optimizer
        self._flush_op = None

    def begin(self) -> None:
        self._flush_op = self._optimizer.flush()

    def end(self, session: tf.compat.v1.Session) -> None:
        session.run(self._flush_op)
