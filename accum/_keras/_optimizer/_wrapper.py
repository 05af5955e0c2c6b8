"""The Keras API: an optimizer that wraps another one, for `compile`, custom loops and `strategy.run`.

`Internals` are what the rest of the package sees of it, hidden from users. `KerasAdapter` is how the engine uses the
optimizer that is wrapped.
"""

import contextlib
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple, Union

import numpy as np

from accum import _check, _config, _tf
from accum._clipping._transform import act_alike
from accum._engine import _replicas
from accum._engine._cycle import Cycle, check_options
from accum._engine._cycle_state import make_plan
from accum._engine._interfaces import CycleListener, OptimizerAdapter
from accum._keras._optimizer._families import concrete_class
from accum._tf import Gradient, GradsAndVars, Options, Scalar, Transform, Wait, tf
from accum._tf.types import (
    AccumSteps,
    Config,
    CustomObjects,
    Dtype,
    LearningRate,
    LossOrFunction,
    Nonfinite,
    Reduction,
    Sparse,
    VariablesOrFunction,
)

if TYPE_CHECKING:
    from accum._keras._logging._step_recorder import StepRecorder, UnfinishedRow
    from accum._keras._model._options_and_state import ModelAccumulation
    from accum._keras._steps._gradients_and_warnings import TrainStep


# --------------------------------------------------------------------------------------------------------------------
# Internals of an optimizer and of a model


class Internals:
    """The package-internal interface of one `GradientAccumulateOptimizer`, returned by `internals_of`.

    Args:
      optimizer: the `GradientAccumulateOptimizer`.
    """

    def __init__(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        self._optimizer = optimizer
        # Replica -> default weight of its current micro-batch, and whether it is the user's own:
        self._weights: Dict[int, Tuple[Union[Scalar, tf.Variable, None], bool, bool]] = {}
        self._train_steps: Dict[int, Optional["TrainStep"]] = {}  # replica -> the `TrainStep` that it is in
        self.looks_for_batch_norms = True  # until a warning has named some; a model that accumulates looks itself
        self.looks_for_changes = True  # of gradients, until a warning has named some
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

    @property
    def may_take_several(self) -> bool:
        """Whether a step may be made of several micro steps, now or after a change of `accum_steps`."""
        return self.cycle.is_settable or not self.cycle.plan.is_passthrough

    def accumulates_as(self, options: Options) -> bool:
        """Whether this optimizer accumulates as one constructed with `options`; it may have a `transform` besides."""
        plan, transform, dtype = check_options(**options), options["transform"], options["accumulator_dtype"]
        has_dtype = (None if dtype is None else tf.as_dtype(dtype)) == self.cycle.dtype
        has_transform = transform is None or act_alike(transform, self.cycle.transform)
        return plan == self.cycle.plan and has_dtype and has_transform

    def variables(self) -> List[tf.Variable]:
        """Return what the step of this optimizer changes beside weights, and its sums of gradients."""
        sums = [accumulator.total for accumulator in self.cycle.accumulators()]
        return _tf.inner_optimizer.variables_of(self._optimizer.optimizer) + sums

    def add_listener(self, listener: CycleListener) -> None:
        """Notify `listener` of the events of this optimizer's cycle from now on."""
        if not any(registered is listener for registered in self.cycle.listeners):
            self.cycle.listeners.append(listener)

    def show(self, model: tf.keras.Model) -> None:
        """Tell the `transform` about the layers of `model`, if it has a `watch` method."""
        self.looks_for_batch_norms = False
        if hasattr(self.cycle.transform, "watch"):
            self.cycle.transform.watch(model)

    def warn_of_batch_norms(self) -> None:
        """Warn once of batch normalisation that trains in the current graph."""
        if not self.looks_for_batch_norms or tf.executing_eagerly() or not self.may_take_several:
            return
        moved = _tf.op_walks.assigned_variables(tf.compat.v1.get_default_graph())
        names = [var.name.split(":")[0] for var in moved]
        names = sorted(name for name in names if name.split("/")[-1] == "moving_mean")
        self.looks_for_batch_norms = not names
        if names:
            _check.warn(
                "Batch normalization updates its moving statistics for every micro-batch, and normalises by it alone, "
                "unlike at the full batch. An optimizer can't change that: train on full batches, with "
                "`accum.GradientAccumulateModel.from_model(model, micro_batch_size=…, whole_batch='batch_norm')`, or "
                "in a loop of your own with `accum.value_and_gradients` and the same `whole_batch`. "
                "`accum.replace_batchnorm_layers` makes the moving statistics alone those of the full batch. "
                f"Received: {_check.shown(names)}. [accum: batch-norm]",
                _check.InexactWarning,
            )

    def warn_of_changed_gradients(self, grads: Sequence[Gradient]) -> None:
        """Warn once of what the current graph does to gradients that has to be done to those of the full batch."""
        if not self.looks_for_changes or tf.executing_eagerly() or self.is_passthrough:
            return
        changes = _tf.gradient_changes
        found = changes.nonlinear_changes(grads, changes.is_of_tape)
        self.looks_for_changes = not found
        if found:
            _check.warn(
                "The gradients of each micro-batch are changed after they are computed and before the accumulating "
                "optimizer receives them. What is not linear, such as clipping, acts on the mean gradient in a full "
                "batch: let the inner optimizer clip, by `clipnorm`, `clipvalue` or `global_clipnorm`, or pass it as "
                "`transform=`; or pass `micro_batch_size` instead of `accum_steps` to a `GradientAccumulateModel`, "
                "whose train step then runs once for the full batch. Received: operations of type "
                f"{sorted({op.type for op in found})}, such as {found[-1].name!r}. [accum: clipping]",
                _check.InexactWarning,
            )

    def expect(self, model: tf.keras.Model) -> None:
        """Allow the next micro step to bring a different list of variables: those that `model` trains now."""
        if self.cycle.is_built:
            self.cycle.announce(model.trainable_variables)

    # ------------------------------------------------------------------------------------------------------------
    # Within a micro step

    @property
    def weight(self) -> Optional[Scalar]:
        """The default weight of this replica's current micro-batch, a scalar, or None."""
        weight, _, was_eager = self._current_weight
        is_known = isinstance(weight, (np.ndarray, np.generic)) or (tf.is_tensor(weight) and hasattr(weight, "numpy"))
        if was_eager and is_known and not isinstance(weight, tf.Variable) and not tf.executing_eagerly():
            raise ValueError(
                "`weighing` has a value from outside of the `tf.function` that takes the gradients, which would keep "
                "the weight of its first call: enter `weighing` in the function, pass `weight=` to `apply_gradients`, "
                f"or weigh by a `tf.Variable`. Received: {weight!r}. [accum: traced-weight]"
            )
        return _replicas.local_variable(weight).read_value() if isinstance(weight, tf.Variable) else weight

    @property
    def has_own_weight(self) -> bool:
        """Whether the user has set the default weight of this replica's current micro-batch."""
        _, is_own, _ = self._current_weight
        return is_own

    @property
    def _current_weight(self) -> Tuple[Union[Scalar, tf.Variable, None], bool, bool]:
        """(The default weight, whether the user has set it, whether eagerly)."""
        return self._weights.get(_replicas.replica_number(), (None, False, False))

    @contextlib.contextmanager
    def weighing(self, weight: Union[Scalar, tf.Variable, None], is_own: bool = False) -> Iterator[None]:
        """Set the default `weight` of this replica's micro steps in this context.

        Args:
          weight: scalar, or a variable that each micro step reads; None leaves the default unchanged.
          is_own: whether the user sets it, and not a model.
        """
        replica = _replicas.replica_number()
        before = self._current_weight
        self._weights[replica] = before if weight is None else (weight, is_own, is_own and tf.executing_eagerly())
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


# --------------------------------------------------------------------------------------------------------------------
# The engine's adapter


class KerasAdapter(OptimizerAdapter):
    """Lets the engine use a Keras optimizer.

    Args:
      wrapper: the `GradientAccumulateOptimizer`.
      name: prefix of the names of variables.
    """

    def __init__(self, wrapper: tf.keras.optimizers.Optimizer, name: str) -> None:
        self.name = name
        self._wrapper = wrapper
        self._keras_variables: Dict[int, tf.Variable] = {}  # variable key -> the `keras.Variable` around it, in Keras 3

    def scalar(self, name: str, initial_value: tf.Tensor, per_replica: bool = False) -> tf.Variable:
        name = f"{self.name}/{name}"
        with _tf.variables.on_host() if initial_value.dtype in (tf.int64, tf.bool) else contextlib.ExitStack():
            return _tf.variables.new_keras_variable(self._wrapper, name, initial_value, per_replica)

    def buffer(self, var: tf.Variable, name: str, shape: tf.TensorShape, dtype: tf.DType) -> tf.Variable:
        name = f"{var.name.split(':')[0]}/{self.name}/{name}"
        with tf.distribute.get_strategy().extended.colocate_vars_with(var):
            return _tf.variables.new_keras_variable(self._wrapper, name, tf.zeros(shape, dtype), per_replica=True)

    def check(self, variables: Sequence[tf.Variable]) -> None:
        overwritten = [var.name for var in variables if _tf.variables.is_overwritten(self._as_given(var))]
        if overwritten:
            raise ValueError(
                "A variable that is overwritten with its gradient, such as a float8 scale, has no mean over "
                f"micro-batches, so it can't be trained with accumulation. Received: {overwritten}. [accum: gradients]"
            )
        refused = _tf.inner_optimizer.refused_by_inner(self._wrapper.optimizer, variables)
        if refused:
            raise ValueError(
                "The inner optimizer has been built for a list of variables, to which no others can be added: call "
                "`build` with all variables first, or create a new optimizer. Received: "
                f"{[var.name for var in refused]}. [accum: variable-list]"
            )

    def unwrapped(
        self, grads_and_vars: Iterable[Tuple[Optional[Gradient], tf.Variable]]
    ) -> List[Tuple[Optional[Gradient], tf.Variable]]:
        """Convert the user's pairs to a list of (gradient, `tf.Variable`), which the engine needs."""
        listed = list(grads_and_vars)
        if not _tf.version.WRAPS_VARIABLES or any(
            not isinstance(pair, (tuple, list)) or len(pair) != 2 for pair in listed
        ):
            return listed  # anything that is not a pair raises an error later, in `_check.pairs`
        self._keras_variables.update((_tf.variables.key_of(var), var) for _, var in listed)
        return [(grad, _tf.variables.native(var)) for grad, var in listed]

    def wrapped(
        self, grads_and_vars: Iterable[Tuple[Optional[Gradient], tf.Variable]]
    ) -> List[Tuple[Optional[Gradient], tf.Variable]]:
        """Convert the engine's pairs back, to pairs with the variables that the user passed."""
        return [(grad, self._as_given(var)) for grad, var in grads_and_vars]

    def _as_given(self, var: tf.Variable) -> tf.Variable:
        return self._keras_variables.get(_tf.variables.key_of(var), var) if _tf.version.WRAPS_VARIABLES else var

    def prepare(self, variables: Sequence[tf.Variable], used: Sequence[tf.Variable] = ()) -> None:
        variables, used = ([self._as_given(var) for var in group] for group in (variables, used))
        _tf.inner_optimizer.prepare(self._wrapper.optimizer, variables, used)

    def takes_some_variables(self) -> bool:
        return _tf.inner_optimizer.takes_some_variables(self._wrapper.optimizer)

    def make_step(
        self, grads_and_vars: GradsAndVars, transform: Optional[Transform], replicas: int
    ) -> Optional[tf.Operation]:
        pairs = self.wrapped(grads_and_vars)
        if transform is not None:
            pairs = list(transform(pairs))
            _check.pairs(self.unwrapped(pairs))
        recorder = internals_of(self._wrapper).recorder
        recorded = [] if recorder is None else recorder.on_step(grads_and_vars)
        with tf.control_dependencies(recorded), _tf.inner_optimizer.without_sum_of_one(self._wrapper.optimizer):
            return _tf.inner_optimizer.awaited(_tf.inner_optimizer.apply(self._wrapper.optimizer, pairs, replicas))

    def steps(self) -> tf.Tensor:
        return _tf.variables.native(self._wrapper.iterations)


# --------------------------------------------------------------------------------------------------------------------
# The optimizer


class GradientAccumulateOptimizer:
    """Accumulate the gradients of `accum_steps` micro-batches, then make one step of `optimizer`.

    The step is the one that the full batch would have made:

        mean:  optimizer.apply(sum_i(w_i g_i) / sum_i(w_i)),   i = 1 … accum_steps

    The inner optimizer does not run before the last micro step: until then, weights, slots, `iterations`, learning
    rate schedules and weight decay do not change. The object belongs to the same family of optimizers as the inner one
    (`tf.keras.optimizers.Optimizer`, or `tf.keras.optimizers.legacy.Optimizer` since TF 2.11), so `compile` and
    `LossScaleOptimizer` accept it.

    Args:
      optimizer: a Keras optimizer, its name or its config.
      accum_steps: micro steps per step, >= 1; or a schedule `{first step: accum_steps}` that includes step 0, such as
        `{0: 8, 1000: 2}`. With the plain int 1 it behaves like `optimizer` alone.
      reduction: "mean", "sum" or "running_mean" (which never holds a sum, for low precision); case-insensitive.
      name: name of the optimizer, also part of the names of its variables.
      transform: function `grads_and_vars -> grads_and_vars`, called once per cycle with the accumulated gradients.
      nonfinite: how a NaN or Inf in a gradient is handled. "propagate": as in a full batch. "skip_micro": leave out
        this micro-batch and take one more. "skip_cycle": finish the cycle without a step.
      accumulator_dtype: dtype of the accumulators. None: the dtype of the variable, but float32 for a 16-bit variable.
      sparse: how `tf.IndexedSlices` reach the inner optimizer. "rows": as the union of the cycle's rows. "dense": as a
        dense gradient.

    Raises:
      TypeError, ValueError: an argument does not match its description above.

    Example:
      >>> optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.Adam(1e-3), accum_steps=4)
      >>> model.compile(optimizer, loss="mse")
      >>> model.fit(x, y, batch_size=8, callbacks=[accum.FlushCallback()])  # steps as with batch_size=32
    """

    _inner: tf.keras.optimizers.Optimizer
    _adapter: KerasAdapter
    _cycle: Cycle
    _internals: Any
    _returned: Callable[[Optional[tf.Operation]], Wait]
    _takes_back: Callable[[], bool]
    _handed_back: Set[int]
    _has_run: bool

    def __new__(
        cls, optimizer: tf.keras.optimizers.Optimizer = "SGD", *args: object, **kwargs: object
    ) -> "GradientAccumulateOptimizer":
        """Create an instance that is also a Keras optimizer of the same family as `optimizer`."""
        _check.arguments_of(cls, kwargs)
        inner = _resolve(optimizer)
        base = _tf.optimizers.NewOptimizer if _tf.optimizers.is_new_optimizer(inner) else _tf.optimizers.LegacyOptimizer
        made: tf.keras.optimizers.Optimizer = object.__new__(concrete_class(cls, base))
        made.__dict__["_resolved"] = inner
        return made

    def __init__(
        self,
        optimizer: tf.keras.optimizers.Optimizer = "SGD",
        accum_steps: AccumSteps = _check.LEFT_OUT,
        reduction: Reduction = "mean",
        name: str = "GradientAccumulateOptimizer",
        *,
        transform: Optional[Transform] = None,
        nonfinite: Nonfinite = "propagate",
        accumulator_dtype: Optional[Dtype] = None,
        sparse: Sparse = "rows",
    ) -> None:
        if accum_steps is _check.LEFT_OUT:
            _check.warn(
                "`accum_steps` was not given, so each micro-batch makes a step: pass it, or 1 if that is meant."
                " [accum: no-accumulation]"
            )
            accum_steps = 1
        plan = check_options(accum_steps, reduction, transform, nonfinite, accumulator_dtype, sparse)
        self.__dict__["_inner"] = inner = self.__dict__.pop("_resolved")
        if transform is not None and getattr(inner, "loss_scale_factor", None) is not None:
            raise ValueError(
                "With `loss_scale_factor`, only the inner optimizer sees unscaled gradients; a `transform` does "
                "not: use a LossScaleOptimizer around this optimizer. Received: "
                f"loss_scale_factor={inner.loss_scale_factor!r}. [accum: loss-scale]"
            )
        _tf.tracking.stop_automatic_tracking(self)
        _tf.tracking.begin_as_optimizer(self, super().__init__, name)
        self.__dict__["_adapter"] = adapter = KerasAdapter(self, name)
        self._use_cycle(Cycle(plan, adapter, transform, accumulator_dtype, not plan.is_passthrough))
        self.__dict__["_internals"] = Internals(self)
        self.__dict__["_handed_back"] = set()  # replicas whose gradients a LossScaleOptimizer assumes reduced
        self.__dict__["_has_run"] = False
        self.__dict__["_is_ready"] = True

    def _use_cycle(self, cycle: Cycle) -> None:
        self.__dict__["_cycle"] = cycle
        if not cycle.is_passthrough:
            _tf.tracking.track(self, cycle.state, "accumulation")

    # ------------------------------------------------------------------------------------------------------------
    # Micro steps

    @_tf.graphs.untouched_by_autograph
    def apply_gradients(
        self,
        grads_and_vars: Iterable[Tuple[Optional[Gradient], tf.Variable]],
        name: Optional[str] = None,
        skip_gradients_aggregation: bool = False,
        *,
        weight: Optional[Scalar] = None,
        experimental_aggregate_gradients: bool = True,
    ) -> Wait:
        """Accumulate the gradients of one micro-batch; on the last micro-batch of a cycle, make the step.

        Args:
          grads_and_vars: list of (gradient, variable). A gradient is a tensor of its variable's shape,
            `tf.IndexedSlices` or None. Under a strategy: the gradients of this replica's loss, scaled by 1 / replicas
            as Keras does.
          name: ignored; accepted for compatibility with Keras.
          skip_gradients_aggregation: whether the gradients are already summed over replicas (Keras >= 2.11).
          weight: scalar >= 0, the weight of this micro-batch in the mean, such as its number of examples; under a
            strategy, the weight of this replica's part. None: 1, for all replicas together.
          experimental_aggregate_gradients: False is equivalent to `skip_gradients_aggregation=True`.

        Returns:
          The same as the inner optimizer: since TF 2.11 the number of steps, an int64 scalar (in Keras 3, the
          variable itself); for a legacy optimizer an op, or None in eager execution.

        Raises:
          ValueError: there is no gradient at all, a gradient has the wrong shape, the weight is negative, the
            variables change within a cycle, or this is the second call in one train step of a
            `GradientAccumulateModel`.
        """
        del name
        user_pairs = list(grads_and_vars)
        listed = self._adapter.unwrapped(user_pairs)
        train_step = self._internals.train_step
        is_reduced = skip_gradients_aggregation or not experimental_aggregate_gradients
        if train_step is None:
            self._internals.warn_of_batch_norms()
            _tf.watching.tell_watcher(self)  # the train step of a model that does not know this optimizer
            return self._micro_step(listed, weight, is_reduced)
        with train_step.calling(self, listed):
            if train_step.collector is not None:
                options = {"skip_gradients_aggregation": is_reduced}
                train_step.collector.take(
                    self, user_pairs, weight, lambda pairs, *own: self._apply_collected(pairs, *own, **options)
                )
                return self._returned(None)
            if not listed:  # Keras also trains models without trainable weights
                return self._returned(None)
            if weight is None and not is_reduced:
                listed = train_step.weighted(self, listed)
            return self._micro_step(train_step.released(listed), weight, is_reduced)

    def _micro_step(
        self, listed: List[Tuple[Optional[Gradient], tf.Variable]], weight: Optional[Scalar], is_reduced: bool
    ) -> Wait:
        weight = self._internals.weight if weight is None else weight
        is_reduced = is_reduced and not self._takes_back()
        self.__dict__["_has_run"] = True
        listed = _check.pairs(listed)

        def record() -> None:
            if self._internals.recorder is not None:
                self._internals.recorder.take([grad for grad, _ in listed], weight, is_reduced)

        if self._cycle.is_passthrough and weight is None and not self._cycle.is_built:
            record()
            return self._apply_passthrough(listed, is_reduced)
        self._internals.warn_of_changed_gradients([grad for grad, _ in listed if grad is not None])
        return self._returned(self._cycle.micro_step(listed, weight, is_reduced, record))

    def _apply_collected(self, grads_and_vars: GradsAndVars, weight: Optional[Scalar] = None, **options: Any) -> None:
        return self.apply_gradients(grads_and_vars, weight=weight, **options)

    def minimize(
        self,
        loss: LossOrFunction,
        var_list: VariablesOrFunction,
        *args: object,
        weight: Optional[Scalar] = None,
        **kwargs: object,
    ) -> Wait:
        """Compute the gradients of `loss` and accumulate them, as `apply_gradients` does.

        Args:
          loss: a function without arguments; or a tensor, together with `tape=`.
          var_list: list of variables, or a function that returns one.
          *args: as for the inner optimizer's `minimize`.
          weight: as for `apply_gradients`.
          **kwargs: as for the inner optimizer's `minimize`.
        """
        with self.weighing(weight):
            return super().minimize(loss, var_list, *args, **kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def weighing(self, weight: Optional[Scalar]) -> Iterator[None]:
        """Set the default `weight` for calls of `apply_gradients` inside this context, on this replica.

        Args:
          weight: as for `apply_gradients`; None leaves the default unchanged. Around a `tf.function`, pass a
            `tf.Variable`: the function would keep the number of its first call.

        Raises:
          ValueError: a `tf.function` in this context would keep the value of a tensor or array, as said above.
        """
        with self._internals.weighing(weight, is_own=True):
            yield

    def flush(self) -> Wait:
        """Make the step of an unfinished cycle from the micro-batches so far.

        Returns:
          An op, or None.
        """
        return self._between_replicas(self._cycle.apply)

    def reset(self) -> Wait:
        """Discard an unfinished cycle.

        Returns:
          An op, or None.
        """
        return self._between_replicas(self._cycle.zero)

    def build(self, var_list: Iterable[tf.Variable]) -> None:
        """Create the inner optimizer's variables for `var_list`, and accumulate for these variables from now on.

        Args:
          var_list: list of trainable variables.

        Raises:
          ValueError: a cycle with other variables is unfinished; or the inner optimizer comes from Keras 2.11 or later
            and was built without some of these variables.
        """
        if not self._cycle.is_passthrough:
            self._adapter.check(list(var_list))
        self._cycle.announce(list(var_list))
        with tf.init_scope():
            _tf.inner_optimizer.build(self._inner, list(var_list))

    def _between_replicas(self, function: Callable[[], tf.Operation]) -> Wait:
        if not self._cycle.is_built:
            if not tf.executing_eagerly() and not self._cycle.is_passthrough:
                raise ValueError(
                    "`flush` and `reset` can't be traced before the first micro step has been traced."
                    " [accum: unfinished-cycle]"
                )
            if _tf.tracking.awaited_names(self._cycle.state):
                _check.warn(
                    "Nothing was flushed or reset: a restored cycle is known only after its next micro-batch."
                    " [accum: restored-cycle]",
                )
            return None
        with contextlib.ExitStack() as stack:
            if self._cycle.strategy and not tf.distribute.has_strategy():
                stack.enter_context(self._cycle.strategy.scope())
            result = function()
        if self._internals.recorder is not None:
            self._internals.recorder.end_cycle()
        self._internals.unfinished_row = None
        return result

    def _apply_passthrough(self, grads_and_vars: GradsAndVars, is_reduced: bool) -> Wait:
        with tf.init_scope():
            self._adapter.prepare([var for _, var in grads_and_vars])
        listed = [(grad, var) for grad, var in grads_and_vars if grad is not None]
        if self._internals.recorder is not None:
            listed, is_reduced = self._internals.recorder.on_passthrough_step(listed, is_reduced)
        if self._internals.overlaps and not is_reduced and _tf.inner_optimizer.sums_before_all_else(self._inner):
            listed, is_reduced = _replicas.sum_gradients(listed), True
        replicas = tf.distribute.get_strategy().num_replicas_in_sync if is_reduced else 1
        # Where a dataset of unknown length ends, Keras' train function runs once more. Without this, the step counter,
        # weight decay and averages of the optimizer would move then. The last variable has its gradient first, and
        # workers may sum the gradients one after the other.
        awaited = [grad for grad, _ in listed] if _replicas.overlap() else [listed[-1][0]]
        with tf.control_dependencies(_tf.graphs.waits_for_all(awaited)):
            # Keras warns of variables without a gradient, so it has to be given them.
            listed += [(grad, var) for grad, var in grads_and_vars if grad is None]
            return _tf.inner_optimizer.apply(self._inner, self._adapter.wrapped(listed), replicas)

    # ------------------------------------------------------------------------------------------------------------
    # What can be seen

    @property
    def optimizer(self) -> tf.keras.optimizers.Optimizer:
        """The inner optimizer."""
        return self._inner

    @property
    def accum_steps(self) -> AccumSteps:
        """Micro steps per step, or their schedule. Assigning an int takes effect from the next cycle on."""
        return self._cycle.plan.accum_steps

    @accum_steps.setter
    def accum_steps(self, value: AccumSteps) -> None:
        old = self._cycle.plan
        new = make_plan(value, old.reduction, old.nonfinite, old.sparse)
        if old.is_schedule or new.is_schedule:
            raise ValueError(
                "A schedule of `accum_steps` can't be set or replaced: pass it to a new optimizer."
                " [accum: set-later]"
            )
        if self._cycle.is_settable:
            self._cycle.counter.request(new)  # from the next cycle on
        elif not new.is_passthrough and not self._has_run:
            cycle = self._cycle
            self._use_cycle(Cycle(new, cycle.adapter, cycle.transform, cycle.dtype, is_settable=True))
        elif not new.is_passthrough:
            raise ValueError(
                f"`accum_steps` was 1 from the start, so there are no accumulators. To change it to {value} later, "
                f"construct the optimizer with accum_steps={{0: 1, first_step: {value}}}. [accum: set-later]"
            )

    @property
    def micro_step(self) -> tf.Tensor:
        """The number of micro steps in the current cycle so far, an int64 scalar."""
        if not self._cycle.is_built:
            return tf.constant(0, tf.int64)
        return self._cycle.state.micro_step.read_value()

    @property
    def has_stepped(self) -> tf.Tensor:
        """Whether the last micro step made a step, a bool scalar. Useful to update moving averages or target networks.

        False before the first micro step, and after a cycle that made no step: all weights were zero, or
        `nonfinite="skip_cycle"` skipped it.

        Raises:
          ValueError: a train step that runs once per micro-batch of a split batch reads it, before there is a step.
        """
        train_step = self._internals.train_step
        if train_step is not None and train_step.collector is not None:
            raise ValueError(
                "`has_stepped` is not known while a train step runs on the micro-batches of a batch: the optimizer "
                "makes its step after all of them. Do what follows a step in a callback (`on_train_batch_end`), or "
                "leave out `whole_batch`, and the train step runs once per batch. [accum: has-stepped]"
            )
        if self._cycle.is_built:
            return self._cycle.has_stepped()
        return tf.constant(self._cycle.is_passthrough and self._has_run)

    @property
    def gradients(self) -> List[tf.Tensor]:
        """The weighted sums of the gradients in the current cycle, over replicas too; zeros between cycles.

        A list with one tensor for each variable that has had a gradient, in the order of the variables. For the mean,
        divide by the sum of the weights. With `reduction="running_mean"` they are means already.
        """
        return self._cycle.accumulated()

    # Attributes that Keras reads and sets belong to the inner optimizer.

    @property
    def iterations(self) -> tf.Variable:
        """The number of steps made, an int64 variable of the inner optimizer."""
        return self._inner.iterations

    @iterations.setter
    def iterations(self, variable: tf.Variable) -> None:
        self._inner.iterations = variable

    @property
    def learning_rate(self) -> LearningRate:
        return self._inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: LearningRate) -> None:
        self._inner.learning_rate = value

    lr = learning_rate

    @property
    def weights(self) -> List[tf.Variable]:
        return self._inner.weights

    def get_weights(self) -> List[np.ndarray]:
        return self._inner.get_weights()

    def set_weights(self, weights: Sequence[np.ndarray]) -> None:
        self._inner.set_weights(weights)

    if _tf.version.PICKLES:

        def __reduce__(self) -> Tuple[Any, ...]:
            """Pickle and copy the optimizer by its config, without its state, as Keras does."""
            return _tf.models.pickled_by_name(super().__reduce__())  # type: ignore[arg-type]

    def __repr__(self) -> str:
        if not self.__dict__.get("_is_ready"):  # still being constructed or copied
            return object.__repr__(self)
        arguments = f"accum_steps={self.accum_steps!r}, reduction={self._cycle.plan.reduction!r}"
        return f"{type(self).__name__}({type(self._inner).__name__}, {arguments})"

    def get_config(self) -> Config:
        """Return the config. `from_config` makes the same optimizer from it, without custom objects.

        A `transform` is included by name if it is registered with `tf.keras.utils.register_keras_serializable`;
        otherwise it is left out, with a warning.
        """
        plan = self._cycle.plan
        config = {
            "optimizer": tf.keras.optimizers.serialize(self._inner),
            "accum_steps": _config.int_keys_to_config(plan.accum_steps),
            "reduction": plan.reduction,
            "name": self._adapter.name,
            "nonfinite": plan.nonfinite,
            "sparse": plan.sparse,
        }
        if self._cycle.dtype is not None:
            config["accumulator_dtype"] = self._cycle.dtype.name
        if self._cycle.transform is not None:
            config["transform"] = _config.to_config("transform", self._cycle.transform)
        return config

    @classmethod
    def from_config(cls, config: Config, custom_objects: CustomObjects = None) -> "GradientAccumulateOptimizer":
        """Create an optimizer from the config that `get_config` returned."""
        root = getattr(cls, "_root", cls)
        if root is not cls and "_root" not in vars(cls):  # as `hvd.DistributedOptimizer` does
            raise ValueError(
                f"{cls.__name__} is derived from the class of an accumulating optimizer: its methods would be lost. "
                f"Derive from `accum.{root.__name__}`. In place of an optimizer around it that averages gradients over "
                "workers, pass `transform` a function that does so. [accum: derived-optimizer]"
            )
        config = dict(config)
        config.pop("is_legacy_optimizer", None)
        config["transform"] = _config.from_config("transform", config.get("transform"), custom_objects)
        config["optimizer"] = _tf.optimizers.deserialize(config["optimizer"], custom_objects)
        config["accum_steps"] = _config.int_keys_from_config(config["accum_steps"])
        return root(**config)


def _resolve(optimizer: tf.keras.optimizers.Optimizer) -> tf.keras.optimizers.Optimizer:
    """Return the inner optimizer for an instance, a name or a config."""
    if isinstance(optimizer, GradientAccumulateOptimizer):
        raise ValueError(
            "`optimizer` accumulates already: create it with the options of the model that takes it (`accum_steps`, "
            f"`transform` and others), or pass the optimizer inside of it. Received: {optimizer!r}."
            " [accum: wrapped-twice]"
        )
    if not _tf.optimizers.is_keras_optimizer(optimizer) and not isinstance(optimizer, (str, dict)):
        hint = " Use `accum.compat.v1.AccumOptimizer` for it." if _tf.optimizers.is_graph_optimizer(optimizer) else ""
        raise TypeError(
            f"`optimizer` must be a Keras optimizer, its name or its config. Received: {optimizer!r}.{hint}"
        )
    inner = tf.keras.optimizers.get(optimizer)
    for part in [inner] + list(getattr(inner, "optimizers", ())):  # the parts of Keras 3's `MultiOptimizer`
        if getattr(part, "gradient_accumulation_steps", None):
            raise ValueError(
                "`optimizer` accumulates already, through Keras: leave out its `gradient_accumulation_steps`. "
                f"Received: gradient_accumulation_steps={part.gradient_accumulation_steps!r}. [accum: wrapped-twice]"
            )
    if callable(getattr(inner, "_allreduce_grads", None)):
        raise ValueError(
            "`optimizer` is a DistributedOptimizer of Horovod, which averages gradients over workers where it computes "
            "them, and an accumulating optimizer is only given gradients: leave it out, and average them in a "
            f"`transform`, which is called once per step. Received: {inner!r}. [accum: horovod]"
        )
    if _tf.optimizers.is_loss_scale_optimizer(inner):
        raise ValueError(
            "A LossScaleOptimizer has to be outermost, where it scales the loss: "
            "LossScaleOptimizer(GradientAccumulateOptimizer(optimizer, accum_steps)). [accum: loss-scale]"
        )
    own_ways = _tf.optimizers.own_ways_to_gradients(inner)
    if own_ways:
        _check.warn(
            f"`{type(inner).__name__}` computes gradients in methods of its own, which nobody calls: an accumulating "
            "optimizer is only given gradients. Pass what these methods do to gradients as `transform`, which is "
            f"called once per step. Received: {own_ways}. [accum: clipping]",
            _check.InexactWarning,
        )
    return inner


_tf.optimizers.register_keras_class(GradientAccumulateOptimizer, "GradientAccumulateOptimizer")
