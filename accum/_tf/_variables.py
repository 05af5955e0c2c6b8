"""Variables: which is which, and how to make one."""

import contextlib
import functools
import platform

import numpy as np

from accum._tf._families import is_legacy_optimizer
from accum._tf._graphs import in_static_graph
from accum._tf._line import IS_KERAS_3, VERSION, tf


def native(var):
    """The `tf.Variable` of a `keras.Variable`, which Keras 3 has; anything else itself."""
    return var.value if IS_KERAS_3 and isinstance(var, tf.keras.Variable) else var


def is_overwritten(var):
    """Whether a variable takes its gradient as its value, as Keras 3 has it for scales of float8."""
    return bool(getattr(var, "overwrite_with_gradient", False))


def path_of(var):
    """The whole name of a variable, with those of what it is in, without the number of an output."""
    return getattr(var, "path", var.name).split(":")[0]


def variable_key(var):
    """What identifies a variable for as long as it lives, also one copy of a mirrored one."""
    var = native(var)
    if hasattr(var, "_distributed_container"):  # a replica's own copy; the container has no public name
        var = var._distributed_container() or var
    return id(var)


def at_least_float32(dtype):
    """`dtype`, or float32 in the place of one of 16 bits."""
    return tf.float32 if dtype.size < 4 else dtype


def known_value(value):
    """The value of a scalar that is known now, as a float; None for a tensor that is computed later."""
    known = tf.get_static_value(value) if isinstance(value, tf.Tensor) else value
    return float(known) if isinstance(known, (int, float, np.number, np.ndarray)) and np.ndim(known) == 0 else None


def _has_metal():
    """Whether TensorFlow has one of Apple's GPUs: on macOS it knows no others."""
    return platform.system() == "Darwin" and bool(tf.config.experimental.list_physical_devices("GPU"))


@contextlib.contextmanager
def on_host():
    """Put the counters made within, and what is computed of them, on the host where the GPU lacks int64: Apple's.

    Elsewhere they stand where TensorFlow puts them, as Keras' `iterations` does: XLA compiles no function for one
    device that uses a variable of another. Strategies and static graphs place everything by themselves.
    """
    if not _has_metal() or tf.distribute.has_strategy() or in_static_graph():
        yield
        return
    with tf.device("/device:CPU:0"):
        yield


def new_keras_variable(optimizer, name, initial_value, per_replica):
    """A variable that belongs to a Keras optimizer and is no weight of it.

    Keras in graph mode initialises only what was made through it, and only legacy optimizers work there; so those
    make it through `add_weight`. A per-replica variable is summed where it is read.
    """
    initial_value = tf.convert_to_tensor(initial_value)
    kind = tf.VariableSynchronization, tf.VariableAggregation
    synchronization = kind[0].ON_READ if per_replica else kind[0].AUTO
    aggregation = kind[1].SUM if per_replica else kind[1].ONLY_FIRST_REPLICA
    if is_legacy_optimizer(optimizer) and in_static_graph():
        return optimizer.add_weight(
            name,
            shape=initial_value.shape,
            dtype=initial_value.dtype,
            initializer=tf.compat.v1.constant_initializer(tf.get_static_value(initial_value)),
            trainable=False,
            synchronization=synchronization,
            aggregation=aggregation,
        )
    made = tf.Variable(
        initial_value, trainable=False, name=name, synchronization=synchronization, aggregation=aggregation
    )
    if per_replica and VERSION < (2, 4):
        _restore_over_all_workers(made)
    return made


def _restore_over_all_workers(var):
    """Split a restored sum over the replicas of all workers: TF 2.2 and 2.3 see those of one. Dies with 2.3."""
    strategy = tf.distribute.get_strategy()
    if not tf.distribute.has_strategy() or len(strategy.extended.worker_devices) == strategy.num_replicas_in_sync:
        return
    share = len(strategy.extended.worker_devices) / strategy.num_replicas_in_sync
    gather = var._gather_saveables_for_checkpoint

    def shared(factory, **kwargs):
        saveable = factory(**kwargs)
        restore = saveable.restore
        saveable.restore = lambda restored_tensors, restored_shapes: restore(
            [tensor * share for tensor in restored_tensors], restored_shapes
        )
        return saveable

    var._gather_saveables_for_checkpoint = lambda: {
        name: functools.partial(shared, factory) for name, factory in gather().items()
    }


def new_statistic(name, shape, dtype):
    """A variable of zeros that belongs to one replica, and is read and saved as the mean over them, as Keras' own."""
    return tf.Variable(
        tf.zeros(shape, dtype),
        trainable=False,
        name=name,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.MEAN,
    )


def set_variable(var, value):
    """Assign to a scalar variable from Python, also in a static graph that Keras holds the session of."""
    if in_static_graph():
        tf.compat.v1.keras.backend.set_value(var, value)
    else:
        var.assign(tf.cast(value, var.dtype))


def values_of(variables):
    """The values of Keras' variables as arrays, also in a static graph that Keras holds the session of."""
    if in_static_graph():
        return tf.compat.v1.keras.backend.batch_get_value(variables)
    return [np.asarray(var.numpy() if hasattr(var, "numpy") else var) for var in variables]
