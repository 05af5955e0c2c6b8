"""The model face: a Keras model whose `fit` makes one step for several micro-batches.

It is the optimizer wrapper plus what only a model knows: how much a micro-batch weighs and where an epoch ends. A
`train_step` of the user's own stays in force under it.
"""

import contextlib
import inspect
import os
import warnings
from typing import Dict, Tuple

from accum import _tf
from accum._batch_norm import on_the_clock_of
from accum._callbacks import FlushCallback, accumulating_optimizers
from accum._loss import ToldLoss
from accum._optimizer import GradientAccumulateOptimizer
from accum._settings import Settings
from accum._tf import tf


@_tf.not_made_as_functional
class GradientAccumulateModel(tf.keras.Model):
    """A Keras model that makes one step of its optimizer for every `accum_steps` micro-batches.

    Its step is the one that the full batch would have made: the mean of the micro-batches' gradients, each weighed by
    its number of examples, so that ragged ones are exact too.

    Args:
      accum_steps: micro steps per step, an int >= 1; or a schedule `{first step: accum_steps}` that holds step 0.
      mixed_precision: accepted; the policy is detected.
      use_agc: whether to clip the accumulated gradient adaptively (`adaptive_clip_grad`). `agc` says the same.
      clip_factor: float > 0, as for `adaptive_clip_grad`.
      eps: float > 0, as for `adaptive_clip_grad`.
      agc_exclude: what is not clipped, as `exclude` of `AdaptiveClipping`: a list of names, such as "bias" or that of
        the last layer, or a function `variable -> bool`.
      experimental_distributed_support: accepted; strategies are detected.
      *args: as `tf.keras.Model` takes them.
      reduction: "mean", "sum" or "running_mean".
      last_cycle: what becomes of an unfinished cycle at the end of an epoch, before its validation: "flush", "carry" or
        "drop", as for `FlushCallback`.
      micro_batch_weight: "examples", "equal", or a function `(x, y, sample_weight) -> scalar`, such as one that counts
        the tokens that are no padding. "examples" is what Keras' losses divide by: unmasked elements in the place of
        examples, where this line's losses divide by them (those of masked outputs from TF 2.11 on, those with an
        `ignore_class` from 2.10 on) and all outputs are such.
      transform, nonfinite, accumulator_dtype, sparse: as for `GradientAccumulateOptimizer`.
      **kwargs: as `tf.keras.Model` takes them: `inputs` and `outputs`, `name`.

    Raises:
      TypeError, ValueError: for any argument that is none of these.

    Example:
      >>> model = accum.GradientAccumulateModel(accum_steps=4, inputs=model.inputs, outputs=model.outputs)
      >>> model.compile("adam", loss="mse")
      >>> model.fit(x, y, batch_size=8)  # steps as with batch_size=32
    """

    def __new__(cls, *args, **kwargs):
        """Make an instance that is also a functional model, by a class that no model of another kind shares."""
        base = _tf.Functional if is_functional(args, kwargs) else tf.keras.Model
        return super().__new__(concrete_class(cls, base), *args, **kwargs)

    def __init__(
        self,
        accum_steps=1,
        mixed_precision=False,
        use_agc=False,
        clip_factor=0.01,
        eps=1e-3,
        experimental_distributed_support=False,
        *args,
        agc=False,
        agc_exclude=(),
        reduction="mean",
        last_cycle="flush",
        micro_batch_weight="examples",
        transform=None,
        nonfinite="propagate",
        accumulator_dtype=None,
        sparse="rows",
        **kwargs,
    ):
        del mixed_precision, experimental_distributed_support
        settings = Settings.of(
            accum_steps=accum_steps,
            use_agc=bool(use_agc or agc),
            clip_factor=clip_factor,
            eps=eps,
            agc_exclude=agc_exclude,
            reduction=reduction,
            last_cycle=last_cycle,
            micro_batch_weight=micro_batch_weight,
            transform=transform,
            nonfinite=nonfinite,
            accumulator_dtype=accumulator_dtype,
            sparse=sparse,
        )
        if not args and not ("inputs" in kwargs and "outputs" in kwargs):
            raise ValueError(
                "`GradientAccumulateModel` takes the `inputs` and `outputs` of a functional model; "
                "`GradientAccumulateModel.from_model` takes any model."
            )
        if is_functional((), kwargs) and not isinstance(self, _tf.Functional):
            # Of a subclass whose `__init__` makes the layers: Keras would make the class functional for all models.
            self.__class__ = concrete_class(type(self), _tf.Functional)
        super().__init__(*args, **kwargs)
        _tf.set_untracked(self, "_accum", settings)

    @classmethod
    def from_model(
        cls,
        model,
        accum_steps=1,
        mixed_precision=False,
        use_agc=False,
        clip_factor=0.01,
        eps=1e-3,
        experimental_distributed_support=False,
        *,
        agc=False,
        **options,
    ):
        """Make a model that accumulates from any other: functional, Sequential or subclassed.

        It shares the layers and variables of `model`, its compiled state with them, and has the methods of its class: a
        `train_step`, `call` or `compile` of the user's own stays in force. `model` itself is left as it is.

        Args:
          model: a `tf.keras.Model`.
          accum_steps, use_agc, clip_factor, eps, agc, **options: as for the class.

        Returns:
          A `GradientAccumulateModel` that is an instance of the class of `model` too. Where `model` is compiled, so is
          it: around the same optimizer, which goes on with its state, and with the same loss and metrics.

        Raises:
          TypeError: `model` is no `tf.keras.Model`; an option is unknown.
          ValueError: `model` accumulates already, or has made steps with a `LossScaleOptimizer`.
        """
        del mixed_precision, experimental_distributed_support
        if not isinstance(model, tf.keras.Model):
            raise TypeError("`model` must be a `tf.keras.Model`. Received: model={!r}.".format(model))
        if isinstance(model, GradientAccumulateModel):
            raise ValueError(
                "`model` accumulates already: set its optimizer's `accum_steps`. Received: {!r}.".format(model)
            )
        options.update(accum_steps=accum_steps, use_agc=bool(use_agc or agc), clip_factor=clip_factor, eps=eps)
        settings = Settings.of(**options)
        made = _tf.model_like(model, concrete_class(getattr(cls, "_root", cls), type(model)))
        _tf.set_untracked(made, "_accum", settings)
        if getattr(model, "optimizer", None) is not None:
            made.optimizer = made._accumulating(model.optimizer)
            made._weigh_train_steps([made.optimizer])
        return made

    def compile(self, *args, **kwargs):
        """As the class of the model compiles, `tf.keras.Model.compile` or one of its own, around each optimizer.

        An optimizer is an instance, a name or a config. For a `LossScaleOptimizer` a new one is put around the
        accumulating optimizer, where it scales the loss; inside is a copy of its own inner one, which a second loss
        scale could not be put around. A `GradientAccumulateOptimizer` is taken as it is if it does what the model does.

        Raises:
          ValueError: an optimizer accumulates otherwise, or stands in a `LossScaleOptimizer` and has made steps.
        """
        given = inspect.signature(super().compile).bind_partial(*args, **kwargs)
        if "optimizer" in inspect.signature(super().compile).parameters:
            given.arguments["optimizer"] = self._accumulating(given.arguments.get("optimizer", "rmsprop"))
        for arguments in (given.arguments, given.kwargs):
            for name, value in arguments.items():
                if _tf.is_keras_optimizer(value):
                    arguments[name] = self._accumulating(value)
        super().compile(*given.args, **given.kwargs)
        optimizers = [
            value for value in list(given.args) + list(given.kwargs.values()) if _tf.is_keras_optimizer(value)
        ]
        if not optimizers:  # the class's own `compile` chooses
            self.optimizer = self._accumulating(self.optimizer)
        self._weigh_train_steps(optimizers or [self.optimizer])
        if len(optimizers) == 1:  # the same optimizer again, it may be, after layers were frozen or thawed
            accumulating_optimizers(self)[0].expect(self)

    def _weigh_train_steps(self, optimizers):
        _tf.set_untracked(self, "_accum_optimizers", optimizers)
        for optimizer in accumulating_optimizers(self):
            optimizer.show(self)
        # On the instance, so that a subclass's own `train_step` is weighed too, whether it calls this class's or not.
        _tf.set_untracked(self, "train_step", self._weighed_train_step)
        container = getattr(self, _tf.LOSS_CONTAINER, None)
        if self._accum.weighs_as_keras and container is not None:
            _tf.set_untracked(self, _tf.LOSS_CONTAINER, ToldLoss(container, self._weigh_anew))

    def _weigh_anew(self, weight):
        for optimizer in accumulating_optimizers(self):
            optimizer.weigh_anew(weight)

    def _accumulating(self, optimizer):
        options = self._accum.options
        inner = _tf.without_loss_scale(optimizer)
        if isinstance(inner, GradientAccumulateOptimizer) and inner.accumulates_as(options):
            return optimizer
        if not _tf.is_loss_scale_optimizer(optimizer):
            return GradientAccumulateOptimizer(optimizer, **options)
        if int(inner.iterations.numpy()) > 0:  # up to Keras 3.8 those of a loss scale's own stay 0
            raise ValueError(
                "This LossScaleOptimizer has made steps, and has to be made anew to accumulate within: compile with a "
                "new optimizer, or restore a checkpoint after `compile`."
            )
        inner = _tf.copy_of(inner)
        return _tf.loss_scale_around(GradientAccumulateOptimizer(inner, **options), like=optimizer)

    def _weighed_train_step(self, data):
        """The class's train step; its `apply_gradients` takes the gradients in with the micro-batch's weight."""
        optimizers = accumulating_optimizers(self)
        weight = None if all(optimizer.is_bare for optimizer in optimizers) else self._accum.weight_of(data)
        with contextlib.ExitStack() as stack:
            for optimizer in optimizers:
                stack.enter_context(optimizer.weighing(weight))
            stack.enter_context(on_the_clock_of(optimizers[0], self))
            return type(self).train_step(self, data)

    def fit(self, *args, **kwargs):
        """As `tf.keras.Model.fit`; the last cycle of an epoch ends by `last_cycle`, and so does one cut short."""
        given = inspect.signature(super().fit).bind_partial(*args, **kwargs)
        ending = FlushCallback(self._accum.last_cycle)
        given.arguments["callbacks"] = _with_callback(given.arguments.get("callbacks"), ending)
        try:
            return super().fit(*given.args, **given.kwargs)
        except BaseException:
            ending.end_interrupted_cycle_of(self)
            raise

    def save(self, filepath, *args, **kwargs):
        """As `tf.keras.Model.save`. H5 and `.keras` files keep steps: unfinished cycles are left out, and warned of."""
        kind = kwargs.get("save_format") or os.path.splitext(str(filepath))[1]
        if str(kind).lstrip(".") in ("h5", "hdf5", "keras"):
            self._warn_of_unfinished_cycle(filepath)
        return super().save(filepath, *args, **kwargs)

    if _tf.IS_KERAS_3:  # before, a pickle names no class

        def __reduce__(self):
            """As Keras pickles and copies a model, by the content of a `.keras` file."""
            self._warn_of_unfinished_cycle("a pickle or copy")
            return _tf.pickled_by_name(super().__reduce__())

    def _warn_of_unfinished_cycle(self, where):
        optimizers = accumulating_optimizers(self) if "_accum_optimizers" in self.__dict__ else []
        if any(int(optimizer.micro_step) > 0 for optimizer in optimizers):
            warnings.warn(
                "An unfinished cycle is left out of {}: call `model.optimizer.flush()` before, or keep it in a "
                "`tf.train.Checkpoint`.".format(where),
                stacklevel=3,
            )

    def get_config(self):
        """The config that the model would have without accumulating, and under "accumulation" what this class adds.

        Raises:
          NotImplementedError: the model is subclassed and has no config.
        """
        class_name, config = _tf.plain_config(self, getattr(type(self), "_base", _tf.Functional))
        return dict(config, accumulation=dict(self._accum.get_config(), model=class_name))

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Make a model from what `get_config` gave, which has to be compiled."""
        config = dict(config)
        accumulation = config.pop("accumulation")
        model = _tf.model_from_plain_config(accumulation["model"], config, custom_objects)
        return cls.from_model(model, **Settings.arguments_from(accumulation, custom_objects))

    def compile_from_config(self, config):
        """Compile from what a `.keras` file holds, from TF 2.13 on, if the class has no `compile` of its own."""
        if getattr(type(self), "_base", tf.keras.Model).compile is not tf.keras.Model.compile:
            super().compile_from_config(config)
            return
        self.compile(**_tf.deserialize_compile_config(config))
        if _tf.is_new_optimizer(self.optimizer) and self.built:
            self.optimizer.build(self.trainable_variables)


_CONCRETE: Dict[Tuple[type, type], type] = {}


def concrete_class(cls, base):
    """`cls` as a subclass of the model class `base` too, one class for each pair.

    Keras makes a class functional when its first functional model is made, for all models of it.
    """
    if issubclass(cls, base):
        return cls
    if (cls, base) not in _CONCRETE:
        namespace = {"_root": cls, "_base": base, "__module__": cls.__module__, "__doc__": cls.__doc__}
        _CONCRETE[cls, base] = type(cls.__name__, (cls, base), dict(namespace, __qualname__=cls.__qualname__))
    return _CONCRETE[cls, base]


def is_functional(args, kwargs):
    return "inputs" in kwargs or len(args) > 6


def _with_callback(callbacks, callback):
    """What the user gave as `callbacks`, and one more, first."""
    if hasattr(callbacks, "append") and hasattr(callbacks, "on_train_begin"):  # a CallbackList, private up to 2.2
        callbacks.append(callback)
        return callbacks
    if callbacks is None:
        return [callback]
    return [callback] + (list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks])


_tf.register_keras_class(GradientAccumulateModel, "GradientAccumulateModel")
