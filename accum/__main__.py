"""The command line: `python -m accum`."""

import argparse
import sys

import accum
from accum import _commands
from accum._doctor import command as doctor

NEED_TENSORFLOW = ("convert", "demo", "verify")


def main(argv=None):
    """Run the command that `argv` names; None: the process's own arguments.

    Returns:
      The exit status: 0, 1 if the command failed, or 2 if there is no TensorFlow and it needs one.

    Raises:
      SystemExit: with status 2 and a usage line for wrong arguments, 0 for `--help` and `--version`.
    """
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser(argv[:1] == ["doctor"]).parse_args(argv)
    lacking = _commands.without_tensorflow() if arguments.command in NEED_TENSORFLOW else None
    if lacking:
        print("python -m accum {} needs TensorFlow: {}".format(arguments.command, lacking), file=sys.stderr)
        return 2
    return arguments.perform(arguments)


def _parser(is_doctor):
    """The parser; the doctor shares no import with the others, any of which may be what is ill."""
    parser = argparse.ArgumentParser(prog="python -m accum", description=accum.__doc__)
    parser.add_argument("--version", action="version", version="accum " + accum.__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.required = True  # an argument of `add_subparsers` from Python 3.7 on
    doctor.add_parser(commands)
    if not is_doctor:
        _add_others(commands)
    return parser


def _add_others(commands):
    from accum import _convert_command
    from accum._demo import command as demo
    from accum._migrate import command as migrate
    from accum.testing import _compare_command, _verify_command

    for command in (demo, _verify_command, _compare_command, _convert_command, migrate):
        command.add_parser(commands)


if __name__ == "__main__":
    sys.exit(main())
