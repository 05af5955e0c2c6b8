"""Restore checkpoints that were saved before accumulation was added, and start with empty accumulators."""

import re
from typing import Any, List, Optional, Sequence, Set, Tuple

from accum import _check, _tf
from accum._tf import tf
from accum.compat.v1._optimizer import AccumOptimizer

CHANGED_IN_MID_CYCLE = (
    "The checkpoint is from the middle of a cycle that began with other options, so its step, averages or means "
    "will not be those of the full batch: finish the cycle as it began, or run `reset()` of the optimizer after "
    "restoring, which discards it."
)


class Saver(tf.compat.v1.train.Saver):
    """A `tf.compat.v1.train.Saver` that also restores checkpoints without accumulators.

    The variables in such a checkpoint are restored as usual. The accumulators and the micro step, which it lacks,
    start at zero, so the run continues with a new cycle. A warning says so if a checkpoint from the middle of a cycle
    has sums that this graph lacks, or the other way round.
    Use it wherever a `Saver` is accepted: `saver.restore`, `tf.compat.v1.train.Scaffold(saver=…)` for a
    `MonitoredTrainingSession` or an `EstimatorSpec`, `slim.learning.train(saver=…)`.

    Args:
      optimizers: an `AccumOptimizer` or a list of them. Their train ops must exist.
      var_list: list of variables to save; None: all variables that a default `Saver` saves.
      **kwargs: as for `tf.compat.v1.train.Saver`.

    Raises:
      TypeError: `optimizers` contains anything other than `AccumOptimizer`s, or `var_list` is a dict.
      ValueError: an optimizer has no train op yet.

    Example:
      >>> train_op = optimizer.minimize(loss, global_step)
      >>> scaffold = tf.compat.v1.train.Scaffold(saver=accum.compat.v1.Saver(optimizer))
      >>> with tf.compat.v1.train.MonitoredTrainingSession(checkpoint_dir=path, scaffold=scaffold) as session:
      ...     session.run(train_op)
    """

    def __init__(self, optimizers: Any, var_list: Optional[Sequence[tf.Variable]] = None, **kwargs: Any) -> None:
        self._optimizers = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
        for optimizer in self._optimizers:
            if not isinstance(optimizer, AccumOptimizer):
                raise TypeError(f"`optimizers` must be `AccumOptimizer`s. Received: {optimizer!r}.")
            if not optimizer.has_train_op:
                raise ValueError(
                    "A `Saver` needs a train op: create it first, such as with `minimize`. [accum: arguments]"
                )
        if isinstance(var_list, dict):
            raise TypeError(f"`var_list` must be a list of variables. Received: {var_list!r}.")
        self._parts: List[Tuple[str, Any, tf.Operation]] = []
        super().__init__(var_list, **kwargs)
        for optimizer in self._optimizers:
            optimizer.savers.append(self)

    def build(self) -> None:
        """Build the ops that save and restore, including those for checkpoints without accumulators."""
        for optimizer in self._optimizers:
            optimizer.check_graph()
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

    def restore(self, sess: tf.compat.v1.Session, save_path: str) -> None:
        """Restore as `tf.compat.v1.train.Saver.restore` does, and zero accumulators that the checkpoint lacks."""
        names = {name for name, _ in tf.compat.v1.train.list_variables(save_path)} if save_path else set()
        self._warn_of_another_cycle(save_path, names)
        if not save_path or all(name in names for name, _, _ in self._parts):
            super().restore(sess, save_path)
            return
        self._rest.restore(sess, save_path)
        for name, saver, initialize in self._parts:
            if name in names:
                saver.restore(sess, save_path)
            else:
                sess.run(initialize)

    def _warn_of_another_cycle(self, save_path: str, names: Set[str]) -> None:
        """Warn if the checkpoint holds an unfinished cycle, but not the same sums of it as this graph."""
        here = {_saved_name(var) for var in self._var_list}
        for optimizer in self._optimizers:
            groups = optimizer.saved_groups()
            scope = optimizer.scope_of_state
            micro_step = _restored_micro_step(save_path, names, scope)
            if (groups and f"{scope}/micro_step" not in here) or not micro_step:
                continue
            kept = {_saved_name(var) for group in groups for var in group} & here
            of_cycle = re.compile(f"(^|/){re.escape(scope)}/(accum|count_|micro_step)")
            changed = sorted(kept - names) + sorted(name for name in names - here if of_cycle.search(name))
            if changed:
                _check.warn(
                    f"{CHANGED_IN_MID_CYCLE} Received: {_check.shown(changed)}. [accum: restored-cycle]",
                    _check.InexactWarning,
                )


def _restored_micro_step(save_path: str, names: Set[str], scope: str) -> int:
    """Return how many micro-batches of an unfinished cycle are in a checkpoint with variables `names`."""
    name = f"{scope}/micro_step"
    return int(tf.compat.v1.train.load_checkpoint(save_path).get_tensor(name)) if name in names else 0


def _holds(variables: Sequence[tf.Variable], var: tf.Variable) -> bool:
    return any(one is var for one in variables)


def _initializers(group: Sequence[tf.Variable]) -> List[tf.Operation]:
    return [var.initializer for var in group]


def _saved_name(var: tf.Variable) -> str:
    """Return the name under which a `Saver` saves `var`: for a part of a partitioned variable, that of the whole."""
    info = _tf.graphs.slice_info(var)
    return var.op.name if info is None else info.full_name
