"""All that a `GradientAccumulateModel` knows about how it accumulates, in one object."""

from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

from accum import _check, _tf
from accum._engine import _replicas
from accum._keras._model._micro_batch_size import SizeInUse
from accum._keras._model._options import ModelOptions
from accum._keras._model._weight_of_micro_batch import WeightVariable
from accum._keras._steps._repeatable_noise import RepeatableNoises
from accum._keras._steps._traced_model_call import Traces
from accum._tf import Data, Nested, tf

if TYPE_CHECKING:
    from accum._keras._logging._step_recorder import StepRecorder
    from accum._keras._steps._losses_over_replicas import ReplicaLosses
    from accum._keras._steps._metric_results import StepMetrics
    from accum._keras._steps._trimmed_time import TrimmedTime
    from accum._keras._steps._whole_batch_call import WholeBatchCall


class ModelAccumulation:
    """What a model accumulates by, and the state of its current step. It is the only attribute that a model gets.

    Args:
      options: `ModelOptions`.
      own_steps: {name of a step: the user's function for it}, as far as the user has set one on the instance.

    Attributes:
      steps: the `ModelSteps` that run for each batch.
      options: the same.
      own_steps: the same, and None for a step that is replaced on the instance and runs that of the class.
      whole_batch: tuple of what is computed over the whole batch: "batch_norm", "loss".
      replicas_per_group: {"batch_norm" or "loss": int or None}.
      recompute: bool.
      size: `SizeInUse`.
      noises: `RepeatableNoises`.
      weight: `WeightVariable`.
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
      probed: the variable that counts how often the model has been probed for whether it reads padding, or None.
      start_of_seed: the seed of Keras 3 for what is drawn without one, when the cycle began; no checkpoint has it.
      is_state_watched: whether variables have been copied and compared since the last `compile`.
      told_of_state: names of variables of which a warning has told since then.
      told_of_metrics: names of metrics of which one has.
      output_shapes: the shapes of the outputs for sequences of any length, if the model runs eagerly.
    """

    def __init__(self, options: ModelOptions, own_steps: Dict[str, Optional[Callable[[Data], Nested]]]) -> None:
        self.steps: Any = None
        self.options = options
        self.own_steps = own_steps
        self.whole_batch: Tuple[str, ...] = options.arguments["whole_batch"]
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
        self.traces = Traces()
        self.optimizers: Optional[List[tf.keras.optimizers.Optimizer]] = None
        self.seen: List[tf.keras.optimizers.Optimizer] = []
        self.called_by_functions: List[tf.keras.optimizers.Optimizer] = []
        self.calls: Dict[int, "WholeBatchCall"] = {}
        self.recorder: Optional["StepRecorder"] = None
        self.step_metrics: Optional["StepMetrics"] = None
        self.trimmed: Optional["TrimmedTime"] = None
        self.probed: Optional[tf.Variable] = None
        self.start_of_seed: Optional[tf.Variable] = None
        self._told: Set[str] = set()
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what belongs to the last `compile`."""
        self.wrapped: Dict[int, Tuple[tf.keras.optimizers.Optimizer, tf.keras.optimizers.Optimizer]] = {}
        self.traces.clear()
        self.is_state_watched = False
        self.told_of_state: List[str] = []
        self.told_of_metrics: Set[str] = set()
        self.output_shapes: Optional[List[tf.TensorShape]] = None

    def forget_calls_of(self, optimizers: Sequence[tf.keras.optimizers.Optimizer]) -> None:
        """Forget that train steps have called some optimizers."""
        self.seen = [optimizer for optimizer in self.seen if optimizer not in optimizers]
        self.called_by_functions = [known for known in self.called_by_functions if known not in optimizers]

    def create_start_of_seed(self) -> None:
        """Create `start_of_seed`, if there is none."""
        if self.start_of_seed is None:
            with tf.init_scope():
                self.start_of_seed = _tf.variables.new_counter("start_of_seed", [2])

    def call_in_step(self) -> Optional["WholeBatchCall"]:
        """Return what stands in for a call of the model on this replica, or None."""
        return self.calls.get(_replicas.replica_number()) if self.calls else None

    def replica_losses(self) -> Optional["ReplicaLosses"]:
        """Return what computes the losses of the current step over the outputs of several replicas, or None."""
        whole = self.call_in_step()
        return None if whole is None else whole.replica_losses

    def trimmed_time(self) -> Optional["TrimmedTime"]:
        """Return the time axis of the current micro-batch, or None if nothing is trimmed."""
        return self.trimmed

    def is_first_time(self, what: str) -> bool:
        """Whether this is the first call with `what`, for what is looked at or told once for each model."""
        is_first = what not in self._told
        self._told.add(what)
        return is_first
