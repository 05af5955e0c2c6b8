"""Between the gradients and the first update of a step that may be tried again.

A step that runs out of memory before its first update can be tried again, if what it has changed is set back. After
that, weights may have changed. So the gate counts updates, in a variable. It also ends the trials in which memory is
measured: in a graph by an assertion that fails, under XLA, which has none, by an exception while it is traced.
"""

from typing import List, Optional, Set

from accum import _tf
from accum._engine import _replicas
from accum._keras._steps._optimizer_calls import Gate
from accum._tf import GradsAndVars, tf

END_OF_TRIAL = "This is no error: accum has measured the memory of a step, and ends it before its first update."


class EndOfTrial(BaseException):
    """Leaves the Python code of a step before its first update.

    Attributes:
      grads: what the step returns, as XLA would not compute them if nothing took them.
    """

    def __init__(self, grads: List[tf.Tensor]) -> None:
        super().__init__()
        self.grads = grads


class GateVariables:
    """What the gates of a model's steps read and write: variables, because a `tf.function` in a step keeps tensors.

    Attributes:
      updates: how many updates the current step has begun, a float32 scalar for each replica.
      is_trial: whether it ends before the first one, likewise.
    """

    def __init__(self) -> None:
        with tf.init_scope():
            self.updates = _tf.variables.new_statistic("updates", [], tf.float32)
            self.is_trial = _tf.variables.new_statistic("is_trial", [], tf.float32)


class UpdateGate(Gate):
    """The gate of one replica, in one run or trace of a step.

    Args:
      variables: `GateVariables`; None if XLA compiles the step, which writes nothing before its end.
      ends_here: whether this is the trace of a trial under XLA.

    Attributes:
      passes: how many times gradients have come by.
      updated: ids of the handles of the variables whose gradients have, and which only change behind the gate.
    """

    def __init__(self, variables: Optional[GateVariables], ends_here: bool) -> None:
        self._variables = variables
        self._ends_here = ends_here
        self.passes = 0
        self.updated: Set[int] = set()

    def released(self, grads_and_vars: GradsAndVars, graph: Optional[tf.Graph]) -> GradsAndVars:
        grads = [grad for grad, _ in grads_and_vars if grad is not None]
        if self._ends_here:
            self._leave(_tf.graphs.tensors_here(grads), graph)
        self.passes += 1
        if graph is not None and self.passes == 1:
            variables = [_replicas.local_variable(_tf.variables.native(var)) for _, var in grads_and_vars]
            changed = set().union(*map(_tf.op_walks.changed_outside, [*_tf.graphs.graphs_within(graph), graph]))
            self.updated = {id(var.handle) for var in variables} - changed
        if self._variables is None:
            return grads_and_vars
        if _tf.graphs.is_compiled_by_xla_here():
            raise ValueError(
                'With `micro_batch_size="auto"`, a train step can\'t call an optimizer in a `tf.function` with '
                "`jit_compile=True` of its own: remove it, or pass a number as `micro_batch_size`."
                " [accum: auto-impossible]"
            )
        with tf.control_dependencies(_tf.graphs.waits_for_all(grads)):
            begun = self._begin()
        with tf.control_dependencies([] if tf.executing_eagerly() else begun):
            return [
                (None if grad is None else _tf.inner_optimizer.on_values(tf.identity, grad), var)
                for grad, var in grads_and_vars
            ]

    def _begin(self) -> List[tf.Operation]:
        """Count an update, as soon as all replicas have come to theirs."""
        updates, is_trial = (
            _replicas.local_variable(var)
            for var in (self._variables.updates, self._variables.is_trial)  # type: ignore[union-attr]
        )
        # The sum waits for all replicas: none begins while another one may yet run out of memory.
        (ready,) = _replicas.sum_of_group([tf.identity(is_trial.read_value())], _replicas.count())
        ends = tf.debugging.Assert(tf.equal(ready, 0.0), [END_OF_TRIAL])
        with tf.control_dependencies([] if ends is None else [ends]):
            return [updates.assign_add(1.0, read_value=False)]

    @staticmethod
    def _leave(grads: List[tf.Tensor], graph: Optional[tf.Graph]) -> None:
        if graph is not None and any(grad.graph is not graph for grad in grads):
            raise ValueError(
                "The optimizer is called in a function or conditional of the step's own. [accum: inner-function]"
            )
        raise EndOfTrial(grads)
