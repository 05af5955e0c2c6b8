"""The train, test and predict steps of an accumulating model, which stand in for those of its class or of the user.

Keras -> ModelSteps.train, test or predict -> PlainStep, SplitStep, TokenStep or WholeBatchStep
      -> the step of class or user

A `tf.function` that creates variables is traced twice, and only the second trace is run. Tracing a step in segments is
slow. So with `whole_batch`, the variables that Keras would create in the first trace (slots of the optimizer, metrics)
are created before it, where they are known.
"""

import contextlib
from typing import Callable, ContextManager, Iterator, Optional, Sequence, Tuple, Union

from accum import _tf
from accum._engine._micro_batches import Batch, Size
from accum._keras._batch_norm._layer import batch_norm_following, batch_norms_of
from accum._keras._callbacks import accumulating_optimizers
from accum._keras._optimizer._wrapper import internals_of
from accum._keras._steps._gradients_and_warnings import (
    Collector,
    Gate,
    ReportingLoss,
    StateWatch,
    TrainStep,
    warn_of_summed_losses,
    warn_of_sums_in_batch,
    warn_of_sums_in_cycle,
    warn_of_unlike_losses,
)
from accum._keras._steps._split_step_and_draws import BatchDraws, SplitStep
from accum._keras._steps._token_step import TokenStep
from accum._keras._steps._whole_batch import WholeBatchStep
from accum._tf import Data, Logs, Nested, Scalar, tf

# --------------------------------------------------------------------------------------------------------------------
# Variables, created before the trace


def create_variables_ahead(model: tf.keras.Model, batch: Data) -> None:
    """Create the variables that Keras creates while it traces its first step, which TensorFlow then traces again.

    Only for a functional model on one device that makes a step of every batch by Keras' own train step: elsewhere, the
    step alone knows which variables it needs.

    Args:
      model: a `GradientAccumulateModel`.
      batch: the tensors of a batch, or their `tf.TensorSpec`s.
    """
    optimizers = accumulating_optimizers(model)
    is_known = (
        _tf.steps.is_built_functional(model)
        and _tf.steps.is_step_of_keras(model._accum.steps.of_class_or_user("train_step"), "train_step")
        and model.distribute_strategy.num_replicas_in_sync == 1
        and len(optimizers) == 1
    )
    if model.run_eagerly or not is_known or not internals_of(optimizers[0]).is_passthrough:
        return
    _, targets, _ = _tf.losses.unpack_data(batch)
    _tf.steps.create_metrics(model, targets)
    with model.distribute_strategy.scope():
        _tf.optimizers.build_with_loss_scale(model._accum.optimizers[0], model.trainable_variables)
    model._accum.weight.create()
    model._accum.largest_batch.create()


def with_variables_ahead(
    model: tf.keras.Model, function: Callable[[Iterator[Data]], Logs]
) -> Callable[[Iterator[Data]], Logs]:
    """Return a train function that creates variables when it is first called, and then is `function`."""

    def train_function(iterator: Iterator[Data]) -> Logs:
        model.train_function = function
        if hasattr(iterator, "element_spec"):
            create_variables_ahead(model, iterator.element_spec)
        return function(iterator)

    return train_function


# --------------------------------------------------------------------------------------------------------------------
# The steps, and the choice between them


class ModelSteps:
    """Runs the steps of a model's class or of the user, weighted, watched and split.

    Args:
      model: a `GradientAccumulateModel`.
    """

    def __init__(self, model: tf.keras.Model) -> None:
        self.model = model

    # ------------------------------------------------------------------------------------------------------------
    # What Keras calls for each batch, on each replica

    @_tf.graphs.run_as_written
    def train(self, data: Data) -> Logs:
        """Train on a batch. Returns the logs."""
        own = self.model._accum
        if own.size.fixed is not None:
            own.largest_batch.note(Batch(data).count)
        recorder = own.recorder
        if recorder is None:
            return self._step("train_step", data).train(data)
        recorder.begin(data)
        logs = self._step("train_step", data).train(data)
        recorder.end(logs)
        return logs

    @_tf.graphs.run_as_written
    def test(self, data: Data) -> Logs:
        """Evaluate a batch. Returns the logs."""
        return self._step("test_step", data).test(data)

    @_tf.graphs.run_as_written
    def predict(self, data: Data) -> Nested:
        """Return the outputs of a batch."""
        return self._step("predict_step", data).predict(data)

    def _step(self, name: str, data: Data) -> Union["PlainStep", SplitStep]:
        size = self.model._accum.size
        if size.tokens is not None:
            return TokenStep(self, size.tokens, self.model._accum.options.arguments["sequence_lengths"])
        return self.for_size(size.fixed, name, data)

    def for_size(self, size: Optional[Size], name: str, data: Data) -> Union["PlainStep", SplitStep]:
        """Return the step for micro-batches of at most `size` examples, or for a batch that is not split.

        Each has the methods `train`, `test` and `predict` of a batch's data; if batches are split, also `gradients` and
        `apply`, which are the two parts of `train`.

        Args:
          size: int or int32 scalar tensor, or None.
          name: "train_step", "test_step" or "predict_step".
          data: the data of the batch.
        """
        if self.model._accum.size.splits:
            self.model._accum.decide(self.model, name, data, size is not None)
        if size is None:
            return PlainStep(self)
        return (WholeBatchStep if self.model._accum.whole_batch else SplitStep)(self, size)

    # ------------------------------------------------------------------------------------------------------------
    # One run of the step of the class or the user

    def replace(self) -> None:
        """Let Keras call the steps here, on the instance: even a subclass's `train_step` without `super()` is weighted.

        The steps of evaluation and prediction are replaced if the model has a size for micro-batches.
        """
        steps = {"train_step": self.train} if self.model._accum.optimizers is not None else {}
        if self.model._accum.size.splits:
            steps.update(test_step=self.test, predict_step=self.predict)
        for name, step in steps.items():
            self.model._accum.own_steps.setdefault(name, None)
            _tf.models.set_untracked(self.model, name, step)

    def of_class_or_user(self, name: str) -> Callable[[Data], Nested]:
        own = self.model._accum.own_steps.get(name)
        # `__get__`, because a `tf.function` as method makes one function for each instance, the class one for all.
        return getattr(type(self.model), name).__get__(self.model, type(self.model)) if own is None else own

    def run(self, name: str, data: Data) -> Nested:
        """Run "train_step", "test_step" or "predict_step" of the class or the user as Keras would."""
        return _tf.graphs.called_as_train_step(self.of_class_or_user(name), data)

    def run_train(
        self,
        data: Data,
        collector: Optional[Collector] = None,
        weighs_replicas: bool = False,
        gate: Optional[Gate] = None,
    ) -> Tuple[Logs, Optional[Scalar]]:
        """Run the train step on one micro-batch. Returns the logs and the micro-batch's weight, None for 1.

        Args:
          data: what Keras gives to a train step.
          collector: what takes the gradients over, if this is a part of a batch; None: the optimizers apply them.
          weighs_replicas: whether gradients for optimizers that do not accumulate are weighted by the replicas' parts.
          gate: as for `TrainStep`.
        """
        model, function = self.model, self.of_class_or_user("train_step")
        optimizers = accumulating_optimizers(model)
        train_step = TrainStep(f"{_tf.models.name_of_class(model)}.train_step", optimizers, collector, gate)
        with contextlib.ExitStack() as stack:
            weight = model._accum.weight.begin(self._weight_of(data))
            train_step.weight_of_replica = weight if weighs_replicas else None
            for optimizer in optimizers:
                # Over a whole batch, an optimizer that does not accumulate makes its step as in plain Keras.
                if collector is not None or not (model._accum.whole_batch and internals_of(optimizer).is_passthrough):
                    stack.enter_context(internals_of(optimizer).weighing(weight))
            stack.enter_context(batch_norm_following(optimizers[0], model, collector))
            stack.enter_context(train_step.watching())
            container = getattr(model, _tf.losses.LOSS_CONTAINER, None)
            if isinstance(container, ReportingLoss):
                stack.enter_context(container.of_train_step())
            logs = self.run("train_step", data)
        self._check(train_step, optimizers)
        is_cycle = not all(internals_of(optimizer).is_passthrough for optimizer in optimizers)
        if self._splits_losses or is_cycle:
            is_mean = model._accum.options.for_optimizers["reduction"] != "sum"
            warn_of_unlike_losses(model)
            warn_of_summed_losses(model, self._splits_losses and not self.sums_losses, is_cycle and is_mean)
        warn_of_sums_in_cycle(model, optimizers)
        if self._splits_losses:
            warn_of_sums_in_batch(model, function, self.sums_losses)
        return logs, model._accum.weight.read(weight)

    def run_test(self, data: Data) -> Tuple[Logs, Optional[Scalar]]:
        """Run the test step on one micro-batch. Returns the logs and the micro-batch's weight, None for 1."""
        weight = self.model._accum.weight.begin(self._weight_of(data))
        logs = self.run("test_step", data)
        if self._splits_losses:
            warn_of_unlike_losses(self.model)
            warn_of_summed_losses(self.model, not self.sums_losses, is_cycle=False)
        return logs, self.model._accum.weight.read(weight)

    def _weight_of(self, data: Data) -> Optional[Scalar]:
        """Compute the weight of a micro-batch. The losses of those of one batch are added up unweighted if they sum."""
        if self._may_split_losses and self.sums_losses:
            return None
        return self.model._accum.options.weight_of(data)

    @property
    def _may_split_losses(self) -> bool:
        """Whether the losses of a batch may be computed from those of its micro-batches."""
        return self.model._accum.size.splits and not self.model._accum.whole_batch

    @property
    def _splits_losses(self) -> bool:
        """Whether they are, which under "auto" begins when memory has run out."""
        return self._may_split_losses and self.model._accum.size.in_use != "auto"

    @property
    def sums_losses(self) -> bool:
        """Whether the compiled losses sum over examples, so that those of the micro-batches of a batch add up.

        Raises:
          ValueError: some losses sum and others are means, or one is neither.
        """
        container = getattr(self.model, _tf.losses.LOSS_CONTAINER, None)
        if self._may_split_losses and _tf.losses.is_neither_sum_nor_mean(container):
            raise ValueError(
                "The losses of micro-batches are either averaged or added up, which a loss of reduction NONE leaves "
                "open, as do sums beside means: leave out `whole_batch`, and any loss is computed over the whole "
                "batch, or let all losses be means (`reduction='sum_over_batch_size'`) or all sums "
                f"(`reduction='sum'`). Received: reductions {_tf.losses.reductions(container)}. [accum: sum]"
            )
        return _tf.losses.sums_over_examples(container)

    def _check(self, train_step: TrainStep, optimizers: Sequence[tf.keras.optimizers.Optimizer]) -> None:
        """Raise if the train step that just ran, or was traced, does not accumulate as it should."""
        overflows = any(map(_tf.optimizers.is_loss_scale_optimizer, self.model._accum.optimizers or ()))
        may_skip = not train_step.is_traced and (overflows or bool(self.model._accum.seen))
        # A train step may call a `tf.function` without a new trace, and then none of the calls in it is seen.
        may_call_none = may_skip or bool(self.model._accum.called_by_functions) or not self.model.trainable_variables
        train_step.check(may_call_none, optimizers[0] if batch_norms_of(self.model) else None)
        self.model._accum.seen.extend(
            optimizer for optimizer in train_step.called if optimizer not in self.model._accum.seen
        )
        if train_step.calls_through_function:
            self.model._accum.called_by_functions.extend(train_step.called)


class PlainStep:
    """Runs the steps of a model on a batch that is not split: one micro-batch of a cycle, or all of its step.

    Args:
      steps: `ModelSteps`.
    """

    def __init__(self, steps: ModelSteps) -> None:
        self._steps = steps

    def train(self, data: Data) -> Logs:
        model = self._steps.model
        optimizers = accumulating_optimizers(model)
        if all(internals_of(optimizer).is_passthrough for optimizer in optimizers):
            with batch_norm_following(optimizers[0], model):
                return self._steps.run("train_step", data)
        watch = StateWatch.of_cycle(model, optimizers)
        with self._drawing(data):
            logs, _ = self._steps.run_train(data)
        if watch is not None:
            watch.warn_of_changes()
        return logs

    def _drawing(self, data: Data) -> ContextManager[object]:
        """Return a context in which the batch draws the numbers of its examples in the cycle."""
        count = None if tf.executing_eagerly() else _tf.losses.known_count(data)
        if count is None:
            return contextlib.ExitStack()
        draws = BatchDraws(self._steps.model, count, _tf.steps.is_compiled_by_xla(self._steps.model), is_training=True)
        return draws.whole_batch(count)

    def test(self, data: Data) -> Logs:
        return self._steps.run("test_step", data)

    def predict(self, data: Data) -> Nested:
        return self._steps.run("predict_step", data)
