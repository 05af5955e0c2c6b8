"""The check itself: train a model on full batches, and another one on their micro-batches."""

import numpy as np

from accum import _check, _tf
from accum._tf import tf
from accum.testing import _diagnosis
from accum.testing._batches import examples_of, full_batches, micro_batches, slices
from accum.testing._deviations import deviation, scale, wide
from accum.testing._names import names_of
from accum.testing._report import Deviation, EqualityReport
from accum.testing._same_draws import draw_by_example, seed_of_program
from accum.testing._sensitivity import checked_sensitivity

# Tolerances for layers that compute in 16 bits, and for variables of 16 bits (two units in the last place).
COMPUTED = {"float16": 3e-4, "bfloat16": 2.4e-3}
STORED = {"float16": 2.0**-9, "bfloat16": 2.0**-6}
OPTIONS = ("reduction", "micro_batch_weight", "nonfinite", "accumulator_dtype", "sparse", "whole_batch")


def train_both_ways(build_model, data, accum_steps, micro_batch_size, batch_size, steps, tolerance, options):
    """Train and compare up to the first step that diverges. Returns an `EqualityReport`."""
    split = _Split(accum_steps, micro_batch_size, batch_size)
    steps = _check.accum_steps(steps, "steps")
    _check_arguments(build_model, tolerance, options)
    batches = full_batches(data, split.full_batch_size, steps)
    split.check(examples_of(batches[0]))
    cut = [split.parts(batch, examples_of(batches[0])) for batch in batches]
    largest = max(examples_of(part) for part in cut[0])
    with seed_of_program():
        pair = _Pair(build_model, cut[0][0], accum_steps, largest, micro_batch_size is not None, options)
        tolerance = pair.tolerance if tolerance is None else tolerance
        return _compared(pair, batches, cut, tolerance, split)


class _Split:
    """How full batches are split into micro-batches, as `fit` and the model would.

    Attributes:
      full_batch_size: the examples per full batch; None if it is not given.
      said: the argument that says so, for messages.
    """

    def __init__(self, accum_steps, micro_batch_size, batch_size):
        if (accum_steps is None) == (micro_batch_size is None):
            raise ValueError(
                "Pass either `accum_steps` or `micro_batch_size`. Received: "
                f"accum_steps={accum_steps}, micro_batch_size={micro_batch_size}."
            )
        self._batch_size = None if batch_size is None else _check.accum_steps(batch_size, "batch_size")
        if micro_batch_size is None:
            self._accum_steps, self._size = _check.accum_steps(accum_steps), self._batch_size
            self.full_batch_size = self._batch_size and self._accum_steps * self._batch_size
            self.said = f"accum_steps={accum_steps}"
        else:
            self._accum_steps, self._size = 0, _check.accum_steps(micro_batch_size, "micro_batch_size")
            self.full_batch_size = self._batch_size
            self.said = f"micro_batch_size={micro_batch_size}"

    def check(self, size):
        """Raise a `ValueError` if a full batch of `size` examples is too small to be split as asked."""
        if not self._accum_steps and size <= self._size:
            raise ValueError(
                "A full batch must hold more than `micro_batch_size` examples, or nothing is split. Received: "
                f"{size} with {self.said}."
            )
        if self._accum_steps and self._size is not None and size < self.full_batch_size:
            raise ValueError(
                "`data` must hold at least `accum_steps * batch_size` examples: as in `fit`, `batch_size` is the "
                f"size of a micro-batch. Received: {size} with {self.said}, batch_size={self._batch_size}."
            )
        if size < self._accum_steps:
            raise ValueError(
                f"A full batch must hold at least `accum_steps` examples. Received: {size} with {self.said}."
            )

    def parts(self, batch, size):
        """Split a full batch; `size` is that of the first one."""
        if self._size is not None:
            return slices(batch, self._size)
        return micro_batches(batch, self._accum_steps, size // self._accum_steps)


def _check_arguments(build_model, tolerance, options):
    if not _tf.version.HAS_KERAS_API or _tf.graphs.in_static_graph():
        raise NotImplementedError(
            "In a static graph, and on TensorFlow 1.15, Keras has no train step that accumulates. Record one run on "
            "full batches and one that accumulates with `accum.testing.record`, and compare them with "
            "`accum.testing.compare`."
        )
    if not callable(build_model) or isinstance(build_model, tf.keras.Model):
        raise TypeError(f"`build_model` must be a function that returns a compiled model. Received: {build_model!r}.")
    if tolerance is not None:
        _check.positive("tolerance", tolerance)
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise TypeError(
            f"The options must be among {list(OPTIONS)}: plain Keras has no counterpart of the others. Received: "
            f"{unknown}."
        )


def _compared(pair, batches, cut, tolerance, split):
    made = {"accum_steps": len(cut[0]), "tolerance": tolerance, "split": split.said}
    before = pair.full.get_weights()
    deviations, diverged = dict.fromkeys(pair.names, 0.0), []
    for step, (batch, parts) in enumerate(zip(batches, cut), start=1):
        pair.make_step(batch, parts, step)
        full, accumulated = pair.full.get_weights(), pair.accumulated.get_weights()
        if step == 1:
            pair.note_state(before, full)
        for name, ours, theirs in zip(pair.names, accumulated, full):
            size, allowed = deviation(ours, theirs), tolerance * scale(theirs)
            deviations[name] = max(deviations[name], size)
            if not size <= allowed:
                diverged.append(Deviation(name, size, allowed))
        if diverged:
            diverged.sort(key=lambda deviation: -deviation.size / deviation.allowed)
            names = {deviation.variable for deviation in diverged}
            variables = [var for name, var in zip(pair.names, pair.full.weights) if name in names]
            excess = diverged[0].size / diverged[0].allowed
            suspects = _diagnosis.suspects(pair, batch, parts, tolerance, variables, excess)
            outcome = {"diverged_at": step, "diverged": diverged, "suspects": suspects}
            return EqualityReport(steps=step, deviations=deviations, **outcome, **made)
        trained = [(name, theirs) for name, theirs in zip(pair.names, full) if name in pair.trained]
        lost = [name for name, theirs in trained if not np.all(np.isfinite(wide(theirs)))]
        if lost:
            raise ValueError(
                f"Step {step} of the full batch itself turns `{lost[0]}` into NaN or Inf, so there is nothing to "
                "compare with. Check the data and the learning rate."
            )
    sensitivity = checked_sensitivity(pair, before, cut, tolerance)
    return EqualityReport(steps=len(batches), deviations=deviations, sensitivity=sensitivity, **made)


class _Pair:
    """A plain model and an accumulating one, with the same initial weights.

    Attributes:
      full: the model that is trained on full batches.
      accumulated: the model that is trained on their micro-batches.
      names: the names of the weights in `full`.
      trained: the names of the trainable weights.
      options: the options of accumulation.
      whole_batch: what the accumulating model computes over the whole batch.
      is_splitting: whether the accumulating model splits each full batch itself.
      moved_in_calls: the weights without a gradient that the first step of `full` has changed.
    """

    def __init__(self, build_model, micro_batch, accum_steps, micro_batch_size, is_splitting, options):
        from accum._keras._callbacks import FlushCallback
        from accum._keras._model._model import GradientAccumulateModel

        self._build = lambda: _built(build_model, micro_batch)
        self.full, twin = draw_by_example(self._build()), self._build()
        _check_twins(self.full, twin)
        twin.set_weights(self.full.get_weights())
        whole_batch = options.get("whole_batch")
        if whole_batch is None:
            whole_batch = "all" if is_splitting else ()
        self.whole_batch = _check.whole_batch(whole_batch, micro_batch_size)
        self.is_splitting = is_splitting or bool(self.whole_batch)
        how = {"micro_batch_size": micro_batch_size} if self.is_splitting else {"accum_steps": accum_steps}
        self.accumulated = GradientAccumulateModel.from_model(twin, last_cycle="carry", **how, **options)
        self.names = names_of(self.full.weights)
        self.trained = {name for name, var in zip(self.names, self.full.weights) if self._is_trained(var)}
        self.options = options
        self.moved_in_calls = []
        self._ending = FlushCallback()

    @property
    def tolerance(self):
        """The largest rounding error to expect in a few steps."""
        computed = [COMPUTED.get(dtype, 0.0) for dtype in _tf.models.compute_dtypes(self.full)]
        stored = [STORED.get(tf.as_dtype(var.dtype).name, 0.0) for var in self.full.weights]
        return max([2e-6] + computed + stored)

    def make_step(self, batch, parts, step):
        """Make one step of each model."""
        try:
            _tf.models.train_on(self.full, batch)
            for part in [batch] if self.is_splitting else parts:
                _tf.models.train_on(self.accumulated, part)
        except tf.errors.OutOfRangeError:
            raise ValueError("`build_model` must compile its model with `steps_per_execution=1`.") from None
        self._ending.end_cycle_of(self.accumulated)
        if not len(self.full.weights) == len(self.accumulated.weights) == len(self.names):
            raise ValueError(f"`build_model` must return a model with all its variables: step {step} created more.")

    def train_on_first_parts(self, before, cut):
        """Train a third model with plain Keras on the first micro-batch of each full batch. Returns its weights."""
        model = draw_by_example(self._build())
        model.set_weights(before)
        for parts in cut:
            _tf.models.train_on(model, parts[0])
        return model.get_weights()

    def note_state(self, before, after):
        """Find the weights that calls in training change, rather than the optimizer."""
        both = zip(self.names, self.full.weights, before, after)
        self.moved_in_calls = [
            var for name, var, old, new in both if name not in self.trained and deviation(new, old) > 0
        ]

    def _is_trained(self, var):
        return any(var is trained for trained in self.full.trainable_weights)


def _built(build_model, micro_batch):
    model = build_model()
    if not isinstance(model, tf.keras.Model):
        raise TypeError(f"`build_model` must return a `tf.keras.Model`. Received: {model!r}.")
    if getattr(model, "optimizer", None) is None:
        raise ValueError(f"`build_model` must compile its model with one optimizer. Received: {model!r}.")
    if _accumulates(model):
        raise ValueError(
            f"`build_model` must return a model that does not accumulate: the check wraps it. Received: {model!r}."
        )
    if not model.built:
        model(tf.nest.map_structure(lambda leaf: leaf if leaf is None else tf.convert_to_tensor(leaf), micro_batch[0]))
    for name, var in zip(names_of(model.weights), model.weights):
        dtype = tf.as_dtype(var.dtype)
        is_number = dtype.is_floating or dtype.is_complex or dtype.is_integer or dtype.is_bool
        if not is_number or (var.trainable and not (dtype.is_floating or dtype.is_complex)):
            raise TypeError(
                f"Weights must be numbers, and trainable weights floating point. Received: `{name}` of {dtype.name}."
            )
    return model


def _accumulates(model):
    from accum._keras._model._model import GradientAccumulateModel
    from accum._keras._optimizer._wrapper import GradientAccumulateOptimizer

    optimizer = _tf.optimizers.without_loss_scale(model.optimizer)
    return isinstance(model, GradientAccumulateModel) or isinstance(optimizer, GradientAccumulateOptimizer)


def _check_twins(full, twin):
    if full is twin or {id(var) for var in full.weights} & {id(var) for var in twin.weights}:
        raise ValueError("`build_model` must return a new model at each call: two calls returned the same variables.")
    shapes = [[tuple(var.shape) for var in model.weights] for model in (full, twin)]
    if shapes[0] != shapes[1]:
        raise ValueError("`build_model` must return the same model at each call. Received: {} and {}.".format(*shapes))
    if not full.trainable_weights:
        raise ValueError(f"`build_model` must return a model with at least one trainable weight. Received: {full!r}.")
