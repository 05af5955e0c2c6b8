"""StyleGAN2's `dnnlib.tflib.Optimizer(minibatch_multiplier=…)`: found and reported, never rewritten."""

from accum._migrate import guide
from accum._migrate.arguments import NotUnderstood
from accum._migrate.values import is_none

ARGUMENT = "minibatch_multiplier"
LIBRARY = "StyleGAN2's dnnlib"
WORDS = (ARGUMENT,)
NAMES = ()
MODULES = ("dnnlib", "tflib")
NEEDS_ITS_IMPORT = True
"""Other libraries use the name of the argument too, so nothing is reported unless this one is imported."""

REASON = (
    "it makes its steps with `register_gradients` and `apply_updates`, which a single call can't replace; "
    + guide.see("StyleGAN2")
)
MADE = REASON


def optimizer(call, surroundings):
    """Report every call that accumulates: gradients are registered for each GPU, and applied somewhere else."""
    passed = [arg for arg in call.args if arg.keyword and arg.keyword.value == ARGUMENT]
    if passed and is_off(passed[0].value):
        return None
    if passed or any(arg.star for arg in call.args):
        raise NotUnderstood(REASON)
    return None


def is_off(value):
    """Whether nothing is accumulated with this value of the argument."""
    return is_none(value)


def is_home(name):
    """Whether a file that imports `name` may use this library."""
    return any(part in MODULES for part in name.split("."))


def rule(name):
    """Return the rule for a full name, or None."""
    return optimizer if name.endswith(("tflib.Optimizer", "tflib.optimizer.Optimizer")) else None


def is_module(name):
    """Return False, because star imports do not matter: the argument accumulates, not the name."""
    return False
