"""The full batches of a check, and their micro-batches."""

import itertools

import numpy as np

from accum import _check
from accum._tf import tf


def full_batches(data, batch_size, steps):
    """The first `steps` full batches, begun anew where the data end: a list of tuples (x, y, sample_weight)."""
    batches = _batches_of_arrays(data, batch_size) if _holds_arrays(data) else _batches_given(data, batch_size)
    found = list(itertools.islice(batches, steps))
    if not found:
        raise ValueError("`data` must hold a batch at least. Received: {!r}.".format(data))
    return [found[step % len(found)] for step in range(steps)]


def micro_batches(batch, accum_steps, micro_batch_size):
    """A full batch in parts: `accum_steps`, or fewer of that size where it is too small a batch."""
    size = examples_of(batch)
    parts = min(accum_steps, -(-size // micro_batch_size))
    edges = [size * part // parts for part in range(parts + 1)]
    return [_part(batch, start, stop) for start, stop in zip(edges, edges[1:])]


def examples_of(batch):
    """The number of examples, which every array of a batch must have."""
    sizes = sorted({int(leaf.shape[0]) for leaf in tf.nest.flatten(batch) if leaf is not None})
    if len(sizes) != 1:
        raise ValueError("All arrays of `data` must hold equally many examples. Received: {}.".format(sizes))
    return sizes[0]


def _part(batch, start, stop):
    return tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[start:stop], batch)


def _holds_arrays(data):
    if isinstance(data, (tuple, list, dict, tf.RaggedTensor)) or hasattr(data, "__array__"):
        return True
    if not hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
        raise TypeError("`data` must be arrays, or an iterable of full batches. Received: {!r}.".format(data))
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
            "`batch_size` is for arrays; these data come in full batches. Received: batch_size={!r}.".format(batch_size)
        )
    for element in data:
        batch = _as_batch(element)
        if examples_of(batch):
            yield batch


def _as_batch(element):
    parts = element if isinstance(element, tuple) else (element,)
    if not 1 <= len(parts) <= 3:
        raise ValueError("`data` must be (x, y, sample_weight) at most. Received: a tuple of {}.".format(len(parts)))
    batch = tuple(tf.nest.map_structure(_as_array, part) for part in parts)
    if not any(leaf is not None for leaf in tf.nest.flatten(batch)):
        raise ValueError("`data` must hold an array at least. Received: {!r}.".format(element))
    return batch


def _as_array(leaf):
    if leaf is None or isinstance(leaf, tf.RaggedTensor):
        return leaf
    if isinstance(leaf, tf.SparseTensor):
        raise TypeError("`data` must be dense or ragged: a sparse tensor can't be cut. Received: {!r}.".format(leaf))
    array = np.asarray(leaf)
    if array.ndim == 0:
        raise ValueError(
            "`data` must hold arrays whose first axis is that of the examples. Received: {!r}.".format(leaf)
        )
    return array
