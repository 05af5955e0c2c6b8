"""A step of a model that holds a whole batch, whose train step sees all of it at once (law L19)."""

import contextlib
from typing import Iterator, List, Optional, Sequence

from accum import _tf
from accum._engine import _replicas
from accum._engine._batch import Batch
from accum._engine._combined import Sum
from accum._engine._custom_gradient import keeping_gradients
from accum._engine._micro_batches import Index, MicroBatches
from accum._keras._callbacks import accumulating_optimizers
from accum._keras._internals import internals_of
from accum._keras._steps._changed_variables import warn_of_batch_norms
from accum._keras._steps._draws_of_batch import BatchDraws
from accum._keras._steps._optimizer_calls import Collector
from accum._keras._steps._split_step import SplitStep
from accum._keras._steps._whole_batch_call import WholeBatchCall
from accum._tf import Data, Logs, Nested, Scalar, tf


class WholeBatchStep(SplitStep):
    """Runs the steps of a model on a whole batch; the calls of the model within them are split into micro-batches."""

    @contextlib.contextmanager
    def _calling(self, name: str, data: Data) -> Iterator[None]:
        """Let calls of the model be split in this context, in the step `name` of a batch."""
        count = Batch(data).count
        model, replica = self._model, _replicas.replica_number()
        optimizers = [_tf.optimizers.without_loss_scale(optimizer) for optimizer in model._accum.optimizers or ()]

        def weight() -> Optional[Scalar]:
            is_for_passthrough = self._weighs_replicas
            weighted = [
                optimizer
                for optimizer in optimizers
                if is_for_passthrough or not internals_of(optimizer).is_passthrough
            ]
            return internals_of(weighted[0]).weight if weighted else None

        own, calls = model._accum, model._accum.calls
        groups = own.replicas_per_group
        is_training = name == "train_step"
        draws = BatchDraws(model, count, self._compiled, is_training)
        calls[replica] = WholeBatchCall(model, self._size, own.whole_batch, groups, weight, is_training, draws)
        try:
            with keeping_gradients(), draws.batch():
                yield
            if not calls[replica].is_used:
                raise ValueError(
                    f"`{type(model).__name__}.{name}` does not call the model, `self(x, training=True)`, so nothing is "
                    "split into micro-batches: let it do so, or leave out `whole_batch`."
                )
            losses = calls[replica].replica_losses
            if (
                name == "train_step"
                and losses is not None
                and not losses.is_used
                and not _tf.steps.is_train_step_of_keras(self._steps.of_class_or_user("train_step"))
            ):
                raise ValueError(
                    f"`{type(model).__name__}.train_step` computes a loss that can't be computed over the outputs of "
                    "all replicas: let it call `self.compute_loss` or the compiled loss, or pass "
                    "`replicas_per_group={'loss': 1}`, with which each replica computes its own."
                )
        finally:
            del calls[replica]

    def _check_batch_norms(self) -> None:
        """Warn of, or refuse, batch normalisation layers that are no barrier."""
        if "batch_norm" not in self._model._accum.whole_batch:
            warn_of_batch_norms(self._model)
            self._check_layers()

    def train(self, data: Data) -> Logs:
        optimizers = accumulating_optimizers(self._model)
        if self._weighs_replicas and all(internals_of(optimizer).is_passthrough for optimizer in optimizers):
            return self.apply(self.gradients(data))
        self._check_batch_norms()
        with self._calling("train_step", data), self._without_sums_of_one():
            logs, _ = self._steps.run_train(data)
        return logs

    @property
    def _weighs_replicas(self) -> bool:
        """As for any step; but a loss over the outputs of all replicas weights them by itself."""
        is_scaled = any(map(_tf.optimizers.is_loss_scale_optimizer, self._model._accum.optimizers))
        return super()._weighs_replicas and not is_scaled and "loss" not in self._model._accum.whole_batch

    def gradients(self, data: Data) -> Nested:
        self._check_batch_norms()
        self._collector = Collector()
        scaled = [
            optimizer
            for optimizer in self._model._accum.optimizers
            if _tf.optimizers.is_loss_scale_optimizer(optimizer)
        ]
        if scaled and _replicas.count() > 1:
            raise ValueError(
                "`whole_batch` with `micro_batch_size='auto'` can't have a `LossScaleOptimizer` on several replicas: "
                "pass a number as `micro_batch_size`, or train in bfloat16."
            )
        with contextlib.ExitStack() as stack:
            for optimizer in scaled:
                stack.enter_context(self._intercepting(optimizer, self._collector))
            stack.enter_context(self._calling("train_step", data))
            logs, _ = self._steps.run_train(data, self._collector)
        self._metrics = _Logs(logs)

        def parts(part: Data, index: Index) -> Nested:
            calls = [self._parts_of(call, False) for call in self._collector.calls]
            moments = [[Sum(value) for value in call_moments] for _, call_moments in self._collector.moments]
            return [calls, moments, self._metrics.parts(), None]

        batch = Batch(data)
        micro_batches = MicroBatches(batch, batch.count)
        self._cuts = micro_batches.cuts
        return micro_batches.run_at_once(parts)

    def test(self, data: Data) -> Logs:
        with self._calling("test_step", data):
            logs, _ = self._steps.run_test(data)
        return logs

    def predict(self, data: Data) -> Nested:
        with self._calling("predict_step", data):
            return self._steps.of_class_or_user("predict_step")(data)


class _Logs:
    """The logs of a step, whose tensors have to leave the function in which it ran."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs

    def parts(self) -> List[Optional[Sum]]:
        return [Sum(leaf) if tf.is_tensor(leaf) else None for leaf in tf.nest.flatten(self._logs)]

    def finish(self, tensors: Sequence[Optional[tf.Tensor]]) -> Logs:
        pairs = zip(tf.nest.flatten(self._logs), tensors)
        return tf.nest.pack_sequence_as(self._logs, [leaf if value is None else value for leaf, value in pairs])
