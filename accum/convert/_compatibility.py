"""Find disagreements between the two sides that no conversion can resolve."""

from typing import NamedTuple, Optional

from accum import _tf
from accum.convert import _rules
from accum.convert._report import ConversionError

OF_ROWS = ("momentum", "rmsprop", "centered rmsprop")
"""The rules that v1 applies only to touched rows. With Adam, all rows decay on both sides."""

ROWS = _tf.optimizer_state.WITH_ROWS and _tf.optimizer_state.WITH_ROWS[0].upper() + _tf.optimizer_state.WITH_ROWS[1:]


class ConversionOptions(NamedTuple):
    """What the user passed about the other side (None: nothing), and the direction of the conversion."""

    iterations: Optional[int]
    epsilon: Optional[float]
    micro_batch_weight: Optional[float]
    is_to_keras: bool


def check_compatibility(run, state, options, report, rows_there=None):
    """Add disagreements to `report`, and notes on things that cannot be checked.

    Args:
      run: the `KerasRun`.
      state: the `RunState` in v1's conventions.
      options: a `ConversionOptions`.
      report: the `Report`.
      rows_there: {index: whether its gradient is sparse in the static graph}, if known from a source other than
        `state`.
    """
    convention = run.convention(state.iterations)
    report.iterations, report.micro_step = state.iterations, state.micro_step
    report.problems += run.without_counterpart(not options.is_to_keras, bool(state.averages))
    _check_rate(convention, report)
    _check_epsilon(convention, state, options, report)
    _check_rows(run, state.sparse, {**state.sparse, **(rows_there or {})}, report)
    if state.micro_step:
        _check_cycle(run, state, options, report)
    if run.has_loss_scale:
        report.notes.append("The loss scale is not converted. It restarts from its initial value.")
    v1_class = _rules.RULES[run.rule].v1_class
    report.notes.append(
        f"A `Saver`'s checkpoint holds no hyperparameters. Give {type(run.inner).__name__} and {v1_class} the same "
        "ones."
    )


def _check_rate(convention, report):
    if not _rules.uses_rate(convention):
        return
    if convention.is_scheduled:
        report.problems.append(
            "The learning rate follows a schedule. v1 multiplies its whole sum of gradients by the current rate; Keras "
            "multiplies each gradient by the rate of its own step. They agree only while the rate is constant. The "
            f"rate used for the conversion is {convention.rate:g}."
        )


def require_rate(convention):
    """Raise if the arithmetic would multiply or divide by a learning rate that is not positive."""
    if _rules.uses_rate(convention) and not convention.rate > 0.0:
        raise ConversionError(
            f"The momentum can't be converted with a learning rate of {convention.rate:g}: Keras stores it multiplied "
            "by the learning rate of the next step, and v1 without that factor. Set that rate first."
        )


def _check_epsilon(convention, state, options, report):
    default = _rules.V1_EPSILONS.get(convention.rule)
    if options.epsilon is not None and default is None:
        raise ConversionError(f"v1's {_rules.RULES[convention.rule].v1_class} has no epsilon.")
    epsilon = convention.epsilon if options.epsilon is None else options.epsilon
    sides = _rules.formulas(convention)
    if sides is not None:
        second = state.slots.get("accumulator") or state.slots.get("rms") or {}
        deviation = _rules.largest_deviation(convention, list(second.values()), epsilon)
        report.problems.append(
            f"Epsilon is in another place: v1 moves by {sides[0]}, Keras by {sides[1]}. With the current slots, the "
            f"next step differs by a relative error of up to {deviation:.1e}."
        )
    if default is None:
        return
    if options.epsilon is None:
        report.notes.append(
            f"Epsilon is {convention.epsilon:g} in Keras, and assumed to be the same in the static graph, where the "
            f"default is {default:g}. Pass `epsilon=` if it differs."
        )
    elif options.epsilon != convention.epsilon:
        report.problems.append(f"Epsilon is {options.epsilon:g} in v1, but {convention.epsilon:g} in Keras.")


def _check_rows(run, here, there, report):
    """Report the variables whose sparse gradients move different rows on the two sides.

    Args:
      run: the `KerasRun`.
      here, there: {index: whether its gradients are sparse}, in Keras and in the static graph, if known.
      report: the `Report`.
    """
    if run.rule not in OF_ROWS:
        return
    moved_here = {index for index in run.trained if here.get(index, there.get(index)) and run.moves_touched_rows_only()}
    moved_there = {index for index in run.trained if there.get(index)}
    classes = _rules.RULES[run.rule].v1_class, type(run.inner).__name__
    lost, gained = (
        [run.name(index) for index in sorted(variables)]
        for variables in (moved_there - moved_here, moved_here - moved_there)
    )
    if lost:
        report.problems.append(
            "{} have sparse gradients. v1's {} moves only the rows that a step touches, but with this {} all rows "
            'decay and move. {} with `sparse="rows"` moves only the touched rows, like v1.'.format(
                lost, *(classes + (ROWS,))
            )
        )
    if gained:
        report.problems.append(
            "{} have dense gradients in the static graph, where v1's {} moves every row, and sparse ones here, where "
            'this {} moves only the rows that a step touches: pass `sparse="dense"` to the wrapper.'.format(
                gained, *classes
            )
        )
    if not run.moves_touched_rows_only() and any(index not in there for index in run.trained):
        report.notes.append(
            "It is not known whether the gradients of some variables are sparse. If they are, v1's {} and this {} "
            "update different rows.".format(*classes)
        )


def in_unit_of(layout, state, options, report):
    """Return `options`, completed with the weight of micro-batches in the unfinished cycle of `like`, if any."""
    theirs = layout.weight_of_micro_batches()
    if options.micro_batch_weight is not None or theirs is None or not state.micro_step:
        return options
    ours = state.weight_sum / state.micro_step
    factor = 1.0
    if _is_one(ours) != _is_one(theirs):
        factor = 1.0 / ours if _is_one(theirs) else theirs
    report.notes.append(
        f"The micro-batches of `like` have a weight of {theirs:g} each, and those here of {ours:g}, so the conversion "
        f"uses `micro_batch_weight={factor:g}`."
    )
    return options._replace(micro_batch_weight=factor)


def _is_one(weight):
    return abs(weight - 1.0) < 1e-6


def _check_cycle(run, state, options, report):
    report.notes.append(
        f"The unfinished cycle has {state.micro_step} micro steps, assumed to be accumulated with "
        f"reduction={run.reduction!r} on both sides. It ends after the `accum_steps` of the side that continues."
    )
    if options.micro_batch_weight is not None:
        return
    is_counted = _is_one(state.weight_sum / state.micro_step)
    if options.is_to_keras and is_counted and run.weighs_by_examples:
        report.problems.append(
            "The micro-batches of the checkpoint have a weight of 1 each, but the next ones will be weighted by their "
            "number of examples. Pass the number of examples in one micro-batch as `micro_batch_weight=`."
        )
    if not options.is_to_keras and not is_counted:
        report.problems.append(
            f"The micro-batches have a weight of {state.weight_sum / state.micro_step:g} each, not 1. If the static "
            "graph passes `weight` in the same unit, pass `micro_batch_weight=1`; if it passes none, 1 / examples."
        )
