"""Horovod's `backward_passes_per_step`: found and reported, never rewritten."""

import libcst as cst
from libcst import matchers

from accum._migrate import guide
from accum._migrate.arguments import NotUnderstood, last_name

ARGUMENT = "backward_passes_per_step"
LIBRARY = "Horovod"
WORDS = (ARGUMENT,)
NAMES = ()
OURS = ("tensorflow", "keras", "_keras")
OTHERS = ("torch", "mxnet")
WRAPS = ("DistributedOptimizer", "DistributedAdasumOptimizer", "DistributedGradientTape")
REASON = "reduce over workers once per step, with `transform=`; " + guide.see("Horovod")
BESIDE = (
    "it reduces every micro-batch over the workers. Remove it where an optimizer accumulates, and reduce once "
    "per step with `transform=`; " + guide.see("Horovod")
)


def distributed_optimizer(call, surroundings):
    """Report every call that accumulates: the reduction over workers must move to another place in the program."""
    surroundings.require_not_unpacked(call, ARGUMENT)
    passed = [arg for arg in call.args if arg.keyword and arg.keyword.value == ARGUMENT]
    if not passed or is_off(passed[0].value):
        return None
    raise NotUnderstood(REASON)


def wraps(uses):
    """Yield (call, name) for Horovod's wrappers of optimizers and tapes, imported or accessed through `hvd`."""
    for call in matchers.findall(uses.module, matchers.Call()):
        if last_name(call.func) in WRAPS and _is_theirs(uses, call.func):
            yield call, uses.code(call.func)


def _is_theirs(uses, function):
    names = uses.names(function) - {""}
    if names:
        return any(map(is_home, names))
    return isinstance(function, cst.Attribute) and last_name(function.value) == "hvd"


def is_off(value):
    """Whether nothing is accumulated with this value of the argument."""
    return getattr(value, "value", None) == "1"


def is_home(name):
    """Whether a file that imports `name` may use this library."""
    parts = name.split(".")
    is_ours = len(parts) == 1 or any(part in OURS for part in parts)
    return parts[0] == "horovod" and is_ours and not any(part in OTHERS for part in parts)


def rule(name):
    """Return the rule for a full name, or None."""
    return distributed_optimizer if is_home(name) and name.endswith(".DistributedOptimizer") else None


def is_module(name):
    """Return False, because star imports do not matter: the argument accumulates, not the name."""
    return False
