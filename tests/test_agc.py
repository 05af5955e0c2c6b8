"""Adaptive gradient clipping against an independent NumPy version, on the accumulated gradient (law L7)."""

import numpy as np
import pytest
import tensorflow as tf

import accum

pytestmark = pytest.mark.keras_face

SHAPES = {
    "bias": (4,),
    "gain": (),
    "dense": (5, 3),
    "conv1d": (3, 4, 2),
    "conv2d": (3, 3, 2, 4),
    "conv3d": (2, 2, 2, 3, 4),
}


def clip(weights, grad, clip_factor, eps):
    """Brock et al. 2021, equation 3, unit by unit."""
    weights, grad = np.asarray(weights, np.float64), np.asarray(grad, np.float64)
    if weights.ndim <= 1:
        weights, grad = weights.reshape(-1, 1), grad.reshape(-1, 1)
    else:
        weights, grad = weights.reshape(-1, weights.shape[-1]), grad.reshape(-1, grad.shape[-1])
    out = grad.copy()
    for unit in range(grad.shape[1]):
        limit = clip_factor * max(np.linalg.norm(weights[:, unit]), eps)
        norm = np.linalg.norm(grad[:, unit])
        if norm > limit:
            out[:, unit] *= limit / norm
    return out


@pytest.mark.law("L7")
@pytest.mark.parametrize("scale", [1e-3, 1.0])
@pytest.mark.parametrize("kind", sorted(SHAPES))
def test_clips_as_the_paper_says(kind, scale):
    random = np.random.RandomState(0)
    shape = SHAPES[kind]
    weights = random.normal(size=shape).astype("float32")
    grad = (scale * random.normal(size=shape)).astype("float32")
    if len(shape) > 1:
        weights[..., 0] = 0.0  # a unit that is zero can still grow
    (ours,) = accum.adaptive_clip_grad([tf.constant(weights)], [tf.constant(grad)], clip_factor=0.1, eps=1e-3)
    np.testing.assert_allclose(ours.numpy(), clip(weights, grad, 0.1, 1e-3).reshape(shape), rtol=1e-5, atol=1e-9)


@pytest.mark.law("L7")
def test_missing_gradients_stay_missing():
    ours = accum.adaptive_clip_grad([tf.ones([2]), tf.ones([2])], [None, tf.ones([2])])
    assert ours[0] is None
    assert ours[1] is not None


@pytest.mark.law("L17")
def test_lists_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="one length. Received: 1 and 2"):
        accum.adaptive_clip_grad([tf.ones([2])], [None, None])


@pytest.mark.law("L7")
def test_model_clips_the_accumulated_gradient():
    random = np.random.RandomState(0)
    x, y = random.normal(size=(8, 3)).astype("float32"), 5.0 * random.normal(size=(8, 2)).astype("float32")
    first = random.normal(size=(3, 2)).astype("float32")
    inputs = tf.keras.Input((3,))
    outputs = tf.keras.layers.Dense(2, use_bias=False)(inputs)
    model = accum.GradientAccumulateModel(4, inputs=inputs, outputs=outputs, agc=True, clip_factor=0.1)
    model.compile(tf.keras.optimizers.SGD(1.0), "mse")
    model.set_weights([first])
    model.fit(x, y, batch_size=2, shuffle=False, verbose=0)
    grad = x.T @ (x @ first - y) * 2.0 / y.size
    np.testing.assert_allclose(model.get_weights()[0], first - clip(first, grad, 0.1, 1e-3), rtol=0, atol=2e-6)
