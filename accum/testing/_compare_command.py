"""`python -m accum compare`: two recordings. Runs without TensorFlow."""

import argparse
import json
import math
import sys

from accum.testing import _plot
from accum.testing._compare import TOLERANCE, compare


def add_parser(commands):
    """Add `compare` to the subparsers of the command line."""
    parser = commands.add_parser(
        "compare",
        help="compare two recorded runs, and say where they diverge",
        description="Compare two recordings of `accum.testing.record`, step by step, and print the first divergence. "
        "Exit status: 0 if they agree, 1 if they diverge or a variable has no counterpart, 2 if they can't be "
        "compared.",
    )
    add = parser.add_argument
    add("a", metavar="A.json", help="a recording")
    add("b", metavar="B.json", help="the one that it is compared with")
    add("--tolerance", type=positive, default=TOLERANCE, metavar="T", help="what is allowed (default: %(default)s)")
    add("--names", metavar="MAP.json", help="an object of names of variables in A to names in B, where they differ")
    add("--ignore", action="append", default=[], metavar="NAME", help="a variable that is not compared; repeatable")
    add("--plot", metavar="FILE.png", help="draw losses and deviations, by matplotlib")
    parser.set_defaults(perform=lambda arguments: _perform(parser, arguments))


def positive(text):
    value = float(text)
    if not 0 < value < math.inf:  # by an infinite one, all would agree
        raise argparse.ArgumentTypeError("must be a finite number > 0. Received: {}".format(text))
    return value


positive.__name__ = "number"  # argparse says "invalid number value" by it


def _perform(parser, arguments):
    if arguments.plot is not None:
        _plot.check(parser, arguments.plot)
    try:
        names = _names(arguments.names)
        found = compare(arguments.a, arguments.b, tolerance=arguments.tolerance, names=names, ignore=arguments.ignore)
        if arguments.plot is not None:
            _plot.draw(found, (arguments.a, arguments.b), arguments.plot)
    except (OSError, TypeError, ValueError) as error:
        print("python -m accum compare: {}".format(error), file=sys.stderr)
        return 2
    print(found)
    if arguments.plot is not None:
        print("Curves: {}".format(arguments.plot))
    return 0 if found.agrees else 1


def _names(path):
    if path is None:
        return None
    with open(path, encoding="utf-8") as file:
        try:
            names = json.load(file)
        except (RecursionError, ValueError) as error:
            raise ValueError("{} is no JSON: {}.".format(path, error)) from None
    if not isinstance(names, dict):
        raise ValueError("{} must hold an object of names to names.".format(path))
    return names
