"""Check the laws on thousands of random cases, and write the page about it.

    python scripts/dev/random_cases.py run --cases 1000 --seed 1 --of optimizer graph --json FILE
    python scripts/dev/random_cases.py page FILE [FILE ...]

`run` needs an environment with TensorFlow and Hypothesis. It shrinks a failure to a script that reproduces it, and
prints that. `page` adds the counts of the files to records/random-cases.json, and writes docs/property-tests.md from
it.
"""

import argparse
import datetime
import json
import os
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
KINDS = ("optimizer", "graph", "model")
DATA, PAGE = os.path.join(ROOT, "records", "random-cases.json"), os.path.join(ROOT, "docs", "property-tests.md")
BEGIN, END = "<!-- counts -->\n", "<!-- end of counts -->\n"
WORDS = {
    "optimizer": "gradients fed to a Keras optimizer",
    "graph": "gradients fed in a static graph",
    "model": "models trained",
}


def run(arguments):
    """Check the kinds asked for, and return the number of those that failed."""
    # In place of this script's folder, whose modules are not for the tests.
    sys.path[:1] = [os.path.join(ROOT, folder) for folder in (os.path.join("tests", "support"), "tests", "")]
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf
    from property_tests import runner
    from replicas import look_often_for_the_end_of_replicas, make_cpus

    tf.get_logger().setLevel("ERROR")
    make_cpus()
    look_often_for_the_end_of_replicas()
    failures = 0
    for kind in arguments.of:
        start = time.time()
        counts, failure = runner.run(kind, arguments.cases, arguments.seed)
        shown = json.dumps(counts, sort_keys=True)
        print(f"TensorFlow {tf.__version__}, {kind}: {shown} in {time.time() - start:.0f} s", flush=True)
        failures += failure is not None
        if failure is not None:
            print(failure, flush=True)
        elif arguments.json:
            record = {"tensorflow": tf.__version__, "kind": kind, "seed": arguments.seed, "counts": counts}
            _add(arguments.json, [dict(record, date=datetime.date.today().isoformat())])
    return failures


def _add(path, records):
    """Add records to a JSON file, where a run of the same cases replaces an older one."""
    kept = {}
    for record in _read(path) + records:
        kept[record["tensorflow"], record["kind"], record["seed"]] = record
    ordered = sorted(kept.values(), key=lambda record: (_version(record), record["kind"], record["seed"]))
    with open(path, "w") as file:
        file.write("[\n" + ",\n".join(json.dumps(record, sort_keys=True) for record in ordered) + "\n]\n")


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
    """Return two tables in Markdown: cases by TensorFlow, and by law."""
    names = sorted({record["tensorflow"] for record in records}, key=lambda name: [int(n) for n in name.split(".")])
    dates = sorted(record["date"] for record in records)

    def count(name, what="cases", kinds=KINDS):
        chosen = [record for record in records if name in (None, record["tensorflow"]) and record["kind"] in kinds]
        return f"{sum(record['counts'].get(what, 0) for record in chosen):,}"

    rows = [["TensorFlow"] + [WORDS[kind] for kind in KINDS] + ["together"], ["---"] + ["---:"] * (len(KINDS) + 1)]
    for name in names + [None]:
        cells = [count(name, kinds=(kind,)) for kind in KINDS] + [count(name)]
        rows.append([name or "all"] + cells)
    laws = sorted({law for record in records for law in record["counts"]} - {"cases"}, key=lambda law: int(law[1:]))
    by_law = [["law"] + names + ["together"], ["---"] + ["---:"] * (len(names) + 1)]
    by_law += [[law] + [count(name, law) for name in names] + [count(None, law)] for law in laws]
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return (
        f"\nRun {when}. A run counts if all of its cases pass; what the others found is listed below.\n\n"
        f"{_markdown(rows)}\nA case counts for each law that it is about:\n\n{_markdown(by_law)}\n"
    )


def _markdown(rows):
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command")
    commands.required = True
    command = commands.add_parser("run", help="check cases on the installed TensorFlow")
    command.add_argument("--cases", type=int, default=100, help="how many of each kind")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--of", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help=", ".join(KINDS))
    command.add_argument("--json", help="a file to which the counts of kinds that hold are added")
    command.set_defaults(function=run)
    command = commands.add_parser("page", help="write docs/property-tests.md")
    command.add_argument("files", nargs="*")
    command.set_defaults(function=page)
    arguments = parser.parse_args()
    return arguments.function(arguments)


if __name__ == "__main__":
    sys.exit(main())
