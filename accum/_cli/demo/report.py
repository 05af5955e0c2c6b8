"""The table that the demo prints at the end."""

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
    """The table, and the meaning of its columns."""
    rows = [HEADER] + [_row(outcome, outcomes[0]) for outcome in outcomes]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join([""] + [_line(row, widths) for row in rows] + [""] + list(NOTES) + _memory_note(outcomes))


def _row(outcome, reference):
    return (
        outcome.run.label,
        f"{outcome.losses[-1]:.6f}",
        f"{outcome.accuracy:.1%}",
        f"{deviation(outcome, reference):.1e}",
        str(outcome.updates),
        f"{outcome.seconds:.1f}",
        "n/a" if outcome.peak_mib is None else f"{outcome.peak_mib:.0f}",
    )


def _line(row, widths):
    cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
    return "  ".join(cells)


def _memory_note(outcomes):
    if outcomes[0].idle_mib is None:
        return ["peak memory: this operating system does not report it"]
    idle = f"{min(outcome.idle_mib for outcome in outcomes):.0f}"
    return [f"peak memory: of each run's own process; {idle} MiB of it were in use before training"]
