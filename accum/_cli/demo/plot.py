"""The loss curves."""

from typing import Any, Dict, Tuple

from accum._cli.demo.report import deviation

COLORS = ("#9ecae1", "#08306b", "#d95f02")
STYLES: Tuple[Dict[str, Any], ...] = (
    # The first two coincide: one is thick and pale, the other thin and dashed on top of it.
    {"linewidth": 8, "solid_capstyle": "round", "markersize": 8},
    {"linewidth": 1.6, "linestyle": "--", "markersize": 3.5},
    {"linewidth": 1.6, "markersize": 3.5},
)


def draw(settings, outcomes, path):
    """Write the loss curves of the runs to `path` as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # optional, and slow to import
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    measured = not settings.is_graph and all(outcome.training_mib for outcome in outcomes)
    figure = Figure(figsize=(11, 5) if measured else (8, 5))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(1, 2 if measured else 1, 1)
    if measured:
        _bars(figure.add_subplot(1, 2, 2), outcomes)
    for outcome, color, style in zip(outcomes, COLORS, STYLES):
        _curve(axes, outcome, color=color, marker="o", **style)
    _label(axes, deviation(outcomes[1], outcomes[0]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.tight_layout()
    figure.savefig(path, dpi=150, format="png")


def _bars(axes, outcomes):
    values = [outcome.training_mib for outcome in outcomes]
    heights = range(len(outcomes))[::-1]
    axes.barh(heights, values, color=COLORS[: len(outcomes)], height=0.55)
    for height, outcome in zip(heights, outcomes):
        axes.text(0, height + 0.33, outcome.run.label, va="bottom")
        axes.text(outcome.training_mib, height, f" {outcome.training_mib:,.0f} MiB", va="center")
    axes.set_title("Memory for training")
    axes.set_xlim(0, 1.25 * max(values))
    axes.set_ylim(-0.5, len(outcomes) - 0.2)
    axes.set_axis_off()


def _curve(axes, outcome, **style):
    epochs = range(1, len(outcome.losses) + 1)
    label = f"{outcome.run.label}: {outcome.updates:,} updates, {outcome.accuracy:.1%} test accuracy"
    axes.plot(epochs, outcome.losses, label=label, **style)


def _label(axes, largest):
    axes.set_title(f"Full batch and micro-batches: weights differ by up to {largest:.1e}", fontsize=11)
    axes.set_xlabel("epoch")
    axes.set_ylabel("training loss (nats per example)")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(True, which="both", alpha=0.25)
    axes.spines["top"].set_visible(False)
    axes.spines["right"].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.13))
