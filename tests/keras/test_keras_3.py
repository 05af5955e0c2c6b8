"""What only Keras 3 has on an optimizer: it means inside the wrapper what it means alone (laws L1, L10, L11, L17)."""

import numpy as np
import pytest
import tensorflow as tf
from optimizers import keras_weights
from replicas import mirrored
from versions import IS_KERAS_3

import accum

pytestmark = [
    pytest.mark.tf("2.2"),
    pytest.mark.skipif(not IS_KERAS_3, reason="`tf.keras` is Keras 2 here"),
    pytest.mark.slow,
]

RANDOM = np.random.RandomState(0)
X, Y = (RANDOM.normal(size=(24, size)).astype("float32") for size in (3, 2))
KERNEL = RANDOM.normal(size=(3, 2)).astype("float32")


def linear(optimizer, **options):
    inputs = tf.keras.Input((3,))
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(2, use_bias=False, **options)(inputs))
    model.compile(optimizer, tf.keras.losses.MeanSquaredError())
    model.set_weights([KERNEL])
    return model


def fitted(model, batch_size, epochs=2):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch_size)
    model.fit(data, epochs=epochs, verbose=0)
    return model.get_weights()[0]


@pytest.mark.law("L17")
def test_a_variable_that_is_overwritten_with_its_gradient_is_refused():
    """As the scales of float8 layers are."""
    var = linear("sgd").trainable_variables[0]
    var.overwrite_with_gradient = True
    optimizer = accum.GradientAccumulateOptimizer("sgd", accum_steps=2)
    with pytest.raises(ValueError, match="overwritten with its gradient.* can't be trained with accumulation"):
        optimizer.apply_gradients([(tf.ones([3, 2]), var)])


@pytest.mark.law("L17")
def test_a_second_accumulation_inside_is_refused():
    inner = tf.keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="leave out its `gradient_accumulation_steps`"):
        accum.GradientAccumulateOptimizer(inner, accum_steps=2)


@pytest.mark.law("L17")
def test_a_transform_that_would_see_a_scaled_gradient_is_refused():
    inner = tf.keras.optimizers.SGD(0.1, loss_scale_factor=8.0)
    with pytest.raises(ValueError, match="does not: use a LossScale"):
        accum.GradientAccumulateOptimizer(inner, accum_steps=2, transform=lambda pairs: pairs)


@pytest.mark.law("L10")
def test_a_fixed_loss_scale_of_the_inner_optimizer_scales_the_loss_once():
    make = lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9, loss_scale_factor=64.0, clipnorm=0.5)
    ours = fitted(linear(accum.GradientAccumulateOptimizer(make(), accum_steps=3)), 4)
    np.testing.assert_allclose(ours, fitted(linear(make()), 12), rtol=0, atol=2e-6)


@pytest.mark.law("L1")
def test_a_constraint_of_a_variable_holds_once_a_step():
    calls = []

    class Halve(tf.keras.constraints.Constraint):
        def __call__(self, weight):
            calls.append(weight)
            return 0.5 * weight

    make = lambda: tf.keras.optimizers.SGD(0.1)
    ours = fitted(linear(accum.GradientAccumulateOptimizer(make(), 3), kernel_constraint=Halve()), 4)
    full = fitted(linear(make(), kernel_constraint=Halve()), 12)
    assert calls
    np.testing.assert_allclose(ours, full, rtol=0, atol=2e-6)


@pytest.mark.law("L1")
def test_apply_takes_gradients_alone_once_it_is_built():
    variables = keras_weights([KERNEL])
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps=2)
    assert not optimizer.built
    optimizer.build(variables)
    assert optimizer.built
    optimizer.apply([tf.fill([3, 2], 1.0)])
    optimizer.apply([tf.fill([3, 2], 3.0)])
    np.testing.assert_allclose(variables[0].numpy(), KERNEL - 2.0, rtol=0, atol=2e-6)
    assert optimizer.variables == optimizer.optimizer.variables


@pytest.mark.law("L1")
def test_minimize_is_there_as_in_the_versions_before():
    (weight,) = keras_weights([KERNEL])
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps=2)
    for factor in (1.0, 3.0):
        optimizer.minimize(lambda factor=factor: factor * tf.reduce_sum(tf.convert_to_tensor(weight)), [weight])
    np.testing.assert_allclose(weight.numpy(), KERNEL - 2.0, rtol=0, atol=2e-6)
    with pytest.raises(ValueError, match="`tape` is required"):
        optimizer.minimize(tf.constant(1.0), [weight])


@pytest.mark.law("L7")
def test_a_transform_sees_the_variables_of_keras():
    seen = []

    def transform(grads_and_vars):
        seen.extend(var.path for _, var in grads_and_vars)
        return [(2.0 * grad, var) for grad, var in grads_and_vars]

    make = lambda **options: accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.1), 2, "sum", **options)
    model = linear(make(transform=transform))
    ours = fitted(model, 6)
    assert set(seen) == {model.trainable_variables[0].path}
    twice = linear(accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.2), 2, "sum"))
    np.testing.assert_allclose(ours, fitted(twice, 6), rtol=0, atol=2e-6)


@pytest.mark.law("L11")
def test_replicas_accumulate_where_keras_own_argument_fails():
    with mirrored().scope():
        theirs = linear(tf.keras.optimizers.SGD(0.1, gradient_accumulation_steps=3))
    with pytest.raises(Exception, match="merge_call|replica"):
        fitted(theirs, 4)
    with mirrored().scope():
        ours = linear(accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.1, clipnorm=0.1), 3))
    full = fitted(linear(tf.keras.optimizers.SGD(0.1, clipnorm=0.1)), 12)
    np.testing.assert_allclose(fitted(ours, 4), full, rtol=0, atol=2e-6)


@pytest.mark.law("L12")
def test_a_keras_file_goes_on_where_it_stopped(tmp_path):
    path = str(tmp_path / "model.keras")
    make = lambda: linear(accum.GradientAccumulateOptimizer(tf.keras.optimizers.Adam(0.1), 3))
    model, through = make(), make()
    fitted(model, 4, epochs=1)
    model.save(path)
    again = tf.keras.models.load_model(path)
    assert isinstance(again.optimizer, accum.GradientAccumulateOptimizer)
    assert int(again.optimizer.iterations.numpy()) == 2
    np.testing.assert_allclose(fitted(again, 4, epochs=1), fitted(through, 4, epochs=2), rtol=0, atol=2e-6)


@pytest.mark.law("L17")
def test_apply_wants_a_gradient_for_each_variable():
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps=2)
    optimizer.build(keras_weights([KERNEL, KERNEL]))
    with pytest.raises(ValueError, match="Received: 1 gradients for 2 variables"):
        optimizer.apply([tf.ones([3, 2])])


@pytest.mark.law("L17")
def test_a_variable_that_its_gradient_replaces_is_refused():
    (weight,) = keras_weights([KERNEL])
    weight.overwrite_with_gradient = True
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps=2)
    with pytest.raises(ValueError, match="no mean over micro-batches"):
        optimizer.apply_gradients([(tf.ones([3, 2]), weight)])


class Late(tf.keras.Model):
    """Makes its layers where it is built, and one later."""

    def build(self, input_shape):
        self.one = tf.keras.layers.Dense(4)
        self.one.build(input_shape)
        self.two = tf.keras.layers.Dense(2)
        self.two.build((None, 4))

    def call(self, inputs):
        return self.two(self.one(inputs))


if IS_KERAS_3:
    Late = tf.keras.utils.register_keras_serializable("tests")(Late)


@pytest.mark.law("L12")
def test_a_model_that_is_not_built_yet_shares_nothing_that_keeps_book():
    plain = Late()
    model = accum.GradientAccumulateModel.from_model(plain, 2)
    model.extra = tf.keras.layers.Dense(1)
    model.compile("sgd", tf.keras.losses.MeanSquaredError())
    model.fit(X, Y, batch_size=4, verbose=0)
    assert [layer.name for layer in model.layers] == [model.extra.name, model.one.name, model.two.name]
    assert len(model.trainable_variables) == 4
    assert not plain.built and not plain.layers


@pytest.mark.law("L12")
def test_a_sequential_model_that_is_not_built_yet_knows_its_inputs_later(tmp_path):
    model = accum.GradientAccumulateModel.from_model(tf.keras.Sequential([tf.keras.layers.Dense(2)]), 2)
    model.compile("sgd", tf.keras.losses.MeanSquaredError())
    model.fit(X, Y, batch_size=4, verbose=0)
    assert model.inputs[0].shape[-1] == 3
    model.save(str(tmp_path / "model.keras"))
    again = tf.keras.models.load_model(str(tmp_path / "model.keras"))
    np.testing.assert_array_equal(again.predict(X, verbose=0), model.predict(X, verbose=0))


@pytest.mark.law("L1")
def test_averages_are_swapped_in_as_for_the_full_batch():
    make = lambda: tf.keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    seen = []
    for optimizer, size in ((make(), 12), (accum.GradientAccumulateOptimizer(make(), 3), 4)):
        model = linear(optimizer)
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(size)
        swap = tf.keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        model.fit(data, epochs=2, verbose=0, callbacks=[swap], validation_data=data)
        seen.append(np.copy(model.get_weights()[0]))
    np.testing.assert_allclose(seen[1], seen[0], rtol=0, atol=2e-6)


def two_rules():
    rules = tf.keras.optimizers
    if not hasattr(rules, "MultiOptimizer"):
        pytest.skip("optimizers made of several came with a later Keras 3")
    return rules.MultiOptimizer(rules.OptimizerMap(rules.SGD(0.1), {".*/kernel": rules.SGD(0.1, momentum=0.9)}))


@pytest.mark.law("L8", "L11")
def test_an_optimizer_made_of_several_is_one_inner_optimizer_on_replicas_too():
    with mirrored().scope():
        ours = linear(accum.GradientAccumulateOptimizer(two_rules(), 3))
    np.testing.assert_allclose(fitted(ours, 4), fitted(linear(two_rules()), 12), rtol=0, atol=2e-6)


@pytest.mark.law("L8")
def test_an_optimizer_made_of_several_bears_a_variable_without_a_gradient():
    used, unused = keras_weights([KERNEL, KERNEL])
    optimizer = accum.GradientAccumulateOptimizer(two_rules(), 2)
    for factor in (1.0, 3.0):
        optimizer.apply_gradients([(tf.fill([3, 2], factor), used), (None, unused)])
    np.testing.assert_allclose(used.numpy(), KERNEL - 0.2, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(unused.numpy(), KERNEL)


@pytest.mark.law("L8")
def test_a_part_of_an_optimizer_may_be_left_without_any_gradient():
    rules, (one, other) = tf.keras.optimizers, keras_weights([KERNEL, KERNEL])
    parts = rules.OptimizerMap(rules.SGD(0.1), {one.path: rules.SGD(0.1)}) if two_rules() else None
    optimizer = accum.GradientAccumulateOptimizer(rules.MultiOptimizer(parts), 2)
    grad = tf.ones([3, 2])
    for grads in [(grad, grad)] * 2 + [(None, grad)] * 2:
        optimizer.apply_gradients(zip(grads, [one, other]))
    np.testing.assert_allclose(one.numpy(), KERNEL - 0.1, rtol=0, atol=2e-6)
    np.testing.assert_allclose(other.numpy(), KERNEL - 0.2, rtol=0, atol=2e-6)


# --------------------------------------------------------------------------------------------------------------------
# An optimizer that starts from the values of the variables


needs_schedule_free = pytest.mark.skipif(
    not hasattr(tf.keras.optimizers, "ScheduleFreeAdamW"), reason="came with a later Keras 3"
)


def schedule_free(is_built, wrap=lambda optimizer: optimizer, **options):
    model = tf.keras.Sequential([tf.keras.layers.Dense(2, use_bias=False)])
    if is_built:
        model.build((None, 3))
        model.set_weights([KERNEL])
    model.compile(wrap(tf.keras.optimizers.ScheduleFreeAdamW(0.1)), "mse", **options)
    return model


@pytest.mark.law("L17")
@needs_schedule_free
@pytest.mark.parametrize("accum_steps", [1, 2])
def test_an_optimizer_that_starts_from_values_that_are_not_there_yet_says_so(accum_steps):
    """Plain Keras starts from zeros there, without a word, unless it runs eagerly."""
    model = schedule_free(False, lambda optimizer: accum.GradientAccumulateOptimizer(optimizer, accum_steps))
    with pytest.raises(ValueError, match=r"ScheduleFreeAdamW starts from the values .* call `model.build"):
        fitted(model, 4)


@pytest.mark.law("L1")
@needs_schedule_free
def test_with_values_it_equals_the_full_batch():
    ours = schedule_free(True, lambda optimizer: accum.GradientAccumulateOptimizer(optimizer, 3))
    np.testing.assert_allclose(fitted(ours, 4), fitted(schedule_free(True, run_eagerly=True), 12), rtol=0, atol=2e-6)
