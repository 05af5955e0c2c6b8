"""The check of a program that builds a static graph against its own full batch."""

from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np

from accum import _check
from accum._tf import tf
from accum.testing._batches import examples_of, full_batches, micro_batches
from accum.testing._deviations import deviation, scale
from accum.testing._graph_suspects import suspects_in
from accum.testing._names import names_of
from accum.testing._order import order_updates, unordered_variables
from accum.testing._report import Deviation, EqualityReport
from accum.testing._sensitivity import ENOUGH

ORDERS = 7  # the sign of a rounding error is a coin that is tossed for each
Values = Dict[str, Any]


def check_graph(
    build_graph: Callable[..., Any],
    data: Any,
    accum_steps: int,
    batch_size: Optional[int],
    steps: int,
    tolerance: float,
    baseline: str,
    runs: int,
) -> EqualityReport:
    """Run the program on full batches, several times, and on their micro-batches. Returns an `EqualityReport`."""
    accum_steps, steps = _check.accum_steps(accum_steps), _check.accum_steps(steps, "steps")
    _check.positive("tolerance", tolerance)
    if not callable(build_graph):
        raise TypeError(f"`build_graph` must be a function that returns a train op. Received: {build_graph!r}.")
    if baseline not in ("own", "ordered"):
        raise ValueError(f'`baseline` must be "own" or "ordered". Received: {baseline!r}.')
    if _check.accum_steps(runs, "runs") < 2:
        raise ValueError(f"`runs` must be at least 2: the full batch is compared with itself. Received: {runs!r}.")
    batches = batches_of(data, batch_size, steps)
    cut = [_cut(batch, accum_steps) for batch in batches]
    whole = _Program(build_graph, batches[0], 1, baseline == "ordered")
    first = whole.first_values()
    expected = whole.train(first, [[batch] for batch in batches])
    for _ in range(runs - 1):
        again = whole.train(first, [[batch] for batch in batches])
        _require_reproducible(whole, expected, again, tolerance, baseline)
    names = unordered_variables(whole.train_op) if baseline == "own" else []
    if names:
        _check.warn(
            "Equal runs of your own full batch agree, but by chance: it reads and changes variables in no fixed "
            'order. Pass `baseline="ordered"`, or order its updates, as `accum.testing.order_updates` does. Received: '
            f"{names}."
        )
    parts = _Program(build_graph, batches[0], accum_steps)
    missing = sorted(set(whole.trained) - set(parts.variables))
    if missing:
        raise ValueError(f"`build_graph` must create the same variables for any `accum_steps`. Missing: {missing}.")
    shared = {name: value for name, value in first.items() if name in parts.variables}
    report = _compared(parts.train(shared, cut), expected, accum_steps, tolerance)
    if not report.is_equal:
        others = [whole.train(first, [[_rolled(batch, by)] for batch in batches]) for by in range(1, ORDERS + 1)]
        rounded = _as_far_off(others, expected, report)
        return report._replace(suspects=suspects_in(whole.train_op, parts.train_op, report, rounded))
    wrong = whole.train(first, [part[:1] for part in cut] if accum_steps > 1 else [])
    return report._replace(sensitivity=_sensitivity(whole, wrong[-1] if wrong else first, expected[-1], tolerance))


def batches_of(data: Any, batch_size: Optional[int], steps: int) -> List[Any]:
    """Return a list of full batches, tuples of any length."""
    is_one = isinstance(data, (tuple, dict)) or hasattr(data, "__array__")
    wrapped = (data,) if is_one else ((element,) for element in data)
    batches = [batch[0] for batch in full_batches(wrapped, batch_size, steps)]
    return [batch if isinstance(batch, tuple) else (batch,) for batch in batches]


def _cut(batch: Any, accum_steps: int) -> List[Any]:
    size = examples_of(batch)
    if size < accum_steps:
        raise ValueError(f"A full batch must hold at least `accum_steps` examples. Received: {size} for {accum_steps}.")
    return micro_batches(batch, accum_steps, max(1, size // accum_steps))


class _Program:
    """The graph of a program, for full batches or for micro-batches.

    Attributes:
      train_op: its train op.
      variables: its global variables of numbers, by name.
      trained: the names of the trainable ones.
    """

    def __init__(self, build_graph: Callable[..., Any], batch: Any, accum_steps: int, is_ordered: bool = False) -> None:
        self._graph = tf.Graph()
        with self._graph.as_default():
            tf.compat.v1.set_random_seed(0)
            self._fed = tf.nest.map_structure(_placeholder, batch)
            self.train_op = _operation(build_graph(accum_steps, *self._fed))
            if is_ordered:
                order_updates(self.train_op)
            listed = [var for var in tf.compat.v1.global_variables() if _is_number(var)]
            self.variables = dict(zip(names_of(listed), listed))
            trainable = tf.compat.v1.trainable_variables()
            self.trained = [name for name, var in self.variables.items() if any(var is one for one in trainable)]
            if not self.trained:
                raise ValueError("`build_graph` must create at least one trainable variable.")
            self._initialize = [
                tf.compat.v1.global_variables_initializer(),
                tf.compat.v1.local_variables_initializer(),
                tf.compat.v1.tables_initializer(),
            ]

    def _session(self) -> tf.compat.v1.Session:
        session = tf.compat.v1.Session(graph=self._graph)
        session.run(self._initialize)
        return session

    def first_values(self) -> Values:
        with self._session() as session:
            return session.run(self.variables)

    def train(self, first: Values, steps: Sequence[Sequence[Any]]) -> List[Values]:
        """Run the train op on the parts of each step, from the values `first` on. Returns the values after each."""
        seen = []
        with self._session() as session:
            self.load(session, first)
            for parts in steps:
                for part in parts:
                    session.run(self.train_op, self._feed(part))
                seen.append(session.run(self.variables))
        return seen

    def load(self, session: tf.compat.v1.Session, values: Values) -> None:
        """Assign values to variables, in one run: TensorFlow prepares the graph anew for each list of what to run."""
        initializers = {name: self.variables[name].initializer for name in values}
        session.run(initializers, {op.inputs[1]: values[name] for name, op in initializers.items()})

    def _feed(self, part: Any) -> Dict[Any, Any]:
        pairs = zip(tf.nest.flatten(self._fed), tf.nest.flatten(part))
        return {tensor: array for tensor, array in pairs if tensor is not None}


def _operation(train_op: Any) -> tf.Operation:
    """Return the train op, which may be a tensor or what `assign` returns too."""
    op = train_op if isinstance(train_op, tf.Operation) else getattr(train_op, "op", None)
    if not isinstance(op, tf.Operation):
        raise TypeError(f"`build_graph` must return a train op. Received: {train_op!r}.")
    return op


def _placeholder(array: Any) -> Any:
    if array is None:
        return None
    if isinstance(array, tf.RaggedTensor):
        raise TypeError("`data` must be dense: arrays that can be fed to placeholders.")
    return tf.compat.v1.placeholder(array.dtype, [None] + list(array.shape[1:]))


def _is_number(var: Any) -> bool:
    return var.dtype.base_dtype.is_floating or var.dtype.base_dtype.is_complex or var.dtype.base_dtype.is_integer


def _require_reproducible(
    whole: _Program, expected: List[Values], again: List[Values], tolerance: float, baseline: str
) -> None:
    """Raise if two equal runs of the full batch differ, and say what to do."""
    report = _compared(again, expected, 1, tolerance)
    if report.is_equal:
        return
    first = report.diverged[0]
    said = (
        f"Two equal runs of your own full batch differ: `{first.variable}` by {first.size:.1e} at step "
        f"{report.diverged_at} (tolerance {tolerance:.0e}). So it is no baseline for accumulation."
    )
    if baseline == "ordered":
        raise ValueError(f"{said} Its updates are in order, so something is drawn at random: turn off dropout.")
    names = unordered_variables(whole.train_op)
    cause = f" It reads and changes these variables in no fixed order: {names}." if names else ""
    raise ValueError(
        f'{said}{cause} Pass `baseline="ordered"`, which computes everything from the values before the step, as '
        "`accum.testing.order_updates` does to any train op; and turn off dropout."
    )


def _compared(ours: List[Values], theirs: List[Values], accum_steps: int, tolerance: float) -> EqualityReport:
    """Compare the variables that two runs share after each step, up to the first that differs."""
    names = [name for name in theirs[0] if name in ours[0]]
    deviations = dict.fromkeys(names, 0.0)
    for step, (one, other) in enumerate(zip(ours, theirs), start=1):
        diverged = []
        for name in names:
            size, allowed = deviation(one[name], other[name]), tolerance * scale(other[name])
            deviations[name] = max(deviations[name], size)
            if not size <= allowed:
                diverged.append(Deviation(name, size, allowed))
        if diverged:
            diverged.sort(key=lambda deviation: -deviation.size / deviation.allowed)
            return EqualityReport(step, accum_steps, tolerance, deviations, step, diverged)
    return EqualityReport(len(theirs), accum_steps, tolerance, deviations)


def _rolled(batch: Any, by: int) -> Any:
    """Return a batch with its examples in another order."""
    roll = lambda array: None if array is None else np.roll(array, by, axis=0)
    return tf.nest.map_structure(roll, batch)


def _as_far_off(others: List[List[Values]], expected: List[Values], report: EqualityReport) -> List[str]:
    """Return the diverged variables that differ about as far between equal runs but for the order of the examples."""
    at = (report.diverged_at or 1) - 1
    return [
        one.variable
        for one in report.diverged
        if 10 * max(deviation(run[at][one.variable], expected[at][one.variable]) for run in others) >= one.size
    ]


def _sensitivity(whole: _Program, wrong: Values, expected: Values, tolerance: float) -> float:
    """Return by how many tolerances a run that drops micro-batches differs from the full batch."""
    gap = max(deviation(wrong[name], expected[name]) / (tolerance * scale(expected[name])) for name in whole.trained)
    if gap < ENOUGH:
        raise ValueError(
            "The check can't tell a wrong step from rounding: a run that drops all micro-batches of a step but the "
            f"first ends only {gap:.2g} tolerances away from the full batch, and at least {ENOUGH:.0f} are needed. "
            "Train with a larger learning rate or for more `steps`, or give examples that differ more."
        )
    return gap
