"""`python -m accum compare`: compare two recordings, without TensorFlow."""

import argparse
import json
import math
import sys

from accum._cli.compare import plot
from accum._cli.plot_file import check
from accum.testing._compare import TOLERANCE, compare


def add_parser(commands):
    """Add `compare` to the subparsers of the command line."""
    parser = commands.add_parser(
        "compare",
        help="compare two recorded runs and show where they diverge",
        description="Compare two recordings of `accum.testing.record`, step by step, and print the first divergence. "
        "Exit status: 0 if they agree, 1 if they diverge or a variable has no counterpart, 2 if they cannot be "
        "compared.",
    )
    add = parser.add_argument
    add("a", metavar="A.json", help="a recording")
    add("b", metavar="B.json", help="the recording to compare it with")
    add(
        "--tolerance",
        type=positive,
        default=TOLERANCE,
        metavar="T",
        help="largest difference allowed (default: %(default)s)",
    )
    add(
        "--names",
        metavar="MAP.json",
        help="a JSON object that maps names of variables in A to names in B, where they differ",
    )
    add("--ignore", action="append", default=[], metavar="NAME", help="a variable to leave out; repeatable")
    add("--plot", metavar="FILE.png", help="plot losses and deviations with matplotlib")
    parser.set_defaults(perform=lambda arguments: _perform(parser, arguments))


def positive(text):
    value = float(text)
    if not 0 < value < math.inf:  # with an infinite tolerance, everything would agree
        raise argparse.ArgumentTypeError(f"must be a finite number > 0. Received: {text}")
    return value


positive.__name__ = "number"  # argparse says "invalid number value" by it


def _perform(parser, arguments):
    if arguments.plot is not None:
        check(parser, arguments.plot)
    try:
        names = _names(arguments.names)
        comparison = compare(
            arguments.a, arguments.b, tolerance=arguments.tolerance, names=names, ignore=arguments.ignore
        )
        if arguments.plot is not None:
            plot.draw(comparison, (arguments.a, arguments.b), arguments.plot)
    except (OSError, TypeError, ValueError) as error:
        print(f"python -m accum compare: {error}", file=sys.stderr)
        return 2
    print(comparison)
    if arguments.plot is not None:
        print(f"Curves: {arguments.plot}")
    return 0 if comparison.agrees else 1


def _names(path):
    if path is None:
        return None
    with open(path, encoding="utf-8") as file:
        try:
            names = json.load(file)
        except (RecursionError, ValueError) as error:
            raise ValueError(f"{path} is not JSON: {error}.") from None
    if not isinstance(names, dict):
        raise ValueError(f"{path} must hold a JSON object that maps names to names.")
    return names
