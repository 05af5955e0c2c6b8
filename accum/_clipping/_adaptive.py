"""Adaptive gradient clipping: limit the gradient norm of each output unit to a fraction of the parameter norm.

Source: Brock, De, Smith, Simonyan, "High-Performance Large-Scale Image Recognition Without Normalization", 2021,
arXiv:2102.06171, equation 3. Its appendix defines a unit: the norm is over the fan-in extent of an output unit.
The Keras implementation follows the example of Sayak Paul.

The shape of a tensor does not show which axes index its units. `unit_axes` specifies them; otherwise the rank decides:

    kernel                                    unit axes   determined by
    bias, gain (rank 0 or 1)                  ()          the rank
    dense [in, out], Conv1D-3D [..., in, out] (-1,)       the rank
    depthwise [..., in, multiplier]           (-2, -1)    a layer: each pair is one output channel
    transposed [..., out, in]                 (-2,)       a layer
    EinsumDense                               the axes that also appear in the output of the layer's `equation`
    embedding [rows, width]                   (0,)        a layer, or a gradient that is `tf.IndexedSlices`

The authors' code (nfnets) uses only the rank: it treats rank 4 as a convolution and rank 3 as a dense kernel with
several heads. Its depthwise kernels are [h, w, 1, channels], which yields the same units. It has no embeddings. Here
the unit of an embedding is the row, because a look-up returns rows: no row is scaled because of other rows.
"""

from typing import Any, Iterator, List, Optional, Sequence, Tuple, Union

from accum import _check, _tf
from accum._tf import Gradient, tf

CLIP_FACTOR = 0.01
EPS = 1e-3


def compute_norm(x: tf.Tensor, axis: Union[int, Sequence[int], None], keepdims: bool) -> tf.Tensor:
    """Compute the Euclidean norm of `x` over `axis`.

    Args:
      x: float tensor of any shape.
      axis: the axis or axes to reduce, or None for all axes.
      keepdims: whether to keep reduced axes, with length 1.

    Returns:
      Tensor of `x`'s dtype: sqrt(sum(x^2)).
    """
    return tf.sqrt(tf.reduce_sum(tf.square(x), axis=axis, keepdims=keepdims))


def unitwise_norm(x: tf.Tensor, *, unit_axes: Optional[Sequence[int]] = None) -> tf.Tensor:
    """Compute the norm of each output unit of a parameter.

    Args:
      x: float tensor.
      unit_axes: the axes that index the units; the norm is taken over all other axes. None: the rank decides. Rank 0
        or 1 (biases, gains): one norm for all elements. Rank 2 or more (dense `[in, out]`, convolutions
        `[..., in, out]`): one norm for each index of the last axis. Depthwise kernels need (-2, -1), transposed
        kernels (-2,), embeddings (0,).

    Returns:
      Tensor that broadcasts against `x`: the unit axes have their length in `x`, all other axes have length 1.

    Raises:
      ValueError: the rank of `x` is unknown, or `x` does not have these axes.
    """
    rank = x.shape.rank
    if rank is None:
        raise ValueError(f"The rank of a parameter must be known. Received: {x!r}. [accum: unknown-shape]")
    return compute_norm(x, axis=_others(rank, unit_axes), keepdims=True)


def adaptive_clip_grad(
    parameters: Sequence[Any],
    gradients: Sequence[Optional[Gradient]],
    clip_factor: float = CLIP_FACTOR,
    eps: float = EPS,
    *,
    unit_axes: Optional[Sequence[Optional[Sequence[int]]]] = None,
) -> List[Optional[Gradient]]:
    """Clip the gradient g of each unit w of a parameter: g * min(1, clip_factor * max(|w|, eps) / |g|).

    Args:
      parameters: list of float tensors or variables.
      gradients: list of their gradients: tensors of the same shapes, `tf.IndexedSlices` or None. `tf.IndexedSlices`
        come from a look-up, whose unit is the row: they stay sparse, with each row once, and no other row is read.
      clip_factor: > 0, the largest allowed ratio |g| / |w|.
      eps: > 0, the lower bound for |w|, so that weights that are zero can grow.
      unit_axes: list with one entry per parameter, as for `unitwise_norm`. None: the ranks decide.

    Returns:
      List of the clipped gradients, with None where a gradient was None.

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
            f"`gradients` must be as many as `parameters`. Received: {len(parameters)} and {len(gradients)}."
        )
    if len(unit_axes) != len(parameters):
        raise ValueError(
            f"`unit_axes` must have one entry per parameter. Received: {len(unit_axes)} for {len(parameters)}."
        )
    return [_clip(*entry, clip_factor, eps) for entry in zip(parameters, gradients, unit_axes)]


def _others(rank: int, unit_axes: Optional[Sequence[int]]) -> List[int]:
    """Return the axes of a parameter over which the norms of its units are taken."""
    if unit_axes is None:
        unit_axes = () if rank <= 1 else (-1,)
    units = _check.axes("unit_axes", unit_axes, rank)
    return [axis for axis in range(rank) if axis not in units]


def _clip(
    param: Any, grad: Optional[Gradient], unit_axes: Optional[Sequence[int]], clip_factor: float, eps: float
) -> Optional[Gradient]:
    if grad is None:
        return None
    if not isinstance(grad, tf.IndexedSlices):
        param = tf.convert_to_tensor(param)
        return grad * _share(param, grad, _others(param.shape.rank, unit_axes), clip_factor, eps)
    over = _others(param.shape.rank, (0,) if unit_axes is None else unit_axes)
    if 0 in over:  # a unit spans several rows
        return _clip(param, tf.convert_to_tensor(grad), unit_axes, clip_factor, eps)
    rows = _tf.variables.summed_rows(grad)
    share = _share(tf.gather(param, rows.indices), rows.values, over, clip_factor, eps)
    return tf.IndexedSlices(rows.values * share, rows.indices, grad.dense_shape)


def _share(param: tf.Tensor, grad: tf.Tensor, over: Sequence[int], clip_factor: float, eps: float) -> tf.Tensor:
    """Compute the factor <= 1 by which the gradient of each unit is scaled."""
    norm = compute_norm(_at_least_float32(grad), over, keepdims=True)
    limit = tf.maximum(compute_norm(_at_least_float32(param), over, keepdims=True), eps) * clip_factor
    # TF 1's `where` does not broadcast, hence `ones_like`.
    share = tf.where(norm <= limit, tf.ones_like(norm), limit / tf.maximum(norm, 1e-6))
    return tf.cast(share, grad.dtype)


def _at_least_float32(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x, _tf.variables.at_least_float32(x.dtype))  # in float16, 256 squared overflows


def unit_axes_in(layer: tf.keras.layers.Layer) -> Iterator[Tuple[tf.Variable, Tuple[int, ...]]]:
    """Yield (variable, unit axes) for the kernels in a Keras layer whose units the rank does not tell."""
    kernel = getattr(layer, "kernel", None)
    if hasattr(layer, "depthwise_kernel"):  # a separable convolution has one too
        yield layer.depthwise_kernel, (-2, -1)
    elif isinstance(layer, _tf.layers.DEPTHWISE_CONVOLUTIONS):
        yield kernel, (-2, -1)
    if isinstance(layer, _tf.layers.TRANSPOSED_CONVOLUTIONS):
        yield kernel, (-2,)
    if isinstance(layer, tf.keras.layers.Embedding):
        yield layer.embeddings, (0,)
    if isinstance(layer, _tf.layers.EINSUM_LAYERS):
        operands, output = layer.equation.split("->")
        letters = operands.split(",")[1].strip()
        yield kernel, tuple(axis for axis, letter in enumerate(letters) if letter in output)
