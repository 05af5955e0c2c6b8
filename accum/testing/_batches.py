"""The full batches of a check, and their micro-batches."""

import itertools

import numpy as np

from accum import _check
from accum._tf import tf


def full_batches(data, batch_size, steps):
    """Return a list of the first `steps` full batches (x, y, sample_weight), starting over when the data end."""
    batches = _batches_of_arrays(data, batch_size) if _holds_arrays(data) else _batches_given(data, batch_size)
    first = list(itertools.islice(batches, steps))
    if not first:
        raise ValueError(f"`data` must hold at least one batch. Received: {data!r}.")
    return [first[step % len(first)] for step in range(steps)]


def micro_batches(batch, accum_steps, micro_batch_size):
    """Split a full batch into `accum_steps` micro-batches, or into fewer if the batch is too small."""
    size = examples_of(batch)
    parts = min(accum_steps, -(-size // micro_batch_size))
    edges = [size * part // parts for part in range(parts + 1)]
    return [_part(batch, start, stop) for start, stop in zip(edges, edges[1:])]


def slices(batch, micro_batch_size):
    """Split a full batch into micro-batches of a size; the last one may be smaller."""
    size = examples_of(batch)
    return [_part(batch, start, min(start + micro_batch_size, size)) for start in range(0, size, micro_batch_size)]


def examples_of(batch):
    """Return the number of examples in a batch, which must be the same in all its arrays."""
    sizes = sorted({int(leaf.shape[0]) for leaf in tf.nest.flatten(batch) if leaf is not None})
    if len(sizes) != 1:
        raise ValueError(f"All arrays of `data` must hold the same number of examples. Received: {sizes}.")
    return sizes[0]


def _part(batch, start, stop):
    return tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[start:stop], batch)


def _holds_arrays(data):
    if isinstance(data, (tuple, list, dict, tf.RaggedTensor)) or hasattr(data, "__array__"):
        return True
    if not hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
        raise TypeError(f"`data` must be arrays, or an iterable of full batches. Received: {data!r}.")
    return False


def _batches_of_arrays(data, batch_size):
    whole = _as_batch(data)
    size = examples_of(whole)
    step = size if batch_size is None else _check.accum_steps(batch_size, "batch_size")
    for start in range(0, size, step or 1):
        yield _part(whole, start, min(start + step, size))


def _batches_given(data, batch_size):
    if batch_size is not None:
        raise ValueError(
            f"`batch_size` is for arrays; this `data` comes in full batches. Received: batch_size={batch_size!r}."
        )
    for element in data:
        batch = _as_batch(element)
        if examples_of(batch):
            yield batch


def _as_batch(element):
    parts = element if isinstance(element, tuple) else (element,)
    if not 1 <= len(parts) <= 3:
        raise ValueError(f"`data` must be a tuple of at most (x, y, sample_weight). Received: a tuple of {len(parts)}.")
    batch = tuple(tf.nest.map_structure(_as_array, part) for part in parts)
    if not any(leaf is not None for leaf in tf.nest.flatten(batch)):
        raise ValueError(f"`data` must hold at least one array. Received: {element!r}.")
    return batch


def _as_array(leaf):
    if leaf is None or isinstance(leaf, tf.RaggedTensor):
        return leaf
    if isinstance(leaf, tf.SparseTensor):
        raise TypeError(
            f"`data` must be dense or ragged: a sparse tensor can't be split into micro-batches. Received: {leaf!r}."
        )
    array = np.asarray(leaf)
    if array.ndim == 0:
        raise ValueError(f"The first axis of every array in `data` must be that of the examples. Received: {leaf!r}.")
    return array
