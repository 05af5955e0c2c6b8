"""The three networks, each as one function of weights and inputs, so that every API computes the same."""

import numpy as np
import tensorflow as tf


class Mlp:
    """Four layers of 2,048 units and batches of 16: nearly all time is spent on moving weights and gradients."""

    name = "mlp"
    classes = 10
    input_dtype = "float32"

    def __init__(self, is_smoke=False, batch=None):
        self.batch = batch or (4 if is_smoke else 16)
        self.input_shape = (12,) if is_smoke else (784,)
        units = [16] if is_smoke else [2048] * 4
        sizes = [self.input_shape[0]] + units + [self.classes]
        self.shapes = [shape for pair in zip(sizes[:-1], sizes[1:]) for shape in (pair, pair[1:])]

    def logits(self, weights, x):
        pairs = list(zip(weights[::2], weights[1::2]))
        for kernel, bias in pairs[:-1]:
            x = tf.nn.relu(tf.matmul(x, kernel) + bias)
        return tf.matmul(x, pairs[-1][0]) + pairs[-1][1]

    def inputs(self, random, count):
        return random.normal(size=(count,) + self.input_shape).astype(self.input_dtype)


class Conv(Mlp):
    """A convolutional net on 32 x 32 images: many operations per weight; activations fill the memory."""

    name = "conv"

    def __init__(self, is_smoke=False, batch=None):
        self.batch = batch or (4 if is_smoke else 32)
        self.input_shape = (8, 8, 3) if is_smoke else (32, 32, 3)
        channels = [3, 4] if is_smoke else [3, 32, 64, 128]
        self.shapes = [shape for a, b in zip(channels[:-1], channels[1:]) for shape in ((3, 3, a, b), (b,))] + [
            (channels[-1], self.classes),
            (self.classes,),
        ]

    def logits(self, weights, x):
        for index in range(0, len(weights) - 2, 2):
            stride = 1 if index == 0 else 2
            x = tf.nn.conv2d(x, weights[index], strides=[1, stride, stride, 1], padding="SAME")
            x = tf.nn.relu(x + weights[index + 1])
        return tf.matmul(tf.reduce_mean(x, axis=[1, 2]), weights[-2]) + weights[-1]


class Transformer(Mlp):
    """Two transformer blocks after an embedding of 30,000 rows, whose gradient is `tf.IndexedSlices`."""

    name = "transformer"
    input_dtype = "int32"
    a_block = 6

    def __init__(self, is_smoke=False, batch=None):
        self.batch = batch or (2 if is_smoke else 8)
        self.rows, self.width, length = (50, 8, 4) if is_smoke else (30000, 128, 64)
        self.heads, blocks = (2, 1) if is_smoke else (4, 2)
        self.input_shape = (length,)
        width = self.width
        block = [(width,), (width, 3 * width), (width, width), (width,), (width, 4 * width), (4 * width, width)]
        assert len(block) == self.a_block
        self.shapes = [(self.rows, width), (length, width)] + block * blocks + [(width, self.classes)]

    def logits(self, weights, x):
        x = tf.gather(weights[0], x) + weights[1]
        for first in range(2, len(weights) - 1, self.a_block):
            scale, qkv, out, scale_2, up, down = weights[first : first + self.a_block]
            x += self._attended(self._normal(x) * (1.0 + scale), qkv, out)
            x += self._times(tf.nn.relu(self._times(self._normal(x) * (1.0 + scale_2), up)), down)
        return tf.matmul(tf.reduce_mean(x, axis=1), weights[-1])

    def inputs(self, random, count):
        # As words are: few rows are often met, most seldom.
        ranks = random.zipf(1.2, size=(count,) + self.input_shape)
        return (ranks % self.rows).astype(self.input_dtype)

    def _attended(self, x, qkv, out):
        length, width, heads = self.input_shape[0], self.width, self.heads
        parts = tf.reshape(self._times(x, qkv), [-1, length, 3, heads, width // heads])
        query, key, value = tf.unstack(tf.transpose(parts, [2, 0, 3, 1, 4]))
        scores = tf.nn.softmax(tf.matmul(query, key, transpose_b=True) * (width // heads) ** -0.5)
        mixed = tf.transpose(tf.matmul(scores, value), [0, 2, 1, 3])
        return self._times(tf.reshape(mixed, [-1, length, width]), out)

    def _times(self, x, kernel):
        rows = tf.matmul(tf.reshape(x, [-1, kernel.shape[0]]), kernel)
        return tf.reshape(rows, [-1, self.input_shape[0], int(kernel.shape[1])])

    @staticmethod
    def _normal(x):
        x -= tf.reduce_mean(x, axis=-1, keepdims=True)
        return x * tf.math.rsqrt(tf.reduce_mean(tf.square(x), axis=-1, keepdims=True) + 1e-5)


WORKLOADS = {workload.name: workload for workload in (Mlp, Conv, Transformer)}


def loss_of(workload, weights, x, y):
    """The mean cross entropy of a micro-batch."""
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=workload.logits(weights, x))
    return tf.reduce_mean(losses)


def initial_weights(workload, seed=0):
    """NumPy arrays, the same on every TensorFlow, whose own initialisers are not reproducible across versions."""
    random = np.random.RandomState(seed)
    is_kernel = lambda shape: len(shape) > 1
    scales = [np.prod(shape[:-1]) ** -0.5 if is_kernel(shape) else 0.0 for shape in workload.shapes]
    return [(random.normal(size=shape) * scale).astype("float32") for shape, scale in zip(workload.shapes, scales)]


def micro_batches(workload, count, seed=1):
    """`count` different micro-batches, a list of (x, y) as NumPy arrays."""
    random = np.random.RandomState(seed)
    made = []
    for _ in range(count):
        x = workload.inputs(random, workload.batch)
        made.append((x, random.randint(workload.classes, size=workload.batch).astype("int32")))
    return made
