"""The settings of the demo, and the runs that follow from them."""

from typing import NamedTuple, Optional, Sequence, Union

LEARNING_RATE = 0.1
RESIDUAL_LEARNING_RATE = 0.05
"""Of the residual network. A deep network amplifies rounding errors, the more so the larger its steps are."""


class Settings(NamedTuple):
    """The arguments of the command, and whether a static graph is trained; `batch_size` examples make a step."""

    is_graph: bool
    batch_size: int
    micro_batch_size: int
    epochs: int
    seed: int


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
    whole_batch: Union[str, Sequence[str]] = ()
    learning_rate: float = LEARNING_RATE


def runs_to_compare(settings):
    """Full batch, accumulated batch and micro-batch; or full batch, micro-batches, and those without `whole_batch`."""
    size, micro = settings.batch_size, settings.micro_batch_size
    if settings.is_graph:
        return (
            Run(f"full batch {size}", size, None),
            Run(f"accumulated {size // micro} x {micro}", micro, size // micro),
            Run(f"micro-batch {micro}", micro, None),
        )
    # Same examples, updates and learning rate: only what a micro-batch sees of its batch differs.
    label = f"micro-batches of {micro}"
    runs = (
        Run(f"full batch {size}", size, None),
        Run(f'{label}, whole_batch="all"', size, None, micro, "all"),
        Run(label, size, None, micro),
    )
    return tuple(run._replace(learning_rate=RESIDUAL_LEARNING_RATE) for run in runs)
