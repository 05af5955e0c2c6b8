"""bojone's `accum_optimizer.py` for Keras 2.2."""

from accum._migrate.arguments import Arguments
from accum._migrate.rules import Change, require_known, unknown

MODULE = "accum_optimizer"
WORDS = (MODULE,)
NAMES = ("AccumOptimizer",)
PARAMETERS = ("optimizer", "steps_per_update")
NOTE = (
    "the step is now made on the last micro-batch of a cycle, and nothing changes in between. bojone's "
    "`AccumOptimizer` makes it on the first micro-batch of the next cycle, and on all others SGD still moves by its "
    "velocity. So multiply the learning rate of SGD with momentum by K to move as far. Keep that of Adam"
)


def accum_optimizer(call, surroundings):
    """Rewrite `AccumOptimizer(optimizer, steps_per_update)`."""
    surroundings.require_keras_of_tensorflow()
    require_known(Arguments(call, PARAMETERS), PARAMETERS)
    package = "accum.compat.v1" if surroundings.is_graph_mode else "accum"
    name = "AccumOptimizer" if surroundings.is_graph_mode else "GradientAccumulateOptimizer"

    def edit(call):
        arguments = Arguments(call, PARAMETERS).rename("steps_per_update", "accum_steps")
        return arguments.call(f"{package}.{name}")

    return Change(edit, ("import " + package,), NOTE)


def rule(name):
    """Return the rule for a full name, or None."""
    parts = name.split(".")
    if parts[-1] == MODULE:  # the module itself is used as a value
        return unknown
    return accum_optimizer if parts[-2:] == [MODULE, "AccumOptimizer"] else None


def is_module(name):
    """Whether the module has names of this library, for star imports."""
    return name.split(".")[-1] == MODULE
