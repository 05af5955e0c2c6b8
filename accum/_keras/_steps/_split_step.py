"""A step of a model that holds a whole batch and runs on its micro-batches itself (law L18).

    batch -> for each micro-batch: the model's own train step, whose optimizers hand over their gradients
          -> once:                 batch normalisation, each optimizer with the gradients of the batch, and metrics

With `accum_steps`, such a batch is one micro step of a cycle.
"""

import contextlib
from typing import Any, Callable, ContextManager, Iterator, List, Optional, Tuple

from accum import _check, _tf
from accum._engine import _replicas
from accum._engine._batch import Batch, Size
from accum._engine._combined import Concatenated, Pooled, Sum, gradient_sum
from accum._engine._draws import Chosen
from accum._engine._gradients import divided
from accum._engine._micro_batches import FIRST, Index, MicroBatches
from accum._engine._statistics import Moments
from accum._keras import _step_context
from accum._keras._batch_norm._layer import batch_norm_following
from accum._keras._diagnosis import _rules
from accum._keras._optimizer._internals import internals_of
from accum._keras._optimizer._wrapper import accumulating_optimizers
from accum._keras._step_listener import PartsSeen
from accum._keras._steps._batch_draws import BatchDraws, warn_of_eager_draws
from accum._keras._steps._optimizer_calls import Call, Collector, Gate
from accum._keras._steps._step_metrics import StepMetrics
from accum._keras._steps._user_steps import UserSteps
from accum._tf import Data, Gradient, Logs, Nested, Scalar, Wait, tf


class SplitStep:
    """Runs the steps of a model over the micro-batches of one batch, on one replica.

    Args:
      steps: the `UserSteps` of the model.
      size: int or int32 scalar tensor, the largest number of examples in a micro-batch.
    """

    def __init__(self, steps: UserSteps, size: Size) -> None:
        self._steps = steps
        self._model = model = steps.model
        self._size = size
        self._compiled = _tf.steps.is_compiled_by_xla(model)
        self._compiles_parts = False  # whether it compiles each micro-batch alone
        self._as_function = _tf.steps.must_not_be_in_loop(model)
        self._metrics: Any = None
        self._collector: Any = None
        self._sizes: Any = None  # the `Sizes` of the batch
        self._check_states()

    def _check_states(self) -> None:
        """Raise if a layer keeps a state for each example of a batch, which the next batch continues."""
        stateful = [layer.name for layer in _tf.models.layers_of(self._model) if _tf.layers.is_stateful_rnn(layer)]
        if stateful:
            option = "micro_batch_size" if self._model._accum.size.tokens is None else "micro_batch_tokens"
            raise ValueError(
                "A recurrent layer with `stateful=True` has a state for each example of a batch, and splitting the "
                f"batch would hand the states of one micro-batch to the next. Leave out `{option}` (with "
                "`accum_steps`, each batch continues the one before it, as in plain Keras), or create the layer "
                f"without `stateful`. Received: {stateful}. [accum: stateful]"
            )

    def _over_micro_batches(
        self, function: Callable[[Data, Index], Nested], data: Data, is_training: bool = False
    ) -> Nested:
        """Run `function(part, index)` on each micro-batch, as `MicroBatches.run` does."""
        micro_batches = self._cut(data)
        self._sizes = micro_batches.sizes
        warn_of_eager_draws(self._model)
        self._warn_of_eager_python()
        compiled = self._compiled or self._compiles_parts
        draws = BatchDraws(self._model, micro_batches.batch.count, compiled, is_training)
        draws.split_by(self._size)

        def on_part(part: Data, index: Index) -> Nested:
            drawn = micro_batches.begin(index), micro_batches.size_of(index), self._chosen(index)

            def with_draws() -> Nested:
                with draws.of(*drawn):
                    return function(part, index)

            return self._on_part(with_draws, part, index)

        with draws.batch():
            draws.done = micro_batches.run(on_part, has_last=is_training and self._may_overlap)
        return draws.done

    def _warn_of_eager_python(self) -> None:
        """Warn once that Python code of the user's runs for each micro-batch, eagerly."""
        own = self._model._accum
        if not tf.executing_eagerly() or not own.is_first_time("eager Python"):
            return
        compiled = _tf.losses.compiled_losses(self._model) + _tf.losses.compiled_metrics(self._model)
        if _tf.models.has_code_of_user(self._model) or not all(map(_tf.losses.is_of_keras, compiled)):
            _check.warn(
                "With `run_eagerly=True`, Python code of the model runs for each micro-batch in a step that needs one "
                "pass, such as an evaluation. What it counts, or draws with NumPy, differs from the full batch: keep "
                "it in a `tf.Variable`, draw with TensorFlow, or compile without `run_eagerly`. [accum: python-once]",
                _check.InexactWarning,
            )

    def _on_part(self, function: Callable[[], Nested], part: Data, index: Index) -> Nested:
        """Run `function()`, which computes `part`, the micro-batch at `index`."""
        return function()

    @property
    def _may_overlap(self) -> bool:
        """Whether gradients can be summed over workers while the last micro-batch computes others.

        With "auto", the step is another function, so that memory can run out before it. Cycles of several batches wait
        for all gradients before they count a micro step.
        """
        alone = [internals_of(optimizer).is_passthrough for optimizer in accumulating_optimizers(self._model)]
        return len(alone) == 1 and alone[0] and not self._must_end_first and _replicas.overlap()

    @property
    def _must_end_first(self) -> bool:
        """Whether something looks at all gradients at once."""
        own = self._model._accum
        return (
            self._compiled
            or self._compiles_parts
            or own.size.is_auto
            or any(map(_tf.optimizers.is_loss_scale_optimizer, own.optimizers))
        )

    @property
    def _overlaps(self) -> bool:
        """Whether they are: one call of an optimizer takes them, and nothing moves before it."""
        return self._may_overlap and len(self._collector.calls) == 1 and not self._collector.moments

    def _cut(self, data: Data) -> MicroBatches:
        """Cut a batch into micro-batches."""
        return MicroBatches(Batch(data), self._size, self._compiled, self._as_function)

    def _chosen(self, index: Index) -> Optional[Chosen]:
        """Return which examples are in a micro-batch, or None if they follow each other in the batch."""
        return None

    def _count_at(self, index: Index) -> Size:
        """Return the number of examples of a micro-batch."""
        first, _, size = self._sizes
        count = first if index is FIRST else size
        static_count = tf.get_static_value(tf.convert_to_tensor(count))
        return count if static_count is None else int(static_count)

    # ------------------------------------------------------------------------------------------------------------
    # Training

    def train(self, data: Data, gate: Optional[Gate] = None) -> Logs:
        """Train on a batch. Returns the logs.

        Args:
          data: what Keras gives to a train step.
          gate: what comes before the first update, or None.
        """
        totals = self.gradients(data)
        return self.apply(totals if gate is None else self._released(totals, gate))

    def _released(self, totals: Nested, gate: Gate) -> Nested:
        """Return what `gradients` returns, with the gradients behind a gate."""
        calls, moments, metrics = totals
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        pairs = [pair for call, (grads, *_) in zip(self._collector.calls, calls) for pair in zip(grads, call.variables)]
        released = iter(gate.released(pairs, graph))
        return [[[[next(released)[0] for _ in grads], *others] for grads, *others in calls], moments, metrics]

    def gradients(self, data: Data) -> Nested:
        """Run the train step on each micro-batch. Returns what `apply` takes: a nested structure of tensors."""
        sums = self._steps.sums_losses
        self._check_layers()

        def micro_batch(part: Data, index: Index) -> Nested:
            watch = _rules.StateWatch.of_first_batch(self._model) if self._collector is None else None
            self._collector, self._metrics = Collector(is_of_part=True), StepMetrics(self._model, self._count_at(index))
            with contextlib.ExitStack() as stack:
                stack.enter_context(self._metrics.watching())
                for optimizer in self._model._accum.optimizers:
                    if _tf.optimizers.is_loss_scale_optimizer(optimizer):
                        stack.enter_context(self._intercepting(optimizer, self._collector))
                logs, weight = self._steps.run_train(part, self._collector)
            if watch is not None:
                watch.warn_of_changes()
            calls = [self._parts_of(call, index is FIRST) + [self._seen(call, index)] for call in self._collector.calls]
            moments = [Pooled(*pooled) for pooled, _ in self._collector.moments]
            return [calls, moments, self._metrics.parts(logs, self._weight_in_logs(weight, index), sums)]

        totals = self._over_micro_batches(micro_batch, data, is_training=True)
        if sums and self._model.losses:
            _check.warn(
                "A loss with reduction SUM adds up over micro-batches, and so do the regularization losses of the "
                "model, which then count once for each micro-batch: compile a loss that is a mean."
                " [accum: sum]",
                _check.InexactWarning,
            )
        return totals

    def _seen(self, call: Call, index: Index) -> List[Sum]:
        """Return what each listener of an optimizer has seen of its call for a micro-batch."""
        grads, listeners = [grad for grad, _ in call.grads_and_vars], internals_of(call.optimizer).listeners
        return [Sum(listener.of_part(grads, call.weight, self._count_at(index))) for listener in listeners]

    def _check_layers(self) -> None:
        synchronized = [layer.name for layer in _tf.batch_norm.batch_norms_over_replicas(self._model)]
        if synchronized and _replicas.count() > 1:
            raise ValueError(
                "Batch normalization that is synchronized over replicas can't be in a loop over micro-batches, whose "
                "number may differ between replicas: use `AccumBatchNormalization` without `synchronized`, or "
                f"`accum_steps` without `micro_batch_size`. Received: {synchronized}. [accum: replicas]"
            )

    def _parts_of(self, call: Call, is_first: bool) -> Nested:
        """Return the weighted gradients of a call, the weight by which their sum is divided, and the call's weight."""
        weight = share = call.weight
        dtypes = {grad.dtype for grad, _ in call.grads_and_vars if grad is not None}
        one = tf.ones([], tf.float64 if tf.float64 in dtypes else tf.float32)
        if weight is not None and self._model._accum.options.weighs_as_keras and not call.has_own_weight:
            share = self._share_of(tf.cast(weight, one.dtype), is_first)
        elif weight is None and self._counts_examples:
            first, _, size = self._sizes
            share = self._share_of(tf.cast(first if is_first else size, one.dtype), is_first)
        grads = [gradient_sum(grad, var, share) for grad, var in call.grads_and_vars]
        return [
            grads,
            Sum(one if share is None else tf.cast(share, one.dtype)),
            Sum(tf.constant(1.0) if weight is None else weight),
        ]

    @property
    def _counts_examples(self) -> bool:
        """Whether parts of a batch without a weight count by examples: batches may count alike, but not their parts."""
        return not self._steps.sums_losses and self._model._accum.size.tokens is None

    def _weight_in_logs(self, weight: Optional[Scalar], index: Index) -> Optional[Scalar]:
        return tf.cast(self._count_at(index), tf.float32) if weight is None and self._counts_examples else weight

    def _share_of(self, weight: tf.Tensor, is_first: bool) -> Optional[tf.Tensor]:
        """Return a weight that counts examples, divided by the size of a micro-batch; None for 1.

        It is 1 in the loop, so that no gradient there is multiplied by it: for each micro-batch, that would be another
        pass over all gradients.
        """
        first, _, size = self._sizes
        is_whole = not is_first or (isinstance(first, int) and first == size)
        if is_whole and not self._model._accum.weight.was_replaced:
            return None
        return weight / tf.cast(size, weight.dtype)

    def _intercepting(self, optimizer: tf.keras.optimizers.Optimizer, collector: Collector) -> ContextManager[None]:
        """Return a context in which a `LossScaleOptimizer` hands over its gradients, unscaled or not."""
        inner = _tf.optimizers.without_loss_scale(optimizer)

        def take(grads_and_vars: List[Tuple[Optional[Gradient], tf.Variable]], apply: Callable[..., Wait]) -> None:
            _step_context.of_optimizer(inner).train_step.note(inner)
            collector.take(inner, grads_and_vars, None, apply)

        return _tf.steps.intercepting_loss_scale(optimizer, take)

    def apply(self, totals: Nested) -> Logs:
        """Let each optimizer of the train step have the gradients of the batch. Returns the logs."""
        calls, moments, metrics = totals
        # If computing one of them fails, nothing has moved, and the same batch can be tried again.
        everything = _waits_for(totals)
        # Where gradients are summed as they are computed, the optimizer waits for them itself.
        before = _waits_for([metrics, [others for _, *others in calls]]) if self._overlaps else everything
        with tf.control_dependencies(before), batch_norm_following(
            accumulating_optimizers(self._model)[0], self._model
        ), self._without_sums_of_one():
            for (_, receive), whole in zip(self._collector.moments, moments):
                receive(Moments(*whole))
            for call, (grads, share, weight, seen) in zip(self._collector.calls, calls):
                self._apply_call(call, grads, share, weight, seen)
        with tf.control_dependencies(everything):
            return self._metrics.finish(metrics)

    @contextlib.contextmanager
    def _without_sums_of_one(self) -> Iterator[None]:
        """Let the inner optimizers leave out sums over a single replica, which would keep the graph for ever."""
        with contextlib.ExitStack() as stack:
            for optimizer in accumulating_optimizers(self._model):
                stack.enter_context(_tf.inner_optimizer.without_sum_of_one(optimizer.optimizer))
            yield

    @property
    def _weighs_replicas(self) -> bool:
        """Whether gradients of optimizers that do not accumulate are weighted here by the replicas' examples.

        Keras averages over replicas, which may have unequal parts of a batch.
        """
        return _replicas.count() > 1

    def _apply_call(
        self, call: Call, totals: Nested, share: tf.Tensor, weight: tf.Tensor, seen: List[tf.Tensor]
    ) -> None:
        sums = self._steps.sums_losses
        dtypes = [None if grad is None else grad.dtype for grad, _ in call.grads_and_vars]
        # A weight of the user's says that the gradient of each micro-batch is a mean.
        divisor = None if sums and not call.has_own_weight else share
        grads = [divided(total, divisor, dtype) for total, dtype in zip(totals, dtypes)]
        pairs = list(zip(grads, call.variables))
        # An optimizer that does not accumulate makes its step as it would at the full batch, without a weight.
        is_passthrough = internals_of(call.optimizer).is_passthrough
        is_weighted = call.weight is not None and not is_passthrough
        # An optimizer that gets a weight of the user's weighs the replicas itself.
        if call.weight is not None and is_passthrough and not call.has_own_weight and self._weighs_replicas:
            factor = _replicas.share_of_replica(weight)
            pairs = [
                (None if grad is None else _tf.inner_optimizer.scale_gradient(grad, factor), var) for grad, var in pairs
            ]
        is_scaled = any(map(_tf.optimizers.is_loss_scale_optimizer, self._model._accum.optimizers))
        is_sum = is_weighted or call.has_own_weight
        parts = [PartsSeen(one, is_sum, grads if is_scaled else None) for one in seen]
        if id(call.optimizer) in self._collector.shares_overflow:
            pairs = call.optimizer._hand_back(pairs)
        with _step_context.entering(self._model, optimizers=[call.optimizer], overlaps=self._overlaps, parts=parts):
            if call.has_own_weight:
                call.apply(pairs, weight=weight)
                return
            current = self._model._accum.weight.begin(weight) if is_weighted else None
            with internals_of(call.optimizer).weighing(current):
                call.apply(pairs)

    # ------------------------------------------------------------------------------------------------------------
    # Evaluation and prediction

    def test(self, data: Data) -> Logs:
        """Evaluate a batch, given what Keras gives to a test step. Returns the logs."""
        _rules.apply("before evaluation or prediction of a split batch", _rules.Seen(self._model))
        sums = self._steps.sums_losses

        def micro_batch(part: Data, index: Index) -> Nested:
            self._metrics = StepMetrics(self._model, self._count_at(index))
            with self._metrics.watching():
                logs, weight = self._steps.run_test(part)
            return self._metrics.parts(logs, self._weight_in_logs(weight, index), sums)

        totals = self._over_micro_batches(micro_batch, data)
        return self._metrics.finish(totals)

    def predict(self, data: Data) -> Nested:
        """Return the outputs of a batch, given what Keras gives to a predict step.

        Raises:
          ValueError: an output has no axis, so that there is nothing to concatenate.
        """
        _rules.apply("before evaluation or prediction of a split batch", _rules.Seen(self._model))

        def micro_batch(part: Data, _index: Index) -> Nested:
            outputs, count = self._steps.run("predict_step", part), Batch(part).count
            for output in tf.nest.flatten(outputs):
                if not isinstance(output, tf.Tensor) or output.shape.rank == 0 or not _has_length(output, count):
                    raise ValueError(
                        "The outputs of micro-batches are concatenated, so each must be a tensor whose first axis is "
                        f"the batch: predict with a model without `micro_batch_size`. Received: {output!r}."
                        " [accum: batch-axis]"
                    )
            return tf.nest.map_structure(Concatenated, outputs)

        return self._over_micro_batches(micro_batch, data)


def _waits_for(values: Nested) -> List[tf.Tensor]:
    return _tf.graphs.waits_for_all(tf.nest.flatten(values, expand_composites=True))


def _has_length(output: tf.Tensor, count: Size) -> bool:
    """Whether the first axis of an output has `count` entries, as far as both are known."""
    lengths = tf.get_static_value(tf.shape(output)[0]), tf.get_static_value(tf.convert_to_tensor(count))
    return None in lengths or int(lengths[0]) == int(lengths[1])
