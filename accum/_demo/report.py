"""The table that the demo ends with."""

import numpy as np

HEADER = (
    "run",
    "final loss",
    "test accuracy",
    "weight deviation",
    "updates",
    "seconds",
    "peak memory (MiB)",
)
NOTES = (
    "final loss: mean training loss of the last epoch, in nats per example",
    "weight deviation: largest absolute difference from the full batch's weights at the end",
)


def deviation(outcome, reference):
    """The largest absolute difference between two runs' weights."""
    pairs = zip(outcome.weights, reference.weights)
    return max(float(np.max(np.abs(ours - theirs))) for ours, theirs in pairs)


def summary(outcomes):
    """The table, and what its columns mean."""
    rows = [HEADER] + [_row(outcome, outcomes[0]) for outcome in outcomes]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join([""] + [_line(row, widths) for row in rows] + [""] + list(NOTES) + _memory_note(outcomes))


def _row(outcome, reference):
    return (
        outcome.run.label,
        "{:.6f}".format(outcome.losses[-1]),
        "{:.1%}".format(outcome.accuracy),
        "{:.1e}".format(deviation(outcome, reference)),
        str(outcome.updates),
        "{:.1f}".format(outcome.seconds),
        "n/a" if outcome.peak_mib is None else "{:.0f}".format(outcome.peak_mib),
    )


def _line(row, widths):
    cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
    return "  ".join(cells)


def _memory_note(outcomes):
    if outcomes[0].idle_mib is None:
        return ["peak memory: this operating system does not tell"]
    idle = "{:.0f}".format(min(outcome.idle_mib for outcome in outcomes))
    return ["peak memory: of each run's own process, of which {} MiB were taken before the training".format(idle)]
