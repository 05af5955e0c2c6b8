"""The matrix as a picture: a grid of TensorFlow and Python for each system, as SVG."""

from xml.sax.saxutils import escape

from matrix import data as matrix

PYTHONS = sorted({python for line in matrix.LINES for python in matrix.pythons(line)}, key=lambda text: int(text[2:]))
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


def columns():
    """[(line, whether of Keras 2 beside Keras 3)], from the oldest to the newest."""
    return [(line, two) for line in matrix.LINES for two in ((False, True) if matrix.has_keras_3(line) else (False,))]


def label(line, keras_2):
    return line + (" keras2" if keras_2 else "")


def _text(x, y, content, size=11, fill=INK, anchor="start", weight="normal"):
    form = '<text x="{}" y="{}" font-size="{}" fill="{}" text-anchor="{}" font-weight="{}">{}</text>'
    return form.format(x, y, size, fill, anchor, weight, escape(content))


def _symbol(state):
    """The drawing of a cell in a state; `_cell` places it."""
    fill, outline, ink, _ = LOOKS[state]
    dashes = ' stroke-dasharray="3 2"' if state == "not run" else ""
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


def _panel(top, system, found, records):
    """A system's grid, lines from left to right and Pythons from top to bottom."""
    passed = f"{list(found.values()).count('passed')} of {len(found)} passed"
    parts = [_text(LEFT, top - 30, matrix.SYSTEMS[system], size=14, weight="bold")]
    parts.append(_text(LEFT + 215, top - 30, passed, size=12, fill=GREY))
    for place, (line, keras_2) in enumerate(columns()):
        centre = LEFT + place * WIDTH + (WIDTH - GAP) / 2
        parts.append(_text(centre, top - 6, line, size=10, fill=GREY, anchor="middle"))
        if keras_2:
            parts.append(_text(centre, top - 17, "keras2", size=7.5, fill=GREY, anchor="middle"))
    for row, python in enumerate(PYTHONS):
        y = top + row * HEIGHT
        parts.append(_text(LEFT - 8, y + 14, "py " + python, size=10, fill=GREY, anchor="end"))
        for place, (line, keras_2) in enumerate(columns()):
            name = matrix.cell(python, line, keras_2)
            x = LEFT + place * WIDTH
            if name not in found:
                dot = '<circle cx="{}" cy="{}" r="1.2" fill="#c3c9cf"/>'
                parts.append(dot.format(x + (WIDTH - GAP) / 2, y + (HEIGHT - GAP) / 2))
                continue
            kept = records.get(name)
            title = f"{name}: {LOOKS[found[name]][3]}"
            if kept:
                title += ", {passed} tests passed, {failed} failed, {date}".format(**kept)
            parts.append(_cell(x, y, found[name], title))
    return parts


def _legend(y):
    parts, x = [], LEFT
    for state, (_, _, _, meaning) in LOOKS.items():
        parts += [_cell(x, y, state, meaning), _text(x + WIDTH + 3, y + 14, meaning, size=11)]
        x += WIDTH + 30 + 6.2 * len(meaning)
    dot = f'<circle cx="{x + 6}" cy="{y + (HEIGHT - GAP) / 2}" r="1.2" fill="#7b8794"/>'
    return parts + [dot, _text(x + 16, y + 14, "no wheel of TensorFlow", size=11)]


def draw(states, records):
    """The SVG text, from {system: {cell: state}} and {system: {cell: record}}. On a card, for any background."""
    panel = len(PYTHONS) * HEIGHT + PANEL_GAP
    width = LEFT + len(columns()) * WIDTH + 24
    height = TOP + len(states) * panel
    said = "; ".join(
        f"{matrix.SYSTEMS[system]}: {list(found.values()).count('passed')} of {len(found)} passed"
        for system, found in states.items()
    )
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'role="img" aria-labelledby="title desc" font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif">'
        ),
        '<title id="title">accum: what ran on which TensorFlow and Python</title>',
        f'<desc id="desc">{escape(ALT)}. {escape(said)}.</desc>',
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff" stroke="#d5dae0"/>',
        f"<defs>{''.join((_symbol(state) for state in LOOKS))}</defs>",
        _text(LEFT, 34, "accum: what ran on which TensorFlow and Python", size=17, weight="bold"),
    ]
    parts += _legend(50)
    for place, (system, found) in enumerate(states.items()):
        parts += _panel(TOP + 52 + place * panel, system, found, records.get(system, {}))
    return "\n".join(parts + ["</svg>"]) + "\n"
