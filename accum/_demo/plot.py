"""The loss curves."""

import importlib.util
import os

from accum._demo.report import deviation

REMEDY = "Install it with `pip install matplotlib`."


def is_possible():
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def check(parser, path):
    """Refuse, before any work is done, a file that can't be drawn."""
    if not path.lower().endswith(".png"):
        parser.error("--plot must name a .png file. Received: {}".format(path))
    folder = os.path.dirname(path) or "."
    can_be_written = os.access(path if os.path.exists(path) else folder, os.W_OK)
    if not can_be_written or not os.path.isdir(folder) or os.path.isdir(path):
        parser.error("--plot must name a file that can be written, in an existing folder. Received: {}".format(path))
    if not is_possible():
        parser.error("--plot needs matplotlib. " + REMEDY)


def draw(settings, outcomes, path):
    """Write the loss curves of the three runs to `path` as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # optional, and slow to import
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 5))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(1, 1, 1)
    full, accumulated, micro = outcomes
    # The first two coincide: one thick and pale, the other thin and dashed on it.
    _curve(axes, full, color="#9ecae1", linewidth=8, solid_capstyle="round", marker="o", markersize=8)
    _curve(axes, accumulated, color="#08306b", linewidth=1.6, linestyle="--", marker="o", markersize=3.5)
    _curve(axes, micro, color="#d95f02", linewidth=1.6, marker="o", markersize=3.5)
    _label(axes, settings, deviation(accumulated, full))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.tight_layout()
    figure.savefig(path, dpi=150, format="png")


def _curve(axes, outcome, **style):
    epochs = range(1, len(outcome.losses) + 1)
    label = "{}: {:,} updates, {:.1%} test accuracy".format(outcome.run.label, outcome.updates, outcome.accuracy)
    axes.plot(epochs, outcome.losses, label=label, **style)


def _label(axes, settings, largest):
    axes.set_title(
        "Handwritten digits, {} face: the accumulated weights end\nwithin {:.1e} of the full batch's".format(
            settings.face, largest
        )
    )
    axes.set_xlabel("epoch")
    axes.set_ylabel("training loss (nats per example)")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(True, which="both", alpha=0.25)
    axes.spines["top"].set_visible(False)
    axes.spines["right"].set_visible(False)
    axes.legend(frameon=False)
