"""The settings of the demo, and the runs that follow from them."""

from typing import NamedTuple, Optional

APIS = ("v1", "optimizer", "model")
MICRO_BATCHES = "micro-batches"
"""In place of an API: one model that splits each batch itself."""

WHOLE_BATCH = ("none", "batch_norm", "loss", "all")
LEARNING_RATE = 0.1
RESIDUAL_LEARNING_RATE = 0.05
"""Of the residual network. A deep network amplifies rounding errors, the more so the larger its steps are."""


class Settings(NamedTuple):
    """The arguments of the command; `batch_size` is the number of examples per step."""

    api: str
    accum_steps: int
    batch_size: int
    epochs: int
    seed: int
    micro_batch_size: int = 16
    whole_batch: str = "all"


class Run(NamedTuple):
    """One training.

    Attributes:
      label: its name in the table.
      batch_size: examples per backward pass.
      accum_steps: backward passes per step; None: the plain optimizer, without accum.
      micro_batch_size: the largest number of examples computed at once; None: all of the batch.
      whole_batch: what sees the whole batch although it is computed in micro-batches.
      learning_rate: of SGD with momentum.
    """

    label: str
    batch_size: int
    accum_steps: Optional[int]
    micro_batch_size: Optional[int] = None
    whole_batch: str = "none"
    learning_rate: float = LEARNING_RATE


def runs_to_compare(settings):
    """Full batch, accumulated batch and micro-batch; or full batch, micro-batches, and those without `whole_batch`."""
    size, steps = settings.batch_size, settings.accum_steps
    if settings.api == MICRO_BATCHES:
        micro, whole = settings.micro_batch_size, settings.whole_batch
        # Same examples, updates and learning rate: only what a micro-batch sees of its batch differs.
        label = f"micro-batches of {micro}"
        runs = [Run(f"full batch {size}", size, None), Run(label, size, None, micro)]
        if whole != "none":
            runs.insert(1, Run(f'{label}, whole_batch="{whole}"', size, None, micro, whole))
        return tuple(run._replace(learning_rate=RESIDUAL_LEARNING_RATE) for run in runs)
    micro = size // steps
    return (
        Run(f"full batch {size}", size, None),
        Run(f"accumulated {steps} x {micro}", micro, steps),
        Run(f"micro-batch {micro}", micro, None),
    )
