"""The values of a `Saver`'s checkpoint out of a `RunState`, under the names of one static graph."""

import numpy as np

from accum.convert import _names, _rules, _v1
from accum.convert._report import ConversionError
from accum.convert._rules import RULES

ACCUM_NAME = "AccumOptimizer"


class NewLayout:
    """The names that `tf.compat.v1.train` and `AccumOptimizer` give outside of any scope."""

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
        return "{}/{}/{}".format(weight, self.accum_name, what)

    def of_cycle(self, name):
        return "{}/{}".format(self.accum_name, name)


class KnownLayout:
    """The names that a checkpoint of the static graph has."""

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
                "v1's {} keeps {} for each variable. `like` has {}.".format(
                    self._rule.v1_class, list(self._rule.slots), names
                )
            )
        return names

    def counter(self, name):
        return self._layout.counter(name)

    def beside(self, weight, what):
        return self._layout.belonging(weight, self._layout.of_cycle(what))

    def of_cycle(self, name):
        return self._layout.of_cycle(name)


def names_of_weights(run, names, file, optimizer_name, accum_name):
    """For each variable of the run, its name in the static graph, or None."""
    said = _v1.of_variables(names)
    if file is not None:
        found = _v1.Layout(file.shapes, names, optimizer_name, accum_name).weights()
        return _names.match(run.wanted, found, said)
    given = dict(enumerate(name for name, _ in run.wanted))
    given.update(_names.said(run.wanted, said))
    found = {given[place]: shape for place, (_, shape) in enumerate(run.wanted) if given[place] is not None}
    _names.check(run.wanted, found, given)
    return [given[place] for place in range(len(run.wanted))]


class Writing:
    """Collects the values of a checkpoint, noting each in a report.

    Args:
      run: the `KerasRun` that they come from.
      state: its `RunState`, by v1's conventions.
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
        for place, name in enumerate(self._mapped):
            if name is None:
                self._report.problems.append("{} is left out.".format(self._run.name(place)))
            else:
                self._put(self._run.name(place), name, self._state.weights[place])

    def slots(self, convention):
        roles = RULES[self._run.rule].slots
        for place in self._trained():
            names = self._layout.slot_names(self._mapped[place], len(roles)) if roles else []
            if roles and not names:
                self._report.problems.append("{} has no slots in `like`.".format(self._mapped[place]))
            for role, name in zip(roles, names):
                source = "{}/{}".format(self._run.name(place), role)
                if role in self._state.slots:
                    words = _rules.arithmetic(role, convention, False)
                    self._put(source, name, self._state.slots[role][place], words)
                else:  # RMSprop without momentum: v1 multiplies it by 0
                    self._put("(zeros)", name, np.zeros_like(self._state.weights[place]))

    def counters(self):
        steps = self._state.iterations
        name = self._layout.counter("iterations")
        if name is None:
            self._report.problems.append("`like` has no `global_step`, which would go on from {}.".format(steps))
        else:
            self._put("iterations", name, np.asarray(steps, np.int64))
        if self._run.rule != "adam":
            return
        betas = self._run.betas
        for counter, beta, power in zip(("beta1_power", "beta2_power"), betas, _rules.powers(betas, steps)):
            name = self._layout.counter(counter)
            if name is None:
                raise ConversionError("`like` has no {}, which v1's Adam keeps.".format(counter))
            self._put("iterations", name, np.asarray(power, np.float32), "{:g} ** (t + 1)".format(beta))

    def cycle(self):
        """The sums of an unfinished cycle, or the zeros of none."""
        state = self._state
        if self._layout.accum_name is None:
            if state.micro_step:
                self._report.problems.append("`like` accumulates nothing: the unfinished cycle is left out.")
            return
        if not self._run.accumulates and not isinstance(self._layout, KnownLayout):
            return
        for place in self._trained():
            self._put_sum(place)
        for place, (variance, layer) in self._run.norms.items():
            self._put_moments(place, variance, layer)
        self._put("micro_step", self._layout.of_cycle("micro_step"), np.asarray(state.micro_step, np.int64))
        self._put("weight_sum", self._layout.of_cycle("weight_sum"), np.asarray(state.weight_sum, np.float32))

    def _put_sum(self, place):
        weight, source = self._mapped[place], self._run.name(place)
        total = self._layout.beside(weight, "accum")
        value = self._state.sums.get(place)
        if total is not None:
            zeros = np.zeros(self._state.weights[place].shape, self._run.dtype_of_sums(place))
            self._put(source + " accumulated", total, zeros if value is None else value)
        elif value is not None:
            self._report.problems.append("`like` has no accumulator for {}.".format(weight))
        rows = self._layout.beside(weight, "accum_rows")
        is_known = isinstance(self._layout, KnownLayout)
        if rows is not None and (is_known or place in self._state.rows):
            touched = np.full(self._state.weights[place].shape[:1], value is not None)
            self._put(source + " rows", rows, self._state.rows.get(place, touched))
        elif rows is None and place in self._state.rows:
            self._report.notes.append("{} is dense in `like`.".format(weight))

    def _put_moments(self, place, variance, layer):
        """What a batch normalisation has gathered in the cycle, where the graph has taken its averages over."""
        beside, at = self._layout.beside, self._mapped
        if at[place] is None or at[variance] is None:
            return
        names = [beside(at[place], "accum_count"), beside(at[place], "accum"), beside(at[variance], "accum")]
        mean = self._state.weights[place]
        norm = self._state.moments.get(place)
        moments = [np.zeros([], mean.dtype), np.zeros_like(mean), np.zeros_like(mean)] if norm is None else norm.moments
        is_known = isinstance(self._layout, KnownLayout)
        is_lacking = norm is None and self._state.micro_step > 0
        if is_lacking and is_known and None not in names:
            self._report.problems.append("{} gathers nothing in a cycle, as `like` does.".format(layer.name))
        if None not in names and (is_known or not is_lacking):
            for name, part, value in zip(names, ("count", "mean", "variance"), moments):
                self._put("{} {} so far".format(layer.name, part), name, value)
        elif norm is not None:
            self._report.problems.append("`like` does not gather what {} has so far.".format(layer.name))

    def rest(self):
        """What else `like` has keeps its value there, so that the checkpoint is whole."""
        if isinstance(self._layout, KnownLayout):
            file = self._layout.file
            for name in sorted(set(file.shapes) - set(self.values)):
                self._report.problems.append("{} keeps the value that it has in `like`.".format(name))
                self.values[name] = file.value(name)

    def _trained(self):
        return [place for place in self._run.trained if self._mapped[place] is not None]

    def _put(self, source, name, value, words=""):
        if name in self.values:
            raise ConversionError("Two variables would be called {} in the static graph.".format(name))
        if isinstance(self._layout, KnownLayout):
            dtype = self._layout.file.dtype(name)
            if dtype != value.dtype:
                words = ", ".join(filter(None, [words, "cast from {}".format(value.dtype)]))
                if not np.can_cast(value.dtype, dtype, "same_kind") or dtype.itemsize < value.dtype.itemsize:
                    self._report.problems.append("{} is {} here, {} in `like`.".format(name, value.dtype, dtype))
                value = value.astype(dtype)
        self.values[name] = value
        self._report.add(source, name, value, words)
