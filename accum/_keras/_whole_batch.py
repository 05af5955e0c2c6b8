"""A model that takes a whole batch and computes it in micro-batches, exactly (law L19).

In a train step, `model(x, training=True)` is replaced. It returns the outputs of the whole batch, and a tape that
differentiates them computes each micro-batch again. So the rest of the train step is that of the full batch: the loss,
metrics, regularization and sample weights are computed by Keras, or by the user's code, on all outputs at once.
"""

import contextlib
import inspect
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

from accum import _check, _tf
from accum._engine import _replicas
from accum._engine._batch import Batch
from accum._engine._combined import divided
from accum._engine._micro_batches import MicroBatches
from accum._engine._segments import SegmentedFunction, State, is_differentiable, with_gradient
from accum._keras._model_segments import (
    CallSegment,
    GraphSegments,
    always_normalizes,
    looks_across_examples,
)
from accum._keras._replica_losses import ReplicaLosses
from accum._keras._state_watch import StateWatch
from accum._tf import tf


class WholeBatchCall:
    """Stands in for the call of a model during one step, on one replica.

    Args:
      model: a `GradientAccumulateModel`.
      size: int or int32 scalar tensor, the largest number of examples in a micro-batch.
      barriers: of "loss" and "batch_norm".
      replicas_per_group: number of replicas in a group for each of these, None for all.
      weight: function that returns the weight of this replica's batch, or None for 1.

    Attributes:
      replica_losses: what computes losses over the outputs of several replicas, or None.
      losses: what layers have added as losses in the latest call: list of scalars.
      is_used: whether the model has been called.
    """

    def __init__(
        self,
        model: Any,
        size: Any,
        barriers: Sequence[str],
        replicas_per_group: Dict[str, Optional[int]],
        weight: Callable[[], Any],
    ) -> None:
        self._model = model
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

    def __call__(self, call: Callable[..., Any], args: Sequence[Any], kwargs: Dict[str, Any]) -> Any:
        """Call the model.

        Args:
          call: the `__call__` of the model's class.
          args, kwargs: its arguments.
        """
        if self._is_within:
            return call(*args, **kwargs)
        self.is_used = True
        batch = Batch((tuple(args), dict(kwargs)))
        micro_batches = MicroBatches(
            batch, self._size, _tf.is_compiled_by_xla(self._model), _tf.must_not_be_in_loop(self._model)
        )
        if not self._model.built:
            with self._within():
                _build(call, batch)
        state = _state_of(self._model)
        segments = self._segments(call, state, batch, args, kwargs)
        segmented = SegmentedFunction(segments.segments, micro_batches, state, self._group_size, self._weight)
        watch = StateWatch.of_first_batch(self._model)
        with self._within():
            whole, losses = segmented.forward(segments.is_returned)
        if watch is not None:
            watch.warn_of_changes()
        for tensor in whole.values():
            _require_examples(tensor, batch.count)
        floats = [key for key, tensor in whole.items() if is_differentiable(tensor)]
        variables = [_tf.native(var) for var in self._model.trainable_variables]

        def backward(upstream: Sequence[tf.Tensor]) -> List[Any]:
            with self._within():
                grads = segmented.backward(dict(zip(floats, upstream)), upstream[len(floats) :])
            return [divided(grads.get(id(var)), None, var.dtype.base_dtype) for var in variables]

        leaves = tf.nest.flatten((args, kwargs), expand_composites=True)  # a sparse tensor is its values and others
        inputs = [leaf for leaf in leaves if tf.is_tensor(leaf) and is_differentiable(leaf)]
        linked = with_gradient([whole[key] for key in floats] + losses, variables, inputs, backward)
        whole.update(zip(floats, linked))
        self.losses = self._as_shares(linked[len(floats) :], batch)  # Keras keeps those of the latest call
        return segments.outputs(whole)

    def _as_shares(self, losses: List[tf.Tensor], batch: Batch) -> List[tf.Tensor]:
        """Weight what layers of this replica have added by its examples, if replicas share a loss.

        Keras then averages the replicas' losses, in the logs and, unless the gradients are weighted later, in the step.
        """
        if self._loss_group == 1 or not losses:
            return losses
        share = _replicas.share_of_replica(tf.cast(batch.count, tf.float32), self._loss_group)
        shares = [loss * tf.cast(share, loss.dtype) for loss in losses]
        steps = shares if self._weight() is None else losses
        logs = losses if _tf.LOGS_COUNT_EXAMPLES else shares
        return [step + tf.stop_gradient(log - step) for step, log in zip(steps, logs)]

    @contextlib.contextmanager
    def _within(self) -> Iterator[None]:
        """Let the model compute a micro-batch in this context, as its class does."""
        before, self._is_within = self._is_within, True
        try:
            yield
        finally:
            self._is_within = before

    def _segments(
        self, call: Callable[..., Any], state: State, batch: Batch, args: Sequence[Any], kwargs: Dict[str, Any]
    ) -> Any:
        names = list(inspect.signature(type(self._model).call).parameters)[1:]
        training = dict(zip(names, args), **kwargs).get("training")
        has_barriers = "batch_norm" in self._barriers and any(
            layer.trainable for layer in _tf.batch_norms_in(self._model)
        )
        if has_barriers and tf.is_tensor(training):
            raise ValueError(
                "With batch normalisation over the whole batch, `training` must be a bool when the model is called. "
                f"Received: training={training!r}."
            )
        is_cut = has_barriers and (training or always_normalizes(self._model))
        if is_cut or any(map(looks_across_examples, _tf.layers_of(self._model))):
            return GraphSegments(self._model, call, state, batch, is_cut, bool(training))
        return CallSegment(self._model, call, state, batch)


def _require_examples(tensor: tf.Tensor, count: Any) -> None:
    """Raise, or let the graph raise, unless the first axis of an output is the batch."""
    message = (
        "The outputs of micro-batches are concatenated, so the first axis of each must be the batch: leave out "
        "`whole_batch`, or return one entry for each example."
    )
    known = tensor.shape[0] if tensor.shape.rank else None
    if tensor.shape.rank == 0 or (isinstance(count, int) and known not in (None, count)):
        raise ValueError(f"{message} Received: {tensor!r}.")
    if known is None or not isinstance(count, int):
        tf.debugging.assert_equal(tf.shape(tensor)[0], count, message=message)


def _build(call: Callable[..., Any], batch: Batch) -> None:
    """Let a model create its variables."""

    def first_call() -> None:
        args, kwargs = batch.part(0, 1)
        call(*args, **kwargs)

    tf.function(first_call).get_concrete_function()  # changes nothing, unlike a call


def _state_of(model: Any) -> State:
    """Return the variables of this replica that change when a part of a model runs."""

    def local(variables: Sequence[Any]) -> Dict[int, Any]:
        return {id(_tf.native(var)): _replicas.local_variable(_tf.native(var)) for var in variables}

    rewound = local(_tf.seeds_of(model) + _tf.own_state_of(model) + _tf.generators_of(model))
    rewound.update(local(model.__dict__["_accum_noises"].counters))
    restored = local([var for layer in _tf.batch_norms_in(model) for var in (layer.moving_mean, layer.moving_variance)])
    restored.update(local([var for metric in _tf.metrics_of_layers(model) for var in metric.variables]))
    return State(list(rewound.values()), [var for key, var in restored.items() if key not in rewound])
