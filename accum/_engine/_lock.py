"""The lock that orders the train ops of one static graph, because nothing else does."""

from typing import Callable, Iterable

from accum import _tf
from accum._engine import _replicas
from accum._tf import PerReplica, tf


class TrainOpLock:
    """A lock that each train op of a graph holds while it accumulates or makes a step."""

    def __init__(self) -> None:
        self._mutex = tf.CriticalSection(name="accum_cycle")

    def around(
        self, function: Callable[..., tf.Operation], variables: Iterable[tf.Variable]
    ) -> Callable[..., tf.Operation]:
        """Return a function that runs `function(strategy, *args)` under the lock.

        Args:
          function: function to run in cross-replica context. Its arguments are computed before the lock is taken.
          variables: the variables that it uses.
        """

        def locked(strategy: tf.distribute.Strategy, *args: PerReplica) -> tf.Operation:
            waits = tf.control_dependencies(_replicas.local_tensors(strategy, args))
            with waits, _tf.graphs.control_flow_for(variables), _tf.graphs.unrecorded(_tf.graphs.LOCKS):
                return self._mutex.execute(lambda: _replicas.true_after(function(strategy, *args)), False, "cycle").op

        return locked
