"""The loss curves."""

from accum._cli.demo.report import deviation


def draw(settings, outcomes, path):
    """Write the loss curves of the three runs to `path` as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # optional, and slow to import
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 5))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(1, 1, 1)
    full, accumulated, micro = outcomes
    # The first two coincide: one is thick and pale, the other thin and dashed on top of it.
    _curve(axes, full, color="#9ecae1", linewidth=8, solid_capstyle="round", marker="o", markersize=8)
    _curve(axes, accumulated, color="#08306b", linewidth=1.6, linestyle="--", marker="o", markersize=3.5)
    _curve(axes, micro, color="#d95f02", linewidth=1.6, marker="o", markersize=3.5)
    _label(axes, settings, deviation(accumulated, full))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.tight_layout()
    figure.savefig(path, dpi=150, format="png")


def _curve(axes, outcome, **style):
    epochs = range(1, len(outcome.losses) + 1)
    label = f"{outcome.run.label}: {outcome.updates:,} updates, {outcome.accuracy:.1%} test accuracy"
    axes.plot(epochs, outcome.losses, label=label, **style)


def _label(axes, settings, largest):
    axes.set_title(
        f"Handwritten digits, --face {settings.face}: the accumulated weights end\nwithin {largest:.1e} of the full "
        "batch's"
    )
    axes.set_xlabel("epoch")
    axes.set_ylabel("training loss (nats per example)")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(True, which="both", alpha=0.25)
    axes.spines["top"].set_visible(False)
    axes.spines["right"].set_visible(False)
    axes.legend(frameon=False)
