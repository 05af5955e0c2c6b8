"""Run fixed cases of each law with accum and with other ways to accumulate, and write pages/scorecard.md.

    python project/scorecard.py run --peer keras3 accum --json FILE    where their libraries are installed
    python project/scorecard.py page FILES       writes records/scorecard.json and pages/scorecard.md
    python project/scorecard.py page             writes pages/scorecard.md anew

The page says how all of them are run. Only the notes are written by hand, beside the cases, in `peers/notes.py`.
"""

import argparse
import collections
import importlib
import json
import os
import platform
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
if __name__ == "__main__":
    # In place of this script's folder, whose modules are not for the tests.
    sys.path[:1] = [os.path.join(ROOT, "tests", "support"), ROOT]
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from property_tests import peers  # noqa: E402
from property_tests.peers import cases, notes  # noqa: E402

DATA = os.path.join(HERE, "records", "scorecard.json")
PAGE = os.path.join(HERE, "pages", "scorecard.md")
TABLES = [
    ("TensorFlow with Keras 3", ["accum", "keras3", "hand-sum", "hand-loss"]),
    ("TensorFlow with Keras 2", ["accum", "ga-optimizer", "ga-model"]),
    ("TensorFlow 1", ["accum-graph", "runai"]),
    ("JAX", ["optax"]),
]
"""A table for each environment: its heading, and the adapters that run there."""
ROWS = [
    ("L1", None, "One step per cycle, that of the full batch, with each optimizer"),
    ("L2", "", "Between steps, weights and slots stay"),
    ("L2", "use_ema", "Between steps, moving averages of weights stay"),
    ("L3", "counter", "The counter counts steps"),
    ("L3", "schedule", "A learning rate schedule follows steps"),
    ("L4", None, "Sums instead of means"),
    ("L5", None, "Micro-batches of unequal size"),
    ("L6", "flush", "A last, unfinished cycle makes a step"),
    ("L6", "drop", "A last, unfinished cycle is discarded"),
    ("L7", None, "Clipping acts on the accumulated gradient"),
    ("L8", "none", "Some micro-batches have no gradient for a variable"),
    ("L8", "rows", "Sparse gradients, as of embeddings"),
    ("L9", "restore", "NaN and Inf are gone once the weights are restored"),
    ("L9", "skip", "A micro-batch with NaN or Inf is skipped"),
    ("L12", None, "A run saved in mid-cycle continues"),
    ("L13", None, "Moving statistics of batch normalisation"),
    ("L14", None, "K = 1 is the plain optimizer"),
]
"""(law, kind or None for all, how users call it)."""
HEAD = """\
# Scorecard

`python project/scorecard.py` writes this page: the same small cases, run with accum and with other ways to
accumulate gradients. The oracle is always the full batch with the *plain* optimizer of the same library; for a resumed
run it is the uninterrupted run. Most cases have two variables of up to ten weights of order 1, K from 2 to 4
micro-batches and three steps. Each differs from plain accumulation in one respect.

- **24 / 24** means that all cases pass: the largest difference between two weights is below 2e-6, or below what the
  rounding of float32 explains.
- **8 / 12, off by 0.3** means that the other four are inexact; 0.3 is the largest absolute difference of a weight (or
  slot, or moving statistic) after the steps of any of these cases. The number compares cases of
  one row (the learning rate is 0.1); it does not predict how much worse a model trains.
- **raises** means that these cases end in an error.
- **not offered** means that the library has no such feature, or documents that it works otherwise. This is a choice and
  counts as neither passed nor failed.
- **–** means that there is no such optimizer, option or situation in that library, even without accumulation.

A case whose optimizer is inexact in the first row already is left out of the other rows, where it would say nothing
new, except those on what happens between steps, on resuming and on K = 1.

The notes come from each library's documentation and source code, and from what the cases show. If one is wrong or
outdated, please open an issue.
"""
FOOT = """
## Reproduce

```bash
run="project/scorecard.py run --json" # some ten minutes on two cores
tox run -e py37-tf1.15-peers -- $run .tox/score1.json --peer accum-graph runai
tox run -e py310-tf2.10-peers -- $run .tox/score2.json --peer accum ga-optimizer ga-model
tox run -e py311-tf2.21-peers -- $run .tox/score3.json --peer accum keras3 hand-sum hand-loss
uv run --no-project --python 3.12 --with "jax[cpu]==0.12.0.1,optax==0.2.8" python $run .tox/score4.json --peer optax
python project/scorecard.py page .tox/score*.json
```

One row of one library, in an environment that has it, case by case:

```bash
python project/scorecard.py run --peer keras3 --law L8 --kind none --verbose
```

The cases are in `tests/support/property_tests/peers/cases.py`, with fixed seeds; each library has a short adapter
beside it.
"""


def adapter(name):
    module, _, cls = peers.ADAPTERS[name].partition(":")
    return getattr(importlib.import_module("property_tests.peers." + module), cls)


def run(arguments):
    from property_tests.peers.judge import judge

    summaries = []
    for name in arguments.peer:
        start, peer, results = time.time(), adapter(name), []
        chosen = [case for case in cases.cases() if not arguments.law or case["law"] in arguments.law]
        for case in chosen:
            if arguments.kind is None or case["kind"] == arguments.kind:
                results.append(
                    dict(judge(peer, case), **{key: case[key] for key in ("law", "kind", "index", "optimizer")})
                )
                if arguments.verbose:
                    print(json.dumps(results[-1]), flush=True)
        summaries.append(summary(name, peer, results))
        outcomes = collections.Counter(result["outcome"] for result in results)
        print("{}: {} in {:.0f} s".format(name, dict(outcomes), time.time() - start), flush=True)
    if arguments.json:
        os.makedirs(os.path.dirname(os.path.abspath(arguments.json)), exist_ok=True)
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(summaries, file, indent=1, sort_keys=True)
            file.write("\n")


def summary(name, peer, results):
    return {
        "peer": name,
        "title": peer.title,
        "python": platform.python_version(),
        "packages": {package: _version(package) for package in peer.packages},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "laws": {law: _counts([result for result in results if result["law"] == law]) for law in cases.LAWS},
    }


def _version(package):
    if package == "accum":  # from this checkout
        return importlib.import_module("accum").__version__
    metadata = importlib.import_module("importlib.metadata" if sys.version_info >= (3, 8) else "importlib_metadata")
    for name in (package, package + "-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return None


def _counts(results):
    """Return {kind: counts, largest deviation, and the case that has it or an error}."""
    counts = {}
    for kind in sorted({result["kind"] for result in results}):
        mine = [result for result in results if result["kind"] == kind]
        entry = dict(collections.Counter(result["outcome"] for result in mine))
        measured = [result for result in mine if result["deviation"] is not None and result["outcome"] != "as L1"]
        if measured:
            worst = max(measured, key=lambda result: _as_number(result["deviation"]))
            entry.update({"largest": _rounded(worst["deviation"]), "worst": worst["index"]})
        errors = [result["error"] for result in mine if result["error"]]
        if errors:
            entry["error"] = errors[0]
        counts[kind] = entry
    return counts


def _as_number(deviation):
    return float("inf") if deviation == "not finite" else deviation


def _rounded(deviation):
    return deviation if deviation == "not finite" else float("{:.1e}".format(deviation))


def write_page(arguments):
    if arguments.files:
        results = [result for path in arguments.files for result in _read(path)]
        with open(DATA, "w", encoding="utf-8", newline="\n") as file:
            json.dump(results, file, indent=1, sort_keys=True)
            file.write("\n")
    with open(PAGE, "w", encoding="utf-8", newline="\n") as file:
        file.write(page(_read(DATA)))


def _read(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def page(results):
    """Return the text of pages/scorecard.md."""
    parts = [HEAD]
    for title, names in TABLES:
        mine = _of_table(results, names)
        if mine:
            parts.append("\n".join(_table(title, mine)))
    return "\n".join(parts) + FOOT


def _of_table(results, names):
    """Return the results of these adapters that ran in one environment, by what only the last of them needs."""
    last = [result for result in results if result["peer"] == names[-1]]
    where = [_environment(result) for result in last]
    return [result for name in names for result in results if result["peer"] == name and _environment(result) in where]


def _environment(result):
    return result["python"], result["packages"].get("tensorflow")


def _table(title, results):
    """Return the lines of a table and its notes."""
    rows, seen = [], []
    for law, kind, label in ROWS:
        cells = [_cell(result, law, kind, seen) for result in results]
        rows.append("| " + " | ".join([label] + cells) + " |")
    versions = {}
    for result in results:
        versions.update(result["packages"])
    named = ", ".join("{} {}".format(*pair) for pair in sorted(versions.items()) if pair[1])
    dates = sorted({result["date"] for result in results})
    lines = ["## " + title, "", "Run on {} with Python {}: {}.".format(dates[-1], results[0]["python"], named), ""]
    lines += ["| | " + " | ".join(result["title"] for result in results) + " |", "|---" * (len(results) + 1) + "|"]
    lines += rows + [""]
    for result in results:
        general = notes.NOTES.get(result["peer"], {}).get("")
        if general:
            lines.append("- {}: {}".format(result["title"], general))
    lines += ["- <sup>{}</sup> {}".format(number, text) for number, text in enumerate(seen, 1)]
    return lines + [""]


def _cell(result, law, kind, seen):
    """Return a cell's text, and add its note to `seen`."""
    entries = {name: entry for name, entry in result["laws"][law].items() if kind is None or name == kind}
    counts = collections.Counter()
    for entry in entries.values():
        counts.update({name: entry.get(name, 0) for name in OUTCOMES})
    text, is_clear = _said(counts, [entry["largest"] for entry in entries.values() if "largest" in entry])
    if is_clear:
        return text
    of_peer = notes.NOTES.get(result["peer"], {})
    note = of_peer.get("{} {}".format(law, kind), of_peer.get(law))
    if note is None:
        raise ValueError("notes.py says nothing of {} for {}, {}".format(text, result["peer"], (law, kind)))
    if note not in seen:
        seen.append(note)
    return "{} <sup>{}</sup>".format(text, seen.index(note) + 1)


OUTCOMES = ("passed", "inexact", "raises", "not offered", "as L1")


def _said(counts, largest):
    """Return what a cell says, and whether it needs no note."""
    number = counts["passed"] + counts["inexact"] + counts["raises"]
    off = _off(largest)
    if number:
        text = "{} / {}".format(counts["passed"], number)
        text += ", {}".format(off) if counts["inexact"] and off else ""
        text += (", {} raise" if counts["inexact"] else ", raises").format(counts["raises"]) if counts["raises"] else ""
        return text, counts["passed"] == number
    if counts["not offered"]:
        return "not offered" + (" ({})".format(off) if off else ""), False
    return ("all as in the first row" if counts["as L1"] else "–"), True


def _off(largest):
    if not largest:
        return ""
    if "not finite" in largest:
        return "NaN"
    return "off by {:.2g}".format(max(largest)) if max(largest) > 1e-5 else ""  # a wrong step counter may do no harm


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    commands.required = True
    running = commands.add_parser("run")
    running.add_argument("--peer", nargs="+", required=True, choices=sorted(peers.ADAPTERS))
    running.add_argument("--law", nargs="*", choices=list(cases.LAWS))
    running.add_argument("--kind")
    running.add_argument("--json")
    running.add_argument("--verbose", action="store_true")
    commands.add_parser("page").add_argument("files", nargs="*")
    arguments = parser.parse_args()
    {"run": run, "page": write_page}[arguments.command](arguments)


if __name__ == "__main__":
    main()
