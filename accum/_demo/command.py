"""The arguments of the demo, checked before anything is trained."""

import argparse
import sys

from accum._demo import plot, report
from accum._demo.settings import FACES, Settings

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
    add("--face", choices=FACES, help="what accumulates (default: model; v1 before TensorFlow 2.2)")
    add("--accum-steps", type=_positive, default=8, metavar="K", help="micro-batches per update (default: %(default)s)")
    add("--batch-size", type=_positive, default=256, metavar="N", help="examples per update (default: %(default)s)")
    add("--epochs", type=_positive, default=20, metavar="E", help="passes over the images (default: %(default)s)")
    add("--seed", type=_seed, default=0, metavar="S", help="seed of weights and data (default: %(default)s)")
    add("--plot", metavar="FILE.png", help="file of the loss curves, by matplotlib (default: {})".format(DEFAULT_PLOT))
    parser.set_defaults(perform=lambda arguments: _perform(parser, arguments))


def _positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be an int >= 1. Received: {}".format(text))
    return value


def _seed(text):
    value = int(text)
    if not 0 <= value < 2**32:  # what NumPy takes
        raise argparse.ArgumentTypeError("must be an int from 0 to 2**32 - 1. Received: {}".format(text))
    return value


_positive.__name__ = _seed.__name__ = "int"  # argparse says "invalid int value" by it


def _perform(parser, arguments):
    from accum import _tf  # needs TensorFlow, as the runs do; the arguments don't
    from accum._demo import runs

    if arguments.face is None:
        arguments.face = "model" if _tf.HAS_KERAS_FACE else "v1"
    if arguments.batch_size % arguments.accum_steps:
        numbers = "{} and {}".format(arguments.batch_size, arguments.accum_steps)
        parser.error("--batch-size must be divisible by --accum-steps. Received: {}.".format(numbers))
    if arguments.face != "v1" and not _tf.HAS_KERAS_FACE:
        parser.error("--face {} needs TensorFlow 2.2 or later; on this one there is v1.".format(arguments.face))
    path = arguments.plot
    if path is None and plot.is_possible():
        path = DEFAULT_PLOT
    if path is not None:
        plot.check(parser, path)
    settings = Settings(*(getattr(arguments, field) for field in Settings._fields))
    try:
        outcomes = runs.run_all(settings)
        print(report.summary(outcomes))
        print(_draw(settings, outcomes, path))
    except (runs.RunFailed, OSError) as error:
        print("python -m accum demo: {}".format(error), file=sys.stderr)
        return 1
    return 0


def _draw(settings, outcomes, path):
    if path is None:
        return "No loss curves: matplotlib is not installed. " + plot.REMEDY
    plot.draw(settings, outcomes, path)
    return "Loss curves: {}".format(path)
