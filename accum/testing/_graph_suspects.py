"""Find the parts of a static graph that can make micro-batches differ from the full batch."""

from typing import Any, List

from accum._tf import tf
from accum.testing._order import unordered_variables
from accum.testing._report import EqualityReport, Suspect

RANDOM = ("Random", "TruncatedNormal", "Multinomial", "StatefulUniform", "StatefulStandardNormal", "ParameterizedTrunc")
GATHERS = ("Gather", "ResourceGather")
VARIABLES = ("VarHandleOp", "Variable", "VariableV2")


def suspects_in(whole: Any, parts: Any, report: EqualityReport, rounded: List[str]) -> List[Suspect]:
    """Return the `Suspect`s for a divergence of the train op `parts` of micro-batches from `whole` of full batches.

    `rounded` are the diverged variables that are as far off if only the order of the examples changes.
    """
    suspects = []
    off = {deviation.variable for deviation in report.diverged}
    ops = whole.graph.get_operations()
    is_random = any(op.type.startswith(RANDOM) and "initializer" not in op.name.lower() for op in ops)
    if rounded and not is_random:  # random numbers go by the place of an example
        suspects.append(
            Suspect(
                f"rounding, in {', '.join(f'`{name}`' for name in rounded)}",
                "the full batch with its examples in another order ends about as far off. A gradient may be zero but "
                "for rounding, as that of the bias of attention's keys, and Adam divides rounding by rounding",
                "Leave such variables out by `trainable=False`, or check with an optimizer that does not divide, such "
                "as `GradientDescentOptimizer`; in training they do no harm",
            )
        )
        if off == set(rounded):
            return suspects
    if "global_step" in off:
        suspects.append(
            Suspect(
                "`global_step`",
                "it counts micro-batches, so schedules run `accum_steps` times too fast",
                "Pass `count_steps=True` to the `AccumOptimizer`, and leave out the code that adds 1 in each run",
            )
        )
    names = unordered_variables(whole)
    if names:
        suspects.append(
            Suspect(
                "the full batch itself",
                f"it reads and changes these variables in no fixed order: {names}",
                'Pass `baseline="ordered"`',
            )
        )
    is_clipped = any("clip_by_" in op.name for op in ops)
    if is_clipped and any(map(_looks_up_rows, ops)):
        suspects.append(
            Suspect(
                "clipping over an embedding",
                "an id repeats in the full batch, which takes the slices of its row one by one for the norm",
                "Call `accum.testing.sum_duplicate_rows` on the gradients before they are clipped; and clip in "
                "`transform=`, which acts on the accumulated gradient",
            )
        )
    elif is_clipped:
        suspects.append(
            Suspect(
                "clipping",
                "clipping before the `AccumOptimizer` acts on each micro-batch",
                "Clip in `transform=`, which acts on the accumulated gradient",
            )
        )
    if parts.graph.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS):
        suspects.append(
            Suspect(
                "ops in UPDATE_OPS",
                "they run with each micro-batch",
                "Call `accumulate_update_ops` of the `AccumOptimizer` before creating the train op",
            )
        )
    if is_random:
        suspects.append(
            Suspect(
                "random ops, such as dropout",
                "they draw new numbers for each micro-batch",
                "Build the graph without them for the check; in training they do no harm",
            )
        )
    suspects.append(
        Suspect(
            "the loss",
            "it may be a mean over something else than examples, or depend on several of them together, as batch "
            "normalisation does",
            "Pass what it counts as `weight=`, or several losses by `minimize([losses], weight=[counts])`, or split "
            "the batch by `accum.compat.v1.value_and_gradients`",
        )
    )
    return suspects


def _looks_up_rows(op: tf.Operation) -> bool:
    """Whether an op gathers rows of a variable, as an embedding does."""
    if not op.type.startswith(GATHERS):
        return False
    source = op.inputs[0].op
    while source.type in ("Identity", "ReadVariableOp"):
        source = source.inputs[0].op
    return source.type in VARIABLES
