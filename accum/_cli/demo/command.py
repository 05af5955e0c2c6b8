"""The arguments of the demo, checked before anything is trained."""

import argparse
import sys

from accum._cli import plot_file
from accum._cli.demo import plot, report
from accum._cli.demo.settings import FACES, Settings

DEFAULT_PLOT = "accum-demo.png"


def add_parser(commands):
    """Add `demo` to the subparsers of the command line."""
    parser = commands.add_parser(
        "demo",
        help="train on handwritten digits with and without accumulation, and compare",
        description="Train one network on handwritten digits three times from the same weights: with full batches, "
        "with the same batches accumulated from micro-batches, and with the micro-batches alone.",
    )
    add = parser.add_argument
    add(
        "--face",
        choices=FACES,
        help="the interface to use: accum.compat.v1, GradientAccumulateOptimizer or GradientAccumulateModel (default: "
        "model; v1 on TensorFlow 1.15)",
    )
    add("--accum-steps", type=_positive, default=8, metavar="K", help="micro-batches per update (default: %(default)s)")
    add("--batch-size", type=_positive, default=256, metavar="N", help="examples per update (default: %(default)s)")
    add("--epochs", type=_positive, default=20, metavar="E", help="passes over the images (default: %(default)s)")
    add("--seed", type=_seed, default=0, metavar="S", help="seed for weights and data (default: %(default)s)")
    add("--plot", metavar="FILE.png", help=f"file for the loss curves; needs matplotlib (default: {DEFAULT_PLOT})")
    parser.set_defaults(perform=lambda arguments: _perform(parser, arguments))


def _positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an int >= 1. Received: {text}")
    return value


def _seed(text):
    value = int(text)
    if not 0 <= value < 2**32:  # the range that NumPy accepts
        raise argparse.ArgumentTypeError(f"must be an int from 0 to 2**32 - 1. Received: {text}")
    return value


_positive.__name__ = _seed.__name__ = "int"  # argparse says "invalid int value" by it


def _perform(parser, arguments):
    from accum import _tf  # needs TensorFlow; parsing the arguments does not
    from accum._cli.demo import runs

    if arguments.face is None:
        arguments.face = "model" if _tf.HAS_KERAS_FACE else "v1"
    if arguments.batch_size % arguments.accum_steps:
        numbers = f"{arguments.batch_size} and {arguments.accum_steps}"
        parser.error(f"--batch-size must be divisible by --accum-steps. Received: {numbers}.")
    if arguments.face != "v1" and not _tf.HAS_KERAS_FACE:
        parser.error(f"--face {arguments.face} needs TensorFlow 2.2 or later. Use --face v1.")
    path = arguments.plot
    if path is None and plot_file.is_possible():
        path = DEFAULT_PLOT
    if path is not None:
        plot_file.check(parser, path)
    settings = Settings(*(getattr(arguments, field) for field in Settings._fields))
    try:
        outcomes = runs.run_all(settings)
        print(report.summary(outcomes))
        print(_draw(settings, outcomes, path))
    except BrokenPipeError:
        raise  # of standard output; the command line handles it
    except (runs.RunFailed, OSError) as error:
        print(f"python -m accum demo: {error}", file=sys.stderr)
        return 1
    return 0


def _draw(settings, outcomes, path):
    if path is None:
        return "Loss curves were not drawn: matplotlib is not installed. " + plot_file.REMEDY
    plot.draw(settings, outcomes, path)
    return f"Loss curves: {path}"
