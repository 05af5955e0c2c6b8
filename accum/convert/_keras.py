"""A live Keras model and its optimizer, bare or accumulating, read and set as a `RunState`."""

import re

import numpy as np

from accum import _tf
from accum._tf import tf
from accum.convert._admitted import require_eager, rule_of, unwrapped, weights_of
from accum.convert._report import ConversionError
from accum.convert._rules import RULES, Convention
from accum.convert._state import Norm, RunState

if _tf.HAS_KERAS_FACE:
    from accum._batch_norm import batch_norms_of
    from accum._model import GradientAccumulateModel

_MADE_A_STEP = re.compile(r"iter/|_variables/[1-9]")
_ACCUMULATOR = re.compile(r"accumulation/accumulators/(\d+)/(\w+)/")


class KerasRun:
    """A model and its optimizer.

    Args:
      model: a built Keras model, or a list of variables.
      optimizer: its optimizer, in whatever wrappers; None: that of a compiled model.

    Raises:
      ConversionError: the model has no weights yet, several replicas, or an optimizer whose rule is not known here.
    """

    def __init__(self, model, optimizer=None):
        require_eager()
        is_listed = isinstance(model, (list, tuple))
        self.variables = list(model) if is_listed else weights_of(model)
        if not self.variables:
            raise ConversionError(
                "The model has no weights yet: build it, or call it once. Received: {!r}.".format(model)
            )
        trainable = self.variables if is_listed else model.trainable_variables
        keys = {_tf.variable_key(var) for var in trainable}
        self.trained = [place for place, var in enumerate(self.variables) if _tf.variable_key(var) in keys]
        if any(_tf.is_of_several_replicas(var) for var in self.variables):
            raise ConversionError(
                "Convert without a strategy, keep the outcome in a `tf.train.Checkpoint`, and restore that under it."
            )
        self._order = [self._place_of(var) for var in trainable]
        optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        self.wrapper, self.inner = unwrapped(optimizer)
        self.has_loss_scale = _tf.is_loss_scale_optimizer(optimizer)
        self.rule = rule_of(self.inner)
        self.follows = isinstance(model, GradientAccumulateModel)  # whether batch normalisation is on its clock
        self.norms = {} if is_listed else self._norms_of(model)
        self.weighs_by_examples = bool(getattr(getattr(model, "_accum", None), "weighs_as_keras", False))

    def _norms_of(self, model):
        """{place of the moving mean: (place of the moving variance, `AccumBatchNormalization`)}."""
        layers = [layer for layer in batch_norms_of(model) if layer.built]
        places = [(self._place_of(layer.moving_mean), self._place_of(layer.moving_variance)) for layer in layers]
        return {mean: (variance, layer) for (mean, variance), layer in zip(places, layers)}

    def _place_of(self, var):
        keys = [_tf.variable_key(known) for known in self.variables]
        if _tf.variable_key(var) not in keys:
            raise ConversionError("{} is no weight of the model.".format(var.name))
        return keys.index(_tf.variable_key(var))

    @property
    def wanted(self):
        """List of (name, shape), one a variable."""
        return [(var.name.split(":")[0], tuple(var.shape)) for var in self.variables]

    def name(self, place):
        return self.variables[place].name.split(":")[0]

    def dtype(self, place):
        return np.dtype(self.variables[place].dtype.as_numpy_dtype)

    def dtype_of_sums(self, place):
        """The dtype of an accumulator of that variable."""
        given = self.wrapper.cycle.dtype if self.accumulates else None
        if given is not None:
            return np.dtype(given.as_numpy_dtype)
        return np.dtype(np.float32) if self.dtype(place).itemsize < 4 else self.dtype(place)

    @property
    def accumulates(self):
        return self.wrapper is not None and not self.wrapper.is_bare

    @property
    def reduction(self):
        return self.wrapper.cycle.plan.reduction if self.accumulates else "mean"

    @property
    def betas(self):
        return [_tf.hyperparameter(self.inner, name) for name in ("beta_1", "beta_2")]

    def convention(self, iterations):
        """The `Convention` of the optimizer, for the step that follows `iterations` of them."""
        rate, is_scheduled = _tf.rate_of_step(self.inner, iterations)
        has_momentum = "momentum" in RULES[self.rule].slots
        momentum = _tf.hyperparameter(self.inner, "momentum") if has_momentum else 0.0
        slots = [role for role in RULES[self.rule].slots if role != "momentum" or momentum > 0.0]
        return Convention(
            rule=self.rule,
            slots=tuple(slots),
            rate=rate,
            is_scheduled=is_scheduled,
            momentum=momentum,
            epsilon=None if self.rule in ("sgd", "momentum") else _tf.hyperparameter(self.inner, "epsilon"),
            is_beside_root=_tf.is_epsilon_beside_root(self.inner),
            has_rate_inside=_tf.has_rate_in_momentum(self.inner),
        )

    def without_counterpart(self, is_to_v1):
        """What this optimizer does or keeps that v1's of its rule does not, as sentences."""
        fate = "is left out" if is_to_v1 else "begins anew"
        found = []
        if getattr(self.inner, "amsgrad", False):
            found.append("amsgrad: v1's Adam keeps no maximum of v; `vhat` {}.".format(fate))
        if getattr(self.inner, "use_ema", False):
            found.append("use_ema: v1's optimizers keep no average of the weights; it {}.".format(fate))
        if getattr(self.inner, "weight_decay", None):
            found.append("weight_decay={}: v1's rule has none.".format(self.inner.weight_decay))
        return found

    # ------------------------------------------------------------------------------------------------------------
    # Reading

    def read(self):
        """The `RunState` as it stands."""
        _tf.build_inner(self.inner, [self.variables[place] for place in self._order])
        state = RunState(int(self.inner.iterations.numpy()))
        state.weights = {place: var.numpy() for place, var in enumerate(self.variables)}
        for role in self.convention(state.iterations).slots:
            state.slots[role] = {place: self._slot(place, role).numpy() for place in self.trained}
        if self.accumulates and self.wrapper.cycle.is_built:
            self._read_cycle(state)
        self._read_moments(state)
        return state

    def _read_cycle(self, state):
        cycle = self.wrapper.cycle
        state.micro_step = int(cycle.state.micro_step.numpy())
        state.weight_sum = float(cycle.state.weight_sum.numpy()) if state.micro_step else 0.0
        for place in self.trained:
            accumulator = cycle.slot(self.variables[place])
            if accumulator is not None and accumulator.rows is not None:
                touched = accumulator.rows.numpy()
                state.rows[place] = touched if state.micro_step else np.zeros_like(touched)
            if accumulator is not None and state.micro_step:
                state.sums[place] = accumulator.total.numpy()

    def _read_moments(self, state):
        for place, (variance, layer) in self.norms.items():
            statistics = layer.accum_statistics
            if not self.follows and not statistics.is_bare and statistics.calls_made() != state.micro_step:
                raise ConversionError(
                    "{} has counted {} calls in its cycle, the optimizer {} micro steps: v1 has one clock for both. "
                    "Let the layer `flush` or `reset` first.".format(
                        layer.name, statistics.calls_made(), state.micro_step
                    )
                )
            begun = [[part.numpy() for part in total] for total in statistics.begun(self.follows)]
            if len(begun) > 1 and state.micro_step:
                raise ConversionError(
                    "{} is called several times in a micro step, which v1 has no place for: convert between two "
                    "cycles.".format(layer.name)
                )
            if state.micro_step and begun and begun[0][0] > 0.0:
                state.moments[place] = Norm(variance, begun[0])

    def _slot(self, place, role):
        return _tf.slot_variable(self.inner, self.variables[place], role)

    # ------------------------------------------------------------------------------------------------------------
    # Setting

    def build_for(self, saved):
        """Create what a checkpoint of this run has in it, so that all of it is there to be restored.

        Args:
          saved: names of what stands under "optimizer" in a `tf.train.Checkpoint`.
        """
        variables = [self.variables[place] for place in self._order]
        if any(_MADE_A_STEP.match(name) for name in saved):
            _tf.build_inner(self.inner, variables)
        found = {int(match.group(1)): [] for match in map(_ACCUMULATOR.match, saved) if match}
        for match in filter(None, map(_ACCUMULATOR.match, saved)):
            found[int(match.group(1))].append(match.group(2))
        if not found:
            return
        if not self.accumulates or len(found) != len(variables):
            raise ConversionError(
                "It has accumulators for {} variables, and the optimizer of the model {}.".format(
                    len(found), "for {}".format(len(variables)) if self.accumulates else "accumulates nothing"
                )
            )
        sparse = [_sparse() if "rows" in found[number] else 0.0 for number in sorted(found)]
        self.wrapper.cycle.build(variables, sparse)

    def set(self, state):
        """Make the run the one that `state` describes. All of it has been checked before."""
        _tf.build_inner(self.inner, [self.variables[place] for place in self._order])
        for place, value in state.weights.items():
            _assign(self.variables[place], value)
        for role, values in state.slots.items():
            for place, value in values.items():
                _assign(self._slot(place, role), value)
        self.inner.iterations.assign(state.iterations)
        if self.accumulates and state.micro_step:
            self._set_cycle(state)
        elif self.accumulates:
            self.wrapper.reset()
        for place, (_, layer) in self.norms.items():
            layer.reset()
            if place in state.moments:
                layer.accum_statistics.resume(state.moments[place].moments, state.micro_step, self.follows)

    def _set_cycle(self, state):
        cycle = self.wrapper.cycle
        cycle.build([self.variables[place] for place in self._order], [_like_gradient(state, p) for p in self._order])
        for place in self.trained:
            accumulator = cycle.slot(self.variables[place])
            if accumulator is None:
                continue
            _assign(accumulator.total, state.sums.get(place, np.zeros(accumulator.total.shape)))
            if accumulator.rows is not None:
                everything = np.full(accumulator.rows.shape, place in state.sums)
                accumulator.rows.assign(state.rows.get(place, everything))
        cycle.state.weight_sum.assign(state.weight_sum)
        if cycle.state.length is not None:
            cycle.state.length.assign(cycle.plan.accum_steps)
        cycle.state.micro_step.assign(state.micro_step)


def _assign(var, value):
    var.assign(tf.cast(tf.constant(value), var.dtype))


def _like_gradient(state, place):
    """What tells a cycle which accumulator a variable needs: none, a sparse or a dense one."""
    if place not in state.sums:
        return None
    return _sparse() if place in state.rows else 0.0


def _sparse():
    return tf.IndexedSlices(tf.zeros([0, 1]), tf.zeros([0], tf.int64))
