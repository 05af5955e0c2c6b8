"""The command line: `python -m accum`."""

import argparse
import sys
from typing import Any, List, Optional

import accum
from accum._cli import requirements
from accum._cli.doctor import command as doctor

NEED_TENSORFLOW = ("convert", "demo", "verify")
READER_GONE = 128 + 13  # what a shell reports for a process that SIGPIPE ended


def main(argv: Optional[List[str]] = None) -> int:
    """Run the command that `argv` names; None: the process's own arguments.

    Returns:
      The exit status: 0, 1 if the command failed, 2 if there is no TensorFlow and it needs one, or 141 if the reader of
      its output, such as `| head`, is gone: then there is no verdict.

    Raises:
      SystemExit: with status 2 and a usage line for wrong arguments, 0 for `--help` and `--version`.
    """
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            print(end="", flush=True)  # what waits in the buffer fails here, rather than while Python shuts down
    except BrokenPipeError:
        requirements.discard_output()
        return READER_GONE


def _run(argv: Any) -> int:
    arguments = _parser(argv[:1] == ["doctor"]).parse_args(argv)
    lacking = requirements.without_tensorflow() if arguments.command in NEED_TENSORFLOW else None
    if lacking:
        print(f"python -m accum {arguments.command} needs TensorFlow: {lacking}", file=sys.stderr)
        return 2
    return arguments.perform(arguments)


def _parser(is_doctor: bool) -> argparse.ArgumentParser:
    """Create the parser; if `is_doctor`, without importing the other commands, because their imports may fail."""
    parser = argparse.ArgumentParser(prog="python -m accum", description=accum.__doc__)
    parser.add_argument("--version", action="version", version="accum " + accum.__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.required = True  # an argument of `add_subparsers` from Python 3.7 on
    doctor.add_parser(commands)
    if not is_doctor:
        _add_others(commands)
    return parser


def _add_others(commands: Any) -> None:
    from accum._cli import migrate as migrate
    from accum._cli import verify
    from accum._cli.compare import command as compare
    from accum._cli.convert import command as convert
    from accum._cli.demo import command as demo

    for command in (demo, verify, compare, convert, migrate):
        command.add_parser(commands)


if __name__ == "__main__":
    sys.exit(main())
