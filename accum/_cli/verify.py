"""`python -m accum verify`: compare accumulation with the full batch on the user's own model."""

import sys

from accum._cli import named_function
from accum._cli.argument_types import at_least_one
from accum._cli.compare.command import positive
from accum._cli.error_text import one_line
from accum._cli.named_function import Unusable
from accum.testing._equality import assert_accumulation_equals_full_batch

REQUIRED = ("build_model", "data", "accum_steps")
OVERRIDING = ("accum_steps", "micro_batch_size", "whole_batch", "batch_size", "steps", "tolerance")


def add_parser(commands):
    """Add `verify` to the subparsers of the command line."""
    parser = commands.add_parser(
        "verify",
        help="check that your model trains on micro-batches as on the full batch",
        description="Train a model on full batches and on their micro-batches, and compare the weights step by step. "
        "Exit status: 0 if they agree, 1 if they diverge, 2 if the check cannot be run.",
    )
    add = parser.add_argument
    add(
        "function",
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns (build_model, data), (build_model, data, accum_steps), or a "
        "dict of arguments for `accum.testing.assert_accumulation_equals_full_batch`; " + named_function.HELP,
    )
    add("--accum-steps", type=at_least_one, metavar="K", help="micro-batches per step (default: the function's)")
    add(
        "--micro-batch-size",
        type=at_least_one,
        metavar="M",
        help="examples per micro-batch, into which the model splits each batch; instead of --accum-steps",
    )
    add(
        "--whole-batch",
        choices=("batch_norm", "loss", "all"),
        help="what the model computes over the whole batch, as its option `whole_batch`",
    )
    add(
        "--batch-size",
        type=at_least_one,
        metavar="N",
        help="as in `fit`: examples per micro-batch with accum_steps, per full batch with micro_batch_size (default: "
        "the function's)",
    )
    add("--steps", type=at_least_one, metavar="S", help="steps to compare (default: the function's, or 3)")
    add("--tolerance", type=positive, metavar="T", help="tolerance (default: the function's, or 2e-6)")
    parser.set_defaults(perform=_perform, check=lambda arguments: named_function.check(arguments.function))


def _perform(arguments):
    passed = {name: getattr(arguments, name) for name in OVERRIDING if getattr(arguments, name) is not None}
    try:
        options = _arguments_of(arguments.function)
        if {"accum_steps", "micro_batch_size"} & set(passed):  # what is passed replaces the other one too
            options = {
                name: value for name, value in options.items() if name not in ("accum_steps", "micro_batch_size")
            }
        options.update(passed)
        print(_checked(options, arguments.function))
    except AssertionError as error:
        print(error)
        return 1
    except Unusable as error:
        print(f"python -m accum verify: {error}", file=sys.stderr)
        return 2
    return 0


def _arguments_of(named):
    options = named_function.called(named)
    if isinstance(options, tuple) and len(options) in (2, 3):
        options = dict(zip(REQUIRED, options))
    if not isinstance(options, dict) or not set(REQUIRED[:2]) <= set(options):
        raise Unusable(
            f"{named} must return (build_model, data), (build_model, data, accum_steps), or a dict of arguments. "
            f"Received: {type(options).__name__}."
        )
    return dict(options)


def _checked(options, named):
    """Run the check. Returns the report.

    Raises:
      AssertionError: the runs diverge.
      Unusable: the check failed.
    """
    if not {"accum_steps", "micro_batch_size"} & set(options):
        raise Unusable(f"{named} returned no accum_steps. Pass --accum-steps or --micro-batch-size.")
    try:
        return assert_accumulation_equals_full_batch(**options)
    except AssertionError as error:
        if hasattr(error, "report"):
            raise
        raise Unusable(f"the check failed: {one_line(error)}.") from error
    except (Exception, SystemExit) as error:
        raise Unusable(f"the check failed: {one_line(error)}.") from error
