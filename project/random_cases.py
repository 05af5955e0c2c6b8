"""Check the laws on thousands of random cases, and write the page about it.

    python project/random_cases.py run --cases 1000 --seed 1 --of optimizer graph --json FILE
    python project/random_cases.py page FILE [FILE ...]

`run` needs an environment with TensorFlow and Hypothesis. It shrinks a failure to a script that reproduces it, and
prints that. With `--chunks`, it goes on with further seeds, so that what was run counts even if it is stopped. `page`
adds the counts of the files to records/random-cases.json, and writes pages/property-tests.md from it.
"""

import argparse
import collections
import datetime
import gc
import importlib.util
import json
import os
import re
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
KINDS = ("optimizer", "graph", "model", "static", "step")
TRAINED = ("model", "static")
HOW = ("on replicas", "in a tf.function", "eagerly", "in a Session")
FLOOR = 50
"""How many cases of each pair of features there should be."""
DATA, PAGE = os.path.join(HERE, "records", "random-cases.json"), os.path.join(HERE, "pages", "property-tests.md")
BEGIN, END = "<!-- counts -->\n", "<!-- end of counts -->\n"
WORDS = {
    "optimizer": "gradients fed to a Keras optimizer",
    "graph": "gradients fed in a static graph",
    "model": "models trained in Keras",
    "static": "networks trained in a static graph",
    "step": "train steps of one's own",
}


def run(arguments):
    """Check the kinds asked for, and return the number of those that failed."""
    # In place of this script's folder, whose modules are not for the tests.
    sys.path[:1] = [os.path.join(ROOT, "tests", "support"), ROOT]
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf
    from property_tests import runner
    from replicas import look_often_for_the_end_of_replicas, make_cpus

    tf.get_logger().setLevel("ERROR")
    make_cpus()
    look_often_for_the_end_of_replicas()
    gc.set_threshold(50000, 20, 20)  # graphs are many objects
    failures, commit = 0, _commit()
    for seed in range(arguments.seed, arguments.seed + arguments.chunks):
        for kind in (kind for kind in arguments.of or runner.KINDS if kind in runner.KINDS):
            start = time.time()
            counts, failure = runner.run(kind, arguments.cases, seed, arguments.shrink)
            shown = json.dumps({name: count for name, count in counts.items() if " + " not in name}, sort_keys=True)
            print(f"TensorFlow {tf.__version__}, {kind}, {seed}: {shown} in {time.time() - start:.0f} s", flush=True)
            failures += failure is not None
            if failure is not None:
                print(failure, flush=True)
            elif arguments.json:
                record = {"tensorflow": tf.__version__, "kind": kind, "commit": commit, "seeds": [seed]}
                _add(arguments.json, [dict(record, counts=counts, date=datetime.date.today().isoformat())])
    return failures


def _commit():
    """Return the commit of the sources, with a "+" if they differ from it."""

    def said(*command):
        return subprocess.run(("git",) + command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout.decode().strip()

    return said("rev-parse", "--short=12", "HEAD") + ("+" if said("status", "--porcelain") else "")


def _add(path, records):
    """Add records to a JSON file. One record has all seeds that were run on a TensorFlow at a commit.

    What was run already is not counted twice; a run of the same seed at a new commit replaces that at an older one.
    """
    kept = _read(path)
    for record in records:
        kept = [one for one in kept if not _is_older(one, record)]
        same = [one for one in kept if _key(one) == _key(record)]
        if not same:
            kept.append(record)
        elif not set(record["seeds"]) & set(same[0]["seeds"]):
            counts = collections.Counter(same[0]["counts"]) + collections.Counter(record["counts"])
            seeds = sorted(same[0]["seeds"] + record["seeds"])
            same[0].update(counts=counts, seeds=seeds, date=max(same[0]["date"], record["date"]))
    ordered = sorted(kept, key=lambda record: (_version(record), record["kind"], record["seeds"]))
    with open(path, "w") as file:
        file.write("[\n" + ",\n".join(json.dumps(record, sort_keys=True) for record in ordered) + "\n]\n")


def _key(record):
    return record["tensorflow"], record["kind"], record["commit"]


def _is_older(one, record):
    """Whether a record is of the same cases at another commit."""
    is_alike = _key(one)[:2] == _key(record)[:2] and set(one["seeds"]) <= set(record["seeds"])
    return is_alike and one["commit"] != record["commit"]


def _read(path):
    if not os.path.exists(path):
        return []
    with open(path) as file:
        return json.load(file)


def _version(record):
    return tuple(map(int, record["tensorflow"].split(".")[:2]))


def page(arguments):
    """Write the counts into the page."""
    for path in arguments.files:
        _add(DATA, _read(path))
    with open(PAGE, encoding="utf-8") as file:
        text = file.read()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    with open(PAGE, "w", encoding="utf-8", newline="\n") as file:
        file.write(text[:begin] + tables(_read(DATA)) + text[end:])
    return 0


def tables(records):
    """Return tables in Markdown: cases by TensorFlow, models trained, cases by law, and by pairs of features."""
    names = sorted({record["tensorflow"] for record in records}, key=lambda name: [int(n) for n in name.split(".")])
    dates = sorted(record["date"] for record in records)

    def number(name, what="cases", kinds=KINDS):
        chosen = [record for record in records if name in (None, record["tensorflow"]) and record["kind"] in kinds]
        return sum(record["counts"].get(what, 0) for record in chosen)

    def count(*arguments, **options):
        return f"{number(*arguments, **options):,}"

    rows = [["TensorFlow"] + [WORDS[kind] for kind in KINDS] + ["together"], ["---"] + ["---:"] * (len(KINDS) + 1)]
    rows += [
        [name or "all"] + [count(name, kinds=(kind,)) for kind in KINDS] + [count(name)] for name in names + [None]
    ]
    trained = [["TensorFlow", "trained"] + list(HOW) + ["commits"], ["---"] + ["---:"] * (len(HOW) + 1) + ["---"]]
    for name in names + [None]:
        cells = [count(name, kinds=TRAINED)] + [count(name, how, TRAINED) for how in HOW]
        trained.append([name or "all"] + cells + [_commits(records, name)])
    every = {name for record in records for name in record["counts"]}
    laws = sorted((name for name in every if re.fullmatch(r"L\d+", name)), key=lambda law: int(law[1:]))
    by_law = [["law"] + names + ["together"], ["---"] + ["---:"] * (len(names) + 1)]
    by_law += [[law] + [count(name, law) for name in names] + [count(None, law)] for law in laws]
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return (
        f"\nRun {when}. A run counts if all of its cases pass; what the others found is listed below.\n\n"
        f"{_markdown(rows)}\nOf the models and networks that were trained:\n\n{_markdown(trained)}\n"
        f"A case counts for each law that it is about:\n\n{_markdown(by_law)}\n"
        f"{_pairs(lambda pair: number(None, pair))}\n"
    )


def _commits(records, name):
    """Return the commits at which models were trained on a TensorFlow; none for all."""
    chosen = [record for record in records if record["kind"] in TRAINED and record["tensorflow"] == name]
    return ", ".join(sorted({f"`{record['commit']}`" for record in chosen}))


def _pairs(number):
    """Return the table of pairs of features, and which pairs are few.

    Args:
      number: a function of the name of a pair, that returns how many cases have it.
    """
    features = _features()
    counts = {}
    for first, one in enumerate(features):
        for second in range(first + 1, len(features)):
            counts[first, second] = number(f"{one} + {features[second]}")
    rows = [[""] + [str(column + 1) for column in range(len(features) - 1)]]
    rows.append(["---"] + ["---:"] * (len(features) - 1))
    for row in range(1, len(features)):
        cells = [f"{counts[column, row]:,}" if column < row else "" for column in range(len(features) - 1)]
        rows.append([f"{row + 1} {features[row]}"] + cells)
    few = {pair: count for pair, count in counts.items() if count < FLOOR}
    shown = [f"{features[one]} + {features[other]} ({count})" for (one, other), count in sorted(few.items())]
    least = min(count for count in counts.values() if count) if any(counts.values()) else 0
    return (
        f"How many trained models have two features together, on all TensorFlows, where 1 is {features[0]}:\n\n"
        f"{_markdown(rows)}\nOf {len(counts)} pairs, {len(counts) - len(few)} have at least {FLOOR} cases. The least "
        f"number, but for those with none, is {least}. Below {FLOOR}: {', '.join(shown) or 'none'}.\n"
    )


def _features():
    """Return `FEATURES` of tests/support/property_tests/features.py, without TensorFlow."""
    path = os.path.join(ROOT, "tests", "support", "property_tests", "features.py")
    spec = importlib.util.spec_from_file_location("features", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FEATURES


def _markdown(rows):
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command")
    commands.required = True
    command = commands.add_parser("run", help="check cases on the installed TensorFlow")
    command.add_argument("--cases", type=int, default=100, help="how many of each kind")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--chunks", type=int, default=1, help="how many runs, with one seed after the other")
    command.add_argument("--of", nargs="+", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    command.add_argument("--no-shrink", dest="shrink", action="store_false", help="print a failure as it was found")
    command.add_argument("--json", help="a file to which the counts of kinds that hold are added")
    command.set_defaults(function=run)
    command = commands.add_parser("page", help="write pages/property-tests.md")
    command.add_argument("files", nargs="*")
    command.set_defaults(function=page)
    arguments = parser.parse_args()
    return arguments.function(arguments)


if __name__ == "__main__":
    sys.exit(main())
