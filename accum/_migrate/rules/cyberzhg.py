"""CyberZHG's keras-gradient-accumulation 0.0.7 for Keras 2.2."""

from accum._migrate.arguments import Arguments, NotUnderstood
from accum._migrate.rules import Change, h2g_net, require_known, unknown

PACKAGE = "keras_gradient_accumulation"
WORDS = (PACKAGE,)
WRAPPER = ("optimizer", "accumulation_steps", "momentum_names")
NOTE_WRAPPER = (
    "SGD now makes its step at once; keras-gradient-accumulation spreads it over the next K micro-batches. That "
    "library also divides gradients by K twice, so multiply the `epsilon` of Adam or RMSprop by K for the same "
    "updates. Its inner optimizer never clips; now `clipnorm` and `clipvalue` act on the accumulated gradient"
)
NOTE_ADAM = h2g_net.NOTE_ADAM.replace("H2G-Net", "keras-gradient-accumulation")


def wrapper(call, surroundings):
    """Rewrite `GradientAccumulation(optimizer, accumulation_steps)`, whose `momentum_names` are not needed in accum."""
    surroundings.require_keras_of_tensorflow()
    arguments = Arguments(call, WRAPPER)
    require_known(arguments, WRAPPER)
    if "accumulation_steps" not in arguments.names:
        raise NotUnderstood("it must have an optimizer and `accumulation_steps`")
    arguments.require_no_comment("momentum_names")

    def edit(call):
        arguments = Arguments(call, WRAPPER).drop("momentum_names").rename("accumulation_steps", "accum_steps")
        return arguments.call("accum.GradientAccumulateOptimizer")

    return Change(edit, ("import accum",), NOTE_WRAPPER)


def adam_accumulated(call, surroundings):
    """Rewrite `AdamAccumulated`. H2G-Net copied it, with the same arguments and update rule."""
    return h2g_net.adam_accumulated(call, surroundings)._replace(note=NOTE_ADAM)


RULES = {"GradientAccumulation": wrapper, "AdamAccumulated": adam_accumulated}
NAMES = tuple(RULES)


def rule(name):
    """Return the rule for a full name, or None."""
    parts = name.split(".")
    is_keras = parts[1:2] == ["backend"]  # Keras itself, under a name of this package
    return RULES.get(parts[-1], unknown) if parts[0] == PACKAGE and not is_keras else None


def is_module(name):
    """Whether the module has names of this library, for star imports."""
    return name.split(".")[0] == PACKAGE
