"""All that a `GradientAccumulateModel` knows about how it accumulates, in one object: `ModelAccumulation`."""

import weakref
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence, Set, Tuple, Union

from accum import _check, _tf
from accum._engine import _replicas
from accum._keras._model._options import ModelOptions
from accum._keras._model._size_in_use import LargestBatch, SizeInUse
from accum._keras._steps._one_pass import kind_of, what_is_known_to_see_it, what_sees_the_batch
from accum._keras._steps._whole_batch import Traces
from accum._tf import Data, Nested, Scalar, tf

if TYPE_CHECKING:
    from accum._keras._steps._update_gate import GateVariables


class WeightVariable:
    """Holds the weight of each replica's micro-batch, a float32 scalar.

    It is a variable because a `tf.function` in a train step, once traced, is called again for the next micro-batch.

    Attributes:
      variable: the variable, or None before there is a weight.
      was_replaced: whether a train step has ever replaced the weight that a micro-batch began with.
    """

    def __init__(self) -> None:
        self.was_replaced = False
        self.variable: Optional[tf.Variable] = None

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
        return self.variable

    def create(self) -> None:
        """Create the variable, if there is none."""
        if self.variable is None:
            with tf.init_scope():
                self.variable = _tf.variables.new_statistic("micro_batch_weight", [], tf.float32)

    def replace(self, weight: Scalar) -> None:
        """Replace the weight of the micro-batch, if it has one."""
        self.was_replaced = True
        if self.variable is not None:
            self._assign(weight)

    def _assign(self, weight: Scalar) -> None:
        _replicas.local_variable(self.variable).assign(tf.cast(weight, tf.float32))

    @staticmethod
    def read(variable: Union[Scalar, tf.Variable, None]) -> Optional[Scalar]:
        """Return the value of what `begin` returned."""
        return None if variable is None else _replicas.local_variable(variable).read_value()


class ModelAccumulation:
    """What a model accumulates by, as long as it lives. It is the only attribute that a model gets.

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
      weight: `WeightVariable`.
      largest_batch: `LargestBatch`.
      traces: `Traces`.
      first_model: a weak reference to the model from which `from_model` has made this one, or None.
      optimizers: list of the model's optimizers, which accumulate or are in a `LossScaleOptimizer`; None before
        `compile`.
      wrapped: {id of an optimizer: (itself, the one around it)} since the last `compile`.
      seen: optimizers that a train step has called.
      called_by_functions: those that it has called in a `tf.function` of its own.
      gate_variables: the `GateVariables` of "auto", or None.
      probed: the variable that counts the batches with padding since the last `compile`, as `probe` does, or None.
      seeds: those of the layers of Keras 3, for checkpoints.
      idle_steps: how many steps of a batch that is split made no step of a known optimizer, but drew; None if unknown.
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
        self.weight = WeightVariable()
        self.largest_batch = LargestBatch()
        self.traces = Traces()
        self.first_model: Optional["weakref.ref[tf.keras.Model]"] = None
        self.optimizers: Optional[List[tf.keras.optimizers.Optimizer]] = None
        self.seen: List[tf.keras.optimizers.Optimizer] = []
        self.called_by_functions: List[tf.keras.optimizers.Optimizer] = []
        self.start_of_seed: Optional[tf.Variable] = None
        self.idle_steps: Optional[tf.Variable] = None
        self.seeds = _tf.tracking.Seeds()
        self.gate_variables: Optional["GateVariables"] = None
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what belongs to the last `compile`."""
        self.wrapped: Dict[int, Tuple[tf.keras.optimizers.Optimizer, tf.keras.optimizers.Optimizer]] = {}
        self.traces.clear()
        self._sees_batch: Dict[Tuple[str, str], Optional[str]] = {}
        self.is_state_watched = False
        self.batch_norms_in_training: List[str] = []
        self.told_of_state: List[str] = []
        self.told_of_metrics: Set[str] = set()
        self._warned_of: Set[str] = set()
        self.probed: Optional[tf.Variable] = None
        self.output_shapes: Optional[List[tf.TensorShape]] = None
        self.compiles_micro_batches = False

    def forget_traces(self, step: str) -> None:
        """Forget what is known of a step, such as "train_step", and of the calls of the model within it."""
        self.traces.forget(step)
        self._sees_batch = {key: what for key, what in self._sees_batch.items() if key[0] != step}

    def decide(self, model: tf.keras.Model, name: str, data: Data, is_split: bool) -> None:
        """Decide what the next step computes over the whole batch, unless the user has.

        Args:
          model: the model.
          name: "train_step", "test_step" or "predict_step".
          data: the data of its batch.
          is_split: whether the batch is split, unlike under "auto" as long as it fits.
        """
        is_given_up = not self.whole_batch and not self.is_exact_by_default and is_split
        if self.traces.begins_anew(name):
            self.forget_traces(name)
        is_told = is_given_up and f"parts of a batch in {name}" in self._warned_of
        if not (self.is_exact_by_default or is_given_up) or is_told:
            return
        key = name, kind_of(model, data)
        may_change = self.is_exact_by_default and tf.executing_eagerly()  # Python code runs for each batch
        if key not in self._sees_batch or may_change:
            step = self.steps.of_class_or_user(name)
            self._sees_batch[key] = what_sees_the_batch(model, name, step, data)
        what = self._sees_batch[key]
        if is_given_up:
            self.warn_of_parts(name, what)
            return
        self.whole_batch = () if what is None else ("batch_norm",)
        group = None if _tf.batch_norm.batch_norms_over_replicas(model) else 1
        self.replicas_per_group = {"batch_norm": group, "loss": 1}

    def warn_of_parts(self, name: str, what: Optional[str]) -> None:
        """Warn once of what would see several examples of a batch and sees those of a micro-batch.

        Args:
          name: "train_step", "test_step" or "predict_step".
          what: it in words, or None for nothing.
        """
        if what is None or not self.is_first_time(f"parts of a batch in {name}"):
            return
        option = "whole_batch=()" if self.size.tokens is None else "micro_batch_tokens"
        _check.warn(
            f"With `{option}`, whatever sees several examples at once, and methods of your own, see those of a "
            f"micro-batch, so the {name.replace('_', ' ')} may differ from that of the full batch: "
            f"{self.to_see_whole_batches}. Received: {what}. [accum: whole-batch-off]",
            _check.InexactWarning,
        )

    @property
    def to_see_whole_batches(self) -> str:
        """What a user has to do so that the step runs once per batch, in words."""
        if self.size.tokens is not None:
            return "pass `micro_batch_size` in place of `micro_batch_tokens`"
        return "leave out `whole_batch`"

    def sees_batch_in_training(self, model: tf.keras.Model) -> bool:
        """Whether train steps compute something over the whole batch, as far as is known before the first batch."""
        if not self.is_exact_by_default:
            return bool(self.whole_batch)
        if self.size.requested is None:
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

    def create_variables(self) -> None:
        """Create what any step needs, in the scope of the model's strategy.

        Not in a trace: after one that creates variables and fails, a `tf.function` runs nothing and returns None.
        """
        self.weight.create()
        if self.size.fixed is not None:
            self.largest_batch.create()
        if self.idle_steps is None and self.size.splits:
            self.idle_steps = _tf.variables.new_counter("idle_steps")

    def create_start_of_seed(self) -> None:
        """Create `start_of_seed`, if there is none."""
        if self.start_of_seed is None:
            with tf.init_scope():
                self.start_of_seed = _tf.variables.new_counter("start_of_seed", [2])

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
                f"train on larger batches, or do without: `accum.unwrap(model)` returns a plain model. "
                f"Received: {received}. [accum: batch-sizes]"
            )

    def is_first_time(self, what: str) -> bool:
        """Whether this is the first call with `what`, for what is looked at or told once for each `compile`."""
        is_first = what not in self._warned_of
        self._warned_of.add(what)
        return is_first
