"""The train, test and predict steps of an accumulating model: weighted, watched, and split into micro-batches."""

import contextlib
import functools
from typing import Any, Callable, List, Optional, Sequence, Tuple

from accum import _tf
from accum._engine import _replicas
from accum._keras._batch_norm._layer import batch_norm_following, batch_norms_of
from accum._keras._callbacks import accumulating_optimizers
from accum._keras._internals import accumulation_of, internals_of
from accum._keras._model._accumulation import ModelAccumulation
from accum._keras._steps._changed_variables import StateWatch
from accum._keras._steps._collector import Collector
from accum._keras._steps._loss_denominator import (
    warn_of_summed_activities,
    warn_of_summed_losses,
    warn_of_unlike_losses,
)
from accum._keras._steps._optimizer_calls import TrainStep
from accum._keras._steps._out_of_memory import AutoSizedSteps
from accum._keras._steps._split_step import BatchStep
from accum._keras._steps._variables_ahead import with_variables_ahead
from accum._keras._steps._whole_batch_step import WholeBatchStep
from accum._tf import Scalar, tf


class ModelSteps:
    """The part of `GradientAccumulateModel` that runs the steps of its class or of the user."""

    _accum: ModelAccumulation
    _take_over_optimizers: Callable[[], bool]
    train_function: Any
    distribute_strategy: Any
    trainable_variables: Any

    def __setattr__(self, name: str, value: Any) -> None:
        own = accumulation_of(self)
        if own is not None and name in own.own_steps and name in self.__dict__:
            if value != self.__dict__[name]:
                self._keep_step(name, value)
        else:
            super().__setattr__(name, value)
            if name == "compute_loss" and own is not None:
                self._keep_loss()

    def _keep_step(self, name: str, function: Optional[Callable[..., Any]]) -> None:
        """Run `function`, which the user has set on the model, as the step `name`. None: run that of the class."""
        self._accum.own_steps[name] = function

    def _own_step(self, name: str) -> Any:
        """Return the step of the user or of the class."""
        own = self._accum.own_steps.get(name)
        # `__get__`, because a `tf.function` as method makes one function for each instance, the class one for all.
        return getattr(type(self), name).__get__(self, type(self)) if own is None else own

    def _split_steps(self) -> None:
        """Let the test and predict steps run on micro-batches, if the model has a size for them."""
        if self._accum.size.given is not None:
            for name, split in (("test_step", self._split_test_step), ("predict_step", self._split_predict_step)):
                self._accum.own_steps.setdefault(name, None)
                _tf.set_untracked(self, name, split)

    # ------------------------------------------------------------------------------------------------------------

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Build the model by the shapes of its data. Keras 3 calls this, and would average a batch over the replicas.

        That fails with several workers, and where the parts of a batch are not equally large.
        """
        specs = None if iterator is None or data_batch is not None else _tf.batch_spec_of(iterator)
        if specs is not None:
            iterator, data_batch = None, specs
        super()._maybe_symbolic_build(iterator, data_batch)  # type: ignore[misc]

    def _make_function(self, step_function: Callable[[Any], Any]) -> Any:
        """Make the train or test function. Keras 3 calls this, and averages logs over workers by their first axis.

        Scalars have none, so they get one.
        """
        strategy = self.distribute_strategy
        if strategy.num_replicas_in_sync == _tf.count_local_replicas(strategy):
            return super()._make_function(step_function)  # type: ignore[misc]

        def on_replica(data: Any) -> Any:
            logs = map_structure(tf.convert_to_tensor, step_function(data))
            return map_structure(lambda value: value if value.shape.rank else tf.reshape(value, [1]), logs)

        map_structure = tf.nest.map_structure
        return super()._make_function(on_replica)  # type: ignore[misc]

    def make_train_function(self, *args: Any, **kwargs: Any) -> Any:
        """Make the train function; also wrap an optimizer that was set after `compile`."""
        if self._take_over_optimizers():
            self.train_function = None
        if getattr(self, "train_function", None) is None:
            self._accum.traces.clear()
        warn_of_summed_activities(self)
        is_new = getattr(self, "train_function", None) is None or any(args) or any(kwargs.values())
        made = self._made_function("train_function", super().make_train_function, args, kwargs)  # type: ignore[misc]
        if is_new and self._accum.whole_batch and not self._accum.size.is_auto:
            self.train_function = with_variables_ahead(self, self.train_function)
        return self.train_function if is_new else made

    def make_test_function(self, *args: Any, **kwargs: Any) -> Any:
        return self._made_function("test_function", super().make_test_function, args, kwargs)  # type: ignore[misc]

    def make_predict_function(self, *args: Any, **kwargs: Any) -> Any:
        made = super().make_predict_function  # type: ignore[misc]
        return self._made_function("predict_function", made, args, kwargs)

    def _made_function(self, name: str, make: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the function that Keras calls for each batch: its own, or one that tries smaller micro-batches."""
        if self._accum.size.given is not None:
            with self.distribute_strategy.scope():
                self._accum.noises.find(self)
        if not self._accum.size.is_auto:
            return make(*args, **kwargs)
        if getattr(self, name, None) is None or any(args) or any(kwargs.values()):
            setattr(self, name, getattr(AutoSizedSteps(self), name))
        return getattr(self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call, whole = super().__call__, self._whole_batch_call  # type: ignore[misc]
        return call(*args, **kwargs) if whole is None else whole(call, args, kwargs)

    @property
    def _whole_batch_call(self) -> Any:
        """What stands in for a call of the model on this replica, or None."""
        own = accumulation_of(self)
        return own.calls.get(_replicas.replica_number()) if own is not None and own.calls else None

    @property
    def _replica_losses(self) -> Any:
        """What computes the losses of the current step over the outputs of several replicas, or None."""
        whole = self._whole_batch_call
        return None if whole is None else whole.replica_losses

    def _keep_loss(self) -> None:
        """Let a `compute_loss` of the user's see the outputs of several replicas, if losses are computed over them."""
        own: Any = getattr(self, "compute_loss", None)
        if "loss" not in self._accum.whole_batch or not _tf.is_loss_of_user(own):
            return

        # Neither a function of its own nor a lambda: a deep copy of the model takes this along, bound to the copy.
        compute_loss = functools.partial(self._loss_over_replicas, own)
        _tf.set_untracked(self, "compute_loss", functools.update_wrapper(compute_loss, own))

    def _loss_over_replicas(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        losses = self._replica_losses
        return own(*args, **kwargs) if losses is None else losses.of_user(own, args, kwargs)

    @property
    def losses(self) -> List[Any]:
        found, whole = super().losses, self._whole_batch_call  # type: ignore[misc]
        return found if whole is None else _tf.losses_without_symbolic(self, found) + whole.losses

    def _batch_step(self, size: Any) -> BatchStep:
        return (WholeBatchStep if self._accum.whole_batch else BatchStep)(self, size)

    def _weighted_train_step(self, data: Any) -> Any:
        """Run the train step of the class or the user, so that its gradients are weighted by the micro-batch."""
        recorder = self._accum.recorder
        if recorder is None:
            return self._run_weighted(data)
        recorder.begin(data)
        logs = self._run_weighted(data)
        recorder.end(logs)
        return logs

    def _run_weighted(self, data: Any) -> Any:
        size = self._accum.size.fixed
        if size is not None:
            return self._batch_step(size).train(data, self._run_train_step)
        optimizers = accumulating_optimizers(self)
        if all(internals_of(optimizer).is_bare for optimizer in optimizers):
            with batch_norm_following(optimizers[0], self):
                return self._own_step("train_step")(data)
        watch = StateWatch.of_cycle(self, optimizers)  # type: ignore[arg-type]
        logs, _ = self._run_train_step(data)
        if watch is not None:
            watch.warn_of_changes()
        return logs

    def _run_train_step(self, data: Any, collector: Optional[Collector] = None) -> Tuple[Any, Optional[Scalar]]:
        """Run the train step on one micro-batch. Returns the logs and the micro-batch's weight, None for 1."""
        function = self._own_step("train_step")
        optimizers = accumulating_optimizers(self)
        train_step = TrainStep(f"{type(self).__name__}.train_step", optimizers, collector)
        with contextlib.ExitStack() as stack:
            weight = self._accum.weight.begin(self._weight_of(data))
            for optimizer in optimizers:
                # Over a whole batch, an optimizer that does not accumulate makes its step as in plain Keras.
                if collector is not None or not (self._accum.whole_batch and internals_of(optimizer).is_bare):
                    stack.enter_context(internals_of(optimizer).weighing(weight))
            stack.enter_context(batch_norm_following(optimizers[0], self, collector))
            stack.enter_context(train_step.watching())
            logs = function(data)
        self._check_train_step(train_step, optimizers)
        if self._splits_losses or not all(internals_of(optimizer).is_bare for optimizer in optimizers):
            warn_of_unlike_losses(self)
            warn_of_summed_losses(self)
        return logs, self._accum.weight.read(weight)

    def _weight_of(self, data: Any) -> Optional[Scalar]:
        """Compute the weight of a micro-batch. The losses of those of one batch are added up unweighted if they sum."""
        if self._may_split_losses and self.sums_losses:
            return None
        return self._accum.options.weight_of(data)

    @property
    def _may_split_losses(self) -> bool:
        """Whether the losses of a batch may be computed from those of its micro-batches."""
        return self._accum.size.given is not None and not self._accum.whole_batch

    @property
    def _splits_losses(self) -> bool:
        """Whether they are, which under "auto" begins when memory has run out."""
        return self._may_split_losses and self._accum.size.in_use != "auto"

    @property
    def sums_losses(self) -> bool:
        """Whether the compiled losses sum over examples, so that those of the micro-batches of a batch add up.

        Raises:
          ValueError: some losses sum and others are means, or one is neither.
        """
        container = getattr(self, _tf.LOSS_CONTAINER, None)
        if self._may_split_losses and _tf.is_neither_sum_nor_mean(container):
            raise ValueError(
                "The losses of micro-batches are either averaged or added up: compile losses that are all means, or "
                "all have the reduction SUM."
            )
        return _tf.sums_over_examples(container)

    def _check_train_step(self, train_step: Any, optimizers: Sequence[Any]) -> None:
        """Raise if the train step that just ran, or was traced, does not accumulate as it should."""
        overflows = any(map(_tf.is_loss_scale_optimizer, self._accum.optimizers or ()))
        may_skip = not train_step.is_traced and (overflows or bool(self._accum.seen))
        # A train step may call a `tf.function` without a new trace, and then none of the calls in it is seen.
        may_call_none = may_skip or bool(self._accum.called_by_functions) or not self.trainable_variables
        train_step.check(may_call_none, optimizers[0] if batch_norms_of(self) else None)
        self._accum.seen.extend(known for known in train_step.called if known not in self._accum.seen)
        if train_step.calls_through_function:
            self._accum.called_by_functions.extend(train_step.called)

    # ------------------------------------------------------------------------------------------------------------

    def _split_test_step(self, data: Any) -> Any:
        size = self._accum.size.fixed
        if size is None:
            return self._own_step("test_step")(data)
        return self._batch_step(size).test(data, self._run_test_step)

    def _run_test_step(self, data: Any) -> Tuple[Any, Optional[Scalar]]:
        """Run the test step on one micro-batch. Returns the logs and the micro-batch's weight, None for 1."""
        weight = self._accum.weight.begin(self._weight_of(data))
        logs = self._own_step("test_step")(data)
        if self._splits_losses:
            warn_of_unlike_losses(self)
            warn_of_summed_losses(self)
        return logs, self._accum.weight.read(weight)

    def _split_predict_step(self, data: Any) -> Any:
        size = self._accum.size.fixed
        if size is None:
            return self._own_step("predict_step")(data)
        return self._batch_step(size).predict(data, self._own_step("predict_step"))

    @property
    def metrics(self) -> List[Any]:
        found = super().metrics  # type: ignore[misc]
        own = accumulation_of(self)
        if own is not None and own.step_metrics is not None:
            own.step_metrics.watch(found)
        return found
