"""Horovod's `backward_passes_per_step`: found and reported, never rewritten."""

from accum._migrate.arguments import NotUnderstood

ARGUMENT = "backward_passes_per_step"
WORDS = (ARGUMENT,)
NAMES = ()


def distributed_optimizer(call, surroundings):
    """Not for a tool: the reduction over workers has to go to another place in the program."""
    given = [arg for arg in call.args if arg.keyword and arg.keyword.value == ARGUMENT]
    if not given or getattr(given[0].value, "value", None) == "1":
        return None
    raise NotUnderstood("workers have to be reduced once a step, by `transform=`: see docs/migrating.md, Horovod")


def rule(name):
    """The rule for a full name, or None."""
    parts = name.split(".")
    return distributed_optimizer if parts[0] == "horovod" and parts[-1] == "DistributedOptimizer" else None


def is_module(name):
    """Star imports do not matter: it is the argument that accumulates, not the name."""
    return False
