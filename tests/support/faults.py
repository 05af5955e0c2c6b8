"""Faults on purpose: the n-th of what is counted fails, as it would where memory or a disk is full."""

import contextlib
import resource

import tensorflow as tf
from replicas import CountingOps


class Faults:
    """Counts what is reached, and lets the n-th fail.

    Attributes:
      reached: how often it was reached.
      at: which one fails, from 1 on; None: none does.
    """

    def __init__(self):
        self.reached, self.at = 0, None

    def set(self, at):
        self.reached, self.at = 0, at

    def reach(self):
        self.reached += 1
        if self.reached == self.at:
            raise MemoryError("a fault on purpose")

    @property
    def has_come(self):
        return self.at is not None and self.reached >= self.at


FAULTS = Faults()


def _reach(tensor):
    """Return `tensor`, which may fail whenever a graph computes it."""

    def reach(value):
        FAULTS.reach()
        return value

    reached = tf.py_function(reach, [tensor], tensor.dtype)
    reached.set_shape(tensor.shape)
    return reached


@tf.custom_gradient
def may_fail(tensor):
    """Return `tensor`, which may fail, and so may its gradient."""
    return _reach(tensor), _reach


class MayFail(tf.keras.layers.Layer):
    """A layer that may fail, forwards and backwards."""

    def call(self, inputs):
        return may_fail(inputs)


class FailingOps(CountingOps):
    """Communication between replicas that may fail."""

    def _count(self, values, size):
        FAULTS.reach()


@contextlib.contextmanager
def failing_assignments(monkeypatch):
    """Let assignments to variables fail, which eager execution makes one by one."""
    cls = type(tf.Variable(0.0))

    def failing(name):
        method = getattr(cls, name)

        def assign(self, *args, **kwargs):
            FAULTS.reach()
            return method(self, *args, **kwargs)

        return assign

    with monkeypatch.context() as patch:
        for name in ("assign", "assign_add", "assign_sub"):
            patch.setattr(cls, name, failing(name))
        yield


@contextlib.contextmanager
def full_disk(size):
    """Let no file grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
