"""A made-up library for TensorFlow 1.15 and later. It depends on TensorFlow and on one other package."""

import tensorflow as tf
import toolz


def mean_in_parts(values, size):
    """Return the mean of `values`, computed by TensorFlow in parts of at most `size` numbers."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        parts = [tf.reduce_sum(tf.constant(part, tf.float64)) for part in toolz.partition_all(size, values)]
        return session.run(tf.add_n(parts)) / len(values)
