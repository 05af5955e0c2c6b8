"""The Keras face: an optimizer around another one, for `compile`, custom loops and `strategy.run`."""

import contextlib

from accum import _check, _config, _replicas, _tf
from accum._cycle import Cycle, check_options
from accum._families import KerasHost, concrete_class
from accum._plan import make_plan
from accum._tf import tf


class GradientAccumulateOptimizer:
    """Make one step of `optimizer` for the gradients of every `accum_steps` micro-batches.

    Its step is the one that the full batch would have made:

        mean:  optimizer.apply(sum_i(w_i g_i) / sum_i(w_i)),   i = 1 … accum_steps

    Until the last micro step nothing of the inner optimizer runs: weights, slots, `iterations`, schedules and weight
    decay rest. The object is an optimizer of the family that the inner one is of (`tf.keras.optimizers.Optimizer`, or
    `tf.keras.optimizers.legacy.Optimizer` from TF 2.11 on), so `compile` and `LossScaleOptimizer` take it.

    Args:
      optimizer: a Keras optimizer, its name or its config.
      accum_steps: micro steps per step, an int >= 1; or a schedule `{first step: accum_steps}` that holds step 0, such
        as `{0: 8, 1000: 2}`. With the plain int 1 this is the bare optimizer.
      reduction: "mean", "sum" or "running_mean" (which never holds a sum, for low precision), in any case.
      name: name of the optimizer and of its variables.
      transform: function `grads_and_vars -> grads_and_vars`, run once a cycle on the accumulated gradient.
      nonfinite: what a NaN or Inf in a gradient does: "propagate" as in a full batch; "skip_micro" leaves the
        micro-batch out and takes one more; "skip_cycle" makes no step at the end of its cycle.
      accumulator_dtype: dtype of the accumulators. None: that of the variable, float32 for a 16-bit one.
      sparse: "rows" hands `tf.IndexedSlices` on as the union of the cycle's rows; "dense" hands on a dense gradient.

    Raises:
      TypeError, ValueError: for any argument that is none of these.

    Example:
      >>> optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.Adam(1e-3), accum_steps=4)
      >>> model.compile(optimizer, loss="mse")
      >>> model.fit(x, y, batch_size=8)  # steps as with batch_size=32
    """

    def __new__(cls, optimizer="SGD", *args, **kwargs):
        """Make an instance that is also a Keras optimizer of the family of `optimizer`."""
        inner = _resolve(optimizer)
        base = _tf.NewOptimizer if _tf.is_new_optimizer(inner) else _tf.LegacyOptimizer
        made = object.__new__(concrete_class(cls, base))
        made.__dict__["_resolved"] = inner
        return made

    def __init__(
        self,
        optimizer="SGD",
        accum_steps=1,
        reduction="mean",
        name="GradientAccumulateOptimizer",
        *,
        transform=None,
        nonfinite="propagate",
        accumulator_dtype=None,
        sparse="rows",
    ):
        plan = check_options(accum_steps, reduction, transform, nonfinite, accumulator_dtype, sparse)
        self.__dict__["_inner"] = inner = self.__dict__.pop("_resolved")
        if transform is not None and getattr(inner, "loss_scale_factor", None) is not None:
            raise ValueError(
                "With `loss_scale_factor` the inner optimizer alone sees gradients unscaled; a `transform` does not: "
                "use a LossScaleOptimizer around this one. Received: loss_scale_factor={!r}.".format(
                    inner.loss_scale_factor
                )
            )
        _tf.stop_automatic_tracking(self)
        _tf.begin_as_optimizer(self, super().__init__, name)
        self._use_cycle(Cycle(plan, KerasHost(self, name), transform, accumulator_dtype, not plan.is_bare))
        self.__dict__["_weights_now"] = {}  # replica -> weight of the micro-batch that is being taken in
        self.__dict__["_handed_back"] = set()  # replicas whose gradients a LossScaleOptimizer takes for reduced
        self.__dict__["_has_run"] = False
        self.__dict__["_is_ready"] = True

    def _use_cycle(self, cycle):
        self.__dict__["_cycle"] = cycle
        if not cycle.is_bare:
            _tf.track(self, cycle.state, "accumulation")

    # ------------------------------------------------------------------------------------------------------------
    # Micro steps

    @_tf.untouched_by_autograph
    def apply_gradients(
        self,
        grads_and_vars,
        name=None,
        skip_gradients_aggregation=False,
        *,
        weight=None,
        experimental_aggregate_gradients=True,
    ):
        """Take in the gradients of one micro-batch; on the last one of a cycle, make the step.

        Args:
          grads_and_vars: list of (gradient, variable). A gradient is a tensor of its variable's shape,
            `tf.IndexedSlices` or None. Under a strategy: those of this replica's loss, scaled by 1 / replicas as Keras
            does.
          name: accepted for Keras' sake.
          skip_gradients_aggregation: whether the gradients are already summed over replicas (Keras >= 2.11).
          weight: scalar >= 0, this micro-batch's weight in the mean, such as its number of examples; under a strategy
            that of this replica's part. None: 1, for all replicas together.
          experimental_aggregate_gradients: False says the same as `skip_gradients_aggregation=True`.

        Returns:
          What the inner optimizer's family returns: the number of steps, an int64 scalar from TF 2.11 on, in Keras 3
          its variable; for a legacy optimizer an op, or None when run eagerly.

        Raises:
          ValueError: no gradient at all, a gradient of another shape, a negative weight, or other variables than
            before within a cycle.
        """
        del name
        grads_and_vars = self._cycle.host.inwards(grads_and_vars)
        weight = self.weight_now if weight is None else weight
        is_reduced = skip_gradients_aggregation or not experimental_aggregate_gradients
        is_reduced = is_reduced and not self._takes_back()
        self.__dict__["_has_run"] = True
        if self._cycle.is_bare and weight is None and not self._cycle.is_built:
            return self._apply_bare(_check.pairs(grads_and_vars), is_reduced)
        return self._returned(self._cycle.micro_step(grads_and_vars, weight, is_reduced))

    def minimize(self, loss, var_list, *args, weight=None, **kwargs):
        """Compute the gradients of `loss` and take them in, as `apply_gradients` does.

        Args:
          loss: a function without arguments, or a tensor with `tape=`.
          var_list: list of variables, or a function that gives one.
          *args: as the inner optimizer's `minimize` takes them.
          weight: as for `apply_gradients`.
          **kwargs: as `args`.
        """
        with self.weighing(weight):
            return super().minimize(loss, var_list, *args, **kwargs)

    @contextlib.contextmanager
    def weighing(self, weight):
        """Give the calls of `apply_gradients` within, on this replica, `weight` as default; None changes nothing."""
        replica, before = _replicas.replica_number(), self.weight_now
        self._weights_now[replica] = before if weight is None else weight
        try:
            yield
        finally:
            self._weights_now[replica] = before

    @property
    def weight_now(self):
        """The weight that `weighing` gives this replica's micro-batch, or None."""
        return self._weights_now.get(_replicas.replica_number())

    def weigh_anew(self, weight):
        """Replace the default that `weighing` gives on this replica, if it gives one."""
        replica = _replicas.replica_number()
        if self._weights_now.get(replica) is not None:
            self._weights_now[replica] = weight

    def accompany(self, companion):
        """Let `companion`, a `Companion`, live by this optimizer's cycle from now on."""
        if not any(known is companion for known in self._cycle.companions):
            self._cycle.companions.append(companion)

    def show(self, model):
        """Let the `transform` know the layers of `model`, if it watches any."""
        if hasattr(self._cycle.transform, "watch"):
            self._cycle.transform.watch(model)

    def flush(self):
        """Make the step of an unfinished cycle from the micro-batches that are there. Returns an op, or None."""
        return self._between_replicas(self._cycle.apply)

    def reset(self):
        """Discard an unfinished cycle. Returns an op, or None."""
        return self._between_replicas(self._cycle.zero)

    def build(self, var_list):
        """Create the inner optimizer's variables for `var_list`, and let it be what is accumulated from now on.

        Args:
          var_list: list of trainable variables.

        Raises:
          ValueError: a cycle of other variables has begun; the inner optimizer is of Keras 2.11 or later and was built
            without some of them.
        """
        self._cycle.host.check(list(var_list))
        self._cycle.announce(list(var_list))
        with tf.init_scope():
            _tf.build_inner(self._inner, list(var_list))

    def expect(self, model):
        """Let the next micro step bring another list of variables than the last: those that `model` trains now."""
        if self._cycle.is_built:
            self._cycle.announce(model.trainable_variables)

    def _between_replicas(self, function):
        if not self._cycle.is_built:
            if _tf.is_tracing() and not self._cycle.is_bare:
                raise ValueError("`flush` and `reset` can't be traced before the first micro step has been.")
            return None
        if tf.distribute.has_strategy() or not self._cycle.strategy:
            return function()
        with self._cycle.strategy.scope():
            return function()

    def _apply_bare(self, grads_and_vars, is_reduced):
        with tf.init_scope():
            self._cycle.host.prepare([var for _, var in grads_and_vars])
        listed = [(grad, var) for grad, var in grads_and_vars if grad is not None]
        replicas = tf.distribute.get_strategy().num_replicas_in_sync if is_reduced else 1
        return _tf.apply_inner(self._inner, self._cycle.host.outwards(listed), replicas)

    # ------------------------------------------------------------------------------------------------------------
    # What can be seen

    @property
    def optimizer(self):
        """The inner optimizer."""
        return self._inner

    @property
    def cycle(self):
        """The engine's `Cycle`, for what reads or sets an unfinished one as a whole."""
        return self._cycle

    @property
    def accum_steps(self):
        """Micro steps per step, or the schedule of it. An int can be set; it holds from the next cycle on."""
        return self._cycle.plan.accum_steps

    @accum_steps.setter
    def accum_steps(self, value):
        old = self._cycle.plan
        new = make_plan(value, old.reduction, old.nonfinite, old.sparse)
        if old.is_schedule or new.is_schedule:
            raise ValueError("A schedule of `accum_steps` can't be set or replaced: give it to a new optimizer.")
        if self._cycle.is_settable:
            self._cycle.set_accum_steps(new)
        elif not new.is_bare and not self._has_run:
            self._use_cycle(self._cycle.planned_anew(new))
        elif not new.is_bare:
            raise ValueError(
                "`accum_steps` was 1 from the start, so there are no accumulators. "
                "To reach {} later, construct with accum_steps={{0: 1, first_step: {}}}.".format(value, value)
            )

    def accumulates_as(self, options):
        """Whether `options`, arguments of this class, would make an optimizer that accumulates as this one does now."""
        plan = check_options(**options)
        dtype = options["accumulator_dtype"]
        return plan == self._cycle.plan and (None if dtype is None else tf.as_dtype(dtype)) == self._cycle.dtype

    @property
    def is_bare(self):
        """Whether `accum_steps` is 1 for ever, so that the inner optimizer works alone."""
        return self._cycle.is_bare

    @property
    def micro_step(self):
        """Micro steps made in the current cycle, an int64 scalar."""
        if not self._cycle.is_built:
            return tf.constant(0, tf.int64)
        return self._cycle.state.micro_step.read_value()

    @property
    def gradients(self):
        """What the current cycle has accumulated: a list of tensors, one a variable, summed over replicas."""
        return self._cycle.accumulated()

    # What Keras reads and sets on an optimizer is the inner optimizer's.

    @property
    def iterations(self):
        """The number of steps made, an int64 variable: the inner optimizer's."""
        return self._inner.iterations

    @iterations.setter
    def iterations(self, variable):
        self._inner.iterations = variable

    @property
    def learning_rate(self):
        return self._inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, value):
        self._inner.learning_rate = value

    lr = learning_rate

    @property
    def weights(self):
        return self._inner.weights

    def get_weights(self):
        return self._inner.get_weights()

    def set_weights(self, weights):
        self._inner.set_weights(weights)

    if _tf.IS_KERAS_3:  # before, Keras pickles no optimizer

        def __reduce__(self):
            """As Keras pickles and copies an optimizer alone: by its config, without what it has done."""
            return _tf.pickled_by_name(super().__reduce__())

    def get_config(self):
        """The config, from which `from_config` makes the same optimizer without custom objects.

        A `transform` is named in it if it is registered (`tf.keras.utils.register_keras_serializable`), and left out
        with a warning if it is not.
        """
        plan = self._cycle.plan
        config = {
            "optimizer": _tf.serialize_keras_optimizer(self._inner),
            "accum_steps": _config.int_keys_to_config(plan.accum_steps),
            "reduction": plan.reduction,
            "name": self._cycle.host.name,
            "nonfinite": plan.nonfinite,
            "sparse": plan.sparse,
        }
        if self._cycle.dtype is not None:
            config["accumulator_dtype"] = self._cycle.dtype.name
        if self._cycle.transform is not None:
            config["transform"] = _config.to_config("transform", self._cycle.transform)
        return config

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Make an optimizer from what `get_config` gave."""
        config = dict(config)
        config.pop("is_legacy_optimizer", None)
        config["transform"] = _config.from_config("transform", config.get("transform"), custom_objects)
        config["optimizer"] = _tf.deserialize_keras_optimizer(config["optimizer"], custom_objects)
        config["accum_steps"] = _config.int_keys_from_config(config["accum_steps"])
        return getattr(cls, "_root", cls)(**config)


def _resolve(optimizer):
    """The inner optimizer that the user named."""
    if isinstance(optimizer, GradientAccumulateOptimizer):
        raise ValueError("`optimizer` accumulates already: set its `accum_steps`. Received: {!r}.".format(optimizer))
    if not _tf.is_keras_optimizer(optimizer) and not isinstance(optimizer, (str, dict)):
        hint = " Use `accum.compat.v1.AccumOptimizer` for it." if _tf.is_graph_optimizer(optimizer) else ""
        raise TypeError(
            "`optimizer` must be a Keras optimizer, its name or its config. Received: {!r}.{}".format(optimizer, hint)
        )
    inner = _tf.get_keras_optimizer(optimizer)
    for part in [inner] + list(getattr(inner, "optimizers", ())):  # those in a `MultiOptimizer` of Keras 3
        if getattr(part, "gradient_accumulation_steps", None):
            raise ValueError(
                "`optimizer` accumulates already, in Keras' own way: leave out its `gradient_accumulation_steps`. "
                "Received: gradient_accumulation_steps={!r}.".format(part.gradient_accumulation_steps)
            )
    if _tf.is_loss_scale_optimizer(inner):
        raise ValueError(
            "A LossScaleOptimizer has to be outermost, where it scales the loss: "
            "LossScaleOptimizer(GradientAccumulateOptimizer(optimizer, accum_steps))."
        )
    return inner


_tf.register_keras_class(GradientAccumulateOptimizer, "GradientAccumulateOptimizer")
