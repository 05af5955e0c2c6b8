"""What the user asked for, and the three runs that follow from it."""

from typing import NamedTuple, Optional

FACES = ("v1", "optimizer", "model")

Settings = NamedTuple(
    "Settings", [("face", str), ("accum_steps", int), ("batch_size", int), ("epochs", int), ("seed", int)]
)
Settings.__doc__ = """The arguments of the command; `batch_size` is the number of examples of a step."""

Run = NamedTuple("Run", [("label", str), ("batch_size", int), ("accum_steps", Optional[int])])
Run.__doc__ = """One training.

Attributes:
  label: what the table calls it.
  batch_size: examples of one backward pass.
  accum_steps: backward passes per step; None: the optimizer alone, without this library.
"""


def three_runs(settings):
    """The runs to compare: full batch, accumulated, not accumulated."""
    size, steps = settings.batch_size, settings.accum_steps
    micro = size // steps
    return (
        Run("full batch {}".format(size), size, None),
        Run("accumulated {} x {}".format(steps, micro), micro, steps),
        Run("micro-batch {}".format(micro), micro, None),
    )
