"""Where the two sides differ in more than how they keep the same thing."""

from collections import namedtuple

from accum.convert import _rules
from accum.convert._report import ConversionError

Given = namedtuple("Given", ["iterations", "epsilon", "micro_batch_weight", "is_to_keras"])
Given.__doc__ = """What the user said of the other side, None for nothing, and which way the run goes."""


def check_agreement(run, state, given, report):
    """Put into `report` what does not agree, and what cannot be known.

    Args:
      run: the `KerasRun`.
      state: the `RunState`, by v1's conventions.
      given: a `Given`.
      report: the `Report`.
    """
    convention = run.convention(state.iterations)
    report.iterations, report.micro_step = state.iterations, state.micro_step
    report.problems += run.without_counterpart(not given.is_to_keras)
    _check_rate(convention, report)
    _check_epsilon(convention, state, given, report)
    if state.micro_step:
        _check_cycle(run, state, given, report)
    if run.has_loss_scale:
        report.notes.append("The scale of the loss is not converted: it is found anew.")
    v1_class = _rules.RULES[run.rule].v1_class
    report.notes.append(
        "A `Saver`'s checkpoint holds no hyperparameters: {} and {} must have the same.".format(
            type(run.inner).__name__, v1_class
        )
    )


def _check_rate(convention, report):
    if not _rules.uses_rate(convention):
        return
    if convention.is_scheduled:
        report.problems.append(
            "The learning rate follows a schedule. v1 multiplies its whole sum of gradients by the rate of the step, "
            "Keras each gradient by the rate of its own: they agree while the rate stands still. Taken: {:g}.".format(
                convention.rate
            )
        )


def require_rate(convention):
    """Raise where the arithmetic would multiply or divide by a learning rate that is none."""
    if _rules.uses_rate(convention) and not convention.rate > 0.0:
        raise ConversionError(
            "The momentum can't be converted at the learning rate {:g}: Keras keeps it multiplied by the rate of the "
            "step that comes, v1 without. Set that rate first.".format(convention.rate)
        )


def _check_epsilon(convention, state, given, report):
    default = _rules.V1_EPSILONS.get(convention.rule)
    if given.epsilon is not None and default is None:
        raise ConversionError("v1's {} has no epsilon.".format(_rules.RULES[convention.rule].v1_class))
    epsilon = convention.epsilon if given.epsilon is None else given.epsilon
    sides = _rules.formulas(convention)
    if sides is not None:
        second = state.slots.get("accumulator") or state.slots.get("rms") or {}
        deviation = _rules.largest_deviation(convention, list(second.values()), epsilon)
        report.problems.append(
            "Epsilon stands elsewhere: v1 moves by {}, Keras by {}. With the slots as they are, the next step differs "
            "by up to {:.1e} of itself.".format(sides[0], sides[1], deviation)
        )
    if default is None:
        return
    if given.epsilon is None:
        report.notes.append(
            "Epsilon is {:g} here, and taken to be so in the static graph, where {:g} is the default.".format(
                convention.epsilon, default
            )
        )
    elif given.epsilon != convention.epsilon:
        report.problems.append("Epsilon is {:g} in v1, {:g} in Keras.".format(given.epsilon, convention.epsilon))


def _check_cycle(run, state, given, report):
    report.notes.append(
        "{} micro steps of a cycle are made, accumulated by reduction={!r} on both sides; it ends after the "
        "`accum_steps` of the side that goes on.".format(state.micro_step, run.reduction)
    )
    if given.micro_batch_weight is not None:
        return
    is_counted = abs(state.weight_sum - state.micro_step) < 1e-6
    if given.is_to_keras and is_counted and run.weighs_by_examples:
        report.problems.append(
            "The micro-batches of the checkpoint weigh 1 each, those to come will weigh their number of examples: "
            "`micro_batch_weight=` says the examples of one."
        )
    if not given.is_to_keras and not is_counted:
        report.problems.append(
            "The micro-batches weigh {:g} each, not 1: the static graph has to give `weight` in the same unit "
            "(then `micro_batch_weight=1`), or say its unit here (1 / examples).".format(
                state.weight_sum / state.micro_step
            )
        )
