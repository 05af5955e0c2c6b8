"""Replicas: what runs once for all of them, what runs on each, and what belongs to one."""

import contextlib
import threading
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

from accum import _tf
from accum._tf import Gradient, tf

SUM = tf.distribute.ReduceOp.SUM


def across_replicas(function: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
    """Call `function(strategy, *args)` once for all replicas; from a replica, the arguments arrive per replica."""
    if tf.distribute.in_cross_replica_context():
        return function(tf.distribute.get_strategy(), *args)
    return tf.distribute.get_replica_context().merge_call(function, args=tuple(args))


def each_replica(strategy: tf.distribute.Strategy, function: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
    """Call `function(*args)` on every replica, each with its own part of `args`; it may communicate.

    TensorFlow runs each in a thread, and looks only once a second whether all have ended. `on_each` has no threads.
    """
    return strategy.extended.call_for_each_replica(function, args=tuple(args))


def on_each(strategy: tf.distribute.Strategy, function: Callable[..., Any], args: Sequence[Any] = ()) -> List[Any]:
    """Call `function(*args)` for every replica of this process, each with its own part of `args`.

    They see no replica context, so they can't communicate; but `replica_number` and `local_variable` know the replica.

    Returns:
      List of what they returned, by replica.
    """
    if not tf.distribute.has_strategy():
        return [function(*args)]
    results = []
    for number, device in enumerate(strategy.extended.worker_devices):
        parts = [_part_of(strategy, value, number) for value in args]
        with tf.device(device), _being(number):
            results.append(function(*parts))
    return results


def per_replica(strategy: tf.distribute.Strategy, results: List[Any]) -> Any:
    """One value a replica out of the list of structures that `on_each` returned."""
    if len(results) == 1:
        return results[0]
    make = _tf.per_replica_maker(strategy)
    return tf.nest.map_structure(lambda *parts: make(parts), *results)


def _part_of(strategy: tf.distribute.Strategy, value: Any, number: int) -> Any:
    def part(leaf: Any) -> Any:
        parts = strategy.experimental_local_results(leaf)
        return parts[number] if len(parts) > 1 else parts[0]

    return tf.nest.map_structure(part, value)


_now = threading.local()


@contextlib.contextmanager
def _being(number: int) -> Iterator[None]:
    before, _now.number = getattr(_now, "number", None), number
    try:
        yield
    finally:
        _now.number = before


def local_tensors(strategy: tf.distribute.Strategy, values: Any) -> List[Any]:
    """All tensors and operations inside `values`, of every replica, in one flat list."""
    flat = []
    for value in tf.nest.flatten(values):
        for local in strategy.experimental_local_results(value):
            flat.extend(tf.nest.flatten(local, expand_composites=True))
    return [tensor for tensor in flat if tensor is not None]


def replica_number() -> int:
    """The number of the replica that is being traced among those of this process, 0 where there is only one."""
    if getattr(_now, "number", None) is not None:
        return _now.number
    if not tf.distribute.has_strategy() or tf.distribute.in_cross_replica_context():
        return 0
    number = tf.distribute.get_replica_context().replica_id_in_sync_group
    static = number if isinstance(number, int) else tf.get_static_value(number)
    return 0 if static is None else int(static) % len(tf.distribute.get_strategy().extended.worker_devices)


def count() -> int:
    """The number of replicas, of all workers."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def is_one_of_several() -> bool:
    """Whether the code that is being run or traced is that of one replica among others."""
    return count() > 1 and not tf.distribute.in_cross_replica_context()


def local_variable(var: tf.Variable) -> tf.Variable:
    """This replica's own part of a per-replica variable; any other variable itself."""
    parts = tf.distribute.get_strategy().experimental_local_results(var)
    return parts[0] if len(parts) == 1 else parts[replica_number() % len(parts)]


def true_after(waits: Any) -> tf.Tensor:
    """A tensor that exists only after `waits`: what the branches of a `tf.cond` return, which must be alike."""
    waits = [wait for wait in tf.nest.flatten(waits) if wait is not None]
    with tf.control_dependencies(waits):
        return tf.identity(tf.constant(True))


def spoil_together(grads: List[Optional[Gradient]], bad: tf.Tensor) -> List[Optional[Gradient]]:
    """Make this replica's gradients hold a NaN where any replica's do, by one scalar that all of them share.

    Args:
      grads: list of gradients of this replica; a gradient may be `tf.IndexedSlices` or None.
      bad: float32 scalar, > 0 where `grads` hold a NaN or an infinity.

    Returns:
      `grads`, the first of which is spoilt if that of any replica is.
    """
    if tf.distribute.get_strategy().num_replicas_in_sync == 1:
        return grads
    total = tf.distribute.get_replica_context().all_reduce(SUM, bad)
    spoil = tf.where(total > 0.0, float("nan"), 0.0)
    first = next(index for index, grad in enumerate(grads) if grad is not None)
    return grads[:first] + [_plus(grads[first], spoil)] + grads[first + 1 :]


def _plus(grad: Gradient, scalar: tf.Tensor) -> Gradient:
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(_plus(grad.values, scalar), grad.indices, grad.dense_shape)
    return grad + tf.cast(scalar, grad.dtype)


def sum_over_replicas(strategy: tf.distribute.Strategy, pairs: Sequence[Tuple[Any, tf.Variable]]) -> List[Any]:
    """Sum per-replica values over the replicas, all in one call. Called across replicas.

    Args:
      strategy: the `tf.distribute.Strategy` in force.
      pairs: list of (per-replica value, variable), the variable says where the sum is needed.
    """
    return strategy.extended.batch_reduce_to(SUM, pairs)
