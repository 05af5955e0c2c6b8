"""Draw docs/speed.svg, what accumulation costs: `python project/picture.py`, from project/records/benchmarks."""

import json
import os
from xml.sax.saxutils import escape

INK, GREY = "#1f2933", "#5b6770"
CARD, CARD_EDGE = "#ffffff", "#d5dae0"
LIGHT = f"--card: {CARD}; --ink: {INK}; --grey: {GREY}; --edge: {CARD_EDGE}"
DARK = "--card: #1b1f24; --ink: #e6e9ec; --grey: #a3adb8; --edge: #3b434c"
STYLE = f"""\
<style>
.picture {{ {LIGHT} }}
@media (prefers-color-scheme: dark) {{ .picture {{ {DARK} }} }}
body[data-theme="light"] .picture {{ {LIGHT} }}
body[data-theme="dark"] .picture {{ {DARK} }}
.picture rect[fill="{CARD}"] {{ fill: var(--card) }} .picture [fill="{INK}"] {{ fill: var(--ink) }}
.picture [fill="{GREY}"] {{ fill: var(--grey) }} .picture [stroke="{CARD_EDGE}"] {{ stroke: var(--edge) }}
</style>"""
"""Colours by the reader's preference; within a page of the site, by the theme that the reader has chosen there."""


def _text(x, y, content, size=11, fill=INK, anchor="start", weight="normal"):
    form = '<text x="{}" y="{}" font-size="{}" fill="{}" text-anchor="{}" font-weight="{}">{}</text>'
    return form.format(x, y, size, fill, anchor, weight, escape(content))


HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
RESULT = os.path.join(HERE, "records", "benchmarks", "py311-tf2.15.json")
SPEED = os.path.join(ROOT, "docs", "speed.svg")
MEMORY_BARS = [
    ("full batch", "batch of 4,096 at once", False),
    ("accumulated", "accum, 64 at a time", True),
    ("micro-batch", "batch of 64, no accumulation", False),
]
TIME_BARS = [
    ("accum", "accum", True),
    ("by hand", "accumulated by hand", False),
    ("an update every micro-batch", "an update per micro-batch", False),
    ("gradient-accumulator, optimizer", "gradient-accumulator 0.5.2", False),
]
OURS, OTHERS = "#1a7f4b", "#b9c1c9"


def memory_and_time(result):
    """Median peak memory in MiB by kind of run, and the mean over networks of the time of a cycle by baseline."""
    peaks, ratios = {}, {}
    for row in result["memory"]:
        if (row["workload"], row["api"]) == ("conv", "optimizer"):
            peaks.setdefault(row["kind"], []).append(row["peak_mib"])
    for row in result["times"]:
        if (row["accum_steps"], row["api"]) == (8, "optimizer"):
            ratios.setdefault(row["implementation"], []).append(row["ratio"])
    medians = {kind: sorted(values)[len(values) // 2] for kind, values in peaks.items()}
    return medians, {name: sum(values) / len(values) for name, values in ratios.items()}


def _bars(top, title, bars, values, shown):
    """Horizontal bars below a title."""
    parts = [_text(24, top, title, size=15, weight="bold")]
    longest = max(values[key] for key, _, _ in bars)
    for index, (key, label, is_ours) in enumerate(bars):
        y, length = top + 14 + index * 28, 330 * values[key] / longest
        weight = "bold" if is_ours else "normal"
        parts.append(_text(232, y + 15, label, size=13, anchor="end", weight=weight))
        parts.append(
            f'<rect x="242" y="{y}" width="{length:.0f}" height="21" rx="3" fill="{OURS if is_ours else OTHERS}"/>'
        )
        parts.append(_text(f"{250 + length:.0f}", y + 15, shown.format(values[key]), size=13, weight=weight))
    return parts


def draw_speed(result):
    """The SVG text: what a large batch takes of memory and time, with accum and without."""
    memory, time = memory_and_time(result)
    said = f"TensorFlow {result['versions']['tensorflow']}, {result['machine']['cpu']}, {result['machine']['date']}"
    head = "A batch of 4,096 images in the memory of 64"
    below = f"Time per update with 8 micro-batches: {time['accum']:.2f} × the least possible"
    alt = "; ".join(
        [f"{label}: {memory[key]:,.0f} MiB" for key, label, _ in MEMORY_BARS]
        + [f"{label}: {time[key]:.2f} × the least possible time" for key, label, _ in TIME_BARS]
    )
    parts = [
        (
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 312" width="680" height="312" role="img" '
            'aria-labelledby="speed-title speed-desc" class="picture" '
            'font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif">'
        ),
        '<title id="speed-title">What accumulation costs</title>',
        f'<desc id="speed-desc">{escape(alt)}.</desc>',
        STYLE,
        f'<rect width="680" height="312" rx="8" fill="{CARD}" stroke="{CARD_EDGE}"/>',
    ]
    parts += _bars(34, head, MEMORY_BARS, memory, "{:,.0f} MiB")
    parts += _bars(154, below, TIME_BARS, time, "{:.2f}")
    foot = "Memory: peak of the process, a small conv net. Time: mean of an MLP, a conv net and a transformer."
    parts += [_text(24, 290, foot, size=11, fill=GREY), _text(24, 305, said + ", two cores", size=11, fill=GREY)]
    return "\n".join(parts + ["</svg>"]) + "\n"


def main():
    with open(RESULT, encoding="utf-8") as file:
        drawn = draw_speed(json.load(file))
    with open(SPEED, "w", encoding="utf-8", newline="\n") as file:
        file.write(drawn)


if __name__ == "__main__":
    main()
