"""What a cycle's gradients are reduced to: reduction, weights, transforms, not-a-number (laws L4, L5, L7, L9, L10)."""

import numpy as np
import pytest
import tensorflow as tf
from optimizers import mainly

import accum
import accum.compat.v1

tf1 = tf.compat.v1

G = [[1.0, -2.0], [3.0, 0.5], [-7.0, 4.0]]


def keras_move(gradients, accum_steps=None, weights=None, inner=None, **options):
    """How far the weights moved under SGD with lr 1 in the Keras API."""
    variable = tf.Variable([0.0, 0.0])
    inner = inner or tf.keras.optimizers.SGD(1.0)
    optimizer = accum.GradientAccumulateOptimizer(inner, accum_steps or len(gradients), **options)
    for i, grad in enumerate(gradients):
        weight = None if weights is None else weights[i]
        optimizer.apply_gradients([(tf.constant(grad), variable)], weight=weight)
    return variable.numpy()


def graph_move(gradients, accum_steps=None, weights=None, **options):
    """How far the weights moved under SGD with lr 1 in the static-graph API."""
    with tf.Graph().as_default(), tf1.Session() as session:
        variable = tf1.get_variable("w", initializer=[0.0, 0.0])
        fed, weight = tf1.placeholder(tf.float32, [2]), tf1.placeholder(tf.float32, [])
        inner = tf1.train.GradientDescentOptimizer(1.0)
        optimizer = accum.compat.v1.AccumOptimizer(inner, accum_steps or len(gradients), **options)
        train_op = optimizer.apply_gradients([(fed, variable)], weight=None if weights is None else weight)
        session.run(tf1.global_variables_initializer())
        for i, grad in enumerate(gradients):
            session.run(train_op, {fed: grad, weight: 1.0 if weights is None else weights[i]})
        return session.run(variable)


@pytest.fixture(params=["keras", "graph"])
def move(request):
    if request.param == "keras" and not hasattr(accum, "GradientAccumulateOptimizer"):
        pytest.skip("TF 1.15 has no Keras API")
    return {"keras": keras_move, "graph": graph_move}[request.param]


@pytest.mark.law("L4")
@pytest.mark.parametrize("reduction", ["mean", "MEAN", "running_mean"])
def test_mean_moves_by_minus_the_mean(move, reduction):
    np.testing.assert_allclose(move(G, reduction=reduction), -np.mean(G, axis=0), rtol=1e-6)


@pytest.mark.law("L4")
def test_sum_moves_by_minus_the_sum(move):
    np.testing.assert_allclose(move(G, reduction="sum"), -np.sum(G, axis=0), rtol=1e-6)


@pytest.mark.law("L4")
@pytest.mark.tf("2.2")
def test_running_mean_never_holds_a_sum():
    big = [[4e4, 4e4]] * 8  # the sum is no float16
    moved = keras_move(big, reduction="running_mean", accumulator_dtype="float16")
    np.testing.assert_allclose(moved, [-4e4, -4e4], rtol=1e-3)


@pytest.mark.law("L4")
@pytest.mark.tf("2.2")
def test_running_mean_of_opposite_signs_never_overflows():
    moved = keras_move([[6e4, 0.0], [-6e4, 0.0]], reduction="running_mean", accumulator_dtype="float16")
    np.testing.assert_allclose(moved, [0.0, 0.0], atol=1.0)


@pytest.mark.law("L4", "L8")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_gradient_is_zero_in_a_running_mean(missing):
    grads, other = [None if index == missing else tf.constant(grad) for index, grad in enumerate(G)], tf.Variable(0.0)
    variable = tf.Variable([0.0, 0.0])
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), 3, reduction="running_mean")
    for grad in grads:
        optimizer.apply_gradients([(grad, variable), (tf.constant(1.0), other)])
    mean = sum(np.array(grad) for index, grad in enumerate(G) if index != missing) / 3.0
    np.testing.assert_allclose(variable.numpy(), -mean, rtol=1e-6)


@pytest.mark.law("L5")
@pytest.mark.parametrize("reduction", ["mean", "running_mean"])
def test_weights_weigh_the_mean(move, reduction):
    weights = [8.0, 4.0, 1.0]
    expected = -np.average(G, axis=0, weights=weights)
    np.testing.assert_allclose(move(G, weights=weights, reduction=reduction), expected, rtol=1e-6)


@pytest.mark.law("L4", "L5")
def test_weights_multiply_under_sum(move):
    weights = [2.0, 0.5, 0.0]
    np.testing.assert_allclose(move(G, weights=weights, reduction="sum"), -np.dot(weights, G), rtol=1e-6)


@pytest.mark.law("L5")
@pytest.mark.parametrize("reduction", ["mean", "sum", "running_mean"])
def test_weights_that_sum_to_zero_make_no_step(move, reduction):
    moved = move(G + G, accum_steps=3, weights=[0.0, 0.0, 0.0, 1.0, 1.0, 2.0], reduction=reduction)
    expected = -np.average(G, axis=0, weights=[1, 1, 2]) if reduction != "sum" else -np.dot([1, 1, 2], G)
    np.testing.assert_allclose(moved, expected, rtol=1e-6)


@pytest.mark.law("L5")
@pytest.mark.parametrize("index", [0, 1, 2])
def test_an_empty_micro_batch_of_weight_zero_counts_for_nothing(move, index):
    gradients, weights = [list(g) for g in G], [1.0, 2.0, 3.0]
    gradients[index], weights[index] = [np.nan, np.nan], 0.0
    finite = [i for i in range(3) if i != index]
    expected = -np.average([G[i] for i in finite], axis=0, weights=[weights[i] for i in finite])
    np.testing.assert_allclose(move(gradients, weights=weights), expected, rtol=1e-6)


@pytest.mark.law("L7")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("name", ["clipnorm", "clipvalue"])
@pytest.mark.parametrize("accum_steps", [1, 2])
def test_clipping_acts_on_the_mean(name, accum_steps):
    variable = tf.Variable([0.0])
    inner = tf.keras.optimizers.SGD(1.0, **{name: 1.0})
    optimizer = accum.GradientAccumulateOptimizer(inner, accum_steps)
    for grad in [10.0, 0.0][:accum_steps]:
        optimizer.apply_gradients([(tf.constant([grad]), variable)])
    np.testing.assert_array_equal(variable.numpy(), [-1.0])


@pytest.mark.law("L7")
def test_transform_acts_once_on_the_mean(move):
    seen = []

    def halve_above_one(grads_and_vars):
        seen.append(len(grads_and_vars))
        return [(tf.where(tf.abs(grad) > 1.0, grad / 2.0, grad), var) for grad, var in grads_and_vars]

    moved = move([[4.0, 1.0], [0.0, 1.0]], transform=halve_above_one)
    np.testing.assert_allclose(moved, [-1.0, -1.0])
    assert seen == [1]


BAD = [np.nan, np.inf, -np.inf]
PLACES = mainly([(bad, index) for bad in BAD for index in (0, 1, 2)], *[(np.nan, 0), (np.inf, 1), (-np.inf, 2)])


@pytest.mark.law("L9")
@pytest.mark.parametrize("bad,index", PLACES)
def test_skip_micro_takes_one_more(move, bad, index):
    gradients = [list(g) for g in G]
    gradients.insert(index, [bad, 1.0])
    moved = move(gradients, accum_steps=3, nonfinite="skip_micro")
    np.testing.assert_allclose(moved, -np.mean(G, axis=0), rtol=1e-6)


@pytest.mark.law("L9")
@pytest.mark.parametrize(
    "bad,index,reduction",
    mainly(
        [(bad, index, "mean") for bad in BAD for index in (0, 1, 2)] + [(bad, 1, "running_mean") for bad in BAD],
        (np.nan, 0, "mean"),
        (np.inf, 2, "mean"),
        (-np.inf, 1, "running_mean"),
    ),
)
def test_skip_cycle_makes_no_step_and_the_next_is_clean(move, bad, index, reduction):
    gradients = [list(g) for g in G]
    gradients[index] = [1.0, bad]
    moved = move(gradients + G, accum_steps=3, nonfinite="skip_cycle", reduction=reduction)
    np.testing.assert_allclose(moved, -np.mean(G, axis=0), rtol=1e-6)


@pytest.mark.law("L9")
def test_propagate_spoils_one_step_as_a_full_batch_would(move):
    assert np.isnan(move([[np.nan, 1.0]] + G[:2])[0])


@pytest.mark.law("L10")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_gradients_accumulate_in_float32(dtype):
    variable = tf.Variable(tf.zeros([1], dtype))
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps=3, reduction="sum")
    for grad in (256.0, 0.25, 0.25):
        optimizer.apply_gradients([(tf.constant([grad], dtype), variable)])
        if int(optimizer.micro_step) == 2:
            assert optimizer.gradients[0].dtype == tf.float32
            np.testing.assert_array_equal(optimizer.gradients[0].numpy(), [256.25])


@pytest.mark.law("L1")
@pytest.mark.tf("2.2")
def test_float64_variables_accumulate_in_float64():
    variable = tf.Variable(np.zeros(1))
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps=2, reduction="sum")
    for grad in (1.0, 1e-12):
        optimizer.apply_gradients([(tf.constant([grad], tf.float64), variable)])
    assert variable.numpy()[0] == -(1.0 + 1e-12)
