"""`from_v1` and `to_v1`. They read and check everything before they set or write anything."""

from typing import Any, Dict, List, Optional, Sequence, Union

from accum import _check
from accum.convert import _rules, _v1
from accum.convert._compatibility import ConversionOptions, check_compatibility, in_unit_of, require_rate
from accum.convert._keras import KerasRun
from accum.convert._reading import read_state
from accum.convert._report import Report
from accum.convert._writing import KnownLayout, NewLayout, Writing, names_in_checkpoint, names_of_weights


def from_v1(
    checkpoint_path: str,
    model: Any,
    optimizer: Any = None,
    names: Optional[Union[Dict[str, Optional[str]], List[Optional[str]], None]] = None,
    strict: bool = True,
    *,
    dry_run: bool = False,
    iterations: Optional[int] = None,
    epsilon: Optional[float] = None,
    micro_batch_weight: Optional[float] = None,
    optimizer_name: Optional[str] = None,
    accum_name: Optional[str] = None,
    ignore: Sequence[str] = (),
) -> Report:
    """Continue in Keras a run that the `Saver` of a static graph has saved, even in the middle of a cycle.

    The model and optimizer receive the weights, the inner optimizer's slots, the number of steps, and what the
    unfinished cycle has accumulated. Slots are converted so that the following steps are the same: for instance, v1's
    sum of gradients m becomes Keras' velocity -learning_rate * m. The checkpoint holds no hyperparameters, so give the
    optimizer those of the static graph.

    Args:
      checkpoint_path: prefix of a checkpoint of `tf.compat.v1.train.Saver`, or a folder, whose latest one is read.
      model: a built Keras model, or a list of variables, all of them trainable.
      optimizer: SGD, Adam, RMSprop or Adagrad of either Keras family, alone or in a `GradientAccumulateOptimizer`. An
        unfinished cycle needs the latter. None: the optimizer of the compiled model.
      names: dict {variable of the model: variable of the graph}, or a list of the graph's names in the order of
        `model.weights`. Other variables are matched by the same name, by tf-slim's name for the same thing, or by the
        position of a layer among those of its kind. A variable with the name None stays unchanged. A variable that is
        named here may have another shape, if its values are those of a dense layer transposed, or the same values with
        dimensions split or merged. The keys "iterations", "beta1_power" and "beta2_power" name the counters of the
        graph. If names don't match, the error's `proposal` is what could be passed here.
      strict: whether a disagreement between the two sides, or a variable without a counterpart, raises an error; if
        False, the report lists it.
      dry_run: whether only to report, and change nothing.
      iterations: the number of steps made, if the checkpoint does not hold it or counts micro steps
        (`count_micro_steps=True`).
      epsilon: epsilon of the v1 optimizer; None: the same as in the Keras optimizer.
      micro_batch_weight: the weight of each micro-batch in the checkpoint, in the unit of the micro-batches to come, if
        it counted as 1 there. In a `GradientAccumulateModel` it is the number of examples.
      optimizer_name: the `name` given to the v1 optimizer, if its slots are not found otherwise.
      accum_name: the `name` of the `AccumOptimizer`, if the checkpoint has several.
      ignore: variables in the checkpoint that do not belong to this model: names, scopes, or patterns such as
        `"*/ExponentialMovingAverage"`.

    Returns:
      A `Report`.

    Raises:
      ConversionError: the checkpoint can't be read, or does not fit this model and rule; nothing was changed.
      Disagreement: see `strict`; nothing was changed.
    """
    run = KerasRun(model, optimizer)
    file = _v1.V1File(checkpoint_path)
    layout = _v1.Layout(file.shapes, names, optimizer_name, accum_name, ignore)
    mapped = names_in_checkpoint(run, names, file, layout)
    report = Report()
    options = ConversionOptions(iterations, epsilon, _factor(micro_batch_weight), True)
    state = read_state(file, layout, run, mapped, options.iterations, report)
    report.problems += [f"{name} has no counterpart." for name in layout.left()]
    check_compatibility(run, state, options, report)
    converted = _for_keras(run, state, options)
    report.raise_if(strict)
    if not dry_run:
        run.set(converted)
    return report


def to_v1(
    model: Any,
    path: str,
    optimizer: Any = None,
    names: Optional[Union[Dict[str, Optional[str]], List[Optional[str]], None]] = None,
    strict: bool = True,
    *,
    like: Optional[str] = None,
    dry_run: bool = False,
    overwrite: bool = False,
    epsilon: Optional[float] = None,
    micro_batch_weight: Optional[float] = None,
    optimizer_name: Optional[str] = None,
    accum_name: Optional[str] = None,
) -> Report:
    """Write a run of a Keras model and its optimizer as a checkpoint that the `Saver` of a static graph restores.

    Args:
      model, optimizer, strict, epsilon, optimizer_name: as for `from_v1`.
      path: prefix of the checkpoint to write, in an existing folder.
      names: as for `from_v1`. Other variables are named as in `like`, or else as in the model.
      like: prefix or folder of any checkpoint of the static graph. It determines which variables are written, and their
        names; its values do not matter. None: the names that `tf.compat.v1.train` and `AccumOptimizer` give outside any
        scope.
      dry_run: whether only to report, and write nothing.
      overwrite: whether to replace an existing checkpoint at `path`.
      micro_batch_weight: the factor from weights of micro-batches on this side to those in the static graph: 1 /
        examples if a `GradientAccumulateModel` continues in a graph that passes no `weight`. None: taken from the
        unfinished cycle of `like`, if there is one.
      accum_name: the `name` of the graph's `AccumOptimizer`; None: the one in `like`, or "AccumOptimizer".

    Returns:
      A `Report`.

    Raises:
      ConversionError: the rule has no counterpart, `like` belongs to another model, or `path` can't be written to;
        nothing was written.
      Disagreement: see `strict`; nothing was written.
    """
    run = KerasRun(model, optimizer)
    report = Report()
    options = ConversionOptions(None, epsilon, _factor(micro_batch_weight), False)
    _v1.check_target(path, overwrite)
    file = None if like is None else _v1.V1File(like)
    mapped = names_of_weights(run, names, file, optimizer_name, accum_name)
    rule = _rules.RULES[run.rule]
    if file is None:
        layout: Any = NewLayout(rule, names, optimizer_name, accum_name)
    else:
        weights = [mapped[index] for index in run.trained if mapped[index] is not None]
        layout = KnownLayout(file, rule, names, optimizer_name, accum_name, weights)
    state = run.read()
    options = in_unit_of(layout, state, options, report)
    state, convention = _for_v1(run, state, options)
    writing = Writing(run, state, mapped, layout, report)
    writing.weights()
    writing.slots(convention)
    writing.averages()
    writing.counters()
    writing.cycle()
    writing.rest()
    check_compatibility(run, state, options, report, writing.rows_there())
    report.raise_if(strict)
    if not dry_run:
        _v1.write(path, writing.values)
    return report


def _for_keras(run, state, options):
    """Convert a `RunState` from v1's conventions to those of the run's optimizer."""
    convention = run.convention(state.iterations)
    require_rate(convention)
    converted = state.reweighted(options.micro_batch_weight or 1.0, run.reduction)
    for role in convention.slots:
        converted.slots[role] = {
            index: _rules.to_keras(role, value, convention) for index, value in state.slots[role].items()
        }
    return converted


def _for_v1(run, state, options):
    """Return the `RunState` in v1's conventions, and the `Convention` of the run's optimizer."""
    convention = run.convention(state.iterations)
    require_rate(convention)
    converted = state.reweighted(options.micro_batch_weight or 1.0, run.reduction)
    for role, values in state.slots.items():
        converted.slots[role] = {
            index: _rules.to_v1(role, value, convention).astype(value.dtype) for index, value in values.items()
        }
    return converted, convention


def _factor(micro_batch_weight):
    return (
        micro_batch_weight if micro_batch_weight is None else _check.positive("micro_batch_weight", micro_batch_weight)
    )
