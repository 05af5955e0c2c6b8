"""Identify distribution strategies, and create per-replica values."""

import functools
import itertools
import weakref
from typing import Any, Callable, Dict, Tuple

from accum._tf.version import VERSION, tf


def _strategy_classes(name: str) -> Tuple[type, ...]:
    """Return every class called `name`: of TF 1 and TF 2, in `experimental` and outside."""
    spaces = [tf.distribute, tf.compat.v1.distribute]
    spaces += [space.experimental for space in spaces if hasattr(space, "experimental")]
    return tuple({getattr(space, name) for space in spaces if hasattr(space, name)})


_CENTRAL_STORAGE = _strategy_classes("CentralStorageStrategy")
_PARAMETER_SERVER = _strategy_classes("ParameterServerStrategy")


def is_central_storage(strategy: tf.distribute.Strategy) -> bool:
    return isinstance(strategy, _CENTRAL_STORAGE)


def is_parameter_server(strategy: tf.distribute.Strategy) -> bool:
    return isinstance(strategy, _PARAMETER_SERVER)


_first_keys = itertools.count(2**20, 2**16)
_separated: Any = weakref.WeakSet()


def separate_collectives(strategy: tf.distribute.Strategy) -> None:
    """Number the collectives that a strategy will make apart from those of others in this process.

    Since TF 2.5, each `MirroredStrategy` numbers its own from 1, and TensorFlow takes those of equal number for the
    same. So a second strategy fails at its first collective of another shape, also in plain Keras: "Shape mismatch in
    the collective instance". Several workers have to agree on their numbers, which are left alone.
    """
    keys = getattr(strategy.extended, "_collective_keys", None)  # has no public name
    if keys is not None and keys not in _separated and isinstance(strategy, tf.distribute.MirroredStrategy):
        _separated.add(keys)
        keys._group_key = first = next(_first_keys)
        for numbers in keys._instance_key_table.values():  # of the groups of devices that the strategy knows already
            numbers.update({device: number + first for device, number in numbers.items()})


@functools.lru_cache(maxsize=1)
def per_replica_maker(strategy: tf.distribute.Strategy) -> Callable[..., Any]:
    """Return a function that makes a per-replica value from a tuple of values; its class has no public name."""
    with tf.Graph().as_default():
        one = strategy.extended.call_for_each_replica(lambda: tf.zeros([]))
    kind: Any = type(one)
    if hasattr(one, "device_map"):  # dies with 1.15
        return functools.partial(kind, one.device_map)
    return kind


def count_local_replicas(strategy: tf.distribute.Strategy) -> int:
    """Return the number of replicas in this process."""
    if strategy.num_replicas_in_sync == 1:  # the default strategy has no devices
        return 1
    return len(strategy.extended.worker_devices)


def has_several_workers(strategy: tf.distribute.Strategy) -> bool:
    """Whether other processes have replicas of a strategy too."""
    return strategy.num_replicas_in_sync != count_local_replicas(strategy)


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process writes the files of a job: the first worker does, or the only process."""
    return not has_several_workers(strategy) or bool(strategy.extended.should_checkpoint)


PACK_BYTES = 8 * 2**20
"""Workers sum gradients in packs of so many bytes, each as soon as its last gradient has been computed."""


def sums_in_packs(strategy: tf.distribute.Strategy) -> bool:
    """Whether a strategy has several processes that can sum gradients in packs; by default, TensorFlow makes one."""
    if VERSION < (2, 5) or not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):  # dies with 2.4
        return False
    return has_several_workers(strategy)


def options_of_sums(strategy: tf.distribute.Strategy) -> Dict[str, Any]:
    """Return the arguments with which `batch_reduce_to` sums in packs, if it can, and the user has chosen no size."""
    chosen = getattr(getattr(strategy.extended, "_communication_options", None), "bytes_per_pack", 0)
    if chosen or not sums_in_packs(strategy):
        return {}
    return {"options": tf.distribute.experimental.CommunicationOptions(bytes_per_pack=PACK_BYTES)}


def has_replicas_of_one_number(strategy: tf.distribute.Strategy) -> bool:
    """Whether the replicas of each worker are numbered from 0, so that numbers don't tell replicas apart."""
    return VERSION < (2, 4) and has_several_workers(strategy)  # dies with 2.3
