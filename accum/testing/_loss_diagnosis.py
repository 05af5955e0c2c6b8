"""Find out whether a model's loss is a mean over examples, by its class and by computing it without training."""

import numpy as np

from accum._tf import tf
from accum.testing._report import Suspect

SUM = "Compile it with the default reduction, or accumulate with reduction='sum' and micro_batch_weight='equal'"
NO_SUM = "Use reduction='mean' for a loss that is a mean, and micro_batch_weight='equal' for one that is a sum"
RATIO = (
    "Losses that compare the examples of a batch (contrastive, triplet) or are a ratio of sums over it (Dice of the "
    "batch) need all outputs of the batch: pass `whole_batch='loss'`, with which a model that has a `micro_batch_size` "
    "computes them over the whole batch, or compute the ratio for each example. For a mean over something else, such "
    "as tokens, pass a function that counts it as `micro_batch_weight=`"
)


def loss_suspects(model, batch, parts, options, tolerance):
    """Return a `Suspect` in a list if the loss differs from a mean over examples by more than a relative tolerance."""
    reductions = {_reduction(loss) for loss in tf.nest.flatten(getattr(model, "loss", None))} & {"sum", "none"}
    if reductions and options.get("reduction") != "sum":
        reason = "with reduction {} its gradient is a sum over the examples, not a mean"
        return [Suspect("the loss", reason.format(" and ".join(sorted(reductions)).upper()), SUM)]
    if _has_mask(model):
        return []  # the divisor of Keras' losses then differs between versions, and accumulation uses the same one
    try:
        whole, losses = _loss(model, batch), np.array([_loss(model, part) for part in parts])
        weights = np.array([_weight(part, options) for part in parts], np.float64)
    except Exception:  # a user's own `test_step` may do anything, so the loss may be impossible to compute
        return []
    is_sum = options.get("reduction") == "sum"
    expected = np.dot(weights, losses) / (1.0 if is_sum else weights.sum())
    if _is_close(whole, expected, tolerance):
        return []
    reason = "without training, it is {:.6g} for the full batch, but the micro-batches give {:.6g}"
    reason = reason.format(whole, expected)
    if is_sum:
        return [Suspect("the loss, with reduction='sum'", reason, NO_SUM)]
    if _is_close(whole, losses.sum(), tolerance):
        return [Suspect("the loss", "for the full batch it is the sum over the micro-batches, not their mean", SUM)]
    examples = np.array([_weight(part, {}) for part in parts])
    if _is_close(whole, np.dot(examples, losses) / examples.sum(), tolerance):
        return [Suspect("the loss, with this `micro_batch_weight`", reason, "Keep the default, 'examples'")]
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
