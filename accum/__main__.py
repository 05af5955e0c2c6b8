"""The command line: `python -m accum`, or `accum`."""

import argparse
import errno
import io
import sys
from typing import Any, List, Optional

import accum
from accum._cli import log_lines, requirements
from accum._cli.doctor import command as doctor

NEED_TENSORFLOW = ("convert", "demo", "fit-size", "verify")
READER_GONE = 128 + 13  # what a shell reports for a process that SIGPIPE ended
INTERRUPTED = 128 + 2  # and for one that Ctrl-C ended
PROG = "python -m accum"
STATUSES = (
    "Exit status: 0 if all is well; 1 if the command found something, such as a divergence, or failed; 2 for wrong "
    "arguments, or if TensorFlow is missing and the command needs it; 130 after Ctrl-C; 141 if the program that "
    "reads the output, such as `| head`, has ended. `COMMAND --help` says what 1 means for a command."
)


def main(argv: Optional[List[str]] = None, prog: str = PROG) -> int:
    """Run the command that `argv` names; None: the process's own arguments.

    Args:
      argv: the arguments.
      prog: how the user has called the command line, for its usage.

    Returns:
      The exit status: 0, 1 if the command failed or its output can't be written, 2 if there is no TensorFlow and it
      needs one, 130 after Ctrl-C, or 141 if the reader of its output, such as `| head`, is gone: then there is no
      verdict.

    Raises:
      SystemExit: with status 2 and a usage line for wrong arguments, 0 for `--help` and `--version`.
    """
    _escape_what_the_output_lacks()
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv, prog)
        finally:
            print(end="", flush=True)  # what waits in the buffer fails here, rather than while Python shuts down
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if requirements.is_reader_gone(error):
            requirements.discard_output()
            return READER_GONE
        if error.errno != errno.ENOSPC:
            raise
        requirements.discard_output()
        print(f"{prog}: {error.strerror}", file=sys.stderr)
        return 1


def run() -> int:
    """Run the command `accum`, which an installation puts beside `python`: the same as `python -m accum`."""
    return main(prog="accum")


def _escape_what_the_output_lacks() -> None:
    """Print characters that the output's encoding lacks, such as a path's on a cp1252 console, as escapes."""
    out: Any = sys.stdout
    is_own = out is sys.__stdout__
    if out is None or not is_own:
        return
    if hasattr(out, "reconfigure"):
        out.reconfigure(errors="backslashreplace")
    else:  # Python 3.6
        sys.stdout = io.TextIOWrapper(out.buffer, out.encoding, "backslashreplace", line_buffering=out.line_buffering)


def _run(argv: Any, prog: str) -> int:
    arguments = _parser(argv[:1] == ["doctor"], prog).parse_args(argv)
    wrong = arguments.check(arguments) if "check" in arguments else None
    if wrong:  # found before the seconds that the import of TensorFlow takes
        print(f"{prog} {arguments.command}: {wrong}", file=sys.stderr)
        return 2
    if arguments.command != "demo":
        return _perform(arguments, prog)
    with log_lines.hidden():
        return _perform(arguments, prog)


def _perform(arguments: argparse.Namespace, prog: str) -> int:
    lacking = requirements.without_tensorflow() if arguments.command in NEED_TENSORFLOW else None
    if lacking:
        print(f"{prog} {arguments.command} needs TensorFlow: {lacking}", file=sys.stderr)
        return 2
    return arguments.perform(arguments)


def _parser(is_doctor: bool, prog: str) -> argparse.ArgumentParser:
    """Create the parser; if `is_doctor`, without importing the other commands, because their imports may fail."""
    parser = argparse.ArgumentParser(prog=prog, description=accum.__doc__, epilog=STATUSES)
    parser.add_argument("--version", action="version", version="accum " + accum.__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.required = True  # an argument of `add_subparsers` from Python 3.7 on
    doctor.add_parser(commands)
    if not is_doctor:
        _add_others(commands)
    return parser


def _add_others(commands: Any) -> None:
    from accum._cli import fit_size, verify
    from accum._cli import migrate as migrate
    from accum._cli.compare import command as compare
    from accum._cli.convert import command as convert
    from accum._cli.demo import command as demo

    for command in (demo, verify, fit_size, compare, convert, migrate):
        command.add_parser(commands)


if __name__ == "__main__":
    sys.exit(main())
