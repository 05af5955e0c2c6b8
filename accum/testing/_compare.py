"""Comparing two recordings, with NumPy alone."""

import math
import numbers
import os
from typing import Dict, List, NamedTuple, Optional

from accum.testing._file import read
from accum.testing._fingerprint import distance
from accum.testing._match import Pair, match

TOLERANCE = 1e-5
SHOWN = 10  # names in a line of the summary

Divergence = NamedTuple("Divergence", [("step", int), ("what", str), ("size", float), ("allowed", float)])
Divergence.__doc__ = """How far apart two runs are at a step.

Attributes:
  step: int.
  what: "loss", or the name of a variable in the first recording.
  size: float, the absolute difference of the losses, or the estimated root of the mean squared difference of the
    elements of the variable.
  allowed: float, the tolerance in that place.
"""


class Comparison(NamedTuple):
    """What `compare` has found.

    Attributes:
      first: the `Divergence` that is furthest past its tolerance in the first step that has one, or None.
      largest: the `Divergence` that is furthest past, or nearest to, its tolerance in all steps.
      tolerance: float, as it was asked for.
      steps: list of the steps that were compared.
      only_in_a, only_in_b: lists of the steps that the other recording does not have.
      pairs: list of `Pair`, the variables that were compared.
      unmatched_a, unmatched_b: lists of the names of variables that have no counterpart.
      has_losses: pair of bools, whether the recordings have losses.
      headers: pair of dicts: versions of TensorFlow, Python, NumPy and accum.
      curves: dict of "steps", "loss_a", "loss_b" and "deviation", lists of equal lengths: by step the losses (NaN where
        there is none) and the largest deviation as a multiple of what is allowed.
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
    def agrees(self):
        """Whether all that was compared is within the tolerance, and no variable was without a counterpart."""
        return self.first is None and not self.unmatched_a and not self.unmatched_b

    def __str__(self):
        return "\n".join(_verdict(self) + _caveats(self))


def compare(a, b, *, tolerance=TOLERANCE, names=None, ignore=()):
    """Compare two recordings of `record`, step by step.

    Without TensorFlow, which `import accum` needs, `python -m accum compare` does the same.

    Steps are compared by their number, variables by their name. Where names differ, they are paired by `names`, or in
    their order: the whole lists if they have the same shapes, or else those of each shape that as many of them have in
    both recordings. Nothing is left out in silence: what has no counterpart makes the recordings disagree, unless it is
    named in `ignore`. At each step it has to be

        |loss_a - loss_b|  <=  tolerance * max(1, |loss_b|) + errors of the losses as recorded
        rms(v_a - v_b)     <=  tolerance * max(1, rms(v_b))         for each variable

    rms being the root of the mean square of the elements, of a difference as the fingerprints estimate it (see
    `record`). What is not a number in both recordings agrees.

    Args:
      a, b: files of recordings, `str` or `os.PathLike`.
      tolerance: float > 0.
      names: dict of names of variables in `a` to names in `b`, for those whose names differ.
      ignore: names of variables of either recording that are not compared.

    Returns:
      A `Comparison`, whose `str` says it in words.

    Raises:
      OSError: a file can't be read.
      TypeError, ValueError: a file is no recording, or one of another version; the recordings have no step, or nothing
        at their steps, in common; `names` or `ignore` name variables that are not there, or pair different shapes.

    Example:
      >>> found = accum.testing.compare("tf1.json", "keras.json", names={"w": "dense/kernel"})
      >>> print(found.first.step if found.first else "they agree")
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, numbers.Real) or not tolerance > 0:
        raise ValueError("`tolerance` must be a number > 0. Received: tolerance={!r}.".format(tolerance))
    ours, theirs = read(os.fspath(a)), read(os.fspath(b))
    pairs, unmatched = match(ours.variables, theirs.variables, names or {}, ignore)
    steps = sorted(set(ours.steps) & set(theirs.steps))
    if not steps:
        raise ValueError("The recordings have no step in common: {} and {}.".format(_range(ours), _range(theirs)))
    by_step = [_divergences(ours, theirs, pairs, step, float(tolerance)) for step in steps]
    if not any(by_step):
        raise ValueError("The recordings have nothing in common to compare: no step with a loss or a variable in both.")
    worst = [max(found, key=_excess) if found else None for found in by_step]
    return Comparison(
        first=next((found for found in worst if found and _excess(found) > 1.0), None),
        largest=max((found for found in worst if found), key=_excess),
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


def _divergences(ours, theirs, pairs, step, tolerance):
    found = []
    if step in ours.losses and step in theirs.losses:
        (loss, error), (other, other_error) = ours.losses[step], theirs.losses[step]
        allowed = tolerance * _scale(other) + error + other_error
        found.append(Divergence(step, "loss", _difference(loss, other), allowed))
    if step in ours.fingerprints and step in theirs.fingerprints:
        for pair in pairs:
            row, other = ours.fingerprints[step][pair.index_a], theirs.fingerprints[step][pair.index_b]
            allowed = tolerance * _scale(other[0] / math.sqrt(max(pair.size, 1)))
            found.append(Divergence(step, pair.name_a, distance(row, other, pair.size), allowed))
    return found


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
        "deviation": [_excess(found) if found else math.nan for found in worst],
    }


def _verdict(found):
    compared = "{} steps ({} to {}), {} variables".format(
        len(found.steps), found.steps[0], found.steps[-1], len(found.pairs)
    )
    worst = "{} at step {}, by {:.1e} where {:.1e} is allowed".format(
        _named(found.largest.what), found.largest.step, found.largest.size, found.largest.allowed
    )
    if found.first is None:
        lines = ["No divergence in {}; the largest difference: {}.".format(compared, worst)]
    else:
        lines = [
            "First divergence: step {}, {}, by {:.1e} where {:.1e} is allowed.".format(
                found.first.step, _named(found.first.what), found.first.size, found.first.allowed
            ),
            "Largest: {}. Compared: {}.".format(worst, compared),
        ]
        if found.first.step == 0:
            lines.append("The runs start from different values: give both the same ones, or pair them by `names`.")
    return lines


def _caveats(found):
    lines = []
    for where, names in (("first", found.unmatched_a), ("second", found.unmatched_b)):
        if names:
            lines.append(
                "Without a counterpart, so not compared: {} of the {}. Pair them by `names`, or leave them out by "
                "`ignore`.".format(_listed(names), where)
            )
    by_order = ["{} with {}".format(pair.name_a, pair.name_b) for pair in found.pairs if pair.how == "order"]
    if by_order:
        lines.append("Paired by their order, as the names differ: {}.".format(_listed(by_order)))
    for where, steps in (("first", found.only_in_a), ("second", found.only_in_b)):
        if steps:
            lines.append("Only in the {}: {} steps, from {} to {}.".format(where, len(steps), steps[0], steps[-1]))
    if found.has_losses[0] != found.has_losses[1]:
        lines.append("Only the {} has losses.".format("first" if found.has_losses[0] else "second"))
    return lines


def _named(what):
    return "the loss" if what == "loss" else "`{}`".format(what)


def _listed(names):
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (" and {} more".format(more) if more > 0 else "")


def _range(recording):
    steps = recording.steps
    return "{} to {}".format(steps[0], steps[-1]) if steps else "none"
