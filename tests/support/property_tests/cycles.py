"""What the laws say of a sequence of micro-batches, in NumPy: which steps are made, and with which gradients.

This knows nothing of the library. A micro-batch is a dict with

    "grads": for each variable None, an array, or `Rows`
    "weight": a number >= 0, or None for 1
    "then": "flush", "reset" or nothing: what the user calls after it
"""

from typing import Any, List, NamedTuple, Optional

import numpy as np


class Rows(NamedTuple):
    """A sparse gradient: `values[i]` is added to row `indices[i]`, which may occur several times."""

    indices: Any
    values: Any


class Step(NamedTuple):
    """A step of the full batch.

    Attributes:
      grads: for each variable None, an array, or `Rows` with each row once; in float32, from sums in float64.
      rounded: the same from sums in float32, added in order. Where both differ, float32 can't tell.
    """

    grads: List[Any]
    rounded: List[Any]


def initial(case):
    """Return the first values of the variables."""
    random = np.random.RandomState(case["seed"])
    return [random.uniform(0.5, 1.5, variable["shape"]).astype("float32") for variable in case["variables"]]


def steps_of(case, micro_batches) -> List[Optional[Step]]:
    """Return for each micro-batch the step that is made after it, or None."""
    steps: List[Optional[Step]] = []
    made, held, is_spoiled, taken = 0, [], False, 0
    for micro_batch in micro_batches:
        step = None
        is_finite = all(np.isfinite(_values(grad)).all() for grad in micro_batch["grads"] if grad is not None)
        if is_finite or case["nonfinite"] != "skip_micro":
            spoils = not is_finite and _weight(micro_batch) > 0
            is_spoiled = is_spoiled or (spoils and case["nonfinite"] == "skip_cycle")
            held, taken = held + [micro_batch], taken + 1
        ends = taken == accum_steps(case, made) or (micro_batch.get("then") == "flush" and taken)
        if ends and not is_spoiled and sum(_weight(micro_batch) for micro_batch in held) > 0:
            step, made = _step(case, held), made + 1
        if ends or micro_batch.get("then") == "reset":
            held, is_spoiled, taken = [], False, 0
        steps.append(step)
    return steps


def accum_steps(case, made) -> int:
    """Return how many micro-batches the cycle after `made` steps has."""
    schedule = case["accum_steps"]
    if isinstance(schedule, int):
        return schedule
    return schedule[max(start for start in schedule if start <= made)]


def _weight(micro_batch):
    return 1.0 if micro_batch["weight"] is None else micro_batch["weight"]


def _values(grad):
    return grad.values if isinstance(grad, Rows) else grad


def _step(case, held):
    if _is_passthrough(case, held):
        return Step(held[0]["grads"], held[0]["grads"])

    def combined(dtype):
        return [_combined(case, held, index, dtype) for index in range(len(held[0]["grads"]))]

    return Step(combined(np.float64), combined(np.float32))


def _is_passthrough(case, held):
    """Whether the plain optimizer is given the gradients as they are (law L14), with duplicate rows."""
    has_options = case["nonfinite"] != "propagate" or held[0]["weight"] is not None
    return case["accum_steps"] == 1 and case["api"] != "explicit" and not has_options


def _combined(case, held, index, dtype):
    """Return the sum or mean of the gradients of one variable, computed in `dtype`, as float32.

    A gradient of weight 0 adds nothing, even if it is not finite, but its rows are touched.
    """
    pairs = [
        (micro_batch["grads"][index], dtype(_weight(micro_batch)))
        for micro_batch in held
        if micro_batch["grads"][index] is not None
    ]
    if not pairs:
        return None
    divisor = (
        dtype(1) if case["reduction"] == "sum" else dtype(sum(dtype(_weight(micro_batch)) for micro_batch in held))
    )
    if not isinstance(pairs[0][0], Rows):
        parts = [weight * grad.astype(dtype) for grad, weight in pairs if weight > 0]
        total = sum(parts, np.zeros_like(pairs[0][0], dtype))
        return (total / divisor).astype(np.float32)
    rows = np.unique(np.concatenate([grad.indices for grad, _ in pairs]))
    total = np.zeros((len(rows),) + pairs[0][0].values.shape[1:], dtype)
    for grad, weight in (pair for pair in pairs if pair[1] > 0):
        np.add.at(total, np.searchsorted(rows, grad.indices), weight * grad.values.astype(dtype))
    return Rows(rows, (total / divisor).astype(np.float32))
