"""Losses over the outputs of several replicas (law L19)."""

import contextlib
from typing import Callable, Iterator, List, Optional, Sequence, Tuple

from accum import _tf
from accum._engine._replicas import rows_of_group
from accum._tf import Leaf, Nested, Options, PerReplica, Scalar, tf
from accum._tf.types import KerasContainer


class ReplicaLosses:
    """Computes losses on one replica during one step, over the outputs of all replicas of its group.

    Args:
      model: the model whose layers may have added losses.
      group_size: the number of replicas in a group.
      weight: function that returns the weight of this replica's batch, or None for 1.

    Attributes:
      is_used: whether a loss has been computed.
    """

    def __init__(self, model: tf.keras.Model, group_size: int, weight: Callable[[], Optional[Scalar]]) -> None:
        self._model = model
        self._group_size = group_size
        self._weight = weight
        self._has_gathered = False
        self.is_used = False

    def of_user(self, compute_loss: Callable[..., tf.Tensor], args: Sequence[PerReplica], kwargs: Options) -> tf.Tensor:
        """Call the user's `compute_loss` with what all replicas of the group have."""
        if self._has_gathered:
            return compute_loss(*args, **kwargs)
        args, kwargs = self._gathered((args, kwargs))
        self._has_gathered = self.is_used = True
        try:
            return compute_loss(*args, **kwargs)
        finally:
            self._has_gathered = False

    @contextlib.contextmanager
    def compiled(
        self, container: KerasContainer, y_true: Nested, y_pred: Nested, sample_weight: Nested
    ) -> Iterator[Tuple[Nested, Nested, Nested]]:
        """Return what Keras' container of compiled losses is to be called with in this context.

        Every replica computes the loss of the group, and the gradients of all are added up. So each takes its share:
        Keras divides a mean by the number of replicas, and what sums over examples is divided here.
        """
        if _tf.losses.is_neither_sum_nor_mean(container):
            raise ValueError(
                "Over the outputs of several replicas, losses must be means, or all have the reduction SUM: compile "
                "such losses, or pass `replicas_per_group={'loss': 1}`, with which each replica computes its own. "
                f"Received: reductions {_tf.losses.reductions(container)}. [accum: replicas-loss]"
            )
        self.is_used = True
        arguments = y_true, y_pred, sample_weight
        y_true, y_pred, sample_weight = arguments if self._has_gathered else self._gathered(arguments)
        if _tf.losses.sums_over_examples(container):
            sample_weight = tf.nest.map_structure(self._share, 1.0 if sample_weight is None else sample_weight)
        with _tf.losses.scalars_as_means(container):
            yield y_true, y_pred, sample_weight

    def _share(self, weight: Leaf) -> Optional[tf.Tensor]:
        if weight is None:
            return None
        weight = tf.convert_to_tensor(weight)
        weight = weight if weight.dtype.is_floating else tf.cast(weight, tf.float32)
        return weight / tf.cast(self._group_size, weight.dtype)

    def _gathered(self, structure: Sequence[Nested]) -> Nested:
        """Concatenate all tensors of a structure that have an axis over the replicas of the group, and their masks."""
        leaves = tf.nest.flatten(structure)
        masks = [getattr(leaf, "_keras_mask", None) for leaf in leaves]
        gathered: List[Leaf] = list(leaves) + masks
        indices = [index for index, leaf in enumerate(gathered) if _has_axis(leaf)]
        tensors = [tf.convert_to_tensor(gathered[index]) for index in indices]
        with _tf.steps.keeping_added_losses(self._model):
            rows = rows_of_group(tensors, self._group_size, self._weight)
        for index, tensor in zip(indices, rows):
            gathered[index] = tensor
        for tensor, mask in zip(gathered, gathered[len(leaves) :]):
            if mask is not None:
                tensor._keras_mask = mask
        return tf.nest.pack_sequence_as(structure, gathered[: len(leaves)])


def _has_axis(leaf: PerReplica) -> bool:
    """Whether a tensor has examples, or raise if they can't be gathered."""
    if leaf is None or not hasattr(leaf, "shape") or leaf.shape == ():
        return False
    is_number = isinstance(leaf, tf.Tensor) and leaf.dtype != tf.string and not leaf.dtype.is_complex
    if not is_number or leaf.shape.rank is None:
        raise TypeError(
            "Over the outputs of several replicas, what a loss receives (targets, outputs, sample weights, and inputs "
            "if it is a `compute_loss`) must be dense tensors of real numbers: make them so, or pass "
            "`replicas_per_group={'loss': 1}`, with which each replica computes its own loss. Received: "
            f"{leaf!r}. [accum: replicas-loss]"
        )
    return True
