"""Compare a model that was trained with accumulation with one that was trained plainly, at the full batch."""

import re

import numpy as np
import tensorflow as tf
from versions import IS_KERAS_3

from property_tests import accumulated, models, plain
from property_tests.fed import Deviation, alike

TOLERANCE = {"float32": 2e-6, "float64": 2e-6, "barriers": 2e-5, "mixed_float16": 5e-4, "mixed_bfloat16": 4e-3}
"""For weights of order 1; in 16 bits, for each step that was made the rounding of one number."""
LOG_TOLERANCE = {"float32": 2e-5, "float64": 2e-5, "barriers": 2e-4, "mixed_float16": 5e-3, "mixed_bfloat16": 2e-2}
"""For logs, evaluations and predictions of order 1."""
ROUNDING = 8.0
"""How far ours may be away, in multiples of what another order of the examples or float64 changes in the plain run."""


def check(case):
    """Raise `Deviation` unless all that is seen of the training is what full batches do."""
    with plain.precision(case["precision"]):
        references = _Comparison(case).check()
    alive = accumulated.left_alive(references)
    if alive:
        raise Deviation(f"law L16: {', '.join(alive)} are still alive")


class _Comparison:
    """Both runs of a case. The plain one is repeated only if rounding may be to blame."""

    def __init__(self, case):
        self._case, self._schedule = case, plain.schedule_of(case)
        self._batches = models.batches_of(case)
        self._whole = plain.run(case, self._batches, self._schedule, 1)
        self._others = None
        self._seen = accumulated.run(case, self._batches)
        is_low = case["precision"] in models.LOW_PRECISION
        self._kind = "barriers" if "whole_batch" in case["options"] and not is_low else case["precision"]

    def check(self):
        """Compare, and return weak references to what should be gone afterwards."""
        try:
            self._check_weights()
            self._check_logs()
            self._check_outlook()
        except Deviation as error:
            raise Deviation("; ".join([str(error)] + [f"warned: {text}" for text in self._seen.warned])) from error
        return self._seen.references

    def _check_weights(self):
        made = self._schedule.made
        if len(self._seen.states) != len(made):
            raise Deviation(f"law L18: {len(self._seen.states)} batches were seen, not {len(made)}")
        for place, ((count, weights), steps) in enumerate(zip(self._seen.states, made)):
            is_low = self._case["precision"] in models.LOW_PRECISION
            tolerances = {kind: value * max(1, steps if is_low else 1) for kind, value in TOLERANCE.items()}
            if count != steps:
                raise Deviation(f"law L3: after batch {place}, {count} steps were counted, not {steps}")
            for number, (ours, whole) in enumerate(zip(weights, self._whole.weights[steps])):
                other = lambda run, steps=steps, number=number: run.weights[steps][number]  # noqa: E731
                self._compare(tolerances, f"law L1: after batch {place}, weight {number}", ours, whole, other)

    def _rounded(self):
        """Return plain runs that differ by rounding: with the examples in reverse order, and in float64."""
        if self._others is None:
            case = self._case
            self._others = [plain.run(case, self._batches, self._schedule, -1)]
            is_alike = (
                not case["is_stateful"] and "keras_dropout" not in case["layers"]
            )  # which float64 lacks, or draws
            if case["precision"] == "float32" and is_alike:
                exact = dict(case, precision="float64")
                with plain.precision("float64"):
                    self._others.append(plain.run(exact, models.batches_of(exact), self._schedule, 1))
        return self._others

    def _compare(self, tolerances, what, ours, whole, other=None):
        """Raise a `Deviation` unless two arrays are near.

        Args:
          other: a function of a plain run that returns what differs from `whole` by rounding; None: nothing does.
        """
        ours, whole = (np.asarray(part, "float64") for part in (ours, whole))
        with np.errstate(invalid="ignore"):
            allowed = tolerances[self._kind] * np.maximum(1.0, np.abs(whole))
            off = np.abs(ours - whole)
            if not ((off <= allowed) | alike(ours, whole)).all():
                others = [] if other is None else [np.asarray(other(run), "float64") for run in self._rounded()]
                spread = max([0.0] + [np.abs(whole - one).max() for one in others])
                if not ((off <= allowed + ROUNDING * spread) | alike(ours, whole)).all():
                    raise Deviation(f"{what} is {off.max():.2e} off, where rounding makes {spread:.2e}")

    def _check_logs(self):
        """Compare the logs of cycles, or with `fit` those of epochs, as far as they are those of full batches."""
        for place, steps, ours in self._logs_to_compare():
            names = set(self._whole.logs[steps[0]])
            if set(ours) != names:
                raise Deviation(f"law L18: logs are {sorted(ours)}, not {sorted(names)}")
            for name in self._comparable(ours):
                other = lambda run, steps=steps, name=name: self._of_steps(run, steps, name)  # noqa: E731
                what = f"law L18: after batch {place}, the log {name!r}"
                self._compare(LOG_TOLERANCE, what, ours[name], self._of_steps(self._whole, steps, name), other)

    def _of_steps(self, run, steps, name):
        """Return the mean of a log over the steps of an epoch."""
        sizes, count = self._case["sizes"], len(self._case["sizes"])
        cycles = [self._schedule.cycles[step] for step in steps]
        return _mean(
            name,
            [(run.logs[step], sum(sizes[place % count] for place in cycle)) for step, cycle in zip(steps, cycles)],
        )

    def _logs_to_compare(self):
        """Yield (place of its last batch, numbers of the plain steps whose logs are the same, logs)."""
        case, schedule, count = self._case, self._schedule, len(self._case["sizes"])
        if case["how"] == "fit":
            if plain.ends_with_its_epochs(case, schedule):
                for epoch, logs in enumerate(self._seen.logs):
                    last = (epoch + 1) * count - 1
                    yield last, range(schedule.made[last - count] if epoch else 0, schedule.made[last]), logs
            return
        for step, cycle in enumerate(schedule.cycles):
            sizes = [case["sizes"][place] for place in cycle]
            parts = [(self._seen.logs[place], size) for place, size in zip(cycle, sizes) if size]
            if parts:
                yield cycle[-1], [step], {name: _mean(name, parts) for name in parts[0][0]}

    def _comparable(self, logs, is_evaluated=False):
        """Return the names of the logs that are exact.

        A mean over tokens is not if parts are weighted by examples. Keras 3 does not weight the losses of outputs
        where it does not know the sizes of batches beforehand.
        """
        case = self._case
        if IS_KERAS_3 and (case["how"] == "fit" or is_evaluated):
            logs = [name for name in logs if not re.fullmatch(r"out\d_loss", name)]
            # In a graph, Keras 3 evaluates no examples where a dataset of unknown length ends.
            if is_evaluated and case["is_traced"] and len(set(case["sizes"])) > 1:
                logs = [name for name in logs if not name.endswith("of_batch")]
        if is_evaluated and case["strategy"] != "mirrored":
            return list(logs)
        if not (case["has_masks"] and case["is_per_token"]):
            return list(logs)
        if case["options"].get("accum_steps", 1) != 1 or case["strategy"] == "mirrored":
            return [name for name in logs if name.endswith("distance")]
        return [name for name in logs if case["how"] != "fit" or not name.endswith("difference")]

    def _check_outlook(self):
        """Compare what `evaluate` and `predict` return with plain Keras, which has the same weights then."""
        try:
            self._compare_outlook(is_traced=False)
        except Deviation:
            # TensorFlow 2.10 may compute layer normalisation otherwise in a graph, but not in each.
            is_in_graph = self._case["is_traced"] or "whole_batch" in self._case["options"]
            if not (is_in_graph and "layer_norm" in self._case["layers"]):
                raise
            self._compare_outlook(is_traced=True)

    def _compare_outlook(self, is_traced):
        case = self._case
        theirs = plain.compiled(case, models.model_of(case), is_traced)
        theirs.set_weights(self._seen.states[-1][1])
        evaluated, predicted = accumulated.outlook_of(case, theirs, self._batches)
        if set(evaluated) != set(self._seen.evaluated):
            raise Deviation(f"law L18: evaluate returns {sorted(self._seen.evaluated)}, not {sorted(evaluated)}")
        for name in self._comparable(evaluated, is_evaluated=True):
            self._compare(LOG_TOLERANCE, f"law L18: {name!r} of evaluate", self._seen.evaluated[name], evaluated[name])
        tf.nest.assert_same_structure(predicted, self._seen.predicted)
        for ours, whole in zip(tf.nest.flatten(self._seen.predicted), tf.nest.flatten(predicted)):
            self._compare(LOG_TOLERANCE, "law L18: an output of predict", ours, whole)


def _mean(name, parts):
    """Return the mean of a log, weighted by examples, unless it has one number for each batch."""
    if name.endswith("of_batch"):
        parts = [(logs, 1) for logs, _ in parts]
    return sum(float(logs[name]) * size for logs, size in parts) / sum(size for _, size in parts)
