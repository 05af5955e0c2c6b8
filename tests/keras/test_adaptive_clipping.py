"""Adaptive gradient clipping against an independent NumPy version, on the accumulated gradient (law L7)."""

import numpy as np
import pytest
import tensorflow as tf
from warned import silent, warned

import accum
import accum.compat.v1

tf1 = tf.compat.v1
layers = tf.keras.layers

# kind of parameter: (its shape, the order of axes that puts those which number units last, how many these are)
KINDS = {
    "bias": ((4,), (0,), 0),
    "gain": ((), (), 0),
    "dense": ((5, 3), (0, 1), 1),
    "conv1d": ((3, 4, 2), (0, 1, 2), 1),
    "conv2d": ((3, 3, 2, 4), (0, 1, 2, 3), 1),
    "conv3d": ((2, 2, 2, 3, 4), (0, 1, 2, 3, 4), 1),
    "depthwise": ((3, 2, 2, 3), (0, 1, 2, 3), 2),
    "transposed1d": ((3, 4, 2), (0, 2, 1), 1),
    "transposed": ((3, 2, 4, 2), (0, 1, 3, 2), 1),
    "embedding": ((6, 3), (1, 0), 1),
    "heads": ((4, 2, 3), (0, 1, 2), 2),  # EinsumDense abc,cde->abde
}
UNIT_AXES = {"depthwise": (-2, -1), "transposed1d": (-2,), "transposed": [2], "embedding": (0,), "heads": (1, 2)}


def clip(kind, weights, grad, clip_factor=0.1, eps=1e-3):
    """Brock et al. 2021, equation 3, in float64: a loop over units, each a column of fan-in."""
    _, order, units = KINDS[kind]
    weights, grad = (np.transpose(np.asarray(value, np.float64), order) for value in (weights, grad))
    shape = grad.shape
    count = int(np.prod(shape[len(shape) - units :])) if units else 1
    weights, out = weights.reshape(-1, count), grad.reshape(-1, count).copy()
    for unit in range(count):
        limit = clip_factor * max(np.linalg.norm(weights[:, unit]), eps)
        norm = np.linalg.norm(out[:, unit])
        if norm > limit:
            out[:, unit] *= limit / norm
    return np.transpose(out.reshape(shape), np.argsort(order)) if shape else out.reshape(shape)


def in_session(function):
    """What `function()` computes, in every version."""
    with tf.Graph().as_default(), tf1.Session() as session:
        return session.run(function())


def drawn(shape, scale=1.0, seed=0):
    return (scale * np.random.RandomState(seed).normal(size=shape)).astype("float32")


@pytest.mark.law("L7")
@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_clips_as_the_paper_says(kind, scale):
    shape, order, units = KINDS[kind]
    weights, grad = drawn(shape), drawn(shape, scale, seed=1)
    if units:
        weights[tuple(0 if axis in order[-units:] else slice(None) for axis in range(len(shape)))] = 0.0  # can grow
    (ours,) = in_session(
        lambda: (
            accum.adaptive_clip_grad([tf.constant(weights)], [tf.constant(grad)], 0.1, unit_axes=[UNIT_AXES[kind]])
            if kind in UNIT_AXES
            else accum.adaptive_clip_grad([tf.constant(weights)], [tf.constant(grad)], clip_factor=0.1)
        )
    )
    np.testing.assert_allclose(ours, clip(kind, weights, grad), rtol=1e-5, atol=1e-9)


@pytest.mark.law("L7", "L8")
@pytest.mark.parametrize("is_said", [False, True], ids=["by the gradient", "by unit_axes"])
def test_slices_stay_sparse_and_equal_the_dense_gradient(is_said):
    table, indices, values = drawn((6, 3)), [4, 1, 4, 0], drawn((4, 3), 0.3, seed=1)
    table[1] = 0.0
    dense = np.zeros((6, 3), "float32")
    np.add.at(dense, indices, values)

    def clipped():
        grad = tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([6, 3]))
        (ours,) = accum.adaptive_clip_grad([tf.constant(table)], [grad], 0.1, unit_axes=[(0,)] if is_said else None)
        assert isinstance(ours, tf.IndexedSlices)
        return ours.indices, tf.convert_to_tensor(ours)

    rows, ours = in_session(clipped)
    assert sorted(rows) == [0, 1, 4]  # each once, and no other is read
    np.testing.assert_allclose(ours, clip("embedding", table, dense), rtol=1e-5, atol=1e-9)


@pytest.mark.law("L7")
def test_slices_of_units_that_reach_over_rows_are_clipped_as_the_whole():
    kernel, values = drawn((5, 3)), drawn((2, 3), seed=1)
    dense = np.zeros((5, 3), "float32")
    dense[[3, 1]] = values
    slices = lambda: tf.IndexedSlices(tf.constant(values), tf.constant([3, 1]), tf.constant([5, 3]))
    (ours,) = in_session(lambda: accum.adaptive_clip_grad([tf.constant(kernel)], [slices()], 0.1, unit_axes=[(-1,)]))
    np.testing.assert_allclose(ours, clip("dense", kernel, dense), rtol=1e-5, atol=1e-9)


@pytest.mark.law("L7")
def test_norms_of_sixteen_bit_gradients_do_not_overflow():
    grad, kernel = tf.constant([[300.0], [-300.0]], tf.float16), tf.constant([[300.0], [300.0]], tf.float16)
    if tf.executing_eagerly():
        (ours,) = accum.adaptive_clip_grad([kernel], [grad], clip_factor=0.5)
        assert ours.dtype == tf.float16
        np.testing.assert_allclose(ours.numpy(), [[150.0], [-150.0]], rtol=1e-3)


@pytest.mark.law("L7")
def test_missing_gradients_stay_missing():
    ours = accum.adaptive_clip_grad([tf.ones([2]), tf.ones([2])], [None, tf.ones([2])])
    assert ours[0] is None
    assert ours[1] is not None


@pytest.mark.law("L17")
def test_bad_arguments_are_refused():
    ones = [tf.ones([2, 2])]
    with pytest.raises(ValueError, match="as many as `parameters`. Received: 1 and 2"):
        accum.adaptive_clip_grad(ones, [None, None])
    with pytest.raises(ValueError, match="one entry per parameter. Received: 2 for 1"):
        accum.adaptive_clip_grad(ones, ones, unit_axes=[None, None])
    with pytest.raises(ValueError, match="axes of a tensor of rank 2. Received: \\(2,\\)"):
        accum.unitwise_norm(ones[0], unit_axes=(2,))
    with pytest.raises(TypeError, match="must be a tuple of ints. Received: unit_axes=-1"):
        accum.adaptive_clip_grad(ones, ones, unit_axes=[-1])
    for exclude in ("bias", 3, [tf.ones]):
        with pytest.raises(TypeError, match="`exclude` must be a list of names, or a function of a variable"):
            accum.AdaptiveClipping(exclude=exclude)
    with pytest.raises(TypeError, match="`unit_axes` must be a dict of names to axes"):
        accum.AdaptiveClipping(unit_axes=[(-2, -1)])
    with pytest.raises(TypeError, match=r"`unit_axes\['w'\]` must be a tuple of ints"):
        accum.AdaptiveClipping(unit_axes={"w": 0})
    with pytest.raises(ValueError, match="`clip_factor` must be a number > 0"):
        accum.AdaptiveClipping(0.0)


@pytest.mark.law("L7")
def test_a_static_graph_clips_by_names():
    first = {"net/depthwise": drawn((2, 2, 2, 2)), "net/w": drawn((3, 2)), "head/w": drawn((3, 2), seed=3)}
    grads = {name: [drawn(value.shape, seed=seed) for seed in (4, 5)] for name, value in first.items()}
    clipping = accum.AdaptiveClipping(0.1, exclude=["head"], unit_axes={"depthwise": (-2, -1)})
    with tf.Graph().as_default(), tf1.Session() as session:
        fed = {name: tf1.placeholder(tf.float32, value.shape) for name, value in first.items()}
        variables = {name: tf1.get_variable(name, initializer=value) for name, value in first.items()}
        inner = tf1.train.GradientDescentOptimizer(1.0)
        optimizer = accum.compat.v1.AccumOptimizer(inner, accum_steps=2, transform=clipping)
        train_op = optimizer.apply_gradients([(fed[name], variables[name]) for name in sorted(first)])
        session.run(tf1.global_variables_initializer())
        for index in range(2):
            session.run(train_op, {fed[name]: grads[name][index] for name in first})
        ended = session.run(variables)
    for name, kind in (("net/depthwise", "depthwise"), ("net/w", "dense"), ("head/w", None)):
        mean = np.mean(grads[name], axis=0)
        moved = mean if kind is None else clip(kind, first[name], mean)
        np.testing.assert_allclose(ended[name], first[name] - moved, rtol=0, atol=2e-6)


# ----------------------------------------------------------------------------------------------------------------
# Models

WORDS, SIDE, WIDTH = 7, 4, 3
RATE = 0.125  # what is not clipped has gradients of 30, and the law's tolerance is for weights of order one
LAYOUT = ["embedding", "conv2d", "depthwise", "bias", "depthwise", "conv2d", "transposed", "bias", "dense", "bias"]
FIRST = [drawn(shape, 0.5, seed) for seed, shape in enumerate([(7, 3), (2, 2, 3, 2), (2, 2, 2, 2), (4,), (2, 2, 4, 1)])]
FIRST += [drawn(shape, 0.5, seed) for seed, shape in enumerate([(1, 1, 4, 2), (2, 2, 3, 2), (3,), (3, 2), (2,)], 5)]
X, Y = np.random.RandomState(0).randint(0, WORDS - 1, (10, SIDE * SIDE)), 3.0 * drawn((10, 2))


def network():
    """Every layout: a look-up in an image of words, convolutions of all kinds, some in a model of their own."""
    inner = tf.keras.Sequential(
        [
            layers.DepthwiseConv2D(2, depth_multiplier=2, input_shape=(SIDE - 1, SIDE - 1, 2)),
            layers.SeparableConv2D(2, 2, use_bias=False),
        ]
    )
    inputs = tf.keras.Input((SIDE * SIDE,), dtype="int32")
    hidden = layers.Reshape((SIDE, SIDE, WIDTH))(layers.Embedding(WORDS, WIDTH)(inputs))
    hidden = inner(layers.Conv2D(2, 2, use_bias=False)(hidden))
    hidden = layers.GlobalAveragePooling2D()(layers.Conv2DTranspose(3, 2)(hidden))
    model = tf.keras.Model(inputs, layers.Dense(2, name="logits")(hidden))
    model.set_weights(FIRST)
    return model


def full_batch_step(excluded):
    """The weights after SGD on the NumPy-clipped gradient of the whole batch."""
    model = network()
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(X) - Y) ** 2)
    grads = [tf.convert_to_tensor(grad).numpy() for grad in tape.gradient(loss, model.trainable_variables)]
    clipped = [grad if excluded(i) else clip(LAYOUT[i], FIRST[i], grad) for i, grad in enumerate(grads)]
    assert all(
        RATE * np.abs(clip - grad).max() > 1e-3 for i, (clip, grad) in enumerate(zip(clipped, grads)) if not excluded(i)
    )
    return [weight - RATE * grad for weight, grad in zip(FIRST, clipped)]


def assert_near(ours, theirs):
    for index, (one, other) in enumerate(zip(ours, theirs)):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6, err_msg=f"{index}: {LAYOUT[index]}")


@pytest.mark.slow
@pytest.mark.law("L7")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("sparse", ["rows", "dense"])
def test_a_model_knows_its_layers_and_leaves_out_what_is_named(sparse):
    options = {"use_agc": True, "clip_factor": 0.1, "agc_exclude": ["bias", "logits"], "sparse": sparse}
    model = accum.GradientAccumulateModel.from_model(network(), 3, **options)
    model.compile(tf.keras.optimizers.SGD(RATE), "mse")
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    assert_near(model.get_weights(), full_batch_step(lambda i: LAYOUT[i] == "bias" or i >= 8))


@pytest.mark.slow
@pytest.mark.law("L7", "L11")
@pytest.mark.tf("2.2")
def test_two_replicas_know_their_layers_too():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    kernel, grads = drawn((2, 2, 3, 2)), [drawn((2, 2, 3, 2), seed=seed) for seed in (1, 2)]
    with strategy.scope():
        layer = layers.Conv2DTranspose(3, 2, name="up")
        layer.build((None, 2, 2, 2))
        layer.set_weights([kernel, np.zeros(3)])
        clipping = accum.AdaptiveClipping(0.1, exclude=["up/bias"], model=layer)
        optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps=2, transform=clipping)

    def micro_step(grad):
        half = [0.5 * grad, tf.ones([3]) / 2.0]  # as Keras scales the loss of each of two replicas
        optimizer.apply_gradients(zip(half, layer.trainable_variables))

    across = tf.function(lambda grad: strategy.run(micro_step, args=(grad,)))
    for grad in grads:
        across(tf.constant(grad))
    moved = clip("transposed", kernel, np.mean(grads, axis=0))
    np.testing.assert_allclose(layer.get_weights()[0], kernel - moved, rtol=0, atol=2e-6)
    np.testing.assert_allclose(layer.get_weights()[1], [-1.0] * 3, rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.law("L7")
@pytest.mark.tf("2.2")
def test_an_optimizer_in_a_loop_clips_as_the_model_does_also_from_its_config():
    tf.keras.backend.clear_session()  # a config knows variables by name, which TF 2.2 numbers within a session
    model = network()
    clipping = accum.AdaptiveClipping(0.1, exclude=["logits/bias"], model=model)
    made = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(RATE), accum_steps=2, transform=clipping)
    for optimizer in (made, accum.GradientAccumulateOptimizer.from_config(made.get_config())):
        model.set_weights(FIRST)
        for part in (slice(0, 6), slice(6, 10)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(X[part]) - Y[part]) ** 2)
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables), weight=len(X[part]))
        assert_near(model.get_weights(), full_batch_step(lambda i: i == 9))


def einsum_dense():
    home = layers if hasattr(layers, "EinsumDense") else getattr(layers, "experimental", None)
    return getattr(home, "EinsumDense", None)


@pytest.mark.tf("2.3", because="`EinsumDense` came with TF 2.3")
@pytest.mark.law("L7")
@pytest.mark.tf("2.2")
def test_the_equation_of_a_layer_says_its_units_and_another_transform_acts_before():
    layer = einsum_dense()("abc,cde->abde", output_shape=(None, 2, 3))
    layer.build((1, 5, 4))
    first, grad = drawn((4, 2, 3)), drawn((4, 2, 3), 0.06, seed=1)
    layer.set_weights([first])
    doubled = lambda pairs: [(2.0 * grad, var) for grad, var in pairs]
    clipping = accum.AdaptiveClipping(0.1, model=layer, before=doubled)
    ((ours, _),) = clipping([(tf.constant(grad), layer.trainable_variables[0])])
    np.testing.assert_allclose(ours.numpy(), clip("heads", first, 2.0 * grad), rtol=1e-5)


@pytest.mark.law("L7")
@pytest.mark.tf("2.2")
def test_a_function_can_leave_out():
    one, other = tf.Variable([[1.0]]), tf.Variable([[1.0]])
    clipping = accum.AdaptiveClipping(0.1, exclude=lambda var: var is other)
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps=1, transform=clipping)
    optimizer.apply_gradients([(tf.constant([[5.0]]), one), (tf.constant([[5.0]]), other)])
    np.testing.assert_allclose([one.numpy()[0, 0], other.numpy()[0, 0]], [0.9, -4.0], rtol=1e-6)


@pytest.mark.law("L17")
@pytest.mark.tf("2.2")
def test_a_name_that_means_nothing_is_an_error_in_a_model_and_a_warning_without():
    inputs = tf.keras.Input((3,))
    outputs = layers.Dense(2, name="head")(inputs)
    model = accum.GradientAccumulateModel(2, inputs=inputs, outputs=outputs, agc=True, agc_exclude=["heads"])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="found no variable named .*'heads'.*Known names: .*head/kernel"):
        model.fit(np.ones((2, 3)), np.ones((2, 2)), verbose=0)
    optimizer = accum.GradientAccumulateOptimizer("SGD", 2, transform=accum.AdaptiveClipping(exclude=["heads"]))
    with warned("found no variable named ['heads']") as said:
        for _ in range(4):
            optimizer.apply_gradients([(tf.ones([3, 2]), model.trainable_variables[0])])
    assert len(said) == 1
    for agc_exclude in ("bias", [3]):
        with pytest.raises(TypeError, match="`agc_exclude` must be a list of names"):
            accum.GradientAccumulateModel(2, inputs=inputs, outputs=outputs, agc_exclude=agc_exclude)


@pytest.mark.law("L17")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("is_shared", [False, True], ids=["apart", "shared"])
def test_names_that_mean_nothing_in_a_later_model_are_told(is_shared):
    """One `AdaptiveClipping` for several models, such as those of folds, whose layers Keras numbers."""
    clipping = accum.AdaptiveClipping(0.01, exclude=["first_head"])
    hidden = layers.Dense(4)

    def fit(name, shared):
        network = tf.keras.Sequential([tf.keras.Input((3,)), shared, layers.Dense(1, name=name)])
        model = accum.GradientAccumulateModel.from_model(network, 2, transform=clipping)
        model.compile("sgd", "mse")
        model.fit(np.ones((2, 3)), np.ones((2, 1)), batch_size=1, verbose=0)

    fit("first_head", hidden)
    fit("first_head", layers.Dense(4))
    with pytest.warns(UserWarning, match="found none of .*'first_head'.*Known names: .*second_head/kernel"):
        fit("second_head", hidden if is_shared else layers.Dense(4))


@pytest.mark.law("L17")
@pytest.mark.tf("2.2")
def test_names_of_several_models_may_be_passed_together():
    networks = [
        tf.keras.Sequential([tf.keras.Input((3,)), layers.Dense(1, name=name)])
        for name in ("first_head", "second_head")
    ]
    clipping = accum.AdaptiveClipping(0.01, exclude=["first_head", "second_head"])
    for network in networks:
        clipping.watch(network)
    with silent():
        for network in networks:
            variables = network.trainable_variables
            clipping([(tf.ones(var.shape), var) for var in variables])
