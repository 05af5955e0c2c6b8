"""Horovod's `backward_passes_per_step`: found and reported, never rewritten."""

from accum._migrate.arguments import NotUnderstood

ARGUMENT = "backward_passes_per_step"
LIBRARY = "Horovod"
WORDS = (ARGUMENT,)
NAMES = ()
OTHERS = ("torch", "mxnet")


def distributed_optimizer(call, surroundings):
    """Not for a tool: the reduction over workers has to go to another place in the program."""
    surroundings.require_not_unpacked(call, ARGUMENT)
    given = [arg for arg in call.args if arg.keyword and arg.keyword.value == ARGUMENT]
    if not given or is_off(given[0].value):
        return None
    raise NotUnderstood("workers have to be reduced once a step, by `transform=`: see docs/migrating.md, Horovod")


def is_off(value):
    """Whether the argument's value says that nothing is accumulated."""
    return getattr(value, "value", None) == "1"


def is_home(name):
    """Whether an import of `name` makes a file one that may use this library."""
    parts = name.split(".")
    return parts[0] == "horovod" and not any(part in OTHERS for part in parts[1:2])


def rule(name):
    """The rule for a full name, or None."""
    return distributed_optimizer if is_home(name) and name.endswith(".DistributedOptimizer") else None


def is_module(name):
    """Star imports do not matter: it is the argument that accumulates, not the name."""
    return False
