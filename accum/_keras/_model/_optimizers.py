"""The optimizers of a model, which are found in its attributes and in lists, tuples and dicts there."""

import collections
import copy
import inspect
from typing import Callable, Dict, List, Tuple

from accum import _check, _tf
from accum._keras._model._accumulation import ModelAccumulation
from accum._keras._model._options import LISTENERS
from accum._keras._optimizer._internals import internals_of
from accum._keras._optimizer._wrapper import GradientAccumulateOptimizer, accumulating_optimizers
from accum._keras._steps._reporting_loss import ReportingLoss
from accum._tf import tf

# Prefixes of internal attributes of Keras, TensorFlow and accum, which may refer to optimizers too.
_NOT_THE_USERS = ("_self_", "_unconditional_", "_obj_reference", "_accum", "_layers")


Replace = Callable[[tf.keras.optimizers.Optimizer], tf.keras.optimizers.Optimizer]


def flush_of(model: tf.keras.Model) -> str:
    """Return the Python expression that ends a cycle of the first optimizer of a model."""
    inner = _tf.optimizers.attribute_within_loss_scale(model.optimizer)
    return "model.optimizer.flush()" if inner is None else f"model.optimizer.{inner}.flush()"


class ModelOptimizers:
    """Wraps the optimizers of a model.

    Args:
      model: a `GradientAccumulateModel`.
    """

    def __init__(self, model: tf.keras.Model) -> None:
        self._model = model
        self._own: ModelAccumulation = model._accum

    def take_over(self) -> bool:
        """Wrap every optimizer of the model. Returns whether its optimizers have changed since the last call."""
        before = self._own.optimizers
        accumulating_before = accumulating_optimizers(self._model) if before else []
        replaced = replace_optimizers(self._model, self.accumulating)
        main = [optimizer for optimizer in replaced if optimizer is getattr(self._model, "optimizer", None)]
        others = [optimizer for optimizer in replaced if optimizer not in main]
        # Where a custom `compile` takes no `optimizer`, Keras' default is there, and probably unused.
        compile_of_class = getattr(type(self._model), "_base", tf.keras.Model).compile
        is_default = "optimizer" not in inspect.signature(compile_of_class).parameters
        optimizers = others + main if is_default else main + others
        self._own.optimizers = optimizers
        accumulating = accumulating_optimizers(self._model) if optimizers else []
        gone = [optimizer for optimizer in accumulating_before if optimizer not in accumulating]
        if any(
            internals_of(optimizer).cycle.is_built and internals_of(optimizer).cycle.is_in_cycle() for optimizer in gone
        ):
            _check.warn(
                "The model gets another optimizer in the middle of a cycle, whose gradients are lost: call "
                f"`{flush_of(self._model)}` first, or compile with the optimizer that the model has "
                "(`model.optimizer`). [accum: unfinished-cycle]",
                _check.InexactWarning,
            )
        for optimizer in accumulating:
            internals_of(optimizer).show(self._model)
            self._listen_to(optimizer)
        self._own.forget_calls_of(gone)
        self._own.steps.replace()
        self._watch_losses()
        return before is not None and {id(optimizer) for optimizer in before} != {
            id(optimizer) for optimizer in optimizers
        }

    def accumulating(self, optimizer: tf.keras.optimizers.Optimizer) -> tf.keras.optimizers.Optimizer:
        """Return the accumulating optimizer around `optimizer`, one for each since the last `compile`."""
        wrapped = self._own.wrapped
        if id(optimizer) not in wrapped:
            wrapped[id(optimizer)] = optimizer, self._newly_accumulating(optimizer)
        return wrapped[id(optimizer)][1]

    def _newly_accumulating(self, optimizer: tf.keras.optimizers.Optimizer) -> tf.keras.optimizers.Optimizer:
        plan = self._own.options.plan
        inner = _tf.optimizers.without_loss_scale(optimizer)
        if isinstance(inner, GradientAccumulateOptimizer):
            is_own = any(own is optimizer for own in self._own.optimizers or ())
            differences = internals_of(inner).differences_from(plan)
            if is_own or not differences:
                return optimizer
            raise ValueError(
                "`optimizer` accumulates already, with other options than the model: create it with the same options, "
                f"or pass the optimizer inside of it. Received: {differences}. [accum: wrapped-twice]"
            )
        if not _tf.optimizers.is_loss_scale_optimizer(optimizer):
            return GradientAccumulateOptimizer(optimizer, **plan._asdict())
        if int(inner.iterations.numpy()) > 0:  # the outer `iterations` stay 0 up to Keras 3.8
            raise ValueError(
                "This LossScaleOptimizer has made steps and must be recreated to accumulate: compile with a new "
                "optimizer, or restore a checkpoint after `compile`. [accum: loss-scale]"
            )
        inner = _tf.optimizers.without_loss_scale_of_another(inner)
        return _tf.optimizers.loss_scale_around(GradientAccumulateOptimizer(inner, **plan._asdict()), like=optimizer)

    def _listen_to(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        """Let the listeners of the model's options see the steps of an optimizer, one of each kind."""
        listeners = internals_of(optimizer).listeners
        for option, kind in LISTENERS.items():
            if self._own.options.arguments[option] and not any(type(one) is kind for one in listeners):
                listeners.append(kind(self._model.distribute_strategy, optimizer))

    def _watch_losses(self) -> None:
        """Let the compiled losses report the number by which they divide."""
        container = getattr(self._model, _tf.losses.LOSS_CONTAINER, None)
        weighs, splits = self._own.options.weighs_as_keras, self._own.size.splits
        if container is None or isinstance(container, ReportingLoss):
            return
        if not (weighs or splits or _tf.losses.zero_if_all_are_ignored(container)):
            return
        report = self._own.weight.replace if weighs else None
        watched = ReportingLoss(self._model, container, report)
        _tf.patches.LOSSES.keep(self._model, _tf.losses.LOSS_CONTAINER, watched)


def replace_optimizers(model: tf.keras.Model, replace: Replace) -> List[tf.keras.optimizers.Optimizer]:
    """Replace each Keras optimizer in the attributes of `model` with `replace(optimizer)`.

    Args:
      model: a Keras model.
      replace: function of an optimizer; called for each place where one is found.

    Returns:
      List of the replacements, each once.
    """
    # id of a replacement -> itself:
    replacements: Dict[int, Tuple[tf.keras.optimizers.Optimizer, tf.keras.optimizers.Optimizer]] = {}

    def replaced(optimizer: tf.keras.optimizers.Optimizer) -> tf.keras.optimizers.Optimizer:
        new = replace(optimizer)
        replacements[id(new)] = new
        return new

    for name, value in list(vars(model).items()):
        if not name.startswith(_NOT_THE_USERS) and holds_optimizer(value):
            new = replaced_within(value, replaced)
            if new is not value:
                setattr(model, name, new)
    return list(replacements.values())


def holds_optimizer(value: object) -> bool:
    """Whether `value` is a Keras optimizer, or a list, tuple or dict that contains one at any depth."""
    seen, waiting = {id(value)}, [value]
    while waiting:
        part = waiting.pop()
        if _tf.optimizers.is_keras_optimizer(part):
            return True
        new = [child for child in _children(part) if id(child) not in seen]  # a dict may contain itself
        seen.update(map(id, new))
        waiting.extend(new)
    return False


def replaced_within(value: object, replace: Replace, around: Tuple[int, ...] = ()) -> object:
    """Return `value` with each optimizer in it replaced, or `value` itself if none of them changes.

    Args:
      value: an optimizer, a list, tuple or dict, or anything else.
      replace: function of an optimizer.
      around: ids of the lists, tuples and dicts around `value`, which may contain itself.
    """
    if _tf.optimizers.is_keras_optimizer(value):
        return replace(value)
    if id(value) in around or not holds_optimizer(value):
        return value
    children = [replaced_within(child, replace, around + (id(value),)) for child in _children(value)]
    if all(new is old for new, old in zip(children, _children(value))):
        return value
    if isinstance(value, (collections.OrderedDict, collections.defaultdict)):
        made = copy.copy(value)
        made.update(zip(value, children))
        return made
    if isinstance(value, dict):
        return dict(zip(value, children))
    if hasattr(value, "_fields"):
        return type(value)(*children)
    return tuple(children) if isinstance(value, tuple) else children


def _children(value: object) -> List[object]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else []
