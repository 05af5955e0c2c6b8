"""The list of variables that a cycle accumulates for, and when it may change."""

from typing import Callable, Dict, Optional, Sequence, Set, Tuple

from accum import _tf
from accum._tf import GradsAndVars, tf


class VariableList:
    """Holds a cycle to one list of variables.

    Attributes:
      current: the variables of the last call, in order.
    """

    def __init__(self) -> None:
        self.current: Tuple[tf.Variable, ...] = ()
        self._announced: Optional[Set[int]] = None  # keys of the list that was announced last
        self._may_change = False  # whether the next call may bring another list, because one was announced
        self._traced_without: Dict[int, str] = {}  # variable key -> name, of those without a gradient in some trace

    def check(self, listed: GradsAndVars, accumulated: Sequence[tf.Variable], is_in_cycle: Callable[[], bool]) -> None:
        """Raise if a call brings another list within a cycle. A trace may run at any time within a cycle.

        Variables that never had a gradient may come and go.

        Args:
          listed: list of (gradient or None, variable), those of the call.
          accumulated: the variables in `current` that have an accumulator.
          is_in_cycle: function that tells whether a cycle has begun.
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
        elif _tf.is_tracing():
            # an optimizer of a static graph has no `build`
            remedy = "" if _tf.in_static_graph() else ", or call `build(var_list)` when it changes"
            raise ValueError(
                f"One optimizer accumulates for one list of variables: use an optimizer for each list{remedy}. "
                f"{received}"
            )
        elif is_in_cycle():
            raise ValueError(
                f"The list of variables must not change within a cycle: call `flush()` or `reset()` first. {received}"
            )

    def _check_traces(self, listed: GradsAndVars) -> None:
        keys = [_tf.variable_key(var) for grad, var in listed if grad is not None]
        late = [self._traced_without[key] for key in keys if key in self._traced_without]
        if late:
            raise ValueError(
                f"A function was traced in which {late} had no gradient, and would lose the one that they get now. "
                "Trace the function that gives them one first, or use an optimizer for each."
            )

    def note_without_gradient(self, variables: Sequence[tf.Variable]) -> None:
        """Remember that a trace knows no gradient of `variables`."""
        self._traced_without.update((_tf.variable_key(var), var.name) for var in variables)

    def announce(self, variables: Sequence[tf.Variable], is_in_cycle: Callable[[], bool]) -> None:
        """Let the next call bring another list than the last, if this is the first to hear of it.

        `LossScaleOptimizer` announces all variables before each call, and leaves out those without a gradient there.
        """
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
    return {_tf.variable_key(var) for var in variables}
