"""Checkpoints from before accumulation was added: everything else restored, the accumulators zeroed."""

from accum._tf import tf
from accum.compat.v1._optimizer import AccumOptimizer


class Saver(tf.compat.v1.train.Saver):
    """A `tf.compat.v1.train.Saver` that also restores checkpoints which know nothing of accumulation.

    What such a checkpoint holds is restored as ever; the accumulators and the micro step, which it does not hold, begin
    at zero, so that the run goes on with a new cycle. It takes the place of a `Saver` wherever one is taken:
    `saver.restore`, `tf.compat.v1.train.Scaffold(saver=…)` of a `MonitoredTrainingSession` or an `EstimatorSpec`,
    `slim.learning.train(saver=…)`.

    Args:
      optimizers: an `AccumOptimizer` or a list of them, whose train ops exist.
      var_list: list of variables to save; None: all that a default `Saver` saves.
      **kwargs: as `tf.compat.v1.train.Saver` takes them.

    Raises:
      TypeError: `optimizers` holds something else, or `var_list` is a dict.
      ValueError: an optimizer has no train op yet.

    Example:
      >>> train_op = optimizer.minimize(loss, global_step)
      >>> scaffold = tf.compat.v1.train.Scaffold(saver=accum.compat.v1.Saver(optimizer))
      >>> with tf.compat.v1.train.MonitoredTrainingSession(checkpoint_dir=path, scaffold=scaffold) as session:
      ...     session.run(train_op)
    """

    def __init__(self, optimizers, var_list=None, **kwargs):
        self._optimizers = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
        for optimizer in self._optimizers:
            if not isinstance(optimizer, AccumOptimizer):
                raise TypeError("`optimizers` must be `AccumOptimizer`s. Received: {!r}.".format(optimizer))
            if not optimizer.has_train_op:
                raise ValueError("A `Saver` needs the train op to be made first, by `minimize` or otherwise.")
        if isinstance(var_list, dict):
            raise TypeError("`var_list` must be a list of variables. Received: {!r}.".format(var_list))
        self._parts = []
        super().__init__(var_list, **kwargs)

    def build(self):
        """Build the ops that save and restore, also without what older checkpoints lack."""
        super().build()
        saved = self._var_list
        groups = [group for optimizer in self._optimizers for group in optimizer.saved_groups()]
        groups = [part for part in ([var for var in group if _holds(saved, var)] for group in groups) if part]
        state = [var for group in groups for var in group]
        rest = [var for var in saved if not _holds(state, var)]
        self._rest = tf.compat.v1.train.Saver(rest, name="save_rest", allow_empty=True)
        self._parts = [
            (_saved_name(group[0]), tf.compat.v1.train.Saver(group, name="save_accum"), tf.group(*_initializers(group)))
            for group in groups
        ]

    def restore(self, sess, save_path):
        """As `tf.compat.v1.train.Saver.restore`; what only accumulation has and the checkpoint lacks is zeroed."""
        names = {name for name, _ in tf.compat.v1.train.list_variables(save_path)} if save_path else set()
        if not save_path or all(name in names for name, _, _ in self._parts):
            super().restore(sess, save_path)
            return
        self._rest.restore(sess, save_path)
        for name, saver, initialize in self._parts:
            if name in names:
                saver.restore(sess, save_path)
            else:
                sess.run(initialize)


def _holds(variables, var):
    return any(known is var for known in variables)


def _initializers(group):
    return [var.initializer for var in group]


def _saved_name(var):
    """The name under which a `Saver` saves `var`, which for a part of a partitioned variable is that of the whole."""
    info = var._get_save_slice_info() if hasattr(var, "_get_save_slice_info") else None
    return var.op.name if info is None else info.full_name
