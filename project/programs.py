"""Run public TensorFlow 1 programs on full batches and accumulating, and write what they show to pages/programs.md.

    python project/programs.py run FOLDER [NAME ...] --python PYTHON
    python project/programs.py split FOLDER [NAME ...] --python PYTHON
    python project/programs.py page

FOLDER holds git directories of the repositories, as FOLDER/owner+name or FOLDER/owner/name, with or without /repo or
/.git at the end; nothing of them is kept here. PYTHON has TensorFlow 1.15, or 2.x up to 2.15 and tf-slim. A program
runs as its newest commit is, unless another one is named, and with the changes in project/public_programs, which
are those that the guide to static graphs gives; on 2.x, also with those of `MODERN`. records/programs.json keeps the
results: those of 1.15, and those of 2.x by the version, each with the commit of accum's sources that it was measured
with.
"""

import argparse
import ast
import difflib
import json
import os
import re
import subprocess
import sys
import tempfile

from public_programs import PROGRAMS
from public_programs._program import START, version

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
RECORDS = os.path.join(HERE, "records", "programs.json")
PAGE = os.path.join(HERE, "pages", "programs.md")
TIME = 1200
BAR = 5e-6  # how far what is split may be off the full batch
ROUNDING = 1e-5  # an evaluation that is off by less is that of the full batch
SOURCES = ("accum", "compat")

CANNOT = {
    "bojone/bert4keras": "not by this script, because it trains by Keras's `fit`. By hand, on TensorFlow 2.10.1, "
    "`accum.testing.assert_accumulation_equals_full_batch` finds its BERT with its `AdamW` to agree to 2e-8, over 3 "
    "steps of 4 micro-batches",
    "imcaspar/gpt2-ml": "can't run: it asks `tensorflow.compat.v1` for `contrib`, which TensorFlow 1.15 has elsewhere",
    "kpot/keras-transformer": "can't run: its layers are written for Keras 2.2, and the Keras of TensorFlow 2.10 "
    "passes `training` to their `call`, which does not take it",
    "openai/finetune-transformer-lm, openai/glow": "can't run: their Adam is a function, not an `Optimizer` that could "
    "be wrapped",
}


# An attribute of the same name hides the package.
LAYERS = "__import__('tf_slim.layers', fromlist=['layers'])"
# What TensorFlow 2 asks of any program of TensorFlow 1: [(pattern, replacement)] for each of its files.
MODERN = [
    (r"(?m)^(\s*)import tensorflow as tf\b", r"\1import tensorflow.compat.v1 as tf"),
    (r"(?m)^(\s*)from tensorflow\.contrib import slim as (\w+)", r"\1import tf_slim as \2"),
    (r"(?m)^(\s*)from tensorflow\.contrib import slim\b", r"\1import tf_slim as slim"),
    (r"(?m)^(\s*)from tensorflow\.contrib import layers as (\w+)", r"\1\2 = " + LAYERS),
    (r"(?m)^(\s*)import tensorflow\.contrib\.slim\b", r"\1import tf_slim"),
    (r"(?m)^(\s*)from tensorflow\.contrib import tpu as", r"\1from tensorflow.compat.v1.estimator import tpu as"),
    (r"\btf\.contrib\.slim\b", "__import__('tf_slim')"),
    (r"\btf\.contrib\.layers\b", LAYERS),
    (r"\btf\.contrib\.tpu\b", "tf.estimator.tpu"),
]


class Failed(Exception):
    """A program can't run; the message says why."""


def git_directory(folder, repository):
    owner, name = repository.split("/")
    for base in (os.path.join(folder, owner + "+" + name), os.path.join(folder, owner, name)):
        for end in ("repo/.git", "repo", ".git", ""):
            path = os.path.join(base, end)
            if os.path.exists(os.path.join(path, "HEAD")):
                return path
    raise Failed("its git directory is not in the folder")


def make_tree(git, folder, program):
    """Write the Python files of the program's commit to a folder. Returns the commit."""
    inside = os.path.join(folder, program.inside)
    os.makedirs(inside)
    # Other files can be large, and a snapshot may lack them.
    command = ["git", "--git-dir", git, "archive", program.commit + ":" + program.subtree, "*.py"]
    archive = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "x", "-C", inside], input=archive.stdout, check=True)
    commit = subprocess.run(["git", "--git-dir", git, "rev-parse", program.commit], stdout=subprocess.PIPE, check=True)
    return commit.stdout.decode().strip()


def change(tree, edits):
    """Apply the edits to a tree. Returns the number of lines that were added and removed."""
    added = removed = 0
    for path, substitutions in edits.items():
        with open(os.path.join(tree, path), encoding="utf-8") as file:
            before = after = file.read()
        for pattern, replacement, count in substitutions:
            after, made = re.subn(pattern, lambda match, text=replacement: text, after, count=count, flags=re.MULTILINE)
            if made != count:
                raise Failed(f"{path} has no {pattern!r} any more")
        with open(os.path.join(tree, path), "w", encoding="utf-8") as file:
            file.write(after)
        lines = list(difflib.ndiff(before.splitlines(), after.splitlines()))
        added += sum(line.startswith("+ ") for line in lines)
        removed += sum(line.startswith("- ") for line in lines)
    return added, removed


def modernize(tree):
    """Let the files of a tree import what TensorFlow 2 has in the place of what they import."""
    for folder, _, names in os.walk(tree):
        for path in [os.path.join(folder, name) for name in names if name.endswith(".py")]:
            with open(path, encoding="utf-8", errors="surrogateescape") as file:
                before = after = file.read()
            for pattern, replacement in MODERN:
                after = re.sub(pattern, replacement, after)
            if after != before:
                with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
                    file.write(after)


def reason_in(output):
    """Return the line that names the error, which may have a long text."""
    lines = output.strip().splitlines() or ["it ended without a word"]
    return next((line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception): ", line)), lines[-1])[:600]


def sources():
    """Return the last commit of accum's sources and its date, as in "0123456789, 2026-01-31", and if they changed."""
    git = ["git", "-C", ROOT]
    last = [*git, "log", "-1", "--format=%h, %cd", "--abbrev=10", "--date=short", "--", *SOURCES]
    changed = [*git, "status", "--porcelain", "--", *SOURCES]
    commit, changes = (
        subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout for command in (last, changed)
    )
    return commit.decode().strip() + (", changed" if changes else "")


def version_of(python):
    if python == sys.executable:
        return version
    command = [python, "-c", "import tensorflow; print(tensorflow.__version__)"]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.decode().split()[-1]


def run(name, folder, python, is_tf2, what):
    """Run a program. Returns its record."""
    program = PROGRAMS[name]
    record = {"repository": program.repository, "what": program.what, "accum": sources()}
    with tempfile.TemporaryDirectory() as temporary:
        trees = [os.path.join(temporary, kind) for kind in ("full", "micro")]
        git = git_directory(folder, program.repository)
        for tree in trees:
            record["commit"] = make_tree(git, tree, program)
        record["added"], record["removed"] = change(
            trees[1], (program.line if what == "split" else program.edits) or {}
        )
        record["added"] += 0 if what == "split" else program.added
        for tree in trees if is_tf2 else []:
            modernize(tree)
        out = os.path.join(temporary, "out.json")
        paths = [os.path.join(tree, program.folder) for tree in trees]
        command = [python, "-c", START, os.path.join(HERE, "programs_run.py"), name, *paths, out]
        command += ["split"] if what == "split" else []
        environment = dict(os.environ, PYTHONPATH=ROOT, TF_CPP_MIN_LOG_LEVEL="3")
        try:
            done = subprocess.run(
                command, cwd=temporary, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIME
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"it took more than {TIME} s") from None
        if done.returncode:
            sys.stderr.write(done.stdout.decode(errors="replace")[-6000:])
            raise Failed(reason_in(done.stdout.decode(errors="replace").replace(trees[1] + os.sep, "")))
        with open(out) as file:
            record.update(json.load(file))
        record["said"] = [text.replace(trees[1] + os.sep, "") for text in record.get("said", ())]
    if record.get("calls"):  # of this script, in the place of the program's own, which would import accum too
        record["added"] += record.pop("calls") + 1
    return record


def keep(kept, name, record, is_tf2, is_split=False):
    """Put a record among those found: what ran split, or on 2.x, is a part of the program's record."""
    shared = {key: record[key] for key in ("repository", "what")}
    part = {key: value for key, value in record.items() if key not in shared}
    before = kept.get(name, {})
    if is_split:
        kept[name] = dict(before, **shared, split=part)
    elif is_tf2:
        part = {key: value for key, value in part.items() if key not in ("added", "removed")}
        kept[name].setdefault("also", {})[part.pop("tensorflow")] = part
    else:
        kept[name] = dict(record, **{key: before[key] for key in ("also", "split") if key in before})


def records():
    if not os.path.exists(RECORDS):
        return {}
    with open(RECORDS, encoding="utf-8") as file:
        return json.load(file)


def write(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


SPLIT_HEAD = """# Real TensorFlow 1 programs

Generated by `project/programs.py`. Each program runs from its own repository, with its own model and training function,
small sizes, made-up data and without dropout: {steps} steps on full batches of 8, and the same steps in micro-batches
of 2. Modules that are not installed, and that the training does not call, are empty ones.

## In one run

With the line of `accum.compat.v1.split_batch` between the loss and the optimizer, on TensorFlow 1.15. Nothing else is
changed, and no variable is added.

- **Changed lines**: those of the call, and of the import.
- **Agrees**: how far any variable (weights, slots of optimizers, counters, averages) is off the full batch after any
  step, at most, in units of its largest value if that is above 1. The updates of both are in order, as
  [the testing guide](../../docs/testing.md#static-graphs) says.
- **As it is**: the same without an order; in brackets, if it is more than 5e-6, how far the program's own, unchanged
  full batch is off the ordered one, because it reads and changes variables in no fixed order.
- **Variables**: how many are compared; but for those that rounding decides: after a full batch with its examples in
  another order, or with other last digits, they differ by more than 5e-6; and those that two updates change in no
  fixed order, such as averages that two calls of a layer move in place.
- **In micro-batches**: how many of the operations that use variables are computed in micro-batches, and how many batch
  normalisations take statistics of the whole batch. "At once": how many of these operations a step computes for the
  whole batch as well, by the trace of a run, because something is made from their shapes.
- **Memory**: the most that a step on 64 examples holds at a time beside the variables, full batch and split, by
  TensorFlow's trace of a run. With layers this small, an optimizer can need more than the examples do. Empty where
  the program fixes the size of its batch, or an Estimator runs it. [Benchmarks](../../benchmarks/README.md) have larger
  networks.
- **Resumes**: a session that restores the program's checkpoint of before the last step ends with the same bits; or how
  far off, where sums are in no fixed order.
- **Rules**: how many of the operations on the batch have a rule that says whether they keep examples apart.
- **Said**: the first sentence of each warning or, if the batch can't be split, the error.
- **K runs**: changed lines and agreement of the [K runs](#in-k-runs) below.
- **accum**: the last commit of accum's sources in the tree that ran, and its date.

"""
SPLIT_COLUMNS = ("Program", "Commit", "What runs", "Changed lines", "Agrees", "As it is", "Variables")
SPLIT_COLUMNS += ("In micro-batches", "Memory", "Resumes", "Rules", "Said", "K runs", "accum")
HEAD = """
## In K runs

With `AccumOptimizer`, on the TensorFlow that is named: 4 runs of the train op, on micro-batches of 2, for each step.
Only what the guide to [static graphs](../../docs/tensorflow-1.md) says is changed.

- **Agrees**: how far a trained variable or the step counter is off the full batch after any step, at most. The full
  batch is ordered, and sums the rows of embeddings before it clips, as
  [the testing guide](../../docs/testing.md#static-graphs) says.
- **Rows**: how far the full batch that clips the slices of repeated ids one by one, as the program does, is off that.
- **Without**: how far the program ends from there if each step gets only one of its micro-batches, to compare.
- **Own runs**: how far equal runs of the program's own, unchanged full batch differ among themselves; and what they
  read and change in no fixed order.
- **Not compared**: variables that rounding decides: after a full batch with its examples in another order, they differ
  by more than 5e-6. Most have a gradient that is zero but for rounding, as the bias of attention's keys has, and Adam
  divides rounding by rounding.
- **Resumes**: a process that trains and writes checkpoints is killed by SIGKILL in the middle of a cycle, after 7 of 12
  micro-batches. Another process builds the program anew, restores the last checkpoint, which is that of the sixth
  micro-batch and so from the middle of a cycle too, and ends with the same bits as an uninterrupted run. Where equal
  uninterrupted runs differ in their last bits, a number says how far off it ends.
- **Exports**: the unchanged program restores the accumulating run's checkpoint, has the same loss, and exports it as a
  SavedModel that has it too.
- **Evaluates**: what the program's own evaluation or prediction computes, and how far that from the accumulating run's
  checkpoint is off that from the full batch's. Where it is empty, the loss under **Exports** is all that is compared.
  In brackets, where it is more than 1e-5: how far a full batch with its examples in another order is off.
- **accum**: the last commit of accum's sources in the tree that ran, and its date.

| Program | Commit | TensorFlow | What runs | Changed lines | Agrees | Rows | Without | \
Own runs | Not compared | Resumes | Exports | Evaluates | accum |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|
"""

WARNINGS = """
## Warnings

What accum warns of while it accumulates, on TensorFlow 1.15; the first sentence of each. It warns of nothing in the
other programs.

"""

MODERN_HEAD = """
## On TensorFlow 2

The same programs and changes, after `tf.disable_v2_behavior()`. In all files of a program, `import tensorflow as tf`
becomes `import tensorflow.compat.v1 as tf`, `tf_slim` stands in for `tf.contrib.slim` and `tf.contrib.layers`, and
`tf.estimator.tpu` for `tf.contrib.tpu`.

| Program | TensorFlow | Agrees | Without | Resumes | Exports | Evaluates | accum |
|---|---|---|---|---|---|---|---|
"""


def ruled(kept):
    """Return a sentence about the operations of all programs that have a rule."""
    found = [record["split"] for record in kept.values() if "operations" in record.get("split", {})]
    kinds = sorted({kind for one in found for kind in one["unruled"]})
    total, without = sum(one["operations"] for one in found), sum(sum(one["unruled"].values()) for one in found)
    share = f"{100 * (total - without) / max(total, 1):.2f} % of {total:,} operations on the batch have a rule."
    return share + (f" Types without one: {', '.join(f'`{kind}`' for kind in kinds)}." if kinds else "")


def named(variables):
    more = len(variables) - 2
    return ", ".join(f"`{one}`" for one in variables[:2]) + (f" and {more} more" if more > 0 else "")


def has_note(name):
    return name in PROGRAMS and PROGRAMS[name].note is not None


def resumes(record):
    answer = "yes" if record["resumes"] else "**no**"
    answer += f", {record['resumed_off']:.0e}" if record["resumed_off"] else ""
    return answer if "killed_after" in record else answer + ", from a closed session"


def accum_of(record):
    commit, _, date = record.get("accum", "").partition(", ")
    return f"`{commit}`, {date}" if commit else ""


def warning(text):
    """Return the first sentence of a warning, and what it received, without its code."""
    said, _, received = re.sub(r" \[accum: [\w-]+\]", "", text).rpartition("Received: ")
    try:
        names = named(ast.literal_eval(received.rstrip(".")))
    except (SyntaxError, ValueError):
        names = received.rstrip(".")
    return f"{said.split('. ')[0]}. Received: {names}."


def evaluates(name, record):
    if "evaluated" not in record:
        return ""
    what = PROGRAMS[name].evaluates if name in PROGRAMS else None
    return evaluated(record) + (f", {what}" if what else "")


def evaluated(record):
    """Return how far an evaluation is off and, if that is much, how far the order of the examples moves it."""
    if "evaluated" not in record:
        return ""
    in_another_order = f" ({record['evaluation_rounded']:.0e})" if record["evaluated"] > ROUNDING else ""
    return f"{record['evaluated']:.0e}{in_another_order}"


def row(name, record):
    link = "[{0}](https://github.com/{0})".format(record["repository"])
    versions = [record.get("tensorflow", "1.15")]
    versions += [version for version, part in sorted(record.get("also", {}).items()) if "failed" not in part]
    head = f"| {name}, {link} | `{record.get('commit', '')[:10]}` | {', '.join(versions)} | {record['what']} |"
    if "failed" in record:
        return f"{head} can't run: {record['failed']} | | | | | | | | | {accum_of(record)} |"
    race = named(record["unordered"])
    own = f"{record['own_runs_differ']:.0e}" + (f"; {race}" if race else "")
    numbers = f"{record['agreement']:.0e} | {record['rows']:.0e} | {record['unaccumulated']:.0e}"
    exports = "yes" if record["exports"] else "**no**"
    answers = f"{resumes(record)} | {exports} | {evaluates(name, record)}"
    return (
        f"{head} {lines_of(record)} | {numbers} | {own} | {named(record['rounded'])} | {answers} | {accum_of(record)} |"
    )


def modern_row(name, version, part):
    if "failed" in part:
        return f"| {name} | {version} | can't run: {part['failed']} | | | | | {accum_of(part)} |"
    exports = "yes" if part["exports"] else "**no**"
    numbers = f"{part['agreement']:.0e} | {part['unaccumulated']:.0e}"
    return f"| {name} | {version} | {numbers} | {resumes(part)} | {exports} | {evaluated(part)} | {accum_of(part)} |"


def split_row(name, record):
    """Return the row of a program that `split_batch` splits, with its K runs beside it."""
    link = "[{0}](https://github.com/{0})".format(record["repository"])
    found = record["split"]
    head = f"| {name}, {link} | `{found.get('commit', record.get('commit', ''))[:10]}` | {record['what']} |"
    runs = lines_of(record) + f", {record['agreement']:.0e}" if "agreement" in record else ""
    if "failed" in found:
        return f"{head} | | | | | | | | {found['failed']} | {runs} | {accum_of(found)} |"
    plain = f" ({found['own_as_it_is']:.0e})" if found["as_it_is"] > BAR else ""
    numbers = f"{found['agreement']:.0e} | {found['as_it_is']:.0e}{plain} | {found['variables']}"
    numbers += f", but for {named(found['rounded'])}" if found["rounded"] else ""
    unruled = sum(found["unruled"].values())
    share = f"{found['inside']} of {found['using']}" + (f", {found['statistics']} norms" if found["statistics"] else "")
    share += f", {len(found['whole'])} also at once" if found.get("whole") else ""
    share += f" | {memory(found)} | {resumes_split(found)} | {found['operations'] - unruled} of {found['operations']}"
    said = "; ".join(text.split(". ")[0] + "." for text in found["said"])
    return f"{head} {lines_of(found)} | {numbers} | {share} | {said} | {runs} | {accum_of(found)} |"


def memory(found):
    """Return the peaks of a full batch and of a split one, in MB, and their ratio."""
    if not found.get("peak"):
        return ""
    full, split = found["peak_full"], found["peak"]
    return f"{full / 1e6:.2g} / {split / 1e6:.2g} MB, {split / full:.2f}"


def resumes_split(found):
    if "resumed_off" not in found:
        return ""
    return f"{found['resumed_off']:.0e}" if found["resumed_off"] else "yes"


def lines_of(record):
    return f"+{record['added']} −{record['removed']}"


def page(kept):
    splits = [split_row(name, record) for name, record in sorted(kept.items()) if "split" in record]
    rows = [row(name, record) for name, record in sorted(kept.items()) if "agreement" in record or "failed" in record]
    modern = [
        modern_row(name, version, part)
        for name, record in sorted(kept.items())
        for version, part in sorted(record.get("also", {}).items())
    ]
    untried = sorted(
        name for name, record in kept.items() if not record.get("also") and {"agreement", "failed"} & set(record)
    )
    notes = "\n".join(f"- {name}: {PROGRAMS[name].note}." for name in sorted(kept) if has_note(name))
    others = "\n".join(f"- {name}: {reason}." for name, reason in sorted(CANNOT.items()))
    columns = f"| {' | '.join(SPLIT_COLUMNS)} |\n|{'---|' * len(SPLIT_COLUMNS)}\n"
    text = SPLIT_HEAD.format(steps=3) + columns + "\n".join(splits) + "\n\n" + ruled(kept) + "\n"
    waiting = sorted(name for name in PROGRAMS if "split" not in kept.get(name, {}))
    text += f"\nNot split yet: {', '.join(waiting)}.\n" if waiting else ""
    text += HEAD.format(steps=3) + "\n".join(rows) + f"\n\nNotes:\n\n{notes}\n\nNot run:\n\n" + others + "\n"
    warned = [f"- {name}: {warning(text)}" for name in sorted(kept) for text in kept[name].get("warned", [])]
    text += WARNINGS + "\n".join(warned) + "\n" if warned else ""
    text += MODERN_HEAD + "\n".join(modern) + "\n"
    return text + (f"\nNot tried on TensorFlow 2: {', '.join(untried)}.\n" if untried else "")


def without_paths(said):
    """Return an error without the paths of this machine that Python adds in brackets."""
    return re.sub(r" \(/[^)]*\)", "", said)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "split", "page"])
    parser.add_argument("folder", nargs="?", help="where the git directories are")
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs; all if left out")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with TensorFlow 1.15")
    arguments = parser.parse_args(argv)
    kept, status = records(), 0
    if arguments.what != "page":
        if arguments.folder is None:
            parser.error(f"`{arguments.what}` needs the folder of the git directories")
        unknown = sorted(set(arguments.names) - set(PROGRAMS))
        if unknown:
            parser.error(f"NAME must be one of: {' '.join(PROGRAMS)}. Received: {' '.join(unknown)}")
        tensorflow = version_of(arguments.python)
        is_tf2 = not tensorflow.startswith("1.")
        accumulating = [name for name in PROGRAMS if PROGRAMS[name].edits is not None]
        for name in arguments.names or (PROGRAMS if arguments.what == "split" else accumulating):
            try:
                record = run(name, arguments.folder, arguments.python, is_tf2, arguments.what)
            except Failed as failed:
                repository, what = PROGRAMS[name].repository, PROGRAMS[name].what
                record = {"repository": repository, "what": what, "accum": sources()}
                record["failed"] = without_paths(str(failed))
                record["tensorflow"] = tensorflow
                status = 1
            print(name, json.dumps(record, sort_keys=True), flush=True)
            keep(kept, name, record, is_tf2, arguments.what == "split")
            write(RECORDS, json.dumps(kept, indent=1, sort_keys=True) + "\n")
    write(PAGE, page(kept))
    return status


if __name__ == "__main__":
    sys.exit(main())
