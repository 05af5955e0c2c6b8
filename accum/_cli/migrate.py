"""`python -m accum migrate`: parse its arguments, rewrite the files and report."""

import contextlib
import difflib
import importlib.util
import io
import os
import sys
from typing import Any, List

from accum._migrate import files, pipes, spoken, users

DESCRIPTION = (
    "Rewrite code that accumulates gradients with another library (GradientAccumulator, H2G-Net, Run:AI, tensorpack, "
    "keras-gradient-accumulation, bojone's AccumOptimizer, AdamAccumulate, Keras 3's own argument) to use accum. Code "
    "that uses Horovod or StyleGAN2, adds gradients up by hand, or only mentions that, is reported but not rewritten. "
    "The changes are printed as a unified diff and written only with --write. Code that cannot be rewritten without "
    "changing the numbers, or is not understood, is left as it is and reported. Exit status: 0 if nothing accumulates, "
    "or if all of it is rewritten (without --write: would be); 1 if something is left for you to do; 2 for a wrong "
    "argument, or for a file that cannot be read or replaced, in which case nothing is written."
)
PACKAGES = ("gradient-accumulator", "keras-gradient-accumulation", "runai")
"""The packages on the index whose whole use is accumulation."""

INSTEAD = "When nothing imports it any more, replace it with accum."
NO_LIBCST = "it needs LibCST, which is not installed: python -m pip install libcst"


def add_parser(commands):
    """Add `migrate` to the subparsers of the command line."""
    parser = commands.add_parser(
        "migrate", help="rewrite code that accumulates with another library", description=DESCRIPTION
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a Python file, or a folder of Python files")
    parser.add_argument("--write", action="store_true", help="write the changes to the files")
    parser.set_defaults(perform=perform)


def perform(arguments):
    """Rewrite the files in `arguments.paths`.

    Returns:
      The exit status: 0, 1 if something is left for the user to do, 2 if a file can't be read or written.
    """
    if importlib.util.find_spec("libcst") is None:
        return _fail([NO_LIBCST])
    try:
        paths = files.find(arguments.paths)
    except files.Unreadable as error:
        return _fail([error])
    outcomes, passed_over, errors = _rewrite_all(paths, arguments.write)
    if errors:
        return _fail(errors)
    try:
        if arguments.write:
            files.write([(text, outcome.code) for text, outcome in outcomes if outcome.code != text.code])
    except files.Unreadable as error:
        _tell([(text, outcome) for text, outcome in outcomes if text.path in error.written])
        return _fail([error])
    _tell(outcomes)
    for reason in passed_over:
        print(f"{reason}. It may accumulate by hand; check it yourself.", file=sys.stderr)
    for path, line, package in files.requirements(arguments.paths, PACKAGES):
        print(f"{path}:{line}: note: {package} is required here. {INSTEAD}", file=sys.stderr)
    print(
        _summary(len(paths), [outcome for _, outcome in outcomes], len(passed_over), arguments.write), file=sys.stderr
    )
    return int(bool(passed_over) or any(outcome.left for _, outcome in outcomes))


def _rewrite_all(paths, is_to_be_written):
    """Read all files before the first is written. Returns ([(text, outcome)], passed over, errors).

    A file that can't be read is an error if it names a known library, and passed over if it speaks of accumulation.
    """
    from accum._migrate.rewrite import CLUES, is_of_interest, names_a_library

    outcomes: List[Any] = []
    passed_over: List[Any] = []
    errors: List[Any] = []
    clues, defined = files.clues(paths, CLUES), _definitions(paths)
    for path in paths:
        content = b""
        try:
            content = files.content(path)
            if is_of_interest(content) or defined.may_be_in(content):
                outcomes.append(_rewritten(path, content, clues, defined, is_to_be_written))
        except files.Unreadable as error:
            if not content or names_a_library(content):
                errors.append(error)
            elif spoken.find(content):
                passed_over.append(error)
    return outcomes, passed_over, errors


def _definitions(paths):
    """Return the `Definitions` that accumulate by hand, which other files may use."""
    from accum._migrate.rewrite import by_hand, definitions

    by_name = users.Definitions()
    for path in paths:
        with contextlib.suppress(files.Unreadable):
            content = files.content(path)
            for name in definitions(files.text(path, content).code) if by_hand.may_be_in(content) else ():
                by_name.add(name, path)
    return by_name


def _rewritten(path, content, clues, defined, is_to_be_written):
    """Returns (text, outcome) for a file."""
    from accum._migrate.rewrite import rewrite

    text = files.text(path, content)
    clues = {word: files.nearest(path, others) for word, others in clues.items()}
    try:
        outcome = rewrite(text.code, clues, lambda name: defined.path_of(name, path))
    except SyntaxError as error:
        raise files.Unreadable(f"{path}: cannot be parsed as Python 3: {error}") from None
    except RecursionError:
        raise files.Unreadable(f"{path}: nested too deeply to be parsed") from None
    if is_to_be_written and outcome.code != text.code:
        files.require_writable(path)
    return text, outcome


def _summary(looked_at, outcomes, passed_over, is_written):
    """The last line, such as "3 files looked at, 2 accumulate: 1 rewritten, 1 left to you.". Its numbers add up."""
    accumulating = [outcome for outcome in outcomes if outcome.is_rewritten or outcome.left]
    line = "{} {} looked at, {} {}".format(
        looked_at,
        "file" if looked_at == 1 else "files",
        len(accumulating),
        "accumulates" if len(accumulating) == 1 else "accumulate",
    )
    whole, part, left = (sum(kind == of for kind in map(_kind, accumulating)) for of in ("whole", "part", "left"))
    counts = [f"{whole} rewritten" if is_written else f"{whole} to be rewritten by --write"]
    counts += [f"{part} in part" if is_written else f"{part} to be rewritten in part"] if part else []
    line += ": " + ", ".join(counts + [f"{left} left to you"]) if accumulating else ""
    return line + (f"; {passed_over} not valid Python 3." if passed_over else ".")


def _kind(outcome):
    if not outcome.is_rewritten:
        return "left"
    return "part" if outcome.left else "whole"


def _tell(outcomes):
    for text, outcome in outcomes:
        _tell_one(text, outcome)
    _for_reader(sys.stdout.flush)


def _tell_one(text, outcome):
    """Print the diff to stdout, for tools, and messages for people to stderr."""
    before, after = (io.StringIO(code, newline="\n").readlines() for code in (text.code, outcome.code))
    for line in difflib.unified_diff(before, after, fromfile=text.path, tofile=text.path):
        _print(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    for line, note in outcome.notes:
        print(f"{text.path}:{line}: note: {note}.", file=sys.stderr)
    for line, reason in outcome.left:
        print(f"{text.path}:{line}: left as it is: {reason}.", file=sys.stderr)


def _print(line):
    """Print a line, with escapes for characters that the terminal lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    _for_reader(sys.stdout.write, line.encode(encoding, "backslashreplace").decode(encoding))


def _for_reader(function, *arguments):
    """Call a function that prints, and go on silently if the reader (such as `| head`) has closed the pipe."""
    try:
        function(*arguments)
    except OSError as error:
        if not pipes.is_reader_gone(error):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(errors):
    for error in errors:
        print(f"python -m accum migrate: {error}", file=sys.stderr)
    return 2
