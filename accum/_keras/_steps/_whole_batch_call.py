"""A model that takes a whole batch and computes it in micro-batches, exactly (law L19).

In a train step, `model(x, training=True)` is replaced. It returns the outputs of the whole batch, and a tape that
differentiates them computes each micro-batch again. So the rest of the train step is that of the full batch: the loss,
metrics, regularization and sample weights are computed by Keras, or by the user's code, on all outputs at once.
"""

import contextlib
import inspect
from typing import Callable, Dict, Iterator, List, Optional, Sequence

from accum import _check, _tf
from accum._engine import _replicas
from accum._engine._batch import Batch, Size
from accum._engine._trace import is_differentiable
from accum._engine._whole_call import whole_call
from accum._keras._steps._changed_variables import warn_of_moved
from accum._keras._steps._draws_of_batch import BatchDraws
from accum._keras._steps._losses_over_replicas import ReplicaLosses
from accum._keras._steps._traced_model_call import TracedCall, traced_call
from accum._tf import Nested, Scalar, tf


class WholeBatchCall:
    """Stands in for the call of a model during one step, on one replica.

    Args:
      model: a `GradientAccumulateModel`.
      size: int or int32 scalar tensor, the largest number of examples in a micro-batch.
      barriers: of "loss" and "batch_norm".
      replicas_per_group: number of replicas in a group for each of these, None for all.
      weight: function that returns the weight of this replica's batch, or None for 1.
      is_training: whether its gradient is needed.
      draws: the `BatchDraws` of the step.

    Attributes:
      replica_losses: what computes losses over the outputs of several replicas, or None.
      losses: what layers have added as losses in the latest call: list of scalars.
      is_used: whether the model has been called.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        size: Size,
        barriers: Sequence[str],
        replicas_per_group: Dict[str, Optional[int]],
        weight: Callable[[], Optional[Scalar]],
        is_training: bool,
        draws: BatchDraws,
    ) -> None:
        self._model = model
        self._is_training = is_training
        self._draws = draws
        self._recompute = model._accum.recompute
        self._size = size
        self._barriers = barriers
        self._weight = weight
        groups = {name: _check.group_size(replicas_per_group[name], _replicas.count()) for name in barriers}
        self._group_size = groups.get("batch_norm", 1)
        self._loss_group = groups.get("loss", 1)
        self.replica_losses = None if self._loss_group == 1 else ReplicaLosses(self._loss_group, weight)
        self._is_within = False
        self.losses: List[tf.Tensor] = []
        self.is_used = False

    def __call__(self, call: Callable[..., Nested], args: Sequence[Nested], kwargs: Dict[str, Nested]) -> Nested:
        """Call the model.

        Args:
          call: the `__call__` of the model's class.
          args, kwargs: its arguments.
        """
        if self._is_within:
            return call(*args, **kwargs)
        self.is_used = True
        batch = Batch((tuple(args), dict(kwargs)))
        if not self._model.built:
            with self._within():
                _build(call, batch)
        traced = self._traced(call, batch, args, kwargs)
        segments = traced.segments
        leaves = tf.nest.flatten((args, kwargs), expand_composites=True)  # a sparse tensor is its values and others
        leaves += [outside for outside, _ in segments.graph.trace.captures if outside.dtype != tf.resource]
        whole, losses = whole_call(
            segments,
            batch,
            self._size,
            [_tf.variables.native(var) for var in self._model.trainable_variables],
            [leaf for leaf in leaves if tf.is_tensor(leaf) and is_differentiable(leaf)],
            _tf.steps.is_compiled_by_xla(self._model),
            self._group_size,
            self._weight,
            self._draws,
        )
        warn_of_moved(self._model, segments.graph.moved)
        self.losses = self._as_shares(losses, batch)  # Keras keeps those of the latest call
        return traced.outputs(whole)

    def _as_shares(self, losses: List[tf.Tensor], batch: Batch) -> List[tf.Tensor]:
        """Weight what layers of this replica have added by its examples, if replicas share a loss.

        Keras then averages the replicas' losses, in the logs and, unless the gradients are weighted later, in the step.
        """
        if self._loss_group == 1 or not losses:
            return losses
        share = _replicas.share_of_replica(tf.cast(batch.count, tf.float32), self._loss_group)
        shares = [loss * tf.cast(share, loss.dtype) for loss in losses]
        steps = shares if self._weight() is None else losses
        logs = losses if _tf.steps.LOGS_COUNT_EXAMPLES else shares
        return [step + tf.stop_gradient(log - step) for step, log in zip(steps, logs)]

    @contextlib.contextmanager
    def _within(self) -> Iterator[None]:
        """Let the model compute a micro-batch in this context, as its class does."""
        before, self._is_within = self._is_within, True
        try:
            yield
        finally:
            self._is_within = before

    def _traced(
        self, call: Callable[..., Nested], batch: Batch, args: Sequence[Nested], kwargs: Dict[str, Nested]
    ) -> TracedCall:
        """Return the traced call, which is traced once for all batches of a kind, as a `tf.function` is."""
        model = self._model
        names = list(inspect.signature(type(model).call).parameters)[1:]
        training = dict(zip(names, args), **kwargs).get("training")
        has_barriers = "batch_norm" in self._barriers
        if (
            has_barriers
            and tf.is_tensor(training)
            and any(layer.trainable for layer in _tf.batch_norm.batch_norms_in(model))
        ):
            raise ValueError(
                "With batch normalisation over the whole batch, `training` must be a bool when the model is called. "
                f"Received: training={training!r}."
            )

        def make() -> TracedCall:
            with self._within():
                return traced_call(model, call, batch, has_barriers, self._is_training, self._recompute)

        leaves = [leaf for leaf in tf.nest.flatten((args, kwargs)) if not tf.is_tensor(leaf)]
        flags = [bool(layer.trainable) for layer in _tf.models.layers_of(model)]
        key = repr((_replicas.replica_number(), batch.specs(), leaves, flags, has_barriers, self._is_training))
        traces = model._accum.traces
        if key in traces:
            return traces[key]
        traced = make()
        if all(hasattr(outside, "numpy") for outside, _ in traced.segments.graph.trace.captures):
            traces[key] = traced  # it knows no tensor of a function that is being traced
        return traced


def _build(call: Callable[..., Nested], batch: Batch) -> None:
    """Let a model create its variables."""

    def first_call() -> None:
        args, kwargs = batch.part(0, 1)
        call(*args, **kwargs)

    tf.function(first_call).get_concrete_function()  # changes nothing, unlike a call
