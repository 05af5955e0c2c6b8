"""The interface of an accumulating Keras optimizer for the rest of the package, hidden from users."""

import contextlib
from typing import TYPE_CHECKING, Any, Dict, Iterator, Optional, Set, Union

from accum._engine import _replicas
from accum._engine._cycle import Cycle, check_options
from accum._engine._listener import CycleListener
from accum._tf import Options, Scalar, tf

if TYPE_CHECKING:
    from accum._keras._logging._step_recorder import StepRecorder, UnfinishedRow
    from accum._keras._model._accumulation import ModelAccumulation
    from accum._keras._steps._optimizer_calls import TrainStep


class Internals:
    """The package-internal interface of one `GradientAccumulateOptimizer`, returned by `internals_of`.

    Args:
      optimizer: the `GradientAccumulateOptimizer`.
    """

    def __init__(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        self._optimizer = optimizer
        # Replica -> default weight of its current micro-batch:
        self._weights: Dict[int, Union[Scalar, tf.Variable, None]] = {}
        self._train_steps: Dict[int, Optional["TrainStep"]] = {}  # replica -> the `TrainStep` that it is in
        self._overlapping: Set[int] = set()  # replicas whose last gradients are still computed when the first are given
        self.recorder: Optional["StepRecorder"] = None  # the `StepRecorder` of a `StepLogger`, or None
        # What the recorder before it has left of the present cycle:
        self.unfinished_row: Optional["UnfinishedRow"] = None

    @property
    def cycle(self) -> Cycle:
        """The engine's `Cycle`."""
        return self._optimizer._cycle

    @property
    def is_passthrough(self) -> bool:
        """Whether `accum_steps` is 1 throughout, so that the inner optimizer works alone."""
        return self.cycle.is_passthrough

    def accumulates_as(self, options: Options) -> bool:
        """Whether an optimizer constructed with `options` would accumulate like this one."""
        plan = check_options(**options)
        dtype = options["accumulator_dtype"]
        return plan == self.cycle.plan and (None if dtype is None else tf.as_dtype(dtype)) == self.cycle.dtype

    def add_listener(self, listener: CycleListener) -> None:
        """Notify `listener` of the events of this optimizer's cycle from now on."""
        if not any(registered is listener for registered in self.cycle.listeners):
            self.cycle.listeners.append(listener)

    def show(self, model: tf.keras.Model) -> None:
        """Tell the `transform` about the layers of `model`, if it has a `watch` method."""
        if hasattr(self.cycle.transform, "watch"):
            self.cycle.transform.watch(model)

    def expect(self, model: tf.keras.Model) -> None:
        """Allow the next micro step to bring a different list of variables: those that `model` trains now."""
        if self.cycle.is_built:
            self.cycle.announce(model.trainable_variables)

    # ------------------------------------------------------------------------------------------------------------
    # Within a micro step

    @property
    def weight(self) -> Optional[Scalar]:
        """The default weight of this replica's current micro-batch, a scalar, or None."""
        weight = self._weights.get(_replicas.replica_number())
        return _replicas.local_variable(weight).read_value() if isinstance(weight, tf.Variable) else weight

    @contextlib.contextmanager
    def weighing(self, weight: Union[Scalar, tf.Variable, None]) -> Iterator[None]:
        """Set the default `weight` of this replica's micro steps in this context.

        Args:
          weight: scalar, or a variable that each micro step reads; None leaves the default unchanged.
        """
        replica = _replicas.replica_number()
        before = self._weights.get(replica)
        self._weights[replica] = before if weight is None else weight
        try:
            yield
        finally:
            self._weights[replica] = before

    @property
    def overlaps(self) -> bool:
        """Whether gradients may be summed over workers while others are still computed."""
        return _replicas.replica_number() in self._overlapping

    @contextlib.contextmanager
    def overlapping(self) -> Iterator[None]:
        """Let this replica's micro steps in this context sum gradients as they are computed."""
        self._overlapping.add(_replicas.replica_number())
        try:
            yield
        finally:
            self._overlapping.discard(_replicas.replica_number())

    @contextlib.contextmanager
    def within(self, train_step: "TrainStep") -> Iterator[None]:
        """Report the micro steps that this replica makes in this context to `train_step`."""
        replica = _replicas.replica_number()
        before = self._train_steps.get(replica)
        self._train_steps[replica] = train_step
        try:
            yield
        finally:
            self._train_steps[replica] = before

    @property
    def train_step(self) -> Any:
        """The `TrainStep` that this replica is in, or None."""
        return self._train_steps.get(_replicas.replica_number())


def is_accumulating(optimizer: tf.keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer is a `GradientAccumulateOptimizer`."""
    return "_internals" in vars(optimizer)


def internals_of(optimizer: tf.keras.optimizers.Optimizer) -> Internals:
    """The `Internals` of a `GradientAccumulateOptimizer`."""
    return optimizer._internals


def accumulation_of(model: tf.keras.Model) -> Optional["ModelAccumulation"]:
    """Return the `ModelAccumulation` of a model; None for any other model, or one that is still being constructed."""
    return model.__dict__.get("_accum")
