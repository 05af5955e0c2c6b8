"""Two replicas on the logical CPUs of a process, and counters of their communication."""

import contextlib

import tensorflow as tf

R = 2
RUN = "run" if hasattr(tf.distribute.Strategy, "run") else "experimental_run_v2"


def make_cpus():
    """Make four logical CPUs, so that a MirroredStrategy can have several replicas; one device stays the default."""
    cpu = tf.config.experimental.list_physical_devices("CPU")[0]
    devices = [tf.config.experimental.VirtualDeviceConfiguration()] * 4
    tf.config.experimental.set_virtual_device_configuration(cpu, devices)


def look_often_for_the_end_of_replicas():
    """Shorten a wait: TensorFlow checks only once a second whether the threads that trace replicas have ended."""
    coordinator = tf.compat.v1.train.Coordinator
    wait = coordinator.wait_for_stop
    coordinator.wait_for_stop = lambda self, timeout=None: wait(self, timeout and min(timeout, 0.01))


def mirrored(cross_device_ops=None, replicas=R):
    """Create a strategy with two replicas, or up to four."""
    ops = cross_device_ops or tf.distribute.ReductionToOneDevice()
    devices = ["CPU:{}".format(number) for number in range(replicas)]
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=ops)


class CountingOps(tf.distribute.ReductionToOneDevice):
    """Counts the tensors and bytes of each reduction when it is executed, which a trace can't show.

    Attributes:
      executed: list of (number of values in one reduction, their bytes per replica).
    """

    def __init__(self):
        super().__init__()
        self.executed = []
        self._is_counted = False  # a reduction of several values calls other reductions

    def __deepcopy__(self, memo):
        return self  # an Estimator copies its strategy

    @contextlib.contextmanager
    def _counting(self, per_replica_values):
        if self._is_counted:
            yield
            return
        self._is_counted = True
        try:
            with tf.control_dependencies([op for op in [self._add_count(per_replica_values)] if op is not None]):
                yield
        finally:
            self._is_counted = False

    def _add_count(self, per_replica_values):
        locals_ = [value.values[0] if hasattr(value, "values") else value for value in per_replica_values]
        sizes = [tf.size(value) * value.dtype.size for value in locals_]
        done = tf.py_function(self._count, [len(sizes), tf.add_n(sizes)], [])
        return done if isinstance(done, tf.Operation) else None

    def _count(self, values, size):
        self.executed.append((int(values), int(size)))

    def of_gradients(self):
        """Return the reductions of more than a scalar. Metrics, the end of data and overflow checks are scalars."""
        return [(values, size) for values, size in self.executed if size > 8]

    def reduce_implementation(self, reduce_op, per_replica_value, *args, **kwargs):
        with self._counting([per_replica_value]):
            return super().reduce_implementation(reduce_op, per_replica_value, *args, **kwargs)

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, *args, **kwargs):
        with self._counting([value for value, _ in value_destination_pairs]):
            return super().batch_reduce_implementation(reduce_op, value_destination_pairs, *args, **kwargs)
