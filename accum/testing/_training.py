"""The check itself: a model trained on full batches, and another one on their micro-batches."""

import numpy as np

from accum import _check, _tf
from accum._tf import tf
from accum.testing import _suspects
from accum.testing._batches import examples_of, full_batches, micro_batches
from accum.testing._equality import Deviation, EqualityReport
from accum.testing._names import names_of

COMPUTED = {"float16": 3e-4, "bfloat16": 2.4e-3}  # tolerances where layers compute in 16 bit
STORED = {"float16": 2.0**-9, "bfloat16": 2.0**-6}  # and where variables have 16: two units of their last place
OPTIONS = ("reduction", "micro_batch_weight", "nonfinite", "accumulator_dtype", "sparse")


def train_both_ways(build_model, data, accum_steps, batch_size, steps, tolerance, options):
    """Train and compare up to the first step that diverges. Returns an `EqualityReport`."""
    accum_steps, steps = _check.accum_steps(accum_steps), _check.accum_steps(steps, "steps")
    _check_arguments(build_model, tolerance, options)
    batches = full_batches(data, batch_size, steps)
    size = examples_of(batches[0])
    if size < accum_steps:
        raise ValueError(
            "A full batch must hold `accum_steps` examples at least. Received: {} with accum_steps={}.".format(
                size, accum_steps
            )
        )
    cut = [micro_batches(batch, accum_steps, size // accum_steps) for batch in batches]
    pair = _Pair(build_model, cut[0][0], accum_steps, options)
    tolerance = pair.tolerance if tolerance is None else tolerance
    return _compared(pair, batches, cut, tolerance, accum_steps)


def _check_arguments(build_model, tolerance, options):
    if not _tf.HAS_KERAS_FACE or _tf.in_static_graph():
        raise NotImplementedError(
            "In a static graph, and on TensorFlow 1.15, Keras has no train step that accumulates: record a run of "
            "each kind with `accum.testing.record`, and compare them with `accum.testing.compare`."
        )
    if not callable(build_model) or isinstance(build_model, tf.keras.Model):
        raise TypeError(
            "`build_model` must be a function that makes a compiled model. Received: {!r}.".format(build_model)
        )
    if tolerance is not None:
        _check.positive("tolerance", tolerance)
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise TypeError(
            "The options must be of {}: plain Keras has nothing to compare others with. Received: {}.".format(
                list(OPTIONS), unknown
            )
        )


def _compared(pair, batches, cut, tolerance, accum_steps):
    before = pair.full.get_weights()
    deviations, diverged, moved = dict.fromkeys(pair.names, 0.0), [], 0.0
    for step, (batch, parts) in enumerate(zip(batches, cut), start=1):
        pair.make_step(batch, parts, step)
        full, accumulated = pair.full.get_weights(), pair.accumulated.get_weights()
        if step == 1:
            pair.note_state(before, full)
        for name, first, ours, theirs in zip(pair.names, before, accumulated, full):
            size, allowed = _deviation(ours, theirs), tolerance * _scale(theirs)
            deviations[name] = max(deviations[name], size)
            if name in pair.trained:
                moved = max(moved, _deviation(theirs, first), _deviation(ours, first))
            if not size <= allowed:
                diverged.append(Deviation(name, size, allowed))
        if diverged:
            diverged.sort(key=lambda deviation: -deviation.size / deviation.allowed)
            suspects = _suspects.suspects(pair, batch, parts, tolerance)
            return EqualityReport(step, accum_steps, tolerance, deviations, step, diverged, suspects)
        trained = [(name, theirs) for name, theirs in zip(pair.names, full) if name in pair.trained]
        lost = [name for name, theirs in trained if not np.all(np.isfinite(_wide(theirs)))]
        if lost:
            raise ValueError(
                "The full batch's own step {} makes `{}` a NaN or an infinity: nothing to compare with. Look at the "
                "data and at the learning rate.".format(step, lost[0])
            )
    if moved <= tolerance:
        raise ValueError(
            "No weight moves by more than the tolerance, so that the check can't fail: train with a larger learning "
            "rate or for more `steps`, and freeze less. Received: {:.1e} in {} steps, tolerance={:.0e}.".format(
                moved, len(batches), tolerance
            )
        )
    return EqualityReport(len(batches), accum_steps, tolerance, deviations)


def _deviation(ours, theirs):
    """The largest absolute difference, where what is equal, or not a number in both, does not differ."""
    ours, theirs = _wide(ours), _wide(theirs)
    same = (ours == theirs) | ((ours != ours) & (theirs != theirs))
    with np.errstate(invalid="ignore"):
        off = np.where(same, 0.0, np.abs(ours - theirs))
    return float(np.max(np.where(off == off, off, np.inf))) if off.size else 0.0


def _scale(values):
    finite = np.abs(_wide(values))
    finite = finite[np.isfinite(finite)]
    return max(1.0, float(finite.max())) if finite.size else 1.0


def _wide(values):
    values = np.asarray(values)
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


class _Pair:
    """Two models from the same weights, one of which accumulates.

    Attributes:
      full: the one that is trained on full batches.
      accumulated: the one that is trained on their micro-batches.
      names: the names of the weights, as those of `full`.
      trained: those of the trainable ones.
      options: the options of the accumulation.
      moved_in_calls: the weights that no gradient moves and the first step of `full` has moved.
    """

    def __init__(self, build_model, micro_batch, accum_steps, options):
        from accum._callbacks import FlushCallback
        from accum._model import GradientAccumulateModel

        self.full, twin = (_built(build_model, micro_batch) for _ in range(2))
        _check_twins(self.full, twin)
        twin.set_weights(self.full.get_weights())
        self.accumulated = GradientAccumulateModel.from_model(twin, accum_steps, last_cycle="carry", **options)
        self.names = names_of(self.full.weights)
        self.trained = {name for name, var in zip(self.names, self.full.weights) if self._is_trained(var)}
        self.options = options
        self.moved_in_calls = []
        self._ending = FlushCallback()

    @property
    def tolerance(self):
        """What rounding may come to in a few steps."""
        computed = [COMPUTED.get(dtype, 0.0) for dtype in _tf.compute_dtypes(self.full)]
        stored = [STORED.get(tf.as_dtype(var.dtype).name, 0.0) for var in self.full.weights]
        return max([2e-6] + computed + stored)

    def make_step(self, batch, parts, step):
        """One step of each model."""
        try:
            _tf.train_on(self.full, batch)
            for part in parts:
                _tf.train_on(self.accumulated, part)
        except tf.errors.OutOfRangeError:
            raise ValueError("The check needs a model that is compiled with `steps_per_execution=1`.") from None
        self._ending.end_cycle_of(self.accumulated)
        if not len(self.full.weights) == len(self.accumulated.weights) == len(self.names):
            raise ValueError(
                "`build_model` must make a model that has all its variables: step {} made more.".format(step)
            )

    def note_state(self, before, after):
        """Find the weights that a call in training moves by itself."""
        both = zip(self.names, self.full.weights, before, after)
        self.moved_in_calls = [
            var for name, var, old, new in both if name not in self.trained and _deviation(new, old) > 0
        ]

    def _is_trained(self, var):
        return any(var is trained for trained in self.full.trainable_weights)


def _built(build_model, micro_batch):
    model = build_model()
    if not isinstance(model, tf.keras.Model):
        raise TypeError("`build_model` must make a `tf.keras.Model`. Received: {!r}.".format(model))
    if getattr(model, "optimizer", None) is None:
        raise ValueError("`build_model` must compile its model, with one optimizer. Received: {!r}.".format(model))
    if _accumulates(model):
        raise ValueError(
            "`build_model` must make a model that does not accumulate: the check wraps it. Received: {!r}.".format(
                model
            )
        )
    if not model.built:
        model(tf.nest.map_structure(lambda leaf: leaf if leaf is None else tf.convert_to_tensor(leaf), micro_batch[0]))
    for name, var in zip(names_of(model.weights), model.weights):
        dtype = tf.as_dtype(var.dtype)
        is_number = dtype.is_floating or dtype.is_complex or dtype.is_integer or dtype.is_bool
        if not is_number or (var.trainable and not (dtype.is_floating or dtype.is_complex)):
            raise TypeError(
                "Weights must be numbers, and trainable ones floating. Received: `{}` of {}.".format(name, dtype.name)
            )
    return model


def _accumulates(model):
    from accum._model import GradientAccumulateModel
    from accum._optimizer import GradientAccumulateOptimizer

    optimizer = _tf.without_loss_scale(model.optimizer)
    return isinstance(model, GradientAccumulateModel) or isinstance(optimizer, GradientAccumulateOptimizer)


def _check_twins(full, twin):
    if full is twin or {id(var) for var in full.weights} & {id(var) for var in twin.weights}:
        raise ValueError("`build_model` must make a new model at each call: two calls gave the same variables.")
    shapes = [[tuple(var.shape) for var in model.weights] for model in (full, twin)]
    if shapes[0] != shapes[1]:
        raise ValueError("`build_model` must make the same model at each call. Received: {} and {}.".format(*shapes))
    if not full.trainable_weights:
        raise ValueError("`build_model` must make a model with a weight to train. Received: {!r}.".format(full))
