"""The settings of the demo, and the three runs that follow from them."""

from typing import NamedTuple, Optional

FACES = ("v1", "optimizer", "model")


class Settings(NamedTuple):
    """The arguments of the command; `batch_size` is the number of examples per step."""

    face: str
    accum_steps: int
    batch_size: int
    epochs: int
    seed: int


class Run(NamedTuple):
    """One training.

    Attributes:
      label: its name in the table.
      batch_size: examples per backward pass.
      accum_steps: backward passes per step; None: the plain optimizer, without accum.
    """

    label: str
    batch_size: int
    accum_steps: Optional[int]


def three_runs(settings):
    """The runs to compare: full batch, accumulated, not accumulated."""
    size, steps = settings.batch_size, settings.accum_steps
    micro = size // steps
    return (
        Run(f"full batch {size}", size, None),
        Run(f"accumulated {steps} x {micro}", micro, steps),
        Run(f"micro-batch {micro}", micro, None),
    )
