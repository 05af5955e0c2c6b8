"""Create the variables of a train step before it is traced.

A `tf.function` that creates variables is traced twice, and only the second trace is run. Tracing a step in segments is
slow. So the variables that Keras would create in the first trace (slots of the optimizer, metrics) are created before.
"""

from typing import Callable, Iterator

from accum import _tf
from accum._keras._callbacks import accumulating_optimizers
from accum._keras._internals import internals_of
from accum._tf import Data, Logs, tf


def with_variables_ahead(
    model: tf.keras.Model, function: Callable[[Iterator[Data]], Logs]
) -> Callable[[Iterator[Data]], Logs]:
    """Return a train function that creates variables when it is first called, and then is `function`.

    Only for a functional model on one device that makes a step of every batch by Keras' own train step: elsewhere, the
    step alone knows which variables it needs.
    """
    optimizers = accumulating_optimizers(model)
    is_known = (
        _tf.steps.is_built_functional(model)
        and _tf.steps.is_train_step_of_keras(model._accum.steps.of_class_or_user("train_step"))
        and len(optimizers) == 1
    )
    if model.run_eagerly or not is_known or not internals_of(optimizers[0]).is_passthrough:
        return function

    def train_function(iterator: Iterator[Data]) -> Logs:
        model.train_function = function
        if model.distribute_strategy.num_replicas_in_sync == 1 and hasattr(iterator, "element_spec"):
            _, targets, _ = _tf.losses.unpack_data(iterator.element_spec)
            _tf.steps.create_metrics(model, targets)
            optimizers[0].build(model.trainable_variables)
            model._accum.weight.create()
        return function(iterator)

    return train_function
