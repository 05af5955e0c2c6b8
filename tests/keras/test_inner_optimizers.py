"""What an inner optimizer may be beyond Keras' own defaults: the black box is called once a cycle (laws L1-L3, L7)."""

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_near
from loss_scales import loss_scale_optimizer
from optimizers import (
    decays,
    families,
    float32_mean,
    keras_optimizers,
    legacy_family,
    new_family,
    random_gradients,
    slot_families,
)
from versions import IS_KERAS_3

import accum

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.slow]

K, STEPS = 3, 4
SHAPES = [(4, 3), (3,)]
FIRST = random_gradients(1, SHAPES, seed=1)[0]
GRADIENTS = random_gradients(K * STEPS, SHAPES)
MEANS = [[float32_mean(parts) for parts in zip(*GRADIENTS[i : i + K])] for i in range(0, K * STEPS, K)]
FAMILIES = slot_families()
schedules = tf.keras.optimizers.schedules


def traced(optimizer, variables):
    """One micro step as a `tf.function` of the gradients, which gives nothing back: a legacy optimizer gives an op."""

    def micro_step(*grads):
        optimizer.apply_gradients(zip(grads, variables))

    return tf.function(micro_step)


def trajectory(optimizer, gradients, every=1, finish=None):
    """The weights before and after each step, which `every` calls make, flat. Between steps they rest."""
    variables = [tf.Variable(value, name=name) for value, name in zip(FIRST, ("kernel", "bias"))]
    step = traced(optimizer, variables)
    seen = []
    for index, grads in enumerate(gradients, start=1):
        before = [v.numpy() for v in variables]
        step(*map(tf.constant, grads))
        if index % every == 0:
            seen.append(np.concatenate([v.numpy().ravel() for v in variables]))
        else:
            assert all((v.numpy() == value).all() for v, value in zip(variables, before))
    if finish is not None:
        finish(optimizer, variables)
        seen.append(np.concatenate([v.numpy().ravel() for v in variables]))
    return seen


def assert_the_same_steps(make, **options):
    ours = trajectory(accum.GradientAccumulateOptimizer(make(), accum_steps=K), GRADIENTS, every=K, **options)
    full = trajectory(make(), MEANS, **options)
    assert len(ours) == len(full)
    np.testing.assert_allclose(ours, full, rtol=0, atol=2e-7)
    return full


# ----------------------------------------------------------------------------------------------------------------
# Schedules, averages, decay


class Halving(schedules.LearningRateSchedule):
    """A user's own."""

    def __call__(self, step):
        return 0.2 * 0.5 ** tf.cast(step, tf.float32)


RATES = {
    "exponential": lambda: schedules.ExponentialDecay(0.2, decay_steps=2, decay_rate=0.5, staircase=True),
    "own": Halving,
    "function": lambda: lambda: tf.constant(0.1),
}


@pytest.mark.law("L3")
@pytest.mark.parametrize("rate", sorted(RATES))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_schedule_of_the_rate_follows_steps(family, rate):
    assert_the_same_steps(lambda: family.SGD(RATES[rate](), momentum=0.9))


def finalize(optimizer, variables):
    optimizer.finalize_variable_values(variables)


SLOW = {"use_ema": True, "ema_momentum": 0.9}


@pytest.mark.tf("2.9", because="the optimizers that TF 2.11 made the default were added in TF 2.9")
@pytest.mark.law("L2", "L3")
@pytest.mark.parametrize("frequency", [None, 3])
def test_averages_of_the_weights_move_with_steps(frequency):
    make = lambda: new_family().SGD(0.2, momentum=0.9, ema_overwrite_frequency=frequency, **SLOW)
    full = assert_the_same_steps(make, finish=finalize)
    assert np.abs(full[-1] - full[-2]).max() > 1e-2  # the end puts the average in place


def fitted(optimizer, size, data=20):
    random = np.random.RandomState(0)
    x, y = random.normal(size=(data, 3)).astype("float32"), random.normal(size=(data, 1)).astype("float32")
    inputs = tf.keras.Input((3,))
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(inputs))
    model.set_weights([random.normal(size=(3, 1)), np.zeros(1)])
    if size < 8:
        model = accum.GradientAccumulateModel.from_model(model, accum_steps=8 // size)
    model.compile(optimizer, "mse", run_eagerly=size == 8)  # the oracle need not be traced
    model.fit(x, y, batch_size=size, shuffle=False, verbose=0)
    return [v.numpy() for v in model.trainable_variables]  # TF 2.9 counts an optimizer's `iterations` as a weight


@pytest.mark.tf("2.9", because="the optimizers that TF 2.11 made the default were added in TF 2.9")
@pytest.mark.law("L6")
def test_the_end_of_fit_puts_the_averages_in_place_after_the_last_cycle():
    assert_near(fitted(new_family().SGD(0.2, **SLOW), 2), fitted(new_family().SGD(0.2, **SLOW), 8))


@pytest.mark.tf("2.9", because="the optimizers that TF 2.11 made the default were added in TF 2.9")
@pytest.mark.law("L2", "L8")
def test_averages_end_well_where_a_variable_never_had_a_gradient():
    used, unused = tf.Variable([1.0]), tf.Variable([5.0])
    optimizer = accum.GradientAccumulateOptimizer(new_family().SGD(1.0, **SLOW), accum_steps=2)
    step = traced(optimizer, [used, unused])
    for _ in range(2):
        step(tf.constant([1.0]), None)
    optimizer.finalize_variable_values([used, unused])
    np.testing.assert_array_equal(unused.numpy(), [5.0])


@pytest.mark.tf("2.9", because="the optimizers that TF 2.11 made the default were added in TF 2.9")
@pytest.mark.law("L2")
@pytest.mark.parametrize("make", decays())
def test_decoupled_weight_decay_is_taken_once_a_step(make):
    assert_the_same_steps(make)


@pytest.mark.tf("2.10", because="`exclude_from_weight_decay` came with TF 2.10")
@pytest.mark.law("L2")
@pytest.mark.parametrize("make", decays()[:1])
def test_what_is_excluded_from_weight_decay_does_not_decay(make):
    def excluding(wrap=lambda optimizer: optimizer):
        optimizer = wrap(make())
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return optimizer

    ours = excluding(lambda optimizer: accum.GradientAccumulateOptimizer(optimizer, accum_steps=K))
    ours, full = trajectory(ours, GRADIENTS, every=K), trajectory(excluding(), MEANS)
    np.testing.assert_allclose(ours, full, rtol=0, atol=2e-7)
    assert np.abs(full[0][12:] - trajectory(make(), MEANS[:1])[0][12:]).max() > 1e-3


# ----------------------------------------------------------------------------------------------------------------
# Clipping


def clipped(how, grads, limit):
    """NumPy's version of what each argument says."""
    if how == "clipvalue":
        return [np.clip(grad, -limit, limit) for grad in grads]
    norms = [np.linalg.norm(grad) for grad in grads]
    norms = [np.linalg.norm(norms)] * len(grads) if how == "global_clipnorm" else norms
    return [grad * min(1.0, limit / norm) for grad, norm in zip(grads, norms)]


def clips():
    for family in FAMILIES:
        for how in ("clipnorm", "clipvalue", "global_clipnorm"):
            try:
                family.values[0].SGD(1.0, **{how: 1.0})
            except TypeError:  # `global_clipnorm` came with TF 2.3
                continue
            for is_sparse in (False, True) if how == "clipnorm" else (False,):
                label = "{}-{}-{}".format(family.id, how, "sparse" if is_sparse else "dense")
                yield pytest.param(family.values[0], how, is_sparse, id=label)


@pytest.mark.law("L7")
@pytest.mark.parametrize("family,how,is_sparse", list(clips()))
def test_clipping_of_the_inner_optimizer_acts_on_the_whole_gradient(family, how, is_sparse):
    limit = 0.3 if how == "clipvalue" else 0.8
    variables = [tf.Variable(value) for value in FIRST]
    optimizer = accum.GradientAccumulateOptimizer(family.SGD(1.0, **{how: limit}), accum_steps=K)
    micro_step = traced(optimizer, variables)
    for kernel, bias in GRADIENTS[:K]:
        kernel = tf.constant(kernel)
        if is_sparse:  # all rows, one of them in two parts
            values = tf.concat([kernel[:3], 0.5 * kernel[3:], 0.5 * kernel[3:]], axis=0)
            kernel = tf.IndexedSlices(values, tf.constant([0, 1, 2, 3, 3]), tf.constant([4, 3]))
        micro_step(kernel, tf.constant(bias))
    for var, first, grad in zip(variables, FIRST, clipped(how, MEANS[0], limit)):
        np.testing.assert_allclose(var.numpy(), first - grad, rtol=0, atol=2e-6)


# ----------------------------------------------------------------------------------------------------------------
# Classes of the user's own


def own_legacy(base):
    class Own(base):
        """A legacy optimizer as Keras' guide writes one: a hyperparameter, a slot, dense and sparse updates."""

        def __init__(self, rate=0.1, name="Own", **kwargs):
            super().__init__(name, **kwargs)
            self._set_hyper("learning_rate", rate)

        def _create_slots(self, var_list):
            for var in var_list:
                self.add_slot(var, "seen")

        def _resource_apply_dense(self, grad, var, apply_state=None):
            seen = self.get_slot(var, "seen").assign_add(grad)
            return var.assign_sub(self._get_hyper("learning_rate", var.dtype) * (grad + 0.5 * seen))

        def _resource_apply_sparse(self, grad, var, indices, apply_state=None):
            seen = self.get_slot(var, "seen")
            seen.scatter_add(tf.IndexedSlices(grad, indices))
            change = -self._get_hyper("learning_rate", var.dtype) * (grad + 0.5 * tf.gather(seen, indices))
            return var.scatter_add(tf.IndexedSlices(change, indices))

        def get_config(self):
            return dict(super().get_config(), rate=self._serialize_hyperparameter("learning_rate"))

    class DenseOnly(Own):
        def _resource_apply_sparse(self, grad, var, indices, apply_state=None):
            raise NotImplementedError("dense only")

    return Own, DenseOnly


def own_new(base):
    class Own(base):
        """As `own_legacy`, as Keras 2.11 wants it."""

        def __init__(self, rate=0.1, name="Own", **kwargs):
            super().__init__(name=name, **kwargs)
            self._learning_rate = self._build_learning_rate(rate)

        def build(self, var_list):
            super().build(var_list)
            if not getattr(self, "_built", False):
                self.seen = [self.add_variable_from_reference(v, "seen") for v in var_list]
                self._built = True

        def update_step(self, gradient, variable):
            seen, rate = self.seen[self._index_dict[self._var_key(variable)]], tf.cast(self.learning_rate, tf.float32)
            if not isinstance(gradient, tf.IndexedSlices):
                seen.assign_add(gradient)
                variable.assign_sub(rate * (gradient + 0.5 * seen))
                return
            seen.scatter_add(gradient)
            change = -rate * (gradient.values + 0.5 * tf.gather(seen, gradient.indices))
            variable.scatter_add(tf.IndexedSlices(change, gradient.indices))

        def get_config(self):
            return dict(super().get_config(), rate=float(self.learning_rate.numpy()))

    class DenseOnly(Own):
        def update_step(self, gradient, variable):
            if isinstance(gradient, tf.IndexedSlices):
                raise NotImplementedError("dense only")
            super().update_step(gradient, variable)

    return Own, DenseOnly


def own_keras_3(base):
    class Own(base):
        """As `own_new`, as Keras 3 wants it."""

        def __init__(self, rate=0.1, name="Own", **kwargs):
            super().__init__(learning_rate=rate, name=name, **kwargs)

        def build(self, variables):
            if not self.built:
                super().build(variables)
                self.seen = self.add_optimizer_variables(variables, "seen")

        def update_step(self, gradient, variable, learning_rate):
            seen, rate = self.seen[self._get_variable_index(variable)], tf.cast(learning_rate, tf.float32)
            self.assign_add(seen, gradient)
            if not isinstance(gradient, tf.IndexedSlices):
                self.assign_sub(variable, rate * (gradient + 0.5 * seen))
                return
            change = rate * (gradient.values + 0.5 * tf.gather(seen, gradient.indices))
            self.assign_sub(variable, tf.IndexedSlices(change, gradient.indices))

        def get_config(self):
            config = super().get_config()
            return {"rate": config["learning_rate"], "name": config["name"]}

    class DenseOnly(Own):
        def update_step(self, gradient, variable, learning_rate):
            if isinstance(gradient, tf.IndexedSlices):
                raise NotImplementedError("dense only")
            super().update_step(gradient, variable, learning_rate)

    return Own, DenseOnly


OWN = []
if legacy_family() is not None:
    OWN.append(pytest.param(own_legacy(legacy_family().Optimizer), id="legacy"))
if new_family() is not None:
    write = own_keras_3 if IS_KERAS_3 else own_new
    OWN.append(pytest.param(write(new_family().Optimizer), id="new"))


def own_step(first, grads, seen):
    """One step of `Own` in NumPy."""
    seen = [before + grad for before, grad in zip(seen, grads)]
    return [value - 0.1 * (grad + 0.5 * total) for value, grad, total in zip(first, grads, seen)], seen


@pytest.mark.law("L1")
@pytest.mark.parametrize("classes", OWN)
def test_an_optimizer_of_the_user_s_own_makes_its_own_steps(classes):
    made = accum.GradientAccumulateOptimizer(classes[0](), accum_steps=K)
    objects = {"Own": classes[0]}
    values, seen = FIRST, [np.zeros_like(value) for value in FIRST]
    expected = []
    for grads in MEANS:
        values, seen = own_step(values, grads, seen)
        expected.append(np.concatenate([value.ravel() for value in values]))
    for optimizer in (made, accum.GradientAccumulateOptimizer.from_config(made.get_config(), objects)):
        np.testing.assert_allclose(trajectory(optimizer, GRADIENTS, every=K), expected, rtol=0, atol=2e-6)


ROWS = [[0, 2], [2, 2], [3, 1], [0, 3]]  # two cycles of two: rows 0 and 2, then 0, 1 and 3


@pytest.mark.law("L8")
@pytest.mark.parametrize("sparse", ["rows", "dense"])
@pytest.mark.parametrize("classes", OWN)
def test_rows_reach_it_sparse_or_dense_if_it_knows_no_others(classes, sparse):
    cls = classes[sparse == "dense"]
    table, values = tf.Variable(FIRST[0]), random_gradients(4, [(2, 3)], seed=2)
    optimizer = accum.GradientAccumulateOptimizer(cls(), accum_steps=2, sparse=sparse)
    micro_step = traced(optimizer, [table])
    expected, seen = FIRST[0].copy(), np.zeros((4, 3), "float32")
    for cycle in (0, 2):
        mean = np.zeros((4, 3), "float32")
        for index in (cycle, cycle + 1):
            rows = tf.constant(ROWS[index])
            micro_step(tf.IndexedSlices(tf.constant(values[index][0]), rows, tf.constant([4, 3])))
            np.add.at(mean, ROWS[index], values[index][0] / 2)
        seen += mean
        touched = slice(None) if sparse == "dense" else sorted(set(ROWS[cycle] + ROWS[cycle + 1]))
        expected[touched] -= 0.1 * (mean[touched] + 0.5 * seen[touched])
    np.testing.assert_allclose(table.numpy(), expected, rtol=0, atol=2e-6)


# ----------------------------------------------------------------------------------------------------------------
# TensorFlow Addons

ADDONS = {
    "LAMB": lambda tfa: tfa.optimizers.LAMB(0.05, weight_decay_rate=0.1, exclude_from_weight_decay=["bias"]),
    "RectifiedAdam": lambda tfa: tfa.optimizers.RectifiedAdam(0.05, total_steps=4, warmup_proportion=0.5),
    "AdamW": lambda tfa: tfa.optimizers.AdamW(weight_decay=0.1, learning_rate=0.05),
    "Lookahead": lambda tfa: tfa.optimizers.Lookahead(tfa.optimizers.RectifiedAdam(0.05), sync_period=2),
    "MovingAverage": lambda tfa: tfa.optimizers.MovingAverage(legacy_family().SGD(0.05)),
}


@pytest.mark.law("L1", "L2")
@pytest.mark.parametrize("name", sorted(ADDONS))
def test_tensorflow_addons_optimizers_make_the_plain_step(name):
    tfa = pytest.importorskip("tensorflow_addons", reason="TensorFlow Addons is installed on some environments only")
    assert_the_same_steps(lambda: ADDONS[name](tfa))


# ----------------------------------------------------------------------------------------------------------------
# Gradients that an optimizer computes itself


def centralizing(base, name):
    """An optimizer of a user's own that changes gradients where it computes them, by the method `name`."""

    def compute(self, *args, **kwargs):
        pairs = getattr(base, name)(self, *args, **kwargs)
        return [(grad - tf.reduce_mean(grad), var) for grad, var in pairs]

    return type("Centralizing", (base,), {name: compute})


@pytest.mark.law("L17")
@pytest.mark.parametrize("family", families())
def test_an_optimizer_that_computes_gradients_itself_is_named(family):
    if IS_KERAS_3:
        pytest.skip("the optimizers of Keras 3 do not compute gradients")
    name = next(name for name in ("compute_gradients", "_compute_gradients") if hasattr(family.SGD, name))
    with pytest.warns(UserWarning, match="Centralizing.*which nobody calls.*`transform`.*" + name):
        ours = accum.GradientAccumulateOptimizer(centralizing(family.SGD, name)(1.0), 1)
    with pytest.warns(UserWarning, match="which nobody calls"):
        model = accum.GradientAccumulateModel.from_model(tf.keras.Sequential([tf.keras.layers.Dense(1)]), 2)
        model.compile(centralizing(family.SGD, name)(1.0), "mse")
    var, other = tf.Variable([1.0, 2.0]), tf.Variable([1.0, 2.0])
    ours.minimize(lambda: tf.reduce_sum(var * [1.0, 3.0]), [var])
    centralizing(family.SGD, name)(1.0).minimize(lambda: tf.reduce_sum(other * [1.0, 3.0]), [other])
    assert np.abs(var.numpy() - other.numpy()).max() > 0.5  # so the warning is true


@pytest.mark.law("L17")
@pytest.mark.parametrize("make", keras_optimizers())
def test_no_optimizer_of_keras_is_said_to_compute_gradients_itself(make, recwarn):
    accum.GradientAccumulateOptimizer(make(), 2)
    assert not [warning for warning in recwarn if "which nobody calls" in str(warning.message)]


@pytest.mark.law("L17")
@pytest.mark.parametrize("name", sorted(ADDONS))
def test_tensorflow_addons_optimizers_stand_within_a_loss_scale(name, recwarn):
    tfa = pytest.importorskip("tensorflow_addons", reason="TensorFlow Addons is installed on some environments only")
    model = accum.GradientAccumulateModel.from_model(tf.keras.Sequential([tf.keras.layers.Dense(1)]), 2)
    model.compile(loss_scale_optimizer(ADDONS[name](tfa), 64.0), "mse")
    model.fit(np.ones([4, 2], "float32"), np.ones([4, 1], "float32"), batch_size=2, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 1
    assert not [warning for warning in recwarn if "which nobody calls" in str(warning.message)]


# ----------------------------------------------------------------------------------------------------------------
# Horovod


def distributed(optimizer):
    """What `hvd.DistributedOptimizer` makes of an optimizer: methods that average where gradients are computed."""

    class Averages:
        def __init__(self, **config):
            super(type(self), self).__init__(**config)
            self._allreduce_grads = lambda grads, variables: grads

        def _compute_gradients(self, *args, **kwargs):
            raise AssertionError("an accumulating optimizer would not call this")

    methods = {name: vars(Averages)[name] for name in ("__init__", "_compute_gradients")}
    return type(type(optimizer).__name__, (type(optimizer),), methods).from_config(optimizer.get_config())


@pytest.mark.law("L11", "L17")
def test_a_distributed_optimizer_of_horovod_is_refused_within_and_around():
    with pytest.raises(ValueError, match="Horovod.*`transform`"):
        accum.GradientAccumulateOptimizer(distributed(tf.keras.optimizers.SGD(0.1)), accum_steps=2)
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model = accum.GradientAccumulateModel.from_model(model, micro_batch_size=2)
    with pytest.raises(ValueError, match="Horovod.*`transform`"):
        model.compile(distributed(tf.keras.optimizers.SGD(0.1)), "mse")
    with pytest.raises(ValueError, match="methods would be lost.*`transform`"):
        distributed(accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.1), accum_steps=2))


@pytest.mark.law("L17")
def test_a_class_of_ones_own_is_made_of_its_config():
    class Named(accum.GradientAccumulateOptimizer):
        """A class of the user's, which loads as before."""

    optimizer = Named(tf.keras.optimizers.SGD(0.1), accum_steps=2)
    again = type(optimizer).from_config(optimizer.get_config())
    assert isinstance(again, Named) and again.accum_steps == 2
