"""Whether a model's loss is a mean over examples: asked of the class, and of the loss itself without training."""

import numpy as np

from accum._tf import tf
from accum.testing._equality import Suspect

SUM = "Compile it with the default reduction, or accumulate by reduction='sum' with micro_batch_weight='equal'"
NO_SUM = "Take reduction='mean' for a loss that is a mean, and micro_batch_weight='equal' for one that is a sum"
RATIO = (
    "Losses that compare the examples of a batch (contrastive, triplet) or are a ratio of sums over it (Dice of the "
    "batch) can't be accumulated exactly: choose the micro-batch's size by what the loss needs, or take the ratio for "
    "each example. One that is a mean over something else, such as tokens, takes `micro_batch_weight=` a function that "
    "counts it"
)


def loss_suspects(model, batch, parts, options, tolerance):
    """What the loss does that no mean over examples does, beyond a relative tolerance: a list of one or none."""
    reductions = {_reduction(loss) for loss in tf.nest.flatten(getattr(model, "loss", None))} & {"sum", "none"}
    if reductions and options.get("reduction") != "sum":
        reason = "with reduction {} its gradient is a sum over the examples, no mean"
        return [Suspect("the loss", reason.format(" and ".join(sorted(reductions)).upper()), SUM)]
    if _has_mask(model):
        return []  # what Keras' losses divide by then differs from line to line, and accumulation knows it
    try:
        whole, losses = _loss(model, batch), np.array([_loss(model, part) for part in parts])
        weights = np.array([_weight(part, options) for part in parts], np.float64)
    except Exception:  # a `test_step` of the user's own may do anything; then the loss can't be asked
        return []
    is_sum = options.get("reduction") == "sum"
    expected = np.dot(weights, losses) / (1.0 if is_sum else weights.sum())
    if _is_close(whole, expected, tolerance):
        return []
    reason = "without training, that of the full batch is {:.6g}, and what the micro-batches' come to is {:.6g}"
    reason = reason.format(whole, expected)
    if is_sum:
        return [Suspect("the loss, with reduction='sum'", reason, NO_SUM)]
    if _is_close(whole, losses.sum(), tolerance):
        return [Suspect("the loss", "that of the full batch is the sum of those of the micro-batches, no mean", SUM)]
    examples = np.array([_weight(part, {}) for part in parts])
    if _is_close(whole, np.dot(examples, losses) / examples.sum(), tolerance):
        return [Suspect("the loss, with this `micro_batch_weight`", reason, "Leave it at 'examples'")]
    return [Suspect("the loss", reason, RATIO)]


def _is_close(ours, theirs, tolerance):
    return abs(ours - theirs) <= tolerance * max(1.0, abs(theirs))


def _reduction(loss):
    reduction = getattr(loss, "reduction", "auto")
    return str(getattr(reduction, "value", reduction)).lower()


def _has_mask(model):
    return any(getattr(layer, "mask_zero", False) or type(layer).__name__ == "Masking" for layer in model.layers)


def _loss(model, batch):
    model.reset_metrics()
    return float(np.asarray(model.test_on_batch(*batch, return_dict=True)["loss"]))


def _weight(part, options):
    weight = options.get("micro_batch_weight", "examples")
    if callable(weight):
        return float(np.asarray(weight(*(part + (None,) * (3 - len(part))))))
    sizes = [leaf.shape[0] for leaf in tf.nest.flatten(part) if leaf is not None]
    return 1.0 if weight == "equal" else float(sizes[0])
