"""The command `accum`, which an installation puts beside `python`: the same as `python -m accum`."""

import sys

from accum.__main__ import main


def run() -> int:
    """Run the command line of this process. Returns its exit status."""
    return main(sys.argv[1:], prog="accum")
