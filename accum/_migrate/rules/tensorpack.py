"""tensorpack's `AccumGradOptimizer`."""

from accum._migrate.arguments import Arguments, NotUnderstood
from accum._migrate.rules import Change, copied

WORDS = ("AccumGradOptimizer",)
PARAMETERS = ("opt", "niter")
PACKAGE = "tensorpack"
HOLDERS = ("tensorpack", "tensorpack.tfutils", "tensorpack.tfutils.optimizer")
NAMES = ("AccumGradOptimizer",)


def accum_grad_optimizer(call, surroundings):
    """It sums, and `global_step` counts micro-batches: both are said, so that both stay."""
    if sorted(Arguments(call, PARAMETERS).names) != sorted(PARAMETERS):
        raise NotUnderstood("it takes `opt` and `niter`")

    def edit(call):
        arguments = Arguments(call, PARAMETERS).rename("opt", "optimizer").rename("niter", "accum_steps")
        arguments.set("reduction", '"sum"').set("count_micro_steps", "True")
        return arguments.call("accum.compat.v1.AccumOptimizer")

    return Change(edit, ("import accum.compat.v1",))


def rule(name):
    """The rule for a full name, or None."""
    parts = name.split(".")
    is_theirs = parts[0] == PACKAGE and parts[-1] == "AccumGradOptimizer" and len(parts) > 1
    return accum_grad_optimizer if is_theirs else copied(name, NAMES)


def is_module(name):
    """Whether names of this library come from the module, for star imports."""
    return name.split(".")[0] == PACKAGE
