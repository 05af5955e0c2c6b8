"""The arguments of `python -m accum convert`; `--help` shows them without TensorFlow."""

import os

from accum._cli import named_function

DIRECTIONS = ("from-v1", "to-v1")


def add_parser(commands):
    """Add `convert` to the subparsers of the command line."""
    parser = commands.add_parser(
        "convert",
        help="convert a static graph's checkpoint into one of a Keras model, or back",
        description="Convert a checkpoint of tf.compat.v1.train.Saver into one of tf.train.Checkpoint(model=model, "
        "optimizer=optimizer), or back. An unfinished cycle is converted too. Exit status: 0 on success; 1 if the two "
        "sides disagree in a way that --lenient accepts; 2 if the conversion is impossible.",
    )
    add = parser.add_argument
    add("direction", choices=DIRECTIONS, help="the direction of the conversion")
    add("source", help="prefix or folder of the checkpoint to read")
    add("target", help="prefix of the checkpoint to write")
    add(
        "--model",
        required=True,
        metavar=named_function.METAVAR,
        help="function that returns (model, optimizer); " + named_function.HELP,
    )
    add(
        "--names",
        metavar="FILE.json",
        help="JSON object that maps names in the model to names in the static graph, or a list of the latter",
    )
    add(
        "--proposal",
        metavar="FILE.json",
        help="where names don't match, write the proposal here, to be checked and passed back with --names",
    )
    add("--like", metavar="CHECKPOINT", help="to-v1: a checkpoint of the static graph that has the names to write")
    add("--lenient", action="store_true", help="continue if the two sides disagree, and report it")
    add("--overwrite", action="store_true", help="replace an existing checkpoint")
    add("--dry-run", action="store_true", help="print the planned mapping and write nothing")
    add("--iterations", type=int, metavar="N", help="from-v1: number of steps made, if the checkpoint does not hold it")
    add("--epsilon", type=float, metavar="E", help="epsilon of the v1 optimizer")
    add("--micro-batch-weight", type=float, metavar="W", help="weight of a micro-batch in the unit of the target")
    add("--optimizer-name", metavar="NAME", help="the name given to the v1 optimizer")
    add("--accum-name", metavar="NAME", help="the name of the AccumOptimizer, if there are several")
    add(
        "--ignore",
        nargs="*",
        default=(),
        metavar="NAME",
        help="from-v1: names, scopes or patterns that do not belong to the model, such as "
        "'*/ExponentialMovingAverage' (in quotes, so that the shell leaves it alone)",
    )
    parser.set_defaults(perform=_perform, check=_check)


def _check(arguments):
    if arguments.names is not None and not os.path.isfile(arguments.names):
        return f"there is no file {arguments.names}."
    return named_function.check(arguments.model)


def _perform(arguments):
    from accum._cli.convert import run  # needs TensorFlow

    return run.perform(arguments)
