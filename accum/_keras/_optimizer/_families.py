"""The interfaces of the two families of Keras optimizers: the attributes that Keras and its users expect."""

from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

from accum import _tf
from accum._engine import _replicas
from accum._engine._gradients import count_nonfinite
from accum._engine._plan import Plan
from accum._keras import _step_context
from accum._tf import Gradient, GradsAndVars, Wait, tf
from accum._tf.types import LearningRate, LossOrFunction, VariablesOrFunction

FIXED = frozenset(Plan._fields) - {"accum_steps"}
"""Options of an accumulating optimizer that can't be changed."""


def _of_inner(name: str) -> property:
    """Make a property that reads and sets an attribute of the inner optimizer, if the inner optimizer has it."""

    def set_it(self: Any, value: object) -> None:
        if self.__dict__.get("_is_ready"):  # ignore the defaults that the base class sets before
            setattr(self._inner, name, value)

    return property(lambda self: getattr(self._inner, name, None), set_it)


class _Interface(_tf.tracking.TrackedAsInner):
    """The attributes that Keras and its users read and set on any optimizer."""

    _inner: tf.keras.optimizers.Optimizer
    _handed_back: Set[int]

    clipnorm = _of_inner("clipnorm")
    clipvalue = _of_inner("clipvalue")
    global_clipnorm = _of_inner("global_clipnorm")
    weight_decay = _of_inner("weight_decay")
    use_ema = _of_inner("use_ema")
    ema_momentum = _of_inner("ema_momentum")
    ema_overwrite_frequency = _of_inner("ema_overwrite_frequency")

    def _hand_back(self, grads_and_vars: GradsAndVars) -> List[Tuple[Optional[Gradient], tf.Variable]]:
        """Return the gradients unreduced, because the cycle reduces them; share only whether any is not finite.

        `LossScaleOptimizer` asks for reduced gradients on every micro step, checks them for overflow on one replica
        only, and then calls `apply_gradients` as if they were reduced.
        """
        listed = list(grads_and_vars)
        collector = _step_context.of_optimizer(self).collector  # type: ignore[arg-type]
        if collector is not None:  # in a loop, where nothing may communicate
            collector.shares_overflow.append(id(self))
            return listed
        self._handed_back.add(_replicas.replica_number())
        grads = [grad for grad, _ in listed]
        return list(zip(_replicas.spoil_together(grads, count_nonfinite(grads)), [var for _, var in listed]))

    def _takes_back(self) -> bool:
        """Whether this replica's gradients were handed back since the last call."""
        replica = _replicas.replica_number()
        is_handed_back = replica in self._handed_back
        self._handed_back.discard(replica)
        return is_handed_back

    def __getattr__(self, name: str) -> Any:
        """Read hyperparameters such as `momentum` from the inner optimizer."""
        if name.startswith("_") or "_inner" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: object) -> None:
        if self.__dict__.get("_is_ready") and name in FIXED and not hasattr(self._inner, name):
            raise AttributeError(
                f"`{name}` of an optimizer that accumulates can't be changed: create another one, with `{name}=…`. "
                f"Received: {value!r}. [accum: set-later]"
            )
        is_public = self.__dict__.get("_is_ready") and not name.startswith("_") and not hasattr(type(self), name)
        if is_public and name not in self.__dict__ and hasattr(self._inner, name):
            setattr(self._inner, name, value)
        else:
            super().__setattr__(name, value)


class _LegacyInterface(_Interface):
    """The attributes that Keras reads on an optimizer that keeps slots."""

    @staticmethod
    def _returned(op: Optional[tf.Operation]) -> Wait:
        return op

    _HAS_AGGREGATE_GRAD = False  # if True, TF 2.2 reduces every micro-batch in `fit`; dies with 2.2

    # A `LossScaleOptimizer` exposes the entries of `_hyper`: without them, callbacks on TF 2.4 find no learning rate.

    @property
    def _hyper(self) -> Any:
        return self.__dict__["_inner"]._hyper if "_inner" in self.__dict__ else {}  # not set yet during a copy

    @_hyper.setter
    def _hyper(self, value: object) -> Any:
        """Ignore the initial value of the base class: the inner optimizer's is used."""

    def _aggregate_gradients(self, grads_and_vars: GradsAndVars) -> List[Optional[Gradient]]:
        return _tf.optimizers.aggregated(self._hand_back(grads_and_vars))

    def _clip_gradients(self, grads: Sequence[Optional[Gradient]]) -> Sequence[Optional[Gradient]]:
        return grads  # TF 2.2 and 2.3 would clip each micro-batch in `fit`; dies with 2.3

    def _create_all_weights(self, var_list: Sequence[tf.Variable]) -> None:
        _tf.inner_optimizer.build(self._inner, var_list)

    _decayed_lr = _tf.tracking.forwarded("_decayed_lr")  # which callbacks call that log the learning rate
    _get_hyper = _tf.tracking.forwarded("_get_hyper")
    _set_hyper = _tf.tracking.forwarded("_set_hyper")
    variables = _tf.tracking.forwarded("variables")
    get_slot_names = _tf.tracking.forwarded("get_slot_names")
    get_slot = _tf.tracking.forwarded("get_slot")
    _create_or_restore_slot_variable = _tf.tracking.forwarded("_create_or_restore_slot_variable")


class _NewInterface(_Interface):
    """The attributes that Keras reads on an optimizer that is built from a list of variables."""

    def _returned(self, op: Optional[tf.Operation]) -> Wait:
        with tf.control_dependencies([] if op is None else [op]):
            return tf.identity(self._inner.iterations)

    @property
    def _learning_rate(self) -> LearningRate:
        return self._inner._learning_rate  # may be a schedule, which `TensorBoard` reads

    def aggregate_gradients(self, grads_and_vars: GradsAndVars) -> List[Tuple[Optional[Gradient], tf.Variable]]:
        return self._hand_back(grads_and_vars)

    @property
    def variables(self) -> Sequence[tf.Variable]:
        return self._inner.variables

    exclude_from_weight_decay = _tf.tracking.forwarded("exclude_from_weight_decay")
    finalize_variable_values = _tf.tracking.forwarded("finalize_variable_values")
    save_own_variables = _tf.tracking.forwarded("save_own_variables")
    load_own_variables = _tf.tracking.forwarded("load_own_variables")


class _Keras3Interface(_NewInterface):
    """The attributes that Keras 3 reads on an optimizer."""

    def _returned(self, op: Optional[tf.Operation]) -> Wait:
        return self._inner.iterations  # the variable itself, as in Keras 3

    _get_current_learning_rate = _tf.tracking.forwarded("_get_current_learning_rate")
    loss_scale_factor = _of_inner("loss_scale_factor")
    gradient_accumulation_steps = _of_inner("gradient_accumulation_steps")

    @property
    def built(self) -> bool:
        return self.__dict__.get("_is_ready", False) and self._inner.built

    @built.setter
    def built(self, value: object) -> bool:
        """Ignore what the base class or a `LossScaleOptimizer` sets: only the inner optimizer decides."""

    @property
    def _learning_rate(self) -> LearningRate:
        return self._inner._learning_rate

    @_learning_rate.setter
    def _learning_rate(self, value: object) -> LearningRate:
        """Ignore the initial value of the base class: the inner optimizer's is used."""

    @property
    def _model_variables_moving_average(self) -> List[tf.Variable]:
        return self._inner._model_variables_moving_average  # read by `SwapEMAWeights`

    @property
    def _trainable_variables(self) -> List[tf.Variable]:
        return self._inner._trainable_variables

    @_trainable_variables.setter
    def _trainable_variables(self, value: object) -> List[tf.Variable]:
        """Ignore the initial value of the base class: the inner optimizer's is used."""

    def apply(
        self, grads: Sequence[Optional[Gradient]], trainable_variables: Optional[Sequence[tf.Variable]] = None
    ) -> None:
        """Accumulate the gradients of one micro-batch.

        Args:
          grads: list of gradients.
          trainable_variables: their variables; None: the variables for which the optimizer was built.
        """
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if len(grads) != len(variables):
            raise ValueError(
                "There must be a gradient, or None, for each variable for which the optimizer was built: call `build` "
                f"first, or pass the variables. Received: {len(grads)} gradients for {len(variables)} variables."
                " [accum: gradients]"
            )
        self.apply_gradients(list(zip(grads, variables)))

    def minimize(
        self, loss: LossOrFunction, var_list: VariablesOrFunction, tape: Optional[tf.GradientTape] = None
    ) -> Wait:
        """Compute the gradients of `loss` and accumulate them. Keras 3 has no `minimize`, but older code calls it."""
        if callable(loss):
            with tf.GradientTape() as tape:
                loss = loss()
        elif tape is None:
            raise ValueError("`tape` is required when a `tf.Tensor` is passed as `loss`. [accum: arguments]")
        variables = list(var_list() if callable(var_list) else var_list)
        grads = tape.gradient(loss, [_tf.variables.native(var) for var in variables])
        return self.apply_gradients(list(zip(grads, variables)))

    scale_loss = _tf.tracking.forwarded("scale_loss")


_CONCRETE: Dict[Tuple[type, type], type] = {}


def concrete_class(cls: type, base: type) -> type:
    """Return a subclass of both `cls` and the Keras optimizer `base`, always the same one for each pair."""
    if issubclass(cls, base):
        return cls
    if (cls, base) not in _CONCRETE:
        new = _Keras3Interface if hasattr(base, "stateless_apply") else _NewInterface
        interface = _LegacyInterface if base is _tf.optimizers.LegacyOptimizer else new
        namespace = {
            "_root": cls,
            "__module__": cls.__module__,
            "__doc__": cls.__doc__,
            "__qualname__": cls.__qualname__,
        }
        _CONCRETE[cls, base] = type(cls.__name__, (cls, interface, base), namespace)
    return _CONCRETE[cls, base]
