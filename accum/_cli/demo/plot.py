"""The loss curves."""

from accum._cli.demo.report import deviation
from accum._cli.demo.settings import MICRO_BATCHES


def draw(settings, outcomes, path):
    """Write the loss curves of the three runs to `path` as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # optional, and slow to import
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    measured = settings.face == MICRO_BATCHES and all(outcome.training_mib for outcome in outcomes)
    figure = Figure(figsize=(11, 5) if measured else (8, 5))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(1, 2 if measured else 1, 1)
    full, accumulated, micro = outcomes
    if measured:
        _bars(figure.add_subplot(1, 2, 2), outcomes)
    # The first two coincide: one is thick and pale, the other thin and dashed on top of it.
    _curve(axes, full, color="#9ecae1", linewidth=8, solid_capstyle="round", marker="o", markersize=8)
    _curve(axes, accumulated, color="#08306b", linewidth=1.6, linestyle="--", marker="o", markersize=3.5)
    _curve(axes, micro, color="#d95f02", linewidth=1.6, marker="o", markersize=3.5)
    _label(axes, settings, deviation(accumulated, full))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.tight_layout()
    figure.savefig(path, dpi=150, format="png")


def _bars(axes, outcomes):
    values = [outcome.training_mib for outcome in outcomes]
    axes.barh([2, 1, 0], values, color=["#9ecae1", "#08306b", "#d95f02"], height=0.55)
    for place, outcome in zip((2, 1, 0), outcomes):
        axes.text(0, place + 0.33, outcome.run.label, va="bottom")
        axes.text(outcome.training_mib, place, f" {outcome.training_mib:,.0f} MiB", va="center")
    axes.set_title("Memory for training")
    axes.set_xlim(0, 1.25 * max(values))
    axes.set_ylim(-0.5, 2.8)
    axes.set_axis_off()


def _curve(axes, outcome, **style):
    epochs = range(1, len(outcome.losses) + 1)
    label = f"{outcome.run.label}: {outcome.updates:,} updates, {outcome.accuracy:.1%} test accuracy"
    axes.plot(epochs, outcome.losses, label=label, **style)


def _label(axes, settings, largest):
    if settings.face == MICRO_BATCHES:
        axes.set_title(f"Full batch and micro-batches: weights differ by {largest:.1e} at most", fontsize=11)
    else:
        axes.set_title(
            f"Handwritten digits, --face {settings.face}: the accumulated weights end\nwithin {largest:.1e} of the "
            "full batch's"
        )
    axes.set_xlabel("epoch")
    axes.set_ylabel("training loss (nats per example)")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(True, which="both", alpha=0.25)
    axes.spines["top"].set_visible(False)
    axes.spines["right"].set_visible(False)
    if settings.face == MICRO_BATCHES:
        axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    else:
        axes.legend(frameon=False)
