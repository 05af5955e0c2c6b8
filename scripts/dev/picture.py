"""Pictures as SVG: the matrix, and what accumulation costs.

python scripts/dev/picture.py       writes docs/speed.svg from benchmarks/results
"""

import json
import os
from xml.sax.saxutils import escape

from matrix import data as matrix

PYTHONS = sorted(
    {python for version in matrix.VERSIONS for python in matrix.pythons(version)}, key=lambda text: int(text[2:])
)
ALT = "Grids of TensorFlow and Python versions, one per system: what passed, failed or was not run. Tables below."

WIDTH, HEIGHT, GAP = 30, 22, 3
LEFT, TOP, PANEL_GAP = 64, 84, 66
INK, GREY = "#1f2933", "#5b6770"
LOOKS = {
    "passed": ("#1a7f4b", "#1a7f4b", "#ffffff", "passed"),
    "old": ("#d8efe1", "#1a7f4b", "#14623a", "passed, with older sources"),
    "failed": ("#c0392b", "#c0392b", "#ffffff", "failed"),
    "not run": ("#ffffff", "#a5adb5", "#a5adb5", "not run"),
}
"""Fill, outline, mark and meaning of each state; the marks distinguish them without colour."""

MARKS = {"passed": "M-5 0 l4 4 l7 -8", "old": "M-5 0 l4 4 l7 -8", "failed": "M-4 -4 l8 8 M-4 4 l8 -8", "not run": None}


CARD, CARD_EDGE = "#ffffff", "#d5dae0"
LIGHT = f"--card: {CARD}; --ink: {INK}; --grey: {GREY}; --edge: {CARD_EDGE}"
DARK = "--card: #1b1f24; --ink: #e6e9ec; --grey: #a3adb8; --edge: #3b434c"
STYLE = f"""\
<style>
.picture {{ {LIGHT} }}
@media (prefers-color-scheme: dark) {{ .picture {{ {DARK} }} }}
body[data-theme="light"] .picture {{ {LIGHT} }}
body[data-theme="dark"] .picture {{ {DARK} }}
.picture rect[fill="{CARD}"], .picture-empty {{ fill: var(--card) }} .picture [fill="{INK}"] {{ fill: var(--ink) }}
.picture [fill="{GREY}"] {{ fill: var(--grey) }} .picture [stroke="{CARD_EDGE}"] {{ stroke: var(--edge) }}
</style>"""
"""Colours by the reader's preference; within a page of the site, by the theme that the reader has chosen there.

What <use> shows has no ancestors for a browser's selectors, so it has a class of its own.
"""

LETTERS = {"Wine": "W", "emulated": "E"}
"""In a corner of what did not run natively."""


def way(record):
    """How a record came about: "native", "Wine" or "emulated"."""
    under = (record or {}).get("under")
    if under is None:
        return "native"
    return "Wine" if under.startswith("Wine") else "emulated"


def columns():
    """[(version, whether of Keras 2 beside Keras 3)], from the oldest to the newest."""
    return [
        (version, two)
        for version in matrix.VERSIONS
        for two in ((False, True) if matrix.has_keras_3(version) else (False,))
    ]


def label(version, keras_2):
    return version + (" keras2" if keras_2 else "")


def _text(x, y, content, size=11, fill=INK, anchor="start", weight="normal"):
    form = '<text x="{}" y="{}" font-size="{}" fill="{}" text-anchor="{}" font-weight="{}">{}</text>'
    return form.format(x, y, size, fill, anchor, weight, escape(content))


def _symbol(state):
    """The drawing of a cell in a state; `_cell` places it."""
    fill, outline, ink, _ = LOOKS[state]
    dashes = ' stroke-dasharray="3 2" class="picture-empty"' if state == "not run" else ""
    box = '<rect width="{}" height="{}" rx="3" fill="{}" stroke="{}"{}/>'
    parts = [box.format(WIDTH - GAP, HEIGHT - GAP, fill, outline, dashes)]
    if MARKS[state]:
        centre = f"translate({(WIDTH - GAP) / 2} {(HEIGHT - GAP) / 2})"
        stroke = f'fill="none" stroke="{ink}" stroke-width="2.2" stroke-linecap="round"'
        parts.append(f'<path transform="{centre}" d="{MARKS[state]}" {stroke}/>')
    return f'<g id="{_id(state)}">{"".join(parts)}</g>'


def _id(state):
    return "cell-" + state.replace(" ", "-")


def _cell(x, y, state, title):
    form = '<use href="#{}" x="{}" y="{}"><title>{}</title></use>'
    return form.format(_id(state), x, y, escape(title))


def _passed(states_of, records):
    """Such as "102 of 102 passed, 21 with the present sources, 7 of them under Wine", or "not run"."""
    if all(state == "not run" for state in states_of.values()):
        return "not run"
    fresh = sum(state == "passed" for state in states_of.values())
    ways = [way(records.get(name)) for name, state in states_of.items() if state in ("passed", "old")]
    said = f"{len(ways)} of {len(states_of)} passed"
    if fresh < len(ways):
        said += f", {fresh or 'none'} with the present sources"
    for name, words in (("Wine", "under Wine"), ("emulated", "emulated")):
        if name in ways:
            said += f", {ways.count(name)} of them {words}"
    return said


def _letter(x, y, state, letter):
    return _text(x + WIDTH - GAP - 3, y + HEIGHT - GAP - 3, letter, size=8, fill=LOOKS[state][2], anchor="end")


def _panel(top, system, states_of, records):
    """A system's grid, versions from left to right and Pythons from top to bottom."""
    passed = _passed(states_of, records)
    parts = [_text(LEFT, top - 30, matrix.SYSTEMS[system], size=14, weight="bold")]
    parts.append(_text(LEFT + 215, top - 30, passed, size=12, fill=GREY))
    for index, (version, keras_2) in enumerate(columns()):
        centre = LEFT + index * WIDTH + (WIDTH - GAP) / 2
        parts.append(_text(centre, top - 6, version, size=10, fill=GREY, anchor="middle"))
        if keras_2:
            parts.append(_text(centre, top - 17, "keras2", size=7.5, fill=GREY, anchor="middle"))
    for row, python in enumerate(PYTHONS):
        y = top + row * HEIGHT
        parts.append(_text(LEFT - 8, y + 14, "py " + python, size=10, fill=GREY, anchor="end"))
        for index, (version, keras_2) in enumerate(columns()):
            name = matrix.env_name(python, version, keras_2)
            x = LEFT + index * WIDTH
            if name not in states_of:
                dot = '<circle cx="{}" cy="{}" r="1.2" fill="#c3c9cf"/>'
                parts.append(dot.format(x + (WIDTH - GAP) / 2, y + (HEIGHT - GAP) / 2))
                continue
            kept = records.get(name)
            title = f"{name}: {LOOKS[states_of[name]][3]}"
            if kept:
                title += f" under {kept['under']}" if "under" in kept else ""
                title += ", {passed} tests passed, {failed} failed, {date}".format(**kept)
            parts.append(_cell(x, y, states_of[name], title))
            if way(kept) in LETTERS:
                parts.append(_letter(x, y, states_of[name], LETTERS[way(kept)]))
    return parts


def _legend(y):
    parts, x = [], LEFT
    for state, (_, _, _, meaning) in LOOKS.items():
        parts += [_cell(x, y, state, meaning), _text(x + WIDTH + 3, y + 14, meaning, size=11)]
        x += WIDTH + 30 + 6.2 * len(meaning)
    dot = f'<circle cx="{x + 6}" cy="{y + (HEIGHT - GAP) / 2}" r="1.2" fill="#7b8794"/>'
    said = "no wheel of TensorFlow; W: under Wine, E: emulated"
    return parts + [dot, _text(x + 16, y + 14, said, size=11)]


def draw(states, records):
    """The SVG text, from {system: {name: state}} and {system: {name: record}}. On a card, for any background."""
    panel = len(PYTHONS) * HEIGHT + PANEL_GAP
    width = LEFT + len(columns()) * WIDTH + 24
    height = TOP + len(states) * panel
    said = "; ".join(
        f"{matrix.SYSTEMS[system]}: {_passed(states_of, records.get(system, {}))}"
        for system, states_of in states.items()
    )
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'role="img" aria-labelledby="matrix-title matrix-desc" class="picture" '
            'font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif">'
        ),
        '<title id="matrix-title">accum: what ran on which TensorFlow and Python</title>',
        f'<desc id="matrix-desc">{escape(ALT)} {escape(said)}.</desc>',
        STYLE,
        f'<rect width="{width}" height="{height}" rx="8" fill="{CARD}" stroke="{CARD_EDGE}"/>',
        f"<defs>{''.join((_symbol(state) for state in LOOKS))}</defs>",
        _text(LEFT, 34, "accum: what ran on which TensorFlow and Python", size=17, weight="bold"),
    ]
    parts += _legend(50)
    for index, (system, states_of) in enumerate(states.items()):
        parts += _panel(TOP + 52 + index * panel, system, states_of, records.get(system, {}))
    return "\n".join(parts + ["</svg>"]) + "\n"


ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RESULT = os.path.join(ROOT, "benchmarks", "results", "py311-tf2.15.json")
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
