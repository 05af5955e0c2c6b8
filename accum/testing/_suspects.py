"""What in a model can't agree with its full batch: found by what the classes of its layers are called, however deep."""

import re

from accum import _tf
from accum._tf import tf
from accum.testing._equality import Suspect
from accum.testing._losses import loss_suspects

BATCH_NORM = re.compile("batch_?norm", re.I)
RANDOM = re.compile(
    "^Random|^RandAug|^AugMix|^MixUp|^CutMix|dropout|drop_?path|drop_?block|stochastic_?depth|noise", re.I
)
NOT_RANDOM = re.compile("^DropoutRNNCell|^RandomFourierFeatures$")  # a matter of rates; drawn once, when it is built
RATES = ("rate", "stddev", "drop_prob")  # of layers that are random by name
OWN_RATES = ("dropout", "recurrent_dropout", "attention_dropout", "dropout_rate", "drop_connect_rate")  # of others
BY_GRADIENT_SIZE = re.compile("Ada|Nadam|RMSprop|Ftrl|Lion|LAMB", re.I)
SHOWN = 4  # layers of a kind


def suspects(pair, batch, parts, tolerance):
    """What can't agree, or else what is left: a list of `Suspect`."""
    layers = [layer for layer in _tf.layers_of(pair.full) if not isinstance(layer, tf.keras.metrics.Metric)]
    found = loss_suspects(pair.full, batch, parts, pair.options, max(1e-4, 10.0 * tolerance, 10.0 * pair.tolerance))
    found += _layer_suspects(layers, pair.moved_in_calls)
    found += _model_suspects(pair)
    return found or _whatever_is_left(pair)


def _layer_suspects(layers, moved_in_calls):
    kinds = {}  # kind -> layers, the outermost of each
    inner = set()
    for layer in layers:
        kind = None if id(layer) in inner else _kind(layer)
        if kind is None and any(var is own for var in moved_in_calls for own in _own_variables(layer)):
            kind = _STATE
        if kind is not None:
            kinds.setdefault(kind, []).append(layer)
            inner.update(id(part) for part in _tf.layers_of(layer))
    return [Suspect(_listed(found), *kind) for kind, found in kinds.items()]


def _own_variables(layer):
    inner = {id(var) for part in _tf.layers_of(layer) for var in part.weights}
    return [var for var in layer.weights if id(var) not in inner]


_IN_TRAINING = (
    "in training each micro-batch is normalised by its own statistics, which are not those of the full batch",
    "Freeze it (`layer.trainable = False`) or take a layer that does not look at the batch, such as "
    "LayerNormalization; no accumulation can make the step agree",
)
_BATCH_NORM = (
    _IN_TRAINING[0] + ", and the moving statistics move once a micro-batch",
    "`accum.replace_batchnorm_layers(model, accum_steps)` or `accum.AccumBatchNormalization` move them once a step, as "
    "the full batch does (`synchronized=True` over replicas too). The normalisation in training stays that of the "
    "micro-batch: for this check freeze the layer (`layer.trainable = False`)",
)
_DRAWS = (
    "it draws anew for each micro-batch, as it would for each batch",
    "Build the model with its rate at 0, or without it, for this check; in training it does no harm, as the law holds "
    "for the mean over draws",
)
_STATEFUL = (
    "it is stateful, and carries its state from one micro-batch to the next",
    "Build it with `stateful=False`, or carry the state by yourself",
)
_STATE = (
    "each call in training moves variables that no gradient moves, so once for each micro-batch",
    "Freeze it for this check, and let what it moves move once a step: in a callback, where `optimizer.iterations` has "
    "moved",
)


def _kind(layer):
    names = [cls.__name__ for cls in type(layer).__mro__]
    if any(BATCH_NORM.search(name) for name in names):
        if not layer.trainable:
            return None  # then it normalises by its moving statistics
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
    except Exception:  # of a class of the user's own it may raise anything; then its name has to do
        return {}


def _listed(layers):
    shown = ["`{}` ({})".format(layer.name, type(layer).__name__) for layer in layers[:SHOWN]]
    more = len(layers) - len(shown)
    return ", ".join(shown) + (" and {} more".format(more) if more else "")


def _model_suspects(pair):
    model, found = pair.full, []
    if type(model).train_step is not tf.keras.Model.train_step:
        found.append(
            Suspect(
                "`train_step` of {}".format(type(model).__name__),
                "what it does with gradients before `apply_gradients`, such as clipping, it does with each "
                "micro-batch's",
                "Clip in the optimizer (`clipnorm`) or by `transform=`, which see the accumulated gradient; divide its "
                "loss by the number of examples, or count what it divides by in `micro_batch_weight`",
            )
        )
    if _tf.is_loss_scale_optimizer(model.optimizer):
        found.append(
            Suspect(
                "the loss scale",
                "an overflow costs the full batch its step, and accumulation one micro-batch",
                "Give the `LossScaleOptimizer` a fixed scale for this check",
            )
        )
    if pair.options.get("reduction") == "sum" and model.losses:
        found.append(
            Suspect(
                "regularisation",
                "under reduction='sum' its losses count once a micro-batch",
                "Take reduction='mean', or divide them by `accum_steps`",
            )
        )
    return found


def _whatever_is_left(pair):
    found = []
    short = sorted({"float16", "bfloat16"} & _tf.compute_dtypes(pair.full))
    if short:
        found.append(
            Suspect(
                "rounding",
                "layers compute in {}, where a step of order one errs by about as much as the tolerance, and where a "
                "unit may be on for the full batch and off for a micro-batch".format(" and ".join(short)),
                "Check in float32, or by smaller steps; or give a larger `tolerance=`",
            )
        )
    found.append(
        Suspect(
            "the loss",
            "no layer is to blame that could be told by its class, so it may be no mean over examples in training",
            "Give a loss that is a mean over something else, such as tokens, `micro_batch_weight=` a function that "
            "counts it; look for random or batch-dependent operations in layers of your own",
        )
    )
    optimizer = _tf.without_loss_scale(pair.full.optimizer)
    if any(BY_GRADIENT_SIZE.search(cls.__name__) for cls in type(optimizer).__mro__):
        found.append(
            Suspect(
                "rounding",
                "{} divides by the size of the gradient, so that where the true gradient is 0 its rounding errors "
                "become steps as large as the learning rate".format(type(optimizer).__name__),
                "Check with SGD, or with a larger `epsilon`",
            )
        )
    return found
