"""`AccumOptimizer`: accumulate, apply and zero as ops of a static graph, or combined in one conditional op."""

import contextlib
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from accum import _check, _tf
from accum._engine._cycle import Cycle
from accum._engine._plan import Plan
from accum._tf import Gradient, GradsAndVars, Scalar, tf
from accum._tf.types import AccumSteps, Reduction
from accum.compat.v1 import _checks, _several_losses
from accum.compat.v1._batch_norm import take_over
from accum.compat.v1._carried_state import warn_of_carried_state
from accum.compat.v1._cycle_mean import CycleMean
from accum.compat.v1._engine_adapter import GraphAdapter
from accum.compat.v1._every_run import EveryRun
from accum.compat.v1._loss_counts import warn_of_counts
from accum.compat.v1._several_losses import SeveralLosses

if TYPE_CHECKING:
    from typing_extensions import Unpack  # novm

    from accum._engine._plan import OptimizerOptions


class AccumOps(NamedTuple):
    """The ops of a cycle, for users who run them in their own loop.

    Attributes:
      accumulate: op that accumulates the gradients of one micro-batch, without making a step.
      apply: op that makes the step from any number of accumulated micro-batches and clears the accumulators. If
        nothing has been accumulated, it changes nothing.
      zero: op that discards the accumulated gradients.
      micro_step: int64 scalar tensor, the number of micro steps in the current cycle so far.
    """

    accumulate: tf.Operation
    apply: tf.Operation
    zero: tf.Operation
    micro_step: tf.Tensor


@_check.describing(Plan.of)
class AccumOptimizer(tf.compat.v1.train.Optimizer):
    """In a static graph, accumulate the gradients of `accum_steps` micro-batches, then make one step of `optimizer`.

    The step is the one that the full batch would have made:

        mean:  optimizer.apply(sum_i(w_i g_i) / sum_i(w_i)),   i = 1 … accum_steps

    `minimize` and `apply_gradients` return one op, to be run once per micro-batch. `accumulation_ops` returns separate
    ops for custom loops. `global_step` counts steps. Accumulators are global variables `<var>/<name>/accum`, colocated
    with their variable and saved by any `Saver`.

    Args:
      optimizer: a `tf.compat.v1.train.Optimizer` or a legacy Keras optimizer (`tf.keras.optimizers.legacy` from
        TensorFlow 2.11 on).
      accum_steps: micro steps per step, >= 1; or a schedule `{first step: accum_steps}` that includes step 0. With the
        plain int 1 it behaves like `optimizer` alone.
      reduction: "mean", "sum" or "running_mean" (which never holds a sum, for low precision); case-insensitive.
      name: name of the ops and of the accumulators.
      steps_per_update: the name of `accum_steps` in H2G-Net.
      use_locking: accepted for compatibility with `tf.compat.v1.train.Optimizer`; two train ops of one graph never
        race, except under a strategy with several replicas: there, run each in a `session.run` of its own.
      **options: the others of `Plan.of`, which describes them.
      count_micro_steps: whether `global_step` counts micro steps, for hooks that expect it to change on every run.
      count_steps: whether to advance `global_step` by 1 after each step, for an inner optimizer that leaves this to its
        caller, such as BERT's `AdamWeightDecayOptimizer` and LAMB. The inner optimizer may still read it. Remove the
        caller's own `global_step + 1`.
      local_accumulators: whether the accumulators are local variables of this worker, which a default `Saver` does not
        save. Required if workers share variables on a parameter server, because they must not share accumulators.

    Raises:
      TypeError, ValueError: an argument does not match its description above.

    Example:
      >>> optimizer = accum.compat.v1.AccumOptimizer(tf.compat.v1.train.AdamOptimizer(1e-3), accum_steps=4)
      >>> train_op = optimizer.minimize(loss, global_step)
      >>> for batch in batches:  # every fourth run makes a step
      ...     session.run(train_op, {x: batch})
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        _check.arguments_of(cls, kwargs)
        return super().__new__(cls)

    @_check.taking(Plan.of)
    def __init__(
        self,
        optimizer: Any,
        accum_steps: AccumSteps = 1,
        reduction: Reduction = "mean",
        name: str = "AccumOptimizer",
        *,
        steps_per_update: Optional[int] = None,
        use_locking: bool = False,
        count_micro_steps: bool = False,
        count_steps: bool = False,
        local_accumulators: bool = False,
        **options: "Unpack[OptimizerOptions]",
    ) -> None:
        accum_steps = _checks.either_accum_steps(accum_steps, steps_per_update)
        plan = Plan.of(accum_steps, reduction, **options)
        super().__init__(use_locking, name)
        if isinstance(optimizer, AccumOptimizer):
            raise ValueError(
                f"`optimizer` accumulates already: pass `accum_steps` where it is created. Received: {optimizer!r}."
                " [accum: wrapped-twice]"
            )
        _checks.require_inner(optimizer)
        self._inner = optimizer
        self._count_micro_steps = bool(count_micro_steps)
        counts = _checks.what_is_counted(bool(count_micro_steps), bool(count_steps))
        self._adapter = GraphAdapter(self, name, counts, bool(local_accumulators))
        _checks.require_no_skipped_cycle(plan, self._adapter.waits_for_others)
        self._cycle = Cycle(plan, self._adapter)
        self._means: List[CycleMean] = []
        self._has_called = False
        self._accumulates = not self._cycle.is_passthrough  # or separate ops do, whatever `accum_steps` is
        self._splits = not plan.is_one_micro_step  # a full batch: with `transform`, one micro-batch may be a cycle
        self._update_ops_left: List[Any] = []  # arguments of `accumulate_update_ops` while nothing accumulates
        self._has_idle_op = False  # a flush or reset that does nothing
        self._losses_apart: Optional[SeveralLosses] = None
        self._losses: List[tf.Tensor] = []  # whose gradients were computed
        self._counts_of_losses: List[Any] = []  # of several losses
        self._has_named_changes = False  # of gradients
        self._has_named_counts = False
        self._every_run = EveryRun()
        self.savers: List[tf.compat.v1.train.Saver] = []  # which were created for it

    # ------------------------------------------------------------------------------------------------------------
    # Ops

    def compute_gradients(self, loss: Any, *args: Any, **kwargs: Any) -> List[Tuple[Optional[Gradient], tf.Variable]]:
        """Compute gradients with the inner optimizer's `compute_gradients`, which receives all arguments.

        If your own optimizer class overrides it to do more than scale gradients, such as to clip them, this acts on
        each micro-batch, and a warning says so. So does what you do to the gradients before `apply_gradients`.

        Raises:
          RuntimeError: when executing eagerly.
          ValueError: `loss` is not a scalar, unless `reduction` is "sum" or `grad_loss` is given.
        """
        _checks.require_graph()
        has_own_gradient = kwargs.get("grad_loss") is not None or len(args) > 4
        if self._splits and not has_own_gradient:
            _checks.require_scalar(loss, self._cycle.plan.reduction)
        if tf.is_tensor(loss):
            self._losses.append(loss)
        before = len(tf.compat.v1.get_default_graph().get_operations())
        if _tf.optimizers.is_graph_optimizer(self._inner):
            listed = self._inner.compute_gradients(loss, *args, **kwargs)
            if self._splits:
                _checks.warn_of_changed_gradients(self._inner, listed, before)
        else:
            listed = super().compute_gradients(loss, *args, **kwargs)
        _checks.note_computed(listed)
        return listed

    def minimize(
        self,
        loss: Any,
        global_step: Optional[tf.Variable] = None,
        *args: Any,
        weight: Any = None,
        **kwargs: Any,
    ) -> tf.Operation:
        """Compute the gradients of `loss` and accumulate them, as `apply_gradients` does.

        Several losses that are means over different things, such as masked words and sentences, are exact if each is
        passed with its own count. The step is then made from sum_l(sum_i(n_li g_li) / sum_i(n_li)), for losses l and
        micro-batches i. Each loss but the first needs accumulators of its own.

        Args:
          loss: scalar tensor, or a list of them, whose sum is minimized.
          global_step: variable that counts steps, or None.
          *args: as for `tf.compat.v1.train.Optimizer.minimize`; only for one loss.
          weight: as for `apply_gradients`. For several losses, a list with one scalar >= 0 for each: the number of
            elements of this micro-batch that the loss is a mean over.
          **kwargs: as for `tf.compat.v1.train.Optimizer.minimize`; for several losses, `var_list` and `name`.

        Returns:
          An op, to be run once per micro-batch.

        Raises:
          ValueError: as for `apply_gradients`; or a loss is not a scalar, unless `reduction` is "sum"; or several
            losses are passed without their counts, or with a `reduction`, `nonfinite` or strategy that does not support
            them.
        """
        if isinstance(loss, (list, tuple)):
            name = kwargs.pop("name", None)
            if args:
                kwargs["var_list"], args = args[0], args[1:]
            listed = self._several(loss, weight, kwargs.pop("var_list", None), list(args) + list(kwargs))
            return self.apply_gradients(listed, global_step, name)
        with self.weighing(weight):
            return super().minimize(loss, global_step, *args, **kwargs)

    @contextlib.contextmanager
    def weighing(self, weight: Optional[Scalar]) -> Iterator[None]:
        """Set the default `weight` of train ops that are created in this context, such as by a library.

        Args:
          weight: as for `apply_gradients`; None leaves the default unchanged.

        Example:
          >>> with optimizer.weighing(tf.shape(images)[0]):
          ...     train_op = slim.learning.create_train_op(loss, optimizer)
        """
        before = self._adapter.weight
        self._adapter.weight = before if weight is None else weight
        try:
            yield
        finally:
            self._adapter.weight = before

    def apply_gradients(
        self,
        grads_and_vars: Iterable[Any],
        global_step: Optional[tf.Variable] = None,
        name: Optional[str] = None,
        *,
        weight: Optional[Scalar] = None,
    ) -> tf.Operation:
        """Create the train op: it accumulates one micro-batch, and makes the step on the last one of a cycle.

        If gradients were clipped before, the step uses the mean of the clipped gradients, and a warning says so: clip
        in `transform`.

        Args:
          grads_and_vars: list of (gradient, variable). A gradient is a tensor of its variable's shape,
            `tf.IndexedSlices` or None. Pass the gradient of a mean over examples, unless `reduction` is "sum".
          global_step: variable that counts steps (micro steps with `count_micro_steps`), or None.
          name: name of the op.
          weight: scalar >= 0, the weight of this micro-batch in the mean, such as its number of examples; None: 1. A
            negative number raises an error; the value of a tensor is not checked.

        Returns:
          An op, to be run once per micro-batch. It is added to the graph's collection TRAIN_OP.

        Raises:
          RuntimeError: when executing eagerly.
          ValueError: there is no gradient at all, a gradient has the wrong shape, the weight is a negative constant, or
            the variables or `global_step` differ from those of an earlier call; or gradients are as `tf.gradients` has
            returned them for a loss that is not a scalar, unless `reduction` is "sum".
        """
        _checks.require_graph()
        weight = self._adapter.weight if weight is None else weight
        listed = _check.pairs(grads_and_vars)
        _checks.require_no_waiting(listed, self._adapter.waits_for_others and self._accumulates)
        if not self._accumulates and weight is None:
            return self._plain_step(listed, global_step, name)
        losses = self._enter(listed, global_step, weight)
        with tf.control_dependencies([mean.now for mean in self._means]), tf.name_scope(name or self._name):
            train_op = self._cycle.micro_step(listed, weight)
        if self._splits:
            self._every_run.add(train_op, losses, listed)
        _tf.graphs.record_train_op(train_op)
        return train_op

    def accumulation_ops(
        self,
        loss: Any = None,
        grads_and_vars: Optional[GradsAndVars] = None,
        var_list: Optional[Sequence[tf.Variable]] = None,
        global_step: Optional[tf.Variable] = None,
        weight: Any = None,
    ) -> AccumOps:
        """Create the ops of a cycle separately, for custom loops.

        They accumulate until `apply` runs, also with the default `accum_steps=1`.

        Args:
          loss: scalar tensor, or a list of them as for `minimize`; None if `grads_and_vars` is given.
          grads_and_vars: list of (gradient, variable); None if `loss` is given.
          var_list: variables with respect to which `loss` is differentiated; None: the trainable variables.
          global_step: variable that counts steps (micro steps with `count_micro_steps`), or None.
          weight: scalar >= 0, the weight of this micro-batch in the mean; None: 1.

        Returns:
          `AccumOps(accumulate, apply, zero, micro_step)`.

        Raises:
          RuntimeError: when executing eagerly.
          ValueError: both or neither of `loss` and `grads_and_vars` are given; with `accum_steps=1`, a train op, a
            `flush` or a `reset` exists already; or as for `apply_gradients`.
        """
        _checks.require_graph()
        if (loss is None) == (grads_and_vars is None):
            raise ValueError(
                f"Pass either `loss` or `grads_and_vars`. Received: {loss!r}, {grads_and_vars!r}. [accum: arguments]"
            )
        self._accumulate_from_now_on()
        if isinstance(loss, (list, tuple)):
            grads_and_vars, weight = self._several(loss, weight, var_list, []), None
        elif loss is not None:
            grads_and_vars = self.compute_gradients(loss, var_list=var_list)
        listed = _check.pairs(grads_and_vars or ())
        weight = self._adapter.weight if weight is None else weight
        losses = self._enter(listed, global_step, weight)
        with tf.name_scope(self._name):
            with tf.control_dependencies([mean.now for mean in self._means]), tf.name_scope("accumulate"):
                accumulate = self._cycle.accumulate(listed, weight)
            self._every_run.add(accumulate, losses, listed, is_train_op=False)
            with tf.name_scope("apply"):
                apply = self._cycle.apply()
            with tf.name_scope("zero"):
                zero = self._cycle.zero()
            return AccumOps(accumulate, apply, zero, self._cycle.state.micro_step.read_value())

    def accumulate_update_ops(self, update_ops: Optional[Sequence[Any]] = None) -> List[Any]:
        """Update the moving averages of batch normalisation once per cycle, with the full batch's statistics.

        Call it after building the model and before creating the train op. The ops that are taken over are removed from
        the graph's UPDATE_OPS, so `slim.learning.create_train_op` and `tf.control_dependencies` only find the others.
        They no longer change anything, so code that collected them earlier may still run them.

        Supported are the updates that `slim.batch_norm` and `tf.compat.v1.layers.batch_normalization` add to
        UPDATE_OPS. Not supported are updates made in place (`updates_collections=None`), `renorm`,
        `zero_debias_moving_mean`, virtual batches, a tensor for `training` under TF 2's control flow, and anything
        other than batch normalisation. Training still normalises by the statistics of the micro-batch.

        Args:
          update_ops: list of update ops; None: all in UPDATE_OPS. If a graph has several optimizers, such as those of a
            GAN, pass each optimizer the ops of its own network.

        Returns:
          List of the ops that were taken over, which no longer need to be run. With `accum_steps=1`, it is empty: the
          ops are taken over only if `accumulation_ops` is called, and may run all the same.

        Raises:
          RuntimeError: when executing eagerly.
          ValueError: an op can't be taken over (then none is), a train op exists already, there are several replicas,
            or `update_ops` is None and a layer updates its averages in place.
        """
        _checks.require_graph()
        if not self._accumulates:  # the ops stay where they are, unless `accumulation_ops` follows
            self._update_ops_left.append(update_ops)
            return []
        return take_over(update_ops, self._cycle, self._adapter)

    def after_step(self, function: Callable[[], Any]) -> None:
        """Run the ops of `function` once after each step, such as a moving average of the weights.

        They run after the inner optimizer's step, after `global_step` has been advanced and, with
        `accumulate_update_ops`, after the moving averages of batch normalisation have moved. The functions of several
        calls run in order. Call it before creating the train op. With `count_micro_steps`, a flush makes a step without
        advancing `global_step`.

        Args:
          function: function without arguments that returns an op, a tensor or a list of them. It is called once for
            each train op and each `flush` that is created.

        Raises:
          TypeError: `function` is not callable.
          ValueError: a train op exists already, there are several replicas, or the inner optimizer is a
            `SyncReplicasOptimizer`, whose chief makes the steps.

        Example:
          >>> average = tf.compat.v1.train.ExponentialMovingAverage(0.999, num_updates=global_step)
          >>> optimizer.after_step(lambda: average.apply(tf.compat.v1.model_variables()))
          >>> train_op = optimizer.minimize(loss, global_step)
        """
        if not callable(function):
            raise TypeError(f"`function` must be a function that returns an op. Received: {function!r}.")
        _checks.require_before_train_op("after_step", self._has_called)
        _checks.require_own_step("after_step", self._adapter.waits_for_others)
        self._adapter.after_step.append(function)

    def mean_over_cycle(self, value: tf.Tensor, weight: Optional[Scalar] = None) -> tf.Tensor:
        """Return the mean of a loss or metric over a cycle, as a tensor for summaries, hooks and early stopping.

            sum_i(w_i value_i) / sum_i(w_i),   i = 1 … accum_steps

        In a run of the train op that makes a step, it is the mean over that step's micro-batches, so for a loss that is
        a mean over examples, the loss of the full batch. In the runs between, it is still the mean of the latest step;
        before the first step, it is the mean so far. A cycle that makes no step, because its weights sum to zero or
        `nonfinite` skips it, leaves the mean of the latest step. Evaluate it in the same run as the train op. Call this
        before creating the train op. A checkpoint contains the means of an unfinished cycle.

        A cycle of separate ops may end at any time: there, from the `accum_steps`-th micro-batch on, it is the mean of
        the cycle so far. Several train ops of one optimizer must have the same `weight`, and the same gradients if
        `nonfinite` may skip some.

        Args:
          value: floating-point scalar tensor, computed from the micro-batch.
          weight: scalar >= 0, the weight of this micro-batch in this mean. None: the weight of the train op.

        Returns:
          A tensor of shape [] and of the dtype of `value`.

        Raises:
          RuntimeError: when executing eagerly.
          TypeError: `value` is not a floating-point tensor.
          ValueError: `value` is not a scalar, a train op exists already, or there are several replicas; later, a train
            op is created in a conditional, such as that of a dynamic loss scale, or a second one has another weight or,
            if `nonfinite` may skip some, other gradients.

        Example:
          >>> mean_loss = optimizer.mean_over_cycle(loss)
          >>> tf.compat.v1.summary.scalar("loss", mean_loss)
          >>> train_op = optimizer.minimize(loss, global_step, weight=tf.shape(x)[0])
        """
        _checks.require_graph()
        _checks.require_before_train_op("mean_over_cycle", self._has_called)
        mean = CycleMean(value, weight, len(self._means))
        self._means.append(mean)
        self._cycle.listeners.append(mean)
        return mean.tensor

    def flush(self) -> tf.Operation:
        """Create an op that makes the step of an unfinished cycle from the micro-batches so far.

        It is the same as `apply` of `accumulation_ops`, for use with the train op of `minimize`.

        Raises:
          ValueError: no train op has been created yet.
        """
        return self._between_steps(self._cycle.apply, "flush")

    def reset(self) -> tf.Operation:
        """Create an op that discards an unfinished cycle, the same as `zero` of `accumulation_ops`.

        Raises:
          ValueError: no train op has been created yet.
        """
        return self._between_steps(self._cycle.zero, "reset")

    def _between_steps(self, function: Callable[..., Any], name: str) -> tf.Operation:
        if not self._accumulates:
            self._has_idle_op = True
            return tf.no_op()
        if self._adapter.waits_for_others:
            raise ValueError(
                f"With `SyncReplicasOptimizer`, use the ops of `accumulation_ops` instead of `{name}`."
                " [accum: sync-replicas]"
            )
        if not self._cycle.is_built:
            raise ValueError(f"`{name}` needs a train op: create it first, such as with `minimize`. [accum: arguments]")
        self.check_graph()
        with tf.name_scope(self._name), tf.name_scope(name):
            return function()

    def _several(
        self, loss: Sequence[Any], weight: Any, var_list: Optional[Sequence[tf.Variable]], options: Sequence[str]
    ) -> GradsAndVars:
        """Return the gradients of several losses that the cycle accumulates, or those of their sum."""
        losses, counts = _several_losses.checked(loss, weight, options)
        _checks.require_several_losses(self._cycle.plan, self._adapter.weight)
        if not self._accumulates:
            return self.compute_gradients(tf.add_n(losses), var_list=var_list)
        pairs = [self.compute_gradients(one, var_list=var_list) for one in losses]
        if self._losses_apart is None:
            _checks.require_before_train_op("several losses", self._has_called)
            self._losses_apart = SeveralLosses()
            self._cycle.listeners.append(self._losses_apart)
        self._counts_of_losses = counts
        return self._losses_apart.receive(pairs, counts)

    def _accumulate_from_now_on(self) -> None:
        """Accumulate whatever `accum_steps` is, because only the user of separate ops knows how long a cycle is."""
        self._splits = True
        if self._accumulates:
            return
        _checks.require_before_single_steps(self._has_called, self._has_idle_op)
        while self._update_ops_left:
            take_over(self._update_ops_left[0], self._cycle, self._adapter)
            del self._update_ops_left[0]
        self._accumulates = True

    def _plain_step(
        self, listed: GradsAndVars, global_step: Optional[tf.Variable], name: Optional[str]
    ) -> tf.Operation:
        """Create the train op of an optimizer that makes a step from each micro-batch."""
        self._has_called = True
        self._adapter.global_step = global_step
        self._adapter.begin_step()
        train_op = _tf.inner_optimizer.as_operation(
            _tf.inner_optimizer.apply(self._inner, listed, 1, global_step, name)
        )
        with self._adapter.same_variables():
            done = self._adapter.end_step(train_op)
        return train_op if done is train_op else _tf.inner_optimizer.as_operation(done)

    def _enter(
        self, listed: GradsAndVars, global_step: Optional[tf.Variable], weight: Optional[Scalar]
    ) -> List[tf.Tensor]:
        """Check a call that accumulates, and prepare for it. Returns the losses of the gradients that are known."""
        _checks.require_same_step_counter(self._cycle, self._adapter.global_step, global_step, self._count_micro_steps)
        self._adapter.global_step = global_step
        self._adapter.variables = [var for _, var in listed]
        self._adapter.scope = tf.compat.v1.get_default_graph().get_name_scope()
        _checks.require_updatable(self._inner, self._adapter.variables)
        if self._splits and not self._has_named_changes:
            self._has_named_changes = _checks.warn_of_gradients_changed_between(listed)
        self._adapter.create_inner_slots([var for grad, var in listed if grad is not None])
        losses = self._losses or _checks.losses_of(listed, self._cycle.plan.reduction if self._splits else "sum")
        warn_of_carried_state([grad for grad, _ in listed if grad is not None] + losses, self._splits)
        counts = self._counts_of_losses or [weight] * len(losses)
        if self._splits and not self._has_named_counts and self._cycle.plan.reduction != "sum":
            self._has_named_counts = warn_of_counts(list(zip(losses, counts)))
        self._losses, self._counts_of_losses, self._has_called = [], [], True
        if self._losses_apart is not None:
            self._losses_apart.follow(self._cycle, self._adapter, listed)
            if weight is not None or any(mean.follows_train_op for mean in self._means):
                raise ValueError(_checks.NO_COMMON_WEIGHT)
        for mean in self._means:
            mean.follow(self._cycle, self._adapter, listed, weight)
        return losses

    # ------------------------------------------------------------------------------------------------------------
    # State

    def check_graph(self) -> None:
        """Warn of what the graph, once it is complete, does with every micro-batch instead of once per step.

        `flush`, `reset`, the hooks and the `Saver` call it.
        """
        if self._splits:
            self._every_run.look_again(self._adapter.global_step is not None)

    @property
    def optimizer(self) -> Any:
        """The inner optimizer."""
        return self._inner

    @property
    def accum_steps(self) -> AccumSteps:
        """Micro steps per step, or their schedule."""
        return self._cycle.plan.shown_steps()

    def __repr__(self) -> str:
        if "_cycle" not in self.__dict__:  # still being constructed
            return object.__repr__(self)
        arguments = f"accum_steps={self.accum_steps!r}, reduction={self._cycle.plan.reduction!r}"
        return f"{type(self).__name__}({type(self._inner).__name__}, {arguments})"

    @property
    def has_train_op(self) -> bool:
        """Whether a train op has been created, or no accumulators are needed because `accum_steps` is 1."""
        return self._cycle.is_built or not self._accumulates

    @property
    def micro_step(self) -> Optional[tf.Tensor]:
        """Number of micro steps in the current cycle so far, an int64 scalar; None before the first op is created."""
        return self._cycle.state.micro_step.read_value() if self._cycle.is_built else None

    def get_slot(self, var: tf.Variable, name: str) -> Any:
        """Return the accumulator of `var` for the name "accum", and any other slot from the inner optimizer."""
        if name in super().get_slot_names():
            return super().get_slot(var, name)
        return self._inner.get_slot(var, name)

    def get_slot_names(self) -> List[str]:
        """Return the names of the slots of this optimizer and the inner optimizer."""
        return sorted(super().get_slot_names()) + _tf.inner_optimizer.slot_names(self._inner)

    @property
    def scope_of_state(self) -> str:
        """The prefix of the names of the variables that count micro steps, as checkpoints have them."""
        if not self._cycle.is_built:
            return str(self._name)
        return str(self._cycle.state.micro_step.op.name.rpartition("/")[0])

    def saved_groups(self) -> List[List[tf.Variable]]:
        """Return the variables that accumulation adds to a checkpoint, grouped by the feature that added them."""
        return [group for group in [self._adapter.gathered, *self._adapter.groups, self._adapter.state] if group]

    def variables(self) -> List[tf.Variable]:
        """Return all variables of this optimizer and the inner optimizer."""
        inner = self._inner.variables
        return super().variables() + list(inner() if callable(inner) else inner)
