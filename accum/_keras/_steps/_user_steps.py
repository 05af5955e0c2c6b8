"""Run the steps of a model's class or of the user on a batch or a part of it, weighted and watched."""

import contextlib
from typing import Callable, Optional, Sequence, Tuple

from accum import _tf
from accum._keras._batch_norm._layer import batch_norm_following, batch_norms_of
from accum._keras._diagnosis import _rules
from accum._keras._optimizer._internals import internals_of
from accum._keras._optimizer._wrapper import accumulating_optimizers
from accum._keras._steps._optimizer_calls import Collector, Gate, TrainStep
from accum._keras._steps._reporting_loss import ReportingLoss
from accum._tf import Data, Logs, Nested, Scalar, tf


class UserSteps:
    """Runs "train_step", "test_step" and "predict_step" of a model's class, or of the user.

    Args:
      model: a `GradientAccumulateModel`.
    """

    def __init__(self, model: tf.keras.Model) -> None:
        self.model = model

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
        model = self.model
        optimizers = accumulating_optimizers(model)
        is_cycle = any(internals_of(optimizer).may_take_several for optimizer in optimizers)
        watch = _rules.StateWatch.of_cycle(model, optimizers) if is_cycle and collector is None else None
        train_step = TrainStep(f"{_tf.models.name_of_class(model)}.train_step", optimizers, collector, gate)
        with contextlib.ExitStack() as stack:
            weight = model._accum.weight.begin(self._weight_of(data))
            train_step.weight_of_replica = weight if weighs_replicas else None
            for optimizer in optimizers:
                # Over a whole batch, an optimizer that does not accumulate makes its step as in plain Keras.
                if collector is not None or not (model._accum.whole_batch and internals_of(optimizer).is_passthrough):
                    stack.enter_context(internals_of(optimizer).weighing(weight))
            stack.enter_context(batch_norm_following(optimizers[0], model, collector))
            stack.enter_context(train_step.watching(model))
            container = getattr(model, _tf.losses.LOSS_CONTAINER, None)
            if isinstance(container, ReportingLoss):
                stack.enter_context(container.of_train_step())
            logs = self.run("train_step", data)
            _rules.apply("train step traced", _rules.Seen(model, data, is_cycle=is_cycle))
        if watch is not None:
            watch.warn_of_changes(train_step.operations_beside)
        self._check(train_step, optimizers)
        _rules.apply("train step checked", self._seen(data, is_cycle))
        return logs, model._accum.weight.read(weight)

    def run_test(self, data: Data) -> Tuple[Logs, Optional[Scalar]]:
        """Run the test step on one micro-batch. Returns the logs and the micro-batch's weight, None for 1."""
        weight = self.model._accum.weight.begin(self._weight_of(data))
        logs = self.run("test_step", data)
        _rules.apply("evaluated", self._seen(data, is_cycle=False))
        return logs, self.model._accum.weight.read(weight)

    def _seen(self, data: Data, is_cycle: bool) -> _rules.Seen:
        is_split = self._splits_losses
        return _rules.Seen(self.model, data, is_split, is_cycle, is_split and self.sums_losses)

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
                "The losses of micro-batches are either averaged or added up, so they can't have the reduction NONE, "
                "nor be sums and means together: "
                f"{self.model._accum.to_see_whole_batches}, and any loss is exact, or let all "
                "losses be means (`reduction='sum_over_batch_size'`) or all sums (`reduction='sum'`). Received: "
                f"reductions {_tf.losses.reductions(container)}. [accum: sum]"
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
