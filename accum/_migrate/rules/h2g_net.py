"""H2G-Net's `accum_optimizers.py`, which is often copied into other projects."""

import libcst as cst

from accum._migrate.arguments import Arguments, NotUnderstood, wrapped
from accum._migrate.rules import Change, copied, unknown
from accum._migrate.values import is_none

WORDS = ("accum_optimizers", "AccumOptimizer", "AdamAccumulated")
MODULE = "accum_optimizers"

ACCUM = ("optimizer", "steps_per_update")
ADAM = ("accumulation_steps", "learning_rate", "beta_1", "beta_2", "epsilon", "amsgrad", "name")
NOTE_ACCUM = (
    "the step is now made on the last micro-batch of a cycle, and nothing changes in between. H2G-Net's "
    "`AccumOptimizer` makes it on the first micro-batch, and its momentum and moments change on every micro-batch"
)
NOTE_ADAM = (
    "`iterations` now counts steps, not micro-batches. `epsilon` is multiplied because H2G-Net divides gradients by "
    "the number of micro-batches twice"
)


def accum_optimizer(call, surroundings):
    """Rewrite `AccumOptimizer(optimizer, steps_per_update)`, which is for static graphs, like accum's."""
    surroundings.require_keras_of_tensorflow()
    for name in Arguments(call, ACCUM).names:
        if name not in ACCUM:
            raise NotUnderstood(
                f"`{name}` is not passed to the inner optimizer in H2G-Net. Pass it to the inner optimizer yourself"
            )

    def edit(call):
        arguments = Arguments(call, ACCUM).rename("steps_per_update", "accum_steps")
        return arguments.call("accum.compat.v1.AccumOptimizer")

    return Change(edit, ("import accum.compat.v1",), NOTE_ACCUM)


def adam_accumulated(call, surroundings):
    """Rewrite `AdamAccumulated(accumulation_steps, …)`, for static graphs if eager execution is disabled."""
    surroundings.require_keras_of_tensorflow()
    arguments = Arguments(call, ADAM)
    for name in arguments.names:
        if name not in ADAM + ("lr",):
            raise NotUnderstood(f"`{name}` acts on each micro-batch in that library, but on steps in accum")
    if "accumulation_steps" not in arguments.names or not is_simple(arguments.value("accumulation_steps")):
        raise NotUnderstood(
            "`accumulation_steps` is not a plain number or name, so `epsilon` can't be multiplied by it"
        )
    for name in ("learning_rate", "lr"):
        surroundings.require_constant_rate(arguments.value(name))
    if surroundings.is_graph_mode:
        edit = lambda call: _scaled(Arguments(call, ADAM)).call("accum.compat.v1.AdamAccumulated")
        return Change(edit, ("import accum.compat.v1",), NOTE_ADAM)
    arguments.require_no_comment("accumulation_steps")
    return _by_keras(surroundings)


def _by_keras(surroundings):
    tensorflow, needed = surroundings.tensorflow()

    def edit(call):
        steps = Arguments(call, ADAM).code("accumulation_steps")
        arguments = _scaled(Arguments(call, ADAM)).spell_out().drop("accumulation_steps").rename("lr", "learning_rate")
        inner = arguments.call(tensorflow + ".keras.optimizers.Adam")
        return wrapped(inner, "accum.GradientAccumulateOptimizer", "accum_steps=" + steps)

    return Change(edit, ("import accum",) + ((needed,) if needed else ()), NOTE_ADAM)


def _scaled(arguments):
    """Multiply `epsilon` by K, which makes the same updates because accum's gradients are K times larger."""
    steps = arguments.code("accumulation_steps")
    value = arguments.value("epsilon")
    is_given = value is not None and not is_none(value)
    epsilon = arguments.code("epsilon") if is_given else "1e-7"
    if is_given and not is_simple(value):
        epsilon = f"({epsilon})"
    return arguments.set("epsilon", f"{steps} * {epsilon}")


def is_simple(node):
    """Whether an expression can be a factor without brackets, and can be evaluated twice."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return isinstance(node, (cst.Name, cst.Integer, cst.Float)) and not is_none(node)


RULES = {"AccumOptimizer": accum_optimizer, "AdamAccumulated": adam_accumulated}
NAMES = tuple(RULES)


def rule(name):
    """Return the rule for a full name, or None."""
    parts = name.split(".")
    if parts[-1] == MODULE:  # the module itself is used as a value
        return unknown
    return RULES.get(parts[-1]) if parts[-2:-1] == [MODULE] else copied(name, NAMES)


def is_module(name):
    """Whether the module has names of this library, for star imports."""
    return name.split(".")[-1] == MODULE
