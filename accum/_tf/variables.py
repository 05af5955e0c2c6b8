"""Identify and create TensorFlow and Keras variables."""

import contextlib
import functools
import platform
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence

import numpy as np

from accum._tf.graphs import in_static_graph
from accum._tf.optimizers import is_legacy_optimizer
from accum._tf.strategies import count_local_replicas, has_several_workers, per_replica_maker
from accum._tf.version import IS_KERAS_3, VERSION, tf


def native(var: Any) -> tf.Variable:
    """Return the `tf.Variable` inside a `keras.Variable` of Keras 3, or any other variable unchanged."""
    return var.value if IS_KERAS_3 and isinstance(var, tf.keras.Variable) else var


def is_overwritten(var: Any) -> bool:
    """Whether a variable is overwritten with its gradient, as Keras 3 does for float8 scales."""
    return bool(getattr(var, "overwrite_with_gradient", False))


def is_sum(var: tf.Variable) -> bool:
    """Whether a variable is declared as the sum over parts of a batch, on several replicas, as a metric of Keras is."""
    aggregation, synchronization = getattr(var, "aggregation", None), getattr(var, "synchronization", None)
    return aggregation == tf.VariableAggregation.SUM and synchronization == tf.VariableSynchronization.ON_READ


def path_of(var: Any) -> str:
    """Return the full path of a variable, including its scopes, without an output number such as ":0"."""
    return getattr(var, "path", var.name).split(":")[0]


def key_of(var: Any) -> int:
    """Return a key that identifies a variable as long as it exists.

    The copies of a mirrored variable share one key, and so do a variable and what casts it in mixed precision, which
    Keras 2 lists in its place.
    """
    var = native(var)
    inner = getattr(var, "__dict__", {}).get("_variable")
    var = inner if isinstance(inner, tf.Variable) else var  # of an `AutoCastVariable`, which has no public name
    if hasattr(var, "_distributed_container"):  # one replica's copy; the container has no public name
        var = var._distributed_container() or var
    return id(var)


def at_least_float32(dtype: tf.DType) -> tf.DType:
    """Return `dtype`, or float32 if it has fewer than 32 bits."""
    return tf.float32 if dtype.size < 4 else dtype


def summed_rows(grad: tf.IndexedSlices) -> tf.IndexedSlices:
    """Return a sparse gradient in which each row occurs once, with the sum of its slices."""
    rows, segments = tf.unique(grad.indices)
    values = tf.math.unsorted_segment_sum(grad.values, segments, tf.size(rows))
    return tf.IndexedSlices(values, rows, grad.dense_shape)


def known_value(value: Any) -> Optional[float]:
    """Return a scalar as a float if its value is known now, or None for a tensor that is computed later."""
    static_value = tf.get_static_value(value) if isinstance(value, tf.Tensor) else value
    return (
        float(static_value)
        if isinstance(static_value, (int, float, np.number, np.ndarray)) and np.ndim(static_value) == 0
        else None
    )


def _has_metal() -> bool:
    """Whether TensorFlow uses an Apple GPU: on macOS it supports no others."""
    return platform.system() == "Darwin" and has_gpu()


def has_gpu() -> bool:
    """Whether this process sees a GPU."""
    return bool(tf.config.experimental.list_physical_devices("GPU"))


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Place counters created in this context, and computations with them, on the host if the GPU is Apple's.

    Apple's GPUs do not support int64. Elsewhere TensorFlow chooses the device, as for Keras' `iterations`, because XLA
    can't compile a function for one device that uses a variable on another. Strategies and static graphs place
    everything themselves.
    """
    if not _has_metal() or tf.distribute.has_strategy() or in_static_graph():
        yield
        return
    with tf.device("/device:CPU:0"):
        yield


def new_keras_variable(optimizer: Any, name: str, initial_value: Any, per_replica: bool) -> tf.Variable:
    """Create a variable that belongs to a Keras optimizer but is not one of its weights.

    In graph mode, Keras only initialises variables that it created, and only legacy optimizers work. There, the
    variable is created with `add_weight`. For a per-replica variable, see `per_replica_kind`.
    """
    initial_value = tf.convert_to_tensor(initial_value)
    kind = {"aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA}
    kind = per_replica_kind(initial_value.dtype) if per_replica else kind
    if is_legacy_optimizer(optimizer) and in_static_graph():
        made = optimizer.add_weight(
            name,
            shape=initial_value.shape,
            dtype=initial_value.dtype,
            initializer=tf.compat.v1.constant_initializer(tf.get_static_value(initial_value)),
            trainable=False,
            **kind,
        )
    else:
        made = tf.Variable(initial_value, trainable=False, name=name, **kind)
    if per_replica:
        save_over_replicas(made)
    return made


def per_replica_kind(dtype: tf.DType) -> Dict[str, Any]:
    """Return the arguments of a new variable that has a value of its own on each replica, without communication.

    Read across replicas and in checkpoints, numbers are the sum over the replicas, which a restore splits. A bool is
    whether any replica's is true, which a restore gives to all: TensorFlow restores so what it would save of the first
    replica alone, because it sums no bools. `save_over_replicas` does the rest, once the variable exists.
    """
    aggregation = tf.VariableAggregation
    return {
        "synchronization": tf.VariableSynchronization.ON_READ,
        "aggregation": aggregation.ONLY_FIRST_REPLICA if dtype == tf.bool else aggregation.SUM,
    }


def save_over_replicas(var: Any) -> None:
    """Let checkpoints hold what `per_replica_kind` says of a variable that was created with it."""
    if tf.distribute.get_strategy().num_replicas_in_sync == 1:
        return
    if var.dtype.base_dtype == tf.bool:
        var._get_cross_replica = functools.partial(_any_replica, tf.distribute.get_strategy(), var)
    elif VERSION < (2, 4):
        _restore_over_all_workers(var)


def save_mean_over_replicas(var: Any, weight: Any) -> None:
    """Let checkpoints of a mean of each replica hold as many of the mean by `weight` as there are replicas.

    A restore splits that, and the sum of weights, equally. Both have been created with `per_replica_kind`.
    """
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync > 1:
        var._get_cross_replica = functools.partial(_mean_over_replicas, strategy, var, weight)


def _mean_over_replicas(strategy: tf.distribute.Strategy, var: Any, weight: Any) -> tf.Tensor:
    dtype = at_least_float32(var.dtype.base_dtype)
    means, weights = (
        [tf.cast(part.read_value(), dtype) for part in strategy.experimental_local_results(one)]
        for one in (var, weight)
    )
    totals = _sum_over_replicas(strategy, [mean * share for mean, share in zip(means, weights)])
    mean = tf.math.divide_no_nan(totals, _sum_over_replicas(strategy, weights))
    return tf.cast(mean * strategy.num_replicas_in_sync, var.dtype.base_dtype)


def _any_replica(strategy: tf.distribute.Strategy, var: Any) -> tf.Tensor:
    """Return the bool tensor that is true where `var` is true on any replica of any worker."""
    parts = [tf.cast(part.read_value(), tf.float32) for part in strategy.experimental_local_results(var)]
    return _sum_over_replicas(strategy, parts) > 0.0


def _sum_over_replicas(strategy: tf.distribute.Strategy, parts: List[tf.Tensor]) -> tf.Tensor:
    """Return the sum of tensors of the replicas of all workers; `parts` are those of this one."""
    value = parts[0] if len(parts) == 1 else per_replica_maker(strategy)(tuple(parts))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None)


def _restore_over_all_workers(var: Any) -> None:
    """Split a restored sum over the replicas of all workers: TF 2.2 and 2.3 only count one worker's. Dies with 2.3."""
    strategy = tf.distribute.get_strategy()
    if not has_several_workers(strategy):
        return
    share = count_local_replicas(strategy) / strategy.num_replicas_in_sync
    gather = var._gather_saveables_for_checkpoint

    def shared(factory: Callable[..., Any], **kwargs: Any) -> Any:
        saveable = factory(**kwargs)
        restore = saveable.restore
        saveable.restore = lambda restored_tensors, restored_shapes: restore(
            [tensor * share for tensor in restored_tensors], restored_shapes
        )
        return saveable

    var._gather_saveables_for_checkpoint = lambda: {
        name: functools.partial(shared, factory) for name, factory in gather().items()
    }


def new_statistic(name: str, shape: Any, dtype: tf.DType) -> tf.Variable:
    """Create a per-replica variable of zeros that is read and saved as the mean over replicas, as in Keras' layer."""
    return tf.Variable(
        tf.zeros(shape, dtype),
        trainable=False,
        name=name,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.MEAN,
    )


def new_counter(name: str, shape: Sequence[int] = ()) -> tf.Variable:
    """Create an int64 variable of zeros, one for each replica, which are the same on all of them."""
    return tf.Variable(
        tf.zeros(shape, tf.int64),
        trainable=False,
        name=name,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def set_variable(var: Any, value: Any) -> None:
    """Assign to a scalar variable from Python; in a static graph, through Keras' session."""
    if in_static_graph():
        tf.compat.v1.keras.backend.set_value(var, value)
    else:
        var.assign(tf.cast(value, var.dtype))


def values_of(variables: Iterable[Any]) -> List[np.ndarray]:
    """Return the values of Keras' variables as arrays; in a static graph, through Keras' session."""
    if in_static_graph():
        return tf.compat.v1.keras.backend.batch_get_value(variables)
    return [np.asarray(var.numpy() if hasattr(var, "numpy") else var) for var in variables]
