"""The plan of an optimizer: the length of its cycles and how they are reduced. Does not use TensorFlow."""

from typing import Any, Dict, NamedTuple, Tuple, Union

from accum import _check

REDUCTIONS = ("mean", "sum", "running_mean")
NONFINITE = ("propagate", "skip_micro", "skip_cycle")
SPARSE = ("rows", "dense")


class Plan(NamedTuple):
    """The validated options of one optimizer. A step is one update of the weights; a cycle is its micro steps."""

    schedule: Tuple[Tuple[int, int], ...]  # (first step, accum_steps from that step on), in ascending order
    is_schedule: bool  # False for a plain int
    reduction: str
    nonfinite: str
    sparse: str

    @property
    def accum_steps(self) -> Union[int, Dict[int, int]]:
        """The user's `accum_steps`: an int, or a schedule `{first step: accum_steps}`."""
        return dict(self.schedule) if self.is_schedule else self.schedule[0][1]

    @property
    def is_passthrough(self) -> bool:
        """Whether every cycle is always one micro step, so that nothing has to be stored (law L14)."""
        return not self.is_schedule and self.schedule[0][1] == 1

    @property
    def has_single(self) -> bool:
        """Whether any cycle of the plan is one micro step long."""
        return any(accum_steps == 1 for _, accum_steps in self.schedule)

    @property
    def increments(self) -> Tuple[Tuple[int, int], ...]:
        """The schedule as (first step, change of accum_steps), whose changes up to a step sum to the cycle length."""
        lengths = [0] + [accum_steps for _, accum_steps in self.schedule]
        return tuple((first, new - old) for (first, new), old in zip(self.schedule, lengths))


def make_plan(accum_steps: Any, reduction: str = "mean", nonfinite: str = "propagate", sparse: str = "rows") -> Plan:
    """Check the options and create a `Plan`.

    Args:
      accum_steps: int >= 1, or a dict `{first step: int >= 1}` that includes step 0.
      reduction: one of `REDUCTIONS`, case-insensitive.
      nonfinite: one of `NONFINITE`.
      sparse: one of `SPARSE`.

    Raises:
      TypeError, ValueError: an argument does not match its description (law L17).
    """
    is_schedule = isinstance(accum_steps, dict)
    return Plan(
        schedule=_check.schedule(accum_steps) if is_schedule else ((0, _check.accum_steps(accum_steps)),),
        is_schedule=is_schedule,
        reduction=_check.one_of("reduction", reduction, REDUCTIONS),
        nonfinite=_check.one_of("nonfinite", nonfinite, NONFINITE),
        sparse=_check.one_of("sparse", sparse, SPARSE),
    )
