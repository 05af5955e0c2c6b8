"""bojone's `accum_optimizer.py`, for Keras 2.2: as run there."""

from accum._migrate.arguments import Arguments
from accum._migrate.rules import Change, require_known, unknown

MODULE = "accum_optimizer"
WORDS = (MODULE,)
NAMES = ("AccumOptimizer",)
PARAMETERS = ("optimizer", "steps_per_update")
NOTE = (
    "a step is now made on the last micro-batch of a cycle, and nothing moves in between. bojone's `AccumOptimizer` "
    "makes it on the first micro-batch of the next cycle, and SGD moves by its velocity on all others: with momentum, "
    "multiply the learning rate of SGD by K to go as far. Adam keeps its learning rate"
)


def accum_optimizer(call, surroundings):
    """`AccumOptimizer(optimizer, steps_per_update)`."""
    require_known(Arguments(call, PARAMETERS), PARAMETERS)
    package = "accum.compat.v1" if surroundings.is_graph_mode else "accum"
    name = "AccumOptimizer" if surroundings.is_graph_mode else "GradientAccumulateOptimizer"

    def edit(call):
        arguments = Arguments(call, PARAMETERS).rename("steps_per_update", "accum_steps")
        return arguments.call(f"{package}.{name}")

    return Change(edit, ("import " + package,), NOTE)


def rule(name):
    """The rule for a full name, or None."""
    parts = name.split(".")
    if parts[-1] == MODULE:  # the module itself, passed on
        return unknown
    return accum_optimizer if parts[-2:] == [MODULE, "AccumOptimizer"] else None


def is_module(name):
    """Whether names of this library come from the module, for star imports."""
    return name.split(".")[-1] == MODULE
