"""`AccumOptimizer`: accumulate, apply and zero as ops of a static graph, or all three in one conditional op."""

import contextlib
import warnings
from typing import NamedTuple

from accum import _check, _tf
from accum._cycle import Cycle, check_options
from accum._tf import tf
from accum.compat.v1._host import GraphHost
from accum.compat.v1._update_ops import CycleMoments, read_averages

AccumOps = NamedTuple(
    "AccumOps",
    [("accumulate", tf.Operation), ("apply", tf.Operation), ("zero", tf.Operation), ("micro_step", tf.Tensor)],
)
AccumOps.__doc__ = """The ops of a cycle, for users who drive it themselves.

Attributes:
  accumulate: op, takes in the gradients of one micro-batch; makes no step.
  apply: op, makes the step with what has been accumulated, in whatever number, and clears it; without anything
    accumulated it changes nothing.
  zero: op, discards what has been accumulated.
  micro_step: int64 tensor [], micro steps made in the current cycle.
"""


class AccumOptimizer(tf.compat.v1.train.Optimizer):
    """Make one step of `optimizer` for the gradients of every `accum_steps` micro-batches, in a static graph.

    Its step is the one that the full batch would have made:

        mean:  optimizer.apply(sum_i(w_i g_i) / sum_i(w_i)),   i = 1 … accum_steps

    `minimize` and `apply_gradients` return one op, to be run once a micro-batch; `accumulation_ops` returns the ops for
    those who drive the cycle. `global_step` counts steps. Accumulators are global variables `<var>/<name>/accum`,
    colocated with their variable and saved by any `Saver`.

    Args:
      optimizer: a `tf.compat.v1.train.Optimizer` or a Keras optimizer.
      accum_steps: micro steps per step, an int >= 1; or a schedule `{first step: accum_steps}` that holds step 0.
        With the plain int 1 this is the bare optimizer.
      reduction: "mean", "sum" or "running_mean" (which never holds a sum, for low precision), in any case.
      name: name of the ops and of the accumulators.
      steps_per_update: what H2G-Net calls `accum_steps`.
      use_locking: accepted as every `tf.compat.v1.train.Optimizer` does; two train ops of one graph never race.
      transform: function `grads_and_vars -> grads_and_vars`, run once a cycle on the accumulated gradient.
      nonfinite: what a NaN or Inf in a gradient does: "propagate" as in a full batch; "skip_micro" leaves the
        micro-batch out and takes one more; "skip_cycle" makes no step at the end of its cycle.
      accumulator_dtype: dtype of the accumulators. None: that of the variable, float32 for a 16-bit one.
      sparse: "rows" hands `tf.IndexedSlices` on as the union of the cycle's rows; "dense" hands on a dense gradient.
      count_micro_steps: let `global_step` count micro steps, for hooks that insist on seeing it move.
      local_accumulators: make the accumulators local variables of this worker, which no default `Saver` saves. Needed
        where workers share variables on a parameter server: accumulators that they would share are refused.

    Raises:
      TypeError, ValueError: for any argument that is none of these.

    Example:
      >>> optimizer = AccumOptimizer(tf.compat.v1.train.AdamOptimizer(1e-3), accum_steps=4)
      >>> train_op = optimizer.minimize(loss, global_step)
      >>> for batch in batches:  # a step with every fourth
      ...     session.run(train_op, {x: batch})
    """

    def __init__(
        self,
        optimizer,
        accum_steps=1,
        reduction="mean",
        name="AccumOptimizer",
        *,
        steps_per_update=None,
        use_locking=False,
        transform=None,
        nonfinite="propagate",
        accumulator_dtype=None,
        sparse="rows",
        count_micro_steps=False,
        local_accumulators=False,
    ):
        accum_steps = _either(accum_steps, steps_per_update)
        plan = check_options(accum_steps, reduction, transform, nonfinite, accumulator_dtype, sparse)
        super().__init__(use_locking, name)
        self._inner = _inner_optimizer(optimizer)
        self._count_micro_steps = bool(count_micro_steps)
        self._host = GraphHost(self, name, self._count_micro_steps, bool(local_accumulators))
        self._cycle = Cycle(plan, self._host, transform, accumulator_dtype)

    # ------------------------------------------------------------------------------------------------------------
    # Ops

    def compute_gradients(self, loss, *args, **kwargs):
        """As the inner optimizer's `compute_gradients`, to which every argument goes."""
        _require_graph()
        if _tf.is_graph_optimizer(self._inner):
            return self._inner.compute_gradients(loss, *args, **kwargs)
        return super().compute_gradients(loss, *args, **kwargs)

    def minimize(self, loss, global_step=None, *args, weight=None, **kwargs):
        """Compute the gradients of `loss` and take them in, as `apply_gradients` does.

        Args:
          loss: scalar tensor.
          global_step: variable that counts steps, or None.
          *args: as `tf.compat.v1.train.Optimizer.minimize` takes them.
          weight: as for `apply_gradients`.
          **kwargs: as `args`.
        """
        with self.weighing(weight):
            return super().minimize(loss, global_step, *args, **kwargs)

    @contextlib.contextmanager
    def weighing(self, weight):
        """Give the train ops made within `weight` as default, where another's code makes them; None changes nothing.

        Example:
          >>> with optimizer.weighing(tf.shape(images)[0]):
          ...     train_op = slim.learning.create_train_op(loss, optimizer)
        """
        before = self._host.weight
        self._host.weight = before if weight is None else weight
        try:
            yield
        finally:
            self._host.weight = before

    def apply_gradients(self, grads_and_vars, global_step=None, name=None, *, weight=None):
        """The conditional train op: takes in one micro-batch, and on the last one of a cycle makes the step.

        Args:
          grads_and_vars: list of (gradient, variable). A gradient is a tensor of its variable's shape,
            `tf.IndexedSlices` or None.
          global_step: variable that counts steps (micro steps with `count_micro_steps`), or None.
          name: name of the op.
          weight: scalar >= 0, this micro-batch's weight in the mean, such as its number of examples; None: 1.

        Returns:
          An op, to be run once a micro-batch.

        Raises:
          RuntimeError: when executing eagerly.
          ValueError: no gradient at all, a gradient of another shape, a negative weight, or other variables or another
            `global_step` than in an earlier call.
        """
        _require_graph()
        weight = self._host.weight if weight is None else weight
        listed = _check.pairs(grads_and_vars)
        self._require_no_waiting(listed)
        if self._cycle.is_bare and weight is None:
            return _tf.as_operation(_tf.apply_inner(self._inner, listed, 1, global_step, name))
        self._enter(listed, global_step)
        with tf.name_scope(name or self._name):
            return self._cycle.micro_step(listed, weight)

    def accumulation_ops(self, loss=None, grads_and_vars=None, var_list=None, global_step=None, weight=None):
        """The ops of a cycle, for those who drive it: `AccumOps(accumulate, apply, zero, micro_step)`.

        Args:
          loss: scalar tensor; or None, with `grads_and_vars`.
          grads_and_vars: list of (gradient, variable); or None, with `loss`.
          var_list: variables to differentiate `loss` by; None: the trainable ones.
          global_step: variable that counts steps (micro steps with `count_micro_steps`), or None.
          weight: scalar >= 0, this micro-batch's weight in the mean; None: 1.

        Raises:
          RuntimeError: when executing eagerly.
          ValueError: both or neither of `loss` and `grads_and_vars`, or as `apply_gradients`.
        """
        _require_graph()
        if (loss is None) == (grads_and_vars is None):
            raise ValueError(
                "Give either `loss` or `grads_and_vars`. Received: {!r}, {!r}.".format(loss, grads_and_vars)
            )
        if loss is not None:
            grads_and_vars = self.compute_gradients(loss, var_list=var_list)
        listed = _check.pairs(grads_and_vars)
        weight = self._host.weight if weight is None else weight
        self._enter(listed, global_step)
        with tf.name_scope(self._name):
            with tf.name_scope("accumulate"):
                accumulate = self._cycle.accumulate(listed, weight)
            with tf.name_scope("apply"):
                apply = self._cycle.apply()
            with tf.name_scope("zero"):
                zero = self._cycle.zero()
            return AccumOps(accumulate, apply, zero, self._cycle.state.micro_step.read_value())

    def accumulate_update_ops(self, update_ops=None):
        """Take over the averages that batch normalisation moves: once a cycle, to the full batch's statistics.

        Call it when the model is there and before the train op is made: the ops taken leave the graph's UPDATE_OPS, so
        that `slim.learning.create_train_op` and `tf.control_dependencies` find those that are left only.

        What can be taken over are the updates that `slim.batch_norm` and `tf.compat.v1.layers.batch_normalization` put
        into UPDATE_OPS. What can't: updates made in place (`updates_collections=None`), `renorm`,
        `zero_debias_moving_mean`, virtual batches, a tensor for `training` under TF 2's control flow, and anything that
        is no batch normalisation. Training still normalises by the micro-batch's own statistics.

        Args:
          update_ops: list of update ops; None: all of the graph's. Of several optimizers in one graph, such as those of
            a GAN, each is given the ops of its own network.

        Returns:
          List of the ops taken over: nothing has to run them any more.

        Raises:
          RuntimeError: when executing eagerly.
          ValueError: an op can't be taken over (then none is), a train op exists already, or several replicas.
        """
        _require_graph()
        collection = tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.UPDATE_OPS)
        taken = list(collection) if update_ops is None else list(update_ops)
        if self._cycle.is_bare:
            return []
        if self._cycle.is_built:
            raise ValueError("`accumulate_update_ops` has to come before the first train op, which moves the averages.")
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise ValueError(
                "`accumulate_update_ops` takes nothing over from several replicas: leave UPDATE_OPS to them."
            )
        averages = read_averages(taken)
        self._cycle.companions += [CycleMoments(mean, variance, self._host) for mean, variance in averages]
        self._host.gathered, self._host.state = self._host.gathered + self._host.state, []
        collection[:] = [left for left in collection if not any(left is update_op for update_op in taken)]
        return taken

    def flush(self):
        """An op that makes the step of an unfinished cycle from the micro-batches that are there.

        It is the `apply` of `accumulation_ops`, for those who train by the conditional op.

        Raises:
          ValueError: before the first train op has been made.
        """
        return self._between_steps(self._cycle.apply, "flush")

    def reset(self):
        """An op that discards an unfinished cycle: the `zero` of `accumulation_ops`.

        Raises:
          ValueError: before the first train op has been made.
        """
        return self._between_steps(self._cycle.zero, "reset")

    def _between_steps(self, function, name):
        if self._cycle.is_bare:
            return tf.no_op()
        if self._host.waits_for_others:
            raise ValueError("With `SyncReplicasOptimizer`, `{}` is the op of `accumulation_ops`.".format(name))
        if not self._cycle.is_built:
            raise ValueError("`{}` needs the train op to be made first, by `minimize` or otherwise.".format(name))
        with tf.name_scope(self._name), tf.name_scope(name):
            return function()

    def _require_no_waiting(self, listed):
        """Workers that wait for each other do so on every run, which a train op that is conditional would not take."""
        is_around = any("AccumulatorTakeGradient" in grad.op.type for grad, _ in listed if isinstance(grad, tf.Tensor))
        if is_around or (self._host.waits_for_others and not self._cycle.is_bare):
            raise ValueError(
                "`SyncReplicasOptimizer` can stand in no conditional, and makes steps only: make it the inner "
                "optimizer, and drive the cycle by `accumulation_ops`, whose `apply` every worker runs once a step."
            )

    def _enter(self, listed, global_step):
        if self._cycle.plan.is_schedule and (global_step is None or self._count_micro_steps):
            raise ValueError(
                "A schedule of `accum_steps` counts steps: pass a `global_step` that does, without `count_micro_steps`."
            )
        if self._cycle.is_built and self._cycle.state.micro_step.graph is not tf.compat.v1.get_default_graph():
            raise ValueError("An `AccumOptimizer` belongs to the graph of its first call: make one for each graph.")
        if self._cycle.is_built and self._host.global_step is not global_step:
            raise ValueError(
                "`global_step` must be the one given before. Received: {!r}, after {!r}.".format(
                    global_step, self._host.global_step
                )
            )
        self._host.global_step = global_step
        self._host.variables = [var for _, var in listed]
        if _tf.is_keras_optimizer(self._inner) and any(map(_tf.is_ref_variable, self._host.variables)):
            raise ValueError(
                "A Keras optimizer updates resource variables only: create them with `use_resource=True`, or give "
                "`AccumOptimizer` a `tf.compat.v1.train.Optimizer`."
            )
        _tf.create_graph_slots(self._inner, [var for grad, var in listed if grad is not None])

    # ------------------------------------------------------------------------------------------------------------
    # What can be seen

    @property
    def optimizer(self):
        """The inner optimizer."""
        return self._inner

    @property
    def accum_steps(self):
        """Micro steps per step, or the schedule of it."""
        return self._cycle.plan.accum_steps

    @property
    def has_train_op(self):
        """Whether an op has been made that accumulates, or that never will because `accum_steps` is 1."""
        return self._cycle.is_built or self._cycle.is_bare

    @property
    def micro_step(self):
        """Micro steps made in the current cycle, an int64 tensor []; None before the first op is made."""
        return self._cycle.state.micro_step.read_value() if self._cycle.is_built else None

    def get_slot(self, var, name):
        """The accumulator of `var` for the name "accum", any other slot from the inner optimizer."""
        if name in super().get_slot_names():
            return super().get_slot(var, name)
        return self._inner.get_slot(var, name)

    def get_slot_names(self):
        """Names of this optimizer's slots and of the inner one's."""
        return sorted(super().get_slot_names()) + _tf.slot_names(self._inner)

    def saved_groups(self):
        """The variables that accumulation adds to a checkpoint, in lists of those that came together."""
        return [group for group in (self._host.gathered, self._host.state) if group]

    def variables(self):
        """All variables of this optimizer and of the inner one."""
        inner = self._inner.variables
        return super().variables() + list(inner() if callable(inner) else inner)


def _either(accum_steps, steps_per_update):
    if steps_per_update is None:
        return accum_steps
    if accum_steps != 1:
        raise ValueError("Give `accum_steps` only: `steps_per_update` is another name of it.")
    warnings.warn("`steps_per_update` is now called `accum_steps`.", DeprecationWarning, stacklevel=3)
    return _check.accum_steps(steps_per_update, "steps_per_update")


def _require_graph():
    if not _tf.in_static_graph():  # in a `tf.function` neither, such as the train step of Keras' `fit`
        raise RuntimeError(
            "`AccumOptimizer` builds ops of a static graph and was called eagerly: enter a `tf.Graph`, or use "
            "`accum.GradientAccumulateOptimizer`."
        )


def _inner_optimizer(optimizer):
    if isinstance(optimizer, AccumOptimizer):
        raise ValueError("`optimizer` accumulates already: set its `accum_steps`. Received: {!r}.".format(optimizer))
    if _tf.is_loss_scale_optimizer(optimizer):
        raise ValueError(
            "A loss scale optimizer has to be outermost, where it judges each micro-batch: put {} around the "
            "`AccumOptimizer`.".format(type(optimizer).__name__)
        )
    if not _tf.is_graph_optimizer(optimizer) and not _tf.is_keras_optimizer(optimizer):
        raise TypeError(
            "`optimizer` must be a `tf.compat.v1.train.Optimizer` or a Keras optimizer. Received: {!r}.".format(
                optimizer
            )
        )
    if _tf.is_new_optimizer(optimizer):
        raise TypeError(
            "A Keras optimizer that is built from a list of variables leaves them as they are in a static graph, where "
            "nothing but its counter is run: use {}. Received: {!r}.".format(_tf.FOR_STATIC_GRAPHS, optimizer)
        )
    return optimizer
