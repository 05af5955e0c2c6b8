"""A `RunState` out of a `Saver`'s checkpoint."""

import math

import numpy as np

from accum.convert import _rules
from accum.convert._report import ConversionError
from accum.convert._rules import RULES
from accum.convert._state import Norm, RunState


class Reading:
    """What turns a checkpoint into a `RunState` that Keras can take, noting each variable in a report.

    Args:
      file: the `V1File`.
      layout: its `Layout`.
      run: the `KerasRun` that will take it.
      mapped: for each variable of the run, its name in the checkpoint or None.
      report: the `Report`.
    """

    def __init__(self, file, layout, run, mapped, report):
        self._file = file
        self._layout = layout
        self._run = run
        self._mapped = mapped
        self._report = report
        self._trained = [place for place in run.trained if mapped[place] is not None]

    def weights(self):
        """{place: array}, in the dtype of the model."""
        left = [self._run.name(place) for place, name in enumerate(self._mapped) if name is None]
        if left:
            self._report.problems.append("Left as they are, with what belongs to them: {}.".format(left))
        return {
            place: self._take(name, self._run.name(place), self._run.dtype(place))
            for place, name in enumerate(self._mapped)
            if name is not None
        }

    def slots(self, convention):
        """{role: {place: array}}, by v1's conventions."""
        rule = RULES[self._run.rule]
        if not rule.slots:
            return {}
        weights = [self._mapped[place] for place in self._trained]
        slot_name = self._layout.slot_name(rule, weights)
        found = {place: self._layout.slots(self._mapped[place], slot_name) for place in self._trained}
        self._check_slots(rule, slot_name, found)
        result = {}
        for number, role in enumerate(rule.slots):
            names = {place: listed[number] for place, listed in found.items() if listed}
            result[role] = {place: self._slot(place, name, role, convention) for place, name in names.items()}
        return result

    def _slot(self, place, name, role, convention):
        value = self._file.value(name)
        if role in convention.slots:
            target = "{}/{}".format(self._run.name(place), role)
            self._report.add(name, target, value, _rules.arithmetic(role, convention, True))
        else:
            self._report.notes.append("{} is left out: without momentum, nothing reads it.".format(name))
        return value

    def _check_slots(self, rule, slot_name, found):
        counts = {len(names) for names in found.values()}
        if counts - {0, len(rule.slots)} or counts == {0}:
            raise ConversionError(
                "The optimizer has the rule of v1's {}, which keeps {} for each variable. The checkpoint has {} under "
                "the name {!r}: is it of another rule, or of an optimizer with a name of its own "
                "(`optimizer_name=`)?".format(
                    rule.v1_class, list(rule.slots), sum(found.values(), []) or "none", slot_name
                )
            )
        for place, names in found.items():
            if not names:
                self._report.problems.append(
                    "{} has no slots in the checkpoint, so it was not trained there; those here stay.".format(
                        self._run.name(place)
                    )
                )
            for name in names:
                self._layout.take(name)

    def iterations(self, given):
        """The steps made: as was said, by the graph's clock, or by Adam's powers."""
        name = self._layout.counter("iterations")
        clock = None if name is None else int(self._file.value(self._layout.take(name)))
        by_powers = self._steps_by_powers() if self._run.rule == "adam" else None
        steps = next((value for value in (given, clock, by_powers) if value is not None), None)
        if steps is None:
            raise ConversionError("The checkpoint has no `global_step`: say by `iterations=` how many steps were made.")
        source = name if given is None and clock is not None else "(iterations)"
        self._report.add(source, "iterations", np.int64(steps))
        return steps

    def _steps_by_powers(self):
        """The steps by which v1's Adam corrects its bias, or None where its powers do not tell."""
        steps = None
        for name, beta in zip(("beta1_power", "beta2_power"), self._run.betas):
            found = self._layout.counter(name)
            if found is None:
                raise ConversionError("The checkpoint has no {}, which v1's Adam keeps.".format(name))
            power = float(self._file.value(self._layout.take(found)))
            if 1e-30 < power < 1.0:
                steps = int(round(math.log(power) / math.log(float(np.float32(beta))))) - 1
        return steps

    def check_powers(self, steps):
        """Keras corrects Adam's bias by `iterations`, v1 by powers that it multiplies up: they must say the same."""
        for name, beta in zip(("beta1_power", "beta2_power"), self._run.betas):
            power = float(self._file.value(self._layout.counter(name)))
            self._report.add(
                self._layout.counter(name), "iterations", np.float32(power), "{:g} ** (t + 1)".format(beta)
            )
            if _rules.power_disagrees(power, beta, steps):
                self._report.problems.append(
                    "{} is {:g}, and {:g} ** (t + 1) with t = {} is {:g}: Keras has one clock for the bias "
                    "correction and the schedule. Another beta, or a `global_step` that counts something else "
                    "(`iterations=` says the steps)?".format(name, power, beta, steps, _rules.powers([beta], steps)[0])
                )

    def cycle(self, state):
        """Read what the unfinished cycle has accumulated into `state`."""
        layout = self._layout
        if layout.accum_name is None:
            return
        micro_step, weight_sum = (layout.take(layout.of_cycle(name)) for name in ("micro_step", "weight_sum"))
        made = int(self._file.value(micro_step))
        is_taken = made > 0 and self._run.accumulates
        self._read_sums(state, is_taken)
        self._read_moments(state, made, is_taken)
        if made and not is_taken:
            self._report.problems.append(
                "An unfinished cycle of {} micro steps is left out: `GradientAccumulateOptimizer(optimizer, "
                "accum_steps)` would go on with it.".format(made)
            )
        if is_taken:
            state.micro_step, state.weight_sum = made, float(self._file.value(weight_sum))
            self._report.add(micro_step, "micro_step", np.int64(made))
            self._report.add(weight_sum, "weight_sum", np.float32(state.weight_sum))

    def _read_sums(self, state, is_taken):
        found = {place: self._beside(place, "accum") for place in self._trained}
        lacking = [self._run.name(place) for place, name in found.items() if name is None]
        if lacking and len(lacking) < len(found):
            self._report.problems.append("{} had no gradient there, and no accumulator.".format(lacking))
        for place, name in found.items():
            rows = self._beside(place, "accum_rows")
            for taken in (name, rows):
                if taken is not None:
                    self._layout.take(taken)
            if name is not None and is_taken:
                state.sums[place] = self._file.value(name)
                self._report.add(name, self._run.name(place) + " accumulated", state.sums[place])
            if rows is not None and is_taken:
                state.rows[place] = self._file.value(rows).astype(bool)
                self._report.add(rows, self._run.name(place) + " rows", state.rows[place])

    def _read_moments(self, state, made, is_taken):
        """What batch normalisations have gathered in the cycle, beside their averages; nothing between cycles."""
        for place, (variance, layer) in self._run.norms.items():
            names = [self._moment(place, "accum_count"), self._moment(place, "accum"), self._moment(variance, "accum")]
            if None in names:
                if is_taken:
                    self._report.problems.append("{} begins its cycle here, and misses what was.".format(layer.name))
            elif is_taken:
                moments = [self._file.value(self._layout.take(name)) for name in names]
                state.moments[place] = Norm(variance, moments)
                for name, part, value in zip(names, ("count", "mean", "variance"), moments):
                    self._report.add(name, "{} {} so far".format(layer.name, part), value)
        if not made:
            for place in set(range(len(self._mapped))) - set(self._trained):
                for name in (self._moment(place, "accum"), self._moment(place, "accum_count")):
                    self._layout.taken.add(name)

    def _moment(self, place, what):
        return None if self._mapped[place] is None else self._beside(place, what)

    def _beside(self, place, what):
        return self._layout.belonging(self._mapped[place], self._layout.of_cycle(what))

    def _take(self, name, target, dtype):
        value = self._file.value(self._layout.take(name))
        words = "" if value.dtype == dtype else "cast from {}".format(value.dtype)
        if words and not np.can_cast(value.dtype, dtype, "safe"):
            self._report.problems.append("{} is {} in the checkpoint, {} in Keras.".format(name, value.dtype, dtype))
        cast = value.astype(dtype)
        self._report.add(name, target, cast, words)
        return cast


def read_state(file, layout, run, mapped, iterations, report):
    """The `RunState` of a checkpoint, by v1's conventions; `iterations` is what the user says of it, or None."""
    reading = Reading(file, layout, run, mapped, report)
    state = RunState()
    state.weights = reading.weights()
    state.iterations = reading.iterations(iterations)
    state.slots = reading.slots(run.convention(state.iterations))
    if run.rule == "adam":
        reading.check_powers(state.iterations)
    reading.cycle(state)
    return state
