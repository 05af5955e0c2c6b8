"""Hooks that make the step of the last, unfinished cycle when a training loop ends."""

from typing import Any, List, Optional, Tuple

from accum import _tf
from accum._tf import tf
from accum.compat.v1._optimizer import AccumOptimizer
from accum.compat.v1._saver import Saver


class FlushHook(tf.compat.v1.train.SessionRunHook):
    """Make the step of an unfinished cycle when a session with hooks ends without an error.

    The last checkpoint includes this step, wherever the hook stands among the others. If another hook has already
    written the checkpoint of this `global_step`, this hook makes its own saver write one more. With
    `local_accumulators=True`, where each worker has cycles of its own, pass it in `hooks` of every worker.

    If the session restores a cycle that holds as many micro-batches as `accum_steps`, or more, because `accum_steps` is
    smaller now, the hook makes its step as the session begins.

    The saver is the one in the graph's collection SAVERS, as in a `MonitoredTrainingSession` or an `Estimator`, or else
    an `accum.compat.v1.Saver`. If you give a `Scaffold` another one, pass this hook in `chief_only_hooks`, which come
    first, or use `accum.compat.v1.CheckpointSaverHook`, which also informs saving listeners.

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
        self._micro_step: Any = None
        self._global_step: Any = None

    def begin(self) -> None:
        self._flush_op = self._optimizer.flush()
        self._micro_step, step = self._optimizer.micro_step, _tf.graphs.global_step()
        self._global_step = None if step is None else tf.identity(step)

    def after_create_session(self, session: tf.compat.v1.Session, coord: tf.train.Coordinator) -> None:
        _flush_if_full(session, self._optimizer, self._flush_op, self._micro_step)

    def end(self, session: tf.compat.v1.Session) -> None:
        is_unfinished = self._micro_step is not None and session.run(self._micro_step) > 0
        savers = self._savers_of_now(session) if is_unfinished and self._global_step is not None else []
        session.run(self._flush_op)
        for saver, path in savers:
            saver.save(session, path, self._global_step)

    def _savers_of_now(self, session: tf.compat.v1.Session) -> List[Tuple[tf.compat.v1.train.Saver, str]]:
        """Return the savers that have saved at this `global_step`, with their paths: their hooks save it only once."""
        ending = f"-{int(session.run(self._global_step))}"
        savers = {*session.graph.get_collection(tf.compat.v1.GraphKeys.SAVERS), *self._optimizer.savers}
        latest = [(saver, saver.last_checkpoints[-1]) for saver in savers if saver.last_checkpoints]
        return [(saver, path[: -len(ending)]) for saver, path in latest if path.endswith(ending)]


class CheckpointSaverHook(tf.compat.v1.train.CheckpointSaverHook):
    """A `tf.compat.v1.train.CheckpointSaverHook` that flushes an unfinished cycle before it writes the last checkpoint.

    It works wherever it stands among the hooks, so also where other hooks come first: in `training_hooks` of an
    `EstimatorSpec` or a `TPUEstimatorSpec`, and in `hooks` of a `MonitoredTrainingSession`. An `Estimator` with this
    hook creates no saver of its own; saving listeners, such as those of `train_and_evaluate`, follow this one.

    Args:
      optimizers: an `AccumOptimizer` or a list of them. Their train ops must exist when the session is created.
      checkpoint_dir: the directory for checkpoints; in an `Estimator`, its `model_dir`.
      save_secs: seconds between checkpoints. None, without `save_steps`: 600, as in an `Estimator`.
      save_steps: steps between checkpoints.
      kwargs: as for the hook of `tf.compat.v1.train`, such as `listeners`, `saver` or `scaffold`. Without a saver, the
        hook uses the one in the graph's collection SAVERS or, if this is empty, an `accum.compat.v1.Saver`.

    Raises:
      TypeError: `optimizers` contains something other than an `AccumOptimizer`.
      ValueError: when the session is created, if an optimizer has no train op yet.

    Example:
      >>> hook = accum.compat.v1.CheckpointSaverHook(optimizer, params["model_dir"], save_steps=1000)
      >>> return tf.compat.v1.estimator.tpu.TPUEstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=[hook])
    """

    def __init__(
        self,
        optimizers: Any,
        checkpoint_dir: str,
        save_secs: Optional[float] = None,
        save_steps: Optional[int] = None,
        **kwargs: Any,
    ) -> None:
        self._optimizers: List[AccumOptimizer] = (
            list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
        )
        for optimizer in self._optimizers:
            if not isinstance(optimizer, AccumOptimizer):
                raise TypeError(f"`optimizers` must be `AccumOptimizer`s. Received: {optimizer!r}.")
        save_secs = 600 if save_secs is None and save_steps is None else save_secs
        super().__init__(checkpoint_dir, save_secs, save_steps, **kwargs)
        self._flush_ops: List[tf.Operation] = []
        self._micro_steps: List[Optional[tf.Tensor]] = []

    def begin(self) -> None:
        self._flush_ops = [optimizer.flush() for optimizer in self._optimizers]
        self._micro_steps = [optimizer.micro_step for optimizer in self._optimizers]
        savers = tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.SAVERS)
        if self._saver is None and self._scaffold is None and not savers:
            # The base class finds no saver if that of the session's `Scaffold` is one of the user's.
            savers.append(Saver(self._optimizers))
        super().begin()

    def after_create_session(self, session: tf.compat.v1.Session, coord: tf.train.Coordinator) -> None:
        for optimizer, flush_op, micro_step in zip(self._optimizers, self._flush_ops, self._micro_steps):
            _flush_if_full(session, optimizer, flush_op, micro_step)
        super().after_create_session(session, coord)

    def end(self, session: tf.compat.v1.Session) -> None:
        is_unfinished = any(session.run([tensor for tensor in self._micro_steps if tensor is not None]))
        session.run(self._flush_ops)
        # The base class leaves out a second checkpoint with the same number, but a flush that makes no step, or one
        # without effect on `global_step`, changes variables too. Its timer has no public name.
        if is_unfinished:
            self._timer.reset()
        super().end(session)


def _flush_if_full(session: tf.compat.v1.Session, optimizer: AccumOptimizer, flush_op: Any, micro_step: Any) -> None:
    """Make the step of a restored cycle that a further micro-batch would make too long."""
    longest = optimizer._cycle.plan.longest
    # Separate ops, which end a cycle at any time, need no `accum_steps`.
    if micro_step is not None and 1 < longest <= session.run(micro_step):
        session.run(flush_op)
