"""Losses and metrics of the models, named as the cases name them."""

import functools

import tensorflow as tf
from whole_batches import batch_dice, covariance


def softplus(y_true, y_pred):
    return tf.reduce_mean(tf.nn.softplus(-y_true * y_pred), axis=-1)


def ragged_squares(y_true, y_pred):
    """Squares where a ragged target has a value, one number for each example or time step."""
    dense, has_value = _dense(y_true, y_pred)
    return tf.reduce_mean(has_value * (dense - y_pred) ** 2, axis=-1)


def _dense(y_true, y_pred):
    """Return a target as a dense tensor, and where it has values."""
    if not isinstance(y_true, tf.RaggedTensor):
        return tf.cast(y_true, y_pred.dtype), tf.ones_like(y_pred)
    has_value = tf.cast(tf.sequence_mask(y_true.row_lengths(), y_pred.shape[1]), y_pred.dtype)
    dense = y_true.to_tensor(shape=[None] + list(y_pred.shape[1:]))
    return tf.cast(dense, y_pred.dtype), has_value if len(y_pred.shape) == 2 else has_value[:, :, None]


REDUCED = {
    "mse": tf.keras.losses.MeanSquaredError,
    "huber": tf.keras.losses.Huber,
    "binary": functools.partial(tf.keras.losses.BinaryCrossentropy, from_logits=True),
    "crossentropy": functools.partial(tf.keras.losses.CategoricalCrossentropy, from_logits=True),
}
"""Losses that can be a mean or a sum over examples."""

FUNCTIONS = {"function": softplus}
MEANS = sorted(REDUCED) + sorted(FUNCTIONS)
"""Losses that are means over examples."""

RAGGED = {"ragged": ragged_squares}
"""Losses of ragged targets, which are means over examples too."""

MEETING = {"dice": batch_dice, "covariance": covariance}
"""Losses in which examples meet."""


def loss_of(case):
    """Return a new loss."""
    name = case["loss"]
    if name in REDUCED:
        return REDUCED[name](**({"reduction": "sum"} if case["loss_reduction"] == "sum" else {}))
    return dict(FUNCTIONS, **dict(MEETING, **RAGGED))[name]


class _Mean(tf.keras.metrics.Metric):
    """A mean that is computed by code of one's own."""

    def __init__(self, name):
        super().__init__(name=name)
        self.total = self.add_weight(name="total", shape=(), initializer="zeros")
        self.count = self.add_weight(name="count", shape=(), initializer="zeros")

    def _add(self, total, count):
        self.total.assign_add(tf.cast(total, self.total.dtype))
        self.count.assign_add(tf.cast(count, self.count.dtype))

    def result(self):
        return tf.math.divide_no_nan(self.total, self.count)


class MeanDistance(_Mean):
    """The mean over examples of the distance of an output from its target."""

    def __init__(self):
        super().__init__("distance")

    def update_state(self, y_true, y_pred, sample_weight=None):
        dense, has_value = _dense(y_true, y_pred)
        distances = has_value * tf.abs(dense - y_pred)
        self._add(tf.reduce_sum(distances) / float(distances.shape[-1]), tf.shape(distances)[0])


class OfBatch(_Mean):
    """A number for each batch, in which its examples meet: the square of the mean output."""

    def __init__(self):
        super().__init__("of_batch")

    def update_state(self, y_true, y_pred, sample_weight=None):
        # Where a dataset of unknown length ends, Keras runs what depends on no data once more in a graph.
        self._add(tf.reduce_mean(y_pred) ** 2, tf.shape(y_pred)[0] >= 0)


def difference(y_true, y_pred):
    return tf.reduce_mean(tf.abs(tf.cast(y_true, y_pred.dtype) - y_pred), axis=-1)


METRICS = {"distance": MeanDistance, "of_batch": OfBatch, "function": lambda: difference}
"""How a metric of a name is made. "of_batch" is none of each example."""


def metrics_of(case):
    """Return new metrics, for one output."""
    return [METRICS[name]() for name in case["metrics"]]
