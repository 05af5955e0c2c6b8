"""The engine's adapter for the optimizer of a static graph."""

import contextlib
import weakref
from typing import Any, Callable, Iterator, List, Optional, Sequence

from accum import _check, _tf
from accum._engine._interfaces import OptimizerAdapter
from accum._engine._replicas import across_replicas, true_after
from accum._tf import GradsAndVars, tf
from accum.compat.v1._first_call import FirstCall

REFUSAL = (
    "The inner optimizer, or a function passed to `after_step`, creates a variable in each call. It is called once for "
    "each train op and `flush`: let it create its variables by `tf.compat.v1.get_variable` with a fixed name."
    " [accum: created-twice]"
)
COUNTED_TWICE = (
    "The inner optimizer advances `global_step` itself, so `count_steps=True` would count each step twice: leave out "
    "this argument. [accum: global-step]"
)
NOT_COUNTED = (
    "The inner optimizer does not advance `global_step`, as BERT's and LAMB leave it to their caller: pass "
    "`count_steps=True` to the `AccumOptimizer`, and remove the code that adds 1 in each run of the train op, which "
    "would count micro-batches. [accum: global-step]"
)


SUMMARIES_OF_STEPS = (
    "A summary that `transform`, a function passed to `after_step`, or the inner optimizer makes exists only where the "
    "step is made, so it can't be merged with others, and is left out of their collection: assign the value there to a "
    "variable that is not trainable, and make the summary of that variable elsewhere. [accum: step-summary]"
)


class GraphAdapter(OptimizerAdapter):
    """Lets the engine use the optimizer of a static graph.

    Args:
      wrapper: the `AccumOptimizer`.
      name: prefix of the names of variables.
      counts: what the adapter itself counts in `global_step`: "micro_steps", "steps" or nothing, "".
      is_local: whether accumulators are local variables of this worker.

    Attributes:
      global_step: the variable that counts steps or micro steps, or None.
      weight: the default weight of train ops, or None.
      variables: the trainable variables of the current call.
      scope: the name scope of the current call.
      state: list of the variables that were created for the cycle itself.
      gathered: list of the variables that were created for its listeners.
      groups: list of lists of variables, one for each further feature that created them.
      after_step: functions whose ops follow each step.
    """

    def __init__(self, wrapper: Any, name: str, counts: str, is_local: bool) -> None:
        self.global_step: Any = None
        self.weight: Any = None
        self.variables: Sequence[tf.Variable] = ()
        self.scope = ""
        self.state: List[tf.Variable] = []
        self.gathered: List[tf.Variable] = []
        self.groups: List[List[tf.Variable]] = []
        self.after_step: List[Callable[[], Any]] = []
        self._wrapper = wrapper
        self.name = name
        self._counts = counts
        self._ops_before_step = 0
        self._is_local = is_local
        self._first_step: Optional[FirstCall] = None
        self._has_told_of_summaries = False

    @contextlib.contextmanager
    def group_of_state(self) -> Iterator[None]:
        """Keep the variables that are created in this context in a group of their own, in `groups`."""
        others, self.state = self.state, []
        try:
            yield
        finally:
            self.groups, self.state = self.groups + [self.state], others

    def scalar(self, name: str, initial_value: tf.Tensor, per_replica: bool = False) -> tf.Variable:
        beside = min(self.variables, key=lambda var: var.name)
        name = f"{self.name}/{name}"
        with self._making(beside, initial_value.dtype if per_replica else None):
            with tf.compat.v1.name_scope(None):  # the name in checkpoints must not depend on where `minimize` is called
                made = self._wrapper._create_non_slot_variable(initial_value, name, beside)
        if per_replica:
            _tf.variables.save_over_replicas(made)
        self.state.append(made)
        return made

    def buffer(self, var: tf.Variable, name: str, shape: tf.TensorShape, dtype: tf.DType) -> tf.Variable:
        # The method by which v1 optimizers create slots: it colocates them, and copies the slice information of a
        # partitioned variable, which a `Saver` needs.
        zeros = tf.compat.v1.zeros_initializer()
        scope = f"{self.name}/{name}"
        with self._making(var, dtype):
            made = self._wrapper._get_or_make_slot_with_initializer(var, zeros, shape, dtype, name, scope)
        _tf.variables.save_over_replicas(made)
        _tf.graphs.save_as_part(made, var)
        self.state.append(made)
        return made

    @contextlib.contextmanager
    def _making(self, var: tf.Variable, dtype_per_replica: Optional[tf.DType]) -> Iterator[None]:
        """Create accumulators in this context: on this worker if they are local, and one for each replica if asked.

        Args:
          var: the variable beside which they are created.
          dtype_per_replica: their dtype if each replica has its own; None: all replicas share them.
        """
        worker = _worker_that_shares(var)
        if worker is not None and not self._is_local:
            raise ValueError(
                f"{var.name} is on {var.device}, where workers share it. They would share its accumulator too, which "
                "would mix the micro-batches of all workers: pass `local_accumulators=True`. [accum: parameter-servers]"
            )

        def creator(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
            if self._is_local:
                kwargs["collections"] = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
            if dtype_per_replica is not None and tf.distribute.has_strategy():
                kwargs.update(_tf.variables.per_replica_kind(dtype_per_replica))
            if worker is None:
                return next_creator(**kwargs)
            with tf.compat.v1.get_default_graph().colocate_with(None, ignore_existing=True):
                with tf.device(None), tf.device(worker):
                    return next_creator(**kwargs)

        with tf.variable_creator_scope(creator):
            yield

    @property
    def waits_for_others(self) -> bool:  # type: ignore[override]
        return isinstance(self._wrapper.optimizer, tf.compat.v1.train.SyncReplicasOptimizer)

    @property
    def reduces(self) -> bool:  # type: ignore[override]
        return _tf.optimizers.is_graph_optimizer(self._wrapper.optimizer)

    def when(self, condition: tf.Tensor, function: Callable[..., Any]) -> Any:
        if not self.waits_for_others:
            return super().when(condition, function)
        message = (
            "This worker has accumulated nothing, but the other workers wait for its gradient. [accum: sync-replicas]"
        )
        with tf.control_dependencies([tf.compat.v1.Assert(condition, [message])]):
            return function()

    def prepare(self, variables: Sequence[tf.Variable], used: Sequence[tf.Variable] = ()) -> None:
        _tf.inner_optimizer.prepare(self._wrapper.optimizer, variables, used)

    def create_inner_slots(self, variables: Sequence[tf.Variable]) -> None:
        """Create the inner optimizer's slots for `variables` before a conditional does."""
        if _tf.optimizers.is_graph_optimizer(self._wrapper.optimizer):
            create = lambda _, mirrored: _tf.inner_optimizer.create_graph_slots(self._wrapper.optimizer, mirrored)
            across_replicas(create, [variables])
        else:
            _tf.inner_optimizer.create_graph_slots(self._wrapper.optimizer, variables)

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        # Each train op and flush calls the inner optimizer's `apply_gradients`. Optimizers of BERT's family call
        # `get_variable` there, which would fail the second time, or make other moments in another scope.
        self.begin_step()
        with _tf.graphs.unrecorded(tf.compat.v1.GraphKeys.SUMMARIES) as summaries, self.same_variables():
            yield
        if summaries and not self._has_told_of_summaries:
            self._has_told_of_summaries = True
            _check.warn(f"{SUMMARIES_OF_STEPS} Received: {[one.op.name for one in summaries]}.")
        graph = tf.compat.v1.get_default_graph()
        steps = _STEPS.setdefault(graph, [])
        steps.append(range(self._ops_before_step, len(graph.get_operations())))

    def begin_step(self) -> None:
        """Note that what is created from now on makes a step."""
        self._ops_before_step = len(tf.compat.v1.get_default_graph().get_operations())

    @contextlib.contextmanager
    def same_variables(self) -> Iterator[None]:
        """Let `tf.compat.v1.get_variable` return the variables that it created in this context the first time."""
        first = self._first_step or FirstCall(REFUSAL)
        with contextlib.ExitStack() if self._first_step is None else first.again():
            yield
        self._first_step = first

    def make_step(self, grads_and_vars: GradsAndVars, replicas: int) -> Optional[tf.Operation]:
        global_step = None if self._counts == "micro_steps" else self.global_step
        # With SyncReplicasOptimizer, the chief's queue runner runs some of these ops alone, so they must not depend on
        # the ops of a cycle.
        waits = tf.control_dependencies(None if self.waits_for_others else [])
        # Variables that the inner optimizer still has to create must not be named after the conditional. Its op is
        # inside the conditional, where a session can't run it, so it must not be recorded as the train op.
        scope = tf.compat.v1.name_scope(self.scope + "/" if self.scope else None)
        with waits, scope, _tf.graphs.unrecorded(tf.compat.v1.GraphKeys.TRAIN_OP):
            return _tf.inner_optimizer.apply(self._wrapper.optimizer, grads_and_vars, replicas, global_step)

    def others(self) -> Sequence[tf.Variable]:
        if self.after_step:
            return tf.compat.v1.global_variables()
        counted = [self.global_step] if self.global_step is not None and self._counts else []
        return self.gathered + counted  # which are of the kind of the averages that the listeners move

    def end_step(self, done: tf.Tensor, has_latest: bool = False) -> tf.Tensor:
        if self.waits_for_others:
            return done
        counts = self.global_step is not None and self._counts == "steps"
        if counts and self._advances():
            raise ValueError(COUNTED_TWICE)
        counts = counts or (has_latest and self.global_step is not None and self._counts == "micro_steps")
        with tf.compat.v1.name_scope(self.scope + "/" if self.scope else None):
            for function in ([self._count_step] if counts else []) + self.after_step:
                with tf.control_dependencies([done]):
                    done = true_after(function())
        # Said once, where the first op that makes a step is created.
        if self._first_step is None and self.global_step is not None and not self._counts and not self._advances():
            _check.warn(f"{NOT_COUNTED} Received: {type(self._wrapper.optimizer).__name__}.", _check.InexactWarning)
        return done

    def _count_step(self) -> tf.Operation:
        one = tf.ones([], self.global_step.dtype.base_dtype)
        return self.global_step.assign_add(one, read_value=False)

    def _advances(self) -> bool:
        """Whether the ops of the current step so far advance `global_step`, or that of a replica."""
        ops = tf.compat.v1.get_default_graph().get_operations()[self._ops_before_step :]
        counters = tf.distribute.get_strategy().experimental_local_results(self.global_step)
        return any(_tf.op_walks.may_change(ops, counter) for counter in counters)

    def count_micro_step(self, counts: Optional[tf.Tensor], has_stepped: tf.Tensor) -> Optional[tf.Operation]:
        if self._counts != "micro_steps" or self.global_step is None:
            return None
        one = tf.logical_not(has_stepped)  # otherwise, `end_step` has counted it, before what follows the step
        one = one if counts is None else tf.logical_and(counts, one)
        return self.global_step.assign_add(tf.cast(one, self.global_step.dtype.base_dtype))

    def steps(self) -> tf.Tensor:
        return tf.identity(self.global_step)


_STEPS: "weakref.WeakKeyDictionary[tf.Graph, List[range]]" = weakref.WeakKeyDictionary()
"""The places of those operations in a graph that make the step of an `AccumOptimizer`."""


def ops_outside_of_steps() -> List[tf.Operation]:
    """Return the operations of the current graph but for those that make the steps of an `AccumOptimizer`."""
    graph = tf.compat.v1.get_default_graph()
    steps = _STEPS.get(graph, [])
    return [op for place, op in enumerate(graph.get_operations()) if not any(place in step for step in steps)]


def _worker_that_shares(var: tf.Variable) -> Optional[str]:
    """Return the device of newly created ops if `var` is in another process, otherwise None."""
    if not _tf.graphs.is_of_a_cluster(var):
        return None
    worker = tf.no_op(name="worker").device  # a new op shows what the current device function returns
    here, there = (tf.compat.v1.DeviceSpec.from_string(device) for device in (worker, var.device))
    return None if (here.job, here.task) == (there.job, there.task) else worker
