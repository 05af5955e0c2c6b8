"""The settings of the demo, and the three runs that follow from them."""

from typing import NamedTuple, Optional

FACES = ("v1", "optimizer", "model")
MICRO_BATCHES = "micro-batches"
"""In place of a face: one model that splits each batch itself."""

WHOLE_BATCH = ("none", "batch_norm", "loss", "all")
LEARNING_RATE = 0.1  # at the full batch


class Settings(NamedTuple):
    """The arguments of the command; `batch_size` is the number of examples per step."""

    face: str
    accum_steps: int
    batch_size: int
    epochs: int
    seed: int
    micro_batch_size: int = 8
    whole_batch: str = "all"


class Run(NamedTuple):
    """One training.

    Attributes:
      label: its name in the table.
      batch_size: examples per backward pass.
      accum_steps: backward passes per step; None: the plain optimizer, without accum.
      micro_batch_size: the largest number of examples computed at once; None: all of the batch.
      learning_rate: of SGD with momentum.
    """

    label: str
    batch_size: int
    accum_steps: Optional[int]
    micro_batch_size: Optional[int] = None
    learning_rate: float = LEARNING_RATE


def three_runs(settings):
    """The runs to compare: full batch, accumulated or in micro-batches, and neither."""
    size, steps = settings.batch_size, settings.accum_steps
    if settings.face == MICRO_BATCHES:
        micro = settings.micro_batch_size
        # A small batch makes more updates, each proportionally shorter, which is the rule of thumb for SGD.
        scaled = LEARNING_RATE * micro / size
        return (
            Run(f"batch {size}", size, None),
            Run(f"batch {size} in micro-batches of {micro}", size, None, micro),
            Run(f"batch {micro}, learning rate {scaled:.2g}", micro, None, learning_rate=scaled),
        )
    micro = size // steps
    return (
        Run(f"full batch {size}", size, None),
        Run(f"accumulated {steps} x {micro}", micro, steps),
        Run(f"micro-batch {micro}", micro, None),
    )
