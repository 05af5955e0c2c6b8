"""Keras 3's own `gradient_accumulation_steps`, an argument of each of its optimizers."""

import libcst as cst

from accum._migrate.arguments import Arguments, NotUnderstood, wrapped
from accum._migrate.rules import Change
from accum._migrate.values import is_none

ARGUMENT = "gradient_accumulation_steps"
LIBRARY = "Keras"
WORDS = (ARGUMENT,)
NAMES = ()
MODULES = ("keras.optimizers", "tensorflow.keras.optimizers")
# More positional ones are not understood: the learning rate comes first in all of them, `use_ema` at the eighth place.
PARAMETERS = ("learning_rate",) + ("",) * 6
SEEN_EACH_TIME = ("use_ema", "loss_scale_factor")


def optimizer(call, surroundings):
    """A Keras optimizer, maybe with `gradient_accumulation_steps`. Returns None for one without."""
    surroundings.require_not_unpacked(call, ARGUMENT)
    if not any(arg.keyword and arg.keyword.value == ARGUMENT for arg in call.args):
        return None
    arguments = Arguments(call, PARAMETERS)
    if is_off(arguments.value(ARGUMENT)):
        return None
    if surroundings.other_backend:
        raise NotUnderstood("accum runs on TensorFlow, but this file asks for another backend of Keras")
    surroundings.values.require_number(arguments.value(ARGUMENT))
    for name in SEEN_EACH_TIME:
        if arguments.value(name) is not None and arguments.code(name) not in ("False", "None"):
            raise NotUnderstood(f"`{name}` acts on each micro-batch in Keras 3, and on steps in accum")
    arguments.require_no_comment(ARGUMENT)
    surroundings.require_constant_rate(arguments.value("learning_rate"))

    def edit(call):
        steps = Arguments(call, PARAMETERS).code(ARGUMENT)
        inner = Arguments(call, PARAMETERS).drop(ARGUMENT)
        inner = inner.call(cst.Module([]).code_for_node(call.func))
        return wrapped(inner, "accum.GradientAccumulateOptimizer", "accum_steps=" + steps)

    return Change(edit, ("import accum",), keeps_name=True)


def is_off(value):
    """Whether the argument's value says that nothing is accumulated."""
    return is_none(value)


def is_home(name):
    """Whether an import of `name` makes a file one that may use this library."""
    return name.split(".")[0] in ("keras", "tensorflow")


def rule(name):
    """The rule for a full name, or None."""
    module, _, last = name.rpartition(".")
    is_class = last[:1].isupper() and last not in ("LossScaleOptimizer", "MultiOptimizer", "Optimizer")
    return optimizer if module in MODULES and is_class else None


def is_module(name):
    """Star imports do not matter: it is the argument that accumulates, not the name."""
    return False
