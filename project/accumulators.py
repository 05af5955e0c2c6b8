"""How many public accumulators `python -m accum migrate` names, and how many innocent trees it leaves alone.

    python project/accumulators.py run FOLDER         # measure; FOLDER holds a git directory for each repository
    python project/accumulators.py run FOLDER --only NAME ...
    python project/accumulators.py page               # write pages/accumulators.md from records/accumulators.json

The list is project/accumulators.json: repository, commit, folder (if not all of it is looked at), the files that
accumulate (none for an innocent tree) and whether the repository was looked at while the rules were written. FOLDER
holds `owner+name`, `owner+name/.git`, `owner+name/repo` or `owner+name/repo/.git`, with the commit. Needs LibCST.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tarfile
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
LIST = os.path.join(HERE, "accumulators.json")
RESULTS = os.path.join(HERE, "records", "accumulators.json")
PAGE = os.path.join(HERE, "pages", "accumulators.md")
KEYS = {"repository", "commit", "folder", "files", "set"}
SETS = ("development", "held out")
PLACES = ("", ".git", "repo", os.path.join("repo", ".git"))

HEAD = """\
# Known accumulators

`python -m accum migrate` names code that accumulates gradients. This page says how much of it. Its list holds public
repositories at fixed commits: those that accumulate, with the files that do, and innocent ones. An accumulator is
*named* if the command reports each of its listed files. A tree is *wrongly named* if the command reports anything in
an innocent one. Recall is the share of accumulators that are named; precision is the share of accumulators among all
trees that are named.

`python project/accumulators.py run FOLDER` repeats it, and `python project/accumulators.py page` writes this
page. The rules of the command were written while looking at the development set, and not changed for the held-out set.
"""


class Broken(Exception):
    """The list or a git directory can't be used; the message names it."""


def read(path):
    """Return the content of a JSON file."""
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def checked(entries):
    """Return the entries of the list.

    Raises:
      Broken: an entry is not of the list's form, or a repository is listed twice with the same folder.
    """
    seen = set()
    for entry in entries:
        name = entry.get("repository", entry)
        if set(entry) != KEYS or entry["set"] not in SETS or len(entry["commit"]) != 40:
            raise Broken(f"{name}: an entry must have {', '.join(sorted(KEYS))}")
        if (name, entry["folder"]) in seen:
            raise Broken(f"{name}: listed twice")
        seen.add((name, entry["folder"]))
    return entries


def git_directory(folder, repository):
    """Return the git directory of a repository in `folder`.

    Raises:
      Broken: there is none.
    """
    for parent in PLACES:
        path = os.path.join(folder, repository.replace("/", "+"), parent)
        if os.path.isfile(os.path.join(path, "HEAD")):
            return path
    raise Broken(f"{repository}: no git directory in {folder}")


def extract(git, entry, to):
    """Write the Python files of a commit to the folder `to`.

    Raises:
      Broken: the repository lacks the commit or one of the files.
    """
    pattern = f":(glob){entry['folder'] + '/' if entry['folder'] else ''}**/*.py"
    command = ["git", f"--git-dir={git}", "archive", entry["commit"], "--", pattern]
    with tempfile.TemporaryFile() as archive:
        if subprocess.run(command, stdout=archive, stderr=subprocess.DEVNULL).returncode:
            raise Broken(f"{entry['repository']}: git can't archive {entry['commit']}")
        archive.seek(0)
        with tarfile.open(fileobj=archive) as tar:
            tar.extractall(to, [member for member in tar if member.isfile()])
    for name in entry["files"]:
        if not os.path.isfile(os.path.join(to, name)):
            raise Broken(f"{entry['repository']}: no file {name}")


def reported(folder):
    """Return {file: its reports} of the command for the tree in `folder`, with paths within it."""
    command = [sys.executable, "-m", "accum", "migrate", folder]
    path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    environment = dict(os.environ, PYTHONPATH=path, PYTHONIOENCODING="utf-8")
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True
    )
    lines = done.stderr.splitlines()
    if done.returncode not in (0, 1) or not lines or "looked at" not in lines[-1]:
        raise Broken(f"the command ended with status {done.returncode}: {lines[-1:]}")
    lines_of_file = {}
    for line in lines[:-1] + done.stdout.splitlines():
        path = line[4:] if line.startswith("+++ ") else line.split(".py:")[0] + ".py"
        if path.startswith(folder):
            lines_of_file.setdefault(os.path.relpath(path, folder).replace(os.sep, "/"), []).append(line)
    return lines_of_file


def measured(job):
    """Return the result of an entry, for (folder with git directories, entry)."""
    folder, entry = job
    with tempfile.TemporaryDirectory() as tree:
        tree = os.path.realpath(tree)
        extract(git_directory(folder, entry["repository"]), entry, tree)
        reports = reported(tree)
    weak = [name for name, lines in reports.items() if all("mentions gradient accumulation" in line for line in lines)]
    result = {"missed": sorted(set(entry["files"]) - set(reports)), "weak": sorted(weak), "others": []}
    result["others"] = sorted(set(reports) - set(entry["files"]))
    return dict(entry, **result)


def run(arguments):
    """Measure the entries and write their results."""
    entries = checked(read(LIST))
    if arguments.only:
        entries = [entry for entry in entries if entry["repository"] in arguments.only]
    results = read(RESULTS) if os.path.exists(RESULTS) else []
    kept = {(result["repository"], result["folder"]): result for result in results}
    with multiprocessing.Pool(arguments.jobs) as pool:
        for result in pool.imap_unordered(measured, [(arguments.folder, entry) for entry in entries]):
            kept[result["repository"], result["folder"]] = result
            print(result["repository"], _verdict(result), flush=True)
            _write(kept)


def _write(kept):
    """Write the results in the order of the list, after each, because a run takes long."""
    order = [(entry["repository"], entry["folder"]) for entry in checked(read(LIST))]
    with open(RESULTS, "w", encoding="utf-8", newline="\n") as file:
        json.dump([kept[key] for key in order if key in kept], file, indent=1)
        file.write("\n")


def _is_named(result):
    """Whether the command reports what it should of an accumulator, or anything of an innocent tree."""
    return not result["missed"] if result["files"] else bool(result["others"])


def _verdict(result):
    if result["files"]:
        missed = f"misses {', '.join(result['missed'])}" if result["missed"] else ""
        only_weak = set(result["files"]) - set(result["missed"]) <= set(result["weak"])
        return missed or ("named by its words" if only_weak else "named")
    return f"wrongly named: {', '.join(result['others'])}" if result["others"] else "left alone"


def counts(results):
    """Return (accumulators, of them named, innocent trees, of them named, recall, precision)."""
    accumulators = [result for result in results if result["files"]]
    innocent = [result for result in results if not result["files"]]
    right, wrong = sum(map(_is_named, accumulators)), sum(map(_is_named, innocent))
    recall = right / len(accumulators) if accumulators else 1.0
    return len(accumulators), right, len(innocent), wrong, recall, right / max(right + wrong, 1)


def page(results):
    """Return the text of the page."""
    lines = [HEAD, "| | accumulators | named | innocent trees | wrongly named | recall | precision |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name in SETS + ("both",):
        row = counts([result for result in results if name in (result["set"], "both")])
        lines.append("| {} | {} | {} | {} | {} | {:.3f} | {:.3f} |".format(name, *row))
    for title, is_wanted in (("Accumulators", True), ("Innocent trees", False)):
        lines += ["", f"## {title}", "", "| repository | commit | set | result |", "|---|---|---|---|"]
        for result in sorted(results, key=lambda result: (result["repository"].lower(), result["folder"])):
            if bool(result["files"]) == is_wanted:
                name = "/".join(filter(None, (result["repository"], result["folder"])))
                lines.append(f"| {name} | {result['commit'][:10]} | {result['set']} | {_verdict(result)} |")
    return "\n".join(lines) + "\n"


def main(argv=None):
    """Run a command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    runner = commands.add_parser("run")
    runner.add_argument("folder", help="where the git directories are")
    runner.add_argument("--only", nargs="+", metavar="NAME", help="some of the repositories")
    runner.add_argument("--jobs", type=int, default=2, help="processes")
    commands.add_parser("page")
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "run":
            run(arguments)
        else:
            with open(PAGE, "w", encoding="utf-8", newline="\n") as file:
                file.write(page(read(RESULTS)))
    except Broken as error:
        print(f"accumulators.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
