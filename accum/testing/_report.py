"""The report of a check of the user's model."""

from typing import Dict, List, NamedTuple, Optional


class Suspect(NamedTuple):
    """A part of a model that makes micro-batches differ from the full batch, the reason and the remedy."""

    what: str
    reason: str
    remedy: str


class Deviation(NamedTuple):
    """How far a variable is off: the largest absolute difference of its elements, and the largest one allowed."""

    variable: str
    size: float
    allowed: float


SHOWN = 5  # variables in a message, besides the first


class EqualityReport(NamedTuple):
    """The result of the check of a model.

    Attributes:
      steps: int, the steps that were compared.
      accum_steps: int, the micro-batches of the first step.
      tolerance: float, as given or chosen.
      deviations: dict from the name of each variable to the largest absolute difference of its elements in any step.
      diverged_at: int, the first step past the tolerance, counted from 1; None if there is none.
      diverged: list of `(variable, size, allowed)` at that step, beginning with the one furthest past the tolerance.
      suspects: list of `(what, reason, remedy)`: the parts of this model that can cause the divergence.
      sensitivity: float, the number of tolerances between the full batch and a plainly wrong run, which trains on only
        the first micro-batch of each step. None if the model diverged.
      split: str, what was asked for, such as "micro_batch_size=8".
    """

    steps: int
    accum_steps: int
    tolerance: float
    deviations: Dict[str, float]
    diverged_at: Optional[int] = None
    diverged: List[Deviation] = []
    suspects: List[Suspect] = []
    sensitivity: Optional[float] = None
    split: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether every variable stayed within the tolerance."""
        return self.diverged_at is None

    def __str__(self) -> str:
        return self._equal() if self.is_equal else "\n".join(self._divergence() + self._explanation())

    def _equal(self):
        name = max(self.deviations, key=lambda name: self.deviations[name])
        return (
            f"Accumulation equals the full batch: {_counted(self.steps, 'step')} of {self.accum_steps} "
            f"micro-batches, and the largest deviation is {self.deviations[name]:.1e}, of `{name}` (tolerance "
            f"{self.tolerance:.0e})."
        )

    def _divergence(self):
        first, others = self.diverged[0], self.diverged[1:]
        split = self.split or f"accum_steps={self.accum_steps}"
        lines = [
            (
                f"Accumulation diverges from the full batch at step {self.diverged_at}: `{first.variable}` is off by "
                f"{first.size:.1e}, where {first.allowed:.1e} is allowed ({split}, tolerance "
                f"{self.tolerance:.0e})."
            )
        ]
        if others:
            shown = [f"`{other.variable}` by {other.size:.1e}" for other in others[:SHOWN]]
            more = len(others) - len(shown)
            lines.append("Also off: {}{}.".format(", ".join(shown), f" and {more} more" if more else ""))
        return lines

    def _explanation(self):
        return ["Possible causes in this model:"] + [
            f"  - {suspect.what}: {suspect.reason}. {suspect.remedy}." for suspect in self.suspects
        ]


def _counted(number, what):
    return "{} {}{}".format(number, what, "" if number == 1 else "s")
