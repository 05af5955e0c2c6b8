"""Run public TensorFlow 1 programs on full batches and accumulating, and write what they show to docs/programs.md.

    python scripts/dev/programs.py run FOLDER [NAME ...] --python PYTHON
    python scripts/dev/programs.py page

FOLDER holds git directories of the repositories, as FOLDER/owner+name or FOLDER/owner/name, with or without /repo or
/.git at the end; nothing of them is kept here. PYTHON has TensorFlow 1.15. A program runs as its newest commit is, and
with the changes in scripts/dev/public_programs, which are those that the guide to static graphs gives. Results are kept
in records/programs.json.
"""

import argparse
import difflib
import json
import os
import re
import subprocess
import sys
import tempfile

from public_programs import PROGRAMS

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RECORDS = os.path.join(ROOT, "records", "programs.json")
PAGE = os.path.join(ROOT, "docs", "programs.md")
TIME = 600

CANNOT = {
    "NVlabs/stylegan2": "not tried: its layers are CUDA operations that it compiles for a GPU, unless told otherwise",
    "affinelayer/pix2pix-tensorflow": "not tried: generator and discriminator share a forward pass through batch "
    "normalisation, and `value_and_gradients` takes one loss",
    "andreped/H2G-Net": "can't run: its repository has Keras models, and no program that trains them",
    "balancap/SSD-Tensorflow": "not tried: its network needs images of about 300 × 300, which takes too long on a CPU",
    "bojone/bert4keras": "not tried: it trains by Keras's `fit`, and has no train op",
    "hellochick/PSPNet-tensorflow": "not tried: its pooling needs images of 473 × 473 or more, which takes too long on "
    "a CPU",
    "imcaspar/gpt2-ml": "can't run: it asks `tensorflow.compat.v1` for `contrib`, which TensorFlow 1.15 has elsewhere",
    "kpot/keras-transformer": "not tried: it trains by Keras's `fit`, and has no train op",
    "magenta/magenta": "not tried: its dependencies, such as TensorFlow Probability and note_seq, are not installed",
    "mozilla/DeepSpeech": "not tried: its dependencies, such as progressbar and its own decoder, are not installed",
    "openai/finetune-transformer-lm, openai/glow": "can't run: their Adam is a function, not an `Optimizer` that could "
    "be wrapped",
    "tensorflow/lingvo": "can't run: its newest commit needs Python 3.8, for which there is no TensorFlow 1.15",
    "tensorpack/tensorpack": "not tried: its dependencies, such as tqdm and msgpack, are not installed",
}


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
    """Write the Python files of the newest commit to a folder. Returns the commit."""
    place = os.path.join(folder, program.inside)
    os.makedirs(place)
    # Other files can be large, and a snapshot may lack them.
    command = ["git", "--git-dir", git, "archive", "HEAD:" + program.subtree, "*.py"]
    archive = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "x", "-C", place], input=archive.stdout, check=True)
    head = subprocess.run(["git", "--git-dir", git, "rev-parse", "HEAD"], stdout=subprocess.PIPE, check=True)
    return head.stdout.decode().strip()


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


def run(name, folder, python):
    """Run a program. Returns its record."""
    program = PROGRAMS[name]
    record = {"repository": program.repository, "what": program.what}
    with tempfile.TemporaryDirectory() as place:
        trees = [os.path.join(place, kind) for kind in ("full", "micro")]
        git = git_directory(folder, program.repository)
        for tree in trees:
            record["commit"] = make_tree(git, tree, program)
        record["added"], record["removed"] = change(trees[1], program.edits)
        record["added"] += program.added
        out = os.path.join(place, "out.json")
        paths = [os.path.join(tree, program.folder) for tree in trees]
        # Not as a script: its folder would be the first place to import from.
        start = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
        command = [
            python,
            "-c",
            start,
            os.path.join(ROOT, "scripts", "dev", "programs_run.py"),
            name,
            *paths,
            out,
        ]
        environment = dict(os.environ, PYTHONPATH=ROOT, TF_CPP_MIN_LOG_LEVEL="3")
        try:
            done = subprocess.run(
                command, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIME
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"it took more than {TIME} s") from None
        if done.returncode:
            sys.stderr.write(done.stdout.decode(errors="replace")[-6000:])
            raise Failed(done.stdout.decode(errors="replace").strip().splitlines()[-1][:200])
        with open(out) as file:
            record.update(json.load(file))
    return record


def records():
    if not os.path.exists(RECORDS):
        return {}
    with open(RECORDS, encoding="utf-8") as file:
        return json.load(file)


def write(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


HEAD = """# Real TensorFlow 1 programs

Generated by `scripts/dev/programs.py`. Each program runs from its own repository on TensorFlow 1.15, with its own model
and training function, small sizes, made-up data and without dropout: {steps} steps on full batches of 8, and the same
steps on 4 micro-batches of 2. Only what the guide to [static graphs](static-graph.md) says is changed. Modules that are
not installed, and that the training does not call, are empty ones.

- **Agrees**: how far a trained variable or the step counter is off the full batch after any step, at most. The full
  batch is ordered, and sums the rows of embeddings before it clips, as
  [the testing guide](testing.md#static-graphs) says.
- **Rows**: how far the full batch that clips the slices of repeated ids one by one, as the program does, is off that.
- **Without**: how far the program ends from there if each step gets only one of its micro-batches, to compare.
- **Own runs**: how far equal runs of the program's own, unchanged full batch differ among themselves; and what they
  read and change in no fixed order.
- **Not compared**: variables that rounding decides: after a full batch with its examples in another order, they differ
  by more than 5e-6. Most have a gradient that is zero but for rounding, as the bias of attention's keys has, and Adam
  divides rounding by rounding.
- **Resumes**: a run that ends in mid-cycle and another that goes on from its checkpoint end with the same bits. Where
  equal uninterrupted runs differ in their last bits, a number says how far off they end.
- **Exports**: the unchanged program restores the accumulating run's checkpoint, has the same loss, and exports it as a
  SavedModel that has it too.

| Program | Commit | What runs | Changed lines | Agrees | Rows | Without | Own runs | Not compared | Resumes | Exports |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def named(variables):
    more = len(variables) - 2
    return ", ".join(f"`{one}`" for one in variables[:2]) + (f" and {more} more" if more > 0 else "")


def has_note(name):
    return name in PROGRAMS and PROGRAMS[name].note is not None


def page(found):
    rows = []
    for name, record in sorted(found.items()):
        link = "[{0}](https://github.com/{0})".format(record["repository"])
        head = f"| {name}, {link} | `{record.get('commit', '')[:10]}` | {record['what']} |"
        if "failed" in record:
            rows.append(f"{head} can't run: {record['failed']} | | | | | | | |")
            continue
        race = named(record["unordered"])
        own = f"{record['own_runs_differ']:.0e}" + (f"; {race}" if race else "")
        answers = ["yes" if record[key] else "**no**" for key in ("resumes", "exports")]
        answers[0] += f", {record['resumed_off']:.0e}" if record["resumed_off"] else ""
        numbers = f"{record['agreement']:.0e} | {record['rows']:.0e} | {record['unaccumulated']:.0e}"
        lines = f"+{record['added']} −{record['removed']}"
        rows.append(f"{head} {lines} | {numbers} | {own} | {named(record['rounded'])} | {answers[0]} | {answers[1]} |")
    notes = "\n".join(f"- {name}: {PROGRAMS[name].note}." for name in sorted(found) if has_note(name))
    others = "\n".join(f"- {name}: {reason}." for name, reason in sorted(CANNOT.items()))
    return HEAD.format(steps=3) + "\n".join(rows) + f"\n\nNotes:\n\n{notes}\n\nNot run:\n\n" + others + "\n"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "page"])
    parser.add_argument("folder", nargs="?", help="where the git directories are")
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs; all if left out")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with TensorFlow 1.15")
    arguments = parser.parse_args(argv)
    found, status = records(), 0
    if arguments.what == "run":
        if arguments.folder is None:
            parser.error("`run` needs the folder of the git directories")
        unknown = sorted(set(arguments.names) - set(PROGRAMS))
        if unknown:
            parser.error(f"NAME must be one of: {' '.join(PROGRAMS)}. Received: {' '.join(unknown)}")
        for name in arguments.names or PROGRAMS:
            try:
                found[name] = run(name, arguments.folder, arguments.python)
            except Failed as failed:
                repository, what = PROGRAMS[name].repository, PROGRAMS[name].what
                found[name], status = {"repository": repository, "what": what, "failed": str(failed)}, 1
            print(name, json.dumps(found[name], sort_keys=True), flush=True)
            write(RECORDS, json.dumps(found, indent=1, sort_keys=True) + "\n")
    write(PAGE, page(found))
    return status


if __name__ == "__main__":
    sys.exit(main())
