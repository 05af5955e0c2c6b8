"""Find the parts of a model that can't agree with its full batch, by the class names of its layers at any depth."""

import re
from typing import Any, Dict, Set

from accum import _tf
from accum._tf import tf
from accum.testing._duplicates import adds_duplicates_up, clips, variables_with_duplicate_rows
from accum.testing._loss_diagnosis import loss_suspects
from accum.testing._report import Suspect

BATCH_NORM = re.compile("batch_?norm", re.I)
RANDOM = re.compile(
    "^Random|^RandAug|^AugMix|^MixUp|^CutMix|dropout|drop_?path|drop_?block|stochastic_?depth|noise", re.I
)
# The first is random only if its rates are positive; the second draws its numbers once, when it is built.
NOT_RANDOM = re.compile("^DropoutRNNCell|^RandomFourierFeatures$")
# The rates of layers whose name matches `RANDOM`, and those of other layers.
RATES = ("rate", "stddev", "drop_prob")
OWN_RATES = ("dropout", "recurrent_dropout", "attention_dropout", "dropout_rate", "drop_connect_rate")
BY_GRADIENT_SIZE = re.compile("Ada|Nadam|RMSprop|Ftrl|Lion|LAMB", re.I)
SHOWN = 4  # layers of one kind


SMALL_EXCESS = 10.0
"""Tolerances up to which a deviation may be rounding: mistakes are at least hundredths of a step, mostly far more."""


def suspects(pair, batch, parts, tolerance, diverged, excess):
    """Find the parts that can't agree, or else the remaining possible causes: a list of `Suspect`.

    Args:
      pair: the two models.
      batch, parts: the full batch of the step that diverges, and its micro-batches.
      tolerance: float, the tolerance of the check.
      diverged: the variables of the full batch's model that are past the tolerance.
      excess: the largest deviation, in tolerances.
    """
    layers = [layer for layer in _tf.models.layers_of(pair.full) if not isinstance(layer, tf.keras.metrics.Metric)]
    if pair.whole_batch:
        is_exact = _tf.batch_norm.BATCH_NORMS if "batch_norm" in pair.whole_batch else ()
        suspects = _layer_suspects([layer for layer in layers if not isinstance(layer, is_exact)], pair.moved_in_calls)
        return suspects or _whatever_is_left(pair, excess)
    suspects = loss_suspects(pair.full, batch, parts, pair.options, max(1e-4, 10.0 * tolerance, 10.0 * pair.tolerance))
    suspects += _layer_suspects(layers, pair.moved_in_calls)
    suspects += _duplicate_suspects(pair.full, layers, batch, diverged)
    suspects += _model_suspects(pair)
    return suspects or _whatever_is_left(pair, excess)


def _layer_suspects(layers, moved_in_calls):
    kinds: Dict[Any, Any] = {}  # kind -> its outermost layers
    inner: Set[Any] = set()
    for layer in layers:
        kind = None if id(layer) in inner else _kind(layer)
        if kind is None and any(var is own for var in moved_in_calls for own in _own_variables(layer)):
            kind = _STATE
        if kind is not None:
            kinds.setdefault(kind, []).append(layer)
            inner.update(id(part) for part in _tf.models.layers_of(layer))
    return [Suspect(_listed(names), *kind) for kind, names in kinds.items()]


def _own_variables(layer):
    inner = {id(var) for part in _tf.models.layers_of(layer) for var in part.weights}
    return [var for var in layer.weights if id(var) not in inner]


_IN_TRAINING = (
    "in training it normalises each micro-batch by its own statistics, which are not those of the full batch",
    "Pass `whole_batch='batch_norm'`, with which a model that has a `micro_batch_size` normalises by the whole batch; "
    "freeze it (`layer.trainable = False`); or use a layer that does not depend on the batch, such as "
    "LayerNormalization",
)
_BATCH_NORM = (
    _IN_TRAINING[0] + ", and updates its moving statistics for each micro-batch",
    _IN_TRAINING[1] + ". `accum.replace_batchnorm_layers(model, accum_steps)` and `accum.AccumBatchNormalization` "
    "update the moving statistics once per step, as the full batch does (with `synchronized=True`, over replicas too), "
    "but in training they still normalise each micro-batch by itself",
)
_DRAWS = (
    "it may draw other random numbers for micro-batches than for the full batch: eagerly, with XLA, in a loop, or from "
    "a generator or a seed that the two models do not share",
    "For this check, compile without `run_eagerly` and `jit_compile`, and give the layer a seed; or build the model "
    "with a rate of 0, or without it. In training it does no harm: the steps are equal in the mean over draws",
)
_STATEFUL = (
    "it is stateful and carries its state from one micro-batch to the next",
    "Build it with `stateful=False`, or carry the state yourself",
)
_STATE = (
    "each call in training updates variables that have no gradient, so they change once per micro-batch",
    "Freeze it for this check, and update those variables once per step: in a callback, when `optimizer.iterations` "
    "has advanced",
)


def _kind(layer):
    names = [cls.__name__ for cls in type(layer).__mro__]
    if any(BATCH_NORM.search(name) for name in names):
        if not layer.trainable:
            return None  # a frozen layer normalises by its moving statistics
        return _IN_TRAINING if "AccumBatchNormalization" in names else _BATCH_NORM
    config = _config(layer)
    if _is_random(names, layer, config):
        return _DRAWS
    return _STATEFUL if config.get("stateful") is True else None


def _is_random(names, layer, config):
    if any(_positive(config.get(key)) for key in OWN_RATES):
        return True
    if not any(RANDOM.search(name) and not NOT_RANDOM.search(name) for name in names):
        return False
    rates = [config.get(key, getattr(layer, key, None)) for key in RATES]
    rates = [rate for rate in rates if rate is not None]
    return not rates or any(_positive(rate) for rate in rates)


def _positive(value):
    return isinstance(value, (int, float)) and value > 0


def _config(layer):
    try:
        return dict(layer.get_config())
    except Exception:  # a user's own class may raise anything; then only its name is used
        return {}


def _duplicate_suspects(model, layers, batch, diverged):
    optimizer = _tf.optimizers.without_loss_scale(model.optimizer)
    is_clipping = clips(optimizer)
    if not is_clipping and adds_duplicates_up(optimizer):
        return []
    variables = variables_with_duplicate_rows(model, batch[0])
    variables = [var for var in variables if any(var is other for other in diverged)]
    fed = [layer for layer in layers if any(var is own for own in _own_variables(layer) for var in variables)]
    if not fed:
        return []
    name = type(optimizer).__name__ + (" with its clipping" if is_clipping else "")
    return [
        Suspect(
            f"duplicate rows of {_listed(fed)}",
            "an id that occurs several times in the full batch contributes several slices to its row of the gradient, "
            f"which {name} treats one by one; accumulation passes each row once, with the sum of its slices",
            "Nothing is wrong in training: the accumulated step uses the summed gradient. To check the rest of the "
            "model, use full batches in which no id repeats, or SGD without clipping, which adds the slices up",
        )
    ]


def _listed(layers):
    shown = [f"`{layer.name}` ({type(layer).__name__})" for layer in layers[:SHOWN]]
    more = len(layers) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _model_suspects(pair):
    model, suspects = pair.full, []
    if type(model).train_step is not tf.keras.Model.train_step:
        suspects.append(
            Suspect(
                f"`train_step` of {type(model).__name__}",
                "any change that it makes to gradients before `apply_gradients`, such as clipping, is made for each "
                "micro-batch",
                "Clip in the optimizer (`clipnorm`) or with `transform=`, which receive the accumulated gradient. "
                "Divide the loss by the number of examples, or pass a function that computes its divisor as "
                "`micro_batch_weight=`",
            )
        )
    if _tf.optimizers.is_loss_scale_optimizer(model.optimizer):
        suspects.append(
            Suspect(
                "the loss scale",
                "an overflow costs the full batch its step, but accumulation only one micro-batch",
                "Give the `LossScaleOptimizer` a fixed scale for this check",
            )
        )
    if pair.options.get("reduction") == "sum" and model.losses:
        suspects.append(
            Suspect(
                "regularisation",
                "with reduction='sum' its losses count once per micro-batch",
                "Use reduction='mean', or divide them by `accum_steps`",
            )
        )
    return suspects


_NO_MEAN = Suspect(
    "the loss",
    "no layer of this model is known to cause it, so the training loss may not be a mean over examples",
    "For a mean over something else, such as tokens, pass a function that counts it as `micro_batch_weight=`; for a "
    "loss that compares examples, `whole_batch='loss'`. Look for random or batch-dependent operations in your own "
    "layers",
)
_ACROSS_EXAMPLES = Suspect(
    "your own layers",
    "no layer of this model is known to cause it, and the loss was computed over the whole batch",
    "Look for random operations, and for state that changes with each call",
)


def _whatever_is_left(pair, excess):
    """The causes that no part of the model shows. Rounding comes first: it can be tried without reading any code."""
    suspects = _rounding(pair, excess)
    suspects.append(_ACROSS_EXAMPLES if pair.whole_batch else _NO_MEAN)
    return suspects


def _rounding(pair, excess):
    suspects = []
    short = sorted({"float16", "bfloat16"} & _tf.models.compute_dtypes(pair.full))
    if short:
        suspects.append(
            Suspect(
                "rounding",
                f"layers compute in {' and '.join(short)}, where the rounding error of a large step is about as "
                "large as the tolerance, and where a unit may be active for the full batch but not for a "
                "micro-batch",
                "Check in float32, with smaller steps, or with a larger `tolerance=`",
            )
        )
    optimizer = _tf.optimizers.without_loss_scale(pair.full.optimizer)
    if any(BY_GRADIENT_SIZE.search(cls.__name__) for cls in type(optimizer).__mro__):
        suspects.append(
            Suspect(
                "rounding",
                f"{type(optimizer).__name__} divides by the size of the gradient, so where the true gradient is 0, "
                "rounding errors become steps as large as the learning rate",
                "Check with SGD, or with a larger `epsilon`",
            )
        )
    if not suspects and excess <= SMALL_EXCESS:
        suspects.append(
            Suspect(
                "rounding",
                f"the largest deviation is only {excess:.2g} tolerances, and micro-batches add up in another order",
                "Check in float64 (`tf.keras.backend.set_floatx('float64')`), where rounding disappears and a mistake "
                "stays, or pass a larger `tolerance=`",
            )
        )
    return suspects
