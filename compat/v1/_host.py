"""What a static graph lends to the engine: variables and where they stand, the inner optimizer, the clock."""

import contextlib

from accum import _tf
from accum._host import Host
from accum._tf import tf


class GraphHost(Host):
    """Lends the optimizer of a static graph to the engine.

    Args:
      wrapper: the `AccumOptimizer`.
      name: what its variables are named by.
      counts_micro_steps: whether `global_step` counts micro steps.
      is_local: whether accumulators are local variables of this worker.
    """

    def __init__(self, wrapper, name, counts_micro_steps, is_local):
        self.global_step = None
        self.weight = None  # of the train ops that are being made, if they say none
        self.variables = ()  # of the call under way: the scalars stand beside the first
        self.state = []  # what has been made here for the cycle itself
        self.gathered = []  # what has been made here for its companions
        self._wrapper = wrapper
        self._name = name
        self._counts_micro_steps = counts_micro_steps
        self._is_local = is_local

    def scalar(self, name, initial_value, per_replica=False):
        beside = min(self.variables, key=lambda var: var.name)
        name = "{}/{}".format(self._name, name)
        with self._making(beside, per_replica):
            with tf.compat.v1.name_scope(None):  # one name wherever `minimize` is called: checkpoints go by it
                made = self._wrapper._create_non_slot_variable(initial_value, name, beside)
        self.state.append(made)
        return made

    def buffer(self, var, name, shape, dtype):
        # The optimizers' own helper: colocated, with the slice information of a partitioned variable, saved.
        zeros = tf.compat.v1.zeros_initializer()
        scope = "{}/{}".format(self._name, name)
        with self._making(var, per_replica=True):
            made = self._wrapper._get_or_make_slot_with_initializer(var, zeros, shape, dtype, name, scope)
        self.state.append(made)
        return made

    @contextlib.contextmanager
    def _making(self, var, per_replica):
        """Make the variable created within one of this worker's own, and one of each replica's own."""
        worker = _worker_that_shares(var)
        if worker is not None and not self._is_local:
            raise ValueError(
                "{} stands on {}, where workers share it. Its accumulator would stand there too, and mix the "
                "micro-batches of all of them: pass `local_accumulators=True`.".format(var.name, var.device)
            )

        def creator(next_creator, **kwargs):
            if self._is_local:
                kwargs["collections"] = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
            if per_replica and tf.distribute.has_strategy():
                kwargs["synchronization"] = tf.VariableSynchronization.ON_READ
                kwargs["aggregation"] = tf.VariableAggregation.SUM
            if worker is None:
                return next_creator(**kwargs)
            with tf.compat.v1.get_default_graph().colocate_with(None, ignore_existing=True):
                with tf.device(None), tf.device(worker):
                    return next_creator(**kwargs)

        with tf.variable_creator_scope(creator):
            yield

    @property
    def waits_for_others(self):
        return _tf.is_sync_replicas_optimizer(self._wrapper.optimizer)

    @property
    def reduces(self):
        return _tf.is_graph_optimizer(self._wrapper.optimizer)

    def when(self, condition, function):
        if not self.waits_for_others:
            return super().when(condition, function)
        message = "Nothing has been accumulated here, and the other workers wait for a gradient from this one."
        with tf.control_dependencies([tf.compat.v1.Assert(condition, [message])]):
            return function()

    def prepare(self, variables, used=()):
        _tf.prepare_inner(self._wrapper.optimizer, variables, used)

    def apply(self, grads_and_vars, replicas):
        global_step = None if self._counts_micro_steps else self.global_step
        # Where workers wait, the chief's queue runner runs some of these ops by themselves: no cycle must hold them up.
        with tf.control_dependencies(None if self.waits_for_others else []):
            return _tf.apply_inner(self._wrapper.optimizer, grads_and_vars, replicas, global_step)

    def count_micro_step(self, is_taken):
        if not self._counts_micro_steps or self.global_step is None:
            return None
        return self.global_step.assign_add(tf.cast(is_taken, self.global_step.dtype.base_dtype))

    def steps(self):
        return tf.identity(self.global_step)


def _worker_that_shares(var):
    """The device of ops made here, where `var` stands in another process than they do; None where it does not."""
    if not _tf.is_of_a_cluster(var):
        return None
    worker = tf.no_op(name="worker").device  # whatever device function is in force has its say
    here, there = (tf.compat.v1.DeviceSpec.from_string(device) for device in (worker, var.device))
    return None if (here.job, here.task) == (there.job, there.task) else worker
