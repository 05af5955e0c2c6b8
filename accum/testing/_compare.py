"""Compare two recordings, without TensorFlow."""

import math
import os
from typing import Dict, List, NamedTuple, Optional, Sequence

from accum import _check
from accum.testing._file import read
from accum.testing._fingerprint import distance
from accum.testing._match import Pair, match

TOLERANCE = 1e-5
SHOWN = 10  # names per line of the summary


class Divergence(NamedTuple):
    """How far apart two runs are at a step.

    Attributes:
      step: int.
      what: "loss", or the name of a variable in the first recording.
      size: float, the absolute difference of the losses, or the estimated root mean square of the difference of the
        variables.
      allowed: float, the largest `size` that is within the tolerance.
    """

    step: int
    what: str
    size: float
    allowed: float


class Comparison(NamedTuple):
    """The result of `compare`.

    Attributes:
      first: the largest `Divergence`, relative to what is allowed, of the first step past the tolerance; None if there
        is no such step.
      largest: the largest `Divergence` of all steps, relative to what is allowed, whether past the tolerance or not.
      tolerance: float, as given.
      steps: list of the steps that were compared.
      only_in_a, only_in_b: lists of the steps that the other recording lacks.
      pairs: list of `Pair`, the variables that were compared.
      unmatched_a, unmatched_b: lists of the names of variables without a counterpart.
      has_losses: pair of bools, whether the recordings have losses.
      headers: pair of dicts: versions of TensorFlow, Python, NumPy and accum.
      curves: dict of "steps", "loss_a", "loss_b" and "deviation", lists of equal lengths: for each step the losses (NaN
        where there is none) and the largest deviation as a multiple of what is allowed.
    """

    first: Optional[Divergence]
    largest: Optional[Divergence]
    tolerance: float
    steps: List[int]
    only_in_a: List[int]
    only_in_b: List[int]
    pairs: List[Pair]
    unmatched_a: List[str]
    unmatched_b: List[str]
    has_losses: tuple
    headers: tuple
    curves: Dict[str, list]

    @property
    def agrees(self) -> bool:
        """Whether everything compared is within the tolerance, and every variable has a counterpart."""
        return self.first is None and not self.unmatched_a and not self.unmatched_b

    def __str__(self) -> str:
        return "\n".join(_verdict(self) + _caveats(self))


def compare(
    a: str, b: str, *, tolerance: float = TOLERANCE, names: Optional[Dict[str, str]] = None, ignore: Sequence[str] = ()
) -> Comparison:
    """Compare two recordings of `record`, step by step.

    Without TensorFlow, which `import accum` needs, `python -m accum compare` does the same.

    Steps are matched by number, variables by name. Variables with different names are paired by `names`, or else in
    their order: all of them if both recordings have the same list of shapes, or else those of each shape that occurs
    equally often in both. A variable without a counterpart makes the recordings disagree, unless it is named in
    `ignore`. At each step,

        |loss_a - loss_b|  <=  tolerance * max(1, |loss_b|) + errors of the losses as recorded
        rms(v_a - v_b)     <=  tolerance * max(1, rms(v_b))         for each variable

    must hold, where rms is the root mean square of the elements. The rms of a difference is estimated from the
    fingerprints (see `record`). NaN agrees with NaN.

    Args:
      a, b: files of recordings, `str` or `os.PathLike`.
      tolerance: float > 0.
      names: dict from names of variables in `a` to names in `b`, for those whose names differ.
      ignore: names of variables in either recording to leave out.

    Returns:
      A `Comparison`, whose `str` is a summary for people.

    Raises:
      OSError: a file can't be read.
      TypeError, ValueError: a file is not a recording, or has another version; the recordings have no step in common,
        or nothing to compare at their common steps; they have only the initial values in common, because one of them
        ends before its first step; `names` or `ignore` name variables that do not exist, or pair different shapes.

    Example:
      >>> found = accum.testing.compare("tf1.json", "keras.json", names={"w": "dense/kernel"})
      >>> print(found.first.step if found.first else "they agree")
    """
    tolerance = float(_check.positive("tolerance", tolerance))
    ours, theirs = read(os.fspath(a)), read(os.fspath(b))
    pairs, unmatched = match(ours.variables, theirs.variables, names or {}, ignore)
    steps = sorted(set(ours.steps) & set(theirs.steps))
    if not steps:
        raise ValueError(f"The recordings have no step in common: {_range(ours)} and {_range(theirs)}.")
    by_step = [_divergences(ours, theirs, pairs, step, tolerance) for step in steps]
    if not any(by_step):
        raise ValueError("The recordings have nothing in common to compare: no step with a loss or a variable in both.")
    worst = [max(divergences, key=_excess) if divergences else None for divergences in by_step]
    first = next((divergence for divergence in worst if divergence and _excess(divergence) > 1.0), None)
    if first is None:
        _check_trained(ours, theirs, [divergence.step for divergence in worst if divergence])
    return Comparison(
        first=first,
        largest=max((divergence for divergence in worst if divergence), key=_excess),
        tolerance=float(tolerance),
        steps=steps,
        only_in_a=sorted(set(ours.steps) - set(steps)),
        only_in_b=sorted(set(theirs.steps) - set(steps)),
        pairs=pairs,
        unmatched_a=unmatched[0],
        unmatched_b=unmatched[1],
        has_losses=(bool(ours.losses), bool(theirs.losses)),
        headers=(ours.header, theirs.header),
        curves=_curves(ours, theirs, steps, worst),
    )


def _check_trained(ours, theirs, compared):
    """Raise if the runs agree but have only their initial values in common."""
    if not set(compared) - ours.starts - theirs.starts:
        raise ValueError(
            "The recordings agree in the values that the runs start from, but share no step of training to "
            f"compare: {ours.path} holds steps {_range(ours)}, and {theirs.path} steps {_range(theirs)}. Record at "
            "least one step in both."
        )


def _divergences(ours, theirs, pairs, step, tolerance):
    divergences = []
    if step in ours.losses and step in theirs.losses:
        (loss, error), (other, other_error) = ours.losses[step], theirs.losses[step]
        allowed = tolerance * _scale(other) + error + other_error
        divergences.append(Divergence(step, "loss", _difference(loss, other), allowed))
    if step in ours.fingerprints and step in theirs.fingerprints:
        for pair in pairs:
            row, other = ours.fingerprints[step][pair.index_a], theirs.fingerprints[step][pair.index_b]
            allowed = tolerance * _scale(other[0] / math.sqrt(max(pair.size, 1)))
            divergences.append(Divergence(step, pair.name_a, distance(row, other, pair.size), allowed))
    return divergences


def _difference(ours, theirs):
    if ours == theirs or (math.isnan(ours) and math.isnan(theirs)):
        return 0.0
    size = abs(ours - theirs)
    return math.inf if math.isnan(size) else size


def _scale(value):
    return max(1.0, abs(value)) if math.isfinite(value) else 1.0


def _excess(divergence):
    return divergence.size / divergence.allowed


def _curves(ours, theirs, steps, worst):
    nothing = math.nan, 0.0
    return {
        "steps": steps,
        "loss_a": [ours.losses.get(step, nothing)[0] for step in steps],
        "loss_b": [theirs.losses.get(step, nothing)[0] for step in steps],
        "deviation": [_excess(divergence) if divergence else math.nan for divergence in worst],
    }


def _verdict(comparison):
    first, largest, steps = comparison.first, comparison.largest, comparison.steps
    compared = f"{len(steps)} steps ({steps[0]} to {steps[-1]}), {len(comparison.pairs)} variables"
    worst = (
        f"{_named(largest.what)} at step {largest.step}, by {largest.size:.1e} where {largest.allowed:.1e} is allowed"
    )
    if first is None:
        lines = [f"No divergence in {compared}; the largest difference: {worst}."]
    else:
        lines = [
            (
                f"First divergence: step {first.step}, {_named(first.what)}, by {first.size:.1e} "
                f"where {first.allowed:.1e} is allowed."
            ),
            f"Largest: {worst}. Compared: {compared}.",
        ]
        if first.step == 0:
            lines.append("The runs start from different values: use the same ones, or pair the variables with `names`.")
    return lines


def _caveats(comparison):
    lines = []
    for where, names in (("first", comparison.unmatched_a), ("second", comparison.unmatched_b)):
        if names:
            lines.append(
                f"Without a counterpart, so not compared: {_listed(names)} of the {where}. Pair them with `names`, "
                "or leave them out with `ignore`."
            )
    by_order = [f"{pair.name_a} with {pair.name_b}" for pair in comparison.pairs if pair.how == "order"]
    if by_order:
        lines.append(f"Paired by their order, because the names differ: {_listed(by_order)}.")
    for where, steps in (("first", comparison.only_in_a), ("second", comparison.only_in_b)):
        if steps:
            lines.append(f"Only in the {where}: {len(steps)} steps, from {steps[0]} to {steps[-1]}.")
    if comparison.has_losses[0] != comparison.has_losses[1]:
        lines.append("Only the {} has losses.".format("first" if comparison.has_losses[0] else "second"))
    return lines


def _named(what):
    return "the loss" if what == "loss" else f"`{what}`"


def _listed(names):
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _range(recording):
    steps = recording.steps
    return f"{steps[0]} to {steps[-1]}" if steps else "none"
