"""A live Keras model and its optimizer, plain or accumulating, read and set as a `RunState`."""

import re
from typing import Dict, List

import numpy as np

from accum import _tf
from accum._tf import tf
from accum.convert._report import ConversionError
from accum.convert._rules import RULES, Convention
from accum.convert._state import RunState
from accum.convert._supported import require_eager, rule_of, unwrapped, weights_of

if _tf.version.HAS_KERAS_API:
    from accum._keras._batch_norm._layer import batch_norms_of
    from accum._keras._model._model import GradientAccumulateModel

_MADE_A_STEP = re.compile(r"iter/|_variables/[1-9]")
_ACCUMULATOR = re.compile(r"accumulation/accumulators/(\d+)/(\w+)/")


class KerasRun:
    """A model and its optimizer.

    Args:
      model: a built Keras model, or a list of variables.
      optimizer: its optimizer, with or without wrappers; None: that of a compiled model.

    Raises:
      ConversionError: the model has no weights yet, is on several replicas, or has an optimizer with an unknown rule.
    """

    def __init__(self, model, optimizer=None):
        require_eager()
        is_listed = isinstance(model, (list, tuple))
        self.variables = list(model) if is_listed else weights_of(model)
        if not self.variables:
            raise ConversionError(f"The model has no weights yet: build it, or call it once. Received: {model!r}.")
        trainable = self.variables if is_listed else model.trainable_variables
        keys = {_tf.variables.key_of(var) for var in trainable}
        self.trained = [index for index, var in enumerate(self.variables) if _tf.variables.key_of(var) in keys]
        if any(_tf.optimizer_state.is_of_several_replicas(var) for var in self.variables):
            raise ConversionError(
                "A run on several replicas can't be converted. Convert without a strategy, save a "
                "`tf.train.Checkpoint`, and restore it under the strategy."
            )
        self._order = [self._index_of(var) for var in trainable]
        optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        self.wrapper, self.inner = unwrapped(optimizer)
        tables = {_tf.variables.key_of(var) for var in ([] if is_listed else _tf.optimizer_state.embeddings_of(model))}
        self.tables = {index for index in self.trained if _tf.variables.key_of(self.variables[index]) in tables}
        self.has_loss_scale = _tf.optimizers.is_loss_scale_optimizer(optimizer)
        self.rule = rule_of(self.inner)
        self.follows = isinstance(model, GradientAccumulateModel)  # whether batch normalisation follows its cycles
        self.norms = {} if is_listed else self._norms_of(model)
        self.weighs_by_examples = self.follows and model._accum.options.weighs_as_keras

    def _norms_of(self, model):
        """Return {index of the moving mean: (index of the moving variance, `AccumBatchNormalization`)}."""
        layers = [layer for layer in batch_norms_of(model) if layer.built]
        indices = [(self._index_of(layer.moving_mean), self._index_of(layer.moving_variance)) for layer in layers]
        return {mean: (variance, layer) for (mean, variance), layer in zip(indices, layers)}

    def _index_of(self, var):
        keys = [_tf.variables.key_of(variable) for variable in self.variables]
        if _tf.variables.key_of(var) not in keys:
            raise ConversionError(f"{_tf.variables.path_of(var)} is not a weight of the model.")
        return keys.index(_tf.variables.key_of(var))

    @property
    def wanted(self):
        """A list of (name, shape), one per variable."""
        return [(_tf.variables.path_of(var), tuple(var.shape)) for var in self.variables]

    def name(self, index):
        return _tf.variables.path_of(self.variables[index])

    def shape(self, index):
        return tuple(self.variables[index].shape)

    def dtype(self, index):
        return np.dtype(_tf.variables.native(self.variables[index]).dtype.as_numpy_dtype)

    def dtype_of_sums(self, index):
        """Return the dtype of a variable's accumulator."""
        dtype = self.wrapper._internals.cycle.plan.accumulator_dtype if self.accumulates else None
        if dtype is not None:
            return np.dtype(dtype.as_numpy_dtype)
        return np.dtype(np.float32) if self.dtype(index).itemsize < 4 else self.dtype(index)

    @property
    def accumulates(self):
        return self.wrapper is not None and not self.wrapper._internals.is_passthrough

    @property
    def reduction(self):
        return self.wrapper._internals.cycle.plan.reduction if self.accumulates else "mean"

    def moves_touched_rows_only(self):
        """Whether sparse gradients reach an optimizer that moves only the touched rows."""
        is_kept = not self.accumulates or self.wrapper._internals.cycle.plan.sparse == "rows"
        return is_kept and _tf.optimizer_state.moves_touched_rows_only(self.inner)

    @property
    def averages(self):
        """Whether the optimizer keeps moving averages of the weights."""
        return bool(getattr(self.inner, "use_ema", False))

    @property
    def betas(self):
        return [_tf.optimizer_state.hyperparameter(self.inner, name) for name in ("beta_1", "beta_2")]

    def convention(self, iterations):
        """Return the `Convention` of the optimizer for the step after `iterations` steps."""
        rate, is_scheduled = _tf.optimizer_state.rate_of_step(self.inner, iterations)
        has_momentum = "momentum" in RULES[self.rule].slots
        momentum = _tf.optimizer_state.hyperparameter(self.inner, "momentum") if has_momentum else 0.0
        slots = [role for role in RULES[self.rule].slots if role != "momentum" or momentum > 0.0]
        return Convention(
            rule=self.rule,
            slots=tuple(slots),
            rate=rate,
            is_scheduled=is_scheduled,
            momentum=momentum,
            epsilon=(
                None if self.rule in ("sgd", "momentum") else _tf.optimizer_state.hyperparameter(self.inner, "epsilon")
            ),
            is_beside_root=_tf.optimizer_state.is_epsilon_beside_root(self.inner),
            has_rate_inside=_tf.optimizer_state.has_rate_in_momentum(self.inner),
        )

    def without_counterpart(self, is_to_v1, has_averages):
        """Return sentences on what only this side's optimizer does or stores."""
        fate = "is left out" if is_to_v1 else "restarts"
        notes = []
        if getattr(self.inner, "amsgrad", False):
            notes.append(f"amsgrad: v1's Adam keeps no maximum of v; `vhat` {fate}.")
        if self.averages and not has_averages:
            notes.append(f"use_ema: the static graph has no `ExponentialMovingAverage`; the average {fate}.")
        if getattr(self.inner, "weight_decay", None):
            notes.append(f"weight_decay={self.inner.weight_decay}: v1's rule has none.")
        return notes

    # ------------------------------------------------------------------------------------------------------------
    # Reading

    def read(self):
        """Return the current `RunState`."""
        self._build_inner()
        state = RunState(int(self.inner.iterations.numpy()))
        state.weights = {index: var.numpy() for index, var in enumerate(self.variables)}
        for role in self.convention(state.iterations).slots:
            state.slots[role] = {index: self._slot(index, role).numpy() for index in self.trained}
        if self.averages:
            state.averages = {index: self._average(index).numpy() for index in self.trained}
        state.sparse = dict.fromkeys(self.tables, True)
        if self.accumulates and self.wrapper._internals.cycle.is_built:
            self._read_cycle(state)
        self._read_moments(state)
        return state

    def _read_cycle(self, state):
        cycle = self.wrapper._internals.cycle
        state.micro_step = int(cycle.state.micro_step.numpy())
        state.weight_sum = float(cycle.state.weight_sum.numpy()) if state.micro_step else 0.0
        for index in self.trained:
            accumulator = cycle.accumulator_of(self.variables[index])
            if accumulator is not None:
                state.sparse[index] = accumulator.rows is not None
            if accumulator is not None and accumulator.rows is not None:
                touched = accumulator.rows.numpy()
                state.rows[index] = touched if state.micro_step else np.zeros_like(touched)
            if accumulator is not None and state.micro_step:
                state.sums[index] = accumulator.total.numpy()

    def _read_moments(self, state):
        for index, (_, layer) in self.norms.items():
            statistics = layer.accum_statistics
            if not self.follows and not statistics.is_passthrough and statistics.calls_made() != state.micro_step:
                raise ConversionError(
                    f"{layer.name} has counted {statistics.calls_made()} calls in its cycle, but the optimizer "
                    f"{state.micro_step} micro steps, and v1 has one counter for both. Call `flush` or `reset` of the "
                    "layer first."
                )
            begun = [[part.numpy() for part in total] for total in statistics.begun(self.follows)]
            if len(begun) > 1 and state.micro_step:
                raise ConversionError(
                    f"{layer.name} is called several times per micro step, which v1 cannot store in mid-cycle. "
                    "Convert between two cycles."
                )
            if state.micro_step and begun and begun[0][0] > 0.0:
                state.moments[index] = begun[0]

    def _slot(self, index, role):
        return _tf.optimizer_state.slot_variable(self.inner, self.variables[index], role)

    def _average(self, index):
        return _tf.optimizer_state.average_variable(self.inner, self.variables[index])

    def _build_inner(self):
        _tf.inner_optimizer.build(self.inner, [self.variables[index] for index in self._order])

    # ------------------------------------------------------------------------------------------------------------
    # Setting

    def build_for(self, saved):
        """Create the variables that a checkpoint of this run holds, so that all of them can be restored.

        Args:
          saved: names under "optimizer" in a `tf.train.Checkpoint`.
        """
        variables = [_tf.variables.native(self.variables[index]) for index in self._order]
        if any(_MADE_A_STEP.match(name) for name in saved):
            self._build_inner()
        parts_by_number: Dict[int, List[str]] = {
            int(match.group(1)): [] for match in map(_ACCUMULATOR.match, saved) if match
        }
        for match in filter(None, map(_ACCUMULATOR.match, saved)):
            parts_by_number[int(match.group(1))].append(match.group(2))
        if not parts_by_number:
            return
        if not self.accumulates or max(parts_by_number) >= len(variables):
            raise ConversionError(
                "It has accumulators for {} variables, but the optimizer of the model {}.".format(
                    max(parts_by_number) + 1,
                    f"has them for {len(variables)}" if self.accumulates else "accumulates nothing",
                )
            )
        grads = [
            _stand_in(number in parts_by_number, "rows" in parts_by_number.get(number, ()))
            for number in range(len(variables))
        ]
        self.wrapper._internals.cycle.build(variables, grads)

    def set(self, state):
        """Set the variables of the run to `state`, which has been checked before."""
        self._build_inner()
        for index, value in state.weights.items():
            _assign(self.variables[index], value)
        for index, value in state.averages.items() if self.averages else ():
            _assign(self._average(index), value)
        for role, values in state.slots.items():
            for index, value in values.items():
                _assign(self._slot(index, role), value)
        self.inner.iterations.assign(state.iterations)
        if self.accumulates and state.micro_step:
            self._set_cycle(state)
        elif self.accumulates:
            self.wrapper.reset()
        for index, (_, layer) in self.norms.items():
            layer.reset()
            if index in state.moments:
                layer.accum_statistics.resume(state.moments[index], state.micro_step, self.follows)

    def _set_cycle(self, state):
        cycle = self.wrapper._internals.cycle
        variables = [_tf.variables.native(self.variables[index]) for index in self._order]
        cycle.build(variables, [_stand_in(index in state.sums, index in state.rows) for index in self._order])
        for index in self.trained:
            accumulator = cycle.accumulator_of(self.variables[index])
            if accumulator is None:
                continue
            _assign(accumulator.total, state.sums.get(index, np.zeros(accumulator.total.shape)))
            if accumulator.rows is not None:
                everything = np.full(accumulator.rows.shape, index in state.sums)
                accumulator.rows.assign(state.rows.get(index, everything))
        cycle.state.weight_sum.assign(state.weight_sum)
        if cycle.state.length is not None:
            cycle.state.length.assign(0 if cycle.plan.is_schedule else cycle.plan.accum_steps)
        cycle.state.micro_step.assign(state.micro_step)


def _assign(var, value):
    var.assign(tf.cast(tf.constant(value), var.dtype))


def _stand_in(has_sum, has_rows):
    """Return a stand-in for a gradient that makes a cycle create no accumulator, a sparse one or a dense one."""
    sparse = tf.IndexedSlices(tf.zeros([0, 1]), tf.zeros([0], tf.int64))
    return None if not has_sum else (sparse if has_rows else 0.0)
