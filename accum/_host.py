"""What lends itself to the engine: the face that it works for, and what lives by its cycle beside the gradients."""

from accum._tf import tf


class Host:
    """What a face lends to the engine. The engine creates, applies and clocks through it alone.

    Attributes:
      waits_for_others: whether `apply` waits for other processes, and so can stand in no conditional and hold no lock.
      reduces: whether `apply` sums over replicas, and can't be told not to.
    """

    waits_for_others = False
    reduces = False

    def scalar(self, name, initial_value, per_replica=False):
        """A new variable of shape []."""
        raise NotImplementedError

    def buffer(self, var, name, shape, dtype):
        """A new per-replica variable of zeros that belongs to `var`, beside it on its device."""
        raise NotImplementedError

    def inwards(self, grads_and_vars):
        """List of (gradient, variable) for the engine, whose variables are `tf.Variable`s, from what a user gave."""
        return list(grads_and_vars)

    def outwards(self, grads_and_vars):
        """The same list for code of users and of Keras: with the variables as they were given."""
        return list(grads_and_vars)

    def check(self, variables):
        """Raise if the inner optimizer can't update `variables`."""

    def prepare(self, variables, used=()):
        """Create what the inner optimizer needs for `variables`, outside any trace; a trace updates `used` of them."""

    def apply(self, grads_and_vars, replicas):
        """Make one step of the inner optimizer on whole gradients, the same on `replicas`. Returns an op or None."""
        raise NotImplementedError

    def when(self, condition, function):
        """`function()` where `condition` holds, a tensor to wait for in either case."""
        return tf.cond(condition, function, lambda: tf.constant(True), name="if_any")

    def count_micro_step(self, is_taken):
        """Count a micro step for whom it may concern; `is_taken` is True or a bool tensor. Returns an op or None."""

    def steps(self):
        """The number of steps made, a scalar int tensor, for schedules."""
        raise NotImplementedError


class Companion:
    """What lives by the cycle beside the gradients. Every method runs on one replica and returns what to wait for."""

    def keep(self, is_first):
        """Take in what the micro-batch has brought; it is the cycle's first if `is_first`, a bool or bool tensor."""
        raise NotImplementedError

    def settle(self, is_first, has_latest):
        """Do what a step does, with what the last micro-batch has brought if `has_latest`, a bool."""
        raise NotImplementedError
