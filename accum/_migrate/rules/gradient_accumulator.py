"""GradientAccumulator 0.3 to 0.5 (the package gradient-accumulator)."""

from accum._migrate.arguments import Arguments, NotUnderstood
from accum._migrate.rules import Change, copied, unknown

CLASSES = ("GradientAccumulateModel", "GradientAccumulateOptimizer", "GAModelWrapper", "GAOptimizerWrapper")
WORDS = ("gradient_accumulator",) + CLASSES
PACKAGE = "gradient_accumulator"

MODEL = ("accum_steps", "mixed_precision", "use_agc", "clip_factor", "eps")
OPTIMIZER = ("optimizer", "accum_steps", "reduction", "name")
LAYER = ("accum_steps", "momentum", "epsilon", "trainable")
NOTE_MODEL = (
    "GradientAccumulator continues an unfinished cycle in the next epoch, and gives every micro-batch the same weight. "
    "The arguments `last_cycle` and `micro_batch_weight` preserve that. Without them, ragged batches and the end of an "
    "epoch are exact"
)
NOTE_OPTIMIZER = (
    "the inner optimizer now runs once per cycle, clips, and counts steps. In 0.3 and 0.4 it counted micro-batches, in "
    "0.5 it ran on zeros between steps, and it never clipped. So results with momentum, Adam, schedules and clipping "
    "change"
)
NOTE_LAYER = (
    "the moving variance is now that of the full batch (in 0.5 it lacks the variance between micro-batches). In 0.4 "
    "the default was `momentum=0.9`, which you must now pass"
)


def model(call, surroundings):
    """Rewrite `GradientAccumulateModel` and `GAModelWrapper`."""
    _old_names(Arguments(call, MODEL))

    def edit(call):
        arguments = Arguments(call, MODEL)
        for old, new in RENAMED:
            arguments.rename(old, new)
        arguments.set("last_cycle", '"carry"').set("micro_batch_weight", '"equal"')
        return arguments.call("accum.GradientAccumulateModel")

    return Change(edit, ("import accum",), NOTE_MODEL)


RENAMED = [("n_gradients", "accum_steps"), ("use_acg", "use_agc")]


def _old_names(arguments):
    for name in ("use_agc", "use_acg", "agc"):
        if arguments.value(name) is not None and arguments.code(name) != "False":
            raise NotUnderstood(
                "GradientAccumulator clips the gradient of each micro-batch, but `use_agc=True` of "
                "`accum.GradientAccumulateModel` clips the accumulated gradient"
            )
    if "accum_steps" in arguments.names and "n_gradients" in arguments.names:
        raise NotUnderstood("`n_gradients` and `accum_steps` are two names for the same argument")


def optimizer(call, surroundings):
    """Rewrite `GradientAccumulateOptimizer`, whose default `accum_steps` and "SUM" differ between versions."""
    arguments = Arguments(call, OPTIMIZER)
    _only(arguments, OPTIMIZER)
    if "accum_steps" not in arguments.names:
        raise NotUnderstood(
            "`accum_steps` was 4 by default in 0.3.1 and is 1 in later versions. Write the number that you want"
        )
    if "reduction" in arguments.names and arguments.code("reduction").strip("\"'") != "MEAN":
        raise NotUnderstood(
            'up to 0.4, any `reduction` but "MEAN" is a sum; 0.5 always takes the mean. Choose what you '
            'had: `accum.GradientAccumulateOptimizer(…, reduction="sum")` or "mean"'
        )
    return Change(_edit_optimizer, ("import accum",), NOTE_OPTIMIZER)


def wrapper(call, surroundings):
    """Rewrite `GAOptimizerWrapper` of 0.3.0, whose defaults are 4 micro-batches and the mean."""
    arguments = Arguments(call, OPTIMIZER)
    _only(arguments, OPTIMIZER + ("n_gradients",))
    reduction = arguments.code("reduction") if "reduction" in arguments.names else '"MEAN"'
    if reduction.strip("\"'") not in ("MEAN", "SUM"):
        raise NotUnderstood(
            f'any `reduction` but "MEAN" is a sum in that version, and the value of `{reduction}` is not known'
        )
    return Change(_edit_optimizer, ("import accum",), NOTE_OPTIMIZER)


def _edit_optimizer(call):
    arguments = Arguments(call, OPTIMIZER).rename("n_gradients", "accum_steps")
    if "accum_steps" not in arguments.names:
        arguments.set("accum_steps", "4")
    return arguments.call("accum.GradientAccumulateOptimizer")


def _only(arguments, names):
    for name in arguments.names:
        if name not in names:
            raise NotUnderstood(
                f"`{name}` is not an argument of accum's optimizer. Pass it to the inner optimizer if it belongs there"
            )


def layer(call, surroundings):
    """Rewrite `AccumBatchNormalization`, whose positional arguments are in another order than in Keras' layer."""
    if "accum_steps" not in Arguments(call, LAYER).names:
        raise NotUnderstood("in 0.3, `AccumBatchNormalization` has no `accum_steps`. Write the number that you want")
    edit = lambda call: Arguments(call, LAYER).spell_out().call("accum.AccumBatchNormalization")
    return Change(edit, ("import accum",), NOTE_LAYER)


def same(name):
    """Create a rule for a function that has the same name and arguments in accum."""
    edit = lambda call: call.with_changes(func=Arguments(call, ("",) * 9).call("accum." + name).func)
    return lambda call, surroundings: Change(edit, ("import accum",))


RULES = {
    "GradientAccumulateModel": model,
    "GAModelWrapper": model,
    "GradientAccumulateOptimizer": optimizer,
    "GAOptimizerWrapper": wrapper,
    "AccumBatchNormalization": layer,
}
RULES.update((name, same(name)) for name in ("replace_batchnorm_layers", "adaptive_clip_grad", "unitwise_norm"))
RULES["compute_norm"] = same("compute_norm")
NAMES = tuple(RULES)


def rule(name):
    """Return the rule for a full name, or None."""
    parts = name.split(".")
    if parts[0] == PACKAGE:
        return RULES.get(parts[-1], unknown)
    return copied(name, CLASSES)


def is_module(name):
    """Whether the module has names of this library, for star imports."""
    return name.split(".")[0] == PACKAGE
