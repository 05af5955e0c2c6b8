"""Read a `RunState` from a `Saver`'s checkpoint."""

import math

import numpy as np

from accum.convert import _rules
from accum.convert._report import ConversionError
from accum.convert._rules import RULES
from accum.convert._shapes import arranged
from accum.convert._state import RunState
from accum.convert._v1 import AVERAGE


class Reading:
    """Converts a checkpoint to a `RunState` for Keras, and lists each variable in a report.

    Args:
      file: the `V1File`.
      layout: its `Layout`.
      run: the `KerasRun` that will receive it.
      mapped: for each variable of the run, its name in the checkpoint or None.
      report: the `Report`.
    """

    def __init__(self, file, layout, run, mapped, report):
        self._file = file
        self._layout = layout
        self._run = run
        self._mapped = mapped
        self._report = report
        self._trained = [index for index in run.trained if mapped[index] is not None]

    def weights(self):
        """Read {index: array}, in the dtype of the model."""
        left = [self._run.name(index) for index, name in enumerate(self._mapped) if name is None]
        if left:
            self._report.problems.append(f"Left unchanged, with their slots and sums: {left}.")
        return {index: self._take(index, name) for index, name in enumerate(self._mapped) if name is not None}

    def slots(self, convention):
        """Read {role: {index: array}}, in v1's conventions."""
        rule = RULES[self._run.rule]
        if not rule.slots:
            return {}
        weights = [self._mapped[index] for index in self._trained]
        slot_name = self._layout.slot_name(rule, weights)
        slots = {index: self._layout.slots(self._mapped[index], slot_name) for index in self._trained}
        self._check_slots(rule, slot_name, slots)
        result = {}
        for number, role in enumerate(rule.slots):
            names = {index: listed[number] for index, listed in slots.items() if listed}
            result[role] = {index: self._slot(index, name, role, convention) for index, name in names.items()}
        return result

    def _slot(self, index, name, role, convention):
        value, words = self._arranged(index, name)
        if role in convention.slots:
            target = f"{self._run.name(index)}/{role}"
            words = ", ".join(filter(None, [_rules.arithmetic(role, convention, True), words]))
            self._report.add(name, target, value, words)
        else:
            self._report.notes.append(f"{name} is left out, because an optimizer without momentum does not read it.")
        return value

    def _check_slots(self, rule, slot_name, slots):
        counts = {len(names) for names in slots.values()}
        if counts - {0, len(rule.slots)} or counts == {0}:
            raise ConversionError(
                f"The optimizer has the rule of v1's {rule.v1_class}, which keeps {list(rule.slots)} for each "
                f"variable. The checkpoint has {sum(slots.values(), []) or 'none'} under the name {slot_name!r}. "
                "It may come from another rule, or from an optimizer with another name (pass `optimizer_name=`)."
            )
        for index, names in slots.items():
            if not names:
                self._report.problems.append(
                    f"{self._run.name(index)} has no slots in the checkpoint, so it was not trained there. Its slots "
                    "here stay unchanged."
                )
            for name in names:
                self._layout.take(name)

    def averages(self):
        """Read {index: array}, the shadow variables of an `ExponentialMovingAverage`."""
        names = {index: self._layout.belonging(self._mapped[index], AVERAGE) for index in self._trained}
        names = {index: self._layout.take(name) for index, name in names.items() if name is not None}
        if not self._run.averages:
            left = self._layout.not_ignored(names.values())
            if left:
                self._report.problems.append(
                    "Moving averages of the weights are left out, because this optimizer keeps none (`use_ema=True`, "
                    f"from TensorFlow 2.11 on): {left}. Without them, pass ignore='*/{AVERAGE}'."
                )
            return {}
        result = {}
        for index, name in names.items():
            result[index], words = self._arranged(index, name)
            self._report.add(name, self._run.name(index) + " average", result[index], words)
        if names:
            self._report.notes.append(
                f"Averages now move by `ema_momentum`, once per step. Set it to the decay of the `{AVERAGE}`."
            )
        return result

    def iterations(self, passed):
        """Return the number of steps made: as given, or from the graph's counter, or from Adam's powers."""
        name = self._layout.counter("iterations")
        counter = None if name is None else int(self._file.value(self._layout.take(name)))
        by_powers = self._steps_by_powers() if self._run.rule == "adam" else None
        steps = next((value for value in (passed, counter, by_powers) if value is not None), None)
        if steps is None:
            raise ConversionError(
                "The checkpoint has no `global_step`. Pass the number of steps made as `iterations=`."
            )
        source = name if passed is None and counter is not None else "(iterations)"
        self._report.add(source, "iterations", np.int64(steps))
        return steps

    def _steps_by_powers(self):
        """Return the number of steps in the bias correction of v1's Adam, or None if its powers have underflowed."""
        steps = None
        for name, beta in zip(("beta1_power", "beta2_power"), self._run.betas):
            counter = self._layout.counter(name)
            if counter is None:
                raise ConversionError(f"The checkpoint has no {name}, which v1's Adam keeps.")
            power = float(self._file.value(self._layout.take(counter)))
            if 1e-30 < power < 1.0:
                steps = int(round(math.log(power) / math.log(float(np.float32(beta))))) - 1
        return steps

    def check_powers(self, steps):
        """Check v1's powers of Adam's betas against the number of steps, by which Keras corrects the bias."""
        for name, beta in zip(("beta1_power", "beta2_power"), self._run.betas):
            power = float(self._file.value(self._layout.counter(name)))
            self._report.add(self._layout.counter(name), "iterations", np.float32(power), f"{beta:g} ** (t + 1)")
            if _rules.power_disagrees(power, beta, steps):
                self._report.problems.append(
                    f"{name} is {power:g}, but {beta:g} ** (t + 1) with t = {steps} is "
                    f"{_rules.powers([beta], steps)[0]:g}. Keras has one counter for the bias correction and the "
                    "schedule. Either beta differs, or `global_step` does not count steps (then pass the number of "
                    "steps as `iterations=`)."
                )

    def cycle(self, state):
        """Read the unfinished cycle into `state`."""
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
                f"An unfinished cycle of {made} micro steps is left out. To keep it, wrap the optimizer in "
                "`GradientAccumulateOptimizer(optimizer, accum_steps)`."
            )
        if is_taken:
            state.micro_step, state.weight_sum = made, float(self._file.value(weight_sum))
            self._report.add(micro_step, "micro_step", np.int64(made))
            self._report.add(weight_sum, "weight_sum", np.float32(state.weight_sum))

    def _read_sums(self, state, is_taken):
        accumulators = {index: self._beside(index, "accum") for index in self._trained}
        lacking = [self._run.name(index) for index, name in accumulators.items() if name is None]
        if lacking and len(lacking) < len(accumulators):
            self._report.problems.append(f"{lacking} had no gradient in the static graph, and no accumulator.")
        for index, name in accumulators.items():
            rows = self._beside(index, "accum_rows")
            if name is not None:
                state.sparse[index] = rows is not None
            for taken in (name, rows):
                if taken is not None:
                    self._layout.take(taken)
            if name is not None and is_taken:
                state.sums[index], words = self._arranged(index, name, rows is not None)
                self._report.add(name, self._run.name(index) + " accumulated", state.sums[index], words)
            if rows is not None and is_taken:
                state.rows[index] = self._file.value(rows).astype(bool)
                self._report.add(rows, self._run.name(index) + " rows", state.rows[index])

    def _read_moments(self, state, made, is_taken):
        """Read the statistics that batch normalisation has accumulated in the cycle; none between cycles."""
        for index, (variance, layer) in self._run.norms.items():
            names = [self._moment(index, "accum_count"), self._moment(index, "accum"), self._moment(variance, "accum")]
            if None in names:
                if is_taken:
                    self._report.problems.append(
                        f"{layer.name} starts its cycle now, without the micro-batches so far."
                    )
            elif is_taken:
                moments = [self._file.value(self._layout.take(name)) for name in names]
                state.moments[index] = moments
                for name, part, value in zip(names, ("count", "mean", "variance"), moments):
                    self._report.add(name, f"{layer.name} {part} so far", value)
        if not made:
            for index in set(range(len(self._mapped))) - set(self._trained):
                for name in (self._moment(index, "accum"), self._moment(index, "accum_count")):
                    self._layout.taken.add(name)

    def _moment(self, index, what):
        return None if self._mapped[index] is None else self._beside(index, what)

    def _beside(self, index, what):
        return self._layout.belonging(self._mapped[index], self._layout.of_cycle(what))

    def _arranged(self, index, name, is_sparse=False):
        """Read a variable in the shape of the model's variable. Returns it and the word for what was done."""
        return arranged(self._file.value(name), self._run.shape(index), name, is_sparse)

    def _take(self, index, name):
        value, words = self._arranged(index, self._layout.take(name))
        dtype = self._run.dtype(index)
        cast_words = "" if value.dtype == dtype else f"cast from {value.dtype}"
        if cast_words and not np.can_cast(value.dtype, dtype, "safe"):
            self._report.problems.append(f"{name} is {value.dtype} in the checkpoint, but {dtype} in Keras.")
        cast = value.astype(dtype)
        words = ", ".join(filter(None, [cast_words, words]))
        self._report.add(name, self._run.name(index), cast, words)
        return cast


def read_state(file, layout, run, mapped, iterations, report):
    """Read the `RunState` of a checkpoint in v1's conventions; `iterations` is what the user passed, or None."""
    reading = Reading(file, layout, run, mapped, report)
    state = RunState()
    state.weights = reading.weights()
    state.iterations = reading.iterations(iterations)
    state.slots = reading.slots(run.convention(state.iterations))
    state.averages = reading.averages()
    state.sparse = dict.fromkeys(run.tables, True)
    if run.rule == "adam":
        reading.check_powers(state.iterations)
    reading.cycle(state)
    return state
