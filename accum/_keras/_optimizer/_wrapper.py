"""The Keras API: an optimizer that wraps another one, for `compile`, custom loops and `strategy.run`.

`Internals` are what the rest of the package sees of it, hidden from users. `KerasAdapter` is how the engine uses the
optimizer that is wrapped.
"""

import contextlib
import functools
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

import numpy as np

from accum import _check, _config, _tf
from accum._engine import _replicas
from accum._engine._cycle import Cycle
from accum._engine._plan import Plan
from accum._keras import _step_context
from accum._keras._optimizer._adapter import KerasAdapter
from accum._keras._optimizer._families import concrete_class
from accum._keras._optimizer._internals import Internals, accumulation_of
from accum._keras._step_listener import StepListener
from accum._tf import Gradient, GradsAndVars, Scalar, Wait, tf
from accum._tf.types import (
    AccumSteps,
    Config,
    CustomObjects,
    LearningRate,
    LossOrFunction,
    Reduction,
    VariablesOrFunction,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack  # novm

    from accum._engine._plan import OptimizerOptions


@_check.describing(Plan.of)
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
      **options: the others of `Plan.of`, which describes them.

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

    @_check.taking(Plan.of)
    def __init__(
        self,
        optimizer: tf.keras.optimizers.Optimizer = "SGD",
        accum_steps: AccumSteps = _check.LEFT_OUT,
        reduction: Reduction = "mean",
        name: str = "GradientAccumulateOptimizer",
        **options: "Unpack[OptimizerOptions]",
    ) -> None:
        if accum_steps is _check.LEFT_OUT:
            _check.warn(
                "`accum_steps` was not given, so each micro-batch makes a step: pass it, or 1 if that is meant."
                " [accum: no-accumulation]"
            )
            accum_steps = 1
        plan = Plan.of(accum_steps, reduction, **options)
        self.__dict__["_inner"] = inner = self.__dict__.pop("_resolved")
        if plan.changes_updates and getattr(inner, "loss_scale_factor", None) is not None:
            raise ValueError(
                "With `loss_scale_factor`, only the inner optimizer sees unscaled gradients; what changes them before, "
                "such as a `transform`, does not: use a LossScaleOptimizer around this optimizer. Received: "
                f"loss_scale_factor={inner.loss_scale_factor!r}. [accum: loss-scale]"
            )
        _tf.tracking.stop_automatic_tracking(self)
        _tf.tracking.begin_as_optimizer(self, super().__init__, name)
        self.__dict__["_adapter"] = adapter = KerasAdapter(self, name)
        self._use_cycle(Cycle(plan, adapter, not plan.is_one_micro_step))
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
        train_step = _step_context.of_optimizer(self).train_step
        is_reduced = skip_gradients_aggregation or not experimental_aggregate_gradients
        if train_step is None:
            self._internals.warn_of_batch_norms()
            _tf.watching.tell_watcher(self)  # the train step of a model that does not know this optimizer
            return self._micro_step(listed, weight, is_reduced)
        with train_step.calling(self, listed):
            if train_step.collector is not None:
                apply = functools.partial(self.apply_gradients, skip_gradients_aggregation=is_reduced)
                train_step.collector.take(self, user_pairs, weight, apply)
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
        if _step_context.of_optimizer(self).train_step is None:
            self._internals.warn_of_order(listed)

        def tell() -> None:
            self._internals.tell_of_gradients([grad for grad, _ in listed], weight, is_reduced)

        if self._cycle.is_passthrough and weight is None and not self._cycle.is_built:
            tell()
            return self._apply_passthrough(listed, is_reduced)
        self._internals.warn_of_changed_gradients([grad for grad, _ in listed if grad is not None])
        return self._returned(self._cycle.micro_step(listed, weight, is_reduced, tell))

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
        if not self._cycle.is_built and tf.executing_eagerly():
            self._cycle.forget_restored()
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
                    "Nothing was flushed: a restored cycle is known only after its next micro-batch."
                    " [accum: restored-cycle]",
                )
            return None
        with contextlib.ExitStack() as stack:
            if self._cycle.strategy and not tf.distribute.has_strategy():
                stack.enter_context(self._cycle.strategy.scope())
            result = function()
        for listener in self._internals.listeners:
            listener.end_cycle()
        self._internals.unfinished_row = None
        return result

    def _apply_passthrough(self, grads_and_vars: GradsAndVars, is_reduced: bool) -> Wait:
        with tf.init_scope():
            self._adapter.prepare([var for _, var in grads_and_vars])
        listed = [(grad, var) for grad, var in grads_and_vars if grad is not None]
        reduced, sums_now = listed, _tf.inner_optimizer.sums_before_all_else(self._inner)
        context = _step_context.of_optimizer(self)
        overlaps = context.overlaps and sums_now
        if not is_reduced and _replicas.count() > 1 and (overlaps or self._internals.listeners):
            reduced = _replicas.sum_gradients(listed)
            if sums_now:
                listed, is_reduced = reduced, True
        told = self._internals.tell_of_update(reduced, reduced)
        replicas = tf.distribute.get_strategy().num_replicas_in_sync if is_reduced else 1
        # Where a dataset of unknown length ends, Keras' train function runs once more. Without this, the step counter,
        # weight decay and averages of the optimizer would move then. The last variable has its gradient first, and
        # workers may sum the gradients one after the other. In a model, a step that fails leaves no trace: so all
        # gradients are there before the first variable moves.
        waits = context.train_step is not None or _replicas.overlap()
        awaited = [grad for grad, _ in listed] if waits else [listed[-1][0]]
        with tf.control_dependencies(_tf.graphs.waits_for_all(awaited) + told):
            # Keras warns of variables without a gradient, so it has to be given them.
            listed += [(grad, var) for grad, var in grads_and_vars if grad is None]
            return self._adapter.apply(listed, replicas)

    # ------------------------------------------------------------------------------------------------------------
    # What can be seen

    @property
    def optimizer(self) -> tf.keras.optimizers.Optimizer:
        """The inner optimizer."""
        return self._inner

    @property
    def accum_steps(self) -> AccumSteps:
        """Micro steps per step, or their schedule. Assigning an int takes effect from the next cycle on."""
        return self._cycle.plan.shown_steps()

    @accum_steps.setter
    def accum_steps(self, value: AccumSteps) -> None:
        old = self._cycle.plan
        new = Plan.of(**dict(old._asdict(), accum_steps=value))
        if old.is_schedule or new.is_schedule:
            raise ValueError(
                "A schedule of `accum_steps` can't be set or replaced: pass it to a new optimizer. [accum: set-later]"
            )
        if self._cycle.is_settable:
            self._cycle.counter.request(new)  # from the next cycle on
        elif not new.is_one_micro_step and not self._has_run:
            self._use_cycle(Cycle(new, self._adapter, is_settable=True))
        elif not new.is_one_micro_step:
            raise ValueError(
                f"`accum_steps` was 1 from the start, so there are no accumulators. To change it to {value} later, "
                f"construct the optimizer, or its model from `accum.unwrap(model)`, with accum_steps={{0: 1, "
                f"first_step: {value}}}. [accum: set-later]"
            )

    @property
    def micro_step(self) -> tf.Tensor:
        """The number of micro steps in the current cycle so far, an int64 scalar."""
        return self._cycle.micro_step_so_far()

    @property
    def has_stepped(self) -> tf.Tensor:
        """Whether the last micro step made a step, a bool scalar; after `flush`, whether that made one.

        Useful to update moving averages or target networks.

        False before the first micro step, and after a cycle that made no step: all weights were zero, or
        `nonfinite="skip_cycle"` skipped it.

        Raises:
          ValueError: a train step that runs once per micro-batch of a split batch reads it, before there is a step.
        """
        if _step_context.of_optimizer(self).collector is not None:
            raise ValueError(
                "`has_stepped` is not known while a train step runs on the micro-batches of a batch: the optimizer "
                "makes its step after all of them. Do what follows a step in a callback (`on_train_batch_end`), or "
                "pass `micro_batch_size` alone, and the train step runs once per batch. [accum: has-stepped]"
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
        options = {name: value for name, value in self._cycle.plan._asdict().items() if value is not None}
        inner = tf.keras.optimizers.serialize(self._inner)
        return dict(_config.options_to_config(options), optimizer=inner, name=self._adapter.name)

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
        config["optimizer"] = _tf.optimizers.deserialize(config["optimizer"], custom_objects)
        return root(**dict(config, **_config.options_from_config(config, Plan._fields, custom_objects)))


def _resolve(optimizer: tf.keras.optimizers.Optimizer) -> tf.keras.optimizers.Optimizer:
    """Return the inner optimizer for an instance, a name or a config."""
    if isinstance(optimizer, GradientAccumulateOptimizer):
        raise ValueError(
            "`optimizer` accumulates already: use it as it is, or pass the optimizer inside of it. "
            f"Received: {optimizer!r}. [accum: wrapped-twice]"
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


def accumulating_optimizer(optimizer: tf.keras.optimizers.Optimizer) -> GradientAccumulateOptimizer:
    """Return the `GradientAccumulateOptimizer` of a compiled model, which may be inside a `LossScaleOptimizer`."""
    inner = _tf.optimizers.without_loss_scale(optimizer)
    if not isinstance(inner, GradientAccumulateOptimizer):
        raise ValueError(
            f"The model must be compiled with a `GradientAccumulateOptimizer`. Received: optimizer={inner!r}."
            " [accum: step-logger]"
        )
    return inner


def accumulating_optimizers(model: tf.keras.Model) -> List[GradientAccumulateOptimizer]:
    """Return all accumulating optimizers of a model: one with a custom `compile` may have several."""
    several = map(accumulating_optimizer, wrapped_by(model) or [model.optimizer])
    # One may be there twice, if it is kept alone and in the `LossScaleOptimizer` that Keras puts around it.
    return list({id(optimizer): optimizer for optimizer in several}.values())


def listen(model: tf.keras.Model, listener: StepListener) -> None:
    """Let `listener` see the steps of `model.optimizer` from now on, in any model, until it is taken from the list.

    A callback calls it in `set_model`, before `fit` traces its step.
    """
    accumulating_optimizer(model.optimizer)._internals.listeners.append(listener)
    model.train_function = None  # traced without it


def listeners_of(model: tf.keras.Model) -> List[StepListener]:
    """Return those that see the steps of an accumulating model."""
    if not wrapped_by(model):
        return []
    return [one for optimizer in accumulating_optimizers(model) for one in optimizer._internals.listeners]


def wrapped_by(model: tf.keras.Model) -> Optional[List[tf.keras.optimizers.Optimizer]]:
    """Return the optimizers that an accumulating model has wrapped, or None."""
    own = accumulation_of(model)
    return None if own is None else own.optimizers
