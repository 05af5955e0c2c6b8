"""The train, test and predict steps of an accumulating model, which stand in for those of its class or of the user.

Keras -> ModelSteps.train, test or predict -> PlainStep, SplitStep, TokenStep or WholeBatchStep
      -> the step of class or user

A `tf.function` that creates variables is traced twice, and only the second trace is run. Tracing a step in segments is
slow. So with `whole_batch`, the variables that Keras would create in the first trace (slots of the optimizer, metrics)
are created before it, where they are known.
"""

import contextlib
from typing import Any, Callable, ContextManager, Iterator, Optional, Union

from accum import _tf
from accum._engine._batch import Size, largest_count
from accum._keras._batch_norm._layer import batch_norm_following
from accum._keras._optimizer._internals import internals_of
from accum._keras._optimizer._wrapper import accumulating_optimizers, listeners_of
from accum._keras._step_listener import end_batch
from accum._keras._steps._batch_draws import BatchDraws
from accum._keras._steps._one_pass import methods_of_user
from accum._keras._steps._split_step import SplitStep
from accum._keras._steps._user_steps import UserSteps
from accum._keras._steps._whole_batch import WholeBatchStep
from accum._keras._tokens._step import TokenStep
from accum._tf import Data, Logs, Nested, tf

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


class FirstCall:
    """A train function that creates variables when it is first called, and then is `function`.

    If that fails, Keras makes a train function anew: TensorFlow can't trace one again that has created variables.
    """

    def __init__(self, model: tf.keras.Model, function: Callable[[Iterator[Data]], Logs]) -> None:
        self._model = model
        self._function = function

    def __call__(self, iterator: Iterator[Data]) -> Logs:
        if self._model._accum.size.splits and hasattr(iterator, "element_spec"):
            create_variables_ahead(self._model, iterator.element_spec)
        try:
            logs = self._function(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):  # there are no data
            raise
        except BaseException:
            self._model.train_function = None
            raise
        if self._model.train_function is self:
            self._model.train_function = self._function
        return logs

    def __getattr__(self, name: str) -> Any:
        """Return what a `tf.function` has, such as `get_concrete_function`."""
        if name.startswith("__") or "_function" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._function, name)


# --------------------------------------------------------------------------------------------------------------------
# The steps, and the choice between them


class ModelSteps(UserSteps):
    """The steps that Keras calls for each batch, on each replica: those of the class or the user, split or as they are.

    Args:
      model: a `GradientAccumulateModel`.
    """

    @_tf.graphs.run_as_written
    def train(self, data: Data) -> Logs:
        """Train on a batch. Returns the logs."""
        own = self.model._accum
        if own.size.fixed is not None:
            own.largest_batch.note(largest_count(data))
        listeners = listeners_of(self.model)
        for listener in listeners:
            listener.begin_batch(data)
        return end_batch(listeners, self._step("train_step", data).train(data))

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
            own = methods_of_user(self.model, name, self.of_class_or_user(name))
            metrics = [repr(one.name) for one in _tf.steps.metrics_of_layers(self.model)]
            self.model._accum.warn_of_parts(name, ", ".join(own + metrics) or None)
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

    def replace(self) -> None:
        """Let Keras call the steps here, on the instance: even a subclass's `train_step` without `super()` is weighted.

        The steps of evaluation and prediction are replaced if the model has a size for micro-batches.
        """
        steps = {"train_step": self.train} if self.model._accum.optimizers is not None else {}
        if self.model._accum.size.splits:
            steps.update(test_step=self.test, predict_step=self.predict)
        for name, step in steps.items():
            self.model._accum.own_steps.setdefault(name, None)
            _tf.patches.STEPS.keep(self.model, name, step)


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
        with self._drawing(data):
            logs, _ = self._steps.run_train(data)
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
