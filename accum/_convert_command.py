"""`python -m accum convert`: its arguments, which `--help` shows without TensorFlow."""

DIRECTIONS = ("from-v1", "to-v1")


def add_parser(commands):
    """Add `convert` to the subparsers of the command line."""
    parser = commands.add_parser(
        "convert",
        help="turn a static graph's checkpoint into one of a Keras model, or back, in mid-cycle",
        description="Turn a checkpoint of tf.compat.v1.train.Saver into one of tf.train.Checkpoint(model=model, "
        "optimizer=optimizer), or back. Exit status: 0 when it is done; 1 when the two sides do not agree, which "
        "--lenient accepts; 2 when it can't be done.",
    )
    add = parser.add_argument
    add("direction", choices=DIRECTIONS, help="which way")
    add("source", help="prefix or folder of the checkpoint to read")
    add("target", help="prefix of the checkpoint to write")
    add("--model", required=True, metavar="MODULE:FUNCTION", help="function that returns (model, optimizer)")
    add("--names", metavar="FILE.json", help="object of the model's names to those of the static graph")
    add("--like", metavar="CHECKPOINT", help="to-v1: a checkpoint of the static graph, for its names")
    add("--lenient", action="store_true", help="go on where the sides do not agree, and say so")
    add("--overwrite", action="store_true", help="replace a checkpoint that is there")
    add("--dry-run", action="store_true", help="print what would become what; write nothing")
    add("--iterations", type=int, metavar="N", help="from-v1: steps made, where the checkpoint does not say it")
    add("--epsilon", type=float, metavar="E", help="that of the v1 optimizer")
    add("--micro-batch-weight", type=float, metavar="W", help="what a micro-batch weighs in the unit of the other side")
    add("--optimizer-name", metavar="NAME", help="the name given to the v1 optimizer")
    add("--accum-name", metavar="NAME", help="the name of the AccumOptimizer, where there are several")
    add("--ignore", nargs="*", default=(), metavar="NAME", help="from-v1: names or scopes that are not the model's")
    parser.set_defaults(perform=_perform)


def _perform(arguments):
    from accum.convert import command  # needs TensorFlow

    return command.perform(arguments)
