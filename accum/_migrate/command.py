"""What is typed: `python -m accum migrate PATH…`, checked, carried out and told."""

import difflib
import importlib.util
import io
import os
import sys

from accum._migrate import files

DESCRIPTION = (
    "Rewrite code that accumulates gradients by another library (GradientAccumulator, H2G-Net, Run:AI, tensorpack, "
    "Keras 3's own argument) for this one, and name Horovod's. Prints the changes as a unified diff, and writes them "
    "with --write only. What it can't rewrite with the numbers kept, or can't tell, is left as it is and named. Exit "
    "status: 0, all understood; 1, something is left to be done by hand; 2, a wrong argument, or a file that can't be "
    "read or replaced: then nothing is written."
)
NO_LIBCST = "it needs LibCST, which is not installed: python -m pip install libcst"


def add_parser(commands):
    """Add `migrate` to the subparsers of the command line."""
    parser = commands.add_parser(
        "migrate", help="rewrite code that accumulates by another library", description=DESCRIPTION
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a Python file, or a folder of them")
    parser.add_argument("--write", action="store_true", help="write the changes into the files")
    parser.set_defaults(perform=perform)


def perform(arguments):
    """Rewrite the files of `arguments.paths`.

    Returns:
      The exit status: 0, 1 if something is left to be done by hand, 2 if a file can't be read or written.
    """
    if importlib.util.find_spec("libcst") is None:
        return _fail([NO_LIBCST])
    try:
        paths = files.find(arguments.paths)
    except files.Unreadable as error:
        return _fail([error])
    outcomes, errors = _rewrite_all(paths, arguments.write)
    if errors:
        return _fail(errors)
    try:
        if arguments.write:
            files.write([(text, outcome.code) for text, outcome in outcomes if outcome.code != text.code])
    except files.Unreadable as error:
        _tell([(text, outcome) for text, outcome in outcomes if text.path in error.written])
        return _fail([error])
    _tell(outcomes)
    return int(any(outcome.left for _, outcome in outcomes))


def _rewrite_all(paths, is_to_be_written):
    """([(text, outcome)], errors): all files are read before the first is written."""
    from accum._migrate.rewrite import WORDS, rewrite

    outcomes, errors = [], []
    for path in paths:
        try:
            text = files.read(path, WORDS)
            if text is None:
                continue
            outcome = rewrite(text.code)
            if is_to_be_written and outcome.code != text.code:
                files.require_writable(path)
            outcomes.append((text, outcome))
        except SyntaxError as error:
            errors.append("{}: not understood as Python 3: {}".format(path, error))
        except RecursionError:
            errors.append("{}: nested too deeply to be read".format(path))
        except files.Unreadable as error:
            errors.append(error)
    return outcomes, errors


def _tell(outcomes):
    for text, outcome in outcomes:
        _tell_one(text, outcome)
    _for_reader(sys.stdout.flush)


def _tell_one(text, outcome):
    """The diff to stdout, where a tool may read it; what people have to know to stderr."""
    lines = [io.StringIO(code, newline="\n").readlines() for code in (text.code, outcome.code)]
    for line in difflib.unified_diff(*lines, fromfile=text.path, tofile=text.path):
        _print(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    for line, note in outcome.notes:
        print("{}:{}: note: {}.".format(text.path, line, note), file=sys.stderr)
    for line, reason in outcome.left:
        print("{}:{}: left as it is: {}.".format(text.path, line, reason), file=sys.stderr)


def _print(line):
    """To a terminal that lacks a character, its escape."""
    encoding = sys.stdout.encoding or "utf-8"
    _for_reader(sys.stdout.write, line.encode(encoding, "backslashreplace").decode(encoding))


def _for_reader(function, *arguments):
    """Call what prints. A reader such as `| head` may have read enough, which is no reason to stop."""
    try:
        function(*arguments)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(errors):
    for error in errors:
        print("python -m accum migrate: {}".format(error), file=sys.stderr)
    return 2
