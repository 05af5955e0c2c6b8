"""`from_v1` and `to_v1`: everything is read and checked before anything is set or written."""

from accum import _check
from accum.convert import _names, _rules, _v1
from accum.convert._agreement import Given, check_agreement, require_rate
from accum.convert._keras import KerasRun
from accum.convert._reading import read_state
from accum.convert._report import Report
from accum.convert._writing import KnownLayout, NewLayout, Writing, names_of_weights


def from_v1(
    checkpoint_path,
    model,
    optimizer=None,
    names=None,
    strict=True,
    *,
    dry_run=False,
    iterations=None,
    epsilon=None,
    micro_batch_weight=None,
    optimizer_name=None,
    accum_name=None,
    ignore=(),
):
    """Let a Keras model and its optimizer go on with the run that a static graph's `Saver` has saved, in mid-cycle.

    Weights, the inner optimizer's slots, steps made, and what the unfinished cycle has accumulated are taken over, the
    slots by the arithmetic that leads to the same steps: v1's sum of gradients m becomes Keras' velocity
    -learning_rate * m, for one. The checkpoint holds no hyperparameters: give the optimizer those of the static graph.

    Args:
      checkpoint_path: prefix of a checkpoint of `tf.compat.v1.train.Saver`, or the folder in which it is the latest.
      model: a built Keras model, or a list of variables, all of them trained.
      optimizer: SGD, Adam, RMSprop or Adagrad of either Keras family, bare or in a `GradientAccumulateOptimizer`, which
        an unfinished cycle needs; None: that of the compiled model.
      names: dict {variable of the model: variable of the graph}, or a list of the graph's names in the order of
        `model.weights`. What it does not say is found by the same name, by tf-slim's name for it, or by the number of
        a layer among those of its kind. None for a name leaves that variable as it is. The keys "iterations",
        "beta1_power" and "beta2_power" say where the graph has its counters.
      strict: whether to refuse what does not agree on both sides or has no counterpart; False names it in the report.
      dry_run: only report, change nothing.
      iterations: the steps made, where the checkpoint does not say it or says it wrong (`count_micro_steps=True`).
      epsilon: that of the v1 optimizer; None: that of the Keras optimizer, wherever v1 has one.
      micro_batch_weight: what each micro-batch of the checkpoint weighs, in the unit of those to come, where it counted
        as 1 there: its number of examples, in a `GradientAccumulateModel`.
      optimizer_name: the `name` given to the v1 optimizer, if its slots are not found without.
      accum_name: the `name` of the `AccumOptimizer`, where the checkpoint has several.
      ignore: names, or scopes of variables in the checkpoint, that are not this model's.

    Returns:
      A `Report`.

    Raises:
      ConversionError: the checkpoint can't be read, or is not of this model and rule; nothing was changed.
      Disagreement: as `strict` says; nothing was changed.
    """
    run = KerasRun(model, optimizer)
    file = _v1.V1File(checkpoint_path)
    layout = _v1.Layout(file.shapes, names, optimizer_name, accum_name)
    mapped = _names.match(run.wanted, layout.weights(), _v1.of_variables(names))
    report = Report()
    given = Given(iterations, epsilon, _factor(micro_batch_weight), True)
    state = read_state(file, layout, run, mapped, given.iterations, report)
    report.problems += ["Nothing takes {}.".format(name) for name in layout.left(ignore)]
    check_agreement(run, state, given, report)
    converted = _for_keras(run, state, given)
    report.raise_if(strict)
    if not dry_run:
        run.set(converted)
    return report


def to_v1(
    model,
    path,
    optimizer=None,
    names=None,
    strict=True,
    *,
    like=None,
    dry_run=False,
    overwrite=False,
    epsilon=None,
    micro_batch_weight=None,
    optimizer_name=None,
    accum_name=None,
):
    """Write the run of a Keras model and its optimizer as a checkpoint that a static graph's `Saver` restores.

    Args:
      model, optimizer, strict, epsilon, optimizer_name: as for `from_v1`.
      path: prefix of the checkpoint to write, in an existing folder.
      names: as for `from_v1`; what it does not say is called as in the model, or as `like` has it.
      like: prefix or folder of a checkpoint of the static graph, whatever its values: its variables are those that are
        written, by its names. None: the names that `tf.compat.v1.train` and `AccumOptimizer` give outside of any scope.
      dry_run: only report, write nothing.
      overwrite: whether a checkpoint may stand at `path` already.
      micro_batch_weight: what the checkpoint's micro-batches weigh in the unit of the static graph, per unit of this
        side: 1 / examples, where a `GradientAccumulateModel` goes on as a graph that gives no `weight`.
      accum_name: the `name` of the graph's `AccumOptimizer`; None: as `like` has it, or "AccumOptimizer".

    Returns:
      A `Report`.

    Raises:
      ConversionError: the rule has no counterpart, `like` is of another model, or `path` can't be written to; nothing
        was written.
      Disagreement: as `strict` says; nothing was written.
    """
    run = KerasRun(model, optimizer)
    report = Report()
    given = Given(None, epsilon, _factor(micro_batch_weight), False)
    _v1.check_target(path, overwrite)
    file = None if like is None else _v1.V1File(like)
    mapped = names_of_weights(run, names, file, optimizer_name, accum_name)
    state, convention = _for_v1(run, given)
    rule = _rules.RULES[run.rule]
    if file is None:
        layout = NewLayout(rule, names, optimizer_name, accum_name)
    else:
        weights = [mapped[place] for place in run.trained if mapped[place] is not None]
        layout = KnownLayout(file, rule, names, optimizer_name, accum_name, weights)
    writing = Writing(run, state, mapped, layout, report)
    writing.weights()
    writing.slots(convention)
    writing.counters()
    writing.cycle()
    writing.rest()
    check_agreement(run, state, given, report)
    report.raise_if(strict)
    if not dry_run:
        _v1.write(path, writing.values)
    return report


def _for_keras(run, state, given):
    """The `RunState` by the conventions of the run's optimizer, from one by v1's."""
    convention = run.convention(state.iterations)
    require_rate(convention)
    converted = state.weighed_anew(given.micro_batch_weight or 1.0, run.reduction)
    for role in convention.slots:
        converted.slots[role] = {
            place: _rules.to_keras(role, value, convention) for place, value in state.slots[role].items()
        }
    return converted


def _for_v1(run, given):
    """The `RunState` by v1's conventions, and the `Convention` that the run's optimizer has."""
    state = run.read()
    convention = run.convention(state.iterations)
    require_rate(convention)
    converted = state.weighed_anew(given.micro_batch_weight or 1.0, run.reduction)
    for role, values in state.slots.items():
        converted.slots[role] = {
            place: _rules.to_v1(role, value, convention).astype(value.dtype) for place, value in values.items()
        }
    return converted, convention


def _factor(micro_batch_weight):
    return (
        micro_batch_weight if micro_batch_weight is None else _check.positive("micro_batch_weight", micro_batch_weight)
    )
