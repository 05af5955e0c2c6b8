"""Adaptive gradient clipping: a gradient's norm, unit by unit, is held to a fraction of its parameter's norm.

Source: Brock, De, Smith, Simonyan, "High-Performance Large-Scale Image Recognition Without Normalization", 2021,
arXiv:2102.06171, equation 3, and its appendix for what a unit is: the norm is over the fan-in extent of an output unit.
The way into Keras code was shown by Sayak Paul.

A tensor does not say which of its axes number its units. `unit_axes` does; where it is silent, the rank decides:

    kernel                                    unit axes   from
    bias, gain (rank 0 or 1)                  ()          the rank
    dense [in, out], Conv1D-3D [..., in, out] (-1,)       the rank
    depthwise [..., in, multiplier]           (-2, -1)    a layer: each pair is an output channel of its own
    transposed [..., out, in]                 (-2,)       a layer
    EinsumDense                               the axes that stand in the output too, a layer's `equation`
    embedding [rows, width]                   (0,)        a layer, or a gradient that is `tf.IndexedSlices`

The authors' own code (nfnets) goes by the rank alone, and knows rank 4 as a convolution and rank 3 as a dense one of
several heads. Their depthwise kernels are [h, w, 1, channels], so that the units are the same ones. An embedding they
have none: its unit is the row, which is what a look-up gives, so a row is never scaled because of the others.
"""

from accum import _check, _tf
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


def unitwise_norm(x, *, unit_axes=None):
    """The norm of each output unit of a parameter.

    Args:
      x: float tensor.
      unit_axes: tuple of ints, the axes that number the units; the norm is over all others. None: by the rank. Rank 0
        or 1 (biases, gains): one norm for all. Rank 2 and more (dense `[in, out]`, convolutions `[..., in, out]`): one
        norm for each index of the last axis. Depthwise kernels need (-2, -1), transposed ones (-2,), embeddings (0,).

    Returns:
      Tensor that broadcasts against `x`: shape of `x` with every axis but those of length 1.

    Raises:
      ValueError: the rank of `x` is not known, or it has no such axes.
    """
    rank = x.shape.rank
    if rank is None:
        raise ValueError("The rank of a parameter must be known. Received: {!r}.".format(x))
    return compute_norm(x, axis=_others(rank, unit_axes), keepdims=True)


def adaptive_clip_grad(parameters, gradients, clip_factor=0.01, eps=1e-3, *, unit_axes=None):
    """Clip each unit's gradient g of parameter w: g * min(1, clip_factor * max(|w|, eps) / |g|).

    Args:
      parameters: list of float tensors or variables.
      gradients: list of their gradients, tensors of the same shapes, `tf.IndexedSlices` or None. Slices come from a
        look-up, whose unit is the row: they stay sparse, each row once, and no other row is read.
      clip_factor: float > 0, the largest |g| / |w| allowed.
      eps: float > 0, below which |w| is taken as eps, so that weights that are zero can grow.
      unit_axes: list of what `unitwise_norm` takes, one a parameter. None: by rank.

    Returns:
      List of the clipped gradients, None where a gradient was None.

    Raises:
      ValueError: `clip_factor` or `eps` is not positive, or the lists differ in length.

    Example:
      >>> gradients = accum.adaptive_clip_grad(
      ...     [dense.kernel, depthwise.depthwise_kernel], gradients, unit_axes=[None, (-2, -1)])
    """
    _check.positive("clip_factor", clip_factor)
    _check.positive("eps", eps)
    parameters, gradients = list(parameters), list(gradients)
    unit_axes = [None] * len(parameters) if unit_axes is None else list(unit_axes)
    if len(parameters) != len(gradients):
        raise ValueError(
            "`parameters` and `gradients` must be of one length. Received: {} and {}.".format(
                len(parameters), len(gradients)
            )
        )
    if len(unit_axes) != len(parameters):
        raise ValueError(
            "`unit_axes` must hold one entry a parameter. Received: {} for {}.".format(len(unit_axes), len(parameters))
        )
    return [_clip(*entry, clip_factor, eps) for entry in zip(parameters, gradients, unit_axes)]


def _others(rank, unit_axes):
    """The axes of a parameter over which its units' norms are taken."""
    if unit_axes is None:
        unit_axes = () if rank <= 1 else (-1,)
    units = _check.axes("unit_axes", unit_axes, rank)
    return [axis for axis in range(rank) if axis not in units]


def _clip(param, grad, unit_axes, clip_factor, eps):
    if grad is None:
        return None
    if not isinstance(grad, tf.IndexedSlices):
        param = tf.convert_to_tensor(param)
        return grad * _share(param, grad, _others(param.shape.rank, unit_axes), clip_factor, eps)
    over = _others(param.shape.rank, (0,) if unit_axes is None else unit_axes)
    if 0 in over:  # a unit reaches over rows
        return _clip(param, tf.convert_to_tensor(grad), unit_axes, clip_factor, eps)
    indices, places = tf.unique(grad.indices)  # a row that came twice has the norm of its sum
    rows = tf.math.unsorted_segment_sum(grad.values, places, tf.shape(indices)[0])
    share = _share(tf.gather(param, indices), rows, over, clip_factor, eps)
    return tf.IndexedSlices(rows * share, indices, grad.dense_shape)


def _share(param, grad, over, clip_factor, eps):
    """The factor <= 1 by which each unit's gradient is clipped."""
    norm = compute_norm(_at_least_float32(grad), over, keepdims=True)
    limit = tf.maximum(compute_norm(_at_least_float32(param), over, keepdims=True), eps) * clip_factor
    share = tf.where(norm <= limit, tf.ones_like(norm), limit / tf.maximum(norm, 1e-6))  # TF 1's does not broadcast
    return tf.cast(share, grad.dtype)


def _at_least_float32(x):
    return tf.cast(x, tf.float32) if x.dtype.size < 4 else x  # in float16 the square of 256 is infinite


def unit_axes_in(layer):
    """(variable, unit axes) of the kernels in a layer of Keras of which the rank says something else."""
    kernel = getattr(layer, "kernel", None)
    if hasattr(layer, "depthwise_kernel"):  # a separable convolution has one too
        yield layer.depthwise_kernel, (-2, -1)
    elif isinstance(layer, _tf.DEPTHWISE_CONVOLUTIONS):
        yield kernel, (-2, -1)
    if isinstance(layer, _tf.TRANSPOSED_CONVOLUTIONS):
        yield kernel, (-2,)
    if isinstance(layer, tf.keras.layers.Embedding):
        yield layer.embeddings, (0,)
    if isinstance(layer, _tf.EINSUM_LAYERS):
        operands, output = layer.equation.split("->")
        letters = operands.split(",")[1].strip()
        yield kernel, tuple(axis for axis, letter in enumerate(letters) if letter in output)
