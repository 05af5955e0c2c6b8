"""The networks: a plain one for static graphs, and a residual one of Keras with batch normalisation.

The plain one is one wide convolution, so that activations, which shrink with the batch, need more memory than weights.
Both are smooth (tanh or ELU, mean pooling): at a kink, a rounding error can flip a gradient, and two runs that are
equal in exact arithmetic would diverge.
"""

import numpy as np

from accum._tf import tf

FILTERS = 256
POOL = 2
CLASSES = 10
SIZE = 32  # to which the residual network enlarges the images
CHANNELS = 16
BLOCKS = 4  # of two convolutions each
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


def batch_norm_model(seed):
    """A residual network on enlarged images that normalises after every convolution, as networks for images do."""
    layers, random = tf.keras.layers, np.random.RandomState(seed)
    inputs = tf.keras.Input((8, 8, 1))
    hidden = layers.Activation("elu")(_normalised_convolution(layers.UpSampling2D(SIZE // 8)(inputs)))
    for _ in range(BLOCKS):
        branch = layers.Activation("elu")(_normalised_convolution(hidden))
        hidden = layers.Activation("elu")(layers.Add()([hidden, _normalised_convolution(branch)]))
    outputs = layers.Dense(CLASSES)(layers.Flatten()(layers.AveragePooling2D(SIZE // 4)(hidden)))
    model = tf.keras.Model(inputs, outputs)
    for var in model.trainable_variables:
        if len(var.shape) > 1:  # He-normal kernels, drawn by NumPy so that every TensorFlow begins with the same ones
            fan_in = int(np.prod(var.shape[:-1]))
            var.assign(random.normal(0, (2 / fan_in) ** 0.5, tuple(var.shape)).astype(np.float32))
    return model


def _normalised_convolution(images):
    convolved = tf.keras.layers.Conv2D(CHANNELS, 3, padding="same", use_bias=False)(images)
    return tf.keras.layers.BatchNormalization(momentum=0.8)(convolved)
