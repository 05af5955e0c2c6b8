"""Run functions once for all replicas or on each of them, and find what belongs to one replica.

`rows_of_group` concatenates tensors of several replicas, so that a loss may compare the examples of all of them (law
L19). Each replica then computes the same loss, of all examples, and its gradient goes back to the replicas that hold
them.
"""

import contextlib
import threading
from typing import Callable, Iterator, List, Optional, Sequence, Tuple, Union

import numpy as np

from accum import _tf
from accum._engine._gradients import GradientFunction, custom_gradient, shifted
from accum._tf import Gradient, GradsAndVars, Leaf, Nested, PerReplica, Scalar, tf

# --------------------------------------------------------------------------------------------------------------------
# Functions on replicas, and numbers of them


SUM = tf.distribute.ReduceOp.SUM


def across_replicas(function: Callable[..., Nested], args: Sequence[PerReplica] = ()) -> PerReplica:
    """Call `function(strategy, *args)` once for all replicas. On a replica, `args` become per-replica values first."""
    if tf.distribute.in_cross_replica_context():
        return function(tf.distribute.get_strategy(), *args)
    return tf.distribute.get_replica_context().merge_call(function, args=tuple(args))


def each_replica(
    strategy: tf.distribute.Strategy, function: Callable[..., Nested], args: Sequence[PerReplica] = ()
) -> PerReplica:
    """Call `function(*args)` on every replica with its own part of `args`; the function may communicate.

    TensorFlow runs each replica in a thread, and checks only once a second whether all threads have ended. `on_each`
    uses no threads. In a static graph, nor does this for a single replica: a train op is built in a critical section,
    which holds the graph's lock, so a thread that adds an op to the graph would wait for ever.
    """
    if strategy.num_replicas_in_sync == 1 and _tf.graphs.in_static_graph():
        with tf.distribute.ReplicaContext(strategy, tf.constant(0)):
            return on_each(strategy, function, args)[0]
    return strategy.extended.call_for_each_replica(function, args=tuple(args))


def on_each(
    strategy: tf.distribute.Strategy, function: Callable[..., Nested], args: Sequence[PerReplica] = ()
) -> List[Nested]:
    """Call `function(*args)` for every replica of this process with its own part of `args`.

    There is no replica context, so the function can't communicate. But `replica_number` and `local_variable` work.

    Returns:
      List of the results, one for each replica.
    """
    if not tf.distribute.has_strategy():
        return [function(*args)]
    results = []
    for number, device in enumerate(strategy.extended.worker_devices):
        parts = [_part_of(strategy, value, number) for value in args]
        with tf.device(device), _being(number):
            results.append(function(*parts))
    return results


def per_replica(strategy: tf.distribute.Strategy, results: List[Nested]) -> PerReplica:
    """Convert the list of results of `on_each` to per-replica values."""
    if len(results) == 1:
        return results[0]
    make = _tf.strategies.per_replica_maker(strategy)
    return tf.nest.map_structure(lambda *parts: make(parts), *results)


def _part_of(strategy: tf.distribute.Strategy, value: PerReplica, number: int) -> Nested:
    def part(leaf: PerReplica) -> Leaf:
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


def local_tensors(strategy: tf.distribute.Strategy, values: PerReplica) -> List[Union[tf.Tensor, tf.Operation]]:
    """Return a flat list of all tensors and operations in `values`, of every replica."""
    flat = []
    for value in tf.nest.flatten(values):
        for local in strategy.experimental_local_results(value):
            flat.extend(tf.nest.flatten(local, expand_composites=True))
    return [tensor for tensor in flat if tensor is not None]


def replica_number() -> int:
    """Return the number of the current replica among those of this process; 0 if there is only one."""
    if getattr(_now, "number", None) is not None:
        return _now.number
    if not is_on_replica():
        return 0
    number = tf.distribute.get_replica_context().replica_id_in_sync_group
    static = number if isinstance(number, int) else tf.get_static_value(number)
    return 0 if static is None else int(static) % len(tf.distribute.get_strategy().extended.worker_devices)


def is_on_replica() -> bool:
    """Whether this is run on one of the replicas of a strategy."""
    is_on_one = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    return is_on_one or getattr(_now, "number", None) is not None


def count() -> int:
    """Return the number of replicas of all workers."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def sum_over_workers(strategy: tf.distribute.Strategy, value: np.ndarray) -> np.ndarray:
    """Sum an array over the processes of a strategy. All of them call this, between steps.

    Args:
      strategy: a `tf.distribute.Strategy` of one or several workers.
      value: float array, of the same shape on each worker.

    Returns:
      A float64 array of that shape.
    """
    if not _tf.strategies.has_several_workers(strategy):
        return value
    part = tf.constant(value / _tf.strategies.count_local_replicas(strategy), tf.float64)  # each replica adds its part

    @_tf.graphs.run_as_written
    def all_reduced() -> tf.Tensor:
        return tf.distribute.get_replica_context().all_reduce(SUM, part)

    sums = tf.function(lambda: strategy.run(all_reduced), autograph=False)()
    return strategy.experimental_local_results(sums)[0].numpy()


def is_one_of_several() -> bool:
    """Whether the current code runs, or is traced, on one of several replicas."""
    return count() > 1 and not tf.distribute.in_cross_replica_context()


def local_variable(var: tf.Variable) -> tf.Variable:
    """Return this replica's part of a per-replica variable, or any other variable unchanged."""
    parts = tf.distribute.get_strategy().experimental_local_results(var)
    return parts[0] if len(parts) == 1 else parts[replica_number() % len(parts)]


def true_after(waits: Nested) -> tf.Tensor:
    """Return a true tensor that waits for `waits`. All branches of a `tf.cond` can return one."""
    waits = [wait for wait in tf.nest.flatten(waits) if wait is not None]
    with tf.control_dependencies(waits):
        return tf.identity(tf.constant(True))


def sum_of_group(values: Sequence[tf.Tensor], group_size: int) -> List[tf.Tensor]:
    """Sum tensors over the replicas of this replica's group. Every replica calls this; those of a group get the same.

    Args:
      values: list of float tensors, which have the same shapes on all replicas.
      group_size: the number of replicas in a group, which divides the number of replicas. Replicas 0 to n - 1 are the
        first group of n, and so on.
    """
    if group_size == 1:
        return list(values)  # not by TensorFlow, which would keep the graph of the sum for ever
    context = tf.distribute.get_replica_context()
    if group_size == count():
        return context.all_reduce(SUM, list(values))
    require_numbers()
    group = tf.cast(context.replica_id_in_sync_group, tf.int32) // group_size
    is_own = tf.equal(tf.range(count() // group_size), group)
    slots = [tf.where(_along_first(is_own, value), value, tf.zeros_like(value)) for value in values]
    return [tf.gather(slot, group) for slot in context.all_reduce(SUM, slots)]


def number_among_all() -> Union[int, tf.Tensor]:
    """Return the number of the current replica among those of all processes, an int or int scalar tensor."""
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def have_one_number() -> bool:
    """Whether replicas can't be told apart by their numbers."""
    return _tf.strategies.has_replicas_of_one_number(tf.distribute.get_strategy())


def require_numbers() -> None:
    """Raise if replicas can't be told apart by their numbers."""
    if have_one_number():
        raise ValueError(
            "TensorFlow 2.2 and 2.3 give the replicas of each worker the same numbers, so `whole_batch` can't tell "
            "whose examples are whose: pass `replicas_per_group={'loss': 1}`, with which each replica computes its own "
            "loss, and no other groups; or use TensorFlow 2.4 or later. [accum: replicas-loss]"
        )


def share_of_replica(weight: tf.Tensor, group_size: Optional[int] = None) -> tf.Tensor:
    """Return the weight of this replica in multiples of the mean weight of its group; 0 if all are 0.

    Args:
      weight: float scalar >= 0.
      group_size: as for `sum_of_group`; None: all replicas.
    """
    group_size = count() if group_size is None else group_size
    (total,) = sum_of_group([tf.identity(weight)], group_size)  # several workers ask for its device; an input has none
    return tf.math.divide_no_nan(weight * float(group_size), total)


def _along_first(mask: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Return a mask with as many further axes of length 1 as `value` has axes."""
    return tf.reshape(mask, tf.concat([[-1], tf.ones_like(tf.shape(value))], axis=0))


def spoil_together(grads: List[Optional[Gradient]], bad: tf.Tensor) -> List[Optional[Gradient]]:
    """Put NaN into this replica's gradients if those of any replica are not finite. Replicas share one scalar for this.

    Args:
      grads: list of gradients of this replica; a gradient may be `tf.IndexedSlices` or None.
      bad: float32 scalar, > 0 if `grads` contain NaN or infinity.

    Returns:
      `grads`; if any replica has such gradients, the first gradient is NaN.
    """
    if tf.distribute.get_strategy().num_replicas_in_sync == 1:
        return grads
    total = tf.distribute.get_replica_context().all_reduce(SUM, bad)
    spoil = tf.where(total > 0.0, float("nan"), 0.0)
    first = next(index for index, grad in enumerate(grads) if grad is not None)
    return grads[:first] + [shifted(grads[first], spoil)] + grads[first + 1 :]


def sum_over_replicas(
    strategy: tf.distribute.Strategy, pairs: Sequence[Tuple[PerReplica, tf.Variable]]
) -> List[PerReplica]:
    """Sum per-replica values over the replicas in one call, in cross-replica context.

    Several workers sum the last values first, each as soon as it and those near it have been computed: backward passes
    compute gradients in this order.

    Args:
      strategy: the current `tf.distribute.Strategy`.
      pairs: list of (per-replica value, variable); the sum is placed on the devices of the variable.
    """
    return strategy.extended.batch_reduce_to(SUM, pairs, **_tf.strategies.options_of_sums(strategy))


def sum_gradients(grads_and_vars: GradsAndVars) -> List[Tuple[Gradient, tf.Variable]]:
    """Sum each gradient over the replicas. Every replica calls this with its own."""
    variables = [var for _, var in grads_and_vars]

    def summed(strategy: tf.distribute.Strategy, grads: Sequence[PerReplica]) -> List[PerReplica]:
        return sum_over_replicas(strategy, list(zip(grads, variables)))

    grads = across_replicas(summed, [[grad for grad, _ in grads_and_vars]])
    return list(zip(grads, variables))


def overlap() -> bool:
    """Whether gradients can be summed over workers while others are still computed."""
    return not tf.executing_eagerly() and _tf.strategies.sums_in_packs(tf.distribute.get_strategy())


def after_all(values: List[Optional[Gradient]]) -> List[Optional[Gradient]]:
    """Return values that exist when all of them have been computed, on one replica."""
    with tf.control_dependencies(_tf.graphs.waits_for_all(values)):
        return [
            value if value is None else tf.nest.map_structure(tf.identity, value, expand_composites=True)
            for value in values
        ]


# --------------------------------------------------------------------------------------------------------------------
# The examples of several replicas, concatenated


def rows_of_group(
    tensors: Sequence[tf.Tensor], group_size: int, weight: Callable[[], Optional[Scalar]]
) -> List[tf.Tensor]:
    """Concatenate tensors along their first axis over the replicas of a group. Every replica calls this.

    Args:
      tensors: list of real numbers or bools. Their first axes may have different lengths on different replicas, 0
        included; the others are the same on all.
      group_size: the number of replicas in a group, as for `sum_of_group`.
      weight: function that returns the scalar >= 0 by which this replica's gradients will be multiplied later, or None
        for 1; called when they are computed. See `_statistics.over_replicas`.

    Returns:
      List of tensors, the same on all replicas of the group, in the order of the replicas.

    Raises:
      ValueError, or tf.errors.InvalidArgumentError when a graph runs: axes other than the first differ.
    """
    require_numbers()
    context = tf.distribute.get_replica_context()
    number = tf.cast(context.replica_id_in_sync_group, tf.int32)
    counts = _counts(context, number, tensors)
    ends = tf.pad(tf.cumsum(tf.cast(counts, tf.int32)), [[1, 0], [0, 0]])  # (replicas + 1, tensors)
    first = number // group_size * group_size
    bounds = [ends[number], ends[number + 1], ends[first], ends[first + group_size], ends[-1]]
    gathers = [_Rows(context, *[bound[index] for bound in bounds]) for index in range(len(tensors))]
    rows = [gather.of_group(tf.stop_gradient(tensor)) for gather, tensor in zip(gathers, tensors)]
    floats = [index for index, tensor in enumerate(tensors) if tensor.dtype.is_floating]

    @custom_gradient
    def linked(*_: tf.Tensor) -> Tuple[List[tf.Tensor], GradientFunction]:
        def grad(*upstream: tf.Tensor) -> List[tf.Tensor]:
            """Add up the gradients of all replicas by this replica's rows, each by the weight of its replica."""
            own_weight = weight()
            own_weight = tf.cast(1.0 if own_weight is None else own_weight, tf.float32)
            grads = []
            for index, grad_of_row in zip(floats, upstream):
                exact = tf.cast(grad_of_row, _tf.variables.at_least_float32(grad_of_row.dtype))
                factor = tf.cast(own_weight, exact.dtype)
                total = tf.math.divide_no_nan(gathers[index].of_replica(factor * exact), factor)
                grads.append(tf.cast(total, grad_of_row.dtype))
            return grads

        return [tf.identity(rows[index]) for index in floats], grad

    for index, tensor in zip(floats, linked(*[tensors[index] for index in floats]) if floats else []):
        rows[index] = tensor
    return rows


def _counts(context: tf.distribute.ReplicaContext, number: tf.Tensor, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the lengths of the first axes of `tensors`, (replicas, tensors), and check that the others are alike."""
    own = tf.cast(tf.concat([tf.shape(tensor) for tensor in tensors], axis=0), tf.float32)
    is_own = tf.equal(tf.range(count()), number)
    shapes = context.all_reduce(SUM, tf.where(is_own[:, tf.newaxis], own, tf.zeros_like(own)))
    firsts = [sum(tensor.shape.rank for tensor in tensors[:index]) for index in range(len(tensors))]
    others = [axis for axis in range(sum(tensor.shape.rank for tensor in tensors)) if axis not in firsts]
    checks: List[Optional[tf.Operation]] = []
    if others and not _tf.graphs.is_compiled_by_xla_here():  # which can't raise
        apart = tf.gather(shapes, others, axis=1)
        message = (
            "Over the outputs of several replicas, what a loss receives must have equal axes on all of them, but for "
            "the first: pad the batch before it is distributed, or pass `replicas_per_group={'loss': 1}`, with which "
            "each replica computes its own loss. [accum: replicas-loss]"
        )
        checks.append(tf.debugging.assert_equal(apart, tf.broadcast_to(apart[:1], tf.shape(apart)), message=message))
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.gather(shapes, firsts, axis=1)


class _Rows:
    """Where the rows of this replica and of its group are among those of all replicas.

    Args:
      context: the replica context.
      begin, end: those of this replica.
      group_begin, group_end: those of its group.
      count: the number of all.
    """

    def __init__(
        self,
        context: tf.distribute.ReplicaContext,
        begin: tf.Tensor,
        end: tf.Tensor,
        group_begin: tf.Tensor,
        group_end: tf.Tensor,
        count: tf.Tensor,
    ) -> None:
        self._context = context
        self._own = begin, end
        self._group = group_begin, group_end
        self._count = count

    def of_group(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the rows of the group, given those of this replica."""
        # Collectives know few dtypes. All but one of the numbers that they add up are 0, so nothing is rounded.
        dtype = tensor.dtype if tensor.dtype.size > 4 else tf.float32 if tensor.dtype.is_floating else tf.int32
        rows = tf.cast(self._summed(tf.cast(tensor, dtype), self._own, self._group), tensor.dtype)
        rows.set_shape([None] + tensor.shape.as_list()[1:])
        return rows

    def of_replica(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the sum over all replicas of the rows of this replica, given those of the group."""
        return self._summed(tensor, self._group, self._own)

    def _summed(
        self, tensor: tf.Tensor, span: Tuple[tf.Tensor, tf.Tensor], wanted: Tuple[tf.Tensor, tf.Tensor]
    ) -> tf.Tensor:
        """Put `tensor` in its place among the rows of all replicas, add these up, and return those that are wanted."""
        rows = tf.stack([span[0], self._count - span[1]])
        others = tf.zeros([tensor.shape.rank - 1, 2], tf.int32)
        padded = tf.pad(tensor, tf.concat([rows[tf.newaxis], others], axis=0))
        return self._context.all_reduce(SUM, padded)[wanted[0] : wanted[1]]
