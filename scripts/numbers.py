"""Compare the numbers of the cells that tox ran: `python scripts/numbers.py` writes docs/numbers.md.

Each golden trajectory leaves in its cell's JUnit report how far it was from NumPy's, and the weights at its end; the
tests of conventions leave what TensorFlow's own optimizers do there by default. Nothing is typed by hand.
"""

import argparse
import json
import os
import xml.etree.ElementTree as ElementTree

from matrix import data as matrix

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

HEAD = """\
# The same numbers everywhere

Written by `python scripts/numbers.py` from the reports of {cells} cells on {system}; nothing here is typed by hand.

## Golden trajectories

Ten steps of six rules on ragged micro-batches (5 + 4 + 3), by every face, against NumPy in float64 (`tests/golden`).
The law is 2e-6 on weights of order one. A difference from a neighbour is that of the weights at the end, over what
both ran; 0 is the same bits. The neighbours are the line before on the same Python (or the nearest that it has), and
the same line on the Python before.

"""

CONVENTIONS = """
## Where TensorFlow itself changed

What TensorFlow's own optimizers are without `accum`, cell by cell; only changes are listed. "First steps" are those of
a weight with gradient 0.5, rate 0.5 and, where there is one, epsilon 1: they tell where epsilon stands and what
accumulators start from. They matter to whoever carries hyperparameters from one line to another, or from
`tf.compat.v1` to Keras.

"""

STANDING = """
- An Adagrad of `tf.compat.v1` has no epsilon, one of Keras has one: under the root or beside it, by line and family.
- An RMSprop of `tf.compat.v1` starts its mean square from one, that of Keras from zero.
- The epsilon of Adam is 1e-8 in `tf.compat.v1` and 1e-7 in Keras; that of RMSprop is 1e-10 and 1e-7.
- A momentum of `tf.compat.v1` adds up gradients, one of Keras steps: they part when the rate changes.
"""


def read(path):
    """({test: {"off", "weights"}}, {what: defaults or steps}) of a JUnit report."""
    golden, conventions = {}, {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        said = {found.get("name"): json.loads(found.get("value")) for found in case.iter("property")}
        if "golden" in said:
            golden[case.get("name")] = {"off": said["golden"]["off"], "weights": said["weights"]}
        else:
            conventions.update(said)
    return golden, conventions


def cells_of(folder, system):
    """[(cell, line, python, golden, conventions)] of the reports in a folder, in the order of the matrix."""
    found = []
    for name, line, python, _ in matrix.cells(system):
        path = os.path.join(folder, name + ".xml")
        if os.path.exists(path):
            found.append((name, line, python) + read(path))
    return found


def difference(one, other):
    """The largest difference of the weights of two cells over the tests that both ran; None if there is none."""
    shared = sorted(set(one) & set(other))
    differences = [abs(a - b) for test in shared for a, b in zip(one[test]["weights"], other[test]["weights"])]
    return max(differences) if differences else None


def neighbours(cell, cells):
    """(the cell of the line before, the cell of the Python before), each None if none ran."""
    name, line, python = cell[:3]
    alike = [other for other in cells if other[0].endswith("-keras2") == name.endswith("-keras2")]
    minor = lambda other: int(other[2].split(".")[1])
    lines = [known for known in matrix.LINES[: matrix.LINES.index(line)] if any(known == other[1] for other in alike)]
    before = [other for other in alike if lines and other[1] == lines[-1]]
    before = min(before, key=lambda other: abs(minor(other) - minor(cell)), default=None)
    younger = [other for other in alike if other[1] == line and minor(other) < minor(cell)]
    return before, max(younger, key=minor, default=None)


def _number(value):
    return "–" if value is None else "0" if value == 0 else "{:.1e}".format(value)


def table(cells):
    """Lines of the table of deviations."""
    lines = ["| cell | trajectories | from NumPy | at | from the line before | from the Python before |"]
    lines.append("|---" * 6 + "|")
    for cell in cells:
        golden = cell[3]
        if not golden:
            lines.append("| {} | 0 | – | – | – | – |".format(cell[0]))
            continue
        worst = max(golden, key=lambda test: golden[test]["off"])
        apart = [other and difference(golden, other[3]) for other in neighbours(cell, cells)]
        lines.append(
            "| {} | {} | {} | {} | {} | {} |".format(
                cell[0],
                len(golden),
                _number(golden[worst]["off"]),
                worst.replace("_follows_the_golden_trajectory", "").replace("test_", ""),
                *[
                    "{} ({})".format(_number(value), other[0]) if other and value is not None else "–"
                    for value, other in zip(apart, neighbours(cell, cells))
                ],
            )
        )
    return lines


def _leaves(value, path=()):
    if isinstance(value, dict):
        return [leaf for key, inner in sorted(value.items()) for leaf in _leaves(inner, path + (key,))]
    return [(path, value)]


def changes(cells):
    """Lines that list what changed in conventions from each cell to the next that says anything of it."""
    last, lines = {}, []
    for cell in cells:
        for what, told in sorted(cell[4].items()):
            kind = what + (" (tf-keras)" if cell[0].endswith("-keras2") else "")
            for path, value in _leaves(told):
                key = (kind,) + path
                if key in last and last[key] != value:
                    where = "{}: {}".format(kind, " ".join(path))
                    lines.append("- {}: {} → {}, from {} on".format(where, last[key], value, cell[0]))
                last[key] = value
    return lines or ["- Nothing, over these cells."]


def page(cells, system):
    """The text of docs/numbers.md."""
    head = HEAD.format(cells=len(cells), system=matrix.SYSTEMS[system])
    return head + "\n".join(table(cells)) + "\n" + CONVENTIONS + "\n".join(changes(cells)) + "\n" + STANDING


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--junit", default=os.path.join(ROOT, ".tox", "junit"), help="the folder of reports")
    parser.add_argument("--system", default="linux", choices=sorted(matrix.SYSTEMS))
    parser.add_argument("--output", default=os.path.join(ROOT, "docs", "numbers.md"))
    arguments = parser.parse_args(argv)
    cells = cells_of(arguments.junit, arguments.system)
    if not cells:
        parser.error("no report of a cell in {}".format(arguments.junit))
    with open(arguments.output, "w", encoding="utf-8", newline="\n") as file:
        file.write(page(cells, arguments.system))
    print("{} cells, {} trajectories".format(len(cells), sum(len(cell[3]) for cell in cells)))


if __name__ == "__main__":
    main()
