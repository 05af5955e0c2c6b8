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
    "for training (MiB)",
)
NOTES = (
    "final loss: mean training loss of the last epoch, in nats per example",
    "weight deviation: largest absolute difference from the full batch's weights at the end",
)


def deviation(outcome, reference):
    """The largest absolute difference between two runs' weights."""
    pairs = zip(outcome.weights, reference.weights)
    return max(float(np.max(np.abs(ours - theirs))) for ours, theirs in pairs)


def summary(outcomes, settings):
    """The table, the meaning of its columns, and what follows from it."""
    rows = [HEADER] + [_row(outcome, outcomes[0]) for outcome in outcomes]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        [""]
        + [_line(row, widths) for row in rows]
        + [""]
        + list(NOTES)
        + _memory_note(outcomes)
        + _conclusion(outcomes, settings)
    )


def _row(outcome, reference):
    return (
        outcome.run.label,
        f"{outcome.losses[-1]:.6f}",
        f"{outcome.accuracy:.1%}",
        f"{deviation(outcome, reference):.1e}",
        str(outcome.updates),
        f"{outcome.seconds:.1f}",
        "n/a" if outcome.peak_mib is None else f"{outcome.peak_mib:.0f}",
        "n/a" if outcome.training_mib is None else f"{outcome.training_mib:.0f}",
    )


def _line(row, widths):
    cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
    return "  ".join(cells)


def _memory_note(outcomes):
    if outcomes[0].idle_mib is None:
        return ["peak memory: this operating system does not report it"]
    idle = f"{min(outcome.idle_mib for outcome in outcomes):.0f}"
    return [
        f"peak memory: of each run's own process; about {idle} MiB of it were in use before training",
        "for training: the peak memory less what was in use before training",
    ]


def _conclusion(outcomes, settings):
    if settings.is_graph:
        return []
    full = outcomes[0]
    lines = [
        "",
        f"Each run made the same updates from the same batches of {full.run.batch_size}. Compared with the full batch:",
    ]
    return lines + [_comparison(outcome, full) for outcome in outcomes[1:]]


def _comparison(split, full):
    memory = ""
    if full.training_mib and split.training_mib:
        memory = f"1/{full.training_mib / split.training_mib:.1f} of the memory for training and "
    largest = deviation(split, full)
    result = "the same network" if largest < 1e-3 else "another network"
    return f"- {split.run.label}: {memory}{result}, whose weights differ by up to {largest:.1e}"
