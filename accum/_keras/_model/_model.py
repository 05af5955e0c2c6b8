"""A Keras model whose `fit` makes one step for several micro-batches.

It adds to the optimizer what only a model knows: the weight of each micro-batch and the end of each epoch. A custom
`train_step` remains in use.

There is one class of accumulating models for each class of models that is made to accumulate.
"""

import functools
import inspect
import os
import weakref
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

from accum import _check, _config, _tf
from accum._clipping._adaptive import CLIP_FACTOR, EPS
from accum._engine._plan import Plan
from accum._keras import _step_context
from accum._keras._callbacks import FlushCallback
from accum._keras._diagnosis import _rules
from accum._keras._model._accumulation import ModelAccumulation
from accum._keras._model._optimizers import ModelOptimizers, flush_of, replaced_within
from accum._keras._model._options import OF_ACCUM_ALONE, ModelOptions
from accum._keras._model._size_in_use import SizeInUse, batches_of_fit
from accum._keras._optimizer._internals import accumulation_of, internals_of
from accum._keras._optimizer._wrapper import accumulating_optimizers, listeners_of
from accum._keras._steps._model_steps import FirstCall, ModelSteps
from accum._keras._steps._out_of_memory import AutoSizedSteps
from accum._keras._steps._reporting_loss import ReportingLoss
from accum._tf import Data, Logs, Nested, Options, tf
from accum._tf.types import AccumSteps, Config, CustomObjects

if TYPE_CHECKING:
    from typing_extensions import Unpack  # novm

    from accum._keras._model._options import OptionsByName

# --------------------------------------------------------------------------------------------------------------------
# Classes of accumulating models


MODEL_OPTIONS = ("inputs", "outputs", "name", "trainable", "dtype", "dynamic", "autocast")
"""Further arguments of `tf.keras.Model`. Keras 3 accepts any other name too, and ignores it."""

_CONCRETE: Dict[Tuple[type, type], type] = {}


def concrete_class(cls: type, base: type) -> type:
    """Return a subclass of both `cls` and the model class `base`, always the same one for each pair.

    When Keras creates the first functional model of a class, it makes the class functional for all its models.
    """
    if issubclass(cls, base):
        return cls
    if (cls, base) not in _CONCRETE:
        namespace = {"_root": cls, "_base": base, "__module__": cls.__module__, "__doc__": cls.__doc__}
        if hasattr(base, "save_pretrained"):  # `transformers` saves the class name
            namespace["save_pretrained"] = _as_plain("save_pretrained")
        _CONCRETE[cls, base] = type(cls.__name__, (cls, base), dict(namespace, __qualname__=cls.__qualname__))
    return _CONCRETE[cls, base]


def bases_named(name: str, module: Optional[str] = None) -> Dict[str, type]:
    """Return {name: class} for the one class of this name whose models have been made to accumulate, or {}.

    A clone or file of such a model has only the names of its class and of the `module` that defines it.
    """
    bases = {base for _, base in _CONCRETE if base.__name__ == name}
    if len(bases) > 1:
        bases = {base for base in bases if base.__module__ == module}
    return {name: bases.pop()} if len(bases) == 1 else {}


def _as_plain(name: str) -> Any:
    """Make a method that runs on the model as an instance of its original class, without accumulation."""

    def method(self: Any, *args: Sequence[object], **kwargs: Options) -> Any:
        return getattr(_tf.models.model_like(self, type(self)._base), name)(*args, **kwargs)

    return method


def is_functional(args: Sequence[object], kwargs: Options) -> bool:
    """Whether the arguments of `GradientAccumulateModel` make a functional model."""
    return "inputs" in kwargs or len(args) > 6


# --------------------------------------------------------------------------------------------------------------------
# The model


def _seeds(model: "GradientAccumulateModel") -> Optional[_tf.tracking.Seeds]:
    """Return the seeds that a checkpoint of the model holds, or None."""
    if "_accum" not in vars(model):
        return None
    variables = [_tf.variables.native(var) for var in _tf.steps.seeds_of(model)]
    return model._accum.seeds if model._accum.seeds.keep(variables) else None


@_tf.tracking.with_seeds(_seeds)
@_tf.models.not_made_as_functional
@_tf.graphs.run_as_written
@_check.describing(Plan.of)
class GradientAccumulateModel(tf.keras.Model):  # type: ignore[misc]
    """A Keras model that makes one step of its optimizer for every `accum_steps` micro-batches.

    The step is the one that the full batch would have made. It uses the mean of the micro-batches' gradients, each
    weighted by its number of examples, so a smaller last micro-batch is exact too.

    Args:
      accum_steps: micro steps per step, >= 1; or a schedule `{first step: accum_steps}` that includes step 0. If left
        out, it is 1, with a warning that nothing accumulates unless there is a `micro_batch_size` or
        `micro_batch_tokens`.
      mixed_precision: ignored; the policy is detected.
      use_agc: whether to clip the accumulated gradient adaptively (`adaptive_clip_grad`). `agc` is another name of it.
      clip_factor: > 0, as for `adaptive_clip_grad`.
      eps: > 0, as for `adaptive_clip_grad`.
      agc_exclude: the variables that are not clipped, as `exclude` of `AdaptiveClipping`: a list of names, such as
        "bias" or the name of the last layer, or a function `variable -> bool`.
      experimental_distributed_support: ignored; strategies are detected.
      *args: as for `tf.keras.Model`.
      reduction: "mean", "sum" or "running_mean".
      last_cycle: how an unfinished cycle is handled at the end of an epoch, before validation: "flush", "carry" or
        "drop", as for `FlushCallback`.
      micro_batch_weight: "examples", "equal", or a function `(x, y, sample_weight) -> scalar`, such as one that counts
        non-padding tokens. "examples" is the number by which Keras' losses divide. This is the number of unmasked
        elements instead of examples if the losses of all outputs divide by it in the installed TensorFlow: the losses
        of masked outputs do since TF 2.11, losses with an `ignore_class` since TF 2.10.
      **options: the others of `Plan.of`, which describes them.
      micro_batch_size: the largest number of examples that are computed at once, an int >= 1. Each batch that
        `fit`, `evaluate` or `predict` receives is split into micro-batches of this size, inside of the step that Keras
        runs for it, so steps per epoch, logs, callbacks and schedules count whole batches. "auto": the largest
        size that fits, as measured with a few examples before the first step of training; if memory runs out
        nevertheless, the size is halved and the same batch tried again. None: do not split batches. With `accum_steps`,
        a cycle is that many batches.
      micro_batch_tokens: instead of `micro_batch_size`, the largest number of tokens that are computed at once, padding
        included, an int >= 1. The examples of each batch are sorted by length and grouped into micro-batches of about
        equally many tokens, each as long as its longest example. Updates, logs and the order of predictions are
        those of the batch. An example that is longer is computed alone. Predictions are 0 at padding.
      sequence_lengths: with `micro_batch_tokens`, a function of x that returns the number of tokens in each example, an
        int tensor of shape [examples]. None: it is read from ragged inputs, from an "attention_mask" among the inputs,
        or from layers of the model that mask padding (`Embedding(…, mask_zero=True)`, `Masking`).
      whole_batch: what is computed over the whole batch although it is split. None: what exactness needs. If the
        outputs and losses of an example provably depend on no other example, micro-batches take one pass; otherwise the
        step is computed as with "batch_norm", on each replica by itself. (): nothing, with a warning if it may differ.
        Or "loss", "batch_norm", a tuple of them, or "all". "loss": the train step calls the model as if with the whole
        batch, so losses and metrics see all outputs at once; each micro-batch is computed twice. "batch_norm": this,
        and batch normalization uses the mean and variance of the whole batch, wherever it is in the model, but not in
        the body of a loop or conditional. Needs `micro_batch_size`.
      replicas_per_group: under a strategy, the number of replicas whose examples `whole_batch` puts together, an int
        that divides the number of replicas: 1 for each replica's own, None for all. Or a dict of them by "loss" and
        "batch_norm". Replicas 0 to n - 1 are the first group.
      recompute: with `whole_batch`, whether to keep only some of the tensors of the whole batch that batch
        normalization needs, and to compute the others again, for less memory. False: keep them, for speed.
      memory_limit: with `micro_batch_size="auto"`, the bytes of each GPU that training may use, an int >= 1; without a
        GPU, the bytes of the process's resident memory. None: nine tenths of what the GPU has, or of what the machine,
        the cgroup of a container and `ulimit` leave to the process.
      inputs, outputs, name, trainable, dtype, dynamic, autocast: as for `tf.keras.Model` of the installed Keras.

    Raises:
      TypeError, ValueError: an argument does not match its description above.

    Example:
      >>> model = accum.GradientAccumulateModel(accum_steps=4, inputs=model.inputs, outputs=model.outputs)
      >>> model.compile("adam", loss="mse")
      >>> model.fit(x, y, batch_size=8)  # steps as with batch_size=32
    """

    def __new__(cls, *args: object, **kwargs: object) -> "GradientAccumulateModel":
        """Create an instance; for a functional model, of a separate class that only functional models share."""
        base = _tf.models.Functional if is_functional(args, kwargs) else tf.keras.Model
        return super().__new__(concrete_class(cls, base), *args, **kwargs)

    @_check.taking(ModelOptions.of)
    def __init__(
        self,
        accum_steps: AccumSteps = _check.LEFT_OUT,
        mixed_precision: bool = False,
        use_agc: bool = False,
        clip_factor: float = CLIP_FACTOR,
        eps: float = EPS,
        experimental_distributed_support: bool = False,
        *args: object,
        inputs: Any = _check.LEFT_OUT,
        outputs: Any = _check.LEFT_OUT,
        name: Any = _check.LEFT_OUT,
        trainable: Any = _check.LEFT_OUT,
        dtype: Any = _check.LEFT_OUT,
        dynamic: Any = _check.LEFT_OUT,
        autocast: Any = _check.LEFT_OUT,
        **options: "Unpack[OptionsByName]",
    ) -> None:
        passed = locals()
        del mixed_precision, experimental_distributed_support
        if isinstance(accum_steps, tf.keras.Model):
            raise TypeError(
                "To let a model accumulate, call `GradientAccumulateModel.from_model(model, …)`; the class itself "
                f"takes `inputs` and `outputs`. Received: {accum_steps!r}. [accum: arguments]"
            )
        model_options = ModelOptions.of(
            accum_steps=accum_steps, use_agc=use_agc, clip_factor=clip_factor, eps=eps, **options
        )
        of_keras = {name: passed[name] for name in MODEL_OPTIONS if passed[name] is not _check.LEFT_OUT}
        if not args and not ("inputs" in of_keras and "outputs" in of_keras):
            raise ValueError(
                "`GradientAccumulateModel` takes the `inputs` and `outputs` of a functional model. For any other "
                "model, use `GradientAccumulateModel.from_model`. [accum: from-model]"
            )
        if is_functional((), of_keras) and not isinstance(self, _tf.models.Functional):
            # A subclass creates its layers in `__init__`: Keras would make the class functional for all its models.
            self.__class__ = concrete_class(type(self), _tf.models.Functional)
        super().__init__(*args, **of_keras)
        self._accumulate_by(ModelAccumulation(model_options, {}))

    @classmethod
    @_check.taking(ModelOptions.of)
    def from_model(
        cls,
        model: tf.keras.Model,
        accum_steps: AccumSteps = _check.LEFT_OUT,
        mixed_precision: bool = False,
        use_agc: bool = False,
        clip_factor: float = CLIP_FACTOR,
        eps: float = EPS,
        experimental_distributed_support: bool = False,
        **options: "Unpack[OptionsByName]",
    ) -> "GradientAccumulateModel":
        """Create an accumulating model from any other model: functional, Sequential or subclassed.

        It shares the layers, variables and compiled state of `model`, and has the methods of its class: a custom
        `train_step`, `call` or `compile` remains in use. `model` itself is not changed: let losses and callbacks that
        read or set attributes of the model refer to the new one.

        Args:
          model: a `tf.keras.Model`.
          others: as for the class, all but those of `tf.keras.Model`.

        Returns:
          A `GradientAccumulateModel` that is also an instance of the class of `model`. If `model` is compiled, the
          new model is compiled too: it wraps the same optimizer, which keeps its state, and has the same loss and
          metrics.

        Raises:
          TypeError: `model` is not a `tf.keras.Model`; an option is unknown.
          ValueError: `model` accumulates already, or has made steps with a `LossScaleOptimizer`.
        """
        del mixed_precision, experimental_distributed_support
        if not isinstance(model, tf.keras.Model):
            raise TypeError(f"`model` must be a `tf.keras.Model`. Received: model={model!r}.")
        if isinstance(model, GradientAccumulateModel):
            raise ValueError(
                "`model` accumulates already: set its `micro_batch_size`, or pass `accum.unwrap(model)`. Received: "
                f"{model!r}. [accum: wrapped-twice]"
            )
        model_options = ModelOptions.of(
            accum_steps=accum_steps, use_agc=use_agc, clip_factor=clip_factor, eps=eps, **options
        )
        made = _tf.models.model_like(model, concrete_class(getattr(cls, "_root", cls), type(model)))
        steps = [name for name in ("train_step", "test_step", "predict_step") if name in vars(model)]
        own_steps = {name: _tf.models.bound_to(made, model, made.__dict__.pop(name)) for name in steps}
        made._accumulate_by(ModelAccumulation(model_options, own_steps))
        made._accum.first_model = weakref.ref(model)
        if getattr(model, "optimizer", None) is not None:
            made._accum.compile_micro_batches(made, _tf.steps.XLA_IS_ASKED_FOR)
            ModelOptimizers(made).take_over()
            _rules.apply("compiled", _rules.Seen(made))
        return made

    def _accumulate_by(self, accumulation: ModelAccumulation) -> None:
        accumulation.steps = ModelSteps(self)
        self.__dict__["_accum"] = accumulation  # neither a layer nor in checkpoints
        accumulation.steps.replace()
        self._keep_loss()

    @property
    def accum_steps(self) -> AccumSteps:
        """Batches per update, or their schedule. An int that is assigned takes effect from the next cycle on.

        Raises:
          ValueError: on assignment, there are no accumulators, or there is a schedule.
        """
        if "accum_steps" in self.__dict__:
            return self.__dict__["accum_steps"]
        if self._has_own_accum_steps():
            return super().accum_steps
        if accumulation_of(self) is None:
            raise AttributeError("`accum_steps` is known when the model has been created. [accum: set-later]")
        return self._steps_in_use

    @accum_steps.setter
    def accum_steps(self, value: int) -> None:
        own = accumulation_of(self)
        if own is None or not own.optimizers or "accum_steps" in self.__dict__ or self._has_own_accum_steps():
            if own is not None and not own.optimizers and value != own.options.plan.accum_steps:
                _check.warn(
                    "`accum_steps` belongs to the optimizers, which the model does not have yet, so this is an "
                    "attribute of your own: pass `accum_steps` where the model is created, or set it after `compile`. "
                    f"Received: accum_steps={value!r}. [accum: set-later]"
                )
            self.__dict__["accum_steps"] = value
            return
        for optimizer in accumulating_optimizers(self):
            optimizer.accum_steps = value

    def _has_own_accum_steps(self) -> bool:
        """Whether the class that was made to accumulate has an attribute `accum_steps`."""
        return hasattr(getattr(type(self), "_base", None), "accum_steps")

    @property
    def micro_batch_size(self) -> Union[int, str, None]:
        """The largest number of examples that are computed at once. It can be set between steps.

        None if the model does not split its batches, and "auto" while it has not yet had to.
        """
        return self._accum.size.in_use

    @micro_batch_size.setter
    def micro_batch_size(self, size: Union[int, str]) -> None:
        if self._accum.size.tokens is not None:
            raise ValueError(
                "The batches of this model are split by `micro_batch_tokens`: create another model with "
                f"`micro_batch_size`, from `accum.unwrap(model)`. Received: {size!r}. [accum: set-later]"
            )
        if _check.micro_batch_size(size) is None:
            raise ValueError(
                "`micro_batch_size` can't be removed from a model: take `accum.unwrap(model)`, which is not split. "
                "Received: None. [accum: set-later]"
            )
        arguments = self._accum.options.arguments
        arguments["micro_batch_size"] = size
        if size != "auto":
            arguments["memory_limit"] = None
        self._accum.size = SizeInUse(size, memory_limit=arguments["memory_limit"])
        self._accum.steps.replace()
        self._accum.traces.clear()
        _tf.graphs.forget_traces(self)
        with self.distribute_strategy.scope():
            for name in ("train_function", "test_function", "predict_function"):
                is_in_use = getattr(self, name, None) is not None
                setattr(self, name, None)
                if is_in_use:  # perhaps by the `fit` in which a callback sets the size
                    getattr(self, f"make_{name}")()

    def compile(self, *args: object, **kwargs: object) -> None:
        """Wrap each optimizer, and compile with the `compile` of the model's class.

        An optimizer is an instance, a name or a config, alone or in a list, tuple or dict. Optimizers that a custom
        `compile` or `__init__` creates are found among the model's attributes. A `LossScaleOptimizer` must be
        outermost, where it scales the loss: a new one is created around the accumulating optimizer, which wraps a copy
        of the inner optimizer, because one optimizer cannot have two loss scales. A `GradientAccumulateOptimizer` is
        used unchanged if it accumulates like the model.

        Raises:
          ValueError: an optimizer accumulates differently, or is in a `LossScaleOptimizer` and has made steps.
        """
        signature = inspect.signature(super().compile)
        bound = signature.bind_partial(*args, **kwargs)
        self._accum.begin_anew()
        optimizers_of_model = ModelOptimizers(self)
        _tf.graphs.forget_traces(self)  # which know the optimizers of the last `compile`
        for arguments in (bound.arguments, bound.kwargs):
            for name, value in arguments.items():
                arguments[name] = replaced_within(value, optimizers_of_model.accumulating)
        super().compile(*bound.args, **bound.kwargs)
        asks = {**bound.arguments, **kwargs}.get("jit_compile") is True or _tf.steps.XLA_IS_ASKED_FOR
        self._accum.compile_micro_batches(self, asks)
        optimizers_of_model.take_over()
        _rules.apply("compiled", _rules.Seen(self))
        optimizers = accumulating_optimizers(self) if self._accum.optimizers else []
        if len(optimizers) == 1:  # it may be the same optimizer after layers were frozen or unfrozen
            internals_of(optimizers[0]).expect(self)

    def __repr__(self) -> str:
        shown = super().__repr__()
        if accumulation_of(self) is None:  # still being constructed
            return shown
        if " object at 0x" in shown:  # the default of Python; Keras 3 has its own
            shown = f"<{type(self).__name__} name={self.name}, built={self.built}>"
        arguments = self._accumulation()
        return f"{shown[:-1]}, {arguments}>" if shown.endswith(">") else f"{shown} ({arguments})"

    def _accumulation(self) -> str:
        """Say how the model accumulates, by the arguments that it has now."""
        shown = {"accum_steps": self._steps_in_use, "reduction": self._accum.options.plan.reduction}
        if self.micro_batch_size is not None:
            shown["micro_batch_size"] = self.micro_batch_size
        if self._accum.size.tokens is not None:
            shown["micro_batch_tokens"] = self._accum.size.tokens
        if self._accum.whole_batch and not self._accum.is_exact_by_default:
            shown["whole_batch"] = self._accum.whole_batch
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())

    @property
    def _steps_in_use(self) -> AccumSteps:
        optimizers = self._accum.optimizers or ()
        accum_steps = [_tf.optimizers.without_loss_scale(optimizer).accum_steps for optimizer in optimizers]
        return (accum_steps or [self._accum.options.plan.shown_steps()])[0]

    def summary(self, *args: object, **kwargs: object) -> None:
        """Print the summary of `tf.keras.Model.summary`, and how the model accumulates."""
        passed = inspect.signature(super().summary).bind_partial(*args, **kwargs).arguments
        super().summary(*args, **kwargs)
        steps, size = self._steps_in_use, self.micro_batch_size
        batches = "each batch" if steps == 1 else f"every {steps} batches" if isinstance(steps, int) else "each cycle"
        parts = "" if size is None else f"; batches are computed in micro-batches of at most {size} examples"
        if self._accum.size.tokens is not None:
            parts = f"; batches are computed in micro-batches of at most {self._accum.size.tokens} tokens"
        if size == "auto":
            parts = "; batches are split if they do not fit into memory"
        line = f"Gradient accumulation: {self._accumulation()} (one update for {batches}{parts})"
        (passed.get("print_fn") or print)(line)

    def fit(self, *args: object, **kwargs: object) -> tf.keras.callbacks.History:
        """Train as `tf.keras.Model.fit` does; `last_cycle` decides how the last or an interrupted cycle ends."""
        signature = inspect.signature(super().fit)
        bound = signature.bind_partial(*args, **kwargs)
        self._accum.take_steps_of_loss_scales()
        ending = FlushCallback(self._accum.options.last_cycle)
        passed = bound.arguments
        if "callbacks" not in signature.parameters:  # the class may take them by `**kwargs`
            others = [name for name, one in signature.parameters.items() if one.kind is one.VAR_KEYWORD]
            if any(one.kind is one.VAR_POSITIONAL for one in signature.parameters.values()):  # by position, as in Keras
                names = list(inspect.signature(tf.keras.Model.fit).parameters)[1:]
                args, kwargs = (), dict(zip(names, args), **kwargs)
                bound = signature.bind_partial(*args, **kwargs)
            passed = bound.arguments.setdefault(others[0], {}) if others else {}
        passed["callbacks"] = self._with_callback(passed.get("callbacks"), ending)
        if passed is not bound.arguments and not others and self._steps_in_use != 1:
            _check.warn(
                f"`{_tf.models.name_of_class(self)}.fit` takes no `callbacks`, so no cycle ends with an epoch: let it "
                "take them and pass them on. [accum: epoch-end]",
                _check.InexactWarning,
            )
        self._warn_of_sizes({**passed, **bound.arguments})
        try:
            return super().fit(*bound.args, **bound.kwargs)
        except BaseException:
            if self._accum.optimizers is not None:
                ending.end_interrupted_cycle_of(self)
            for listener in listeners_of(self):
                listener.stop()
            raise

    def train_on_batch(self, *args: object, **kwargs: object) -> Any:
        """Train on one batch, as `tf.keras.Model.train_on_batch` does."""
        self._accum.take_steps_of_loss_scales()
        result = super().train_on_batch(*args, **kwargs)
        self._accum.warn_if_none_was_split(self.distribute_strategy)
        return result

    def _with_callback(self, callbacks: Any, ending: FlushCallback) -> Any:
        """Return `callbacks` as the user passed them, with `ending` before the others."""
        is_list = hasattr(callbacks, "append") and hasattr(callbacks, "on_train_begin")  # private up to 2.2
        listed = callbacks.callbacks if is_list else callbacks
        listed = [] if listed is None else list(listed) if isinstance(listed, (list, tuple)) else [listed]
        others = [one.last_cycle for one in listed if isinstance(one, FlushCallback)]
        if any(last_cycle != ending.last_cycle for last_cycle in others):
            raise ValueError(
                "The model ends its cycles by itself: leave out the `FlushCallback`, and pass the model `last_cycle`. "
                f"Received: last_cycle={others[0]!r}, for a model with {ending.last_cycle!r}. [accum: epoch-end]"
            )
        if not is_list:
            return [ending] + listed
        if not others:  # which does the same
            ending.set_model(self)
            ending.set_params(getattr(callbacks, "params", None) or {})
            callbacks.callbacks.insert(0, ending)
        return callbacks

    def _warn_of_sizes(self, passed: Options) -> None:
        """Warn, once, if the batches that `fit` will compute hardly are what is meant."""
        size, batches = self._accum.size.fixed, batches_of_fit(passed)
        if size is None or batches is None:
            return
        replicas = self.distribute_strategy.num_replicas_in_sync
        batch = -(-batches.size // replicas)
        received = f"micro_batch_size={size}, {batches.described}" + (f", {replicas} replicas" if replicas > 1 else "")
        if batch <= size:
            self._accum.warn_of_one_part(received)
        steps = self._accum.options.arguments["accum_steps"]
        is_both = isinstance(steps, int) and steps > 1 and steps * size == batch
        if is_both and self._accum.is_first_time("batches that are split already"):
            _check.warn(
                f"Each update counts {steps * batches.size} examples, because the model splits each batch into "
                "micro-batches and also accumulates `accum_steps` batches. For an update after each batch, leave out "
                f"`accum_steps`. Received: accum_steps={steps}, {received}. [accum: batch-sizes]"
            )

    # ------------------------------------------------------------------------------------------------------------
    # What Keras calls while it builds and runs the steps

    def __setattr__(self, name: str, value: Any) -> None:
        own = accumulation_of(self)
        if own is not None and name in own.own_steps and name in self.__dict__:
            if value != self.__dict__[name]:
                own.own_steps[name] = value  # None: that of the class
        else:
            if own is not None and name in OF_ACCUM_ALONE and name not in self.__dict__:
                self._warn_of_option(name)
            super().__setattr__(name, value)
            if name == "compute_loss" and own is not None:
                self._keep_loss()

    def _warn_of_option(self, name: str) -> None:
        """Warn of an assignment to an attribute that has the name of an option, but that nothing reads."""
        if not hasattr(type(self), name):
            _check.warn(
                f"`{name}` is an option of accum, and an attribute of this name changes nothing: pass "
                f"`{name}` where the model is created. If it is an attribute of your own, set it before."
                " [accum: set-later]"
            )

    def _maybe_symbolic_build(self, iterator: Optional[Iterator[Data]] = None, data_batch: Data = None) -> None:
        """Build the model by the shapes of its data. Keras 3 calls this, and would average a batch over the replicas.

        That fails with several workers, and where the parts of a batch are not equally large.
        """
        specs = None if iterator is None or data_batch is not None else _tf.models.batch_spec_of(iterator)
        if specs is not None:
            iterator, data_batch = None, specs
        super()._maybe_symbolic_build(iterator, data_batch)

    def _make_function(self, step_function: Callable[[Iterator[Data]], Nested]) -> Callable[[Iterator[Data]], Nested]:
        """Make the train or test function. Keras 3 calls this, and averages logs over workers by their first axis.

        Scalars have none, so they get one.
        """
        if not _tf.strategies.has_several_workers(self.distribute_strategy):
            return super()._make_function(step_function)

        def on_replica(data: Data) -> Nested:
            logs = map_structure(tf.convert_to_tensor, step_function(data))
            return map_structure(lambda value: value if value.shape.rank else tf.reshape(value, [1]), logs)

        map_structure = tf.nest.map_structure
        return super()._make_function(on_replica)

    def make_train_function(self, *args: object, **kwargs: object) -> Any:
        """Make the train function; also wrap an optimizer that was set after `compile`."""
        if ModelOptimizers(self).take_over():
            self.train_function = None
        _rules.apply("making the train function", _rules.Seen(self))
        is_new = self._makes_anew("train_function", args, kwargs)
        if is_new:
            with self.distribute_strategy.scope():
                self._accum.create_variables()
        made = self._made_function("train_function", super().make_train_function, args, kwargs)
        if is_new:
            self.train_function = FirstCall(self, self.train_function)  # type: ignore[arg-type]
        return self.train_function if is_new else made

    def make_test_function(self, *args: object, **kwargs: object) -> Callable[[Iterator[Data]], Logs]:
        return self._made_function("test_function", super().make_test_function, args, kwargs)

    def make_predict_function(self, *args: object, **kwargs: object) -> Callable[[Iterator[Data]], Nested]:
        made = super().make_predict_function
        return self._made_function("predict_function", made, args, kwargs)

    def _makes_anew(self, name: str, args: Sequence[object], kwargs: Options) -> bool:
        """Whether `make_train_function` and others, with such arguments, make a function that Keras traces anew."""
        return getattr(self, name, None) is None or any(args) or any(kwargs.values())

    def _made_function(
        self,
        name: str,
        make: Callable[..., Callable[[Iterator[Data]], Nested]],
        args: Sequence[object],
        kwargs: Options,
    ) -> Callable[[Iterator[Data]], Nested]:
        """Return the function that Keras calls for each batch: its own, or one that tries smaller micro-batches."""
        is_new = self._makes_anew(name, args, kwargs)
        if is_new:
            self._accum.forget_traces(name.replace("function", "step"))
        if not self._accum.size.is_auto:
            return make(*args, **kwargs)
        if is_new:
            setattr(self, name, getattr(AutoSizedSteps(self), name))
        return getattr(self, name)

    def __call__(self, *args: object, **kwargs: object) -> Nested:
        call, calls = super().__call__, _step_context.of_model(self).calls
        return call(*args, **kwargs) if calls is None else calls.of_model(call, args, kwargs)

    def _keep_loss(self) -> None:
        """Watch a `compute_loss` of the user's, or let it see the outputs of several replicas.

        It sees them if losses are computed over them.
        """
        own: Any = getattr(self, "compute_loss", None)
        if not _tf.losses.is_of_user(own, "compute_loss"):
            return

        # Neither a function of its own nor a lambda: a deep copy of the model takes this along, bound to the copy.
        compute_loss = functools.partial(self._watched_loss, own)
        _tf.patches.COMPUTE_LOSS.keep(self, "compute_loss", functools.update_wrapper(compute_loss, own))

    def _watched_loss(self, own: Callable[..., tf.Tensor], *args: object, **kwargs: object) -> tf.Tensor:
        losses = _step_context.of_model(self).replica_losses
        if losses is not None:
            return losses.of_user(own, args, kwargs)
        total = own(*args, **kwargs)
        container = getattr(self, _tf.losses.LOSS_CONTAINER, None)
        if isinstance(container, ReportingLoss):
            container.compare(total, self.losses)
        return total

    @property
    def metrics(self) -> List[tf.keras.metrics.Metric]:
        metrics = super().metrics
        of_step = _step_context.of_model(self).metrics
        if of_step is not None:
            of_step.watch(metrics)
        return metrics

    # ------------------------------------------------------------------------------------------------------------
    # Files and configs

    def save(self, filepath: Union[str, "os.PathLike[str]"], *args: object, **kwargs: object) -> None:
        """Save as `tf.keras.Model.save` does. H5 and `.keras` files leave out an unfinished cycle, with a warning."""
        kind = kwargs.get("save_format") or os.path.splitext(str(filepath))[1]
        if str(kind).lstrip(".") in ("h5", "hdf5", "keras"):
            self._warn_of_unfinished_cycle(filepath)
        return super().save(filepath, *args, **kwargs)

    if _tf.version.PICKLES:

        def __reduce__(self) -> Tuple[Any, ...]:
            """Pickle and copy the model as the content of a `.keras` file, as Keras does."""
            self._warn_of_unfinished_cycle("a pickle or copy")
            return _tf.models.pickled_by_name(super().__reduce__())

    def _warn_of_unfinished_cycle(self, where: Union[str, "os.PathLike[str]"]) -> None:
        optimizers = accumulating_optimizers(self) if self._accum.optimizers is not None else []
        cycles = [internals_of(optimizer).cycle for optimizer in optimizers]
        if any(cycle.is_built and cycle.is_in_cycle() for cycle in cycles):
            _check.warn(
                f"An unfinished cycle is left out of {where}: call `{flush_of(self)}` first, or save a "
                "`tf.train.Checkpoint`, which keeps it. [accum: unfinished-cycle]",
            )

    def get_config(self) -> Config:
        """Return the config of the model without accumulation, plus this class's arguments under "accumulation".

        Raises:
          NotImplementedError: the model is subclassed and has no config.
        """
        base = getattr(type(self), "_base", _tf.models.Functional)
        class_name, config = _tf.models.plain_config(self, base)
        own = {} if _tf.layers.comes_with_keras(base) else {"module": base.__module__}
        options = self._accum.options.get_config()
        # which a callback may have changed:
        options["accum_steps"] = _config.to_config("accum_steps", self._steps_in_use)
        return dict(config, accumulation=dict(options, model=class_name, **own))

    @classmethod
    def from_config(cls, config: Config, custom_objects: CustomObjects = None) -> "GradientAccumulateModel":
        """Create a model, not yet compiled, from the config that `get_config` returned."""
        config = dict(config)
        accumulation = config.pop("accumulation")
        classes = {**bases_named(accumulation["model"], accumulation.get("module")), **(custom_objects or {})}
        model = _tf.models.from_plain_config(accumulation["model"], config, classes)
        return cls.from_model(model, **ModelOptions.arguments_from(accumulation, custom_objects))

    def compile_from_config(self, config: Config) -> None:
        """Compile from the content of a `.keras` file (TF >= 2.13), unless the class overrides `compile`."""
        if getattr(type(self), "_base", tf.keras.Model).compile is not tf.keras.Model.compile:
            super().compile_from_config(config)
            return
        self.compile(**_tf.models.deserialize_compile_config(config))
        if _tf.optimizers.is_new_optimizer(self.optimizer) and self.built:
            self.optimizer.build(self.trainable_variables)


def _finish_clone(model: tf.keras.Model, clone: tf.keras.Model) -> GradientAccumulateModel:
    """Let what Keras has cloned from the layers of `model` accumulate like `model`."""
    arguments = dict(model._accum.options.arguments, accum_steps=model._steps_in_use)
    return getattr(type(model), "_root", type(model)).from_model(clone, **arguments)


_tf.models.finish_clones(GradientAccumulateModel, _finish_clone)
_tf.optimizers.register_keras_class(GradientAccumulateModel, "GradientAccumulateModel")
