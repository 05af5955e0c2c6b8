"""Keras 3's own `gradient_accumulation_steps`, an argument of all its optimizers."""

import libcst as cst

from accum._migrate.arguments import Arguments, NotUnderstood, wrapped
from accum._migrate.rules import Change
from accum._migrate.values import is_none

ARGUMENT = "gradient_accumulation_steps"
LIBRARY = "Keras"
WORDS = (ARGUMENT,)
NAMES = ()
MODULES = ("keras.optimizers", "tensorflow.keras.optimizers")
# In all optimizers, the learning rate comes first, and the eighth argument may be `use_ema`, which is not supported.
PARAMETERS = ("learning_rate",) + ("",) * 6
SEEN_EACH_TIME = ("use_ema", "loss_scale_factor")


def optimizer(call, surroundings):
    """Rewrite a Keras optimizer with `gradient_accumulation_steps`. Returns None for one without."""
    surroundings.require_not_unpacked(call, ARGUMENT)
    if not any(arg.keyword and arg.keyword.value == ARGUMENT for arg in call.args):
        return None
    arguments = Arguments(call, PARAMETERS)
    if is_off(arguments.value(ARGUMENT)):
        return None
    if surroundings.other_backend:
        raise NotUnderstood("accum runs on TensorFlow, but this file selects another backend of Keras")
    surroundings.values.require_number(arguments.value(ARGUMENT))
    for name in SEEN_EACH_TIME:
        if arguments.value(name) is not None and arguments.code(name) not in ("False", "None"):
            raise NotUnderstood(f"`{name}` acts on each micro-batch in Keras 3, but on steps in accum")
    arguments.require_no_comment(ARGUMENT)
    surroundings.require_constant_rate(arguments.value("learning_rate"))

    def edit(call):
        steps = Arguments(call, PARAMETERS).code(ARGUMENT)
        inner = Arguments(call, PARAMETERS).drop(ARGUMENT)
        inner = inner.call(cst.Module([]).code_for_node(call.func))
        return wrapped(inner, "accum.GradientAccumulateOptimizer", "accum_steps=" + steps)

    return Change(edit, ("import accum",), keeps_name=True)


def is_off(value):
    """Whether nothing is accumulated with this value of the argument."""
    return is_none(value)


def is_home(name):
    """Whether a file that imports `name` may use this library."""
    return name.split(".")[0] in ("keras", "tensorflow")


def rule(name):
    """Return the rule for a full name, or None."""
    module, _, last = name.rpartition(".")
    is_class = last[:1].isupper() and last not in ("LossScaleOptimizer", "MultiOptimizer", "Optimizer")
    return optimizer if module in MODULES and is_class else None


def is_module(name):
    """Return False, because star imports do not matter: the argument accumulates, not the name."""
    return False
