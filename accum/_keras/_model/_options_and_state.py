"""All that a `GradientAccumulateModel` knows about how it accumulates, in one object: `ModelAccumulation`.

It has the model's options (`ModelOptions`), the size of its micro-batches (`SizeInUse`), the weight of the one that it
is trained on (`WeightVariable`) and its optimizers, which are found in the model's attributes and in lists, tuples and
dicts there (`ModelOptimizers`).
"""

import collections
import copy
import functools
import inspect
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from accum import _check, _config, _tf
from accum._clipping._adaptive import CLIP_FACTOR, EPS
from accum._clipping._transform import AdaptiveClipping
from accum._engine import _replicas
from accum._engine._cycle import check_options
from accum._keras._callbacks import LAST_CYCLE, accumulating_optimizers
from accum._keras._optimizer._wrapper import GradientAccumulateOptimizer, internals_of
from accum._keras._steps._gradients_and_warnings import AddedSums, ReportingLoss
from accum._keras._steps._one_pass import kind_of, what_is_known_to_see_it, what_sees_the_batch
from accum._keras._steps._repeatable_noise import RepeatableNoises
from accum._keras._steps._whole_batch import Traces
from accum._tf import Data, Nested, Options, Scalar, Transform, tf
from accum._tf.types import (
    AccumSteps,
    Config,
    CustomObjects,
    Dtype,
    MicroBatchSize,
    MicroBatchWeight,
    Names,
    Nonfinite,
    Reduction,
    ReplicasPerGroup,
    SequenceLengths,
    Sparse,
)

if TYPE_CHECKING:
    from accum._keras._logging._step_recorder import StepRecorder
    from accum._keras._steps._losses_over_replicas import ReplicaLosses
    from accum._keras._steps._metrics_and_logs import StepMetrics
    from accum._keras._steps._trimmed_time import TrimmedTime
    from accum._keras._steps._update_gate import GateVariables
    from accum._keras._steps._whole_batch import WholeBatchCalls


# --------------------------------------------------------------------------------------------------------------------
# The number of examples that a model computes at once


WHOLE_BATCH = 2**31 - 1
"""A size that no batch reaches."""


class SizeInUse:
    """The size of the micro-batches into which a model splits each batch.

    Args:
      requested: what the user asked for: None, an int >= 1 or "auto".
      tokens: the largest number of tokens in a micro-batch, an int >= 1, or None.
      memory_limit: bytes in which micro-batches must fit under "auto"; None: what the device or the process has.

    Attributes:
      requested, tokens: the same.
      fixed: the size if it is an int, else None.
      memory_limit: the same.
      limit: under "auto", the largest size that has not run out of memory; `WHOLE_BATCH` as long as whole batches fit.
      measured: the number of examples in the largest batch for which memory was measured under "auto", or 0.
    """

    def __init__(
        self, requested: Union[int, str, None], *, tokens: Optional[int] = None, memory_limit: Optional[int] = None
    ) -> None:
        self.requested = _check.micro_batch_size(requested)
        self.tokens = _check.micro_batch_tokens(tokens, self.requested)
        self.memory_limit = memory_limit
        self.measured = 0
        self.fixed: Optional[int] = None if self.is_auto else self.requested
        self.limit = WHOLE_BATCH

    @property
    def splits(self) -> bool:
        """Whether the model computes its batches in micro-batches."""
        return self.requested is not None or self.tokens is not None

    @property
    def is_auto(self) -> bool:
        return isinstance(self.requested, str)

    @property
    def in_use(self) -> Union[int, str, None]:
        """What a user sees: the requested or reduced size, "auto" as long as whole batches fit, or None."""
        return self.requested if self.limit == WHOLE_BATCH else self.limit

    def is_to_be_measured(self, count: int, is_alone: bool) -> bool:
        """Whether memory is to be measured before a batch is computed.

        Args:
          count: the number of examples in the batch.
          is_alone: whether there is no other worker. Several measure before the first batch only: later, `count` may
            exceed what was measured on one of them, which would wait for the others forever.
        """
        return self.limit == WHOLE_BATCH and (count > self.measured if is_alone else self.measured == 0)

    def choose(self, size: int, described: str) -> None:
        """Use a size that was chosen by measuring, and tell the user.

        Args:
          size: the number of examples, less than in the batch.
          described: what was measured.
        """
        self.limit = size
        _check.warn(f"`micro_batch_size` is {size} from now on: {described}. [accum: auto-size]")

    def halve(self, count: int, error: Optional[BaseException]) -> None:
        """Halve the size after memory has run out.

        Args:
          count: the number of examples in the batch; of a replica, under a strategy.
          error: the `ResourceExhaustedError`, or None if it was raised by another worker.

        Raises:
          RuntimeError: not even one example fits.
        """
        tried = min(self.limit, count)
        if tried <= 1:
            raise RuntimeError(
                "Memory ran out with one example at a time: `micro_batch_size` can't be reduced further. Use smaller "
                "examples or a smaller model, or recompute activations with `tf.recompute_grad`. [accum: out-of-memory]"
            ) from error
        self.limit = tried // 2

    def report(self) -> None:
        """Tell the user the size that has turned out to fit."""
        _check.warn(f"Memory ran out, so `micro_batch_size` is {self.limit} from now on. [accum: auto-size]")


class BatchesOfFit(NamedTuple):
    """The batches that `fit` computes.

    Attributes:
      size: the number of examples in each, but perhaps the last one.
      described: where that comes from, for a message.
    """

    size: int
    described: str


def batches_of_fit(passed: Options) -> Optional[BatchesOfFit]:
    """Return the batches that `fit` will compute, or None if its arguments do not tell.

    Args:
      passed: the arguments of `tf.keras.Model.fit` that were passed, by their names.
    """
    x = passed.get("x")
    if isinstance(x, tf.data.Dataset):
        sizes = {_first_length(spec.shape) for spec in tf.nest.flatten(x.element_spec) if hasattr(spec, "shape")}
        size = sizes.pop() if len(sizes) == 1 else None
        return None if size is None else BatchesOfFit(size, f"batches of {size} examples")
    leaves = tf.nest.flatten(x)
    if not all(hasattr(leaf, "__array__") and hasattr(leaf, "shape") for leaf in leaves):
        return None
    if passed.get("batch_size") is None and passed.get("steps_per_epoch") is not None:
        return None  # Keras divides the data by the steps
    batch, examples = passed.get("batch_size") or 32, _first_length(leaves[0].shape) if leaves else None
    if examples is None:
        return None
    examples = int(examples * (1.0 - (passed.get("validation_split") or 0.0)))
    if examples < batch:
        return BatchesOfFit(examples, f"batch_size={batch}, {examples} examples")
    return BatchesOfFit(batch, f"batch_size={batch}")


def _first_length(shape: Union[tf.TensorShape, tuple]) -> Optional[int]:
    lengths = tf.TensorShape(shape)
    return lengths.as_list()[0] if lengths.rank else None


class LargestBatch:
    """The number of examples in the largest batch that a replica has trained on, as long as none has been split."""

    def __init__(self) -> None:
        self._variable: Optional[tf.Variable] = None

    def create(self) -> None:
        """Create the variable, if there is none."""
        if self._variable is None:
            with tf.init_scope():
                self._variable = _tf.variables.new_statistic("largest_batch", [], tf.float32)

    def note(self, count: Scalar) -> None:
        """Note the number of examples in a batch of this replica."""
        self.create()
        variable = _replicas.local_variable(self._variable)
        variable.assign(tf.maximum(variable.read_value(), tf.cast(count, tf.float32)))

    def value(self, strategy: tf.distribute.Strategy) -> int:
        """Return the number for the replicas of this worker, given the model's strategy; 0 before the first batch."""
        parts = [] if self._variable is None else strategy.experimental_local_results(self._variable)
        return max([int(part.numpy()) for part in parts], default=0)


# --------------------------------------------------------------------------------------------------------------------
# The weight of a micro-batch


class WeightVariable:
    """Holds the weight of each replica's micro-batch, a float32 scalar.

    It is a variable because a `tf.function` in a train step, once traced, is called again for the next micro-batch.

    Attributes:
      was_replaced: whether a train step has ever replaced the weight that a micro-batch began with.
    """

    def __init__(self) -> None:
        self.was_replaced = False
        self._variable: Optional[tf.Variable] = None

    def begin(self, weight: Optional[Scalar]) -> Union[Scalar, tf.Variable, None]:
        """Set the weight of a new micro-batch.

        Returns:
          The variable, or None for the weight None.

        Raises:
          ValueError: the weight is negative.
        """
        if weight is None:
            return None
        _check.not_negative("micro_batch_weight", weight, _tf.variables.known_value(weight))
        self.create()
        self._assign(weight)
        return self._variable

    def create(self) -> None:
        """Create the variable, if there is none."""
        if self._variable is None:
            with tf.init_scope():
                self._variable = _tf.variables.new_statistic("micro_batch_weight", [], tf.float32)

    def replace(self, weight: Scalar) -> None:
        """Replace the weight of the micro-batch, if it has one."""
        self.was_replaced = True
        if self._variable is not None:
            self._assign(weight)

    def _assign(self, weight: Scalar) -> None:
        _replicas.local_variable(self._variable).assign(tf.cast(weight, tf.float32))

    @staticmethod
    def read(variable: Union[Scalar, tf.Variable, None]) -> Optional[Scalar]:
        """Return the value of what `begin` returned."""
        return None if variable is None else _replicas.local_variable(variable).read_value()


# --------------------------------------------------------------------------------------------------------------------
# Arguments: checked, written into the config and read from it


WEIGHTS = ("examples", "equal")
FUNCTIONS = ("transform", "micro_batch_weight", "agc_exclude", "sequence_lengths")


class ModelOptions:
    """The checked arguments of a model.

    Attributes:
      arguments: dict of all arguments, as passed.
      for_optimizers: dict of the arguments for its optimizers.
      last_cycle: "flush", "carry" or "drop".
    """

    NAMES: Tuple[str, ...]

    def __init__(self, arguments: Options, options: Options, last_cycle: str, weight: MicroBatchWeight) -> None:
        self.arguments = arguments
        self.for_optimizers = options
        self.last_cycle = last_cycle
        self._weight = weight

    @classmethod
    def of(
        cls,
        *,
        accum_steps: AccumSteps = _check.LEFT_OUT,
        use_agc: bool = False,
        clip_factor: float = CLIP_FACTOR,
        eps: float = EPS,
        agc_exclude: Names = (),
        reduction: Reduction = "mean",
        last_cycle: Any = "flush",
        micro_batch_weight: Any = "examples",
        transform: Optional[Transform] = None,
        nonfinite: Nonfinite = "propagate",
        accumulator_dtype: Optional[Dtype] = None,
        sparse: Sparse = "rows",
        micro_batch_size: MicroBatchSize = None,
        micro_batch_tokens: Optional[int] = None,
        sequence_lengths: Optional[SequenceLengths] = None,
        whole_batch: Any = None,
        replicas_per_group: ReplicasPerGroup = None,
        recompute: bool = True,
        memory_limit: Optional[int] = None,
    ) -> "ModelOptions":
        """Check the arguments, with the error messages of law L17."""
        micro_batch_size = _check.micro_batch_size(micro_batch_size)
        micro_batch_tokens = _check.micro_batch_tokens(micro_batch_tokens, micro_batch_size, whole_batch or ())
        if whole_batch is not None or micro_batch_size is None:
            whole_batch = _check.whole_batch(() if whole_batch is None else whole_batch, micro_batch_size)
        sequence_lengths = _check.sequence_lengths(sequence_lengths, micro_batch_tokens)
        _check.replicas_per_group(replicas_per_group, whole_batch or ())
        recompute = _check.flag("recompute", recompute)
        memory_limit = _check.memory_limit(memory_limit, micro_batch_size)
        if accum_steps is _check.LEFT_OUT and (micro_batch_size, micro_batch_tokens) != (None, None):
            accum_steps = 1
        if accum_steps is _check.LEFT_OUT:
            _check.warn(
                "`accum_steps` was not given, so every batch makes a step and nothing accumulates: pass `accum_steps`, "
                "`micro_batch_size` or `micro_batch_tokens`. [accum: no-accumulation]",
            )
            accum_steps = 1
        agc_exclude = _check.names_or_function("agc_exclude", agc_exclude)
        arguments = {name: value for name, value in locals().items() if name != "cls"}
        if use_agc:
            transform = AdaptiveClipping(clip_factor, eps, exclude=agc_exclude, before=transform)
        options = {name: arguments[name] for name in ("accum_steps", "reduction", "nonfinite", "sparse")}
        options.update(transform=transform, accumulator_dtype=accumulator_dtype)
        check_options(**options)
        last_cycle = _check.one_of("last_cycle", last_cycle, LAST_CYCLE)
        if not callable(micro_batch_weight):
            micro_batch_weight = _check.one_of("micro_batch_weight", micro_batch_weight, WEIGHTS)
        if micro_batch_tokens is not None and micro_batch_weight == "equal" and reduction != "sum":
            raise ValueError(
                "`micro_batch_tokens` makes micro-batches of different sizes, and micro_batch_weight='equal' would "
                "count their means alike: leave `micro_batch_weight` out, pass a function that counts what the loss "
                "divides by, or pass `reduction='sum'` for a loss that is a sum. [accum: arguments]"
            )
        splits = (micro_batch_size, micro_batch_tokens) != (None, None)
        if (splits or micro_batch_weight != "equal") and _tf.graphs.in_static_graph():
            raise ValueError(
                "Keras in graph mode never calls `train_step`, which would split batches and weight micro-batches: "
                "compile a plain model with `GradientAccumulateOptimizer`, or pass `accum_steps` alone and "
                "micro_batch_weight='equal'. [accum: graph-mode]"
            )
        return cls(arguments, options, last_cycle, micro_batch_weight)

    @staticmethod
    def among(passed: Options, **others: object) -> Options:
        """Return the arguments for `of` among those of a function, and `others`."""
        return dict({name: value for name, value in passed.items() if name in ModelOptions.NAMES}, **others)

    @property
    def weighs_as_keras(self) -> bool:
        """Whether a micro-batch's weight is the number by which Keras' losses divide: without a mask, its examples."""
        return not callable(self._weight) and self._weight == "examples"

    def weight_of(self, data: Data) -> Optional[Scalar]:
        """Compute the weight of the data that a `train_step` receives: a scalar tensor, or None for 1."""
        if self._weight == "equal":
            return None
        if callable(self._weight):
            return self._weight(*_tf.losses.unpack_data(data))
        return _tf.losses.count_examples(data)

    def get_config(self) -> Config:
        """Return the arguments as JSON; a function that is not registered is left out, with a warning."""
        config = dict(self.arguments, accum_steps=_config.int_keys_to_config(self.arguments["accum_steps"]))
        if config["accumulator_dtype"] is not None:
            config["accumulator_dtype"] = tf.as_dtype(config["accumulator_dtype"]).name
        for name in FUNCTIONS:
            config[name] = _config.to_config(name, config[name])
        if config["micro_batch_weight"] is None:
            config["micro_batch_weight"] = "examples"
        return config

    @staticmethod
    def arguments_from(config: Config, custom_objects: CustomObjects = None) -> Options:
        """Read the arguments from a config that contains what `get_config` returned."""
        arguments = {name: config[name] for name in inspect.signature(ModelOptions.of).parameters if name in config}
        arguments["accum_steps"] = _config.int_keys_from_config(arguments["accum_steps"])
        for name in FUNCTIONS:
            arguments[name] = _config.from_config(name, arguments.get(name), custom_objects)
        return arguments


ModelOptions.NAMES = tuple(inspect.signature(ModelOptions.of).parameters)


# --------------------------------------------------------------------------------------------------------------------
# All that the model knows


class ModelAccumulation:
    """What a model accumulates by, and the state of its current step. It is the only attribute that a model gets.

    Args:
      options: `ModelOptions`.
      own_steps: {name of a step: the user's function for it}, as far as the user has set one on the instance.

    Attributes:
      steps: the `ModelSteps` that run for each batch.
      options: the same.
      own_steps: the same, and None for a step that is replaced on the instance and runs that of the class.
      is_exact_by_default: whether each step decides what is computed over the whole batch.
      whole_batch: tuple of what is: "batch_norm", "loss".
      replicas_per_group: {"batch_norm" or "loss": int or None}.
      recompute: bool.
      size: `SizeInUse`.
      noises: `RepeatableNoises`.
      weight: `WeightVariable`.
      largest_batch: `LargestBatch`.
      traces: `Traces`.
      optimizers: list of the model's optimizers, which accumulate or are in a `LossScaleOptimizer`; None before
        `compile`.
      wrapped: {id of an optimizer: (itself, the one around it)} since the last `compile`.
      seen: optimizers that a train step has called.
      called_by_functions: those that it has called in a `tf.function` of its own.
      calls: {number of a replica: what stands in for the calls of the model in the current step}.
      recorder: the `StepRecorder` of the current `fit`, or None.
      step_metrics: the `StepMetrics` of the current micro-batch, or None.
      trimmed: the `TrimmedTime` of the current micro-batch, or None.
      gate_variables: the `GateVariables` of "auto", or None.
      added_sums: the `AddedSums` of the current micro-batch, or None.
      probed: the variable that counts how often the model has been probed for whether it reads padding, or None.
      seeds: those of the layers of Keras 3, for checkpoints.
      start_of_seed: the seed of Keras 3 for what is drawn without one, when the cycle began; no checkpoint has it.
      is_state_watched: whether variables have been copied and compared since the last `compile`.
      batch_norms_in_training: names of the batch normalisation layers of Keras that a step has run in training.
      told_of_state: names of the variables that a warning has named since then.
      told_of_metrics: names of the metrics that a warning has named since then.
      compiles_micro_batches: whether XLA compiles each micro-batch, in place of the whole step.
      output_shapes: the shapes of the outputs for sequences of any length, if the model runs eagerly.
    """

    def __init__(self, options: ModelOptions, own_steps: Dict[str, Optional[Callable[[Data], Nested]]]) -> None:
        self.steps: Any = None
        self.options = options
        self.own_steps = own_steps
        requested = options.arguments["whole_batch"]
        self.is_exact_by_default = requested is None
        self.whole_batch: Tuple[str, ...] = requested or ()
        groups = options.arguments["replicas_per_group"]
        self.replicas_per_group = _check.replicas_per_group(groups, self.whole_batch)
        self.recompute: bool = options.arguments["recompute"]
        self.size = SizeInUse(
            options.arguments["micro_batch_size"],
            tokens=options.arguments["micro_batch_tokens"],
            memory_limit=options.arguments["memory_limit"],
        )
        self.noises = RepeatableNoises()
        self.weight = WeightVariable()
        self.largest_batch = LargestBatch()
        self.traces = Traces()
        self.optimizers: Optional[List[tf.keras.optimizers.Optimizer]] = None
        self.seen: List[tf.keras.optimizers.Optimizer] = []
        self.called_by_functions: List[tf.keras.optimizers.Optimizer] = []
        self.calls: Dict[int, "WholeBatchCalls"] = {}
        self.recorder: Optional["StepRecorder"] = None
        self.step_metrics: Optional["StepMetrics"] = None
        self.trimmed: Optional["TrimmedTime"] = None
        self.added_sums: Optional[AddedSums] = None
        self.probed: Optional[tf.Variable] = None
        self.start_of_seed: Optional[tf.Variable] = None
        self.seeds = _tf.tracking.Seeds()
        self.gate_variables: Optional["GateVariables"] = None
        self._told: Set[str] = set()
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what belongs to the last `compile`."""
        self.wrapped: Dict[int, Tuple[tf.keras.optimizers.Optimizer, tf.keras.optimizers.Optimizer]] = {}
        self.forget_traces()
        self.is_state_watched = False
        self.batch_norms_in_training: List[str] = []
        self.told_of_state: List[str] = []
        self.told_of_metrics: Set[str] = set()
        self.output_shapes: Optional[List[tf.TensorShape]] = None
        self.compiles_micro_batches = False

    def forget_traces(self) -> None:
        """Forget what is known of the calls of the model and of its steps."""
        self.traces.clear()
        self._sees_batch: Dict[Tuple[str, str], Optional[str]] = {}

    def decide(self, model: tf.keras.Model, name: str, data: Data, is_split: bool) -> None:
        """Decide what the next step computes over the whole batch, unless the user has.

        Args:
          model: the model.
          name: "train_step", "test_step" or "predict_step".
          data: the data of its batch.
          is_split: whether the batch is split, unlike under "auto" as long as it fits.
        """
        is_given_up = not self.whole_batch and not self.is_exact_by_default and is_split
        if not (self.is_exact_by_default or (is_given_up and name == "train_step")):
            return
        key = name, kind_of(model, data)
        if key not in self._sees_batch:
            step = self.steps.of_class_or_user(name)
            self._sees_batch[key] = what_sees_the_batch(model, name, step, data)
        what = self._sees_batch[key]
        if is_given_up:
            if what is not None and self.is_first_time("given up"):
                _check.warn(
                    "With `whole_batch=()`, what sees several examples at once sees a micro-batch, and it isn't proven "
                    f"that the step is that of the full batch: leave out `whole_batch`. Received: {what}."
                    " [accum: whole-batch-off]",
                    _check.InexactWarning,
                )
            return
        self.whole_batch = () if what is None else ("batch_norm",)
        group = None if _tf.batch_norm.batch_norms_over_replicas(model) else 1
        self.replicas_per_group = {"batch_norm": group, "loss": 1}

    def sees_batch_in_training(self, model: tf.keras.Model) -> bool:
        """Whether train steps compute something over the whole batch, as far as is known before the first batch."""
        if not self.is_exact_by_default:
            return bool(self.whole_batch)
        if not self.size.splits:
            return False
        step = self.steps.of_class_or_user("train_step")
        return what_is_known_to_see_it(model, "train_step", step) is not None

    def compile_micro_batches(self, model: tf.keras.Model, is_asked_for: bool) -> None:
        """Let XLA compile micro-batches by tokens instead of a step whose shapes depend on data, if it compiles any.

        Args:
          model: the model.
          is_asked_for: whether `jit_compile` is True, and not a default of Keras.
        """
        if self.size.tokens is not None and _tf.steps.is_compiled_by_xla(model):
            self.compiles_micro_batches = is_asked_for
            _tf.steps.compile_no_step(model, is_asked_for)

    def take_steps_of_loss_scales(self) -> bool:
        """Let optimizers have an `accum_steps` that was set on the `LossScaleOptimizer` around them, which ignores it.

        Returns:
          Whether there was one.
        """
        scaled = [optimizer for optimizer in self.optimizers or () if _tf.optimizers.is_loss_scale_optimizer(optimizer)]
        scaled = [optimizer for optimizer in scaled if "accum_steps" in vars(optimizer)]
        for optimizer in scaled:
            _tf.optimizers.without_loss_scale(optimizer).accum_steps = vars(optimizer).pop("accum_steps")
        return bool(scaled)

    def forget_calls_of(self, optimizers: Sequence[tf.keras.optimizers.Optimizer]) -> None:
        """Forget that train steps have called some optimizers."""
        self.seen = [optimizer for optimizer in self.seen if optimizer not in optimizers]
        self.called_by_functions = [optimizer for optimizer in self.called_by_functions if optimizer not in optimizers]

    def create_start_of_seed(self) -> None:
        """Create `start_of_seed`, if there is none."""
        if self.start_of_seed is None:
            with tf.init_scope():
                self.start_of_seed = _tf.variables.new_counter("start_of_seed", [2])

    def call_in_step(self) -> Optional["WholeBatchCalls"]:
        """Return what stands in for a call of the model on this replica, or None."""
        return self.calls.get(_replicas.replica_number()) if self.calls else None

    def replica_losses(self) -> Optional["ReplicaLosses"]:
        """Return what computes the losses of the current step over the outputs of several replicas, or None."""
        whole = self.call_in_step()
        return None if whole is None else whole.replica_losses

    def trimmed_time(self) -> Optional["TrimmedTime"]:
        """Return the time axis of the current micro-batch, or None if nothing is trimmed."""
        return self.trimmed

    def warn_if_none_was_split(self, strategy: tf.distribute.Strategy) -> None:
        """Warn if no batch has been larger than a micro-batch. Looks once, as a value from a device is waited for."""
        size = self.size.fixed
        if size is not None and self.is_first_time("the largest batch"):
            largest = self.largest_batch.value(strategy)
            if 0 < largest <= size:
                self.warn_of_one_part(f"micro_batch_size={size}, batches of at most {largest} examples")

    def warn_of_one_part(self, received: str) -> None:
        """Warn, once, that no batch is split."""
        if self.is_first_time("batches of one part"):
            _check.warn(
                "No batch is split, because none has more examples than a micro-batch: lower `micro_batch_size`, or "
                f"train on larger batches. Received: {received}. [accum: batch-sizes]"
            )

    def is_first_time(self, what: str) -> bool:
        """Whether this is the first call with `what`, for what is looked at or told once for each model."""
        is_first = what not in self._told
        self._told.add(what)
        return is_first


# --------------------------------------------------------------------------------------------------------------------
# Its optimizers


# Prefixes of internal attributes of Keras, TensorFlow and accum, which may refer to optimizers too.
_NOT_THE_USERS = ("_self_", "_unconditional_", "_obj_reference", "_accum", "_layers")


Replace = Callable[[tf.keras.optimizers.Optimizer], tf.keras.optimizers.Optimizer]


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
                "The model gets another optimizer in the middle of a cycle, whose gradients are lost: call `flush()` "
                "of the optimizer first, or compile with the optimizer that the model has (`model.optimizer`)."
                " [accum: unfinished-cycle]",
                _check.InexactWarning,
            )
        for optimizer in accumulating:
            internals_of(optimizer).show(self._model)
        self._own.forget_calls_of(gone)
        self._own.steps.replace()
        self._watch_losses()
        return before is not None and {id(optimizer) for optimizer in before} != {
            id(optimizer) for optimizer in optimizers
        }

    def accumulating(self, optimizer: tf.keras.optimizers.Optimizer) -> tf.keras.optimizers.Optimizer:
        """Return the accumulating optimizer around `optimizer`, one for each since the last `compile`."""
        wrapped = self._own.wrapped
        if isinstance(optimizer, str) or _tf.optimizers.is_config(optimizer):
            return self._newly_accumulating(optimizer)
        if id(optimizer) not in wrapped:
            wrapped[id(optimizer)] = optimizer, self._newly_accumulating(optimizer)
        return wrapped[id(optimizer)][1]

    def _newly_accumulating(self, optimizer: tf.keras.optimizers.Optimizer) -> tf.keras.optimizers.Optimizer:
        options = self._own.options.for_optimizers
        inner = _tf.optimizers.without_loss_scale(optimizer)
        if isinstance(inner, GradientAccumulateOptimizer):
            is_own = any(own is optimizer for own in self._own.optimizers or ())
            if is_own or internals_of(inner).accumulates_as(options):
                return optimizer
            optimizer = inner  # which the constructor below refuses
        if not _tf.optimizers.is_loss_scale_optimizer(optimizer):
            return GradientAccumulateOptimizer(optimizer, **options)
        if int(inner.iterations.numpy()) > 0:  # the outer `iterations` stay 0 up to Keras 3.8
            raise ValueError(
                "This LossScaleOptimizer has made steps and must be recreated to accumulate: compile with a new "
                "optimizer, or restore a checkpoint after `compile`. [accum: loss-scale]"
            )
        inner = _tf.optimizers.without_loss_scale_of_another(inner)
        return _tf.optimizers.loss_scale_around(GradientAccumulateOptimizer(inner, **options), like=optimizer)

    def _watch_losses(self) -> None:
        """Let the compiled losses report the number by which they divide."""
        container = getattr(self._model, _tf.losses.LOSS_CONTAINER, None)
        weighs, splits = self._own.options.weighs_as_keras, self._own.size.splits
        if container is None or isinstance(container, ReportingLoss):
            return
        if not (weighs or splits or _tf.losses.zero_if_all_are_ignored(container)):
            return
        report = self._own.weight.replace if weighs else None
        watched = ReportingLoss(
            container,
            report,
            self._own.replica_losses,
            functools.partial(_tf.steps.added_losses, self._model),
            lambda: self._own.added_sums,
            self._own.trimmed_time,
        )
        _tf.models.set_untracked(self._model, _tf.losses.LOSS_CONTAINER, watched)


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
