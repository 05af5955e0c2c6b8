"""What the pages show of the results of `networks.py`: `python benchmarks/networks.py pages [--write]`.

Peak memory is that of the process beyond that of the built model, and seconds are those of the processor, both medians.
"""

import os
import re

from networks import ALL, FULL, KEPT, MICRO, SIZES, SPLIT, median, rows_of, share, shown, times

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RESULT = os.path.join(ROOT, "project", "records", "benchmarks", "py311-tf2.15-networks.json")
NAMES = {"ResNet50": "ResNet-50"}
WALL, PROCESSOR = 0, 1


# ----------------------------------------------------------------------------------------------------------------------
# Rows: lists of cells, where None leaves what the page says


def overview_rows(results):
    """A row for each way to compute a step, a column for each of two networks, between two columns of words."""
    memory = {name: peaks(results, "large", name) for name in ("U-Net", "ResNet50")}
    later = {name: times(results, "large", name, PROCESSOR) for name in memory}
    cell = lambda name, run: f"{shown(memory[name][run])} MiB, {shown(later[name][run][1], '{:.1f}')} s"
    return [[None] + [cell(name, run) for name in memory] + [None] for run in (FULL, ALL, SPLIT)]


def memory_rows(results):
    rows = []
    for size, name in measured(results, "memory"):
        found = peaks(results, size, name)
        rows.append([label(size, name)] + [shown(found[run]) for run in (FULL, SPLIT, ALL, KEPT)])
    return rows


def both_memories_rows(results):
    """MiB of the process / MiB of the tensors."""
    rows = []
    for size, name in measured(results, "memory"):
        found = [peaks(results, size, name, key) for key in ("host_mib", "device_mib")]
        cells = [" / ".join(shown(one[run]) for one in found) for run in (FULL, MICRO, SPLIT, ALL, KEPT)]
        rows.append([label(size, name)] + cells + [" / ".join(shown(share(one), "{:.2f}") for one in found)])
    return rows


def all_times_rows(results):
    """Those of networks whose runs took no turns too."""
    rows = []
    for size, name in measured(results, "memory"):
        first, later = first_and_later(results, size, name)
        listed = lambda found, form: ", ".join(shown(found[run], form) for run in (FULL, SPLIT, ALL, KEPT)) + " s"
        cells = [listed(first, "{:.1f}"), ratio(first, ALL, FULL, "{:.1f}")]
        cells.append(listed(later, "{:.1f}" if size == "large" else "{:.2f}") if later[ALL] else "–")
        rows.append([label(size, name)] + cells + [ratio(later, run, SPLIT) for run in (ALL, KEPT)])
    return rows


def first_and_later(results, size, name):
    """({run: seconds of the first step}, {run: seconds of a later one})."""
    found = times(results, size, name, PROCESSOR)
    return tuple({run: both[place] for run, both in found.items()} for place in (0, 1))


def ratio(seconds, run, other, form="{:.2f}"):
    return shown(seconds[run] / seconds[other] if seconds[run] and seconds[other] else None, form)


def peaks(results, size, name, key="host_mib"):
    """{run: MiB}, None for what was not measured."""
    rows = rows_of(results, name, "memory", size)
    return {run: median(row[key] for row in rows if row["run"] == run) for run in (FULL, MICRO, SPLIT, ALL, KEPT)}


def measured(results, what):
    """[(size, network)], the large ones first."""
    return [(size, name) for size in ("large", "small") for name in SIZES[size] if rows_of(results, name, what, size)]


def label(size, name):
    batch, _, side = SIZES[size][name]
    return f"{NAMES.get(name, name)}, {batch} × {side} × {side}"


# ----------------------------------------------------------------------------------------------------------------------
# Pages

TABLES = [
    ("README.md", "| 64 images |", overview_rows),
    ("docs/index.md", "| 64 images |", overview_rows),
    ("docs/whole-batch.md", "| | full batch |", memory_rows),
    ("benchmarks/README.md", "| | full batch | one micro-batch |", both_memories_rows),
    ("benchmarks/README.md", "| | first step: full batch, plain splitting", all_times_rows),
]
"""(page, how the first line of its table begins, the rows)."""


def with_rows(text, head, rows):
    """The text of a page, with these rows in one of its tables."""
    lines = text.split("\n")
    (first,) = (place + 2 for place, line in enumerate(lines) if line.startswith(head))
    last = next(place for place in range(first, len(lines)) if not lines[place].startswith("|"))
    there = [line.strip("| ").split(" | ") for line in lines[first:last]]
    lines[first:last] = [
        f"| {' | '.join(there[row][place] if cell is None else cell for place, cell in enumerate(cells))} |"
        for row, cells in enumerate(rows)
    ]
    return "\n".join(lines)


def sentences(known):
    """[(page, pattern of a sentence, the numbers that its groups should be)]."""
    machine, tensorflow = known["machine"], known["versions"]["tensorflow"]
    wall = times(known["results"], "large", "ResNet50", WALL)
    small = times(known["results"], "small", "ResNet50", PROCESSOR)
    steps = [shown(wall[run][1], "{:.1f}") for run in (SPLIT, ALL)]
    first = [shown(small[run][0]) for run in (ALL, FULL)]
    return [
        ("docs/whole-batch.md", r"\(TensorFlow ([\d.]+), ([\d-]+)\)", [tensorflow, machine["date"]]),
        ("docs/whole-batch.md", r"ResNet-50 took ([\d.]+) s with plain splitting and ([\d.]+) s", steps),
        ("docs/whole-batch.md", r"longer: (\d+) s of processor time for ResNet-50 [^,]*, and (\d+) s in", first),
        ("benchmarks/README.md", MEASURED, [machine["date"], tensorflow, machine["python"], machine["os"]]),
    ]


MEASURED = r"([\d-]{10}), TensorFlow ([\d.]+), Python ([\d.]+), ([^,]+), micro-batches of 4, two cores"


def with_numbers(text, pattern, numbers):
    """The text of a page, with these numbers in a sentence, wherever its lines break."""
    (found,) = re.finditer(pattern.replace(" ", r"\s"), text)
    for group, number in reversed(list(enumerate(numbers, 1))):
        text = text[: found.start(group)] + number + text[found.end(group) :]
    return text


def pages(known):
    """{page: its text}, with the numbers of these results."""
    texts = {page: read(page) for page, _, _ in TABLES}
    for page, head, rows in TABLES:
        texts[page] = with_rows(texts[page], head, rows(known["results"]))
    for page, pattern, numbers in sentences(known):
        texts[page] = with_numbers(texts[page], pattern, numbers)
    return texts


def read(page):
    with open(os.path.join(ROOT, *page.split("/")), encoding="utf-8") as file:
        return file.read()


def write(known):
    for page, text in pages(known).items():
        with open(os.path.join(ROOT, *page.split("/")), "w", encoding="utf-8", newline="\n") as file:
            file.write(text)


def changes(known):
    """Lines that say, for each page, which lines it should have."""
    lines = []
    for page, text in pages(known).items():
        there = read(page).splitlines()
        lines += [f"{page}: {line}" for line in text.splitlines() if line not in there]
    return lines
