"""The list of variables that a cycle accumulates gradients for, and when the list may change."""

from typing import Callable, Dict, Optional, Sequence, Set, Tuple

from accum import _tf
from accum._tf import GradsAndVars, tf


class VariableList:
    """Checks that all calls within a cycle have the same list of variables.

    Attributes:
      current: the variables of the last call, in order.
    """

    def __init__(self) -> None:
        self.current: Tuple[tf.Variable, ...] = ()
        self._announced: Optional[Set[int]] = None  # keys of the last announced list
        self._may_change = False  # whether the next call may have another list, because one was announced
        # Variable key -> (variable, number). It holds the variable because the key is unique only while it exists.
        self._numbers: Dict[int, Tuple[tf.Variable, int]] = {}
        self._traced_without: Dict[int, str] = {}  # variable key -> name, for variables without a gradient in a trace

    def number(self, variables: Sequence[tf.Variable]) -> None:
        """Number those of `variables` that are new, in order."""
        for var in variables:
            self._numbers.setdefault(_tf.variables.key_of(var), (var, len(self._numbers)))

    def number_of(self, var: tf.Variable) -> int:
        return self._numbers[_tf.variables.key_of(var)][1]

    def count_with(self, variables: Sequence[tf.Variable]) -> int:
        """How many variables will have a number once `variables` have one."""
        return len(_keys(variables).union(self._numbers))

    def check(self, listed: GradsAndVars, accumulated: Sequence[tf.Variable], is_in_cycle: Callable[[], bool]) -> None:
        """Raise if a call has another list of variables within a cycle. A traced call may run at any time in a cycle.

        Variables that never had a gradient may be added and removed.

        Args:
          listed: list of (gradient or None, variable) of the call.
          accumulated: those variables in `current` that have an accumulator.
          is_in_cycle: function that returns whether a cycle has begun.
        """
        keys, current = _keys([var for _, var in listed]), _keys(self.current)
        gone = _keys(accumulated) - keys
        come = _keys([var for grad, var in listed if grad is not None]) - current
        if self.current and (gone or come):
            self._refuse_change([var.name for _, var in listed], is_in_cycle)
        self._check_traces(listed)

    def _refuse_change(self, names: Sequence[str], is_in_cycle: Callable[[], bool]) -> None:
        received = f"Received: {names}, after {[var.name for var in self.current]}."
        if self._may_change:
            self._may_change = False
        elif _tf.graphs.is_tracing():
            # an optimizer of a static graph has no `build`
            remedy = "" if _tf.graphs.in_static_graph() else ", or call `build(var_list)` when it changes"
            raise ValueError(
                f"One optimizer accumulates for one list of variables: use an optimizer for each list{remedy}. "
                f"{received}"
            )
        elif is_in_cycle():
            raise ValueError(
                f"The list of variables must not change within a cycle: call `flush()` or `reset()` first. {received}"
            )

    def _check_traces(self, listed: GradsAndVars) -> None:
        keys = [_tf.variables.key_of(var) for grad, var in listed if grad is not None]
        late = [self._traced_without[key] for key in keys if key in self._traced_without]
        if late:
            raise ValueError(
                f"{late} had no gradient in a function that was traced earlier, which would lose the gradients that "
                "they get now. Trace the function that computes these gradients first, or use an optimizer for each "
                "function."
            )

    def note_without_gradient(self, variables: Sequence[tf.Variable]) -> None:
        """Remember that a trace has no gradients for `variables`."""
        self._traced_without.update((_tf.variables.key_of(var), var.name) for var in variables)

    def announce(self, variables: Sequence[tf.Variable], is_in_cycle: Callable[[], bool]) -> None:
        """Let the next call have another list of variables, unless this list is already known.

        `LossScaleOptimizer` announces all variables before each call, but then calls without those that have no
        gradient.
        """
        self.number(variables)
        keys = _keys(variables)
        if keys in (self._announced, _keys(self.current)):
            return
        if is_in_cycle():
            raise ValueError(
                "The list of variables must not change within a cycle: call `flush()` or `reset()` first. "
                f"Received: {[var.name for var in variables]}."
            )
        self._announced, self._may_change = keys, True


def _keys(variables: Sequence[tf.Variable]) -> Set[int]:
    return {_tf.variables.key_of(var) for var in variables}
