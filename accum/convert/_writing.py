"""Convert a `RunState` to the values of a `Saver`'s checkpoint, under the names of a static graph."""

import numpy as np

from accum.convert import _names, _rules, _v1
from accum.convert._proposal import natural
from accum.convert._report import ConversionError
from accum.convert._rules import RULES
from accum.convert._shapes import arranged

ACCUM_NAME = "AccumOptimizer"


class NewLayout:
    """The names that `tf.compat.v1.train` and `AccumOptimizer` give outside any scope."""

    def __init__(self, rule, names, optimizer_name, accum_name):
        said = names if isinstance(names, dict) else {}
        self.accum_name = accum_name or ACCUM_NAME
        self._slot_name = optimizer_name or rule.v1_name
        self._counters = {name: said.get(name, name) for name in _v1.COUNTERS}
        self._counters["iterations"] = said.get("iterations", "global_step")

    def slot_names(self, weight, count):
        return ["/".join([weight, self._slot_name + ("_%d" % number if number else "")]) for number in range(count)]

    def counter(self, name):
        return self._counters[name]

    def beside(self, weight, what):
        return f"{weight}/{self.accum_name}/{what}"

    def average(self, weight):
        return f"{weight}/{_v1.AVERAGE}"

    def of_cycle(self, name):
        return f"{self.accum_name}/{name}"

    def has_rows(self, weight):
        """Whether the gradient of `weight` is sparse in the static graph; None if unknown."""
        return None

    def weight_of_micro_batches(self):
        """Return the weight of each micro-batch in the unfinished cycle of `like`; None if there is none."""
        return None


class KnownLayout:
    """The names in a checkpoint of the static graph."""

    def __init__(self, file, rule, names, optimizer_name, accum_name, weights):
        self.file = file
        self._layout = _v1.Layout(file.shapes, names, optimizer_name, accum_name)
        self.accum_name = self._layout.accum_name
        self._slot_name = self._layout.slot_name(rule, weights)
        self._rule = rule

    def slot_names(self, weight, count):
        names = self._layout.slots(weight, self._slot_name)
        if len(names) not in (0, count):
            raise ConversionError(
                f"v1's {self._rule.v1_class} keeps {list(self._rule.slots)} for each variable, but `like` has {names}."
            )
        return names

    def counter(self, name):
        return self._layout.counter(name)

    def beside(self, weight, what):
        return self._layout.belonging(weight, self._layout.of_cycle(what))

    def average(self, weight):
        return self._layout.belonging(weight, _v1.AVERAGE)

    def of_cycle(self, name):
        return self._layout.of_cycle(name)

    def has_rows(self, weight):
        if self.accum_name is None or self.beside(weight, "accum") is None:
            return None
        return self.beside(weight, "accum_rows") is not None

    def weight_of_micro_batches(self):
        if self.accum_name is None:
            return None
        made, weight_sum = (float(self.file.value(self.of_cycle(name))) for name in ("micro_step", "weight_sum"))
        return weight_sum / made if made > 0.0 else None


def names_in_checkpoint(run, names, file, layout):
    """Return a list of the names in a checkpoint of the static graph, or None, of the run's variables."""
    shapes = layout.weights()
    # The slots of an optimizer that is not known, such as BERT's `kernel/adam_m`, have the shapes of weights
    slots = [name for name in shapes if name.rpartition("/")[0] in shapes]
    kept = sorted(layout.not_ignored(set(shapes) - set(slots)), key=natural)
    order = file.creation_order(kept)
    candidates = _names.Candidates(order or kept, order is not None)
    return _names.match(run.wanted, shapes, _v1.of_variables(names), candidates)


def names_of_weights(run, names, file, optimizer_name, accum_name):
    """Return a list of the names in the static graph, or None, of the run's variables."""
    said = _v1.of_variables(names)
    if file is not None:
        layout = _v1.Layout(file.shapes, names, optimizer_name, accum_name)
        return names_in_checkpoint(run, names, file, layout)
    mapping = dict(enumerate(name for name, _ in run.wanted))
    mapping.update(_names.said(run.wanted, said))
    shapes = {mapping[index]: shape for index, (_, shape) in enumerate(run.wanted) if mapping[index] is not None}
    _names.check(run.wanted, shapes, mapping)
    return [mapping[index] for index in range(len(run.wanted))]


class Writing:
    """Collects the values of a checkpoint, and lists each in a report.

    Args:
      run: the `KerasRun` to write.
      state: its `RunState`, in v1's conventions.
      mapped: for each variable of the run, its name in the static graph.
      layout: a `NewLayout` or a `KnownLayout`.
      report: the `Report`.
    """

    def __init__(self, run, state, mapped, layout, report):
        self.values = {}
        self._run = run
        self._state = state
        self._mapped = mapped
        self._layout = layout
        self._report = report

    def weights(self):
        for index, name in enumerate(self._mapped):
            if name is None:
                self._report.problems.append(f"{self._run.name(index)} is left out.")
            else:
                self._put(self._run.name(index), name, self._state.weights[index])

    def slots(self, convention):
        roles = RULES[self._run.rule].slots
        for index in self._trained():
            names = self._layout.slot_names(self._mapped[index], len(roles)) if roles else []
            if roles and not names:
                self._report.problems.append(f"{self._mapped[index]} has no slots in `like`.")
            for role, name in zip(roles, names):
                source = f"{self._run.name(index)}/{role}"
                if role in self._state.slots:
                    words = _rules.arithmetic(role, convention, False)
                    self._put(source, name, self._state.slots[role][index], words)
                else:  # RMSprop without momentum: v1 has the slot, but multiplies it by 0
                    self._put("(zeros)", name, np.zeros_like(self._state.weights[index]))

    def averages(self):
        """Write the optimizer's averages as the shadow variables of an `ExponentialMovingAverage`."""
        for index, value in sorted(self._state.averages.items()):
            name = None if self._mapped[index] is None else self._layout.average(self._mapped[index])
            if name is not None:
                self._put(self._run.name(index) + " average", name, value)
            elif self._mapped[index] is not None:
                self._report.problems.append(f"The average of {self._mapped[index]} is left out.")

    def counters(self):
        steps = self._state.iterations
        name = self._layout.counter("iterations")
        if name is None:
            self._report.problems.append(f"`like` has no `global_step`, so the number of steps, {steps}, is left out.")
        else:
            self._put("iterations", name, np.asarray(steps, np.int64))
        if self._run.rule != "adam":
            return
        betas = self._run.betas
        for counter, beta, power in zip(("beta1_power", "beta2_power"), betas, _rules.powers(betas, steps)):
            name = self._layout.counter(counter)
            if name is None:
                raise ConversionError(f"`like` has no {counter}, which v1's Adam keeps.")
            self._put("iterations", name, np.asarray(power, np.float32), f"{beta:g} ** (t + 1)")

    def cycle(self):
        """Write the sums of an unfinished cycle, or zeros between cycles."""
        state = self._state
        if self._layout.accum_name is None:
            if state.micro_step:
                self._report.problems.append("`like` does not accumulate, so the unfinished cycle is left out.")
            return
        if not self._run.accumulates and not isinstance(self._layout, KnownLayout):
            return
        for index in self._trained():
            self._put_sum(index)
        for index, (variance, layer) in self._run.norms.items():
            self._put_moments(index, variance, layer)
        self._put("micro_step", self._layout.of_cycle("micro_step"), np.asarray(state.micro_step, np.int64))
        self._put("weight_sum", self._layout.of_cycle("weight_sum"), np.asarray(state.weight_sum, np.float32))

    def _put_sum(self, index):
        weight, source = self._mapped[index], self._run.name(index)
        total = self._layout.beside(weight, "accum")
        value = self._state.sums.get(index)
        if total is not None:
            zeros = np.zeros(self._state.weights[index].shape, self._run.dtype_of_sums(index))
            self._put(source + " accumulated", total, zeros if value is None else value)
        elif value is not None:
            self._report.problems.append(f"`like` has no accumulator for {weight}.")
        rows = self._layout.beside(weight, "accum_rows")
        is_known = isinstance(self._layout, KnownLayout)
        if rows is not None and (is_known or index in self._state.rows):
            touched = np.full(self._state.weights[index].shape[:1], value is not None)
            self._put(source + " rows", rows, self._state.rows.get(index, touched))
        elif rows is None and index in self._state.rows:
            self._report.notes.append(f"{weight} is dense in `like`.")

    def _put_moments(self, index, variance, layer):
        """Write the statistics that batch normalisation has accumulated, if the graph uses `accumulate_update_ops`."""
        beside, at = self._layout.beside, self._mapped
        if at[index] is None or at[variance] is None:
            return
        names = [beside(at[index], "accum_count"), beside(at[index], "accum"), beside(at[variance], "accum")]
        mean = self._state.weights[index]
        so_far = self._state.moments.get(index)
        moments = so_far or [np.zeros([], mean.dtype), np.zeros_like(mean), np.zeros_like(mean)]
        is_known = isinstance(self._layout, KnownLayout)
        is_lacking = so_far is None and self._state.micro_step > 0
        if is_lacking and is_known and None not in names:
            self._report.problems.append(f"{layer.name} does not accumulate statistics over a cycle, but `like` does.")
        if None not in names and (is_known or not is_lacking):
            for name, part, value in zip(names, ("count", "mean", "variance"), moments):
                self._put(f"{layer.name} {part} so far", name, value)
        elif so_far is not None:
            self._report.problems.append(f"`like` has no place for the statistics that {layer.name} has accumulated.")

    def rows_there(self):
        """Return {index: whether its gradient is sparse in the static graph}, as far as the layout shows it."""
        has_rows_of = {index: self._layout.has_rows(self._mapped[index]) for index in self._trained()}
        return {index: has_rows for index, has_rows in has_rows_of.items() if has_rows is not None}

    def rest(self):
        """Copy the other variables of `like` with their values, so that the checkpoint is complete."""
        if isinstance(self._layout, KnownLayout):
            file = self._layout.file
            for name in sorted(set(file.shapes) - set(self.values)):
                self._report.problems.append(f"{name} keeps its value in `like`.")
                self.values[name] = file.value(name)

    def _trained(self):
        return [index for index in self._run.trained if self._mapped[index] is not None]

    def _put(self, source, name, value, words=""):
        if name in self.values:
            raise ConversionError(f"Two variables would be called {name} in the static graph.")
        if isinstance(self._layout, KnownLayout):
            value, arrangement = arranged(value, self._layout.file.shapes[name], name)
            words = ", ".join(filter(None, [words, arrangement]))
            dtype = self._layout.file.dtype(name)
            if dtype != value.dtype:
                words = ", ".join(filter(None, [words, f"cast from {value.dtype}"]))
                if not np.can_cast(value.dtype, dtype, "same_kind") or dtype.itemsize < value.dtype.itemsize:
                    self._report.problems.append(f"{name} is {value.dtype} here, but {dtype} in `like`.")
                value = value.astype(dtype)
        self.values[name] = value
        self._report.add(source, name, value, words)
