"""Models and losses in which examples meet, for the tests of law L19."""

import numpy as np
import tensorflow as tf
from versions import IS_KERAS_3

layers = tf.keras.layers
RANDOM = np.random.RandomState(0)
COUNT = 32
IMAGES = RANDOM.normal(size=(COUNT, 8, 8, 2)).astype("float32")
X, OTHER = (RANDOM.normal(size=(COUNT, 3)).astype("float32") for _ in range(2))
Y = RANDOM.normal(size=(COUNT, 2)).astype("float32")
CLASSES = RANDOM.randint(0, 3, size=COUNT)
MASKS = RANDOM.randint(0, 2, size=(COUNT, 8, 8, 1)).astype("float32")
WEIGHTS = np.linspace(0.1, 3.0, COUNT).astype("float32")
KERAS = tuple(map(int, tf.keras.__version__.split(".")[:2])) if IS_KERAS_3 else (2,)
SUMS_ACTIVITIES = (3,) <= KERAS < (3, 13)  # Keras then adds up the regularization of activities over examples
REGULARIZED = {} if SUMS_ACTIVITIES else {"activity_regularizer": "l2"}
TRACED = {"jit_compile": False} if IS_KERAS_3 else {}


def filled(model):
    """A model with weights that do not depend on TensorFlow's initialisers, and with positive variances."""
    random = np.random.RandomState(1)
    model.set_weights(
        [
            random.uniform(0.5, 1.5, weight.shape) if weight.ndim == 1 else 0.4 * random.normal(size=weight.shape)
            for weight in model.get_weights()
        ]
    )
    return model


class Towers(tf.keras.Model):
    """Two encoders of pairs. Its outputs, side by side, enter a contrastive loss."""

    def __init__(self):
        super().__init__()
        self.one, self.other = (
            tf.keras.Sequential([layers.Dense(6, activation="tanh"), layers.Dense(4)]) for _ in "ab"
        )

    def call(self, inputs):
        return tf.stack([self.one(inputs[0]), self.other(inputs[1])], axis=1)


def contrastive(_, pairs):
    """Each example against all others of the batch (CLIP)."""
    one, other = (tf.math.l2_normalize(part, axis=1) for part in tf.unstack(pairs, axis=1))
    logits = tf.matmul(one, other, transpose_b=True) / 0.2
    labels = tf.range(tf.shape(logits)[0])
    both = [tf.nn.sparse_softmax_cross_entropy_with_logits(labels, side) for side in (logits, tf.transpose(logits))]
    return 0.5 * tf.add_n(both)


def batch_dice(y_true, y_pred):
    """One minus the Dice coefficient of the whole batch."""
    overlap = 2.0 * tf.reduce_sum(y_true * y_pred) + 1.0
    return 1.0 - overlap / (tf.reduce_sum(y_true) + tf.reduce_sum(y_pred) + 1.0)


def covariance(y_true, y_pred):
    """Variance and covariance of the features over the batch (VICReg)."""
    apart = y_pred - tf.reduce_mean(y_pred, axis=0)
    matrix = tf.matmul(apart, apart, transpose_a=True) / (tf.cast(tf.shape(y_pred)[0], y_pred.dtype) - 1.0)
    variances = tf.linalg.diag_part(matrix)
    hinge = tf.reduce_mean(tf.nn.relu(2.0 - tf.sqrt(variances + 1e-4)))
    return hinge + tf.reduce_sum(matrix**2) - tf.reduce_sum(variances**2) + tf.reduce_mean((y_pred - y_true) ** 2)


def dense():
    inputs = tf.keras.Input((3,))
    return tf.keras.Model(inputs, layers.Dense(2)(layers.Dense(4, activation="tanh")(inputs)))
