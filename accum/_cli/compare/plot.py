"""The curves of two recorded runs."""

import math
import os


def draw(comparison, paths, path):
    """Write the losses of two runs and their deviation, by step, to `path` as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # optional, and slow to import
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 6))
    FigureCanvasAgg(figure)
    losses, deviations = figure.subplots(2, 1, sharex=True)
    _draw_losses(losses, comparison, paths)
    _draw_deviations(deviations, comparison)
    for axes in (losses, deviations):
        axes.grid(True, which="major", alpha=0.25)
        axes.spines["top"].set_visible(False)
        axes.spines["right"].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(_title(comparison))
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(path, dpi=150, format="png")


def _title(comparison):
    if comparison.first is None:
        return f"No divergence in {len(comparison.steps)} steps (tolerance {comparison.tolerance:.0e})"
    return f"First divergence: step {comparison.first.step}, {comparison.first.what}, by {comparison.first.size:.1e}"


def _draw_losses(axes, comparison, paths):
    curves = comparison.curves
    # Curves may coincide: the first is thick and pale, the second thin and dashed on top of it.
    styles = (
        {"color": "#9ecae1", "linewidth": 8, "solid_capstyle": "round", "markersize": 8},
        {"color": "#08306b", "linewidth": 1.6, "linestyle": "--", "markersize": 3.5},
    )
    for key, path, header, style in zip(("loss_a", "loss_b"), paths, comparison.headers, styles):
        if not all(math.isnan(loss) for loss in curves[key]):
            label = f"{os.path.basename(path)} (TensorFlow {header.get('tensorflow') or 'unknown'})"
            axes.plot(curves["steps"], curves[key], label=label, marker=_marker(comparison), **style)
    axes.set_ylabel("loss")
    if axes.lines:
        _put_legend_above(axes)
    else:
        axes.text(0.5, 0.5, "no losses recorded", ha="center", transform=axes.transAxes)


def _draw_deviations(axes, comparison):
    points = list(zip(comparison.curves["steps"], comparison.curves["deviation"]))
    points = [(step, size) for step, size in points if 0 < size < math.inf]
    axes.axhline(1.0, color="#d95f02", linewidth=1.6, linestyle=":", label="tolerance")
    if points:
        style = {"color": "#08306b", "linewidth": 1.6, "marker": _marker(comparison), "markersize": 3.5}
        axes.plot(*zip(*points), label="largest deviation", **style)
    if comparison.first is not None:
        axes.axvline(comparison.first.step, color="#d95f02", linewidth=1, alpha=0.6, label="first divergence")
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("deviation / allowed deviation")
    _put_legend_above(axes)


def _marker(comparison):
    return "o" if len(comparison.steps) <= 50 else ""


def _put_legend_above(axes):
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncol=3)
