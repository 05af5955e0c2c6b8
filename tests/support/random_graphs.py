"""Random graphs of TensorFlow 1: lists of steps, each a random operation on random tensors that are there already."""

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1
TABLE = np.random.RandomState(0).randn(5, 3).astype(np.float32)


def _axis(tensor, number):
    return number % tensor.shape.rank


def _last(tensor):
    length = tensor.shape.as_list()[-1]
    assert length is not None
    return length


def _loop(tensor, number):
    def again(step, value):
        return step + 1, tf.tanh(value) if number % 2 else value - tf.reduce_mean(value, _axis(value, number))

    return tf1.while_loop(lambda step, _: step < 3, again, [tf.constant(0), tensor])[1]


def _conditional(tensor, number):
    is_large = tf.reduce_sum(tensor) > 0 if number % 2 else tf1.placeholder_with_default(True, [])
    return tf1.cond(is_large, lambda: tf.tanh(tensor), lambda: tensor * 0.5)


def _choose(one, other, number):
    return tf1.where(one > 0, one, other) if number % 2 else tf.where(one > 0, one, tf.zeros_like(one))


def diagonal(tensor, _, number):
    return tf.linalg.diag(tensor) if number % 2 else tf.linalg.diag_part(tensor)


OPERATIONS = [
    lambda a, b, n: tf.nn.relu(a),
    lambda a, b, n: tf.tanh(a) - 0.5,
    lambda a, b, n: a + b,
    lambda a, b, n: a * b,
    lambda a, b, n: tf.maximum(a, b[..., :1]),
    lambda a, b, n: tf.tensordot(a, tf.constant(np.ones([_last(a), 1 + n % 3], np.float32)), 1),
    lambda a, b, n: tf.matmul(a, b, transpose_a=bool(n & 1), transpose_b=bool(n & 2)),
    lambda a, b, n: tf.transpose(a, np.roll(np.arange(a.shape.rank), n)),
    lambda a, b, n: tf.reshape(a, [-1, _last(a)]),
    lambda a, b, n: tf.reshape(a, [tf.shape(a)[0], -1]),
    lambda a, b, n: tf.reshape(a, [-1]),
    lambda a, b, n: tf.reshape(a, tf.shape(b)),
    lambda a, b, n: tf.reshape(a, [-1, 2, 2]),
    lambda a, b, n: tf.expand_dims(a, n % (a.shape.rank + 1)),
    lambda a, b, n: tf.squeeze(a, [_axis(a, n)]),
    lambda a, b, n: tf.reduce_sum(a, _axis(a, n), keepdims=bool(n & 1)),
    lambda a, b, n: tf.reduce_mean(a, _axis(a, n), keepdims=bool(n & 2)),
    lambda a, b, n: tf.reduce_max(a, _axis(a, n)),
    lambda a, b, n: a - tf.reduce_mean(a, _axis(a, n), keepdims=True),
    lambda a, b, n: tf.nn.softmax(a, _axis(a, n)),
    lambda a, b, n: tf.concat([a, b], _axis(a, n)),
    lambda a, b, n: tf.stack([a, b], _axis(a, n)),
    lambda a, b, n: tf.split(a, 2, _axis(a, n))[n % 2],
    lambda a, b, n: a[1:] if n % 2 else a[..., 1:],
    lambda a, b, n: a[:, 0] if n % 2 else a[..., tf.newaxis, :],
    lambda a, b, n: tf.roll(a, 1, _axis(a, n)),
    lambda a, b, n: tf.cumsum(a, _axis(a, n)),
    lambda a, b, n: tf.reverse(a, [_axis(a, n)]),
    lambda a, b, n: tf.tile(a, np.roll([2] + [1] * (a.shape.rank - 1), n)),
    lambda a, b, n: tf.gather(a, [1, 0], axis=_axis(a, n)),
    lambda a, b, n: tf.gather(tf.constant(TABLE), tf.cast(tf.abs(a), tf.int32) % 5),
    lambda a, b, n: tf.gather(a, tf.cast(tf.abs(b), tf.int32) % 2, batch_dims=1),
    lambda a, b, n: tf.one_hot(tf.cast(tf.abs(a), tf.int32) % 3, 3, axis=n % (a.shape.rank + 1)),
    lambda a, b, n: _choose(a, b, n),
    lambda a, b, n: tf.pad(a, np.roll([[0, 0]] * (a.shape.rank - 1) + [[1, 0]], n, 0)),
    lambda a, b, n: tf.fill(tf.shape(a), 0.5),
    lambda a, b, n: tf.zeros_like(a) + tf.cast(tf.shape(b)[0], tf.float32),
    lambda a, b, n: a * tf.cast(tf.range(tf.shape(a)[0]), tf.float32)[:, tf.newaxis],
    lambda a, b, n: tf.nn.top_k(a, 1 + n % 2)[0],
    lambda a, b, n: tf.cast(tf.argmax(a, _axis(a, n)), tf.float32),
    lambda a, b, n: tf.einsum("ij,kj->ik" if n % 2 else "ij,ik->jk", a, b),
    lambda a, b, n: tf.math.unsorted_segment_sum(a, tf.cast(tf.abs(b), tf.int32) % 3, 3),
    lambda a, b, n: tf.boolean_mask(a, tf.reshape(b, [-1]) > 0),
    diagonal,
    lambda a, b, n: _loop(a, n),
    lambda a, b, n: _conditional(a, n),
    lambda a, b, n: tf.function(lambda c: tf.tanh(c) + c)(a) if hasattr(tf, "function") else a,
    lambda a, b, n: tf.broadcast_to(a, tf.shape(b)),
    lambda a, b, n: tf.gradients(tf.reduce_sum(tf.square(b)), a)[0],
]


def build(steps, operations=OPERATIONS):
    """Return (the batch, all tensors); a step that can't be built is left out.

    Args:
      steps: list of (number of an operation, numbers of two tensors, counted from the last one, any number).
      operations: functions of two tensors and a number.
    """
    x, y = (tf1.placeholder(tf.float32, [None, *shape]) for shape in ([4], [2, 2]))
    tensors = [x, y, tf.constant(TABLE[:, :2]), tf.constant(np.ones([1, 4], np.float32))]
    for operation, first, second, number in steps:
        one, other = tensors[-1 - first % len(tensors)], tensors[-1 - second % len(tensors)]
        try:
            made = operations[operation](one, other, number)
            assert made is not None and made.shape.rank is not None and 0 < made.shape.rank < 5
            tensors.append(made)
        except (AssertionError, IndexError, TypeError, ValueError, tf.errors.InvalidArgumentError):
            continue
    return [x, y], tensors


def values(count, changed=None):
    """Return values of the batch with `count` examples, of which one may be changed."""
    random = np.random.RandomState(1)
    found = [random.randn(count, *shape).astype(np.float32) for shape in ([4], [2, 2])]
    if changed is not None:
        for value in found:
            value[changed] = random.randn(*value.shape[1:])
    return found
