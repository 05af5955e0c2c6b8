"""What has to hold where micro-batches by tokens end before the padded sequences do: padding counts nowhere (law L18).

Losses with a mean over all elements, padding included, divide by fewer elements in a micro-batch that is trimmed. They
are multiplied by the share of the time axis that is left, so that each micro-batch has the loss that it would have with
all of its padding.
"""

import contextlib
from typing import Any, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from accum import _check, _tf
from accum._engine import _replicas
from accum._keras._tokens._budget import TokenBatches
from accum._tf import Data, Leaf, Nested, Options, Wait, tf
from accum._tf.losses import LossCall
from accum._tf.random_ops import RandomOp


class TrimmedTime:
    """The time axis of one batch, and of the micro-batch that is computed.

    Args:
      model: a `GradientAccumulateModel`.
      shapes: the shapes of the outputs of the model, as far as they are the same for all batches; () if unknown.

    Attributes:
      length: int32 scalar tensor, the length of the time axis in the micro-batch.
      part: the leaves of the data of the micro-batch.
      padded: int32 scalar tensor, its length in the batch.
      has_losses: whether compiled losses have been computed.
    """

    def __init__(self, model: tf.keras.Model, shapes: Sequence[tf.TensorShape] = ()) -> None:
        self._model = model
        self._shapes = shapes
        self.length: Any = None
        self.padded: Any = None
        self.part: List[Leaf] = []
        self.has_losses = False
        self._noted: Optional[List[Tuple[tf.Tensor, str]]] = None  # lengths and names of outputs
        self._whats: List[str] = []
        self._needs_zero_weights: List[str] = []
        self._ignored: List[Tuple[str, Any]] = []

    def has_time(self, tensor: Leaf) -> bool:
        """Whether axis 1 of a tensor of the micro-batch is the time: its length is not static, or eagerly, the same."""
        rank = tensor.shape.rank if isinstance(tensor, tf.Tensor) else None
        if self.padded is None or not rank or rank < 2:
            return False
        if not tf.executing_eagerly():
            return tensor.shape[1] is None
        if int(tensor.shape[1]) != int(self.length):
            return False
        alike = [shape for shape in self._shapes if shape.is_compatible_with(tensor.shape)]
        return all(shape.rank is None or shape[1] is None for shape in alike)

    def origin_of(self, tensor: Leaf) -> Optional[int]:
        """Return which leaf of the micro-batch a tensor is, but for its dtype and axes of length 1, or None."""
        if not self.has_time(tensor):
            return None
        if tf.executing_eagerly():
            alike = [place for place, leaf in enumerate(self.part) if _is_same(leaf, tensor)]
            return alike[0] if len(alike) == 1 else None
        places = {id(leaf): place for place, leaf in enumerate(self.part)}
        for source in _tf.op_walks.sources_of_value(tensor):
            if id(source) in places:
                return places[id(source)]
        return None

    # ------------------------------------------------------------------------------------------------------------
    # Losses and metrics

    def scaled(self, call: LossCall, value: tf.Tensor) -> tf.Tensor:
        """Return the value of a loss, computed over the trimmed micro-batch, as it would be with padding.

        Raises:
          ValueError: padding has a part in the loss, or may have.
        """
        self.has_losses = True
        self._check_target(call)
        if not self.has_time(call.output):
            return value
        self._check_padding(call)
        if call.loss.reduction == "sum" or _tf.losses.divides_by_counted(call):
            return value
        return value * tf.cast(self._share_of(call.output, f"output {call.name!r}"), value.dtype)

    def _check_target(self, call: LossCall) -> None:
        target, output = call.target, call.output
        is_alike = self.has_time(target) and not self.has_time(output) and getattr(output, "shape", None) is not None
        if is_alike and output.shape.rank == target.shape.rank and not tf.executing_eagerly():
            raise ValueError(
                "`micro_batch_tokens` trims axis 1 of a target that is as long as the padded sequences, but axis 1 of "
                "the output is not the time: pad the sequences to another length. Received: target of shape "
                f"{target.shape}, output {call.name!r} of shape {output.shape}. [accum: tokens-padding]"
            )

    def _check_padding(self, call: LossCall) -> None:
        if call.output.shape.rank < 3:
            raise ValueError(
                "Losses are means over the last axis, which is the time of this output, padding included: give it a "
                f"last axis of length 1, as `Dense(1)` has. Received: output {call.name!r} of shape "
                f"{call.output.shape}. [accum: tokens-padding]"
            )
        elements = _tf.losses.elements_of_users_loss(call)
        if elements is not None and (elements.shape.rank or 0) < 2:
            raise ValueError(
                "With `micro_batch_tokens`, a loss of an output that has a time axis must return one number for each "
                f"time step, with shape [examples, time]. Received: shape {elements.shape} for {call.name!r}."
                " [accum: tokens-padding]"
            )
        if _tf.losses.mask_of(call.output) is not None:
            return
        ignored = _tf.losses.ignored_class(call.loss)
        if self.has_time(call.weights):
            self._needs_zero_weights.append(call.name)
        elif ignored is not None:
            self._ignored.append((call.name, ignored))
        else:
            raise ValueError(
                "Padding counts in the loss of an output without a mask, and `micro_batch_tokens` trims it: let layers "
                "pass the mask on (`mask_zero=True`, `supports_masking`), pass a `sample_weight` of shape "
                "[examples, time] that is 0 at padding, or a loss with an `ignore_class`. Received: output "
                f"{call.name!r}. [accum: tokens-padding]"
            )

    def warn_of_metric(self, metric: tf.keras.metrics.Metric, args: Sequence[Any], kwargs: Options) -> None:
        """Warn once of a metric that counts padding at the full batch."""
        outputs = [leaf for leaf in tf.nest.flatten(list(args[:2])) if self.has_time(leaf)]
        is_masked = _tf.steps.metrics_apply_masks() and any(_tf.losses.mask_of(leaf) is not None for leaf in outputs)
        has_weights = self.has_time(_weights_among(args, kwargs))
        warned = self._model._accum.told_of_metrics
        is_container = hasattr(metric, "metrics")  # the compiled ones of Keras 3
        counts = len(args) > 1 and outputs and not has_weights and not is_masked and not is_container
        if counts and metric.name not in warned:
            warned.add(metric.name)
            _check.warn(
                f"The metric {metric.name!r} counts padding, which `micro_batch_tokens` trims, so its value differs "
                "from that of the full batch: pass it as one of `weighted_metrics`, with a `sample_weight` that is 0 "
                "at padding. [accum: tokens-padding]",
                _check.InexactWarning,
            )

    def reweighted(self, metric: tf.keras.metrics.Metric, args: Sequence[Any], kwargs: Options) -> Any:
        """Return the arguments of an update with weights for what is trimmed, if the metric averages over the time."""
        is_timed = len(args) > 1 and self.has_time(args[1]) and (args[1].shape.rank or 0) >= 3
        if not is_timed or not _tf.steps.averages_time_first(metric):
            return args, kwargs
        weights = _weights_among(args, kwargs)
        if weights is None and _tf.losses.mask_of(args[1]) is None:
            return args, kwargs
        share = self._share_of(args[1], f"metric {metric.name!r}")
        if weights is None:
            weights = tf.ones(tf.shape(args[1])[:2])
        return args[:2], dict(kwargs, sample_weight=tf.cast(weights, tf.float32) * share)

    def _share_of(self, output: tf.Tensor, what: str) -> tf.Tensor:
        """Return the share of the time axis that is left in the micro-batch, if that is axis 1 of the output."""
        self._check_length(tf.shape(output)[1], what)
        return tf.cast(self.length, tf.float32) / tf.cast(self.padded, tf.float32)

    def _check_length(self, length: tf.Tensor, what: str) -> None:
        if self._noted is not None:
            self._noted.append((length, what))
            return
        message = (
            "`micro_batch_tokens` scales a mean over time steps by the share of them that it keeps, so axis 1 of an "
            "output must be as long as the sequences: shift or shorten them before `fit` instead of in the step or in "
            f"layers, or pass `micro_batch_size`. Received: {what} of another length. [accum: tokens-padding]"
        )
        tf.debugging.assert_equal(length, self.length, message)

    @contextlib.contextmanager
    def noting_lengths(self) -> Iterator[List[tf.Tensor]]:
        """In this context, note the lengths of outputs for `check_lengths` later: XLA leaves out what can raise."""
        lengths: List[tf.Tensor] = []
        self._noted = []
        try:
            yield lengths
        finally:
            lengths += [length for length, _ in self._noted]
            self._whats, self._noted = [what for _, what in self._noted], None

    def check_lengths(self, lengths: Sequence[tf.Tensor]) -> None:
        """Check the lengths that were noted, outside of what XLA compiles."""
        for length, what in zip(lengths, self._whats):
            self._check_length(length, what)

    # ------------------------------------------------------------------------------------------------------------
    # Checks of the values of a batch

    def checks(self, data: Data, lengths: tf.Tensor, timed: Sequence[Leaf]) -> List[Wait]:
        """Return operations that fail if padding has a part in a loss that has been computed.

        Args:
          data: what Keras gives to a step.
          lengths: int32 [n].
          timed: the leaves of `data` that are trimmed.
        """
        if self.padded is None:
            return []
        _, targets, weights = _tf.losses.unpack_data(data)
        made: List[Wait] = []
        if self._needs_zero_weights:
            trimmed = _trimmed_among(weights, timed)
            if not trimmed and self._model._accum.is_first_time("weights of padding"):
                _check.warn(
                    "`micro_batch_tokens` trims padding, and can't check that it has a weight of 0, because the train "
                    "step computes the weights: pass them to `fit` as `sample_weight`, or make sure that they are 0 "
                    f"there. Received: outputs {self._needs_zero_weights}. [accum: tokens-padding]",
                    _check.InexactWarning,
                )
            for leaf in trimmed:
                message = (
                    "Padding has a `sample_weight` other than 0, and `micro_batch_tokens` trims it: pass 0 there, or "
                    f"let layers pass a mask on. Received: outputs {self._needs_zero_weights}. [accum: tokens-padding]"
                )
                made.append(tf.debugging.assert_equal(_at_padding(leaf, lengths, 0), tf.zeros_like(leaf), message))
        for name, ignored in self._ignored:
            for leaf in _trimmed_among(targets, timed):
                message = (
                    f"Padding has a target other than the `ignore_class`={ignored} of the loss of {name!r}."
                    " [accum: tokens-padding]"
                )
                expected = tf.fill(tf.shape(leaf), tf.cast(ignored, leaf.dtype))
                made.append(tf.debugging.assert_equal(_at_padding(leaf, lengths, ignored), expected, message))
        return [check for check in made if check is not None]


def _is_same(leaf: Leaf, tensor: tf.Tensor) -> bool:
    """Whether eager tensors have the same values, but for their dtype and axes of length 1."""
    is_alike = isinstance(leaf, tf.Tensor) and leaf.dtype != tf.string and tf.size(leaf) == tf.size(tensor)
    return is_alike and np.array_equal(np.ravel(tf.cast(leaf, tensor.dtype)), np.ravel(tensor))


def _weights_among(args: Sequence[Any], kwargs: Options) -> Any:
    """Return the weights among the arguments of a metric's `update_state`, or None."""
    return args[2] if len(args) > 2 else kwargs.get("sample_weight")


def _trimmed_among(part: Nested, timed: Sequence[Leaf]) -> List[tf.Tensor]:
    return [leaf for leaf in tf.nest.flatten(part) if any(leaf is one for one in timed)]


def _at_padding(leaf: tf.Tensor, lengths: tf.Tensor, otherwise: Any) -> tf.Tensor:
    """Return the values of a tensor at padding, and `otherwise` elsewhere."""
    is_padding = tf.range(tf.shape(leaf)[1])[None] >= lengths[:, None]
    is_padding = tf.reshape(is_padding, tf.concat([tf.shape(is_padding), tf.ones([leaf.shape.rank - 2], tf.int32)], 0))
    is_padding = tf.broadcast_to(is_padding, tf.shape(leaf))
    return tf.where(is_padding, leaf, tf.fill(tf.shape(leaf), tf.cast(otherwise, leaf.dtype)))


# ----------------------------------------------------------------------------------------------------------------
# Whether the model reads padding

PROBED = 4
"""How many examples are computed with and without padding, in one batch."""

ATTEMPTS = 10
"""In how many batches at most until outputs can tell: if alike for all examples, or not finite, they say nothing."""

LATER = 1024
"""Up to how many batches after that, in those whose number is a power of 2: a gate at 0 hides what reads padding."""

_READERS = frozenset(
    ["AdditiveAttention", "Attention", "AveragePooling1D", "Bidirectional", "Conv1D", "Flatten", "GRU"]
    + ["GlobalAveragePooling1D", "GlobalMaxPooling1D", "LSTM", "Lambda", "MaxPooling1D", "MultiHeadAttention"]
    + ["Permute", "RNN", "SeparableConv1D", "SimpleRNN", "TFOpLambda", "TimeDistributed"]
)
"""Layers of Keras that read padding, unless a mask hides it."""


def check_batch_norms(model: tf.keras.Model) -> None:
    """Raise if batch normalization sees the time steps, hence the padding, of a model."""
    norms = [
        layer for layer in _tf.batch_norm.batch_norms_in(model) if _tf.models.rank_of_input(layer) not in (None, 2)
    ]
    names = [layer.name for layer in norms if layer.trainable]
    if names:
        raise ValueError(
            "Batch normalization over time steps counts padding, which `micro_batch_tokens` trims: use layer "
            f"normalization, freeze these layers, or pass `micro_batch_size`. Received: {_check.shown(names)}."
            " [accum: tokens-padding]"
        )


def probe(model: tf.keras.Model, batches: TokenBatches, lengths: tf.Tensor) -> List[Wait]:
    """Return operations that fail if some outputs of the model differ without padding, in batches that are due.

    Args:
      model: a `GradientAccumulateModel`.
      batches: the micro-batches, whose last examples are the shortest.
      lengths: int32 [n], the lengths of the examples.
    """
    if model._accum.probed is None:  # it counts batches with padding, from `ATTEMPTS` on once outputs could tell
        with tf.init_scope():
            model._accum.probed = _tf.variables.new_counter("is_probed")
    probed = _replicas.local_variable(model._accum.probed)
    count = tf.minimum(PROBED, batches.batch.count)
    begin = batches.batch.count - count
    own = tf.gather(lengths, tf.slice(batches.plan.order, [begin], [count]))
    longest = tf.maximum(tf.reduce_max(own), tf.minimum(2, batches.padded))
    has_padding = (count > 0) & (longest < batches.padded)
    number = probed.read_value()
    later = number - ATTEMPTS
    is_later = (later <= LATER) & tf.equal(tf.bitwise.bitwise_and(later, later - 1), 0)
    is_due = has_padding & ((later < 0) | is_later)

    def compared() -> tf.Tensor:
        whole = batches.batch.part(begin, count)
        x = _tf.losses.unpack_data(whole)[0]
        trimmed = _tf.losses.unpack_data(batches.trimmed(whole, longest))[0]
        with _same_draws(model):
            outputs = _outputs_of(model, trimmed, x)
        if outputs is None:
            return tf.constant(False)
        checks = _differences(model, *outputs, own, longest)
        with tf.control_dependencies([check for check in checks if check is not None]):
            least = tf.where(_tells(outputs[0]), tf.constant(ATTEMPTS, tf.int64), tf.zeros([], tf.int64))
            probed.assign(tf.maximum(number + 1, least))
            return tf.constant(True)

    def passed() -> tf.Tensor:
        probed.assign_add(tf.cast(has_padding, tf.int64))
        return tf.constant(False)

    if tf.executing_eagerly():
        return [compared() if bool(is_due) else passed()]
    return [tf.cond(is_due, compared, passed)]


@contextlib.contextmanager
def _same_draws(model: tf.keras.Model) -> Iterator[None]:
    """Let a model draw after this context what it would have drawn without it.

    The recurrent layers of Keras 3 take a seed for their dropout from a variable and advance it, in prediction too.
    """
    variables = _tf.steps.seeds_of(model) + _tf.steps.seeds_without_model() + _tf.steps.generators_of(model)
    states = [_replicas.local_variable(_tf.variables.native(var)) for var in variables]
    before = [tf.identity(state.read_value()) for state in states]
    yield
    for state, value in zip(states, before):
        state.assign(value)


def _outputs_of(model: tf.keras.Model, trimmed: Nested, whole: Nested) -> Optional[Tuple[Nested, Nested]]:
    """Return the outputs of a model without and with padding; None, with a warning, if they can't be compared."""
    random: List[str] = []
    outputs: Optional[Tuple[Nested, Nested]]

    def noted(op: RandomOp) -> None:
        random.append(op.output.op.name)

    try:
        first = model(trimmed, training=False)  # which may create variables, from random numbers
        with _tf.random_ops.replacing(noted):
            outputs = first, model(whole, training=False)
        why = f"it draws random numbers in prediction: {_check.shown(random)}" if random else ""
    except Exception as error:  # the train step may call the model in another way
        outputs, why = None, f"calling it with x raises {type(error).__name__}"
    if not why:
        return outputs
    if model._accum.is_first_time("probe of padding"):
        _check.warn(
            "`micro_batch_tokens` trims padding, and can't check whether the outputs of the model depend on it, "
            f"because {why}. The update is that of the full batch if they do not. [accum: tokens-padding]",
            _check.InexactWarning,
        )
    return None


def _tells(outputs: Nested) -> tf.Tensor:
    """Return whether outputs are finite and differ between examples, so that they could show what the model reads."""
    told = tf.constant(True)
    for output in tf.nest.flatten(outputs):
        if isinstance(output, tf.Tensor) and output.dtype.is_floating and output.shape.rank:
            values = tf.cast(output, tf.float32)
            told &= tf.reduce_all(tf.math.is_finite(values)) & tf.reduce_any(tf.not_equal(values, values[:1]))
    return told


def _differences(
    model: tf.keras.Model, trimmed: Nested, whole: Nested, lengths: tf.Tensor, longest: tf.Tensor
) -> List[Wait]:
    named = [layer.name for layer in _tf.models.layers_of(model) if type(layer).__name__ in _READERS]
    hint = f" Layers that may: {named}." if named else ""
    message = (
        "The outputs of the model for a sequence depend on its padding, so `micro_batch_tokens`, which trims it, would "
        "change them: give the model a mask (`mask_zero=True`, `Masking`, an attention mask) that all layers respect, "
        f"check `sequence_lengths`, or pass `micro_batch_size`.{hint} [accum: tokens-padding]"
    )
    checks: List[Wait] = []
    for one, other in zip(tf.nest.flatten(trimmed), tf.nest.flatten(whole)):
        if not isinstance(one, tf.Tensor) or not one.dtype.is_floating or not one.shape.rank:
            continue
        mask = _tf.losses.mask_of(other)
        if mask is not None and mask.shape.rank == 2:
            taken = tf.cast(_at_padding(tf.cast(mask, tf.int32), lengths, 0), tf.bool)
            checks.append(tf.debugging.assert_equal(taken, tf.zeros_like(taken), message))
        checks.append(_equal(one, other, lengths, longest, message))
    return checks


def _equal(one: tf.Tensor, other: tf.Tensor, lengths: tf.Tensor, longest: tf.Tensor, message: str) -> Any:
    """Check that outputs are equal where there is no padding."""
    tolerance = 1e-3 if one.dtype in (tf.float32, tf.float64) else 5e-2
    if one.shape.rank >= 2:
        is_timed = tf.equal(tf.shape(one)[1], longest) & (tf.shape(other)[1] > longest)
        other = other[:, : tf.shape(one)[1]]
        last = tf.where(is_timed, lengths, tf.fill(tf.shape(lengths), tf.shape(one)[1]))
    one, other = tf.cast(one, tf.float32), tf.cast(other, tf.float32)
    difference = tf.abs(one - other)
    if one.shape.rank >= 2:
        difference -= _at_padding(difference, last, 0)
    scale = tf.reduce_max(tf.abs(other))
    largest = tf.reduce_max(difference)
    return tf.debugging.Assert((largest <= tolerance * scale) | tf.math.is_nan(largest), [message, largest, scale])
