"""The arguments of the demo, checked before anything is trained."""

import argparse
import sys

from accum._cli import plot_file, requirements
from accum._cli.argument_types import at_least_one
from accum._cli.demo import plot, report
from accum._cli.demo.settings import Settings
from accum._migrate import pipes

DEFAULT_PLOT = "accum-demo.png"
MICRO_BATCH = 16


def add_parser(commands):
    """Add `demo` to the subparsers of the command line."""
    parser = commands.add_parser(
        "demo",
        help="train on handwritten digits with and without accumulation, and compare",
        description="Train a residual network with batch normalisation on handwritten digits three times from the same "
        "weights, on the same batches, at the same learning rate: in full, in micro-batches with `whole_batch`, and in "
        "micro-batches without it. On TensorFlow 1.15: a plain network, whose full batches are accumulated from "
        "micro-batches. Exit status: 0, or 1 if a run or its output fails.",
    )
    add = parser.add_argument
    add(
        "--micro-batch-size", type=at_least_one, metavar="M", help=f"examples computed at once (default: {MICRO_BATCH})"
    )
    add("--batch-size", type=at_least_one, default=256, metavar="N", help="examples per update (default: %(default)s)")
    add("--epochs", type=at_least_one, default=2, metavar="E", help="passes over the images (default: %(default)s)")
    add("--seed", type=_seed, default=0, metavar="S", help="seed for weights and data (default: %(default)s)")
    add("--plot", metavar="FILE.png", help=f"file for the loss curves; needs matplotlib (default: {DEFAULT_PLOT})")
    parser.set_defaults(
        perform=lambda arguments: _perform(parser, arguments), check=lambda arguments: _check(parser, arguments)
    )


def _seed(text):
    value = int(text)
    if not 0 <= value < 2**32:  # the range that NumPy accepts
        raise argparse.ArgumentTypeError(f"must be an int from 0 to 2**32 - 1. Received: {text}")
    return value


_seed.__name__ = "int"  # argparse says "invalid int value" by it


def _check(parser, arguments):
    """Check the arguments as far as that needs no TensorFlow, and fill in what was left out."""
    arguments.micro_batch_size = arguments.micro_batch_size or min(MICRO_BATCH, arguments.batch_size)
    if arguments.micro_batch_size > arguments.batch_size:
        numbers = f"{arguments.micro_batch_size} and {arguments.batch_size}"
        parser.error(f"--micro-batch-size must be at most --batch-size. Received: {numbers}.")
    if arguments.plot is None and plot_file.is_possible():
        arguments.plot = DEFAULT_PLOT
    if arguments.plot is not None:
        plot_file.check(parser, arguments.plot)


def _perform(parser, arguments):
    from accum import _tf  # needs TensorFlow; parsing the arguments does not
    from accum._cli.demo import runs

    numbers = arguments.batch_size, arguments.micro_batch_size
    is_graph, path = not _tf.version.HAS_KERAS_API, arguments.plot
    if is_graph and numbers[0] % numbers[1]:
        parser.error(
            "With TensorFlow 1.15, --batch-size must be divisible by --micro-batch-size. "
            f"Received: {numbers[0]} and {numbers[1]}."
        )
    settings = Settings(is_graph, *numbers, arguments.epochs, arguments.seed)
    try:
        outcomes = runs.run_all(settings)
        print(report.summary(outcomes, settings))
        print(_draw(settings, outcomes, path))
    except KeyboardInterrupt:
        print(file=sys.stderr)  # after the progress bar
        raise
    except (runs.RunFailed, OSError) as error:
        if isinstance(error, OSError) and pipes.is_reader_gone(error):
            raise  # of standard output; the command line handles it
        print(f"python -m accum demo: {error}", file=sys.stderr)
        _flush_or_discard()
        return 1
    return 0


def _flush_or_discard():
    """Write what waits for standard output; if that fails too, drop it, since one error has been reported."""
    try:
        print(end="", flush=True)
    except OSError:
        requirements.discard_output()


def _draw(settings, outcomes, path):
    if path is None:
        return "Loss curves were not drawn: matplotlib is not installed. " + plot_file.REMEDY
    plot.draw(settings, outcomes, path)
    return f"Loss curves: {path}"
