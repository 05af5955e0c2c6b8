"""Warn of losses that are no means over what a micro-batch counts by (laws L4 and L5)."""

from typing import Any, List, Sequence, Tuple

from accum import _check, _tf
from accum._tf import tf
from accum.compat.v1._checks import WITH_SUM

SUMS = (
    "The loss adds up examples without dividing by their number, so the mean over micro-batches is a fraction of the "
    f'gradient of the full batch: pass `reduction="sum"` to the `AccumOptimizer`{WITH_SUM} If each micro-batch is one '
    "example, such as an episode, and the mean over these is wanted, pass `weight=1`. [accum: sum]"
)
MEANS = (
    "The loss divides by a sum over the micro-batch, such as the number of unmasked elements, or of elements that "
    "`tf.boolean_mask` or `tf.where` selects, but micro-batches are not weighted by it. Unless it is the same in all "
    "of them, pass this sum as `weight=` where the train op is created. Several losses that divide by different sums "
    "are passed as a list, each with its own weight. [accum: loss-counts]"
)
SPLIT_SUMS = (
    "`function` adds up examples without dividing by their number, but micro-batches count by their number of "
    "examples, so the result is a fraction of that of the full batch: in `function`, divide by the number of examples, "
    "and multiply what is returned by the number of examples of the batch. This multiplies a penalty on the weights, "
    "too: divide it by the latter. [accum: sum]"
)
SPLIT_MEANS = (
    "`function` divides by a sum over the micro-batch, such as the number of unmasked elements, or of elements that "
    "`tf.boolean_mask` or `tf.where` selects, but micro-batches count by their number of examples. Unless that sum is "
    "the same in all of them, pass `weight=`, a function of the micro-batch that returns it. [accum: loss-counts]"
)


@_check.rule
def warn_of_counts(losses_and_weights: Sequence[Tuple[tf.Tensor, Any]]) -> bool:
    """Warn of losses that add up examples, or that divide by a count that is not their weight. Returns whether it did.

    Args:
      losses_and_weights: pairs of a loss, whose gradients are averaged over micro-batches, and its weight or None.
    """
    sums: List[str] = []
    means: List[str] = []
    for loss, weight in losses_and_weights:
        terms = _terms_of(loss)
        is_number = weight is not None and _tf.variables.known_value(weight) is not None
        sums += [] if is_number else [op.name for op in terms.sums]
        if not is_number and not _tf.graph_losses.uses_values(weight):  # it may be the count, which may be fed itself
            means += [count.op.name for _, count in terms.means]
    return any([_say(SUMS, sums), _say(MEANS, means)])


@_check.rule
def warn_of_split_counts(loss: tf.Tensor) -> None:
    """Warn of the loss of a function whose micro-batches count by their number of examples."""
    terms = _terms_of(loss)
    _say(SPLIT_SUMS, [op.name for op in terms.sums])
    _say(SPLIT_MEANS, [count.op.name for _, count in terms.means])


def _terms_of(loss: tf.Tensor) -> _tf.graph_losses.Terms:
    trained = [getattr(var, "handle", var).op for var in tf.compat.v1.trainable_variables()]
    is_hidden = loss.graph is not _tf.graphs.outermost_graph()  # in a branch
    return _tf.graph_losses.Terms([], []) if is_hidden else _tf.graph_losses.terms_of(loss, trained)


def _say(message: str, names: Sequence[str]) -> bool:
    if names:
        _check.warn(f"{message} Received: {_check.shown(names)}.", _check.InexactWarning)
    return bool(names)
