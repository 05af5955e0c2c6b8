"""tensorpack's `AccumGradOptimizer`."""

from typing import Tuple

from accum._migrate.arguments import Arguments, NotUnderstood
from accum._migrate.rules import Change, copied

WORDS = ("AccumGradOptimizer",)
PARAMETERS = ("opt", "niter")
PACKAGE = "tensorpack"
HOLDERS = ("tensorpack", "tensorpack.tfutils", "tensorpack.tfutils.optimizer")
NAMES = ("AccumGradOptimizer",)

# Trainers that call `apply_gradients` of one optimizer once per GPU or variable. In tensorpack each call has its own
# counter of micro-batches.
PER_TOWER: Tuple[str, ...] = (
    "SyncMultiGPUTrainerReplicated",
    "AsyncMultiGPUTrainer",
    "DistributedTrainerReplicated",
    "SyncMultiGPUReplicatedBuilder",
    "AsyncMultiGPUBuilder",
    "DistributedReplicatedBuilder",
)

NOTE = (
    "steps are now made on micro-batches K, 2K, 3K, … tensorpack reads its counter before advancing it. So with "
    "TensorFlow 1's ref variables, it makes steps on micro-batches 1, K + 1, 2K + 1, …, and the first from a single "
    f"gradient. Trainers that call the optimizer once per GPU ({', '.join(PER_TOWER[:3])}) can't be used with accum"
)


def accum_grad_optimizer(call, surroundings):
    """Rewrite `AccumGradOptimizer(opt, niter)`, which sums gradients and lets `global_step` count micro-batches."""
    if sorted(Arguments(call, PARAMETERS).names) != sorted(PARAMETERS):
        raise NotUnderstood("it must have `opt` and `niter`")
    for trainer in PER_TOWER:
        if trainer in surroundings.clues:
            raise NotUnderstood(
                f"`{trainer}` ({surroundings.clues[trainer]}) calls one optimizer once per GPU, but an optimizer "
                "of accum takes one list of variables. Use `SyncMultiGPUTrainerParameterServer`; or, if that trainer "
                "belongs to another program, migrate this file alone"
            )

    def edit(call):
        arguments = Arguments(call, PARAMETERS).rename("opt", "optimizer").rename("niter", "accum_steps")
        arguments.set("reduction", '"sum"').set("count_micro_steps", "True")
        return arguments.call("accum.compat.v1.AccumOptimizer")

    return Change(edit, ("import accum.compat.v1",), NOTE)


def rule(name):
    """Return the rule for a full name, or None."""
    parts = name.split(".")
    is_theirs = parts[0] == PACKAGE and parts[-1] == "AccumGradOptimizer" and len(parts) > 1
    return accum_grad_optimizer if is_theirs else copied(name, NAMES)


def is_module(name):
    """Whether the module has names of this library, for star imports."""
    return name.split(".")[0] == PACKAGE
