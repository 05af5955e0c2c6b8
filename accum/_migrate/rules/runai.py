"""Run:AI's `runai.ga`, up to 0.4.1."""

import functools

from accum._migrate.arguments import Arguments, NotUnderstood, wrapped
from accum._migrate.rules import Change, unknown

WORDS = ("runai",)
MODULE = "runai.ga.keras.optimizers"
HOLDERS = ("runai", "runai.ga", "runai.ga.keras")

# The others have different defaults or update rules in tf.keras than in the Keras 2 on which Run:AI builds them.
SAME_IN_TF_KERAS = ("SGD", "RMSprop", "Adam")
OTHERS = ("Adagrad", "Adadelta", "Adamax", "Nadam")
ON_EACH = ("clipnorm", "clipvalue")
NOTE = "the inner optimizer now clips once, on the accumulated gradient; with Run:AI it clips each micro-batch"


def wrap(call, surroundings):
    """Rewrite `Optimizer(optimizer, steps)`."""
    surroundings.require_keras_of_tensorflow()
    arguments = Arguments(call, ("optimizer", "steps"))
    if sorted(arguments.names) != ["optimizer", "steps"]:
        raise NotUnderstood("it must have an optimizer and `steps`")

    def edit(call):
        arguments = Arguments(call, ("optimizer", "steps")).rename("steps", "accum_steps")
        return arguments.call("accum.GradientAccumulateOptimizer")

    return Change(edit, ("import accum",), NOTE)


def made(name, call, surroundings):
    """Rewrite one of the optimizers that Run:AI wraps itself, such as `Adam(steps, …)`."""
    surroundings.require_keras_of_tensorflow()
    arguments = Arguments(call, ("steps",))
    _require_same_rule(arguments)
    arguments.require_no_comment("steps")
    tensorflow, needed = surroundings.tensorflow()

    def edit(call):
        steps = Arguments(call, ("steps",)).code("steps")
        arguments = Arguments(call, ("steps",)).drop("steps").rename("lr", "learning_rate")
        inner = arguments.call(f"{tensorflow}.keras.optimizers.{name}")
        return wrapped(inner, "accum.GradientAccumulateOptimizer", "accum_steps=" + steps)

    return Change(edit, ("import accum",) + ((needed,) if needed else ()))


def _require_same_rule(arguments):
    for name in arguments.names:
        if name in ON_EACH:
            raise NotUnderstood(
                f"`{name}` clips each micro-batch in that library, but the accumulated gradient in accum"
            )
    if "steps" not in arguments.names:
        raise NotUnderstood("it must have `steps`")
    if "decay" in arguments.names:
        raise NotUnderstood(
            "newer optimizers have no `decay`. Instead use a schedule, which counts steps, as `decay` did"
        )


def other(call, surroundings):
    """Report an optimizer that is not the same in tf.keras."""
    raise NotUnderstood(
        "in tf.keras this optimizer has other defaults than in the Keras 2 that Run:AI wraps. Pass all its arguments"
    )


RULES = {"Optimizer": wrap}
RULES.update((name, functools.partial(made, name)) for name in SAME_IN_TF_KERAS)
RULES.update((name, other) for name in OTHERS)
NAMES = tuple(RULES)


def rule(name):
    """Return the rule for a full name, or None."""
    module, _, last = name.rpartition(".")
    if name.startswith("runai.elastic.keras."):  # accumulates if the global batch is larger than the devices can take
        return unknown
    return RULES.get(last, unknown) if MODULE in (module, name) else None


def is_module(name):
    """Whether the module has names of this library, for star imports."""
    return name == MODULE or name in HOLDERS
