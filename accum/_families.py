"""The two families of Keras optimizers: what each reads on an optimizer, and what it lends to the engine."""

import contextlib
from typing import Dict, Tuple

from accum import _replicas, _tf
from accum._flow import count_nonfinite
from accum._host import Host
from accum._tf import tf


class KerasHost(Host):
    """Lends a Keras optimizer to the engine."""

    def __init__(self, wrapper, name):
        self.name = name
        self._wrapper = wrapper
        self._given = {}  # variable key -> what Keras 3 puts around the variable

    def scalar(self, name, initial_value, per_replica=False):
        name = "{}/{}".format(self.name, name)
        with _tf.on_host() if initial_value.dtype == tf.int64 else contextlib.ExitStack():
            return _tf.new_keras_variable(self._wrapper, name, initial_value, per_replica)

    def buffer(self, var, name, shape, dtype):
        name = "{}/{}/{}".format(var.name.split(":")[0], self.name, name)
        with tf.distribute.get_strategy().extended.colocate_vars_with(var):
            return _tf.new_keras_variable(self._wrapper, name, tf.zeros(shape, dtype), per_replica=True)

    def check(self, variables):
        overwritten = [var.name for var in variables if _tf.is_overwritten(self._as_given(var))]
        if overwritten:
            raise ValueError(
                "Of a variable that its gradient replaces, such as a scale of float8, there is no mean over "
                "micro-batches. Received: {}.".format(overwritten)
            )
        refused = _tf.refused_by_inner(self._wrapper.optimizer, variables)
        if refused:
            raise ValueError(
                "The inner optimizer was built for other variables, and one of its family takes no more: call "
                "`build` with all of them first, or make a new optimizer. Received: {}.".format(
                    [var.name for var in refused]
                )
            )

    def inwards(self, grads_and_vars):
        listed = list(grads_and_vars)
        if not _tf.IS_KERAS_3 or any(not isinstance(pair, (tuple, list)) or len(pair) != 2 for pair in listed):
            return listed  # what is no pair is refused where all are checked
        self._given.update((_tf.variable_key(var), var) for _, var in listed)
        return [(grad, _tf.native(var)) for grad, var in listed]

    def outwards(self, grads_and_vars):
        return [(grad, self._as_given(var)) for grad, var in grads_and_vars]

    def _as_given(self, var):
        return self._given.get(_tf.variable_key(var), var) if _tf.IS_KERAS_3 else var

    def prepare(self, variables, used=()):
        variables, used = ([self._as_given(var) for var in group] for group in (variables, used))
        _tf.prepare_inner(self._wrapper.optimizer, variables, used)

    def apply(self, grads_and_vars, replicas):
        return _tf.awaited(_tf.apply_inner(self._wrapper.optimizer, self.outwards(grads_and_vars), replicas))

    def steps(self):
        return _tf.native(self._wrapper.iterations)


def _of_inner(name):
    """An attribute that every Keras optimizer has, and that an accumulating one has from its inner optimizer."""

    def set_it(self, value):
        if self.__dict__.get("_is_ready"):  # the base class sets its defaults before
            setattr(self._inner, name, value)

    return property(lambda self: getattr(self._inner, name, None), set_it)


class _Face(_tf.TrackedAsInner):
    """What Keras and its users read and set on any optimizer."""

    clipnorm = _of_inner("clipnorm")
    clipvalue = _of_inner("clipvalue")
    global_clipnorm = _of_inner("global_clipnorm")
    weight_decay = _of_inner("weight_decay")
    use_ema = _of_inner("use_ema")
    ema_momentum = _of_inner("ema_momentum")
    ema_overwrite_frequency = _of_inner("ema_overwrite_frequency")

    def _hand_back(self, grads_and_vars):
        """Leave the gradients on their replica, for the cycle to reduce; share only whether any is not finite.

        `LossScaleOptimizer` asks for whole gradients on every micro step, takes one replica's verdict for all, and then
        calls `apply_gradients` as if they were reduced.
        """
        listed = list(grads_and_vars)
        self._handed_back.add(_replicas.replica_number())
        grads = [grad for grad, _ in listed]
        return list(zip(_replicas.spoil_together(grads, count_nonfinite(grads)), [var for _, var in listed]))

    def _takes_back(self):
        """Whether this replica's gradients were handed back since the last call."""
        replica = _replicas.replica_number()
        is_handed_back = replica in self._handed_back
        self._handed_back.discard(replica)
        return is_handed_back

    def __getattr__(self, name):
        """Hyperparameters such as `momentum`: the inner optimizer's."""
        if name.startswith("_") or "_inner" not in self.__dict__:
            raise AttributeError("{!r} has no attribute {!r}".format(type(self).__name__, name))
        return getattr(self._inner, name)

    def __setattr__(self, name, value):
        is_public = self.__dict__.get("_is_ready") and not name.startswith("_") and not hasattr(type(self), name)
        if is_public and name not in self.__dict__ and hasattr(self._inner, name):
            setattr(self._inner, name, value)
        else:
            super().__setattr__(name, value)


class _LegacyFace(_Face):
    """What Keras reads on an optimizer that keeps slots."""

    @staticmethod
    def _returned(op):
        return op

    _HAS_AGGREGATE_GRAD = False  # at True, TF 2.2 reduces every micro-batch in `fit`; dies with 2.2

    # A `LossScaleOptimizer` hands on what stands in here: without, it has no learning rate for callbacks on TF 2.4.

    @property
    def _hyper(self):
        return self.__dict__["_inner"]._hyper if "_inner" in self.__dict__ else {}  # none yet while it is copied

    @_hyper.setter
    def _hyper(self, value):
        """Keep the inner optimizer's, whatever the base class begins with."""

    def _get_hyper(self, *args, **kwargs):
        return self._inner._get_hyper(*args, **kwargs)

    def _set_hyper(self, *args, **kwargs):
        self._inner._set_hyper(*args, **kwargs)

    def _aggregate_gradients(self, grads_and_vars):
        return _tf.aggregated(self._hand_back(grads_and_vars))

    def _clip_gradients(self, grads):
        return grads  # TF 2.2 and 2.3 would clip each micro-batch in `fit`; dies with 2.3

    def _create_all_weights(self, var_list):
        _tf.build_inner(self._inner, var_list)

    def variables(self):
        return self._inner.variables()

    def get_slot_names(self):
        return self._inner.get_slot_names()

    def get_slot(self, var, slot_name):
        return self._inner.get_slot(var, slot_name)

    def _create_or_restore_slot_variable(self, *args, **kwargs):
        return self._inner._create_or_restore_slot_variable(*args, **kwargs)


class _NewFace(_Face):
    """What Keras reads on an optimizer that is built from a list of variables."""

    def _returned(self, op):
        with tf.control_dependencies([] if op is None else [op]):
            return tf.identity(self._inner.iterations)

    @property
    def _learning_rate(self):
        return self._inner._learning_rate  # the schedule itself, which `TensorBoard` reads

    def aggregate_gradients(self, grads_and_vars):
        return self._hand_back(grads_and_vars)

    @property
    def variables(self):
        return self._inner.variables

    def exclude_from_weight_decay(self, *args, **kwargs):
        self._inner.exclude_from_weight_decay(*args, **kwargs)

    def finalize_variable_values(self, var_list):
        self._inner.finalize_variable_values(var_list)

    def save_own_variables(self, store):
        self._inner.save_own_variables(store)

    def load_own_variables(self, store):
        self._inner.load_own_variables(store)


class _Keras3Face(_NewFace):
    """What Keras 3 reads on an optimizer."""

    def _returned(self, op):
        return self._inner.iterations  # the variable itself, as Keras 3 does

    loss_scale_factor = _of_inner("loss_scale_factor")
    gradient_accumulation_steps = _of_inner("gradient_accumulation_steps")

    @property
    def built(self):
        return self.__dict__.get("_is_ready", False) and self._inner.built

    @built.setter
    def built(self, value):
        """Whatever the base class or a `LossScaleOptimizer` says of it: the inner optimizer knows."""

    @property
    def _learning_rate(self):
        return self._inner._learning_rate

    @_learning_rate.setter
    def _learning_rate(self, value):
        """Keep the inner optimizer's, whatever the base class begins with."""

    @property
    def _model_variables_moving_average(self):
        return self._inner._model_variables_moving_average  # `SwapEMAWeights` looks for it

    @property
    def _trainable_variables(self):
        return self._inner._trainable_variables

    @_trainable_variables.setter
    def _trainable_variables(self, value):
        """Keep the inner optimizer's, whatever the base class begins with."""

    def apply(self, grads, trainable_variables=None):
        """Take in the gradients of one micro-batch, of the variables that it was built for if none are given."""
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if len(grads) != len(variables):
            raise ValueError(
                "There must be a gradient, or None, for each variable that the optimizer was built for: `build` it "
                "first, or give the variables. Received: {} gradients for {} variables.".format(
                    len(grads), len(variables)
                )
            )
        self.apply_gradients(list(zip(grads, variables)))

    def minimize(self, loss, var_list, tape=None):
        """Compute the gradients of `loss` and take them in: Keras 3 left it out, and loops of older lines call it."""
        if callable(loss):
            with tf.GradientTape() as tape:
                loss = loss()
        elif tape is None:
            raise ValueError("`tape` is required when a `tf.Tensor` is passed as `loss`.")
        variables = list(var_list() if callable(var_list) else var_list)
        grads = tape.gradient(loss, [_tf.native(var) for var in variables])
        return self.apply_gradients(list(zip(grads, variables)))

    def scale_loss(self, loss):
        return self._inner.scale_loss(loss)


_CONCRETE: Dict[Tuple[type, type], type] = {}


def concrete_class(cls, base):
    """`cls` as a subclass of the Keras optimizer `base` too, one class for each pair."""
    if issubclass(cls, base):
        return cls
    if (cls, base) not in _CONCRETE:
        new = _Keras3Face if _tf.IS_KERAS_3 else _NewFace
        face = _LegacyFace if base is _tf.LegacyOptimizer else new
        namespace = {
            "_root": cls,
            "__module__": cls.__module__,
            "__doc__": cls.__doc__,
            "__qualname__": cls.__qualname__,
        }
        _CONCRETE[cls, base] = type(cls.__name__, (cls, face, base), namespace)
    return _CONCRETE[cls, base]
