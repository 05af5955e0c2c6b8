"""alexeydevederkin's `AdamAccumulate` for Keras 2.2. It accumulates exactly, except for what raises an error here."""

from accum._migrate.arguments import Arguments, NotUnderstood, wrapped
from accum._migrate.rules import Change, copied, require_known, unknown
from accum._migrate.values import is_none

WORDS = ("AdamAccumulate",)
NAMES = ("AdamAccumulate",)
MODULES = ("adam_accumulate", "AdamAccumulate")
PARAMETERS = ("lr", "beta_1", "beta_2", "epsilon", "decay", "amsgrad", "accum_iters")


def adam_accumulate(call, surroundings):
    """Rewrite `AdamAccumulate(lr, …, accum_iters)`. It takes the mean of all micro-batches, and counts steps."""
    surroundings.require_keras_of_tensorflow()
    arguments = Arguments(call, PARAMETERS)
    require_known(arguments, PARAMETERS)
    if "accum_iters" not in arguments.names:
        raise NotUnderstood("the default of `accum_iters` is 1, and 2 in some copies. Write the number that you want")
    if "decay" in arguments.names and arguments.code("decay") not in ("0", "0.", "0.0"):
        raise NotUnderstood(
            "newer optimizers have no `decay`. Instead use a schedule, which counts steps, as `decay` did"
        )
    for name in ("accum_iters", "decay", "epsilon"):
        arguments.require_no_comment(name)
    tensorflow, needed = surroundings.tensorflow()

    def edit(call):
        steps = Arguments(call, PARAMETERS).code("accum_iters")
        arguments = Arguments(call, PARAMETERS).spell_out().drop("accum_iters").drop("decay")
        if arguments.value("epsilon") is not None and is_none(arguments.value("epsilon")):
            arguments.drop("epsilon")
        inner = arguments.rename("lr", "learning_rate").call(tensorflow + ".keras.optimizers.Adam")
        return wrapped(inner, "accum.GradientAccumulateOptimizer", "accum_steps=" + steps)

    return Change(edit, ("import accum",) + ((needed,) if needed else ()))


def rule(name):
    """Return the rule for a full name, or None."""
    parts = name.split(".")
    if parts[-2:-1] and parts[-2] in MODULES:
        return adam_accumulate if parts[-1] == "AdamAccumulate" else unknown
    return copied(name, NAMES)


def is_module(name):
    """Whether the module has names of this library, for star imports."""
    return name.split(".")[-1] in MODULES
