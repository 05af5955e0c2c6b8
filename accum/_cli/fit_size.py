"""`python -m accum fit-size`: measure the memory and time of each size of micro-batches on the user's own model."""

import sys

from accum._cli import named_function
from accum._cli.argument_types import at_least_one
from accum._cli.error_text import one_line
from accum._cli.named_function import Unusable

MIB = 2**20


def add_parser(commands):
    """Add `fit-size` to the subparsers of the command line."""
    parser = commands.add_parser(
        "fit-size",
        help="find the size of micro-batches that fits into memory and is fastest",
        description="Measure the peak memory and the time of one batch with micro-batches of 1, 2, 4, ... examples. "
        "No weight is changed. Exit status: 0 if a size fits, 1 if none does, 2 if it cannot be measured.",
    )
    parser.add_argument(
        "function",
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns (model, x, y) or (model, dataset), with a compiled model; "
        + named_function.HELP,
    )
    parser.add_argument(
        "--batch-size",
        type=at_least_one,
        default=32,
        metavar="N",
        help="examples in a batch of x and y (default: 32); a dataset has its own",
    )
    parser.add_argument(
        "--memory-limit",
        type=at_least_one,
        metavar="MIB",
        help="MiB that training may use (default: nine tenths of what the device or the process has)",
    )
    parser.set_defaults(perform=_perform, check=lambda arguments: named_function.check(arguments.function))


def _perform(arguments):
    limit = None if arguments.memory_limit is None else arguments.memory_limit * MIB
    try:
        model, batch = _model_and_batch(arguments.function, arguments.batch_size)
        try:
            from accum.testing._sizes import measured_sizes

            rows = measured_sizes(model, batch, limit)
        except Exception as error:
            raise Unusable(f"the batch could not be measured: {one_line(error)}.") from error
    except Unusable as error:
        print(f"python -m accum fit-size: {error}", file=sys.stderr)
        return 2
    return _print(rows)


def _model_and_batch(named, batch_size):
    """Call the user's function. Returns a compiled model, and a batch as `fit` gives it to a train step."""
    returned = named_function.called(named)
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise Unusable(f"{named} must return (model, x, y) or (model, dataset). Received: {type(returned).__name__}.")
    if getattr(returned[0], "optimizer", None) is None:
        raise Unusable(f"{named} must return a compiled model. Received: {returned[0]!r}.")
    from accum._tf import tf

    dataset = returned[1]
    if len(returned) == 3:
        # Several arrays are one structure; a list would become a tensor
        parts = tuple(tuple(part) if isinstance(part, list) else part for part in returned[1:])
        dataset = tf.data.Dataset.from_tensor_slices(parts).batch(batch_size)
    return returned[0], next(iter(dataset))


def _print(rows):
    """Print the table. Returns the exit status."""
    print("| size | peak, MiB | ms per example | |")
    print("|---|---|---|---|")
    for row in rows:
        peak = f"{row.peak / MIB:,.0f}" if row.seconds is not None else f"about {row.peak / MIB:,.0f}"
        time = "" if row.seconds is None else f"{1000 * row.seconds:.3f}"
        print(f"| {row.size} | {peak} | {time} | {'' if row.fits else 'exceeds the limit'} |")
    limit = f"{rows[0].limit / MIB:,.0f} MiB of {rows[0].memory} may be used."
    fitting = [row for row in rows if row.fits and row.seconds is not None]
    if not fitting:
        print(f"{limit} Not even one example at a time fits.")
        return 1
    fastest = min(fitting, key=lambda row: row.seconds)
    print(f"{limit} The fastest size that fits: micro_batch_size={fastest.size}")
    return 0
