"""The network: one wide convolution, so that activations, which shrink with the batch, need more memory than weights.

It is smooth (tanh, mean pooling). At a kink, a rounding error can flip a gradient, and two runs that are equal in
exact arithmetic would diverge.
"""

import numpy as np

from accum._tf import tf

FILTERS = 256
POOL = 2
CLASSES = 10
FEATURES = (8 // POOL) ** 2 * FILTERS


def initial_weights(seed):
    """Kernels (Glorot-normal) and biases (zero) of the convolution and the dense layer, float32."""
    random = np.random.RandomState(seed)
    weights = []
    for shape, fan_sum in (((3, 3, 1, FILTERS), 9 + 9 * FILTERS), ((FEATURES, CLASSES), FEATURES + CLASSES)):
        weights.append(random.normal(0, (2 / fan_sum) ** 0.5, shape).astype(np.float32))
        weights.append(np.zeros(shape[-1], np.float32))
    return weights


def graph_logits(weights, images):
    """Logits, float32 [n, 10], from plain ops."""
    kernel, bias, dense_kernel, dense_bias = weights
    hidden = tf.tanh(tf.nn.conv2d(images, kernel, strides=1, padding="SAME") + bias)
    pooled = tf.nn.avg_pool2d(hidden, POOL, POOL, padding="VALID")
    return tf.matmul(tf.reshape(pooled, [-1, FEATURES]), dense_kernel) + dense_bias


def keras_model(weights):
    """The same network as a functional Keras model."""
    layers = tf.keras.layers
    inputs = tf.keras.Input((8, 8, 1))
    hidden = layers.Conv2D(FILTERS, 3, padding="same", activation="tanh")(inputs)
    pooled = layers.Flatten()(layers.AveragePooling2D(POOL)(hidden))
    model = tf.keras.Model(inputs, layers.Dense(CLASSES)(pooled))
    model.set_weights(weights)
    return model
