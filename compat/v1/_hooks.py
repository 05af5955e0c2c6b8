"""What a hooked loop needs: the last, unfinished cycle applied when the loop ends."""

from accum._tf import tf
from accum.compat.v1._optimizer import AccumOptimizer


class FlushHook(tf.compat.v1.train.SessionRunHook):
    """Make the step of an unfinished cycle when a hooked session ends without an error.

    Hooks end in their order, and one of them writes the last checkpoint: give this one to `MonitoredTrainingSession` as
    one of the `chief_only_hooks`, which come first, so that the checkpoint holds its step. An `Estimator` puts a saver
    of its own before all others: give it both, as `EstimatorSpec(training_chief_hooks=[FlushHook(optimizer),
    CheckpointSaverHook(model_dir, save_steps=…)])`.

    Args:
      optimizer: the `AccumOptimizer` of the session's graph, whose train op exists when the session is made.

    Raises:
      TypeError: `optimizer` is no `AccumOptimizer`.
      ValueError: when the session is made, if the optimizer has made no op yet.

    Example:
      >>> hooks = [FlushHook(optimizer)]
      >>> with tf.compat.v1.train.MonitoredTrainingSession(checkpoint_dir=path, chief_only_hooks=hooks) as session:
      ...     while not session.should_stop():
      ...         session.run(train_op)
    """

    def __init__(self, optimizer):
        if not isinstance(optimizer, AccumOptimizer):
            raise TypeError("`optimizer` must be an `AccumOptimizer`. Received: {!r}.".format(optimizer))
        self._optimizer = optimizer
        self._flush_op = None

    def begin(self):
        self._flush_op = self._optimizer.flush()

    def end(self, session):
        session.run(self._flush_op)
