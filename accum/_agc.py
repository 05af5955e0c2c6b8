"""Adaptive gradient clipping: a gradient's norm, unit by unit, is held to a fraction of its parameter's norm.

Source: Brock, De, Smith, Simonyan, "High-Performance Large-Scale Image Recognition Without Normalization", 2021,
arXiv:2102.06171, equation 3. The way into Keras code was shown by Sayak Paul.
"""

from accum import _check, _config, _tf
from accum._tf import tf


def compute_norm(x, axis, keepdims):
    """The Euclidean norm of `x` over `axis`.

    Args:
      x: float tensor of any shape.
      axis: int, list of ints, or None for all axes.
      keepdims: whether reduced axes stay, with length 1.

    Returns:
      Tensor of `x`'s dtype: sqrt(sum(x^2)).
    """
    return tf.sqrt(tf.reduce_sum(tf.square(x), axis=axis, keepdims=keepdims))


def unitwise_norm(x):
    """The norm of each output unit of a parameter.

    Args:
      x: float tensor. Rank 0 or 1 (biases, gains): one norm for all. Rank 2 and more (dense `[in, out]`, convolutions
        `[..., in, out]`): one norm for each index of the last axis.

    Returns:
      Tensor that broadcasts against `x`: shape of `x` with every axis but the last of length 1, or all of them.
    """
    rank = x.shape.rank
    if rank is None:
        raise ValueError("The rank of a parameter must be known. Received: {!r}.".format(x))
    if rank <= 1:
        return compute_norm(x, axis=None, keepdims=True)
    return compute_norm(x, axis=list(range(rank - 1)), keepdims=True)


def adaptive_clip_grad(parameters, gradients, clip_factor=0.01, eps=1e-3):
    """Clip each unit's gradient g of parameter w: g * min(1, clip_factor * max(|w|, eps) / |g|).

    Args:
      parameters: list of float tensors or variables.
      gradients: list of their gradients, tensors of the same shapes, `tf.IndexedSlices` (made dense) or None.
      clip_factor: float > 0, the largest |g| / |w| allowed.
      eps: float > 0, below which |w| is taken as eps, so that weights that are zero can grow.

    Returns:
      List of the clipped gradients, None where a gradient was None.

    Raises:
      ValueError: `clip_factor` or `eps` is not positive, or the lists differ in length.
    """
    _check.positive("clip_factor", clip_factor)
    _check.positive("eps", eps)
    parameters, gradients = list(parameters), list(gradients)
    if len(parameters) != len(gradients):
        raise ValueError(
            "`parameters` and `gradients` must be of one length. Received: {} and {}.".format(
                len(parameters), len(gradients)
            )
        )
    return [_clip(param, grad, clip_factor, eps) for param, grad in zip(parameters, gradients)]


def _clip(param, grad, clip_factor, eps):
    if grad is None:
        return None
    grad = tf.convert_to_tensor(grad)
    limit = tf.maximum(unitwise_norm(tf.convert_to_tensor(param)), eps) * clip_factor
    norm = unitwise_norm(grad)
    share = tf.where(norm <= limit, tf.ones_like(norm), limit / tf.maximum(norm, 1e-6))  # TF 1's does not broadcast
    return grad * share


class ClipTransform:
    """`adaptive_clip_grad` as the `transform` of an accumulating optimizer.

    Args:
      clip_factor, eps: as for `adaptive_clip_grad`.
      before: another transform, which acts before, or None.
    """

    def __init__(self, clip_factor=0.01, eps=1e-3, before=None):
        self._clip_factor = _check.positive("clip_factor", clip_factor)
        self._eps = _check.positive("eps", eps)
        self._before = _check.callable_or_none("transform", _config.from_config("transform", before))

    def __call__(self, grads_and_vars):
        if self._before is not None:
            grads_and_vars = self._before(grads_and_vars)
        grads, variables = zip(*grads_and_vars)
        return list(zip(adaptive_clip_grad(variables, grads, self._clip_factor, self._eps), variables))

    def get_config(self):
        before = _config.to_config("transform", self._before)
        return {"clip_factor": self._clip_factor, "eps": self._eps, "before": before}


_tf.register_keras_class(ClipTransform, "accum>ClipTransform")
