"""All rules that read a user's model, and when each is applied: the one way to them from the rest of accum.

A rule warns of what may differ from the full batch. An error within a rule is only logged (`_check.rule`), and without
the rules, everything is computed as with them. `StateWatch` has two parts, one before a step and one behind it.
"""

from typing import Callable, Dict, Sequence

from accum._keras._diagnosis._first_model import warn_of_first_model
from accum._keras._diagnosis._losses_in_parts import warn_of_losses_of_batch, warn_of_network_of_batch
from accum._keras._diagnosis._moved_state import (
    StateWatch,
    names_of_moved,
    warn_of_batch_norms_under_auto,
    warn_of_batches_in_prediction,
    warn_of_moved,
)
from accum._keras._diagnosis._seen import Seen
from accum._keras._diagnosis._sums import (
    warn_of_inexact_loss,
    warn_of_penalties,
    warn_of_summed_activities,
    warn_of_summed_losses,
    warn_of_sums_in_cycle,
    warn_of_unlike_losses,
)

__all__ = ["RULES", "Seen", "StateWatch", "apply", "names_of_moved"]

RULES: Dict[str, Sequence[Callable[[Seen], None]]] = {
    "compiled": [warn_of_inexact_loss],
    "making the train function": [warn_of_summed_activities],
    "train step traced": [warn_of_network_of_batch, warn_of_first_model],
    "train step checked": [
        warn_of_unlike_losses,
        warn_of_summed_losses,
        warn_of_losses_of_batch,
        warn_of_sums_in_cycle,
        warn_of_penalties,
    ],
    "evaluated": [warn_of_unlike_losses, warn_of_summed_losses],
    "before evaluation or prediction of a split batch": [warn_of_batches_in_prediction],
    "whole batch computed": [warn_of_moved],
    '"auto" has begun to split': [warn_of_batch_norms_under_auto, warn_of_unlike_losses],
}
"""{an event: the rules that are applied then, in this order}."""


def apply(event: str, seen: Seen) -> None:
    """Apply the rules of an event."""
    for rule in RULES[event]:
        rule(seen)
