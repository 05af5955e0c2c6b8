"""Strategies: which is which, and values of theirs."""

import functools

from accum._tf._line import tf


def _strategy_classes(name):
    """Every class that goes by `name`: of TF 1 and TF 2, before and after it left `experimental`."""
    spaces = [tf.distribute, tf.compat.v1.distribute]
    spaces += [space.experimental for space in spaces if hasattr(space, "experimental")]
    return tuple({getattr(space, name) for space in spaces if hasattr(space, name)})


_CENTRAL_STORAGE = _strategy_classes("CentralStorageStrategy")
_PARAMETER_SERVER = _strategy_classes("ParameterServerStrategy")


def is_central_storage(strategy):
    return isinstance(strategy, _CENTRAL_STORAGE)


def is_parameter_server(strategy):
    return isinstance(strategy, _PARAMETER_SERVER)


@functools.lru_cache(maxsize=1)
def per_replica_maker(strategy):
    """A function that makes one value of a tuple of those of the replicas; its class has no public name."""
    with tf.Graph().as_default():
        one = strategy.extended.call_for_each_replica(lambda: tf.zeros([]))
    if hasattr(one, "device_map"):  # dies with 1.15
        return functools.partial(type(one), one.device_map)
    return type(one)
